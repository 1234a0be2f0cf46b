// cuDNN: its version, from the library that was linked.
#include <cudnn.h>
#include <stdio.h>

int main(void) {
    size_t v = cudnnGetVersion();
    printf("%zu.%zu.%zu\n", v / 10000, v / 100 % 100, v % 100);
    return 0;
}
