"""A timeline (--trace FILE) as build/overlap reads it: slices of both tracks, the operations with their callers and units, and what
each rank has noted of its steps.

A trace of an older program has no callers, units, times of waits or notes. Its steps and waits are made of slices then: a step
lasts from its first slice of compute to its last, and compute waits for an operation while nothing is computed beside it.
"""
import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from tool import die, has, read_events

REMEDY = "a trace is what --trace FILE of a training program writes"
COMPUTE, COMMUNICATION = 0, 1  # tracks
MOST_STEPS = 128               # of which a rank makes notes (llmc/run/diagnosis.h)
MOST_UNITS = 257               # the root and 256 blocks (llmc/model/gpt2.h)
KINDS = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send", "receive", "barrier", "split"
PHASES = "forward", "head", "backward", "weights", "wait for gradients", "update", "other"
ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}  # of a pipeline; the first slice is "F3 start"


@dataclass(slots=True)
class Slice:
    begin: float              # microseconds
    end: float
    step: int
    letter: str
    phase: str | None = None  # of compute; None: it waits for an operation
    unit: int | None = None   # None: of no unit


@dataclass
class Shares:
    """Of an operation, or of many: ms of a step."""
    exposed: float = 0.0
    hidden: float = 0.0       # beside computing
    others: float = 0.0       # waits for ranks that were late, and for messages

    total = property(lambda self: self.exposed + self.hidden)

    def add(self, other, factor=1):
        self.exposed += factor * other.exposed
        self.hidden += factor * other.hidden
        self.others += factor * other.others


@dataclass(slots=True)
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
    shares: Shares = field(default_factory=Shares)

    is_message = property(lambda self: self.kind in ("send", "receive"))


class Step:
    """What a rank has noted of a step, in seconds. The program keeps them in 32 bits."""

    def __init__(self, number, seconds, data=0.0, running=-1.0):
        self.number = number
        self.seconds, self.data, self.running = array("f", [seconds, data, running])  # running below 0: not known


class Rank:
    def __init__(self):
        self.tracks, self.operations, self.steps = ([], []), [], []

    compute = property(lambda self: self.tracks[COMPUTE])
    communication = property(lambda self: self.tracks[COMMUNICATION])

    def sort(self):
        """Slices of a track do not overlap, so their ends are sorted as well."""
        for track in self.tracks: track.sort(key=lambda s: s.begin)
        self.begins, self.ends = [s.begin for s in self.compute], [s.end for s in self.compute]

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
    return isinstance(name, str) and 0 < len(name) < length and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None


class Trace:
    def __init__(self, path):
        self.path, self.ranks, self.has_notes, self.has_callers = path, [], False, False
        events = read_events(path, REMEDY)
        self.require(events is not None, 'has no "traceEvents"')
        for i, event in enumerate(events): self.read_event(i, event)
        self.require(self.ranks, "has no slices")
        for r in self.ranks: r.sort()

    def require(self, condition, message):
        if not condition: die(f"{self.path}: {message}; {REMEDY}")

    def read_event(self, i, e):
        if not has(e, ph=str, name=str, pid=int): return
        is_slice = e["ph"] == "X" and has(e, tid=int, ts=float, dur=float) and has(e.get("args"), step=int)
        is_arrow = e["ph"] == "s" and has(e, ts=float)
        is_note = e["ph"] == "M" and 0 <= e["pid"] < len(self.ranks)  # the names of tracks come before the first slice
        if not (is_slice or is_arrow or is_note): return
        pid, track, duration = (e["pid"], e["tid"], e["dur"]) if is_slice else (e["pid"], -1, 0)
        self.require(0 <= pid < 65536 and (not is_slice or track in (COMPUTE, COMMUNICATION)),
                     f"was not written by --trace: event {i} has pid {pid}, tid {track}")
        self.require(duration >= 0, f"was not written by --trace: event {i} lasts {duration:g}")
        while len(self.ranks) <= pid: self.ranks.append(Rank())
        rank = self.ranks[pid]
        if is_note: self.read_note(i, rank, e)
        elif is_slice: self.read_slice(i, rank, e)
        elif rank.operations: rank.operations[-1].issued = e["ts"]  # where the operation before it was issued

    def read_slice(self, i, rank, e):
        begin, end, step = e["ts"], e["ts"] + e["dur"], e["args"]["step"]
        if e["tid"] == COMPUTE:
            rank.compute.append(compute_slice(begin, end, step, e["name"]))
            return
        rank.communication.append(Slice(begin, end, step, "#"))
        rank.operations.append(self.read_operation(i, e["name"], begin, end, e["args"]))

    def read_operation(self, i, name, begin, end, args):
        """ "all-gather #12 of shard.0 (24992 fp32)"; without "of", of all ranks."""
        kind, _, rest = name.partition(" #")
        found = re.match(r"\s*([+-]?\d+)(?: of ([^ ]*))?", rest)
        comm = found and ("world" if found[2] is None else found[2])
        args = {"waited": -1, "ranks": 2, "units": [-1, -1], "caller": "", **args}
        self.require(kind in KINDS and is_word(comm, 24) and has(args, waited=float, ranks=int),
                     f"was not written by --trace: event {i}, '{name[:60]}', is no operation between ranks")
        units, caller = args["units"], args["caller"]
        are_units = isinstance(units, list) and [type(u) for u in units] == [int, int] and -1 <= units[0] <= units[1] < MOST_UNITS
        self.require(are_units, f"event {i} has units {' to '.join(map(str, units)) if isinstance(units, list) else units}")
        self.require(caller == "" or is_word(caller, 48), f"event {i}: '{caller!s:.60}' is no function")
        self.has_callers |= caller != ""
        first, last = units if units[0] >= 0 else (None, None)
        return Operation(kind, int(found[1]), comm, args["step"], begin, end, begin, args["waited"], args["ranks"], caller,
                         first, last, args.get("outside") is True)

    def read_note(self, i, rank, e):
        """A step, as noted at the end of a rank's part."""
        if e["name"] != "step": return
        is_step = has(e.get("args"), step=int, seconds=float, data=float, running=float) and len(rank.steps) < MOST_STEPS
        self.require(is_step, f"event {i} is no note of a step, or one of too many")
        rank.steps.append(Step(*(e["args"][name] for name in ("step", "seconds", "data", "running"))))
        self.has_notes = True
