/*
cuda/tensor_cores.cuh - the warp-wide instructions of the tensor cores (compute capability 8.0 and later, in fp16 also
7.5) under names of their own: inline PTX on a GPU, the emulator's stand-ins without one.

A tensor core multiplies small matrices whose elements are spread over the registers of a warp's 32 lanes, in
*fragments*. Of d (16,8) += a (16,16) b (16,8), with a row-major and b given by its columns, lane l holds, in pairs of
neighbours:

    a[0] row l/4,     columns 2 (l%4) and one more      a[2] the same row,     8 columns further
    a[1] row l/4 + 8, the same columns                  a[3] row l/4 + 8,      8 columns further
    b[0] column l/4,  rows 2 (l%4) and one more         b[1] the same column,  8 rows further
    d[0], d[1] row l/4, columns 2 (l%4) and one more    d[2], d[3] row l/4 + 8, the same columns

ldmatrix brings matrices of 8 x 8 elements from shared memory into that layout. It reads rows of 16 bytes, of which lane
8m + r gives the address of row r of matrix m; fragment m is then row l/4, columns 2 (l%4) and one more. So a is four
such matrices, and b two, whose rows are b's *columns*. Where b lies by rows instead, ldmatrix_trans gives the same
fragments.

PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix". For asynchronous copies to shared memory these kernels use
CUDA's own functions: <cuda_pipeline.h>.
*/
#ifndef LLMC_CUDA_TENSOR_CORES_CUH
#define LLMC_CUDA_TENSOR_CORES_CUH
#include "common.cuh"
#include <cuda_pipeline.h>

// Only 16-bit elements have them. In fp32 the kernels also compile, but must not be launched.
constexpr bool FLOATX_HAS_TENSOR_CORES = sizeof(floatX) == 2;
#if defined(PRECISION_FP16)
typedef __half TensorElement;
#else
typedef __nv_bfloat16 TensorElement;
#endif

#ifdef CUDA_EMULATOR
using namespace emulator::matrix;
#else
// The address that instructions for shared memory take.
__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// fragments[m], m < count: this lane's two elements of matrix m, or of that transposed.
// row: the address that this lane gives.
#define LDMATRIX(name, trans) \
    template <int count> __device__ inline void name(uint32_t (&fragments)[count], const void* row) { \
        static_assert(count == 2 || count == 4, "two or four matrices"); \
        if constexpr (count == 2) \
            asm volatile("ldmatrix.sync.aligned.m8n8.x2" trans ".shared.b16 {%0, %1}, [%2];" \
                         : "=r"(fragments[0]), "=r"(fragments[1]) : "r"(shared_address(row)) : "memory"); \
        else \
            asm volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                         : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3]) \
                         : "r"(shared_address(row)) : "memory"); \
    }
LDMATRIX(ldmatrix, "")
LDMATRIX(ldmatrix_trans, ".trans")

// d += a b, T is __nv_bfloat16 or __half; sums are fp32.
template <typename T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define MMA(type) \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32" \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
// Multiplies 8 columns of a at a time, and only fp16: device_init refuses bf16
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    #pragma unroll
    for (int half = 0; half < 2; half++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, "
                     "%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#else
    if constexpr (std::is_same<T, __half>::value) MMA("f16");
    else MMA("bf16");
#endif
#undef MMA
}
#endif

// Two neighbours of fp32 as a fragment holds them, for a product whose input another product left in registers.
__device__ inline uint32_t fragment_of(float low, float high) {
    TensorElement pair[2] = { TensorElement(low), TensorElement(high) };
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return bits;
}
#endif
