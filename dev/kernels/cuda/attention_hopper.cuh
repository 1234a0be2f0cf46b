/*
attention_hopper.cuh - attention forward with the instructions of compute capability 9.0: TMA copies tiles of q, k and v, and
warpgroups multiply them with wgmma. For elements of 16 bits and heads of 64 channels.

What changes from llmc/device/cuda/attention_tensor_cores.cuh: a tile of keys and values is read from shared memory for a warpgroup's
64 queries, not for each warp's 16; wgmma reads it there, so no warp spends instructions and registers on fragments of k and v;
and one thread asks for all copies. What stays: a thread has a result's rows as mma would give them, so softmax is the same code,
and P is the left operand of the second product without leaving the registers.

The right operand of S = q k^T is k's tile by its rows. That of o += P v is summed over keys, down the rows of v's tile: a bit of
wgmma says so. One tensor map covers qkv (B,T,3C): q, k and v of head h are boxes of 128 tokens and 64 channels at columns
64 h, C + 64 h and 2C + 64 h. Past the end of a sequence a box has zeros, not the next sequence's tokens.

One warpgroup only asks for tiles, two others compute. They signal by mbarriers, two for each place of a tile of keys and one of
values: `full`, when the bytes have come, and `empty`, when all warps are done with them. There is no deadlock: the producers
wait only for consumers to finish the round before, consumers only for bytes that have been asked for. Only TMA writes to a tile
and only wgmma reads it, so no fence is needed between those and ordinary accesses (fence.proxy.async).

What flash attention 3 has and this has not: here a warpgroup waits for its scores, and again for its sums, and the tensor cores
idle unless the other warpgroup happens to multiply meanwhile. There named barriers make the two take turns, and the next tile's
scores are asked for before the softmax of this one, which takes 64 more registers.
*/
#ifndef DEV_CUDA_ATTENTION_HOPPER_CUH
#define DEV_CUDA_ATTENTION_HOPPER_CUH
#include "attention_common.cuh"
#include "hopper.cuh"

constexpr int FLASH_ROWS = 128;                   // of a tile: queries of a block, keys, values
constexpr int FLASH_TILE = FLASH_ROWS * HEAD * 2; // bytes: rows of 128, swizzled
constexpr int FLASH_STAGES = 2;                   // places for keys and their values
constexpr int FLASH_THREADS = 3 * 128;            // producers, and two warpgroups of 64 queries each

// A thread's part of the two queries that are its rows: the weighted sum so far, the largest score, and its part of the sum of
// exponentials.
struct FlashRows { float o[HEAD / 2], max[2], sum[2]; };

// Views a thread's sums as the functions for mma's results take them: of every 8 columns, the thread's 4.
template <int n> __device__ inline float (&by_eights(float (&d)[n]))[n / 4][4] { return (float (&)[n / 4][4])d; }

