"""plan_check.py - steps that build/plan predicts from what was measured here, beside steps of the programs.

Measured first: the link between that many ranks (build/comm_bench), and what a micro-batch and an update take one rank, from steps
of one and of two micro-batches. Ranks share caches, memory and perhaps cores, so one rank is measured while as many copies of
train_gpt2_single run as there will be ranks, each with one thread; the slowest of them counts, before the programs run or after.
Between processes of a machine, communication takes the time of the core that also computes: --core-share 1. Between nodes
(MPIRUN=dev/cluster/run) it waits for a link instead: --core-share 0. Then each program runs. Other work on this machine can
only hold a step up, so the fastest step counts, of the programs as of one rank. More ranks than cores run only with --oversubscribe
yes, and the table says so: a rank that waits leaves its core to others, which no plan counts. The model is --model d4 --seq-len 128
--batch-size 4 where nothing else is given."""
import json
from concurrent.futures import ThreadPoolExecutor
import here
import measure as m

STAGES = "single ddp zero fsdp tp pp 3d".split()


def programs(N):
    """(name, title of the plan's table, column of its ms, stage, micro-batches, replicas of the model, the program's options, the
    plan's)."""
    yield "ddp", "ddp", 4, "ddp", 1, N, "", ""
    yield "ddp, 2 micro-batches", "ddp", 4, "ddp", 2, N, "", ""
    for z in 1, 2, 3: yield f"zero {z}", f"zero-{z}", 4, "zero", 1, N, f"--zero-stage {z}", ""
    yield "fsdp", "fsdp", 4, "fsdp", 1, N, "", ""
    yield f"tp {N}", f"tp {N}", 4, "tp", 1, 1, "", f"--tensor-parallel {N}"
    yield f"tp {N}, rows cut", f"tp {N}", 4, "tp", 1, 1, "--sequence-parallel", f"--tensor-parallel {N} --sequence-parallel"
    for schedule in "gpipe", "1f1b", "zb-h1":
        options = f"--schedule {schedule}"
        yield f"pp {N}, {schedule}", f"pp {N}", 8, "pp", 2 * N, 1, options, f"--pipeline-parallel {N} {options}"
    for d, t, p in dict.fromkeys([(N, 1, 1), (1, N, 1), (1, 1, N), (N // 2, 2, 1), (N // 2, 1, 2), (1, N // 2, 2)]):
        mesh = f"--mesh dp={d},tp={t},pp={p} --zero-stage 1"
        if d * t * p == N: yield f"3d {d} x {t} x {p}", "mesh", 6, "3d", 2 * N, d, mesh, mesh


class Check:
    def __init__(self, o):
        self.o, self.build, self.first, self.second = o, m.environ("BUILD", "build"), [], []
        self.tokens = int(m.option(o.more, "--batch-size")) * int(m.option(o.more, "--seq-len"))
        for tool in "plan", "comm_bench", *(f"train_gpt2_{stage}" for stage in STAGES):
            m.need(f"{self.build}/{tool}", f"{self.build}/{tool}")

    def train(self, stage, tokens, *options, **settings):
        run = m.train(f"train_gpt2_{stage}", f"{self.build}/train_gpt2_{stage}", f"--data {self.o.data} --eval-every 0 "
                      "--save-every 0 --recompute none", m.QUIET,
                      self.o.more, *options, f"--total-batch-size {tokens} --steps {self.o.steps}", **settings)
        return min(run.values("step_ms")), run

    def one(self, tokens):
        """ms of a step of so many tokens, on the slowest of as many copies of the program for one rank."""
        with ThreadPoolExecutor(self.o.ranks) as pool:
            runs = [pool.submit(self.train, "single", tokens, out=m.work() / f"one_{copy}") for copy in range(self.o.ranks)]
            return max((run.result() for run in runs), key=lambda result: result[0])

    def alone(self):
        """Measures a step of one and of two micro-batches; micro and update are ms of a micro-batch and of the rest of a step, by
        the least of these so far. (Where other work makes two as quick as one, an update takes nothing.)"""
        now, self.run = self.one(self.tokens)
        self.first, self.second = self.first + [now], self.second + [self.one(2 * self.tokens)[0]]
        a, b = min(self.first), min(self.second)
        self.micro = b - a if 0 < b - a < a else b / 2
        self.update = max(a - self.micro, 0)

    def predicted(self, title, column, micro_batches, options):
        """ms, from the row of these ranks below the title."""
        elements = self.run.about["predicted_bytes"]["optimizer state"] / 8
        said = m.output(f"{self.build}/plan", self.o.more, options, f"--accumulation {micro_batches} --vocab-size "
                        f"{self.run.about['vocabulary']} --ranks {self.o.ranks} --device cpu --precision fp32 --ranks-per-node 0 "
                        f"--link {m.work()}/link.json --compute-ms {self.micro:g} --memory-bandwidth "
                        f"{28e3 * elements / self.update if self.update else 0:g} --sm-share {self.o.core_share}").splitlines()
        begin = next(i for i, line in enumerate(said) if line.startswith(f"{title} ") and " ranks " in line)
        return float(next(row for row in map(str.split, said[begin + 1:]) if row and row[0] == str(self.o.ranks))[column])

    def measure(self, d):
        m.note("measuring the link, and one rank beside others ...")
        (m.work() / "link.json").write_text(json.dumps(here.link(self.o.ranks, f"{self.build}/comm_bench", self.o.sweep)))
        self.alone()
        rows = [*programs(self.o.ranks)]
        for name, _, _, stage, micro, copies, options, _ in rows:
            m.note(f"{name} ...")
            d.add(name, measured=self.train(stage, self.tokens * micro * copies, options, ranks=self.o.ranks)[0])
        self.alone()
        for name, title, column, _, micro, _, _, options in rows:
            d.first(name)["predicted"] = self.predicted(title, column, micro, options)
        d.header |= {"model": " ".join(self.o.more), "ranks": self.o.ranks, "before": self.first[0], "after": self.first[1],
                     "micro": self.micro, "update": self.update}


def check(o):
    for name, default in ("--batch-size", "4"), ("--seq-len", "128"), ("--model", "d4"):
        if name not in o.more: o.more = [name, default, *o.more]
    if o.ranks > m.cores() and o.oversubscribe != "yes":
        m.fail(f"{o.ranks} ranks are more than the {m.cores()} cores; give --oversubscribe yes to compare all the same")


def show(d, o):
    h, off = d.header, []
    if h["busy_percent"] > 20:
        m.note(f"other programs keep this machine busy for {h['busy_percent']} % of the time: these figures mean little")
    crowded = f", more than the {h['cores']} cores" if h["ranks"] > h["cores"] else ""
    print(f"{h['model']}, {h['ranks']} ranks of one thread{crowded}; one of {h['ranks']} copies: a step {h['before']:.1f} ms "
          f"before and {h['after']:.1f} after, of it a micro-batch {h['micro']:.1f} and an update {h['update']:.1f}; busy "
          f"{h['busy_percent']} %")
    print("%-22s %12s %12s %7s" % ("", "predicted ms", "measured ms", "ratio"))
    for r in d.records():
        ratio = r["predicted"] / r["measured"]
        off.append(max(ratio, 1 / ratio) - 1)
        print("%-22s %12.1f %12.1f %7.2f" % (r["run"], r["predicted"], r["measured"], ratio))
    print(f"half of them within {100 * m.median(off):.0f} %, all within {100 * max(off):.0f} %")



m.script(__doc__, lambda d, o: Check(o).measure(d), show, check, least={"ranks": (2,), "core_share": (0,)}, ranks=2, steps=8, oversubscribe="no", sweep="-b 64K -e 16M", core_share=1,
         data="data/train.bin", placeholders={"oversubscribe": "yes", "data": "FILE"})
