/*
matmul_backward.cu - the gradients of a linear layer in several kernels. Forward is out (N,OC) = inp (N,C) w (OC,C)^T, so

    dinp (N,C)  = dout (N,OC) w (OC,C)            sums over OC
    dw (OC,C)  += dout (N,OC)^T inp (N,C)         sums over N

This is twice forward's arithmetic on the same arrays, but neighbours in memory are no longer neighbours in the sum: all operands
but the first dout lie "by columns" (matmul_tensor_cores.cuh). This helps the simplest kernel, in which neighbouring threads now
read neighbours. Every better kernel has to transpose, which is nearly free where the hardware can do it: ldmatrix.trans, and two
bits of wgmma's instruction. Forward's steps in between are not repeated here. The bias's gradient is another operation.
*/
#include "variants.cuh"
#include "library.cuh"
#include "matmul_hopper.cuh"
#include "matmul_tensor_cores.cuh"

struct Problem {
    int N, C, OC;
    double flops; // multiplications and additions, of both products
    Both<floatX> dinp, dw, dout, inp, w;

    Problem(Shape s) : N(s.rows), C(s.depth), OC(s.cols), flops(4.0 * N * C * OC) {
        start_cpu(layer_shapes(1, N, C, 1, 1, 1));
        library_start();
        dout = random_both((size_t)N * OC, 0, 0.1f); inp = random_both((size_t)N * C); w = random_both((size_t)OC * C, 0, 0.1f);
        dinp = unset_both((size_t)N * C);
        dw = random_both((size_t)OC * C); // what is added to
        cpu::matmul_backward_input(dinp.cpu, dout.cpu, w.cpu, N, C, OC);
        cpu::matmul_backward_weight(dw.cpu, NULL, dout.cpu, inp.cpu, N, C, OC, GRAD_ADD);
        // as a step's first micro-batch does. Algorithms are tried here: a sum that is added to cannot be computed twice
        matmul_backward_weight(dw.gpu, NULL, dout.gpu, inp.gpu, N, C, OC, GRAD_SET);
    }
    void expect_right() { // a sum in one thread's order is off by about the root of its length, in roundings
        expect_near("dinp", dinp, 32 + 2 * sqrt(OC));
        expect_near("dw", dw, 32 + 2 * sqrt(N));
    }
};
static MatmulOutput output_dinp(Problem& p) { return { p.dinp.gpu, NULL, GRAD_SET, p.N, p.C }; }
static MatmulOutput output_dw(Problem& p) { return { p.dw.gpu, NULL, GRAD_ADD, p.OC, p.C }; }

// An operand for kernels that take it by rows or by columns: element (i,k) is x[i * row + k * next].
struct Operand { const floatX* x; size_t row, next; };
static Operand by_rows(const floatX* x, int K) { return { x, (size_t)K, 1 }; }
static Operand by_columns(const floatX* x, int rows) { return { x, 1, (size_t)rows }; }

// ---- 1: what one would write first ----
// One result per thread, and neighbours have neighbouring columns: in one step of k a warp reads 32 neighbours of w or inp, and
// one number of dout for all. But every number still comes from the cache for every use.
__global__ void naive_kernel(MatmulOutput out, Operand a, Operand b, int K) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / out.N, col = i % out.N;
    if (row >= out.M) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += widen(a.x[row * a.row + k * a.next]) * widen(b.x[col * b.row + k * b.next]);
    put(out, sum, row, col);
}
static void launch_naive(MatmulOutput out, Operand a, Operand b, int K, int threads) {
    naive_kernel<<<(unsigned)ceil_div((size_t)out.M * out.N, threads), threads, 0, compute_stream>>>(out, a, b, K);
}
VARIANT(matmul_backward_1_naive, "one result per thread") {
    if ((size_t)std::max(p.N, p.OC) * p.C > INT32_MAX / 2) return not_offered(); // results are counted in int
    launch_naive(output_dinp(p), by_rows(p.dout.gpu, p.OC), by_columns(p.w.gpu, p.C), p.OC, threads);
    launch_naive(output_dw(p), by_columns(p.dout.gpu, p.OC), by_columns(p.inp.gpu, p.C), p.N, threads);
}

