/*
bench_layers.cu - how fast each layer is on this GPU at GPT-2 124M's shapes, and against what this GPU can do.

    build/cuda-bf16/bench_layers [B T [repetitions]]      (16 1024 20 if not given)

Prints a Markdown table. Each call is timed alone, by events on the stream, and its median counts; arrays are larger than a
GPU's cache at the default sizes, and inputs are random. What a layer is compared with is measured here as well: the rate of a
kernel that copies, and the rate of a large matrix product of the same precision. Products and attention count the FLOPs that
they must do (attention: the causal half, without what backward computes again), everything else the bytes that it must
move once. A step is the sum of each layer's median times how often a step calls it.
*/
#include "../../llmc/layers.h"
#include "../../llmc/gpt2.h"
#include "../../llmc/rng.h"
#include <algorithm>
#include <vector>

static int repetitions = 20;
static cudaEvent_t begin_event, end_event;

// The median in seconds over some calls, after two that warm up.
template <typename F> static double median_seconds(F call) {
    std::vector<float> ms((size_t)repetitions);
    for (int i = 0; i < 2; i++) call();
    for (float& m : ms) {
        cuda_check(cudaEventRecord(begin_event, compute_stream), "timing");
        call();
        cuda_check(cudaEventRecord(end_event, compute_stream), "timing");
        cuda_check(cudaEventSynchronize(end_event), "timing");
        cuda_check(cudaEventElapsedTime(&m, begin_event, end_event), "timing");
    }
    std::sort(ms.begin(), ms.end());
    return 1e-3 * ms[ms.size() / 2];
}

// ---- arrays: random, so that no unit has less to do than in training ----
__global__ void fill_kernel(floatX* x, size_t n, float std, uint32_t seed) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t h = (uint32_t)i * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    if (i < n) x[i] = narrow<floatX>(std * 3.4641016f * ((float)(h >> 8) / 16777216.0f - 0.5f)); // uniform, of this deviation
}
static floatX* array(size_t n, float std = 1) {
    static uint32_t seed;
    floatX* x = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS);
    fill_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, compute_stream>>>(x, n, std, ++seed * 7919);
    check_launch("filling an array");
    return x;
}
static float* floats(size_t n) { return (float*)device_alloc(n * sizeof(float), MEMORY_ACTIVATIONS); }
static int* random_tokens(int n, int V) {
    std::vector<int> host((size_t)n);
    for (int i = 0; i < n; i++) host[(size_t)i] = (int)(random_uniform(1, 3, (uint64_t)i) * (float)V);
    int* tokens = (int*)device_alloc((size_t)n * sizeof(int), MEMORY_ACTIVATIONS);
    host_to_device(tokens, host.data(), (size_t)n * sizeof(int));
    device_synchronize(); // before `host` goes
    return tokens;
}

// ---- what this GPU can do ----
__global__ void copy_kernel(int4* dst, const int4* src, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) dst[i] = src[i];
}
// Bytes per second, read and written.
static double copy_rate(size_t bytes) {
    size_t n = bytes / sizeof(int4);
    int4 *src = (int4*)array(bytes / sizeof(floatX)), *dst = (int4*)array(bytes / sizeof(floatX));
    double seconds = median_seconds([&] {
        copy_kernel<<<(unsigned)size_min(ceil_div(n, 256), 1 << 16), 256, 0, compute_stream>>>(dst, src, n);
    });
    device_free(src); device_free(dst);
    return 2.0 * (double)bytes / seconds;
}
// FLOP/s of an n x n x n product.
static double product_rate(int n) {
    LayerShapes s = { n, 1, n, n / 64, n };
    layers_choose(ATTENTION_OWN, false);
    layers_init(s);
    size_t nn = (size_t)n * (size_t)n;
    floatX *a = array(nn), *b = array(nn), *c = array(nn);
    double seconds = median_seconds([&] { matmul_forward(c, a, b, NULL, n, n, n); });
    device_free(a); device_free(b); device_free(c);
    layers_free();
    return 2.0 * (double)nn * n / seconds;
}

// ---- the table ----
static double flop_rate, byte_rate, step_seconds;
// One row: a layer that a step calls `calls` times, with the FLOPs or the bytes of one call (the other is 0).
template <typename F> static void row(const char* name, double calls, double flops, double bytes, F call) {
    double seconds = median_seconds(call), rate = (flops > 0 ? flops : bytes) / seconds, peak = flops > 0 ? flop_rate : byte_rate;
    step_seconds += calls * seconds;
    printf("| %s | %.0f | %.3f | %.3f | %.0f %s | %.0f %% |\n", name, calls, 1e3 * seconds, 1e3 * calls * seconds,
           flops > 0 ? 1e-12 * rate : 1e-9 * rate, flops > 0 ? "TFLOP/s" : "GB/s", 100 * rate / peak);
    fflush(stdout);
}

