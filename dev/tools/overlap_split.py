"""A trace's communication by kind, by unit, by communicator and by caller, and a step's time as a tree, in ms of a step: means of all ranks
and of the steps that the run's own diagnosis takes, with its arithmetic (llmc/run/diagnosis.h; a test compares both).

Each operation gets its share of what the diagnosis says of its kind on its communicator in a step: of exposed communication in
proportion to its wait, and of hidden communication in proportion to the time that it took beyond that. So each table adds up to the
diagnosis' own figures.

The tree goes from the step through phases, functions and kinds of operations to units. Its whole is computing + communication + waits
for other ranks, as if nothing were hidden. Communication is in the phase in which it was issued. Computing is as the timeline has it,
with the time in which a rank had no core.
"""
import math
from array import array
from collections import defaultdict
from timeline import MOST_UNITS, PHASES
from tool import Picture

MOST_STEPS = 128                                    # of which a rank makes notes (llmc/run/diagnosis.h)
WAYS = "kind", "unit", "communicator", "caller"
BAR = 40                                            # columns of the tree as text
LEFT, WIDTH, TOP, ROW, LETTER = 10, 880, 62, 22, 7  # pixels of its picture
COLOURS = (("#8ecae6", "computing"), ("#c1121f", "exposed communication"), ("#dddddd", "waiting for other ranks"),
           ("#7fb069", "hidden communication"))


class Frame:
    """A frame of the tree or a row of a table. Its parts are ms of a step: computing, exposed communication, waits for ranks that were
    late and for messages, and communication that computing hides."""

    def __init__(self, name, order=0):
        self.name, self.order, self.parts, self.children = name, order, [0.0] * 4, {}

    ms = property(lambda self: sum(self.parts))
    communication = property(lambda self: self.parts[1] + self.parts[3])
    depth = property(lambda self: max((1 + f.depth for f in self.children.values()), default=0))

    def add(self, parts, *way):
        """Adds the parts to this frame and along the way, of (name, order), to a leaf."""
        self.parts = [a + b for a, b in zip(self.parts, parts)]
        if way: self.children.setdefault(way[0], Frame(*way[0])).add(parts, *way[1:])

    def sorted(self, by="ms"): return sorted(self.children.values(), key=lambda f: (f.order, -getattr(f, by), f.name))


class Channel:
    """A rank's operations of one kind on one communicator in a step: how many seconds they were waited for, and took. The program keeps
    seconds in 32 bits."""

    def __init__(self): self.operations, self.seconds, self.counted = [], array("f", [0, 0]), (0, 0)

    def add(self, operation):
        self.operations.append(operation)
        took = array("f", [1e-6 * operation.waited, 1e-6 * (operation.end - operation.begin)])
        for i in 0, 1: self.seconds[i] += took[i]


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
    if way == "caller": return f"{o.phase} > {o.caller or 'not known'}", PHASES.index(o.phase)
    if o.first is not None: return unit_name(o.first, o.last), o.first * MOST_UNITS + o.last
    return "messages" if o.is_message else "no unit", 2 * MOST_UNITS**2 + o.is_message


