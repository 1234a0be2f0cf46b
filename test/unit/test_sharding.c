// test_sharding.c - the layout of fully sharded parameters (llmc/parallel/layout.h): for every way to wrap, any number of
// shards and shapes that do not divide evenly, all ranks together have each element once. Options that do not go together.
#include "../../llmc/parallel/layout.h"
#include "../../llmc/comm/sums.h"
#include "count_threads.h"
#include "expect_death.h"
#include "world_alone.h"

enum { MOST_SHARDS = 8 };
static const GPT2Config shapes[] = { // max_T, V, Vp, L, NH, C
    { 8, 50, 128, 3, 2, 16 },
    { 7, 100, 128, 2, 1, 6 },
    { 3, 129, 256, 5, 1, 13 },
    { 1, 1, 128, 1, 1, 1 },          // a block of 25 elements: most ranks have none of it
    { 1, 1, 128, 7, 1, 1 },          // two such blocks still end within the shards of the first ranks
    { 32, 384, 384, 2, 4, 32 },
    { 2, 3, 128, MAX_UNITS - 1, 1, 2 },
};
static const int wraps[] = { 0, 1, 2, 3, 4, 5, 7, MAX_UNITS - 1 }; // --wrap-blocks: that of a model with fewer blocks, too

// A case: a layout as rank `rank` of S has it.
typedef struct {
    GPT2Config c;
    Sharding options;
    Comm ranks;              // only rank and size
    Layout y;
    Unit units[MAX_UNITS];
} Case;

static void case_init(Case* t, GPT2Config c, int wrap, int S, int rank) {
    *t = (Case){ .c = c, .options = { .wrap_blocks = wrap, .shards = S, .limit_all_gathers = 2 }, .ranks = { .rank = rank, .size = S } };
    memset(t->units, 0xab, sizeof t->units); // whatever was there before
    t->y.shard_ranks = &t->ranks;
    layout_cut(&t->y, &t->options, c, t->units);
}

// Calls check for every shape, wrap and number of shards, as rank 0 has them.
static void for_all(void (*check)(Case*)) {
    static Case t;
    for (size_t i = 0; i < COUNT(shapes); i++) for (size_t w = 0; w < COUNT(wraps); w++) for (int S = 1; S <= MOST_SHARDS; S++) {
        case_init(&t, shapes[i], wraps[w], S, 0);
        check(&t);
    }
}

// ---- groups ----
static void check_groups(Case* t) {
    int wrap = (int)t->options.wrap_blocks, L = t->c.L, unit = 0;
    const Layout* y = &t->y;
    assert_int_equal(y->num_groups, wrap == 0 ? 1 : 1 + (L + wrap - 1) / wrap);
    for (int k = 0; k < y->num_groups; k++) {
        const Group* group = &y->groups[k];
        bool is_smaller = k == y->num_groups - 1 && wrap > 0 && L % wrap > 0; // the last group
        int tensors = 0, expected = wrap == 0 ? L + 1 : k == 0 ? 1 : is_smaller ? L % wrap : wrap;
        size_t offset = 0;
        assert_true(group->first_unit == unit && group->num_units == expected && group->buffer == NO_BUFFER);
        for (; unit < group->first_unit + group->num_units; unit++) {
            assert_int_equal(y->group_of[unit], k);
            assert_int_equal(t->units[unit].offset, offset);
            assert_int_equal(t->units[unit].size, unit_elements(t->c, unit));
            offset += unit_elements(t->c, unit);
            tensors += unit == 0 ? ROOT_TENSORS : BLOCK_TENSORS;
        }
        assert_int_equal(group->tensors, tensors);
    }
    assert_int_equal(unit, L + 1);
}
TEST(every_unit_is_in_one_group_and_units_lie_there_one_after_another) { for_all(check_groups); }

static void check_shards(Case* t) {
    size_t at = 0, S = (size_t)t->options.shards;
    for (int k = 0; k < t->y.num_groups; k++) {
        Shard shard = t->y.groups[k].shard;
        const Unit* last = &t->units[t->y.groups[k].first_unit + t->y.groups[k].num_units - 1];
        size_t elements = last->offset + last->size; // of the group
        assert_int_equal(shard.at, at);
        assert_true(shard.n > 0 && shard.n % SHARD_ALIGNMENT == 0);
        assert_true(S * shard.n >= elements);
        assert_true(S * shard.n < elements + S * SHARD_ALIGNMENT); // no more padding than alignment needs
        if (k > 1) assert_true(shard.n <= t->y.groups[1].shard.n); // a room and a bucket for the first have room for all
        at += shard.n;
    }
    assert_int_equal(t->y.num_sharded, at);
}
TEST(shards_are_aligned_and_lie_side_by_side) { for_all(check_shards); }

