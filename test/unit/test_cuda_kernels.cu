/*
test_cuda_kernels.cu - every kernel of llmc/device/cuda/ against the CPU's layer, on a GPU or under the emulator.

Each kernel runs twice from the same beginning and must leave the same bits (the emulator runs threads and blocks in
another order each time). The results must agree with the CPU's within the rounding of stored values plus a stated number
of fp32 roundings of the largest result. Arrays have no padding, so that an address sanitizer sees an access past the end.
*/
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
    LayerShapes s = { B, T, C, NH, Vp, 1 };
    start_both(s, std::max({ encoder_workspace_bytes(s), layernorm_workspace_bytes(s), bias_workspace_bytes(s),
                             attention_own_workspace_bytes(s), stats_workspace_bytes(s) }));
}

// ---- embeddings ----
static void check_encoder(int B, int T, int C, int V) {
    start(B, T, C, 1, V);
    size_t n = (size_t)B * T * C;
    Both<int> tokens = random_tokens((size_t)B * T, V);
    Both<floatX> wte = random_both((size_t)V * C), wpe = random_both((size_t)T * C), out = unset_both(n), dout = random_both(n);
    cpu::encoder_forward(out.cpu, tokens.cpu, wte.cpu, wpe.cpu, B, T, C);
    run_twice("encoder_forward", [&] { encoder_forward(out.gpu, tokens.gpu, wte.gpu, wpe.gpu, B, T, C); }, out);
    expect_near("encoder_forward", out, 0);
    for (GradMode mode : both_modes) {
        Both<floatX> dwte = random_both((size_t)V * C), dwpe = gradient_before((size_t)T * C, mode);
        cpu::encoder_backward(dwte.cpu, dwpe.cpu, dout.cpu, tokens.cpu, B, T, C, mode);
        run_twice("encoder_backward", [&] { encoder_backward(dwte.gpu, dwpe.gpu, dout.gpu, tokens.gpu, B, T, C, mode); }, dwte, dwpe);
        expect_near("encoder_backward's dwte", dwte, B * T);
        expect_near("encoder_backward's dwpe", dwpe, 0); // the same sum in the same order
    }
}
TEST(encoder_adds_embeddings_and_sums_their_gradients) {
    check_encoder(2, 5, 7, 3);
    check_encoder(1, 1, 1, 1);
    check_encoder(3, 40, 304, 5);   // more channels than a block takes, tokens that occur often
    check_encoder(2, 150, 8, 2500); // more tokens than threads in the prefix sum, more positions than a block takes
    check_encoder(1, 3, 2056, 4);   // rows longer than a block
}

