/*
cuda/layers.cuh - layers_api.h for an NVIDIA GPU of compute capability 7.5 or later, in bf16 8.0.

Matrix products are cuBLASLt's, attention is cuDNN's or ours, everything else is kernels of our own. Read common.cuh
first, then the layers in the order of the includes below.
*/
#ifndef LLMC_CUDA_LAYERS_CUH
#define LLMC_CUDA_LAYERS_CUH
#include "../device_api.h"
#include "common.cuh"
#include "encoder.cuh"
#include "layernorm.cuh"
#include "bias_gelu.cuh"
#include "matmul.cuh"
#include "attention_choice.cuh"
#include "classifier.cuh"
#include "stats.cuh"
#include "adamw.cuh"

// Whether attention is available as chosen is checked when the shapes are known,
// by layers_workspace_bytes or layers_init.
void layers_choose(AttentionChoice attention, bool deterministic) {
    cuda_layers.attention = attention;
    cuda_layers.deterministic = deterministic;
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total), "asking how much memory there is");
    classifier_elements = classifier_elements_cuda((double)total, deterministic);
}

void layers_prepare(LayerShapes s) {
    layer_shapes_check(s);
    invariant(cuda_layers.workspace == NULL, "layers_prepare was called after layers_init");
    matmul_init();
    matmul_prepare(s);
}

// Layers take turns on one stream, so they share the largest of their workspaces.
// The sums that outlive a call lie behind it.
static inline size_t layers_scratch_bytes(LayerShapes s) {
    size_t bytes = MATMUL_WORKSPACE;
    for (size_t layer : { encoder_workspace_bytes(s), layernorm_workspace_bytes(s), bias_workspace_bytes(s),
                          attention_workspace_bytes(s), ADAMW_BLOCKS * sizeof(double) }) bytes = size_max(bytes, layer);
    return round_up(bytes, 256);
}
size_t layers_workspace_bytes(LayerShapes s) {
    return layers_scratch_bytes(s) + bias_sums_bytes(s) + classifier_sums(layer_rows(s), s.C, s.Vp) * sizeof(float);
}

void layers_init(LayerShapes s) {
    layer_shapes_check(s);
    invariant(cuda_layers.workspace == NULL, "layers_init was called twice without layers_free");
    int device;
    cuda_check(cudaGetDevice(&device), "layers_init");
    cuda_check(cudaDeviceGetAttribute(&cuda_layers.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "layers_init");
    cuda_layers.shapes = s;
    cuda_layers.workspace = device_alloc(layers_workspace_bytes(s), MEMORY_WORKSPACE);
    cuda_layers.bias_sums = (floatX*)((char*)cuda_layers.workspace + layers_scratch_bytes(s));
    if (classifier_sums(layer_rows(s), s.C, s.Vp) > 0)
        cuda_layers.weight_sums = (float*)((char*)cuda_layers.bias_sums + bias_sums_bytes(s));
    matmul_init();
    cuda_check(cudaProfilerStart(), "layers_init");
    size_t v = cublasLtGetVersion();
    snprintf(cuda_layers.description, sizeof cuda_layers.description, "cuBLASLt %zu.%zu.%zu, %s",
             v / 10000, v / 100 % 100, v % 100, attention_description());
}

void layers_free(void) {
    matmul_free();
    attention_free();
    device_free(cuda_layers.workspace);
    memset(&cuda_layers, 0, sizeof cuda_layers);
}

const char* layers_description(void) { return cuda_layers.description; }
#endif
