/*
layers_api.h - every layer's forward and backward: what a program may call, documented once.

Implemented by cpu/ (C and OpenMP, the readable reference) and cuda/; programs include layers.h, which picks one.
Tensors are row-major in device memory; floatX is their stored precision, all sums are fp32 or wider. N is a number of
rows, usually B*T.

Shapes    B sequences, T tokens each, C channels, NH heads of HS = C/NH channels, V vocabulary, Vp V padded.
Parts     encoder_part_* and classifier_part_* use a share of the vocabulary: the rows of wte for a range of tokens.
Weights   are (OC,C): out = inp w^T + bias, as in PyTorch's Linear.
GradMode  is for parameter gradients: the first micro-batch of a step overwrites them (GRAD_SET), later
          ones add (GRAD_ADD), so nothing is ever zeroed. Gradients of activations are overwritten unless marked +=.
No rows   N may be 0, and so may B in an embedding. Then no row is written, and gradients of parameters are sums of
          nothing: GRAD_SET sets them to 0, GRAD_ADD keeps them. n may be 0, too: sums add 0, and nothing else happens.
Aliasing  is allowed only where a comment permits it.
Failures  Layers return no errors: layers_init checks the shapes, and a device error ends the process, naming the layer.
*/
#ifndef LLMC_LAYERS_API_H
#define LLMC_LAYERS_API_H
#include "../base/precision.h"

typedef enum { GRAD_SET, GRAD_ADD } GradMode;

// ---- the user's choices, made before anything else in this header is called ----
typedef enum { ATTENTION_AUTO, ATTENTION_CUDNN, ATTENTION_OWN } AttentionChoice;
// AUTO: cuDNN's attention if it supports these shapes, otherwise our own. deterministic: repeatable bits. If the device
// does not support the choice, this call or layers_init dies.
void layers_choose(AttentionChoice attention, bool deterministic);

// ---- workspace: scratch that layers share, allocated once for the largest shapes that will be seen ----
// parts: ranks that share the model. Each stores the rows or columns of C/parts channels of every matrix, NH/parts
// heads, and Vp tokens of the vocabulary; 1: everything. context: ranks that share the tokens of each sequence. Each
// computes B*T/context rows in every layer but attention. In attention it computes either whole sequences of NH/context
// heads (chunk 0), or attention_part_* with chunks of `chunk` tokens.
typedef struct { int B, T, C, NH, Vp, parts, context, chunk; } LayerShapes;
static inline LayerShapes layer_shapes(int B, int T, int C, int NH, int Vp, int parts) {
    return (LayerShapes){ B, T, C, NH, Vp, parts, 1, 0 };
}
static inline int layer_rows(LayerShapes s) { return s.B * s.T / s.context; }
// The checks of layers_init on every device. Dies if one fails.
static inline void layer_shapes_check(LayerShapes s) {
    require(s.B >= 1 && s.T >= 1, "layers need at least one sequence of one token, not B = %d, T = %d", s.B, s.T);
    require(s.C >= 1 && s.NH >= 1 && s.C % s.NH == 0,
            "%d channels do not divide over %d heads; choose --channels as a multiple of --heads", s.C, s.NH);
    invariant(s.parts >= 1 && s.NH % s.parts == 0, "%d heads do not divide over %d ranks that share a model", s.NH,
              s.parts);
    invariant(s.context >= 1 && s.T % s.context == 0, "%d tokens do not divide over %d ranks of a sequence", s.T,
              s.context);
    invariant(s.chunk > 0 || s.NH % s.context == 0, "%d heads do not divide over %d ranks that share a sequence", s.NH,
              s.context);
    invariant(s.Vp >= 1, "the padded vocabulary must have at least one token, not %d", s.Vp);
    // elements are counted in size_t, rows in int
    require((size_t)s.B * (size_t)s.T <= INT32_MAX / 4,
            "B*T = %d*%d is more rows than a layer can count; use a smaller --batch-size", s.B, s.T);
    require(s.C <= INT32_MAX / 4, "%d channels are more than a layer can count", s.C);
}
// To be called before layers_init and before ranks exchange anything. A GPU times each matrix product of a training
// step of these shapes with every algorithm that its library offers, in temporary memory, and keeps the fastest. The
// CPU uses a single algorithm.
void   layers_prepare(LayerShapes s);
// Announces whether the matrix products of the next calls overlap with a sum over ranks. If they do, a GPU uses
// algorithms chosen for the multiprocessors that the sum leaves free, unless bits must be repeatable.
void   layers_overlap_sum(bool overlaps);
size_t layers_workspace_bytes(LayerShapes s); // what layers_init will allocate as MEMORY_WORKSPACE
void   layers_init(LayerShapes s);            // dies if a shape cannot be computed (C not a multiple of NH, ...)
void   layers_free(void);
const char* layers_description(void);         // how this device computes matrix products, for the log

