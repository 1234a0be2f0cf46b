/*
plan_compress.h - the seconds of gradients that travel compressed, and the methods of train_gpt2_compress beside one another.

Bytes       are train_gpt2_compress's own (plan_compress.c), from the step on in which it compresses.
Messages    are its packets and its buckets of vectors. A method with a packet for each tensor pays a latency for each.
Compressing reads and writes memory, counted kernel by kernel (plan_compress.c) and divided by --memory-bandwidth. Packing comes
            before a message, beside backward; unpacking after backward. Without a bandwidth it takes no time, as the update.
*/
#ifndef DEV_PLAN_COMPRESS_H
#define DEV_PLAN_COMPRESS_H
#include "../../llmc/parallel/compress_methods.h"
#include "plan_stage.h"

// As train_gpt2_compress has it with --compress METHOD alone.
static inline PlanCompress compress_usual(int method) {
    PlanCompress c = { method, PLAN_USUAL, 0.01, 4, 0, false };
    return c;
}
static inline bool is_compressed(const Plan* p) { return p->compress.method != COMPRESS_NONE; }
static inline PlanBytes compressed_bytes(const Plan* p) {
    if (p->X == sizeof(float)) return plan_compress_fp32(p, PLAN_DDP);
    return p->compress.fp16 ? plan_compress_fp16(p, PLAN_DDP) : plan_compress_bf16(p, PLAN_DDP);
}
// Gradients of 16 bits cannot be rounded to 16 bits: plan_compress.c dies then.
static inline bool compress_is_possible(const Plan* p) {
    return p->X == sizeof(float) || (p->compress.method != COMPRESS_BF16 && p->compress.method != COMPRESS_FP16);
}

// PyTorch's quantization_pertensor_hook: every rank gathers all ranks' whole gradients in int8, and a scale and a zero point of
// each (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py). Bytes sent by a rank.
static inline double pytorch_int8_bytes(double elements, double buckets, int N) { return (N - 1) * (elements + 8 * buckets); }
#endif
