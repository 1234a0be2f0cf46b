/*
compress_methods.h - compressed messages in place of gradients: segments, and all methods but int8, int4 and powersgd,
which are in train_gpt2_compress.cu together with the table of methods.

A segment is the part of a bucket that one message contains: neighbouring tensors that are compressed in the same way,
or not at all. When its gradients are final, its method packs it and issues the first operation (compress_send). A
method of two rounds computes the second message from the result of the first one when the next such segment is sent, or
at the end. Then the sum over the ranks replaces the gradients (compress_finish). All ranks send segments in the same
order and compute the result from the same bytes, so that they get the same bits.

Sums      Papers send means. Here each rank's gradient includes 1/N (train_step), so the sum over the ranks is the mean.
Clipping  comes after the sum, because the global norm needs all of it. Errors therefore belong to unclipped gradients.
Errors    The part of a gradient that was not sent is added to the next gradient before compression (error feedback), so
          it arrives late. This is harmless if a step is linear in the gradient. A step of AdamW is not: v remembers the
          square of a late error.
State     is fp32 memory of MEMORY_ERRORS, per segment: x, gradient + error; the error of this rank's part of the sum,
          if a method compresses the sum as well; Q of PowerSGD. With fp16, which may skip a step, two copies exist: a
          step reads `state` and writes `next`, and the two are exchanged unless it was skipped. With other types a step
          that was not finite clears the state.
Alone     On one rank, and before --compress-from, nothing is compressed: buckets are sent as in train_gpt2_ddp.cu.
*/
#ifndef LLMC_COMPRESS_METHODS_H
#define LLMC_COMPRESS_METHODS_H
#include "../base/checksum.h"
#include "../base/options.h"
#include "../base/rng.h"
#include "../comm/comm.h"
#include "../device/compress.h"
#include "../model/param_range.h"

enum { COMPRESS_NONE, COMPRESS_BF16, COMPRESS_INT8, COMPRESS_INT4, COMPRESS_TOP_K, COMPRESS_SIGN,
       COMPRESS_POWERSGD, COMPRESS_METHODS };
#define COMPRESS_WORDS "none|bf16|int8|int4|top-k|sign|powersgd"

typedef struct {
    int method;          // COMPRESS_NONE, ...
    int feedback;        // errors are kept and added to the gradients of the next step
    double fraction;     // of the elements, which top-k sends
    long long rank;      // of PowerSGD's P and Q
    long long from;      // first step that is compressed
    long long measure;   // compares every so many steps with the true mean; 0: never
} CompressOptions;

struct CompressMethod;
typedef struct {
    const struct CompressMethod* method; // the run's, or compress_whole
    int bucket;          // that contains it
    int tensors, missing; // number of tensors; how many of their gradients are not final yet
    size_t at, n;        // elements [at, at+n) of the flat gradients
    size_t rows, cols;   // of its matrix, if segments are single tensors
    size_t state;        // first element of its state
    int round;           // of the operation under way; 0: none
    CommOp op;
    char *sent, *received; // owned; NULL if the method does not need it
} Segment;

// The costs of a segment for a rank.
typedef struct {
    size_t sent, received; // bytes of its buffers
    size_t x, part, q;     // floats of its state, in this order
    size_t scratch;        // floats that all segments share, one after another
    double bytes;          // sent per step
} SegmentCost;

typedef struct {
    CompressOptions o;
    const struct CompressMethod* method;
    Comm* comm;            // not owned
    uint64_t seed;         // of the first Q, the same on all ranks
    size_t num_elements;   // of the flat gradients
    int num_segments;
    Segment* segments;     // (num_segments) in the order in which the backward pass fills them, owned
    Segment* last;         // the segment of two rounds that is in its first; NULL: none
    size_t compressed;     // elements of all compressed segments
    bool active;           // this step compresses
    bool measures;         // and is compared with the true mean
    double loss_scale;     // of the gradients that caused the errors; 0: no errors yet
    floatX* grads;         // (num_elements) view
    size_t state_floats;
    float *state, *next;   // (state_floats) owned; the same memory if there is one copy
    float* scratch;        // owned
    float* truth;          // (num_elements) the gradients without compression, owned; NULL: never measured
    Comparison* comparison; // on the device, owned
    const float* m;        // (num_elements) AdamW's first moment, which ties a file of errors to its checkpoint; view
} Compress;

