/*
mesh_run.h - what a mesh of ranks adds to a run on several ranks (ranks_run.h): who shares what, and what is sent along each axis.
*/
#ifndef LLMC_MESH_RUN_H
#define LLMC_MESH_RUN_H
#include "../parallel/mesh.h"
#include "ranks_run.h"

// ---- before the model ----

// Dies if the options do not fit the ranks or the model.
static inline Axes mesh_choose_axes(Run* run, const Mesh* mesh) {
    RanksRun* r = run->ranks;
    int N = r->context.comm.size;
    if (mesh->text) {
        Axes axes = axes_choose(mesh->text, N);
        r->tensor_parallel = axes.size[MESH_TP];
        r->pipeline_parallel = axes.size[MESH_PP];
        mesh_check_model("--mesh tp=", axes.size[MESH_TP], run->config);
        return axes;
    }
    mesh_check_ranks("--tensor-parallel ", &r->tensor_parallel, N);
    mesh_check_model("--tensor-parallel ", (int)r->tensor_parallel, run->config);
    mesh_check_ranks("--pipeline-parallel ", &r->pipeline_parallel, N);
    int t = (int)r->tensor_parallel, p = (int)r->pipeline_parallel;
    return axes_of(t, p, N / (t * p), false);
}

// Sets who shares what, in `mesh`. mesh_recompute opens its communicators: layers_prepare comes before any messages.
static inline void mesh_choose(Run* run, Mesh* mesh) {
    RanksRun* r = run->ranks;
    mesh_plan_axes(mesh, &r->context.comm, mesh_choose_axes(run, mesh));
    r->mesh = mesh;
    AxesPlace place = axes_place(mesh->axes, r->context.comm.rank);
    if (r->pipeline_parallel > 1) r->pipe = place.at[MESH_DP] * mesh->axes.size[MESH_TP] + place.at[MESH_TP];
}
// Ranks that share a replica of the model see the same data.
static inline DataReaders mesh_readers(const Run* run) {
    const RanksRun* r = run->ranks;
    Axes axes = r->mesh->axes;
    int rank = axes_place(axes, r->context.comm.rank).at[MESH_DP], d = axes.size[MESH_DP]; // of replicas of the model
    bool shared = r->tensor_parallel * r->pipeline_parallel > 1;
    DataReaders copies = { rank, d, shared ? "replicas of the model" : "ranks", r->pipeline_parallel };
    return copies;
}

static inline void mesh_start(Run* run, Mesh* mesh, int argc, char** argv) {
    bool pipelined = run->ranks->pipeline_parallel == 0 || mesh->text; // as options_pipeline_parallel has set it
    ranks_join(run, argc, argv);
    mesh_choose(run, mesh);
    ranks_open_data(run, mesh_readers(run), pipelined);
    if (mesh->text == NULL) return;
    int N = run->ranks->context.comm.size;
    char (*names)[RANK_NAME] = (char (*)[RANK_NAME])xcalloc((size_t)N, RANK_NAME); // messages name ranks by where they are
    for (int r = 0; r < N; r++) axes_text(mesh->axes, r, names[r], RANK_NAME);
    control_name_ranks(&run->ranks->context.control, names);
}

// The same for --predict (predict.h), which starts nothing: for a rank of stage predicted_stage.
static inline void mesh_predict(Run* run, Mesh* mesh) {
    AxesPlace place = { { 0, run->ranks->predicted_stage, 0 } }; // tp, pp, dp
    run->ranks->context.comm.rank = axes_rank(mesh_choose_axes(run, mesh), place);
    mesh_choose(run, mesh);
    run_choose_batch(run, mesh_readers(run));
    if (mesh->text) run->ranks->sent_along = mesh->sent_along;
}

static inline int mesh_recompute(Run* run, LayerShapes shapes) {
    run_prepare(run, shapes);
    mesh_split(run->ranks->mesh);
    return ranks_choose_recompute(run);
}

// Says which ranks save: all of them, where each has shards of its own, else those of the first replica of the model.
static inline void mesh_choose_writers(Run* run, bool sharded) {
    const Mesh* m = run->ranks->mesh;
    int model = m->pp->size * m->tp->size, place = m->pp->rank * m->tp->size + m->tp->rank;
    run->ranks->share.writer = sharded || m->dp->rank == 0 ? m->dp->rank * model + place : -1;
    run->ranks->share.writers = sharded ? m->dp->size * model : model;
}

