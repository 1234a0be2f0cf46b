/*
bench_layers.cu - the roofline of a training step: what each operation must compute and move, the minimum time for that on
this GPU, and the measured time.

    bench_layers                              GPT-2 124M, 16 sequences of 1024 tokens; --help lists the options
    bench_layers --tflops 989 --gbs 3350      no GPU is needed: only what follows from shapes, and floors at these rates
    bench_layers --peaks                      only what this GPU can do, in a line for experiments/bench_gpu.py

Prints a Markdown table. FLOPs are those of matrix products and attention (its causal half, without what backward computes
again). These run on tensor cores. All other arithmetic is a few operations per element, which memory hides on every GPU. Bytes
are those of inputs and outputs, each counted once: they must move, whatever is kept on the chip. The floor is the longer of the
two times, at rates that are also measured here: that of a large matrix product of the same precision, and that of a kernel that
copies. An operation with fewer FLOPs per byte than the ratio of the two rates waits for memory, however it is written.

Each call is timed alone, by events on the stream, and the median counts. At the usual sizes arrays are larger than a GPU's
cache. Inputs are random. A step is the sum over operations of the median times how often a step calls it.

At the end it times a whole step as train_gpt2_single issues it: how long the host takes to issue it while the GPU is held up,
and how long the GPU takes. Then it times the same step as a CUDA graph, captured once and issued by one call: the difference is
the gain from graphs. It checks that this is the same step; if not, the status is 1.
*/
// The program itself: the step that is issued is its own.
#define main train_gpt2_single_main
#include "../../../train_gpt2_single.cu"
#undef main
#include "../../../llmc/device/checksum.h"
#include "../others.h"
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

static bool counting; // --tflops: nothing is allocated or run
static int repetitions;
static cudaEvent_t begin_event, end_event;

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}
// Seconds on the GPU, from before the call's first work to after its last.
template <typename F> static double gpu_seconds(F call) {
    float ms;
    cuda_check(cudaEventRecord(begin_event, compute_stream), "timing");
    call();
    cuda_check(cudaEventRecord(end_event, compute_stream), "timing");
    cuda_check(cudaEventSynchronize(end_event), "timing");
    cuda_check(cudaEventElapsedTime(&ms, begin_event, end_event), "timing");
    return 1e-3 * ms;
}
// The median over some calls, after two that warm up.
template <typename F> static double median_seconds(F call) {
    std::vector<double> seconds;
    for (int i = -2; i < repetitions; i++) {
        double s = gpu_seconds(call);
        if (i >= 0) seconds.push_back(s);
    }
    return median(seconds);
}

// ---- arrays on the device, freed at the end of their scope; NULL while counting ----
template <typename T> struct Array { // (n)
    T* x = NULL;
    explicit Array(size_t n) { if (n > 0 && !counting) x = (T*)device_alloc(n * sizeof(T), MEMORY_ACTIVATIONS); }
    Array(const Array&) = delete;
    ~Array() { device_free(x); }
    operator T*() const { return x; }
};
// Uniform, of this deviation: zeros would give some units less to do than in training.
struct Random : Array<floatX> {
    explicit Random(size_t n, float std = 1) : Array(n) {
        static uint32_t seed;
        if (!counting) for_pieces(n, true, RandomNumbers { x, std * 1.7320508f, ++seed * 7919 }, "filling an array");
    }
};
static std::vector<int> random_tokens(size_t n, int V) {
    std::vector<int> tokens(n);
    for (size_t i = 0; i < n; i++) tokens[i] = (int)(random_uniform(1, 3, i) * (float)V);
    return tokens;
}
struct Tokens : Array<int> {
    Tokens(size_t n, int V) : Array(n) {
        if (counting) return;
        std::vector<int> host = random_tokens(n, V);
        host_to_device(x, host.data(), n * sizeof(int));
        device_synchronize(); // before `host` goes
    }
};

