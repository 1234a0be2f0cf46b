/*
variants.h - what the files of this folder share. Each of them is one layer of the CPU written in several ways, from naive to
llmc/'s. dev/kernels/cuda/variants.cuh is the same for the kernels of a GPU.

Such a file has a struct Problem (the arrays of one shape), a function that makes it, a VARIANT for each way, of which the last
is llmc/'s own, and OPERATION, which is its main(): it runs each, compares it with the formula as it is printed, which the file
computes in double, and times it. The rate that it is compared with, that of a copy or of a large product by oneDNN, is measured
in the same run.

Global state: the variants, the outputs and the memory of the one problem, and what is needed to measure the peak.
*/
#ifndef DEV_CPU_VARIANTS_H
#define DEV_CPU_VARIANTS_H
#include "../../../llmc/device/layers.h"
#include "../../../llmc/base/rng.h"
#include "../others.h"
#include "../variant_options.h"
_Static_assert(sizeof(floatX) == sizeof(float), "these variants are in fp32: make PRECISION=fp32");

typedef struct Problem Problem;                  // each file's own

typedef struct {
    const char *name, *idea;
    void (*run)(Problem* p);
    double roundings; // what its results may be off by: see worst_error()
} Variant;
static Variant variants[8]; // the last one is llmc/'s
static int variant_count;
// VARIANT(gelu_5_mine, "the idea", 8) { ... } is a function of Problem* p. The compiler may call constructors in any order.
#define VARIANT(name, idea, roundings) \
    static void name(Problem* p); \
    __attribute__((constructor)) static void add_##name(void) { \
        variants[__COUNTER__] = (Variant){ #name, idea, name, roundings }; \
        variant_count++; \
    } \
    static void name(Problem* p)

typedef struct {
    const char *name, *shape_means;
    Shape usual, small; // small: with --check
    bool is_arithmetic; // compared with a product, not with a copy
    double (*work)(const Problem* p);        // operations, or bytes that must be moved once
    void (*make)(Problem* p, Shape s);       // arrays, inputs, and what outputs must become
} Operation;

// ---- memory and outputs ----
// before: what x holds before a variant adds to it; NULL: nothing (NaN). before, x and want (n)
typedef struct { const char* what; const float* before; float* x; double* want; size_t n; } Output;
static Output outputs[4];
static void* allocated[20]; // owned
static int output_count, allocated_count;

static void* allocate(size_t bytes) {
    invariant(allocated_count < 20, "variants.h keeps 20 arrays at most");
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
// Makes an array x that variants write. The file fills in `want` (n).
static Output* output(const char* what, float** x, size_t n) {
    invariant(output_count < 4, "variants.h keeps 4 outputs at most");
    Output* o = &outputs[output_count++];
    *x = floats(n);
    *o = (Output){ what, NULL, *x, (double*)allocate(n * sizeof(double)), n };
    return o;
}
// Makes an array that variants add to: x begins as `before`, n numbers from N(0,1), and so does `want`.
static inline Output* output_added_to(const char* what, float** x, size_t n) {
    Output* o = output(what, x, n);
    o->before = random_floats(n, 0, 1);
    for (size_t i = 0; i < n; i++) o->want[i] = (double)o->before[i];
    return o;
}
static void free_all(void) {
    while (allocated_count > 0) device_free(allocated[--allocated_count]);
    output_count = 0;
}

// ---- loops along memory: vectors; for the formula in double ----
static inline float dot(const float* x, const float* y, int n) {
    float sum = 0;
    #pragma omp simd reduction(+:sum)
    for (int i = 0; i < n; i++) sum = fused_multiply_add(x[i], y[i], sum);
    return sum;
}
static inline double dot_in_double(const float* x, const float* y, int n) {
    double sum = 0;
    #pragma omp simd reduction(+:sum)
    for (int i = 0; i < n; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}
// x (n) += factor y (n)
static inline void add_scaled(float* x, float factor, const float* y, int n) {
    #pragma omp simd
    for (int i = 0; i < n; i++) x[i] = fused_multiply_add(factor, y[i], x[i]);
}
static inline void add_scaled_in_double(double* x, double factor, const float* y, int n) {
    #pragma omp simd
    for (int i = 0; i < n; i++) x[i] += factor * (double)y[i];
}
// x (n) += each of `copies` (count,n), in their order: the sums that threads have formed for themselves
static inline void add_up(float* x, const float* copies, int count, size_t n) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < count; k++) x[i] += copies[(size_t)k * n + i];
}

