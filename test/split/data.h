/*
data.h - the reference of data parallelism. A program for one device that is compiled with -include test/split/data.h and -DDATA_PARTS=N
computes with batches of N*B sequences, to the bit, what N ranks with batches of B compute under --deterministic.

Every layer is called once for each rank's rows. Each part has memory of its own for the gradients of all parameters, where they are added
up over the micro-batches of a step, as on a rank. When the gradients' norm is computed, before anything else reads them, their sums over
the parts take their place: in rank order, in fp32, rounded once to floatX. The sum of the losses is made likewise, in double.

DATA_PARTS may be an expression that is computed when the program runs. Where tensor.h and tied.h are included as well, include them first.
*/
#ifndef SPLIT_DATA_H
#define SPLIT_DATA_H
#include "split.h"
// What a part calls: tensor.h's version of a layer if there is one, else the layer.
#ifdef SPLIT_TENSOR_H
#define DATA_LAYER(name) tensor_##name
#else
#define DATA_LAYER(name) name
#endif

// The classifier's gradient of its weights, likewise: tied.h's version if there is one.
#ifdef SPLIT_TIED_H
#define DATA_WEIGHT_CHUNK tied_matmul_backward_weight_chunk
#else
#define DATA_WEIGHT_CHUNK DATA_LAYER(matmul_backward_weight_chunk)
#endif

static struct {
    int parts;                // of the batch that is being computed: N, but 1 for a single sequence, as samples have
    SplitGradients gradients; // of all parameters: what each part has, (N,n)
    double* losses;           // (N) on the device: each part's sum of losses in this step, owned, never freed
} split_data;

// ---- parts ----
// Some rows of part q, which has `rows_of_part`, `done` of them before these. A walk through N rows goes part by part, and within a part
// by `most` rows at a time.
typedef struct { int q, done, rows, rows_of_part; size_t first; } DataSpan;
static inline DataSpan data_span(int N, int most, size_t first) {
    require(split_data.parts > 0 && N % split_data.parts == 0, "%d rows do not divide into %d parts", N, split_data.parts);
    int n = N / split_data.parts, done = (int)first % n, left = (int)first == N ? 0 : n - done;
    DataSpan s = { (int)first / n, done, left < most ? left : most, n, first };
    return s;
}
#define FOR_ROWS(s, N, most) for (DataSpan s = data_span(N, most, 0); s.rows > 0; s = data_span(N, most, s.first + (size_t)s.rows))
#define FOR_PARTS(s, N) FOR_ROWS(s, N, N)
// The classifier takes fewer rows at a time if they are many. A rank's chunks depend on how many it has.
static inline int data_classifier_rows(int N, int Vp) { return classifier_rows(N / split_data.parts, Vp); }
static inline int data_matmul_rows(int N, int OC) { return split_role == ROLE_WTE ? data_classifier_rows(N, OC) : N; }

// ---- gradients ----
// Part q's memory for the gradient (n) that goes to sum. n 0: a gradient that has memory already.
static inline floatX* data_gradient(floatX* sum, size_t n, int q) {
    if (sum == NULL) return NULL;
    require(split_data.parts == DATA_PARTS, "a batch of one sequence does not divide into %d parts", DATA_PARTS);
    SplitGradient* g = split_gradient(&split_data.gradients, sum, n, DATA_PARTS);
    return g->apart + (size_t)q * g->n;
}

// Where x (n) are gradients, they become their sums over the parts first.
static inline void data_add_sum_squares(double* acc, const floatX* x, size_t n) {
    for (int i = 0; i < split_data.gradients.num; i++) {
        SplitGradient g = split_data.gradients.all[i];
        if (!split_is_in(&g, x, n)) continue;
        require(g.in_program + g.n <= x + n, "a gradient lies in two pieces of memory");
#ifdef SPLIT_TIED_H
        tied_meet(g.apart, (size_t)DATA_PARTS * g.n);
#endif
        split_sum(g.in_program, g.apart, DATA_PARTS, g.n);
    }
    add_sum_squares(acc, x, n);
}

// *acc becomes the sum over the parts, in rank order, of what each has added up since *acc was 0.
static inline void data_add_sum(double* acc, const float* x, size_t n) {
    size_t parts = (size_t)split_data.parts;
    double total, *host = (double*)xcalloc(parts, sizeof(double));
    if (split_data.losses == NULL) split_data.losses = (double*)split_alloc((size_t)DATA_PARTS * sizeof(double));
    device_to_host(&total, acc, sizeof total);
    if (total == 0) device_zero(split_data.losses, parts * sizeof(double));
    for (size_t q = 0; q < parts; q++) add_sum(split_data.losses + q, x + q * (n / parts), n / parts);
    device_to_host(host, split_data.losses, parts * sizeof(double));
    total = host[0];
    for (size_t q = 1; q < parts; q++) total += host[q];
    host_to_device(acc, &total, sizeof total);
    device_synchronize(); // the copy reads total
    free(host);
}