typedef struct CompressMethod {
    const char *name, *text;
    bool per_tensor;       // a segment is one tensor
    bool feedback;         // by default
    bool needs_x;          // keeps gradient + error in fp32 even without error feedback
    long long from;        // by default
    SegmentCost (*cost)(const Compress* c, const Segment* p);
    void (*begin)(Compress* c, Segment* p); // packs p, and issues p->op
    void (*middle)(Compress* c, Segment* p); // after the first p->op: issues the second; NULL: one round
    void (*end)(Compress* c, Segment* p); // after the last p->op: sets the gradients
} CompressMethod;

// ---- a segment's memory ----
static inline int compress_ranks(const Compress* c) { return c->comm->size; }
static inline floatX* segment_grads(const Compress* c, const Segment* p) { return c->grads + p->at; }
static inline float* segment_x(const Compress* c, const Segment* p) { return c->next + p->state; }
static inline const float* segment_error(const Compress* c, const Segment* p) {
    return c->o.feedback ? c->state + p->state : NULL;
}
static inline float* segment_kept(const Compress* c, const Segment* p) {
    return c->o.feedback ? segment_x(c, p) : NULL;
}
// Return the error of this rank's part of the sum, and Q, in one copy of the state.
static inline float* segment_part(const Compress* c, const Segment* p, float* copy) {
    return c->o.feedback ? copy + p->state + p->method->cost(c, p).x : NULL;
}
static inline float* segment_q(const Compress* c, const Segment* p, float* copy) {
    SegmentCost cost = p->method->cost(c, p);
    return copy + p->state + cost.x + cost.part;
}
// Returns the elements of x: without error feedback only if the method needs it.
static inline size_t compress_x(const Compress* c, const Segment* p) {
    return c->o.feedback || c->method->needs_x ? p->n : 0;
}

// ---- no compression: 1-D tensors, and matrices that would not become smaller ----
static inline SegmentCost whole_cost(const Compress* c, const Segment* p) {
    SegmentCost cost = { 0, 0, 0, 0, 0, 0, ring_bytes((double)(p->n * sizeof(floatX)), compress_ranks(c)) };
    return cost;
}
static inline void whole_begin(Compress* c, Segment* p) {
    p->op = (comm_all_reduce)(c->comm, segment_grads(c, p), p->n, COMM_FLOATX);
}
static inline void whole_end(Compress* c, Segment* p) { (void)c; (void)p; }
static const CompressMethod compress_whole = { "whole", "", false, false, false, 0, whole_cost, whole_begin, NULL,
                                               whole_end };

// ---- bf16: an all-reduce of 16 bits per element, as in PyTorch's bf16_compress_hook ----
static inline SegmentCost bf16_cost(const Compress* c, const Segment* p) {
    size_t bytes = p->n * sizeof(uint16_t);
    SegmentCost cost = { bytes, 0, compress_x(c, p), 0, 0, 0, ring_bytes((double)bytes, compress_ranks(c)) };
    return cost;
}
static inline void bf16_begin(Compress* c, Segment* p) {
    round_bf16((uint16_t*)p->sent, segment_kept(c, p), segment_grads(c, p), segment_error(c, p), p->n);
    p->op = (comm_all_reduce)(c->comm, p->sent, p->n, COMM_BF16);
}
static inline void bf16_end(Compress* c, Segment* p) {
    widen_bf16(segment_grads(c, p), (const uint16_t*)p->sent, p->n);
}

