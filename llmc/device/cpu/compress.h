/*
cpu/compress.h - compress_api.h for the CPU, formula by formula. No result depends on the number of threads: each
element has one thread, and a sum has an order that follows from the shapes.
*/
#ifndef LLMC_CPU_COMPRESS_H
#define LLMC_CPU_COMPRESS_H
#include "../compress_api.h"
#include "../host_adamw.h"

// ---- the error ----
static inline float with_error(float x, const float* error, size_t i) { return error != NULL ? x + error[i] : x; }

void add_error(float* x, const floatX* grads, const float* error, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = with_error(to_float(grads[i]), error, i);
}
void scale_in_place_fp32(float* x, float factor, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

// ---- bf16 ----
void round_bf16(uint16_t* out, float* kept, const floatX* grads, const float* error, size_t n) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        float x = with_error(to_float(grads[i]), error, i);
        out[i] = bf16_bits_from_float(x);
        if (kept != NULL) kept[i] = x - float_from_bf16_bits(out[i]);
    }
}
void widen_bf16(floatX* out, const uint16_t* in, size_t n) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = to_floatX(float_from_bf16_bits(in[i]));
}

// ---- 8 and 4 bits, in blocks ----
// The order of these bits is that of |x|, and a NaN is above every number, which a comparison of floats would lose.
static inline uint32_t magnitude_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}
// Returns the scale of n elements, at most a block.
static inline float block_scale(const float* x, size_t n, int limit) {
    uint32_t largest = 0;
    float value;
    for (size_t i = 0; i < n; i++) largest = magnitude_bits(x[i]) > largest ? magnitude_bits(x[i]) : largest;
    if (largest >= 0x7f800000) return NAN;
    memcpy(&value, &largest, sizeof value);
    return value / (float)limit;
}
// x / scale as a whole number. A scale below the normal numbers is too coarse to keep it in the limits. (No fminf: what
// it does with NaN would keep loops from becoming vector code, and x / scale is none if scale > 0.)
static inline int quantised(float x, float scale, float limit) {
    float q = rintf(x / scale);
    return (int)(q < -limit ? -limit : q > limit ? limit : q);
}
// Packs whole numbers q of a block.
static inline void pack_numbers(int8_t* numbers, const int* q, int bits) {
    if (bits == 8) for (int i = 0; i < QUANTISE_BLOCK; i++) numbers[i] = (int8_t)q[i];
    else for (int i = 0; i < QUANTISE_BLOCK / 2; i++) numbers[i] = (int8_t)(q[2 * i + 1] * 16 | (q[2 * i] & 15));
}
// Adds scale times a block's numbers.
static inline void add_numbers(float* sum, float scale, const int8_t* numbers, int bits) {
    if (bits == 8) for (int i = 0; i < QUANTISE_BLOCK; i++) sum[i] += scale * (float)numbers[i];
    else for (int i = 0; i < QUANTISE_BLOCK / 2; i++) {
        int even = (int8_t)((uint8_t)numbers[i] << 4) / 16, odd = (int8_t)(numbers[i] & 0xf0) / 16;
        sum[2 * i] += scale * (float)even;
        sum[2 * i + 1] += scale * (float)odd;
    }
}

// Packs n elements, at most a block.
static void quantise_block(char* packed, float* kept, const float* x, const float* error, size_t n, int bits) {
    float sum[QUANTISE_BLOCK];
    int q[QUANTISE_BLOCK] = { 0 }, limit = bits == 8 ? 127 : 7;
    for (size_t i = 0; i < n; i++) sum[i] = with_error(x[i], error, i);
    float scale = block_scale(sum, n, limit);
    memcpy(packed, &scale, sizeof scale);
    if (scale > 0) for (size_t i = 0; i < n; i++) q[i] = quantised(sum[i], scale, (float)limit);
    pack_numbers((int8_t*)packed + sizeof(float), q, bits);
    if (kept != NULL) for (size_t i = 0; i < n; i++) kept[i] = sum[i] - scale * (float)q[i];
}
void quantise(void* packed, float* kept, const void* x, DType t, const float* error, size_t n, int bits) {
    quantise_check(bits);
    #pragma omp parallel for schedule(static)
    for (size_t at = 0; at < n; at += QUANTISE_BLOCK) {
        float copy[QUANTISE_BLOCK];
        size_t count = size_min(QUANTISE_BLOCK, n - at);
        quantise_block((char*)packed + quantised_bytes(at, bits), kept != NULL ? kept + at : NULL,
                       host_widened(copy, x, t, at, count), error != NULL ? error + at : NULL, count, bits);
    }
}

