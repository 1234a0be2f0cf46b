#!/usr/bin/env python3
"""overlap - reads a timeline (--trace FILE) and says in a terminal how much of the communication was hidden behind compute.

    build/overlap trace.json [--step N] [--columns 100] [--svg FILE] [--callers] [--flame] [--flame-svg FILE] [--json]

The table has a line per rank, of mean milliseconds a step, without the first step: compute; communication; its exposed part, in
which nothing was computed; efficiency = compute / (compute + exposed); and how long before the end of the backward pass
communication began (negative: after it). The picture below it shows one step, and --svg draws the same for a browser or a page.

Then communication is split by kind, by unit and by communicator, and with --callers by the part of the step and the function of the
stage that issued it: of a step in total, exposed, and in waits for ranks that were late. These are means by the definitions of the diagnosis that a run prints
at its end (overlap_split.py), and so are the two efficiencies. --flame is a tree of a step's time. timeline.py reads the file.
"""
import math
from collections import defaultdict
from overlap_split import Split
from timeline import Trace
from tool import TimePicture, die, dump_json, parse_options, real, switch, text, whole

OPTIONS = [
    whole("step", 0, 0, 1e9, "the step to draw; 0: the shortest"),
    whole("columns", 100, 10, 1000, "width of the picture, in characters"),
    text("svg", "", "FILE", "also draw the step into this file"),
    real("svg-ms", 0, 0, 1e9, "milliseconds that the width of --svg's picture shows; 0: the step"),
    switch("callers", "also split communication by the part of a step and the function that issued it"),
    switch("flame", "also print where a step's time goes: by phase, function, kind of operation and unit"),
    text("flame-svg", "", "FILE", "draw the same into this file"),
    switch("json", "print only how communication is split, as one JSON object; ms of a step"),
]


# ---- the table ----
def rank_totals(rank, first_step):
    """Of all steps that count, in microseconds: compute, communication, its exposed part, and the time from the first operation that
    begins in a step to the end of its backward pass."""
    compute = sum(s.end - s.begin for s in rank.compute if s.step >= first_step and s.letter != ".")
    communication, exposed, done, ahead, backward_end = 0, 0, -math.inf, 0, 0
    for s in rank.communication:
        begin = max(s.begin, done)  # messages may overlap: time up to here has been counted
        if s.step < first_step or s.end <= begin: continue
        communication += s.end - begin
        exposed += s.end - begin - rank.computed_within(begin, s.end)
        done = s.end
    for step, slices in rank.by_step():
        backward_end = next((s.end for s in reversed(slices) if s.letter in "beh"), backward_end)  # the embedding's, before the wait
        first = next((o for o in rank.communication if o.begin >= slices[0].begin), None)
        if step >= first_step and first and first.step == step: ahead += backward_end - first.begin
    return compute, communication, exposed, ahead


def print_table(ranks, first_step):
    print("ms a step    compute  communication    exposed  efficiency  begins before the end of backward")
    for i, rank in enumerate(ranks):
        compute, communication, exposed, ahead = rank_totals(rank, first_step)
        steps = len({s.step for s in rank.compute if s.step >= first_step})
        ms = 1e-3 / steps if steps else 0
        efficiency = 100 * compute / (compute + exposed) if compute > 0 else 0
        print(f"rank {i:<4} {ms * compute:10.2f} {ms * communication:14.2f} {ms * exposed:10.2f} {efficiency:10.1f}% "
              f"{ms * ahead:12.2f}")


# ---- a step ----
def choose_step(ranks, step):
    """The step to draw, with its begin and end: the one asked for, or the shortest, which other programs disturbed least. It lasts
    from the first rank's compute to the last's; messages sent in that time may end in the next step."""
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
    print(f"\nstep {step}, {1e-3 * (end - begin):.2f} ms: e embedding, f forward, h head, b backward, . waiting, u update; # "
          "communication")
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
           ".": ("#eeeeee", "waiting"), "u": ("#8d99ae", "update"), "+": ("#7fb069", "communication hidden"),
           "#": ("#c1121f", "exposed")}


def write_svg(path, ranks, begin, end, span_ms):
    """span_ms: the time that the picture's width stands for, so that several pictures can be compared; 0: the step's duration."""
    picture = TimePicture(COLOURS.values(), len(ranks), 2, 18, 10, span_ms or 1e-3 * (end - begin))

    def draw(rank, row, first, last, letter):
        picture.slice(rank, row, 1e-3 * (first - begin), 1e-3 * (min(last, end) - begin), COLOURS.get(letter, COLOURS["#"])[0])

    for i, rank in enumerate(ranks):
        for s in rank.compute: draw(i, 0, s.begin, s.end, s.letter)
        for s in rank.communication:  # all of it is drawn as exposed; then compute that runs at the same time hides it
            draw(i, 1, s.begin, s.end, "#")
            for c in rank.compute:
                if c.letter != ".": draw(i, 1, max(s.begin, c.begin), min(s.end, c.end), "+")
    picture.write("--svg", path)
    print(f"\npicture: {path}")


def main():
    purpose = "where a run's communication was hidden behind compute, and who issued it, from its --trace"
    o = parse_options("overlap", purpose, OPTIONS, "TRACE")
    trace = Trace(o.operands[0])
    ranks, compute = trace.ranks, trace.ranks[0].compute
    if not compute: die(f"{trace.path} has no compute slices of rank 0")
    split = Split(trace)
    if o.json: print(dump_json(split.record()))
    else:
        first, last = compute[0].step, compute[-1].step
        print_table(ranks, first + 1 if first < last else first)  # the first step also touches memory for the first time
        step, begin, end = choose_step(ranks, o.step)
        print_step(ranks, step, begin, end, o.columns)
        if o.svg: write_svg(o.svg, ranks, begin, end, o.svg_ms)
        split.print(o.callers)
        if o.flame: split.print_tree()
    if o.flame_svg: split.draw_tree(o.flame_svg)
    if o.flame_svg and not o.json: print(f"\npicture: {o.flame_svg}")


if __name__ == "__main__": main()
