/*
tensor.h - the reference of tensor parallelism (Shoeybi et al., arXiv 1909.08053, section 3). A program that is compiled with -include
test/split/tensor.h and -DTENSOR_PARTS=t computes, to the bit, what t ranks compute that share every matrix, if they form sums in rank
order:

  qkvw, fcw, wte  are cut by rows (of heads, within each of q, k and v): each part makes a share of the outputs. Its
                  gradient of the input is a term of a sum over all parts.
  projw, fcprojw  are cut by columns: each part takes a share of the inputs. Its output is a term of a sum over all parts,
                  and part 0's contains the bias. Its gradient of the input is a share.
  attention       goes by heads.
  the loss        comes from each part's maximum, sum of exponentials and target's logit: see tensor_row_loss.

Terms are rounded to floatX, as they would be sent, added in fp32 in rank order, and rounded once. Every product has a rank's shapes.
Embedding and layernorms give a rank's bits without help: a token's row lies on one rank, and activations are whole. Only for the CPU,
because of the loss. TENSOR_PARTS may be an expression that is computed when the program runs.
*/
#ifndef SPLIT_TENSOR_H
#define SPLIT_TENSOR_H
#include "split.h"
#ifdef __CUDACC__
#error "tensor.h computes the loss with functions of llmc/device/cpu/"
#endif

// Scratch for parts of a call's arguments: each is allocated once for the largest call so far.
typedef enum {
    ROOM_WEIGHT, ROOM_BIAS, ROOM_INPUT, ROOM_OUTPUT, ROOM_PRE, ROOM_QKV, ROOM_TERMS, ROOM_STATS, ROOMS
} TensorRoom;
static struct { void* memory[ROOMS]; size_t bytes[ROOMS]; } split_tensor; // owned, never freed
static inline void* tensor_room_bytes(TensorRoom k, size_t bytes) {
    if (bytes > split_tensor.bytes[k]) {
        split_free(split_tensor.memory[k]);
        split_tensor.memory[k] = split_alloc(bytes);
        split_tensor.bytes[k] = bytes;
    }
    return split_tensor.memory[k];
}
static inline floatX* tensor_room(TensorRoom k, size_t n) { return (floatX*)tensor_room_bytes(k, n * sizeof(floatX)); }

// A copy of a part of whole. NULL: there is none.
static inline floatX* tensor_take(TensorRoom k, const floatX* whole, SplitCut c) {
    if (whole == NULL) return NULL;
    floatX* part = tensor_room(k, split_elements(c));
    split_move(part, (floatX*)whole, c, sizeof(floatX), false);
    return part;
}

// Whether the current role's weights are cut by columns; else by rows.
static inline bool tensor_cuts_inputs(void) { return split_role == ROLE_PROJ || split_role == ROLE_FCPROJ; }
static inline int tensor_groups(void) { return split_role == ROLE_QKV ? 3 : 1; }
static inline SplitCut tensor_weight_cut(int C, int OC, int t, int q) { // of w (OC,C)
    return tensor_cuts_inputs() ? split_columns(OC, C, 1, t, q) : split_rows(OC, C, tensor_groups(), t, q);
}

// ---- linear layers: each as in layers.h ----
// column parallel: each part makes its columns of out, and of pre; NULL: without gelu
static inline void tensor_matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* w, const floatX* bias,
                                              int N, int C, int OC) {
    int t = TENSOR_PARTS, groups = tensor_groups();
    for (int q = 0; q < t; q++) {
        SplitCut cut = split_columns(N, OC, groups, t, q);
        const floatX* part_w = tensor_take(ROOM_WEIGHT, w, tensor_weight_cut(C, OC, t, q));
        const floatX* part_bias = tensor_take(ROOM_BIAS, bias, split_rows(OC, 1, groups, t, q));
        floatX* part_out = tensor_room(ROOM_OUTPUT, split_elements(cut));
        floatX* part_pre = tensor_room(ROOM_PRE, split_elements(cut));
        if (pre == NULL) matmul_forward(part_out, inp, part_w, part_bias, N, C, OC / t);
        else matmul_gelu_forward(part_out, part_pre, inp, part_w, part_bias, N, C, OC / t);
        split_put(part_out, out, cut);
        if (pre != NULL) split_put(part_pre, pre, cut);
    }
}
// row parallel: out is the sum of the parts' products of their columns of inp
static inline void tensor_matmul_forward(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    if (!tensor_cuts_inputs()) { tensor_matmul_gelu_forward(out, NULL, inp, w, bias, N, C, OC); return; }
    int t = TENSOR_PARTS;
    size_t n = (size_t)N * OC;
    floatX* terms = tensor_room(ROOM_TERMS, t * n);
    for (int q = 0; q < t; q++) {
        const floatX* part_w = tensor_take(ROOM_WEIGHT, w, tensor_weight_cut(C, OC, t, q));
        const floatX* part_inp = tensor_take(ROOM_INPUT, inp, split_columns(N, C, 1, t, q));
        matmul_forward(terms + q * n, part_inp, part_w, q == 0 ? bias : NULL, N, C / t, OC);
    }
    split_sum(out, terms, t, n);
}

