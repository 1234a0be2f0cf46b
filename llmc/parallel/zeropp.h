/*
zeropp.h - ZeRO++ (Wang et al., arXiv 2306.10209), as train_gpt2_zeropp.cu has it: nodes, what weights and gradients travel as, and
the tensors that do not travel.

Nodes     N ranks are K nodes of g neighbours each: rank a*g + b of the world is number b of node a. `node` is the communicator of the
          ranks with equal a, `across` that of those with equal b, which are on different nodes.
Rows      A group's whole memory is N shards, one behind the other, and this rank's is number b*K + a. So the K shards of the ranks
          with equal b are neighbours: what `across` gathers or adds up is one part of what `node` gathers or adds up, and nothing
          has to be moved between the two. (DeepSpeed numbers shards by rank, and moves pieces instead: its swizzle.)
Packed    Shards are a multiple of PACKED_ROW elements. These are whole blocks, so packed shards, one behind the other, are the packed
          whole; and each packed shard begins at a multiple of 16 bytes.
Secondary shard (hpZ): these K shards of every group's weights, as they travel. A node has all weights, a rank 1/g of them.
Vectors   1-D tensors are few, and are not rounded. Every rank has all their state, as in DDP. Their gradients are added up in
          fp32: over micro-batches, then once a step over the ranks of a node, and of that sum each rank a part over nodes.
*/
#ifndef LLMC_ZEROPP_H
#define LLMC_ZEROPP_H
#include "../device/compress.h"
#include "shard_state.h"

// The state of all 1-D tensors, unit by unit in the order of gpt2.h, and padding: (n).
typedef struct {
    Shards state;       // fp32 weights, gradients and moments
    floatX* params;     // what layers read; owned, or a view of the state's where that is the same
    floatX* grads;      // what the layers of a micro-batch leave, owned
} Vectors;

typedef struct {
    long long node_ranks;            // --node-ranks
    int weights, gradients;          // --quantise-weights, --quantise-gradients: which of their words
    int weight_bits, gradient_bits;  // of an element on its way; 0: it is not quantised
    int nodes, ranks;                // K, g; set by zeropp_check, as are the bits
    Comm node, across;
    char* secondary;                 // (K,shard) of every group, one behind the other, as they travel; owned
    Vectors vectors;
    float* sum;                      // scratch for sums of gradients: (K,shard) of the largest group, or the vectors'; owned
} ZeroPP;

// ---- options ----
static inline void options_zeropp(OptionTable* t, ZeroPP* z, Sharding* options) {
    options_groups(t, options);
    option_choice(t, "sharding", &options->sharding, "full|grad-op",
                  "full: free parameters after each use; grad-op: keep them from the forward to the backward pass");
    option_int(t, "node-ranks", &z->node_ranks, 0, 1 << 20,
               "neighbouring ranks that form a node; 0: all ranks on this machine, or with --predict all ranks");
    option_choice(t, "quantise-weights", &z->weights, "int8|none",
                  "format in which weights are sent; none: as the parameters");
    option_choice(t, "quantise-gradients", &z->gradients, "int4|int8|none",
                  "format in which gradients are sent; none: fp32");
}

// Returns the ranks of a machine. Dies unless they are neighbours, and as many on each machine. Collective.
static inline int zeropp_machine(Control* control) {
    RankInfo r = control->ranks;
    int g = r.local_size;
    control_share(control, &g, sizeof g);
    require(r.local_size == g && r.local_rank == r.rank % g, "--node-ranks: rank %d is number %d of %d on its machine, and rank 0's"
            " has %d: start equally many neighbouring ranks on each, or give --node-ranks", r.rank, r.local_rank, r.local_size, g);
    return g;
}

// Dies if options do not go together. Sets what follows from them.
static inline void zeropp_check(ZeroPP* z, Sharding* options, const Comm* world) {
    static const int gradient_bits[] = { 4, 8, 0 };
    Control* control = world->world->control; // NULL: --predict, which knows no machine
    int N = world->size;
    z->weight_bits = z->weights == 0 ? 8 : 0;
    z->gradient_bits = gradient_bits[z->gradients];
    z->ranks = z->node_ranks > 0 ? (int)z->node_ranks : control ? zeropp_machine(control) : N;
    require(N % z->ranks == 0, "--node-ranks must divide the number of ranks, and %d does not divide %d", z->ranks, N);
    z->nodes = N / z->ranks;
    options->alignment = PACKED_ROW;
    options->matrices_only = true;
    sharding_check(options, N);
}

