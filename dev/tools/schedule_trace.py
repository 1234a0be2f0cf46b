"""The actions of a pipeline's step as a run's --trace has them: which of its slices belong to which action, and how long each
action took.

In a trace of train_gpt2_pp the names of slices begin with their action: "F3 forward, block 2" is part of the forward pass of
micro-batch 3. Time in which a rank waited for messages is cut out of them. What follows the actions of a step, the sums over ranks
and the update, has other names and is no part of the pipeline.
"""
import re
from dataclasses import dataclass
from itertools import groupby
from tool import die, has, read_events

REMEDY = "a trace is what train_gpt2_pp --trace FILE writes"
MOST_RANKS, MOST_MICRO = 256, 4096


@dataclass(slots=True)
class Slice:
    step: int
    rank: int
    action: tuple   # letter, micro-batch
    begin: float    # ms
    end: float
    has_head: bool


def slice_of(e):
    """A slice of an action; None: an event is something else."""
    if not has(e, ph=str, name=str, pid=int, tid=int, ts=float, dur=float) or not has(e.get("args"), step=int): return None
    found = re.match(r"([FBIW])(\d+)", e["name"])
    if e["ph"] != "X" or e["tid"] != 0 or not found: return None
    begin, end = 1e-3 * e["ts"], 1e-3 * (e["ts"] + e["dur"])
    return Slice(e["args"]["step"], e["pid"], (found[1], int(found[2])), begin, end, " head" in e["name"])


@dataclass
class Step:
    """A step on the ranks of the first replica of the model."""
    number: int
    ranks: list     # of each rank the slices of its actions: [(action, slices), ...]

    begin = property(lambda self: min(s.begin for _, slices in self.all() for s in slices))
    end = property(lambda self: max(s.end for _, slices in self.all() for s in slices))
    count = property(lambda self: len(self.all()))

    def all(self): return [action for rank in self.ranks for action in rank]
    def work(self): return sum((s.end - s.begin) / len(self.ranks) for _, slices in self.all() for s in slices)
    def bubble(self): return self.end - self.begin - self.work()


class Trace:
    def __init__(self, path):
        events = read_events(path, REMEDY) or []
        self.path, found = path, [(i, slice_of(e)) for i, e in enumerate(events)]
        for i, s in found:
            if s and not (0 <= s.rank < MOST_RANKS and s.action[1] < MOST_MICRO):
                die(f"{path}: event {i} is of rank {s.rank} and micro-batch {s.action[1]}; {REMEDY}")
        self.slices = sorted((s for _, s in found if s), key=lambda s: (s.step, s.rank, s.begin))
        if not self.slices: die(f"{path}: has no slices whose names begin with an action, such as F0; {REMEDY}")
        self.ranks = 1 + max(s.rank for s in self.slices)
        self.m = 1 + max(s.action[1] for s in self.slices)
        self.copies = len({s.rank for s in self.slices if s.has_head})  # of the model; 0: no slice says so

    def steps(self, p):
        """All steps that have an action on ranks 0 to p-1."""
        found = []
        for number, slices in groupby(self.slices, lambda s: s.step):
            ranks = [[] for _ in range(p)]
            for (rank, action), part in groupby(slices, lambda s: (s.rank, s.action)):
                if rank < p: ranks[rank].append((action, list(part)))
            found.append(Step(number, ranks))
        return found

    def whole_steps(self, p):
        """Those that have all of their actions. The first one is left out if there are others: it touches memory for the first
        time."""
        steps = self.steps(p)
        most = max(s.count for s in steps)
        if len(steps) > 1 and steps[1].count == most: steps = steps[1:]
        return [s for s in steps if s.count == most and most > 0]
