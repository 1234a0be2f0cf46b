"""The suite's verbs: run a program on n ranks, read what it measured, compare runs, and expect errors.

A run is made once in a session, however many tests and workers ask for it: train() keeps it by its command line. Every path is
relative to the repository's root, where pytest runs."""
import fcntl, functools, hashlib, json, os, random, re, shlex, shutil, signal, socket, subprocess, sys, tempfile, time
from pathlib import Path
import numpy as np
import pytest
from dev.lib import PYTORCH, REFERENCE, ROOT, TOKENS, Metrics, launcher, tensors, words  # noqa: F401

FIELDS = ("loss", "grad_norm", "param_norm", "lr", "loss_scale", "tokens", "counted", "val_loss", "compression_error",
          "compression_norm_ratio",
          "compression_cosine") # of a run's metrics that are compared
DEVICE = "emulated" # of the programs of GPUs: emulated or, if --device says so (conftest.py), cuda

# A small model on the stored tokens: 32 sequences of 16 tokens a step in two micro-batches, 13 steps an epoch.
TINY = (f"--data {TOKENS} --val-data= --model d2 --heads 2 --channels 16 --seq-len 16 --batch-size 16 --total-batch-size 512 "
        "--steps 20 --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0")


def rest(*values, **options):
    """A row of a table of parameters that make test leaves to CI."""
    return pytest.param(*values, marks=pytest.mark.rest, **options)


# ---- programs ----
@functools.cache
def sanitizers():
    """Why programs with sanitizers cannot run here, as under some emulated processors and in some containers; "" if they can."""
    probe = "here=dev; . dev/components.sh; make_scratch; probe_sanitizer >why || case $? in 3) head -n 1 why ;; esac"
    place = once("sanitizers", lambda folder: (folder / "why").write_text(command("sh -c",
        [probe.replace("why", shlex.quote(str(folder / "said")))]).out))
    return (place / "why").read_text().strip()


def program(name, precision="fp32", device="cpu", debug=False):
    """The path of a built program: program("train_gpt2_zero", "bf16"), program("test/test_axes", debug=True). Fails if it is not
    there."""
    variant = [*[device] * (device != "cpu"), *[precision] * (precision != "fp32"), *["debug"] * debug]
    path = "/".join(["build", *["-".join(variant)] * bool(variant), name])
    if debug and sanitizers(): pytest.skip(f"sanitizers cannot run here: {sanitizers()}")
    if not (ROOT / path).exists():
        settings = f"{f'DEVICE={device} ' * (device != 'cpu')}PRECISION={precision}{' DEBUG=1' * debug}"
        pytest.fail(f"{path} is not built: make test-programs builds what make test runs, make {settings} {path} this one",
                    pytrace=False)
    return path


