"""What build/plan answers: lines and tables to read, and the same numbers as JSON: bytes, seconds, shares of 1. An answer is
(items, a function that makes the JSON), and an item is a line or a Table; show() prints both.

The usual question compares strategies, numbers of ranks that share a replica of the model, schedules, and the ranks of a
pipeline: their bytes, what fits, and the seconds of a step. Two others are --params and --compress all; search.py and validate.py
have the rest."""
import math
from typing import NamedTuple
from tool import format_bytes, print_table
from machines import LINKS
from options import (MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES, network_of, peak_of, plan_of, room_of, with_compression, with_context,
                     with_mesh, with_pipe)
from pipelines import mesh_step, pipeline_step
from questions import (CP, DDP, FSDP, KINDS, MESH, PP, SCHEDULES, STRATEGIES, STRATEGY_NAMES, TP, ZEROPP, Plan, blocks_of, bytes_of,
                       bytes_of_states, context_divides, copy_ranks, extreme_rank, mesh_name, own_rank, pipe_divides,
                       plan_split, sent_along, sent_of_all, slots, tensor_divides, total_of)
from steps import METHODS, QUANTISE_BLOCK, flops_done, is_possible, step, unit_seconds

MOST_RANKS = 6 # of a pipeline in a table
CP_WAYS = [("ulysses", "contiguous"), *((how, balance) for how in ("allgather", "ring") for balance in ("contiguous", "zigzag"))]
RARE = "workspace", "errors", KINDS[-1]


# ---- what is printed ----
class Table(NamedTuple):
    title: str
    columns: list            # (heading, format, key of a row)
    rows: list               # by key; "name" is the first column. A row that has "why_not" has nothing else


def cell(o, x, form):
    """A number as its column's format says; B: bytes, ms: seconds as milliseconds. Text stays as it is."""
    if isinstance(x, str): return x
    if math.isnan(x): return "-"
    if form == "B": return str(math.floor(x + 1e-3)) if o.exact else format_bytes(math.floor(x + 1e-3))
    return format(1e3 * x, ".2f") if form == "ms" else format(x, form)


def show(o, items):
    """Columns of which no row knows anything are left out."""
    for item in items:
        if isinstance(item, str):
            print(item)
            continue
        known = [row for row in item.rows if "why_not" not in row]
        def knows(row, x): return isinstance(row.get(x, math.nan), str) or not math.isnan(row.get(x, math.nan))
        columns = [column for column in item.columns if any(knows(row, column[2]) for row in known)]
        def words(row): return [row["why_not"]] if "why_not" in row else [cell(o, row[key], form) for _, form, key in columns]
        print()
        print_table([item.title, *(name for name, _, _ in columns)], *([row["name"], *words(row)] for row in item.rows))


# ---- the ways that are compared ----
class Way(NamedTuple):
    strategy: int
    plan: Plan
    name: str

    def bytes(self, recompute=False): return bytes_of(self.plan._replace(recompute=recompute), self.strategy)

    def fits(self, room): return "yes" if self.bytes().total <= room else "recomputed" if self.bytes(True).total <= room else "no"

    def json(self, sizes):
        kinds, again = (dict.fromkeys(KINDS, 0) | b.memory | {"total": b.total} for b in (self.bytes(), self.bytes(True)))
        return {"name": self.name, "ranks": self.plan.N, "ranks_of_a_copy": copy_ranks(self.plan, self.strategy),
                "sent_per_step": float(self.bytes().sent), "bytes": kinds, "bytes_recomputed": again,
                "devices": {name: {"fits": self.fits(room)} for name, room in sizes}}

    def facts(self, is_one):
        """A column: (name, bytes, or as text what is none). is_one: this is one rank of a pipeline, not the one that keeps most."""
        kept, again, plan = self.bytes(), self.bytes(True), self.plan
        def extreme(recompute, most): return extreme_rank(plan._replace(recompute=recompute), self.strategy, most)
        if self.strategy == PP and not is_one:
            yield "  on the rank with most", f"rank {extreme(False, True)}"
            yield "    or recomputed", f"rank {extreme(True, True)}"
        for kind in KINDS[:-1]:
            yield f"  {kind}", kept.memory.get(kind, 0)
            if kind == "activations": yield "    or recomputed", again.memory.get(kind, 0)
        yield "  total", kept.total
        yield "    or recomputed", again.total
        yield f"  {KINDS[-1]}", kept.memory.get(KINDS[-1], 0)
        yield "  sent per step", sent_of_all(plan, self.strategy) // plan.N
        if self.strategy not in (PP, MESH): return
        if self.strategy == MESH: yield from sent_along(plan)
        yield "  activations at a time", str(slots(plan, own_rank(plan))) # interleaved: each of one chunk
        if is_one: yield "  blocks", str(blocks_of(plan, plan.rank))
        else:
            yield "  on the rank with least", f"rank {extreme(False, False)}"
            yield "    total", total_of(plan._replace(rank=extreme(False, False)), PP)


