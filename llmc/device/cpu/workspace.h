/*
cpu/workspace.h - the scratch memory that layers share. It and matmul.h's state are the only global state of the CPU's
layers. layers.h allocates it, and each layer says how much it needs.
*/
#ifndef LLMC_CPU_WORKSPACE_H
#define LLMC_CPU_WORKSPACE_H
#include "../layers_api.h"
#include <omp.h>

typedef struct {
    LayerShapes shapes;   // the largest that may be seen
    int threads;          // no layer that needs scratch per thread uses more
    void* memory;         // owned; the pointers below lie in it
    float* per_thread;    // (threads, per_thread_floats): a head of attention, or a row of the classifier
    size_t per_thread_floats;
    float* shared;        // (shared_floats): what all threads of one call work on together
    size_t shared_floats;
    float* weight_sums;   // (Vp,C) of matmul_backward_weight_chunk; NULL where there is one chunk, or floatX is fp32
    int* token_first;     // (Vp) encoder_backward: first position with this token
    int* token_next;      // (B*T) the next position with the same token
    char description[128];
} CpuLayers;
static CpuLayers cpu_layers;

// Returns the row of a token in a matrix that has a range's rows; -1 if it has none.
static inline int token_row(TokenRange range, int token) {
    int row = token - range.first;
    return row >= 0 && row < range.count ? row : -1;
}

// Scratch of the calling thread, inside a parallel region of at most cpu_layers.threads.
static inline float* thread_scratch(void) {
    return cpu_layers.per_thread + (size_t)omp_get_thread_num() * cpu_layers.per_thread_floats;
}
#endif
