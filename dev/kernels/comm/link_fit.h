/*
link_fit.h - latency and bandwidth from the times of a sweep over sizes: the line t = alpha + beta S, where an operation takes t
seconds and its larger buffer has S bytes.

A smaller message takes no longer than a larger one. Where it did, other work held the machine up, so its time counts as that of the
fastest larger size. Without this, one pause of a few milliseconds among small messages would tilt the line.

The line has the least sum of squared relative errors. With absolute errors only the largest sizes would decide, and alpha would be
their noise. In units of 1/t each point says 1 = alpha/t + beta S/t. The line is never faster than the fastest point (beta >= the
least t/S), because a bandwidth that nobody has measured is an artifact of the fit, and alpha is never negative.
*/
#ifndef LINK_FIT_H
#define LINK_FIT_H
#include "../../../llmc/base/common.h"

// All zero at first; fit_free() frees the points.
typedef struct { double bytes, seconds; } FitPoint;
typedef struct { FitPoint* points; size_t n; } Fit;

// Adds a size, which is at least as large as the last.
static inline void fit_add(Fit* f, double bytes, double seconds) {
    f->points = (FitPoint*)with_room(f->points, f->n, sizeof(FitPoint));
    for (size_t i = f->n; i > 0 && f->points[i - 1].seconds > seconds; i--) f->points[i - 1].seconds = seconds;
    f->points[f->n++] = (FitPoint){ bytes, seconds };
}
static inline void fit_free(Fit* f) { free(f->points); }

// Sets alpha (seconds) and beta (seconds per byte). Returns false if there is no such line: a single size, or times that do not rise.
static inline bool fit_solve(const Fit* f, double* alpha, double* beta) {
    double sum_a = 0, sum_aa = 0, sum_s = 0, sum_ss = 0, sum_as = 0, fastest = 0; // of a = 1/t and s = S/t
    for (size_t i = 0; i < f->n; i++) {
        double a = 1 / f->points[i].seconds, s = f->points[i].bytes * a;
        sum_a += a; sum_aa += a * a;
        sum_s += s; sum_ss += s * s;
        sum_as += a * s;
        fastest = fmax(fastest, s);
    }
    double determinant = sum_aa * sum_ss - sum_as * sum_as;
    if (f->n < 2 || f->points[0].seconds == f->points[f->n - 1].seconds || !(determinant > 1e-12 * sum_aa * sum_ss)) return false;
    *alpha = (sum_a * sum_ss - sum_s * sum_as) / determinant;
    *beta = (sum_s * sum_aa - sum_a * sum_as) / determinant;
    if (*alpha < 0) { // the best line through 0, which is never faster than the fastest point
        *alpha = 0;
        *beta = sum_s / sum_ss;
    } else if (*beta < 1 / fastest) {
        *beta = 1 / fastest;
        *alpha = fmax(0, (sum_a - *beta * sum_as) / sum_aa);
    }
    return true;
}
#endif
