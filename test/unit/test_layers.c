/*
test_layers.c - every layer against its definition in double precision, written here a second time and naively; with some inputs
also against PyTorch's numbers (test/reference/layers.safetensors).

Forward results are compared with the definition; gradients with central differences of the definition under a random
cotangent; results that must not depend on threads, slices or order are compared to the bit. Compiled once for each
precision: in 16 bits the inputs are rounded first, so that the bounds need to allow only for the layer's own rounding.
PyTorch's inputs are exact in every precision, and it computed in double.
*/
#include "../../llmc/save/safetensors.h"
#include "arrays.h"
#include "expect_death.h"

#define NOISE 1e-10 // of the finite differences

// ---- inputs: random, or PyTorch's ----
static const char* layer; // of PyTorch's, "layernorm.odd": a check takes its inputs, and compares with its results, too; NULL: none
static SafeTensors pytorch;
static bool is_used[128]; // by tensor of the file

// The layer's tensor of the name that is the last word; NULL if there is none.
static const double* pytorchs(const char* what, size_t n) {
    char name[64];
    const char* word = strrchr(what, ' ');
    if (layer == NULL) return NULL;
    snprintf(name, sizeof name, "%s.%s", layer, word ? word + 1 : what);
    const SafeTensor* t = safetensors_find(&pytorch, name);
    if (t == NULL) return NULL;
    float* x = floats(n);
    double* d = doubles(n);
    assert_int_equal(t->elements, n);
    is_used[t - pytorch.tensors] = true;
    safetensors_read(&pytorch, t, 0, n, x, DTYPE_F32);
    for (size_t i = 0; i < n; i++) d[i] = (double)x[i];
    return d;
}
static void begin_layer(const char* name) {
    if (pytorch.count == 0) safetensors_open(&pytorch, "test/reference/layers.safetensors", "make_reference.py makes it");
    layer = name;
}
static void end_layer(void) {
    for (int i = 0; i < pytorch.count; i++) {
        const char* name = pytorch.tensors[i].name;
        if (strncmp(name, layer, strlen(layer)) == 0 && !is_used[i]) fail_msg("%s is not compared", name);
    }
    layer = NULL;
}
#define with_pytorchs(name, check) do { begin_layer(name); check; end_layer(); } while (0)

static Tensor input(const char* name, size_t n, double mean, double std) {
    Tensor t = random_tensor(n, mean, std);
    const double* theirs = pytorchs(name, n);
    for (size_t i = 0; i < n && theirs; i++) {
        set_element(t, i, theirs[i]);
        assert_true(t.d[i] == theirs[i]);
    }
    return t;
}
// Of random tokens the first and the last of every part come first, as far as there are any.
static int* input_tokens(const char* name, int n, int V, int Vp, int parts) {
    int *tokens = own(n, sizeof(int)), width = Vp / parts;
    const double* theirs = pytorchs(name, n);
    for (int i = 0; i < n; i++) {
        int edge = i / 2 * width + i % 2 * (width - 1);
        tokens[i] = theirs ? (int)theirs[i] : i / 2 < parts && edge < V ? edge : (int)(random_uniform(7, n, i) * (float)V);
    }
    return tokens;
}

// ---- results ----
// How results are stored. of_largest: how far they may be from PyTorch's, as a share of the largest of these.
typedef struct { double relative, absolute, of_largest; } Rounding;
static const Rounding as_float = { 0, NOISE, 16 * F32_ROUNDING };
static const Rounding as_floatX = { 1.01 * ROUNDING, FLOATX_DTYPE == DTYPE_F16 ? 0x1p-25 : NOISE, // fp16: multiples of 2^-24
                                    (FLOATX_DTYPE == DTYPE_F32 ? 16 : 2) * ROUNDING };

typedef struct { struct { const char* what; uint64_t hash; } results[128]; int count; } Record;
static Record* record; // of results, which are then compared with nothing
void before_each(void) { layer = NULL; record = NULL; }

// Sums over terms may have errors of `roundings` fp32 roundings of the largest result. want NULL: only PyTorch's are known.
static void expect_results(const char* what, const double* got, const double* want, size_t n, double roundings, Rounding r) {
    const double* theirs = pytorchs(what, n);
    if (record) {
        assert_true(record->count < (int)COUNT(record->results));
        record->results[record->count].what = what;
        record->results[record->count++].hash = hash_bytes(1, got, n * sizeof *got);
        return;
    }
    assert_true(want || theirs);
    double off = want ? roundings * F32_ROUNDING * largest(want, n) + r.absolute : 0;
    double apart = theirs ? r.of_largest * largest(theirs, n) : 0;
    for (size_t i = 0; i < n; i++) {
        if (want) expect_near(what, got[i], want[i], r.relative * fabs(want[i]) + off);
        if (theirs && !(fabs(got[i] - theirs[i]) <= apart))
            fail_msg("%s of %s: element %zu is %.9g, PyTorch has %.9g, within %.3g", what, layer, i, got[i], theirs[i], apart);
    }
}
static double* widened(const float* x, size_t n) {
    double* d = doubles(n);
    for (size_t i = 0; i < n; i++) d[i] = (double)x[i];
    return d;
}
static void expect_floats(const char* what, const float* got, const double* want, size_t n, double roundings) {
    expect_results(what, widened(got, n), want, n, roundings, as_float);
}
static double* to_doubles(const floatX* x, size_t n) {
    double* d = doubles(n);
    for (size_t i = 0; i < n; i++) d[i] = (double)to_float(x[i]);
    return d;
}
static void expect_tensor(const char* what, const floatX* got, const double* want, size_t n, double roundings) {
    expect_results(what, to_doubles(got, n), want, n, roundings, as_floatX);
}

// ---- gradients ----
typedef double (*Objective)(const void* inputs); // the cotangent's product with the definition's result

