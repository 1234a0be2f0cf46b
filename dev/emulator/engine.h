// engine.h - what the parts of the engine share: fibers, and how threads meet at a barrier or warp function.
#ifndef CUDA_EMULATOR_ENGINE_H
#define CUDA_EMULATOR_ENGINE_H
#include "emulator.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <array>
#include <deque>
#include <memory>
#include <vector>

// --- the sanitizers (sanitizer/common_interface_defs.h, tsan_interface.h), which do nothing in other builds ---
#define REAL(result, name, ...) extern "C" result name(__VA_ARGS__);
#define NOTHING(result, name, ...) [[maybe_unused]] static inline result name(__VA_ARGS__) { return (result)0; }
#ifdef EMULATOR_TSAN
#define OF_TSAN REAL
#else
#define OF_TSAN NOTHING
#endif
#ifdef EMULATOR_ASAN
#define OF_ASAN REAL
#else
#define OF_ASAN NOTHING
#endif
OF_TSAN(void*, __tsan_get_current_fiber)
OF_TSAN(void*, __tsan_create_fiber, unsigned)
OF_TSAN(void, __tsan_switch_to_fiber, void*, unsigned) // flag 1: the switch itself orders nothing
OF_TSAN(void, __tsan_set_fiber_name, void*, const char*)
OF_TSAN(void, __tsan_acquire, void*)
OF_TSAN(void, __tsan_release, void*)
OF_TSAN(void, AnnotateIgnoreReadsBegin, const char*, int)
OF_TSAN(void, AnnotateIgnoreReadsEnd, const char*, int)
OF_TSAN(void, AnnotateIgnoreWritesBegin, const char*, int)
OF_TSAN(void, AnnotateIgnoreWritesEnd, const char*, int)
OF_ASAN(void, __sanitizer_start_switch_fiber, void**, const void*, size_t)
OF_ASAN(void, __sanitizer_finish_switch_fiber, void*, const void**, size_t*)
OF_ASAN(void, __asan_poison_memory_region, const volatile void*, size_t)
OF_ASAN(void, __asan_unpoison_memory_region, const volatile void*, size_t)

namespace emulator {
// While one exists, ThreadSanitizer ignores what this CUDA thread does: for our own lists that several threads use. (The engine
// is not instrumented, but new, memcpy and the like are watched wherever they are called from.)
struct Unwatched {
    Unwatched() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
    ~Unwatched() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};

// A number that is stored in 16 bits.
static inline float value_of(Element type, uint16_t bits) {
    return type == Element::BF16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

constexpr int WARP = 32;
constexpr size_t PAGE = 4096;
constexpr int WARPGROUP = 128;
enum class State { RUNNABLE, AT_BLOCK_BARRIER, AT_WARP_FUNCTION, AT_WARPGROUP_FUNCTION, AT_MBARRIER, EXITED };

// hopper.cpp: products that a thread has issued and not waited for, and the sums that it may not use meanwhile
struct WgmmaOperands;
struct PendingProduct { std::shared_ptr<WgmmaOperands> operands; float* d; uint32_t* fragment; size_t group; };
struct PendingSums { float* d; std::vector<float> sums; int products; };
// A fragment of A that was settled: its contents, whether a fence came since, and how many products in flight read it.
struct Fragment { uint32_t* address; std::array<uint32_t, 4> elements; bool fenced; int products; };

struct Fiber : Thread {
    void* stack_pointer; // while another runs
    char* stack;      // (STACK_BYTES), owned, above a page that may not be touched
    State state;
    unsigned budget;  // jumps and branches until it hands over
    std::deque<PendingCopy> copies; // asynchronous ones, in order of issue
    size_t num_batches; // committed
    bool fenced;      // it did a __threadfence() since its last atomic
    std::vector<uint64_t*> new_barriers; // mbarriers that it made and has not yet fenced
    std::deque<PendingProduct> products; // of its warpgroup, in order
    std::vector<PendingSums> sums;
    std::vector<Fragment> fragments;
    size_t num_groups; // of products, committed
    bool wgmma_fenced; // since its sums were last within reach
    void* tsan;       // the sanitizers' own idea of this fiber
    void* asan;
    // while it waits: what it called, where, with what
    const char* function;
    Site site;
    unsigned mask;    // warp functions: the lanes that take part; mbarriers: the parity
    void* record;     // what it brings and where the answer goes; on its stack
    void (*combine)(Fiber* const* lanes);
};

// --- report.cpp ---
struct Place { char text[512]; };
Place source_place(const void* return_address);
void print_message(const Thread* thread, const char* place, const char* what);

// Waits until all lanes of the mask that have not exited have called the same function with the same mask. Just before they go
// on, combine(lanes) is called: 32 fibers in the order of their lanes, NULL for those that take no part.
void meet_warp(const char* function, unsigned mask, void* record, void (*combine)(Fiber* const* lanes), Site site);
// The same for the 128 threads of a warpgroup, all of which must come.
void meet_warpgroup(const char* function, void* record, void (*combine)(Fiber* const* threads), Site site);
void wait_at_mbarrier(uint64_t* barrier, unsigned parity, Site site); // returns once mbarrier_is_past says so
bool is_waited_at(const uint64_t* barrier);   // by some thread
// For ThreadSanitizer: what a thread (NULL: the running one) did so far happens before what others do from now on.
void publish(const void* address, const Fiber* thread);
void observe(const void* address);
bool in_shared(const void* p, size_t bytes);  // whether these bytes lie in one variable of the block's shared memory
char* shared_begin(void);
uint32_t random_number(void);

// --- hopper.cpp, as the engine sees it ---
bool mbarrier_is_past(const uint64_t* barrier, unsigned parity);
[[noreturn]] void report_mbarrier(const Fiber* waiting);
void hopper_begin_thread(Fiber* f);
void hopper_end_thread(Fiber* f);
bool hopper_progress(bool must); // lets some copies under way arrive; one at least if it must. Returns whether one did.
void hopper_end_block(void);
} // namespace emulator
#endif
