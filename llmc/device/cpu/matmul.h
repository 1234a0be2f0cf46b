/*
cpu/matmul.h - linear layers, their matrix products from oneDNN.

A product goes one of three ways, whichever was measured to be fastest for it:
  primitive  a matmul primitive compiled by oneDNN for one shape: everything in bf16 where the CPU multiplies bf16,
             and forward in fp32, where w is read transposed
  tiles      fp32: each thread computes one tile of the result with dnnl_sgemm, which stays in the thread that calls it
             when that is inside a parallel region
  panels     what a tile does where rows of b lie so far apart that reading them in place is slow
  copies     16 bits without such a CPU: operands are widened to fp32, piece by piece, and multiplied by dnnl_sgemm
oneDNN decides the order in which a product's terms are summed. It is the same from run to run, and with AVX-512 it was
the same for every number of threads that we tried; with AVX2 it is not.

Global state: the engine, the stream and the cache of primitives below. oneDNN allocates when a primitive is created,
and keeps scratch for packed operands per thread, which grows to what the largest product needs.
*/
#ifndef LLMC_CPU_MATMUL_H
#define LLMC_CPU_MATMUL_H
#include "../weight_chunks.h"
#include "math.h"
#include "workspace.h"
#include <oneapi/dnnl/dnnl.h>

// out (M,N) set or += a b + bias, with a (M,K), or (K,M) where a_transposed; b (K,N), or (N,K) where b_transposed.
// All ints, so that two shapes can be compared as memory.
typedef struct { int a_transposed, b_transposed, M, N, K, has_bias, adds, out_type; } ProductShape;
typedef struct { ProductShape shape; void* out; const floatX *a, *b, *bias; } Product;

static void matmul_check(dnnl_status_t status, const char* what) {
    invariant(status == dnnl_success, "oneDNN failed at %s (status %d)", what, (int)status);
}
static inline int int_min(int a, int b) { return a < b ? a : b; }

// ---- where oneDNN 2, which describes memory and operations by structs, and oneDNN 3, with handles, differ ----
typedef dnnl_memory_desc_t MatrixDesc;
#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t matrix_describe(MatrixDesc* d, const dnnl_dim_t* dims, dnnl_data_type_t type,
                                     const dnnl_dim_t* strides) {
    return dnnl_memory_desc_create_with_strides(d, 2, dims, type, strides);
}
static void matrix_desc_free(MatrixDesc* d) { dnnl_memory_desc_destroy(*d); }
static dnnl_status_t matrix_wrap(dnnl_memory_t* m, const MatrixDesc* d, dnnl_engine_t engine) {
    return dnnl_memory_create(m, *d, engine, DNNL_MEMORY_NONE);
}
static dnnl_status_t post_add(dnnl_post_ops_t post) {
    return dnnl_post_ops_append_sum(post, 1.0f, 0, dnnl_data_type_undef);
}
static dnnl_status_t product_describe(dnnl_primitive_desc_t* d, const MatrixDesc* a, const MatrixDesc* b,
                                      const MatrixDesc* bias, const MatrixDesc* out, dnnl_primitive_attr_t attributes,
                                      dnnl_engine_t engine) {
    return dnnl_matmul_primitive_desc_create(d, engine, *a, *b, bias != NULL ? *bias : NULL, *out, attributes);
}
#else
static dnnl_status_t matrix_describe(MatrixDesc* d, const dnnl_dim_t* dims, dnnl_data_type_t type,
                                     const dnnl_dim_t* strides) {
    return dnnl_memory_desc_init_by_strides(d, 2, dims, type, strides);
}
static void matrix_desc_free(MatrixDesc* d) { (void)d; }
static dnnl_status_t matrix_wrap(dnnl_memory_t* m, const MatrixDesc* d, dnnl_engine_t engine) {
    return dnnl_memory_create(m, d, engine, DNNL_MEMORY_NONE);
}
static dnnl_status_t post_add(dnnl_post_ops_t post) { return dnnl_post_ops_append_sum(post, 1.0f); }
static dnnl_status_t product_describe(dnnl_primitive_desc_t* d, const MatrixDesc* a, const MatrixDesc* b,
                                      const MatrixDesc* bias, const MatrixDesc* out, dnnl_primitive_attr_t attributes,
                                      dnnl_engine_t engine) {
    dnnl_matmul_desc_t operation;
    dnnl_status_t status = dnnl_matmul_desc_init(&operation, a, b, bias, out);
    return status == dnnl_success ? dnnl_primitive_desc_create(d, &operation, attributes, engine, NULL) : status;
}
#endif

