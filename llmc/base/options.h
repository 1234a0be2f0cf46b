/*
options.h - one table makes both the parser and --help, so neither can lie about the other.

A stage file declares its Options, calls options_common() for what every stage has, appends what is its own with
options_add(), and then options_parse(). Unknown options, bad numbers and values out of range are errors that name the
option and the allowed range. Values may be given as --name VALUE or --name=VALUE; --no-name turns a switch off.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H
#include "common.h"

typedef enum { OPTION_TEXT, OPTION_INT, OPTION_FLOAT, OPTION_CHOICE, OPTION_FLAG } OptionKind;

typedef struct {
    const char* name;    // without the dashes
    char letter;         // one-letter name, 0: none
    OptionKind kind;
    void* value;         // const char** (TEXT), long long* (INT), double* (FLOAT), int* (CHOICE: index; FLAG: 0 or 1)
    const char* form;    // what --help calls the value; for CHOICE its words, separated by |
    double low, high;    // allowed range of numbers
    const char* help;
    bool given;          // on the command line
} OptionSpec;
typedef struct { int before; const char* text; } OptionHeading; // --help prints it before option number `before`

#define MAX_OPTIONS 80
#define MAX_HEADINGS 16
typedef struct {
    const char* program; // "train_gpt2_single"
    const char* purpose; // one line for --help
    OptionSpec specs[MAX_OPTIONS];
    int count;
    OptionHeading headings[MAX_HEADINGS];
    int heading_count;
    const char* operands_form;       // what --help calls the arguments that are not options: "IN OUT"; NULL: there are none
    int min_operands, max_operands;
    const char** operands;           // (operand_count) those of the command line, after options_parse; owned
    int operand_count;
} OptionTable;

enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD };
enum { RECOMPUTE_NONE, RECOMPUTE_BLOCK, RECOMPUTE_AUTO };

// What every stage understands. Strings are not owned. 0 or "" stands for "not given" where a comment says so.
typedef struct {
    const char *data, *val_data, *tokenizer;
    int mask;                                             // data/mask.h
    const char* model;
    long long layers, heads, channels, vocab_size;        // 0: what --model (or the tokenizer) says
    long long seq_len, batch_size, total_batch_size;      // total in tokens, 0: one micro-batch per rank or stage
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
    int resume;
    const char* init_from;                                // "": random weights
    long long log_every;                                  // 0: about 20 lines on a terminal, else every step
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
    o.out = ""; o.keep = 3; o.init_from = "";
    o.eval_every = 50; o.eval_steps = 8;
    o.sample_every = 250; o.sample_tokens = 200; o.prompt = ""; o.temperature = 0.8;
    return o;
}

static inline OptionTable options_table(const char* program, const char* purpose) {
    OptionTable t;
    memset(&t, 0, sizeof t);
    t.program = program;
    t.purpose = purpose;
    return t;
}

// The command line also takes arguments that are not options: from `least` to `most` of them.
static inline void options_operands(OptionTable* t, const char* form, int min, int max) {
    t->operands_form = form;
    t->min_operands = min;
    t->max_operands = max;
}

static inline void options_add(OptionTable* t, OptionSpec spec) {
    require(t->count < MAX_OPTIONS, "the option table is full (%d)", MAX_OPTIONS);
    t->specs[t->count++] = spec;
}

static inline void option_text(OptionTable* t, const char* name, const char** value, const char* form, const char* help) {
    OptionSpec s = { name, 0, OPTION_TEXT, value, form, 0, 0, help, false };
    options_add(t, s);
}
static inline void option_int(OptionTable* t, const char* name, long long* value, double low, double high, const char* help) {
    OptionSpec s = { name, 0, OPTION_INT, value, "N", low, high, help, false };
    options_add(t, s);
}
static inline void option_float(OptionTable* t, const char* name, double* value, double low, double high, const char* help) {
    OptionSpec s = { name, 0, OPTION_FLOAT, value, "X", low, high, help, false };
    options_add(t, s);
}
static inline void option_choice(OptionTable* t, const char* name, int* value, const char* words, const char* help) {
    OptionSpec s = { name, 0, OPTION_CHOICE, value, words, 0, 0, help, false };
    options_add(t, s);
}
static inline void option_flag(OptionTable* t, const char* name, int* value, const char* help) {
    OptionSpec s = { name, 0, OPTION_FLAG, value, "", 0, 1, help, false };
    options_add(t, s);
}
// --help prints this line above the options that are added after it.
static inline void option_heading(OptionTable* t, const char* text) {
    require(t->heading_count < MAX_HEADINGS, "the option table has no room for more headings (%d)", MAX_HEADINGS);
    OptionHeading h = { t->count, text };
    t->headings[t->heading_count++] = h;
}
// Gives the option added last a one-letter name.
static inline void option_letter(OptionTable* t, char letter) { t->specs[t->count - 1].letter = letter; }

static inline void options_common(OptionTable* t, Options* o) {
    const double big = 1e9, huge = 1e15;
    option_text(t, "data", &o->data, "FILE", "training tokens: .bin, a glob of .bin shards, or any text file");
    option_text(t, "val-data", &o->val_data, "FILE", "tokens for evaluation, as --data; '': no evaluation");
    option_choice(t, "mask", &o->mask, "auto|required|none", "tokens that do not count in the loss, by the FILE.mask beside FILE.bin;"
                  " auto: where there is one; none: all tokens count");
    option_text(t, "tokenizer", &o->tokenizer, "bytes|FILE",
                "bytes, vocab.json with merges.txt beside it, or llm.c's tokenizer .bin; '': none, for --data of tokens");
    option_text(t, "model", &o->model, "NAME", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, 64N channels, N heads");
    option_letter(t, 'm');
    option_int(t, "layers", &o->layers, 0, 256, "number of layers; 0: the model's");
    option_int(t, "heads", &o->heads, 0, 65536, "number of heads; 0: the model's");
    option_int(t, "channels", &o->channels, 0, 65536, "number of channels, C; 0: the model's");
    option_int(t, "vocab-size", &o->vocab_size, 0, 1 << 24, "number of tokens, V; 0: the tokenizer's for dN, 50257 for gpt2*");
    option_int(t, "seq-len", &o->seq_len, 1, 1 << 20, "tokens per sequence, T");
    option_letter(t, 't');
    option_int(t, "batch-size", &o->batch_size, 1, 1 << 20, "sequences per rank and micro-batch, B");
    option_letter(t, 'b');
    option_int(t, "total-batch-size", &o->total_batch_size, 0, huge, "tokens per step over all ranks, reached by accumulation;"
               " 0: one micro-batch on each rank, in a pipeline one for each of its stages");
    option_int(t, "steps", &o->steps, 0, big, "optimizer steps in the whole run, those before a resume included");
    option_letter(t, 'n');
    option_float(t, "lr", &o->lr, 0, 1e3, "highest learning rate");
    option_int(t, "warmup-steps", &o->warmup_steps, 0, big, "steps over which the learning rate rises linearly");
    option_choice(t, "lr-schedule", &o->lr_schedule, "cosine|linear|constant|wsd", "after the warmup; wsd: constant, then down over the last fifth");
    option_float(t, "final-lr-fraction", &o->final_lr_fraction, 0, 1, "learning rate at the last step, as a fraction of --lr");
    option_float(t, "weight-decay", &o->weight_decay, 0, 1e3, "of 2-D tensors only");
    option_float(t, "beta1", &o->beta1, 0, 0.9999999, "AdamW");
    option_float(t, "beta2", &o->beta2, 0, 0.9999999, "AdamW");
    option_float(t, "eps", &o->eps, 1e-30, 1, "AdamW");
    option_float(t, "grad-clip", &o->grad_clip, 0, 1e9, "largest global gradient norm; 0: no clipping");
    option_float(t, "loss-scale", &o->loss_scale, 1, 1e30, "first loss scale of fp16, a power of two; dynamic from there on");
    option_int(t, "loss-scale-interval", &o->loss_scale_interval, 1, big, "good steps after which the loss scale doubles");
    option_int(t, "max-bad-steps", &o->max_bad_steps, 1, big, "stop after this many steps in a row with NaN or Inf");
    option_int(t, "seed", &o->seed, 0, 9e15, "of initial weights, data order and samples");
    option_choice(t, "recompute", &o->recompute, "none|block|auto",
                  "block: keep only each block's input, run its forward pass again in backward; auto: block if not everything fits");
    option_float(t, "memory-limit", &o->memory_limit, 0, 1e6, "GB of device memory that a rank may use; if it needs more it stops; 0: no limit");
    option_choice(t, "attention", &o->attention, "auto|cudnn|own", "auto: cuDNN's where a GPU has it and it takes these shapes, else our own");
    option_flag(t, "deterministic", &o->deterministic, "equal bits from run to run, even where that is slower");
    option_text(t, "trace", &o->trace, "FILE", "write a timeline, for https://ui.perfetto.dev; '': none");
    option_text(t, "out", &o->out, "DIR", "write checkpoints and metrics.jsonl here; '': write nothing");
    option_letter(t, 'o');
    option_int(t, "save-every", &o->save_every, 0, big, "steps between checkpoints; 0: only after the last step");
    option_int(t, "keep", &o->keep, 0, big, "checkpoints to keep, the newest; 0: all");
    option_flag(t, "resume", &o->resume, "continue from the newest checkpoint under --out");
    option_text(t, "init-from", &o->init_from, "CHECKPOINT", "start from the weights and with the model shape of this checkpoint folder");
    option_int(t, "log-every", &o->log_every, 0, big, "steps between printed lines; 0: about 20 lines on a terminal, every step elsewhere");
    option_int(t, "eval-every", &o->eval_every, 0, big, "steps between evaluations, one more at the end; 0: none");
    option_int(t, "eval-steps", &o->eval_steps, 1, big, "largest number of global batches per evaluation");
    option_int(t, "sample-every", &o->sample_every, 0, big, "steps between printed samples, one more at the end; 0: none");
    option_int(t, "sample-tokens", &o->sample_tokens, 1, 1 << 20, "tokens per sample");
    option_text(t, "prompt", &o->prompt, "TEXT", "text that a sample starts from; '': the end-of-text token");
    option_float(t, "temperature", &o->temperature, 0, 100, "of sampling; 0: always the likeliest token");
    option_int(t, "top-k", &o->top_k, 0, 1 << 24, "sample among the k likeliest tokens only; 0: all");
}

// The value of option s as text, as --help and the run record show it.
static inline void option_format(const OptionSpec* s, char* out, size_t size) {
    if (s->kind == OPTION_TEXT) snprintf(out, size, "%s", *(const char**)s->value);
    if (s->kind == OPTION_INT) snprintf(out, size, "%lld", *(long long*)s->value);
    if (s->kind == OPTION_FLOAT) snprintf(out, size, "%g", *(double*)s->value);
    if (s->kind == OPTION_FLAG) snprintf(out, size, "%s", *(int*)s->value ? "on" : "off");
    if (s->kind != OPTION_CHOICE) return;
    const char* word = s->form;
    for (int i = *(int*)s->value; i > 0; i--) word = strchr(word, '|') + 1;
    snprintf(out, size, "%.*s", (int)strcspn(word, "|"), word);
}

static inline void options_help(const OptionTable* t) {
    printf("%s: %s\n\nusage: %s [options]%s%s\n\n", t->program, t->purpose, t->program,
           t->operands_form ? " " : "", t->operands_form ? t->operands_form : "");
    for (int i = 0; i < t->count; i++) {
        const OptionSpec* s = &t->specs[i];
        char left[80], value[128], letter[8] = "    ";
        for (int h = 0; h < t->heading_count; h++) if (t->headings[h].before == i) printf("%s%s\n", i ? "\n" : "", t->headings[h].text);
        option_format(s, value, sizeof value);
        if (s->letter) snprintf(letter, sizeof letter, "-%c, ", s->letter);
        snprintf(left, sizeof left, "%s--%s %s", letter, s->name, s->form);
        const char* quote = s->kind == OPTION_TEXT ? "'" : "";
        printf("  %-46s%s%s  [%s%s%s]\n", left, strlen(left) > 45 ? "\n                                                " : "", s->help, quote, value, quote);
    }
    printf("%s  -h, --help                                    print this and exit\n", t->heading_count ? "\n" : "");
    printf("\nWhat is [on] or [off] is a switch: --NAME turns it on, --no-NAME off.\n");
}

static inline void option_set(const OptionSpec* s, const char* text) {
    char* end;
    errno = 0;
    if (s->kind == OPTION_TEXT) *(const char**)s->value = text;
    if (s->kind == OPTION_FLAG) *(int*)s->value = strcmp(text, "on") == 0;
    if (s->kind == OPTION_INT) {
        long long v = strtoll(text, &end, 10);
        require(*text != '\0' && *end == '\0' && errno == 0 && !isspace((unsigned char)*text),
                "--%s wants a whole number, not '%s'", s->name, text);
        require((double)v >= s->low && (double)v <= s->high, "--%s must be between %.0f and %.0f, not %lld", s->name, s->low, s->high, v);
        *(long long*)s->value = v;
    }
    if (s->kind == OPTION_FLOAT) {
        double v = strtod(text, &end);
        require(*text != '\0' && *end == '\0' && !isspace((unsigned char)*text), "--%s wants a number, not '%s'", s->name, text);
        require(v >= s->low && v <= s->high, "--%s must be between %g and %g, not %s", s->name, s->low, s->high, text);
        *(double*)s->value = v;
    }
    if (s->kind == OPTION_CHOICE) {
        int index = 0;
        for (const char* word = s->form; ; index++) {
            size_t n = strcspn(word, "|");
            if (strlen(text) == n && strncmp(word, text, n) == 0) break;
            require(word[n] == '|', "--%s must be one of %s, not '%s'", s->name, s->form, text);
            word += n + 1;
        }
        *(int*)s->value = index;
    }
}

// Returns the option that an argument names in its first `length` characters, or NULL. *off: it is a switch, named as
// --no-NAME.
static inline OptionSpec* option_find(OptionTable* t, const char* argument, size_t length, bool* off) {
    for (int i = 0; i < t->count; i++) {
        OptionSpec* s = &t->specs[i];
        size_t n = strlen(s->name);
        bool is_long = length == n + 2 && strncmp(argument, "--", 2) == 0 && strncmp(argument + 2, s->name, n) == 0;
        bool is_short = length == 2 && argument[0] == '-' && s->letter && argument[1] == s->letter;
        *off = s->kind == OPTION_FLAG && length == n + 5 && strncmp(argument, "--no-", 5) == 0 && strncmp(argument + 5, s->name, n) == 0;
        if (is_long || is_short || *off) return s;
    }
    return NULL;
}

// Fills the values behind the table from the command line. --help prints the table and exits with 0. Options may stand
// before, between and after operands; "--" ends them, "-" is an operand.
static inline void options_parse(OptionTable* t, int argc, char** argv) {
    bool only_operands = false;
    if (t->operands_form) t->operands = (const char**)xcalloc((size_t)argc, sizeof(char*));
    for (int i = 1; i < argc; i++) {
        const char* a = argv[i];
        if (!only_operands && (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0)) { options_help(t); exit(EXIT_SUCCESS); }
        if (t->operands_form && strcmp(a, "--") == 0 && !only_operands) { only_operands = true; continue; }
        if (t->operands_form && (only_operands || a[0] != '-' || a[1] == '\0')) { t->operands[t->operand_count++] = a; continue; }
        size_t length = strcspn(a, "=");
        bool off = false;
        OptionSpec* s = option_find(t, a, length, &off);
        require(s != NULL && !only_operands, "unknown option '%.*s'; --help lists them all", (int)length, a);
        s->given = true;
        if (s->kind == OPTION_FLAG) {
            require(a[length] == '\0', "--%s is a switch and takes no value; --no-%s turns it off", s->name, s->name);
            option_set(s, off ? "off" : "on");
        } else if (a[length] == '=') {
            option_set(s, a + length + 1);
        } else {
            require(i + 1 < argc, "--%s needs a value: %s", s->name, s->form);
            option_set(s, argv[++i]);
        }
    }
    require(t->operand_count >= t->min_operands && t->operand_count <= t->max_operands,
            "usage: %s [options] %s; --help says more", t->program, t->operands_form);
}

// Returns true if the command line named --NAME.
static inline bool option_given(OptionTable* t, const char* name) {
    for (int i = 0; i < t->count; i++) if (strcmp(t->specs[i].name, name) == 0) return t->specs[i].given;
    die("there is no option --%s", name);
}
#endif
