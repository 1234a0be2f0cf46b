"""Times of marks, which traces are made of, under the emulator."""
import pytest
from gpus import layer_tests, missing

LONG = 1
pytestmark = [pytest.mark.rest, missing()]
test_marks_of_the_gpu = layer_tests("device", ["plain fp32"])
