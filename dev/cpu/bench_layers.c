/*
bench_layers.c - how fast each layer is inside a whole training step of GPT-2 124M, compared with what this machine can do.

    build/bench_layers [B T [steps]]      (4 64 if not given)

It runs whole steps as a stage file would, with every block's own weights and activations, so that no layer finds in the
cache what it would not find there in training. Each layer's time is its minimum over the steps. Products and attention
(whose FLOPs are the causal half, and do not count what backward computes again) are compared with the rate of a large
dnnl_sgemm, everything else with the rate at which memory is updated in place. Both rates are measured between the steps,
because the speed of a shared machine changes from second to second.
*/
#include "../../llmc/device/layers.h"
#include "../../llmc/model/gpt2.h"

#define CLASSIFIER_ROWS 256

// ---- what is timed ----
typedef struct { const char* name; double flops, bytes, step_seconds, best_seconds; int calls; } Row;
static Row rows[32];
static int row_count;

static Row* row_named(const char* name) {
    for (int i = 0; i < row_count; i++) if (strcmp(rows[i].name, name) == 0) return &rows[i];
    require(row_count < 32, "too many rows");
    Row r = { name, 0, 0, 0, INFINITY, 0 };
    rows[row_count] = r;
    return &rows[row_count++];
}
// Runs a call and books it under a name, with the FLOPs it does, or the bytes it reads and writes if those count.
#define TIMED(name, flop, byte, call) do { \
    double begin_seconds = now_seconds(); \
    call; \
    Row* row_ = row_named(name); \
    row_->step_seconds += now_seconds() - begin_seconds; \
    row_->flops += flop; \
    row_->bytes += byte; \
    row_->calls++; \
} while (0)

// ---- a model ----
typedef struct { floatX *res1, *ln1, *qkv, *att, *res2, *ln2, *pre, *fc, *fcproj; float *mean1, *rstd1, *mean2, *rstd2, *stats; } Block;
typedef struct {
    GPT2Config c;
    int B, T, N;
    size_t n;
    floatX *params, *grads;
    float *master, *m, *v, *losses, *scale, *mean, *rstd;
    int *tokens, *targets;
    Block blocks[12];
    floatX *out, *final, *logits, *dres, *dwide, *dnarrow;
    StepStats* stats;
} Model;

static floatX* random_array(size_t n, MemoryKind kind, float std, uint64_t stream) {
    floatX* x = (floatX*)device_alloc(n * sizeof(floatX), kind);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = to_floatX(std * (2 * random_uniform(1, stream, i) - 1));
    return x;
}
static floatX* array(size_t n) { return (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS); }
static float* floats(size_t n) { return (float*)device_alloc(n * sizeof(float), MEMORY_ACTIVATIONS); }

static Block block_init(const Model* g) {
    size_t NC = (size_t)g->N * (size_t)g->c.C, N = (size_t)g->N;
    Block b = { array(NC), array(NC), array(3*NC), array(NC), array(NC), array(NC), array(4*NC), array(4*NC), array(NC),
                floats(N), floats(N), floats(N), floats(N), floats(N * (size_t)g->c.NH) };
    return b;
}

static void model_init(Model* g, int B, int T) {
    memset(g, 0, sizeof *g);
    gpt2_named_config("gpt2", &g->c);
    g->c.V = GPT2_VOCABULARY;
    g->c.Vp = gpt2_padded_vocabulary(g->c.V);
    g->B = B; g->T = T; g->N = B * T;
    for (int u = 0; u <= g->c.L; u++) g->n += unit_elements(g->c, u);
    size_t N = (size_t)g->N, C = (size_t)g->c.C, n = g->n;
    g->params = random_array(n, MEMORY_PARAMETERS, 0.03f, 1);
    g->grads = random_array(n, MEMORY_GRADIENTS, 1e-3f, 2);
    g->m = (float*)device_alloc(n * sizeof(float), MEMORY_OPTIMIZER);
    g->v = (float*)device_alloc(n * sizeof(float), MEMORY_OPTIMIZER);
    if (NEEDS_MASTER) {
        g->master = (float*)device_alloc(n * sizeof(float), MEMORY_OPTIMIZER);
        for (size_t i = 0; i < n; i++) g->master[i] = to_float(g->params[i]);
    }
    for (int l = 0; l < g->c.L; l++) g->blocks[l] = block_init(g);
    g->out = array(N*C); g->final = array(N*C); g->dres = array(N*C); g->dnarrow = array(N*C); g->dwide = array(4*N*C);
    g->logits = array(size_min(CLASSIFIER_ROWS, N) * (size_t)g->c.Vp);
    g->losses = floats(N); g->mean = floats(N); g->rstd = floats(N); g->scale = floats(1);
    g->tokens = (int*)floats(N); g->targets = (int*)floats(N);
    g->stats = (StepStats*)device_alloc(sizeof(StepStats), MEMORY_ACTIVATIONS);
    for (int i = 0; i < g->N; i++) {
        g->tokens[i] = (int)(random_uniform(1, 3, (uint64_t)i) * (float)g->c.V);
        g->targets[i] = (int)(random_uniform(1, 4, (uint64_t)i) * (float)g->c.V);
    }
    LayerShapes s = { B, T, g->c.C, g->c.NH, g->c.Vp, 1 };
    layers_init(s);
}

