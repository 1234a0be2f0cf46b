/*
cuda/compress.cuh - compress_api.h for a GPU. Most of it is a pass over memory with little arithmetic, so what counts
is how often the gradients are read and written: each kernel says so.

Where the contract wants the bits of the CPU, a product that is added to something is rounded first (__fmul_rn), because
the compiler would make one fused operation of the two.
*/
#ifndef LLMC_CUDA_COMPRESS_CUH
#define LLMC_CUDA_COMPRESS_CUH
#include "../compress_api.h"
#include "common.cuh"
#include "stats.cuh"

constexpr unsigned COMPRESS_THREADS = 256;
constexpr size_t COMPRESS_WORKSPACE = 8 << 20; // bytes that these functions use at most, of the layers' workspace

// ---- one thread for each of n elements, neighbours in a warp: f(i) ----
template <typename F> __global__ void each_kernel(size_t n, F f) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) f(i);
}
template <typename F> static inline void for_each(size_t n, F f, const char* what) {
    if (n == 0) return;
    each_kernel<F><<<(unsigned)ceil_div(n, COMPRESS_THREADS), COMPRESS_THREADS, 0, compute_stream>>>(n, f);
    check_launch(what);
}

// ---- the error ----
__device__ inline float with_error(float x, const float* error, size_t i) { return error != NULL ? x + error[i] : x; }

struct AddError { // 12 n bytes in fp32
    float* x; const floatX* grads; const float* error;
    __device__ void operator()(size_t i) const { x[i] = with_error(widen(grads[i]), error, i); }
};
void add_error(float* x, const floatX* grads, const float* error, size_t n) {
    for_each(n, AddError { x, grads, error }, "add_error");
}
struct Scale { // reads and writes x: 8 n bytes
    float* x; float factor;
    template <int W> __device__ void at(size_t i) const {
        Floats<W> piece = load<W>(x + i);
        #pragma unroll
        for (int k = 0; k < W; k++) piece.x[k] *= factor;
        store(x + i, piece);
    }
};
void scale_in_place_fp32(float* x, float factor, size_t n) {
    for_pieces(n, rows_are_vectors(VEC, x), Scale { x, factor }, "scale_in_place_fp32");
}

// ---- bf16 ----
struct RoundBf16 { // 14 n bytes in fp32
    uint16_t* out; float* kept; const floatX* grads; const float* error;
    __device__ void operator()(size_t i) const {
        float x = with_error(widen(grads[i]), error, i);
        __nv_bfloat16 sent = __float2bfloat16_rn(x);
        out[i] = __bfloat16_as_ushort(sent);
        if (kept != NULL) kept[i] = x - __bfloat162float(sent);
    }
};
void round_bf16(uint16_t* out, float* kept, const floatX* grads, const float* error, size_t n) {
    for_each(n, RoundBf16 { out, kept, grads, error }, "round_bf16");
}
struct WidenBf16 {
    floatX* out; const uint16_t* in;
    __device__ void operator()(size_t i) const {
        out[i] = narrow<floatX>(__bfloat162float(__ushort_as_bfloat16(in[i])));
    }
};
void widen_bf16(floatX* out, const uint16_t* in, size_t n) { for_each(n, WidenBf16 { out, in }, "widen_bf16"); }

// ---- 8 and 4 bits, in blocks: a warp has a block, and a lane PART neighbours of it ----
constexpr int PART = QUANTISE_BLOCK / WARP;

// Elements [i, i + PART) of x (n), with 0 behind its end. W = PART where arrays are aligned, else 1.
template <int W, typename T> __device__ inline Floats<PART> load_part(const T* x, size_t i, size_t n) {
    if (W == PART && i + PART <= n) return load<PART>(x + i);
    Floats<PART> part;
    #pragma unroll
    for (int k = 0; k < PART; k++) part.x[k] = i + k < n ? widen(x[i + k]) : 0;
    return part;
}
template <int W, typename T> __device__ inline void store_part(T* x, Floats<PART> part, size_t i, size_t n) {
    if (W == PART && i + PART <= n) {
        store(x + i, part);
        return;
    }
    #pragma unroll
    for (int k = 0; k < PART; k++) if (i + k < n) x[i + k] = narrow<T>(part.x[k]);
}
__host__ __device__ constexpr int block_words(int bits) { return 1 + QUANTISE_BLOCK / 32 * bits; }

