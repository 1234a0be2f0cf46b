// test_gpt2.c - llmc/model/gpt2.h: the number of parameters, the tensors in memory and their parts, the initial weights.
#include "../../llmc/model/gpt2.h"
#include "../../llmc/model/param_range.h"
#include "expect_death.h"

static GPT2Config named(const char* name) {
    GPT2Config c;
    memset(&c, 0, sizeof c);
    assert_true(gpt2_named_config(name, &c));
    if (c.max_T == 0) c.max_T = 64;
    c.V = GPT2_VOCABULARY; c.Vp = gpt2_padded_vocabulary(c.V);
    return c;
}
TEST(the_named_models_have_their_published_sizes) {
    static const struct { const char* name; size_t parameters; } models[] = {
        { "gpt2", 124439808 }, { "gpt2-medium", 354823168 }, { "gpt2-large", 774030080 }, { "gpt2-xl", 1557611200 } };
    for (int i = 0; i < 4; i++) assert_int_equal(gpt2_num_parameters(named(models[i].name)), models[i].parameters);
    assert_int_equal(block_elements(named("gpt2")), 7087872);
    GPT2Config c = named("d12");
    assert_true(c.L == 12 && c.NH == 12 && c.C == 768 && c.Vp == 50304);
    const char* not_models[] = { "d0", "d257", "d", "d4x", "gpt3", "" };
    for (int i = 0; i < 6; i++) assert_false(gpt2_named_config(not_models[i], &c));
}

// Mean and standard deviation of tensor i of unit u.
static void measure(GPT2Config c, int u, int i, double* mean, double* deviation) {
    TensorInfo t = unit_tensor(c, u, i);
    size_t n = tensor_stored_elements(t);
    FREED float* w = (float*)xcalloc(n, sizeof(float));
    unit_init_weights(c, 1337, u, t.offset, t.offset + n, w);
    double sum = 0, squares = 0;
    for (size_t k = 0; k < n; k++) { sum += w[k]; squares += (double)w[k] * w[k]; }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
}
TEST(initial_weights_have_gpt2s_distribution) {
    GPT2Config c = named("d4");
    double mean, deviation;
    for (int u = attention_unit(1); u <= mlp_unit(1); u++) for (int i = 0; i < unit_tensors(u); i++) {
        bool gain = i == (u == mlp_unit(1) ? LN2W : LN1W), matrix = unit_tensor(c, u, i).cols > 0;
        bool into_residual = i == (u == mlp_unit(1) ? FCPROJW : PROJW);
        double expected = !matrix ? 0 : into_residual ? 0.02 / sqrt(8) : 0.02;
        measure(c, u, i, &mean, &deviation);
        assert_true(fabs(mean - gain) <= 3e-4 && fabs(deviation - expected) <= 0.01 * expected);
    }
    measure(c, 0, WTE, &mean, &deviation);
    assert_true(fabs(mean) <= 1e-4 && fabs(deviation - 0.02) <= 2e-4);
}

TEST(the_padding_of_the_vocabulary_is_zero) {
    GPT2Config c = { 24, 130, 256, 3, 2, 12 };
    TensorInfo t = unit_tensor(c, 0, WTE);
    float w[256 * 12];
    unit_init_weights(c, 7, 0, t.offset, t.offset + tensor_elements(t), w);
    for (int k = 0; k < 130 * 12; k++) assert_true(w[k] != 0);
    for (int k = 130 * 12; k < 256 * 12; k++) assert_true(w[k] == 0);
}

