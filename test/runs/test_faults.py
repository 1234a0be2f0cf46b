"""A rank that dies, hangs or differs is named by all ranks: with its operation, and in a pipeline its stage and micro-batch. Ranks
that find the same error each say so, and build/ranks finds from the ranks' last operations where they parted."""
import contextlib, os, re, signal, subprocess, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
from shards import faulty, resumed
from suite import (ROOT, TINY, TOKENS, Run, assert_each_says, assert_refused_by_all, assert_same, assert_says, command, half,
                   program, rest, train, trained, until, words)

LONG = 10
SMALL = f"{TINY} --batch-size 8 --eps 1e-5"
DEADLINE = "--comm-timeout 5" # a rank that is only slow must not be named: with 12 processes a core half a second was enough


NODES, GROUPS, MESH = "--node-ranks 2", "--context-parallel 2 --cp", "--layers 8 --mesh dp=2,tp=2,pp=2" # rank 5 is dp 1, pp 0, tp 1
HANGS = "ranks? {} ha(s|ve) not reached .*step 4"
DIFFER = "after step {} the parameters of unit 0 differ between rank 0 and rank {}"


@pytest.mark.parametrize("name, ranks, options, fault, pattern", [
    ("ddp", 4, "--save-every 5", "2:7:kill", "rank 2 has died.* during step 7"),
    ("ddp", 4, "", "2:7:hang", "rank 2 has not reached all-reduce #.*step 7"),
    ("ddp", 4, "--check-every 5", "1:7:bitflip", DIFFER.format(10, 1)),
    ("fsdp", 4, "--cpu-offload all", "2:7:kill", "rank 2 has died.* during step [67]"),
    rest("fsdp", 4, "--sharding hybrid --shard-group 2", "1:7:bitflip", "differ"),
    # (A bit that flips in a rank's state is gathered by all nodes, so it cannot be found, as in FSDP without replicas.)
    rest("zeropp", 4, NODES, "2:7:kill", "rank 2 has died.* during step [67]"),
    rest("muon", 4, "", "2:7:kill", "rank 2 has died.* during step [67]"), rest("muon", 4, "", "1:4:hang", HANGS.format("1")),
    ("tp", 4, "--tensor-parallel 2", "1:3:bitflip", DIFFER.format(3, 1)), # in what all ranks have
    ("pp", 4, "--layers 8", "3:3:bitflip", DIFFER.format(3, 3)),          # in one copy of the tied matrix
    ("cp", 4, f"{GROUPS} ring", "3:5:kill", "rank 3 has died.* during step 5"),
    rest("cp", 4, f"{GROUPS} allgather", "0:5:kill", "rank 0 has died.* during step 5"),
    rest("cp", 4, f"{GROUPS} ring --cp-balance zigzag", "0:4:hang", HANGS.format("0(-1)?")), # with it waits the other of its group
    rest("cp", 4, f"{GROUPS} ulysses", "2:4:hang", HANGS.format("2(-3)?")),
    ("cp", 4, f"{GROUPS} ulysses", "1:3:bitflip", DIFFER.format(3, 1)),
    ("3d", 8, MESH, "5:3:kill", r"rank 5 \(dp 1, pp 0, tp 1\) has died"),
    rest("3d", 8, f"{MESH} --zero-stage 1", "6:3/1:kill", r"rank 6 \(dp 1, pp 1, tp 0\) has died .* it was .*in F1 on stage 1")])
def test_a_rank_that_fails_is_named_by_all(name, ranks, options, fault, pattern):
    run = faulty(name, SMALL, options, "--fault", fault, ranks=ranks, timeout=5 if "hang" in fault else 60)
    assert_each_says(run, ranks, pattern, int(fault[0]) if "kill" in fault else None)


def test_after_a_rank_was_killed_the_last_checkpoint_continues_to_the_bit(tmp_path):
    options = [SMALL, "--save-every 5 --deterministic"]
    run = train("ddp", *options, "--no-save-async --fault 2:7:kill", ranks=4) # else two steps may be too few for the save
    assert_same(trained("ddp", *options, ranks=4), resumed(half(run, tmp_path / "out"), "ddp", *options, ranks=4))


