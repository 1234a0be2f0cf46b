/*
peak.c - this machine's peak rates, to compare training with: GFLOP/s of oneDNN's 2048-cubed matrix product in fp32, and in
bf16 where the processor has instructions for it (else 0), and GB/s of a copy, counting both read and write. Prints
"sgemm X", "bf16 X", "copy X", or with an argument only the line of that name. The best of several tries counts, because
other programs can only slow a try down.
*/
#include "../../llmc/device/layers.h"

#define SIZE 2048
#define TRIES 15
#define COPY_BYTES ((size_t)256 << 20)

static void *inputs[2], *output; // of what is measured
static void allocate(size_t bytes) {
    for (int i = 0; i < 2; i++) inputs[i] = xcalloc(bytes, 1);
    output = xcalloc(bytes, 1);
}

// Seconds of the fastest of TRIES calls. Frees what is allocated.
static double best_seconds(void (*work)(void)) {
    double best = INFINITY;
    work(); // the first call generates the kernel
    for (int i = 0; i < TRIES; i++) {
        double start = now_seconds();
        work();
        best = fmin(best, now_seconds() - start);
    }
    free(inputs[0]); free(inputs[1]); free(output);
    return best;
}
static float element(int i) { return (float)(i % 251) / 251 - 0.5f; }

static void run_sgemm(void) {
    matmul_check(dnnl_sgemm('N', 'N', SIZE, SIZE, SIZE, 1, inputs[0], SIZE, inputs[1], SIZE, 0, output, SIZE), "sgemm");
}
static double sgemm_gflops(void) {
    allocate(SIZE * SIZE * sizeof(float));
    for (int k = 0; k < 2; k++) for (int i = 0; i < SIZE * SIZE; i++) ((float*)inputs[k])[i] = element(i);
    return 2e-9 * SIZE * SIZE * SIZE / best_seconds(run_sgemm);
}

static dnnl_primitive_t bf16_product;
static dnnl_exec_arg_t arguments[3] = { { DNNL_ARG_SRC, NULL }, { DNNL_ARG_WEIGHTS, NULL }, { DNNL_ARG_DST, NULL } };
static void run_bf16(void) {
    matmul_check(dnnl_primitive_execute(bf16_product, cpu_matmul.stream, 3, arguments), "a product");
    matmul_check(dnnl_stream_wait(cpu_matmul.stream), "a product");
}
// oneDNN multiplies bf16 on any processor with AVX-512, but emulates it where the bf16 instructions are missing.
static bool has_bf16(void) { return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16; }

// A matrix product of bf16 into bf16, row-major, with what llmc/device/cpu/matmul.h makes its own of.
static double bf16_gflops(void) {
    dnnl_primitive_desc_t description;
    if (!has_bf16()) return 0;
    allocate(SIZE * SIZE * sizeof(uint16_t));
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < SIZE * SIZE; i++) ((uint16_t*)inputs[k])[i] = bf16_bits_from_float(element(i));
    matmul_check(dnnl_engine_create(&cpu_matmul.engine, dnnl_cpu, 0), "an engine");
    matmul_check(dnnl_stream_create(&cpu_matmul.stream, cpu_matmul.engine, dnnl_stream_default_flags), "a stream");
    MatrixDesc matrix = matmul_describe(SIZE, SIZE, 0, DTYPE_BF16);
    for (int i = 0; i < 3; i++) {
        matmul_check(matrix_wrap(&arguments[i].memory, &matrix, cpu_matmul.engine), "a matrix");
        matmul_check(dnnl_memory_set_data_handle(arguments[i].memory, i < 2 ? inputs[i] : output), "a matrix");
    }
    matmul_check(product_describe(&description, &matrix, &matrix, NULL, &matrix, NULL, cpu_matmul.engine), "a product");
    matmul_check(dnnl_primitive_create(&bf16_product, description), "a product");
    return 2e-9 * SIZE * SIZE * SIZE / best_seconds(run_bf16);
}

static void run_copy(void) {
    #pragma omp parallel
    {
        size_t share = COPY_BYTES / (size_t)omp_get_num_threads(), begin = share * (size_t)omp_get_thread_num();
        memcpy((char*)output + begin, (char*)inputs[0] + begin, share);
    }
}
static double copy_gigabytes_per_second(void) {
    allocate(COPY_BYTES);
    memset(inputs[0], 1, COPY_BYTES); // untouched pages would all map to the same zero page
    return 2e-9 * (double)COPY_BYTES / best_seconds(run_copy);
}

int main(int argc, char** argv) {
    static const struct { const char* name; double (*measure)(void); } peaks[] = {
        { "sgemm", sgemm_gflops }, { "bf16", bf16_gflops }, { "copy", copy_gigabytes_per_second }
    };
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++)
        if (argc < 2 || strcmp(argv[1], peaks[i].name) == 0) printf("%s %.1f\n", peaks[i].name, peaks[i].measure());
    return 0;
}
