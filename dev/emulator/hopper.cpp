/*
hopper.cpp - the asynchronous units of compute capability 9.0: mbarriers, copies of tiles, products of warpgroups. It follows the
PTX ISA's sections on mbarrier, cp.async.bulk.tensor and wgmma, and the driver API's cuTensorMapEncodeTiled.

Operations finish late: a copy arrives some time after a thread waits at its barrier, a product when it is waited for. Until then
a tile and a thread's sums are NaN, and shared memory that a product reads must not change.
*/
#include "engine.h"
#include "runtime.h"
#include <cuda.h>

namespace emulator {
// --- shared memory: 18 bits are an address ---
uint32_t shared_address(const void* p, Site site) {
    if (!in_shared(p, 1)) fail(self, site, "%p is not in the block's shared memory", p);
    size_t offset = (size_t)((const char*)p - shared_begin());
    if (offset >> 18) fail(self, site, "the emulator's shared memory has only 18 bits of addresses for this");
    return (uint32_t)offset;
}
// Swizzling puts the 16-byte pieces of 8 neighbouring rows of 16, 32, 64 or 128 bytes into different banks: as many of bits 7, 8
// and 9 of an address as a row's pieces need are added, without carry, to bits 4, 5 and 6.
static size_t swizzled(size_t address, size_t row_bytes) { return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4); }

// --- mbarriers: the layout of their 64 bits is our choice ---
struct Mbarrier {
    uint64_t made : 2;       // 1: by mbarrier_init, 2: and the copy engine knows of it. Memory that nobody wrote has 3.
    uint64_t phase : 1;      // the parity of the current phase
    uint64_t arrivals : 20;  // of a phase
    uint64_t missing : 20;   // of this phase
    int64_t bytes : 21;      // expected in this phase and not yet there
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 64 bits");
constexpr int MBARRIER_MOST = (1 << 20) - 1; // arrivals and bytes

static Mbarrier* find_mbarrier(uint64_t* barrier, Site site) {
    if (!in_shared(barrier, 8)) fail(self, site, "the mbarrier at %p is not in the block's shared memory", (void*)barrier);
    Mbarrier* b = (Mbarrier*)barrier;
    if (b->made != 1 && b->made != 2)
        fail(self, site, "there is no mbarrier here: mbarrier_init has not been called, or it was overwritten");
    return b;
}
void mbarrier_init(uint64_t* barrier, unsigned arrivals, Site site) {
    if (!in_shared(barrier, 8)) fail(self, site, "the mbarrier at %p is not in the block's shared memory", (void*)barrier);
    if (arrivals < 1 || arrivals > MBARRIER_MOST)
        fail(self, site, "an mbarrier of %u arrivals; it takes 1 to %d", arrivals, MBARRIER_MOST);
    Unwatched unwatched;
    *(Mbarrier*)barrier = Mbarrier{1, 0, arrivals, arrivals, 0};
    static_cast<Fiber*>(self)->new_barriers.push_back(barrier);
}
void mbarrier_init_fence(void) {
    Fiber* f = static_cast<Fiber*>(self);
    for (uint64_t* barrier : f->new_barriers) ((Mbarrier*)barrier)->made = 2;
    f->new_barriers.clear();
}
static void end_phase_if_complete(Mbarrier* b) {
    if (b->missing || b->bytes) return;
    b->phase ^= 1;
    b->missing = b->arrivals;
}
static void add_bytes(Mbarrier* b, long long bytes, const Thread* thread, Site site) {
    long long sum = b->bytes + bytes;
    if (sum > MBARRIER_MOST || sum < -MBARRIER_MOST)
        fail(thread, site, "an mbarrier that expects %lld bytes; it counts to %d", sum, MBARRIER_MOST);
    b->bytes = sum;
}
void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, Site site) {
    Mbarrier* b = find_mbarrier(barrier, site);
    if (!b->missing) fail(self, site, "one arrival more than the %u that make a phase of this mbarrier", (unsigned)b->arrivals);
    add_bytes(b, expected_bytes, self, site);
    b->missing--;
    publish(barrier, nullptr);
    end_phase_if_complete(b);
}
bool mbarrier_is_past(const uint64_t* barrier, unsigned parity) { return ((const Mbarrier*)barrier)->phase != parity; }
void mbarrier_wait(uint64_t* barrier, unsigned parity, Site site) {
    if (parity > 1) fail(self, site, "a phase's parity is 0 or 1, not %u", parity);
    find_mbarrier(barrier, site);
    wait_at_mbarrier(barrier, parity, site);
    observe(barrier);
}
void report_mbarrier(const Fiber* f) {
    const Mbarrier* b = (const Mbarrier*)f->record;
    fail(f, f->site, "mbarrier_wait for a phase of parity %u can never go on: it still expects %u of %u arrivals and %lld bytes",
         f->mask, (unsigned)b->missing, (unsigned)b->arrivals, (long long)b->bytes);
}

