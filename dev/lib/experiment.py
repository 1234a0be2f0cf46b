"""The command `python3 -m experiments`: runs what an experiment asks for, stores the results, and prints its answer or table.

experiments/NAME.py is one of two kinds.
- A page has TITLE, QUESTION, NOTES, ROUNDS, the programs that it NEEDS, runs(x), which asks x, a Runs, for each run, and
  answer(results): paragraphs. pages.py makes the page.
- A table has measure(results, options) and show(results, options), which prints it; check(options) ends the script if the options
  cannot be meant. OPTIONS are its own, with their defaults. PROGRAM is the training program that it runs, if it is one, and TRUST
  what nobody should trust if other programs used the cores. SETTINGS are arguments of table() below."""
import itertools, json, os, re, shutil, subprocess, sys
from pathlib import Path
import dev.lib as m
from dev.lib import pages


def note_others(d, others):
    """Keeps what other programs used meanwhile, unless ranks were started in another way: those of a cluster are no children of
    this script, and would count as others."""
    if not os.environ.get("MPIRUN"): d.header["others_percent"] = others.percent()


# ---- runs of a page ----
def rounded(x):
    return float(f"{x:.4g}") if x % 1 else int(float(f"{x:.4g}"))


def summary(name, run, speed):
    """What a run measured: times are medians over its steps without the first, bytes those of the last step, the shares of a step
    the program's own diagnosis, means of its ranks. A run that keeps other bytes than it predicted is an error."""
    kinds, memory = run.kinds(), max(step["mem_peak_bytes"] for step in run.steps)
    if memory != sum(kinds.values()): m.fail(f"{name} kept {memory} bytes and predicted {sum(kinds.values())}")
    found = dict(parameters=run.about["parameters"], precision=run.about["precision"], kinds=kinds, memory=memory,
                 sent=run.last("comm_bytes"), host=run.about["predicted_bytes"].get("state on the host", 0), steps=len(run.steps),
                 first_loss=rounded(run.steps[0]["loss"]), loss=rounded(run.last("loss")))
    if not speed: return found
    for key in "tokens_per_s", "step_ms", "comm_exposed_ms": found[key] = rounded(m.median(run.values(key) or [run.last(key)]))
    if not run.diagnosis: return found
    mean, exposed = run.diagnosis["mean"], {}
    for axis in mean["exposed"].values():
        for kind, ms in axis.items(): exposed[kind] = exposed.get(kind, 0) + ms
    shares = {key: mean[key] for key in ("total", "computing", "rest", "waiting", "data")} | exposed
    return found | {"shares": {key: rounded(x) for key, x in shares.items()}} | {
        key: rounded(run.diagnosis[key]) for key in ("efficiency_communication", "efficiency_exposed")}


