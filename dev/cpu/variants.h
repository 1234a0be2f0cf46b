/*
variants.h - what the files of this folder share, each of which is one layer of the CPU written in several ways, from naive to
llmc/'s. dev/cuda/variants.cuh is the same for the kernels of a GPU.

Such a file has a struct Problem (the arrays of one shape), a function that makes it, functions of one signature, and a table of
them, whose last is llmc/'s own. run_variants() computes each, holds it against the formula as it is printed, in double, which
the file computes too, and times it. What it is judged by, the rate of a copy or of a large product by oneDNN, is measured in
the same run.

Global state: the outputs of the one problem that there is, and what memory it has.
*/
#ifndef DEV_CPU_VARIANTS_H
#define DEV_CPU_VARIANTS_H
#include "../../llmc/layers.h"
#include "../../llmc/rng.h"
_Static_assert(sizeof(floatX) == sizeof(float), "these variants are in fp32: make PRECISION=fp32");

typedef struct { int rows, cols, depth; } Shape; // depth: of a sum, where that is a size of its own, else 0
typedef struct Problem Problem;                  // each file's own

typedef struct {
    const char *name, *idea;
    void (*run)(Problem* p);
    double roundings; // what its results may be off by: see worst_error()
} Variant;

typedef struct {
    const char *name, *shape_means;
    Shape usual, small; // small: with --check
    bool is_arithmetic; // judged by a product, not by a copy
    double (*work)(const Problem* p);        // operations, or bytes that must be moved once
    void (*make)(Problem* p, Shape s);       // arrays, inputs, and what outputs must become
    const Variant* variants;                 // the last one is llmc/'s
    int count;
} Operation;

// ---- memory and outputs ----
typedef struct { const char* what; float* x; double* want; size_t n; } Output; // x and want (n)
static Output outputs[4];
static void* allocated[16]; // owned
static int output_count, allocated_count;

static void* allocate(size_t bytes) {
    require(allocated_count < 16, "variants.h keeps 16 arrays at most");
    return allocated[allocated_count++] = device_alloc(bytes, MEMORY_ACTIVATIONS);
}
static float* floats(size_t n) { return (float*)allocate(n * sizeof(float)); }
// n numbers from N(mean, std)
static float* random_floats(size_t n, float mean, float std) {
    float* x = floats(n);
    uint64_t stream = (uint64_t)allocated_count;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = mean + std * random_normal(42, stream, i);
    return x;
}
// An array that variants write; the file fills in `want`, which has as many.
static Output* output(const char* what, size_t n) {
    require(output_count < 4, "variants.h keeps 4 outputs at most");
    Output* o = &outputs[output_count++];
    *o = (Output){ what, floats(n), (double*)allocate(n * sizeof(double)), n };
    return o;
}
static void free_all(void) {
    while (allocated_count > 0) device_free(allocated[--allocated_count]);
    output_count = 0;
}

// ---- check ----
// The largest difference of an output from what it should be, in roundings (half a unit in the last place of fp32) of that
// output's largest number. Infinity for a NaN.
static double worst_error(const Output* o, size_t* at) {
    double largest = 0, worst = 0;
    for (size_t i = 0; i < o->n; i++) largest = fmax(largest, fabs(o->want[i]));
    *at = 0;
    for (size_t i = 0; i < o->n && worst < INFINITY; i++) {
        double off = fabs((double)o->x[i] - o->want[i]) * 16777216.0 / largest;
        if (off <= worst) continue; // not so for a NaN
        worst = isnan(off) ? INFINITY : off;
        *at = i;
    }
    return worst;
}
// Runs the variant on outputs full of NaN, so that what is not written shows. Returns its error, the worst of all outputs.
static double error_of(const Variant* v, Problem* p) {
    double worst = 0;
    for (int k = 0; k < output_count; k++)
        for (size_t i = 0; i < outputs[k].n; i++) outputs[k].x[i] = NAN;
    v->run(p);
    for (int k = 0; k < output_count; k++) {
        const Output* o = &outputs[k];
        size_t at;
        double error = worst_error(o, &at);
        if (error > v->roundings)
            printf("# %s: %s: element %zu of %zu is %.9g, not %.9g\n", v->name, o->what, at, o->n, (double)o->x[at], o->want[at]);
        worst = fmax(worst, error);
    }
    return worst;
}

