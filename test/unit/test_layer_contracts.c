// test_layer_contracts.c - sizes that the contracts of layers and of compressed gradients promise, what they and experts refuse, and
// that layers free what they have allocated. Numbers are compared in test/kernels/check_layers.py.
#include "../../llmc/device/compress.h"
#include "../../llmc/device/experts.h"
#include "expect_death.h"
#include "unit.h"

TEST(chunks_of_the_classifier_are_alike_and_as_few_as_their_limit_allows) {
    for (int most = 64; most <= 64 * 7; most += 64)
        for (int N = 1; N < 3000; N += 7) {
            int rows = classifier_rows(N, classifier_elements / most), chunks = (N + rows - 1) / rows, last = N - (chunks - 1) * rows;
            assert_int_equal(chunks, (N + most - 1) / most);
            assert_true(rows <= most && (rows == N || rows % 64 == 0));
            assert_true(rows - last < 64 * chunks); // rounded up to 64 rows, each chunk takes at most 63 of the last one's
        }
    assert_int_equal(classifier_rows(100, classifier_elements), 64);
    assert_int_equal(classifier_rows(0, classifier_elements), 0);
}
TEST(a_gpu_computes_more_logits_at_a_time_the_more_memory_it_has_unless_bits_must_not_depend_on_it) {
    const double GB[] = { 4, 24, 34.2, 34.4, 40, 48, 68.7, 68.8, 80, 192 };
    const int power[] = { 28, 28, 28, 29, 29, 29, 29, 30, 30, 30 };
    for (int i = 0; i < 10; i++) {
        assert_int_equal(classifier_elements_cuda(1e9 * GB[i], false), 1 << power[i]);
        assert_int_equal(classifier_elements_cuda(1e9 * GB[i], true), 1 << 28);
    }
}
TEST(packed_rows_are_whole_16_bytes) {
    assert_int_equal(quantised_bytes(256, 8), 260);
    assert_int_equal(quantised_bytes(257, 4), 264);
    assert_int_equal(quantised_bytes(0, 8), 0);
    for (int bits = 4; bits <= 8; bits += 4) assert_int_equal(quantised_bytes(PACKED_ROW, bits) % 16, 0);
    assert_int_equal(signs_bytes(96), 16);
    assert_int_equal(signs_bytes(97), 32);
    assert_int_equal(top_k_count(1000, 0.01), 10);
    assert_int_equal(top_k_count(5, 0.01), 1);
    assert_int_equal(top_k_count(5, 1), 5);
    assert_int_equal(sparse_bytes(3), 32);
}
TEST(a_comparison_is_an_error_a_ratio_of_norms_and_a_cosine) {
    Comparison c = { 16 + 9, 25, 15 }, none = { 0, 0, 0 }; // (4,3) and (0,5)
    assert_near(comparison_error(c), sqrt(20.0 / 25), 1e-12);
    assert_near(comparison_norm_ratio(c), 1, 1e-12);
    assert_near(comparison_cosine(c), 0.6, 1e-12);
    assert_true(comparison_error(none) == 0 && comparison_norm_ratio(none) == 0 && comparison_cosine(none) == 0);
}
TEST(what_cannot_be_done_is_refused) {
    float x[300] = { 0 };
    char packed[1024] = { 0 };
    expect_error(token_range(10, 3, 0), "10 tokens of the padded vocabulary do not divide into 3 parts");
    expect_error(quantise(packed, NULL, x, DTYPE_F32, NULL, 300, 5), "8 or 4 bits a number, not 5");
    expect_error(dequantise_sum(x, DTYPE_F32, packed, 1, 300, 5), "8 or 4 bits a number, not 5");
    expect_error(pack_top_k(packed, NULL, x, 300, 0), "the 0 largest of 300");
    expect_error(pack_top_k(packed, NULL, x, 3, 4), "the 4 largest of 3");
}
TEST(experts_that_cannot_be_chosen_or_counted_are_refused) {
    floatX inp[4] = { 0 }, w[4] = { 0 };
    float probs[8], weights[8];
    int chosen[8] = { 0 }, counts[8];
    expect_error(router_forward(probs, chosen, weights, inp, w, NULL, 1, 2, 2, 3), "cannot choose 3 of 2 experts");
    expect_error(router_forward(probs, chosen, weights, inp, w, NULL, 1, 2, 2, 0), "cannot choose 0 of 2 experts");
    expect_error(router_forward(probs, chosen, weights, inp, w, NULL, 1, 2, 257, 1), "1 to 256 experts, not 257");
    expect_error(router_backward(inp, w, probs, weights, NULL, probs, chosen, weights, inp, w, 1, 2, 0, 1, GRAD_SET),
                 "1 to 256 experts, not 0");
    expect_error(experts_sort(counts, chosen, chosen, 1 << 30, 4, 2, 0), "1073741824 tokens with 2 experts each");
    expect_error(experts_sort(counts, chosen, chosen, 1, 4, 2, 1 << 30), "4 experts with a capacity of 1073741824");
    expect_error(experts_sort(counts, chosen, chosen, 1, 4, 2, -1), "4 experts with a capacity of -1");
}
// A debug build finds what is still allocated when the process ends.
TEST(layers_free_what_they_have_allocated) {
    static floatX inp[40 * 33], w[65 * 33], bias[65], out[40 * 65];
    for (int twice = 0; twice < 2; twice++) {
        device_init(0, 1);
        layers_init(layer_shapes(2, 20, 33, 3, 65, 1));
        matmul_forward(out, inp, w, bias, 40, 33, 65);
        matmul_backward_weight(w, bias, out, inp, 40, 33, 65, GRAD_ADD);
        layers_free();
        device_shutdown();
    }
    assert_int_equal(device_memory_total(), 0);
}