// ---- what this GPU can do ----
__global__ void copy_kernel(int4* dst, const int4* src, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) dst[i] = src[i];
}
// Bytes per second, read and written.
static double copy_rate(size_t bytes) {
    size_t n = bytes / sizeof(int4);
    Random src(bytes / sizeof(floatX)), dst(bytes / sizeof(floatX));
    double seconds = median_seconds([&] {
        copy_kernel<<<(unsigned)size_min(ceil_div(n, 256), 1 << 16), 256, 0, compute_stream>>>((int4*)dst.x, (int4*)src.x, n);
    });
    return 2.0 * (double)bytes / seconds;
}
// FLOP/s of an n x n x n product.
static double product_rate(int n) {
    LayerShapes s = layer_shapes(n, 1, n, n / 64, n, 1);
    layers_choose(ATTENTION_OWN, false);
    layers_init(s);
    cuda_matmul.tries = true;
    size_t nn = (size_t)n * (size_t)n;
    Random a(nn), b(nn), c(nn);
    double seconds = median_seconds([&] { matmul_forward(c, a, b, NULL, n, n, n); });
    layers_free();
    return 2.0 * (double)nn * n / seconds;
}

// ---- the table ----
static double flop_rate, byte_rate; // of the floors
static int again;                   // how often a step does most of a block's forward pass: 1, with recomputation 2
// An operation: what a step does of it, in `calls` calls.
typedef struct { std::string name; double calls, flops, bytes, floor, seconds; } Operation;
static std::vector<Operation> operations;

// One row, from the FLOPs and bytes of one call.
template <typename F> static void row(const std::string& name, double calls, double flops, double bytes, F call) {
    double floor = fmax(flops / flop_rate, bytes / byte_rate);
    double seconds = counting ? 0 : median_seconds(call);
    operations.push_back({ name, calls, calls * flops, calls * bytes, calls * floor, calls * seconds });
}
static Operation sum_of(const std::vector<Operation>& of) {
    Operation sum = { "sum", 0, 0, 0, 0, 0 };
    for (const Operation& o : of) {
        sum.calls += o.calls; sum.flops += o.flops; sum.bytes += o.bytes; sum.floor += o.floor; sum.seconds += o.seconds;
    }
    return sum;
}
static void print_operation(const Operation& o, const Operation& sum) {
    char intensity[32] = "-";
    if (o.flops > 0) snprintf(intensity, sizeof intensity, "%.0f", o.flops / o.bytes);
    const char* bound = o.name == sum.name ? "" : o.flops / flop_rate > o.bytes / byte_rate ? "compute" : "memory";
    // the head's last call may take fewer rows than the others
    printf("| %s | %.0f | %.1f | %.2f | %s | %s | %.3f | ", o.name.c_str(), ceil(o.calls), 1e-9 * o.flops, 1e-9 * o.bytes,
           intensity, bound, 1e3 * o.floor);
    if (counting) printf("%.1f %% |\n", 100 * o.floor / sum.floor);
    else printf("%.3f | %.3f | %.0f %% | %.1f %% |\n", 1e3 * o.seconds, 1e3 * (o.seconds - o.floor), 100 * o.floor / o.seconds,
                100 * o.seconds / sum.seconds);
}
static void print_table(void) {
    Operation sum = sum_of(operations);
    printf("| operation | calls | GFLOP | GB | FLOP a byte | bound by | floor, ms | %s |\n|---|---|---|---|---|---|---|%s|\n",
           counting ? "share" : "ms | gap, ms | floor / measured | share", counting ? "---" : "---|---|---|---");
    for (const Operation& o : operations) print_operation(o, sum);
    print_operation(sum, sum);
}

