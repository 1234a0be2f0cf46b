// test_cuda_kernels.cu - every kernel of llmc/device/cuda/ against the CPU's layer, on a GPU or under the emulator.
#include "../../llmc/device/cuda/common.cuh"
#include "../../llmc/device/cuda/encoder.cuh"
#include "../../llmc/device/cuda/layernorm.cuh"
#include "../../llmc/device/cuda/bias_gelu.cuh"
#include "../../llmc/device/cuda/attention_choice.cuh"
#include "../../llmc/device/cuda/classifier.cuh"
#include "../../llmc/device/cuda/adamw.cuh"
#include "../../llmc/device/cuda/stats.cuh"
#include "cuda_both.h"

static void start(int B, int T, int C, int NH, int Vp) {
    LayerShapes s = layer_shapes(B, T, C, NH, Vp, 1);
    start_both(s, std::max({ encoder_workspace_bytes(s), layernorm_workspace_bytes(s), bias_workspace_bytes(s),
                             attention_own_workspace_bytes(s), STATS_BLOCKS * sizeof(double) }));
}

void before_each(void) { start(1, 1, 1, 1, 1); }

// ---- embeddings ----
// n tokens in [0,V), the first of which are the first and the last token of each part, as far as there are such.
static Both<int> tokens_at_edges(size_t n, int V, int Vp, int parts) {
    std::vector<int> random = random_tokens(n, V).start;
    int width = Vp / parts;
    return made_both<int>(n, [&](size_t i) {
        int edge = (int)(i / 2) * width + (i % 2 ? width - 1 : 0);
        return i / 2 < (size_t)parts && edge < V ? edge : random[i];
    });
}
static void check_encoder(int B, int T, int C, int V, int Vp, int parts) {
    start(B, T, C, 1, Vp);
    size_t n = (size_t)B * T * C;
    Both<int> tokens = tokens_at_edges((size_t)B * T, V, Vp, parts);
    Both<floatX> wte = random_both((size_t)Vp * C), wpe = random_both((size_t)T * C), whole = unset_both(n), dout = random_both(n);
    Both<floatX> out = unset_both(n), sum = same_both(n, 0);
    NEAR(0, encoder_forward, whole, tokens, wte, wpe, B, T, C);
    for (GradMode mode : both_modes) {
        Both<floatX> dwte = both_of(wte.start), dwpe = gradient_before((size_t)T * C, mode), part_dwpe = both_of(dwpe.start);
        BOTH(encoder_backward, dwte, dwpe, dout, tokens, B, T, C, mode);
        expect_near("encoder_backward's dwte", dwte, B * T);
        expect_near("encoder_backward's dwpe", dwpe, 0); // the same sum in the same order
        for (int q = 0; q < parts; q++) {
            TokenRange range = token_range(Vp, parts, q);
            size_t first = (size_t)range.first * C;
            Both<floatX> part = piece_of(wte, first, (size_t)range.count * C);
            std::vector<floatX> wanted = from_device(dwte.gpu + first, part.n);
            NEAR(0, encoder_part_forward, out, tokens, part, q == parts / 2 ? wpe : none<floatX>, range, B, T, C);
            if (mode == GRAD_SET) add_in_place(sum.gpu, out.gpu, n);
            BOTH(encoder_part_backward, part, part_dwpe, dout, tokens, range, B, T, C, mode);
            expect_bits("encoder_part_backward's dwte", result_of(part), wanted);
            expect_bits("encoder_part_backward's dwpe", result_of(part_dwpe), result_of(dwpe));
            BOTH(encoder_part_backward, part, nullptr, dout, tokens, range, B, T, C, mode);
            expect_bits("encoder_part_backward's dwte without dwpe", result_of(part), wanted);
        }
    }
    expect_bits("the sum of encoder_part_forward", result_of(sum), result_of(whole));
}
TEST(encoder_in_parts_has_the_bits_of_the_whole_and_that_the_cpus_numbers) {
    check_encoder(1, 1, 1, 1, 1, 1);
    check_encoder(2, 9, 7, 11, 12, 1);
    check_encoder(2, 9, 16, 11, 12, 2);
    check_encoder(2, 9, 7, 5, 12, 4);        // the last two parts have nothing but padding
    check_encoder(2, 150, 8, 2500, 2502, 2); // more tokens than threads in the prefix sum, more positions than a block takes
    check_encoder(3, 40, 304, 5, 6, 3);      // more channels than a block takes, tokens that occur often
    check_encoder(1, 3, 2056, 4, 4, 1);      // rows longer than a block
}