// row parallel: each part makes its columns of dinp; pre NULL: without gelu'
static inline void tensor_matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* w, const floatX* pre,
                                                     int N, int C, int OC) {
    int t = TENSOR_PARTS;
    for (int q = 0; q < t; q++) {
        SplitCut cut = split_columns(N, C, 1, t, q);
        const floatX* part_w = tensor_take(ROOM_WEIGHT, w, tensor_weight_cut(C, OC, t, q));
        const floatX* part_pre = tensor_take(ROOM_PRE, pre, cut);
        floatX* part_dinp = tensor_room(ROOM_OUTPUT, split_elements(cut));
        if (pre == NULL) matmul_backward_input(part_dinp, dout, part_w, N, C / t, OC);
        else matmul_gelu_backward_input(part_dinp, dout, part_w, part_pre, N, C / t, OC);
        split_put(part_dinp, dinp, cut);
    }
}
// column parallel: dinp is the sum of the parts' products of their columns of dout
static inline void tensor_matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* w, int N, int C, int OC) {
    if (tensor_cuts_inputs()) { tensor_matmul_gelu_backward_input(dinp, dout, w, NULL, N, C, OC); return; }
    int t = TENSOR_PARTS;
    size_t n = (size_t)N * C;
    floatX* terms = tensor_room(ROOM_TERMS, t * n);
    for (int q = 0; q < t; q++) {
        const floatX* part_w = tensor_take(ROOM_WEIGHT, w, tensor_weight_cut(C, OC, t, q));
        const floatX* part_dout = tensor_take(ROOM_INPUT, dout, split_columns(N, OC, tensor_groups(), t, q));
        matmul_backward_input(terms + q * n, part_dout, part_w, N, C, OC / t);
    }
    split_sum(dinp, terms, t, n);
}
// Each part makes its share of dw. Where that is cut by columns, dbias is the same on all ranks, and part 0 makes it here.
static inline void tensor_matmul_backward_weight(floatX* dw, floatX* dbias, const floatX* dout, const floatX* inp,
                                                 int N, int C, int OC, GradMode mode) {
    int t = TENSOR_PARTS, groups = tensor_groups();
    bool columns = tensor_cuts_inputs();
    for (int q = 0; q < t; q++) {
        SplitCut cut = tensor_weight_cut(C, OC, t, q);
        SplitCut bias_cut = columns ? split_rows(OC, 1, 1, 1, 0) : split_rows(OC, 1, groups, t, q);
        floatX *part_dw = tensor_take(ROOM_WEIGHT, dw, cut), *part_dbias = tensor_take(ROOM_BIAS, dbias, bias_cut);
        if (columns) {
            const floatX* part_inp = tensor_take(ROOM_INPUT, inp, split_columns(N, C, 1, t, q));
            matmul_backward_weight(part_dw, q == 0 ? part_dbias : NULL, dout, part_inp, N, C / t, OC, mode);
        } else {
            const floatX* part_dout = tensor_take(ROOM_INPUT, dout, split_columns(N, OC, groups, t, q));
            matmul_backward_weight(part_dw, part_dbias, part_dout, inp, N, C, OC / t, mode);
        }
        split_put(part_dw, dw, cut);
        if (dbias != NULL) split_put(part_dbias, dbias, bias_cut);
    }
}
// Chunks that are added up in fp32 would need sums for each part.
static inline void tensor_matmul_backward_weight_chunk(floatX* dw, const floatX* dout, const floatX* inp, int row, int n, int N,
                                                       int C, int OC, GradMode mode) {
    require(!NEEDS_MASTER || n == N, "%d of %d rows of the classifier at once, and in 16 bits tensor.h knows only all", n, N);
    tensor_matmul_backward_weight(dw, NULL, dout, inp, n, C, OC, row == 0 ? mode : GRAD_ADD);
}

