// plan_recommend.h - prints what plan_search.h found, and what plan_validate.h compared.
#ifndef DEV_PLAN_RECOMMEND_H
#define DEV_PLAN_RECOMMEND_H
#include "plan_cost.h"
#include "plan_search.h"
#include "plan_validate.h"
#include <jansson.h>

static inline void recommend_mesh_name(const MeshPlan* p, char* text, size_t size) {
    snprintf(text, size, "dp=%d,tp=%d,pp=%d", p->dp, p->tp, p->pp);
}
static inline void recommend_print_row(const SearchResult* r, int row) {
    const MeshPlan* p = &r->plan;
    char mesh[32];
    int bound = search_bound(&r->time);
    recommend_mesh_name(p, mesh, sizeof mesh);
    printf("%2d  %-20s %5d %7d %6d %-10s %8.1f %9.1f %6.1f%%  %s", row, mesh, p->zero, p->chunks, p->micro,
           p->kept == MESH_INPUTS ? "inputs" : "all", 1e-9 * r->bytes.total, 1e3 * r->time.seconds, 100 * r->time.mfu,
           search_parts[bound]);
    printf(" %.0f %%\n", 100 * search_part(&r->time, bound) / r->time.seconds);
}
static inline void recommend_print_cost(const SearchResult* first, RunOf run) {
    double gpus = mesh_ranks(&first->plan);
    RunCost c = run_cost(run, first->time.tokens_per_s, gpus);
    if (run.tokens == 0) return;
    printf("%.4g tokens: %.4g hours, %.4g GPU-hours, %.4g kWh of %.0f W each", run.tokens, c.hours, c.gpu_hours, c.kwh, run.watts);
    if (run.price > 0) printf(", %.0f at %.4g each", c.price, run.price);
    printf("\n");
}
// The bytes of a way by kind, on the rank that needs most, by the formulas of the program that runs it.
static inline PlanBytes recommend_bytes(const MeshPlan* p) {
    Plan plan = exact_plan(p);
    return plan_bytes(&plan, exact_stage(p));
}
static inline void recommend_print_bytes(const SearchFor* f, const MeshPlan* p, bool exact) {
    if (f->shape->llama) {
        printf("bytes are estimated (plan_mesh.h): no program of this course has such a model\n");
        return;
    }
    PlanBytes b = recommend_bytes(p);
    printf("bytes are train_gpt2_%s's own, of the rank that needs most:", runs_names[exact_program(p)]);
    for (int k = 0, n = 0; k < MEMORY_KINDS; k++) {
        char text[32];
        if (b.memory[k] == 0) continue;
        if (exact) snprintf(text, sizeof text, "%zu", b.memory[k]);
        else format_bytes(text, sizeof text, (double)b.memory[k]);
        printf("%s %s %s", n++ ? "," : "", memory_kind_names[k], text);
    }
    printf("; not counted: the rest of the layers' workspace\n");
}
// What --compress int8 would change. Exposed communication falls at least as its bytes do.
static inline void recommend_print_compression(const SearchResult* first) {
    const MeshPlan* p = &first->plan;
    double ms = 1e3 * first->time.seconds, exposed = 1e3 * first->time.data;
    double share = (1 + sizeof(float) / (double)QUANTISE_BLOCK) / p->program->element_bytes;
    if (p->dp == 1) return;
    printf("compressed gradients: dp's communication is exposed for %.1f of %.1f ms", exposed, ms);
    if (exposed < 0.01 * ms) printf(", so there is nothing to gain\n");
    else if (exact_program(p) != RUNS_DDP || p->shape->llama)
        printf("; int8 would be %.0f %% of the bytes, but no program here compresses them on such a mesh\n", 100 * share);
    else {
        Plan plan = exact_plan(p);
        char more[32];
        size_t whole = plan_memory_total(&plan, PLAN_DDP);
        plan.compress = compress_usual(COMPRESS_INT8);
        PlanBytes b = plan_bytes(&plan, PLAN_DDP);
        double touched = b.root.packing + b.blocks.packing + b.root.unpacking + b.blocks.unpacking;
        plan.memory_bandwidth = p->gpu->bandwidth;
        format_bytes(more, sizeof more, (double)(plan_bytes_total(b) - whole));
        printf("; with train_gpt2_compress --compress int8, which sends %.0f %% of the bytes and takes %s more, a step would have about"
               " %.1f ms\n", 100 * share, more, ms - exposed * (1 - share) + 1e3 * touched_seconds(&plan, touched));
    }
}
// At most five, then why; then for every other mesh the first reason why not.
static inline void recommend_print(const Search* s, const SearchFor* f, RunOf run, bool exact) {
    char text[640], mesh[32];
    printf("%s: %d blocks, %d channels, %d heads, %d tokens, %.4g B parameters\n", f->shape->name, f->shape->L, f->shape->C,
           f->shape->NH, f->shape->V, 1e-9 * shape_parameters(f->shape));
    printf("%d x %d tokens a step, on %d ranks, each with one %s of %.4g GB, %.4g of these in reserve\n", f->batch, f->T, f->ranks,
           f->gpu->what, 1e-9 * f->gpu->memory, 1e-9 * f->reserve);
    printf("%d ways of %d meshes and stages of ZeRO, of which %d fit\n\n", s->tried, s->n, s->fits);
    if (s->fits > 0) printf("    %-20s %5s %7s %6s %-10s %8s %9s %7s  %s\n", "mesh", "zero", "chunks", "micro", "kept", "GB",
                            "step ms", "MFU", "most of the step");
    for (int i = 0; i < s->fits && i < 5; i++) recommend_print_row(&s->results[i], i + 1);
    if (s->fits > 0) {
        search_why_first(s, text, sizeof text);
        printf("\n%s\n", text);
        recommend_print_bytes(f, &s->results[0].plan, exact);
        recommend_print_compression(&s->results[0]);
        recommend_print_cost(&s->results[0], run);
        search_command(&s->results[0].plan, text, sizeof text);
        printf("\n    %s\n", text);
    }
    printf("\nwhy not\n");
    for (int i = s->fits > 0; i < s->n; i++) {
        const SearchResult* first = s->fits > 0 ? &s->results[0] : &s->results[i];
        search_why(&s->results[i], first, text, sizeof text);
        recommend_mesh_name(&s->results[i].plan, mesh, sizeof mesh);
        printf("  %-20s zero %d: %s\n", mesh, s->results[i].plan.zero, text);
    }
}

