/*
context.h - context parallelism: the tokens of a sequence that belong to each rank, the buffers through which ranks
exchange data for attention, and the number of bytes that they exchange.

A sequence of T tokens is cut into equal chunks. Rank r of the c ranks that share it has chunk r of c (contiguous), or
chunks r and 2c-1-r of 2c (zigzag): an early one, whose queries see few keys, and a late one, whose queries see many. A
rank's rows are (pieces,B,P): the P tokens of its first chunk in all B sequences, then those of its second chunk. All
code that depends on positions (inputs, targets, wpe, causal masks, samples) uses context_chunk.

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
    int c, rank, pieces;      // number of ranks; this rank's number; chunks per rank and sequence: 1 or 2
    int above, below;         // its neighbours in a ring: (rank + 1) mod c, (rank - 1) mod c
    size_t C, NH;             // channels; heads
    int B, P;                 // of the current micro-batch: sequences, and tokens per chunk
    floatX *send, *received;  // Ulysses: (B,T/c,3C) each, owned
    floatX *kv[2];            // ring: (pieces,B,P,2C) each; all-gather: kv[0] (c,pieces,B,P,2C); owned
    float *dkv[4];            // ring: (pieces,B,P,2C) each; all-gather: [0] (c,pieces,B,P,2C), [1] one rank's; owned
    float *sum;               // ring, all-gather: (pieces,B,P,C) output so far, or gradient of the queries; owned
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
// Returns the chunk of each sequence that is piece i of rank r.
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
    cp->pieces = cp->balance == CP_ZIGZAG ? 2 : 1;
    cp->C = (size_t)config.C;
    cp->NH = (size_t)config.NH;
    require(cp->how != CP_ULYSSES || cp->balance == CP_CONTIGUOUS,
            "--cp ulysses has all tokens of a head on one rank, which"
            " leaves nothing to balance: leave out --cp-balance, or choose --cp allgather or ring");
    require(cp->how != CP_ULYSSES || config.NH % cp->c == 0,
            "--cp ulysses divides the heads among the ranks of --context-parallel,"
            " and %d does not divide %d; choose --heads %d, or --cp ring", cp->c, config.NH,
            (int)round_up((size_t)config.NH, (size_t)cp->c));
    int chunks = cp->c * cp->pieces, below = T / chunks * chunks;
    require(T % chunks == 0, "--seq-len %d does not divide into %d equal chunks for --context-parallel %d%s; choose"
            " %d%s%.0d", T, chunks,
            cp->c, cp->pieces == 2 ? " in zigzag" : "", below + chunks, below > 0 ? " or " : "", below);
}
// Returns the shapes that the layers see.
static inline LayerShapes context_shapes(const ContextParallel* cp, int B, int T, GPT2Config c) {
    LayerShapes s = layer_shapes(B, T, c.C, c.NH, c.Vp, 1);
    s.context = cp->c;
    s.chunk = cp->how == CP_ULYSSES ? 0 : T / (cp->c * cp->pieces);
    return s;
}
// Call at the beginning of a micro-batch of B sequences with T tokens each on this rank.
static inline void context_begin(ContextParallel* cp, int B, int T) {
    cp->B = B;
    cp->P = T / cp->pieces;
}
// Return the number of elements in this rank's rows of n elements: in all rows, and in those before piece i.
static inline size_t context_piece(const ContextParallel* cp, int i, int n) {
    return (size_t)i * (size_t)cp->B * (size_t)cp->P * (size_t)n;
}
static inline size_t context_rows(const ContextParallel* cp, int n) { return context_piece(cp, cp->pieces, n); }
// Returns the number of elements of wpe (max_T,C) before the positions of piece i.
static inline size_t context_position(const ContextParallel* cp, int i, int C) {
    return (size_t)context_chunk(cp, cp->rank, i) * (size_t)cp->P * (size_t)C;
}

// Copies this rank's part of tokens (B,cT) from the host to out (pieces,B,P) on the device.
static inline void context_load(const ContextParallel* cp, int* out, const int* tokens) {
    size_t part = (size_t)cp->P * sizeof(int), sequence = part * (size_t)(cp->c * cp->pieces);
    for (int i = 0; i < cp->pieces; i++)
        device_copy_rows(out + context_piece(cp, i, 1), part, tokens + context_chunk(cp, cp->rank, i) * cp->P, sequence,
                         part, (size_t)cp->B);
}
// Returns the rank that has token t of a sequence, and sets *row to its number among that rank's rows, for B = 1.
static inline int context_owner(const ContextParallel* cp, int t, int* row) {
    int chunk = t / cp->P, piece = chunk >= cp->c;
    *row = piece * cp->P + t % cp->P;
    return piece ? 2*cp->c - 1 - chunk : chunk;
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

// The elements of each buffer, for `rows` rows on this rank: two for Ulysses, K and V, their gradients, and the sum.
typedef struct { size_t exchanged, kv[2], dkv[4], sum; } ContextBuffers;
static inline ContextBuffers context_buffers(const ContextParallel* cp, size_t rows) {
    size_t n = 2*cp->C * rows, all = (size_t)cp->c * n;
    ContextBuffers ulysses = { 3*cp->C * rows, { 0, 0 }, { 0, 0, 0, 0 }, 0 };
    ContextBuffers gather = { 0, { all, 0 }, { all, n, 0, 0 }, cp->C * rows },
                   ring = { 0, { n, n }, { n, n, n, n }, cp->C * rows };
    return cp->how == CP_ULYSSES ? ulysses : cp->how == CP_RING ? ring : gather;
}
static inline void* context_alloc(ContextParallel* cp, size_t bytes) {
    return bytes > 0 ? comm_alloc(&cp->comm, bytes, MEMORY_COMMUNICATION) : NULL;
}
static inline void context_init(ContextParallel* cp, size_t rows) {
    ContextBuffers n = context_buffers(cp, rows);
    cp->send = (floatX*)context_alloc(cp, n.exchanged * sizeof(floatX));
    cp->received = (floatX*)context_alloc(cp, n.exchanged * sizeof(floatX));
    for (int i = 0; i < 2; i++) cp->kv[i] = (floatX*)context_alloc(cp, n.kv[i] * sizeof(floatX));
    for (int i = 0; i < 4; i++) cp->dkv[i] = (float*)context_alloc(cp, n.dkv[i] * sizeof(float));
    cp->sum = (float*)context_alloc(cp, n.sum * sizeof(float));
}
// Returns the bytes of MEMORY_COMMUNICATION.
static inline size_t context_bytes(const ContextParallel* cp, const Comm* world, size_t rows) {
    ContextBuffers n = context_buffers(cp, rows);
    size_t floats = n.dkv[0] + n.dkv[1] + n.dkv[2] + n.dkv[3] + n.sum;
    return (2*n.exchanged + n.kv[0] + n.kv[1]) * sizeof(floatX) + floats * sizeof(float)
         + (cp->c > 1 ? comm_split_bytes(world, cp->c) : 0);
}
static inline void context_free(ContextParallel* cp) {
    device_free(cp->send); device_free(cp->received); device_free(cp->sum);
    for (int i = 0; i < 2; i++) device_free(cp->kv[i]);
    for (int i = 0; i < 4; i++) device_free(cp->dkv[i]);
    comm_free(&cp->comm);
}

// ---- copies ----
// For Ulysses: copies between x (B,T/c,k,C), whose rows have all channels of k = 1 or 3 tensors, and parts
// (c,B,T/c,k,C/c), which contain for each rank the channels of its heads.
static inline void context_heads(const ContextParallel* cp, floatX* x, floatX* parts, size_t k, bool to_parts) {
    size_t R = context_rows(cp, 1), C = cp->C, D = C / (size_t)cp->c, X = sizeof(floatX);
    for (size_t q = 0; q < (size_t)cp->c; q++)
        for (size_t j = 0; j < k; j++) {
            floatX *row = x + j*C + q*D, *part = parts + (q*R*k + j)*D;
            if (to_parts) device_copy_rows(part, k*D*X, row, k*C*X, D*X, R);
            else device_copy_rows(row, k*C*X, part, k*D*X, D*X, R);
        }
}
// The same between x (B,T,width), with all tokens of each sequence, and parts (c,B,T/c,width) with the tokens of each
// rank.
static inline void context_sequences(const ContextParallel* cp, floatX* x, floatX* parts, size_t width, bool to_parts) {
    size_t c = (size_t)cp->c, B = (size_t)cp->B, bytes = (size_t)cp->P * width * sizeof(floatX);
    for (size_t q = 0; q < c; q++) {
        char *sequences = (char*)x + q * bytes, *part = (char*)parts + q * B * bytes;
        if (to_parts) device_copy_rows(part, bytes, sequences, c * bytes, bytes, B);
        else device_copy_rows(sequences, c * bytes, part, bytes, bytes, B);
    }
}
// kv (pieces,B,P,2C) = keys and values of qkv (pieces,B,P,3C)
static inline void context_take_kv(const ContextParallel* cp, floatX* kv, const floatX* qkv) {
    size_t row = cp->C * sizeof(floatX);
    device_copy_rows(kv, 2*row, qkv + cp->C, 3*row, 2*row, context_rows(cp, 1));
}
// dqkv (pieces,B,P,3C) = dq (pieces,B,P,C) and dkv (pieces,B,P,2C), rounded to floatX in scratch (pieces,B,P,2C)
static inline void context_put_gradients(const ContextParallel* cp, floatX* dqkv, const float* dq, const float* dkv,
                                         floatX* scratch) {
    size_t row = cp->C * sizeof(floatX), R = context_rows(cp, 1);
    from_fp32(scratch, dq, R * cp->C);
    device_copy_rows(dqkv, 3*row, scratch, row, row, R);
    from_fp32(scratch, dkv, R * 2*cp->C);
    device_copy_rows(dqkv + cp->C, 3*row, scratch, 2*row, 2*row, R);
}

// ---- formulas for traffic and work, for one block and a micro-batch with `rows` rows on this rank ----
// Returns how many pieces of rank u's keys and values are sent to rank r. They move down: from r + 1 to r, and from
// rank 0 to the last one. With zigzag, a rank below u needs both pieces, because its own late chunk comes after both;
// after rank 0 only the early chunk of u is still needed.
static inline size_t context_pieces_sent(const ContextParallel* cp, int r, int u) {
    return cp->pieces == 2 && u < r ? 1 : (size_t)cp->pieces;
}

// Returns the bytes that this rank sends in the forward pass of attention.
static inline double context_sent_forward(const ContextParallel* cp, double rows) {
    double c = cp->c, kv = 2 * rows * (double)cp->C * sizeof(floatX), sent = 0;
    if (cp->how == CP_ULYSSES) return 2*kv * (c - 1) / c; // q, k, v, and the output
    if (cp->how == CP_ALLGATHER) return kv * (c - 1);
    for (int s = 0; s + 1 < cp->c; s++)
        sent += kv * (double)context_pieces_sent(cp, cp->below, (cp->rank + s) % cp->c) / cp->pieces;
    return sent;
}
// Returns the bytes that this rank sends in the backward pass: keys and values again, and their gradients in fp32.
static inline double context_sent_backward(const ContextParallel* cp, double rows) {
    double gradients = cp->how == CP_ULYSSES ? 0 : 2 * rows * (double)cp->C * sizeof(float) * (cp->c - 1);
    return context_sent_forward(cp, rows) + gradients;
}

// Returns the pairs of a query and a key that it sees, for P queries and P keys in one head of one sequence.
static inline unsigned long long context_chunk_pairs(int P, bool causal) {
    unsigned long long n = (unsigned long long)P;
    return causal ? n * (n + 1) / 2 : n * n;
}
// Counts these pairs in a backward pass, for B sequences and all heads that this rank computes.
static inline void context_count(ContextParallel* cp, bool backward, bool causal) {
    if (!backward) return;
    bool ulysses = cp->how == CP_ULYSSES;
    size_t heads = (size_t)cp->B * cp->NH / (ulysses ? (size_t)cp->c : 1);
    cp->pairs += heads * context_chunk_pairs(ulysses ? cp->P * cp->c : cp->P, causal);
}
// Returns the pairs of rank r by formula, for all its heads and B sequences of T tokens: its queries and the keys
// before them.
static inline unsigned long long context_pairs(const ContextParallel* cp, int r, int B, int T, int NH) {
    unsigned long long pairs = 0, heads = (unsigned long long)B * (unsigned long long)NH;
    if (cp->how == CP_ULYSSES) return heads / (unsigned long long)cp->c * context_chunk_pairs(T, true);
    int P = T / (cp->c * cp->pieces);
    for (int i = 0; i < cp->pieces; i++)
        pairs += (unsigned long long)context_chunk(cp, r, i) * context_chunk_pairs(P, false)
               + context_chunk_pairs(P, true);
    return heads * pairs;
}
#endif
