/*
gpt2.h - GPT-2 independent of the program that trains it: configuration, units and tensors by name, initial weights.

Parameters are unit-major. Unit 0 is the root: final layernorm, position and token embedding. A block is two units:
number 1+2l is the attention half of block l (ln1, qkv, proj), 2+2l its MLP half (ln2, fc, fcproj). Inside a unit the
1-D tensors come first, and the 2-D ones follow in the order of the forward pass, so that
  - weight decay (2-D tensors only) is one number per unit: the first no_decay elements have none, and
  - the backward pass computes gradients in nearly the order of a unit's memory, from its end to its beginning.
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
enum { LN1W, LN1B, QKVB, PROJB, QKVW, PROJW, ATTENTION_TENSORS };
enum { LN2W, LN2B, FCB, FCPROJB, FCW, FCPROJW, MLP_TENSORS };
enum { MAX_TENSORS = 6 }; // of a unit
enum { MAX_BLOCKS = 256, MAX_UNITS = 1 + 2*MAX_BLOCKS };

static inline int attention_unit(int l) { return 1 + 2*l; }
static inline int mlp_unit(int l) { return 2 + 2*l; }
// Returns the number of the block that unit u is half of, or -1 for the root.
static inline int unit_block(int u) { return u == 0 ? -1 : (u - 1) / 2; }

// How tensor parallelism divides a tensor (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3). The paper's
// weights are (in,out), ours are (out,in): its column cuts are our row cuts, and the other way round.
typedef enum {
    CUT_NONE,    // replicated: layernorms, wpe, and biases that are added once to a sum of parts. With sequence
                 // parallelism, layernorms see a part of the sequence, and their gradients are summed over the parts
                 // (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2)
    CUT_OUTPUTS, // column-parallel: each part computes some of the outputs. fc; in wte, logits for a part of the tokens
    CUT_HEADS,   // column-parallel: qkv, whose outputs are the sections q, k and v; a part has the same heads of each
    CUT_INPUTS   // row-parallel: each part has some of the inputs, and outputs are summed over the parts. proj, fcproj
} TensorCut;

typedef struct {
    char name[32];        // "wte", "h.3.qkv.weight": also the name in a checkpoint
    size_t offset;        // first element within the unit
    size_t block_offset;  // first element within the block or the root, as checkpoints and initial weights number them:
                          // the 1-D tensors of both halves, then the 2-D ones
    size_t rows, cols;    // cols 0: a 1-D tensor of `rows` elements
    size_t stored_rows;   // rows in a checkpoint: V instead of Vp for wte, otherwise rows
    float init_mean, init_std;
    TensorCut cut;
} TensorInfo;

typedef struct {
    size_t offset;   // first element in the flat parameter memory
    size_t size;     // elements
} Unit;

static inline int gpt2_num_units(GPT2Config c) { return 1 + 2*c.L; }
static inline int unit_tensors(int u) {
    return u == 0 ? (int)ROOT_TENSORS : u % 2 ? (int)ATTENTION_TENSORS : (int)MLP_TENSORS;
}

// Elements of unit u's 1-D tensors, which are never decayed; and of all.
static inline size_t unit_no_decay(GPT2Config c, int u) { return (size_t)c.C * (u == 0 ? 2 : u % 2 ? 6 : 7); }
static inline size_t unit_elements(GPT2Config c, int u) {
    size_t C = (size_t)c.C;
    return unit_no_decay(c, u) + (u == 0 ? ((size_t)c.Vp + (size_t)c.max_T) * C : u % 2 ? 4*C*C : 8*C*C);
}
static inline size_t block_elements(GPT2Config c) {
    return unit_elements(c, attention_unit(0)) + unit_elements(c, mlp_unit(0));
}

// Returns true if tensor t of unit u is a matrix of a block: with Muon, it has a momentum instead of AdamW's m and v.
static inline bool is_block_matrix(int u, TensorInfo t) { return u > 0 && t.cols > 0; }
static inline size_t tensor_elements(TensorInfo t) { return t.rows * (t.cols ? t.cols : 1); }
static inline size_t tensor_stored_elements(TensorInfo t) { return t.stored_rows * (t.cols ? t.cols : 1); }

// Tensor i of unit u. Weights start from N(0, 0.02), the two projections into the residual stream from
// N(0, 0.02/sqrt(2L)), biases from 0, layernorm weights from 1, and the padding of wte from 0.
static inline TensorInfo unit_tensor(GPT2Config c, int u, int i) {
    size_t C = (size_t)c.C, Vp = (size_t)c.Vp, T = (size_t)c.max_T;
    float into_residual = (float)(0.02 / sqrt(2.0 * c.L));
    const struct { const char* name; size_t rows, cols; float mean, std; TensorCut cut; } tensors[3][MAX_TENSORS] = {
        { { "ln_f.weight",   C,   0,   1, 0,             CUT_NONE },
          { "ln_f.bias",     C,   0,   0, 0,             CUT_NONE },
          { "wpe",           T,   C,   0, 0.02f,         CUT_NONE },
          { "wte",           Vp,  C,   0, 0.02f,         CUT_OUTPUTS } },
        { { "ln_1.weight",   C,   0,   1, 0,             CUT_NONE },
          { "ln_1.bias",     C,   0,   0, 0,             CUT_NONE },
          { "qkv.bias",      3*C, 0,   0, 0,             CUT_HEADS },
          { "proj.bias",     C,   0,   0, 0,             CUT_NONE },
          { "qkv.weight",    3*C, C,   0, 0.02f,         CUT_HEADS },
          { "proj.weight",   C,   C,   0, into_residual, CUT_INPUTS } },
        { { "ln_2.weight",   C,   0,   1, 0,             CUT_NONE },
          { "ln_2.bias",     C,   0,   0, 0,             CUT_NONE },
          { "fc.bias",       4*C, 0,   0, 0,             CUT_OUTPUTS },
          { "fcproj.bias",   C,   0,   0, 0,             CUT_NONE },
          { "fc.weight",     4*C, C,   0, 0.02f,         CUT_OUTPUTS },
          { "fcproj.weight", C,   4*C, 0, into_residual, CUT_INPUTS } }
    };
    int kind = u == 0 ? 0 : u % 2 ? 1 : 2;
    TensorInfo t;
    memset(&t, 0, sizeof t);
    for (int k = 0; k < i; k++) t.offset += tensors[kind][k].rows * (tensors[kind][k].cols ? tensors[kind][k].cols : 1);
    if (u == 0) snprintf(t.name, sizeof t.name, "%s", tensors[kind][i].name);
    else snprintf(t.name, sizeof t.name, "h.%d.%s", unit_block(u), tensors[kind][i].name);
    t.rows = tensors[kind][i].rows;
    t.cols = tensors[kind][i].cols;
    t.stored_rows = u == 0 && i == WTE ? (size_t)c.V : t.rows;
    t.init_mean = tensors[kind][i].mean;
    t.init_std = tensors[kind][i].std;
    t.cut = tensors[kind][i].cut;
    size_t before_1d = kind == 2 ? 6*C : 0; // of the other half
    size_t before_2d = kind == 2 ? 6*C + 4*C*C : kind == 1 ? 7*C : 0;
    t.block_offset = t.offset + (t.cols ? before_2d : before_1d);
    return t;
}

// The elements of a tensor in one part: `count` runs of n elements each, which are consecutive in the part.
typedef struct {
    size_t begin;  // first element of the first run, within the unit
    size_t n;      // elements of a run
    size_t count;
    size_t stride; // elements from the beginning of a run to that of the next
} TensorRuns;

// Dies unless all tensors can be cut into `parts` parts. If the heads divide, so do C and 4C.
static inline void gpt2_check_parts(GPT2Config c, int parts) {
    invariant(parts >= 1, "a tensor cannot be cut into %d parts", parts);
    require(c.NH % parts == 0, "%d heads do not divide over %d parts; choose --heads as a multiple of %d", c.NH, parts,
            parts);
    require(c.Vp % parts == 0, "a vocabulary of %d tokens (--vocab-size, padded to a multiple of 128) does not divide"
            " over %d parts; choose a number of parts that divides it, such as a power of two", c.Vp, parts);
}

// Returns the elements of tensor i of unit u in part `part` of `parts`. Dies as gpt2_check_parts does.
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

// Both return the number of elements in each of `parts` parts of a tensor, or of a unit.
static inline size_t tensor_part_elements(TensorInfo t, int parts) {
    return t.cut == CUT_NONE ? tensor_elements(t) : tensor_elements(t) / (size_t)parts;
}
static inline size_t unit_part_elements(GPT2Config c, int u, int parts) {
    size_t n = 0;
    for (int i = 0; i < unit_tensors(u); i++) n += tensor_part_elements(unit_tensor(c, u, i), parts);
    return n;
}

// Writes elements [begin, end) of the initial weights of unit u to out (end - begin), on the host. Every element
// depends only on (seed, block, element of the block), so any rank can compute any slice, and all ranks agree.
static inline void unit_init_weights(GPT2Config c, uint64_t seed, int u, size_t begin, size_t end, float* out) {
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        size_t first = size_max(begin, t.offset), last = size_min(end, t.offset + tensor_elements(t));
        size_t padding = size_min(last, t.offset + tensor_stored_elements(t)); // from here on the mean, 0, stays
        for (size_t k = first; k < last; k++) out[k - begin] = t.init_mean;
        if (t.init_std > 0) {
            #pragma omp parallel for simd schedule(static)
            for (size_t k = first; k < padding; k++)
                out[k - begin] = t.init_std * random_normal(seed, (uint64_t)(1 + unit_block(u)),
                                                            t.block_offset + (k - t.offset));
        }
    }
}

// Returns the number of elements of all parameters in memory, with the padding of the vocabulary.
static inline size_t gpt2_num_elements(GPT2Config c) { return unit_elements(c, 0) + (size_t)c.L * block_elements(c); }
// Returns the number of parameters without that padding, as in the literature (124,439,808 for gpt2).
static inline size_t gpt2_num_parameters(GPT2Config c) {
    return gpt2_num_elements(c) - (size_t)(c.Vp - c.V) * (size_t)c.C;
}

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
        { "gpt2", 12, 12, 768 }, { "gpt2-medium", 24, 16, 1024 }, { "gpt2-large", 36, 20, 1280 },
        { "gpt2-xl", 48, 25, 1600 }
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        c->L = known[i].L; c->NH = known[i].NH; c->C = known[i].C; c->max_T = GPT2_CONTEXT;
        return true;
    }
    char* end;
    long n = name[0] == 'd' && isdigit((unsigned char)name[1]) ? strtol(name + 1, &end, 10) : 0;
    if (n < 1 || n > MAX_BLOCKS || *end != '\0') return false;
    c->L = (int)n; c->NH = (int)n; c->C = 64 * (int)n; c->max_T = 0;
    return true;
}

static inline int gpt2_padded_vocabulary(int V) { return (int)round_up((size_t)V, 128); }

// Dies if the numbers do not describe a model. `what` names their source.
static inline void gpt2_check_config(GPT2Config c, const char* what) {
    require(c.L >= 1 && c.L <= MAX_BLOCKS, "%s: the number of layers must be 1..%d, not %d", what, MAX_BLOCKS, c.L);
    require(c.C >= 1 && c.C <= 1 << 16, "%s: the number of channels must be 1..65536, not %d", what, c.C);
    require(c.NH >= 1 && c.C % c.NH == 0, "%s: %d channels do not divide over %d heads", what, c.C, c.NH);
    require(c.V >= 1 && c.V <= 1 << 24, "%s: the vocabulary must have 1..16777216 tokens, not %d", what, c.V);
    require(c.max_T >= 1 && c.max_T <= 1 << 20, "%s: the longest sequence must be 1..1048576 tokens, not %d", what,
            c.max_T);
}
#endif
