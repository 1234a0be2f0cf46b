"""What does it cost to keep shards on the host (--cpu-offload optimizer and all), with and without recomputation? FSDP on two
ranks. Where host and device share one memory, it also runs over an emulated link between them (--emulate-host-link)."""
from dev.lib import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["fsdp"]
TITLE = "What does offloading cost?"
QUESTION = """With `--cpu-offload all` a rank keeps its shards of parameters, gradients and moments on the host, where AdamW
runs. With `--cpu-offload optimizer` the device also keeps a copy of its shard of the parameters. How much device memory does
each free, and how much longer does a step take?"""
PREDICTION = """On two ranks in fp32, the shards take 2 bytes per parameter for parameters, 2 for gradients and 4 for moments.
With 10.8 million parameters, `all` should free 86.6 MB of the device's memory, and `optimizer` 64.9 MB. Recomputing blocks also
frees most of the activations. The time depends on the link between host and device."""
NOTES = """Memory follows from formulas, so a run that keeps any other number of bytes fails. A step copies the same bytes for
any batch, so offload is cheap if a step computes for long. [Chapter 4](../../doc/04_fsdp.md#offload) lists all copies, and
makes the link so slow that the cost shows."""
WORDS = {"device": "no offload", "optimizer": "--cpu-offload optimizer", "host": "--cpu-offload all",
         "recomputed": "--cpu-offload all --recompute block"}
RUNS, COLUMNS = "", {"on the host": "host"}
SPEEDS = {"step time": lambda d, run: d.beside(run, "device")}


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
    return {"title": "device memory per rank, MB", "rows": [(WORDS[run], d.value(run, "memory") / 1e6, d.size(run))
                                                             for run in WORDS]}


def short(d):
    optimizer, host, recomputed = (percent(d.share(run, "device", "memory")) for run in ("optimizer", "host", "recomputed"))
    steps = " and ".join(f"{d.ratio(f'link-{run}', 'device', 'step_ms')[0]:.2f}"
                         for run in ("optimizer", "host")) if has_link(d) else ""
    return (f"`--cpu-offload optimizer` leaves {optimizer} of the device's memory in use, `all` {host}, and `all` with recomputed "
            f"blocks {recomputed}.") + (
        f" Over a link of {rate(d)}, a step takes {steps} times as long with the first two." if steps else "")


def answer(d):
    for run in "optimizer", "host", "recomputed":
        yield (f"With `{WORDS[run]}`, a rank keeps {d.size(run)} on the device instead of {d.size('device')} "
               f"({percent(d.share(run, 'device', 'memory'))}), and {d.size(run, 'host')} on the host."
               f"{d.longer(run, 'device')}")
    if d.header["device"] == "cpu":
        yield "On a CPU, host and device share one memory, so copies between them do not cross PCIe."
    if has_link(d):
        optimizer, host = (d.beside(f"link-{run}", "device") for run in ("optimizer", "host"))
        yield (f"Over an emulated link of {rate(d)} each way, a step takes {optimizer} times as long with "
               f"`{WORDS['optimizer']}`, and {host} times with `{WORDS['host']}`.")
