// test_cuda_device.cu - when marks were passed, on a GPU or under the emulator. The test sets what events show, so that hours pass at once.
#include <cuda_runtime.h>
#include <map>

static double clock_seconds; // what an event that is recorded now shows
static std::map<cudaEvent_t, double> shown;
static cudaError_t record_by_clock(cudaEvent_t event, cudaStream_t stream) {
    shown[event] = clock_seconds;
    return cudaEventRecord(event, stream);
}
static cudaError_t elapsed_by_clock(float* ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(1e3 * (shown[to] - shown[from])); // CUDA rounds it to a float, too
    return cudaSuccess;
}
#define cudaEventRecord record_by_clock
#define cudaEventElapsedTime elapsed_by_clock
#include "../../llmc/base/rng.h"
#include "../../llmc/device/cuda/device.cuh"

// After three hours times of marks still tell which of two came first, though a float of milliseconds then has steps of a millisecond.
// Each of the anchor's 5,000 moves rounds a second or two to such a float: together they are off by some microseconds, like a random walk.
int main(void) {
    const double apart = 2e-6;
    double begin = 0;
    device_init(0, 1);
    for (int step = 0; step < 20000; step++) {
        int first = device_event();
        clock_seconds += apart;
        int second = device_event();
        device_synchronize();
        double time = device_event_time(first), between = device_event_time(second) - time;
        if (step == 0) begin = time;
        require(fabs(between - apart) < apart / 2, "step %d: two marks are %.9f s apart, not %.9f", step, between, apart);
        require(fabs(time - begin - (clock_seconds - apart)) < 20e-6, "step %d: %.9f s have passed, not %.9f", step, time - begin,
                clock_seconds - apart);
        device_event_free(first);
        device_event_free(second);
        clock_seconds += 0.4 + 0.2 * random_uniform(1, 2, (uint64_t)step);
    }
    require(clock_seconds > 2.5 * 3600, "only %.0f s have passed", clock_seconds);
    device_shutdown();
}
