"""As nvcc compiles the kernels of llmc/device/cuda/, none spills registers, or has too many for its blocks."""
import re, shutil
import pytest
from gpus import flags, missing
from suite import ROOT, command, succeeds

LONG = 1
pytestmark = [pytest.mark.rest, missing()]

RESOURCES = "python3 -m dev.kernels.kernel_resources"
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc") or flags("cublasLt", "cudnn", "nccl") is None,
                                reason="nvcc, or one of NVIDIA's libraries, is not here")


@needs_nvcc
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_no_kernel_of_a_step_spills_or_has_too_many_registers(precision):
    found = succeeds(RESOURCES, f"--precision {precision}", timeout=900).out
    assert len(re.findall(r"^\| `\w+_kernel` ", found, re.M)) > 40, found
    nvcc = re.search(r"release ([\d.]+)", succeeds("nvcc --version").out)[1]
    doc = (ROOT / "dev/kernels/README.md").read_text()
    if precision != "bf16" or f"nvcc {nvcc} for capability 8.0 and 9.0" not in " ".join(doc.split()): return
    bounded = "".join(line for line in found.splitlines(True) if not line.endswith("| 1024 |\n"))
    assert bounded.count("_kernel`") > 5 and bounded + "\n" in doc, bounded


@needs_nvcc
def test_a_kernel_that_spills_or_has_too_many_registers_is_named(tmp_path):
    """The same 128 numbers of a thread: with a bound of 1024 threads they are spilled, without any they need registers that a block
    has not."""
    source = tmp_path / "kernels.cu"
    kernel = """__global__ void %s(float* x) {
        float y[128];
        #pragma unroll
        for (int i = 0; i < 128; i++) y[i] = x[i * 1024 + threadIdx.x];
        for (int k = 0; k < 9; k++) {
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 128; i++) y[i] = y[i] * y[(i + 1) %% 128] + x[k];
        }
        #pragma unroll
        for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = y[i];
    }
    """
    source.write_text(kernel % "__launch_bounds__(1024) crowded_kernel" + kernel % "unbounded_kernel"
                      + kernel % "__launch_bounds__(128) bounded_kernel")
    run = command(RESOURCES, [source], timeout=900)
    assert run.status == 1, run
    for gpu in "8.0", "9.0":
        assert re.search(rf"^error: crowded_kernel on {gpu} keeps \d\d+ bytes of local memory, of which \d\d+ are spilled$",
                         run.err, re.M), run
        assert re.search(rf"^error: unbounded_kernel on {gpu} has 1\d\d registers, too many for a block of 1024 threads", run.err,
                         re.M), run
    assert "bounded_kernel on" not in run.err.replace("unbounded_kernel on", ""), run