// ---- attention: each part has NH/t heads ----
// Of stats (B,NH,T).
static inline SplitCut tensor_stats_cut(int B, int T, int NH, int q) { return split_columns(B, NH * T, 1, TENSOR_PARTS, q); }
static inline void tensor_attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
    int t = TENSOR_PARTS, N = B * T;
    require(NH % t == 0, "%d heads do not divide into %d parts", NH, t);
    float* part_stats = (float*)tensor_room_bytes(ROOM_STATS, (size_t)N * NH * sizeof(float));
    for (int q = 0; q < t; q++) {
        SplitCut cut = split_columns(N, C, 1, t, q);
        const floatX* part_qkv = tensor_take(ROOM_QKV, qkv, split_columns(N, 3 * C, 3, t, q));
        floatX* part_out = tensor_room(ROOM_OUTPUT, split_elements(cut));
        attention_forward(part_out, part_stats, part_qkv, B, T, C / t, NH / t);
        split_put(part_out, out, cut);
        split_move(part_stats, stats, tensor_stats_cut(B, T, NH, q), sizeof(float), true);
    }
}
static inline void tensor_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                             const float* stats, int B, int T, int C, int NH) {
    int t = TENSOR_PARTS, N = B * T;
    float* part_stats = (float*)tensor_room_bytes(ROOM_STATS, (size_t)N * NH * sizeof(float));
    for (int q = 0; q < t; q++) {
        SplitCut cut = split_columns(N, C, 1, t, q), qkv_cut = split_columns(N, 3 * C, 3, t, q);
        const floatX* part_qkv = tensor_take(ROOM_QKV, qkv, qkv_cut);
        const floatX *part_dout = tensor_take(ROOM_INPUT, dout, cut), *part_out = tensor_take(ROOM_PRE, out, cut);
        floatX* part_dqkv = tensor_room(ROOM_OUTPUT, split_elements(qkv_cut));
        split_move(part_stats, (float*)stats, tensor_stats_cut(B, T, NH, q), sizeof(float), false);
        attention_backward(part_dqkv, part_dout, part_qkv, part_out, part_stats, B, T, C / t, NH / t);
        split_put(part_dqkv, dqkv, qkv_cut);
    }
}

// ---- classifier: part q has the logits of the tokens from q Vp/t on ----
// Of a row: the maximum M over all parts' maxima, and the sum of exp(logit - M), added up in rank order from each part's
// sum of exp(logit - its own maximum) times exp(its maximum - M). Returns the loss, log(sum) - (target's logit - M).
// e (Vp) is scratch.
static inline float tensor_row_loss(float* e, float* max, float* sum, const floatX* logits, int target, int V, int Vp) {
    int t = TENSOR_PARTS, n = Vp / t;
    float* m = (float*)xcalloc(2 * (size_t)t, sizeof(float)); // each part's maximum, then each part's sum
    float *s = m + t, of_target = 0;
    *max = -INFINITY;
    *sum = 0;
    for (int q = 0; q < t; q++) {
        int tokens = V - q * n < n ? V - q * n : n; // the rest is padding
        m[q] = -INFINITY;
        if (tokens <= 0) continue;
        s[q] = classifier_row_exp(e, &m[q], logits + q * n, tokens);
        if (target / n == q) of_target += to_float(logits[target]); // only one part has a term that is not 0
        if (!(m[q] <= *max)) *max = m[q];
    }
    for (int q = 0; q < t; q++) if (q * n < V) *sum += s[q] * exp_f32(m[q] - *max);
    free(m);
    return logf(*sum) - (of_target - *max);
}
static inline void tensor_classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp) {
    require(Vp % TENSOR_PARTS == 0, "%d logits do not divide into %d parts", Vp, TENSOR_PARTS);
    for (int i = 0; i < N; i++) {
        float max, sum;
        const floatX* row = logits + (size_t)i * Vp;
        losses[i] = targets[i] < 0 ? 0 : tensor_row_loss(thread_scratch(), &max, &sum, row, targets[i], V, Vp);
    }
}
// dlogit = (exp(logit - M) / sum - onehot) * dloss
static inline void tensor_classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss,
                                                      int N, int V, int Vp) {
    require(Vp % TENSOR_PARTS == 0, "%d logits do not divide into %d parts", Vp, TENSOR_PARTS);
    for (int i = 0; i < N; i++) {
        floatX* row = logits + (size_t)i * Vp;
        float max, sum;
        losses[i] = 0;
        if (targets[i] >= 0) {
            losses[i] = tensor_row_loss(thread_scratch(), &max, &sum, row, targets[i], V, Vp);
            float scale = dloss / sum;
            float target_gradient = exp_f32(to_float(row[targets[i]]) - max) * scale - dloss;
            for (int v = 0; v < V; v++) row[v] = to_floatX(exp_f32(to_float(row[v]) - max) * scale);
            row[targets[i]] = to_floatX(target_gradient);
        }
        int first = targets[i] < 0 ? 0 : V;
        memset(row + first, 0, (size_t)(Vp - first) * sizeof(floatX));
    }
}

// ---- what the program calls ----
#define SPLIT_CALL(name) tensor_##name
#include "calls.h"
#endif
