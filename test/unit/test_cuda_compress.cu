/*
test_cuda_compress.cu - the kernels that compress gradients against the CPU's, on a GPU or under the emulator. As in
test_cuda_kernels.cu each kernel runs twice and must leave the same bits. What the contract says is the same bits on every
device is compared with the CPU's to the bit.
*/
#include "../../llmc/device/cuda/compress.cuh"
#include "cuda_both.h"

namespace cpu { extern "C" {
OF_CPU(add_error) OF_CPU(scale_in_place_fp32) OF_CPU(round_16) OF_CPU(widen_16) OF_CPU(quantise) OF_CPU(quantise_fp32)
OF_CPU(dequantise_sum) OF_CPU(dequantise_sum_fp32) OF_CPU(pack_signs) OF_CPU(unpack_signs_sum) OF_CPU(unpack_signs_sum_fp32)
OF_CPU(pack_top_k) OF_CPU(sparse_sum_fp32) OF_CPU(skinny_product) OF_CPU(skinny_product_transposed) OF_CPU(orthonormalise)
OF_CPU(low_rank_apply) OF_CPU(momentum_with_error) OF_CPU(adamw_update_frozen) OF_CPU(add_comparison)
} }

static void start(void) { start_both({ 1, 1, 1, 1, 1, 1 }, COMPRESS_WORKSPACE); }
// n bytes that are to be overwritten
static Both<uint32_t> unset_bytes(size_t n) { return both_of(std::vector<uint32_t>(n / 4, 0xa5a5a5a5)); }
template <typename T> static void expect_the_cpus_bits(const char* what, const Both<T>& b) {
    expect_bits(what, result_of(b), std::vector<T>(b.cpu, b.cpu + b.n));
}
// Some elements are 0, large, tiny, or equal in magnitude; both signs occur.
static Both<float> varied_both(size_t n, size_t offset = 0) {
    std::vector<float> x(n);
    next_stream++;
    for (size_t i = 0; i < n; i++) {
        x[i] = random_normal(42, next_stream, i);
        if (i % 7 == 3) x[i] = roundf(x[i]);
        if (i / 256 % 5 == 1) x[i] *= 1e-3f;
        if (i / 256 % 5 == 2) x[i] = 0;
    }
    return both_of(x, offset);
}

// ---- the error, 16 bits ----
static void check_16_bits(size_t n) {
    start();
    Both<floatX> g = random_both(n, 0, 1e-3f), back = unset_both(n);
    Both<float> error = random_both<float>(n, 0, 1e-4f), x = unset_both<float>(n), kept = unset_both<float>(n);
    cpu::add_error(x.cpu, g.cpu, error.cpu, n);
    run_twice("add_error", [&] { add_error(x.gpu, g.gpu, error.gpu, n); }, x);
    expect_the_cpus_bits("add_error", x);
    cpu::add_error(x.cpu, g.cpu, NULL, n);
    add_error(x.gpu, g.gpu, NULL, n);
    expect_the_cpus_bits("add_error without an error", x);
    cpu::scale_in_place_fp32(x.cpu, 0.3f, n);
    scale_in_place_fp32(x.gpu, 0.3f, n);
    expect_the_cpus_bits("scale_in_place_fp32", x);
    for (DType to : { DTYPE_BF16, DTYPE_F16 }) {
        Both<uint16_t> out = both_of(std::vector<uint16_t>(n, 0xa5a5));
        cpu::round_16(out.cpu, kept.cpu, g.cpu, error.cpu, to, 3000, n);
        run_twice("round_16", [&] { round_16(out.gpu, kept.gpu, g.gpu, error.gpu, to, 3000, n); }, out, kept);
        expect_the_cpus_bits("round_16", out);
        expect_the_cpus_bits("what round_16 keeps", kept);
        cpu::widen_16(back.cpu, out.cpu, to, 1 / 3000.0f, n);
        widen_16(back.gpu, out.gpu, to, 1 / 3000.0f, n);
        expect_the_cpus_bits("widen_16", back);
        cpu::round_16(out.cpu, NULL, g.cpu, NULL, to, 1, n);
        round_16(out.gpu, NULL, g.gpu, NULL, to, 1, n);
        expect_the_cpus_bits("round_16 without an error", out);
    }
}
TEST(16_bits) {
    check_16_bits(1);
    check_16_bits(1000);
}

