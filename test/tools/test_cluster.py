"""dev/cluster: nodes on this machine that have only a network between them. Programs train on them as on one machine, started by
ssh and by Slurm; what the kernel counts on a link is what a program says that it sends; a link that fails is named, and nothing is
left behind."""
import os, re, subprocess, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
from suite import (ROOT, TOKENS, Run, assert_refused, assert_same, assert_says, command, half, processes, program, rest, succeeds,
                   trained, until)

SMALL = (f"--data {TOKENS} --val-data= --model d2 --heads 2 --channels 64 --seq-len 16 --batch-size 2 --steps 5 --warmup-steps 1 "
         "--lr 3e-3 --eval-every 0 --sample-every 0")
MISSING = "gives .* no namespaces|setup.sh --with-cluster" # this machine cannot have a cluster


class Cluster:
    """Nodes of their own for one test: sh("on 0 hostname"), run("ddp", options)."""

    def __init__(self, folder, user=()):
        self.folder, self.user = folder / "cluster", [*user]
        self.env = {"CLUSTER": self.folder, "OMP_NUM_THREADS": 1, "SHARD_LEAVE_SECONDS": 0.5}

    def sh(self, *words, start=succeeds):
        return start(self.user, "sh dev/cluster/cluster.sh", *words, env=self.env)

    def make(self, *words):
        """Makes what this machine may not be able to have."""
        run = self.sh(*words, start=command)
        if re.search(MISSING, run.err): pytest.skip(run.err)
        assert run.status == 0, run
        return self

    def up(self, *words): return self.make("up", *words)

    def slurm(self): return self.make("slurm")

    def run(self, name, *options, out=None, start=succeeds, through=[], **settings):
        run = start("dev/cluster/run", through, program(f"train_gpt2_{name}"), SMALL, *options,
                    *(["--out", out] if out else []), env=self.env, **settings)
        return Run(run.command, run.status, run.out, run.err, out)

    def sent(self):
        """Bytes over each node's link, by the kernel."""
        return [int(line.split()[1]) for line in self.sh("sent").out.splitlines()]

    def processes(self):
        return processes(str(self.folder))


@pytest.fixture
def cluster(tmp_path):
    """Cluster.up(), of which nothing is left afterwards."""
    made = Cluster(tmp_path)
    yield made
    made.sh("down")
    assert not made.folder.exists() and not made.processes()


# ---- nodes and links ----
def test_nodes_have_names_and_addresses_of_their_own_and_links_as_asked(cluster):
    cluster.up(3, 2, "unlimited")
    assert [cluster.sh("on", i, "hostname").out for i in range(3)] == ["node0\n", "node1\n", "node2\n"]
    assert cluster.sh("on 1 ssh -F", cluster.folder / "ssh_config", "node2 hostname").out == "node2\n"
    said = cluster.run("fsdp").out
    assert_says(said, "^ranks  *6, 2 on this machine", "^step 5/5 ")


def test_a_link_is_as_slow_and_as_far_as_it_is_asked_to_be(cluster):
    """At 20 Mbit/s 1 MB takes 0.4 s; an answer over links of 50 ms comes after 100 ms. Cores are shared: both may take longer."""
    cluster.up(2, 1, "20mbit,50ms")
    measure = """import socket, sys, time
if sys.argv[1] == "serve":
    with socket.create_server(("10.77.0.2", 5000)) as s:
        c = s.accept()[0]
        while data := c.recv(1 << 16):
            if data[-1:] == b"!": c.send(b".")
else:
    c = None
    while c is None:
        try: c = socket.create_connection(("10.77.0.2", 5000))
        except OSError: time.sleep(0.1)
    for size in 1, 1000000:
        begin = time.time(); c.sendall(b" " * (size - 1) + b"!"); c.recv(1); print(time.time() - begin)"""
    with subprocess.Popen(["sh", "dev/cluster/cluster.sh", "on", "1", "python3", "-c", measure, "serve"],
                          env=os.environ | {"CLUSTER": str(cluster.folder)}) as server:
        try: near, far = map(float, cluster.sh("on 0 python3 -c", [measure, "ask"]).out.split())
        finally: server.kill()
    assert 0.099 < near < 0.6 and 0.45 < far < 3


