/*
logger.h - the log of a run: lines for people, and OUT/metrics.jsonl for programs.

In a file or a pipe every step prints a line. On a terminal one line is rewritten as the run goes on, and every
--log-every steps a full line stays.

metrics.jsonl holds one JSON object a line: first {"run": {"program", "options": {...}, ...}}, then per step
{"step", "loss", "grad_norm", "param_norm", "lr", "loss_scale", "tokens", "tokens_per_s", "step_ms", "mem_bytes",
"mem_peak_bytes", "comm_bytes", "comm_exposed_ms", "skipped"}, and with a mask "counted", the targets that count in the
loss; per evaluation {"step", "val_loss", "val_loss_per_byte"}. The last line, if several ranks did more than one step,
is {"diagnosis": {...}} (diagnosis.h), which build/advise explains. Losses are in nats per token that counts, or
null if none counts. Steps count from 1. Numbers have 17 digits, so a double reads back as it was; NaN and Inf, which
JSON lacks, are null. The two norms have 32 significant bits (logged_norm). Each line is written at once, so a run that
is killed loses at most the line that it was writing.
*/
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H
#include "../base/common.h"
#include "../device/device.h"
#include "../base/folder.h"
#include "../base/json.h"
#include "../base/terminal.h"
#include "../model/training_options.h"

typedef struct {
    long long step;                   // counted from 1
    double loss, grad_norm, param_norm, lr, loss_scale;
    long long tokens;                 // seen so far, over all ranks
    double tokens_per_s, flops;       // of all ranks together; flops of this step, 0: not known
    double step_ms;
    size_t mem_bytes, mem_peak_bytes; // of rank 0
    size_t comm_bytes;                // sent by a rank in this step
    double comm_exposed_ms;           // communication that the step had to wait for
    bool skipped;                     // gradients were not finite, the weights stayed as they were
    bool masked;                      // not all tokens count in the loss:
    long long counted;                // so many do in this step
} StepLog;

// Mean loss over the validation data, in nats. Per byte it can be compared between tokenizers;
// NaN: the tokenizer lacks a token.
typedef struct { double per_token, per_byte; } EvalLoss;

typedef struct {
    int ranks;                // 1; a program with more says so after logger_open
    char* path;               // of metrics.jsonl, owned; NULL: none is written
    FILE* file;
    long long steps;          // in the whole run
    long long first;          // the step it starts or continues from
    long long every;          // steps between full lines
    bool terminal;            // a person is watching: show the live line
    double last_time;         // when the last step ended, now_seconds
    double last_shown;        // when the live line was last rewritten
    double seconds_per_step;  // smoothed; 0: not known yet
} Logger;

// Returns a norm as it is logged: rounded to 32 significant bits, without the sign that a NaN may have. Ranks that each
// hold a part of the model add up squares in another order than one that holds all of it, and only later bits show
// that. At a norm of 22 the rounding is 2e-9, below 8192 it is less than 1e-6.
static inline double logged_norm(double norm) {
    int exponent = 0;
    double fraction = frexp(norm, &exponent); // in [0.5,1)
    return fabs(ldexp(nearbyint(ldexp(fraction, 32)), exponent - 32));
}

// Options by name, each as the kind of value it is. The caller owns the object.
static inline json_t* options_to_json(const OptionTable* t) {
    json_t* object = json_object();
    for (int i = 0; i < t->count; i++) {
        const OptionSpec* s = &t->specs[i];
        char word[128];
        json_t* value = NULL;
        if (s->kind == OPTION_TEXT) value = json_text(*(const char**)s->value);
        if (s->kind == OPTION_INT) value = json_integer(*(long long*)s->value);
        if (s->kind == OPTION_FLOAT) value = json_number(*(double*)s->value);
        if (s->kind == OPTION_FLAG) value = json_boolean(*(int*)s->value);
        if (s->kind == OPTION_CHOICE) {
            option_format(s, word, sizeof word);
            value = json_text(word);
        }
        require(json_object_set_new(object, s->name, value) == 0, "out of host memory while writing --%s as JSON",
                s->name);
    }
    return object;
}

// ---- metrics.jsonl ----

