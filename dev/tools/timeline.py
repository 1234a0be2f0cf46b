"""A timeline (--trace FILE) as build/overlap and build/schedule read it: of each rank the slices of compute, the operations with
their callers and units, and what it has noted of its steps. A run of one rank or of one step has no notes."""
import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import attrgetter
from typing import NamedTuple
from tool import die, read_json

REMEDY = "a trace is what --trace FILE of a training program writes"
COMPUTE, COMMUNICATION = 0, 1  # tracks
MOST_RANKS = 65536
MOST_UNITS, MOST_BLOCKS = 513, 256 # the root, and two of each block (llmc/model/gpt2.h)
OPERATION = re.compile("(all-reduce|reduce-scatter|all-gather|all-to-all(?:-v)?|broadcast|send|receive|barrier|split) #"
                       r"(\d+)(?: of ([A-Za-z0-9_.-]{1,23}))?(?: \(|$)")  # "all-gather #12 of shard.0 (24992 fp32)"
PHASES = "forward", "head", "backward", "weights", "wait for gradients", "update", "other"
ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}  # of a pipeline


class Slice(NamedTuple):
    """Of compute."""
    begin: float          # microseconds
    end: float
    step: int
    name: str
    action: tuple | None  # of a pipeline: ("F", 3)
    letter: str
    phase: str | None     # None: it waits for an operation
    block: int | None     # 0: the root, 1 + l: block l; None: neither


@dataclass
class Operation:
    kind: str
    number: int
    comm: str                 # "world": all ranks
    step: int
    begin: float              # microseconds
    end: float
    issued: float
    waited: float
    ranks: int                # how many take part
    caller: str               # "": not known
    first: int | None         # blocks whose parameters or gradients it moves, as in a Slice; None: none that are known
    last: int | None
    outside: bool             # of the steps
    phase: str = "other"      # in which it was issued

    letter = "#"
    is_message = property(lambda self: self.kind in ("send", "receive"))


class Rank:
    def __init__(self):
        self.compute, self.operations = [], []  # operations: in the order of the file
        self.steps = {}                         # by number (seconds, of them data, running or below 0); the program keeps 32 bits

    def sort(self):
        """Slices of compute do not overlap, so their ends are sorted as well."""
        self.compute.sort(key=attrgetter("begin"))
        self.communication = sorted(self.operations, key=attrgetter("begin"))

    def by_step(self): return [(step, list(slices)) for step, slices in groupby(self.compute, lambda s: s.step)]

    def computed_within(self, begin, end):
        """The time between begin and end in which something is computed."""
        later = takewhile(lambda s: s.begin < end, self.compute[bisect_right(self.compute, begin, key=attrgetter("end")):])
        return sum(max(0, min(s.end, end) - max(s.begin, begin)) for s in later if s.letter != ".")

    def slice_at(self, time):
        """What was computed at a time, or last before it; None: nothing was."""
        before = self.compute[:bisect_right(self.compute, time, key=attrgetter("begin"))]
        return next((s for s in reversed(before) if s.phase is not None), None)


def slice_of(begin, end, step, name):
    """ "F3 forward, block 2" is the action F3 of a pipeline and its slice."""
    kind, micro, what = re.match(r"(?:([FBIW])(\d{1,9}) )?(.*)", name).groups()
    phase = ACTIONS.get(kind, None if what.startswith("wait") else "other")
    phase = next((p for p in PHASES[:-1] if what.startswith(p)), phase)
    named = re.search(r"block (\d*)", name)
    block = 1 + int(named[1] or 0) if named else 0 if "embedding" in name or "head" in name else None
    letter = "." if name.startswith("wait") else "e" if "embedding" in name else "n" if "Newton" in name else name[:1] or " "
    return Slice(begin, end, step, name, kind and (kind, int(micro)), letter, phase, block)


def operation_of(begin, end, step, name, more):
    """None: it is no operation between ranks, or units or a caller are none. Names are printed, so only letters, digits and a few
    signs are in them."""
    found = OPERATION.match(name)
    match {"units": [-1, -1], "caller": "", **more}:
        case {"ranks": int(ranks), "waited": int() | float() as waited, "units": [int(first), int(last)], "caller": str(caller)}:
            if not found or not -1 <= first <= last < MOST_UNITS or not re.fullmatch(r"[A-Za-z0-9_.-]{0,47}", caller): return None
            kind, number, comm = found.groups("world")
            blocks = ((first + 1) // 2, (last + 1) // 2) if first >= 0 else (None, None) # both halves of a block are units
            return Operation(kind, int(number), comm, step, begin, end, begin, waited, ranks, caller, *blocks, "outside" in more)


class Trace:
    def __init__(self, path):
        self.path = path
        root, ranks = read_json(path, REMEDY), defaultdict(Rank)
        events = root.get("traceEvents") if isinstance(root, dict) else None
        self.require(isinstance(events, list), 'has no "traceEvents"')
        for i, event in enumerate(events):
            if not self.read_event(ranks, event): self.require(False, f"no training program wrote its event {i}, {event!s:.200}")
        self.require(ranks, "has no slices")
        self.ranks = [ranks[i] for i in range(1 + max(ranks))]
        for r in self.ranks: r.sort()

    def require(self, condition, message):
        if not condition: die(f"{self.path}: {message}; {REMEDY}")

    def read_event(self, ranks, event):
        """False: it is damaged. Events of other kinds are not read."""
        match event:
            case {"ph": "X", "name": str(name), "pid": int(pid), "tid": int(track), "ts": int() | float() as begin,
                  "dur": int() | float() as took, "args": {"step": int(step), **more}}:
                if not 0 <= pid < MOST_RANKS or track not in (COMPUTE, COMMUNICATION) or took < 0: return False
                what = begin, begin + took, step, name
                found = slice_of(*what) if track == COMPUTE else operation_of(*what, more)
                (ranks[pid].compute if track == COMPUTE else ranks[pid].operations).append(found)
                return found is not None
            case {"ph": "s", "pid": int(pid), "ts": int() | float() as issued} if pid in ranks and ranks[pid].operations:
                ranks[pid].operations[-1].issued = issued  # where the operation before it was issued
            case {"ph": "M", "name": "step", "pid": int(pid), "args": {"step": int(step), "seconds": int() | float() as seconds,
                  "data": int() | float() as data, "running": int() | float() as running}} if pid in ranks:
                ranks[pid].steps[step] = array("f", [seconds, data, running])
        return True
