"""The actions of a pipeline's step as a run's --trace has them: which of its slices belong to which action, and how long each
action took.

In a trace of train_gpt2_pp the names of slices begin with their action: "F3 forward, block 2" is part of the forward pass of
micro-batch 3. Time in which a rank waited for messages is cut out of them. What follows the actions of a step, the sums over ranks
and the update, has other names and is no part of the pipeline.
"""
from itertools import groupby
from timeline import Trace

MOST_RANKS, MOST_MICRO = 256, 4096


class Step:
    """A step on the ranks of the first replica of the model. Times are ms."""

    def __init__(self, number, ranks):
        self.number, self.ranks = number, ranks  # of each rank its actions: [(action, [(begin, end), ..]), ..]
        self.count = sum(map(len, ranks))
        spans = [span for rank in ranks for _, spans in rank for span in spans]
        self.begin, self.end = min(begin for begin, _ in spans), max(end for _, end in spans)
        self.bubble = self.end - self.begin - sum((end - begin) / len(ranks) for begin, end in spans)


class Run:
    def __init__(self, path):
        trace = Trace(path)
        self.compute = [[s for s in rank.compute if s.action] for rank in trace.ranks]
        self.ranks, slices = len(self.compute), sum(self.compute, [])
        trace.require(slices, "has no slices whose names begin with an action, such as F0")
        self.m = 1 + max(s.action[1] for s in slices)
        trace.require(self.ranks <= MOST_RANKS and self.m <= MOST_MICRO, f"is of {self.ranks} ranks and {self.m} micro-batches")
        self.copies = sum(any(" head" in s.name for s in rank) for rank in self.compute)  # of the model; 0: no slice says so

    def steps(self, p):
        """All steps, with what ranks 0 to p-1 did in them."""
        found = {}
        for r, slices in enumerate(self.compute[:p]):
            for (step, action), part in groupby(slices, lambda s: (s.step, s.action)):
                found.setdefault(step, [[] for _ in range(p)])[r].append((action, [(1e-3 * s.begin, 1e-3 * s.end) for s in part]))
        return [Step(number, ranks) for number, ranks in sorted(found.items())]


def whole_steps(steps):
    """Those that have all of their actions. The first one is left out if there are others: it touches memory for the first time."""
    most = max(s.count for s in steps)
    if len(steps) > 1 and steps[1].count == most: steps = steps[1:]
    return [s for s in steps if s.count == most]