// The order of these bits is that of |x|, and a NaN is above every number, which a maximum of floats would lose.
__device__ inline uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }
// Returns the scale of a warp's block: the same in all lanes.
__device__ inline float block_scale(Floats<PART> x, int limit) {
    uint32_t largest = 0;
    #pragma unroll
    for (int k = 0; k < PART; k++) largest = max(largest, magnitude_bits(x.x[k]));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 // which has no instruction for it
    largest = combine_lanes<WARP>(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
#else
    largest = __reduce_max_sync(~0u, largest);
#endif
    return largest >= 0x7f800000 ? __uint_as_float(0x7fc00000) : __uint_as_float(largest) / (float)limit;
}
// x / scale as a whole number. A scale below the normal numbers is too coarse to keep it in the limits.
__device__ inline int quantised(float x, float scale, int limit) {
    if (!(scale > 0)) return 0;
    float q = rintf(x / scale);
    return (int)fminf(fmaxf(q, (float)-limit), (float)limit);
}

// In fp32 reads x and error, writes kept and packed: 13 bytes an element, 12.5 with 4 bits.
template <int W, typename T>
__global__ void quantise_kernel(uint32_t* packed, float* kept, const T* x, const float* error, size_t n, int bits) {
    size_t block = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP, limit = bits == 8 ? 127 : 7;
    if (block * QUANTISE_BLOCK >= n) return; // a whole warp
    size_t i = block * QUANTISE_BLOCK + lane * PART;
    Floats<PART> sum = load_part<W>(x, i, n);
    if (error != NULL) sum += load_part<W>(error, i, n);
    float scale = block_scale(sum, limit);
    uint32_t words[2] = { 0, 0 };
    #pragma unroll
    for (int k = 0; k < PART; k++) {
        int q = quantised(sum.x[k], scale, limit);
        if (bits == 8) words[k / 4] |= (uint32_t)(q & 255) << (8 * (k % 4));
        else words[0] |= (uint32_t)(q & 15) << (4 * k);
        sum.x[k] = __fsub_rn(sum.x[k], __fmul_rn(scale, (float)q));
    }
    if (kept != NULL) store_part<W>(kept, sum, i, n);
    uint32_t* out = packed + block * block_words(bits);
    if (lane == 0) out[0] = __float_as_uint(scale);
    if (bits == 4) out[1 + lane] = words[0];
    else for (int w = 0; w < 2; w++) out[1 + 2 * lane + w] = words[w];
}
static inline unsigned quantise_grid(size_t n) { // a warp for each block of the row
    return (unsigned)ceil_div(ceil_div(n, QUANTISE_BLOCK), COMPRESS_THREADS / WARP);
}
template <typename T>
static inline void quantise_launch(void* packed, float* kept, const T* x, const float* error, size_t n, int bits) {
    quantise_check(bits);
    if (n == 0) return;
    bool vectors = rows_are_vectors(VEC, x) && rows_are_vectors(VEC, kept, error);
    auto kernel = vectors ? quantise_kernel<PART, T> : quantise_kernel<1, T>;
    kernel<<<quantise_grid(n), COMPRESS_THREADS, 0, compute_stream>>>((uint32_t*)packed, kept, x, error, n, bits);
    check_launch("quantise");
}
void quantise(void* packed, float* kept, const void* x, DType t, const float* error, size_t n, int bits) {
    if (t == DTYPE_F32) quantise_launch(packed, kept, (const float*)x, error, n, bits);
    else quantise_launch(packed, kept, (const floatX*)x, error, n, bits);
}

// Reads each row once, and writes out once.
template <int W, typename T>
__global__ void dequantise_kernel(T* out, const uint32_t* packed, int rows, size_t row_words, size_t n, int bits) {
    size_t block = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (block * QUANTISE_BLOCK >= n) return;
    Floats<PART> sum = {};
    for (int row = 0; row < rows; row++) {
        const uint32_t* in = packed + row * row_words + block * block_words(bits);
        float scale = __uint_as_float(in[0]);
        uint32_t words[2] = { bits == 8 ? in[1 + 2 * lane] : in[1 + lane], bits == 8 ? in[2 + 2 * lane] : 0 };
        #pragma unroll
        for (int k = 0; k < PART; k++) {
            int q = bits == 8 ? (int8_t)(words[k / 4] >> (8 * (k % 4))) : (int)(words[0] << (28 - 4 * k)) >> 28;
            sum.x[k] = __fadd_rn(sum.x[k], __fmul_rn(scale, (float)q));
        }
    }
    store_part<W>(out, sum, block * QUANTISE_BLOCK + lane * PART, n);
}
template <typename T> static inline void dequantise_launch(T* out, const void* packed, int rows, size_t n, int bits) {
    quantise_check(bits);
    if (n == 0) return;
    auto kernel = rows_are_vectors(VEC, out) ? dequantise_kernel<PART, T> : dequantise_kernel<1, T>;
    kernel<<<quantise_grid(n), COMPRESS_THREADS, 0, compute_stream>>>(out, (const uint32_t*)packed, rows,
                                                                 quantised_bytes(n, bits) / sizeof(uint32_t), n, bits);
    check_launch("dequantise_sum");
}
void dequantise_sum(void* out, DType t, const void* packed, int rows, size_t n, int bits) {
    if (t == DTYPE_F32) dequantise_launch((float*)out, packed, rows, n, bits);
    else dequantise_launch((floatX*)out, packed, rows, n, bits);
}

// ---- signs, with one scale ----
struct Magnitude { __device__ double operator()(double x) const { return fabs(x); } };

// One block adds up partial sums (blocks), and begins the packed row with the scale.
__global__ void sign_scale_kernel(uint32_t* packed, const double* partial, unsigned blocks, size_t n) {
    __shared__ double of_warps[WARP];
    double sum = 0;
    for (unsigned i = threadIdx.x; i < blocks; i += blockDim.x) sum += partial[i];
    double mean = block_sum(sum, of_warps) / (double)n;
    if (threadIdx.x == 0) packed[0] = __float_as_uint((float)mean);
}
// A thread has an element, and a warp a word. Reads x, writes kept: with the sum before it, 12 bytes an element.
__global__ void pack_signs_kernel(uint32_t* packed, float* kept, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float scale = __uint_as_float(packed[0]), value = i < n ? x[i] : 0;
    bool negative = value < 0;
    uint32_t word = __ballot_sync(~0u, negative);
    if (i < n && kept != NULL) kept[i] = value - (negative ? -scale : scale);
    if (i < n && i % WARP == 0) packed[1 + i / WARP] = word;
}
void pack_signs(void* packed, float* kept, const float* x, size_t n) {
    if (n == 0) return;
    double* partial = (double*)cuda_layers.workspace; // (blocks)
    unsigned blocks = stats_blocks(n);
    sum_blocks(partial, x, n, blocks, Magnitude());
    sign_scale_kernel<<<1, STATS_THREADS, 0, compute_stream>>>((uint32_t*)packed, partial, blocks, n);
    pack_signs_kernel<<<(unsigned)ceil_div(n, COMPRESS_THREADS), COMPRESS_THREADS, 0, compute_stream>>>(
        (uint32_t*)packed, kept, x, n);
    check_launch("pack_signs");
}
struct UnpackSigns {
    floatX* out; const uint32_t* packed; int rows; size_t row_words;
    __device__ void operator()(size_t i) const {
        float sum = 0;
        for (int row = 0; row < rows; row++) {
            const uint32_t* in = packed + row * row_words;
            float scale = __uint_as_float(in[0]);
            sum += in[1 + i / 32] >> (i % 32) & 1 ? -scale : scale;
        }
        out[i] = narrow<floatX>(sum);
    }
};
void unpack_signs_sum(floatX* out, const void* packed, int rows, size_t n) {
    for_each(n, UnpackSigns{ out, (const uint32_t*)packed, rows, signs_bytes(n) / sizeof(uint32_t) },
             "unpack_signs_sum");
}
// ---- the k largest ----
// The k-th's magnitude is found digit by digit, as in cpu/compress.h. Then blocks count what they will send, and write
// it where their turn is. Counts are whole numbers, so the order of atomic additions does not matter. Reads x five
// times, and writes kept: 24 bytes an element.
constexpr int TOP_K_BINS = 2048, TOP_K_BLOCKS = 512;
__host__ __device__ constexpr int top_k_shift(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }

typedef struct {
    uint32_t bits, left;           // the k-th's magnitude; how many of those with this magnitude are sent
    uint32_t count[3 * TOP_K_BINS]; // (3,TOP_K_BINS), the histograms
    uint32_t greater[TOP_K_BLOCKS], equal[TOP_K_BLOCKS]; // elements of each block above the k-th, and as large as it
} TopK;
static_assert(sizeof(TopK) <= COMPRESS_WORKSPACE, "the workspace of pack_top_k");

__global__ void top_k_begin_kernel(TopK* t, uint32_t k) {
    for (int bin = threadIdx.x; bin < 3 * TOP_K_BINS; bin += blockDim.x) t->count[bin] = 0;
    if (threadIdx.x == 0) t->bits = 0;
    if (threadIdx.x == 0) t->left = k;
}
__global__ void top_k_histogram_kernel(TopK* t, const float* x, size_t n, int digit) {
    __shared__ uint32_t count[TOP_K_BINS];
    uint32_t found = t->bits, above = digit == 0 ? 0 : ~0u << top_k_shift(digit - 1), mask = ~above & 0x7fffffff;
    for (int bin = threadIdx.x; bin < TOP_K_BINS; bin += blockDim.x) count[bin] = 0;
    __syncthreads();
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t bits = magnitude_bits(x[i]);
        if ((bits & above) == found) atomicAdd(&count[(bits & mask) >> top_k_shift(digit)], 1u);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < TOP_K_BINS; bin += blockDim.x)
        if (count[bin] > 0) atomicAdd(&t->count[digit * TOP_K_BINS + bin], count[bin]);
}
// One warp. Lane l has the l-th group of bins from the highest;
// the k-th is in one lane's, which then walks down its bins.
__global__ void top_k_bin_kernel(TopK* t, int digit) {
    constexpr int GROUP = TOP_K_BINS / WARP;
    int lane = threadIdx.x, bin = TOP_K_BINS - 1 - lane * GROUP;
    const uint32_t* count = t->count + digit * TOP_K_BINS;
    uint32_t left = t->left, own = 0;
    for (int b = 0; b < GROUP; b++) own += count[bin - b];
    uint32_t through = own; // counts of this lane and those before
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        uint32_t before = __shfl_up_sync(~0u, through, lanes);
        if (lane >= lanes) through += before;
    }
    __syncwarp(); // all have read t->left
    if (through < left || through - own >= left) return;
    left -= through - own;
    for (; count[bin] < left; bin--) left -= count[bin];
    t->left = left;
    t->bits |= (uint32_t)bin << top_k_shift(digit);
}

