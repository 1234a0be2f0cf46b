/*
layers_api.h - every layer's forward and backward: what a program may call, documented once.

Implemented by cpu/ (C and OpenMP, the readable reference) and cuda/; programs include layers.h, which picks one.
Tensors are row-major in device memory; floatX is their stored precision, all sums are fp32 or wider. N is a number of
rows, usually B*T.

Shapes    B sequences, T tokens each, C channels, NH heads of HS = C/NH channels, V vocabulary, Vp V padded.
Parts     *_part_* layers have a share of the vocabulary: the rows of wte for the tokens of a range.
Weights   are (OC,C): out = inp w^T + bias, as in PyTorch's Linear.
GradMode  is for parameter gradients: the first micro-batch of a step overwrites them (GRAD_SET), later
          ones add (GRAD_ADD), so nothing is ever zeroed. Gradients of activations are overwritten unless it says +=.
No rows   N may be 0, and so may B in an embedding. Then no row is written, and gradients of parameters are sums of
          nothing: GRAD_SET sets them to 0, GRAD_ADD keeps them. n may be 0, too: sums add 0, and nothing else happens.
Aliasing  is allowed only where a comment says so.
Failures  There are none at run time: shapes are checked by layers_init, and a device error dies with the layer's name.
*/
#ifndef LLMC_LAYERS_API_H
#define LLMC_LAYERS_API_H
#include "../base/precision.h"

typedef enum { GRAD_SET, GRAD_ADD } GradMode;

// ---- what the user decides about layers, before anything else here is called ----
typedef enum { ATTENTION_AUTO, ATTENTION_CUDNN, ATTENTION_OWN } AttentionChoice;
// AUTO: cuDNN's attention if it takes these shapes, otherwise our own. Dies if the chosen one does not exist here.
// deterministic: repeatable bits.
void layers_choose(AttentionChoice attention, bool deterministic);

// ---- workspace: scratch that layers share, allocated once for the largest shapes that will be seen ----
// parts: ranks that share the model. Each stores the rows or columns of C/parts channels of every matrix, NH/parts
// heads, and Vp tokens of the vocabulary; 1: everything. context: ranks that share the tokens of each sequence. Each
// computes B*T/context rows in every layer but attention. In attention it computes either whole sequences of NH/context
// heads (chunk 0), or attention_part_* with chunks of this many tokens.
typedef struct { int B, T, C, NH, Vp, parts, context, chunk; } LayerShapes;
static inline LayerShapes layer_shapes(int B, int T, int C, int NH, int Vp, int parts) {
    return (LayerShapes){ B, T, C, NH, Vp, parts, 1, 0 };
}
static inline int layer_rows(LayerShapes s) { return s.B * s.T / s.context; }
// The checks of layers_init on every device.
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
// Before layers_init and before ranks exchange anything: a GPU tries each matrix product of a training step of these
// shapes in every way that its library knows, on memory that it frees, and keeps the fastest. The CPU
// has only one way.
void   layers_prepare(LayerShapes s);
// Says whether the matrix products of the next calls overlap with a sum over ranks. If so, a GPU chooses them for the
// multiprocessors that the sum leaves free.
void   layers_overlap_sum(bool overlaps);
size_t layers_workspace_bytes(LayerShapes s); // what layers_init will allocate as MEMORY_WORKSPACE
void   layers_init(LayerShapes s);            // dies if a shape cannot be computed (C not a multiple of NH, ...)
void   layers_free(void);
const char* layers_description(void);         // how matrix products are computed here, for the log

// ---- a part of the vocabulary: several ranks share wte by rows ----
typedef struct { int first, count; } TokenRange; // of the padded vocabulary: tokens [first, first + count)
// Returns the tokens of part number `part` when Vp tokens are divided into `parts` equal parts.
static inline TokenRange token_range(int Vp, int parts, int part) {
    invariant(Vp % parts == 0, "%d tokens of the padded vocabulary do not divide into %d parts", Vp, parts);
    return (TokenRange){ part * (Vp / parts), Vp / parts };
}
// Returns how many tokens of a range are in the vocabulary: the rest, which may be all, is padding.
static inline int tokens_in_range(TokenRange range, int V) {
    int n = V - range.first;
    return n < 0 ? 0 : n < range.count ? n : range.count;
}

