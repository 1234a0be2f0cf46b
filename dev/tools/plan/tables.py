"""What build/plan compares: strategies, numbers of ranks that share a replica of the model, schedules, and the ranks of a pipeline;
their bytes, what fits, and the seconds of a step, as tables to read and as JSON: bytes, seconds, shares of 1. Then two other
questions, --params and --compress all."""
import math
from itertools import groupby
from typing import NamedTuple
from tool import format_bytes, print_table
from machines import LINKS
from options import (MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES, network_of, peak_of, plan_of, room_of, shape_of, with_compression,
                     with_context, with_mesh, with_pipe)
from pipelines import mesh_step, message_bytes, message_seconds, pipeline_step
from questions import (CP, DDP, FSDP, KINDS, MESH, PP, SCHEDULES, STRATEGIES, STRATEGY_NAMES, TP, ZEROPP, Plan, blocks_of, bytes_of,
                       bytes_of_states, context_divides, copy_ranks, extreme_rank, largest_depth, mesh_name, of_depth, own_rank,
                       pipe_divides, plan_split, sent_along, sent_by_kind, sent_of_all, slots, tensor_divides, total_of)
from steps import METHODS, QUANTISE_BLOCK, crosses, flops_done, hop_seconds, is_possible, kv_bytes, ring_hides, step, unit_seconds

MOST_RANKS = 6 # of a pipeline in a table
CP_WAYS = [("ulysses", "contiguous"), *((how, balance) for how in ("allgather", "ring") for balance in ("contiguous", "zigzag"))]
RARE = "workspace", "errors", KINDS[-1]
ONLY_PRINTED = "formula", "of_step", "of_work" # of a pipeline


class Way(NamedTuple):
    strategy: int
    plan: Plan
    name: str

    def bytes(self, recompute=False): return bytes_of(self.plan._replace(recompute=recompute), self.strategy)
    def extreme(self, recompute, most): return extreme_rank(self.plan._replace(recompute=recompute), self.strategy, most)

    def fits(self, room): return "yes" if self.bytes().total <= room else "recomputed" if self.bytes(True).total <= room else "no"

    def largest(self, room):
        """The shape of the largest dN, recomputed, that such a device can train; of no layers: there is none."""
        return of_depth(self.plan, largest_depth(self.plan._replace(recompute=True, memory_bandwidth=0), self.strategy, room)).shape

    def largest_name(self, room):
        s = self.largest(room)
        return f"d{s.L}, {1e-9 * s.parameters():.3g} B" if s.L else "none"


def divide_batch(plan, strategy, tokens):
    """The plan with the micro-batches of a step of so many tokens (0: as they are), and why there are none, or too many to play."""
    if tokens == 0: return plan, ""
    copies, most = plan.N // copy_ranks(plan, strategy), PLAYED_MICRO_BATCHES if strategy in (PP, MESH) else MOST_MICRO_BATCHES
    rounds, rest = divmod(tokens, max(copies * plan.tokens, 1))
    if copies == 0 or rounds < 1 or rest: return plan, f"{tokens} tokens are no multiple of {copies} x {plan.B} x {plan.T}"
    if rounds > most: return plan, f"{rounds} micro-batches are more than the {most} that can be planned"
    return plan._replace(accumulation=rounds), ""


