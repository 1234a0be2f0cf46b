// The layout of fully sharded parameters (llmc/parallel/layout.h): for every way to wrap, any number of shards and shapes that do not
// divide evenly, all ranks together have each element once. And options that do not go together.
#include "../../llmc/parallel/layout.h"
#include "expect_death.h"

enum { MOST_SHARDS = 8 };
static const GPT2Config shapes[] = { // max_T, V, Vp, L, NH, C
    { 8, 50, 128, 3, 2, 16 },
    { 7, 100, 128, 2, 1, 6 },
    { 3, 129, 256, 5, 1, 13 },
    { 1, 1, 128, 1, 1, 1 },          // a block of 25 elements: most ranks have none of it
    { 32, 384, 384, 2, 4, 32 },
};
enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0], NUM_WRAPS = WRAP_MODEL + 1 };

// Calls check(layout of rank 0, c, wrap) for every shape, wrap and number of shards.
static void for_all(void (*check)(const Layout*, GPT2Config, int)) {
    static Layout y;
    for (int i = 0; i < NUM_SHAPES; i++) {
        for (int wrap = 0; wrap < NUM_WRAPS; wrap++) {
            for (int S = 1; S <= MOST_SHARDS; S++) {
                layout_init(&y, shapes[i], wrap, S, 0);
                check(&y, shapes[i], wrap);
                layout_free(&y);
            }
        }
    }
}
static size_t flat_end(const Layout* y, const Flat* f) { return f->begin + (size_t)y->S * f->shard; }
static size_t group_elements(GPT2Config c, const Group* k) {
    size_t n = 0;
    for (int u = k->first_unit; u < k->first_unit + k->num_units; u++) n += unit_elements(c, u);
    return n;
}

static void check_groups(const Layout* y, GPT2Config c, int wrap) {
    int unit = 0;
    assert_int_equal(y->num_groups, wrap == WRAP_MODEL ? 1 : c.L + 1);
    for (int k = 0; k < y->num_groups; k++) {
        size_t offset = 0;
        assert_int_equal(y->groups[k].first_unit, unit);
        for (; unit < y->groups[k].first_unit + y->groups[k].num_units; unit++) {
            assert_int_equal(y->group_of[unit], k);
            assert_int_equal(y->units[unit].offset, offset);
            assert_int_equal(y->units[unit].size, unit_elements(c, unit));
            offset += unit_elements(c, unit);
        }
    }
    assert_int_equal(unit, c.L + 1);
}
static void test_every_unit_is_in_one_group_and_lies_there_as_in_a_checkpoint(void** state) {
    (void)state;
    for_all(check_groups);
}

static void check_flats(const Layout* y, GPT2Config c, int wrap) {
    (void)wrap;
    const Flat* f = y->flats;
    size_t sharded = 0;
    for (int k = 0; k < y->num_groups; k++) {
        size_t end = 0, elements = group_elements(c, &y->groups[k]);
        assert_ptr_equal(f, y->flats + y->groups[k].first_flat);
        for (const Flat* last = f + y->groups[k].num_flats - 1; f <= last; f++) {
            assert_int_equal(f->begin, end);
            assert_int_equal(f->offset, sharded);
            assert_true(f->shard > 0 && f->shard % SHARD_ALIGNMENT == 0);
            end = flat_end(y, f);
            assert_true(f == last || end < elements); // padding is in the last one only
            sharded += f->shard;
        }
        assert_int_equal(end, y->groups[k].whole);
        assert_true(end >= elements && end < elements + (size_t)y->S * SHARD_ALIGNMENT);
    }
    assert_ptr_equal(f, y->flats + y->num_flats);
    assert_int_equal(sharded, y->num_sharded);
}
static void test_flats_tile_whole_memory_and_only_the_last_is_padded(void** state) {
    (void)state;
    for_all(check_flats);
}

