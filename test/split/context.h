/*
context.h - the reference of context parallelism, after data.h. With -DCONTEXT_PARTS=c and -DDATA_PARTS=N a program for one device computes,
to the bit, what train_gpt2_cp computes on N ranks, of which c share each sequence, with --deterministic.

Rows lie as ranks have them, (N,pieces,B,P), so that data.h's parts are the ranks' rows. Here are the layers that know positions.
-DCONTEXT_PIECES=2 is --cp-balance zigzag. -DCONTEXT_WAY is --cp, by number:

  0, ulysses    attention is that of whole sequences
  1, allgather  each rank's queries attend to its own keys first, then to those of the ranks above it. The terms that ranks have of a
                key's gradient are added in rank order,
  2, ring       or from the rank below the key's own downwards, and its own last

All three may be expressions that are computed when the program runs. With 1, 1 and 0 nothing changes, nor do batches of one sequence.
*/
#ifndef SPLIT_DATA_H
#error "include data.h before context.h"
#endif
#include "../../llmc/run/run.h" // calls host_to_device, the layer's

static struct { int c, pieces, d, B, P; } split_context; // of the batch that is being computed: d groups of c ranks with B sequences each

#define FOR_PIECES(k, r, i) for (int k = 0; k < split_context.d; k++) for (int r = 0; r < split_context.c; r++) \
    for (int i = 0; i < split_context.pieces; i++)
static inline int context_part_chunk(int r, int i) { return i == 0 ? r : 2*split_context.c - 1 - r; }
// The first row of piece i of rank r of group k.
static inline size_t context_at(int k, int r, int i) {
    return (size_t)(((k * split_context.c + r) * split_context.pieces + i) * split_context.B * split_context.P);
}
// parts (N,pieces,B,P) = whole (dB,T), rows of so many bytes; or the other way round
static inline void context_move(void* parts, void* whole, size_t bytes, bool to_parts) {
    size_t n = (size_t)split_context.P * bytes, chunks = (size_t)(split_context.c * split_context.pieces);
    FOR_PIECES(k, r, i) for (int b = 0; b < split_context.B; b++) {
        char* part = (char*)parts + context_at(k, r, i) * bytes + (size_t)b * n;
        char* row = (char*)whole + ((size_t)(k * split_context.B + b) * chunks + (size_t)context_part_chunk(r, i)) * n;
        device_copy(to_parts ? part : row, to_parts ? row : part, n);
    }
}
// A copy in the other order. Free it.
static inline floatX* context_whole(const floatX* parts, size_t N, int width) {
    floatX* whole = (floatX*)split_alloc(N * (size_t)width * sizeof(floatX));
    context_move((void*)parts, whole, (size_t)width * sizeof(floatX), false);
    return whole;
}

// ---- as in device.h and layers.h ----
static inline void context_load_tokens(int* out, const int* tokens, int B, int T) {
    int c = B == 1 ? 1 : CONTEXT_PARTS, pieces = B == 1 ? 1 : CONTEXT_PIECES, d = B == 1 ? 1 : DATA_PARTS / c;
    size_t bytes = (size_t)B * (size_t)T * sizeof(int);
    int* whole = (int*)split_alloc(bytes);
    require(B % d == 0 && T % (c * pieces) == 0, "%d sequences of %d tokens do not divide over %d groups of %d ranks", B, T, d, c);
    split_context.c = c, split_context.pieces = pieces, split_context.d = d;
    split_context.B = B / d, split_context.P = T / (c * pieces);
    split_data.parts = d * c;
    host_to_device(whole, tokens, bytes);
    context_move(out, whole, sizeof(int), true);
    split_free(whole);
}
#undef encoder_forward // data.h's
static inline void context_encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C) {
    if (split_context.c * split_context.pieces == 1) { data_encoder_forward(out, tokens, wte, wpe, B, T, C); return; }
    int P = split_context.P;
    FOR_PIECES(k, r, i) {
        size_t at = context_at(k, r, i);
        encoder_forward(out + at * C, tokens + at, wte, wpe + (size_t)(context_part_chunk(r, i) * P * C), split_context.B, P, C);
    }
}
#undef encoder_backward // data.h's
static inline void context_encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens,
                                            int B, int T, int C, GradMode mode) {
    if (split_context.c * split_context.pieces == 1) { data_encoder_backward(dwte, dwpe, dout, tokens, B, T, C, mode); return; }
    int P = split_context.P;
    FOR_PIECES(k, r, i) {
        size_t at = context_at(k, r, i), q = (size_t)(k * split_context.c + r), n = (size_t)T * C;
        floatX *part_dwte = data_gradient(dwte, 0, (int)q), *part_dwpe = data_gradient(dwpe, n, (int)q);
        if (mode == GRAD_SET && i == 0) device_zero(part_dwpe, n * sizeof(floatX));
        encoder_backward(part_dwte, part_dwpe + (size_t)(context_part_chunk(r, i) * P * C), dout + at * C, tokens + at,
                         split_context.B, P, C, mode);
    }
}

