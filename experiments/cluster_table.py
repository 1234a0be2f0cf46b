"""Traffic between nodes, and its cost: every way to train in parallel, on clusters of 4 nodes with one rank each and of
2 nodes with two (dev/cluster), with the same sequences per step.

Each row runs in turn with the others, --rounds times. MB are per node and step. Its operations cross as a timeline of the program
and the places of its ranks say: a rank sends its part to each rank of the communicator in all-gathers, reduce-scatters and
all-to-alls, to the next one in a ring, to its parents and children in Open MPI's all-reduce, which is a tree. Counted is what the
kernel says that the nodes' interfaces have sent, in --steps steps more than in one; headers and acknowledgements come with it.
waits: the part of a step in which nothing is computed for want of communication. planned: what build/plan --here makes of what
dev/plan/here.py has measured of one rank beside others and of the links, with Open MPI's all-reduce or a ring; ranks of pipelines
compute in turns, so of these as many count as there are cores."""
import atexit, json, os, re
from collections import Counter
from dev.plan import here
from experiments import losses
import dev.lib as m

# name: nodes, program (with its precision), options. Programs that cut the model have all sequences in one rank's batch.
ROWS = {
    "ddp": (4, "ddp", ""), "ddp, ring": (4, "ddp", "--allreduce ring"),
    **{f"zero {z}": (4, "zero", f"--zero-stage {z}") for z in (1, 2, 3)}, "fsdp": (4, "fsdp", ""),
    "tp 4": (4, "tp", "--tensor-parallel 4 --batch-size 16 --allreduce ring"),
    "pp 4": (4, "pp", "--pipeline-parallel 4 --batch-size 2"),
    **{f"pp 4, {schedule}": (4, "pp", f"--pipeline-parallel 4 --batch-size 2 --schedule {schedule}")
       for schedule in ("gpipe", "zb-h1")},
    **{f"cp 4, {way}": (4, "cp", f"--context-parallel 4 --batch-size 16 --cp {way} --allreduce ring")
       for way in ("ulysses", "ring")},
    **{f"compress {way.split()[0]}": (4, "compress", f"--compress {way} --compress-from 0")
       for way in ("int8", "powersgd --rank 4")},
    "local sgd, H = 10": (4, "local-sgd", "--local-steps 10 --allreduce ring"),
    "ddp, ring, 2 x 2": (2, "ddp", "--allreduce ring"), "fsdp full": (2, "fsdp", ""),
    "fsdp hybrid": (2, "fsdp", "--sharding hybrid --shard-group 2 --allreduce ring"),
    "zero++": (2, "zeropp", ""), "fsdp full, bf16": (2, "fsdp bf16", "--reduce-dtype model"),
    "zero++, bf16": (2, "zeropp bf16", ""),
    "tp 2 in a node, dp 2": (2, "3d", "--mesh dp=2,tp=2 --batch-size 8 --allreduce ring"),
    "tp 4 over both": (2, "3d", "--mesh tp=4 --batch-size 16 --allreduce ring"),
    "pp 2 over both, dp 2": (2, "3d", "--mesh pp=2,dp=2 --batch-size 2 --allreduce ring")}
MODEL, STEP, RING = "--model d4 --channels 128 --seq-len 64", "--total-batch-size 1024", "--allreduce ring"
OPTIONS, ROUNDS, PLACEHOLDERS = dict(rows="all", link="50mbit,200us", steps=5), 3, {"rows": '"ROW;ROW"'}
TRUST, STARTS_RANKS, MORE = "these times", False, False


