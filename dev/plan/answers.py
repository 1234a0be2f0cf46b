"""What build/plan answers: lines and tables to read, and the same numbers as JSON: bytes, seconds, shares of 1. An answer is
(items, a function that makes the JSON), and an item is a line or a Table; show() prints both.

The usual question compares strategies, numbers of ranks that share a replica of the model, schedules, and the ranks of a
pipeline: their bytes, what fits, and the seconds of a step. Two others are --params and --compress all; search.py and validate.py
have the rest."""
import math
from collections import namedtuple
from typing import NamedTuple
from tool import format_bytes, print_table
from machines import LINKS
from options import (MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES, network_of, peak_of, plan_of, room_of, with_context, with_mesh,
                     with_pipe)
from pipelines import pipeline_step
from questions import (CP, DDP, FSDP, KINDS, MESH, PP, SCHEDULES, STRATEGIES, STRATEGY_NAMES, TP, ZEROPP, Plan, blocks_of, bytes_of,
                       bytes_of_states, copy_ranks, divides, extreme_rank, mesh_name, own_rank, plan_split, sent_of_all, slots,
                       total_of)
from steps import METHODS, QUANTISE_BLOCK, flops_done, is_possible, step, unit_seconds

MOST_RANKS = 6 # of a pipeline in a table
CP_WAYS = [("ulysses", "contiguous"), *((how, balance) for how in ("allgather", "ring") for balance in ("contiguous", "zigzag"))]
RARE = "workspace", "errors" # kinds that few ways have


# ---- what is printed ----
# columns: (heading, format, key of a row); rows: by key. "name" is the first column, and a row that has "why_not" has nothing else.
Table = namedtuple("Table", "title columns rows")


def cell(o, x, form):
    """A number as its column's format says; B: bytes, ms: seconds as milliseconds. Text stays as it is."""
    if isinstance(x, str): return x
    if math.isnan(x): return "-"
    if form == "B": return str(math.floor(x + 1e-3)) if o.exact else format_bytes(math.floor(x + 1e-3))
    return format(1e3 * x, ".2f") if form == "ms" else format(x, form)


def show(o, items):
    """Columns of which no row knows anything are left out."""
    def knows(row, key): return isinstance(row.get(key, math.nan), str) or not math.isnan(row.get(key, math.nan))
    for item in items:
        if isinstance(item, str):
            print(item)
            continue
        columns = [column for column in item.columns if any(knows(row, column[2]) for row in item.rows if "why_not" not in row)]
        def words(row): return [row["why_not"]] if "why_not" in row else [cell(o, row[key], form) for _, form, key in columns]
        print()
        print_table([item.title, *(name for name, _, _ in columns)], *([row["name"], *words(row)] for row in item.rows))


def plain(names): return [(str(name), "", name) for name in names]


# Heading, format, key of a row, and the strategies that have the column; none: all.
COLUMNS = (
    ("sent a step", "B", "sent_per_step"), ("of ddp's", ".1%", "sent_of_ddp"), ("errors", "B", "errors"),
    ("buffers", "B", "message_buffers"), ("compressing", "ms", "compressing", None), ("compute ms", "ms", "compute"),
    ("tp", "ms", "tp", MESH), ("uneven", "ms", "bubble", CP), ("bubble", "ms", "bubble", PP, MESH),
    ("of step", ".1%", "of_step", PP),
    ("of work", ".1%", "of_work", PP), ("formula", "ms", "formula", PP), ("communication", "ms", "communication"),
    ("exposed", "ms", "exposed"), ("step ms", "ms", "seconds"), ("of ddp's", ".2f", "step_of_ddp"),
    ("tokens/s", ".0f", "tokens_per_s"), ("efficiency", ".1%", "efficiency"),
    ("efficiency", ".1%", "efficiency_communication"), ("with exposed", ".1%", "efficiency_exposed"))
COST = ("hours", ".4g", "hours"), ("GPU-hours", ".4g", "gpu_hours"), ("kWh", ".4g", "kwh"), ("price", ".4g", "price")


