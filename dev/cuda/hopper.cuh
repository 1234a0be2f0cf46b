/*
hopper.cuh - what compute capability 9.0 (H100, H200) has for products of matrices: inline PTX on a GPU, the emulator's stand-ins
without one. They are for that GPU alone, so nvcc has to be told: arch=compute_90a.

mbarrier  A barrier in shared memory (8 bytes) that threads arrive at, and that can be told to expect bytes, too. A *phase* is
          complete once all arrivals and all bytes have come; the next begins at once. Who waits names the parity of the phase,
          0 for the first, 1 for the second, and so on in turns: that of the phase before the one under way is past already.
TMA       One thread asks for a box of a matrix, or of one of several that lie one behind the other; the copy engine finds the
          addresses, puts zeros where the box reaches out of the matrix, and tells an mbarrier how many bytes it has brought.
wgmma     Four warps multiply 64 x 16 by 16 x n, n up to 256, straight from shared memory, and go on: the sums are theirs again
          after wgmma_wait. Of row 16 w + l/4 (w: the warp of the four, l: the lane) d[0] and d[1] are columns 2 (l%4) and one
          more, d[2] and d[3] the same of the row 8 further; d[4] to d[7] the same 8 columns further, and so on. The left
          operand may be in registers instead: what mma's fragment a is of 16 rows, by each warp for its own.

Shared memory has 32 banks of 4 bytes, so of a tile with rows of 128 bytes a column lies in one bank. *Swizzled*, the eight
16-byte pieces of a row change places, in another way in each of 8 rows: piece p of row r is where p ^ r would be. TMA writes
tiles so and wgmma reads them so; the pattern of 1024 bytes has to begin at a multiple of 1024.

PTX ISA: "mbarrier", "cp.async.bulk.tensor", "Asynchronous warpgroup level matrix instructions"; the driver API's
cuTensorMapEncodeTiled.
*/
#ifndef DEV_CUDA_HOPPER_CUH
#define DEV_CUDA_HOPPER_CUH
#include "../../llmc/cuda/tensor_cores.cuh"
#include <cuda.h>

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_HOPPER 1 // a kernel's body is empty where this is 0, and the kernel must not be launched
#else
#define HAS_HOPPER 0
#endif

#ifndef CUDA_EMULATOR
// ---- mbarrier ----
__device__ inline void mbarrier_init(uint64_t* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After mbarrier_init, by the same thread: else the copy engine may see the barrier as it was before.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// Arrives, and has the phase wait for so many bytes more.
__device__ inline void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Returns once the phase of this parity is past. try_wait sleeps for a while, and may return too early.
__device__ inline void mbarrier_wait(uint64_t* barrier, unsigned parity) {
    uint32_t past = 0;
    while (!past)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(past) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// ---- TMA ----
// By one thread: the box whose first element is x of row y, in matrix z where there are several, comes to `tile`, and its bytes
// are told to the barrier. The map has to be a __grid_constant__ parameter of the kernel.
__device__ inline void tma_load(void* tile, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(tile)), "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)) : "memory");
}
__device__ inline void tma_load(void* tile, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(shared_address(tile)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)) : "memory");
}

// ---- wgmma ----
// Before the first one, and whenever its registers, sums or left operand, have been used by anything else.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// For the compiler, which takes sums for known as soon as wgmma is asked for: what uses them stays before or behind this. Belongs
// before the first wgmma_fence and after the last wgmma_wait.
template <int n> __device__ inline void wgmma_settle(float (&d)[n]) {
    #pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
// A left operand: what makes it stays before this, and so before the wgmma_fence that follows. It is wgmma's until wgmma_wait.
__device__ inline void wgmma_settle(uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) :: "memory");
}
// Makes a group of all that was asked for since the last one.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns once at most so many groups are under way.
template <int groups> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(groups) : "memory");
}