def divide_batch(plan, strategy, tokens):
    """The plan with the micro-batches of a step of so many tokens (0: as they are), and why there are none, or too many to play."""
    if tokens == 0: return plan, ""
    copies, most = plan.N // copy_ranks(plan, strategy), PLAYED_MICRO_BATCHES if strategy in (PP, MESH) else MOST_MICRO_BATCHES
    rounds, rest = divmod(tokens, max(copies * plan.tokens, 1))
    if copies == 0 or rounds < 1 or rest: return plan, f"{tokens} tokens are no multiple of {copies} x {plan.B} x {plan.T}"
    if rounds > most: return plan, f"{rounds} micro-batches are more than the {most} that can be planned"
    return plan._replace(accumulation=rounds), ""


class Compared:
    """All ways that are compared, in groups. With --mesh nothing else is. seconds: of a whole model on one rank."""
    def __init__(self, o):
        tokens = o.total_batch_size
        self.plan = plan = divide_batch(plan_of(o), DDP, tokens)[0]
        micro_batch = 1e-3 * o.compute_ms or flops_done(plan) * plan.B * plan.T / (peak_of(o) * o.mfu)
        self.o, self.network, self.seconds = o, network_of(o, plan), unit_seconds(plan, micro_batch)
        self.strategies, self.compressed, self.tensor, self.context, self.pipelines, self.mesh = [], [], [], [], [], []
        if o.mesh: self.mesh = [Way(MESH, divide_batch(with_mesh(o, plan), MESH, tokens)[0], "mesh")]
        else: self.add_ways(o, plan, tokens)
        self.all = [*self.strategies, *self.compressed, *self.tensor, *self.context, *self.pipelines, *self.mesh]

    def add_ways(self, o, plan, tokens):
        self.strategies = [Way(strategy, plan, STRATEGY_NAMES[strategy]) for strategy in (*STRATEGIES, *[ZEROPP] * (plan.node_ranks > 0))]
        if o.compress not in ("none", "all"):
            self.compressed = [Way(DDP, plan, "ddp"), Way(DDP, with_compression(o, plan, o.compress), f"ddp {o.compress}")]
        # as many ranks share a replica as are asked for, or 1, 2, 4 and 8, as far as ranks and model divide
        plans = [plan._replace(t=t) for t in ([o.tensor_parallel] if o.tensor_parallel else (1, 2, 4, 8))]
        self.tensor = [Way(TP, divide_batch(p, TP, tokens)[0], f"tp {p.t}") for p in plans if tensor_divides(p)]
        # numbers of ranks, or if one is asked for the ways in which they can share sequences, or if one of these is asked for that one
        for c in [o.context_parallel] if o.context_parallel else (2, 4, 8):
            for how, balance in CP_WAYS if o.compares_cp else ((o.cp, o.cp_balance),):
                p, _ = divide_batch(with_context(plan, c, how, balance), CP, tokens)
                name = how + " zigzag" * (balance == "zigzag") if o.compares_cp else f"cp {c}"
                if context_divides(p): self.context.append(Way(CP, p, name))
        # a row for each number of ranks; for one number of ranks a row for each schedule; for one schedule that row
        for p in [o.pipeline_parallel] if o.pipeline_parallel else (2, 4, 8):
            for schedule in SCHEDULES if o.compares else (o.schedule,):
                pipe, _ = divide_batch(with_pipe(o, plan, p, schedule), PP, tokens)
                name = schedule + (f" {pipe.v}" if pipe.v > 1 else "") if o.compares else f"pp {p}"
                if pipe_divides(pipe): self.pipelines.append(Way(PP, pipe, name))

    # ---- seconds ----
    def step(self, plan, strategy):
        if strategy in (PP, MESH): return (pipeline_step if strategy == PP else mesh_step)(plan, self.network, self.seconds)
        return step(plan, strategy, self.network, self.seconds)

    def no_room(self, plan, strategy):
        """Why a rank has too little; "": it has enough."""
        o, room, needs = self.o, room_of(self.o, plan.N), total_of(plan, strategy)
        if needs <= room: return ""
        text = f"does not fit: {format_bytes(needs)} of {o.room_of}" + (f", which {plan.N} ranks share" if o.shares_room else "")
        recomputed = total_of(plan._replace(recompute=True), strategy)
        return text + f"; with --recompute block {format_bytes(recomputed)}" if recomputed <= room else text

    def row(self, plan, strategy, name=None):
        """NaN: not known."""
        o, found = self.o, {"name": name or str(plan.N), "ranks": plan.N}
        plan, why_not = divide_batch(plan, strategy, o.total_batch_size)
        why_not = why_not or self.no_room(plan, strategy)
        if why_not: return {**found, "why_not": why_not}
        t = self.step(plan, strategy)
        mfu = plan.shape.flops_per_token(plan.T) * t.tokens_per_s / plan.N / peak_of(o)
        numbers = {"seconds": t.seconds, "compute": t.compute, "bubble": t.bubble, "tp": t.tensor,
                   "communication": t.communication, "exposed": t.exposed, "efficiency": t.efficiency,
                   "tokens_per_s": t.tokens_per_s, "tokens_per_s_per_rank": t.tokens_per_s / plan.N, "mfu": mfu,
                   "formula": t.formula, "of_step": t.bubble / (t.compute + t.bubble), "of_work": t.bubble / t.compute}
        return {**found, "micro_batches": plan.accumulation,
                **{key: float(x) for key, x in (numbers | cost_of(o, t.tokens_per_s, plan.N)).items()}}

    def on_ranks(self, way):
        """A way on more and more ranks: the fewest that it can have, times powers of two up to 4096, and the number asked for."""
        is_hybrid, asked = way.strategy == FSDP and self.o.sharding == "hybrid", way.plan.N
        first = self.o.shard_group if is_hybrid else way.plan.node_ranks if way.strategy == ZEROPP else copy_ranks(way.plan, way.strategy)
        numbers = {first << k for k in range(13) if first << k <= 4096} | ({asked} if asked % first == 0 else set())
        return way.name, "ranks", way.strategy, [self.row(way.plan._replace(N=N), way.strategy) for N in sorted(numbers)]

    def times(self):
        """Tables: title, what the rows are, strategy, rows."""
        o, N = self.o, self.plan.N
        tables = [*map(self.on_ranks, (*self.strategies, *self.mesh, *self.compressed[1:]))]
        if len(self.tensor) > 1: tables.append((f"tp of {N}", "t", TP, [self.row(w.plan, TP, str(w.plan.t)) for w in self.tensor]))
        elif o.tensor_parallel: tables += map(self.on_ranks, self.tensor)
        for strategy, ways, asked, compares, letter in ((CP, self.context, o.context_parallel, o.compares_cp, "c"),
                                                        (PP, self.pipelines, o.pipeline_parallel, o.compares, "p")):
            name = STRATEGY_NAMES[strategy]
            if asked and not compares: tables += map(self.on_ranks, ways)
            elif ways:
                title, rows_are = (f"{name} {asked} of {N}", "") if compares else (f"{name} of {N}", letter)
                tables.append((title, rows_are, strategy, [self.row(w.plan, strategy, w.name) for w in ways]))
        return tables