@pytest.mark.parametrize("words, patterns", [
    ("up 0 1 1gbit", ["NODES must be from 1 to 64, not '0'"]), ("up 2 x 1gbit", ["RANKS_PER_NODE must be"]),
    ("up 2 1 fast", ["LINK must be like 1gbit,200us", "not 'fast'"]), ("on 0 true", ["there is no cluster: make cluster"])])
def test_what_cannot_be_made_is_refused(tmp_path, words, patterns):
    assert_refused(Cluster(tmp_path).sh(words, start=command), *patterns)


def test_two_nodes_train_as_one_does(cluster, tmp_path):
    hybrid = "--sharding hybrid --shard-group 2 --deterministic"
    two = cluster.up(2, 2, "1gbit").run("fsdp", hybrid, out=tmp_path / "two")
    assert_same(trained("fsdp", SMALL, hybrid, ranks=4), two)


def test_a_plain_user_can_have_one():
    """In a user namespace. (Where the tests are root's, the user is nobody, who may not log in: no run.)"""
    with tempfile.TemporaryDirectory() as folder:
        as_user = []
        if os.getuid() == 0:
            os.chown(folder, 65534, 65534)
            as_user = f"setpriv --reuid=65534 --regid=65534 --clear-groups env HOME={folder}".split()
            if command(as_user, "test -r", [ROOT / "dev/cluster/cluster.sh"]).status: pytest.skip("nobody may not read this clone")
        made = Cluster(Path(folder), as_user).up(2, 1, "1gbit")
        try: assert made.sh("on 1 hostname").out == "node1\n" and made.sh("on 0 getent hosts node1").out.startswith("10.77.0.2 ")
        finally: made.sh("down")
        assert not made.folder.exists() and not made.processes()


def test_killed_a_cluster_leaves_nothing(cluster):
    cluster.up(2, 1, "1gbit")
    command("kill -9", (cluster.folder / "pid").read_text().strip())
    until(lambda: not cluster.processes(), 10)
    cluster.up(2, 1, "1gbit")


# ---- what crosses ----
@pytest.mark.parametrize("name, options", [("ddp", "--allreduce ring"), rest("zero", "--zero-stage 3"),
                                           rest("fsdp", "--reduce-dtype fp32")])
def test_the_kernel_counts_on_a_link_what_a_program_says_that_it_sends(cluster, name, options, tmp_path):
    """Twice as many steps send twice as much: what a start sends is not counted. Headers and acknowledgements take up to 3 %."""
    cluster.up(4, 1, "unlimited")
    counts = [cluster.sent()]
    for steps in 10, 30:
        out = tmp_path / f"{steps}"
        run = cluster.run(name, options, f"--channels 128 --steps {steps}", out=out)
        counts.append(cluster.sent())
    for begin, middle, end in zip(*counts):
        a_step = ((end - middle) - (middle - begin)) / 20
        assert 1 < a_step / run.about["predicted_comm_bytes"] < 1.03


# ---- Slurm ----
def test_srun_starts_ranks_on_nodes_that_train_as_on_one_machine(cluster, tmp_path):
    cluster.up(4, 1, "1gbit").slurm()
    run = cluster.sh("on 0 srun --mpi=pmix -N4 -n4", program("train_gpt2_ddp"), SMALL, "--deterministic --out", tmp_path / "out")
    assert_says(run.out, "^ranks  *4, 1 on this machine, found by Slurm; MPI")
    assert_same(trained("ddp", SMALL, "--deterministic", ranks=4), Run(run.command, 0, run.out, run.err, tmp_path / "out"))


