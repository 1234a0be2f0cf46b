"""How fast a step of GPT-2 is on a GPU in 16 bits, against llm.c and PyTorch: same model, batch and sequence length, measured as
`python3 -m experiments bench --help` says.

--model    gpt2 is 124M; gpt2-xl, 1.5B, also with recomputation and under FSDP; --batch: sequences a step, a table for each
--programs which rows of the table, by the names in results.jsonl. Only a call that names them measures ours-deterministic,
           ours-own, ours-accumulate (32 micro-batches a step: it is not compared with others) and torch-eager
--add      keep what --out has of other programs and batches: the table then has all
--llmc     llm.c's train_gpt2cu or the folder that has it, built there with cuDNN's attention (doc/gpu.md says what that needs):
           make train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1. Without this option or LLMC, llm.c is left out
--out      folder for the programs' logs, results.jsonl and table.md (build/bench_gpu)
PYTHON     a Python whose torch sees the GPU (python3); without one PyTorch is left out
INPUTS     dev/kernels/inputs.c as a program, where there is no compiler
BUILD      where our programs are (build/cuda-bf16): make DEVICE=cuda PRECISION=bf16 programs build/cuda-bf16/bench_layers

llm.c has a row for each setting worth trying. PyTorch has two, because neither is what our programs do: fp32 weights under
autocast, and bf16 with no master copy. MFU counts the same 6 N + 6 L C T FLOPs a token for every program, over the data sheet's
rate; the next column is the share of a large product's measured rate. Recomputed FLOPs do not count."""
import contextlib, os, re, subprocess
from pathlib import Path
import dev.lib as m
from experiments.bench import Bench, Tables, ratio

OPTIONS = dict(programs=[], model="gpt2", batch=[32], seq_len=1024, steps=20, llmc=os.environ.get("LLMC", ""),
               out="build/bench_gpu")
ROUNDS, FLAGS, LEAST, PLACEHOLDERS = 3, ("add",), {"steps": (1,)}, {"llmc": "PATH", "out": "DIR", "programs": "NAMES"}
DEVICE, MORE, STARTS_RANKS, FOLDER, SHOWS_PARTS = "cuda", False, False, "", True
MICROS = 32 # micro-batches of ours-accumulate's step: of 16 x 1024 tokens they are the 524288 that GPT-2 was trained with
WARMUP = 5
# By name: the program and its options, and what a table says of them
OURS = {"ours": ("single", "", ""), "ours-recompute": ("single", "--recompute block", ", --recompute block"),
        "ours-fsdp": ("fsdp", "", ", FSDP on one rank"),
        "ours-fsdp-recompute": ("fsdp", "--recompute block", ", FSDP on one rank, --recompute block"),
        "ours-deterministic": ("single", "--deterministic", ", --deterministic"),
        "ours-own": ("single", "--attention own", ", --attention own"),
        "ours-accumulate": ("single", "", f", {MICROS} micro-batches a step")}
LLMC = {f"llmc-ge{ge}-r{r}": f"-ge {ge} -r {r}" for ge, r in ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1))}
TORCH = {"torch-autocast": ("compile autocast", "PyTorch, fp32 weights, autocast"),
         "torch-bf16": ("compile bf16", "PyTorch, bf16, no master weights"),
         "torch-eager": ("eager autocast", "PyTorch, fp32 weights, autocast, not compiled")}
NAMES = ({name: f"ours{title}" for name, (*_, title) in OURS.items()} | {name: f"llm.c {title}" for name, title in LLMC.items()} |
          {name: title for name, (_, title) in TORCH.items()})


