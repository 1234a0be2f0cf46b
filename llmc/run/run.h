/*
run.h - a run: the steps of main that are the same in every program. Options, data and the checkpoint to start from; the
log, the timeline and checkpoints; text from the model; predicted memory compared with measured memory.

The order in which a program calls these is that of its main:
    run_options - its own options - run_start - run_plan - its model - run_report - run_load - run_begin -
    for each step: run_evaluates, run_samples, run_saves, then run_step_begin and run_step_end -
    run_end - frees its model - run_stop

That is a run on one device. Programs of several ranks call ranks_start, ranks_report, ... of ranks_run.h, which
call these functions and add the work of several ranks.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H
#include "../base/launcher.h"
#include "../base/precision.h"
#include "../base/rng.h"
#include "../data/dataloader.h"
#include "../data/tokenizer.h"
#include "../model/gpt2.h"
#include "../model/lr_schedule.h"
#include "../model/sampler.h"
#include "../model/training_options.h"
#include "../save/checkpoint.h"
#include "../save/saving.h"
#include "../save/writer_lock.h"
#include "../base/stop.h"
#include "logger.h"
#include "report.h"
#include "trace.h"

// ---- what a run starts from ----
// Returns the shape that --model and its overrides ask for. context: max_T of a dN, whose name does not say it.
static inline GPT2Config config_from_options(const Options* o, const Tokenizer* tokenizer, int context) {
    GPT2Config c;
    memset(&c, 0, sizeof c);
    require(gpt2_named_config(o->model, &c),
            "--model %s is not known: gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN with N from 1 to %d", o->model,
            MAX_BLOCKS);
    bool from_paper = c.max_T != 0;
    if (!from_paper) c.max_T = context;
    if (o->layers) c.L = (int)o->layers;
    if (o->heads) c.NH = (int)o->heads;
    if (o->channels) c.C = (int)o->channels;
    c.V = o->vocab_size ? (int)o->vocab_size : from_paper ? GPT2_VOCABULARY : tokenizer->vocab_size;
    c.Vp = gpt2_padded_vocabulary(c.V);
    gpt2_check_config(c, "--model, --layers, --heads, --channels, --vocab-size");
    return c;
}

// Returns why a new run cannot have --out: there are checkpoints. The caller frees it; NULL: there are none.
static inline char* other_run_under(const char* out) {
    char *newest = checkpoint_newest(out), *error = NULL;
    if (newest) error = format_string("--out %s holds the checkpoints of another run, the newest in %s: continue it "
                                      "with --resume, or give another folder", out, newest);
    free(newest);
    return error;
}

#define OUT_PATIENCE 10.0 // seconds: ranks whose launcher was killed live for two or three

// Claims --out for this run, if the folder exists. makes: creates it. Returns NULL, or an error, which the caller
// frees, if another run is still writing there after `patience` seconds. Nothing is locked in a folder that cannot be
// written.
static inline char* out_claim(const Options* o, double patience, bool makes) {
    struct stat info;
    char* error = NULL;
    if (makes && !folder_make(o->out))
        return format_string("--out %s: this folder cannot be made: %s; give another", o->out,
                             path_reason(o->out, errno));
    if (stat(o->out, &info) == 0 && S_ISDIR(info.st_mode)) error = writer_lock_take(o->out, patience);
    bool taken = error == NULL && writer_lock.record;
    return taken && makes && !o->resume ? other_run_under(o->out) : error; // one may have come and gone meanwhile
}

// The checkpoint to start from into r: false if neither --resume nor --init-from asks for one. is_muon: the run's
// optimizer.
static inline bool open_checkpoint(const Options* o, bool is_muon, CheckpointReader* r) {
    require(!(o->resume && o->init_from[0]),
            "--resume and --init-from exclude each other: one continues a run, the other starts one");
    require(!o->resume || o->out[0], "--resume needs --out, the folder to continue from");
    char* other_run = o->out[0] && !o->resume ? other_run_under(o->out) : NULL;
    require(other_run == NULL, "%s", other_run);
    if (o->init_from[0]) checkpoint_open(r, o->init_from);
    if (!o->resume) return o->init_from[0] != '\0';
    char* newest = checkpoint_newest(o->out);
    require(newest != NULL,
            "--resume: there is no checkpoint under %s; start without --resume, or give the --out that has one",
            o->out);
    checkpoint_open(r, newest);
    free(newest);
    checkpoint_require_optimizer(r, is_muon);
    require(r->state.seq_len == o->seq_len, "--resume: --seq-len was %lld when %s was written, not %lld",
            r->state.seq_len, r->path, o->seq_len);
    require(r->state.seed == o->seed, "--resume: --seed was %lld when %s was written, not %lld", r->state.seed, r->path,
            o->seed);
    require(r->state.step <= o->steps, "--resume: %s is at step %lld, beyond --steps %lld", r->path, r->state.step,
            o->steps);
    return true;
}

// Returns the model's shape: the checkpoint's, which must agree with every option that was given, or the options'.
static inline GPT2Config config_for_run(const Options* o, OptionTable* table, const Tokenizer* tokenizer,
                                        const CheckpointReader* r) {
    static const char* const shape_options[] = { "model", "layers", "heads", "channels", "vocab-size" };
    bool asked = r == NULL;
    for (size_t i = 0; i < sizeof shape_options / sizeof shape_options[0]; i++)
        asked = asked || option_given(table, shape_options[i]);
    GPT2Config c = asked ? config_from_options(o, tokenizer, r ? r->state.config.max_T : (int)o->seq_len)
                         : r->state.config;
    if (r && asked) checkpoint_require_config(r, c);
    require(o->seq_len <= c.max_T,
            "--seq-len %lld is longer than the %d positions of the model; lower it or start from a model with more",
            o->seq_len, c.max_T);
    require(tokenizer->vocab_size <= c.V,
            "the tokenizer (--tokenizer %s) has %d tokens, the model's vocabulary only %d; with --tokenizer= there is "
            "none, for --data of tokens",
            o->tokenizer, tokenizer->vocab_size, c.V);
    return c;
}

// ---- samples ----
// Computes logits (V), on the host, of the token that follows tokens (T).
typedef void NextLogits(void* self, const int* tokens, int T, floatX* logits);

// Returns the next token, drawn from the model's distribution. tokens (n): what it follows; random (0..1) decides.
static inline int sample_next(const Options* o, const Tokenizer* t, int V, const int* tokens, size_t n, float random,
                              NextLogits* next_logits, void* self) {
    floatX* row = new_array(floatX, V);
    float* logits = new_array(float, V);
    size_t T = size_min(n, (size_t)o->seq_len);
    next_logits(self, tokens + n - T, (int)T, row);
    convert_dtype(logits, DTYPE_F32, row, FLOATX_DTYPE, (size_t)V);
    int token = sample_token(logits, t->vocab_size, o->temperature, o->top_k, random);
    free(row);
    free(logits);
    return token;
}

// Prints --sample-tokens tokens that follow --prompt.
static inline void print_sample(const Options* o, const Tokenizer* t, int V, long long step, NextLogits* next_logits,
                                void* self) {
    size_t prompt_tokens;
    int* prompt = tokenizer_encode(t, o->prompt, strlen(o->prompt), &prompt_tokens);
    size_t n = 1 + prompt_tokens, total = n + (size_t)o->sample_tokens;
    int* tokens = new_array(int, total);
    tokens[0] = t->eot;
    memcpy(tokens + 1, prompt, prompt_tokens * sizeof(int));
    TokenPrinter printer;
    memset(&printer, 0, sizeof printer);
    logger_say("sample after step %lld:\n%s", step, o->prompt);
    for (; n < total; n++) {
        float random = random_uniform((uint64_t)o->seed, STREAM_SAMPLER + (uint64_t)step, n);
        tokens[n] = sample_next(o, t, V, tokens, n, random, next_logits, self);
        size_t length;
        const char* bytes = tokenizer_decode(t, tokens[n], &length);
        print_token(&printer, bytes, length);
    }
    print_token_end(&printer);
    printf("\n");
    free(tokens);
    free(prompt);
}

typedef struct {
    Options o;
    OptionTable table;
    Tokenizer tokenizer;            // of no tokens where --tokenizer is ''
    CheckpointReader checkpoint;    // what the run starts from,
    bool from_checkpoint;           // if it starts from one
    GPT2Config config;
    bool is_muon;                   // as in TrainState; set by the program, with its options
    DataLoader train, val;          // val only if --val-data is not empty
    uint64_t data_sum;              // data_checksum of --data
    long long tokens_per_step;
    int accumulation;               // micro-batches per step
    long long counted;              // targets of the step at hand that count in the loss,
                                    // of all ranks and micro-batches
    double loss_tokens;             // the same number, by which the sum of their losses is divided; 1 if none counts
    LossScaler scaler;
    double lr;                      // the learning rate of the last step; set by the program
    Logger log;
    json_t* record;                 // the facts in the log's first line; owned, until run_begin
    int updates;                    // AdamW updates so far
    long long tokens;               // seen so far, by all ranks, including the runs that this one continues
    bool skipped;                   // the last step was skipped: its gradients were not finite
    StepStats asked;                // what this rank adds to the ranks' sums of the step at hand
    bool stopping;                  // a signal has told a rank to save and stop, and the last step is not done
    long long first;                // steps done before this run
    size_t predicted[MEMORY_KINDS]; // bytes of this rank, set by the program
    double step_began;              // now_seconds
    double comm_bytes, comm_exposed; // sent in the step at hand, and seconds that it waited for that; 0 on one device
    size_t allocations;             // before the first step
    Saving saving;                  // how checkpoints are written, and the one that is being written
    long long saves;                // begun so far, except the last one of the run, which training need not wait for
    double save_waits;              // seconds that training waited for these
    bool saves_last;                // the last one has begun
    struct RanksRun* ranks;         // the state that several ranks add (ranks_run.h), owned; NULL on one device
} Run;

// Sets run->predicted, and on several ranks run->ranks->sent, by the formulas of the program's model, which is
// configured. Takes --recompute from run->o: auto counts as none. A snapshot is predicted as if this rank takes one.
typedef void PredictModel(void* model, Run* run);

// ---- before the model ----

// The options of every program. The caller adds its own to run->table.
static inline void run_options(Run* run, const char* program, const char* purpose) {
    run->o = options_defaults();
    run->table = options_table(program, purpose);
    options_common(&run->table, &run->o);
}

// Which data this rank reads: it is reader `rank` of `size`, each of which reads a part of every step.
// micro_batches: the least in a step
typedef struct { int rank, size; const char* called; long long micro_batches; } DataReaders;

// Sets the tokens and the micro-batches of a step. Dies if --total-batch-size does not divide.
static inline void run_choose_batch(Run* run, DataReaders readers) {
    const Options* o = &run->o;
    int N = readers.size;
    long long micro = o->batch_size * o->seq_len * N; // of all ranks together
    char ranks[48] = "";
    if (N > 1) snprintf(ranks, sizeof ranks, " x %d %s", N, readers.called);
    run->tokens_per_step = o->total_batch_size ? o->total_batch_size : micro * readers.micro_batches;
    require(run->tokens_per_step % micro == 0,
            "--total-batch-size %lld must be a multiple of --batch-size %lld x --seq-len %lld%s = %lld tokens",
            run->tokens_per_step, o->batch_size, o->seq_len, ranks, micro);
    run->accumulation = (int)(run->tokens_per_step / micro);
}

static inline void run_open_data(Run* run, DataReaders readers) {
    const Options* o = &run->o;
    int rank = readers.rank, N = readers.size;
    run_choose_batch(run, readers);
    DataShape shape = { (int)o->batch_size, (int)o->seq_len, run->config.V, run->tokens_per_step / o->seq_len, rank, N,
                        (uint64_t)o->seed, (MaskUse)o->mask };
    const Tokenizer* tokenizer = o->tokenizer[0] ? &run->tokenizer : NULL;
    dataloader_init(&run->train, "--data", o->data, tokenizer, shape, DATA_TRAIN);
    if (o->val_data[0]) dataloader_init(&run->val, "--val-data", o->val_data, tokenizer, shape, DATA_EVAL);
    run->data_sum = data_checksum(&run->train);
}

static inline void run_open_device(const Options* o, int local_rank, int local_size) {
    device_init(local_rank, local_size);
    device_memory_limit((size_t)ceil(o->memory_limit * 1e9)); // rounded up, because 0 means no limit
}

// True if --data is given without --val-data, whose default belongs to the default data and may need another tokenizer.
static inline bool run_lacks_val_data(Run* run) {
    return option_given(&run->table, "data") && !option_given(&run->table, "val-data");
}

// Opens what the run starts from, except the data: tokenizer and checkpoint.
static inline void run_open(Run* run) {
    if (run_lacks_val_data(run)) run->o.val_data = "";
    const Options* o = &run->o;
    layers_choose((AttentionChoice)o->attention, o->deterministic);
    if (o->tokenizer[0]) tokenizer_open(&run->tokenizer, o->tokenizer);
    run->from_checkpoint = open_checkpoint(o, run->is_muon, &run->checkpoint);
    run->config = config_for_run(o, &run->table, &run->tokenizer, run->from_checkpoint ? &run->checkpoint : NULL);
    run->scaler = loss_scaler_init(o);
}

// From here on nothing but this run writes under --out, if that is there, or made now. Dies if another run does.
static inline void run_claim_out(const Run* run, bool makes) {
    char* error = out_claim(&run->o, OUT_PATIENCE, makes);
    require(error == NULL, "%s", error);
}

// Dies if any launcher has started this program as several processes.
static inline void run_require_one(void) {
    const char* remedy = "start it without a launcher (train_gpt2_ddp trains on several ranks)";
    launcher_require("OMPI_COMM_WORLD_SIZE", 0, 1, remedy);
    launcher_require("LOCAL_WORLD_SIZE", 0, 1, remedy); // torchrun sets this, and on several nodes also:
    if (getenv("TORCHELASTIC_RUN_ID")) launcher_require("WORLD_SIZE", 0, 1, remedy);
    if (!launcher_is_slurm_shell()) launcher_require("SLURM_STEP_NUM_TASKS", 0, 1, remedy);
    launcher_require_known(1, remedy);
}

// Reads the options, and opens what the run starts from: tokenizer, checkpoint, data.
static inline void run_start(Run* run, int argc, char** argv) {
    options_parse(&run->table, argc, argv);
    if (run->o.out[0]) stop_listen();
    run_require_one();
    run_open_device(&run->o, 0, 1);
    run_claim_out(run, false); // before this run looks for checkpoints there
    run_open(run);
    run_open_data(run, (DataReaders){ 0, 1, "", 1 });
}

// Lets the device choose how it computes these shapes, while its memory and all its multiprocessors are free: nothing
// is allocated, and no collective is under way. A model whose parameters alone do not fit is not worth the time.
static inline void run_prepare(const Run* run, LayerShapes shapes) {
    size_t least[MEMORY_KINDS];
    memcpy(least, run->predicted, sizeof least);
    least[MEMORY_ACTIVATIONS] = 0; // they may be recomputed
    if (memory_fits(least)) layers_prepare(shapes);
}

// ---- saving while training goes on ----

// True if checkpoints are written from a snapshot. A run that saves only at its end would gain nothing.
static inline bool run_snapshots(const Run* run) {
    const Options* o = &run->o;
    return o->save_async && o->out[0] && o->save_every > 0 && o->save_every < o->steps;
}
// Allocates the snapshot. Returns false if it cannot be had.
static inline bool run_open_snapshot(Run* run) {
    Saving* s = &run->saving;
    s->bytes = run->predicted[MEMORY_SNAPSHOT];
    if (s->bytes > 0) s->memory = (char*)snapshot_alloc(s->bytes);
    return s->bytes == 0 || s->memory != NULL;
}
// Checkpoints will be written while training waits.
static inline void run_refuse_snapshot(Run* run) {
    char needed[32], left[32];
    format_bytes(needed, sizeof needed, (double)run->predicted[MEMORY_SNAPSHOT]);
    printf("saves      training waits for the disk: a snapshot to write from (--save-async) takes %s of %s, and %s are "
           "free\n",
           needed, computes_on_cpu() ? "memory" : "pinned host memory",
           format_bytes(left, sizeof left, (double)host_memory_free()));
    run->o.save_async = 0;
    run->predicted[MEMORY_SNAPSHOT] = 0;
    snapshot_free(run->saving.memory);
    run->saving.memory = NULL;
}

// Predicts the memory of the model. --recompute auto becomes none if that fits, and block if not.
// Called before anything is allocated.
static inline void run_plan(Run* run, PredictModel* predict, void* model, LayerShapes shapes) {
    Options* o = &run->o;
    predict(model, run);
    run_prepare(run, shapes);
    if (o->recompute == RECOMPUTE_AUTO) o->recompute = memory_fits(run->predicted) ? RECOMPUTE_NONE : RECOMPUTE_BLOCK;
    predict(model, run);
    if (!run_snapshots(run)) run->predicted[MEMORY_SNAPSHOT] = 0;
    bool fits = host_memory_missing(run->predicted) <= host_memory_free();
    if (run_snapshots(run) && !(fits && run_open_snapshot(run))) run_refuse_snapshot(run);
}

// ---- before the first step ----

// Prints the model, the device and the data, and notes them for the log.
// memory: the bytes that a rank will take, as text.
static inline void run_describe(Run* run, const char* memory, int ranks) {
    char held[32];
    size_t on_host = run->predicted[MEMORY_OFFLOADED];
    report_run(run->config, memory, on_host, run->tokens_per_step, run->accumulation, run->o.recompute);
    if (run->saving.memory)
        printf("saves      training goes on while a snapshot of the state is written: %s of host memory on rank 0\n",
               format_bytes(held, sizeof held, (double)run->saving.bytes));
    report_mask(&run->train);
    if (run->o.val_data[0]) report_mask(&run->val);
    if (run_lacks_val_data(run) && run->o.eval_every > 0)
        printf("eval       none: --data is given without --val-data\n");
    run->record = run_record(run->config, run->predicted, ranks);
}
static inline void run_report(Run* run) {
    char memory[32];
    run_describe(run, format_bytes(memory, sizeof memory, (double)memory_sum(run->predicted)), 1);
}

// Sets the weights in these ranges, by --seed or from the checkpoint, or all their state when resuming. keeps_errors:
// the run goes on with errors of compressed gradients, if they are its own. Returns the checkpoint, which is still
// open, or NULL.
static inline CheckpointReader* run_read(Run* run, const ParamRange* ranges, int num_ranges, bool keeps_errors) {
    CheckpointReader* r = run->from_checkpoint ? &run->checkpoint : NULL;
    if (run->o.resume) param_ranges_load(ranges, num_ranges, r);
    else param_ranges_set_weights(ranges, num_ranges, run->config, (uint64_t)run->o.seed, r, CHECKPOINT_MODEL);
    if (run->o.resume) { // the state of a run besides weights and moments
        const TrainState* s = &r->state;
        run->updates = (int)s->adamw_t;
        run->first = s->step;
        run->tokens = s->tokens >= 0 ? s->tokens : s->step * run->tokens_per_step;
        dataloader_seek(&run->train, s->epoch, s->position);
        bool same = s->dtype == FLOATX_DTYPE; // a loss scale of another precision is of no use
        if (same) run->scaler.scale = s->loss_scale;
        if (same) run->scaler.good_steps = s->good_steps;
    }
    if (r == NULL) return NULL;
    printf("start      step %lld of %lld, from %s\n", run->first, run->o.steps, r->path);
    if (run->o.resume && r->state.data_sum && r->state.data_sum != run->data_sum)
        printf("start      --data contains other tokens than when %s was saved: from sequence %lld of epoch %lld on, "
               "the order differs, so some sequences occur twice in that epoch and others never\n",
               r->path, r->state.position, r->state.epoch);
    CheckpointErrors lost = checkpoint_errors(r->path);
    if (run->o.resume && !keeps_errors && lost.ranks > 0)
        printf("start      its errors of compressed gradients, of %s on %d rank%s, are lost, because this run "
               "keeps none\n",
               lost.method, lost.ranks, lost.ranks == 1 ? "" : "s");
    return r;
}
static inline void run_load(Run* run, const ParamRange* ranges, int num_ranges) {
    CheckpointReader* r = run_read(run, ranges, num_ranges, false);
    if (r) checkpoint_close(r);
}

// Opens the log. out: where, if anywhere.
static inline void run_open_log(Run* run, const char* out) {
    logger_open(&run->log, &run->table, &run->o, out, run->first, run->record);
    run->record = NULL;
}
// Opens the log and the timeline.
static inline void run_begin(Run* run) {
    if (run->o.out[0] && writer_lock.record == NULL) run_claim_out(run, true);
    run_open_log(run, run->o.out);
    trace_open(run->o.trace, 0);
    run->allocations = device_allocations();
}

// ---- what is due after `step` steps; a resumed run does not repeat what the previous one did ----
static inline bool is_due(long long every, long long step, long long last) {
    return every > 0 && (step % every == 0 || step == last);
}
static inline bool run_is_fresh(const Run* run, long long step) { return step > run->first || run->first == 0; }
static inline bool run_evaluates(const Run* run, long long step) {
    bool is_wanted = run->o.val_data[0] && !run->stopping;
    return run_is_fresh(run, step) && is_wanted && is_due(run->o.eval_every, step, run->o.steps);
}
static inline bool run_samples(const Run* run, long long step) {
    bool is_wanted = run->o.tokenizer[0] && !run->stopping && (step > 0 || run->o.steps == 0);
    return run_is_fresh(run, step) && is_wanted && is_due(run->o.sample_every, step, run->o.steps);
}
static inline bool run_ends(const Run* run, long long step) { return run->stopping || step == run->o.steps; }
// Step 0 is saved only if it is the last one (--steps 0).
static inline bool run_saves(const Run* run, long long step) {
    bool is_new = step > run->first || !run->o.resume, due = step > 0 && is_due(run->o.save_every, step, run->o.steps);
    return run->o.out[0] && is_new && (due || run_ends(run, step));
}

// Begins an evaluation. Returns its number of micro-batches.
static inline long long run_eval_begin(Run* run) {
    long long batches = run->o.eval_steps < run->val.num_batches ? run->o.eval_steps : run->val.num_batches;
    long long sequences = batches * run->val.shape.global_batch;
    require(dataloader_targets_of(&run->val, 0, 0, sequences) > 0,
            "--val-data %s: by its mask no target of the first %lld sequence%s counts in the loss; evaluate more "
            "with --eval-steps, or give other data",
            run->o.val_data, sequences, sequences == 1 ? "" : "s");
    dataloader_seek(&run->val, 0, 0);
    return batches * run->accumulation;
}

// Prints what the model writes after --prompt. self is the model.
static inline void run_sample(Run* run, long long step, NextLogits* next_logits, void* self) {
    print_sample(&run->o, &run->tokenizer, run->config.V, step, next_logits, self);
}

// Returns what is saved besides the ranges. The caller frees its options, which lack --save-async: checkpoints are the
// same with and without it.
static inline TrainState run_state(const Run* run, long long step) {
    TrainState state;
    memset(&state, 0, sizeof state);
    state.config = run->config;
    state.dtype = FLOATX_DTYPE;
    state.has_optimizer = true;
    state.is_muon = run->is_muon;
    state.step = step;
    state.epoch = run->train.next.epoch;
    state.position = run->train.next.position;
    state.tokens = run->tokens;
    state.data_sum = run->data_sum;
    state.adamw_t = run->updates;
    state.loss_scale = run->scaler.scale;
    state.good_steps = run->scaler.good_steps;
    state.seed = run->o.seed;
    state.seq_len = run->o.seq_len;
    json_t* options = options_to_json(&run->table);
    json_object_del(options, "save-async");
    state.options = json_dumps(options, 0);
    json_decref(options);
    return state;
}
// Returns how many checkpoints stay; 0: all. After a skipped step none is removed: a run that diverges needs the older
// ones.
static inline long long run_keeps(const Run* run) { return run->skipped ? 0 : run->o.keep; }

// Before a save begins; after it has made training wait since `began`; and when it has its name.
static inline void run_save_begins(Run* run, long long step) {
    run->saves_last = run_ends(run, step);
    if (!run->saves_last) run->saves++;
    if (run_snapshots(run)) logger_say("saving step %lld\n", step);
}
static inline void run_save_waited(Run* run, double began) {
    if (!run->saves_last) run->save_waits += now_seconds() - began;
}
static inline void run_save_ended(Run* run, double began) {
    run_save_waited(run, began);
    logger_say("saved step %lld under %s\n", run->saving.step, run->o.out);
}

// Ends the save that is under way, if there is one.
static inline void run_save_end(Run* run) {
    if (!run->saving.under_way) return;
    double began = now_seconds();
    saving_end(&run->saving);
    run_save_ended(run, began);
}
// Saves these ranges, with all that a run needs to continue after `step`. They may change when this returns. With a
// snapshot the checkpoint gets its name some steps later.
static inline void run_save(Run* run, long long step, const ParamRange* ranges, int num_ranges) {
    TrainState state = run_state(run, step);
    run_save_end(run); // one at a time
    run_save_begins(run, step);
    double began = now_seconds();
    saving_begin(&run->saving, run->o.out, &state, run_keeps(run), ranges, num_ranges);
    run_save_waited(run, began);
    if (!run_snapshots(run)) run_save_end(run);
}

// ---- a step ----

static inline void run_step_begin(Run* run) {
    run->step_began = now_seconds();
    run->counted = dataloader_targets(&run->train);
    run->loss_tokens = run->counted > 0 ? (double)run->counted : 1;
}

// Sets a step's numbers to 0, except what this rank adds to the sums over all ranks.
static inline void run_begin_stats(Run* run, StepStats* stats) {
    run->asked.stopping = stop_signal() != 0;
    run->asked.saving = saving_is_writing(&run->saving);
    device_zero(stats, sizeof *stats);
    if (run->asked.stopping + run->asked.saving > 0) host_to_device(stats, &run->asked, sizeof run->asked);
}

static inline StepLog run_step_log(const Run* run, const StepStats* s, long long step, double seconds) {
    StepLog l;
    memset(&l, 0, sizeof l);
    l.step = step + 1;
    l.loss = s->loss / run->loss_tokens;
    l.masked = run->train.masked;
    l.counted = run->counted;
    l.grad_norm = logged_norm(s->grad_norm);
    l.param_norm = logged_norm(sqrt(s->param_square));
    l.lr = run->lr;
    l.loss_scale = run->scaler.scale;
    l.tokens = run->tokens;
    l.tokens_per_s = (double)run->tokens_per_step / seconds;
    l.step_ms = 1e3 * seconds;
    l.flops = gpt2_flops_per_token(run->config, (int)run->o.seq_len) * (double)run->tokens_per_step;
    l.mem_bytes = device_memory_total();
    l.mem_peak_bytes = device_memory_peak();
    l.comm_bytes = (size_t)run->comm_bytes;
    l.comm_exposed_ms = 1e3 * run->comm_exposed;
    l.skipped = s->grad_scale == 0;
    return l;
}

// Logs step `step`, counted from 0. Dies if training no longer makes progress.
static inline void run_log_step(Run* run, long long step, const StepStats* stats, double seconds) {
    run->tokens += run->tokens_per_step;
    StepLog l = run_step_log(run, stats, step, seconds);
    run->skipped = l.skipped;
    logger_step(&run->log, &l);
    loss_scaler_update(&run->scaler, !l.skipped);
    require_progress(&run->scaler, &run->o, l.step, l.loss);
    run->stopping = stats->stopping > 0 && l.step < run->o.steps;
    if (run->stopping) logger_say("stop       after step %lld: a signal has told %.0f of %d rank%s to save and stop\n",
                                  l.step, stats->stopping, run->log.ranks, run->log.ranks == 1 ? "" : "s");
}
static inline void run_step_end(Run* run, long long step, const StepStats* stats) {
    run_log_step(run, step, stats, now_seconds() - run->step_began);
    if (stats->saving == 0) run_save_end(run);
}

// ---- the end ----

// Closes log and timeline.
static inline void run_close(Run* run) {
    logger_close(&run->log);
    writer_lock_release();
    trace_close();
}
static inline void run_report_waits(const Run* run) {
    double ms = run->saves > 0 ? 1e3 * run->save_waits / (double)run->saves : 0;
    printf("allocations while training: %zu; times a step waited for data: %lld",
           device_allocations() - run->allocations, run->train.waits);
    if (run->saves > 0) printf("; waited %.1f ms for each of %lld saves before the last", ms, run->saves);
    printf("\n");
}
// Closes log and timeline, and compares predicted memory with measured memory. Returns true if they agree.
static inline bool run_end(Run* run) {
    run_save_end(run);
    run_close(run);
    trace_merge(run->o.trace, 1);
    RankMemory m = rank_memory(0, run->predicted);
    bool as_predicted = report_rank_memory(&m);
    run_report_waits(run);
    return as_predicted;
}

// Returns the program's exit status.
static inline int run_status(const Run* run, bool as_predicted) {
    return !as_predicted ? EXIT_FAILURE : run->stopping ? EXIT_STOPPED : EXIT_SUCCESS;
}

static inline void run_stop(Run* run) {
    dataloader_free(&run->train);
    if (run->o.val_data[0]) dataloader_free(&run->val);
    tokenizer_free(&run->tokenizer);
    saving_free(&run->saving);
    device_shutdown();
}
#endif
