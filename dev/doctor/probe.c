// A small program for each component, chosen with -DPROBE_NAME. It prints the component's version, or with status 1 what is wrong.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#define VERSION(v) printf("%d.%d.%d\n", (int)(v) / 10000, (int)(v) / 100 % 100, (int)(v) % 100)

#if defined PROBE_COMPILER // what llmc/ uses and old compilers do not have: overflow checks (gcc 5), loops for vectors (gcc 4.9)
int main(void) {
    const float x[4] = { 1, 4, 2, 3 };
    float max = x[0];
    size_t product;
    _Static_assert(sizeof(float) == 4, "files hold floats of 4 bytes");
    #pragma omp simd reduction(max:max)
    for (int i = 0; i < 4; i++) max = x[i] > max ? x[i] : max;
    int right = __builtin_mul_overflow((size_t)-1, (size_t)2, &product) && max == 4;
    if (!right) printf("it computes wrong results\n");
    return !right;
}
#elif defined PROBE_MACHINE // cores that this process may use, and whether all of OpenMP's threads take part in a sum
#include <omp.h>
#include <sched.h>
#include <unistd.h>
int main(void) {
    cpu_set_t allowed;
    int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    int threads = omp_get_max_threads(), sum = 0;
    #pragma omp parallel num_threads(threads) reduction(+ : sum)
    sum += 1;
    printf("%d core%s, a run uses %d thread%s\n", cores, cores == 1 ? "" : "s", sum, sum == 1 ? "" : "s");
    return sum != threads;
}
#elif defined PROBE_ONEDNN // a small matrix product, and the instructions that it uses
#include <oneapi/dnnl/dnnl.h>
static int has(dnnl_cpu_isa_t isa) { return (dnnl_get_effective_cpu_isa() & isa) == isa; }
int main(void) {
    const float a[4] = { 1, 2, 3, 4 }, b[4] = { 5, 6, 7, 8 };
    float c[4];
    if (dnnl_sgemm('N', 'N', 2, 2, 2, 1, a, 2, b, 2, 0, c, 2) != dnnl_success || c[0] != 19 || c[3] != 50)
        return printf("its matrix product is wrong\n"), 1;
    const dnnl_version_t* v = dnnl_version();
    const char* uses = has(dnnl_cpu_isa_avx512_core_amx) ? "AVX-512 with AMX and bf16" : has(dnnl_cpu_isa_avx512_core_bf16) ?
        "AVX-512 with bf16" : has(dnnl_cpu_isa_avx512_core) ? "AVX-512" : has(dnnl_cpu_isa_avx2) ? "AVX2" : "neither AVX2 nor AVX-512";
    printf("%d.%d.%d, uses %s%s\n", v->major, v->minor, v->patch, uses,
           v->cpu_runtime == DNNL_RUNTIME_OMP ? "" : "; built without OpenMP: it chooses its number of threads itself");
    return 0;
}
#elif defined PROBE_JANSSON // it must refuse a duplicate key, which is why it was chosen
#include <jansson.h>
int main(void) {
    json_t* twice = json_loads("{\"a\": 1, \"a\": 2}", JSON_REJECT_DUPLICATES, NULL);
    printf(twice ? "it accepts duplicate keys\n" : "%s\n", jansson_version_str());
    return twice != NULL;
}
#elif defined PROBE_PCRE2 // Unicode's classes, as in GPT-2's pre-tokenizer; the JIT makes it fast
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
int main(void) {
    char version[64];
    uint32_t unicode = 0, jit = 0;
    pcre2_config(PCRE2_CONFIG_VERSION, version);
    pcre2_config(PCRE2_CONFIG_UNICODE, &unicode);
    pcre2_config(PCRE2_CONFIG_JIT, &jit);
    printf(unicode ? "%s, Unicode%s\n" : "built without Unicode\n", version, jit ? ", JIT" : "; no JIT: the tokenizer is slower");
    return !unicode;
}
#elif defined PROBE_CMOCKA // a test that passes; the library has no function for its version
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
static void one_and_one_are_two(void** state) { (void)state; assert_int_equal(1 + 1, 2); }
int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(one_and_one_are_two) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#elif defined PROBE_MPI // the ranks add up their numbers
#include <mpi.h>
#include <string.h>
int main(int argc, char** argv) {
    int rank, size, sum = 0, length;
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Get_library_version(version, &length);
    if (rank == 0) printf("%.*s, %d ranks reach each other\n", (int)strcspn(version, ",\n"), version, size);
    MPI_Finalize();
    return !(size == 2 && sum == 1);
}
#elif defined PROBE_SANITIZER // with an argument it reads past the end of its memory, which must be caught
#include <stdlib.h>
int main(int argc, char** argv) {
    (void)argv;
    volatile char* p = calloc(8, 1);
    int last = p[argc > 1 ? 8 : 0];
    free((void*)p);
    return last != 0;
}
#elif defined PROBE_FUZZER // libFuzzer's target, which accepts everything
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { (void)data; (void)size; return 0; }
#elif defined PROBE_CUBLASLT
#include <cublasLt.h>
int main(void) { VERSION(cublasLtGetVersion()); return 0; }
#elif defined PROBE_CUDNN
#include <cudnn.h>
int main(void) { VERSION(cudnnGetVersion()); return 0; }
#elif defined PROBE_NVRTC
#include <nvrtc.h>
int main(void) { int major, minor; return nvrtcVersion(&major, &minor) != NVRTC_SUCCESS || printf("%d.%d\n", major, minor) < 0; }
#elif defined PROBE_NCCL
#include <nccl.h>
int main(void) { int v = 0; return ncclGetVersion(&v) != ncclSuccess || VERSION(v) < 0; }
#endif
