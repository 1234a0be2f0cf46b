/*
gpt2.h - what GPT-2 is, whatever runs it: its configuration, its units and tensors by name, its initial weights.

Parameters are unit-major. Unit 0 is the root (final layernorm, position and token embedding), units 1..L are the
blocks. Inside a unit the 1-D tensors come first and the 2-D ones follow in the order of the forward pass, so that
  - weight decay (2-D tensors only) is one number per unit: the first no_decay elements have none, and
  - read backwards, a unit's memory fills up in nearly the order in which the backward pass makes its gradients.
Architecture and initialisation follow Radford et al. 2019 and OpenAI's gpt-2/src/model.py.
*/
#ifndef LLMC_GPT2_H
#define LLMC_GPT2_H
#include "../base/common.h"
#include "../base/rng.h"

typedef struct {
    int max_T; // longest sequence: rows of the position embedding
    int V;     // vocabulary size
    int Vp;    // the same, padded to a multiple of 128: rows of the token embedding in memory
    int L;     // transformer blocks
    int NH;    // attention heads per block
    int C;     // channels
} GPT2Config;

// Tensors of a unit, in memory order.
enum { LNFW, LNFB, WPE, WTE, ROOT_TENSORS };
enum { LN1W, LN1B, QKVB, PROJB, LN2W, LN2B, FCB, FCPROJB, QKVW, PROJW, FCW, FCPROJW, BLOCK_TENSORS };
#define MAX_UNITS 257 // the root and 256 blocks

// How tensor parallelism divides a tensor (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3). The paper's weights
// are (in,out), these are (out,in): what it cuts by columns is cut by rows here, and the other way round.
typedef enum {
    CUT_NONE,    // replicated: each part has all of it. Layernorms, wpe, the biases that are added once to a sum of parts.
                 // Where the sequence is cut as well, layernorms see a part of it, and their gradients are summed over the
                 // parts (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2)
    CUT_OUTPUTS, // column-parallel: each part makes some of the outputs. fc; in wte, the logits of some of the vocabulary
    CUT_HEADS,   // column-parallel: qkv, whose outputs are three sections, q, k and v; of each a part makes the same heads
    CUT_INPUTS   // row-parallel: each part takes some of the inputs, and the parts' outputs are summed. proj, fcproj
} TensorCut;

typedef struct {
    char name[32];        // "wte", "h.3.qkv.weight": also the name in a checkpoint
    size_t offset;        // first element within the unit
    size_t rows, cols;    // cols 0: a 1-D tensor of `rows` elements
    size_t stored_rows;   // rows in a checkpoint: V of wte's Vp, else rows
    float init_mean, init_std;
    TensorCut cut;
} TensorInfo;

typedef struct {
    size_t offset;   // first element in the flat parameter memory
    size_t size;     // elements
    size_t no_decay; // how many of them, from the first, are never decayed
} Unit;

static inline int unit_tensors(int u) { return u == 0 ? (int)ROOT_TENSORS : (int)BLOCK_TENSORS; }

static inline size_t unit_elements(GPT2Config c, int u) {
    size_t C = (size_t)c.C;
    return u == 0 ? ((size_t)c.Vp + (size_t)c.max_T + 2) * C : 12*C*C + 13*C;
}

static inline size_t unit_no_decay(GPT2Config c, int u) { return (size_t)c.C * (u == 0 ? 2 : 13); }

static inline size_t tensor_elements(TensorInfo t) { return t.rows * (t.cols ? t.cols : 1); }
static inline size_t tensor_stored_elements(TensorInfo t) { return t.stored_rows * (t.cols ? t.cols : 1); }

