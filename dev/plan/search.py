"""--mesh all: tries every way to divide the ranks into data, tensor and pipeline parallelism, each with stages of ZeRO,
recomputation and sizes of a micro-batch. Meshes that do not divide or fit go last. Bytes are those of the program that would run
it, if there is one; seconds are the mesh model's (mesh.py)."""
import itertools, math
from collections import namedtuple
from tool import format_bytes, require
from dev.plan.answers import COST, Table, cost_of, plain
from dev.plan.machines import GPUS
from dev.plan.mesh import ALL, INPUTS, MeshPlan
from dev.plan.plans import MAX_BLOCKS, TECHNIQUES, shape_of, total_of
from dev.plan.shapes import is_gpt2

# The best way for one mesh and stage of ZeRO, or the one that came nearest to fitting, with an error and without a time. total:
# bytes; inf: the mesh is impossible.
Result = namedtuple("Result", "plan total time error", defaults=(math.inf, None, None))


def technique_of(p):
    """That of the simplest program for it."""
    if p.t > 1 and p.p > 1 or p.zero > 0 and p.t * p.p > 1: return "3d"
    return "tp" if p.t > 1 else "pp" if p.p > 1 else ("ddp", "zero-1", "zero-2", "fsdp")[p.zero]


def program_of(p): return "-" if p.shape.llama else "single" if p.N == 1 else TECHNIQUES[technique_of(p)].program
def machinery(p): return 100 * (p.d > 1) + 200 * (p.t > 1) + 200 * (p.p > 1) + 20 * p.zero + 5 * (p.kept == INPUTS) + p.v


def rank_of(r):
    """Ways that fit come first, by seconds in steps of half a percent and then by machinery; the others by bytes."""
    if r.error: return 1, r.total
    return 0, math.floor(math.log(r.time.seconds) / 0.005), machinery(r.plan), -r.plan.B, r.time.seconds


def try_way(p):
    error, ours = p.error(), not p.shape.llama
    if ours and p.shape.Vp % p.t != 0: error = error or "the vocabulary does not divide"
    if ours and p.shape.L > MAX_BLOCKS: error = error or "there are more blocks than this course's programs have"
    if error: return Result(p, error=error)
    total = total_of(p, technique_of(p)) + p.unusable if ours else p.bytes().total # as the program plans it
    if total > p.chip.memory: return Result(p, total, error=f"does not fit: {format_bytes(total)}")
    return Result(p, total, p.step())


def ways_of(mesh):
    """All sizes of a micro-batch, recomputations and chunks."""
    micros = [1 << k for k in range(max(mesh.batch // mesh.d, 1).bit_length())]
    for B, kept, v in itertools.product(micros, (ALL, INPUTS), (1, 2, 4) if mesh.p > 1 else (1,)):
        if v > 1 and mesh.shape.L % (mesh.p * v) != 0: continue
        yield mesh.but(B=B, kept=kept, recompute="block" if kept == INPUTS else "none", v=v,
                       schedule="interleaved" if v > 1 else "1f1b")


def meshes_of(asked):
    """Up to twice a node's GPUs share matrices. Pipelines take ZeRO-0 and -1, because 2 and 3 would reduce or gather in every
    micro-batch; and so does GPT with tp > 1, as in train_gpt2_3d."""
    ranks, tps = asked.d, [1 << k for k in range(21) if 1 << k <= 2 * asked.chip.per_node and asked.d % (1 << k) == 0]
    for t, p in itertools.product(tps, range(1, asked.shape.L + 1)):
        if ranks % (t * p) != 0: continue
        d = ranks // (t * p)
        stages = 0 if d == 1 else 3 if p == 1 and (t == 1 or asked.shape.llama) else 1
        for zero in range(stages + 1): yield asked.but(d=d, t=t, p=p, zero=zero, zero_stage=zero, rows=t > 1)


def search(shape, chip, ranks, batch, T, reserve):
    """Results, the best first, and how many ways were tried. batch: sequences of a step."""
    asked = MeshPlan(shape=shape if is_gpt2(shape) else shape._replace(T=T), chip=chip, d=ranks, batch=batch, B=1, T=T,
                     gpu_memory=chip.memory, unusable=reserve)
    tried = [[try_way(p) for p in ways_of(mesh)] for mesh in meshes_of(asked)]
    return sorted((min(ways, key=rank_of) for ways in tried), key=rank_of), sum(map(len, tried))


# ---- the answer ----
PARTS = {"compute": "compute", "tensor": "sums of tp", "bubble": "bubble", "messages": "messages of pp", "data": "dp",
         "update": "update"}


def most_of(t):
    """The longest part besides compute, if it is a tenth of the step; else compute."""
    most = max(list(PARTS)[1:], key=lambda part: getattr(t, part))
    if getattr(t, most) <= 0.1 * t.seconds: most = "compute"
    return f"{PARTS[most]} {100 * getattr(t, most) / t.seconds:.0f} %"


def row_of(o, r):
    p, t = r.plan, r.time
    row = {"name": f"dp={p.d},tp={p.t},pp={p.p} zero {p.zero}", "dp": p.d, "tp": p.t, "pp": p.p, "zero": p.zero, "chunks": p.v,
           "micro": p.B, "kept": p.kept, "fits": r.error is None}
    if r.total < math.inf: row["bytes"] = float(r.total)
    if r.error: return {**row, "why_not": r.error}
    return {**row, "program": program_of(p), "seconds": t.seconds, "mfu": t.mfu, "tokens_per_s": t.tokens_per_s,
            "seconds_of": {name: float(getattr(t, part)) for part, name in PARTS.items()}, "most": most_of(t),
            **cost_of(o, t.tokens_per_s, p.N)}


def answer(o):
    require(o.chip, f"--mesh all needs a --gpu whose peak is known: {', '.join(GPUS)}")
    chip, s, batch = o.chip, shape_of(o), o.total_batch_size // o.T
    results, tried = search(s, chip, o.N, batch, o.T, 1e9 * o.reserve)
    rows = [row_of(o, r) for r in results]
    columns = [*plain(("chunks", "micro", "kept")), ("bytes", "B", "bytes"), ("step ms", ".1f", "ms"), ("MFU", ".1%", "mfu"),
               ("most of the step", "", "most"), ("program", "", "program"), *COST]
    items = [f"{s.name}: {s.L} blocks, {s.C} channels, {s.NH} heads, {s.V} tokens, {1e-9 * s.parameters():.4g} B parameters",
             f"{batch} x {o.T} tokens a step, on {o.N} rank{'s' * (o.N > 1)}, each with one {chip.what} of"
             f" {1e-9 * chip.memory:.4g} GB, {o.reserve:.4g} of these in reserve",
             f"{tried} ways of {len(results)} meshes and stages of ZeRO, of which {sum(row['fits'] for row in rows)} fit; of those"
             " that take as long the simplest is first",
             Table("mesh", columns, [row | {"ms": 1e3 * row.get("seconds", math.nan)} for row in rows])]
    if s.llama: items.append("bytes are estimated (mesh.py): no program of this course has such a model")
    return items, lambda: {"model": s.name, "bytes_are_exact": not s.llama, "gpu": chip.name, "ranks": o.N, "batch": batch,
                           "seq_len": o.T, "meshes": rows}
