/*
axes.h - the axes of a mesh of ranks, and where each rank is on them.

N ranks are dp replicas of the model x pp stages x tp parts of each matrix. Ranks of tp are neighbours, because they
send most. Of the other two axes one is outside, and its ranks are farthest apart: dp, unless --mesh names pp before it
(as in PyTorch's DeviceMesh, the axis on the left is the outer one).

All functions are pure, and allocate nothing. (test/unit/test_axes.c)
*/
#ifndef LLMC_AXES_H
#define LLMC_AXES_H
#include "../base/common.h"

enum { MESH_TP, MESH_PP, MESH_DP, MESH_AXES };
static const char* const mesh_axis_names[MESH_AXES] = { "tp", "pp", "dp" };
typedef struct { int size[MESH_AXES]; bool pp_outside; } Axes; // how many ranks share an axis; whether pp is outside dp
typedef struct { int at[MESH_AXES]; } AxesPlace;               // of a rank, from 0

static inline Axes axes_of(int tp, int pp, int dp, bool pp_outside) {
    Axes a = { { tp, pp, dp }, pp_outside };
    return a;
}

// Return the place of a rank of the world, and the rank at a place.
static inline AxesPlace axes_place(Axes a, int rank) {
    int inner = a.pp_outside ? MESH_DP : MESH_PP, outer = MESH_PP + MESH_DP - inner;
    AxesPlace p;
    p.at[MESH_TP] = rank % a.size[MESH_TP];
    p.at[inner] = rank / a.size[MESH_TP] % a.size[inner];
    p.at[outer] = rank / a.size[MESH_TP] / a.size[inner];
    return p;
}
static inline int axes_rank(Axes a, AxesPlace p) {
    int inner = a.pp_outside ? MESH_DP : MESH_PP, outer = MESH_PP + MESH_DP - inner;
    return (p.at[outer] * a.size[inner] + p.at[inner]) * a.size[MESH_TP] + p.at[MESH_TP];
}

// ---- --mesh ----

// Reads "dp=2,tp=4" into sizes (0: the axis is not named). Dies if it is no such text.
static inline Axes axes_parse(const char* text) {
    Axes a = axes_of(0, 0, 0, false);
    for (const char* p = text; *p != '\0';) {
        int axis = 0;
        char* end = NULL;
        while (axis < MESH_AXES && (strncmp(p, mesh_axis_names[axis], 2) != 0 || p[2] != '=')) axis++;
        errno = 0;
        long n = axis < MESH_AXES && isdigit((unsigned char)p[3]) ? strtol(p + 3, &end, 10) : 0;
        bool good = n >= 1 && n <= 1 << 20 && errno == 0 && (*end == '\0' || (*end == ',' && end[1] != '\0'));
        require(good, "--mesh wants numbers of ranks for some of dp, tp and pp, as in dp=2,tp=2,pp=1, not '%s'", text);
        require(a.size[axis] == 0, "--mesh %s names %s twice; name it once", text, mesh_axis_names[axis]);
        if (axis == MESH_PP) a.pp_outside = a.size[MESH_DP] == 0 && strstr(end, "dp=") != NULL;
        a.size[axis] = (int)n;
        p = *end == ',' ? end + 1 : end;
    }
    return a;
}

// Returns the axes of N ranks by --mesh's text. Axes that it does not name have one rank, except one of them, which has
// all ranks that are left: dp, if that is not named. Dies if these are no axes of N ranks.
static inline Axes axes_choose(const char* text, int N) {
    Axes a = axes_parse(text);
    long long named = 1;
    int missing = 0, rest = MESH_DP;
    for (int k = 0; k < MESH_AXES; k++) {
        named *= a.size[k] ? a.size[k] : 1;
        missing += a.size[k] == 0;
        if (a.size[k] == 0) rest = k; // the last one is dp
    }
    require(missing > 0 || named == N, "--mesh %s is a mesh of %lld rank%s, and %d %s started; start %lld, or leave"
            " out an axis: it takes the other ranks", text, named, named == 1 ? "" : "s", N, N == 1 ? "was" : "were",
            named);
    require(named <= N && N % named == 0, "--mesh %s: %lld does not divide %d rank%s; start a multiple of %lld, or"
            " choose other numbers", text, named, N, N == 1 ? "" : "s", named);
    require(missing < 2 || rest == MESH_DP || named == N, "--mesh %s leaves %lld ranks, and names neither tp nor pp"
            " for them; name one of them, or start %lld ranks", text, N / named, named);
    for (int k = 0; k < MESH_AXES; k++) if (a.size[k] == 0) a.size[k] = k == rest ? (int)(N / named) : 1;
    return a;
}

// ---- in words ----
// "dp 1, pp 0, tp 1": where a rank is.
static inline void axes_text(Axes a, int rank, char* out, size_t size) {
    AxesPlace p = axes_place(a, rank);
    snprintf(out, size, "dp %d, pp %d, tp %d", p.at[MESH_DP], p.at[MESH_PP], p.at[MESH_TP]);
}
#endif