def test_build_ranks_finds_the_rank_that_left_out_an_operation():
    """MPI may crash before a deadline has passed. test/tools/test_ranks_tool.py compares and refuses many more files."""
    run = train("ddp", SMALL, DEADLINE, "--fault 2:7:skip", ranks=4)
    assert run.status not in (0, "no end"), run
    files = sorted(map(str, run.folder.glob("ops_rank_*.txt")))
    found, alone = (command([program("ranks")], some) for some in (files, files[:1]))
    assert found.status == 2 and "rank 2" in found.out, found
    assert alone.status == 0 and "no file of rank" in alone.said, alone


# ---- signals ----
STEPS = 400
UNDISTURBED = [SMALL, "--deterministic --save-every 200 --steps", STEPS]
ASKS = {signal.SIGTERM, signal.SIGUSR1}
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


@contextlib.contextmanager
def running(folder, name, *options, ranks=2, **env):
    """A run that has made its first step and goes on: a future with its Run, the number of steps it has logged (a function), and
    the process ids of its ranks, by rank."""
    path, pids = program(f"train_gpt2_{name}"), {}

    def steps():
        return (folder / "metrics.jsonl").read_text().count('"step"') if (folder / "metrics.jsonl").exists() else 0

    with ThreadPoolExecutor() as threads:
        run = threads.submit(command, [path], *options, ["--out", folder], ranks=ranks, env=env)
        try:
            until(lambda: steps() > 0 or run.done())
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError): # a process that has ended, or is somebody else's
                    words, variables = ((place / file).read_bytes().split(b"\0") for file in ("cmdline", "environ"))
                    if words[0] == path.encode() and str(folder).encode() in words:
                        rank = next(v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK="))
                        pids[int(rank.split(b"=")[1])] = int(place.name)
            assert len(pids) == ranks and not run.done(), run.result() if run.done() else pids
            yield run, steps, [pids[rank] for rank in range(ranks)]
        finally:
            for pid in pids.values() if not run.done() else ():
                with contextlib.suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)


def signals(task, field):
    """Reads a field of /proc/PID/task/TID/status: SigCgt has the signals with a handler, SigBlk those that the thread blocks."""
    mask = int(re.search(rf"^{field}:\s*(\w+)", (task / "status").read_text(), re.M)[1], 16)
    return {s for s in signal.valid_signals() if mask >> (s - 1) & 1}


@pytest.mark.parametrize("name", ["ddp", "tp", *map(rest, ("zero", "fsdp", "muon", "zeropp", "pp", "3d", "compress", "cp"))])
def test_a_signal_to_one_rank_makes_all_save_at_the_same_step_and_no_bit_changes(name, tmp_path):
    """The last rank gets SIGTERM hundreds of times within half a second, as from a launcher and a group of processes at once; no
    thread that computes may run a handler. Whatever the ranks share, each hears of it."""
    ranks, mesh = (4, "--mesh dp=2,tp=2") if name == "3d" else (2, "--tensor-parallel 2" if name == "tp" else "")
    options = [SMALL, "--deterministic --lr-schedule constant", mesh]
    with running(tmp_path / "out", name, *options, "--steps 1000000", ranks=ranks) as (run, _, pids):
        for pid in pids:
            handled = signals(Path(f"/proc/{pid}"), "SigCgt") - FAULTS
            blocked = [signals(task, "SigBlk") for task in Path(f"/proc/{pid}/task").iterdir()]
            assert not ASKS & handled, handled
            for kind in handled, ASKS: # one thread waits for each kind, and while it waits it does not block it
                assert sum(not kind <= some for some in blocked) <= 1, f"threads block {blocked}, not {kind}"
        begin = time.monotonic()
        with contextlib.suppress(ProcessLookupError): # it may have ended
            while time.monotonic() < begin + 0.5:
                os.kill(pids[-1], signal.SIGTERM)
                time.sleep(0.0002)
        ended = run.result()
    step = int(re.search(rf"^stop       after step (\d+): a signal has told 1 of {ranks} ranks to save", ended.out, re.M)[1])
    assert ended.status == 200 and [path.name for path in (tmp_path / "out").glob("step_*")] == [f"step_{step:08}"], ended
    undisturbed = trained(name, *options, "--steps", step, ranks=ranks).folder / f"step_{step:08}"
    for file in sorted(path for path in undisturbed.iterdir() if path.suffix == ".safetensors"):
        assert (tmp_path / "out" / undisturbed.name / file.name).read_bytes() == file.read_bytes(), file