// --- the copy engine ---
// What our cuTensorMapEncodeTiled writes into the 128 bytes of a CUtensorMap: one or more matrices, each in a plane, and the box
// that a copy takes from one.
struct TileMap {
    uint64_t magic;
    const char* memory;      // (planes,rows) rows of `row_bytes`, `pitch` bytes apart, planes plane_pitch bytes
    uint64_t row_bytes, rows, pitch, planes, plane_pitch;
    uint32_t rank, element, box_bytes, box_rows, swizzle; // in bytes, except rank and box_rows; swizzle: of a row, 16: none
    uint8_t outside;         // the byte that is read outside of the rows
};
static_assert(sizeof(TileMap) <= sizeof(CUtensorMap), "it must fit");
constexpr uint64_t TILE_MAP = 0x70616d656c6974;
struct PendingTile { char* tile; TileMap map; TileStart start; uint64_t* barrier; Fiber* thread; Site site; };
static thread_local std::vector<PendingTile> tiles; // of the block that this OS thread runs

static const TileMap* find_map(const CUtensorMap* map, Site site) {
    const TileMap* m = (const TileMap*)map;
    if (m->magic != TILE_MAP) fail(self, site, "there is no tensor map here: cuTensorMapEncodeTiled has not made it");
    return m;
}
size_t tma_check(const void* tile, const CUtensorMap* map, int rank, uint64_t* barrier, Site site) {
    const TileMap* m = find_map(map, site);
    if ((int)m->rank != rank) fail(self, site, "a copy of rank %d by a tensor map of rank %u", rank, m->rank);
    size_t bytes = (size_t)m->box_bytes * m->box_rows;
    if (!in_shared(tile, bytes)) fail(self, site, "a tile of %zu bytes at %p, which is not in the block's shared memory", bytes, tile);
    if (find_mbarrier(barrier, site)->made != 2)
        fail(self, site, "the copy engine does not know this mbarrier: the thread that made it must call mbarrier_init_fence");
    return bytes;
}
void tma_load(void* tile, const CUtensorMap* map, TileStart start, uint64_t* barrier, Site site) {
    Unwatched unwatched;
    tiles.push_back({(char*)tile, *find_map(map, site), start, barrier, static_cast<Fiber*>(self), site});
}
static void arrive(const PendingTile& t) {
    const TileMap& m = t.map;
    bool plane_inside = t.start.z >= 0 && t.start.z < (long long)m.planes;
    const char* plane = m.memory + (plane_inside ? (size_t)t.start.z * m.plane_pitch : 0);
    for (uint32_t r = 0; r < m.box_rows; r++)
        for (uint32_t i = 0; i < m.box_bytes; i++) {
            long long row = (long long)t.start.y + r, byte = (long long)t.start.x * m.element + i;
            bool inside = plane_inside && row >= 0 && row < (long long)m.rows && byte >= 0 && byte < (long long)m.row_bytes;
            size_t address = (size_t)(t.tile - shared_begin()) + (size_t)r * m.box_bytes + i;
            shared_begin()[swizzled(address, m.swizzle)] = inside ? plane[(size_t)row * m.pitch + (size_t)byte] : (char)m.outside;
        }
    Mbarrier* b = find_mbarrier(t.barrier, t.site);
    add_bytes(b, -(long long)m.box_bytes * m.box_rows, t.thread, t.site);
    publish(t.barrier, t.thread);
    end_phase_if_complete(b);
}
bool hopper_progress(bool must) {
    bool any = false;
    for (size_t i = 0; i < tiles.size();) { // in no order
        if ((must && !any) || (is_waited_at(tiles[i].barrier) && random_number() % 4 == 0)) { // never before a thread waits
            arrive(tiles[i]);
            tiles.erase(tiles.begin() + (long)i);
            any = true;
        } else i++;
    }
    return any;
}
void hopper_end_block(void) {
    if (!tiles.empty()) fail(tiles[0].thread, tiles[0].site, "the block has ended before this tile arrived: nobody waited for it");
}