void dequantise_sum(void* out, DType t, const void* packed, int rows, size_t n, int bits) {
    size_t row = quantised_bytes(n, bits);
    quantise_check(bits);
    #pragma omp parallel for schedule(static)
    for (size_t at = 0; at < n; at += QUANTISE_BLOCK) {
        float sum[QUANTISE_BLOCK] = { 0 }, scale;
        size_t count = size_min(QUANTISE_BLOCK, n - at);
        for (int k = 0; k < rows; k++) {
            const char* block = (const char*)packed + (size_t)k * row + quantised_bytes(at, bits);
            memcpy(&scale, block, sizeof scale);
            add_numbers(sum, scale, (const int8_t*)block + sizeof scale, bits);
        }
        convert_slice((char*)out + at * dtype_size(t), t, sum, DTYPE_F32, count);
    }
}

// ---- signs, with one scale ----
static double chunk_magnitudes(const void* array, DType t, size_t begin, size_t end) {
    (void)t; // fp32
    const float* x = (const float*)array;
    double sum = 0;
    #pragma omp simd reduction(+:sum)
    for (size_t i = begin; i < end; i++) sum += (double)fabsf(x[i]);
    return sum;
}
void pack_signs(void* packed, float* kept, const float* x, size_t n) {
    if (n == 0) return;
    float value = (float)(host_sum_chunks(chunk_magnitudes, x, DTYPE_F32, n) / (double)n);
    uint32_t* words = (uint32_t*)packed + 1;
    memcpy(packed, &value, sizeof value);
    #pragma omp parallel for schedule(static)
    for (size_t w = 0; w < ceil_div(n, 32); w++) {
        uint32_t word = 0;
        for (size_t i = 32 * w; i < size_min(n, 32 * w + 32); i++) {
            bool negative = x[i] < 0;
            word |= (uint32_t)negative << (i % 32);
            if (kept != NULL) kept[i] = x[i] - (negative ? -value : value);
        }
        words[w] = word;
    }
}
void unpack_signs_sum(floatX* out, const void* packed, int rows, size_t n) {
    size_t row = signs_bytes(n);
    #pragma omp parallel for schedule(static)
    for (size_t w = 0; w < ceil_div(n, 32); w++) {
        float sum[32] = { 0 }, scale;
        for (int k = 0; k < rows; k++) {
            const char* begin = (const char*)packed + (size_t)k * row;
            uint32_t word = ((const uint32_t*)begin)[1 + w];
            memcpy(&scale, begin, sizeof scale);
            for (int i = 0; i < 32; i++) sum[i] += word >> i & 1 ? -scale : scale;
        }
        convert_slice(out + 32 * w, FLOATX_DTYPE, sum, DTYPE_F32, size_min(32, n - 32 * w));
    }
}

// ---- the k largest ----
// The magnitude of the k-th largest element, found digit by digit from the highest: a digit's histogram says
// which bin the k-th is in, and how many of the k are above it.
#define TOP_K_BINS 2048
static const int top_k_shift[3] = { 20, 10, 0 };

// The k-th's magnitude; how many of those with this magnitude are sent
typedef struct { uint32_t bits; size_t left; } TopK;
static inline TopK top_k_search(const float* x, size_t n, size_t k) {
    TopK found = { 0, k };
    for (int digit = 0; digit < 3; digit++) {
        int shift = top_k_shift[digit], bin = TOP_K_BINS - 1;
        size_t count[TOP_K_BINS] = { 0 };
        uint32_t above = digit == 0 ? 0 : ~0u << top_k_shift[digit - 1], digit_mask = ~above & 0x7fffffff;
        #pragma omp parallel for schedule(static) reduction(+:count[:TOP_K_BINS])
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = magnitude_bits(x[i]);
            if ((bits & above) == found.bits) count[(bits & digit_mask) >> shift]++;
        }
        for (; count[bin] < found.left; bin--) found.left -= count[bin];
        found.bits |= (uint32_t)bin << shift;
    }
    return found;
}