static void bench_embeddings(GPT2Config g, int B, int T) {
    int C = g.C, N = B * T;
    double E = (double)N * C * sizeof(floatX);
    int* tokens = random_tokens(N, g.V);
    floatX *wte = array((size_t)g.Vp * C), *wpe = array((size_t)T * C), *x = array((size_t)N * C);
    row("encoder forward", 1, 0, 3 * E, [&] { encoder_forward(x, tokens, wte, wpe, B, T, C); });
    row("encoder backward", 1, 0, 4 * E, [&] { encoder_backward(wte, wpe, x, tokens, B, T, C, GRAD_SET); });
    device_free(tokens); device_free(wte); device_free(wpe); device_free(x);
}
static void bench_layernorm(GPT2Config g, int N) {
    int C = g.C;
    double E = (double)N * C * sizeof(floatX), calls = 2 * g.L + 1;
    size_t n = (size_t)N * C;
    floatX *x1 = array(n), *x2 = array(n), *res = array(n), *out = array(n);
    floatX *w = array(C), *b = array(C), *dw = array(C), *db = array(C);
    float *mean = floats(N), *rstd = floats(N);
    row("residual + layernorm forward", calls, 0, 4 * E,
        [&] { residual_layernorm_forward(res, out, mean, rstd, x1, x2, w, b, N, C); });
    row("layernorm backward", calls, 0, 4 * E, [&] { layernorm_backward(x1, dw, db, out, res, w, mean, rstd, N, C, GRAD_SET); });
    for (void* p : { x1, x2, res, out, w, b, dw, db }) device_free(p);
    device_free(mean); device_free(rstd);
}
// The three products of a linear layer C -> OC.
static void bench_linear(const char* name, int calls, int N, int C, int OC, bool gelu_after, bool gelu_before) {
    double F = 2.0 * N * C * OC;
    char what[64];
    floatX *inp = array((size_t)N * C), *out = array((size_t)N * OC), *pre = array((size_t)N * size_max(C, OC));
    floatX *w = array((size_t)OC * C, 0.02f), *bias = array(OC), *dw = array((size_t)OC * C), *dbias = array(OC);
    snprintf(what, sizeof what, "%s forward%s", name, gelu_after ? " + gelu" : "");
    row(what, calls, F, 0, [&] {
        if (gelu_after) matmul_gelu_forward(out, pre, inp, w, bias, N, C, OC);
        else matmul_forward(out, inp, w, bias, N, C, OC);
    });
    snprintf(what, sizeof what, "%s dX%s", name, gelu_before ? " + gelu" : "");
    row(what, calls, F, 0, [&] {
        if (gelu_before) matmul_gelu_backward_input(inp, out, w, pre, N, C, OC);
        else matmul_backward_input(inp, out, w, N, C, OC);
    });
    snprintf(what, sizeof what, "%s dW + bias", name);
    row(what, calls, F, 0, [&] { matmul_backward_weight(dw, dbias, out, inp, N, C, OC, GRAD_SET); });
    for (void* p : { inp, out, pre, w, bias, dw, dbias }) device_free(p);
}
static void bench_attention(GPT2Config g, int B, int T) {
    size_t n = (size_t)B * T * g.C;
    double F = 2.0 * (double)n * T; // two products, of which causality leaves half
    floatX *qkv = array(3 * n), *out = array(n), *dout = array(n), *dqkv = array(3 * n);
    float* stats = floats((size_t)B * g.NH * T);
    row("attention forward", g.L, F, 0, [&] { attention_forward(out, stats, qkv, B, T, g.C, g.NH); });
    row("attention backward", g.L, 2 * F, 0, [&] { attention_backward(dqkv, dout, qkv, out, stats, B, T, g.C, g.NH); });
    for (void* p : { qkv, out, dout, dqkv }) device_free(p);
    device_free(stats);
}
// The head: logits of some rows at a time, as a stage file does it.
static void bench_head(GPT2Config g, int N) {
    int rows = classifier_rows(N, g.Vp), C = g.C, Vp = g.Vp;
    double F = 2.0 * rows * C * Vp, calls = (double)N / rows;
    floatX *x = array((size_t)rows * C), *logits = array((size_t)rows * Vp);
    floatX *wte = array((size_t)Vp * C, 0.02f), *dwte = array((size_t)Vp * C);
    float* losses = floats(rows);
    int* targets = random_tokens(rows, g.V);
    row("logits forward", calls, F, 0, [&] { matmul_forward(logits, x, wte, NULL, rows, C, Vp); });
    row("classifier, loss and gradient", calls, 0, 2.0 * rows * Vp * sizeof(floatX),
        [&] { classifier_forward_backward(losses, logits, targets, 1.0f / (float)N, rows, g.V, Vp); });
    row("logits dX", calls, F, 0, [&] { matmul_backward_input(x, logits, wte, rows, C, Vp); });
    row("logits dW", calls, F, 0, [&] { matmul_backward_weight(dwte, NULL, logits, x, rows, C, Vp, GRAD_ADD); });
    for (void* p : { x, wte, dwte, logits }) device_free(p);
    device_free(losses); device_free(targets);
}
static void bench_update(GPT2Config g) {
    size_t n = 0;
    for (int u = 0; u <= g.L; u++) n += unit_elements(g, u);
    AdamW a = { 1e-5f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 };
    floatX *params = array(n), *grads = array(n, 1e-3f);
    float *master = NEEDS_MASTER ? floats(n) : NULL, *m = floats(n), *v = floats(n), one = 1;
    StepStats* stats = (StepStats*)device_alloc(sizeof *stats, MEMORY_ACTIVATIONS);
    host_to_device(&stats->grad_scale, &one, sizeof one);
    row("gradient norm", 1, 0, (double)(n * sizeof(floatX)), [&] { add_sum_squares(&stats->grad_square, grads, n); });
    row("AdamW, all units at once", 1, 0, 28.0 * (double)n,
        [&] { adamw_update(a, params, master, m, v, grads, &stats->grad_scale, n, 0); });
    for (void* p : { params, grads }) device_free(p);
    for (float* p : { master, m, v }) device_free(p);
    device_free(stats);
}