def mpirun_of(pid):
    """The mpirun of Open MPI 4, or 5, that has started a rank."""
    while not re.match("mpirun|prterun", Path(f"/proc/{pid}/comm").read_text()):
        pid = int(re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])
    return pid


def test_a_signal_to_the_launcher_ends_a_run_that_resumes_to_the_bit(tmp_path):
    """mpirun passes USR1 on, and ends with the ranks' status."""
    options = [SMALL, "--deterministic --lr-schedule constant"]
    with running(tmp_path / "out", "ddp", *options, "--steps 1000000") as (run, steps, pids):
        os.kill(mpirun_of(pids[0]), signal.SIGUSR1)
        ended = run.result()
    assert ended.status == 200, ended
    assert_says(ended.out, r"^stop +after step \d+: a signal has told [12] of 2 ranks") # the other may get it a step later
    options += ["--steps", steps() + 5]
    assert_same(trained("ddp", *options, ranks=2), resumed(tmp_path / "out", "ddp", *options, ranks=2))


@pytest.mark.parametrize("name, options, status, saved", [
    ("single", "", 200, 1), ("ddp", "--fault 0:3:hang", -signal.SIGUSR1, 0)]) # a step that never ends saves nothing
def test_a_second_signal_ends_a_process_at_once(name, options, status, saved, tmp_path):
    log = tmp_path / "out" / "metrics.jsonl"
    with subprocess.Popen([program(f"train_gpt2_{name}"), *words(SMALL, "--steps 1000000", options, "--out", log.parent)]) as run:
        until(lambda: log.exists() and '"step":2' in log.read_text())
        run.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
        if not saved: run.send_signal(signal.SIGUSR1)
    assert (run.returncode, len([*log.parent.glob("step_*")])) == (status, saved)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_during_a_step_ends_and_says_so(how, tmp_path):
    """SIGTERM to every rank, as from a launcher, and SIGINT to the launcher, as from Ctrl-C."""
    with running(tmp_path / "out", "fsdp", SMALL, "--steps 1000000", SHARD_LEAVE_SECONDS=1) as (run, _, pids):
        first, *others = pids if how == signal.SIGTERM else [mpirun_of(pids[0])]
        os.kill(first, how)
        for pid in others:
            with contextlib.suppress(ProcessLookupError): os.kill(pid, how) # unless it has already ended because the first did
        ended = run.result()
    assert ended.status not in (0, "no end") and not re.search("core dumped|corrupted|Aborted|Segmentation", ended.said), ended


def test_time_in_which_all_ranks_were_stopped_counts_as_no_wait(tmp_path):
    """This is what scontrol suspend and docker pause do. Rank 1 is stopped first, so rank 0 waits for it."""
    with running(tmp_path / "out", "ddp", *UNDISTURBED, DEADLINE) as (run, _, pids):
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(5 + 2.5 + 1) # the deadline, and what rank 1 waits longer (CONTROL_SETTLE, CONTROL_PATIENCE)
        for pid in pids: os.kill(pid, signal.SIGCONT)
        ended = run.result()
    assert ended.status == 0, ended
    assert_same(trained("ddp", *UNDISTURBED, ranks=2), Run(ended.command, ended.status, ended.out, ended.err, tmp_path / "out"))


