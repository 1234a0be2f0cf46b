"""How fast a step of GPT-2 is on a GPU in 16 bits, against llm.c and PyTorch: same model, batch and sequence length.

--model    gpt2 is 124M; gpt2-xl, 1.5B, also with recomputation and under FSDP; --batch: sequences a step, a table for each
--programs which rows of the table, by the names in results.jsonl. Only a call that names them measures ours-deterministic,
ours-own,
           ours-accumulate (32 micro-batches a step: it is not compared with others) and torch-eager
--add      keep what --out has of other programs and batches: the table then has all
--llmc     llm.c's train_gpt2cu or the folder that has it, built there with cuDNN's attention (doc/gpu.md says what that needs):
           make train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1. Without this option or LLMC, llm.c is left out
--out      folder for the programs' logs, results.jsonl and table.md (build/bench_gpu)
PYTHON     a Python whose torch sees the GPU (python3); without one PyTorch is left out
INPUTS     dev/kernels/inputs.c as a program, where there is no compiler
BUILD      where our programs are (build/cuda-bf16): make DEVICE=cuda PRECISION=bf16 programs build/cuda-bf16/bench_layers

Programs start from random weights, on random tokens; their steps are timed from outside by one clock (dev/lib/programs.py).
They take turns, round after round, so that a GPU that slows down slows all of them; medians count. llm.c has a row for each
setting worth trying. PyTorch has two, because neither is what our programs do: fp32 weights under autocast, and bf16 with no
master copy. MFU counts the same 6 N + 6 L C T FLOPs a token for every program (N: all parameters, without the vocabulary's
padding; attention's causal half), over the data sheet's rate; the next column is the share of a large product's measured rate.
Recomputed FLOPs do not count. The status is 1 if one of our programs failed; if a peer failed, its row says why."""
import os, re, subprocess
from pathlib import Path
import dev.lib as m
from experiments.bench import CONTRADICT, Peers, faster, of

OPTIONS = dict(programs=[], model="gpt2", batch=[32], seq_len=1024, steps=20, llmc=os.environ.get("LLMC", ""),
               out="build/bench_gpu")
ROUNDS, FLAGS, LEAST, PLACEHOLDERS = 3, ("add",), {"steps": (1,)}, {"llmc": "PATH", "out": "DIR", "programs": "NAMES"}
DEVICE, MORE, STARTS_RANKS, FOLDER, SHOWS_PARTS = "cuda", False, False, "", True
MICROS = 32 # micro-batches of ours-accumulate's step: of 16 x 1024 tokens they are the 524288 that GPT-2 was trained with
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
WARMUP = 5
LLMC = [f"llmc-ge{setting}" for setting in ("0-r0", "1-r0", "2-r0", "0-r1", "2-r1")]
# By name: the program, its options and what a table says of them
OURS = {"ours": ("single", "", ""), "ours-recompute": ("single", "--recompute block", ", --recompute block"),
        "ours-fsdp": ("fsdp", "", ", FSDP on one rank"), "ours-fsdp-recompute": ("fsdp", "--recompute block",
                                                                                 ", FSDP on one rank, --recompute block"),
        "ours-deterministic": ("single", "--deterministic", ", --deterministic"),
        "ours-own": ("single", "--attention own", ", --attention own"),
        "ours-accumulate": ("single", "", f", {MICROS} micro-batches a step")}
TORCH = {"torch-autocast": ("compile autocast", "PyTorch, fp32 weights, autocast"),
         "torch-bf16": ("compile bf16", "PyTorch, bf16, no master weights"),
         "torch-eager": ("eager autocast", "PyTorch, fp32 weights, autocast, not compiled")}