class Compared:
    """All ways that are compared. With --mesh nothing else is. seconds: of a whole model on one rank."""
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
        if strategy == PP: return pipeline_step(plan, self.network, self.seconds)
        if strategy == MESH: return mesh_step(plan, self.network, self.seconds, self.o.emulation)
        return step(plan, strategy, self.network, self.seconds)

    def no_room(self, plan, strategy):
        """Why a rank has too little; "": it has enough."""
        o, room, needs = self.o, room_of(self.o, plan.N), total_of(plan, strategy)
        if needs <= room: return ""
        text = f"does not fit: {format_bytes(needs)} of {o.room_of}" + (f", which {plan.N} ranks share" if o.shares_room else "")
        recomputed = total_of(plan._replace(recompute=True), strategy)
        return text + f"; with --recompute block {format_bytes(recomputed)}" if recomputed <= room else text

    def row(self, plan, strategy, name=None):
        """As JSON has it, and what only tables have. NaN: not known."""
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
        if o.tokens > 0: numbers |= cost_of(o, t.tokens_per_s, plan.N)
        return {**found, "micro_batches": plan.accumulation, **{key: float(x) for key, x in numbers.items()}}

    def on_ranks(self, way):
        """A way on more and more ranks: the fewest that it can have, times powers of two up to 4096, and the number asked for."""
        is_hybrid, asked = way.strategy == FSDP and self.o.sharding == "hybrid", way.plan.N
        first = self.o.shard_group if is_hybrid else way.plan.node_ranks if way.strategy == ZEROPP else copy_ranks(way.plan, way.strategy)
        numbers = {first << k for k in range(13) if first << k <= 4096} | ({asked} if asked % first == 0 else set())
        return way.name, "ranks", way.strategy, [self.row(way.plan._replace(N=N), way.strategy) for N in sorted(numbers)]

    def times(self):
        """Tables: title, what the rows are, strategy, rows."""
        o, N, tensor, pipelines = self.o, self.plan.N, self.tensor, self.pipelines
        tables = [*map(self.on_ranks, (*self.strategies, *self.mesh, *self.compressed[1:]))]
        if o.tensor_parallel: tables += map(self.on_ranks, tensor)
        elif len(tensor) > 1: tables.append((f"tp of {N}", "t", TP, [self.row(w.plan, TP, str(w.plan.t)) for w in tensor]))
        for strategy, ways, asked, compares, letter in ((CP, self.context, o.context_parallel, o.compares_cp, "c"),
                                                     (PP, pipelines, o.pipeline_parallel, o.compares, "p")):
            name = STRATEGY_NAMES[strategy]
            if asked and not compares: tables += map(self.on_ranks, ways)
            elif ways:
                title, rows_are = (f"{name} {asked} of {N}", "") if compares else (f"{name} of {N}", letter)
                tables.append((title, rows_are, strategy, [self.row(w.plan, strategy, w.name) for w in ways]))
        return tables


def cost_of(o, tokens_per_s, gpus):
    """What a run of --tokens costs."""
    hours = o.tokens / tokens_per_s / 3600
    return {"hours": hours, "gpu_hours": hours * gpus, "kwh": 1e-3 * o.watts * hours * gpus if o.watts > 0 else math.nan,
            "price": hours * gpus * o.price if o.price > 0 else math.nan}


def device_sizes(o):
    """(name, bytes) of the devices of the tables of what fits: the one that is asked for, or nominal sizes."""
    if o.device_gpu or o.memory > 0: return [(o.room_of, room_of(o, o.ranks))]
    return [(f"{gb} GB", 1e9 * gb) for gb in (24, 40, 80, 141)]


# ---- JSON ----
def json_bytes(b): return dict.fromkeys(KINDS, 0) | b.memory | {"total": b.total}


def json_device(w, room):
    is_alone = w.strategy == MESH or w.plan.split != "auto" # with another depth the split differs
    return {"fits": w.fits(room)} if is_alone else {"fits": w.fits(room), "largest_depth": w.largest(room).L}


