/*
selftest.cu - shows that the emulator finds what it claims to find. Each kernel has one deliberate bug and a correct twin, the
same code with `bug` false. The line that must be named ends in "BUG" and the kernel's name.

  selftest good          all twins and all functions, results checked; must be clean in every build under every seed
  selftest NAME          the kernel NAME with its bug; must end with status 1 and a message
*/
#include <algorithm>
#include <cuda_pipeline.h>
#include "selftest.h"

#define N 1000 // elements; a grid of 4 blocks of 256 threads has a few too many
constexpr int THREADS = 256, BLOCKS = 4;
static float *in, *out;             // (N) i and the results

// --- memory ---
template <bool bug> __global__ void guard(float* out, const float* in) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (bug ? i <= N : i < N)
        out[i] = 2 * in[i]; // BUG guard
}
template <bool bug> __global__ void past_static_shared(float* out, const float* in) {
    __shared__ float before[4], row[THREADS], after[4];
    if (threadIdx.x == 0) before[0] = after[0] = 0;
    row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    float* p = row;
    out[threadIdx.x] = p[threadIdx.x + bug] + before[0] + after[0]; // BUG past_static_shared
}
template <bool bug> __global__ void past_dynamic_shared(float* out, const float* in) {
    extern __shared__ float all[];
    all[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = all[threadIdx.x + (bug && threadIdx.x == THREADS - 1)]; // BUG past_dynamic_shared
}
// Dynamic shared memory beside 128 bytes of static: together they are more than every kernel may have, or than any can be given.
template <bool bug> __global__ void static_beside(float* out, const float* in) {
    extern __shared__ float all[];
    __shared__ float own[32]; // BUG static_beside_dynamic static_beside_all
    all[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x < 32) own[threadIdx.x] = all[threadIdx.x];
    out[threadIdx.x] = threadIdx.x < 32 ? own[threadIdx.x] : all[threadIdx.x];
}
template <bool bug> __global__ void past_array(float* out, const float* in) {
    __shared__ float row[THREADS];
    row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x + bug]; // BUG past_array
}
template <bool bug> __global__ void misaligned(float* out, const float* in) {
    if (threadIdx.x >= 64) return;
    float4 x = *(const float4*)(in + 4 * threadIdx.x + bug); // BUG misaligned
    *(float4*)(out + 4 * threadIdx.x) = x;
}
template <bool bug> __global__ void misaligned_hint(float* out, const float* in) {
    if (threadIdx.x >= 64) return;
    float4 x = __ldcs((const float4*)(in + 4 * threadIdx.x + bug)); // BUG misaligned_hint
    __stcs((float4*)(out + 4 * threadIdx.x), x);
}
template <bool bug> __global__ void null_pointer(float* out, const float* in) {
    const float* source = bug ? nullptr : in;
    out[threadIdx.x] = source[threadIdx.x]; // BUG null_pointer
}
template <bool bug> __global__ void overflow(float* out, const float* in) {
    int stride = bug ? 1 << 30 : 1;
    int i = (int)threadIdx.x * stride; // BUG overflow
    out[threadIdx.x] = in[i < N ? i : 0];
}

