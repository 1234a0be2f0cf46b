/*
matmul_common.cuh - a product of matrices whose operands lie either way, as matmul_forward.cu and matmul_backward.cu
need it: where the sums go, and the kernels without tensor cores that both files use.

d (M,N) = a (M,K) b (N,K)^T. A row of an operand holds the factors of a sum: rows of `a` are rows of d, rows of `b` its
columns. In memory an operand lies by rows (an element's neighbour is the next k), or by columns (its neighbour is the
next row):

    out  = inp w^T         a = inp  by rows           b = w    by rows
    dinp = dout w          a = dout by rows           b = w    by columns: row c of b is column c of w
    dw   = dout^T inp      a = dout by columns        b = inp  by columns
*/
#ifndef DEV_CUDA_MATMUL_COMMON_CUH
#define DEV_CUDA_MATMUL_COMMON_CUH
#include "variants.cuh"
#include "library.cuh"

typedef enum { BY_ROWS, BY_COLUMNS } Lies;
// Element (i,k) of an operand x (rows,K)
template <Lies lies> __device__ inline float element(const floatX* x, int i, int k, int rows, int K) {
    return widen(x[lies == BY_ROWS ? (size_t)i * K + k : (size_t)k * rows + i]);
}

// Where sums go: d (M,N) = sum + bias (N), or d += sum. bias NULL: none.
struct MatmulOutput {
    floatX* d;
    const floatX* bias;
    GradMode mode;
    int M, N;
};
__device__ inline float output_of(MatmulOutput o, float sum, int row, int col) {
    if (o.bias != NULL) sum += widen(o.bias[col]);
    return o.mode == GRAD_ADD ? widen(o.d[(size_t)row * o.N + col]) + sum : sum;
}
__device__ inline void put(MatmulOutput o, float sum, int row, int col) {
    if (row < o.M && col < o.N) o.d[(size_t)row * o.N + col] = narrow<floatX>(output_of(o, sum, row, col));
}
// Stores two neighbours, as tensor cores leave them in a lane; N and col are even.
__device__ inline void put_two(MatmulOutput o, float first, float second, int row, int col) {
    if (row >= o.M || col >= o.N) return;
    floatX pair[2] = { narrow<floatX>(output_of(o, first, row, col)),
                       narrow<floatX>(output_of(o, second, row, col + 1)) };
    memcpy(o.d + (size_t)row * o.N + col, __builtin_assume_aligned(pair, 4), sizeof pair);
}

// ---- one result by one thread or one warp ----
template <typename Row, Lies A, Lies B>
__global__ void results_kernel(MatmulOutput out, const floatX* a, const floatX* b, int K) {
    int i = Row::row(), row = i / out.N, col = i % out.N;
    if (row >= out.M) return;
    float sum = 0;
    for (int k = Row::begin(); k < K; k += Row::step())
        sum += element<A>(a, row, k, out.M, K) * element<B>(b, col, k, out.N, K);
    sum = Row::sum(sum);
    if (Row::begin() == 0) put(out, sum, row, col);
}
template <typename Row, Lies A, Lies B>
static bool launch_results(MatmulOutput out, const floatX* a, const floatX* b, int K, int threads) {
    size_t results = (size_t)out.M * out.N, blocks = Row::blocks(results, threads);
    if (blocks * threads > INT32_MAX / 2) return false; // threads are counted in int
    results_kernel<Row, A, B><<<(unsigned)blocks, threads, 0, compute_stream>>>(out, a, b, K);
    return true;
}

// ---- 4 x 4 results per thread: T x T threads make 4T x 4T of them, T steps of k at a time ----
// Neighbouring threads load neighbours in either layout; a tile that lies by columns is transposed as it is written,
// and rows of T + 1 keep those writes in different banks.
template <int T, Lies lies>
__device__ inline void load_tile(float (*tile)[T + 1], const floatX* x, int row, int k, int rows, int K) {
    int along = threadIdx.x % T, across = threadIdx.x / T;
    for (int i = 0; i < 4 * T; i += T) {
        int r = i + (lies == BY_ROWS ? across : along), c = lies == BY_ROWS ? along : across;
        tile[r][c] = row + r < rows && k + c < K ? element<lies>(x, row + r, k + c, rows, K) : 0;
    }
}
template <int T, Lies A, Lies B>
__global__ void tile_kernel(MatmulOutput out, const floatX* a, const floatX* b, int K) {
    __shared__ float part_a[4 * T][T + 1], part_b[4 * T][T + 1];
    int x = threadIdx.x % T, y = threadIdx.x / T, row = blockIdx.y * 4 * T, col = blockIdx.x * 4 * T;
    float sums[4][4] = {};
    for (int k = 0; k < K; k += T) {
        load_tile<T, A>(part_a, a, row, k, out.M, K);
        load_tile<T, B>(part_b, b, col, k, out.N, K);
        __syncthreads();
        for (int kk = 0; kk < T; kk++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sums[i][j] += part_a[y + i * T][kk] * part_b[x + j * T][kk]; // read once
        __syncthreads(); // else the next tile comes while others still read this one
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) put(out, sums[i][j], row + y + i * T, col + x + j * T);
}
// Returns false and does nothing for other blocks than of 8 x 8 or 16 x 16 threads.
template <Lies A, Lies B>
static bool launch_tiles(MatmulOutput out, const floatX* a, const floatX* b, int K, int threads) {
    int side = threads == 64 ? 4 * 8 : 4 * 16;
    if (threads != 64 && threads != 256) return false;
    auto kernel = threads == 64 ? tile_kernel<8, A, B> : tile_kernel<16, A, B>;
    dim3 blocks((unsigned)ceil_div(out.N, side), (unsigned)ceil_div(out.M, side));
    kernel<<<blocks, threads, 0, compute_stream>>>(out, a, b, K);
    return true;
}
#endif
