"""When does a ring hide what it sends? Context parallelism on four ranks over an emulated link (--emulate-link), with each way to
attend and longer and longer sequences, and few channels, so that most of a step is attention."""
import dev.lib as m
from dev.lib import percent

ROUNDS, NEEDS, RANKS = 3, ["cp"], 4
TITLE = "When does a ring hide what it sends?"
QUESTION = """`--cp ring` sends keys and values on while attention computes with them, and `allgather` and `ulysses` wait. A hop is 2nX
bytes of a rank's n = (T/c)C numbers of X bytes; meanwhile a rank computes (T/c)²/2 pairs of a query and a key, of 4C FLOPs each. So a
ring's hops are hidden if T/c >= XF/W, where a rank computes F FLOPs and its link carries W bytes in a second. At which length does it
happen?"""
NOTES = """F is not known beforehand: it is what a rank computed in a second of the ring's longest run, without the seconds that its link
exposed. So it has in it that four ranks take turns on two cores. By formula a ring exposes what a hop lasts longer than the attention
beside it. Of 9 hops a block 3 go forward. Backward there are 2.5 times as many FLOPs, and beside one of 4 steps are two hops, because
gradients follow keys; the last hop has nothing beside it. Sums of parameters' gradients are left out. [Chapter
9](../../doc/09_cp.md#when-a-ring-hides-what-it-sends) has the condition."""
WAYS = {"ring": "--cp ring --cp-balance zigzag", "allgather": "--cp allgather --cp-balance zigzag", "ulysses": "--cp ulysses"}
KINDS = "send", "receive", "all-gather", "reduce-scatter", "all-to-all" # of attention; gradients are all-reduced


# A run is WAY-T.
def measure(x):
    lengths, shape = (((32, 64), "--layers 1 --channels 16 --steps 3") if x.quick else
                      ((256, 512, 1024, 2048, 4096), "--layers 2 --channels 32 --steps 6"))
    for _ in x.in_turns():
        for T in lengths:
            for way, options in WAYS.items():
                x.run(f"{way}-{T}", RANKS, "cp", shape, f"--heads 4 --batch-size {1 if x.quick else 4} --seq-len {T}",
                      options, "--comm mpi --emulate-link 0.5")


def option(d, name): return float(d.option(d.runs()[0], name))
def lengths(d): return [int(run.removeprefix("ring-")) for run in d.runs("^ring-")]
def words(d, run): return "{}, {} tokens".format(*run.split("-"))
def carries(d): return option(d, "--emulate-link") * 1e9 / 8
def link_ms(d, run):
    return 1e3 * (d.value(run, "sent") - 2 * (RANKS - 1) / RANKS * (d.value(run, "kinds/gradients") + 8)) / carries(d)


def exposed_ms(d, run):
    shares = d.first(run)["shares"]
    return sum(d.value(run, f"shares/{kind}") for kind in KINDS if kind in shares)


def exposed(d, run): return exposed_ms(d, run) / link_ms(d, run)


def computes(d):
    """F: FLOPs of a rank in a step, of attention 7 products of C for a pair, and 6 for a parameter and a token; and how long it
    took."""
    T, (L, C, B) = max(lengths(d)), (option(d, name) for name in ("--layers", "--channels", "--batch-size"))
    flops = B * (14 * C * L * T * (T + 1) / 2 + 6 * (12 * L * C * C + m.padded(257) * C) * T) / RANKS
    return flops / (d.value(f"ring-{T}", "shares/total") - exposed_ms(d, f"ring-{T}")) * 1e3


def formula(d): return RANKS * 4 * computes(d) / carries(d)


def by_formula(d, run):
    r = int(run.split("-")[1]) / formula(d) # attention beside a hop, of the time that the hop takes
    late = [max(0, hops - r * work) for hops, work in [(1, 1)] * 3 + [(1, 2.5), (1, 2.5), (2, 2.5), (1, 2.5), (1, 0)]]
    return sum(late) / 9 if run.startswith("ring") else 1


def half(d, share):
    return next((f"{T} tokens on" for T in lengths(d) if share(d, f"ring-{T}") < 0.5), "no length that was tried on")


COLUMNS = {"attention's exchange on the link, ms": lambda d, run: f"{link_ms(d, run):.1f}"}
SPEEDS = {"exposed of it, ms": lambda d, run: f"{exposed_ms(d, run):.1f}", "step, ms": lambda d,
          run: f"{d.value(run, 'step_ms'):.1f}",
          "exposed, of the exchange": lambda d, run: percent(exposed(d, run)),
          "by formula": lambda d, run: percent(by_formula(d, run))}
PLOT = "exposed, of the time that attention's exchange takes on the link", exposed, percent, (1, "all of it")


def short(d):
    return (f"By formula from {formula(d):.0f} tokens on. Less than half of its exchange is exposed from {half(d, exposed)}, and "
            f"by formula from {half(d, by_formula)}.")


def bytes_only(d):
    T = max(lengths(d))
    yield f"With {T} tokens a rank sends " + ", ".join(f"{d.size(f'{way}-{T}', 'sent')} with {way}" for way in WAYS) + "."


def answer(d):
    yield (f"A rank computed {computes(d) / 1e9:.2g} GFLOP/s, and its link carries {carries(d) / 1e6:.3g} MB/s. So by formula a "
           f"ring of {RANKS} ranks hides its hops from {formula(d):.0f} tokens of a sequence on. Less than half of its exchange is "
           f"exposed from {half(d, exposed)}, and by formula from {half(d, by_formula)}.")
    for way in WAYS:
        shares = ", ".join(f"{percent(exposed(d, f'{way}-{T}'))} with {T}" for T in lengths(d))
        yield f"{way} exposes of the time that attention's exchange takes on the link: {shares} tokens."
