"""Draws pictures for the documents: which program changes which, and communication, as four ranks and their buffers before and
after each operation; and the matrices of a block in ZeRO's shards and at their owners.

    python3 -m dev.tools.collectives [FOLDER]      writes FOLDER/NAME.svg; FOLDER is doc unless it is given

Element i of rank r is (i + 1) * 10^r, so the digits of a sum show which ranks it contains. A cell is coloured as the rank that
its number comes from; sums are dark."""
import sys
from pathlib import Path
from dev.site.programs import neighbours
from dev.tools.svg import Svg
from dev.tools.whole_matrices import MATRICES, owners

N = 4
COLOURS = ["#cfe3f3", "#ffe0b8", "#d5efd0", "#eed3ea"]
PARTIAL, SUM, EMPTY = "#b4c4d4", "#40566b", "#f4f4f4"
INPUT = [[(i + 1) * 10 ** r for i in range(N)] for r in range(N)]
SUMS = [sum(column) for column in zip(*INPUT)]


def alone(r, values):
    """A buffer of N cells that holds what belongs in cell r, and nothing else."""
    return [values[r] if i == r else None for i in range(N)]


HOP = [[11, 22, None, None], [None, None, 33, 44], [1100, 2200, None, None], [None, None, 3300, 4400]]
PICTURES = {  # a file: its title, and each rank's buffer at one moment after another
    "00_broadcast": ("broadcast, root 0", {"before": [INPUT[0]] + [[None] * N] * 3, "after": [INPUT[0]] * N}),
    "00_all-reduce": ("all-reduce (sum)", {"before": INPUT, "after": [SUMS] * N}),
    "00_reduce-scatter": ("reduce-scatter (sum)", {"before": INPUT, "after": [alone(r, SUMS) for r in range(N)]}),
    "00_all-gather": ("all-gather", {"before": [alone(r, SUMS) for r in range(N)], "after": [SUMS] * N}),
    "00_all-to-all": ("all-to-all", {"before": INPUT, "after": [[INPUT[i][r] for i in range(N)] for r in range(N)]}),
    "00_send": ("send and receive: rank r to rank r + 1", {"before": INPUT, "after": [[None] * N] + INPUT[:-1]}),
    # shard r*M + a belongs to rank r of node a: ranks 0 and 1 are node 0, ranks 2 and 3 node 1
    "10_hops": ("ZeRO++: gradients of four shards; ranks 0 and 1 are node 0, ranks 2 and 3 node 1", {
        "each rank's gradients": INPUT, "hop 1, within a node": HOP, "hop 2, across nodes":
            [alone(0, SUMS), alone(2, SUMS), alone(1, SUMS), alone(3, SUMS)]}),
}


def colour(value):
    """That of the rank whose number it is (20 is rank 1's), or of a sum of two, or of all."""
    if value is None: return EMPTY
    ranks = [r for r, digit in enumerate(reversed(str(value))) if digit != "0"]
    return COLOURS[ranks[0]] if len(ranks) == 1 else SUM if len(ranks) == N else PARTIAL


def draw(title, moments):
    wide, high, gap, left = 46, 24, 90, 60
    svg = Svg(left + len(moments) * (N * wide + gap) - gap + 16, 56 + N * (high + 8))
    svg.text(12, 20, title, font_size=14, font_weight="bold")
    for side, (word, buffers) in enumerate(moments.items()):
        x0 = left + side * (N * wide + gap)
        svg.text(x0 + N * wide / 2, 38, word, "middle", fill="#555555")
        if side:
            x, y = x0 - gap + 18, 48 + N * (high + 8) / 2 - 4
            svg.add("path", d=f"M {x} {y} h {gap - 44} m -8 -6 l 8 6 l -8 6", stroke="#555555", fill="none", stroke_width=2)
        for r, buffer in enumerate(buffers):
            y = 48 + r * (high + 8)
            if side == 0: svg.text(12, y + 16, f"rank {r}")
            for i, value in enumerate(buffer):
                svg.rect(x0 + i * wide, y, wide, high, colour(value), stroke="#999999")
                if value is not None:
                    svg.text(x0 + i * wide + wide / 2, y + 16, value, "middle", fill="white" if colour(value) == SUM else "black")
    return str(svg)


PLACES = {  # of the programs: column, row, and a few words
    "single": (0, 3, "one device"), "ddp": (1, 3, "data parallel"), "zero": (2, 1, "sharded, ZeRO 1-3"),
    "fsdp": (3, 1, "fully sharded"), "zeropp": (4, 1, "ZeRO++, few bytes"), "muon": (3, 0, "ZeRO with Muon"),
    "tp": (2, 2, "tensor parallel"), "pp": (2, 3, "pipeline parallel"), "3d": (3, 2.5, "one mesh of all"),
    "compress": (2, 4, "fewer bytes sent"), "cp": (2, 5, "context parallel"),
}


