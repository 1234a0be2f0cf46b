// libFuzzer: a target that accepts everything.
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { (void)data; (void)size; return 0; }
