// test_sharding.c - the layout of fully sharded parameters (llmc/parallel/layout.h): for every way to wrap, any number of
// shards and shapes that do not divide evenly, all ranks together have each element once. Options that do not go together.
#include "../../llmc/parallel/layout.h"
#include "../../llmc/comm/sums.h"
#include "expect_death.h"
#include "world_alone.h"

enum { MOST_SHARDS = 8, HALVES = -1 };
static const GPT2Config shapes[] = { // max_T, V, Vp, L, NH, C
    { 8, 50, 128, 3, 2, 16 },
    { 7, 100, 128, 2, 1, 6 },
    { 3, 129, 256, 5, 1, 13 },
    { 1, 1, 128, 1, 1, 1 },          // a block of 25 elements: most ranks have none of it
    { 1, 1, 128, 7, 1, 1 },          // two such blocks still end within the shards of the first ranks
    { 32, 384, 384, 2, 4, 32 },
    { 2, 3, 128, MAX_BLOCKS, 1, 2 },
};
static const int wraps[] = { HALVES, 0, 1, 2, 3, 4, 5, 7, MAX_BLOCKS }; // --wrap-blocks: that of a model with fewer blocks, too

static size_t alignment = SHARD_ALIGNMENT; // of shards: ZeRO++'s are in blocks of 256
// A case: a layout as rank `rank` of S has it.
typedef struct {
    GPT2Config c;
    Sharding options;
    Layout y;
} Case;

static void layout_init(Layout* y, const Sharding* options, GPT2Config c) {
    layout_group(y, options, c);
    for (int k = 0; k < y->num_groups; k++) { // as train_gpt2_fsdp.cu cuts them
        size_t n = round_up(ceil_div(y->groups[k].elements, (size_t)options->shards), alignment);
        y->groups[k].shard = (Shard){ n, y->own_elements };
        y->own_elements += y->groups[k].shard.n;
    }
}

static void case_init(Case* t, GPT2Config c, int wrap, int S, int rank) {
    *t = (Case){ .c = c, .options = { .wrap_blocks = wrap, .shards = S, .limit_all_gathers = 2 } };
    if (wrap == HALVES) t->options.wrap_blocks = t->options.wrap_halves = 1;
    memset(&t->y, 0xab, sizeof t->y); // whatever was there before
    t->y.shard_number = rank;
    layout_init(&t->y, &t->options, c);
}

// Calls check for every shape, wrap and number of shards, as rank 0 has them.
static void for_all(void (*check)(Case*)) {
    static Case t;
    static const size_t alignments[] = { SHARD_ALIGNMENT, 256 };
    for (int a = 0; a < 2; a++) {
        alignment = alignments[a];
        for (size_t i = 0; i < COUNT(shapes); i++) for (size_t w = 0; w < COUNT(wraps); w++) for (int S = 1; S <= MOST_SHARDS; S++) {
            case_init(&t, shapes[i], wraps[w], S, 0);
            check(&t);
        }
    }
    alignment = SHARD_ALIGNMENT;
}

// ---- groups ----
static void check_groups(Case* t) {
    int wrap = (int)t->options.wrap_blocks, L = t->c.L, unit = 0;
    const Layout* y = &t->y;
    assert_int_equal(y->num_units, 2*L + 1);
    assert_int_equal(y->num_groups, t->options.wrap_halves ? 2*L + 1 : wrap == 0 ? 1 : 1 + (L + wrap - 1) / wrap);
    for (int k = 0; k < y->num_groups; k++) {
        const Group* group = &y->groups[k];
        bool is_smaller = k == y->num_groups - 1 && wrap > 0 && L % wrap > 0; // the last group
        int tensors = 0, halves = t->options.wrap_halves ? 1 : 2 * (is_smaller ? L % wrap : wrap);
        size_t offset = 0;
        assert_int_equal(group->num_units, wrap == 0 ? 2*L + 1 : k == 0 ? 1 : halves);
        assert_true(group->first_unit == unit && group->buffer == NO_BUFFER);
        for (; unit < group->first_unit + group->num_units; unit++) {
            assert_int_equal(y->group_of[unit], k);
            assert_int_equal(y->units[unit].offset, offset);
            assert_int_equal(y->units[unit].size, unit_elements(t->c, unit));
            offset += y->units[unit].size;
            tensors += unit == 0 ? ROOT_TENSORS : MAX_TENSORS;
        }
        assert_int_equal(group->tensors, tensors);
        assert_int_equal(group->elements, offset);
    }
    assert_int_equal(unit, 2*L + 1);
}
TEST(every_unit_is_in_one_group_and_units_lie_there_one_after_another) { for_all(check_groups); }

