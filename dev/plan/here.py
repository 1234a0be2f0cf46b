"""here - measures this machine, or with --cluster the cluster that runs on it (dev/cluster), for build/plan --here: how fast each
of N ranks computes and copies, and the links between them.

The ranks are processes with one thread each, like those that train. They measure at the same time because they share caches, memory
and perhaps cores. The slowest rank's result counts, because a step waits for it. GFLOP/s are those of fp32 products, GB/s those of
copies (read and written); a step of train_gpt2_single, of a small model by default, shows how much of both training reaches.
build/comm_bench fits the links to a sweep over all ranks and, if a node has several ranks, over those of a node.

MPIRUN  how to start ranks (dev/on_ranks.sh)    CC  the compiler of dev/kernels/peak.c    CLUSTER  the cluster's folder
All other options are those of train_gpt2_single."""
import json, os
from concurrent.futures import ThreadPoolExecutor
import dev.lib as m

MODEL = "--model d4 --seq-len 128 --batch-size 4".split()


def link(ranks, sweep, options=""):
    """build/comm_bench's fit of the link between so many ranks."""
    file, log, bench = m.work() / "link.json", m.work() / "log", m.need(f"{m.environ('BUILD', 'build')}/comm_bench")
    if m.execute(m.words([*m.launcher(ranks), bench], "--op all", sweep, options, "--json", file), log): m.failed(bench, log)
    return json.loads(file.read_text())


def least(ranks, peak, what):
    """The rate of the slowest rank."""
    log = m.work() / "log"
    status = m.execute([*m.launcher(ranks), str(peak), what], log)
    rates = [float(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(f"{what} ")]
    if status or not rates or min(rates) <= 0: m.failed(f"peak {what}", log)
    return min(rates)


def step_of_one(copies, program, options, micro_batches):
    """ms of a step of so many micro-batches on the slowest of as many copies of the program, and its run."""
    tokens = int(m.option(options, "--batch-size")) * int(m.option(options, "--seq-len")) * micro_batches
    def train(copy):
        run = m.train("train_gpt2_single", program, m.QUIET, "--eval-every 0 --save-every 0 --recompute none --steps 20", options,
                      f"--total-batch-size {tokens}", out=m.work() / f"one_{copy}")
        return m.median(run.values("step_ms")), run
    with ThreadPoolExecutor(copies) as pool: return max(pool.map(train, range(copies)), key=lambda result: result[0])


class Alone:
    """Times of a micro-batch and an update on a rank while others compute, from steps of one and of two micro-batches."""
    def __init__(self, copies, options, program=""):
        self.what, self.first, self.second = (copies, program or m.built("single"), options), [], []
        self.again()

    def again(self):
        """Measures both. micro and update are ms of a micro-batch and of the rest of a step, from the fastest steps so far; the
        update takes no time if other work made two micro-batches as quick as one."""
        now, self.run = step_of_one(*self.what, 1)
        self.first, self.second = self.first + [now], self.second + [step_of_one(*self.what, 2)[0]]
        a, b = min(self.first), min(self.second)
        self.micro = b - a if 0 < b - a < a else b / 2
        self.update = max(a - self.micro, 1e-6)

    def rates(self):
        """GFLOP/s, by build/plan's count for a step, and GB/s of an update, which moves 28 bytes per parameter."""
        about, B, T = self.run.about, self.run.shape["B"], self.run.shape["T"]
        flops = B * T * 6 * (about["parameters"] + about["layers"] * about["channels"] * T)
        elements = about["predicted_bytes"]["optimizer state"] / (8 if about["precision"] == "fp32" else 12)
        return 1e-6 * flops / self.micro, min(28e-6 * elements / self.update, 1e5)


def on_cluster():
    """Starts ranks on the cluster from now on; returns its nodes and the ranks of each."""
    os.environ["MPIRUN"] = "dev/cluster/run"
    hostfile = m.Path(m.environ("CLUSTER", "build/cluster")) / "hostfile"
    if not hostfile.exists(): m.fail("there is no cluster: make cluster NODES=4 makes one")
    slots = [int(line.split("slots=")[1]) for line in hostfile.read_text().splitlines()]
    return len(slots), slots[0]


def measured(ranks, nodes=1, options=MODEL, comm="", alone=None):
    """All figures, on so many nodes. comm: options of build/comm_bench; alone: training's rates, if they are known."""
    peak = m.peak_program(m.work())
    gflops, copy = (least(ranks, peak, what) for what in ("sgemm", "copy"))
    reached, update = (alone or Alone(ranks, options)).rates()
    found = {"gflops": gflops, "copy": copy, "mfu": reached / gflops, "update": update}
    slow = "-b 16K -e 1M -f 4 -n 5 -w 2" # a link between nodes is slower than caches
    found |= link(ranks, "-b 64K -e 16M -f 4" if nodes == 1 else slow, comm)
    if nodes > 1: found["ranks_per_node"] = ranks // nodes
    if 1 < nodes < ranks: found["inside"] = link(ranks // nodes, "-b 64K -e 16M -f 4", comm)
    return found


def main():
    o = m.options(__doc__, ["cluster"], least={"ranks": (2, "a link needs two")}, ranks=0, out="")
    nodes, per_node = on_cluster() if o.cluster else (1, 2)
    ranks = o.ranks or nodes * per_node
    if ranks != nodes * per_node and o.cluster:
        m.fail(f"--ranks {ranks}: the cluster has {nodes} nodes of {per_node} ranks; leave it out")
    out = o.out or ("build/here_cluster.json" if o.cluster else "build/here.json")
    m.ranks_can_start(ranks, quiet=True)
    busy = m.busy_percent()
    if busy > 20: m.note(f"other programs keep this machine busy for {busy} % of the time: these figures will be too low")
    found = measured(ranks, nodes, [*MODEL, *o.more])
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    m.Path(out).write_text(json.dumps(found, indent=1) + "\n")
    rates = "".join(f" {1e-9 * x['busbw']:.3g}" for x in found["collectives"].values())
    print(f"{ranks} ranks of one thread: {found['gflops']:g} GFLOP/s, of which training reaches {100 * found['mfu']:.0f} %, and"
          f" {found['copy']:g} GB/s each; link:{rates} GB/s (all-reduce, reduce-scatter, all-gather, ...); written to {out}")


if __name__ == "__main__": main()