// ---- blocks ----
static void check_blocks(size_t n, int bits) {
    start();
    size_t words = quantised_bytes(n, bits) / 4;
    Both<floatX> g = random_both(n), out = unset_both(n);
    Both<float> error = varied_both(n), kept = unset_both<float>(n), sum = unset_both<float>(n);
    Both<uint32_t> rows = unset_bytes(3 * words * 4);
    for (int row = 0; row < 3; row++) { // with and without an error, keeping it or not
        cpu::quantise(rows.cpu + row * words, row == 2 ? NULL : kept.cpu, g.cpu, row == 1 ? NULL : error.cpu, n, bits);
        quantise(rows.gpu + row * words, row == 2 ? NULL : kept.gpu, g.gpu, row == 1 ? NULL : error.gpu, n, bits);
        expect_the_cpus_bits("what quantise keeps", kept);
    }
    expect_the_cpus_bits("rows of blocks", rows);
    Both<uint32_t> one = unset_bytes(words * 4);
    Both<float> x = varied_both(n);
    cpu::quantise_fp32(one.cpu, x.cpu, x.cpu, error.cpu, n, bits);
    run_twice("quantise_fp32", [&] { quantise_fp32(one.gpu, x.gpu, x.gpu, error.gpu, n, bits); }, one, x);
    expect_the_cpus_bits("blocks of fp32", one);
    expect_the_cpus_bits("what quantise_fp32 keeps", x);
    cpu::dequantise_sum(out.cpu, rows.cpu, 3, n, bits);
    cpu::dequantise_sum_fp32(sum.cpu, rows.cpu, 3, n, bits);
    run_twice("dequantise_sum", [&] {
        dequantise_sum(out.gpu, rows.gpu, 3, n, bits);
        dequantise_sum_fp32(sum.gpu, rows.gpu, 3, n, bits);
    }, out, sum);
    expect_the_cpus_bits("dequantise_sum", out);
    expect_the_cpus_bits("dequantise_sum_fp32", sum);
}
TEST(blocks) {
    for (size_t n : { 1, 255, 256, 257, 3000 }) {
        check_blocks(n, 8);
        check_blocks(n, 4);
    }
    for (int array = 0; array < 5 && !quick; array++) { // one of them at an odd address
        unaligned_array = array;
        check_blocks(600, 8);
        check_blocks(600, 4);
    }
    unaligned_array = -1;
}
TEST(blocks_hide_no_inf_or_nan) {
    start();
    const size_t n = 1024;
    for (int bits : { 4, 8 }) {
        std::vector<float> numbers(n);
        for (size_t i = 0; i < n; i++) numbers[i] = (float)(i % 256) * 0x1p-149f;
        numbers[300] = INFINITY;
        numbers[600] = -NAN;
        Both<float> x = both_of(numbers), kept = unset_both<float>(n), back = unset_both<float>(n);
        Both<uint32_t> packed = unset_bytes(quantised_bytes(n, bits));
        cpu::quantise_fp32(packed.cpu, kept.cpu, x.cpu, NULL, n, bits);
        quantise_fp32(packed.gpu, kept.gpu, x.gpu, NULL, n, bits);
        dequantise_sum_fp32(back.gpu, packed.gpu, 1, n, bits);
        expect_the_cpus_bits("blocks", packed);
        std::vector<float> got = result_of(back), left = result_of(kept);
        for (size_t i = 0; i < n; i++) {
            bool lost = i / 256 == 1 || i / 256 == 2;
            expect(lost ? isnan(got[i]) : got[i] + left[i] == numbers[i], "element %zu is %g", i, number(got[i]));
        }
    }
}

