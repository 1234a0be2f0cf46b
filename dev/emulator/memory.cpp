// memory.cpp - cudaMalloc and related functions. Device memory is a range of addresses that is inaccessible while host code runs;
// each allocation lies between two pages that are always inaccessible. No address is used twice, so that late uses are found.
// New memory holds 0xff, because CUDA does not promise zeros. Always compiled without instrumentation.
#include "engine.h"
#include "runtime.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace emulator {
constexpr size_t ADDRESSES = (size_t)64 << 30;              // much more than is ever allocated at a time
static char *arena, *arena_next;                            // (ADDRESSES) and how far they have been given out
static size_t in_use;
static bool is_open;
typedef std::map<const char*, size_t> Blocks;               // address -> bytes
static Blocks live, freed, pinned;

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static size_t memory_limit(void) {
    static const size_t megabytes = setting("CUDA_EMULATOR_MEMORY", 4096);
    return megabytes << 20;
}
static void protect(const char* p, size_t bytes, int protection) {
    if (mprotect((void*)p, pages(bytes), protection)) { perror("cuda emulator: mprotect"); _exit(1); }
}
void open_memory(void) {
    if (!is_open) for (auto& block : live) protect(block.first, block.second, PROT_READ | PROT_WRITE);
    is_open = true;
}
void close_memory(void) {
    if (is_open) for (auto& block : live) protect(block.first, block.second, PROT_NONE);
    is_open = false;
}

// The block that p lies in, or ends, or (slack) the page before or after it.
static Blocks::const_iterator block_around(const Blocks& blocks, const char* p, size_t slack) {
    auto after = blocks.upper_bound(p + slack);
    if (after == blocks.begin()) return blocks.end();
    --after;
    return p <= after->first + after->second + slack ? after : blocks.end();
}
Block find_block(const void* pointer) {
    const char* p = (const char*)pointer;
    auto block = block_around(live, p, 0);
    if (block != live.end()) return {Where::DEVICE, block->first, block->second};
    block = block_around(pinned, p, 0);
    if (block != pinned.end()) return {Where::PINNED, block->first, block->second};
    return {Where::HOST, nullptr, 0};
}
void describe(const void* pointer, char* text, size_t size) {
    const char* p = (const char*)pointer;
    text[0] = 0;
    if (!arena || p < arena || p >= arena + ADDRESSES) return;
    snprintf(text, size, "device memory that was never allocated");
    for (const Blocks* blocks : {&live, &freed}) {
        auto block = block_around(*blocks, p, 2 * PAGE - 1);
        if (block == blocks->end()) continue;
        long long byte = p - block->first;
        snprintf(text, size, "byte %lld of an allocation of %zu bytes of device memory%s", byte, block->second,
                 blocks == &freed ? " that was freed" : "");
        if (byte >= 0 && byte < (long long)block->second) return;
    }
}
bool on_device(const void* p, size_t bytes) {
    Call call;
    Block block = find_block(p);
    return block.where == Where::DEVICE && (size_t)(block.begin + block.bytes - (const char*)p) >= bytes;
}

// Addresses for `bytes`, or NULL; they may be touched only if memory is open.
static char* take(size_t bytes) {
    if (!arena) {
        void* p = mmap(nullptr, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) { perror("cuda emulator: addresses for device memory"); _exit(1); }
        arena = arena_next = (char*)p;
    }
    // Large blocks use large pages, so that opening and closing memory is faster.
    const size_t LARGE_PAGE = 2 << 20;
    bool large = bytes >= LARGE_PAGE;
    if (large) arena_next += LARGE_PAGE - PAGE - (uintptr_t)arena_next % LARGE_PAGE;
    size_t whole = PAGE + pages(bytes) + PAGE;
    if (whole > (size_t)(arena + ADDRESSES - arena_next)) return nullptr;
    char* p = arena_next + PAGE;
    if (large) madvise(p, pages(bytes), MADV_HUGEPAGE); // only a hint, so its result is not checked
    __asan_poison_memory_region(arena_next, whole);
    __asan_unpoison_memory_region(p, bytes);
    arena_next += whole;
    return p;
}
static cudaError_t allocate_on_device(Call& call, void** p, size_t bytes) {
    if (bytes > memory_limit() - in_use) return remember(cudaErrorMemoryAllocation);
    char* memory = take(bytes);
    if (!memory) return call.fail(cudaErrorMemoryAllocation, "no addresses are left, for none is given twice");
    protect(memory, bytes, PROT_READ | PROT_WRITE);
    memset(memory, 0xff, bytes);
    live[memory] = bytes;
    in_use += bytes;
    if (!is_open) protect(memory, bytes, PROT_NONE);
    *p = memory;
    return cudaSuccess;
}
static cudaError_t allocate(Call&& call, Where where, void** p, size_t bytes) {
    if (call.error) return call.error;
    if (!p) return call.fail(cudaErrorInvalidValue, "the pointer to the result is NULL");
    *p = nullptr;
    if (!bytes) return cudaSuccess;
    if (cudaError_t error = refuse_in_capture(call)) return error;
    if (where == Where::DEVICE) return allocate_on_device(call, p, bytes);
    if (posix_memalign(p, 256, bytes)) return remember(cudaErrorMemoryAllocation);
    memset(*p, 0xff, bytes);
    pinned[(char*)*p] = bytes;
    return cudaSuccess;
}
// Removes p from the list, after all work issued before has been done.
static cudaError_t forget(Call& call, Blocks& blocks, const void* p, const char* what, size_t* bytes) {
    if (call.error) return call.error;
    auto block = blocks.find((const char*)p);
    if (block == blocks.end()) return call.fail(cudaErrorInvalidValue, "%p is not the beginning of %s", p, what);
    *bytes = block->second;
    if (cudaError_t error = refuse_in_capture(call)) return error;
    cudaError_t error = wait_for_all(call);
    blocks.erase((const char*)p);
    return error;
}
} // namespace emulator

using namespace emulator;
extern "C" {
cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(Call(), Where::DEVICE, p, bytes); }
cudaError_t cudaFree(void* p) {
    Call call;
    size_t bytes;
    if (!p) return remember(call.error);
    if (cudaError_t error = forget(call, live, p, "device memory", &bytes)) return error;
    freed[(char*)p] = bytes;
    in_use -= bytes;
    __asan_poison_memory_region(p, bytes);
    // new pages in its place: the old ones go back to the system
    if (mmap(p, pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        perror("cuda emulator: giving back device memory");
        _exit(1);
    }
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return allocate(Call(), Where::PINNED, p, bytes); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMallocHost(p, bytes); }
cudaError_t cudaFreeHost(void* p) {
    Call call;
    size_t bytes;
    if (!p) return remember(call.error);
    if (cudaError_t error = forget(call, pinned, p, "pinned host memory", &bytes)) return error;
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    CALL;
    *total = memory_limit();
    *available = *total - in_use;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
    CALL;
    Block block = find_block(p);
    bool device = block.where == Where::DEVICE, host = block.where == Where::PINNED;
    *attributes = cudaPointerAttributes{};
    attributes->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->devicePointer = device || host ? (void*)p : nullptr;
    attributes->hostPointer = host ? (void*)p : nullptr;
    return cudaSuccess;
}
}
