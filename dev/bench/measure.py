"""What every benchmark, table and experiment here shares: options, runs of programs, results as JSON, the machine in words, tables
in Markdown.

A script says which programs run with which options, calls train() for each, adds what it needs of a run to Results, and makes its
page from these alone. So a page can be made again from a file: --into FILE keeps the results there, --from FILE runs nothing."""
import argparse, atexit, ctypes, functools, itertools, json, os, re, shlex, shutil, signal, subprocess, sys, tempfile, threading, time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "test/reference"
TOKENS = f"{REFERENCE}/tokens.bin"
# The training run that test/reference/make_reference.py did with PyTorch.
PYTORCH = f"""--init-from {REFERENCE}/initial --data {TOKENS} --val-data= --seq-len 32 --batch-size 16 --total-batch-size 512
    --steps 20 --lr 3e-3 --warmup-steps 5 --lr-schedule cosine --final-lr-fraction 0.1 --weight-decay 0.1 --beta1 0.9 --beta2 0.95
    --eps 1e-5 --grad-clip 1.3 --seed 42 --eval-every 0 --sample-every 0"""
QUIET = "--val-data= --sample-every 0"
SIZES = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}


class Interrupted(SystemExit):
    """Somebody has stopped this script."""


def fail(why):
    sys.exit(f"error: {why}")


def note(text):
    print(text, file=sys.stderr, flush=True)


def interrupt(*_):
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM: signal.signal(number, signal.SIG_IGN)
    raise Interrupted(1)


# ---- options ----
STORED = {"into": "", "from": ""} # where results go, and where they come from instead


def whole_number(option, text, least=1, why=""):
    if re.fullmatch(r"\d{1,9}", text) and int(text) >= least: return int(text)
    fail(f"{option} wants a whole number from {least} on, not '{text}'{': ' if why else ''}{why}")


def value_of(option, text, default, least):
    """The text as what the default is: a whole number, words, whole numbers, or text."""
    if isinstance(default, int): return whole_number(option, text, *least)
    if not isinstance(default, list): return text
    found = text.replace(",", " ").split() or fail(f"{option} is empty")
    return [whole_number(option, word, *least) if default and isinstance(default[0], int) else word for word in found]


def options(doc, flags=(), least={}, more=True, placeholders={}, **defaults):
    """Takes the script's own options out of the command line: numbers, lists or texts as their defaults are; flags have no value.
    `more` has all others, which are the programs', or is False if there may be none. least: {option: (the least number, why)}. Then
    the script continues in the repository's root, with a folder of its own for the time that it runs."""
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
        if signal.getsignal(number) != signal.SIG_IGN: signal.signal(number, interrupt) # nohup ignores one
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for flag in flags: parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true")
    for name, default in defaults.items():
        option, shown = f"--{name.replace('_', '-')}", " ".join(map(str, default)) if isinstance(default, list) else str(default)
        convert = functools.partial(value_of, option, default=default, least=least.get(name, (1,)))
        shown = placeholders.get(name) or (f'"{shown}"' if " " in shown else shown or "FILE")
        parser.add_argument(option, type=convert, default=default, metavar=shown)
    parser.error = fail
    o, o.more = parser.parse_known_args()
    if "--" in o.more: o.more.remove("--")
    if o.more and not more: fail(f"there is no option '{o.more[0]}'; --help lists them")
    os.chdir(ROOT)
    return o


def script(doc, measure, show, check=None, more=True, placeholders={}, least={}, program="", folder="build; make builds them",
           starts_ranks=True, **defaults):
    """A script that makes a table: its results are measured by measure(results, options) and stored, or are those of the file that
    --from names; show(results, options) prints them. check(options) ends the script if they cannot be meant. Below the doc stands what
    the environment says: the program or its folder, how ranks are started. Before it measures, the program must be there (o.program),
    and as many ranks can be started as --ranks or --stages say at the most."""
    name, path = Path(sys.argv[0]).stem, program if "/" in program else f"build/train_gpt2_{program}" # of a training program
    where = f"PROGRAM  default {path}    " if program else f"BUILD   folder of the programs (default {folder})    " * bool(folder)
    others = "\nAll other options are those of the programs." if more else ""
    o = options(f"{doc}\n\n{where}MPIRUN  how to start ranks (dev/on_ranks.sh){others}", more=more, placeholders=placeholders,
                least={"steps": (2, "the first is not counted")} | least, **defaults, **STORED)
    if check: check(o)
    file = vars(o)["from"]
    d = Results.read(file) if file else Results(header())
    if d.header.get("table") != name: fail(f"{file} has no results of {name}")
    if not file:
        o.program = program and need(environ("PROGRAM", path))
        if starts_ranks: ranks_can_start(most_ranks(o))
        measure(d, o)
        d.write(o.into or f"build/bench/{name}.jsonl")
    show(d, o)


