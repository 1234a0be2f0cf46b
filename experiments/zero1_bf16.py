"""Does ZeRO stage 1 in bf16 save as much of all memory as it promises of the state? DDP and stage 1 with GPT-2 124M on 2 and 4
ranks, and few tokens, so that activations are small beside the state. Needs 8 GB in all, and measures bytes only."""
from dev.lib import DATA, SMALL, count, size

ROUNDS, NEEDS, BYTES_ONLY, BYTES_ONLY_RUNS = 1, ["ddp:bf16", "zero:bf16"], True, True
TITLE = "Does ZeRO stage 1 save as much as it promises?"
QUESTION = """In bf16 DDP keeps 16 bytes of state per parameter on each rank: 2 for parameters, 2 for gradients and 12 for the
optimizer. ZeRO stage 1 divides the 12 by the number of ranks. In small models buffers and activations hide the saving. How
close to the promise does the whole memory of a rank come in GPT-2 124M?"""
PREDICTION = """Stage 1 keeps (4 + 12/N)/16 of the state: 62.5 % on 2 ranks and 43.8 % on 4. Buffers and activations are not
divided, so the whole memory should come out slightly above that."""
NOTES = """At this size the state decides. [Chapter 3](../../doc/03_zero.md#where-the-savings-do-not-show) shows sizes at which
the saving does not show, and [the notes on the ZeRO paper](../../doc/papers.md#zero) contain its table. The bytes are those
that the programs allocated; a run fails if they differ from the prediction."""
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
    "everything else": rest, "relative to DDP": kept,
    "predicted for the state": lambda d, run: "" if run.startswith("ddp") else promised(int(run.split("-")[1]))}
PLOT = "memory per rank, GB", "memory", 1e9


def short(d):
    return "Of DDP's memory, stage 1 keeps " + ", and ".join(
        f"{kept(d, f'zero1-{n}')} on {n} ranks ({promised(n)} predicted for the state)" for n in numbers(d)) + "."


def answer(d):
    for n in numbers(d):
        yield (f"On {n} ranks, {count(d.value(f'ddp-{n}', 'parameters'))} parameters take {d.size(f'ddp-{n}')} per rank with DDP "
               f"and {d.size(f'zero1-{n}')} with stage 1, everything counted. That is {kept(d, f'zero1-{n}')} of DDP's memory; "
               f"the prediction for the state is {promised(n)}.")
