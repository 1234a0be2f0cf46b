"""What does it cost to keep shards on the host (--cpu-offload), all or all but parameters, alone and with recomputation? FSDP on
two ranks; where host and device are one memory, also over a link between them that is emulated (--emulate-host-link)."""
from dev.lib import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["fsdp"]
TITLE = "What does offloading cost?"
QUESTION = """With `--cpu-offload all` a rank's shards of parameters, gradients and moments are on the host, and AdamW runs there. With
`optimizer` the device keeps a copy of the parameters. How much device memory does each free, and how much longer does a step take?"""
NOTES = "[Chapter 4](../../doc/04_fsdp.md#offload) says what is copied when."
WORDS = {"device": "shards on the device", "optimizer": "all but parameters on the host", "host": "shards on the host",
         "recomputed": "shards on the host and blocks recomputed"}
RUNS, COLUMNS = "", {"on the host": "host"}
SPEEDS = {"time of a step": lambda d, run: d.beside(run, "device")}


def measure(x):
    model = f"{SMALL} --batch-size 2 --seq-len 16 --steps 3" if x.quick else "--model d6 --batch-size 8 --seq-len 64 --steps 13"
    ways = {"device": "--recompute none", "optimizer": "--recompute none --cpu-offload optimizer",
            "host": "--recompute none --cpu-offload all", "recomputed": "--recompute block --cpu-offload all"}
    for _ in x.in_turns():
        for way, options in ways.items(): x.run(way, 2, "fsdp", DATA, model, options)
        if x.device != "cpu": continue # a GPU has such a link
        for way in "optimizer", "host": x.run(f"link-{way}", 2, "fsdp", DATA, model, ways[way], "--emulate-host-link 2")


def has_link(d): return d.speed and d.header["device"] == "cpu"
def rate(d): return d.option("link-host", "--emulate-host-link") + " Gbit/s"
def words(d, run): return WORDS[run.removeprefix("link-")] + (f", over {rate(d)}" if run.startswith("link-") else "")


def plot(d):
    return {"title": "device memory of a rank, MB", "rows": [(WORDS[run], d.value(run, "memory") / 1e6, d.size(run))
                                                             for run in WORDS]}


def short(d):
    kept = ", ".join(percent(d.share(run, "device", "memory")) for run in ("optimizer", "host", "recomputed"))
    steps = " and ".join(f"{d.ratio(f'link-{run}', 'device', 'step_ms')[0]:.2f}"
                         for run in ("optimizer", "host")) if has_link(d) else ""
    return f"A rank keeps {kept} of the device memory: without all but parameters, without shards, and with recomputed blocks." + (
        f" Over a link of {rate(d)} a step takes {steps} times as long with the first two." if steps else "")


def answer(d):
    for run in "optimizer", "host", "recomputed":
        yield (f"With {WORDS[run]} a rank keeps {d.size(run)} on the device, which is {percent(d.share(run, 'device', 'memory'))} "
               f"of {d.size('device')}, and {d.size(run, 'host')} on the host.{d.longer(run, 'device')}")
    if d.header["device"] == "cpu":
        yield ("This ran on a CPU, where host and device are the same memory: a copy between them stays within it, and the time of "
               "PCIe is missing.")
    if has_link(d):
        optimizer, host = (d.beside(f"link-{run}", "device") for run in ("optimizer", "host"))
        yield (f"Over an emulated link of {rate(d)} each way a step takes {optimizer} times as long with {WORDS['optimizer']}, "
               f"and {host}"
               f" times with {WORDS['host']}.")
