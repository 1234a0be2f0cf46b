/*
peak.c - this machine's peak rates, to compare training with: GFLOP/s of oneDNN's 2048-cubed matrix product in fp32, and in
bf16 where the processor has instructions for it (else 0), and GB/s of a copy, counting both read and write. Prints
"sgemm X", "bf16 X", "copy X", or with an argument only the line of that name. The best of several tries counts, because
other programs can only slow a try down.
*/
#include "../../llmc/base/common.h"
#include "../../llmc/base/precision.h"
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#define SIZE 2048
#define TRIES 15
#define COPY_BYTES ((size_t)256 << 20)

static void check(dnnl_status_t status) { require(status == dnnl_success, "oneDNN failed (status %d)", (int)status); }

// Seconds of the fastest of TRIES calls.
static double best_seconds(void (*work)(void*), void* data) {
    double best = INFINITY;
    work(data); // the first call generates the kernel
    for (int i = 0; i < TRIES; i++) {
        double start = now_seconds();
        work(data);
        best = fmin(best, now_seconds() - start);
    }
    return best;
}

typedef struct { float *a, *b, *c; } Matrices; // (SIZE, SIZE) each, owned

static void run_sgemm(void* data) {
    Matrices* m = (Matrices*)data;
    check(dnnl_sgemm('N', 'N', SIZE, SIZE, SIZE, 1, m->a, SIZE, m->b, SIZE, 0, m->c, SIZE));
}

static double sgemm_gflops(void) {
    Matrices m;
    m.a = (float*)xcalloc(SIZE * SIZE, sizeof(float));
    m.b = (float*)xcalloc(SIZE * SIZE, sizeof(float));
    m.c = (float*)xcalloc(SIZE * SIZE, sizeof(float));
    for (int i = 0; i < SIZE * SIZE; i++) m.a[i] = m.b[i] = (float)(i % 251) / 251 - 0.5f;
    double seconds = best_seconds(run_sgemm, &m);
    free(m.a); free(m.b); free(m.c);
    return 2e-9 * SIZE * SIZE * SIZE / seconds;
}

typedef struct {
    dnnl_primitive_t matmul;
    dnnl_stream_t stream;
    dnnl_exec_arg_t args[3];
} Bf16Matmul;

static void run_bf16(void* data) {
    Bf16Matmul* m = (Bf16Matmul*)data;
    check(dnnl_primitive_execute(m->matmul, m->stream, 3, m->args));
    check(dnnl_stream_wait(m->stream));
}

// A matrix product of bf16 into bf16, row-major. Version 2 of oneDNN needs two calls where version 3 needs one.
static dnnl_primitive_t bf16_primitive(dnnl_engine_t engine, dnnl_memory_t matrix) {
    dnnl_primitive_desc_t description;
    dnnl_primitive_t matmul;
#if DNNL_VERSION_MAJOR >= 3
    const_dnnl_memory_desc_t shape;
    check(dnnl_memory_get_memory_desc(matrix, &shape));
    check(dnnl_matmul_primitive_desc_create(&description, engine, shape, shape, NULL, shape, NULL));
#else
    const dnnl_memory_desc_t* shape;
    dnnl_matmul_desc_t operation;
    check(dnnl_memory_get_memory_desc(matrix, &shape));
    check(dnnl_matmul_desc_init(&operation, shape, shape, NULL, shape));
    check(dnnl_primitive_desc_create(&description, &operation, NULL, engine, NULL));
#endif
    check(dnnl_primitive_create(&matmul, description));
    check(dnnl_primitive_desc_destroy(description));
    return matmul;
}

static dnnl_memory_t bf16_matrix(dnnl_engine_t engine) {
    const dnnl_dims_t dims = { SIZE, SIZE };
    dnnl_memory_t memory;
    void* data;
#if DNNL_VERSION_MAJOR >= 3
    dnnl_memory_desc_t shape;
    check(dnnl_memory_desc_create_with_tag(&shape, 2, dims, dnnl_bf16, dnnl_ab));
    check(dnnl_memory_create(&memory, shape, engine, DNNL_MEMORY_ALLOCATE));
    check(dnnl_memory_desc_destroy(shape));
#else
    dnnl_memory_desc_t shape;
    check(dnnl_memory_desc_init_by_tag(&shape, 2, dims, dnnl_bf16, dnnl_ab));
    check(dnnl_memory_create(&memory, &shape, engine, DNNL_MEMORY_ALLOCATE));
#endif
    check(dnnl_memory_get_data_handle(memory, &data));
    for (int i = 0; i < SIZE * SIZE; i++) ((uint16_t*)data)[i] = bf16_bits_from_float((float)(i % 251) / 251 - 0.5f);
    return memory;
}

// oneDNN multiplies bf16 on any processor with AVX-512, but emulates it where the bf16 instructions are missing.
static bool has_bf16(void) { return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16; }

static double bf16_gflops(void) {
    static const int roles[3] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST };
    dnnl_engine_t engine;
    Bf16Matmul m;
    if (!has_bf16()) return 0;
    check(dnnl_engine_create(&engine, dnnl_cpu, 0));
    check(dnnl_stream_create(&m.stream, engine, dnnl_stream_default_flags));
    for (int i = 0; i < 3; i++) { m.args[i].arg = roles[i]; m.args[i].memory = bf16_matrix(engine); }
    m.matmul = bf16_primitive(engine, m.args[0].memory);
    double seconds = best_seconds(run_bf16, &m);
    check(dnnl_primitive_destroy(m.matmul));
    for (int i = 0; i < 3; i++) check(dnnl_memory_destroy(m.args[i].memory));
    check(dnnl_stream_destroy(m.stream));
    check(dnnl_engine_destroy(engine));
    return 2e-9 * SIZE * SIZE * SIZE / seconds;
}

typedef struct { char *from, *to; } Buffers; // (COPY_BYTES) each, owned

static void run_copy(void* data) {
    Buffers* b = (Buffers*)data;
    #pragma omp parallel
    {
        size_t share = COPY_BYTES / (size_t)omp_get_num_threads(), begin = share * (size_t)omp_get_thread_num();
        memcpy(b->to + begin, b->from + begin, share);
    }
}

static double copy_gigabytes_per_second(void) {
    Buffers b;
    b.from = (char*)xcalloc(COPY_BYTES, 1);
    b.to = (char*)xcalloc(COPY_BYTES, 1);
    memset(b.from, 1, COPY_BYTES); // untouched pages would all map to the same zero page
    double seconds = best_seconds(run_copy, &b);
    free(b.from); free(b.to);
    return 2e-9 * (double)COPY_BYTES / seconds;
}

int main(int argc, char** argv) {
    static const struct { const char* name; double (*measure)(void); } peaks[] = {
        { "sgemm", sgemm_gflops }, { "bf16", bf16_gflops }, { "copy", copy_gigabytes_per_second }
    };
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++)
        if (argc < 2 || strcmp(argv[1], peaks[i].name) == 0) printf("%s %.1f\n", peaks[i].name, peaks[i].measure());
    return 0;
}