// --- products of a warpgroup ---
// a (64,16) and b (16,n), as they were when the product was issued.
struct WgmmaOperands {
    WarpgroupProduct product;
    Site site;
    std::vector<uint16_t> a, b; // a[row][k], b[column][k]
    bool done;
};
constexpr int WG_ROWS = 64, WG_K = 16;

// Element (i, k) of an operand: i is a row of a or a column of b. A descriptor has, in units of 16 bytes, the first byte's
// address, the leading and the stride byte offset; then a base offset and the swizzle. (PTX ISA, "Matrix descriptor", "Strides".)
struct Descriptor { size_t start, leading, stride, row_bytes; };
static Descriptor read_descriptor(uint64_t bits, const char* operand, const Fiber* f) {
    static const size_t row_bytes[] = {16, 128, 64, 32}; // by bits 62 and 63
    Descriptor d = {(bits & 0x3fff) << 4, (bits >> 16 & 0x3fff) << 4, (bits >> 32 & 0x3fff) << 4, row_bytes[bits >> 62]};
    const char* wrong = nullptr;
    if (bits & 0x3ff1c000c000c000) wrong = "has bits set that must be 0";
    else if (bits >> 49 & 7) wrong = "has a base offset, which is not emulated";
    else if (d.row_bytes > 16 && d.start % (8 * d.row_bytes) >= d.row_bytes)
        wrong = "begins within the pattern of 8 rows by which it is swizzled";
    if (wrong) fail(f, f->site, "%s, at address 0x%zx of shared memory, with the descriptor 0x%016llx, %s", operand, d.start,
                    (unsigned long long)bits, wrong);
    return d;
}
static size_t element_address(Descriptor d, bool transposed, size_t i, size_t k) {
    size_t width = d.row_bytes / 2, address;
    if (d.row_bytes == 16) // matrices of 8 rows of 8 elements, each in one piece
        address = transposed ? i / 8 * d.stride + k / 8 * d.leading + k % 8 * 16 + i % 8 * 2
                             : i / 8 * d.stride + k / 8 * d.leading + i % 8 * 16 + k % 8 * 2;
    else
        address = transposed ? i / width * d.leading + k / 8 * d.stride + k % 8 * d.row_bytes + i % width * 2
                             : i / 8 * d.stride + i % 8 * d.row_bytes + k * 2;
    return swizzled(d.start + address, d.row_bytes);
}
static std::vector<uint16_t> read_operand(uint64_t bits, bool transposed, int rows, const char* operand, const Fiber* f) {
    Descriptor d = read_descriptor(bits, operand, f);
    std::vector<uint16_t> elements((size_t)rows * WG_K);
    for (size_t i = 0; i < elements.size(); i++) {
        const char* p = shared_begin() + element_address(d, transposed, i / WG_K, i % WG_K);
        if (!in_shared(p, 2)) fail(f, f->site, "%s reaches out of the block's shared memory, %zu bytes from where it begins",
                                   operand, (size_t)(p - shared_begin()) - d.start);
        memcpy(&elements[i], p, 2);
    }
    return elements;
}
struct WgmmaRecord { WarpgroupProduct product; std::array<uint32_t, 4> fragment; std::shared_ptr<WgmmaOperands> operands; };
// a as the threads hold it: each warp has 16 rows, in mma's fragments.
static std::vector<uint16_t> gather_operand(Fiber* const* threads) {
    std::vector<uint16_t> elements((size_t)WG_ROWS * WG_K);
    for (int t = 0; t < WARPGROUP; t++)
        for (int m = 0; m < 4; m++) {
            int row = t / WARP * 16 + t % WARP / 4 + m % 2 * 8, k = t % 4 * 2 + m / 2 * 8;
            memcpy(&elements[(size_t)(row * WG_K + k)], &((WgmmaRecord*)threads[t]->record)->fragment[(size_t)m], 4);
        }
    return elements;
}
static void combine_wgmma(Fiber* const* threads) {
    const Fiber* first = threads[0];
    WarpgroupProduct p = ((WgmmaRecord*)first->record)->product;
    for (int i = 1; i < WARPGROUP; i++) {
        WarpgroupProduct other = ((WgmmaRecord*)threads[i]->record)->product;
        if (other.a != p.a || other.b != p.b || other.n != p.n || other.a_in_registers != p.a_in_registers)
            fail(threads[i], threads[i]->site, "wgmma of other operands than thread (%u,%u,%u) of the same warpgroup has",
                 first->thread_idx.x, first->thread_idx.y, first->thread_idx.z);
    }
    std::vector<uint16_t> a = p.a_in_registers ? gather_operand(threads) : read_operand(p.a, p.a_transposed, WG_ROWS, "a", first);
    std::shared_ptr<WgmmaOperands> operands(new WgmmaOperands{p, first->site, a,
                                                              read_operand(p.b, p.b_transposed, p.n, "b", first), false});
    for (int i = 0; i < WARPGROUP; i++) ((WgmmaRecord*)threads[i]->record)->operands = operands;
}
// A NaN that any arithmetic changes into another NaN.
constexpr uint32_t OUT_OF_REACH = 0xffaaaaaa;
static void take_away(float* d, int n) {
    for (int i = 0; i < n; i++) memcpy(&d[i], &OUT_OF_REACH, sizeof *d);
}
static void check_untouched(const float* d, int n, Site site) {
    for (int i = 0; i < n; i++)
        if (memcmp(&d[i], &OUT_OF_REACH, sizeof *d)) fail(self, site, "sums of a wgmma that was not waited for have been written");
}

