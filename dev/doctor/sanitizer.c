// AddressSanitizer: without an argument this ends normally; with one it reads past the end of its memory, which must be caught.
#include <stdlib.h>

int main(int argc, char** argv) {
    (void)argv;
    volatile char* p = malloc(8);
    p[0] = 0;
    int last = p[argc > 1 ? 8 : 0];
    free((void*)p);
    return last != 0;
}