// One line; the object is taken over. A disk that is full shows here, and not when it is too late.
static inline void logger_write(Logger* g, json_t* object) {
    if (g->file) {
        char* line = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(17));
        require(line != NULL, "out of host memory while writing %s", g->path);
        require(fprintf(g->file, "%s\n", line) > 0 && fflush(g->file) == 0,
                "%s: cannot be written: %s; free space, then continue from the last checkpoint with --resume",
                g->path, strerror(errno));
        free(line);
    }
    json_decref(object);
}

// Returns true if this whole line of metrics.jsonl is about a step after `last`.
// A line that is not JSON is about no step.
static inline bool logger_line_is_later(const char* line, size_t n, long long last) {
    json_t* object = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    bool is_later = json_integer_value(json_object_get(object, "step")) > last;
    json_decref(object);
    return is_later;
}

// Cuts off what a run wrote after the checkpoint that is resumed from: these steps will be done again. It also cuts
// off a torn line at the end, and keeps every other line, whatever is in it.
static inline void logger_cut(Logger* g, long long resumed_step) {
    char* line = NULL;
    size_t capacity = 0;
    ssize_t n;
    off_t end = 0;
    int cut = 0;
    bool is_torn = false;
    while ((n = getline(&line, &capacity, g->file)) > 0) {
        is_torn = line[n - 1] != '\n';
        if (cut > 0 || is_torn || logger_line_is_later(line, (size_t)n, resumed_step)) cut++;
        else end += n;
    }
    free(line);
    if (cut > 0)
        printf("metrics    %d line%s cut from the end of %s%s: steps after %lld are repeated\n", cut,
               cut == 1 ? "" : "s", g->path, is_torn ? ", the last one torn" : "", resumed_step);
    require(!ferror(g->file), "%s: cannot be read: %s", g->path, strerror(errno));
    require(ftruncate(fileno(g->file), end) == 0 && fseeko(g->file, 0, SEEK_END) == 0,
            "%s: cannot be cut at byte %lld: %s", g->path, (long long)end, strerror(errno));
}

// Opens the log of a run. out: the folder for metrics.jsonl, made if need be; "": none, as on all ranks but 0.
// resumed_step: the step of the checkpoint that the run continues from, 0: it is new, and an older file is replaced.
// run: an object with more facts for the first line, taken over; NULL: none.
static inline void logger_open(Logger* g, const OptionTable* table, const Options* o, const char* out,
                               long long resumed_step, json_t* run) {
    memset(g, 0, sizeof *g);
    g->ranks = 1;
    g->steps = o->steps;
    g->first = resumed_step;
    g->terminal = terminal_is_watched();
    g->every = o->log_every ? o->log_every : g->terminal && o->steps > 20 ? o->steps / 20 : 1;
    g->last_time = now_seconds();
    if (run == NULL) run = json_object();
    json_object_set_new(run, "program", json_text(table->program));
    json_object_set_new(run, "options", options_to_json(table));
    if (out[0] != '\0') {
        require(folder_make(out), "--out %s: this folder cannot be made: %s; give another", out,
                path_reason(out, errno));
        g->path = format_string("%s/metrics.jsonl", out);
        bool continued = resumed_step > 0 && path_exists(g->path);
        FileSource from = { g->path, "move it away or give another --out" };
        g->file = continued ? fdopen(file_open(from, O_RDWR, NULL), "r+") : fopen(g->path, "w");
        require(g->file != NULL, "%s: cannot be opened for writing: %s; give another --out", g->path,
                path_reason(g->path, errno));
        if (continued) logger_cut(g, resumed_step);
    }
    json_t* first = json_pack("{so}", "run", run);
    if (g->file && ftello(g->file) == 0) logger_write(g, first);
    else json_decref(first);
}

static inline void logger_close(Logger* g) {
    live_line_clear();
    if (g->file) require(fclose(g->file) == 0, "%s: cannot be written: %s", g->path, strerror(errno));
    free(g->path);
    memset(g, 0, sizeof *g);
}

// ---- what is logged ----

static inline int logger_step_digits(const Logger* g) { return snprintf(NULL, 0, "%lld", g->steps); }

// Prints to stdout as printf would, in place of the live line. Programs print everything through it while they train.
PRINTF_LIKE(1, 2)
static inline void logger_say(const char* format, ...) {
    va_list args;
    live_line_clear();
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    fflush(stdout);
}

