/*
compress_methods.h - what a data-parallel rank sends in place of its gradients: a table of methods, and a compressed bucket's way through them.

A compressed bucket is a bucket of gradients that travels compressed. Its method packs it and issues its first operation
(compress_begin). A method of two rounds makes the second message out of the first one's result when the next compressed bucket
begins, or at the end. Then the sum over the ranks, as far as it was sent, replaces the gradients (compress_finish). Compressed buckets
begin in the same order on all ranks, which compute the result from the same bytes: it is the same bits on all of them.

Sums      Papers send means. Here 1/N is in each rank's gradient (train_step), so the sum over the ranks is the mean.
Clipping  comes after the sum, because the global norm needs all of it, so errors are of gradients that are not clipped.
          Only onebit-adam clips first, each rank by its own norm: the sum that arrives is momentum.
Errors    What was not sent is added to the next gradient before that is compressed (error feedback), so it is only late.
          That is harmless where a step is linear in the gradient. AdamW's is not: v remembers the square of a late error.
State     is fp32 memory of MEMORY_ERRORS, per compressed bucket: x, gradient + error; the error of this rank's part of the sum, where
          a method compresses the sum as well; Q of PowerSGD. In fp16, where a step may be skipped, there are two copies: a
          step reads `state` and writes `next`, and they are exchanged if it was made. Elsewhere a step that was not finite
          clears the state.
Alone     On one rank nothing is compressed, and there are no compressed buckets.
*/
#ifndef LLMC_COMPRESS_METHODS_H
#define LLMC_COMPRESS_METHODS_H
#include "../base/checksum.h"
#include "../base/options.h"
#include "../base/rng.h"
#include "../comm/comm.h"
#include "../device/compress.h"

enum { COMPRESS_NONE, COMPRESS_BF16, COMPRESS_FP16, COMPRESS_INT8, COMPRESS_INT4, COMPRESS_TOP_K, COMPRESS_SIGN,
       COMPRESS_ONEBIT_ADAM, COMPRESS_POWERSGD, COMPRESS_METHODS };
#define COMPRESS_WORDS "none|bf16|fp16|int8|int4|top-k|sign|onebit-adam|powersgd"
#define COMPRESS_FP16_FACTOR 1024.0f // gradients times it travel in fp16: those from 6e-11 to 64 are not lost

typedef struct {
    int method;          // COMPRESS_NONE, ...
    int feedback;        // what was not sent is kept, and added to the next step's gradient
    double fraction;     // of the elements that top-k sends
    long long rank;      // of PowerSGD's P and Q
    long long from;      // steps before it are sent whole; onebit-adam: v is frozen there
    long long measure;   // every so many steps what was applied is compared with the true mean; 0: never
} CompressOptions;

typedef struct {
    size_t at, n;        // elements [at, at+n) of the flat gradients
    size_t rows, cols;   // of the matrix that it is, where compressed buckets are single tensors
    size_t state;        // where its state begins
    int round;           // of its operation under way; 0: none is
    CommOp op;
    char *sent, *received; // owned; received NULL: the method needs one buffer
} CompressedBucket;

// What a compressed bucket costs a rank.
typedef struct {
    size_t sent, received; // bytes of its buffers
    size_t x, part, q;     // floats of its state, in this order
    size_t scratch;        // floats that compressed buckets share, because they need them one after another
    double bytes;          // sent per step
} BucketCost;

struct CompressMethod;
typedef struct {
    CompressOptions o;
    const struct CompressMethod* method;
    Comm* comm;            // not owned
    uint64_t seed;         // of the first Q, the same on all ranks
    size_t num_elements;   // of the flat gradients
    int num_buckets;
    CompressedBucket* buckets; // (num_buckets), owned
    CompressedBucket* last; // of those that have begun in this step; NULL: none
    bool active;           // this step is compressed
    bool measures;         // and compared
    double loss_scale;     // of the gradients that the errors come from; 0: there are none
    int frozen;            // onebit-adam: updates when v was frozen; 0: not yet
    floatX* grads;         // (num_elements) view
    size_t state_floats;
    float *state, *next;   // (state_floats) owned; the same memory where there is one copy
    float* scratch;        // owned
    float* truth;          // (num_elements) the gradients without compression, owned; NULL: never measured
    Comparison* comparison; // on the device, owned
    float* momentum;       // onebit-adam: (num_elements) of the mean gradient, owned
    const float *m, *grad_scale; // onebit-adam: AdamW's first moment (num_elements); on the device; views
    double beta1;
} Compress;

