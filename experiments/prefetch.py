"""What does gathering ahead gain? FSDP on two ranks with each --prefetch, and without gathering ahead in the forward pass: as fast
as this machine sends, and over a slower link (--emulate-link), where messages take as long as a network needs and no core."""
from dev.lib import DATA, Results, no_difference, percent, times

ROUNDS, NEEDS = 6, ["fsdp"]
TITLE = "What does gathering ahead gain?"
QUESTION = """FSDP gathers each block for its backward pass. With `--prefetch none` it begins when the block is needed, with
`backward-post` when the block before has its gradients, and with `backward-pre` (the default) before that block begins its
backward pass. How much of a step is then exposed, and how long does the step take? And what if the forward pass does not gather
ahead (`--no-forward-prefetch`)? Ranks on one machine exchange data by copying, which takes time from the cores that compute. So
every way also runs over an emulated link (`--emulate-link`), which carries data while the cores compute, as a network does."""
PREDICTION = """Each mode begins a gather earlier than the one before it, so the exposed share should fall from `none` to
`backward-post` to `backward-pre`, and rise again without prefetch in the forward pass. Memory and bytes are the same for all.
The 64.6 MB that a rank sends per step take 129 ms at 4 Gbit/s, so prefetch should gain most over the slow link."""
NOTES = """Prefetch gains most on a slow link that needs no core. Hidden communication is not free: if it shares cores or
processors with computing, a step gains less than the time that is hidden. [Chapter
4](../../doc/04_fsdp.md#prefetch-three-timelines) has the timelines."""


def measure(x):
    model = "--model d6 --batch-size 4 --seq-len 64 --steps 16"
    if x.quick: model = "--layers 3 --channels 32 --heads 2 --batch-size 2 --seq-len 16 --steps 3"
    for _ in x.in_turns():
        for link, slower in ("", ""), ("link-", "--comm mpi --emulate-link 4"):
            for mode in "none", "backward-post", "backward-pre":
                x.run(link + mode, 2, "fsdp", DATA, model, f"--prefetch {mode}", slower)
            x.run(f"{link}no-forward", 2, "fsdp", DATA, model, "--no-forward-prefetch", slower)


def rate(d): return d.option("link-none", "--emulate-link") + " Gbit/s"
def words(d, run): return way(run) + (f", {rate(d)}" if run.startswith("link-") else "")


def way(run):
    mode = run.removeprefix("link-")
    return "--no-forward-prefetch" if mode == "no-forward" else f"--prefetch {mode}"


def base(run): return "link-none" if run.startswith("link-") else "none"


PLOT = "exposed communication, as a share of a step", Results.exposed, percent
SPEEDS = {"exposed": lambda d, run: percent(d.exposed(run)),
          "step time, none = 1": lambda d, run: d.beside(run, base(run))}


def short(d):
    return " ".join(f"{where}, it exposes {percent(d.exposed(f'{link}backward-pre'))} of a step instead of "
                    f"{percent(d.exposed(f'{link}none'))}, and a step takes "
                    f"{d.ratio(f'{link}backward-pre', f'{link}none', 'step_ms')[0]:.2f} times as long."
                    for link, where in (("", "On this machine's own link"), ("link-", f"Over {rate(d)}")))


def bytes_only(d): yield f"All ways send {d.size('none', 'sent')} per rank and step, and keep {d.size('none')}."


def answer(d):
    for link, where in ("", "On this machine's own link"), ("link-", f"Over a link of {rate(d)}"):
        none, post, pre, forward = (percent(d.exposed(link + run))
                                    for run in ("none", "backward-post", "backward-pre", "no-forward"))
        ratios = [d.ratio(link + run, f"{link}none", "step_ms") for run in ("backward-post", "backward-pre")]
        yield (f"{where}, exposed communication takes {none} of a step with `none`, {post} with `backward-post` and {pre} with "
               f"`backward-pre`. Compared with `none`, a step takes {times(ratios[0])} times as long with `backward-post`, and "
               f"{times(ratios[1])} times with `backward-pre`.{no_difference(*ratios)}")
        yield (f"Without prefetch in the forward pass, {forward} of a step is exposed, and a step takes "
               f"{times(d.ratio(f'{link}no-forward', f'{link}backward-pre', 'step_ms'))} times as long as with the default.")
