// NCCL: its version, from the library that was linked.
#include <nccl.h>
#include <stdio.h>

int main(void) {
    int v = 0;
    if (ncclGetVersion(&v) != ncclSuccess) return 1;
    printf("%d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
    return 0;
}
