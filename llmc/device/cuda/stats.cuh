/* cuda/stats.cuh - the numbers of a step: sums, norms, the clipping factor. */
#ifndef LLMC_CUDA_STATS_CUH
#define LLMC_CUDA_STATS_CUH
#include "common.cuh"

// Threads take pieces of 16 bytes by strides of the grid and sum them in double; a block's sum is one of at most
// STATS_BLOCKS partial sums, which a second kernel adds up. Which thread takes which element depends on n alone, not on
// where the array begins: without alignment the same pieces are read one element at a time.
constexpr unsigned STATS_BLOCKS = 1024, STATS_THREADS = 256;

static inline unsigned stats_blocks(size_t n) {
    return (unsigned)size_max(1, size_min(STATS_BLOCKS, ceil_div(n, STATS_THREADS * 4)));
}

struct Identity { __device__ double operator()(double x) const { return x; } };
struct Square { __device__ double operator()(double x) const { return x * x; } };

// partial (blocks) = sums of f(x) over the elements of x (n) that each block takes. Reads x once.
template <int W, typename T, typename F> __global__ void sum_kernel(double* partial, const T* x, size_t n, F f) {
    constexpr int PIECE = 16 / sizeof(T);
    __shared__ double of_warps[WARP];
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * PIECE,
           step = (size_t)gridDim.x * blockDim.x * PIECE;
    double sum = 0;
    for (size_t i = first; i < n; i += step) {
        if (W == PIECE && i + PIECE <= n) {
            Floats<PIECE> piece = load<PIECE>(x + i);
            #pragma unroll
            for (int k = 0; k < PIECE; k++) sum += f(piece.x[k]);
        } else {
            for (size_t k = i; k < i + PIECE && k < n; k++) sum += f(widen(x[k]));
        }
    }
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
template <typename T, typename F>
static inline void sum_blocks(double* partial, const T* x, size_t n, unsigned blocks, F f) {
    auto kernel = (uintptr_t)x % 16 == 0 ? sum_kernel<16 / sizeof(T), T, F> : sum_kernel<1, T, F>;
    kernel<<<blocks, STATS_THREADS, 0, compute_stream>>>(partial, x, n, f);
}

// *acc += the sum of partial (blocks), by one block, whose size depends on blocks alone
__global__ void sum_partial_kernel(double* acc, const double* partial, unsigned blocks) {
    __shared__ double of_warps[WARP];
    double sum = 0;
    for (unsigned i = threadIdx.x; i < blocks; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) *acc += sum;
}
static inline void sum_partial(double* acc, const double* partial, unsigned blocks) {
    unsigned threads = (unsigned)size_min(1024, round_up(blocks, WARP));
    sum_partial_kernel<<<1, threads, 0, compute_stream>>>(acc, partial, blocks);
}

template <typename T, typename F>
static inline void add_sum_of(double* acc, const T* x, size_t n, F f, const char* layer) {
    unsigned blocks = stats_blocks(n);
    double* partial = (double*)cuda_layers.workspace;
    sum_blocks(partial, x, n, blocks, f);
    sum_partial(acc, partial, blocks);
    check_launch(layer);
}
void add_sum(double* acc, const float* x, size_t n) { add_sum_of(acc, x, n, Identity(), "add_sum"); }
void add_sum_squares(double* acc, const floatX* x, size_t n) { add_sum_of(acc, x, n, Square(), "add_sum_squares"); }
void add_sum_squares_fp32(double* acc, const float* x, size_t n) {
    add_sum_of(acc, x, n, Square(), "add_sum_squares_fp32");
}

// One thread: it is here so that the norm need not travel to the host and back.
__global__ void clip_gradients_kernel(StepStats* stats, float max_norm, float loss_scale) {
    double norm = sqrt(stats->grad_square) / (double)loss_scale;
    double factor = max_norm > 0 ? fmin(1.0, (double)max_norm / (norm + 1e-6)) : 1.0;
    stats->grad_norm = norm;
    stats->grad_scale = isfinite(norm) ? (float)(factor / (double)loss_scale) : 0.0f;
}
void clip_gradients(StepStats* stats, float max_norm, float loss_scale) {
    clip_gradients_kernel<<<1, 1, 0, compute_stream>>>(stats, max_norm, loss_scale);
    check_launch("clip_gradients");
}

// ---- elementwise: f.at<W>(i) is what becomes of elements [i, i + W) ----
// One piece per thread, the thread after the last whole piece does the rest.
template <int W, typename F> __global__ void pieces_kernel(size_t n, F f) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= n) f.template at<W>(i);
    else for (; i < n; i++) f.template at<1>(i);
}
template <typename F> static inline void for_pieces(size_t n, bool vectors, F f, const char* layer) {
    const unsigned threads = 256;
    if (n == 0) return;
    auto kernel = vectors ? pieces_kernel<VEC, F> : pieces_kernel<1, F>;
    kernel<<<(unsigned)ceil_div(n, threads * (vectors ? VEC : 1)), threads, 0, compute_stream>>>(n, f);
    check_launch(layer);
}

template <typename T> struct Add { // reads x and y, writes x: 6 n bytes in 16 bits
    T* x; const T* y;
    template <int W> __device__ void at(size_t i) const {
        Floats<W> piece = load<W>(x + i);
        piece += load<W>(y + i);
        store(x + i, piece);
    }
};
template <typename T> static inline void add_up(T* x, const T* y, size_t n) {
    for_pieces(n, rows_are_vectors(VEC, x, y), Add<T> { x, y }, "add_in_place");
}
void add_in_place(floatX* x, const floatX* y, size_t n) { add_up(x, y, n); }
void add_in_place_fp32(float* x, const float* y, size_t n) { add_up(x, y, n); }

template <typename To, typename From> struct Cast { // rounds if dst is narrower
    To* dst; const From* src;
    template <int W> __device__ void at(size_t i) const { store(dst + i, load<W>(src + i)); }
};
template <typename To, typename From> static inline void cast(To* dst, const From* src, size_t n) {
    for_pieces(n, rows_are_vectors(VEC, dst) && rows_are_vectors(VEC, src), Cast<To, From> { dst, src }, "cast");
}
void to_fp32(float* out, const floatX* x, size_t n) { cast(out, x, n); }
void from_fp32(floatX* out, const float* x, size_t n) { cast(out, x, n); }
#endif
