"""Why are two ranks not twice as fast as one? DDP and FSDP on one and two ranks, with the same batch in all (strong) and with the
same batch on each rank (weak)."""
import dev.lib as m
from dev.lib import DATA, SMALL, percent, times

ROUNDS, NEEDS = 5, ["ddp", "fsdp"]
TITLE = "Why are two ranks not twice as fast?"
QUESTION = """If only arithmetic counted, a step on two ranks would take half as long as on one. How long does it take, and
where does the rest go: data loading, all-reduces, gathers, or waiting?"""
PREDICTION = """Arithmetic alone predicts twice the tokens per second. Communication and waiting can only lengthen the step.
Computing may also take more than half of one rank's time, because two ranks share caches and memory bandwidth, smaller products
are less efficient, and in DDP each rank updates all parameters. Which of these costs most?"""
NOTES = """Once communication is hidden, the cores themselves are the limit. Each row from *computing* on is the mean of both
ranks, as the programs' [diagnosis](../../doc/reference/diagnosis.md) reports it. [Chapter
2](../../doc/02_ddp.md#how-fast-it-gets) runs four ranks on two cores."""
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
    return (f"They are {ddp} times as fast with DDP, and {fsdp} times with FSDP. DDP's largest losses: "
            f"{'; '.join(text for text, _ in parts(d, 'ddp')[:2])}.")


def bytes_only(d):
    kept = (f"{d.size(program + '-strong-2')} ({title})" for program, title in PROGRAMS.items())
    yield f"Each of two ranks keeps {' and '.join(kept)}."


def answer(d):
    for program, title in PROGRAMS.items():
        found = "; ".join(f"{text} {percent(x)}" for text, x in parts(d, program))
        rest = (f"The step exceeds half of one rank's by these shares of it: {found}" if found else
                "No cause takes 1 % of half of one rank's step")
        yield (f"With the same batch in all, two ranks of {title} train {times(gain(d, program))} times as many tokens per "
               f"second as one, an efficiency of {percent(gain(d, program)[0] / 2)}. {rest}. With the same batch on each rank, "
               f"they train {times(gain(d, program, 'weak'))} times as many.")


def table(d):
    yield ["", "DDP", "FSDP"]
    for text, run, key in (("memory, one rank", "strong-1", "memory"), ("memory per rank, two ranks", "strong-2", "memory"),
                           ("sent per rank and step, two ranks", "strong-2", "sent")):
        yield [text, *(d.size(f"{program}-{run}", key) for program in PROGRAMS)]
    if not d.speed: return
    yield ["tokens per second, two ranks", *(d.tokens(f"{program}-strong-2") for program in PROGRAMS)]
    for kind, text in ("strong", "one rank, same batch in all"), ("weak", "one rank, same batch on each"):
        yield [f"tokens per second, {text}", *(d.tokens(f"{program}-{kind}-1") for program in PROGRAMS)]
        yield ["speed-up by two ranks", *(times(gain(d, program, kind)) for program in PROGRAMS)]
    yield ["*two ranks' step, as shares of half of one rank's:*", "", ""]
    for cause, text in CAUSES.items(): yield [text, *(percent(share(d, program, cause)) for program in PROGRAMS)]


def plot(d):
    cases = [(program, kind, text) for program in PROGRAMS for kind, text in (("strong", "same batch"), ("weak", "same on each"))]
    return {"title": "tokens per second of two ranks, relative to one", "mark": (2, "twice"),
            "rows": [(f"{PROGRAMS[program]}, {text}", gain(d, program, kind)[0], f"{gain(d, program, kind)[0]:.2f}") for program,
                     kind,
                     text in cases]}
