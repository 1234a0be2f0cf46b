/*
test_layers.c - every layer against its definition in double precision, written here a second time and naively.

Forward results are compared with the definition; gradients with central differences of the definition under a random
cotangent; results that must not depend on threads, slices or order are compared to the bit. Compiled once for each
precision: in 16 bits the inputs are rounded first, so that the bounds need to allow only for the layer's own rounding.
*/
#include "../../llmc/device/layers.h"
#include "../../llmc/base/rng.h"
#include "expect_death.h"

// Half a unit in the last place of floatX, relative.
#if defined(PRECISION_BF16)
#define ROUNDING (1.0 / 256)
#elif defined(PRECISION_FP16)
#define ROUNDING (1.0 / 2048)
#else
#define ROUNDING (1.0 / 16777216)
#endif
#define F32_ROUNDING (1.0 / 16777216)
#define NOISE 1e-10 // of the finite differences

// ---- tensors: what the layer sees, and the same numbers in double ----
typedef struct { floatX* x; double* d; size_t n; } Tensor;
static void* owned[512];
static int owned_count;
static uint64_t next_stream;

static void* own(size_t n, size_t size) {
    require(owned_count < 512, "a test makes more than 512 arrays");
    return owned[owned_count++] = xcalloc(n, size);
}
static double* doubles(size_t n) { return (double*)own(n, sizeof(double)); }
static float* floats(size_t n) { return (float*)own(n, sizeof(float)); }
static void free_arrays(void) {
    while (owned_count > 0) free(owned[--owned_count]);
    next_stream = 0;
}
void after_each(void) { layers_free(); free_arrays(); }
static void set_element(Tensor t, size_t i, double value) {
    t.x[i] = to_floatX((float)value);
    t.d[i] = (double)to_float(t.x[i]);
}
// n numbers from N(mean, std), rounded to floatX
static Tensor random_tensor(size_t n, double mean, double std) {
    Tensor t = { (floatX*)own(n, sizeof(floatX)), doubles(n), n };
    next_stream++;
    for (size_t i = 0; i < n; i++) set_element(t, i, mean + std * (double)random_normal(42, next_stream, i));
    return t;
}
// n NaNs, which show where a write was forgotten
static Tensor unset_tensor(size_t n) {
    Tensor t = { (floatX*)own(n, sizeof(floatX)), doubles(n), n };
    for (size_t i = 0; i < n; i++) set_element(t, i, NAN);
    return t;
}
static float* unset_floats(size_t n) {
    float* x = floats(n);
    for (size_t i = 0; i < n; i++) x[i] = NAN;
    return x;
}
static floatX* copy_of(const floatX* x, size_t n) { return (floatX*)memcpy(own(n, sizeof(floatX)), x, n * sizeof(floatX)); }

static double largest(const double* d, size_t n) {
    double m = 0;
    for (size_t i = 0; i < n; i++) m = fmax(m, fabs(d[i]));
    return m;
}
// |got - want| <= relative |want| + absolute, for each element; NaN fails
static void expect_near(const char* what, double got, double want, double relative, double absolute) {
    double tolerance = relative * fabs(want) + absolute;
    if (!(fabs(got - want) <= tolerance)) fail_msg("%s: got %.9g, want %.9g within %.3g", what, got, want, tolerance);
}
// Results stored in floatX, from fp32 sums over terms whose rounding errors are `roundings` units of the largest result.
static void expect_tensor(const char* what, const floatX* got, const double* want, size_t n, double roundings) {
    double scale = largest(want, n);
    for (size_t i = 0; i < n; i++) expect_near(what, (double)to_float(got[i]), want[i], 1.01 * ROUNDING, roundings * F32_ROUNDING * scale + NOISE);
}
static void expect_floats(const char* what, const float* got, const double* want, size_t n, double roundings) {
    double scale = largest(want, n);
    for (size_t i = 0; i < n; i++) expect_near(what, (double)got[i], want[i], 0, roundings * F32_ROUNDING * scale + NOISE);
}

// ---- finite differences ----
typedef double (*Objective)(const void* inputs); // the cotangent's product with the definition's result
// gradient (n) of f with respect to x (n), which f reads
static void differentiate(double* gradient, Objective f, const void* inputs, double* x, size_t n) {
    const double h = 1e-4;
    for (size_t i = 0; i < n; i++) {
        double kept = x[i], value[4];
        const double steps[4] = { -2 * h, -h, h, 2 * h }; // five-point formula: the error is of order h^4
        for (int k = 0; k < 4; k++) {
            x[i] = kept + steps[k];
            value[k] = f(inputs);
        }
        x[i] = kept;
        gradient[i] = (value[0] - 8 * value[1] + 8 * value[2] - value[3]) / (12 * h);
    }
}
static double dot(const double* a, const double* b, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}
// Checks a gradient in floatX that was set, or added to `before`, as mode says.
static void expect_gradient(const char* what, const floatX* got, const floatX* before, GradMode mode, const double* want, size_t n, double roundings) {
    double* total = doubles(n);
    for (size_t i = 0; i < n; i++) total[i] = want[i] + (mode == GRAD_ADD ? (double)to_float(before[i]) : 0);
    expect_tensor(what, got, total, n, roundings);
}
static const GradMode both_modes[2] = { GRAD_SET, GRAD_ADD };

static void start(int B, int T, int C, int NH, int Vp) {
    LayerShapes s = { B, T, C, NH, Vp, 1 };
    layers_free(); // of the shapes before
    layers_init(s);
}

// ---- embeddings ----
static int* random_tokens(int n, int V) {
    int* tokens = (int*)own((size_t)n, sizeof(int));
    for (int i = 0; i < n; i++) tokens[i] = (int)(random_uniform(7, (uint64_t)n, (uint64_t)i) * (float)V);
    return tokens;
}

static void check_encoder(int B, int T, int C, int V) {
    start(B, T, C, 1, V);
    int N = B * T, *tokens = random_tokens(N, V);
    size_t n = (size_t)N * (size_t)C;
    Tensor wte = random_tensor((size_t)V * (size_t)C, 0, 1), wpe = random_tensor((size_t)T * (size_t)C, 0, 1), out = unset_tensor(n);
    double* want = doubles(n);
    for (int i = 0; i < N; i++) for (int c = 0; c < C; c++) want[i*C + c] = wte.d[tokens[i]*C + c] + wpe.d[i % T * C + c];
    encoder_forward(out.x, tokens, wte.x, wpe.x, B, T, C);
    expect_tensor("encoder_forward", out.x, want, n, 0.5);

    Tensor dout = random_tensor(n, 0, 1), before_e = random_tensor(wte.n, 0, 1), before_p = random_tensor(wpe.n, 0, 1);
    double *dwte = doubles(wte.n), *dwpe = doubles(wpe.n);
    for (int i = 0; i < N; i++) for (int c = 0; c < C; c++) {
        dwte[tokens[i]*C + c] += dout.d[i*C + c];
        dwpe[i % T * C + c] += dout.d[i*C + c];
    }
    for (int m = 0; m < 2; m++) {
        floatX *de = copy_of(before_e.x, wte.n), *dp = copy_of(before_p.x, wpe.n);
        encoder_backward(de, dp, dout.x, tokens, B, T, C, both_modes[m]);
        expect_gradient("encoder_backward's dwte", de, before_e.x, GRAD_ADD, dwte, wte.n, N);
        expect_gradient("encoder_backward's dwpe", dp, before_p.x, both_modes[m], dwpe, wpe.n, B);
    }
}
TEST(encoder_adds_token_and_position_and_sums_their_gradients) {
    check_encoder(2, 5, 7, 3);
    check_encoder(1, 1, 1, 1);
    check_encoder(3, 12, 300, 5); // more channels than are summed at a time, tokens that occur often
}

