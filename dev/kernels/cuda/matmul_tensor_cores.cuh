/*
matmul_tensor_cores.cuh - a product of matrices by the tensor cores of compute capability 8.0 and later, where a block gets the
82 KB of shared memory that it needs. matmul_forward.cu and matmul_backward.cu share it: they differ in how their operands lie in
memory, and in where the sums go.
*/
#ifndef DEV_CUDA_MATMUL_TENSOR_CORES_CUH
#define DEV_CUDA_MATMUL_TENSOR_CORES_CUH
#include "matmul_common.cuh"
#include "../../../llmc/device/cuda/tensor_cores.cuh"

// ---- the kernel ----
// A block makes 128 x 128 results, 32 k at a time; each of its 8 warps 64 x 32 of them, as 4 x 4 products of 16 x 8 x 16.
constexpr int MMA_TILE = 128, MMA_K = 32, MMA_STAGES = 4, MMA_THREADS = 256, MMA_WARP_ROWS = 64, MMA_WARP_COLS = 32;

// One operand's part in shared memory lies there as in memory. Its rows are 16 bytes longer than their contents: each begins
// 4 banks further, modulo 32, and the 8 rows of 16 bytes that ldmatrix reads at a time lie in different banks.
template <Lies lies> constexpr int MMA_PITCH = VEC + (lies == BY_ROWS ? MMA_K : MMA_TILE);
template <Lies lies> constexpr int MMA_PART = MMA_PITCH<lies> * (lies == BY_ROWS ? MMA_TILE : MMA_K);

// Asks for rows [row, row + 128) and k [k, k + 32) of x (rows,K), in pieces of 16 bytes, of which a row or column has a whole
// number. Outside of x there are zeros.
template <Lies lies> __device__ inline void mma_load(floatX* part, const floatX* x, int row, int k, int rows, int K) {
    constexpr int across = (lies == BY_ROWS ? MMA_K : MMA_TILE) / VEC; // pieces in a row of the part
    for (int i = threadIdx.x; i < MMA_TILE * MMA_K / VEC; i += MMA_THREADS) {
        int major = i / across, minor = i % across * VEC;
        int r = row + (lies == BY_ROWS ? major : minor), c = k + (lies == BY_ROWS ? minor : major);
        bool inside = r < rows && c < K;
        const floatX* piece = x + (lies == BY_ROWS ? (size_t)r * K + c : (size_t)c * rows + r);
        __pipeline_memcpy_async(part + major * MMA_PITCH<lies> + minor, inside ? piece : x, 16, inside ? 0 : 16);
    }
}
// A fragment of 16 rows and 16 k: matrices 0 and 1 are the first 8 k of both halves of the rows, 2 and 3 the others.
template <Lies lies> __device__ inline void mma_fragment(uint32_t (&f)[4], const floatX* part, int row, int k) {
    int lane = threadIdx.x % WARP, matrix = lane / 8;
    if constexpr (lies == BY_ROWS) ldmatrix(f, part + (row + matrix % 2 * 8 + lane % 8) * MMA_PITCH<lies> + k + matrix / 2 * 8);
    else ldmatrix_trans(f, part + (k + matrix / 2 * 8 + lane % 8) * MMA_PITCH<lies> + row + matrix % 2 * 8);
}

// The tiles wait in MMA_STAGES places: while one is used the next three are on their way.
template <Lies A, Lies B>
__global__ void __launch_bounds__(MMA_THREADS) mma_kernel(MatmulOutput out, const floatX* a, const floatX* b, int K) {
    extern __shared__ int4 shared_memory[]; // which is aligned to 16 bytes
    floatX* parts = (floatX*)shared_memory;
    constexpr int stage = MMA_PART<A> + MMA_PART<B>;
    int row = blockIdx.y * MMA_TILE, col = blockIdx.x * MMA_TILE, steps = (K + MMA_K - 1) / MMA_K, warp = threadIdx.x / WARP;
    int warp_row = warp / 4 * MMA_WARP_ROWS, warp_col = warp % 4 * MMA_WARP_COLS;
    auto ask = [&](int step) {
        floatX* place = parts + step % MMA_STAGES * stage;
        if (step < steps) mma_load<A>(place, a, row, step * MMA_K, out.M, K);
        if (step < steps) mma_load<B>(place + MMA_PART<A>, b, col, step * MMA_K, out.N, K);
        __pipeline_commit(); // even an empty batch: the wait below counts batches
    };
    for (int step = 0; step < MMA_STAGES - 1; step++) ask(step);
    float sums[4][4][4] = {};
    for (int step = 0; step < steps; step++) {
        __pipeline_wait_prior(MMA_STAGES - 2); // this thread's pieces of this step are there,
        __syncthreads();                       // and all others'; and no thread still reads the place that is filled next
        ask(step + MMA_STAGES - 1);
        const floatX *part_a = parts + step % MMA_STAGES * stage, *part_b = part_a + MMA_PART<A>;
        #pragma unroll
        for (int k = 0; k < MMA_K; k += 16) {
            uint32_t fa[4][4], fb[2][4];
            #pragma unroll
            for (int i = 0; i < 4; i++) mma_fragment<A>(fa[i], part_a, warp_row + 16 * i, k);
            #pragma unroll
            for (int j = 0; j < 2; j++) mma_fragment<B>(fb[j], part_b, warp_col + 16 * j, k);
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) // of 16 columns' fragment, matrices 0 and 2 are the first 8, 1 and 3 the others
                    mma_m16n8k16<TensorElement>(sums[i][j], fa[i], { fb[j / 2][j % 2], fb[j / 2][j % 2 + 2] });
        }
    }
    int lane = threadIdx.x % WARP;
    #pragma unroll // as above: an index into registers has to be a constant
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = row + warp_row + 16 * i + lane / 4, c = col + warp_col + 8 * j + lane % 4 * 2;
            put_two(out, sums[i][j][0], sums[i][j][1], r, c);
            put_two(out, sums[i][j][2], sums[i][j][3], r + 8, c);
        }
}
// Returns false and does nothing if rows are not whole pieces of 16 bytes, in fp32, for blocks of another size, and on a GPU whose
// blocks get too little shared memory.
template <Lies A, Lies B> static bool mma_launch(MatmulOutput out, const floatX* a, const floatX* b, int K, int threads) {
    bool pieces = (A == BY_ROWS ? K : out.M) % VEC == 0 && (B == BY_ROWS ? K : out.N) % VEC == 0 && out.N % 2 == 0;
    if (!FLOATX_HAS_TENSOR_CORES || threads != MMA_THREADS || !pieces) return false;
    size_t bytes = (size_t)MMA_STAGES * (MMA_PART<A> + MMA_PART<B>) * sizeof(floatX);
    if (bytes > (size_t)cuda_layers.shared_bytes) return false;
    auto kernel = mma_kernel<A, B>;
    allow_shared_memory(kernel, bytes, "a product by tensor cores");
    dim3 blocks((unsigned)ceil_div(out.N, MMA_TILE), (unsigned)ceil_div(out.M, MMA_TILE));
    kernel<<<blocks, MMA_THREADS, bytes, compute_stream>>>(out, a, b, K);
    return true;
}
#endif
