"""report.py [--results FILE] [--out FOLDER] [EXPERIMENT...] - makes an experiment's page, README.md, and its plot.svg from its
results.

EXPERIMENT is a folder (default: all of experiments/, and the list of them). Its experiment.py says which runs make the results and
what is asked of them; `short` is the answer in the list. The newest file of its results counts, or --results. --out FOLDER writes
there instead, into FOLDER/README.md, or for several experiments into FOLDER/EXPERIMENT/README.md.

Whatever a page says of the results is computed from them here, so that nobody has to keep sentences and numbers in step."""
import importlib.util, sys, textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "dev/bench"))
import measure as m
from svg import bars

DATA, SMALL = f"--data {m.TOKENS}", "--layers 2 --channels 32 --heads 2" # SMALL: for --quick
LIST = """One folder for each question: a script that says which runs are made and what is asked of them, their results in short,
and a page that is made from these. `python3 experiments/run.py NAME` builds and runs one experiment and prints its answer; `make
experiments` runs them all, in at most an hour on two cores. Both write to build/experiments; with `--store`, run.py also updates
the results and pages here. A finished experiment is skipped the next time (`rm build/experiments/*.done` to start over), so you can
interrupt them. If there is a GPU, the same scripts run on it. [run.py](run.py) has the options that all of them take, and
[report.py](report.py) makes the pages."""


class Results(m.Results):
    speed = property(lambda self: self.header["speed"] == "yes", doc="whether speeds were measured")

    def share(self, run, base, key):
        return self.value(run, key) / self.value(base, key)

    def size(self, run, key="memory"):
        return size(self.value(run, key))

    def tokens(self, run):
        """Tokens per second of all its ranks together."""
        return f"{self.value(run, 'tokens_per_s'):,.0f}"

    def beside(self, run, base, key="step_ms"):
        return times(self.ratio(run, base, key))

    def longer(self, run, base, what="A step"):
        """A sentence about the time of a step beside another run's, or none where speeds were not measured."""
        if not self.speed: return ""
        ratio = self.ratio(run, base, "step_ms")
        return f" {what} takes {times(ratio)} times as long.{no_difference(ratio)}"


# ---- numbers in words ----
def size(b):
    unit, by = next((unit, by) for unit, by in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)) if b >= by or by == 1)
    x = b / by
    return f"{int(x)} bytes" if by == 1 else f"{x:.0f} {unit}" if x >= 100 else f"{x:.1f} {unit}" if x >= 10 else f"{x:.2f} {unit}"


def count(n): return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million" if n >= 1e6 else f"{n / 1e3:.0f} thousand"
def percent(share): return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def times(ratio):
    """A ratio, and from where to where it goes over the rounds."""
    median, least, most = ratio
    return f"{median:.2f}" + (f" ({least:.2f} to {most:.2f})" if least != most else "")


def no_difference(*ratios):
    """What must be said where rounds differ by more than what is compared."""
    if not all(least < 1 < most for _, least, most in ratios): return ""
    return f" {'Both ranges include' if len(ratios) > 1 else 'The range includes'} 1, so these rounds show no difference."


# ---- what an experiment need not say itself ----
def word(e, d, run):
    """How a page names a run: an experiment has a function for it, or WORDS."""
    return e.words(d, run) if hasattr(e, "words") else e.WORDS.get(run, run)


def table(e, d):
    """A row is a run: what a rank keeps of it and sends, and where speeds were measured its tokens per second. Between and after
    these stand COLUMNS and SPEEDS of an experiment: {head: the key of a number of bytes, or a function of the results and the run}."""
    columns = {"memory of a rank": "memory"} | e.COLUMNS | {"sent by a rank in a step": "sent"}
    if d.speed: columns |= {"tokens per second": Results.tokens} | e.SPEEDS
    yield [getattr(e, "RUNS", "run"), *columns]
    for run in d.runs():
        yield [word(e, d, run), *(d.size(run, cell) if isinstance(cell, str) else cell(d, run) for cell in columns.values())]


def plot(e, d):
    """PLOT of an experiment is a title, the key of a number of bytes, and its unit."""
    if hasattr(e, "plot"): return e.plot(d)
    title, key, unit = e.PLOT
    return {"title": title, "rows": [(word(e, d, run), d.value(run, key) / unit, d.size(run, key)) for run in d.runs()]}


# ---- a page ----
def fold(text):
    return "\n".join(textwrap.wrap(" ".join(text.split()), 128, break_long_words=False, break_on_hyphens=False)) + "\n"