def cost_of(o, tokens_per_s, gpus):
    """What a run of --tokens costs."""
    if o.tokens == 0: return {}
    hours = o.tokens / tokens_per_s / 3600
    return {"hours": hours, "gpu_hours": hours * gpus, "kwh": 1e-3 * o.watts * hours * gpus if o.watts > 0 else math.nan,
            "price": hours * gpus * o.price if o.price > 0 else math.nan}


def device_sizes(o):
    """(name, bytes) of the devices of the tables of what fits: the one that is asked for, or nominal sizes."""
    if o.device_gpu or o.memory > 0: return [(o.room_of, room_of(o, o.ranks))]
    return [(f"{gb} GB", 1e9 * gb) for gb in (24, 40, 80, 141)]


def table_of_sizes(o, title, rows):
    """rows: (name, what of each size)"""
    sizes = device_sizes(o)
    return Table(title, [(name, "", name) for name, _ in sizes], [{"name": f"  {name}", **{size: of(room) for size, room in sizes}}
                                                                  for name, of in rows])


# ---- tables of bytes ----
def micro_batches(plan): return f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'}"


def table_of_bytes(ways, is_one=False):
    """Kinds that few ways have are left out where none has any."""
    rows = []
    for line in zip(*(w.facts(is_one) for w in ways)):
        (name, *_), numbers = zip(*line)
        if any(numbers) or name.strip() not in RARE: rows.append({"name": name} | {w.name: n for w, n in zip(ways, numbers)})
    return Table(f"bytes per rank of {ways[0].plan.N}", [(w.name, "B", w.name) for w in ways], rows)