// Rows `range` of a matrix (Vp,C) in a place of its own, between two rows of NaN that no one may read.
static floatX* part_of_rows(const floatX* whole, TokenRange range, int C) {
    Tensor t = unset_tensor((size_t)(range.count + 2) * (size_t)C);
    memcpy(t.x + C, whole + (size_t)range.first * (size_t)C, (size_t)range.count * (size_t)C * sizeof(floatX));
    return t.x + C;
}
// The first and the last token of every part, as far as there are any and i counts so far; then `otherwise`.
static int token_at_an_edge(int i, int V, int Vp, int parts, int otherwise) {
    int token = i / 2 < parts ? i / 2 * (Vp / parts) + i % 2 * (Vp / parts - 1) : otherwise;
    return token < V ? token : otherwise;
}
static void check_encoder_in_parts(int B, int T, int C, int V, int Vp, int parts) {
    start(B, T, C, 1, Vp);
    int N = B * T, *tokens = random_tokens(N, V);
    for (int i = 0; i < N; i++) tokens[i] = token_at_an_edge(i, V, Vp, parts, tokens[i]);
    size_t n = (size_t)N * (size_t)C;
    Tensor wte = random_tensor((size_t)Vp * (size_t)C, 0, 1), wpe = random_tensor((size_t)T * (size_t)C, 0, 1);
    Tensor whole = unset_tensor(n), dout = random_tensor(n, 0, 1);
    floatX* sum = copy_of(random_tensor(n, 0, 0).x, n);
    encoder_forward(whole.x, tokens, wte.x, wpe.x, B, T, C);
    for (int m = 0; m < 2; m++) {
        floatX *dwte = copy_of(wte.x, wte.n), *dwpe = copy_of(wpe.x, wpe.n);
        encoder_backward(dwte, dwpe, dout.x, tokens, B, T, C, both_modes[m]);
        for (int q = 0; q < parts; q++) {
            TokenRange range = token_range(Vp, parts, q);
            size_t rows = (size_t)range.count * (size_t)C;
            Tensor out = unset_tensor(n);
            floatX *part = part_of_rows(wte.x, range, C), *part_wpe = copy_of(wpe.x, wpe.n), *without = copy_of(part, rows);
            encoder_part_forward(out.x, tokens, part, q == 0 ? wpe.x : NULL, range, B, T, C);
            for (int i = 0; i < N; i++) for (int c = 0; c < C; c++) {
                bool here = tokens[i] >= range.first && tokens[i] < range.first + range.count;
                double want = (here ? wte.d[tokens[i]*C + c] : 0) + (q == 0 ? wpe.d[i % T * C + c] : 0);
                expect_near("encoder_part_forward", (double)to_float(out.x[i*C + c]), want, 1.01 * ROUNDING, 0);
            }
            if (m == 0) add_in_place(sum, out.x, n);
            encoder_part_backward(part, part_wpe, dout.x, tokens, range, B, T, C, both_modes[m]);
            assert_memory_equal(part, dwte + (size_t)range.first * (size_t)C, rows * sizeof(floatX));
            assert_memory_equal(part_wpe, dwpe, wpe.n * sizeof(floatX));
            encoder_part_backward(without, NULL, dout.x, tokens, range, B, T, C, both_modes[m]);
            assert_memory_equal(without, part, rows * sizeof(floatX));
            for (int c = 0; c < C; c++) assert_true(isnan(to_float(part[c - C])) && isnan(to_float(part[(int)rows + c])));
        }
    }
    assert_memory_equal(sum, whole.x, n * sizeof(floatX));
}
TEST(encoder_in_parts_has_the_bits_of_the_whole) {
    check_encoder_in_parts(2, 9, 7, 11, 12, 1);
    check_encoder_in_parts(2, 9, 7, 11, 12, 2);
    check_encoder_in_parts(2, 9, 7, 10, 12, 3); // the last part has a token of padding
    check_encoder_in_parts(2, 9, 7, 5, 12, 4);  // the last two have no other
    check_encoder_in_parts(1, 1, 1, 1, 2, 2);
    check_encoder_in_parts(3, 12, 300, 5, 8, 2); // more channels than are summed at a time, tokens that occur often
}

// ---- layernorm ----
typedef struct { int N, C; const double *x, *w, *b, *cotangent; double* out; } LayernormInputs;
static double layernorm_objective(const void* p) {
    const LayernormInputs* a = (const LayernormInputs*)p;
    for (int i = 0; i < a->N; i++) {
        const double* x = a->x + i * a->C;
        double mean = 0, variance = 0;
        for (int c = 0; c < a->C; c++) mean += x[c] / a->C;
        for (int c = 0; c < a->C; c++) variance += (x[c] - mean) * (x[c] - mean) / a->C;
        for (int c = 0; c < a->C; c++) a->out[i * a->C + c] = (x[c] - mean) / sqrt(variance + 1e-5) * a->w[c] + a->b[c];
    }
    return a->cotangent ? dot(a->out, a->cotangent, (size_t)a->N * (size_t)a->C) : 0;
}
static void check_layernorm(int N, int C, double mean_of_x) {
    start(1, N, C, 1, 1);
    size_t n = (size_t)N * (size_t)C;
    Tensor x1 = random_tensor(n, mean_of_x, 1), x2 = random_tensor(n, 0, 1), w = random_tensor((size_t)C, 1, 0.5), b = random_tensor((size_t)C, 0, 0.5);
    Tensor res = unset_tensor(n), out = unset_tensor(n), dout = random_tensor(n, 0, 1);
    float *mean = unset_floats((size_t)N), *rstd = unset_floats((size_t)N);
    double *sum = doubles(n), *want = doubles(n);
    for (size_t i = 0; i < n; i++) sum[i] = x1.d[i] + x2.d[i];
    residual_layernorm_forward(res.x, out.x, mean, rstd, x1.x, x2.x, w.x, b.x, N, C);
    expect_tensor("the residual sum", res.x, sum, n, 0.5);
    for (size_t i = 0; i < n; i++) res.d[i] = (double)to_float(res.x[i]);
    LayernormInputs a = { N, C, res.d, w.d, b.d, NULL, want };
    layernorm_objective(&a);
    double offset = 1 + fabs(mean_of_x); // the subtraction of the mean magnifies the rounding of x by this
    expect_tensor("layernorm's out", out.x, want, n, (8 + 8 * offset) * (C == 1 ? 400 : 1));

    Tensor again = unset_tensor(n);
    residual_layernorm_forward(res.x, again.x, mean, rstd, res.x, NULL, w.x, b.x, N, C);
    assert_memory_equal(again.x, out.x, n * sizeof(floatX)); // recomputed from res

    a.cotangent = dout.d;
    double *dx = doubles(n), *dw = doubles((size_t)C), *db = doubles((size_t)C);
    differentiate(dx, layernorm_objective, &a, res.d, n);
    differentiate(dw, layernorm_objective, &a, w.d, (size_t)C);
    differentiate(db, layernorm_objective, &a, b.d, (size_t)C);
    Tensor before = random_tensor(n, 0, 1), before_w = random_tensor((size_t)C, 0, 1), before_b = random_tensor((size_t)C, 0, 1);
    for (int m = 0; m < 2; m++) {
        floatX *gx = copy_of(before.x, n), *gw = copy_of(before_w.x, (size_t)C), *gb = copy_of(before_b.x, (size_t)C);
        layernorm_backward(gx, gw, gb, dout.x, res.x, w.x, mean, rstd, N, C, both_modes[m]);
        double slack = (16 + 8 * offset) * (C == 1 ? 400 : 1);
        expect_gradient("layernorm's dinp", gx, before.x, GRAD_ADD, dx, n, slack);
        expect_gradient("layernorm's dw", gw, before_w.x, both_modes[m], dw, (size_t)C, slack + N);
        expect_gradient("layernorm's db", gb, before_b.x, both_modes[m], db, (size_t)C, slack + N);
    }
}
TEST(layernorm_follows_its_definition_and_its_derivative) {
    check_layernorm(5, 19, 0);
    check_layernorm(1, 8, 0);
    check_layernorm(3, 1, 0); // a row of one channel normalises to 0
    check_layernorm(40, 33, 0);
    check_layernorm(3, 64, 100); // far from 0, where E[x^2] - E[x]^2 would cancel
}

// ---- linear layers ----
static double gelu_definition(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))); }

// out = gelu or identity of inp w^T + bias
typedef struct { int N, C, OC; const double *inp, *w, *bias, *cotangent; double* out; bool gelu_of_input; } LinearInputs;
static double linear_objective(const void* p) {
    const LinearInputs* a = (const LinearInputs*)p;
    for (int i = 0; i < a->N; i++) for (int o = 0; o < a->OC; o++) {
        double s = a->bias ? a->bias[o] : 0;
        for (int c = 0; c < a->C; c++) s += (a->gelu_of_input ? gelu_definition(a->inp[i * a->C + c]) : a->inp[i * a->C + c]) * a->w[o * a->C + c];
        a->out[i * a->OC + o] = s;
    }
    return a->cotangent ? dot(a->out, a->cotangent, (size_t)a->N * (size_t)a->OC) : 0;
}
static void check_linear_forward(int N, int C, int OC) {
    start(1, N, C > OC ? C : OC, 1, OC);
    size_t n = (size_t)N * (size_t)OC;
    Tensor inp = random_tensor((size_t)N * (size_t)C, 0, 1), w = random_tensor((size_t)OC * (size_t)C, 0, 1), bias = random_tensor((size_t)OC, 0, 1);
    Tensor out = unset_tensor(n), pre = unset_tensor(n);
    double* want = doubles(n);
    LinearInputs a = { N, C, OC, inp.d, w.d, bias.d, NULL, want, false };
    double slack = 4 + C; // a sum of C products
    linear_objective(&a);
    matmul_forward(out.x, inp.x, w.x, bias.x, N, C, OC);
    expect_tensor("matmul_forward with a bias", out.x, want, n, slack);
    float* sums = unset_floats(n);
    matmul_forward_fp32(sums, inp.x, w.x, bias.x, N, C, OC);
    expect_floats("matmul_forward_fp32 with a bias", sums, want, n, slack);
    if (!NEEDS_MASTER) assert_memory_equal(sums, out.x, n * sizeof(float));
    matmul_gelu_forward(out.x, pre.x, inp.x, w.x, bias.x, N, C, OC);
    expect_tensor("matmul_gelu_forward's pre", pre.x, want, n, slack);
    for (size_t i = 0; i < n; i++) want[i] = gelu_definition((double)to_float(pre.x[i]));
    expect_tensor("matmul_gelu_forward's out", out.x, want, n, 4);
    a.bias = NULL;
    linear_objective(&a);
    matmul_forward(out.x, inp.x, w.x, NULL, N, C, OC);
    expect_tensor("matmul_forward without bias", out.x, want, n, slack);
    matmul_forward_fp32(sums, inp.x, w.x, NULL, N, C, OC);
    expect_floats("matmul_forward_fp32 without bias", sums, want, n, slack);
}
TEST(linear_forward_is_the_product_plus_bias_and_its_gelu) {
    check_linear_forward(5, 7, 9);
    check_linear_forward(1, 1, 1);
    check_linear_forward(1, 33, 65);
    check_linear_forward(67, 1, 3);
    check_linear_forward(130, 70, 257);
    check_linear_forward(3, 1100, 5); // more columns than a tile
    check_linear_forward(2, 3, 2100); // more rows of w than a tile
}

