"""build/plan's answers: lines and tables to read, and the same numbers as JSON, in bytes, seconds and shares of 1. An answer is
(items, a function that makes the JSON); an item is a line or a Table, and show() prints both.

The usual answer compares the memory and the step of techniques, numbers of ranks that share a replica, schedules, and the ranks of
a pipeline. Others are those of --params and --compress all, and of search.py and validate.py."""
import math
from collections import namedtuple
from tool import format_bytes, print_table
from dev.plan.machines import LINKS
from dev.plan.pipelines import pipeline_step
from dev.plan.plans import (ALWAYS, KINDS, METHODS, MOST_MICRO_BATCHES, MUONS, PLAYED_MICRO_BATCHES, SCHEDULES, blocks_of,
                            bytes_of, copy_ranks, divides, extreme_rank, mesh_name, network_of, own_rank, plan_of, room_of,
                            sent_of_all, slots, split, total_of, with_context, with_mesh, with_pipe)
from dev.plan.shapes import bytes_of_states
from dev.plan.steps import QUANTISE_BLOCK, flops_done, is_possible, step, unit_seconds

CP_WAYS = [("ulysses", "contiguous"), *((how, balance) for how in ("allgather", "ring") for balance in ("contiguous", "zigzag"))]
RARE = "workspace", "errors" # not shown if no way has any


# ---- tables ----
# columns: (heading, format, key of a row); rows: dicts. "name" is the first column; "why_not" replaces all others.
Table = namedtuple("Table", "title columns rows")
# Columns of tables of times, followed by the techniques that have them (none: all). B: bytes, ms: seconds in milliseconds.
COLUMNS = (
    ("sent a step", "B", "sent_per_step"), ("of ddp's", ".1%", "sent_of_ddp"), ("errors", "B", "errors"),
    ("buffers", "B", "message_buffers"), ("compressing", "ms", "compressing", None), ("compute ms", "ms", "compute"),
    ("tp", "ms", "tp", "3d"), ("uneven", "ms", "bubble", "cp"), ("bubble", "ms", "bubble", "pp", "3d"),
    ("of step", ".1%", "of_step", "pp"), ("of work", ".1%", "of_work", "pp"), ("formula", "ms", "formula", "pp"),
    ("Newton-Schulz", "ms", "newton_schulz", *MUONS),
    ("communication", "ms", "communication"),
    ("exposed", "ms", "exposed"), ("step ms", "ms", "seconds"), ("of ddp's", ".2f", "step_of_ddp"),
    ("tokens/s", ".0f", "tokens_per_s"), ("efficiency", ".1%", "efficiency"),
    ("efficiency", ".1%", "efficiency_communication"), ("with exposed", ".1%", "efficiency_exposed"))
COST = ("hours", ".4g", "hours"), ("GPU-hours", ".4g", "gpu_hours"), ("kWh", ".4g", "kwh"), ("price", ".4g", "price")


def plain(names): return [(str(name), "", name) for name in names]


def table_of_times(title, technique, rows):
    columns = [(name, form, key) for name, form, key, *of in COLUMNS if technique in (of or [technique])]
    return Table(title, [*columns, *COST], rows)


def cell(x, form):
    if isinstance(x, str): return x
    if math.isnan(x): return "-"
    if form == "B": return format_bytes(math.floor(x + 1e-3))
    return format(1e3 * x, ".2f") if form == "ms" else format(x, form)


def show(items):
    """Omits columns without a value."""
    for item in items:
        if isinstance(item, str):
            print(item)
            continue
        found = [row for row in item.rows if "why_not" not in row]
        def is_known(key): return any(key in row and row[key] == row[key] for row in found) # NaN does not equal itself
        columns = [column for column in item.columns if is_known(column[2])]
        def words(row): return [row["why_not"]] if "why_not" in row else [cell(row[key], form) for _, form, key in columns]
        print()
        print_table([item.title, *(name for name, _, _ in columns)], *([row["name"], *words(row)] for row in item.rows))


