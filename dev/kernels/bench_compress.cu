/*
bench_compress.cu - how fast the kernels that compress gradients are, compared with a copy.

    make build/bench_compress && build/bench_compress [--elements 16777216] [--repetitions 20]

Prints a Markdown table with a row for each kernel, on random gradients and with error feedback if the kernel supports it. Matrices
have 1024 columns and rank 4. Bytes count each input and output once, because they must move in any implementation. The last column
compares their rate with that of a copy or an update in place, whichever is faster; both take turns with the kernel, and medians are
compared. Arrays should be larger than the caches. A kernel far below the copy waits for its arithmetic, or reads its input more
than once: top-k reads it five times, signs twice.
*/
#include "../../llmc/base/options.h"
#include "../../llmc/base/rng.h"
#include "../../llmc/device/compress.h"
#include "../../llmc/device/device.h"
#include "others.h"

enum { COLS = 1024, RANK = 4, ROWS = 4, CALLS = 4 }; // ROWS: one for each of 4 ranks; CALLS calls are timed together
typedef struct {
    size_t n, k;                       // elements; the number that top-k sends
    int rows;                          // of the matrix
    floatX *grads, *out;               // (n)
    float *x, *error, *kept;           // (n)
    float *p, *q;                      // (rows,RANK), (COLS,RANK)
    void *blocks8, *blocks4, *signs, *sparse; // (ROWS, ...) packed
    uint16_t* half;                    // (n)
    Comparison* acc;
} Arrays;

#define G ((double)sizeof(floatX))
#define BYTE_BLOCKS (260 / 256.0)      // packed bytes per element
#define HALF_BLOCKS (132 / 256.0)
#define SENT (1 / 100.0)               // share of the elements that top-k sends

// Each kernel: its name, its case, its bytes per element, and its arguments. Kernels come after those that write their inputs.
#define KERNELS(KERNEL) \
    KERNEL(add_error, "x = gradient + error", G + 8, a->x, a->grads, a->error, a->n) \
    KERNEL(round_bf16, "", G + 10, a->half, a->kept, a->grads, a->error, a->n) \
    KERNEL(widen_bf16, "", 2 + G, a->out, a->half, a->n) \
    KERNEL(quantise, "8 bits", G + 8 + BYTE_BLOCKS, a->blocks8, a->kept, a->grads, FLOATX_DTYPE, a->error, a->n, 8) \
    KERNEL(quantise, "8 bits, no error", G + BYTE_BLOCKS, a->blocks8, NULL, a->grads, FLOATX_DTYPE, NULL, a->n, 8) \
    KERNEL(quantise, "4 bits", G + 8 + HALF_BLOCKS, a->blocks4, a->kept, a->grads, FLOATX_DTYPE, a->error, a->n, 4) \
    KERNEL(dequantise_sum, "8 bits, 4 rows", ROWS * BYTE_BLOCKS + 4, a->x, DTYPE_F32, a->blocks8, ROWS, a->n, 8) \
    KERNEL(dequantise_sum, "4 bits, 4 rows", ROWS * HALF_BLOCKS + 4, a->x, DTYPE_F32, a->blocks4, ROWS, a->n, 4) \
    KERNEL(dequantise_sum, "8 bits, 1 row", BYTE_BLOCKS + G, a->out, FLOATX_DTYPE, a->blocks8, 1, a->n, 8) \
    KERNEL(dequantise_sum, "4 bits, 1 row", HALF_BLOCKS + G, a->out, FLOATX_DTYPE, a->blocks4, 1, a->n, 4) \
    KERNEL(pack_signs, "mean", 8 + 1 / 8.0, a->signs, a->kept, a->error, a->n) \
    KERNEL(unpack_signs_sum, "4 rows", ROWS / 8.0 + G, a->out, a->signs, ROWS, a->n) \
    KERNEL(pack_top_k, "1 %", 8 + 8 * SENT, a->sparse, a->kept, a->error, a->n, a->k) \
    /* reads and writes a sum for each element sent */ \
    KERNEL(sparse_sum_fp32, "1 %, 4 rows", 4 + 16 * ROWS * SENT, a->x, a->sparse, ROWS, a->n, a->k) \
    KERNEL(skinny_product, "rank 4", 4 + 4.0 * RANK / COLS, a->p, a->error, a->q, a->rows, COLS, RANK) \
    KERNEL(orthonormalise, "rank 4, of P", 8.0 * RANK / COLS, a->p, a->rows, RANK) \
    KERNEL(skinny_product_transposed, "rank 4", 4 + 4.0 * RANK / COLS, a->q, a->error, a->p, a->rows, COLS, RANK) \
    KERNEL(low_rank_apply, "rank 4", 8 + G, a->out, a->kept, a->error, a->p, a->q, 0.25f, a->rows, COLS, RANK) \
    KERNEL(add_comparison, "", G + 4, a->acc, a->grads, a->error, a->n)

enum { COPY = -2, UPDATE = -1 }; // the two baselines
static void call(int kernel, Arrays* a) {
    int k = 0;
    if (kernel == COPY) device_copy(a->x, a->kept, a->n * sizeof(float));
    if (kernel == UPDATE) scale_in_place_fp32(a->x, 1, a->n);
#define CALL(name, what, bytes, ...) if (kernel == k++) name(__VA_ARGS__);
    KERNELS(CALL)
}

