/*
matmul_backward_weight.c - the gradients of a linear layer's parameters, in several variants. Forward is out (N,OC) =
inp (N,C) w^T + bias, with w (OC,C). So

    dw (OC,C)  += dout^T (OC,N) inp (N,C)      sums over the N tokens
    dbias (OC) += the column sums of dout

Everywhere else threads divide the tokens. These sums run over the tokens, so each token contributes to every result. Either
each thread gets its own dw, or threads divide the rows of dw. The += is also new: a step of several micro-batches accumulates
their gradients, so a sum may begin with the previous value. All variants in this file accumulate (GRAD_ADD). For the first
micro-batch of a step llmc/ gets GRAD_SET and begins with 0, so that dw need not be cleared.
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
// Every sum is a chain, and both operands are strided, dout by OC numbers and inp by C, so each number costs a cache line. The
// thread that computes a row of dw also computes an element of dbias.
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
// As in forward. The loop over the sum is outside, so all accesses are contiguous: a token adds a multiple of its inp to each row
// of dw. Each thread needs its own dw, because two must not add to one number at the same time. These copies have to be cleared and
// added up at the end, so memory and time grow with the number of threads. And every token passes over a whole dw, which is larger
// than the nearer caches.
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
// A thread goes through all tokens, but adds only to its own rows, so there are no copies, and accumulation costs nothing extra.
// Each thread reads all of inp, which is small, and its own columns of dout. Sums are in the order of the tokens, so any number of
// threads produces the same bits. (No thread waits after a token, because schedule(static) always gives a row to the same thread.)
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
// A loaded row of dw receives the multiples of 8 tokens before it is stored. Their rows of inp stay in the nearest cache while all
// rows of dw pass, an eighth as often as in 3. The bias now uses its own loop, along rows of dout in strips of columns, so that
// neighbours are added to neighbours.
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
// As in forward, but dw needs no initialization, because a tile begins with its old values. dout is read in place: the 6 numbers of
// a term are adjacent, and those of the next term follow a row later. A transposed copy would cost as much as it gains.
VARIANT(matmul_backward_weight_5_tiles, "6 rows by 2 vectors of dw in registers", 64) {
    pack(p->scratch, p->inp, (size_t)p->N, (size_t)p->C);
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    tile_products((TileProduct){ p->dw, p->OC, p->C, p->N, p->dout, 1, OC, p->scratch, p->dw, C });
    add_bias(p);
}

// ---- 6: llmc/'s ----
// Each thread calls oneDNN's sgemm for its own tile of dw, with beta = 1, which begins with the old values as well. The bias is
// summed in strips, as in 4, but first in groups of 64 rows, which makes the errors smaller.
VARIANT(matmul_backward_weight_6_llmc, "oneDNN's sgemm", 64) {
    matmul_backward_weight(p->dw, p->dbias, p->dout, p->inp, p->N, p->C, p->OC, GRAD_ADD);
}

OPERATION("matmul_backward_weight", "rows are tokens, cols outputs, depth inputs", { 512, 3072, 768 }, { 11, 72, 264 }, true)
