/*
zeropp.h - ZeRO++ (Wang et al., arXiv 2306.10209) for train_gpt2_zeropp.cu: the nodes, and the format of weights and
gradients in messages. The program itself issues all collectives.

Nodes     N ranks are M nodes of N/M neighbours each: rank a N/M + r of the world is number r of node a. `within` is the
          communicator of the ranks of a node, with equal a; `across` that of the ranks with equal r, one on each node.
Rows      A whole group is S = N consecutive shards, and this rank owns number r*M + a. The M shards of the ranks
          with equal r are therefore neighbours: `across` gathers or sums one part of what `within` gathers or sums, and
          nothing has to be moved between the two. (DeepSpeed numbers shards by rank, and moves pieces: its swizzle.)
Messages  The size of a shard is a multiple of PACKED_ROW elements, which are whole blocks. Consecutive quantised shards
          are therefore the quantised whole, and each of them begins at a multiple of 16 bytes.
Secondary shard (hpZ): these M shards of every group's weights, as in messages. A node has all weights, a rank M/N.
*/
#ifndef LLMC_ZEROPP_H
#define LLMC_ZEROPP_H
#include "../device/compress.h"
#include "shard_state.h"

typedef struct {
    long long node_ranks;            // --node-ranks
    int weights, gradients;          // --quantise-weights, --quantise-gradients: index of the word
    int weight_bits, gradient_bits;  // of an element in messages
    int nodes, node_size;            // M; ranks of a node, N/M; set by zeropp_check, as are the bits
    const Shards* state;             // a view
    Comm within, across;             // the ranks of this node; the ranks with this rank's number, one on each node
    char* secondary;                 // (M,shard) of every group, as in messages; owned
    float* scratch;                  // (M,shard) of the largest group, owned
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
static inline void zeropp_check(ZeroPP* z, Sharding* options, const Comm* world, int accumulation) {
    static const int gradient_bits[] = { 4, 8, 32 };
    Control* control = world->world->control; // NULL with --predict, which knows no machine
    int N = world->size;
    z->weight_bits = z->weights == 0 ? 8 : 8 * (int)sizeof(floatX);
    z->gradient_bits = gradient_bits[z->gradients];
    z->node_size = z->node_ranks > 0 ? (int)z->node_ranks : control ? zeropp_machine(control) : N;
    require(N % z->node_size == 0, "--node-ranks must divide the number of ranks, and %d does not divide %d",
            z->node_size, N);
    z->nodes = N / z->node_size;
    sharding_check(options, N, accumulation);
}

// Tells the trace whose weights or gradients the next operation sends.
static inline void trace_weights(const ZeroPP* z, Shard shard) {
    comm_trace_data(z->state->world, z->state->params + shard.offset, shard.n * sizeof(float));
}

// ---- weights and gradients in messages: n elements, a multiple of PACKED_ROW ----
static inline bool is_quantised(int bits) { return bits <= 8; }
static inline size_t message_bytes(size_t n, int bits) {
    return is_quantised(bits) ? quantised_bytes(n, bits) : n * (size_t)bits / 8;
}
static inline double element_bytes(int bits) { // of one element: 260/256 for int8, 132/256 for int4
    return (double)message_bytes(PACKED_ROW, bits) / PACKED_ROW;
}
// message (rows,shard) = gradients x (rows,shard) of type t, fp32 or floatX; --quantise-gradients none: in fp32
static inline void pack_grads(const ZeroPP* z, char* message, const void* x, DType t, int rows, Shard shard) {
    size_t n = (size_t)rows * shard.n;
    trace_weights(z, shard); // of these gradients
    if (is_quantised(z->gradient_bits)) quantise(message, NULL, x, t, NULL, n, z->gradient_bits);
    else if (t == DTYPE_F32) device_copy(message, x, n * sizeof(float));
    else to_fp32((float*)message, (const floatX*)x, n);
}
// out (n) = the sum of the rows of a message (rows,n), in their order
static inline void sum_grads(const ZeroPP* z, float* out, const char* message, int rows, size_t n) {
    if (is_quantised(z->gradient_bits)) {
        dequantise_sum(out, DTYPE_F32, message, rows, n, z->gradient_bits);
        return;
    }
    device_copy(out, message, n * sizeof(float));
    for (int r = 1; r < rows; r++) add_in_place_fp32(out, (const float*)message + (size_t)r * n, n);
}

// ---- the secondary shard ----
// Returns this rank's secondary shard (M,shard) of a group, to be sent or received.
static inline char* secondary_shard(const ZeroPP* z, Shard shard) {
    trace_weights(z, shard);
    return z->secondary + message_bytes((size_t)z->nodes * shard.offset, z->weight_bits);
}
// row (n) = weights (n)
static inline void pack_weights(const ZeroPP* z, char* row, const float* weights, size_t n) {
    if (is_quantised(z->weight_bits)) quantise(row, NULL, weights, DTYPE_F32, NULL, n, z->weight_bits);
    else from_fp32((floatX*)row, weights, n);
}

// params (rows,shard) = the weights in message (rows,shard)
static inline void unpack_weights(const ZeroPP* z, floatX* params, const char* message, int rows, Shard shard) {
    size_t n = (size_t)rows * shard.n;
    if (is_quantised(z->weight_bits)) dequantise_sum(params, FLOATX_DTYPE, message, 1, n, z->weight_bits);
    else device_copy(params, message, n * sizeof(floatX));
}

// ---- memory, and the ranks ----
static inline size_t scratch_elements(const ZeroPP* z, const Layout* y) {
    size_t largest = 0;
    for (int k = 0; k < y->num_groups; k++) largest = size_max(largest, y->groups[k].shard.n);
    return (size_t)z->nodes * largest;
}
// Call after the program has made z->within and z->across, the layout and the state.
static inline void zeropp_init(ZeroPP* z, const Shards* state) {
    z->state = state;
    z->secondary = (char*)device_alloc(message_bytes((size_t)z->nodes * state->n, z->weight_bits), MEMORY_PARAMETERS);
    size_t scratch = scratch_elements(z, state->layout) * sizeof(float);
    z->scratch = (float*)device_alloc(scratch, MEMORY_COMMUNICATION);
    comm_register_on(&z->within);
}
static inline void zeropp_free(ZeroPP* z) {
    device_free(z->secondary); device_free(z->scratch);
    comm_free(&z->across);
    comm_free(&z->within);
}
// Returns the bytes that the world and its nodes' communicators take.
static inline size_t zeropp_comm_bytes(const ZeroPP* z, const Comm* world) {
    return comm_world_bytes(world) + comm_split_bytes(world, z->node_size) + comm_split_bytes(world, z->nodes);
}

// The bytes that a rank sends to other nodes per step.
typedef struct { double weights, gradients; } BytesBetween;
static inline void report_zeropp(const ZeroPP* z, BytesBetween between) {
    char text[2][32];
    const char *weights = is_quantised(z->weight_bits) ? "int8" : FLOATX_NAME;
    const char *gradients = z->gradient_bits == 4 ? "int4" : z->gradient_bits == 8 ? "int8" : "fp32";
    printf("nodes      %d of %d ranks; between them, per rank and step: weights %s in %s, gradients %s in %s\n",
           z->nodes, z->node_size, format_bytes(text[0], 32, between.weights), weights,
           format_bytes(text[1], 32, between.gradients), gradients);
    fflush(stdout);
}
#endif
