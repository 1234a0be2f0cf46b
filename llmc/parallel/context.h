/*
context.h - context parallelism: the tokens of a sequence that belong to each rank, the buffers through which ranks
exchange data for attention, and the number of bytes that they exchange.

A sequence is cut into equal chunks. Rank r of the c ranks that share it has chunk r of c (contiguous), or chunks r and
2c-1-r of 2c (zigzag): an early one, whose queries see few keys, and a late one, whose queries see many. A rank's rows
are (chunks,B,n): the n tokens of its first chunk in all B sequences, then those of its second chunk. All code that
depends on positions (inputs, targets, wpe, causal masks, samples) uses context_chunk. In shapes T counts a rank's
tokens of a sequence, which has cT. Parameters T are whole sequences, except for context_begin's.

The target of a token is the next token, even if another rank has it: the data loader pairs inputs with targets before
both are cut.
*/
#ifndef LLMC_CONTEXT_H
#define LLMC_CONTEXT_H
#include "../base/options.h"
#include "../device/layers.h"
#include "mesh.h"

// ---- options ----
enum { CP_ULYSSES, CP_ALLGATHER, CP_RING };
enum { CP_CONTIGUOUS, CP_ZIGZAG };

typedef struct {
    long long ranks;          // --context-parallel: c
    int how, balance;         // --cp, --cp-balance
    Comm comm;                // the c ranks that share each sequence, owned
    int c, rank, chunks;      // number of ranks; this rank's number; chunks per rank and sequence: 1 or 2
    int above, below;         // its neighbours in a ring: (rank + 1) mod c, (rank - 1) mod c
    size_t C, NH;             // channels; heads
    int B, chunk_tokens;      // of the current micro-batch: sequences, and tokens per chunk: n
    floatX *send, *received;  // Ulysses: (B,T,3C) each, owned
    floatX *kv_all, *kv[2];   // keys and values; all-gather: (c,chunks,B,n,2C); ring: (chunks,B,n,2C) each; owned
    float *dkv_all, *dkv[2];  // their gradients, in the same shapes; owned
    float *dkv_received;      // ring: (chunks,B,n,2C), the sum from above; owned
    float *dkv_own;           // ring, all-gather: (chunks,B,n,2C), those of this rank's keys and values; owned
    float *out, *dq;          // ring, all-gather: (chunks,B,n,C) output so far; gradients of queries. One memory; owned
    unsigned long long pairs; // pairs of a query and a key that it sees, over all heads and backward passes so far
} ContextParallel;

static inline void options_context_parallel(OptionTable* table, ContextParallel* cp) {
    option_int(table, "context-parallel", &cp->ranks, 0, 1 << 20,
               "neighbouring ranks that share each sequence; groups of them are"
               " data parallel; 0: all ranks form one group");
    option_choice(table, "cp", &cp->how, "ulysses|allgather|ring",
                  "data that attention exchanges; ulysses: heads for tokens, so that a rank has all tokens of some"
                  " heads; allgather: all keys and values at once; ring: those of one rank after another, while"
                  " attention computes");
    option_choice(table, "cp-balance", &cp->balance, "contiguous|zigzag",
                  "tokens of each rank, with --cp allgather or ring; contiguous:"
                  " consecutive ones, which gives the last rank the most work; zigzag: an early and a late part");
}

// ---- the partition ----
// Returns which chunk of each sequence is number i of rank r.
static inline int context_chunk(const ContextParallel* cp, int r, int i) { return i == 0 ? r : 2*cp->c - 1 - r; }
// Returns a rank's number of tokens per sequence of T.
static inline int context_tokens(const ContextParallel* cp, int T) { return T / cp->c; }