# ---- pipelines. Actions are a fraction of a millisecond, so a heartbeat that tells where a rank is comes much too late. ----
# The first and the last rank, micro-batch and step; every schedule; replicas of the model. A step has 12 micro-batches.
PIPELINE = f"{TINY} --layers 8 --heads 4 --batch-size 2 --total-batch-size 384 --steps 10 --out="


@pytest.mark.parametrize("ranks, fault, stage, options", [ # stage: the rank's first
    (4, "2:5/7:kill", 2, "1f1b"), (4, "0:1/0:hang", 0, "1f1b"), rest(4, "0:1/0:kill", 0, "1f1b"), rest(4, "3:1/0:kill", 3, "zb-h1"),
    rest(4, "0:10/11:kill", 0, "gpipe"), rest(2, "0:6/10:kill", 0, "interleaved --chunks 4"),
    rest(4, "2:7/4:kill", 0, "1f1b --pipeline-parallel 2"), rest(2, "1:3/4:hang", 1, "zb-h1"),
    rest(4, "3:2/2:hang", 3, "interleaved"),
    rest(4, "1:3/5:hang", 1, "gpipe --pipeline-parallel 2")])
def test_a_stage_that_fails_is_named_with_its_micro_batch(ranks, fault, stage, options):
    rank, step, micro, kind = re.split("[:/]", fault)
    run = train("pp", PIPELINE, "--schedule", options, "--fault", fault, DEADLINE if kind == "hang" else "", ranks=ranks)
    assert re.search(rf"FAULT ON PURPOSE: RANK {rank} .* AT STEP {step}, MICRO-BATCH {micro} \(--fault\)", run.out), run
    if kind == "kill": pattern = rf"rank {rank} has died .* during step {step}; it was in F{micro} on stage {stage}(;|$)"
    else: pattern = rf"rank {rank} has not reached .*step {step}.*, and it is in F{micro} on stage {stage}(;|, and)"
    assert_each_says(run, ranks, pattern, int(rank) if kind == "kill" else None)