// ---- check ----
// The largest difference of an output from what it should be, in roundings (half a unit in the last place of fp32) of that
// output's largest number. Infinity for a NaN. *first: the first element that is off by more than `allowed`, if any.
static double worst_error(const Output* o, double allowed, size_t* first) {
    double largest = 0, worst = 0;
    for (size_t i = 0; i < o->n; i++) largest = fmax(largest, fabs(o->want[i]));
    *first = o->n;
    for (size_t i = 0; i < o->n && worst < INFINITY; i++) {
        double off = fabs((double)o->x[i] - o->want[i]) * 16777216.0 / largest;
        if (off <= worst) continue; // not so for a NaN
        worst = isnan(off) ? INFINITY : off;
        if (worst > allowed && *first == o->n) *first = i;
    }
    return worst;
}
// Runs the variant on outputs full of NaN, so that what is not written shows, or of what it adds to. Returns its error, the worst
// of all outputs.
static double error_of(const Variant* v, Problem* p) {
    double worst = 0;
    for (int k = 0; k < output_count; k++)
        for (size_t i = 0; i < outputs[k].n; i++) outputs[k].x[i] = outputs[k].before != NULL ? outputs[k].before[i] : NAN;
    v->run(p);
    for (int k = 0; k < output_count; k++) {
        const Output* o = &outputs[k];
        size_t at;
        double error = worst_error(o, v->roundings, &at);
        if (error > v->roundings)
            printf("# %s: %s: element %zu of %zu is %.9g, not %.9g\n", v->name, o->what, at, o->n, (double)o->x[at], o->want[at]);
        worst = fmax(worst, error);
    }
    return worst;
}

// ---- what this machine can do ----
static struct {
    float *a, *b, *c;      // (n) each; c only for a product
    size_t n;
    double work;           // operations or bytes of a call
    void (*run)(Problem*); // one of these three:
} peak;

static void peak_product(Problem* p) {
    (void)p;
    int n = (int)sqrt((double)peak.n);
    matmul_forward(peak.c, peak.a, peak.b, NULL, n, n, n);
}
// The library's copy can write memory without reading it first, but each call uses only one thread.
static void peak_copy(Problem* p) {
    const size_t piece = 1 << 18;
    (void)p;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < peak.n; i += piece) memcpy(peak.b + i, peak.a + i, size_min(piece, peak.n - i) * sizeof(float));
}
static void peak_update(Problem* p) {
    (void)p;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < peak.n; i++) peak.b[i] += peak.a[i];
}

// ---- time ----
static double seconds_of(void (*run)(Problem*), Problem* p) {
    double begin = now_seconds();
    run(p);
    return now_seconds() - begin;
}
static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}
static double median(double* x, int n) {
    qsort(x, (size_t)n, sizeof(double), compare_doubles);
    return x[n / 2];
}
// Median seconds of a variant, of llmc/'s and of the peak's call, over so many calls each, or over fewer, but at least three,
// once the variant's have taken two seconds together. They take turns, because the speed of a shared machine changes from second
// to second. The peak's call comes before each of the others, so that neither finds its arrays in the nearest caches.
typedef struct { double variant, llmc, peak; } Medians;
static Medians median_seconds(void (*variant)(Problem*), void (*llmc)(Problem*), Problem* p, int repetitions) {
    double* of_variant = (double*)xcalloc(3 * (size_t)repetitions, sizeof(double));
    double *of_llmc = of_variant + repetitions, *of_peak = of_llmc + repetitions, sum = 0;
    int n = 0;
    variant(p); // warms up
    for (; n < repetitions && (n < 3 || sum < 2); n++) {
        of_peak[n] = seconds_of(peak.run, p);
        sum += of_variant[n] = seconds_of(variant, p);
        peak.run(p);
        of_llmc[n] = seconds_of(llmc, p);
    }
    Medians m = { median(of_variant, n), median(of_llmc, n), median(of_peak, n) };
    free(of_variant);
    return m;
}

// ---- the peak is a product, or whichever of the other two moves more bytes in a second ----
static void peak_init(bool is_arithmetic) {
    const int side = 1536;
    peak.n = is_arithmetic ? (size_t)side * side : 1 << 25; // 128 MB: more than caches hold
    peak.a = floats(peak.n);
    peak.b = floats(peak.n);
    peak.c = is_arithmetic ? floats(peak.n) : NULL;
    for (size_t i = 0; i < peak.n; i++) peak.a[i] = peak.b[i] = (float)(i % 7);
    peak.run = is_arithmetic ? peak_product : peak_copy;
    peak.work = is_arithmetic ? 2.0 * side * side * side : 8.0 * (double)peak.n;
    if (is_arithmetic) return;
    Medians m = median_seconds(peak_update, peak_copy, NULL, 3);
    if (12 / m.variant < 8 / m.llmc) return;
    peak.run = peak_update;
    peak.work = 12.0 * (double)peak.n;
}

