"""The command `python3 -m experiments`: runs what an experiment asks for, stores the results, and prints its answer.

experiments/NAME.py begins with what it asks, which --help shows. It defines measure(x), which asks x, a Runs, for each run. If it
has a page, pages.py says what makes it; if not, show(d, o) prints a table of its results. pages.DEFAULTS lists what else it may
define."""
import itertools, json, os, re, shutil, subprocess, sys
from pathlib import Path
import dev.lib as m
from dev.lib import pages

PAGE_OPTIONS = dict(flags=("quick", "no_speed", "store", "pages"), rounds=0, out="", placeholders={"rounds": "N", "out": "FOLDER"})


def note_others(d, others):
    """Keeps what other programs used meanwhile, unless ranks were started in another way: those of a cluster are no children of
    this script, and would count as others."""
    if not os.environ.get("MPIRUN"): d.header["others_percent"] = others.percent()


# ---- runs ----
def rounded(x):
    return float(f"{x:.4g}") if x % 1 else int(float(f"{x:.4g}"))


def summary(name, run, speed):
    """What a page needs of a run: times are medians over its steps without the first, bytes those of the last step, the shares of a
    step the program's own diagnosis, means of its ranks. A run that keeps other bytes than it predicted is an error."""
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


def device():
    """cuda where nvcc and a GPU are there, unless DEVICE says otherwise."""
    has_gpu = shutil.which("nvcc") and m.ask("nvidia-smi -L") is not None
    return m.environ("DEVICE", "cuda" if has_gpu else "cpu")


class Runs:
    """The runs of an experiment, as its file asks for them. o: the options; d: the results."""
    def __init__(self, name, e, o):
        self.name, self.o, self.quick, self.round, self.has_page = name, o, vars(o).get("quick"), 1, bool(e.TITLE)
        self.rounds = 1 if self.quick else vars(o).get("rounds") or e.ROUNDS or 1
        self.speed, self.device = True, device() if self.has_page else e.DEVICE
        for program in e.NEEDS: make(self.program(program), self.device, program.partition(":")[2])
        header = m.header(self.device) | {"table": name}
        if self.has_page:
            self.speed = not o.no_speed and not e.BYTES_ONLY_RUNS
            header |= {"device": self.device, "quick": "yes" * o.quick, "speed": "yes" * self.speed}
        self.d, self.into = m.Results(header), results(name, o)

    def program(self, program):
        """The path of PROGRAM[:PRECISION]. Tables take what is there, in the folder that BUILD names."""
        if "/" in str(program): return program
        if not self.has_page: return m.built(program)
        program, _, precision = program.partition(":")
        variant = "-".join(filter(None, (self.device * (self.device != "cpu"), precision)))
        return "/".join(filter(None, ("build", variant, f"train_gpt2_{program}")))

    def in_turns(self):
        for self.round in range(1, self.rounds + 1): yield self.round

    def train(self, name, ranks, program, *options, launched=False, **settings):
        """One run. launched: also one rank is started by the launcher; settings are those of m.train()."""
        m.note(f"  {self.name}{f', round {self.round}' if max(self.rounds, self.round) > 1 else ''}: {name}")
        settings = {"threads": m.environ("OMP_NUM_THREADS", 1)} | settings
        return m.train(f"{name} on {ranks} rank{'s' * (ranks > 1)}", self.program(program), m.QUIET, "--eval-every 0", *options,
                       ranks=ranks if ranks > 1 or launched else None, **settings)

    def run(self, name, ranks, program, *options, keep=None, **settings):
        """One run, whose record is added to the results: what keep, or summary() for a page, makes of it. until: it ends after so
        many steps, so that a large model writes no checkpoint; refused: it may be out of memory. The options that
        are given to the script come last."""
        options = m.words(*options, self.o.more)
        for path in options: # the training data first: the same command makes the validation data
            if re.fullmatch(r"data/.*\.bin", path) and not Path(path).exists(): make(path)
        run = self.train(name, ranks, program, options, **settings)
        measured = {"refused": run} if isinstance(run, str) else keep(run) if keep else summary(name, run, self.speed)
        self.d.add(name, self.round, **dict(ranks=ranks, program=str(program), options=" ".join(options)) | measured)
        return run

    def plan(self, name, *options):
        """Adds what build/plan predicts that a rank keeps this way with blocks recomputed."""
        plan = json.loads(m.output(make("build/plan"), *options, "--device", "cpu" if self.device == "cpu" else "gpu",
                                   "--json"))
        way = next((way for way in plan["ways"] if way["name"] == name), None) or m.fail(f"build/plan has no line for {name}")
        self.d.add(name, program="plan", ranks=plan["ranks"], parameters=plan["model"]["parameters"],
                   memory=way["bytes_recomputed"]["total"], sent=way["sent_per_step"])