def rank_ways(way):
    """The ranks of one pipeline, or if these are too many the one that keeps most and the one that keeps least."""
    plan, strategy, names = way.plan, way.strategy, {r: "" for r in range(way.plan.p)}
    if plan.p > MOST_RANKS: names = {extreme_rank(plan, strategy): "most: ", extreme_rank(plan, strategy, False): "least: "}
    return [Way(strategy, plan._replace(rank=r), f"{name}{'stage' if strategy == MESH else 'rank'} {r}") for r, name in names.items()]


def played_items(o, ways):
    """Pipelines; or the ranks of one, or of a mesh."""
    plan, is_mesh = ways[0].plan, ways[0].strategy == MESH
    one = is_mesh or (o.pipeline_parallel > 0 and not o.compares)
    what, step = "pp p: p ranks share a replica of the model, each with some of its blocks", plan.accumulation
    if is_mesh: what = f"mesh {mesh_name(plan)}: replicas of the model, ranks that share its matrices, stages"
    elif o.total_batch_size: step = f"{o.total_batch_size} tokens"
    elif not o.accumulation and not o.pipeline_parallel: step = "p"
    yield f"\n{what}; {plan.B} x {plan.T} tokens per micro-batch, {step} a step"
    for p in {w.plan.p * w.plan.v: w.plan for w in ways}.values(): # each split once
        own, even = plan_split(p), plan_split(p, "even")
        yield (f"split      {','.join(map(str, own['blocks']))}: ranks compute for {100 * own['efficiency']:.0f} % of the time without a"
               f" bubble; with equal numbers of blocks for {100 * even['efficiency']:.0f} %")
    yield table_of_bytes(rank_ways(ways[0]) if one else ways, one)
    v = o.chunks or 2
    if o.compares and len(ways) < 4:
        yield f"interleaved with {v} chunks is left out: it needs a multiple of {plan.p} micro-batches, and {v * plan.p} blocks"


