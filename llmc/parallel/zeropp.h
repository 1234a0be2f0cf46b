/*
zeropp.h - ZeRO++ (Wang et al., arXiv 2306.10209) for train_gpt2_zeropp.cu: the nodes, the format of weights and
gradients in messages, and 1-D tensors, which every rank stores. The program itself issues all collectives.

Nodes     N ranks are M nodes of N/M neighbours each: rank a N/M + b of the world is number b of node a. `within` is the
          communicator of the ranks of a node, with equal a; `across` that of the ranks with equal b, one on each node.
Rows      The matrices of a whole group consist of N consecutive shards, and this rank owns number b*M + a. The M shards
          of the ranks with equal b are therefore neighbours: `across` gathers or sums one part of what `within` gathers
          or sums, and nothing has to be moved between the two. (DeepSpeed numbers shards by rank, and moves pieces: its
          swizzle.)
Messages  The size of a shard is a multiple of PACKED_ROW elements, which are whole blocks. Consecutive quantised shards
          are therefore the quantised whole, and each of them begins at a multiple of 16 bytes.
Secondary shard (hpZ): these M shards of every group's weights, as in messages. A node has all weights, a rank M/N.
Vectors   1-D tensors are small, and are not rounded. Every rank has all their state, as in DDP, behind its shards.
          Layers find them in front of their unit's matrices: vectors_copy copies weights there, and vectors_add adds
          gradients to their sum in fp32. Once per step they are summed over ranks.
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
    GPT2Config config;
    Comm within, across;             // the ranks of this node; the ranks with this rank's number, one on each node
    char* secondary;                 // (M,shard) of every group, as in messages; owned
    float* scratch;                  // (M,shard) of the largest group, or the vectors', owned
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
    options->alignment = PACKED_ROW;
    options->matrices_only = true;
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
// message (rows,shard) = gradients x of type t, fp32 or floatX; --quantise-gradients none: in fp32.
// shard: this rank's of the group.
static inline void pack_rows(const ZeroPP* z, void* message, const void* x, DType t, int rows, Shard shard) {
    size_t n = (size_t)rows * shard.n;
    trace_weights(z, shard); // of these gradients
    if (is_quantised(z->gradient_bits)) quantise(message, NULL, x, t, NULL, n, z->gradient_bits);
    else if (t == DTYPE_F32) device_copy(message, x, n * sizeof(float));
    else to_fp32((float*)message, (const floatX*)x, n);
}
// message (rows,shard) = sums (rows,shard)
static inline void pack_sums(const ZeroPP* z, void* message, const float* sums, int rows, Shard shard) {
    pack_rows(z, message, sums, DTYPE_F32, rows, shard);
}
// out (n) = the sum of messages (rows,n), in their order
static inline void unpack_sum(const ZeroPP* z, float* out, const void* messages, int rows, size_t n) {
    if (is_quantised(z->gradient_bits)) {
        dequantise_sum(out, DTYPE_F32, messages, rows, n, z->gradient_bits);
        return;
    }
    device_copy(out, messages, n * sizeof(float));
    for (int r = 1; r < rows; r++) add_in_place_fp32(out, (const float*)messages + (size_t)r * n, n);
}

// ---- the secondary shard ----
// Returns this rank's secondary shard (M,shard) of a group, to be sent or received.
static inline char* secondary_shard(const ZeroPP* z, Shard shard) {
    trace_weights(z, shard);
    return z->secondary + message_bytes((size_t)z->nodes * shard.offset, z->weight_bits);
}
// Quantises the new weights of this rank's own shard into its row of the secondary shard, and returns that.
static inline char* pack_weights(const ZeroPP* z, Shard shard) {
    char* row = secondary_shard(z, shard) + (size_t)z->across.rank * message_bytes(shard.n, z->weight_bits);
    const float* weights = z->state->params + shard.offset;
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
static inline size_t vectors_size(const ZeroPP* z, GPT2Config c) { // in N/M parts
    return (size_t)z->node_size * shard_of(vectors_offset(c, gpt2_num_units(c)), z->node_size);
}
// Lists the vectors of every unit, with their memory. They count on rank 0. Returns the number of ranges.
static inline int vectors_ranges(const ZeroPP* z, ParamRange* ranges) {
    for (int u = 0; u < gpt2_num_units(z->config); u++) {
        ranges[u] = param_range(z->config, u, 0, unit_no_decay(z->config, u));
        shards_place(z->state, &ranges[u], z->state->n + vectors_offset(z->config, u));
        ranges[u].is_replicated = z->state->world->rank > 0;
    }
    return gpt2_num_units(z->config);
}
// Returns the sums of the vectors' gradients.
static inline float* vectors_grads(const ZeroPP* z) { return (float*)z->state->grads + z->state->n; }

// ---- whole groups: units as layers use them, and as messages that contain only matrices ----
// Copies elements [begin, begin+n) of a group's matrices: from its units in `whole` to `piece` (n), or back. Padding
// belongs to the last unit.
static inline void copy_matrices(const ZeroPP* z, int k, floatX* whole, floatX* piece, size_t begin, size_t n,
                                 bool to_whole) {
    const Layout* y = z->state->layout;
    const Group* group = &y->groups[k];
    int end = group->first_unit + group->num_units;
    for (int u = group->first_unit; u < end; u++) {
        size_t first = y->parts[u].offset, behind = u + 1 < end ? y->parts[u + 1].offset : begin + n;
        size_t low = size_max(begin, first), high = size_min(begin + n, behind);
        if (low >= high) continue;
        floatX* in_whole = whole + y->units[u].offset + unit_no_decay(z->config, u) + (low - first);
        floatX* in_piece = piece + (low - begin);
        device_copy(to_whole ? in_whole : in_piece, to_whole ? in_piece : in_whole, (high - low) * sizeof(floatX));
    }
}

// Dequantises the matrices of a group that has been gathered, and moves them to their units in `whole`.
// message (N,shard): one part of M shards from each rank of the node.
static inline void unpack_weights(const ZeroPP* z, int k, floatX* whole, char* message) {
    const Group* group = &z->state->layout->groups[k];
    size_t n = (size_t)z->nodes * group->shard.n, bytes = message_bytes(n, z->weight_bits);
    for (int r = 0; r < z->node_size; r++) {
        floatX* piece = (floatX*)(message + (size_t)r * bytes);
        if (is_quantised(z->weight_bits)) {
            dequantise_sum(z->scratch, FLOATX_DTYPE, piece, 1, n, z->weight_bits);
            piece = (floatX*)z->scratch;
        }
        copy_matrices(z, k, whole, piece, (size_t)r * n, n, true);
    }
}
// Copies the vectors of a group's units to their places in `whole`, in front of the matrices.
static inline void vectors_copy(const ZeroPP* z, int k, floatX* whole) {
    const Shards* s = z->state;
    const Group* group = &s->layout->groups[k];
    for (int u = group->first_unit; u < group->first_unit + group->num_units; u++) {
        const float* vectors = s->params + s->n + vectors_offset(z->config, u);
        from_fp32(whole + s->layout->units[u].offset, vectors, unit_no_decay(z->config, u));
    }
}

// Quantises the gradients of a group's matrices, from their units in `whole`, into message (N,shard).
static inline void pack_grads(const ZeroPP* z, int k, char* message, floatX* whole) {
    const Group* group = &z->state->layout->groups[k];
    size_t n = (size_t)z->nodes * group->shard.n, bytes = message_bytes(n, z->gradient_bits);
    for (int r = 0; r < z->node_size; r++) {
        copy_matrices(z, k, whole, (floatX*)z->scratch, (size_t)r * n, n, false);
        pack_rows(z, message + (size_t)r * bytes, z->scratch, FLOATX_DTYPE, z->nodes, group->shard);
    }
}
// Adds the gradients of a group's vectors, from their units in `whole`, to their sum. is_first: sets the sum to them.
static inline void vectors_add(const ZeroPP* z, int k, const floatX* whole, bool is_first) {
    const Layout* y = z->state->layout;
    const Group* group = &y->groups[k];
    for (int u = group->first_unit; u < group->first_unit + group->num_units; u++) {
        float* sum = vectors_grads(z) + vectors_offset(z->config, u);
        size_t elements = unit_no_decay(z->config, u);
        to_fp32(is_first ? sum : z->scratch, whole + y->units[u].offset, elements);
        if (!is_first) add_in_place_fp32(sum, z->scratch, elements);
    }
}

// ---- memory, and the ranks ----
static inline size_t scratch_elements(const ZeroPP* z, const Layout* y) {
    size_t largest = 0;
    for (int k = 0; k < y->num_groups; k++) largest = size_max(largest, y->groups[k].shard.n);
    return size_max((size_t)z->nodes * largest, y->vectors);
}
// Call after the program has made z->within and z->across, the layout and the state.
static inline void zeropp_init(ZeroPP* z, const Shards* state, GPT2Config c) {
    z->state = state;
    z->config = c;
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

// The bytes that a rank sends to other nodes per step: weights, gradients of matrices, gradients of 1-D tensors.
typedef struct { double weights, gradients, vectors; } BytesBetween;
static inline void report_zeropp(const ZeroPP* z, size_t vectors, BytesBetween b) {
    char text[4][32];
    const char *weights = is_quantised(z->weight_bits) ? "int8" : FLOATX_NAME;
    const char *gradients = z->gradient_bits == 4 ? "int4" : z->gradient_bits == 8 ? "int8" : "fp32";
    printf("nodes      %d of %d ranks; between them, per rank and step: weights %s in %s, gradients %s in %s,"
           " 1-D tensors' %s; of 1-D tensors each rank keeps all, %s\n",
           z->nodes, z->node_size, format_bytes(text[0], 32, b.weights), weights,
           format_bytes(text[1], 32, b.gradients), gradients, format_bytes(text[2], 32, b.vectors),
           format_bytes(text[3], 32, 16 * (double)vectors));
    fflush(stdout);
}
#endif
