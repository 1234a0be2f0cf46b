/*
test_reference_layers.c - our layers against PyTorch's numbers (test/reference/layers.safetensors).

The inputs there are exact in every precision and PyTorch computed in double, so only our own rounding remains: sums in
fp32, results (and intermediate ones: res, qkv's gradient, ...) stored in floatX. The bound is relative to the largest
element of the tensor: 16 times fp32's roundoff (2^-24), or 2 times floatX's (bf16 2^-8, fp16 2^-11).
*/
#include "../../llmc/base/common.h"
#include "../../llmc/device/layers.h"
#include "../../llmc/base/rng.h"
#include "../../llmc/save/safetensors.h"
#include "unit.h"

static const double fp32_bound = 16 * 0x1p-24;
static const double floatX_bound = FLOATX_DTYPE == DTYPE_F32 ? 16 * 0x1p-24 : FLOATX_DTYPE == DTYPE_BF16 ? 2 * 0x1p-8 : 2 * 0x1p-11;

// ---- one test's tensors: views of the file, and device memory that reference_teardown frees ----
typedef struct { float* data; int dim[4]; size_t n; } Tensor; // host, dim 1 where there is none

static struct {
    SafeTensors layers, order;
    const char* layer; // "layernorm.odd": what comes before the tensor's own name in the file
    void* device[64];  // owned
    float* host[64];   // owned
    int num_device, num_host;
} reference;

static Tensor stored(const char* name) {
    char full[64];
    snprintf(full, sizeof full, "%s.%s", reference.layer, name);
    const SafeTensors* file = strcmp(reference.layer, "order") == 0 ? &reference.order : &reference.layers;
    const SafeTensor* t = safetensors_find(file, full);
    require_file(file->source, t != NULL && t->rank <= 4, "has no tensor '%s' of at most 4 dimensions", full);
    Tensor r = { NULL, { 1, 1, 1, 1 }, 1 };
    for (int i = 0; i < t->rank; i++) {
        r.dim[i] = (int)t->shape[i];
        r.n *= t->shape[i];
    }
    require(reference.num_host < 64, "a test uses more than 64 tensors");
    r.data = reference.host[reference.num_host++] = (float*)xcalloc(r.n, sizeof(float));
    safetensors_read(file, t, 0, r.n, r.data, DTYPE_F32);
    return r;
}

static void* device_memory_for_test(size_t bytes) {
    require(reference.num_device < 64, "a test uses more than 64 device buffers");
    return reference.device[reference.num_device++] = device_alloc(bytes, MEMORY_ACTIVATIONS);
}

// Memory for n results, filled with NaN: a layer that overwrites must overwrite all of it, and one that reads it fails.
static floatX* results(size_t n) {
    floatX *p = (floatX*)device_memory_for_test(n * sizeof(floatX)), x = to_floatX(NAN);
    for (size_t i = 0; i < n; i++) host_to_device(p + i, &x, sizeof x);
    return p;
}
static float* float_results(size_t n) {
    float *p = (float*)device_memory_for_test(n * sizeof(float)), x = NAN;
    for (size_t i = 0; i < n; i++) host_to_device(p + i, &x, sizeof x);
    return p;
}

// A stored tensor on the device, as floatX, fp32 or int.
static floatX* as_floatX(Tensor t) {
    floatX* p = results(t.n);
    for (size_t i = 0; i < t.n; i++) {
        floatX x = to_floatX(t.data[i]);
        assert_true(to_float(x) == t.data[i]); // the promise of make_reference.py: inputs are exact
        host_to_device(p + i, &x, sizeof x);
    }
    return p;
}
static int* as_int(Tensor t) {
    int* p = (int*)device_memory_for_test(t.n * sizeof(int));
    for (size_t i = 0; i < t.n; i++) {
        int x = (int)t.data[i];
        host_to_device(p + i, &x, sizeof x);
    }
    return p;
}

