"""Saving while training goes on: the files are those of a save that training waits for, whatever fails or is killed meanwhile.

test/unit/test_saving.c holds the thread where it writes; here test/unit/disk.c makes the disk slow, lets it fail, and records the
order in which things happen."""
import json, os, random, re, signal, subprocess, time
from pathlib import Path
import pytest
from shards import PROGRAMS, SAVES, assert_same_files, in_folder, newest, resumed, saved, train_by
from suite import TINY, assert_each_says, assert_says, command, environment, launcher, once, program, rest, train, trained, words

LONG = 6
ROUNDS = int(os.environ.get("SAVE_KILL_ROUNDS", 2)) # runs killed, of each program
SLOW = 150 # milliseconds a sync takes longer: several steps


def disk(**settings):
    """The environment of programs whose disk is slow=MILLISECONDS, which fail="RANK HOW PART", ..."""
    def compile(folder):
        done = command(f"cc -O1 -shared -fPIC test/unit/disk.c -ldl -o {folder}/disk.so")
        assert done.status == 0, done
    library = once("disk.so", compile) / "disk.so"
    return {"LD_PRELOAD": str(library)} | {f"DISK_{name.upper()}": str(value) for name, value in settings.items()}


def state(run, step):
    """state.json without what names the folder."""
    facts = json.loads((run.checkpoint(step) / "state.json").read_text())
    del facts["options"]["out"], facts["checksum_of_this"]
    return facts


# ---- the same files ----
QUICK = ("single", "zero2", "int8+")
@pytest.mark.parametrize("name", [*QUICK, *map(rest, ("ddp", "zero3", "muon1", "muon3", "full", "sharded", "offload", "hybrid", "tp2",
                                                      "pp2", "2x2x1", "2x1x2z", "none", "powersgd+", "nodes", "ring"))])
def test_a_save_while_training_goes_on_has_the_files_of_one_that_training_waits_for(name):
    run, waits = saved(name, None, env=disk(slow=SLOW)), saved(name, None, "--no-save-async")
    # the first was under way for some steps, and the last is waited for
    assert_says(run.out, r"^saving step 5\n(step .*\n){2,}saved step 5 under", r"^saving step 10\n(?!step )", "^saved step 10 under",
                r"^  snapshot for checkpoints .* as predicted$")
    assert "than predicted" not in run.out and "saving step" not in waits.out
    for step in 5, 10:
        assert_same_files(run, waits, step)
        assert state(run, step) == state(waits, step)
    model, later = ((run.checkpoint(step) / sorted(f.name for f in run.checkpoint(step).glob("model*s"))[0]).read_bytes()
                    for step in (5, 10))
    assert model != later


def test_a_snapshot_has_the_bytes_that_are_saved():
    """Weights and AdamW's moments. A run that only saves at its end has none."""
    bytes, none, once = (saved("single", None, more).about["predicted_bytes"] for more in ("", "--no-save-async", "--save-every 0"))
    assert bytes["snapshot for checkpoints"] == bytes["parameters"] + bytes["optimizer state"]
    assert none["snapshot for checkpoints"] == once["snapshot for checkpoints"] == 0


@pytest.mark.parametrize("name, writers, padding", [("ddp", 1, 0), ("zero2", 2, 0.02), *(rest(*of) for of in (
    ("zero1", 8, 0.02), ("zero3", 4, 0.02), ("full", 3, 0.02), ("sharded", 3, 0.02), ("hybrid", 2, 0.02), ("offload", 2, 0.02),
    ("tp2", 2, 0.04), ("ring", 1, 0), ("none", 1, 0)))])
def test_all_snapshots_together_have_the_bytes_of_one_device_and_padding(name, writers, padding):
    """With tp, padding is what both parts have: layernorms and some biases."""
    whole, each = (saved(which).about["predicted_bytes"]["snapshot for checkpoints"] for which in ("single", name))
    assert whole <= writers * each <= (1 + padding) * whole


def test_a_save_that_begins_waits_for_the_one_before():
    run = trained("single", SAVES, "--save-every 1 --steps 3", env=disk(slow=SLOW))
    assert_says(run.out, r"^saving step 1\nstep .*\nsaved step 1 .*\nsaving step 2\nstep .*\nsaved step 2 .*\nsaving step 3\nsaved step 3 ")


