/*
cuda/check.cuh - the one stream that orders everything, and errors of the CUDA runtime: what failed, what the GPU said,
and what to do about it.
*/
#ifndef LLMC_CUDA_CHECK_CUH
#define LLMC_CUDA_CHECK_CUH
#include "../../base/common.h"
#include <cuda_runtime.h>

// Of cuda_profiler_api.h, which not every package of CUDA's headers has.
extern "C" cudaError_t cudaProfilerStart(void);
extern "C" cudaError_t cudaProfilerStop(void);

static cudaStream_t compute_stream; // orders every layer call and copy; made by device_init

// An error of a kernel: the call that comes next reports it, and this process cannot use the GPU any more.
static inline bool is_kernel_fault(cudaError_t error) {
    return error == cudaErrorIllegalAddress || error == cudaErrorLaunchTimeout || error == cudaErrorECCUncorrectable
        || (error >= cudaErrorAssert && error <= cudaErrorLaunchFailure);
}

static inline const char* cuda_remedy(cudaError_t error) {
#ifndef DEBUG
    if (is_kernel_fault(error))
        return "; a kernel launched before this failed: a build with make DEBUG=1 names its layer";
#endif
    switch (error) {
        case cudaErrorNoKernelImageForDevice:
            return "; this program was built for other GPUs: make clean, then make on this machine";
        case cudaErrorUnsupportedPtxVersion:
            return "; the driver is older than the CUDA Toolkit: update it, or build on this machine";
        case cudaErrorDevicesUnavailable:
            return "; another process uses it exclusively (nvidia-smi shows which):"
                   " CUDA_VISIBLE_DEVICES=N chooses another GPU";
        default: return "";
    }
}

static inline void cuda_check(cudaError_t error, const char* what) {
    invariant(error == cudaSuccess, "%s: the GPU reports \"%s\"%s", what, cudaGetErrorString(error),
              cuda_remedy(error));
}

// Returns true if an event or a stream is done. answer: of its query.
static inline bool cuda_is_done(cudaError_t answer, const char* what) {
    if (answer == cudaErrorNotReady) {
        cudaGetLastError(); // clears it: else the next check for errors would find "not ready"
        return false;
    }
    cuda_check(answer, what);
    return true;
}
#endif
