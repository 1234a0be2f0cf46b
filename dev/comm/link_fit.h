/*
link_fit.h - latency and bandwidth from the times of a sweep over sizes: the line t = alpha + beta S, where an operation takes t
seconds and its larger buffer has S bytes.

The line has the least sum of squared relative errors. With absolute errors only the largest sizes would decide, and alpha would be
their noise. In units of 1/t each point says 1 = alpha/t + beta S/t. The line is never faster than the fastest point (beta >= the
least t/S), because a bandwidth that nobody has measured is an artifact of the fit, and alpha is never negative.
*/
#ifndef LINK_FIT_H
#define LINK_FIT_H
#include "../../llmc/base/common.h"

// Sums: of 1, 1/t, 1/t^2, S/t, (S/t)^2, S/t^2; and the largest S/t. All zero at first.
typedef struct { double n, a, aa, s, ss, as, fastest; } Fit;
static inline void fit_add(Fit* f, double bytes, double seconds) {
    double a = 1 / seconds, s = bytes / seconds;
    f->n++;
    f->a += a; f->aa += a * a;
    f->s += s; f->ss += s * s;
    f->as += a * s;
    f->fastest = fmax(f->fastest, s);
}
// Sets alpha (seconds) and beta (seconds per byte). Returns false if there is no such line: a single size, or larger sizes that took
// no longer.
static inline bool fit_solve(const Fit* f, double* alpha, double* beta) {
    double determinant = f->aa * f->ss - f->as * f->as;
    if (f->n < 2 || !(determinant > 1e-12 * f->aa * f->ss)) return false;
    *alpha = (f->a * f->ss - f->s * f->as) / determinant;
    *beta = (f->s * f->aa - f->a * f->as) / determinant;
    if (*beta <= 0) return false;
    if (*alpha < 0) { // the best line through 0, which is never faster than the fastest point
        *alpha = 0;
        *beta = f->s / f->ss;
    } else if (*beta < 1 / f->fastest) {
        *beta = 1 / f->fastest;
        *alpha = fmax(0, (f->a - *beta * f->as) / f->aa);
    }
    return true;
}
#endif
