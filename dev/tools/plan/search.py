"""--recommend: searches a mesh, every way to divide ranks into data, tensor and pipeline parallelism, with what ZeRO shards, what
is recomputed, and the size of a micro-batch; and says why the first wins and why each other loses. Pruned is what does not divide,
then what does not fit. Bytes are those of the program that would run it, if there is one."""
import itertools, math
from collections import namedtuple
from typing import NamedTuple
from tool import format_bytes, print_table, require
from machines import GPU_NAMES
from mesh import ALL, INPUTS, SHARD, SHARD_FP32, MeshBytes, MeshPlan, MeshTime
from options import shape_of
from questions import (DDP, FSDP, KINDS, MAX_BLOCKS, MESH, PP, PROGRAMS, TP, ZERO1, ZERO2, Plan, bytes_of, mesh_name, options_of,
                       total_of)
from shapes import is_gpt2
from steps import QUANTISE_BLOCK, segments_of, touched_seconds
from tables import cost_of


# ---- the program of this course that runs a way ----
def strategy_of(p):
    """Of the simplest program that can."""
    if p.tp > 1 and p.pp > 1 or p.zero > 0 and p.tp * p.pp > 1: return MESH
    return TP if p.tp > 1 else PP if p.pp > 1 else (DDP, ZERO1, ZERO2, FSDP)[p.zero]


def plan_of(p):
    """As the program plans it with the options of command_of and its defaults."""
    s, precision = p.shape, "bf16" if p.program.element_bytes == 2 else "fp32"
    return Plan(s if is_gpt2(s) else s._replace(T=p.T), p.micro, p.T, p.ranks, precision, p.micro_batches, p.kept == INPUTS,
                gpu=p.gpu.peak16 > 0, t=p.tp, rows=p.rows, p=p.pp, schedule="interleaved" if p.chunks > 1 else "1f1b", v=p.chunks,
                zero_stage=p.zero, gpu_memory=p.gpu.memory)


def program_of(p): return "single" if p.ranks == 1 else PROGRAMS[strategy_of(p)]
def exact_bytes_of(p): return bytes_of(plan_of(p), strategy_of(p))


def command_of(p):
    """The program with its options."""
    s, program, strategy = p.shape, program_of(p), strategy_of(p)
    if s.llama: return "(no program of this course has grouped queries, gated MLPs and an untied head)"
    model = s.name if is_gpt2(s) else f"d{s.L} --channels {s.C} --heads {s.NH} --vocab-size {s.V}"
    how = options_of(plan_of(p), strategy) + " " if strategy not in (DDP, FSDP) else ""
    start = f"mpirun -np {p.ranks} " if program != "single" else ""
    return (f"{start}./train_gpt2_{program} --model {model} --seq-len {p.T} {how}--batch-size {p.micro}"
            f" --total-batch-size {p.batch * p.T} --recompute {'block' if p.kept == INPUTS else 'none'}")


# ---- search ----
Asked = namedtuple("Asked", "shape gpu ranks batch T reserve") # batch: sequences of a step, each of T tokens


class Result(NamedTuple):
    """The best way of one mesh and one stage of ZeRO; or the plan that came nearest to fitting, with the reason why it does not."""
    plan: MeshPlan
    bytes: MeshBytes = None  # None: there cannot be such a mesh
    time: MeshTime = None    # None: it does not fit
    error: str = None        # None: it fits

    total = property(lambda self: self.bytes.total if self.bytes else math.inf)


# as_long: whether a takes as long as b, within half a percent. rank_of: what fits, by steps of half a percent; the rest by bytes.
def machinery(p): return 100 * (p.dp > 1) + 200 * (p.tp > 1) + 200 * (p.pp > 1) + 20 * p.zero + 5 * (p.kept == INPUTS) + p.chunks
def as_long(a, b): return abs(a.time.seconds / b.time.seconds - 1) <= 0.005
def simplicity(r): return machinery(r.plan), -r.plan.micro, r.time.seconds
def rank_of(r): return (1, r.total) if r.error else (0, math.floor(math.log(r.time.seconds) / 0.005), *simplicity(r))


def in_order(fits):
    """The fastest first, but of all that take as long as it does the one with least machinery; then so the rest."""
    groups = []
    for r in sorted(fits, key=lambda r: r.time.seconds):
        if groups and as_long(r, groups[-1][0]): groups[-1].append(r)
        else: groups.append([r])
    return [r for group in groups for r in sorted(group, key=simplicity)]