// ---- embeddings ----
// out (B,T,C) = wte[tokens] + wpe[0..T).  tokens (B,T) in [0,V), wte (Vp,C), wpe (maxT,C)
void encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C);
// dwte (Vp,C) += rows of dout by token (the classifier has written dwte before: the matrix is tied);
// dwpe (T,C) set or += sum of dout over B; nothing is written behind its T rows, where maxT is larger. Sums are formed
// in a fixed order: equal to the bit from run to run.
void encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                      GradMode mode);
// The same with a part of the matrix: wte, dwte (range.count,C) begin with the row of token range.first. range.count is
// at most LayerShapes.Vp; tokens are those of the whole vocabulary. A token elsewhere has 0 in out, and adds nothing to
// dwte. The sum of all parts' out is the whole's, to the bit, if one of them was given wpe: others have wpe NULL, and
// nothing is added. dwpe may be NULL, too. Parts of dwte, and dwpe, have the bits of the whole.
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
// dw (OC,C) set or += dout^T inp, which is not rounded: where floatX is fp32, the bits of matmul_backward_weight
void matmul_backward_weight_fp32(float* dw, const floatX* dout, const floatX* inp, int N, int C, int OC, GradMode mode);
// matmul_backward_weight without a bias, of N rows that come in chunks: dout (n,OC) and inp (n,C) are those from `row`
// on. A call for each chunk, in order; between them dw may hold anything. In 16 bits the chunks are added up in fp32,
// in the workspace, and dw is rounded once, with the last: rounded with each, it would lose as much again each time.
// Only for wte, OC = Vp.
void matmul_backward_weight_chunk(floatX* dw, const floatX* dout, const floatX* inp, int row, int n, int N, int C,
                                  int OC, GradMode mode);

// ---- causal self-attention; the (T,T) matrix is never stored ----
// qkv (B,T,3C): q, k, v side by side, heads within each. out (B,T,C); stats (B,NH,T) = log(sum(exp(scaled scores)))
void attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH);
// dqkv (B,T,3C) from dout (B,T,C) and what forward left: out, stats
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                        int B, int T, int C, int NH);

// ---- attention in parts: T queries and T keys, each a chunk of a longer sequence ----
// Several calls attend over all keys that a query sees: one with its own chunk (causal: query t sees keys 0..t), and
// one with each earlier chunk, of which it sees every key. q is in qkv (B,T,3C), whose k and v are not read; kv
// (B,T,2C): k and v side by side. out (B,T,C), fp32, is the attention over all keys so far, and stats (B,NH,T)
// log(sum(exp(scaled scores))) over them. merge: out and stats hold those of earlier calls; else they are overwritten.
// The larger of the two logs stays out of every exponential.
void attention_part_forward(float* out, float* stats, const floatX* qkv, const floatX* kv, bool causal, bool merge,
                            int B, int T, int C, int NH);
// dq (B,T,C) += and dkv (B,T,2C) += what this part gives, fp32. out (B,T,C) and stats are those of all parts together.
void attention_part_backward(float* dq, float* dkv, const floatX* dout, const floatX* qkv, const floatX* kv,
                             const floatX* out, const float* stats, bool causal, int B, int T, int C, int NH);

// ---- classifier: softmax and cross-entropy over V of each row's Vp logits; the padding takes no part ----
// How many rows of logits to compute at a time: enough to keep the device busy, without a (B,T,V) tensor. Chunks are as
// few as that allows, because each reads wte and reads and writes the sums of its gradient; and alike, because a short
// one computes slowly.
// Logits at a time (test/split/chunks.h has fewer); on a GPU one for CLASSIFIER_BYTES of its memory
#ifndef CLASSIFIER_ELEMENTS_CPU
enum {
    CLASSIFIER_ELEMENTS_CPU = 1 << 24, CLASSIFIER_ELEMENTS_CUDA = 1 << 28, CLASSIFIER_ELEMENTS_MOST = 1 << 30,
    CLASSIFIER_BYTES = 64
};
#endif
// layers_choose sets a GPU's; --predict may speak of either device
static int classifier_elements = CLASSIFIER_ELEMENTS_CPU;
// Returns a GPU's. They are a power of two, because memory that is sold as 80 GB has 79 or 85. The gradient of wte is a
// sum over chunks, whose bits depend on their number: with --deterministic, GPUs of every size have that of a small
// one.
static inline int classifier_elements_cuda(double memory, bool deterministic) {
    int elements = CLASSIFIER_ELEMENTS_CUDA;
    while (!deterministic && elements < CLASSIFIER_ELEMENTS_MOST && memory >= 2.0 * CLASSIFIER_BYTES * elements)
        elements *= 2;
    return elements;
}
static inline int classifier_rows(int N, int Vp) {
    size_t n = (size_t)N, most = size_max(64, (size_t)(classifier_elements / Vp) / 64 * 64);
    size_t chunks = size_max(1, ceil_div(n, most));
    return (int)size_min(n, round_up(ceil_div(n, chunks), 64));
}
// Returns the elements of the fp32 sums of wte's gradient: none where there is one chunk,
// or where the gradient itself is fp32.
static inline size_t classifier_sums(int N, int C, int Vp) {
    return NEEDS_MASTER && classifier_rows(N, Vp) < N ? (size_t)Vp * (size_t)C : 0;
}
// losses (N) = -log softmax(logits)[target]; targets (N) in [0,V), or -1: a row without a target, loss and gradient 0
void classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp);
// the same, and logits (N,Vp) become their own gradient in place: (softmax - onehot) * dloss, 0 in the padding
void classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp);