// Tensor i of unit u in an array laid out like the parameters.
static floatX* tensor(const Model* g, floatX* base, int u, int i) {
    for (int k = 0; k < u; k++) base += unit_elements(g->c, k);
    return base + unit_tensor(g->c, u, i).offset;
}

static void step_forward(Model* g, double F, double X) {
    int N = g->N, C = g->c.C, NH = g->c.NH, B = g->B, T = g->T;
    double E = (double)N * C * X, attention_flops = 2.0 * N * T * C; // two products, of which causality leaves half
    #define P(i) tensor(g, g->params, l + 1, i)
    TIMED("encoder forward", 0, 3 * E, encoder_forward(g->blocks[0].res1, g->tokens, tensor(g, g->params, 0, WTE), tensor(g, g->params, 0, WPE), B, T, C));
    for (int l = 0; l < g->c.L; l++) {
        Block *b = &g->blocks[l], *before = l > 0 ? b - 1 : NULL;
        TIMED("layernorm forward", 0, (before ? 4 : 2) * E, residual_layernorm_forward(b->res1, b->ln1, b->mean1, b->rstd1,
              before ? before->res2 : b->res1, before ? before->fcproj : NULL, P(LN1W), P(LN1B), N, C));
        TIMED("qkv forward", 3 * F, 0, matmul_forward(b->qkv, b->ln1, P(QKVW), P(QKVB), N, C, 3 * C));
        TIMED("attention forward", attention_flops, 0, attention_forward(b->att, b->stats, b->qkv, B, T, C, NH));
        TIMED("proj forward", F, 0, matmul_forward(g->out, b->att, P(PROJW), P(PROJB), N, C, C));
        TIMED("layernorm forward", 0, 4 * E, residual_layernorm_forward(b->res2, b->ln2, b->mean2, b->rstd2, b->res1, g->out, P(LN2W), P(LN2B), N, C));
        TIMED("fc + gelu forward", 4 * F, 0, matmul_gelu_forward(b->fc, b->pre, b->ln2, P(FCW), P(FCB), N, C, 4 * C));
        TIMED("fcproj forward", 4 * F, 0, matmul_forward(b->fcproj, b->fc, P(FCPROJW), P(FCPROJB), N, 4 * C, C));
    }
    Block* last = &g->blocks[g->c.L - 1];
    TIMED("layernorm forward", 0, 4 * E, residual_layernorm_forward(g->out, g->final, g->mean, g->rstd, last->res2, last->fcproj,
          tensor(g, g->params, 0, LNFW), tensor(g, g->params, 0, LNFB), N, C));
}

static void step_classifier(Model* g) {
    int C = g->c.C, V = g->c.V, Vp = g->c.Vp;
    floatX *wte = tensor(g, g->params, 0, WTE), *dwte = tensor(g, g->grads, 0, WTE);
    for (int i = 0; i < g->N; i += CLASSIFIER_ROWS) {
        int n = g->N - i < CLASSIFIER_ROWS ? g->N - i : CLASSIFIER_ROWS;
        double F = 2.0 * n * C * Vp;
        floatX *x = g->final + (size_t)i * C, *dx = g->dnarrow + (size_t)i * C;
        TIMED("logits forward", F, 0, matmul_forward(g->logits, x, wte, NULL, n, C, Vp));
        TIMED("classifier", 0, 2.0 * n * Vp * sizeof(floatX), classifier_forward_backward(g->losses + i, g->logits, g->targets + i, 1.0f / (float)g->N, n, V, Vp));
        TIMED("logits dX", F, 0, matmul_backward_input(dx, g->logits, wte, n, C, Vp));
        TIMED("logits dW", F, 0, matmul_backward_weight(dwte, NULL, g->logits, x, n, C, Vp, i == 0 ? GRAD_SET : GRAD_ADD));
    }
}