// ---- int8, int4: helpers of blocks_begin, blocks_middle and blocks_end in train_gpt2_compress.cu ----
static inline int compress_bits(const Compress* c) { return c->o.method == COMPRESS_INT8 ? 8 : 4; }
// Returns the elements of each of the N parts, which are cut between blocks, at multiples of 16 bytes. The last parts
// may be shorter or empty.
static inline size_t blocks_part(const Compress* c, const Segment* p) {
    return round_up(ceil_div(p->n, (size_t)compress_ranks(c)), PACKED_ROW);
}
static inline SegmentCost blocks_cost(const Compress* c, const Segment* p) {
    size_t part = blocks_part(c, p), row = quantised_bytes(part, compress_bits(c)), N = (size_t)compress_ranks(c);
    size_t kept = c->o.feedback ? part : 0;
    SegmentCost cost = { N * row, N * row, compress_x(c, p), kept, 0, part, 2 * (double)((N - 1) * row) };
    return cost;
}

// ---- top-k: the largest elements and their positions (with error feedback: Stich et al. 2018, arXiv 1809.07599) ----
// Ranks send different elements, which cannot be summed on the way. Each rank gathers all of them: (N-1) 8k bytes.
static inline size_t segment_k(const Compress* c, const Segment* p) { return top_k_count(p->n, c->o.fraction); }
static inline SegmentCost top_k_cost(const Compress* c, const Segment* p) {
    size_t row = sparse_bytes(segment_k(c, p)), N = (size_t)compress_ranks(c);
    SegmentCost cost = { N * row, 0, compress_x(c, p), 0, 0, p->n, (double)((N - 1) * row) };
    return cost;
}
static inline void top_k_begin(Compress* c, Segment* p) {
    size_t k = segment_k(c, p), row = sparse_bytes(k);
    char* mine = p->sent + (size_t)c->comm->rank * row;
    add_error(segment_x(c, p), segment_grads(c, p), segment_error(c, p), p->n);
    pack_top_k(mine, segment_kept(c, p), segment_x(c, p), p->n, k);
    p->op = (comm_all_gather)(c->comm, p->sent, mine, row, COMM_BYTE);
}
static inline void top_k_end(Compress* c, Segment* p) {
    sparse_sum_fp32(c->scratch, p->sent, compress_ranks(c), p->n, segment_k(c, p));
    from_fp32(segment_grads(c, p), c->scratch, p->n);
}

// ---- sign: a bit an element and one scale a tensor (EF-signSGD, Karimireddy et al. 2019, arXiv 1901.09847) ----
// The paper's error has the learning rate in it. Ours has not, because AdamW comes after.
static inline SegmentCost sign_cost(const Compress* c, const Segment* p) {
    size_t row = signs_bytes(p->n), N = (size_t)compress_ranks(c);
    SegmentCost cost = { N * row, 0, compress_x(c, p), 0, 0, 0, (double)((N - 1) * row) };
    return cost;
}
static inline void sign_begin(Compress* c, Segment* p) {
    size_t row = signs_bytes(p->n);
    char* mine = p->sent + (size_t)c->comm->rank * row;
    add_error(segment_x(c, p), segment_grads(c, p), segment_error(c, p), p->n);
    pack_signs(mine, segment_kept(c, p), segment_x(c, p), p->n);
    p->op = (comm_all_gather)(c->comm, p->sent, mine, row, COMM_BYTE);
}
static inline void sign_end(Compress* c, Segment* p) {
    unpack_signs_sum(segment_grads(c, p), p->sent, compress_ranks(c), p->n);
}

// ---- powersgd: P and Q of a matrix; train_gpt2_compress.cu has the rest ----
static inline SegmentCost powersgd_cost(const Compress* c, const Segment* p) {
    size_t r = (size_t)c->o.rank, P = p->rows * r * sizeof(float), Q = p->cols * r * sizeof(float);
    SegmentCost cost = { P, Q, compress_x(c, p), 0, p->cols * r, 0, ring_bytes((double)(P + Q), compress_ranks(c)) };
    return cost;
}

