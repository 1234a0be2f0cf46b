"""A trace's communication by kind, by unit, by communicator and by caller, in ms of a step: means of all ranks and of the steps
that the run's own diagnosis takes, with its arithmetic (llmc/run/diagnosis.h; a test compares both).

Each operation gets its share of what the diagnosis says of its kind on its communicator in a step: of exposed communication in
proportion to its wait, and of hidden communication in proportion to the time that it took beyond that. So each table adds up to the
diagnosis' own figures.
"""
import math
from array import array
from itertools import groupby
from overlap_trace import MOST_STEPS, MOST_UNITS, Shares, Step

MOST_CHANNELS = 20  # of a rank (llmc/run/diagnosis.h)


class Channel:
    """A rank's operations of one kind on one communicator: how many seconds of each step they were waited for, and took. The
    program keeps seconds in 32 bits."""

    def __init__(self, kind, comm, steps):
        self.kind, self.comm, self.operations = kind, comm, [[] for _ in range(steps)]
        self.exposed, self.busy = array("f", [0] * steps), array("f", [0] * steps)

    def add(self, s, operation):
        waited, busy = array("f", [1e-6 * operation.waited, 1e-6 * (operation.end - operation.begin)])
        self.operations[s].append(operation)
        self.exposed[s] += waited
        self.busy[s] += busy

    def communication(self, s, least):
        """How long step s waited for communication, and how long that took; a receive is the same message as another's send. least:
        of the rank of the communicator that waited least."""
        if self.kind == "receive": return 0, 0
        return (self.exposed[s], self.busy[s]) if self.kind == "send" else least[s]


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
        self.trace, self.operations, self.all = trace, [], Shares()
        if not trace.has_notes: self.make_steps()
        self.keep_common_steps()
        self.share_units()
        channels = [self.find_channels(r) for r in range(len(trace.ranks))]
        least = self.least_of(channels)
        self.mean = self.means_of(channels, least)
        for rank, of_rank in zip(trace.ranks, channels):
            for c in of_rank:
                for s in range(len(self.numbers)): self.split_channel(rank, c, s, least[c.kind, c.comm])

    # ---- steps ----
    def make_steps(self):
        """An older program's steps: all but the first, or the last of them."""
        first = min(r.compute[0].step for r in self.trace.ranks if r.compute)
        for r in self.trace.ranks:
            for number, slices in groupby(r.compute, lambda s: s.step):
                slices, last = list(slices), r.compute[-1].step
                if (number != first or first == last) and number > last - MOST_STEPS:
                    r.steps.append(Step(number, 1e-6 * (slices[-1].end - slices[0].begin)))

    def keep_common_steps(self):
        """A timeline that became full on one rank ends there earlier."""
        ranks = self.trace.ranks
        n = min(len(r.steps) for r in ranks)
        self.is_cut = any(len(r.steps) != n for r in ranks)
        self.trace.require(n > 0, "has no step that all ranks have, except the first, which never counts")
        self.numbers = [step.number for step in ranks[0].steps[:n]]
        self.index = {number: s for s, number in reversed([*enumerate(self.numbers)])}
        for i, r in enumerate(ranks):
            r.steps = r.steps[:n]
            self.trace.require([step.number for step in r.steps] == self.numbers, f"has other steps of rank {i} than of rank 0")

    def share_units(self):
        """Units of the same collective, as far as any rank knows them: ranks of ddp that load no weights do not."""
        known = {}
        of_several = [o for r in self.trace.ranks for o in r.operations if o.ranks > 1]
        for o in of_several:
            if o.first is None: continue
            first, last = known.get((o.comm, o.number), (o.first, o.last))
            known[o.comm, o.number] = min(first, o.first), max(last, o.last)
        for o in of_several: o.first, o.last = known.get((o.comm, o.number), (o.first, o.last))

    # ---- the diagnosis ----
    def find_channels(self, rank):
        r, found = self.trace.ranks[rank], {}
        for o in r.operations:
            if o.waited < 0: o.waited = o.end - o.begin - r.computed_within(o.begin, o.end)
            if o.outside or o.ranks < 2 or o.step not in self.index: continue
            channel = found.setdefault((o.kind, o.comm), Channel(o.kind, o.comm, len(self.numbers)))
            self.trace.require(len(found) <= MOST_CHANNELS,
                               f"has more than {MOST_CHANNELS} kinds of operations on communicators of rank {rank}")
            channel.add(self.index[o.step], o)
        return list(found.values())

    def least_of(self, channels):
        """Of the operations of one kind on one communicator the least waits and times of all ranks, in each step."""
        alike = {}
        for c in sum(channels, []): alike.setdefault((c.kind, c.comm), []).append(c)
        return {key: [(min(c.exposed[s] for c in cs), min(c.busy[s] for c in cs)) for s in range(len(self.numbers))]
                for key, cs in alike.items()}

    def means_of(self, channels, least):
        """Seconds of a step, means of all ranks: the step, computing, exposed communication, and all communication."""
        means = [0, 0, 0, 0]
        for r, of_rank in zip(self.trace.ranks, channels):
            sums = [0, 0, 0, 0]
            for s, step in enumerate(r.steps):
                rest = step.seconds - sum(c.exposed[s] for c in of_rank) - step.data
                parts = [c.communication(s, least[c.kind, c.comm]) for c in of_rank]
                of_step = (step.seconds, rest if step.running < 0 else min(rest, step.running),
                           sum(exposed for exposed, _ in parts), sum(max(part) for part in parts))
                sums = [x + y for x, y in zip(sums, of_step)]
            means = [x + y / len(self.numbers) / len(self.trace.ranks) for x, y in zip(means, sums)]
        self.trace.require(means[0] > 0, "has no time in the steps that count")
        return dict(zip(("step", "compute", "exposed", "communication"), means))

    def efficiency(self, what):
        """The course's figure, of all communication, or the one of what nothing hides. Both leave out what is no communication."""
        whole = self.mean["compute"] + self.mean[what]
        return self.mean["compute"] / whole if whole else math.nan

    def split_channel(self, rank, channel, s, least):
        """Gives the operations of one channel in one step their shares, phases, and units if they do not say them."""
        exposed, busy = channel.communication(s, least)
        waited, found = channel.exposed[s], channel.operations[s]
        for o in found:
            o.shares = Shares(part_of(exposed, 1e-6 * o.waited, waited), 0, part_of(waited - exposed, 1e-6 * o.waited, waited))
            o.shares.hidden = max(0, 1e-6 * (o.end - o.begin) - o.shares.exposed)  # a weight, for now
            when = rank.slice_at(o.issued)
            o.phase = when.phase if when else "other"
            if o.first is None and when and not o.is_message and self.trace.has_callers: o.first = o.last = when.unit
        hidden, beyond = max(busy - exposed, 0), sum(o.shares.hidden for o in found)
        for o in found:
            weighed, o.shares = o.shares, Shares()
            weighed.hidden = part_of(hidden, weighed.hidden, beyond) if beyond > 0 else hidden / len(found)
            o.shares.add(weighed, 1e3 / len(self.numbers) / len(self.trace.ranks))
            self.all.add(o.shares)
        self.operations += found

    # ---- tables ----
    def table(self, way):
        """(name, shares) of a table's rows."""
        rows = {}
        for o in self.operations: rows.setdefault(name_by(way, o), Shares()).add(o.shares)
        return [(name, shares) for (name, _), shares in sorted(rows.items(), key=lambda x: (x[0][1], -x[1].total, x[0][0]))]

    def print_table(self, way):
        step = 1e3 * self.mean["step"]
        print(f"{f'by {way}':<28} {'total':>9} {'of a step':>10} {'exposed':>10} {'of a step':>10} {'waits for ranks':>15}")
        for name, shares in [*self.table(way), ("all", self.all)]:
            print(f"  {name:<26} {shares.total:9.3f} {100 * shares.total / step:8.2f} % {shares.exposed:10.3f} "
                  f"{100 * shares.exposed / step:8.2f} % {shares.others:15.3f}")

    def ways(self): return ["kind", "unit", "communicator"] + ["caller"] * self.trace.has_callers

    def efficiency_text(self):
        return (f"compute / (compute + communication) = {100 * self.efficiency('communication'):.1f} %; "
                f"compute / (compute + exposed) = {100 * self.efficiency('exposed'):.1f} %")

    def print(self, callers):
        if not self.operations:
            print("\nno communication between ranks in the steps that count")
            return
        n = len(self.trace.ranks)
        print(f"\ncommunication in ms of a step, means of {n} rank{'s' * (n > 1)} and steps {self.numbers[0]} to "
              f"{self.numbers[-1]}; a step takes {1e3 * self.mean['step']:.3f}")
        if not self.trace.has_notes:
            print("Without notes of its steps, as in an older trace or a run of one step: exposed is the time of operations in "
                  "which nothing was computed.")
        if not self.trace.has_callers: print("An older program wrote this trace: it has neither units nor callers.")
        if self.is_cut: print("Later steps are not in the timelines of all ranks, and do not count.")
        left_out = {"caller"} if not callers else set()
        if not self.trace.has_callers: left_out.add("unit")
        if len(self.table("communicator")) < 2: left_out.add("communicator")
        for way in self.ways():
            if way not in left_out: self.print_table(way)
        print(f"{self.efficiency_text()} (means of all ranks)")

    def record(self):
        """For JSON, in milliseconds of a step."""
        def of(shares): return {"total": shares.total, "exposed": shares.exposed, "waits_for_ranks": shares.others}
        found = {"ranks": len(self.trace.ranks), "from": self.numbers[0], "to": self.numbers[-1], "step": 1e3 * self.mean["step"],
                 "computing": 1e3 * self.mean["compute"], "communication": of(self.all),
                 "efficiency_communication": self.efficiency("communication"), "efficiency_exposed": self.efficiency("exposed")}
        return found | {f"by_{way}": {name: of(shares) for name, shares in self.table(way)} for way in self.ways()}