// Initial weights and checkpoints number a block's elements: the vectors of both halves, then the matrices of both. These names and
// sizes are written out here, because this order must never change.
static const struct { const char* name; int rows, cols; float mean, deviation; } stored[] = { // in multiples of C; deviation: of 0.02
    { "ln_1.weight", 1, 0, 1, 0 }, { "ln_1.bias", 1, 0, 0, 0 }, { "qkv.bias", 3, 0, 0, 0 }, { "proj.bias", 1, 0, 0, 0 },
    { "ln_2.weight", 1, 0, 1, 0 }, { "ln_2.bias", 1, 0, 0, 0 }, { "fc.bias", 4, 0, 0, 0 }, { "fcproj.bias", 1, 0, 0, 0 },
    { "qkv.weight", 3, 1, 0, 1 }, { "proj.weight", 1, 1, 0, -1 }, { "fc.weight", 4, 1, 0, 1 }, { "fcproj.weight", 1, 4, 0, -1 }
};
// Returns the tensor of block l with this name. Sets the unit that has it.
static TensorInfo tensor_named(GPT2Config c, int l, const char* name, int* unit) {
    for (*unit = attention_unit(l); *unit <= mlp_unit(l); ++*unit) for (int i = 0; i < unit_tensors(*unit); i++) {
        TensorInfo t = unit_tensor(c, *unit, i);
        if (strcmp(strchr(t.name + 2, '.') + 1, name) == 0) return t;
    }
    fail_msg("block %d has no %s", l, name);
    return (TensorInfo) { 0 };
}
TEST(a_blocks_tensors_are_numbered_without_a_gap_and_its_initial_weights_follow_these_numbers) {
    GPT2Config c = { 16, 50, 128, 3, 2, 12 };
    const uint64_t seed = 1337;
    const float into_residual = (float)(0.02 / sqrt(2.0 * 3));
    for (int l = 0; l < c.L; l++) {
        FREED float* block = (float*)xcalloc(block_elements(c), sizeof(float)); // its elements by number
        size_t next = 0;
        for (size_t k = 0; k < COUNT(stored); k++) {
            int unit;
            TensorInfo t = tensor_named(c, l, stored[k].name, &unit);
            size_t n = tensor_elements(t);
            assert_int_equal(t.block_offset, next);
            assert_int_equal(n, stored[k].rows * c.C * (stored[k].cols ? stored[k].cols * c.C : 1));
            unit_init_weights(c, seed, unit, t.offset, t.offset + n, block + next);
            for (size_t e = next; e < next + n; e++) {
                float deviation = stored[k].deviation < 0 ? into_residual : 0.02f;
                float want = stored[k].deviation != 0 ? deviation * random_normal(seed, (uint64_t)(l + 1), e) : stored[k].mean;
                if (block[e] != want) fail_msg("block %d, %s: element %zu is %g, not %g", l, t.name, e, block[e], want);
            }
            next += n;
        }
        assert_int_equal(next, block_elements(c));
    }
    size_t next = 0;
    for (int i = 0; i < ROOT_TENSORS; i++) { // the root is one unit, and numbered as it lies in memory
        TensorInfo t = unit_tensor(c, 0, i);
        assert_true(t.block_offset == next && t.offset == next);
        next += tensor_elements(t);
    }
    TensorInfo wpe = unit_tensor(c, 0, WPE);
    float first;
    unit_init_weights(c, seed, 0, wpe.offset, wpe.offset + 1, &first);
    assert_true(first == 0.02f * random_normal(seed, 0, 2 * (size_t)c.C));
}

// A part of a unit, of one part all of it: its size is that of its tensors' runs; those without columns are not decayed.
TEST(tensors_tile_their_unit_and_the_first_ones_are_not_decayed_also_of_a_part) {
    GPT2Config c = { 16, 300, 384, 3, 12, 48 };
    for (int parts = 1; parts <= 4; parts++) {
        size_t all = 0;
        for (int u = 0; u < gpt2_num_units(c); u++) {
            size_t n = 0, vectors = 0;
            for (int i = 0; i < unit_tensors(u); i++) {
                TensorInfo t = unit_tensor(c, u, i);
                TensorRuns r = tensor_part(c, u, i, parts - 1, parts);
                assert_true(t.offset == n || parts > 1);
                assert_int_equal(tensor_part_elements(t, parts), r.n * r.count);
                n += r.n * r.count;
                if (t.cols == 0) vectors = n; // they come first, or this is more than no_decay
            }
            ParamRange p = param_range_part(c, u, parts - 1, parts);
            assert_true(p.begin == 0 && p.n == n && p.no_decay == vectors && unit_part_elements(c, u, parts) == n);
            if (parts == 1) assert_true(unit_elements(c, u) == n && unit_no_decay(c, u) == vectors);
            all += n;
        }
        if (parts == 1) assert_int_equal(gpt2_num_elements(c), all);
    }
    assert_string_equal(unit_tensor(c, mlp_unit(2), FCPROJW).name, "h.2.fcproj.weight");
    assert_int_equal(unit_tensor(c, 0, WTE).stored_rows, 300);
}

TEST(parts_that_do_not_divide_are_refused) {
    static const struct { int part, parts; const char *says, *more; } cases[] = {
        { 0, 4, "6 heads do not divide over 4 parts; choose --heads as a multiple of 4", "" },
        { 0, 3, "a vocabulary of 256 tokens (--vocab-size", "does not divide over 3 parts" }, { 0, 0, "cannot be cut into 0 parts", "" },
        { 2, 2, "there is no part 2 of 2", "" }, { -1, 2, "there is no part -1 of 2", "" } };
    GPT2Config c = { 24, 130, 256, 3, 6, 12 };
    for (int i = 0; i < 5; i++) expect_error(tensor_part(c, attention_unit(0), LN1W, cases[i].part, cases[i].parts), cases[i].says, cases[i].more);
}
