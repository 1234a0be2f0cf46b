"""Does ZeRO stage 1 in bf16 save as much of all memory as it promises of the state? DDP and stage 1 with GPT-2 124M on 2 and 4
ranks, and few tokens, so that activations are small beside the state. Needs 8 GB in all, and measures bytes only."""
from dev.lib import DATA, SMALL, count, size

ROUNDS, NEEDS, BYTES_ONLY, BYTES_ONLY_RUNS = 1, ["ddp:bf16", "zero:bf16"], True, True
TITLE = "Does ZeRO stage 1 save as much as it promises?"
QUESTION = """In bf16 DDP keeps 16 bytes of state per parameter on each rank: 2 for parameters, 2 for gradients, 12 for the
optimizer's state. Stage 1 divides the 12 by the number of ranks. On small models buffers and activations hide the saving. How near
does the total of a rank come to the promise, at a size where they do not?"""
NOTES = """The bytes are what the programs allocated, and as predicted by formula, or they would have failed. [Chapter
3](../../doc/03_zero.md#where-the-savings-do-not-show) has sizes at which the saving does not show, and [the notes on the ZeRO
paper](../../doc/papers.md#zero) have its table."""
KINDS = "parameters", "gradients", "optimizer state"


def measure(x):
    shape = f"{SMALL} --seq-len 16 --batch-size 1 --steps 1" if x.quick else "--model gpt2 --seq-len 64 --batch-size 1 --steps 1"
    for ranks in (2,) if x.quick else (2, 4):
        x.run(f"ddp-{ranks}", ranks, "ddp:bf16", "--tokenizer=", DATA, shape, "--vocab-size 50257")
        x.run(f"zero1-{ranks}", ranks, "zero:bf16", "--tokenizer=", DATA, shape, "--vocab-size 50257 --zero-stage 1")


def promised(n): return f"{100 * (4 + 12 / n) / 16:.1f} %"
def kept(d, run): return f"{100 * d.share(run, 'ddp-' + run.split('-')[1], 'memory'):.1f} %"
def numbers(d): return [int(run.removeprefix("ddp-")) for run in d.runs("^ddp-")]
def words(d, run): return "{}, {} ranks".format({"ddp": "DDP", "zero1": "stage 1"}[run.split("-")[0]], run.split("-")[1])


def rest(d, run): return size(d.value(run, "memory") - sum(d.value(run, f"kinds/{kind}") for kind in KINDS))


COLUMNS = {kind: f"kinds/{kind}" for kind in KINDS} | {
    "everything else": rest, "of DDP's memory": kept,
    "promised of the state": lambda d, run: "" if run.startswith("ddp") else promised(int(run.split("-")[1]))}
PLOT = "all memory of a rank, GB", "memory", 1e9


def short(d):
    return "A rank keeps of DDP's whole memory " + ", and ".join(
        f"{kept(d, f'zero1-{n}')} on {n} ranks, where {promised(n)} is promised of its state" for n in numbers(d)) + "."


def answer(d):
    for n in numbers(d):
        yield (f"On {n} ranks a model of {count(d.value(f'ddp-{n}', 'parameters'))} parameters takes "
               f"{d.size(f'ddp-{n}')} per rank with DDP and {d.size(f'zero1-{n}')} with stage 1, "
               f"activations and everything else counted: {kept(d, f'zero1-{n}')} of DDP's total, where {promised(n)} of its state "
               "is promised.")
