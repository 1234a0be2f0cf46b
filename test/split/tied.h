/*
tied.h - the reference of pipeline parallelism. A program that is compiled with -include test/split/tied.h computes, to the bit, what the
ranks of a pipeline compute with as many micro-batches, whatever the schedule: train_gpt2_single for one replica of the model,
train_gpt2_ddp for several.

wte is tied. One device adds the gradients of the embedding and of the head up in one memory, micro-batch after micro-batch, one after the
other. A pipeline has them on two ranks: each adds its own up, and at the end of the step the two sums are added. Here the embedding's
gradient has memory of its own, which is added when the gradients' norm is computed, or before they are summed over ranks.

With other headers of this folder, include it after tensor.h and before data.h: each part then has an embedding of its own, which is added
to its head before the parts are summed.

-DTIED_EARLY=1 adds it after each micro-batch, as one device does, to see that tests notice the difference. -DTIED_APART=0 changes
nothing, so that one program also serves meshes of one stage.
*/
#ifndef SPLIT_TIED_H
#ifdef SPLIT_DATA_H
#error "include tied.h before data.h"
#endif
#define SPLIT_TIED_H
#include "../../llmc/comm/comm.h"
#include "split.h"
#ifndef TIED_EARLY
#define TIED_EARLY 0
#endif
#ifndef TIED_APART
#define TIED_APART 1
#endif

static SplitGradients split_tied; // of wte, of the program or of a part of its batch: the head's is the program's, the embedding's is apart

// The two sums meet if the head's lies in x (n).
static inline void tied_meet(const floatX* x, size_t n) {
    for (SplitGradient* g = split_tied.all; g < split_tied.all + split_tied.num; g++) {
        if (!g->waits || !split_is_in(g, x, n)) continue;
        add_in_place(g->in_program, g->apart, g->n);
        g->waits = false;
    }
}

// ---- layers and operations, each as in layers.h or comm.h ----
// (tensor.h asks for the name of the weights.)
static inline void tied_matmul_backward_weight_chunk(floatX* dwte, const floatX* dout, const floatX* inp, int row, int n,
                                                     int N, int C, int OC, GradMode mode) {
    split_gradient(&split_tied, dwte, (size_t)OC * (size_t)C, 1);
    matmul_backward_weight_chunk(dwte, dout, inp, row, n, N, C, OC, mode);
}
static inline void tied_encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens,
                                         int B, int T, int C, GradMode mode) {
    if (!TIED_APART) { encoder_backward(dwte, dwpe, dout, tokens, B, T, C, mode); return; }
    SplitGradient* g = split_gradient(&split_tied, dwte, 0, 1);
    if (mode == GRAD_SET || TIED_EARLY) device_zero(g->apart, g->n * sizeof(floatX));
    encoder_backward(g->apart, dwpe, dout, tokens, B, T, C, mode);
    g->waits = true;
    if (TIED_EARLY) tied_meet(dwte, 1);
}
static inline void tied_add_sum_squares(double* acc, const floatX* x, size_t n) {
    tied_meet(x, n);
    add_sum_squares(acc, x, n);
}
static inline CommOp tied_all_reduce(Comm* c, void* buf, size_t n, CommType t) {
    if (t == COMM_FLOATX) tied_meet((const floatX*)buf, n);
    return comm_all_reduce(c, buf, n, t);
}
#undef matmul_backward_weight_chunk // tensor.h's
#define matmul_backward_weight_chunk tied_matmul_backward_weight_chunk
#define encoder_backward tied_encoder_backward
#define add_sum_squares tied_add_sum_squares
#undef comm_all_reduce // comm.h's, which says who calls
#define comm_all_reduce tied_all_reduce
#endif