__global__ void top_k_count_kernel(TopK* t, const float* x, size_t n, size_t chunk) {
    __shared__ uint32_t of_warps[WARP];
    size_t begin = blockIdx.x * chunk, end = begin + chunk < n ? begin + chunk : n;
    uint32_t greater = 0, equal = 0;
    for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        uint32_t bits = magnitude_bits(x[i]);
        greater += bits > t->bits;
        equal += bits == t->bits;
    }
    greater = block_sum(greater, of_warps);
    equal = block_sum(equal, of_warps);
    if (threadIdx.x == 0) t->greater[blockIdx.x] = greater;
    if (threadIdx.x == 0) t->equal[blockIdx.x] = equal;
}
// Returns how many of the block's threads before this one have `flag`; *all is how many have it.
// of_warps (32) is shared memory.
__device__ inline uint32_t count_before(bool flag, uint32_t* of_warps, uint32_t* all) {
    uint32_t votes = __ballot_sync(~0u, flag), before = __popc(votes & ((1u << threadIdx.x % WARP) - 1));
    __syncthreads(); // an earlier use of of_warps has been read
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = __popc(votes);
    __syncthreads();
    *all = 0;
    for (int w = 0; w < (int)(blockDim.x / WARP); w++) {
        if (w < (int)(threadIdx.x / WARP)) before += of_warps[w];
        *all += of_warps[w];
    }
    return before;
}
// An element's place among those sent: the greater ones before it, and of the equal ones before it as many as are sent.
__global__ void top_k_send_kernel(uint32_t* indices, float* values, float* kept, const TopK* t, const float* x,
                                  size_t n, size_t chunk) {
    __shared__ uint32_t of_warps[WARP];
    size_t begin = blockIdx.x * chunk, end = begin + chunk < n ? begin + chunk : n;
    uint32_t greater = 0, equal = 0, all_greater, all_equal;
    for (unsigned b = threadIdx.x; b < blockIdx.x; b += blockDim.x) {
        greater += t->greater[b];
        equal += t->equal[b];
    }
    greater = block_sum(greater, of_warps);
    equal = block_sum(equal, of_warps);
    for (size_t at = begin; at < end; at += blockDim.x) {
        size_t i = at + threadIdx.x;
        float value = i < end ? x[i] : 0;
        bool is_greater = i < end && magnitude_bits(value) > t->bits;
        bool is_equal = i < end && magnitude_bits(value) == t->bits;
        uint32_t greater_before = greater + count_before(is_greater, of_warps, &all_greater);
        uint32_t equal_before = equal + count_before(is_equal, of_warps, &all_equal);
        bool sent = is_greater || (is_equal && equal_before < t->left);
        uint32_t place = greater_before + min(equal_before, t->left);
        if (sent) indices[place] = (uint32_t)i;
        if (sent) values[place] = value;
        if (i < end && kept != NULL) kept[i] = sent ? 0 : value;
        greater += all_greater;
        equal += all_equal;
    }
}
void pack_top_k(void* packed, float* kept, const float* x, size_t n, size_t k) {
    top_k_check(n, k);
    TopK* t = (TopK*)cuda_layers.workspace;
    size_t chunk = round_up(ceil_div(n, TOP_K_BLOCKS), COMPRESS_THREADS); // elements of a block, which are neighbours
    unsigned blocks = (unsigned)ceil_div(n, chunk);
    top_k_begin_kernel<<<1, COMPRESS_THREADS, 0, compute_stream>>>(t, (uint32_t)k);
    for (int digit = 0; digit < 3; digit++) {
        top_k_histogram_kernel<<<blocks, COMPRESS_THREADS, 0, compute_stream>>>(t, x, n, digit);
        top_k_bin_kernel<<<1, WARP, 0, compute_stream>>>(t, digit);
    }
    top_k_count_kernel<<<blocks, COMPRESS_THREADS, 0, compute_stream>>>(t, x, n, chunk);
    top_k_send_kernel<<<blocks, COMPRESS_THREADS, 0, compute_stream>>>((uint32_t*)packed, (float*)packed + k, kept, t,
                                                                       x, n, chunk);
    check_launch("pack_top_k");
}

