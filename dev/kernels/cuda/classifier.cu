/*
classifier.cu - softmax and cross-entropy over the vocabulary, loss and gradient in one, in several kernels: for each of N rows
of V logits, loss = log(sum of exp(logit)) - logit[target], and the logits are overwritten by
dlogit = (exp(logit) / sum - onehot) * dloss.

A row is 100 KB in 16 bits, more than any register file's share and more than some shared memories. The gradient needs the
whole row's sum before its first element can be written, so the row must be kept or read again. The kernels differ in how often.
One read and one write are counted.
*/
#include "classifier_common.cuh"

struct Problem : ClassifierProblem<true> { using ClassifierProblem::ClassifierProblem; };

// ---- 1: what one would write first ----
// One row per thread: a thousand threads for a GPU that needs a hundred thousand, and neighbours read 100 KB apart.
VARIANT(classifier_1_naive, "one thread per row") { launch_passes<ThreadPerRow>(p, threads); }

// ---- 2: one block per row, three passes ----
// The maximum, the sum, the gradient: the row is read three times, though some of it perhaps from a cache.
VARIANT(classifier_2_three_passes, "one block per row: maximum, sum, gradient") {
    launch_passes<BlockPerRow>(p, threads);
}

// ---- 3: maximum and sum in one pass ----
// Online softmax: when the maximum grows, the sum so far is scaled down. Two reads, but with one element at a time each costs
// one more exponential.
VARIANT(classifier_3_online, "maximum and sum in one pass") {
    classifier_kernel<1, true><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

// ---- 4: 16 bytes a load ----
// The maximum is updated once per piece. llmc/ does this where a row does not fit in shared memory.
VARIANT(classifier_4_vectors, "the same, 16 bytes a load") {
    classifier_kernel<VEC, true><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

// ---- 5: llmc/'s ----
// The row is kept in shared memory, and read once. Then one or two blocks fill a multiprocessor, so they must be large to keep
// memory busy: llmc/ takes 1024 threads.
VARIANT(classifier_5_llmc, "the same, the row kept in shared memory") {
    size_t row_bytes = (size_t)p.Vp * sizeof(floatX);
    if (row_bytes + WARP * sizeof(float) > (size_t)cuda_layers.shared_bytes) return not_offered();
    auto kernel = classifier_kernel<VEC, true>;
    allow_shared_memory(kernel, row_bytes, "classifier_5_llmc");
    kernel<<<p.N, threads, row_bytes, compute_stream>>>(KERNEL_ARGUMENTS(p), true);
}

OPERATION("rows are tokens, cols the vocabulary", { 1024, 50257, 0 }, { 5, 301, 0 })
