// cuBLASLt: its version, from the library that was linked.
#include <cublasLt.h>
#include <stdio.h>

int main(void) {
    size_t v = cublasLtGetVersion();
    printf("%zu.%zu.%zu\n", v / 10000, v / 100 % 100, v % 100);
    return 0;
}
