"""Memory, traffic and work of a rank with context parallelism, measured in a step of training and compared with the formulas.

One sequence (or --batch-size), of which each rank has --tokens tokens: it grows with --ranks. With --seq-len among the other
options it is as long as that on any number of ranks. Megabytes per rank: state is parameters, gradients and optimizer state;
exchanged: what attention's exchange has buffers for; total: also the layers' workspace; sent, most: by attention in a step,
without gradients, as the mean of all ranks and by the rank that sends most. pairs: of query and key, the busiest rank's over
the mean's. A run that counts other bytes or pairs than it predicted, or than the formulas below say, ends this script. --svg
draws which rank has which queries, and how many keys they see; --ring-svg what a ring's forward pass waits for, where a
message takes 0.4 of a mean part's time."""
import dev.lib as m
from dev.tools.svg import Svg

WAYS = {"ulysses": "--cp ulysses", "allgather": "--cp allgather", "ring": "--cp ring", "zigzag": "--cp ring --cp-balance zigzag"}
COLOURS = ["#3a86b7", "#e0a030", "#5aa469", "#b5577a"]
OPTIONS, PROGRAM = dict(ranks=[1, 2, 4], tokens=256, ways=list(WAYS), svg="", ring_svg=""), "build/train_gpt2_cp"


def chunks(r, c, way): return [r, 2*c - 1 - r] if way == "zigzag" else [r]