static void bench_embeddings(GPT2Config g, int B, int T) {
    int C = g.C, N = B * T;
    double E = (double)N * C * sizeof(floatX), positions = (double)T * C * sizeof(floatX), tokens_bytes = 4.0 * N;
    Tokens tokens(N, g.V);
    Random wte((size_t)g.Vp * C), wpe((size_t)T * C), x((size_t)N * C);
    row("encoder forward", 1, 0, 2 * E + positions + tokens_bytes, [&] { encoder_forward(x, tokens, wte, wpe, B, T, C); });
    // rows of dwte are read and written once per distinct token; counted as if all tokens were distinct
    row("encoder backward", 1, 0, 3 * E + positions + tokens_bytes,
        [&] { encoder_backward(wte, wpe, x, tokens, B, T, C, GRAD_SET); });
}
static void bench_layernorm(GPT2Config g, int N) {
    int C = g.C;
    double E = (double)N * C * sizeof(floatX), stats = 8.0 * N;
    size_t n = (size_t)N * C;
    Random x1(n), x2(n), res(n), out(n), w(C), b(C), dw(C), db(C);
    Array<float> mean(N), rstd(N);
    row("residual + layernorm forward", 2 * g.L * again + 1, 0, 4 * E + stats,
        [&] { residual_layernorm_forward(res, out, mean, rstd, x1, x2, w, b, N, C); });
    row("layernorm backward", 2 * g.L + 1, 0, 4 * E + stats,
        [&] { layernorm_backward(x1, dw, db, out, res, w, mean, rstd, N, C, GRAD_SET); });
    row("gradient of the residual stream, zeroed", 1, 0, E, [&] { device_zero(x1, n * sizeof(floatX)); });
}
// The three products of a linear layer C -> OC.
typedef enum { PLAIN, GELU_AFTER, GELU_BEFORE } Activation;
static void bench_linear(const std::string& name, int forwards, int backwards, int N, int C, int OC, Activation gelu) {
    double F = 2.0 * N * C * OC, X = sizeof(floatX), weights = X * OC * C, in = X * N * C, out_bytes = X * N * OC;
    Random inp((size_t)N * C), out((size_t)N * OC), pre((size_t)N * size_max(C, OC));
    Random w((size_t)OC * C, 0.02f), bias(OC), dw((size_t)OC * C), dbias(OC);
    bool after = gelu == GELU_AFTER, before = gelu == GELU_BEFORE;
    row(name + " forward" + (after ? " + gelu" : ""), forwards, F, in + weights + (after ? 2 : 1) * out_bytes, [&] {
        if (after) matmul_gelu_forward(out, pre, inp, w, bias, N, C, OC);
        else matmul_forward(out, inp, w, bias, N, C, OC);
    });
    row(name + " dX" + (before ? " + gelu" : ""), backwards, F, out_bytes + weights + (before ? 2 : 1) * in, [&] {
        if (before) matmul_gelu_backward_input(inp, out, w, pre, N, C, OC);
        else matmul_backward_input(inp, out, w, N, C, OC);
    });
    row(name + " dW + bias", backwards, F, out_bytes + in + weights,
        [&] { matmul_backward_weight(dw, dbias, out, inp, N, C, OC, GRAD_SET); });
}
static void bench_attention(GPT2Config g, int B, int T) {
    size_t n = (size_t)B * T * g.C;
    double F = 2.0 * (double)n * T; // two products, of which causality leaves half
    double bytes = (double)(n * sizeof(floatX)), stats_bytes = 4.0 * B * g.NH * T;
    Random qkv(3 * n), out(n), dout(n), dqkv(3 * n);
    Array<float> stats((size_t)B * g.NH * T);
    row("attention forward", g.L * again, F, 4 * bytes + stats_bytes,
        [&] { attention_forward(out, stats, qkv, B, T, g.C, g.NH); });
    row("attention backward", g.L, 2 * F, 8 * bytes + stats_bytes,
        [&] { attention_backward(dqkv, dout, qkv, out, stats, B, T, g.C, g.NH); });
}
// The head: logits of some rows at a time, as a program does it.
static void bench_head(GPT2Config g, int N) {
    int rows = classifier_rows(N, g.Vp), C = g.C, Vp = g.Vp;
    double F = 2.0 * rows * C * Vp, calls = (double)N / rows, X = sizeof(floatX);
    double in = X * rows * C, weights = X * Vp * C, out = X * rows * Vp;
    Random x((size_t)rows * C), logits((size_t)rows * Vp), wte((size_t)Vp * C, 0.02f), dwte((size_t)Vp * C);
    Array<float> losses(rows), sums(rows < N ? (size_t)Vp * C : 1);
    Tokens targets(rows, g.V);
    row("logits forward", calls, F, in + weights + out, [&] { matmul_forward(logits, x, wte, NULL, rows, C, Vp); });
    row("classifier, loss and gradient", calls, 0, 2 * out,
        [&] { classifier_forward_backward(losses, logits, targets, 1.0f / (float)N, rows, g.V, Vp); });
    row("logits dX", calls, F, out + weights + in, [&] { matmul_backward_input(x, logits, wte, rows, C, Vp); });
    // With several chunks, all but the first add to sums in fp32; the final rounding is left out.
    row("logits dW", calls, F, out + in + 2 * weights * (rows < N ? sizeof(float) / X : 1), [&] {
        if (rows < N) matmul_backward_weight_fp32(sums, logits, x, rows, C, Vp, GRAD_ADD);
        else matmul_backward_weight(dwte, NULL, logits, x, rows, C, Vp, GRAD_SET);
    });
}
static void bench_update(GPT2Config g) {
    size_t n = 0;
    for (int u = 0; u < gpt2_num_units(g); u++) n += unit_elements(g, u);
    AdamW a = { 1e-5, 0.9, 0.95, 1e-8, 0.1, 1 };
    Random params(n), grads(n, 1e-3f);
    Array<float> master(NEEDS_MASTER ? n : 0), m(n), v(n);
    Array<StepStats> stats(1);
    float one = 1;
    if (!counting) host_to_device(&stats.x->grad_scale, &one, sizeof one);
    row("gradient norm", 1, 0, (double)(n * sizeof(floatX)), [&] { add_sum_squares(&stats.x->grad_square, grads, n); });
    row("AdamW and parameter norm of all units", 1, 0, 28.0 * (double)n,
        [&] { adamw_update(a, params, master, m, v, grads, &stats.x->grad_scale, n, 0, &stats.x->param_square); });
}