// ---- primitives ----
// Creating one costs about as much as running it, so those used last are kept. A slot without one: oneDNN is not fast
// there.
typedef struct {
    ProductShape shape;
    uint64_t last_use; // 0: empty
    dnnl_primitive_t primitive;
    dnnl_memory_t memories[4]; // of a, b, out and bias (NULL: none): they wrap whatever memory a call brings
} MatmulSlot;
#define MATMUL_SLOTS 128
static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    bool reads_in_place; // sgemm does not copy b first
    uint64_t uses;
    MatmulSlot slots[MATMUL_SLOTS];
} cpu_matmul;

static void matmul_slot_clear(MatmulSlot* s) {
    if (s->primitive != NULL) dnnl_primitive_destroy(s->primitive);
    for (int i = 0; i < 4 && s->memories[i] != NULL; i++) dnnl_memory_destroy(s->memories[i]);
    memset(s, 0, sizeof *s);
}

static MatrixDesc matmul_describe(int rows, int cols, int transposed, int dtype) {
    dnnl_dims_t dims = { rows, cols }, strides = { transposed ? 1 : cols, transposed ? rows : 1 };
    dnnl_data_type_t type = dtype == DTYPE_F32 ? dnnl_f32 : dtype == DTYPE_BF16 ? dnnl_bf16 : dnnl_f16;
    MatrixDesc d;
    matmul_check(matrix_describe(&d, dims, type, strides), "describing a matrix");
    return d;
}

// The fast kernels are those called brgemm. The rest, plain C or a GEMM with conversions around it,
// lose to the other ways.
static bool matmul_is_fast(const_dnnl_primitive_desc_t d) {
    const char* name = "";
    matmul_check(dnnl_primitive_desc_query(d, dnnl_query_impl_info_str, 0, (void*)&name), "naming a kernel");
    return strncmp(name, "brg", 3) == 0;
}

// Compiles a slot's shape, if there is a fast kernel for it.
static void matmul_slot_fill(MatmulSlot* s) {
    ProductShape p = s->shape;
    MatrixDesc descs[4] = { matmul_describe(p.M, p.K, p.a_transposed, FLOATX_DTYPE),
                            matmul_describe(p.K, p.N, p.b_transposed, FLOATX_DTYPE),
                            matmul_describe(p.M, p.N, 0, p.out_type), matmul_describe(1, p.N, 0, FLOATX_DTYPE) };
    const MatrixDesc* bias = p.has_bias ? &descs[3] : NULL;
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t post;
    matmul_check(dnnl_primitive_attr_create(&attributes), "creating attributes");
    matmul_check(dnnl_post_ops_create(&post), "creating post-operations");
    if (p.adds) matmul_check(post_add(post), "adding to a product");
    matmul_check(dnnl_primitive_attr_set_post_ops(attributes, post), "setting post-operations");
    dnnl_primitive_desc_t d = NULL;
    if (product_describe(&d, &descs[0], &descs[1], bias, &descs[2], attributes, cpu_matmul.engine) == dnnl_success) {
        if (matmul_is_fast(d)) {
            matmul_check(dnnl_primitive_create(&s->primitive, d), "compiling a product");
            for (int i = 0; i < (bias ? 4 : 3); i++)
                matmul_check(matrix_wrap(&s->memories[i], &descs[i], cpu_matmul.engine), "wrapping a matrix");
        }
        dnnl_primitive_desc_destroy(d);
    }
    dnnl_post_ops_destroy(post);
    dnnl_primitive_attr_destroy(attributes);
    for (int i = 0; i < 4; i++) matrix_desc_free(&descs[i]);
}

// Returns the slot of a shape; if there is none yet it takes the place of the one not used for longest.
static MatmulSlot* matmul_slot(ProductShape shape) {
    MatmulSlot* oldest = &cpu_matmul.slots[0];
    MatmulSlot* found = NULL;
    for (int i = 0; i < MATMUL_SLOTS && found == NULL; i++) {
        MatmulSlot* s = &cpu_matmul.slots[i];
        if (s->last_use > 0 && memcmp(&s->shape, &shape, sizeof shape) == 0) found = s;
        if (s->last_use < oldest->last_use) oldest = s;
    }
    if (found == NULL) {
        found = oldest;
        matmul_slot_clear(found);
        found->shape = shape;
        matmul_slot_fill(found);
    }
    found->last_use = ++cpu_matmul.uses;
    return found;
}

