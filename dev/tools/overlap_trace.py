"""A timeline (--trace FILE) as build/overlap reads it: slices of both tracks, the operations with their callers and units, and what
each rank has noted of its steps.

A trace of an older program has no callers, units, times of waits or notes. Its steps and waits are made of slices then: a step
lasts from its first slice of compute to its last, and compute waits for an operation while nothing is computed beside it.
"""
import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple
from tool import die, has, read_events

REMEDY = "a trace is what --trace FILE of a training program writes"
COMPUTE, COMMUNICATION = 0, 1  # tracks
MOST_STEPS = 128               # of which a rank makes notes (llmc/run/diagnosis.h)
MOST_UNITS = 257               # the root and 256 blocks (llmc/model/gpt2.h)
KINDS = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send", "receive", "barrier", "split"
PHASES = "forward", "head", "backward", "weights", "wait for gradients", "update", "other"
ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}  # of a pipeline; the first slice is "F3 start"


class Slice(NamedTuple):
    """Of compute."""
    begin: float       # microseconds
    end: float
    step: int
    letter: str
    phase: str | None  # None: it waits for an operation
    unit: int | None   # None: of no unit


@dataclass
class Shares:
    """Of an operation, or of many: ms of a step."""
    exposed: float = 0.0
    hidden: float = 0.0       # beside computing
    others: float = 0.0       # waits for ranks that were late, and for messages
    computing: float = 0.0    # of what is no operation

    total = property(lambda self: self.exposed + self.hidden)

    def add(self, other):
        for name in "exposed", "hidden", "others", "computing": setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Operation:
    kind: str
    number: int
    comm: str
    step: int
    begin: float              # microseconds
    end: float
    issued: float
    waited: float             # below 0: not known
    ranks: int                # how many take part
    caller: str               # "": not known
    first: int | None         # units whose parameters or gradients it moves; None: none that are known
    last: int | None
    outside: bool             # of the steps
    phase: str = "other"      # in which it was issued
    shares: Shares = None

    letter = "#"
    is_message = property(lambda self: self.kind in ("send", "receive"))


class Step:
    """What a rank has noted of a step, in seconds. The program keeps them in 32 bits."""

    def __init__(self, number, seconds, data=0.0, running=-1.0):
        self.number = number
        self.seconds, self.data, self.running = array("f", [seconds, data, running])  # running below 0: not known


class Rank:
    def __init__(self):
        self.compute, self.operations, self.steps = [], [], []  # operations: in the order of the file

    def sort(self):
        """Slices of compute do not overlap, so their ends are sorted as well."""
        self.compute.sort(key=lambda s: s.begin)
        self.communication = sorted(self.operations, key=lambda o: o.begin)
        self.begins, self.ends = [s.begin for s in self.compute], [s.end for s in self.compute]

    def by_step(self): return [(step, list(slices)) for step, slices in groupby(self.compute, lambda s: s.step)]

    def computed_within(self, begin, end):
        """The time between begin and end in which something is computed."""
        total = 0
        for s in self.compute[bisect_right(self.ends, begin):]:
            if s.begin >= end: break
            if s.letter != ".": total += max(0, min(s.end, end) - max(s.begin, begin))
        return total

    def slice_at(self, time):
        """What was computed at a time, or last before it; None: nothing was."""
        before = self.compute[:bisect_right(self.begins, time)]
        return next((s for s in reversed(before) if s.phase is not None), None)


def compute_slice(begin, end, step, name):
    """ "F3 forward, block 2" is the action F3 of a pipeline and its slice. Blocks are units from 1 on."""
    is_action = name[:1] in ACTIONS and " " in name
    word = name.split(" ", 1)[1] if is_action else name
    phase = ACTIONS.get(name[0]) if is_action else None if word.startswith("wait") else "other"
    phase = next((p for p in PHASES[:-1] if word.startswith(p)), phase)
    block = re.search(r"block (\d*)", name)
    unit = 1 + int(block[1] or 0) if block else 0 if "embedding" in name or "head" in name else None
    letter = "." if name.startswith("wait") else "e" if "embedding" in name else name[:1] or " "
    return Slice(begin, end, step, letter, phase, unit)


def is_word(name, length):
    """Of letters, digits and these, as programs give names. Only such names are printed, and written into pictures."""
    return isinstance(name, str) and len(name) < length and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None


class Trace:
    def __init__(self, path):
        self.path, self.ranks = path, []
        events = read_events(path, REMEDY)
        self.require(events is not None, 'has no "traceEvents"')
        for i, event in enumerate(events):
            if has(event, ph=str, name=str, pid=int): self.read_event(i, event)
        self.require(self.ranks, "has no slices")
        for r in self.ranks: r.sort()
        self.has_notes = any(r.steps for r in self.ranks)
        self.has_callers = any(o.caller for r in self.ranks for o in r.operations)

    def require(self, condition, message):
        if not condition: die(f"{self.path}: {message}; {REMEDY}")

    def read_event(self, i, e):
        pid, args = e["pid"], e.get("args")
        if e["ph"] == "X" and has(e, tid=int, ts=float, dur=float) and has(args, step=int):
            self.require(0 <= pid < 65536 and e["tid"] in (COMPUTE, COMMUNICATION),
                         f"was not written by --trace: event {i} has pid {pid}, tid {e['tid']}")
            self.require(e["dur"] >= 0, f"was not written by --trace: event {i} lasts {e['dur']:g}")
            while len(self.ranks) <= pid: self.ranks.append(Rank())
            times = e["ts"], e["ts"] + e["dur"], args["step"]
            if e["tid"] == COMPUTE: self.ranks[pid].compute.append(compute_slice(*times, e["name"]))
            else: self.ranks[pid].operations.append(self.read_operation(i, e["name"], *times, args))
        elif not 0 <= pid < len(self.ranks): return  # the names of tracks come before the first slice
        elif e["ph"] == "s" and has(e, ts=float) and self.ranks[pid].operations:
            self.ranks[pid].operations[-1].issued = e["ts"]  # where the operation before it was issued
        elif e["ph"] == "M" and e["name"] == "step":
            steps, is_step = self.ranks[pid].steps, has(args, step=int, seconds=float, data=float, running=float)
            self.require(is_step and len(steps) < MOST_STEPS, f"event {i} is no note of a step, or one of too many")
            steps.append(Step(args["step"], args["seconds"], args["data"], args["running"]))

    def read_operation(self, i, name, begin, end, step, args):
        """ "all-gather #12 of shard.0 (24992 fp32)"; without "of", of all ranks."""
        found = re.match(r"(.*?) #\s*([+-]?\d+)(?: of ([^ ]*))?", name)
        kind, number, comm = found.groups("world") if found else ("", 0, "")
        args = {"waited": -1, "ranks": 2, "units": [-1, -1], "caller": "", **args}
        self.require(kind in KINDS and is_word(comm, 24) and has(args, waited=float, ranks=int),
                     f"was not written by --trace: event {i}, '{name[:60]}', is no operation between ranks")
        units, caller = args["units"], args["caller"]
        are_units = isinstance(units, list) and [type(u) for u in units] == [int, int] and -1 <= units[0] <= units[1] < MOST_UNITS
        self.require(are_units, f"event {i} has units {' to '.join(map(str, units)) if isinstance(units, list) else units}")
        self.require(caller == "" or is_word(caller, 48), f"event {i}: '{caller!s:.60}' is no function")
        first, last = units if units[0] >= 0 else (None, None)
        return Operation(kind, int(number), comm, step, begin, end, begin, args["waited"], args["ranks"], caller, first, last,
                         args.get("outside") is True)