// Returns how many tensors have an element in flat f, by looking at every element.
static int tensors_of(const Layout* y, GPT2Config c, const Group* k, const Flat* f) {
    int count = 0;
    for (int u = k->first_unit; u < k->first_unit + k->num_units; u++) {
        for (int i = 0; i < unit_tensors(u); i++) {
            TensorInfo t = unit_tensor(c, u, i);
            size_t at = y->units[u].offset + t.offset, end = at + tensor_elements(t);
            while (at < end && (at < f->begin || at >= flat_end(y, f))) at++;
            count += at < end;
        }
    }
    return count;
}
static void check_tensors(const Layout* y, GPT2Config c, int wrap) {
    (void)wrap;
    for (int k = 0; k < y->num_groups; k++) {
        const Group* group = &y->groups[k];
        for (const Flat* f = y->flats + group->first_flat; f < y->flats + group->first_flat + group->num_flats; f++) {
            assert_int_equal(f->tensors, tensors_of(y, c, group, f));
            assert_true(f->tensors > 0); // or it would never be reduced
        }
    }
}
static void test_a_flat_knows_how_many_tensors_it_waits_for(void** state) {
    (void)state;
    for_all(check_tensors);
}

// Marks in seen (elements of unit u) the elements that a rank's pieces contain.
static void mark_pieces(const Layout* y, int u, unsigned char* seen) {
    for (int i = 0; i < y->num_pieces; i++) {
        const Piece* p = &y->pieces[i];
        const Flat* f = &y->flats[p->flat];
        size_t first = f->begin + (size_t)y->rank * f->shard; // of this rank's shard
        assert_true(i == 0 || p->flat >= p[-1].flat);
        if (p->unit != u) continue;
        assert_true(p->n > 0 && p->begin + p->n <= y->units[u].size);
        assert_true(p->at >= f->offset && p->at + p->n <= f->offset + f->shard);
        assert_int_equal(y->units[u].offset + p->begin, first + (p->at - f->offset)); // gathered, it comes to its place
        for (size_t e = p->begin; e < p->begin + p->n; e++) seen[e]++;
    }
}
static void check_pieces(const Layout* first, GPT2Config c, int wrap) {
    static Layout y;
    for (int u = 0; u <= c.L; u++) {
        size_t n = unit_elements(c, u);
        unsigned char* seen = (unsigned char*)xcalloc(n, 1);
        for (int rank = 0; rank < first->S; rank++) {
            layout_init(&y, c, wrap, first->S, rank);
            mark_pieces(&y, u, seen);
            layout_free(&y);
        }
        for (size_t e = 0; e < n; e++)
            if (seen[e] != 1) fail_msg("wrap %d, %d shards: element %zu of unit %d is in %d shards", wrap, first->S, e, u, seen[e]);
        free(seen);
    }
}
static void test_the_pieces_of_all_ranks_are_every_unit_once(void** state) {
    (void)state;
    for_all(check_pieces);
}

static void assert_sizes(const Layout* y, GPT2Config c, int wrap) {
    Sharding how;
    memset(&how, 0, sizeof how);
    how.wrap = wrap;
    how.shards = y->S;
    ShardSizes s = shard_sizes(c, &how);
    assert_int_equal(s.all, y->num_sharded);
    assert_int_equal((size_t)y->S * s.root, y->groups[0].whole);
    assert_int_equal(s.others, y->num_groups - 1);
    for (int k = 1; k < y->num_groups; k++) assert_int_equal((size_t)y->S * s.other, y->groups[k].whole);
}
static void test_sizes_by_formula_are_the_layouts(void** state) {
    (void)state;
    static Layout y;
    for_all(assert_sizes);
    GPT2Config c;
    memset(&c, 0, sizeof c);
    assert_true(gpt2_named_config("gpt2-xl", &c));
    c.V = GPT2_VOCABULARY;
    c.Vp = gpt2_padded_vocabulary(c.V);
    for (int wrap = 0; wrap < NUM_WRAPS; wrap++) {
        for (int S = 1; S <= 1024; S *= 2) {
            layout_init(&y, c, wrap, S, S - 1);
            assert_sizes(&y, c, wrap);
            layout_free(&y);
        }
    }
}

