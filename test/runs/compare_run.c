/*
compare_run - compares two runs: their metrics step by step, or their weights element by element.

    compare_run metrics A.jsonl B.jsonl --bits                       the same numbers, to the bit
    compare_run metrics A.jsonl B.jsonl --rtol 1e-5 --atol 1e-6      |a - b| <= atol + rtol |a|: A is the reference
    compare_run metrics A.jsonl B.jsonl --rtol 0.01 --only loss      one field
    compare_run weights A.safetensors B.safetensors --rtol 1e-5 --atol 1e-6
    compare_run show A.jsonl loss                                    prints one field, a line for each step

Prints the worst deviation as a share of what is allowed; the exit status is 0 if all agree, else 1. Every field of A's
lines that this program knows must be in B's, and the lines must be of the same steps; both files must have the same
tensors. NaN and Inf never agree, except that with --bits two metrics that are not finite (null in JSON) do, as in a
skipped step.
*/
#include "../../llmc/base/common.h"
#include "../../llmc/base/options.h"
#include "../../llmc/save/safetensors.h"

typedef struct {
    double rtol, atol;
    int bits;
    const char* only;       // "": all fields
    // what was found
    double worst;           // largest deviation as a share of its bound
    char where[160];        // of the worst, with both numbers
    size_t compared, outside;
} Comparison;

static void compare_numbers(Comparison* c, const char* what, size_t index, double a, double b) {
    double difference = fabs(a - b), bound = c->bits ? 0 : c->atol + c->rtol * fabs(a);
    bool inside = difference <= bound;
    double share = bound > 0 ? difference / bound : inside ? 0 : INFINITY;
    if (isnan(share)) share = INFINITY;
    c->compared++;
    c->outside += !inside;
    if (c->where[0] != '\0' && !(share > c->worst)) return;
    c->worst = share;
    snprintf(c->where, sizeof c->where, "%s[%zu]: %.12g and %.12g", what, index, a, b);
}

static int comparison_report(const Comparison* c, const char* a, const char* b) {
    require(c->compared > 0, "%s and %s: there is nothing to compare", a, b);
    printf("%s and %s: %zu numbers compared, %zu of them outside %s; the worst, %.3g of what is allowed, is %s\n",
           a, b, c->compared, c->outside, c->bits ? "equality" : "the bound", c->worst, c->where);
    return c->outside == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

// ---- metrics.jsonl ----

typedef struct { json_t** lines; size_t count; } Metrics; // the lines about steps; lines (count) owned

static Metrics metrics_read(const char* path) {
    Metrics m = { NULL, 0 };
    FILE* f = fopen(path, "r");
    require(f != NULL, "%s: cannot be opened: %s", path, strerror(errno));
    char* text = NULL;
    size_t capacity = 0, number = 0;
    for (ssize_t n; (n = getline(&text, &capacity, f)) > 0; ) {
        json_error_t error;
        json_t* line = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &error);
        number++;
        require(json_is_object(line), "%s: line %zu is not a JSON object: %s", path, number, line ? "something else" : error.text);
        if (json_object_get(line, "step") == NULL) { json_decref(line); continue; }
        m.lines = (json_t**)xrealloc(m.lines, (m.count + 1) * sizeof(json_t*));
        m.lines[m.count++] = line;
    }
    require(!ferror(f), "%s: cannot be read: %s", path, strerror(errno));
    require(m.count > 0, "%s: has no line about a step", path);
    free(text);
    fclose(f);
    return m;
}

static void metrics_free(Metrics* m) {
    for (size_t i = 0; i < m->count; i++) json_decref(m->lines[i]);
    free(m->lines);
}

// Compares one field of one step: a is its value in A; b is NULL if B lacks it.
static void compare_field(Comparison* c, const char* field, size_t step, const json_t* a, const json_t* b, const char* path_b) {
    require(b != NULL, "%s: step %zu has no %s", path_b, step, field);
    if (c->bits && json_is_null(a) && json_is_null(b)) c->compared++;
    else compare_numbers(c, field, step, json_is_number(a) ? json_number_value(a) : NAN, json_is_number(b) ? json_number_value(b) : NAN);
}

