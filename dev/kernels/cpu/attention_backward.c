/*
attention_backward.c - causal self-attention, backward, in several ways: dqkv (T,3C) from dout (T,C) and what forward left.

forward, for query t of a head: S[u] = q[t].k[u] / sqrt(HS) over the keys u <= t, P = softmax(S), out[t] = sum of P[u] v[u]. So

    dv[u] += P[u] dout[t]             dP[u] = dout[t].v[u]            D = sum over u of P[u] dP[u]
    dS[u] = P[u] (dP[u] - D)          dq[t] = sum of dS[u] k[u] / sqrt(HS)     dk[u] += dS[u] q[t] / sqrt(HS)

Each pair of a query and a key that it sees costs four products of 2 HS operations, which are counted. There are two more
questions than in attention.c. Does forward keep P, (T,T) for each head, or does backward compute it again, a fifth product that
is not counted? And which thread owns which sum: dq is a sum over the keys, dk and dv are sums over the queries.
*/
#include "attention_common.h"

static float* dquery(const Problem* p, int h, int t) { return p->dqkv + (size_t)t * 3 * p->C + (size_t)h * p->HS; }
static float* dkey(const Problem* p, int h, int t) { return dquery(p, h, t) + p->C; }
static float* dvalue(const Problem* p, int h, int t) { return dquery(p, h, t) + 2 * p->C; }
static const float* dresult(const Problem* p, int h, int t) { return p->dout + (size_t)t * p->C + (size_t)h * p->HS; }
static float* P_row(const Problem* p, int h, int t) { return p->P + ((size_t)h * (size_t)p->T + (size_t)t) * (size_t)p->T; }
static float* log_sum(const Problem* p, int h, int t) { return p->stats + (size_t)h * p->T + t; }

// Computes one query in double: out, stats and P, as forward would leave them, and its part of want (T,3C). e, dp (T): scratch.
static void query_in_double(const Problem* p, double* want, double* e, double* dp, int h, int t) {
    size_t row = 3 * (size_t)p->C, C = (size_t)p->C;
    double D = 0, *dq = want + (size_t)t * row + (size_t)(h * p->HS), lse = softmax_in_double(e, p, h, t);
    *log_sum(p, h, t) = (float)lse;
    for (int u = 0; u <= t; u++) {
        P_row(p, h, t)[u] = (float)e[u];
        dp[u] = dot_in_double(dresult(p, h, t), value(p, h, u), p->HS);
        D += e[u] * dp[u];
    }
    for (int i = 0; i < p->HS; i++) {
        double out = 0;
        for (int u = 0; u <= t; u++) out += e[u] * (double)value(p, h, u)[i];
        result(p, h, t)[i] = (float)out;
    }
    for (int u = 0; u <= t; u++) {
        double ds = e[u] * (dp[u] - D) / sqrt(p->HS), *dk = want + (size_t)u * row + (size_t)(h * p->HS) + C;
        add_scaled_in_double(dq, ds, key(p, h, u), p->HS);
        add_scaled_in_double(dk, ds, query(p, h, t), p->HS);
        add_scaled_in_double(dk + C, e[u], dresult(p, h, t), p->HS); // dv
    }
}
static void make(Problem* p, Shape s) {
    make_heads(p, s);
    size_t T = (size_t)p->T, C = (size_t)p->C;
    p->out = floats(T * C);
    p->dout = random_floats(T * C, 0, 1);
    p->P = floats((size_t)p->NH * T * T);
    p->D = floats((size_t)p->NH * T);
    double* scratch = (double*)allocate((size_t)omp_get_max_threads() * 2 * T * sizeof(double));
    Output* dqkv = output("dqkv", &p->dqkv, T * 3 * C);
    for (size_t i = 0; i < dqkv->n; i++) dqkv->want[i] = 0;
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < p->NH; h++) {
        double* e = scratch + (size_t)omp_get_thread_num() * 2 * T;
        for (int t = 0; t < p->T; t++) query_in_double(p, dqkv->want, e, e + T, h, t);
    }
}
static double work(const Problem* p) { return 4.0 * p->T * (p->T + 1.0) * p->C; }
// dS is off by some roundings of dP, a sum of HS = 64 terms, and of D; the sums over T = 1024 of it by sqrt(T) = 32 more.
static float scale_of(const Problem* p) { return 1.0f / sqrtf((float)p->HS); }

