/*
tile.h - shared by matmul.c and the two files of its gradients: the problem, a tile of a product in registers and, as a
step before it, a row that gets several terms at a time. out (rows,cols) gets a b, where a (rows,terms) may lie by rows
or by columns; for a tile b (terms,cols) has been copied, TILE_COLS columns with all their terms together.
*/
#ifndef DEV_CPU_TILE_H
#define DEV_CPU_TILE_H
#include "variants.h"

struct Problem { // of the arrays, those that the file needs; scratch: for copies of an operand
    int N, C, OC;
    float *inp, *w, *bias, *out, *dout, *dinp, *dw, *dbias, *scratch, *copies, *bias_copies;
};
static Problem product_of(Shape s) { // without arrays
    layers_init(layer_shapes(1, s.rows, s.depth, 1, 1, 1));
    return (Problem){ .N = s.rows, .C = s.depth, .OC = s.cols };
}
static double work(const Problem* p) { return 2.0 * p->N * p->C * p->OC; }

enum { BLOCK_ROWS = 48, BLOCK_TERMS = 128 }; // rows and terms of the sum that a thread stays with while caches hold them

// ---- a row, eight terms at a time ----
enum { TERMS = 8 };
// out (n) += sum over k < terms of a[k * a_term] times row k of b (terms,n), 8 terms at most. Without "restrict" a store to
// out might change a, which would be loaded again each time.
static inline void add_terms_of(float* restrict out, const float* a, size_t a_term, const float* b, size_t n, int terms) {
    #pragma omp simd
    for (size_t j = 0; j < n; j++) {
        float sum = out[j];
        for (int k = 0; k < terms; k++) sum = fused_multiply_add(a[(size_t)k * a_term], b[(size_t)k * n + j], sum);
        out[j] = sum;
    }
}
static inline void add_terms(float* out, const float* a, size_t a_term, const float* b, size_t n, int terms) {
    if (terms == TERMS) add_terms_of(out, a, a_term, b, n, TERMS); // the compiler knows this number, and unrolls the loop
    else add_terms_of(out, a, a_term, b, n, terms);
}

// ---- a tile ----
#if defined(__AVX512F__)
enum { LANES = 16 }; // floats in a register
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
enum { TILE_ROWS = 6, TILE_VECTORS = 2, TILE_COLS = TILE_VECTORS * LANES };
typedef struct { Vector row[TILE_ROWS][TILE_VECTORS]; } Tile;
typedef struct {
    float* out; // (rows,cols)
    int rows, cols, terms;
    const float* a;       // element (i,k) is a[i * a_row + k * a_term]
    size_t a_row, a_term;
    const float* packed;  // (cols/TILE_COLS, terms, TILE_COLS): b, 0 beyond cols
    const float* begin;   // what is added to: row i is begin + i * begin_row, which may be out's own; NULL: 0
    size_t begin_row;
} TileProduct;

static inline size_t packed_floats(size_t cols, size_t terms) { return round_up(cols, TILE_COLS) * terms; }
// packed = b (terms,cols), which lies by rows already, as in both gradients
static inline void pack(float* packed, const float* b, size_t terms, size_t cols) {
    #pragma omp parallel for schedule(static)
    for (size_t j = 0; j < cols; j += TILE_COLS) {
        size_t width = size_min(TILE_COLS, cols - j);
        float* to = packed + j * terms;
        for (size_t k = 0; k < terms; k++, to += TILE_COLS) {
            memset(to, 0, TILE_COLS * sizeof(float));
            memcpy(to, b + k * cols + j, width * sizeof(float));
        }
    }
}

static inline Vector multiply_add(float x, Vector b, Vector sum) { // one instruction
    for (int k = 0; k < LANES; k++) sum[k] = fused_multiply_add(x, b[k], sum[k]);
    return sum;
}
// sums += `rows` rows of a times b, `terms` terms of it. Further rows of sums repeat the last.
static inline void tile_product(Tile* sums, const float* a, size_t a_row, size_t a_term, const float* b, int rows, int terms) {
    Tile sum = *sums; // in registers, because the loop over rows is unrolled
    const float* x[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) x[r] = a + (size_t)int_min(r, rows - 1) * a_row;
    for (int k = 0; k < terms; k++) {
        Vector left, right;
        memcpy(&left, b + k * TILE_COLS, sizeof left);
        memcpy(&right, b + k * TILE_COLS + LANES, sizeof right);
        #pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++) {
            float factor = x[r][(size_t)k * a_term];
            sum.row[r][0] = multiply_add(factor, left, sum.row[r][0]);
            sum.row[r][1] = multiply_add(factor, right, sum.row[r][1]);
        }
    }
    *sums = sum;
}
// Rows [first, last) of out, and the tile's columns from `col` on, one block of the sum's terms after the other.
static inline void tile_column(TileProduct p, int first, int last, int col) {
    size_t cols = (size_t)p.cols, bytes = (size_t)int_min(TILE_COLS, p.cols - col) * sizeof(float);
    for (int k = 0; k < p.terms; k += BLOCK_TERMS) {
        const float* b = p.packed + (size_t)col * (size_t)p.terms + (size_t)k * TILE_COLS;
        for (int i = first; i < last; i += TILE_ROWS) {
            int rows = int_min(TILE_ROWS, last - i);
            float* out = p.out + (size_t)i * cols + (size_t)col;
            const float* from = k > 0 ? out : p.begin ? p.begin + (size_t)i * p.begin_row + (size_t)col : NULL;
            Tile sums = { 0 };
            for (int r = 0; from && r < rows; r++) memcpy(sums.row[r], from + (size_t)r * (k > 0 ? cols : p.begin_row), bytes);
            tile_product(&sums, p.a + (size_t)i * p.a_row + (size_t)k * p.a_term, p.a_row, p.a_term, b, rows,
                         int_min(BLOCK_TERMS, p.terms - k));
            for (int r = 0; r < rows; r++) memcpy(out + (size_t)r * cols, sums.row[r], bytes);
        }
    }
}
static inline void tile_products(TileProduct p) {
    #pragma omp parallel for collapse(2) schedule(static)
    for (int first = 0; first < p.rows; first += BLOCK_ROWS)
        for (int col = 0; col < p.cols; col += TILE_COLS) tile_column(p, first, int_min(first + BLOCK_ROWS, p.rows), col);
}
#endif
