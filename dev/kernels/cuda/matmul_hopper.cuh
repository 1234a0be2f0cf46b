/*
matmul_hopper.cuh - a product of matrices with the instructions of compute capability 9.0: TMA copies tiles, and warpgroups
multiply them with wgmma. Operands, their names and the output are as in matmul_tensor_cores.cuh.

What changes from there: no thread computes an address, none waits for a copy that it has made, and nothing goes through
registers on its way to the tensor cores. One warpgroup only asks for tiles, two others multiply. They signal by mbarriers, two
for each place that a tile can have: `full`, when its bytes have come, and `empty`, when its last reader is done.
*/
#ifndef DEV_CUDA_MATMUL_HOPPER_CUH
#define DEV_CUDA_MATMUL_HOPPER_CUH
#include "hopper.cuh"
#include "matmul_tensor_cores.cuh"

// A block makes 256 x 128 results, 64 k at a time, each of its two consumer warpgroups 128 x 128 of them: that is 128 registers
// a thread. In shared memory an operand is a row of boxes of 64 x 64 elements, however it lies in memory: box i has rows 64 i
// to 64 i + 63.
constexpr int WG_TILE_M = 256, WG_TILE_N = 128, WG_K = 64, WG_THREADS = 3 * 128, WG_MOST_STAGES = 4;
constexpr int WG_BOX = 64 * 64 * 2, WG_STAGE = (WG_TILE_M + WG_TILE_N) / 64 * WG_BOX; // bytes

template <Lies lies>
__device__ inline void wg_load(char* boxes, const CUtensorMap* map, int rows, int row, int k, uint64_t* full) {
    for (int i = 0; i < rows / 64; i++)
        if constexpr (lies == BY_ROWS) tma_load(boxes + i * WG_BOX, map, k, row + 64 * i, full);
        else tma_load(boxes + i * WG_BOX, map, row + 64 * i, k, full);
}
// Returns the descriptor of the 16 k from `k` on: 32 bytes further in each row of 128, or 16 rows further.
template <Lies lies> __device__ inline uint64_t wg_operand(const char* boxes, int k) {
    return wgmma_operand(boxes + (lies == BY_ROWS ? 2 * k : 128 * k), WG_BOX);
}

// Runs in one thread of the producers. Asks for the tiles of all steps, each as soon as its place is empty.
template <Lies A, Lies B>
__device__ inline void wg_produce(char* tiles, const CUtensorMap* map_a, const CUtensorMap* map_b, int row, int col, int steps,
                                  int stages, uint64_t* full, uint64_t* empty) {
    for (int step = 0, stage = 0, round = 0; step < steps; step++) {
        char* place = tiles + stage * WG_STAGE;
        mbarrier_wait(&empty[stage], round % 2 ^ 1); // in round 0 the phase before the first: it is past
        mbarrier_arrive_expect(&full[stage], WG_STAGE);
        wg_load<A>(place, map_a, WG_TILE_M, row, step * WG_K, &full[stage]);
        wg_load<B>(place + WG_TILE_M / 64 * WG_BOX, map_b, WG_TILE_N, col, step * WG_K, &full[stage]);
        if (++stage == stages) stage = 0, round++;
    }
}
// Runs in a consumer warpgroup, `group` 0 or 1: sums += its 128 rows of a, times b. At most two steps' products are under way.
template <Lies A, Lies B>
__device__ inline void wg_consume(float (&sums)[2][64], const char* tiles, int group, int steps, int stages, uint64_t* full,
                                  uint64_t* empty) {
    for (auto& half : sums) wgmma_settle(half);
    for (int step = 0, stage = 0, before = 0, round = 0; step < steps; step++) {
        const char *a = tiles + stage * WG_STAGE + 2 * group * WG_BOX, *b = tiles + stage * WG_STAGE + WG_TILE_M / 64 * WG_BOX;
        mbarrier_wait(&full[stage], round % 2);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < WG_K; k += 16)
            #pragma unroll
            for (int i = 0; i < 2; i++)
                wgmma<TensorElement, A == BY_COLUMNS, B == BY_COLUMNS>(sums[i], wg_operand<A>(a + i * WG_BOX, k),
                                                                       wg_operand<B>(b, k));
        wgmma_commit();
        wgmma_wait<1>(); // the step before is done: a warp has read its place for the last time
        if (step > 0 && threadIdx.x % WARP == 0) mbarrier_arrive(&empty[before]);
        before = stage;
        if (++stage == stages) stage = 0, round++;
    }
    wgmma_wait<0>(); // else the sums are not there yet
    for (auto& half : sums) wgmma_settle(half);
}
template <Lies A, Lies B> __global__ void __launch_bounds__(WG_THREADS) wg_kernel(const __grid_constant__ CUtensorMap map_a,
        const __grid_constant__ CUtensorMap map_b, MatmulOutput out, int K, int stages) {
#if HAS_HOPPER
    extern __shared__ int4 shared_memory[];
    __shared__ uint64_t full[WG_MOST_STAGES], empty[WG_MOST_STAGES];
    char* tiles = first_tile(shared_memory);
    int row = blockIdx.y * WG_TILE_M, col = blockIdx.x * WG_TILE_N, steps = (K + WG_K - 1) / WG_K;
    int group = (int)threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / WARP, lane = threadIdx.x % WARP;
    pipeline_init(full, empty, stages);
    if (group < 0) { // the producers need next to no registers, the consumers get theirs
        leave_registers<40>();
        if (threadIdx.x == 0) wg_produce<A, B>(tiles, &map_a, &map_b, row, col, steps, stages, full, empty);
        return;
    }
    take_registers<232>();
    float sums[2][64] = {};
    wg_consume<A, B>(sums, tiles, group, steps, stages, full, empty);
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int j = 0; j < 64; j += 4) {
            int r = row + 128 * group + 64 * i + 16 * warp + lane / 4, c = col + 2 * j + lane % 4 * 2;
            put_two(out, sums[i][j], sums[i][j + 1], r, c);
            put_two(out, sums[i][j + 2], sums[i][j + 3], r + 8, c);
        }
#endif
}
// Returns false and does nothing if rows are not whole pieces of 16 bytes, in fp32, and on other GPUs.
template <Lies A, Lies B> static bool wg_launch(MatmulOutput out, const floatX* a, const floatX* b, int K) {
    bool pieces = (A == BY_ROWS ? K : out.M) % VEC == 0 && (B == BY_ROWS ? K : out.N) % VEC == 0 && out.N % 2 == 0;
    if (!FLOATX_HAS_TENSOR_CORES || !pieces || !gpu_is_hopper()) return false;
    int stages = std::min(WG_MOST_STAGES, (cuda_layers.shared_bytes - 2048) / WG_STAGE); // 2048: the barriers, to align the tiles
    size_t bytes = 1024 + (size_t)stages * WG_STAGE;
    auto kernel = wg_kernel<A, B>;
    allow_shared_memory(kernel, bytes, "a product by warpgroups");
    CUtensorMap map_a = A == BY_ROWS ? tile_map(a, out.M, K, 64) : tile_map(a, K, out.M, 64);
    CUtensorMap map_b = B == BY_ROWS ? tile_map(b, out.N, K, 64) : tile_map(b, K, out.N, 64);
    dim3 blocks((unsigned)ceil_div(out.N, WG_TILE_N), (unsigned)ceil_div(out.M, WG_TILE_M));
    kernel<<<blocks, WG_THREADS, bytes, compute_stream>>>(map_a, map_b, out, K, stages);
    return true;
}
#endif