// ---- signs ----
static void check_signs(size_t n, SignScale kind) {
    start();
    size_t words = signs_bytes(n) / 4;
    Both<uint32_t> rows = unset_bytes(3 * words * 4);
    Both<float> x = varied_both(n), kept = unset_both<float>(n), sum = unset_both<float>(n);
    Both<floatX> out = unset_both(n);
    for (int row = 0; row < 3; row++) {
        Both<float> next = row == 0 ? x : random_both<float>(n);
        float* keep_cpu = row == 2 ? next.cpu : kept.cpu;
        float* keep_gpu = row == 2 ? next.gpu : kept.gpu;
        cpu::pack_signs(rows.cpu + row * words, keep_cpu, next.cpu, n, kind);
        pack_signs(rows.gpu + row * words, keep_gpu, next.gpu, n, kind);
        expect_near("what pack_signs keeps", row == 2 ? next : kept, 4);
    }
    std::vector<uint32_t> got = result_of(rows);
    for (size_t w = 0; w < 3 * words; w++) {
        float scale, want;
        memcpy(&scale, &got[w], 4);
        memcpy(&want, &rows.cpu[w], 4);
        if (w % words == 0) expect(fabs(scale - want) <= 4e-7 * want, "a scale is %g, not %g", number(scale), number(want));
        else expect(got[w] == rows.cpu[w], "word %zu of %zu differs", w, 3 * words);
    }
    std::copy(got.begin(), got.end(), rows.cpu); // the same scales
    cpu::unpack_signs_sum(out.cpu, rows.cpu, 3, n);
    cpu::unpack_signs_sum_fp32(sum.cpu, rows.cpu, 3, n);
    run_twice("unpack_signs_sum", [&] {
        unpack_signs_sum(out.gpu, rows.gpu, 3, n);
        unpack_signs_sum_fp32(sum.gpu, rows.gpu, 3, n);
    }, out, sum);
    expect_the_cpus_bits("unpack_signs_sum", out);
    expect_the_cpus_bits("unpack_signs_sum_fp32", sum);
    Both<uint32_t> one = unset_bytes(words * 4);
    run_twice("pack_signs", [&] { pack_signs(one.gpu, NULL, x.gpu, n, kind); }, one);
    expect_bits("pack_signs without an error", result_of(one), std::vector<uint32_t>(got.begin(), got.begin() + words));
}
TEST(signs) {
    for (SignScale kind : { SIGN_MEAN, SIGN_RMS })
        for (size_t n : { 1, 31, 32, 33, 256, 3000 }) check_signs(n, kind);
}

// ---- the k largest ----
static void check_top_k(Both<float> x, size_t k) {
    size_t n = x.n;
    Both<uint32_t> packed = unset_bytes(sparse_bytes(k));
    Both<float> kept = unset_both<float>(n), in_place = both_of(x.start);
    cpu::pack_top_k(packed.cpu, kept.cpu, x.cpu, n, k);
    run_twice("pack_top_k", [&] { pack_top_k(packed.gpu, kept.gpu, x.gpu, n, k); }, packed, kept);
    expect_the_cpus_bits("pack_top_k", packed);
    expect_the_cpus_bits("what top_k keeps", kept);
    pack_top_k(packed.gpu, in_place.gpu, in_place.gpu, n, k);
    expect_bits("top_k in place", result_of(in_place), std::vector<float>(kept.cpu, kept.cpu + n));
}
TEST(top_k) {
    for (size_t n : { 1, 33, 3000 }) {
        start();
        for (size_t k : { (size_t)1, ceil_div(n, 10), ceil_div(n, 2), n }) check_top_k(varied_both(n), k);
    }
    start();
    std::vector<float> close(5000), zeros(700);
    for (size_t i = 0; i < close.size(); i++) { // magnitudes that differ in the lowest digit alone, many of them equal
        uint32_t bits = 0x3f800000 + (uint32_t)(random_uniform(3, 0, i) * 20) + (i % 2 ? 0x80000000 : 0);
        memcpy(&close[i], &bits, 4);
    }
    close[4000] = -NAN;
    close[4001] = INFINITY;
    for (size_t k : { 1, 2, 1300, 4999 }) check_top_k(both_of(close), k);
    check_top_k(both_of(zeros), 300);
    if (quick) return;
    start();
    check_top_k(varied_both(140000), 15000); // blocks of several tiles
}
TEST(sparse_sum) {
    start();
    const size_t n = 3000, k = 500;
    Both<uint32_t> rows = unset_bytes(3 * sparse_bytes(k));
    Both<float> sum = unset_both<float>(n);
    for (int row = 0; row < 3; row++) {
        Both<float> x = random_both<float>(n);
        cpu::pack_top_k(rows.cpu + row * 2 * k, NULL, x.cpu, n, k);
        pack_top_k(rows.gpu + row * 2 * k, NULL, x.gpu, n, k);
    }
    cpu::sparse_sum_fp32(sum.cpu, rows.cpu, 3, n, k);
    run_twice("sparse_sum_fp32", [&] { sparse_sum_fp32(sum.gpu, rows.gpu, 3, n, k); }, sum);
    expect_the_cpus_bits("sparse_sum_fp32", sum);
}