class GpuTables(Tables):
    titles, letter = NAMES, "B"
    heads = "tokens/s", "ms a step", "from, to", "MFU", "of the product", "GB by its own count", "GB by nvidia-smi", "W", "MHz"

    def __init__(self, d):
        self.model, self.T = d.header["model"], d.header["T"]
        super().__init__(d)

    def batch(self, name, B): return B * (MICROS if name == "ours-accumulate" else 1), self.T
    def product(self, _): return 1e12 * self.of("peak", "product")

    def best(self, prefix, B):
        """The fastest program whose name begins so, of those whose step is the same."""
        return min((name for name in self.programs(B) if name.startswith(prefix) and name != "ours-accumulate" and
                    self.ms(f"{name} {B}")), key=lambda name: self.ms(f"{name} {B}"), default=None)

    def goals(self, B):
        us, named = self.best("ours", B), self.model == "gpt2" and self.T == 1024
        for prefix, goal in ("llmc", 1.2), ("torch-autocast", 1.3), ("torch-bf16", 1.3):
            if us and (them := self.best(prefix, B)):
                yield (f"{NAMES[us]} over {NAMES[them]}", self.faster(f"{us} {B}", f"{them} {B}"), goal if named else None,
                       "{:.3f} times as fast")
        if us and self.model == "gpt2-xl":
            yield NAMES[us], ratio(1e-10 * self.rate(us, B), self.of("peak", "sheet")), 60, "{:.1f} % MFU"

    def intro(self):
        h = self.d.header
        yield (f"### {self.model} in {h.get('precision', 'bf16')}, T={self.T}: whole steps; rounds: {h['rounds']}"
               f"{h.get('stopped', '')}, steps a round: {h['steps']}{' (in the last call)' * h.get('added', False)}")
        yield ""
        sheet, copy = self.of("peak", "sheet"), self.of("peak", "copy")
        yield (f"{self.parameters} parameters, {self.flops(self.T):.4g} FLOPs a token. This GPU: a large product "
               f"{1e-12 * self.product(''):.0f} TFLOP/s, {f'{sheet:.0f}' if sheet else 'not known'} by the data sheet; a copy "
               f"{copy:.0f} GB/s.")

    def warnings(self):
        if not any(run.startswith("llmc") and self.ms(run) for run in self.d.rounds):
            yield "**LLM.C NOT MEASURED**: its rows or the list below say why."
        if held := self.d.header.get("held"): yield f"Another program held {held:.0f} MiB of this GPU: do not trust these figures."


class Gpu(Bench):
    tables = GpuTables

    def __init__(self, x):
        super().__init__(x, "build/cuda-bf16")
        o = self.o
        for name in "train_gpt2_single", "bench_layers":
            m.need(self.build / name, f"DEVICE=cuda PRECISION=bf16 build/cuda-bf16/{name}")
        self.logs = Path(o.out)
        try: self.logs.mkdir(parents=True, exist_ok=True)
        except OSError: m.fail(f"{self.logs} cannot be made; --out names another folder")
        for old in [] if o.add else [*self.logs.glob("*.log"), *self.logs.glob("results.jsonl")]: old.unlink()
        for name in o.programs:
            if name not in NAMES: m.fail(f"--programs: there is no '{name}'; there are {' '.join(NAMES)}")
        wanted = o.programs or [*[*OURS][:1 if o.model == "gpt2" else 4], *LLMC, *[*TORCH][:2]]
        self.programs, self.sizes, self.seconds = [name for name in NAMES if name in wanted], o.batch, seconds()
        self.leave_out(fsdp=self.has_fsdp, llmc=self.has_llmc, torch=lambda: self.has_torch(
            "import torch; assert torch.cuda.is_available()", " that sees a GPU; PYTHON names another"))
        self.find_smi()

    def has_fsdp(self):
        fsdp = f"{self.build}/train_gpt2_fsdp"
        return self.is_there("FSDP on one rank", os.access(fsdp, os.X_OK),
                             f"there is no {fsdp}, which needs MPI and NCCL to be built")

    def has_llmc(self):
        """Whether it can be measured, with what it needs."""
        llmc = self.llmc_path = self.o.llmc and Path(self.o.llmc, "train_gpt2cu" if os.path.isdir(self.o.llmc) else "").resolve()
        if not self.is_there("llm.c", llmc, "neither --llmc nor LLMC says where its train_gpt2cu is"): return False
        is_built = os.access(llmc, os.X_OK)
        if not is_built and not self.o.add: # with --add other rows do not wait for it
            m.fail(f"there is no program {llmc}; in llm.c's folder: make train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1")
        if not self.is_there("llm.c", is_built, f"there is no program {llmc}") or not self.has_stdbuf(): return False
        m.output(m.inputs(), "llmc", m.work() / "model.bin", self.o.model, "bf16")
        folders = (m.ask("sh dev/find_cuda.sh folder cublasLt cudnn") or "").splitlines() # it may have been linked elsewhere
        self.libraries = ":".join(filter(None, [*filter(os.path.isdir, folders), os.environ.get("LD_LIBRARY_PATH")]))
        self.is_there("llm.c with cuDNN", "cudnn" in (m.ask("ldd", llmc, stderr=subprocess.DEVNULL) or ""),
                      f"{llmc} was built without it, so its own kernels compute attention. Build it with USE_CUDNN=1")
        return True

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
            return ["env", f"LD_LIBRARY_PATH={self.libraries}", "stdbuf", "-oL", self.llmc_path, *m.words(
                f"-i tokens.bin -j tokens.bin -e model.bin -b {B} -t {o.seq_len} -x 1000000 -v 1000000 -m 1 -s 0 -l 0.0001 -c 0.1",
                LLMC[name])]
        program, own, _ = OURS[name]
        return self.ours(self.build / f"train_gpt2_{program}",
                         f"--vocab-size 50257 --model {o.model} --batch-size {B} --seq-len {o.seq_len}",
                         "--recompute none" * ("--recompute" not in own), own,
                         f"--total-batch-size {B * o.seq_len * (MICROS if name == 'ours-accumulate' else 1)}")

    @contextlib.contextmanager
    def watch(self):
        """Samples memory, power and clocks meanwhile."""
        with open(m.work() / "memory", "w") as seen, m.start([*self.smi, "-lms", "100"], stdout=seen,
                                                             stderr=subprocess.DEVNULL) as smi:
            try: yield
            finally: smi.kill()

    def found(self, name, timed, text):
        seen = samples((m.work() / "memory").read_text())
        loaded = seen[-max(1, int(sum(timed.ms) / 100)):] # in the steps that were timed, which came last
        watts, mhz = ([sample[i] for sample in loaded] for i in (1, 2))
        used = max((mib for mib, _, _ in seen), default=0) * 2**20 # the most that nvidia-smi has seen
        return dict(counted=counted(text), used=used, watts=watts, mhz=mhz)

    def warmup_and_steps(self, name, B):
        return (1, 2) if name == "ours-accumulate" else (WARMUP, self.o.steps) # a long step needs few

    def peaks(self):
        """The program says "peaks: copy X GB/s, product Y TFLOP/s, data sheet Z TFLOP/s"."""
        words = m.output(self.build / "bench_layers", "--peaks").split("peaks:")[-1].split()
        return dict(copy=float(words[1]), product=float(words[4]), sheet=float(words[8]) if re.match(r"[\d.]+$", words[8]) else 0)


