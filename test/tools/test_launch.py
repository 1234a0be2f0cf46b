"""dev/launch: what each script starts, where and with which variables. test_cluster.py runs them on several nodes."""
import os, shutil, signal, subprocess
import pytest
from kernels import gpus
from suite import (TOKENS, assert_refused, assert_says, command, environment, executable, free_port, program, rest, succeeds,
                   trained, words)

SMALL = (f"--data {TOKENS} --val-data= --model d1 --heads 2 --channels 16 --seq-len 16 --batch-size 2 --steps 3 --warmup-steps 1 "
         "--lr 3e-3 --eval-every 0 --sample-every 0")
FSDP = "build/train_gpt2_fsdp"


def launch(name, *options, start=command, **settings):
    return start("bash" if name == "slurm" else "sh", f"dev/launch/{name}.sh", *options, **settings)


def script(name, *options, says=(), **settings):
    """Runs a script of dev/launch to its good end, and looks for these patterns in what it says."""
    run = launch(name, *options, start=succeeds, **settings)
    assert_says(run.said, *says)
    return run


@pytest.fixture
def told(tmp_path):
    """A launcher that prints its arguments."""
    return executable(tmp_path / "bin/srun", 'echo "$@"')


# ---- mpirun ----
@pytest.mark.parametrize("env, pattern", [
    ({}, r"--hostfile \S+/hosts --map-by slot .*-np 8( -x \w+)* ./program --steps 3"),
    ({"OMP_NUM_THREADS": 2, "NCCL_DEBUG": "INFO"}, r".* -x NCCL_DEBUG .*-x OMP_NUM_THREADS ./program .*"),
    ({"INTERFACE": "eth1"}, r".*--mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1 -x NCCL_SOCKET_IFNAME ./program .*")])
def test_mpirun_gets_a_rank_for_each_slot_of_the_hostfile_and_the_variables_that_ranks_need(told, tmp_path, env, pattern):
    (tmp_path / "hosts").write_text("# two nodes\n\nnode1 slots=4\nnode2 slots=3 # one is broken\nnode3\n")
    script("mpirun", tmp_path / "hosts", "./program --steps 3", env=env | {"MPIRUN": told}, says=[f"^{pattern}$"])


def test_two_ranks_on_this_machine_are_started_from_a_hostfile(tmp_path):
    (tmp_path / "here").write_text("localhost slots=2\n")
    script("mpirun", tmp_path / "here", [program("train_gpt2_fsdp")], SMALL, env={"OMP_NUM_THREADS": 1},
           says=["^ranks  *2, 2 on this machine, found by OpenMPI", "^step 3/3 "])


# ---- mpiexec of another MPI ----
@pytest.mark.parametrize("name", ["single", "ddp", *map(rest, ("zero", "fsdp", "zeropp", "muon", "tp", "pp", "3d", "cp", "compress"))])
def test_ranks_of_another_mpi_do_not_train_one_by_one(name, tmp_path):
    """MPICH's mpiexec sets these variables, which say nothing to Open MPI: each process would be a rank alone."""
    of_mpich = [{"PMI_SIZE": 2, "PMI_RANK": rank, "MPI_LOCALNRANKS": 2} for rank in range(2)]
    for env in *of_mpich, {"PMIX_RANK": 1}, *[{"OMPI_COMM_WORLD_SIZE": 2}, {"LOCAL_WORLD_SIZE": 2},
                                              {"SLURM_STEP_NUM_TASKS": 2}] * (name == "single"):
        run = command([program(f"train_gpt2_{name}")], SMALL, "--out", tmp_path / "out", env=env)
        variable = next(iter(env))
        assert_refused(run, f"error: {variable}={env[variable]}: a launcher .* several processes, .*or unset {variable}")
        assert "step" not in run.out and not (tmp_path / "out").exists(), run