def table_of_times(title, strategy, rows):
    columns = [(name, form, key) for name, form, key, *strategies in COLUMNS if strategy in (strategies or [strategy])]
    return Table(title, [*columns, *COST], rows)


def cost_of(o, tokens_per_s, gpus):
    """What a run of --tokens costs."""
    if o.tokens == 0: return {}
    hours, watts = o.tokens / tokens_per_s / 3600, o.device_gpu.watts if o.device_gpu else 0
    return {"hours": hours, "gpu_hours": hours * gpus, "kwh": 1e-3 * watts * hours * gpus or math.nan,
            "price": hours * gpus * o.price or math.nan}


def device_sizes(o):
    """(name, bytes) of the devices of the tables of what fits: the one that is asked for, or nominal sizes."""
    if o.device_gpu or o.memory > 0: return [(o.room_of, room_of(o, o.ranks))]
    return [(f"{gb} GB", 1e9 * gb) for gb in (24, 40, 80, 141)]


def table_of_sizes(o, title, rows):
    """rows: {name: what of a size}"""
    sizes = device_sizes(o)
    return Table(title, plain(name for name, _ in sizes),
                 [{"name": f"  {name}", **{size: of(room) for size, room in sizes}} for name, of in rows.items()])


# ---- the ways that are compared ----
class Way(NamedTuple):
    strategy: int
    plan: Plan
    name: str

    def bytes(self, recompute=False):
        return bytes_of(self.plan.recomputed if recompute else self.plan._replace(recompute=False), self.strategy)

    def fits(self, room): return "yes" if self.bytes().total <= room else "recomputed" if self.bytes(True).total <= room else "no"

    def json(self):
        kinds, again = (dict.fromkeys(KINDS, 0) | b.memory | {"total": b.total} for b in (self.bytes(), self.bytes(True)))
        return {"name": self.name, "ranks": self.plan.N, "sent_per_step": float(self.bytes().sent), "bytes": kinds,
                "bytes_recomputed": again}

    def facts(self, is_one):
        """A column: (name, bytes, or as text what is none). is_one: this is one rank of a pipeline, not the one that keeps most."""
        kept, again, plan, strategy = self.bytes(), self.bytes(True), self.plan, self.strategy
        def extreme(most): return extreme_rank(plan._replace(recompute=False), strategy, most)
        if strategy == PP and not is_one:
            yield "  on the rank with most", f"rank {extreme(True)}"
            yield "    or recomputed", f"rank {extreme_rank(plan.recomputed, strategy)}"
        for kind in (*KINDS, "total"):
            first, second = (b.total if kind == "total" else b.memory.get(kind, 0) for b in (kept, again))
            yield f"  {kind}", first
            if kind in ("activations", "total"): yield "    or recomputed", second
        yield "  sent per step", sent_of_all(plan, strategy) // plan.N
        along = bytes_of(plan, strategy).along
        for axis in ("tp", "pp", "dp") if strategy == MESH else (): yield f"    along {axis}", math.floor(along[axis] + 0.5)
        if strategy in (PP, MESH): yield "  activations at a time", str(slots(plan, own_rank(plan))) # interleaved: of one chunk
        if is_one: yield "  blocks", str(blocks_of(plan, plan.rank))
        elif strategy == PP:
            yield "  on the rank with least", f"rank {extreme(False)}"
            yield "    total", total_of(plan._replace(rank=extreme(False)), PP)


def divide_batch(plan, strategy, tokens):
    """The plan with the micro-batches of a step of so many tokens (0: as they are), and why there are none, or too many to play."""
    if tokens == 0: return plan, ""
    copies, most = plan.N // copy_ranks(plan, strategy), PLAYED_MICRO_BATCHES if strategy in (PP, MESH) else MOST_MICRO_BATCHES
    rounds, rest = divmod(tokens, max(copies * plan.tokens, 1))
    if copies == 0 or rounds < 1 or rest: return plan, f"{tokens} tokens are no multiple of {copies} x {plan.B} x {plan.T}"
    if rounds > most: return plan, f"{rounds} micro-batches are more than the {most} that can be planned"
    return plan._replace(accumulation=rounds), ""


