"""Communication between GPUs, emulated or real: by MPI between ranks that share a GPU, by NCCL where each has its own; started by
mpirun or as torchrun does; and what a rank does when NCCL fails, or when another rank does not come."""
import os, re, signal, subprocess
import pytest
from gpus import emulator, gpus_of, missing, needs_emulator, needs_gpus, program
from suite import TOKENS, assert_each_says, assert_refused, command, environment, free_port, words

pytestmark = [pytest.mark.rest, pytest.mark.gpu, missing("cublasLt", "cudnn", "nccl")]
TINY = f"--data {TOKENS} --val-data= --model d1 --channels 16 --heads 2 --seq-len 16 --batch-size 2 --sample-every 0 --eval-every 0"
NCCL_FAILS = "error: NCCL: communication failed: remote process exited or there was a network error"


ALL_TYPES = "--op all -d all --root -1 -b 3 -e 21000 -f 19 -n 1 -w 0"  # of emulated GPUs a piece has 16 KiB


def collectives(name, comm, ranks, *options, strict=False, **env):
    if comm == "nccl": needs_gpus(ranks)
    return command([program(name)], "--comm-timeout 60", *options, ranks=ranks, strict=strict, env=gpus_of(comm, ranks, **env))


@pytest.mark.parametrize("comm, ranks, options, settings", [
    ("mpi", 2, "", {"seed": 1}), ("mpi", 2, "", {"seed": 2}), ("mpi", 2, "--deterministic", {}),
    ("mpi", 3, "--deterministic", {"strict": True}),
    ("mpi", 3, "--allreduce ring", {}), ("mpi", 4, "", {}), ("nccl", 1, "--comm nccl", {}),
    ("nccl", 2, "", {"seed": 1}), ("nccl", 2, "", {"seed": 2}), ("nccl", 2, "", {"seed": 3}), ("nccl", 2, "--deterministic", {}),
    ("nccl", 3, "--deterministic", {"strict": True}), ("nccl", 3, "--allreduce ring", {}), ("nccl", 4, "", {}),
    ("nccl", 3, "--windows-are shared", {}),
    ("nccl", 3, "--windows-are shared", {"nccl": "early"}), # without blocking NCCL gives communicators before they are ready
    ("nccl", 2, "--windows-are local", {"nccl": "local-windows"}), ("nccl", 2, "--windows-are none", {"nccl": "no-windows"}),
    ("nccl", 2, "--windows-are none", {"nccl": "failing-windows"}), ("nccl", 2, "--windows-are none", {"nccl": "no-memory"})],
    ids=lambda x: "-".join(f"{k}_{v}" for k, v in x.items()) if isinstance(x, dict) else str(x).replace("--", "").replace(" ", "_"))
def test_every_claim_holds_and_collectives_are_right(comm, ranks, options, settings):
    run = collectives("test/test_comm_cuda", comm, ranks, options, **settings)
    assert run.status == 0 and re.search(f"^# {comm} ", run.out, re.M | re.I) and re.search(r"^1\.\.\d+$", run.out, re.M), run
    for more in "", "--offload", *["--groups 2"] * (ranks > 1):
        run = collectives("comm_bench", comm, ranks, ALL_TYPES, re.sub(r"--windows-are \w+", "", options), more, **settings)
        assert run.status == 0 and re.search(f"^# comm_bench on .*: {comm} ", run.out, re.M | re.I), run
        assert run.out.count("# Out of bounds values : 0 OK") == (2 if more == "--offload" else 6), run