def make(*arguments, timeout=1200):
    """A make of its own, for programs that only one test needs. Makes of all workers take turns. Returns the last argument, its
    target."""
    with open(session() / "make.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = command("make", "--no-print-directory", *arguments, timeout=timeout)
    assert done.status == 0, done.said[-3000:]
    return arguments[-1]


# ---- runs ----
class Run(Metrics):
    """A command that has ended: status, out and err (str), said (both), folder (Path, what --out names, or None)."""

    def __init__(self, command, status, out, err, folder=None):
        super().__init__(folder)
        self.command, self.status, self.out, self.err = command, status, out, err

    def __repr__(self):
        return f"`{' '.join(map(str, self.command))}` ended with {self.status}:\n{self.said[-3000:]}"

    said = property(lambda self: self.out + self.err)


class Stored(Run):
    """A run of PyTorch's that test/reference has: Stored("ddp/ranks_4")."""

    def __init__(self, name):
        super().__init__(["PyTorch's", name], 0, "", "", ROOT / REFERENCE)
        self.name = name

    lines = functools.cached_property(lambda self: [json.loads(x)
                                                    for x in (self.folder / f"{self.name}.jsonl").read_text().splitlines()])

    def weights(self, step=None):
        return tensors(self.folder / f"{self.name}.safetensors")


def session():
    """The folder of this session, shared by its workers; conftest.py makes and removes it."""
    return Path(os.environ["SHARD_TEST_SESSION"])


def environment(ranks=1, strict=False, **more):
    """Of a program under test. Waits are passive, because models as small as these wait more than they compute. Each worker's
    mpirun makes its folder in a place of its own: those of Open MPI 4 that begin and end at one time in one place may remove each
    other's."""
    place = session() / f"mpi.{os.getpid()}"
    place.mkdir(exist_ok=True)
    place.chmod(0o1777) # some tests run a command as another user
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "BUILD", "OMP_NUM_THREADS")}
    env |= {"OMP_NUM_THREADS": "2" if ranks == 1 else "1", "OMP_WAIT_POLICY": "passive", "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_odls_base_sigkill_timeout": "0", "EMULATOR_DEBUG": "-g1",
            "ASAN_OPTIONS": "exitcode=99:detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "SHARD_LEAVE_SECONDS": "60",
            "SHARD_SAY_ONCE": "0", "OMPI_MCA_orte_tmpdir_base": str(place)}
    return env | ({"SHARD_COMM_STRICT": "1"} if strict else {}) | {k: str(v) for k, v in more.items()}


# A rank's output goes into files of its own, because launchers split and interleave the lines of several ranks. mpirun kills all
# ranks as soon as one has ended with an error. So each tells its end when all have ended, or a minute after its own, and then the
# first rank that failed tells it alone: if several do at one time, Open MPI 5.0.7 may crash, or wait for ever. The
# shell outlives USR1, which mpirun sends to it as well.
TOGETHER = """trap : USR1; exec >"$0/out.$OMPI_COMM_WORLD_RANK" 2>"$0/err.$OMPI_COMM_WORLD_RANK"
"$@"; status=$?; echo $status >"$0/ended.$OMPI_COMM_WORLD_RANK"; [ $status != 0 ] || exit 0
for i in $(seq 1200); do set -- "$0"/ended.*; [ $# -lt $OMPI_COMM_WORLD_SIZE ] || break; sleep 0.05; done
first=0
while [ "$(cat "$0/ended.$first" 2>/dev/null || echo 0)" = 0 ]; do first=$((first + 1)); done
[ $first = $OMPI_COMM_WORLD_RANK ] || sleep 10 # mpirun ends it
exit $status"""


def end(p):
    """Asks before it kills, because ranks are groups of their own, which mpirun ends. Returns what was printed."""
    os.killpg(p.pid, signal.SIGTERM)
    try: return p.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        return p.communicate()


def command(*arguments, ranks=None, env={}, timeout=None, input=None, cwd=ROOT, strict=False):
    """Runs a command, on so many ranks if they are given, to its end. What it started ends with it. timeout: seconds; time on a GPU
    is dear."""
    timeout = timeout or (60 if DEVICE == "cuda" else 300)
    start = [*launcher(ranks)] if ranks else []
    said = Path(tempfile.mkdtemp(dir=session())) if ranks else None
    together = ["sh", "-c", TOGETHER, str(said)] if ranks else []
    line = [*start, *words(*arguments)]

    def of_ranks(name):
        files = [said / f"{name}.{rank}" for rank in range(ranks or 0)]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    with subprocess.Popen([*start, *together, *words(*arguments)], cwd=cwd, env=environment(ranks or 1, strict, **env), text=True,
                          errors="replace", start_new_session=True, stdin=subprocess.PIPE if input else subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        try:
            out, err = p.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            out, err = end(p)
            return Run(line, "no end", of_ranks("out") + out, of_ranks("err") + err + f"\nit did not end in {timeout} seconds")
        except BaseException:
            os.killpg(p.pid, signal.SIGKILL)
            raise
    return Run(line, p.returncode, of_ranks("out") + out, of_ranks("err") + err)


def succeeds(*arguments, **settings):
    """A command() that must succeed."""
    __tracebackhide__ = True
    run = command(*arguments, **settings)
    assert run.status == 0, run
    return run


def processes(pattern):
    """The ids of the processes whose command line has this pattern (re), as pgrep -f gives them; not this one's."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try: line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError: continue # it has just ended
        if int(place.name) != os.getpid() and re.search(pattern, line): found.append(int(place.name))
    return found


def until(condition, seconds=120):
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


def executable(path, script, shell="/bin/sh"):
    """Writes a script, as one that stands in for a program. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shell}\n{script}\n")
    path.chmod(0o755)
    return path