# ---- an experiment ----
def results(name, o): return Path(o.into or f"build/experiments/{name}{'.quick' * bool(vars(o).get('quick'))}.jsonl")


def most_ranks(o):
    found = next((vars(o)[name] for name in ("ranks", "stages") if name in vars(o)), 2)
    return max(found) if isinstance(found, list) else found


def show(e, d, o):
    if e.TITLE: return print(f"{e.TITLE}\n\n" + "\n".join(pages.answer(e, d)), flush=True)
    e.show(d, o)
    if e.TRUST and (warning := d.busy(e.TRUST)): print(f"\n{warning}")


def answer(name, o):
    """Runs an experiment, stores its results and prints its answer; returns the status. The results of an interrupted one would
    be incomplete, so they reach their place only at the end, unless it shows parts."""
    e = pages.load(name)
    if e.PROGRAM: o.program = m.need(m.environ("PROGRAM", e.PROGRAM))
    if not e.TITLE and e.STARTS_RANKS: m.ranks_can_start(most_ranks(o))
    x, others = Runs(name, e, o), m.Others()
    try: status = e.measure(x)
    except m.Interrupted:
        if not e.SHOWS_PARTS: raise
        m.note("interrupted")
        x.d.header["stopped"] = f", stopped in round {x.round}"
        status = 1
    note_others(x.d, others)
    x.d.write(results(name, o))
    show(e, m.Results.read(results(name, o)), o)
    if e.TITLE:
        m.note(f"results: {results(name, o)}{'' if o.store else '; --store also keeps them under experiments/, with a page'}")
    return status


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


# ---- the command ----
def tables_in_words():
    """Their names, and the sentence that begins the docs of each."""
    found = [(name, pages.load(name)) for name in pages.names()]
    return [f"  {name:14}  {' '.join(re.split('[.:] |[.:]$', e.__doc__.strip().partition(chr(10) * 2)[0])[0].split())}"
            for name, e in found if not e.TITLE]


def help_of(doc, e):
    """Below the doc of a table stands what the environment says: the program or its folder, how ranks are started."""
    if not e: return f"{doc}\n\nThese make tables and take options of their own:\n" + "\n".join(tables_in_words())
    if e.TITLE: return f"{e.__doc__.strip()}\n\n{doc}"
    where = f"BUILD   folder of the programs (default {e.FOLDER})    " * bool(e.FOLDER)
    if e.PROGRAM: where = f"PROGRAM  default {e.PROGRAM}    "
    others = "\nAll other options are those of the programs." * e.MORE
    return f"{e.__doc__}\n\n{where}MPIRUN  how to start ranks (dev/on_ranks.sh){others}"


def options_of(doc, e):
    """Those of an experiment, or of all that have pages."""
    if not e or e.TITLE: return m.options(help_of(doc, e), **PAGE_OPTIONS, **m.STORED)
    return m.options(help_of(doc, e), e.FLAGS, {"steps": (2, "the first is not counted")} | e.LEAST, e.MORE, e.PLACEHOLDERS,
                     **e.OPTIONS,
                     **({"rounds": e.ROUNDS} if e.ROUNDS else {}), **m.STORED)


def main(doc):
    known = pages.names()
    names = [*itertools.takewhile(known.__contains__, sys.argv[1:])]
    first = sys.argv[1 + len(names):][:1]
    if not names and first and not first[0].startswith("-"):
        m.fail(f"there is no experiment '{first[0]}'; there are {' '.join(known)}")
    tables = [name for name in names if not pages.load(name).TITLE]
    if len(names) > 1 and tables: m.fail(f"{tables[0]} makes a table, which has options of its own: run it alone")
    sys.argv = [(names or ["experiments"])[0], *sys.argv[1 + len(names):]]
    e = pages.load(names[0]) if len(names) == 1 else None
    o = options_of(doc, e)
    if e: e.check(o)
    file = vars(o)["from"]
    if tables and not file: sys.exit(answer(names[0], o))
    if not tables:
        check_pages(names, o)
        if o.pages: return pages.make(names, file, o.out)
    if file:
        d = m.Results.read(file)
        if names[0] not in (d.header.get("table"), d.header.get("experiment")): m.fail(f"{file} has no results of {names[0]}")
        return show(e, d, o)
    for name in names: answer(name, o)
    names, failed = (names, []) if names else answer_all(o)
    if o.store:
        for name in names: store(name, o)
        pages.make()
    if failed: m.fail(f"failed, as said above: {' '.join(failed)}")


def check_pages(names, o):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive") # ranks may outnumber cores
    if o.more and not names: m.fail(f"{o.more[0]}: all experiments take only the options of --help")
    for option in ("into", "from"):
        if vars(o)[option] and len(names) != 1: m.fail(f"--{option} is for one experiment, not for {len(names) or 'all'}")
    if o.quick and o.store: m.fail("--quick measures nothing, so there is nothing to store: leave out --quick or --store")
