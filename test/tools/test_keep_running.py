"""dev/launch/keep_running: a run that fails goes on from its newest whole checkpoint as if nothing had happened; one that cannot go
on is not started for ever; a signal saves and ends both."""
import contextlib, fcntl, os, random, re, shutil, signal, struct, subprocess, time
from pathlib import Path
import pytest
from dev.lib import launcher
from suite import (TINY, Run, assert_refused, assert_same, assert_says, command, environment, executable, flip, processes, program,
                   rest, succeeds, trained, until, words)

KEEP = "dev/launch/keep_running"
OPTIONS = f"{TINY} --batch-size 8 --deterministic --save-every 5 --no-save-async" # a checkpoint is whole before the next step
QUICK = {"SHARD_LEAVE_SECONDS": 0.5} # a rank that ends waits so long for the others' errors


@pytest.fixture(autouse=True)
def verify(): program("verify") # which the script starts


def kept(folder, *arguments, settings="--wait 0", **more):
    """Runs a command, to which --out is added, under keep_running."""
    run = command(KEEP, settings, *arguments, "--out", [folder], env=QUICK, timeout=120, **more)
    run.folder = folder
    return run


def until_marked(folder, fault, after=""):
    """A command whose first start has an option more, and does something after it."""
    script = f'[ -e "$0.mark" ] && exec "$@"; : >"$0.mark"; "$@" {fault}; status=$?; {after} exit $status'
    return [executable(folder / "fails_once", script)]


# ---- a run that fails once ----
@pytest.mark.parametrize("name, ranks", [("ddp", 2), rest("ddp", None), rest("fsdp", 4)])
def test_a_run_of_which_a_rank_is_killed_ends_as_one_that_nobody_disturbs(name, ranks, tmp_path):
    start = [*launcher(ranks)] if ranks else []
    fails = until_marked(tmp_path, f"--fault {(ranks or 1) - 1}:7:kill")
    run = kept(tmp_path / "out", fails, start, [program(f"train_gpt2_{name}")], OPTIONS)
    assert run.status == 0, run
    assert_says(run.out, "^failed     with status [1-9][0-9]* after step [67]: ",
                "^recovered  [0-9.]+ s after the failure, with step [0-9]+$",
                "^restart    1 of at most 10, from .*/step_00000005; [12] steps? lost$", no=["^restart    2"])
    assert_same(trained(name, OPTIONS, ranks=ranks), run)


@pytest.mark.rest
def test_ranks_that_are_killed_at_any_instant_change_no_bit(tmp_path):
    """Also while they save. The next one is killed after a checkpoint more, because two runs without one are the last."""
    options, path, out = words(OPTIONS, "--steps 2000 --save-every 100"), program("train_gpt2_ddp"), tmp_path / "out"
    line = [*words(KEEP, "--wait 0 --max-restarts 5"), *launcher(2), path, *options, "--out", str(out)]
    env = environment(2, **QUICK)
    with open(tmp_path / "said", "w+") as file, subprocess.Popen(line, env=env, stdout=file, stderr=file) as run:
        for _ in range(5):
            saved = max(out.glob("step_*"), default=None)
            until(lambda: run.poll() is not None or max(out.glob("step_*"), default=None) != saved)
            time.sleep(random.uniform(0, 0.3))
            ranks = processes(f"^{path} .*{out}")
            if ranks: os.kill(int(random.choice(ranks)), signal.SIGKILL)
        run.wait(120)
        file.seek(0)
        said = file.read()
    assert run.returncode == 0 and len(re.findall("^restart ", said, re.M)) > 2, said
    assert_same(trained("ddp", options, ranks=2), Run(line, 0, said, "", out))


def test_a_run_that_fails_before_its_first_checkpoint_begins_again(tmp_path):
    run = kept(tmp_path / "out", until_marked(tmp_path, "--fault 0:3:kill"), [program("train_gpt2_ddp")], OPTIONS, "--resume")
    assert run.status == 0, run
    assert_says(run.out, "^restart    1 of at most 10, from the beginning; [23] steps lost$")
    assert_same(trained("ddp", OPTIONS), run)


