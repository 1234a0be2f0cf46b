"""Why are two ranks not twice as fast as one? DDP and FSDP on one and two ranks, with the same batch in all (strong) and with the
same batch on each rank (weak)."""
import dev.lib as m
from dev.lib import DATA, SMALL, percent, times

ROUNDS, NEEDS = 5, ["ddp", "fsdp"]
TITLE = "Why are two ranks not twice as fast?"
QUESTION = """A step on two ranks would take half as long as on one, if nothing but its arithmetic counted. How long does it take,
and where is the rest: data loading, all-reduces, gathers, waiting? And what does a rank keep?"""
NOTES = """Each row of the table from computing on is a mean of both ranks, as the programs' diagnosis has it. Computing can take
more than half of one rank's time: two ranks share caches and the memory's bandwidth, smaller products are less efficient, and in
DDP each rank updates all parameters. [Chapter 2](../../doc/02_ddp.md#how-fast-it-gets) has four ranks on two cores."""
PROGRAMS = {"ddp": "DDP", "fsdp": "FSDP"}
CAUSES = {"computing": "computing", "all-gather": "exposed all-gathers", "reduce-scatter": "exposed reduce-scatters",
          "all-reduce": "exposed all-reduces",
          "waiting": "waiting for the slower rank", "data": "waiting for data", "rest": "without a core, or asleep"}


def measure(x):
    model, batch, steps = "--model d6 --seq-len 64", 4, 25
    if x.quick: model, batch, steps = f"{SMALL} --seq-len 16", 2, 3
    for _ in x.in_turns():
        for program in PROGRAMS:
            # with two ranks both are the same
            for kind, ranks, sequences in ("strong", 1, 2 * batch), ("weak", 1, batch), ("strong", 2, batch):
                x.run(f"{program}-{kind}-{ranks}", ranks, program, DATA, model, f"--steps {steps} --batch-size {sequences}",
                      launched=True)


def share(d, program, cause):
    """Of half a step of one rank, which a step of two would take at best."""
    ones = {one["round"]: one for one in d.each_round(f"{program}-strong-1")}
    return m.median(two["shares"].get(cause, 0) / (ones[two["round"]]["step_ms"] / 2)
                    for two in d.each_round(f"{program}-strong-2"))


def parts(d, program):
    """By which a step is longer than half of one rank's: (cause, share), the largest first; shares of less than 1 % are left
    out."""
    found = {text: share(d, program, cause) for cause, text in CAUSES.items() if cause != "computing"}
    found = {"slower computing": share(d, program, "computing") - 1} | found
    return sorted(((text, x) for text, x in found.items() if x >= 0.01), key=lambda part: -part[1])


def gain(d, program, kind="strong"): return d.ratio(f"{program}-strong-2", f"{program}-{kind}-1", "tokens_per_s")


def short(d):
    ddp, fsdp = (f"{gain(d, program)[0]:.2f}" for program in PROGRAMS)
    return (f"They are {ddp} times as fast with DDP, and {fsdp} times with FSDP. What they lose most by: "
            f"{'; '.join(text for text, _ in parts(d, 'ddp')[:2])}.")


def bytes_only(d):
    kept = (f"{d.size(program + '-strong-2')} ({title})" for program, title in PROGRAMS.items())
    yield f"A rank of two keeps {' and '.join(kept)}."


def answer(d):
    for program, title in PROGRAMS.items():
        found = ", ".join(f"{text} {percent(x)}" for text, x in parts(d, program))
        yield (f"{title} on two ranks reaches {times(gain(d, program))} times the tokens per second of one rank with the same "
               f"batch: an efficiency of {percent(gain(d, program)[0] / 2)}.")
        yield (f"Its step is longer than half of one rank's by these parts, as shares of that half: {found}." if found else
               "No cause takes 1 % of half of one rank's step.")
        yield f"With the same batch on each rank it reaches {times(gain(d, program, 'weak'))} times."


def table(d):
    yield ["", "DDP", "FSDP"]
    for text, run, key in (("memory of one rank", "strong-1", "memory"), ("memory of each of two", "strong-2", "memory"),
                           ("sent by each of two in a step", "strong-2", "sent")):
        yield [text, *(d.size(f"{program}-{run}", key) for program in PROGRAMS)]
    if not d.speed: return
    yield ["tokens per second of two", *(d.tokens(f"{program}-strong-2") for program in PROGRAMS)]
    for kind, text in ("strong", "of one with the same batch"), ("weak", "of one with the same batch on each rank"):
        yield [text, *(d.tokens(f"{program}-{kind}-1") for program in PROGRAMS)]
        yield ["of two, beside that", *(times(gain(d, program, kind)) for program in PROGRAMS)]
    yield ["*a step of two, of half a step of one:*", "", ""]
    for cause, text in CAUSES.items(): yield [text, *(percent(share(d, program, cause)) for program in PROGRAMS)]


def plot(d):
    cases = [(program, kind, text) for program in PROGRAMS for kind, text in (("strong", "same batch"), ("weak", "same on each"))]
    return {"title": "tokens per second of two ranks, beside one", "mark": (2, "twice"),
            "rows": [(f"{PROGRAMS[program]}, {text}", gain(d, program, kind)[0], f"{gain(d, program, kind)[0]:.2f}") for program,
                     kind,
                     text in cases]}