// ---- n elements on their way, n a multiple of PACKED_ROW ----
static inline size_t weight_bytes(const ZeroPP* z, size_t n) {
    return z->weight_bits ? quantised_bytes(n, z->weight_bits) : n * sizeof(floatX);
}
static inline size_t gradient_bytes(const ZeroPP* z, size_t n) {
    return z->gradient_bits ? quantised_bytes(n, z->gradient_bits) : n * sizeof(float);
}
// x (n) of type t, fp32 or floatX
static inline void pack_gradients(const ZeroPP* z, void* packed, const void* x, DType t, size_t n) {
    if (z->gradient_bits) quantise(packed, NULL, x, t, NULL, n, z->gradient_bits);
    else if (t == DTYPE_F32) device_copy(packed, x, n * sizeof(float));
    else to_fp32((float*)packed, (const floatX*)x, n);
}
// out (n) = the sum of packed (rows,n), in their order
static inline void sum_gradients(const ZeroPP* z, float* out, const void* packed, int rows, size_t n) {
    if (z->gradient_bits) { dequantise_sum(out, DTYPE_F32, packed, rows, n, z->gradient_bits); return; }
    device_copy(out, packed, n * sizeof(float));
    for (int r = 1; r < rows; r++) add_in_place_fp32(out, (const float*)packed + (size_t)r * n, n);
}

// ---- the secondary shard ----
// Begins to renew this rank's K rows of a group: its own from s, where it has changed, and the others from the other nodes.
static inline CommOp secondary_refresh(ZeroPP* z, const Shards* s, Shard shard) {
    size_t row = weight_bytes(z, shard.n);
    char *rows = z->secondary + (size_t)z->nodes * weight_bytes(z, shard.at), *own = rows + (size_t)z->across.rank * row;
    if (z->weight_bits) quantise(own, NULL, s->params + shard.at, DTYPE_F32, NULL, shard.n, z->weight_bits);
    else from_fp32((floatX*)own, s->params + shard.at, shard.n);
    comm_trace_data(&z->across, s->params + shard.at, shard.n * sizeof(float));
    return (comm_all_gather)(&z->across, rows, own, row, COMM_BYTE);
}
// Begins to gather whole (N,n), as it travels, from the ranks of this node.
static inline CommOp secondary_gather(ZeroPP* z, const Shards* s, void* whole, Shard shard) {
    size_t K = (size_t)z->nodes;
    comm_trace_data(&z->node, s->params + shard.at, shard.n * sizeof(float));
    return (comm_all_gather)(&z->node, whole, z->secondary + K * weight_bytes(z, shard.at), K * weight_bytes(z, shard.n), COMM_BYTE);
}
#define secondary_refresh(z, ...) (comm_from(&(z)->across, __func__), secondary_refresh(z, __VA_ARGS__))
#define secondary_gather(z, ...) (comm_from(&(z)->node, __func__), secondary_gather(z, __VA_ARGS__))

// ---- 1-D tensors ----
// Returns where those of FSDP's unit u begin; behind the last unit, how many there are.
static inline size_t vectors_at(GPT2Config c, int u) {
    int l = (u - 1) / 2;
    return u == 0 ? 0 : (size_t)c.C * (size_t)(2 + 13*l + (u == mlp_unit(l) ? 6 : 0));
}
static inline size_t vectors_size(const ZeroPP* z, GPT2Config c) { // in g parts
    return (size_t)z->ranks * shard_of(vectors_at(c, attention_unit(c.L)), z->ranks);
}
// What every rank has of unit u of gpt2.h. It counts on rank 0.
static inline ParamRange vectors_range(const Vectors* v, GPT2Config c, int u, int rank) {
    ParamRange p = param_range(c, u, 0, unit_no_decay(c, u));
    size_t at = vectors_at(c, u == 0 ? 0 : attention_unit(u - 1));
    shards_place(&v->state, &p, at);
    p.params = v->params + at;
    p.is_replicated = rank > 0;
    return p;
}
// After a micro-batch: the gradients become what it has left, or it is added to them.
static inline void vectors_add(const ZeroPP* z, bool first) {
    const Vectors* v = &z->vectors;
    float* grads = (float*)v->state.grads;
    to_fp32(first ? grads : z->sum, v->grads, v->state.n);
    if (!first) add_in_place_fp32(grads, z->sum, v->state.n);
}
// The gradients become their sums over all ranks.
static inline void vectors_reduce(ZeroPP* z) {
    size_t n = z->vectors.state.n / (size_t)z->ranks;
    float *all = (float*)z->vectors.state.grads, *part = all + (size_t)z->node.rank * n;
    comm_wait(&z->node, (comm_reduce_scatter)(&z->node, part, all, n, COMM_F32));
    comm_wait(&z->across, (comm_all_reduce)(&z->across, part, n, COMM_F32));
    comm_wait(&z->node, (comm_all_gather)(&z->node, all, part, n, COMM_F32));
}
#define vectors_reduce(z) (comm_from(&(z)->node, __func__), vectors_reduce(z))
// After an update: layers read the new weights.
static inline void vectors_renew(const Vectors* v) {
    if (NEEDS_MASTER) from_fp32(v->params, v->state.params, v->state.n);
}