typedef struct CompressMethod {
    const char *name, *text;
    bool per_tensor;       // a compressed bucket is one tensor
    bool feedback;         // by default
    bool needs_x;          // keeps gradient + error in fp32 also without error feedback
    long long from;        // by default
    BucketCost (*cost)(const Compress* c, const CompressedBucket* p);
    void (*begin)(Compress* c, CompressedBucket* p); // packs p, and issues p->op
    void (*middle)(Compress* c, CompressedBucket* p); // p->op has been waited for: issues the second. NULL: there is none
    void (*end)(Compress* c, CompressedBucket* p); // the last has been waited for: sets the gradients
} CompressMethod;

// ---- a compressed bucket's memory ----
static inline int compress_ranks(const Compress* c) { return c->comm->size; }
static inline floatX* bucket_grads(const Compress* c, const CompressedBucket* p) { return c->grads + p->at; }
static inline float* bucket_x(const Compress* c, const CompressedBucket* p) { return c->next + p->state; }
static inline const float* bucket_error(const Compress* c, const CompressedBucket* p) {
    return c->o.feedback ? c->state + p->state : NULL;
}
static inline float* bucket_kept(const Compress* c, const CompressedBucket* p) { return c->o.feedback ? bucket_x(c, p) : NULL; }
// Returns the same of this rank's part of the sum, and Q, in one copy of the state.
static inline float* bucket_part(const Compress* c, const CompressedBucket* p, float* copy) {
    return c->o.feedback ? copy + p->state + c->method->cost(c, p).x : NULL;
}
static inline float* bucket_q(const Compress* c, const CompressedBucket* p, float* copy) {
    BucketCost cost = c->method->cost(c, p);
    return copy + p->state + cost.x + cost.part;
}
static inline double ring_bytes(double bytes, int N) { return 2.0 * (N - 1) / N * bytes; }
// Returns the elements of x: without error feedback only where the method works on it.
static inline size_t compress_x(const Compress* c, const CompressedBucket* p) {
    return c->o.feedback || c->method->needs_x ? p->n : 0;
}

// ---- bf16, fp16: an all-reduce of 16 bits an element, as PyTorch's bf16_compress_hook and fp16_compress_hook ----
static inline DType compress_dtype(const Compress* c) { return c->o.method == COMPRESS_BF16 ? DTYPE_BF16 : DTYPE_F16; }
static inline float compress_factor(const Compress* c) {
    return c->o.method == COMPRESS_BF16 ? 1.0f : COMPRESS_FP16_FACTOR;
}
static inline BucketCost half_cost(const Compress* c, const CompressedBucket* p) {
    size_t bytes = p->n * sizeof(uint16_t);
    BucketCost cost = { bytes, 0, compress_x(c, p), 0, 0, 0, ring_bytes((double)bytes, compress_ranks(c)) };
    return cost;
}
static inline void half_begin(Compress* c, CompressedBucket* p) {
    round_16((uint16_t*)p->sent, bucket_kept(c, p), bucket_grads(c, p), bucket_error(c, p), compress_dtype(c),
             compress_factor(c), p->n);
    p->op = (comm_all_reduce)(c->comm, p->sent, p->n, (CommType)compress_dtype(c));
}
static inline void half_end(Compress* c, CompressedBucket* p) {
    widen_16(bucket_grads(c, p), (const uint16_t*)p->sent, compress_dtype(c), 1 / compress_factor(c), p->n);
}

