"""--mesh all: every way to divide ranks into data, tensor and pipeline parallelism, with what ZeRO shards, what is recomputed, and
the size of a micro-batch. Left out is what does not divide, then what does not fit. Bytes are those of the program that would run
it, if there is one; seconds are the mesh model's (mesh.py)."""
import itertools, math
from typing import NamedTuple
from tool import format_bytes, require
from answers import COST, Table, cost_of, plain
from machines import GPUS
from mesh import ALL, INPUTS, SHARD, SHARD_FP32, MeshPlan, MeshTime
from options import shape_of
from questions import DDP, FSDP, MAX_BLOCKS, MESH, PP, PROGRAMS, TP, ZERO1, ZERO2, Plan, total_of
from shapes import is_gpt2


# ---- the program of this course that runs a way ----
def strategy_of(p):
    """Of the simplest program that can."""
    if p.tp > 1 and p.pp > 1 or p.zero > 0 and p.tp * p.pp > 1: return MESH
    return TP if p.tp > 1 else PP if p.pp > 1 else (DDP, ZERO1, ZERO2, FSDP)[p.zero]


def program_of(p): return "-" if p.shape.llama else "single" if p.ranks == 1 else PROGRAMS[strategy_of(p)]


def exact_total(p):
    """Bytes as the program plans them with the options of this way and its defaults."""
    s, precision = p.shape, "bf16" if p.program.element_bytes == 2 else "fp32"
    plan = Plan(s if is_gpt2(s) else s._replace(T=p.T), p.micro, p.T, p.ranks, precision, p.micro_batches, p.kept == INPUTS,
                gpu=not p.gpu.is_here, t=p.tp, rows=p.rows, p=p.pp, schedule="interleaved" if p.chunks > 1 else "1f1b", v=p.chunks,
                zero_stage=p.zero, gpu_memory=p.gpu.memory)
    return total_of(plan, strategy_of(p)) + p.reserve


# ---- search ----
class Result(NamedTuple):
    """The best way of one mesh and one stage of ZeRO; or the plan that came nearest to fitting, with the reason why it does not."""
    plan: MeshPlan
    total: float = math.inf  # bytes; inf: there cannot be such a mesh
    time: MeshTime = None    # None: it does not fit
    error: str = None        # None: it fits


def machinery(p): return 100 * (p.dp > 1) + 200 * (p.tp > 1) + 200 * (p.pp > 1) + 20 * p.zero + 5 * (p.kept == INPUTS) + p.chunks


def rank_of(r):
    """What fits, by steps of half a percent, in each of which the least machinery is first; the rest by bytes."""
    if r.error: return 1, r.total
    return 0, math.floor(math.log(r.time.seconds) / 0.005), machinery(r.plan), -r.plan.micro, r.time.seconds


def try_way(p):
    error, ours = p.error(), not p.shape.llama
    if ours and p.shape.Vp % p.tp != 0: error = error or "the vocabulary does not divide"
    if ours and p.shape.L > MAX_BLOCKS: error = error or "there are more blocks than this course's programs have"
    if error: return Result(p, error=error)
    total = exact_total(p) if ours else p.bytes().total
    if total > p.gpu.memory: return Result(p, total, error=f"does not fit: {format_bytes(total)}")
    return Result(p, total, p.step())


