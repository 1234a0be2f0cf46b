"""A trace's communication by kind, by unit, by communicator and by caller, in ms of a step: means of all ranks and of the steps
that the run's own diagnosis takes, with its arithmetic (llmc/run/diagnosis.h; a test compares both).

Each operation gets its share of what the diagnosis says of its kind on its communicator in a step: of exposed communication in
proportion to its wait, and of hidden communication in proportion to the time that it took beyond that. So each table adds up to the
diagnosis' own figures.
"""
import math
from array import array
from dataclasses import dataclass
from timeline import MOST_UNITS

MOST_STEPS = 128  # of which a rank makes notes (llmc/run/diagnosis.h)
WAYS = "kind", "unit", "communicator", "caller"


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


class Channel:
    """A rank's operations of one kind on one communicator: how many seconds of each step they were waited for, and took. The
    program keeps seconds in 32 bits."""

    def __init__(self, steps):
        self.operations, self.exposed, self.busy = [[] for _ in range(steps)], array("f", [0] * steps), array("f", [0] * steps)
        self.communication = []  # of each step how long it waited for communication, and how long that took

    def add(self, s, operation):
        waited, busy = array("f", [1e-6 * operation.waited, 1e-6 * (operation.end - operation.begin)])
        self.operations[s].append(operation)
        self.exposed[s] += waited
        self.busy[s] += busy


def part_of(whole, part, all): return whole * part / all if all > 0 else 0


def unit_name(first, last):
    """ "block 3", as the timeline counts them from 0 """
    if first is None: return "no unit"
    if last == 0: return "root"
    if first == last: return f"block {first - 1}"
    return f"root to block {last - 1}" if first == 0 else f"blocks {first - 1} to {last - 1}"


def name_by(way, o):
    """What a table calls an operation, and where it stands there."""
    if way == "kind": return o.kind, 0
    if way == "communicator": return o.comm.split(".")[0], 0  # all groups of a split
    if way == "caller": return o.caller or "not known", 0
    if o.first is not None: return unit_name(o.first, o.last), o.first * MOST_UNITS + o.last
    return "messages" if o.is_message else "no unit", 2 * MOST_UNITS**2 + o.is_message