static int compare_metrics(Comparison* c, const char* path_a, const char* path_b) {
    static const char* const fields[] = { "loss", "grad_norm", "param_norm", "lr", "loss_scale", "tokens", "val_loss" };
    Metrics a = metrics_read(path_a), b = metrics_read(path_b);
    for (size_t i = 0; i < a.count && i < b.count; i++) {
        json_int_t step = json_integer_value(json_object_get(a.lines[i], "step")), other = json_integer_value(json_object_get(b.lines[i], "step"));
        require(step == other, "where %s has step %lld, %s has step %lld", path_a, (long long)step, path_b, (long long)other);
        for (size_t k = 0; k < sizeof fields / sizeof fields[0]; k++) {
            const json_t* value = json_object_get(a.lines[i], fields[k]);
            if (value == NULL || (c->only[0] && strcmp(c->only, fields[k]) != 0)) continue;
            compare_field(c, fields[k], (size_t)step, value, json_object_get(b.lines[i], fields[k]), path_b);
        }
    }
    require(a.count == b.count, "%s has %zu lines about steps, %s has %zu", path_a, a.count, path_b, b.count);
    metrics_free(&a);
    metrics_free(&b);
    return comparison_report(c, path_a, path_b);
}

static int show_field(const char* path, const char* field) {
    Metrics m = metrics_read(path);
    for (size_t i = 0; i < m.count; i++) {
        json_t* value = json_object_get(m.lines[i], field);
        if (value == NULL) continue; // a line of an evaluation has no loss, a line of a step no val_loss
        char* text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
        printf("%lld %s\n", (long long)json_integer_value(json_object_get(m.lines[i], "step")), text);
        free(text);
    }
    metrics_free(&m);
    return EXIT_SUCCESS;
}

// ---- safetensors ----

static void compare_tensors(Comparison* c, const SafeTensors* a, const SafeTensor* ta, const SafeTensors* b, const SafeTensor* tb) {
    bool same_shape = ta->rank == tb->rank && memcmp(ta->shape, tb->shape, sizeof ta->shape) == 0;
    require(same_shape, "tensor '%s' has another shape in %s than in %s", ta->name, a->source.path, b->source.path);
    float *x = (float*)xcalloc(ta->elements, sizeof(float)), *y = (float*)xcalloc(ta->elements, sizeof(float));
    safetensors_read(a, ta, 0, ta->elements, x, DTYPE_F32);
    safetensors_read(b, tb, 0, tb->elements, y, DTYPE_F32);
    for (size_t i = 0; i < ta->elements; i++) compare_numbers(c, ta->name, i, x[i], y[i]);
    free(x);
    free(y);
}

static int compare_weights(Comparison* c, const char* path_a, const char* path_b) {
    SafeTensors a, b;
    safetensors_open(&a, path_a, "give a safetensors file");
    safetensors_open(&b, path_b, "give a safetensors file");
    for (int i = 0; i < b.count; i++)
        require(safetensors_find(&a, b.tensors[i].name) != NULL, "%s has no tensor '%s', %s has one", path_a, b.tensors[i].name, path_b);
    for (int i = 0; i < a.count; i++) {
        const SafeTensor* t = safetensors_find(&b, a.tensors[i].name);
        require(t != NULL, "%s has no tensor '%s', %s has one", path_b, a.tensors[i].name, path_a);
        compare_tensors(c, &a, &a.tensors[i], &b, t);
    }
    int status = comparison_report(c, path_a, path_b);
    safetensors_close(&a);
    safetensors_close(&b);
    return status;
}

int main(int argc, char** argv) {
    Comparison c;
    memset(&c, 0, sizeof c);
    c.only = "";
    OptionTable table = options_table("compare_run metrics|weights A B", "compare two runs");
    option_float(&table, "rtol", &c.rtol, 0, 1, "largest deviation relative to A's number");
    option_float(&table, "atol", &c.atol, 0, 1, "largest absolute deviation");
    option_flag(&table, "bits", &c.bits, "no deviation at all");
    option_text(&table, "only", &c.only, "FIELD", "the one field of metrics to compare; '': all that A has");
    require(argc >= 4, "usage: compare_run metrics|weights A B [--bits | --rtol X --atol X], or compare_run show A FIELD");
    options_parse(&table, argc - 3, argv + 3);
    if (strcmp(argv[1], "show") == 0) return show_field(argv[2], argv[3]);
    require(c.bits != (c.rtol > 0 || c.atol > 0), "give either --bits or --rtol and --atol");
    if (strcmp(argv[1], "metrics") == 0) return compare_metrics(&c, argv[2], argv[3]);
    require(strcmp(argv[1], "weights") == 0, "the first argument must be metrics, weights or show, not '%s'", argv[1]);
    return compare_weights(&c, argv[2], argv[3]);
}
