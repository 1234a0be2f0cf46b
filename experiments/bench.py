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

Every program starts from random weights, on random tokens; their steps are timed from outside by one clock
(dev/lib/programs.py). They take turns, round after round, so that a machine that slows down slows all of them. The table is also
printed if the benchmark is interrupted. The status is 1 if one of our programs failed; if a peer failed, its row says why."""
import contextlib, math, os, re, shutil, subprocess, tempfile, time
import dev.lib as m

MORE, STARTS_RANKS, FOLDER, SHOWS_PARTS = False, False, "", True
CONTRADICT = "no ratio, because the rounds contradict each other; measure again when nothing else runs."


# ---- on any device ----
class Bench:
    """The programs that are measured; absent: why others are not. A run of the results is a program and a size, which is a number
    of tokens (T) or of sequences (B). A device says which: tables, programs, sizes, peaks(), command(), warmup_and_steps() and
    found()."""
    watch = contextlib.nullcontext # around a program's run
    limit, seconds = math.inf, None # of all rounds, and of one program

    def __init__(self, x, build):
        self.x, self.d, self.o, self.absent, self.logs, self.begin = x, x.d, x.o, [], m.work(), time.monotonic()
        self.build, python = m.Path(m.environ("BUILD", build)).resolve(), m.environ("PYTHON", "python3")
        self.python = os.path.abspath(python) if "/" in python else python # programs run in another folder

    def elapsed(self): return time.monotonic() - self.begin

    def is_there(self, peer, there, why):
        if not there: self.absent.append(f"{peer}: {why}")
        return bool(there)

    def leave_out(self, **checks):
        """Programs whose names have a word, unless its check finds what they need."""
        for word, is_there in checks.items():
            if any(word in name for name in self.programs) and not is_there():
                self.programs = [name for name in self.programs if word not in name]

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

    def is_in_time(self, name, size): return True

    def measure(self, name, size, number):
        run, shown, errors = f"{name} {size}", f"{name}, {self.tables.letter}={size}", m.work() / "stderr"
        log = self.logs / f"{name}-{self.tables.letter}{size}-{number}.log"
        if number == 1: self.d.rounds.pop(run, None) # of another call
        with open(errors, "w") as stderr, self.watch():
            timed = m.Timed(self.command(name, size), *self.warmup_and_steps(name, size), log, self.seconds, cwd=m.work(),
                            stderr=stderr)
        with open(log, "a") as file: file.write(errors.read_text(errors="replace"))
        if timed.error:
            why = timed.error if timed.error.startswith("not done") else last_words(log.read_text(errors="replace"))
            self.d.add(run, number, failed=why)
            return m.note(f"  {shown} failed: {why}")
        self.d.add(run, number, ms=timed.ms, **self.found(name, timed, log.read_text(errors="replace")))
        m.note(f"  {shown}: {' '.join(f'{ms:.1f}' for ms in timed.ms)} ms")

    def answer(self):
        """Measures all rounds, of which the first may take longer than the limit. The status is 1 if one of our programs failed."""
        for number in self.x.in_turns():
            if number > 1 and self.elapsed() * number / (number - 1) > self.limit: break
            m.note(f"round {number} of at most {self.x.rounds}")
            self.d.add("peak", number, **self.peaks())
            for size in self.sizes:
                for name in self.programs:
                    if self.is_in_time(name, size): self.measure(name, size, number)
                    self.d.write(self.x.into)
            self.d.header["finished"] = number
        ours = [f"{name} {size}" for name in self.programs for size in self.sizes if name.startswith("ours")]
        return int(any(self.tables(self.d).failure(run) is not None for run in ours))


def last_words(text):
    """The last line that mentions an error, with the next line if it ends in a colon, or else the last line."""
    last = error = goes_on = ""
    for last in filter(str.strip, text.splitlines()):
        if goes_on: error, goes_on = f"{error} {last}", False
        elif re.search("error|out of memory|assert", last, re.I): error, goes_on = last, last.endswith(":")
    return (error or last)[:150].replace("|", "/") or "it said nothing"


def ratio(a, b): return a / b if a and b else 0


class Tables:
    """Results in Markdown: a table for each size, and the goals that are judged by it. A value is the median of all steps, of
    memory the maximum; 0: it was not measured. A device says the letter of its sizes, heads, titles of programs, goals(), intro(),
    batch(), and product(), the rate of a large product."""
    model = "gpt2"

    def __init__(self, d):
        self.d = d
        L, _, C = m.sizes_of(self.model)
        self.parameters, self.attention = (50257 + 1024) * C + L * (12 * C + 13) * C + 2 * C, 6 * L * C

    def of(self, run, key, summary=m.median):
        values = [record[key] for record in self.d.rounds.get(run, {}).values() if key in record]
        values = [x for value in values for x in (value if isinstance(value, list) else [value])]
        return summary(values) if values else 0

    def failure(self, run):
        """A program that failed in one round has no figure for the others."""
        return next((record["failed"] for record in self.d.rounds.get(run, {}).values() if "failed" in record), None)

    def ms(self, run): return self.of(run, "ms") if self.failure(run) is None else 0

    def faster(self, a, b):
        """How many times as fast a is as b; None: within a round the ratio is another one, so the rounds contradict each other."""
        rounds_of_b = self.d.rounds.get(b, {})
        both = [m.median(x["ms"]) / m.median(rounds_of_b[number]["ms"]) for number, x in self.d.rounds.get(a, {}).items()
                if "ms" in x and "ms" in rounds_of_b.get(number, {})]
        if both and m.contradict(self.of(a, "ms"), self.of(b, "ms"), m.median(both)): return None
        return ratio(self.ms(b), self.ms(a))

    def programs(self, size): return [name for name in self.titles if f"{name} {size}" in self.d.rounds]

    def flops(self, T):
        """Of a token: all parameters, without the vocabulary's padding, and attention's causal half."""
        return 6 * self.parameters + self.attention * T

    def tokens(self, name, size):
        """A second."""
        B, T = self.batch(name, size)
        return 1e3 * ratio(B * T, self.ms(f"{name} {size}"))

    def rate(self, name, size): return self.tokens(name, size) * self.flops(self.batch(name, size)[1])

    def row(self, name, size):
        run, rate = f"{name} {size}", self.rate(name, size)
        if (why := self.failure(run)) is not None: return [self.titles[name], f"failed: {why}", *[""] * (len(self.heads) - 1)]
        def share(peak): return f"{100 * rate / peak:.1f} %" if peak else "-"
        def most(key): return f"{1e-9 * x:.2f}" if (x := self.of(run, key, max)) else "-"
        def median(key): return f"{x:.0f}" if (x := self.of(run, key)) else "-"
        cells = {"tokens/s": f"{self.tokens(name, size):.0f}", "ms a step": f"{self.ms(run):.2f}",
                 "from, to": f"{self.of(run, 'ms', min):.1f} to {self.of(run, 'ms', max):.1f}",
                 "MFU": share(1e12 * self.of("peak", "sheet")), "of the product": share(self.product(name)),
                 "GB by its own count": most("counted"), "GB by nvidia-smi": most("used"), "GB in RAM": most("rss"),
                 "GB predicted": most("predicted"), "W": median("watts"), "MHz": median("mhz")}
        return [self.titles[name], *map(cells.get, self.heads)]

    def judged(self, size):
        """goals() has what is compared, the value reached, the goal or None, and how the value is written."""
        for text, reached, goal, form in self.goals(size):
            if reached is None: yield f"- {text}: {CONTRADICT}"
            elif reached:
                verdict = f" Goal {goal:g}: {'reached' if reached >= goal else 'MISSED'}." if goal else ""
                yield f"- {text}: {form.format(reached)}.{verdict}"

    def warnings(self): return []

    def text(self):
        lines = [*self.intro()]
        for size in dict.fromkeys(int(run.split()[1]) for run in self.d.rounds if self.titles.keys() & {run.split()[0]}):
            goals = [*self.judged(size)]
            table = m.table([f"{self.letter}={size}", *self.heads], *(self.row(name, size) for name in self.programs(size)))
            lines += ["", table.rstrip("\n"), *[""] * bool(goals), *goals]
        for warning in *self.warnings(), self.d.busy("these figures"): lines += ["", warning] * bool(warning)
        if absent := self.d.header["absent"]: lines += ["", "Not measured:", "", *(f"- {why}" for why in absent)]
        return "\n".join(lines) + "\n"


# ---- on a CPU ----
class CpuTables(Tables):
    letter, heads = "T", ("tokens/s", "ms a step", "from, to", "of the product", "GB in RAM", "GB predicted", "GB by its own count")
    titles = {"ours-fp32": "ours, fp32", "torch-fp32": "PyTorch, fp32", "llmc-fp32": "llm.c, fp32", "ours-bf16": "ours, bf16",
              "torch-bf16": "PyTorch, bf16"}

    def batch(self, name, T): return 4, T
    def memory(self, name, T, what="rss"): return self.of(f"{name} {T}", what, max) * 1e-9
    def product(self, name): return 1e9 * self.of("peak", "bf16" if "bf16" in name else "sgemm")

    def goals(self, T):
        ours, times = f"ours-fp32 {T}", "{:.2f} times"
        if T == 64:
            yield "faster than PyTorch (eager, fused AdamW), fp32", self.faster(ours, "torch-fp32 64"), 1.5, times
            yield "faster than llm.c, fp32", self.faster(ours, "llmc-fp32 64"), 3.5, times
            yield "of the fp32 matrix product's rate", ratio(100 * self.rate("ours-fp32", 64), self.product("fp32")), 82, "{:.2f} %"
            yield "bf16 faster than our fp32", self.faster("ours-bf16 64", ours), 1.5, times
            return
        predicted, counted, rss = (self.memory("ours-fp32", T, what) for what in ("predicted", "counted", "rss"))
        yield "FLOP/s over FLOP/s at T=64, fp32", ratio(self.rate("ours-fp32", T), self.rate("ours-fp32", 64)), 1, times
        yield "memory predicted over memory counted, fp32", ratio(predicted, counted), 1, times
        # 10.9 GB: a PyTorch step in which gradients stay allocated and logits are copied; the PyTorch program here needs less
        yield "half of 10.9 GB over memory in RAM, fp32", ratio(5.45, rss), 1, times
        yield "less memory than PyTorch, fp32", ratio(self.memory("torch-fp32", T), rss), 1, times

    def intro(self):
        h, fp32, bf16 = self.d.header, *(1e-9 * self.product(precision) for precision in ("fp32", "bf16"))
        yield (f"GPT-2 124M, B=4, {h['threads']} threads. Medians; finished rounds: {h['finished']}, steps a round: {h['steps']}, "
               f"at T=1024: {(h['steps'] + 2) // 3}")
        yield (f"This machine at best: {fp32:.0f} GFLOP/s in fp32, {f'{bf16:.0f} in bf16' if bf16 else 'no bf16'} "
               f"(oneDNN, 2048-cubed); copying {self.of('peak', 'copy'):.0f} GB/s")


class Cpu(Bench):
    tables, sizes = CpuTables, [64, 1024]

    def __init__(self, x):
        super().__init__(x, "build")
        self.steps, x.rounds = m.whole_environ("BENCH_STEPS", 6), m.whole_environ("BENCH_ROUNDS", 3)
        self.limit, self.sizes = m.whole_environ("BENCH_SECONDS", 240, 0), [64, 1024][:1 + m.whole_environ("BENCH_T1024", 1, 0)]
        m.need(f"{self.build}/train_gpt2_single", "bench")
        self.d.header |= {"steps": self.steps, "threads": len(os.sched_getaffinity(0)), "finished": 0, "absent": self.absent}
        self.tools = self.build / "bench"
        self.tools.mkdir(parents=True, exist_ok=True)
        self.peak, self.llmc, tempfile.tempdir = m.peak_program(self.tools), self.tools / "llmc", str(self.tools)
        self.programs = [*CpuTables.titles]
        self.leave_out(torch=lambda: self.has_torch("import torch", ". python3 -m venv venv && venv/bin/pip install torch, then "
                                                    "PYTHON=venv/bin/python make bench"), llmc=self.has_llmc, bf16=self.has_bf16)

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
        if len(self.sizes) > 1: self.absent.append("llm.c at T=1024: its program is fixed at T=64")
        return True

    def has_bf16(self):
        program = f"{self.build}/bf16/train_gpt2_single"
        return (self.is_there("ours in bf16", os.access(program, os.X_OK), f"there is no {program}; make bench builds it") and
                self.is_there("bf16", not m.output(self.peak, "bf16").startswith("bf16 0"),
                              "this processor has no instructions for it"))

    def peaks(self): return {name: float(x) for name, x in map(str.split, m.output(self.peak).splitlines())}

    def command(self, program, T):
        kind, precision = program.split("-")
        if kind == "torch": return self.torch(f"eager {'autocast' if precision == 'bf16' else precision}", "gpt2", 4, T)
        if kind == "llmc": return ["stdbuf", "-oL", self.llmc]
        return self.ours(f"{self.build}{'/bf16' * (precision == 'bf16')}/train_gpt2_single", "--model gpt2 --recompute none",
                         f"--batch-size 4 --seq-len {T} --out", m.work() / "out")

    def warmup_and_steps(self, name, T):
        if T == 1024: return 1, (self.steps + 2) // 3
        return 2, min(self.steps, 7) if name == "llmc-fp32" else self.steps # llm.c validates before every tenth step

    def is_in_time(self, name, T):
        """Whether it is likely to end in time. Long sequences have 16 times the tokens, and attention."""
        if T == 64: return True
        ms = CpuTables(self.d).ms(f"{name} 64")
        now, expected = self.elapsed(), 1 + (self.warmup_and_steps(name, T)[1] + 1) * 18 * ms / 1000
        if ms == 0 or name not in ("ours-fp32", "torch-fp32"): return False
        if f"{name} {T}" in self.d.rounds: return now + expected <= self.limit
        return self.is_there(f"{name} at T={T}", now + expected <= self.limit, f"it would take about {expected:.0f} s more than "
                             f"{now:.0f} s, and BENCH_SECONDS is {self.limit}")

    def found(self, program, timed, _):
        if not program.startswith("ours"): return {"rss": timed.rss}
        run = m.Run(m.work() / "out")
        return {"rss": timed.rss, "predicted": sum(run.about["predicted_bytes"].values()), "counted": run.last("mem_peak_bytes")}


def measure(x): return Cpu(x).answer()
def show(d, o): print(CpuTables(d).text(), end="")
