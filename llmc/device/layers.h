/*
layers.h - every layer's forward and backward on the device that a program is built for. layers_api.h is the header to
read: it says what each function does. For a C compiler the functions are those of cpu/layers.h, for nvcc those of
cuda/layers.cuh. host_adamw.h has AdamW for arrays in host memory, whatever the device.
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
