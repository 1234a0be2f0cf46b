// test_cuda_matmul.cu - every linear layer of llmc/device/cuda/matmul.cuh against the CPU's, on a GPU or under the emulator: with
// each algorithm that cuBLASLt offers, with its epilogues and with our kernels instead; and how plans are tried and kept.
#include "../../llmc/device/cuda/common.cuh"
#define GELU_EPILOGUES 1 // in fp32, too, where programs do without until this test has shown on a GPU how exact they are
#include "../../llmc/device/cuda/matmul.cuh"
#include "cuda_both.h"

// Prepares both sides for layers of up to N rows and OC outputs.
static void start(int N, int OC) {
    LayerShapes s = layer_shapes(1, N, (OC + 3) / 4, 1, 1, 1);
    if (cuda_matmul.handle != NULL) matmul_free();
    start_both(s, size_max(MATMUL_WORKSPACE, bias_workspace_bytes(s)));
    cuda_layers.bias_sums = unset_both(bias_sums_bytes(s) / sizeof(floatX)).gpu;
    cuda_check(cudaDeviceSynchronize(), "filling the workspace");
    // not the default stream, which every copy waits for
    if (compute_stream == NULL) cuda_check(cudaStreamCreateWithFlags(&compute_stream, cudaStreamNonBlocking), "a stream");
    matmul_init();
}

// ---- every way of computing a product ----
// Even ways use epilogues, odd ones a kernel after the product; each pair uses another algorithm. Returns how many there are.
static int way;
static int force_way(void) {
    int most = 1;
    for (MatmulPlan& plan : cuda_matmul.plans) {
        bool has_epilogue = plan.shape.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
        if (plan.last_use == 0) continue;
        plan.chosen = plan.candidates == 0 || (has_epilogue && way % 2 == 1) ? -1 : way / 2 % plan.candidates;
        most = std::max(most, plan.candidates);
    }
    return 2 * most;
}
// A kernel does an epilogue that cuBLASLt refuses, so only the time shows it. The emulator's cuBLASLt has them all.
static void expect_epilogues(void) {
    for (MatmulPlan& plan : cuda_matmul.plans) {
        ProductShape s = plan.shape;
        if (plan.last_use == 0 || plan.candidates > 0 || s.alignment < 16 || s.m % 8 != 0) continue;
#ifdef CUDA_EMULATOR
        fail("epilogue %d of a product (%d,%d) with %d sums is refused", s.epilogue, s.m, s.n, s.k);
#else
        printf("# epilogue %d of a product (%d,%d) with %d sums is refused\n", s.epilogue, s.m, s.n, s.k);
#endif
    }
}