// ---- int8, int4: whole numbers with a scale for each block (QSGD, Alistarh et al. 2017, arXiv 1610.02132) ----
// Their sums would overflow, and blocks have different scales. So each rank sums its part of everyone's in fp32, in rank
// order, and sends the sum to all, quantised again (as ZeRO++, Wang et al. 2023, arXiv 2306.10209). That has an error, too.
static inline int compress_bits(const Compress* c) { return c->o.method == COMPRESS_INT8 ? 8 : 4; }
// Returns the elements of each of the N parts, which are cut between blocks. The last parts may have less, or nothing.
static inline size_t blocks_part(const Compress* c, const CompressedBucket* p) {
    return ceil_div(ceil_div(p->n, QUANTISE_BLOCK), (size_t)compress_ranks(c)) * QUANTISE_BLOCK;
}
static inline BucketCost blocks_cost(const Compress* c, const CompressedBucket* p) {
    size_t part = blocks_part(c, p), row = quantised_bytes(part, compress_bits(c)), N = (size_t)compress_ranks(c);
    size_t kept = c->o.feedback ? part : 0;
    BucketCost cost = { N * row, N * row, compress_x(c, p), kept, 0, part, 2 * (double)((N - 1) * row) };
    return cost;
}
static inline void blocks_begin(Compress* c, CompressedBucket* p) {
    size_t row = quantised_bytes(blocks_part(c, p), compress_bits(c));
    quantise(p->sent, bucket_kept(c, p), bucket_grads(c, p), FLOATX_DTYPE, bucket_error(c, p), p->n, compress_bits(c));
    p->op = (comm_all_to_all)(c->comm, p->received, p->sent, row, COMM_BYTE);
}
static inline void blocks_middle(Compress* c, CompressedBucket* p) {
    size_t part = blocks_part(c, p), row = quantised_bytes(part, compress_bits(c));
    char* mine = p->sent + (size_t)c->comm->rank * row;
    dequantise_sum(c->scratch, DTYPE_F32, p->received, compress_ranks(c), part, compress_bits(c));
    quantise(mine, bucket_part(c, p, c->next), c->scratch, DTYPE_F32, bucket_part(c, p, c->state), part, compress_bits(c));
    p->op = (comm_all_gather)(c->comm, p->sent, mine, row, COMM_BYTE);
}
static inline void blocks_end(Compress* c, CompressedBucket* p) {
    // the parts end with blocks, so together they are one row
    dequantise_sum(bucket_grads(c, p), FLOATX_DTYPE, p->sent, 1, p->n, compress_bits(c));
}

// ---- top-k: the largest elements and where they are (with error feedback: Stich et al. 2018, arXiv 1809.07599) ----
// Ranks send different elements, so these cannot be summed on the way: all are gathered, (N-1) 8k bytes.
static inline size_t bucket_k(const Compress* c, const CompressedBucket* p) { return top_k_count(p->n, c->o.fraction); }
static inline BucketCost top_k_cost(const Compress* c, const CompressedBucket* p) {
    size_t row = sparse_bytes(bucket_k(c, p)), N = (size_t)compress_ranks(c);
    BucketCost cost = { N * row, 0, compress_x(c, p), 0, 0, p->n, (double)((N - 1) * row) };
    return cost;
}
static inline void top_k_begin(Compress* c, CompressedBucket* p) {
    size_t k = bucket_k(c, p), row = sparse_bytes(k);
    char* mine = p->sent + (size_t)c->comm->rank * row;
    add_error(bucket_x(c, p), bucket_grads(c, p), bucket_error(c, p), p->n);
    pack_top_k(mine, bucket_kept(c, p), bucket_x(c, p), p->n, k);
    p->op = (comm_all_gather)(c->comm, p->sent, mine, row, COMM_BYTE);
}
static inline void top_k_end(Compress* c, CompressedBucket* p) {
    sparse_sum_fp32(c->scratch, p->sent, compress_ranks(c), p->n, bucket_k(c, p));
    from_fp32(bucket_grads(c, p), c->scratch, p->n);
}

// ---- sign: a bit an element and one scale a tensor (EF-signSGD, Karimireddy et al. 2019, arXiv 1901.09847) ----
// The paper's error has the learning rate in it. Ours has not, because AdamW comes after.
static inline BucketCost sign_cost(const Compress* c, const CompressedBucket* p) {
    size_t row = signs_bytes(p->n), N = (size_t)compress_ranks(c);
    BucketCost cost = { N * row, 0, compress_x(c, p), 0, 0, 0, (double)((N - 1) * row) };
    return cost;
}
static inline void sign_begin(Compress* c, CompressedBucket* p) {
    size_t row = signs_bytes(p->n);
    char* mine = p->sent + (size_t)c->comm->rank * row;
    add_error(bucket_x(c, p), bucket_grads(c, p), bucket_error(c, p), p->n);
    pack_signs(mine, bucket_kept(c, p), bucket_x(c, p), p->n, SIGN_MEAN);
    p->op = (comm_all_gather)(c->comm, p->sent, mine, row, COMM_BYTE);
}
static inline void sign_end(Compress* c, CompressedBucket* p) {
    unpack_signs_sum(bucket_grads(c, p), FLOATX_DTYPE, p->sent, compress_ranks(c), p->n);
}