def test_a_launcher_that_outlives_all_ranks_is_killed_with_what_it_has_started(tmp_path):
    """As mpirun does that waits for a host it cannot reach any more."""
    options, left = words(OPTIONS, "--steps 400 --save-every 150"), f"sleep 1000.{os.getpid()}"
    hangs = until_marked(tmp_path, "--fault 0:350:kill", f"setsid {left} & wait;")
    run = kept(tmp_path / "out", hangs, [program("train_gpt2_ddp")], options, settings="--wait 0 --patience 1")
    assert run.status == 0, run
    assert_says(run.out, "^hangs      all ranks ended", "^killed     [23] processes", "^restart    1 .*, from .*/step_00000300; ")
    assert not processes(left)
    assert_same(trained("ddp", options), run)


def test_what_a_run_leaves_behind_is_gone_before_the_next_start(tmp_path):
    args = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; echo; done 2>/dev/null'
    left = f'{args} | grep -c "^sleep 300.{os.getpid()}"; setsid sleep 300.{os.getpid()} >/dev/null & exit 3'
    run = kept(tmp_path, "sh -c", [left], settings="--wait 0 --patience 0.2")
    assert run.status == 3 and re.findall("^[0-9]+$", run.out, re.M) == ["0", "0"], run


# ---- a run that cannot go on ----
def test_two_runs_without_a_new_checkpoint_are_the_last(tmp_path):
    """The first run has made one before it fails, and does not count."""
    run = kept(tmp_path / "out", [*launcher(2)], [program("train_gpt2_ddp")], OPTIONS, "--fault 1:7:kill")
    assert run.status not in (0, 200) and len(re.findall("^failed ", run.out, re.M)) == 3, run
    assert_says(run.err, "^error: two runs have ended without a new checkpoint, .*; the newest is .*/step_00000005; the last "
                         "error was: .*rank 1 (has died|.*Killed)")


@pytest.mark.parametrize("locked, says, runs", [(False, "two runs have ended without a new checkpoint", 2),
                                                (True, "the run has failed 4 times \\(--max-restarts 3\\)", 4)])
def test_a_run_that_finds_its_folder_in_use_is_tried_again(locked, says, runs, tmp_path):
    with open(tmp_path / "writer.lock", "wb") as file:
        if locked: fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        run = kept(tmp_path, "sh -c", ["echo error: refused >&2; exit 1"], settings="--wait 0 --patience 0.1 --max-restarts 3")
    assert run.status == 1 and len(re.findall("^failed ", run.out, re.M)) == runs, run
    assert_says(run.err, f"^error: {says}.*: error: refused$")


@pytest.mark.parametrize("option, error", [("--total-batch-size 384", "--total-batch-size 384 must be a multiple of"),
                                           ("--other 3", "unknown option '--other'")])
def test_a_program_that_refuses_an_option_is_not_asked_again(option, error, tmp_path):
    """For example a batch that fewer ranks cannot divide."""
    run = kept(tmp_path / "out", [*launcher(2)], [program("train_gpt2_ddp")], OPTIONS, option)
    assert_refused(run, f"the run is not started again, because this would not change: {error}")
    assert len(re.findall("^failed ", run.out, re.M)) == 1 and "restart " not in run.out, run


def test_resume_is_added_only_where_there_is_a_checkpoint_and_takes_the_place_of_init_from(tmp_path):
    echo = "echo --resume --init-from x --init-from=y --lr 1"
    assert kept(tmp_path, echo).out == f"--init-from x --init-from=y --lr 1 --out {tmp_path}\n"
    shutil.copytree(trained("single", OPTIONS).checkpoint(), tmp_path / "step_00000020")
    assert kept(tmp_path, echo).out == f"--lr 1 --out {tmp_path} --resume\n"


