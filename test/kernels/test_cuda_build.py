"""make DEVICE=cuda where something is missing says what, before the compiler does, and finds cuBLAS and cuDNN in a toolkit or in
pip's wheels; its programs say so where there is no GPU."""
import os, re, shlex, shutil
import pytest
from kernels import gpus
from suite import ROOT, assert_refused, command, succeeds

pytestmark = pytest.mark.skipif(command("sh -c", ["echo '#include <cublasLt.h>' | cc -E -x c -"]).status == 0,
                                reason="cuBLAS is installed system-wide, and cannot be missing")


@pytest.fixture
def copy(tmp_path):
    """A copy without nvidia/, next to a toolkit that contains only its version: a function that runs a command in the copy. The
    names of both folders contain a space."""
    clone, toolkit = tmp_path / "the course", tmp_path / "the toolkit"
    (clone / "dev").mkdir(parents=True)
    (toolkit / "include").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", clone)
    for name in "find_cuda.sh", "gpu.mk", "dev.mk": shutil.copy(ROOT / "dev" / name, clone / "dev")
    (toolkit / "include/cuda.h").write_text("#define CUDA_VERSION 13000\n")
    for name in "train_gpt2_single.cu", "train_gpt2_ddp.cu": (clone / name).touch()

    def run(*arguments, **env):
        return command(*arguments, cwd=clone, env={"CUDA_HOME": toolkit, "PYTHON": "no-such-python"} | env)
    run.clone, run.toolkit = clone, toolkit
    return run


def fill(place, major):
    """Makes a place that has cuBLAS and cuDNN."""
    for file in "include/cublasLt.h", f"lib/libcublasLt.so.{major}", "include/cudnn.h", "lib/libcudnn.so.9":
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).touch()


def words_of(copy, question):
    """The answer of find_cuda.sh, split into words as a shell splits it."""
    return shlex.split(copy(f"sh dev/find_cuda.sh {question}").out)


def test_libraries_that_are_missing_are_named_with_the_ways_to_get_them(copy):
    run = copy("make DEVICE=cuda find-libraries")
    assert run.status == 2, run
    for pattern in ("^cuBLAS for CUDA 13 is missing: .*sh dev/setup.sh", "^cuDNN for CUDA 13 is missing",
                    "pip install nvidia-cudnn-cu13", "make DEVICE=cpu"):
        assert re.search(pattern, run.said, re.M), run
    run = copy("make DEVICE=cuda USE_CUDNN=0 find-libraries")
    assert run.status == 2 and "cuBLAS for" in run.said and "cuDNN for" not in run.said, run


def test_pips_wheels_are_found_if_they_are_of_the_toolkits_version(copy):
    fill(copy.clone / "nvidia/cublas", 12)
    run = copy("make DEVICE=cuda find-libraries")
    assert run.status == 2 and "cuBLAS for CUDA 13 is missing" in run.said, run
    fill(copy.clone / "nvidia/cu13", 13)
    wheels = copy.clone / "nvidia/cu13"
    assert copy("make DEVICE=cuda find-libraries").status == 0
    rpath = ["-Xlinker", "--disable-new-dtags", "-Xlinker", "-rpath", "-Xlinker", f"{wheels}/lib"]
    assert words_of(copy, "link cublasLt") == ["-Lnvidia/cu13/lib", *rpath, "-Xlinker", "-l:libcublasLt.so.13"]
    assert words_of(copy, "compile cudnn") == ["-isystem", "nvidia/cu13/include"] and words_of(copy, "rpath cudnn") == rpath


def test_the_toolkits_own_library_comes_first(copy):
    fill(copy.clone / "nvidia/cu13", 13)
    (copy.toolkit / "lib64").mkdir()
    for file in "include/cublasLt.h", "lib64/libcublasLt.so", "lib64/libcublasLt.so.13": (copy.toolkit / file).touch()
    flags = words_of(copy, "link cublasLt")
    assert flags[0] == f"-L{copy.toolkit}/lib64" and flags[-1] == "-l:libcublasLt.so"


def test_code_of_the_host_is_compiled_as_the_cpus_programs_are(copy):
    """--cpu-offload's AdamW is the CPU's: every flag that decides what code it becomes must reach the compiler behind nvcc."""
    fill(copy.clone / "nvidia/cu13", 13)
    flags = set(re.findall(r" -(?:fopenmp|m[a-z]+=[a-z]+|f[a-z-]+=[a-z]+|fno-[a-z-]+)",
                           copy("make -n DEVICE=cpu build/train_gpt2_single").out))
    cuda = copy("make -n DEVICE=cuda USE_CUDNN=0 build/cuda-nocudnn/train_gpt2_single").out
    assert len(flags) >= 4
    for flag in flags: assert re.search(rf"-Xcompiler \S*{flag.strip()}[, ]", cuda), cuda


def test_another_compiler_of_the_hosts_code_can_be_chosen(copy):
    fill(copy.clone / "nvidia/cu13", 13)
    run = copy("make -n DEVICE=cuda HOST_CXX=clang++ build/cuda-clang++/train_gpt2_single.o")
    assert re.search("-ccbin clang[+][+] .* -c train_gpt2_single.cu", run.out), run