// Sets the groups of ranks in `world` that share sequences. Dies unless the options fit the ranks, the heads and
// sequences of T tokens.
static inline void context_plan(ContextParallel* cp, const Comm* world, GPT2Config config, int T) {
    mesh_check_ranks("--context-parallel ", &cp->ranks, world->size);
    cp->c = (int)cp->ranks;
    cp->rank = world->rank % cp->c;
    cp->above = (cp->rank + 1) % cp->c;
    cp->below = (cp->rank + cp->c - 1) % cp->c;
    cp->chunks = cp->balance == CP_ZIGZAG ? 2 : 1;
    cp->C = (size_t)config.C;
    cp->NH = (size_t)config.NH;
    require(cp->how != CP_ULYSSES || cp->balance == CP_CONTIGUOUS,
            "--cp ulysses has all tokens of a head on one rank, which"
            " leaves nothing to balance: leave out --cp-balance, or choose --cp allgather or ring");
    require(cp->how != CP_ULYSSES || config.NH % cp->c == 0,
            "--cp ulysses divides the heads among the ranks of --context-parallel,"
            " and %d does not divide %d; choose --heads %d, or --cp ring", cp->c, config.NH,
            (int)round_up((size_t)config.NH, (size_t)cp->c));
    int chunks = cp->c * cp->chunks, below = T / chunks * chunks;
    require(T % chunks == 0, "--seq-len %d does not divide into %d equal chunks for --context-parallel %d%s; choose"
            " %d%s%.0d", T, chunks,
            cp->c, cp->chunks == 2 ? " in zigzag" : "", below + chunks, below > 0 ? " or " : "", below);
}
// Returns the shapes that the layers see.
static inline LayerShapes context_shapes(const ContextParallel* cp, int B, int T, GPT2Config c) {
    LayerShapes s = layer_shapes(B, T, c.C, c.NH, c.Vp, 1);
    s.context = cp->c;
    s.chunk = cp->how == CP_ULYSSES ? 0 : T / (cp->c * cp->chunks);
    return s;
}
// Call at the beginning of a micro-batch of B sequences with T tokens each on this rank.
static inline void context_begin(ContextParallel* cp, int B, int T) {
    cp->B = B;
    cp->chunk_tokens = T / cp->chunks;
}
// Return the number of elements in this rank's rows of n elements: in those before its chunk i, and in all rows.
static inline size_t context_offset(const ContextParallel* cp, int i, int n) {
    return (size_t)i * (size_t)cp->B * (size_t)cp->chunk_tokens * (size_t)n;
}
static inline size_t context_elements(const ContextParallel* cp, int n) { return context_offset(cp, cp->chunks, n); }
// Returns the number of elements of wpe (max_T,C) before the positions of this rank's chunk i.
static inline size_t context_position(const ContextParallel* cp, int i, int C) {
    return (size_t)context_chunk(cp, cp->rank, i) * (size_t)cp->chunk_tokens * (size_t)C;
}

// Copies this rank's part of tokens (B,cT) from the host to out (chunks,B,n) on the device.
static inline void context_load(const ContextParallel* cp, int* out, const int* tokens) {
    size_t part = (size_t)cp->chunk_tokens * sizeof(int), sequence = part * (size_t)(cp->c * cp->chunks);
    for (int i = 0; i < cp->chunks; i++)
        device_copy_rows(out + context_offset(cp, i, 1), part, tokens + context_position(cp, i, 1), sequence, part,
                         (size_t)cp->B);
}
// Returns the rank that has token t of a sequence, and sets *row to its number among that rank's rows, for B = 1.
static inline int context_owner(const ContextParallel* cp, int t, int* row) {
    int chunk = t / cp->chunk_tokens, is_second = chunk >= cp->c;
    *row = is_second * cp->chunk_tokens + t % cp->chunk_tokens;
    return is_second ? 2*cp->c - 1 - chunk : chunk;
}

// ---- communicator and buffers ----
static inline bool context_neighbours(int a, int b, int N) { return (a + 1) % N == b || (b + 1) % N == a; }
// Collective.
static inline void context_split(ContextParallel* cp, Comm* world) {
    if (cp->c == 1) comm_alone(&cp->comm, world, "cp");
    else comm_split(&cp->comm, world, "cp", world->rank / cp->c);
    cp->comm.axis = AXIS_CP;
    if (cp->how == CP_RING && cp->c > 1) comm_connect(&cp->comm, context_neighbours);
}

