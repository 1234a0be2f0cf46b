/*
ranks_run.h - the additions of several ranks to a run (run.h): they find one another, agree on options, model and data,
share the data and the checkpoints, count the bytes that they send, and report at the end where the time went.

A program of several ranks calls ranks_start where a program of one device calls run_start, and so on. Functions of
run.h without a counterpart here are called by both.
*/
#ifndef LLMC_RANKS_RUN_H
#define LLMC_RANKS_RUN_H
#include "../device/checksum.h"
#include "../save/ranks_checkpoint.h"
#include "../comm/say_once.h"
#include "diagnosis.h"
#include "run.h"
#include "ranks.h"

#define RANKS_JOINED (-1) // instead of a stage that --predict asks about

// How a program's ranks share more than data: a replica of the model, or sequences (mesh_run.h,
// context_run.h). Its options fill this in. A function that is NULL does nothing.
typedef struct {
    void* self;                                               // the functions' first argument; a view
    // Sets which ranks share what, and returns which data they read. stage: of the pipeline, for --predict, which joins
    // no ranks; otherwise RANKS_JOINED
    DataReaders (*readers)(void* self, Run* run, int stage);
    void (*open)(void* self, Run* run);                       // opens the communicators. Collective
    void (*report)(void* self, Run* run);                     // prints which ranks share what, after ranks_report
    json_t* (*predict)(const void* self);                     // what else --predict prints, as "more"
    const double* sent;                                       // (3) bytes of a step along tp, pp and dp, for --predict;
                                                              // NULL: not told apart
    bool has_actions;                                         // --fault may name a micro-batch
    int pipe;                                                 // which pipeline this rank is in; -1: in none
} RankSharing;

typedef struct RanksRun {
    Ranks all;
    SaveShare share;                // which ranks save; at first only rank 0, until the program sets it
    char* writes;                   // what the lock on --out says; owned. NULL: there is no lock (yet)
    double sent;                    // bytes that this rank will send per step, set by the program
    StepTimes times;                // where the time of each step went
    void* state;                    // device memory that --fault bitflip may change; set by ranks_load
    long long along[COMM_AXES];     // ranks along AXIS_TP, AXIS_PP and AXIS_CP: an option's value, or 1
    RankSharing sharing;            // how ranks share more than data
} RanksRun;

// The communicator of all ranks.
static inline Comm* ranks_world(Run* run) { return &run->ranks->all.comm; }

// Call it in programs that run on several ranks, after run_options.
static inline void options_ranks(Run* run) {
    run->ranks = new_array(RanksRun, 1);
    for (int k = 0; k < COMM_AXES; k++) run->ranks->along[k] = 1;
    run->ranks->sharing.pipe = -1;
    options_all_ranks(&run->table, &run->ranks->all);
}

// ---- before the model ----

// Rank 0 claims --out for this run: sets run->ranks->writes. Dies on every rank if another run is still writing there
// after OUT_PATIENCE. makes: creates --out if it does not exist. Collective.
static inline void ranks_claim_out(Run* run, bool makes) {
    Control* c = &run->ranks->all.control;
    bool alone = c->ranks.size == 1; // else the other ranks wait for rank 0, which must not take longer than they do
    double patience = alone ? OUT_PATIENCE : fmin(OUT_PATIENCE, c->timeout / 2);
    control_die_together(c, c->ranks.rank == 0 ? out_claim(&run->o, patience, makes) : NULL, "");
    const char* record = writer_lock.record;
    ControlBytes text = control_broadcast(c, record, record ? strlen(record) + 1 : 0);
    run->ranks->writes = text.bytes > 0 ? text.data : NULL;
    if (text.bytes == 0) free(text.data);
}

// Ranks whose GPUs have different amounts of memory all compute as many logits at a time as the smallest: those that
// share wte exchange numbers about each chunk. Collective.
static inline void ranks_agree_on_chunks(Control* c) {
    int* all = (int*)control_all_gather(c, &classifier_elements, sizeof classifier_elements);
    for (int r = 0; r < c->ranks.size; r++)
        classifier_elements = all[r] < classifier_elements ? all[r] : classifier_elements;
    free(all);
}

