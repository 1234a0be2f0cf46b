/*
cuda/attention_cudnn.cuh - causal self-attention by cuDNN: forward and backward are graphs of plain operations. cuDNN
recognises attention in them and compiles one kernel for each. Included by attention_choice.cuh.

Every line of attention_forward_graph and attention_backward_graph is one operation with its formula. Nothing of size
(T,T) is in memory: scores, mask and probabilities are virtual. q, k, v lie interleaved in one (B,T,3C) tensor, and so
do their gradients: strides say so, nothing is copied.

Bytes of workspace: 4 B NH T for the rows' sums, 4 B T C for the sums of dq, and what the plans need themselves.
*/
#ifndef LLMC_CUDA_ATTENTION_CUDNN_CUH
#define LLMC_CUDA_ATTENTION_CUDNN_CUH
#include "../../base/precision.h"
#include "check.cuh"
#include "cudnn_graph.cuh"

#if defined(PRECISION_FP16)
constexpr cudnnDataType_t CUDNN_FLOATX = CUDNN_DATA_HALF;
#else
constexpr cudnnDataType_t CUDNN_FLOATX = CUDNN_DATA_BFLOAT16;
#endif

typedef struct { int64_t B, T, NH, HS; } AttentionShape; // sequences, tokens, heads, channels of a head

// The tensors that are not virtual, by uid
enum { TENSOR_Q = 1, TENSOR_K, TENSOR_V, TENSOR_OUT, TENSOR_STATS, TENSOR_DOUT, TENSOR_DQ, TENSOR_DK, TENSOR_DV,
       TENSOR_ROW_SUMS, TENSOR_DQ_SUMS, NUMBER_SCALE, NUMBER_MINUS_INFINITY, NUMBER_ONE };

// (B,NH,T,HS) in floatX: the heads of a (B,T,...) tensor with `row` elements per token
static inline CudnnTensor tensor_heads(CudnnGraph* g, int64_t uid, AttentionShape s, int64_t row) {
    const int64_t dim[4] = { s.B, s.NH, s.T, s.HS }, stride[4] = { s.T * row, s.HS, row, 1 };
    return tensor_in_memory(g, uid, CUDNN_FLOATX, dim, stride);
}
// The same with channels as rows and tokens as columns: k^T and v^T of the formulas
static inline CudnnTensor tensor_heads_transposed(CudnnGraph* g, int64_t uid, AttentionShape s, int64_t row) {
    const int64_t dim[4] = { s.B, s.NH, s.HS, s.T }, stride[4] = { s.T * row, s.HS, 1, row };
    return tensor_in_memory(g, uid, CUDNN_FLOATX, dim, stride);
}
// (B,NH,T,cols) in fp32, packed
static inline CudnnTensor tensor_rows(CudnnGraph* g, int64_t uid, AttentionShape s, int64_t cols) {
    const int64_t dim[4] = { s.B, s.NH, s.T, cols }, stride[4] = { s.NH * s.T * cols, s.T * cols, cols, 1 };
    return tensor_in_memory(g, uid, CUDNN_DATA_FLOAT, dim, stride);
}

// ---- forward: out = softmax(q k^T / sqrt(HS), masked) v, stats = log of the sum of exp ----
static inline void attention_forward_graph(CudnnGraph* g, AttentionShape s) {
    const int64_t C = s.NH * s.HS;
    CudnnTensor q = tensor_heads(g, TENSOR_Q, s, 3 * C), kT = tensor_heads_transposed(g, TENSOR_K, s, 3 * C);
    CudnnTensor v = tensor_heads(g, TENSOR_V, s, 3 * C), out = tensor_heads(g, TENSOR_OUT, s, C);
    CudnnTensor stats = tensor_rows(g, TENSOR_STATS, s, 1);
    CudnnTensor scale = tensor_number(g, NUMBER_SCALE), minus_infinity = tensor_number(g, NUMBER_MINUS_INFINITY);

    CudnnTensor products = graph_matmul(g, q, kT);                                          // q k^T
    CudnnTensor scaled = graph_combine(g, products, CUDNN_POINTWISE_MUL, scale);            // / sqrt(HS)
    CudnnTensor scores = graph_causal(g, scaled, minus_infinity);                           // S[t][u], -Inf where u > t
    CudnnTensor max = graph_reduce(g, CUDNN_REDUCE_TENSOR_MAX, scores);                     // max[t] over u
    CudnnTensor shifted = graph_combine(g, scores, CUDNN_POINTWISE_SUB, max);               // S - max: its exp is <= 1
    CudnnTensor e = graph_map(g, CUDNN_POINTWISE_EXP, shifted);                             // exp(S - max)
    CudnnTensor sum = graph_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e);                          // sum[t] over u
    CudnnTensor log_sum = graph_map(g, CUDNN_POINTWISE_LOG, sum);                           // log(sum)
    graph_combine(g, max, CUDNN_POINTWISE_ADD, log_sum, &stats);                            // stats[t] = max + log(sum)
    CudnnTensor p = tensor_like(g, CUDNN_FLOATX, e);                                        // in the type of v
    graph_combine(g, e, CUDNN_POINTWISE_DIV, sum, &p);                                      // P = exp(S - max) / sum
    graph_matmul(g, p, v, &out);                                                            // out = P v
}