// ---- matrices of low rank ----
static void check_transposed(int n, int k, int r) {
    start();
    Both<float> m = random_both<float>((size_t)n * k), p = random_both<float>((size_t)n * r);
    Both<float> mtp = unset_both<float>((size_t)k * r);
    cpu::skinny_product_transposed(mtp.cpu, m.cpu, p.cpu, n, k, r);
    run_twice("skinny_product_transposed", [&] { skinny_product_transposed(mtp.gpu, m.gpu, p.gpu, n, k, r); }, mtp);
    expect_near("skinny_product_transposed", mtp, 4 + sqrt(n) / 4);
}
static void check_low_rank(int n, int k, int r) {
    check_transposed(n, k, r);
    start();
    size_t size = (size_t)n * k;
    Both<float> m = random_both<float>(size), p = random_both<float>((size_t)n * r), q = random_both<float>((size_t)k * r);
    Both<float> mq = unset_both<float>((size_t)n * r);
    Both<float> kept = unset_both<float>(size);
    Both<floatX> out = unset_both(size);
    cpu::skinny_product(mq.cpu, m.cpu, q.cpu, n, k, r);
    run_twice("skinny_product", [&] { skinny_product(mq.gpu, m.gpu, q.gpu, n, k, r); }, mq);
    expect_near("skinny_product", mq, 4 + sqrt(k) / 4);
    cpu::low_rank_apply(out.cpu, kept.cpu, m.cpu, p.cpu, q.cpu, 0.25f, n, k, r);
    run_twice("low_rank_apply", [&] { low_rank_apply(out.gpu, kept.gpu, m.gpu, p.gpu, q.gpu, 0.25f, n, k, r); }, out, kept);
    expect_near("low_rank_apply", out, 4);
    std::vector<floatX> sent = result_of(out);
    std::vector<float> left = result_of(kept);
    for (size_t i = 0; i < size; i++)
        expect(left[i] == m.start[i] - 0.25f * to_float(sent[i]), "what low_rank_apply keeps: element %zu", i);
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
    check_transposed(140, 1200, 300); // it would take three chunks of rows, and the workspace has room for two
}
static void check_orthonormalise(Both<float> p, int n, int r) {
    cpu::orthonormalise(p.cpu, n, r);
    run_twice("orthonormalise", [&] { orthonormalise(p.gpu, n, r); }, p);
    expect_near("orthonormalise", p, 64);
}
TEST(orthonormalise) {
    start();
    check_orthonormalise(random_both<float>(1), 1, 1);
    check_orthonormalise(random_both<float>(7 * 3), 7, 3);
    check_orthonormalise(random_both<float>(200 * 4, 0, 100), 200, 4);
    check_orthonormalise(both_of(std::vector<float>(50 * 4)), 50, 4); // the identity's columns
    check_orthonormalise(both_of(std::vector<float> { 0, 0, 2, 2 }), 2, 2);
    std::vector<float> twice(40 * 3);
    for (size_t i = 0; i < twice.size(); i++) twice[i] = random_normal(9, i % 3 == 2, i / 3) * (i % 3 == 1 ? 4 : 1);
    check_orthonormalise(both_of(twice), 40, 3); // column 1 is four times column 0
    std::vector<float> near(60 * 3);
    for (size_t i = 0; i < near.size(); i++) near[i] = 1 + 1e-4f * random_normal(10, i % 3, i / 3);
    Both<float> columns = both_of(near);
    orthonormalise(columns.gpu, 60, 3);
    std::vector<float> got = result_of(columns);
    for (int pair = 1; pair < 3; pair++) { // a single Gram-Schmidt would leave an angle
        double sum = 0;
        for (int row = 0; row < 60; row++) sum += number(got[row * 3]) * number(got[row * 3 + pair]);
        expect(fabs(sum) < 1e-6, "columns 0 and %d have a product of %g", pair, sum);
    }
    if (!quick) check_orthonormalise(random_both<float>(1500 * 3), 1500, 3); // more rows than threads
}