# Ways that share a table of bytes, below a line; None: no table. times: what their table of times is called; "": each way has one,
# on more and more ranks. is_one: the table of bytes has the ranks of the first one's pipeline.
Group = namedtuple("Group", "ways line times is_one", defaults=("", "", False))


def way_of(p, strategy):
    return p.how + " zigzag" * (p.balance == "zigzag") if strategy == CP else p.schedule + f" {p.v}" * (p.v > 1)


def groups_of(o, plan):
    each, N = f"{plan.B} x {plan.T} tokens per micro-batch", plan.N
    if o.mesh:
        p = divide_batch(with_mesh(o, plan), MESH, o.total_batch_size)[0]
        yield Group([Way(MESH, p, "mesh")],
                    f"\nmesh {mesh_name(p)}: replicas of the model, ranks that share its matrices, stages; {each},"
                    f" {p.accumulation} a step", "", True)
        return
    yield Group([Way(strategy, plan, STRATEGY_NAMES[strategy]) for strategy in (*STRATEGIES, *[ZEROPP] * (plan.node_ranks > 0))])
    if o.compress not in ("none", "all"):
        how = {"top-k": f"; it sends {o.top_k_fraction:g} of the elements of a matrix", "powersgd": f"; rank {o.rank}"}
        how = how.get(o.compress, "")
        if plan.memory_bandwidth == 0: how += "; compressing takes no time here, because no --memory-bandwidth is known"
        yield Group([Way(DDP, plan, "ddp"), Way(DDP, plan._replace(method=o.compress), f"ddp {o.compress}")],
                    f"\nddp {o.compress}: train_gpt2_compress, from the step on in which it compresses{how}")
    m = f"{o.total_batch_size} tokens" if o.total_batch_size else o.accumulation or o.pipeline_parallel or "p"
    how = "" if o.compares_cp else f"; --cp {o.cp}, {o.cp_balance}"
    cp_ways, schedules = CP_WAYS if o.compares_cp else [(o.cp, o.cp_balance)], SCHEDULES if o.compares else [o.schedule]
    for strategy, letter, asked, compares, plans_of, line in (
            (TP, "t", o.tensor_parallel, False, lambda t: [plan._replace(t=t)],
             f"t ranks share a replica of the model, and {each}{'; they cut its rows' * plan.rows}"),
            (CP, "c", o.context_parallel, o.compares_cp, lambda c: [with_context(plan, c, *way) for way in cp_ways],
             f"c ranks share each sequence, and {each}{how}"),
            (PP, "p", o.pipeline_parallel, o.compares, lambda p: [with_pipe(o, plan, p, schedule) for schedule in schedules],
             f"p ranks share a replica of the model, each with some of its blocks; {each}, {m} a step")):
        # numbers of ranks that divide ranks and model; for one number that is asked for all ways, or if one is asked for that one
        name, ways = STRATEGY_NAMES[strategy], []
        for n in [asked] if asked else (1, 2, 4, 8) if strategy == TP else (2, 4, 8):
            plans = [divide_batch(p, strategy, o.total_batch_size)[0] for p in plans_of(n)]
            ways += [Way(strategy, p, way_of(p, strategy) if compares else f"{name} {n}") for p in plans if divides(p, strategy)]
        yield Group(ways, f"\n{name} {letter}: {line}" if [w.name for w in ways] != ["tp 1"] or asked else None,
                    f"{name} {asked} of {N}" if compares else "" if asked else f"{name} of {N}  {letter}",
                    strategy == PP and asked > 0 and not compares)


# ---- tables of bytes ----
def micro_batches(plan): return f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'}"


def rank_ways(way):
    """The ranks of one pipeline, or if these are too many the one that keeps most and the one that keeps least."""
    plan, strategy, names = way.plan, way.strategy, {r: "" for r in range(way.plan.p)}
    if plan.p > MOST_RANKS: names = {extreme_rank(plan, strategy): "most: ", extreme_rank(plan, strategy, False): "least: "}
    return [Way(strategy, plan._replace(rank=r), f"{name}{'stage' if strategy == MESH else 'rank'} {r}") for r,
            name in names.items()]


