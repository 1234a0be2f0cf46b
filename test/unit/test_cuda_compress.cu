// test_cuda_compress.cu - the kernels that compress gradients against the CPU's, on a GPU or under the emulator. What the contract
// says is the same bits on every device is compared with the CPU's to the bit.
#include "../../llmc/device/cuda/compress.cuh"
#include "cuda_both.h"

namespace cpu { extern "C" {
OF_CPU(add_error) OF_CPU(scale_in_place_fp32) OF_CPU(round_bf16) OF_CPU(widen_bf16) OF_CPU(quantise) OF_CPU(dequantise_sum)
OF_CPU(pack_signs) OF_CPU(unpack_signs_sum) OF_CPU(pack_top_k) OF_CPU(sparse_sum_fp32) OF_CPU(skinny_product)
OF_CPU(skinny_product_transposed) OF_CPU(orthonormalise) OF_CPU(low_rank_apply) OF_CPU(add_comparison)
} }

static void start(void) { start_both(layer_shapes(1, 1, 1, 1, 1, 1), COMPRESS_WORKSPACE); }
void before_each(void) { start(); }
// n bytes that are to be overwritten
static Both<uint32_t> unset_bytes(size_t n) { return same_both<uint32_t>(n / 4, 0xa5a5a5a5); }
// Some elements are 0, large, tiny, or equal in magnitude; both signs occur.
static Both<float> varied_both(size_t n) {
    next_stream++;
    return made_both<float>(n, [](size_t i) {
        float x = random_normal(42, next_stream, i), size = i / 256 % 5 == 1 ? 1e-3f : i / 256 % 5 == 2 ? 0 : 1;
        return size * (i % 7 == 3 ? roundf(x) : x);
    });
}

// ---- the error, bf16 ----
TEST(rounded_to_bf16) {
    for (size_t n : { 1, 1000 }) {
        start();
        Both<floatX> g = random_both(n, 0, 1e-3f), back = unset_both(n);
        Both<float> error = random_both<float>(n, 0, 1e-4f), x = unset_both<float>(n), kept = unset_both<float>(n);
        SAME_BITS(add_error, x, g, error, n);
        SAME_BITS(add_error, x, g, none<float>, n);
        SAME_BITS(scale_in_place_fp32, as_input(x), 0.3f, n);
        Both<uint16_t> out = same_both<uint16_t>(n, 0xa5a5), alone = both_of(out.start);
        SAME_BITS(round_bf16, out, kept, g, error, n);
        SAME_BITS(round_bf16, alone, none<float>, g, none<float>, n);
        SAME_BITS(widen_bf16, back, out, n);
    }
}

// ---- blocks ----
static void check_blocks(size_t n, int bits) {
    start();
    size_t words = quantised_bytes(n, bits) / 4;
    Both<floatX> g = random_both(n), out = unset_both(n);
    Both<float> error = varied_both(n), kept = unset_both<float>(n), sum = unset_both<float>(n), x = varied_both(n);
    Both<uint32_t> rows = unset_bytes(3 * words * 4), one = unset_bytes(words * 4);
    for (int row = 0; row < 3; row++) // with and without an error, keeping it or not
        SAME_BITS(quantise, inside(rows, row * words, words), row == 2 ? none<float> : kept, g, FLOATX_DTYPE,
                  row == 1 ? none<float> : error, n, bits);
    expect_cpus_bits("rows of blocks", rows);
    SAME_BITS(quantise, one, x, x, DTYPE_F32, error, n, bits);
    SAME_BITS(dequantise_sum, out, FLOATX_DTYPE, rows, 3, n, bits);
    SAME_BITS(dequantise_sum, sum, DTYPE_F32, rows, 3, n, bits);
}
TEST(blocks) {
    for (int bits : { 8, 4 }) {
        for (size_t n : { 1, 255, 256, 257, 3000 }) check_blocks(n, bits);
        for (unaligned_array = 0; unaligned_array < 8 && !quick; unaligned_array++) check_blocks(600, bits); // one at an odd address
        unaligned_array = -1;
    }
}
TEST(blocks_hide_no_inf_or_nan) {
    const size_t n = 1024;
    for (int bits : { 4, 8 }) {
        Both<float> x = made_both<float>(n, [](size_t i) {
            return i == 300 ? INFINITY : i == 600 ? -NAN : (float)(i % 256) * 0x1p-149f;
        });
        Both<float> kept = unset_both<float>(n), back = unset_both<float>(n);
        Both<uint32_t> packed = unset_bytes(quantised_bytes(n, bits));
        BOTH(quantise, packed, kept, x, DTYPE_F32, none<float>, n, bits);
        expect_cpus_bits("blocks", packed);
        dequantise_sum(back.gpu, DTYPE_F32, packed.gpu, 1, n, bits);
        std::vector<float> got = result_of(back), left = result_of(kept);
        for (size_t i = 0; i < n; i++) {
            bool lost = i / 256 == 1 || i / 256 == 2;
            expect(lost ? isnan(got[i]) : got[i] + left[i] == x.start[i], "element %zu is %g", i, number(got[i]));
        }
    }
}

