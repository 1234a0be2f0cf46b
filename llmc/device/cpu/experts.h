/*
cpu/experts.h - experts_api.h for the CPU, formula by formula. A thread computes whole tokens, or a piece of the
router's gradient, so no result depends on the number of threads.
*/
#ifndef LLMC_CPU_EXPERTS_H
#define LLMC_CPU_EXPERTS_H
#include "../experts_api.h"
#include "math.h"
#include <float.h>

enum {
    DOT_LANES = 32,       // sums that a product of two rows forms next to one another
    EXPERT_CHANNELS = 256 // channels of a row whose sums a thread holds at a time
};

// Returns the sum of a (n) times b (n). Its order depends on n alone, not on where the arrays begin.
static float product_of_rows(const floatX* a, const floatX* b, int n) {
    float lanes[DOT_LANES] = { 0 };
    int c = 0;
    for (; c + DOT_LANES <= n; c += DOT_LANES) {
        #pragma omp simd
        for (int i = 0; i < DOT_LANES; i++)
            lanes[i] = fused_multiply_add(to_float(a[c + i]), to_float(b[c + i]), lanes[i]);
    }
    for (int i = 0; c + i < n; i++) lanes[i] = fused_multiply_add(to_float(a[c + i]), to_float(b[c + i]), lanes[i]);
    for (int half = DOT_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// ---- the router ----
static void softmax_in_place(float* x, int n) {
    float max = -FLT_MAX, sum = 0;
    for (int i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int i = 0; i < n; i++) sum += x[i] = exp_f32(x[i] - max);
    for (int i = 0; i < n; i++) x[i] /= sum; // one of two equal numbers divided by the other is 1
}

static bool is_among(int expert, const int* chosen, int n) {
    for (int j = 0; j < n; j++) if (chosen[j] == expert) return true;
    return false;
}
static void choose_experts(int* chosen, const float* probs, const float* bias, int E, int k) {
    for (int j = 0; j < k; j++) {
        int best = -1, slot = j;
        float highest = 0;
        for (int i = 0; i < E; i++) {
            float score = bias != NULL ? probs[i] + bias[i] : probs[i];
            if (is_among(i, chosen, j) || (best >= 0 && !(score > highest))) continue;
            best = i;
            highest = score;
        }
        // With a bias, experts are not found in the order of their probabilities: move those behind this one.
        for (; slot > 0; slot--) {
            int other = chosen[slot - 1];
            if (!(probs[best] > probs[other] || (probs[best] == probs[other] && best < other))) break;
            chosen[slot] = other;
        }
        chosen[slot] = best;
    }
}
static void weigh_experts(float* weights, const float* probs, const int* chosen, int k) {
    float sum = probs[chosen[0]];
    for (int j = 1; j < k; j++) sum += probs[chosen[j]];
    for (int j = 0; j < k; j++) weights[j] = k == 1 ? sum : sum == 0 ? 0 : probs[chosen[j]] / sum;
}

void router_forward(float* probs, int* chosen, float* weights, const floatX* inp, const floatX* w, const float* bias,
                    int N, int C, int E, int k) {
    experts_check(N, E, k);
    #pragma omp parallel for schedule(static)
    for (int t = 0; t < N; t++) {
        float* p = probs + (size_t)t * E;
        for (int i = 0; i < E; i++) p[i] = product_of_rows(inp + (size_t)t * C, w + (size_t)i * C, C);
        softmax_in_place(p, E);
        choose_experts(chosen + (size_t)t * k, p, bias, E, k);
        weigh_experts(weights + (size_t)t * k, p, chosen + (size_t)t * k, k);
    }
}

// dlogits (E) of one token. If g is the gradient of a softmax's results, dlogits_i = p_i (g_i - sum_m p_m g_m). With
// k = 1 a weight is one of these results. Otherwise the weights are a softmax over the chosen experts alone.
static void token_dlogits(float* dlogits, const float* dweights, const float* balance, const float* probs,
                          const int* chosen, const float* weights, int E, int k) {
    float mean = 0, mean_of_chosen = 0;
    for (int i = 0; i < E; i++) dlogits[i] = balance != NULL ? balance[i] : 0;
    if (k == 1) dlogits[chosen[0]] += dweights[0];
    for (int i = 0; i < E; i++) mean = fused_multiply_add(probs[i], dlogits[i], mean);
    for (int i = 0; i < E; i++) dlogits[i] = probs[i] * (dlogits[i] - mean);
    if (k == 1) return;
    for (int j = 0; j < k; j++) mean_of_chosen = fused_multiply_add(weights[j], dweights[j], mean_of_chosen);
    for (int j = 0; j < k; j++) dlogits[chosen[j]] += weights[j] * (dweights[j] - mean_of_chosen);
}

// out (n) = base + the sum over rows of factors times rows of x, whose first elements are `step` apart. A factor of 0
// adds nothing, not even the sign of a zero: with k > 1 and without `balance` most are 0.
static void add_scaled_rows(floatX* out, bool has_base, const float* factors, int factor_step, const floatX* x,
                            int step, int rows, int n) {
    float sum[EXPERT_CHANNELS];
    #pragma omp simd
    for (int c = 0; c < n; c++) sum[c] = has_base ? to_float(out[c]) : 0;
    for (int r = 0; r < rows; r++) {
        const floatX* row = x + (size_t)r * step;
        float factor = factors[(size_t)r * factor_step];
        if (factor == 0) continue;
        #pragma omp simd
        for (int c = 0; c < n; c++) sum[c] = fused_multiply_add(factor, to_float(row[c]), sum[c]);
    }
    #pragma omp simd
    for (int c = 0; c < n; c++) out[c] = to_floatX(sum[c]);
}
static inline int channels_from(int c, int C) { return C - c < EXPERT_CHANNELS ? C - c : EXPERT_CHANNELS; }

void router_backward(floatX* dinp, floatX* dw, float* dlogits, const float* dweights, const float* balance,
                     const float* probs, const int* chosen, const float* weights, const floatX* inp, const floatX* w,
                     int N, int C, int E, int k, GradMode mode) {
    experts_check(N, E, k);
    #pragma omp parallel for schedule(static)
    for (int t = 0; t < N; t++) {
        float* dz = dlogits + (size_t)t * E;
        size_t slots = (size_t)t * k;
        token_dlogits(dz, dweights + slots, balance, probs + (size_t)t * E, chosen + slots, weights + slots, E, k);
        for (int c = 0; c < C; c += EXPERT_CHANNELS)
            add_scaled_rows(dinp + (size_t)t * C + c, true, dz, 1, w + c, C, E, channels_from(c, C));
    }
    #pragma omp parallel for collapse(2) schedule(static)
    for (int i = 0; i < E; i++)
        for (int c = 0; c < C; c += EXPERT_CHANNELS)
            add_scaled_rows(dw + (size_t)i * C + c, mode == GRAD_ADD, dlogits + i, E, inp + c, C, N,
                            channels_from(c, C));
}

// ---- rows ----
void experts_sort(int* counts, int* places, const int* chosen, int N, int E, int k, int capacity) {
    experts_check(N, E, k);
    experts_capacity_check(E, capacity);
    int next[EXPERTS_MOST], slots = N * k, begin = 0;
    memset(counts, 0, (size_t)E * sizeof(int));
    for (int slot = 0; slot < slots; slot++) counts[chosen[slot]]++;
    for (int i = 0; i < E; i++) {
        next[i] = capacity > 0 ? i * capacity : begin;
        begin += counts[i];
    }
    for (int slot = 0; slot < slots; slot++) {
        int expert = chosen[slot];
        bool dropped = capacity > 0 && next[expert] == (expert + 1) * capacity;
        places[slot] = dropped ? -1 : next[expert]++;
    }
}

static void zero_rows(floatX* out, int rows, int C) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) memset(out + (size_t)r * C, 0, (size_t)C * sizeof(floatX));
}
void experts_permute_forward(floatX* out, const floatX* inp, const int* places, int rows, int N, int C, int k) {
    zero_rows(out, rows, C);
    #pragma omp parallel for schedule(static)
    for (int slot = 0; slot < N * k; slot++)
        if (places[slot] >= 0)
            memcpy(out + (size_t)places[slot] * C, inp + (size_t)(slot / k) * C, (size_t)C * sizeof(floatX));
}

