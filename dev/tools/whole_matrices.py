"""Why Muon needs whole matrices, and how evenly their owners share the work (chapter 11).

    python3 -m dev.tools.whole_matrices updates   Newton-Schulz of random matrices, whole and in other ways that a run might take
    python3 -m dev.tools.whole_matrices owners    FLOPs of the busiest rank over the mean, by three rules"""
import random, sys
from operator import mul

A, B, C = 3.4445, -4.7750, 2.0315  # those of llmc/device/layers_api.h
WIDTH = 32                         # channels of the matrices
RANKS = (2, 3, 4, 5, 7, 8, 16)
# Of a block, in the order of the model: rows and columns in units of C. Newton-Schulz takes 5 (4 m^2 n + 2 m^3) FLOPs.
MATRICES = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "proj": (1, 1), "fc": (4, 1), "fcproj": (1, 4)}


def flops(name):
    """Of Newton-Schulz, in units of C^3."""
    m, n = sorted(MATRICES[name])
    return 5 * (4 * m * m * n + 2 * m ** 3)


def owners(blocks, ranks, loads=None):
    """[(name, owner)] of the blocks' matrices, as llmc/parallel/owners.h chooses them: the longest first, each to the rank that has
    least to do so far."""
    found, loads = [None] * blocks * len(MATRICES), [0] * ranks if loads is None else loads
    names = [*MATRICES] * blocks
    for i in sorted(range(len(names)), key=lambda i: -flops(names[i])):
        owner = loads.index(min(loads))
        loads[owner] += flops(names[i])
        found[i] = names[i], owner
    return found


def imbalance(loads): return max(loads) * len(loads) / sum(loads)


def print_owners(blocks=4):
    def longest_first(ranks):
        owners(blocks, ranks, loads := [0] * ranks)
        return loads

    def in_order(ranks):
        names = [*MATRICES] * blocks
        return [sum(map(flops, names[q::ranks])) for q in range(ranks)]

    def in_each_block(ranks):
        owners(1, ranks, loads := [0] * ranks)
        return loads
    print(f"{blocks} blocks; ranks".ljust(26), *(f"{n:5}" for n in RANKS))
    for name, rule in ("longest first over all", longest_first), ("in turn, in order", in_order), ("longest first per block", in_each_block):
        print(f"{name:26}", *(f"{imbalance(rule(n)):5.2f}" for n in RANKS))


# ---- updates ----
def product(x, y):
    """x times the transpose of y."""
    return [[sum(map(mul, row, column)) for column in y] for row in x]


def transposed(x): return [*map(list, zip(*x))]


def norm(x): return sum(v * v for row in x for v in row) ** 0.5


def rms(x): return norm(x) / (len(x) * len(x[0])) ** 0.5


def combined(a, x, b, y): return [[a * p + b * q for p, q in zip(*rows)] for rows in zip(x, y)]


def newton_schulz(x):
    if len(x) > len(x[0]): return transposed(newton_schulz(transposed(x)))
    x = combined(1 / norm(x), x, 0, x)
    for _ in range(5):
        gram = product(x, x)
        x = combined(A, x, 1, product(combined(B, gram, C, product(gram, gram)), transposed(x)))
    return x


def print_updates(ranks=4):
    make = random.Random(1).gauss
    def matrix(rows, scale=1): return [[scale * make(0, 1) for _ in range(WIDTH)] for _ in range(rows)]
    def line(what, update, right):
        print(f"{what:50} {norm(combined(1, update, -1, right)) / norm(right):10.2f} {rms(update):8.3f} {rms(right):8.3f}")
    print(f"C = {WIDTH}, {ranks} ranks".ljust(50), "difference      rms    right")
    for name, rows in ("C x C", WIDTH), ("4C x C", 4 * WIDTH):
        whole, part = matrix(rows), rows // ranks
        alone = [row for q in range(ranks) for row in newton_schulz(whole[q * part:(q + 1) * part])]
        line(f"{name}, each rank orthogonalises its own rows", alone, newton_schulz(whole))
    gradients, mean = [matrix(WIDTH) for _ in range(ranks)], [[0] * WIDTH] * WIDTH
    for one in gradients: mean = combined(1, mean, 1 / ranks, one)
    early = [[0] * WIDTH] * WIDTH
    for one in gradients: early = combined(1, early, 1 / ranks, newton_schulz(one))
    line("C x C, Newton-Schulz before the reduce-scatter", early, newton_schulz(mean))
    q, k, v = matrix(WIDTH), matrix(WIDTH, 0.1), matrix(WIDTH)
    line("q, k, v as one matrix, k ten times smaller: k", newton_schulz(q + k + v)[WIDTH:2 * WIDTH], newton_schulz(k))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["updates"]: print_updates()
        case ["owners"]: print_owners()
        case _: sys.exit(__doc__)
