"""In which type should gradients be summed when numbers have 16 bits? FSDP in bf16 on two ranks, sums in fp32 and in bf16."""
from dev.lib import DATA, SMALL, percent

ROUNDS, NEEDS = 5, ["fsdp:bf16"]
TITLE = "In which type should gradients be summed?"
QUESTION = """In bf16 and fp16, FSDP can send and add gradients in fp32 (`--reduce-dtype fp32`, the default) or in 16 bits
(`model`). What do the wider sums cost, and what do they change?"""
PREDICTION = """In a step, each parameter is gathered twice in 2 bytes, and its gradient is reduced in 4 bytes or in 2. So sums
in bf16 send 6/8 = 75 % of the bytes. They also halve the gradients' memory. Two ranks round each sum once, so the loss should
hardly change."""
NOTES = """The error of a sum in 16 bits grows with the number of ranks, so two ranks show the saving and not the risk. [Chapter
4](../../doc/04_fsdp.md#mixed-precision) says where each type is used."""
WORDS, PLOT = {"fp32": "sums in fp32", "model": "sums in bf16"}, ("sent per rank and step, MB", "sent", 1e6)
RUNS, COLUMNS = "", {"loss": lambda d, run: loss(d, run)}
SPEEDS = {"step time": lambda d, run: d.beside(run, "fp32")}


def measure(x):
    model = f"{SMALL} --batch-size 2 --seq-len 16 --steps 3" if x.quick else "--model d6 --batch-size 8 --seq-len 64 --steps 40"
    for _ in x.in_turns():
        for dtype in WORDS: x.run(dtype, 2, "fsdp:bf16", DATA, model, f"--reduce-dtype {dtype}")


def loss(d, run): return f"{d.value(run, 'loss'):.4g}"
def apart(d): return f"{abs(d.value('fp32', 'loss') - d.value('model', 'loss')):.2g}"


def short(d):
    sent = percent(d.share("model", "fp32", "sent"))
    return f"Sums in bf16 send {sent} of the bytes, and change the loss by {apart(d)} after {d.value('fp32', 'steps')} steps."


def answer(d):
    (sent32, sent16), (kept32, kept16) = ([d.size(run, key) for run in WORDS] for key in ("sent", "memory"))
    yield (f"A rank sends {sent32} per step with sums in fp32, and {sent16} with sums in bf16, which is "
           f"{percent(d.share('model', 'fp32', 'sent'))}. It keeps {kept32} and {kept16}."
           + d.longer("model", "fp32", "With sums in bf16 a step"))
    yield f"After {d.value('fp32', 'steps')} steps the losses are {loss(d, 'fp32')} and {loss(d, 'model')}, {apart(d)} apart."