// ---- a part of the vocabulary: several ranks share wte by rows ----
typedef struct { int first, count; } TokenRange; // of the padded vocabulary: tokens [first, first + count)
// Returns the tokens of part number `part` when Vp tokens are divided into `parts` equal parts.
static inline TokenRange token_range(int Vp, int parts, int part) {
    invariant(Vp % parts == 0, "%d tokens of the padded vocabulary do not divide into %d parts", Vp, parts);
    return (TokenRange){ part * (Vp / parts), Vp / parts };
}
// Returns how many tokens of a range are in the vocabulary. The others, possibly all, are padding.
static inline int tokens_in_range(TokenRange range, int V) {
    int n = V - range.first;
    return n < 0 ? 0 : n < range.count ? n : range.count;
}

// ---- embeddings ----
// out (B,T,C) = wte[tokens] + wpe[0..T).  tokens (B,T) in [0,V), wte (Vp,C), wpe (maxT,C)
void encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C);
// dwte (Vp,C) += rows of dout by token (the matrix is tied, so the classifier has written dwte before);
// dwpe (T,C) set or += sum of dout over B; if maxT is larger than T, rows from T on are not written. Sums are formed in
// a fixed order, so every run gives the same bits.
void encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                      GradMode mode);
// The same with a part of the matrix: wte, dwte (range.count,C) begin with the row of token range.first. range.count is
// at most LayerShapes.Vp; tokens are those of the whole vocabulary. A token outside the range counts as a row of zeros
// in out, and adds nothing to dwte. If exactly one part is given wpe, and the others NULL, the sum of out over all
// parts equals encoder_forward's out to the bit. dwpe may also be NULL. dwpe and the parts of dwte have the bits of
// encoder_backward.
void encoder_part_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, TokenRange range,
                          int B, int T, int C);
void encoder_part_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, TokenRange range,
                           int B, int T, int C, GradMode mode);

// ---- layernorm (eps 1e-5), with the residual addition in front of it ----
// res (N,C) = inp1 + inp2, out (N,C) = (res - mean) * rstd * w + b; mean, rstd (N). The sum is rounded to floatX before
// it is normalised, so that a recomputation from res gives the same bits. inp2 NULL: res must be inp1, nothing is
// added.
void residual_layernorm_forward(floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                const floatX* inp2, const floatX* w, const floatX* b, int N, int C);
// dinp (N,C) += (the residual stream's gradient flows past the layer); dw, db (C) set or +=.
void layernorm_backward(floatX* dinp, floatX* dw, floatX* db, const floatX* dout, const floatX* inp, const floatX* w,
                        const float* mean, const float* rstd, int N, int C, GradMode mode);

// ---- linear layers ----
// out (N,OC) = inp (N,C) w^T (OC,C) + bias (OC); bias NULL: none
void matmul_forward(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC);
// pre (N,OC) = inp w^T + bias; out (N,OC) = gelu(pre), the tanh form
void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* w, const floatX* bias, int N, int C,
                         int OC);
// dinp (N,C) = dout (N,OC) w (OC,C)
void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* w, int N, int C, int OC);
// dinp (N,C) = (dout w) * gelu'(pre), pre (N,C): the layer's input was gelu(pre)
void matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* w, const floatX* pre, int N, int C,
                                int OC);
// dw (OC,C) set or += dout^T inp; dbias (OC) set or += column sums of dout; dbias NULL: none
void matmul_backward_weight(floatX* dw, floatX* dbias, const floatX* dout, const floatX* inp, int N, int C, int OC,
                            GradMode mode);