void pack_top_k(void* packed, float* kept, const float* x, size_t n, size_t k) {
    top_k_check(n, k);
    TopK least = top_k_search(x, n, k);
    uint32_t* indices = (uint32_t*)packed;
    float* values = (float*)packed + k;
    size_t sent = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = magnitude_bits(x[i]);
        bool equal = bits == least.bits && least.left > 0, chosen = equal || bits > least.bits;
        if (chosen) {
            indices[sent] = (uint32_t)i;
            values[sent++] = x[i];
        }
        least.left -= equal;
        if (kept != NULL) kept[i] = chosen ? 0 : x[i];
    }
}

void sparse_sum_fp32(float* out, const void* packed, int rows, size_t n, size_t k) {
    memset(out, 0, n * sizeof(float));
    for (int row = 0; row < rows; row++) {
        const uint32_t* indices = (const uint32_t*)((const char*)packed + (size_t)row * sparse_bytes(k));
        const float* values = (const float*)indices + k;
        #pragma omp parallel for schedule(static) // a row has each index once
        for (size_t i = 0; i < k; i++)
            if (indices[i] < n) out[indices[i]] += values[i];
    }
}

// ---- matrices of low rank ----
#define RANK_GROUP 4 // columns of p and q at a time: a vector of double
static inline int at_most(int count, int limit) { return count < limit ? count : limit; }

// out (outs,r) = the sums over s < sums of m[i * out_step + s * sum_step] * b[s][j], b (sums,r): of its elements those
// in `count` rows from `first` on and in `columns` columns from j0 on. Inlined with constants it is vector code:
// several rows, because each sum waits for its last addition.
#define RANK_MOST 16
ALWAYS_INLINE void skinny_part(float* out, const float* m, const float* b, int sums, size_t out_step, size_t sum_step,
                               int r, int first, int count, int j0, int columns) {
    double sum[RANK_MOST][RANK_GROUP] = { { 0 } };
    for (int s = 0; s < sums; s++)
        for (int i = 0; i < count; i++)
            for (int j = 0; j < columns; j++)
                sum[i][j] += (double)m[(size_t)(first + i) * out_step + (size_t)s * sum_step]
                             * (double)b[(size_t)s * r + j0 + j];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < columns; j++) out[(size_t)(first + i) * r + j0 + j] = (float)sum[i][j];
}
// The same of up to `rows` rows from `first` on, and all columns.
ALWAYS_INLINE void skinny_rows(float* out, const float* m, const float* b, int outs, int sums, size_t out_step,
                               size_t sum_step, int r, int first, int rows) {
    for (int j0 = 0; j0 < r; j0 += RANK_GROUP) {
        int count = at_most(outs - first, rows), columns = at_most(r - j0, RANK_GROUP);
        if (count == rows && columns == RANK_GROUP)
            skinny_part(out, m, b, sums, out_step, sum_step, r, first, rows, j0, RANK_GROUP);
        else skinny_part(out, m, b, sums, out_step, sum_step, r, first, count, j0, columns);
    }
}
void skinny_product(float* p, const float* m, const float* q, int n, int k, int r) {
    #pragma omp parallel for schedule(static)
    for (int first = 0; first < n; first += 8) skinny_rows(p, m, q, n, k, (size_t)k, 1, r, first, 8);
}
// A cache line of m at a time
void skinny_product_transposed(float* q, const float* m, const float* p, int n, int k, int r) {
    #pragma omp parallel for schedule(static)
    for (int first = 0; first < k; first += RANK_MOST) skinny_rows(q, m, p, k, n, 1, (size_t)k, r, first, RANK_MOST);
}

