/*
test_reference_layers.c - our layers against PyTorch's numbers (test/reference/layers.safetensors).

The inputs there are exact in every precision and PyTorch computed in double, so only our own rounding remains: sums in
fp32, results (and intermediate ones: res, qkv's gradient, ...) stored in floatX. The bound is relative to the largest
element of the tensor: 16 times fp32's roundoff (2^-24), or 2 times floatX's (bf16 2^-8, fp16 2^-11). That gradients are also
added to what is there is test_layers.c's.
*/
#include "../../llmc/save/safetensors.h"
#include "arrays.h"

static const double fp32_bound = 16 * F32_ROUNDING;
static const double floatX_bound = FLOATX_DTYPE == DTYPE_F32 ? 16 * ROUNDING : 2 * ROUNDING;

// ---- one test's tensors: what the file has of a layer ----
typedef struct { float* data; int last_dim; size_t n; } Stored;

static struct { SafeTensors layers; const char* layer; } reference; // layer: "layernorm.odd", before the tensor's own name

static Stored stored(const char* name) {
    char full[64];
    snprintf(full, sizeof full, "%s.%s", reference.layer, name);
    const SafeTensor* t = safetensors_find(&reference.layers, full);
    require_file(reference.layers.source, t != NULL, "has no tensor '%s'", full);
    Stored r = { NULL, 1, 1 };
    for (int i = 0; i < t->rank; i++) r.n *= r.last_dim = (int)t->shape[i];
    r.data = floats(r.n);
    safetensors_read(&reference.layers, t, 0, r.n, r.data, DTYPE_F32);
    return r;
}
static floatX* as_floatX(const char* name) {
    Stored t = stored(name);
    floatX* p = own(t.n, sizeof(floatX));
    from_fp32(p, t.data, t.n);
    for (size_t i = 0; i < t.n; i++) assert_true(to_float(p[i]) == t.data[i]); // the promise of make_reference.py: inputs are exact
    return p;
}
static int* as_int(const char* name) {
    Stored t = stored(name);
    int* p = own(t.n, sizeof(int));
    for (size_t i = 0; i < t.n; i++) p[i] = (int)t.data[i];
    return p;
}
// Memory for n results, filled with NaN: a layer that overwrites must overwrite all of it, and one that reads it fails.
static floatX* results(size_t n) { return unset_tensor(n).x; }

// Numbers must be PyTorch's, within bound * its largest element.
static void check_float(const float* ours, const char* name, double bound) {
    Stored t = stored(name);
    float greatest = 0;
    for (size_t i = 0; i < t.n; i++) greatest = fmaxf(greatest, fabsf(t.data[i]));
    for (size_t i = 0; i < t.n; i++)
        if (!(fabs((double)ours[i] - (double)t.data[i]) <= bound * (double)greatest))
            fail_msg("%s.%s: element %zu is %.9g, PyTorch has %.9g; the bound is %.3g of the largest element, %.9g",
                     reference.layer, name, i, (double)ours[i], (double)t.data[i], bound, (double)greatest);
}
static void check_floatX(const floatX* ours, const char* name) {
    size_t n = stored(name).n;
    float* wide = floats(n);
    to_fp32(wide, ours, n);
    check_float(wide, name, floatX_bound);
}

// The next layer's tensors replace those of the one before.
static void layers_for(const char* layer, int B, int T, int C, int NH, int Vp) {
    LayerShapes s = { B, T, C, NH, Vp, 1 };
    layers_free();
    free_arrays();
    layers_init(s);
    reference.layer = layer;
    if (reference.layers.count > 0) return; // the file is open, until the program ends
    safetensors_open(&reference.layers, "test/reference/layers.safetensors", "make it again with test/reference/make_reference.py");
}

// ---- the layers ----
static void layernorm_agrees(const char* layer, int N, int C) {
    layers_for(layer, N, 1, C, 1, 128);
    floatX *res = results(N * C), *out = results(N * C), *w = as_floatX("w");
    float *mean = unset_floats(N), *rstd = unset_floats(N);
    residual_layernorm_forward(res, out, mean, rstd, as_floatX("inp1"), as_floatX("inp2"), w, as_floatX("b"), N, C);
    check_floatX(res, "res");
    check_floatX(out, "out");
    check_float(mean, "mean", floatX_bound);
    check_float(rstd, "rstd", floatX_bound);

    floatX *dinp = as_floatX("dres"), *dw = results(C), *db = results(C), *dout = as_floatX("dout");
    layernorm_backward(dinp, dw, db, dout, res, w, mean, rstd, N, C, GRAD_SET);
    check_floatX(dinp, "dinp"); // added to dres
    check_floatX(dw, "dw");
    check_floatX(db, "db");
}
TEST(layernorm_agrees_with_pytorch) {
    layernorm_agrees("layernorm.odd", 6, 33);
    layernorm_agrees("layernorm.even", 5, 96);
}

static void matmul_agrees(const char* layer, int N, int C, int OC) {
    layers_for(layer, N, 1, C > OC ? C : OC, 1, 128);
    floatX *inp = as_floatX("inp"), *w = as_floatX("w"), *b = as_floatX("b"), *dout = as_floatX("dout");
    floatX *out = results(N * OC), *gelu = results(N * OC);
    matmul_forward(out, inp, w, b, N, C, OC);
    check_floatX(out, "out");
    matmul_forward(out, inp, w, NULL, N, C, OC);
    check_floatX(out, "out_no_bias");
    matmul_gelu_forward(gelu, out, inp, w, b, N, C, OC);
    check_floatX(out, "out");
    check_floatX(gelu, "out_gelu");

    floatX *dinp = results(N * C), *dw = results(OC * C), *db = results(OC);
    matmul_backward_input(dinp, dout, w, N, C, OC);
    check_floatX(dinp, "dinp");
    matmul_gelu_backward_input(dinp, dout, w, as_floatX("pre"), N, C, OC);
    check_floatX(dinp, "dpre");
    matmul_backward_weight(dw, db, dout, inp, N, C, OC, GRAD_SET);
    check_floatX(dw, "dw");
    check_floatX(db, "db");
}
TEST(matmul_agrees_with_pytorch) {
    matmul_agrees("matmul.odd", 7, 33, 19);
    matmul_agrees("matmul.even", 40, 16, 48);
}