static void check_linear_backward(int N, int C, int OC) {
    start(1, N, C > OC ? C : OC, 1, OC);
    size_t n = (size_t)N * (size_t)OC;
    Tensor inp = random_tensor((size_t)N * (size_t)C, 0, 1), w = random_tensor((size_t)OC * (size_t)C, 0, 1), bias = random_tensor((size_t)OC, 0, 1);
    Tensor dout = random_tensor(n, 0, 1), dinp = unset_tensor(inp.n);
    double *out = doubles(n), *dx = doubles(inp.n);
    double *dw = doubles(w.n), *db = doubles(bias.n);
    LinearInputs a = { N, C, OC, inp.d, w.d, bias.d, dout.d, out, false };
    differentiate(dx, linear_objective, &a, inp.d, inp.n);
    differentiate(dw, linear_objective, &a, w.d, w.n);
    differentiate(db, linear_objective, &a, bias.d, bias.n);
    matmul_backward_input(dinp.x, dout.x, w.x, N, C, OC);
    expect_tensor("matmul_backward_input", dinp.x, dx, inp.n, 4 + OC);
    float* sums = unset_floats(inp.n);
    matmul_backward_input_fp32(sums, dout.x, w.x, N, C, OC);
    expect_floats("matmul_backward_input_fp32", sums, dx, inp.n, 4 + OC);

    Tensor before_w = random_tensor(w.n, 0, 1), before_b = random_tensor(bias.n, 0, 1);
    for (int m = 0; m < 2; m++) {
        floatX *gw = copy_of(before_w.x, w.n), *gb = copy_of(before_b.x, bias.n);
        matmul_backward_weight(gw, gb, dout.x, inp.x, N, C, OC, both_modes[m]);
        expect_gradient("matmul_backward_weight's dw", gw, before_w.x, both_modes[m], dw, w.n, 4 + N);
        expect_gradient("matmul_backward_weight's dbias", gb, before_b.x, both_modes[m], db, bias.n, 4 + N);
        gw = copy_of(before_w.x, w.n);
        matmul_backward_weight(gw, NULL, dout.x, inp.x, N, C, OC, both_modes[m]);
        expect_gradient("matmul_backward_weight's dw without a bias", gw, before_w.x, both_modes[m], dw, w.n, 4 + N);
    }
    a.gelu_of_input = true; // now inp is the pre-activation
    differentiate(dx, linear_objective, &a, inp.d, inp.n);
    matmul_gelu_backward_input(dinp.x, dout.x, w.x, inp.x, N, C, OC);
    if (sizeof(floatX) == sizeof(float)) expect_tensor("matmul_gelu_backward_input", dinp.x, dx, inp.n, 16 + 2 * OC);
    else for (size_t i = 0; i < inp.n; i++) // the product may be rounded to floatX before gelu' multiplies it
        expect_near("matmul_gelu_backward_input", (double)to_float(dinp.x[i]), dx[i], 2.1 * ROUNDING, (16 + 2 * OC) * F32_ROUNDING * largest(dx, inp.n));
}
TEST(linear_backward_is_the_derivative) {
    check_linear_backward(5, 7, 9);
    check_linear_backward(1, 1, 1);
    check_linear_backward(1, 17, 5);
    check_linear_backward(9, 1, 3);
    check_linear_backward(35, 20, 12);
}

// Larger shapes than finite differences can afford: out = inp w^T + bias, dinp = dout w and dw = dout^T inp written out.
static void check_large_linear(int N, int C, int OC) {
    start(1, N, C > OC ? C : OC, 1, OC);
    Tensor inp = random_tensor((size_t)N * (size_t)C, 0, 1), w = random_tensor((size_t)OC * (size_t)C, 0, 1), dout = random_tensor((size_t)N * (size_t)OC, 0, 1);
    Tensor b = random_tensor((size_t)OC, 0, 1), out = unset_tensor(dout.n), dinp = unset_tensor(inp.n), dw = random_tensor(w.n, 0, 1);
    double *dx = doubles(inp.n), *d = doubles(w.n), *db = doubles((size_t)OC);
    double* y = doubles(dout.n);
    for (int i = 0; i < N; i++) for (int o = 0; o < OC; o++) {
        double g = dout.d[(size_t)i * OC + o];
        db[o] += g;
        y[(size_t)i * OC + o] = b.d[o];
        for (int c = 0; c < C; c++) {
            y[(size_t)i * OC + o] += inp.d[(size_t)i * C + c] * w.d[(size_t)o * C + c];
            dx[(size_t)i * C + c] += g * w.d[(size_t)o * C + c];
            d[(size_t)o * C + c] += g * inp.d[(size_t)i * C + c];
        }
    }
    matmul_forward(out.x, inp.x, w.x, b.x, N, C, OC);
    expect_tensor("a large matmul_forward", out.x, y, out.n, 4 + sqrt(C) * 4);
    matmul_backward_input(dinp.x, dout.x, w.x, N, C, OC);
    expect_tensor("a large matmul_backward_input", dinp.x, dx, inp.n, 4 + sqrt(OC) * 4);
    float* sums = unset_floats(inp.n);
    matmul_backward_input_fp32(sums, dout.x, w.x, N, C, OC);
    expect_floats("a large matmul_backward_input_fp32", sums, dx, inp.n, 4 + sqrt(OC) * 4);
    if (!NEEDS_MASTER) assert_memory_equal(sums, dinp.x, inp.n * sizeof(float));
    float* sums_w = unset_floats(w.n);
    matmul_backward_weight_fp32(sums_w, dout.x, inp.x, N, C, OC, GRAD_SET);
    expect_floats("a large dw in fp32", sums_w, d, w.n, 4 + sqrt(N) * 4);
    for (size_t i = 0; i < w.n; i++) sums_w[i] *= -2;
    matmul_backward_weight_fp32(sums_w, dout.x, inp.x, N, C, OC, GRAD_ADD); // to -2 times, which leaves -1 times
    for (size_t i = 0; i < w.n; i++) sums_w[i] *= -1;
    expect_floats("a dw in fp32, added to", sums_w, d, w.n, 8 + sqrt(N) * 8);
    floatX *before = copy_of(dw.x, w.n), *bias_before = copy_of(w.x, (size_t)OC), *bias = copy_of(w.x, (size_t)OC);
    matmul_backward_weight(dw.x, bias, dout.x, inp.x, N, C, OC, GRAD_ADD);
    expect_gradient("a large dw", dw.x, before, GRAD_ADD, d, w.n, 4 + sqrt(N) * 4);
    expect_gradient("a large dbias", bias, bias_before, GRAD_ADD, db, (size_t)OC, 4 + sqrt(N) * 4);
}
TEST(linear_layers_of_large_shapes) {
    check_large_linear(256, 96, 384);
    check_large_linear(1100, 33, 65);  // sums over more rows than a tile
    check_large_linear(7, 40, 2100);   // sums over more outputs than a tile
    check_large_linear(257, 1030, 70); // more columns than a tile
    check_large_linear(300, 64, 500);  // tiles in several parts
    check_large_linear(40, 512, 896);  // rows of w that share sets of the cache, in several panels
}

