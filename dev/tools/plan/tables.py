"""What build/plan compares: stages, numbers of ranks that share a replica of the model, schedules, and the ranks of a pipeline;
their bytes, what fits, and the seconds of a step, as tables to read and as JSON: bytes, seconds, shares of 1.
"""
import math
from typing import NamedTuple
from tool import format_bytes
from machines import LINKS
from options import (MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES, network_of, peak_of, plan_of, room_of, with_compression, with_mesh,
                     with_pipe)
from pipelines import crosses, mesh_step, message_bytes, message_seconds, pipeline_step
from questions import (DDP, FSDP, KINDS, MESH, PP, SCHEDULES, STAGES, STAGE_NAMES, TP, Plan, blocks_of, bytes_of, copy_ranks,
                       extreme_rank, largest_depth, mesh_name, of_depth, own_rank, pipe_divides, plan_split, sent_along,
                       sent_by_kind, sent_of_all, slots, tensor_divides, total_of)
from steps import flops_done, step, unit_seconds

MOST_RANKS = 6 # of a pipeline in a table
ONLY_PRINTED = "formula", "of_step", "of_work" # of a pipeline


class Way(NamedTuple):
    stage: int
    plan: Plan
    name: str

    def bytes(self, recompute=False): return bytes_of(self.plan._replace(recompute=recompute), self.stage)
    def extreme(self, recompute, most): return extreme_rank(self.plan._replace(recompute=recompute), self.stage, most)

    def fits(self, room):
        return "yes" if self.bytes().total <= room else "recomputed" if self.bytes(True).total <= room else "no"

    def largest(self, room):
        """The shape of the largest dN, recomputed, that such a device can train; of no layers: there is none."""
        return of_depth(self.plan, largest_depth(self.plan._replace(recompute=True, memory_bandwidth=0), self.stage, room)).shape

    def largest_name(self, room):
        s = self.largest(room)
        return f"d{s.L}, {1e-9 * s.parameters():.3g} B" if s.L else "none"


def divide_batch(plan, stage, tokens):
    """The plan with the micro-batches of a step of so many tokens (0: as they are), and why there are none, or too many to play."""
    if tokens == 0: return plan, ""
    copies, most = plan.N // copy_ranks(plan, stage), PLAYED_MICRO_BATCHES if stage in (PP, MESH) else MOST_MICRO_BATCHES
    rounds, rest = divmod(tokens, max(copies * plan.tokens, 1))
    if copies == 0 or rounds < 1 or rest: return plan, f"{tokens} tokens are no multiple of {copies} x {plan.B} x {plan.T}"
    if rounds > most: return plan, f"{rounds} micro-batches are more than the {most} that can be planned"
    return plan._replace(accumulation=rounds), ""