// ---- memory, and the ranks ----
static inline size_t zeropp_sum(const ZeroPP* z, GPT2Config c, ShardSizes own) { // elements
    return size_max((size_t)z->nodes * size_max(own.root, own.other), vectors_size(z, c));
}
// Collective.
static inline void zeropp_init(ZeroPP* z, Layout* y, GPT2Config c, Comm* world, ShardSizes own) {
    Vectors* v = &z->vectors;
    Sharding whole; // every rank has all, on the device, and gradients in fp32
    memset(&whole, 0, sizeof whole);
    shards_init(&v->state, &whole, world, vectors_size(z, c), false);
    v->params = NEEDS_MASTER ? (floatX*)device_alloc(v->state.n * sizeof(floatX), MEMORY_PARAMETERS) : (floatX*)v->state.params;
    v->grads = (floatX*)device_alloc(v->state.n * sizeof(floatX), MEMORY_GRADIENTS);
    z->secondary = (char*)device_alloc((size_t)z->nodes * weight_bytes(z, own.all), MEMORY_PARAMETERS);
    z->sum = (float*)device_alloc(zeropp_sum(z, c, own) * sizeof(float), MEMORY_COMMUNICATION);
    comm_split(&z->node, world, "node", world->rank / z->ranks);
    comm_split(&z->across, world, "across", world->rank % z->ranks);
    comm_register_on(&z->node);
    y->shard_ranks = world;
    y->shard_number = z->node.rank * z->nodes + z->across.rank;
}
static inline void zeropp_free(ZeroPP* z) {
    if (NEEDS_MASTER) device_free(z->vectors.params);
    device_free(z->vectors.grads); device_free(z->secondary); device_free(z->sum);
    shards_free(&z->vectors.state);
    comm_free(&z->across);
    comm_free(&z->node);
}
// Adds what zeropp_init will allocate, and the world, to bytes by kind.
static inline void zeropp_predict(const ZeroPP* z, GPT2Config c, const Comm* world, ShardSizes own, size_t bytes[MEMORY_KINDS]) {
    size_t V = vectors_size(z, c), X = sizeof(floatX), K = (size_t)z->nodes;
    bytes[MEMORY_PARAMETERS] += V * (4 + (NEEDS_MASTER ? X : 0)) + K * weight_bytes(z, own.all);
    bytes[MEMORY_GRADIENTS] += V * (4 + X);
    bytes[MEMORY_OPTIMIZER] += V * 8;
    bytes[MEMORY_COMMUNICATION] += zeropp_sum(z, c, own) * sizeof(float);
    bytes[MEMORY_COMMUNICATION] += comm_world_bytes(world) + comm_split_bytes(world, z->ranks) + comm_split_bytes(world, z->nodes);
}

// ---- what crosses between nodes, per rank and step: bytes of weights, of gradients, and of the gradients of 1-D tensors ----
typedef struct { double weights, gradients, vectors, all; } BetweenNodes;
static inline BetweenNodes between_nodes(const ZeroPP* z, GPT2Config c, const Sharding* options, int accumulation) {
    size_t n = shard_sizes(c, options).all;
    double others = z->nodes - 1, vectors = (double)(vectors_size(z, c) / (size_t)z->ranks * sizeof(float));
    BetweenNodes b = { others * (double)weight_bytes(z, n), others * accumulation * (double)gradient_bytes(z, n),
                       ring_bytes(vectors, z->nodes), 0 };
    b.all = b.weights + b.gradients + b.vectors;
    return b;
}
static inline void report_zeropp(const ZeroPP* z, BetweenNodes b) {
    char text[4][32];
    printf("nodes      %d of %d ranks; between them, per rank and step: weights %s in %s, gradients %s in %s, 1-D tensors' %s;"
           " of 1-D tensors each rank keeps all, %s\n",
           z->nodes, z->ranks, format_bytes(text[0], 32, b.weights), z->weight_bits ? "int8" : FLOATX_NAME,
           format_bytes(text[1], 32, b.gradients), z->gradient_bits == 4 ? "int4" : z->gradient_bits == 8 ? "int8" : "fp32",
           format_bytes(text[2], 32, b.vectors), format_bytes(text[3], 32, 20 * (double)z->vectors.state.n));
    fflush(stdout);
}
#endif
