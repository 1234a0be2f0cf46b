"""What the tests of emulated GPUs share: programs, runs, and what they are compared with."""
import functools, re, shutil, subprocess
import pytest
from suite import ROOT, TOKENS, assert_as_predicted, assert_close_tensors, command, once, paired_metrics, session, succeeds, trained

SMALL = (f"--data {TOKENS} --val-data= --heads 2 --channels 16 --lr 3e-3 --warmup-steps 2 --eps 1e-5 --eval-every 0 --sample-every 0")
# ThreadSanitizer cannot start in some address layouts.
WITHOUT_ASLR = ["setarch", "-R"] if shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0 else []


@functools.cache
def flags(*libraries):
    """The compiler's flags for the headers of NVIDIA's libraries, or None where they are not. They hold in every folder."""
    found = subprocess.run(["sh", ROOT / "dev/find_cuda.sh", "compile", *libraries], cwd="/", capture_output=True, text=True)
    return found.stdout.replace("\n", " ") if found.returncode == 0 else None


@functools.cache
def missing(*libraries):
    """Marks a module or a test that needs CUDA's headers, and those of these libraries: they are of the rest tier, as what they compile takes long."""
    headers = subprocess.run(["sh", "dev/emulator/find_headers.sh"], cwd=ROOT, capture_output=True).returncode == 0
    reason = "CUDA's headers are not here" if not headers else f"one of {', '.join(libraries)} is not here"
    return pytest.mark.skipif(not headers or bool(libraries) and flags(*libraries) is None, reason=reason)


def compiled(source, build="plain", *options, libraries="", cpp="", key=""):
    """A program for the emulator, compiled once in a session: its path."""
    def run(place):
        succeeds("sh dev/emulator/compile.sh", [source, place / "program", build], *options, timeout=900,
                 env={"EMULATOR_LIBRARIES": libraries, "CPPFLAGS": cpp})
    return once(f"emulated {source} {build} {options} {libraries} {key}", run) / "program"


# ---- the tests of a GPU's layers, which are test/unit/test_cuda_NAME.cu ----
def layer_tests(name, builds, libraries="", *options):
    """A test for each TEST(claim) of the file in each build, as "asan bf16": what the GPU's layers compute agrees with the CPU's. The first
    build runs every case, the others the quick ones. A few claims that are chosen by -k are compiled alone, and have every case."""
    source = f"test/unit/test_cuda_{name}.cu"
    claims = re.findall(r"^TEST\((\w+)\)", (ROOT / source).read_text(), re.M)
    rows = [(*build.split(), claim) for build in builds for claim in claims if not ("fp32" in build and "cudnn" in claim)]
    marks = {build: [pytest.mark.sampled(f"{name} {build}")] for build in builds[3:]} # a program with all its claims, or none of them

    def output(build, precision, chosen):
        layers = cpu_layers(precision)
        some = len(chosen) < len(claims) - 2
        only = [f'-DONLY=",{",".join(chosen)},"'] if some else []
        path = compiled(source, build, f"-DPRECISION_{precision.upper()}", "-DUSE_CUDNN=" + str(int("cudnn" in libraries)), only, layers,
                        "-ldnnl -fopenmp", libraries=libraries, cpp=libraries and flags("cublasLt", "cudnn"))

        def run(place):
            quick = [] if build != "tsan" and (some or f"{build} {precision}" == builds[0]) else ["quick"]
            done = command(WITHOUT_ASLR, [path], quick, env={"OMP_NUM_THREADS": 1}, timeout=900)
            (place / "said").write_text(done.said)
        return (once(f"run {path}", run) / "said").read_text()

    @pytest.mark.parametrize("build, precision, claim", [pytest.param(*row, marks=marks.get(" ".join(row[:2]), ()), id="-".join(row)) for row in rows])
    def test(build, precision, claim, request):
        chosen = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
        chosen = [x["claim"] for x in chosen if (x.get("build"), x.get("precision")) == (build, precision)]
        said = output(build, precision, chosen)
        assert re.search(rf"^ok \d+ - {claim},", said, re.M), said[-3000:]
    return test


def cpu_layers(precision):
    """An object that has them."""
    def compile(place):
        succeeds("gcc -std=c11 -O2 -march=native -fopenmp -ffp-contract=off", f"-DPRECISION_{precision.upper()}",
                 "-c test/unit/cpu_layers.c -o", [place / "cpu_layers.o"])
    return once(f"the CPU's layers {precision}", compile) / "cpu_layers.o"


# ---- training programs ----
def program(stage, precision="fp32", debug=False):
    """An emulated training program. It is compiled when the first test asks for it."""
    variant = "-".join(["emulated", *[precision] * (precision != "fp32"), *["debug"] * debug])
    path = f"build/{variant}/{stage if '/' in stage else f'train_gpt2_{stage}'}"

    def run(place):
        succeeds("make --no-print-directory DEVICE=emulated", f"PRECISION={precision}", f"DEBUG={'1' * debug}", path, timeout=900)
    once(f"make {path}", run)
    return path


def on_gpus(comm, ranks, **more):
    """The environment of ranks: with NCCL every rank has a GPU of its own. NCCL's stand-in meets in folders."""
    return {"CUDA_EMULATOR_DEVICES": (ranks or 1) if comm == "nccl" else 1, "CUDA_EMULATOR_WORKERS": 1, "TMPDIR": str(session())} | more


def emulated(stage, comm, ranks, *options, precision="fp32", strict=False, debug=False, again="", **env):
    env = {f"CUDA_EMULATOR_{name.upper()}": str(value) for name, value in env.items()}
    return trained(stage, SMALL, *options, ranks=ranks, strict=strict, again=again, binary=program(stage, precision, debug),
                   env=on_gpus(comm, ranks, **env))


def assert_metrics(cpu, gpu, rtol):
    __tracebackhide__ = True
    for what, x, y in paired_metrics(cpu, gpu): assert x is not None and y is not None and abs(x - y) <= 1e-6 + rtol * abs(x), f"{what}: {x}, {y}: {gpu}"


def assert_has_numbers(cpu, gpu):
    """The CPU's losses, norms and weights; what was held and sent was as predicted."""
    __tracebackhide__ = True
    assert_metrics(cpu, gpu, 1e-5)
    assert_close_tensors(cpu.weights(), gpu.weights(), 1e-4, 1e-6)
    assert_predicted(gpu)


def assert_predicted(gpu):
    assert_as_predicted(gpu)
    assert re.search("^allocations while training: 0;", gpu.out, re.M), gpu
