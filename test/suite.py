"""The suite's verbs: run a program on n ranks, read its metrics, compare runs, and expect errors.

A session makes each run once, however many tests and workers ask for it: train() stores it under its command line. Every path is
relative to the repository's root, where pytest runs."""
import fcntl, functools, hashlib, json, os, random, re, shlex, shutil, signal, socket, subprocess, sys, tempfile, time
from pathlib import Path
import numpy as np
import pytest
from dev.lib import PYTORCH, REFERENCE, ROOT, TOKENS, Metrics, launcher, tensors, words  # noqa: F401

FIELDS = ("loss", "grad_norm", "param_norm", "lr", "loss_scale", "tokens", "counted", "val_loss", "compression_error",
          "compression_norm_ratio",
          "compression_cosine") # the metrics in which runs are compared
DEVICE = "emulated" # where GPU programs run; conftest.py sets it to "cuda" for --device cuda

# A small model on the stored tokens: 32 sequences of 16 tokens per step, 13 steps per epoch. One rank needs two micro-batches.
TINY = (f"--data {TOKENS} --val-data= --model d2 --heads 2 --channels 16 --seq-len 16 --batch-size 16 --total-batch-size 512 "
        "--steps 20 --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0")


def rest(*values, **options):
    """A row of a parameter table that belongs to the rest tier, which `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.rest, **options)


# ---- programs ----
@functools.cache
def sanitizers():
    """Why programs with sanitizers cannot run on this machine (some emulated processors, some containers); "" if they can."""
    probe = "here=dev; . dev/components.sh; make_scratch; probe_sanitizer >why || case $? in 3) head -n 1 why ;; esac"
    place = once("sanitizers", lambda folder: (folder / "why").write_text(command("sh -c",
        [probe.replace("why", shlex.quote(str(folder / "said")))]).out))
    return (place / "why").read_text().strip()


def program(name, precision="fp32", device="cpu", debug=False):
    """The path of a built program: program("train_gpt2_zero", "bf16"), program("test/test_axes", debug=True). Fails the test if it
    is not built, and skips the test if it needs sanitizers that cannot run."""
    variant = [*[device] * (device != "cpu"), *[precision] * (precision != "fp32"), *["debug"] * debug]
    path = "/".join(["build", *["-".join(variant)] * bool(variant), name])
    if debug and sanitizers(): pytest.skip(f"sanitizers cannot run here: {sanitizers()}")
    if not (ROOT / path).exists():
        settings = f"{f'DEVICE={device} ' * (device != 'cpu')}PRECISION={precision}{' DEBUG=1' * debug}"
        pytest.fail(f"{path} is not built: make test-programs builds what make test runs, make {settings} {path} this one",
                    pytrace=False)
    return path


def make(*arguments, timeout=1200):
    """Runs make, for programs that only one test needs. The workers take turns. Returns the last argument, which is the target."""
    with open(session() / "make.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = command("make", "--no-print-directory", *arguments, timeout=timeout)
    assert done.status == 0, done.said[-3000:]
    return arguments[-1]


# ---- runs ----
class Run(Metrics):
    """A finished command: status (int; "no end": timeout), out and err (str), said (both), folder (Path of --out, or None)."""

    def __init__(self, command, status, out, err, folder=None):
        super().__init__(folder)
        self.command, self.status, self.out, self.err = command, status, out, err

    def __repr__(self):
        return f"`{' '.join(map(str, self.command))}` ended with {self.status}:\n{self.said[-3000:]}"

    said = property(lambda self: self.out + self.err)


class Stored(Run):
    """A run of PyTorch that is stored in test/reference: Stored("ddp/ranks_4")."""

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
    """The environment of a program under test. Waits are passive, because such small models wait more than they compute. Each
    worker's mpirun makes its folder in a place of its own: if two mpiruns of Open MPI 4 start or end at the same time in the same
    place, one may remove the folder of the other."""
    place = session() / f"mpi.{os.getpid()}"
    place.mkdir(exist_ok=True)
    place.chmod(0o1777) # some tests run a command as another user
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "BUILD", "OMP_NUM_THREADS")}
    env |= {"OMP_NUM_THREADS": "2" if ranks == 1 else "1", "OMP_WAIT_POLICY": "passive", "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_odls_base_sigkill_timeout": "0", "EMULATOR_DEBUG": "-g1",
            "ASAN_OPTIONS": "exitcode=99:detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "SHARD_LEAVE_SECONDS": "60",
            "SHARD_SAY_ONCE": "0", "OMPI_MCA_orte_tmpdir_base": str(place)}
    return env | ({"SHARD_COMM_STRICT": "1"} if strict else {}) | {k: str(v) for k, v in more.items()}


# Each rank's output goes into its own files, because launchers split and interleave the lines of several ranks. mpirun kills all
# ranks as soon as one exits with an error. A failed rank therefore delays its exit until all ranks have ended, for up to a minute.
# Then the failed rank with the lowest number exits first: if several exit with errors at the same time, Open MPI 5.0.7 may crash
# or wait forever. The shell survives USR1, which mpirun sends not only to the program but also to the shell.
TOGETHER = """trap : USR1; exec >"$0/out.$OMPI_COMM_WORLD_RANK" 2>"$0/err.$OMPI_COMM_WORLD_RANK"
"$@"; status=$?; echo $status >"$0/ended.$OMPI_COMM_WORLD_RANK"; [ $status != 0 ] || exit 0
for i in $(seq 1200); do set -- "$0"/ended.*; [ $# -lt $OMPI_COMM_WORLD_SIZE ] || break; sleep 0.05; done
first=0
while [ "$(cat "$0/ended.$first" 2>/dev/null || echo 0)" = 0 ]; do first=$((first + 1)); done
[ $first = $OMPI_COMM_WORLD_RANK ] || sleep 10 # mpirun ends it
exit $status"""


def end(p):
    """Sends TERM, and KILL ten seconds later. Ranks are in process groups of their own, and only mpirun can end them, on TERM.
    Returns stdout and stderr."""
    os.killpg(p.pid, signal.SIGTERM)
    try: return p.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        return p.communicate()


def command(*arguments, ranks=None, env={}, timeout=None, input=None, cwd=ROOT, strict=False):
    """Runs a command to its end, on this many ranks if given, and returns its Run. After `timeout` seconds, all that it started is
    ended; the default is shorter on a GPU, where time is expensive."""
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
    """The ids of the processes whose command lines match this pattern (re), like pgrep -f, without this process."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try: line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError: continue # it has just ended
        if int(place.name) != os.getpid() and re.search(pattern, line): found.append(int(place.name))
    return found


def until(condition, seconds=120):
    """Waits until condition() is true. Fails the test if that takes longer than these seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


def executable(path, script, shell="/bin/sh"):
    """Writes an executable script, for example one that stands in for a program. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shell}\n{script}\n")
    path.chmod(0o755)
    return path


