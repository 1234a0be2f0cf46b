"""run.py - runs experiments and prints their answers.

  python3 experiments/run.py [EXPERIMENT...] [OPTION...] [-- OPTION OF THE PROGRAMS...]

It uses make to build the programs that an experiment needs. Results and pages under experiments/ are written only with --store.

Without an EXPERIMENT, all of them run, one after another. A finished experiment leaves build/experiments/NAME.done and is skipped
the next time, so you can interrupt this and start it again; remove these files to start over. If an experiment fails, for example
because it needs more memory than there is, the others still run. --quick leaves no such file.

--store         also store the results in experiments/NAME/results/DATE.jsonl, and update the pages
--quick         a small model and one round, in seconds: shows that the script works, and measures nothing
--rounds N      how often each run is repeated, in turns (each experiment has its default)
--no-speed      leave speeds out, because the machine is busy; memory and bytes do not depend on that
--into FILE     where the results go; default build/experiments/NAME.jsonl, with --quick build/experiments/NAME.quick.jsonl
-- OPTION...    further options of the programs, which overrule the script's

DEVICE=cuda|cpu    which build; default: cuda where nvcc and a GPU are there
OMP_NUM_THREADS    threads of a rank on the CPU (default 1, for one rank as for many)
MPIRUN             how to start ranks (dev/on_ranks.sh)"""
import json, os, shutil, subprocess, sys
from pathlib import Path
import report
from report import HERE, m


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


class Experiment:
    """The runs of an experiment, as its experiment.py asks for them."""

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


def run(name, o):
    """Runs an experiment and prints its answer. The results of an interrupted one would be incomplete, so they reach their place
    only at the end."""
    e, into = report.load(HERE / name), results(name, o)
    experiment = Experiment(name, e, o, device())
    e.runs(experiment)
    experiment.d.write(into)
    print(f"{e.TITLE}\n\n" + "\n".join(report.answer(e, report.Results.read(into))), flush=True)
    m.note(f"results: {into}{'' if o.store else '; --store also keeps them under experiments/, with a page'}")


def store(name, o):
    """Copies an experiment's results to the folder from which its page is made."""
    date = report.Results.read(results(name, o)).header["date"]
    (HERE / name / "results").mkdir(exist_ok=True)
    shutil.copy(results(name, o), HERE / name / "results" / f"{date}.jsonl")


def run_all(o):
    """Returns the experiments that have results, and those that failed."""
    have, failed = [], []
    os.makedirs("build/experiments", exist_ok=True)
    for name in sorted(path.parent.name for path in HERE.glob("*/experiment.py")):
        done = Path(f"build/experiments/{name}.done")
        if not o.quick and done.exists() and results(name, o).exists(): m.note(f"{name} is done ({done})")
        else:
            try: run(name, o)
            except m.Interrupted: raise
            except SystemExit as error:
                m.note(error)
                failed.append(name)
                continue
            if not o.quick: done.touch()
        have.append(name)
    return have, failed


def main():
    names = [word for word in sys.argv[1:] if (HERE / word / "experiment.py").exists()]
    if len(names) == 1 and {"-h", "--help"} & {*sys.argv}: print(report.load(HERE / names[0]).__doc__.strip(), end="\n\n")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive") # ranks may outnumber cores
    begin = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    more, sys.argv[begin:] = sys.argv[begin + 1:], []
    o = m.options(__doc__, flags=("quick", "no_speed", "store"), rounds=0, into="", placeholders={"rounds": "N"})
    unknown = [word for word in o.more if word not in names]
    if unknown:
        m.fail(f"{unknown[0]} is no experiment and no option; --help lists the options, and those of the programs come after --")
    names, o.more = o.more, more
    if o.into and len(names) != 1: m.fail(f"--into is for one experiment, not for {len(names) or 'all'}")
    if o.quick and o.store: m.fail("--quick measures nothing, so there is nothing to store: leave out --quick or --store")
    for name in names: run(name, o)
    names, failed = (names, []) if names else run_all(o)
    if o.store:
        for name in names: store(name, o)
        report.make()
    if failed: m.fail(f"failed, as said above: {' '.join(failed)}")


if __name__ == "__main__": main()
