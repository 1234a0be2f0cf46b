"""Other questions than the tables of stages: --params, --compress all and --recommend."""
from tool import format_bytes, require
from machines import GPU_NAMES
from mesh import INPUTS
from options import shape_of, with_compression
from tables import Compared, cell, cost_of, device_sizes, micro_batches, print_row, print_sizes
from search import (Asked, PARTS, bound_of, command_of, exact_bytes_of, plan_of, program_of, search, stage_of,
                    why, why_first)
from steps import METHODS, QUANTISE_BLOCK, is_possible, segments_of, touched_seconds
from questions import DDP, FSDP, KINDS, STAGES, STAGE_NAMES, ZERO1, ZERO2, ZERO3, bytes_of, mesh_name, total_of


# ---- --params: bytes of a model of which only the number of parameters is known ----
def state_bytes(o, stage, N=1):
    """Of a parameter's weight, gradient and optimizer state, on one of N ranks. In 16 bits 2 + 2 + 12, with an fp32 master copy
    and two moments (Rajbhandari et al. 2020, section 3.1); in fp32 4 + 4 + 8. Our fsdp's shards are always fp32.
    Stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 and FSDP everything."""
    halves = o.precision != "fp32" and stage != FSDP
    X = 2 if halves else 4
    whole = (X, ZERO3), (X, ZERO2), (8 + (4 if halves and o.master == "on" else 0), ZERO1)
    return [x / N if stage >= since else x for x, since in whole]


def json_params(o):
    """For the ranks of the ZeRO paper's table 1, and those that are asked for."""
    return {"parameters": o.params, "ranks": o.ranks, "bytes_per_rank": [
        {"ranks": N, **{STAGE_NAMES[stage]: o.params * sum(state_bytes(o, stage, N)) for stage in STAGES}}
        for N in sorted({1, 4, 16, 64, 256, 1024, o.ranks})]}


def print_params(o):
    one, parts = state_bytes(o, DDP), [state_bytes(o, stage, o.ranks) for stage in STAGES]
    print(f"{o.params:.4g} parameters in {o.precision}: {one[0]} + {one[1]} + {one[2]} bytes each, without activations and buffers")
    print_row(f"\nbytes per rank of {o.ranks}".ljust(25), STAGE_NAMES[:5])
    for name, kinds in zip(("parameters", "gradients", "optimizer state", "total"), (*zip(*parts), map(sum, parts))):
        print_row(f"  {name}", [format_bytes(o.params * x) for x in kinds])
    if sum(one) < 16: print("fsdp's shards are fp32, which is its master copy: 4 + 4 + 8 bytes; shards of 16 bits would take zero-3's")
    print_row("\nGB per rank".ljust(25), STAGE_NAMES[:5])
    for row in json_params(o)["bytes_per_rank"]:
        gbs = [1e-9 * row[STAGE_NAMES[stage]] for stage in STAGES]
        print_row(f"  {row['ranks']}", [f"{gb:.2f}" if gb < 100 else f"{gb:.1f}" for gb in gbs])
    print_sizes(o, "fits, largest")
    for stage, needs in zip(STAGES, (o.params * sum(part) for part in parts)):
        print(f"  {STAGE_NAMES[stage]:<22}" + "".join(
            f"    {'yes' if needs <= room else 'no':<3} {1e-9 * o.params * room / needs:7.3g} B" for _, room in device_sizes(o)))


# ---- --compress all: every method beside train_gpt2_ddp, and what each sends on more ranks ----
# Efficiency is printed by both definitions, as at the end of a run: compute / (compute + communication), and with what is exposed
# of it. Neither counts the time of compressing, which the step has.
def method_rows(o, c):
    """What each sends and takes; {} where gradients have 16 bits already."""
    rows, buffers = {}, bytes_of(c.plan, DDP).memory.get("communication", 0)
    for method in METHODS:
        way, rows[method] = with_compression(o, c.plan, method), {}
        if not is_possible(way): continue
        b, t = bytes_of(way, DDP), c.step(way, DDP)
        rows[method] = {name: float(x) for name, x in {
            "sent_per_step": b.sent, "errors": b.memory.get("errors", 0), "message_buffers": b.memory.get("communication", 0) - buffers,
            "compressing": t.compressing, "communication": t.communication, "exposed": t.exposed, "seconds": t.seconds,
            "efficiency_communication": t.compute / (t.compute + t.communication),
            "efficiency_exposed": t.compute / (t.compute + t.exposed)}.items()}
    return rows


# Two words above each column, its width and format, and what is in it.
METHOD_COLUMNS = (
    ("sent", "a step", 11, "B", "sent_per_step"), ("of", "ddp's", 8, ".1%", "sent_per_step_of_ddp"), ("", "errors", 11, "B", "errors"),
    ("message", "buffers", 11, "B", "message_buffers"), ("compress", "ing", 8, "ms", "compressing"),
    ("communi-", "cation", 8, "ms", "communication"), ("", "exposed", 8, "ms", "exposed"), ("", "step", 8, "ms", "seconds"),
    ("step of", "ddp's", 8, ".2f", "seconds_of_ddp"), ("compute /", "commun.)", 9, ".1%", "efficiency_communication"),
    ("(compute+", "exposed)", 9, ".1%", "efficiency_exposed"))


