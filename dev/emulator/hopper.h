/*
hopper.h - the asynchronous units of compute capability 9.0: barriers in shared memory that count bytes (mbarrier), the copy
engine for tiles (TMA), and products of a whole warpgroup from shared memory (wgmma). Names and rules are those of matrix.h.
*/
#ifndef CUDA_EMULATOR_HOPPER_H
#define CUDA_EMULATOR_HOPPER_H
namespace emulator { namespace matrix {

// The address that 32-bit operands and descriptors take: bytes from the beginning of the block's shared memory.
EMULATED uint32_t shared_address(const void* p, Site site = here()) { return emulator::shared_address(p, site); }

// --- mbarrier. Each function first makes an ordinary or atomic access, which the sanitizers see. ---
EMULATED void mbarrier_init(uint64_t* barrier, unsigned arrivals, Site site = here()) {
    check_aligned(barrier, 8, site);
    *barrier = 0;
    emulator::mbarrier_init(barrier, arrivals, site);
}
using emulator::mbarrier_init_fence; // fence.mbarrier_init: makes barriers that this thread has made known to the copy engine
EMULATED void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes, Site site = here()) { // arrive.expect_tx
    check_aligned(barrier, 8, site);
    (void)__atomic_load_n(barrier, __ATOMIC_RELAXED);
    emulator::mbarrier_arrive(barrier, bytes, site);
}
EMULATED void mbarrier_arrive(uint64_t* barrier, Site site = here()) { mbarrier_arrive_expect(barrier, 0, site); }
// try_wait.parity until it is true: the phase of this parity, which is the current or the previous one, has been completed.
EMULATED void mbarrier_wait(uint64_t* barrier, unsigned parity, Site site = here()) {
    check_aligned(barrier, 8, site);
    (void)__atomic_load_n(barrier, __ATOMIC_RELAXED);
    emulator::mbarrier_wait(barrier, parity, site);
}

// --- TMA: cp.async.bulk.tensor.2d and .3d, .shared::cluster.global.mbarrier::complete_tx::bytes. x counts elements of a row, y
// rows, z planes of rows. ---
// The tile is undefined (NaN) from now until the copy is made, at some time after a thread has begun to wait at the barrier.
EMULATED void load_box(void* tile, const CUtensorMap* map, TileStart start, uint64_t* barrier, Site site) {
    check_aligned(tile, 128, site);
    check_aligned(barrier, 8, site);
    memset(tile, 0xff, emulator::tma_check(tile, map, start.rank, barrier, site)); // a single call, which the sanitizers watch
    emulator::tma_load(tile, map, start, barrier, site);
}
EMULATED void tma_load(void* tile, const CUtensorMap* map, int x, int y, uint64_t* barrier, Site site = here()) {
    load_box(tile, map, {2, x, y, 0}, barrier, site);
}
EMULATED void tma_load(void* tile, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier, Site site = here()) {
    load_box(tile, map, {3, x, y, z}, barrier, site);
}

// --- wgmma: all 128 threads of a warpgroup, four warps of which the first one's number divides by 4 ---
using emulator::wgmma_fence;
using emulator::wgmma_commit;
template <int n> EMULATED void wgmma_settle(float (&)[n]) {} // matters only to the GPU's compiler
// For a fragment of A it also matters here: from now until the wait for its product the fragment must not change.
EMULATED void wgmma_settle(uint32_t (&a)[4], Site site = here()) { emulator::wgmma_settle(a, site); }
template <int groups> EMULATED void wgmma_wait(Site site = here()) { emulator::wgmma_wait(groups, site); }
template <class T, int sums> constexpr Element wgmma_element() {
    static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "elements are bf16 or fp16");
    static_assert(sums % 4 == 0 && sums <= 128, "n is 8, 16, ... 256: a thread has n/2 of the sums");
    return std::is_same<T, __half>::value ? Element::FP16 : Element::BF16;
}
// wgmma.mma_async.sync.aligned.m64n{n}k16.f32: d += a b, fp32 sums; a (64,16) and b (16,n) lie where their descriptors say, with
// their elements' neighbours along k, or (transposed) along rows of a and columns of b. d is undefined (NaN) until wgmma_wait.
template <class T, bool a_transposed, bool b_transposed, int sums>
EMULATED void wgmma(float (&d)[sums], uint64_t a, uint64_t b, Site site = here()) {
    emulator::wgmma({wgmma_element<T, sums>(), 2 * sums, false, a_transposed, b_transposed, a, b}, d, nullptr, site);
}
// The same with a in registers, each warp's 16 rows as mma's. They are also undefined (NaN) until wgmma_wait.
template <class T, bool b_transposed, int sums>
EMULATED void wgmma(float (&d)[sums], uint32_t (&a)[4], uint64_t b, Site site = here()) {
    emulator::wgmma({wgmma_element<T, sums>(), 2 * sums, true, false, b_transposed, 0, b}, d, a, site);
}
// setmaxnreg.inc and .dec change how many registers a thread has; they do nothing here.
template <int registers> EMULATED void take_registers() {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0, "24, 32, ... 256 registers a thread");
}
template <int registers> EMULATED void leave_registers() { take_registers<registers>(); }
}} // namespace emulator::matrix
#endif