def json_model(o):
    c, sizes = Compared(o), device_sizes(o)
    m = c.plan.shape
    return {"model": {"name": o.model, "layers": m.L, "heads": m.NH, "channels": m.C, "vocabulary": m.V, "parameters": m.parameters()},
            "step": {"batch_size": c.plan.B, "seq_len": c.plan.T, "accumulation": c.plan.accumulation,
                     "total_batch_size": o.total_batch_size, "precision": o.precision},
            "ranks": c.plan.N,
            "ways": [{"name": w.name, "ranks": w.plan.N, "ranks_of_a_copy": copy_ranks(w.plan, w.strategy),
                      "sent_per_step": float(w.bytes().sent), "bytes": json_bytes(w.bytes()),
                      "bytes_recomputed": json_bytes(w.bytes(True)),
                      "devices": {name: json_device(w, room) for name, room in sizes}} for w in c.all],
            "times": [{"table": title, "rows": [{key: x for key, x in row.items() if key not in ONLY_PRINTED} for row in rows]}
                      for title, _, _, rows in c.times()]}


# ---- tables of bytes ----
def micro_batches(plan): return f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'}"


def facts(w, is_one):
    """A column: (name, bytes, or as text what is none). is_one: w is one rank of a pipeline, not the one that keeps most."""
    kept, again = w.bytes(), w.bytes(True)
    if w.strategy == PP and not is_one:
        yield "  on the rank with most", f"rank {w.extreme(False, True)}"
        yield "    or recomputed", f"rank {w.extreme(True, True)}"
    for kind in KINDS[:-1]:
        yield f"  {kind}", kept.memory.get(kind, 0)
        if kind == "activations": yield "    or recomputed", again.memory.get(kind, 0)
    yield "  total", kept.total
    yield "    or recomputed", again.total
    yield f"  {KINDS[-1]}", kept.memory.get(KINDS[-1], 0)
    yield "  sent per step", sent_of_all(w.plan, w.strategy) // w.plan.N
    if w.strategy not in (PP, MESH): return
    for name, sent in (sent_along(w.plan) if w.strategy == MESH else sent_by_kind(w.plan)).items(): yield f"    {name}", sent
    yield "  activations at a time", str(slots(w.plan, own_rank(w.plan))) # interleaved: each of one chunk
    if is_one: yield "  blocks", str(blocks_of(w.plan, w.plan.rank))
    for recompute, name in () if is_one else ((False, "  on the rank with least"), (True, "    recomputed, on")):
        least = w.extreme(recompute, False)
        yield name, f"rank {least}"
        yield "    total", total_of(w.plan._replace(rank=least, recompute=recompute), PP)


def print_memory(o, ways, is_one=False):
    """Kinds that few ways have are left out where none has any."""
    print()
    rows = [[f"bytes per rank of {ways[0].plan.N}", *(w.name for w in ways)]]
    for line in zip(*(facts(w, is_one) for w in ways)):
        (name, *_), numbers = zip(*line)
        if any(numbers) or name.strip() not in RARE: rows.append([name, *(cell(o, n, "B") for n in numbers)])
    print_table(*rows)


def rank_ways(way):
    """The ranks of one pipeline, or if these are too many the one that keeps most and the one that keeps least."""
    plan, strategy, names = way.plan, way.strategy, {r: "" for r in range(way.plan.p)}
    if plan.p > MOST_RANKS: names = {extreme_rank(plan, strategy): "most: ", extreme_rank(plan, strategy, False): "least: "}
    return [Way(strategy, plan._replace(rank=r), f"{name}{'stage' if strategy == MESH else 'rank'} {r}") for r, name in names.items()]


def print_played(o, ways):
    """Pipelines; or the ranks of one, or of a mesh."""
    plan, is_mesh = ways[0].plan, ways[0].strategy == MESH
    one = is_mesh or (o.pipeline_parallel > 0 and not o.compares)
    ranks, step = rank_ways(ways[0]) if one else ways, plan.accumulation
    what = "pp p: p ranks share a replica of the model, each with some of its blocks"
    if is_mesh: what = f"mesh {mesh_name(plan)}: replicas of the model, ranks that share its matrices, stages"
    elif o.total_batch_size: step = f"{o.total_batch_size} tokens"
    elif not o.accumulation and not o.pipeline_parallel: step = "p"
    print(f"\n{what}; {plan.B} x {plan.T} tokens per micro-batch, {step} a step")
    for p in {w.plan.p * w.plan.v: w.plan for w in ways}.values(): # each split once
        own, even = plan_split(p), plan_split(p, "even")
        print(f"split      {','.join(map(str, own['blocks']))}: ranks compute for {100 * own['efficiency']:.0f} % of the time without a"
              f" bubble; with equal numbers of blocks for {100 * even['efficiency']:.0f} %")
    print_memory(o, ranks, one)
    v = o.chunks or 2
    if o.compares and len(ways) < 4:
        print(f"interleaved with {v} chunks is left out: it needs a multiple of {plan.p} micro-batches, and {v * plan.p} blocks")