def test_the_log_says_that_one_hardware_queue_makes_streams_wait():
    for queues, says in ("1", True), ("8", False), (None, False):
        env = gpus_of("nccl", 1) | ({"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {})
        run = command([program("comm_bench")], "--comm nccl --maxbytes 8", env=env)
        assert run.status == 0 and ("CUDA_DEVICE_MAX_CONNECTIONS=1: streams wait for one another" in run.out) == says, run


def by_torchrun(folder, *arguments, fault=0, timeout=300):
    """Two ranks as torchrun starts them: the meeting place is in their environment, and MPI is not used. `fault`: the operation of
    rank 1 that NCCL fails. Returns their statuses and what they said."""
    needs_gpus(2)
    started, port = [], free_port()
    for rank in 0, 1:
        env = environment(2, **gpus_of("nccl", 2, **{"nccl_fault": rank * fault} if fault else {}), WORLD_SIZE=2,
                          LOCAL_WORLD_SIZE=2,
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank)
        with open(folder / f"rank{rank}", "w") as said:
            started.append(subprocess.Popen(words(*arguments), env=env, stdout=said, stderr=subprocess.STDOUT,
                                            start_new_session=True))
    try:
        statuses = [p.wait(timeout) for p in started]
    finally:
        for p in started:
            if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)
    return statuses, [(folder / f"rank{rank}").read_text() for rank in (0, 1)]


def test_ranks_that_torchrun_started_communicate_by_nccl(tmp_path):
    statuses, said = by_torchrun(tmp_path, [program("test/test_comm_cuda")], "--comm-timeout 60")
    assert statuses == [0, 0] and re.search("^# NCCL ", said[0], re.M) and re.search(r"^1\.\.\d+$", said[0], re.M), said


# ---- errors ----
def test_nccl_between_ranks_that_share_a_gpu_is_refused():
    assert_refused(collectives("comm_bench", "mpi", 2, "--comm nccl"), "ranks 0-1 share a GPU", "use --comm mpi")


# ---- registered memory ----
REACH, LATER = "these GPUs cannot reach one another's", "with it NCCL 2.29 to 2.31.1 may hang"


@pytest.mark.parametrize("settings, says", [
    ({"nccl": ""}, r"registered \((\d+) of \1 buffers\)"), ({"nccl": "local-windows"}, f"registered by each rank alone: {REACH}"),
    ({"nccl": "no-windows"}, f"not registered: {REACH}"), ({"nccl_version": 22707}, "not registered: this NCCL is older than 2.28"),
    ({"nccl_version": 22907}, f"not registered: {LATER}"), ({"nccl_version": 23007}, f"not registered: {LATER}"),
    ({"nccl_version": 23102}, r"registered \((\d+) of \1 buffers\)"),
    ({"nccl": "failing-windows"}, r"not registered: ncclCommWindowRegister failed on rank 0 \(.+\)")])
def test_the_log_says_whether_memory_is_registered_and_why_not(settings, says):
    run = command([program("ddp")], TINY, "--steps 1", ranks=2, env=gpus_of("nccl", 2, **settings))
    assert run.status == 0 and re.search(rf"^ranks  .*; NCCL [^;]*, memory {says};", run.out, re.M), run


def test_memory_is_not_registered_where_nccls_own_variable_forbids_it():
    run = command([program("ddp")], TINY, "--steps 1", ranks=2, env=gpus_of("nccl", 2) | {"NCCL_WIN_ENABLE": "0"})
    assert run.status == 0 and re.search("^ranks  .*, memory not registered: NCCL_WIN_ENABLE is 0;", run.out, re.M), run


@pytest.mark.parametrize("own, says", [("NCCL=no-memory", "ncclMemAlloc failed on rank 1"),
                                       ("NCCL_VERSION=22805", "ranks differ in NCCL's version or in NCCL_WIN_ENABLE")])
def test_what_one_rank_cannot_register_no_rank_does(own, says):
    """Each would wait for the others."""
    needs_emulator("can be told what one rank cannot do")
    line = f'[ $OMPI_COMM_WORLD_RANK = 1 ] && export CUDA_EMULATOR_{own}; exec "$0" "$@"'
    run = command(["sh", "-c", line, program("ddp")], TINY, "--steps 1 --comm-timeout 60", ranks=2, env=gpus_of("nccl", 2))
    assert run.status == 0 and re.search(rf"^ranks  .*, memory not registered: {says};", run.out, re.M), run


@pytest.mark.parametrize("fault, says, dead", [("hang", "rank 1 has not reached all-reduce", None),
                                               ("kill", "rank 1 has died .* during step 2", 1)])
def test_a_rank_that_does_not_come_is_named(fault, says, dead):
    run = command([program("ddp")], TINY, f"--fault 1:2:{fault} --comm-timeout 15", ranks=2, env=gpus_of("nccl", 2))
    assert_each_says(run, 2, says, dead)


def test_an_error_of_nccl_ends_a_rank_while_a_kernel_waits(tmp_path):
    """Destructors would wait for that kernel: exit() would not return. What was written is in the rank's files."""
    run = command([program("test/test_comm_cuda"), "--comm", "nccl", "--journal", tmp_path / "journal"], timeout=120,
                  env=emulator(nccl_fault=5))
    assert_refused(run, NCCL_FAILS)
    assert "parts_of_the_world" in (tmp_path / "journal").read_text()


def test_an_error_of_nccl_is_told_to_the_other_rank_and_both_leave_their_last_operations(tmp_path):
    statuses, said = by_torchrun(tmp_path, [program("ddp")], TINY, "--steps 30 --out", [tmp_path / "out"], fault=12)
    assert statuses == [1, 1] and f"rank 1: {NCCL_FAILS}" in said[1] and "rank 0: error: rank 1 has left" in said[0], said
    assert all((tmp_path / f"out/ops_rank_000{rank}.txt").stat().st_size for rank in (0, 1))