// n tokens in [0,V), the first of which are the first and the last token of each part, as far as there are such.
static Both<int> tokens_at_edges(size_t n, int V, int Vp, int parts) {
    std::vector<int> x = random_tokens(n, V).start;
    int width = Vp / parts;
    for (size_t i = 0; i < n && i / 2 < (size_t)parts; i++) {
        int token = (int)(i / 2) * width + (i % 2 ? width - 1 : 0);
        if (token < V) x[i] = token;
    }
    return both_of(x);
}
static Both<floatX> rows_of(const Both<floatX>& whole, TokenRange range, int C) {
    auto begin = whole.start.begin() + (size_t)range.first * C;
    return both_of(std::vector<floatX>(begin, begin + (size_t)range.count * C));
}
static void check_encoder_in_parts(int B, int T, int C, int V, int Vp, int parts) {
    start(B, T, C, 1, Vp);
    size_t n = (size_t)B * T * C;
    Both<int> tokens = tokens_at_edges((size_t)B * T, V, Vp, parts);
    Both<floatX> wte = random_both((size_t)Vp * C), wpe = random_both((size_t)T * C), whole = unset_both(n), dout = random_both(n);
    Both<floatX> sum = both_of(std::vector<floatX>(n, to_floatX(0)));
    encoder_forward(whole.gpu, tokens.gpu, wte.gpu, wpe.gpu, B, T, C);
    for (GradMode mode : both_modes) {
        Both<floatX> dwte = both_of(wte.start), dwpe = gradient_before((size_t)T * C, mode);
        encoder_backward(dwte.gpu, dwpe.gpu, dout.gpu, tokens.gpu, B, T, C, mode);
        for (int q = 0; q < parts; q++) {
            TokenRange range = token_range(Vp, parts, q);
            Both<floatX> part = rows_of(wte, range, C), out = unset_both(n), part_dwpe = both_of(dwpe.start);
            bool adds = q == parts / 2;
            cpu::encoder_part_forward(out.cpu, tokens.cpu, part.cpu, adds ? wpe.cpu : NULL, range, B, T, C);
            run_twice("encoder_part_forward", [&] {
                encoder_part_forward(out.gpu, tokens.gpu, part.gpu, adds ? wpe.gpu : NULL, range, B, T, C);
            }, out);
            expect_near("encoder_part_forward", out, 0);
            if (mode == GRAD_SET) add_in_place(sum.gpu, out.gpu, n);
            cpu::encoder_part_backward(part.cpu, part_dwpe.cpu, dout.cpu, tokens.cpu, range, B, T, C, mode);
            run_twice("encoder_part_backward", [&] {
                encoder_part_backward(part.gpu, part_dwpe.gpu, dout.gpu, tokens.gpu, range, B, T, C, mode);
            }, part, part_dwpe);
            expect_near("encoder_part_backward's dwte", part, B * T);
            std::vector<floatX> all = result_of(dwte), of_part = result_of(part), rows(all.begin() + (size_t)range.first * C, all.end());
            rows.resize(part.n);
            expect_bits("encoder_part_backward's dwte", of_part, rows);
            expect_bits("encoder_part_backward's dwpe", result_of(part_dwpe), result_of(dwpe));
            begin_again(part);
            encoder_part_backward(part.gpu, NULL, dout.gpu, tokens.gpu, range, B, T, C, mode);
            expect_bits("encoder_part_backward's dwte without dwpe", result_of(part), of_part);
        }
    }
    expect_bits("the sum of encoder_part_forward", result_of(sum), result_of(whole));
}
TEST(encoder_in_parts_has_the_bits_of_the_whole) {
    check_encoder_in_parts(2, 9, 7, 11, 12, 1);
    check_encoder_in_parts(2, 9, 16, 11, 12, 2);
    check_encoder_in_parts(2, 9, 7, 5, 12, 4);        // the last two parts have nothing but padding
    check_encoder_in_parts(2, 150, 8, 2500, 2502, 2); // more tokens than threads in the prefix sum, more positions than a block takes
    check_encoder_in_parts(3, 40, 304, 5, 6, 3);      // more channels than a block takes, tokens that occur often
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
    cpu::residual_layernorm_forward(res.cpu, out.cpu, mean.cpu, rstd.cpu, x1.cpu, x2.cpu, w.cpu, b.cpu, N, C);
    run_twice("residual_layernorm_forward", [&] {
        residual_layernorm_forward(res.gpu, out.gpu, mean.gpu, rstd.gpu, x1.gpu, x2.gpu, w.gpu, b.gpu, N, C);
    }, res, out, mean, rstd);
    expect_near("the residual sum", res, 0);
    expect_near("layernorm's out", out, slack);
    expect_near("layernorm's mean", mean, 8);
    expect_near("layernorm's rstd", rstd, slack);

    std::vector<floatX> first = result_of(out);
    residual_layernorm_forward(res.gpu, out.gpu, mean.gpu, rstd.gpu, res.gpu, NULL, w.gpu, b.gpu, N, C);
    if (unaligned_array < 0) expect_bits("layernorm recomputed from the stored sum", result_of(out), first); // the same pieces

    for (GradMode mode : both_modes) {
        Both<floatX> dinp = random_both(n), dw = gradient_before(C, mode), db = gradient_before(C, mode);
        Both<float> m = as_input(mean), r = as_input(rstd);
        cpu::layernorm_backward(dinp.cpu, dw.cpu, db.cpu, dout.cpu, res.cpu, w.cpu, m.cpu, r.cpu, N, C, mode);
        run_twice("layernorm_backward", [&] {
            layernorm_backward(dinp.gpu, dw.gpu, db.gpu, dout.gpu, res.gpu, w.gpu, m.gpu, r.gpu, N, C, mode);
        }, dinp, dw, db);
        expect_near("layernorm's dinp", dinp, slack);
        expect_near("layernorm's dw", dw, slack + 2 * sqrt(N));
        expect_near("layernorm's db", db, slack + 2 * sqrt(N));
    }
}
TEST(layernorm_adds_the_residual_and_normalises) {
    check_layernorm(5, 19, 0);
    check_layernorm(1, 8, 0);
    check_layernorm(3, 1, 0);
    check_layernorm(40, 64, 0);
    check_layernorm(9, 776, 0);
    check_layernorm(3, 64, 100); // far from 0, where E[x^2] - E[x]^2 would cancel
    check_layernorm(1030, 257, 0); // backward's blocks take a row at a time, three times
    if (quick) return;
    check_layernorm(4101, 8, 0); // and here several, twice
    check_layernorm(515, 1031, 0); // rows that are too long for a block to keep
}
// Rows around each limit: of the shared memory that forward may have, for eight rows and for one, and of what backward's threads
// keep, of two rows, of one, and of any.
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
static Both<floatX> identity(size_t n) {
    std::vector<floatX> x(n * n);
    for (size_t i = 0; i < n * n; i++) x[i] = to_floatX(i / n == i % n ? 1.0f : 0.0f);
    return both_of(x);
}
static void check_bias_gelu(int N, int C) {
    start(1, N, C, 1, 1);
    size_t n = (size_t)N * C;
    Both<floatX> x = random_both(n, 0, 3), bias = random_both(C), w = identity(C), dout = random_both(n);
    Both<floatX> pre = unset_both(n), act = unset_both(n), dinp = unset_both(n);
    cpu::matmul_gelu_forward(act.cpu, pre.cpu, x.cpu, w.cpu, bias.cpu, N, C, C);
    Both<floatX> out = both_of(x.start);
    memcpy(out.cpu, pre.cpu, n * sizeof(floatX));
    run_twice("bias_gelu_forward", [&] { bias_gelu_forward(act.gpu, out.gpu, bias.gpu, N, C); }, act, out);
    expect_near("the product plus bias", out, 0);
    expect_near("its gelu", act, 8);
    begin_again(out);
    bias_gelu_forward(NULL, out.gpu, bias.gpu, N, C);
    expect_near("the product plus bias, without gelu", out, 0);

    cpu::matmul_gelu_backward_input(dinp.cpu, dout.cpu, w.cpu, pre.cpu, N, C, C);
    Both<floatX> d = both_of(dout.start), p = as_input(pre);
    memcpy(d.cpu, dinp.cpu, n * sizeof(floatX));
    run_twice("gelu_backward", [&] { gelu_backward(d.gpu, p.gpu, N, C); }, d);
    expect_near("gelu's gradient", d, 8);
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
    check_bias_gelu(1, 1);
    check_bias_gelu(5, 33);
    check_bias_gelu(3, 64);
    check_bias_gelu(2, 264);
    check_bias_backward(1, 1);
    check_bias_backward(7, 9);
    check_bias_backward(130, 264); // more columns than a block
    if (!quick) check_bias_backward(8321, 8); // more rows than the smallest chunks hold
}

