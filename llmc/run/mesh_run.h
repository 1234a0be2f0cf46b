/*
mesh_run.h - the additions of a mesh of ranks to a run on several ranks (ranks_run.h): the ranks that share a replica
of the model, and the traffic along each axis.
*/
#ifndef LLMC_MESH_RUN_H
#define LLMC_MESH_RUN_H
#include "../parallel/mesh.h"
#include "ranks_run.h"

// ---- before the model ----

// Dies if the options do not fit the ranks or the model.
static inline Axes mesh_choose_axes(Run* run, const Mesh* mesh) {
    RanksRun* r = run->ranks;
    int N = r->all.comm.size;
    if (mesh->text) {
        Axes axes = axes_choose(mesh->text, N);
        r->along[AXIS_TP] = axes.size[MESH_TP];
        r->along[AXIS_PP] = axes.size[MESH_PP];
        mesh_check_model("--mesh tp=", axes.size[MESH_TP], run->config);
        return axes;
    }
    mesh_check_ranks("--tensor-parallel ", &r->along[AXIS_TP], N);
    mesh_check_model("--tensor-parallel ", (int)r->along[AXIS_TP], run->config);
    mesh_check_ranks("--pipeline-parallel ", &r->along[AXIS_PP], N);
    int t = (int)r->along[AXIS_TP], p = (int)r->along[AXIS_PP];
    return axes_of(t, p, N / (t * p), false);
}

// Sets which ranks save: all of them if each owns shards, otherwise those of the first replica of the model.
static inline void mesh_choose_writers(Run* run, bool sharded) {
    const Mesh* m = (const Mesh*)run->ranks->sharing.self;
    int model = m->pp->size * m->tp->size, place = m->pp->rank * m->tp->size + m->tp->rank;
    run->ranks->share.writer = sharded || m->dp->rank == 0 ? m->dp->rank * model + place : -1;
    run->ranks->share.writers = sharded ? m->dp->size * model : model;
}

// Sets who shares what. stage: as in RankSharing. Ranks that share a replica of the model
// see the same data.
static inline DataReaders mesh_readers(void* self, Run* run, int stage) {
    Mesh* mesh = (Mesh*)self;
    RanksRun* r = run->ranks;
    Axes axes = mesh_choose_axes(run, mesh);
    AxesPlace predicted = { { 0, stage, 0 } }; // tp, pp, dp
    if (stage != RANKS_JOINED) r->all.comm.rank = axes_rank(axes, predicted);
    if (mesh->text) r->sharing.sent = mesh->sent_along;
    mesh_plan_axes(mesh, &r->all.comm, axes);
    mesh_choose_writers(run, false); // a program that shards the state calls it again
    AxesPlace place = axes_place(axes, r->all.comm.rank);
    if (r->along[AXIS_PP] > 1) r->sharing.pipe = place.at[MESH_DP] * axes.size[MESH_TP] + place.at[MESH_TP];
    bool shared = r->along[AXIS_TP] * r->along[AXIS_PP] > 1;
    const char* readers = shared ? "replicas of the model" : "ranks";
    DataReaders replicas = { place.at[MESH_DP], axes.size[MESH_DP], readers, r->along[AXIS_PP] };
    return replicas;
}

// Opens the communicators. Where the axes are given by --mesh, messages name ranks by their place on them.
static inline void mesh_open(void* self, Run* run) {
    Mesh* mesh = (Mesh*)self;
    int N = run->ranks->all.comm.size;
    mesh_split(mesh);
    if (mesh->text == NULL) return;
    char (*names)[RANK_NAME] = (char (*)[RANK_NAME])xcalloc((size_t)N, RANK_NAME);
    for (int r = 0; r < N; r++) axes_text(mesh->axes, r, names[r], RANK_NAME);
    control_name_ranks(&run->ranks->all.control, names);
}

// ---- before the first step ----

// Prints the axes of the mesh, the outer one first, and the bytes that this rank sends along each in a step.
static inline void report_axes(Axes a, const double sent[MESH_AXES]) {
    static const char* const what[MESH_AXES] = { "parts of each matrix", "stages", "replicas of the model" };
    const int order[MESH_AXES] = { a.pp_outside ? MESH_PP : MESH_DP, a.pp_outside ? MESH_DP : MESH_PP, MESH_TP };
    char text[32];
    for (int i = 0; i < MESH_AXES; i++)
        printf("%s%s %d (%s)", i == 0 ? "mesh       " : " x ", mesh_axis_names[order[i]], a.size[order[i]],
               what[order[i]]);
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

// Prints the mesh. From here on the bytes along each axis of --mesh are counted, to be compared with the prediction.
static inline void mesh_report(void* self, Run* run) {
    RanksRun* r = run->ranks;
    Ranks* w = &r->all;
    const Mesh* m = (const Mesh*)self;
    int t = (int)r->along[AXIS_TP], replicas = w->comm.size / t;
    if (m->text == NULL && t > 1)
        printf("mesh       %d replica%s of the model, %son %d ranks with 1/%d of each matrix\n",
               replicas, replicas == 1 ? "" : "s", replicas == 1 ? "" : "each ", t, t);
    fflush(stdout);
    if (m->text == NULL) return;
    report_axes(m->axes, m->sent_along);
    axes_record(run->record, m->axes, m->sent_along);
    const Comm* const comms[MESH_AXES] = { m->tp, m->pp, m->dp };
    for (int k = 0; k < MESH_AXES; k++) {
        const Comm* also = k == MESH_PP && m->tied != m->pp ? m->tied : NULL;
        ranks_count_along(w, mesh_axis_names[k], comms[k], also, m->sent_along[k]);
    }
}

// Call after the program's options are added.
static inline void ranks_are_mesh(Run* run, Mesh* mesh) {
    // The axis is 0 if options_pipeline_parallel has set it.
    bool has_actions = mesh->text != NULL || run->ranks->along[AXIS_PP] == 0;
    RankSharing sharing = { mesh, mesh_readers, mesh_open, mesh_report, NULL, NULL, has_actions, -1 };
    run->ranks->sharing = sharing;
}
#endif
