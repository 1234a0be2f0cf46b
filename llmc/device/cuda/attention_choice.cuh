/*
cuda/attention_choice.cuh - attention of layers.h: cuDNN's where it was asked for or is available, else our own kernels:
those on tensor cores if elements have 16 bits and heads 64 channels, as in every GPT-2, else those in fp32.

The choice is made when the shapes are known, before memory is allocated: only a finished plan says how much workspace
it needs. Our own kernels also take every (B,T) other than that of layers_init, such as a sample that grows token by
token, and arrays that do not begin on 16 bytes (these in fp32 arithmetic). All kernels leave the same stats, so that
backward by one can follow forward by another.
*/
#ifndef LLMC_CUDA_ATTENTION_CHOICE_CUH
#define LLMC_CUDA_ATTENTION_CHOICE_CUH
#include "attention.cuh"
#if defined(PRECISION_BF16) || defined(PRECISION_FP16)
#define ATTENTION_ON_TENSOR_CORES 1
#include "attention_tensor_cores.cuh"
#else
#define ATTENTION_ON_TENSOR_CORES 0
#endif
#if USE_CUDNN && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
#define ATTENTION_BY_CUDNN 1
#include "attention_cudnn.cuh"
#else
#define ATTENTION_BY_CUDNN 0
#endif

// ---- our own kernels ----
// True if they multiply heads of HS channels on tensor cores.
static inline bool attention_own_is_on_tensor_cores(int HS) {
#if ATTENTION_ON_TENSOR_CORES
    return HS == HEAD;
#else
    (void)HS;
    return false;
#endif
}
static inline void attention_own(AttentionCall a) {
#if ATTENTION_ON_TENSOR_CORES
    if (attention_own_is_on_tensor_cores(a.HS) && rows_are_vectors(a.HS, a.result, a.qkv, a.dout, a.part.kv)) {
        attention_tensor_cores(a);
        return;
    }
#endif
    attention_fp32_arithmetic(a);
}

// ---- cuDNN's or ours ----
typedef struct {
    LayerShapes shapes;     // for which the choice was made; zeros: none yet
    bool cudnn;             // the choice
    char description[512];
} AttentionState;
static AttentionState attention_state;

// What attention sees of them, which is whole: this rank's heads.
static inline LayerShapes attention_shapes_of(LayerShapes s) {
    int heads_in = s.parts * (s.chunk ? 1 : s.context);
    LayerShapes own = layer_shapes(s.B, s.T, s.C / heads_in, s.NH / heads_in, s.Vp, 1);
    own.chunk = s.chunk;
    return own;
}
static inline bool same_shapes(LayerShapes a, LayerShapes b) {
    return a.B == b.B && a.T == b.T && a.C == b.C && a.NH == b.NH && a.chunk == b.chunk;
}

// "": cuDNN will compute attention of these shapes. Else why it cannot.
static inline const char* attention_plan_cudnn(LayerShapes s) {
#if ATTENTION_BY_CUDNN
    int device, major;
    cuda_check(cudaGetDevice(&device), "attention");
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "attention");
    if (major < 8) return "its attention needs a GPU of compute capability 8.0 or later";
    if (major >= 10 && cuda_layers.deterministic) { // there it would take an engine that cuDNN does not choose itself
        return "from compute capability 10 on, its backward may give other bits from run to run";
    }
    AttentionShape shape = { s.B, s.T, s.NH, s.C / s.NH };
    return cudnn_attention_init(shape, cuda_layers.deterministic);
#else
    (void)s;
    return NEEDS_MASTER ? "this program was built with USE_CUDNN=0"
                        : "its attention is for bf16 and fp16, not for fp32";
