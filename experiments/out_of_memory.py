"""What can FSDP train where DDP is out of memory? Two ranks that may use 0.3 GB each (--memory-limit): a model that fits DDP, one
of twice the depth, one of three times, and one of eight times with shards on the host."""
import re
from dev.lib import count, no_difference, size, times

ROUNDS, NEEDS = 5, ["ddp", "fsdp"]
TITLE = "What does FSDP train where DDP is out of memory?"
QUESTION = """Two ranks may use a fixed amount of memory each, as if they were small devices. Which models fit with DDP, and
which with FSDP?"""
PREDICTION = """In fp32 the state takes 16 bytes per parameter, so 300 MB cannot hold DDP with more than 18.8 million
parameters. Two ranks of FSDP keep 8 bytes per parameter each, and can train nearly twice as many. With shards on the host and
recomputed blocks, the device needs little more than buffers for a few blocks, so depth hardly matters."""
NOTES = """FSDP's limit grows with the number of ranks, and offload moves it to the host's memory. A larger model computes more
per token, which by itself lowers its tokens per second. [Chapter 4](../../doc/04_fsdp.md#a-model-that-ddp-has-no-memory-for)
repeats this on four ranks."""
WORDS = {"ddp-1": "DDP, the small model", "fsdp-1": "FSDP, the small model", "ddp-2": "DDP, twice the depth",
         "fsdp-2": "FSDP, twice the depth", "fsdp-3": "FSDP, three times the depth", "fsdp-8": "FSDP, eight times, on the host"}
FIRST = {"parameters": lambda d, run: count(d.value(run, "parameters"))}
COLUMNS = {"on the host": lambda d, run: d.size(run, "host") if d.value(run, "host") else ""}
SPEEDS = {"relative to DDP, the small model": lambda d, run: d.beside(run, "ddp-1", "tokens_per_s")}


def measure(x):
    shape, rest, limit = (("--channels 32 --heads 2", "--seq-len 16 --batch-size 1 --steps 3", 0.0085) if x.quick else
                          ("--channels 256 --heads 4", "--seq-len 64 --batch-size 1 --steps 13", 0.3))
    if x.device != "cpu": limit = 0.0386 if x.quick else 0.33 # matrix products have a workspace of 32 MiB there
    for _ in x.in_turns():
        for name in WORDS:
            program, times_deep = name.split("-")
            x.run(name, 2, program, shape, f"--layers {12 * int(times_deep)}", rest, f"--memory-limit {limit}",
                  "--recompute block --cpu-offload all" if name == "fsdp-8" else "", refused=name == "ddp-2")


def limit(d): return float(d.option("ddp-1", "--memory-limit"))


def short(d):
    ddp, fsdp, host = (count(d.value(run, "parameters")) for run in ("ddp-1", "fsdp-3", "fsdp-8"))
    return f"With {size(1e9 * limit(d))} per rank, DDP trains {ddp} parameters, FSDP {fsdp}, and FSDP with offload {host}."


def answer(d):
    parameters = {run: count(d.value(run, "parameters")) for run in WORDS if not d.refused(run)}
    memory = {run: d.size(run) for run in parameters}
    yield (f"A rank may use {size(1e9 * limit(d))}. Both programs train {parameters['ddp-1']} parameters: DDP in {memory['ddp-1']} "
           f"per rank, and FSDP in {memory['fsdp-1']}.")
    why = d.refused("ddp-2")
    ends = f'ends with "{re.sub(";.*", "", why)}"' if why else "still fits"
    yield f"With {parameters['fsdp-2']} parameters DDP {ends}. FSDP takes {memory['fsdp-2']}."
    yield (f"FSDP also trains {parameters['fsdp-3']} parameters in {memory['fsdp-3']}. With shards on the host it trains "
           f"{parameters['fsdp-8']} in {memory['fsdp-8']}, plus {d.size('fsdp-8', 'host')} of the host's memory.")
    if d.speed:
        speed = d.ratio("fsdp-1", "ddp-1", "tokens_per_s")
        yield f"With the small model, FSDP reaches {times(speed)} times DDP's tokens per second.{no_difference(speed)}"


def plot(d):
    memory = {run: 0 if d.refused(run) else d.value(run, "memory") for run in d.runs()}
    return {"title": "memory per rank, MB", "mark": (1e3 * limit(d), "limit"),
            "rows": [(WORDS[run], b / 1e6, size(b) if b else "out of memory") for run, b in memory.items()]}
