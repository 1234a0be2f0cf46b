/*
device.h - memory, copies and marks of the device that a program is built for; device_api.h says what each function
does.
*/
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H
#include "device_api.h"
#ifdef __CUDACC__
#include "cuda/device.cuh"
#else
#include "cpu/device.h"
#endif
#endif