def once(key, make_it):
    """make_it(folder) is called once in a session for a key (str), by whoever comes first; returns the folder (Path)."""
    place = session() / hashlib.sha256(key.encode()).hexdigest()[:24]
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make_it(place)
            (place / "made").touch()
    return place


def virtual_environment(folder, wanted):
    """Makes one that has the packages of a file of requirements, or keeps the one that has them."""
    once(f"virtual environment {folder}", lambda place: succeeds("sh dev/venv.sh", folder, wanted, env={"PYTHON": sys.executable},
                                                                  timeout=3600))


def train(name, *options, ranks=None, precision="fp32", device="cpu", debug=False, strict=False, env={}, again="", binary=None,
          timeout=None):
    """Trains with train_gpt2_NAME, `ranks` of it if they are given, into a folder of its own (Run.folder). The same command gives
    the same Run for the rest of the session, so nobody may write in its folder, unless `again` differs. binary: another program's
    path."""
    binary = binary or program(f"train_gpt2_{name}", precision, device, debug)

    def run(place):
        done = command([binary], *options, ["--out", place / "out"], ranks=ranks, strict=strict, env=env, timeout=timeout)
        (place / "run.json").write_text(json.dumps([done.command, done.status, done.out, done.err]))

    place = once(json.dumps([binary, words(*options), ranks, strict, env, again]), run)
    return Run(*json.loads((place / "run.json").read_text()), place / "out")


def trained(*arguments, **settings):
    """A train() that must succeed."""
    run = train(*arguments, **settings)
    assert run.status == 0, run
    return run


def half(run, folder, step=5):
    """A copy of a run that was stopped when it had saved this step, for --resume."""
    shutil.copytree(run.checkpoint(step), folder / f"step_{step:08}")
    shutil.copy(run.folder / "metrics.jsonl", folder)
    return folder


# ---- files ----
def flip(path, share=0.5):
    """Flips the lowest bit of the byte at this share of a file."""
    data = bytearray(Path(path).read_bytes())
    data[int(share * len(data))] ^= 1
    Path(path).write_bytes(data)


# ---- comparisons ----
def paired_metrics(a, b, only=None):
    """(what, number of a, number of b) for each field that a's steps have; both have the same steps. Lines of the measured
    compression error are left out where a has none. None stands for a number that is not finite."""
    has_bias = any("compression_error" in x for x in a.metrics)
    others = [x for x in b.metrics if has_bias or "compression_error" not in x]
    assert [x["step"] for x in a.metrics] == [x["step"] for x in others] != [], f"other steps than {a}: {b}"
    for x, y in zip(a.metrics, others):
        nothing = x.get("counted") == y.get("counted") == 0
        for field in FIELDS if only is None else (only,):
            if field in x and not (nothing and field == "loss" and x[field] is y.get(field) is None):
                yield f"{field} of step {x['step']}", x[field], y[field]


def assert_close(a, b, rtol=1e-5, atol=1e-6, only=None, step=None):
    """b has a's metrics and weights: |a - b| <= atol + rtol |a|. a is the reference. only: a field of the metrics, without
    weights."""
    __tracebackhide__ = True
    pairs = [*paired_metrics(a, b, only)]
    assert pairs
    for what, x, y in pairs:
        assert x is not None and y is not None and abs(x - y) <= atol + rtol * abs(x), f"{what}: {x} and {y}\n{b}"
    if only is None:
        assert_close_tensors(a.weights(step), b.weights(step), rtol, atol)