static inline json_t* recommend_json_row(const SearchResult* r, const SearchResult* first) {
    const MeshPlan* p = &r->plan;
    char why[640] = "";
    if (r != first || first->error != NULL) search_why(r, first, why, sizeof why);
    json_t* o = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:b, s:s}", "dp", p->dp, "tp", p->tp, "pp", p->pp, "zero", p->zero,
                          "chunks", p->chunks, "micro", p->micro, "recompute", p->kept == MESH_INPUTS, "fits", r->error == NULL,
                          "why_not", why);
    if (!isinf(r->bytes.total)) json_object_set_new(o, "bytes", json_real(r->bytes.total));
    if (!isinf(r->bytes.total) && !p->shape->llama) {
        PlanBytes b = recommend_bytes(p);
        json_t* kinds = json_object();
        char command[640];
        for (int k = 0; k < MEMORY_KINDS; k++)
            json_object_set_new(kinds, memory_kind_names[k], json_integer((json_int_t)b.memory[k]));
        json_object_set_new(o, "bytes_of", kinds);
        search_command(p, command, sizeof command);
        json_object_set_new(o, "command", json_string(command));
    }
    if (r->error != NULL) return o;
    json_object_set_new(o, "seconds", json_real(r->time.seconds));
    json_object_set_new(o, "mfu", json_real(r->time.mfu));
    json_object_set_new(o, "tokens_per_s", json_real(r->time.tokens_per_s));
    json_t* parts = json_object(); // an object of their own: one of them is named dp, as its ranks are
    for (int k = 0; k < PARTS; k++) json_object_set_new(parts, search_parts[k], json_real(search_part(&r->time, k)));
    json_object_set_new(o, "seconds_of", parts);
    return o;
}
static inline void recommend_print_json(const Search* s, const SearchFor* f) {
    char text[640] = "", command[640] = "";
    json_t* rows = json_array();
    if (s->fits > 0) search_why_first(s, text, sizeof text);
    if (s->fits > 0) search_command(&s->results[0].plan, command, sizeof command);
    for (int i = 0; i < s->n; i++) json_array_append_new(rows, recommend_json_row(&s->results[i], &s->results[0]));
    json_t* root = json_pack("{s:s, s:b, s:s, s:i, s:i, s:i, s:s, s:s, s:o}", "model", f->shape->name, "bytes_are_exact",
                             !f->shape->llama, "gpu", f->gpu->name, "ranks", f->ranks, "batch", f->batch, "seq_len", f->T, "why",
                             text, "command", command, "meshes", rows);
    json_dumpf(root, stdout, JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(root);
}

static inline void validate_print_share(double share) {
    if (isnan(share)) printf(" %8s", "-");
    else printf(" %6.1f %%", 100 * share);
}
// All rows, the medians of each source and how far its furthest row is off, and the medians of all.
static inline void validate_print(const char* path, double reserve) {
    size_t n;
    Published* rows = published_read(path, &n);
    Validation v = validate_all(rows, n, reserve, stdout);
    printf("\n%-8s %6s %8s %8s %8s\n", "source", "rows", "bytes", "times", "furthest");
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && strcmp(rows[i].source, rows[i - 1].source) == 0) continue;
        size_t count = 0;
        while (i + count < n && strcmp(rows[i].source, rows[i + count].source) == 0) count++;
        Validation of = validate_all(rows + i, count, reserve, NULL);
        printf("%-8s %6zu", rows[i].source, count);
        validate_print_share(of.bytes_off);
        validate_print_share(of.times_off);
        validate_print_share(of.furthest);
        printf("\n");
    }
    printf("\nbytes    %3d rows, half of them within %.1f %%\ntimes    %3d rows, half of them within %.1f %%\n"
           "fits     %d of %d right\nnot predicted: %d rows, in fp8, of cut sequences, or what a paper calls HFU\n", v.bytes,
           100 * v.bytes_off, v.times, 100 * v.times_off, v.fits_right, v.fits, v.others);
    free(rows);
}
#endif