def bytes_items(o, c):
    """A table for each group of ways, under what its columns are."""
    plan, free = c.plan, c.plan.memory_bandwidth == 0
    if c.strategies: yield table_of_bytes(c.strategies)
    if c.compressed:
        how = {"top-k": f"; it sends {o.top_k_fraction:g} of the elements of a matrix", "powersgd": f"; rank {o.rank}"}.get(o.compress, "")
        if free: how += "; compressing takes no time here, because no --memory-bandwidth is known"
        yield f"\n{c.compressed[1].name}: train_gpt2_compress, from the step on in which it compresses{how}"
        yield table_of_bytes(c.compressed)
    each = f"{plan.B} x {plan.T} tokens per micro-batch"
    if len(c.tensor) > 1 or o.tensor_parallel:
        yield f"\ntp t: t ranks share a replica of the model, and {each}{'; they cut its rows' * plan.rows}"
        yield table_of_bytes(c.tensor)
    elif plan.N > 1 and not c.mesh:
        yield f"\ntensor parallelism: none of 2, 4 and 8 divides {plan.N} ranks, {plan.shape.NH} heads and {plan.shape.Vp} tokens"
    if c.context:
        yield f"\ncp c: c ranks share each sequence, and {each}" + ("" if o.compares_cp else f"; --cp {o.cp}, {o.cp_balance}")
        yield table_of_bytes(c.context)
    if c.pipelines or c.mesh: yield from played_items(o, c.pipelines or c.mesh)


# ---- tables of seconds ----
# Heading, format, key of a row, and the strategies that have the column; none: all.
COLUMNS = (
    ("sent a step", "B", "sent_per_step"), ("of ddp's", ".1%", "sent_of_ddp"), ("errors", "B", "errors"),
    ("buffers", "B", "message_buffers"), ("compressing", "ms", "compressing"), ("compute ms", "ms", "compute"),
    ("tp", "ms", "tp", MESH), ("uneven", "ms", "bubble", CP), ("bubble", "ms", "bubble", PP, MESH), ("of step", ".1%", "of_step", PP),
    ("of work", ".1%", "of_work", PP), ("formula", "ms", "formula", PP), ("communication", "ms", "communication"),
    ("exposed", "ms", "exposed"), ("step ms", "ms", "seconds"), ("of ddp's", ".2f", "step_of_ddp"),
    ("tokens/s", ".0f", "tokens_per_s"), ("efficiency", ".1%", "efficiency"),
    ("efficiency", ".1%", "efficiency_communication"), ("with exposed", ".1%", "efficiency_exposed"), ("hours", ".4g", "hours"),
    ("GPU-hours", ".4g", "gpu_hours"), ("kWh", ".4g", "kwh"), ("price", ".4g", "price"))


def table_of_times(title, rows_are, strategy, rows):
    columns = [(name, form, key) for name, form, key, *strategies in COLUMNS if strategy in (strategies or [strategy])]
    return Table(f"{title}  {rows_are}".rstrip(), columns, rows)


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
    if plan.offload != "none":
        yield (f"offloaded shards pass a link of {1e-9 * plan.host_link:.3g} GB/s, and AdamW has"
               f" {1e-9 * plan.host_bandwidth:.3g} GB/s of the host's memory")
    watts = "; kWh are the GPUs' at their limit, without the rest of a node" if o.watts > 0 else ""
    if o.tokens > 0: yield f"cost of {o.tokens:.4g} tokens{watts}"
    if not o.mesh: yield "zero-3 waits for each unit that it gathers, as train_gpt2_zero does; DeepSpeed's prefetches, as fsdp does here"


def answer_model(o):
    c = Compared(o)
    plan, m, tables = c.plan, c.plan.shape, c.times()
    def items():
        yield f"model      {m.L} layers, {m.NH} heads, {m.C} channels, vocabulary {m.V}, context {m.T}: {m.parameters()} parameters"
        yield (f"step       {plan.B} x {plan.T} tokens in {micro_batches(plan)} per rank; {o.precision}, on a"
               f" {'GPU' if plan.gpu else 'CPU'}")
        yield from bytes_items(o, c)
        yield "not counted: the rest of the layers' workspace, some MB, and what a device needs for itself"
        shown = [w for w in c.all if w not in c.compressed and (w.strategy != TP or w.plan.t > 1)] # tp of one rank is ddp
        yield table_of_sizes(o, "fits", [(w.name, w.fits) for w in shown])
        yield from assumptions(o, plan, c.network)
        for table in tables: yield table_of_times(*table)
    return items(), lambda: {
        "model": {"name": o.model, "layers": m.L, "heads": m.NH, "channels": m.C, "vocabulary": m.V, "parameters": m.parameters()},
        "step": {"batch_size": plan.B, "seq_len": plan.T, "accumulation": plan.accumulation, "total_batch_size": o.total_batch_size,
                 "precision": o.precision},
        "ranks": plan.N, "ways": [w.json(device_sizes(o)) for w in c.all],
        "times": [{"table": title, "rows": rows} for title, _, _, rows in tables]}