// ---- layernorm ----
static void check_layernorm(int N, int C, float mean_of_x) {
    start(1, N, C, 1, 1);
    size_t n = (size_t)N * C;
    // subtracting the mean magnifies roundings, most where rstd is largest
    double slack = (16 + 16 * fabs((double)mean_of_x)) * (C == 1 ? 400 : 1);
    Both<floatX> x1 = random_both(n, mean_of_x), x2 = random_both(n), w = random_both(C, 1, 0.5f), b = random_both(C, 0, 0.5f);
    Both<floatX> res = unset_both(n), out = unset_both(n), dout = random_both(n);
    Both<float> mean = unset_both<float>(N), rstd = unset_both<float>(N);
    BOTH(residual_layernorm_forward, res, out, mean, rstd, x1, x2, w, b, N, C);
    expect_near("the residual sum", res, 0);
    expect_near("layernorm's out", out, slack);
    expect_near("layernorm's mean", mean, 8);
    expect_near("layernorm's rstd", rstd, slack);

    std::vector<floatX> first = result_of(out);
    residual_layernorm_forward(res.gpu, out.gpu, mean.gpu, rstd.gpu, res.gpu, NULL, w.gpu, b.gpu, N, C);
    if (unaligned_array < 0) expect_bits("layernorm recomputed from the stored sum", result_of(out), first); // the same pieces

    for (GradMode mode : both_modes) {
        Both<floatX> dinp = random_both(n), dw = gradient_before(C, mode), db = gradient_before(C, mode);
        BOTH(layernorm_backward, dinp, dw, db, dout, res, w, as_input(mean), as_input(rstd), N, C, mode);
        expect_near("layernorm's dinp", dinp, slack);
        expect_near("layernorm's dw", dw, slack + 2 * sqrt(N));
        expect_near("layernorm's db", db, slack + 2 * sqrt(N));
    }
}
TEST(layernorm_adds_the_residual_and_normalises) {
    static const int shapes[][2] = { { 5, 19 }, { 1, 8 }, { 3, 1 }, { 40, 64 }, { 9, 776 } };
    for (const int* s : shapes) check_layernorm(s[0], s[1], 0);
    check_layernorm(3, 64, 100); // far from 0, where E[x^2] - E[x]^2 would cancel
    check_layernorm(1030, 257, 0); // backward's blocks take a row at a time, three times
    if (quick) return;
    check_layernorm(4101, 8, 0); // and here several, twice
    check_layernorm(515, 1031, 0); // rows that are too long for a block to keep
}
// Rows around each limit: of forward's shared memory, for eight rows and for one, and of what backward's threads keep.
TEST(layernorm_of_rows_around_its_limits) {
    const int eight = LAYERNORM_SHARED / 8 / sizeof(floatX), one = LAYERNORM_SHARED / sizeof(floatX);
    const int two = (int)LAYERNORM_THREADS / 2 * VEC, thread_each = 1024;
    for (int C : { two, thread_each }) {
        check_layernorm(3, C, 1);
        check_layernorm(3, C + 1, 1);
        check_layernorm(3, C + VEC, 1);
    }
    if (quick) return;
    for (int C : { eight, eight + VEC, 1024 * VEC, 1024 * VEC + VEC, one }) check_layernorm(9, C, 1);
}

// ---- bias and GELU after a matrix product ----
// The CPU does these inside its products: a product with the identity leaves only them.
static void check_bias_gelu(int N, int C) {
    start(1, N, C, 1, 1);
    size_t n = (size_t)N * C, row = (size_t)C + 1;
    Both<floatX> x = random_both(n, 0, 3), bias = random_both(C), w = made_both((size_t)C * C, [=](size_t i) { return i % row == 0; });
    Both<floatX> pre = unset_both(n), act = unset_both(n), out = both_of(x.start), dinp = random_both(n), dout = both_of(dinp.start);
    cpu::matmul_gelu_forward(act.cpu, pre.cpu, x.cpu, w.cpu, bias.cpu, N, C, C);
    memcpy(out.cpu, pre.cpu, n * sizeof(floatX));
    run_twice("bias_gelu_forward", [&] { bias_gelu_forward(act.gpu, out.gpu, bias.gpu, N, C); }, act, out);
    expect_near("the product plus bias", out, 0);
    expect_near("its gelu", act, 8);
    begin_again(out);
    bias_gelu_forward(NULL, out.gpu, bias.gpu, N, C);
    expect_near("the product plus bias, without gelu", out, 0);

    pre = as_input(pre);
    cpu::matmul_gelu_backward_input(dinp.cpu, dout.cpu, w.cpu, pre.cpu, N, C, C);
    run_twice("gelu_backward", [&] { gelu_backward(dinp.gpu, pre.gpu, N, C); }, dinp);
    expect_near("gelu's gradient", dinp, 8);
}
static void check_bias_backward(int N, int OC) {
    start(1, N, (OC + 3) / 4, 1, 1);
    Both<floatX> dout = random_both((size_t)N * OC), inp = random_both(N), dw = unset_both(OC);
    for (GradMode mode : both_modes) {
        Both<floatX> dbias = gradient_before(OC, mode);
        cpu::matmul_backward_weight(dw.cpu, dbias.cpu, dout.cpu, inp.cpu, N, 1, OC, mode);
        run_twice("bias_backward", [&] { bias_backward(dbias.gpu, dout.gpu, N, OC, mode); }, dbias);
        expect_near("a bias's gradient", dbias, 8 + 2 * sqrt(N));
    }
}
TEST(bias_and_gelu_follow_a_product_and_their_gradients_precede_one) {
    static const int shapes[][2] = { { 1, 1 }, { 5, 33 }, { 3, 64 }, { 2, 264 } };
    for (const int* s : shapes) check_bias_gelu(s[0], s[1]);
    check_bias_backward(1, 1);
    check_bias_backward(7, 9);
    check_bias_backward(130, 264); // more columns than a block
    if (!quick) check_bias_backward(8321, 8); // more rows than the smallest chunks hold
}

