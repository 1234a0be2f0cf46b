"""Programs: whether they are there, how ranks are started, how they are run and timed."""
import ctypes, functools, itertools, os, re, shutil, signal, subprocess, sys, threading, time
from pathlib import Path
from dev.lib.runs import Run
from dev.lib.script import ROOT, ask, environ, fail, note, work, words

REFERENCE = "test/reference"
TOKENS = f"{REFERENCE}/tokens.bin"
# The training run that test/reference/make_reference.py did with PyTorch.
PYTORCH = f"""--init-from {REFERENCE}/initial --data {TOKENS} --val-data= --seq-len 32 --batch-size 16 --total-batch-size 512
    --steps 20 --lr 3e-3 --warmup-steps 5 --lr-schedule cosine --final-lr-fraction 0.1 --weight-decay 0.1 --beta1 0.9 --beta2 0.95
    --eps 1e-5 --grad-clip 1.3 --seed 42 --eval-every 0 --sample-every 0"""
DATA, SMALL = f"--data {TOKENS}", "--layers 2 --channels 32 --heads 2" # SMALL: for --quick
QUIET = "--val-data= --sample-every 0"
SIZES = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}


def need(path, make=None):
    """A program that must be there."""
    if not os.access(path, os.X_OK): fail(f"there is no {path}; make {make or os.path.basename(path)}")
    return str(path)


def built(program):
    return need(f"{environ('BUILD', 'build')}/train_gpt2_{program}")


def on_ranks_sh(script, *arguments, **settings):
    """Runs a line of sh after dev/on_ranks.sh, which decides how ranks are started."""
    script = f'fail() {{ echo "error: $*" >&2; exit 1; }}; . dev/on_ranks.sh; {script}'
    return subprocess.run(["sh", "-c", script, "sh", *map(str, arguments)], cwd=ROOT, text=True, **settings)


@functools.cache
def launcher(ranks=None):
    """The words that start so many ranks of the program behind them, for root as for others; without a number, -np is to follow."""
    found = on_ranks_sh('ranks_launcher "$1"; echo "$launcher"', ranks or 99, stdout=subprocess.PIPE).stdout.split()
    return (*found, "-np", str(ranks)) if ranks else (*found,)


def ranks_can_start(ranks, quiet=False):
    """Says how ranks are started; ends the script if so many that do nothing cannot be."""
    run = on_ranks_sh('ranks_can_start "$1"', ranks, stderr=subprocess.PIPE)
    if run.returncode or not quiet: sys.stderr.write(run.stderr)
    if run.returncode: sys.exit(run.returncode)


def start(command, **settings):
    """Starts a program, which dies with this script whatever ends that."""
    try: return subprocess.Popen(command, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL), **settings)
    except OSError as error: fail(f"{command[0]} cannot be started: {error.strerror}")


def end(process):
    """Ends a program, the ranks with their launcher."""
    process.terminate()
    try: process.wait(20)
    except subprocess.TimeoutExpired: process.kill()


def execute(command, log, threads=1, until=None):
    """Runs a command to its end, or until() it has done enough; returns its status. It ends with this script."""
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with open(log, "w") as out, start(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env) as process:
        try:
            while True:
                try: return process.wait(0.5 if until else None)
                except subprocess.TimeoutExpired:
                    if until(): break
        except BaseException:
            end(process)
            raise
        end(process)
        return 0


def output(*command):
    """What a command prints; it must succeed."""
    said = ask(*command)
    return said if said is not None else fail(f"{command[0]} failed")


def compiled(source, binary, options):
    """Compiles a helper program; false if that fails."""
    return ask(environ("CC", "cc"), options, source, "-o", [binary], environ("LDFLAGS", ""), "-ldnnl -lm") is not None


def peak_program(folder):
    """dev/kernels/peak.c, which measures what the processor and its memory can do, compiled into a folder."""
    flags = "-std=c11 -O3 -march=native -ffp-contract=off -fopenmp"
    if compiled("dev/kernels/peak.c", folder / "peak", flags): return folder / "peak"
    fail("dev/kernels/peak.c cannot be built; make doctor lists what is missing")


