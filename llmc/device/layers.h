/*
layers.h - every layer's forward and backward on the device that a program is built for: a C compiler takes
cpu/layers.h, nvcc takes cuda/layers.cuh. layers_api.h says what each function does. host_adamw.h is AdamW on host
memory.
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