// ---- attention ----
// Tensor cores multiply 16-bit numbers, so P and dS are rounded: by at most ROUNDING |x|, and below fp16's normal numbers 2^-25.
static double rounded_off(double x) {
    return ATTENTION_ON_TENSOR_CORES ? ROUNDING * fabs(x) + (ROUNDING == 1.0 / 2048 ? ldexp(1, -25) : 0) : 0;
}
// How much this may change each element of out and of dqkv: a sum of x[i] y[i] changes by the sum of rounded_off(x[i]) |y[i]|.
// stats and out are the CPU's results.
typedef struct { std::vector<double> out, dqkv; } AttentionRounding;
static AttentionRounding attention_rounding(Both<floatX> qkv, Both<floatX> dout, Both<float> stats, Both<floatX> out,
                                            int T, int C, int NH) {
    int HS = C / NH;
    double scale = 1 / sqrt(HS);
    AttentionRounding r = { std::vector<double>(dout.n), std::vector<double>(qkv.n) };
    for (size_t i = 0; i < stats.n; i++) { // a query t of a head
        size_t t = i % T, token = i / T / NH * T, channel = i / T % NH * HS, here = (token + t) * C + channel;
        auto at = [&](size_t u) { return (token + u) * 3 * C + channel; }; // where q of token u begins: k is C further, v 2 C
        auto x = [&](size_t j) { return number(qkv.cpu[j]); };
        auto d = [&](size_t c) { return number(dout.cpu[here + c]); };
        double delta = 0;
        for (int c = 0; c < HS; c++) delta += d(c) * number(out.cpu[here + c]);
        for (size_t u = 0; u <= t; u++) {
            double score = 0, dp = 0;
            for (int c = 0; c < HS; c++) score += x(at(t) + c) * x(at(u) + C + c) * scale, dp += d(c) * x(at(u) + 2 * C + c);
            double p = exp(score - number(stats.cpu[i])), p_off = rounded_off(p), ds_off = rounded_off(p * (dp - delta)) * scale;
            for (int c = 0; c < HS; c++) {
                r.out[here + c] += p_off * fabs(x(at(u) + 2 * C + c));
                r.dqkv[at(t) + c] += ds_off * fabs(x(at(u) + C + c));
                r.dqkv[at(u) + C + c] += ds_off * fabs(x(at(t) + c));
                r.dqkv[at(u) + 2 * C + c] += p_off * fabs(d(c));
            }
        }
    }
    return r;
}
static void check_attention(int B, int T, int NH, int HS, float std) {
    int C = NH * HS;
    start(B, T, C, NH, 1);
    size_t n = (size_t)B * T * C;
    // an error in a score is an error in exp's argument; in 16 bits exp itself is the GPU's approximate instruction
    double slack = (8 + sqrt(HS) + sqrt(T)) * (double)(std * std) * (sizeof(floatX) == 2 ? 4 : 1);
    Both<floatX> qkv = random_both(3 * n, 0, std), out = unset_both(n), dout = random_both(n), dqkv = unset_both(3 * n);
    Both<float> stats = unset_both<float>((size_t)B * NH * T);
    AttentionRounding rounding;
    BOTH(attention_forward, out, stats, qkv, B, T, C, NH);
    if (attention_own_is_on_tensor_cores(HS)) rounding = attention_rounding(qkv, dout, stats, out, T, C, NH);
    expect_near("attention's out", out, slack, rounding.out);
    expect_near("attention's stats", stats, slack);
    BOTH(attention_backward, dqkv, dout, qkv, as_input(out), as_input(stats), B, T, C, NH);
    expect_near("attention's dqkv", dqkv, 4 * slack, rounding.dqkv);
}
// Kernels are compiled for three ranges of head sizes, and each with and without vectors. (The next test has those with.)
TEST(attention_of_every_head_size) {
    for (int size : { 3, 33, 77 }) check_attention(1, 35, 2, size, 1);
    if (quick) return;
    for (int size : { 1, 8, 16, 31, 32, 63, 64, 65, 80, 127, 128 }) check_attention(1, 35, 2, size, 1);
}
TEST(attention_over_lengths_around_a_tile) {
    static const int shapes[][4] = { // B, T, NH, HS
        { 1, 1, 1, 1 }, { 2, 1, 3, 16 }, { 2, 64, 1, 16 }, { 1, 65, 2, 56 }, { 1, 130, 1, 24 }, { 2, 66, 3, 8 }, { 1, 97, 1, 128 } };
    for (const int* s : shapes) check_attention(s[0], s[1], s[2], s[3], 1);
}
// Its blocks have 64 rows in warps of 16; tiles have 64 or 32 rows, and two tiles are in shared memory.
TEST(attention_of_64_channels_over_lengths_around_a_tile) {
    static const int shapes[][3] = { { 1, 130, 1 }, { 1, 1, 1 }, { 2, 17, 2 }, { 1, 32, 1 }, { 1, 200, 1 } }; // B, T, NH
    for (const int* s : shapes) if (!quick || s == shapes[0]) check_attention(s[0], s[1], s[2], 64, 1);
}
TEST(attention_survives_scores_that_exp_alone_would_overflow) {
    check_attention(1, 70, 1, 16, 8);
    if (!quick) check_attention(1, 70, 1, 64, 8);
}
// Columns [first, first + cols) of chunk c of x (outer,2 chunks,row), as an array of their own.
template <typename T>
static std::vector<T> cut(const std::vector<T>& x, size_t outer, size_t row, int c, size_t first, size_t cols) {
    size_t rows = x.size() / row / outer / 2; // of a chunk
    std::vector<T> y;
    for (size_t i = 0; i < outer * rows; i++) {
        auto from = x.begin() + ((i / rows * 2 + c) * rows + i % rows) * row + first;
        y.insert(y.end(), from, from + cols);
    }
    return y;
}
// The device's x is what it held at first, if not NaN, and the CPU's numbers.
static void expect_part(const char* what, const Both<float>& x, const std::vector<float>& cpus, double roundings,
                        const std::vector<double>& more = {}) {
    for (size_t i = 0; i < x.n; i++) x.cpu[i] = (isnan(x.start[i]) ? 0 : x.start[i]) + cpus[i];
    expect_near(what, x, roundings, more);
}
// Sequences of two chunks of T tokens: parts against the CPU's attention of the whole.
static void check_parts(int B, int T, int NH, int HS, float std) {
    int C = NH * HS;
    start(B, 2 * T, C, NH, 1);
    size_t n = (size_t)B * T * C, heads = (size_t)B * NH;
    double slack = (8 + sqrt(HS) + sqrt(2 * T)) * (double)(std * std) * (sizeof(floatX) == 2 ? 4 : 1);
    Both<floatX> qkv = random_both(6 * n, 0, std), out = unset_both(2 * n), dout = random_both(2 * n), dqkv = unset_both(6 * n);
    Both<float> stats = unset_both<float>(heads * 2 * T);
    cpu::attention_forward(out.cpu, stats.cpu, qkv.cpu, B, 2 * T, C, NH);
    cpu::attention_backward(dqkv.cpu, dout.cpu, qkv.cpu, out.cpu, stats.cpu, B, 2 * T, C, NH);
    std::vector<float> whole_out = numbers<float>(2 * n, [&](size_t i) { return number(out.cpu[i]); });
    std::vector<float> whole_dqkv = numbers<float>(6 * n, [&](size_t i) { return number(dqkv.cpu[i]); });
    std::vector<float> whole_stats(stats.cpu, stats.cpu + stats.n);
    AttentionRounding off = { std::vector<double>(2 * n), std::vector<double>(6 * n) };
    if (attention_own_is_on_tensor_cores(HS)) off = attention_rounding(qkv, dout, stats, out, 2 * T, C, NH);
    for (size_t i = 0; i < 2 * n; i++) off.out[i] += ROUNDING * fabs(whole_out[i]); // the whole is rounded when it is stored, parts are not
    for (size_t i = 0; i < 6 * n; i++) off.dqkv[i] += ROUNDING * fabs(whole_dqkv[i]);

    Both<floatX> q[2], kv[2], d[2], o[2];
    Both<float> lse[2], dq[2], dkv[2];
    for (int c = 0; c < 2; c++) {
        q[c] = both_of(cut(qkv.start, B, 3 * C, c, 0, 3 * C));
        kv[c] = both_of(cut(qkv.start, B, 3 * C, c, C, 2 * C));
        d[c] = both_of(cut(dout.start, B, C, c, 0, C));
        o[c] = both_of(cut(std::vector<floatX>(out.cpu, out.cpu + out.n), B, C, c, 0, C));
        lse[c] = both_of(cut(whole_stats, heads, 1, c, 0, 1));
        dq[c] = random_both<float>(n);
        dkv[c] = random_both<float>(2 * n);
    }
    for (int own_first = 0; own_first < 2; own_first++) {
        Both<float> part_out = unset_both<float>(n), part_stats = unset_both<float>(heads * T);
        run_twice("attention_part_forward", [&] {
            for (int k = 0; k < 2; k++) {
                int c = own_first ? 1 - k : k;
                attention_part_forward(part_out.gpu, part_stats.gpu, q[1].gpu, kv[c].gpu, c == 1, k == 1, B, T, C, NH);
            }
        }, part_out, part_stats);
        expect_part("a part's out", part_out, cut(whole_out, B, C, 1, 0, C), slack, cut(off.out, B, C, 1, 0, C));
        expect_part("a part's stats", part_stats, cut(whole_stats, heads, 1, 1, 0, 1), slack);
    }
    run_twice("attention_part_backward", [&] {
        for (int c = 0; c < 2; c++)
            for (int k = 0; k <= c; k++)
                attention_part_backward(dq[c].gpu, dkv[k].gpu, d[c].gpu, q[c].gpu, kv[k].gpu, o[c].gpu, lse[c].gpu, k == c, B, T, C, NH);
    }, dq[0], dq[1], dkv[0], dkv[1]);
    for (int c = 0; c < 2; c++) {
        expect_part("a part's dq", dq[c], cut(whole_dqkv, B, 3 * C, c, 0, C), 4 * slack, cut(off.dqkv, B, 3 * C, c, 0, C));
        expect_part("a part's dkv", dkv[c], cut(whole_dqkv, B, 3 * C, c, C, 2 * C), 4 * slack, cut(off.dqkv, B, 3 * C, c, C, 2 * C));
    }
}
TEST(attention_in_parts_gives_the_whole) {
    static const int shapes[][4] = { // B, T, NH, HS
        { 1, 37, 2, 16 }, { 2, 67, 1, 64 }, { 1, 1, 2, 64 }, { 2, 1, 1, 16 }, { 2, 17, 2, 64 }, { 1, 64, 1, 64 }, { 1, 65, 2, 32 },
        { 2, 33, 1, 80 }, { 1, 35, 1, 128 }, { 1, 3, 1, 77 } };
    for (const int* s : shapes) if (!quick || s <= shapes[1]) check_parts(s[0], s[1], s[2], s[3], 1);
    check_parts(1, 35, 1, 16, 8); // scores that exp alone would overflow
    check_parts(1, 35, 1, 64, 8);
}