# ---- damaged checkpoints ----
def damaged(folder, *steps):
    """A copy of a run's checkpoints of steps 10 and 15, of which some are damaged."""
    run = trained("single", OPTIONS)
    for step in 10, 15: shutil.copytree(run.checkpoint(step), folder / f"step_{step:08}")
    for step in steps: flip(folder / f"step_{step:08}/optimizer.safetensors", 0.9)
    return run


def test_a_damaged_checkpoint_is_named_and_put_aside_and_the_one_before_is_taken(tmp_path):
    undisturbed = damaged(tmp_path / "out", 15)
    (tmp_path / "out/damaged_step_00000015").mkdir()
    run = kept(tmp_path / "out", [program("train_gpt2_single")], OPTIONS)
    assert run.status == 0, run
    assert_says(run.out, r'^damaged    .*/step_00000015/optimizer.safetensors: the values of "\w+" do not match their checksum: '
                r"the file is damaged; moved to .*/damaged_step_00000015\.2$", "^start      step 10 of 20, from ")
    assert (tmp_path / "out/damaged_step_00000015.2/state.json").exists()
    for step in 15, 20: # metrics.jsonl begins with step 11
        for name in "model.safetensors", "optimizer.safetensors":
            assert (undisturbed.checkpoint(step) / name).read_bytes() == (run.checkpoint(step) / name).read_bytes()


def test_a_checkpoint_that_was_being_replaced_counts(tmp_path):
    """As for the program that resumes (checkpoint_newest)."""
    damaged(tmp_path / "out")
    (tmp_path / "out/step_00000015").rename(tmp_path / "out/.replaced_step_00000015")
    run = kept(tmp_path / "out", "sh -c", ["exit 1"])
    assert_says(run.out, r"^restart    1 of at most 10, from .*/\.replaced_step_00000015; ")


def test_if_all_checkpoints_are_refused_nothing_is_moved_and_nothing_starts(tmp_path):
    damaged(tmp_path / "out", 10, 15)
    run = kept(tmp_path / "out", [program("train_gpt2_single")], OPTIONS)
    assert_refused(run, "no checkpoint under .*step_00000015/.* do not match .*step_00000010/.* do not match")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step_00000010", "step_00000015"] and not run.out


@pytest.mark.parametrize("name, options, numbers", [("fsdp", "", 32880), rest("fsdp", "--checkpoint sharded", 32880),
                                                    rest("compress", "--compress int8 --error-feedback", 68240)])
def test_verify_reads_every_number_of_a_checkpoint(name, options, numbers, tmp_path):
    """A flipped bit is found wherever it is, also in what --resume would not read on this rank."""
    run = trained(name, OPTIONS, options, ranks=2)
    assert_says(succeeds([program("verify"), run.checkpoint()]).out, f": step 20, {numbers} numbers, which match their checksums$")
    for k, file in enumerate(sorted(path.name for path in run.checkpoint().iterdir())):
        for share in 0.01, 0.5, 0.999:
            shutil.copytree(run.checkpoint(), tmp_path / f"{k}_{share}")
            flip(tmp_path / f"{k}_{share}" / file, share)
            assert_refused(command([program("verify"), tmp_path / f"{k}_{share}"]), re.escape(f"{k}_{share}/"))
        shutil.copytree(run.checkpoint(), tmp_path / f"{k}_lost")
        (tmp_path / f"{k}_lost" / file).unlink()
        assert_refused(command([program("verify"), tmp_path / f"{k}_lost"]), re.escape(f"{k}_lost"))