// ---- Adam with a frozen v ----
TEST(momentum) {
    start();
    const size_t n = 700;
    Both<float> m = random_both<float>(n), error = random_both<float>(n), x = unset_both<float>(n);
    Both<floatX> g = random_both(n);
    Both<float> grad_scale = both_of(std::vector<float> { 0.3f });
    for (const float* cpu_error : { (const float*)NULL, (const float*)error.cpu }) {
        const float* gpu_error = cpu_error != NULL ? error.gpu : NULL;
        cpu::momentum_with_error(x.cpu, m.cpu, g.cpu, grad_scale.cpu, cpu_error, 0.9, 0.25, n);
        momentum_with_error(x.gpu, m.gpu, g.gpu, grad_scale.gpu, gpu_error, 0.9, 0.25, n);
        expect_near("momentum_with_error", x, 4);
    }
}
TEST(adamw_with_a_frozen_v) {
    const AdamW a = { 1e-3, 0.9, 0.95, 1e-8, 0.1, 30 };
    for (size_t n : { 1, 700 }) {
        start();
        Both<float> master = random_both<float>(n), m = random_both<float>(n), v = random_both<float>(n, 5, 0.5f);
        Both<float> momentum = random_both<float>(n);
        for (size_t i = 2; i < n; i += 9) v.cpu[i] = 0; // there never was a gradient
        v = as_input(v);
        Both<floatX> params = NEEDS_MASTER ? unset_both(n) : random_both(n);
        for (float factor : { 0.0f, 0.5f }) { // 0: the step is skipped
            Both<float> grad_scale = both_of(std::vector<float> { factor });
            cpu::adamw_update_frozen(a, 20, params.cpu, NEEDS_MASTER ? master.cpu : NULL, m.cpu, v.cpu, momentum.cpu,
                                     grad_scale.cpu, n, n / 3);
            adamw_update_frozen(a, 20, params.gpu, NEEDS_MASTER ? master.gpu : NULL, m.gpu, v.gpu, momentum.gpu,
                                grad_scale.gpu, n, n / 3);
            if (factor == 0) expect_bits("a skipped step's m", result_of(m), m.start);
            if (factor == 0) expect_bits("a skipped step's parameters", result_of(params), params.start);
            if (factor == 0) expect_bits("a skipped step's master weights", result_of(master), master.start);
        }
        expect_near("master weights", master, 4);
        expect_near("parameters", params, 4);
        expect_the_cpus_bits("m", m);
        expect_bits("v", result_of(v), v.start);
    }
}

// ---- comparison ----
TEST(comparison) {
    for (size_t n : { 1, 33, 5000 }) {
        start();
        Both<floatX> x = random_both(n);
        Both<float> y = random_both<float>(n);
        Both<double> acc = both_of(std::vector<double> { 1, 2, 3 });
        cpu::add_comparison((Comparison*)acc.cpu, x.cpu, y.cpu, n);
        run_twice("add_comparison", [&] { add_comparison((Comparison*)acc.gpu, x.gpu, y.gpu, n); }, acc);
        std::vector<double> got = result_of(acc);
        for (int i = 0; i < 3; i++)
            expect(fabs(got[i] - acc.cpu[i]) <= 1e-12 * (acc.cpu[0] + acc.cpu[1]),
                   "sum %d is %.17g, not %.17g", i, got[i], acc.cpu[i]);
    }
}
