"""At which size of the model do two ranks stop being slower than one? The same batch on one rank and on two (DDP), for wider and
wider models of two layers, with sequences of 32 tokens and of 128."""
from dev.lib import DATA, count, percent, size, times

ROUNDS, NEEDS = 5, ["single", "ddp"]
TITLE = "When do two ranks stop being slower than one?"
QUESTION = """Two ranks share a batch (DDP). In a small model, messages and waiting may take longer than the half of the work
that the second rank saves. At which size does the second rank begin to pay, and does it pay earlier if a step has more
tokens?"""
PREDICTION = """A message costs at least its latency, however small the model is, so the smallest models should train faster on
one rank. More tokens mean more computing for the same gradients, so with 128 tokens per sequence the second rank should pay
earlier than with 32."""
NOTES = """If no size is slower, even the smallest step computes for longer than this machine's messages take; a slower link
would change the answer. More tokens help, because the number of gradients does not depend on them. Each rank of DDP updates all
parameters, which two ranks do not speed up. [The diagnosis](../../doc/reference/diagnosis.md) shows how a run answers this
about itself."""


# A run is one-T-C or two-T-C: sequences of T tokens, C channels.
def measure(x):
    widths, steps = ((16, 32), 3) if x.quick else ((16, 32, 64, 128, 256, 512), 50)
    for _ in x.in_turns():
        for length in 32, 128:
            for channels in widths:
                model = f"--layers 2 --channels {channels} --heads {channels // 16} --seq-len {length} --steps {steps}"
                x.run(f"one-{length}-{channels}", 1, "single", DATA, model, "--batch-size 4")
                x.run(f"two-{length}-{channels}", 2, "ddp", DATA, model, "--batch-size 2")


def sizes(d): return [run.removeprefix("one-") for run in d.runs("^one-")]
def lengths(d): return dict.fromkeys(text.split("-")[0] for text in sizes(d))
def gain(d, text): return d.ratio(f"two-{text}", f"one-{text}", "tokens_per_s")
def exposed(d, text): return percent(d.exposed(f"two-{text}"))


def gains(d, length):
    """{channels: gain} with sequences of one length."""
    return {int(text.split("-")[1]): gain(d, text) for text in sizes(d) if text.startswith(f"{length}-")}


def slower_and_faster(ratios):
    """The channels with which two ranks are slower, and those with which they are faster."""
    return ([C for C, ratio in ratios.items() if (ratio[0] < 1) == slower] for slower in (True, False))


def where_faster(ratios):
    slower, faster = slower_and_faster(ratios)
    if not slower: return "at every size that was tried"
    if not faster: return "at no size that was tried"
    return f"from {faster[0]} channels on" if slower[-1] < faster[0] else "at some of the sizes that were tried"


def short(d):
    where = {length: where_faster(gains(d, length)) for length in lengths(d)}
    if len({*where.values()}) == 1: return f"Two are faster {where.popitem()[1]}."
    return "Two are faster " + ", ".join(f"{words} with {length} tokens in a sequence" for length, words in where.items()) + "."


def found(d, length, ratios):
    """Where two ranks are slower, and where they are faster."""
    def parameters(C): return f"{count(d.value(f'one-{length}-{C}', 'parameters'))} parameters"
    slower, faster = slower_and_faster(ratios)
    if not slower: return f"two ranks are faster at every size that was tried, even with {parameters(faster[0])}"
    if not faster: return f"two ranks are slower at every size that was tried, even with {parameters(slower[-1])}"
    if slower[-1] > faster[0]:
        return ("the sizes at which two ranks are slower and those at which they are faster are mixed, so these runs do not answer "
                "it")
    least, most = parameters(slower[-1]), parameters(faster[0])
    return f"two ranks are slower than one up to {slower[-1]} channels ({least}), and faster from {faster[0]} on ({most})"


def bytes_only(d): yield f"Each of two ranks sends {', '.join(d.size(run, 'sent') for run in d.runs('^two-'))} per step."


def answer(d):
    for length in lengths(d):
        ratios = gains(d, length)
        unclear = [str(C) for C, (_, least, most) in ratios.items() if least < 1 < most]
        doubt = f" (by medians; with {' and '.join(unclear)} channels some rounds say the opposite)" if unclear else ""
        first, *_, last = ratios
        yield (f"With sequences of {length} tokens {found(d, length, ratios)}{doubt}. They reach {times(ratios[first])} times "
               f"one rank's tokens per second with {first} channels, and {times(ratios[last])} times with {last}. Exposed "
               f"communication takes {exposed(d, f'{length}-{first}')} and {exposed(d, f'{length}-{last}')} of their steps.")


def table(d):
    yield ["tokens per sequence", "channels", "parameters", "memory, one rank", "memory per rank, two ranks",
           "sent per rank and step"] + ["tokens per second, one rank", "two ranks", "speed-up", "exposed, two ranks"] * d.speed
    for text in sizes(d):
        one, two = f"one-{text}", f"two-{text}"
        bytes_ = map(size, (d.value(one, "memory"), d.value(two, "memory"), d.value(two, "sent")))
        speeds = [d.tokens(one), d.tokens(two), times(gain(d, text)), exposed(d, text)] if d.speed else []
        yield [*text.split("-"), count(d.value(one, "parameters")), *bytes_, *speeds]


def plot(d):
    return {"title": "tokens per second of two ranks, relative to one", "mark": (1, "one rank"), "rows": [
        ("{} tokens, {} channels".format(*text.split("-")), gain(d, text)[0], f"{gain(d, text)[0]:.2f}") for text in sizes(d)]}
