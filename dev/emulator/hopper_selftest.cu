/*
hopper_selftest.cu - like selftest.cu, for compute capability 9.0: mbarriers, TMA, wgmma. A kernel runs correctly or with one of
many flaws. The line that must be named ends in "BUG" and the flaw's name; flaws that have no line give a wrong number.

  hopper_selftest good      without a flaw, and with all layouts of operands, results checked
  hopper_selftest FLAW      must end with status 1 and a message
*/
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
using namespace emulator::matrix;

#define FLAWS(of) of(unmade_barrier) of(unfenced_barrier) of(early_arrival) of(little_expected) of(much_expected) of(wrong_parity) \
    of(unwaited_tile) of(tile_for_nobody) of(misplaced_tile) of(unfenced_sums) of(unwaited_sums) of(early_sums) of(touched_sums) \
    of(refilled_early) of(part_of_warpgroup) of(other_operands) of(beyond_shared) of(bad_descriptor) of(wrong_swizzle) of(wrong_stride)
#define HANDOVER_FLAWS(of) of(unasked_refill) of(unwaited_read)
#define FRAGMENT_FLAWS(of) of(unsettled_fragment) of(unfenced_fragment) of(late_fragment) of(touched_fragment) of(read_fragment) \
    of(swapped_fragment) of(other_rank) of(other_plane)
enum Flaw { good,
#define NAME(flaw) flaw,
    FLAWS(NAME) HANDOVER_FLAWS(NAME) FRAGMENT_FLAWS(NAME)
};
constexpr int K = 192, ROWS = 64, STEP = 64, TILE = ROWS * STEP * 2; // bytes: 64 rows of 128