// Returns false, and does nothing, if there is no fast kernel for this product.
static bool product_by_primitive(Product p) {
    MatmulSlot* s = matmul_slot(p.shape);
    if (s->primitive == NULL) return false;
    dnnl_memory_t* m = s->memories;
    dnnl_exec_arg_t arguments[4] = {
        { DNNL_ARG_SRC, m[0] }, { DNNL_ARG_WEIGHTS, m[1] }, { DNNL_ARG_DST, m[2] }, { DNNL_ARG_BIAS, m[3] }
    };
    const void* const data[4] = { p.a, p.b, p.out, p.bias };
    int count = m[3] != NULL ? 4 : 3;
    for (int i = 0; i < count; i++) matmul_check(dnnl_memory_set_data_handle(m[i], (void*)data[i]), "passing a matrix");
    matmul_check(dnnl_primitive_execute(s->primitive, cpu_matmul.stream, count, arguments), "a matrix product");
    matmul_check(dnnl_stream_wait(cpu_matmul.stream), "a matrix product");
    return true;
}

// ---- panels ----
// Without AVX-512, oneDNN's sgemm reads b in place where a has few rows. Rows of b that are a multiple
// of 1024 bytes apart share four sets of a first-level cache of 32 KB (64 sets), whose 32 lines the product needs again
// and again: it takes up to twice as long. So pieces of b are copied into rows that are not so far apart.
#define PANEL_COLS 96
#define PANEL_STRIDE (PANEL_COLS + 16)
#define PANEL_DEPTH 384 // 168 KB a piece, for the second-level cache
#define CONFLICT_FLOATS (1024 / 4)

static bool product_wants_panels(ProductShape s) {
    bool conflicts = !s.a_transposed && !s.b_transposed && s.N % CONFLICT_FLOATS == 0;
    return conflicts && cpu_matmul.reads_in_place && cpu_layers.per_thread_floats >= PANEL_DEPTH * PANEL_STRIDE;
}
// Scratch of a thread. Rows of b have C or 4C floats.
static inline size_t matmul_panel_floats(int C) {
    return 4 * C % CONFLICT_FLOATS == 0 ? PANEL_DEPTH * PANEL_STRIDE : 0;
}

// out (rows, cols), whose rows are N apart, set or += a (rows, K) b (K, cols), whose rows are N apart
static void panel_product(float* out, const float* a, const float* b, int rows, int cols, ProductShape s) {
    float* panel = thread_scratch();
    for (int n = 0; n < cols; n += PANEL_COLS) {
        int width = int_min(PANEL_COLS, cols - n);
        for (int k = 0; k < s.K; k += PANEL_DEPTH) {
            int depth = int_min(PANEL_DEPTH, s.K - k);
            for (int i = 0; i < depth; i++)
                memcpy(panel + (size_t)i * PANEL_STRIDE, b + (size_t)(k + i) * s.N + n, (size_t)width * sizeof(float));
            matmul_check(dnnl_sgemm('N', 'N', rows, width, depth, 1.0f, a + k, s.K, panel, PANEL_STRIDE,
                                    k > 0 || s.adds ? 1.0f : 0.0f, out + n, s.N), "sgemm");
        }
    }
}

// ---- tiles ----
// fp32 product of one tile: rows [m, m+rows) and columns [n, n+cols) of out
static void product_tile(Product p, int m, int n, int rows, int cols) {
    ProductShape s = p.shape;
    int lda = s.a_transposed ? s.M : s.K, ldb = s.b_transposed ? s.K : s.N;
    const float* a = (const float*)p.a + (s.a_transposed ? (size_t)m : (size_t)m * lda);
    const float* b = (const float*)p.b + (s.b_transposed ? (size_t)n * ldb : (size_t)n);
    float* out = (float*)p.out + (size_t)m * s.N + n;
    if (product_wants_panels(s)) panel_product(out, a, b, rows, cols, s);
    else
        matmul_check(dnnl_sgemm(s.a_transposed ? 'T' : 'N', s.b_transposed ? 'T' : 'N', rows, cols, s.K, 1.0f, a, lda,
                                b, ldb, s.adds ? 1.0f : 0.0f, out, s.N),
                     "sgemm");
    if (!s.has_bias) return;
    for (int r = 0; r < rows; r++) {
        float* o = out + (size_t)r * s.N;
        #pragma omp simd
        for (int c = 0; c < cols; c++) o[c] += to_float(p.bias[n + c]);
    }
}

