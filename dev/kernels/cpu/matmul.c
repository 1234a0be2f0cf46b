/*
matmul.c - a linear layer, forward, in several ways: out (N,OC) = inp (N,C) w^T + bias, with w (OC,C).

2 N C OC operations on a few megabytes: here arithmetic decides. A core does 16 or 32 operations in the time of one if they are
vectors, and several vectors at once if none waits for another. Everything below is about that: first what keeps the compiler
from using vectors, then what keeps the numbers from arriving in time.
*/
#include "tile.h"

static void make(Problem* p, Shape s) {
    *p = product_of(s);
    size_t N = (size_t)p->N, C = (size_t)p->C, OC = (size_t)p->OC;
    p->inp = random_floats(N * C, 0, 1);
    p->w = random_floats(OC * C, 0, 0.02f);
    p->bias = random_floats(OC, 0, 0.1f);
    p->scratch = floats(packed_floats(OC, C));
    Output* out = output("out", &p->out, N * OC);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < N; i++)
        for (size_t o = 0; o < OC; o++)
            out->want[i * OC + o] = dot_in_double(p->inp + i * C, p->w + o * C, p->C) + (double)p->bias[o];
}
// A sum of C terms is off by about sqrt(C) roundings of its value.

// ---- 1: the formula as it is printed ----
// Three loops. The sum is one chain: floats must be added in the order that is written, so there are no vectors, and each
// addition waits some four cycles for the one before it.
VARIANT(matmul_1_naive, "three loops, a sum as one chain", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++)
        for (size_t o = 0; o < OC; o++) {
            float sum = p->bias[o];
            for (size_t c = 0; c < C; c++) sum += p->inp[(size_t)i * C + c] * p->w[o * C + c];
            p->out[(size_t)i * OC + o] = sum;
        }
}

// ---- 2: the sum may be in any order ----
// "simd reduction" in dot() says so: a vector's lanes each have a part of the sum. What remains is a chain of vectors. And there is
// one multiplication for two numbers that are loaded, where a core could do as many multiplications as loads.
VARIANT(matmul_2_simd, "the sum in any order: vectors", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < (size_t)p->N; i++)
        for (size_t o = 0; o < OC; o++) p->out[i * OC + o] = dot(p->inp + i * C, p->w + o * C, p->C) + p->bias[o];
}

// ---- 3: the loop over the sum outside ----
// With w transposed first, the inner loop goes along a row of out: vectors without any change of order, and no chain, because
// each element gets one addition. But it gets it in memory: out is loaded and stored for every multiplication, and w, megabytes
// that no near cache holds, is read once for every row of inp.
static void transpose(float* wt, const float* w, size_t C, size_t OC) { // wt (C,OC)
    #pragma omp parallel for schedule(static)
    for (size_t c = 0; c < C; c++)
        for (size_t o = 0; o < OC; o++) wt[c * OC + o] = w[o * C + c];
}
VARIANT(matmul_3_order, "w transposed, the loop over the sum outside", 64) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    transpose(p->scratch, p->w, C, OC);
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        float* out = p->out + (size_t)i * OC;
        memcpy(out, p->bias, OC * sizeof(float));
        for (size_t c = 0; c < C; c++) add_scaled(out, p->inp[(size_t)i * C + c], p->scratch + c * OC, p->OC);
    }
}

// ---- 4: the same in blocks that a cache holds ----
// A piece of w, 128 of C by 256 of OC, is 128 KB, which stays in the second cache while 48 rows of inp go by, and a row's piece
// of out is 1 KB, which stays in the first one for 128 additions. Nothing waits for memory now, but loads and stores of out
// remain. Where the last cache holds all of w and is fast, 3 also waited only for them: then this gains little.
static void add_block(Problem* p, int first, int last, size_t o, size_t width, size_t c, size_t depth) {
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    for (int i = first; i < last; i++) {
        float* out = p->out + (size_t)i * OC + o;
        for (size_t k = c; k < c + depth; k++) add_scaled(out, p->inp[(size_t)i * C + k], p->scratch + k * OC + o, (int)width);
    }
}
VARIANT(matmul_4_blocks, "the same in blocks that a cache holds", 64) {
    const size_t block_o = 256;
    size_t C = (size_t)p->C, OC = (size_t)p->OC;
    transpose(p->scratch, p->w, C, OC);
    #pragma omp parallel for collapse(2) schedule(static)
    for (int first = 0; first < p->N; first += BLOCK_ROWS)
        for (size_t o = 0; o < OC; o += block_o) {
            int last = int_min(first + BLOCK_ROWS, p->N);
            size_t width = size_min(block_o, OC - o);
            for (int i = first; i < last; i++) memcpy(p->out + (size_t)i * OC + o, p->bias + o, width * sizeof(float));
            for (size_t c = 0; c < C; c += BLOCK_TERMS) add_block(p, first, last, o, width, c, size_min(BLOCK_TERMS, C - c));
        }
}

// ---- 5: a tile of out in registers ----
// 6 rows by 2 vectors are 12 registers. For each term of the sum they take 2 vectors of w and 6 numbers of inp for 12
// multiplications: at last most instructions are arithmetic. w is copied so that a tile's columns are neighbours, and 128 of
// their rows stay in the first cache while 8 tiles go by. The tile is in tile.h.
// packed (OC/TILE_COLS, C, TILE_COLS) = w by tiles of columns, 0 beyond OC
static void pack_turned(float* packed, const float* w, size_t C, size_t OC) {
    #pragma omp parallel for schedule(static)
    for (size_t o = 0; o < OC; o += TILE_COLS) {
        for (size_t c = 0; c < C; c++)
            for (size_t j = 0; j < TILE_COLS; j++) packed[o * C + c * TILE_COLS + j] = o + j < OC ? w[(o + j) * C + c] : 0;
    }
}
VARIANT(matmul_5_tiles, "6 rows by 2 vectors of out in registers", 64) {
    pack_turned(p->scratch, p->w, (size_t)p->C, (size_t)p->OC);
    tile_products((TileProduct){ p->out, p->N, p->OC, p->C, p->inp, (size_t)p->C, 1, p->scratch, p->bias, 0 });
}

// ---- 6: llmc/'s ----
// oneDNN's product: the same ideas, with sizes measured for each kind of processor, machine code generated when the program
// starts, data fetched before it is needed, and copies of w only where they pay. This is the rate to reach.
VARIANT(matmul_6_llmc, "oneDNN's product", 64) { matmul_forward(p->out, p->inp, p->w, p->bias, p->N, p->C, p->OC); }

OPERATION("matmul", "rows are tokens, cols outputs, depth inputs", { 512, 3072, 768 }, { 11, 72, 264 }, true)