struct SparseAdd { // a row has each index once, so no two threads add to one element
    float* out; const uint32_t* indices; const float* values; size_t n;
    __device__ void operator()(size_t i) const { if (indices[i] < n) out[indices[i]] += values[i]; }
};
void sparse_sum_fp32(float* out, const void* packed, int rows, size_t n, size_t k) {
    cuda_check(cudaMemsetAsync(out, 0, n * sizeof(float), compute_stream), "sparse_sum_fp32");
    for (int row = 0; row < rows; row++) {
        const uint32_t* indices = (const uint32_t*)((const char*)packed + (size_t)row * sparse_bytes(k));
        for_each(k, SparseAdd { out, indices, (const float*)(indices + k), n }, "sparse_sum_fp32");
    }
}

// ---- matrices of low rank ----
constexpr int RANKS_AT_ONCE = 4; // columns of p and q that a thread has in registers

// A warp has ROWS rows of m, whose columns its lanes share. Reads m once for every RANKS_AT_ONCE columns of q.
template <int ROWS>
__global__ void skinny_product_kernel(float* p, const float* m, const float* q, int n, int k, int r) {
    int lane = threadIdx.x % WARP, first = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP) * ROWS;
    for (int j0 = 0; j0 < r; j0 += RANKS_AT_ONCE) {
        float sum[ROWS][RANKS_AT_ONCE] = {};
        for (int c = lane; c < k; c += WARP) {
            #pragma unroll
            for (int j = 0; j < RANKS_AT_ONCE; j++) {
                float factor = j0 + j < r ? q[(size_t)c * r + j0 + j] : 0;
                #pragma unroll
                for (int i = 0; i < ROWS; i++)
                    if (first + i < n) sum[i][j] = fmaf(m[(size_t)(first + i) * k + c], factor, sum[i][j]);
            }
        }
        #pragma unroll
        for (int i = 0; i < ROWS; i++) {
            #pragma unroll
            for (int j = 0; j < RANKS_AT_ONCE; j++) {
                float all = warp_sum(sum[i][j]);
                if (lane == 0 && first + i < n && j0 + j < r) p[(size_t)(first + i) * r + j0 + j] = all;
            }
        }
    }
}
void skinny_product(float* p, const float* m, const float* q, int n, int k, int r) {
    constexpr int ROWS = 2, BLOCK_ROWS = ROWS * COMPRESS_THREADS / WARP;
    unsigned blocks = (unsigned)ceil_div((size_t)n, BLOCK_ROWS);
    skinny_product_kernel<ROWS><<<blocks, COMPRESS_THREADS, 0, compute_stream>>>(p, m, q, n, k, r);
    check_launch("skinny_product");
}