// ---- attention ----
typedef struct { int B, T, C, NH; const double *qkv, *cotangent; double *out, *stats; } AttentionInputs;
static double attention_objective(const void* p) {
    const AttentionInputs* a = (const AttentionInputs*)p;
    int T = a->T, C = a->C, HS = C / a->NH;
    memset(a->out, 0, (size_t)a->B * (size_t)T * (size_t)C * sizeof(double));
    for (int b = 0; b < a->B; b++) for (int h = 0; h < a->NH; h++) for (int t = 0; t < T; t++) {
        const double* q = a->qkv + (b * T + t) * 3 * C + h * HS;
        double score[256], sum = 0;
        for (int u = 0; u <= t; u++) {
            const double* k = a->qkv + (b * T + u) * 3 * C + C + h * HS;
            score[u] = dot(q, k, (size_t)HS) / sqrt(HS);
            sum += exp(score[u]);
        }
        a->stats[(b * a->NH + h) * T + t] = log(sum);
        for (int u = 0; u <= t; u++) {
            const double* v = a->qkv + (b * T + u) * 3 * C + 2 * C + h * HS;
            for (int i = 0; i < HS; i++) a->out[(b * T + t) * C + h * HS + i] += exp(score[u]) / sum * v[i];
        }
    }
    return a->cotangent ? dot(a->out, a->cotangent, (size_t)a->B * (size_t)T * (size_t)C) : 0;
}
// slack: of the forward's results, and of its stats; a long sequence has no backward.
static void check_attention(int B, int T, int C, int NH, double std, double slack, bool has_backward) {
    start(B, T, C, NH, 1);
    size_t n = (size_t)B * (size_t)T * (size_t)C, rows = (size_t)B * (size_t)NH * (size_t)T;
    Tensor qkv = random_tensor(3 * n, 0, std), out = unset_tensor(n), dout = random_tensor(n, 0, 1), dqkv = unset_tensor(3 * n);
    float* stats = unset_floats(rows);
    double *want = doubles(n), *want_stats = doubles(rows), *gradient = doubles(3 * n);
    AttentionInputs a = { B, T, C, NH, qkv.d, NULL, want, want_stats };
    attention_objective(&a);
    attention_forward(out.x, stats, qkv.x, B, T, C, NH);
    expect_tensor("attention_forward", out.x, want, n, slack);
    expect_floats("attention's stats", stats, want_stats, rows, 16);
    if (T > 100) { // what a token computes does not depend on those after it
        Tensor shorter = unset_tensor(n);
        attention_forward(shorter.x, stats, qkv.x, B, 100, C, NH);
        expect_tensor("attention_forward of its first 100 tokens", shorter.x, want, (size_t)(100 * C), slack);
    }
    if (!has_backward) return;
    a.cotangent = dout.d;
    differentiate(gradient, attention_objective, &a, qkv.d, 3 * n);
    attention_backward(dqkv.x, dout.x, qkv.x, out.x, stats, B, T, C, NH);
    double scale = largest(gradient, 3 * n);
    for (size_t i = 0; i < 3 * n; i++) // backward reads out as it was rounded
        expect_near("attention_backward", (double)to_float(dqkv.x[i]), gradient[i], 1.01 * ROUNDING, (64 * F32_ROUNDING + ROUNDING) * scale);
}
TEST(attention_follows_its_definition_and_its_derivative) {
    check_attention(2, 5, 6, 2, 1, 16, true);
    check_attention(1, 1, 1, 1, 1, 16, true);    // one token sees itself alone
    check_attention(2, 13, 15, 3, 1, 16, true);  // odd everywhere
    check_attention(1, 66, 4, 2, 1, 16, true);   // more queries than a block
    check_attention(1, 201, 66, 2, 2, 64, false); // several blocks
}
TEST(attention_survives_scores_that_exp_alone_would_overflow) {
    int T = 3, C = 4;
    start(1, T, C, 1, 1);
    Tensor qkv = random_tensor((size_t)(T * 3 * C), 0, 30), out = unset_tensor((size_t)(T * C));
    float stats[3];
    attention_forward(out.x, stats, qkv.x, 1, T, C, 1);
    for (int i = 0; i < T * C; i++) assert_true(isfinite(to_float(out.x[i])));
}

// ---- a weight's gradient in chunks ----
enum { CHUNK_ROWS = 64, CHUNKED_ROWS = 8 * CHUNK_ROWS, CHUNK_C = 16, CHUNK_OC = 24 };
// (rows, cols) of numbers whose second half is `sign` times the first, but for a little noise.
static Tensor repeated_tensor(int cols, double sign, double noise) {
    const size_t half = CHUNKED_ROWS / 2 * (size_t)cols;
    Tensor t = random_tensor(2 * half, 0, 1);
    for (size_t i = 0; i < half; i++) set_element(t, half + i, sign * t.d[i] + noise * random_normal(5, 1, i));
    return t;
}
// How many elements of got are further from want than one rounding to floatX and fp32's roundings of sums as large as 64.
static int off_by_more_than_a_rounding(const floatX* got, const double* want, size_t n) {
    int off = 0;
    for (size_t i = 0; i < n; i++)
        off += !(fabs((double)to_float(got[i]) - want[i]) <= 1.01 * ROUNDING * fabs(want[i]) + 64 * 64 * F32_ROUNDING);
    return off;
}
TEST(chunks_of_a_weight_gradient_are_rounded_once) {
    const int N = CHUNKED_ROWS, C = CHUNK_C, OC = CHUNK_OC;
    start(1024, 64, C, 1, 512); // the classifier has several chunks
    // the second half nearly takes back what the first half gives: the sum is small, and what is rounded on the way to it is not
    Tensor dout = repeated_tensor(OC, -1, 0.01), inp = repeated_tensor(C, 1, 0);
    Tensor before = random_tensor((size_t)OC * (size_t)C, 0, 0.1);
    double* want = doubles(before.n);
    for (int m = 0; m < 2; m++) {
        floatX *dw = copy_of(before.x, before.n), *rounded = copy_of(before.x, before.n);
        for (int i = 0; i < OC * C; i++) {
            want[i] = both_modes[m] == GRAD_ADD ? before.d[i] : 0;
            for (int k = 0; k < N; k++) want[i] += dout.d[k * OC + i / C] * inp.d[k * C + i % C];
        }
        for (int row = 0; row < N; row += CHUNK_ROWS) {
            const floatX *d = dout.x + row * OC, *x = inp.x + row * C;
            GradMode mode = row == 0 ? both_modes[m] : GRAD_ADD;
            matmul_backward_weight_chunk(dw, d, x, row, CHUNK_ROWS, N, C, OC, both_modes[m]);
            matmul_backward_weight(rounded, NULL, d, x, CHUNK_ROWS, C, OC, mode); // after each chunk
        }
        assert_int_equal(off_by_more_than_a_rounding(dw, want, before.n), 0);
        if (NEEDS_MASTER) assert_true(off_by_more_than_a_rounding(rounded, want, before.n) > OC * C / 2);
        else assert_memory_equal(dw, rounded, before.n * sizeof(floatX));
    }
}
// What is not several chunks in 16 bits has the bits of a plain product.
TEST(one_chunk_is_a_plain_product) {
    const int N = CHUNKED_ROWS, C = CHUNK_C, OC = CHUNK_OC;
    start(1, N, C, 1, OC);
    Tensor dout = random_tensor((size_t)N * (size_t)OC, 0, 1), inp = random_tensor((size_t)N * (size_t)C, 0, 1);
    Tensor before = random_tensor((size_t)OC * (size_t)C, 0, 1);
    for (int m = 0; m < 2; m++) {
        floatX *chunk = copy_of(before.x, before.n), *plain = copy_of(before.x, before.n);
        matmul_backward_weight_chunk(chunk, dout.x, inp.x, 0, N, N, C, OC, both_modes[m]);
        matmul_backward_weight(plain, NULL, dout.x, inp.x, N, C, OC, both_modes[m]);
        assert_memory_equal(chunk, plain, before.n * sizeof(floatX));
    }
}