int main(int argc, char** argv) {
    int B = argc > 2 ? atoi(argv[1]) : 16, T = argc > 2 ? atoi(argv[2]) : GPT2_CONTEXT, C, N = B * T;
    if (argc > 3) repetitions = atoi(argv[3]);
    require((argc == 1 || argc == 3 || argc == 4) && B > 0 && T > 0 && T <= GPT2_CONTEXT && repetitions > 0,
            "usage: bench_layers [B T [repetitions]]");
    GPT2Config g;
    gpt2_named_config("gpt2", &g);
    g.V = GPT2_VOCABULARY;
    g.Vp = gpt2_padded_vocabulary(g.V);
    C = g.C;
    device_init(0, 1);
    cuda_check(cudaEventCreate(&begin_event), "timing");
    cuda_check(cudaEventCreate(&end_event), "timing");
    bool large = N >= 4096; // else this is a try of the program itself
    byte_rate = copy_rate(large ? (size_t)1 << 30 : (size_t)1 << 20);
    flop_rate = product_rate(large ? 8192 : 64);
    LayerShapes s = { B, T, C, g.NH, g.Vp };
    layers_choose(ATTENTION_AUTO, false);
    layers_init(s);
    printf("GPT-2 124M, %s, B=%d, T=%d on %s; %s\n", FLOATX_NAME, B, T, device_name(), layers_description());
    printf("peaks measured here: copy %.0f GB/s, product of %d cubed %.1f TFLOP/s\n\n",
           1e-9 * byte_rate, large ? 8192 : 64, 1e-12 * flop_rate);
    printf("| layer | calls a step | ms a call | ms a step | rate | of the peak |\n|---|---|---|---|---|---|\n");
    bench_embeddings(g, B, T);
    bench_layernorm(g, N);
    bench_linear("qkv", g.L, N, C, 3 * C, false, false);
    bench_attention(g, B, T);
    bench_linear("proj", g.L, N, C, C, false, false);
    bench_linear("fc", g.L, N, C, 4 * C, true, false);
    bench_linear("fcproj", g.L, N, 4 * C, C, false, true);
    bench_head(g, N);
    bench_update(g);
    double flops = gpt2_flops_per_token(g, T) * N;
    printf("\nall layers of a step %.2f ms: %.0f tokens/s, %.1f %% of the product's rate; peak_flops %.4g flops_per_token %.4g\n",
           1e3 * step_seconds, N / step_seconds, 100 * flops / step_seconds / flop_rate, flop_rate, gpt2_flops_per_token(g, T));
    layers_free();
    cudaEventDestroy(begin_event);
    cudaEventDestroy(end_event);
    device_shutdown();
    return 0;
}
