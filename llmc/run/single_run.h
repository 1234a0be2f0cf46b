/*
single_run.h - what --single-throughput says: the tokens per second of one rank, with which a run on several is
compared.
*/
#ifndef LLMC_SINGLE_RUN_H
#define LLMC_SINGLE_RUN_H
#include "../base/common.h"
#include "../base/folder.h"
#include "../base/precision.h"
#include "../model/gpt2.h"
#include <jansson.h>

typedef struct {
    double tokens_per_second; // 0: not known
    const char* scaling;      // "strong": a step of that run had as many tokens as one of this; "weak": as many as a
                              // rank's share of this; NULL: a number was given, which does not say
    char device[96];          // what it ran on; "": not known
} SingleRun;
typedef struct { GPT2Config config; long long seq_len, tokens_per_step; int ranks; } RunShape; // of this run

static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Dies unless the first line of a metrics.jsonl, run, is that of a run on one rank that can be compared.
static inline void single_run_check(const char* path, const json_t* run, const RunShape* now) {
    static const char* const keys[] = { "layers", "heads", "channels", "vocabulary" };
    const int here[] = { now->config.L, now->config.NH, now->config.C, now->config.V };
    const char* precision = json_string_value(json_object_get(run, "precision"));
    json_int_t size = json_integer_value(json_object_get(run, "world_size"));
    json_int_t T = json_integer_value(json_object_get(json_object_get(run, "options"), "seq-len"));
    require(precision != NULL && size > 0,
            "--single-throughput %s: its first line is not that of a metrics.jsonl; give the one under --out of a run "
            "on one rank, or a number of tokens per second",
            path);
    require(size == 1, "--single-throughput %s: that run had %lld ranks; give a run on one rank", path,
            (long long)size);
    require(strcmp(precision, FLOATX_NAME) == 0,
            "--single-throughput %s: that run was in %s, this one is in %s; give one in %s", path, precision,
            FLOATX_NAME, FLOATX_NAME);
    for (int i = 0; i < 4; i++) {
        json_int_t there = json_integer_value(json_object_get(run, keys[i]));
        require(there == here[i],
                "--single-throughput %s: that model has %s %lld, this one %d; give a run of the same model", path,
                keys[i], (long long)there, here[i]);
    }
    require(T == now->seq_len,
            "--single-throughput %s: that run had --seq-len %lld, this one has %lld; give one with the same", path,
            (long long)T, now->seq_len);
}

// Sets s->scaling by the tokens that a step of that run had. Dies if they fit neither strong nor weak scaling.
static inline void single_run_compare(SingleRun* s, const char* path, long long tokens, const RunShape* now) {
    if (tokens == now->tokens_per_step) s->scaling = "strong";
    else if (tokens * now->ranks == now->tokens_per_step) s->scaling = "weak";
    require(s->scaling != NULL,
            "--single-throughput %s: a step of that run had %lld tokens; give one with --total-batch-size %lld (strong "
            "scaling) or %lld / %d ranks (weak scaling)",
            path, tokens, now->tokens_per_step, now->tokens_per_step, now->ranks);
}

// Returns the median of the steps after the first in a metrics.jsonl.
static inline SingleRun single_run_of_file(const char* path, const RunShape* now) {
    SingleRun s = { 0, NULL, "" };
    char* text = NULL;
    size_t capacity = 0, n = 0;
    double* rates = NULL;
    // tokens: of the last step, because a resumed run may change their number
    long long lines = 0, seen = 0, tokens = 0;
    FILE* f = fopen(path, "r");
    require(f != NULL,
            "--single-throughput %s: neither a number of tokens per second above 0 nor a file that can be read (%s); "
            "give the metrics.jsonl of a run on one rank, or a number",
            path, open_error(errno));
    for (ssize_t length; (length = getline(&text, &capacity, f)) > 0;) {
        json_t* line = json_loadb(text, (size_t)length, 0, NULL);
        if (lines++ == 0) {
            json_t* run = json_object_get(line, "run");
            single_run_check(path, run, now);
            const char* device = json_string_value(json_object_get(run, "device"));
            snprintf(s.device, sizeof s.device, "%s", device ? device : "");
        }
        double rate = json_number_value(json_object_get(line, "tokens_per_s"));
        json_int_t step = json_integer_value(json_object_get(line, "step"));
        if (rate > 0 && step > 0) {
            tokens = json_integer_value(json_object_get(line, "tokens")) - seen;
            seen += tokens;
            rates = (double*)xrealloc(rates, (n + 1) * sizeof(double));
            rates[n++] = rate;
        }
        json_decref(line);
    }
    fclose(f);
    free(text);
    require(lines > 0, "--single-throughput %s: the file is empty; give the metrics.jsonl of a run on one rank", path);
    require(n >= 2,
            "--single-throughput %s: that run had %zu step%s; the first does not count, so give one with 2 or more",
            path, n, n == 1 ? "" : "s");
    single_run_compare(&s, path, tokens, now);
    qsort(rates + 1, n - 1, sizeof(double), compare_doubles);
    s.tokens_per_second = 0.5 * (rates[1 + (n - 2) / 2] + rates[1 + (n - 1) / 2]);
    free(rates);
    return s;
}

// Reads the option's value; "": nothing is known. Dies if it is of no use.
static inline SingleRun single_run_read(const char* text, const RunShape* now) {
    SingleRun s = { 0, NULL, "" };
    char* end = NULL;
    if (text[0] == '\0') return s;
    double number = strtod(text, &end);
    if (*end != '\0') return single_run_of_file(text, now);
    require(isfinite(number) && number > 0, "--single-throughput %s: tokens per second must be a number above 0", text);
    s.tokens_per_second = number;
    return s;
}
#endif
