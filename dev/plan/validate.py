"""--validate: published figures (published.toml has them with their sources) next to the mesh model's predictions.

A row's source says which program it was: what it fuses, hides and keeps. The GPUs of torchtitan's rows have 96 GB of slower memory
and 500 W; its document puts their peak between those of the H100's SXM and NVL forms, so the latter's 835 TFLOP/s are taken. NeMo's
row of 4096 tokens set how much faster fp8 is, casts included; torchtitan's rows in fp8 are not predicted.
"""
import math, statistics, tomllib
from collections import namedtuple
from itertools import groupby
from pathlib import Path
from dev.plan.answers import Table, plain
from dev.plan.machines import GPUS, MIB
from dev.plan.mesh import INPUTS, MeshPlan, Program
from dev.plan.shapes import SHAPES, bytes_of_states

PUBLISHED = Path(__file__).with_name("published.toml")
BYTES = ("state_gb", "largest_b", "largest_ran_b", "parameters_b", "fits", "peak_gib", "weights_mib", "gradients_mib",
         "optimizer_mib", "activations_mib")
TIMES = ("tflops", "seconds", "tokens", "mfu", "hfu", "forward_ms", "backward_ms")
GOALS = {"bytes": 5, "times": 15} # percent
COUNTED = {name: [kind for kind in group if kind not in ("mfu", "parameters_b")] # these two repeat others
           for name, group in (("bytes", BYTES), ("times", TIMES))}


class Row(namedtuple("Row", "source kind value model gpu dp tp pp cp chunks sp zero batch micro T kept bits note",
                     defaults=("-", "-", 1, 1, 1, 1, 1, False, 0, 0, 1, 0, "", 16, ""))):
    """A figure of published.toml, which lists the fields; kept "": the source does not say."""
    gpus = property(lambda self: self.dp * self.tp * self.pp * self.cp)


def read_published():
    """A row for each figure."""
    rows = []
    for source, parts in tomllib.loads(PUBLISHED.read_text()).items():
        for given in (part["shared"] | row for part in parts for row in part["rows"]):
            figures = {kind: given.pop(kind) for kind in [*given] if kind in BYTES + TIMES}
            lists = [name for name, x in given.items() if isinstance(x, list)]
            for n in range(len(given[lists[0]]) if lists else 1):
                one = given | {name: given[name][n] for name in lists}
                for kind, x in figures.items():
                    x = x[n] if lists else x
                    rows += [Row(source, kind, float(value), **{**one, "zero": zero})
                             for zero, value in enumerate(x if isinstance(x, list) else [x], one.get("zero", 0))]
    return rows


# ---- a row ----
# DeepSpeed's ZeRO-3 of 2021 gathered one matrix after another, waited for each, and copied it. With 5.1 B parameters on 8 A100 and
# NVLink a forward pass took 470 ms, of which 60 computed (github.com/deepspeedai/DeepSpeed, issue 1174 and pull request 1188, which
# says that "the async version is not async at all"). So 10.2 GB were gathered in 410 ms; 900 ms backward agree.
# FlashAttention-2 on an H100: 335 TFLOP/s forward and backward (arXiv 2307.08691, section 4.1), of which a seventh computes scores
# again.
DEEPSPEED_BUSBW = 10.2e9 * 7 / 8 / 0.410
FLASH2, FP8 = 335e12 / 989e12 * 6 / 7, 1.54
MEGATRON_2021 = Program(False, False, False, 1.3, 2, 6) # dropout; the optimizer after one all-reduce
MEGATRON_2022 = MEGATRON_2021._replace(hides_sums=True) # an all-reduce "overlaps with the linear weight's gradient"
DEEPSPEED_2021 = MEGATRON_2021._replace(gathers=1 / 3.0, most_busbw=DEEPSPEED_BUSBW) # a matrix at a time
LLMC = Program(True, True, True, 1, 2, 2)
TITAN = Program(True, False, True, 1, 4, 10)            # compiled; the loss in fp32
NEMO = Program(True, True, True, 1, 4, 6, products=FP8, attention=FLASH2)
PROGRAMS = {
    "Megatron 2021, table 1": MEGATRON_2021, "Megatron 2021, table 2": MEGATRON_2021,
    "Megatron 2022, table 4": MEGATRON_2022, "Megatron 2022, table 5": MEGATRON_2022, "llm.c": LLMC, "NeMo": NEMO,
    "FSDP": Program(False, False, True, 1.3, 4, 10), # attention and GELU written out
    "torchtitan": TITAN._replace(passes=2.5), "torchtitan, tp 8": TITAN, "Llama 3": NEMO._replace(products=1, ring=False)}
H100_96 = GPUS["h100"]._replace(name="h100-96", peak16=835e12, bandwidth=2.4e12, memory=96e9)