// ---- pieces ----
// Marks in seen (elements of all units, one after another) the elements that the rank of t has.
static void mark_pieces(const Case* t, unsigned char* seen) {
    size_t end = 0; // of the piece before, in sharded memory
    for (int u = 0; u <= t->c.L; u++) {
        ParamRange p;
        size_t at, size = unit_elements(t->c, u), decayed = unit_no_decay(t->c, u);
        if (layout_range(&t->y, t->c, t->units, u, &p, &at)) {
            Shard shard = t->y.groups[t->y.group_of[u]].shard;
            size_t first = (size_t)t->ranks.rank * shard.n; // of this rank's shard, in the group's whole memory
            assert_int_equal(p.unit, u);
            assert_int_equal(p.parts, 1);
            assert_true(p.n > 0 && p.begin + p.n <= size);
            assert_true(at >= end && at >= shard.at && at + p.n <= shard.at + shard.n);
            assert_int_equal(t->units[u].offset + p.begin, first + (at - shard.at)); // gathered, it comes to its place
            for (size_t e = 0; e < p.n; e++) {
                seen[p.begin + e]++;
                if ((e < p.no_decay) != (p.begin + e < decayed)) fail_msg("unit %d, element %zu: decay", u, p.begin + e);
            }
            end = at + p.n;
        }
        seen += size;
    }
}
static void check_pieces(Case* t) {
    size_t n = gpt2_num_elements(t->c);
    FREED unsigned char* seen = (unsigned char*)xcalloc(n, 1);
    for (int rank = 0; rank < t->options.shards; rank++) {
        t->ranks.rank = rank;
        mark_pieces(t, seen);
    }
    for (size_t e = 0; e < n; e++)
        if (seen[e] != 1)
            fail_msg("wrap %lld, %d shards: element %zu is in %d of them", t->options.wrap_blocks, t->options.shards, e, seen[e]);
}
TEST(the_pieces_of_all_ranks_are_every_unit_once) { for_all(check_pieces); }

// ---- by formula ----
static void check_sizes(Case* t) {
    const Layout* y = &t->y;
    ShardSizes s = shard_sizes(t->c, &t->options);
    assert_true(s.all == y->num_sharded && s.root == y->groups[0].shard.n && (int)s.others == y->num_groups - 1);
    assert_int_equal(s.other, y->num_groups > 1 ? y->groups[1].shard.n : 0);
}
TEST(sizes_by_formula_are_the_layouts) {
    static Case t;
    for_all(check_sizes);
    GPT2Config c = { 0 };
    assert_true(gpt2_named_config("gpt2-xl", &c));
    c.V = GPT2_VOCABULARY;
    c.Vp = gpt2_padded_vocabulary(c.V);
    for (int wrap = 0; wrap < c.L + 3; wrap++) for (int S = 1; S <= 1024; S *= 2) {
        case_init(&t, c, wrap, S, S - 1);
        check_sizes(&t);
        check_groups(&t);
        check_shards(&t);
    }
}

TEST(rooms_are_bounded_where_groups_are_freed) {
    static const int kinds[] = { SHARD_FULL, SHARD_HYBRID, SHARD_GRAD_OP, SHARD_NONE };
    static Case t;
    for (int i = 0; i < 4; i++) for (int rooms = 1; rooms < 8; rooms++) {
        bool frees = kinds[i] == SHARD_FULL || kinds[i] == SHARD_HYBRID;
        case_init(&t, shapes[2], 2, 2, 0); // 3 groups besides the root
        t.options.sharding = kinds[i];
        t.options.limit_all_gathers = rooms;
        assert_int_equal(sharding_buffers(&t.options, shard_sizes(t.c, &t.options)), frees && rooms < 3 ? rooms : 3);
    }
}

// ---- communicators ----
static void alone_in_every_way(void) {
    static Comm world;
    static Control control;
    world_alone(&world, &control);
    for (int kind = SHARD_FULL; kind <= SHARD_NONE; kind++) {
        static Layout y;
        Sharding options = { .sharding = kind, .shards = 1 };
        layout_split(&y, &options, &world);
        require(y.shard_ranks->size == 1 && y.replicas->size == 1, "%d shards, %d replicas", y.shard_ranks->size, y.replicas->size);
        require(y.shard_ranks != y.replicas, "shards and replicas are one communicator");
        layout_free(&y);
    }
    world_end(&world);
}
TEST(one_rank_alone_has_both_communicators_in_every_sharding) { expect_success(alone_in_every_way()); }