// out (n) = the sum over a token's slots of weights (k) times the rows of x, C elements each, from column c on. weights
// NULL: all are 1. A sum that begins at -0 is one that starts with its first term, because -0 + x is x for every x.
static void add_up_slots(floatX* out, const floatX* x, const float* weights, const int* places, int c, int n, int C,
                         int k) {
    float sum[EXPERT_CHANNELS], start = 0;
    for (int j = 0; j < k; j++) start = places[j] >= 0 ? -0.0f : start;
    for (int i = 0; i < n; i++) sum[i] = start;
    for (int j = 0; j < k; j++) {
        if (places[j] < 0) continue;
        const floatX* row = x + (size_t)places[j] * C + c;
        float weight = weights != NULL ? weights[j] : 1;
        #pragma omp simd
        for (int i = 0; i < n; i++) sum[i] = fused_multiply_add(weight, to_float(row[i]), sum[i]);
    }
    #pragma omp simd
    for (int i = 0; i < n; i++) out[i] = to_floatX(sum[i]);
}
void experts_permute_backward(floatX* dinp, const floatX* dout, const int* places, int N, int C, int k) {
    #pragma omp parallel for schedule(static)
    for (int t = 0; t < N; t++)
        for (int c = 0; c < C; c += EXPERT_CHANNELS)
            add_up_slots(dinp + (size_t)t * C + c, dout, NULL, places + (size_t)t * k, c, channels_from(c, C), C, k);
}
void experts_combine_forward(floatX* out, const floatX* y, const float* weights, const int* places, int N, int C,
                             int k) {
    #pragma omp parallel for schedule(static)
    for (int t = 0; t < N; t++)
        for (int c = 0; c < C; c += EXPERT_CHANNELS)
            add_up_slots(out + (size_t)t * C + c, y, weights + (size_t)t * k, places + (size_t)t * k, c,
                         channels_from(c, C), C, k);
}

void experts_combine_backward(floatX* dy, float* dweights, const floatX* dout, const floatX* y, const float* weights,
                              const int* places, int rows, int N, int C, int k) {
    zero_rows(dy, rows, C);
    #pragma omp parallel for schedule(static)
    for (int slot = 0; slot < N * k; slot++) {
        const floatX* d = dout + (size_t)(slot / k) * C;
        dweights[slot] = 0;
        if (places[slot] < 0) continue;
        floatX* to = dy + (size_t)places[slot] * C;
        dweights[slot] = product_of_rows(d, y + (size_t)places[slot] * C, C);
        #pragma omp simd
        for (int c = 0; c < C; c++) to[c] = to_floatX(weights[slot] * to_float(d[c]));
    }
}
#endif