class Compared:
    """All ways that are compared. With --mesh nothing else is. seconds: of a whole model on one rank."""
    def __init__(self, o):
        plan, tokens = plan_of(o), o.total_batch_size
        self.plan = plan = divide_batch(plan, DDP, tokens)[0]
        self.stages, self.compressed, self.tensor, self.pipelines, self.mesh = [], [], [], [], []
        if o.mesh: self.mesh = [Way(MESH, divide_batch(with_mesh(o, plan), MESH, tokens)[0], "mesh")]
        else: self.add_ways(o, plan, tokens)
        self.all = [*self.stages, *self.compressed, *self.tensor, *self.pipelines, *self.mesh]
        micro_batch = 1e-3 * o.compute_ms if o.compute_ms > 0 else flops_done(plan) * plan.B * plan.T / (peak_of(o) * o.mfu)
        self.o, self.network, self.seconds = o, network_of(o, plan), unit_seconds(plan, micro_batch)

    def add_ways(self, o, plan, tokens):
        self.stages = [Way(stage, plan, STAGE_NAMES[stage]) for stage in STAGES]
        if o.compress not in ("none", "all"):
            self.compressed = [Way(DDP, plan, "ddp"), Way(DDP, with_compression(o, plan, o.compress), f"ddp {o.compress}")]
        # as many ranks share a replica as are asked for, or 1, 2, 4 and 8, as far as ranks and model divide
        plans = [plan._replace(t=t) for t in ([o.tensor_parallel] if o.tensor_parallel else (1, 2, 4, 8))]
        self.tensor = [Way(TP, divide_batch(p, TP, tokens)[0], f"tp {p.t}") for p in plans if tensor_divides(p)]
        # numbers of ranks, or if one is asked for the schedules that it can have, or if one of these is asked for that one
        for p in [o.pipeline_parallel] if o.pipeline_parallel else (2, 4, 8):
            for schedule in SCHEDULES if o.compares else (o.schedule,):
                pipe, _ = divide_batch(with_pipe(o, plan, p, schedule), PP, tokens)
                name = schedule + (f" {pipe.v}" if pipe.v > 1 else "") if o.compares else f"pp {p}"
                if pipe_divides(pipe): self.pipelines.append(Way(PP, pipe, name))

    # ---- seconds ----
    def step(self, plan, stage):
        if stage == PP: return pipeline_step(plan, self.network, self.seconds)
        if stage == MESH: return mesh_step(plan, self.network, self.seconds, self.o.emulation)
        return step(plan, stage, self.network, self.seconds)

    def no_room(self, plan, stage):
        """Why a rank has too little; "": it has enough."""
        o, room, needs = self.o, room_of(self.o, plan.N), total_of(plan, stage)
        if needs <= room: return ""
        text = f"does not fit: {format_bytes(needs)} of {o.room_of}" + (f", which {plan.N} ranks share" if o.shares_room else "")
        recomputed = total_of(plan._replace(recompute=True), stage)
        return text + f"; with --recompute block {format_bytes(recomputed)}" if recomputed <= room else text

    def row(self, plan, stage, name=None):
        """As JSON has it, and what only tables have. NaN: not known."""
        o, found = self.o, {"name": name or str(plan.N), "ranks": plan.N}
        plan, why_not = divide_batch(plan, stage, o.total_batch_size)
        why_not = why_not or self.no_room(plan, stage)
        if why_not: return {**found, "why_not": why_not}
        t = self.step(plan, stage)
        mfu = plan.shape.flops_per_token(plan.T) * t.tokens_per_s / plan.N / peak_of(o)
        numbers = {"seconds": t.seconds, "compute": t.compute, "bubble": t.bubble, "tp": t.tensor,
                   "communication": t.communication, "exposed": t.exposed, "efficiency": t.efficiency,
                   "tokens_per_s": t.tokens_per_s, "tokens_per_s_per_rank": t.tokens_per_s / plan.N, "mfu": mfu,
                   "formula": t.formula, "of_step": t.bubble / (t.compute + t.bubble), "of_work": t.bubble / t.compute}
        if o.tokens > 0: numbers |= cost_of(o, t.tokens_per_s, plan.N)
        return {**found, "micro_batches": plan.accumulation, **{key: float(x) for key, x in numbers.items()}}

    def on_ranks(self, way):
        """A way on more and more ranks: the fewest that it can have, times powers of two up to 4096, and the number asked for."""
        is_hybrid, asked = way.stage == FSDP and self.o.sharding == "hybrid", way.plan.N
        first = self.o.shard_group if is_hybrid else copy_ranks(way.plan, way.stage)
        numbers = {first << k for k in range(13) if first << k <= 4096} | ({asked} if asked % first == 0 else set())
        return way.name, "ranks", way.stage, [self.row(way.plan._replace(N=N), way.stage) for N in sorted(numbers)]

    def times(self):
        """Tables: title, what the rows are, stage, rows."""
        o, N, tensor, pipelines = self.o, self.plan.N, self.tensor, self.pipelines
        tables = [*map(self.on_ranks, (*self.stages, *self.mesh, *self.compressed[1:]))]
        if o.tensor_parallel: tables += map(self.on_ranks, tensor)
        elif len(tensor) > 1: tables.append((f"tp of {N}", "t", TP, [self.row(w.plan, TP, str(w.plan.t)) for w in tensor]))
        if o.pipeline_parallel and not o.compares: return tables + [*map(self.on_ranks, pipelines)]
        title, rows_are = (f"pp {o.pipeline_parallel} of {N}", "") if o.compares else (f"pp of {N}", "p")
        rows = [self.row(w.plan, PP, w.name) for w in pipelines]
        return [*tables, (title, rows_are, PP, rows)] if rows else tables


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
def json_bytes(b): return {**{kind: b.memory.get(kind, 0) for kind in KINDS}, "total": b.total}


def json_device(w, room):
    is_alone = w.stage == MESH or w.plan.split != "auto" # another depth has another split
    return {"fits": w.fits(room)} if is_alone else {"fits": w.fits(room), "largest_depth": w.largest(room).L}


def json_model(o):
    c, sizes = Compared(o), device_sizes(o)
    m = c.plan.shape
    return {"model": {"name": o.model, "layers": m.L, "heads": m.NH, "channels": m.C, "vocabulary": m.V, "parameters": m.parameters()},
            "step": {"batch_size": c.plan.B, "seq_len": c.plan.T, "accumulation": c.plan.accumulation,
                     "total_batch_size": o.total_batch_size, "precision": o.precision},
            "ranks": c.plan.N,
            "ways": [{"name": w.name, "ranks": w.plan.N, "ranks_of_a_copy": copy_ranks(w.plan, w.stage),
                      "sent_per_step": float(w.bytes().sent), "bytes": json_bytes(w.bytes()),
                      "bytes_recomputed": json_bytes(w.bytes(True)),
                      "devices": {name: json_device(w, room) for name, room in sizes}} for w in c.all],
            "times": [{"table": title, "rows": [{key: x for key, x in row.items() if key not in ONLY_PRINTED} for row in rows]}
                      for title, _, _, rows in c.times()]}


