/* muon.h - Muon on the device that a program is built for; muon_api.h says what each function does. */
#ifndef LLMC_MUON_H
#define LLMC_MUON_H
#include "layers.h"
#include "muon_api.h"
#ifdef __CUDACC__
#include "cuda/muon.cuh"
#else
#include "cpu/muon.h"
#endif
#endif
