"""How fast a step of GPT-2 124M is, B=4, compared with the machine's peak and with other programs.

  make bench
  PYTHON=venv/bin/python LLMC=~/llm.c make bench      with both peers
  BENCH_STEPS=2 BENCH_ROUNDS=1 BENCH_T1024=0 make bench     a quick look
  python3 -m experiments bench [--into FILE | --from FILE]

PYTHON        a Python that has torch (default python3)
LLMC          a checkout of llm.c; its train_gpt2.c is built in our build folder, and nothing is written into the checkout
BENCH_STEPS   timed steps a round (default 6; at T=1024 a third of it), BENCH_ROUNDS at most so many rounds (default 3)
BENCH_SECONDS every program is measured once at T=64; what else would end later than this is left out (default 240)
BENCH_T1024=0 leaves out the long sequences
MPIRUN        starts the two ranks that show how much communication DDP's and FSDP's modes leave exposed (dev/on_ranks.sh)

Every program starts from random weights, on random tokens; their steps are timed from outside by one clock
(dev/lib/programs.py). They take turns, round after round, so that a machine that slows down slows all of them. A program's row
is printed when it has been measured, and the table at the end also where a run is interrupted."""
import os, shutil, subprocess, tempfile, time
import dev.lib as m

TRUST, MORE, STARTS_RANKS, FOLDER, SHOWS_PARTS = "these figures", False, False, "", True
NAMES = {"ours": "ours", "torch": "PyTorch", "llmc": "llm.c"}
DDP, FSDP = "--batch-size 16 --seq-len 128 --bucket-mb 2", "--model d6 --batch-size 4 --seq-len 64"
# The DDP runs compute much for each byte sent. The FSDP runs compute less, so a gather that the backward pass starts too late
# shows. (The forward pass gathers ahead in every mode; otherwise it would dominate the figure.)
MODES = {f"ddp-{mode}": ("ddp", f"--ddp {mode} {DDP}") for mode in ("naive", "bucketed")} | {
    f"fsdp-{mode}": ("fsdp", f"--prefetch {mode} {FSDP}") for mode in ("none", "backward-post", "backward-pre")}


# ---- on any device ----
class Peers:
    """Programs that are measured in turns; what is not measured, and why. A run of the results is a program and a size."""

    def __init__(self, x, build):
        self.x, self.d, self.o, self.absent = x, x.d, x.o, []
        self.build, self.python = m.Path(m.environ("BUILD", build)).resolve(), m.environ("PYTHON", "python3")

    def is_there(self, peer, there, why):
        if not there: self.absent.append(f"{peer}: {why}")
        return bool(there)

    def has_torch(self, test, why):
        there = m.ask(self.python, "-c", [test], stderr=subprocess.DEVNULL) is not None
        return self.is_there("PyTorch", there, f"{self.python} has no torch{why}")

    def has_stdbuf(self):
        return self.is_there("llm.c", shutil.which("stdbuf"), "there is no stdbuf (coreutils), without which its lines arrive late")

    def ours(self, program, *options):
        """--steps is far more than are timed: the program is stopped before it saves anything."""
        return [program, "--data", m.random_tokens(), *m.words(m.QUIET, "--steps 1000000 --eval-every 0", *options)]

    def torch(self, way, model, B, T):
        way = m.words(way, *m.sizes_of(model), B, T)
        return [self.python, m.ROOT / "dev/kernels/pytorch_gpt2.py", *way, self.x.device]


