/*
experts_api.h - the layers around a mixture of experts: the router that chooses k of E experts for each token, and the
movement of tokens to their experts and back. The experts themselves are linear layers of layers_api.h.

Implemented by cpu/experts.h and cuda/experts.cuh; programs include experts.h, which picks one. Tensors are row-major in
device memory, calls are ordered like layer calls, and layers_init comes first. N is this rank's tokens, and may be 0.

Slot      Token t has k slots (t,j), one for each expert that it chose, in the order of falling probability.
Row       Each slot gets a row in the array of experts' inputs, in the order of (expert, t, j). places (N,k) holds the
          rows. A slot without a row is dropped and has place -1: it adds nothing and has no gradient.
Order     Sums over slots are formed in slot order, wherever the rows lie, and start with the first term instead of 0.
          So a token's results are the same bits for every layout, and one slot of weight 1 leaves every bit as it was.
Equal     Runs are equal to the bit, for any number of threads. No sum depends on a race.
NaN       A NaN or an infinity in a logit makes all probabilities of its token NaN. The choice is then arbitrary, but
          consists of k different experts.
*/
#ifndef LLMC_EXPERTS_API_H
#define LLMC_EXPERTS_API_H
#include "layers_api.h"

enum { EXPERTS_MOST = 256 }; // of E
// The checks of these functions on every device.
static inline void experts_check(int N, int E, int k) {
    invariant(E >= 1 && E <= EXPERTS_MOST, "a router has 1 to %d experts, not %d", EXPERTS_MOST, E);
    invariant(k >= 1 && k <= E, "a token cannot choose %d of %d experts", k, E);
    invariant(N >= 0 && N <= INT32_MAX / k, "%d tokens with %d experts each are more rows than can be counted", N, k);
}
static inline void experts_capacity_check(int E, int capacity) {
    invariant(capacity >= 0 && capacity <= INT32_MAX / E, "%d experts with a capacity of %d are more rows than can be "
                                                          "counted", E, capacity);
}

// ---- the router ----
// probs (N,E) = softmax(inp (N,C) w^T (E,C)); logits and probs are fp32. chosen (N,k): the experts with the largest
// probs + bias (E); bias NULL: none. Among equals the lower index wins. weights (N,k): the chosen experts' probs,
// divided by their sum if k > 1 (0 if that sum is 0). With k = 1 the quotient would always be 1 and the router would
// not learn, so the weight is the probability itself. The bias takes part in the choice only.
void router_forward(float* probs, int* chosen, float* weights, const floatX* inp, const floatX* w, const float* bias,
                    int N, int C, int E, int k);
// dlogits (N,E) from dweights (N,k); dinp (N,C) += dlogits w; dw (E,C) set or += dlogits^T inp. The choice is a
// constant: with k > 1 the weights move only the chosen experts' logits, with k = 1 every logit. balance (E), or NULL:
// the derivative of an auxiliary loss with respect to an expert's probability, the same for every token. It moves every
// logit. A logit whose gradient is 0 leaves dinp as it was, to the bit.
void router_backward(floatX* dinp, floatX* dw, float* dlogits, const float* dweights, const float* balance,
                     const float* probs, const int* chosen, const float* weights, const floatX* inp, const floatX* w,
                     int N, int C, int E, int k, GradMode mode);

// ---- rows: places and counts come from one call, everything else follows places ----
// counts (E): the slots of each expert, with those that are dropped. places (N,k). capacity 0: nothing is dropped, the
// rows of expert i follow those of expert i - 1, and there are N k. Otherwise expert i has rows [i capacity, (i + 1)
// capacity), and slots that exceed them are dropped: the last ones in token order, so no token affects earlier ones.
void experts_sort(int* counts, int* places, const int* chosen, int N, int E, int k, int capacity);
// out (rows,C): row places[t,j] = inp[t] (N,C). A row that no slot has is 0.
void experts_permute_forward(floatX* out, const floatX* inp, const int* places, int rows, int N, int C, int k);
// dinp (N,C) = the sum of dout (rows,C) over a token's slots, rounded once; 0 if all were dropped
void experts_permute_backward(floatX* dinp, const floatX* dout, const int* places, int N, int C, int k);
// out (N,C) = the sum over a token's slots of weights (N,k) times y (rows,C), rounded once; 0 if all were dropped
void experts_combine_forward(floatX* out, const floatX* y, const float* weights, const int* places, int N, int C,
                             int k);
// dy (rows,C): row places[t,j] = weights[t,j] dout[t]. A row that no slot has is 0, so experts' weights get no gradient
// from it. dweights (N,k) = the product of dout[t] (N,C) and that row of y; 0 if the slot was dropped.
void experts_combine_backward(floatX* dy, float* dweights, const floatX* dout, const floatX* y, const float* weights,
                              const int* places, int rows, int N, int C, int k);
#endif