static void step_backward(Model* g, double F, double X) {
    int N = g->N, C = g->c.C, NH = g->c.NH, B = g->B, T = g->T;
    double E = (double)N * C * X, attention_flops = 4.0 * N * T * C;
    #define G(i) tensor(g, g->grads, l + 1, i)
    device_zero(g->dres, (size_t)E);
    TIMED("layernorm backward", 0, 4 * E, layernorm_backward(g->dres, tensor(g, g->grads, 0, LNFW), tensor(g, g->grads, 0, LNFB), g->dnarrow, g->out,
          tensor(g, g->params, 0, LNFW), g->mean, g->rstd, N, C, GRAD_SET));
    for (int l = g->c.L - 1; l >= 0; l--) {
        Block* b = &g->blocks[l];
        TIMED("fcproj dX + gelu", 4 * F, 0, matmul_gelu_backward_input(g->dwide, g->dres, P(FCPROJW), b->pre, N, 4 * C, C));
        TIMED("fcproj dW", 4 * F, 0, matmul_backward_weight(G(FCPROJW), G(FCPROJB), g->dres, b->fc, N, 4 * C, C, GRAD_SET));
        TIMED("fc dX", 4 * F, 0, matmul_backward_input(g->dnarrow, g->dwide, P(FCW), N, C, 4 * C));
        TIMED("fc dW", 4 * F, 0, matmul_backward_weight(G(FCW), G(FCB), g->dwide, b->ln2, N, C, 4 * C, GRAD_SET));
        TIMED("layernorm backward", 0, 4 * E, layernorm_backward(g->dres, G(LN2W), G(LN2B), g->dnarrow, b->res2, P(LN2W), b->mean2, b->rstd2, N, C, GRAD_SET));
        TIMED("proj dX", F, 0, matmul_backward_input(g->dnarrow, g->dres, P(PROJW), N, C, C));
        TIMED("proj dW", F, 0, matmul_backward_weight(G(PROJW), G(PROJB), g->dres, b->att, N, C, C, GRAD_SET));
        TIMED("attention backward", attention_flops, 0, attention_backward(g->dwide, g->dnarrow, b->qkv, b->att, b->stats, B, T, C, NH));
        TIMED("qkv dX", 3 * F, 0, matmul_backward_input(g->dnarrow, g->dwide, P(QKVW), N, C, 3 * C));
        TIMED("qkv dW", 3 * F, 0, matmul_backward_weight(G(QKVW), G(QKVB), g->dwide, b->ln1, N, C, 3 * C, GRAD_SET));
        TIMED("layernorm backward", 0, 4 * E, layernorm_backward(g->dres, G(LN1W), G(LN1B), g->dnarrow, b->res1, P(LN1W), b->mean1, b->rstd1, N, C, GRAD_SET));
    }
    TIMED("encoder backward", 0, 4 * E, encoder_backward(tensor(g, g->grads, 0, WTE), tensor(g, g->grads, 0, WPE), g->dres, g->tokens, B, T, C, GRAD_SET));
}

static void step_update(Model* g, int t) {
    AdamW a = { 1e-5, 0.9, 0.95, 1e-8, 0.1, t };
    double n = (double)g->n;
    memset(g->stats, 0, sizeof *g->stats);
    TIMED("loss", 0, 4.0 * g->N, add_sum(&g->stats->loss, g->losses, (size_t)g->N));
    TIMED("gradient norm", 0, n * sizeof(floatX), add_sum_squares(&g->stats->grad_square, g->grads, g->n));
    clip_gradients(g->stats, 1.0f, 1.0f);
    double bytes = n * (4 * sizeof(float) + sizeof(floatX) + (NEEDS_MASTER ? 2 * sizeof(float) + sizeof(floatX) : 2 * sizeof(float)));
    floatX *p = g->params, *d = g->grads;
    float *master = g->master, *m = g->m, *v = g->v;
    for (int u = 0; u <= g->c.L; u++) {
        size_t k = unit_elements(g->c, u);
        TIMED("AdamW", 0, bytes * (double)k / n, adamw_update(a, p, master, m, v, d, &g->stats->grad_scale, k, unit_no_decay(g->c, u)));
        p += k; d += k; m += k; v += k;
        if (NEEDS_MASTER) master += k;
    }
}