def bytes_items(group):
    """Kinds that few ways have are left out where none has any."""
    ways, rows = group.ways, []
    if group.line: yield group.line
    for p in {w.plan.p * w.plan.v: w.plan for w in ways if w.strategy in (PP, MESH)}.values(): # each split once
        own, even = plan_split(p), plan_split(p, "even")
        yield (f"split      {','.join(map(str, own['blocks']))}: ranks compute for {100 * own['efficiency']:.0f} % of the time "
               "without a"
               f" bubble; with equal numbers of blocks for {100 * even['efficiency']:.0f} %")
    if group.is_one: ways = rank_ways(ways[0])
    for line in zip(*(w.facts(group.is_one) for w in ways)):
        (name, *_), numbers = zip(*line)
        if any(numbers) or name.strip() not in RARE: rows.append({"name": name} | {w.name: n for w, n in zip(ways, numbers)})
    yield Table(f"bytes per rank of {ways[0].plan.N}", [(w.name, "B", w.name) for w in ways], rows)


# ---- tables of seconds ----
class Clock:
    """Seconds of ways. seconds: of a whole model on one rank."""
    def __init__(self, o, plan):
        micro_batch = 1e-3 * o.compute_ms or flops_done(plan) * plan.B * plan.T / (peak_of(o) * o.mfu)
        self.o, self.network, self.seconds = o, network_of(o, plan), unit_seconds(plan, micro_batch)

    def step(self, plan, strategy):
        return (pipeline_step if strategy in (PP, MESH) else step)(plan, strategy, self.network, self.seconds)

    def no_room(self, plan, strategy):
        """Why a rank has too little; "": it has enough."""
        o, room, needs = self.o, room_of(self.o, plan.N), total_of(plan, strategy)
        if needs <= room: return ""
        text = f"does not fit: {format_bytes(needs)} of {o.room_of}" + (f", which {plan.N} ranks share" if o.shares_room else "")
        recomputed = total_of(plan.recomputed, strategy)
        return text + f"; with --recompute block {format_bytes(recomputed)}" if recomputed <= room else text

    def row(self, strategy, plan, name):
        """NaN: not known."""
        found = {"name": name, "ranks": plan.N}
        plan, why_not = divide_batch(plan, strategy, self.o.total_batch_size)
        why_not = why_not or self.no_room(plan, strategy)
        if why_not: return {**found, "why_not": why_not}
        t, found["micro_batches"] = self.step(plan, strategy), plan.accumulation
        more = {"efficiency": t.efficiency, "tokens_per_s": t.tokens_per_s, "tokens_per_s_per_rank": t.tokens_per_s / plan.N,
                "mfu": plan.shape.flops_per_token(plan.T) * t.tokens_per_s / plan.N / peak_of(self.o),
                "of_step": t.bubble / (t.compute + t.bubble), "of_work": t.bubble / t.compute}
        return found | {key: float(x) for key, x in (t._asdict() | more | cost_of(self.o, t.tokens_per_s, plan.N)).items()}

    def tables(self, group):
        """Titles, strategies, rows. On more and more ranks: the fewest that a way can have, times powers of two up to 4096, and the
        number asked for."""
        if group.line is None: return
        if group.times:
            yield group.times, group.ways[0].strategy, [self.row(*w[:2], w.name.removeprefix("tp ")) for w in group.ways]
            return
        for strategy, plan, name in group.ways:
            if name == "ddp" and group.line: continue # next to a method, and among others
            first = {FSDP: plan.shard_group, ZEROPP: plan.node_ranks}.get(strategy) or copy_ranks(plan, strategy)
            numbers = {first << k for k in range(13) if first << k <= 4096} | ({plan.N} if plan.N % first == 0 else set())
            yield f"{name}  ranks", strategy, [self.row(strategy, plan._replace(N=N), str(N)) for N in sorted(numbers)]