// ---- classifier ----
static Both<floatX> columns_of(const Both<floatX>& logits, int N, int Vp, TokenRange range) {
    size_t width = (size_t)range.count;
    return made_both(N * width, [&](size_t i) { return number(logits.start[i / width * Vp + range.first + i % width]); });
}
// The maximum and the target's logit are copies; the sum has its own roundings.
static void expect_stats(const Both<float>& stats) {
    std::vector<float> got = result_of(stats);
    for (size_t i = 0; i < stats.n; i++) {
        double want = number(stats.cpu[i]), tolerance = i % 3 == 1 ? 64 * F32_ROUNDING * want : 0;
        expect(fabs(number(got[i]) - want) <= tolerance, "number %zu of row %zu is %.9g, not %.9g", i % 3, i / 3, got[i], want);
    }
}
typedef struct { std::vector<float> losses, again; std::vector<floatX> dlogits; } Classified; // again: beside dlogits, part by part
// What the device's classifier makes of logits, in so many parts; 0: by the one that has all of them. near: the CPU's must be near.
static Classified classified(const Both<floatX>& logits, const Both<int>& targets, int N, int V, int Vp, int parts, bool near) {
    auto compare = [=](const char* what, const auto& output) { if (near) expect_near(what, output, 32); };
    Both<float> losses = unset_both<float>(N), again = unset_both<float>(N);
    if (parts == 0) {
        ON_BOTH(compare, classifier_forward, losses, logits, targets, N, V, Vp);
        expect_bits("logits that only the loss was asked of", result_of(logits), logits.start);
        ON_BOTH(compare, classifier_forward_backward, again, logits, targets, 0.125f, N, V, Vp);
        return { result_of(losses), result_of(again), result_of(logits) };
    }
    std::vector<Both<floatX>> part;
    std::vector<float> gathered;
    std::vector<floatX> dlogits;
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        part.push_back(columns_of(logits, N, Vp, range));
        Both<float> stats = unset_both<float>(3 * (size_t)N);
        BOTH(classifier_part_stats, stats, part[q], targets, range, N, V);
        if (near) expect_stats(stats);
        expect_bits("logits that only numbers were made of", result_of(part[q]), part[q].start);
        for (float x : result_of(stats)) gathered.push_back(x);
    }
    Both<float> all = both_of(gathered);
    ON_BOTH(compare, classifier_part_forward, losses, all, targets, parts, N);
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        ON_BOTH(compare, classifier_part_forward_backward, again, part[q], all, targets, 0.125f, range, parts, N, V);
        if (near) expect_bits("losses beside gradients", result_of(again), result_of(losses));
        for (floatX x : result_of(part[q])) dlogits.push_back(x);
    }
    return { result_of(losses), result_of(again), dlogits };
}
// apart: how much larger the logits of each part are than those of the part before.
static void check_classifier(int N, int V, int Vp, int parts, float apart) {
    start(1, N, 1, 1, Vp);
    std::vector<floatX> random = random_both((size_t)N * Vp, 0, 3).start;
    Both<floatX> logits = made_both(random.size(), [&](size_t i) {
        return i % Vp < (size_t)V ? to_float(random[i]) + apart * (float)(i % Vp / (Vp / parts)) : NAN;
    });
    std::vector<int> edges = tokens_at_edges(N, V, Vp, parts).start;
    Both<int> targets = made_both<int>(N, [&](int i) { return i == 2 ? -1 : i == N - 1 ? V - 1 : edges[i]; });
    Classified whole = classified(logits, targets, N, V, Vp, 0, true);
    begin_again(logits);
    cuda_layers.shared_bytes = 0;
    classifier_forward_backward(unset_both<float>(N).gpu, logits.gpu, targets.gpu, 0.125f, N, V, Vp);
    expect_bits("dlogits of a row that does not fit in shared memory", result_of(logits), whole.dlogits);
    Classified in_parts = classified(logits, targets, N, V, Vp, parts, true);
    if (parts > 1 || unaligned_array >= 0) return; // there the whole may be read in other pieces than its part
    expect_bits("losses of one part", in_parts.losses, whole.again);
    expect_bits("dlogits of one part", in_parts.dlogits, whole.dlogits);
}
TEST(classifier_in_parts_is_the_whole_one_which_leaves_out_the_padding) {
    check_classifier(1, 1, 1, 1, 0);
    check_classifier(5, 50, 64, 1, 0);
    check_classifier(4, 129, 130, 1, 0);
    check_classifier(3, 5, 128, 1, 0);
    check_classifier(5, 9001, 9088, 1, 0); // more than a block takes at once
    check_classifier(5, 50, 64, 2, 100);   // exponentials that would overflow beside the other maximum
    check_classifier(9, 257, 384, 3, 0);   // a part of one token
    check_classifier(9, 257, 384, 4, -30); // a part of padding
    check_classifier(4, 5, 28, 4, 0);      // parts of 7: not whole pieces
    check_classifier(1, 1, 4, 4, 0);
    if (!quick) check_classifier(300, 6, 8, 2, 0); // more rows than a block takes
}
// A row around a limit of shared memory: what every kernel may have, what this GPU gives a block, and what is left of either beside
// the static memory of the kernel. From small to large, because what a kernel was once allowed it keeps.
static void check_classifier_around(size_t bytes, int shared_bytes) {
    for (int more : { -16, 0, 2 * (int)sizeof(floatX), 16 }) { // 2 elements: a row that is not whole vectors
        int Vp = (bytes + more) / sizeof(floatX), V = Vp - 3;
        start(1, 1, 1, 1, Vp);
        cuda_layers.shared_bytes = shared_bytes;
        Both<floatX> logits = random_both(Vp, 0, 3);
        Both<float> loss = unset_both<float>(1);
        NEAR(32, classifier_forward_backward, loss, logits, same_both<int>(1, V - 1), 0.125f, 1, V, Vp);
    }
}
TEST(classifier_at_the_limits_of_shared_memory) {
    const size_t of_warps = WARP * sizeof(float);
    int most;
    cuda_check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "a block's shared memory");
    for (size_t limit : { (size_t)48 << 10, (size_t)most }) {
        check_classifier_around(limit - of_warps, most);
        check_classifier_around(limit, most);
    }
    check_classifier_around((48 << 10) - of_warps, 48 << 10); // a GPU that gives no block more
}

