/*
hopper.cuh - what compute capability 9.0 (H100, H200) has for products of matrices: inline PTX on a GPU, the emulator's stand-ins
without one. Only that GPU has them, so nvcc needs arch=compute_90a.

mbarrier  A barrier in shared memory (8 bytes) that threads arrive at, and that can also expect bytes. A *phase* is complete once
          all arrivals and all bytes have come; the next phase begins at once. A waiting thread names the parity of a phase, 0
          for the first, 1 for the second, and so on in turns. The phase before the current one counts as past.
TMA       One thread asks for a box of a matrix, or of one of several that lie one after the other. The copy engine computes the
          addresses, puts zeros where the box reaches out of the matrix, and tells an mbarrier how many bytes it has copied.
wgmma     Four warps multiply 64 x 16 by 16 x n, n up to 256, straight from shared memory, and go on: they may use the sums
          after wgmma_wait. Lane l of warp w (of the four) has columns 2 (l%4) and one more of row 16 w + l/4 in d[0] and d[1],
          the same columns of the row 8 further in d[2] and d[3], the same 8 columns further in d[4] to d[7], and so on. The
          left operand may be in registers instead: each warp has its own 16 rows, as in mma's fragment a.

Shared memory has 32 banks of 4 bytes, so in a tile with rows of 128 bytes each column lies in one bank. In a *swizzled* tile the
eight 16-byte pieces of a row change places, differently in each of 8 rows: piece p of row r is where p ^ r would be. TMA writes
such tiles and wgmma reads them; the pattern of 1024 bytes has to begin at a multiple of 1024.

PTX ISA: "mbarrier", "cp.async.bulk.tensor", "Asynchronous warpgroup level matrix instructions"; the driver API's
cuTensorMapEncodeTiled.
*/
#ifndef DEV_CUDA_HOPPER_CUH
#define DEV_CUDA_HOPPER_CUH
#include "../../../llmc/device/cuda/tensor_cores.cuh"
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
// Call after mbarrier_init, in the same thread. Without it the copy engine may see the barrier as it was before.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase wait for so many more bytes.
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
// One thread calls this. It copies the box whose first element is x of row y, in matrix z if there are several, to `tile`, and
// the barrier counts its bytes. The map has to be a __grid_constant__ parameter of the kernel.
__device__ inline void tma_load(void* tile, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(tile)), "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)) : "memory");
}
__device__ inline void tma_load(void* tile, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(shared_address(tile)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)) : "memory");
}

// ---- wgmma ----
// Call before the first wgmma, and whenever anything else has used its registers (sums or left operand).
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// For the compiler, which assumes that the sums are ready when wgmma has been issued: no use of them moves across this. Call
// before the first wgmma_fence and after the last wgmma_wait.
template <int n> __device__ inline void wgmma_settle(float (&d)[n]) {
    #pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
// For a left operand: the code that computes it stays before this, and so before the wgmma_fence that follows. It must not
// change until wgmma_wait.
__device__ inline void wgmma_settle(uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) :: "memory");
}
// Makes a group of all products issued since the last group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns once at most so many groups are under way.
template <int groups> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(groups) : "memory");
}

// d (64,128) += a (64,16) b (16,128), where a and b are given by descriptors; transposed: their rows and columns, not their k,
// are neighbours in shared memory. T is __nv_bfloat16 or __half.
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

// Both set how many registers each thread of a warpgroup has from now on. Taking more waits until others have given some back.
template <int registers> __device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers));
}
template <int registers> __device__ inline void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers));
}
#endif

// Returns the descriptor of an operand whose rows are 128 bytes, swizzled as above. Bits 0 to 13 are the address, 16 to 29 the
// leading and 32 to 45 the stride offset, all in units of 16 bytes; 62 and 63 the swizzle, 1 for 128 bytes. The stride offset
// goes from 8 rows to the next 8. Where rows are along k, the leading offset is not used; where they are along rows or columns
// of the operand, it goes from one 64 of these to the next.
__device__ inline uint64_t wgmma_operand(const void* tile, unsigned leading = 0) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | shared_address(tile) >> 4;
}

// ---- tiles that one warpgroup asks for and two others read, in `stages` places ----
// full: complete with the bytes that the producer expects. empty: with a lane of each of the 8 consumer warps.
__device__ inline void pipeline_init(uint64_t* full, uint64_t* empty, int stages) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; s++) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads(); // there are barriers now
}
// Where swizzled tiles may begin in shared memory
__device__ inline char* first_tile(int4* shared_memory) {
    return (char*)shared_memory + (1024 - shared_address(shared_memory) % 1024) % 1024;
}

// ---- the host's side ----
static bool gpu_is_hopper() {
    int device, major, minor;
    cuda_check(cudaGetDevice(&device), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the GPU");
    return major == 9 && minor == 0;
}
// Describes what tma_load reads: boxes of box_rows rows of 64 elements (128 bytes, swizzled) of x (rows,cols), whose rows are
// whole pieces of 16 bytes. With `matrices`, x (matrices,rows,cols): a box has rows of one matrix, and zeros past its last one.
// cuTensorMapEncodeTiled belongs to the driver, which programs are not linked with: the runtime finds it.
static CUtensorMap tile_map(const floatX* x, int rows, int cols, unsigned box_rows, int matrices = 0) {
    static decltype(cuTensorMapEncodeTiled)* encode;
    if (encode == NULL) {
        const char* name = "cuTensorMapEncodeTiled";
        cudaDriverEntryPointQueryResult found;
        cuda_check(cudaGetDriverEntryPointByVersion(name, (void**)&encode, 12000, cudaEnableDefault, &found), name);
        require(encode != NULL, "the GPU's driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12 or later");
    }
    CUtensorMap map;
    bool fp16 = std::is_same<TensorElement, __half>::value;
    CUtensorMapDataType type = fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t sizes[] = { (cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)matrices }; // the innermost first
    cuuint64_t pitch = cols * sizeof(floatX), pitches[] = { pitch, rows * pitch };
    cuuint32_t box[] = { 64, box_rows, 1 }, steps[] = { 1, 1, 1 }, rank = matrices ? 3 : 2;
    CUresult result = encode(&map, type, rank, (void*)x, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    invariant(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses a matrix of %d x %d (error %d)", rows, cols, (int)result);
    return map;
}
#endif