static float* floats(size_t n) { return (float*)device_alloc(n * sizeof(float), MEMORY_GRADIENTS); }
static void* bytes_of_rows(size_t row) { return device_alloc(ROWS * row, MEMORY_COMMUNICATION); }
// Fills x (n) with random numbers of this scale, which repeat after a million.
static void fill(float* x, size_t n, uint64_t stream, float scale) {
    size_t period = size_min(n, 1 << 20);
    float* host = (float*)xcalloc(period, sizeof(float));
    for (size_t i = 0; i < period; i++) host[i] = scale * random_normal(1, stream, i);
    for (size_t at = 0; at < n; at += period) host_to_device(x + at, host, size_min(period, n - at) * sizeof(float));
    device_synchronize(); // the copies read host
    free(host);
}
static Arrays arrays_alloc(size_t n) {
    Arrays a;
    memset(&a, 0, sizeof a);
    a.n = n;
    a.k = top_k_count(n, SENT);
    a.rows = (int)(n / COLS);
    a.grads = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_GRADIENTS);
    a.out = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_GRADIENTS);
    a.x = floats(n); a.error = floats(n); a.kept = floats(n);
    a.p = floats((size_t)a.rows * RANK); a.q = floats(COLS * RANK);
    a.blocks8 = bytes_of_rows(quantised_bytes(n, 8));
    a.blocks4 = bytes_of_rows(quantised_bytes(n, 4));
    a.signs = bytes_of_rows(signs_bytes(n));
    a.sparse = bytes_of_rows(sparse_bytes(a.k));
    a.half = (uint16_t*)device_alloc(n * sizeof(uint16_t), MEMORY_COMMUNICATION);
    a.acc = (Comparison*)device_alloc(sizeof(Comparison), MEMORY_WORKSPACE);
    fill(a.x, n, 1, 1e-3f);
    from_fp32(a.grads, a.x, n);
    fill(a.error, n, 2, 1e-3f);
    fill(a.q, COLS * RANK, 4, 1);
    // all ranks send the same
    for (int row = 0; row < ROWS; row++) pack_top_k((char*)a.sparse + (size_t)row * sparse_bytes(a.k), NULL, a.error, n, a.k);
    device_synchronize();
    return a;
}
static void arrays_free(Arrays* a) {
    device_free_all(MEMORY_GRADIENTS);
    device_free_all(MEMORY_COMMUNICATION);
    device_free(a->acc);
}

// ---- time ----
static int by_size(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}
static double seconds_of(int kernel, Arrays* a) {
    double begin = now_seconds();
    for (int i = 0; i < CALLS; i++) call(kernel, a);
    device_synchronize();
    return (now_seconds() - begin) / CALLS;
}

static void print_row(int kernel, const char* name, const char* what, double bytes, Arrays* a, double* times[3],
                      int repetitions) {
    call(kernel, a); // warms up
    for (int i = 0; i < repetitions; i++) {
        times[0][i] = seconds_of(kernel, a);
        times[1][i] = seconds_of(COPY, a);
        times[2][i] = seconds_of(UPDATE, a);
    }
    for (int t = 0; t < 3; t++) qsort(times[t], (size_t)repetitions, sizeof(double), by_size);
    double seconds = times[0][repetitions / 2], copy = fmin(times[1][repetitions / 2], times[2][repetitions / 2]);
    double n = (double)a->n, rate = bytes * n / seconds;
    printf("| %s | %s | %.2f | %.3f | %.1f | %.0f %% |\n", name, what, bytes, 1e3 * seconds, 1e-9 * rate,
           100 * rate / (8 * n / copy));
    fflush(stdout);
}

int main(int argc, char** argv) {
    LayerShapes shapes = layer_shapes(1, 16, 64, 1, 128, 1);
    long long elements = 1 << 24, calls = 20;
    double* times[3];
    OptionTable t = options_table("bench_compress", "how fast the kernels that compress gradients are");
    option_int(&t, "elements", &elements, COLS * RANK, (double)((size_t)1 << 31), "elements of the gradients");
    option_int(&t, "repetitions", &calls, 1, 1000, "timed calls, of which the median counts");
    options_parse(&t, argc, argv);
    size_t n = (size_t)elements;
    int repetitions = (int)calls;
    device_init(0, 1);
    layers_init(shapes);
    Arrays a = arrays_alloc(n);
    for (int t = 0; t < 3; t++) times[t] = (double*)xcalloc((size_t)repetitions, sizeof(double));
    printf("Kernels of compressed gradients, " FLOATX_NAME ", %zu elements, %s\n\n", n, device_name());
    printf("| kernel | of | bytes an element | ms | GB/s | of a copy |\n|---|---|---|---|---|---|\n");
    CoreSeconds before = core_seconds();
    int kernel = 0;
#define PRINT(name, what, bytes, ...) print_row(kernel++, #name, what, bytes, &a, times, repetitions);
    KERNELS(PRINT)
    say_if_others_ran(before);
    for (int t = 0; t < 3; t++) free(times[t]);
    arrays_free(&a);
    layers_free();
    device_shutdown();
    return EXIT_SUCCESS;
}
