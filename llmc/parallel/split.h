/*
split.h - which blocks are in which chunk of a pipeline.

blocks (p*v) lists the number of blocks of each chunk, in the model's order; chunk g is on rank g % p (pipeline.h).
All stages wait for the slowest, so what counts is the largest cost of a rank. Costs are in blocks. The head's matrix
product costs Vp/(12C) of them: 2 Vp C FLOPs a token, where a block has 24 C^2 (its attention, which grows with T, is
left out). That is 5.5 of GPT-2 124M, which has 12: split evenly, 2, 4, 8 stages compute for 76, 52, 34 % of the time
even without a bubble, and split by cost for 97, 80, 40 %.
*/
#ifndef LLMC_SPLIT_H
#define LLMC_SPLIT_H
#include "../base/common.h"

// The cost, in blocks, of the other layers in the first and the last chunk. Looking up embeddings costs almost nothing.
typedef struct { double embedding, head; } SplitCosts;
static inline SplitCosts split_costs(int Vp, int C) {
    SplitCosts costs = { 0, Vp / (12.0 * C) };
    return costs;
}

// Dies if there are too few blocks: only the last chunk, which has the head, may have none. option: the one that asks
// for p stages.
static inline void split_check(const char* option, int L, int p, int v) {
    require(p * v <= L, "%s%d with --chunks %d makes %d parts of the model, more than its %d block%s; lower"
            " one of them, or choose --layers %d", option, p, v, p * v, L, L == 1 ? "" : "s", p * v);
}

// Returns the cost of chunk number g of `chunks`, and of all chunks of a rank.
static inline double chunk_cost(const int* blocks, int g, int chunks, SplitCosts costs) {
    return blocks[g] + (g == 0 ? costs.embedding : 0) + (g == chunks - 1 ? costs.head : 0);
}
static inline double rank_cost(const int* blocks, int rank, int p, int v, SplitCosts costs) {
    double sum = 0;
    for (int c = 0; c < v; c++) sum += chunk_cost(blocks, c * p + rank, p * v, costs);
    return sum;
}

// Returns the share of the time in which ranks compute if there is no bubble: their mean cost divided by the largest.
static inline double split_efficiency(const int* blocks, int p, int v, SplitCosts costs) {
    double sum = 0, largest = 0;
    for (int r = 0; r < p; r++) {
        double cost = rank_cost(blocks, r, p, v, costs);
        sum += cost;
        largest = fmax(largest, cost);
    }
    return sum / (p * largest);
}

// Overwrites blocks (p*v) with equal numbers; the first ones are larger by one if they must be.
static inline void split_even(int* blocks, int L, int p, int v) {
    split_check("--pipeline-parallel ", L, p, v);
    for (int g = 0; g < p * v; g++) blocks[g] = L / (p * v) + (g < L % (p * v));
}

// Overwrites blocks (p*v) so that the largest cost of a rank is as small as it can be: block after block goes to the
// rank that has the least to do, and there to the chunk that has. Of equal ranks the earlier one gets it: in 1f1b the
// first forward passes of a slow early stage are done while later stages have nothing to do yet.
static inline void split_auto(int* blocks, int L, int p, int v, SplitCosts costs) {
    split_check("--pipeline-parallel ", L, p, v);
    int last = p * v - 1;
    for (int g = 0; g <= last; g++) blocks[g] = g < last;
    for (int left = L - last; left > 0; left--) {
        int rank = 0;
        for (int r = 1; r < p; r++)
            if (rank_cost(blocks, r, p, v, costs) < rank_cost(blocks, rank, p, v, costs)) rank = r;
        int least = rank; // a chunk's number
        for (int g = rank; g <= last; g += p)
            if (chunk_cost(blocks, g, p * v, costs) <= chunk_cost(blocks, least, p * v, costs)) least = g;
        blocks[least]++;
    }
}

// Overwrites blocks (p*v) with the numbers in --split's text, such as "9,3".
static inline void split_parse(int* blocks, const char* text, int L, int p, int v) {
    int n = p * v, sum = 0;
    const char* at = text;
    for (int g = 0; g < n; g++) {
        char* end = NULL;
        errno = 0;
        long x = isdigit((unsigned char)*at) ? strtol(at, &end, 10) : -1;
        bool good = x >= (g < n - 1) && x <= L && errno == 0 && *end == (g < n - 1 ? ',' : '\0');
        require(good, "--split %s is not auto, nor %d numbers with commas between: the blocks of each part of the"
                " model in order, at least 1, and only in the last part 0", text, n);
        blocks[g] = (int)x;
        sum += blocks[g];
        at = end + 1;
    }
    require(sum == L, "--split %s adds up to %d blocks, and the model has %d; its %d numbers must add up to that",
            text, sum, L, n);
}

// Overwrites blocks (p*v) by --split's text.
static inline void split_blocks(int* blocks, const char* text, int L, int p, int v, SplitCosts costs) {
    if (strcmp(text, "auto") == 0) split_auto(blocks, L, p, v, costs);
    else split_parse(blocks, text, L, p, v);
}
#endif
