/*
cuda/check.cuh - the one stream that orders everything, and errors of the CUDA runtime: what failed, what the GPU said, and
what to do about it.
*/
#ifndef LLMC_CUDA_CHECK_CUH
#define LLMC_CUDA_CHECK_CUH
#include "../common.h"
#include <cuda_runtime.h>

static cudaStream_t compute_stream; // orders every layer call and copy; made by device_init

// A kernel that ran into an error: whatever is called next reports it, and the GPU can do no more for this process.
static inline bool is_kernel_fault(cudaError_t error) {
    return error == cudaErrorIllegalAddress || error == cudaErrorLaunchTimeout || error == cudaErrorECCUncorrectable
        || (error >= cudaErrorAssert && error <= cudaErrorLaunchFailure);
}

static inline const char* cuda_remedy(cudaError_t error) {
#ifndef DEBUG
    if (is_kernel_fault(error)) return "; a kernel launched before this failed: a build with make DEBUG=1 names its layer";
#endif
    switch (error) {
    case cudaErrorNoKernelImageForDevice: return "; this program was built for other GPUs: make clean, then make on this machine";
    case cudaErrorUnsupportedPtxVersion: return "; the driver is older than the CUDA Toolkit: update it, or build on this machine";
    case cudaErrorDevicesUnavailable: return "; another process has it for itself (nvidia-smi shows which):"
        " CUDA_VISIBLE_DEVICES=N chooses another GPU";
    default: return "";
    }
}

static inline void cuda_check(cudaError_t error, const char* what) {
    require(error == cudaSuccess, "%s: the GPU reports \"%s\"%s", what, cudaGetErrorString(error), cuda_remedy(error));
}

// The answer of an event or a stream that was asked whether it is done.
static inline bool cuda_is_done(cudaError_t answer, const char* what) {
    if (answer == cudaErrorNotReady) {
        cudaGetLastError(); // which would hand "not ready" to whoever looks for errors next
        return false;
    }
    cuda_check(answer, what);
    return true;
}
#endif