// ---- 1: the formulas as they are printed ----
// One loop per formula, over the matrix that forward has stored and another one. Every sum is one chain; for dk and dv it goes
// down the columns of both matrices, T numbers a step.
static void naive_head(const Problem* p, int h, float* ds) {
    int T = p->T, HS = p->HS;
    for (int t = 0; t < T; t++) {
        float *row = ds + (size_t)t * T, *P = P_row(p, h, t), D = 0;
        for (int u = 0; u <= t; u++) {
            float dp = 0;
            for (int i = 0; i < HS; i++) dp += dresult(p, h, t)[i] * value(p, h, u)[i];
            row[u] = dp;
        }
        for (int u = 0; u <= t; u++) D += P[u] * row[u];
        for (int u = 0; u <= t; u++) row[u] = P[u] * (row[u] - D) * scale_of(p);
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < HS; i++) {
            float dq = 0, dk = 0, dv = 0;
            for (int u = 0; u <= t; u++) dq += ds[(size_t)t * T + u] * key(p, h, u)[i];
            for (int later = t; later < T; later++) dk += ds[(size_t)later * T + t] * query(p, h, later)[i];
            for (int later = t; later < T; later++) dv += P_row(p, h, later)[t] * dresult(p, h, later)[i];
            dquery(p, h, t)[i] = dq;
            dkey(p, h, t)[i] = dk;
            dvalue(p, h, t)[i] = dv;
        }
}
VARIANT(attention_backward_1_naive, "the (T,T) matrix from forward, a loop for each formula", 64) {
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < p->NH; h++) naive_head(p, h, scratch_of_thread(p));
}

// ---- 2: a query at a time ----
// Only one query's row of dS is needed at a time. Its parts of dk and dv are added to their rows as they come, and with the
// loops in this order everything goes along memory and may use vectors. Queries of a head add to the same dk and dv, so one
// thread has a whole head: fewer heads than cores leave cores idle. P still comes from memory, megabytes for each head.
static void clear_rows(const Problem* p, int h, int t) { // of dq, dk and dv; no earlier query sees this key
    float* rows[] = { dquery(p, h, t), dkey(p, h, t), dvalue(p, h, t) };
    for (int k = 0; k < 3; k++) memset(rows[k], 0, (size_t)p->HS * sizeof(float));
}
static void add_pair(const Problem* p, int h, int t, int u, float P, float ds) { // query t and key u
    add_scaled(dquery(p, h, t), ds, key(p, h, u), p->HS);
    add_scaled(dkey(p, h, u), ds, query(p, h, t), p->HS);
    add_scaled(dvalue(p, h, u), P, dresult(p, h, t), p->HS);
}
VARIANT(attention_backward_2_rows, "a query at a time: vectors", 64) {
    int HS = p->HS;
    float scale = scale_of(p);
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < p->NH; h++) {
        float* dp = scratch_of_thread(p);
        for (int t = 0; t < p->T; t++) {
            const float* P = P_row(p, h, t);
            float D = 0;
            clear_rows(p, h, t);
            for (int u = 0; u <= t; u++) dp[u] = dot(dresult(p, h, t), value(p, h, u), HS);
            for (int u = 0; u <= t; u++) D += P[u] * dp[u];
            for (int u = 0; u <= t; u++) add_pair(p, h, t, u, P[u], P[u] * (dp[u] - D) * scale);
        }
    }
}

