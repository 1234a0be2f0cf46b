/*
sampler.h - from logits to a token, and from a token's bytes to a terminal.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "../base/common.h"

// Returns a float's bits as an unsigned number that orders as floats do (except NaN).
static inline uint32_t float_order(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Returns the order of the k-th largest of logits (V), 1 <= k <= V.
// Bisection over 32 bits: 32 passes that vectorise, and no sort.
static inline uint32_t kth_largest(const float* logits, int V, long long k) {
    uint32_t threshold = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        int at_least = 0;
        for (int i = 0; i < V; i++) at_least += float_order(logits[i]) >= (threshold | bit);
        if (at_least >= k) threshold |= bit;
    }
    return threshold;
}

// Samples from softmax(logits / temperature) over logits (V), among the top_k likeliest tokens only (0: among all; of
// equal ones at the edge the first). All randomness comes from u in [0,1). temperature 0: the likeliest token.
// Dies if a logit is NaN or none is finite. -Inf: never sampled.
static inline int sample_token(const float* logits, int V, double temperature, long long top_k, float u) {
    int best = 0;
    bool ordered = true;
    for (int i = 0; i < V; i++) {
        ordered &= logits[i] == logits[i];
        if (logits[i] > logits[best]) best = i;
    }
    require(ordered && isfinite(logits[best]), "cannot sample from logits with NaN or Inf: the model has diverged;"
            " go back to an earlier checkpoint, a smaller --lr may help");
    if (temperature == 0) return best;
    bool all = top_k <= 0 || top_k >= V;
    uint32_t edge = all ? 0 : kth_largest(logits, V, top_k); // no number has order 0
    long long at_edge = top_k;                               // how many of those on the edge belong to the top k
    for (int i = 0; i < V; i++) at_edge -= float_order(logits[i]) > edge;
    double sum = 0, target = 0;
    for (int pass = 0; pass < 2; pass++) { // first the sum of all weights, then up to the share u of it
        long long edge_left = at_edge;
        target = u * sum;
        sum = 0;
        for (int i = 0; i < V; i++) {
            uint32_t order = float_order(logits[i]);
            if (order < edge || (order == edge && edge_left-- <= 0)) continue;
            sum += exp(((double)logits[i] - (double)logits[best]) / temperature);
            if (pass == 1 && sum > target) return i;
        }
    }
    return best; // not reached: u < 1, and both passes add up the same numbers
}

// Prints text that comes in pieces, which may end inside a character, as byte-level tokens do. No output of a model can
// harm a terminal: control characters except newline and tab, and bytes that are not UTF-8, become U+FFFD.
typedef struct {
    char pending[4]; // (have) the bytes so far of a character that is not complete
    size_t have;
} TokenPrinter;

static inline void print_replacement(void) { fputs("\xEF\xBF\xBD", stdout); }

static inline void print_byte(TokenPrinter* p, unsigned char c) {
    p->pending[p->have++] = (char)c;
    size_t length = utf8_prefix(p->pending, p->have);
    bool control = p->have == 1 ? (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F
                                : p->have == 2 && (unsigned char)p->pending[0] == 0xC2 && c < 0xA0; // U+0080..U+009F
    if (length > p->have && !control) return;
    bool broken = length == 0 || control, begins_new = broken && p->have > 1; // c is no part of the character begun
    if (broken) print_replacement();
    else fwrite(p->pending, 1, length, stdout);
    p->have = 0;
    if (begins_new) print_byte(p, c);
}

// Prints bytes (n); a character that they leave incomplete waits for the next call.
static inline void print_token(TokenPrinter* p, const char* bytes, size_t n) {
    for (size_t i = 0; i < n; i++) print_byte(p, (unsigned char)bytes[i]);
}

// Ends a text: a character that is still incomplete becomes U+FFFD.
static inline void print_token_end(TokenPrinter* p) {
    if (p->have > 0) print_replacement();
    p->have = 0;
    fflush(stdout);
}
#endif
