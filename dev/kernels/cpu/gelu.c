/*
gelu.c - GELU in its tanh form, in several ways: act (N,C) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3).

One number is read and one is written, and between them lies a function that the processor has no instruction for. A call of the
C library computes it for one element at a time. Arithmetic without branches computes it for as many elements as a vector holds,
and comes near to what memory allows. One read and one write are counted.
*/
#include "variants.h"

struct Problem { size_t n; float *x, *act; }; // (n) = (N,C)

static void make(Problem* p, Shape s) {
    p->n = (size_t)s.rows * (size_t)s.cols;
    p->x = random_floats(p->n, 0, 3);
    Output* act = output("act", &p->act, p->n);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        double x = p->x[i], u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
        act->want[i] = 0.5 * x * (1 + tanh(u));
    }
}
static double work(const Problem* p) { return 8.0 * (double)p->n; }
static inline float u_of(float x) { return GELU_SCALE * (x + GELU_CUBIC * x * x * x); }

// ---- 1: the formula as it is printed ----
// A call of tanhf for each element, with branches inside: nothing here can use vectors.
VARIANT(gelu_1_naive, "tanhf, as printed", 8) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) p->act[i] = 0.5f * p->x[i] * (1.0f + tanhf(u_of(p->x[i])));
}

// ---- 2: gelu(x) = x sigmoid(2u) ----
// The same function, since (1 + tanh u) / 2 = 1 / (1 + e^-2u). An exponential is less work than a tanh; but it is still a call.
VARIANT(gelu_2_sigmoid, "expf instead", 8) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        float x = p->x[i];
        p->act[i] = x / (1.0f + expf(-2.0f * u_of(x)));
    }
}

// ---- 3: tanh as a fraction of two polynomials ----
// The continued fraction tanh u = u / (1 + u^2 / (3 + u^2 / (5 + ...))), cut off after 13 and put over one denominator. No call
// and no branch, so all of it uses vectors. Up to u = 1 it is exact to a rounding; at 3 it is off by 1e-6, and at the limit,
// where it has reached 1 and tanh has not, by 1e-4: the column "error" shows the price of its speed.
static inline float tanh_fraction(float u) {
    const float limit = 4.97f;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
    float s = u * u;
    return u * (135135.0f + s * (17325.0f + s * (378.0f + s))) / (135135.0f + s * (62370.0f + s * (3150.0f + s * 28.0f)));
}
VARIANT(gelu_3_fraction, "tanh as a fraction: vectors, but few digits", 1000) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < p->n; i++) p->act[i] = 0.5f * p->x[i] * (1.0f + tanh_fraction(u_of(p->x[i])));
}

// ---- 4: llmc/'s ----
// The sigmoid again. Its exponential is a polynomial of e^r for |r| <= ln 2 / 2 and a shift of the exponent's bits: no call, no
// branch, and within a rounding or two everywhere (llmc/device/cpu/math.h). It is the loop at the end of matmul_gelu_forward.
VARIANT(gelu_4_llmc, "the exponential as a polynomial: vectors", 8) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < p->n; i++) p->act[i] = gelu_f32(p->x[i]);
}

OPERATION("gelu", "rows are tokens, cols channels", { 8192, 3072, 0 }, { 5, 264, 0 }, false)
