"""Every kernel of llmc/device/cuda/ agrees with the CPU's layer under the emulator: every case in bf16, the quick ones with the address
sanitizer, with the race detector, and in other precisions, which differ in conversions and elements per load."""
import pytest
from emulated import layer_tests, missing

LONG = 4
pytestmark = [pytest.mark.rest, missing()]
test_a_kernel_agrees_with_the_cpus = layer_tests("kernels", ["plain bf16", "asan bf16", "tsan bf16", "plain fp32", "plain fp16"])