def cost_of(o, tokens_per_s, gpus):
    """The cost of a run of --tokens."""
    if o.tokens == 0: return {}
    hours, watts = o.tokens / tokens_per_s / 3600, o.chip.watts if o.chip else 0
    return {"hours": hours, "gpu_hours": hours * gpus, "kwh": 1e-3 * watts * hours * gpus or math.nan,
            "price": hours * gpus * o.price or math.nan}


def table_of_sizes(o, title, rows):
    """For the given device, or for usual sizes of memory. rows: {name: function of a size}"""
    nominal = [(f"{gb} GB", 1e9 * gb) for gb in (24, 40, 80, 141)]
    sizes = [(o.room_of, room_of(o, o.N))] if o.chip or o.memory > 0 else nominal
    return Table(title, plain(name for name, _ in sizes),
                 [{"name": f"  {name}", **{size: of(room) for size, room in sizes}} for name, of in rows.items()])


# ---- ways to divide the work ----
class Way(namedtuple("Way", "technique plan name")):
    def bytes(self, again=False): return bytes_of(self.plan.recomputed if again else self.plan.once, self.technique)
    def fits(self, room): return "yes" if self.bytes().total <= room else "recomputed" if self.bytes(True).total <= room else "no"

    def json(self):
        kept, again = (dict.fromkeys(KINDS, 0) | b.memory | {"total": b.total} for b in (self.bytes(), self.bytes(True)))
        own = bytes_of(self.plan, self.technique)
        return {"name": self.name, "ranks": self.plan.N, "sent_per_step": float(own.sent), "sent_mean": float(own.mean),
                **{f"sent_along_{axis}": x for axis, x in own.along.items()}, "bytes": kept, "bytes_recomputed": again}

    def facts(self, is_one):
        """A column of (name, bytes or text). is_one: for this rank of a pipeline, not for the rank that keeps most."""
        plan, technique, said = self.plan, self.technique, self.json()
        of_pipeline, of_most = technique in ("pp", "3d"), technique == "pp" and not is_one
        if of_most:
            yield "  on the rank with most", f"rank {extreme_rank(plan.once, technique)}"
            yield "    or recomputed", f"rank {extreme_rank(plan.recomputed, technique)}"
        for kind, x in said["bytes"].items():
            yield f"  {kind}", x
            if kind in ("activations", "total"): yield "    or recomputed", said["bytes_recomputed"][kind]
        yield "  sent per step", sent_of_all(plan, technique) // plan.N
        if technique in MUONS: yield "    by the busiest rank", math.floor(said["sent_per_step"] + 0.5)
        for axis in ("tp", "pp", "dp") if technique == "3d" else ():
            yield f"    along {axis}", math.floor(said[f"sent_along_{axis}"] + 0.5)
        if of_pipeline: yield "  activations at a time", str(slots(plan, own_rank(plan))) # of one chunk, if interleaved
        if is_one: yield "  blocks", str(blocks_of(plan, plan.rank))
        if of_most:
            least = extreme_rank(plan.once, technique, False)
            yield "  on the rank with least", f"rank {least}"
            yield "    total", total_of(plan.but(rank=least), technique)


def divide_batch(plan, technique, tokens):
    """The plan with as many micro-batches as a step of so many tokens needs (0: unchanged), and why there cannot be so many."""
    if tokens == 0: return plan, ""
    copies, most = plan.N // copy_ranks(plan, technique), PLAYED_MICRO_BATCHES if technique in ("pp", "3d") else MOST_MICRO_BATCHES
    rounds, rest = divmod(tokens, max(copies * plan.tokens_of, 1))
    if copies == 0 or rounds < 1 or rest: return plan, f"{tokens} tokens are no multiple of {copies} x {plan.B} x {plan.T}"
    if rounds > most: return plan, f"{rounds} micro-batches are more than the {most} that can be planned"
    return plan.but(accumulation=rounds), ""