def print_sharding(plan):
    """How fsdp shards, if not as usual."""
    if (plan.sharding, plan.reduce_dtype, plan.offload) == ("full", "fp32", "none"): return
    group = plan.shard_group
    copies = f": {plan.N // group} replicas of the model, of {group} ranks each" if plan.sharding == "hybrid" else ""
    dtype = "fp32" if plan.reduce_dtype == "fp32" else "the model's precision"
    offloaded = {"none": "", "optimizer": "; all but parameters on the host", "all": "; shards on the host"}[plan.offload]
    print(f"fsdp       sharding {plan.sharding}{copies}; gradients reduced in {dtype}{offloaded}")


def print_compressed(o, ways):
    details = f"; it sends {o.top_k_fraction:g} of the elements of a matrix" if o.compress == "top-k" else ""
    if o.compress == "powersgd": details = f"; rank {o.rank}"
    if ways[0].plan.memory_bandwidth == 0: details += "; compressing takes no time here, because no --memory-bandwidth is known"
    print(f"\n{ways[1].name}: train_gpt2_compress, from the step on in which it compresses{details}", end="")
    print_memory(o, ways)


def print_tensor(o, plan, ways):
    how = "; they cut its rows" * plan.rows
    if len(ways) > 1 or o.tensor_parallel:
        print(f"\ntp t: t ranks share a replica of the model, and {plan.B} x {plan.T} tokens per micro-batch{how}", end="")
        print_memory(o, ways)
    elif plan.N > 1:
        print(f"\ntensor parallelism: none of 2, 4 and 8 divides {plan.N} ranks, {plan.shape.NH} heads and {plan.shape.Vp} tokens")


def print_context(o, plan, ways):
    how = "" if o.compares_cp else f"; --cp {o.cp}, {o.cp_balance}"
    print(f"\ncp c: c ranks share each sequence, and {plan.B} x {plan.T} tokens per micro-batch{how}", end="")
    print_memory(o, ways)


def print_sizes(o, title, rows):
    """rows: (name, what of each size)"""
    sizes = device_sizes(o)
    print()
    print_table([title, *(name for name, _ in sizes)], *([f"  {name}", *(of(room) for _, room in sizes)] for name, of in rows))


def print_what_fits(o, c):
    ways = [w for w in (*c.strategies, *c.tensor, *c.context, *c.pipelines, *c.mesh) if w.strategy != TP or w.plan.t > 1] # tp of one rank is ddp
    print_sizes(o, "fits", [(w.name, w.fits) for w in ways])
    deep = [(w.name, w.largest_name) for w in ways if w.strategy != PP or o.split == "auto"]
    if not c.mesh: print_sizes(o, "largest dN, recomputed", deep)