// ---- signs ----
// Returns rows of so many words, which have the CPU's signs and nearly its scales.
static std::vector<uint32_t> signs_like_the_cpus(const Both<uint32_t>& rows, size_t words) {
    std::vector<uint32_t> got = result_of(rows);
    for (size_t w = 0; w < got.size(); w++) {
        float scale, want;
        memcpy(&scale, &got[w], 4);
        memcpy(&want, &rows.cpu[w], 4);
        if (w % words == 0) expect(fabs(scale - want) <= 4e-7 * want, "a scale is %g, not %g", number(scale), number(want));
        else expect(got[w] == rows.cpu[w], "word %zu of %zu differs", w, got.size());
    }
    return got;
}
static void check_signs(size_t n) {
    start();
    size_t words = signs_bytes(n) / 4;
    Both<uint32_t> rows = unset_bytes(3 * words * 4), one = unset_bytes(words * 4);
    Both<float> x = varied_both(n), kept = unset_both<float>(n);
    for (int row = 0; row < 3; row++) {
        Both<float> next = row == 0 ? x : random_both<float>(n), left = row == 2 ? next : kept;
        BOTH(pack_signs, inside(rows, row * words, words), left, next, n);
        expect_near("what pack_signs keeps", left, 4);
    }
    std::vector<uint32_t> got = signs_like_the_cpus(rows, words);
    rows = both_of(got);
    SAME_BITS(unpack_signs_sum, unset_both(n), rows, 3, n);
    BOTH(pack_signs, one, none<float>, x, n);
    got.resize(words);
    expect_bits("pack_signs without an error", result_of(one), got);
}
TEST(signs) {
    for (size_t n : { 1, 31, 32, 33, 256, 3000 }) check_signs(n);
}
// ---- the k largest ----
static void check_top_k(Both<float> x, size_t k) {
    Both<uint32_t> packed = unset_bytes(sparse_bytes(k));
    SAME_BITS(pack_top_k, packed, unset_both<float>(x.n), x, x.n, k);
    SAME_BITS(pack_top_k, packed, x, x, x.n, k); // in place
}
TEST(top_k) {
    for (size_t n : { 1, 33, 3000 }) {
        start();
        for (size_t k : { (size_t)1, ceil_div(n, 10), ceil_div(n, 2), n }) check_top_k(varied_both(n), k);
    }
    start();
    Both<float> close = made_both<float>(5000, [](size_t i) { // magnitudes that differ in the lowest digit alone, many of them equal
        float x = 1 + floorf((float)random_uniform(3, 0, i) * 20) * 0x1p-23f;
        return i == 4000 ? -NAN : i == 4001 ? INFINITY : i % 2 ? -x : x;
    });
    for (size_t k : { 1, 2, 1300, 4999 }) check_top_k(close, k);
    check_top_k(same_both<float>(700, 0), 300);
    if (quick) return;
    start();
    check_top_k(varied_both(140000), 15000); // blocks of several tiles
}
TEST(sparse_sum) {
    const size_t n = 3000, k = 501, words = sparse_bytes(k) / 4; // 8 bytes behind each row
    Both<uint32_t> rows = unset_bytes(3 * sparse_bytes(k));
    for (int row = 0; row < 3; row++)
        SAME_BITS(pack_top_k, inside(rows, row * words, words), none<float>, random_both<float>(n), n, k);
    SAME_BITS(sparse_sum_fp32, unset_both<float>(n), rows, 3, n, k);
}