// ---- classifier ----
typedef struct { int N, V, Vp; const double* logits; const int* targets; double dloss; double* losses; } ClassifierInputs;
static double classifier_objective(const void* p) {
    const ClassifierInputs* a = (const ClassifierInputs*)p;
    double total = 0;
    for (int i = 0; i < a->N; i++) {
        double sum = 0;
        for (int v = 0; v < a->V; v++) sum += exp(a->logits[i * a->Vp + v]);
        a->losses[i] = a->targets[i] < 0 ? 0 : log(sum) - a->logits[i * a->Vp + a->targets[i]];
        total += a->dloss * a->losses[i];
    }
    return total;
}
// The gradient with respect to logits (N,Vp), row by row: a row's loss does not depend on the others.
static double* classifier_gradient(ClassifierInputs a, double* logits) {
    double* gradient = doubles((size_t)a.N * (size_t)a.Vp);
    for (int i = 0; i < a.N; i++) {
        ClassifierInputs row = { 1, a.V, a.Vp, logits + i * a.Vp, a.targets + i, a.dloss, a.losses + i };
        if (a.targets[i] >= 0) differentiate(gradient + i * a.Vp, classifier_objective, &row, logits + i * a.Vp, (size_t)a.V);
    }
    classifier_objective(&a);
    return gradient;
}
// Logits whose padding is never read, and what they must have become.
static Tensor random_logits(int N, int V, int Vp) {
    Tensor logits = random_tensor((size_t)N * (size_t)Vp, 0, 2);
    for (int i = 0; i < N; i++) for (int v = V; v < Vp; v++) set_element(logits, (size_t)(i * Vp + v), v % 2 ? NAN : INFINITY);
    return logits;
}
static void expect_dlogits(const char* what, const floatX* got, const double* want, ClassifierInputs a) {
    expect_tensor(what, got, want, (size_t)a.N * (size_t)a.Vp, 8);
    for (int i = 0; i < a.N; i++) for (int v = 0; v < a.Vp; v++)
        if (v >= a.V || a.targets[i] < 0) assert_true(to_float(got[i * a.Vp + v]) == 0.0f);
}
TEST(classifier_leaves_out_masked_rows_whatever_they_hold) {
    const int N = 4, V = 11, Vp = 16;
    start(1, N, 1, 1, Vp);
    for (int counting = 0; counting <= 1; counting++) {
        Tensor logits = random_tensor((size_t)(N * Vp), 0, 2);
        int targets[4] = { -1, counting ? 3 : -1, -1, -1 };
        float losses[4] = { NAN, NAN, NAN, NAN }, again[4] = { NAN, NAN, NAN, NAN };
        for (int i = 0; i < N * Vp; i++) if (targets[i / Vp] < 0) set_element(logits, (size_t)i, i % 3 ? NAN : INFINITY);
        classifier_forward(losses, logits.x, targets, N, V, Vp);
        classifier_forward_backward(again, logits.x, targets, 0.25f, N, V, Vp);
        assert_memory_equal(losses, again, sizeof losses);
        for (int i = 0; i < N; i++) assert_true(targets[i] < 0 ? losses[i] == 0 : losses[i] > 0);
        for (int i = 0; i < N * Vp; i++) if (targets[i / Vp] < 0) assert_true(to_float(logits.x[i]) == 0);
    }
}
TEST(classifier_hides_no_inf_or_nan) {
    const double bad[2] = { NAN, INFINITY };
    start(1, 1, 1, 1, 64);
    for (int k = 0; k < 2; k++) {
        Tensor logits = random_tensor(64, 0, 1);
        int target = 3;
        float loss = 0;
        set_element(logits, 40, bad[k]);
        classifier_forward(&loss, logits.x, &target, 1, 50, 64);
        assert_true(isnan(loss));
        classifier_forward_backward(&loss, logits.x, &target, 1.0f, 1, 50, 64);
        assert_true(isnan(loss) && isnan(to_float(logits.x[3])));
    }
    Tensor masked = random_tensor(64, 0, 1); // -Inf is a probability of 0, and no error
    int target = 3;
    float loss = NAN;
    set_element(masked, 40, -INFINITY);
    classifier_forward(&loss, masked.x, &target, 1, 50, 64);
    assert_true(isfinite(loss));
}

// Part q's columns of logits (N,Vp), in a place of their own.
static Tensor part_of_logits(Tensor logits, int N, int Vp, TokenRange range) {
    Tensor t = unset_tensor((size_t)N * (size_t)range.count);
    for (int i = 0; i < N; i++) for (int v = 0; v < range.count; v++)
        set_element(t, (size_t)(i * range.count + v), logits.d[i * Vp + range.first + v]);
    return t;
}
// Of each row what classifier_part_stats should say. The target's logit is not rounded, and the maximum neither.
static void expect_stats(const float* stats, Tensor part, const int* targets, TokenRange range, int N, int V) {
    for (int i = 0; i < N; i++) {
        const double* row = part.d + i * range.count;
        double max = -(double)FLT_MAX, sum = 0, target = 0;
        for (int v = 0; v < range.count && range.first + v < V; v++) max = fmax(max, row[v]);
        for (int v = 0; v < range.count && range.first + v < V; v++) sum += exp(row[v] - max);
        for (int v = 0; v < range.count; v++) if (range.first + v == targets[i]) target = row[v];
        expect_near("a part's largest logit", (double)stats[3*i], max, 0, 0);
        expect_near("a part's sum", (double)stats[3*i + 1], sum, (4 + range.count) * F32_ROUNDING, 0);
        expect_near("a part's target", (double)stats[3*i + 2], target, 0, 0);
    }
}
// apart: how much larger the logits of each part are than those of the part before.
static void check_classifier_in_parts(int N, int V, int Vp, int parts, double apart) {
    start(1, N, 1, 1, Vp);
    size_t n = (size_t)N * (size_t)Vp;
    Tensor logits = random_logits(N, V, Vp), part[8], dlogits = unset_tensor(n);
    int *targets = random_tokens(N, V), width = Vp / parts;
    for (int i = 0; i < N; i++) targets[i] = i == 1 ? -1 : token_at_an_edge(i, V, Vp, parts, targets[i]);
    for (int i = 0; i < (int)n; i++) if (i % Vp < V) set_element(logits, (size_t)i, logits.d[i] + apart * (double)(i % Vp / width));
    double* want = doubles((size_t)N);
    ClassifierInputs a = { N, V, Vp, logits.d, targets, 0.25, want };
    double* gradient = classifier_gradient(a, logits.d);
    float *all = unset_floats(3 * (size_t)(parts * N)), *losses = unset_floats((size_t)N);
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        part[q] = part_of_logits(logits, N, Vp, range);
        classifier_part_stats(all + 3 * q * N, part[q].x, targets, range, N, V);
        expect_stats(all + 3 * q * N, part[q], targets, range, N, V);
    }
    classifier_part_forward(losses, all, targets, parts, N);
    expect_floats("classifier_part_forward", losses, want, (size_t)N, 8);
    for (int q = 0; q < parts; q++) {
        float* again = unset_floats((size_t)N);
        classifier_part_forward_backward(again, part[q].x, all, targets, 0.25f, token_range(Vp, parts, q), parts, N, V);
        assert_memory_equal(again, losses, (size_t)N * sizeof(float));
        for (int i = 0; i < N; i++) memcpy(dlogits.x + i * Vp + q * width, part[q].x + i * width, (size_t)width * sizeof(floatX));
    }
    expect_dlogits("dlogits of all parts", dlogits.x, gradient, a);
    if (parts > 1) return;
    float *losses_of_whole = unset_floats((size_t)N), *losses_alone = unset_floats((size_t)N);
    classifier_forward(losses_alone, logits.x, targets, N, V, Vp);
    classifier_forward_backward(losses_of_whole, logits.x, targets, 0.25f, N, V, Vp);
    assert_memory_equal(losses, losses_of_whole, (size_t)N * sizeof(float));
    assert_memory_equal(losses, losses_alone, (size_t)N * sizeof(float));
    assert_memory_equal(dlogits.x, logits.x, n * sizeof(floatX));
}
TEST(classifier_is_cross_entropy_over_the_vocabulary_without_its_padding_also_in_parts) {
    check_classifier_in_parts(1, 1, 128, 1, 0); // V = 1: the loss is 0
    check_classifier_in_parts(3, 130, 130, 1, 0);
    for (int parts = 1; parts <= 4; parts++) {
        check_classifier_in_parts(9, 11, 12, parts, 0);
        check_classifier_in_parts(9, 257, 384, parts, 0); // of 3: a part of one token; of 4: a part of padding
        check_classifier_in_parts(9, 257, 384, parts, -40); // exponentials of different size
        check_classifier_in_parts(9, 257, 384, parts, 40);
    }
    check_classifier_in_parts(3, 5, 16, 4, 0); // two parts of padding
    check_classifier_in_parts(1, 1, 8, 8, 0);  // V = 1: the loss is 0
    check_classifier_in_parts(2, 4, 8, 8, 0);
}
// One row of 2 parts of 8 tokens, 13 of which are in the vocabulary, where `begin` to `end` are `value`.
static void losses_of_two_parts(float losses[2], floatX gradients[16], int begin, int end, double value) {
    Tensor logits = random_tensor(16, 0, 1), part[2];
    int target = 3;
    float all[6];
    start(1, 1, 1, 1, 16);
    for (int v = begin; v < end; v++) set_element(logits, (size_t)v, value);
    for (int q = 0; q < 2; q++) {
        part[q] = part_of_logits(logits, 1, 16, token_range(16, 2, q));
        classifier_part_stats(all + 3 * q, part[q].x, &target, token_range(16, 2, q), 1, 13);
    }
    for (int q = 0; q < 2; q++) {
        classifier_part_forward_backward(&losses[q], part[q].x, all, &target, 1, token_range(16, 2, q), 2, 1, 13);
        memcpy(gradients + 8 * q, part[q].x, 8 * sizeof(floatX));
    }
}
TEST(a_part_hides_no_inf_or_nan_from_the_others) {
    const double bad[2] = { NAN, INFINITY };
    float losses[2];
    floatX gradients[16];
    for (int k = 0; k < 2; k++) for (int at = 0; at < 13; at += 4) {
        losses_of_two_parts(losses, gradients, at, at + 1, bad[k]);
        for (int q = 0; q < 2; q++) assert_true(isnan(losses[q]));
        for (int v = 0; v < 13; v++) assert_true(isnan(to_float(gradients[v])));
    }
    losses_of_two_parts(losses, gradients, 8, 13, -INFINITY); // a whole part of probabilities of 0
    for (int q = 0; q < 2; q++) assert_true(isfinite(losses[q]));
    for (int v = 0; v < 16; v++) assert_true(v < 8 ? isfinite(to_float(gradients[v])) : to_float(gradients[v]) == 0.0f);
}
TEST(ranges_of_tokens) {
    expect_error(token_range(10, 3, 0), "10 tokens of the padded vocabulary do not divide into 3 parts");
    for (int V = 1; V <= 12; V++) {
        int in_all = 0;
        for (int q = 0; q < 3; q++) {
            TokenRange r = token_range(12, 3, q);
            assert_int_equal(r.first, 4 * q);
            assert_int_equal(r.count, 4);
            for (int v = r.first; v < r.first + r.count; v++) in_all += v < V;
            int before = 0;
            for (int k = 0; k <= q; k++) before += tokens_in_range(token_range(12, 3, k), V);
            assert_int_equal(in_all, before);
        }
        assert_int_equal(in_all, V);
    }
}