def command(r):
    """A run as it is typed, with its program."""
    if r["program"] == "plan": return f"build/plan, the line {r['run']}"
    program, _, precision = r["program"].partition(":")
    precision = f" (PRECISION={precision})" if precision else ""
    return f"mpirun -np {r['ranks']} " * (r["ranks"] > 1) + f"train_gpt2_{program}{precision} {r['options']}"


def load(folder):
    """What a folder's experiment.py defines."""
    if not (folder / "experiment.py").exists(): m.fail(f"{folder} has no experiment.py, so it is no experiment")
    spec = importlib.util.spec_from_file_location(folder.name, folder / "experiment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(e, d):
    """The paragraphs of the answer, followed by its caveats."""
    yield "\n".join(map(fold, e.answer(d)))
    if not d.speed and not getattr(e, "BYTES_ONLY", False):
        yield fold("Speeds are not in these results: they were made for bytes, on a machine that was busy.")
    if d.header["quick"]: yield fold("These are results of `--quick`: they show that the script works, and nothing else.")
    if d.speed and d.header["busy_percent"] > 5:
        yield fold(f"Other programs used {d.header['busy_percent']} % of the machine before the first run: do not trust the speeds.")


def page(name, e, d):
    """The parts of a page; d: the results, or None."""
    yield f"# {e.TITLE}\n\n{fold(e.QUESTION)}"
    if not d:
        yield fold(f"There are no results yet: `python3 experiments/run.py {name} --store` produces them and this page.")
        yield fold(e.NOTES)
        return
    h, rounds = d.header, max(map(len, d.rounds.values()))
    yield "## Answer\n\n" + "\n".join(answer(e, d))
    rows, picture = e.table(d) if hasattr(e, "table") else table(e, d), plot(e, d)
    yield "## Numbers\n\n" + m.table(*rows, blank=" ") + (f"\n![{picture['title']}](plot.svg)\n" if picture else "")
    yield "## How\n\n" + fold(f"`python3 experiments/run.py {name}` made these "
                              f"runs{f', {rounds} times in turns' if rounds > 1 else ''}:")
    commands = [command(d.first(run)) for run in d.runs()]
    if len(commands) > 12: commands[4:-2] = [f"... {len(commands) - 6} more"]
    yield "".join(f"    {line}\n" for line in commands)
    speeds = " Times are medians of a run's steps without the first; ratios are formed within a round." if d.speed else ""
    if d.speed and rounds > 1:
        speeds += " Where a figure has a range, it is from the least to the most of all rounds, and before it is their median."
    yield fold(f"Measured on {h['date']} on {h['machine']}, at commit {h['commit']}.{speeds} This page is made from "
               f"`results/{Path(d.file).name}` by `python3 experiments/report.py experiments/{name}`.")
    yield fold(e.NOTES)


def make(folders=(), results=None, out=None):
    """Makes the pages of the experiments in the folders, or of all of them and their list."""
    listed, with_list = [], not folders
    folders = [*map(Path, folders)] or sorted(path.parent for path in HERE.glob("*/experiment.py"))
    for folder in folders:
        e, file = load(folder), results or max(folder.glob("results/*.jsonl"), default=None)
        d = Results.read(file) if file else None
        to = folder if not out else Path(out, folder.name if len(folders) > 1 else "")
        to.mkdir(parents=True, exist_ok=True)
        (to / "README.md").write_text("\n".join(page(folder.name, e, d)))
        picture = plot(e, d) if d else None
        if picture: (to / "plot.svg").write_text(bars(**picture))
        else: (to / "plot.svg").unlink(missing_ok=True)
        state = d.header["date"] + ", bytes only" * (not d.speed) if d else "no results yet"
        short, command = e.short(d) if d else "", f"`python3 experiments/run.py {folder.name}`"
        listed.append([f"[{e.TITLE}]({folder.name}/README.md)", short, command, state])
    if with_list:
        heads = ["question", "answer in short", "command", "results"]
        Path(out or HERE, "README.md").write_text(f"# Experiments\n\n{fold(LIST)}\n" + m.table(heads, *listed, blank=" "))


def main():
    o = m.options(__doc__, results="", out="")
    if o.results and len(o.more) != 1: m.fail(f"--results is for one experiment, not for {len(o.more)}")
    for word in o.more:
        if word.startswith("--"): m.fail(f"report.py knows --results FILE and --out FOLDER, not {word}")
    make(o.more, o.results, o.out)


if __name__ == "__main__": main()
