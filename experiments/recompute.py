"""What does recomputing blocks cost in time, and what memory does it free? FSDP on two ranks, with short and with long
sequences."""
from dev.lib import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["fsdp"]
TITLE = "What does recomputation cost?"
QUESTION = """With `--recompute block` a block stores only its input, and repeats its forward pass during the backward pass. How
much memory does that free, and how much longer does a step take?"""
PREDICTION = """A block repeats its forward pass except for the MLP's second product, whose output no backward pass needs. That
is 16 C^2 of the 72 C^2 FLOPs per token that a block's two passes take, or 22 %, and attention. `build/plan --recompute block`
predicts 1.22 for both lengths. No message is added, because a block is gathered for its backward pass anyway."""
NOTES = """Recomputation frees activations and nothing else, so it pays when they take most of the memory, with many tokens per
rank. [Chapter 4](../../doc/04_fsdp.md#recomputation-and-offload-memory-against-time) explains the formula."""
PLOT = "memory per rank, MB", "memory", 1e6
COLUMNS = {"activations": "kinds/activations"}
SPEEDS = {"step time, none = 1": lambda d, run: d.beside(run, run.split("-")[0] + "-none")}


def measure(x):
    shapes, steps = {"short": "--model d6 --batch-size 8 --seq-len 64", "long": "--model d6 --batch-size 2 --seq-len 256"}, 13
    if x.quick:
        shapes, steps = {case: f"{SMALL} --batch-size 2 --seq-len {T}" for case, T in (("short", 16), ("long", 64))}, 3
    for _ in x.in_turns():
        for way in "none", "block":
            for case, shape in shapes.items(): x.run(f"{case}-{way}", 2, "fsdp", DATA, shape, f"--steps {steps} --recompute {way}")


def short(d):
    longer = f", and a step takes {d.ratio('short-block', 'short-none', 'step_ms')[0]:.2f} times as long" if d.speed else ""
    return f"It leaves {percent(d.share('short-block', 'short-none', 'memory'))} of the memory in use{longer}."


def answer(d):
    for case in "short", "long":
        block, none = f"{case}-block", f"{case}-none"
        yield (f"With {case} sequences a rank keeps {d.size(block)} instead of {d.size(none)}, which is "
               f"{percent(d.share(block, none, 'memory'))}.{d.longer(block, none)}")
