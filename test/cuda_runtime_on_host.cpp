/*
cuda_runtime_on_host.cpp - the few calls of the CUDA runtime that test_cuda_kernels needs, for the emulator: memory is the
host's, and whatever was asked for is done at once, so there is nothing to wait for.
*/
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>

extern "C" {
// As far aligned as CUDA promises, and ending where it was asked to end.
cudaError_t cudaMalloc(void** p, size_t bytes) { return posix_memalign(p, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation; }
cudaError_t cudaFree(void* p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
    if (bytes > 0) memcpy(dst, src, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    memset(p, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) { return cudaMemset(p, value, bytes); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; } // the emulator itself stops at a launch that is wrong
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
}
