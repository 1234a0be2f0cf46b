/*
sharding.h - fully sharded data parallelism: its options, and the layout that they give the model.

A group of units is gathered and freed together. Its whole memory holds its units one after another; it is cut into flat
parameters, and each of these into S equal shards, one per rank. A rank keeps its shards of all
flats side by side, in sharded memory.

    --wrap block   a group is a unit of gpt2.h, the root or a block, and is one flat
    --wrap layer   a group is such a unit, with a flat for each matrix and what stands before it
    --wrap model   one group and one flat of all units

There are as many shards as ranks that together hold one copy of the model: all (full, grad-op), --shard-group of them (hybrid),
or one (none).
*/
#ifndef LLMC_SHARDING_H
#define LLMC_SHARDING_H
#include "../comm/comm.h"
#include "../model/gpt2.h"
#include "../base/options.h"
#include "../base/precision.h"
#include "shard.h"

// ---- options ----
enum { WRAP_BLOCK, WRAP_LAYER, WRAP_MODEL };
enum { SHARD_FULL, SHARD_GRAD_OP, SHARD_HYBRID, SHARD_NONE };
enum { PREFETCH_PRE, PREFETCH_POST, PREFETCH_NONE };
enum { REDUCE_FP32, REDUCE_MODEL };
enum { CHECKPOINT_FULL, CHECKPOINT_SHARDED };

typedef struct {
    int wrap, sharding;             // WRAP_BLOCK, ..., SHARD_FULL, ...
    int prefetch, forward_prefetch; // PREFETCH_PRE, ...; 0 or 1
    int reduce_dtype;               // REDUCE_FP32, ...
    int offload, checkpoint;        // 0 or 1; CHECKPOINT_FULL, ...
    long long shard_group;          // --shard-group
    int shards;                     // S, into which a flat is cut; set by sharding_check
    long long rooms;                // --limit-all-gathers
    int accumulation;               // micro-batches per step; set by the stage
} Sharding;

static inline void options_sharding(OptionTable* t, Sharding* how) {
    memset(how, 0, sizeof *how);
    how->rooms = 2;
    how->forward_prefetch = 1;
    option_choice(t, "wrap", &how->wrap, "block|layer|model",
                  "what is gathered at a time; layer: a block, in one message for each of its matrices");
    option_choice(t, "sharding", &how->sharding, "full|grad-op|hybrid|none",
                  "full: parameters are freed after each use; grad-op: they stay from forward to backward;"
                  " hybrid: full within groups, replicated across them; none: every rank keeps everything");
    option_int(t, "shard-group", &how->shard_group, 0, 1 << 20,
               "number of ranks that together hold one copy of the model, with --sharding hybrid");
    option_choice(t, "prefetch", &how->prefetch, "backward-pre|backward-post|none",
                  "when the backward pass starts its next gather: before this unit's gradients, after them, or when needed");
    option_flag(t, "forward-prefetch", &how->forward_prefetch,
                "the forward pass starts its next gather before this unit's layers");
    option_int(t, "limit-all-gathers", &how->rooms, 1, MAX_UNITS, "how many units, besides the root, may be gathered at a time");
    option_choice(t, "reduce-dtype", &how->reduce_dtype, "fp32|model",
                  "the precision in which gradients are sent and added; model: that of the parameters");
    option_flag(t, "cpu-offload", &how->offload, "shards are kept on the host, and AdamW runs there");
    option_choice(t, "checkpoint", &how->checkpoint, "full|sharded",
                  "full: the ranks save the whole model into common files; sharded: each rank saves its own files");
}

static inline bool reshards_after_forward(const Sharding* how) {
    return how->sharding == SHARD_FULL || how->sharding == SHARD_HYBRID;
}

// Dies if options do not go together. Sets the number of shards.
static inline void sharding_check(Sharding* how, int N) {
    bool is_hybrid = how->sharding == SHARD_HYBRID;
    require(is_hybrid == (how->shard_group > 0), "--shard-group and --sharding hybrid go together: give both or neither");
    how->shards = is_hybrid ? (int)how->shard_group : how->sharding == SHARD_NONE ? 1 : N;
    require(N % how->shards == 0, "--shard-group must divide the number of ranks, and %d does not divide %d", how->shards, N);
    bool gathers_ahead = how->prefetch != PREFETCH_NONE || how->forward_prefetch;
    require(how->rooms > 1 || !gathers_ahead || !reshards_after_forward(how),
            "--limit-all-gathers 1 leaves no room to gather ahead: allow 2, or --prefetch none and --no-forward-prefetch");
}

