/* cpu/matmul.h - linear layers, their matrix products from oneDNN. Included by cpu/layers.h. */
#ifndef LLMC_CPU_MATMUL_H
#define LLMC_CPU_MATMUL_H

#define MATMUL_TILE 1024 // 16-bit operands are multiplied as fp32 copies of tiles of this many rows and columns

static inline size_t matmul_scratch_floats(void) { return NEEDS_MASTER ? 3 * (size_t)MATMUL_TILE * MATMUL_TILE : 0; }
static void matmul_init(void) {}
static void matmul_free(void) {}
static const char* matmul_method(void) { return NEEDS_MASTER ? "sgemm on fp32 copies" : "sgemm"; }

static void matmul_check(dnnl_status_t status, const char* what) {
    require(status == dnnl_success, "oneDNN failed at %s (status %d)", what, (int)status);
}

// dst (rows, cols) contiguous = src, whose rows are `stride` elements apart
static void widen_tile(float* dst, const floatX* src, int rows, int cols, size_t stride) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        #pragma omp simd
        for (int c = 0; c < cols; c++) dst[(size_t)r * cols + c] = to_float(src[(size_t)r * stride + c]);
    }
}

// out (M,N) set or += a b, with a (M,K), or (K,M) if transpose_a is 'T', and b (K,N), or (N,K) if transpose_b is 'T'
static void matrix_product(floatX* out, char transpose_a, char transpose_b, const floatX* a, const floatX* b, int M, int N, int K, GradMode mode) {
    int lda = transpose_a == 'T' ? M : K, ldb = transpose_b == 'T' ? K : N;
    if (!NEEDS_MASTER) {
        matmul_check(dnnl_sgemm(transpose_a, transpose_b, M, N, K, 1.0f, (const float*)a, lda, (const float*)b, ldb,
                                mode == GRAD_ADD ? 1.0f : 0.0f, (float*)out, N), "sgemm");
        return;
    }
    const int tile = MATMUL_TILE;
    float *ta = cpu_layers.shared, *tb = ta + (size_t)tile * tile, *sum = tb + (size_t)tile * tile;
    for (int m = 0; m < M; m += tile) {
        for (int n = 0; n < N; n += tile) {
            int rows = M - m < tile ? M - m : tile, cols = N - n < tile ? N - n : tile;
            for (int k = 0; k < K; k += tile) {
                int depth = K - k < tile ? K - k : tile;
                if (transpose_a == 'T') widen_tile(ta, a + (size_t)k * lda + m, depth, rows, lda);
                else widen_tile(ta, a + (size_t)m * lda + k, rows, depth, lda);
                if (transpose_b == 'T') widen_tile(tb, b + (size_t)n * ldb + k, cols, depth, ldb);
                else widen_tile(tb, b + (size_t)k * ldb + n, depth, cols, ldb);
                matmul_check(dnnl_sgemm(transpose_a, transpose_b, rows, cols, depth, 1.0f, ta, transpose_a == 'T' ? rows : depth,
                                        tb, transpose_b == 'T' ? depth : cols, k == 0 ? 0.0f : 1.0f, sum, cols), "sgemm");
            }
            #pragma omp parallel for schedule(static)
            for (int r = 0; r < rows; r++) {
                floatX* o = out + (size_t)(m + r) * N + n;
                const float* s = sum + (size_t)r * cols;
                #pragma omp simd
                for (int c = 0; c < cols; c++) o[c] = to_floatX(mode == GRAD_ADD ? to_float(o[c]) + s[c] : s[c]);
            }
        }
    }
}

void matmul_forward(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    matrix_product(out, 'N', 'T', inp, w, N, OC, C, GRAD_SET);
    if (bias == NULL) return;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < N; i++) {
        floatX* o = out + (size_t)i * OC;
        #pragma omp simd
        for (int c = 0; c < OC; c++) o[c] = to_floatX(to_float(o[c]) + to_float(bias[c]));
    }
}

void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    matrix_product(pre, 'N', 'T', inp, w, N, OC, C, GRAD_SET);
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < N; i++) {
        floatX *o = out + (size_t)i * OC, *p = pre + (size_t)i * OC;
        #pragma omp simd
        for (int c = 0; c < OC; c++) {
            p[c] = to_floatX(to_float(p[c]) + to_float(bias[c]));
            o[c] = to_floatX(gelu_f32(to_float(p[c])));
        }
    }
}

// forward: out = inp w^T, so dinp = dout w
void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* w, int N, int C, int OC) {
    matrix_product(dinp, 'N', 'N', dout, w, N, C, OC, GRAD_SET);
}

// forward: out = gelu(pre) w^T, so dpre = (dout w) * gelu'(pre)
void matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* w, const floatX* pre, int N, int C, int OC) {
    matrix_product(dinp, 'N', 'N', dout, w, N, C, OC, GRAD_SET);
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < N; i++) {
        floatX* d = dinp + (size_t)i * C;
        const floatX* p = pre + (size_t)i * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) d[c] = to_floatX(to_float(d[c]) * gelu_derivative_f32(to_float(p[c])));
    }
}

#define BIAS_STRIP 64 // columns that a thread sums at a time
#define BIAS_ROWS 64  // rows that are summed on their own first, so that rounding errors grow with N/64 + 64, not N

// Columns [begin, end) of dbias set or += sum over rows of dout (N,OC).
static void bias_backward_strip(floatX* dbias, const floatX* dout, int begin, int end, int N, int OC, GradMode mode) {
    float total[BIAS_STRIP] = { 0 };
    int width = end - begin;
    for (int block = 0; block < N; block += BIAS_ROWS) {
        float sum[BIAS_STRIP] = { 0 };
        for (int i = block; i < N && i < block + BIAS_ROWS; i++) {
            const floatX* d = dout + (size_t)i * OC + begin;
            #pragma omp simd
            for (int c = 0; c < width; c++) sum[c] += to_float(d[c]);
        }
        for (int c = 0; c < width; c++) total[c] += sum[c];
    }
    dbias += begin;
    for (int c = 0; c < width; c++) dbias[c] = to_floatX(mode == GRAD_ADD ? to_float(dbias[c]) + total[c] : total[c]);
}

// forward: out = inp w^T + bias, so dw = dout^T inp and dbias = the column sums of dout
void matmul_backward_weight(floatX* dw, floatX* dbias, const floatX* dout, const floatX* inp, int N, int C, int OC, GradMode mode) {
    matrix_product(dw, 'T', 'N', dout, inp, OC, C, N, mode);
    if (dbias == NULL) return;
    #pragma omp parallel for schedule(static)
    for (int begin = 0; begin < OC; begin += BIAS_STRIP) {
        bias_backward_strip(dbias, dout, begin, begin + BIAS_STRIP < OC ? begin + BIAS_STRIP : OC, N, OC, mode);
    }
}
#endif
