// cpu_layers.c - the CPU's layers as a separate object file, for a C++ program that has the GPU's under the same names. C++
// mangles names and C does not, so both can be linked (both.cuh calls these cpu::layernorm_backward, ...).
#include "../../../llmc/device/compress.h"