// kv (N,2C) of qkv (N,3C). Free it.
static inline floatX* context_kv(const floatX* qkv, size_t N, int C) {
    size_t row = (size_t)C * sizeof(floatX);
    floatX* kv = (floatX*)split_alloc(N * 2*row);
    device_copy_rows(kv, 2*row, qkv + C, 3*row, 2*row, N);
    return kv;
}
// What rank r's piece j sees, in order: those pieces i of the ranks r, r+1, ... that are not later than it.
#define FOR_KEYS(r, j, u, i) for (int s_ = 0, u = r; s_ < split_context.c; s_++, u = (r + s_) % split_context.c) \
    for (int i = 0; i < split_context.pieces; i++) if (context_part_chunk(u, i) <= context_part_chunk(r, j))

#undef attention_forward // data.h's
static inline void context_attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
    size_t N = (size_t)B * (size_t)T;
    if (split_context.c * split_context.pieces == 1) { data_attention_forward(out, stats, qkv, B, T, C, NH); return; }
    if (CONTEXT_WAY == 0) {
        floatX *whole = context_whole(qkv, N, 3*C), *whole_out = (floatX*)split_alloc(N * (size_t)C * sizeof(floatX));
        attention_forward(whole_out, stats, whole, B, T, C, NH);
        context_move(out, whole_out, (size_t)C * sizeof(floatX), true);
        split_free(whole); split_free(whole_out);
        return;
    }
    floatX* kv = context_kv(qkv, N, C);
    float* sum = (float*)split_alloc(N * (size_t)C * sizeof(float));
    FOR_PIECES(k, r, j) FOR_KEYS(r, j, u, i) {
        size_t q = context_at(k, r, j);
        attention_part_forward(sum + q*C, stats + q*NH, qkv + 3*q*C, kv + 2 * context_at(k, u, i) * C,
                               r == u && i == j, r != u || i > 0, split_context.B, split_context.P, C, NH);
    }
    from_fp32(out, sum, N * (size_t)C);
    split_free(kv); split_free(sum);
}
#undef attention_backward // data.h's
static inline void context_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                                              int B, int T, int C, int NH) {
    int c = split_context.c;
    size_t N = (size_t)B * (size_t)T, row = (size_t)C * sizeof(floatX), n = N * 2 * (size_t)C, of_rank = n / (size_t)(c * split_context.d);
    if (c * split_context.pieces == 1) { data_attention_backward(dqkv, dout, qkv, out, stats, B, T, C, NH); return; }
    floatX *kv = context_kv(qkv, N, C), *rounded = (floatX*)split_alloc(3*N * row);
    if (CONTEXT_WAY == 0) {
        floatX *whole = context_whole(qkv, N, 3*C), *whole_out = context_whole(out, N, C), *whole_dout = context_whole(dout, N, C);
        attention_backward(rounded, whole_dout, whole, whole_out, stats, B, T, C, NH);
        context_move(dqkv, rounded, 3*row, true);
        split_free(kv); split_free(rounded); split_free(whole); split_free(whole_out); split_free(whole_dout);
        return;
    }
    float *dq = (float*)split_alloc(N * (size_t)C * sizeof(float)), *dkv = (float*)split_alloc(n * sizeof(float));
    float* terms = (float*)split_alloc((size_t)c * n * sizeof(float)); // (c,N,2C)
    FOR_PIECES(k, r, j) FOR_KEYS(r, j, u, i) {
        size_t q = context_at(k, r, j), key = 2 * context_at(k, u, i) * C;
        attention_part_backward(dq + q*C, terms + (size_t)r * n + key, dout + q*C, qkv + 3*q*C, kv + key, out + q*C, stats + q*NH,
                                r == u && i == j, split_context.B, split_context.P, C, NH);
    }
    for (int k = 0; k < split_context.d; k++)
        for (int u = 0; u < c; u++)
            for (int m = 0; m < c; m++) {
                size_t at = (size_t)(k * c + u) * of_rank, r = (size_t)(CONTEXT_WAY == 1 ? m : (u + c - 1 - m) % c);
                if (m == 0) device_copy(dkv + at, terms + r * n + at, of_rank * sizeof(float));
                else add_in_place_fp32(dkv + at, terms + r * n + at, of_rank);
            }
    from_fp32(rounded, dq, N * (size_t)C);
    device_copy_rows(dqkv, 3*row, rounded, row, row, N);
    from_fp32(rounded, dkv, n);
    device_copy_rows(dqkv + C, 3*row, rounded, 2*row, 2*row, N);
    split_free(kv); split_free(rounded); split_free(dq); split_free(dkv); split_free(terms);
}

// ---- what the program calls ----
#define encoder_forward context_encoder_forward
#define encoder_backward context_encoder_backward
#define attention_forward context_attention_forward
#define attention_backward context_attention_backward
#define host_to_device(out, tokens, bytes) ((void)(bytes), context_load_tokens(out, tokens, B, T)) // gpt2_load_batch's B and T