// partial (chunks,k,r): blockIdx.x has a chunk of rows, a thread a column of m and RANKS_AT_ONCE columns of p. Reads m
// as often as skinny_product does.
__global__ void skinny_transposed_kernel(float* partial, const float* m, const float* p, int n, int k, int r,
                                         int chunk) {
    int c = blockIdx.y * blockDim.x + threadIdx.x, j0 = blockIdx.z * RANKS_AT_ONCE;
    int begin = blockIdx.x * chunk, end = min(n, begin + chunk);
    float sum[RANKS_AT_ONCE] = {};
    if (c >= k) return;
    for (int row = begin; row < end; row++) {
        float x = m[(size_t)row * k + c];
        #pragma unroll
        for (int j = 0; j < RANKS_AT_ONCE; j++)
            if (j0 + j < r) sum[j] = fmaf(x, p[(size_t)row * r + j0 + j], sum[j]);
    }
    #pragma unroll
    for (int j = 0; j < RANKS_AT_ONCE; j++)
        if (j0 + j < r) partial[((size_t)blockIdx.x * k + c) * r + j0 + j] = sum[j];
}
struct AddChunks { // neighbours in a warp read neighbours of a chunk
    float* q; const float* partial; int chunks; size_t size;
    __device__ void operator()(size_t i) const {
        float sum = partial[i];
        for (int chunk = 1; chunk < chunks; chunk++) sum += partial[chunk * size + i];
        q[i] = sum;
    }
};
void skinny_product_transposed(float* q, const float* m, const float* p, int n, int k, int r) {
    const size_t size = (size_t)k * (size_t)r, least_rows = 64;
    size_t chunks = size_min(ceil_div((size_t)n, least_rows), size_max(1, COMPRESS_WORKSPACE / sizeof(float) / size));
    int chunk = (int)ceil_div((size_t)n, chunks);
    chunks = ceil_div((size_t)n, (size_t)chunk);
    float* partial = chunks == 1 ? q : (float*)cuda_layers.workspace;
    dim3 blocks((unsigned)chunks, (unsigned)ceil_div((size_t)k, COMPRESS_THREADS),
                (unsigned)ceil_div((size_t)r, RANKS_AT_ONCE));
    skinny_transposed_kernel<<<blocks, COMPRESS_THREADS, 0, compute_stream>>>(partial, m, p, n, k, r, chunk);
    check_launch("skinny_product_transposed");
    if (chunks > 1) for_each(size, AddChunks { q, partial, (int)chunks, size }, "skinny_product_transposed");
}