// ---- numbers about a step ----
// The sum of squares in the order that host_adamw.h promises, written out here a second time.
static double squares_in_order(const float* x, size_t n) {
    size_t chunk = 16384; // elements, while 1024 chunks are enough
    double sum = 0;
    for (size_t begin = 0; begin < n; begin += chunk) {
        double lane[16] = { 0 };
        for (size_t i = 0; i < chunk && begin + i < n; i++) lane[i % 16] += (double)x[begin + i] * (double)x[begin + i];
        for (int half = 8; half > 0; half /= 2) for (int l = 0; l < half; l++) lane[l] += lane[half + l];
        sum += lane[0];
    }
    return sum;
}
TEST(sums_are_exact_to_double_and_add_to_what_is_there) {
    start(1, 1, 1, 1, 1);
    const size_t sizes[7] = { 0, 1, 17, 1000, 16384, 16399, 100003 };
    for (int k = 0; k < 7; k++) {
        size_t n = sizes[k];
        Tensor x = random_tensor(n, 0.5, 1);
        float* f = floats(n);
        double sum = 3, squares = 5, squares_fp32 = 5, want_sum = 3, want_squares = 5;
        for (size_t i = 0; i < n; i++) {
            f[i] = (float)x.d[i];
            want_sum += x.d[i];
            want_squares += x.d[i] * x.d[i];
        }
        add_sum(&sum, f, n);
        add_sum_squares(&squares, x.x, n);
        add_sum_squares_fp32(&squares_fp32, f, n);
        expect_near("add_sum", sum, want_sum, 1e-12, 0);
        expect_near("add_sum_squares", squares, want_squares, 1e-12, 0);
        double in_order = squares_in_order(f, n); // to the bit, in either type
        assert_true(squares == 5 + in_order && squares_fp32 == 5 + in_order);
        assert_true(host_sum_squares(f, DTYPE_F32, n) == in_order && host_sum_squares(x.x, FLOATX_DTYPE, n) == in_order);
    }
    Tensor x = random_tensor(100, 0, 1);
    set_element(x, 50, INFINITY);
    double squares = 0;
    add_sum_squares(&squares, x.x, 100);
    assert_true(isinf(squares));
}
// One rounding may be off by half a unit in the last place; fp32's own sum and product also round once. Widening is exact, narrowing
// rounds like every other store; sums of fp32 are fp32's own.
TEST(scaling_adding_and_narrowing_round_once) {
    const size_t sizes[5] = { 0, 1, 7, 1000, 40003 };
    for (int k = 0; k < 10; k++) {
        size_t n = sizes[k / 2], offset = (size_t)k % 2; // one element past memory that is aligned
        Tensor x = random_tensor(n + offset, 0, 1), y = random_tensor(n, 0, 0.1), z = random_tensor(n + offset, 0, 1);
        floatX *added = copy_of(y.x, n), before = offset ? x.x[0] : y.x[0];
        add_in_place(x.x + offset, y.x, n);
        scale_in_place(z.x + offset, 0.75f, n);
        for (size_t i = 0; i < n; i++) {
            expect_near("add_in_place", (double)to_float(x.x[offset + i]), x.d[offset + i] + y.d[i], 1.001 * ROUNDING, 0);
            expect_near("scale_in_place", (double)to_float(z.x[offset + i]), 0.75 * z.d[offset + i], 1.001 * ROUNDING, 1e-7);
        }
        if (offset) assert_memory_equal(x.x, &before, sizeof before);
        assert_memory_equal(y.x, added, n * sizeof(floatX));
    }
    for (int k = 0; k < 5; k++) {
        size_t n = sizes[k];
        Tensor x = random_tensor(n, 0, 1), narrowed = unset_tensor(n + 1);
        float *wide = unset_floats(n + 1), *sum = unset_floats(n + 1), *host_sum = unset_floats(n + 1);
        to_fp32(wide, x.x, n);
        for (size_t i = 0; i < n; i++) sum[i] = host_sum[i] = random_normal(7, 1, i);
        from_fp32(narrowed.x, sum, n);
        for (size_t i = 0; i < n; i++) assert_true(to_float(narrowed.x[i]) == to_float(to_floatX(sum[i])));
        add_in_place_fp32(sum, wide, n);
        host_add(host_sum, wide, n);
        for (size_t i = 0; i < n; i++)
            assert_true(wide[i] == to_float(x.x[i]) && sum[i] == random_normal(7, 1, i) + wide[i]); // what is added stays
        assert_memory_equal(host_sum, sum, n * sizeof(float));
        assert_true(isnan(wide[n]) && isnan(sum[n]) && isnan(host_sum[n]) && isnan(to_float(narrowed.x[n])));
    }
}
static StepStats clipped(double grad_square, float max_norm, float loss_scale) {
    StepStats s = { .grad_square = grad_square };
    clip_gradients(&s, max_norm, loss_scale);
    return s;
}
TEST(clipping_scales_down_to_the_norm_and_skips_what_is_not_finite) {
    expect_near("the norm", clipped(25, 1, 1).grad_norm, 5, 1e-7, 0);
    assert_true(clipped(2, 1, 1).grad_norm == sqrt(2.0)); // a double, not rounded to fp32
    assert_true(clipped(2, 1, 1).grad_scale == (float)(1 / (sqrt(2.0) + 1e-6)));
    expect_near("a clipped scale", clipped(25, 1, 1).grad_scale, 1 / (5 + 1e-6), 1e-7, 0);
    assert_true(clipped(0.25, 1, 1).grad_scale == 1.0f);  // below the limit: not scaled up
    assert_true(clipped(1e6, 0, 1).grad_scale == 1.0f);   // no limit
    assert_true(clipped(0, 1, 1).grad_scale == 1.0f);
    expect_near("the norm without the loss scale", clipped(25.0 * 1024 * 1024, 1, 1024).grad_norm, 5, 1e-7, 0);
    expect_near("a scale that takes the loss scale out", clipped(25.0 * 1024 * 1024, 1, 1024).grad_scale, 1 / (5 + 1e-6) / 1024, 1e-7, 0);
    assert_true(clipped(1.0, 0, 1024).grad_scale == 1.0f / 1024);
    const double bad[2] = { INFINITY, NAN };
    for (int k = 0; k < 4; k++) {
        StepStats s = clipped(bad[k / 2], (float)(k % 2), 1);
        assert_true(s.grad_scale == 0.0f && !isfinite(s.grad_norm));
    }
}

// ---- AdamW ----
typedef struct { size_t n; floatX *params, *grads; float *master, *m, *v; } Optimizer;
static Optimizer random_optimizer(size_t n) {
    Tensor params = random_tensor(n, 0, 0.02), grads = random_tensor(n, 0, 1e-2);
    Optimizer o = { n, params.x, grads.x, NULL, floats(n), floats(n) };
    if (NEEDS_MASTER) {
        o.master = floats(n);
        for (size_t i = 0; i < n; i++) o.master[i] = to_float(params.x[i]);
    }
    return o;
}
static Optimizer optimizer_from(Optimizer o, size_t begin) {
    Optimizer part = { o.n - begin, o.params + begin, o.grads + begin, o.master ? o.master + begin : NULL, o.m + begin, o.v + begin };
    return part;
}
static void update(AdamW a, Optimizer o, float grad_scale, size_t n, size_t no_decay) {
    adamw_update(a, o.params, o.master, o.m, o.v, o.grads, &grad_scale, n, no_decay);
}
static const AdamW adamw_example = { 1e-3, 0.9, 0.95, 1e-8, 0.1, 1 };

