/*
device_functions.h - CUDA's device functions on the emulator. Names and meanings are those of the CUDA C++ programming guide
(the sections on C++ language extensions) and of the CUDA Math API.

A function that can be used wrongly has a hidden last argument, the place of its call, so that messages name the kernel's line.
Everything is inlined, so that a sanitizer's report also names the kernel.
*/
#ifndef CUDA_EMULATOR_DEVICE_FUNCTIONS_H
#define CUDA_EMULATOR_DEVICE_FUNCTIONS_H
#define EMULATED static inline __attribute__((always_inline, unused))
#define CALLED_HERE emulator::Site site = emulator::here()
using std::max;
using std::min;

// --- synchronisation ---
EMULATED void __syncthreads(CALLED_HERE) { emulator::block_barrier("__syncthreads", 0, site); }
EMULATED int __syncthreads_count(int p, CALLED_HERE) { return emulator::block_barrier("__syncthreads_count", p != 0, site); }
EMULATED int __syncthreads_or(int p, CALLED_HERE) { return emulator::block_barrier("__syncthreads_or", p != 0, site) > 0; }
EMULATED int __syncthreads_and(int p, CALLED_HERE) {
    return emulator::block_barrier("__syncthreads_and", p == 0, site) == 0;
}
EMULATED void __syncwarp(unsigned mask = ~0u, CALLED_HERE) { emulator::warp_barrier(mask, site); }
EMULATED void __threadfence_block() { emulator::thread_fence(); }
EMULATED void __threadfence() { emulator::thread_fence(); }
EMULATED void __threadfence_system() { emulator::thread_fence(); }
EMULATED void __nanosleep(unsigned) { emulator::yield(); }
[[noreturn]] EMULATED void __trap(CALLED_HERE) { emulator::fail(emulator::self, site, "__trap()"); }

// --- warps: shuffles move up to 8 bytes; a source lane outside the segment means the lane's own value ---
template <class T> EMULATED T emulator_shuffle(const char* name, unsigned mask, T value, int source, emulator::Site site) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, static_cast<const void*>(&value), sizeof(T));
    bits = emulator::shuffle(name, mask, bits, source, site);
    memcpy(static_cast<void*>(&value), &bits, sizeof(T));
    return value;
}
template <class T> EMULATED T __shfl_sync(unsigned mask, T value, int source, int width = 32, CALLED_HERE) {
    int segment = emulator::self->lane & ~(width - 1);
    return emulator_shuffle("__shfl_sync", mask, value, segment | (source & (width - 1)), site);
}
template <class T> EMULATED T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, CALLED_HERE) {
    int lane = emulator::self->lane, source = lane ^ flip;
    bool beyond = (source & ~(width - 1)) > (lane & ~(width - 1)); // an earlier segment may be read, a later one may not
    return emulator_shuffle("__shfl_xor_sync", mask, value, beyond ? lane : source, site);
}
template <class T> EMULATED T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CALLED_HERE) {
    int lane = emulator::self->lane;
    bool inside = (lane & (width - 1)) + delta < (unsigned)width;
    return emulator_shuffle("__shfl_down_sync", mask, value, inside ? lane + (int)delta : lane, site);
}
template <class T> EMULATED T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CALLED_HERE) {
    int lane = emulator::self->lane;
    bool inside = (unsigned)(lane & (width - 1)) >= delta;
    return emulator_shuffle("__shfl_up_sync", mask, value, inside ? lane - (int)delta : lane, site);
}
EMULATED unsigned __ballot_sync(unsigned mask, int p, CALLED_HERE) {
    return emulator::ballot("__ballot_sync", mask, p != 0, site);
}
EMULATED int __any_sync(unsigned mask, int p, CALLED_HERE) {
    return emulator::ballot("__any_sync", mask, p != 0, site) != 0;
}
EMULATED int __all_sync(unsigned mask, int p, CALLED_HERE) {
    return emulator::ballot("__all_sync", mask, p == 0, site) == 0;
}
EMULATED unsigned __activemask() { return emulator::active_mask(); }
template <class T> EMULATED unsigned __match_any_sync(unsigned mask, T value, CALLED_HERE) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return emulator::match_any(mask, bits, site);
}
#define EMULATED_REDUCE(name, type, how) \
    EMULATED type name(unsigned mask, type value, CALLED_HERE) { \
        return (type)emulator::reduce(#name, mask, emulator::Reduce::how, (unsigned)value, site); }
EMULATED_REDUCE(__reduce_add_sync, int, ADD)      EMULATED_REDUCE(__reduce_add_sync, unsigned, ADD)
EMULATED_REDUCE(__reduce_min_sync, int, MIN_S32)  EMULATED_REDUCE(__reduce_min_sync, unsigned, MIN_U32)
EMULATED_REDUCE(__reduce_max_sync, int, MAX_S32)  EMULATED_REDUCE(__reduce_max_sync, unsigned, MAX_U32)
EMULATED_REDUCE(__reduce_and_sync, unsigned, AND) EMULATED_REDUCE(__reduce_or_sync, unsigned, OR)
EMULATED_REDUCE(__reduce_xor_sync, unsigned, XOR)

// --- loads and stores with a cache hint ---
#define EMULATED_LOAD(name) template <class T> EMULATED T name(const T* p, CALLED_HERE) { \
        emulator::check_aligned(p, alignof(T), site); return *p; }
#define EMULATED_STORE(name) template <class T> EMULATED void name(T* p, T value, CALLED_HERE) { \
        emulator::check_aligned(p, alignof(T), site); *p = value; }