# ---- on a CPU ----
class Bench(Peers):
    def __init__(self, x):
        super().__init__(x, "build")
        self.steps, x.rounds = m.whole_environ("BENCH_STEPS", 6), m.whole_environ("BENCH_ROUNDS", 3)
        self.limit, self.long = m.whole_environ("BENCH_SECONDS", 240, 0), m.whole_environ("BENCH_T1024", 1, 0)
        m.need(f"{self.build}/train_gpt2_single", "bench")
        self.d.header |= {"steps": self.steps, "threads": len(os.sched_getaffinity(0)), "finished": 0, "absent": self.absent}
        self.took, self.begin, self.tools = {}, time.monotonic(), self.build / "bench"
        self.tools.mkdir(parents=True, exist_ok=True)
        self.peak, self.llmc, tempfile.tempdir = self.tools / "peak", self.tools / "llmc", str(self.tools)
        if not m.compiled("dev/kernels/peak.c", self.peak, "-std=c11 -O3 -march=native -ffp-contract=off -fopenmp"):
            m.fail("dev/kernels/peak.c cannot be built; make doctor lists what is missing")

    def elapsed(self):
        return time.monotonic() - self.begin

    def programs(self):
        """Names of what is measured."""
        torch = self.has_torch("import torch", ". python3 -m venv venv && venv/bin/pip install torch, then "
                               "PYTHON=venv/bin/python make bench")
        llmc, bf16 = self.has_llmc(), self.has_bf16()
        there = {"ours-fp32": True, "torch-fp32": torch, "llmc-fp32": llmc, "ours-bf16": bf16, "torch-bf16": torch and bf16}
        return [program for program, is_there in there.items() if is_there]

    def has_llmc(self):
        """llm.c's program reads files of fixed names in the folder it runs in. The flags are those of its own Makefile."""
        llmc = os.environ.get("LLMC")
        if not self.is_there("llm.c", llmc, "LLMC is not set. git clone https://github.com/karpathy/llm.c, then LLMC=llm.c make "
                             "bench") or not self.has_stdbuf(): return False
        if not os.access(f"{llmc}/train_gpt2.c", os.R_OK):
            m.fail(f"LLMC={llmc} has no train_gpt2.c; it must be a checkout of llm.c")
        if not m.compiled([f"{llmc}/train_gpt2.c"], self.llmc, "-Ofast -march=native -fopenmp -DOMP -w"):
            m.fail(f"{llmc}/train_gpt2.c cannot be built")
        data = m.work() / "dev/data/tinyshakespeare"
        data.mkdir(parents=True)
        for part in "train", "val": os.link(m.random_tokens(), data / f"tiny_shakespeare_{part}.bin")
        m.note("making random weights for llm.c ...")
        m.output(m.inputs(), "llmc", m.work() / "gpt2_124M.bin")
        if self.long: self.absent.append("llm.c at T=1024: its program is fixed at T=64")
        return True

    def has_bf16(self):
        program = f"{self.build}/bf16/train_gpt2_single"
        return (self.is_there("ours in bf16", os.access(program, os.X_OK), f"there is no {program}; make bench builds it") and
                self.is_there("bf16", not m.output(self.peak, "bf16").startswith("bf16 0"),
                              "this processor has no instructions for it"))

    def has_ranks(self):
        ddp, fsdp = (f"{self.build}/train_gpt2_{program}" for program in ("ddp", "fsdp"))
        return (self.is_there("two ranks", os.access(ddp, os.X_OK) and os.access(fsdp, os.X_OK),
                              f"there is no {ddp} or no {fsdp}; make bench builds them where MPI is") and
                self.is_there("two ranks", m.cores() >= 2, "they need two cores to overlap anything"))

    def command(self, program, T):
        kind, precision = program.split("-")
        if kind == "torch": return self.torch(f"eager {'autocast' if precision == 'bf16' else precision}", "gpt2", 4, T)
        if kind == "llmc": return ["stdbuf", "-oL", self.llmc]
        return self.ours(f"{self.build}{'/bf16' * (precision == 'bf16')}/train_gpt2_single", "--model gpt2 --recompute none",
                         f"--batch-size 4 --seq-len {T} --out", m.work() / "out")

    def measure(self, program, T, warmup, steps, number):
        if program == "llmc-fp32": steps = min(steps, 7) # it validates before every tenth step
        timed = m.Timed(self.command(program, T), warmup, steps, cwd=m.work() if program == "llmc-fp32" else None)
        if timed.error: return m.note(f"{timed.error}\n  {program} failed at T={T}")
        memory = {}
        if program.startswith("ours"):
            run = m.Run(m.work() / "out")
            memory = {"predicted": sum(run.about["predicted_bytes"].values()), "counted": run.last("mem_peak_bytes")}
        self.d.add(f"{program} {T}", number, ms=timed.ms, rss=timed.rss, **memory)
        m.note(f"T={T}" + row(self.d, program, T, peak(self.d, program)))

    def measure_ranks(self):
        """What communication costs two ranks. A launcher that is missing costs these rows, not the others."""
        try:
            for name, (program, options) in MODES.items():
                self.x.run(name, 2, f"{self.build}/train_gpt2_{program}", m.DATA, options, f"--steps {self.steps + 1}",
                           keep=lambda run: dict(exposed=run.values("comm_exposed_ms")))
        except m.Interrupted: raise
        except SystemExit as error: self.absent.append(f"two ranks: {error}")

    def if_time(self, name, expected, measure, *arguments):
        """Measures if that is likely to end in time. It takes as long as last time, or so many seconds as expected."""
        now, expected = self.elapsed(), self.took.get(name, expected)
        if now + expected > self.limit:
            if name not in self.took:
                self.absent.append(f"{name}: it would take about {expected:.0f} s more than {now:.0f} s, and BENCH_SECONDS is "
                                   f"{self.limit}")
            return
        measure(*arguments)
        self.took[name] = self.elapsed() - now

    def round(self, number, programs, ranks):
        m.note(f"round {number} of at most {self.x.rounds}")
        begin = self.elapsed()
        self.d.add("peak", number, **{name: float(x) for name, x in map(str.split, m.output(self.peak).splitlines())})
        for program in programs: self.measure(program, 64, 2, self.steps, number)
        self.took["round"] = self.elapsed() - begin
        if ranks: self.if_time("two ranks", 40, self.measure_ranks)
        steps = (self.steps + 2) // 3
        for program in ("ours-fp32", "torch-fp32") if self.long else ():
            if program not in programs: continue
            expected = 1 + (steps + 1) * 18 * ms(self.d, program, 64) / 1000 # 16 times the tokens, and attention
            self.if_time(f"{program} at T=1024", expected, self.measure, program, 1024, 1, steps, number)
        self.d.header["finished"] = number


