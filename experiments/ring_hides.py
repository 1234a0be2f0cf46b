"""When does a ring hide what it sends? Context parallelism on four ranks over an emulated link (--emulate-link), with each way to
attend and longer and longer sequences, and few channels, so that most of a step is attention."""
import dev.lib as m
from dev.lib import percent

ROUNDS, NEEDS, RANKS = 3, ["cp"], 4
TITLE = "When does a ring hide what it sends?"
QUESTION = """`--cp ring` passes keys and values on while attention computes, and `allgather` and `ulysses` wait for their
exchange. How long must a sequence be before the ring hides its traffic?"""
PREDICTION = """A hop carries the keys and values of T/c tokens, 2 (T/c) C numbers of X bytes. Meanwhile a rank computes
(T/c)²/2 pairs of a query and a key, of 4C FLOPs each. If it computes F FLOPs and its link carries W bytes per second, hops are
hidden from T/c = X F/W on."""
NOTES = """The traffic of a ring grows with T and attention with T², so long sequences hide the exchange. The column *predicted*
counts the part of each hop that outlasts the attention running at the same time. A block takes 9 hops. Each of the 3 forward
hops overlaps with one part of attention. Backward parts take 2.5 times as many FLOPs; one of the 4 overlaps with two hops,
because gradients follow the keys, and the last hop overlaps with nothing. Sums of parameter gradients are left out. F comes
from the longest run of the ring, without its exposed time, and is low because four ranks take turns on two cores. [Chapter
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
    return next((f"from {T} tokens on" for T in lengths(d) if share(d, f"ring-{T}") < 0.5), "at no length that was tried")


COLUMNS = {"attention's exchange, ms": lambda d, run: f"{link_ms(d, run):.1f}"}
SPEEDS = {"exposed, ms": lambda d, run: f"{exposed_ms(d, run):.1f}", "step, ms": lambda d,
          run: f"{d.value(run, 'step_ms'):.1f}",
          "exposed share": lambda d, run: percent(exposed(d, run)),
          "predicted": lambda d, run: percent(by_formula(d, run))}
PLOT = "exposed share of attention's exchange", exposed, percent, (1, "all of it")


def short(d):
    return (f"The formula says from {formula(d):.0f} tokens on. Less than half of the exchange is exposed {half(d, exposed)} "
            f"(predicted: {half(d, by_formula)}).")


def bytes_only(d):
    T = max(lengths(d))
    sent = ", ".join(f"{d.size(f'{way}-{T}', 'sent')} with `{way}`" for way in WAYS)
    yield f"With {T} tokens a rank sends {sent} per step."


def answer(d):
    yield (f"A rank computes {computes(d) / 1e9:.2g} GFLOP/s, and its link carries {carries(d) / 1e6:.3g} MB/s. So a ring of "
           f"{RANKS} ranks should hide its hops from {formula(d):.0f} tokens on. Less than half of the exchange is exposed "
           f"{half(d, exposed)} (predicted: {half(d, by_formula)}).")
    shares = "; ".join(f"`{way}` " + ", ".join(percent(exposed(d, f"{way}-{T}")) for T in lengths(d)) for way in WAYS)
    yield f"Exposed share of attention's exchange with {', '.join(map(str, lengths(d)))} tokens: {shares}."