// ---- the classifier in parts, each of which has the logits (N,range.count) of its tokens ----
// Three numbers of each part and row are enough for the loss and every gradient: they are gathered, no logits are.
// stats (N,3): the largest logit, the sum of exp(logit - largest), and the target's logit, or 0 if it is elsewhere.
// Padding takes no part; where there is nothing else, they are (-FLT_MAX, 0, 0). targets (N) in [0,V), or -1: those of
// the whole vocabulary.
void classifier_part_stats(float* stats, const floatX* logits, const int* targets, TokenRange range, int N, int V);
// losses (N) as classifier_forward's, from all (parts,N,3): stats of every part in order, which is that of the sums. So
// they are the same bits for each part; and those of classifier_forward if there is one part.
void classifier_part_forward(float* losses, const float* all, const int* targets, int parts, int N);
// the same, and logits (N,range.count) become their own gradient in place, as in classifier_forward_backward
void classifier_part_forward_backward(float* losses, floatX* logits, const float* all, const int* targets, float dloss,
                                      TokenRange range, int parts, int N, int V);

// ---- numbers about a step: they stay on the device until the log line reads them, all at once ----
typedef struct {
    double loss;        // sum of the tokens' losses. Programs of several ranks add these STEP_SUMS numbers up:
    double stopping;    // ranks that a signal has told to save and stop
    double saving;      // ranks that are still writing a checkpoint
    double grad_square; // sum of squared gradients, as stored (that is, times the loss scale)
    double param_square;// sum of squared parameters
    double grad_norm;   // what clip_gradients found, without the loss scale
    float  grad_scale;  // what AdamW multiplies gradients by; 0: they were not finite, the step is skipped
} StepStats;
#define STEP_SUMS 3
// sums are formed in an order that depends on n alone
void add_sum(double* acc, const float* x, size_t n);            // *acc += sum of x (n)
void add_sum_squares(double* acc, const floatX* x, size_t n);   // *acc += sum of x^2
void add_in_place(floatX* x, const floatX* y, size_t n);        // x (n) += y (n), rounded once; they must not overlap
// stats->grad_norm = sqrt(grad_square) / loss_scale; grad_scale = min(1, max_norm / grad_norm) / loss_scale, 0 if that
// is not finite. max_norm 0: no clipping. The same formula as torch.nn.utils.clip_grad_norm_ (which adds 1e-6 to the
// norm).
void clip_gradients(StepStats* stats, float max_norm, float loss_scale);

// ---- optimizer: AdamW over flat memory (Loshchilov and Hutter, arXiv 1711.05101; Adam's bias correction) ----
// As they were given: in fp32 a beta of 0.9999999 would be 0.99999988, and 1 - beta a fifth more. t counts updates from
// 1.
typedef struct { double lr, beta1, beta2, eps, weight_decay; int t; } AdamW;
// master, m, v (n) fp32, grads (n) floatX; params (n) floatX become master's new values, rounded. params NULL: only
// master, m and v change, and params are made from master when they are needed. Where floatX is fp32, weights are their
// own master, and one of params and master is NULL. The first no_decay elements are not decayed. *grad_scale (device)
// multiplies gradients;
// 0: nothing changes at all. *square (device) += the sum of squares of the params after the call, in an order that
// depends on n alone; NULL: no sum.
void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads,
                  const float* grad_scale, size_t n, size_t no_decay, double* square);

// ---- fp32 beside floatX, for shards. Where floatX is fp32, these give the bits of their namesakes above ----
void to_fp32(float* out, const floatX* x, size_t n);            // out (n) = x (n)
void from_fp32(floatX* out, const float* x, size_t n);          // out (n) = x (n), rounded
void add_in_place_fp32(float* x, const float* y, size_t n);     // x (n) += y (n); they must not overlap
// *acc += sum of x^2, in an order that depends on n alone
void add_sum_squares_fp32(double* acc, const float* x, size_t n);
// params (n) are their own master: params, m and v become what adamw_update makes of master,
// m and v with the same numbers.
void adamw_update_fp32(AdamW a, float* params, float* m, float* v, const float* grads, const float* grad_scale,
                       size_t n, size_t no_decay);
#endif
