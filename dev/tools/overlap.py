#!/usr/bin/env python3
"""overlap - reads a timeline (--trace FILE) and shows in the terminal how much communication was hidden behind compute.

    build/overlap trace.json [--step N] [--columns 100] [--svg FILE] [--callers] [--flame] [--flame-svg FILE]

The first table has a line per rank with mean milliseconds per step, without the first step, as the picture below it draws them:
compute; communication; exposed communication, during which the rank computed nothing; and how long before the end of the backward
pass communication began (negative: after it). Compute includes time in which the rank had no core, and exposed communication
includes waits for late ranks. The picture shows one step, and --svg draws it for a browser or a page.

All other numbers are means over all ranks and over the steps that the run's own diagnosis uses, computed in the same way
(llmc/run/diagnosis.h; a test compares both):

- communication by kind, unit, communicator and caller: in total, exposed, and in waits for late ranks
- the two efficiencies that the run's log and build/advise print
- the tree of --flame: computing + communication + waits for other ranks, as if nothing were hidden

The diagnosis reports exposed and hidden communication per step for each kind of operation on each communicator. This tool divides
both among the operations: exposed time in proportion to how long each was waited for, and hidden time in proportion to the rest of
its duration. Each table therefore adds up to the figures of the diagnosis. Communication belongs to the phase in which it was
issued. Computing includes time in which a rank had no core.
"""
import math
from array import array
from collections import Counter, defaultdict
from itertools import accumulate
from timeline import MOST_BLOCKS, PHASES, Trace
from tool import Picture, TimePicture, die, parse_options, print_table, real, switch, text, whole

OPTIONS = [
    whole("step", 0, 0, 1e9, "the step to draw; 0: the shortest"),
    whole("columns", 100, 10, 1000, "width of the picture, in characters"),
    text("svg", "", "FILE", "also draw the step into this file"),
    real("svg-ms", 0, 0, 1e9, "milliseconds that the width of --svg's picture shows; 0: the step"),
    switch("callers", "also split communication by the part of a step and the function that issued it"),
    switch("flame", "also print where a step's time goes: by phase, function, kind of operation and unit"),
    text("flame-svg", "", "FILE", "draw the same into this file"),
]


# ---- the table ----
def rank_totals(rank, first_step):
    """A rank's totals over the steps from first_step on, in microseconds: compute, communication, its exposed part, and the time
    from the first operation that begins in a step to the end of the backward pass."""
    compute = sum(s.end - s.begin for s in rank.compute if s.step >= first_step and s.letter != ".")
    communication, exposed, done, ahead, backward_end = 0, 0, -math.inf, 0, 0
    for s in rank.communication:
        begin = max(s.begin, done)  # messages may overlap: time up to `done` is already counted
        if s.step < first_step or s.end <= begin: continue
        communication += s.end - begin
        exposed += s.end - begin - rank.computed_within(begin, s.end)
        done = s.end
    for step, slices in rank.by_step():
        # the last of these slices is the embedding's, before the wait
        backward_end = next((s.end for s in reversed(slices) if s.letter in "beh"), backward_end)
        first = next((o for o in rank.communication if o.begin >= slices[0].begin), None)
        if step >= first_step and first and first.step == step: ahead += backward_end - first.begin
    return compute, communication, exposed, ahead


def print_totals(ranks, first_step):
    def words(rank):
        steps = len({s.step for s in rank.compute if s.step >= first_step})
        compute, communication, exposed, ahead = (1e-3 * x / steps if steps else 0 for x in rank_totals(rank, first_step))
        return [f"{x:.2f}" for x in (compute, communication, exposed, ahead)]
    print_table(["ms a step, as drawn", "compute", "communication", "exposed or waiting", "begins before the end of backward"],
                *([f"rank {i}", *words(rank)] for i, rank in enumerate(ranks)))