def most_ranks(o):
    found = next((vars(o)[name] for name in ("ranks", "stages") if name in vars(o)), 2)
    return max(found) if isinstance(found, list) else found


def option(words, name, default=None):
    """The last value that a command line gives an option."""
    return next((b for a, b in reversed([*itertools.pairwise(words)]) if a == name), default)


def environ(name, default):
    return os.environ.get(name) or default


def whole_environ(name, default, least=1):
    return whole_number(name, environ(name, str(default)), least)


@functools.cache
def work():
    """A folder that is removed when the script ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def inputs():
    """The program that dev/bench/inputs.c makes. INPUTS names a compiled one, for machines without a compiler."""
    program = environ("INPUTS", str(work() / "inputs"))
    if not os.path.exists(program) and ask(environ("CC", "cc"), "-std=c11 -O3 -fopenmp dev/bench/inputs.c -o", [program], "-lm") is None:
        fail("dev/bench/inputs.c cannot be built")
    return program


@functools.cache
def random_tokens():
    """A file with enough random tokens to train GPT-2: test/reference/tokens.bin is too short for its context."""
    output(inputs(), "tokens", work() / "tokens.bin")
    return work() / "tokens.bin"


# ---- programs ----
def words(*arguments):
    """Texts are split at blanks, lists are words as they are."""
    return [str(word) for a in arguments for word in (a.split() if isinstance(a, str) else a if isinstance(a, list) else [a])]


def need(path, make=None):
    """A program that must be there."""
    if not os.access(path, os.X_OK): fail(f"there is no {path}; make {make or os.path.basename(path)}")
    return str(path)


def built(program):
    return need(f"{environ('BUILD', 'build')}/train_gpt2_{program}")


def on_ranks_sh(script, *arguments, **settings):
    """Runs a line of sh after dev/on_ranks.sh, which decides how ranks are started."""
    script = f'fail() {{ echo "error: $*" >&2; exit 1; }}; . dev/on_ranks.sh; {script}'
    return subprocess.run(["sh", "-c", script, "sh", *map(str, arguments)], text=True, **settings)


@functools.cache
def launcher(ranks):
    """The words that start so many ranks of the program behind them."""
    return (*on_ranks_sh('ranks_launcher "$1"; echo "$launcher"', ranks, stdout=subprocess.PIPE).stdout.split(), "-np", str(ranks))


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


def ask(*command, **settings):
    """What a command prints, or None if it fails or is not there."""
    try: run = subprocess.run(words(*command), stdout=subprocess.PIPE, text=True, **settings)
    except OSError: return None
    return None if run.returncode else run.stdout


def output(*command):
    """What a command prints; it must succeed."""
    said = ask(*command)
    return said if said is not None else fail(f"{command[0]} failed")


def compiled(source, binary, options):
    """Compiles a helper program; false if that fails."""
    return ask(environ("CC", "cc"), options, source, "-o", [binary], environ("LDFLAGS", ""), "-ldnnl -lm") is not None


def failed(name, log):
    """Ends the script with the last words of a program."""
    note("\n".join(Path(log).read_text(errors="replace").splitlines()[-20:]))
    fail(f"{name} failed")


class Run:
    """What a training program said: its log, and the lines of its metrics.jsonl."""

    def __init__(self, out, log=None):
        text = (Path(out) / "metrics.jsonl").read_text()
        # a run that was ended has a torn last line
        self.lines = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines() if line.strip()]
        self.about = next((line["run"] for line in self.lines if "run" in line), {})
        self.steps = [line for line in self.lines if "step" in line and "loss" in line]
        self.losses = [(line["step"], line["val_loss"]) for line in self.lines if "val_loss" in line]
        self.diagnosis = next((line["diagnosis"] for line in self.lines if "diagnosis" in line), {})
        self.log = Path(log).read_text(errors="replace") if log else ""

    def values(self, key):
        """A field of the steps, without the first: it also touches memory for the first time."""
        return [step[key] for step in self.steps[1:]]

    def last(self, key):
        return self.steps[-1][key]

    def said(self, pattern):
        """What the groups of a pattern found in the log."""
        found = re.search(pattern, self.log, re.M)
        return found[1] if found else ""

    def kinds(self):
        """The bytes that a rank predicted, by what they are for; they are those that it kept, or it would have failed."""
        return {kind: n for kind, n in self.about["predicted_bytes"].items() if kind != "state on the host"}

    @property
    def shape(self):
        """What the formulas of a table need of the model and of a micro-batch, and the model in words. width: bytes of a number."""
        settings = self.about["options"]
        return {key: self.about[key] for key in ("layers", "heads", "channels", "vocabulary", "context")} | dict(
            model=self.said(r"^model +(.*)"), width=4 if self.about["precision"] == "fp32" else 2, B=settings["batch-size"],
            T=settings["seq-len"], chunks=settings.get("chunks", 1))

    @property
    def speeds(self):
        """Of the steps but the first; waits: the percentage of a step in which nothing is computed for want of communication."""
        found = {key: self.values(key) for key in ("tokens_per_s", "step_ms", "comm_exposed_ms")}
        return found | {"waits": [100 * wait / ms for wait, ms in zip(found["comm_exposed_ms"], found["step_ms"])]}


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


def operations(trace, waits="wait"):
    """(rank, part of a step, operation, step or None, microsecond of its issue) for each communication of a timeline, in order.
    It belongs to the part in which it was issued, or to "before"; what matches waits is no part. In the file its slice comes
    right before the moment of its issue (dev/tools/overlap.py reads the same)."""
    parts, issued, last = {}, [], None
    for event in json.loads(Path(trace).read_text())["traceEvents"]:
        name, rank = event["name"], event["pid"]
        if event["ph"] == "X" and event["tid"] == 0 and not re.match(waits, name):
            parts.setdefault(rank, []).append((event["ts"], name))
        if event["ph"] == "X" and event["tid"] == 1: last = event
        if event["ph"] == "s": issued.append((rank, last["name"], last["args"].get("step"), event["ts"]))
    for rank, name, step, when in issued:
        begun = [part for part in parts.get(rank, []) if part[0] <= when]
        yield rank, max(begun, key=lambda part: part[0])[1] if begun else "before", name, step, when


def operation(name):
    """What an operation's name says: its kind, its elements, and the bytes of each."""
    elements, kind = re.search(r"\((\d+) (\w+)\)", name), name.split(" ")[0]
    return (kind, int(elements[1]), {"fp64": 8, "fp32": 4, "byte": 1}.get(elements[2], 2)) if elements else (kind, 0, 2)