@pytest.mark.parametrize("gpus, settings, compiled", [
    ("7.5", "PRECISION=fp16", "75"), ("7.5 8.6 7.0", "PRECISION=fp32", "75 86"), ("7.5 8.6", "PRECISION=bf16", "86"),
    ("7.0", "", "80 90 90+"),
    ("", "PRECISION=fp16 CAPABILITIES=75", "75"), ("7.5", "PRECISION=bf16 CAPABILITIES=90", "90"),
    ("7.5", "PRECISION=bf16", None), ("", "PRECISION=bf16 CAPABILITIES=75", None)])
def test_programs_are_compiled_for_the_gpus_that_are_here_and_bf16_for_none_of_capability_7_5(copy, gpus, settings, compiled):
    fill(copy.clone / "nvidia/cu13", 13)
    fake = copy.clone / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nprintf '%s\\n' {gpus}\n")
    fake.chmod(0o755)
    run = copy(f"make -n DEVICE=cuda USE_CUDNN=0 BUILD=b {settings} b/train_gpt2_single", PATH=f"{copy.clone}:{os.environ['PATH']}")
    if compiled is None:
        assert run.status == 2 and re.search("bf16 needs a GPU of compute capability 8.0 .* 7.5 .*make PRECISION=fp16 or fp32",
                                             run.err), run
    else:
        found = re.findall(r"-gencode arch=compute_(\d+),code=(?:sm|(compute))_", run.out.split(" -c ")[0])
        assert " ".join(n + "+" * bool(ptx) for n, ptx in found) == compiled, run


@pytest.mark.rest
@pytest.mark.skipif(not shutil.which("nvcc") or gpus.flags("cublasLt", "cudnn") is None,
                    reason="nvcc, or one of NVIDIA's libraries, is not here")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_kernel_of_a_program_compiles_for_capability_7_5(precision, tmp_path):
    """The program of compressed gradients has every kernel of every program. Some instructions begin with 8.0."""
    program = tmp_path / "train_gpt2_compress.o"
    succeeds(f"make --no-print-directory DEVICE=cuda CAPABILITIES=75 PRECISION={precision} WERROR=1 BUILD={tmp_path}", [program],
             timeout=1200)
    assert program.exists()


def test_an_unknown_device_is_an_error(copy):
    run = copy("make DEVICE=gpu")
    assert run.status == 2 and "DEVICE must be cpu, cuda or emulated, not 'gpu'" in run.err, run


def test_open_mpis_flags_leave_the_rpath_as_cudnn_needs_it(copy):
    """An Open MPI that asks for the new style of rpath, which would not apply to the libraries that cuDNN opens at run time."""
    fill(copy.clone / "nvidia/cu13", 13)
    mpicc = copy.clone / "mpicc"
    mpicc.write_text("#!/bin/sh\ncase $1 in *link) echo -L/mpi -Wl,-rpath -Wl,/mpi -Wl,--enable-new-dtags -lmpi ;; esac\n")
    mpicc.chmod(0o755)
    run = copy("make -n DEVICE=cuda build/cuda/train_gpt2_ddp", PATH=f"{copy.clone}:{os.environ['PATH']}")
    assert run.status == 0 and re.search("-Xlinker -rpath -Xlinker /mpi  *-lmpi",
                                         run.out) and "enable-new-dtags" not in run.out, run


@pytest.mark.skipif(not list(ROOT.glob("build/cuda*/train_gpt2_single")) or command("sh -c", ["nvidia-smi -L"]).status == 0,
                    reason="make DEVICE=cuda has not been run, or there is a driver")
def test_without_a_driver_a_gpus_program_says_so():
    for path in ROOT.glob("build/cuda*/train_gpt2_single"):
        assert_refused(command([path], "--steps 1"), "no NVIDIA driver is loaded", "make DEVICE=cpu")


@gpus.missing()
def test_the_emulator_is_built_in_a_folder_with_a_space(tmp_path):
    clone = tmp_path / "the course"
    shutil.copytree(ROOT / "dev/emulator", clone / "dev/emulator")
    if (ROOT / "nvidia").exists(): (clone / "nvidia").symlink_to(ROOT / "nvidia")
    (tmp_path / "one.cu").write_text('#include <cstdio>\n__global__ void one(int* x) { *x = VALUE; }\nint main() { int* x; '
                                     'cudaMalloc(&x, sizeof *x);\n'
                                     'one<<<1, 1>>>(x); int y; cudaMemcpy(&y, x, sizeof y, cudaMemcpyDeviceToHost); printf("%d, '
                                     '%s\\n", y, TEXT); }\n')
    for where in clone, tmp_path:
        command(["sh", clone / "dev/emulator/compile.sh", tmp_path / "one.cu", tmp_path / "its program", "plain", "-O0",
                 "-DVALUE=7", '-DTEXT="a b"'],
                cwd=where, timeout=600)
        assert command([tmp_path / "its program"]).out == "7, a b\n"
        (tmp_path / "its program").unlink()
