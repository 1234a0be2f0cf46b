"""Pages of experiments. Whatever a page says of the results is computed from them here, so that nobody has to keep sentences
and numbers in step.

An experiment that has a page says in experiments/NAME.py which runs make the results and what is asked of them: answer(d) has the
paragraphs of its answer, and short(d) is that in the list of all. The newest file of its results counts."""
import importlib, textwrap
from pathlib import Path
from dev.lib.results import Results, table as markdown
from dev.lib.script import ROOT
from dev.tools.svg import bars

HERE = ROOT / "experiments"
LIST = """Each experiment asks one question. Its file, `experiments/NAME.py`, lists the runs and computes the answer from
their results; its folder contains the stored results and a page made from them. `python3 -m experiments NAME` builds the
programs, runs one experiment and prints its answer. `make experiments` runs them all, in at most an hour on two cores, and on
the GPU if there is one. You can interrupt it: finished experiments are skipped the next time (`rm build/experiments/*.done`
starts over). Results go to `build/experiments`, and with `--store` also to this folder and its pages. `python3 -m experiments
--help` lists the options, and the experiments that make the chapters' tables."""


# ---- what an experiment need not say itself ----
DEFAULTS = dict(
    TITLE="", # of its page, which also needs QUESTION, PREDICTION and NOTES
    NEEDS=(), # PROGRAM[:PRECISION] of a page, which are built first
    ROUNDS=0, # how often it asks for each run in turns; 0: it has no rounds
    OPTIONS={}, FLAGS=(), PLACEHOLDERS={}, LEAST={}, # its own, as m.options() takes them
    MORE=True, # whether the programs' options may be given too
    check=lambda o: None, # ends the script if options cannot be meant
    PROGRAM="", # the only training program that a table runs
    FOLDER="build; make builds them", # where a table's programs are, in words
    DEVICE="cpu", # which machine a table describes
    STARTS_RANKS=True, # False: in a way of its own, or none
    SHOWS_PARTS=False, # whether an interrupted run is shown
    TRUST="", # what of a table nobody should trust if other programs used the cores
    BYTES_ONLY=False, BYTES_ONLY_RUNS=False, # a page needs no speeds; its runs measure none
    WORDS={}, # how a page names runs, in place of words(d, run)
    RUNS="run", FIRST={}, COLUMNS={}, SPEEDS={}) # of its table


def word(e, d, run):
    """How a page names a run: an experiment has a function for it, or WORDS."""
    return e.words(d, run) if hasattr(e, "words") else e.WORDS.get(run, run)


def without_speeds(e, d):
    """Whether speeds are what an experiment asks for, and are missing: then bytes_only(d) has the sentences of its answer."""
    return not d.speed and hasattr(e, "bytes_only")


def short(e, d): return "Speeds are not measured." if without_speeds(e, d) else e.short(d)


def table(e, d):
    """A row is a run: what a rank keeps of it and sends, and where speeds were measured its tokens per second. Before, between and
    after these stand FIRST, COLUMNS and SPEEDS of an experiment: {head: the key of a number of bytes, or a function of the results
    and the run}."""
    columns = e.FIRST | {"memory per rank": "memory"} | e.COLUMNS | {"sent per rank and step": "sent"}
    if d.speed: columns |= {"tokens per second": Results.tokens} | e.SPEEDS
    yield [e.RUNS, *columns]
    for run in d.runs():
        if d.refused(run): yield [word(e, d, run), *("out of memory" * (cell == "memory") for cell in columns.values())]
        else: yield [word(e, d, run), *(d.size(run, cell) if isinstance(cell, str) else cell(d, run) for cell in columns.values())]


def plot(e, d):
    """PLOT of an experiment is a title, the key of a number of bytes, and its unit; or a title, a function of the results and the
    run, how its number is written, and where a line is drawn, if one is."""
    if without_speeds(e, d): return None
    if hasattr(e, "plot"): return e.plot(d)
    title, value, unit, *mark = e.PLOT
    if not callable(value): rows = [(word(e, d, run), d.value(run, value) / unit, d.size(run, value)) for run in d.runs()]
    else: rows = [(word(e, d, run), value(d, run), unit(value(d, run))) for run in d.runs()]
    return {"title": title, "rows": rows} | ({"mark": mark[0]} if mark else {})


