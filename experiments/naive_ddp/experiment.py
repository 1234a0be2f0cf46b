"""What does naive DDP cost over a slow and a fast link, and what of it do buckets save? Two ranks over links that are emulated, at
rates that follow from how long a rank computes here."""
import re
from report import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["ddp"]
TITLE = "What does naive DDP cost over a slow and a fast link?"
QUESTION = """Naive DDP sums gradients when the backward pass has ended, so a rank waits for all bytes. With buckets it waits only
for those that are ready too late. How much of a step is that where a link is slow beside the processors, as PCIe is beside a GPU,
and where it is fast, as NVLink is?"""
NOTES = """`build/plan --model gpt2 --ranks 4 --seq-len 1024 --batch-size 4` says what GPUs would do: with `--gpu rtx4090`, over PCIe,
all gradients take 0.32 of the computing, and with `--gpu a100-80`, over NVLink, 0.073. The links here have the rates at which they
take these shares of the first run's computing. The formula: where a rank computes for 1 and sends for c, the naive way exposes c /
(1 + c). For buckets c is the last one's, which is complete only when the backward pass ends: it has the embeddings and block 0's
attention, 12 % of the bytes. Waiting for a rank that is late is not counted as exposed. [Chapter
2](../../doc/02_ddp.md#naive-against-bucketed-two-timelines) has the timelines."""
LINKS = {"slow": 0.32, "fast": 0.073} # bytes / rate, of the computing
LAST = (4 * 256**2 + 15 * 256 + (384 + 128) * 256) / 3290624 # of the parameters, those in the last of the buckets of 2 MiB
COLUMNS = {}


def runs(x):
    model = f"{SMALL} --seq-len 16 --batch-size 2 --steps 3" if x.quick else "--model d4 --seq-len 128 --batch-size 16 --steps 12"
    for _ in x.in_turns():
        for link in "own", *LINKS:
            for mode in "naive", "bucketed":
                slower = f"--comm mpi --emulate-link {chosen(x.d.first('own-naive'), link)}" if link in LINKS else ""
                x.run(f"{link}-{mode}", 2, "ddp", DATA, model, f"--bucket-mb 2 --ddp {mode}", slower)


def chosen(own, link):
    """Gbit/s."""
    computing = own["shares"]["computing"] if "shares" in own else 1000 # with --no-speed
    return f"{8e-6 * own['sent'] / (LINKS[link] * computing):.3g}"


def rate(d, run): return re.search(r"--emulate-link (\S+)|$", d.first(run)["options"])[1]
def words(d, run): return f"{run.split('-')[1]}, {f'{rate(d, run)} Gbit/s' if rate(d, run) else 'own link'}"
def sending(d, run): return 8e-6 * d.value(run, "sent") / float(rate(d, run)) # ms
def exposed(d, run): return percent(1 - d.value(run, "efficiency_exposed"))


def formula(d, run):
    c = sending(d, run) / d.value(run, "shares/computing") * (LAST if "bucketed" in run else 1)
    return percent(c / (1 + c))


def if_emulated(text): return lambda d, run: text(d, run) if rate(d, run) else ""
def ms(key): return lambda d, run: f"{d.value(run, key):.1f}"
SPEEDS = {"computing, ms": ms("shares/computing"), "bytes / rate, ms": if_emulated(lambda d, run: f"{sending(d, run):.1f}"),
          "exposed, ms": ms("shares/all-reduce"), "exposed / (computing + exposed)": exposed, "by the formula": if_emulated(formula),
          "time of a step, beside buckets": lambda d, run: d.beside(run, run.replace("naive", "bucketed"))}


def short(d):
    if not d.speed: return "Bytes are the same."
    return " ".join(f"Over a {link} link {exposed(d, f'{link}-naive')} of a step are exposed, and {exposed(d, f'{link}-bucketed')} "
                    "with buckets." for link in LINKS)


def answer(d):
    if not d.speed: yield f"Both ways send {d.size('own-naive', 'sent')} and keep {d.size('own-naive')} per rank."
    for link in LINKS if d.speed else ():
        naive, bucketed = f"{link}-naive", f"{link}-bucketed"
        longer = d.longer(naive, bucketed, "A naive step")
        yield (f"Over the {link} link, {rate(d, naive)} Gbit/s, the naive way exposes {exposed(d, naive)} of a step, by the formula "
               f"{formula(d, naive)}. Buckets expose {exposed(d, bucketed)}, by the formula {formula(d, bucketed)}.{longer}")


def plot(d):
    return d.speed and {"title": "exposed communication, of computing and exposed",
                        "rows": [(words(d, run), 1 - d.value(run, "efficiency_exposed"), exposed(d, run)) for run in d.runs()]}