static void adamw_follows_its_definition(double b1, double b2) {
    const size_t n = 1003, no_decay = 301;
    const float grad_scale = 0.7f;
    AdamW a = adamw_example;
    a.beta1 = b1; a.beta2 = b2;
    Optimizer o = random_optimizer(n);
    double *p = doubles(n), *m = doubles(n), *v = doubles(n);
    for (size_t i = 0; i < n; i++) p[i] = (double)to_float(o.params[i]);
    for (a.t = 1; a.t <= 5; a.t++) {
        Tensor grads = random_tensor(n, 0, 1e-2);
        o.grads = grads.x;
        update(a, o, grad_scale, n, no_decay);
        for (size_t i = 0; i < n; i++) {
            double g = grads.d[i] * (double)grad_scale;
            if (i >= no_decay) p[i] *= 1 - a.lr * a.weight_decay;
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            p[i] -= a.lr * (m[i] / (1 - pow(b1, a.t))) / (sqrt(v[i] / (1 - pow(b2, a.t))) + a.eps);
        }
    }
    expect_floats("AdamW's m", o.m, m, n, 8);
    expect_floats("AdamW's v", o.v, v, n, 8);
    if (NEEDS_MASTER) {
        expect_floats("AdamW's master weights", o.master, p, n, 8);
        for (size_t i = 0; i < n; i++) assert_true(to_float(o.params[i]) == to_float(to_floatX(o.master[i])));
    } else expect_tensor("AdamW's params", o.params, p, n, 8);
}
TEST(adamw_follows_its_definition) {
    adamw_follows_its_definition(0.9, 0.95);
    adamw_follows_its_definition(0.9999999, 0.9999999); // in fp32 this is 0.99999988, and 1 - beta a fifth more
}
static void expect_same_optimizer(Optimizer a, Optimizer b) {
    assert_memory_equal(a.params, b.params, a.n * sizeof(floatX));
    assert_memory_equal(a.m, b.m, a.n * sizeof(float));
    assert_memory_equal(a.v, b.v, a.n * sizeof(float));
    if (a.master) assert_memory_equal(a.master, b.master, a.n * sizeof(float));
}
static Optimizer same_optimizer(size_t n) {
    next_stream = 0;
    return random_optimizer(n);
}
TEST(adamw_of_a_range_equals_adamw_of_its_pieces_to_the_bit) {
    const size_t n = 20011;
    const size_t cuts[6] = { 1, 3, 17, 8191, 8193, 20010 }, no_decays[3] = { 0, 1001, 20011 };
    for (int d = 0; d < 3; d++) {
        Optimizer whole = same_optimizer(n);
        update(adamw_example, whole, 1, n, no_decays[d]);
        for (int c = 0; c < 6; c++) {
            size_t k = cuts[c];
            Optimizer pieces = same_optimizer(n);
            update(adamw_example, pieces, 1, k, size_min(k, no_decays[d]));
            update(adamw_example, optimizer_from(pieces, k), 1, n - k, no_decays[d] > k ? no_decays[d] - k : 0);
            expect_same_optimizer(pieces, whole);
        }
    }
}
// fp32 weights and gradients that are also widened, in any precision: what a sharded stage updates.
typedef struct { float *params, *m, *v, *grads; } WideOptimizer;
static WideOptimizer widened(Optimizer o) {
    WideOptimizer w = { floats(o.n), floats(o.n), floats(o.n), floats(o.n) };
    if (NEEDS_MASTER) memcpy(w.params, o.master, o.n * sizeof(float));
    else to_fp32(w.params, o.params, o.n);
    to_fp32(w.grads, o.grads, o.n);
    memcpy(w.m, o.m, o.n * sizeof(float));
    memcpy(w.v, o.v, o.n * sizeof(float));
    return w;
}
static void expect_master_weights(WideOptimizer w, Optimizer o, const char* what) {
    const float* master = NEEDS_MASTER ? o.master : (const float*)(const void*)o.params;
    if (memcmp(w.params, master, o.n * sizeof(float)) != 0) fail_msg("the weights of %s differ", what);
    if (memcmp(w.m, o.m, o.n * sizeof(float)) != 0) fail_msg("m of %s differs", what);
    if (memcmp(w.v, o.v, o.n * sizeof(float)) != 0) fail_msg("v of %s differs", what);
}
// Master weights that are not numbers of floatX, moments that are not 0, and params that no update has made.
static Optimizer optimizer_under_way(size_t n) {
    Optimizer o = same_optimizer(n);
    for (size_t i = 0; i < n; i++) {
        o.m[i] = 1e-3f * random_normal(8, 1, i);
        o.v[i] = 1e-5f * random_uniform(8, 2, i);
        if (NEEDS_MASTER) o.master[i] *= 1 + 1e-3f * random_normal(8, 3, i);
        if (NEEDS_MASTER) o.params[i] = to_floatX(NAN);
    }
    return o;
}
// Three updates of n elements, the second of which is skipped, by the form that is the definition and by every other form.
static void check_forms_of_adamw(size_t n, size_t no_decay) {
    Optimizer o = optimizer_under_way(n);
    WideOptimizer wide = widened(o), alone = widened(o), host = widened(o), from_floatX = widened(o);
    Tensor rounded = unset_tensor(n), rounded_from_fp32 = unset_tensor(n);
    AdamW a = adamw_example;
    for (a.t = 1; a.t <= 3; a.t++) {
        float grad_scale = a.t == 2 ? 0 : 0.7f;
        update(a, o, grad_scale, n, no_decay);
        adamw_update_fp32(a, wide.params, wide.m, wide.v, wide.grads, &grad_scale, n, no_decay);
        adamw_update(a, NULL, alone.params, alone.m, alone.v, o.grads, &grad_scale, n, no_decay);
        host_adamw_update(a, NEEDS_MASTER ? rounded_from_fp32.x : NULL, host.params, host.m, host.v, host.grads, DTYPE_F32, grad_scale, n,
                          no_decay);
        host_adamw_update(a, NEEDS_MASTER ? rounded.x : NULL, from_floatX.params, from_floatX.m, from_floatX.v, o.grads, FLOATX_DTYPE,
                          grad_scale, n, no_decay);
    }
    expect_master_weights(wide, o, "adamw_update_fp32");
    expect_master_weights(alone, o, "adamw_update without params");
    expect_master_weights(host, o, "host_adamw_update of fp32 gradients");
    expect_master_weights(from_floatX, o, "host_adamw_update of floatX gradients");
    if (NEEDS_MASTER) assert_memory_equal(rounded.x, o.params, n * sizeof(floatX));
    if (NEEDS_MASTER) assert_memory_equal(rounded_from_fp32.x, o.params, n * sizeof(floatX));
}
TEST(every_form_of_adamw_gives_the_same_master_weights_to_the_bit) {
    const size_t sizes[] = { 0, 1, 8191, 8193, 16389 }; // the host takes slices of 8192
    for (int k = 0; k < 5; k++) {
        size_t n = sizes[k];
        const size_t no_decays[] = { 0, n / 3, 8191, 8193, n + 1 }; // a unit's may go on after this piece
        for (int d = 0; d < 5; d++) {
            check_forms_of_adamw(n, no_decays[d]);
            free_arrays();
        }
    }
}
TEST(adamw_changes_nothing_when_the_step_is_skipped) {
    Optimizer before = optimizer_under_way(100), o = optimizer_under_way(100), on_host = optimizer_under_way(100);
    WideOptimizer wide = widened(o);
    const float skip = 0;
    o.grads[7] = on_host.grads[7] = to_floatX(NAN);
    wide.grads[7] = NAN;
    update(adamw_example, o, 0.0f, 100, 10);
    expect_same_optimizer(o, before);
    adamw_update_fp32(adamw_example, wide.params, wide.m, wide.v, wide.grads, &skip, 100, 10);
    expect_master_weights(wide, before, "adamw_update_fp32");
    adamw_update(adamw_example, NULL, wide.params, wide.m, wide.v, o.grads, &skip, 100, 10);
    expect_master_weights(wide, before, "adamw_update without params");
    host_adamw_update(adamw_example, NULL, wide.params, wide.m, wide.v, wide.grads, DTYPE_F32, 0, 100, 10);
    expect_master_weights(wide, before, "host_adamw_update of fp32 gradients");
    float* weights = NEEDS_MASTER ? on_host.master : (float*)(void*)on_host.params;
    host_adamw_update(adamw_example, NEEDS_MASTER ? on_host.params : NULL, weights, on_host.m, on_host.v, on_host.grads,
                      FLOATX_DTYPE, 0, 100, 10);
    expect_same_optimizer(on_host, before);
}

TEST(numbers_on_the_host_of_another_type_are_refused) {
    const DType other = FLOATX_DTYPE == DTYPE_BF16 ? DTYPE_F16 : DTYPE_BF16;
    float x[1] = { 0 }, w[3] = { 0 };
    expect_error(host_sum_squares(x, other, 1), "numbers on the host must be fp32 or " FLOATX_NAME " here");
    expect_error(host_adamw_update(adamw_example, NULL, w, w + 1, w + 2, x, other, 1, 1, 0),
                 "numbers on the host must be fp32 or " FLOATX_NAME " here");
}

// ---- elementwise functions ----
static float float_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
// The distance from got to want in units of the last place of a float near want.
static double ulps(float got, double want) {
    if (isnan(got) || isnan(want)) return isnan(got) && isnan(want) ? 0 : INFINITY;
    if ((double)got == want || (isinf(got) && (double)got * want > 0 && fabs(want) >= 0x1.ffffffp127)) return 0;
    int exponent;
    frexp(want, &exponent);
    return fabs((double)got - want) / ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}