def test_memory_that_does_not_hold_a_snapshot_makes_training_wait(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n")
    run = trained("zero", TINY, "--steps 4 --save-every 2", ranks=2, env=disk(meminfo=tmp_path / "meminfo"))
    assert_says(run.out, r"^saves +training waits for the disk: .* \(--save-async\) takes \S+ kB of memory, and \S+ B are free$",
                "^saved step 2 under", no=["saving step", "snapshot for checkpoints"])
    assert_same_files(run, trained("zero", TINY, "--steps 4 --save-every 2", ranks=2), 2)


# ---- a disk that fails ----
@pytest.mark.parametrize("name, options, file", [
    ("zero", "", "optimizer.safetensors"), rest("fsdp", "--checkpoint sharded", "optimizer-00002-of-00002.safetensors"),
    rest("compress", "--compress int8 --error-feedback --channels 64", "errors_int8_00001_of_00002.safetensors")])
@pytest.mark.parametrize("how, reason", [("write", "No space left on device; free "), rest("sync", "Input/output error; ")])
def test_a_disk_that_fails_on_one_rank_ends_all_with_one_sentence(name, options, file, how, reason, tmp_path):
    assert in_folder(tmp_path, name, TINY, options, "--steps 2", ranks=2).status == 0
    run = in_folder(tmp_path, name, TINY, options, "--resume --save-every 4", ranks=2,
                    env=disk(fail=f"1 {how} step_00000004/{file}"))
    assert_each_says(run, 2, f"^rank 1 cannot write: .*{file}: cannot be written: {reason}.*the last good checkpoint is .*step_00000002")
    assert "saving step 4" in run.out and "saved step 4" not in run.out
    assert [*tmp_path.glob(".tmp*")] == [] and newest(tmp_path) == 2
    resumed(tmp_path, name, TINY, options, "--steps 4", ranks=2)


@pytest.mark.parametrize("name, ranks", [("single", None), rest("zero", 2)])
def test_what_cannot_get_its_name_is_not_called_saved(name, ranks, tmp_path):
    run = in_folder(tmp_path, name, TINY, "--save-every 4", ranks=ranks, env=disk(fail="0 rename step_00000004"))
    assert run.status not in (0, "no end") and "cannot be given its name: Permission denied" in run.err, run
    assert "saving step 4" in run.out and "saved step 4" not in run.out


# ---- the order of what happens on the disk ----
def operations_of(log):
    return [line.split(" ") for line in log.read_text().splitlines()]


def assert_order(log, out, step, removed):
    """All writes are on the disk before the folder is, the folder before it gets its name, the name before an older one goes."""
    at, there, name = f"{out}/.tmp_step_{step:08}", f"{out}/step_{step:08}", f"step_{step:08}"
    done = operations_of(log)
    renamed = done.index(["rename", at, there])
    begun = max((i for i, x in enumerate(done[:renamed]) if x[0] == "remove" and x[1] == at), default=-1) # remains of a crash
    files = {x[1] for x in done[begun + 1:renamed] if x[0] == "write" and x[1].startswith(at)}
    files |= {f"{at}/state.json"}
    assert len(files) > 2
    for file in files:
        last = max(i for i, x in enumerate(done) if x == ["write", file])
        assert ["sync", file] in done[last:renamed], f"{file} was not on the disk when it got its name"
    last = max(i for i, x in enumerate(done[:renamed]) if x[1].startswith(f"{at}/"))
    assert ["sync", at] in done[last:renamed], "the folder was not on the disk when it got its name"
    named = renamed + done[renamed:].index(["sync", str(out)])
    assert [x for x in done[renamed:named] if x[0] == "remove"] == [], "an older one went before the new name was on the disk"
    goes = [i for i, x in enumerate(done) if x[0] == "rename" and x[1] == f"{out}/step_{removed:08}"]
    assert goes and goes[0] > named, f"step {removed} went before {name} had its name"


@pytest.mark.parametrize("name, ranks, options", [("single", None, ""), rest("zero", 3, ""), rest("single", None, "--no-save-async"),
                                                  rest("fsdp", 2, "--checkpoint sharded"), rest("ddp", 2, "")])
def test_everything_is_on_the_disk_before_its_name_is_and_an_older_one_goes_last(name, ranks, options, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    batch = "--batch-size 4 --total-batch-size 192" if ranks == 3 else ""
    run = in_folder(out, name, TINY, batch, options, "--steps 9 --save-every 3 --keep 1", ranks=ranks, env=disk(log=log, slow=20))
    assert run.status == 0, run
    assert_order(log, out, 6, 3)
    assert_order(log, out, 9, 6)
    assert [path.name for path in out.glob("*step_*")] == ["step_00000009"]


# ---- kills ----
KILLED = f"{TINY} --steps 100000 --save-every 3 --keep 1"


def kill_in_a_save(out, name, ranks, options, env):
    """Ends all processes of a run at some instant after its first checkpoint. Returns when they are gone."""
    start = [*(launcher(ranks) if ranks else []), program(f"train_gpt2_{name}"), *words(KILLED, options, "--out"), out]
    with open(f"{out}.log", "w") as log:
        p = subprocess.Popen([*map(str, start), *["--resume"] * (newest(out) >= 0)], stdout=log, stderr=log, start_new_session=True,
                             env=environment(ranks or 1, **env))
        before, until = newest(out), time.time() + 60
        while newest(out) <= before and p.poll() is None and time.time() < until: time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        assert p.poll() is None, Path(f"{out}.log").read_text()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))): # ranks are in groups of their own, but of one session
            try:
                if os.getsid(pid) == p.pid: os.kill(pid, signal.SIGKILL)
            except ProcessLookupError: pass
        p.wait()


@pytest.mark.parametrize("name, ranks, options", [("single", None, ""), rest("zero", 2, ""), rest("fsdp", 2, "--checkpoint sharded"),
    rest("compress", 2, "--compress int8 --error-feedback --channels 64"), rest("pp", 2, "")])
def test_a_run_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(name, ranks, options, tmp_path):
    for i in range(ROUNDS):
        kill_in_a_save(tmp_path / "out", name, ranks, options, disk(slow=20))
        step = newest(tmp_path / "out")
        run = resumed(tmp_path / "out", name, TINY, options, "--keep 1 --save-every 3 --steps", step, ranks=ranks)
        assert f"step {step} of {step}" in run.out