// ---- onebit-adam: signs of the momentum (Tang et al. 2021, arXiv 2102.02888) ----
// Once v is frozen, Adam's step is linear in the momentum, so error feedback works. A rank's share of the new momentum is
// 1/N of the old one, which all have, and its gradient. It is sent in N parts, whose owners sum and send them as int8's do.
// A part's scale keeps its length (the rms, as DeepSpeed's).
// Part q has these elements; the last ones may have less, or nothing.
static inline size_t signs_part(const Compress* c, const CompressedBucket* p) {
    return round_up(ceil_div(p->n, (size_t)compress_ranks(c)), 32);
}
static inline size_t signs_part_elements(const Compress* c, const CompressedBucket* p, int q) {
    size_t part = signs_part(c, p), begin = size_min(p->n, (size_t)q * part);
    return size_min(part, p->n - begin);
}
static inline BucketCost onebit_cost(const Compress* c, const CompressedBucket* p) {
    size_t part = signs_part(c, p), row = signs_bytes(part), N = (size_t)compress_ranks(c);
    BucketCost cost = { N * row, N * row, p->n, c->o.feedback ? part : 0, 0, part, 2 * (double)((N - 1) * row) };
    return cost;
}
// x (n) = this rank's part of the sum that is the momentum, of [at, at+n)
static inline void compress_momentum(const Compress* c, float* x, size_t at, const float* error, size_t n) {
    momentum_with_error(x, c->m + at, c->grads + at, c->grad_scale, error, c->beta1, 1.0 / compress_ranks(c), n);
}
static inline void onebit_begin(Compress* c, CompressedBucket* p) {
    size_t part = signs_part(c, p), row = signs_bytes(part);
    float *x = bucket_x(c, p), *kept = bucket_kept(c, p);
    compress_momentum(c, x, p->at, bucket_error(c, p), p->n);
    for (int q = 0; q < compress_ranks(c); q++) {
        size_t n = signs_part_elements(c, p, q), at = (size_t)q * part;
        if (n > 0) pack_signs(p->sent + (size_t)q * row, kept ? kept + at : NULL, x + at, n, SIGN_RMS);
    }
    p->op = (comm_all_to_all)(c->comm, p->received, p->sent, row, COMM_BYTE);
}
static inline void onebit_middle(Compress* c, CompressedBucket* p) {
    int N = compress_ranks(c), rank = c->comm->rank;
    size_t part = signs_part(c, p), row = signs_bytes(part), n = signs_part_elements(c, p, rank);
    char* mine = p->sent + (size_t)rank * row;
    unpack_signs_sum(c->scratch, DTYPE_F32, p->received, N, part);
    if (c->o.feedback) add_in_place_fp32(c->scratch, bucket_part(c, p, c->state), n);
    if (n > 0) pack_signs(mine, bucket_part(c, p, c->next), c->scratch, n, SIGN_RMS);
    p->op = (comm_all_gather)(c->comm, p->sent, mine, row, COMM_BYTE);
}
static inline void onebit_end(Compress* c, CompressedBucket* p) {
    size_t part = signs_part(c, p), row = signs_bytes(part);
    for (int q = 0; q < compress_ranks(c); q++) {
        size_t n = signs_part_elements(c, p, q);
        if (n > 0) unpack_signs_sum(c->momentum + p->at + (size_t)q * part, DTYPE_F32, p->sent + (size_t)q * row, 1, n);
    }
}

