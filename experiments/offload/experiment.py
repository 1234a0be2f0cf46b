"""What does it cost to keep shards on the host (--cpu-offload), alone and with recomputation? FSDP on two ranks."""
from report import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["fsdp"]
TITLE = "What does offloading cost?"
QUESTION = """With `--cpu-offload` a rank's shards of parameters, gradients and moments are on the host, and AdamW runs there.
How much device memory does that free, and how much longer does a step take?"""
NOTES = "[Chapter 4](../../doc/04_fsdp.md#offload) says what is copied when."
WORDS = {"device": "shards on the device", "host": "shards on the host", "recomputed": "shards on the host and blocks recomputed"}
RUNS, COLUMNS = "", {"on the host": "host"}
SPEEDS = {"time of a step": lambda d, run: d.beside(run, "device")}
PLOT = "device memory of a rank, MB", "memory", 1e6


def runs(x):
    model = f"{SMALL} --batch-size 2 --seq-len 16 --steps 3" if x.quick else "--model d6 --batch-size 8 --seq-len 64 --steps 13"
    for _ in x.in_turns():
        x.run("device", 2, "fsdp", DATA, model, "--recompute none")
        x.run("host", 2, "fsdp", DATA, model, "--recompute none --cpu-offload")
        x.run("recomputed", 2, "fsdp", DATA, model, "--recompute block --cpu-offload")


def short(d):
    host, recomputed = (percent(d.share(run, "device", "memory")) for run in ("host", "recomputed"))
    steps = [f"{d.ratio(run, 'device', 'step_ms')[0]:.2f}" for run in ("host", "recomputed")] if d.speed else []
    return f"A rank keeps {host} of the device memory, and {recomputed} with recomputed blocks." + (
        f" A step takes {steps[0]} and {steps[1]} times as long." if steps else "")


def answer(d):
    for run in "host", "recomputed":
        yield (f"With {WORDS[run]} a rank keeps {d.size(run)} on the device, which is {percent(d.share(run, 'device', 'memory'))} of "
               f"{d.size('device')}, and {d.size(run, 'host')} on the host.{d.longer(run, 'device')}")
    if d.header["device"] == "cpu":
        yield ("This ran on a CPU, where host and device are the same memory: a copy between them stays within it, and the time of "
               "PCIe is missing.")