def tree():
    """The programs as boxes, with an arrow from each base to the program that changes it."""
    wide, high, across, down = 128, 42, 168, 56
    svg = Svg(4 * across + wide + 16, 5 * down + high + 16)
    at = {program: (8 + column * across, 8 + row * down) for program, (column, row, _) in PLACES.items()}
    for base, program in neighbours():
        x0, y0, x1, y1 = at[base][0] + wide, at[base][1] + high / 2, at[program][0] - 2, at[program][1] + high / 2
        bend = (x0 + x1) / 2
        svg.add("path", d=f"M {x0} {y0} H {bend} V {y1} H {x1} m -6 -4 l 6 4 l -6 4", stroke="#555555", fill="none", stroke_width=1.5)
    for program, (x, y) in at.items():
        svg.rect(x, y, wide, high, COLOURS[0], stroke="#3a86b7", rx=5)
        svg.text(x + wide / 2, y + 18, program, "middle", font_size=14, font_weight="bold")
        svg.text(x + wide / 2, y + 34, PLACES[program][2], "middle", fill="#333333")
    return str(svg)


HALVES = {6: ["q", "k", "v", "proj"], 7: ["fc", "fcproj"]}  # by the rows of 1-D tensors that come first in the unit


def pieces(ranks, C=256):
    """[(matrix, rank, rows)]: what each rank's shards contain of a block's matrices, in rows of C elements."""
    found = []
    for vectors, names in HALVES.items():
        sizes = {name: C * rows * columns for name, (rows, columns) in MATRICES.items() if name in names}
        shard, at = -(-(vectors + sum(sizes.values())) // ranks), vectors
        for name, size in sizes.items():
            for rank in range(ranks):
                n = min(at + size, (rank + 1) * shard) - max(at, rank * shard)
                if n > 0: found.append((name, rank, n))
            at += size
    return found


def draw_owners(ranks=3, blocks=4):
    """The first block of the default model: who holds and who owns what, each piece as long as it is."""
    owner, found = dict(owners(blocks, ranks)[:len(MATRICES)]), pieces(ranks)
    holds, owns = (lambda name, rank: rank), (lambda name, rank: owner[name])
    moments = {"momentum, in ZeRO's shards": (holds, holds), "at the owners: whole matrices": (owns, holds),
               "updates, in the shards": (holds, owns)}
    scale, high, gap, left = 0.2, 30, 60, 60
    longest = [max(sum(n for name, rank, n in found if place(name, rank) == r) for r in range(ranks)) * scale
               for place, _ in moments.values()]
    svg = Svg(int(left + sum(longest) + 2 * gap + 16), 56 + ranks * (high + 10))
    svg.text(12, 20, f"Muon: one block of the default model on {ranks} ranks", font_size=14, font_weight="bold")
    x0 = left
    for (word, (place, source)), wide in zip(moments.items(), longest):
        svg.text(x0 + wide / 2, 42, word, "middle", fill="#555555")
        if x0 > left:
            x, y = x0 - gap + 12, 50 + ranks * (high + 10) / 2 - 5
            svg.add("path", d=f"M {x:.0f} {y:.0f} h {gap - 24} m -8 -6 l 8 6 l -8 6", stroke="#555555", fill="none", stroke_width=2)
        for r in range(ranks):
            x, y = x0, 50 + r * (high + 10)
            if x0 == left: svg.text(12, y + 19, f"rank {r}")
            for name in MATRICES:
                mine = [(rank, n * scale) for piece, rank, n in found if piece == name and place(name, rank) == r]
                for rank, length in mine:
                    svg.rect(x, y, length, high, COLOURS[source(name, rank)], stroke="#999999")
                    x += length
                if not mine: continue
                wide_matrix = sum(length for _, length in mine)
                svg.rect(x - wide_matrix, y, wide_matrix, high, "none", stroke="#222222", stroke_width=1.5)
                svg.text(x - wide_matrix / 2, y + 19, name, "middle")
        x0 += wide + gap
    return str(svg)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if sys.argv[1:] else "doc")
    for name, parts in PICTURES.items(): (folder / f"{name}.svg").write_text(draw(*parts))
    (folder / "programs.svg").write_text(tree())
    (folder / "11_owners.svg").write_text(draw_owners())
