"""What the tests of GPUs' programs share: programs, runs, and what they are compared with. The GPUs are emulated, or with `--device
cuda` those of this machine. Then programs are not made but must be there, ranks that outnumber the GPUs share one and communicate
by MPI, and what only the emulator can do is skipped."""
import functools, os, re, shutil, subprocess
import pytest
from dev.lib import ask
from suite import (DEVICE, ROOT, TINY, assert_as_predicted, assert_close_tensors, command, once, paired_metrics, session,
                   succeeds, trained)

SMALL = f"{TINY} --total-batch-size 0 --warmup-steps 2 --eps 1e-5"
IS_REAL = DEVICE == "cuda"
RTOL = 1e-4 if IS_REAL else 1e-5 # of losses and norms in fp32, in which a GPU adds in another order
# ThreadSanitizer cannot start in some address layouts.
WITHOUT_ASLR = ["setarch", "-R"] if shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"],
                                                                               capture_output=True).returncode == 0 else []


@functools.cache
def flags(*libraries):
    """The compiler's flags for the headers of NVIDIA's libraries, or None where they are not. They hold in every folder."""
    found = subprocess.run(["sh", ROOT / "dev/find_cuda.sh", "compile", *libraries], cwd="/", capture_output=True, text=True)
    return found.stdout.replace("\n", " ") if found.returncode == 0 else None


@functools.cache
def missing(*libraries):
    """Marks a module or a test that needs CUDA's headers, and those of these libraries: they are of the rest tier, as what they
    compile takes long."""
    if IS_REAL: return pytest.mark.skipif(False, reason="programs are built")
    headers = subprocess.run(["sh", "dev/emulator/find_headers.sh"], cwd=ROOT, capture_output=True).returncode == 0
    reason = "CUDA's headers are not here" if not headers else f"one of {', '.join(libraries)} is not here"
    return pytest.mark.skipif(not headers or bool(libraries) and flags(*libraries) is None, reason=reason)


def compiled(source, build="plain", *options, libraries="", cpp="", key="", out="program"):
    """A program or a shared library for the emulator, compiled once in a session: its path."""
    def run(place):
        succeeds("sh dev/emulator/compile.sh", [source, place / out, build], *options, timeout=900,
                 env={"EMULATOR_LIBRARIES": libraries, "CPPFLAGS": cpp})
    return once(f"emulated {source} {build} {options} {libraries} {key}", run) / out


# ---- layers ----
def layers(build, precision):
    """The layers of GPUs as a shared library (test/unit/layers.cu)."""
    if IS_REAL: return program("layers.so", precision)
    return compiled("test/unit/layers.cu", build, f"-DPRECISION_{precision.upper()}", "-DUSE_CUDNN=1", libraries="cublaslt cudnn",
                    cpp=flags("cublasLt", "cudnn"), out="layers.so")


def cpu_layers(precision):
    """An object that has them."""
    def compile(place):
        succeeds("gcc -std=c11 -O2 -march=native -fopenmp -ffp-contract=off", f"-DPRECISION_{precision.upper()}",
                 "-c dev/kernels/cuda/cpu_layers.c -o", [place / "cpu_layers.o"])
    return once(f"the CPU's layers {precision}", compile) / "cpu_layers.o"


# ---- training programs ----
def program(name, precision="fp32", debug=False):
    """A GPU's training program, or another one by its path. The emulated one is compiled when the first test asks for it."""
    variant = "-".join([DEVICE, *[precision] * (precision != "fp32"), *["debug"] * debug])
    path = f"build/{variant}/{name if '/' in name or 'bench' in name or '.' in name else f'train_gpt2_{name}'}"
    if IS_REAL:
        if debug: pytest.skip("debug builds are tested under the emulator")
        if precision == "bf16" and capability() < 8: pytest.skip("bf16 needs a GPU of compute capability 8.0")
        if not (ROOT / path).exists():
            pytest.fail(f"{path} is not built: make DEVICE=cuda PRECISION={precision} {path}", pytrace=False)
        return path

    def run(place):
        succeeds("make --no-print-directory DEVICE=emulated", f"PRECISION={precision}", f"DEBUG={'1' * debug}", path, timeout=900)
    once(f"make {path}", run)
    return path


@functools.cache
def gpus():
    """How many this machine has."""
    listed = (ask("nvidia-smi -L") or "").splitlines()
    return len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if os.environ.get("CUDA_VISIBLE_DEVICES") else len(listed)


@functools.cache
def least(field):
    """Of a number that nvidia-smi tells of each of them."""
    return min(map(float, (ask(f"nvidia-smi --query-gpu={field} --format=csv,noheader,nounits") or "").split()), default=0)


def capability(): return least("compute_cap")


def needs_gpus(number):
    if IS_REAL and gpus() < number: pytest.skip(f"{number} GPUs are needed; here are {gpus()}")


def needs_emulator(why):
    if IS_REAL: pytest.skip(f"only emulated GPUs {why}")


def emulator(**settings):
    """The emulator's settings, as variables of the environment: emulator(seed=1, waits=FILE). On a GPU a test that needs one is
    skipped; a seed, which decides in what order threads run, is a GPU's own affair."""
    if not IS_REAL: return {f"CUDA_EMULATOR_{name.upper()}": str(value) for name, value in settings.items()}
    if settings.keys() - {"seed"}: needs_emulator(f"can be told {', '.join(settings)}")
    return {}


def gpus_of(comm, ranks, **settings):
    """The environment of ranks: with NCCL every rank has a GPU of its own, with MPI they share one. NCCL's stand-in meets in
    folders."""
    if IS_REAL: return emulator(**settings) | ({"CUDA_VISIBLE_DEVICES": "0"} if comm == "mpi" else {})
    return emulator(devices=(ranks or 1) if comm == "nccl" else 1, workers=1, **settings) | {"TMPDIR": str(session())}


def on_gpus(name, comm, ranks, *options, precision="fp32", strict=False, debug=False, again="", stricter={}, **settings):
    """A run on emulated GPUs with these settings, or on real ones. stricter: settings of a test that is worth while without
    them."""
    options = " ".join(map(str, options))
    if IS_REAL:
        if comm == "nccl" and (ranks or 1) > gpus(): comm = "mpi"
        options += f" --comm {comm}" * ("--comm " not in options)
    else: settings |= stricter
    return trained(name, SMALL, options, ranks=ranks, strict=strict, again=again, binary=program(name, precision, debug),
                   env=gpus_of(comm, ranks, **settings))


def assert_metrics(cpu, gpu, rtol):
    __tracebackhide__ = True
    for what, x, y in paired_metrics(cpu, gpu):
        assert x is not None and y is not None and abs(x - y) <= 1e-6 + rtol * abs(x), f"{what}: {x}, {y}: {gpu}"


def assert_has_numbers(cpu, gpu):
    """The CPU's losses, norms and weights; what was held and sent was as predicted."""
    __tracebackhide__ = True
    assert_metrics(cpu, gpu, RTOL)
    assert_close_tensors(cpu.weights(), gpu.weights(), 10 * RTOL, RTOL / 10)
    assert_predicted(gpu)


def assert_predicted(gpu):
    assert_as_predicted(gpu)
    assert re.search("^allocations while training: 0;", gpu.out, re.M), gpu
