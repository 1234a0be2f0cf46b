// test_compress.c - what compresses gradients, against definitions written here a second time and naively. Compiled once for
// each precision. What is sent plus what is kept must be what there was, whatever the method.
#include "../../llmc/device/compress.h"
#include "arrays.h"
#include "expect_death.h"

static floatX* random_gradients(size_t n, float std) { return random_tensor(n, 0, std).x; }
static floatX* unset_gradients(size_t n) { return unset_tensor(n).x; }
// Bytes that a call is to overwrite, all of them.
static void* unset_bytes(size_t n) { return memset(own(n, 1), 0xa5, n); }
static double largest_float(const float* x, size_t n) {
    double m = 0;
    for (size_t i = 0; i < n; i++) m = fmax(m, (double)fabsf(x[i]));
    return m;
}
static uint64_t results; // a hash of those that must not depend on the number of threads
static void note(const void* p, size_t bytes) { results = hash_bytes(results, p, bytes); }
static const size_t lengths[] = { 1, 2, 31, 33, 255, 256, 257, 1000, 40001 };
#define LENGTHS ((int)(COUNT(lengths)))

// ---- 16 bits ----
TEST(numbers_are_rounded_to_bf16_and_the_rest_is_kept) {
    const size_t n = 1000;
    floatX* g = random_gradients(n, 1e-6f);
    float *error = random_floats(n, 1e-7f), *kept = unset_floats(n), *x = unset_floats(n);
    uint16_t* out = unset_bytes(2 * n);
    floatX* back = unset_gradients(n);
    add_error(x, g, error, n);
    for (size_t i = 0; i < n; i++) assert_true(x[i] == to_float(g[i]) + error[i]);
    round_bf16(out, kept, g, error, n);
    widen_bf16(back, out, n);
    for (size_t i = 0; i < n; i++) {
        float sent = float_from_bf16_bits(out[i]);
        expect_near("sent", (double)sent, (double)x[i], (double)fabsf(x[i]) / 256 + 1e-12);
        assert_true(kept[i] == x[i] - sent);
        assert_true(to_float(back[i]) == to_float(to_floatX(sent)));
    }
    float* in_place = copy_of(error, n);
    round_bf16(out, in_place, g, in_place, n);
    assert_memory_equal(in_place, kept, n * sizeof(float));
    round_bf16(out, NULL, g, NULL, n);
    for (size_t i = 0; i < n; i++) assert_int_equal(out[i], bf16_bits_from_float(to_float(g[i])));
}

