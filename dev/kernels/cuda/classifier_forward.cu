/*
classifier_forward.cu - the loss alone, as validation needs it, in several kernels: for each of N rows of V logits,
loss = log(sum of exp(logit)) - logit[target].

Like classifier.cu, but without a gradient to write. No element has to be kept until the sum of its row is known, so one pass is
enough. The task is to read memory at its full rate, and to hide one exponential per element behind it.
*/
#include "classifier_common.cuh"

struct Problem : ClassifierProblem<false> { using ClassifierProblem::ClassifierProblem; };

// ---- 1: the formula as it is printed ----
// One thread per row, the maximum first. These are a thousand threads for a GPU that needs a hundred thousand, and neighbours
// read 100 KB apart.
VARIANT(classifier_forward_1_naive, "one thread per row") { launch_passes<ThreadPerRow>(p, threads); }

// ---- 2: one block per row, two passes ----
// Neighbouring threads read neighbouring elements, twice. The second time, part of the row may still be in a cache.
VARIANT(classifier_forward_2_two_passes, "one block per row: the maximum, then the sum") {
    launch_passes<BlockPerRow>(p, threads);
}

// ---- 3: maximum and sum in one pass ----
// Online softmax: when the maximum grows, the sum so far is scaled down. Memory is read once, but each
// element costs a second exponential. (llmc/'s kernel, with one element a load.)
VARIANT(classifier_forward_3_online, "maximum and sum in one pass") {
    classifier_kernel<1, false><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

// ---- 4: llmc/'s ----
// Loads are 16 bytes, and the maximum is updated once per load. llmc/ takes 1024 threads, as for the gradient. Rows are not
// kept in shared memory, so a multiprocessor can run several smaller blocks.
VARIANT(classifier_forward_4_llmc, "the same, 16 bytes a load") {
    classifier_kernel<VEC, false><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

OPERATION("rows are tokens, cols the vocabulary", { 1024, 50257, 0 }, { 5, 301, 0 })
