/* variant_options.h - the command line of dev/kernels/cpu's and dev/kernels/cuda's programs, which have one operation each, in several variants. */
#ifndef DEV_VARIANT_OPTIONS_H
#define DEV_VARIANT_OPTIONS_H
#include "../../llmc/base/options.h"

typedef struct { int rows, cols, depth; } Shape; // depth: of a sum, where that is a size of its own, else 0
typedef struct { Shape shape; const char* wanted; long long repetitions, threads; int check_only; } VariantOptions;

static const char* shape_text(Shape s) {
    static char text[48];
    int n = snprintf(text, sizeof text, "%d x %d", s.rows, s.cols);
    if (s.depth > 0) snprintf(text + n, sizeof text - (size_t)n, " x %d", s.depth);
    return text;
}
// The shape is `usual`; `small` with --check. The CPU's programs have that option, and --threads up to `threads`; 0: neither.
static VariantOptions parse_variant_options(int argc, char** argv, const char* name, const char* shape_means, Shape usual,
                                            Shape small, int repetitions, int threads) {
    const double most = INT32_MAX / 4;
    VariantOptions o = { usual, "", repetitions, 0, 0 };
    long long rows = usual.rows, cols = usual.cols, depth = usual.depth;
    OptionTable t = options_table(name, "an operation in several variants, checked and timed");
    option_int(&t, "rows", &rows, 1, most, shape_means);
    option_int(&t, "cols", &cols, 1, most, "");
    if (depth > 0) option_int(&t, "depth", &depth, 1, most, "");
    option_text(&t, "variant", &o.wanted, "NAME", "only variants with this in their name");
    option_int(&t, "repetitions", &o.repetitions, 1, most, "timed calls, of which the median counts; fewer if they take long");
    if (threads > 0) {
        option_int(&t, "threads", &o.threads, 1, threads, "how many; OMP_NUM_THREADS if not given, else all cores");
        option_flag(&t, "check", &o.check_only, "only check whether results are right, in a small shape, and take no times");
    }
    options_parse(&t, argc, argv);
    Shape otherwise = o.check_only ? small : usual;
    o.shape.rows = option_given(&t, "rows") ? (int)rows : otherwise.rows;
    o.shape.cols = option_given(&t, "cols") ? (int)cols : otherwise.cols;
    if (depth > 0) o.shape.depth = option_given(&t, "depth") ? (int)depth : otherwise.depth;
    return o;
}
#endif
