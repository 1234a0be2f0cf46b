/*
zeropp.h - ZeRO++ (Wang et al., arXiv 2306.10209) for train_gpt2_zeropp.cu: the nodes, the format of weights and
gradients in messages, and 1-D tensors, which every rank stores. The program itself issues all collectives.

Nodes     N ranks are K nodes of N/K neighbours each: rank a N/K + b of the world is number b of node a. `node` is the
          communicator of the ranks with equal a, `across` that of the ranks with equal b, which are on different nodes.
Rows      The memory of a whole group consists of N consecutive shards, and this rank owns number b*K + a. The K shards
          of the ranks with equal b are therefore neighbours: `across` gathers or sums one part of the data that `node`
          gathers or sums, and nothing has to be moved between the two. (DeepSpeed numbers shards by rank, and moves
          pieces: its swizzle.)
Messages  The size of a shard is a multiple of PACKED_ROW elements, which are whole blocks. Consecutive quantised shards
          are therefore the quantised whole, and each of them begins at a multiple of 16 bytes.
Secondary shard (hpZ): these K shards of every group's weights, as in messages. A node has all weights, a rank K/N.
Vectors   1-D tensors are small, and are not rounded. Every rank has all their state, as in DDP, and keeps it behind the
          shards. Their gradients are summed in fp32: over micro-batches, and once per step over ranks.
*/
#ifndef LLMC_ZEROPP_H
#define LLMC_ZEROPP_H
#include "../device/compress.h"
#include "shard_state.h"

// All 1-D tensors, unit by unit in the order of gpt2.h, and padding.
typedef struct {
    size_t at, n;           // elements [at, at+n) of the program's fp32 weights, gradients and moments
    float *weights, *sums;  // (n) views of these weights and gradients
    floatX* params;         // (n) weights in floatX for layers; owned, or a view of weights if that is the same
    floatX* grads;          // (n) gradients of one micro-batch, owned
} Vectors;

// The memory of a unit's parameters or gradients: its 1-D tensors, which every rank has, and its matrices.
typedef struct { floatX *vectors, *matrices; } UnitMemory;