def once(key, make_it):
    """Calls make_it(folder) once per session and key (str), in the worker that asks first. Returns the folder (Path)."""
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
    """Makes a virtual environment with the packages of a requirements file, or keeps one that contains them already."""
    once(f"virtual environment {folder}", lambda place: succeeds("sh dev/venv.sh", folder, wanted, env={"PYTHON": sys.executable},
                                                                  timeout=3600))


def train(name, *options, ranks=None, precision="fp32", device="cpu", debug=False, strict=False, env={}, again="", binary=None,
          timeout=None):
    """Trains with train_gpt2_NAME, on this many ranks if given, into a folder of its own (Run.folder). The same command returns the
    same Run for the rest of the session, so tests must not write into its folder; a different `again` makes a new run. binary: the
    path of another program."""
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
    """Copies a run's metrics and its checkpoint of this step into the folder, so that --resume continues from there. Returns the
    folder."""
    shutil.copytree(run.checkpoint(step), folder / f"step_{step:08}")
    shutil.copy(run.folder / "metrics.jsonl", folder)
    return folder


# ---- files ----
def flip(path, share=0.5):
    """Flips the lowest bit of the byte at this fraction of a file."""
    data = bytearray(Path(path).read_bytes())
    data[int(share * len(data))] ^= 1
    Path(path).write_bytes(data)


# ---- comparisons ----
def paired_metrics(a, b, only=None):
    """Yields (description, number of a, number of b) for each field in a's steps; both runs must have the same steps. Lines with a
    measured compression error are left out if a has none. None stands for a number that is not finite."""
    has_bias = any("compression_error" in x for x in a.metrics)
    others = [x for x in b.metrics if has_bias or "compression_error" not in x]
    assert [x["step"] for x in a.metrics] == [x["step"] for x in others] != [], f"other steps than {a}: {b}"
    for x, y in zip(a.metrics, others):
        nothing = x.get("counted") == y.get("counted") == 0
        for field in FIELDS if only is None else (only,):
            if field in x and not (nothing and field == "loss" and x[field] is y.get(field) is None):
                yield f"{field} of step {x['step']}", x[field], y[field]


def assert_close(a, b, rtol=1e-5, atol=1e-6, only=None, step=None):
    """The metrics and weights of b are close to those of the reference a: |a - b| <= atol + rtol |a|. only: compares just this
    metric, and no weights."""
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
    """Both runs have the same metrics, to the bit."""
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
    """Both runs saved weights, and these differ."""
    __tracebackhide__ = True
    assert (a.checkpoint(step) / "model.safetensors").read_bytes() != (b.checkpoint(step) / "model.safetensors").read_bytes()


def assert_as_predicted(run):
    """At its end the run reports that its memory and traffic were as predicted, and how much memory the system counted."""
    __tracebackhide__ = True
    assert "than predicted" not in run.out, run
    assert re.search(r"^  as the system sees it +\d[\d.]* [kMG]B ", run.out, re.M), run
    for row in ("total", "peak", "bytes"):
        assert re.search(rf"^  {row} .* as predicted$", run.out, re.M), run


def assert_says(text, *patterns, no=()):
    """A text contains all patterns, and none of the patterns in `no`."""
    __tracebackhide__ = True
    for pattern in patterns: assert re.search(pattern, text, re.M), f"there is no {pattern!r} in\n{text}"
    for pattern in no: assert not re.search(pattern, text, re.M), f"there is {pattern!r} in\n{text}"


def free_port():
    """A free port; the next port is also free. It is below 32768, because Linux gives higher ones to programs that ask for any."""
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
    """The run ended with status 1 and wrote "error:" and each pattern to stderr. A crash or a sanitizer's report is no refusal."""
    __tracebackhide__ = True
    assert run.status == 1, run
    assert "runtime error:" not in run.err, run
    for pattern in ("error:", *patterns):
        assert re.search(pattern, run.err, re.M), f"there is no {pattern!r} in what was said by {run}"


def assert_each_says(run, ranks, pattern, dead=None):
    """Each rank except the dead one reports exactly one error, this one."""
    __tracebackhide__ = True
    for rank in {*range(ranks)} - {dead}:
        said = re.findall(rf"^rank {rank}: error: (.*)", run.err, re.M)
        assert len(said) == 1 and re.search(pattern, said[0]), f"rank {rank} did not say {pattern!r} once: {run}"


def assert_refused_by_all(run, ranks, pattern):
    """The run was refused, and every rank reported this error."""
    __tracebackhide__ = True
    assert_refused(run, pattern)
    assert_each_says(run, ranks, pattern)
