/*
gelu_backward.c - GELU's gradient in several ways: dx (N,C) = dout * gelu'(x).

forward: gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3). So

    gelu'(x) = (1 + tanh u) / 2 + x/2 (1 - tanh^2 u) du/dx        du/dx = sqrt(2/pi) (1 + 3 * 0.044715 x^2)

As in gelu.c, the function that has no instruction decides. Two reads and one write are counted.
*/
#include "variants.h"

struct Problem { size_t n; float *x, *act, *dout, *dx; }; // (n) = (N,C); act is what forward has made of x

static void make(Problem* p, Shape s) {
    p->n = (size_t)s.rows * (size_t)s.cols;
    p->x = random_floats(p->n, 0, 3);
    p->dout = random_floats(p->n, 0, 1);
    p->act = floats(p->n);
    p->x[p->n / 2] = 0; // networks also have zeros
    Output* dx = output("dx", &p->dx, p->n);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        double x = p->x[i], u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), du = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
        p->act[i] = (float)(0.5 * x * (1 + tanh(u)));
        dx->want[i] = (double)p->dout[i] * (0.5 * (1 + tanh(u)) + 0.5 * x * (1 - tanh(u) * tanh(u)) * du);
    }
}
static double work(const Problem* p) { return 12.0 * (double)p->n; }
// Results are off by a few roundings of a derivative of about 1; but 1 - s, with s off by one or two, is multiplied by 2x du/dx,
// which is 35 at x = 5 (above that s is 1, and the product too small to show). The same holds for 1 - tanh^2.

static inline float u_of(float x) { return GELU_SCALE * (x + GELU_CUBIC * x * x * x); }
static inline float du_of(float x) { return GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x); }

// ---- 1: the derivative as tables have it ----
// The derivative of tanh u is 1 / cosh^2 u: two calls for each element, and no vectors. (Where coshf is Inf, 1 / Inf is the 0
// that it should be.)
VARIANT(gelu_backward_1_naive, "tanhf and coshf, as printed", 8) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        float x = p->x[i], cosh_u = coshf(u_of(x));
        p->dx[i] = p->dout[i] * (0.5f * (1.0f + tanhf(u_of(x))) + 0.5f * x / (cosh_u * cosh_u) * du_of(x));
    }
}

// ---- 2: one call ----
// 1 / cosh^2 u = 1 - tanh^2 u, and tanh u is there already. It gains little, because only the cheaper of the two calls goes.
// And where tanh u is near 1 the difference has few digits: only the roundings of what came before are left, and x/2 du/dx,
// 9 at x = 5, makes them larger.
VARIANT(gelu_backward_2_tanh, "1 - tanh^2 instead of 1 / cosh^2: one call", 64) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        float x = p->x[i], t = tanhf(u_of(x));
        p->dx[i] = p->dout[i] * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * du_of(x));
    }
}

// ---- 3: a sigmoid instead ----
// With s = sigmoid(2u) = (1 + tanh u) / 2 forward is x s, and s' = s (1 - s) 2 du/dx. An exponential is less work than a tanh;
// but it is still a call, and 1 - s is also such a difference.
static inline float derivative_from(float s, float x) { return s + x * s * (1.0f - s) * 2.0f * du_of(x); }
VARIANT(gelu_backward_3_sigmoid, "expf instead", 64) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        float x = p->x[i];
        p->dx[i] = p->dout[i] * derivative_from(1.0f / (1.0f + expf(-2.0f * u_of(x))), x);
    }
}

// ---- 4: the sigmoid from forward's result ----
// act = x s is in memory, because the next layer's weight gradient needs it: s = act / x needs no exponential at all, so
// everything uses vectors. (0 / 0 is not 1/2, hence the conditions.) A fourth array has to be read, which is cheaper than a
// polynomial where cores are slow, but dearer where all wait for memory. And 1 - s loses digits: see the column "error".
VARIANT(gelu_backward_4_quotient, "the sigmoid is forward's act / x: vectors, but one more read", 64) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < p->n; i++) {
        float x = p->x[i], quotient = p->act[i] / (x == 0 ? 1.0f : x); // divides for every x: a branch would prevent vectors
        p->dx[i] = p->dout[i] * derivative_from(x == 0 ? 0.5f : quotient, x);
    }
}

// ---- 5: llmc/'s ----
// The exponential is a polynomial (llmc/device/cpu/math.h) of -|2u|, so neither s nor 1 - s is a difference. It is the loop at
// the end of matmul_gelu_backward_input, which finds dout in the cache, where a product has just left it, after thousands of
// operations for each number. What 4 may save here would not show there, but its lost digits could.
VARIANT(gelu_backward_5_llmc, "the exponential as a polynomial: vectors", 8) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < p->n; i++) p->dx[i] = p->dout[i] * gelu_derivative_f32(p->x[i]);
}

OPERATION("gelu_backward", "rows are tokens, cols channels", { 8192, 3072, 0 }, { 5, 264, 0 }, false)