@pytest.mark.rest
def test_a_job_that_is_told_to_saves_and_is_queued_again_and_resumes_to_the_bit(cluster, tmp_path):
    """slurm.sh hears USR1, as Slurm sends it five minutes before a job's time is over. Nothing else makes it save."""
    options = (f"{SMALL} --tokenizer bytes --recompute none --sharding hybrid --shard-group 1 --total-batch-size 128 --checkpoint "
               "full --steps 300 --deterministic")
    out, log = tmp_path / "out", tmp_path / "log"
    cluster.up(4, 1, "1gbit").slurm()
    cluster.env |= {"OUT": out, "PROGRAM": program("train_gpt2_fsdp")}
    cluster.sh("on 0 sbatch --nodes=4 --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=0 --output", log,
               "dev/launch/slurm.sh", options, "--save-every 0")
    until(lambda: (out / "metrics.jsonl").exists() and '"step":20,' in (out / "metrics.jsonl").read_text())
    cluster.sh("on 0 scancel --batch --signal=USR1 1")
    until(lambda: not cluster.sh("on 0 squeue -h").out)
    saved = re.search(r"^stop       after step (\d+): a signal has told . of 4 ranks to save and stop$", log.read_text(), re.M)[1]
    assert_says(log.read_text(), f"^saved step {saved} under", "^USR1: saved, and queued again$",
                f"^start      step {saved} of 300, from ", "^saved step 300 under", no=["^failed ", "^restart "])
    assert_same(trained("fsdp", options, ranks=4), Run(["sbatch"], 0, log.read_text(), "", out))


# ---- a network that fails ----
# Each fault so often. Each time prints a line, which pytest -rP shows.
ROUNDS = int(os.environ.get("CLUSTER_FAULT_ROUNDS", 1))
LONG_RUN = "--deterministic --steps 40 --save-every 5"


def interrupted(cluster, name, out, links):
    """A LONG_RUN whose links change so when it has saved twice; it has 3 s for each wait. Returns it, what each rank said, and the
    seconds until it ended. A rank that is cut off says it to a file."""
    def fail():
        until(lambda: len([*out.glob("step_*")]) > 1)
        cluster.sh(f"link {links}")
        return time.time()
    with ThreadPoolExecutor() as beside:
        failed = beside.submit(fail)
        run = cluster.run(name, LONG_RUN, "--comm-timeout 3", out=out,
                          through=["sh", "-c", f'"$0" "$@" 2>{out}.$OMPI_COMM_WORLD_RANK'],
                          start=command, timeout=60)
        return run, [Path(f"{out}.{rank}").read_text() for rank in range(4)], time.time() - failed.result()


# says: of the ranks on rank 0's side, and of those on the other, which hear nothing of rank 0.
@pytest.mark.rest
@pytest.mark.parametrize("name, links, gone, says", [
    ("ddp", "2 down", [2], "rank 2 on node2 has"), ("fsdp", "0 down", [1, 2, 3], "ranks 1-3 on node1, node2, node3 have"),
    ("fsdp", "2,3 part=1", [2, 3], "ranks 2-3 on node2, node3 have")])
def test_ranks_that_the_network_loses_are_named_and_the_run_resumes_to_the_bit(cluster, tmp_path, name, links, gone, says):
    """Nobody goes on alone: all ranks end soon after the deadline and write their last operations, and mpirun ends, too."""
    cluster.up(4, 1, "200mbit")
    for i in range(ROUNDS):
        out = tmp_path / f"{i}"
        run, said, seconds = interrupted(cluster, name, out, links)
        assert run.status not in (0, "no end") and seconds < 20, run
        for rank in range(4):
            assert_says(said[rank],
                        f"^rank {rank}: error: .*{'rank 0 on node0 has' if rank in gone else says} been silent for .*--resume")
        assert len([*out.glob("ops_rank_*.txt")]) == 4
        saved = run.checkpoint().name
        cluster.sh("link all up,part=0")
        again = cluster.run(name, LONG_RUN, "--resume", out=out)
        assert_says(again.out, f"^start      step .* of 40, from .*{saved}")
        assert_same(trained(name, SMALL, LONG_RUN, ranks=4), again)
        print(f"{name}, link {links}: named by all, ended after {seconds:.1f} s, resumed from {saved}")


