/*
layernorm_forward.cu - the residual addition and layernorm, forward, in several kernels: res = inp1 + inp2, rounded to floatX,
and out = (res - mean(res)) * rstd(res) * w + b over each of N rows of C channels.

It reads two rows and writes two, and does next to no arithmetic, so at best it is as fast as a copy of as many bytes.
`make build/cuda-bf16/variants/layernorm_forward` and run it; dev/kernels/README.md says what the columns mean.
*/
#include "layernorm_common.cuh"

#define KERNEL_PARAMETERS floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1, const floatX* inp2, \
                          const floatX* w, const floatX* b, int N, int C
#define KERNEL_ARGUMENTS(p) (p).res.gpu, (p).out.gpu, (p).mean.gpu, (p).rstd.gpu, (p).inp1.gpu, (p).inp2.gpu, \
                            (p).w.gpu, (p).b.gpu, (p).N, (p).C

// Variants 1 to 3: as the formula is printed, a row by one thread, one warp or one block.
template <typename Row> __global__ void rows_kernel(KERNEL_PARAMETERS) {
    int i = Row::row();
    if (i >= N) return;
    size_t row = (size_t)i * C;
    float sum = 0, square = 0;
    for (int c = Row::begin(); c < C; c += Row::step()) {
        res[row + c] = narrow<floatX>(widen(inp1[row + c]) + widen(inp2[row + c]));
        sum += widen(res[row + c]);
    }
    float m = Row::sum(sum) / C;
    for (int c = Row::begin(); c < C; c += Row::step()) {
        float x = widen(res[row + c]) - m;
        square += x * x;
    }
    float s = 1.0f / sqrtf(Row::sum(square) / C + LAYERNORM_EPS);
    for (int c = Row::begin(); c < C; c += Row::step())
        out[row + c] = narrow<floatX>((widen(res[row + c]) - m) * s * widen(w[c]) + widen(b[c]));
    if (Row::begin() != 0) return;
    mean[i] = m;
    rstd[i] = s;
}
template <typename Row> static void launch_rows(Problem& p, int threads) {
    rows_kernel<Row><<<Row::blocks(p.N, threads), threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p));
}

// ---- 1: what one would write first ----
// One row per thread. Neighbouring threads read C elements apart, so each element that a warp reads brings a whole
// sector of 32 bytes from memory, and there are only N threads to hide the wait.
VARIANT(layernorm_forward_1_naive, "one thread per row") { launch_rows<ThreadPerRow>(p, threads); }

// ---- 2: neighbouring threads, neighbouring addresses ----
// One row per warp; each lane has every 32nd element.
VARIANT(layernorm_forward_2_warp, "one warp per row: neighbours read neighbours") {
    launch_rows<WarpPerRow>(p, threads);
}

// ---- 3: more threads per row ----
// One row per block. More loads are under way for one row, but each of the two sums now needs two barriers of the whole block,
// and at a barrier no load is under way.
VARIANT(layernorm_forward_3_block, "one block per row: more loads under way, barriers at each sum") {
    launch_rows<BlockPerRow>(p, threads);
}

// ---- 4: the row stays in registers ----
// One row per warp, taken as 16-byte pieces, and each lane keeps its pieces: memory is touched once. The compiler must know how
// many there are, or they would not be registers. Long rows need so many registers that only few warps have room.
template <int PIECES> __global__ void registers_kernel(KERNEL_PARAMETERS) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (i >= N) return;
    size_t row = (size_t)i * C;
    Floats<VEC> x[PIECES];
    float sum = 0, square = 0;
    #pragma unroll
    for (int j = 0; j < PIECES; j++) {
        int c = (j * WARP + lane) * VEC;
        if (c >= C) continue;
        Floats<VEC> x1 = load<VEC>(inp1 + row + c), x2 = load<VEC>(inp2 + row + c);
        #pragma unroll
        for (int k = 0; k < VEC; k++) {
            x[j].x[k] = widen(narrow<floatX>(x1.x[k] + x2.x[k])); // what is stored is what is normalised
            sum += x[j].x[k];
        }
        store(res + row + c, x[j]);
    }
    float m = warp_sum(sum) / C;
    #pragma unroll
    for (int j = 0; j < PIECES; j++) {
        #pragma unroll
        for (int k = 0; k < VEC; k++)
            if ((j * WARP + lane) * VEC < C) square += (x[j].x[k] - m) * (x[j].x[k] - m);
    }
    float s = 1.0f / sqrtf(warp_sum(square) / C + LAYERNORM_EPS);
    #pragma unroll
    for (int j = 0; j < PIECES; j++) {
        int c = (j * WARP + lane) * VEC;
        if (c >= C) continue;
        Floats<VEC> weight = load<VEC>(w + c), bias = load<VEC>(b + c);
        #pragma unroll
        for (int k = 0; k < VEC; k++) x[j].x[k] = (x[j].x[k] - m) * s * weight.x[k] + bias.x[k];
        store(out + row + c, x[j]);
    }
    if (lane != 0) return;
    mean[i] = m;
    rstd[i] = s;
}
template <int PIECES> static void launch_registers(Problem& p, int threads) {
    unsigned blocks = (unsigned)ceil_div(p.N, threads / WARP);
    registers_kernel<PIECES><<<blocks, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p));
}
VARIANT(layernorm_forward_4_registers, "one warp per row, 16 bytes a load, the row in registers") {
    size_t pieces = ceil_div(p.C, WARP * VEC);
    if (p.C % VEC != 0 || pieces > 8) return not_offered();
    if (pieces <= 1) launch_registers<1>(p, threads);
    else if (pieces <= 2) launch_registers<2>(p, threads);
    else if (pieces <= 4) launch_registers<4>(p, threads);
    else if (pieces <= 6) launch_registers<6>(p, threads);
    else launch_registers<8>(p, threads);
}

// ---- 5: llmc/'s ----
// As 4, but the row waits in shared memory, which has room for the rows of any model. llmc/ takes blocks of 256.
VARIANT(layernorm_forward_5_llmc, "one warp per row, 16 bytes a load, the row in shared memory") {
    size_t bytes = (size_t)(threads / WARP) * p.C * sizeof(floatX);
    if (bytes > LAYERNORM_SHARED) return not_offered();
    dim3 block(WARP, threads / WARP);
    unsigned blocks = (unsigned)ceil_div(p.N, block.y);
    auto kernel = p.C % VEC == 0 ? residual_layernorm_forward_kernel<VEC> : residual_layernorm_forward_kernel<1>;
    kernel<<<blocks, block, bytes, compute_stream>>>(KERNEL_ARGUMENTS(p));
}

OPERATION("rows are tokens, cols channels", { 32768, 768, 0 }, { 11, 264, 0 })