# ---- tables of seconds, and of the traffic of compression methods ----
# Title, format, the field of a row, and the strategies that have the column; none: all.
COLUMNS = (
    ("sent a step", "B", "sent_per_step"), ("of ddp's", ".1%", "sent_of_ddp"), ("errors", "B", "errors"),
    ("buffers", "B", "message_buffers"), ("compressing", "ms", "compressing"), ("compute ms", "ms", "compute"),
    ("tp", "ms", "tp", MESH), ("uneven", "ms", "bubble", CP), ("bubble", "ms", "bubble", PP, MESH), ("of step", ".1%", "of_step", PP),
    ("of work", ".1%", "of_work", PP), ("formula", "ms", "formula", PP), ("communication", "ms", "communication"),
    ("exposed", "ms", "exposed"), ("step ms", "ms", "seconds"), ("of ddp's", ".2f", "step_of_ddp"),
    ("tokens/s", ".0f", "tokens_per_s"), ("efficiency", ".1%", "efficiency"),
    ("efficiency", ".1%", "efficiency_communication"), ("with exposed", ".1%", "efficiency_exposed"), ("hours", ".4g", "hours"),
    ("GPU-hours", ".4g", "gpu_hours"), ("kWh", ".4g", "kwh"), ("price", ".4g", "price"))


def cell(o, x, form):
    """A number as its column's format says; B: bytes, ms: seconds as milliseconds. Text stays as it is."""
    if isinstance(x, str): return x
    if math.isnan(x): return "-"
    if form == "B": return str(math.floor(x + 1e-3)) if o.exact else format_bytes(math.floor(x + 1e-3))
    return format(1e3 * x, ".2f") if form == "ms" else format(x, form)


def print_times(o, title, rows_are, strategy, rows):
    """Columns of which no row knows anything are left out."""
    columns = [(name, form, key) for name, form, key, *strategies in COLUMNS if strategy in (strategies or [strategy])
               and not all(math.isnan(row.get(key, math.nan)) for row in rows)]
    def words(row): return [row["why_not"]] if "why_not" in row else [cell(o, row[key], form) for _, form, key in columns]
    print_table([f"{title}  {rows_are}".rstrip(), *(name for name, _, _ in columns)], *([row["name"], *words(row)] for row in rows))


def print_messages(ways, w):
    for name, plan in ((way.name, way.plan) for way in ways if way.plan.p > 1):
        between = ", between nodes" if crosses(plan, w) else ""
        print(f"{name}: {2 * plan.accumulation * (plan.p * plan.v - 1)} messages of {format_bytes(message_bytes(plan))} between"
              f" stages in a step of a copy, each in {1e3 * message_seconds(plan, w):.3f} ms{between}")


def print_rings(c):
    """From how many tokens on attention hides what travels."""
    for name, p in ((way.name, way.plan) for way in c.context if way.plan.how == "ring" and way.plan.c > 1):
        (forward, backward), nbytes = ring_hides(p, c.network, c.seconds), kv_bytes(p, p.X)
        exposed = "hidden" if p.T / p.c >= backward else "hidden forward only" if p.T / p.c >= forward else "not hidden"
        print(f"{name}: a hop of {format_bytes(nbytes)} takes {1e3 * hop_seconds(p, c.network, nbytes):.3f} ms; attention"
              f" hides it from {forward:.0f} tokens of a sequence on a rank on, backward from {backward:.0f}; {p.T // p.c} here: {exposed}")


def print_assumptions(o, plan, w):
    algorithms = {"ring": "rings", "tree": "trees", "direct": "messages to each rank, and all-reduces,", "nccl": "NCCL's algorithms"}
    inside, between = (LINKS[name][0] if name in LINKS else name for name in (o.link, o.inter_link))
    compute = f"a micro-batch takes {o.compute_ms:.4g} ms" if o.compute_ms > 0 else f"{1e-12 * peak_of(o):.4g} TFLOP/s x {o.mfu:.3g}"
    print(f"\ntimes of a step: {1e-9 * plan.shape.flops_per_token(plan.T):.4g} GFLOP per token, {compute}"
          f"{', blocks recomputed' * plan.recompute}{' in full' * plan.full}")
    text = f"{algorithms[w.algorithm]} over {o.device_gpu.what if o.gpu_links else inside}"
    if o.communication_ms > 0: text = f"summing all gradients whole takes {o.communication_ms:.4g} ms on {plan.N} ranks"
    if w.per_node:
        text += f"; nodes of {w.per_node} ranks and {w.nics} interface{'s' * (w.nics > 1)}" + ("" if o.gpu_links else f": {between}")
    if plan.memory_bandwidth > 0: text += f"; an update at {1e-12 * plan.memory_bandwidth:.4g} TB/s"
    print(text)
    if plan.offload != "none":
        print(f"offloaded shards pass a link of {1e-9 * plan.host_link:.3g} GB/s, and AdamW has"
              f" {1e-9 * plan.host_bandwidth:.3g} GB/s of the host's memory")
    watts = "; kWh are the GPUs' at their limit, without the rest of a node" if o.watts > 0 else ""
    if o.tokens > 0: print(f"cost of {o.tokens:.4g} tokens{watts}")
    if not o.mesh: print("zero-3 waits for each unit that it gathers, as train_gpt2_zero does; DeepSpeed's prefetches, as fsdp does here")


