/*
owners.h - whole matrices in elementwise shards: which rank orthogonalises which matrix, and where the pieces of each
matrix are.

A shard ends anywhere, so a matrix may be spread over several ranks. Muon needs whole matrices: the owner of a matrix
collects its pieces, computes the update, and sends the pieces of the update back. Ownership depends only on shapes, so
every rank computes the same table, and no checkpoint contains it.
*/
#ifndef LLMC_OWNERS_H
#define LLMC_OWNERS_H
#include "../device/muon.h"
#include "shard.h"

enum { BLOCK_MATRICES = 6, MAX_MATRICES = BLOCK_MATRICES * MAX_BLOCKS }; // q, k, v, proj, fc, fcproj

typedef struct {
    int unit, rows, cols;
    size_t begin;     // first element, within the unit
    int owner;
} Matrix;

// The part of a matrix that is in one rank's shard. A rank keeps its pieces in one array, in the order of Owners.m.
typedef struct {
    size_t n, begin;  // n elements from element `begin` of the matrix
    size_t at;        // index of the first one in the array of pieces
} MatrixPiece;

typedef struct {
    int all_own;            // --owners all: every rank orthogonalises all matrices. Set it before owners_init.
    int N, rank;            // these and all other fields must be 0 before owners_init
    int first, end;         // this rank orthogonalises matrices [first, end)
    int count;
    Matrix m[MAX_MATRICES]; // sorted by owner, then in the order of the model
    MatrixPiece* pieces;    // (count,N) owned
    double* flops;          // (N) that each rank computes per step, owned
    CommPart *held, *owned; // (N) owned: held[q] of this rank's pieces goes to rank q, which sends owned[q]
    size_t most_held, most_owned; // elements of a rank's pieces and of the matrices it orthogonalises; most of any rank
    size_t largest;         // elements of the largest matrix
} Owners;

// Lists the matrices of the model. The thirds of qkv.weight are listed separately: a single matrix would share singular
// values between q, k and v.
static inline int owners_list(Matrix* m, GPT2Config c) {
    int count = 0;
    for (int u = 1; u < gpt2_num_units(c); u++)
        for (int i = 0; i < unit_tensors(u); i++) {
            TensorInfo t = unit_tensor(c, u, i);
            size_t parts = t.cut == CUT_HEADS ? 3 : 1, rows = t.rows / parts;
            for (size_t k = 0; k < parts && t.cols > 0; k++)
                m[count++] = (Matrix){ u, (int)rows, (int)t.cols, t.offset + k * rows * t.cols, -1 };
        }
    return count;
}

static inline size_t matrix_elements(Matrix m) { return (size_t)m.rows * (size_t)m.cols; }
static inline double matrix_flops(Matrix m) { return newton_schulz_flops(m.rows, m.cols); }

// Gives each matrix of the model, beginning with those of most FLOPs, to the rank with the least work so far (longest
// processing time first, Graham 1969). Block by block, loads would remain uneven: 6 matrices are too few for 8 ranks.
static inline void owners_choose(Matrix* m, int count, double* flops, int N) {
    for (int given = 0; given < count; given++) {
        int longest = -1, owner = 0;
        for (int i = 0; i < count; i++)
            if (m[i].owner < 0 && (longest < 0 || matrix_flops(m[i]) > matrix_flops(m[longest]))) longest = i;
        for (int q = 1; q < N; q++) if (flops[q] < flops[owner]) owner = q;
        m[longest].owner = owner;
        flops[owner] += matrix_flops(m[longest]);
    }
}

// Returns the part of a matrix in elements [begin, begin + n) of its unit.
static inline MatrixPiece matrix_piece(Matrix m, size_t begin, size_t n) {
    size_t first = size_max(begin, m.begin), end = size_min(begin + n, m.begin + matrix_elements(m));
    MatrixPiece p = { first < end ? end - first : 0, first < end ? first - m.begin : 0, 0 };
    return p;
}

