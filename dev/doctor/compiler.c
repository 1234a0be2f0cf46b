// The C compiler: what llmc/ uses and old compilers do not have: overflow checks (gcc 5) and loops for vectors (gcc 4.9).
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

static float largest(const float* x, int n) {
    float max = x[0];
    #pragma omp simd reduction(max:max)
    for (int i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

int main(void) {
    const float x[4] = { 1, 4, 2, 3 };
    size_t product;
    _Static_assert(sizeof(float) == 4, "files hold floats of 4 bytes");
    bool right = __builtin_mul_overflow((size_t)-1, (size_t)2, &product) && largest(x, 4) == 4;
    if (!right) printf("it computes wrong results\n");
    return !right;
}
