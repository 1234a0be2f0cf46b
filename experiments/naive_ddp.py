"""What does naive DDP cost over a slow and a fast link, and what of it do buckets save? Two ranks over links that are emulated, at
rates that follow from how long a rank computes here."""
from dev.lib import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["ddp"]
TITLE = "What does naive DDP cost over a slow and a fast link?"
QUESTION = """Naive DDP sums gradients when the backward pass has ended, so a rank waits for all bytes. With buckets it waits only
for those that are ready too late. How much of a step is that over a link like a GPU's PCIe, and over one like NVLink?"""
NOTES = """By `build/plan --model gpt2 --ranks 4 --seq-len 1024 --batch-size 4` all gradients take 0.31 of the computing over PCIe
(`--gpu rtx4090`), and 0.064 over NVLink (`--gpu a100-80`). The links here have the rates at which they take 0.32 and 0.073 of the
first run's computing. The formula: where a rank computes for 1 and sends for c, the naive way exposes c / (1 + c). For buckets c is
the last one's, which is complete only when the backward pass ends: the embeddings and block 0's attention, 12 % of the bytes.
Waiting for a late rank does not count. [Chapter 2](../../doc/02_ddp.md#naive-against-bucketed-two-timelines) has the timelines."""
LINKS = {"slow": 0.32, "fast": 0.073} # bytes / rate, of the computing
LAST = (4 * 256**2 + 15 * 256 + (384 + 128) * 256) / 3290624 # of the parameters, those in the last of the buckets of 2 MiB


def measure(x):
    model = f"{SMALL} --seq-len 16 --batch-size 2 --steps 3" if x.quick else "--model d4 --seq-len 128 --batch-size 16 --steps 12"
    for _ in x.in_turns():
        for link in "own", *LINKS:
            for mode in "naive", "bucketed":
                slower = f"--comm mpi --emulate-link {chosen(x.d.first('own-naive'), link)}" if link in LINKS else ""
                x.run(f"{link}-{mode}", 2, "ddp", DATA, model, f"--bucket-mb 2 --ddp {mode}", slower)


def chosen(own, link):
    """Gbit/s; any with --no-speed."""
    return f"{8e-6 * own['sent'] / (LINKS[link] * own.get('shares', {'computing': 1000})['computing']):.3g}"


def rate(d, run): return d.option(run, "--emulate-link")
def words(d, run): return f"{run.split('-')[1]}, {f'{rate(d, run)} Gbit/s' if rate(d, run) else 'own link'}"
def sending(d, run): return 8e-6 * d.value(run, "sent") / float(rate(d, run)) # ms
def share(d, run): return 1 - d.value(run, "efficiency_exposed")
def exposed(d, run): return percent(share(d, run))


def formula(d, run):
    c = sending(d, run) / d.value(run, "shares/computing") * (LAST if "bucketed" in run else 1)
    return percent(c / (1 + c))


SPEEDS = {"computing, ms": lambda d, run: f"{d.value(run, 'shares/computing'):.1f}",
          "bytes / rate, ms": lambda d, run: rate(d, run) and f"{sending(d, run):.1f}",
          "exposed / (computing + exposed)": exposed, "by the formula": lambda d, run: rate(d, run) and formula(d, run),
          "time of a step, beside buckets": lambda d, run: d.beside(run, run.replace("naive", "bucketed"))}
PLOT = "exposed communication, of computing and exposed", share, percent


def short(d):
    ways = [(link, *(exposed(d, f"{link}-{mode}") for mode in ("naive", "bucketed"))) for link in LINKS]
    return " ".join("Over a {} link {} of a step are exposed, and {} with buckets.".format(*way) for way in ways)


def bytes_only(d): yield f"A rank sends {d.size('own-naive', 'sent')} in a step either way."


def answer(d):
    for link in LINKS:
        naive, bucketed = f"{link}-naive", f"{link}-bucketed"
        longer = d.longer(naive, bucketed, "A naive step")
        yield (f"Over the {link} link, {rate(d, naive)} Gbit/s, the naive way exposes {exposed(d, naive)} of a step, by the "
               "formula "
               f"{formula(d, naive)}. Buckets expose {exposed(d, bucketed)}, by the formula {formula(d, bucketed)}.{longer}")