// Tensor i of unit u. Weights start from N(0, 0.02), the two projections into the residual stream from
// N(0, 0.02/sqrt(2L)), biases from 0, layernorm weights from 1, and the padding of wte from 0.
static inline TensorInfo unit_tensor(GPT2Config c, int u, int i) {
    static const char* const root_names[ROOT_TENSORS] = { "ln_f.weight", "ln_f.bias", "wpe", "wte" };
    static const char* const block_names[BLOCK_TENSORS] = {
        "ln_1.weight", "ln_1.bias", "qkv.bias", "proj.bias", "ln_2.weight", "ln_2.bias", "fc.bias", "fcproj.bias",
        "qkv.weight", "proj.weight", "fc.weight", "fcproj.weight"
    };
    size_t C = (size_t)c.C, Vp = (size_t)c.Vp, T = (size_t)c.max_T;
    const size_t root_rows[ROOT_TENSORS] = { C, C, T, Vp }, root_cols[ROOT_TENSORS] = { 0, 0, C, C };
    const size_t block_rows[BLOCK_TENSORS] = { C, C, 3*C, C, C, C, 4*C, C, 3*C, C, 4*C, C };
    const size_t block_cols[BLOCK_TENSORS] = { 0, 0, 0, 0, 0, 0, 0, 0, C, C, C, 4*C };
    static const TensorCut root_cuts[ROOT_TENSORS] = { CUT_NONE, CUT_NONE, CUT_NONE, CUT_OUTPUTS };
    static const TensorCut block_cuts[BLOCK_TENSORS] = {
        CUT_NONE, CUT_NONE, CUT_HEADS, CUT_NONE, CUT_NONE, CUT_NONE, CUT_OUTPUTS, CUT_NONE,
        CUT_HEADS, CUT_INPUTS, CUT_OUTPUTS, CUT_INPUTS
    };
    TensorInfo t;
    memset(&t, 0, sizeof t);
    for (int k = 0; k <= i; k++) {
        t.offset += tensor_elements(t); // of the tensor before
        t.rows = u == 0 ? root_rows[k] : block_rows[k];
        t.cols = u == 0 ? root_cols[k] : block_cols[k];
    }
    if (u == 0) snprintf(t.name, sizeof t.name, "%s", root_names[i]);
    else snprintf(t.name, sizeof t.name, "h.%d.%s", u - 1, block_names[i]);
    t.cut = u == 0 ? root_cuts[i] : block_cuts[i];
    t.stored_rows = u == 0 && i == WTE ? (size_t)c.V : t.rows;
    bool into_residual = u > 0 && (i == PROJW || i == FCPROJW);
    t.init_std = t.cols == 0 ? 0.0f : into_residual ? (float)(0.02 / sqrt(2.0 * c.L)) : 0.02f;
    t.init_mean = (u == 0 ? i == LNFW : i == LN1W || i == LN2W) ? 1.0f : 0.0f;
    return t;
}

// Elements that a part has of a tensor: `count` runs of n elements each, which follow one another in the part.
typedef struct {
    size_t begin;  // first element of the first run, within the unit
    size_t n;      // elements of a run
    size_t count;
    size_t stride; // elements from the beginning of a run to that of the next
} TensorRuns;

// Dies unless all tensors can be cut into so many parts. With the heads, C and 4C divide as well.
static inline void gpt2_check_parts(GPT2Config c, int parts) {
    invariant(parts >= 1, "a tensor cannot be cut into %d parts", parts);
    require(c.NH % parts == 0, "%d heads do not divide over %d parts; choose --heads as a multiple of %d", c.NH, parts, parts);
    require(c.Vp % parts == 0, "a vocabulary of %d tokens (--vocab-size, padded to a multiple of 128) does not divide over"
            " %d parts; choose a number of parts that divides it, such as a power of two", c.Vp, parts);
}

// Returns what part `part` of `parts` has of tensor i of unit u. Dies as gpt2_check_parts does.
static inline TensorRuns tensor_part(GPT2Config c, int u, int i, int part, int parts) {
    TensorInfo t = unit_tensor(c, u, i);
    size_t p = (size_t)part, N = (size_t)parts, all = tensor_elements(t);
    TensorRuns r = { t.offset, all, 1, all };
    gpt2_check_parts(c, parts);
    invariant(part >= 0 && part < parts, "there is no part %d of %d", part, parts);
    if (t.cut == CUT_NONE) return r;
    r.count = t.cut == CUT_HEADS ? 3 : t.cut == CUT_INPUTS ? t.rows : 1;
    r.stride = all / r.count; // a section of q, k or v; a row; all rows
    r.n = r.stride / N;
    r.begin += p * r.n;
    return r;
}

