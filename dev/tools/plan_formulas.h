/*
plan_formulas.h - asks one stage's formulas. plan_ddp.c, plan_compress.c, ..., plan_3d.c include it after their stage file, because
each stage has a type GPT2 of its own.

An object of these files exports nothing but the function that the Makefile names PLAN_FORMULA: all stages define functions
of the same names, so it compiles them with -fwhole-program. They are compiled for the CPU and without MPI; what depends on
the device or on the backend is corrected here.
*/
#ifndef DEV_PLAN_FORMULAS_H
#define DEV_PLAN_FORMULAS_H
#include "plan_stage.h"

#define PLAN_EXPORT __attribute__((externally_visible))

// Ranks as a stage's formulas see them. Nothing is ever sent.
typedef struct { CommBackend backend; CommContext world; Comm comm; } PlannedRanks;

// As mpi_device_bytes and nccl_device_bytes have it, whose headers need MPI's and NCCL's: MPI on host memory adds up in
// pieces of COMM_PIECE; NCCL has a number per rank.
static size_t planned_mpi_bytes(const CommOptions* o, int N) {
    (void)o;
    return N > 1 ? 4 << 20 : 0;
}
static size_t planned_nccl_bytes(const CommOptions* o, int N) {
    (void)o;
    return (size_t)N * sizeof(int);
}

// Sets the fields that all stages have. g->dp becomes a view of ranks.
static void plan_configure(const Plan* p, GPT2* g, PlannedRanks* ranks) {
    memset(ranks, 0, sizeof *ranks);
    ranks->backend.device_bytes = p->gpu ? planned_nccl_bytes : planned_mpi_bytes;
    ranks->world.backend = p->N > 1 ? &ranks->backend : NULL; // a rank that is alone has none
    ranks->comm.world = &ranks->world;
    ranks->comm.size = p->N;
    memset(g, 0, sizeof *g);
    g->config = p->config;
    g->max_B = p->B;
    g->seq_len = p->T;
    g->recompute = p->recompute;
    g->num_units = p->config.L + 1;
    g->dp = &ranks->comm;
}

// Bytes of the logits that the GPU's program keeps, where this CPU's would keep fewer.
static inline size_t plan_more_logits(const Plan* p) {
    int N = p->B * p->T, Vp = p->config.Vp;
    int more = p->gpu ? classifier_rows_of(CLASSIFIER_ELEMENTS_CUDA, N, Vp) - classifier_rows(N, Vp) : 0;
    return (size_t)more * (size_t)Vp * sizeof(floatX);
}

static int plan_classifier_elements(const Plan* p) { return p->gpu ? CLASSIFIER_ELEMENTS_CUDA : CLASSIFIER_ELEMENTS_CPU; }

// What the stage's formula says of the bytes sent. (That of train_gpt2_3d also fills in b.sent_along.)
#ifndef PLAN_SENT
#define PLAN_SENT(g, b) gpt2_predict_sent(g)
#endif

// What the stage's formulas say about g, whose fields are set, the number of its logits among them. tokens: what a rank has
// of the padded vocabulary. Of the layers' workspace only the classifier's fp32 sums are counted: the rest are some MB that
// depend on threads and on the library.
static PlanBytes plan_ask_part(const Plan* p, const GPT2* g, int tokens) {
    PlanBytes b;
    memset(&b, 0, sizeof b);
    gpt2_predict_memory(g, b.memory);
    size_t sums = classifier_sums_of(plan_classifier_elements(p), p->B * p->T, p->config.C, tokens);
    b.memory[MEMORY_WORKSPACE] = sums * sizeof(float);
    b.sent = PLAN_SENT(g, b);
    return b;
}
// The same of a stage whose ranks have the whole vocabulary, and whose formulas know the number of logits.
static inline PlanBytes plan_ask(const Plan* p, const GPT2* g) {
    PlanBytes b = plan_ask_part(p, g, p->config.Vp);
    b.memory[MEMORY_ACTIVATIONS] += plan_more_logits(p);
    return b;
}
#endif