// Rows of masked tokens may hold anything, even what has no finite softmax: their losses and gradients are 0, and those of the
// other rows are what they are without a mask. Every `counts`th row counts, with 0 none.
static void check_masked_rows(int counts, int parts) {
    const int N = 7, V = 50, Vp = 64, width = parts > 1 ? Vp / parts : Vp;
    start(1, N, 1, 1, Vp);
    auto masked = [=](size_t row) { return counts == 0 || row % counts != 0; };
    Both<floatX> logits = random_both((size_t)N * Vp, 0, 3);
    Both<floatX> garbage = made_both(logits.n, [&](size_t i) {
        return !masked(i / Vp) ? number(logits.start[i]) : i % Vp % 3 ? NAN : INFINITY;
    });
    Both<int> targets = random_tokens(N, V), some = made_both<int>(N, [&](size_t i) { return masked(i) ? -1 : targets.start[i]; });
    Classified want = classified(logits, targets, N, V, Vp, parts, true), got = classified(garbage, some, N, V, Vp, parts, false);
    for (int i = 0; i < N; i++) if (masked(i)) want.losses[i] = want.again[i] = 0;
    for (size_t k = 0; k < want.dlogits.size(); k++) if (masked(k / width % N)) want.dlogits[k] = to_floatX(0);
    expect_bits("losses beside masked rows", got.losses, want.losses);
    expect_bits("losses beside masked rows and gradients", got.again, want.again);
    expect_bits("dlogits beside masked rows", got.dlogits, want.dlogits);
}
TEST(classifier_and_its_parts_leave_out_masked_rows) {
    for (int parts : { 0, 1, 2, 4 }) for (int counts : { 0, 1, 3 }) check_masked_rows(counts, parts);
}
TEST(classifier_and_its_parts_hide_no_inf_or_nan) {
    for (float bad : { NAN, INFINITY, -INFINITY }) {
        for (int parts : { 0, 1, 2 }) {
            start(1, 1, 1, 1, 128);
            std::vector<floatX> random = random_both(128).start;
            // of two parts one is bad; where a row is whole, all that one thread reads
            Both<floatX> logits = made_both(128, [&](size_t i) { return i < (parts == 2 ? 64 : 8) ? bad : to_float(random[i]); });
            Classified c = classified(logits, same_both<int>(1, 67), 1, 100, 128, parts, false);
            for (double x : { number(c.again[0]), number(c.dlogits[67]), number(c.losses[0]) })
                expect(bad == -INFINITY ? isfinite(x) : isnan(x), "%g beside logits of %g, %d parts", x, (double)bad, parts);
        }
    }
}

