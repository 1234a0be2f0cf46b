// test_precision.c - bf16 and fp16: every number that they have, and how others are rounded to them.
#include "../../llmc/base/precision.h"
#include "../../llmc/base/rng.h"
#include "expect_death.h"
#include <float.h>
#include <omp.h>

// The formats, by their definitions.
typedef struct {
    const char* name;
    DType dtype;
    int fraction_bits, lowest_exponent; // of a normal number
    double largest;
} Format;
static const Format bf16 = { "bf16", DTYPE_BF16, 7, -126, 0x1.fep127 }, fp16 = { "fp16", DTYPE_F16, 10, -14, 65504 };

static uint16_t to_bits(Format f, float x) { return f.dtype == DTYPE_BF16 ? bf16_bits_from_float(x) : f16_bits_from_float(x); }
static float from_bits(Format f, uint16_t b) { return f.dtype == DTYPE_BF16 ? float_from_bf16_bits(b) : float_from_f16_bits(b); }

// The value of a bit pattern, from the definition: NAN, INFINITY or fraction * 2^exponent.
static double defined_value(Format f, uint16_t bits) {
    int fraction = bits & ((1 << f.fraction_bits) - 1), exponent = (bits & 0x7fff) >> f.fraction_bits;
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 0x7fff >> f.fraction_bits) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, f.lowest_exponent - f.fraction_bits);
    return sign * ldexp(fraction + (1 << f.fraction_bits), f.lowest_exponent + exponent - 1 - f.fraction_bits);
}

// Returns the nearest number of the format, of two equally near ones the even one; computed in double, without loss.
static double defined_rounding(Format f, double x) {
    if (x == 0 || !isfinite(x)) return x;
    int exponent = ilogb(x) > f.lowest_exponent ? ilogb(x) : f.lowest_exponent;
    double rounded = ldexp(nearbyint(ldexp(x, f.fraction_bits - exponent)), exponent - f.fraction_bits);
    return fabs(rounded) > f.largest ? copysign(INFINITY, x) : rounded;
}

static float defined_conversion(DType t, float x) { return t == DTYPE_F32 ? x : (float)defined_rounding(t == DTYPE_BF16 ? bf16 : fp16, x); }

static bool same_number(double a, double b) { return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b)); }

static void assert_rounds(Format f, float x) {
    double found = from_bits(f, to_bits(f, x)), expected = defined_rounding(f, x);
    if (!same_number(found, expected)) fail_msg("%s of %a is %a, not %a", f.name, (double)x, found, expected);
}

static void check_every_pattern(Format f) {
    for (int bits = 0; bits < 65536; bits++) {
        float x = from_bits(f, (uint16_t)bits);
        if (!same_number(x, defined_value(f, (uint16_t)bits))) fail_msg("%s pattern %04x is %a", f.name, (unsigned)bits, (double)x);
        uint16_t back = to_bits(f, x);
        if (isnan(x)) assert_true(isnan(from_bits(f, back)));
        else assert_int_equal(back, bits);
        if (isnan(x)) assert_int_equal(back & 0x8000, bits & 0x8000);
    }
}
TEST(every_pattern_is_its_number_and_comes_back) { check_every_pattern(bf16); check_every_pattern(fp16); }

// Between each number and the next: the middle, where the rounding direction changes, and the floats just below and above it.
static void check_rounding_between_neighbours(Format f) {
    for (int bits = 0; bits < 0x7fff; bits++) {
        double low = defined_value(f, (uint16_t)bits), high = defined_value(f, (uint16_t)(bits + 1));
        if (!isfinite(low)) break;
        if (!isfinite(high)) high = 2 * low - defined_value(f, (uint16_t)(bits - 1)); // where the next number would be
        float middle = (float)(low + (high - low) / 2);
        for (int sign = -1; sign <= 1; sign += 2) {
            assert_rounds(f, (float)sign * middle);
            assert_rounds(f, (float)sign * nextafterf(middle, 0));
            assert_rounds(f, (float)sign * nextafterf(middle, INFINITY));
        }
    }
}
TEST(rounding_is_to_nearest_even_everywhere) { check_rounding_between_neighbours(bf16); check_rounding_between_neighbours(fp16); }