class Split:
    def __init__(self, trace):
        self.trace, self.ranks, self.operations = trace, trace.ranks, []  # operations: (operation, parts)
        self.has_notes = any(r.steps for r in self.ranks)
        if not self.has_notes: self.make_steps()
        self.numbers = [number for number in self.ranks[0].steps if all(number in r.steps for r in self.ranks)]
        trace.require(self.numbers, "has no step that all ranks have, except the first, which never counts")
        self.index = {number: s for s, number in enumerate(self.numbers)}
        self.per_step = 1 / len(self.numbers) / len(self.ranks)  # makes sums means
        self.share_units()
        self.mean = dict.fromkeys(("step", "compute", "exposed", "communication"), 0)  # seconds of a step
        channels = self.find_channels()
        for r, rank in enumerate(self.ranks):
            for s, number in enumerate(self.numbers):
                own = [of_ranks[r][s] for of_ranks in channels if r in of_ranks]
                self.count_step(*rank.steps[number], own)
                for channel in own:
                    if channel.operations: self.split_channel(rank, channel)
        trace.require(self.mean["step"] > 0, "has no time in the steps that count")

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
    def find_channels(self):
        """[{rank: its channel in each step}] of each kind on each communicator. Of a collective what counts in a step is the rank that
        waited least. A receive is the same message as another's send."""
        found = defaultdict(lambda: defaultdict(lambda: [Channel() for _ in self.numbers]))
        for r, rank in enumerate(self.ranks):
            for o in rank.operations:
                if not o.outside and o.ranks > 1 and o.step in self.index: found[o.kind, o.comm][r][self.index[o.step]].add(o)
        for (kind, _), of_ranks in found.items():
            for alike in zip(*of_ranks.values()) if kind != "receive" else ():
                least = [*map(min, zip(*(c.seconds for c in alike)))]
                for c in alike: c.counted = c.seconds if kind == "send" else least
        return [*found.values()]

    def count_step(self, seconds, data, running, channels):
        rest = seconds - sum(c.seconds[0] for c in channels) - data
        of_step = {"step": seconds, "compute": rest if running < 0 else min(rest, running),
                   "exposed": sum(c.counted[0] for c in channels), "communication": sum(max(c.counted) for c in channels)}
        for name, x in of_step.items(): self.mean[name] += x * self.per_step

    def efficiency(self, what):
        """The course's figure, of all communication, or the one of what nothing hides. Both leave out what is no communication."""
        whole = self.mean["compute"] + self.mean[what]
        return self.mean["compute"] / whole if whole else math.nan

    def split_channel(self, rank, channel):
        """Gives the operations of a channel their parts, phases, and units if they do not say them."""
        (exposed, busy), waited, found = channel.counted, channel.seconds[0], channel.operations
        of_each = [part_of(exposed, 1e-6 * o.waited, waited) for o in found]
        beyond = [max(0, 1e-6 * (o.end - o.begin) - x) for o, x in zip(found, of_each)]
        hidden, all, ms = max(busy - exposed, 0), sum(beyond), 1e3 * self.per_step
        for o, x, more in zip(found, of_each, beyond):
            self.operations.append((o, (0, ms * x, ms * part_of(waited - exposed, 1e-6 * o.waited, waited),
                                        ms * (part_of(hidden, more, all) if all > 0 else hidden / len(found)))))
            when = rank.slice_at(o.issued)
            if when: o.phase = when.phase
            if o.first is None and when and not o.is_message: o.first = o.last = when.unit

    # ---- tables ----
    def table(self, way):
        """A frame with a table's rows."""
        root = Frame("all")
        for o, parts in self.operations: root.add(parts, name_by(way, o))
        return root

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
            table = self.table(way)
            if (way == "communicator" and len(table.children) == 1) or (way == "caller" and not callers): continue
            print(f"{f'by {way}':<34} {'total':>9} {'of a step':>10} {'exposed':>10} {'of a step':>10} {'waits for ranks':>15}")
            for row in [*table.sorted("communication"), table]:
                total, (_, exposed, others, _) = row.communication, row.parts
                print(f"  {row.name:<32} {total:9.3f} {100 * total / step:8.2f} % {exposed:10.3f} {100 * exposed / step:8.2f} % "
                      f"{others:15.3f}")
        print(f"{self.efficiency_text()} (means of all ranks)")

    def record(self):
        """For JSON, in milliseconds of a step."""
        def of(row): return {"total": row.communication, "exposed": row.parts[1], "waits_for_ranks": row.parts[2]}
        found = {"ranks": len(self.ranks), "from": self.numbers[0], "to": self.numbers[-1], "step": 1e3 * self.mean["step"],
                 "computing": 1e3 * self.mean["compute"], "communication": of(self.table("kind")),
                 "efficiency_communication": self.efficiency("communication"), "efficiency_exposed": self.efficiency("exposed")}
        return found | {f"by_{way}": {row.name: of(row) for row in self.table(way).sorted("communication")} for way in WAYS}

    # ---- the tree ----
    def tree(self):
        root = Frame("step")
        for r in self.ranks:
            for s in r.compute:
                if s.letter == "." or s.phase is None or s.step not in self.index: continue
                unit = [] if s.unit is None else [(unit_name(s.unit, s.unit), s.unit)]
                root.add((1e-3 * (s.end - s.begin) * self.per_step, 0, 0, 0), (s.phase, PHASES.index(s.phase)), ("computing", -1), *unit)
        for o, parts in self.operations:
            caller = o.caller or "function not known"
            root.add(parts, (o.phase, PHASES.index(o.phase)), (caller, 0), name_by("kind", o), name_by("unit", o))
        self.trace.require(root.ms > 0, "has no time in the steps that count")
        return root

    def print_tree(self):
        root = self.tree()
        print("\nms of a step, as if nothing were hidden: = computing, # exposed, . waiting for other ranks, + hidden communication")
        print(f"{'step > phase > function > ...':<30} {'ms':>9} {'':>8} {'exposed':>9} {'hidden':>9} {'waiting':>9}")
        print_frame(root, root.ms, 0)

    def draw_tree(self, path):
        root = self.tree()
        picture = Picture(2 * LEFT + WIDTH, TOP + (1 + root.depth) * ROW + 8)
        picture.add("<title>Where the time of a step goes, by phase, function, kind of operation and unit</title>")
        picture.add(f'<text x="{LEFT}" y="18" font-size="14">A step of {1e3 * self.mean["step"]:.2f} ms, mean of {len(self.ranks)} '
                    f"ranks; {root.ms:.2f} ms if nothing were hidden: by phase, function, kind and unit</text>")
        picture.legend(LEFT, 28, COLOURS)
        picture.add(f'<text x="{LEFT}" y="55">{self.efficiency_text()}</text>')
        draw_frame(picture, root, "step", LEFT, WIDTH / root.ms, root.ms, 0)
        picture.write("--flame-svg", path)