def make(path, device="cpu", precision=""):
    """Builds a program. The output of make goes to stderr, because stdout is for answers."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
    line = ["make", "--no-print-directory", f"DEVICE={device}", f"PRECISION={precision or 'fp32'}", "DEBUG=", path]
    if subprocess.run(line, env=env, stdout=sys.stderr).returncode: m.fail(f"{path} could not be built: {' '.join(line)}")
    return m.need(path)


class Runs:
    """The runs of an experiment, as its file asks for them."""
    def __init__(self, name, e, o, device):
        self.name, self.quick, self.device, self.more, self.round = name, o.quick, device, o.more, 1
        self.rounds = 1 if o.quick else o.rounds or e.ROUNDS
        self.speed = not o.no_speed and not getattr(e, "BYTES_ONLY_RUNS", False)
        for program in e.NEEDS: make(self.program(program), device, program.partition(":")[2])
        header = m.header(device) | {"experiment": name, "device": device, "quick": "yes" * o.quick, "speed": "yes" * self.speed}
        self.d = m.Results(header)

    def program(self, program):
        """The path of PROGRAM[:PRECISION]."""
        program, _, precision = program.partition(":")
        variant = "-".join(filter(None, (self.device * (self.device != "cpu"), precision)))
        return "/".join(filter(None, ("build", variant, f"train_gpt2_{program}")))

    def in_turns(self):
        for self.round in range(1, self.rounds + 1): yield self.round

    def run(self, name, ranks, program, *options, until=None, refused=False, launched=False):
        """One run, whose record is added to the results. until: it ends after so many steps, so that a large model writes no
        checkpoint; refused: it may be out of memory; launched: also one rank is started by the launcher."""
        m.note(f"  {self.name}{f', round {self.round}' if self.rounds > 1 else ''}: {name}")
        options = m.words(*options, self.more)
        run = m.train(f"{name} on {ranks} ranks", self.program(program), options, m.QUIET, "--eval-every 0", until=until,
                      refused=refused, ranks=ranks if ranks > 1 or launched else None, threads=m.environ("OMP_NUM_THREADS", 1))
        measured = {"refused": run} if isinstance(run, str) else summary(name, run, self.speed)
        self.d.add(name, self.round, ranks=ranks, program=program, options=" ".join(options), **measured)

    def plan(self, name, *options):
        """Adds what build/plan predicts that a rank keeps this way with blocks recomputed."""
        plan = json.loads(m.output(make("build/plan"), *options, "--device", "cpu" if self.device == "cpu" else "gpu",
                                   "--json"))
        way = next((way for way in plan["ways"] if way["name"] == name), None) or m.fail(f"build/plan has no line for {name}")
        self.d.add(name, program="plan", ranks=plan["ranks"], parameters=plan["model"]["parameters"],
                   memory=way["bytes_recomputed"]["total"], sent=way["sent_per_step"])


def device():
    """cuda where nvcc and a GPU are there, unless DEVICE says otherwise."""
    has_gpu = shutil.which("nvcc") and m.ask("nvidia-smi -L") is not None
    return m.environ("DEVICE", "cuda" if has_gpu else "cpu")


def results(name, o): return Path(o.into or f"build/experiments/{name}{'.quick' * o.quick}.jsonl")


def answer(name, o):
    """Runs an experiment that has a page, and prints its answer. The results of an interrupted one would be incomplete, so they
    reach their place only at the end."""
    e, into = pages.load(name), results(name, o)
    runs, others = Runs(name, e, o, device()), m.Others()
    e.runs(runs)
    note_others(runs.d, others)
    runs.d.write(into)
    print(f"{e.TITLE}\n\n" + "\n".join(pages.answer(e, m.Results.read(into))), flush=True)
    m.note(f"results: {into}{'' if o.store else '; --store also keeps them under experiments/, with a page'}")


def store(name, o):
    """Copies an experiment's results to the folder from which its page is made."""
    folder = pages.HERE / name / "results"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(results(name, o), folder / f"{m.Results.read(results(name, o)).header['date']}.jsonl")


def answer_all(o):
    """Returns the experiments that have results, and those that failed."""
    have, failed = [], []
    os.makedirs("build/experiments", exist_ok=True)
    for name in pages.have_pages():
        done = Path(f"build/experiments/{name}.done")
        if not o.quick and done.exists() and results(name, o).exists(): m.note(f"{name} is done ({done})")
        else:
            try: answer(name, o)
            except m.Interrupted: raise
            except SystemExit as error:
                m.note(error)
                failed.append(name)
                continue
            if not o.quick: done.touch()
        have.append(name)
    return have, failed