// ---- before the first step ----

// Prints the axes of the mesh, the outer one first, and what this rank sends along each per step: bytes.
static inline void report_axes(Axes a, const double sent[MESH_AXES]) {
    static const char* const what[MESH_AXES] = { "parts of each matrix", "stages", "replicas of the model" };
    const int order[MESH_AXES] = { a.pp_outside ? MESH_PP : MESH_DP, a.pp_outside ? MESH_DP : MESH_PP, MESH_TP };
    char text[32];
    for (int i = 0; i < MESH_AXES; i++)
        printf("%s%s %d (%s)", i == 0 ? "mesh       " : " x ", mesh_axis_names[order[i]], a.size[order[i]], what[order[i]]);
    for (int i = 0; i < MESH_AXES; i++)
        printf("%s%s along %s", i == 0 ? "; a rank sends " : ", ", format_bytes(text, sizeof text, sent[order[i]]),
               mesh_axis_names[order[i]]);
    printf(" per step\n");
    fflush(stdout);
}

// The same for metrics.jsonl's first line. sent: bytes per step that were predicted along each axis.
static inline void axes_record(json_t* run, Axes a, const double sent[MESH_AXES]) {
    json_t *mesh = json_object(), *bytes = json_object();
    for (int k = 0; k < MESH_AXES; k++) {
        json_object_set_new(mesh, mesh_axis_names[k], json_integer(a.size[k]));
        json_object_set_new(bytes, mesh_axis_names[k], json_real(sent[k]));
    }
    json_object_set_new(run, "mesh", mesh);
    json_object_set_new(run, "predicted_comm_bytes_along", bytes);
}

// Prints the mesh, after ranks_report. From here on what is sent along each axis of --mesh is counted beside what was predicted.
static inline void mesh_report(Run* run) {
    RanksRun* r = run->ranks;
    RankContext* w = &r->context;
    const Mesh* m = r->mesh;
    int t = (int)r->tensor_parallel, replicas = w->comm.size / t;
    if (m->text == NULL && t > 1)
        printf("mesh       %d replica%s of the model, %son %d ranks with 1/%d of each matrix\n", replicas, replicas == 1 ? "" : "s",
               replicas == 1 ? "" : "each ", t, t);
    fflush(stdout);
    if (m->text == NULL) return;
    report_axes(m->axes, m->sent_along);
    axes_record(run->record, m->axes, m->sent_along);
    const Comm* const comms[MESH_AXES] = { m->tp, m->pp, m->dp };
    for (int k = 0; k < MESH_AXES; k++) {
        const Comm* also = k == MESH_PP && m->tied != m->pp ? m->tied : NULL;
        context_count_along(w, mesh_axis_names[k], comms[k], also, m->sent_along[k]);
    }
}

// ---- --check-every ----

// Of units of which each rank has a part (parallel/mesh.h): dies unless ranks with the same part have the same parameters, and all
// ranks the same replicated tensors. params has the parts of the units, one after another.
typedef struct { const Run* run; const Unit* units; const floatX* params; } PartsOfUnits;
static inline uint64_t part_checksum(void* self, int u) {
    PartsOfUnits* p = (PartsOfUnits*)self;
    if (p->units[u].size == 0) return UNIT_ELSEWHERE;
    return device_checksum(p->params + p->units[u].offset, sizeof(floatX), p->units[u].size);
}
static inline uint64_t part_copies_checksum(void* self, int u) {
    PartsOfUnits* p = (PartsOfUnits*)self;
    if (p->units[u].size == 0) return UNIT_ELSEWHERE;
    return replicated_checksum(p->run->config, u, (int)p->run->ranks->tensor_parallel, p->params + p->units[u].offset);
}
static inline void mesh_check_parts(Run* run, long long step, const Unit* units, const floatX* params) {
    PartsOfUnits p = { run, units, params };
    int t = (int)run->ranks->tensor_parallel, num_units = run->config.L + 1;
    if (t > 1) context_check_units(&run->ranks->context, step, num_units, part_copies_checksum, &p);
    context_check_parts(&run->ranks->context, step, t, num_units, part_checksum, &p);
}
#endif