// Returns the gradient (n) of f with respect to x (n), which f reads.
static double* differentiate(Objective f, const void* inputs, double* x, size_t n) {
    const double h = 1e-4, steps[4] = { -2 * h, -h, h, 2 * h }; // five-point formula: the error is of order h^4
    double* gradient = doubles(n);
    for (size_t i = 0; i < n && !record; i++) {
        double kept = x[i], value[4];
        for (int k = 0; k < 4; k++) {
            x[i] = kept + steps[k];
            value[k] = f(inputs);
        }
        x[i] = kept;
        gradient[i] = (value[0] - 8 * value[1] + 8 * value[2] - value[3]) / (12 * h);
    }
    return gradient;
}
static double dot(const double* a, const double* b, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

// A gradient that a layer sets, or adds to what is there before.
typedef struct { const char* what; const double* want; size_t n; double roundings; Tensor before; floatX* got; } Gradient;
// before: its name in PyTorch's file; what is not there is 0.
static Gradient gradient(const char* what, const char* before, const double* want, size_t n, double roundings) {
    return (Gradient){ what, want, n, roundings, input(before, n, 0, layer ? 0 : 1), NULL };
}
static floatX* memory_of(Gradient* g) { return g->got = copy_of(g->before.x, g->n); }
static double* after(const Gradient* g, GradMode mode) {
    double* total = doubles(g->n);
    for (size_t i = 0; i < g->n; i++) total[i] = g->want[i] + (mode == GRAD_ADD ? g->before.d[i] : 0);
    return total;
}
static void expect_gradient(const Gradient* g, GradMode mode) { expect_tensor(g->what, g->got, after(g, mode), g->n, g->roundings); }
#define FOR_BOTH_MODES for (GradMode mode = GRAD_SET; mode <= GRAD_ADD; mode++)

static void start(int B, int T, int C, int NH, int Vp) {
    LayerShapes s = layer_shapes(B, T, C, NH, Vp, 1);
    layers_free(); // of the shapes before
    layers_init(s);
}

// ---- embeddings ----
// The whole follows its definition; parts of it together have its bits.
static void check_encoder(int B, int T, int C, int V, int Vp, int parts) {
    start(B, T, C, 1, Vp);
    int N = B * T, *tokens = input_tokens("tokens", N, V, Vp, parts);
    size_t n = N * C;
    Tensor wte = input("wte", Vp * C, 0, 1), wpe = input("wpe", T * C, 0, 1), dout = input("dout", n, 0, 1);
    Tensor out = unset_tensor(n), of_part = unset_tensor(n), sum = random_tensor(n, 0, 0);
    double *want = doubles(n), *dwte = doubles(wte.n), *dwpe = doubles(wpe.n);
    for (int i = 0; i < N; i++) for (int c = 0; c < C; c++) {
        want[i*C + c] = wte.d[tokens[i]*C + c] + wpe.d[i % T * C + c];
        dwte[tokens[i]*C + c] += dout.d[i*C + c];
        dwpe[i % T * C + c] += dout.d[i*C + c];
    }
    encoder_forward(out.x, tokens, wte.x, wpe.x, B, T, C);
    expect_tensor("encoder_forward's out", out.x, want, n, 0.5);
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        encoder_part_forward(of_part.x, tokens, copy_of(wte.x + range.first * C, range.count * C), q == 0 ? wpe.x : NULL, range, B, T, C);
        add_in_place(sum.x, of_part.x, n);
    }
    assert_memory_equal(sum.x, out.x, n * sizeof(floatX));

    Gradient of_wte = gradient("encoder_backward's dwte", "dwte_before", dwte, wte.n, N);
    Gradient of_wpe = gradient("encoder_backward's dwpe", "", dwpe, wpe.n, B);
    FOR_BOTH_MODES {
        encoder_backward(memory_of(&of_wte), memory_of(&of_wpe), dout.x, tokens, B, T, C, mode);
        expect_gradient(&of_wte, GRAD_ADD);
        expect_gradient(&of_wpe, mode);
        for (int q = 0; q < parts; q++) {
            TokenRange range = token_range(Vp, parts, q);
            size_t begin = range.first * C, rows = range.count * C;
            floatX *part_wpe = copy_of(of_wpe.before.x, wpe.n);
            floatX *part = copy_of(of_wte.before.x + begin, rows), *without_wpe = copy_of(part, rows);
            encoder_part_backward(part, part_wpe, dout.x, tokens, range, B, T, C, mode);
            assert_memory_equal(part, of_wte.got + begin, rows * sizeof(floatX));
            assert_memory_equal(part_wpe, of_wpe.got, wpe.n * sizeof(floatX));
            encoder_part_backward(without_wpe, NULL, dout.x, tokens, range, B, T, C, mode);
            assert_memory_equal(without_wpe, part, rows * sizeof(floatX));
        }
    }
}
TEST(encoder_adds_token_and_position_and_sums_their_gradients_also_in_parts) {
    static const int shapes[][6] = { // B, T, C, V, Vp, parts
        { 1, 1, 1, 1, 1, 1 },
        { 2, 9, 7, 11, 12, 1 },
        { 2, 9, 7, 11, 12, 2 },
        { 2, 9, 7, 10, 12, 3 },  // the last part has a token of padding
        { 2, 9, 7, 5, 12, 4 },   // the last two have no other
        { 1, 1, 1, 1, 2, 2 },
        { 3, 12, 300, 5, 8, 2 }, // more channels than are summed at a time, tokens that occur often
    };
    for (size_t i = 0; i < COUNT(shapes); i++) {
        const int* s = shapes[i];
        check_encoder(s[0], s[1], s[2], s[3], s[4], s[5]);
    }
}
TEST(encoder_agrees_with_pytorch) { with_pytorchs("encoder.odd", check_encoder(3, 7, 13, 11, 11, 1)); }

// ---- layernorm ----
typedef struct { int N, C; const double *x, *w, *b, *cotangent; double *out, *mean, *rstd; } LayernormInputs;
static double layernorm_objective(const void* p) {
    const LayernormInputs* a = p;
    for (int i = 0; i < a->N; i++) {
        const double* x = a->x + i * a->C;
        double mean = 0, variance = 0;
        for (int c = 0; c < a->C; c++) mean += x[c] / a->C;
        for (int c = 0; c < a->C; c++) variance += (x[c] - mean) * (x[c] - mean) / a->C;
        for (int c = 0; c < a->C; c++) a->out[i * a->C + c] = (x[c] - mean) / sqrt(variance + 1e-5) * a->w[c] + a->b[c];
        a->mean[i] = mean;
        a->rstd[i] = 1 / sqrt(variance + 1e-5);
    }
    return dot(a->out, a->cotangent, a->N * a->C);
}
static void check_layernorm(int N, int C, double mean_of_x) {
    start(1, N, C, 1, 1);
    size_t n = N * C;
    Tensor x1 = input("inp1", n, mean_of_x, 1), x2 = input("inp2", n, 0, 1), w = input("w", C, 1, 0.5), b = input("b", C, 0, 0.5);
    Tensor res = unset_tensor(n), out = unset_tensor(n), again = unset_tensor(n), dout = input("dout", n, 0, 1);
    float *mean = unset_floats(N), *rstd = unset_floats(N);
    double* sum = doubles(n);
    for (size_t i = 0; i < n; i++) sum[i] = x1.d[i] + x2.d[i];
    residual_layernorm_forward(res.x, out.x, mean, rstd, x1.x, x2.x, w.x, b.x, N, C);
    expect_tensor("layernorm's res", res.x, sum, n, 0.5);
    double* x = to_doubles(res.x, n);
    LayernormInputs a = { N, C, x, w.d, b.d, dout.d, doubles(n), doubles(N), doubles(N) };
    layernorm_objective(&a);
    double slack = 16 + 8 * (1 + fabs(mean_of_x)); // the subtraction of the mean magnifies the rounding of x by this
    if (C == 1) slack *= 400;
    const Rounding of_rounded = { 0, NOISE, as_floatX.of_largest }; // PyTorch's res is not rounded
    expect_tensor("layernorm's out", out.x, a.out, n, slack);
    expect_results("layernorm's mean", widened(mean, N), a.mean, N, slack, of_rounded);
    expect_results("layernorm's rstd", widened(rstd, N), a.rstd, N, slack, of_rounded);
    residual_layernorm_forward(res.x, again.x, mean, rstd, res.x, NULL, w.x, b.x, N, C);
    assert_memory_equal(again.x, out.x, n * sizeof(floatX)); // recomputed from res

    Gradient dx = gradient("layernorm's dinp", "dres", differentiate(layernorm_objective, &a, x, n), n, slack);
    Gradient dw = gradient("layernorm's dw", "", differentiate(layernorm_objective, &a, w.d, C), C, slack + N);
    Gradient db = gradient("layernorm's db", "", differentiate(layernorm_objective, &a, b.d, C), C, slack + N);
    FOR_BOTH_MODES {
        layernorm_backward(memory_of(&dx), memory_of(&dw), memory_of(&db), dout.x, res.x, w.x, mean, rstd, N, C, mode);
        expect_gradient(&dx, GRAD_ADD);
        expect_gradient(&dw, mode);
        expect_gradient(&db, mode);
    }
}
TEST(layernorm_follows_its_definition_and_its_derivative) {
    check_layernorm(5, 19, 0);
    check_layernorm(1, 8, 0);
    check_layernorm(3, 1, 0); // a row of one channel normalises to 0
    check_layernorm(40, 33, 0);
    check_layernorm(3, 64, 100); // far from 0, where E[x^2] - E[x]^2 would cancel
}
TEST(layernorm_agrees_with_pytorch) {
    with_pytorchs("layernorm.odd", check_layernorm(6, 33, 0));
    with_pytorchs("layernorm.even", check_layernorm(5, 96, 0));
}