// Bits 0-13 the address, 16-29 and 32-45 the leading and the stride offset, all without their last 4 bits; 62-63 the swizzle.
static uint64_t operand(const void* p, unsigned leading, unsigned stride, uint64_t swizzle) {
    return swizzle << 62 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | shared_address(p) >> 4;
}
static void put_sums(float* c, const float* d, int n) {
    for (int i = 0; i < n / 2; i++)
        c[(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
}
// c (64,64) = a (64,K) b (64,K)^T by one warpgroup, 64 k at a time, all through the same two tiles.
template <Flaw flaw> __global__ void product(float* c, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b) {
    extern __shared__ char memory[];
    __shared__ uint64_t full;
    char* tile_a = memory + (1024 - shared_address(memory) % 1024) % 1024 + (flaw == misplaced_tile ? 128 : 0);
    char* tile_b = tile_a + TILE;
    if (threadIdx.x == 0 && flaw != unmade_barrier) mbarrier_init(&full, 1);
    if (threadIdx.x == 0 && flaw != unfenced_barrier) mbarrier_init_fence();
    __syncthreads();
    if (flaw == unmade_barrier) mbarrier_wait(&full, 0); // BUG unmade_barrier
    if (flaw == part_of_warpgroup && threadIdx.x == 127) return;
    float d[32] = {};
    for (int step = 0; step < K / STEP; step++) {
        if (threadIdx.x == 0) {
            int bytes = flaw == little_expected ? 0 : flaw == much_expected ? 3 * TILE : 2 * TILE;
            mbarrier_arrive_expect(&full, bytes); // BUG unwaited_tile wrong_parity
            if (flaw == early_arrival) mbarrier_arrive(&full); // BUG early_arrival
            tma_load(tile_a, &a, step * STEP, 0, &full); // BUG unfenced_barrier tile_for_nobody little_expected
            tma_load(tile_b, &b, step * STEP, 0, &full);
        }
        if (flaw == unwaited_tile) __syncthreads();
        else if (flaw != tile_for_nobody || step < K / STEP - 1)
            mbarrier_wait(&full, flaw == wrong_parity ? 1 : step % 2); // BUG much_expected little_expected
        if (flaw != unfenced_sums) wgmma_fence();
        unsigned stride = flaw == wrong_stride ? 512 : flaw == beyond_shared ? 8192 : 1024;
        uint64_t more = flaw == bad_descriptor ? 1 << 14 : 0, swizzle = flaw == wrong_swizzle ? 0 : 1;
        for (int k = 0; k < STEP; k += 16) {
            uint64_t from_a = operand(tile_a + 2 * k, 0, stride, swizzle) | more, from_b = operand(tile_b + 2 * k, 0, stride, swizzle);
            if (flaw == other_operands && threadIdx.x / 32 == 2) from_b = from_a;
            wgmma<__nv_bfloat16, false, false>(d, from_a, from_b); // BUG wgmma little_expected
        }
        wgmma_commit();
        if (flaw == touched_sums) d[0] += 1;
        if (flaw == refilled_early && step == 1) {
            __syncthreads();
            if (threadIdx.x == 0) memset(tile_a, 0, 128);
            __syncthreads();
        }
        if (flaw == early_sums) put_sums(c, d, 64);
        if (flaw != unwaited_sums) wgmma_wait<0>(); // BUG touched_sums
        __syncthreads(); // all have read the tiles: they may be filled again
    }
    if (flaw != early_sums) put_sums(c, d, 64);
}

// c[i] = the sum of row i of a, read by ordinary loads, 64 k at a time from one tile that is filled and read in turns.
template <Flaw flaw> __global__ void handover(float* c, const __grid_constant__ CUtensorMap a) {
    __shared__ alignas(128) __nv_bfloat16 tile[ROWS * STEP];
    __shared__ uint64_t full, empty;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        mbarrier_init(&empty, ROWS);
        mbarrier_init_fence();
    }
    __syncthreads();
    float sum = 0;
    for (int step = 0; step < K / STEP; step++) {
        if (threadIdx.x == 0) {
            if (flaw != unasked_refill) mbarrier_wait(&empty, step % 2 ^ 1);
            mbarrier_arrive_expect(&full, TILE);
            tma_load(tile, &a, step * STEP, 0, &full); // BUG unasked_refill unwaited_read
        }
        if (flaw != unwaited_read || threadIdx.x == 0) mbarrier_wait(&full, step % 2);
        for (int k = 0; k < STEP; k++) {
            __nv_bfloat16 x = tile[threadIdx.x * STEP + k]; // BUG unasked_refill unwaited_read
            sum += (float)x;
        }
        mbarrier_arrive(&empty);
    }
    c[threadIdx.x] = sum;
}

// c (64,64) = the sum over both planes of a (64,64) b[plane]^T, a from registers. tb: b's rows lie along k.
constexpr int PLANES = 2, PLANE_ROWS = 59; // of b: fewer rows than a box has
template <Flaw flaw, class T = __nv_bfloat16, bool tb = true>
__global__ void fragments(float* c, const T* a, const __grid_constant__ CUtensorMap b) {
    extern __shared__ char memory[];
    __shared__ uint64_t full;
    char* tile = memory + (1024 - shared_address(memory) % 1024) % 1024;
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    uint32_t from_a[4][4];
    float d[32] = {};
    for (int plane = 0; plane < PLANES; plane++) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect(&full, TILE);
            if (flaw == other_rank) tma_load(tile, &b, 0, plane * PLANE_ROWS, &full); // BUG other_rank
            else tma_load(tile, &b, 0, 0, flaw == other_plane ? 0 : plane, &full);
        }
        for (int i = 0; i < 16; i++) { // of each step's fragment a[0] to a[3]
            int down = i % 2 * 8, right = i / 2 % 2 * 8;
            if (flaw == swapped_fragment) std::swap(down, right);
            memcpy(&from_a[i / 4][i % 4], a + (row + down) * 64 + i / 4 * 16 + column + right, 4);
        }
        if (flaw == unfenced_fragment) wgmma_fence();
        for (auto& step : from_a)
            if (flaw != unsettled_fragment || &step != &from_a[2]) wgmma_settle(step);
        if (flaw != unfenced_fragment) wgmma_fence();
        if (flaw == late_fragment) from_a[3][1]++;
        mbarrier_wait(&full, plane % 2);
        for (int step = 0; step < 4; step++) {
            uint64_t from_b = operand(tile + step * (tb ? 16 * 128 : 2 * 16), 0, 1024, 1);
            wgmma<T, tb>(d, from_a[step], from_b); // BUG unsettled_fragment unfenced_fragment late_fragment
        }
        wgmma_commit();
        if (flaw == touched_fragment) from_a[0][2] = 0;
        uint32_t seen = from_a[1][3];
        wgmma_wait<0>(); // BUG touched_fragment
        if (flaw == read_fragment && seen != from_a[1][3]) d[0]++;
        __syncthreads(); // all have read the tile: it may be filled again
    }
    put_sums(c, d, 64);
}