// Returns which data this rank reads: a part of every step of its own, unless ranks share more than data. Rank 0 saves,
// unless they do, or the program says otherwise.
static inline DataReaders ranks_readers(Run* run, int stage) {
    RanksRun* r = run->ranks;
    DataReaders all = { r->all.comm.rank, r->all.comm.size, "ranks", 1 };
    r->share.writer = r->all.comm.rank == 0 ? 0 : -1;
    r->share.writers = 1;
    return r->sharing.readers ? r->sharing.readers(r->sharing.self, run, stage) : all;
}

// Reads the options, joins the ranks, as OpenMPI, torchrun or Slurm started them, opens what the run starts from, and
// checks that all ranks have the same data, options and program.
static inline void ranks_start(Run* run, int argc, char** argv) {
    RanksRun* r = run->ranks;
    Ranks* w = &r->all;
    say_once_begin(); // before the ranks meet: most of them find the same wrong option
    options_parse(&run->table, argc, argv);
    if (run->o.out[0]) stop_listen();
    RankInfo ranks = ranks_find();
    comm_choose_environment(&w->options, ranks.size);
    run_open_device(&run->o, ranks.local_rank, ranks.local_size);
    ranks_meet(w, &run->o, ranks);
    ranks_claim_out(run, false); // before this run looks for checkpoints there
    run_open(run);
    ranks_agree_on_chunks(&w->control);
    run_open_data(run, ranks_readers(run, RANKS_JOINED));
    w->fault = fault_parse(w->fault_text, ranks.size);
    fault_check_micro(&w->fault, r->sharing.has_actions ? run->accumulation : 0);
    fault_announce(&w->fault);
    require_same_run(&w->control, &run->table, run->config, &run->train, run->data_sum);
    RunShape shape = { run->config, run->o.seq_len, run->tokens_per_step, ranks.size };
    if (ranks.rank == 0) r->times.single = single_run_read(w->single_text, &shape);
}

// The program has predicted a snapshot: keeps of it what this rank saves.
static inline void ranks_predict_snapshot(Run* run) {
    const SaveShare* share = &run->ranks->share;
    if (share->writer < 0) run->predicted[MEMORY_SNAPSHOT] = 0;
    run->predicted[MEMORY_SNAPSHOT] += save_beside_elements(share) * sizeof(float);
    if (!run_snapshots(run)) run->predicted[MEMORY_SNAPSHOT] = 0;
}

// Allocates snapshots, if all ranks can have theirs. Collective.
static inline void ranks_open_snapshot(Run* run) {
    Ranks* w = &run->ranks->all;
    if (!run_snapshots(run)) return;
    bool fits = ranks_host_memory_fits(w, run->predicted), has = fits && run_open_snapshot(run);
    if (comm_host_sum(&w->comm, has) < w->comm.size) run_refuse_snapshot(run);
    run->saving.strict = w->comm.world->strict;
}

// As run_plan. --recompute auto becomes none if everything fits on every rank.
// Communicators are opened after layers_prepare. Collective.
static inline void ranks_plan(Run* run, PredictModel* predict, void* model, LayerShapes shapes) {
    RanksRun* r = run->ranks;
    Options* o = &run->o;
    predict(model, run);
    run_prepare(run, shapes);
    if (r->sharing.open) r->sharing.open(r->sharing.self, run);
    if (o->recompute == RECOMPUTE_AUTO)
        o->recompute = ranks_memory_fits(&r->all, run->predicted) ? RECOMPUTE_NONE : RECOMPUTE_BLOCK;
    predict(model, run);
    ranks_predict_snapshot(run);
    ranks_open_snapshot(run);
}

// ---- before the first step ----

// Prints the model, the device, and the memory and traffic that are predicted for each rank. Collective.
static inline void ranks_report(Run* run) {
    Ranks* w = &run->ranks->all;
    comm_register_memory(&w->comm); // the program has allocated all of it
    RankCosts costs = ranks_costs(w, run->predicted, run->ranks->sent);
    char memory[80];
    run_describe(run, format_bytes_range(memory, sizeof memory, costs.memory.min, costs.memory.max), w->comm.size);
    report_ranks(w, costs.sent);
    json_object_set_new(run->record, "ranks_found_by", json_text(w->control.ranks.found));
    json_object_set_new(run->record, "communication", json_text(comm_description(&w->comm)));
    json_object_set_new(run->record, "predicted_comm_bytes", json_real(run->ranks->sent));
    RankSharing* sharing = &run->ranks->sharing;
    if (sharing->report) sharing->report(sharing->self, run);
}