// ---- options ----
static inline void options_compress(OptionTable* t, CompressOptions* o) {
    o->fraction = 0.01;
    o->rank = 4;
    option_choice(t, "compress", &o->method, COMPRESS_WORDS,
                  "how gradients of matrices are sent; others are sent uncompressed");
    option_flag(t, "error-feedback", &o->feedback, "add the part that was not sent to the gradient of the next step;"
                " on for int4 and powersgd unless --no-error-feedback is given");
    option_float(t, "top-k-fraction", &o->fraction, 1e-6, 1, "share of each matrix's elements that top-k sends");
    option_int(t, "rank", &o->rank, 1, 1024, "columns of P and Q in powersgd");
    option_int(t, "compress-from", &o->from, 0, 1e9, "first steps, sent uncompressed; if not given: 50 for powersgd");
    option_int(t, "measure-error", &o->measure, 0, 1e9,
               "steps between comparisons of the applied gradient with the mean of"
               " the gradients of all ranks, which are then sent in fp32; 0: none");
}

// Dies if an option was given that does nothing with this method. works: it does something; with: these methods.
static inline void compress_refuse(const Compress* c, OptionTable* t, const char* option, bool works,
                                   const char* with) {
    require(works || !option_given(t, option), "--%s does nothing with --compress %s, only with %s; leave it out",
            option,
            c->method->name, with);
}
// Sets what follows from the options; no segments yet. methods: the table of all. The ranks have met.
static inline void compress_configure(Compress* c, OptionTable* t, const CompressMethod* methods, Comm* comm,
                                      long long seed,
                                      size_t num_elements) {
    CompressOptions* o = &c->o;
    int method = o->method;
    bool any = method != COMPRESS_NONE;
    c->method = &methods[method];
    c->comm = comm;
    c->seed = (uint64_t)seed;
    c->num_elements = num_elements;
    compress_refuse(c, t, "top-k-fraction", method == COMPRESS_TOP_K, "top-k");
    compress_refuse(c, t, "rank", method == COMPRESS_POWERSGD, "powersgd");
    compress_refuse(c, t, "error-feedback", any, "other methods");
    compress_refuse(c, t, "compress-from", any, "other methods");
    require(!NEEDS_MASTER || method != COMPRESS_BF16,
            "--compress bf16 saves nothing: this program's gradients (" FLOATX_NAME ") have 16 bits already; use none");
    if (!option_given(t, "error-feedback")) o->feedback = c->method->feedback;
    if (!option_given(t, "compress-from")) o->from = c->method->from;
}

// ---- segments ----
// Returns true if a tensor is compressed: a matrix; with powersgd only if P and Q have at most half of its elements.
static inline bool compress_takes(const Compress* c, size_t rows, size_t cols) {
    if (c->o.method == COMPRESS_NONE || compress_ranks(c) == 1 || cols == 0) return false;
    return c->o.method != COMPRESS_POWERSGD || 2 * (rows + cols) * (size_t)c->o.rank <= rows * cols;
}

// Adds a tensor of a bucket, whose first element is `at`, to the front of the last segment, or to a new one if bucket
// or method differ or each tensor is a segment. Call for all tensors, from the end of the gradient memory to its
// beginning. Returns the number of its segment.
static inline int compress_add(Compress* c, int bucket, TensorInfo t, size_t at) {
    bool takes = compress_takes(c, t.rows, t.cols);
    const CompressMethod* method = takes ? c->method : &compress_whole;
    Segment* p = c->num_segments > 0 ? &c->segments[c->num_segments - 1] : NULL;
    if (p == NULL || p->bucket != bucket || p->method != method || method->per_tensor) {
        c->segments = (Segment*)with_room(c->segments, (size_t)c->num_segments, sizeof(Segment));
        p = &c->segments[c->num_segments++];
        memset(p, 0, sizeof *p);
        p->method = method;
        p->bucket = bucket;
        p->rows = t.stored_rows;
        p->cols = t.cols;
    }
    size_t n = takes ? tensor_stored_elements(t) : tensor_elements(t); // signs have no 0, so no padding
    p->at = at;
    p->n += n;
    p->tensors++;
    if (takes) c->compressed += n;
    return c->num_segments - 1;
}