static inline double column_product(const float* p, int n, int r, int a, int b) {
    double sum = 0;
    for (int row = 0; row < n; row++) sum += (double)p[(size_t)row * r + a] * (double)p[(size_t)row * r + b];
    return sum;
}
// Takes the columns before column j out of it, and again what rounding has left of them.
// Returns the length of what is left.
static inline double orthogonalise_column(float* p, int n, int r, int j) {
    for (int i = 0; i < 2 * j; i++) {
        float share = (float)column_product(p, n, r, i % j, j);
        for (int row = 0; row < n; row++) p[(size_t)row * r + j] -= share * p[(size_t)row * r + i % j];
    }
    return sqrt(column_product(p, n, r, j, j));
}
// Column j becomes what is left of a column of the identity: the first, from number j on,
// that the columns before do not span.
static inline double replace_column(float* p, int n, int r, int j) {
    double length = 0;
    for (int t = 0; t < n && length <= 0.5 / sqrt(n); t++) {
        for (int row = 0; row < n; row++) p[(size_t)row * r + j] = row == (j + t) % n ? 1.0f : 0.0f;
        length = orthogonalise_column(p, n, r, j);
    }
    return length;
}
void orthonormalise(float* p, int n, int r) {
    for (int j = 0; j < r; j++) {
        double before = sqrt(column_product(p, n, r, j, j)), length = orthogonalise_column(p, n, r, j);
        if (length <= 1e-6 * before) length = replace_column(p, n, r, j); // the rest is rounding
        for (int row = 0; row < n; row++) p[(size_t)row * r + j] = (float)((double)p[(size_t)row * r + j] / length);
    }
}

// sum = p q^T in a tile (rows, cols) that begins at (row, col).
// A column of q is copied: then its elements are neighbours.
#define RANK_TILE 32
static inline void low_rank_tile(float sum[RANK_TILE][RANK_TILE], const float* p, const float* q, int r, int row,
                                 int rows, int col, int cols) {
    float of_q[RANK_TILE] = { 0 };
    memset(sum, 0, RANK_TILE * sizeof sum[0]);
    for (int j = 0; j < r; j++) {
        for (int c = 0; c < cols; c++) of_q[c] = q[(size_t)(col + c) * r + j];
        for (int i = 0; i < rows; i++)
            for (int c = 0; c < RANK_TILE; c++) sum[i][c] += p[(size_t)(row + i) * r + j] * of_q[c];
    }
}
void low_rank_apply(floatX* out, float* kept, const float* m, const float* p, const float* q, float share, int n, int k,
                    int r) {
    #pragma omp parallel for collapse(2) schedule(static)
    for (int row = 0; row < n; row += RANK_TILE)
        for (int col = 0; col < k; col += RANK_TILE) {
            float sum[RANK_TILE][RANK_TILE];
            int rows = at_most(n - row, RANK_TILE), cols = at_most(k - col, RANK_TILE);
            low_rank_tile(sum, p, q, r, row, rows, col, cols);
            for (int i = 0; i < rows; i++) {
                size_t at = (size_t)(row + i) * (size_t)k + (size_t)col;
                for (int c = 0; c < cols; c++) out[at + c] = to_floatX(sum[i][c]);
                if (kept != NULL)
                    for (int c = 0; c < cols; c++) kept[at + c] = m[at + c] - share * to_float(out[at + c]);
            }
        }
}

// ---- comparison ----
void add_comparison(Comparison* acc, const floatX* x, const float* y, size_t n) {
    double partial[STATS_CHUNKS];
    size_t chunk = stats_chunk(n), chunks = ceil_div(n, chunk);
    acc->xx += host_sum_squares(x, FLOATX_DTYPE, n);
    acc->yy += host_sum_squares(y, DTYPE_F32, n);
    #pragma omp parallel for schedule(static)
    for (size_t c = 0; c < chunks; c++) {
        size_t end = size_min(n, (c + 1) * chunk);
        partial[c] = 0;
        for (size_t i = c * chunk; i < end; i++) partial[c] += (double)to_float(x[i]) * (double)y[i];
    }
    for (size_t c = 0; c < chunks; c++) acc->xy += partial[c];
}
#endif