TORCHRUN = {"LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "none"}
PTY = {"SLURM_STEP_NUM_TASKS": 8, "PMI_SIZE": 8, "SLURM_PTY_PORT": 34889}  # of srun -n 8 --pty, whose terminal is that of task 0


@pytest.mark.parametrize("env, name", [(TORCHRUN | {"WORLD_SIZE": 2}, "WORLD_SIZE"),
                                       (PTY | {"SLURM_PROCID": 1}, "SLURM_STEP_NUM_TASKS"),
                                       (PTY | {"SLURM_PROCID": 0, "PMI_RANK": 1}, "PMI_RANK")],
                                       ids=["torchrun", "pty", "mpiexec_in_pty"])
def test_one_process_of_several_does_not_train_by_itself(env, name):
    assert_refused(command([program("train_gpt2_single")], SMALL, env=env),
                   f"error: {name}={env[name]}: a launcher .* several processes")


def test_a_launcher_of_one_process_is_no_launcher():
    for env in ({"PMI_SIZE": 1, "PMI_RANK": 0, "MPI_LOCALNRANKS": 1, "PMIX_RANK": 0}, {"OMPI_COMM_WORLD_SIZE": 1}, TORCHRUN
                | {"WORLD_SIZE": 1}, {"WORLD_SIZE": 2}, PTY | {"SLURM_PROCID": 0, "PMI_RANK": 0}):
        succeeds([program("train_gpt2_single")], SMALL, env=env)


# ---- Slurm (test_cluster.py has a real one) ----
def slurm_variables(folder):
    return {"SLURM_NTASKS_PER_NODE": 2, "SLURM_CPUS_PER_TASK": 1, "OUT": folder / "out", "PROGRAM": FSDP,
            "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def slurm(folder, *options, **settings):
    return script("slurm", *options, env=slurm_variables(folder), **settings)


def test_slurms_script_shards_within_a_node_and_resumes_if_there_is_a_checkpoint(told, tmp_path):
    run = slurm(tmp_path, "--lr 3e-4",
                says=[f"^--mpi=pmix --kill-on-bad-exit=1 {FSDP} --model gpt2-xl .*--shard-group 2 .*--lr 3e-4$"])
    assert "--resume" not in run.out
    shutil.copytree(trained("fsdp", SMALL).checkpoint(), tmp_path / "out/step_00000003")
    slurm(tmp_path, says=["--checkpoint sharded --resume$"])


@pytest.mark.parametrize("status, queued", [(200, 1), (1, 0), (0, 0)])
def test_slurms_script_queues_a_job_again_only_when_it_has_saved(status, queued, tmp_path):
    executable(tmp_path / "bin/srun", f"trap 'exit {status}' USR1; echo ready; while :; do sleep 0.05; done")
    executable(tmp_path / "bin/scontrol", 'echo "scontrol $@"')
    env = environment(**slurm_variables(tmp_path), SLURM_JOB_ID=7)
    with subprocess.Popen(words("bash dev/launch/slurm.sh"), env=env, stdout=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        run.send_signal(signal.SIGUSR1)
        assert run.stdout.read().count("\nscontrol requeue 7\n") == queued and run.wait(20) == status


# ---- by hand ----
def test_two_nodes_by_hand_number_their_ranks():
    place = 'echo "$RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE, meeting at $MASTER_ADDR $MASTER_PORT"'
    for node in 0, 1:
        said = script("by_hand", node, "2 2 node1:2950 sh -c", [place]).out
        assert sorted(said.splitlines()) == [f"{2 * node + k} of 4, here {k} of 2, meeting at node1 2950" for k in range(2)]


def test_a_rank_that_fails_gives_its_status():
    assert launch("by_hand", "0 1 3 here:2950 sh -c", ["exit $RANK"]).status == 2


def test_ranks_by_hand_hear_usr1():
    waits = "trap 'exit $((200 + RANK))' USR1; echo ready; while :; do sleep 0.05; done"
    line = words("sh dev/launch/by_hand.sh 0 1 2 here:2950 sh -c", [waits])
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as run:
        for _ in range(2): run.stdout.readline()
        run.send_signal(signal.SIGUSR1)
        assert run.wait(20) == 201


def test_ranks_by_hand_need_a_launcher_for_mpi():
    assert_refused(launch("by_hand", "0 1 2", f"127.0.0.1:{free_port()}", [program("train_gpt2_fsdp")], SMALL), "error: .*mpirun")


@pytest.mark.rest
@gpus.missing("cublasLt", "cudnn", "nccl")
def test_ranks_by_hand_need_no_launcher_for_nccl():
    script("by_hand", "0 1 2", f"127.0.0.1:{free_port()}", [gpus.program("fsdp")], SMALL, env=gpus.gpus_of("nccl", 2),
           says=["^ranks  *2, 2 on this machine, found by torchrun; NCCL", "^step 3/3 "])


# ---- errors ----
@pytest.mark.parametrize("script, options, env, patterns", [
    ("mpirun", "@/none ./program", {}, ["there is no hostfile .*/none"]), ("mpirun", "@/empty ./program", {}, ["names no node"]),
    ("slurm", "", {"SLURM_NTASKS_PER_NODE": 2, "PROGRAM": "./none"}, ["there is no ./none here", "make train_gpt2_fsdp"]),
    ("by_hand", "2 2 1 here:2950 true", {}, ["NODE must be at most 1 with 2 nodes"]),
    ("by_hand", "0 1 1 here true", {}, ["ADDRESS:PORT must be like"])])
def test_what_cannot_be_started_is_refused(tmp_path, script, options, env, patterns):
    (tmp_path / "empty").write_text("# nothing\n")
    assert_refused(launch(script, options.replace("@", str(tmp_path)), env=env), *patterns)


def test_outside_of_a_job_slurms_script_says_how_to_use_it():
    run = launch("slurm", env={"PROGRAM": FSDP})
    assert run.status and "sbatch dev/launch/slurm.sh" in run.err, run
