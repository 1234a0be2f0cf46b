/*
run.h - a run: all that a stage's main does in the same words whatever it teaches. Options, ranks, data and the checkpoint to
start from; the log, the timeline and what is saved; what was predicted beside what was measured.

The order in which a stage calls these is that of its main:
    run_options - its own options - run_start - its model - run_report - run_load - run_begin -
    for each step: run_evaluates, run_samples, run_saves, then run_step_begin and run_step_end -
    run_end - frees its model - run_stop
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H
#include "../data/dataloader.h"
#include "../data/tokenizer.h"
#include "../model/lr_schedule.h"
#include "../parallel/mesh.h"
#include "../save/param_ranges.h"
#include "run_fingerprint.h"
#include "logger.h"
#include "report.h"
#include "report_diagnosis.h"
#include "sample.h"
#include "start.h"
#include "trace.h"
#include "world.h"
#include "writing.h"

typedef struct {
    Options o;
    OptionTable table;
    World world;                    // a program that is not for several ranks is rank 0 of 1
    long long tensor_parallel;      // neighbouring ranks that share a replica of the model, and see the same data;
    long long pipeline_parallel;    // those of a pipeline; 1 where a stage knows only the other
    const char* mesh_text;          // --mesh, which says both. NULL: the stage has no such option
    Axes axes;                      // who shares what
    Tokenizer tokenizer;            // of no tokens where --tokenizer is ''
    CheckpointReader checkpoint;    // what the run starts from,
    bool from_checkpoint;           // if it starts from one
    GPT2Config config;
    DataLoader train, val;          // val only if --val-data is not empty
    long long tokens_per_step;
    int accumulation;               // micro-batches per step
    long long counted;              // targets of the step at hand that count in the loss, of all ranks and micro-batches
    double divisor;                 // of the sum of their losses: the same number; 1 where none counts, and the sum is 0
    LossScaler scaler;
    Logger log;
    int updates;                    // AdamW updates so far
    long long first;                // steps done before this run
    Mesh* mesh;                     // what run_mesh was given; a view. NULL: nothing
    SaveShare share;                // who saves; set by the stage, at first: rank 0 alone
    char* writes;                   // what the lock on --out says; owned. NULL: there is no lock (yet)
    size_t predicted[MEMORY_KINDS]; // bytes of this rank, set by the stage
    double sent;                    // bytes that this rank will send per step, set by the stage
    double sent_along[MESH_AXES];   // of these along each axis of the mesh, set by a stage that has --mesh;
    double sent_before[MESH_AXES];  // what it had sent before the step at hand,
    double min[MESH_AXES], max[MESH_AXES]; // and in the step that sent least and most
    double step_began;              // now_seconds
    StepTimes times;                // what each step's time went for
    size_t allocations;             // before the first step
} Run;

// ---- before the model ----

// The options of every stage. The caller adds its own to run->table.
static inline void run_options(Run* run, const char* program, const char* purpose) {
    run->o = options_defaults();
    run->table = options_table(program, purpose);
    options_common(&run->table, &run->o);
    run->tensor_parallel = run->pipeline_parallel = 1;
}

// Sets run->axes by the options. Dies if they do not fit the ranks or the model.
static inline void run_choose_axes(Run* run) {
    int N = run->world.comm.size;
    if (run->mesh_text) {
        run->axes = axes_choose(run->mesh_text, N);
        run->tensor_parallel = run->axes.size[MESH_TP];
        run->pipeline_parallel = run->axes.size[MESH_PP];
        mesh_check_model("--mesh tp=", run->axes.size[MESH_TP], run->config);
        return;
    }
    mesh_check(&run->tensor_parallel, N, run->config);
    mesh_check_stages(&run->pipeline_parallel, N);
    int t = (int)run->tensor_parallel, p = (int)run->pipeline_parallel;
    run->axes = axes_of(t, p, N / (t * p), false);
}

static inline void run_open_data(Run* run) {
    const Options* o = &run->o;
    int n = (int)(run->tensor_parallel * run->pipeline_parallel);
    int rank = axes_place(run->axes, run->world.comm.rank).at[MESH_DP], N = run->axes.size[MESH_DP]; // of replicas of the model
    long long micro = o->batch_size * o->seq_len * N; // of all ranks together
    char ranks[48] = "";
    if (N > 1) snprintf(ranks, sizeof ranks, " x %d %s", N, n > 1 ? "replicas of the model" : "ranks");
    run->tokens_per_step = o->total_batch_size ? o->total_batch_size : micro * run->pipeline_parallel;
    require(run->tokens_per_step % micro == 0,
            "--total-batch-size %lld must be a multiple of --batch-size %lld x --seq-len %lld%s = %lld tokens",
            run->tokens_per_step, o->batch_size, o->seq_len, ranks, micro);
    run->accumulation = (int)(run->tokens_per_step / micro);
    DataShape shape = { (int)o->batch_size, (int)o->seq_len, run->config.V, run->tokens_per_step / o->seq_len, rank, N,
                        (uint64_t)o->seed, (MaskUse)o->mask };
    const Tokenizer* tokenizer = o->tokenizer[0] ? &run->tokenizer : NULL;
    dataloader_init(&run->train, "--data", o->data, tokenizer, shape, DATA_TRAIN);
    if (o->val_data[0]) dataloader_init(&run->val, "--val-data", o->val_data, tokenizer, shape, DATA_EVAL);
}

// Reads the options, joins the ranks, and opens what the run starts from: tokenizer, checkpoint, data.
static inline void run_start(Run* run, int argc, char** argv) {
    const Options* o = &run->o;
    bool pipelined = run->pipeline_parallel == 0 || run->mesh_text; // as options_pipeline_parallel has set it
    options_parse(&run->table, argc, argv);
    RankInfo ranks = run->world.joins ? ranks_find() : ranks_alone();
    device_init(ranks.local_rank, ranks.local_size);
    device_memory_limit((size_t)ceil(o->memory_limit * 1e9)); // rounded up, because 0 means no limit
    world_start(&run->world, o, ranks);
    layers_choose((AttentionChoice)o->attention, o->deterministic);
    if (o->tokenizer[0]) tokenizer_open(&run->tokenizer, o->tokenizer);
    run->writes = writing_claim(&run->world.control, o, false); // before it is asked what is saved there
    run->from_checkpoint = open_checkpoint(o, &run->checkpoint);
    run->config = config_for_run(o, &run->table, &run->tokenizer, run->from_checkpoint ? &run->checkpoint : NULL);
    run_choose_axes(run);
    run_open_data(run);
    fault_check_micro(&run->world.fault, pipelined ? run->accumulation : 0);
    if (run->world.joins) require_same_fingerprint(&run->world.control, run_fingerprint(&run->table, run->config, &run->train));
    run->scaler = loss_scaler_init(o);
    run->share.writer = ranks.rank == 0 ? 0 : -1;
    run->share.writers = 1;
    RunShape shape = { run->config, o->seq_len, run->tokens_per_step, ranks.size };
    if (run->world.joins && ranks.rank == 0) run->times.single = single_run_read(run->world.single_text, &shape);
}

// Sets who shares what, for a mesh with communicators of its own. run_recompute opens them, because that is an exchange of
// messages, and layers_prepare comes before any.
static inline void run_mesh(Run* run, Mesh* mesh) {
    mesh_plan_axes(mesh, &run->world.comm, run->axes);
    run->mesh = mesh;
    if (run->mesh_text == NULL) return;
    int N = run->world.comm.size;
    char (*names)[RANK_NAME] = (char (*)[RANK_NAME])xcalloc((size_t)N, RANK_NAME);
    for (int r = 0; r < N; r++) axes_text(run->axes, r, names[r], RANK_NAME);
    control_name_ranks(&run->world.control, names);
}

// Lets the device choose how it computes these shapes, while its memory and all its multiprocessors are free: nothing is
// allocated, and no collective is under way. A model whose parameters alone have no room is not worth it.
static inline void run_prepare(const Run* run) {
    const Options* o = &run->o;
    size_t least[MEMORY_KINDS];
    memcpy(least, run->predicted, sizeof least);
    least[MEMORY_ACTIVATIONS] = 0; // they may be recomputed
    int t = (int)run->tensor_parallel, Vp = run->config.Vp / t;
    LayerShapes shapes = { (int)o->batch_size, (int)o->seq_len, run->config.C, run->config.NH, Vp, t };
    if (memory_fits(least)) layers_prepare(shapes);
}

// --recompute; auto: none if the bytes in run->predicted fit, on every rank, else block. Called before anything is allocated.
static inline int run_recompute(Run* run) {
    Options* o = &run->o;
    run_prepare(run);
    if (run->mesh) mesh_split(run->mesh);
    if (o->recompute != RECOMPUTE_AUTO) return o->recompute;
    o->recompute = world_memory_fits(&run->world, run->predicted) ? RECOMPUTE_NONE : RECOMPUTE_BLOCK;
    return o->recompute;
}

// ---- before the first step ----

// Prints what is about to be trained, on what, and what each rank will take and send. Collective.
static inline void run_report(Run* run) {
    RankCosts costs = world_costs(&run->world, run->predicted, run->sent);
    size_t on_host = run->predicted[MEMORY_OFFLOADED];
    report_run(run->config, costs.memory, on_host, run->tokens_per_step, run->accumulation, run->o.recompute);
    report_mask(&run->train);
    if (run->o.val_data[0]) report_mask(&run->val);
    if (run->world.joins) report_ranks(&run->world, costs.sent);
    if (run->mesh_text) report_axes(run->axes, run->sent_along);
    else if (run->tensor_parallel > 1) report_mesh(run->world.comm.size, (int)run->tensor_parallel);
}

// What a resumed run has besides its weights and moments.
static inline void run_resume(Run* run, const TrainState* s) {
    run->updates = (int)s->adamw_t;
    run->first = s->step;
    dataloader_seek(&run->train, s->epoch, s->position);
    if (s->dtype != FLOATX_DTYPE) return; // a loss scale of another precision is useless here
    run->scaler.scale = s->loss_scale;
    run->scaler.good_steps = s->good_steps;
}

// Sets the weights in these ranges, by --seed or from the checkpoint, or all their state when resuming. Collective; a rank
// whose state comes from others gives no ranges.
static inline void run_load(Run* run, const ParamRange* ranges, int num_ranges) {
    CheckpointReader* r = run->from_checkpoint ? &run->checkpoint : NULL;
    trace_ranges(run->o.trace, ranges, num_ranges);
    if (run->o.resume) param_ranges_load(ranges, num_ranges, r);
    else param_ranges_set_weights(ranges, num_ranges, run->config, (uint64_t)run->o.seed, r, CHECKPOINT_MODEL);
    if (run->o.resume) run_resume(run, &r->state);
    if (r == NULL) return;
    printf("start      step %lld of %lld, from %s\n", run->first, run->o.steps, r->path);
    CheckpointErrors lost = checkpoint_errors(r->path);
    if (run->o.resume && run->share.beside == NULL && lost.ranks > 0)
        printf("start      the errors of compressed gradients that it has are lost, those of %s on %d ranks: this run keeps none"
               "\n", lost.method, lost.ranks);
    if (run->share.writer < 0) { // another rank holds the same, and counts what it read
        memset(r->checksum, 0, sizeof r->checksum);
        memset(r->elements, 0, sizeof r->elements);
    }
    checkpoint_add_up(&run->world.comm, r->checksum, r->elements);
    checkpoint_close(r);
}

// Opens the log and the timeline. From here on nothing but this run writes under --out.
static inline void run_begin(Run* run) {
    World* w = &run->world;
    if (run->o.out[0] && run->writes == NULL) run->writes = writing_claim(&w->control, &run->o, true);
    bool writes = run->share.writer >= 0 || run->share.beside;
    if (run->writes) writing_share(&w->control, run->o.out, run->writes, writes);
    json_t* record = run_record(run->config, run->predicted, w->comm.size);
    if (w->joins) world_record(record, w, run->sent);
    if (run->mesh_text) axes_record(record, run->axes, run->sent_along);
    logger_open(&run->log, &run->table, &run->o, w->comm.rank == 0 ? run->o.out : "", run->first, record);
    run->log.ranks = w->comm.size;
    world_trace(w, run->o.trace);
    run->allocations = device_allocations();
}

// ---- what is due after `step` steps; a resumed run does not repeat what the previous one did ----
static inline bool is_due(long long every, long long step, long long last) {
    return every > 0 && (step % every == 0 || step == last);
}
static inline bool run_is_fresh(const Run* run, long long step) { return step > run->first || run->first == 0; }
static inline bool run_evaluates(const Run* run, long long step) {
    return run->o.val_data[0] && run_is_fresh(run, step) && is_due(run->o.eval_every, step, run->o.steps);
}
static inline bool run_samples(const Run* run, long long step) {
    bool is_wanted = run->o.tokenizer[0] && (step > 0 || run->o.steps == 0);
    return run_is_fresh(run, step) && is_wanted && is_due(run->o.sample_every, step, run->o.steps);
}
// Step 0 is saved only where it is the last one (--steps 0).
static inline bool run_saves(const Run* run, long long step) {
    bool is_new = step > run->first || !run->o.resume, due = step > 0 && is_due(run->o.save_every, step, run->o.steps);
    return run->o.out[0] && is_new && (due || step == run->o.steps);
}
static inline bool run_checks(const Run* run, long long step) {
    return step > run->first && is_due(run->world.check_every, step, run->o.steps);
}

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
    return replicated_checksum(p->run->config, u, (int)p->run->tensor_parallel, p->params + p->units[u].offset);
}
static inline void run_check_parts(Run* run, long long step, const Unit* units, const floatX* params) {
    PartsOfUnits p = { run, units, params };
    int num_units = run->config.L + 1;
    world_check_units(&run->world, step, num_units, part_copies_checksum, &p);
    world_check_parts(&run->world, step, (int)run->tensor_parallel, num_units, part_checksum, &p);
}

// Begins an evaluation. Returns its number of micro-batches.
static inline long long run_eval_begin(Run* run) {
    long long batches = run->o.eval_steps < run->val.num_batches ? run->o.eval_steps : run->val.num_batches;
    long long sequences = batches * run->val.shape.global_batch;
    require(dataloader_targets_of(&run->val, 0, 0, sequences) > 0, "--val-data %s: by its mask no target of the first %lld sequences"
            " counts in the loss; evaluate more of them with --eval-steps, or give other data", run->o.val_data, sequences);
    dataloader_seek(&run->val, 0, 0);
    return batches * run->accumulation;
}

// Prints what the model writes after --prompt. self is the model.
static inline void run_sample(Run* run, long long step, NextLogits* next_logits, void* self) {
    print_sample(&run->o, &run->tokenizer, run->config.V, step, next_logits, self);
}

// Saves these ranges, with all that a run needs to continue after `step`. Collective; who writes is run->share.
static inline void run_save(Run* run, long long step, const ParamRange* ranges, int num_ranges) {
    TrainState state;
    memset(&state, 0, sizeof state);
    state.config = run->config;
    state.dtype = FLOATX_DTYPE;
    state.has_optimizer = true;
    state.step = step;
    state.epoch = run->train.epoch;
    state.position = run->train.position;
    state.adamw_t = run->updates;
    state.loss_scale = run->scaler.scale;
    state.good_steps = run->scaler.good_steps;
    state.seed = run->o.seed;
    state.seq_len = run->o.seq_len;
    json_t* options = options_to_json(&run->table);
    state.options = json_dumps(options, 0);
    param_ranges_save(&run->world.comm, run->o.out, &state, run->o.keep, run->share, ranges, num_ranges);
    free(state.options);
    json_decref(options);
    logger_say("saved step %lld under %s\n", step, run->o.out);
}

// ---- a step ----

// Before step `step`, counted from 0. state: device memory that --fault bitflip may change.
static inline void run_step_begin(Run* run, long long step, void* state) {
    world_step_begin(&run->world, step + 1, state);
    if (run->mesh) mesh_sent(run->mesh, run->sent_before);
    run->step_began = now_seconds();
    run->counted = dataloader_targets(&run->train);
    run->divisor = run->counted > 0 ? (double)run->counted : 1;
    step_times_begin(&run->times, &run->world);
    fault_delay(&run->world.fault, run->world.comm.rank, step + 1);
}

static inline StepLog run_step_log(const Run* run, const StepStats* s, long long step, double seconds) {
    StepLog l;
    memset(&l, 0, sizeof l);
    l.step = step + 1;
    l.loss = s->loss / run->divisor;
    l.masked = run->train.masked;
    l.counted = run->counted;
    l.grad_norm = logged_norm(s->grad_norm);
    l.param_norm = logged_norm(sqrt(s->param_square));
    l.lr = learning_rate(&run->o, step);
    l.loss_scale = run->scaler.scale;
    l.tokens = l.step * run->tokens_per_step;
    l.tokens_per_s = (double)run->tokens_per_step / seconds;
    l.step_ms = 1e3 * seconds;
    l.flops = gpt2_flops_per_token(run->config, (int)run->o.seq_len) * (double)run->tokens_per_step;
    l.mem_bytes = device_memory_total();
    l.mem_peak_bytes = device_memory_peak();
    l.comm_bytes = (size_t)run->world.bytes;
    l.comm_exposed_ms = 1e3 * run->world.exposed;
    l.skipped = s->grad_scale == 0;
    return l;
}

// Notes what the step has sent along each axis.
static inline void run_count_sent(Run* run) {
    double sent[MESH_AXES];
    mesh_sent(run->mesh, sent);
    for (int k = 0; k < MESH_AXES; k++) {
        double bytes = sent[k] - run->sent_before[k];
        if (run->world.steps == 1 || bytes < run->min[k]) run->min[k] = bytes;
        if (run->world.steps == 1 || bytes > run->max[k]) run->max[k] = bytes;
    }
}

// After it: logs it. Dies if training no longer makes progress.
static inline void run_step_end(Run* run, long long step, const StepStats* stats) {
    double seconds = now_seconds() - run->step_began;
    world_step_end(&run->world, seconds);
    step_times_end(&run->times, &run->world, run->mesh, step + 1, seconds, dataloader_waited(&run->train));
    if (run->mesh) run_count_sent(run);
    StepLog l = run_step_log(run, stats, step, seconds);
    logger_step(&run->log, &l);
    loss_scaler_update(&run->scaler, !l.skipped);
    require_progress(&run->scaler, &run->o, l.step, l.loss);
    if (run->world.comm.world->strict) world_check_messages(&run->world, l.step);
}

// ---- the end ----

// Returns what advice about the time needs to know of the run.
static inline Setting run_setting(const Run* run) {
    Setting s;
    memset(&s, 0, sizeof s);
    s.local_size = run->world.control.ranks.local_size;
    s.cores = computes_on_cpu() ? sysconf(_SC_NPROCESSORS_ONLN) : 0;
    s.micro_batches = run->accumulation;
    s.stages = (int)run->pipeline_parallel;
    s.batch_size = run->o.batch_size;
    s.tokens_per_step = run->tokens_per_step;
    s.sent = run->sent;
    s.halves = what_halves_bytes(&run->table);
    what_hides_more(s.to_hide, &run->table);
    return s;
}

// Finds where the time went, and writes it to the log while that is open. Returns true if there is something to print.
// Collective.
static inline bool run_find_causes(Run* run, Finding* f) {
    World* w = &run->world;
    AxesPlace place = axes_place(run->axes, w->comm.rank);
    bool piped = run->pipeline_parallel > 1;
    run->times.mine.pipe = piped ? place.at[MESH_DP] * run->axes.size[MESH_TP] + place.at[MESH_TP] : -1;
    if (!find_causes(&f->diagnosis, &run->times, w, &run->table) || w->comm.rank > 0) return false;
    finish_finding(f, run_setting(run), &run->times, &run->table, w);
    logger_write(&run->log, diagnosis_record(f));
    return true;
}

// Closes log and timeline, and prints what was predicted beside what was measured. Returns true if they agree.
static inline bool run_end(Run* run) {
    World* w = &run->world;
    Finding finding;
    bool found = run_find_causes(run, &finding);
    logger_close(&run->log);
    writer_lock_release();
    trace_close();
    comm_barrier(&w->comm); // all parts of the timeline are written
    world_check_messages(w, run->o.steps);
    if (w->comm.rank == 0) trace_merge(run->o.trace, w->comm.size);
    bool as_predicted = report_memory(w, run->predicted);
    if (w->joins) as_predicted &= report_sent(w, run->sent);
    for (int k = 0; k < MESH_AXES && run->mesh_text && w->steps > 0; k++) {
        SentBytes s = { run->sent_along[k], run->min[k], run->max[k] };
        as_predicted &= report_sent_along(mesh_axis_names[k], s);
    }
    printf("allocations while training: %zu; times a step waited for data: %lld\n", device_allocations() - run->allocations,
           run->train.waits);
    if (found) report_diagnosis(&finding);
    else report_exposed(w);
    return as_predicted;
}

static inline void run_stop(Run* run) {
    dataloader_free(&run->train);
    if (run->o.val_data[0]) dataloader_free(&run->val);
    tokenizer_free(&run->tokenizer);
    free(run->writes);
    world_stop(&run->world);
    device_shutdown();
}
#endif
