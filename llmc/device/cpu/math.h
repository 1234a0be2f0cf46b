/*
cpu/math.h - the elementwise functions that layers need, in fp32, written so that loops over them become vector code.

No branches, no tables, no calls: exp is a polynomial after the usual reduction to [-ln2/2, ln2/2], and GELU is built
on it. A result is a function of the arguments alone: it does not matter whether an element was computed by the vector
loop or by its tail, so a thread or a rank that owns another slice of an array computes the same bits.

All are always inlined. A loop that calls a function does not become vector code, and its sum then has another order;
otherwise the size of a whole program would decide which of these calls are inlined, and two stages could differ in
their last bits.
*/
#ifndef LLMC_CPU_MATH_H
#define LLMC_CPU_MATH_H
#include "../../base/common.h"

// a*b + c, rounded once where the CPU can; elsewhere twice, since an exact fmaf in software costs a hundred times more.
ALWAYS_INLINE float fused_multiply_add(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// 2^n for n in [-126, 127], from its bits.
ALWAYS_INLINE float power_of_two(int32_t n) {
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// e^x within 1 ulp: 0 below -104, Inf above 88.73, subnormal results rounded as they should be, NaN for NaN.
ALWAYS_INLINE float exp_f32(float x) {
    const float highest = 89.0f, lowest = -104.0f; // beyond these the result is Inf or 0 already
    const float shift = 12582912.0f;               // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
    x = x > highest ? highest : x;                 // (a NaN passes both comparisons)
    x = x < lowest ? lowest : x;
    float shifted = fused_multiply_add(x, 1.44269504f, shift), n = shifted - shift;
    // r = x - n ln2, ln2 in two parts: the first has few enough bits for n times it to be exact
    float r = fused_multiply_add(n, -0.693359375f, x);
    r = fused_multiply_add(n, 2.12194440e-4f, r);
    // e^r = 1 + r + r^2 p(r), the coefficients a minimax fit over [-ln2/2, ln2/2]
    float p = 1.9875691500e-4f;
    p = fused_multiply_add(p, r, 1.3981999507e-3f);
    p = fused_multiply_add(p, r, 8.3334519073e-3f);
    p = fused_multiply_add(p, r, 4.1665795894e-2f);
    p = fused_multiply_add(p, r, 1.6666665459e-1f);
    p = fused_multiply_add(p, r, 5.0000001201e-1f);
    p = fused_multiply_add(p, r * r, r) + 1.0f;
    // times 2^n in two factors, since 2^n itself may be beyond the exponents a float has
    int32_t whole, zero;
    memcpy(&whole, &shifted, sizeof whole);
    memcpy(&zero, &shift, sizeof zero);
    whole -= zero;
    int32_t half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
}

#define GELU_SCALE 0.7978845608028654f // sqrt(2/pi)
#define GELU_CUBIC 0.044715f

// gelu(x) = x/2 (1 + tanh u), u = GELU_SCALE (x + GELU_CUBIC x^3); and since (1 + tanh u)/2 = 1/(1 + e^-2u) =
// sigmoid(2u), gelu(x) = x sigmoid(2u), which loses no digits where tanh u is close to -1.
ALWAYS_INLINE float gelu_f32(float x) {
    float u = GELU_SCALE * x * fused_multiply_add(GELU_CUBIC * x, x, 1.0f);
    return x / (1.0f + exp_f32(-2.0f * u));
}

// gelu'(x) = s + x s (1 - s) 2 du/dx, with s = sigmoid(2u) and du/dx = GELU_SCALE (1 + 3 GELU_CUBIC x^2).
// With e = e^-|2u| in [0, 1], s is 1/(1 + e) or e/(1 + e) and s (1 - s) = e/(1 + e)^2: nothing cancels or overflows.
ALWAYS_INLINE float gelu_derivative_f32(float x) {
    float u = GELU_SCALE * x * fused_multiply_add(GELU_CUBIC * x, x, 1.0f);
    float du = GELU_SCALE * fused_multiply_add(3.0f * GELU_CUBIC * x, x, 1.0f);
    float e = exp_f32(-2.0f * fabsf(u)), larger = 1.0f / (1.0f + e), smaller = e * larger;
    float s = x < 0 ? smaller : larger;
    return fused_multiply_add(x * larger * smaller, 2.0f * du, s);
}
#endif