// ---- matrices of low rank ----
static void check_transposed(int n, int k, int r) {
    start();
    Both<float> m = random_both<float>((size_t)n * k), p = random_both<float>((size_t)n * r);
    NEAR(4 + sqrt(n) / 4, skinny_product_transposed, unset_both<float>((size_t)k * r), m, p, n, k, r);
}
static void check_low_rank(int n, int k, int r) {
    check_transposed(n, k, r);
    start();
    size_t size = (size_t)n * k;
    Both<float> m = random_both<float>(size), p = random_both<float>((size_t)n * r), q = random_both<float>((size_t)k * r);
    Both<float> kept = unset_both<float>(size);
    Both<floatX> out = unset_both(size);
    NEAR(4 + sqrt(k) / 4, skinny_product, unset_both<float>((size_t)n * r), m, q, n, k, r);
    BOTH(low_rank_apply, out, kept, m, p, q, 0.25f, n, k, r);
    expect_near("low_rank_apply", out, 4);
    std::vector<floatX> sent = result_of(out);
    std::vector<float> left = numbers<float>(size, [&](size_t i) { return m.start[i] - 0.25f * to_float(sent[i]); });
    expect_bits("what low_rank_apply keeps", result_of(kept), left);
    low_rank_apply(out.gpu, m.gpu, m.gpu, p.gpu, q.gpu, 0.25f, n, k, r);
    expect_bits("low_rank_apply in place", result_of(m), left);
    begin_again(m);
    low_rank_apply(out.gpu, NULL, m.gpu, p.gpu, q.gpu, 1, n, k, r);
    expect_bits("low_rank_apply without an error", result_of(m), m.start);
}
TEST(low_rank) {
    check_low_rank(1, 1, 1);
    check_low_rank(5, 7, 2);
    check_low_rank(130, 33, 4); // three chunks of rows, the last shorter
    check_low_rank(19, 300, 5); // two blocks of columns
    if (quick) return;
    check_low_rank(40, 600, 40);
    check_transposed(140, 1200, 600); // it would take three chunks of rows, and the workspace has room for two
}
TEST(orthonormalise) {
    NEAR(64, orthonormalise, random_both<float>(1), 1, 1);
    NEAR(64, orthonormalise, random_both<float>(7 * 3), 7, 3);
    NEAR(64, orthonormalise, random_both<float>(200 * 4, 0, 100), 200, 4);
    NEAR(64, orthonormalise, same_both<float>(50 * 4, 0), 50, 4); // the identity's columns
    NEAR(64, orthonormalise, both_of(std::vector<float> { 0, 0, 2, 2 }), 2, 2);
    NEAR(64, orthonormalise, made_both<float>(40 * 3, [](size_t i) { // column 1 is four times column 0
        return random_normal(9, i % 3 == 2, i / 3) * (i % 3 == 1 ? 4 : 1);
    }), 40, 3);
    Both<float> near = made_both<float>(60 * 3, [](size_t i) { return 1 + 1e-4f * random_normal(10, i % 3, i / 3); });
    NEAR(2e5, orthonormalise, near, 60, 3); // of what is left of columns 1 and 2, the CPU's fp32 has a thousandth wrong
    std::vector<float> got = result_of(near);
    for (int pair = 1; pair < 3; pair++) { // rounding once would leave an angle
        double sum = 0;
        for (int row = 0; row < 60; row++) sum += number(got[row * 3]) * number(got[row * 3 + pair]);
        expect(fabs(sum) < 1e-6, "columns 0 and %d have a product of %g", pair, sum);
    }
    NEAR(64, orthonormalise, random_both<float>(30 * 9), 30, 9); // three tiles of columns
    if (!quick) NEAR(64, orthonormalise, random_both<float>(1500 * 3), 1500, 3); // several chunks of rows
}

// ---- comparison ----
TEST(comparison) {
    for (size_t n : { 1, 33, 5000 }) {
        start();
        Both<floatX> x = random_both(n);
        Both<float> y = random_both<float>(n);
        Both<Comparison> sums = both_of(std::vector<Comparison> { { 1, 2, 3 } });
        BOTH(add_comparison, sums, x, y, n);
        Comparison got = result_of(sums)[0], want = sums.cpu[0];
        double most = fmax(fmax(fabs(got.xx - want.xx), fabs(got.yy - want.yy)), fabs(got.xy - want.xy));
        expect(most <= 1e-12 * (want.xx + want.yy), "a sum of %zu numbers is off by %g", n, most);
    }
}
