/*
data.h - the reference of data parallelism. A stage for one device that is compiled with -include test/split/data.h and
-DPARTS=N computes with batches of N*B sequences, to the bit, what N ranks with batches of B compute under --deterministic.

Every layer is called once for each rank's rows. Each part has memory of its own for the gradients of all parameters, where
they are added up over the micro-batches of a step, as on a rank. When the gradients' norm is computed, and nobody has read
them yet, their sums over the parts take their place: in rank order, in fp32, rounded once to floatX. The sum of the losses
is made likewise, in double.

-DPARTS_REVERSED=1 adds gradients up in the opposite order, which gives other bits if there are more than two parts.
Both may be expressions that are computed when the program runs. DATA_PARTS replaces PARTS where tensor.h is included, too;
include that one first.
*/
#ifndef SPLIT_DATA_H
#define SPLIT_DATA_H
#include "split.h"
#ifndef DATA_PARTS
#define DATA_PARTS PARTS
#endif
#ifndef PARTS_REVERSED
#define PARTS_REVERSED 0
#endif
// What a part calls: tensor.h's version of a layer if there is one, else the layer.
#ifdef SPLIT_TENSOR_H
#define DATA_LAYER(name) tensor_##name
#else
#define DATA_LAYER(name) name
#endif

// The gradient of a parameter, which its layer has been given as `sum`, and what the parts have instead.
typedef struct {
    floatX* sum;   // (n) a view of the stage's memory
    floatX* parts; // (N,n) owned, never freed
    size_t n;
} DataGradient;
static struct {
    int parts;              // of the batch that is being computed: N, or 1 for a single sequence, as samples have
    DataGradient* gradients; // (num_gradients) owned, never freed
    int num_gradients;
    double* losses;         // (N) each part's sum of losses in this step, owned, never freed
} split_data;

// Rows of each part, of `rows` in all.
static inline int data_rows(int rows) {
    require(split_data.parts > 0 && rows % split_data.parts == 0, "%d rows do not divide into %d parts", rows, split_data.parts);
    return rows / split_data.parts;
}

// Part q's memory for the gradient (n) that goes to sum.
static inline floatX* data_gradient(floatX* sum, size_t n, int q) {
    if (sum == NULL) return NULL;
    for (int i = 0; i < split_data.num_gradients; i++) {
        DataGradient g = split_data.gradients[i];
        if (g.sum != sum) continue;
        require(g.n == n, "a gradient had %zu elements and has %zu now", g.n, n);
        return g.parts + (size_t)q * n;
    }
    size_t count = (size_t)split_data.num_gradients++;
    split_data.gradients = (DataGradient*)xrealloc(split_data.gradients, (count + 1) * sizeof(DataGradient));
    DataGradient g = { sum, (floatX*)split_alloc((size_t)split_data.parts * n * sizeof(floatX)), n };
    split_data.gradients[count] = g;
    return g.parts + (size_t)q * n;
}

// ---- layers ----
static inline void data_encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C) {
    split_data.parts = B == 1 ? 1 : DATA_PARTS;
    require(split_data.parts > 0 && B % split_data.parts == 0, "--batch-size %d does not divide into %d parts", B, split_data.parts);
    int b = B / split_data.parts;
    for (int q = 0; q < split_data.parts; q++) {
        size_t row = (size_t)q * (size_t)(b * T);
        encoder_forward(out + row * (size_t)C, tokens + row, wte, wpe, b, T, C);
    }
}
static inline void data_encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                                         size_t wte_elements, GradMode mode) {
    int b = data_rows(B);
    for (int q = 0; q < split_data.parts; q++) {
        size_t row = (size_t)q * (size_t)(b * T);
        encoder_backward(data_gradient(dwte, wte_elements, q), data_gradient(dwpe, (size_t)T * (size_t)C, q), dout + row * (size_t)C,
                         tokens + row, b, T, C, mode);
    }
}
