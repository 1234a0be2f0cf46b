/*
cpu_layers.c - the CPU's layers as an object of their own, for a C++ program that has the GPU's under the same names:
C++ decorates its names, C does not, so both can be linked (test_cuda_kernels.cu calls these cpu::layernorm_backward, ...).
*/
#include "../llmc/layers.h"
