/*
split.h - what the references of this folder share: parts of matrices, sums of parts, and which weights a call is about. README.md says
what they are. Included by data.h and tensor.h.
*/
#ifndef SPLIT_H
#define SPLIT_H
#include "../../llmc/device/layers.h"

// Memory of the device, zeroed. It is not counted with the rest, because the program under test did not predict it.
static inline void* split_alloc(size_t bytes) {
    void* p = NULL;
#ifdef __CUDACC__
    require(cudaMalloc(&p, bytes) == cudaSuccess, "out of device memory: %zu bytes for a part", bytes);
#else
    require(posix_memalign(&p, 64, round_up(bytes, 64)) == 0, "out of memory: %zu bytes for a part", bytes);
#endif
    device_zero(p, bytes);
    return p;
}
static inline void split_free(void* p) {
    device_synchronize();
#ifdef __CUDACC__
    cudaFree(p);
#else
    free(p);
#endif
}

// ---- which weights a call is about: its role, told by the name of the argument in the program ----
typedef enum { ROLE_QKV, ROLE_PROJ, ROLE_FC, ROLE_FCPROJ, ROLE_WTE } SplitRole;
static SplitRole split_role __attribute__((unused)); // of the call that is being made; tied.h asks for none

// "p.fcprojw", "dp.fcprojw" and "fcprojw" are ROLE_FCPROJ; dies if a name is none of these.
static inline SplitRole split_role_of(const char* name) {
    static const char* const names[] = { "qkvw", "projw", "fcw", "fcprojw", "wte" };
    const char* end = name + strlen(name);
    int found = -1;
    for (int i = 0; i < 5; i++) {
        size_t n = strlen(names[i]), longest = found < 0 ? 0 : strlen(names[found]); // "fcprojw" ends with "projw"
        if (n <= (size_t)(end - name) && n > longest && memcmp(end - n, names[i], n) == 0) found = i;
    }
    require(found >= 0, "a matrix product with '%s': test/split/split.h does not know what that is", name);
    return (SplitRole)found;
}
#define SPLIT_ROLE(w) (split_role = split_role_of(#w))

// ---- parts of matrices ----
// A matrix (rows, cols) has `groups` groups of columns side by side, as q, k and v are. Part q of t is every group's q-th
// share, (rows, cols/t). Parts of rows are parts of the columns of a matrix with one row.
typedef struct { int rows, groups; size_t cols; int t, q; } SplitCut;

static inline SplitCut split_columns(int rows, int cols, int groups, int t, int q) {
    require(cols % (groups * t) == 0, "%d columns in %d group(s) do not divide into %d parts", cols, groups, t);
    SplitCut cut = { rows, groups, (size_t)cols, t, q };
    return cut;
}
static inline SplitCut split_rows(int rows, int cols, int groups, int t, int q) {
    require(rows % (groups * t) == 0, "%d rows in %d group(s) do not divide into %d parts", rows, groups, t);
    SplitCut cut = { 1, groups, (size_t)rows * (size_t)cols, t, q };
    return cut;
}
static inline size_t split_elements(SplitCut c) { return (size_t)c.rows * c.cols / (size_t)c.t; }

// part = its elements, of `size` bytes, of whole; or the other way round
static inline void split_move(void* part, void* whole, SplitCut c, size_t size, bool into_whole) {
    size_t group = c.cols / (size_t)c.groups, share = group / (size_t)c.t;
    for (int r = 0; r < c.rows; r++)
        for (int k = 0; k < c.groups; k++) {
            char* p = (char*)part + ((size_t)r * (size_t)c.groups + (size_t)k) * share * size;
            char* w = (char*)whole + ((size_t)r * c.cols + (size_t)k * group + (size_t)c.q * share) * size;
            device_copy(into_whole ? w : p, into_whole ? p : w, share * size);
        }
}
static inline void split_put(floatX* part, floatX* whole, SplitCut c) { split_move(part, whole, c, sizeof(floatX), true); }

// ---- gradients that a header keeps apart, found by where the program has them ----
typedef struct {
    floatX* in_program; // (n) a view of the program's memory
    floatX* apart;  // some times n elements: terms of the program's, owned, never freed
    size_t n;
    bool waits;     // tied.h: apart is still to be added
} SplitGradient;
typedef struct { SplitGradient* all; int num; } SplitGradients; // all (num) owned, never freed

// That of the program's gradient (n). If there is none it is made, with room for so many times n elements. n 0: there must be one.
static inline SplitGradient* split_gradient(SplitGradients* g, floatX* in_program, size_t n, int times) {
    for (int i = 0; i < g->num; i++) {
        if (g->all[i].in_program != in_program) continue;
        require(n == 0 || n == g->all[i].n, "a gradient had %zu elements and has %zu now", g->all[i].n, n);
        return &g->all[i];
    }
    require(n > 0, "the embedding's gradient comes before the classifier's, or is elsewhere");
    g->all = (SplitGradient*)xrealloc(g->all, (size_t)(g->num + 1) * sizeof(SplitGradient));
    SplitGradient made = { in_program, (floatX*)split_alloc((size_t)times * n * sizeof(floatX)), n, false };
    g->all[g->num] = made;
    return &g->all[g->num++];
}
static inline bool split_is_in(const SplitGradient* g, const floatX* x, size_t n) { return g->in_program >= x && g->in_program < x + n; }

// ---- sums ----
// out (n) = terms[0] + terms[1] + ... + terms[t-1], each (n). They are added in rank order, in fp32, and rounded once,
// as --deterministic all-reduces.
static inline void split_sum(floatX* out, const floatX* terms, int t, size_t n) {
    size_t bytes = (size_t)t * n * sizeof(floatX);
    floatX* host = (floatX*)xcalloc(bytes, 1);
    floatX* sums = (floatX*)xcalloc(n, sizeof(floatX));
    device_to_host(host, terms, bytes);
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int q = 0; q < t; q++) {
            float term = to_float(host[(size_t)q * n + i]);
            sum = q == 0 ? term : sum + term;
        }
        sums[i] = to_floatX(sum);
    }
    host_to_device(out, sums, n * sizeof(floatX));
    device_synchronize(); // the copy reads sums
    free(host);
    free(sums);
}
#endif
