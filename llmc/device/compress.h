/*
compress.h - compressed gradients on the device that a program is built for; compress_api.h says what each function
does.
*/
#ifndef LLMC_COMPRESS_H
#define LLMC_COMPRESS_H
#include "compress_api.h"
#include "layers.h"
#ifdef __CUDACC__
#include "cuda/compress.cuh"
static_assert(COMPRESS_WORKSPACE <= MATMUL_WORKSPACE, "the layers' workspace is too small for compression");
#else
#include "cpu/compress.h"
#endif
#endif