// ---- attention ----
// Tensor cores multiply 16-bit numbers, so P and dS are rounded first: a number x by at most ROUNDING |x|, and in fp16, below its
// normal numbers, by 2^-25.
static double rounded_off(double x) {
    return ATTENTION_ON_TENSOR_CORES ? ROUNDING * fabs(x) + (ROUNDING == 1.0 / 2048 ? ldexp(1, -25) : 0) : 0;
}
// How much this may change each element of out and of dqkv: a sum of x[i] y[i] changes by the sum of rounded_off(x[i]) |y[i]|.
typedef struct { std::vector<double> out, dqkv; } AttentionRounding;
static AttentionRounding attention_rounding(Both<floatX> qkv, Both<floatX> dout, int B, int T, int C, int NH) {
    int HS = C / NH;
    double scale = 1 / sqrt(HS);
    AttentionRounding r = { std::vector<double>(dout.n), std::vector<double>(qkv.n) };
    std::vector<double> p(T), dp(T);
    for (size_t i = 0; i < (size_t)B * NH * T; i++) { // a query t of a head
        size_t t = i % T, token = i / T / NH * T, channel = i / T % NH * HS, sees = t + 1;
        auto at = [&](size_t u) { return (token + u) * 3 * C + channel; }; // where q of token u begins: k is C further, v 2 C
        auto x = [&](size_t j) { return number(qkv.cpu[j]); };
        auto d = [&](size_t c) { return number(dout.cpu[(token + t) * C + channel + c]); };
        double max = -INFINITY, sum = 0, delta = 0;
        for (size_t u = 0; u < sees; u++) {
            p[u] = dp[u] = 0;
            for (int c = 0; c < HS; c++) p[u] += x(at(t) + c) * x(at(u) + C + c) * scale, dp[u] += d(c) * x(at(u) + 2 * C + c);
            max = fmax(max, p[u]);
        }
        for (size_t u = 0; u < sees; u++) sum += p[u] = exp(p[u] - max);
        for (size_t u = 0; u < sees; u++) delta += (p[u] /= sum) * dp[u];
        for (size_t u = 0; u < sees; u++) {
            double p_off = rounded_off(p[u]), ds_off = rounded_off(p[u] * (dp[u] - delta)) * scale;
            for (int c = 0; c < HS; c++) {
                r.out[(token + t) * C + channel + c] += p_off * fabs(x(at(u) + 2 * C + c));
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
    if (attention_own_is_on_tensor_cores(HS)) rounding = attention_rounding(qkv, dout, B, T, C, NH);
    cpu::attention_forward(out.cpu, stats.cpu, qkv.cpu, B, T, C, NH);
    run_twice("attention_forward", [&] { attention_own_forward(out.gpu, stats.gpu, qkv.gpu, B, T, C, NH); }, out, stats);
    expect_near("attention's out", out, slack, rounding.out);
    expect_near("attention's stats", stats, slack);
    Both<floatX> o = as_input(out);
    Both<float> s = as_input(stats);
    cpu::attention_backward(dqkv.cpu, dout.cpu, qkv.cpu, o.cpu, s.cpu, B, T, C, NH);
    run_twice("attention_backward", [&] { attention_own_backward(dqkv.gpu, dout.gpu, qkv.gpu, o.gpu, s.gpu, B, T, C, NH); }, dqkv);
    expect_near("attention's dqkv", dqkv, 4 * slack, rounding.dqkv);
}
// Kernels are compiled for three ranges of head sizes, and each with and without vectors. (The next test has those with.)
TEST(attention_of_every_head_size) {
    for (int size : { 3, 33, 77 }) check_attention(1, 35, 2, size, 1);
    if (quick) return;
    for (int size : { 1, 8, 16, 31, 32, 63, 64, 65, 80, 127, 128 }) check_attention(1, 35, 2, size, 1);
}
TEST(attention_over_lengths_around_a_tile) {
    check_attention(1, 1, 1, 1, 1);
    check_attention(2, 1, 3, 16, 1);
    check_attention(2, 64, 1, 16, 1);
    check_attention(1, 65, 2, 56, 1);
    check_attention(1, 130, 1, 24, 1);
    check_attention(2, 66, 3, 8, 1);
    check_attention(1, 97, 1, 128, 1);
}
// Its blocks have 64 rows in warps of 16; tiles have 64 or 32 rows, and two tiles are in shared memory.
TEST(attention_of_64_channels_over_lengths_around_a_tile) {
    check_attention(1, 130, 1, 64, 1);
    if (quick) return;
    check_attention(1, 1, 1, 64, 1);
    check_attention(2, 17, 2, 64, 1);
    check_attention(1, 32, 1, 64, 1);
    check_attention(1, 200, 1, 64, 1);
}
TEST(attention_survives_scores_that_exp_alone_would_overflow) {
    check_attention(1, 70, 1, 16, 8);
    if (!quick) check_attention(1, 70, 1, 64, 8);
}

// ---- classifier ----
static void check_classifier(int N, int V, int Vp) {
    start(1, N, 1, 1, Vp);
    Both<floatX> logits = random_both((size_t)N * Vp, 0, 3);
    Both<int> targets = random_tokens(N, V);
    Both<float> losses = unset_both<float>(N);
    if (N > 2) {
        std::vector<int> some = targets.start;
        some[1] = -1;
        some[2] = V - 1;
        targets = both_of(some);
    }
    cpu::classifier_forward(losses.cpu, logits.cpu, targets.cpu, N, V, Vp);
    run_twice("classifier_forward", [&] { classifier_forward(losses.gpu, logits.gpu, targets.gpu, N, V, Vp); }, losses);
    expect_near("losses", losses, 32);
    expect_bits("logits that only the loss was asked of", result_of(logits), logits.start);

    cpu::classifier_forward_backward(losses.cpu, logits.cpu, targets.cpu, 0.125f, N, V, Vp);
    run_twice("classifier_forward_backward", [&] {
        classifier_forward_backward(losses.gpu, logits.gpu, targets.gpu, 0.125f, N, V, Vp);
    }, losses, logits);
    expect_near("losses beside gradients", losses, 32);
    expect_near("dlogits", logits, 32);
    std::vector<floatX> in_shared = result_of(logits);
    begin_again(logits);
    cuda_layers.shared_bytes = 0;
    classifier_forward_backward(losses.gpu, logits.gpu, targets.gpu, 0.125f, N, V, Vp);
    expect_bits("dlogits of a row that does not fit in shared memory", result_of(logits), in_shared);
}
TEST(classifier_is_cross_entropy_over_the_vocabulary_without_its_padding) {
    check_classifier(3, 50, 64);
    check_classifier(1, 1, 1);
    check_classifier(4, 129, 130);
    check_classifier(3, 5, 128);
    check_classifier(3, 257, 384);
    check_classifier(3, 9001, 9088); // more than a block takes at once
}
// A row around a limit of shared memory: what every kernel may have, what this GPU gives a block, and what is left of either beside
// the static memory of the kernel. From small to large, because what a kernel was once allowed it keeps.
static void check_classifier_around(size_t bytes, int shared_bytes) {
    for (int more : { -16, 0, 2 * (int)sizeof(floatX), 16 }) { // 2 elements: a row that is not whole vectors
        int Vp = (bytes + more) / sizeof(floatX), V = Vp - 3;
        start(1, 1, 1, 1, Vp);
        cuda_layers.shared_bytes = shared_bytes;
        Both<floatX> logits = random_both(Vp, 0, 3);
        Both<int> target = both_of(std::vector<int>(1, V - 1));
        Both<float> loss = unset_both<float>(1);
        cpu::classifier_forward_backward(loss.cpu, logits.cpu, target.cpu, 0.125f, 1, V, Vp);
        classifier_forward_backward(loss.gpu, logits.gpu, target.gpu, 0.125f, 1, V, Vp);
        expect_near("the loss of a row around a limit", loss, 32);
        expect_near("its dlogits", logits, 32);
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
TEST(classifier_hides_no_inf_or_nan) {
    for (float bad : { NAN, INFINITY, -INFINITY }) {
        start(1, 1, 1, 1, 64);
        Both<floatX> logits = random_both(64);
        Both<float> loss = unset_both<float>(1);
        for (int i = 40; i < 48; i++) logits.start[i] = to_floatX(bad); // including all elements of one thread
        begin_again(logits);
        Both<int> target = both_of(std::vector<int>(1, 3));
        classifier_forward_backward(loss.gpu, logits.gpu, target.gpu, 1, 1, 50, 64);
        double got[2] = { number(result_of(loss)[0]), number(result_of(logits)[3]) };
        bool harmless = bad == -INFINITY; // a probability of 0, and no error
        expect(harmless ? isfinite(got[0]) : isnan(got[0]), "the loss is %g with a logit of %g", got[0], (double)bad);
        expect(harmless ? isfinite(got[1]) : isnan(got[1]), "a gradient is %g with a logit of %g", got[1], (double)bad);
    }
}

// ---- the classifier in parts ----
static Both<floatX> columns_of(const Both<floatX>& logits, int N, int Vp, TokenRange range) {
    std::vector<floatX> x;
    for (int i = 0; i < N; i++) for (int v = 0; v < range.count; v++) x.push_back(logits.start[(size_t)i * Vp + range.first + v]);
    return both_of(x);
}
// The maximum and the target's logit are copies; the sum has its own roundings.
static void expect_stats(const Both<float>& stats) {
    std::vector<float> got = result_of(stats);
    for (size_t i = 0; i < stats.n; i++) {
        double want = number(stats.cpu[i]), tolerance = i % 3 == 1 ? 64 * F32_ROUNDING * want : 0;
        expect(fabs(number(got[i]) - want) <= tolerance, "number %zu of row %zu is %.9g, not %.9g", i % 3, i / 3, got[i], want);
    }
}
// apart: how much larger the logits of each part are than those of the part before.
static void check_classifier_in_parts(int N, int V, int Vp, int parts, float apart) {
    start(1, N, 1, 1, Vp);
    Both<floatX> logits = random_both((size_t)N * Vp, 0, 3);
    for (size_t i = 0; i < logits.n; i++)
        logits.start[i] = to_floatX(i % Vp < (size_t)V ? to_float(logits.start[i]) + apart * (float)(i % Vp / (Vp / parts)) : NAN);
    begin_again(logits);
    Both<int> targets = tokens_at_edges(N, V, Vp, parts);
    if (N > 2) targets.start[2] = targets.cpu[2] = -1;
    begin_again(targets);
    std::vector<Both<floatX>> part;
    std::vector<float> gathered;
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        part.push_back(columns_of(logits, N, Vp, range));
        Both<float> stats = unset_both<float>(3 * (size_t)N);
        cpu::classifier_part_stats(stats.cpu, part[q].cpu, targets.cpu, range, N, V);
        run_twice("classifier_part_stats", [&] { classifier_part_stats(stats.gpu, part[q].gpu, targets.gpu, range, N, V); }, stats);
        expect_stats(stats);
        expect_bits("logits that only numbers were made of", result_of(part[q]), part[q].start);
        for (float x : result_of(stats)) gathered.push_back(x);
    }
    Both<float> all = both_of(gathered), losses = unset_both<float>(N);
    cpu::classifier_part_forward(losses.cpu, all.cpu, targets.cpu, parts, N);
    run_twice("classifier_part_forward", [&] { classifier_part_forward(losses.gpu, all.gpu, targets.gpu, parts, N); }, losses);
    expect_near("losses from parts", losses, 32);
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        Both<float> again = unset_both<float>(N);
        cpu::classifier_part_forward_backward(again.cpu, part[q].cpu, all.cpu, targets.cpu, 0.125f, range, parts, N, V);
        run_twice("classifier_part_forward_backward", [&] {
            classifier_part_forward_backward(again.gpu, part[q].gpu, all.gpu, targets.gpu, 0.125f, range, parts, N, V);
        }, again, part[q]);
        expect_near("dlogits of a part", part[q], 32);
        expect_bits("losses beside gradients", result_of(again), result_of(losses));
    }
    if (parts > 1 || unaligned_array >= 0) return; // there the whole may be read in other pieces than its part
    Both<float> of_whole = unset_both<float>(N);
    classifier_forward_backward(of_whole.gpu, logits.gpu, targets.gpu, 0.125f, N, V, Vp);
    expect_bits("losses of one part", result_of(losses), result_of(of_whole));
    expect_bits("dlogits of one part", result_of(part[0]), result_of(logits));
}
TEST(classifier_in_parts_is_the_classifier) {
    check_classifier_in_parts(5, 50, 64, 1, 0);
    check_classifier_in_parts(5, 9001, 9088, 1, 0); // more than a block takes at once
    check_classifier_in_parts(5, 50, 64, 2, 100);   // exponentials that would overflow beside the other maximum
    check_classifier_in_parts(9, 257, 384, 3, 0);   // a part of one token
    check_classifier_in_parts(9, 257, 384, 4, -30); // a part of padding
    check_classifier_in_parts(4, 5, 28, 4, 0);      // parts of 7: not whole pieces
    check_classifier_in_parts(1, 1, 4, 4, 0);
    if (!quick) check_classifier_in_parts(300, 6, 8, 2, 0); // more rows than a block takes
}
// Rows of masked tokens may hold anything, even what has no finite softmax: their losses and gradients are 0, and those of the other
// rows are what they are without a mask. Every `counts`th row counts, with 0 none; parts 0: the classifier that has all of it.
typedef struct { std::vector<float> losses, again; std::vector<floatX> dlogits; } Classified; // dlogits part by part
static Classified classified(const Both<floatX>& logits, const Both<int>& targets, int N, int V, int Vp, int parts) {
    Both<float> losses = unset_both<float>(N), again = unset_both<float>(N);
    Classified c;
    if (parts == 0) {
        classifier_forward(losses.gpu, logits.gpu, targets.gpu, N, V, Vp);
        classifier_forward_backward(again.gpu, logits.gpu, targets.gpu, 0.125f, N, V, Vp);
        c.dlogits = result_of(logits);
    }
    Both<float> all = unset_both<float>(3 * (size_t)N * (size_t)(parts + 1));
    std::vector<Both<floatX>> part;
    for (int q = 0; q < parts; q++) {
        part.push_back(columns_of(logits, N, Vp, token_range(Vp, parts, q)));
        classifier_part_stats(all.gpu + 3 * q * N, part[q].gpu, targets.gpu, token_range(Vp, parts, q), N, V);
    }
    if (parts > 0) classifier_part_forward(losses.gpu, all.gpu, targets.gpu, parts, N);
    for (int q = 0; q < parts; q++) {
        classifier_part_forward_backward(again.gpu, part[q].gpu, all.gpu, targets.gpu, 0.125f, token_range(Vp, parts, q), parts, N, V);
        for (floatX x : result_of(part[q])) c.dlogits.push_back(x);
    }
    c.losses = result_of(losses);
    c.again = result_of(again);
    return c;
}
static void check_masked_rows(int counts, int parts) {
    const int N = 7, V = 50, Vp = 64, width = parts > 1 ? Vp / parts : Vp;
    start(1, N, 1, 1, Vp);
    Both<floatX> logits = random_both((size_t)N * Vp, 0, 3), garbage = both_of(logits.start);
    Both<int> targets = random_tokens(N, V), some = both_of(targets.start);
    for (int i = 0; i < N; i++) {
        if (counts > 0 && i % counts == 0) continue;
        some.start[i] = -1;
        for (int v = 0; v < Vp; v++) garbage.start[(size_t)i * Vp + v] = to_floatX(v % 3 ? NAN : INFINITY);
    }
    begin_again(some);
    begin_again(garbage);
    Classified want = classified(logits, targets, N, V, Vp, parts), got = classified(garbage, some, N, V, Vp, parts);
    for (int i = 0; i < N; i++) {
        if (some.start[i] < 0) want.losses[i] = want.again[i] = 0;
        for (size_t k = 0; k < want.dlogits.size(); k++)
            if (some.start[i] < 0 && (int)(k / width % N) == i) want.dlogits[k] = to_floatX(0);
    }
    expect_bits("losses beside masked rows", got.losses, want.losses);
    expect_bits("losses beside masked rows and gradients", got.again, want.again);
    expect_bits("dlogits beside masked rows", got.dlogits, want.dlogits);
}
TEST(classifier_and_its_parts_leave_out_masked_rows) {
    for (int parts : { 0, 1, 2, 4 }) for (int counts : { 0, 1, 3 }) check_masked_rows(counts, parts);
}
TEST(a_part_hides_no_inf_or_nan_from_the_others) {
    for (float bad : { NAN, INFINITY, -INFINITY }) {
        start(1, 1, 1, 1, 128);
        Both<floatX> other = random_both(64);
        Both<float> all = unset_both<float>(6), loss = unset_both<float>(1);
        Both<floatX> all_bad = both_of(std::vector<floatX>(64, to_floatX(bad)));
        Both<int> target = both_of(std::vector<int>(1, 67));
        classifier_part_stats(all.gpu, all_bad.gpu, target.gpu, token_range(128, 2, 0), 1, 100);
        classifier_part_stats(all.gpu + 3, other.gpu, target.gpu, token_range(128, 2, 1), 1, 100);
        classifier_part_forward_backward(loss.gpu, other.gpu, all.gpu, target.gpu, 1, token_range(128, 2, 1), 2, 1, 100);
        double got[2] = { number(result_of(loss)[0]), number(result_of(other)[3]) };
        bool harmless = bad == -INFINITY; // probabilities of 0, and no error
        for (double x : got) expect(harmless ? isfinite(x) : isnan(x), "%g beside logits of %g in another part", x, (double)bad);
    }
}

// ---- optimizer ----
typedef struct { Both<floatX> params, grads; Both<float> master, m, v, scale; } Optimizer;
static const AdamW adamw_example = { 1e-2, 0.9, 0.95, 1e-8, 0.1, 3 };

static Optimizer random_optimizer(size_t n, float scale, size_t offset) {
    next_stream = 0;
    Optimizer o = { random_both(n, 0, 1, offset), random_both(n, 0, 1, offset),
                    random_both<float>(NEEDS_MASTER ? n : 0, 0, 1, offset), random_both<float>(n, 0, 0.1f, offset),
                    random_both<float>(n, 0, 0.1f, offset), both_of(std::vector<float>(1, scale)) };
    for (size_t i = 0; i < n; i++) o.v.cpu[i] = o.v.start[i] = fabsf(o.v.start[i]);
    begin_again(o.v);
    return o;
}
static void update_piece(Optimizer& o, size_t begin, size_t end, size_t no_decay) {
    float* master = NEEDS_MASTER ? o.master.gpu + begin : NULL;
    adamw_update(adamw_example, o.params.gpu + begin, master, o.m.gpu + begin, o.v.gpu + begin, o.grads.gpu + begin,
                 o.scale.gpu, end - begin, no_decay > begin ? size_min(no_decay, end) - begin : 0);
}
static void expect_same_optimizer(const char* what, Optimizer& a, Optimizer& b) {
    expect_bits(what, result_of(a.params), result_of(b.params));
    expect_bits(what, result_of(a.master), result_of(b.master));
    expect_bits(what, result_of(a.m), result_of(b.m));
    expect_bits(what, result_of(a.v), result_of(b.v));
}
TEST(adamw_follows_the_cpu) {
    const size_t sizes[5] = { 1, 7, 8, 1000, 4099 };
    start(1, 1, 1, 1, 1);
    for (size_t n : sizes) {
        for (size_t no_decay : { (size_t)0, n / 3, n }) {
            Optimizer o = random_optimizer(n, 0.5f, 0);
            float* master = NEEDS_MASTER ? o.master.cpu : NULL;
            cpu::adamw_update(adamw_example, o.params.cpu, master, o.m.cpu, o.v.cpu, o.grads.cpu, o.scale.cpu, n, no_decay);
            run_twice("adamw_update", [&] { update_piece(o, 0, n, no_decay); }, o.params, o.master, o.m, o.v);
            expect_near("AdamW's m", o.m, 4);
            expect_near("AdamW's v", o.v, 4);
            expect_near("AdamW's master weights", o.master, 4);
            expect_near("AdamW's params", o.params, 4);
        }
    }
}
TEST(adamw_of_a_range_equals_adamw_of_its_pieces_to_the_bit) {
    const size_t n = 2051;
    start(1, 1, 1, 1, 1);
    Optimizer whole = random_optimizer(n, 1, 0);
    update_piece(whole, 0, n, 1001);
    for (size_t cut : { 1, 3, 17, 1024, 2050 }) {
        Optimizer pieces = random_optimizer(n, 1, 0);
        update_piece(pieces, 0, cut, 1001);
        update_piece(pieces, cut, n, 1001);
        expect_same_optimizer("AdamW in two pieces", pieces, whole);
    }
    Optimizer elsewhere = random_optimizer(n, 1, 1);
    update_piece(elsewhere, 0, n, 1001);
    expect_same_optimizer("AdamW of arrays that are not aligned", elsewhere, whole);
}
// fp32 params and widened gradients, as a sharded stage updates them.
TEST(adamw_of_fp32_gives_the_master_weights_to_the_bit) {
    start(1, 1, 1, 1, 1);
    for (size_t n : { 1, 8, 4099 }) {
        for (size_t place = 0; place < 4; place++) { // the arrays' alignment must not change the result
            Optimizer o = random_optimizer(n, 0.5f, 0);
            Both<float> params = both_of(NEEDS_MASTER ? o.master.start : std::vector<float>(n), place % 2);
            Both<float> grads = unset_both<float>(n);
            Both<float> own_m = both_of(o.m.start, place / 2), own_v = both_of(o.v.start, place / 2);
            to_fp32(grads.gpu, o.grads.gpu, n);
            if (!NEEDS_MASTER) to_fp32(params.gpu, o.params.gpu, n);
            update_piece(o, 0, n, n / 3);
            adamw_update_fp32(adamw_example, params.gpu, own_m.gpu, own_v.gpu, grads.gpu, o.scale.gpu, n, n / 3);
            if (!NEEDS_MASTER) to_fp32(grads.gpu, o.params.gpu, n); // they are their own master
            expect_bits("AdamW of fp32: params", result_of(params), result_of(NEEDS_MASTER ? o.master : grads));
            expect_bits("AdamW of fp32: m", result_of(own_m), result_of(o.m));
            expect_bits("AdamW of fp32: v", result_of(own_v), result_of(o.v));
        }
    }
}
TEST(adamw_without_params_gives_the_same_master_weights_to_the_bit) {
    start(1, 1, 1, 1, 1);
    for (size_t n : { 1, 8, 4099 }) {
        for (size_t place = 0; place < 2; place++) {
            Optimizer o = random_optimizer(n, 0.5f, 0);
            std::vector<float> before = o.master.start; // in fp32 params are their own master
            if (!NEEDS_MASTER) for (floatX x : o.params.start) before.push_back(to_float(x));
            Both<float> master = both_of(before, place), m = both_of(o.m.start, place), v = both_of(o.v.start, place);
            Both<float> in_fp32 = unset_both<float>(NEEDS_MASTER ? 0 : n);
            update_piece(o, 0, n, n / 3);
            run_twice("adamw_update without params", [&] {
                adamw_update(adamw_example, NULL, master.gpu, m.gpu, v.gpu, o.grads.gpu, o.scale.gpu, n, n / 3);
            }, master, m, v);
            if (!NEEDS_MASTER) to_fp32(in_fp32.gpu, o.params.gpu, n);
            expect_bits("AdamW without params: master", result_of(master), result_of(NEEDS_MASTER ? o.master : in_fp32));
            expect_bits("AdamW without params: m", result_of(m), result_of(o.m));
            expect_bits("AdamW without params: v", result_of(v), result_of(o.v));
        }
    }
}
// What --cpu-offload updates: the host's form as the GPU's compiler made it, against the CPU's layers.
TEST(adamw_of_shards_on_the_host_gives_the_bits_of_the_cpu) {
    start(1, 1, 1, 1, 1);
    for (size_t n : { 1, 8193, 16390 }) {
        for (size_t no_decay : { (size_t)0, (size_t)8197, n }) { // 8197: in the second slice
            Optimizer o = random_optimizer(n, 0.5f, 0);
            std::vector<floatX> params(n, to_floatX(NAN));
            std::vector<float> master(n), m = o.m.start, v = o.v.start;
            for (size_t i = 0; i < n; i++) master[i] = NEEDS_MASTER ? o.master.start[i] : to_float(o.params.start[i]);
            cpu::adamw_update(adamw_example, o.params.cpu, NEEDS_MASTER ? o.master.cpu : NULL, o.m.cpu, o.v.cpu, o.grads.cpu,
                              o.scale.cpu, n, no_decay);
            host_adamw_update(adamw_example, NEEDS_MASTER ? params.data() : NULL, master.data(), m.data(), v.data(),
                              o.grads.start.data(), FLOATX_DTYPE, 0.5f, n, no_decay);
            expect_bits("AdamW on the host: m", m, std::vector<float>(o.m.cpu, o.m.cpu + n));
            expect_bits("AdamW on the host: v", v, std::vector<float>(o.v.cpu, o.v.cpu + n));
            if (NEEDS_MASTER) {
                expect_bits("AdamW on the host: master", master, std::vector<float>(o.master.cpu, o.master.cpu + n));
                expect_bits("AdamW on the host: params", params, std::vector<floatX>(o.params.cpu, o.params.cpu + n));
            } else for (size_t i = 0; i < n; i++) expect(master[i] == to_float(o.params.cpu[i]), "AdamW on the host: weight %zu", i);
        }
    }
}
TEST(adamw_changes_nothing_when_the_step_is_skipped) {
    start(1, 1, 1, 1, 1);
    Optimizer o = random_optimizer(100, 0, 0), before = random_optimizer(100, 0, 0);
    o.grads.start[7] = to_floatX(NAN);
    begin_again(o.grads);
    update_piece(o, 0, 100, 10);
    expect_same_optimizer("a step that is skipped", o, before);
    if (NEEDS_MASTER) adamw_update(adamw_example, NULL, o.master.gpu, o.m.gpu, o.v.gpu, o.grads.gpu, o.scale.gpu, 100, 10);
    expect_same_optimizer("a step without params that is skipped", o, before);
}

// ---- numbers about a step ----
TEST(sums_depend_on_the_number_of_elements_alone) {
    const size_t sizes[6] = { 0, 1, 7, 1000, 10003, 150001 };
    start(1, 1, 1, 1, 1);
    for (size_t n : sizes) {
        if (quick && n > 10003) break;
        Both<floatX> x = random_both(n, 0.5f), moved = both_of(x.start, 1);
        Both<float> y = random_both<float>(n, 0.5f), y_moved = both_of(y.start, 1);
        for (int square = 0; square < 3; square++) {
            Both<double> sum = both_of(std::vector<double>(1, 3.0)), other = both_of(std::vector<double>(1, 3.0));
            if (square == 2) {
                cpu::add_sum_squares_fp32(sum.cpu, y.cpu, n);
                run_twice("add_sum_squares_fp32", [&] { add_sum_squares_fp32(sum.gpu, y.gpu, n); }, sum);
                add_sum_squares_fp32(other.gpu, y_moved.gpu, n);
            } else if (square) {
                cpu::add_sum_squares(sum.cpu, x.cpu, n);
                run_twice("add_sum_squares", [&] { add_sum_squares(sum.gpu, x.gpu, n); }, sum);
                add_sum_squares(other.gpu, moved.gpu, n);
            } else {
                cpu::add_sum(sum.cpu, y.cpu, n);
                run_twice("add_sum", [&] { add_sum(sum.gpu, y.gpu, n); }, sum);
                add_sum(other.gpu, y_moved.gpu, n);
            }
            double got = result_of(sum)[0];
            double tolerance = 1e-14 * (double)n + 1e-13 * fabs(*sum.cpu);
            expect(fabs(got - *sum.cpu) <= tolerance, "a sum of %zu numbers is %.17g, not %.17g", n, got, *sum.cpu);
            expect_bits("a sum of numbers that are not aligned", result_of(other), result_of(sum));
        }
    }
}
// In either type: --cpu-offload sums shards on the host.
TEST(sums_on_the_host_have_the_bits_of_the_cpu) {
    start(1, 1, 1, 1, 1);
    for (size_t n : { 0, 1, 1000, 33001 }) {
        Both<floatX> x = random_both(n, 0.5f);
        std::vector<float> wide(n);
        for (size_t i = 0; i < n; i++) wide[i] = to_float(x.start[i]);
        double sum = 0;
        cpu::add_sum_squares(&sum, x.cpu, n);
        double narrow_got = host_sum_squares(x.start.data(), FLOATX_DTYPE, n), wide_got = host_sum_squares(wide.data(), DTYPE_F32, n);
        expect(narrow_got == sum, "a sum of %zu numbers of floatX is %.17g, not %.17g", n, narrow_got, sum);
        expect(wide_got == sum, "a sum of %zu numbers of fp32 is %.17g, not %.17g", n, wide_got, sum);
    }
}
// An array's alignment decides which thread reads what, and nothing else.
TEST(arrays_are_scaled_and_added_to_the_bit_as_on_the_cpu) {
    start(1, 1, 1, 1, 1);
    for (size_t n : { 0, 1, 7, 8, 1000, 4099 }) {
        for (size_t place = 0; place < 4; place++) {
            Both<floatX> scaled = random_both(n, 0, 1, place % 2), x = random_both(n, 0, 1, place % 2);
            Both<floatX> y = random_both(n, 0, 0.1f, place / 2);
            cpu::scale_in_place(scaled.cpu, 1.0f / 3, n);
            cpu::add_in_place(x.cpu, y.cpu, n);
            run_twice("scale_in_place", [&] { scale_in_place(scaled.gpu, 1.0f / 3, n); }, scaled);
            run_twice("add_in_place", [&] { add_in_place(x.gpu, y.gpu, n); }, x);
            expect_bits("scale_in_place", result_of(scaled), std::vector<floatX>(scaled.cpu, scaled.cpu + n));
            expect_bits("add_in_place", result_of(x), std::vector<floatX>(x.cpu, x.cpu + n));
            expect_bits("what add_in_place adds", result_of(y), y.start);
            Both<float> wide = random_both<float>(n, 0, 1, place % 2), added = random_both<float>(n, 0, 0.1f, place / 2);
            cpu::add_in_place_fp32(wide.cpu, added.cpu, n);
            run_twice("add_in_place_fp32", [&] { add_in_place_fp32(wide.gpu, added.gpu, n); }, wide);
            expect_bits("add_in_place_fp32", result_of(wide), std::vector<float>(wide.cpu, wide.cpu + n));
        }
    }
}
TEST(clipping_follows_the_cpu_to_the_bit) {
    const double squares[7] = { 0, 4, 2, 1e-12, 1e12, INFINITY, NAN };
    start(1, 1, 1, 1, 1);
    for (double square : squares) {
        for (float max_norm : { 0.0f, 1.0f }) {
            for (float loss_scale : { 1.0f, 1024.0f }) {
                StepStats empty = { 1, square, 3, -1, -1 };
                Both<StepStats> s = both_of(std::vector<StepStats>(1, empty));
                cpu::clip_gradients(s.cpu, max_norm, loss_scale);
                run_twice("clip_gradients", [&] { clip_gradients(s.gpu, max_norm, loss_scale); }, s);
                StepStats got = result_of(s)[0];
                double norm = got.grad_norm, norm_wanted = s.cpu->grad_norm, scale = got.grad_scale, scale_wanted = s.cpu->grad_scale;
                expect(scale == scale_wanted, "the scale is %g, not %g", scale, scale_wanted);
                expect(norm == norm_wanted || (isnan(norm) && isnan(norm_wanted)), "the norm is %g, not %g", norm, norm_wanted);
            }
        }
    }
}
TEST(casts_round_as_the_cpu_does) {
    start(1, 1, 1, 1, 1);
    for (size_t offset : { 0, 1 }) {
        Both<float> wide = random_both<float>(1003, 0, 1, offset), back = unset_both<float>(1003);
        Both<floatX> narrowed = unset_both(1003);
        for (size_t i = 0; i < wide.n; i++) {
            narrowed.cpu[i] = to_floatX(wide.cpu[i]);
            back.cpu[i] = to_float(narrowed.cpu[i]);
        }
        from_fp32(narrowed.gpu, wide.gpu, wide.n);
        to_fp32(back.gpu, narrowed.gpu, wide.n);
        expect_bits("a cast to floatX", result_of(narrowed), std::vector<floatX>(narrowed.cpu, narrowed.cpu + wide.n));
        expect_bits("a cast back", result_of(back), std::vector<float>(back.cpu, back.cpu + wide.n));
    }
}

// ---- alignment ----
// One array after the other is not aligned to 16 bytes, and no kernel may read 16 bytes at once from it.
TEST(arrays_that_are_not_aligned_are_read_element_by_element) {
    if (quick) return;
    void (*checks[])(void) = {
        [] { check_encoder(1, 3, 16, 3); }, [] { check_encoder_in_parts(1, 3, 16, 3, 4, 2); }, [] { check_layernorm(2, 16, 0); },
        [] { check_bias_gelu(2, 16); }, [] { check_bias_backward(2, 16); }, [] { check_classifier(3, 10, 16); },
        [] { check_classifier_in_parts(3, 27, 32, 2, 0); }, [] { check_attention(1, 3, 1, 16, 1); }, [] { check_attention(1, 3, 1, 64, 1); },
    };
    for (void (*check)(void) : checks) {
        for (unaligned_array = 0; unaligned_array == 0 || unaligned_array < arrays; unaligned_array++) check();
    }
    unaligned_array = -1;
}