// ---- a whole step, as the program issues it, and as a CUDA graph ----
#define STEP_BLOCKS 12     // the most: a GPU queues about a thousand kernels, then the host waits before it issues more
#define HELD_SECONDS 5.0

// Holds the stream up until `go`, at most HELD_SECONDS: a host that takes longer is waiting for the GPU.
static std::atomic<bool> go, gave_up;
static void CUDART_CB hold(void*) {
    double begin = now_seconds();
    while (!go && !gave_up) gave_up = now_seconds() - begin > HELD_SECONDS;
}
// Returns the seconds that the host took to issue all of `call` while the GPU was held, or -1 if it waited for the GPU.
template <typename F> static double issue_seconds(F call) {
    go = gave_up = false;
    cuda_check(cudaLaunchHostFunc(compute_stream, hold, NULL), "holding the stream");
    double begin = now_seconds();
    call();
    double seconds = now_seconds() - begin;
    go = true;
    device_synchronize();
    return gave_up ? -1 : seconds;
}
// Returns true if the host waited.
template <typename F> static bool print_issue(const char* what, F call) {
    std::vector<double> seconds;
    for (int i = 0; i < 5 && (i == 0 || seconds[0] >= 0); i++) seconds.push_back(issue_seconds(call));
    if (seconds[0] < 0) printf("- %s: the host WAITS for the GPU meanwhile\n", what);
    else printf("- %s: issued in %.3f ms, and the host does not wait for the GPU meanwhile\n", what, 1e3 * median(seconds));
    return seconds[0] < 0;
}