// Orthonormal columns by Cholesky-QR: p^T p = R^T R, with R upper triangular, and p R^-1 has the columns that
// Gram-Schmidt finds. There each column waits for those before it, in r (r + 3) passes that are too short for a GPU;
// here many blocks go through p once for all products, and once for the result. The condition of p^T p is the square of
// p's, so this is in double. It is done twice, as Gram-Schmidt takes columns out twice.
constexpr int GRAM_TILE = 4; // columns that a thread takes at a time
constexpr unsigned GRAM_THREADS = 128, GRAM_BLOCKS = 64;

// gram (chunks,r,r): of a chunk of rows, the product of columns a and b. Tiles of which all have a > b are left out.
__global__ void __launch_bounds__(GRAM_THREADS) gram_kernel(double* gram, const float* p, int n, int r, int chunk) {
    __shared__ double of_warps[WARP];
    int a0 = blockIdx.y * GRAM_TILE, b0 = blockIdx.z * GRAM_TILE, begin = blockIdx.x * chunk,
        end = min(n, begin + chunk);
    double sum[GRAM_TILE][GRAM_TILE] = {};
    if (a0 > b0) return; // the whole block
    for (int row = begin + threadIdx.x; row < end; row += blockDim.x) {
        const float* x = p + (size_t)row * r;
        #pragma unroll
        for (int a = 0; a < GRAM_TILE; a++) {
            #pragma unroll
            for (int b = 0; b < GRAM_TILE; b++)
                if (a0 + a < r && b0 + b < r) sum[a][b] += (double)x[a0 + a] * (double)x[b0 + b];
        }
    }
    #pragma unroll
    for (int a = 0; a < GRAM_TILE; a++) {
        #pragma unroll
        for (int b = 0; b < GRAM_TILE; b++) {
            double all = block_sum(sum[a][b], of_warps);
            if (threadIdx.x == 0 && a0 + a < r && b0 + b < r)
                gram[((size_t)blockIdx.x * r + a0 + a) * r + b0 + b] = all;
        }
    }
}

