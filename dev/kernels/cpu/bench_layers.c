/*
bench_layers.c - how fast each layer is inside a whole training step of GPT-2 124M, compared with what this machine can do.

    build/bench_layers [--batch-size 4] [--seq-len 64] [--steps 5]

It runs whole steps of train_gpt2_single.cu, so that no layer finds in the cache what it would not find there in training. Each
layer's time is its minimum over the steps. Products and attention (whose FLOPs are the causal half, and do not count what backward
computes again) are compared with the rate of a large dnnl_sgemm, everything else with the rate at which memory is updated in place.
Both rates are measured between the steps, because the speed of a shared machine changes from second to second.
*/
// The program itself: the step is its own. Only its calls of layers are timed: their macros come after what they call.
#include "../../../llmc/device/layers.h"
#include "../others.h"

typedef struct { const char *layer, *call; double flops, bytes, step_seconds, best_seconds; int calls; } Row;
static Row rows[32];
static int row_count;

static Row* row_named(const char* layer, const char* call) {
    for (int i = 0; i < row_count; i++) if (rows[i].layer == layer && strcmp(rows[i].call, call) == 0) return &rows[i];
    invariant(row_count < 32, "too many rows");
    rows[row_count] = (Row){ layer, call, 0, 0, 0, INFINITY, 0 };
    return &rows[row_count++];
}
// Runs a call and books it under a name, with the FLOPs it does, or the bytes it reads and writes if those count.
#define TIMED(layer, name, flop, byte, call) do { \
    double begin_seconds = now_seconds(); \
    call; \
    Row* row_ = row_named(layer, name); \
    row_->step_seconds += now_seconds() - begin_seconds; \
    row_->flops += flop; \
    row_->bytes += byte; \
    row_->calls++; \
} while (0)
static const char* linear_layer(int C, int OC) { // in a GPT-2
    return OC < C ? "fcproj " : OC == C ? "proj " : OC == 3 * C ? "qkv " : OC == 4 * C ? "fc " : "logits ";
}
#define LINEAR(name, N, C, OC, call) TIMED(linear_layer(C, OC), name, 2.0 * (N) * (C) * (OC), 0, call)
#define MOVES(name, elements, call) TIMED("", name, 0, (double)(elements) * sizeof(floatX), call)
#define ADAMW_BYTES (4 * sizeof(float) + sizeof(floatX) + 2 * sizeof(float) + (NEEDS_MASTER ? sizeof(floatX) : 0)) // an element

#define encoder_forward(out, tokens, wte, wpe, B, T, C) \
    MOVES("encoder forward", 3.0 * (B) * (T) * (C), encoder_forward(out, tokens, wte, wpe, B, T, C))
#define encoder_backward(dwte, dwpe, dout, tokens, B, T, C, mode) \
    MOVES("encoder backward", 4.0 * (B) * (T) * (C), encoder_backward(dwte, dwpe, dout, tokens, B, T, C, mode))
#define residual_layernorm_forward(res, out, mean, rstd, x1, x2, w, b, N, C) MOVES("layernorm forward", \
    ((x2) ? 4.0 : 2.0) * (N) * (C), residual_layernorm_forward(res, out, mean, rstd, x1, x2, w, b, N, C))
#define layernorm_backward(dinp, dw, db, dout, inp, w, mean, rstd, N, C, mode) \
    MOVES("layernorm backward", 4.0 * (N) * (C), layernorm_backward(dinp, dw, db, dout, inp, w, mean, rstd, N, C, mode))
#define matmul_forward(out, inp, w, bias, N, C, OC) LINEAR("forward", N, C, OC, matmul_forward(out, inp, w, bias, N, C, OC))
#define matmul_gelu_forward(out, pre, inp, w, bias, N, C, OC) \
    LINEAR("+ gelu forward", N, C, OC, matmul_gelu_forward(out, pre, inp, w, bias, N, C, OC))
#define matmul_backward_input(dinp, dout, w, N, C, OC) LINEAR("dX", N, C, OC, matmul_backward_input(dinp, dout, w, N, C, OC))
#define matmul_gelu_backward_input(dinp, dout, w, pre, N, C, OC) \
    LINEAR("dX + gelu", N, C, OC, matmul_gelu_backward_input(dinp, dout, w, pre, N, C, OC))
#define matmul_backward_weight(dw, dbias, dout, inp, N, C, OC, mode) \
    LINEAR("dW", N, C, OC, matmul_backward_weight(dw, dbias, dout, inp, N, C, OC, mode))
#define matmul_backward_weight_chunk(dw, dout, inp, row, n, N, C, OC, mode) \
    LINEAR("dW", n, C, OC, matmul_backward_weight_chunk(dw, dout, inp, row, n, N, C, OC, mode))
// two products in forward and four in backward, of which causality leaves half
#define attention_forward(out, stats, qkv, B, T, C, NH) \
    TIMED("", "attention forward", 2.0 * (B) * (T) * (T) * (C), 0, attention_forward(out, stats, qkv, B, T, C, NH))
#define attention_backward(dqkv, dout, qkv, out, stats, B, T, C, NH) \
    TIMED("", "attention backward", 4.0 * (B) * (T) * (T) * (C), 0, attention_backward(dqkv, dout, qkv, out, stats, B, T, C, NH))
#define classifier_forward_backward(losses, logits, targets, dloss, N, V, Vp) \
    MOVES("classifier", 2.0 * (N) * (Vp), classifier_forward_backward(losses, logits, targets, dloss, N, V, Vp))