TEST(a_blocks_halves_have_the_tensors_that_their_layers_use) {
    static const char* const names[2][MAX_TENSORS] = {
        { "ln_1.weight", "ln_1.bias", "qkv.bias", "proj.bias", "qkv.weight", "proj.weight" },
        { "ln_2.weight", "ln_2.bias", "fc.bias", "fcproj.bias", "fc.weight", "fcproj.weight" } };
    for (size_t i = 0; i < COUNT(shapes); i++) for (int half = 0; half < 2; half++) {
        GPT2Config c = shapes[i];
        int l = c.L - 1, u = half ? mlp_unit(l) : attention_unit(l);
        size_t end = 0;
        assert_int_equal(unit_block(u), l);
        assert_int_equal(unit_tensors(u), MAX_TENSORS);
        for (int k = 0; k < MAX_TENSORS; k++) {
            TensorInfo tensor = unit_tensor(c, u, k);
            FREED char* name = format_string("h.%d.%s", l, names[half][k]);
            assert_string_equal(tensor.name, name);
            assert_int_equal(tensor.offset, end);
            if (k == 4) assert_int_equal(end, unit_no_decay(c, u)); // the first in two dimensions
            end += tensor_elements(tensor);
        }
        assert_int_equal(end, unit_elements(c, u));
    }
}

static void check_shards(Case* t) {
    size_t at = 0, S = (size_t)t->options.shards;
    for (int k = 0; k < t->y.num_groups; k++) {
        Shard shard = t->y.groups[k].shard;
        const Unit* last = &t->y.units[t->y.groups[k].first_unit + t->y.groups[k].num_units - 1];
        size_t elements = last->offset + last->size; // of the group
        assert_int_equal(shard.offset, at);
        assert_true(shard.n > 0 && shard.n % alignment == 0);
        assert_true(S * shard.n >= elements);
        assert_true(S * shard.n < elements + S * alignment); // no more padding than alignment needs
        if (k > 2) assert_true(shard.n <= t->y.groups[k - 2].shard.n); // their bucket has room for all that take it in turn
        at += shard.n;
    }
    assert_int_equal(t->y.own_elements, at);
}
TEST(shards_are_aligned_and_lie_side_by_side) { for_all(check_shards); }

// ---- pieces ----
// Marks in seen (elements of all units of gpt2.h, one after another) the elements that the rank of t has.
static void mark_pieces(const Case* t, unsigned char* seen) {
    size_t end = 0; // of the piece before, in sharded memory
    for (int u = 0; u < t->y.num_units; u++) {
        ParamRange p;
        size_t at, before = 0;
        if (!layout_range(&t->y, t->c, u, &p, &at)) continue;
        Shard shard = t->y.groups[t->y.group_of[u]].shard;
        size_t first = (size_t)t->y.shard_number * shard.n; // of this rank's shard, in the group's whole memory
        assert_true(p.unit == u && p.parts == 1);
        assert_true(p.n > 0 && p.begin + p.n <= unit_elements(t->c, u));
        assert_true(at >= end && at >= shard.offset && at + p.n <= shard.offset + shard.n);
        // Gathered, it comes to its place.
        assert_int_equal(t->y.units[u].offset + p.begin, first + (at - shard.offset));
        for (int k = 0; k < p.unit; k++) before += unit_elements(t->c, k);
        for (size_t e = 0; e < p.n; e++) {
            seen[before + p.begin + e]++;
            if ((e < p.no_decay) != (p.begin + e < unit_no_decay(t->c, p.unit))) fail_msg("unit %d, element %zu: decay", p.unit, p.begin + e);
        }
        end = at + p.n;
    }
}
static void check_pieces(Case* t) {
    size_t n = gpt2_num_elements(t->c);
    FREED unsigned char* seen = (unsigned char*)xcalloc(n, 1);
    for (int rank = 0; rank < t->options.shards; rank++) {
        t->y.shard_number = rank;
        mark_pieces(t, seen);
    }
    for (size_t e = 0; e < n; e++) {
        if (seen[e] != 1)
            fail_msg("wrap %lld, %d shards: element %zu is in %d of them", t->options.wrap_blocks, t->options.shards, e, seen[e]);
    }
}
TEST(the_pieces_of_all_ranks_are_every_unit_once) { for_all(check_pieces); }

// ---- gather buffers ----
static void check_gather_buffers(Case* t) {
    const Layout* y = &t->y;
    size_t largest = 0;
    int n = layout_gather_buffers(y, &t->options);
    for (int k = 1; k < y->num_groups; k++) largest = size_max(largest, y->groups[k].shard.n);
    assert_int_equal(gather_buffer_shard(y, &t->options, 0), y->groups[0].shard.n);
    for (int r = 1; r < n; r++) assert_int_equal(gather_buffer_shard(y, &t->options, r), largest); // --sharding full: for any
}
TEST(a_gather_buffer_is_as_large_as_the_largest_group_that_takes_it) {
    static Case t;
    for_all(check_gather_buffers);
    GPT2Config c = { 0 };
    assert_true(gpt2_named_config("gpt2-xl", &c));
    c.V = GPT2_VOCABULARY;
    c.Vp = gpt2_padded_vocabulary(c.V);
    for (int wrap = HALVES; wrap < c.L + 3; wrap++) for (int S = 1; S <= 1024; S *= 2) {
        case_init(&t, c, wrap, S, S - 1);
        check_gather_buffers(&t);
        check_groups(&t);
        check_shards(&t);
    }
}

