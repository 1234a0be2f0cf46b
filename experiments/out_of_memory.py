"""What can FSDP train where DDP is out of memory? Two ranks that may use 0.3 GB each (--memory-limit): a model that fits DDP, one
of twice the depth, one of three times, and one of eight times with shards on the host."""
import re
from dev.lib import count, no_difference, size, times

ROUNDS, NEEDS = 5, ["ddp", "fsdp"]
TITLE = "What does FSDP train where DDP is out of memory?"
QUESTION = "Two ranks may use a fixed amount of memory each, as if that were their device's. Which models fit DDP, and which FSDP?"
NOTES = """A larger model computes more for each token, so its tokens per second are fewer for that reason alone. [Chapter
4](../../doc/04_fsdp.md#a-model-that-ddp-has-no-memory-for) has the same on four ranks."""
WORDS = {"ddp-1": "DDP, the small model", "fsdp-1": "FSDP, the small model", "ddp-2": "DDP, twice the depth",
         "fsdp-2": "FSDP, twice the depth", "fsdp-3": "FSDP, three times the depth", "fsdp-8": "FSDP, eight times, on the host"}
FIRST = {"parameters": lambda d, run: count(d.value(run, "parameters"))}
COLUMNS = {"on the host": lambda d, run: d.size(run, "host") if d.value(run, "host") else ""}
SPEEDS = {"beside DDP with the small model": lambda d, run: d.beside(run, "ddp-1", "tokens_per_s")}


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
    return f"With {size(1e9 * limit(d))} on each rank DDP trains {ddp} parameters, FSDP {fsdp}, and with shards on the host {host}."


def answer(d):
    parameters = {run: count(d.value(run, "parameters")) for run in WORDS if not d.refused(run)}
    memory = {run: d.size(run) for run in parameters}
    yield (f"A rank may use {size(1e9 * limit(d))}. A model of {parameters['ddp-1']} parameters fits both: DDP keeps "
           f"{memory['ddp-1']} of it on a rank, and FSDP {memory['fsdp-1']}.")
    why = d.refused("ddp-2")
    ends = f'ends with "{re.sub(";.*", "", why)}"' if why else "still fits"
    yield f"With {parameters['fsdp-2']} parameters DDP {ends}. FSDP keeps {memory['fsdp-2']}."
    yield (f"FSDP also trains {parameters['fsdp-3']} parameters in {memory['fsdp-3']}, and with shards on the host "
           f"{parameters['fsdp-8']} in {memory['fsdp-8']}, and {d.size('fsdp-8', 'host')} there.")
    if d.speed:
        speed = d.ratio("fsdp-1", "ddp-1", "tokens_per_s")
        yield f"Where both fit, FSDP reaches {times(speed)} times DDP's tokens per second.{no_difference(speed)}"


def plot(d):
    memory = {run: 0 if d.refused(run) else d.value(run, "memory") for run in d.runs()}
    return {"title": "memory of a rank, MB", "mark": (1e3 * limit(d), "limit"),
            "rows": [(WORDS[run], b / 1e6, size(b) if b else "out of memory") for run, b in memory.items()]}
