/*
matmul_backward_weight.c - the gradients of a linear layer's parameters, in several ways. forward: out (N,OC) = inp (N,C) w^T +
bias, with w (OC,C). So

    dw (OC,C)  += dout^T (OC,N) inp (N,C)      sums over the N tokens
    dbias (OC) += the column sums of dout

Everywhere else threads share the tokens. Here the sums are over the tokens: a thread that has a token has a part of every result.
Either each thread has a dw of its own, or threads share the rows of dw instead. The += is also new. A step of several
micro-batches adds up their gradients: a sum may begin with what is there. All variants here do so (GRAD_ADD). For the first
micro-batch of a step llmc/ is told GRAD_SET and begins with 0, so that dw need not be cleared.
*/
#include "tile.h"

static void make(Problem* p, Shape s) {
    *p = product_of(s);
    size_t N = (size_t)p->N, C = (size_t)p->C, OC = (size_t)p->OC, threads = (size_t)omp_get_max_threads();
    p->dout = random_floats(N * OC, 0, 1);
    p->inp = random_floats(N * C, 0, 1);
    p->copies = floats(threads * OC * C); // a dw and a dbias for each thread
    p->bias_copies = floats(threads * OC);
    p->scratch = floats(packed_floats(C, N));
    Output *dw = output_added_to("dw", &p->dw, OC * C), *dbias = output_added_to("dbias", &p->dbias, OC);
    #pragma omp parallel for schedule(static)
    for (size_t o = 0; o < OC; o++)
        for (size_t i = 0; i < N; i++) {
            add_scaled_in_double(dw->want + o * C, (double)p->dout[i * OC + o], p->inp + i * C, p->C);
            dbias->want[o] += (double)p->dout[i * OC + o];
        }
}
// A sum of N = 512 terms in one chain is off by about sqrt(N) = 23 roundings of its value.

// ---- 1: the formulas as they are printed ----
// Every sum is a chain, and both of its operands jump, dout by OC numbers and inp by C: two cache lines come for two numbers.
// The thread that has a row of dw also has an element of dbias.
VARIANT(matmul_backward_weight_1_naive, "three loops, a sum as one chain", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC, N = (size_t)p->N;
    #pragma omp parallel for schedule(static)
    for (size_t o = 0; o < OC; o++) {
        for (size_t c = 0; c < C; c++) {
            float sum = 0;
            for (size_t i = 0; i < N; i++) sum += p->dout[i * OC + o] * p->inp[i * C + c];
            p->dw[o * C + c] += sum;
        }
        float sum = 0;
        for (size_t i = 0; i < N; i++) sum += p->dout[i * OC + o];
        p->dbias[o] += sum;
    }
}

// ---- 2: threads share the tokens ----
// As in forward. The loop over the sum is outside, so everything goes along memory: a token adds a multiple of its inp to each
// row of dw. Each thread has a dw of its own, or two would add to one number at the same time. But each dw has to be cleared, and
// added up at the end: memory and time grow with the threads. And all of a dw, more than the nearer caches hold, goes by for
// every token.
VARIANT(matmul_backward_weight_2_copies, "threads share tokens, each with its own dw", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC, threads = (size_t)omp_get_max_threads();
    device_zero(p->copies, threads * OC * C * sizeof(float));
    device_zero(p->bias_copies, threads * OC * sizeof(float));
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        size_t thread = (size_t)omp_get_thread_num();
        float *dw = p->copies + thread * OC * C, *dbias = p->bias_copies + thread * OC;
        const float *dout = p->dout + (size_t)i * OC, *inp = p->inp + (size_t)i * C;
        for (size_t o = 0; o < OC; o++) {
            add_scaled(dw + o * C, dout[o], inp, p->C);
            dbias[o] += dout[o];
        }
    }
    add_up(p->dw, p->copies, (int)threads, OC * C);
    add_up(p->dbias, p->bias_copies, (int)threads, OC);
}

// ---- 3: threads share the rows of dw ----
// A thread goes through all tokens, but adds only to its own rows: no copies. It adds to dw itself, and accumulation takes no
// more than that. Each thread reads all of inp, which is small, and its own columns of dout. The order of a sum is that of the
// tokens, so any number of threads gives the same bits. (No thread waits after a token: with schedule(static) a row is always the
// same thread's.)
VARIANT(matmul_backward_weight_3_owners, "threads share the rows of dw", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel
    for (int i = 0; i < p->N; i++) {
        const float *dout = p->dout + (size_t)i * OC, *inp = p->inp + (size_t)i * C;
        #pragma omp for schedule(static) nowait
        for (size_t o = 0; o < OC; o++) {
            add_scaled(p->dw + o * C, dout[o], inp, p->C);
            p->dbias[o] += dout[o];
        }
    }
}

// ---- 4: eight tokens at a time ----
// A row of dw that is loaded gets the multiples of 8 tokens before it is stored, and their rows of inp stay in the nearest cache
// while all rows of dw go by, an eighth as often as in 3. The bias has a loop of its own now: along rows of dout in strips of
// columns, so that neighbours are added to neighbours.
static void add_bias(Problem* p) {
    const size_t strip = 256;
    size_t OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (size_t begin = 0; begin < OC; begin += strip) {
        size_t end = size_min(begin + strip, OC);
        for (int i = 0; i < p->N; i++) {
            const float* dout = p->dout + (size_t)i * OC;
            #pragma omp simd
            for (size_t o = begin; o < end; o++) p->dbias[o] += dout[o];
        }
    }
}
VARIANT(matmul_backward_weight_4_blocks, "the same, 8 tokens at a time", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel
    for (int i = 0; i < p->N; i += TERMS) {
        #pragma omp for schedule(static) nowait
        for (size_t o = 0; o < OC; o++)
            add_terms(p->dw + o * C, p->dout + (size_t)i * OC + o, OC, p->inp + (size_t)i * C, C, int_min(TERMS, p->N - i));
    }
    add_bias(p);
}

// ---- 5: a tile of dw in registers ----
// As in forward, but nothing has to be put into dw first: a tile begins with what is there. dout is read as it lies, the 6
// numbers of a term side by side and the next term's a row further; a transposed copy costs what it gains.
VARIANT(matmul_backward_weight_5_tiles, "6 rows by 2 vectors of dw in registers", 64) {
    pack(p->scratch, p->inp, (size_t)p->N, (size_t)p->C);
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    tile_products((TileProduct){ p->dw, p->OC, p->C, p->N, p->dout, 1, OC, p->scratch, p->dw, C });
    add_bias(p);
}

// ---- 6: llmc/'s ----
// oneDNN's sgemm, which each thread calls for its own tile of dw, with beta = 1: it also begins with what is there. The bias is
// summed in strips, as in 4, but first in sums of 64 rows each, which makes the errors smaller.
VARIANT(matmul_backward_weight_6_llmc, "oneDNN's sgemm", 64) {
    matmul_backward_weight(p->dw, p->dbias, p->dout, p->inp, p->N, p->C, p->OC, GRAD_ADD);
}

OPERATION("matmul_backward_weight", "rows are tokens, cols outputs, depth inputs", { 512, 3072, 768 }, { 11, 72, 264 }, true)
