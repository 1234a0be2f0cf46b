/*
classifier_forward.cu - the loss alone, as validation needs it, in several kernels: for each of N rows of V logits,
loss = log(sum of exp(logit)) - logit[target].

As classifier.cu, with nothing to write: no element waits for the whole row's sum, so none must be kept, and one pass is
enough. What remains is to read memory at its full rate, and to hide one exponential per element behind it.
*/
#include "classifier_common.cuh"

struct Problem : ClassifierProblem<false> { using ClassifierProblem::ClassifierProblem; };

// ---- 1: the formula as it is printed ----
// One thread per row, the maximum first: a thousand threads for a GPU that needs a hundred thousand, and neighbours read
// 100 KB apart.
VARIANT(classifier_forward_1_naive, "one thread per row") { launch_passes<ThreadPerRow>(p, threads); }

// ---- 2: one block per row, two passes ----
// Neighbours read neighbours, twice: the second time some of the row may still be in a cache.
VARIANT(classifier_forward_2_two_passes, "one block per row: the maximum, then the sum") {
    launch_passes<BlockPerRow>(p, threads);
}

// ---- 3: maximum and sum in one pass ----
// Online softmax: when the maximum grows, the sum so far is scaled down. One read, but with one element at a time each costs
// one more exponential. (llmc/'s kernel, with one element a load.)
VARIANT(classifier_forward_3_online, "maximum and sum in one pass") {
    classifier_kernel<1, false><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

// ---- 4: llmc/'s ----
// 16 bytes a load, and the maximum is updated once per piece. llmc/ takes 1024 threads, as for the gradient; here no
// row fills shared memory, so more than one block of a smaller size can be on a multiprocessor.
VARIANT(classifier_forward_4_llmc, "the same, 16 bytes a load") {
    classifier_kernel<VEC, false><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

OPERATION("rows are tokens, cols the vocabulary", { 1024, 50257, 0 }, { 5, 301, 0 })