# ---- --params: bytes of a model of which only the number of parameters is known ----
def answer_params(o):
    """For the ranks of the ZeRO paper's table 1, and those that are asked for. Our fsdp's shards are always fp32."""
    names = STRATEGY_NAMES[:5]
    def state(strategy, N): return bytes_of_states(strategy, N, o.precision != "fp32" and strategy != FSDP, o.master == "on")
    def total(strategy, N): return o.params * sum(state(strategy, N))
    def fits(each): return lambda room: f"{'yes' if each <= room else 'no'} {o.params * room / each / 1e9:.3g} B"
    kinds = "parameters", "gradients", "optimizer state"
    parts = [{name: o.params * state(s, o.ranks)[k] for s, name in enumerate(names)} for k in range(3)]
    on = {N: {name: total(s, N) for s, name in enumerate(names)} for N in sorted({1, 4, 16, 64, 256, 1024, o.ranks})}
    one = state(DDP, 1)
    items = [f"{o.params:.4g} parameters in {o.precision}: {one[0]} + {one[1]} + {one[2]} bytes each, without activations and"
             " buffers",
             Table(f"bytes per rank of {o.ranks}", [(name, "B", name) for name in names],
                   [{"name": f"  {kind}", **part} for kind, part in zip((*kinds, "total"), (*parts, on[o.ranks]))])]
    if sum(one) < 16:
        items.append("fsdp's shards are fp32, which is its master copy: 4 + 4 + 8 bytes; shards of 16 bits would take zero-3's")
    gb = [{"name": f"  {N}", **{name: f"{1e-9 * x:.{2 if x < 1e11 else 1}f}" for name, x in each.items()}}
          for N, each in on.items()]
    items += [Table("GB per rank", [(name, "", name) for name in names], gb),
              table_of_sizes(o, "fits, largest", [(name, fits(on[o.ranks][name])) for name in names])]
    return items, lambda: {"parameters": o.params, "ranks": o.ranks,
                           "bytes_per_rank": [{"ranks": N, **each} for N, each in on.items()]}


# ---- --compress all: every method next to train_gpt2_ddp, and its traffic on more ranks ----
def method_rows(o, c):
    """The traffic and memory of each method. Neither efficiency counts the time of compressing, which is part of the step."""
    buffers = bytes_of(c.plan, DDP).memory.get("communication", 0)
    for method in METHODS:
        way = with_compression(o, c.plan, method)
        if not is_possible(way):
            yield {"method": method, "possible": False}
            continue
        b, t = bytes_of(way, DDP), c.step(way, DDP)
        yield {"method": method, "possible": True, **{name: float(x) for name, x in {
            "sent_per_step": b.sent, "errors": b.memory.get("errors", 0), "message_buffers": b.memory.get("communication", 0) - buffers,
            "compressing": t.compressing, "communication": t.communication, "exposed": t.exposed, "seconds": t.seconds,
            "efficiency_communication": t.compute / (t.compute + t.communication),
            "efficiency_exposed": t.compute / (t.compute + t.exposed)}.items()}}


def answer_methods(o):
    """And the bytes that a rank sends for each element of a large matrix. In PyTorch's quantization_pertensor_hook every rank
    gathers all ranks' gradients in int8 (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py)."""
    c = Compared(o)
    plan, found = c.plan, [*method_rows(o, c)]
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
            f" {micro_batches(plan)} each; computing takes {1e3 * c.step(plan, DDP).compute:.4g} ms{given}",
            "ms of a step; efficiency is compute / (compute + communication), or with what is exposed of it",
            table_of_times("method", "", None, [*map(named, found)]),
            Table("sent by each rank, bytes per element", [*((str(N), ".3f", N) for N in ranks), ("ranks", "", "")],
                  [{"name": f"  {name}", "": "", **{N: x * times(name, N) for N in ranks}} for name, x in each.items()])], \
        lambda: {"ranks": plan.N, "methods": found}