static inline CommType reduce_type(const Sharding* how) { return how->reduce_dtype == REDUCE_FP32 ? COMM_F32 : COMM_FLOATX; }
static inline size_t reduce_size(const Sharding* how) { return comm_type_size(reduce_type(how)); }
// True if whole gradients are copied to a wider type for the reduction; true if shards of gradients are for AdamW.
static inline bool reduces_wider(const Sharding* how) { return reduce_size(how) > sizeof(floatX); }
static inline bool updates_wider(const Sharding* how) { return reduce_size(how) < sizeof(float); }
// True if a rank's shard is the whole, in the type that layers compute with, and on the device: then nothing has to be gathered.
static inline bool is_at_home(const Sharding* how) { return how->shards == 1 && !NEEDS_MASTER && !how->offload; }

// ---- the layout ----
enum { NO_OP = -1, NO_GROUP = -1, NO_ROOM = -1 };

// A flat parameter: neighbours in a group's memory that one collective gathers, and one reduces.
typedef struct {
    size_t begin;         // its first element, in its group's whole memory
    size_t shard, offset; // elements of each rank's shard; where this rank's begins in sharded memory
    int tensors;          // how many have a part of it
    // set by the stage during a step
    int missing;          // how many of their gradients are not final yet
    CommOp gathered, reduced, replicated; // under way, or NO_OP
    char* sum;            // where the reduction puts this rank's shard, a view
    bool is_final;        // the reduction is the step's last
} Flat;
#define MAX_FLATS (4 * MAX_UNITS) // a block has four matrices

// Units that are gathered and freed together.
typedef struct {
    int first_unit, num_units, first_flat, num_flats;
    size_t whole;         // elements of its whole memory: of all shards of its flats
    int missing;          // set by the stage: tensors whose gradients are not final yet
    int room;             // set by the stage: where its parameters are gathered or soon will be, or NO_ROOM
} Group;

// The elements that a unit and this rank's shard of a flat share: [begin, begin+n) of the unit, from `at` in sharded memory.
typedef struct { int flat, unit; size_t begin, n, at; } Piece;

typedef struct {
    int S, rank;            // how many shards there are, and which is this rank's
    int num_groups, num_flats, num_pieces;
    Unit units[MAX_UNITS];  // offset: in its group's whole memory
    int group_of[MAX_UNITS];
    Group groups[MAX_UNITS]; // the root's first; all others are alike
    Flat flats[MAX_FLATS];
    Piece* pieces;          // (num_pieces) all that is in this rank's shards except padding, owned
    size_t num_sharded;     // elements of a rank's shards
} Layout;

// Makes a flat of the elements of group k up to `end` that are in no flat yet, if there are any.
static inline void layout_add_flat(Layout* y, Group* k, size_t end, size_t shard) {
    if (end <= k->whole) return;
    Flat* f = &y->flats[y->num_flats++];
    f->begin = k->whole;
    f->shard = shard;
    f->offset = y->num_sharded;
    f->gathered = f->reduced = f->replicated = NO_OP;
    y->num_sharded += shard;
    k->whole += (size_t)y->S * shard;
    k->num_flats++;
}

// Cuts a group into flats: --wrap layer cuts before each matrix except the first, or a little earlier, where the part before the
// cut divides. So only the last flat has padding, and tensors lie in whole memory as they do everywhere.
static inline void layout_cut(Layout* y, Group* k, GPT2Config c, int wrap) {
    size_t S = (size_t)y->S, step = S * SHARD_ALIGNMENT, end = 0;
    k->first_flat = y->num_flats;
    k->room = NO_ROOM;
    for (int u = k->first_unit; u < k->first_unit + k->num_units; u++) {
        int matrices = 0;
        for (int i = 0; i < unit_tensors(u); i++) {
            TensorInfo t = unit_tensor(c, u, i);
            size_t before = (end + t.offset) / step * step;
            if (wrap == WRAP_LAYER && t.cols && matrices++ > 0) layout_add_flat(y, k, before, (before - k->whole) / S);
        }
        y->units[u].offset = end;
        end += y->units[u].size;
    }
    layout_add_flat(y, k, end, round_up(ceil_div(end - k->whole, S), SHARD_ALIGNMENT));
}

// Returns true if flat f has any of the elements [begin, begin+n) of its group's whole memory.
static inline bool flat_meets(const Layout* y, const Flat* f, size_t begin, size_t n) {
    return begin < f->begin + (size_t)y->S * f->shard && f->begin < begin + n;
}