// --- fragments of A. Registers have no addresses on a GPU; here they are an array, which wgmma_settle registers. ---
static Fragment* find_fragment(Fiber* f, const uint32_t* address) {
    for (Fragment& a : f->fragments) if (a.address == address) return &a;
    return nullptr;
}
static void check_fragment(const Fragment& a, Site site) {
    for (int i = 0; i < 4; i++)
        if (a.address[i] != (a.products ? OUT_OF_REACH : a.elements[(size_t)i]))
            fail(self, site, "a fragment that wgmma reads has been written %s",
                 a.products ? "before it was waited for" : "since wgmma_settle");
}
void wgmma_settle(uint32_t* fragment, Site site) {
    Unwatched unwatched;
    Fiber* f = static_cast<Fiber*>(self);
    Fragment* a = find_fragment(f, fragment);
    if (a && a->products) fail(f, site, "wgmma_settle of a fragment that a wgmma still reads");
    if (!a) a = &*f->fragments.insert(f->fragments.end(), {fragment, {}, false, 0});
    std::copy(fragment, fragment + 4, a->elements.begin());
    a->fenced = false;
}
// May not be touched from the first product that reads it to the end of the last.
static std::array<uint32_t, 4> take_fragment(Fiber* f, uint32_t* fragment, Site site) {
    Fragment* a = find_fragment(f, fragment);
    if (!a) fail(f, site, "wgmma of a fragment without wgmma_settle");
    if (!a->fenced) fail(f, site, "wgmma of a fragment without a wgmma_fence since wgmma_settle");
    check_fragment(*a, site);
    a->products++;
    std::fill(fragment, fragment + 4, OUT_OF_REACH);
    return a->elements;
}
static void give_fragment_back(Fiber* f, uint32_t* fragment, Site site) {
    Fragment* a = find_fragment(f, fragment);
    check_fragment(*a, site);
    if (--a->products == 0) std::copy(a->elements.begin(), a->elements.end(), fragment);
}