# Ways that share a table of bytes below a line; None: no table. times: the title of their table of times; "": each way has a
# table of its own, for growing numbers of ranks. is_one: the table of bytes has a column for each rank of the only way's
# pipeline.
Group = namedtuple("Group", "ways line times is_one", defaults=("", "", False))


def way_of(p, technique):
    return p.how + " zigzag" * (p.balance == "zigzag") if technique == "cp" else p.schedule + f" {p.v}" * (p.v > 1)


def groups_of(o, plan):
    each, N = f"{plan.B} x {plan.T} tokens per micro-batch", plan.N
    if o.mesh:
        p = divide_batch(with_mesh(o, plan), "3d", o.total_batch_size)[0]
        yield Group([Way("3d", p, "mesh")], f"\nmesh {mesh_name(p)}: replicas of the model, ranks that share its matrices, stages;"
                    f" {each}, {p.accumulation} a step", "", True)
        return
    yield Group([Way(technique, plan, technique) for technique in (*ALWAYS, *["zero++"] * (plan.node_ranks > 0))])
    if o.method not in ("none", "all"):
        how = {"top-k": "; it sends 0.01 of the elements of a matrix", "powersgd": f"; rank {o.low_rank}"}.get(o.method, "")
        if plan.memory_bandwidth == 0: how += "; compressing takes no time here, because no --memory-bandwidth is known"
        yield Group([Way("ddp", plan, "ddp"), Way("compress", plan, f"ddp {o.method}")],
                    f"\nddp {o.method}: train_gpt2_compress, from the step on in which it compresses{how}")
    if o.owners != "none":
        how = "of each matrix one rank" if o.owners == "one" else "every rank"
        yield Group([Way(name, plan, name) for name in MUONS],
                    f"\nmuon: train_gpt2_muon, ZeRO-1 to ZeRO-3; {how} collects the momentum and orthogonalises it")
    m = f"{o.total_batch_size} tokens" if o.total_batch_size else o.accumulation or o.p or "p"
    how = "" if o.compares_cp else f"; --cp {o.how}, {o.balance}"
    cp_ways, schedules = CP_WAYS if o.compares_cp else [(o.how, o.balance)], SCHEDULES if o.compares else [o.schedule]
    for name, letter, asked, compares, plans_of, line in (
            ("tp", "t", o.t, False, lambda t: [plan.but(t=t)],
             f"t ranks share a replica of the model, and {each}{'; they cut its rows' * plan.rows}"),
            ("cp", "c", o.c, o.compares_cp, lambda c: [with_context(plan, c, *way) for way in cp_ways],
             f"c ranks share each sequence, and {each}{how}"),
            ("pp", "p", o.p, o.compares, lambda p: [with_pipe(o, plan, p, schedule) for schedule in schedules],
             f"p ranks share a replica of the model, each with some of its blocks; {each}, {m} a step")):
        # the numbers that divide ranks and model, or all ways (or the given one) for the given number
        ways = []
        for n in [asked] if asked else (1, 2, 4, 8) if name == "tp" else (2, 4, 8):
            plans = [divide_batch(p, name, o.total_batch_size)[0] for p in plans_of(n)]
            ways += [Way(name, p, way_of(p, name) if compares else f"{name} {n}") for p in plans if divides(p, name)]
        yield Group(ways, f"\n{name} {letter}: {line}" if [w.name for w in ways] != ["tp 1"] or asked else None,
                    f"{name} {asked} of {N}" if compares else "" if asked else f"{name} of {N}  {letter}",
                    name == "pp" and asked > 0 and not compares)


# ---- tables of bytes ----
def micro_batches(plan): return f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'}"


def ranks_of(group):
    """The ranks of the group's only pipeline."""
    (name, plan, _), = group.ways
    return [Way(name, plan.but(rank=r), f"{'stage' if name == '3d' else 'rank'} {r}") for r in range(plan.p)]