// ---- powersgd: a matrix M is close to P Q^T of rank r (Vogels et al. 2019, arXiv 1905.13727) ----
// P = M Q and Q = M^T P are linear in M, so two all-reduces sum them over the ranks. P is made orthonormal between them:
// then P Q^T is the projection of M. Q begins random and is then last step's: one power iteration a step (warm start).
// The error is this rank's own M less 1/N of the sum.
static inline BucketCost powersgd_cost(const Compress* c, const CompressedBucket* p) {
    size_t r = (size_t)c->o.rank, P = p->rows * r * sizeof(float), Q = p->cols * r * sizeof(float);
    BucketCost cost = { P, Q, compress_x(c, p), 0, p->cols * r, 0, ring_bytes((double)(P + Q), compress_ranks(c)) };
    return cost;
}
static inline void powersgd_begin(Compress* c, CompressedBucket* p) {
    int r = (int)c->o.rank;
    add_error(bucket_x(c, p), bucket_grads(c, p), bucket_error(c, p), p->n);
    skinny_product((float*)p->sent, bucket_x(c, p), bucket_q(c, p, c->state), (int)p->rows, (int)p->cols, r);
    p->op = (comm_all_reduce)(c->comm, p->sent, p->rows * (size_t)r, COMM_F32);
}
static inline void powersgd_middle(Compress* c, CompressedBucket* p) {
    int r = (int)c->o.rank;
    orthonormalise((float*)p->sent, (int)p->rows, r);
    skinny_product_transposed((float*)p->received, bucket_x(c, p), (const float*)p->sent, (int)p->rows, (int)p->cols, r);
    p->op = (comm_all_reduce)(c->comm, p->received, p->cols * (size_t)r, COMM_F32);
}
static inline void powersgd_end(Compress* c, CompressedBucket* p) {
    low_rank_apply(bucket_grads(c, p), bucket_kept(c, p), bucket_x(c, p), (const float*)p->sent, (const float*)p->received,
                   1.0f / (float)compress_ranks(c), (int)p->rows, (int)p->cols, (int)c->o.rank);
    device_copy(bucket_q(c, p, c->next), p->received, p->cols * (size_t)c->o.rank * sizeof(float));
}

// By default error feedback is on where it helps under AdamW (see Errors above). First steps that are sent whole help, too:
// powersgd's loss after 300 steps was lower by 0.02 to 0.07 from step 50 on than from step 10 on.
static const CompressMethod compress_methods[COMPRESS_METHODS] = {
    { "none", "gradients travel whole", false, false, false, 0, NULL, NULL, NULL, NULL },
    { "bf16", "rounded to bf16", false, false, false, 0, half_cost, half_begin, NULL, half_end },
    { "fp16", "rounded to fp16", false, false, false, 0, half_cost, half_begin, NULL, half_end },
    { "int8", "8 bits, blocks of 256", false, false, false, 0, blocks_cost, blocks_begin, blocks_middle, blocks_end },
    { "int4", "4 bits, blocks of 256", false, true, false, 0, blocks_cost, blocks_begin, blocks_middle, blocks_end },
    { "top-k", "the largest of each tensor", true, false, true, 0, top_k_cost, top_k_begin, NULL, top_k_end },
    { "sign", "signs, a scale a tensor", true, false, true, 0, sign_cost, sign_begin, NULL, sign_end },
    { "onebit-adam", "signs of the momentum", true, true, true, 50, onebit_cost, onebit_begin, onebit_middle, onebit_end },
    { "powersgd", "P and Q of low rank", true, true, true, 50, powersgd_cost, powersgd_begin, powersgd_middle,
      powersgd_end },
};

// ---- options ----
static inline void options_compress(OptionTable* t, CompressOptions* o) {
    o->fraction = 0.01;
    o->rank = 4;
    option_choice(t, "compress", &o->method, COMPRESS_WORDS, "how gradients of matrices are sent; others are sent whole");
    option_flag(t, "error-feedback", &o->feedback, "keep what was not sent and add it to the next step's gradient;"
                " on for int4, onebit-adam and powersgd unless --no-error-feedback is given");
    option_float(t, "top-k-fraction", &o->fraction, 1e-6, 1, "share of each matrix's elements that top-k sends");
    option_int(t, "rank", &o->rank, 1, 1024, "columns of powersgd's P and Q");
    option_int(t, "compress-from", &o->from, 0, 1e9, "first steps that are sent whole; then onebit-adam freezes v."
               " Unless given: 50 for onebit-adam and powersgd");
    option_int(t, "measure-bias", &o->measure, 0, 1e9, "steps between comparisons of what was applied with the mean of the"
               " ranks' gradients, which sends all of them in fp32; 0: none");
}