static void test_wrap_layer_cuts_before_each_matrix_but_the_first(void** state) {
    (void)state;
    static Layout y;
    GPT2Config c = shapes[NUM_SHAPES - 1]; // 32 channels
    static const int cut[] = { PROJW, FCW, FCPROJW };
    layout_init(&y, c, WRAP_LAYER, 3, 0);
    assert_int_equal(y.groups[0].num_flats, 2); // wpe with the layernorm, wte
    for (int k = 1; k < y.num_groups; k++) {
        assert_int_equal(y.groups[k].num_flats, 4);
        for (int i = 0; i < 3; i++) { // so little earlier that the flat before it divides
            size_t matrix = unit_tensor(c, k, cut[i]).offset, begin = y.flats[y.groups[k].first_flat + 1 + i].begin;
            assert_true(begin <= matrix && matrix < begin + 3 * SHARD_ALIGNMENT);
        }
    }
    layout_free(&y);
}

// ---- options ----
static Sharding sharding(int kind, long long shard_group) {
    Sharding how;
    memset(&how, 0, sizeof how);
    how.sharding = kind;
    how.shard_group = shard_group;
    how.rooms = 2;
    return how;
}
static void check_on_6_ranks(void* how) { sharding_check((Sharding*)how, 6); }
static void test_options_that_do_not_go_together(void** state) {
    (void)state;
    Sharding how = sharding(SHARD_FULL, 3);
    expect_death(check_on_6_ranks, &how, "--shard-group and --sharding hybrid go together");
    how = sharding(SHARD_HYBRID, 0);
    expect_death(check_on_6_ranks, &how, "--shard-group and --sharding hybrid go together");
    how = sharding(SHARD_HYBRID, 4);
    expect_death(check_on_6_ranks, &how, "--shard-group must divide", "4 does not divide 6");
    how = sharding(SHARD_HYBRID, 12);
    expect_death(check_on_6_ranks, &how, "12 does not divide 6");
    how = sharding(SHARD_FULL, 0);
    how.rooms = 1;
    expect_death(check_on_6_ranks, &how, "--limit-all-gathers 1 leaves no room", "--prefetch none");
    how.prefetch = PREFETCH_POST;
    expect_death(check_on_6_ranks, &how, "--limit-all-gathers 1 leaves no room");
    how.prefetch = PREFETCH_NONE;
    how.forward_prefetch = 1;
    expect_death(check_on_6_ranks, &how, "--limit-all-gathers 1 leaves no room");
    how.forward_prefetch = 0;
    sharding_check(&how, 6); // gathers nothing ahead
    how = sharding(SHARD_GRAD_OP, 0);
    how.rooms = 1;
    sharding_check(&how, 6); // frees nothing, so every unit has a room
}
static void test_the_number_of_shards(void** state) {
    (void)state;
    static const int kinds[] = { SHARD_FULL, SHARD_GRAD_OP, SHARD_HYBRID, SHARD_NONE }, shards[] = { 6, 6, 3, 1 };
    for (int i = 0; i < 4; i++) {
        Sharding how = sharding(kinds[i], kinds[i] == SHARD_HYBRID ? 3 : 0);
        sharding_check(&how, 6);
        assert_int_equal(how.shards, shards[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_unit_is_in_one_group_and_lies_there_as_in_a_checkpoint),
        cmocka_unit_test(test_flats_tile_whole_memory_and_only_the_last_is_padded),
        cmocka_unit_test(test_a_flat_knows_how_many_tensors_it_waits_for),
        cmocka_unit_test(test_the_pieces_of_all_ranks_are_every_unit_once),
        cmocka_unit_test(test_sizes_by_formula_are_the_layouts),
        cmocka_unit_test(test_wrap_layer_cuts_before_each_matrix_but_the_first),
        cmocka_unit_test(test_options_that_do_not_go_together),
        cmocka_unit_test(test_the_number_of_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