class Timed:
    """How long a program's steps take and the most memory it held, measured from outside, so that one clock times every program,
    whatever it reports itself. A step ends when the program prints a line that begins with "step "; it must do so at once. After
    warmup of these (at least 1: the first ends a step whose beginning nobody saw) steps more are timed; then the program is killed.
    error: why there are none."""

    def __init__(self, command, warmup, steps, log=os.devnull, limit=None, **settings):
        ends, last, self.error = [], [], ""
        with start([*map(str, command)], stdout=subprocess.PIPE, **settings) as process, open(log, "wb") as file:
            timer = threading.Timer(limit or threading.TIMEOUT_MAX, os.kill, [process.pid, signal.SIGKILL])
            timer.daemon = True # a signal may come before it can be cancelled, and Python would wait for it at its end
            try:
                timer.start()
                for line in process.stdout:
                    if line.startswith(b"step "): ends.append(time.perf_counter())
                    file.write(line)
                    last = [*last[-20:], line.decode(errors="replace")]
                    if len(ends) == warmup + steps: break
            finally:
                late = not timer.is_alive()
                timer.cancel()
                os.kill(process.pid, signal.SIGKILL) # Popen's own kill would take the status, and with it the memory
                process.returncode, usage = os.wait4(process.pid, 0)[1:]
        if len(ends) < warmup + steps:
            ended = f"{command[0]} ended after {len(ends)} of {warmup + steps} steps; its last words:\n{''.join(last)}"
            self.error = f"not done after {limit} s" if late else ended
        self.ms, self.rss = [1e3 * (b - a) for a, b in itertools.pairwise(ends)][warmup - 1:], usage.ru_maxrss * 1024


# ---- the machine ----
def cores():
    return os.cpu_count()


def busy_percent():
    """The percentage of the processor that was busy during a second in which this script only waited."""
    def times():
        try: numbers = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except OSError: return 0, 0
        return sum(numbers), numbers[3] + numbers[4]
    (all1, idle1), _, (all2, idle2) = times(), time.sleep(1), times()
    return int(100 - 100 * (idle2 - idle1) / (all2 - all1)) if all2 > all1 else 0


def machine_in_words(device="cpu"):
    info, memory = Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text()
    name = re.search(r"^model name[^:]*: *(.*)", info, re.M)
    name = re.sub(" +", " ", re.sub(r"\(R\)|\(TM\)| CPU.*", "", name[1])) if name else "unknown"
    gpus = ask("nvidia-smi --query-gpu=name --format=csv,noheader") if device != "cpu" else None
    return (f"{cores()} cores ({name}{', AVX-512' * bool(re.search(r'avx512f', info))}), "
            f"{int(re.search(r'MemTotal: *([0-9]+)', memory)[1]) * 1024 / 1e9:.0f} GB of memory"
            + "".join(f", {len([*group])} {gpu} GPU" for gpu, group in itertools.groupby(sorted((gpus or "").splitlines()))))