// Dies if an option was given that does nothing with this method. works: it does something; with: these methods.
static inline void compress_refuse(const Compress* c, OptionTable* t, const char* option, bool works, const char* with) {
    require(works || !option_given(t, option), "--%s does nothing with --compress %s, only with %s; leave it out", option,
            c->method->name, with);
}
// Sets what follows from the options; no compressed buckets yet. The ranks have met.
static inline void compress_configure(Compress* c, OptionTable* t, Comm* comm, long long seed, size_t num_elements) {
    CompressOptions* o = &c->o;
    int method = o->method;
    bool any = method != COMPRESS_NONE;
    c->method = &compress_methods[method];
    c->comm = comm;
    c->seed = (uint64_t)seed;
    c->num_elements = num_elements;
    compress_refuse(c, t, "top-k-fraction", method == COMPRESS_TOP_K, "top-k");
    compress_refuse(c, t, "rank", method == COMPRESS_POWERSGD, "powersgd");
    compress_refuse(c, t, "error-feedback", any, "other methods");
    compress_refuse(c, t, "compress-from", any, "other methods");
    require(!NEEDS_MASTER || (method != COMPRESS_BF16 && method != COMPRESS_FP16),
            "--compress %s saves nothing: this program's gradients (" FLOATX_NAME ") have 16 bits already; use none",
            c->method->name);
    if (!option_given(t, "error-feedback")) o->feedback = c->method->feedback;
    if (!option_given(t, "compress-from")) o->from = c->method->from;
    require(method != COMPRESS_ONEBIT_ADAM || o->from > 0,
            "--compress-from 0 leaves onebit-adam no v to freeze; give 1 or more");
}

// ---- compressed buckets ----
// Returns true if a tensor travels compressed: a matrix, with powersgd one of which P and Q have at most half the elements.
static inline bool compress_takes(const Compress* c, size_t rows, size_t cols) {
    if (c->o.method == COMPRESS_NONE || compress_ranks(c) == 1 || cols == 0) return false;
    return c->o.method != COMPRESS_POWERSGD || 2 * (rows + cols) * (size_t)c->o.rank <= rows * cols;
}

// Adds a compressed bucket, and returns its number. The caller sets at, n, rows and cols before anything else here is called.
static inline int compress_add(Compress* c) {
    c->buckets = (CompressedBucket*)with_room(c->buckets, (size_t)c->num_buckets, sizeof(CompressedBucket));
    memset(&c->buckets[c->num_buckets], 0, sizeof(CompressedBucket));
    return c->num_buckets++;
}

static inline size_t bucket_state_floats(BucketCost cost) { return round_up(cost.x + cost.part + cost.q, 16); }

// Bytes by kind that compress_init allocates, added to bytes.
static inline void compress_predict_memory(const Compress* c, size_t bytes[MEMORY_KINDS]) {
    size_t state = 0, scratch = 0;
    for (int i = 0; i < c->num_buckets; i++) {
        BucketCost cost = c->method->cost(c, &c->buckets[i]);
        bytes[MEMORY_COMMUNICATION] += cost.sent + cost.received;
        state += bucket_state_floats(cost);
        scratch = size_max(scratch, cost.scratch);
    }
    size_t copies = FLOATX_DTYPE == DTYPE_F16 ? 2 : 1;
    bytes[MEMORY_ERRORS] += (copies * state + scratch) * sizeof(float);
    if (c->num_buckets == 0) return;
    if (c->o.method == COMPRESS_ONEBIT_ADAM) bytes[MEMORY_ERRORS] += c->num_elements * sizeof(float);
    if (c->o.measure > 0) bytes[MEMORY_ERRORS] += c->num_elements * sizeof(float) + sizeof(Comparison);
}

// Returns the bytes that a rank sends for compressed buckets, in a step that is compressed.
static inline double compress_predict_sent(const Compress* c) {
    double bytes = 0;
    for (int i = 0; i < c->num_buckets; i++) bytes += c->method->cost(c, &c->buckets[i]).bytes;
    return bytes;
}

