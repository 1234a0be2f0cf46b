"""What the tables of build/plan compare: stages, numbers of ranks that share a replica of the model, schedules, and the ranks of a
pipeline; their bytes, what fits, and the seconds of a step as tables of rows. A row that cannot be timed says why.

Rows      First of all stages, then of compressed gradients, of ranks that share a replica, of pipelines. Most tables have a row for
          each power of two up to 4096 ranks and for the number asked for; those that compare numbers of ranks that share a replica,
          or schedules, are for that number.
"""
from typing import NamedTuple
from tool import format_bytes
from options import (MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES, network_of, peak_of, plan_of, room_of, with_compression, with_mesh,
                     with_pipe)
from pipelines import mesh_step, pipeline_step
from schedules import SCHEDULES
from questions import (DDP, FSDP, MESH, PP, STAGES, STAGE_NAMES, TP, Plan, bytes_of, copy_ranks, extreme_rank, largest_depth, of_depth,
                    pipe_divides, tensor_divides, total_of)
from steps import StepTime, flops_done, step, unit_seconds

MOST_RANKS = 6 # of a pipeline in a table


class Way(NamedTuple):
    stage: int
    plan: Plan
    name: str

    def bytes(self, recompute=False): return bytes_of(self.plan._replace(recompute=recompute), self.stage)

    def extreme(self, recompute=False, most=True):
        return extreme_rank(self.plan._replace(recompute=recompute), self.stage, most)

    def fits(self, room):
        return "yes" if self.bytes().total <= room else "recomputed" if self.bytes(True).total <= room else "no"

    def largest(self, room):
        """The configuration of the largest dN, recomputed, that such a device can train; None: there is none."""
        depth = largest_depth(self.plan._replace(recompute=True, memory_bandwidth=0), self.stage, room)
        return of_depth(self.plan, depth).config if depth else None

    @property
    def is_repeated(self):
        """tp of one rank is ddp, whose row is there."""
        return self.stage == TP and self.plan.t == 1


def divide_batch(plan, stage, tokens):
    """The plan with the micro-batches of a step of so many tokens (0: as they are), and why there are none, or too many to play."""
    if tokens == 0: return plan, ""
    copies, most = plan.N // copy_ranks(plan, stage), PLAYED_MICRO_BATCHES if stage in (PP, MESH) else MOST_MICRO_BATCHES
    rounds, rest = divmod(tokens, max(copies * plan.tokens, 1))
    if copies == 0 or rounds < 1 or rest: return plan, f"{tokens} tokens are no multiple of {copies} x {plan.B} x {plan.T}"
    if rounds > most: return plan, f"{rounds} micro-batches are more than the {most} that can be planned"
    return plan._replace(accumulation=rounds), ""


def tensor_ways(o, plan):
    """1, 2, 4 and 8 ranks that share a replica, as far as ranks and model divide, or as many as are asked for."""
    plans = [plan._replace(t=t) for t in ([o.tensor_parallel] if o.tensor_parallel else (1, 2, 4, 8))]
    return [Way(TP, divide_batch(p, TP, o.total_batch_size)[0], f"tp {p.t}") for p in plans if tensor_divides(p)]


def pipeline_ways(o, plan):
    """Numbers of ranks, or if one is asked for the schedules that it can have, or if one of these is asked for that one."""
    ways = []
    for p in [o.pipeline_parallel] if o.pipeline_parallel else (2, 4, 8):
        for schedule in SCHEDULES if o.compares else (o.schedule,):
            pipe, _ = divide_batch(with_pipe(o, plan, p, schedule), PP, o.total_batch_size)
            chunks = f" {pipe.pipe.v}" if pipe.pipe.v > 1 else ""
            if pipe_divides(pipe): ways.append(Way(PP, pipe, schedule + chunks if o.compares else f"pp {p}"))
    return ways


def rank_ways(plan, stage):
    """The ranks of one pipeline, or if these are too many the one that keeps most and the one that keeps least."""
    word, every = "stage" if stage == MESH else "rank", range(plan.pipe.p)
    if plan.pipe.p <= MOST_RANKS: names = {r: f"{word} {r}" for r in every}
    else:
        most, least = extreme_rank(plan, stage), extreme_rank(plan, stage, False)
        return [Way(stage, plan.with_pipe(rank=r), f"{name}: {word} {r}") for r, name in ((most, "most"), (least, "least"))]
    return [Way(stage, plan.with_pipe(rank=r), name) for r, name in names.items()]


class Compared:
    """Everything that is compared. With --mesh nothing else is."""
    def __init__(self, o):
        plan = plan_of(o)
        self.plan, tokens = divide_batch(plan, DDP, o.total_batch_size)[0], o.total_batch_size
        self.stages, self.compressed, self.tensor, self.pipelines, self.mesh = [], [], [], [], []
        if o.mesh:
            self.mesh = [Way(MESH, divide_batch(with_mesh(o, self.plan), MESH, tokens)[0], "mesh")]
            return
        self.stages = [Way(stage, self.plan, STAGE_NAMES[stage]) for stage in STAGES]
        if o.compress not in ("none", "all"):
            self.compressed = [Way(DDP, self.plan, "ddp"), Way(DDP, with_compression(o, self.plan, o.compress), f"ddp {o.compress}")]
        self.tensor = tensor_ways(o, self.plan)
        self.pipelines = pipeline_ways(o, self.plan)

    def all(self): return [*self.stages, *self.compressed, *self.tensor, *self.pipelines, *self.mesh]