// --- waiting ---
// Reverses the block's elements through shared memory.
template <bool bug> __global__ void missing_barrier(float* out, const float* in) {
    __shared__ float row[THREADS];
    row[threadIdx.x] = in[threadIdx.x];
    if (!bug) __syncthreads();
    out[threadIdx.x] = row[THREADS - 1 - threadIdx.x]; // BUG missing_barrier
}
template <bool bug> __global__ void missing_syncwarp(float* out, const float* in) {
    __shared__ float row[THREADS];
    row[threadIdx.x] = in[threadIdx.x];
    if (!bug) __syncwarp();
    out[threadIdx.x] = row[threadIdx.x ^ 1]; // BUG missing_syncwarp
}
// A shuffle makes lanes meet, but promises nothing about memory.
template <bool bug> __global__ void shuffle_for_barrier(float* out, const float* in) {
    __shared__ float row[THREADS];
    row[threadIdx.x] = in[threadIdx.x];
    if (bug) __shfl_sync(~0u, 0, 0); else __syncwarp();
    out[threadIdx.x] = row[threadIdx.x ^ 1]; // BUG shuffle_for_barrier
}
template <bool bug> __global__ void reused_early(float* out, const float* in) {
    __shared__ float row[THREADS];
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        row[threadIdx.x] = in[threadIdx.x] + round; // BUG reused_early
        __syncthreads();
        sum += row[THREADS - 1 - threadIdx.x];
        if (!bug) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
template <bool bug> __global__ void divergent_barrier(float* out, const float* in) {
    if (bug && threadIdx.x < 100) __syncthreads();
    else __syncthreads(); // BUG divergent_barrier
    out[threadIdx.x] = in[threadIdx.x];
}
template <bool bug> __global__ void barrier_after_exit(float* out, const float* in) {
    if (bug && threadIdx.x >= 200) return;
    __syncthreads(); // BUG barrier_after_exit
    out[threadIdx.x] = in[threadIdx.x];
}
template <bool bug> __global__ void wrong_mask(float* out, const float* in) {
    float x = in[threadIdx.x];
    if (threadIdx.x % 32 < 16)
        x += __shfl_xor_sync(bug ? ~0u : 0xffffu, x, 1); // BUG wrong_mask
    __syncthreads();
    out[threadIdx.x] = x;
}
template <bool bug> __global__ void absent_lane(float* out, const float* in) {
    float x = in[threadIdx.x];
    if (threadIdx.x % 32 < 16)
        x = __shfl_sync(0xffffu, x, bug ? 16 : 15); // BUG absent_lane
    out[threadIdx.x] = x;
}
template <bool bug> __global__ void endless(float* out, const float* in) {
    float sum = 0;
    for (int i = 0; i < N; i += bug && N < 4096 ? 0 : 1)
        sum += in[i]; // BUG endless
    out[threadIdx.x] = sum;
}
template <bool bug> __global__ void unwaited_copy(float* out, const float* in) {
    __shared__ __align__(16) float row[THREADS];
    if (threadIdx.x < THREADS / 4) __pipeline_memcpy_async(&row[4 * threadIdx.x], &in[4 * threadIdx.x], 16);
    __pipeline_commit();
    __pipeline_wait_prior(bug ? 1 : 0);
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x];
}