EMULATED_LOAD(__ldg) EMULATED_LOAD(__ldca) EMULATED_LOAD(__ldcg) EMULATED_LOAD(__ldcs) EMULATED_LOAD(__ldlu) EMULATED_LOAD(__ldcv)
EMULATED_STORE(__stwb) EMULATED_STORE(__stcg) EMULATED_STORE(__stcs) EMULATED_STORE(__stwt)
EMULATED size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }

// --- asynchronous copies (cuda_pipeline.h) ---
// The source is read when the copy is issued; the destination is undefined (NaN) from then until the thread has waited.
typedef uint32_t __attribute__((may_alias)) EmulatorWord;
EMULATED void __pipeline_memcpy_async(void* destination, const void* source, size_t size, size_t zeros = 0, CALLED_HERE) {
    if ((size != 4 && size != 8 && size != 16) || zeros > size)
        emulator::fail(emulator::self, site, "__pipeline_memcpy_async of %zu bytes, %zu of them zeros: sizes are 4, 8 and 16", size, zeros);
    emulator::check_aligned(destination, size, site);
    emulator::check_aligned(source, size, site);
    unsigned char bytes[16] = {};
    for (size_t i = 0; i < size - zeros; i++) bytes[i] = ((const unsigned char*)source)[i];
    for (size_t i = 0; i < size / 4; i++) ((EmulatorWord*)destination)[i] = ~0u;
    emulator::pipeline_add(destination, bytes, size);
}
EMULATED void __pipeline_commit() { emulator::pipeline_commit(); }
EMULATED void __pipeline_wait_prior(size_t batches) {
    emulator::PendingCopy copy;
    while (emulator::pipeline_next(batches, &copy))
        for (size_t i = 0; i < copy.size; i++) ((unsigned char*)copy.destination)[i] = copy.bytes[i];
}

// --- atomics: relaxed, as CUDA's are ---
template <class T, class Op> EMULATED T emulator_atomic(T* address, Op op, emulator::Site site) {
    emulator::check_aligned(address, sizeof(T), site);
    emulator::before_atomic(address);
    T old, wanted;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do wanted = op(old); while (!__atomic_compare_exchange(address, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    emulator::after_atomic(address);
    return old;
}
template <class T> struct EmulatorAs { using type = T; }; // lets an argument convert to the type of the address: atomicAdd(&x, 1)
#define EMULATED_ATOMIC(name, expression) \
    template <class T> EMULATED T name(T* address, typename EmulatorAs<T>::type value, CALLED_HERE) { \
        return emulator_atomic(address, [=](T old) -> T { return expression; }, site); } \
    template <class T> EMULATED T name##_block(T* address, typename EmulatorAs<T>::type value, CALLED_HERE) { \
        return name(address, value, site); } \
    template <class T> EMULATED T name##_system(T* address, typename EmulatorAs<T>::type value, CALLED_HERE) { \
        return name(address, value, site); }
EMULATED_ATOMIC(atomicAdd, old + value)
EMULATED_ATOMIC(atomicSub, old - value)
EMULATED_ATOMIC(atomicExch, ((void)old, value))
EMULATED_ATOMIC(atomicMin, old < value ? old : value)
EMULATED_ATOMIC(atomicMax, old > value ? old : value)
EMULATED_ATOMIC(atomicAnd, old & value)
EMULATED_ATOMIC(atomicOr, old | value)
EMULATED_ATOMIC(atomicXor, old ^ value)
EMULATED_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATED_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
template <class T>
EMULATED T atomicCAS(T* address, typename EmulatorAs<T>::type compare, typename EmulatorAs<T>::type value, CALLED_HERE) {
    return emulator_atomic(address, [=](T old) -> T { return old == compare ? value : old; }, site);
}

