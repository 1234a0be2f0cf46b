// layernorm_common.cuh - the problem of layernorm_forward.cu and residual.cu, the residual addition and the layernorm after it.
#ifndef DEV_CUDA_LAYERNORM_COMMON_CUH
#define DEV_CUDA_LAYERNORM_COMMON_CUH
#include "variants.cuh"
#include "../../../llmc/device/cuda/layernorm.cuh"

struct Problem {
    int N, C;
    double bytes; // that must be moved once
    Both<floatX> inp1, inp2, w, b, res, out;
    Both<float> mean, rstd;

    Problem(Shape s) : N(s.rows), C(s.cols), bytes(4.0 * N * C * sizeof(floatX)) {
        size_t n = (size_t)N * C;
        start_cpu(layer_shapes(1, N, C, 1, 1, 1));
        inp1 = random_both(n, 0.5f); inp2 = random_both(n);
        w = random_both(C, 1, 0.5f); b = random_both(C, 0, 0.5f);
        res = unset_both(n); out = unset_both(n);
        mean = unset_both<float>(N); rstd = unset_both<float>(N);
        cpu::residual_layernorm_forward(res.cpu, out.cpu, mean.cpu, rstd.cpu, inp1.cpu, inp2.cpu, w.cpu, b.cpu, N, C);
    }
    void expect_right() {
        double slack = 32 + 2 * sqrt(C); // a sum in one thread's order is off by about sqrt(C) roundings
        expect_near("res", res, 0);
        expect_near("out", out, slack);
        expect_near("mean", mean, slack);
        expect_near("rstd", rstd, slack);
    }
};
#endif