# ---- tables of bytes ----
def micro_batches(plan): return f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'}"
def print_row(name, cells): print(f"{name:<24}" + "".join(f" {cell:>16}" for cell in cells))
def print_bytes(o, name, numbers): print_row(name, ["%.0f" % n if o.exact else format_bytes(n) for n in numbers])


def print_memory(o, ways):
    """With and without recomputation."""
    print()
    print_row(f"bytes per rank of {ways[0].plan.N}", [w.name for w in ways])
    if ways[0].stage == PP and ways[0].plan.rank < 0:
        print_row("  on the rank with most", [w.extreme(False, True) for w in ways])
        print_row("    or recomputed", [w.extreme(True, True) for w in ways])
    kept, recomputed = [w.bytes() for w in ways], [w.bytes(True) for w in ways]

    def line(name, found, kind): print_bytes(o, name, [b.memory.get(kind, 0) for b in found])
    for kind in KINDS[:-1]:
        if kind not in ("workspace", "errors") or any(b.memory.get(kind) for b in kept): line(f"  {kind}", kept, kind)
        if kind == "activations": line("    or recomputed", recomputed, kind)
    print_bytes(o, "  total", [b.total for b in kept])
    print_bytes(o, "    or recomputed", [b.total for b in recomputed])
    if any(b.memory.get(KINDS[-1]) for b in kept): line("  state on the host", kept, KINDS[-1])
    print_bytes(o, "  sent per step", [sent_of_all(w.plan, w.stage) // w.plan.N for w in ways])


def rank_ways(way):
    """The ranks of one pipeline, or if these are too many the one that keeps most and the one that keeps least."""
    plan, stage, names = way.plan, way.stage, {r: "" for r in range(way.plan.p)}
    if plan.p > MOST_RANKS: names = {extreme_rank(plan, stage): "most: ", extreme_rank(plan, stage, False): "least: "}
    return [Way(stage, plan._replace(rank=r), f"{name}{'stage' if stage == MESH else 'rank'} {r}") for r, name in names.items()]


def print_played(o, ways):
    """Pipelines; or the ranks of one, or of a mesh."""
    plan, is_mesh = ways[0].plan, ways[0].stage == MESH
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
    print_memory(o, ranks)
    sent = [sent_along(w.plan._replace(recompute=plan.recompute)) if is_mesh else sent_by_kind(w.plan) for w in ranks]
    for name in sent[0]: print_bytes(o, f"    {name}", [math.floor(kinds[name] + 1e-3) for kinds in sent])
    print_row("  activations at a time", [slots(w.plan, own_rank(w.plan)) for w in ranks]) # interleaved: each of one chunk
    if one: print_row("  blocks", [blocks_of(w.plan, w.plan.rank) for w in ranks])
    for recompute, name in () if one else ((False, "  on the rank with least"), (True, "    recomputed, on rank")):
        least = [w.extreme(recompute, False) for w in ways]
        print_row(name, least)
        print_bytes(o, "    total", [total_of(w.plan._replace(rank=r, recompute=recompute), PP) for w, r in zip(ways, least)])
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
    if len(ways) == 1 and o.tensor_parallel == 0:
        if plan.N > 1:
            print(f"\ntensor parallelism: none of 2, 4 and 8 divides {plan.N} ranks, {plan.shape.NH} heads and {plan.shape.Vp} tokens")
        return
    how = "" if not plan.rows else "; they cut its rows, and keep what they gather" if plan.keep_gathered else "; they cut its rows"
    print(f"\ntp t: t ranks share a replica of the model, and {plan.B} x {plan.T} tokens per micro-batch{how}", end="")
    print_memory(o, ways)


def print_sizes(o, title, rows=()):
    """rows: (name, what of each size)"""
    sizes = device_sizes(o)
    print_row(f"\n{title}".ljust(25), [name for name, _ in sizes])
    for name, of in rows: print_row(f"  {name}", [of(room) for _, room in sizes])


def print_what_fits(o, c):
    ways = [w for w in (*c.stages, *c.tensor, *c.pipelines, *c.mesh) if w.stage != TP or w.plan.t > 1] # tp of one rank is ddp
    print_sizes(o, "fits", [(w.name, w.fits) for w in ways])
    deep = [(w.name, w.largest_name) for w in ways if w.stage != PP or o.split == "auto"]
    if not c.mesh: print_sizes(o, "largest dN, recomputed", deep)


# ---- tables of seconds ----
# Of a table of a pipeline, of a mesh and of other stages: title, width and format of each column, and what is in it.
COLUMNS = {
    PP: (("compute", 9, "ms", "compute"), ("bubble", 9, "ms", "bubble"), ("of step", 8, ".1%", "of_step"),
         ("of work", 8, ".1%", "of_work"), ("formula", 9, "ms", "formula"), ("communication", 14, "ms", "communication"),
         ("exposed", 9, "ms", "exposed"), ("step ms", 9, "ms", "seconds"), ("tokens/s", 12, ".0f", "tokens_per_s")),
    MESH: (("compute ms", 12, "ms", "compute"), ("tp", 10, "ms", "tp"), ("bubble", 10, "ms", "bubble"),
           ("communication", 14, "ms", "communication"), ("exposed", 10, "ms", "exposed"), ("step ms", 10, "ms", "seconds"),
           ("tokens/s", 12, ".0f", "tokens_per_s")),
    None: (("compute ms", 12, "ms", "compute"), ("communication", 14, "ms", "communication"), ("exposed", 12, "ms", "exposed"),
           ("step", 12, "ms", "seconds"), ("tokens/s", 14, ".0f", "tokens_per_s"))}
EVERY = (("efficiency", 11, ".1%", "efficiency"), ("hours", 9, ".4g", "hours"), ("GPU-hours", 10, ".4g", "gpu_hours"),
         ("kWh", 10, ".4g", "kwh"), ("price", 12, ".4g", "price"))


def cell(o, x, width, form):
    """A number as its column's format says; B: bytes, ms: seconds as milliseconds."""
    if math.isnan(x): text = "-"
    elif form == "B": text = str(math.floor(x + 1e-3)) if o.exact else format_bytes(x)
    else: text = format(1e3 * x, ".2f") if form == "ms" else format(x, form)
    return f" {text:>{width}}"


def print_times(o, title, rows_are, stage, rows):
    known = {"efficiency": 1, "hours": o.tokens, "gpu_hours": o.tokens, "kwh": o.tokens and o.watts, "price": o.price}
    columns = [*COLUMNS.get(stage, COLUMNS[None]), *(column for column in EVERY if known[column[3]] > 0)]
    left = max(14 - len(title), 6) # of the first column, for what the rows are
    print(f"{title}{rows_are:>{left}}" + "".join(f" {name:>{width}}" for name, width, *_ in columns))
    for row in rows:
        cells = [f"  {row['why_not']}"] if "why_not" in row else [cell(o, row[key], width, form) for _, width, form, key in columns]
        print(f"{row['name']:>14}" + "".join(cells))


def print_messages(ways, w):
    for name, plan in ((way.name, way.plan) for way in ways if way.plan.p > 1):
        between = ", between nodes" if crosses(plan, w) else ""
        print(f"{name}: {2 * plan.accumulation * (plan.p * plan.v - 1)} messages of {format_bytes(message_bytes(plan))} between"
              f" stages in a step of a copy, each in {1e3 * message_seconds(plan, w):.3f} ms{between}")


def print_assumptions(o, plan, w):
    algorithms = {"ring": "rings", "tree": "trees", "nccl": "NCCL's algorithms"}
    inside, between = (LINKS[name][0] if name in LINKS else name for name in (o.link, o.inter_link))
    compute = f"a micro-batch takes {o.compute_ms:.4g} ms" if o.compute_ms > 0 else f"{1e-12 * peak_of(o):.4g} TFLOP/s x {o.mfu:.3g}"
    print(f"\ntimes of a step: {1e-9 * plan.shape.flops_per_token(plan.T):.4g} GFLOP per token, {compute}"
          f"{', blocks recomputed' * plan.recompute}{' in full' * plan.full}")
    text = f"{algorithms[w.algorithm]} over {o.device_gpu.what if o.gpu_links else inside}"
    if o.communication_ms > 0: text = f"summing all gradients whole takes {o.communication_ms:.4g} ms on {plan.N} ranks"
    if w.per_node: text += f"; nodes of {w.per_node} ranks and {w.nics} interfaces" + ("" if o.gpu_links else f": {between}")
    if plan.memory_bandwidth > 0: text += f"; an update at {1e-12 * plan.memory_bandwidth:.4g} TB/s"
    print(text)
    if plan.offload != "none": print(f"offloaded shards pass a link of {1e-9 * plan.host_link:.3g} GB/s, and AdamW has"
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
    else: print_memory(o, c.stages)
    if c.compressed: print_compressed(o, c.compressed)
    if c.tensor: print_tensor(o, plan, c.tensor)
    if c.pipelines: print_played(o, c.pipelines)
    print("not counted: the rest of the layers' workspace, some MB, and what a device needs for itself")
    print_what_fits(o, c)
    print_assumptions(o, plan, c.network)
    for table in tables:
        if table[2] == PP: print_messages(c.pipelines, c.network)
        print_times(o, *table)