def bytes_items(group):
    """The line, splits and table of a group."""
    ways, rows = group.ways, []
    if group.line: yield group.line
    for p in {w.plan.p * w.plan.v: w.plan for w in ways if w.technique in ("pp", "3d")}.values(): # every split once
        own, even = split(p), split(p, "even")
        yield (f"split      {','.join(map(str, own['blocks']))}: ranks compute for {100 * own['efficiency']:.0f} % of the time"
               f" without a bubble; with equal numbers of blocks for {100 * even['efficiency']:.0f} %")
    if group.is_one: ways = ranks_of(group)
    for line in zip(*(w.facts(group.is_one) for w in ways)):
        (name, *_), numbers = zip(*line)
        if any(numbers) or name.strip() not in RARE: rows.append({"name": name} | {w.name: n for w, n in zip(ways, numbers)})
    yield Table(f"bytes per rank of {ways[0].plan.N}", [(w.name, "B", w.name) for w in ways], rows)


# ---- tables of seconds ----
class Clock:
    """Rows of times. seconds: of a whole model on one rank."""
    def __init__(self, o, plan):
        micro_batch = 1e-3 * o.compute_ms or flops_done(plan) * plan.B * plan.T / (o.peak_flops * o.mfu)
        self.o, self.network, self.seconds = o, network_of(plan), unit_seconds(plan, micro_batch)

    def step(self, plan, name): return (pipeline_step if name in ("pp", "3d") else step)(plan, name, self.network, self.seconds)

    def no_room(self, plan, name):
        """Why a rank has too little memory, or ""."""
        o, room, needs = self.o, room_of(self.o, plan.N), total_of(plan, name)
        if needs <= room: return ""
        text = f"does not fit: {format_bytes(needs)} of {o.room_of}" + (f", which {plan.N} ranks share" if o.shares_room else "")
        recomputed = total_of(plan.recomputed, name)
        return text + f"; with --recompute block {format_bytes(recomputed)}" if recomputed <= room else text

    def row(self, technique, plan, name):
        """A row of a table of times; NaN: unknown."""
        found = {"name": name, "ranks": plan.N}
        plan, why_not = divide_batch(plan, technique, self.o.total_batch_size)
        why_not = why_not or self.no_room(plan, technique)
        if why_not: return {**found, "why_not": why_not}
        t, found["micro_batches"] = self.step(plan, technique), plan.accumulation
        more = {"efficiency": t.efficiency, "tokens_per_s": t.tokens_per_s, "tokens_per_s_per_rank": t.tokens_per_s / plan.N,
                "mfu": plan.shape.flops_per_token(plan.T) * t.tokens_per_s / plan.N / self.o.peak_flops,
                "of_step": t.bubble / (t.compute + t.bubble), "of_work": t.bubble / t.compute}
        return found | {key: float(x) for key, x in (t._asdict() | more | cost_of(self.o, t.tokens_per_s, plan.N)).items()}

    def tables(self, group):
        """(title, technique, rows). Growing numbers of ranks are a way's fewest times powers of two, up to 4096, and --ranks."""
        if group.line is None: return
        if group.times:
            yield group.times, group.ways[0].technique, [self.row(*w[:2], w.name.removeprefix("tp ")) for w in group.ways]
            return
        for technique, plan, name in group.ways:
            if name == "ddp" and group.line: continue # it has a table already
            first = {"fsdp": plan.shard_group, "zero++": plan.node_ranks}.get(technique) or copy_ranks(plan, technique)
            numbers = {first << k for k in range(13) if first << k <= 4096} | ({plan.N} if plan.N % first == 0 else set())
            yield f"{name}  ranks", technique, [self.row(technique, plan.but(N=N), str(N)) for N in sorted(numbers)]