static inline size_t segment_state_floats(SegmentCost cost) { return round_up(cost.x + cost.part + cost.q, 16); }

// Adds the bytes that compress_init allocates, by kind.
static inline void compress_predict_memory(const Compress* c, size_t bytes[MEMORY_KINDS]) {
    size_t state = 0, scratch = 0;
    for (int i = 0; i < c->num_segments; i++) {
        SegmentCost cost = c->segments[i].method->cost(c, &c->segments[i]);
        bytes[MEMORY_COMMUNICATION] += cost.sent + cost.received;
        state += segment_state_floats(cost);
        scratch = size_max(scratch, cost.scratch);
    }
    size_t copies = FLOATX_DTYPE == DTYPE_F16 ? 2 : 1;
    bytes[MEMORY_ERRORS] += (copies * state + scratch) * sizeof(float);
    if (c->compressed == 0) return;
    if (c->o.measure > 0) bytes[MEMORY_ERRORS] += c->num_elements * sizeof(float) + sizeof(Comparison);
}

// Returns the bytes that a rank sends for all segments in a step that compresses.
static inline double compress_predict_sent(const Compress* c) {
    double bytes = 0;
    for (int i = 0; i < c->num_segments; i++) bytes += c->segments[i].method->cost(c, &c->segments[i]).bytes;
    return bytes;
}

// Returns true if the next step needs the state of this one; otherwise it is scratch. Call after compress_init.
static inline bool compress_keeps(const Compress* c) {
    return c->state_floats > 0 && (c->o.feedback || c->o.method == COMPRESS_POWERSGD);
}

// Sets errors to 0, and Q to random numbers, which are the same on all ranks.
static inline void compress_forget(Compress* c) {
    size_t r = (size_t)c->o.rank;
    if (c->state_floats > 0) device_zero(c->state, c->state_floats * sizeof(float));
    uint64_t matrix = 0;
    for (Segment* p = c->segments; p < c->segments + c->num_segments && c->o.method == COMPRESS_POWERSGD; p++) {
        if (p->method == &compress_whole) continue;
        size_t n = p->cols * r;
        float *q = segment_q(c, p, c->state), *host = (float*)xcalloc(n, sizeof(float));
        for (size_t k = 0; k < n; k++) host[k] = random_normal(c->seed, STREAM_COMPRESS + matrix, k);
        host_to_device(q, host, n * sizeof(float));
        device_synchronize(); // the copy reads host
        free(host);
        orthonormalise(q, (int)p->cols, (int)r);
        matrix++;
    }
}

static inline float* errors_alloc(size_t n) {
    return n > 0 ? (float*)device_alloc(n * sizeof(float), MEMORY_ERRORS) : NULL;
}

// Allocates everything. Call after layers_init. grads (num_elements) is a view.
static inline void compress_init(Compress* c, floatX* grads) {
    size_t scratch = 0;
    c->grads = grads;
    for (int i = 0; i < c->num_segments; i++) {
        Segment* p = &c->segments[i];
        SegmentCost cost = p->method->cost(c, p);
        p->state = c->state_floats;
        c->state_floats += segment_state_floats(cost);
        scratch = size_max(scratch, cost.scratch);
        if (cost.sent > 0) p->sent = (char*)device_alloc(cost.sent, MEMORY_COMMUNICATION);
        if (cost.received > 0) p->received = (char*)device_alloc(cost.received, MEMORY_COMMUNICATION);
    }
    c->state = c->next = errors_alloc(c->state_floats);
    if (FLOATX_DTYPE == DTYPE_F16) c->next = errors_alloc(c->state_floats);
    c->scratch = errors_alloc(scratch);
    if (c->compressed == 0) return;
    if (c->o.measure > 0) {
        c->truth = errors_alloc(c->num_elements);
        c->comparison = (Comparison*)device_alloc(sizeof(Comparison), MEMORY_ERRORS);
    }
    compress_forget(c);
}