static void expect_within_ulps(const char* what, float x, float got, double want, double limit) {
    if (!(ulps(got, want) <= limit)) fail_msg("%s(%.9g) = %.9g, want %.9g within %.1f ulp", what, (double)x, (double)got, want, limit);
}
static double gelu_derivative_definition(double x) {
    const double k = sqrt(2 / 3.14159265358979323846);
    double t = tanh(k * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}
TEST(exp_and_gelu_are_accurate_over_the_whole_float_range) {
    for (uint64_t u = 0; u <= 0xffffffffu; u += 9973) {
        float x = float_from_bits((uint32_t)u);
        expect_within_ulps("exp", x, exp_f32(x), exp((double)x), 1.5);
        if (!(fabsf(x) < 1e18f)) continue; // beyond, x^2 overflows, as it does in PyTorch
        // in the far left tail the definition's 1 + tanh cancels, so errors count against the size of x itself
        expect_near("gelu", (double)gelu_f32(x), gelu_definition((double)x), 4 * F32_ROUNDING, 1e-7 * fmin(1, fabs((double)x)) + 1e-44);
        expect_near("gelu's derivative", (double)gelu_derivative_f32(x), gelu_derivative_definition((double)x), 4 * F32_ROUNDING, 4e-7);
    }
    const float special[8] = { 0.0f, -0.0f, INFINITY, -INFINITY, NAN, 88.72283f, 88.7229f, -103.9f };
    for (int i = 0; i < 8; i++) expect_within_ulps("exp", special[i], exp_f32(special[i]), exp((double)special[i]), 1.5);
    assert_true(exp_f32(0.0f) == 1.0f && exp_f32(-INFINITY) == 0.0f && isinf(exp_f32(89.0f)));
    assert_true(gelu_f32(0.0f) == 0.0f && isinf(gelu_f32(INFINITY)) && isnan(gelu_f32(NAN)) && isnan(gelu_derivative_f32(NAN)));
}
TEST(an_element_does_not_depend_on_its_place_in_the_array) {
    const int n = 100, C = 100;
    start(1, n, C, 1, 1);
    Tensor x = random_tensor(100, 0, 3);
    floatX* whole = (floatX*)own(100, sizeof(floatX));
    #pragma omp simd
    for (int i = 0; i < 100; i++) whole[i] = to_floatX(gelu_f32(to_float(x.x[i])));
    for (int begin = 0; begin < 100; begin++) {
        floatX part[100];
        for (int i = begin; i < 100; i++) part[i] = to_floatX(gelu_f32(to_float(x.x[i])));
        assert_memory_equal(part + begin, whole + begin, (size_t)(100 - begin) * sizeof(floatX));
    }
}

// ---- the number of threads ----
// Computes what a step computes, from fixed inputs, by name. Matrix products are oneDNN's, which promises equal bits only for
// an equal number of threads.
typedef struct { const char* name; bool is_product; void* bytes; size_t n; } Result;
typedef struct { Result results[32]; int count; } Record;
static void record(Record* r, bool is_product, const char* name, const void* p, size_t n) {
    Result result = { name, is_product, memcpy(own(n, 1), p, n), n };
    r->results[r->count++] = result;
}
static Record run_all_layers(int threads) {
    enum { B = 3, T = 70, C = 48, NH = 4, V = 50, Vp = 64, N = B * T };
    omp_set_num_threads(threads);
    start(B, T, C, NH, Vp);
    next_stream = 1000;
    Record r = { .count = 0 };
    int *tokens = random_tokens(N, V), *targets = random_tokens(N, V);
    Tensor wte = random_tensor(Vp * C, 0, 1), wpe = random_tensor(T * C, 0, 1), x = random_tensor(N * C, 0, 1), y = random_tensor(N * C, 0, 1);
    Tensor w = random_tensor(C, 1, 1), b = random_tensor(C, 0, 1), qkv = random_tensor(N * 3 * C, 0, 1), logits = random_tensor(N * Vp, 0, 1);
    Tensor fc = random_tensor(4 * C * C, 0, 1), fcb = random_tensor(4 * C, 0, 1), wide = random_tensor(N * 4 * C, 0, 1), pre = unset_tensor(N * 4 * C);
    Tensor dqkv = unset_tensor(N * 3 * C), many = random_tensor(100003, 0, 1);
    Optimizer o = random_optimizer(20011);
    float mean[N], rstd[N], stats[N * NH], losses[N], sums[N * 4 * C];
    double square = 0;
    #define KEEP(name, t) record(&r, false, name, (t).x, (t).n * sizeof(floatX))
    #define KEEP_PRODUCT(name, t) record(&r, true, name, (t).x, (t).n * sizeof(floatX))
    matmul_backward_weight(fc.x, fcb.x, wide.x, x.x, N, C, 4 * C, GRAD_ADD);      KEEP_PRODUCT("a linear dw", fc); KEEP("a linear dbias", fcb);
    matmul_gelu_forward(wide.x, pre.x, y.x, fc.x, fcb.x, N, C, 4 * C);            KEEP_PRODUCT("linear forward", wide);
    matmul_backward_input(y.x, wide.x, fc.x, N, C, 4 * C);                        KEEP_PRODUCT("a linear dinp", y);
    matmul_forward_fp32(sums, x.x, fc.x, fcb.x, N, C, 4 * C);                     record(&r, true, "linear forward in fp32", sums, sizeof sums);
    encoder_forward(x.x, tokens, wte.x, wpe.x, B, T, C);                          KEEP("encoder_forward", x);
    encoder_backward(wte.x, wpe.x, x.x, tokens, B, T, C, GRAD_SET);               KEEP("dwte", wte); KEEP("dwpe", wpe);
    residual_layernorm_forward(x.x, y.x, mean, rstd, x.x, NULL, w.x, b.x, N, C);  KEEP("layernorm's out", y);
    layernorm_backward(x.x, w.x, b.x, y.x, x.x, w.x, mean, rstd, N, C, GRAD_ADD); KEEP("layernorm's dinp", x); KEEP("its dw", w); KEEP("its db", b);
    attention_forward(y.x, stats, qkv.x, B, T, C, NH);                            KEEP("attention_forward", y);
    attention_backward(dqkv.x, x.x, qkv.x, y.x, stats, B, T, C, NH);              KEEP("attention_backward", dqkv);
    classifier_forward_backward(losses, logits.x, targets, 0.1f, N, V, Vp);       KEEP("dlogits", logits);
    TokenRange last = token_range(Vp, 2, 1);
    float of_part[3 * N], part_losses[N];
    encoder_part_forward(x.x, tokens, wte.x, wpe.x, last, B, T, C);               KEEP("encoder_part_forward", x);
    encoder_part_backward(wte.x, wpe.x, x.x, tokens, last, B, T, C, GRAD_ADD);    KEEP("dwte of a part", wte); KEEP("dwpe", wpe);
    Tensor part = random_tensor((size_t)N * (size_t)last.count, 0, 1);
    classifier_part_stats(of_part, part.x, targets, last, N, V);
    record(&r, false, "stats of a part", of_part, sizeof of_part);
    classifier_part_forward_backward(part_losses, part.x, of_part, targets, 0.1f, last, 1, N, V); KEEP("dlogits of a part", part);
    record(&r, false, "losses from parts", part_losses, sizeof part_losses);
    add_sum_squares(&square, many.x, many.n);
    update(adamw_example, o, 1, o.n, 100);
    record(&r, false, "losses", losses, sizeof losses);
    record(&r, false, "a sum of squares", &square, sizeof square);
    record(&r, false, "AdamW's params", o.params, o.n * sizeof(floatX));
    return r;
}
static void expect_same_record(Record a, Record b, const char* when, bool products) {
    for (int i = 0; i < a.count; i++) {
        if (a.results[i].is_product && !products) continue;
        if (memcmp(a.results[i].bytes, b.results[i].bytes, a.results[i].n) != 0) fail_msg("%s: the bits differ %s", a.results[i].name, when);
    }
}
TEST(results_are_the_same_from_run_to_run_and_for_any_number_of_threads) {
    int threads = omp_get_max_threads();
    Record one = run_all_layers(1);
    for (int n = 1; n <= 3; n++) {
        Record first = run_all_layers(n), second = run_all_layers(n);
        expect_same_record(first, second, "from run to run", true);
        expect_same_record(first, one, "with the number of threads", false);
    }
    omp_set_num_threads(threads);
}

TEST(workspace_is_what_was_announced) {
    LayerShapes s = { 2, 9, 12, 3, 128, 1 };
    size_t announced = layers_workspace_bytes(s), calls = device_allocations();
    layers_init(s);
    assert_int_equal(device_memory(MEMORY_WORKSPACE), announced);
    assert_int_equal(device_allocations(), calls + 1);
    assert_true(strlen(layers_description()) > 0);
    layers_free();
    assert_int_equal(device_memory(MEMORY_WORKSPACE), 0);
}

void before_all(void) { device_init(0, 1); }
void after_all(void) { device_shutdown(); }
