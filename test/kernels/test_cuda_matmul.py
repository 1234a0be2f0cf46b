"""The real cuBLASLt, which needs no GPU for that, accepts our descriptors of the products of linear layers."""
import subprocess
import pytest
from gpus import compiled, flags, missing
from suite import ROOT, command

LONG = 3
pytestmark = [pytest.mark.rest, missing("cublasLt")]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cublaslt_accepts_the_descriptors_of_all_products(precision):
    """The kernels around them are compiled for the emulator and never run."""
    link = subprocess.run(["sh", "dev/find_cuda.sh", "link", "cublasLt"], cwd=ROOT, capture_output=True, text=True)
    if link.returncode: pytest.skip("cuBLAS is not here")
    run = command([compiled("test/unit/test_cublaslt_descriptors.cu", "plain", f"-DPRECISION_{precision.upper()}", link.stdout,
                            cpp=flags("cublasLt"))])
    assert run.status == 0 and run.out.count("\nok ") == 8, run