# ---- a step ----
def choose_step(ranks, step):
    """The step to draw, with its begin and end in microseconds: the one asked for, or the shortest, which other programs disturbed
    least. It lasts from the first slice of compute on any rank to the last one. Messages sent in that time may end in the next
    step. Dies if the trace does not contain the step."""
    spans = defaultdict(list)
    for rank in ranks:
        for number, slices in rank.by_step(): spans[number] += slices[0].begin, slices[-1].end
    took = {number: max(x) - min(x) for number, x in sorted(spans.items())}
    if step == 0:
        of_first = {s.step for s in ranks[0].compute}
        step = min((x for x in took if x in of_first and took[x] > 0), key=took.get, default=ranks[0].compute[0].step)
    if took.get(step, 0) <= 0: die(f"--step {step}: the trace has no such step")
    return step, min(spans[step]), max(spans[step])


def print_step(ranks, step, begin, end, columns):
    orthogonalises = ", n Newton-Schulz" * any(s.letter == "n" for rank in ranks for s in rank.compute)
    print(f"\nstep {step}, {1e-3 * (end - begin):.2f} ms: e embedding, f forward, h head, b backward, . waiting, u update"
          f"{orthogonalises}; # communication")
    per_column = (end - begin) / columns
    for i, rank in enumerate(ranks):
        for title, track in ((f"rank {i:<3}", rank.compute), ("        ", rank.communication)):
            row = [" "] * columns
            for s in track:
                if s.end <= begin or s.begin >= begin + per_column * columns: continue
                first, last = int(max(s.begin - begin, 0) / per_column), math.ceil((s.end - begin) / per_column)
                for c in range(first, min(columns, max(last, first + 1))): row[c] = s.letter  # even a short slice gets a column
            print(f"{title} |{''.join(row)}|")


# ---- the same as a picture for a page ----
COLOURS = {"e": ("#8ecae6", "embedding"), "f": ("#3a86b7", "forward"), "h": ("#1d3557", "head"), "b": ("#f4a259", "backward"),
           ".": ("#eeeeee", "waiting"), "u": ("#8d99ae", "update"), "n": ("#9d4edd", "Newton-Schulz"),
           "+": ("#7fb069", "communication hidden"), "#": ("#c1121f", "exposed")}


def write_svg(path, ranks, begin, end, span_ms):
    """span_ms: the time that the width of the picture stands for, so that pictures can be compared; 0: the duration of the step."""
    used = {s.letter for rank in ranks for s in rank.compute} | COLOURS.keys() - {"n"}  # only Muon needs "n"
    legend = [named for letter, named in COLOURS.items() if letter in used]
    picture = TimePicture(legend, len(ranks), 2, 18, 10, span_ms or 1e-3 * (end - begin))

    def draw(rank, row, first, last, letter):
        picture.slice(rank, row, 1e-3 * (first - begin), 1e-3 * (min(last, end) - begin), COLOURS.get(letter, COLOURS["#"])[0])

    for i, rank in enumerate(ranks):
        for s in rank.compute: draw(i, 0, s.begin, s.end, s.letter)
        for s in rank.communication:  # all of it as exposed, then the parts that overlap with compute as hidden
            draw(i, 1, s.begin, s.end, "#")
            for c in rank.compute:
                if c.letter != ".": draw(i, 1, max(s.begin, c.begin), min(s.end, c.end), "+")
    picture.write("--svg", path)
    print(f"\npicture: {path}")


# ---- communication by kind, unit, communicator and caller, and the time of a step as a tree ----
MOST_STEPS = 128                                    # steps that a rank records (llmc/run/diagnosis.h)
WAYS = "kind", "unit", "communicator", "caller"
BAR = 40                                            # columns of the tree as text
LEFT, WIDTH, TOP, ROW, LETTER = 10, 880, 62, 22, 7  # pixels of the tree as a picture
PARTS = (("#8ecae6", "computing"), ("#c1121f", "exposed communication"), ("#dddddd", "waiting for other ranks"),
           ("#7fb069", "hidden communication"))