// Host numbers (n) must be `factor` times PyTorch's, within bound * its largest element.
static void check_close(const float* ours, const char* name, double factor, double bound) {
    Tensor t = stored(name);
    double largest = 0, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < t.n; i++) largest = fmax(largest, fabs(factor * t.data[i]));
    for (size_t i = 0; i < t.n; i++) {
        double difference = fabs(ours[i] - factor * t.data[i]);
        if (difference <= worst) continue; // false for NaN
        worst = difference;
        at = i;
        if (isnan(difference)) break;
    }
    if (!(worst <= bound * largest))
        fail_msg("%s.%s: element %zu is %.9g, PyTorch has %.9g; the bound is %.3g, the largest element %.9g",
                 reference.layer, name, at, ours[at], factor * t.data[at], bound * largest, largest);
}
// Numbers on the device.
static void check_stored(const void* ours, DType type, const char* name, double factor, double bound) {
    size_t n = stored(name).n;
    void* bits = xcalloc(n, 4);
    float* host = (float*)xcalloc(n, sizeof(float));
    device_to_host(bits, ours, n * dtype_size(type));
    convert_dtype(host, DTYPE_F32, bits, type, n);
    check_close(host, name, factor, bound);
    free(bits); free(host);
}
static void check_floatX(const floatX* ours, const char* name, double factor) { check_stored(ours, FLOATX_DTYPE, name, factor, floatX_bound); }
static void check_float(const float* ours, const char* name, double bound) { check_stored(ours, DTYPE_F32, name, 1, bound); }

static void layers_for(const char* layer, int B, int T, int C, int NH, int Vp) {
    LayerShapes s = { B, T, C, NH, Vp, 1 };
    layers_init(s);
    reference.layer = layer;
}

// The next layer's tensors replace this one's.
static void release(void) {
    layers_free();
    while (reference.num_device) device_free(reference.device[--reference.num_device]);
    while (reference.num_host) free(reference.host[--reference.num_host]);
}

// ---- the layers ----

static void layernorm_agrees(const char* layer, int N, int C) {
    layers_for(layer, N, 1, C, 1, 128);
    floatX *res = results((size_t)N*C), *out = results((size_t)N*C), *w = as_floatX(stored("w"));
    float *mean = float_results((size_t)N), *rstd = float_results((size_t)N);
    residual_layernorm_forward(res, out, mean, rstd, as_floatX(stored("inp1")), as_floatX(stored("inp2")), w, as_floatX(stored("b")), N, C);
    check_floatX(res, "res", 1);
    check_floatX(out, "out", 1);
    check_float(mean, "mean", floatX_bound);
    check_float(rstd, "rstd", floatX_bound);

    floatX *dinp = as_floatX(stored("dres")), *dw = results((size_t)C), *db = results((size_t)C), *dout = as_floatX(stored("dout"));
    layernorm_backward(dinp, dw, db, dout, res, w, mean, rstd, N, C, GRAD_SET);
    check_floatX(dinp, "dinp", 1); // added to dres
    check_floatX(dw, "dw", 1);
    check_floatX(db, "db", 1);
    layernorm_backward(dinp, dw, db, dout, res, w, mean, rstd, N, C, GRAD_ADD);
    check_floatX(dw, "dw", 2);
    check_floatX(db, "db", 2);
    release();
}
TEST(layernorm_agrees_with_pytorch) {
    layernorm_agrees("layernorm.odd", 6, 33);
    layernorm_agrees("layernorm.even", 5, 96);
}

static void matmul_agrees(const char* layer, int N, int C, int OC) {
    layers_for(layer, N, 1, C > OC ? C : OC, 1, 128);
    floatX *inp = as_floatX(stored("inp")), *w = as_floatX(stored("w")), *b = as_floatX(stored("b")), *dout = as_floatX(stored("dout"));
    floatX *out = results((size_t)N*OC), *gelu = results((size_t)N*OC);
    matmul_forward(out, inp, w, b, N, C, OC);
    check_floatX(out, "out", 1);
    matmul_forward(out, inp, w, NULL, N, C, OC);
    check_floatX(out, "out_no_bias", 1);
    matmul_gelu_forward(gelu, out, inp, w, b, N, C, OC);
    check_floatX(out, "out", 1);
    check_floatX(gelu, "out_gelu", 1);

    floatX *dinp = results((size_t)N*C), *dw = results((size_t)OC*C), *db = results((size_t)OC);
    matmul_backward_input(dinp, dout, w, N, C, OC);
    check_floatX(dinp, "dinp", 1);
    matmul_gelu_backward_input(dinp, dout, w, as_floatX(stored("pre")), N, C, OC);
    check_floatX(dinp, "dpre", 1);
    matmul_backward_weight(dw, db, dout, inp, N, C, OC, GRAD_SET);
    check_floatX(dw, "dw", 1);
    check_floatX(db, "db", 1);
    matmul_backward_weight(dw, db, dout, inp, N, C, OC, GRAD_ADD);
    check_floatX(dw, "dw", 2);
    check_floatX(db, "db", 2);
    release();
}
TEST(matmul_agrees_with_pytorch) {
    matmul_agrees("matmul.odd", 7, 33, 19);
    matmul_agrees("matmul.even", 40, 16, 48);
}