// ---- blocks ----
// Element i of a row, from the layout that the contract describes.
static float packed_element(const void* packed, size_t i, int bits, float* scale) {
    const unsigned char* block = (const unsigned char*)packed + i / 256 * (4 + 32 * (size_t)bits);
    int at = (int)(i % 256), number;
    memcpy(scale, block, 4);
    if (bits == 8) number = block[4 + at] < 128 ? block[4 + at] : block[4 + at] - 256;
    else {
        number = block[4 + at / 2] >> (at % 2 ? 4 : 0) & 15;
        if (number > 7) number -= 16;
    }
    return *scale * (float)number;
}
static void check_blocks(size_t n, int bits) {
    size_t row = quantised_bytes(n, bits);
    floatX *g = random_gradients(n, 0.5f), *out = unset_gradients(n);
    float *error = random_floats(n, 0.1f), *kept = unset_floats(n), *x = unset_floats(n), *sum = unset_floats(n), *three = unset_floats(n);
    char *packed = unset_bytes(3 * row), *again = unset_bytes(row); // three rows, and another way to the first
    float scale, ignored;
    double want = 0; // the scale of a block
    add_error(x, g, error, n);
    quantise(packed, kept, g, FLOATX_DTYPE, error, n, bits);
    for (size_t r = 1; r < 3; r++) quantise(packed + r * row, NULL, random_floats(n, 1), DTYPE_F32, NULL, n, bits);
    dequantise_sum(sum, DTYPE_F32, packed, 1, n, bits);
    dequantise_sum(three, DTYPE_F32, packed, 3, n, bits);
    dequantise_sum(out, FLOATX_DTYPE, packed, 3, n, bits);
    note(packed, row);
    note(kept, n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        float sent = packed_element(packed, i, bits, &scale), total = sent;
        for (size_t r = 1; r < 3; r++) total += packed_element(packed + r * row, i, bits, &ignored);
        if (i % 256 == 0) want = largest_float(x + i, size_min(256, n - i)) / (bits == 8 ? 127 : 7);
        expect_near("the scale", (double)scale, want, 1e-7 * want);
        expect_near("the round trip", (double)sent, (double)x[i], 0.500001 * (double)scale);
        assert_true(kept[i] == x[i] - sent && sum[i] == sent);
        assert_true(three[i] == total && to_float(out[i]) == to_float(to_floatX(total)));
    }
    for (size_t i = n; i < round_up(n, 256); i++) assert_true(packed_element(packed, i, bits, &ignored) == 0); // padding
    for (size_t i = 256; i < n; i++) sum[i] = NAN;
    if (n > 256) dequantise_sum(sum + 256, DTYPE_F32, packed + quantised_bytes(256, bits), 1, n - 256, bits); // cut between blocks
    for (size_t i = 256; i < n; i++) assert_true(sum[i] == packed_element(packed, i, bits, &ignored));
    float* in_place = copy_of(error, n);
    quantise(again, in_place, g, FLOATX_DTYPE, in_place, n, bits);
    assert_memory_equal(in_place, kept, n * sizeof(float));
    quantise(again, x, x, DTYPE_F32, NULL, n, bits);
    assert_memory_equal(again, packed, row);
    assert_memory_equal(x, kept, n * sizeof(float));
    quantise(again, NULL, g, FLOATX_DTYPE, NULL, n, bits);
    quantise(packed, kept, g, FLOATX_DTYPE, NULL, n, bits);
    assert_memory_equal(again, packed, row);
}
TEST(a_block_comes_back_within_half_a_scale_and_rows_of_blocks_are_summed_in_their_order) {
    for (int k = 0; k < LENGTHS; k++) {
        check_blocks(lengths[k], 8);
        check_blocks(lengths[k], 4);
        free_arrays();
    }
    assert_int_equal(quantised_bytes(256, 8), 260);
    assert_int_equal(quantised_bytes(257, 4), 264);
    assert_int_equal(quantised_bytes(0, 8), 0);
    for (int bits = 4; bits <= 8; bits += 4) assert_int_equal(quantised_bytes(PACKED_ROW, bits) % 16, 0);
}
TEST(blocks_of_zeros_of_tiny_numbers_and_of_none) {
    for (int bits = 4; bits <= 8; bits += 4) {
        float x[1024] = { 0 }, kept[1024], back[1024];
        char packed[4 * 260];
        for (int i = 256; i < 512; i++) x[i] = (float)(i - 256) * 0x1p-149f; // a scale this small has no digits
        x[600] = INFINITY;
        x[800] = NAN;
        quantise(packed, kept, x, DTYPE_F32, NULL, 1024, bits);
        dequantise_sum(back, DTYPE_F32, packed, 1, 1024, bits);
        for (int i = 0; i < 256; i++) assert_true(back[i] == 0 && kept[i] == 0);
        for (int i = 256; i < 512; i++) {
            assert_true(back[i] + kept[i] == x[i]);
            expect_near("a tiny number", (double)back[i], (double)x[i], 0x1p-149 * (bits == 8 ? 2 : 37));
        }
        for (int i = 512; i < 1024; i++) assert_true(isnan(back[i]));
    }
}