def assumptions(o, plan, w):
    inside, between = (LINKS[name].what if name in LINKS else name for name in (o.link, o.inter_link))
    compute = f"{1e-12 * o.peak_flops:.4g} TFLOP/s x {o.mfu:.3g}"
    if o.compute_ms > 0: compute = f"a micro-batch takes {o.compute_ms:.4g} ms"
    yield (f"\ntimes of a step: {1e-9 * plan.shape.flops_per_token(plan.T):.4g} GFLOP per token, {compute}"
           f"{', blocks recomputed' * plan.again}{' in full' * (plan.recompute == 'full')}")
    text = f"links: {inside}"
    if o.communication_ms > 0: text = f"summing all gradients whole takes {o.communication_ms:.4g} ms on {plan.N} ranks"
    if w.per_node: text += f"; nodes of {w.per_node} ranks and {w.nics} interface{'s' * (w.nics > 1)}: {between}"
    if plan.memory_bandwidth > 0: text += f"; an update at {1e-12 * plan.memory_bandwidth:.4g} TB/s"
    yield text
    watts = "; kWh are the GPUs' at their limit, without the rest of a node" * bool(o.chip and o.chip.watts)
    if o.tokens > 0: yield f"cost of {o.tokens:.4g} tokens{watts}"
    if not o.mesh:
        yield "zero-3 waits for each unit that it gathers, as train_gpt2_zero does; DeepSpeed's prefetches, as fsdp does here"


def plan_and_clock(o):
    plan = divide_batch(plan_of(o), "ddp", o.total_batch_size)[0]
    return plan, Clock(o, plan)


def answer_model(o):
    plan, clock = plan_and_clock(o)
    m, groups = plan.shape, [group for group in groups_of(o, plan) if group.ways]
    tables = [table for group in groups for table in clock.tables(group)]
    def items():
        yield (f"model      {m.L} layer{'s' * (m.L > 1)}, {m.NH} head{'s' * (m.NH > 1)}, {m.C} channels, vocabulary {m.V},"
               f" context {m.T}: {m.parameters()} parameters")
        yield (f"step       {plan.B} x {plan.T} tokens in {micro_batches(plan)} per rank; {o.precision}, on a"
               f" {o.device.upper()}")
        for group in groups:
            if group.line is not None: yield from bytes_items(group)
        yield "not counted: the rest of the layers' workspace, some MB, and what a device needs for itself"
        # tp 1 is ddp
        shown = {w.name: w.fits for group in groups for w in group.ways if w.technique != "compress" and w.name != "tp 1"}
        yield table_of_sizes(o, "fits", shown)
        yield from assumptions(o, plan, clock.network)
        for table in tables: yield table_of_times(*table)
    return items(), lambda: {
        "model": {"name": o.model, "layers": m.L, "heads": m.NH, "channels": m.C, "vocabulary": m.V, "parameters": m.parameters()},
        "step": {"batch_size": plan.B, "seq_len": plan.T, "accumulation": plan.accumulation, "total_batch_size": o.total_batch_size,
                 "precision": o.precision},
        "ranks": plan.N, "ways": [w.json() for group in groups for w in group.ways],
        "stages": [w.json() for group in groups if group.is_one for w in ranks_of(group)],
        "times": [{"table": title.split("  ")[0], "rows": rows} for title, _, rows in tables]}