static void attention_agrees(const char* layer, int B, int T, int C, int NH) {
    layers_for(layer, B, T, C, NH, 128);
    size_t BTC = (size_t)B*T*C;
    floatX *out = results(BTC), *dqkv = results(3*BTC), *qkv = as_floatX(stored("qkv"));
    float* stats = float_results((size_t)B*NH*T);
    attention_forward(out, stats, qkv, B, T, C, NH);
    check_floatX(out, "out", 1);
    check_float(stats, "stats", fp32_bound);
    attention_backward(dqkv, as_floatX(stored("dout")), qkv, out, stats, B, T, C, NH);
    check_floatX(dqkv, "dqkv", 1);
    release();
}
TEST(attention_agrees_with_pytorch) {
    attention_agrees("attention.short", 3, 7, 20, 4);
    attention_agrees("attention.long", 1, 131, 8, 2);
    attention_agrees("attention.wide", 2, 9, 64, 1);
    attention_agrees("attention.one", 2, 1, 6, 3);
}

// Logits (N,V) of the file into rows of Vp, with numbers in the padding that would win every softmax.
static floatX* padded_logits(int N, int V, int Vp) {
    Tensor t = stored("logits");
    floatX* p = results((size_t)N*Vp);
    for (int i = 0; i < N; i++)
        for (int v = 0; v < Vp; v++) {
            floatX x = to_floatX(v < V ? t.data[i*V + v] : 1e4f);
            host_to_device(p + (size_t)i*Vp + v, &x, sizeof x);
        }
    return p;
}
static void classifier_agrees(const char* layer, int N, int V, int Vp) {
    layers_for(layer, N, 1, 1, 1, Vp);
    floatX* logits = padded_logits(N, V, Vp);
    int* targets = as_int(stored("targets"));
    float* losses = float_results((size_t)N);
    classifier_forward(losses, logits, targets, N, V, Vp);
    check_float(losses, "losses", fp32_bound);
    classifier_forward_backward(losses, logits, targets, stored("dloss").data[0], N, V, Vp);
    check_float(losses, "losses", fp32_bound);

    floatX* dlogits = results((size_t)N*V);
    for (int i = 0; i < N; i++) device_copy(dlogits + (size_t)i*V, logits + (size_t)i*Vp, (size_t)V * sizeof(floatX));
    check_floatX(dlogits, "dlogits", 1);
    floatX* padding = (floatX*)xcalloc((size_t)Vp, sizeof(floatX));
    for (int i = 0; i < N; i++) {
        device_to_host(padding, logits + (size_t)i*Vp, (size_t)Vp * sizeof(floatX));
        for (int v = V; v < Vp; v++) assert_true(to_float(padding[v]) == 0);
    }
    free(padding);
    release();
}
TEST(classifier_agrees_with_pytorch) {
    classifier_agrees("classifier.bytes", 9, 257, 384);
    classifier_agrees("classifier.tiny", 4, 3, 128);
}

TEST(encoder_agrees_with_pytorch) {
    int B = 3, T = 7, C = 13, V = 11;
    layers_for("encoder.odd", B, T, C, 1, V);
    int* tokens = as_int(stored("tokens"));
    floatX *out = results((size_t)B*T*C), *dwte = as_floatX(stored("dwte_before")), *dwpe = results((size_t)T*C), *dout = as_floatX(stored("dout"));
    encoder_forward(out, tokens, as_floatX(stored("wte")), as_floatX(stored("wpe")), B, T, C);
    check_floatX(out, "out", 1);
    encoder_backward(dwte, dwpe, dout, tokens, B, T, C, GRAD_SET);
    check_floatX(dwte, "dwte", 1); // added to dwte_before
    check_floatX(dwpe, "dwpe", 1);
    encoder_backward(dwte, dwpe, dout, tokens, B, T, C, GRAD_ADD);
    check_floatX(dwpe, "dwpe", 2);
    release();
}