// oneDNN copies a transposed b before it multiplies. A small part of a tile stays in the second-level cache until its
// bias is added.
#define PART_ROWS 128
#define PART_COLS 192
static void product_tile_parts(Product p, int m, int n, int rows, int cols) {
    bool parts = p.shape.b_transposed && cpu_matmul.reads_in_place;
    int row_step = parts ? PART_ROWS : rows, col_step = parts ? PART_COLS : cols;
    for (int c = 0; c < cols; c += col_step) {
        for (int r = 0; r < rows; r += row_step) {
            product_tile(p, m + r, n + c, int_min(row_step, rows - r), int_min(col_step, cols - c));
        }
    }
}

// A grid of as many tiles as there are threads, as square as can be: what a tile reads grows with its two sides.
static void product_by_tiles(Product p) {
    int M = p.shape.M, N = p.shape.N, threads = omp_get_max_threads(), down = 1;
    for (int d = 2; d <= threads; d++) {
        if (threads % d == 0 && M / d + N / (threads / d) < M / down + N / (threads / down)) down = d;
    }
    const size_t vector = 16; // floats of the widest vector register
    int rows = (int)round_up(ceil_div((size_t)M, (size_t)down), vector);
    int cols = (int)round_up(ceil_div((size_t)N, (size_t)(threads / down)), vector);
    #pragma omp parallel for collapse(2) schedule(static)
    for (int m = 0; m < M; m += rows) {
        for (int n = 0; n < N; n += cols) product_tile_parts(p, m, n, int_min(rows, M - m), int_min(cols, N - n));
    }
}

// ---- copies ----
#define MATMUL_COPY 1024               // operands are widened in pieces of this many rows and columns: 4 MB each
#define COPY_STRIDE (MATMUL_COPY + 16) // floats from row to row of a piece; see CONFLICT_FLOATS

// dst (rows, cols), whose rows are COPY_STRIDE apart, = src, whose rows are `stride` elements apart
static void widen_range(float* dst, const floatX* src, int rows, int cols, int stride) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++)
        convert_slice(dst + (size_t)r * COPY_STRIDE, DTYPE_F32, src + (size_t)r * stride, FLOATX_DTYPE, (size_t)cols);
}

// Rows [m, m+rows) and columns [n, n+cols) of out set or += sum (rows, cols) + bias, rounded once.
static void narrow_piece(Product p, float* sum, int m, int n, int rows, int cols) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        float* x = sum + (size_t)r * cols;
        size_t begin = (size_t)(m + r) * p.shape.N + n;
        floatX* o = (floatX*)p.out + begin;
        float* o_fp32 = (float*)p.out + begin; // one of the two is meant
        bool is_fp32 = p.shape.out_type == DTYPE_F32;
        if (p.shape.has_bias) {
            #pragma omp simd
            for (int c = 0; c < cols; c++) x[c] += to_float(p.bias[n + c]);
        }
        if (p.shape.adds) {
            #pragma omp simd
            for (int c = 0; c < cols; c++) x[c] += is_fp32 ? o_fp32[c] : to_float(o[c]);
        }
        convert_slice(is_fp32 ? (void*)o_fp32 : (void*)o, (DType)p.shape.out_type, x, DTYPE_F32, (size_t)cols);
    }
}