// The elements of each buffer, for `rows` rows on this rank: two for Ulysses, K and V, their gradients, and the output.
typedef struct { size_t exchanged, all, ring, own, out; } ContextBuffers; // ring: of kv, dkv and dkv_received
static inline ContextBuffers context_buffers(const ContextParallel* cp, size_t rows) {
    size_t n = 2*cp->C * rows, all = (size_t)cp->c * n;
    ContextBuffers ulysses = { 3*cp->C * rows, 0, 0, 0, 0 };
    ContextBuffers gather = { 0, all, 0, n, cp->C * rows }, ring = { 0, 0, n, n, cp->C * rows };
    return cp->how == CP_ULYSSES ? ulysses : cp->how == CP_RING ? ring : gather;
}
static inline void* context_alloc(ContextParallel* cp, size_t bytes) {
    return bytes > 0 ? comm_alloc(&cp->comm, bytes, MEMORY_COMMUNICATION) : NULL;
}
static inline void context_init(ContextParallel* cp, size_t rows) {
    ContextBuffers n = context_buffers(cp, rows);
    cp->send = (floatX*)context_alloc(cp, n.exchanged * sizeof(floatX));
    cp->received = (floatX*)context_alloc(cp, n.exchanged * sizeof(floatX));
    cp->kv_all = (floatX*)context_alloc(cp, n.all * sizeof(floatX));
    cp->dkv_all = (float*)context_alloc(cp, n.all * sizeof(float));
    for (int i = 0; i < 2; i++) cp->kv[i] = (floatX*)context_alloc(cp, n.ring * sizeof(floatX));
    for (int i = 0; i < 2; i++) cp->dkv[i] = (float*)context_alloc(cp, n.ring * sizeof(float));
    cp->dkv_received = (float*)context_alloc(cp, n.ring * sizeof(float));
    cp->dkv_own = (float*)context_alloc(cp, n.own * sizeof(float));
    cp->out = cp->dq = (float*)context_alloc(cp, n.out * sizeof(float));
}
// Returns the bytes of MEMORY_COMMUNICATION.
static inline size_t context_bytes(const ContextParallel* cp, const Comm* world, size_t rows) {
    ContextBuffers n = context_buffers(cp, rows);
    size_t floats = n.all + 3*n.ring + n.own + n.out;
    return (2*n.exchanged + n.all + 2*n.ring) * sizeof(floatX) + floats * sizeof(float)
         + (cp->c > 1 ? comm_split_bytes(world, cp->c) : 0);
}
static inline void context_free(ContextParallel* cp) {
    device_free(cp->send); device_free(cp->received); device_free(cp->out);
    device_free(cp->kv_all); device_free(cp->dkv_all); device_free(cp->dkv_received); device_free(cp->dkv_own);
    for (int i = 0; i < 2; i++) { device_free(cp->kv[i]); device_free(cp->dkv[i]); }
    comm_free(&cp->comm);
}

// ---- copies ----
// For Ulysses. An all-to-all sends to each rank one of the parts (c,B,T,k,C/c) and receives one from it: some tokens'
// channels of some heads, in k = 1 or 3 tensors. Returns the elements of a part.
static inline size_t context_part(const ContextParallel* cp, size_t k) {
    return context_elements(cp, (int)(k * cp->C) / cp->c);
}
enum { PACK, UNPACK };
// Copies between x (B,T,k,C), whose rows have all heads of this rank's tokens, and parts, one for the heads of each
// rank.
static inline void context_copy_heads(const ContextParallel* cp, floatX* parts, floatX* x, size_t k, int way) {
    size_t R = context_elements(cp, 1), C = cp->C, D = C / (size_t)cp->c, X = sizeof(floatX);
    for (size_t q = 0; q < (size_t)cp->c; q++)
        for (size_t j = 0; j < k; j++) {
            floatX *row = x + j*C + q*D, *part = parts + (q*R*k + j)*D;
            if (way == PACK) device_copy_rows(part, k*D*X, row, k*C*X, D*X, R);
            else device_copy_rows(row, k*C*X, part, k*D*X, D*X, R);
        }
}
// Copies between x (B,cT,k,C/c), with all tokens of each sequence for this rank's heads, and parts, one for the tokens
// of each rank.
static inline void context_copy_tokens(const ContextParallel* cp, floatX* parts, floatX* x, size_t k, int way) {
    size_t c = (size_t)cp->c, B = (size_t)cp->B, bytes = (size_t)cp->chunk_tokens * k * cp->C / c * sizeof(floatX);
    for (size_t q = 0; q < c; q++) {
        char *sequences = (char*)x + q * bytes, *part = (char*)parts + q * B * bytes;
        if (way == PACK) device_copy_rows(part, bytes, sequences, c * bytes, bytes, B);
        else device_copy_rows(sequences, c * bytes, part, bytes, bytes, B);
    }
}
static inline void context_pack_heads(const ContextParallel* cp, floatX* parts, floatX* in, size_t k) {
    context_copy_heads(cp, parts, in, k, PACK);
}
static inline void context_pack_tokens(const ContextParallel* cp, floatX* parts, floatX* in, size_t k) {
    context_copy_tokens(cp, parts, in, k, PACK);
}
static inline void context_unpack_heads(const ContextParallel* cp, floatX* out, floatX* parts, size_t k) {
    context_copy_heads(cp, parts, out, k, UNPACK);
}
static inline void context_unpack_tokens(const ContextParallel* cp, floatX* out, floatX* parts, size_t k) {
    context_copy_tokens(cp, parts, out, k, UNPACK);
}