// ---- signs ----
static void check_signs(size_t n) {
    float *x = random_floats(n, 2), *kept = unset_floats(n), scale;
    floatX *out = unset_gradients(n), *three = unset_gradients(n);
    char* packed = unset_bytes(3 * signs_bytes(n));
    double want = 0;
    x[n / 2] = 0;
    for (size_t i = 0; i < n; i++) want += (double)fabsf(x[i]) / (double)n;
    for (int row = 0; row < 3; row++) pack_signs(packed + row * signs_bytes(n), kept, x, n);
    note(packed, signs_bytes(n));
    note(kept, n * sizeof(float));
    memcpy(&scale, packed, sizeof scale);
    expect_near("the scale", (double)scale, want, 1e-7 * want);
    unpack_signs_sum(out, packed, 1, n);
    unpack_signs_sum(three, packed, 3, n);
    for (size_t i = 0; i < n; i++) {
        float one = x[i] < 0 ? -scale : scale;
        assert_true(to_float(out[i]) == to_float(to_floatX(one)) && to_float(three[i]) == to_float(to_floatX(one + one + one)));
        assert_true(kept[i] == x[i] - one);
    }
    const uint32_t* words = (const uint32_t*)packed + 1;
    for (size_t i = n; i < round_up(n, 32); i++) assert_int_equal(words[i / 32] >> (i % 32) & 1, 0);
    pack_signs(packed, x, x, n); // in place
    assert_memory_equal(x, kept, n * sizeof(float));
}
TEST(signs_take_a_bit_each_and_have_one_scale) {
    for (int k = 0; k < LENGTHS; k++) {
        check_signs(lengths[k]);
        free_arrays();
    }
    assert_int_equal(signs_bytes(96), 16);
    assert_int_equal(signs_bytes(97), 32); // whole 16 bytes
    float x[3] = { 1, NAN, -1 };
    floatX sum[3];
    char packed[16];
    pack_signs(packed, NULL, x, 3);
    unpack_signs_sum(sum, packed, 1, 3);
    for (int i = 0; i < 3; i++) assert_true(isnan(to_float(sum[i])));
}

// ---- the k largest ----
static int descending(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return x < y ? 1 : x > y ? -1 : 0;
}
static void check_top_k(const float* x, size_t n, size_t k) {
    uint64_t* order = own(n, sizeof(uint64_t)); // the bits of |x|, above which are those of NaN; then from the first index to the last
    char* chosen = own(n, 1);
    float *kept = unset_floats(n), *in_place = copy_of(x, n);
    uint32_t *indices = unset_bytes(sparse_bytes(k)), bits;
    const float* values = (const float*)indices + k;
    for (size_t i = 0; i < n; i++) {
        memcpy(&bits, &x[i], sizeof bits);
        order[i] = (uint64_t)(bits & 0x7fffffff) << 32 | (UINT32_MAX - i);
    }
    qsort(order, n, sizeof *order, descending);
    for (size_t i = 0; i < k; i++) chosen[UINT32_MAX - (uint32_t)order[i]] = 1;
    pack_top_k(indices, kept, x, n, k);
    note(indices, sparse_bytes(k));
    note(kept, n * sizeof(float));
    for (size_t i = 0, sent = 0; i < n; i++) {
        if (!chosen[i]) assert_memory_equal(&kept[i], &x[i], sizeof(float));
        else {
            assert_true(kept[i] == 0 && indices[sent] == i);
            assert_memory_equal(&values[sent++], &x[i], sizeof(float));
        }
    }
    pack_top_k(indices, in_place, in_place, n, k);
    assert_memory_equal(in_place, kept, n * sizeof(float));
}
TEST(the_k_largest_are_found_and_equal_ones_by_their_index) {
    for (int l = 0; l < LENGTHS; l++) {
        size_t n = lengths[l], counts[4] = { 1, (n + 9) / 10, (n + 1) / 2, n };
        for (int k = 0; k < 4; k++) {
            float* x = random_floats(n, 1);
            check_top_k(x, n, counts[k]);
            for (size_t i = 0; i < n; i++) x[i] = roundf(2 * x[i]); // many ties, of either sign
            check_top_k(x, n, counts[k]);
            memset(x, 0, n * sizeof(float));
            check_top_k(x, n, counts[k]);
        }
        free_arrays();
    }
    // magnitudes that differ only in the lowest digit, a NaN and an infinity
    float x[6] = { 1, nextafterf(1, 2), -nextafterf(1, 2), 0.5f, -1, nextafterf(1, 0) };
    for (size_t k = 1; k <= 6; k++) check_top_k(x, 6, k);
    x[3] = -NAN;
    check_top_k(x, 6, 1);
    x[0] = INFINITY; // the NaN is above it
    for (size_t k = 1; k <= 2; k++) check_top_k(x, 6, k);
    assert_int_equal(top_k_count(1000, 0.01), 10);
    assert_int_equal(top_k_count(5, 0.01), 1);
    assert_int_equal(top_k_count(5, 1), 5);
    assert_int_equal(sparse_bytes(3), 32); // whole 16 bytes
}
TEST(rows_of_elements_are_summed_in_their_order) {
    const size_t n = 5000, k = 701; // 8 bytes behind each row
    char* packed = unset_bytes(3 * sparse_bytes(k));
    float *sum = unset_floats(n), *want = floats(n);
    for (size_t row = 0; row < 3; row++) {
        float *x = random_floats(n, 1), *kept = unset_floats(n);
        pack_top_k(packed + row * sparse_bytes(k), kept, x, n, k);
        for (size_t i = 0; i < n; i++) want[i] += x[i] - kept[i];
    }
    sparse_sum_fp32(sum, packed, 3, n, k);
    assert_memory_equal(sum, want, n * sizeof(float));
}