// ---- linear layers ----
static double gelu_definition(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_derivative_definition(double x) {
    const double k = sqrt(2 / M_PI), t = tanh(k * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}
static double sum_error(int terms) { return 4 + fmin(terms, 4 * sqrt(terms)); } // in roundings

static void check_linear(int N, int C, int OC) {
    start(1, N, C > OC ? C : OC, 1, OC);
    size_t n = N * OC;
    Tensor inp = input("inp", N * C, 0, 1), w = input("w", OC * C, 0, 1), bias = input("b", OC, 0, 1), dout = input("dout", n, 0, 1);
    Tensor before_gelu = input("pre", inp.n, 0, 1);
    double *product = doubles(n), *with_bias = doubles(n), *gelu = doubles(n);
    double *dinp = doubles(inp.n), *dw = doubles(w.n), *db = doubles(OC);
    for (int i = 0; i < N; i++) for (int o = 0; o < OC; o++) {
        double g = dout.d[i*OC + o];
        for (int c = 0; c < C; c++) {
            product[i*OC + o] += inp.d[i*C + c] * w.d[o*C + c];
            dinp[i*C + c] += g * w.d[o*C + c];
            dw[o*C + c] += g * inp.d[i*C + c];
        }
        with_bias[i*OC + o] = product[i*OC + o] + bias.d[o];
        db[o] += g;
    }
    Tensor out = unset_tensor(n), pre = unset_tensor(n), back = unset_tensor(inp.n);
    for (int biased = 0; biased < 2; biased++) {
        matmul_forward(out.x, inp.x, w.x, biased ? bias.x : NULL, N, C, OC);
        const char* what = biased ? "matmul_forward's out" : "matmul_forward's out_no_bias";
        expect_tensor(what, out.x, biased ? with_bias : product, n, sum_error(C));
    }
    matmul_gelu_forward(out.x, pre.x, inp.x, w.x, bias.x, N, C, OC);
    expect_tensor("matmul_gelu_forward's pre, which is out", pre.x, with_bias, n, sum_error(C));
    for (size_t i = 0; i < n; i++) gelu[i] = gelu_definition((double)to_float(pre.x[i]));
    expect_tensor("matmul_gelu_forward's out_gelu", out.x, gelu, n, 4);

    matmul_backward_input(back.x, dout.x, w.x, N, C, OC);
    expect_tensor("matmul_backward_input's dinp", back.x, dinp, inp.n, sum_error(OC));
    Gradient of_w = gradient("matmul_backward_weight's dw", "", dw, w.n, sum_error(N));
    Gradient of_bias = gradient("matmul_backward_weight's db", "", db, OC, sum_error(N));
    FOR_BOTH_MODES {
        floatX *gw = memory_of(&of_w), *without_bias = copy_of(gw, w.n), *chunk = copy_of(gw, w.n);
        matmul_backward_weight(gw, memory_of(&of_bias), dout.x, inp.x, N, C, OC, mode);
        expect_gradient(&of_w, mode);
        expect_gradient(&of_bias, mode);
        matmul_backward_weight(without_bias, NULL, dout.x, inp.x, N, C, OC, mode);
        assert_memory_equal(without_bias, gw, w.n * sizeof(floatX));
        matmul_backward_weight_chunk(chunk, dout.x, inp.x, 0, N, N, C, OC, mode); // the only one
        assert_memory_equal(chunk, gw, w.n * sizeof(floatX));
        float* wide = unset_floats(w.n);
        if (mode == GRAD_ADD) to_fp32(wide, of_w.before.x, w.n);
        matmul_backward_weight_fp32(wide, dout.x, inp.x, N, C, OC, mode);
        expect_floats("matmul_backward_weight_fp32's sums", wide, after(&of_w, mode), w.n, sum_error(N));
        if (!NEEDS_MASTER) assert_memory_equal(wide, gw, w.n * sizeof(float));
    }
    for (size_t i = 0; i < inp.n; i++) dinp[i] *= gelu_derivative_definition(before_gelu.d[i]);
    matmul_gelu_backward_input(back.x, dout.x, w.x, before_gelu.x, N, C, OC);
    // in 16 bits the product may be rounded before gelu' multiplies it
    const Rounding twice = { (NEEDS_MASTER ? 2.1 : 1.01) * ROUNDING, 0, as_floatX.of_largest };
    expect_results("matmul_gelu_backward_input's dpre", to_doubles(back.x, inp.n), dinp, inp.n, 12 + 2 * sum_error(OC), twice);
}
TEST(linear_layers_are_a_product_plus_bias_their_derivatives_and_gelu) {
    static const int shapes[][3] = { // N, C, OC
        { 1, 1, 1 }, { 5, 7, 9 }, { 1, 33, 65 }, { 67, 1, 3 }, { 130, 70, 257 }, { 256, 96, 384 },
        { 3, 1100, 5 }, { 257, 1030, 70 }, // more columns than a tile
        { 2, 3, 2100 }, { 7, 40, 2100 },   // more rows of w than a tile
        { 1100, 33, 65 },                  // sums over more rows than a tile
        { 300, 64, 500 },                  // tiles in several parts
        { 40, 512, 896 },                  // rows of w that share sets of the cache, in several panels
    };
    for (size_t i = 0; i < COUNT(shapes); i++) check_linear(shapes[i][0], shapes[i][1], shapes[i][2]);
}
TEST(matmul_agrees_with_pytorch) {
    with_pytorchs("matmul.odd", check_linear(7, 33, 19));
    with_pytorchs("matmul.even", check_linear(40, 16, 48));
}

// ---- attention ----
typedef struct { int B, T, C, NH; const double *qkv, *cotangent; double *out, *stats; } AttentionInputs;
static double attention_objective(const void* p) {
    const AttentionInputs* a = p;
    int T = a->T, C = a->C, HS = C / a->NH;
    memset(a->out, 0, a->B * T * C * sizeof(double));
    for (int b = 0; b < a->B; b++) for (int h = 0; h < a->NH; h++) for (int t = 0; t < T; t++) {
        const double* q = a->qkv + (b * T + t) * 3 * C + h * HS;
        double score[256], max = -INFINITY, sum = 0;
        for (int u = 0; u <= t; u++) {
            const double* k = a->qkv + (b * T + u) * 3 * C + C + h * HS;
            score[u] = dot(q, k, HS) / sqrt(HS);
            max = fmax(max, score[u]);
        }
        for (int u = 0; u <= t; u++) sum += exp(score[u] - max);
        a->stats[(b * a->NH + h) * T + t] = log(sum) + max;
        for (int u = 0; u <= t; u++) {
            const double* v = a->qkv + (b * T + u) * 3 * C + 2 * C + h * HS;
            for (int i = 0; i < HS; i++) a->out[(b * T + t) * C + h * HS + i] += exp(score[u] - max) / sum * v[i];
        }
    }
    return dot(a->out, a->cotangent, a->B * T * C);
}
// slack: of the forward's results, in roundings. Finite differences can be afforded of few tokens.
static void check_attention(int B, int T, int C, int NH, double std, double slack) {
    start(B, T, C, NH, 1);
    size_t n = B * T * C, rows = B * NH * T;
    Tensor qkv = input("qkv", 3 * n, 0, std), out = unset_tensor(n), dout = input("dout", n, 0, 1), dqkv = unset_tensor(3 * n);
    float* stats = unset_floats(rows);
    double *want = doubles(n), *want_stats = doubles(rows);
    AttentionInputs a = { B, T, C, NH, qkv.d, dout.d, want, want_stats };
    attention_objective(&a);
    attention_forward(out.x, stats, qkv.x, B, T, C, NH);
    expect_tensor("attention_forward's out", out.x, want, n, slack);
    expect_floats("attention_forward's stats", stats, want_stats, rows, 16);
    attention_backward(dqkv.x, dout.x, qkv.x, out.x, stats, B, T, C, NH);
    const Rounding backward = { 1.01 * ROUNDING, 0, as_floatX.of_largest };
    const double* gradient = T > 100 ? NULL : differentiate(attention_objective, &a, qkv.d, 3 * n);
    if (gradient || layer || record) // backward reads out as it was rounded
        expect_results("attention_backward's dqkv", to_doubles(dqkv.x, 3 * n), gradient, 3 * n, 4 * slack + ROUNDING / F32_ROUNDING,
                       backward);
    if (T <= 100) return;
    attention_forward(out.x, stats, qkv.x, B, 100, C, NH); // what a token computes does not depend on those after it
    expect_tensor("attention_forward of its first 100 tokens", out.x, want, 100 * C, slack);
}
TEST(attention_follows_its_definition_and_its_derivative) {
    check_attention(2, 5, 6, 2, 1, 16);
    check_attention(1, 1, 1, 1, 1, 16);    // one token sees itself alone
    check_attention(2, 13, 15, 3, 1, 16);  // odd everywhere
    check_attention(1, 66, 4, 2, 1, 16);   // more queries than a block
    check_attention(1, 201, 66, 2, 2, 64); // several blocks
    check_attention(1, 3, 4, 1, 30, 4096); // scores whose exponentials alone would overflow
}
TEST(attention_agrees_with_pytorch) {
    with_pytorchs("attention.short", check_attention(3, 7, 20, 4, 1, 16));
    with_pytorchs("attention.long", check_attention(1, 131, 8, 2, 1, 16));
    with_pytorchs("attention.wide", check_attention(2, 9, 64, 1, 1, 16));
    with_pytorchs("attention.one", check_attention(2, 1, 6, 3, 1, 16));
}

// ---- attention in parts ----
typedef struct { int T, n, k; } Chunk; // tokens [k*n, (k+1)*n) of T
static void* rows_of_chunk(const void* x, size_t row, size_t width, int S, Chunk c) {
    char* rows = own(S * c.n, width);
    for (int s = 0; s < S; s++)
        device_copy_rows(rows + s * c.n * width, width, (const char*)x + (s * c.T + c.k * c.n) * row, row, width, c.n);
    return rows;
}
// (S,n,width): of the chunk's rows of x (S,T,row) the first elements
#define chunk_of(x, row, width, S, c) rows_of_chunk(x, (row) * sizeof *(x), (width) * sizeof *(x), S, c)

// n floats that a layer adds to; want += what they are before
static float* floats_before(double* want, size_t n) {
    float* x = random_floats(n, 1);
    for (size_t i = 0; i < n; i++) want[i] += (double)x[i];
    return x;
}
// Each chunk of n tokens attends to itself and all before it, in several orders. What is merged and added is fp32 in every precision.
// large: a number that is added to all scores against keys of even chunks, and taken from those against odd ones.
static void check_attention_in_parts(int B, int n, int chunks, int C, int NH, double large, double slack) {
    int T = chunks * n, HS = C / NH, N = B * n * C, rows = B * NH * n;
    LayerShapes s = layer_shapes(B, T, C, NH, 1, 1);
    s.context = chunks;
    s.chunk = n;
    layers_free();
    layers_init(s);
    Tensor qkv = random_tensor(3 * N * chunks, 0, 1), alone = unset_tensor(qkv.n), dout = random_tensor(N * chunks, 0, 1);
    for (int i = 0; i < B * T * NH && large > 0; i++) {
        size_t q = i / NH * 3 * C + i % NH * HS;
        set_element(qkv, q, sqrt(large * sqrt(HS)));
        set_element(qkv, q + C, i / NH % T / n % 2 ? -qkv.d[q] : qkv.d[q]);
    }
    device_copy_rows(alone.x, 3 * C * sizeof(floatX), qkv.x, 3 * C * sizeof(floatX), C * sizeof(floatX), B * T); // queries
    AttentionInputs a = { B, T, C, NH, qkv.d, dout.d, doubles(dout.n), doubles(rows * chunks) };
    const double* gradient = differentiate(attention_objective, &a, qkv.d, qkv.n);
    // out is rounded for backward, which moves all that a query gives alike: multiplied by what large keys have in common
    double in_backward = 4 * slack + ROUNDING / F32_ROUNDING * fmax(1, sqrt(large * sqrt(HS)));
    attention_objective(&a);
    for (int order = 0; order < 3; order++) {
        floatX* kv[4];
        float* dkv[4];
        double* want[4];
        for (int k = 0; k < chunks; k++) {
            Chunk c = { T, n, k };
            kv[k] = chunk_of(qkv.x + C, 3 * C, 2 * C, B, c);
            want[k] = chunk_of(gradient + C, 3 * C, 2 * C, B, c);
            dkv[k] = floats_before(want[k], 2 * N);
        }
        for (int i = 0; i < chunks; i++) {
            Chunk c = { T, n, i };
            floatX *q = chunk_of(alone.x, 3 * C, 3 * C, B, c), *d = chunk_of(dout.x, C, C, B, c), *rounded = unset_tensor(N).x;
            double* want_dq = chunk_of(gradient, 3 * C, C, B, c);
            float *out = unset_floats(N), *stats = unset_floats(rows), *dq = floats_before(want_dq, N);
            for (int part = 0; part <= i; part++) {
                int k = order == 0 ? part : order == 1 ? i - part : (part + 1) % (i + 1);
                attention_part_forward(out, stats, q, kv[k], k == i, part > 0, B, n, C, NH);
            }
            expect_floats("attention_part_forward's out", out, chunk_of(a.out, C, C, B, c), N, slack);
            expect_floats("attention_part_forward's stats", stats, chunk_of(a.stats, 1, 1, B * NH, c), rows, 16);
            from_fp32(rounded, out, N);
            for (int k = 0; k <= i; k++) attention_part_backward(dq, dkv[k], d, q, kv[k], rounded, stats, k == i, B, n, C, NH);
            expect_floats("attention_part_backward's dq", dq, want_dq, N, in_backward);
            if (chunks > 1) continue;
            floatX* whole = unset_tensor(N).x;
            float* whole_stats = unset_floats(rows);
            attention_forward(whole, whole_stats, qkv.x, B, T, C, NH);
            assert_memory_equal(rounded, whole, N * sizeof(floatX));
            assert_memory_equal(stats, whole_stats, rows * sizeof(float));
        }
        for (int k = 0; k < chunks; k++) expect_floats("attention_part_backward's dkv", dkv[k], want[k], 2 * N, in_backward);
    }
}
TEST(attention_in_parts_is_that_of_the_whole_sequence_in_any_order_of_its_chunks) {
    static const int shapes[][5] = { // B, n, chunks, C, NH
        { 2, 7, 1, 15, 3 }, { 2, 5, 2, 6, 2 }, { 1, 1, 4, 4, 2 }, { 2, 7, 3, 15, 3 }, { 1, 4, 4, 8, 1 }, { 1, 65, 2, 1, 1 },
    };
    for (size_t i = 0; i < COUNT(shapes); i++) {
        const int* s = shapes[i];
        check_attention_in_parts(s[0], s[1], s[2], s[3], s[4], 0, 16);
        free_arrays();
    }
}
TEST(attention_in_parts_survives_scores_that_exp_alone_would_overflow) {
    for (int chunks = 2; chunks <= 4; chunks++) check_attention_in_parts(1, 3, chunks, 8, 2, 200, 1024);
}
TEST(rows_are_copied_and_what_is_between_them_stays) {
    for (int rows = 0; rows <= 5; rows++) {
        char from[40], to[40], want[40];
        for (int i = 0; i < 40; i++) from[i] = (char)i, to[i] = want[i] = (char)-i;
        for (int i = 0; i < rows; i++) for (int k = 0; k < 3; k++) want[1 + 5 * i + k] = from[2 + 7 * i + k];
        device_copy_rows(to + 1, 5, from + 2, 7, 3, rows);
        assert_memory_equal(to, want, 40);
    }
}

// ---- a weight's gradient in chunks ----
enum { CHUNK_ROWS = 64, CHUNKED_ROWS = 8 * CHUNK_ROWS, CHUNK_C = 16, CHUNK_OC = 24 };
// (rows, cols) of numbers whose second half is `sign` times the first, but for a little noise.
static Tensor repeated_tensor(int cols, double sign, double noise) {
    const size_t half = CHUNKED_ROWS / 2 * cols;
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
TEST(chunks_of_the_classifier_are_alike_and_as_few_as_their_limit_allows) {
    for (int most = 64; most <= 64 * 7; most += 64)
        for (int N = 1; N < 3000; N += 7) {
            int rows = classifier_rows(N, classifier_elements / most), chunks = (N + rows - 1) / rows, last = N - (chunks - 1) * rows;
            assert_int_equal(chunks, (N + most - 1) / most);
            assert_true(rows <= most && (rows == N || rows % 64 == 0));
            assert_true(rows - last < 64 * chunks); // rounded up to 64 rows, each chunk takes at most 63 of the last one's
        }
    assert_int_equal(classifier_rows(100, classifier_elements), 64);
}
TEST(a_gpu_computes_more_logits_at_a_time_the_more_memory_it_has_unless_bits_must_not_depend_on_it) {
    const double GB[] = { 4, 24, 34.2, 34.4, 40, 48, 68.7, 68.8, 80, 192 };
    const int power[] = { 28, 28, 28, 29, 29, 29, 29, 30, 30, 30 };
    for (int i = 0; i < 10; i++) {
        assert_int_equal(classifier_elements_cuda(1e9 * GB[i], false), 1 << power[i]);
        assert_int_equal(classifier_elements_cuda(1e9 * GB[i], true), 1 << 28);
    }
}
TEST(chunks_of_a_weight_gradient_are_rounded_once) {
    const int N = CHUNKED_ROWS, C = CHUNK_C, OC = CHUNK_OC;
    start(1024, 64, C, 1, 512); // the classifier has several chunks
    // the second half nearly takes back what the first half gives: the sum is small, and what is rounded on the way to it is not
    Tensor dout = repeated_tensor(OC, -1, 0.01), inp = repeated_tensor(C, 1, 0), before = random_tensor(OC * C, 0, 0.1);
    double* want = doubles(before.n);
    FOR_BOTH_MODES {
        floatX *dw = copy_of(before.x, before.n), *rounded = copy_of(before.x, before.n);
        for (int i = 0; i < OC * C; i++) {
            want[i] = mode == GRAD_ADD ? before.d[i] : 0;
            for (int k = 0; k < N; k++) want[i] += dout.d[k * OC + i / C] * inp.d[k * C + i % C];
        }
        for (int row = 0; row < N; row += CHUNK_ROWS) {
            const floatX *d = dout.x + row * OC, *x = inp.x + row * C;
            matmul_backward_weight_chunk(dw, d, x, row, CHUNK_ROWS, N, C, OC, mode);
            matmul_backward_weight(rounded, NULL, d, x, CHUNK_ROWS, C, OC, row == 0 ? mode : GRAD_ADD); // after each chunk
        }
        assert_int_equal(off_by_more_than_a_rounding(dw, want, before.n), 0);
        if (NEEDS_MASTER) assert_true(off_by_more_than_a_rounding(rounded, want, before.n) > OC * C / 2);
        else assert_memory_equal(dw, rounded, before.n * sizeof(floatX));
    }
}

// ---- classifier ----
typedef struct { int V, target; const double* logits; double dloss, *loss; } ClassifierInputs; // of a row
static double classifier_objective(const void* p) {
    const ClassifierInputs* a = p;
    double sum = 0;
    for (int v = 0; v < a->V; v++) sum += exp(a->logits[v]);
    *a->loss = a->target < 0 ? 0 : log(sum) - a->logits[a->target];
    return a->dloss * *a->loss;
}
// What classifier_part_stats should say of each row with a target and a finite sum. The target's logit and the maximum are exact.
static void expect_stats(const float* stats, Tensor part, const int* targets, TokenRange range, int N, int V) {
    for (int i = 0; i < N; i++) {
        const double* row = part.d + i * range.count;
        double max = -(double)FLT_MAX, sum = 0, target = 0;
        for (int v = 0; v < range.count && range.first + v < V; v++) max = fmax(max, row[v]);
        for (int v = 0; v < range.count && range.first + v < V; v++) sum += exp(row[v] - max);
        for (int v = 0; v < range.count; v++) if (range.first + v == targets[i]) target = row[v];
        if (targets[i] < 0 || !isfinite(sum)) continue;
        expect_near("a part's largest logit", (double)stats[3*i], max, 0);
        expect_near("a part's sum", (double)stats[3*i + 1], sum, (4 + range.count) * F32_ROUNDING * sum);
        expect_near("a part's target", (double)stats[3*i + 2], target, 0);
    }
}
// Returns the losses of logits (N,Vp), and dlogits (N,Vp), by so many parts. One part has the bits of the whole.
static float* classify(Tensor logits, const int* targets, float dloss, int N, int V, int Vp, int parts, floatX* dlogits) {
    float *all = unset_floats(3 * parts * N), *losses = unset_floats(N), *again = unset_floats(N);
    Tensor part[8];
    int width = Vp / parts;
    start(1, N, 1, 1, Vp);
    for (int q = 0; q < parts; q++) {
        TokenRange range = token_range(Vp, parts, q);
        part[q] = unset_tensor(N * width); // the part's columns
        for (int i = 0; i < N * width; i++) set_element(part[q], i, logits.d[i / width * Vp + range.first + i % width]);
        classifier_part_stats(all + 3 * q * N, part[q].x, targets, range, N, V);
        expect_stats(all + 3 * q * N, part[q], targets, range, N, V);
    }
    classifier_part_forward(losses, all, targets, parts, N);
    for (int q = 0; q < parts; q++) {
        classifier_part_forward_backward(again, part[q].x, all, targets, dloss, token_range(Vp, parts, q), parts, N, V);
        assert_memory_equal(again, losses, N * sizeof(float));
        for (int i = 0; i < N; i++) memcpy(dlogits + i * Vp + q * width, part[q].x + i * width, width * sizeof(floatX));
    }
    if (parts > 1) return losses;
    classifier_forward(again, logits.x, targets, N, V, Vp);
    assert_memory_equal(again, losses, N * sizeof(float));
    classifier_forward_backward(again, logits.x, targets, dloss, N, V, Vp);
    assert_memory_equal(again, losses, N * sizeof(float));
    assert_memory_equal(logits.x, dlogits, N * Vp * sizeof(floatX));
    return losses;
}
// apart: how much larger the logits of each part are than those before. Padding, and rows without a target, are not numbers.
static void check_classifier(int N, int V, int Vp, int parts, double apart) {
    size_t n = N * Vp;
    Tensor given = input("logits", N * V, 0, 2), logits = unset_tensor(n), unpadded = unset_tensor(given.n);
    int* targets = input_tokens("targets", N, V, Vp, parts);
    const float dloss = to_float(*input("dloss", 1, 0.25, 0).x);
    if (!layer && N > 1) targets[1] = -1;
    for (size_t i = 0; i < n; i++) {
        int row = i / Vp, v = i % Vp;
        bool is_number = v < V && targets[row] >= 0;
        set_element(logits, i, is_number ? given.d[row*V + v] + apart * (v / (Vp / parts)) : i % 2 ? NAN : INFINITY);
    }
    double *want = doubles(N), *gradient = doubles(given.n);
    for (int i = 0; i < N; i++) { // a row's loss does not depend on the others
        ClassifierInputs row = { V, targets[i], logits.d + i * Vp, (double)dloss, &want[i] };
        memcpy(gradient + i * V, differentiate(classifier_objective, &row, logits.d + i * Vp, V), V * sizeof(double));
        classifier_objective(&row);
    }
    floatX* dlogits = unset_tensor(n).x;
    expect_floats("the classifier's losses", classify(logits, targets, dloss, N, V, Vp, parts, dlogits), want, N, 8);
    for (size_t i = 0; i < given.n; i++) unpadded.x[i] = dlogits[i / V * Vp + i % V];
    expect_tensor("the classifier's dlogits", unpadded.x, gradient, given.n, 8);
    for (size_t i = 0; i < n; i++) if ((int)i % Vp >= V || targets[i / Vp] < 0) assert_true(to_float(dlogits[i]) == 0.0f);
}
TEST(classifier_is_cross_entropy_over_the_vocabulary_without_its_padding_also_in_parts) {
    check_classifier(1, 1, 128, 1, 0); // V = 1: the loss is 0
    check_classifier(3, 130, 130, 1, 0);
    for (int parts = 1; parts <= 4; parts++) {
        check_classifier(9, 11, 12, parts, 0);
        check_classifier(9, 257, 384, parts, 0); // of 3: a part of one token; of 4: a part of padding
        check_classifier(9, 257, 384, parts, -40); // exponentials of different size
        check_classifier(9, 257, 384, parts, 40);
    }
    check_classifier(3, 5, 16, 4, 0); // two parts of padding
    check_classifier(1, 1, 8, 8, 0);
    check_classifier(2, 4, 8, 8, 0);
}
TEST(classifier_agrees_with_pytorch) {
    with_pytorchs("classifier.bytes", check_classifier(9, 257, 384, 1, 0));
    with_pytorchs("classifier.tiny", check_classifier(4, 3, 128, 1, 0));
}
TEST(classifier_hides_no_inf_or_nan_and_neither_does_a_part_from_the_other) {
    const double bad[2] = { NAN, INFINITY };
    const int target = 3;
    floatX dlogits[16]; // of 16 tokens, 13 of which are in the vocabulary
    for (int parts = 1; parts <= 2; parts++) {
        for (int k = 0; k < 2; k++) for (int at = 0; at < 13; at += 4) {
            Tensor logits = random_tensor(16, 0, 1);
            set_element(logits, at, bad[k]);
            assert_true(isnan(*classify(logits, &target, 1, 1, 13, 16, parts, dlogits)));
            for (int v = 0; v < 13; v++) assert_true(isnan(to_float(dlogits[v])));
        }
        Tensor logits = random_tensor(16, 0, 1);
        for (int v = 8; v < 13; v++) set_element(logits, v, -INFINITY); // probabilities of 0, and of two parts a whole one
        assert_true(isfinite(*classify(logits, &target, 1, 1, 13, 16, parts, dlogits)));
        for (int v = 0; v < 16; v++) assert_true(v < 8 ? isfinite(to_float(dlogits[v])) : to_float(dlogits[v]) == 0.0f);
    }
}
TEST(a_vocabulary_that_does_not_divide_into_parts_is_refused) {
    expect_error(token_range(10, 3, 0), "10 tokens of the padded vocabulary do not divide into 3 parts");
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
        double sum = 3, squares = 5, squares_fp32 = 5, want = 3;
        to_fp32(f, x.x, n);
        for (size_t i = 0; i < n; i++) want += x.d[i];
        add_sum(&sum, f, n);
        add_sum_squares(&squares, x.x, n);
        add_sum_squares_fp32(&squares_fp32, f, n);
        expect_near("add_sum", sum, want, 1e-12 * fabs(want));
        double in_order = squares_in_order(f, n); // to the bit, in either type
        assert_true(squares == 5 + in_order && squares_fp32 == 5 + in_order);
        assert_true(host_sum_squares(f, DTYPE_F32, n) == in_order && host_sum_squares(x.x, FLOATX_DTYPE, n) == in_order);
        if (n == 0) continue;
        set_element(x, n / 2, INFINITY);
        add_sum_squares(&squares, x.x, n);
        assert_true(isinf(squares));
    }
}
// One rounding may be off by half a unit in the last place; fp32's own sum and product also round once. Widening is exact,
// narrowing rounds like every other store; sums of fp32 are fp32's own.
TEST(adding_and_narrowing_round_once) {
    const size_t sizes[5] = { 0, 1, 7, 1000, 40003 };
    for (int k = 0; k < 10; k++) {
        size_t n = sizes[k / 2], offset = k % 2; // one element past memory that is aligned
        Tensor x = random_tensor(n + 1, 0, 1), y = random_tensor(n, 0, 0.1);
        Tensor narrowed = unset_tensor(n + 1);
        floatX *added = copy_of(y.x, n), before = x.x[0];
        float *wide = unset_floats(n + 1), *sum = random_floats(n + 1, 1), *old_sum = copy_of(sum, n + 1);
        add_in_place(x.x + offset, y.x, n);
        to_fp32(wide, y.x, n);
        from_fp32(narrowed.x, sum, n);
        add_in_place_fp32(sum, wide, n);
        for (size_t i = 0; i < n; i++) {
            double want = x.d[offset + i] + y.d[i];
            expect_near("add_in_place", (double)to_float(x.x[offset + i]), want, 1.001 * ROUNDING * fabs(want));
            assert_true(wide[i] == to_float(y.x[i]) && sum[i] == old_sum[i] + wide[i]);
            assert_true(to_float(narrowed.x[i]) == to_float(to_floatX(old_sum[i])));
        }
        if (offset) assert_memory_equal(x.x, &before, sizeof before);
        assert_memory_equal(y.x, added, n * sizeof(floatX)); // what is added stays
        assert_true(isnan(wide[n]) && sum[n] == old_sum[n] && isnan(to_float(narrowed.x[n])));
    }
}
TEST(clipping_scales_down_to_the_norm_and_skips_what_is_not_finite) {
    static const struct { double grad_square; float max_norm, loss_scale; double norm, scale; } cases[] = {
        { 25, 1, 1, 5, 1 / (5 + 1e-6) },
        { 2, 1, 1, M_SQRT2, 1 / (M_SQRT2 + 1e-6) }, // a double, not rounded to fp32
        { 0.25, 1, 1, 0.5, 1 },                     // below the limit: not scaled up
        { 1e6, 0, 1, 1000, 1 },                     // no limit
        { 0, 1, 1, 0, 1 },
        { 25.0 * 1024 * 1024, 1, 1024, 5, 1 / (5 + 1e-6) / 1024 },
        { 1024 * 1024, 0, 1024, 1, 1.0 / 1024 },
        { INFINITY, 1, 1, INFINITY, 0 }, { INFINITY, 0, 1, INFINITY, 0 },
        { NAN, 1, 1, NAN, 0 }, { NAN, 0, 1, NAN, 0 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        StepStats s = { .grad_square = cases[i].grad_square };
        clip_gradients(&s, cases[i].max_norm, cases[i].loss_scale);
        if (!(s.grad_norm == cases[i].norm || (isnan(s.grad_norm) && isnan(cases[i].norm))) || s.grad_scale != (float)cases[i].scale)
            fail_msg("case %zu: norm %.17g, scale %.9g", i, s.grad_norm, (double)s.grad_scale);
    }
}

// ---- AdamW ----
typedef struct { size_t n; floatX *params, *grads; float *master, *m, *v; } Optimizer; // weights of fp32 are their own master
static Optimizer random_optimizer(size_t n) {
    Optimizer o = { n, random_tensor(n, 0, 0.02).x, random_tensor(n, 0, 1e-2).x, NULL, floats(n), floats(n) };
    if (NEEDS_MASTER) to_fp32(o.master = floats(n), o.params, n);
    return o;
}
static void update(AdamW a, Optimizer o, float grad_scale, size_t n, size_t no_decay) {
    adamw_update(a, o.params, o.master, o.m, o.v, o.grads, &grad_scale, n, no_decay, NULL);
}
static const AdamW adamw_example = { 1e-3, 0.9, 0.95, 1e-8, 0.1, 1 };

// Steps whose learning rate rises to the example's and whose gradients are clipped. They arrive multiplied by the loss scale, which
// must not change the norm and the update. The settings must be those that make_reference.py gave to PyTorch; its file has them
// rounded to fp32.
static void check_adamw(int n, int steps, AdamW a, size_t no_decay, float max_norm, float loss_scale) {
    start(1, 1, 1, 1, 128);
    const double settings[] = { (double)no_decay, (double)max_norm, a.beta1, a.beta2, a.eps, a.weight_decay }, lr = a.lr;
    const double *their_lrs = pytorchs("lrs", steps), *their_settings = pytorchs("settings", 6);
    Tensor first = input("start", n, 0, 0.02), grads = input("grads", steps * n, 0, 0.1);
    Optimizer o = random_optimizer(n);
    float *weights = NEEDS_MASTER ? o.master : (float*)(void*)first.x, *norms = floats(steps), *path = floats(steps * n);
    double *p = copy_of(first.d, n), *m = doubles(n), *v = doubles(n), *want_norms = doubles(steps), *want_path = doubles(steps * n);
    o.params = first.x;
    if (NEEDS_MASTER) to_fp32(o.master, first.x, n);
    for (int k = 0; k < 6 && their_settings; k++) assert_true((double)(float)settings[k] == their_settings[k]);
    for (int step = 0; step < steps; step++) {
        const double* grad = grads.d + step * n;
        StepStats stats = { 0 };
        a.t = step + 1;
        a.lr = lr * a.t / steps;
        assert_true(!their_lrs || (double)(float)a.lr == their_lrs[step]);
        for (int i = 0; i < n; i++) o.grads[i] = to_floatX(loss_scale * (float)grad[i]);
        add_sum_squares(&stats.grad_square, o.grads, n);
        clip_gradients(&stats, max_norm, loss_scale);
        update(a, o, stats.grad_scale, n, no_decay);
        norms[step] = (float)stats.grad_norm;
        want_norms[step] = sqrt(dot(grad, grad, n));
        memcpy(path + step*n, weights, n * sizeof(float));
        for (int i = 0; i < n; i++) {
            double g = grad[i] * (double)loss_scale * (double)stats.grad_scale;
            if ((size_t)i >= no_decay) p[i] *= 1 - a.lr * a.weight_decay;
            m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
            v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
            p[i] -= a.lr * (m[i] / (1 - pow(a.beta1, a.t))) / (sqrt(v[i] / (1 - pow(a.beta2, a.t))) + a.eps);
            want_path[step*n + i] = p[i];
        }
    }
    expect_floats("clipped AdamW's norms", norms, want_norms, steps, 2);
    expect_floats("clipped AdamW's params", path, want_path, steps * n, 8);
    expect_floats("clipped AdamW's m", o.m, m, n, 8);
    expect_floats("clipped AdamW's v", o.v, v, n, 8);
    for (int i = 0; i < n && NEEDS_MASTER; i++) assert_true(to_float(o.params[i]) == to_float(to_floatX(o.master[i])));
}
TEST(adamw_follows_its_definition) {
    const AdamW nearly_1 = { 1e-3, 0.9999999, 0.9999999, 1e-8, 0.1, 0 }; // in fp32 this is 0.99999988, and 1 - beta a fifth more
    check_adamw(1003, 5, adamw_example, 301, 1, 1);
    check_adamw(1003, 5, nearly_1, 301, 1, 1);
}
TEST(clipped_adamw_agrees_with_pytorch) {
    const AdamW theirs = { 1e-2, 0.9, 0.95, 1e-5, 0.3, 0 };
    with_pytorchs("adamw.clipped", check_adamw(301, 7, theirs, 100, 1, 1));
    with_pytorchs("adamw.clipped", check_adamw(301, 7, theirs, 100, 1, 8));
}
static void expect_same_optimizer(Optimizer a, Optimizer b) {
    assert_memory_equal(a.params, b.params, a.n * sizeof(floatX));
    assert_memory_equal(a.m, b.m, a.n * sizeof(float));
    assert_memory_equal(a.v, b.v, a.n * sizeof(float));
    if (a.master) assert_memory_equal(a.master, b.master, a.n * sizeof(float));
}
// The same every time: master weights that are not numbers of floatX, moments that are not 0.
static Optimizer optimizer_under_way(size_t n) {
    next_stream = 0;
    Optimizer o = random_optimizer(n);
    for (size_t i = 0; i < n; i++) {
        o.m[i] = 1e-3f * random_normal(8, 1, i);
        o.v[i] = 1e-5f * random_uniform(8, 2, i);
        if (NEEDS_MASTER) o.master[i] *= 1 + 1e-3f * random_normal(8, 3, i);
    }
    return o;
}
TEST(adamw_of_a_range_equals_adamw_of_its_pieces_to_the_bit) {
    const size_t n = 20011, cuts[6] = { 1, 3, 17, 8191, 8193, 20010 }, no_decays[3] = { 0, 1001, 20011 };
    for (int d = 0; d < 3; d++) {
        Optimizer whole = optimizer_under_way(n);
        update(adamw_example, whole, 1, n, no_decays[d]);
        for (int c = 0; c < 6; c++) {
            size_t k = cuts[c];
            Optimizer o = optimizer_under_way(n);
            Optimizer rest = { n - k, o.params + k, o.grads + k, o.master ? o.master + k : NULL, o.m + k, o.v + k };
            update(adamw_example, o, 1, k, size_min(k, no_decays[d]));
            update(adamw_example, rest, 1, n - k, no_decays[d] > k ? no_decays[d] - k : 0);
            expect_same_optimizer(o, whole);
        }
    }
}
// Three updates of n elements, the second of which is skipped, by the form that is the definition and by every other form.
enum { ADAMW_FP32, ADAMW_WITHOUT_PARAMS, HOST_ADAMW_OF_FP32, HOST_ADAMW_OF_FLOATX, FORMS };
static void check_form_of_adamw(int form, size_t n, size_t no_decay) {
    Optimizer o = optimizer_under_way(n), other = optimizer_under_way(n);
    float *grads = floats(n), *weights = NEEDS_MASTER ? other.master : (float*)(void*)other.params;
    floatX* params = NEEDS_MASTER ? other.params : NULL;
    AdamW a = adamw_example;
    to_fp32(grads, o.grads, n);
    for (a.t = 1; a.t <= 3; a.t++) {
        float scale = a.t == 2 ? 0 : 0.7f;
        update(a, o, scale, n, no_decay);
        if (form == ADAMW_FP32) adamw_update_fp32(a, weights, other.m, other.v, grads, &scale, n, no_decay);
        else if (form == ADAMW_WITHOUT_PARAMS) adamw_update(a, NULL, weights, other.m, other.v, o.grads, &scale, n, no_decay, NULL);
        else host_adamw_update(a, params, weights, other.m, other.v, form == HOST_ADAMW_OF_FP32 ? (void*)grads : (void*)o.grads,
                               form == HOST_ADAMW_OF_FP32 ? DTYPE_F32 : FLOATX_DTYPE, scale, n, no_decay, NULL);
    }
    if (NEEDS_MASTER && form <= ADAMW_WITHOUT_PARAMS) memcpy(other.params, o.params, n * sizeof(floatX)); // not updated by these
    expect_same_optimizer(other, o);
}
TEST(every_form_of_adamw_gives_the_same_master_weights_to_the_bit) {
    const size_t sizes[] = { 0, 1, 8191, 8193, 16389 }; // the host takes slices of 8192
    for (int k = 0; k < 5; k++) {
        size_t n = sizes[k], no_decays[] = { 0, n / 3, 8191, 8193, n + 1 }; // a unit's may go on after this piece
        for (int d = 0; d < 5; d++) for (int form = 0; form < FORMS; form++) {
            check_form_of_adamw(form, n, no_decays[d]);
            free_arrays();
        }
    }
}
TEST(adamw_changes_nothing_when_the_step_is_skipped) {
    Optimizer before = optimizer_under_way(100), o = optimizer_under_way(100);
    o.grads[7] = to_floatX(NAN);
    update(adamw_example, o, 0, 100, 10);
    expect_same_optimizer(o, before);
}
// The sum equals that of a separate pass, also after a skipped step, and summing does not change the update.
TEST(adamw_adds_the_squares_of_the_params_to_the_bit) {
    const size_t sizes[] = { 0, 1, 8193, 16390, 3 * 16384 };
    for (int k = 0; k < 5; k++) {
        for (float scale = 0; scale <= 1; scale += 1) {
            size_t n = sizes[k];
            Optimizer o = optimizer_under_way(n), other = optimizer_under_way(n);
            double want = 3, square = 3;
            update(adamw_example, other, scale, n, n / 3);
            add_sum_squares(&want, other.params, n);
            adamw_update(adamw_example, o.params, o.master, o.m, o.v, o.grads, &scale, n, n / 3, &square);
            expect_same_optimizer(o, other);
            if (square != want) fail_msg("n = %zu, scale %g: %.17g is not %.17g", n, (double)scale, square, want);
            free_arrays();
        }
    }
}

// ---- elementwise functions ----
// The distance from got to want in units of the last place of a float near want.
static double ulps(float got, double want) {
    if (isnan(got) || isnan(want)) return isnan(got) && isnan(want) ? 0 : INFINITY;
    if ((double)got == want || (isinf(got) && (double)got * want > 0 && fabs(want) >= 0x1.ffffffp127)) return 0;
    int exponent;
    frexp(want, &exponent);
    return fabs((double)got - want) / ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}
static void expect_accurate_exp(float x) {
    if (!(ulps(exp_f32(x), exp((double)x)) <= 1.5)) fail_msg("exp(%.9g) = %.9g, more than 1.5 ulp off", (double)x, (double)exp_f32(x));
}
static double gelu_objective(const void* x) { return gelu_definition(*(const double*)x); }
TEST(exp_and_gelu_are_accurate_over_the_whole_float_range) {
    for (uint64_t u = 0; u <= 0xffffffffu; u += 9973) {
        uint32_t bits = (uint32_t)u;
        float x;
        memcpy(&x, &bits, sizeof x);
        expect_accurate_exp(x);
        if (!(fabsf(x) < 1e18f)) continue; // beyond, x^2 overflows, as it does in PyTorch
        // in the far left tail the definition's 1 + tanh cancels, so errors count against the size of x itself
        double y = gelu_definition((double)x), slope = gelu_derivative_definition((double)x);
        expect_near("gelu", (double)gelu_f32(x), y, 4 * F32_ROUNDING * fabs(y) + 1e-7 * fmin(1, fabs((double)x)) + 1e-44);
        expect_near("gelu's derivative", (double)gelu_derivative_f32(x), slope, 4 * F32_ROUNDING * fabs(slope) + 4e-7);
    }
    for (double x = -6; x < 6; x += 0.3) {
        double slope = *differentiate(gelu_objective, &x, &x, 1);
        expect_near("the derivative's definition", gelu_derivative_definition(x), slope, NOISE);
    }
    const float special[8] = { 0.0f, -0.0f, INFINITY, -INFINITY, NAN, 88.72283f, 88.7229f, -103.9f };
    for (int i = 0; i < 8; i++) expect_accurate_exp(special[i]);
    assert_true(exp_f32(0.0f) == 1.0f && exp_f32(-INFINITY) == 0.0f && isinf(exp_f32(89.0f)));
    assert_true(gelu_f32(0.0f) == 0.0f && isinf(gelu_f32(INFINITY)) && isnan(gelu_f32(NAN)) && isnan(gelu_derivative_f32(NAN)));
}
TEST(an_element_does_not_depend_on_its_place_in_the_array) {
    Tensor x = random_tensor(100, 0, 3);
    floatX whole[100], part[100];
    #pragma omp simd
    for (int i = 0; i < 100; i++) whole[i] = to_floatX(gelu_f32(to_float(x.x[i])));
    for (int begin = 0; begin < 100; begin++) {
        for (int i = begin; i < 100; i++) part[i] = to_floatX(gelu_f32(to_float(x.x[i])));
        assert_memory_equal(part + begin, whole + begin, (100 - begin) * sizeof(floatX));
    }
}

// ---- the number of threads ----
// The record of what a step computes, from fixed inputs.
static Record record_of(int threads) {
    Record r = { .count = 0 };
    double square = 0;
    free_arrays();
    omp_set_num_threads(threads);
    record = &r;
    for (int parts = 1; parts <= 2; parts++) {
        check_encoder(3, 70, 48, 50, 64, parts);
        check_classifier(210, 50, 64, parts, 0);
    }
    check_layernorm(210, 48, 0);
    check_linear(210, 48, 192);
    check_attention(3, 70, 48, 4, 1, 16);
    check_attention_in_parts(3, 70, 2, 48, 4, 0, 16);
    Optimizer o = random_optimizer(20011);
    update(adamw_example, o, 1, o.n, 100);
    expect_tensor("AdamW's params", o.params, NULL, o.n, 0);
    add_sum_squares(&square, random_tensor(100003, 0, 1).x, 100003);
    expect_results("a sum of squares", &square, NULL, 1, 0, as_float);
    record = NULL;
    return r;
}
// Matrix products are oneDNN's, which promises equal bits only for an equal number of threads. A bias's gradient is not one.
static void expect_same_record(Record a, Record b, const char* when, bool products) {
    for (int i = 0; i < a.count; i++) {
        const char* what = a.results[i].what;
        bool is_product = strncmp(what, "matmul", 6) == 0 && strstr(what, " db") == NULL;
        if ((products || !is_product) && a.results[i].hash != b.results[i].hash) fail_msg("%s: the bits differ %s", what, when);
    }
}
TEST(results_are_the_same_from_run_to_run_and_for_any_number_of_threads) {
    int threads = omp_get_max_threads();
    Record one = record_of(1);
    assert_true(one.count > 20);
    for (int n = 1; n <= 3; n++) {
        Record first = record_of(n), second = record_of(n);
        expect_same_record(first, second, "from run to run", true);
        expect_same_record(first, one, "with the number of threads", false);
    }
    omp_set_num_threads(threads);
}
