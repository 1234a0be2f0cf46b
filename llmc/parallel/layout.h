/*
layout.h - fully sharded data parallelism: its options, and the layout of the model that follows from them.

Units (gpt2.h) that are gathered and freed together form a group: the root alone, then 1, 2 or 2k units, which are half
a block (--wrap-halves), a block, or --wrap-blocks k blocks; or all units of the model. The units of a group are
consecutive in its memory, which is cut into S equal shards, one per rank. A rank keeps its shards of all groups next to
each other, in sharded memory.

S ranks together hold one replica of the model: all ranks (full, grad-op), or --shard-group of them (hybrid). Ranks that
hold the same shard belong to different replicas of the model.

ZeRO++ (zeropp.h) uses the same groups, and numbers their shards in another order.
*/
#ifndef LLMC_LAYOUT_H
#define LLMC_LAYOUT_H
#include "../base/options.h"
#include "../base/precision.h"
#include "../comm/comm.h"
#include "../device/device.h"
#include "../model/param_range.h"
#include "shard.h"

// ---- options ----
enum { SHARD_FULL, SHARD_GRAD_OP, SHARD_HYBRID };
typedef enum { BACKWARD_PRE, BACKWARD_POST, PREFETCH_NONE, FORWARD_PRE } GatherMoment; // the last has its own option
enum { REDUCE_FP32, REDUCE_MODEL };
enum { OFFLOAD_NONE, OFFLOAD_OPTIMIZER, OFFLOAD_ALL };
enum { CHECKPOINT_FULL, CHECKPOINT_SHARDED };

typedef struct {
    long long wrap_blocks;          // blocks per group; 0: the whole model is one group
    int wrap_halves;                // --wrap-halves: 0 or 1
    int sharding;                   // SHARD_FULL, ...
    int prefetch, forward_prefetch; // BACKWARD_PRE, ...; 0 or 1
    int reduce_dtype;               // REDUCE_FP32, ...
    int offload, checkpoint;        // OFFLOAD_NONE, ...; CHECKPOINT_FULL, ...
    double host_link;               // --emulate-host-link, Gbit/s; 0: off
    long long shard_group;          // --shard-group
    long long limit_all_gathers;    // --limit-all-gathers
    int shards;                     // S, the number of shards of a group; set by sharding_check, as is the next
    bool accumulates;               // a step has several micro-batches
} Sharding;

// Options for groups: their size, when they are gathered, and how they are saved.
static inline void options_groups(OptionTable* t, Sharding* options) {
    memset(options, 0, sizeof *options);
    options->wrap_blocks = 1;
    options->limit_all_gathers = 2;
    options->forward_prefetch = 1;
    option_int(t, "wrap-blocks", &options->wrap_blocks, 0, MAX_BLOCKS,
               "consecutive blocks to gather at a time; 0: the whole model at once");
    option_flag(t, "wrap-halves", &options->wrap_halves,
                "gather the attention and the MLP of a block separately, each with its layernorm");
    option_choice(t, "prefetch", &options->prefetch, "backward-pre|backward-post|none",
                  "when the backward pass starts its next gather: before the gradients of this unit, after them, or"
                  " when needed");
    option_flag(t, "forward-prefetch", &options->forward_prefetch,
                "start the next gather of the forward pass before the layers of this unit");
    option_int(t, "limit-all-gathers", &options->limit_all_gathers, 1, MAX_UNITS,
               "groups that may be gathered at a time, in addition to the root");
    option_choice(t, "checkpoint", &options->checkpoint, "full|sharded",
                  "full: the ranks save the whole model into shared files; sharded: each rank saves its own files");
}
static inline void options_sharding(OptionTable* t, Sharding* options) {
    options_groups(t, options);
    option_choice(t, "sharding", &options->sharding, "full|grad-op|hybrid",
                  "full: free parameters after each use; grad-op: keep them from the forward to the backward pass;"
                  " hybrid: full within each replica of the model, which is --shard-group ranks");
    option_int(t, "shard-group", &options->shard_group, 0, 1 << 20,
               "ranks that together hold one replica of the model, with --sharding hybrid");
    option_choice(t, "reduce-dtype", &options->reduce_dtype, "fp32|model",
                  "precision in which gradients are sent and added; model: as the parameters");
    option_choice(t, "cpu-offload", &options->offload, "none|optimizer|all",
                  "what to keep on the host, where AdamW then runs; optimizer: gradients, moments and fp32 weights,"
                  " while the device keeps a copy of the weights in its own precision; all: every shard");
    option_float(t, "emulate-host-link", &options->host_link, 0, 1e6,
                 "Gbit/s, each way, of a link between device and host to emulate, with --cpu-offload on the CPU:"
                 " copies of shards take at least as long as on that link; 0: off");
}

