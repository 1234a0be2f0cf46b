/*
training_options.h - the options of every program, in the groups that --help shows.
*/
#ifndef LLMC_TRAINING_OPTIONS_H
#define LLMC_TRAINING_OPTIONS_H
#include "../base/options.h"

enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD };
enum { RECOMPUTE_NONE, RECOMPUTE_BLOCK, RECOMPUTE_AUTO };

// The options of every program. Strings are not owned. 0 or "" stands for "not given" where a comment mentions it.
typedef struct {
    const char *data, *val_data, *tokenizer;
    int mask;                                             // data/mask.h
    const char* model;
    long long layers, heads, channels, vocab_size;        // 0: what --model (or the tokenizer) says
    long long seq_len, batch_size, total_batch_size;      // total in tokens, 0: one micro-batch per rank or pipeline
                                                          // stage
    long long steps;
    double lr;
    long long warmup_steps;
    int lr_schedule;
    double final_lr_fraction, weight_decay, beta1, beta2, eps, grad_clip;
    double loss_scale;
    long long loss_scale_interval, max_bad_steps;
    long long seed;
    int recompute;
    double memory_limit;                                  // GB per rank, 0: none
    int attention, deterministic;
    const char* trace;                                    // "": none
    const char* out;                                      // "": nothing is written
    long long save_every, keep;
    int save_async, resume;
    const char* init_from;                                // "": random weights
    long long log_every;                                  // 0: about 20 lines on a terminal, and otherwise every step
    long long eval_every, eval_steps;
    long long sample_every, sample_tokens;
    const char* prompt;
    double temperature;
    long long top_k;
} Options;

static inline Options options_defaults(void) {
    Options o;
    memset(&o, 0, sizeof o);
    o.data = "data/train.bin"; o.val_data = "data/val.bin"; o.tokenizer = "bytes";
    o.model = "d4";
    o.seq_len = 128; o.batch_size = 16;
    o.steps = 500;
    o.lr = 2e-3; o.warmup_steps = 20; o.lr_schedule = SCHEDULE_COSINE; o.final_lr_fraction = 0.1;
    o.weight_decay = 0.1; o.beta1 = 0.9; o.beta2 = 0.95; o.eps = 1e-8; o.grad_clip = 1.0;
    o.loss_scale = 65536; o.loss_scale_interval = 2000; o.max_bad_steps = 10;
    o.seed = 1337;
    o.recompute = RECOMPUTE_AUTO;
    o.trace = "";
    o.out = ""; o.keep = 3; o.save_async = 1; o.init_from = "";
    o.eval_every = 50; o.eval_steps = 8;
    o.sample_every = 250; o.sample_tokens = 200; o.prompt = ""; o.temperature = 0.8;
    return o;
}

static inline void options_data(OptionTable* t, Options* o) {
    options_group(t, "data");
    option_text(t, "data", &o->data, "FILE", "training tokens: a .bin file, a glob of .bin shards, or any text file");
    option_text(t, "val-data", &o->val_data, "FILE",
                "tokens for evaluation, in the same forms; '', or only --data: no evaluation");
    option_choice(t, "mask", &o->mask, "auto|required|none",
                  "count only the tokens in the loss that FILE.mask, next to FILE.bin, marks; auto: if that file "
                  "exists; none: count all tokens");
    option_text(t, "tokenizer", &o->tokenizer, "bytes|FILE",
                "bytes, a vocab.json with merges.txt next to it, or a tokenizer .bin of llm.c; '': none, if --data "
                "contains tokens");
}

static inline void options_model(OptionTable* t, Options* o) {
    options_group(t, "model");
    option_text(t, "model", &o->model, "NAME",
                "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, 64N channels, N heads");
    option_letter(t, 'm');
    option_int(t, "layers", &o->layers, 0, 256, "number of layers; 0: as in --model");
    option_int(t, "heads", &o->heads, 0, 65536, "number of heads; 0: as in --model");
    option_int(t, "channels", &o->channels, 0, 65536, "number of channels, C; 0: as in --model");
    option_int(t, "vocab-size", &o->vocab_size, 0, 1 << 24,
               "vocabulary size, V; 0: 50257 for gpt2*, and as in the tokenizer for dN");
    option_text(t, "init-from", &o->init_from, "CHECKPOINT",
                "start from the weights of this checkpoint folder, with its model shape; '': from random weights");
}