// R's row j holds the products of column j with the columns from j on.
// What the columns before j have of them is taken out.
__device__ inline void take_out(double* R, int r, int j) {
    __syncthreads(); // what is read here was written by other threads
    for (int k = j + threadIdx.x; k < r; k += blockDim.x) {
        double left = R[j * r + k];
        for (int i = 0; i < j; i++) left -= R[i * r + j] * R[i * r + k];
        R[j * r + k] = left;
    }
    __syncthreads();
}
// Column j of p becomes a column of the identity: the first, from number j on, that the columns before do not span. R's
// column and row follow: what of its one element, in row t, each column before j has; and its products with the columns
// from j on.
__device__ inline void replace_column(double* R, float* p, int n, int r, int j) {
    int t = j;
    for (int tries = 0; tries < n; tries++, t = (t + 1) % n) {
        const float* row = p + (size_t)t * r;
        __syncthreads(); // all have seen that the last one was not left
        for (int i = 0; threadIdx.x == 0 && i < j; i++) {
            double left = row[i];
            for (int h = 0; h < i; h++) left -= R[h * r + i] * R[h * r + j];
            R[i * r + j] = left / R[i * r + i];
        }
        for (int k = j + threadIdx.x; k < r; k += blockDim.x) R[j * r + k] = k == j ? 1 : row[k];
        take_out(R, r, j);
        if (!(R[j * r + j] <= 0.25 / n)) break;
    }
    for (int row = threadIdx.x; row < n; row += blockDim.x) p[(size_t)row * r + j] = row == t ? 1.0f : 0.0f;
}
// One block: R (r,r), which are the first chunk's products, becomes the sum of all, and then the factor.
__global__ void cholesky_kernel(double* R, float* p, int n, int r, int chunks) {
    size_t size = (size_t)r * r;
    for (size_t e = threadIdx.x; e < size; e += blockDim.x) {
        double sum = R[e];
        for (int chunk = 1; chunk < chunks; chunk++) sum += R[chunk * size + e];
        R[e] = sum;
    }
    for (int j = 0; j < r; j++) {
        __syncthreads();
        double before = R[j * r + j];
        take_out(R, r, j);
        if (R[j * r + j] <= 1e-12 * before) replace_column(R, p, n, r, j); // of a length: 1e-6. The rest is rounding
        double length = sqrt(R[j * r + j]);
        __syncthreads(); // all have read it
        for (int k = j + threadIdx.x; k < r; k += blockDim.x) R[j * r + k] = k == j ? length : R[j * r + k] / length;
    }
}
// A thread has a row of p, which it multiplies by R^-1: of each column it takes out those before.
__global__ void divide_rows_kernel(float* p, const double* R, int n, int r) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    float* x = p + (size_t)row * r;
    if (row >= n) return;
    for (int j0 = 0; j0 < r; j0 += GRAM_TILE) {
        double left[GRAM_TILE];
        #pragma unroll
        for (int j = 0; j < GRAM_TILE; j++) left[j] = j0 + j < r ? x[j0 + j] : 0;
        for (int i = 0; i < j0; i++) {
            #pragma unroll
            for (int j = 0; j < GRAM_TILE; j++) if (j0 + j < r) left[j] -= (double)x[i] * R[i * r + j0 + j];
        }
        #pragma unroll
        for (int j = 0; j < GRAM_TILE; j++) {
            if (j0 + j >= r) break;
            #pragma unroll
            for (int i = 0; i < j; i++) left[j] -= left[i] * R[(j0 + i) * r + j0 + j];
            left[j] /= R[(j0 + j) * r + j0 + j];
            x[j0 + j] = (float)left[j];
        }
    }
}
static_assert(1024 * 1024 * sizeof(double) <= COMPRESS_WORKSPACE, "p^T p of the largest --rank");
void orthonormalise(float* p, int n, int r) {
    double* R = (double*)cuda_layers.workspace;
    size_t size = (size_t)r * (size_t)r, most = size_min(GRAM_BLOCKS, COMPRESS_WORKSPACE / sizeof(double) / size);
    int chunk = (int)size_max(GRAM_THREADS, ceil_div((size_t)n, most)),
        chunks = (int)ceil_div((size_t)n, (size_t)chunk);
    unsigned tiles = (unsigned)ceil_div((size_t)r, GRAM_TILE), threads = (unsigned)size_min(256, round_up(size, WARP));
    for (int pass = 0; pass < 2; pass++) {
        gram_kernel<<<dim3((unsigned)chunks, tiles, tiles), GRAM_THREADS, 0, compute_stream>>>(R, p, n, r, chunk);
        cholesky_kernel<<<1, threads, 0, compute_stream>>>(R, p, n, r, chunks);
        divide_rows_kernel<<<(unsigned)ceil_div((size_t)n, GRAM_THREADS), GRAM_THREADS, 0, compute_stream>>>(
            p, R, n, r);
    }
    check_launch("orthonormalise");
}