// Returns true if the next step needs anything of this one's state. Otherwise it is scratch. compress_init came before.
static inline bool compress_keeps(const Compress* c) {
    bool remembers = c->o.feedback || c->o.method == COMPRESS_POWERSGD || c->o.method == COMPRESS_ONEBIT_ADAM;
    return c->state_floats > 0 && remembers;
}

static inline size_t compress_elements(const Compress* c) { // of all compressed buckets
    size_t n = 0;
    for (int i = 0; i < c->num_buckets; i++) n += c->buckets[i].n;
    return n;
}

// Errors become 0, and Q is random: the same numbers on all ranks.
static inline void compress_forget(Compress* c) {
    size_t r = (size_t)c->o.rank;
    if (c->state_floats > 0) device_zero(c->state, c->state_floats * sizeof(float));
    for (int i = 0; i < c->num_buckets && c->o.method == COMPRESS_POWERSGD; i++) {
        CompressedBucket* p = &c->buckets[i];
        size_t n = p->cols * r;
        float *q = bucket_q(c, p, c->state), *host = (float*)xcalloc(n, sizeof(float));
        for (size_t k = 0; k < n; k++) host[k] = random_normal(c->seed, STREAM_COMPRESS + (uint64_t)i, k);
        host_to_device(q, host, n * sizeof(float));
        device_synchronize(); // the copy reads host
        free(host);
        orthonormalise(q, (int)p->cols, (int)r);
    }
}

static inline float* errors_alloc(size_t n) {
    return n > 0 ? (float*)device_alloc(n * sizeof(float), MEMORY_ERRORS) : NULL;
}

// Allocates everything; layers_init came before. grads (num_elements) is a view.
static inline void compress_init(Compress* c, floatX* grads) {
    size_t scratch = 0;
    c->grads = grads;
    for (int i = 0; i < c->num_buckets; i++) {
        CompressedBucket* p = &c->buckets[i];
        BucketCost cost = c->method->cost(c, p);
        p->state = c->state_floats;
        c->state_floats += bucket_state_floats(cost);
        scratch = size_max(scratch, cost.scratch);
        p->sent = (char*)device_alloc(cost.sent, MEMORY_COMMUNICATION);
        if (cost.received > 0) p->received = (char*)device_alloc(cost.received, MEMORY_COMMUNICATION);
    }
    c->state = c->next = errors_alloc(c->state_floats);
    if (FLOATX_DTYPE == DTYPE_F16) c->next = errors_alloc(c->state_floats);
    c->scratch = errors_alloc(scratch);
    if (c->num_buckets == 0) return;
    if (c->o.method == COMPRESS_ONEBIT_ADAM) c->momentum = errors_alloc(c->num_elements);
    if (c->o.measure > 0) {
        c->truth = errors_alloc(c->num_elements);
        c->comparison = (Comparison*)device_alloc(sizeof(Comparison), MEMORY_ERRORS);
    }
    compress_forget(c);
}

static inline void compress_free(Compress* c) {
    for (int i = 0; i < c->num_buckets; i++) {
        device_free(c->buckets[i].sent);
        device_free(c->buckets[i].received);
    }
    free(c->buckets);
    if (c->next != c->state) device_free(c->next);
    device_free(c->state); device_free(c->scratch); device_free(c->momentum);
    device_free(c->truth); device_free(c->comparison);
}

// ---- a step ----
// step counts from 0. loss_scale: of its gradients; errors follow it. updates: AdamW's so far.
static inline void compress_step_begin(Compress* c, long long step, double loss_scale, int updates) {
    c->active = c->num_buckets > 0 && step >= c->o.from;
    c->measures = c->active && c->o.measure > 0 && (step + 1) % c->o.measure == 0;
    c->last = NULL;
    if (!c->active) { // v changes
        c->frozen = 0;
        return;
    }
    if (c->o.method == COMPRESS_ONEBIT_ADAM) { // momentum has no loss scale
        if (c->frozen == 0) c->frozen = updates > 0 ? updates : 1;
        return;
    }
    if (c->loss_scale != 0 && c->loss_scale != loss_scale && c->state_floats > 0) // Q too: only its direction counts
        scale_in_place_fp32(c->state, (float)(loss_scale / c->loss_scale), c->state_floats);
    c->loss_scale = loss_scale;
}
// Returns true if this step is one of AdamW with a frozen v.
static inline bool compress_is_frozen(const Compress* c) { return c->active && c->o.method == COMPRESS_ONEBIT_ADAM; }