// --- other blocks ---
template <bool bug> __global__ void plain_add(float* out, const float* in) {
    if (threadIdx.x) return;
    if (bug) *out += in[blockIdx.x]; // BUG plain_add
    else atomicAdd(out, in[blockIdx.x]);
}
// Each block clears its part; without the block's stride threads write one another's elements.
template <bool bug> __global__ void stride_forgotten(float* out, const float* in) {
    for (int i = threadIdx.x; i < N; i += bug ? 1 : blockDim.x)
        out[i] = in[i]; // BUG stride_forgotten
}
// The last block to finish adds up what all blocks have written.
template <bool bug> __global__ void missing_fence(float* out, const float* in) {
    __shared__ bool last;
    unsigned* counter = (unsigned*)out + N - 1;
    out[blockIdx.x] = in[blockIdx.x];
    if (!bug) __threadfence();
    if (threadIdx.x == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (last && threadIdx.x == 0)
        for (unsigned i = 1; i < gridDim.x; i++) out[0] += out[i]; // BUG missing_fence
}

// --- functions ---
__device__ void expect_at(bool right, const char* what, int line) {
    if (right) return;
    printf("selftest.cu:%d: lane %d: %s is wrong\n", line, threadIdx.x % 32, what);
    exit(1);
}
#define right(condition) expect_at(condition, #condition, __LINE__)

__global__ void warp_functions() {
    int lane = threadIdx.x % 32;
    unsigned all = ~0u;
    right(__shfl_sync(all, lane, 5) == 5);
    right(__shfl_sync(all, lane, 3, 8) == lane / 8 * 8 + 3);
    right(__shfl_xor_sync(all, lane, 9) == (lane ^ 9));
    right(__shfl_xor_sync(all, lane, 8, 8) == (lane & 8 ? lane ^ 8 : lane));
    right(__shfl_down_sync(all, lane, 4u) == (lane < 28 ? lane + 4 : lane));
    right(__shfl_up_sync(all, lane, 4u, 16) == (lane % 16 < 4 ? lane : lane - 4));
    right(__shfl_sync(all, 1.5 * lane, 31) == 46.5);
    right(__bfloat162float(__shfl_xor_sync(all, __float2bfloat16((float)lane), 1)) == (float)(lane ^ 1));
    right(__ballot_sync(all, lane < 3) == 7u);
    right(__any_sync(all, lane == 31) && !__any_sync(all, lane == 32));
    right(__all_sync(all, lane < 32) && !__all_sync(all, lane < 31));
    right(__reduce_add_sync(all, lane) == 496);
    right(__reduce_max_sync(all, lane - 40) == -9 && __reduce_min_sync(all, lane - 40) == -40);
    right(__reduce_max_sync(all, (unsigned)lane) == 31u && __reduce_xor_sync(all, 1u << lane) == all);
    right(__reduce_and_sync(all, lane | 32u) == 32u && __reduce_or_sync(all, 1u << lane) == all);
    right(__match_any_sync(all, lane % 2) == (lane % 2 ? 0xaaaaaaaau : 0x55555555u));
    if (lane < 16) __syncwarp(0xffff); // a warp may part and meet again
    __syncwarp();
    right(__syncthreads_count(lane == 0) == (int)blockDim.x / 32);
    right(__syncthreads_or(threadIdx.x == 7) && !__syncthreads_or(0));
    right(__syncthreads_and(1) && !__syncthreads_and(threadIdx.x != 7));
}
__global__ void atomic_functions(int* i, unsigned* u, float* f, double* d, unsigned long long* l, __nv_bfloat16* b) {
    atomicAdd(i, 1);
    atomicMax(i + 1, (int)threadIdx.x);
    atomicMin(i + 2, -(int)threadIdx.x);
    atomicSub(i + 3, 2);
    atomicInc(u, 99);
    atomicOr(u + 1, 1u << threadIdx.x % 32);
    atomicAdd(f, 0.5f);
    atomicAdd(d, 0.25);
    atomicAdd(l, 3);
    atomicAdd(b, __float2bfloat16(1.0f));
    unsigned seen = 0; // a lock-free maximum by compare and swap; also tests the loop around it
    while (seen < threadIdx.x) {
        unsigned old = atomicCAS(u + 2, seen, threadIdx.x);
        if (old == seen) break;
        seen = old;
    }
}
// A spin lock held by one thread after the other: threads of a warp go on independently, as since compute capability 7.0.
__global__ void spin_lock(unsigned* lock, int* sum) {
    while (atomicCAS(lock, 0u, 1u)) {}
    __threadfence();
    *sum += 1;
    __threadfence();
    atomicExch(lock, 0u);
}
__global__ void arithmetic() {
    __nv_bfloat162 pair = __floats2bfloat162_rn(1.0f, 2.0f);
    right(__bfloat162float(pair.y * pair.y) == 4.0f && __low2float(__hfma2(pair, pair, pair)) == 2.0f);
    right(__half2float(__hadd(__float2half(1.0f), __float2half(2048.0f))) == 2048.0f); // rounds to even
    right(__uint_as_float(0x3f800000u) == 1.0f && __float_as_int(-0.0f) == INT32_MIN);
    right(__popc(0xf0f0u) == 8 && __clz(1) == 31 && __ffs(8) == 4 && __brev(1u) == 0x80000000u);
    right(__float2int_rn(2.5f) == 2 && __saturatef(-1.0f) == 0.0f && rsqrtf(4.0f) == 0.5f);
    right(__umulhi(1u << 31, 6u) == 3u && __fmaf_rn(2.0f, 3.0f, 1.0f) == 7.0f);
}
// A block may end while copies that no thread needs are in flight.
__global__ void unneeded_copies(const float* in) {
    __shared__ __align__(16) float rows[3][THREADS];
    for (int i = 0; i < 30; i++) __pipeline_memcpy_async(&rows[i % 3][4 * threadIdx.x], &in[4 * threadIdx.x], 16);
    __pipeline_commit();
}
// C (16,8) = A (16,16) * B (16,8), A and B read from shared memory as a kernel would.
template <class T> __global__ void matrix_product(float* c, const T* a, const T* b) {
    __shared__ __align__(16) T sa[16][16], sb[16][8];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) sb[i / 8][i % 8] = b[i];
    __syncwarp();
    uint32_t fa[4], fb[2];
    float fc[4] = {1, 1, 1, 1};
    emulator::matrix::ldmatrix(fa, &sa[lane % 16][lane / 16 * 8]);
    emulator::matrix::ldmatrix_trans(fb, &sb[lane % 16][0]);
    emulator::matrix::mma_m16n8k16<T>(fc, fa, fb);
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = fc[i];
}

