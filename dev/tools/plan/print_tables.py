"""Prints what ways.py compares and times, as tables to read."""
import math
from tool import format_bytes
from machines import link_description
from options import peak_of
from pipelines import message_bytes, message_seconds, messages_of
from schedules import blocks_of, plan_split, slots
from questions import KINDS, MESH, PP, own_rank, sent_by_kind, sent_of_all
from ways import device_sizes, rank_ways


def micro_batches(plan): return f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'}"


def print_row(name, cells):
    print(f"{name:<24}" + "".join(f" {cell:>16}" for cell in cells))


class BytesPrinter:
    """exact: all digits."""
    def __init__(self, exact):
        self.exact = exact

    def row(self, name, numbers):
        print_row(name, ["%.0f" % n if self.exact else format_bytes(n) for n in numbers])

    def kind(self, name, found, kind):
        self.row(name, [b.memory.get(kind, 0) for b in found])

    def memory(self, ways):
        """With and without recomputation."""
        print_title(f"bytes per rank of {ways[0].plan.N}", ways)
        if is_of_most(ways):
            print_extremes("  on the rank with most", ways, False, True)
            print_extremes("    or recomputed", ways, True, True)
        kept, recomputed = [w.bytes() for w in ways], [w.bytes(True) for w in ways]
        for kind in KINDS[:-1]:
            if kind not in ("workspace", "errors") or any(b.memory.get(kind) for b in kept): self.kind(f"  {kind}", kept, kind)
            if kind == "activations": self.kind("    or recomputed", recomputed, kind)
        self.row("  total", [b.total for b in kept])
        self.row("    or recomputed", [b.total for b in recomputed])
        if any(b.memory.get(KINDS[-1]) for b in kept): self.kind("  state on the host", kept, KINDS[-1])
        self.row("  sent per step", [sent_of_all(w.plan, w.stage) // w.plan.N for w in ways])

    def pipelines(self, ways, o):
        if not ways: return
        plan, one = ways[0].plan, o.pipeline_parallel > 0 and not o.compares
        ranks = rank_ways(plan, PP) if one else ways
        step = plan.accumulation if o.accumulation or o.pipeline_parallel else "p"
        if o.total_batch_size: step = f"{o.total_batch_size} tokens"
        print(f"\npp p: p ranks share a replica of the model, each with some of its blocks; {plan.B} x {plan.T} tokens per micro-batch,"
              f" {step} a step")
        print_splits(ways)
        self.memory(ranks)
        sent = [sent_by_kind(w.plan) for w in ranks]
        for k, name in enumerate(("messages", "root", "to other replicas", "loss and norms")):
            self.row(f"    {name}", [math.floor(kinds[k] + 1e-3) for kinds in sent])
        print_slots(ranks)
        if one: print_row("  blocks", [blocks_of(w.plan, w.plan.pipe.rank) for w in ranks])
        else: self.least(ways)
        v = o.chunks or 2
        if o.compares and len(ways) < 4:
            print(f"interleaved with {v} chunks is left out: it needs a multiple of {plan.pipe.p} micro-batches, and"
                  f" {v * plan.pipe.p} blocks")

    def least(self, ways):
        """What the rank of each pipeline with least keeps."""
        for recompute, name in ((False, "  on the rank with least"), (True, "    recomputed, on rank")):
            print_extremes(name, ways, recompute, False)
            of_least = [w._replace(plan=w.plan.with_pipe(rank=w.extreme(recompute, False))) for w in ways]
            self.row("    total", [w.bytes(recompute).total for w in of_least])

    def mesh(self, ways):
        if not ways: return
        plan = ways[0].plan
        ranks = rank_ways(plan, MESH)
        print(f"\nmesh dp={plan.N // (plan.t * plan.pipe.p)},tp={plan.t},pp={plan.pipe.p}: replicas of the model, ranks that share its"
              f" matrices, stages; {plan.B} x {plan.T} tokens per micro-batch, {plan.accumulation} a step")
        print_splits(ways)
        self.memory(ranks)
        for axis in ("tp", "pp", "dp"):
            self.row(f"    along {axis}", [math.floor(w.bytes(plan.recompute).along[axis] + 0.5) for w in ranks])
        print_slots(ranks)
        print_row("  blocks", [blocks_of(w.plan, w.plan.pipe.rank) for w in ranks])


def print_title(title, ways):
    print()
    print_row(title, [w.name for w in ways])


def is_of_most(ways): return ways[0].stage == PP and ways[0].plan.pipe.rank < 0


def print_extremes(name, ways, recompute, most):
    """The rank of a pipeline that keeps most, or least."""
    print_row(name, [w.extreme(recompute, most) for w in ways])


def print_slots(ways):
    """In an interleaved schedule each of one chunk."""
    ranks = [own_rank(w.plan) if w.stage == PP else w.plan.pipe.rank for w in ways]
    print_row("  activations at a time", [slots(w.plan, rank) for w, rank in zip(ways, ranks)])


def print_splits(ways):
    """Each once."""
    firsts = {}
    for w in ways: firsts.setdefault(w.plan.pipe.p * w.plan.pipe.v, w)
    for w in firsts.values():
        own, even = plan_split(w.plan), plan_split(w.plan, "even")
        print(f"split      {','.join(map(str, own['blocks']))}: ranks compute for {100 * own['efficiency']:.0f} % of the time without a"
              f" bubble; with equal numbers of blocks for {100 * even['efficiency']:.0f} %")


# ---- bytes ----
def print_sharding(plan):
    """How fsdp shards, if not as usual."""
    f = plan.fsdp
    if (f.sharding, f.reduce_dtype, f.offload) == ("full", "fp32", False): return
    copies = f": {plan.N // f.shard_group} replicas of the model, of {f.shard_group} ranks each" if f.sharding == "hybrid" else ""
    dtype, host = "fp32" if f.reduce_dtype == "fp32" else "the model's precision", "; shards on the host" if f.offload else ""
    print(f"fsdp       sharding {f.sharding}{copies}; gradients reduced in {dtype}{host}")


def print_compressed(c, o, printer):
    if not c.compressed: return
    plan, details = c.plan, ""
    if o.compress == "top-k": details += f"; it sends {o.top_k_fraction:g} of the elements of a matrix"
    if o.compress == "powersgd": details += f"; rank {o.rank}"
    if plan.memory_bandwidth == 0: details += "; compressing takes no time here, because no --memory-bandwidth is known"
    print(f"\n{c.compressed[1].name}: train_gpt2_compress, from the step on in which it compresses{details}", end="")
    printer.memory(c.compressed)


def print_tensor(c, o, printer):
    plan = c.plan
    if len(c.tensor) == 1 and o.tensor_parallel == 0:
        if plan.N > 1:
            print(f"\ntensor parallelism: none of 2, 4 and 8 divides {plan.N} ranks, {plan.config.NH} heads and {plan.config.Vp} tokens")
        return
    how = "" if not plan.rows else "; they cut its rows, and keep what they gather" if plan.keep_gathered else "; they cut its rows"
    print(f"\ntp t: t ranks share a replica of the model, and {plan.B} x {plan.T} tokens per micro-batch{how}", end="")
    printer.memory(c.tensor)


def print_what_fits(c, o):
    sizes, groups = device_sizes(o), (c.stages, c.tensor, c.pipelines, c.mesh)
    print_sizes("fits", sizes)
    for w in (w for ways in groups for w in ways if not w.is_repeated): print_row(f"  {w.name}", [w.fits(room) for _, room in sizes])
    if c.mesh: return
    print_sizes("largest dN, recomputed", sizes)
    for w in (w for ways in groups[:3 if o.split == "auto" else 2] for w in ways if not w.is_repeated):
        found = [w.largest(room) for _, room in sizes]
        print_row(f"  {w.name}", [f"d{x.L}, {1e-9 * x.parameters():.3g} B" if x else "none" for x in found])


def print_sizes(title, sizes):
    print()
    print_row(title, [name for name, _ in sizes])


# ---- seconds ----
def ms(title, width, field): return title, width, ".2f", lambda row: 1e3 * getattr(row.time, field)


def speed(width):
    return ("tokens/s", width, ".0f", lambda row: row.time.tokens_per_s), ("efficiency", 11, ".1%", lambda row: row.time.efficiency)


# Of a table of a pipeline, of a mesh and of other stages: title, width and format of each column, and what is in it.
COLUMNS = {
    PP: (ms("compute", 9, "compute"), ms("bubble", 9, "bubble"),
         ("of step", 8, ".1%", lambda row: row.time.bubble / (row.time.compute + row.time.bubble)),
         ("of work", 8, ".1%", lambda row: row.time.bubble / row.time.compute), ms("formula", 9, "formula"),
         ms("communication", 14, "communication"), ms("exposed", 9, "exposed"), ms("step ms", 9, "seconds"), *speed(12)),
    MESH: (ms("compute ms", 12, "compute"), ms("tp", 10, "tensor"), ms("bubble", 10, "bubble"),
           ms("communication", 14, "communication"), ms("exposed", 10, "exposed"), ms("step ms", 10, "seconds"), *speed(12)),
    None: (ms("compute ms", 12, "compute"), ms("communication", 14, "communication"), ms("exposed", 12, "exposed"),
           ms("step", 12, "seconds"), *speed(14))}


def cost_columns(o):
    known = (("hours", 9, o.tokens), ("GPU-hours", 10, o.tokens), ("kWh", 10, o.tokens and o.watts), ("price", 12, o.price))
    return [(title, width, ".4g", lambda row, k=k: row.cost[k]) for k, (title, width, is_known) in enumerate(known) if is_known > 0]


def cell(x, width, form, exact=False):
    """A number as its column's format says; B: bytes."""
    if math.isnan(x): text = "-"
    elif form == "B": text = str(math.floor(x + 1e-3)) if exact else format_bytes(x)
    else: text = format(x, form)
    return f" {text:>{width}}"


def print_time_table(table, o):
    columns = (*COLUMNS.get(table.stage, COLUMNS[None]), *cost_columns(o))
    left = max(14 - len(table.title), 6) # of the first column, for what the rows are
    print(f"{table.title}{table.rows_are:>{left}}" + "".join(f" {title:>{width}}" for title, width, *_ in columns))
    for row in table.rows:
        print(f"{row.name:>14}" + (f"  {row.why_not}" if row.why_not else
                                   "".join(cell(of(row), width, form) for _, width, form, of in columns)))


def print_messages(ways, w):
    for way in ways:
        plan = way.plan
        if plan.pipe.p == 1: continue
        between = ", between nodes" if w.crosses(plan.N, plan.pipe.p) else ""
        print(f"{way.name}: {messages_of(plan)} messages of {format_bytes(message_bytes(plan))} between stages in a step of a copy,"
              f" each in {1e3 * message_seconds(plan, w):.3f} ms{between}")


def print_assumptions(o, plan, w):
    algorithms = {"ring": "rings", "tree": "trees", "nccl": "NCCL's algorithms"}
    compute = f"a micro-batch takes {o.compute_ms:.4g} ms" if o.compute_ms > 0 else f"{1e-12 * peak_of(o):.4g} TFLOP/s x {o.mfu:.3g}"
    print(f"\ntimes of a step: {1e-9 * plan.config.flops_per_token(plan.T):.4g} GFLOP per token, {compute}"
          f"{', blocks recomputed' if plan.recompute else ''}")
    text = f"{algorithms[w.algorithm]} over {o.device_gpu.what if o.gpu_links else link_description(o.link)}"
    if o.communication_ms > 0: text = f"summing all gradients whole takes {o.communication_ms:.4g} ms on {plan.N} ranks"
    if w.per_node: text += f"; nodes of {w.per_node} ranks and {w.nics} interfaces"
    if w.per_node and not o.gpu_links: text += f": {link_description(o.inter_link)}"
    if plan.memory_bandwidth > 0: text += f"; an update at {1e-12 * plan.memory_bandwidth:.4g} TB/s"
    print(text)
    if plan.fsdp.offload: print(f"offloaded shards pass a link of {1e-9 * plan.fsdp.host_link:.3g} GB/s, and AdamW has"
                                f" {1e-9 * plan.fsdp.host_bandwidth:.3g} GB/s of the host's memory")
    watts = "; kWh are the GPUs' at their limit, without the rest of a node" if o.watts > 0 else ""
    if o.tokens > 0: print(f"cost of {o.tokens:.4g} tokens{watts}")
    if not o.mesh: print("zero-3 waits for each unit that it gathers, as train_gpt2_zero does; DeepSpeed's prefetches, as fsdp does here")


# ---- all tables ----
def print_model(c, timer, o):
    plan, m, printer, tables = c.plan, c.plan.config, BytesPrinter(o.exact), timer.tables(c)
    print(f"model      {m.L} layers, {m.NH} heads, {m.C} channels, vocabulary {m.V}, context {m.max_T}: {m.parameters()} parameters")
    print(f"step       {plan.B} x {plan.T} tokens in {micro_batches(plan)} per rank;"
          f" {o.precision}, on a {'GPU' if plan.gpu else 'CPU'}")
    print_sharding(plan)
    printer.mesh(c.mesh)
    if c.stages: printer.memory(c.stages)
    print_compressed(c, o, printer)
    if c.tensor: print_tensor(c, o, printer)
    printer.pipelines(c.pipelines, o)
    print("not counted: the rest of the layers' workspace, some MB, and what a device needs for itself")
    print_what_fits(c, o)
    print_assumptions(o, plan, timer.network)
    for table in tables:
        if table.stage == PP: print_messages(c.pipelines, timer.network)
        print_time_table(table, o)
