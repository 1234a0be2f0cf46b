/*
adamw.cu - one step of AdamW over n parameters, in several kernels. Each element is read and written once and never meets another:
28 bytes a parameter (with master weights: m, v and master read and written, the gradient read, the parameter written; the same
28 in fp32, which is its own master). The kernels differ in how many bytes they keep under way.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/adamw.cuh"

static const AdamW settings = { 1e-2, 0.9, 0.95, 1e-8, 0.1, 3 };

struct Problem {
    size_t n, no_decay;
    double bytes; // that must be moved once
    Both<floatX> params, grads;
    Both<float> master, m, v, grad_scale; // master (0) in fp32
    Both<double> squares; // of the new parameters, of each block of a variant that sums them
    size_t blocks = 0;    // of such a variant

    Problem(Shape s) : n((size_t)s.rows * s.cols), no_decay(n / 3), bytes(28.0 * (double)n) {
        start_cpu(layer_shapes(1, 1, 1, 1, 1, 1));
        params = random_both(n); grads = random_both(n);
        master = random_both<float>(NEEDS_MASTER ? n : 0);
        m = random_both<float>(n, 0, 0.1f); v = random_both<float>(n, 0, 0.1f);
        v = made_both<float>(n, [&](size_t i) { return fabsf(v.start[i]); }); // a mean of squares
        grad_scale = both_of(std::vector<float>(1, 0.5f));
        cpu::adamw_update(settings, params.cpu, NEEDS_MASTER ? master.cpu : NULL, m.cpu, v.cpu, grads.cpu, grad_scale.cpu,
                          n, no_decay, NULL);
        squares = made_both<double>(ceil_div(n, 32), [](size_t) { return 0; });
    }
    float* master_or_none() { return NEEDS_MASTER ? master.gpu : NULL; }
    void expect_right() {
        expect_near("m", m, 8);
        expect_near("v", v, 8);
        expect_near("master", master, 32);
        expect_near("params", params, 32);
        if (blocks == 0) return;
        double found = 0, want = 0;
        for (double square : from_device(squares.gpu, blocks)) found += square;
        for (size_t i = 0; i < n; i++) want += number(params.cpu[i]) * number(params.cpu[i]);
        expect(fabs(found - want) <= 1e-3 * want, "the squares sum to %g, not %g", found, want);
        blocks = 0;
    }
};
#define KERNEL_ARGUMENTS(p) (p).params.gpu, (p).master_or_none(), (p).m.gpu, (p).v.gpu, (p).grads.gpu, (p).grad_scale.gpu, \
                            (p).n, (p).no_decay
static unsigned blocks_for(size_t elements, int threads) { return (unsigned)ceil_div(elements, (size_t)threads); }

// ---- 1: the formula as it is printed ----
// One element per thread, and each thread computes 1 - b and the corrections 1 - b^t for itself, in double as they need it: two
// powers and two more divisions, while nothing else of its own is under way.
__global__ void naive_kernel(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads,
                             const float* grad_scale, size_t n, size_t no_decay) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = widen(grads[i]) * *grad_scale, p = master != NULL ? master[i] : widen(params[i]);
    m[i] = (float)a.beta1 * m[i] + (float)(1 - a.beta1) * g;
    v[i] = (float)a.beta2 * v[i] + (float)(1 - a.beta2) * g * g;
    float m_hat = m[i] / (float)(1 - pow(a.beta1, a.t)), v_hat = v[i] / (float)(1 - pow(a.beta2, a.t));
    if (i >= no_decay) p -= (float)(a.lr * a.weight_decay) * p;
    p -= (float)a.lr * m_hat / (sqrtf(v_hat) + (float)a.eps);
    if (master != NULL) master[i] = p;
    params[i] = narrow<floatX>(p);
}
VARIANT(adamw_1_naive, "one element per thread, the formula as printed") {
    naive_kernel<<<blocks_for(p.n, threads), threads, 0, compute_stream>>>(settings, KERNEL_ARGUMENTS(p));
}

// ---- 2: what is the same for all is computed once, on the host ----
// One element per thread: 2 or 4 bytes a load.
template <int W>
__global__ void factors_kernel(AdamWFactors f, floatX* params, float* master, float* m, float* v, const floatX* grads,
                               const float* grad_scale, size_t n, size_t no_decay) {
    float scale = *grad_scale;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) adamw_piece<W>(f, scale, params, master, m, v, grads, i, no_decay);
    else for (; i < n; i++) adamw_piece<1>(f, scale, params, master, m, v, grads, i, no_decay);
}
VARIANT(adamw_2_scalar, "the corrections once, on the host") {
    factors_kernel<1><<<blocks_for(p.n, threads), threads, 0, compute_stream>>>(adamw_factors(settings), KERNEL_ARGUMENTS(p));
}

// ---- 3: only as many blocks as fit on the GPU, which go through the array together ----
// This saves starting some hundred thousand blocks. But a thread finishes one element before it starts the loads of the next,
// and GPUs are good at starting blocks.
__global__ void strides_kernel(AdamWFactors f, floatX* params, float* master, float* m, float* v, const floatX* grads,
                               const float* grad_scale, size_t n, size_t no_decay) {
    float scale = *grad_scale;
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        adamw_piece<1>(f, scale, params, master, m, v, grads, i, no_decay);
}
VARIANT(adamw_3_strides, "only as many blocks as fit, each takes many elements") {
    unsigned blocks = (unsigned)(cuda_device.multiProcessorCount * 2048 / threads);
    strides_kernel<<<blocks, threads, 0, compute_stream>>>(adamw_factors(settings), KERNEL_ARGUMENTS(p));
}

// ---- 4: 16 bytes of every array in a load ----
// In 16 bits a thread takes 8 elements, and as many fp32 numbers in two loads of 16 bytes. Its neighbour begins 32 bytes further, so
// each of the two loads of a warp touches all sectors of both, and uses half of each: the cache has to keep the other halves.
VARIANT(adamw_4_wide, "16 bytes of 16-bit numbers a load") {
    unsigned blocks = blocks_for(ceil_div(p.n, VEC), threads);
    factors_kernel<VEC><<<blocks, threads, 0, compute_stream>>>(adamw_factors(settings), KERNEL_ARGUMENTS(p));
}

// ---- 5: 16 bytes of fp32 numbers, 8 of 16-bit ones ----
// 4 elements per thread, so that each load of a warp is contiguous. A thread needs 40 registers instead of 54, which leaves space for
// more threads. In fp32 this is variant 4.
VARIANT(adamw_5_contiguous, "16 bytes of fp32 numbers a load") {
    unsigned blocks = blocks_for(ceil_div(p.n, ADAMW_PIECE), threads);
    factors_kernel<ADAMW_PIECE><<<blocks, threads, 0, compute_stream>>>(adamw_factors(settings), KERNEL_ARGUMENTS(p));
}

// ---- 6: llmc/'s ----
// Variant 5, in which each block also sums the squares of its new parameters. A second kernel adds up these sums for the norm. The
// alternative is another pass that reads every parameter, 2 bytes in 16 bits, so variant 6 pays if it takes at most 7 % longer than
// variant 5. llmc/ uses blocks of 256.
VARIANT(adamw_6_llmc, "also sums the squares of the new parameters") {
    p.blocks = blocks_for(ceil_div(p.n, ADAMW_PIECE), threads);
    adamw_kernel<ADAMW_PIECE, floatX><<<(unsigned)p.blocks, threads, 0, compute_stream>>>(adamw_factors(settings), KERNEL_ARGUMENTS(p),
                                                                                          p.squares.gpu);
}

OPERATION("rows times cols parameters", { 4096, 4096, 0 }, { 9, 347, 0 })