// ---- options ----
TEST(options_that_do_not_go_together_and_the_number_of_shards) {
    static const struct { Sharding options; const char *says, *also; int shards; } cases[] = { // on 6 ranks
        { { .sharding = SHARD_FULL, .limit_all_gathers = 2, .shard_group = 3 }, "--shard-group and --sharding hybrid go together", "", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "--shard-group and --sharding hybrid go together", "", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2, .shard_group = 4 }, "--shard-group must divide", "4 does not divide 6", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2, .shard_group = 12 }, "12 does not divide 6", "", 0 },
        { { .limit_all_gathers = 2, .host_link = 1 }, "--emulate-host-link is about --cpu-offload", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_PRE }, "--limit-all-gathers 1 leaves no room", "--prefetch none", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_POST }, "--limit-all-gathers 1 leaves no room", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE, .forward_prefetch = 1 }, "--limit-all-gathers 1 leaves no room", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE }, NULL, NULL, 6 }, // gathers nothing ahead
        { { .limit_all_gathers = 1, .sharding = SHARD_GRAD_OP }, NULL, NULL, 6 }, // frees nothing, so every unit has a room
        { { .limit_all_gathers = 2, .sharding = SHARD_HYBRID, .shard_group = 3 }, NULL, NULL, 3 },
        { { .limit_all_gathers = 2, .sharding = SHARD_NONE }, NULL, NULL, 1 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Sharding options = cases[i].options;
        if (cases[i].says) expect_error(sharding_check(&options, 6), cases[i].says, cases[i].also);
        else sharding_check(&options, 6);
        assert_int_equal(options.shards, cases[i].shards);
    }
}

TEST(a_report_says_how_large_groups_are) {
    const GPT2Config c = { 32, 384, 384, 5, 4, 32 };
    static const struct { Sharding options; const char* says; } cases[] = { // on 4 ranks
        { { .wrap_blocks = 1, .shards = 4, .limit_all_gathers = 2 }, "sharding full by block: each rank keeps 1/4 of everything, 0.21 % of it" },
        { { .wrap_blocks = 1, .shards = 4, .limit_all_gathers = 2 }, "room for the root and 2 more\n" },
        { { .wrap_blocks = 1, .shards = 4, .limit_all_gathers = 7 }, "room for the root and 5 more\n" },
        { { .wrap_blocks = 1, .shards = 4, .offload = OFFLOAD_OPTIMIZER }, "1/4 of everything, all but parameters on the host" },
        { { .wrap_blocks = 2, .shards = 4, .limit_all_gathers = 2 }, "sharding full by 2 blocks:" },
        { { .shards = 2, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "sharding hybrid by model: each rank keeps 1/2" },
        { { .shards = 2, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "room for the root and 0 more\nreplicas   2, of 2 ranks each\n" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        FREED_BY(child_free) Child said = child_does(report_sharding(c, &cases[i].options, 4));
        if (said.status != 0 || !strstr(said.out, cases[i].says)) fail_msg("'%s' is not in %s%s", cases[i].says, said.out, said.err);
    }
}

// What --cpu-offload adds with accumulation. An element's sum does not depend on the thread that forms it.
TEST(gradients_on_the_host_are_added_by_all_threads) {
    enum { N = 100 * COMM_SUM_BLOCK + 77 };
    static const CommType types[] = { COMM_F32, COMM_BF16, COMM_F16, COMM_F64 };
    FREED uint64_t *first = xcalloc(N, 8), *second = xcalloc(N, 8), *together = xcalloc(N, 8), *alone = xcalloc(N, 8);
    for (size_t i = 0; i < N; i++) { // two floats, four 16-bit numbers or a double around 1
        Philox r = philox(3, 0, i);
        first[i] = (((uint64_t)r.x[0] << 32 | r.x[1]) & 0x83ff83ff83ff83ff) | 0x3c003c003c003c00;
        second[i] = (((uint64_t)r.x[2] << 32 | r.x[3]) & 0x83ff83ff83ff83ff) | 0x3c003c003c003c00;
    }
    const void* rows[] = { first, second, first };
    int before = count_threads();
    for (int k = 0; k < 4; k++) {
        omp_set_num_threads(3);
        comm_add_rows(together, rows, 3, N, types[k]);
        assert_int_equal(count_threads(), before + 2);
        omp_set_num_threads(1);
        comm_add_rows(alone, rows, 3, N, types[k]);
        assert_memory_equal(together, alone, N * 8);
        assert_memory_not_equal(together, first, N * comm_type_size(types[k]));
    }
}