# ---- --params: bytes if only the number of parameters is known ----
def answer_params(o):
    """For the numbers of ranks in the ZeRO paper's table 1 and --ranks. fsdp's shards are always fp32."""
    def state(name, N): return bytes_of_states(ALWAYS.index(name), N, o.precision != "fp32" and name != "fsdp", o.master == "on")
    def fits(each): return lambda room: f"{'yes' if each <= room else 'no'} {o.params * room / each / 1e9:.3g} B"
    def gb(x): return f"{1e-9 * x:.{2 if x < 1e11 else 1}f}"
    on = {N: {name: o.params * sum(state(name, N)) for name in ALWAYS} for N in sorted({1, 4, 16, 64, 256, 1024, o.N})}
    parts = [{"name": f"  {kind}", **{name: o.params * state(name, o.N)[k] for name in ALWAYS}} for k, kind in enumerate(KINDS[:3])]
    one = state("ddp", 1)
    return [f"{o.params:.4g} parameters in {o.precision}: {' + '.join(map(str, one))} bytes each, without activations and buffers",
            Table(f"bytes per rank of {o.N}", [(name, "B", name) for name in ALWAYS], [*parts, {"name": "  total", **on[o.N]}]),
            *["fsdp's shards are fp32, which is its master copy: 4 + 4 + 8 bytes; shards of 16 bits would take zero-3's"] *
            (sum(one) < 16),
            Table("GB per rank", plain(ALWAYS), [{"name": f"  {N}", **{name: gb(x) for name, x in each.items()}}
                                                 for N, each in on.items()]),
            table_of_sizes(o, "fits, largest", {name: fits(on[o.N][name]) for name in ALWAYS})], \
        lambda: {"parameters": o.params, "ranks": o.N, "bytes_per_rank": [{"ranks": N, **each} for N, each in on.items()]}


# ---- --compress all: every method next to train_gpt2_ddp, and its traffic on more ranks ----
def method_row(clock, plan, method):
    """Neither efficiency counts the time of compressing, although the step does."""
    way, name = plan.but(method=method), "ddp" if method == "none" else "compress"
    if not is_possible(way): return {"method": method, "possible": False}
    b, t, buffers = bytes_of(way, name), clock.step(way, name), bytes_of(plan, "ddp").memory.get("communication", 0)
    return {"method": method, "possible": True, **{name: float(x) for name, x in {
        "sent_per_step": b.sent, "errors": b.memory.get("errors", 0), "message_buffers": b.memory.get("communication", 0) - buffers,
        "compressing": t.compressing, "communication": t.communication, "exposed": t.exposed, "seconds": t.seconds,
        "efficiency_communication": t.compute / (t.compute + t.communication),
        "efficiency_exposed": t.compute / (t.compute + t.exposed)}.items()}}


def answer_methods(o):
    """Also the bytes that a rank sends per element of a large matrix. In PyTorch's quantization_pertensor_hook every rank gathers
    all ranks' gradients in int8 (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py)."""
    plan, clock = plan_and_clock(o)
    found = [method_row(clock, plan, method) for method in METHODS]
    given = f", and summing all gradients {o.communication_ms:.4g} ms" if o.communication_ms > 0 else ""
    def named(row):
        if not row["possible"]: return {"name": f"  {row['method']}", "why_not": "gradients have 16 bits already"}
        return {"name": f"  {row['method']}", **row, "sent_of_ddp": row["sent_per_step"] / found[0]["sent_per_step"],
                "step_of_ddp": row["seconds"] / found[0]["seconds"]}
    ranks, block = (2, 4, 8, 16, 64, 512), 4 / QUANTISE_BLOCK
    each = {"fp32, ring": 4, "bf16, ring": 2, "int8, parts exchanged": 1 + block, "int4, parts exchanged": 0.5 + block,
            "sign, gathered": 1 / 8, "top-k, gathered": 8 * 0.01, "PyTorch's int8 hook, gathered": 1}
    def times(name, N): return N - 1 if "gathered" in name else 2 * (N - 1) / N
    return [f"{plan.shape.parameters()} parameters, {o.precision}; {plan.N} ranks, {plan.B} x {plan.T} tokens in"
            f" {micro_batches(plan)} each; computing takes {1e3 * clock.step(plan, 'ddp').compute:.4g} ms{given}",
            "ms of a step; efficiency is compute / (compute + communication), or with what is exposed of it",
            table_of_times("method", None, [*map(named, found)]),
            Table("sent by each rank, bytes per element", [*((str(N), ".3f", N) for N in ranks), ("ranks", "", "")],
                  [{"name": f"  {name}", "": "", **{N: x * times(name, N) for N in ranks}} for name, x in each.items()])], \
        lambda: {"ranks": plan.N, "methods": found}