def plan_of(r, reserve):
    """None: the row cannot be expressed."""
    shape, gpu, program = SHAPES.get(r.model), {**GPUS, "h100-96": H100_96}.get(r.gpu), PROGRAMS.get(r.source)
    if r.source == "Megatron 2021, table 2" and r.zero == 3: program = DEEPSPEED_2021
    if r.note == "compiled": program = TITAN
    if shape is None or gpu is None or program is None or (r.bits == 8) != (program.products > 1) or r.kept == "": return None
    return MeshPlan(shape=shape, chip=gpu, d=r.dp, t=r.tp, p=r.pp, c=r.cp, zero=r.zero, batch=r.batch, B=r.micro, T=r.T, v=r.chunks,
                    rows=r.sp, kept=r.kept, program=program, unusable=reserve)


def state_bytes(r): return sum(bytes_of_states(r.zero, r.dp))
def predict(r, reserve):
    """The prediction for a row, in its unit; NaN: none."""
    if r.kind == "state_gb": return 1e-9 * float(r.model) * state_bytes(r)
    if r.kind == "largest_b": return 32 * r.tp / state_bytes(r)
    if r.kind == "parameters_b": return 1e-9 * SHAPES[r.model].parameters()
    p = plan_of(r, reserve)
    if p is None: return math.nan
    b, t, (forward, backward, recomputed, _) = p.bytes(), p.step(), p.block_compute()
    each = t.tokens_per_s / r.gpus
    sends = (4 if p.rows else 2) * p.collective(p.t, 1, not p.rows, 2 * p.tokens_each * p.shape.C) # of a block's forward pass
    causal = r.source == "llm.c" # Megatron counts all of attention's scores, and in tflops what is recomputed, NeMo only the former
    again = r.kind == "tflops" and r.kept == INPUTS and r.source != "NeMo"
    flops = p.shape.flops_recomputed(r.T, causal) if again else p.shape.flops(r.T, causal)
    return {"seconds": t.seconds, "tokens": each, "tflops": 1e-12 * each * flops, "mfu": 100 * each * flops / p.chip.peak16,
            "forward_ms": 1e3 * (forward + sends), "backward_ms": 1e3 * (backward + recomputed + p.tensor_waits() - sends),
            "peak_gib": b.total / 1073741824, "weights_mib": b.parameters / MIB, "gradients_mib": b.gradients / MIB,
            "optimizer_mib": b.optimizer / MIB, "activations_mib": b.activations / MIB,
            "fits": float(b.total <= p.chip.memory)}.get(r.kind, math.nan)


# ---- all rows ----
def offs(pairs, kinds):
    """How far predictions are from rows of these kinds, as shares."""
    ratios = [x / r.value for r, x in pairs if r.kind in kinds and r.kind != "fits" and not math.isnan(x)]
    return [max(ratio, 1 / ratio) - 1 for ratio in ratios]


def summary(pairs):
    """The medians of bytes and of times, and the furthest."""
    return {name: statistics.median(offs(pairs, kinds) or [math.nan]) for name, kinds in COUNTED.items()} | {
        "furthest": max(offs(pairs, BYTES + TIMES), default=math.nan)}


def answer(o):
    pairs = [(r, predict(r, 1e9 * o.reserve)) for r in read_published()]
    def ratio(r, x):
        return ("same" if x == r.value else "not") if r.kind == "fits" else "-" if math.isnan(x) else f"{x / r.value:.3f}"
    rows = [{"source": r.source, **{key: getattr(r, key) for key in ("model", "gpu", "dp", "tp", "pp", "zero", "kind")},
             "published": r.value, "note": r.note, "predicted": x} for r, x in pairs]
    columns = [(key, ".5g" if key in ("published", "predicted") else "", key) for key in [*[*rows[0]][1:], "ratio"]]
    every = Table("source", columns, [{"name": row["source"], **row, "ratio": ratio(*pair)} for row, pair in zip(rows, pairs)])
    def percents(mine): return {name: "-" if math.isnan(x) else f"{100 * x:.1f} %" for name, x in summary(mine).items()}
    groups = ((source, [*mine]) for source, mine in groupby(pairs, key=lambda pair: pair[0].source))
    def predicted(mine): return sum(not math.isnan(x) for _, x in mine)
    sources = [{"name": source, "rows": predicted(mine), **percents(mine)} for source, mine in groups]
    lines = []
    for name, kinds in COUNTED.items():
        good = sum(100 * x <= GOALS[name] for x in offs(pairs, kinds))
        lines += [f"{name:<9}{len(offs(pairs, kinds))} rows, half of them within {percents(pairs)[name]}, {good} within {GOALS[name]} %"]
    fits = [r.value == x for r, x in pairs if r.kind == "fits"]
    return [every, Table("source", plain(("rows", "bytes", "times", "furthest")), sources), "", *lines,
            f"fits     {sum(fits)} of {len(fits)} right",
            f"not predicted: {sum(math.isnan(x) for r, x in pairs if r.kind != 'fits')} rows: torchtitan's in fp8, what a paper "
            "calls HFU, and the largest models that ran with ZeRO"], lambda: {"rows": rows}