# ---- signals ----
@contextlib.contextmanager
def keeping(folder, *arguments):
    """A keep_running whose run has made ten steps."""
    line = words(KEEP, "--wait 0", *arguments, "--steps 1000000 --out", [folder])
    log = folder / "metrics.jsonl"
    with subprocess.Popen(line, env=environment(2, **QUICK), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as run: # a shell's & ignores SIGINT
        try:
            until(lambda: log.exists() and '"step":10,' in log.read_text() or run.poll())
            yield run
        finally:
            if run.poll() is None: run.kill()


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_nothing_is_started_again(how, tmp_path):
    """Under mpirun, which gives its ranks a second after TERM. The next keep_running continues to the bit."""
    options = [*launcher(2), program("train_gpt2_ddp"), *words(OPTIONS, "--save-every 0 --lr-schedule constant")]
    with keeping(tmp_path / "out", options) as run:
        run.send_signal(how)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 200 and "restart" not in out and len([*(tmp_path / "out").glob("step_*")]) == 1, out + err
    steps = int(re.search(r"^stop       after step (\d+): a signal has told", out, re.M)[1]) + 5
    again = kept(tmp_path / "out", options, "--steps", steps)
    assert_same(trained("ddp", words(OPTIONS, "--save-every 0 --lr-schedule constant --steps", steps), ranks=2), again)


@pytest.mark.parametrize("launcher, status", [("torchrun", 15), ("srun", 10)])
def test_a_launcher_gets_the_signal_that_it_passes_on(launcher, status, tmp_path):
    """torchrun has no handler for USR1, and mpirun kills its ranks after TERM."""
    says = "trap 'exit 15' TERM; trap 'exit 10' USR1; echo '{\"step\":10,' >$2/metrics.jsonl; while :; do sleep 0.05; done"
    with keeping(tmp_path, [executable(tmp_path / launcher, f"while [ $# -gt 2 ]; do shift; done; {says}")]) as run:
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=20)
    assert run.returncode == status and "restart" not in out, out + err


def test_a_signal_between_two_runs_ends_the_script(tmp_path):
    """A checkpoint is what a signal asks for: where there is none, nothing has been saved."""
    for status in 200, 128 + signal.SIGTERM:
        if status == 200: shutil.copytree(trained("single", OPTIONS).checkpoint(), tmp_path / "step_00000020")
        else: shutil.rmtree(tmp_path / "step_00000020")
        line = words(KEEP, "--wait 1000 sh -c", ["echo error: ends >&2; exit 1"], "--out", [tmp_path])
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
            while "restart" not in run.stdout.readline(): pass
            run.send_signal(signal.SIGTERM)
            try: assert "stop " in run.communicate(timeout=20)[0] and run.returncode == status
            finally: run.kill()


def test_a_second_signal_kills_the_run(tmp_path):
    """Rank 0 hangs in a step, so the first one saves nothing."""
    hangs = [*launcher(2), program("train_gpt2_ddp"), *words(OPTIONS, "--fault 0:12:hang")]
    with keeping(tmp_path / "out", hangs) as run:
        until(lambda: '"step":11,' in (tmp_path / "out/metrics.jsonl").read_text())
        time.sleep(1) # now step 12 has begun
        run.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=20)
    assert run.returncode == -signal.SIGTERM and not processes(str(tmp_path / "out"))


# ---- hosts ----
def test_hosts_that_do_not_answer_are_left_out(tmp_path):
    """The last argument but one is the host."""
    ssh = executable(tmp_path / "ssh", 'while [ $# -gt 2 ]; do shift; done; [ $2 = true ] && [ $1 != b ]')
    run = kept(tmp_path, "echo on {hosts}, {ranks} ranks", settings=f"--hosts a,b,c --ranks-per-host 2 --ssh {ssh}")
    assert run.status == 0, run
    assert_says(run.out, "^hosts      b of a, b, c did not answer; 4 ranks on a, c$", "^on a:2,c:2, 4 ranks --out ")


@pytest.mark.parametrize("options, pattern", [
    ("", "there is no COMMAND"), ("true", "COMMAND has no --out"), ("--hosts a true --out x", "--hosts needs {hosts} in COMMAND"),
    ("--wait -1 true --out x", "too small"), ("./none --out x", "./none cannot be started")])
def test_a_command_that_cannot_be_kept_is_refused(options, pattern):
    assert_refused(command(KEEP, options), re.escape(pattern))