TEST(gather_buffers_are_bounded_where_groups_are_freed) {
    static Case t;
    for (int kind = SHARD_FULL; kind <= SHARD_HYBRID; kind++) for (int limit = 1; limit < 8; limit++) {
        bool frees = kind != SHARD_GRAD_OP;
        case_init(&t, shapes[2], 2, 2, 0); // 3 groups besides the root, the last of one block
        t.options.sharding = kind;
        t.options.limit_all_gathers = limit;
        int n = layout_gather_buffers(&t.y, &t.options);
        assert_int_equal(n, frees && limit < 3 ? 1 + limit : 4);
        for (int r = 1; r < n; r++)
            assert_int_equal(gather_buffer_shard(&t.y, &t.options, r), t.y.groups[frees ? 1 : r].shard.n);
    }
}

// ---- communicators ----
static void alone_in_every_way(void) {
    static Comm world;
    static Control control;
    world_alone(&world, &control);
    for (int kind = SHARD_FULL; kind <= SHARD_HYBRID; kind++) {
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
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2, .shard_group = 3, .offload = OFFLOAD_ALL },
          "--cpu-offload keeps shards on the host", "use --sharding full or grad-op", 0 },
        { { .limit_all_gathers = 2, .host_link = 1 }, "--emulate-host-link is about --cpu-offload", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = BACKWARD_PRE }, "--limit-all-gathers 1 leaves no room", "--prefetch none", 0 },
        { { .limit_all_gathers = 1, .prefetch = BACKWARD_POST }, "--limit-all-gathers 1 leaves no room", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE, .forward_prefetch = 1 }, "--limit-all-gathers 1 leaves no room", "", 0 },
        { { .limit_all_gathers = 2, .wrap_halves = 1, .wrap_blocks = 2 }, "--wrap-halves cuts each block", "leave out --wrap-blocks 2", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE, .wrap_halves = 1, .wrap_blocks = 1 }, "--wrap-halves needs --limit-all-gathers 2",
          "both halves at once", 0 },
        { { .limit_all_gathers = 1, .sharding = SHARD_GRAD_OP, .wrap_halves = 1, .wrap_blocks = 1 }, NULL, NULL, 6 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE }, NULL, NULL, 6 }, // gathers nothing ahead
        { { .limit_all_gathers = 1, .sharding = SHARD_GRAD_OP }, NULL, NULL, 6 }, // frees nothing, so every unit has a room
        { { .limit_all_gathers = 2, .sharding = SHARD_HYBRID, .shard_group = 3 }, NULL, NULL, 3 },
        { { .limit_all_gathers = 2, .sharding = SHARD_GRAD_OP, .offload = OFFLOAD_ALL }, NULL, NULL, 6 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Sharding options = cases[i].options;
        if (cases[i].says) expect_error(sharding_check(&options, 6, 1), cases[i].says, cases[i].also);
        else sharding_check(&options, 6, 1);
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
        { { .wrap_blocks = 1, .wrap_halves = 1, .shards = 4, .limit_all_gathers = 2 }, "sharding full by half a block:" },
        { { .shards = 2, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "sharding hybrid by model: each rank keeps 1/2" },
        { { .shards = 2, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "room for the root and 0 more\nreplicas   2, of 2 ranks each\n" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Sharding options = cases[i].options;
        static Layout y;
        layout_init(&y, &options, c);
        FREED_BY(child_free) Child said = child_does(report_sharding(&y, &options, 4));
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
TEST(a_sum_may_take_the_place_of_any_of_its_rows) {
    enum { N = 2 * COMM_SUM_BLOCK + 5, ROWS = 4 };
    static const CommType types[] = { COMM_F32, COMM_BF16, COMM_F16, COMM_F64 };
    static double in[ROWS][N], want[N];
    for (int k = 0; k < 4; k++) for (int n = 2; n <= ROWS; n++) for (int place = 0; place < n; place++) {
        const void* rows[ROWS];
        for (int q = 0; q < n; q++) rows[q] = memset(in[q], 0x30 + 3 * q, sizeof in[q]);
        comm_add_rows(want, rows, n, N, types[k]);
        comm_add_rows(in[place], rows, n, N, types[k]);
        assert_memory_equal(in[place], want, N * comm_type_size(types[k]));
    }
}