// ---- time ----
static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}
// The median of so many calls, after one that warms up; of fewer, but three, once they have taken two seconds together.
static double median_seconds(void (*run)(Problem*), Problem* p, int repetitions) {
    double* seconds = (double*)xcalloc((size_t)repetitions, sizeof(double));
    double sum = 0;
    int n = 0;
    run(p);
    while (n < repetitions && (n < 3 || sum < 2)) {
        double begin = now_seconds();
        run(p);
        seconds[n] = now_seconds() - begin;
        sum += seconds[n++];
    }
    qsort(seconds, (size_t)n, sizeof(double), compare_doubles);
    double median = seconds[n / 2];
    free(seconds);
    return median;
}

// ---- what this machine can do ----
static struct { float *a, *b, *c; size_t n; } peak_arrays; // (n) each, c only for a product
static void peak_product(Problem* p) {
    const int n = 2048;
    (void)p;
    matmul_forward(peak_arrays.c, peak_arrays.a, peak_arrays.b, NULL, n, n, n);
}
// The library's copy knows how to write memory without reading it first; but only one thread knows of each call.
static void peak_copy(Problem* p) {
    const size_t piece = 1 << 18;
    (void)p;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < peak_arrays.n; i += piece)
        memcpy(peak_arrays.b + i, peak_arrays.a + i, size_min(piece, peak_arrays.n - i) * sizeof(float));
}
static void peak_update(Problem* p) {
    (void)p;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < peak_arrays.n; i++) peak_arrays.b[i] += peak_arrays.a[i];
}
// FLOP/s of a large product, or bytes/s, read and written, of a copy or an update in place, whichever is faster.
static double peak_rate(bool is_arithmetic, int repetitions) {
    const int n = 2048;
    peak_arrays.n = is_arithmetic ? (size_t)n * n : 1 << 25; // 128 MB: more than caches hold
    int count = is_arithmetic ? 3 : 2;
    float** arrays[3] = { &peak_arrays.a, &peak_arrays.b, &peak_arrays.c };
    for (int i = 0; i < count; i++) {
        *arrays[i] = (float*)device_alloc(peak_arrays.n * sizeof(float), MEMORY_ACTIVATIONS);
        for (size_t k = 0; k < peak_arrays.n; k++) (*arrays[i])[k] = (float)(k % 7);
    }
    double rate = is_arithmetic ? 2.0 * n * n * n / median_seconds(peak_product, NULL, repetitions)
                : fmax(8.0 * (double)peak_arrays.n / median_seconds(peak_copy, NULL, repetitions),
                       12.0 * (double)peak_arrays.n / median_seconds(peak_update, NULL, repetitions));
    for (int i = 0; i < count; i++) device_free(*arrays[i]);
    return rate;
}

// ---- the command line ----
typedef struct { Shape shape; const char* wanted; int repetitions, threads; bool check_only; } VariantOptions;