def ways_of(mesh):
    """All micro-batches, recomputations and chunks."""
    micros = [1 << k for k in range(max(mesh.batch // mesh.dp, 1).bit_length())]
    for micro, kept, chunks in itertools.product(micros, (ALL, INPUTS), (1, 2, 4) if mesh.pp > 1 else (1,)):
        if chunks == 1 or mesh.shape.L % (mesh.pp * chunks) == 0: yield mesh._replace(micro=micro, kept=kept, chunks=chunks)


def meshes_of(asked):
    """Up to twice a node's GPUs share matrices. Of pipelines ZeRO's stages are 0 and 1, because 2 and 3 would reduce or gather in
    every micro-batch; of GPT's also with tp > 1, as train_gpt2_3d has it."""
    tps = [1 << k for k in range(21) if 1 << k <= 2 * asked.gpu.per_node and asked.ranks % (1 << k) == 0]
    for tp, pp in itertools.product(tps, range(1, asked.shape.L + 1)):
        if asked.ranks % (tp * pp) != 0: continue
        dp = asked.ranks // (tp * pp)
        stages = 0 if dp == 1 else 3 if pp == 1 and (tp == 1 or asked.shape.llama) else 1
        for zero in range(stages + 1): yield asked._replace(dp=dp, tp=tp, pp=pp, zero=zero, rows=tp > 1)


def search(shape, gpu, ranks, batch, T, reserve):
    """Results, those that fit first, best first; and how many ways were tried. batch: sequences of a step. On a CPU programs are
    those of fp32."""
    asked = MeshPlan(shape, gpu, ranks, 1, 1, 0, batch, 1, T, program=SHARD_FP32 if gpu.is_here else SHARD, reserve=reserve)
    tried = [[try_way(p) for p in ways_of(mesh)] for mesh in meshes_of(asked)]
    return sorted((min(ways, key=rank_of) for ways in tried), key=rank_of), sum(map(len, tried))


# ---- the answer ----
PARTS = {"compute": "compute", "tensor": "sums of tp", "bubble": "bubble", "messages": "messages of pp", "data": "dp",
         "update": "update"}


def most_of(t):
    """What takes longest besides compute, if it takes a tenth of the step; else compute."""
    most = max(list(PARTS)[1:], key=lambda part: getattr(t, part))
    if getattr(t, most) <= 0.1 * t.seconds: most = "compute"
    return f"{PARTS[most]} {100 * getattr(t, most) / t.seconds:.0f} %"


def row_of(o, r):
    p, t = r.plan, r.time
    row = {"name": f"dp={p.dp},tp={p.tp},pp={p.pp} zero {p.zero}", "dp": p.dp, "tp": p.tp, "pp": p.pp, "zero": p.zero,
           "chunks": p.chunks, "micro": p.micro, "kept": p.kept, "fits": r.error is None}
    if r.total < math.inf: row["bytes"] = float(r.total)
    if r.error: return {**row, "why_not": r.error}
    return {**row, "program": program_of(p), "seconds": t.seconds, "mfu": t.mfu, "tokens_per_s": t.tokens_per_s,
            "seconds_of": {name: float(getattr(t, part)) for part, name in PARTS.items()}, "most": most_of(t),
            **cost_of(o, t.tokens_per_s, p.ranks)}


def answer(o):
    require(o.device_gpu, f"--mesh all needs a --gpu whose peak is known: {', '.join(GPUS)}")
    gpu, s, batch = o.device_gpu, shape_of(o), o.total_batch_size // o.seq_len
    if gpu.is_here: gpu = gpu._replace(memory=gpu.memory / o.ranks, per_node=gpu.per_node or o.ranks) # ranks share this machine
    results, tried = search(s, gpu, o.ranks, batch, o.seq_len, 1e9 * o.reserve)
    rows = [row_of(o, r) for r in results]
    columns = [*plain(("chunks", "micro", "kept")), ("bytes", "B", "bytes"), ("step ms", ".1f", "ms"), ("MFU", ".1%", "mfu"),
               ("most of the step", "", "most"), ("program", "", "program"), *COST]
    items = [f"{s.name}: {s.L} blocks, {s.C} channels, {s.NH} heads, {s.V} tokens, {1e-9 * s.parameters():.4g} B parameters",
             f"{batch} x {o.seq_len} tokens a step, on {o.ranks} ranks, each with one {gpu.what} of {1e-9 * gpu.memory:.4g} GB,"
             f" {o.reserve:.4g} of these in reserve",
             f"{tried} ways of {len(results)} meshes and stages of ZeRO, of which {sum(row['fits'] for row in rows)} fit; of "
             "those that"
             " take as long the simplest is first",
             Table("mesh", columns, [row | {"ms": 1e3 * row.get("seconds", math.nan)} for row in rows])]
    if s.llama: items.append("bytes are estimated (mesh.py): no program of this course has such a model")
    return items, lambda: {"model": s.name, "bytes_are_exact": not s.llama, "gpu": gpu.name, "ranks": o.ranks,
                           "batch": batch, "seq_len": o.seq_len, "meshes": rows}