def assert_close_tensors(a, b, rtol=1e-5, atol=1e-6):
    __tracebackhide__ = True
    assert a.keys() == b.keys() and a
    for name in a:
        assert a[name].shape == b[name].shape, name
        outside = ~(np.abs(a[name] - b[name]) <= atol + rtol * np.abs(a[name]))
        assert not outside.any(), f"{name}: {outside.sum()} of {outside.size} differ, as {a[name][outside][0]} and {b[name][outside][0]}"


def assert_same_metrics(a, b, only=None):
    """Both runs have the same numbers, to the bit."""
    __tracebackhide__ = True
    pairs = [*paired_metrics(a, b, only)]
    assert pairs
    for what, x, y in pairs:
        assert x == y, f"{what}: {x!r} and {y!r}\n{b}"


def assert_same(a, b, step=None):
    """Both runs have the same metrics, weights and optimizer state, to the bit."""
    __tracebackhide__ = True
    assert_same_metrics(a, b)
    for file in "model.safetensors", "optimizer.safetensors":
        assert (a.checkpoint(step) / file).read_bytes() == (b.checkpoint(step) / file).read_bytes(), f"{file} of {a} and {b}"


def assert_different(a, b, step=None):
    """Both runs have saved weights, which are not the same."""
    __tracebackhide__ = True
    assert (a.checkpoint(step) / "model.safetensors").read_bytes() != (b.checkpoint(step) / "model.safetensors").read_bytes()


def assert_as_predicted(run):
    """At its end the run says of all it held and sent that it was as predicted, and what the system counts."""
    __tracebackhide__ = True
    assert "than predicted" not in run.out, run
    assert re.search(r"^  as the system sees it +\d[\d.]* [kMG]B ", run.out, re.M), run
    for row in ("total", "peak", "bytes"):
        assert re.search(rf"^  {row} .* as predicted$", run.out, re.M), run


def assert_says(text, *patterns, no=()):
    """A text has lines with all patterns, and none with those of no."""
    __tracebackhide__ = True
    for pattern in patterns: assert re.search(pattern, text, re.M), f"there is no {pattern!r} in\n{text}"
    for pattern in no: assert not re.search(pattern, text, re.M), f"there is {pattern!r} in\n{text}"


def free_port():
    """A port that is free, and the next one too. Linux gives those from 32768 on to whatever asks for any, so others are chosen."""
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as one, socket.socket() as next_one:
            try:
                one.bind(("", port))
                next_one.bind(("", port + 1))
                return port
            except OSError: pass


# ---- errors ----
def assert_refused(run, *patterns):
    """The run ended with status 1, and each pattern is somewhere in what it wrote to stderr. A crash, a sanitizer's report and a
    message without "error:" are failures of another kind."""
    __tracebackhide__ = True
    assert run.status == 1, run
    assert "runtime error:" not in run.err, run
    for pattern in ("error:", *patterns):
        assert re.search(pattern, run.err, re.M), f"there is no {pattern!r} in what was said by {run}"


def assert_each_says(run, ranks, pattern, dead=None):
    """Each rank but the dead one says this error, and nothing else."""
    __tracebackhide__ = True
    for rank in {*range(ranks)} - {dead}:
        said = re.findall(rf"^rank {rank}: error: (.*)", run.err, re.M)
        assert len(said) == 1 and re.search(pattern, said[0]), f"rank {rank} did not say {pattern!r} once: {run}"


def assert_refused_by_all(run, ranks, pattern):
    """Every rank found the error by itself."""
    __tracebackhide__ = True
    assert_refused(run, pattern)
    assert_each_says(run, ranks, pattern)