def pairs(r, c, T, way):
    """Of a query and a key that it sees, in a head: of the queries that rank r has."""
    queries = T // (2*c if way == "zigzag" else c)
    return sum(queries * queries * chunk + queries * (queries + 1) // 2 for chunk in chunks(r, c, way))


def keys_sent(c, n, way, rank):
    """Elements of keys and values that a rank sends in one pass over a block, with n elements of (B,T,C) on each. A rank sends to
    the rank below it, which in zigzag needs only the first half of what belongs to the ranks below itself. From rank 0 they go to
    the last rank, which needs half of all others."""
    below = (rank - 1) % c
    return 2 * n * (c - 1) - (n * below if way == "zigzag" else 0)


def sent(c, n, X, way):
    """Bytes of a block in a step by rank 0."""
    if way == "ulysses": return 8 * n * (c - 1) / c * X
    return 2 * keys_sent(c, n, way, 0) * X + 2*n * (c - 1) * 4


def measure(x):
    def keep(run):
        return dict(sent=run.last("comm_bytes"), kinds=run.kinds(), pairs=int(run.said(r"pairs, busiest rank +\d+ +(\d+)")),
                    loss=run.last("loss"), recomputed="recomputed" in run.log, doubles=3, **run.shape)
    for c in x.o.ranks:
        for way in x.o.ways:
            T = int(m.option(x.o.more, "--seq-len", c * x.o.tokens))
            x.run(f"{c} {way}", c, x.o.program, WAYS[way], f"--steps 1 --batch-size 1 --seq-len {T} --save-every 0", keep=keep,
                  launched=True, threads=None, refused=True)
            x.d.first(f"{c} {way}").update(c=c, way=way, tokens=T)


def row(r):
    c, way, T = r["c"], r["way"], r["tokens"]
    if "refused" in r: return print("%2d %6d  %-9s  %s" % (c, T, way, r["refused"].split(";")[0]))
    L, NH, B, kinds, n = r["layers"], r["heads"], r["B"], r["kinds"], r["B"] * T // c * r["channels"]
    P = kinds["parameters"] // r["width"]
    attention = r["sent"] - 2 * (c - 1) / c * (P * r["width"] + 8 * r.get("doubles", 1)) # older results: the loss alone
    formula = L * sent(c, n, r["width"], way) if not r["recomputed"] else attention
    if abs(attention - formula) > 1: m.fail(f"{way} on {c} ranks: attention sent {attention} bytes, by formula {formula}")
    passes = 3 if r["recomputed"] else 2
    ranks = [attention + L * passes * r["width"] * (keys_sent(c, n, way, rank) - keys_sent(c, n, way, 0)) for rank in range(c)]
    work = [B * NH * L * pairs(rank, c, T, way) for rank in range(c)]
    if way == "ulysses": work = [sum(work) / c]
    if r["pairs"] != max(work): m.fail(f"{way} on {c} ranks: {r['pairs']} pairs, by formula {max(work)}")
    state = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer state"))
    print("%2d %6d  %-9s %7.1f %12.1f %10.1f %7.1f %7.1f %7.1f %7.2f" % (c, T, way, state / 1e6, kinds["activations"] / 1e6,
                                                                   kinds["communication"] / 1e6,
          (state + sum(kinds[kind] for kind in ("activations", "communication", "workspace"))) / 1e6, sum(ranks) / c / 1e6,
          max(ranks) / 1e6, max(work) * len(work) / sum(work)))


def draw_work(c, size=220):
    """Queries downwards, keys to the right: what a rank works is its colour's area."""
    svg = Svg(2 * size + 320, size + 84)
    for left, way, title in (20, "ring", "contiguous"), (size + 190, "zigzag", "zigzag"):
        svg.text(left, 22, title, font_size=14)
        side, work = size / (2*c if way == "zigzag" else c), [pairs(r, c, 2048 * c, way) for r in range(c)]
        for r in range(c):
            for chunk in chunks(r, c, way):
                top, wide = 36 + chunk * side, left + chunk * side
                svg.add("polygon", points=f"{left},{top:.1f} {wide:.1f},{top:.1f} {wide + side:.1f},{top + side:.1f} {left},"
                        f"{top + side:.1f}",
                        fill=COLOURS[r])
                svg.text(wide + side + 6, top + side - 4, f"rank {r}")
        svg.text(left, size + 56, "a rank's pairs over the mean's: " + ", ".join(f"{w * c / sum(work):.2f}" for w in work))
    svg.text(20, size + 76, "queries from top to bottom, the keys that they see from left to right")
    return str(svg)


def ring(c, way, hop):
    """(rank, step, whose keys, begin, end) of a forward pass, by the order of ring_forward. 1 is the time of a mean part; hop: that
    of a message. A step begins when the one before has ended, and what it sent and receives has arrived."""
    halves, begins, ends = 2 if way == "zigzag" else 1, [0.0] * c, [0.0] * c
    for s in range(c):
        if s > 0:
            met = [max(begins[r], begins[(r + 1) % c]) + hop * (0.5 if halves == 2 and (r + s) % c < r else 1) for r in range(c)]
            begins = [max(ends[r], met[r], met[r - 1]) for r in range(c)] # met[r]: what r + 1 sends has come to r
        for r in range(c):
            u = (r + s) % c
            seen = sum(1 if k < q else 0.5 if k == q else 0 for q in chunks(r, c, way) for k in chunks(u, c, way))
            ends[r] = begins[r] + seen / halves**2 * 2 # of a rank's T/c queries with as many keys, half is the mean
            yield r, s, u, begins[r], ends[r]


def draw_ring(c, hop=0.4, unit=62):
    svg = Svg(660, 292)
    for top, way in (34, "ring"), (160, "zigzag"):
        played = [*ring(c, way, hop)]
        svg.text(20, top - 14,
                 f"{'zigzag' if way == 'zigzag' else 'contiguous'}: {max(end for *_, end in played):.1f} mean parts long",
                 font_size=14)
        for r, s, u, begin, end in played:
            svg.text(20, top + 22 * r + 15, f"rank {r}")
            if end > begin: svg.rect(70 + begin * unit, top + 22 * r, (end - begin) * unit, 18, COLOURS[u], stroke="white")
    for u in range(c): svg.rect(70 + 150 * u, 266, 14, 14, COLOURS[u]), svg.text(90 + 150 * u, 278, f"keys of rank {u}")
    return str(svg)


def show(d, o):
    print(" c      T  way         state  activations  exchanged   total    sent    most   pairs")
    for r in d.records(): row(r)
    m.picture(o.svg, lambda: draw_work(4))
    m.picture(o.ring_svg, lambda: draw_ring(4))