static inline void options_optimizer(OptionTable* t, Options* o, double big) {
    option_float(t, "lr", &o->lr, 0, 1e3, "highest learning rate");
    option_int(t, "warmup-steps", &o->warmup_steps, 0, big, "steps of linear warmup for the learning rate");
    option_choice(t, "lr-schedule", &o->lr_schedule, "cosine|linear|constant|wsd",
                  "learning rate after the warmup; wsd: constant, then falling over the last fifth of the steps");
    option_float(t, "final-lr-fraction", &o->final_lr_fraction, 0, 1,
                 "learning rate at the last step, as a fraction of --lr");
    option_float(t, "weight-decay", &o->weight_decay, 0, 1e3, "weight decay of AdamW, for 2-D tensors only");
    option_float(t, "beta1", &o->beta1, 0, 0.9999999, "AdamW: decay of the first moment");
    option_float(t, "beta2", &o->beta2, 0, 0.9999999, "AdamW: decay of the second moment");
    option_float(t, "eps", &o->eps, 1e-30, 1, "AdamW: added to the denominator");
    option_float(t, "grad-clip", &o->grad_clip, 0, 1e9, "largest global gradient norm; 0: no clipping");
    option_float(t, "loss-scale", &o->loss_scale, 1, 1e30,
                 "fp16: initial loss scale, a power of two, which then adapts");
    option_int(t, "loss-scale-interval", &o->loss_scale_interval, 1, big,
               "fp16: good steps until the loss scale doubles");
    option_int(t, "max-bad-steps", &o->max_bad_steps, 1, big, "stop after this many NaN or Inf steps in a row");
}

static inline void options_training(OptionTable* t, Options* o, double big) {
    const double huge = 1e15;
    options_group(t, "training");
    option_int(t, "steps", &o->steps, 0, big, "optimizer steps in the whole run, including those before --resume");
    option_letter(t, 'n');
    option_int(t, "batch-size", &o->batch_size, 1, 1 << 20, "sequences per rank and micro-batch, B");
    option_letter(t, 'b');
    option_int(t, "seq-len", &o->seq_len, 1, 1 << 20, "tokens per sequence, T");
    option_letter(t, 't');
    option_int(t, "total-batch-size", &o->total_batch_size, 0, huge,
               "tokens per step over all ranks, reached by gradient accumulation;"
               " 0: one micro-batch per rank, or per pipeline stage");
    options_optimizer(t, o, big);
    option_int(t, "seed", &o->seed, 0, 9e15, "seed of weights, data order and samples");
    option_choice(t, "recompute", &o->recompute, "none|block|auto",
                  "block: store only the input of each block, and repeat its forward pass in the backward pass; auto: "
                  "block if not everything fits");
    option_float(t, "memory-limit", &o->memory_limit, 0, 1e6,
                 "stop if a rank needs more than this many GB of device memory; 0: no limit");
    option_choice(t, "attention", &o->attention, "auto|cudnn|own",
                  "auto: cuDNN if there is a GPU and cuDNN supports these shapes, else our own kernels");
    option_flag(t, "deterministic", &o->deterministic, "bit-identical runs, even where that is slower");
}

static inline void options_saving(OptionTable* t, Options* o, double big) {
    options_group(t, "saving");
    option_text(t, "out", &o->out, "DIR",
                "write checkpoints and metrics.jsonl here; '': write nothing. On SIGUSR1 or SIGTERM the run "
                "then saves and exits with status 200");
    option_letter(t, 'o');
    option_int(t, "save-every", &o->save_every, 0, big, "steps between checkpoints; 0: only at the end");
    option_int(t, "keep", &o->keep, 0, big, "newest checkpoints to keep; 0: all");
    option_flag(t, "save-async", &o->save_async,
                "go on with training while a copy of the state is written, if the host's memory holds one");
    option_flag(t, "resume", &o->resume, "continue from the newest checkpoint in --out");
}

static inline void options_output(OptionTable* t, Options* o, double big) {
    options_group(t, "output");
    option_int(t, "log-every", &o->log_every, 0, big,
               "steps between log lines; 0: about 20 lines on a terminal, every step elsewhere");
    option_int(t, "eval-every", &o->eval_every, 0, big, "steps between evaluations, plus one at the end; 0: none");
    option_int(t, "eval-steps", &o->eval_steps, 1, big, "largest number of global batches per evaluation");
    option_int(t, "sample-every", &o->sample_every, 0, big,
               "steps between printed samples, plus one at the end; 0: none");
    option_int(t, "sample-tokens", &o->sample_tokens, 1, 1 << 20, "tokens per sample");
    option_text(t, "prompt", &o->prompt, "TEXT", "text that samples start from; '': the end-of-text token");
    option_float(t, "temperature", &o->temperature, 0, 100, "sampling temperature; 0: the likeliest token");
    option_int(t, "top-k", &o->top_k, 0, 1 << 24, "sample only among the k likeliest tokens; 0: all");
    option_text(t, "trace", &o->trace, "FILE", "write a timeline for https://ui.perfetto.dev; '': none");
}

// Adds the options of every program in their groups. Those that the caller adds next are its own.
static inline void options_common(OptionTable* t, Options* o) {
    const double big = 1e9;
    options_data(t, o);
    options_model(t, o);
    options_training(t, o, big);
    options_group(t, "ranks"); // comm/comm_api.h and run/ranks.h add them
    options_saving(t, o, big);
    options_output(t, o, big);
    options_group(t, NULL);
}
#endif