// ---- optimizer ----
typedef struct { Both<floatX> params, grads; Both<float> master, m, v, scale; } Optimizer;
static const AdamW adamw_example = { 1e-2, 0.9, 0.95, 1e-8, 0.1, 3 };

// On the device all arrays begin so many elements after an aligned address, master weights and moments more.
static Optimizer random_optimizer(size_t n, float scale, size_t offset = 0, size_t of_master = 0, size_t of_moments = 0) {
    next_stream = 0;
    Optimizer o = { random_both(n, 0, 1, offset + (NEEDS_MASTER ? 0 : of_master)), random_both(n, 0, 1, offset),
                    NEEDS_MASTER ? random_both<float>(n, 0, 1, offset + of_master) : none<float>,
                    random_both<float>(n, 0, 0.1f, offset + of_moments), random_both<float>(n, 0, 0.1f), same_both<float>(1, scale) };
    o.v = made_both<float>(n, [&](size_t i) { return fabsf(o.v.start[i]); }, offset + of_moments);
    return o;
}
// Where floatX is fp32, params are their own master.
static float* weights_of(float* master, floatX* params) { return NEEDS_MASTER ? master : (float*)(void*)params; }
static void update_range(Optimizer& o, size_t begin, size_t end, size_t no_decay, double* square = NULL) {
    float* master = NEEDS_MASTER ? o.master.gpu + begin : NULL;
    adamw_update(adamw_example, o.params.gpu + begin, master, o.m.gpu + begin, o.v.gpu + begin, o.grads.gpu + begin,
                 o.scale.gpu, end - begin, no_decay > begin ? size_min(no_decay, end) - begin : 0, square);
}
inline constexpr auto on_gpu = [](const auto& x) { return result_of(x); };
inline constexpr auto on_cpu = [](const auto& x) { return std::vector(x.cpu, x.cpu + x.n); };
template <typename F> static void expect_same_optimizer(const char* what, const Optimizer& a, const Optimizer& b, F of) {
    expect_bits(what, of(a.params), of(b.params));
    expect_bits(what, of(a.master), of(b.master));
    expect_bits(what, of(a.m), of(b.m));
    expect_bits(what, of(a.v), of(b.v));
}
static std::vector<float> widened(const std::vector<floatX>& x) {
    return numbers<float>(x.size(), [&](size_t i) { return to_float(x[i]); });
}
TEST(adamw_follows_the_cpu) {
    for (size_t n : { 1, 7, 8, 1000, 4099 }) {
        for (size_t no_decay : { (size_t)0, n / 3, n }) {
            Optimizer o = random_optimizer(n, 0.5f);
            NEAR(4, adamw_update, adamw_example, o.params, o.master, o.m, o.v, o.grads, o.scale, n, no_decay, none<double>);
        }
    }
}
TEST(adamw_of_a_range_equals_adamw_of_its_pieces_to_the_bit) {
    const size_t n = 2051;
    Optimizer whole = random_optimizer(n, 1);
    update_range(whole, 0, n, 1001);
    for (size_t cut : { 1, 3, 17, 1024, 2050 }) {
        Optimizer pieces = random_optimizer(n, 1);
        update_range(pieces, 0, cut, 1001);
        update_range(pieces, cut, n, 1001);
        expect_same_optimizer("AdamW in two pieces", pieces, whole, on_gpu);
    }
    Optimizer elsewhere = random_optimizer(n, 1, 1);
    update_range(elsewhere, 0, n, 1001);
    expect_same_optimizer("AdamW of arrays that are not aligned", elsewhere, whole, on_gpu);
}
// fp32 params and widened gradients, as a sharded program updates them; and weights that nobody needs in floatX.
TEST(adamw_of_fp32_and_without_params_gives_the_master_weights_to_the_bit) {
    for (size_t n : { 1, 8, 4099 }) {
        for (size_t place = 0; place < 8; place++) { // the arrays' alignment must not change the result
            const char* what = place < 4 ? "AdamW of fp32" : "AdamW without params";
            Optimizer o = random_optimizer(n, 0.5f), other = random_optimizer(n, 0.5f, 0, place % 2, place / 2 % 2);
            Both<float> grads = both_of(widened(o.grads.start));
            float* weights = weights_of(other.master.gpu, other.params.gpu);
            update_range(o, 0, n, n / 3);
            run_twice(what, [&] {
                if (place < 4) adamw_update_fp32(adamw_example, weights, other.m.gpu, other.v.gpu, grads.gpu, o.scale.gpu, n, n / 3);
                else adamw_update(adamw_example, NULL, weights, other.m.gpu, other.v.gpu, o.grads.gpu, o.scale.gpu, n, n / 3, NULL);
            }, other.params, other.master, other.m, other.v);
            if (NEEDS_MASTER) expect_bits("params beside their master", result_of(other.params), other.params.start);
            if (NEEDS_MASTER) other.params = o.params;
            expect_same_optimizer(what, other, o, on_gpu);
        }
    }
}
// What --cpu-offload updates: the host's form as the GPU's compiler made it, against the CPU's layers.
TEST(adamw_of_shards_on_the_host_gives_the_bits_of_the_cpu) {
    for (size_t n : { 1, 8193, 16390 }) {
        for (size_t no_decay : { (size_t)0, (size_t)8197, n }) { // 8197: in the second slice
            Optimizer o = random_optimizer(n, 0.5f), host = random_optimizer(n, 0.5f);
            cpu::adamw_update(adamw_example, o.params.cpu, o.master.cpu, o.m.cpu, o.v.cpu, o.grads.cpu, o.scale.cpu, n, no_decay, NULL);
            host_adamw_update(adamw_example, NEEDS_MASTER ? host.params.cpu : NULL, weights_of(host.master.cpu, host.params.cpu),
                              host.m.cpu, host.v.cpu, host.grads.cpu, FLOATX_DTYPE, 0.5f, n, no_decay, NULL);
            expect_same_optimizer("AdamW on the host", host, o, on_cpu);
        }
    }
}
TEST(adamw_changes_nothing_when_the_step_is_skipped) {
    Optimizer o = random_optimizer(100, 0), before = random_optimizer(100, 0);
    o.grads.start[7] = to_floatX(NAN);
    begin_again(o.grads);
    update_range(o, 0, 100, 10);
    expect_same_optimizer("a step that is skipped", o, before, on_gpu);
    if (NEEDS_MASTER) adamw_update(adamw_example, NULL, o.master.gpu, o.m.gpu, o.v.gpu, o.grads.gpu, o.scale.gpu, 100, 10, NULL);
    expect_same_optimizer("a step without params that is skipped", o, before, on_gpu);
}
// Also after a skipped step. The bits of the sum do not depend on the arrays' alignment, and summing does not change the update.
TEST(adamw_adds_the_squares_of_the_params) {
    for (size_t n : { 1, 7, 1024, 4099, 150001 }) {
        if (quick && n > 10003) break;
        for (float scale : { 0.5f, 0.0f }) {
            Both<double> square = same_both<double>(1, 3), other = same_both<double>(1, 3);
            Optimizer o = random_optimizer(n, scale), moved = random_optimizer(n, scale, 1), plain = random_optimizer(n, scale);
            update_range(o, 0, n, n / 3, square.gpu);
            update_range(moved, 0, n, n / 3, other.gpu);
            update_range(plain, 0, n, n / 3);
            expect_same_optimizer("AdamW that sums squares", o, plain, on_gpu);
            double got = result_of(square)[0], want = 3;
            for (floatX x : result_of(o.params)) want += (double)to_float(x) * to_float(x);
            expect(fabs(got - want) <= 1e-13 * want, "the squares of %zu params are %.17g, not %.17g", n, got, want);
            expect_bits("squares of params that are not aligned", result_of(other), result_of(square));
        }
    }
}