static inline void compress_free(Compress* c) {
    for (int i = 0; i < c->num_segments; i++) {
        device_free(c->segments[i].sent);
        device_free(c->segments[i].received);
    }
    free(c->segments);
    if (c->next != c->state) device_free(c->next);
    device_free(c->state); device_free(c->scratch); device_free(c->truth); device_free(c->comparison);
}

// ---- a step ----
// Returns true if a step, counted from 0, compresses.
static inline bool compress_is_active(const Compress* c, long long step) {
    return c->compressed > 0 && step >= c->o.from;
}
// loss_scale: of the gradients of this step; errors are scaled accordingly.
static inline void compress_step_begin(Compress* c, long long step, double loss_scale) {
    c->active = compress_is_active(c, step);
    for (Segment* p = c->segments; p < c->segments + c->num_segments; p++) p->missing = p->tensors;
    c->measures = c->active && c->o.measure > 0 && (step + 1) % c->o.measure == 0;
    if (c->measures) device_zero(c->truth, c->num_elements * sizeof(float)); // padding is in no segment
    c->last = NULL;
    if (!c->active) return;
    if (c->loss_scale != 0 && c->loss_scale != loss_scale && c->state_floats > 0) // Q too: only its direction counts
        scale_in_place_fp32(c->state, (float)(loss_scale / c->loss_scale), c->state_floats);
    c->loss_scale = loss_scale;
}
// skipped: the gradients were not finite, so the errors of this step are useless.
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

// ---- the compression error: the applied gradients compared with the true mean ----
// Call before the segment is sent.
static inline void compress_measure_begin(Compress* c, const Segment* p) {
    if (c->measures) to_fp32(c->truth + p->at, c->grads + p->at, p->n);
}
// Call after compress_finish, if c->measures.
static inline void compress_measure_end(Compress* c) {
    size_t n = c->num_elements;
    comm_trace_data(c->comm, c->grads, n * sizeof(floatX));
    comm_wait(c->comm, (comm_all_reduce)(c->comm, c->truth, n, COMM_F32));
    device_zero(c->comparison, sizeof *c->comparison);
    add_comparison(c->comparison, c->grads, c->truth, n);
}
static inline double compress_measure_bytes(const Compress* c) { // in this step
    return c->measures ? ring_bytes((double)(c->num_elements * sizeof(float)), compress_ranks(c)) : 0;
}

// ---- the rounds of a segment ----
// Waits for a segment's operation. Then begins its second round, or sets its gradients.
static inline void compress_advance(Compress* c, Segment* p) {
    comm_wait(c->comm, p->op);
    if (p->round == 1 && p->method->middle) {
        comm_trace_data(c->comm, segment_grads(c, p), p->n * sizeof(floatX));
        p->method->middle(c, p);
        p->round = 2;
        return;
    }
    p->method->end(c, p);
    p->round = 0;
}

// Sends a segment whose gradients are final. The previous segment of two rounds then begins its second one.
static inline void compress_send(Compress* c, Segment* p) {
    compress_measure_begin(c, p);
    comm_trace_data(c->comm, segment_grads(c, p), p->n * sizeof(floatX));
    p->method->begin(c, p);
    p->round = 1;
    if (!p->method->middle) return;
    if (c->last) compress_advance(c, c->last);
    c->last = p;
}

// Finishes all segments. On return, their gradients are the same on all ranks.
static inline void compress_finish(Compress* c) {
    if (c->last) compress_advance(c, c->last);
    for (Segment* p = c->segments; p < c->segments + c->num_segments; p++) if (p->round > 0) compress_advance(c, p);
    c->last = NULL;
    if (c->measures) compress_measure_end(c);
}

// For the timeline, the caller of these is who communicates.
#define compress_send(c, p) (comm_from((c)->comm, __func__), compress_send(c, p))
#define compress_finish(c) (comm_from((c)->comm, __func__), compress_finish(c))
#endif
