"""The share of a step that tensor parallelism communicates, in models with more and more channels.

Two ranks with a thread each share models of 4 layers with heads of 64 channels, and always have the same tokens. --no-overlap, so
that a step either computes or communicates: communicating is what the log calls exposed, computing is the rest of the step.
Both are medians over all steps but each run's first, as multiples of the line above. At fixed tokens the bytes grow with the
channels C and the matrix products with C squared; the table has these laws beside what was measured. --svg draws both."""
from math import log2
import dev.lib as m
from dev.tools.svg import Svg

OPTIONS, ROUNDS, TRUST = dict(channels=[128, 256, 512, 1024], steps=8, svg=""), 3, "these figures"


def measure(x):
    for _ in x.in_turns():
        for C in x.o.channels:
            x.run(str(C), 2, "tp", m.DATA, f"--layers 4 --channels {C} --heads {C // 64} --batch-size 4 --seq-len 128 --no-overlap "
                  f"--steps {x.o.steps}", keep=lambda run: dict(sent=run.last("comm_bytes"), **run.speeds))


def picture(C, lines, shares):
    """Both axes are logarithmic, so a law is a straight line, and its power is its slope. lines: (name, colour, law, power,
    times)."""
    x = [log2(c) for c in C]
    values = [[log2(v) for v in times] for *_, times in lines]
    laws = [v[-1] - power * (x[-1] - x[0]) for v, (_, _, _, power, _) in zip(values, lines)]
    bottom, top = min(*map(min, values), *laws) - 0.5, max(values[0] + values[1][:1]) + 0.5
    px = lambda c: 70 + (c - x[0]) * 480 / (x[-1] - x[0] or 1)
    py = lambda v: 330 - (v - bottom) * 290 / (top - bottom)
    svg = Svg(720, 400)
    svg.text(70, 20, "time of a step on two ranks with the same tokens; each line of the grid is twice the one below it")
    for i in range(int(top - bottom) + 1): svg.line(70, py(bottom + i), 550, py(bottom + i), "#dddddd")
    for c, at, share in zip(C, x, shares):
        svg.line(px(at), 330, px(at), 40, "#dddddd")
        svg.text(px(at), 348, c, "middle")
        svg.text(px(at), 364, f"{share:.0f} %", "middle")
    svg.text(310, 388, "channels C, and the share of a step that communicates", "middle")
    for v, law, (name, colour, power_text, _, _) in zip(values, laws, lines):
        svg.line(px(x[0]), py(law), px(x[-1]), py(v[-1]), colour, stroke_dasharray="5 4")
        for at, value in zip(x, v): svg.add("circle", cx=px(at), cy=py(value), r=4, fill=colour)
        svg.curve([(px(at), py(value)) for at, value in zip(x, v)], colour)
        svg.text(558, py(v[-1]) + 4, name)
        svg.text(558, py(v[-1]) + 20, f"(dashed: {power_text})")
    return str(svg)


def check(o):
    for C in o.channels:
        if C % 128: m.fail(f"{C} channels are not a multiple of 128: two ranks with whole heads of 64")


def show(d, o):
    C = [int(run) for run in d.runs()]
    waits, shares = ([d.of_steps(run, key) for run in d.runs()] for key in ("comm_exposed_ms", "waits"))
    computes = [m.median(ms - wait for ms, wait in zip(d.all(run, "step_ms"), d.all(run, "comm_exposed_ms"))) for run in d.runs()]
    rows = [["", "", "", ""]] + [[f"{computes[i] / computes[i - 1]:.1f}", f"{(C[i] / C[i - 1]) ** 2:.3g}",
                                  f"{waits[i] / waits[i - 1]:.1f}", f"{C[i] / C[i - 1]:.3g}"] for i in range(1, len(C))]
    print()
    d.print_table(["channels", "sent", "computing, over the line above", "C squared", "communicating, over the line above", "C",
                   "share of a step that communicates"], *([c, f"{d.first(str(c))['sent'] / 1e6:.1f} MB", *row, f"{share:.1f} %"]
                                                           for c, row, share in zip(C, rows, shares)))
    m.picture(o.svg, lambda: picture(C, [("computing", "#3a86b7", "C squared", 2, computes),
                                         ("communicating", "#c1121f", "C", 1, waits)], shares))