// Fills in rank q's piece of every matrix, and the messages between this rank and rank q. Call it for q = 0, 1, ... in
// turn.
static inline void owners_init_pieces(Owners* o, GPT2Config c, int q) {
    size_t at = 0, owned = 0;
    for (int i = 0; i < o->count; i++) {
        size_t shard = shard_elements(c, o->m[i].unit, o->N);
        MatrixPiece* p = &o->pieces[i * o->N + q];
        *p = matrix_piece(o->m[i], (size_t)q * shard, shard);
        p->at = at;
        at += p->n;
        if (o->all_own || o->m[i].owner == o->rank) owned += p->n;
        if (q == o->rank && !o->all_own) {
            CommPart* held = &o->held[o->m[i].owner];
            if (held->n == 0) held->at = p->at;
            held->n += p->n;
        }
    }
    if (q == o->rank && o->all_own)
        for (int w = 0; w < o->N; w++) o->held[w] = (CommPart){ at, 0 }; // every rank gets all
    o->owned[q] = (CommPart){ owned, q > 0 ? o->owned[q - 1].at + o->owned[q - 1].n : 0 };
    o->most_held = size_max(o->most_held, at);
}

static inline void owners_init(Owners* o, GPT2Config c, Comm* dp) {
    int N = o->N = dp->size;
    o->rank = dp->rank;
    o->flops = new_array(double, N);
    Matrix* model = new_array(Matrix, MAX_MATRICES); // in the order of the model
    int count = owners_list(model, c);
    owners_choose(model, count, o->flops, N);
    for (int q = 0; q < N; q++) {
        size_t owned = 0;
        for (int i = 0; i < count; i++) {
            if (o->all_own || model[i].owner == q) owned += matrix_elements(model[i]);
            if (model[i].owner == q) o->m[o->count++] = model[i];
        }
        o->most_owned = size_max(o->most_owned, owned);
        if (q < o->rank && !o->all_own) o->first = o->count;
        if (q <= o->rank || o->all_own) o->end = o->count;
    }
    free(model);
    for (int q = 0; o->all_own && q < N; q++) {
        o->flops[q] = 0;
        for (int i = 0; i < count; i++) o->flops[q] += matrix_flops(o->m[i]);
    }
    o->pieces = new_array(MatrixPiece, count * N);
    o->held = new_array(CommPart, N);
    o->owned = new_array(CommPart, N);
    for (int q = 0; q < N; q++) owners_init_pieces(o, c, q);
    o->largest = 4 * (size_t)c.C * (size_t)c.C;
}

static inline void owners_free(Owners* o) {
    free(o->pieces); free(o->flops); free(o->held); free(o->owned);
}

// Returns the part of matrix i in rank q's shard.
static inline MatrixPiece owners_piece(const Owners* o, int i, int q) { return o->pieces[i * o->N + q]; }

// Returns the index of rank q's piece of matrix i among all pieces that this rank receives as an owner.
static inline size_t owners_received(const Owners* o, int i, int q) {
    return o->owned[q].at + owners_piece(o, i, q).at - owners_piece(o, o->first, q).at;
}

// Returns the elements that this rank sends per step: pieces to owners, and updates back unless all_own.
static inline size_t owners_sent(const Owners* o) {
    size_t n = 0;
    for (int q = 0; q < o->N; q++) if (q != o->rank) n += o->held[q].n + (o->all_own ? 0 : o->owned[q].n);
    return n;
}

// Prints the matrices and the work of each rank per step; with more than 8 ranks, only those with least and most work.
static inline void report_owners(const Owners* o) {
    double sum = 0;
    int least = 0, most = 0;
    int* matrices = new_array(int, o->N);
    for (int i = 0; i < o->count; i++)
        for (int q = 0; q < o->N; q++) matrices[q] += o->all_own || o->m[i].owner == q;
    for (int q = 0; q < o->N; q++) {
        if (o->flops[q] < o->flops[least]) least = q;
        if (o->flops[q] > o->flops[most]) most = q;
        sum += o->flops[q];
    }
    printf("owners     matrices (GFLOPs of Newton-Schulz per step)");
    for (int q = 0; q < o->N; q++)
        if (o->N <= 8 || q == least || q == most)
            printf("%s rank %d: %d (%.3g)", q > 0 ? "," : "", q, matrices[q], o->flops[q] / 1e9);
    printf("; the busiest has %.3f of the mean\n", o->flops[most] * o->N / sum);
    fflush(stdout);
    free(matrices);
}
#endif