// ---- backward: the formulas are derived in attention.cuh ----
// deterministic: dq is one product, for which cuDNN stores dS (its plan asks for 2 B NH T T bytes). Otherwise blocks of
// keys add their parts of dq to fp32 sums, in whatever order they come: nothing of size (T,T) is stored, but the last
// bits differ from run to run. cuDNN's notes on its engines do not distinguish the two; its C++ front end chooses so.
// From 9.6 on cuDNN sets the sums to 0 itself, as the front end says in scaled_dot_product_flash_attention.h.
static inline void attention_backward_graph(CudnnGraph* g, AttentionShape s, bool deterministic) {
    const int64_t C = s.NH * s.HS;
    CudnnTensor q = tensor_heads(g, TENSOR_Q, s, 3 * C), kT = tensor_heads_transposed(g, TENSOR_K, s, 3 * C);
    CudnnTensor vT = tensor_heads_transposed(g, TENSOR_V, s, 3 * C);
    CudnnTensor out = tensor_heads(g, TENSOR_OUT, s, C), dout = tensor_heads(g, TENSOR_DOUT, s, C);
    CudnnTensor dq = tensor_heads(g, TENSOR_DQ, s, 3 * C), dk = tensor_heads(g, TENSOR_DK, s, 3 * C);
    CudnnTensor dv = tensor_heads(g, TENSOR_DV, s, 3 * C);
    CudnnTensor stats = tensor_rows(g, TENSOR_STATS, s, 1), delta = tensor_rows(g, TENSOR_ROW_SUMS, s, 1);
    CudnnTensor scale = tensor_number(g, NUMBER_SCALE), minus_infinity = tensor_number(g, NUMBER_MINUS_INFINITY);
    CudnnTensor one = tensor_number(g, NUMBER_ONE);

    // delta[t] = dout[t] . out[t]
    CudnnTensor dout_out = graph_combine(g, dout, CUDNN_POINTWISE_MUL, out);
    CudnnTensor row_sums = graph_reduce(g, CUDNN_REDUCE_TENSOR_ADD, dout_out);
    graph_combine(g, row_sums, CUDNN_POINTWISE_MUL, one, &delta);
    // P = exp(S - stats), with S = q k^T / sqrt(HS), masked
    CudnnTensor products = graph_matmul(g, q, kT);
    CudnnTensor scaled = graph_combine(g, products, CUDNN_POINTWISE_MUL, scale);
    CudnnTensor scores = graph_causal(g, scaled, minus_infinity);
    CudnnTensor shifted = graph_combine(g, scores, CUDNN_POINTWISE_SUB, stats);
    CudnnTensor p = graph_map(g, CUDNN_POINTWISE_EXP, shifted);
    // out = P v: dv = P^T dout
    CudnnTensor pT = graph_transpose(g, p, CUDNN_FLOATX);
    graph_matmul(g, pT, dout, &dv);
    // and dP = dout v^T; through the softmax and the scale dS = P (dP - delta) / sqrt(HS)
    CudnnTensor dp = graph_matmul(g, dout, vT);
    CudnnTensor centred = graph_combine(g, dp, CUDNN_POINTWISE_SUB, delta);
    CudnnTensor through_softmax = graph_combine(g, centred, CUDNN_POINTWISE_MUL, p);
    CudnnTensor ds = graph_combine(g, through_softmax, CUDNN_POINTWISE_MUL, scale);
    // S = q k^T: dk = dS^T q
    CudnnTensor dsT = graph_transpose(g, ds, CUDNN_FLOATX);
    graph_matmul(g, dsT, q, &dk);
    // and dq = dS k
    CudnnTensor k = graph_transpose(g, kT, CUDNN_FLOATX);
    if (deterministic) {
        graph_matmul(g, ds, k, &dq);
    } else {
        CudnnTensor dq_sums = tensor_rows(g, TENSOR_DQ_SUMS, s, s.HS);
        graph_matmul(g, ds, k, &dq_sums);
        graph_map(g, CUDNN_POINTWISE_IDENTITY, dq_sums, &dq);
    }
}

// ---- what attention_choice.cuh calls ----
typedef struct {
    AttentionShape shape;           // the only one that the plans are for
    bool deterministic;
    cudnnHandle_t handle;           // owned; NULL: not initialised
    CudnnGraph forward, backward;
    float scale, minus_infinity, one; // the values of NUMBER_...
} CudnnAttention;
static CudnnAttention cudnn_attention;

