"""Which attention is chosen when. The real cuDNN makes plans for an H100 from the graphs that llmc/device/cuda/attention_cudnn.cuh
builds, and refuses what its stand-in refuses."""
import re, sys
import pytest
from gpus import compiled, flags, layers, missing
from suite import assert_refused, command, once

LONG = 2
pytestmark = [pytest.mark.rest, missing("cudnn", "cublasLt")]
PLANS = "test/kernels/cudnn_plans"


# ---- which attention computes ----
def chosen(choice, channels, tokens=8, precision="bf16", **env):
    return command([sys.executable, "test/kernels/check_layers.py", layers("plain", precision)], "choose", choice, channels, tokens,
                   env={f"CUDA_EMULATOR_{k.upper()}": v for k, v in env.items()})


OWN, BY_CUDNN = r"own attention .*\(cuDNN: {}\)", "cuDNN 9.{} attention"
TOO_OLD = OWN.format(r"libcudnn.so.9 is cuDNN 9\..*, but the minimum is 9.10.2, because attention in earlier ones has bugs; "
                     r"install .*")


@pytest.mark.parametrize("precision, choice, channels, tokens, version, says", [
    ("bf16", "auto", 16, 8, "", BY_CUDNN.format("[0-9.]*")), ("bf16", "own", 16, 8, "", "own attention in fp32 arithmetic"),
    ("bf16", "own", 64, 8, "", "own attention on tensor cores"), ("bf16", "auto", 12, 8, "", OWN.format(".* multiple of 8")),
    ("fp32", "own", 64, 8, "", "own attention in fp32 arithmetic"), ("fp32", "auto", 16, 8, "", OWN.format(".*not for fp32")),
    # what NVIDIA's front end refuses or works around: 9.10.0 and 9.10.1; up to 9.15.0 lengths that are not a multiple of 128; a
    # single token
    ("bf16", "auto", 16, 128, 90905, TOO_OLD), ("bf16", "auto", 16, 128, 91001, TOO_OLD),
    ("bf16", "auto", 16, 128, 91002, BY_CUDNN.format("10.2")),
    ("bf16", "auto", 16, 65, 91500, OWN.format("before 9.15.1 it has a bug where T is not a multiple of 128")),
    ("bf16", "auto", 16, 65, 91501, BY_CUDNN.format("15.1")),
    ("fp16", "auto", 64, 8, "on 7.5", OWN.format("its attention needs a GPU of compute capability 8.0 or later")),
    ("bf16", "auto", 16, 1, 91900, OWN.format("its backward does not support sequences of one token"))])
def test_auto_chooses_cudnn_where_it_is_right_and_says_why_not(precision, choice, channels, tokens, version, says):
    run = chosen(choice, channels, tokens, precision, **{"capability": 75} if version == "on 7.5" else {"cudnn": version}
                 if version else {})
    assert re.fullmatch(says, run.out.strip()), run


def test_attention_that_was_asked_for_and_cannot_be_is_an_error():
    assert_refused(chosen("cudnn", 12), "attention cudnn: cuDNN cannot be used: .* multiple of 8", "attention own")
    assert_refused(chosen("cudnn", 16, precision="fp32"), "cuDNN cannot be used: its attention is for bf16 and fp16, not for fp32")
    assert_refused(chosen("cudnn", 16, cudnn=90905), "libcudnn.so.9 is cuDNN 9.9.5, but the minimum is 9.10.2")
    assert_refused(chosen("auto", 136), "heads of 136 channels, but at most 128", "more --heads")


# ---- the real cuDNN, without a GPU ----
def real(source, *options):
    """Runs a program that is linked with the real cuDNN, and with a driver that does nothing."""
    rpath = command("sh dev/find_cuda.sh rpath cudnn nvrtc")
    if rpath.status: pytest.skip("cuDNN, or NVRTC, with which it compiles, is missing: sh dev/setup.sh --with-cuda installs them")
    cuda = command("sh dev/emulator/find_headers.sh").out.strip()

    def build(place):
        for line in (f"gcc -shared -fPIC -o {place}/libcuda.so.1 -Wl,-soname,libcuda.so.1 {PLANS}/driver.c",
                     f"g++ -std=c++17 -O1 -fopenmp {PLANS}/{source} -o {place}/program -isystem {cuda}/include {flags('cudnn')} "
                     f"{rpath.out} -ldl"):
            done = command(line, *options * line.startswith("g++"))
            assert done.status == 0, done
    place = once(f"real {source} {options}", build)
    return lambda *arguments: command([place / "program"], *arguments, env={"LD_LIBRARY_PATH": place})


def plans(precision, shape, gpu="h100"):
    """What the real cuDNN says to both directions of B T NH HS [deterministic]."""
    return real("plans.cpp", f"-DPRECISION_{precision.upper()}")(f"{PLANS}/{gpu}.json", shape)


@pytest.mark.parametrize("precision, shape", [
    ("bf16", "4 1024 12 64"), ("fp16", "4 1024 12 64"), ("bf16", "4 1024 12 64 deterministic"), ("bf16", "2 65 3 128"),
    ("fp16", "2 65 3 128 deterministic"), ("bf16", "2 1 2 64"), ("bf16", "1 200 2 80")])
def test_cudnn_has_a_plan_for_an_h100(precision, shape):
    run = plans(precision, shape)
    assert run.status == 0 and run.out.count(": engine ") == 2, run


def test_cudnn_has_no_plan_for_a_t4():
    run = plans("fp16", "4 1024 12 64", "t4")
    assert run.status != 0 and run.out.count("refused: no engine takes this graph") == 2, run


def test_cudnn_refuses_heads_that_are_no_multiple_of_8():
    run = plans("bf16", "1 100 2 12")
    assert run.status != 0 and len(re.findall("refused: .*multiple of 8", run.out)) == 2, run


def test_the_deterministic_plan_stores_what_the_other_adds_up_at_once_in_any_order():
    of_any, ordered = (int(re.search(r"^backward: engine \d+, (\d+) bytes", plans("bf16", shape).out, re.M)[1])
                       for shape in ("2 256 4 64", "2 256 4 64 deterministic"))
    assert of_any < 65536 and ordered >= 2 * 2 * 4 * 256 * 256


def test_the_stand_in_answers_mistakes_as_cudnn_does():
    """What cuDNN refuses, the stand-in refuses in the same words; graphs called good are accepted by both."""
    ours = command([compiled(f"{PLANS}/mistakes.cpp", libraries="cudnn", cpp=flags("cudnn"))])
    cudnns = real("mistakes.cpp")()
    lines = cudnns.out.splitlines()
    assert ours.status == cudnns.status == 0 and len(lines) >= 70 and len(re.findall("^a good .*SUCCESS", cudnns.out,
                                                                                     re.M)) >= 6, cudnns
    assert {line for line in lines if "SUCCESS" not in line or line.startswith("a good ")} <= set(ours.out.splitlines())
