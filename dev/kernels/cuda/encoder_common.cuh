// encoder_common.cuh - what encoder_forward.cu and encoder_backward.cu share.
#ifndef DEV_CUDA_ENCODER_COMMON_CUH
#define DEV_CUDA_ENCODER_COMMON_CUH
#include "variants.cuh"
#include "../../../llmc/device/cuda/encoder.cuh"

// Sequences of 1024 tokens, or of 7 in a small shape: several of them, so that a mistaken position shows.
static int sequence_length(int rows) {
    for (int T : { 1024, 7 }) if (rows % T == 0) return T;
    return rows;
}
#endif