def print_methods(o):
    c = Compared(o)
    plan, rows = c.plan, method_rows(o, c)
    given = f", and summing all gradients {o.communication_ms:.4g} ms" if o.communication_ms > 0 else ""
    print(f"{plan.shape.parameters()} parameters, {o.precision}; {plan.N} ranks, {plan.B} x {plan.T} tokens in {micro_batches(plan)} each;"
          f" computing takes {1e3 * c.step(plan, DDP).compute:.4g} ms{given}")
    for i, left in enumerate(("", "ms of a step")): print(f"{left:<14}" + "".join(f" {c[i]:>{c[2]}}" for c in METHOD_COLUMNS))
    for method, row in rows.items():
        if row: row |= {f"{key}_of_ddp": row[key] / rows["none"][key] for key in ("sent_per_step", "seconds")}
        cells = [cell(o, row[key], width, form) for _, _, width, form, key in METHOD_COLUMNS if row]
        print(f"  {method:<12}" + ("".join(cells) or " gradients have 16 bits already"))
    print_growth(o)


def print_growth(o):
    """Bytes that a rank sends for each element of a large matrix. In PyTorch's quantization_pertensor_hook every rank gathers all
    ranks' gradients in int8 (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py)."""
    ranks, block = (2, 4, 8, 16, 64, 512), 4 / QUANTISE_BLOCK
    def ring(N): return 2 * (N - 1) / N
    def gathered(N): return N - 1
    print("\nsent by each rank, bytes per element     " + "".join(f" {N:7d}" for N in ranks) + " ranks")
    for name, nbytes, times in (("fp32, ring", 4, ring), ("bf16, ring", 2, ring), ("int8, parts exchanged", 1 + block, ring),
                                ("int4, parts exchanged", 0.5 + block, ring), ("sign, gathered", 1 / 8, gathered),
                                ("top-k, gathered", 8 * o.top_k_fraction, gathered), ("PyTorch's int8 hook, gathered", 1, gathered)):
        print(f"  {name:<39}" + "".join(f" {nbytes * times(N):7.3f}" for N in ranks))


def json_methods(o):
    c = Compared(o)
    rows = method_rows(o, c).items()
    return {"ranks": c.plan.N, "methods": [{"method": method, "possible": row != {}, **row} for method, row in rows]}


# ---- --recommend ----
def asked_of(o):
    require(o.device_gpu, f"--recommend needs a --gpu whose peak is known: {GPU_NAMES}")
    gpu = o.device_gpu
    if gpu.peak16 == 0: gpu = gpu._replace(memory=gpu.memory / o.ranks, per_node=o.ranks, nics=1) # ranks share this machine
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
        print(f"    {'mesh':<20} {'zero':>5} {'chunks':>7} {'micro':>6} {'kept':<10} {'GB':>8} {'step ms':>9} {'MFU':>7}"
              "  most of the step")
        for i, r in enumerate(results[:min(fits, 5)], 1):
            p, t, bound = r.plan, r.time, bound_of(r.time)
            print(f"{i:2d}  {mesh_name(plan_of(p)):<20} {p.zero:5d} {p.chunks:7d} {p.micro:6d}"
                  f" {'inputs' if p.kept == INPUTS else 'all':<10} {1e-9 * r.bytes.total:8.1f} {1e3 * t.seconds:9.1f}"
                  f" {100 * t.mfu:6.1f}%  {PARTS[bound]} {100 * getattr(t, bound) / t.seconds:.0f} %")
        print(f"\n{why_first(results, fits)}")
        print_bytes(o, first)
        print_compression(first)
        if o.tokens > 0:
            c, price = cost_of(o, first.time.tokens_per_s, asked.ranks), ""
            if o.price > 0: price = f", {c['price']:.0f} at {o.price:.4g} each"
            print(f"{o.tokens:.4g} tokens: {c['hours']:.4g} hours, {c['gpu_hours']:.4g} GPU-hours,"
                  f" {c['kwh'] if o.watts > 0 else 0:.4g} kWh of {o.watts:.0f} W each{price}")
        print(f"\n    {command_of(first.plan)}")
    print("\nwhy not")
    for r in results[1 if fits else 0:]:
        print(f"  {mesh_name(plan_of(r.plan)):<20} zero {r.plan.zero}: {why(r, first)}")


def print_bytes(o, first):
    """By kind, on the rank that needs most, by the formulas of the program that runs it."""
    p = first.plan
    if p.shape.llama:
        print("bytes are estimated (mesh.py): no program of this course has such a model")
        return
    kinds = [(kind, n) for kind, n in exact_bytes_of(p).memory.items() if n > 0]
    print(f"bytes are train_gpt2_{program_of(p)}'s own, of the rank that needs most: "
          + ", ".join(f"{kind} {n if o.exact else format_bytes(n)}" for kind, n in kinds)
          + "; not counted: the rest of the layers' workspace")


def print_compression(first):
    """What --compress int8 would change. Exposed communication falls at least as its bytes do."""
    p, ms, exposed = first.plan, 1e3 * first.time.seconds, 1e3 * first.time.data
    share = (1 + 4 / QUANTISE_BLOCK) / p.program.element_bytes
    if p.dp == 1: return
    print(f"compressed gradients: dp's communication is exposed for {exposed:.1f} of {ms:.1f} ms", end="")
    if exposed < 0.01 * ms: print(", so there is nothing to gain")
    elif stage_of(p) != DDP or p.shape.llama:
        print(f"; int8 would be {100 * share:.0f} % of the bytes, but no program here compresses them on such a mesh")
    else:
        plan = plan_of(p)
        int8 = plan._replace(method="int8", memory_bandwidth=p.gpu.bandwidth)
        more = total_of(int8, DDP) - total_of(plan, DDP)
        touched = sum(part for u in segments_of(int8) for part in (u.packing, u.unpacking))
        step = ms - exposed * (1 - share) + 1e3 * touched_seconds(int8, touched)
        print(f"; with train_gpt2_compress --compress int8, which sends {100 * share:.0f} % of the bytes and takes"
              f" {format_bytes(more)} more, a step would have about {step:.1f} ms")


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