static int positive_number(const char* option, const char* text) {
    char* end;
    long n = strtol(text, &end, 10);
    require(*text != 0 && *end == 0 && n > 0 && n <= INT32_MAX / 4, "%s must be a number from 1 to %d, not '%s'",
            option, INT32_MAX / 4, text);
    return (int)n;
}
static const char* shape_text(Shape s) {
    static char text[2][48]; // two calls in one printf
    static int next;
    char* t = text[next++ % 2];
    int n = snprintf(t, sizeof text[0], "%d x %d", s.rows, s.cols);
    if (s.depth > 0) snprintf(t + n, sizeof text[0] - (size_t)n, " x %d", s.depth);
    return t;
}
static void print_help(const char* program, const Operation* op) {
    bool deep = op->usual.depth > 0;
    printf("usage: %s [--rows N] [--cols N]%s [--variant NAME] [--repetitions N] [--threads N] [--check]\n\n"
           "--rows, --cols%s   the shape: %s; %s if not given, with --check %s\n"
           "--variant        only variants with this in their name\n"
           "--repetitions    timed calls, of which the median counts (15; fewer, but three, once they have taken two seconds)\n"
           "--threads        as OMP_NUM_THREADS, which counts if this is not given; else all cores\n"
           "--check          only look whether results are right, and take no times\n",
           program, deep ? " [--depth N]" : "", deep ? ", --depth" : "", op->shape_means, shape_text(op->usual),
           shape_text(op->small));
}
static VariantOptions parse_variant_options(int argc, char** argv, const Operation* op) {
    VariantOptions o = { { 0, 0, 0 }, "", 15, 0, false };
    for (int i = 1; i < argc; i++) {
        const char* option = argv[i];
        if (strcmp(option, "--help") == 0) { print_help(argv[0], op); exit(0); }
        if (strcmp(option, "--check") == 0) { o.check_only = true; continue; }
        int* number = strcmp(option, "--rows") == 0 ? &o.shape.rows
                    : strcmp(option, "--cols") == 0 ? &o.shape.cols
                    : strcmp(option, "--depth") == 0 && op->usual.depth > 0 ? &o.shape.depth
                    : strcmp(option, "--repetitions") == 0 ? &o.repetitions
                    : strcmp(option, "--threads") == 0 ? &o.threads : NULL;
        bool is_name = strcmp(option, "--variant") == 0;
        require(number != NULL || is_name, "there is no option '%s'; --help lists them", option);
        require(++i < argc, "%s needs a value; --help lists the options", option);
        if (is_name) o.wanted = argv[i];
        else *number = positive_number(option, argv[i]);
    }
    Shape given = o.shape;
    o.shape = o.check_only ? op->small : op->usual;
    if (given.rows > 0) o.shape.rows = given.rows;
    if (given.cols > 0) o.shape.cols = given.cols;
    if (given.depth > 0) o.shape.depth = given.depth;
    require(o.threads <= omp_get_num_procs(), "--threads %d are more than this machine's %d", o.threads, omp_get_num_procs());
    return o;
}

// ---- the table ----
// One variant: its row, and whether it was right. llmc_seconds: the last variant's time.
static bool variant_row(const Variant* v, Problem* p, const Operation* op, VariantOptions o, double peak, double llmc_seconds) {
    double error = error_of(v, p);
    bool right = error <= v->roundings;
    printf("| %s | %s | %s | %.3g |", v->name, v->idea, right ? "right" : "WRONG", error);
    if (!o.check_only && right) {
        bool is_llmc = v == &op->variants[op->count - 1];
        double seconds = is_llmc ? llmc_seconds : median_seconds(v->run, p, o.repetitions), rate = op->work(p) / seconds;
        printf(" %.3f | %.4g | %.0f %% | %.2f |", 1e3 * seconds, 1e-9 * rate, 100 * rate / peak, seconds / llmc_seconds);
    } else if (!o.check_only) printf(" | | | |");
    printf("\n");
    fflush(stdout);
    return right;
}
// main() of an operation
static int run_variants(int argc, char** argv, const Operation* op, Problem* p) {
    VariantOptions o = parse_variant_options(argc, argv, op);
    device_init(0, 1);
    if (o.threads > 0) omp_set_num_threads(o.threads);
    op->make(p, o.shape);
    const char* unit = op->is_arithmetic ? "GFLOP" : "GB";
    double peak = 0, llmc_seconds = 0;
    printf("%s, fp32, %s (%s), %.3g %s, %d threads\n", op->name, shape_text(o.shape), op->shape_means, 1e-9 * op->work(p), unit,
           omp_get_max_threads());
    if (!o.check_only) {
        peak = peak_rate(op->is_arithmetic, o.repetitions);
        const char* peak_is = op->is_arithmetic ? "a large product by oneDNN" : "a copy";
        printf("peak measured here: %s, %.4g %s/s\n", peak_is, 1e-9 * peak, unit);
        llmc_seconds = median_seconds(op->variants[op->count - 1].run, p, o.repetitions);
    }
    printf("\n| variant | idea | result | error |");
    if (!o.check_only) printf(" ms | %s/s | of the peak | times llmc's |", unit);
    printf("\n|---|---|---|---|%s\n", o.check_only ? "" : "---|---|---|---|");
    int tried = 0, wrong = 0;
    for (int i = 0; i < op->count; i++) {
        if (strstr(op->variants[i].name, o.wanted) == NULL) continue;
        tried++;
        wrong += !variant_row(&op->variants[i], p, op, o, peak, llmc_seconds);
    }
    require(tried > 0, "no variant has '%s' in its name", o.wanted);
    layers_free();
    free_all();
    device_shutdown();
    return wrong > 0;
}
#define COUNT(table) (int)(sizeof(table) / sizeof((table)[0]))
#endif