// --- the host's side ---
// n numbers in memory that the host and kernels share; main frees it.
static std::vector<void*> shared_memory;
template <class T> static T* shared_with_host(int n, T value = T()) {
    T* p;
    if (cudaMallocHost((void**)&p, n * sizeof(T)) != cudaSuccess) exit(1);
    shared_memory.push_back(p);
    std::fill(p, p + n, value);
    return p;
}
static void finish() { expect("cudaDeviceSynchronize", cudaDeviceSynchronize(), cudaSuccess); }
static void start() {
    for (int i = 0; i < N; i++) { in[i] = (float)i; out[i] = 0; }
}
// Launches some blocks; the first elements of the result must be f(i). A macro, so that the launch has the kernel's name.
#define RUN(kernel, blocks, threads, elements, f, ...) \
        start(); \
        kernel<<<blocks, threads, ##__VA_ARGS__>>>(out, in); \
        finish(); \
        for (int i = 0; i < elements; i++) expect(#kernel, out[i], (f)(i))
// A kernel's mistake, and its twin. IN_BLOCK: one block, in which each thread has an element
#define GRID(name, ...) {#name, [=] { constexpr bool bug = false; RUN(name<bug>, __VA_ARGS__); }, \
                                [=] { constexpr bool bug = true; RUN(name<bug>, __VA_ARGS__); }}