static void product_by_copies(Product p) {
    ProductShape s = p.shape;
    int lda = s.a_transposed ? s.M : s.K, ldb = s.b_transposed ? s.K : s.N;
    float *a = cpu_layers.shared, *b = a + MATMUL_COPY * COPY_STRIDE, *sum = b + MATMUL_COPY * COPY_STRIDE;
    for (int m = 0; m < s.M; m += MATMUL_COPY) {
        for (int n = 0; n < s.N; n += MATMUL_COPY) {
            int rows = int_min(MATMUL_COPY, s.M - m), cols = int_min(MATMUL_COPY, s.N - n);
            for (int k = 0; k < s.K; k += MATMUL_COPY) {
                int depth = int_min(MATMUL_COPY, s.K - k);
                if (s.a_transposed) widen_range(a, p.a + (size_t)k * lda + m, depth, rows, lda);
                else widen_range(a, p.a + (size_t)m * lda + k, rows, depth, lda);
                if (s.b_transposed) widen_range(b, p.b + (size_t)n * ldb + k, cols, depth, ldb);
                else widen_range(b, p.b + (size_t)k * ldb + n, depth, cols, ldb);
                matmul_check(dnnl_sgemm(s.a_transposed ? 'T' : 'N', s.b_transposed ? 'T' : 'N', rows, cols, depth, 1.0f,
                                        a, COPY_STRIDE, b, COPY_STRIDE, k == 0 ? 0.0f : 1.0f, sum, cols),
                             "sgemm");
            }
            narrow_piece(p, sum, m, n, rows, cols);
        }
    }
}

// ---- which way ----
#define MATMUL_ROW_UNIT 16
// Forward (b transposed) with a number of rows that no training batch has, such as a sequence that grows token by token
// while text is sampled, would compile a primitive for every length.
static bool product_wants_primitive(ProductShape s) {
    bool forward = s.b_transposed != 0;
    return FLOATX_DTYPE != DTYPE_F16 && (FLOATX_DTYPE == DTYPE_BF16 || forward)
           && !(forward && s.M % MATMUL_ROW_UNIT != 0);
}
static void product(Product p) {
    if (product_wants_primitive(p.shape) && product_by_primitive(p)) return;
    if (FLOATX_DTYPE == DTYPE_F32) product_by_tiles(p);
    else product_by_copies(p);
}

static void matmul_init(void) {
    matmul_check(dnnl_engine_create(&cpu_matmul.engine, dnnl_cpu, 0), "creating an engine for the CPU");
    matmul_check(dnnl_stream_create(&cpu_matmul.stream, cpu_matmul.engine, dnnl_stream_default_flags),
                 "creating a stream");
    cpu_matmul.reads_in_place = (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) != dnnl_cpu_isa_avx512_core;
}
static void matmul_free(void) {
    for (int i = 0; i < MATMUL_SLOTS; i++) matmul_slot_clear(&cpu_matmul.slots[i]);
    if (cpu_matmul.stream != NULL) dnnl_stream_destroy(cpu_matmul.stream);
    if (cpu_matmul.engine != NULL) dnnl_engine_destroy(cpu_matmul.engine);
    memset(&cpu_matmul, 0, sizeof cpu_matmul);
}
static const char* matmul_method(void) {
    ProductShape example = { 0, 1, 64, 64, 64, 0, 0, FLOATX_DTYPE };
    bool compiled = product_wants_primitive(example) && matmul_slot(example)->primitive != NULL;
    if (FLOATX_DTYPE == DTYPE_F32) return compiled ? "fp32 matmul and sgemm" : "sgemm";
    return compiled ? FLOATX_NAME " matmul" : "sgemm on fp32 copies";
}

// ---- the layers ----
// Rows are taken this many at a time,
// so that what follows a product finds its result in the cache.
static inline int matmul_rows(int threads) { return 256 * threads; }

// Scratch where floatX has 16 bits: the three pieces of product_by_copies, and (rows, 4C)
// sums to be multiplied by gelu'.
static inline size_t matmul_copies_floats(void) { return (size_t)MATMUL_COPY * (2 * COPY_STRIDE + MATMUL_COPY); }
static inline size_t matmul_scratch_floats(int threads, int N, int C) {
    return NEEDS_MASTER ? matmul_copies_floats() + (size_t)int_min(matmul_rows(threads), N) * 4 * (size_t)C : 0;
}

// out (N,OC) = inp (N,C) w^T (OC,C) + bias: the whole units of rows, which a primitive may do, and the rest
static void linear_rows(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    int rest = N % MATMUL_ROW_UNIT, whole = N - rest;
    Product p = { { 0, 1, whole, OC, C, bias != NULL, 0, FLOATX_DTYPE }, out, inp, w, bias };
    if (whole > 0) product(p);
    p.shape.M = rest;
    p.out = out + (size_t)whole * OC;
    p.a = inp + (size_t)whole * C;
    if (rest > 0) product(p);
}

void matmul_forward(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    int step = matmul_rows(cpu_layers.threads);
    for (int i = 0; i < N; i += step) {
        linear_rows(out + (size_t)i * OC, inp + (size_t)i * C, w, bias, int_min(step, N - i), C, OC);
    }
}

