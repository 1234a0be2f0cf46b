// test_gpt2.c - llmc/model/gpt2.h: the number of parameters, the tensors in memory, the initial weights.
#include "../../llmc/model/gpt2.h"
#include "expect_death.h"

static GPT2Config named(const char* name) {
    GPT2Config c;
    memset(&c, 0, sizeof c);
    assert_true(gpt2_named_config(name, &c));
    if (c.max_T == 0) c.max_T = 64;
    c.V = GPT2_VOCABULARY;
    c.Vp = gpt2_padded_vocabulary(c.V);
    return c;
}

static void test_the_named_models_have_their_published_sizes(void** state) {
    (void)state;
    assert_int_equal(gpt2_num_parameters(named("gpt2")), 124439808);
    assert_int_equal(gpt2_num_parameters(named("gpt2-medium")), 354823168);
    assert_int_equal(gpt2_num_parameters(named("gpt2-large")), 774030080);
    assert_int_equal(gpt2_num_parameters(named("gpt2-xl")), 1557611200);
    assert_int_equal(unit_elements(named("gpt2"), 1), 7087872);
    assert_int_equal(named("gpt2").Vp, 50304);
    GPT2Config c = named("d12");
    assert_true(c.L == 12 && c.NH == 12 && c.C == 768);
    const char* not_models[] = { "d0", "d257", "d", "d4x", "gpt3", "" };
    for (int i = 0; i < 6; i++) assert_false(gpt2_named_config(not_models[i], &c));
}

static void test_tensors_tile_their_unit_and_the_first_ones_are_not_decayed(void** state) {
    (void)state;
    GPT2Config c = { 24, 130, 256, 3, 2, 12 };
    for (int u = 0; u <= c.L; u++) {
        size_t next = 0, vectors = 0;
        for (int i = 0; i < unit_tensors(u); i++) {
            TensorInfo t = unit_tensor(c, u, i);
            assert_int_equal(t.offset, next);
            next += tensor_elements(t);
            if (t.cols == 0) vectors = next; // they come first, or this is more than no_decay
        }
        assert_int_equal(next, unit_elements(c, u));
        assert_int_equal(vectors, unit_no_decay(c, u));
    }
    assert_string_equal(unit_tensor(c, 3, FCPROJW).name, "h.2.fcproj.weight");
    assert_int_equal(unit_tensor(c, 0, WTE).stored_rows, 130);
}

static void test_any_slice_of_the_initial_weights_is_that_of_the_whole(void** state) {
    (void)state;
    GPT2Config c = { 24, 130, 256, 3, 2, 12 };
    for (int u = 0; u <= 1; u++) {
        size_t n = unit_elements(c, u);
        float *whole = (float*)xcalloc(n, sizeof(float)), *slice = (float*)xcalloc(n, sizeof(float));
        unit_init_weights(c, 7, u, 0, n, whole);
        for (size_t begin = 0; begin < n; begin += 371) {
            size_t end = size_min(n, begin + 371 + begin % 5);
            unit_init_weights(c, 7, u, begin, end, slice);
            assert_memory_equal(slice, whole + begin, (end - begin) * sizeof(float));
        }
        free(whole);
        free(slice);
    }
}

// Mean and standard deviation of tensor i of unit u.
static void measure(GPT2Config c, int u, int i, double* mean, double* deviation) {
    TensorInfo t = unit_tensor(c, u, i);
    size_t n = tensor_stored_elements(t);
    float* w = (float*)xcalloc(n, sizeof(float));
    unit_init_weights(c, 1337, u, t.offset, t.offset + n, w);
    double sum = 0, squares = 0;
    for (size_t k = 0; k < n; k++) { sum += w[k]; squares += (double)w[k] * w[k]; }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
    free(w);
}

static void test_initial_weights_have_gpt2s_distribution(void** state) {
    (void)state;
    GPT2Config c = named("d4");
    double mean, deviation;
    for (int i = 0; i < BLOCK_TENSORS; i++) {
        bool gain = i == LN1W || i == LN2W, matrix = i >= QKVW;
        double expected = !matrix ? 0 : i == PROJW || i == FCPROJW ? 0.02 / sqrt(8) : 0.02;
        measure(c, 2, i, &mean, &deviation);
        assert_true(fabs(mean - gain) <= 3e-4 && fabs(deviation - expected) <= 0.01 * expected);
    }
    measure(c, 0, WTE, &mean, &deviation);
    assert_true(fabs(mean) <= 1e-4 && fabs(deviation - 0.02) <= 2e-4);
}

static void test_the_padding_of_the_vocabulary_is_zero(void** state) {
    (void)state;
    GPT2Config c = { 24, 130, 256, 3, 2, 12 };
    TensorInfo t = unit_tensor(c, 0, WTE);
    float w[256 * 12];
    unit_init_weights(c, 7, 0, t.offset, t.offset + tensor_elements(t), w);
    for (int k = 0; k < 130 * 12; k++) assert_true(w[k] != 0);
    for (int k = 130 * 12; k < 256 * 12; k++) assert_true(w[k] == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_named_models_have_their_published_sizes),
        cmocka_unit_test(test_tensors_tile_their_unit_and_the_first_ones_are_not_decayed),
        cmocka_unit_test(test_any_slice_of_the_initial_weights_is_that_of_the_whole),
        cmocka_unit_test(test_initial_weights_have_gpt2s_distribution),
        cmocka_unit_test(test_the_padding_of_the_vocabulary_is_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
