// NVRTC: its version, from the library that was linked.
#include <nvrtc.h>
#include <stdio.h>

int main(void) {
    int major, minor;
    if (nvrtcVersion(&major, &minor) != NVRTC_SUCCESS) return 1;
    printf("%d.%d\n", major, minor);
    return 0;
}