void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* w, const floatX* bias, int N, int C,
                         int OC) {
    int step = matmul_rows(cpu_layers.threads);
    for (int i = 0; i < N; i += step) {
        int rows = int_min(step, N - i);
        floatX *o = out + (size_t)i * OC, *p = pre + (size_t)i * OC;
        linear_rows(p, inp + (size_t)i * C, w, bias, rows, C, OC);
        #pragma omp parallel for simd schedule(static)
        for (size_t k = 0; k < (size_t)rows * OC; k++) o[k] = to_floatX(gelu_f32(to_float(p[k])));
    }
}

// forward: out = inp w^T, so dinp = dout w
void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* w, int N, int C, int OC) {
    int step = matmul_rows(cpu_layers.threads);
    for (int i = 0; i < N; i += step) {
        ProductShape shape = { 0, 0, int_min(step, N - i), C, OC, 0, 0, FLOATX_DTYPE };
        Product p = { shape, dinp + (size_t)i * C, dout + (size_t)i * OC, w, NULL };
        product(p);
    }
}

// forward: out = gelu(pre) w^T, so dpre = (dout w) * gelu'(pre). The product stays in fp32 until it is multiplied.
void matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* w, const floatX* pre, int N, int C,
                                int OC) {
    int step = matmul_rows(cpu_layers.threads);
    for (int i = 0; i < N; i += step) {
        int rows = int_min(step, N - i);
        floatX* d = dinp + (size_t)i * C;
        const floatX* x = pre + (size_t)i * C;
        float* sum = NEEDS_MASTER ? cpu_layers.shared + matmul_copies_floats() : (float*)d;
        Product p = { { 0, 0, rows, C, OC, 0, 0, DTYPE_F32 }, sum, dout + (size_t)i * OC, w, NULL };
        product(p);
        #pragma omp parallel for simd schedule(static)
        for (size_t k = 0; k < (size_t)rows * C; k++) d[k] = to_floatX(sum[k] * gelu_derivative_f32(to_float(x[k])));
    }
}

#define BIAS_STRIP 256 // columns that a thread sums at a time
#define BIAS_ROWS 64   // rows that are summed on their own first, so that rounding errors grow with N/64 + 64, not N

// Columns [begin, end) of dbias set or += sum over rows of dout (N,OC).
static void bias_backward_strip(floatX* dbias, const floatX* dout, int begin, int end, int N, int OC, GradMode mode) {
    float total[BIAS_STRIP] = { 0 };
    int width = end - begin;
    for (int block = 0; block < N; block += BIAS_ROWS) {
        float sum[BIAS_STRIP] = { 0 };
        for (int i = block; i < int_min(N, block + BIAS_ROWS); i++) {
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
void matmul_backward_weight(floatX* dw, floatX* dbias, const floatX* dout, const floatX* inp, int N, int C, int OC,
                            GradMode mode) {
    if (N == 0) { weight_without_rows(dw, (size_t)OC * (size_t)C * sizeof *dw, dbias, OC, mode); return; }
    Product p = { { 1, 0, OC, C, N, 0, mode == GRAD_ADD, FLOATX_DTYPE }, dw, dout, inp, NULL };
    product(p);
    if (dbias == NULL) return;
    #pragma omp parallel for schedule(static)
    for (int begin = 0; begin < OC; begin += BIAS_STRIP) {
        bias_backward_strip(dbias, dout, begin, int_min(begin + BIAS_STRIP, OC), N, OC, mode);
    }
}

void matmul_backward_weight_fp32(float* dw, const floatX* dout, const floatX* inp, int N, int C, int OC,
                                 GradMode mode) {
    if (N == 0) { weight_without_rows(dw, (size_t)OC * (size_t)C * sizeof *dw, NULL, OC, mode); return; }
    Product p = { { 1, 0, OC, C, N, 0, mode == GRAD_ADD, DTYPE_F32 }, dw, dout, inp, NULL };
    product(p);
}
void matmul_backward_weight_chunk(floatX* dw, const floatX* dout, const floatX* inp, int row, int n, int N, int C,
                                  int OC, GradMode mode) {
    weight_add_chunk(cpu_layers.weight_sums, dw, dout, inp, row, n, N, C, OC, mode);
}
#endif
