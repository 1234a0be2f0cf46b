/*
library.cuh - for the files whose operation is arithmetic: llmc/'s products by cuBLASLt, as the bar, and the peak that all
kernels are compared with, a large product by cuBLASLt.

Such a file includes this after variants.cuh, its Problem has `flops` in place of `bytes`, and calls library_start() where its
arrays are made.
*/
#ifndef DEV_CUDA_LIBRARY_CUH
#define DEV_CUDA_LIBRARY_CUH
#include "../../../llmc/device/cuda/matmul.cuh"

// Makes cuBLASLt's handle and its scratch, which both.cuh's list owns. When a product is first made the library's
// algorithms are tried, and the fastest is taken.
static void library_start(void) {
    matmul_init();
    cuda_matmul.tries = true;
    cuda_layers.workspace = device_bytes(MATMUL_WORKSPACE);
}

// TFLOP/s of a product of 8192 x 8192 matrices by cuBLASLt. (fp32 is fp32: TF32, with its 10 bits, is used only on request.)
static double product_rate(Timer t) {
    const int n = 8192;
    floatX* memory;
    cuda_check(cudaMalloc((void**)&memory, (size_t)3 * n * n * sizeof(floatX)), "memory to measure a product");
    Both<floatX> some = random_both((size_t)n); // zeros would use less power than numbers do, and so run faster
    for (floatX* row = memory; row < memory + (size_t)2 * n * n; row += n)
        cuda_check(cudaMemcpyAsync(row, some.gpu, n * sizeof(floatX), cudaMemcpyDeviceToDevice, compute_stream), "a product");
    floatX *w = memory + (size_t)n * n, *out = memory + (size_t)2 * n * n;
    double ms = median_ms(t, [&] { matmul_forward(out, memory, w, NULL, n, n, n); });
    cuda_check(cudaFree(memory), "memory to measure a product");
    return 2e-9 * n * n * n / ms;
}
template <typename P> struct Measure<P, decltype((void)&P::flops)> {
    static constexpr const char *work_is = "GFLOP", *rate_is = "TFLOP/s";
    static constexpr const char* peak_is = "a product of 8192 x 8192 matrices by cuBLASLt";
    static double work(const P& p) { return 1e-9 * p.flops; } // GFLOP in a millisecond are TFLOP/s
    static double peak(Timer t) { return product_rate(t); }
};
#endif