def answers(doc, names):
    """Of these experiments that have pages, or of all."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive") # ranks may outnumber cores
    if len(names) == 1: doc = f"{pages.load(names[0]).__doc__.strip()}\n\n{doc}"
    else: doc += "\n\nThese make tables, and have options of their own:\n" + "\n".join(tables_in_words())
    o = m.options(doc, flags=("quick", "no_speed", "store", "pages"), rounds=0, out="",
                  placeholders={"rounds": "N", "out": "FOLDER"}, **m.STORED)
    known = vars(o)["from"]
    if o.more and not names: m.fail(f"{o.more[0]}: all experiments take only the options of --help")
    for option in ("into", "from"):
        if vars(o)[option] and len(names) != 1: m.fail(f"--{option} is for one experiment, not for {len(names) or 'all'}")
    if o.quick and o.store: m.fail("--quick measures nothing, so there is nothing to store: leave out --quick or --store")
    if o.pages: return pages.make(names, known, o.out)
    if known: return print("\n".join(pages.answer(pages.load(names[0]), m.Results.read(known))))
    for name in names: answer(name, o)
    names, failed = (names, []) if names else answer_all(o)
    if o.store:
        for name in names: store(name, o)
        pages.make()
    if failed: m.fail(f"failed, as said above: {' '.join(failed)}")


# ---- tables ----
def tables_in_words():
    """Their names, and the sentence that begins the docs of each."""
    found = [(name, pages.load(name)) for name in pages.names()]
    return [f"  {name:14}  {' '.join(re.split('[.:] |[.:]$', e.__doc__.strip().partition(chr(10) * 2)[0])[0].split())}"
            for name, e in found if not hasattr(e, "TITLE")]


def table(name, more=True, placeholders={}, least={}, folder="build; make builds them", starts_ranks=True):
    """Measures a table, or reads the file that --from names, and prints it. Below its doc stands what the environment says: the
    program or its folder, how ranks are started. Before it measures, the program must be there (o.program), and as many ranks
    can be started as --ranks or --stages say at the most. What was measured until somebody stops it is shown if measure()
    returns."""
    e = pages.load(name)
    program = getattr(e, "PROGRAM", "")
    path = program if "/" in program else f"build/train_gpt2_{program}"
    where = f"PROGRAM  default {path}    " if program else f"BUILD   folder of the programs (default {folder})    " * bool(folder)
    others = "\nAll other options are those of the programs." if more else ""
    doc = f"{e.__doc__}\n\n{where}MPIRUN  how to start ranks (dev/on_ranks.sh){others}"
    o = m.options(doc, more=more, placeholders=placeholders, least={"steps": (2, "the first is not counted")} | least,
                  **getattr(e, "OPTIONS", {}), **m.STORED)
    if hasattr(e, "check"): e.check(o)
    file, status = vars(o)["from"], 0
    d = m.Results.read(file) if file else m.Results(m.header())
    if d.header.get("table") != name: m.fail(f"{file} has no results of {name}")
    if not file:
        o.program = program and m.need(m.environ("PROGRAM", path))
        if starts_ranks: m.ranks_can_start(most_ranks(o))
        others = m.Others()
        status = e.measure(d, o)
        note_others(d, others)
        d.write(o.into or f"build/bench/{name}.jsonl")
    e.show(d, o)
    if hasattr(e, "TRUST") and (warning := d.busy(e.TRUST)): print(f"\n{warning}")
    return status


def most_ranks(o):
    found = next((vars(o)[name] for name in ("ranks", "stages") if name in vars(o)), 2)
    return max(found) if isinstance(found, list) else found


# ---- the command ----
def main(doc):
    known = pages.names()
    names = [*itertools.takewhile(known.__contains__, sys.argv[1:])]
    first = sys.argv[1 + len(names):][:1]
    if not names and first and not first[0].startswith("-"):
        m.fail(f"there is no experiment '{first[0]}'; there are {' '.join(known)}")
    tables = [name for name in names if not hasattr(pages.load(name), "TITLE")]
    sys.argv = [tables[0] if tables else "experiments", *sys.argv[1 + len(names):]]
    if len(names) > 1 and tables: m.fail(f"{tables[0]} makes a table, which has options of its own: run it alone")
    if not tables: return answers(doc, names)
    e = pages.load(tables[0])
    sys.exit(e.main() if hasattr(e, "main") else table(tables[0], **getattr(e, "SETTINGS", {})))
