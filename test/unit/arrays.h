// arrays.h - for the tests of layers, which begin with a device and without shapes: arrays that live until their test ends, random
// numbers for them, comparisons within a tolerance.
#ifndef TEST_ARRAYS_H
#define TEST_ARRAYS_H
#include "../../llmc/base/rng.h"
#include "../../llmc/device/layers.h"
#include "unit.h"

#define F32_ROUNDING 0x1p-24 // half a unit in the last place, relative; below, that of floatX
#define ROUNDING (FLOATX_DTYPE == DTYPE_F32 ? 0x1p-24 : FLOATX_DTYPE == DTYPE_BF16 ? 0x1p-8 : 0x1p-11)

// ---- memory ----
static void* owned[1024];
static int owned_count;
static uint64_t next_stream; // of random numbers

static inline void* own(size_t n, size_t size) {
    require(owned_count < 1024, "a test makes more than 1024 arrays");
    return owned[owned_count++] = xcalloc(n, size);
}
static inline void free_arrays(void) {
    while (owned_count > 0) free(owned[--owned_count]);
    next_stream = 0;
}
void before_all(void) { device_init(0, 1); }
void after_all(void) { device_shutdown(); }
void after_each(void) { layers_free(); free_arrays(); }

static inline double* doubles(size_t n) { return own(n, sizeof(double)); }
static inline float* floats(size_t n) { return own(n, sizeof(float)); }
// n NaNs, which show where a write was forgotten
static inline float* unset_floats(size_t n) {
    float* x = floats(n);
    for (size_t i = 0; i < n; i++) x[i] = NAN;
    return x;
}
static inline float* random_floats(size_t n, float std) {
    float* x = floats(n);
    next_stream++;
    for (size_t i = 0; i < n; i++) x[i] = std * random_normal(42, next_stream, i);
    return x;
}
#define copy_of(x, n) memcpy(own(n, sizeof *(x)), x, (n) * sizeof *(x))

// ---- tensors: what a layer sees, and the same numbers in double ----
typedef struct { floatX* x; double* d; size_t n; } Tensor;

static inline void set_element(Tensor t, size_t i, double value) {
    t.x[i] = to_floatX((float)value);
    t.d[i] = (double)to_float(t.x[i]);
}
// n numbers from N(mean, std), rounded to floatX
static inline Tensor random_tensor(size_t n, double mean, double std) {
    Tensor t = { own(n, sizeof(floatX)), doubles(n), n };
    next_stream++;
    for (size_t i = 0; i < n; i++) set_element(t, i, mean + std * (double)random_normal(42, next_stream, i));
    return t;
}
static inline Tensor unset_tensor(size_t n) { return random_tensor(n, NAN, 0); }

// ---- comparisons ----
static inline double largest(const double* d, size_t n) {
    double m = 0;
    for (size_t i = 0; i < n; i++) m = fmax(m, fabs(d[i]));
    return m;
}
static inline uint64_t hash_bytes(uint64_t h, const void* p, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char*)p)[i]) * 1099511628211ull;
    return h;
}
#endif