// Runs in one thread of the producers. Asks for q with the first keys, then for keys and values as soon as their place is empty.
__device__ inline void flash_produce(char* q, const CUtensorMap* map, int tile, int head, int C, int NH, uint64_t* full,
                                     uint64_t* empty) {
    int channel = head % NH * HEAD, b = head / NH;
    for (int step = 0; step <= tile; step++) { // none after the queries' own
        int stage = step % FLASH_STAGES, round = step / FLASH_STAGES;
        char* k = q + (1 + 2 * stage) * FLASH_TILE;
        mbarrier_wait(&empty[stage], round % 2 ^ 1); // in round 0 the phase before the first: it is past
        mbarrier_arrive_expect(&full[stage], (step == 0 ? 3 : 2) * FLASH_TILE);
        if (step == 0) tma_load(q, map, channel, tile * FLASH_ROWS, b, &full[stage]);
        tma_load(k, map, C + channel, step * FLASH_ROWS, b, &full[stage]);
        tma_load(k + FLASH_TILE, map, 2 * C + channel, step * FLASH_ROWS, b, &full[stage]);
    }
}
// s (64,128) = q k^T: 16 channels a step, which are 32 bytes of each row
__device__ inline void flash_scores(float (&s)[FLASH_ROWS / 2], const char* q, const char* k) {
    #pragma unroll
    for (float& x : s) x = 0;
    wgmma_settle(s);
    wgmma_fence();
    #pragma unroll
    for (int c = 0; c < HEAD; c += 16)
        wgmma<TensorElement, false, false>(s, wgmma_operand(q + 2 * c), wgmma_operand(k + 2 * c));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
}
// o (64,HEAD) += p v: 16 keys a step, which are 16 rows of v. p is s, rounded: fragment i has columns 16 i to 16 i + 15.
__device__ inline void flash_add(float (&o)[HEAD / 2], const float (&s)[FLASH_ROWS / 2], const char* v) {
    uint32_t p[FLASH_ROWS / 16][4];
    #pragma unroll
    for (int i = 0; i < FLASH_ROWS / 4; i++) p[i / 4][i % 4] = fragment_of(s[2 * i], s[2 * i + 1]);
    #pragma unroll
    for (auto& fragment : p) wgmma_settle(fragment);
    wgmma_settle(o);
    wgmma_fence(); // p and o have just been written
    #pragma unroll
    for (int u = 0; u < FLASH_ROWS; u += 16)
        wgmma<TensorElement, true>(o, p[u / 16], wgmma_operand(v + u * HEAD * 2));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(o);
}
// Runs in a consumer warpgroup, whose 64 queries are at q; `first` is the first of this warp's 16.
__device__ inline void flash_consume(FlashRows& r, const char* q, const char* places, int tile, int first, float scale2,
                                     uint64_t* full, uint64_t* empty) {
    float s[FLASH_ROWS / 2];
    for (int step = 0; step <= tile; step++) {
        int stage = step % FLASH_STAGES, round = step / FLASH_STAGES;
        const char* k = places + 2 * stage * FLASH_TILE;
        mbarrier_wait(&full[stage], round % 2);
        flash_scores(s, q, k);
        if (step == tile) mask_later_keys(by_eights(s), first - step * FLASH_ROWS);
        softmax_step(by_eights(s), by_eights(r.o), r.max, r.sum, scale2); // the first tile has key 0, which all queries see
        flash_add(r.o, s, k + FLASH_TILE);
        if (threadIdx.x % WARP == 0) mbarrier_arrive(&empty[stage]); // this warp has read the place for the last time
    }
}
// Computes out and stats. Grid (heads, tiles of queries), those with the most keys first.
__global__ void __launch_bounds__(FLASH_THREADS)
flash_kernel(const __grid_constant__ CUtensorMap map, floatX* out, float* stats, float scale, int T, int C, int NH) {
#if HAS_HOPPER
    extern __shared__ int4 shared_memory[];
    __shared__ uint64_t full[FLASH_STAGES], empty[FLASH_STAGES];
    char* q = first_tile(shared_memory);
    int tile = gridDim.y - 1 - blockIdx.y, group = (int)threadIdx.x / 128 - 1;
    pipeline_init(full, empty, FLASH_STAGES);
    if (group < 0) { // the producers need next to no registers, the consumers get theirs
        leave_registers<40>();
        if (threadIdx.x == 0) flash_produce(q, &map, tile, blockIdx.x, C, NH, full, empty);
        return;
    }
    take_registers<232>();
    int first = tile * FLASH_ROWS + group * 64 + threadIdx.x % 128 / WARP * 16;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    FlashRows r = { {}, { -INFINITY, -INFINITY }, {} };
    flash_consume(r, q + group * (FLASH_TILE / 2), q + FLASH_TILE, tile, first, scale * LOG2_E, full, empty);
    RowFactors factors[2];
    #pragma unroll
    for (int row = 0; row < 2; row++) {
        int t = first + threadIdx.x % WARP / 4 + row * 8;
        float* row_stats = t < T ? stats + head.stats + t : NULL;
        factors[row] = row_end<false>(row_stats, r.max[row] * scale, quad_sum(r.sum[row]), false, threadIdx.x % 4 == 0);
    }
    rows_store<false>(out + head.out + (size_t)first * C, by_eights(r.o), factors, C, T - first);
#endif
}
// Returns false and does nothing for other head sizes, in fp32, and on other GPUs.
static bool attention_forward_hopper(AttentionCall a) {
    if (!FLOATX_HAS_TENSOR_CORES || a.HS != HEAD || !gpu_is_hopper()) return false;
    size_t bytes = 1024 + (1 + 2 * FLASH_STAGES) * FLASH_TILE; // 1024: to align the tiles
    allow_shared_memory(flash_kernel, bytes, "attention by warpgroups");
    dim3 grid(a.B * a.NH, (unsigned)ceil_div(a.T, FLASH_ROWS));
    CUtensorMap map = tile_map(a.qkv, a.T, 3 * a.C, FLASH_ROWS, a.B);
    float scale = 1.0f / sqrtf((float)a.HS);
    flash_kernel<<<grid, FLASH_THREADS, bytes, compute_stream>>>(map, (floatX*)a.result, a.stats, scale, a.T, a.C, a.NH);
    return true;
}
#endif
