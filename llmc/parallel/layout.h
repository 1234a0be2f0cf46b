/*
layout.h - fully sharded data parallelism: its options, and the layout that they give the model.

FSDP's units are finer than those of gpt2.h: the root, and of each block its attention and its MLP, each with the layernorm before
it. Units that are gathered and freed together are a group: the root, and --wrap-blocks consecutive blocks, or halves of a block
(--wrap-halves); or all of them. In whole memory a group's units lie one after another. This memory is cut into S equal shards,
one per rank. A rank keeps its shards of all groups side by side, in sharded memory.

There are as many shards as ranks that together hold one replica of the model: all (full, grad-op), --shard-group of them
(hybrid), or one (none). Ranks that hold the same shard belong to different replicas of the model.

ZeRO++ (zeropp.h) has the same groups, of matrices alone, and numbers the shards in another order.
*/
#ifndef LLMC_LAYOUT_H
#define LLMC_LAYOUT_H
#include "../base/options.h"
#include "../base/precision.h"
#include "../comm/comm.h"
#include "../model/param_range.h"
#include "shard.h"

// ---- options ----
enum { SHARD_FULL, SHARD_GRAD_OP, SHARD_HYBRID, SHARD_NONE };
enum { PREFETCH_PRE, PREFETCH_POST, PREFETCH_NONE };
enum { REDUCE_FP32, REDUCE_MODEL };
enum { OFFLOAD_NONE, OFFLOAD_OPTIMIZER, OFFLOAD_ALL };
enum { CHECKPOINT_FULL, CHECKPOINT_SHARDED };

typedef struct {
    long long wrap_blocks;          // blocks of a group; 0: the whole model is one
    int wrap_halves;                // --wrap-halves: 0 or 1
    int sharding;                   // SHARD_FULL, ...
    int prefetch, forward_prefetch; // PREFETCH_PRE, ...; 0 or 1
    int reduce_dtype;               // REDUCE_FP32, ...
    int offload, checkpoint;        // OFFLOAD_NONE, ...; CHECKPOINT_FULL, ...
    double host_link;               // --emulate-host-link, Gbit/s; 0: it is as fast as it is
    long long shard_group;          // --shard-group
    long long limit_all_gathers;    // --limit-all-gathers
    int shards;                     // S, into which a group is cut; set by sharding_check
    size_t alignment;               // elements that every shard is a multiple of
    bool matrices_only;             // 1-D tensors are in no shard: the stage keeps them elsewhere
} Sharding;

// What groups are, when they are gathered, and how they are saved.
static inline void options_groups(OptionTable* t, Sharding* options) {
    memset(options, 0, sizeof *options);
    options->alignment = SHARD_ALIGNMENT;
    options->wrap_blocks = 1;
    options->limit_all_gathers = 2;
    options->forward_prefetch = 1;
    option_int(t, "wrap-blocks", &options->wrap_blocks, 0, MAX_UNITS - 1,
               "consecutive blocks to gather at a time; 0: the whole model at once");
    option_flag(t, "wrap-halves", &options->wrap_halves,
                "gather the attention and the MLP of a block separately, each with its layernorm");
    option_choice(t, "prefetch", &options->prefetch, "backward-pre|backward-post|none",
                  "when the backward pass starts its next gather: before the gradients of this unit, after them, or when needed");
    option_flag(t, "forward-prefetch", &options->forward_prefetch,
                "start the next gather of the forward pass before the layers of this unit");
    option_int(t, "limit-all-gathers", &options->limit_all_gathers, 1, MAX_UNITS,
               "groups that may be gathered at a time, in addition to the root");
    option_choice(t, "checkpoint", &options->checkpoint, "full|sharded",
                  "full: the ranks save the whole model into shared files; sharded: each rank saves its own files");
}
static inline void options_sharding(OptionTable* t, Sharding* options) {
    options_groups(t, options);
    option_choice(t, "sharding", &options->sharding, "full|grad-op|hybrid|none",
                  "full: free parameters after each use; grad-op: keep them from the forward to the backward pass;"
                  " hybrid: full within groups, replicated across groups; none: every rank keeps everything");
    option_int(t, "shard-group", &options->shard_group, 0, 1 << 20,
               "ranks that together hold one replica of the model, with --sharding hybrid");
    option_choice(t, "reduce-dtype", &options->reduce_dtype, "fp32|model",
                  "precision in which gradients are sent and added; model: as the parameters");
    option_choice(t, "cpu-offload", &options->offload, "none|optimizer|all",
                  "what to keep on the host, where AdamW then runs; optimizer: gradients, moments and fp32 weights, while the"
                  " device has a copy of the weights in its own precision; all: every shard");
    option_float(t, "emulate-host-link", &options->host_link, 0, 1e6,
                 "Gbit/s, each way, of a link between device and host to emulate, with --cpu-offload on the CPU: copies of"
                 " shards take at least as long as on that link; 0: off");
}

