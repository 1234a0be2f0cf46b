/*
zeropp.h - ZeRO++ (Wang et al., arXiv 2306.10209) for train_gpt2_zeropp.cu: the nodes, the format of weights and
gradients in messages, and 1-D tensors, which every rank stores. The program itself issues all collectives.

Nodes     N ranks are K nodes of N/K neighbours each: rank a N/K + b of the world is number b of node a. `node` is the
          communicator of the ranks with equal a, `across` that of the ranks with equal b, which are on different nodes.
Rows      The memory of a whole group consists of N consecutive shards, and this rank owns number b*K + a. The K shards
          of the ranks with equal b are therefore neighbours: `across` gathers or sums one part of the data that `node`
          gathers or sums, and nothing has to be moved between the two. (DeepSpeed numbers shards by rank, and moves
          pieces: its swizzle.)
Packed    The size of a shard is a multiple of PACKED_ROW elements, which are whole blocks. Consecutive packed shards
          are therefore the packed whole, and each of them begins at a multiple of 16 bytes.
Secondary shard (hpZ): these K shards of every group's weights, as in messages. A node has all weights, a rank K/N.
Vectors   1-D tensors are small, and are not rounded. Every rank has all their state, as in DDP. Their gradients are
          summed in fp32: over micro-batches, and once per step over ranks.
*/
#ifndef LLMC_ZEROPP_H
#define LLMC_ZEROPP_H
#include "../device/compress.h"
#include "shard_state.h"

// The state of all 1-D tensors, unit by unit in the order of gpt2.h, and padding: (n).
typedef struct {
    Shards state;       // fp32 weights, gradients and moments
    floatX* params;     // in floatX for layers; owned, or a view of the state if that is the same
    floatX* grads;      // gradients of one micro-batch, owned
} Vectors;

// The memory of a unit's parameters or gradients: its 1-D tensors, which every rank has, and its matrices.
typedef struct { floatX *vectors, *matrices; } UnitMemory;

typedef struct {
    long long node_ranks;            // --node-ranks
    int weights, gradients;          // --quantise-weights, --quantise-gradients: index of the word
    int weight_bits, gradient_bits;  // of an element in messages; 0: not quantised
    int nodes, node_size;            // K; ranks of a node, N/K; set by zeropp_check, as are the bits
    Comm node, across;
    char* secondary;                 // (K,shard) of every group, one after another, as in messages; owned
    Vectors vectors;
    float* scratch;                  // for sums of gradients: (K,shard) of the largest group, or the vectors'; owned
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
    require(r.local_size == g && r.local_rank == r.rank % g, "--node-ranks: rank %d is number %d of %d on its machine,"
            " and rank 0's has %d: start equally many neighbouring ranks on each, or give --node-ranks",
            r.rank, r.local_rank, r.local_size, g);
    return g;
}

// Dies if options contradict each other. Sets the fields that follow from them.
static inline void zeropp_check(ZeroPP* z, Sharding* options, const Comm* world) {
    static const int gradient_bits[] = { 4, 8, 0 };
    Control* control = world->world->control; // NULL with --predict, which knows no machine
    int N = world->size;
    z->weight_bits = z->weights == 0 ? 8 : 0;
    z->gradient_bits = gradient_bits[z->gradients];
    z->node_size = z->node_ranks > 0 ? (int)z->node_ranks : control ? zeropp_machine(control) : N;
    require(N % z->node_size == 0, "--node-ranks must divide the number of ranks, and %d does not divide %d",
            z->node_size, N);
    z->nodes = N / z->node_size;
    options->alignment = PACKED_ROW;
    options->matrices_only = true;
    sharding_check(options, N);
}