def try_way(asked, p):
    """With the bytes of this course's program, if there is one."""
    error, ours = p.error(), not p.shape.llama
    if ours and p.shape.Vp % p.tp != 0: error = error or "the vocabulary does not divide"
    if ours and p.shape.L > MAX_BLOCKS: error = error or "there are more blocks than this course's programs have"
    if error: return Result(p, error=error)
    used = p.bytes()
    if ours:
        b = exact_bytes_of(p)
        *kinds, sent, workspace = (float(b.memory.get(kind, 0)) for kind in KINDS[:6])
        used = MeshBytes(*kinds, sent + workspace, b.total + p.reserve)
    return Result(p, used, error="it does not fit") if used.total > asked.gpu.memory else Result(p, used, p.step())


def ways_of(asked, dp, tp, pp, zero):
    """All micro-batches, recomputations and chunks. On a CPU programs are those of fp32."""
    program = SHARD if asked.gpu.peak16 > 0 else SHARD_FP32
    micros = [1 << k for k in range(max(asked.batch // dp, 1).bit_length())]
    for micro, kept, chunks in itertools.product(micros, (ALL, INPUTS), (1, 2, 4) if pp > 1 else (1,)):
        if chunks == 1 or asked.shape.L % (pp * chunks) == 0:
            yield MeshPlan(asked.shape, asked.gpu, dp, tp, pp, zero, asked.batch, micro, asked.T, chunks, tp > 1, kept, program,
                           asked.reserve)


def meshes_of(asked):
    """Up to twice a node's GPUs share matrices. Of pipelines ZeRO's stages are 0 and 1, because 2 and 3 would reduce or gather in
    every micro-batch; of GPT's also with tp > 1, as train_gpt2_3d has it."""
    tps = [1 << k for k in range(21) if 1 << k <= 2 * asked.gpu.per_node and asked.ranks % (1 << k) == 0]
    for tp, pp in itertools.product(tps, range(1, asked.shape.L + 1)):
        if asked.ranks % (tp * pp) != 0: continue
        dp = asked.ranks // (tp * pp)
        stages = 0 if dp == 1 else 3 if pp == 1 and (tp == 1 or asked.shape.llama) else 1
        yield from ((dp, tp, pp, zero) for zero in range(stages + 1))


def search(asked):
    """Results, those that fit first, best first; how many fit; how many ways were tried."""
    tried = [[try_way(asked, p) for p in ways_of(asked, *mesh)] for mesh in meshes_of(asked)]
    results = sorted((min(ways, key=rank_of) for ways in tried), key=rank_of)
    fits = [r for r in results if not r.error]
    return in_order(fits) + results[len(fits):], len(fits), sum(map(len, tried))


# ---- reasons ----
PARTS = {"compute": "compute", "tensor": "sums of tp", "bubble": "bubble", "messages": "messages of pp", "data": "dp",
         "update": "update"}


def most_of(t):
    """What takes longest besides compute, if it takes a tenth of the step; else compute."""
    most = max(list(PARTS)[1:], key=lambda part: getattr(t, part))
    if getattr(t, most) <= 0.1 * t.seconds: most = "compute"
    return f"{PARTS[most]} {100 * getattr(t, most) / t.seconds:.0f} %"


def why_slower(r, winner):
    """By the part in which it loses most against the winner."""
    p, t, w, m = r.plan, r.time, winner.time, r.plan.micro_batches
    part = max(PARTS, key=lambda part: getattr(t, part) - getattr(w, part))
    ms, activation = 1e3 * getattr(t, part), p.program.element_bytes * p.tokens * p.shape.C
    if part == "tensor":
        busbw = 1e-9 * activation * (p.tp - 1) / p.tp / p.collective(p.tp, 1, False, activation)
        crosses = " crosses nodes" if p.tp > p.gpu.per_node else ""
        return (f"t = {p.tp}{crosses}: {8 * p.shape.L // p.pp * m} gathers and reduce-scatters of {1e-6 * activation:.3g} MB at"
                f" {busbw:.3g} GB/s, {ms:.4g} ms of them not hidden")
    if part == "bubble":
        chunks = f" x {p.chunks} chunks" if p.chunks > 1 else ""
        return (f"bubble: {p.pp - 1} of {p.pp} stages wait, over {m} micro-batches{chunks}, {ms:.4g} ms or"
                f" {100 * t.bubble / t.seconds:.3g} % of the step")
    if part == "data":
        g, sent = p.group(p.dp, p.tp * p.pp), "gathered and reduced" if p.zero == 3 else "of gradients"
        gbs, where = (g.nic * g.nics, "of interfaces") if g.per_node < p.dp else (1e-9 * p.gpu.inside, "inside a node")
        return (f"{p.dp} copies: {1e-9 * p.program.gradient_bytes * p.parameters():.3g} GB {sent} over {gbs:.3g} GB/s {where},"
                f" {ms:.4g} ms not hidden")
    if part == "messages":
        return f"{2 * p.chunks * (m + p.pp - 1)} messages of {1e-6 * activation / p.tp:.3g} MB between stages, {ms:.4g} ms"
    if part == "update":
        return f"each rank updates {1e-9 * p.parameters() / (p.dp if p.zero > 0 else 1):.3g} B parameters, {ms:.4g} ms"
    if p.kept == INPUTS != winner.plan.kept: return f"it must recompute, which takes {ms - 1e3 * w.compute:.4g} ms more"
    return f"its products are smaller: the same FLOPs take {ms - 1e3 * w.compute:.4g} ms more"


def why(r, winner):
    """Why a way is not the first."""
    if r.error is None: return "it takes as long, and has more machinery" if as_long(r, winner) else why_slower(r, winner)
    if r.bytes is None: return r.error
    b, p = r.bytes, r.plan
    states, most = b.parameters + b.gradients + b.optimizer + b.gathered, f"{1e-9 * p.gpu.memory:.4g}"
    if states + p.reserve > p.gpu.memory:
        return f"parameters, gradients and optimizer state alone are {1e-9 * states:.4g} GB of {most}"
    return (f"{1e-9 * b.total:.4g} GB of {most}: even recomputed, activations of {p.micro} x {p.T} tokens are"
            f" {1e-9 * b.activations:.4g} GB")


def why_first(results, fits):
    """Two sentences why the first wins: what it has room for, and what the next would lose."""
    first = results[0]
    def named(r): return f"dp={r.plan.dp}, tp={r.plan.tp}, pp={r.plan.pp} with ZeRO-{r.plan.zero}"
    text = (f"It fits with {1e-9 * first.bytes.total:.4g} of {1e-9 * first.plan.gpu.memory:.4g} GB and computes"
            f" {100 * first.time.compute / first.time.seconds:.3g} % of the time")
    least = min([first, *(r for r in results[1:] if r.error)], key=lambda r: machinery(r.plan)) # if it does not fit
    if least is not first: text += f", while {named(least)} does not ({why(least, first)})"
    if fits < 2: return text + ". Nothing else fits."
    second = results[1]
    if as_long(second, first): return text + f". The next, {named(second)}, takes as long and has more machinery."
    percent = 100 * (second.time.seconds / first.time.seconds - 1)
    return text + f". The next, {named(second)}, takes {percent:.2g} % longer: {why(second, first)}."


# ---- what is printed ----
def asked_of(o):
    require(o.device_gpu, f"--recommend needs a --gpu whose peak is known: {GPU_NAMES}")
    gpu = o.device_gpu
    if gpu.peak16 == 0: gpu = gpu._replace(memory=gpu.memory / o.ranks, per_node=gpu.per_node or o.ranks, nics=1) # ranks share this machine
    return Asked(shape_of(o), gpu, o.ranks, o.total_batch_size // o.seq_len, o.seq_len, 1e9 * o.reserve)


def print_recommendation(o):
    """At most five, then why; then for every other mesh the first reason why not."""
    asked = asked_of(o)
    results, fits, tried = search(asked)
    s, gpu, first = asked.shape, asked.gpu, results[0]
    print(f"{s.name}: {s.L} blocks, {s.C} channels, {s.NH} heads, {s.V} tokens, {1e-9 * s.parameters():.4g} B parameters")
    print(f"{asked.batch} x {asked.T} tokens a step, on {asked.ranks} ranks, each with one {gpu.what} of {1e-9 * gpu.memory:.4g} GB,"
          f" {1e-9 * asked.reserve:.4g} of these in reserve")
    print(f"{tried} ways of {len(results)} meshes and stages of ZeRO, of which {fits} fit\n")
    if fits:
        print_table(["", "mesh", "zero", "chunks", "micro", "kept", "GB", "step ms", "MFU", "most of the step"], *(
            [f" {i}", mesh_name(plan_of(p)), p.zero, p.chunks, p.micro, p.kept, f"{1e-9 * b.total:.1f}", f"{1e3 * t.seconds:.1f}",
             f"{100 * t.mfu:.1f}%", most_of(t)] for i, (p, b, t, _) in enumerate(results[:min(fits, 5)], 1)))
        print(f"\n{why_first(results, fits)}")
        print_bytes(o, first.plan)
        print_compression(first)
        if o.tokens > 0:
            c = cost_of(o, first.time.tokens_per_s, asked.ranks)
            price = f", {c['price']:.0f} at {o.price:.4g} each" if o.price > 0 else ""
            print(f"{o.tokens:.4g} tokens: {c['hours']:.4g} hours, {c['gpu_hours']:.4g} GPU-hours,"
                  f" {c['kwh'] if o.watts > 0 else 0:.4g} kWh of {o.watts:.0f} W each{price}")
        print(f"\n    {command_of(first.plan)}")
    print("\nwhy not")
    for r in results[fits > 0:]: print(f"  {mesh_name(plan_of(r.plan)):<20} zero {r.plan.zero}: {why(r, first)}")


def print_bytes(o, p):
    """By kind, on the rank that needs most, by the formulas of the program that runs it."""
    if p.shape.llama: return print("bytes are estimated (mesh.py): no program of this course has such a model")
    kinds = [f"{kind} {n if o.exact else format_bytes(n)}" for kind, n in exact_bytes_of(p).memory.items() if n > 0]
    print(f"bytes are train_gpt2_{program_of(p)}'s own, of the rank that needs most: {', '.join(kinds)}; not counted: the rest of"
          " the layers' workspace")


def print_compression(first):
    """What --compress int8 would change. Exposed communication falls at least as its bytes do."""
    p, ms, exposed = first.plan, 1e3 * first.time.seconds, 1e3 * first.time.data
    share = (1 + 4 / QUANTISE_BLOCK) / p.program.element_bytes
    if p.dp == 1: return
    text = ", so there is nothing to gain"
    if exposed >= 0.01 * ms:
        text = f"; int8 would be {100 * share:.0f} % of the bytes, but no program here compresses them on such a mesh"
        if strategy_of(p) == DDP and not p.shape.llama:
            plan = plan_of(p)
            int8 = plan._replace(method="int8", memory_bandwidth=p.gpu.bandwidth)
            touched = touched_seconds(int8, sum(u.packing + u.unpacking for u in segments_of(int8)))
            text = (f"; with train_gpt2_compress --compress int8, which sends {100 * share:.0f} % of the bytes and takes"
                    f" {format_bytes(total_of(int8, DDP) - total_of(plan, DDP))} more, a step would have about"
                    f" {ms - exposed * (1 - share) + 1e3 * touched:.1f} ms")
    print(f"compressed gradients: dp's communication is exposed for {exposed:.1f} of {ms:.1f} ms{text}")


def json_result(r, first):
    p, t = r.plan, r.time
    found = {"dp": p.dp, "tp": p.tp, "pp": p.pp, "zero": p.zero, "chunks": p.chunks, "micro": p.micro, "recompute": p.kept == INPUTS,
             "fits": r.error is None, "why_not": "" if r is first and not r.error else why(r, first)}
    if r.bytes: found["bytes"] = float(r.total)
    if r.bytes and not p.shape.llama:
        memory = exact_bytes_of(p).memory
        found |= {"bytes_of": {kind: memory.get(kind, 0) for kind in KINDS}, "command": command_of(p)}
    if r.error: return found
    return {**found, "seconds": t.seconds, "mfu": t.mfu, "tokens_per_s": t.tokens_per_s,
            "seconds_of": {name: float(getattr(t, part)) for part, name in PARTS.items()}}


def json_recommendation(o):
    asked = asked_of(o)
    results, fits, _ = search(asked)
    return {"model": asked.shape.name, "bytes_are_exact": not asked.shape.llama, "gpu": asked.gpu.name, "ranks": asked.ranks,
            "batch": asked.batch, "seq_len": asked.T, "why": why_first(results, fits) if fits else "",
            "command": command_of(results[0].plan) if fits else "", "meshes": [json_result(r, results[0]) for r in results]}