#endif
}
static inline void attention_free(void) {
#if ATTENTION_BY_CUDNN
    cudnn_attention_free();
#endif
    memset(&attention_state, 0, sizeof attention_state);
}
// Decides, once for these shapes, which kernels compute attention.
// Dies if those that --attention names are not available.
static inline void attention_init(LayerShapes all) {
    AttentionState* a = &attention_state;
    LayerShapes s = attention_shapes_of(all);
    if (same_shapes(a->shapes, s)) return;
    attention_free();
    // also for cuDNN, which could do more, because samples need our own kernels
    require(s.C / s.NH <= ATTENTION_MAX_HS, "attention: heads of %d channels, but at most %d are supported;"
            " choose more --heads", s.C / s.NH, ATTENTION_MAX_HS);
    const char *arithmetic = attention_own_is_on_tensor_cores(s.C / s.NH) ? "on tensor cores" : "in fp32 arithmetic",
               *why = "";
    snprintf(a->description, sizeof a->description, "own attention %s%s", arithmetic, s.chunk ? ", in parts" : "");
    require(s.chunk == 0 || cuda_layers.attention != ATTENTION_CUDNN,
            "--attention cudnn: attention in parts has only our own kernels; choose --attention own");
    if (cuda_layers.attention != ATTENTION_OWN && s.chunk == 0) {
        why = attention_plan_cudnn(s);
        a->cudnn = why[0] == 0;
    }
    require(a->cudnn || cuda_layers.attention != ATTENTION_CUDNN, "--attention cudnn: cuDNN cannot be used: %s;"
            " --attention own uses our own kernels", why);
    if (why[0] != 0) snprintf(a->description, sizeof a->description, "own attention %s (cuDNN: %s)", arithmetic, why);
#if ATTENTION_BY_CUDNN
    size_t v = a->cudnn ? cudnn.cudnnGetVersion() : 0;
    if (v > 0)
        snprintf(a->description, sizeof a->description, "cuDNN %zu.%zu.%zu attention", v / 10000, v / 100 % 100,
                 v % 100);
#endif
    a->shapes = s;
}

// Returns the larger of what cuDNN's and our own kernels need.
static inline size_t attention_workspace_bytes(LayerShapes s) {
    attention_init(s);
    size_t own = attention_own_workspace_bytes(attention_shapes_of(s));
#if ATTENTION_BY_CUDNN
    if (attention_state.cudnn) return size_max(cudnn_attention_workspace().end, own);
#endif
    return own;
}
// "cuDNN 9.19.0 attention", "own attention on tensor cores", "own attention in fp32 arithmetic (cuDNN: why not)"
static inline const char* attention_description(void) { return attention_state.description; }

#if ATTENTION_BY_CUDNN
// Returns true if cuDNN has a plan for this call. Arrays may be NULL.
static inline bool attention_is_planned(int B, int T, int C, int NH, const void* a, const void* b, const void* c,
                                        const void* d) {
    LayerShapes s = layer_shapes(B, T, C, NH, 0, 1);
    bool aligned = (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
    return attention_state.cudnn && aligned && same_shapes(s, attention_state.shapes);
}
#endif

void attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
#if ATTENTION_BY_CUDNN
    if (attention_is_planned(B, T, C, NH, out, stats, qkv, NULL)) {
        cudnn_attention_forward(out, stats, qkv, (char*)cuda_layers.workspace);
        check_launch("attention_forward");
        return;
    }
#endif
    attention_own({ out, stats, qkv, NULL, NULL, B, T, C, NH, C / NH });
}
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                        int B, int T, int C, int NH) {
#if ATTENTION_BY_CUDNN
    if (attention_is_planned(B, T, C, NH, dqkv, dout, qkv, out) && (uintptr_t)stats % 16 == 0) {
        cudnn_attention_backward(dqkv, dout, qkv, out, stats, (char*)cuda_layers.workspace);
        check_launch("attention_backward");
        return;
    }
#endif
    attention_own({ dqkv, (float*)stats, qkv, dout, out, B, T, C, NH, C / NH });
}
void attention_part_forward(float* out, float* stats, const floatX* qkv, const floatX* kv, bool causal, bool merge,
                            int B, int T, int C, int NH) {
    attention_own({ out, stats, qkv, NULL, NULL, B, T, C, NH, C / NH, { kv, NULL, causal, merge } });
}
void attention_part_backward(float* dq, float* dkv, const floatX* dout, const floatX* qkv, const floatX* kv,
                             const floatX* out, const float* stats, bool causal, int B, int T, int C, int NH) {
    attention_own({ dq, (float*)stats, qkv, dout, out, B, T, C, NH, C / NH, { kv, dkv, causal, true } });
}
#endif