void wgmma(WarpgroupProduct product, float* d, uint32_t* fragment, Site site) {
    Unwatched unwatched;
    Fiber* f = static_cast<Fiber*>(self);
    PendingSums* sums = nullptr;
    for (PendingSums& s : f->sums) if (s.d == d) sums = &s;
    int n = product.n / 2;
    if (sums) check_untouched(d, n, site);
    else {
        if (!f->wgmma_fenced) fail(f, site, "wgmma without a wgmma_fence since its sums were last within this thread's reach");
        f->sums.push_back({d, std::vector<float>(d, d + n), 0});
        sums = &f->sums.back();
        take_away(d, n);
    }
    sums->products++;
    WgmmaRecord record = {product, fragment ? take_fragment(f, fragment, site) : std::array<uint32_t, 4>(), nullptr};
    meet_warpgroup("wgmma", &record, combine_wgmma, site);
    f->products.push_back({record.operands, d, fragment, f->num_groups});
}
void wgmma_fence(void) {
    Fiber* f = static_cast<Fiber*>(self);
    f->wgmma_fenced = true;
    for (Fragment& a : f->fragments) a.fenced = true;
}
void wgmma_commit(void) { static_cast<Fiber*>(self)->num_groups++; }

// The first of the warpgroup's threads to wait ends the product for all; the product's inputs must not have changed.
static void finish_operands(WgmmaOperands* o, const Fiber* f) {
    if (o->done) return;
    o->done = true;
    const WarpgroupProduct& p = o->product;
    bool a_changed = !p.a_in_registers && read_operand(p.a, p.a_transposed, WG_ROWS, "a", f) != o->a;
    if (a_changed || read_operand(p.b, p.b_transposed, p.n, "b", f) != o->b)
        fail(f, o->site, "the shared memory that this wgmma reads has changed before it was waited for");
}
// A thread has rows lane/4 and lane/4 + 8 of its warp's 16, and in every 8 columns columns 2 (lane%4) and 2 (lane%4) + 1.
static void add_product(const WgmmaOperands& o, const Fiber* f, float* sums) {
    int thread = (int)((f->thread_idx.z * f->block_dim.y + f->thread_idx.y) * f->block_dim.x + f->thread_idx.x);
    int first_row = thread % WARPGROUP / WARP * 16 + f->lane / 4;
    float a[2][WG_K];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < WG_K; k++) a[half][k] = value_of(o.product.type, o.a[(first_row + half * 8) * WG_K + k]);
    for (int column = f->lane % 4 * 2; column < o.product.n; column += column % 2 ? 7 : 1) {
        double both[2] = {0, 0};
        for (int k = 0; k < WG_K; k++) {
            double b = value_of(o.product.type, o.b[column * WG_K + k]);
            for (int half = 0; half < 2; half++) both[half] += a[half][k] * b;
        }
        for (int half = 0; half < 2; half++) {
            float* sum = &sums[column / 8 * 4 + half * 2 + column % 2];
            *sum = (float)(*sum + both[half]); // as mma does here: exact, rounded once
        }
    }
}
void wgmma_wait(size_t groups_that_may_wait, Site site) {
    Unwatched unwatched;
    Fiber* f = static_cast<Fiber*>(self);
    while (!f->products.empty() && f->products.front().group + groups_that_may_wait < f->num_groups) {
        PendingProduct p = f->products.front();
        f->products.pop_front();
        finish_operands(p.operands.get(), f);
        if (p.fragment) give_fragment_back(f, p.fragment, site);
        for (size_t i = 0; i < f->sums.size(); i++) {
            PendingSums& s = f->sums[i];
            if (s.d != p.d) continue;
            add_product(*p.operands, f, s.sums.data());
            if (--s.products) break;
            check_untouched(s.d, (int)s.sums.size(), site);
            std::copy(s.sums.begin(), s.sums.end(), s.d);
            f->sums.erase(f->sums.begin() + (long)i);
            f->wgmma_fenced = false;
            break;
        }
    }
}