def print_model(o):
    c = Compared(o)
    plan, m, tables = c.plan, c.plan.shape, c.times()
    print(f"model      {m.L} layers, {m.NH} heads, {m.C} channels, vocabulary {m.V}, context {m.T}: {m.parameters()} parameters")
    print(f"step       {plan.B} x {plan.T} tokens in {micro_batches(plan)} per rank;"
          f" {o.precision}, on a {'GPU' if plan.gpu else 'CPU'}")
    print_sharding(plan)
    if c.mesh: print_played(o, c.mesh)
    else: print_memory(o, c.strategies)
    if c.compressed: print_compressed(o, c.compressed)
    if c.tensor: print_tensor(o, plan, c.tensor)
    if c.context: print_context(o, plan, c.context)
    if c.pipelines: print_played(o, c.pipelines)
    print("not counted: the rest of the layers' workspace, some MB, and what a device needs for itself")
    print_what_fits(o, c)
    print_assumptions(o, plan, c.network)
    for table in tables:
        if table[2] == PP: print_messages(c.pipelines, c.network)
        if table[2] == CP: print_rings(c)
        print_times(o, *table)


# ---- --params: bytes of a model of which only the number of parameters is known ----
# Our fsdp's shards are always fp32.
def state_bytes(o, strategy, N): return bytes_of_states(strategy, N, o.precision != "fp32" and strategy != FSDP, o.master == "on")


def json_params(o):
    """For the ranks of the ZeRO paper's table 1, and those that are asked for."""
    return {"parameters": o.params, "ranks": o.ranks, "bytes_per_rank": [
        {"ranks": N, **{STRATEGY_NAMES[strategy]: o.params * sum(state_bytes(o, strategy, N)) for strategy in STRATEGIES}}
        for N in sorted({1, 4, 16, 64, 256, 1024, o.ranks})]}


def print_params(o):
    one, parts = state_bytes(o, DDP, 1), [state_bytes(o, strategy, o.ranks) for strategy in STRATEGIES]
    kinds = zip(("parameters", "gradients", "optimizer state", "total"), (*zip(*parts), map(sum, parts)))
    print(f"{o.params:.4g} parameters in {o.precision}: {one[0]} + {one[1]} + {one[2]} bytes each, without activations and buffers")
    print()
    print_table([f"bytes per rank of {o.ranks}", *STRATEGY_NAMES[:5]],
                *([f"  {name}", *(format_bytes(o.params * x) for x in each)] for name, each in kinds))
    if sum(one) < 16: print("fsdp's shards are fp32, which is its master copy: 4 + 4 + 8 bytes; shards of 16 bits would take zero-3's")
    print()
    print_table(["GB per rank", *STRATEGY_NAMES[:5]], *(
        [f"  {N}", *(f"{1e-9 * x:.{2 if x < 1e11 else 1}f}" for x in each.values())]
        for N, each in ((each.pop("ranks"), each) for each in json_params(o)["bytes_per_rank"])))
    def fits(each): return lambda room: f"{'yes' if o.params * each <= room else 'no'} {1e-9 * room / each:.3g} B"
    print_sizes(o, "fits, largest", [(STRATEGY_NAMES[strategy], fits(sum(part))) for strategy, part in zip(STRATEGIES, parts)])


