"""The actions of a pipeline's step as a run's --trace has them: which of its slices belong to which action, and how long each
action took.

In a trace of train_gpt2_pp the names of slices begin with their action: "F3 forward, block 2" is part of the forward pass of
micro-batch 3. Time in which a rank waited for messages is cut out of them. What follows the actions of a step, the sums over ranks
and the update, has other names and is no part of the pipeline.
"""
import re
from itertools import groupby
from typing import NamedTuple
from tool import die, has, read_events

REMEDY = "a trace is what train_gpt2_pp --trace FILE writes"
MOST_RANKS, MOST_MICRO = 256, 4096


class Slice(NamedTuple):
    step: int
    rank: int
    begin: float    # ms
    end: float
    action: tuple   # letter, micro-batch
    has_head: bool


def slice_of(e):
    """A slice of an action; None: an event is something else."""
    is_slice = has(e, ph=str, name=str, pid=int, tid=int, ts=float, dur=float) and has(e.get("args"), step=int)
    found = is_slice and e["ph"] == "X" and e["tid"] == 0 and re.match(r"([FBIW])(\d+)", e["name"])
    if not found: return None
    begin, end = 1e-3 * e["ts"], 1e-3 * (e["ts"] + e["dur"])
    return Slice(e["args"]["step"], e["pid"], begin, end, (found[1], int(found[2])), " head" in e["name"])


class Step:
    """A step on the ranks of the first replica of the model."""

    def __init__(self, number, p, slices):
        slices = [s for s in slices if s.rank < p]
        self.number, self.ranks = number, [[] for _ in range(p)]  # of each rank its actions: [(action, slices), ...]
        for (rank, action), part in groupby(slices, lambda s: (s.rank, s.action)): self.ranks[rank].append((action, list(part)))
        self.count = sum(map(len, self.ranks))
        self.begin, self.end = min((s.begin for s in slices), default=0), max((s.end for s in slices), default=0)
        self.bubble = self.end - self.begin - sum((s.end - s.begin) / p for s in slices)


class Trace:
    def __init__(self, path):
        found = [(i, slice_of(e)) for i, e in enumerate(read_events(path, REMEDY) or [])]
        for i, s in found:
            if s and not (0 <= s.rank < MOST_RANKS and s.action[1] < MOST_MICRO):
                die(f"{path}: event {i} is of rank {s.rank} and micro-batch {s.action[1]}; {REMEDY}")
        self.slices = sorted(s for _, s in found if s)
        if not self.slices: die(f"{path}: has no slices whose names begin with an action, such as F0; {REMEDY}")
        self.ranks = 1 + max(s.rank for s in self.slices)
        self.m = 1 + max(s.action[1] for s in self.slices)
        self.copies = len({s.rank for s in self.slices if s.has_head})  # of the model; 0: no slice says so

    def steps(self, p):
        """All steps, with what ranks 0 to p-1 did in them."""
        return [Step(number, p, slices) for number, slices in groupby(self.slices, lambda s: s.step)]

    def whole_steps(self, p):
        """Those that have all of their actions. The first one is left out if there are others: it touches memory for the first
        time."""
        steps = self.steps(p)
        most = max(s.count for s in steps)
        if len(steps) > 1 and steps[1].count == most: steps = steps[1:]
        return [s for s in steps if s.count == most and most > 0]