class Frame:
    """A frame of the tree or a row of a table. Its parts are milliseconds per step: computing, exposed communication, waits for
    late ranks and for messages, and communication that overlaps with computing."""

    def __init__(self, name, order=0):
        self.name, self.order, self.parts, self.children = name, order, [0.0] * 4, {}

    ms = property(lambda self: sum(self.parts))
    communication = property(lambda self: self.parts[1] + self.parts[3])
    depth = property(lambda self: max((1 + f.depth for f in self.children.values()), default=0))

    def add(self, parts, *way):
        """Adds the parts to this frame and to every frame on the way from here to a leaf. way: the (name, order) of each."""
        self.parts = [a + b for a, b in zip(self.parts, parts)]
        if way: self.children.setdefault(way[0], Frame(*way[0])).add(parts, *way[1:])

    def sorted(self, by="ms"): return sorted(self.children.values(), key=lambda f: (f.order, -getattr(f, by), f.name))


def seconds_of(operations):
    """The seconds for which these operations were waited for, and their durations, each added up in fp32 as the program does."""
    sums = array("f", [0, 0])
    for o in operations:
        for i, x in enumerate(array("f", [1e-6 * o.waited, 1e-6 * (o.end - o.begin)])): sums[i] += x
    return sums


def part_of(whole, part, all): return whole * part / all if all > 0 else 0


def unit_name(first, last):
    """ "block 3", as the timeline counts them from 0 """
    if first is None: return "no unit"
    if last == 0: return "root"
    if first == last: return f"block {first - 1}"
    return f"root to block {last - 1}" if first == 0 else f"blocks {first - 1} to {last - 1}"


def name_by(way, o):
    """The row of a table to which an operation belongs: its name, and a number by which rows are sorted."""
    if way == "kind": return o.kind, 0
    if way == "communicator": return o.comm.split(".")[0], 0  # all groups of a split
    if way == "caller": return f"{o.phase} > {o.caller or 'not known'}", PHASES.index(o.phase)
    if o.first is not None: return unit_name(o.first, o.last), o.first * (MOST_BLOCKS + 1) + o.last
    return "messages" if o.is_message else "no unit", 2 * (MOST_BLOCKS + 1)**2 + o.is_message


