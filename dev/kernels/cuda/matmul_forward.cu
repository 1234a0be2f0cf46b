/*
matmul_forward.cu - a linear layer in several kernels: out (N,OC) = inp (N,C) w (OC,C)^T + bias (OC).

2 N C OC operations on N C + OC C + N OC numbers: here every number is used hundreds of times, and what counts is how often it
comes from memory, from the cache, from shared memory, until in the end the arithmetic takes the time. The kernels follow a
number on its way inwards. The first five use fp32 arithmetic whatever floatX is: an H100's SM does 128 such multiplications and
additions in a cycle, its tensor cores 2048 of 16-bit numbers. From there on the work is to feed the tensor cores.

In both w and inp, neighbours in memory are neighbours in the sum, k. So threads that have different results cannot share a
load, as they could in a product with w instead of w^T; matmul_backward.cu has such products.
*/
#include "matmul_common.cuh"
#include "matmul_hopper.cuh"
#include "matmul_tensor_cores.cuh"

struct Problem {
    int N, C, OC;
    double flops; // multiplications and additions
    Both<floatX> out, inp, w, bias;

    Problem(Shape s) : N(s.rows), C(s.depth), OC(s.cols), flops(2.0 * N * C * OC) {
        start_cpu(layer_shapes(1, N, C, 1, 1, 1));
        library_start();
        inp = random_both((size_t)N * C); w = random_both((size_t)OC * C, 0, 0.1f); bias = random_both(OC);
        out = unset_both((size_t)N * OC);
        cpu::matmul_forward(out.cpu, inp.cpu, w.cpu, bias.cpu, N, C, OC);
    }
    // a sum in one thread's order is off by about sqrt(C) roundings
    void expect_right() { expect_near("out", out, 32 + 2 * sqrt(C)); }
};
#define KERNEL_PARAMETERS MatmulOutput out, const floatX* inp, const floatX* w, int C
#define KERNEL_ARGUMENTS(p) output(p), (p).inp.gpu, (p).w.gpu, (p).C
static MatmulOutput output(Problem& p) { return { p.out.gpu, p.bias.gpu, GRAD_SET, p.N, p.OC }; }

// ---- 1: what one would write first ----
// One result per thread. Each of a warp's 32 threads reads its own row of w: 32 places far apart for 32 multiplications, and the
// cache has to find them one after the other. matmul_common.cuh has this kernel and the next one.
VARIANT(matmul_forward_1_naive, "one result per thread") {
    is_offered = launch_results<ThreadPerRow, BY_ROWS, BY_ROWS>(KERNEL_ARGUMENTS(p), threads);
}

// ---- 2: neighbours read neighbours ----
// One result per warp, whose lanes take turns along k: what they read lies side by side, one or two lines of the cache for 32
// multiplications. But every number still comes from the cache for every use, and a warp's sum takes ten more instructions.
VARIANT(matmul_forward_2_warp, "one result per warp: neighbours read neighbours") {
    is_offered = launch_results<WarpPerRow, BY_ROWS, BY_ROWS>(KERNEL_ARGUMENTS(p), threads);
}

// ---- 3: a tile in shared memory ----
// T x T threads make T x T results, T steps of k at a time: each number is read from memory once for T uses. But shared
// memory is read twice for each multiplication, which is more than it can deliver. (Rows of T + 1: a column is in T banks.)
template <int T> __global__ void shared_kernel(KERNEL_PARAMETERS) {
    __shared__ float a[T][T + 1], b[T][T + 1];
    int x = threadIdx.x % T, y = threadIdx.x / T, row = blockIdx.y * T, col = blockIdx.x * T;
    float sum = 0;
    for (int k = 0; k < C; k += T) {
        a[y][x] = row + y < out.M && k + x < C ? widen(inp[(size_t)(row + y) * C + k + x]) : 0;
        b[y][x] = col + y < out.N && k + x < C ? widen(w[(size_t)(col + y) * C + k + x]) : 0;
        __syncthreads();
        for (int i = 0; i < T; i++) sum += a[y][i] * b[x][i];
        __syncthreads(); // else the next tile comes while others still read this one
    }
    put(out, sum, row + y, col + x);
}
// `kernel` with a block of T x T threads for each tile of `side` x `side` results. Returns true.
template <typename Kernel> static bool launch(Kernel* kernel, Problem& p, int side, int threads) {
    dim3 blocks((unsigned)ceil_div(p.OC, side), (unsigned)ceil_div(p.N, side));
    kernel<<<blocks, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p));
    return true;
}
VARIANT(matmul_forward_3_shared, "tiles in shared memory") {
    is_offered = threads == 64 ? launch(shared_kernel<8>, p, 8, threads)
        : threads == 256 ? launch(shared_kernel<16>, p, 16, threads)
        : threads == 1024 && launch(shared_kernel<32>, p, 32, threads);
}

