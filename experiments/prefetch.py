"""What does gathering ahead gain? FSDP on two ranks with each --prefetch, and without gathering ahead in the forward pass: as fast
as this machine sends, and over a slower link (--emulate-link), where messages take as long as a network needs and no core."""
from dev.lib import DATA, Results, no_difference, percent, times

ROUNDS, NEEDS = 6, ["fsdp"]
TITLE = "What does gathering ahead gain?"
QUESTION = """FSDP gathers a block before its backward pass: when it is needed (`--prefetch none`), when the block before it has its
gradients (`backward-post`), or before that block's backward pass (`backward-pre`, the default). How much of a step is then exposed,
and how long does it take? And what if the forward pass does not gather ahead? Ranks of one machine exchange data by copying, which
takes the cores that compute. So each is also run over an emulated link (`--emulate-link`), which carries data while the cores
compute, as a network does."""
NOTES = """[Chapter 4](../../doc/04_fsdp.md#prefetch-three-timelines) has the timelines. Hidden communication is not free: where it
shares cores or processors with computing, a step gains less than what is hidden."""


def measure(x):
    model = "--model d6 --batch-size 4 --seq-len 64 --steps 16"
    if x.quick: model = "--layers 3 --channels 32 --heads 2 --batch-size 2 --seq-len 16 --steps 3"
    for _ in x.in_turns():
        for link, slower in ("", ""), ("link-", "--comm mpi --emulate-link 4"):
            for mode in "none", "backward-post", "backward-pre":
                x.run(link + mode, 2, "fsdp", DATA, model, f"--prefetch {mode}", slower)
            x.run(f"{link}no-forward", 2, "fsdp", DATA, model, "--no-forward-prefetch", slower)


def rate(d): return d.option("link-none", "--emulate-link") + " Gbit/s"
def words(d, run): return f"{run.removeprefix('link-')}, {rate(d)}" if run.startswith("link-") else run
def base(run): return "link-none" if run.startswith("link-") else "none"


PLOT = "exposed communication, share of a step", Results.exposed, percent
SPEEDS = {"exposed, of a step": lambda d, run: percent(d.exposed(run)),
          "time of a step, beside none over the same link": lambda d, run: d.beside(run, base(run))}


def short(d):
    return " ".join(f"{where} {percent(d.exposed(f'{link}backward-pre'))} instead of {percent(d.exposed(f'{link}none'))} of a "
                    f"step are exposed, and it takes {d.ratio(f'{link}backward-pre', f'{link}none', 'step_ms')[0]:.2f} times as "
                    "long."
                    for link, where in (("", "On the own link"), ("link-", f"Over {rate(d)}")))


def bytes_only(d): yield f"All of them send {d.size('none', 'sent')} and keep {d.size('none')} per rank."


def answer(d):
    for link, where in ("", "On this machine's own link"), ("link-", f"Over a link of {rate(d)}"):
        none, post, pre, forward = (percent(d.exposed(link + run))
                                    for run in ("none", "backward-post", "backward-pre", "no-forward"))
        ratios = [d.ratio(link + run, f"{link}none", "step_ms") for run in ("backward-post", "backward-pre")]
        yield (f"{where} exposed communication takes {none} of a step with none, {post} with backward-post and {pre} with "
               "backward-pre.")
        yield (f"A step with backward-post takes {times(ratios[0])} times as long as one with none, and one with backward-pre "
               f"{times(ratios[1])} times.{no_difference(*ratios)}")
        yield (f"Without gathering ahead in the forward pass {forward} of a step are exposed, and it takes "
               f"{times(d.ratio(f'{link}no-forward', f'{link}backward-pre', 'step_ms'))} times as long as with backward-pre, which "
               "does both.")