// ---- what the machine can do ----
static double sgemm_rate(void) {
    const int n = 2048;
    float *a = floats((size_t)n * n), *b = floats((size_t)n * n), *c = floats((size_t)n * n);
    double best = INFINITY;
    for (size_t i = 0; i < (size_t)n * n; i++) a[i] = b[i] = (float)(i % 7) * 0.1f;
    for (int k = 0; k < 5; k++) {
        double begin = now_seconds();
        dnnl_sgemm('N', 'N', n, n, n, 1.0f, a, n, b, n, 0.0f, c, n);
        best = fmin(best, now_seconds() - begin);
    }
    device_free(a); device_free(b); device_free(c);
    return 2.0 * n * n * n / best;
}
// x = a x + y in place: two reads and a write, and no cache line is fetched only to be overwritten
static double memory_rate(float* x, const float* y, size_t n) {
    double best = INFINITY;
    for (int k = 0; k < 3; k++) {
        double begin = now_seconds();
        #pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) x[i] = 0.999f * x[i] + y[i];
        best = fmin(best, now_seconds() - begin);
    }
    return 12.0 * (double)n / best;
}

int main(int argc, char** argv) {
    int B = argc > 2 ? atoi(argv[1]) : 4, T = argc > 2 ? atoi(argv[2]) : 64, steps = argc > 3 ? atoi(argv[3]) : 5;
    require((argc == 1 || argc == 3 || argc == 4) && B > 0 && T > 0 && T <= GPT2_CONTEXT && steps > 0, "usage: bench_layers [B T [steps]]");
    device_init(0, 1);
    static Model g;
    model_init(&g, B, T);
    printf("GPT-2 124M, %s, B = %d, T = %d on %s; %s\n", FLOATX_NAME, B, T, device_name(), layers_description());
    double F = 2.0 * g.N * g.c.C * g.c.C, best_step = INFINITY, flop_rate = 0, byte_rate = 0;
    for (int t = 0; t <= steps; t++) { // the first warms up
        double begin = now_seconds();
        step_forward(&g, F, sizeof(floatX));
        step_classifier(&g);
        step_backward(&g, F, sizeof(floatX));
        step_update(&g, t + 1);
        double seconds = now_seconds() - begin;
        for (int i = 0; i < row_count; i++) {
            if (t > 0) rows[i].best_seconds = fmin(rows[i].best_seconds, rows[i].step_seconds);
            rows[i].step_seconds = 0;
            if (t < steps) rows[i].flops = rows[i].bytes = rows[i].calls = 0;
        }
        if (t > 0) best_step = fmin(best_step, seconds);
        flop_rate = fmax(flop_rate, sgemm_rate());
        byte_rate = fmax(byte_rate, memory_rate(g.m, g.v, g.n / 4));
    }
    printf("sgemm %.1f GFLOP/s, memory %.1f GB/s\n", flop_rate * 1e-9, byte_rate * 1e-9);
    printf("%-20s %5s %9s %7s %9s %8s %12s\n", "layer", "calls", "ms", "% step", "GFLOP/s", "GB/s", "% of machine");
    double sum = 0, ideal = 0;
    for (int i = 0; i < row_count; i++) {
        Row r = rows[i];
        sum += r.best_seconds;
        ideal += r.flops / flop_rate + r.bytes / byte_rate;
        printf("%-20s %5d %9.2f %7.1f ", r.name, r.calls, r.best_seconds * 1e3, 100 * r.best_seconds / best_step);
        if (r.flops > 0) printf("%9.1f %8s %12.1f\n", r.flops / r.best_seconds * 1e-9, "", 100 * r.flops / r.best_seconds / flop_rate);
        else printf("%9s %8.1f %12.1f\n", "", r.bytes / r.best_seconds * 1e-9, 100 * r.bytes / r.best_seconds / byte_rate);
    }
    double tokens = (double)g.N, n6 = 6.0 * (double)gpt2_num_parameters(g.c) * tokens, counted = gpt2_flops_per_token(g.c, T) * tokens;
    printf("sum of the best times %.1f ms, best whole step %.1f ms\n", sum * 1e3, best_step * 1e3);
    printf("of the sgemm rate: %.1f%% (%.1f%% with the best times) by 6N FLOPs a token, %.1f%% (%.1f%%) with attention's\n",
           100 * n6 / best_step / flop_rate, 100 * n6 / sum / flop_rate, 100 * counted / best_step / flop_rate, 100 * counted / sum / flop_rate);
    return 0;
}