// A thread has a column of ROWS rows: reads m, writes out and kept.
template <int ROWS>
__global__ void low_rank_kernel(floatX* out, float* kept, const float* m, const float* p, const float* q, float share,
                                int n, int k, int r) {
    int c = blockIdx.y * blockDim.x + threadIdx.x, first = blockIdx.x * ROWS;
    float sum[ROWS] = {};
    if (c >= k) return;
    for (int j = 0; j < r; j++) {
        float factor = q[(size_t)c * r + j];
        #pragma unroll
        for (int i = 0; i < ROWS; i++) if (first + i < n) sum[i] = fmaf(p[(size_t)(first + i) * r + j], factor, sum[i]);
    }
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
        size_t at = (size_t)(first + i) * k + c;
        if (first + i >= n) return;
        out[at] = narrow<floatX>(sum[i]);
        if (kept != NULL) kept[at] = __fsub_rn(m[at], __fmul_rn(share, widen(out[at])));
    }
}
void low_rank_apply(floatX* out, float* kept, const float* m, const float* p, const float* q, float share, int n, int k,
                    int r) {
    constexpr int ROWS = 8;
    dim3 blocks((unsigned)ceil_div((size_t)n, ROWS), (unsigned)ceil_div((size_t)k, COMPRESS_THREADS));
    low_rank_kernel<ROWS><<<blocks, COMPRESS_THREADS, 0, compute_stream>>>(out, kept, m, p, q, share, n, k, r);
    check_launch("low_rank_apply");
}

// ---- comparison ----
// partial (3,blocks): the block's sums of x^2, y^2 and x y. Reads x and y once.
__global__ void comparison_kernel(double* partial, const floatX* x, const float* y, size_t n) {
    __shared__ double of_warps[WARP];
    double sums[3] = {};
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        double a = widen(x[i]), b = y[i];
        sums[0] += a * a;
        sums[1] += b * b;
        sums[2] += a * b;
    }
    for (int k = 0; k < 3; k++) {
        double sum = block_sum(sums[k], of_warps);
        if (threadIdx.x == 0) partial[k * gridDim.x + blockIdx.x] = sum;
    }
}
void add_comparison(Comparison* acc, const floatX* x, const float* y, size_t n) {
    double *partial = (double*)cuda_layers.workspace, *const sums[] = { &acc->xx, &acc->yy, &acc->xy };
    unsigned blocks = stats_blocks(n);
    comparison_kernel<<<blocks, STATS_THREADS, 0, compute_stream>>>(partial, x, y, n);
    for (int k = 0; k < 3; k++) sum_partial(sums[k], partial + k * blocks, blocks);
    check_launch("add_comparison");
}
static_assert(STATS_BLOCKS * sizeof(Comparison) <= COMPRESS_WORKSPACE, "the workspace of add_comparison");
#endif
