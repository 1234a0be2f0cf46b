"""Draws chapter 0's pictures: each collective on four ranks, before and after.

    python3 -m dev.tools.collectives [FOLDER]      writes FOLDER/00_NAME.svg; FOLDER is doc unless it is given

Element i of rank r is (i + 1) * 10^r, so the digits of a sum show which ranks it contains. A cell is coloured as the rank that
its number comes from; sums are dark."""
import sys
from pathlib import Path
from dev.tools.svg import Svg

N = 4
COLOURS, SUM, EMPTY = ["#cfe3f3", "#ffe0b8", "#d5efd0", "#eed3ea"], "#40566b", "#f4f4f4"
INPUT = [[(i + 1) * 10 ** r for i in range(N)] for r in range(N)]
SUMS = [sum(column) for column in zip(*INPUT)]


def alone(r, values):
    """A buffer of N cells that holds what belongs in cell r, and nothing else."""
    return [values[r] if i == r else None for i in range(N)]


COLLECTIVES = {  # name: its title, and each rank's buffer before and after
    "broadcast": ("broadcast, root 0", [INPUT[0]] + [[None] * N] * 3, [INPUT[0]] * N),
    "all-reduce": ("all-reduce (sum)", INPUT, [SUMS] * N),
    "reduce-scatter": ("reduce-scatter (sum)", INPUT, [alone(r, SUMS) for r in range(N)]),
    "all-gather": ("all-gather", [alone(r, SUMS) for r in range(N)], [SUMS] * N),
    "all-to-all": ("all-to-all", INPUT, [[INPUT[i][r] for i in range(N)] for r in range(N)]),
    "send": ("send and receive: rank r to rank r + 1", INPUT, [[None] * N] + INPUT[:-1]),
}


def colour(value):
    """That of the rank whose number it is: 20 is rank 1's, 2000 rank 3's."""
    return EMPTY if value is None else SUM if len(set(str(value))) == 1 and value > 1000 else COLOURS[len(str(value)) - 1]


def draw(title, before, after):
    wide, high, gap, left = 46, 24, 90, 60
    width = left + 2 * N * wide + gap + 16
    svg = Svg(width, 56 + N * (high + 8))
    svg.text(12, 20, title, font_size=14, font_weight="bold")
    for side, (word, buffers) in enumerate((("before", before), ("after", after))):
        x0 = left + side * (N * wide + gap)
        svg.text(x0 + N * wide / 2, 38, word, "middle", fill="#555555")
        for r, buffer in enumerate(buffers):
            y = 48 + r * (high + 8)
            if side == 0: svg.text(12, y + 16, f"rank {r}")
            for i, value in enumerate(buffer):
                svg.rect(x0 + i * wide, y, wide, high, colour(value), stroke="#999999")
                if value is not None:
                    svg.text(x0 + i * wide + wide / 2, y + 16, value, "middle", fill="white" if colour(value) == SUM else "black")
    x, y = left + N * wide + 18, 48 + N * (high + 8) / 2 - 4
    svg.add("path", d=f"M {x} {y} h {gap - 44} m -8 -6 l 8 6 l -8 6", stroke="#555555", fill="none", stroke_width=2)
    return str(svg)


if __name__ == "__main__":
    for name, parts in COLLECTIVES.items(): Path(sys.argv[1] if sys.argv[1:] else "doc", f"00_{name}.svg").write_text(draw(*parts))