// Rewrites the live line, ten times a second at most: how much is done, and when the rest will be, by a smoothed rate.
static inline void logger_live(Logger* g, const StepLog* s) {
    double now = now_seconds(), seconds = now - g->last_time;
    char bar[21], left[32], text[256];
    g->last_time = now;
    g->seconds_per_step = g->seconds_per_step == 0 ? seconds : 0.9 * g->seconds_per_step + 0.1 * seconds;
    if (!g->terminal || s->step >= g->steps || now - g->last_shown < 0.1) return;
    g->last_shown = now;
    for (long long i = 0; i < 20; i++) bar[i] = i < 20 * s->step / g->steps ? '#' : '.';
    bar[20] = '\0';
    long long rest = (long long)(g->seconds_per_step * (double)(g->steps - s->step) + 0.5);
    if (rest >= 3600) snprintf(left, sizeof left, "%lldh%02lldm", rest / 3600, rest / 60 % 60);
    else snprintf(left, sizeof left, "%lldm%02llds", rest / 60, rest % 60);
    snprintf(text, sizeof text, "step %*lld/%lld [%s] loss %.4f | %.0f tok/s | %s left", logger_step_digits(g), s->step,
             g->steps, bar, s->loss, s->tokens_per_s, left);
    live_line_show(text);
}

static inline void logger_print_step(Logger* g, const StepLog* s) {
    char memory[32];
    live_line_clear();
    printf("step %*lld/%lld | loss %.4f | grad norm %.4f | param norm %.2f | lr %.2e | mem %s | %.0f tok/s",
           logger_step_digits(g), s->step, g->steps, s->loss, s->grad_norm, s->param_norm, s->lr,
           format_bytes(memory, sizeof memory, (double)s->mem_peak_bytes), s->tokens_per_s);
    double possible = device_peak_flops() * g->ranks * 1e-3 * s->step_ms;
    if (possible > 0 && s->flops > 0) printf(" | MFU %.1f%%", 100 * s->flops / possible);
    if (g->ranks > 1) printf(" | comm exposed %.1f ms", s->comm_exposed_ms);
    if (s->masked) printf(" | %lld target%s%s", s->counted, s->counted == 1 ? "" : "s",
                          s->counted == 0 ? ": no loss, gradients are 0" : "");
    if (s->loss_scale != 1) printf(" | loss scale %g", s->loss_scale);
    if (s->skipped) printf(" | skipped: gradients not finite");
    printf("\n");
    fflush(stdout);
}

// A step of training: prints its line, if one is due, and writes its object.
static inline void logger_step(Logger* g, const StepLog* s) {
    // The run's first and last steps have a full line, and so does a step that changed no weights.
    bool due = s->step % g->every == 0 || s->step == g->first + 1 || s->step == g->steps || s->skipped;
    if (due) logger_print_step(g, s);
    logger_live(g, s);
    json_t* o = json_pack("{sI, so, so, so, so, so, sI, so, so, sI, sI, sI, so, sb}", "step", (json_int_t)s->step,
        "loss", json_number(s->masked && s->counted == 0 ? NAN : s->loss), "grad_norm", json_number(s->grad_norm),
        "param_norm", json_number(s->param_norm), "lr", json_number(s->lr), "loss_scale", json_number(s->loss_scale),
        "tokens", (json_int_t)s->tokens, "tokens_per_s", json_number(s->tokens_per_s),
        "step_ms", json_number(s->step_ms),
        "mem_bytes", (json_int_t)s->mem_bytes, "mem_peak_bytes", (json_int_t)s->mem_peak_bytes,
        "comm_bytes", (json_int_t)s->comm_bytes, "comm_exposed_ms", json_number(s->comm_exposed_ms),
        "skipped", (int)s->skipped);
    if (s->masked) json_object_set_new(o, "counted", json_integer(s->counted));
    logger_write(g, o);
}

// An evaluation after `step` steps. If tokens are not bytes, the loss per byte is also printed.
static inline void logger_eval(Logger* g, long long step, EvalLoss loss) {
    char per_byte[64] = "";
    if (isfinite(loss.per_byte) && loss.per_byte != loss.per_token)
        snprintf(per_byte, sizeof per_byte, " per token, %.4f per byte", loss.per_byte);
    logger_say("step %*lld/%lld | val loss %.4f%s\n", logger_step_digits(g), step, g->steps, loss.per_token, per_byte);
    logger_write(g, json_pack("{sI, so, so}", "step", (json_int_t)step, "val_loss", json_number(loss.per_token),
                              "val_loss_per_byte", json_number(loss.per_byte)));
}
#endif
