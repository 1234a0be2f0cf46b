"""Times of marks, which traces are made of, on a GPU or under the emulator."""
import pytest
from gpus import IS_REAL, compiled, missing, program
from suite import succeeds

LONG = 1
pytestmark = [pytest.mark.rest, pytest.mark.gpu, missing()]


def test_after_hours_times_of_marks_still_tell_which_of_two_came_first():
    succeeds([program("test/test_cuda_device") if IS_REAL else compiled("test/unit/test_cuda_device.cu", "plain",
                                                                        "-DPRECISION_FP32")])
