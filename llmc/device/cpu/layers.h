/*
cpu/layers.h - layers_api.h for the CPU: C, OpenMP, and oneDNN's matrix products.

This is the reference that other devices are tested against, so each function follows its formula line by line, and
its result does not depend on the number of threads: work is cut into pieces whose size depends on the shapes alone,
and partial sums are combined in the order of the pieces. (Matrix products are the exception that matmul.h explains.)
*/
#ifndef LLMC_CPU_LAYERS_H
#define LLMC_CPU_LAYERS_H
#include "../device_api.h"
#include "encoder.h"
#include "layernorm.h"
#include "matmul.h"
#include "attention.h"
#include "classifier.h"
#include "stats.h"
#include "adamw.h"

// Lays out one sub-array after another, each starting on a cache line. memory NULL: computes only the sizes.
// Returns the bytes.
static size_t layers_lay_out(CpuLayers* w, char* memory) {
    LayerShapes s = w->shapes;
    const size_t line = 64 / sizeof(float);
    size_t N = (size_t)layer_rows(s);
    size_t matmul = matmul_scratch_floats(w->threads, (int)N, s.C), layernorm = layernorm_scratch_floats((int)N, s.C);
    size_t per_thread = size_max(attention_scratch_floats(s.chunk ? s.chunk : s.T, s.C / s.NH), (size_t)s.Vp);
    w->per_thread_floats = round_up(size_max(per_thread, matmul_panel_floats(s.C)), line);
    w->shared_floats = round_up(size_max(matmul, layernorm), line);
    size_t sums = classifier_sums((int)N, s.C, s.Vp);
    size_t begin[5], total = 0, floats[5] = {
        (size_t)w->threads * w->per_thread_floats, w->shared_floats, round_up((size_t)s.Vp, line), round_up(N, line),
        round_up(sums, line)
    };
    for (int i = 0; i < 5; i++) {
        begin[i] = total;
        total += floats[i] * sizeof(float);
    }
    if (memory != NULL) {
        w->memory = memory;
        w->per_thread = (float*)(memory + begin[0]);
        w->shared = (float*)(memory + begin[1]);
        w->token_first = (int*)(memory + begin[2]);
        w->token_next = (int*)(memory + begin[3]);
        w->weight_sums = sums > 0 ? (float*)(memory + begin[4]) : NULL;
    }
    return total;
}

// All layers here are deterministic, whatever was chosen.
void layers_choose(AttentionChoice attention, bool deterministic) {
    (void)deterministic;
    require(attention != ATTENTION_CUDNN, "--attention cudnn: cuDNN is for NVIDIA GPUs, and this program was built for "
                                          "the CPU; use --attention own, or build it with make DEVICE=cuda");
}

void layers_prepare(LayerShapes s) { (void)s; }
void layers_overlap_sum(bool overlaps) { (void)overlaps; }

size_t layers_workspace_bytes(LayerShapes s) {
    CpuLayers w;
    memset(&w, 0, sizeof w);
    w.shapes = s;
    w.threads = omp_get_max_threads();
    return layers_lay_out(&w, NULL);
}

void layers_init(LayerShapes s) {
    layer_shapes_check(s);
    invariant(cpu_layers.memory == NULL, "layers_init was called twice without layers_free");
    cpu_layers.shapes = s;
    cpu_layers.threads = omp_get_max_threads();
    layers_lay_out(&cpu_layers, (char*)device_alloc(layers_workspace_bytes(s), MEMORY_WORKSPACE));
    matmul_init();
    const dnnl_version_t* v = dnnl_version();
    snprintf(cpu_layers.description, sizeof cpu_layers.description, "oneDNN %d.%d.%d, %s",
             v->major, v->minor, v->patch, matmul_method());
}

void layers_free(void) {
    matmul_free();
    device_free(cpu_layers.memory);
    memset(&cpu_layers, 0, sizeof cpu_layers);
}

const char* layers_description(void) { return cpu_layers.description; }
#endif
