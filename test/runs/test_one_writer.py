"""A folder given by --out has one writer. A second run waits for the first one to end, for ten seconds at most, and then says which
run is writing there. Ranks whose launcher was killed are waited for in the same way. (test/unit/test_writer_lock.c: ranks that come
and go.)"""
import contextlib, os, re, shutil, signal, socket, subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
from shards import in_folder, newest
from suite import ROOT, TINY, assert_refused, assert_same, command, environment, launcher, program, rest, trained, until, words

SMALL = (f"{TINY} --channels 32 --total-batch-size 768 --warmup-steps 0 --lr-schedule constant --save-every 1 --keep 2 "
         "--deterministic")
PROGRAMS = { # the program, its options
    "single": ("single", ""), "ddp": ("ddp", ""), "zero3": ("zero", "--zero-stage 3"), "sharded": ("fsdp", "--checkpoint sharded"),
    "mesh": ("tp", "--tensor-parallel 2"), "stages": ("pp", "--pipeline-parallel 2"),
    "axes": ("3d", "--mesh dp=2,tp=2 --zero-stage 1"),
    "sequences": ("cp", "--context-parallel 2 --cp ring"), "compressed": ("compress", "--compress int8 --error-feedback")}
HOST, WAITS = socket.gethostname(), "waiting    up to"


def options(name, ranks):
    return [SMALL, "--batch-size", 48 // (ranks or 1), PROGRAMS[name][1]]


def second(folder, name, ranks, *more):
    return in_folder(folder, PROGRAMS[name][0], *options(name, ranks), *more, ranks=ranks, env={"OMP_NUM_THREADS": 1})


@contextlib.contextmanager
def first(tmp_path, name, ranks=None):
    """A run that would never end, and has saved: its folder, its process, and the process ids of its ranks."""
    folder, which, pids = tmp_path / "out", PROGRAMS[name][0], tmp_path / "pid"
    line = words([program(f"train_gpt2_{which}")], *options(name, ranks), "--steps 1000000", ["--out", folder])
    # In a session of its own a rank that is stopped is not woken when mpirun dies.
    if ranks: line = [*launcher(), "-np", str(ranks), "setsid", "--wait", "sh", "-c",
                      'echo $$ > "$0.$OMPI_COMM_WORLD_RANK"; exec "$@"', str(pids), *line]
    with open(tmp_path / "first.log", "w") as log:
        run = subprocess.Popen(line, cwd=ROOT, env=environment(ranks or 1, OMP_NUM_THREADS=1), stdout=log, stderr=log)
    try:
        until(lambda: newest(folder) > 0 or run.poll() is not None)
        assert run.poll() is None, log
        yield folder, run, [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(ranks or 0)]
    finally:
        kill(run)


def kill(process):
    process.kill()
    process.wait()


def stop(pid):
    """Returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(stat.read_text().rsplit(") ", 1)[1][0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")))


def await_end(pids):
    """Of ranks that have lost their mpirun."""
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def assert_waited(run, ranks, who):
    """On every rank it has waited, and then said who writes there."""
    assert_refused(run, *(rf"^rank {rank}: error: .*{who}" for rank in range(ranks or 0)), who)
    assert f"{WAITS} 10 s: --out {run.folder}: " in run.out, run


def whose(folder, pid):
    return f"--out {folder}: the run of process {pid} on {HOST} is writing there"


def assert_continues(folder, name, ranks=None):
    """A run continues from the newest checkpoint, and leaves nothing else there."""
    steps = newest(folder) + 100
    run = second(folder, name, ranks, "--resume --save-every 0 --steps", steps)
    assert run.status == 0 and newest(folder) == steps, run
    assert {path.name.split("_")[0] for path in folder.iterdir()} <= {"step", "metrics.jsonl", "ops"}
    return run


@pytest.mark.parametrize("name, ranks, more", [("single", None, ["--resume", "--steps 5"]), rest("zero3", 4, ["--resume"])],
                         ids=["runs", "ranks"])
def test_others_wait_and_each_names_the_first_which_goes_on_to_the_bit(name, ranks, more, tmp_path):
    """They wait at the same time."""
    with first(tmp_path, name, ranks) as (folder, run, pids):
        if not ranks: stop(run.pid) # it needs no time meanwhile
        with ThreadPoolExecutor() as threads:
            others = list(threads.map(lambda options: second(folder, name, ranks, options), more))
        os.kill(run.pid, signal.SIGCONT)
        for other in others: assert_waited(other, ranks, f"{whose(folder, pids[0] if ranks else run.pid)}; wait until it has ended")
        step = newest(folder)
        until(lambda: newest(folder) > step)
        assert run.poll() is None and not re.search("error:|warning:", (tmp_path / "first.log").read_text())
        kill(run)
        await_end(pids)
        run = assert_continues(folder, name, ranks)
    assert WAITS not in run.out
    assert not re.search("cannot be|is not there", (tmp_path / "first.log").read_text()) # said by ranks that lived on
    assert_same(trained(PROGRAMS[name][0], *options(name, ranks), "--save-every 0 --steps", newest(folder), ranks=ranks), run)


def test_a_run_that_waits_takes_over_when_the_first_is_killed(tmp_path):
    with first(tmp_path, "single") as (folder, run, _):
        stop(run.pid) # so that it saves nothing in the meantime
        step, line = newest(folder), words([program("train_gpt2_single")], *options("single", None), "--resume --save-every 0")
        with open(tmp_path / "second.log", "w+") as log:
            line += ["--steps", str(step + 100), "--out", str(folder)]
            other = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            until(lambda: WAITS in (tmp_path / "second.log").read_text())
            kill(run)
            assert other.wait(120) == 0, (tmp_path / "second.log").read_text()
        said = (tmp_path / "second.log").read_text()
        assert re.search(rf"^waiting .*process {run.pid} on {HOST}", said, re.M) and re.search(f"^start *step {step} of", said,
                                                                                               re.M), said


def test_what_is_no_lock_is_an_error(tmp_path):
    (tmp_path / "writer.lock").mkdir()
    assert_refused(second(tmp_path, "single", None, "--steps 2"), "writer.lock: cannot be opened: Is a directory")


def test_a_run_that_saves_nothing_needs_no_lock(tmp_path):
    """Nothing can be made in the folder, but metrics.jsonl can be written."""
    with first(tmp_path, "single") as (folder, *_): pass
    (folder / "writer.lock").unlink()
    # root may write to what lacks the permission
    no, yes = ("chattr +i", "chattr -i") if os.getuid() == 0 else ("chmod u-w", "chmod u+w")
    if not shutil.which(no.split()[0]) or command(no, folder).status != 0:
        pytest.skip("this file system has no folder that root cannot write to")
    try:
        assert second(folder, "single", None, "--resume --steps", newest(folder)).status == 0
        more = second(folder, "single", None, "--resume --steps", newest(folder) + 1)
        assert_refused(more, "cannot be made: .*; make it writable or choose another --out")
    finally:
        command(yes, folder)


# ---- ranks ----
@pytest.mark.rest
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("single", "zero3")])
def test_after_mpirun_was_killed_the_next_run_continues(name, tmp_path):
    with first(tmp_path, name, 4) as (folder, run, pids):
        kill(run)
        await_end(pids)
        assert_continues(folder, name, 4)