def measure(x):
    bench = Bench(x)
    programs, ranks = bench.programs(), bench.has_ranks()
    for number in x.in_turns():
        # a first round is measured whatever it takes
        if number > 1 and bench.elapsed() + bench.took["round"] > bench.limit: break
        bench.round(number, programs, ranks)


CONTRADICT = "the rounds contradict each other; measure again when nothing else runs"


# ---- the table: a value is the median of all steps, of memory the most; 0 is what was not measured ----
def of(d, run, key, summary=m.median):
    values = [record[key] for record in d.rounds.get(run, {}).values() if key in record]
    values = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return summary(values) if values else 0


def faster(d, a, b):
    """How many times as fast a is as b; 0: one was not measured; None: within a round the ratio is another one, so that the rounds
    contradict each other."""
    both = [m.median(x["ms"]) / m.median(d.rounds[b][number]["ms"]) for number, x in d.rounds.get(a, {}).items()
            if "ms" in x and "ms" in d.rounds.get(b, {}).get(number, {})]
    if both and m.contradict(of(d, a, "ms"), of(d, b, "ms"), m.median(both)): return None
    return ratio(of(d, b, "ms"), of(d, a, "ms"))


def ms(d, program, T): return of(d, f"{program} {T}", "ms")
def memory(d, program, T, what): return of(d, f"{program} {T}", what, max) * 1e-9
def peak(d, program): return of(d, "peak", "bf16" if "bf16" in program else "sgemm")
def ratio(a, b): return a / b if a and b else 0


def rate(d, program, T):
    """GFLOP/s: 6 FLOPs a parameter and token; at T=1024 also the causal half of attention's two (T,T) products: 6 L C T."""
    return ratio(1e-6 * 4 * T * (6 * 124439808 + (6 * 12 * 768 * T if T == 1024 else 0)), ms(d, program, T))


def row(d, program, T, best):
    reached, kind, precision = rate(d, program, T), *program.split("-")
    share = f"{100 * reached / best:.0f} %" if best else "-"
    name, lasts = f"{NAMES[kind]}, {precision}", ms(d, program, T)
    text = "  %-14s %9.0f %10.0f %9.0f %9s %10.2f" % (name, lasts, 4e3 * T / lasts, reached, share, memory(d, program, T, "rss"))
    known = memory(d, program, T, "predicted")
    return text + (" %10.2f %10.2f" % (known, memory(d, program, T, "counted")) if known else "")