// Returns what `call` asks of the stream, with its current arguments, as a graph that one call launches, as often as needed.
// Nothing of it runs here, and CUDA refuses what cannot be part of a graph: meanwhile this thread may neither wait nor allocate.
template <typename F> static cudaGraphExec_t captured(F call) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cuda_check(cudaStreamBeginCapture(compute_stream, cudaStreamCaptureModeThreadLocal), "capturing a step");
    call();
    cuda_check(cudaStreamEndCapture(compute_stream, &graph), "capturing a step");
    cuda_check(cudaGraphInstantiate(&executable, graph, 0), "making a step's graph ready");
    cuda_check(cudaGraphDestroy(graph), "making a step's graph ready");
    return executable;
}
static void launch(cudaGraphExec_t graph) { cuda_check(cudaGraphLaunch(graph, compute_stream), "launching a step's graph"); }

// The results of a step: its statistics, and a checksum of each array.
typedef struct { StepStats stats; uint64_t grads, m, v; } StepResult;
// Clears the results of earlier steps first, so that they are not taken for those of this step.
template <typename F> static StepResult step_result(GPT2* g, F step) {
    StepResult r;
    size_t n = g->num_params;
    memset(&r, 0, sizeof r);
    device_zero(g->stats, sizeof *g->stats);
    device_zero(g->grads, n * sizeof(floatX));
    for (float* moments : { g->m, g->v }) device_zero(moments, n * sizeof(float));
    step();
    device_to_host(&r.stats, g->stats, sizeof r.stats);
    r.grads = device_checksum(g->grads, sizeof(floatX), n);
    r.m = device_checksum(g->m, sizeof(float), n);
    r.v = device_checksum(g->v, sizeof(float), n);
    return r;
}
// Dies unless a graph of the step leaves the bits that the step leaves. With --deterministic, because without it cuDNN's backward
// attention adds in any order, and the bits of gradients change from step to step.
template <typename F> static void check_graph(GPT2* g, F step) {
    layers_free();
    layers_choose(ATTENTION_AUTO, true);
    layers_init(gpt2_shapes(g));
    StepResult plain = step_result(g, step);
    cudaGraphExec_t graph = captured(step);
    StepResult graphed = step_result(g, [&] { launch(graph); });
    cuda_check(cudaGraphExecDestroy(graph), "freeing a step's graph");
    invariant(memcmp(&plain, &graphed, sizeof plain) == 0, "the graph is not the step, with --deterministic: loss %.9g and %.9g,"
              " gradient norm %.9g and %.9g, gradients %s, moments %s", plain.stats.loss, graphed.stats.loss, plain.stats.grad_norm,
              graphed.stats.grad_norm, plain.grads == graphed.grads ? "the same" : "different",
              plain.m == graphed.m && plain.v == graphed.v ? "the same" : "different");
    printf("The graph is the same step: with --deterministic, loss, norms, gradients and moments have the same bits.\n");
}
// Prints what a graph gains. The two take turns, so that both find the GPU equally warm.
template <typename F> static void bench_graph(F step) {
    cudaGraphExec_t graph = captured(step);
    std::vector<double> plain, graphed;
    for (int i = -2; i < repetitions; i++) {
        double p = gpu_seconds(step), g = gpu_seconds([&] { launch(graph); });
        if (i < 0) continue; // these warm up
        plain.push_back(p);
        graphed.push_back(g);
    }
    print_issue("the same as one CUDA graph", [&] { launch(graph); });
    double gain = 100 * (1 - median(graphed) / median(plain));
    printf("The step takes the GPU %.3f ms, as a graph %.3f ms: a CUDA graph %s %.1f %%.\n", 1e3 * median(plain),
           1e3 * median(graphed), gain < 0 ? "loses" : "gains", fabs(gain));
    cuda_check(cudaGraphExecDestroy(graph), "freeing a step's graph");
}
static void bench_step(GPT2Config c, int B, int T, int recompute) {
    static GPT2 g;
    size_t n = (size_t)B * (size_t)T;
    std::vector<int> tokens = random_tokens(n, c.V);
    c.L = std::min(c.L, STEP_BLOCKS);
    g.config = c;
    g.max_B = B;
    g.seq_len = T;
    g.recompute = recompute;
    g.num_units = gpt2_num_units(c);
    g.logits_rows = classifier_rows(B * T, c.Vp);
    layers_prepare(gpt2_shapes(&g));
    gpt2_init_units(&g);
    gpt2_init(&g);
    param_ranges_set_weights(g.ranges, g.num_ranges, c, 1, NULL, CHECKPOINT_MODEL);
    AdamW adamw = { 0, 0.9, 0.95, 1e-8, 0.1, 1 }; // learning rate 0: the weights stay, so the gradients of all steps are the same
    auto load = [&] { gpt2_load_batch(&g, tokens.data(), tokens.data(), B, T); };
    auto step = [&] { // train_step's lines between the batch and the wait
        device_zero(g.stats, sizeof *g.stats);
        gpt2_forward(&g);
        gpt2_backward(&g, 1.0f / (float)n);
        gpt2_clip(&g, 1, 1);
        gpt2_update(&g, adamw);
    };
    load();
    step(); // the first one loads kernels
    printf("\nA step of train_gpt2_single with %d blocks:\n", c.L);
    bool waits = print_issue("all of its kernels", step);
    print_issue("its batch", load);
    if (waits) printf("It takes the GPU %.3f ms; what waits cannot be a CUDA graph.\n", 1e3 * median_seconds(step));
    else {
        bench_graph(step);
        check_graph(&g, step);
    }
    gpt2_free(&g);
}