// Returns true if groups other than the root's are freed after their forward pass, and gathered again for the backward
// pass. Otherwise they stay gathered until the update.
static inline bool reshards_after_forward(const Sharding* options) {
    return options->sharding == SHARD_FULL || options->sharding == SHARD_HYBRID;
}
// Returns true if the options name this moment for gathers ahead of use.
static inline bool gathers_at(const Sharding* options, GatherMoment moment) {
    return moment == FORWARD_PRE ? options->forward_prefetch : options->prefetch == (int)moment;
}

// Dies if options contradict each other. N ranks, `accumulation` micro-batches per step.
static inline void sharding_check(Sharding* options, int N, int accumulation) {
    bool is_hybrid = options->sharding == SHARD_HYBRID;
    require(is_hybrid == (options->shard_group > 0), "--shard-group and --sharding hybrid go together: give both or"
            " neither");
    options->accumulates = accumulation > 1;
    options->shards = is_hybrid ? (int)options->shard_group : N;
    require(N % options->shards == 0, "--shard-group must divide the number of ranks, and %d does not divide %d",
            options->shards, N);
    require(!is_hybrid || !options->offload, "--cpu-offload keeps shards on the host, where replicas cannot sum them:"
            " use --sharding full or grad-op with it");
    require(options->host_link == 0 || options->offload, "--emulate-host-link needs --cpu-offload optimizer or"
            " all");
    bool gathers_ahead = options->prefetch != PREFETCH_NONE || options->forward_prefetch;
    require(options->limit_all_gathers > 1 || !gathers_ahead || !reshards_after_forward(options),
            "--limit-all-gathers 1 leaves no buffer to gather ahead: allow 2, or --prefetch none and"
            " --no-forward-prefetch");
    require(!options->wrap_halves || options->wrap_blocks == 1,
            "--wrap-halves cuts each block: leave out --wrap-blocks %lld",
            options->wrap_blocks);
    require(!options->wrap_halves || options->limit_all_gathers > 1 || !reshards_after_forward(options),
            "--wrap-halves needs --limit-all-gathers 2, because a block that is computed again takes both halves at"
            " once");
}

static inline CommType reduce_type(const Sharding* options) {
    return options->reduce_dtype == REDUCE_FP32 ? COMM_F32 : COMM_FLOATX;
}
static inline size_t reduce_size(const Sharding* options) { return comm_type_size(reduce_type(options)); }
// Returns true if gradients are copied to a wider type for the reduction.
static inline bool reduces_wider(const Sharding* options) { return reduce_size(options) > sizeof(floatX); }
// Returns the bytes of a bucket per element: of gradients, and if the reduction is wider, of their copy.
static inline size_t bucket_element_bytes(const Sharding* options) {
    return sizeof(floatX) + (reduces_wider(options) ? reduce_size(options) : 0);
}

// ---- the layout ----
enum { NO_GROUP = -1, NO_BUFFER = -1 };