# ---- a page ----
def fold(text):
    return "\n".join(textwrap.wrap(" ".join(text.split()), 128, break_long_words=False, break_on_hyphens=False)) + "\n"


def command(r):
    """A run as it is typed, with its program."""
    if r["program"] == "plan": return f"build/plan, the line {r['run']}"
    program, _, precision = r["program"].partition(":")
    precision = f" (PRECISION={precision})" if precision else ""
    return f"mpirun -np {r['ranks']} " * (r["ranks"] > 1) + f"train_gpt2_{program}{precision} {r['options']}"


def answer(e, d):
    """The paragraphs of the answer, followed by its caveats."""
    yield "\n".join(map(fold, e.bytes_only(d) if without_speeds(e, d) else e.answer(d)))
    if not d.speed and not e.BYTES_ONLY:
        yield fold("Speeds are not in these results, because the machine was busy; memory and bytes do not depend on that.")
    if d.header["quick"]: yield fold("These are results of `--quick`: they show that the script works, and nothing else.")
    if d.speed and (warning := d.busy("the speeds")): yield fold(warning)


def page(name, e, d):
    """The parts of a page; d: the results, or None."""
    yield f"# {e.TITLE}\n\n{fold(e.QUESTION)}"
    yield f"## Prediction\n\n{fold(e.PREDICTION)}"
    if not d:
        yield fold(f"There are no results yet: `python3 -m experiments {name} --store` produces them and this page.")
        yield fold(e.NOTES)
        return
    h, rounds = d.header, max(map(len, d.rounds.values()))
    yield "## How to run\n\n" + fold(f"`python3 -m experiments {name}` makes these runs"
                                     f"{f', each {rounds} times, in turns' if rounds > 1 else ''}:")
    commands = [command(d.first(run)) for run in d.runs()]
    if len(commands) > 12: commands[4:-2] = [f"... {len(commands) - 6} more"]
    yield "".join(f"    {line}\n" for line in commands)
    yield "## Answer\n\n" + "\n".join(answer(e, d))
    rows, picture = e.table(d) if hasattr(e, "table") else table(e, d), plot(e, d)
    yield markdown(*rows, blank=" ") + (f"\n![{picture['title']}](plot.svg)\n" if picture else "")
    speeds = " Times are medians over the steps of a run without the first." if d.speed else ""
    if d.speed and rounds > 1:
        speeds += (" A ratio compares runs of the same round; it is the median over all rounds, with the smallest and the "
                   "largest in parentheses.")
    yield fold(f"Measured on {h['date']} on {h['machine']}, at commit {h['commit']}.{speeds} This page is made from "
               f"`results/{Path(d.file).name}` by `python3 -m experiments {name} --pages`.")
    yield f"## Conclusion\n\n{fold(e.NOTES)}"


def names():
    """Of all experiments."""
    return sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def load(name):
    """What experiments/NAME.py defines, and DEFAULTS of the rest."""
    e = importlib.import_module(f"experiments.{name}")
    vars(e).update(DEFAULTS | vars(e))
    return e


def have_pages(): return [name for name in names() if load(name).TITLE]


def make(chosen=(), results=None, out=None):
    """Makes the pages of these experiments, or of all and their list."""
    listed = []
    for name in chosen or have_pages():
        e, file = load(name), results or max((HERE / name).glob("results/*.jsonl"), default=None)
        d = Results.read(file) if file else None
        to = HERE / name if not out else Path(out, name if len(chosen) != 1 else "")
        to.mkdir(parents=True, exist_ok=True)
        (to / "README.md").write_text("\n".join(page(name, e, d)))
        picture = plot(e, d) if d else None
        if picture: (to / "plot.svg").write_text(bars(**picture))
        else: (to / "plot.svg").unlink(missing_ok=True)
        state = d.header["date"] + ", bytes only" * (not d.speed) if d else "no results yet"
        listed.append([f"[{e.TITLE}]({name}/README.md)", short(e, d) if d else "", f"`python3 -m experiments {name}`", state])
    if not chosen:
        heads = ["question", "answer in short", "command", "results"]
        Path(out or HERE, "README.md").write_text(f"# Experiments\n\n{fold(LIST)}\n" + markdown(heads, *listed, blank=" "))