// ---- weights and gradients in messages: n elements, a multiple of PACKED_ROW ----
static inline size_t weight_bytes(const ZeroPP* z, size_t n) {
    return z->weight_bits ? quantised_bytes(n, z->weight_bits) : n * sizeof(floatX);
}
static inline size_t gradient_bytes(const ZeroPP* z, size_t n) {
    return z->gradient_bits ? quantised_bytes(n, z->gradient_bits) : n * sizeof(float);
}
// out (n) = gathered weights. Does nothing if weights are sent as floatX, because they are then in place.
static inline void unpack_weights(const ZeroPP* z, floatX* out, const void* packed, size_t n) {
    if (z->weight_bits) dequantise_sum(out, FLOATX_DTYPE, packed, 1, n, z->weight_bits);
}
// packed (rows,shard) = gradients x of type t, fp32 or floatX. shard: this rank's of the group. Returns a row's bytes.
static inline size_t pack_gradients(const ZeroPP* z, const Shards* s, void* packed, const void* x, DType t, int rows,
                                    Shard shard) {
    size_t n = (size_t)rows * shard.n;
    comm_trace_data(s->world, s->params + shard.offset, shard.n * sizeof(float)); // the weights of these gradients
    if (z->gradient_bits) quantise(packed, NULL, x, t, NULL, n, z->gradient_bits);
    else if (t == DTYPE_F32) device_copy(packed, x, n * sizeof(float));
    else to_fp32((float*)packed, (const floatX*)x, n);
    return gradient_bytes(z, shard.n);
}
// out (n) = the sum of packed (rows,n), in their order
static inline void sum_gradients(const ZeroPP* z, float* out, const void* packed, int rows, size_t n) {
    if (z->gradient_bits) { dequantise_sum(out, DTYPE_F32, packed, rows, n, z->gradient_bits); return; }
    device_copy(out, packed, n * sizeof(float));
    for (int r = 1; r < rows; r++) add_in_place_fp32(out, (const float*)packed + (size_t)r * n, n);
}

// ---- the secondary shard ----
static inline size_t secondary_bytes(const ZeroPP* z, size_t n) { return (size_t)z->nodes * weight_bytes(z, n); }
// Returns this rank's secondary shard (K,shard) of a group, to be sent or received.
static inline char* secondary_shard(const ZeroPP* z, const Shards* s, Shard shard) {
    comm_trace_data(s->world, s->params + shard.offset, shard.n * sizeof(float)); // whose weights they are
    return z->secondary + secondary_bytes(z, shard.offset);
}
// Packs the new weights of this rank's own shard into its row, and returns that.
static inline char* pack_own_weights(const ZeroPP* z, const Shards* s, Shard shard) {
    char* row = secondary_shard(z, s, shard) + (size_t)z->across.rank * weight_bytes(z, shard.n);
    if (z->weight_bits) quantise(row, NULL, s->params + shard.offset, DTYPE_F32, NULL, shard.n, z->weight_bits);
    else from_fp32((floatX*)row, s->params + shard.offset, shard.n);
    return row;
}

// ---- 1-D tensors ----
// Returns the first element of unit u; after the last unit, the number of elements.
static inline size_t vectors_offset(GPT2Config c, int u) {
    size_t n = 0;
    for (int before = 0; before < u; before++) n += unit_no_decay(c, before);
    return n;
}
static inline size_t vectors_size(const ZeroPP* z, GPT2Config c) { // in N/K parts
    return (size_t)z->node_size * shard_of(vectors_offset(c, gpt2_num_units(c)), z->node_size);
}
// Returns the memory of unit u. vectors: the 1-D tensors of all units; matrices: those of this unit.
static inline UnitMemory unit_memory(GPT2Config c, int u, floatX* vectors, floatX* matrices) {
    UnitMemory unit = { vectors + vectors_offset(c, u), matrices };
    return unit;
}
// Returns the range of the 1-D tensors of unit u. They count on rank 0.
static inline ParamRange vectors_range(const ZeroPP* z, GPT2Config c, int u) {
    ParamRange p = param_range(c, u, 0, unit_no_decay(c, u));
    shards_place(&z->vectors.state, &p, vectors_offset(c, u));
    p.is_replicated = z->node.rank > 0 || z->across.rank > 0;
    return p;
}
// Call after a micro-batch: adds its gradients to the sum, or sets the sum to them.
static inline void vectors_add(const ZeroPP* z, bool first_micro) {
    const Vectors* v = &z->vectors;
    float* grads = (float*)v->state.grads;
    to_fp32(first_micro ? grads : z->scratch, v->grads, v->state.n);
    if (!first_micro) add_in_place_fp32(grads, z->scratch, v->state.n);
}
// Call after an update: gives the new weights to the layers.
static inline void vectors_renew(const Vectors* v) {
    if (NEEDS_MASTER) from_fp32(v->params, v->state.params, v->state.n);
}

