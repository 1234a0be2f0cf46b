/*
cuda/attention_choice.cuh - attention of layers.h: cuDNN's where it was asked for or can be had, else our own kernels.
Included by cuda/layers.cuh.

The choice falls with the shapes, before memory is allocated: only a finished plan says how much workspace it needs.
Another (B,T) than that of layers_init, such as a sample that grows token by token, goes to our own kernels, as do arrays that
do not begin on 16 bytes. Both leave the same stats, so that either can go on from what the other left.
*/
#ifndef LLMC_CUDA_ATTENTION_CHOICE_CUH
#define LLMC_CUDA_ATTENTION_CHOICE_CUH
#include "attention.cuh"

typedef struct {
    LayerShapes shapes;     // for which the choice below was made; zeros: none yet
    char description[512];
} AttentionState;
static AttentionState attention_state;

static inline bool same_shapes(LayerShapes a, LayerShapes b) {
    return a.B == b.B && a.T == b.T && a.C == b.C && a.NH == b.NH;
}

// Decides who computes attention of these shapes. Dies if what --attention says cannot be had. A second call with the same
// shapes does nothing.
static inline void attention_init(LayerShapes s) {
    AttentionState* a = &attention_state;
    if (same_shapes(a->shapes, s)) return;
    require(s.C / s.NH <= ATTENTION_MAX_HS, "attention: heads of %d channels, but at most %d can be computed; choose more --heads",
            s.C / s.NH, ATTENTION_MAX_HS);
    require(cuda_layers.attention != ATTENTION_CUDNN, "--attention cudnn: this program was built without cuDNN (USE_CUDNN=0)");
    snprintf(a->description, sizeof a->description, "own attention");
    a->shapes = s;
}
static inline void attention_free(void) { memset(&attention_state, 0, sizeof attention_state); }

// Exactly what the layers below need.
static inline size_t attention_workspace_bytes(LayerShapes s) {
    attention_init(s);
    return attention_own_workspace_bytes(s);
}
// "cuDNN 9.19.0 attention", "own attention", "own attention (cuDNN: why not)"
static inline const char* attention_description(void) { return attention_state.description; }

void attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
    attention_own_forward(out, stats, qkv, B, T, C, NH);
}
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                        int B, int T, int C, int NH) {
    attention_own_backward(dqkv, dout, qkv, out, stats, B, T, C, NH);
}
#endif
