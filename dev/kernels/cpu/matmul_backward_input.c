/*
matmul_backward_input.c - the gradient of a linear layer's input, in several ways. forward: out (N,OC) = inp (N,C) w^T + bias,
with w (OC,C). So

    dinp (N,C) = dout (N,OC) w (OC,C)      sums over OC

The arithmetic is forward's, on arrays of the same size; what differs is how w lies. Forward multiplied its rows with rows of inp;
here the sum goes down its columns: a row of dinp gets multiples of rows of w. So the steps of matmul.c differ in value here:
what helped most there gains little, and what needed a copy of w there needs none.
*/
#include "tile.h"

static void make(Problem* p, Shape s) {
    *p = product_of(s);
    size_t N = (size_t)p->N, C = (size_t)p->C, OC = (size_t)p->OC;
    p->dout = random_floats(N * OC, 0, 1);
    p->w = random_floats(OC * C, 0, 0.02f);
    p->scratch = floats(packed_floats(C, OC));
    Output* dinp = output("dinp", &p->dinp, N * C);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < N; i++) {
        memset(dinp->want + i * C, 0, C * sizeof(double));
        for (size_t o = 0; o < OC; o++) add_scaled_in_double(dinp->want + i * C, (double)p->dout[i * OC + o], p->w + o * C, p->C);
    }
}
// A sum of OC = 3072 terms in one chain is off by about sqrt(OC) = 55 roundings of its value.

// ---- 1: the formula as it is printed ----
// Three loops, and the sum is a chain, as in forward. In addition each step jumps over C numbers of w: a whole cache line comes
// for one number, from a cache far enough away to hold all of w.
VARIANT(matmul_backward_input_1_naive, "three loops, a sum as one chain", 128) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++)
        for (size_t c = 0; c < C; c++) {
            float sum = 0;
            for (size_t o = 0; o < OC; o++) sum += p->dout[(size_t)i * OC + o] * p->w[o * C + c];
            p->dinp[(size_t)i * C + c] = sum;
        }
}

// ---- 2: the sum may be in any order ----
// These words made forward ten times as fast. They break the chain, but a vector of w has to be gathered from as many cache
// lines as it has numbers, and 1 waited for those lines.
VARIANT(matmul_backward_input_2_simd, "the sum in any order: vectors, but gathered", 128) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        const float* dout = p->dout + (size_t)i * OC;
        for (size_t c = 0; c < C; c++) {
            const float* w = p->w + c;
            float sum = 0;
            #pragma omp simd reduction(+:sum)
            for (size_t o = 0; o < OC; o++) sum = fused_multiply_add(dout[o], w[o * C], sum);
            p->dinp[(size_t)i * C + c] = sum;
        }
    }
}

// ---- 3: the loop over the sum outside ----
// A row of dinp gets a multiple of a row of w for each number of dout: everything goes along memory, w needs no copy (forward had
// to transpose it for this), and the row of dinp, 3 KB, stays in the nearest cache. What remains is a load and a store for each
// multiplication, and all of w is read for every row.
VARIANT(matmul_backward_input_3_order, "the loop over the sum outside", 128) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        float* dinp = p->dinp + (size_t)i * C;
        memset(dinp, 0, C * sizeof(float));
        for (size_t o = 0; o < OC; o++) add_scaled(dinp, p->dout[(size_t)i * OC + o], p->w + o * C, p->C);
    }
}

// ---- 4: eight terms at a time, for 48 rows ----
// A piece of dinp that is loaded gets the multiples of 8 rows of w before it is stored, so nearly only the loads of w are left.
// Those rows stay in the nearest cache while 48 rows of dinp, which the second one holds, go by: w comes from afar a 48th as
// often. Either alone gains little, because 3 waits for both.
VARIANT(matmul_backward_input_4_blocks, "the same, 8 terms at a time for 48 rows", 128) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (int first = 0; first < p->N; first += BLOCK_ROWS) {
        int last = int_min(first + BLOCK_ROWS, p->N);
        memset(p->dinp + (size_t)first * C, 0, (size_t)(last - first) * C * sizeof(float));
        for (int o = 0; o < p->OC; o += TERMS) {
            const float *dout = p->dout + o, *w = p->w + (size_t)o * C;
            for (size_t i = (size_t)first; i < (size_t)last; i++)
                add_terms(p->dinp + i * C, dout + i * OC, 1, w, C, int_min(TERMS, p->OC - o));
        }
    }
}

// ---- 5: a tile of dinp in registers ----
// As in forward: 6 rows by 2 vectors, 12 multiplications for 8 numbers or vectors that are loaded. w is also copied here, but not
// transposed: only so that what a tile reads, one piece of each of its rows, is together.
VARIANT(matmul_backward_input_5_tiles, "6 rows by 2 vectors of dinp in registers", 128) {
    pack(p->scratch, p->w, (size_t)p->OC, (size_t)p->C);
    tile_products((TileProduct){ p->dinp, p->N, p->C, p->OC, p->dout, (size_t)p->OC, 1, p->scratch, NULL, 0 });
}

// ---- 6: llmc/'s ----
// oneDNN's sgemm, which each thread calls for its own tile of dinp. This is the rate to reach.
VARIANT(matmul_backward_input_6_llmc, "oneDNN's sgemm", 128) { matmul_backward_input(p->dinp, p->dout, p->w, p->N, p->C, p->OC); }

OPERATION("matmul_backward_input", "rows are tokens, cols outputs, depth inputs", { 512, 3072, 768 }, { 11, 75, 264 }, true)
