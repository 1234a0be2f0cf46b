"""A trace's communication by kind, by unit, by communicator and by caller, in ms of a step: means of all ranks and of the steps
that the run's own diagnosis takes, with its arithmetic (llmc/run/diagnosis.h; a test compares both).

Each operation gets its share of what the diagnosis says of its kind on its communicator in a step: of exposed communication in
proportion to its wait, and of hidden communication in proportion to the time that it took beyond that. So each table adds up to the
diagnosis' own figures.
"""
import math
from array import array
from overlap_trace import MOST_STEPS, MOST_UNITS, Shares, Step

MOST_CHANNELS = 20  # of a rank (llmc/run/diagnosis.h)


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
        self.trace, self.operations, self.all = trace, [], Shares()
        if not trace.has_notes: self.make_steps()
        self.keep_common_steps()
        self.share_units()
        channels = [self.find_channels(r) for r in range(len(trace.ranks))]
        self.count_communication(channels)
        self.mean = self.means_of(channels)
        for rank, of_rank in zip(trace.ranks, channels):
            for c in of_rank.values():
                for s in range(len(self.numbers)): self.split_channel(rank, c, s)

    # ---- steps ----
    def make_steps(self):
        """An older program's steps: all but the first, or the last of them."""
        first = min(r.compute[0].step for r in self.trace.ranks if r.compute)
        for r in self.trace.ranks:
            for number, slices in r.by_step():
                last = r.compute[-1].step
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
            found.setdefault((o.kind, o.comm), Channel(len(self.numbers))).add(self.index[o.step], o)
        self.trace.require(len(found) <= MOST_CHANNELS,
                           f"has more than {MOST_CHANNELS} kinds of operations on communicators of rank {rank}")
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
        means = [0, 0, 0, 0]
        for r, of_rank in zip(self.trace.ranks, channels):
            sums = [0, 0, 0, 0]
            for s, step in enumerate(r.steps):
                rest = step.seconds - sum(c.exposed[s] for c in of_rank.values()) - step.data
                parts = [c.communication[s] for c in of_rank.values()]
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

    def split_channel(self, rank, channel, s):
        """Gives the operations of one channel in one step their shares, phases, and units if they do not say them."""
        (exposed, busy), waited, found = channel.communication[s], channel.exposed[s], channel.operations[s]
        of_each = [part_of(exposed, 1e-6 * o.waited, waited) for o in found]
        beyond = [max(0, 1e-6 * (o.end - o.begin) - x) for o, x in zip(found, of_each)]
        hidden, all, ms = max(busy - exposed, 0), sum(beyond), 1e3 / len(self.numbers) / len(self.trace.ranks)
        for o, x, more in zip(found, of_each, beyond):
            o.shares = Shares(ms * x, ms * (part_of(hidden, more, all) if all > 0 else hidden / len(found)),
                              ms * part_of(waited - exposed, 1e-6 * o.waited, waited))
            self.all.add(o.shares)
            when = rank.slice_at(o.issued)
            if when: o.phase = when.phase
            if o.first is None and when and not o.is_message and self.trace.has_callers: o.first = o.last = when.unit
        self.operations += found

    # ---- tables ----
    def table(self, way):
        """(name, shares) of a table's rows."""
        rows = {}
        for o in self.operations: rows.setdefault(name_by(way, o), Shares()).add(o.shares)
        return [(name, shares) for (name, _), shares in sorted(rows.items(), key=lambda x: (x[0][1], -x[1].total, x[0][0]))]

    def ways(self): return ["kind", "unit", "communicator"] + ["caller"] * self.trace.has_callers

    def efficiency_text(self):
        return (f"compute / (compute + communication) = {100 * self.efficiency('communication'):.1f} %; "
                f"compute / (compute + exposed) = {100 * self.efficiency('exposed'):.1f} %")

    def print(self, callers):
        if not self.operations:
            print("\nno communication between ranks in the steps that count")
            return
        n, step, has_callers = len(self.trace.ranks), 1e3 * self.mean["step"], self.trace.has_callers
        print(f"\ncommunication in ms of a step, means of {n} rank{'s' * (n > 1)} and steps {self.numbers[0]} to "
              f"{self.numbers[-1]}; a step takes {step:.3f}")
        if not self.trace.has_notes:
            print("Without notes of its steps, as in an older trace or a run of one step: exposed is the time of operations in "
                  "which nothing was computed.")
        if not has_callers: print("An older program wrote this trace: it has neither units nor callers.")
        if self.is_cut: print("Later steps are not in the timelines of all ranks, and do not count.")
        is_shown = {"unit": has_callers, "communicator": len(self.table("communicator")) > 1, "caller": callers}
        for way in self.ways():
            if not is_shown.get(way, True): continue
            print(f"{f'by {way}':<28} {'total':>9} {'of a step':>10} {'exposed':>10} {'of a step':>10} {'waits for ranks':>15}")
            for name, shares in [*self.table(way), ("all", self.all)]:
                print(f"  {name:<26} {shares.total:9.3f} {100 * shares.total / step:8.2f} % {shares.exposed:10.3f} "
                      f"{100 * shares.exposed / step:8.2f} % {shares.others:15.3f}")
        print(f"{self.efficiency_text()} (means of all ranks)")

    def record(self):
        """For JSON, in milliseconds of a step."""
        def of(shares): return {"total": shares.total, "exposed": shares.exposed, "waits_for_ranks": shares.others}
        found = {"ranks": len(self.trace.ranks), "from": self.numbers[0], "to": self.numbers[-1], "step": 1e3 * self.mean["step"],
                 "computing": 1e3 * self.mean["compute"], "communication": of(self.all),
                 "efficiency_communication": self.efficiency("communication"), "efficiency_exposed": self.efficiency("exposed")}
        return found | {f"by_{way}": {name: of(shares) for name, shares in self.table(way)} for way in self.ways()}