def rows(d, T, programs):
    print(f"\nT={T:<14}   ms/step   tokens/s   GFLOP/s   of peak  GB in RAM  predicted    counted")
    for program in programs:
        if ms(d, program, T): print(row(d, program, T, peak(d, program)))


def goals(d):
    """What is compared, the value reached, the goal or None, and the unit."""
    naive, bucketed = (of(d, f"ddp-{mode}", "exposed", min) for mode in ("naive", "bucketed"))
    none, post, pre = (of(d, f"fsdp-{mode}", "exposed") for mode in ("none", "backward-post", "backward-pre"))
    rss = memory(d, "ours-fp32", 1024, "rss")
    return [
        ("faster than PyTorch (eager, fused AdamW), fp32, T=64", faster(d, "ours-fp32 64", "torch-fp32 64"), 1.5, "times"),
        ("faster than llm.c, fp32, T=64", faster(d, "ours-fp32 64", "llmc-fp32 64"), 3.5, "times"),
        ("of the fp32 matrix product's rate, T=64", ratio(100 * rate(d, "ours-fp32", 64), peak(d, "fp32")), 82, "%    "),
        ("bf16 faster than our fp32, T=64", faster(d, "ours-bf16 64", "ours-fp32 64"), 1.5, "times"),
        ("FLOP/s at T=1024 over FLOP/s at T=64, fp32", ratio(rate(d, "ours-fp32", 1024), rate(d, "ours-fp32", 64)), 1, "times"),
        ("memory predicted over memory counted, fp32, T=1024",
         ratio(memory(d, "ours-fp32", 1024, "predicted"), memory(d, "ours-fp32", 1024, "counted")), 1, "times"),
        # 10.9 GB: a PyTorch step in which gradients stay allocated and logits are copied; the PyTorch program here needs less
        ("half of 10.9 GB over memory in RAM, fp32, T=1024", ratio(5.45, rss), 1, "times"),
        ("less memory than PyTorch, fp32, T=1024", ratio(memory(d, "torch-fp32", 1024, "rss"), rss), 1, "times"),
        # the minimum: a step that rank 0 reached last, so that waiting for a rank that was slowed down does not count
        ("communication exposed, naive over bucketed DDP, 2 ranks", ratio(naive, bucketed), 1, "times"),
        ("communication exposed, FSDP without prefetch over -pre", ratio(none, pre), 1, "times"),
        # no goal: on two busy cores a gather that starts a little earlier gains less than they differ from run to run
        ("communication exposed, FSDP without prefetch over post", ratio(none, post), None, "times")]


def show(d, o):
    h, bf16 = d.header, peak(d, "bf16")
    print(f"\nGPT-2 124M, B=4, {h['threads']} threads. Medians; finished rounds: {h['finished']}, steps a round: {h['steps']}, at "
          f"T=1024: {(h['steps'] + 2) // 3}")
    print(f"This machine at best: {peak(d, 'fp32'):.0f} GFLOP/s in fp32, {f'{bf16:.0f} in bf16' if bf16 else 'no bf16'} (oneDNN, "
          f"2048-cubed); copying {of(d, 'peak', 'copy'):.0f} GB/s")
    rows(d, 64, ("ours-fp32", "torch-fp32", "llmc-fp32", "ours-bf16", "torch-bf16"))
    if d.runs(" 1024$"): rows(d, 1024, ("ours-fp32", "torch-fp32"))
    print("\nGoals")
    for text, reached, goal, unit in goals(d):
        if reached is None: print(f"  {text}: no ratio, because {CONTRADICT}")
        if reached:
            print("  %-58s %7.2f %s" % (text, reached, unit) +
                  (f"   goal {goal:g}: {'reached' if reached >= goal else 'MISSED'}" if goal else ""))
    if h["absent"]: print("\nNot measured", *h["absent"], sep="\n  ")