class Split:
    def __init__(self, trace):
        self.trace, self.ranks, self.operations = trace, trace.ranks, []  # operations: (operation, parts)
        self.has_notes = any(r.steps for r in self.ranks)
        if not self.has_notes: self.make_steps()
        self.numbers = [number for number in self.ranks[0].steps if all(number in r.steps for r in self.ranks)]
        trace.require(self.numbers, "has no step that all ranks have, except the first, which never counts")
        self.per_step = 1 / len(self.numbers) / len(self.ranks)  # makes sums means
        self.share_units()
        self.mean = Counter()  # seconds of a step
        self.split_steps()
        trace.require(self.mean["step"] > 0, "has no time in the steps that count")

    def make_steps(self):
        """For a trace without notes: a step lasts from its first slice of compute to its last. The first step counts only if there
        is no other."""
        first = min(r.compute[0].step for r in self.ranks if r.compute)
        for r in self.ranks:
            for number, slices in r.by_step():
                last = r.compute[-1].step
                if (number != first or first == last) and number > last - MOST_STEPS:
                    r.steps[number] = array("f", [1e-6 * (slices[-1].end - slices[0].begin), 0, -1])

    def share_units(self):
        """Gives each collective all units that any rank noted for it. Ranks of ddp that load no weights note none."""
        known = {}
        of_several = [o for r in self.ranks for o in r.operations if o.ranks > 1]
        for o in of_several:
            if o.first is None: continue
            first, last = known.get((o.comm, o.number), (o.first, o.last))
            known[o.comm, o.number] = min(first, o.first), max(last, o.last)
        for o in of_several: o.first, o.last = known.get((o.comm, o.number), (o.first, o.last))

    # ---- the diagnosis ----
    def split_steps(self):
        """Groups the operations of each rank in a step by kind and communicator. For collectives, and for receives in a ring, the
        rank that waited least counts. The duration of a receive does not count, because a send on another rank is the same message.
        In a pipeline its wait does not count either, because it is a wait for another stage."""
        found, waits = defaultdict(lambda: defaultdict(lambda: defaultdict(list))), Counter()
        for r, rank in enumerate(self.ranks):
            for o in rank.operations:
                if not o.outside and o.ranks > 1 and o.step in self.numbers: found[o.kind, o.comm][r][o.step].append(o)
        for (kind, comm), of_ranks in found.items():
            for step in self.numbers:
                seconds = {r: seconds_of(of_steps[step]) for r, of_steps in of_ranks.items()}
                least = [*map(min, zip(*seconds.values()))]
                for r, own in seconds.items():
                    ring = comm.startswith("cp")
                    counted = own if kind == "send" else (ring * least[0], 0) if kind == "receive" else least
                    waits[r, step] += own[0]
                    self.add_mean(exposed=counted[0], communication=max(counted))
                    self.split_channel(self.ranks[r], of_ranks[r][step], own[0], *counted)
        for r, rank in enumerate(self.ranks):
            for step in self.numbers:
                seconds, data, running = rank.steps[step]
                rest = seconds - waits[r, step] - data
                self.add_mean(step=seconds, compute=rest if running < 0 else min(rest, running))

    def add_mean(self, **seconds):
        for name, x in seconds.items(): self.mean[name] += x * self.per_step

    def efficiency(self, what):
        """compute / (compute + what), where what is "communication", or "exposed" for its exposed part. Other time does not count.
        NaN if there is neither."""
        whole = self.mean["compute"] + self.mean[what]
        return self.mean["compute"] / whole if whole else math.nan

    def split_channel(self, rank, found, waited, exposed, busy):
        """Gives a rank's operations of one kind, on one communicator and in one step, their parts, phases, and missing units.
        waited, exposed, busy: seconds of all of them."""
        of_each = [part_of(exposed, 1e-6 * o.waited, waited) for o in found]
        beyond = [max(0, 1e-6 * (o.end - o.begin) - x) for o, x in zip(found, of_each)]
        hidden, all, ms = max(busy - exposed, 0), sum(beyond), 1e3 * self.per_step
        for o, x, more in zip(found, of_each, beyond):
            self.operations.append((o, (0, ms * x, ms * part_of(waited - exposed, 1e-6 * o.waited, waited),
                                        ms * (part_of(hidden, more, all) if all > 0 else hidden / len(found)))))
            when = rank.slice_at(o.issued)
            if when: o.phase = when.phase
            if o.first is None and when and not o.is_message: o.first = o.last = when.block

    # ---- tables ----
    def table(self, way):
        """A frame whose children are the rows of a table."""
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
        if not self.has_notes:
            print("Without notes of its steps, as in a run of one step: a step lasts from its first slice to its last.")
        if any(len(r.steps) > len(self.numbers) for r in self.ranks):
            print("Later steps are not in the timelines of all ranks, and do not count.")
        for way in WAYS:
            table = self.table(way)
            if (way == "communicator" and len(table.children) == 1) or (way == "caller" and not callers): continue
            print_table([f"by {way}", "total", "of a step", "exposed", "of a step", "waits for ranks"], *(
                [f"  {row.name}", f"{row.communication:.3f}", f"{100 * row.communication / step:.2f} %", f"{row.parts[1]:.3f}",
                 f"{100 * row.parts[1] / step:.2f} %", f"{row.parts[2]:.3f}"] for row in [*table.sorted("communication"), table]))
        print(f"{self.efficiency_text()} (means of all ranks)")

    # ---- the tree ----
    def tree(self):
        root = Frame("step")
        for r in self.ranks:
            for s in r.compute:
                if s.letter == "." or s.phase is None or s.step not in self.numbers: continue
                unit = [] if s.block is None else [(unit_name(s.block, s.block), s.block)]
                root.add((1e-3 * (s.end - s.begin) * self.per_step, 0, 0, 0), (s.phase, PHASES.index(s.phase)), ("computing", -1),
                         *unit)
        for o, parts in self.operations:
            caller = o.caller or "function not known"
            root.add(parts, (o.phase, PHASES.index(o.phase)), (caller, 0), name_by("kind", o), name_by("unit", o))
        self.trace.require(root.ms > 0, "has no time in the steps that count")
        return root

    def print_tree(self):
        root = self.tree()
        print("\nms of a step, as if nothing were hidden: = computing, # exposed, . waiting for other ranks, + hidden communication")
        print_table(["step > phase > function > ...", "ms", "", "exposed", "hidden", "waiting", ""], *frame_rows(root, root.ms, 0))

    def draw_tree(self, path):
        root = self.tree()
        picture = Picture(2 * LEFT + WIDTH, TOP + (1 + root.depth) * ROW + 8)
        picture.add("title", "Where the time of a step goes, by phase, function, kind of operation and unit")
        picture.text(LEFT, 18, f"A step of {1e3 * self.mean['step']:.2f} ms, mean of {len(self.ranks)} ranks; {root.ms:.2f} ms if "
                     "nothing were hidden: by phase, function, kind and unit", font_size=14)
        picture.legend(LEFT, 28, PARTS)
        picture.text(LEFT, 55, self.efficiency_text())
        draw_frame(picture, root, "step", LEFT, WIDTH / root.ms, root.ms, 0)
        picture.write("--flame-svg", path)
        print(f"\npicture: {path}")


