/*
encoder_forward.cu - token and position embeddings, in several kernels: out (B,T,C) = wte[tokens] + wpe[0..T).

This is the smallest kernel. Tokens pick the rows of wte, but each row is a run of C neighbours, so memory is read well; only
divisions and small loads can make a kernel slow. Two rows read and one written are counted for each token, although rows of
wpe are the same for every sequence and come from the cache.
*/
#include "encoder_common.cuh"

struct Problem {
    int T, B, C, V;
    double bytes; // that must be moved once
    Both<int> tokens;
    Both<floatX> wte, wpe, out;

    Problem(Shape s) : T(sequence_length(s.rows)), B(s.rows / T), C(s.cols), V((int)size_min(s.rows, 32768)),
                       bytes(3.0 * s.rows * C * sizeof(floatX)) {
        start_cpu(layer_shapes(B, T, C, 1, V, 1));
        tokens = random_tokens((size_t)B * T, V);
        wte = random_both((size_t)V * C); wpe = random_both((size_t)T * C);
        out = unset_both((size_t)B * T * C);
        cpu::encoder_forward(out.cpu, tokens.cpu, wte.cpu, wpe.cpu, B, T, C);
    }
    void expect_right() { expect_near("out", out, 0); }
};

// ---- 1: what one would write first ----
// One element per thread. Two 64-bit divisions find which element it is, and each takes a GPU dozens of instructions.
__global__ void naive_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, size_t n, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t row = i / C, c = i % C, t = row % T;
    out[i] = narrow<floatX>(widen(wte[(size_t)tokens[row] * C + c]) + widen(wpe[t * C + c]));
}
VARIANT(encoder_forward_1_naive, "one thread per element, two divisions each") {
    size_t n = p.out.n;
    unsigned blocks = (unsigned)ceil_div(n, threads);
    naive_kernel<<<blocks, threads, 0, compute_stream>>>(p.out.gpu, p.tokens.gpu, p.wte.gpu, p.wpe.gpu, n, p.T, p.C);
}

// ---- 2: one thread per row ----
// No divisions; but neighbours read and write C elements apart, and only a part of each piece of memory is used.
__global__ void rows_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int N, int T, int C) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const floatX *e = wte + (size_t)tokens[i] * C, *position = wpe + (size_t)(i % T) * C;
    for (int c = 0; c < C; c++) out[(size_t)i * C + c] = narrow<floatX>(widen(e[c]) + widen(position[c]));
}
VARIANT(encoder_forward_2_rows, "one thread per row: neighbours far apart") {
    int N = p.B * p.T;
    unsigned blocks = (unsigned)ceil_div(N, threads);
    rows_kernel<<<blocks, threads, 0, compute_stream>>>(p.out.gpu, p.tokens.gpu, p.wte.gpu, p.wpe.gpu, N, p.T, p.C);
}

// ---- 3: one block per row ----
// One division per block. (llmc/'s kernel, with one element a load.)
VARIANT(encoder_forward_3_block, "one block per row") {
    auto kernel = encoder_forward_kernel<1>;
    kernel<<<p.B * p.T, threads, 0, compute_stream>>>(p.out.gpu, p.tokens.gpu, p.wte.gpu, p.wpe.gpu, TokenRange{ 0, p.V }, p.T, p.C);
}

// ---- 4: llmc/'s ----
// 16 bytes a load: a row of 768 in 16 bits is work for 96 threads, and llmc/ takes as many.
VARIANT(encoder_forward_4_llmc, "the same, 16 bytes a load") {
    if (p.C % VEC != 0) return not_offered();
    auto kernel = encoder_forward_kernel<VEC>;
    kernel<<<p.B * p.T, threads, 0, compute_stream>>>(p.out.gpu, p.tokens.gpu, p.wte.gpu, p.wpe.gpu, TokenRange{ 0, p.V }, p.T, p.C);
}

OPERATION("rows are tokens, cols channels", { 32768, 768, 0 }, { 14, 72, 0 })