def assumptions(o, plan, w):
    inside, between = (LINKS[name].what if name in LINKS else name for name in (o.link, o.inter_link))
    compute = f"a micro-batch takes {o.compute_ms:.4g} ms" if o.compute_ms > 0 else f"{1e-12 * peak_of(o):.4g} TFLOP/s x {o.mfu:.3g}"
    yield (f"\ntimes of a step: {1e-9 * plan.shape.flops_per_token(plan.T):.4g} GFLOP per token, {compute}"
           f"{', blocks recomputed' * plan.recompute}{' in full' * plan.full}")
    text = f"links: {inside}"
    if o.communication_ms > 0: text = f"summing all gradients whole takes {o.communication_ms:.4g} ms on {plan.N} ranks"
    if w.per_node: text += f"; nodes of {w.per_node} ranks and {w.nics} interface{'s' * (w.nics > 1)}: {between}"
    if plan.memory_bandwidth > 0: text += f"; an update at {1e-12 * plan.memory_bandwidth:.4g} TB/s"
    yield text
    watts = "; kWh are the GPUs' at their limit, without the rest of a node" * bool(o.device_gpu and o.device_gpu.watts)
    if o.tokens > 0: yield f"cost of {o.tokens:.4g} tokens{watts}"
    if not o.mesh:
        yield "zero-3 waits for each unit that it gathers, as train_gpt2_zero does; DeepSpeed's prefetches, as fsdp does here"


def plan_and_clock(o):
    plan = divide_batch(plan_of(o), DDP, o.total_batch_size)[0]
    return plan, Clock(o, plan)


def answer_model(o):
    plan, clock = plan_and_clock(o)
    m, groups = plan.shape, [group for group in groups_of(o, plan) if group.ways]
    tables = [table for group in groups for table in clock.tables(group)]
    def items():
        yield f"model      {m.L} layers, {m.NH} heads, {m.C} channels, vocabulary {m.V}, context {m.T}: {m.parameters()} parameters"
        yield (f"step       {plan.B} x {plan.T} tokens in {micro_batches(plan)} per rank; {o.precision}, on a"
               f" {'GPU' if plan.gpu else 'CPU'}")
        for group in groups:
            if group.line is not None: yield from bytes_items(group)
        yield "not counted: the rest of the layers' workspace, some MB, and what a device needs for itself"
        shown = {w.name: w.fits for group in groups for w in group.ways if w.plan.method == "none" and w.name != "tp 1"} # it is ddp
        yield table_of_sizes(o, "fits", shown)
        yield from assumptions(o, plan, clock.network)
        for table in tables: yield table_of_times(*table)
    return items(), lambda: {
        "model": {"name": o.model, "layers": m.L, "heads": m.NH, "channels": m.C, "vocabulary": m.V, "parameters": m.parameters()},
        "step": {"batch_size": plan.B, "seq_len": plan.T, "accumulation": plan.accumulation, "total_batch_size": o.total_batch_size,
                 "precision": o.precision},
        "ranks": plan.N, "ways": [w.json() for group in groups for w in group.ways],
        "times": [{"table": title.split("  ")[0], "rows": rows} for title, _, rows in tables]}