class Cluster:
    def __init__(self, nodes, link):
        self.nodes, self.folder = nodes, m.work() / f"cluster{nodes}"
        self.sh("up", nodes, 4 // nodes, link)
        atexit.register(self.sh, "down")

    def sh(self, *words):
        """What cluster.sh says."""
        return m.output("env", f"CLUSTER={self.folder}", "sh dev/cluster/cluster.sh", *words)

    def sent(self):
        return sum(int(line.split()[1]) for line in self.sh("sent").splitlines())

    def train(self, name, program, *options):
        """A run, and the bytes that all nodes have sent during it."""
        os.environ |= {"MPIRUN": "dev/cluster/run", "CLUSTER": str(self.folder)}
        before = self.sent()
        run = m.train(name, program, m.QUIET, MODEL, STEP, "--eval-every 0 --save-every 0", *options, ranks=4)
        return run, self.sent() - before

    def measured(self, alone, comm):
        """The file of what here.py says of it, for build/plan."""
        os.environ |= {"MPIRUN": "dev/cluster/run", "CLUSTER": str(self.folder)}
        file = self.folder / f"here{comm.replace(' ', '_')}.json"
        file.write_text(json.dumps(here.measured(4, self.nodes, comm=comm, alone=alone)))
        return file


def crossing(trace, ring, node, steps):
    """Bytes a step of the operations between ranks of different nodes, in these steps."""
    issued = [(rank, name, (re.search(r" of (\S+) \(", name) or [0, "world"])[1]) for rank, _, name, of, _ in m.operations(trace)
              if of in steps and not re.search(r" of [^. ]+ \(", name)] # without a number: of a rank alone
    members = {comm: sorted({rank for rank, _, other in issued if other == comm}) for comm in {comm for *_, comm in issued}}
    total = Counter()
    for rank, name, comm in issued:
        kind, n, size = m.operation(name)
        ranks = members[comm]
        N, i = len(ranks), ranks.index(rank)
        def cross(to): return n * size * (node(ranks[to % N]) != node(rank))
        if kind in ("all-gather", "reduce-scatter", "all-to-all"): total[kind] += sum(cross(to) for to in range(N) if to != i)
        elif kind == "send": total[kind] += cross(i + 1)
        elif kind == "all-reduce" and ring: total[kind] += 2 * (N - 1) / N * cross(i + 1)
        # up, and down to it
        elif kind == "all-reduce" and i: total[kind] += cross(i & (i - 1)) + cross(i - (1 << i.bit_length() - 1))
    return sum(total.values()) / len(steps)


def planned(row, clusters, files, alone):
    """ms of its step."""
    nodes, program, options = ROWS[row]
    program, _, precision = program.partition(" ")
    words, is_ring = m.words("--batch-size 4", options.replace(RING, "").replace("--compress-from 0", "")), RING in options
    one, key = alone["in turns" if program == "pp" or "pp=" in options else precision], (nodes, is_ring)
    if key not in files: files[key] = clusters[nodes].measured(alone[""], RING * is_ring)
    table = {"zero": f"zero-{words[-1]}", "3d": "mesh", "zeropp": "zero++", "local-sgd": "ddp",
             "compress": f"ddp {m.option(words, '--compress')}"}.get(program,
                                                                     program if program in ("ddp", "fsdp") else f"{program} 4")
    if program in ("zero", "local-sgd"): words = words[:2]
    if program == "zeropp": words += ["--node-ranks", "2"]
    if program == "pp": words = ["--schedule", "1f1b", *words]
    gflops, update = one.rates()
    said = json.loads(m.output(m.need("build/plan"), "--here --json --measured", files[key], "--ranks 4 --vocab-size",
                               one.run.about["vocabulary"], "--mfu 1 --peak-flops", 1e9 * gflops, "--memory-bandwidth",
                               1e9 * update,
                               MODEL, STEP, words, f"--precision {precision or 'fp32'}"))
    found = next(row for times in said["times"] if times["table"] == table for row in times["rows"] if row["ranks"] == 4)
    return 1e3 * (found["seconds"] - (found["exposed"] - found["communication"] / 10) * (program == "local-sgd"))


def measure(x):
    d, o = x.d, x.o
    clusters, trace = {nodes: Cluster(nodes, o.link) for nodes in {ROWS[row][0] for row in o.rows}}, m.work() / "trace.json"
    programs = {row: losses.build() if ROWS[row][1] == "local-sgd" else m.need("build/{1}train_gpt2_{0}".format(
        *(ROWS[row][1] + " ").split(" ")[:1], "bf16/" * ROWS[row][1].endswith("bf16"))) for row in o.rows}
    def ones(): # a rank beside others
        batch = m.words(MODEL, "--batch-size 4")
        yield "", here.Alone(4, batch)
        if any("pp" in ROWS[row][1] + ROWS[row][2] for row in o.rows): yield "in turns", here.Alone(min(4, m.cores()), batch)
        if any("bf16" in row for row in o.rows): yield "bf16", here.Alone(4, batch, m.need("build/bf16/train_gpt2_single"))
    alone, files = dict(ones()), {}
    for number in x.in_turns():
        for row in o.rows:
            nodes, program, options = ROWS[row]
            period = 10 if program == "local-sgd" else 1 # steps from one sum to the next
            steps = -(-o.steps // period) * period
            def train(*more): return clusters[nodes].train(row, programs[row], "--batch-size 4", options, "--steps", *more)
            (_, before), (run, after) = train(1), train(steps + 1)
            more = {}
            if number == 1:
                train(period + 2, "--trace", trace)
                more = {"crosses": crossing(trace, RING in options, lambda rank: rank * nodes // 4, range(2, period + 2)) / nodes}
            d.add(row, number, nodes=nodes, period=period, counted=(after - before) / steps / nodes,
                  sent=run.about["predicted_comm_bytes"],
                  model=run.shape["model"], link=o.link, loss=run.last("loss"), **run.speeds, **more)
            m.note(f"  {row}, round {number}: {m.median(run.values('step_ms')):.0f} ms")
    for one in alone.values(): one.again()
    for row in o.rows: d.first(row)["planned"] = planned(row, clusters, files, alone)
    d.header["measured"] = [{"nodes": nodes, "ring": ring} | json.loads(file.read_text()) for (nodes, ring), file in files.items()]


def of_period(d, row, key):
    """The median of a field's means over as many steps as there are from one sum to the next."""
    n = d.first(row)["period"]
    return m.median(sum(values[i:i + n]) / n for record in d.each_round(row) for values in (record[key],)
                    for i in range(0, len(values), n))


def show(d, o):
    first, off = d.records()[0], []
    print(f"{first['model']}; links of {first['link']}")
    for nodes in 4, 2:
        rows = [row for row in d.runs() if d.first(row)["nodes"] == nodes]
        if not rows: continue
        def cells(row):
            record, step, counted = d.first(row), of_period(d, row, "step_ms"), d.value(row, "counted")
            off.append(max(record["planned"] / step, step / record["planned"]) - 1)
            return [row, f"{step:.0f}", f"{record['planned']:.0f}", f"{record['planned'] / step:.2f}",
                    f"{100 * of_period(d, row, 'comm_exposed_ms') / step:.0f} %", f"{record['sent'] / 1e6:.2f}",
                    f"{record['crosses'] / 1e6:.2f}", f"{counted / 1e6:.2f}", f"{counted / record['crosses']:.3f}"]
        print()
        d.print_table([f"{nodes} nodes x {4 // nodes}", "step, ms", "planned", "planned / step", "waits", "a rank sends",
                       "crosses, as predicted",
                       "counted", "counted / predicted"], *map(cells, rows))
    print(f"\nof the {len(off)} plans half are within {100 * m.median(off):.0f} %, all within {100 * max(off):.0f} %")


def check(o):
    o.rows = [*ROWS] if o.rows == "all" else o.rows.split(";")
    for row in o.rows:
        if row not in ROWS: m.fail(f"there is no row '{row}'; there are {'; '.join(ROWS)}")