def samples(text):
    """MiB, watts and MHz, line by line; 0 is what this GPU does not tell."""
    lines = re.findall(r"^(\d+), (\S+), (\S+)$", text, re.M)
    return [[float(x) if re.fullmatch(r"[\d.]+", x) else 0 for x in line] for line in lines]


def seconds():
    """After so many a program is stopped."""
    return m.whole_environ("BENCH_SECONDS", 300)


def counted(log):
    """The memory that a program reports: ours all that it has allocated, PyTorch the peak of all tensors, llm.c all in use on the
    GPU."""
    ours = re.findall(r"^step .*mem ([\d.]+) ([kMGT]?B)", log, re.M)
    llmc = re.findall(r"^device memory usage: (\d+) MiB", log, re.M)
    return float(ours[-1][0]) * m.UNITS[ours[-1][1]] if ours else float(llmc[-1]) * 1048576 if llmc else 0


def check(o):
    m.sizes_of(o.model)
    seconds()
    o.into = o.into or f"{o.out}/results.jsonl"


def measure(x):
    o, d, bench, known = x.o, x.d, Gpu(x), {"absent": []}
    if o.add and x.into.exists():
        old = m.Results.read(x.into)
        d.rounds, known = old.rounds, old.header
    precision = next((word for word in ("bf16", "fp16") if word in bench.build.name), "fp32")
    measured = {name.partition("-")[0] for name in bench.programs} # what was absent before and is not now is not mentioned
    peers = {"llm.c": "llmc", "PyTorch": "torch"}
    others = [why for why in known["absent"] if peers.get(why.split(":")[0].split()[0]) not in measured]
    d.header |= {"model": o.model, "T": o.seq_len, "precision": precision, "rounds": o.rounds, "steps": o.steps,
                 "added": bool(d.rounds), "absent": [*dict.fromkeys(others + bench.absent)]}
    return bench.answer()


def show(d, o):
    text = GpuTables(d).text()
    if not vars(o)["from"]: Path(o.out, "table.md").write_text(text)
    print(text, end="")