// ---- 2: tiles in shared memory, 4 x 4 results per thread ----
// As in forward. Neighbouring threads load neighbours in either layout; a tile that lies by columns is transposed as it is
// written, and rows of T + 1 keep those writes in different banks.
template <int T> __device__ inline void load_tile(float (*tile)[T + 1], Operand o, int row, int k, int rows, int K) {
    int x = threadIdx.x % T, y = threadIdx.x / T;
    for (int i = 0; i < 4 * T; i += T) {
        int r = i + (o.next == 1 ? y : x), c = o.next == 1 ? x : y;
        tile[r][c] = row + r < rows && k + c < K ? widen(o.x[(row + r) * o.row + (k + c) * o.next]) : 0;
    }
}
template <int T> __global__ void tile_kernel(MatmulOutput out, Operand a, Operand b, int K) {
    __shared__ float part_a[4 * T][T + 1], part_b[4 * T][T + 1];
    int x = threadIdx.x % T, y = threadIdx.x / T, row = blockIdx.y * 4 * T, col = blockIdx.x * 4 * T;
    float sums[4][4] = {};
    for (int k = 0; k < K; k += T) {
        load_tile<T>(part_a, a, row, k, out.M, K);
        load_tile<T>(part_b, b, col, k, out.N, K);
        __syncthreads();
        for (int kk = 0; kk < T; kk++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sums[i][j] += part_a[y + i * T][kk] * part_b[x + j * T][kk];
        __syncthreads(); // else the next tile comes while others still read this one
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) put(out, sums[i][j], row + y + i * T, col + x + j * T);
}
template <int T> static void launch_tile(MatmulOutput out, Operand a, Operand b, int K) {
    dim3 blocks((unsigned)ceil_div(out.N, 4 * T), (unsigned)ceil_div(out.M, 4 * T));
    tile_kernel<T><<<blocks, T * T, 0, compute_stream>>>(out, a, b, K);
}
template <int T> static bool launch_tiles(Problem& p) {
    launch_tile<T>(output_dinp(p), by_rows(p.dout.gpu, p.OC), by_columns(p.w.gpu, p.C), p.OC);
    launch_tile<T>(output_dw(p), by_columns(p.dout.gpu, p.OC), by_columns(p.inp.gpu, p.C), p.N);
    return true;
}
VARIANT(matmul_backward_2_tiles, "tiles in shared memory, 4 x 4 results per thread") {
    is_offered = threads == 64 ? launch_tiles<8>(p) : threads == 256 && launch_tiles<16>(p);
}

// ---- 3: tensor cores ----
// The kernel of forward. A tile lies in shared memory as it does in memory, and ldmatrix transposes what lies by columns on its
// way into registers. (Both products have the same conditions, so if the first is refused nothing has been done.)
VARIANT(matmul_backward_3_tensor_cores, "tensor cores, ldmatrix transposes operands by columns") {
    is_offered = mma_launch<BY_ROWS, BY_COLUMNS>(output_dinp(p), p.dout.gpu, p.w.gpu, p.OC, threads) &&
                 mma_launch<BY_COLUMNS, BY_COLUMNS>(output_dw(p), p.dout.gpu, p.inp.gpu, p.N, threads);
}

// ---- 4: Hopper ----
// wgmma takes an operand by columns if its instruction says so.
VARIANT(matmul_backward_4_hopper, "Hopper's own: tiles by TMA, products by wgmma", OWN_BLOCKS) {
    is_offered = wg_launch<BY_ROWS, BY_COLUMNS>(output_dinp(p), p.dout.gpu, p.w.gpu, p.OC) &&
                 wg_launch<BY_COLUMNS, BY_COLUMNS>(output_dw(p), p.dout.gpu, p.inp.gpu, p.N);
}

// ---- 5: the library ----
VARIANT(matmul_backward_5_library, "cuBLASLt, as llmc/ calls it", OWN_BLOCKS) {
    matmul_backward_input(p.dinp.gpu, p.dout.gpu, p.w.gpu, p.N, p.C, p.OC);
    matmul_backward_weight(p.dw.gpu, NULL, p.dout.gpu, p.inp.gpu, p.N, p.C, p.OC, GRAD_ADD);
}

OPERATION("rows are tokens, cols outputs, depth inputs", { 8192, 3072, 768 }, { 136, 200, 40 })