def device_sizes(o):
    """(name, bytes) of the devices of the tables of what fits: the one that is asked for, or nominal sizes."""
    if o.device_gpu or o.memory > 0: return [(o.room_of, room_of(o, o.ranks))]
    return [(f"{gb} GB", 1e9 * gb) for gb in (24, 40, 80, 141)]


# ---- seconds ----
class Cost(NamedTuple):
    """What a run of --tokens costs; NaN: not known."""
    hours: float
    gpu_hours: float
    kwh: float
    price: float


def cost_of(o, tokens_per_s, gpus):
    hours = o.tokens / tokens_per_s / 3600
    return Cost(hours, hours * gpus, 1e-3 * o.watts * hours * gpus, hours * gpus * o.price)


class Row(NamedTuple):
    name: str                # number of ranks, or the way
    ranks: int
    why_not: str             # "": it is timed
    micro_batches: int = 0   # of a replica of the model
    time: StepTime = None
    mfu: float = 0           # NaN: the peak is not known
    cost: Cost = None


class TimeTable(NamedTuple):
    title: str
    rows_are: str
    stage: int
    rows: list


class Timer:
    """Times ways. seconds: of a whole model on one rank."""
    def __init__(self, o, plan):
        micro_batch = 1e-3 * o.compute_ms if o.compute_ms > 0 else flops_done(plan) * plan.B * plan.T / (peak_of(o) * o.mfu)
        self.o, self.network, self.seconds = o, network_of(o, plan), unit_seconds(plan, micro_batch)

    def step(self, plan, stage):
        if stage == PP: return pipeline_step(plan, self.network, self.seconds)
        if stage == MESH: return mesh_step(plan, self.network, self.seconds, self.o.emulation)
        return step(plan, stage, self.network, self.seconds)

    def no_room(self, plan, stage):
        """Why a rank has too little; "": it has enough."""
        o, room, needs = self.o, room_of(self.o, plan.N), total_of(plan, stage)
        if needs <= room: return ""
        text = f"does not fit: {format_bytes(needs)} of {o.room_of}"
        if o.shares_room: text += f", which {plan.N} ranks share"
        recomputed = total_of(plan._replace(recompute=True), stage)
        return text + f"; with --recompute block {format_bytes(recomputed)}" if recomputed <= room else text

    def row(self, plan, stage, name=None):
        o, name = self.o, name or str(plan.N)
        plan, why_not = divide_batch(plan, stage, o.total_batch_size)
        why_not = why_not or self.no_room(plan, stage)
        if why_not: return Row(name, plan.N, why_not)
        t = self.step(plan, stage)
        mfu = plan.config.flops_per_token(plan.T) * t.tokens_per_s / plan.N / peak_of(o)
        return Row(name, plan.N, "", plan.accumulation, t, mfu, cost_of(o, t.tokens_per_s, plan.N))

    def on_ranks(self, way, first):
        """A way on more and more ranks: `first`, the fewest that it can have, times powers of two up to 4096, and the number asked
        for."""
        asked = way.plan.N
        numbers = {first << k for k in range(13) if first << k <= 4096} | ({asked} if asked % first == 0 else set())
        return TimeTable(way.name, "ranks", way.stage, [self.row(way.plan._replace(N=N), way.stage) for N in sorted(numbers)])

    def compared(self, ways, title, shows_number=False):
        """All ways on the ranks that are asked for. shows_number: of the ranks that share a replica, instead of the name."""
        rows = [self.row(w.plan, w.stage, str(copy_ranks(w.plan, w.stage)) if shows_number else w.name) for w in ways]
        return TimeTable(title, "t" if shows_number else "" if self.o.compares else "p", ways[0].stage, rows)

    def tables(self, c):
        o, N = self.o, c.plan.N
        tables = [self.on_ranks(w, o.shard_group if w.stage == FSDP and o.sharding == "hybrid" else 1) for w in c.stages]
        tables += [self.on_ranks(w, copy_ranks(w.plan, MESH)) for w in c.mesh]
        tables += [self.on_ranks(w, 1) for w in c.compressed[1:]]
        if len(c.tensor) == 1 and o.tensor_parallel: tables.append(self.on_ranks(c.tensor[0], c.tensor[0].plan.t))
        elif len(c.tensor) > 1: tables.append(self.compared(c.tensor, f"tp of {N}", True))
        if not c.pipelines: return tables
        p = c.pipelines[0].plan.pipe.p
        if o.pipeline_parallel and not o.compares: return [*tables, self.on_ranks(c.pipelines[0], p)]
        return [*tables, self.compared(c.pipelines, f"pp {p} of {N}" if o.compares else f"pp of {N}")]
