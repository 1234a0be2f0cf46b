"""How many steps a run loses when a rank is killed or a node vanishes, and how soon dev/launch/keep_running has it training again.

Ranks of train_gpt2_ddp run on this machine, and on a cluster of four nodes (dev/cluster). At a random step after a checkpoint,
kill -9 ends a random rank, or the link of a random node goes down, and that of the node lost before comes back. Seconds count from
then to the first new step in the log; ended: to the end of the run's last process. A node's silence delays that by --comm-timeout 3
and --patience 3. Restarts wait no longer (--wait 0)."""
import os, random, re, subprocess, threading, time
from pathlib import Path
from statistics import median
import dev.lib as m
from experiments.cluster_table import Cluster

OPTIONS = dict(kills=20, nodes=20, ranks=2, save_every=20, seed=1)
LEAST, MORE, TRUST = {"kills": (0,), "nodes": (0,)}, False, "these times"
RUN = "--model d4 --channels 128 --seq-len 64 --batch-size 1 --total-batch-size 768 --steps 1000000 --eval-every 0 --comm-timeout 3"


class Kept:
    """A run under keep_running, and when it said what."""
    def __init__(self, command, out, o):
        self.log, self.said = out / "metrics.jsonl", []
        self.process = m.start(m.words(command, RUN, m.QUIET, "--save-every", o.save_every, "--out", out), text=True,
                               stdout=subprocess.PIPE, stderr=open(f"{out}.err", "w"))
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout: self.said.append((time.monotonic(), line))

    def step(self):
        found = re.findall(r'^{"step":(\d+)', self.log.read_text(), re.M) if self.log.exists() else []
        return int(found[-1]) if found else 0

    def until(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > end: m.failed("keep_running", f"{self.log.parent}.err")
            time.sleep(0.02)
        return found

    def heard(self, pattern, since):
        """When it said such a line after a moment, and what the pattern found."""
        return next(((when, found) for when, line in [*self.said] if when > since and (found := re.match(pattern, line))), None)

    def disturb(self, x, name, times, fault):
        for number in range(1, times + 1):
            m.note(f"  recovery: {name}, {number} of {times}")
            goal = self.step() + random.randrange(x.o.save_every, 2 * x.o.save_every)
            self.until(lambda: self.step() >= goal)
            begin = time.monotonic()
            fault()
            recovered, _ = self.until(lambda: self.heard("recovered ", begin))
            (ended, _), (_, lost) = self.heard("failed ", begin), self.heard(r"restart .*; (\d+) steps? lost", begin)
            x.d.add(name, number, lost=int(lost[1]), seconds=round(recovered - begin, 2), ended=round(ended - begin, 2),
                    save_every=x.o.save_every)


def keep_running(times): return f"dev/launch/keep_running --wait 0 --patience 3 --max-restarts {times}"


def kill_ranks(x):
    out, program = m.work() / "killed", x.program("ddp")
    run = Kept(m.words(keep_running(x.o.kills), *m.launcher(x.o.ranks), program), out, x.o)
    def kill(): os.kill(int(random.choice(m.output("pgrep -f", [f"^{program} .*{out}"]).split())), 9)
    run.disturb(x, f"{x.o.ranks} ranks, one is killed", x.o.kills, kill)
    m.end(run.process)


def lose_nodes(x):
    cluster, out, lost = Cluster(4, "1gbit,200us"), m.work() / "lost", 0
    os.environ |= {"CLUSTER": str(cluster.folder), "MPIRUN": "dev/cluster/run"} # whose ranks are no children of this script
    run = Kept(m.words("dev/cluster/run --", keep_running(x.o.nodes), "--hosts node0,node1,node2,node3 mpirun --host {hosts} -np",
                       "{ranks} -x OMP_NUM_THREADS -x OMP_WAIT_POLICY", x.program("ddp")), out, x.o)
    def lose():
        nonlocal lost
        cluster.sh("link all up")
        lost = random.choice([node for node in (1, 2, 3) if node != lost])
        cluster.sh(f"link {lost} down")
    run.disturb(x, "4 nodes, one vanishes", x.o.nodes, lose)


def measure(x):
    random.seed(x.o.seed)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if x.o.kills: kill_ranks(x)
    if x.o.nodes: lose_nodes(x)


def show(d, o):
    def of(run, key, form): return (form(f(x[key] for x in d.each_round(run))) for f in (median, max))
    d.print_table(["", "times", "steps lost, median", "most", "seconds to a new step, median", "most", "of these to the end"],
                  *([run, len(d.each_round(run)), *of(run, "lost", "{:g}".format), *of(run, "seconds", "{:.1f}".format),
                     next(of(run, "ended", "{:.1f}".format))] for run in d.runs()))