// d (64,128) += a (64,16) b (16,128). Where a and b are, their descriptors say; transposed: their rows and columns, not their
// k, are neighbours in shared memory. T is __nv_bfloat16 or __half.
#define EIGHT_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                      "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_N128(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
                 " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
                 " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
                 " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}," \
                 " %64, %65, 1, 1, 1, %66, %67;" \
                 : EIGHT_SUMS(0), EIGHT_SUMS(8), EIGHT_SUMS(16), EIGHT_SUMS(24), EIGHT_SUMS(32), EIGHT_SUMS(40), EIGHT_SUMS(48), \
                   EIGHT_SUMS(56) \
                 : "l"(a), "l"(b), "n"((int)a_transposed), "n"((int)b_transposed))
template <typename T, bool a_transposed, bool b_transposed> __device__ inline void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    if constexpr (std::is_same<T, __half>::value) WGMMA_N128("f16");
    else WGMMA_N128("bf16");
}
// d (64,64) += a (64,16) b (16,64), a in registers.
#define WGMMA_N64(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
                 " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}," \
                 " {%32, %33, %34, %35}, %36, 1, 1, 1, %37;" \
                 : EIGHT_SUMS(0), EIGHT_SUMS(8), EIGHT_SUMS(16), EIGHT_SUMS(24) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)b_transposed))
template <typename T, bool b_transposed> __device__ inline void wgmma(float (&d)[32], uint32_t (&a)[4], uint64_t b) {
    if constexpr (std::is_same<T, __half>::value) WGMMA_N64("f16");
    else WGMMA_N64("bf16");
}
#undef EIGHT_SUMS
#undef WGMMA_N128
#undef WGMMA_N64

// How many registers each of a warpgroup's threads has from now on; more wait until others have given some back.
template <int registers> __device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers));
}
template <int registers> __device__ inline void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers));
}
#endif

// Where wgmma finds an operand whose rows have 128 bytes and are swizzled as above. Bits 0 to 13 are the address, 16 to 29 the
// leading and 32 to 45 the stride offset, all in units of 16 bytes; 62 and 63 the swizzle, 1 for 128 bytes. The stride offset
// goes from 8 rows to the next 8. Where rows are along k, the leading offset is not used; where they are along rows or columns
// of the operand, it goes from one 64 of these to the next.
__device__ inline uint64_t wgmma_operand(const void* tile, unsigned leading = 0) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | shared_address(tile) >> 4;
}

// ---- the host's side ----
static bool gpu_is_hopper() {
    int device, major, minor;
    cuda_check(cudaGetDevice(&device), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the GPU");
    return major == 9 && minor == 0;
}
// What tma_load reads: boxes of box_rows rows of 64 elements (128 bytes, swizzled) of x (rows,cols), whose rows are whole
// pieces of 16 bytes. With `matrices`, x (matrices,rows,cols): a box has rows of one matrix, and zeros past its last one.
// cuTensorMapEncodeTiled is the driver's, which programs are not linked with: the runtime finds it.
static CUtensorMap tile_map(const floatX* x, int rows, int cols, unsigned box_rows, int matrices = 0) {
    static decltype(cuTensorMapEncodeTiled)* encode;
    if (encode == NULL) {
        const char* name = "cuTensorMapEncodeTiled";
        cudaDriverEntryPointQueryResult found;
        cuda_check(cudaGetDriverEntryPointByVersion(name, (void**)&encode, 12000, cudaEnableDefault, &found), name);
        require(encode != NULL, "the GPU's driver has no cuTensorMapEncodeTiled; one for CUDA 12 or later is needed");
    }
    CUtensorMap map;
    bool fp16 = std::is_same<TensorElement, __half>::value;
    CUtensorMapDataType type = fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t sizes[] = { (cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)matrices }; // the innermost first
    cuuint64_t pitch = cols * sizeof(floatX), pitches[] = { pitch, rows * pitch };
    cuuint32_t box[] = { 64, box_rows, 1 }, steps[] = { 1, 1, 1 }, rank = matrices ? 3 : 2;
    CUresult result = encode(&map, type, rank, (void*)x, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses a matrix of %d x %d (error %d)", rows, cols, (int)result);
    return map;
}
#endif