// skipped: the gradients were not finite, so the errors that this step has made are of no use.
static inline void compress_step_end(Compress* c, bool skipped) {
    if (!c->active) return;
    if (skipped && c->next == c->state && compress_keeps(c))
        printf("compress   this step was not finite: the errors begin at 0 again\n");
    if (skipped && c->next == c->state) compress_forget(c);
    if (skipped) return;
    float* old = c->state;
    c->state = c->next;
    c->next = old;
}

// Waits for a compressed bucket's operation. Begins its second round, or sets its gradients.
static inline void compress_advance(Compress* c, CompressedBucket* p) {
    comm_wait(c->comm, p->op);
    if (p->round == 1 && c->method->middle) {
        comm_trace_data(c->comm, bucket_grads(c, p), p->n * sizeof(floatX));
        c->method->middle(c, p);
        p->round = 2;
        return;
    }
    c->method->end(c, p);
    p->round = 0;
}

// Sends a compressed bucket whose gradients are final. The one before it goes into its second round, behind this one.
static inline void compress_begin(Compress* c, int i) {
    CompressedBucket* p = &c->buckets[i];
    comm_trace_data(c->comm, bucket_grads(c, p), p->n * sizeof(floatX));
    c->method->begin(c, p);
    p->round = 1;
    if (c->last && c->method->middle) compress_advance(c, c->last);
    c->last = p;
}

// On return the gradients of all compressed buckets (onebit-adam: the momentum) are the same on all ranks.
static inline void compress_finish(Compress* c) {
    if (c->last && c->method->middle) compress_advance(c, c->last);
    for (int i = 0; i < c->num_buckets; i++) if (c->buckets[i].round > 0) compress_advance(c, &c->buckets[i]);
    c->last = NULL;
}

// onebit-adam: sends the momentum of what is not compressed, [at, at+n), whole.
static inline CommOp compress_momentum_begin(Compress* c, size_t at, size_t n) {
    compress_momentum(c, c->momentum + at, at, NULL, n);
    comm_trace_data(c->comm, c->grads + at, n * sizeof(floatX));
    return (comm_all_reduce)(c->comm, c->momentum + at, n, COMM_F32);
}

// ---- the bias: what was applied beside the true mean ----
// onebit-adam compares momenta: the new one with what the last one and all gradients would have made. This cosine is small or
// below 0 in runs that train well.
// Call before anything of [at, at+n) is sent.
static inline void compress_measure_begin(Compress* c, size_t at, size_t n) {
    if (!c->measures) return;
    if (!compress_is_frozen(c)) to_fp32(c->truth + at, c->grads + at, n);
    else compress_momentum(c, c->truth + at, at, NULL, n);
}
// After compress_finish, if c->measures. onebit-adam: the gradients are lost.
static inline void compress_measure_end(Compress* c) {
    size_t n = c->num_elements;
    comm_trace_data(c->comm, c->grads, n * sizeof(floatX));
    comm_wait(c->comm, (comm_all_reduce)(c->comm, c->truth, n, COMM_F32));
    if (compress_is_frozen(c)) from_fp32(c->grads, c->momentum, n);
    device_zero(c->comparison, sizeof *c->comparison);
    add_comparison(c->comparison, c->grads, c->truth, n);
}
static inline double compress_measure_bytes(const Compress* c) { // in this step
    return c->measures ? ring_bytes((double)(c->num_elements * sizeof(float)), compress_ranks(c)) : 0;
}

// For the timeline, the caller of these is who communicates.
#define compress_begin(c, ...) (comm_from((c)->comm, __func__), compress_begin(c, __VA_ARGS__))
#define compress_finish(c) (comm_from((c)->comm, __func__), compress_finish(c))
#define compress_momentum_begin(c, ...) (comm_from((c)->comm, __func__), compress_momentum_begin(c, __VA_ARGS__))
#define compress_measure_end(c) (comm_from((c)->comm, __func__), compress_measure_end(c))
#endif