// Calls a layer in every way, and compares each of its outputs.
template <typename V, typename... P, typename... A>
static void every_way(const char* what, void (*cpus)(P...), void (*gpus)(P...), V compare, const A&... arguments) {
    gpus(of_gpu(arguments)...); // makes the plans
    expect_epilogues();
    for (way = 0; failures_in_test == 0 && way < force_way() && !(quick && way == 2); way++)
        on_both(what, cpus, gpus, compare, arguments...);
}
#define EVERY_WAY(roundings, f, ...) \
    every_way(#f, cpu::f, f, [&](const char* what, const auto& output) { expect_near(what, output, roundings); }, __VA_ARGS__)

// fp32 roundings by which a sum of k products may be off, in units of the largest such sum: they behave like a random walk.
static double of_sum(int k) { return 8 + 2 * sqrt(k); }
// If a kernel follows the product, the product was rounded to floatX in between: by half a unit of at most the largest result.
static double rounded_between(void) { return NEEDS_MASTER ? 1.01 * ROUNDING / F32_ROUNDING : 0; }

static double gelu_of(double x) { return x / (1 + exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static struct { double error, of_bound; } largest_gelu[2]; // of epilogues, of our kernel: over all tests so far
// Compares out with gelu(pre): cuBLASLt takes the GELU of the sum before rounding, which is up to half a unit away from pre.
static void expect_gelu(const Both<floatX>& out, const Both<floatX>& pre, double roundings) {
    std::vector<floatX> got = result_of(out), sums = result_of(pre);
    for (size_t i = 0; i < out.n; i++) {
        double x = number(sums[i]), want = gelu_of(x), half = 1.01 * ROUNDING * fabs(x) + roundings * F32_ROUNDING;
        double range = fmax(fabs(gelu_of(x + half) - want), fabs(gelu_of(x - half) - want));
        double tolerance = range + 2.02 * ROUNDING * fabs(want) + 8 * F32_ROUNDING;
        double error = fabs(number(got[i]) - want);
        largest_gelu[way % 2].error = fmax(largest_gelu[way % 2].error, error);
        largest_gelu[way % 2].of_bound = fmax(largest_gelu[way % 2].of_bound, error / tolerance);
        if (!(error <= tolerance)) {
            fail("gelu: element %zu of %zu is %.9g, not %.9g within %.3g", i, out.n, number(got[i]), want, tolerance);
            return;
        }
    }
}

static void check_forward(int N, int C, int OC) {
    start(N, OC);
    size_t n = (size_t)N * OC;
    Both<floatX> inp = random_both((size_t)N * C), w = random_both((size_t)OC * C), bias = random_both(OC, 0, 3);
    Both<floatX> out = unset_both(n), pre = unset_both(n), act = unset_both(n);
    EVERY_WAY(of_sum(C), matmul_forward, out, inp, w, nullptr, N, C, OC);
    EVERY_WAY(of_sum(C) + rounded_between(), matmul_forward, out, inp, w, bias, N, C, OC);
    every_way("matmul_gelu_forward", cpu::matmul_gelu_forward, matmul_gelu_forward, [&](const char* what, const Both<floatX>& output) {
        if (output.gpu == pre.gpu) expect_near(what, pre, of_sum(C) + rounded_between());
        else expect_gelu(act, pre, of_sum(C) * 4 * sqrt(C));
    }, act, pre, inp, w, bias, N, C, OC);
}
static void check_backward_input(int N, int C, int OC) {
    start(N, OC);
    size_t n = (size_t)N * C;
    Both<floatX> dout = random_both((size_t)N * OC), w = random_both((size_t)OC * C), pre = random_both(n), dinp = unset_both(n);
    EVERY_WAY(of_sum(OC), matmul_backward_input, dinp, dout, w, N, C, OC);
    EVERY_WAY(of_sum(OC) + 8 + rounded_between(), matmul_gelu_backward_input, dinp, dout, w, pre, N, C, OC);
}
static void check_backward_weight(int N, int C, int OC) {
    start(N, OC);
    Both<floatX> dout = random_both((size_t)N * OC), inp = random_both((size_t)N * C);
    for (GradMode mode : both_modes) {
        Both<floatX> dw = gradient_before((size_t)OC * C, mode), dbias = gradient_before(OC, mode);
        // what an epilogue adds to dbias was rounded to floatX before
        every_way("matmul_backward_weight", cpu::matmul_backward_weight, matmul_backward_weight, [&](const char* what, const Both<floatX>& output) {
            expect_near(what, output, of_sum(N) + (mode == GRAD_ADD && output.gpu == dbias.gpu ? rounded_between() : 0));
        }, dw, dbias, dout, inp, N, C, OC, mode);
        EVERY_WAY(of_sum(N), matmul_backward_weight, dw, nullptr, dout, inp, N, C, OC, mode);
    }
}

static const int shapes[][3] = { // N, C, OC
    { 1, 1, 1 }, { 1, 16, 32 }, { 5, 7, 3 }, { 33, 17, 65 }, { 2, 8, 8 }, { 64, 32, 96 }, { 96, 48, 64 }, { 40, 24, 130 },
};
static void over_shapes(void (*check)(int, int, int)) {
    for (const int* s : shapes) check(s[0], s[1], s[2]);
}
TEST(products_with_bias_and_gelu_in_every_way) {
    over_shapes(check_forward);
    printf("# largest error of GELU in " FLOATX_NAME ": %.2g by cuBLASLt, %.2f of its bound; %.2g by our kernel, %.2f of its bound\n",
           largest_gelu[0].error, largest_gelu[0].of_bound, largest_gelu[1].error, largest_gelu[1].of_bound);
}
TEST(gradients_of_inputs_in_every_way) { over_shapes(check_backward_input); }
TEST(gradients_of_weights_and_biases_set_or_add_in_every_way) { over_shapes(check_backward_weight); }
// The rows come in chunks, whose sum nearly cancels: rounded to 16 bits after each, it would be far off. Sums on the way are
// about 8 sqrt(N/2) = 53, the largest result 0.2. N additions round there, on either side: by 53 / 0.2 sqrt(N), 2,500 roundings
// of the result, as a standard deviation, of which the worst of 640 elements has several. A sum that is rounded to 16 bits on
// the way is off by 100,000.
TEST(chunks_of_a_weight_gradient_are_rounded_once) {
    static constexpr int rows = 24, N = 4 * rows - 8, C = 16, OC = 40; // the last chunk has fewer
    for (GradMode mode : both_modes) {
        start(N, OC);
        Both<floatX> dout = made_both(N * OC, [](size_t i) {
            float x = (float)random_normal(42, 1, i % (N / 2 * OC));
            return i < N / 2 * OC ? 8 * x : -8 * x + 0.01f * (float)random_normal(42, 2, i);
        });
        std::vector<floatX> half = random_both(N / 2 * C).start;
        Both<floatX> inp = made_both(N * C, [&](size_t i) { return number(half[i % half.size()]); });
        Both<floatX> dw = gradient_before((size_t)OC * C, mode);
        Both<float> sums = unset_both<float>(NEEDS_MASTER ? (size_t)OC * C : 0);
        cuda_layers.weight_sums = NEEDS_MASTER ? sums.gpu : NULL;
        auto by_chunks = [](floatX* dw, floatX*, const floatX* dout, const floatX* inp, int, int, int, GradMode mode) {
            for (int row = 0; row < N; row += rows)
                matmul_backward_weight_chunk(dw, dout + row * OC, inp + row * C, row, std::min(rows, N - row), N, C, OC, mode);
        };
        every_way("a weight's gradient by chunks", cpu::matmul_backward_weight, +by_chunks, [](const char* what, const auto& output) {
            expect_near(what, output, 16000);
        }, dw, nullptr, dout, inp, N, C, OC, mode);
    }
}
TEST(arrays_that_are_not_aligned) {
    for (auto check : { check_forward, check_backward_input, check_backward_weight })
        for (unaligned_array = 0; unaligned_array == 0 || unaligned_array < arrays; unaligned_array++) check(8, 16, 24);
    unaligned_array = -1;
}

// ---- which way is chosen, and that timing leaves no trace ----
template <typename F> static int plans_that(F f) {
    return (int)std::count_if(std::begin(cuda_matmul.plans), std::end(cuda_matmul.plans), f);
}
static int timed_plans(void) { return plans_that([](MatmulPlan& p) { return p.timed; }); }
static int plans_in_use(void) { return plans_that([](MatmulPlan& p) { return p.last_use > 0; }); }
static int bias_gradient_plans(void) {
    return plans_that([](MatmulPlan& p) { return p.last_use > 0 && p.shape.epilogue == CUBLASLT_EPILOGUE_BGRADB; });
}
// A layer of 16 rows, forward and backward, with gradients that are added or set.
static void check_layer(int C, int OC) {
    const int N = 16;
    Both<floatX> inp = random_both((size_t)N * C), w = random_both((size_t)OC * C), bias = random_both(OC);
    Both<floatX> out = unset_both((size_t)N * OC), dout = random_both((size_t)N * OC), dinp = unset_both((size_t)N * C);
    Both<floatX> dw = random_both((size_t)OC * C), dbias = random_both(OC);
    for (GradMode mode : { GRAD_ADD, GRAD_SET, GRAD_ADD }) {
        NEAR(of_sum(C) + rounded_between(), matmul_forward, out, inp, w, bias, N, C, OC);
        NEAR(of_sum(OC) + rounded_between(), matmul_backward_input, dinp, dout, w, N, C, OC);
        NEAR(of_sum(N) + rounded_between(), matmul_backward_weight, dw, dbias, dout, inp, N, C, OC, mode);
    }
}
static void check_step(bool tries, int timed_wanted) {
    start(16, 32);
    cuda_matmul.tries = tries;
    check_layer(24, 32);
    expect(timed_plans() == timed_wanted, "%d plans were timed, not %d", timed_plans(), timed_wanted);
}
TEST(only_what_is_overwritten_is_timed) {
    check_step(true, 5); // dinp, and the others with their epilogues and alone
    check_step(false, 0);
}
// A model of 32 channels, a micro-batch of 16 rows, a vocabulary of which the classifier takes all rows at once.
static const LayerShapes small_model = layer_shapes(2, 8, 32, 2, 64, 1);
static void prepare(LayerShapes s, bool deterministic) {
    start(s.B * s.T, 4 * s.C);
    void* workspace = cuda_layers.workspace;
    cuda_layers.deterministic = deterministic;
    cuda_layers.workspace = NULL;
    matmul_prepare(s);
    expect(cuda_layers.workspace == NULL && !cuda_matmul.tries, "what was set while products are tried is left behind");
    cuda_layers.workspace = workspace;
}
TEST(every_product_of_a_step_is_tried_before_it) {
    // a layer has five (forward, dinp, dw; two of them also without epilogue), fcproj a sixth, the classifier three
    const int C = small_model.C, tried = 24;
    prepare(small_model, false);
    expect(timed_plans() == tried && plans_in_use() == tried, "%d plans were made, and %d timed", plans_in_use(), timed_plans());
    check_layer(C, 3 * C);
    check_layer(C, C);
    expect(plans_in_use() == tried, "training makes %d plans that were not tried", plans_in_use() - tried);
    check_layer(C, 2 * C); // no layer of a model
    expect(plans_in_use() > tried && timed_plans() == tried, "another shape was timed");
}
// One of two ranks that share the model: its partial products, with and without the bias that one rank adds.
TEST(partial_products_are_tried_too) {
    const int N = 16, C = 32, Vp = 64;
    LayerShapes s = layer_shapes(2, 8, C, 2, Vp, 2);
    prepare(s, false);
    int timed = timed_plans();
    Both<floatX> wide = random_both((size_t)N * 2 * C), w = random_both((size_t)Vp * C), bias = random_both(C);
    Both<floatX> out = unset_both((size_t)N * C);
    for (int in : { C / 2, 2 * C }) { // proj, fcproj
        for (const floatX* b : { bias.gpu, none<floatX>.gpu }) matmul_forward(out.gpu, wide.gpu, w.gpu, b, N, in, C);
    }
    for (int outputs : { 3 * C / 2, 2 * C, Vp }) matmul_backward_input(out.gpu, wide.gpu, w.gpu, N, C, outputs); // qkv, fc, the classifier
    layers_overlap_sum(true);
    for (int outputs : { 3 * C / 2, 2 * C }) matmul_backward_weight(w.gpu, NULL, wide.gpu, out.gpu, N, C, outputs, GRAD_ADD);
    for (int in : { C / 2, 2 * C }) matmul_backward_weight(w.gpu, NULL, out.gpu, wide.gpu, N, in, C, GRAD_ADD);
    layers_overlap_sum(false);
    expect(timed == 29, "%d plans were timed", timed);
    expect(plans_in_use() == timed, "training makes %d plans that were not tried", plans_in_use() - timed);
}
// What a sum holds of the GPU is left to it: by other plans, with the same numbers.
TEST(products_beside_a_sum_are_for_the_multiprocessors_that_it_leaves) {
    auto plans_for_fewer = [] { return plans_that([](MatmulPlan& p) { return p.last_use > 0 && p.shape.processors > 0; }); };
    prepare(small_model, false);
    layers_overlap_sum(true);
    expect(cuda_matmul.processors == std::max(cuda_matmul.all_processors - SUM_PROCESSORS, 1), "%d", cuda_matmul.processors);
    check_layer(40, 24);
    int beside = plans_for_fewer();
    layers_overlap_sum(false);
    check_layer(40, 24);
    expect(beside > 0 && plans_for_fewer() == beside, "%d plans beside a sum, %d after it", beside, plans_for_fewer());
    cuda_layers.deterministic = true;
    layers_overlap_sum(true);
    expect(cuda_matmul.processors == 0, "a deterministic run has other plans beside a sum");
    layers_overlap_sum(false);
}
TEST(deterministic_runs_time_nothing_and_leave_biases_to_our_kernel) {
    prepare(small_model, true);
    check_layer(32, 96);
    expect(timed_plans() == 0, "%d plans were timed in a deterministic run", timed_plans());
    expect(bias_gradient_plans() == 0, "cuBLASLt computes bias gradients in a deterministic run");
    prepare(small_model, false);
    check_layer(32, 96);
    expect(bias_gradient_plans() == 4, "%d plans for bias gradients, not 4", bias_gradient_plans());
}
#ifdef CUDA_EMULATOR
// Algorithm 2 comes first. It fails when it is run, and leaves an error of the runtime behind; or its result says not to use it.
TEST(candidates_that_fail_are_skipped) {
    for (const char* setting : { "CUDA_EMULATOR_CUBLASLT_FAILS", "CUDA_EMULATOR_CUBLASLT_INVALID" }) {
        setenv(setting, "4", 1);
        prepare(small_model, false);
        for (const MatmulPlan& plan : cuda_matmul.plans) {
            bool runs = strstr(setting, "FAILS") != NULL;
            expect(!plan.timed || plan.candidates == (runs ? 3 : 2), "%d candidates", plan.candidates);
            expect(!plan.timed || !runs || plan.chosen != 0, "a candidate was chosen that fails");
        }
        check_layer(32, 96);
        unsetenv(setting);
    }
}
#endif
// Layers of one shape share a plan, but not their biases.
TEST(each_call_has_its_own_bias_and_gelu_input) {
    const int N = 8, C = 16, OC = 24;
    start(N, OC);
    Both<floatX> inp = random_both((size_t)N * C), w = random_both((size_t)OC * C);
    for (int layer = 0; layer < 2; layer++) {
        Both<floatX> bias = random_both(OC, 0, 3), pre = unset_both((size_t)N * OC), act = unset_both((size_t)N * OC);
        Both<floatX> dout = random_both((size_t)N * OC), dw = unset_both((size_t)OC * C), dbias = unset_both(OC);
        BOTH(matmul_gelu_forward, act, pre, inp, w, bias, N, C, OC);
        expect_near("what goes into gelu", pre, of_sum(C) + rounded_between());
        NEAR(of_sum(N), matmul_backward_weight, dw, dbias, dout, inp, N, C, OC, GRAD_SET);
    }
}
TEST(plans_of_training_outlive_those_of_sampling) {
    const int N = 2 * MATMUL_PLANS, C = 8;
    start(N, C);
    Both<floatX> inp = random_both((size_t)N * C), w = random_both((size_t)C * C), out = unset_both((size_t)N * C);
    cpu::matmul_forward(out.cpu, inp.cpu, w.cpu, NULL, N, C, C);
    for (int rows = N; rows >= 1; rows--) {
        cuda_matmul.tries = rows == N;
        matmul_forward(out.gpu, inp.gpu, w.gpu, NULL, rows, C, C);
    }
    expect_near("products of many lengths", out, of_sum(C));
    expect(timed_plans() == 1, "%d plans are timed, not 1", timed_plans());
}