// ---- the table ----
// seconds: 0 of a variant that is wrong, and with --check
typedef struct { const Variant* variant; double error; Medians seconds; } Result;

// Rows compare two variants by their milliseconds, and by their ratios to llmc/'s. Both contradict each other if llmc/'s variant took
// longer beside one variant than beside another. Says so, and returns false, if it took a quarter longer.
static bool ratios_agree(const Result* results, int n) {
    const Result *least = NULL, *most = NULL;
    for (const Result* r = results; r < results + n; r++) {
        if (r->seconds.llmc <= 0) continue;
        if (least == NULL || r->seconds.llmc < least->seconds.llmc) least = r;
        if (most == NULL || r->seconds.llmc > most->seconds.llmc) most = r;
    }
    if (least == NULL || most->seconds.llmc <= 1.25 * least->seconds.llmc) return true;
    printf("\nNo ratios are shown, because they contradict each other: llmc's variant took %.3f ms in turns with %s, and %.3f ms"
           " with %s. Try again when the cores are idle.\n", 1e3 * least->seconds.llmc, least->variant->name,
           1e3 * most->seconds.llmc, most->variant->name);
    return false;
}
static void print_row(const Result* r, Problem* p, const Operation* op, bool timed, bool with_ratios) {
    bool right = r->error <= r->variant->roundings;
    printf("| %s | %s | %s | %.3g |", r->variant->name, r->variant->idea, right ? "right" : "WRONG", r->error);
    if (r->seconds.variant > 0) {
        double rate = op->work(p) / r->seconds.variant, of_peak = rate / (peak.work / r->seconds.peak);
        printf(" %.3f | %.4g |", 1e3 * r->seconds.variant, 1e-9 * rate);
        if (with_ratios) printf(" %.0f %% | %.2f |", 100 * of_peak, r->seconds.variant / r->seconds.llmc);
        else printf(" | |");
    } else if (timed) printf(" | | | |");
    printf("\n");
}
static int run_variants(int argc, char** argv, const Operation* op, Problem* p) {
    int procs = omp_get_num_procs();
    VariantOptions o = parse_variant_options(argc, argv, op->name, op->shape_means, op->usual, op->small, 11, procs);
    device_init(0, 1);
    if (o.threads > 0) omp_set_num_threads((int)o.threads);
    op->make(p, o.shape);
    const char* unit = op->is_arithmetic ? "GFLOP" : "GB";
    printf("%s, fp32, %s (%s), %.3g %s, %d threads\n", op->name, shape_text(o.shape), op->shape_means, 1e-9 * op->work(p), unit,
           omp_get_max_threads());
    if (!o.check_only) {
        peak_init(op->is_arithmetic);
        printf("the peak, in turns with each variant: %s\n", peak.run == peak_product ? "a large product by oneDNN"
               : peak.run == peak_copy ? "a copy" : "an update of an array in place");
    }
    fflush(stdout);
    Result results[8];
    int tried = 0, wrong = 0;
    CoreSeconds begin = core_seconds();
    const Variant* llmc = variants + variant_count - 1;
    for (const Variant* v = variants; v <= llmc; v++) {
        if (strstr(v->name, o.wanted) == NULL) continue;
        Result* r = &results[tried++];
        *r = (Result){ v, error_of(v, p), { 0, 0, 0 } };
        wrong += r->error > v->roundings;
        bool right = r->error <= v->roundings;
        if (right && !o.check_only) r->seconds = median_seconds(v->run, llmc->run, p, (int)o.repetitions);
    }
    require(tried > 0, "no variant has '%s' in its name", o.wanted);
    bool with_ratios = ratios_agree(results, tried);
    printf("\n| variant | idea | result | error |");
    if (!o.check_only) printf(" ms | %s/s | of the peak | times llmc's |", unit);
    printf("\n|---|---|---|---|%s\n", o.check_only ? "" : "---|---|---|---|");
    for (const Result* r = results; r < results + tried; r++) print_row(r, p, op, !o.check_only, with_ratios);
    const Result* last = &results[tried - 1];
    double itself = last->variant == llmc && last->seconds.llmc > 0 ? last->seconds.variant / last->seconds.llmc : 1;
    if (itself < 0.9 || itself > 1.1)
        printf("\nDo not trust these times: llmc's variant took %.2f times as long as itself. Other programs are using the"
               " cores; try again when they are idle.\n", itself);
    if (!o.check_only) say_if_others_ran(begin);
    layers_free();
    free_all();
    device_shutdown();
    return wrong > 0;
}
// main(), from the fields of the file's Operation up to is_arithmetic.
#define OPERATION(...) \
    int main(int argc, char** argv) { \
        Problem p; \
        const Operation op = { __VA_ARGS__, work, make }; \
        return run_variants(argc, argv, &op, &p); \
    }
#endif