static inline bool reshards_after_forward(const Sharding* options) {
    return options->sharding == SHARD_FULL || options->sharding == SHARD_HYBRID;
}

// Dies if options do not go together. Sets the number of shards.
static inline void sharding_check(Sharding* options, int N) {
    bool is_hybrid = options->sharding == SHARD_HYBRID;
    require(is_hybrid == (options->shard_group > 0), "--shard-group and --sharding hybrid go together: give both or neither");
    options->shards = is_hybrid ? (int)options->shard_group : options->sharding == SHARD_NONE ? 1 : N;
    require(N % options->shards == 0, "--shard-group must divide the number of ranks, and %d does not divide %d",
            options->shards, N);
    require(options->host_link == 0 || options->offload, "--emulate-host-link is about --cpu-offload: give that as well");
    bool gathers_ahead = options->prefetch != PREFETCH_NONE || options->forward_prefetch;
    require(options->limit_all_gathers > 1 || !gathers_ahead || !reshards_after_forward(options),
            "--limit-all-gathers 1 leaves no room to gather ahead: allow 2, or --prefetch none and --no-forward-prefetch");
    require(!options->wrap_halves || options->wrap_blocks == 1, "--wrap-halves cuts each block: leave out --wrap-blocks %lld",
            options->wrap_blocks);
    require(!options->wrap_halves || options->limit_all_gathers > 1 || !reshards_after_forward(options),
            "--wrap-halves needs --limit-all-gathers 2, because a block that is computed again takes both halves at once");
}

static inline CommType reduce_type(const Sharding* options) { return options->reduce_dtype == REDUCE_FP32 ? COMM_F32 : COMM_FLOATX; }
static inline size_t reduce_size(const Sharding* options) { return comm_type_size(reduce_type(options)); }
// True if whole gradients are copied to a wider type for the reduction.
static inline bool reduces_wider(const Sharding* options) { return reduce_size(options) > sizeof(floatX); }
// True if a rank's shard is the whole, in the layers' type and on the device: then nothing has to be gathered.
static inline bool is_unsharded(const Sharding* options) { return options->shards == 1 && !NEEDS_MASTER && !options->offload; }

// ---- the layout ----
enum { NO_GROUP = -1, NO_BUFFER = -1, MAX_FSDP_UNITS = 2*MAX_UNITS - 1 };

typedef struct {
    int unit, tensors;       // of gpt2.h's unit (the root, or a block) so many tensors, which are
    size_t begin[2], n[2];   // elements [begin, begin+n) of it: its 1-D tensors and its 2-D ones
    size_t offset, size;     // of all of them, in the group's whole memory
} FsdpUnit;
static inline int attention_unit(int l) { return 1 + 2*l; }
static inline int mlp_unit(int l) { return 2 + 2*l; }

// Returns FSDP's unit u, but for its offset.
static inline FsdpUnit fsdp_unit(GPT2Config c, int u) {
    size_t C = (size_t)c.C;
    FsdpUnit f;
    memset(&f, 0, sizeof f);
    f.unit = (u + 1) / 2;
    f.tensors = u == 0 ? (int)ROOT_TENSORS : BLOCK_TENSORS / 2;
    if (u == 0) {                               // lnfw, lnfb; wpe, wte
        f.n[0] = f.begin[1] = unit_no_decay(c, 0);
        f.n[1] = unit_elements(c, 0) - f.n[0];
    } else if (u == attention_unit(f.unit - 1)) { // ln1w, ln1b, qkvb, projb; qkvw, projw
        f.n[0] = 6*C;
        f.begin[1] = 13*C;
        f.n[1] = 4*C*C;
    } else {                                    // ln2w, ln2b, fcb, fcprojb; fcw, fcprojw
        f.begin[0] = 6*C;
        f.n[0] = 7*C;
        f.begin[1] = 13*C + 4*C*C;
        f.n[1] = 8*C*C;
    }
    f.size = f.n[0] + f.n[1];
    return f;
}

