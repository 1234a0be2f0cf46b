"""What is timed on a GPU: `pytest --device cuda -m timed -rP`, one after another, the most informative first. Each prints what it
has measured, which is also in build/gpu/NAME.log. Under the emulator shapes are small, and times mean nothing."""
import re, shutil, sys, time
import pytest
from dev.lib import random_tokens
from kernels import gpus
from suite import DEVICE, ROOT, TOKENS, command, make, succeeds

pytestmark = [pytest.mark.gpu, pytest.mark.timed, gpus.missing("cublasLt", "cudnn")]
REAL = gpus.IS_REAL
HALF = "bf16" if not REAL or gpus.capability() >= 8 else "fp16"
BUILD = f"build/{DEVICE}-{HALF}"
GIGABYTES = gpus.least("memory.total") * 2**20 / 1e9 if REAL else 4
B = 32 if GIGABYTES > 40 else 4 # sequences of GPT-2 124M that this card holds
LARGE = pytest.mark.skipif(GIGABYTES < 70, reason="the model needs 70 GB")
ONLY_REAL = pytest.mark.skipif(not REAL, reason="there is no GPU")
SEES_GPU = ["import torch; assert torch.cuda.is_available()"]
TORCH = pytest.mark.skipif(not REAL or command("python3 -c", SEES_GPU).status != 0, reason="no PyTorch sees a GPU")


def need(*names):
    """The paths of programs of this build; only emulated ones are made."""
    paths = [f"{BUILD}/{name}" for name in names]
    if not REAL: make("DEVICE=emulated", f"PRECISION={HALF}", *paths)
    for path in paths: assert (ROOT / path).exists(), f"{path} is not built: python3 -m dev.gpu"
    return paths


def keep(name, text):
    (ROOT / "build/gpu").mkdir(parents=True, exist_ok=True)
    (ROOT / f"build/gpu/{name}.log").write_text(text)
    print(text)


@pytest.mark.parametrize("name, options", [("124M", f"--batch-size {B}"), pytest.param("1.5B", "--model gpt2-xl", marks=LARGE)])
def test_each_operation_of_a_step_is_timed(name, options):
    path, = need("bench_layers")
    small = "--model d1 --vocab-size 100 --batch-size 1 --seq-len 8"
    said = succeeds([path], options if REAL else small, "--repetitions", 5 if REAL else 1, timeout=300).out
    keep(f"operations-{name}", said)
    assert re.search("^peaks: |^\\|", said, re.M), said


@pytest.mark.parametrize("model, programs, batches, steps, rounds", [
    ("gpt2", "ours,ours-deterministic,llmc-ge0-r0,llmc-ge2-r0", f"{B}", 15, 2),
    pytest.param("gpt2-xl", "ours,ours-accumulate,llmc-ge2-r0", "16", 8, 1, marks=LARGE),
    pytest.param("gpt2", "ours", f"{B // 2},{B * 2}", 15, 1, marks=ONLY_REAL), ("gpt2", "ours-own", f"{B}", 15, 1),
    pytest.param("gpt2", "torch-autocast,torch-bf16,torch-eager", f"{B}", 15, 1, marks=TORCH)],
    ids=["124M", "1.5B", "batches", "own", "torch"])
def test_a_whole_step_is_timed_beside_the_peers(model, programs, batches, steps, rounds):
    need("train_gpt2_single", "bench_layers")
    shape = f"--model {model} --batch {batches}" if REAL else "--model d1 --batch 1 --seq-len 8"
    rounds = f"--rounds {rounds} --steps {steps}" if REAL else "--rounds 1 --steps 1"
    done = command(f"python3 -m experiments bench_gpu --add --out build/gpu/{model} {shape} {rounds} --programs {programs}",
                   env={"BUILD": BUILD}, timeout=900)
    keep(f"{model}-{programs.split(',')[-1]}", done.out)
    assert done.status == 0, done


def test_the_start_of_a_program_is_timed_with_kernels_loaded_at_once_and_when_needed(tmp_path):
    path, = need("train_gpt2_single")
    found = ""
    for number, loading in enumerate(("LAZY", "EAGER", "LAZY", "EAGER")): # the second time files are in memory
        begin = time.monotonic()
        succeeds([path], f"--data {TOKENS} --val-data= --model d2 --seq-len 64 --batch-size 2 --steps 1 --sample-every 0 "
                         "--save-every 0",
                 "--out", tmp_path / str(number), env={"CUDA_MODULE_LOADING": loading})
        found += f"start-up and a step, kernels loaded {loading}: {time.monotonic() - begin:.2f} s\n"
    keep("start-up", found)


@ONLY_REAL
def test_collectives_between_gpus_and_ddp_on_several_are_timed():
    gpus.needs_gpus(2)
    n = min(gpus.gpus(), 4)
    said = succeeds("build/cuda/comm_bench --comm nccl --op all -e 64M", ranks=n, timeout=300).out
    shape = f"--model gpt2 --seq-len 1024 --vocab-size 50257 --batch-size {B // 4} --steps 12"
    said += succeeds("python3 -m experiments speed_up --ranks", ",".join(str(x) for x in (1, 2, 4) if x <= n), shape, "--data",
                     random_tokens(), env={"PROGRAM": f"{BUILD}/train_gpt2_ddp"}, timeout=300).out
    keep("between-GPUs", said)


@ONLY_REAL
@pytest.mark.skipif(REAL and gpus.capability() != 9, reason="wgmma and TMA are capability 9.0's")
@pytest.mark.parametrize("name", ["matmul_forward", "matmul_backward"])
def test_hoppers_kernels_end_at_sizes_with_remainders(name):
    """One that waits for barriers in shared memory would wait for ever if one counted wrongly."""
    sizes = "--rows 200 --cols 328 --depth 136 --repetitions 1"
    assert "| right |" in succeeds(need(f"variants/{name}"), "--variant hopper", sizes).out


@ONLY_REAL
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="there is no compute-sanitizer")
def test_no_kernel_reads_or_writes_what_is_not_its_own():
    succeeds("compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9", [sys.executable],
             "test/kernels/check_layers.py", need("layers.so"), "sanitized quick", env={"CUDA_MODULE_LOADING": "LAZY"}, timeout=300)
