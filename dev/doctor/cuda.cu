// CUDA: the toolkit's version (argument "toolkit"), or each GPU with the driver's version after a kernel has run there.
#include <cstdio>
#include <cstring>

__global__ void answer(int* out) { *out = 42; }

static bool kernel_runs(int device) {
    int *out = NULL, result = 0;
    cudaSetDevice(device);
    if (cudaMalloc(&out, sizeof *out) != cudaSuccess) return false;
    answer<<<1, 1>>>(out);
    bool copied = cudaMemcpy(&result, out, sizeof result, cudaMemcpyDeviceToHost) == cudaSuccess;
    cudaFree(out);
    return copied && result == 42;
}

static const char* limits_of(const cudaDeviceProp& p) {
    if (p.major < 7 || (p.major == 7 && p.minor < 5)) return "; too old: the minimum is 7.5, so make DEVICE=cpu";
    return p.major < 8 ? "; has no bf16: make PRECISION=fp16 or fp32" : "";
}

int main(int argc, char** argv) {
    int version = 0, driver = 0, devices = 0, failed = 0;
    cudaRuntimeGetVersion(&version);
    if (argc > 1 && strcmp(argv[1], "toolkit") == 0) return printf("%d.%d\n", version / 1000, version % 1000 / 10) < 0;
    cudaDriverGetVersion(&driver);
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (driver == 0) printf("no driver: libcuda.so.1 is not here or cannot be loaded\n");
    else if (error == cudaErrorInsufficientDriver)
        printf("the driver is for CUDA %d.%d, older than the toolkit's %d.%d: update the driver or use an older toolkit\n", driver / 1000,
               driver % 1000 / 10, version / 1000, version % 1000 / 10);
    else if (error != cudaSuccess || devices == 0) printf("%s\n", cudaGetErrorString(error));
    if (driver == 0 || error != cudaSuccess || devices == 0) return 1;
    for (int i = 0; i < devices; i++) {
        cudaDeviceProp p;
        cudaGetDeviceProperties(&p, i);
        bool runs = kernel_runs(i);
        failed += !runs;
        printf("%d: %s, compute capability %d.%d, %.0f GB, driver for CUDA %d.%d%s%s\n", i, p.name, p.major, p.minor,
               (double)p.totalGlobalMem * 1e-9, driver / 1000, driver % 1000 / 10, limits_of(p), runs ? "" : "; a kernel does not run on it");
    }
    return failed != 0;
}