// ---- the command line ----
typedef struct {
    GPT2Config config;
    const char* model;
    long long B, T, V, repetitions;
    double tflops, gbs; // 0: measured
    int recompute, only_peaks;
} Arguments;
static Arguments parse(int argc, char** argv) {
    Arguments a = { {}, "gpt2", 16, GPT2_CONTEXT, GPT2_VOCABULARY, 20, 0, 0, 0, 0 };
    OptionTable t = options_table("bench_layers", "the roofline of a training step");
    option_text(&t, "model", &a.model, "NAME", "gpt2, gpt2-medium, gpt2-large, gpt2-xl or dN");
    option_int(&t, "vocab-size", &a.V, 1, 1e6, "tokens of the vocabulary");
    option_int(&t, "batch-size", &a.B, 1, 1e6, "sequences");
    option_int(&t, "seq-len", &a.T, 1, GPT2_CONTEXT, "tokens of each");
    option_int(&t, "repetitions", &a.repetitions, 1, 1e6, "timed calls, of which the median counts");
    option_flag(&t, "recompute", &a.recompute, "blocks are computed again in backward");
    option_float(&t, "tflops", &a.tflops, 0, 1e6, "only count, with floors at this rate and --gbs: needs no GPU");
    option_float(&t, "gbs", &a.gbs, 0, 1e6, "GB/s of memory, with --tflops");
    option_flag(&t, "peaks", &a.only_peaks, "only measure what this GPU can do");
    options_parse(&t, argc, argv);
    require((a.tflops > 0) == (a.gbs > 0), "floors need two rates, --tflops and --gbs");
    require(gpt2_named_config(a.model, &a.config),
            "there is no model '%s'; there are gpt2, gpt2-medium, gpt2-large, gpt2-xl and dN", a.model);
    a.config.max_T = GPT2_CONTEXT;
    a.config.V = (int)a.V;
    a.config.Vp = gpt2_padded_vocabulary(a.config.V);
    return a;
}