#define IN_BLOCK(name, ...) GRID(name, 1, THREADS, THREADS, __VA_ARGS__)
// Dynamic shared memory beside static_beside's own, of which so much is allowed (0: what every kernel has)
template <bool bug> static void beside(int allowed, int bytes) {
    if (allowed) cudaFuncSetAttribute(static_beside<bug>, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed);
    RUN(static_beside<bug>, 1, THREADS, THREADS, [](int i) { return i; }, bytes);
}
static std::vector<Mistake> mistakes() {
    const int most = 48 << 10, all = 163 << 10;
    auto same = [](int i) { return i; };
    auto mirrored = [](int i) { return THREADS - 1 - i; };
    auto exchanged = [](int i) { return i ^ 1; };
    auto sum = [](int) { return 4950; };
    return {
        GRID(guard, BLOCKS, THREADS, N, [](int i) { return 2 * i; }),
        IN_BLOCK(past_static_shared, same), IN_BLOCK(past_dynamic_shared, same, THREADS * sizeof(float)),
        {"static_beside_dynamic", [=] { beside<false>(most, most); }, [=] { beside<true>(0, most); }},
        {"static_beside_all", [=] { beside<false>(all - 128, all - 128); }, [=] { beside<true>(all, all); }},
        IN_BLOCK(past_array, same), IN_BLOCK(misaligned, same), IN_BLOCK(misaligned_hint, same),
        IN_BLOCK(null_pointer, same), IN_BLOCK(overflow, same), IN_BLOCK(divergent_barrier, same),
        IN_BLOCK(missing_barrier, mirrored), IN_BLOCK(missing_syncwarp, exchanged),
        IN_BLOCK(shuffle_for_barrier, exchanged), IN_BLOCK(barrier_after_exit, same),
        IN_BLOCK(reused_early, [](int i) { return 3 * (THREADS - 1 - i) + 3; }),
        IN_BLOCK(wrong_mask, [](int i) { return i % 32 < 16 ? i + (i ^ 1) : i; }),
        IN_BLOCK(absent_lane, [](int i) { return i % 32 < 16 ? i / 32 * 32 + 15 : i; }),
        IN_BLOCK(endless, [](int) { return N * (N - 1) / 2; }), IN_BLOCK(unwaited_copy, same),
        GRID(plain_add, 100, 32, 1, sum), IN_BLOCK(stride_forgotten, same), GRID(missing_fence, 100, 1, 1, sum),
        {"large_block", {}, [] { guard<false><<<1, 2048>>>(out, in); }}, // BUG large_block
        {"empty_grid", {}, [] { guard<false><<<0, 32>>>(out, in); }}, // BUG empty_grid
        {"too_much_shared", {}, [] { guard<false><<<1, 32, 50000>>>(out, in); }}, // BUG too_much_shared
        {"more_than_set", {}, [] {
            cudaFuncSetAttribute(guard<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, 1000);
            guard<false><<<1, 32, 1004>>>(out, in); // BUG more_than_set
        }},
    };
}
template <class T> static void check_matrices(const char* name) {
    T *a = shared_with_host<T>(256), *b = shared_with_host<T>(128);
    float* c = shared_with_host<float>(128);
    for (int i = 0; i < 256; i++) a[i] = T((float)(i * 7 % 13 - 6));
    for (int i = 0; i < 128; i++) b[i] = T((float)(i * 5 % 11 - 5));
    matrix_product<T><<<1, 32>>>(c, a, b);
    finish();
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float sum = 1;
            for (int k = 0; k < 16; k++) sum += (float)a[row * 16 + k] * (float)b[k * 8 + column];
            expect(name, c[row * 8 + column], sum);
        }
}
static void check_functions() {
    warp_functions<<<3, 64>>>();
    arithmetic<<<1, 1>>>();
    int* i = shared_with_host<int>(4);
    unsigned *u = shared_with_host<unsigned>(3), *lock = shared_with_host<unsigned>(1);
    float* f = shared_with_host<float>(1);
    double* d = shared_with_host<double>(1);
    unsigned long long* l = shared_with_host<unsigned long long>(1);
    __nv_bfloat16* b = shared_with_host<__nv_bfloat16>(1, 0.0f);
    atomic_functions<<<2, 64>>>(i, u, f, d, l, b);
    finish();
    expect("atomicAdd of int", i[0], 128);
    expect("atomicMax", i[1], 63);
    expect("atomicMin", i[2], -63);
    expect("atomicSub", i[3], -256);
    expect("atomicInc", u[0], 28);
    expect("atomicOr", u[1], ~0u);
    expect("atomicCAS", u[2], 63);
    expect("atomicAdd of float", *f, 64);
    expect("atomicAdd of double", *d, 32);
    expect("atomicAdd of unsigned long long", (double)*l, 384);
    expect("atomicAdd of bf16", (float)*b, 128);
    i[0] = 0;
    spin_lock<<<2, 48>>>(lock, i);
    finish();
    expect("a spin lock", i[0], 96);
    unneeded_copies<<<8, THREADS / 4>>>(in);
    finish();
    check_matrices<__nv_bfloat16>("a product of bf16 matrices");
    check_matrices<__half>("a product of fp16 matrices");
    cudaFuncSetAttribute(guard<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000);
    guard<false><<<1, 32, 100000>>>(out, in);
    finish();
}
int main(int argc, char** argv) {
    in = shared_with_host<float>(N);
    out = shared_with_host<float>(N);
    int status = run_selftest(argc, argv, mistakes(), check_functions);
    for (void* p : shared_memory) cudaFreeHost(p);
    return status;
}
