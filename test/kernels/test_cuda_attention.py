"""Attention through cuDNN's graphs agrees with the CPU's layer: the emulator's interpreter computes the graphs that
llmc/device/cuda/attention_cudnn.cuh builds. The real cuDNN makes plans for an H100 from them, and refuses what its stand-in refuses."""
import re
import pytest
from emulated import compiled, cpu_layers, flags, layer_tests, missing
from suite import assert_refused, command, once

LONG = 2
pytestmark = [pytest.mark.rest, missing("cudnn", "cublasLt")]
PLANS = "test/kernels/cudnn_plans"
test_attention_agrees_with_the_cpus = layer_tests("attention", ["plain bf16", "asan fp16", "plain fp32"], "cudnn")


# ---- which attention computes ----
def chosen(choice, channels, tokens=8, precision="bf16", **env):
    layers = once(f"the CPU's layers {precision}", lambda place: cpu_layers(place / "cpu_layers.o", precision)) / "cpu_layers.o"
    path = compiled("test/unit/test_cuda_attention.cu", "plain", f"-DPRECISION_{precision.upper()}", "-DUSE_CUDNN=1", [], layers, "-ldnnl -fopenmp",
                    libraries="cudnn", cpp=flags("cublasLt", "cudnn"))
    return command([path], "choose", choice, channels, tokens, env={f"CUDA_EMULATOR_{k.upper()}": v for k, v in env.items()})


OWN, BY_CUDNN = r"own attention .*\(cuDNN: {}\)", "cuDNN 9.{} attention"
TOO_OLD = OWN.format(r"libcudnn.so.9 is cuDNN 9\..*, but the minimum is 9.10.2, because attention in earlier ones has bugs; install .*")


@pytest.mark.parametrize("choice, channels, tokens, version, says", [
    ("auto", 16, 8, "", BY_CUDNN.format("[0-9.]*")), ("own", 16, 8, "", "own attention in fp32 arithmetic"),
    ("own", 64, 8, "", "own attention on tensor cores"), ("auto", 12, 8, "", OWN.format(".* multiple of 8")),
    # what NVIDIA's front end refuses or works around: 9.10.0 and 9.10.1; up to 9.15.0 lengths that are not a multiple of 128; a single token
    ("auto", 16, 128, 90905, TOO_OLD), ("auto", 16, 128, 91001, TOO_OLD), ("auto", 16, 128, 91002, BY_CUDNN.format("10.2")),
    ("auto", 16, 65, 91500, OWN.format("before 9.15.1 it has a bug where T is not a multiple of 128")),
    ("auto", 16, 65, 91501, BY_CUDNN.format("15.1")), ("auto", 16, 1, 91900, OWN.format("its backward does not support sequences of one token"))])
def test_auto_chooses_cudnn_where_it_is_right_and_says_why_not(choice, channels, tokens, version, says):
    run = chosen(choice, channels, tokens, **{"cudnn": version} if version else {})
    assert re.fullmatch(says, run.out.strip()), run


def test_attention_that_was_asked_for_and_cannot_be_is_an_error():
    assert_refused(chosen("cudnn", 12), "attention cudnn: cuDNN cannot be used: .* multiple of 8", "attention own")
    assert_refused(chosen("cudnn", 16, precision="fp32"), "not for fp32")
    assert_refused(chosen("auto", 136), "heads of 136 channels, but at most 128", "more --heads")


# ---- the real cuDNN, without a GPU ----
def real(name, *options):
    """A program that is linked with the real cuDNN, and with a driver that does nothing; its run."""
    cudnn = flags("cudnn")
    rpath = command("sh dev/find_cuda.sh rpath cudnn nvrtc")
    if rpath.status: pytest.skip("NVRTC, which cuDNN compiles with, is not here: sh dev/setup.sh gets it")
    cuda = command("sh dev/emulator/find_headers.sh").out.strip()

    def build(place):
        for line in (["gcc -shared -fPIC -o", place / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", f"{PLANS}/driver.c"],
                     ["g++ -std=c++17 -O1 -fopenmp", f"{PLANS}/{name}.cpp", options, "-o", place / "program", "-isystem", cuda, cudnn.replace("\n", " "),
                      rpath.out, "-ldl"]):
            line = [str(x) for x in line if not isinstance(x, tuple)] + [x for x in line if isinstance(x, tuple) for x in x]
            done = command(" ".join(line).replace(f"-isystem {cuda}", f"-isystem {cuda}/include", 1))
            assert done.status == 0, done
    place = once(f"real {name} {options}", build)
    return lambda *arguments: command([place / "program"], *arguments, env={"LD_LIBRARY_PATH": place})
