/*
compress_methods.h - compressed messages in place of gradients: the table of methods, segments, their state, and the
exchanges of all methods but int8, int4 and powersgd, which are in train_gpt2_compress.cu.

A segment is the part of a bucket that travels together: neighbouring tensors that are compressed in the same way, or
not at all. The 1-D tensors of all buckets are one segment, because they are too small for messages of their own (as in
PyTorch's PowerSGD hook). The program calls the exchange_* of a segment's method once per round: each round packs and
issues a message, except for the last one, in which the sum over the ranks replaces the gradients. All ranks exchange
segments in the same order and compute the result from the same bytes, so that they get the same bits.

Sums      Papers send means. Here each rank's gradient includes 1/N (train_step), so the sum over the ranks is the mean.
Clipping  comes after the sum, because the global norm needs all of it. Errors therefore belong to unclipped gradients.
Errors    The part of a gradient that was not sent is added to the next gradient before compression (error feedback), so
          it arrives late. This is harmless if a step is linear in the gradient. A step of AdamW is not: v remembers the
          square of a late error.
State     is fp32 memory of MEMORY_ERRORS, per segment: gradient + error, of which the new error remains; the error of
          this rank's part of the sum, if a method compresses the sum as well; Q of PowerSGD. With fp16, which may skip
          a step, two copies exist: a step reads `state` and writes `next`, and the two are exchanged unless it was
          skipped. With other types a step that was not finite clears the state.
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
       COMPRESS_POWERSGD, COMPRESS_METHODS,
       COMPRESS_VECTORS = COMPRESS_METHODS }; // the segment of all 1-D tensors, in any run that compresses
#define COMPRESS_WORDS "none|bf16|int8|int4|top-k|sign|powersgd"

typedef struct {
    int method;          // COMPRESS_NONE, ...
    int feedback;        // errors are kept and added to the gradients of the next step
    double fraction;     // of the elements, which top-k sends
    long long low_rank;  // of PowerSGD's P and Q
    long long from;      // first step that is compressed
    long long measure;   // compares every so many steps with the true mean; 0: never
} CompressOptions;

typedef struct {
    int method;          // COMPRESS_NONE: its gradients travel as they are
    int messages;        // 1 or 2
    int round;           // of its exchange, which comes next; round k begins when message k - 1 has arrived
    int bucket;          // that contains it
    int tensors, missing; // number of tensors; how many of their gradients are not final yet
    size_t at, n;        // elements [at, at+n) of the flat gradients
    size_t rows, cols;   // of its matrix, if segments are single tensors
    CommOp op;           // its last message
    floatX* grads;       // (n) view
    char *packed, *received; // its messages, owned; NULL if the method does not need it
    // Views of its state, which compress_step_begin sets.
    size_t state_at;     // first float of its state
    float* corrected;    // (n) gradient + error; the same memory as new_error
    const float* error;  // (n) gradients that this rank has not sent in earlier steps; NULL without error feedback
    float* new_error;    // (n) the same after this step
    const float* sum_error; // (blocks_part) of int8 and int4: the same for the sum that this rank has sent
    float* new_sum_error;
    const float* last_q; // (cols,r) PowerSGD's Q of the last step
    float* next_q;       // of this one
} Segment;

typedef struct { size_t at, n; } Piece; // elements [at, at+n) of the flat gradients

// The costs of a segment for a rank.
typedef struct {
    size_t packed, received; // bytes of its messages
    size_t x, part, q;     // floats of its state, in this order: errors, errors of the sum, Q
    size_t scratch;        // floats that all segments share, one after another
    double bytes;          // sent per step
} SegmentCost;

typedef struct {
    CompressOptions o;
    Comm* comm;            // not owned
    uint64_t seed;         // of the first Q, the same on all ranks
    long long steps;       // in the whole run
    size_t num_elements;   // of the flat gradients
    int num_segments;
    Segment* segments;     // (num_segments) in the order in which the backward pass fills them, owned
    int num_pieces, vectors; // of the segment of all 1-D tensors, which is segments[vectors] if num_pieces > 0
    Piece* pieces;         // (num_pieces) from the end of the gradients to their beginning, owned
    Segment* previous;     // the last segment that has sent its first message of two; NULL: none
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
    char* resumed;         // the checkpoint from which this run resumes, owned; NULL: none
} Compress;

static inline int compress_ranks(const Compress* c) { return c->comm->size; }

// ---- what a segment costs ----
// Returns the elements of x: without error feedback only if the method computes gradient + error in fp32.
static inline size_t compress_x(const Compress* c, const Segment* s) {
    bool computes = c->o.method == COMPRESS_TOP_K || c->o.method == COMPRESS_SIGN || c->o.method == COMPRESS_POWERSGD;
    return c->o.feedback || computes ? s->n : 0;
}
// An all-reduce of all elements, in place for whole gradients, otherwise packed.
static inline SegmentCost all_reduce_cost(const Compress* c, const Segment* s) {
    bool whole = s->method == COMPRESS_NONE, bf16 = s->method == COMPRESS_BF16;
    size_t bytes = s->n * (bf16 ? sizeof(uint16_t) : sizeof(floatX));
    SegmentCost cost = { whole ? 0 : bytes, 0, bf16 ? compress_x(c, s) : 0, 0, 0, 0,
                         ring_bytes((double)bytes, compress_ranks(c)) };
    return cost;
}
static inline int compress_bits(const Compress* c) { return c->o.method == COMPRESS_INT8 ? 8 : 4; }
// Returns the elements of each of the N parts, which are cut between blocks, at multiples of 16 bytes. The last parts
// may be shorter or empty.
static inline size_t blocks_part(const Compress* c, const Segment* s) {
    return round_up(ceil_div(s->n, (size_t)compress_ranks(c)), PACKED_ROW);
}
static inline SegmentCost blocks_cost(const Compress* c, const Segment* s) {
    size_t part = blocks_part(c, s), row = quantised_bytes(part, compress_bits(c)), N = (size_t)compress_ranks(c);
    size_t kept = c->o.feedback ? part : 0;
    SegmentCost cost = { N * row, N * row, compress_x(c, s), kept, 0, part, 2 * (double)((N - 1) * row) };
    return cost;
}
static inline size_t segment_k(const Compress* c, const Segment* s) { return top_k_count(s->n, c->o.fraction); }
// An all-gather of every rank's row.
static inline SegmentCost all_gather_cost(const Compress* c, const Segment* s) {
    bool top_k = s->method == COMPRESS_TOP_K;
    size_t row = top_k ? sparse_bytes(segment_k(c, s)) : signs_bytes(s->n), N = (size_t)compress_ranks(c);
    SegmentCost cost = { N * row, 0, compress_x(c, s), 0, 0, top_k ? s->n : 0, (double)((N - 1) * row) };
    return cost;
}
static inline SegmentCost powersgd_cost(const Compress* c, const Segment* s) {
    size_t r = (size_t)c->o.low_rank, P = s->rows * r * sizeof(float), Q = s->cols * r * sizeof(float);
    SegmentCost cost = { P, Q, compress_x(c, s), 0, s->cols * r, 0, ring_bytes((double)(P + Q), compress_ranks(c)) };
    return cost;
}

// ---- the methods ----
typedef struct {
    const char *name, *text;
    bool per_tensor;       // a segment is one tensor
    int messages;          // of a segment
    bool feedback;         // by default: only if harmless with AdamW (see Errors above)
    long long from;        // first step that is compressed, by default; powersgd starts later, as in PyTorch
    SegmentCost (*cost)(const Compress* c, const Segment* s);
} CompressMethod;
static const CompressMethod compress_methods[COMPRESS_METHODS + 1] = {
    // name       text                          per_tensor messages feedback from  cost
    { "none",     "gradients travel whole",     false,     1,       false,    0,   all_reduce_cost },
    { "bf16",     "rounded to bf16",            false,     1,       false,    0,   all_reduce_cost },
    { "int8",     "8 bits, blocks of 256",      false,     2,       false,    0,   blocks_cost },
    { "int4",     "4 bits, blocks of 256",      false,     2,       true,     0,   blocks_cost },
    { "top-k",    "the largest of each tensor", true,      1,       false,    0,   all_gather_cost },
    { "sign",     "signs, a scale a tensor",    true,      1,       false,    0,   all_gather_cost },
    { "powersgd", "P and Q of low rank",        true,      2,       true,     50,  powersgd_cost },
    { "vectors",  "1-D tensors, whole",         false,     1,       false,    0,   all_reduce_cost },
};
static inline const CompressMethod* compress_method(const Compress* c) { return &compress_methods[c->o.method]; }
static inline SegmentCost segment_cost(const Compress* c, const Segment* s) {
    return compress_methods[s->method].cost(c, s);
}

// ---- the exchanges of one message: round 0 packs and sends it, round 1 sets the gradients ----

// No compression, in place: matrices whose P and Q would not be smaller. Round 1 does nothing.
static inline void exchange_whole(Compress* c, Segment* s) {
    if (s->round == 0) s->op = comm_all_reduce(c->comm, s->grads, s->n, COMM_FLOATX);
}

// No compression: 1-D tensors, which are copied behind one another and back.
static inline void exchange_vectors(Compress* c, Segment* s) {
    floatX* packed = (floatX*)s->packed;
    for (Piece* p = c->pieces; p < c->pieces + c->num_pieces; p++) {
        floatX* grads = c->grads + p->at;
        device_copy(s->round == 0 ? packed : grads, s->round == 0 ? grads : packed, p->n * sizeof(floatX));
        packed += p->n;
    }
    if (s->round == 0) s->op = comm_all_reduce(c->comm, s->packed, s->n, COMM_FLOATX);
}

// bf16: an all-reduce of 16 bits per element, as in PyTorch's bf16_compress_hook.
static inline void exchange_bf16(Compress* c, Segment* s) {
    uint16_t* packed = (uint16_t*)s->packed;
    if (s->round == 0) {
        round_bf16(packed, s->new_error, s->grads, s->error, s->n);
        s->op = comm_all_reduce(c->comm, packed, s->n, COMM_BF16);
    } else {
        widen_bf16(s->grads, packed, s->n);
    }
}

// top-k: the largest elements and their positions (with error feedback: Stich et al. 2018, arXiv 1809.07599).
// Ranks send different elements, which cannot be summed on the way. Each rank gathers all of them: (N-1) 8k bytes.
static inline void exchange_top_k(Compress* c, Segment* s) {
    size_t k = segment_k(c, s), row = sparse_bytes(k);
    char* mine = s->packed + (size_t)c->comm->rank * row;
    if (s->round == 0) {
        add_error(s->corrected, s->grads, s->error, s->n);
        pack_top_k(mine, s->new_error, s->corrected, s->n, k);
        s->op = comm_all_gather(c->comm, s->packed, mine, row, COMM_BYTE);
    } else {
        sparse_sum_fp32(c->scratch, s->packed, compress_ranks(c), s->n, k);
        from_fp32(s->grads, c->scratch, s->n);
    }
}

// sign: a bit an element and one scale a tensor (EF-signSGD, Karimireddy et al. 2019, arXiv 1901.09847).
// The paper's error contains the learning rate. Ours does not, because AdamW comes later.
static inline void exchange_signs(Compress* c, Segment* s) {
    size_t row = signs_bytes(s->n);
    char* mine = s->packed + (size_t)c->comm->rank * row;
    if (s->round == 0) {
        add_error(s->corrected, s->grads, s->error, s->n);
        pack_signs(mine, s->new_error, s->corrected, s->n);
        s->op = comm_all_gather(c->comm, s->packed, mine, row, COMM_BYTE);
    } else {
        unpack_signs_sum(s->grads, s->packed, compress_ranks(c), s->n);
    }
}

// All exchanges that are not in train_gpt2_compress.cu.
static inline void exchange_other(Compress* c, Segment* s) {
    switch (s->method) {
    case COMPRESS_BF16: exchange_bf16(c, s); break;
    case COMPRESS_TOP_K: exchange_top_k(c, s); break;
    case COMPRESS_SIGN: exchange_signs(c, s); break;
    case COMPRESS_VECTORS: exchange_vectors(c, s); break;
    default: exchange_whole(c, s);
    }
}

// ---- options ----
static inline void options_compress(OptionTable* t, CompressOptions* o) {
    o->fraction = 0.01;
    o->low_rank = 4;
    option_choice(t, "compress", &o->method, COMPRESS_WORDS,
                  "how gradients of matrices are sent; others are sent uncompressed");
    option_flag(t, "error-feedback", &o->feedback, "add the part that was not sent to the gradient of the next step;"
                " on for int4 and powersgd unless --no-error-feedback is given");
    option_float(t, "top-k-fraction", &o->fraction, 1e-6, 1, "share of each matrix's elements that top-k sends");
    option_int(t, "rank", &o->low_rank, 1, 1024, "columns of P and Q in powersgd");
    option_int(t, "compress-from", &o->from, 0, 1e9, "first steps, sent uncompressed; if not given: 50 for powersgd");
    option_int(t, "measure-error", &o->measure, 0, 1e9,
               "steps between comparisons of the applied gradient with the mean of"
               " the gradients of all ranks, which are then sent in fp32; 0: none");
}

// Dies if an option was given that does nothing with this method. works: it does something; with: these methods.
static inline void compress_refuse(const Compress* c, OptionTable* t, const char* option, bool works,
                                   const char* with) {
    require(works || !option_given(t, option), "--%s does nothing with --compress %s, only with %s; leave it out",
            option, compress_method(c)->name, with);
}
// Sets what follows from the options; no segments yet. The ranks have met.
static inline void compress_configure(Compress* c, OptionTable* t, Comm* comm, long long seed, long long steps,
                                      size_t num_elements) {
    CompressOptions* o = &c->o;
    int method = o->method;
    bool any = method != COMPRESS_NONE;
    c->comm = comm;
    c->seed = (uint64_t)seed;
    c->steps = steps;
    c->num_elements = num_elements;
    compress_refuse(c, t, "top-k-fraction", method == COMPRESS_TOP_K, "top-k");
    compress_refuse(c, t, "rank", method == COMPRESS_POWERSGD, "powersgd");
    compress_refuse(c, t, "error-feedback", any, "other methods");
    compress_refuse(c, t, "compress-from", any, "other methods");
    require(!NEEDS_MASTER || method != COMPRESS_BF16,
            "--compress bf16 saves nothing: this program's gradients (" FLOATX_NAME ") have 16 bits already; use none");
    if (!option_given(t, "error-feedback")) o->feedback = compress_method(c)->feedback;
    if (!option_given(t, "compress-from")) o->from = compress_method(c)->from;
}

// ---- segments ----
static inline bool compress_is_on(const Compress* c) {
    return c->o.method != COMPRESS_NONE && compress_ranks(c) > 1;
}
// Returns true if a tensor is compressed: a matrix; with powersgd only if P and Q have at most half of its elements.
static inline bool compress_takes(const Compress* c, size_t rows, size_t cols) {
    if (!compress_is_on(c) || cols == 0) return false;
    return c->o.method != COMPRESS_POWERSGD || 2 * (rows + cols) * (size_t)c->o.low_rank <= rows * cols;
}

// Appends a segment without tensors. Returns its number.
static inline int segment_new(Compress* c, int method, int bucket, TensorInfo t) {
    c->segments = grown_array(Segment, c->segments, c->num_segments);
    Segment* s = &c->segments[c->num_segments];
    memset(s, 0, sizeof *s);
    s->method = method;
    s->messages = compress_methods[method].messages;
    s->bucket = bucket;
    s->rows = t.stored_rows;
    s->cols = t.cols;
    return c->num_segments++;
}
// Chooses the segment for a tensor: the one of all 1-D tensors; the last one, if the tensor can join it; or a new one.
static inline int segment_for(Compress* c, int method, int bucket, TensorInfo t, size_t end) {
    if (method == COMPRESS_VECTORS && c->num_pieces > 0) return c->vectors;
    const Segment* s = c->num_segments > 0 ? &c->segments[c->num_segments - 1] : NULL;
    bool is_alike = s && s->method == method && s->bucket == bucket && s->at == end;
    return is_alike && !compress_methods[method].per_tensor ? c->num_segments - 1 : segment_new(c, method, bucket, t);
}
// Adds elements [at, end), which are 1-D tensors, to the pieces of their segment.
static inline void compress_add_piece(Compress* c, size_t at, size_t end) {
    if (c->num_pieces == 0 || c->pieces[c->num_pieces - 1].at != end) { // no neighbour of the last piece
        c->pieces = grown_array(Piece, c->pieces, c->num_pieces);
        c->pieces[c->num_pieces++].n = 0;
    }
    c->pieces[c->num_pieces - 1].at = at;
    c->pieces[c->num_pieces - 1].n += end - at;
}

// Adds a tensor of a bucket, whose first element is `at`, to the front of a segment. Call for all tensors, from the end
// of the gradient memory to its beginning. Returns the number of its segment.
static inline int compress_add(Compress* c, int bucket, TensorInfo t, size_t at) {
    bool takes = compress_takes(c, t.rows, t.cols), is_vector = compress_is_on(c) && t.cols == 0;
    int method = takes ? c->o.method : is_vector ? COMPRESS_VECTORS : COMPRESS_NONE;
    size_t n = takes ? tensor_stored_elements(t) : tensor_elements(t); // signs have no 0, so no padding
    int k = segment_for(c, method, bucket, t, at + tensor_elements(t));
    Segment* s = &c->segments[k];
    s->at = at;
    s->n += n;
    s->missing = ++s->tensors;
    if (takes) c->compressed += n;
    if (is_vector) {
        c->vectors = k;
        compress_add_piece(c, at, at + n);
    }
    return k;
}

static inline size_t segment_state_floats(SegmentCost cost) { return round_up(cost.x + cost.part + cost.q, 16); }
static inline size_t compress_state_floats(const Compress* c) {
    size_t n = 0;
    for (int i = 0; i < c->num_segments; i++) n += segment_state_floats(segment_cost(c, &c->segments[i]));
    return n;
}

// Adds the bytes that compress_init allocates, by kind.
static inline void compress_predict_memory(const Compress* c, size_t bytes[MEMORY_KINDS]) {
    size_t scratch = 0;
    for (int i = 0; i < c->num_segments; i++) {
        SegmentCost cost = segment_cost(c, &c->segments[i]);
        bytes[MEMORY_COMMUNICATION] += cost.packed + cost.received;
        scratch = size_max(scratch, cost.scratch);
    }
    size_t copies = FLOATX_DTYPE == DTYPE_F16 ? 2 : 1;
    bytes[MEMORY_ERRORS] += (copies * compress_state_floats(c) + scratch) * sizeof(float);
    if (c->compressed == 0) return;
    if (c->o.measure > 0) bytes[MEMORY_ERRORS] += c->num_elements * sizeof(float) + sizeof(Comparison);
}

// Returns true if a step, counted from 0, compresses.
static inline bool compress_is_active(const Compress* c, long long step) {
    return c->compressed > 0 && step >= c->o.from;
}

// Returns the bytes that a rank sends for its gradients without compression, and in a step, counted from 0.
static inline double compress_whole_bytes(const Compress* c) {
    return ring_bytes((double)(c->num_elements * sizeof(floatX)), compress_ranks(c));
}
static inline double compress_predict_sent(const Compress* c, long long step) {
    double bytes = 0;
    if (!compress_is_active(c, step)) return compress_whole_bytes(c);
    for (int i = 0; i < c->num_segments; i++) bytes += segment_cost(c, &c->segments[i]).bytes;
    return bytes;
}

// Returns true if the next step needs the state of this one; otherwise it is scratch.
static inline bool compress_keeps(const Compress* c) {
    return compress_state_floats(c) > 0 && (c->o.feedback || c->o.method == COMPRESS_POWERSGD);
}

// Sets errors to 0, and Q to random numbers, which are the same on all ranks.
static inline void compress_forget(Compress* c) {
    size_t r = (size_t)c->o.low_rank;
    if (c->state_floats > 0) device_zero(c->state, c->state_floats * sizeof(float));
    uint64_t matrix = 0;
    for (Segment* s = c->segments; s < c->segments + c->num_segments; s++) {
        if (s->method != COMPRESS_POWERSGD) continue;
        SegmentCost cost = segment_cost(c, s);
        float *q = c->state + s->state_at + cost.x + cost.part, *host = new_array(float, cost.q);
        for (size_t k = 0; k < cost.q; k++) host[k] = random_normal(c->seed, STREAM_COMPRESS + matrix, k);
        host_to_device(q, host, cost.q * sizeof(float));
        device_synchronize(); // the copy reads host
        free(host);
        orthonormalise(q, (int)s->cols, (int)r);
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
        Segment* s = &c->segments[i];
        SegmentCost cost = segment_cost(c, s);
        s->grads = grads + s->at;
        s->state_at = c->state_floats;
        c->state_floats += segment_state_floats(cost);
        scratch = size_max(scratch, cost.scratch);
        if (cost.packed > 0) s->packed = (char*)device_alloc(cost.packed, MEMORY_COMMUNICATION);
        if (cost.received > 0) s->received = (char*)device_alloc(cost.received, MEMORY_COMMUNICATION);
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
        device_free(c->segments[i].packed);
        device_free(c->segments[i].received);
    }
    free(c->segments);
    free(c->pieces);
    free(c->resumed);
    if (c->next != c->state) device_free(c->next);
    device_free(c->state); device_free(c->scratch); device_free(c->truth); device_free(c->comparison);
}

// ---- a step ----
// Sets the views of a segment's state: the errors that this step adds, and those that it leaves for the next one.
static inline void segment_set_state(const Compress* c, Segment* s) {
    SegmentCost cost = segment_cost(c, s);
    if (c->state == NULL) return;
    float *now = c->state + s->state_at, *next = c->next + s->state_at;
    s->corrected = next;
    s->error = c->o.feedback ? now : NULL;
    s->new_error = c->o.feedback ? next : NULL;
    s->sum_error = c->o.feedback ? now + cost.x : NULL;
    s->new_sum_error = c->o.feedback ? next + cost.x : NULL;
    s->last_q = now + cost.x + cost.part;
    s->next_q = next + cost.x + cost.part;
}
// loss_scale: of the gradients of this step; errors are scaled accordingly.
static inline void compress_step_begin(Compress* c, long long step, double loss_scale) {
    c->active = compress_is_active(c, step);
    for (Segment* s = c->segments; s < c->segments + c->num_segments; s++) segment_set_state(c, s);
    c->measures = c->active && c->o.measure > 0 && (step + 1) % c->o.measure == 0;
    if (c->measures) device_zero(c->truth, c->num_elements * sizeof(float)); // padding is in no segment
    if (!c->active) return;
    if (c->loss_scale != 0 && c->loss_scale != loss_scale && c->state_floats > 0) // Q too: only its direction counts
        scale_in_place_fp32(c->state, (float)(loss_scale / c->loss_scale), c->state_floats);
    c->loss_scale = loss_scale;
}
// skipped: the gradients were not finite, so the errors of this step are useless.
static inline void compress_keep_errors(Compress* c, bool skipped) {
    if (!c->active) return;
    if (skipped && c->next == c->state && compress_keeps(c))
        printf("compress   this step was not finite, so the errors restart at 0\n");
    if (skipped && c->next == c->state) compress_forget(c);
    if (skipped) return;
    float* old = c->state;
    c->state = c->next;
    c->next = old;
}

// ---- the compression error: the applied gradients compared with the true mean ----
// Call when the segments are finished, if c->measures.
static inline void compress_measure_end(Compress* c) {
    size_t n = c->num_elements;
    comm_trace_data(c->comm, c->grads, n * sizeof(floatX));
    comm_wait(c->comm, comm_all_reduce(c->comm, c->truth, n, COMM_F32));
    device_zero(c->comparison, sizeof *c->comparison);
    add_comparison(c->comparison, c->grads, c->truth, n);
}
static inline double compress_measure_bytes(const Compress* c) { // in this step
    return c->measures ? ring_bytes((double)(c->num_elements * sizeof(float)), compress_ranks(c)) : 0;
}

// Call at the beginning of each round: keeps the gradients for --measure-error, and tells the timeline which gradients
// the next message is about: of the segment of all 1-D tensors, everything between the first and the last.
static inline void compress_observe(Compress* c, const Segment* s) {
    Piece own = { s->at, s->n };
    bool vectors = s->method == COMPRESS_VECTORS;
    const Piece* pieces = vectors ? c->pieces : &own;
    if (s->round == 0 && c->measures)
        for (int i = 0; i < (vectors ? c->num_pieces : 1); i++)
            to_fp32(c->truth + pieces[i].at, c->grads + pieces[i].at, pieces[i].n);
    size_t span = pieces[0].at + pieces[0].n - s->at;
    if (s->round < s->messages) comm_trace_data(c->comm, s->grads, span * sizeof(floatX));
}

// The program defines this one in section 5, and calls it from section 4.
static void segment_send(Compress* c, Segment* s);
#endif