# ---- --params: bytes of a model of which only the number of parameters is known ----
def answer_params(o):
    """For the ranks of the ZeRO paper's table 1, and those that are asked for. Our fsdp's shards are always fp32."""
    names = dict(zip(STRATEGY_NAMES, STRATEGIES))
    def state(strategy, N): return bytes_of_states(strategy, N, o.precision != "fp32" and strategy != FSDP, o.master == "on")
    def fits(each): return lambda room: f"{'yes' if each <= room else 'no'} {o.params * room / each / 1e9:.3g} B"
    def gb(x): return f"{1e-9 * x:.{2 if x < 1e11 else 1}f}"
    on = {N: {name: o.params * sum(state(s, N)) for name, s in names.items()} for N in sorted({1, 4, 16, 64, 256, 1024, o.ranks})}
    parts = [{"name": f"  {kind}", **{name: o.params * state(s, o.ranks)[k] for name, s in names.items()}}
             for k, kind in enumerate(("parameters", "gradients", "optimizer state"))]
    one = state(DDP, 1)
    each = " + ".join(map(str, one))
    items = [f"{o.params:.4g} parameters in {o.precision}: {each} bytes each, without activations and buffers",
             Table(f"bytes per rank of {o.ranks}", [(name, "B", name) for name in names],
                   [*parts, {"name": "  total", **on[o.ranks]}])]
    if sum(one) < 16:
        items.append("fsdp's shards are fp32, which is its master copy: 4 + 4 + 8 bytes; shards of 16 bits would take zero-3's")
    rounded = [{"name": f"  {N}", **{name: gb(x) for name, x in each.items()}} for N, each in on.items()]
    items += [Table("GB per rank", plain(names), rounded),
              table_of_sizes(o, "fits, largest", {name: fits(on[o.ranks][name]) for name in names})]
    return items, lambda: {"parameters": o.params, "ranks": o.ranks,
                           "bytes_per_rank": [{"ranks": N, **each} for N, each in on.items()]}


# ---- --compress all: every method next to train_gpt2_ddp, and its traffic on more ranks ----
def method_row(clock, plan, method):
    """The traffic and memory of a method. Neither efficiency counts the time of compressing, which is part of the step."""
    way = plan._replace(method=method)
    if not is_possible(way): return {"method": method, "possible": False}
    b, t, buffers = bytes_of(way, DDP), clock.step(way, DDP), bytes_of(plan, DDP).memory.get("communication", 0)
    return {"method": method, "possible": True, **{name: float(x) for name, x in {
        "sent_per_step": b.sent, "errors": b.memory.get("errors", 0), "message_buffers": b.memory.get("communication", 0) - buffers,
        "compressing": t.compressing, "communication": t.communication, "exposed": t.exposed, "seconds": t.seconds,
        "efficiency_communication": t.compute / (t.compute + t.communication),
        "efficiency_exposed": t.compute / (t.compute + t.exposed)}.items()}}


def answer_methods(o):
    """And the bytes that a rank sends for each element of a large matrix. In PyTorch's quantization_pertensor_hook every rank
    gathers all ranks' gradients in int8 (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py)."""
    plan, clock = plan_and_clock(o)
    found = [method_row(clock, plan, method) for method in METHODS]
    given = f", and summing all gradients {o.communication_ms:.4g} ms" if o.communication_ms > 0 else ""
    def named(row):
        if not row["possible"]: return {"name": f"  {row['method']}", "why_not": "gradients have 16 bits already"}
        return {"name": f"  {row['method']}", **row, "sent_of_ddp": row["sent_per_step"] / found[0]["sent_per_step"],
                "step_of_ddp": row["seconds"] / found[0]["seconds"]}
    ranks, block = (2, 4, 8, 16, 64, 512), 4 / QUANTISE_BLOCK
    each = {"fp32, ring": 4, "bf16, ring": 2, "int8, parts exchanged": 1 + block, "int4, parts exchanged": 0.5 + block,
            "sign, gathered": 1 / 8, "top-k, gathered": 8 * o.top_k_fraction, "PyTorch's int8 hook, gathered": 1}
    def times(name, N): return N - 1 if "gathered" in name else 2 * (N - 1) / N
    return [f"{plan.shape.parameters()} parameters, {o.precision}; {plan.N} ranks, {plan.B} x {plan.T} tokens in"
            f" {micro_batches(plan)} each; computing takes {1e3 * clock.step(plan, DDP).compute:.4g} ms{given}",
            "ms of a step; efficiency is compute / (compute + communication), or with what is exposed of it",
            table_of_times("method", None, [*map(named, found)]),
            Table("sent by each rank, bytes per element", [*((str(N), ".3f", N) for N in ranks), ("ranks", "", "")],
                  [{"name": f"  {name}", "": "", **{N: x * times(name, N) for N in ranks}} for name, x in each.items()])], \
        lambda: {"ranks": plan.N, "methods": found}