// What make_reference.py gave to PyTorch, in double; its file has the numbers rounded to fp32.
static AdamW reference_adamw(Tensor settings, Tensor lrs, size_t step) {
    AdamW a = { 1e-2 * (double)(step + 1) / (double)lrs.n, 0.9, 0.95, 1e-5, 0.3, (int)step + 1 };
    assert_true((float)a.lr == lrs.data[step]);
    assert_true((float)a.beta1 == settings.data[2] && (float)a.beta2 == settings.data[3]);
    assert_true((float)a.eps == settings.data[4] && (float)a.weight_decay == settings.data[5]);
    return a;
}

// The gradients arrive multiplied by the loss scale, which must not change the norm and the update.
static void adamw_agrees(float loss_scale) {
    layers_for("adamw.clipped", 1, 1, 1, 1, 128);
    Tensor start = stored("start"), grads = stored("grads"), lrs = stored("lrs"), settings = stored("settings");
    size_t n = start.n, steps = lrs.n;
    floatX *params = as_floatX(start), *grad = results(n);
    float *m = (float*)device_memory_for_test(n * sizeof(float)), *v = (float*)device_memory_for_test(n * sizeof(float));
    float *master = NULL, *norms = (float*)xcalloc(steps, sizeof(float)), *path = (float*)xcalloc(steps * n, sizeof(float));
    if (NEEDS_MASTER) {
        master = (float*)device_memory_for_test(n * sizeof(float));
        host_to_device(master, start.data, n * sizeof(float));
    }
    StepStats* stats = (StepStats*)device_memory_for_test(sizeof(StepStats));
    for (size_t step = 0; step < steps; step++) {
        for (size_t i = 0; i < n; i++) {
            floatX x = to_floatX(loss_scale * grads.data[step*n + i]);
            host_to_device(grad + i, &x, sizeof x);
        }
        device_zero(stats, sizeof *stats);
        add_sum_squares(&stats->grad_square, grad, n);
        clip_gradients(stats, settings.data[1], loss_scale);
        adamw_update(reference_adamw(settings, lrs, step), params, master, m, v, grad, &stats->grad_scale, n,
                     (size_t)settings.data[0]);
        StepStats found;
        device_to_host(&found, stats, sizeof found);
        norms[step] = (float)found.grad_norm;
        device_to_host(path + step*n, NEEDS_MASTER ? (void*)master : (void*)params, n * sizeof(float));
    }
    check_close(norms, "norms", 1, fp32_bound);
    check_close(path, "params", 1, fp32_bound);
    check_float(m, "m", fp32_bound);
    check_float(v, "v", fp32_bound);
    free(norms); free(path);
    release();
}
TEST(clipped_adamw_agrees_with_pytorch) {
    adamw_agrees(1);
    adamw_agrees(8);
}

// The reference run's batches, as make_reference.py computed them with its own version of rng.h.
TEST(order_of_the_data_agrees_with_the_reference) {
    layers_for("order", 1, 1, 1, 1, 128);
    Tensor order = stored("sequences"), settings = stored("settings"); // (steps,batch); seed, sequences, batches in an epoch
    uint64_t sequences = (uint64_t)settings.data[1], batches = (uint64_t)settings.data[2], batch = (uint64_t)order.dim[1];
    for (uint64_t i = 0; i < order.n; i++) {
        uint64_t epoch = i / (batches * batch), position = i % (batches * batch);
        uint64_t ours = random_permute((uint64_t)settings.data[0], STREAM_DATA + epoch, position, sequences);
        assert_int_equal(ours, (uint64_t)order.data[i]);
    }
    assert_true(order.n > batches * batch); // the second epoch is in it
    release();
}

void before_all(void) {
    const char* remedy = "make it again with test/reference/make_reference.py";
    device_init(0, 1);
    safetensors_open(&reference.layers, "test/reference/layers.safetensors", remedy);
    safetensors_open(&reference.order, "test/reference/order.safetensors", remedy);
}
void after_all(void) {
    safetensors_close(&reference.layers);
    safetensors_close(&reference.order);
    device_shutdown();
}
