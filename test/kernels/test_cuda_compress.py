"""The kernels that compress gradients agree with the CPU's under the emulator, where the contract says so to the bit."""
import pytest
from gpus import layer_tests, missing

LONG = 3
pytestmark = [pytest.mark.rest, missing()]
test_a_kernel_agrees_with_the_cpus = layer_tests("compress", ["plain bf16", "asan bf16", "tsan bf16", "plain fp32"], smoke="bf16")