def print_frame(f, whole, depth):
    computing, exposed, others, hidden = f.parts
    columns = [(c + 0.5) * whole / BAR for c in range(int(BAR * f.ms / whole + 0.5))]
    bar = "".join("=" if at < computing else "#" if at < computing + exposed else "." if at < computing + exposed + others else "+"
                  for at in columns)
    print(f"{' ' * 2 * depth}{f.name:<{30 - 2 * depth}} {f.ms:9.3f} {100 * f.ms / whole:6.1f} % {exposed:9.3f} "
          f"{hidden:9.3f} {others:9.3f}  {bar}")
    for child in f.sorted(): print_frame(child, whole, depth + 1)


def draw_frame(picture, f, way, x, per_ms, whole, row):
    """way: "step > forward", which the text that a browser shows at the frame begins with."""
    y, at, room = TOP + row * ROW, x, int((f.ms * per_ms - 6) / LETTER)
    words = ", ".join(f"{word} {ms:.3f}" for word, ms in zip(("computing", "exposed", "waiting", "hidden"), f.parts))
    picture.add(f"<g><title>{way}: {f.ms:.3f} ms, {100 * f.ms / whole:.1f} %; {words}</title>")
    for (colour, _), ms in zip(COLOURS, f.parts):
        if ms * per_ms >= 0.01: picture.box(at, y, ms * per_ms, ROW - 1, colour)
        at += ms * per_ms
    picture.box(x, y, f.ms * per_ms, ROW - 1, "none", ' stroke="white"')
    name = f.name.removeprefix("block ") if len(f.name) > room else f.name  # its number says more than its first letters
    if room >= 5 or len(name) <= room:  # as much of it as there is room for
        picture.add(f'<text x="{x + 4:.2f}" y="{y + 15}" stroke="white" stroke-width="2" paint-order="stroke">'
                    f"{name[:max(room, 0)]}</text>")
    picture.add("</g>")
    for child in f.sorted():
        draw_frame(picture, child, f"{way} &gt; {child.name}", x, per_ms, whole, row + 1)
        x += child.ms * per_ms