// ---- layouts: c (64,128) = a (64,64) b (128,64)^T, operands by rows or (transposed) by columns, rows of 16 to 128 bytes a box ----
// Operands are several boxes, side by side along rows of memory. A box has 64 or 128 rows.
static uint64_t operand_at(const char* tile, bool transposed, int rows, int row_bytes, int k) {
    static const uint64_t swizzles[] = {0, 3, 2, 1}; // of rows of 16, 32, 64 and 128 bytes
    int log = row_bytes == 128 ? 3 : row_bytes / 32, box = (transposed ? 64 : rows) * row_bytes;
    const char* begin = tile + (transposed ? k * row_bytes : k * 2 / row_bytes * box + k * 2 % row_bytes);
    if (row_bytes > 16) return operand(begin, box, 8 * row_bytes, swizzles[log]);
    return transposed ? operand(begin, 8 * row_bytes, box, 0) : operand(begin, box, 8 * row_bytes, 0);
}
static int load_operand(char* tile, const CUtensorMap* map, bool transposed, int rows, int row_bytes, uint64_t* full) {
    int width = transposed ? rows : 64, box = (transposed ? 64 : rows) * row_bytes; // elements in a row of memory; bytes in a box
    for (int i = 0; i < 2 * width / row_bytes; i++) tma_load(tile + i * box, map, i * row_bytes / 2, 0, full);
    return 2 * width / row_bytes * box;
}
template <class T, bool ta, bool tb> __global__ void layouts(float* c, const __grid_constant__ CUtensorMap a,
                                                             const __grid_constant__ CUtensorMap b, int bytes_a, int bytes_b) {
    extern __shared__ char memory[];
    __shared__ uint64_t full;
    char *tile_a = memory + (1024 - shared_address(memory) % 1024) % 1024, *tile_b = tile_a + TILE;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 2);
        mbarrier_init_fence();
        int bytes = load_operand(tile_a, &a, ta, 64, bytes_a, &full);
        mbarrier_arrive_expect(&full, bytes); // after the copy: bytes may arrive before they are expected
        mbarrier_arrive_expect(&full, load_operand(tile_b, &b, tb, 128, bytes_b, &full));
    }
    __syncthreads();
    mbarrier_wait(&full, 0);
    float d[64] = {};
    wgmma_fence();
    for (int k = 0; k < 64; k += 16) {
        wgmma<T, ta, tb>(d, operand_at(tile_a, ta, 64, bytes_a, k), operand_at(tile_b, tb, 128, bytes_b, k));
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    put_sums(c, d, 128);
}

