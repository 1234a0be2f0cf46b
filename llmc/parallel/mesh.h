/*
mesh.h - the ranks as a mesh: t neighbours together hold one copy of the model, each a part of every matrix (tensor
parallelism); ranks that are t apart hold the same part of different copies (data parallelism).
*/
#ifndef LLMC_MESH_H
#define LLMC_MESH_H
#include "../base/options.h"
#include "../comm/comm.h"
#include "../device/layers.h"
#include "../model/gpt2.h"
#include "../watch/agree.h"

// ---- options ----
typedef struct { int sequence_parallel, keep_gathered, overlap, sums_fp32; } TensorParallel; // each 0 or 1

static inline void options_tensor_parallel(OptionTable* table, long long* t, TensorParallel* how) {
    *t = 0;
    how->overlap = 1;
    option_int(table, "tensor-parallel", t, 0, 1 << 20,
               "neighbouring ranks that share one copy of the model; the copies are data parallel; 0: all ranks share one");
    option_flag(table, "sequence-parallel", &how->sequence_parallel,
                "ranks that share a copy of the model also share the rows of layernorms and of the residual stream");
    option_flag(table, "keep-gathered", &how->keep_gathered,
                "with --sequence-parallel: gathered rows are kept for the backward pass, and not gathered again");
    option_flag(table, "overlap", &how->overlap, "what a block's backward pass sends travels while it computes");
    option_choice(table, "tp-reduce-dtype", &how->sums_fp32, "model|fp32",
                  "the precision in which partial products are kept, sent and added; model: that of the parameters; fp32: in 16"
                  " bits each is rounded once, as a sum, twice the bytes are sent, and B*T*C floats more are held");
}

// Dies unless N ranks can be copies of t ranks, and the model has t parts. t 0 becomes N.
static inline void mesh_check(long long* t, int N, GPT2Config c) {
    if (*t == 0) *t = N;
    int n = (int)*t;
    require(N % n == 0, "--tensor-parallel %d does not divide %d ranks; start a multiple of %d, or choose a divisor of %d",
            n, N, n, N);
    require(c.NH % n == 0, "--tensor-parallel %d does not divide %d heads, and a head is not cut; choose --heads as a"
            " multiple of %d, or fewer ranks that share a copy of the model", n, c.NH, n);
    size_t multiple = 128; // of the padded vocabulary
    while (multiple % (size_t)n != 0) multiple += 128;
    require(c.Vp % n == 0, "--tensor-parallel %d does not divide the vocabulary, %d tokens with its padding; choose"
            " --vocab-size %zu", n, c.Vp, round_up((size_t)c.V, multiple));
}

// Dies unless the rows of a micro-batch can be cut in t parts, where they are. Where they are not, all of them are kept. If
// nothing is added, or floatX is fp32, --tp-reduce-dtype changes nothing.
static inline void mesh_check_rows(TensorParallel* how, int t, int B, int T) {
    require(how->sequence_parallel || !how->keep_gathered,
            "--keep-gathered is about what --sequence-parallel gathers: give both or neither");
    require(!how->sequence_parallel || B * T % t == 0, "--sequence-parallel cuts the tokens of a micro-batch into %d parts,"
            " and --batch-size %d x --seq-len %d = %d does not divide; choose a multiple of %d", t, B, T, B * T, t);
    if (!how->sequence_parallel) how->keep_gathered = 1;
    if (t == 1 || !NEEDS_MASTER) how->sums_fp32 = 0;
}

// ---- the ranks ----
typedef struct {
    Comm *tp, *dp;           // of this rank: those that share its copy of the model; those that have the same part. Views
    Comm *world, split[2];   // a view; these two, where they are not the world
} Mesh;

// Sets who shares what, of which ranks and sizes can be used at once. The fields of `m` are 0 before.
static inline void mesh_plan(Mesh* m, Comm* world, int t) {
    m->world = world;
    m->tp = t == world->size && t > 1 ? world : &m->split[0];
    m->dp = t == 1 ? world : &m->split[1];
    m->tp->size = t;
    m->tp->rank = world->rank % t;
    m->dp->size = world->size / t;
    m->dp->rank = world->rank / t;
}
// Opens the communicators. Collective.
static inline void mesh_split(Mesh* m) {
    int t = m->tp->size;
    if (m->tp != m->world && m->dp != m->world) {
        comm_split(m->tp, m->world, "tp", m->world->rank / t);
        comm_split(m->dp, m->world, "dp", m->world->rank % t);
    } else if (m->tp != m->world) comm_alone(m->tp, m->world, "tp");
    else comm_alone(m->dp, m->world, "dp");
}

// Bytes of MEMORY_COMMUNICATION that the world and these communicators take.
static inline size_t mesh_bytes(const Mesh* m) {
    size_t bytes = comm_world_bytes(m->world);
    if (m->tp == m->world || m->dp == m->world) return bytes;
    return bytes + comm_split_bytes(m->world, m->tp->size) + comm_split_bytes(m->world, m->dp->size);
}

static inline void mesh_free(Mesh* m) {
    for (int k = 1; k >= 0; k--) if (m->split[k].world) comm_free(&m->split[k]);
}

// Prints who shares what.
static inline void report_mesh(int N, int t) {
    printf("mesh       %d cop%s of the model, %son %d ranks with 1/%d of each matrix\n", N / t, N == t ? "y" : "ies",
           N == t ? "" : "each ", t, t);
    fflush(stdout);
}

// ---- partial products: this rank's term of a product that is a sum over the t ranks. wide, if it is not NULL, has it in fp32; else
// the result has it, rounded ----
static inline void partial_forward(float* wide, floatX* out, const floatX* inp, const floatX* w, const floatX* bias,
                                   int N, int C, int OC) {
    if (wide) matmul_forward_fp32(wide, inp, w, bias, N, C, OC);
    else matmul_forward(out, inp, w, bias, N, C, OC);
}
// rows [row, row + N) of dinp, or of wide
static inline void partial_backward_input(float* wide, floatX* dinp, const floatX* dout, const floatX* w,
                                          int row, int N, int C, int OC) {
    size_t at = (size_t)row * (size_t)C;
    if (wide) matmul_backward_input_fp32(wide + at, dout, w, N, C, OC);
    else matmul_backward_input(dinp + at, dout, w, N, C, OC);
}

// ---- parts of a unit, x: the tensors that are cut, and the copies that every part has ----
// *acc += the sum of squares of what is cut
static inline void add_cut_squares(double* acc, GPT2Config c, int u, int parts, const floatX* x) {
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        size_t n = tensor_part_elements(t, parts);
        if (t.cut != CUT_NONE) add_sum_squares(acc, x, n);
        x += n;
    }
}

// For --check-every: a checksum of the copies
static inline uint64_t copies_checksum(GPT2Config c, int u, int parts, const floatX* x) {
    uint64_t sum = 0;
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        if (t.cut == CUT_NONE) sum = 31 * sum + device_checksum(x, sizeof(floatX), tensor_elements(t));
        x += tensor_part_elements(t, parts);
    }
    return sum;
}
#endif