class Bench(Peers):
    def __init__(self, x):
        super().__init__(x, "build/cuda-bf16")
        o = self.o
        for name in "train_gpt2_single", "bench_layers":
            m.need(self.build / name, f"DEVICE=cuda PRECISION=bf16 build/cuda-bf16/{name}")
        self.out, self.work = Path(o.out), m.work()
        try: self.out.mkdir(parents=True, exist_ok=True)
        except OSError: m.fail(f"{self.out} cannot be made; --out names another folder")
        for old in [] if o.add else [*self.out.glob("*.log"), *self.out.glob("results.jsonl")]: old.unlink()
        known = [*OURS, *LLMC, *TORCH]
        for name in o.programs:
            if name not in known: m.fail(f"--programs: there is no '{name}'; there are {' '.join(known)}")
        self.programs = [name for name in known if name in o.programs] if o.programs else self.usual() + LLMC + [*TORCH][:2]
        for peers, is_there in (LLMC, self.has_llmc), (TORCH, self.has_gpu_torch):
            if {*peers} & {*self.programs} and not is_there():
                self.programs = [name for name in self.programs if name not in peers]
        self.find_smi()

    def usual(self):
        if self.o.model == "gpt2": return ["ours"]
        fsdp = f"{self.build}/train_gpt2_fsdp"
        return [*OURS][:4 if self.is_there("FSDP on one rank", os.access(fsdp, os.X_OK), f"there is no {fsdp}, which needs MPI and "
                                           "NCCL to be built") else 2]

    def has_llmc(self):
        """Whether it can be measured, with what it needs."""
        llmc = self.llmc_path = self.o.llmc and Path(self.o.llmc, "train_gpt2cu" if os.path.isdir(self.o.llmc) else "").resolve()
        if not self.is_there("llm.c", llmc, "neither --llmc nor LLMC says where its train_gpt2cu is"): return False
        is_built = os.access(llmc, os.X_OK)
        if not is_built and not self.o.add: # with --add other rows do not wait for it
            m.fail(f"there is no program {llmc}; in llm.c's folder: make train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1")
        if not self.is_there("llm.c", is_built, f"there is no program {llmc}") or not self.has_stdbuf(): return False
        m.output(m.inputs(), "llmc", self.work / "model.bin", self.o.model, "bf16")
        folders = (m.ask("sh dev/find_cuda.sh folder cublasLt cudnn") or "").splitlines() # it may have been linked elsewhere
        self.libraries = ":".join(filter(None, [*filter(os.path.isdir, folders), os.environ.get("LD_LIBRARY_PATH")]))
        self.is_there("llm.c with cuDNN", "cudnn" in (m.ask("ldd", llmc, stderr=subprocess.DEVNULL) or ""),
                      f"{llmc} was built without it, so its own kernels compute attention. Build it with USE_CUDNN=1")
        return True

    def has_gpu_torch(self):
        return self.has_torch("import torch; assert torch.cuda.is_available()", " that sees a GPU; PYTHON names another")

    def find_smi(self):
        gpu = m.environ("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.smi = m.words("nvidia-smi --query-gpu=memory.used,power.draw,clocks.sm --format=csv,noheader,nounits -i", gpu)
        held = samples(m.ask(self.smi) or "")
        if not self.is_there("memory, power and clocks as nvidia-smi sees them", held, "it does not answer"):
            self.smi = ["true"] # it prints nothing
        elif held[0][0] >= 1000: self.d.header["held"] = held[0][0]

    def command(self, name, B):
        o = self.o
        if name.startswith("torch"): return self.torch(TORCH[name][0], o.model, B, o.seq_len)
        if name.startswith("llmc"): # it validates at its first step, and would at the last
            ge, r = re.findall(r"\d", name)
            return ["env", f"LD_LIBRARY_PATH={self.libraries}", "stdbuf", "-oL", self.llmc_path, *m.words(
                f"-i tokens.bin -j tokens.bin -e model.bin -b {B} -t {o.seq_len} -x 1000000 -v 1000000 -m 1 -s 0 -l 0.0001 -c 0.1 "
                f"-ge {ge} -r {r}")]
        program, own, _ = OURS[name]
        return self.ours(self.build / f"train_gpt2_{program}",
                         f"--vocab-size 50257 --model {o.model} --batch-size {B} --seq-len {o.seq_len}",
                         "--recompute none" * ("--recompute" not in own), own,
                         f"--total-batch-size {B * o.seq_len * (MICROS if name == 'ours-accumulate' else 1)}")

    def measure(self, d, name, B, round):
        warmup, steps = (1, 2) if name == "ours-accumulate" else (WARMUP, self.o.steps) # a long step needs few
        log, memory = self.out / f"{name}-B{B}-{round}.log", self.work / "memory"
        with open(self.work / "stderr", "w") as errors, open(memory, "w") as seen, m.start(
                [*self.smi, "-lms", "100"], stdout=seen, stderr=subprocess.DEVNULL) as smi:
            try: timed = m.Timed(self.command(name, B), warmup, steps, log, limit(), cwd=self.work, stderr=errors)
            finally: smi.kill()
        seen = samples(memory.read_text())
        used = max((mib for mib, _, _ in seen), default=0) * 2**20 # the most that nvidia-smi has seen
        with open(log, "a") as file: file.write((self.work / "stderr").read_text(errors="replace"))
        text = log.read_text(errors="replace")
        if timed.error:
            why = timed.error if timed.error.startswith("not done") else last_words(text)
            d.add(f"{name} {B}", round, failed=why)
            return m.note(f"  {name}, B={B} failed: {why}")
        loaded = seen[-max(1, int(sum(timed.ms) / 100)):] # in the steps that were timed, which came last
        watts, mhz = ([sample[i] for sample in loaded] for i in (1, 2))
        d.add(f"{name} {B}", round, ms=timed.ms, counted=counted(text), used=used, watts=watts, mhz=mhz)
        m.note(f"  {name}, B={B}: {' '.join(f'{ms:.1f}' for ms in timed.ms)} ms")

    def round(self, d, number):
        m.note(f"round {number} of {self.o.rounds}")
        # peaks: copy X GB/s, product Y TFLOP/s, data sheet Z TFLOP/s
        words = m.output(self.build / "bench_layers", "--peaks").split("peaks:")[-1].split()
        d.add("peak", number, copy=float(words[1]), product=float(words[4]),
              sheet=float(words[8]) if re.match(r"[\d.]+$", words[8]) else 0)
        for B in self.o.batch:
            for name in self.programs:
                if number == 1: d.rounds.pop(f"{name} {B}", None)
                self.measure(d, name, B, number)
                d.write(self.out / "results.jsonl")


def samples(text):
    """MiB, watts and MHz, line by line; 0 is what this GPU does not tell."""
    lines = re.findall(r"^(\d+), (\S+), (\S+)$", text, re.M)
    return [[float(x) if re.fullmatch(r"[\d.]+", x) else 0 for x in line] for line in lines]


def limit():
    return m.whole_environ("BENCH_SECONDS", 300)


def last_words(text):
    """The last line that mentions an error, with the next line if it ends in a colon, or else the last line."""
    last = error = goes_on = ""
    for last in filter(str.strip, text.splitlines()):
        if goes_on: error, goes_on = f"{error} {last}", False
        elif re.search("error|out of memory|assert", last, re.I): error, goes_on = last, last.endswith(":")
    return (error or last)[:150].replace("|", "/") or "it said nothing"


def counted(log):
    """The memory that a program reports: ours all that it has allocated, PyTorch the peak of all tensors, llm.c all in use on the
    GPU."""
    ours = re.findall(r"^step .*mem ([\d.]+) ([kMGT]?B)", log, re.M)
    llmc = re.findall(r"^device memory usage: (\d+) MiB", log, re.M)
    return float(ours[-1][0]) * UNITS[ours[-1][1]] if ours else float(llmc[-1]) * 1048576 if llmc else 0


# ---- the tables ----
class Tables:
    def __init__(self, d):
        h = d.header
        self.d, self.model, self.T, (L, _, C) = d, h["model"], h["T"], m.sizes_of(h["model"])
        self.parameters = (50257 + 1024) * C + L * (12 * C + 13) * C + 2 * C
        self.flops = 6 * self.parameters + 6 * L * C * self.T # a token
        self.product, self.sheet = (1e12 * d.value("peak", key) if d.runs("peak") else 0 for key in ("product", "sheet"))

    def failure(self, name, B):
        """A program that failed in one round has no figure for the others."""
        return next((r["failed"] for r in self.d.rounds.get(f"{name} {B}", {}).values() if "failed" in r), None)

    def ms(self, name, B):
        return of(self.d, f"{name} {B}", "ms") if self.failure(name, B) is None else 0

    def tokens(self, name, B):
        """A second."""
        return 1e3 * B * self.T * (MICROS if name == "ours-accumulate" else 1) / self.ms(name, B)

    def rate(self, name, B): return self.tokens(name, B) * self.flops

    def row(self, name, B):
        why, ms = self.failure(name, B), self.ms(name, B)
        if why is not None: return [title(name), f"failed: {why}", *[""] * 8]
        run, rate = f"{name} {B}", self.rate(name, B)
        memory, load = [of(self.d, run, key, max) for key in ("counted", "used")], [of(self.d, run, key) for key in ("watts", "mhz")]
        return [title(name), f"{self.tokens(name, B):.0f}", f"{ms:.2f}", f"{of(self.d, run, 'ms', min):.1f} to {of(self.d, run, 'ms', max):.1f}",
                percent(rate, self.sheet), percent(rate, self.product), *(f"{1e-9 * x:.1f}" if x else "-" for x in memory),
                *(f"{x:.0f}" if x else "-" for x in load)]

    def best(self, prefix, B, programs):
        """The fastest program whose name begins so, of those whose step is the same."""
        return max((name for name in programs if name.startswith(prefix) and name != "ours-accumulate" and self.ms(name, B)),
                   key=lambda name: self.rate(name, B),
                   default=None)

    def comparisons(self, B, programs):
        us, named = self.best("ours", B, programs), self.model == "gpt2" and self.T == 1024
        for prefix, goal in ("llmc", 1.2), ("torch-autocast", 1.3), ("torch-bf16", 1.3):
            them = self.best(prefix, B, programs)
            if not us or not them: continue
            if faster(self.d, f"{us} {B}", f"{them} {B}") is None:
                yield f"- {title(us)} over {title(them)}: no ratio, because {CONTRADICT}."
                continue
            times = self.rate(us, B) / self.rate(them, B)
            yield f"- {title(us)} over {title(them)}: {times:.3f} times as fast.{judged(times, goal) if named else ''}"
        if us and self.model == "gpt2-xl" and self.sheet:
            yield f"- {title(us)}: {percent(self.rate(us, B), self.sheet)} MFU.{judged(100 * self.rate(us, B) / self.sheet, 60)}"

    def text(self):
        h, d = self.d.header, self.d
        lines = [f"### {self.model} in {h.get('precision', 'bf16')}, T={self.T}: whole steps; rounds: "
                 f"{h['rounds']}{h.get('stopped', '')}, "
                 f"steps a round: {h['steps']}{' (in the last call)' * h.get('added', False)}", "",
                 f"{self.parameters} parameters, {self.flops:.4g} FLOPs a token. This GPU: a large product "
                 f"{1e-12 * self.product:.0f} TFLOP/s, {f'{1e-12 * self.sheet:.0f}' if self.sheet else 'not known'} by the data "
                 f"sheet; a copy {d.value('peak', 'copy') if d.runs('peak') else 0:.0f} GB/s."]
        for B in h["batches"]:
            programs = [name for name in h["programs"] if f"{name} {B}" in d.rounds]
            head = [f"B={B}", "tokens/s", "ms a step", "from, to", "MFU", "of the product", "GB by its own count",
                    "GB by nvidia-smi", "W", "MHz"]
            lines += ["", m.table(head, *(self.row(name, B) for name in programs)).rstrip("\n")]
            said = [*self.comparisons(B, programs)]
            lines += [""] * bool(said) + said
        if not any(self.best("llmc", B, h["programs"]) for B in h["batches"]):
            lines += ["", "**LLM.C NOT MEASURED**: its rows or the list below say why."]
        if "held" in h: lines += ["", f"Another program held {h['held']:.0f} MiB of this GPU: do not trust these figures."]
        if warning := d.busy("these figures"): lines += ["", warning]
        if h["absent"]: lines += ["", "Not measured:", ""] + [f"- {why}" for why in h["absent"]]
        return "\n".join(lines) + "\n"


def percent(a, b): return f"{100 * a / b:.1f} %" if b else "-"
def judged(reached, goal): return f" Goal {goal}: {'reached' if reached >= goal else 'MISSED'}."


def title(name):
    """The name shown in the table; llmc-ge2-r0 becomes its command line's "-ge 2 -r 0"."""
    if name.startswith("llmc"): return "llm.c -ge {} -r {}".format(*re.findall(r"\d", name))
    return TORCH[name][1] if name in TORCH else f"ours{OURS[name][2]}"


def check(o):
    m.sizes_of(o.model)
    limit()
    o.into = o.into or f"{o.out}/results.jsonl"


def measure(x):
    o, d, bench, known = x.o, x.d, Bench(x), {"programs": [], "batches": [], "absent": []}
    if o.add and x.into.exists():
        old = m.Results.read(x.into)
        d.rounds, known = old.rounds, old.header
    precision = next((word for word in ("bf16", "fp16") if word in bench.build.name), "fp32")
    d.header |= {"model": o.model, "T": o.seq_len, "precision": precision, "rounds": o.rounds, "steps": o.steps,
                 "added": bool(known["programs"])}
    for key, new in ("programs", bench.programs), ("batches", o.batch): d.header[key] = [*dict.fromkeys(known[key] + new)]
    measured = {name.partition("-")[0] for name in bench.programs} # what was absent before and is not now is not mentioned
    others = [why for why in known["absent"] if not {"llm.c": "llmc",
                                                     "PyTorch": "torch"}.get(why.split(":")[0].split()[0]) in measured]
    d.header["absent"] = [*dict.fromkeys(others + bench.absent)]
    for number in x.in_turns(): bench.round(d, number)
    return int(any(Tables(d).failure(name, B) for name in bench.programs if name in OURS for B in o.batch))


def show(d, o):
    text = Tables(d).text()
    if not vars(o)["from"]: Path(o.out, "table.md").write_text(text)
    print(text, end="")