typedef struct {
    int first_unit, num_units;
    Shard shard;             // of the group: n, the size of each rank's shard, and its offset in this rank's shards
    size_t elements;         // of its units, without padding
    int tensors;             // of its units
    int buffer;              // set by the program: the gather buffer of its parameters, or NO_BUFFER
    int released;            // counted by the program: units that have been released since the group was gathered
} Group;

typedef struct {
    Comm *shard_ranks;       // the ranks that together hold one replica of the model; a view
    Comm *replicas;          // the ranks that hold the same shard; a view
    Comm split[2];           // memory for these two, unless they are the world
    int shard_number;        // of this rank's shards
    int num_units, num_groups;
    Unit units[MAX_UNITS];   // offset: in the memory of the whole group
    int group_of[MAX_UNITS]; // of each unit
    Group groups[MAX_UNITS]; // the root's comes first; the last may have fewer blocks
    size_t own_elements;     // elements of one shard of every group
} Layout;

// The ranks of one replica of the model are neighbours. Ranks with the same shard are S apart. Collective.
static inline void layout_split(Layout* y, const Sharding* options, Comm* world) {
    int S = options->shards;
    bool is_hybrid = options->sharding == SHARD_HYBRID;
    y->shard_ranks = is_hybrid ? &y->split[0] : world;
    y->replicas = &y->split[1];
    y->shard_number = world->rank % S;
    if (is_hybrid) {
        comm_split(y->shard_ranks, world, "shard", world->rank / S);
        comm_split(y->replicas, world, "replica", world->rank % S);
    } else comm_alone(y->replicas, world, "replica");
    comm_register_on(y->shard_ranks);
}

// Groups the units, and counts the elements of each group. The program then cuts the groups into shards.
static inline void layout_group(Layout* y, const Sharding* options, GPT2Config c) {
    y->num_units = gpt2_num_units(c);
    y->num_groups = 0;
    y->own_elements = 0;
    for (int u = 0; u < y->num_units; u++) {
        int size = options->wrap_halves ? 1 : 2 * (int)options->wrap_blocks; // units of a group; 0: all of them
        bool begins = u == 0 || (size > 0 && (u - 1) % size == 0);
        Group* k = &y->groups[begins ? y->num_groups++ : y->num_groups - 1];
        if (begins) {
            memset(k, 0, sizeof *k);
            k->first_unit = u;
            k->buffer = NO_BUFFER;
        }
        Unit* unit = &y->units[u];
        unit->offset = begins ? 0 : y->units[u - 1].offset + y->units[u - 1].size;
        unit->size = unit_elements(c, u);
        y->group_of[u] = y->num_groups - 1;
        k->num_units++;
        k->tensors += unit_tensors(u);
        k->elements = unit->offset + unit->size;
    }
}

// Returns the bytes of MEMORY_COMMUNICATION that the world and these communicators take.
static inline size_t layout_comm_bytes(const Sharding* options, const Comm* world) {
    size_t bytes = comm_world_bytes(world);
    if (options->sharding != SHARD_HYBRID) return bytes;
    return bytes + comm_split_bytes(world, options->shards) + comm_split_bytes(world, world->size / options->shards);
}

static inline void layout_free(Layout* y) {
    for (int k = 1; k >= 0; k--) if (y->split[k].world) comm_free(&y->split[k]);
}

// Returns the group that is used d groups after group k, or NO_GROUP. With groups 0 (the root) to 3, the order is
// 0 1 2 3 in a forward pass, and 0 3 2 1 in a backward pass, which begins with the head.
static inline int group_after(const Layout* y, GatherMoment moment, int k, int d) {
    int next = moment == FORWARD_PRE ? k + d : k == 0 ? y->num_groups - d : k - d;
    return next >= 1 && next < y->num_groups ? next : NO_GROUP;
}

