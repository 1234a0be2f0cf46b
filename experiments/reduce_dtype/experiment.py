"""In which type should gradients be summed when numbers have 16 bits? FSDP in bf16 on two ranks, sums in fp32 and in bf16."""
from report import DATA, SMALL, no_difference, percent, size, times, words

ROUNDS, NEEDS = 5, ["fsdp:bf16"]
TITLE = "In which type should gradients be summed?"
QUESTION = """With numbers of 16 bits FSDP can send and add gradients in fp32 (`--reduce-dtype fp32`, the default) or in 16 bits
(`model`). What do the wider sums cost, and what do they change?"""
NOTES = """Two ranks add two numbers, so little is lost here. The error of a sum in 16 bits grows with the ranks. [Chapter
4](../../doc/04_fsdp.md#mixed-precision) says where each type is used."""
WORDS = {"fp32": "sums in fp32", "model": "sums in bf16"}


def runs(x):
    model = f"{SMALL} --batch-size 2 --seq-len 16 --steps 3" if x.quick else "--model d6 --batch-size 8 --seq-len 64 --steps 40"
    for _ in x.in_turns():
        for dtype in WORDS: x.run(dtype, 2, "fsdp:bf16", DATA, model, f"--reduce-dtype {dtype}")


def apart(d): return f"{abs(d.value('fp32', 'loss') - d.value('model', 'loss')):.2g}"


def short(d):
    sent = percent(d.share("model", "fp32", "sent"))
    return f"Sums in bf16 send {sent} of the bytes, and change the loss by {apart(d)} after {d.value('fp32', 'steps')} steps."


def answer(d):
    sent, kept = ([size(d.value(run, key)) for run in WORDS] for key in ("sent", "memory"))
    text = (f"With sums in fp32 a rank sends {sent[0]} in a step, and with sums in bf16 {sent[1]}, which is "
            f"{percent(d.share('model', 'fp32', 'sent'))}. It keeps {kept[0]} and {kept[1]}.")
    if d.speed:
        ratio = d.ratio("model", "fp32", "step_ms")
        text += f" With sums in bf16 a step takes {times(ratio)} times as long.{no_difference(ratio)}"
    yield text
    fp32, model = (f"{d.value(run, 'loss'):.4g}" for run in WORDS)
    yield f"After {d.value('fp32', 'steps')} steps the losses are {fp32} and {model}, {apart(d)} apart."


def table(d):
    yield ["", "memory of a rank", "sent by a rank in a step", "loss"] + ["time of a step"] * d.speed
    for run in d.runs():
        memory, sent = size(d.value(run, "memory")), size(d.value(run, "sent"))
        yield [WORDS[run], memory, sent, f"{d.value(run, 'loss'):.4g}", *d.beside(run, "fp32", "step_ms")]


def plot(d):
    return words(d, {run: WORDS[run] for run in d.runs()}, "sent by a rank in a step, MB", "sent", 1e6)