// Returns what is sharded of it: all, or its matrices.
static inline FsdpUnit sharded_unit(const Sharding* options, GPT2Config c, int u) {
    FsdpUnit f = fsdp_unit(c, u);
    if (options->matrices_only) f.n[0] = 0;
    f.size = f.n[0] + f.n[1];
    return f;
}
// Returns the elements of a shard of a group with so many.
static inline size_t sharding_shard(const Sharding* options, size_t elements) {
    return round_up(ceil_div(elements, (size_t)options->shards), options->alignment);
}

typedef struct {
    int first_unit, num_units;
    Shard shard;             // of the group
    int tensors;             // of its units
    int buffer;              // set by the stage: where its parameters are gathered or soon will be, or NO_BUFFER
} Group;

typedef struct {
    Comm *shard_ranks;       // those that together hold one replica of the model, a view
    Comm *replicas;          // those that hold the same shard, a view
    Comm split[2];           // these two, where they are not the world
    int shard_number;        // of this rank's shards
    int num_units, num_groups;
    FsdpUnit units[MAX_FSDP_UNITS];
    int group_of[MAX_FSDP_UNITS];  // of each unit
    Group groups[MAX_FSDP_UNITS];  // the root's first; all others are alike, but the last may have fewer blocks, or halves take turns
    size_t num_sharded;      // elements of one shard of every group
} Layout;

// The ranks of one replica of the model are neighbours. Replicas are S apart. Collective.
static inline void layout_split(Layout* y, const Sharding* options, Comm* world) {
    int S = options->shards;
    y->shard_ranks = S == world->size ? world : &y->split[0];
    y->replicas = S == 1 && world->size > 1 ? world : &y->split[1];
    y->shard_number = world->rank % S;
    if (options->sharding == SHARD_HYBRID) {
        comm_split(&y->split[0], world, "shard", world->rank / S);
        comm_split(&y->split[1], world, "replica", world->rank % S);
        y->shard_ranks = &y->split[0];
        y->replicas = &y->split[1];
    } else if (y->shard_ranks != world) comm_alone(y->shard_ranks, world, "shard");
    else comm_alone(y->replicas, world, "replica");
    comm_register_on(y->shard_ranks);
}