def frame_rows(f, whole, depth):
    ends = [int(BAR * ms / whole + 0.5) for ms in accumulate(f.parts)]
    bar = "".join(sign * (end - begin) for sign, begin, end in zip("=#.+", [0, *ends], ends))
    _, exposed, others, hidden = (f"{ms:.3f}" for ms in f.parts)
    yield [f"{' ' * 2 * depth}{f.name}", f"{f.ms:.3f}", f"{100 * f.ms / whole:.1f} %", exposed, hidden, others, bar]
    for child in f.sorted(): yield from frame_rows(child, whole, depth + 1)


def draw_frame(picture, f, way, x, per_ms, whole, row):
    """way: the first words of the tooltip, "step > forward"."""
    y, at, room = TOP + row * ROW, x, int((f.ms * per_ms - 6) / LETTER)
    words = ", ".join(f"{word} {ms:.3f}" for word, ms in zip(("computing", "exposed", "waiting", "hidden"), f.parts))
    picture.parts.append("<g>")
    picture.add("title", f"{way}: {f.ms:.3f} ms, {100 * f.ms / whole:.1f} %; {words}")
    for (colour, _), ms in zip(PARTS, f.parts):
        if ms * per_ms >= 0.01: picture.rect(at, y, ms * per_ms, ROW - 1, colour)
        at += ms * per_ms
    picture.rect(x, y, f.ms * per_ms, ROW - 1, "none", stroke="white")
    name = f.name.removeprefix("block ") if len(f.name) > room else f.name  # the number of a block says more than its first letters
    if room >= 5 or len(name) <= room:  # the name is cut to fit
        picture.text(x + 4, y + 15, name[:max(room, 0)], stroke="white", stroke_width=2, paint_order="stroke")
    picture.parts.append("</g>")
    for child in f.sorted():
        draw_frame(picture, child, f"{way} > {child.name}", x, per_ms, whole, row + 1)
        x += child.ms * per_ms


def main():
    purpose = "where a run's communication was hidden behind compute, and who issued it, from its --trace"
    o = parse_options("overlap", purpose, OPTIONS, "TRACE")
    trace = Trace(o.operands[0])
    ranks, compute = trace.ranks, trace.ranks[0].compute
    if not compute: die(f"{trace.path} has no compute slices of rank 0")
    split = Split(trace)
    first, last = compute[0].step, compute[-1].step
    print_totals(ranks, first + 1 if first < last else first)  # the first step also touches memory for the first time, and is slow
    step, begin, end = choose_step(ranks, o.step)
    print_step(ranks, step, begin, end, o.columns)
    if o.svg: write_svg(o.svg, ranks, begin, end, o.svg_ms)
    split.print(o.callers)
    if o.flame: split.print_tree()
    if o.flame_svg: split.draw_tree(o.flame_svg)


if __name__ == "__main__": main()