// ---- the host's side ----
static void require(bool right, const char* what) {
    if (right) return;
    printf("hopper_selftest: %s\n", what);
    exit(1);
}
// A map of x (rows,cols), or (planes,rows,cols), with boxes of box_rows rows of box_bytes. pitch: bytes from row to row.
static CUtensorMap map_of(void* x, bool fp16, int rows, int cols, int pitch, unsigned box_rows, int box_bytes,
                          bool swizzled = true, int planes = 0) {
    decltype(cuTensorMapEncodeTiled)* encode;
    cudaDriverEntryPointQueryResult found;
    const char* name = "cuTensorMapEncodeTiled";
    require(!cudaGetDriverEntryPointByVersion(name, (void**)&encode, 12000, cudaEnableDefault, &found), "no entry point");
    CUtensorMap map;
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    if (swizzled && box_bytes == 128) swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    if (swizzled && box_bytes == 64) swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
    if (swizzled && box_bytes == 32) swizzle = CU_TENSOR_MAP_SWIZZLE_32B;
    CUtensorMapDataType type = fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t sizes[] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)planes};
    cuuint64_t strides[] = {(cuuint64_t)pitch, (cuuint64_t)pitch * (cuuint64_t)rows};
    cuuint32_t box[] = {(cuuint32_t)box_bytes / 2, box_rows, 1}, ones[] = {1, 1, 1};
    CUresult result = encode(&map, type, planes ? 3 : 2, x, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result) require(false, "cuTensorMapEncodeTiled refuses");
    return map;
}
static float element(int matrix, int i, int k) { return (float)((i * 5 + k * 3 + matrix) % 7 - 3); } // sums are exact
// A matrix of `rows` rows along i and K along k, as it lies in memory; everything outside must not be read, so it is NaN.
template <class T> static T* matrix_of(int matrix, int rows, int K, bool transposed, int pitch) {
    int lines = transposed ? K : rows;
    std::vector<T> x((size_t)lines * pitch, T(NAN));
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < K; k++) x[transposed ? k * pitch + i : i * pitch + k] = T(element(matrix, i, k));
    T* p;
    size_t bytes = x.size() * sizeof(T);
    require(!cudaMalloc((void**)&p, bytes) && !cudaMemcpy(p, x.data(), bytes, cudaMemcpyHostToDevice), "memory");
    return p;
}
static float* sums_of(int n) {
    float* c;
    require(!cudaMallocHost((void**)&c, 64 * n * sizeof(float)), "memory");
    for (int i = 0; i < 64 * n; i++) c[i] = -1;
    return c;
}
// c (64,n), which is freed, must be want(i, j).
template <class F> static void expect_sums(const char* name, float* c, int n, F want) {
    require(!cudaDeviceSynchronize(), "a kernel has failed");
    for (int i = 0; i < 64 * n; i++) {
        float sum = want(i / n, i % n);
        if (c[i] == sum) continue;
        printf("hopper_selftest: %s: sum (%d,%d) is %g, and %g was expected\n", name, i / n, i % n, c[i], sum);
        exit(1);
    }
    cudaFreeHost(c);
}
// Rows and k past those given count as zeros.
static void check(const char* name, float* c, int n, int rows, int columns, int K) {
    expect_sums(name, c, n, [=](int i, int j) {
        float sum = 0;
        for (int k = 0; k < K && i < rows && j < columns; k++) sum += element(0, i, k) * element(1, j, k);
        return sum;
    });
}
template <Flaw flaw> static void run(const char* name) {
    int rows = 59, columns = 61, depth = 181, pitch = 184; // not whole tiles
    __nv_bfloat16* a = matrix_of<__nv_bfloat16>(0, rows, depth, false, pitch);
    __nv_bfloat16* b = matrix_of<__nv_bfloat16>(1, columns, depth, false, pitch);
    CUtensorMap map_a = map_of(a, false, rows, depth, 2 * pitch, 64, 128);
    CUtensorMap map_b = map_of(b, false, columns, depth, 2 * pitch, 64, 128);
    float* c = sums_of(64);
    product<flaw><<<1, 128, 2 * TILE + 1024 + 128>>>(c, map_a, map_b);
    check(name, c, 64, rows, columns, depth);
    cudaFree(a);
    cudaFree(b);
}
template <Flaw flaw> static void run_handover(const char* name) {
    __nv_bfloat16* a = matrix_of<__nv_bfloat16>(0, ROWS, K, false, K);
    CUtensorMap map = map_of(a, false, ROWS, K, 2 * K, ROWS, 128, false);
    float* c = sums_of(1);
    handover<flaw><<<1, ROWS>>>(c, map);
    expect_sums(name, c, 1, [](int i, int) {
        float sum = 0;
        for (int k = 0; k < K; k++) sum += element(0, i, k);
        return sum;
    });
    cudaFree(a);
}
template <class T, bool ta, bool tb> static void run_layouts(int bytes_a, int bytes_b) {
    T *a = matrix_of<T>(0, 64, 64, ta, 64), *b = matrix_of<T>(1, 128, 64, tb, tb ? 128 : 64);
    bool fp16 = std::is_same<T, __half>::value;
    CUtensorMap map_a = map_of(a, fp16, 64, 64, 128, 64, bytes_a);
    CUtensorMap map_b = tb ? map_of(b, fp16, 64, 128, 256, 64, bytes_b) : map_of(b, fp16, 128, 64, 128, 128, bytes_b);
    float* c = sums_of(128);
    layouts<T, ta, tb><<<1, 128, 3 * TILE + 1024>>>(c, map_a, map_b, bytes_a, bytes_b);
    char name[64];
    snprintf(name, sizeof name, "a%s in rows of %d bytes, b%s of %d", ta ? " transposed" : "", bytes_a, tb ? " transposed" : "", bytes_b);
    check(name, c, 128, 64, 128, 64);
    cudaFree(a);
    cudaFree(b);
}
// b's planes are one matrix of 128 rows in memory; each plane has 64 rows or fewer, and after its end the next plane begins.
template <Flaw flaw, class T = __nv_bfloat16, bool tb = true> static void run_fragments(const char* name) {
    T *a = matrix_of<T>(0, 64, 64, false, 64), *b = matrix_of<T>(1, PLANES * PLANE_ROWS, 64, false, 64);
    CUtensorMap map = map_of(b, std::is_same<T, __half>::value, PLANE_ROWS, 64, 128, 64, 128, true, PLANES);
    float* c = sums_of(64);
    fragments<flaw, T, tb><<<1, 128, TILE + 1024>>>(c, a, map);
    expect_sums(name, c, 64, [](int i, int j) {
        float sum = 0;
        for (int plane = 0; plane < PLANES; plane++)
            for (int k = 0; k < 64; k++) {
                int row = tb ? k : j, column = tb ? j : k; // of b's memory
                if (row < PLANE_ROWS) sum += element(0, i, k) * element(1, plane * PLANE_ROWS + row, column);
            }
        return sum;
    });
    cudaFree(a);
    cudaFree(b);
}
int main(int argc, char** argv) {
    if (argc != 2) { fprintf(stderr, "usage: %s good|FLAW\n", argv[0]); return 2; }
    if (!strcmp(argv[1], "good")) {
        run<good>("good");
        run_handover<good>("handover");
        for (int bytes = 16; bytes <= 128; bytes *= 2) {
            run_layouts<__nv_bfloat16, false, false>(bytes, bytes);
            run_layouts<__nv_bfloat16, false, true>(128, bytes);
            run_layouts<__nv_bfloat16, true, false>(bytes, 64);
        }
        run_layouts<__half, true, true>(64, 32);
        run_fragments<good>("fragments");
        run_fragments<good, __nv_bfloat16, false>("fragments, b by rows");
        run_fragments<good, __half>("fragments of fp16");
        return 0;
    }
#define RUN(run, flaw) if (!strcmp(argv[1], #flaw)) { run<flaw>(#flaw); return 0; }
#define RUN_PRODUCT(flaw) RUN(run, flaw)
#define RUN_HANDOVER(flaw) RUN(run_handover, flaw)
#define RUN_FRAGMENTS(flaw) RUN(run_fragments, flaw)
    FLAWS(RUN_PRODUCT) HANDOVER_FLAWS(RUN_HANDOVER) FRAGMENT_FLAWS(RUN_FRAGMENTS)
    fprintf(stderr, "no flaw %s\n", argv[1]);
    return 2;
}
