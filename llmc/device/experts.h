/*
experts.h - the layers around experts on the device that a program is built for; experts_api.h says what each function
does.
*/
#ifndef LLMC_EXPERTS_H
#define LLMC_EXPERTS_H
#include "experts_api.h"
#include "layers.h"
#ifdef __CUDACC__
#include "cuda/experts.cuh"
static_assert(EXPERTS_WORKSPACE <= MATMUL_WORKSPACE, "the layers' workspace is too small for experts");
#else
#include "cpu/experts.h"
#endif
#endif