// ---- memory, and the ranks ----
static inline size_t scratch_elements(const ZeroPP* z, GPT2Config c, ShardSizes sizes) {
    return size_max((size_t)z->nodes * size_max(sizes.root, sizes.largest), vectors_size(z, c));
}
// Returns the bytes of a bucket for n elements: gradients, and messages in both directions.
static inline size_t bucket_bytes(const ZeroPP* z, size_t n) { return n * sizeof(floatX) + 2 * gradient_bytes(z, n); }
// Returns the bytes of a gather buffer for n elements: parameters, and if they are quantised the arriving bytes.
static inline size_t gather_buffer_bytes(const ZeroPP* z, size_t n) {
    return n * sizeof(floatX) + (z->weight_bits ? weight_bytes(z, n) : 0);
}
// Call after the program has made z->node and z->across.
static inline void zeropp_init(ZeroPP* z, const Sharding* options, GPT2Config c, Comm* world) {
    Vectors* v = &z->vectors;
    ShardSizes sizes = shard_sizes(c, options);
    Sharding whole; // for 1-D tensors: all on every rank's device, gradients in fp32
    memset(&whole, 0, sizeof whole);
    shards_init(&v->state, &whole, world, vectors_size(z, c), false);
    v->params = (floatX*)v->state.params;
    if (NEEDS_MASTER) v->params = (floatX*)device_alloc(v->state.n * sizeof(floatX), MEMORY_PARAMETERS);
    v->grads = (floatX*)device_alloc(v->state.n * sizeof(floatX), MEMORY_GRADIENTS);
    z->secondary = (char*)device_alloc(secondary_bytes(z, sizes.all), MEMORY_PARAMETERS);
    z->scratch = (float*)device_alloc(scratch_elements(z, c, sizes) * sizeof(float), MEMORY_COMMUNICATION);
    comm_register_on(&z->node);
}
static inline void zeropp_free(ZeroPP* z) {
    if (NEEDS_MASTER) device_free(z->vectors.params);
    device_free(z->vectors.grads); device_free(z->secondary); device_free(z->scratch);
    shards_free(&z->vectors.state);
    comm_free(&z->across);
    comm_free(&z->node);
}
// Adds the bytes that zeropp_init and the world will allocate, by kind.
static inline void zeropp_predict(const ZeroPP* z, GPT2Config c, const Comm* world, ShardSizes sizes,
                                  size_t bytes[MEMORY_KINDS]) {
    size_t V = vectors_size(z, c), X = sizeof(floatX);
    bytes[MEMORY_PARAMETERS] += V * (4 + (NEEDS_MASTER ? X : 0)) + secondary_bytes(z, sizes.all);
    bytes[MEMORY_GRADIENTS] += V * (4 + X);
    bytes[MEMORY_OPTIMIZER] += V * 8;
    bytes[MEMORY_COMMUNICATION] += scratch_elements(z, c, sizes) * sizeof(float);
    bytes[MEMORY_COMMUNICATION] += comm_world_bytes(world);
    bytes[MEMORY_COMMUNICATION] += comm_split_bytes(world, z->node_size) + comm_split_bytes(world, z->nodes);
}

// ---- bytes that a rank sends per step ----
typedef struct {
    double weights, gradients, vectors; // between nodes: weights, gradients, and gradients of 1-D tensors
    double between, within;             // these together; within a node
} ZeroPPSent;
// Within its node a rank sends K rows of every group to each other rank: gradients in each micro-batch, weights once
// a step if they stay gathered after their forward pass, and the rest twice a micro-batch.
static inline ZeroPPSent zeropp_sent(const ZeroPP* z, GPT2Config c, const Sharding* options, int accumulation) {
    ShardSizes sizes = shard_sizes(c, options);
    size_t all = sizes.all, returns = reshards_after_forward(options) ? all - sizes.root : 0;
    double A = accumulation, K = z->nodes, vectors = (double)(vectors_size(z, c) * sizeof(float));
    double gathered = (double)weight_bytes(z, all - returns) + 2 * A * (double)weight_bytes(z, returns);
    double updated = (double)weight_bytes(z, all), reduced = A * (double)gradient_bytes(z, all);
    ZeroPPSent b = { (K - 1) * updated, (K - 1) * reduced, ring_bytes(vectors / z->node_size, z->nodes), 0, 0 };
    b.between = b.weights + b.gradients + b.vectors;
    b.within = (z->node_size - 1) * K * (gathered + reduced) + ring_bytes(vectors, z->node_size);
    return b;
}
static inline void report_zeropp(const ZeroPP* z, ZeroPPSent b) {
    char text[4][32];
    const char *weights = z->weight_bits ? "int8" : FLOATX_NAME;
    const char *gradients = z->gradient_bits == 4 ? "int4" : z->gradient_bits == 8 ? "int8" : "fp32";
    printf("nodes      %d of %d ranks; between them, per rank and step: weights %s in %s, gradients %s in %s,"
           " 1-D tensors' %s; of 1-D tensors each rank keeps all, %s\n",
           z->nodes, z->node_size, format_bytes(text[0], 32, b.weights), weights,
           format_bytes(text[1], 32, b.gradients), gradients, format_bytes(text[2], 32, b.vectors),
           format_bytes(text[3], 32, 20 * (double)z->vectors.state.n));
    fflush(stdout);
}
#endif