@pytest.mark.rest
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_run_that_loses_one_of_four_nodes_ends_on_three_as_a_resume_on_three(cluster, tmp_path, name):
    """A step has 12 sequences, which 4 and 3 ranks divide. mpirun waits for the node without end, and is killed."""
    out, options = tmp_path / "out", f"{LONG_RUN} --batch-size 1 --total-batch-size 192 --keep 0"
    def lose():
        until(lambda: len([*out.glob("step_*")]) > 1)
        cluster.sh("link 2 down")
    cluster.up(4, 1, "200mbit")
    with ThreadPoolExecutor() as beside:
        lost = beside.submit(lose)
        run = command("dev/cluster/run -- dev/launch/keep_running --patience 3 --hosts node0,node1,node2,node3 mpirun --host "
                      "{hosts} -np {ranks} -x OMP_NUM_THREADS -x SHARD_LEAVE_SECONDS", program(f"train_gpt2_{name}"), SMALL, options,
                      "--comm-timeout 3 --out", out, env=cluster.env, timeout=120)
        lost.result()
    assert run.status == 0, run
    assert_says(run.out, "^failed     with status .*rank 2 on node2 has been silent", "^ranks  *4, 1 on", "^ranks  *3, 1 on",
                "^hosts      node2 of node0, node1, node2, node3 did not answer; 3 ranks on node0, node1, node3$",
                "^recovered  [0-9.]+ s after the failure, with step [0-9]+$")
    step, lost = map(int, re.search(r"^restart    1 of .*/step_0*(\d+); (\d+) steps? lost$", run.out, re.M).groups())
    three = half(trained(name, SMALL, options, ranks=4), tmp_path / "three", step)
    again = succeeds([program(f"train_gpt2_{name}")], SMALL, options, "--resume --out", three, ranks=3)
    assert_same(Run(again.command, 0, again.out, again.err, three), Run(run.command, 0, run.out, run.err, out))
    print(f"{name}: {lost} steps lost, {re.search('^recovered.*', run.out, re.M)[0]}")


@pytest.mark.rest
@pytest.mark.parametrize("name, node, link", [("ddp", 1, "loss=5%"), ("ddp", 2, "20mbit"), ("fsdp", 0, "20mbit")])
def test_a_bad_link_makes_a_run_slower_and_not_different(cluster, tmp_path, name, node, link):
    """A link that loses every twentieth frame makes TCP send again."""
    cluster.up(4, 1, "200mbit")
    cluster.sh("link", node, link)
    for i in range(ROUNDS):
        begun = time.time()
        run = cluster.run(name, "--deterministic", out=tmp_path / f"{i}")
        assert_says(run.out, "^step 5/5 ")
        assert_same(trained(name, SMALL, "--deterministic", ranks=4), run)
        print(f"{name}, link {node} {link}: {time.time() - begun:.1f} s")


@pytest.mark.rest
def test_a_cluster_is_measured_and_steps_on_it_are_planned(cluster, tmp_path):
    cluster.up(2, 2, "1gbit,200us")
    succeeds("python3 -m dev.plan.here --cluster --out", tmp_path / "here.json", env=cluster.env)
    planned = succeeds(program("plan"), "--here --cluster --ranks 4 --node-ranks 2 --measured", tmp_path / "here.json")
    assert_says(planned.out, "nodes of 2 ranks and 1 interface: .*here.json", r"^zero\+\+  ranks +compute ms")
    table = succeeds("python3 -m experiments cluster_table --link 1gbit,200us --rounds 1 --steps 2 --rows", ["zero++"], timeout=600)
    assert_says(table.out, r"^\| zero\+\+ \| [0-9]+ \| [0-9]+ \| [0-9.]+ \| ", "^of the 1 plans half are within [0-9]+ %")
