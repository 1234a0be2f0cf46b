// engine.h - what the parts of the engine share: fibers, and the meeting of threads at a barrier or warp function.
#ifndef CUDA_EMULATOR_ENGINE_H
#define CUDA_EMULATOR_ENGINE_H
#include "emulator.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <deque>

namespace emulator {
constexpr int WARP = 32;
constexpr size_t PAGE = 4096;
enum class State { RUNNABLE, AT_BLOCK_BARRIER, AT_WARP_FUNCTION, EXITED };

struct Fiber : Thread {
    void* stack_pointer; // while another runs
    char* stack;      // (STACK_BYTES), owned, above a page that may not be touched
    State state;
    unsigned budget;  // jumps and branches until it hands over
    std::deque<PendingCopy> copies; // asynchronous ones, in the order in which they were asked for
    size_t num_batches; // committed
    bool fenced;      // it did a __threadfence() since its last atomic
    void* tsan;       // the sanitizers' own idea of this fiber
    void* asan;
    // while it waits: what it called, where, with what
    const char* function;
    Site site;
    unsigned mask;    // warp functions: the lanes that take part
    void* record;     // what it brings and where the answer goes; on its stack
    void (*combine)(Fiber* const* lanes);
};

// --- report.cpp ---
struct Place { char text[512]; };
Place source_place(const void* return_address);
void print_message(const Thread* thread, const char* place, const char* what);

// Waits until all lanes of the mask that have not exited have called the same function with the same mask. The last thing
// before they go on is combine(lanes): 32 fibers in the order of their lanes, NULL for those that take no part.
void meet_warp(const char* function, unsigned mask, void* record, void (*combine)(Fiber* const* lanes), Site site);
} // namespace emulator
#endif
