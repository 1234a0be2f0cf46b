/*
residual.cu - the residual addition and the layernorm after it: several kernels for the addition, and at last no kernel at all:
res (N,C) = inp1 + inp2, rounded to floatX, and out (N,C) = layernorm of res.

An addition is the simplest kernel: two loads and a store. The lesson is that the best kernel is no kernel. Alone it reads two
rows and writes one, and layernorm reads that again and writes its own: five rows are moved, where four would do. Those four are
counted. All variants use llmc/'s layernorm at its own block size; the sweep is over the addition's.
*/
#include "layernorm_common.cuh"

static void layernorm_of_res(Problem& p) {
    residual_layernorm_forward(p.res.gpu, p.out.gpu, p.mean.gpu, p.rstd.gpu, p.res.gpu, NULL, p.w.gpu, p.b.gpu, p.N, p.C);
}

// ---- 1: what one would write first ----
// One element per thread: 2 or 4 bytes a load. A warp's loads are neighbours, so no byte is wasted. But the number of threads on
// a multiprocessor is limited, and if each asks for so little, too few bytes are under way.
__global__ void naive_kernel(floatX* res, const floatX* inp1, const floatX* inp2, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) res[i] = narrow<floatX>(widen(inp1[i]) + widen(inp2[i]));
}
VARIANT(residual_1_naive, "one element per thread, then layernorm") {
    unsigned blocks = (unsigned)ceil_div(p.res.n, threads);
    naive_kernel<<<blocks, threads, 0, compute_stream>>>(p.res.gpu, p.inp1.gpu, p.inp2.gpu, p.res.n);
    layernorm_of_res(p);
}

// ---- 2: 16 bytes a load ----
// The same number of threads asks for four or eight times as much. One piece per thread; the thread after the last whole piece
// does the rest.
template <int W> __device__ void add_piece(floatX* res, const floatX* inp1, const floatX* inp2, size_t i, size_t n) {
    if (i + W <= n) {
        Floats<W> x = load<W>(inp1 + i);
        x += load<W>(inp2 + i);
        store(res + i, x);
    } else for (; i < n; i++) res[i] = narrow<floatX>(widen(inp1[i]) + widen(inp2[i]));
}
__global__ void vectors_kernel(floatX* res, const floatX* inp1, const floatX* inp2, size_t n) {
    add_piece<VEC>(res, inp1, inp2, ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC, n);
}
VARIANT(residual_2_vectors, "16 bytes a load, then layernorm") {
    unsigned blocks = (unsigned)ceil_div(ceil_div(p.res.n, VEC), threads);
    vectors_kernel<<<blocks, threads, 0, compute_stream>>>(p.res.gpu, p.inp1.gpu, p.inp2.gpu, p.res.n);
    layernorm_of_res(p);
}

// ---- 3: only as many blocks as fit on the GPU, which go through the array together ----
// No blocks are started while it runs. But a thread finishes one piece before it asks for the next, and GPUs are good at
// starting blocks.
__global__ void strides_kernel(floatX* res, const floatX* inp1, const floatX* inp2, size_t n) {
    size_t step = (size_t)gridDim.x * blockDim.x * VEC;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC; i < n; i += step)
        add_piece<VEC>(res, inp1, inp2, i, n);
}
VARIANT(residual_3_strides, "only as many blocks as fit, each takes many pieces, then layernorm") {
    unsigned blocks = (unsigned)(cuda_device.multiProcessorCount * 2048 / threads);
    strides_kernel<<<blocks, threads, 0, compute_stream>>>(p.res.gpu, p.inp1.gpu, p.inp2.gpu, p.res.n);
    layernorm_of_res(p);
}

// ---- 4: llmc/'s ----
// layernorm adds what it reads: the sum is already on the chip when its mean is needed. layernorm_forward.cu has that kernel's
// own variants and block sizes; here it has llmc/'s block size, 256 threads or as many as have room for their rows.
VARIANT(residual_4_llmc, "no kernel: layernorm adds what it reads") {
    if (threads != 256) return not_offered();
    residual_layernorm_forward(p.res.gpu, p.out.gpu, p.mean.gpu, p.rstd.gpu, p.inp1.gpu, p.inp2.gpu, p.w.gpu, p.b.gpu, p.N, p.C);
}

OPERATION("rows are tokens, cols channels", { 32768, 768, 0 }, { 11, 264, 0 })