// ---- 3: the probabilities computed again ----
// From q, k and one number for each row, the log of its sum: P[u] = exp(S[u] - stats[t]). Forward stores no matrix, so a long
// context can be trained at all; the price is a fifth product and the exponentials. And D = dout[t].out[t], because the sum over
// u of P[u] (dout[t].v[u]) is dout[t] times the sum of P[u] v[u].
static void probabilities_again(const Problem* p, int h, int t, float* P) { // P (t + 1)
    float scale = scale_of(p), lse = *log_sum(p, h, t);
    for (int u = 0; u <= t; u++) P[u] = scale * dot(query(p, h, t), key(p, h, u), p->HS);
    #pragma omp simd
    for (int u = 0; u <= t; u++) P[u] = exp_f32(P[u] - lse);
}
VARIANT(attention_backward_3_again, "no matrix: the probabilities computed again", 64) {
    int HS = p->HS;
    float scale = scale_of(p);
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < p->NH; h++) {
        float* P = scratch_of_thread(p);
        for (int t = 0; t < p->T; t++) {
            float D = dot(dresult(p, h, t), result(p, h, t), HS);
            clear_rows(p, h, t);
            probabilities_again(p, h, t, P);
            for (int u = 0; u <= t; u++)
                add_pair(p, h, t, u, P[u], P[u] * (dot(dresult(p, h, t), value(p, h, u), HS) - D) * scale);
        }
    }
}

// ---- 4: the owner of a row computes it ----
// Two passes: one adds up dq for each query, the other dk and dv for each key, over the queries that see it. No thread adds to
// another's row, so any thread may have any row of any head: enough work for every core even if there is a single head. The
// price: scores and dP are computed twice, seven products instead of five. A GPU that must not use atomics does it like this.
static void query_pass(Problem* p, int h, int t, float* P) {
    int HS = p->HS;
    float scale = scale_of(p), D = dot(dresult(p, h, t), result(p, h, t), HS), *dq = dquery(p, h, t);
    p->D[(size_t)h * p->T + t] = D;
    memset(dq, 0, (size_t)HS * sizeof(float));
    probabilities_again(p, h, t, P);
    for (int u = 0; u <= t; u++)
        add_scaled(dq, P[u] * (dot(dresult(p, h, t), value(p, h, u), HS) - D) * scale, key(p, h, u), HS);
}
static void key_pass(Problem* p, int h, int u, float* P) {
    int HS = p->HS, T = p->T;
    const float *lse = log_sum(p, h, 0), *D = p->D + (size_t)h * T;
    float scale = scale_of(p), *dk = dkey(p, h, u), *dv = dvalue(p, h, u);
    memset(dk, 0, (size_t)HS * sizeof(float));
    memset(dv, 0, (size_t)HS * sizeof(float));
    for (int t = u; t < T; t++) P[t] = scale * dot(query(p, h, t), key(p, h, u), HS);
    #pragma omp simd
    for (int t = u; t < T; t++) P[t] = exp_f32(P[t] - lse[t]);
    for (int t = u; t < T; t++) {
        add_scaled(dk, P[t] * (dot(dresult(p, h, t), value(p, h, u), HS) - D[t]) * scale, query(p, h, t), HS);
        add_scaled(dv, P[t], dresult(p, h, t), HS);
    }
}
VARIANT(attention_backward_4_owners, "the owner of a row computes it: some of it twice", 64) {
    #pragma omp parallel
    {
        #pragma omp for collapse(2) schedule(dynamic, 16)
        for (int h = 0; h < p->NH; h++)
            for (int t = 0; t < p->T; t++) query_pass(p, h, t, scratch_of_thread(p));
        #pragma omp for collapse(2) schedule(dynamic, 16)
        for (int h = 0; h < p->NH; h++)
            for (int u = 0; u < p->T; u++) key_pass(p, h, u, scratch_of_thread(p));
    }
}

// ---- 5: llmc/'s ----
// As 3, with 64 queries at a time, as in forward: all five products are oneDNN's, the two for dk and dv with beta = 1, which adds
// a block of queries to the blocks before it. One thread has a whole head.
VARIANT(attention_backward_5_llmc, "64 queries at a time, products by oneDNN", 64) {
    attention_backward(p->dqkv, p->dout, p->qkv, p->out, p->stats, 1, p->T, p->C, p->NH);
}

OPERATION("attention_backward", "rows are tokens of one sequence, cols channels", { 1024, 768, 0 }, { 77, 128, 0 }, true)