TEST(floats_of_any_size_round_to_nearest_even_and_nan_stays_nan) {
    static const uint32_t nans[] = { 0x7f800001, 0x7fc00000, 0x7fffffff, 0xff800001, 0xffffffff };
    for (uint64_t i = 0; i < 500000; i++) {
        Philox r = philox(3, 0, i); // as bit patterns, so all exponents, subnormals, Inf and NaN come up
        float x;
        memcpy(&x, i < 5 ? &nans[i] : &r.x[0], sizeof x);
        assert_rounds(bf16, x);
        assert_rounds(fp16, x);
        assert_rounds(fp16, ldexpf((float)r.x[1], -40 - (int)(r.x[2] % 20))); // most of fp16's range lies here
    }
}

TEST(arrays_convert_between_all_pairs_of_types) {
    enum { N = 1003 };
    static const DType types[] = { DTYPE_F32, DTYPE_BF16, DTYPE_F16 };
    float numbers[N], before[N], after[N];
    FREED void *from = xcalloc(N, 4), *to = xcalloc(N, 4);
    for (int i = 0; i < N; i++) numbers[i] = random_normal(5, 0, (uint64_t)i);
    for (int a = 0; a < 3; a++) for (int b = 0; b < 3; b++) {
        convert_dtype(from, types[a], numbers, DTYPE_F32, N);
        convert_dtype(before, DTYPE_F32, from, types[a], N);
        convert_dtype(to, types[b], from, types[a], N);
        convert_dtype(after, DTYPE_F32, to, types[b], N);
        for (int i = 0; i < N; i++) {
            assert_true(before[i] == defined_conversion(types[a], numbers[i]));
            assert_true(after[i] == defined_conversion(types[b], before[i]));
        }
    }
}

TEST(what_is_too_large_is_what_becomes_infinite) {
    static const float edges[] = { 65504, 65520, 0x1.fep127f, 0x1.ffp127f, FLT_MAX, INFINITY, NAN, 1 };
    float numbers[48], converted[48];
    int n = 0;
    for (size_t i = 0; i < COUNT(edges); i++) for (int sign = -1; sign <= 1; sign += 2)
        for (int k = -1; k <= 1; k++) numbers[n++] = (float)sign * (k == 0 ? edges[i] : nextafterf(edges[i], k * INFINITY));
    for (DType d = DTYPE_F32; d <= DTYPE_F16; d++) {
        uint32_t stored[48];
        size_t expected = 0, first = 0, at = 0;
        convert_dtype(stored, d, numbers, DTYPE_F32, (size_t)n);
        convert_dtype(converted, DTYPE_F32, stored, d, (size_t)n);
        for (int i = 0; i < n; i++) if (isinf(converted[i]) && !isinf(numbers[i]) && expected++ == 0) first = (size_t)i;
        assert_int_equal(count_too_large(numbers, (size_t)n, d, &at), expected);
        assert_int_equal(at, first);
        assert_true((expected > 0) == (d != DTYPE_F32));
    }
}

// More than a slice: other threads convert a part, and every element is what one thread makes of it.
TEST(large_arrays_are_converted_by_all_threads) {
    enum { N = 5 * CONVERT_SLICE + 77 };
    FREED float* numbers = xcalloc(N, sizeof(float));
    FREED uint16_t *together = xcalloc(N + 1, sizeof(uint16_t)), *alone = xcalloc(N + 1, sizeof(uint16_t));
    for (int i = 0; i < N; i++) numbers[i] = random_normal(7, 0, (uint64_t)i);
    omp_set_num_threads(3);
    int before = count_threads();
    convert_dtype(together, DTYPE_BF16, numbers, DTYPE_F32, N);
    assert_int_equal(count_threads(), before + 2);
    convert_slice(alone, DTYPE_BF16, numbers, DTYPE_F32, N);
    assert_memory_equal(together, alone, (N + 1) * sizeof(uint16_t));
}