// Returns the elements that each of `parts` parts has: of a tensor, of a unit, of the model.
static inline size_t tensor_part_elements(TensorInfo t, int parts) {
    return t.cut == CUT_NONE ? tensor_elements(t) : tensor_elements(t) / (size_t)parts;
}
static inline size_t unit_part_elements(GPT2Config c, int u, int parts) {
    size_t n = 0;
    for (int i = 0; i < unit_tensors(u); i++) n += tensor_part_elements(unit_tensor(c, u, i), parts);
    return n;
}
static inline size_t gpt2_part_elements(GPT2Config c, int parts) {
    return unit_part_elements(c, 0, parts) + (size_t)c.L * unit_part_elements(c, 1, parts);
}

// Elements [begin, end) of unit u's initial weights into out (end - begin), on the host. Every element is a function
// of (seed, unit, element) alone, so any rank can make any slice, and all agree.
static inline void unit_init_weights(GPT2Config c, uint64_t seed, int u, size_t begin, size_t end, float* out) {
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        size_t first = size_max(begin, t.offset), last = size_min(end, t.offset + tensor_elements(t));
        size_t padding = size_min(last, t.offset + tensor_stored_elements(t)); // from here on the mean, 0, stays
        for (size_t k = first; k < last; k++) out[k - begin] = t.init_mean;
        if (t.init_std > 0) {
            #pragma omp parallel for simd schedule(static)
            for (size_t k = first; k < padding; k++) out[k - begin] = t.init_std * random_normal(seed, (uint64_t)u, k);
        }
    }
}

// Returns the elements of all parameters as they lie in memory, with the padding of the vocabulary.
static inline size_t gpt2_num_elements(GPT2Config c) { return unit_elements(c, 0) + (size_t)c.L * unit_elements(c, 1); }
// Parameters without that padding: the number that the literature gives (124,439,808 for gpt2).
static inline size_t gpt2_num_parameters(GPT2Config c) { return gpt2_num_elements(c) - (size_t)(c.Vp - c.V) * (size_t)c.C; }

// FLOPs of a training step per token, as llm.c counts them: 6 per parameter for forward and backward, and attention's
// two (T,T) products, whose causal half is 6 L C T.
static inline double gpt2_flops_per_token(GPT2Config c, int T) {
    return 6.0 * (double)gpt2_num_parameters(c) + 6.0 * c.L * (double)c.C * T;
}

#define GPT2_VOCABULARY 50257
#define GPT2_CONTEXT 1024

// A named shape into c: gpt2, gpt2-medium, gpt2-large, gpt2-xl (context 1024), or dN: N blocks, 64N channels, N heads,
// whose context is left 0 for the caller to choose. V and Vp are left alone. False if there is no such name.
static inline bool gpt2_named_config(const char* name, GPT2Config* c) {
    static const struct { const char* name; int L, NH, C; } known[] = {
        { "gpt2", 12, 12, 768 }, { "gpt2-medium", 24, 16, 1024 }, { "gpt2-large", 36, 20, 1280 }, { "gpt2-xl", 48, 25, 1600 }
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        c->L = known[i].L; c->NH = known[i].NH; c->C = known[i].C; c->max_T = GPT2_CONTEXT;
        return true;
    }
    char* end;
    long n = name[0] == 'd' && isdigit((unsigned char)name[1]) ? strtol(name + 1, &end, 10) : 0;
    if (n < 1 || n > MAX_UNITS - 1 || *end != '\0') return false;
    c->L = (int)n; c->NH = (int)n; c->C = 64 * (int)n; c->max_T = 0;
    return true;
}

static inline int gpt2_padded_vocabulary(int V) { return (int)round_up((size_t)V, 128); }

// Dies if the numbers do not make a model. `what` names where they come from.
static inline void gpt2_check_config(GPT2Config c, const char* what) {
    require(c.L >= 1 && c.L < MAX_UNITS, "%s: the number of layers must be 1..%d, not %d", what, MAX_UNITS - 1, c.L);
    require(c.C >= 1 && c.C <= 1 << 16, "%s: the number of channels must be 1..65536, not %d", what, c.C);
    require(c.NH >= 1 && c.C % c.NH == 0, "%s: %d channels do not divide over %d heads", what, c.C, c.NH);
    require(c.V >= 1 && c.V <= 1 << 24, "%s: the vocabulary must have 1..16777216 tokens, not %d", what, c.V);
    require(c.max_T >= 1 && c.max_T <= 1 << 20, "%s: the longest sequence must be 1..1048576 tokens, not %d", what, c.max_T);
}
#endif
