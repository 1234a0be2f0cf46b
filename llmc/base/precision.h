/*
precision.h - floatX, the type of parameters, activations and gradients, chosen at compile time:
-DPRECISION_FP32 (default), -DPRECISION_BF16 or -DPRECISION_FP16. Arithmetic is always done in fp32.
Only stored numbers are floatX, and storing rounds to nearest even, as the GPU does.
*/
#ifndef LLMC_PRECISION_H
#define LLMC_PRECISION_H
#include "common.h"

typedef enum { DTYPE_F32, DTYPE_BF16, DTYPE_F16 } DType;

// bf16 is the upper half of a float.
ALWAYS_INLINE float float_from_bf16_bits(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
ALWAYS_INLINE uint16_t bf16_bits_from_float(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16; // to nearest, ties to even
    uint32_t quiet = (u >> 16) | 0x40;                       // a NaN stays one, whatever its low bits
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}
// fp16: 5 exponent bits (bias 15), 10 fraction bits. The two multiplications let the FPU handle subnormals.
// Branch-free on purpose: the compiler turns loops over these into vector code.
ALWAYS_INLINE float float_from_f16_bits(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    uint32_t scale_bits = 0x77800000; // 2^112, moves the exponent's bias from 15 to 127
    float f, scale;
    memcpy(&f, &rest, sizeof f);
    memcpy(&scale, &scale_bits, sizeof scale);
    f *= scale;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    u |= (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0; // Inf and NaN keep their fraction
    u |= sign;
    memcpy(&f, &u, sizeof f);
    return f;
}
ALWAYS_INLINE uint16_t f16_bits_from_float(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    // normal numbers: rebias, then round to nearest even; a carry out of the fraction raises the exponent, up to Inf
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // subnormals: adding 0.5 lets the FPU shift and round the fraction into the low bits
    float shifted;
    memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    uint32_t subnormal;
    memcpy(&subnormal, &shifted, sizeof subnormal);
    subnormal -= 0x3f000000;
    uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
    result = magnitude >= 0x477ff000 ? 0x7c00 : result; // 65520 and more round to Inf
    result = magnitude > 0x7f800000 ? 0x7e00 : result;  // NaN
    return (uint16_t)(sign | result);
}

#if defined(PRECISION_BF16)
#define FLOATX_DTYPE DTYPE_BF16
#define FLOATX_NAME "bf16"
#elif defined(PRECISION_FP16)
#define FLOATX_DTYPE DTYPE_F16
#define FLOATX_NAME "fp16"
#else
#define FLOATX_DTYPE DTYPE_F32
#define FLOATX_NAME "fp32"
#endif

#if !defined(PRECISION_BF16) && !defined(PRECISION_FP16)
typedef float floatX;
ALWAYS_INLINE float to_float(floatX x) { return x; }
ALWAYS_INLINE floatX to_floatX(float x) { return x; }
#else
typedef struct { uint16_t bits; } floatX; // the host's view; CUDA kernels reinterpret it as __nv_bfloat16 or __half
#if defined(PRECISION_BF16)
ALWAYS_INLINE float to_float(floatX x) { return float_from_bf16_bits(x.bits); }
ALWAYS_INLINE floatX to_floatX(float x) { floatX r; r.bits = bf16_bits_from_float(x); return r; }
#else
ALWAYS_INLINE float to_float(floatX x) { return float_from_f16_bits(x.bits); }
ALWAYS_INLINE floatX to_floatX(float x) { floatX r; r.bits = f16_bits_from_float(x); return r; }
#endif
#endif

// floatNS, the type of Muon's updates, is floatX, or fp32 where that is fp16: numbers of a Newton-Schulz iteration
// would leave its narrow range.
#if defined(PRECISION_FP16)
typedef float floatNS;
#define FLOATNS_DTYPE DTYPE_F32
ALWAYS_INLINE float from_floatNS(floatNS x) { return x; }
ALWAYS_INLINE floatNS to_floatNS(float x) { return x; }
#else
typedef floatX floatNS;
#define FLOATNS_DTYPE FLOATX_DTYPE
ALWAYS_INLINE float from_floatNS(floatNS x) { return to_float(x); }
ALWAYS_INLINE floatNS to_floatNS(float x) { return to_floatX(x); }
#endif

// True if floatX is 16 bits wide: AdamW then needs fp32 master weights in addition to the parameters.
#define NEEDS_MASTER (sizeof(floatX) < sizeof(float))

static inline size_t dtype_size(DType d) { return d == DTYPE_F32 ? 4 : 2; }
static inline const char* dtype_name(DType d) { return d == DTYPE_F32 ? "fp32" : d == DTYPE_BF16 ? "bf16" : "fp16"; }

// Host arrays from one precision to another: dst (n) of type `to` from src (n) of type `from`. They must not overlap.
// One thread converts a slice by convert_slice; convert_dtype converts a whole array with all threads.
__attribute__((noinline, unused)) // inlined, gcc 12 warns of 16-bit reads that an fp32 array never sees
static void convert_slice(void* dst, DType to, const void* src, DType from, size_t n) {
    if (to == from) { memcpy(dst, src, n * dtype_size(to)); return; }
    for (size_t i = 0; i < n; i++) {
        float x = from == DTYPE_F32    ? ((const float*)src)[i]
                  : from == DTYPE_BF16 ? float_from_bf16_bits(((const uint16_t*)src)[i])
                                       : float_from_f16_bits(((const uint16_t*)src)[i]);
        if (to == DTYPE_F32) ((float*)dst)[i] = x;
        else ((uint16_t*)dst)[i] = to == DTYPE_BF16 ? bf16_bits_from_float(x) : f16_bits_from_float(x);
    }
}
// Returns how many of these n numbers are finite but would become infinite in `to`;
// *first is the index of the first one, if any.
static inline size_t count_too_large(const float* x, size_t n, DType to, size_t* first) {
    // halfway from the largest number to the next power of two; from there on, numbers are rounded up
    float limit = to == DTYPE_F16 ? 65520.0f : 0x1.ffp127f;
    size_t count = 0;
    for (size_t i = 0; i < n && to != DTYPE_F32; i++) {
        bool is_too_large = fabsf(x[i]) >= limit && fabsf(x[i]) < INFINITY;
        if (is_too_large && count++ == 0) *first = i;
    }
    return count;
}
#define CONVERT_SLICE 8192 // elements: waking a thread takes as long as some thousand of them
static inline void convert_dtype(void* dst, DType to, const void* src, DType from, size_t n) {
    if (n <= CONVERT_SLICE) { convert_slice(dst, to, src, from, n); return; }
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += CONVERT_SLICE)
        convert_slice((char*)dst + i * dtype_size(to), to, (const char*)src + i * dtype_size(from), from,
                      size_min(CONVERT_SLICE, n - i));
}
#endif