// Groups the units, and cuts the groups.
static inline void layout_cut(Layout* y, const Sharding* options, GPT2Config c) {
    y->num_units = 1 + 2*c.L;
    y->num_groups = 0;
    y->num_sharded = 0;
    for (int u = 0; u < y->num_units; u++) {
        FsdpUnit* unit = &y->units[u];
        *unit = sharded_unit(options, c, u);
        bool begins_block = u > 0 && u == attention_unit(unit->unit - 1);
        bool begins = u == 0 || options->wrap_halves
                   || (begins_block && options->wrap_blocks > 0 && (unit->unit - 1) % options->wrap_blocks == 0);
        Group* k = &y->groups[begins ? y->num_groups++ : y->num_groups - 1];
        if (begins) {
            memset(k, 0, sizeof *k);
            k->first_unit = u;
            k->buffer = NO_BUFFER;
        }
        unit->offset = begins ? 0 : y->units[u - 1].offset + y->units[u - 1].size;
        y->group_of[u] = y->num_groups - 1;
        k->num_units++;
        k->tensors += unit->tensors;
        k->shard.n = sharding_shard(options, unit->offset + unit->size);
    }
    for (int k = 0; k < y->num_groups; k++) {
        y->groups[k].shard.at = y->num_sharded;
        y->num_sharded += y->groups[k].shard.n;
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

// Sets what this rank has of run 0 or 1 of unit u's elements: a range, and its place in sharded memory. Returns false if it has
// nothing.
static inline bool layout_range(const Layout* y, GPT2Config c, int u, int run, ParamRange* p, size_t* at) {
    const Group* k = &y->groups[y->group_of[u]];
    const FsdpUnit* unit = &y->units[u];
    size_t begin = (size_t)y->shard_number * k->shard.n, end = begin + k->shard.n; // of the group's whole memory
    size_t first = unit->offset + (run ? unit->n[0] : 0);                                // the run's, there
    size_t low = size_max(begin, first), high = size_min(end, first + unit->n[run]);
    if (low >= high) return false;
    *p = param_range(c, unit->unit, unit->begin[run] + (low - first), high - low);
    *at = k->shard.at + (low - begin);
    return true;
}

// ---- by formula: elements of a rank's shards, before anything is laid out ----
typedef struct {
    size_t root, other, all; // of the root's group; of the largest other; of all
    size_t pair;             // of the first two others, which have a bucket each
    size_t others;           // how many others
} ShardSizes;
static inline ShardSizes shard_sizes(GPT2Config c, const Sharding* options) {
    size_t L = (size_t)c.L, wrap = (size_t)options->wrap_blocks, root = sharded_unit(options, c, 0).size;
    size_t attention = sharded_unit(options, c, attention_unit(0)).size, mlp = sharded_unit(options, c, mlp_unit(0)).size;
    size_t block = attention + mlp;
    ShardSizes s;
    memset(&s, 0, sizeof s);
    if (wrap == 0) {
        s.all = s.root = sharding_shard(options, root + L * block);
        return s;
    }
    size_t first = sharding_shard(options, options->wrap_halves ? attention : size_min(wrap, L) * block);
    s.root = sharding_shard(options, root);
    s.other = options->wrap_halves ? sharding_shard(options, mlp) : first;
    s.others = options->wrap_halves ? 2*L : ceil_div(L, wrap);
    if (options->wrap_halves) s.all = s.root + L * (first + s.other);
    else s.all = s.root + L / wrap * s.other + (L % wrap ? sharding_shard(options, L % wrap * block) : 0);
    s.pair = s.others <= 2 ? s.all - s.root : first + s.other;
    return s;
}
// Returns how many gather buffers there are for groups other than the root's: as many as may be gathered at a time, each with room
// for any; or one for each group, of its own size.
static inline size_t sharding_buffers(const Sharding* options, ShardSizes s) {
    return reshards_after_forward(options) ? size_min((size_t)options->limit_all_gathers, s.others) : s.others;
}
// Returns the elements of a shard that all gather buffers hold together.
static inline size_t sharding_gathered(const Sharding* options, ShardSizes s) {
    return s.root + (reshards_after_forward(options) ? sharding_buffers(options, s) * s.other : s.all - s.root);
}

// Prints what is sharded, and how it is gathered.
static inline void report_sharding(GPT2Config c, const Sharding* options, int N) {
    static const char* const shardings[] = { "full", "grad-op", "hybrid", "none" };
    static const char* const places[] = { "", ", all but parameters on the host", " on the host" };
    static const char* const prefetches[] = { "backward-pre", "backward-post", "none" };
    ShardSizes s = shard_sizes(c, options);
    char group[32] = "model";
    if (options->wrap_blocks == 1) snprintf(group, sizeof group, options->wrap_halves ? "half a block" : "block");
    if (options->wrap_blocks > 1) snprintf(group, sizeof group, "%lld blocks", options->wrap_blocks);
    size_t P = sharded_unit(options, c, 0).size, S = (size_t)options->shards;
    for (int u = 1; u <= 2*c.L; u++) P += sharded_unit(options, c, u).size;
    printf("fsdp       sharding %s by %s: each rank keeps 1/%zu of %s%s, %.2f %% of it padding;"
           " gradients reduced in %s\n",
           shardings[options->sharding], group, S, options->matrices_only ? "all matrices" : "everything", places[options->offload],
           100 * (1 - (double)P / (double)(S * s.all)), comm_type_name(reduce_type(options)));
    if (S > 1) printf("gathers    prefetch %s%s; room for the root and %zu more\n", prefetches[options->prefetch],
                      options->forward_prefetch ? ", and forward" : "", sharding_buffers(options, s));
    if (options->host_link > 0) printf("EMULATED LINK OF %g GBIT/S TO THE HOST (--emulate-host-link)\n", options->host_link);
    if (options->sharding == SHARD_HYBRID) printf("replicas   %d, of %zu ranks each\n", N / (int)S, S);
    fflush(stdout);
}
#endif