// dw (OC,C) set or += dout^T inp in fp32, without rounding to floatX. If floatX is fp32, dw gets the
// bits of matmul_backward_weight.
void matmul_backward_weight_fp32(float* dw, const floatX* dout, const floatX* inp, int N, int C, int OC, GradMode mode);
// matmul_backward_weight without a bias, for N rows that come in chunks: dout (n,OC) and inp (n,C) are the rows from
// `row` on. Call it for each chunk, in order; between calls the contents of dw are undefined. In 16 bits the chunks are
// summed in fp32 in the workspace, and dw is rounded once, with the last chunk, because rounding it with each chunk
// would lose precision every time. Only for wte, OC = Vp.
void matmul_backward_weight_chunk(floatX* dw, const floatX* dout, const floatX* inp, int row, int n, int N, int C,
                                  int OC, GradMode mode);

// ---- causal self-attention; the (T,T) matrix is never stored ----
// qkv (B,T,3C): q, k, v side by side, heads within each. out (B,T,C); stats (B,NH,T) = log(sum(exp(scaled scores)))
void attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH);
// dqkv (B,T,3C) from dout (B,T,C), and out and stats as attention_forward wrote them
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                        int B, int T, int C, int NH);

// ---- attention in parts: T queries and T keys, each a chunk of a longer sequence ----
// A query attends to all its keys in several calls: one with its own chunk (causal: query t sees keys 0..t), and one
// with each earlier chunk, of which it sees every key. q is in qkv (B,T,3C), whose k and v are not read; kv (B,T,2C) is
// k and v side by side. out (B,T,C), fp32, is the attention over all keys so far, and stats (B,NH,T) is
// log(sum(exp(scaled scores))) over them. merge: out and stats contain the results of earlier calls, to which this one
// adds; otherwise they are overwritten. Merging subtracts the larger of the two logs before every exponential.
void attention_part_forward(float* out, float* stats, const floatX* qkv, const floatX* kv, bool causal, bool merge,
                            int B, int T, int C, int NH);
// dq (B,T,C) += and dkv (B,T,2C) += the gradients of this part, fp32. out (B,T,C) and stats are those of all parts
// together.
void attention_part_backward(float* dq, float* dkv, const floatX* dout, const floatX* qkv, const floatX* kv,
                             const floatX* out, const float* stats, bool causal, int B, int T, int C, int NH);

// ---- classifier: softmax and cross-entropy over the first V of the Vp logits in a row; the rest is padding ----
// Logits are computed in chunks of rows, so there is no (B,T,V) tensor. These limit the logits of a chunk: a GPU gets
// one per CLASSIFIER_BYTES of its memory, from .._CUDA to .._MOST. (test/split/chunks.h sets lower limits.)
#ifndef CLASSIFIER_ELEMENTS_CPU
enum {
    CLASSIFIER_ELEMENTS_CPU = 1 << 24, CLASSIFIER_ELEMENTS_CUDA = 1 << 28, CLASSIFIER_ELEMENTS_MOST = 1 << 30,
    CLASSIFIER_BYTES = 64
};
#endif
// The limit in use. layers_choose sets it on a GPU, and --predict for the device that it predicts.
static int classifier_elements = CLASSIFIER_ELEMENTS_CPU;
// Returns the limit for a GPU with `memory` bytes. It is a power of two, because GPUs sold with 80 GB have 79 or 85.
// The gradient of wte is a sum over chunks, and its bits depend on their number. With --deterministic, GPUs of every
// size therefore use the limit of a small one.
static inline int classifier_elements_cuda(double memory, bool deterministic) {
    int elements = CLASSIFIER_ELEMENTS_CUDA;
    while (!deterministic && elements < CLASSIFIER_ELEMENTS_MOST && memory >= 2.0 * CLASSIFIER_BYTES * elements)
        elements *= 2;
    return elements;
}
// Returns how many of N rows of logits to compute at a time: enough to keep the device busy. Chunks are as few as the
// limit allows, because each reads wte, and reads and writes the sums of its gradient. Their sizes are nearly equal,
// because a short chunk computes slowly.
static inline int classifier_rows(int N, int Vp) {
    size_t n = (size_t)N, most = size_max(64, (size_t)(classifier_elements / Vp) / 64 * 64);
    size_t chunks = size_max(1, ceil_div(n, most));
    return (int)size_min(n, round_up(ceil_div(n, chunks), 64));
}
// Returns the number of fp32 sums for wte's gradient: 0 with one chunk, or if the gradient itself is fp32.
static inline size_t classifier_sums(int N, int C, int Vp) {
    return NEEDS_MASTER && classifier_rows(N, Vp) < N ? (size_t)Vp * (size_t)C : 0;
}
// losses (N) = -log softmax(logits)[target]; targets (N) in [0,V), or -1: no target, loss and gradient 0
void classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp);
// the same, and logits (N,Vp) become their own gradient in place: (softmax - onehot) * dloss, 0 in the padding
void classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp);

