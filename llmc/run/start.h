/*
start.h - what a run starts from: the checkpoint that --resume or --init-from names, the model's shape, and the folder
--out, under which nobody else writes (save/writer_lock.h).
*/
#ifndef LLMC_START_H
#define LLMC_START_H
#include "../data/tokenizer.h"
#include "../model/gpt2.h"
#include "../model/training_options.h"
#include "../save/checkpoint.h"
#include "../save/writer_lock.h"

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
    char* newest = checkpoint_newest(out);
    char* error = newest ? format_string("--out %s holds the checkpoints of another run, the newest in %s: continue it "
                                         "with --resume, or give another folder",
                                         out, newest)
                         : NULL;
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
    bool is_folder = stat(o->out, &info) == 0 && S_ISDIR(info.st_mode);
    if (is_folder) error = writer_lock_take(o->out, patience);
    bool taken = error == NULL && writer_lock.record;
    // It may have come and gone since this run looked
    if (taken && makes && !o->resume) error = other_run_under(o->out);
    return error;
}

// The checkpoint to start from into r: false if neither --resume nor --init-from asks for one.
static inline bool open_checkpoint(const Options* o, CheckpointReader* r) {
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
    require(r->state.has_optimizer,
            "--resume: %s has weights only, no optimizer state; use --init-from to start from them", r->path);
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
#endif