// As run_load, collective; a rank whose state comes from others gives no pieces.
static inline void ranks_load(Run* run, const ParamRange* ranges, int num_ranges) {
    run->ranks->state = ranges[0].params ? (void*)ranges[0].params : ranges[0].master;
    trace_ranges(run->o.trace, ranges, num_ranges);
    CheckpointReader* r = run_read(run, ranges, num_ranges, save_beside_elements(&run->ranks->share) > 0);
    if (r == NULL) return;
    // Another rank holds the same, and counts what it read
    if (run->ranks->share.writer < 0) memset(&r->sums, 0, sizeof r->sums);
    checkpoint_add_up(ranks_world(run), &r->sums);
    checkpoint_close(r);
}

// The other ranks that write share the lock on --out. Dies on every rank, with the same error,
// if one of them cannot. Collective.
static inline void ranks_share_out(Run* run) {
    RanksRun* r = run->ranks;
    Control* c = &r->all.control;
    bool writes = c->ranks.rank > 0 && (r->share.writer >= 0 || save_beside_elements(&r->share) > 0);
    char* error = writes ? writer_lock_join(run->o.out, r->writes) : NULL;
    control_die_together(c, control_first_error(c, error), "");
    free(error);
}

// Opens the log and the timeline. From here on nothing but this run writes under --out.
static inline void ranks_begin(Run* run) {
    RanksRun* r = run->ranks;
    Ranks* w = &r->all;
    if (run->o.out[0] && r->writes == NULL) ranks_claim_out(run, true);
    if (r->writes) ranks_share_out(run);
    run_open_log(run, w->comm.rank == 0 ? run->o.out : "");
    run->log.ranks = w->comm.size;
    ranks_trace(w, run->o.trace);
    run->allocations = device_allocations();
}

// ---- --check-every ----

// Returns a checksum of `part` (n), this rank's part of unit u. is_replicated: only of the tensors that are whole on
// every rank that shares a replica of the model (model/gpt2.h: CUT_NONE).
static inline uint64_t ranks_checksum(const Run* run, int u, const floatX* part, size_t n, bool is_replicated) {
    uint64_t sum = 0;
    if (!is_replicated) return device_checksum(part, sizeof(floatX), n);
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(run->config, u, i);
        if (t.cut == CUT_NONE) sum = 31 * sum + device_checksum(part, sizeof(floatX), tensor_elements(t));
        part += tensor_part_elements(t, (int)run->ranks->along[AXIS_TP]);
    }
    return sum;
}
// Returns the checksum of unit u, gathered if need be; UNIT_ELSEWHERE if this rank stores nothing of the unit.
typedef uint64_t UnitChecksum(void* model, const Run* run, int u, bool is_replicated);

// Dies on every rank, naming ranks and unit, unless every parts-th rank has the same parameters to the bit. Collective.
static inline void ranks_check_parts(Run* run, long long step, int parts, UnitChecksum* checksum, void* model,
                                     bool is_replicated) {
    Ranks* w = &run->ranks->all;
    uint64_t sums[MAX_UNITS];
    int num_units = gpt2_num_units(run->config);
    ranks_check_messages(w, step);
    for (int u = 0; u < num_units; u++) sums[u] = checksum(model, run, u, is_replicated);
    require_same_units(&w->control, "parameters", sums, num_units, parts, step);
}
// If a check is due, dies unless ranks with the same part of a unit have the same parameters, and all ranks the same
// replicated tensors. Collective.
static inline void ranks_check(Run* run, long long step, UnitChecksum* checksum, void* model) {
    int t = (int)run->ranks->along[AXIS_TP];
    if (step == run->first || !is_due(run->ranks->all.check_every, step, run->o.steps)) return;
    if (t > 1) ranks_check_parts(run, step, 1, checksum, model, true);
    ranks_check_parts(run, step, t, checksum, model, false);
}

// As run_save_end and run_save, but collective; run->ranks->share says which ranks write.
static inline void ranks_save_end(Run* run) {
    if (!run->saving.under_way) return;
    double began = now_seconds();
    ranks_saving_end(&run->saving, ranks_world(run));
    run_save_ended(run, began);
}
static inline void ranks_save(Run* run, long long step, const ParamRange* ranges, int num_ranges) {
    TrainState state = run_state(run, step);
    ranks_save_end(run); // one at a time
    run_save_begins(run, step);
    double began = now_seconds();
    ranks_saving_begin(&run->saving, ranks_world(run), run->o.out, &state, run_keeps(run), run->ranks->share, ranges,
                       num_ranges);
    run_save_waited(run, began);
    if (!run_snapshots(run)) ranks_save_end(run);
}