// For the others. kv (chunks,B,n,2C) = keys and values of qkv (chunks,B,n,3C)
static inline void context_take_kv(const ContextParallel* cp, floatX* kv, const floatX* qkv) {
    size_t row = cp->C * sizeof(floatX);
    device_copy_rows(kv, 2*row, qkv + cp->C, 3*row, 2*row, context_elements(cp, 1));
}
// dqkv (chunks,B,n,3C) = dq (chunks,B,n,C) and dkv_own (chunks,B,n,2C), rounded to floatX where keys and values were
static inline void context_put_gradients(const ContextParallel* cp, floatX* dqkv) {
    floatX* scratch = cp->how == CP_ALLGATHER ? cp->kv_all : cp->kv[0];
    size_t row = cp->C * sizeof(floatX), R = context_elements(cp, 1);
    from_fp32(scratch, cp->dq, R * cp->C);
    device_copy_rows(dqkv, 3*row, scratch, row, row, R);
    from_fp32(scratch, cp->dkv_own, R * 2*cp->C);
    device_copy_rows(dqkv + cp->C, 3*row, scratch, 2*row, 2*row, R);
}

// ---- formulas for traffic and work, for one block and a micro-batch with `rows` rows on this rank ----
// Returns how many chunks of the owner's keys and values are sent to rank r. They move down: from r + 1 to r, and from
// rank 0 to the last one. With zigzag, a rank below the owner needs both chunks, because its own late chunk comes after
// both; after rank 0 only the owner's early chunk is still needed.
static inline size_t context_chunks_sent(const ContextParallel* cp, int r, int owner) {
    return cp->chunks == 2 && owner < r ? 1 : (size_t)cp->chunks;
}

// Returns the bytes that this rank sends in the forward pass of attention.
static inline double context_sent_forward(const ContextParallel* cp, double rows) {
    double c = cp->c, kv = 2 * rows * (double)cp->C * sizeof(floatX), sent = 0;
    if (cp->how == CP_ULYSSES) return 2*kv * (c - 1) / c; // q, k, v, and the output
    if (cp->how == CP_ALLGATHER) return kv * (c - 1);
    for (int s = 0; s + 1 < cp->c; s++)
        sent += kv * (double)context_chunks_sent(cp, cp->below, (cp->rank + s) % cp->c) / cp->chunks;
    return sent;
}
// Returns the bytes that this rank sends in the backward pass: keys and values again, and their gradients in fp32.
static inline double context_sent_backward(const ContextParallel* cp, double rows) {
    double gradients = cp->how == CP_ULYSSES ? 0 : 2 * rows * (double)cp->C * sizeof(float) * (cp->c - 1);
    return context_sent_forward(cp, rows) + gradients;
}

// Returns the pairs of a query and a key that it sees, for two chunks in one head of one sequence.
static inline unsigned long long context_chunk_pairs(int chunk_tokens, bool causal) {
    unsigned long long n = (unsigned long long)chunk_tokens;
    return causal ? n * (n + 1) / 2 : n * n;
}
// Counts these pairs, for B sequences and all heads that this rank computes. Call in backward passes.
static inline void context_count_pairs(ContextParallel* cp, bool causal) {
    bool ulysses = cp->how == CP_ULYSSES;
    size_t heads = (size_t)cp->B * cp->NH / (ulysses ? (size_t)cp->c : 1);
    cp->pairs += heads * context_chunk_pairs(ulysses ? cp->chunk_tokens * cp->c : cp->chunk_tokens, causal);
}
// Returns the pairs of rank r by formula, for all its heads and B sequences of T tokens: its queries and the keys
// before them.
static inline unsigned long long context_pairs(const ContextParallel* cp, int r, int B, int T, int NH) {
    unsigned long long pairs = 0, heads = (unsigned long long)B * (unsigned long long)NH;
    if (cp->how == CP_ULYSSES) return heads / (unsigned long long)cp->c * context_chunk_pairs(T, true);
    int n = T / (cp->c * cp->chunks);
    for (int i = 0; i < cp->chunks; i++)
        pairs += (unsigned long long)context_chunk(cp, r, i) * context_chunk_pairs(n, false)
               + context_chunk_pairs(n, true);
    return heads * pairs;
}
#endif