// ---- layers: each as in layers.h ----
static inline void data_encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C) {
    split_data.parts = B == 1 ? 1 : DATA_PARTS;
    FOR_PARTS(s, B) encoder_forward(out + s.first * T * C, tokens + s.first * T, wte, wpe, s.rows, T, C);
}
static inline void data_encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens,
                                         int B, int T, int C, GradMode mode) {
    FOR_PARTS(s, B) {
        floatX *part_dwte = data_gradient(dwte, 0, s.q), *part_dwpe = data_gradient(dwpe, (size_t)T * C, s.q);
        encoder_backward(part_dwte, part_dwpe, dout + s.first * T * C, tokens + s.first * T, s.rows, T, C, mode);
    }
}
static inline void data_residual_layernorm_forward(floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                                   const floatX* inp2, const floatX* w, const floatX* b, int N, int C) {
    FOR_PARTS(s, N) {
        size_t i = s.first, at = i * C;
        const floatX* part_inp2 = inp2 ? inp2 + at : NULL;
        residual_layernorm_forward(res + at, out + at, mean + i, rstd + i, inp1 + at, part_inp2, w, b, s.rows, C);
    }
}
static inline void data_layernorm_backward(floatX* dinp, floatX* dw, floatX* db, const floatX* dout,
                                           const floatX* inp, const floatX* w, const float* mean, const float* rstd,
                                           int N, int C, GradMode mode) {
    FOR_PARTS(s, N) {
        size_t i = s.first, at = i * C;
        floatX *part_dw = data_gradient(dw, (size_t)C, s.q), *part_db = data_gradient(db, (size_t)C, s.q);
        layernorm_backward(dinp + at, part_dw, part_db, dout + at, inp + at, w, mean + i, rstd + i, s.rows, C, mode);
    }
}
static inline void data_matmul_forward(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    FOR_ROWS(s, N, data_matmul_rows(N, OC)) DATA_LAYER(matmul_forward)(out + s.first * OC, inp + s.first * C, w, bias, s.rows, C, OC);
}
static inline void data_matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* w,
                                            const floatX* bias, int N, int C, int OC) {
    FOR_PARTS(s, N) DATA_LAYER(matmul_gelu_forward)(out + s.first * OC, pre + s.first * OC, inp + s.first * C, w, bias, s.rows, C, OC);
}
static inline void data_matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* w, int N, int C, int OC) {
    FOR_ROWS(s, N, data_matmul_rows(N, OC)) DATA_LAYER(matmul_backward_input)(dinp + s.first * C, dout + s.first * OC, w, s.rows, C, OC);
}
static inline void data_matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* w, const floatX* pre,
                                                   int N, int C, int OC) {
    FOR_PARTS(s, N)
        DATA_LAYER(matmul_gelu_backward_input)(dinp + s.first * C, dout + s.first * OC, w, pre + s.first * C, s.rows, C, OC);
}
static inline void data_matmul_backward_weight(floatX* dw, floatX* dbias, const floatX* dout, const floatX* inp,
                                               int N, int C, int OC, GradMode mode) {
    FOR_ROWS(s, N, data_matmul_rows(N, OC)) {
        floatX *part_dw = data_gradient(dw, (size_t)OC * C, s.q), *part_dbias = data_gradient(dbias, (size_t)OC, s.q);
        GradMode part_mode = s.done == 0 ? mode : GRAD_ADD;
        DATA_LAYER(matmul_backward_weight)(part_dw, part_dbias, dout + s.first * OC, inp + s.first * C, s.rows, C, OC, part_mode);
    }
}
// The program has one chunk, which is cut as each rank cuts its rows.
static inline void data_matmul_backward_weight_chunk(floatX* dw, const floatX* dout, const floatX* inp, int row, int n, int N,
                                                     int C, int OC, GradMode mode) {
    require(row == 0 && n == N, "rows %d to %d of %d at once, not all", row, row + n, N);
    FOR_ROWS(s, N, data_matmul_rows(N, OC)) {
        floatX* part_dw = data_gradient(dw, (size_t)OC * C, s.q);
        DATA_WEIGHT_CHUNK(part_dw, dout + s.first * OC, inp + s.first * C, s.done, s.rows, s.rows_of_part, C, OC, mode);
    }
}
static inline void data_attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
    FOR_PARTS(s, B) {
        size_t row = s.first * T;
        DATA_LAYER(attention_forward)(out + row * C, stats + row * NH, qkv + row * 3 * C, s.rows, T, C, NH);
    }
}
static inline void data_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                           const float* stats, int B, int T, int C, int NH) {
    FOR_PARTS(s, B) {
        size_t row = s.first * T, at = row * C;
        DATA_LAYER(attention_backward)(dqkv + 3 * at, dout + at, qkv + 3 * at, out + at, stats + row * NH, s.rows, T, C, NH);
    }
}
static inline void data_classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp) {
    FOR_ROWS(s, N, data_classifier_rows(N, Vp))
        DATA_LAYER(classifier_forward)(losses + s.first, logits + s.first * Vp, targets + s.first, s.rows, V, Vp);
}
static inline void data_classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp) {
    FOR_ROWS(s, N, data_classifier_rows(N, Vp))
        DATA_LAYER(classifier_forward_backward)(losses + s.first, logits + s.first * Vp, targets + s.first, dloss, s.rows, V, Vp);
}

// ---- what the program calls ----
#undef SPLIT_CALL
#undef matmul_backward_weight_chunk // tied.h's, as are the next two
#undef encoder_backward
#undef add_sum_squares
#define SPLIT_CALL(name) data_##name
#include "calls.h"
#define encoder_forward data_encoder_forward
#define encoder_backward data_encoder_backward
#define residual_layernorm_forward data_residual_layernorm_forward
#define layernorm_backward data_layernorm_backward
#define classifier_rows(N, Vp) (N) // the whole batch in one chunk, which is cut as each rank cuts its own
#define add_sum data_add_sum
#define add_sum_squares data_add_sum_squares
#endif
