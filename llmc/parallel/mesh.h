/*
mesh.h - the ranks as a mesh: n neighbours together hold one replica of the model, each with a part of every matrix
(tensor parallelism) or some of the blocks (pipeline parallelism). Ranks that are n apart hold the same part of
different replicas (data parallelism).
*/
#ifndef LLMC_MESH_H
#define LLMC_MESH_H
#include "../base/options.h"
#include "../comm/comm.h"
#include "../device/layers.h"
#include "../model/param_range.h"
#include "../device/checksum.h"
#include "axes.h"

// ---- options ----
typedef struct { int sequence_parallel, overlap; } TensorParallel; // each 0 or 1

// t is NULL for a program that has --mesh.
static inline void options_tensor_parallel(OptionTable* table, long long* t, TensorParallel* options) {
    options->overlap = 1;
    if (t) *t = 0;
    if (t) option_int(table, "tensor-parallel", t, 0, 1 << 20,
                      "neighbouring ranks that share one replica of the model; replicas are"
                      " data parallel; 0: all ranks share one");
    option_flag(table, "sequence-parallel", &options->sequence_parallel,
                "also split the rows of layernorms and of the residual stream among the ranks that share a replica");
    option_flag(table, "overlap", &options->overlap,
                "overlap communication with computation in the backward pass of each block");
}

static inline void options_mesh(OptionTable* table, const char** text) {
    *text = "";
    option_text(table, "mesh", text, "dp=N,tp=N,pp=N",
                "ranks along each axis: replicas of the model, parts of each matrix,"
                " pipeline stages; an omitted axis has size 1, or takes the remaining ranks. Ranks of tp are"
                " neighbours; of dp and pp, the first one named is the outer one");
}

// Dies if the model cannot be cut into n parts. option: the one that asked for them, for the message.
static inline void mesh_check_model(const char* option, int n, GPT2Config c) {
    require(c.NH % n == 0, "%s%d does not divide %d head%s, and a head is not cut; choose --heads as a"
            " multiple of %d, or fewer ranks that share a replica of the model", option, n, c.NH,
            c.NH == 1 ? "" : "s", n);
    size_t multiple = 128; // of the padded vocabulary
    while (multiple % (size_t)n != 0) multiple += 128;
    require(c.Vp % n == 0, "%s%d does not divide the vocabulary, %d tokens with its padding; choose"
            " --vocab-size %zu", option, n, c.Vp, round_up((size_t)c.V, multiple));
}

// Dies if --sequence-parallel cannot cut the B*T rows of a micro-batch among t ranks.
static inline void mesh_check_rows(TensorParallel options, int t, int B, int T) {
    require(!options.sequence_parallel || B * T % t == 0, "--sequence-parallel cuts the tokens of a micro-batch into"
            " %d parts, and --batch-size %d x --seq-len %d = %d does not divide; choose a multiple of %d",
            t, B, T, B * T, t);
}

// Dies if N ranks cannot form replicas of n ranks. Sets n to N if it is 0. option: the one that asked for n.
static inline void mesh_check_ranks(const char* option, long long* n, int N) {
    if (*n == 0) *n = N;
    require(N % *n == 0, "%s%lld does not divide %d rank%s; start a multiple of %lld, or choose a divisor of %d",
            option, *n, N, N == 1 ? "" : "s", *n, N);
}

// ---- the ranks ----
typedef struct Mesh {
    Axes axes;
    Comm *tp, *pp, *dp;      // ranks with other parts of the same matrices; with other blocks of the same replica;
                             // with the same parts and blocks of other replicas. Views
    Comm* tied;              // the first and the last rank of pp, in this order; others form groups of one. A view
    Comm *world, split[4];   // a view; the communicators above, unless they are the world
    const char* names[4];    // of split
    int colors[4], num_splits;
    const char* text;        // --mesh; NULL if the program has no such option
    double sent_along[MESH_AXES]; // bytes per step and axis, set by gpt2_predict_sent of a program that has --mesh
} Mesh;

// Returns the communicator of the `size` ranks with the same color. Its size and rank may be used before mesh_split.
static inline Comm* mesh_group(Mesh* m, const char* name, int size, int rank, int color) {
    if (size == m->world->size) return m->world;
    Comm* c = &m->split[m->num_splits];
    c->size = size;
    c->rank = rank;
    m->names[m->num_splits] = name;
    m->colors[m->num_splits++] = color;
    return c;
}

// Sets who shares what. The fields of `m` are 0 before.
static inline void mesh_plan_axes(Mesh* m, Comm* world, Axes axes) {
    AxesPlace place = axes_place(axes, world->rank);
    int t = axes.size[MESH_TP], p = axes.size[MESH_PP], tp = place.at[MESH_TP], pp = place.at[MESH_PP];
    int replica = place.at[MESH_DP];
    bool root = pp == 0 || pp == p - 1;
    m->axes = axes;
    m->world = world;
    m->tp = mesh_group(m, "tp", t, tp, world->rank / t);
    m->pp = mesh_group(m, "pp", p, pp, replica * t + tp);
    m->dp = mesh_group(m, "dp", axes.size[MESH_DP], replica, pp * t + tp);
    m->tied = p <= 2 ? m->pp
            : mesh_group(m, "tied", root ? 2 : 1, root && pp > 0, root ? replica * t + tp : world->size + world->rank);
}
// Returns true if every rank is alone in communicator number k, which is then not opened. (A rank between the first and
// the last stage is also alone in `tied`, but those two open it.)
static inline bool mesh_all_alone(const Mesh* m, int k) {
    return m->split[k].size == 1 && m->colors[k] < m->world->size;
}
// Opens the communicators. Collective.
static inline void mesh_split(Mesh* m) {
    for (int k = 0; k < m->num_splits; k++) {
        if (mesh_all_alone(m, k)) comm_alone(&m->split[k], m->world, m->names[k]);
        else comm_split(&m->split[k], m->world, m->names[k], m->colors[k]);
    }
    comm_register_on(m->dp);
    m->world->axis = AXIS_ALL;
    m->tied->axis = AXIS_PP;
    m->dp->axis = AXIS_DP;
    m->pp->axis = AXIS_PP;
    m->tp->axis = AXIS_TP; // last: a communicator that is several of these counts as tp, pp or dp
}

// Returns the bytes of MEMORY_COMMUNICATION that the world and these communicators take.
static inline size_t mesh_bytes(const Mesh* m) {
    size_t bytes = comm_world_bytes(m->world);
    for (int k = 0; k < m->num_splits; k++)
        if (!mesh_all_alone(m, k)) bytes += comm_split_bytes(m->world, m->split[k].size);
    return bytes;
}

static inline void mesh_free(Mesh* m) {
    while (m->num_splits > 0) comm_free(&m->split[--m->num_splits]);
}

// ---- parts of a unit ----
// *acc += the squares of x, elements of a range, counting each once: tensors that are not cut count in part 0, and
// replicated ranges not at all.
static inline void add_range_squares(double* acc, GPT2Config c, const ParamRange* p, const floatX* x) {
    size_t first = 0;
    if (p->is_replicated) return;
    if (p->part == 0) { add_sum_squares(acc, x, p->n); return; }
    for (int i = 0; i < unit_tensors(p->unit); i++) {
        TensorInfo t = unit_tensor(c, p->unit, i);
        size_t n = tensor_part_elements(t, p->parts);
        size_t low = size_max(p->begin, first), high = size_min(p->begin + p->n, first + n);
        if (t.cut != CUT_NONE && low < high) add_sum_squares(acc, x + (low - p->begin), high - low);
        first += n;
    }
}
#endif
