/* cpu/encoder.h - token and position embeddings. */
#ifndef LLMC_CPU_ENCODER_H
#define LLMC_CPU_ENCODER_H
#include "workspace.h"

void encoder_part_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, TokenRange range,
                          int B, int T, int C) {
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < B * T; i++) {
        floatX* o = out + (size_t)i * C;
        int row = token_row(range, tokens[i]);
        if (row >= 0) memcpy(o, wte + (size_t)row * C, (size_t)C * sizeof(floatX));
        else memset(o, 0, (size_t)C * sizeof(floatX));
        if (wpe == NULL) continue;
        const floatX* pe = wpe + (size_t)(i % T) * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) o[c] = to_floatX(to_float(o[c]) + to_float(pe[c]));
    }
}

void encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C) {
    TokenRange whole = { 0, cpu_layers.shapes.Vp };
    encoder_part_forward(out, tokens, wte, wpe, whole, B, T, C);
}

#define ENCODER_STRIP 256 // channels that are summed at a time, on the stack

// dst[c] set or += sum over positions i = first, next[i], ... (until -1) of dout[i][c], c in [begin, end),
// at most a strip
static void encoder_add_rows(floatX* dst, const floatX* dout, int first, const int* next, int begin, int end, int C,
                             GradMode mode) {
    float sum[ENCODER_STRIP] = { 0 };
    int width = end - begin;
    for (int i = first; i >= 0; i = next[i]) {
        const floatX* d = dout + (size_t)i * C + begin;
        #pragma omp simd
        for (int c = 0; c < width; c++) sum[c] += to_float(d[c]);
    }
    dst += begin;
    #pragma omp simd
    for (int c = 0; c < width; c++) dst[c] = to_floatX(mode == GRAD_ADD ? to_float(dst[c]) + sum[c] : sum[c]);
}

// forward: out[b,t] = wte[tokens[b,t]] + wpe[t], so a row of dwte gets dout of every position that holds its token, and
// a row of dwpe that of every sequence. The positions of a token are chained in ascending order, then each chain is
// summed by one thread in fp32 and rounded once.
void encoder_part_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, TokenRange range,
                           int B, int T, int C, GradMode mode) {
    int *first = cpu_layers.token_first, *next = cpu_layers.token_next;
    int N = B * T, strips = (int)ceil_div((size_t)C, ENCODER_STRIP), row;
    for (int i = 0; i < N; i++) if ((row = token_row(range, tokens[i])) >= 0) first[row] = -1;
    for (int i = N - 1; i >= 0; i--) {
        if ((row = token_row(range, tokens[i])) < 0) continue;
        next[i] = first[row];
        first[row] = i;
    }
    #pragma omp parallel for collapse(2) schedule(dynamic, 16)
    for (int i = 0; i < N; i++) {
        for (int s = 0; s < strips; s++) {
            int of_token = token_row(range, tokens[i]);
            if (of_token < 0 || first[of_token] != i) continue; // another position is the head of this token's chain
            int begin = s * ENCODER_STRIP, end = begin + ENCODER_STRIP < C ? begin + ENCODER_STRIP : C;
            encoder_add_rows(dwte + (size_t)of_token * C, dout, i, next, begin, end, C, GRAD_ADD);
        }
    }
    if (dwpe == NULL) return;
    for (int i = 0; i < N; i++) next[i] = i + T < N ? i + T : -1; // now the same position in the next sequence
    #pragma omp parallel for collapse(2) schedule(static)
    for (int t = 0; t < T; t++) {
        for (int s = 0; s < strips; s++) {
            int begin = s * ENCODER_STRIP, end = begin + ENCODER_STRIP < C ? begin + ENCODER_STRIP : C;
            encoder_add_rows(dwpe + (size_t)t * C, dout, t < N ? t : -1, next, begin, end, C, mode);
        }
    }
}
void encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                      GradMode mode) {
    TokenRange whole = { 0, cpu_layers.shapes.Vp };
    encoder_part_backward(dwte, dwpe, dout, tokens, whole, B, T, C, mode);
}
#endif