// ---- the classifier in parts, each with the logits (N,range.count) of its own tokens ----
// Three numbers per part and row are enough for the loss and every gradient, so ranks gather these and no logits.
// stats (N,3): the largest logit, the sum of exp(logit - largest), and the target's logit, or 0 if the target is not in
// the range. Padding does not count; for a range of padding alone, stats are (-FLT_MAX, 0, 0). targets (N) in [0,V), or
// -1, are those of the whole vocabulary.
void classifier_part_stats(float* stats, const floatX* logits, const int* targets, TokenRange range, int N, int V);
// losses (N) as in classifier_forward, from all (parts,N,3): the stats of every part, which are added in their order.
// All parts therefore get the same bits; with one part these are the bits of classifier_forward.
void classifier_part_forward(float* losses, const float* all, const int* targets, int parts, int N);
// the same, and logits (N,range.count) become their own gradient in place, as in classifier_forward_backward
void classifier_part_forward_backward(float* losses, floatX* logits, const float* all, const int* targets, float dloss,
                                      TokenRange range, int parts, int N, int V);

// ---- numbers about a step, which stay on the device until the log line reads all of them together ----
typedef struct {
    double loss;        // sum of the tokens' losses. Ranks add up the first STEP_SUMS numbers.
    double stopping;    // ranks that a signal has told to save and stop
    double saving;      // ranks that are still writing a checkpoint
    double grad_square; // sum of squared gradients, as stored (that is, times the loss scale)
    double param_square;// sum of squared parameters
    double grad_norm;   // set by clip_gradients, without the loss scale
    float  grad_scale;  // AdamW multiplies gradients by it; 0: they were not finite, the step is skipped
} StepStats;
#define STEP_SUMS 3
// The order of each sum depends only on n.
void add_sum(double* acc, const float* x, size_t n);            // *acc += sum of x (n)
void add_sum_squares(double* acc, const floatX* x, size_t n);   // *acc += sum of x^2
void add_in_place(floatX* x, const floatX* y, size_t n);        // x (n) += y (n), rounded once; they must not overlap
// stats->grad_norm = sqrt(grad_square) / loss_scale; grad_scale = min(1, max_norm / grad_norm) / loss_scale, 0 if that
// is not finite. max_norm 0: no clipping. The same formula as torch.nn.utils.clip_grad_norm_ (which adds 1e-6 to the
// norm).
void clip_gradients(StepStats* stats, float max_norm, float loss_scale);

// ---- optimizer: AdamW over flat memory (Loshchilov and Hutter, arXiv 1711.05101; Adam's bias correction) ----
// Doubles, as the user gave them: in fp32 a beta of 0.9999999 would become 0.99999988, and 1 - beta a fifth larger.
// t counts updates from 1.
typedef struct { double lr, beta1, beta2, eps, weight_decay; int t; } AdamW;
// master, m, v (n) fp32, grads (n) floatX; params (n) floatX become master's new values, rounded. params NULL: only
// master, m and v change, and the caller rounds params from master when needed. If floatX is fp32, weights are their
// own master, and one of params and master is NULL. The first no_decay elements are not decayed. *grad_scale (device)
// multiplies gradients; if it is 0, nothing changes. *square (device) += the sum of squares of the params after the
// call, in an order that depends only on n; NULL: no sum.
void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads,
                  const float* grad_scale, size_t n, size_t no_decay, double* square);

// ---- fp32 versions for shards. If floatX is fp32, they give the bits of their namesakes above ----
void to_fp32(float* out, const floatX* x, size_t n);            // out (n) = x (n)
void from_fp32(floatX* out, const float* x, size_t n);          // out (n) = x (n), rounded
void add_in_place_fp32(float* x, const float* y, size_t n);     // x (n) += y (n); they must not overlap
// *acc += sum of x^2, in an order that depends only on n
void add_sum_squares_fp32(double* acc, const float* x, size_t n);
// params (n), which are their own master, m and v become the master, m and v that adamw_update would compute from the
// same numbers; grads (n) are fp32.
void adamw_update_fp32(AdamW a, float* params, float* m, float* v, const float* grads, const float* grad_scale,
                       size_t n, size_t no_decay);
#endif