# ---- --cp all: what attention sends of a model with fewer heads of keys and values than of queries ----
def sent_of_ways(NH, g, c):
    """By Ulysses, and by a ring or all-gather, for each element of a rank's queries; g: heads of keys and values for each head of
    queries. Ulysses gives every rank a head of them, so of fewer heads than ranks some are sent twice."""
    return {"ulysses": math.nan if NH % c else 4 * (1 + max(g, c / NH)) * (c - 1) / c, "ring, allgather": 6 * g * (c - 1)}


def json_context(o):
    s = shape_of(o)
    return {"heads": s.NH, "kv_heads": s.NKV, "sent": [{"g": g, "ranks": c, **sent_of_ways(s.NH, g, c)}
                                                       for g in sorted({s.NKV / s.NH, 1.0}) for c in (2, 4, 8, 16, 32, 64)]}


def print_context_bytes(o):
    found = json_context(o)
    print(f"{found['heads']} heads of queries, {found['kv_heads']} of keys and values, g for each of queries; elements that a rank sends"
          " in a block's two passes, for each of its queries' elements")
    for g, rows in ((g, [*rows]) for g, rows in groupby(found["sent"], key=lambda row: row["g"])):
        print()
        print_table([f"g = {g:.4g}", *(f"c = {row['ranks']}" for row in rows)],
                    *([f"  {name}", *(cell(o, row[name], ".2f") for row in rows)] for name in [*rows[0]][2:]))
        print(f"ulysses sends less from c = {math.floor(2 * (1 + g) / (3 * g)) + 1} on, or where gradients of keys and values are in fp32"
              f" and all else in 16 bits from {math.floor((1 + g) / (2 * g)) + 1}")


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


def json_methods(o):
    c = Compared(o)
    return {"ranks": c.plan.N, "methods": [*method_rows(o, c)]}


def print_methods(o):
    """And the bytes that a rank sends for each element of a large matrix. In PyTorch's quantization_pertensor_hook every rank
    gathers all ranks' gradients in int8 (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py)."""
    c = Compared(o)
    plan, rows = c.plan, [*method_rows(o, c)]
    given = f", and summing all gradients {o.communication_ms:.4g} ms" if o.communication_ms > 0 else ""
    print(f"{plan.shape.parameters()} parameters, {o.precision}; {plan.N} ranks, {plan.B} x {plan.T} tokens in {micro_batches(plan)} each;"
          f" computing takes {1e3 * c.step(plan, DDP).compute:.4g} ms{given}\n"
          "ms of a step; efficiency is compute / (compute + communication), or with what is exposed of it")
    for row in rows:
        row["name"] = f"  {row['method']}"
        if not row["possible"]: row["why_not"] = "gradients have 16 bits already"
        else: row |= {f"{name}_of_ddp": row[key] / rows[0][key] for name, key in (("sent", "sent_per_step"), ("step", "seconds"))}
    print_times(o, "method", "", None, rows)
    ranks, block = (2, 4, 8, 16, 64, 512), 4 / QUANTISE_BLOCK
    each = {"fp32, ring": 4, "bf16, ring": 2, "int8, parts exchanged": 1 + block, "int4, parts exchanged": 0.5 + block,
            "sign, gathered": 1 / 8, "top-k, gathered": 8 * o.top_k_fraction, "PyTorch's int8 hook, gathered": 1}
    def times(name, N): return N - 1 if "gathered" in name else 2 * (N - 1) / N
    print()
    print_table(["sent by each rank, bytes per element", *map(str, ranks), "ranks"],
                *([f"  {name}", *(f"{nbytes * times(name, N):.3f}" for N in ranks), ""] for name, nbytes in each.items()))