static void bench_layers(GPT2Config g, int B, int T) {
    int C = g.C, N = B * T, again_L = g.L * again;
    bench_embeddings(g, B, T);
    bench_layernorm(g, N);
    bench_linear("qkv", again_L, g.L, N, C, 3 * C, PLAIN);
    bench_attention(g, B, T);
    bench_linear("proj", again_L, g.L, N, C, C, PLAIN);
    bench_linear("fc", again_L, g.L, N, C, 4 * C, GELU_AFTER);
    bench_linear("fcproj", g.L, g.L, N, 4 * C, C, GELU_BEFORE);
    bench_head(g, N);
    bench_update(g);
}
#ifdef CUDA_EMULATOR
constexpr size_t COPIED_BYTES = 1 << 20;
constexpr int PRODUCT = 64;
#else
constexpr size_t COPIED_BYTES = 1 << 30;
constexpr int PRODUCT = 8192;
#endif
static void measure_peaks(void) {
    byte_rate = copy_rate(COPIED_BYTES);
    flop_rate = product_rate(PRODUCT);
    printf("peaks: copy %.0f GB/s, product %.1f TFLOP/s, data sheet %.1f TFLOP/s\n", 1e-9 * byte_rate, 1e-12 * flop_rate,
           1e-12 * device_peak_flops());
}
int main(int argc, char** argv) {
    Arguments a = parse(argc, argv);
    GPT2Config g = a.config;
    int B = (int)a.B, T = (int)a.T, N = B * T;
    counting = a.tflops > 0;
    flop_rate = 1e12 * a.tflops;
    byte_rate = 1e9 * a.gbs;
    repetitions = (int)a.repetitions;
    again = a.recompute ? 2 : 1;
    classifier_elements = classifier_elements_cuda(80e9, false); // of a GPU like an H100; layers_choose asks the actual one
    CoreSeconds begin = core_seconds();
    if (!counting) {
        device_init(0, 1);
        cuda_check(cudaEventCreate(&begin_event), "timing");
        cuda_check(cudaEventCreate(&end_event), "timing");
        measure_peaks();
        if (a.only_peaks) return 0;
        LayerShapes s = layer_shapes(B, T, g.C, g.NH, g.Vp, 1);
        layers_choose(ATTENTION_AUTO, false);
        layers_prepare(s);
        layers_init(s);
    }
    printf("%s, %s, B=%d, T=%d%s", a.model, FLOATX_NAME, B, T, again > 1 ? ", blocks computed again" : "");
    if (!counting) printf(" on %s; %s", device_name(), layers_description());
    printf("\n\n");
    bench_layers(g, B, T);
    print_table();
    Operation sum = sum_of(operations);
    double flops = gpt2_flops_per_token(g, T) * N;
    printf("\n6 N + 6 L C T: %.1f GFLOP a step; at the floors %.0f tokens/s, %.1f %% of the product's rate\n", 1e-9 * flops,
           N / sum.floor, 100 * flops / sum.floor / flop_rate);
    if (counting) return 0;
    printf("measured: %.0f tokens/s, %.1f %% of the product's rate; peak_flops %.4g flops_per_token %.4g\n",
           N / sum.seconds, 100 * flops / sum.seconds / flop_rate, flop_rate, gpt2_flops_per_token(g, T));
    layers_free();
    bench_step(g, B, T, a.recompute ? RECOMPUTE_BLOCK : RECOMPUTE_NONE);
    say_if_peak_changed(1e-9 * byte_rate, 1e-9 * copy_rate(COPIED_BYTES), "GB/s");
    say_if_peak_changed(1e-12 * flop_rate, 1e-12 * product_rate(PRODUCT), "TFLOP/s");
    say_if_others_ran(begin);
    cudaEventDestroy(begin_event);
    cudaEventDestroy(end_event);
    device_shutdown();
    return 0;
}
