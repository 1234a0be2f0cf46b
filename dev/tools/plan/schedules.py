"""Pipelines: which blocks are in which part of the model (llmc/parallel/split.h), what each rank does in which order
(llmc/parallel/pipeline.h has the schedules), and when, if every rank does its actions in order and each as early as its input is
there.

A step has m micro-batches; a rank has v parts of the model, part number c of rank r being number c*p + r of all. An action is one
micro-batch in one part: F forward, B the gradient of the input, W the gradients of the weights, D both.
"""
import functools
import math
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


# ---- splits ----
def head_cost(Vp, C):
    """In blocks: 2 Vp C FLOPs a token, where a block has 24 C^2."""
    return Vp / (12.0 * C)


def part_cost(blocks, g, head):
    return blocks[g] + (head if g == len(blocks) - 1 else 0)


def rank_cost(blocks, rank, p, head):
    return sum(part_cost(blocks, g, head) for g in range(rank, len(blocks), p))


def split_even(L, p, v):
    """The first parts are larger by one block if they must be."""
    return [L // (p * v) + (g < L % (p * v)) for g in range(p * v)]


@functools.lru_cache(None)
def split_auto(L, p, v, head):
    """The largest cost of a rank is as small as it can be: block after block goes to the rank that has the least to do, and there
    to the part that has. Of equal ranks the earlier one gets it: in 1f1b the first forward passes of a slow early stage are done
    while later stages have nothing to do yet."""
    last = p * v - 1
    blocks = [1] * last + [0]
    costs = [rank_cost(blocks, r, p, head) for r in range(p)]
    for _ in range(L - last):
        rank = costs.index(min(costs))
        least = rank
        for g in range(rank, last + 1, p):
            if part_cost(blocks, g, head) <= part_cost(blocks, least, head): least = g
        blocks[least] += 1
        costs[rank] = rank_cost(blocks, rank, p, head)
    return blocks


def split_of(plan):
    """Blocks of each part of the model."""
    l, c = plan.pipe, plan.config
    return split_auto(c.L, l.p, l.v, head_cost(c.Vp, c.C)) if l.split == "auto" else [int(x) for x in l.split.split(",")]


def blocks_of(plan, rank):
    return sum(split_of(plan)[rank::plan.pipe.p])


def balance(plan, blocks):
    """Without a bubble, the share of the time in which stages compute, as train_gpt2_pp prints it."""
    p, head = plan.pipe.p, head_cost(plan.config.Vp, plan.config.C)
    costs = [rank_cost(blocks, r, p, head) for r in range(p)]
    return sum(costs) / (p * max(costs))


# ---- schedules ----
class Pipeline(NamedTuple):
    schedule: str
    p: int                   # stages (ranks), micro-batches a step, parts of the model on a rank
    m: int
    v: int


def pipeline_of(plan):
    return Pipeline(plan.pipe.schedule, plan.pipe.p, plan.accumulation, plan.pipe.v)


def warmup(l, rank):
    """How many forward passes a rank begins with, before forward and backward passes take turns."""
    after, all_passes = l.p - 1 - rank, l.m * l.v
    ahead = {"gpipe": all_passes, "interleaved": 2 * after + (l.v - 1) * l.p}.get(l.schedule, after)
    return min(ahead, all_passes)


def slots(l, rank):
    """The most (micro-batch, part) whose activations are alive at a time."""
    return min(warmup(l, rank) + 1 + (rank if l.schedule == "zb-h1" else 0), l.m * l.v)


def passes_of(l):
    """Forward and backward passes in the order of interleaved: p micro-batches in a rank's first part, the same p in the next, and
    so on; then the next p. With one part that is the order of the micro-batches."""
    def at(j): return j // (l.p * l.v) * l.p + j % l.p, j // l.p % l.v
    passes = [at(j) for j in range(l.m * l.v)]
    return [("F", i, c) for i, c in passes], [("D", i, l.v - 1 - c) for i, c in passes]


@functools.lru_cache(64)
def actions_of(l, rank):
    """All of a rank's actions in order: (kind, micro-batch, part)."""
    forward, backward = passes_of(l)
    w = warmup(l, rank)
    actions = forward[:w]
    for j, (_, micro, part) in enumerate(backward):
        if w + j < len(forward): actions.append(forward[w + j])
        if l.schedule != "zb-h1": actions.append(("D", micro, part))
        else: # a rank delays `rank` of its W
            actions.append(("B", micro, part))
            if j >= rank: actions.append(("W", j - rank, 0))
    if l.schedule == "zb-h1": actions += [("W", j, 0) for j in range(max(l.m - rank, 0), l.m)]
    return actions


class Played(NamedTuple):
    l: Pipeline
    ends: list               # of each rank, when each of its actions ends
    begins: list
    busy: list               # time in which each rank computes
    step: float              # from the first action's begin to the last one's end

    def end(self, rank):
        return self.ends[rank][-1]


@functools.lru_cache(16)
def play(l, times, message):
    """times: (F, B, W) of each part of the model; message: seconds between two ranks."""
    last, p = l.p * l.v - 1, l.p
    forward, backward = ([[None] * l.m for _ in range(last + 1)] for _ in range(2))
    lasts = [{"F": f, "B": b, "W": w, "D": b + w} for f, b, w in times]
    hop = message if p > 1 else 0
    actions = [actions_of(l, r) for r in range(p)]
    begins, ends = [[] for _ in range(p)], [[] for _ in range(p)]
    busy, moved = [0.0] * p, True
    while moved:
        moved = False
        for r in range(p):
            mine, done, now = actions[r], ends[r], ends[r][-1] if ends[r] else 0.0
            while len(done) < len(mine):
                kind, micro, part = mine[len(done)]
                g = part * p + r
                if kind == "W": ready = backward[g][micro]
                elif kind == "F": ready = 0.0 if g == 0 else forward[g - 1][micro]
                else: ready = forward[g][micro] if g == last or forward[g][micro] is None else backward[g + 1][micro]
                if ready is None: break
                if (kind == "F" and g > 0) or (kind in "BD" and g < last): ready += hop
                begin = ready if ready > now else now
                now = begin + lasts[g][kind]
                if kind == "F": forward[g][micro] = now
                elif kind != "W": backward[g][micro] = now
                begins[r].append(begin)
                done.append(now)
                busy[r] += now - begin
                moved = True
    assert all(len(ends[r]) == len(actions[r]) for r in range(p)), f"{l} deadlocks"
    return Played(l, ends, begins, busy, max(x[-1] for x in ends))


def bubble(l, F, B, W):
    """Of a balanced pipeline by formula, by the times of all parts of a rank; NaN: there is none."""
    if l.schedule == "zb-h1": return (l.p - 1) * max(F + B - W, F) if l.m >= l.p else math.nan
    return (l.p - 1) * ((F + B + W) / l.v)
