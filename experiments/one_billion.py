"""Can this machine train a billion parameters? FSDP in bf16 on two ranks, blocks recomputed, one sequence of 64 tokens on each
rank, three steps, with sums of gradients in fp32 and in bf16; and what DDP would need. Takes up to 18 GB in all."""
import re
import dev.lib as m
from dev.lib import SMALL, count, percent, size

ROUNDS, NEEDS, BYTES_ONLY = 1, ["fsdp:bf16"], True
TITLE = "Can this machine train a billion parameters?"
QUESTION = """DDP keeps the whole state of a model on every rank, 16 bytes per parameter in bf16, and FSDP divides it among the
ranks. Does a model of a billion parameters train on two ranks of one machine?"""
PREDICTION = """Half of 16 bytes per parameter is about 8 GB per rank, plus activations and buffers. Summing gradients in bf16
saves 2 bytes per parameter, or 1 GB per rank, and half of the buffers. DDP would need 16 GB on each rank."""
NOTES = """Sharding saves the second replica that DDP needs on two ranks. One process alone could hold the state in the same
memory. A checkpoint of this model takes 12 bytes per parameter, so the script ends each run after its last step without saving
one."""
WORDS = {"fp32": "FSDP, sums in fp32", "model": "FSDP, sums in bf16", "ddp": "DDP, predicted"}
KINDS = "parameters", "gradients", "optimizer state", "activations", "communication"


def measure(x):
    shape, steps = (SMALL, 2) if x.quick else ("--layers 20 --channels 2048 --heads 16", 3)
    available = int(re.search(r"^MemAvailable: *(\d+)", m.Path("/proc/meminfo").read_text(), re.M)[1]) * 1024 // 10**9
    if not x.quick and x.device == "cpu" and available < 19: m.fail(f"this takes 18 GB of memory, and {available} GB are free")
    for dtype in "fp32", "model": # a checkpoint would have 12 GB
        x.run(dtype, 2, "fsdp:bf16", shape, f"--seq-len 64 --batch-size 1 --recompute block --reduce-dtype {dtype} --lr 2e-6 "
              f"--warmup-steps 1 --lr-schedule constant --steps {steps + 2}", until=steps)
    x.plan("ddp", shape, "--vocab-size 257 --ranks 2 --seq-len 64 --batch-size 1 --recompute block")


def short(d):
    fp32, ddp = (d.size(run) for run in ("fp32", "ddp"))
    return f"{count(d.value('fp32', 'parameters'))} parameters take {fp32} on each of two ranks with FSDP; DDP would take {ddp}."


def answer(d):
    ddp, fp32, bf16 = (d.value(run, "memory") for run in ("ddp", "fp32", "model"))
    yield (f"FSDP trains {count(d.value('fp32', 'parameters'))} parameters in {size(fp32)} on each of two ranks, {size(2 * fp32)} "
           f"in all. With gradients summed in bf16 it takes {size(bf16)} per rank, {size(2 * bf16)} in all. DDP would take "
           f"{size(ddp)} per rank, {size(2 * ddp)} in all, {ddp / fp32:.1f} times as much.")
    exposed = f" Exposed communication takes {percent(d.exposed('fp32'))} of a step." if d.speed else ""
    yield (f"With sums in fp32 the loss is {d.value('fp32', 'first_loss'):.3g} at the first step and {d.value('fp32', 'loss'):.3g} "
           f"at step {d.value('fp32', 'steps')}. A rank sends {d.size('fp32', 'sent')} per step, and "
           f"{d.size('model', 'sent')} with sums in bf16.{exposed}")
    yield (f"Three choices make it fit: blocks are recomputed, which leaves {d.size('fp32', 'kinds/activations')} of activations; "
           "each rank reads one sequence of 64 tokens; and the vocabulary is bytes. Buffers for gathered blocks and buckets take "
           f"{d.size('fp32', 'kinds/communication')}.")


def table(d):
    yield ["run", "parameters", "gradients", "optimizer state", "activations", "buffers", "total per rank", "both ranks",
           "sent per rank and step"] + ["tokens per second"] * d.speed
    for run in d.runs():
        kinds = [""] * 5 if run == "ddp" else [d.size(run, f"kinds/{kind}") for kind in KINDS]
        speed = ["" if run == "ddp" else d.tokens(run)] * d.speed
        yield [WORDS[run], *kinds, d.size(run), size(2 * d.value(run, "memory")), d.size(run, "sent"), *speed]


def plot(d):
    memory = {run: 2 * d.value(run, "memory") for run in d.runs()}
    return {"title": "memory of both ranks, GB", "rows": [(WORDS[run], b / 1e9, size(b)) for run, b in memory.items()]}