class Split:
    def __init__(self, trace):
        self.trace, self.ranks, self.operations, self.all = trace, trace.ranks, [], Shares()
        self.has_notes = any(r.steps for r in self.ranks)
        if not self.has_notes: self.make_steps()
        self.numbers = [number for number in self.ranks[0].steps if all(number in r.steps for r in self.ranks)]
        trace.require(self.numbers, "has no step that all ranks have, except the first, which never counts")
        self.index = {number: s for s, number in enumerate(self.numbers)}
        self.per_step = 1 / len(self.numbers) / len(self.ranks)  # makes sums means
        self.share_units()
        channels = [self.find_channels(r) for r in self.ranks]
        self.count_communication(channels)
        self.mean = self.means_of(channels)
        trace.require(self.mean["step"] > 0, "has no time in the steps that count")
        for rank, of_rank in zip(self.ranks, channels):
            for c in of_rank.values():
                for s in range(len(self.numbers)): self.split_channel(rank, c, s)

    def make_steps(self):
        """From the first slice of compute to the last: all steps but the first, or the first alone."""
        first = min(r.compute[0].step for r in self.ranks if r.compute)
        for r in self.ranks:
            for number, slices in r.by_step():
                last = r.compute[-1].step
                if (number != first or first == last) and number > last - MOST_STEPS:
                    r.steps[number] = array("f", [1e-6 * (slices[-1].end - slices[0].begin), 0, -1])

    def share_units(self):
        """Units of the same collective, as far as any rank knows them: ranks of ddp that load no weights do not."""
        known = {}
        of_several = [o for r in self.ranks for o in r.operations if o.ranks > 1]
        for o in of_several:
            if o.first is None: continue
            first, last = known.get((o.comm, o.number), (o.first, o.last))
            known[o.comm, o.number] = min(first, o.first), max(last, o.last)
        for o in of_several: o.first, o.last = known.get((o.comm, o.number), (o.first, o.last))

    # ---- the diagnosis ----
    def find_channels(self, rank):
        found = {}
        for o in rank.operations:
            if o.outside or o.ranks < 2 or o.step not in self.index: continue
            found.setdefault((o.kind, o.comm), Channel(len(self.numbers))).add(self.index[o.step], o)
        return found

    def count_communication(self, channels):
        """Of a collective what counts in each step is the rank of the communicator that waited least. A receive is the same
        message as another's send."""
        for kind, comm in {key for of_rank in channels for key in of_rank}:
            alike = [of_rank[kind, comm] for of_rank in channels if (kind, comm) in of_rank]
            least = [*zip(map(min, zip(*(c.exposed for c in alike))), map(min, zip(*(c.busy for c in alike))))]
            if kind == "receive": least = [(0, 0)] * len(least)
            for c in alike: c.communication = [*zip(c.exposed, c.busy)] if kind == "send" else least

    def means_of(self, channels):
        """Seconds of a step, means of all ranks: the step, computing, exposed communication, and all communication."""
        mean = dict.fromkeys(("step", "compute", "exposed", "communication"), 0)
        for r, of_rank in zip(self.ranks, channels):
            for s, number in enumerate(self.numbers):
                seconds, data, running = r.steps[number]
                rest = seconds - sum(c.exposed[s] for c in of_rank.values()) - data
                parts = [c.communication[s] for c in of_rank.values()]
                of_step = {"step": seconds, "compute": rest if running < 0 else min(rest, running),
                           "exposed": sum(exposed for exposed, _ in parts), "communication": sum(map(max, parts))}
                for name, x in of_step.items(): mean[name] += x * self.per_step
        return mean

    def efficiency(self, what):
        """The course's figure, of all communication, or the one of what nothing hides. Both leave out what is no communication."""
        whole = self.mean["compute"] + self.mean[what]
        return self.mean["compute"] / whole if whole else math.nan

    def split_channel(self, rank, channel, s):
        """Gives the operations of one channel in one step their shares, phases, and units if they do not say them."""
        (exposed, busy), waited, found = channel.communication[s], channel.exposed[s], channel.operations[s]
        of_each = [part_of(exposed, 1e-6 * o.waited, waited) for o in found]
        beyond = [max(0, 1e-6 * (o.end - o.begin) - x) for o, x in zip(found, of_each)]
        hidden, all, ms = max(busy - exposed, 0), sum(beyond), 1e3 * self.per_step
        for o, x, more in zip(found, of_each, beyond):
            o.shares = Shares(ms * x, ms * (part_of(hidden, more, all) if all > 0 else hidden / len(found)),
                              ms * part_of(waited - exposed, 1e-6 * o.waited, waited))
            self.all.add(o.shares)
            when = rank.slice_at(o.issued)
            if when: o.phase = when.phase
            if o.first is None and when and not o.is_message: o.first = o.last = when.unit
        self.operations += found

    # ---- tables ----
    def table(self, way):
        """(name, shares) of a table's rows."""
        rows = {}
        for o in self.operations: rows.setdefault(name_by(way, o), Shares()).add(o.shares)
        return [(name, shares) for (name, _), shares in sorted(rows.items(), key=lambda x: (x[0][1], -x[1].total, x[0][0]))]

    def efficiency_text(self):
        return (f"compute / (compute + communication) = {100 * self.efficiency('communication'):.1f} %; "
                f"compute / (compute + exposed) = {100 * self.efficiency('exposed'):.1f} %")

    def print(self, callers):
        if not self.operations:
            print("\nno communication between ranks in the steps that count")
            return
        n, step = len(self.ranks), 1e3 * self.mean["step"]
        print(f"\ncommunication in ms of a step, means of {n} rank{'s' * (n > 1)} and steps {self.numbers[0]} to "
              f"{self.numbers[-1]}; a step takes {step:.3f}")
        if not self.has_notes: print("Without notes of its steps, as in a run of one step: a step lasts from its first slice to its last.")
        if any(len(r.steps) > len(self.numbers) for r in self.ranks):
            print("Later steps are not in the timelines of all ranks, and do not count.")
        for way in WAYS:
            rows = self.table(way)
            if (way == "communicator" and len(rows) == 1) or (way == "caller" and not callers): continue
            print(f"{f'by {way}':<28} {'total':>9} {'of a step':>10} {'exposed':>10} {'of a step':>10} {'waits for ranks':>15}")
            for name, shares in [*rows, ("all", self.all)]:
                print(f"  {name:<26} {shares.total:9.3f} {100 * shares.total / step:8.2f} % {shares.exposed:10.3f} "
                      f"{100 * shares.exposed / step:8.2f} % {shares.others:15.3f}")
        print(f"{self.efficiency_text()} (means of all ranks)")

    def record(self):
        """For JSON, in milliseconds of a step."""
        def of(shares): return {"total": shares.total, "exposed": shares.exposed, "waits_for_ranks": shares.others}
        found = {"ranks": len(self.ranks), "from": self.numbers[0], "to": self.numbers[-1], "step": 1e3 * self.mean["step"],
                 "computing": 1e3 * self.mean["compute"], "communication": of(self.all),
                 "efficiency_communication": self.efficiency("communication"), "efficiency_exposed": self.efficiency("exposed")}
        return found | {f"by_{way}": {name: of(shares) for name, shares in self.table(way)} for way in WAYS}