// ---- matrices of low rank ----
// The product of every step_a-th number of a and every step_b-th of b, n of each.
static double dot(const float* a, int step_a, const float* b, int step_b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)a[i * step_a] * (double)b[i * step_b];
    return sum;
}
static void check_products(int n, int k, int r) {
    float *m = random_floats(n * k, 1), *q = random_floats(k * r, 1), *p = random_floats(n * r, 1);
    float *mq = unset_floats(n * r), *mtp = unset_floats(k * r), *kept = unset_floats(n * k);
    floatX* out = unset_gradients(n * k);
    skinny_product(mq, m, q, n, k, r);
    skinny_product_transposed(mtp, m, p, n, k, r);
    low_rank_apply(out, kept, m, p, q, 0.25f, n, k, r);
    note(mq, n * r * sizeof(float));
    note(mtp, k * r * sizeof(float));
    note(out, n * k * sizeof(floatX));
    note(kept, n * k * sizeof(float));
    for (int i = 0; i < n * r; i++) {
        double want = dot(m + i / r * k, 1, q + i % r, r, k);
        expect_near("m q", (double)mq[i], want, 1e-6 * sqrt(k) + 1e-6 * fabs(want));
    }
    for (int i = 0; i < k * r; i++) {
        double want = dot(m + i / r, k, p + i % r, r, n);
        expect_near("m^T p", (double)mtp[i], want, 1e-6 * sqrt(n) + 1e-6 * fabs(want));
    }
    for (int i = 0; i < n * k; i++) {
        double want = dot(p + i / k * r, 1, q + i % k * r, 1, r);
        expect_near("p q^T", (double)to_float(out[i]), want, (NEEDS_MASTER ? 0.004 : 1e-6) * fabs(want) + 1e-6 * sqrt(r));
        assert_true(kept[i] == m[i] - 0.25f * to_float(out[i]));
    }
    low_rank_apply(out, m, m, p, q, 0.25f, n, k, r); // in place
    assert_memory_equal(m, kept, n * k * sizeof(float));
}
TEST(skinny_products) {
    check_products(1, 1, 1);
    check_products(5, 7, 2);
    check_products(40, 33, 4);
    check_products(100, 17, 9);
    check_products(19, 300, 19);
}
static void expect_orthonormal(const float* p, int n, int r) {
    for (int a = 0; a < r; a++)
        for (int b = 0; b <= a; b++) expect_near("a product of columns", dot(p + a, r, p + b, r, n), a == b, 1e-6);
}
static void check_orthonormal(int n, int r) {
    float *p = random_floats(n * r, 10), *before = copy_of(p, n * r);
    orthonormalise(p, n, r);
    note(p, n * r * sizeof(float));
    expect_orthonormal(p, n, r);
    double length = sqrt(dot(before, r, before, r, n)); // the first column keeps its direction
    expect_near("the first column", dot(before, r, p, r, n), length, 1e-6 * length);
}
TEST(columns_become_orthonormal) {
    const int shapes[][2] = { { 1, 1 }, { 7, 3 }, { 64, 4 }, { 1000, 16 }, { 12, 12 } };
    for (int s = 0; s < 5; s++) check_orthonormal(shapes[s][0], shapes[s][1]);
}
TEST(columns_that_depend_on_others_are_replaced) {
    const int n = 50, r = 4;
    float* p = random_floats(n * r, 1);
    for (int i = 0; i < n * r; i++) p[i] = i % r == 1 ? 3 * p[i - 1] : i % r == 3 ? 0 : p[i];
    orthonormalise(p, n, r);
    expect_orthonormal(p, n, r);
    memset(p, 0, n * r * sizeof(float));
    orthonormalise(p, n, r);
    for (int i = 0; i < n * r; i++) assert_true(p[i] == (i / r == i % r ? 1.0f : 0.0f));
    // the column of the identity whose turn it is may be there already
    float square[4] = { 0, 0, 2, 2 };
    orthonormalise(square, 2, 2);
    assert_true(square[0] == 0 && square[1] == 1 && square[2] == 1 && square[3] == 0);
    // nearly dependent: a single Gram-Schmidt would leave an angle
    for (int i = 0; i < n * r; i++) p[i] = 1 + 1e-4f * random_normal(5, i % r, i / r);
    orthonormalise(p, n, r);
    expect_orthonormal(p, n, r);
    p[5] = NAN;
    orthonormalise(p, n, r);
    assert_true(isnan(p[1]));
}
// ---- comparison ----
static void check_comparison(size_t n) {
    floatX* x = random_gradients(n, 1);
    float* y = random_floats(n, 1);
    Comparison got = { 1, 2, 3 }, want = { 1, 2, 3 };
    for (size_t i = 0; i < n; i++) {
        double a = (double)to_float(x[i]), b = (double)y[i];
        want.xx += a * a;
        want.yy += b * b;
        want.xy += a * b;
    }
    add_comparison(&got, x, y, n);
    note(&got, sizeof got);
    expect_near("x^2", got.xx, want.xx, 1e-12 * want.xx);
    expect_near("y^2", got.yy, want.yy, 1e-12 * want.yy);
    expect_near("x y", got.xy, want.xy, 1e-12 * (want.xx + want.yy));
}
TEST(comparison) {
    for (int k = 0; k < LENGTHS; k++) check_comparison(lengths[k]);
    Comparison c = { 16 + 9, 25, 15 }; // (4,3) and (0,5)
    expect_near("the error", comparison_error(c), sqrt(20.0 / 25), 1e-12);
    expect_near("the norms' ratio", comparison_norm_ratio(c), 1, 1e-12);
    expect_near("the cosine", comparison_cosine(c), 0.6, 1e-12);
    Comparison none = { 0, 0, 0 };
    assert_true(comparison_error(none) == 0 && comparison_norm_ratio(none) == 0 && comparison_cosine(none) == 0);
}