typedef struct {
    long long node_ranks;            // --node-ranks
    int weights, gradients;          // --quantise-weights, --quantise-gradients: index of the word
    int weight_bits, gradient_bits;  // of an element in messages
    int nodes, node_size;            // K; ranks of a node, N/K; set by zeropp_check, as are the bits
    Comm node, across;
    char* secondary;                 // (K,shard) of every group, as in messages; allocated by the program, owned
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
    static const int gradient_bits[] = { 4, 8, 32 };
    Control* control = world->world->control; // NULL with --predict, which knows no machine
    int N = world->size;
    z->weight_bits = z->weights == 0 ? 8 : 8 * (int)sizeof(floatX);
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
static inline bool is_quantised(int bits) { return bits <= 8; }
static inline size_t message_bytes(size_t n, int bits) {
    return is_quantised(bits) ? quantised_bytes(n, bits) : n * (size_t)bits / 8;
}
static inline double element_bytes(int bits) { // of one element: 260/256 for int8, 132/256 for int4
    return (double)message_bytes(PACKED_ROW, bits) / PACKED_ROW;
}
// Returns the bytes in which n gathered weights arrive, if that is not their place: if they are quantised.
static inline size_t arrival_bytes(const ZeroPP* z, size_t n) {
    return is_quantised(z->weight_bits) ? message_bytes(n, z->weight_bits) : 0;
}
// out (n) = gathered weights. Does nothing if weights are sent as floatX, because they are then in place.
static inline void dequantise_weights(const ZeroPP* z, floatX* out, const void* message, size_t n) {
    if (is_quantised(z->weight_bits)) dequantise_sum(out, FLOATX_DTYPE, message, 1, n, z->weight_bits);
}
// message (rows,shard) = gradients x of type t, fp32 or floatX; --quantise-gradients none: in fp32.
// shard: this rank's of the group.
static inline void quantise_gradients(const ZeroPP* z, const Shards* s, void* message, const void* x, DType t,
                                      int rows, Shard shard) {
    size_t n = (size_t)rows * shard.n;
    comm_trace_data(s->world, s->params + shard.offset, shard.n * sizeof(float)); // the weights of these gradients
    if (is_quantised(z->gradient_bits)) quantise(message, NULL, x, t, NULL, n, z->gradient_bits);
    else if (t == DTYPE_F32) device_copy(message, x, n * sizeof(float));
    else to_fp32((float*)message, (const floatX*)x, n);
}
// out (n) = the sum of messages (rows,n), in their order
static inline void dequantise_sum_gradients(const ZeroPP* z, float* out, const void* messages, int rows, size_t n) {
    if (is_quantised(z->gradient_bits)) {
        dequantise_sum(out, DTYPE_F32, messages, rows, n, z->gradient_bits);
        return;
    }
    device_copy(out, messages, n * sizeof(float));
    for (int r = 1; r < rows; r++) add_in_place_fp32(out, (const float*)messages + (size_t)r * n, n);
}

// ---- the secondary shard ----
// Returns this rank's secondary shard (K,shard) of a group, to be sent or received.
static inline char* secondary_shard(const ZeroPP* z, const Shards* s, Shard shard) {
    comm_trace_data(s->world, s->params + shard.offset, shard.n * sizeof(float)); // whose weights they are
    return z->secondary + message_bytes((size_t)z->nodes * shard.offset, z->weight_bits);
}
// Quantises the new weights of this rank's own shard into its row, and returns that.
static inline char* quantise_own_weights(const ZeroPP* z, const Shards* s, Shard shard) {
    char* row = secondary_shard(z, s, shard) + (size_t)z->across.rank * message_bytes(shard.n, z->weight_bits);
    const float* weights = s->params + shard.offset;
    if (is_quantised(z->weight_bits)) quantise(row, NULL, weights, DTYPE_F32, NULL, shard.n, z->weight_bits);
    else from_fp32((floatX*)row, weights, shard.n);
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
// Lists the vectors of every unit, with their memory: m and v are the program's moments. They count on rank 0. Returns
// the number of ranges.
static inline int vectors_ranges(const ZeroPP* z, const Shards* s, GPT2Config c, float* m, float* v,
                                 ParamRange* ranges) {
    for (int u = 0; u < gpt2_num_units(c); u++) {
        ParamRange p = param_range(c, u, 0, unit_no_decay(c, u));
        size_t at = z->vectors.at + vectors_offset(c, u);
        shards_place_weights(s, &p, at);
        p.grads = (floatX*)(z->vectors.sums + vectors_offset(c, u)); // fp32
        p.m = m + at;
        p.v = v + at;
        p.is_replicated = z->node.rank > 0 || z->across.rank > 0;
        ranges[u] = p;
    }
    return gpt2_num_units(c);
}
// Call after a micro-batch: adds its gradients to the sum, or sets the sum to them.
static inline void vectors_add(const ZeroPP* z, bool first_micro) {
    const Vectors* v = &z->vectors;
    to_fp32(first_micro ? v->sums : z->scratch, v->grads, v->n);
    if (!first_micro) add_in_place_fp32(v->sums, z->scratch, v->n);
}
// Call after an update: gives the new weights to the layers.
static inline void vectors_renew(const Vectors* v) {
    if (NEEDS_MASTER) from_fp32(v->params, v->weights, v->n);
}

// ---- memory, and the ranks ----
static inline size_t scratch_elements(const ZeroPP* z, GPT2Config c, ShardSizes sizes) {
    return size_max((size_t)z->nodes * size_max(sizes.root, sizes.largest), vectors_size(z, c));
}
// params, grads: the program's fp32 state, in which 1-D tensors begin at element `at`, after the shards.
// Call after the program has made z->node and z->across.
static inline void zeropp_init(ZeroPP* z, const Sharding* options, GPT2Config c, float* params, float* grads,
                               size_t at) {
    Vectors* v = &z->vectors;
    v->at = at;
    v->n = vectors_size(z, c);
    v->weights = params + at;
    v->sums = grads + at;
    v->params = (floatX*)v->weights;
    if (NEEDS_MASTER) v->params = (floatX*)device_alloc(v->n * sizeof(floatX), MEMORY_PARAMETERS);
    v->grads = (floatX*)device_alloc(v->n * sizeof(floatX), MEMORY_GRADIENTS);
    size_t scratch = scratch_elements(z, c, shard_sizes(c, options));
    z->scratch = (float*)device_alloc(scratch * sizeof(float), MEMORY_COMMUNICATION);
    comm_register_on(&z->node);
}
static inline void zeropp_free(ZeroPP* z) {
    if (NEEDS_MASTER) device_free(z->vectors.params);
    device_free(z->vectors.grads); device_free(z->secondary); device_free(z->scratch);
    comm_free(&z->across);
    comm_free(&z->node);
}
// Returns the bytes that the world and its nodes' communicators take.
static inline size_t zeropp_comm_bytes(const ZeroPP* z, const Comm* world) {
    return comm_world_bytes(world) + comm_split_bytes(world, z->node_size) + comm_split_bytes(world, z->nodes);
}

// The bytes that a rank sends to other nodes per step: weights, gradients of matrices, gradients of 1-D tensors.
typedef struct { double weights, gradients, vectors; } BytesBetween;
static inline void report_zeropp(const ZeroPP* z, BytesBetween b) {
    char text[4][32];
    const char *weights = is_quantised(z->weight_bits) ? "int8" : FLOATX_NAME;
    const char *gradients = z->gradient_bits == 4 ? "int4" : z->gradient_bits == 8 ? "int8" : "fp32";
    printf("nodes      %d of %d ranks; between them, per rank and step: weights %s in %s, gradients %s in %s,"
           " 1-D tensors' %s; of 1-D tensors each rank keeps all, %s\n",
           z->nodes, z->node_size, format_bytes(text[0], 32, b.weights), weights,
           format_bytes(text[1], 32, b.gradients), gradients, format_bytes(text[2], 32, b.vectors),
           format_bytes(text[3], 32, 20 * (double)z->vectors.n));
    fflush(stdout);
}
#endif