// --- threads ---
void hopper_begin_thread(Fiber* f) {
    f->new_barriers.clear();
    f->products.clear();
    f->sums.clear();
    f->fragments.clear();
    f->num_groups = 0;
    f->wgmma_fenced = false;
}
void hopper_end_thread(Fiber* f) {
    if (!f->products.empty()) fail(f, f->products.front().operands->site, "the thread has ended without waiting for this wgmma");
}

// --- the host's side ---
static CUresult refuse(const char* why) {
    explain("cuTensorMapEncodeTiled", "%s", why);
    return CUDA_ERROR_INVALID_VALUE;
}
static uint32_t element_bytes(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16: case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32: case CU_TENSOR_MAP_DATA_TYPE_INT32: case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
        default: return 0;
    }
}
CUresult CUDAAPI encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* memory, const cuuint64_t* dims,
                              const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                              CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill fill) {
    static const uint32_t swizzles[] = {16, 32, 64, 128};
    uint32_t element = element_bytes(type);
    bool planes = rank == 3;
    if (!element || (rank != 2 && !planes) || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        swizzle > CU_TENSOR_MAP_SWIZZLE_128B || element_strides[0] != 1 || element_strides[1] != 1 ||
        (planes && (element_strides[2] != 1 || box[2] != 1)))
        return refuse("emulated are matrices and planes of them, whole, of 1, 2 or 4 bytes an element, boxes of one plane, and "
                      "swizzles of 32, 64 and 128 bytes");
    uint32_t box_bytes = box[0] * element, row = swizzles[swizzle];
    if ((uintptr_t)map % 64) return refuse("a tensor map must be aligned to 64 bytes");
    if ((uintptr_t)memory % 16) return refuse("the matrix must be aligned to 16 bytes");
    if (strides[0] % 16 || strides[0] >> 40 || strides[0] < dims[0] * element)
        return refuse("its rows must lie a multiple of 16 bytes apart");
    if (!dims[0] || !dims[1] || dims[0] > 1ull << 32 || dims[1] > 1ull << 32)
        return refuse("it has from 1 to 2^32 rows and columns");
    if (planes && (!dims[2] || dims[2] > 1ull << 32)) return refuse("it has from 1 to 2^32 planes");
    if (planes && (strides[1] % strides[0] || strides[1] >> 40 || strides[1] < dims[1] * strides[0]))
        return refuse("its planes must lie a multiple of their rows' distance apart");
    if (!box[0] || !box[1] || box[0] > 256 || box[1] > 256) return refuse("a box has from 1 to 256 rows and columns");
    if (box_bytes % 16) return refuse("a box's rows must be a multiple of 16 bytes");
    if (row > 16 && box_bytes > row) return refuse("rows of a box that is swizzled must not be longer than the swizzle");
    if (row > 16 && box_bytes < row) return refuse("rows of a box that are shorter than its swizzle are not emulated");
    uint64_t num_planes = planes ? dims[2] : 1, plane_pitch = planes ? strides[1] : 0;
    if (!on_device(memory, (num_planes - 1) * plane_pitch + (dims[1] - 1) * strides[0] + dims[0] * element))
        return refuse("the matrix does not lie in one allocation of device memory");
    uint8_t outside = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ? 0 : 0xff;
    TileMap m = {TILE_MAP, (const char*)memory, dims[0] * element, dims[1], strides[0], num_planes, plane_pitch,
                 rank, element, box_bytes, box[1], row, outside};
    memset(map, 0, sizeof *map);
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}
} // namespace emulator

using namespace emulator;
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
    CALL;
    bool found = !strcmp(symbol, "cuTensorMapEncodeTiled");
    *function = found ? (void*)encode_tiled : nullptr;
    if (result) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