// Sets the range of unit u in this rank's shard, and its place in sharded memory. Returns false if there is none.
static inline bool layout_range(const Layout* y, GPT2Config c, int u, ParamRange* p, size_t* at) {
    const Group* k = &y->groups[y->group_of[u]];
    Unit unit = y->units[u];
    size_t begin = (size_t)y->shard_number * k->shard.n, end = begin + k->shard.n; // in the whole group
    size_t low = size_max(begin, unit.offset), high = size_min(end, unit.offset + unit.size);
    if (low >= high) return false;
    *p = param_range(c, u, low - unit.offset, high - low);
    *at = k->shard.offset + (low - begin);
    return true;
}

// Zeroes those gradients of a whole group that no layer writes: the padding, and for the root the rows of wpe that lie
// behind the T positions in use. A reduction may leave numbers there.
static inline void layout_zero_unwritten(const Layout* y, GPT2Config c, int T, int k, floatX* grads) {
    const Group* group = &y->groups[k];
    Unit last = y->units[group->first_unit + group->num_units - 1];
    size_t padding = (size_t)y->shard_ranks->size * group->shard.n - group->elements, C = (size_t)c.C;
    size_t wpe = unit_tensor(c, 0, WPE).offset, behind = (size_t)(c.max_T - T) * C;
    if (padding > 0) device_zero(grads + last.offset + last.size, padding * sizeof(floatX));
    if (k == 0 && behind > 0) device_zero(grads + wpe + (size_t)T * C, behind * sizeof(floatX));
}

// ---- buffers ----
// Returns how many gather buffers there are: the root's, and one for each group that may be gathered at the same time.
static inline int layout_gather_buffers(const Layout* y, const Sharding* options) {
    int others = y->num_groups - 1;
    if (!reshards_after_forward(options)) return 1 + others;
    return 1 + (options->limit_all_gathers < others ? (int)options->limit_all_gathers : others);
}
// Returns the size of the largest shard that fits gather buffer r. A group that stays until the update has a buffer of
// its own; others take any, except the root's.
static inline size_t gather_buffer_shard(const Layout* y, const Sharding* options, int r) {
    size_t largest = 0;
    if (r == 0 || !reshards_after_forward(options)) return y->groups[r].shard.n;
    for (int k = 1; k < y->num_groups; k++) largest = size_max(largest, y->groups[k].shard.n);
    return largest;
}

// Prints the sharding and the gathers.
static inline void report_sharding(const Layout* y, const Sharding* options, int N) {
    static const char* const shardings[] = { "full", "grad-op", "hybrid" };
    static const char* const places[] = { "", ", all but parameters on the host", " on the host" };
    static const char* const prefetches[] = { "backward-pre", "backward-post", "none" };
    char group[32] = "model";
    if (options->wrap_blocks == 1) snprintf(group, sizeof group, options->wrap_halves ? "half a block" : "block");
    if (options->wrap_blocks > 1) snprintf(group, sizeof group, "%lld blocks", options->wrap_blocks);
    size_t P = 0, S = (size_t)options->shards;
    for (int k = 0; k < y->num_groups; k++) P += y->groups[k].elements;
    printf("fsdp       sharding %s by %s: each rank keeps 1/%zu of everything%s, %.2f %% of it padding;"
           " gradients reduced in %s\n", shardings[options->sharding], group, S, places[options->offload],
           100 * (1 - (double)P / (double)(S * y->own_elements)), comm_type_name(reduce_type(options)));
    if (S > 1)
        printf("gathers    prefetch %s%s; buffers: 1 for the root, %d for others\n", prefetches[options->prefetch],
               options->forward_prefetch ? ", and forward" : "", layout_gather_buffers(y, options) - 1);
    if (options->host_link > 0)
        printf("EMULATED LINK OF %g GBIT/S TO THE HOST (--emulate-host-link)\n", options->host_link);
    if (options->sharding == SHARD_HYBRID)
        printf("replicas   %d, of %zu rank%s each\n", N / (int)S, S, S == 1 ? "" : "s");
    fflush(stdout);
}
#endif