// ---- all of it ----
static uint64_t results_of(int threads) {
    const size_t n = 120000;
    omp_set_num_threads(threads);
    free_arrays(); // and begin with the same random numbers
    results = 0;
    check_blocks(n, 4);
    check_signs(n);
    check_top_k(random_floats(n, 1), n, n / 7);
    check_products(400, 300, 5);
    check_orthonormal(400, 5);
    check_comparison(n);
    return results;
}
TEST(results_are_the_same_for_any_number_of_threads) {
    int threads = omp_get_max_threads();
    uint64_t one = results_of(1);
    for (int n = 2; n <= 3; n++) assert_true(results_of(n) == one);
    omp_set_num_threads(threads);
}

TEST(what_cannot_be_done_is_refused) {
    float x[300] = { 0 };
    char packed[1024] = { 0 };
    expect_error(quantise(packed, NULL, x, DTYPE_F32, NULL, 300, 5), "8 or 4 bits a number, not 5");
    expect_error(dequantise_sum(x, DTYPE_F32, packed, 1, 300, 5), "8 or 4 bits a number, not 5");
    expect_error(pack_top_k(packed, NULL, x, 300, 0), "the 0 largest of 300");
    expect_error(pack_top_k(packed, NULL, x, 3, 4), "the 4 largest of 3");
}