static inline void cudnn_attention_free(void) {
    CudnnAttention* a = &cudnn_attention;
    if (a->handle == NULL) return;
    graph_free(&a->forward);
    graph_free(&a->backward);
    cudnn.cudnnDestroy(a->handle);
    memset(a, 0, sizeof *a);
}
static inline bool cudnn_attention_plan(CudnnGraph* g) {
    g->handle = cudnn_attention.handle;
    if (g == &cudnn_attention.forward) attention_forward_graph(g, cudnn_attention.shape);
    else attention_backward_graph(g, cudnn_attention.shape, cudnn_attention.deterministic);
    return graph_plan(g);
}
// Returns why cuDNN's backward must not be used for T tokens, though it makes a plan, or "". NVIDIA's front end refuses
// one token, and gives cuDNN up to 9.15.0 a mask of sequence lengths where T is not a multiple of 128: without that
// mask, which our graph lacks, the backward may touch memory outside of its arrays.
static inline const char* cudnn_attention_refusal(int64_t T) {
    if (T == 1) return "its backward does not support sequences of one token";
    bool lacks_mask = T % 128 != 0 && cudnn.cudnnGetVersion() < 91501;
    if (lacks_mask) return "before 9.15.1 it has a bug where T is not a multiple of 128";
    return "";
}
// Plans both directions on the GPU in use. "", or why cuDNN cannot be used.
static inline const char* cudnn_attention_init(AttentionShape s, bool deterministic) {
    static char why[sizeof cudnn_attention.forward.why];
    CudnnAttention* a = &cudnn_attention;
    const char* refusal = cudnn_load();
    if (refusal[0] == 0) refusal = cudnn_attention_refusal(s.T);
    if (refusal[0] != 0) return refusal;
    cudnnStatus_t status = cudnn.cudnnCreate(&a->handle);
    if (status == CUDNN_STATUS_SUCCESS) status = cudnn.cudnnSetStream(a->handle, compute_stream);
    if (status != CUDNN_STATUS_SUCCESS) {
        char reason[256];
        cudnn_reason(reason, sizeof reason);
        snprintf(why, sizeof why, "it cannot use this GPU: %s%s", cudnn.cudnnGetErrorString(status), reason);
        return why;
    }
    a->shape = s;
    a->deterministic = deterministic;
    a->scale = 1.0f / sqrtf((float)s.HS);
    a->minus_infinity = -INFINITY;
    a->one = 1;
    if (cudnn_attention_plan(&a->forward) && cudnn_attention_plan(&a->backward)) return "";
    memcpy(why, a->forward.why[0] ? a->forward.why : a->backward.why, sizeof why);
    cudnn_attention_free();
    return why;
}

// The workspace: delta, the sums of dq, and what the plan that runs wants, each beginning on 256 bytes.
typedef struct { size_t dq_sums, plan, end; } CudnnAttentionWorkspace; // where they begin; delta begins at 0
static inline CudnnAttentionWorkspace cudnn_attention_workspace(void) {
    const CudnnAttention* a = &cudnn_attention;
    size_t rows = (size_t)(a->shape.B * a->shape.NH * a->shape.T),
           sums = a->deterministic ? 0 : rows * (size_t)a->shape.HS;
    CudnnAttentionWorkspace w;
    w.dq_sums = round_up(rows * sizeof(float), 256);
    w.plan = w.dq_sums + round_up(sums * sizeof(float), 256);
    w.end = w.plan + size_max((size_t)a->forward.workspace_bytes, (size_t)a->backward.workspace_bytes);
    return w;
}

// As in layers.h, for the planned shape. workspace (cudnn_attention_workspace().end); every array begins on 16 bytes.
static inline void cudnn_attention_forward(floatX* out, float* stats, const floatX* qkv, char* workspace) {
    CudnnAttention* a = &cudnn_attention;
    const int64_t C = a->shape.NH * a->shape.HS;
    const CudnnArgument arguments[] = {
        { TENSOR_Q, qkv }, { TENSOR_K, qkv + C }, { TENSOR_V, qkv + 2 * C },
        { TENSOR_OUT, out }, { TENSOR_STATS, stats },
        { NUMBER_SCALE, &a->scale }, { NUMBER_MINUS_INFINITY, &a->minus_infinity },
    };
    graph_run(&a->forward, arguments, sizeof arguments / sizeof *arguments,
              workspace + cudnn_attention_workspace().plan, "attention_forward");
}
static inline void cudnn_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                            const float* stats, char* workspace) {
    CudnnAttention* a = &cudnn_attention;
    const int64_t C = a->shape.NH * a->shape.HS;
    CudnnAttentionWorkspace w = cudnn_attention_workspace();
    const CudnnArgument arguments[] = {
        { TENSOR_Q, qkv }, { TENSOR_K, qkv + C }, { TENSOR_V, qkv + 2 * C },
        { TENSOR_OUT, out }, { TENSOR_STATS, stats },
        { TENSOR_DOUT, dout }, { TENSOR_DQ, dqkv }, { TENSOR_DK, dqkv + C }, { TENSOR_DV, dqkv + 2 * C },
        { NUMBER_SCALE, &a->scale }, { NUMBER_MINUS_INFINITY, &a->minus_infinity },
        { NUMBER_ONE, &a->one }, { TENSOR_ROW_SUMS, workspace },
        { TENSOR_DQ_SUMS, workspace + w.dq_sums }, // only if dq is summed
    };
    int n = sizeof arguments / sizeof *arguments - (a->deterministic ? 1 : 0);
    graph_run(&a->backward, arguments, n, workspace + w.plan, "attention_backward");
}
#endif