def commit():
    return (ask("git rev-parse --short HEAD", cwd=ROOT, stderr=subprocess.DEVNULL) or "unknown").strip()


# ---- results: a file with a header line, and a line for each run and round ----
class Results:
    def __init__(self, header, file=""):
        self.header, self.file, self.rounds = header, file, {}

    @classmethod
    def read(cls, file):
        results = cls(None, file)
        try: text = Path(file).read_text()
        except OSError as error: fail(f"{file}: {error.strerror}")
        for number, line in enumerate(text.splitlines(), 1):
            try: record = json.loads(line)
            except ValueError: fail(f"{file}:{number}: this line is no JSON object; a new run makes the file anew")
            if record.get("record") == "header": results.header = record
            elif "run" not in record: fail(f"{file}:{number}: this line names no run")
            elif record["round"] in results.rounds.get(record["run"], {}):
                fail(f"{file}:{number}: round {record['round']} of {record['run']} is there twice")
            else: results.add(**record)
        if not results.header: fail(f'{file}: there is no line with "record":"header", so date and machine are unknown')
        return results

    def add(self, run, round=1, **fields):
        self.rounds.setdefault(run, {})[round] = {"run": run, "round": round} | fields

    def write(self, file):
        """All of it or nothing: an interrupted script leaves the file as it was."""
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        lines = [self.header, *(record for rounds in self.rounds.values() for record in rounds.values())]
        new = Path(f"{file}.new")
        new.write_text("".join(json.dumps(line, separators=(",", ":"), sort_keys=True) + "\n" for line in lines))
        new.replace(file)

    def runs(self, pattern=""):
        return [run for run in self.rounds if re.search(pattern, run)]

    def each_round(self, run):
        if run not in self.rounds: fail(f"{self.file}: there is no run '{run}'; a new run makes the file anew")
        return [self.rounds[run][number] for number in sorted(self.rounds[run])]

    def first(self, run):
        return self.each_round(run)[0]

    def records(self):
        """Of each run the first round."""
        return [self.first(run) for run in self.rounds]

    def field(self, record, key):
        """A number of a record, of a list the median; key may be "shares/computing"."""
        value = record
        for part in key.split("/"): value = value.get(part) if isinstance(value, dict) else None
        if value is None: fail(f"{self.file}: run '{record['run']}' has no {key}")
        return median(value) if isinstance(value, list) else value

    def value(self, run, key):
        """The median over the rounds."""
        return median(self.field(record, key) for record in self.each_round(run))

    def all(self, run, key):
        """The values of all steps of all rounds."""
        return [x for record in self.each_round(run) for x in record[key]]

    def ratio(self, run, base, key):
        """The ratio to another run in each round: the median, the least and the most."""
        bases = {record["round"]: record for record in self.each_round(base)}
        ratios = [self.field(record, key) / self.field(bases[record["round"]], key) for record in self.each_round(run)
                  if record["round"] in bases]
        if not ratios: fail(f"{self.file}: '{run}' and '{base}' have no round in common")
        return median(ratios), min(ratios), max(ratios)


    def print_table(self, *rows, trust=""):
        """Prints Markdown. trust: what nobody should trust if other programs ran."""
        print(table(*rows), end="")
        if trust: self.say_if_busy(trust)

    def say_if_busy(self, what):
        if self.header["busy_percent"] > 5:
            print(f"\nOther programs used {self.header['busy_percent']} % of this machine before the first run: do not trust {what}.")


def header(device="cpu"):
    return {"record": "header", "table": Path(sys.argv[0]).stem, "arguments": shlex.join(sys.argv[1:]), "commit": commit(),
            "environ": {name: os.environ[name] for name in ("PROGRAM", "BUILD") if name in os.environ},
            "date": time.strftime("%F"), "machine": machine_in_words(device), "cores": cores(), "busy_percent": busy_percent()}


def sizes_of(model):
    """Layers, heads and channels of a named model; dN has N, N and 64 N."""
    if re.fullmatch(r"d[1-9]\d?", model): return int(model[1:]), int(model[1:]), 64 * int(model[1:])
    return SIZES.get(model) or fail(f"there is no model '{model}'; there are {', '.join(SIZES)} and dN")


# ---- pages ----
def table(*rows, blank=""):
    """Markdown; the first row is the header. blank: what stands between bars and words, and in an empty cell."""
    lines = [[*map(str, row)] for row in (rows[0], [f"{blank}---{blank}"] * len(rows[0]), *rows[1:])]
    lines = [[cell if cell.strip().startswith("---") else f" {cell} " if cell else f" {blank}" for cell in line] for line in lines]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def padded(vocabulary):
    """The rows of an embedding."""
    return (vocabulary + 127) // 128 * 128


def picture(file, svg):
    """Writes what --svg wants, if it is given."""
    if not file: return
    Path(file).write_text(svg())
    print(f"\npicture: {file}")