# ---- errors that every rank finds (test/unit has more: test_sharding.c, test_axes.c, test_pipeline.c) ----
@pytest.mark.parametrize("ranks, name, options, pattern", [
    (2, "ddp", "--fault 1:3/4:kill", "only a pipeline, as in train_gpt2_pp"),
    (2, "pp", f"{PIPELINE} --fault 1:3/12:kill", "there is no micro-batch 12; a step has 12"),
    (4, "ddp", "--fault 4:1:kill", "there is no rank 4"), (3, "ddp", "", "--total-batch-size 512 must be a multiple.*3 ranks"),
    (4, "ddp", "--seq-len 2048 --batch-size 1 --total-batch-size 0", "a step on 4 ranks needs"),
    (2, "fsdp", "--limit-all-gathers 1", "--limit-all-gathers 1 leaves no buffer to gather ahead: allow 2, or --prefetch none"),
    (4, "zeropp", "--node-ranks 3", "--node-ranks must divide the number of ranks, and 3 does not divide 4"),
    (4, "tp", "", "--tensor-parallel 4 does not divide 2 heads, .*choose --heads as a multiple of 4"),
    (3, "tp", "--vocab-size 500 --heads 3 --channels 24",
     "--tensor-parallel 3 does not divide the vocabulary, 512 .*choose --vocab-size 768"),
    (4, "tp", "--heads 4 --sequence-parallel --batch-size 1 --seq-len 15 --total-batch-size 0",
     "--sequence-parallel .* --batch-size 1 x --seq-len 15 = 15 does not divide; choose a multiple of 4"),
    rest(4, "tp", "--tensor-parallel 3",
         "--tensor-parallel 3 does not divide 4 ranks; start a multiple of 3, or choose a divisor of 4"),
    rest(4, "tp", "--tensor-parallel 2 --total-batch-size 100",
         "--total-batch-size 100 must be .* x 2 replicas of the model = 256"),
    (3, "pp", "", "--pipeline-parallel 3 with --chunks 1 makes 3 parts of the model, more than its 2 blocks"),
    (2, "pp", "--layers 8 --split 4,5", "--split 4,5 adds up to 9 blocks, and the model has 8"),
    rest(4, "pp", "--pipeline-parallel 3", "--pipeline-parallel 3 does not divide 4 ranks"),
    rest(2, "pp", "--emulate-ms 20,24,16,x", "--emulate-ms wants three numbers .* not '20,24,16,x'"),
    rest(2, "pp", "--layers 8 --chunks 2", "--chunks 2: only --schedule interleaved"),
    rest(2, "pp", "--pipeline-parallel 1 --schedule interleaved",
         "--schedule interleaved with 1 stage interleaves nothing; choose 2 or more"),
    rest(2, "3d", "--mesh tp=2 --schedule interleaved",
         "--schedule interleaved with 1 stage interleaves nothing; choose 2 or more"),
    (2, "pp", "--schedule zb-h1 --recompute block",
     "--recompute block: --schedule zb-h1 keeps all .*choose --schedule 1f1b, or --recompute none"),
    rest(4, "pp", "--pipeline-parallel 2 --total-batch-size 96",
         "--total-batch-size 96 must be .* x 2 replicas of the model = 256"),
    (4, "cp", "--cp ring --seq-len 18",
     "--seq-len 18 does not divide into 4 equal chunks for --context-parallel 4; choose 20 or 16"),
    (4, "cp", "", "--cp ulysses divides the heads .*, and 4 does not divide 2; choose --heads 4, or --cp ring"),
    rest(2, "cp", "--cp-balance zigzag",
         "--cp ulysses has all tokens of a head on one rank, .*leave out --cp-balance, or choose --cp allgather or ring"),
    rest(4, "cp", "--context-parallel 3",
         "--context-parallel 3 does not divide 4 ranks; start a multiple of 3, or choose a divisor of 4"),
    rest(4, "cp", "--context-parallel 2 --total-batch-size 100", "--total-batch-size 100 must be .* x 2 groups of ranks = 256"),
    (4, "3d", "--mesh dp=2,tp=2,pp=2", "--mesh dp=2,tp=2,pp=2 is a mesh of 8 ranks, and 4 were started; start 8"),
    # errors that every mesh finds, with the option names of this program
    rest(4, "3d", "--mesh pp=4 --layers 3", "--mesh pp=4 with --chunks 1 makes 4 parts of the model, more than its 3 blocks"),
    rest(3, "3d", "--mesh tp=3 --vocab-size 500 --heads 3 --channels 24",
         "--mesh tp=3 does not divide the vocabulary, 512 .*choose --vocab-size 768")])
def test_what_does_not_fit_the_ranks_is_said_by_each(ranks, name, options, pattern):
    assert_refused_by_all(train(name, SMALL, options, ranks=ranks), ranks, pattern)


@pytest.mark.parametrize("one, other, pattern", [
    ("--lr 0.01", "--lr 0.02", r'do not agree: --lr is "0.01" on rank 0 and "0.02" on rank 1'),
    (f"--data {TOKENS}", "--data README.md", "do not agree: --data")], ids=["option", "data"])
def test_ranks_with_different_options_or_data_say_which(one, other, pattern):
    line = f'[ $OMPI_COMM_WORLD_RANK = 0 ] && exec "$0" "$@" {one}; exec "$0" "$@" {other}'
    assert_refused_by_all(command(["sh", "-c", line, program("train_gpt2_ddp")], SMALL, ranks=2), 2, pattern)


def test_ranks_with_different_data_under_one_name_do_not_begin(tmp_path):
    contents = (ROOT / TOKENS).read_bytes()
    header, tokens = contents[:1024], contents[1024:]
    for folder, moved in ("0", tokens), ("1", tokens[2:] + tokens[:2]): # by one token
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokens.bin").write_bytes(header + moved)
    run = command(["bash", "-c", f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK && exec "$@"', "-"], [ROOT / program("train_gpt2_ddp")],
                  SMALL, "--data tokens.bin --val-data=", ranks=2)
    assert_refused_by_all(run, 2, r"the ranks do not agree: the data of --data \(as a checksum\) is .* on rank 0 and .* on rank 1")