// ---- numbers about a step ----
template <typename T> using Sum = void (*)(double*, const T*, size_t);
template <typename T> static void check_sum(const char* what, Sum<T> cpus, Sum<T> gpus, size_t n) {
    Both<T> x = random_both<T>(n, 0.5f), moved = both_of(x.start, 1);
    Both<double> sum = same_both<double>(1, 3), other = same_both<double>(1, 3);
    on_both(what, cpus, gpus, not_compared, sum, x, n);
    double got = result_of(sum)[0], tolerance = 1e-14 * (double)n + 1e-13 * fabs(*sum.cpu);
    expect(fabs(got - *sum.cpu) <= tolerance, "%s of %zu numbers is %.17g, not %.17g", what, n, got, *sum.cpu);
    gpus(other.gpu, moved.gpu, n);
    expect_bits("a sum of numbers that are not aligned", result_of(other), result_of(sum));
}
TEST(sums_depend_on_the_number_of_elements_alone) {
    for (size_t n : { 0, 1, 7, 1000, 10003, 150001 }) {
        if (quick && n > 10003) break;
        check_sum<float>("add_sum", cpu::add_sum, add_sum, n);
        check_sum<floatX>("add_sum_squares", cpu::add_sum_squares, add_sum_squares, n);
        check_sum<float>("add_sum_squares_fp32", cpu::add_sum_squares_fp32, add_sum_squares_fp32, n);
    }
}
// In either type: --cpu-offload sums shards on the host.
TEST(sums_on_the_host_have_the_bits_of_the_cpu) {
    for (size_t n : { 0, 1, 1000, 33001 }) {
        Both<floatX> x = random_both(n, 0.5f);
        double narrow = host_sum_squares(x.start.data(), FLOATX_DTYPE, n);
        double wide = host_sum_squares(widened(x.start).data(), DTYPE_F32, n), want = 0;
        cpu::add_sum_squares(&want, x.cpu, n);
        expect(narrow == want && wide == want, "sums of %zu numbers are %.17g and in fp32 %.17g, not %.17g", n, narrow, wide, want);
    }
}
// An array's alignment decides which thread reads what, and nothing else.
TEST(arrays_are_added_to_the_bit_as_on_the_cpu) {
    for (size_t n : { 0, 1, 7, 8, 1000, 4099 }) {
        for (size_t place = 0; place < 4; place++) {
            Both<floatX> x = random_both(n, 0, 1, place % 2), y = random_both(n, 0, 0.1f, place / 2);
            Both<float> wide = random_both<float>(n, 0, 1, place % 2), added = random_both<float>(n, 0, 0.1f, place / 2);
            SAME_BITS(add_in_place, x, y, n);
            SAME_BITS(add_in_place_fp32, wide, added, n);
            expect_bits("what add_in_place adds", result_of(y), y.start);
        }
    }
}
TEST(clipping_follows_the_cpu_to_the_bit) {
    for (double square : { 0.0, 4.0, 2.0, 1e-12, 1e12, (double)INFINITY, (double)NAN }) {
        for (float max_norm : { 0.0f, 1.0f }) {
            for (float loss_scale : { 1.0f, 1024.0f }) {
                Both<StepStats> s = both_of(std::vector<StepStats> { { 1, square, 3, -1, -1 } });
                BOTH(clip_gradients, s, max_norm, loss_scale);
                StepStats got = result_of(s)[0];
                double norm = got.grad_norm, norm_wanted = s.cpu->grad_norm, scale = got.grad_scale, scale_wanted = s.cpu->grad_scale;
                expect(scale == scale_wanted, "the scale is %g, not %g", scale, scale_wanted);
                expect(norm == norm_wanted || (isnan(norm) && isnan(norm_wanted)), "the norm is %g, not %g", norm, norm_wanted);
            }
        }
    }
}
TEST(casts_round_as_the_cpu_does) {
    for (size_t offset : { 0, 1 }) {
        Both<float> wide = random_both<float>(1003, 0, 1, offset), back = unset_both<float>(1003);
        Both<floatX> narrowed = unset_both(1003);
        std::vector<floatX> rounded = numbers(1003, [&](size_t i) { return wide.start[i]; });
        from_fp32(narrowed.gpu, wide.gpu, wide.n);
        to_fp32(back.gpu, narrowed.gpu, wide.n);
        expect_bits("a cast to floatX", result_of(narrowed), rounded);
        expect_bits("a cast back", result_of(back), widened(rounded));
    }
}

// ---- alignment ----
// One array after the other is not aligned to 16 bytes, and no kernel may read 16 bytes at once from it.
TEST(arrays_that_are_not_aligned_are_read_element_by_element) {
    if (quick) return;
    void (*checks[])(void) = {
        [] { check_encoder(1, 3, 16, 3, 4, 2); }, [] { check_layernorm(2, 16, 0); },
        [] { check_bias_gelu(2, 16); }, [] { check_bias_backward(2, 16); }, [] { check_classifier(3, 27, 32, 2, 0); },
        [] { check_attention(1, 3, 1, 16, 1); }, [] { check_attention(1, 3, 1, 64, 1); },
        [] { check_parts(1, 3, 1, 16, 1); }, [] { check_parts(1, 3, 1, 64, 1); },
    };
    for (void (*check)(void) : checks) {
        for (unaligned_array = 0; unaligned_array == 0 || unaligned_array < arrays; unaligned_array++) check();
    }
    unaligned_array = -1;
}