static inline void layout_count_tensors(Layout* y, GPT2Config c, int u) {
    const Group* k = &y->groups[y->group_of[u]];
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        for (Flat* f = y->flats + k->first_flat; f < y->flats + k->first_flat + k->num_flats; f++)
            f->tensors += flat_meets(y, f, y->units[u].offset + t.offset, tensor_elements(t));
    }
}

// Adds the pieces of flat number i of group k that this rank has.
static inline void layout_add_pieces(Layout* y, const Group* k, int i) {
    const Flat* f = &y->flats[i];
    size_t begin = f->begin + (size_t)y->rank * f->shard, end = begin + f->shard;
    for (int u = k->first_unit; u < k->first_unit + k->num_units; u++) {
        size_t low = size_max(begin, y->units[u].offset), high = size_min(end, y->units[u].offset + y->units[u].size);
        Piece piece = { i, u, low - y->units[u].offset, high - low, f->offset + (low - begin) };
        if (low < high) y->pieces[y->num_pieces++] = piece;
    }
}

static inline void layout_init(Layout* y, GPT2Config c, int wrap, int S, int rank) {
    memset(y, 0, sizeof *y);
    y->S = S;
    y->rank = rank;
    for (int u = 0; u <= c.L; u++) {
        y->units[u].size = unit_elements(c, u);
        y->units[u].no_decay = unit_no_decay(c, u);
        if (u == 0 || wrap != WRAP_MODEL) y->groups[y->num_groups++].first_unit = u;
        y->group_of[u] = y->num_groups - 1;
        y->groups[y->num_groups - 1].num_units++;
    }
    for (int k = 0; k < y->num_groups; k++) layout_cut(y, &y->groups[k], c, wrap);
    for (int u = 0; u <= c.L; u++) layout_count_tensors(y, c, u);
    y->pieces = (Piece*)xcalloc((size_t)(y->num_flats + c.L + 1), sizeof(Piece)); // a unit's end makes one more at most
    for (int k = 0; k < y->num_groups; k++)
        for (int i = 0; i < y->groups[k].num_flats; i++) layout_add_pieces(y, &y->groups[k], y->groups[k].first_flat + i);
}
static inline void layout_free(Layout* y) { free(y->pieces); }

// The same by formula: elements of a rank's shards of the root's group, of each other group, and of all groups.
typedef struct { size_t root, other, others, all; } ShardSizes; // others: how many other groups there are
static inline ShardSizes shard_sizes(GPT2Config c, const Sharding* how) {
    int S = how->shards;
    size_t P = gpt2_num_parameters(c) + (size_t)(c.Vp - c.V) * (size_t)c.C;
    ShardSizes s = { shard_elements(c, 0, S), shard_elements(c, 1, S), (size_t)c.L, 0 };
    if (how->wrap == WRAP_MODEL) { s.root = round_up(ceil_div(P, (size_t)S), SHARD_ALIGNMENT); s.other = s.others = 0; }
    s.all = s.root + s.others * s.other;
    return s;
}
// Number of rooms for groups other than the root's.
static inline size_t sharding_rooms(const Sharding* how, ShardSizes s) {
    return reshards_after_forward(how) ? size_min((size_t)how->rooms, s.others) : s.others;
}

// Prints what is sharded, and how it is gathered.
static inline void report_sharding(GPT2Config c, const Sharding* how, int N) {
    static const char* const wraps[] = { "block", "block with a flat parameter a layer", "model" };
    static const char* const shardings[] = { "full", "grad-op", "hybrid", "none" };
    static const char* const prefetches[] = { "backward-pre", "backward-post", "none" };
    ShardSizes s = shard_sizes(c, how);
    size_t P = gpt2_num_parameters(c) + (size_t)(c.Vp - c.V) * (size_t)c.C, S = (size_t)how->shards;
    printf("fsdp       sharding %s by %s: each rank keeps 1/%zu of everything%s, %.2f %% of it padding; gradients reduced in %s\n",
           shardings[how->sharding], wraps[how->wrap], S, how->offload ? " on the host" : "",
           100 * (1 - (double)P / (double)(S * s.all)), comm_type_name(reduce_type(how)));
    if (S > 1) printf("gathers    prefetch %s%s; room for the root and %zu more\n", prefetches[how->prefetch],
                      how->forward_prefetch ? ", and forward" : "", sharding_rooms(how, s));
    if (how->sharding == SHARD_HYBRID) printf("replicas   %d, of %zu ranks each\n", N / (int)S, S);
    fflush(stdout);
}
#endif
