// oneDNN: checks one small matrix product; prints its version and the instructions that it uses.
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>

static int has(dnnl_cpu_isa_t isa) { return (dnnl_get_effective_cpu_isa() & isa) == isa; }

int main(void) {
    const float a[4] = { 1, 2, 3, 4 }, b[4] = { 5, 6, 7, 8 };
    float c[4];
    if (dnnl_sgemm('N', 'N', 2, 2, 2, 1, a, 2, b, 2, 0, c, 2) != dnnl_success || c[0] != 19 || c[3] != 50) {
        printf("its matrix product is wrong\n");
        return 1;
    }
    const dnnl_version_t* v = dnnl_version();
    const char* instructions = has(dnnl_cpu_isa_avx512_core_amx) ? "AVX-512 with AMX and bf16" : has(dnnl_cpu_isa_avx512_core_bf16) ? "AVX-512 with bf16"
        : has(dnnl_cpu_isa_avx512_core) ? "AVX-512" : has(dnnl_cpu_isa_avx2) ? "AVX2" : "neither AVX2 nor AVX-512";
    printf("%d.%d.%d, uses %s%s\n", v->major, v->minor, v->patch, instructions,
           v->cpu_runtime == DNNL_RUNTIME_OMP ? "" : "; built without OpenMP: it chooses its number of threads itself");
    return 0;
}