static void attention_agrees(const char* layer, int B, int T, int C, int NH) {
    layers_for(layer, B, T, C, NH, 128);
    floatX *out = results(B * T * C), *dqkv = results(3 * B * T * C), *qkv = as_floatX("qkv");
    float* stats = unset_floats(B * NH * T);
    attention_forward(out, stats, qkv, B, T, C, NH);
    check_floatX(out, "out");
    check_float(stats, "stats", fp32_bound);
    attention_backward(dqkv, as_floatX("dout"), qkv, out, stats, B, T, C, NH);
    check_floatX(dqkv, "dqkv");
}
TEST(attention_agrees_with_pytorch) {
    attention_agrees("attention.short", 3, 7, 20, 4);
    attention_agrees("attention.long", 1, 131, 8, 2);
    attention_agrees("attention.wide", 2, 9, 64, 1);
    attention_agrees("attention.one", 2, 1, 6, 3);
}

// Rows of Vp logits have numbers in their padding that would win every softmax.
static void classifier_agrees(const char* layer, int N, int V, int Vp) {
    layers_for(layer, N, 1, 1, 1, Vp);
    floatX *given = as_floatX("logits"), *logits = results(N * Vp), *dlogits = results(N * V);
    for (int i = 0; i < N * Vp; i++) logits[i] = i % Vp < V ? given[i / Vp * V + i % Vp] : to_floatX(1e4f);
    int* targets = as_int("targets");
    float* losses = unset_floats(N);
    classifier_forward(losses, logits, targets, N, V, Vp);
    check_float(losses, "losses", fp32_bound);
    classifier_forward_backward(losses, logits, targets, stored("dloss").data[0], N, V, Vp);
    check_float(losses, "losses", fp32_bound);
    for (int i = 0; i < N * Vp; i++) {
        if (i % Vp < V) dlogits[i / Vp * V + i % Vp] = logits[i];
        else assert_true(to_float(logits[i]) == 0);
    }
    check_floatX(dlogits, "dlogits");
}
TEST(classifier_agrees_with_pytorch) {
    classifier_agrees("classifier.bytes", 9, 257, 384);
    classifier_agrees("classifier.tiny", 4, 3, 128);
}

TEST(encoder_agrees_with_pytorch) {
    int B = 3, T = 7, C = 13, V = 11;
    layers_for("encoder.odd", B, T, C, 1, V);
    int* tokens = as_int("tokens");
    floatX *out = results(B * T * C), *dwte = as_floatX("dwte_before"), *dwpe = results(T * C), *dout = as_floatX("dout");
    encoder_forward(out, tokens, as_floatX("wte"), as_floatX("wpe"), B, T, C);
    check_floatX(out, "out");
    encoder_backward(dwte, dwpe, dout, tokens, B, T, C, GRAD_SET);
    check_floatX(dwte, "dwte"); // added to dwte_before
    check_floatX(dwpe, "dwpe");
}

// What make_reference.py gave to PyTorch, in double; its file has the numbers rounded to fp32.
static AdamW reference_adamw(Stored settings, Stored lrs, size_t step) {
    AdamW a = { 1e-2 * (double)(step + 1) / (double)lrs.n, 0.9, 0.95, 1e-5, 0.3, (int)step + 1 };
    assert_true((float)a.lr == lrs.data[step]);
    assert_true((float)a.beta1 == settings.data[2] && (float)a.beta2 == settings.data[3]);
    assert_true((float)a.eps == settings.data[4] && (float)a.weight_decay == settings.data[5]);
    return a;
}
// The gradients arrive multiplied by the loss scale, which must not change the norm and the update.
static void adamw_agrees(float loss_scale) {
    layers_for("adamw.clipped", 1, 1, 1, 1, 128);
    Stored start = stored("start"), grads = stored("grads"), lrs = stored("lrs"), settings = stored("settings");
    size_t n = start.n, steps = lrs.n;
    floatX *params = as_floatX("start"), *grad = results(n);
    float *master = NEEDS_MASTER ? start.data : NULL, *weights = NEEDS_MASTER ? master : (float*)(void*)params;
    float *m = floats(n), *v = floats(n), *norms = floats(steps), *path = floats(steps * n);
    for (size_t step = 0; step < steps; step++) {
        StepStats stats = { 0 };
        for (size_t i = 0; i < n; i++) grad[i] = to_floatX(loss_scale * grads.data[step*n + i]);
        add_sum_squares(&stats.grad_square, grad, n);
        clip_gradients(&stats, settings.data[1], loss_scale);
        adamw_update(reference_adamw(settings, lrs, step), params, master, m, v, grad, &stats.grad_scale, n, (size_t)settings.data[0]);
        norms[step] = (float)stats.grad_norm;
        memcpy(path + step*n, weights, n * sizeof(float));
    }
    check_float(norms, "norms", fp32_bound);
    check_float(path, "params", fp32_bound);
    check_float(m, "m", fp32_bound);
    check_float(v, "v", fp32_bound);
}
TEST(clipped_adamw_agrees_with_pytorch) {
    adamw_agrees(1);
    adamw_agrees(8);
}