// --- arithmetic: the host also rounds to nearest; fast approximations are computed exactly ---
#define EMULATED_1(type, from, name, value) EMULATED type name(from a) { return (type)(value); }
#define EMULATED_2(type, name, value) EMULATED type name(type a, type b) { return (type)(value); }
EMULATED_2(float, __fadd_rn, a + b) EMULATED_2(float, __fsub_rn, a - b) EMULATED_2(float, __fmul_rn, a * b)
EMULATED_2(float, __fdiv_rn, a / b) EMULATED_2(float, __fdividef, a / b)
EMULATED float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMULATED_1(float, float, __fsqrt_rn, sqrtf(a)) EMULATED_1(float, float, __frcp_rn, 1.0f / a)
EMULATED_1(float, float, __frsqrt_rn, 1.0 / sqrt((double)a)) EMULATED_1(float, float, rsqrtf, 1.0 / sqrt((double)a))
EMULATED_1(double, double, rsqrt, 1.0 / sqrt(a)) EMULATED_1(float, float, normcdff, 0.5f * erfcf(-a * 0.70710678f))
EMULATED_1(float, float, __saturatef, a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f) // NaN becomes 0
// glibc uses these names, so they must be macros
#define __expf(a) expf(a)
#define __exp10f(a) powf(10.0f, a)
#define __logf(a) logf(a)
#define __log2f(a) log2f(a)
#define __log10f(a) log10f(a)
#define __powf(a, b) powf(a, b)
#define __sinf(a) sinf(a)
#define __cosf(a) cosf(a)
#define __tanhf(a) tanhf(a)
template <class To, class From> EMULATED To emulator_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits are reinterpreted between types of one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
EMULATED_1(int, float, __float_as_int, emulator_bits<int>(a)) EMULATED_1(float, int, __int_as_float, emulator_bits<float>(a))
EMULATED_1(unsigned, float, __float_as_uint, emulator_bits<unsigned>(a))
EMULATED_1(float, unsigned, __uint_as_float, emulator_bits<float>(a))
EMULATED_1(long long, double, __double_as_longlong, emulator_bits<long long>(a))
EMULATED_1(double, long long, __longlong_as_double, emulator_bits<double>(a))
EMULATED_1(int, float, __float2int_rn, nearbyintf(a)) EMULATED_1(int, float, __float2int_rz, a)
EMULATED_1(int, float, __float2int_rd, floorf(a)) EMULATED_1(int, float, __float2int_ru, ceilf(a))
EMULATED_1(float, int, __int2float_rn, a) EMULATED_1(float, unsigned, __uint2float_rn, a)
EMULATED_1(int, unsigned, __popc, __builtin_popcount(a)) EMULATED_1(int, unsigned long long, __popcll, __builtin_popcountll(a))
EMULATED_1(int, int, __clz, a ? __builtin_clz((unsigned)a) : 32) EMULATED_1(int, int, __ffs, __builtin_ffs(a))
EMULATED_2(unsigned, __umulhi, (unsigned long long)a * b >> 32) EMULATED_2(int, __mulhi, (long long)a * b >> 32)
EMULATED_2(unsigned long long, __umul64hi, (unsigned __int128)a * b >> 64)
EMULATED unsigned __brev(unsigned a) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (a >> bit & 1) << (31 - bit);
    return reversed;
}

// --- bf16 and fp16: CUDA's headers have types, conversions and basic arithmetic for host compilers, but not these functions ---
#define EMULATED_16BIT(type, pair, to_float, from_float) \
    EMULATED type __hfma(type a, type b, type c) { return from_float((float)((double)to_float(a) * to_float(b) + to_float(c))); } \
    EMULATED pair __hfma2(pair a, pair b, pair c) { return pair{__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    EMULATED type hexp(type a) { return from_float(expf(to_float(a))); } \
    EMULATED type hexp2(type a) { return from_float(exp2f(to_float(a))); } \
    EMULATED type hlog(type a) { return from_float(logf(to_float(a))); } \
    EMULATED type hsqrt(type a) { return from_float(sqrtf(to_float(a))); } \
    EMULATED type hrsqrt(type a) { return from_float(rsqrtf(to_float(a))); } \
    EMULATED type hrcp(type a) { return from_float(1.0f / to_float(a)); } \
    EMULATED pair h2exp(pair a) { return pair{hexp(a.x), hexp(a.y)}; }
EMULATED_16BIT(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16_rn)
EMULATED_16BIT(__half, __half2, __half2float, __float2half_rn)
#endif
