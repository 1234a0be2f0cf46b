/*
layers.h - every layer's forward and backward (layers_api.h says what each function does) on the device that a program is built
for: from a C compiler those of cpu/layers.h, from nvcc those of cuda/layers.cuh. host_adamw.h has AdamW for arrays of the host.
*/
#ifndef LLMC_LAYERS_H
#define LLMC_LAYERS_H
#include "device.h"
#include "host_adamw.h"
#include "layers_api.h"
#ifdef __CUDACC__
#include "cuda/layers.cuh"
#else
#include "cpu/layers.h"
#endif
#endif