// ---- 4: more results per thread ----
// A thread makes 4 x 4 results, for which it reads 4 + 4 numbers from shared memory: half a read for each multiplication, not
// two. T x T threads, 4T x 4T results, T steps of k at a time.
VARIANT(matmul_forward_4_register, "4 x 4 results per thread") {
    is_offered = launch_tiles<BY_ROWS, BY_ROWS>(KERNEL_ARGUMENTS(p), threads);
}

// ---- 5: 16 bytes a load, and the next tile on its way meanwhile ----
// The copies bypass the registers, straight into shared memory, and the wait for them comes one tile later: loading costs few
// instructions and no time of its own. 8 x 8 results per thread, and VEC numbers per read from shared memory.
template <int T> __device__ inline void async_load(floatX (*tile)[5 * VEC], const floatX* x, int row, int k, int rows, int C) {
    for (int i = threadIdx.x; i < 8 * T * 4; i += T * T) {
        int r = row + i / 4, c = k + i % 4 * VEC;
        bool inside = r < rows && c < C;
        __pipeline_memcpy_async(&tile[i / 4][i % 4 * VEC], inside ? x + (size_t)r * C + c : x, 16, inside ? 0 : 16);
    }
}
template <int T> __global__ void async_kernel(KERNEL_PARAMETERS) {
    constexpr int R = 8 * T, K = 4 * VEC; // rows of 64 bytes, and 16 more, so that neighbouring rows lie in different banks
    __shared__ __align__(16) floatX a[2][R][5 * VEC], b[2][R][5 * VEC];
    int x = threadIdx.x % T, y = threadIdx.x / T, row = blockIdx.y * R, col = blockIdx.x * R;
    float sums[8][8] = {};
    auto ask = [&](int place, int k) {
        if (k < C) async_load<T>(a[place], inp, row, k, out.M, C);
        if (k < C) async_load<T>(b[place], w, col, k, out.N, C);
        __pipeline_commit(); // even an empty batch: the wait below counts batches
    };
    ask(0, 0);
    for (int k = 0, now = 0; k < C; k += K, now ^= 1) {
        ask(now ^ 1, k + K);
        __pipeline_wait_prior(1); // all but the batch just asked for: this thread's part of the tile is there,
        __syncthreads();          // and all others'
        for (int kk = 0; kk < K; kk += VEC) {
            Floats<VEC> fa[8];
            for (int i = 0; i < 8; i++) fa[i] = load<VEC>(&a[now][y + i * T][kk]);
            for (int j = 0; j < 8; j++) {
                Floats<VEC> fb = load<VEC>(&b[now][x + j * T][kk]);
                for (int i = 0; i < 8; i++)
                    for (int v = 0; v < VEC; v++) sums[i][j] += fa[i].x[v] * fb.x[v];
            }
        }
        __syncthreads(); // the next round asks for copies into what was just read
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) put(out, sums[i][j], row + y + i * T, col + x + j * T);
}
VARIANT(matmul_forward_5_async, "8 x 8, 16 bytes a load, the next tile on its way") {
    if (!rows_are_vectors(p.C, p.inp.gpu, p.w.gpu)) return not_offered();
    is_offered = threads == 64 ? launch(async_kernel<8>, p, 8 * 8, threads)
        : threads == 256 && launch(async_kernel<16>, p, 8 * 16, threads);
}

// ---- 6: tensor cores ----
// A warp's 32 lanes together multiply 16 x 16 by 16 x 8 in one instruction, from registers that ldmatrix fills, four at a time.
// So a number from shared memory serves 32 or 64 results. Copies run three tiles ahead. matmul_tensor_cores.cuh has the kernel.
VARIANT(matmul_forward_6_tensor_cores, "tensor cores, three tiles on their way") {
    is_offered = mma_launch<BY_ROWS, BY_ROWS>(KERNEL_ARGUMENTS(p), threads);
}

// ---- 7: Hopper ----
// With mma a warp spends many of its instructions on copies, addresses and ldmatrix, and meanwhile the tensor cores wait. wgmma
// reads both operands in shared memory; TMA copies them there when one thread asks; different warps copy and multiply. And a
// number from shared memory serves 64 or 128 results. matmul_hopper.cuh has the kernel.
VARIANT(matmul_forward_7_hopper, "Hopper's own: tiles by TMA, products by wgmma", OWN_BLOCKS) {
    is_offered = wg_launch<BY_ROWS, BY_ROWS>(KERNEL_ARGUMENTS(p));
}

// ---- 8: the library ----
// llmc/'s own call: cuBLASLt, with the algorithm that was the fastest at this shape when all were tried. (Where rows of outputs
// are not whole pieces of 16 bytes, the product is rounded and a kernel adds the bias: another sum than here.)
VARIANT(matmul_forward_8_library, "cuBLASLt, as llmc/ calls it", OWN_BLOCKS) {
    if (p.OC % VEC != 0) return not_offered();
    matmul_forward(p.out.gpu, p.inp.gpu, p.w.gpu, p.bias.gpu, p.N, p.C, p.OC);
}

OPERATION("rows are tokens, cols outputs, depth inputs", { 8192, 3072, 768 }, { 40, 136, 200 })