// ---- a step ----

// Before step `step`, counted from 0.
static inline void ranks_step_begin(Run* run, long long step) {
    Ranks* w = &run->ranks->all;
    ranks_count_begin(w, step + 1, run->ranks->state);
    run_step_begin(run);
    step_times_begin(&run->ranks->times, w);
    fault_delay(&w->fault, w->comm.rank, step + 1);
}

static inline void ranks_step_end(Run* run, long long step, const StepStats* stats) {
    RanksRun* r = run->ranks;
    double seconds = now_seconds() - run->step_began;
    ranks_count_end(&r->all, seconds);
    step_times_end(&r->times, &r->all, step + 1, seconds, dataloader_waited(&run->train));
    run->comm_bytes = r->all.bytes;
    run->comm_exposed = r->all.exposed;
    run_log_step(run, step, stats, seconds);
    if (stats->saving == 0) ranks_save_end(run); // on all ranks, which have the same sum
    if (r->all.comm.world->strict) ranks_check_messages(&r->all, step + 1);
}

// ---- the end ----

// Finds where the time went, and writes it to the open log. Returns true if there is something to print. Collective.
static inline bool ranks_find_breakdown(Run* run, DiagnosisReport* f) {
    RanksRun* r = run->ranks;
    Ranks* w = &r->all;
    r->times.mine.pipe = r->sharing.pipe;
    if (!find_breakdown(&f->diagnosis, &r->times, w) || w->comm.rank > 0) return false;
    f->local_ranks = w->control.ranks.local_size;
    f->cores = computes_on_cpu() ? sysconf(_SC_NPROCESSORS_ONLN) : 0;
    f->micro_batches = run->accumulation;
    f->stages = (int)r->along[AXIS_PP];
    f->tokens_per_step = run->tokens_per_step;
    f->single = r->times.single;
    f->last = r->times.last;
    f->rate = (double)f->tokens_per_step / f->diagnosis.seconds;
    f->scaling = f->single.tokens_per_second > 0 ? f->rate / (f->single.tokens_per_second * f->diagnosis.ranks) : 0;
    if (device_link_is_emulated()) ranks_are_artificial(w, "EMULATED LINK TO THE HOST");
    if (w->comm.world->strict) ranks_are_artificial(w, "STRICT MODE, WHICH HIDES NOTHING");
    if (w->fault.kind != FAULT_NONE) ranks_are_artificial(w, "A FAULT ON PURPOSE (--fault)");
    snprintf(f->artificial, sizeof f->artificial, "%s", w->artificial);
    logger_write(&run->log, diagnosis_record(f));
    return true;
}

// As run_end; also prints the bytes sent and where the time went. Collective.
static inline bool ranks_end(Run* run) {
    Ranks* w = &run->ranks->all;
    DiagnosisReport diagnosis;
    ranks_save_end(run);
    bool found = ranks_find_breakdown(run, &diagnosis);
    run_close(run);
    free(trace_memories.list);
    memset(&trace_memories, 0, sizeof trace_memories);
    comm_barrier(&w->comm); // all parts of the timeline are written
    ranks_check_messages(w, run->o.steps);
    if (w->comm.rank == 0) trace_merge(run->o.trace, w->comm.size);
    bool as_predicted = report_memory(w, run->predicted);
    as_predicted &= report_sent(w, run->ranks->sent);
    as_predicted &= report_sent_along(w);
    run_report_waits(run);
    if (found) report_diagnosis(&diagnosis, run->o.out);
    else if (w->steps > 0 && w->comm.size > 1)
        printf("communication exposed: %.1f ms of %.1f ms a step; compute / (compute + exposed) = %.1f %%\n",
               1e3 * w->exposed_total / (double)w->steps, 1e3 * w->seconds_total / (double)w->steps,
               100 * (1 - w->exposed_total / w->seconds_total));
    return as_predicted;
}

static inline void ranks_stop(Run* run) {
    comm_free(ranks_world(run));
    free(run->ranks->writes);
    free(run->ranks);
    run_stop(run);
}
#endif