def failed(name, log):
    """Ends the script with the last words of a program."""
    note("\n".join(Path(log).read_text(errors="replace").splitlines()[-20:]))
    fail(f"{name} failed")


def train(name, program, *arguments, ranks=None, out=None, threads=1, until=None, refused=False):
    """A run of a training program, on so many ranks if they are given. One that fails ends this script, unless it is out of memory
    and that is what it is refused for: then the result is why. until: it ends after so many steps, without a checkpoint."""
    out = Path(out or work() / "out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    metrics, log = out / "metrics.jsonl", out / "log"

    def done(): return metrics.exists() and f'\n{{"step":{until},' in metrics.read_text()
    command = words([*(launcher(ranks) if ranks else []), program], *arguments, "--out", out)
    if execute(command, log, threads, until and done) and not done() or not metrics.exists():
        why = re.search(r"error: (out of memory: .*?)(?:  \[|$)", log.read_text(errors="replace"), re.M)
        return why[1] if refused and why else failed(name, log)
    for folder in out.glob("step_*"): shutil.rmtree(folder)
    return Run(out, log)


def most_memory(process):
    """The most memory a process has held since it became this program, in bytes; None if it has ended. getrusage(2)'s ru_maxrss would
    begin at what the script that started it holds."""
    try: status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError: return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.M) # a zombie has no such line
    return found and int(found[1]) * 1024


class Timed:
    """How long a program's steps take and the most memory it held, measured from outside, so that one clock times every program,
    whatever it reports itself. A step ends when the program prints a line that begins with "step "; it must do so at once. After
    warmup of these (at least 1: the first ends a step whose beginning nobody saw) steps more are timed; then the program is killed.
    error: why there are none."""

    def __init__(self, command, warmup, steps, log=os.devnull, limit=None, **settings):
        ends, last, self.error, self.rss = [], [], "", 0
        with start([*map(str, command)], stdout=subprocess.PIPE, **settings) as process, open(log, "wb") as file:
            late = threading.Event() # is set before the program ends, so whoever sees its end knows why
            timer = threading.Timer(limit or threading.TIMEOUT_MAX, lambda: (late.set(), os.kill(process.pid, signal.SIGKILL)))
            timer.daemon = True # a signal may come before it can be cancelled, and Python would wait for it at its end
            try:
                timer.start()
                for line in process.stdout:
                    if line.startswith(b"step "):
                        ends.append(time.perf_counter())
                        self.rss = most_memory(process) or self.rss
                    file.write(line)
                    last = [*last[-20:], line.decode(errors="replace")]
                    if len(ends) == warmup + steps: break
            finally:
                timer.cancel()
                process.kill()
        if len(ends) < warmup + steps:
            ended = f"{command[0]} ended after {len(ends)} of {warmup + steps} steps; its last words:\n{''.join(last)}"
            self.error = f"not done after {limit} s" if late.is_set() else ended
        self.ms = [1e3 * (b - a) for a, b in itertools.pairwise(ends)][warmup - 1:]


@functools.cache
def inputs():
    """The program that dev/kernels/inputs.c makes. INPUTS names a compiled one, for machines without a compiler."""
    program = environ("INPUTS", str(work() / "inputs"))
    compile_it = environ("CC", "cc"), "-std=c11 -O3 -fopenmp dev/kernels/inputs.c -o", [program], "-lm"
    if not os.path.exists(program) and ask(*compile_it) is None: fail("dev/kernels/inputs.c cannot be built")
    return program


@functools.cache
def random_tokens():
    """A file with enough random tokens to train GPT-2: test/reference/tokens.bin is too short for its context."""
    output(inputs(), "tokens", work() / "tokens.bin")
    return work() / "tokens.bin"


def sizes_of(model):
    """Layers, heads and channels of a named model; dN has N, N and 64 N."""
    if re.fullmatch(r"d[1-9]\d?", model): return int(model[1:]), int(model[1:]), 64 * int(model[1:])
    return SIZES.get(model) or fail(f"there is no model '{model}'; there are {', '.join(SIZES)} and dN")
