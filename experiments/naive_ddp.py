"""What does naive DDP cost over a slow and a fast link, and how much do buckets save? Two ranks over emulated links, whose
rates follow from the time that a rank computes on this machine."""
from dev.lib import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["ddp"]
TITLE = "What does naive DDP cost over a slow and a fast link?"
QUESTION = """Naive DDP begins to sum gradients when the backward pass has ended, so ranks wait for every byte. With buckets
they wait only for the last bucket. How much of a step does each way expose over a slow link such as PCIe, and over a fast one
such as NVLink?"""
PREDICTION = """If a rank computes for a time of 1 and sends for c, the naive way exposes c / (1 + c) of the step. With buckets,
c is the time of the last bucket, which is complete only when the backward pass ends: the embeddings and block 0's attention, 12
% of the bytes. For `build/plan --model gpt2 --ranks 4 --seq-len 1024 --batch-size 4`, c is 0.31 over PCIe (`--gpu rtx4090`) and
0.064 over NVLink (`--gpu a100-80`). The emulated links have the rates that make c 0.32 and 0.073 for the first run, so the
naive way should expose 24 % and 6.8 %."""
NOTES = """Buckets hide all communication except the last bucket's, and the formula gives that part for any link. The time spent
waiting for a late rank does not count as exposed. [Chapter 2](../../doc/02_ddp.md#naive-against-bucketed-two-timelines) has the
timelines."""
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
          "exposed / (computing + exposed)": exposed, "predicted": lambda d, run: rate(d, run) and formula(d, run),
          "step time, buckets = 1": lambda d, run: d.beside(run, run.replace("naive", "bucketed"))}
PLOT = "exposed communication, as a share of computing and exposed", share, percent


def short(d):
    ways = [(link, *(exposed(d, f"{link}-{mode}") for mode in ("naive", "bucketed"))) for link in LINKS]
    return " ".join("Over a {} link, {} of a step is exposed, and {} with buckets.".format(*way) for way in ways)


def bytes_only(d): yield f"A rank sends {d.size('own-naive', 'sent')} per step either way."


def answer(d):
    for link in LINKS:
        naive, bucketed = f"{link}-naive", f"{link}-bucketed"
        longer = d.longer(naive, bucketed, "A naive step")
        yield (f"Over the {link} link ({rate(d, naive)} Gbit/s), the naive way exposes {exposed(d, naive)} of a step (predicted: "
               f"{formula(d, naive)}), and buckets expose {exposed(d, bucketed)} (predicted: {formula(d, bucketed)}).{longer}")