#define add_sum_squares(acc, x, n) MOVES("norms", n, add_sum_squares(acc, x, n))
#define adamw_update(a, params, master, m, v, grads, grad_scale, n, no_decay, square) \
    TIMED("", "AdamW", 0, (double)(n) * ADAMW_BYTES, adamw_update(a, params, master, m, v, grads, grad_scale, n, no_decay, square))
#define main train_gpt2_single_main
#include "../../../train_gpt2_single.cu"
#undef main

static void model_init(GPT2* g, int B, int T) {
    GPT2Config c = { .V = GPT2_VOCABULARY, .Vp = gpt2_padded_vocabulary(GPT2_VOCABULARY) };
    gpt2_named_config("gpt2", &c);
    c.max_T = GPT2_CONTEXT;
    g->config = c;
    g->max_B = B;
    g->seq_len = T;
    g->num_units = gpt2_num_units(c);
    g->logits_rows = classifier_rows(B * T, c.Vp);
    gpt2_init_units(g);
    gpt2_init(g);
    param_ranges_set_weights(g->ranges, g->num_ranges, c, 1, NULL, CHECKPOINT_MODEL);
    size_t n = (size_t)B * (size_t)T;
    int* tokens = (int*)xcalloc(2 * n, sizeof(int));
    for (size_t i = 0; i < 2 * n; i++) tokens[i] = (int)(random_uniform(1, 3, i) * (float)c.V);
    gpt2_load_batch(g, tokens, tokens + n, B, T);
    free(tokens);
}
// train_step's lines between the batch and the wait
static void step(GPT2* g, int t) {
    AdamW a = { 1e-5, 0.9, 0.95, 1e-8, 0.1, t };
    device_zero(g->stats, sizeof *g->stats);
    gpt2_forward(g);
    gpt2_backward(g, 1.0f / (float)(g->B * g->T));
    gpt2_clip(g, 1, 1);
    gpt2_update(g, a);
}

// ---- what the machine can do ----
static double sgemm_rate(void) {
    const int n = 2048;
    float* x[3];
    for (int i = 0; i < 3; i++) x[i] = (float*)device_alloc((size_t)n * n * sizeof(float), MEMORY_WORKSPACE);
    float *a = x[0], *b = x[1], *c = x[2];
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
    long long batch = 4, tokens = 64, steps = 5;
    OptionTable options = options_table("bench_layers", "each layer's time within a step of GPT-2 124M");
    option_int(&options, "batch-size", &batch, 1, 1e6, "sequences");
    option_int(&options, "seq-len", &tokens, 1, GPT2_CONTEXT, "tokens of each");
    option_int(&options, "steps", &steps, 1, 1e6, "timed steps, of which the best counts");
    options_parse(&options, argc, argv);
    int B = (int)batch, T = (int)tokens;
    device_init(0, 1);
    static GPT2 g;
    model_init(&g, B, T);
    printf("GPT-2 124M, %s, B = %d, T = %d on %s; %s\n", FLOATX_NAME, B, T, device_name(), layers_description());
    double best_step = INFINITY, flop_rate = 0, byte_rate = 0;
    CoreSeconds before = core_seconds();
    for (int t = 0; t <= steps; t++) { // the first warms up
        double begin = now_seconds();
        step(&g, t + 1);
        double seconds = now_seconds() - begin;
        for (int i = 0; i < row_count; i++) {
            if (t > 0) rows[i].best_seconds = fmin(rows[i].best_seconds, rows[i].step_seconds);
            rows[i].step_seconds = 0;
            if (t < steps) rows[i].flops = rows[i].bytes = rows[i].calls = 0;
        }
        if (t > 0) best_step = fmin(best_step, seconds);
        flop_rate = fmax(flop_rate, sgemm_rate());
        byte_rate = fmax(byte_rate, memory_rate(g.m, g.v, g.num_params / 4));
    }
    printf("sgemm %.1f GFLOP/s, memory %.1f GB/s\n", flop_rate * 1e-9, byte_rate * 1e-9);
    printf("%-20s %5s %9s %7s %9s %8s %12s\n", "layer", "calls", "ms", "% step", "GFLOP/s", "GB/s", "% of machine");
    double sum = 0;
    for (int i = 0; i < row_count; i++) {
        Row r = rows[i];
        sum += r.best_seconds;
        printf("%s%-*s %5d %9.2f %7.1f ", r.layer, 20 - (int)strlen(r.layer), r.call, r.calls, r.best_seconds * 1e3,
               100 * r.best_seconds / best_step);
        if (r.flops > 0) printf("%9.1f %8s %12.1f\n", r.flops / r.best_seconds * 1e-9, "", 100 * r.flops / r.best_seconds / flop_rate);
        else printf("%9s %8.1f %12.1f\n", "", r.bytes / r.best_seconds * 1e-9, 100 * r.bytes / r.best_seconds / byte_rate);
    }
    double n6 = 6.0 * (double)gpt2_num_parameters(g.config) * B * T;
    double counted = gpt2_flops_per_token(g.config, T) * B * T;
    printf("sum of the best times %.1f ms, best whole step %.1f ms\n", sum * 1e3, best_step * 1e3);
    printf("of the sgemm rate: %.1f%% (%.1f%% with the best times) by 6N FLOPs a token, %.1f%% (%.1f%%) with attention's\n",
           100 * n6 / best_step / flop_rate, 100 * n6 / sum / flop_rate, 100 * counted / best_step / flop_rate, 100 * counted / sum / flop_rate);
    say_if_others_ran(before);
    return 0;
}
