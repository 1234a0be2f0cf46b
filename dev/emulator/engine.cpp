/*
engine.cpp - runs blocks: fibers, barriers, shared memory, and the calls that keep the sanitizers informed.

It is always compiled without instrumentation. EMULATOR_ASAN or EMULATOR_TSAN says how the kernels are compiled.
Read in this order: run, run_blocks, run_block, then wait (a thread waits) and open_barriers (it may go on).
*/
#include "engine.h"
#include "runtime.h"
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace emulator {
constexpr unsigned MAX_THREADS = 1024, MAX_WORKERS = 64, MAX_SHARED_VARIABLES = 64;
constexpr size_t STACK_BYTES = 256 << 10;
// Shared memory of a block on compute capability 8.0 or 7.5: what every kernel may use, and what it may ask for.
constexpr size_t SHARED_DEFAULT = 48 << 10;
size_t largest_shared(void) { return capability() == 75 ? 64 << 10 : 163 << 10; }
constexpr size_t RED_ZONE = 128, ARENA_BYTES = 512 << 10;

// One OS thread that runs blocks, one at a time. It and its fibers are kept for later launches.
struct Worker {
    Fiber fibers[MAX_THREADS];
    void* stack_pointer;          // the scheduler's, while a fiber runs
    void *tsan, *asan;            // the sanitizers' idea of the scheduler
    const void* stack_bottom;
    size_t stack_size;
    int num_threads;
    const Configuration* launch;
    void (*body)(void*);
    void* closure;
    uint32_t random;
    uint64_t steps;               // jumps and branches that this block took
    char* arena;                  // (ARENA_BYTES) this block's shared memory, with red zones between the variables
    size_t arena_used, static_bytes, shared_limit;
    char* dynamic;                // (launch->shared_bytes) in the arena
    struct { const void* variable; char* copy; size_t bytes; } shared[MAX_SHARED_VARIABLES]; // this block's copies
    unsigned num_shared;
    alignas(64) char signal_stack[64 << 10];
    char order[MAX_THREADS], begin, end; // addresses by which TSan is told what is ordered
};
__thread Thread* self;
static __thread Worker* worker;
static Worker* workers[MAX_WORKERS];            // made when first needed, never freed
static std::mutex launch_lock;
static std::map<const void*, size_t> shared_limits; // kernel -> bytes of dynamic memory that it was allowed
static uint32_t launches;

uint64_t setting(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end;
    uint64_t value = strtoull(text, &end, 10);
    if (*end || *text == '-') { fprintf(stderr, "cuda emulator: %s must be a number, not '%s'\n", name, text); _exit(1); }
    return value;
}
static Fiber* current() { return static_cast<Fiber*>(self); }
static uint32_t next_random(uint32_t* state) { // xorshift32 (Marsaglia 2003)
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

// --- fibers ---
// Saves the registers that a function must keep and the stack pointer in *save; continues where `load` was saved.
extern "C" void emulator_switch_stack(void** save, void* load);
#if defined(__x86_64__)
__asm__(".globl emulator_switch_stack\n"
        "emulator_switch_stack:\n"
        "  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "  movq %rsp, (%rdi); movq %rsi, %rsp\n"
        "  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n"
        "  ret\n");
constexpr int RETURN_WORD = 6; // it lies above the registers; 16-byte alignment is then as at a call
#elif defined(__aarch64__)
__asm__(".globl emulator_switch_stack\n"
        "emulator_switch_stack:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]\n"
        "  mov x9, sp; str x9, [x0]; mov sp, x1\n"
        "  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n");
constexpr int RETURN_WORD = 11; // x30 holds the return address
#else
#error "emulator_switch_stack: write down here which registers this processor's functions keep"
#endif
// Prepares a stack for emulator_switch_stack, as if it had been saved just before `entry`.
static void* new_stack(char* top, void (*entry)(void)) {
    void** words = (void**)top - 24; // the rest may hold anything
    words[RETURN_WORD] = (void*)entry;
    words[RETURN_WORD + 1] = nullptr; // debuggers end a backtrace there
    return words;
}
static void to_scheduler(void) {
    Fiber* f = current();
    __sanitizer_start_switch_fiber(f->state == State::EXITED ? nullptr : &f->asan, worker->stack_bottom, worker->stack_size);
    __tsan_switch_to_fiber(worker->tsan, 1);
    self = nullptr;
    emulator_switch_stack(&f->stack_pointer, worker->stack_pointer);
    __sanitizer_finish_switch_fiber(f->asan, &worker->stack_bottom, &worker->stack_size);
}
static void to_fiber(Fiber* f) {
    self = f;
    __sanitizer_start_switch_fiber(&worker->asan, f->stack, STACK_BYTES);
    __tsan_switch_to_fiber(f->tsan, 1);
    emulator_switch_stack(&worker->stack_pointer, f->stack_pointer);
    __sanitizer_finish_switch_fiber(worker->asan, nullptr, nullptr);
}
static void fiber_main(void) {
    __sanitizer_finish_switch_fiber(nullptr, &worker->stack_bottom, &worker->stack_size);
    __tsan_acquire(&worker->begin);
    worker->body(worker->closure);
    hopper_end_thread(current());
    __tsan_release(&worker->end);
    current()->state = State::EXITED;
    to_scheduler();
}
// How far a thread runs until it hands over: up to 1024 jumps and branches, short turns as often as long ones.
static unsigned next_budget(Worker* w) {
    uint32_t r = next_random(&w->random);
    return 1 + (r >> 8) % (1u << r % 11);
}
static void prepare_fiber(Worker* w, int i, uint3 block_idx) {
    Fiber* f = &w->fibers[i];
    dim3 b = w->launch->block;
    unsigned n = (unsigned)i;
    f->state = State::RUNNABLE;
    f->kernel = w->launch->kernel;
    f->thread_idx = uint3{n % b.x, n / b.x % b.y, n / (b.x * b.y)};
    f->block_idx = block_idx;
    f->block_dim = b;
    f->grid_dim = w->launch->grid;
    f->lane = i % WARP;
    f->fenced = false;
    f->copies.clear();
    f->num_batches = 0;
    hopper_begin_thread(f);
    f->budget = next_budget(w);
    if (!f->stack) {
        char* pages = (char*)mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED || mprotect(pages, PAGE, PROT_NONE)) { perror("cuda emulator: a stack for a thread"); _exit(1); }
        f->stack = pages + PAGE;
        f->tsan = __tsan_create_fiber(0);
        __tsan_set_fiber_name(f->tsan, ("CUDA thread " + std::to_string(i)).c_str());
    }
    f->stack_pointer = new_stack(f->stack + STACK_BYTES, fiber_main);
}

// --- waiting ---
static void wait(State state, const char* function, unsigned mask, void* record, void (*combine)(Fiber* const*), Site site) {
    Fiber* f = current();
    f->state = state;
    f->function = function;
    f->mask = mask;
    f->record = record;
    f->combine = combine;
    f->site = site;
    to_scheduler();
}
void yield(void) { to_scheduler(); }
int block_barrier(const char* name, int predicate, Site site) {
    wait(State::AT_BLOCK_BARRIER, name, 0, &predicate, nullptr, site);
    return predicate;
}
void meet_warp(const char* function, unsigned mask, void* record, void (*combine)(Fiber* const*), Site site) {
    if (!(mask >> self->lane & 1)) fail(self, site, "%s: mask 0x%08x lacks the calling lane, %d", function, mask, self->lane);
    wait(State::AT_WARP_FUNCTION, function, mask, record, combine, site);
}
void meet_warpgroup(const char* function, void* record, void (*combine)(Fiber* const*), Site site) {
    wait(State::AT_WARPGROUP_FUNCTION, function, 0, record, combine, site);
}
void wait_at_mbarrier(uint64_t* barrier, unsigned parity, Site site) {
    while (!mbarrier_is_past(barrier, parity)) wait(State::AT_MBARRIER, "mbarrier_wait", parity, barrier, nullptr, site);
}
bool is_waited_at(const uint64_t* barrier) {
    for (int i = 0; i < worker->num_threads; i++)
        if (worker->fibers[i].state == State::AT_MBARRIER && worker->fibers[i].record == barrier) return true;
    return false;
}
unsigned active_mask(void) { return 1u << self->lane; } // what CUDA promises: nothing about other lanes

// Tells TSan that everything these fibers did happens before everything they will do. The address is the first fiber's own: its
// clock knows all earlier meetings there, so no group becomes ordered with threads that it did not meet.
static void order_fibers(Fiber* const* fibers, int count) {
    void* address = &worker->order[fibers[0] - worker->fibers];
    for (int i = 0; i < count; i++) { __tsan_switch_to_fiber(fibers[i]->tsan, 1); __tsan_release(address); }
    for (int i = 0; i < count; i++) { __tsan_switch_to_fiber(fibers[i]->tsan, 1); __tsan_acquire(address); }
    __tsan_switch_to_fiber(worker->tsan, 1);
}

// TSan intercepts strcmp, and nearly always both names are the same literal.
static bool same_text(const char* a, const char* b) {
    while (a != b && *a && *a == *b) a++, b++;
    return a == b || *a == *b;
}
// A warp function opens when every lane of its mask waits in the same one with the same mask, or has exited.
static bool waits_with(const Fiber* f, const Fiber* other) {
    return f->state == State::AT_WARP_FUNCTION && f->mask == other->mask && same_text(f->function, other->function);
}
static bool open_warp_function(Worker* w, Fiber* first) {
    Fiber* warp = first - first->lane;
    Fiber *lanes[WARP] = {}, *members[WARP] = {};
    int count = 0, size = std::min(WARP, w->num_threads - (int)(warp - w->fibers));
    for (int lane = 0; lane < size; lane++) {
        Fiber* f = &warp[lane];
        if (!(first->mask >> lane & 1) || f->state == State::EXITED) continue;
        if (!count && f != first) return false; // the mask's first lane has been asked
        if (!waits_with(f, first)) return false;
        lanes[lane] = members[count++] = f;
    }
    if (first->combine) first->combine(lanes);
    else order_fibers(members, count); // __syncwarp alone orders memory: shuffles and votes promise nothing about it
    for (int i = 0; i < count; i++) members[i]->state = State::RUNNABLE;
    return true;
}
static bool open_warpgroup_function(Worker* w, Fiber* first) {
    Fiber* members[WARPGROUP];
    int begin = (int)(first - w->fibers) / WARPGROUP * WARPGROUP;
    for (int i = 0; i < WARPGROUP; i++) {
        Fiber* f = members[i] = &w->fibers[begin + i];
        if (begin + i >= w->num_threads || f->state == State::EXITED)
            fail(first, first->site, "%s needs the whole warpgroup; thread %d of the block has exited or does not exist", first->function,
                 begin + i);
        if (f->state != State::AT_WARPGROUP_FUNCTION || !same_text(f->function, first->function)) return false;
    }
    first->combine(members);
    for (Fiber* f : members) f->state = State::RUNNABLE;
    return true;
}
static bool open_mbarrier(Fiber* f) {
    if (!mbarrier_is_past((const uint64_t*)f->record, f->mask)) return false;
    f->state = State::RUNNABLE;
    return true;
}
// The block's barrier opens when every thread is there; all must wait at the same one.
static bool open_block_barrier(Worker* w) {
    Fiber *members[MAX_THREADS], *exited = nullptr;
    int count = 0, predicates = 0;
    for (int i = 0; i < w->num_threads; i++) {
        Fiber* f = &w->fibers[i];
        if (f->state == State::EXITED) exited = f;
        else if (f->state == State::AT_BLOCK_BARRIER) members[count++] = f;
        else return false;
    }
    if (!count) return false;
    Fiber* first = members[0];
    if (exited)
        fail(first, first->site, "%s, which can never open: thread (%u,%u,%u) has left the kernel", first->function,
             exited->thread_idx.x, exited->thread_idx.y, exited->thread_idx.z);
    for (int i = 0; i < count; i++) {
        Fiber* f = members[i];
        if (f->site.line != first->site.line || !same_text(f->site.file, first->site.file) || !same_text(f->function, first->function))
            fail(f, f->site, "%s, while thread (%u,%u,%u) waits at another barrier, %s at %s:%d", f->function, first->thread_idx.x,
                 first->thread_idx.y, first->thread_idx.z, first->function, first->site.file, first->site.line);
        predicates += *(int*)f->record;
    }
    order_fibers(members, count);
    for (int i = 0; i < count; i++) { *(int*)members[i]->record = predicates; members[i]->state = State::RUNNABLE; }
    return true;
}
static bool open_barriers(Worker* w) {
    bool opened = false;
    for (int i = 0; i < w->num_threads; i++)
        switch (w->fibers[i].state) {
            case State::AT_WARP_FUNCTION: opened |= open_warp_function(w, &w->fibers[i]); break;
            case State::AT_WARPGROUP_FUNCTION: opened |= open_warpgroup_function(w, &w->fibers[i]); break;
            case State::AT_MBARRIER: opened |= open_mbarrier(&w->fibers[i]); break;
            default: break;
        }
    return open_block_barrier(w) || opened;
}

// --- asynchronous copies ---
void pipeline_add(void* destination, const void* bytes, size_t size) {
    Unwatched unwatched;
    PendingCopy copy = {destination, {}, size, current()->num_batches};
    memcpy(copy.bytes, bytes, size);
    current()->copies.push_back(copy);
}
void pipeline_commit(void) { current()->num_batches++; }
bool pipeline_next(size_t batches_that_may_wait, PendingCopy* copy) {
    Unwatched unwatched;
    Fiber* f = current();
    if (f->copies.empty() || f->copies.front().batch + batches_that_may_wait >= f->num_batches) return false;
    *copy = f->copies.front();
    f->copies.pop_front();
    return true;
}

// --- shared memory ---
static char* arena_take(Worker* w, size_t bytes, Site site) {
    size_t total = w->static_bytes + w->launch->shared_bytes;
    if (w->static_bytes > SHARED_DEFAULT || total > w->shared_limit)
        fail(self, site, "%zu bytes of static and %zu of dynamic shared memory; a block may have %zu, of them %zu static",
             w->static_bytes, w->launch->shared_bytes, w->shared_limit, SHARED_DEFAULT);
    char* p = w->arena + (w->arena_used += RED_ZONE);
    w->arena_used = (w->arena_used + bytes + RED_ZONE - 1) / RED_ZONE * RED_ZONE;
    __asan_unpoison_memory_region(p, bytes);
    for (size_t i = 0; i < bytes; i++) ((volatile char*)p)[i] = (char)0xff; // undefined for a block: NaN shows a read
    return p;
}
// A variable outside of functions would be made when the program starts, where there is no block to have it.
static Worker* worker_of_block(Site site) {
    if (!worker) fail(nullptr, site, "__shared__ variables must be declared inside of kernels and device functions");
    return worker;
}
void* static_shared(const void* variable, size_t bytes, size_t alignment, Site site) {
    Worker* w = worker_of_block(site);
    for (unsigned i = 0; i < w->num_shared; i++)
        if (w->shared[i].variable == variable) return w->shared[i].copy;
    if (w->num_shared == MAX_SHARED_VARIABLES) fail(self, site, "more than %u __shared__ variables", MAX_SHARED_VARIABLES);
    if (alignment > RED_ZONE) fail(self, site, "a __shared__ variable aligned to %zu; the emulator aligns to %zu", alignment, RED_ZONE);
    w->static_bytes += bytes;
    auto* own = &w->shared[w->num_shared++];
    own->variable = variable;
    own->bytes = bytes;
    return own->copy = arena_take(w, bytes, site);
}
bool in_shared(const void* pointer, size_t bytes) {
    const Worker* w = worker;
    const char* p = (const char*)pointer;
    auto within = [&](const char* begin, size_t size) { return p >= begin && bytes <= size && p <= begin + size - bytes; };
    if (within(w->dynamic, w->launch->shared_bytes)) return true;
    for (unsigned i = 0; i < w->num_shared; i++) if (within(w->shared[i].copy, w->shared[i].bytes)) return true;
    return false;
}
char* shared_begin(void) { return worker->arena; }
uint32_t random_number(void) { return next_random(&worker->random); }
void* dynamic_shared(size_t alignment, Site site) {
    Worker* w = worker_of_block(site);
    check_aligned(w->dynamic, alignment, site);
    return w->dynamic;
}
void allow_shared_memory(const void* kernel, size_t bytes) {
    if (bytes > largest_shared()) fail(nullptr, here(), "%zu bytes of shared memory asked for; a block has at most %zu", bytes, largest_shared());
    std::lock_guard<std::mutex> lock(launch_lock);
    shared_limits[kernel] = bytes;
}
// New memory for a block: returning the pages makes TSan forget the last block's accesses, poisoning makes ASan forget them.
static void arena_new(Worker* w) {
#ifdef EMULATOR_TSAN
    if (w->arena) munmap(w->arena, ARENA_BYTES);
    w->arena = nullptr;
#endif
    if (!w->arena) w->arena = (char*)mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (w->arena == MAP_FAILED) { perror("cuda emulator: shared memory"); _exit(1); }
    __asan_poison_memory_region(w->arena, ARENA_BYTES);
    w->arena_used = w->static_bytes = w->num_shared = 0;
    __tsan_release(&w->begin);
    w->dynamic = arena_take(w, w->launch->shared_bytes, w->launch->site);
}

// --- blocks ---
// Reports a deadlock: some thread waits at an mbarrier, or in a warp function for a lane that waits elsewhere.
[[noreturn]] static void report_warpgroup(Worker* w, const Fiber* f) {
    const Fiber* missing = &w->fibers[(f - w->fibers) / WARPGROUP * WARPGROUP];
    while (missing->state == State::AT_WARPGROUP_FUNCTION && same_text(missing->function, f->function)) missing++;
    fail(f, f->site, "%s can never go on: it waits for thread %d of the block, which is in %s at %s:%d", f->function,
         (int)(missing - w->fibers), missing->function, missing->site.file, missing->site.line);
}
[[noreturn]] static void report_stuck(Worker* w) {
    Fiber* f = w->fibers;
    for (int i = 0; i < w->num_threads; i++) if (f[i].state == State::AT_MBARRIER) report_mbarrier(&f[i]);
    for (int i = 0; i < w->num_threads; i++) if (f[i].state == State::AT_WARPGROUP_FUNCTION) report_warpgroup(w, &f[i]);
    while (f->state != State::AT_WARP_FUNCTION) f++;
    const Fiber* missing = f - f->lane;
    while (!(f->mask >> missing->lane & 1) || missing->state == State::EXITED || waits_with(missing, f)) missing++;
    fail(f, f->site, "%s with mask 0x%08x can never go on: it waits for lane %d, which is in %s (mask 0x%08x) at %s:%d", f->function,
         f->mask, missing->lane, missing->function, missing->mask, missing->site.file, missing->site.line);
}
static void run_block(Worker* w, uint3 block_idx) {
    int n = w->num_threads;
    w->steps = 0;
    arena_new(w);
    for (int i = 0; i < n; i++) prepare_fiber(w, i, block_idx);
    for (;;) { // a round lets every thread run until it waits, each round in another order
        int at = (int)(next_random(&w->random) % (unsigned)n), step = (int)(next_random(&w->random) % (unsigned)n);
        while (std::gcd(step, n) != 1) step++;
        for (int k = 0; k < n; k++, at = at + step < n ? at + step : at + step - n)
            if (w->fibers[at].state == State::RUNNABLE) to_fiber(&w->fibers[at]);
        bool runnable = false, alive = false;
        for (int i = 0; i < n; i++) {
            runnable |= w->fibers[i].state == State::RUNNABLE;
            alive |= w->fibers[i].state != State::EXITED;
        }
        if (!alive) break;
        bool arrived = hopper_progress(false), opened = open_barriers(w);
        if (!arrived && !opened && !runnable && !hopper_progress(true)) report_stuck(w);
    }
    hopper_end_block();
}
// Worker number `first` of `count` runs every count-th block of the shuffled order.
static void run_blocks(Worker* w, const std::vector<uint32_t>* order, size_t first, size_t count) {
    worker = w;
    w->tsan = __tsan_get_current_fiber();
    stack_t own = {w->signal_stack, 0, sizeof w->signal_stack}, old;
    sigaltstack(&own, &old);
    dim3 g = w->launch->grid;
    for (size_t i = first; i < order->size(); i += count) {
        uint32_t b = (*order)[i];
        run_block(w, uint3{b % g.x, b / g.x % g.y, b / g.x / g.y});
    }
    __tsan_acquire(&w->end);
    sigaltstack(&old, nullptr);
    worker = nullptr;
}
// A kernel for which nothing was set may have SHARED_DEFAULT, static and dynamic together. Once cudaFuncSetAttribute has set its
// dynamic memory, be it less, that is the limit of the dynamic memory, and static memory comes on top, up to largest_shared().
struct SharedLimit { size_t dynamic, total; };
static SharedLimit shared_limit(const void* kernel) {
    auto found = shared_limits.find(kernel);
    return found == shared_limits.end() ? SharedLimit{SHARED_DEFAULT, SHARED_DEFAULT} : SharedLimit{found->second, largest_shared()};
}
void check_configuration(const Configuration& c, const void* kernel) {
    std::lock_guard<std::mutex> lock(launch_lock);
    size_t most_shared = shared_limit(kernel).dynamic;
    dim3 g = c.grid, b = c.block;
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535)
        fail(nullptr, c.site, "launch of %s: grid (%u,%u,%u); CUDA takes 1 to (2147483647,65535,65535)", c.kernel, g.x, g.y, g.z);
    if (!b.x || !b.y || !b.z || b.x > 1024 || b.y > 1024 || b.z > 64 || (uint64_t)b.x * b.y * b.z > MAX_THREADS)
        fail(nullptr, c.site, "launch of %s: block (%u,%u,%u); CUDA takes 1 to (1024,1024,64), at most 1024 threads", c.kernel, b.x, b.y, b.z);
    if (c.shared_bytes > most_shared)
        fail(nullptr, c.site, "launch of %s: %zu bytes of dynamic shared memory; it may have %zu (cudaFuncSetAttribute sets it, to at most %zu)",
             c.kernel, c.shared_bytes, most_shared, largest_shared());
}
void run(const Configuration& c, const void* kernel, void (*body)(void*), void* closure) {
    std::lock_guard<std::mutex> lock(launch_lock);
    size_t blocks = (size_t)c.grid.x * c.grid.y * c.grid.z;
    size_t cores = std::max(2u, std::thread::hardware_concurrency()); // at least 2: TSan sees races only between workers
    size_t count = std::min<size_t>(blocks, std::max<size_t>(1, std::min<size_t>(setting("CUDA_EMULATOR_WORKERS", cores), MAX_WORKERS)));
    uint32_t random = (uint32_t)(setting("CUDA_EMULATOR_SEED", 1) * 2654435761u + ++launches * 40503u) | 1;
    std::vector<uint32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = blocks; i > 1; i--) std::swap(order[i - 1], order[next_random(&random) % i]);
    for (size_t i = 0; i < count; i++) {
        if (!workers[i]) workers[i] = new Worker();
        Worker* w = workers[i];
        w->launch = &c;
        w->shared_limit = shared_limit(kernel).total;
        w->body = body;
        w->closure = closure;
        w->num_threads = (int)(c.block.x * c.block.y * c.block.z);
        w->random = (random + (uint32_t)i * 2246822519u) | 1;
    }
    if (count == 1) { run_blocks(workers[0], &order, 0, 1); return; } // on the caller's thread: simple to step through
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; i++) threads.emplace_back(run_blocks, workers[i], &order, i, count);
    for (auto& t : threads) t.join();
}

// --- atomics and fences ---
void publish(const void* address, const Fiber* thread) {
    if (thread) __tsan_switch_to_fiber(thread->tsan, 1);
    __tsan_release(const_cast<void*>(address));
    if (thread) __tsan_switch_to_fiber(self ? current()->tsan : worker->tsan, 1);
}
void observe(const void* address) { __tsan_acquire(const_cast<void*>(address)); }
void thread_fence(void) { if (self) current()->fenced = true; }
void before_atomic(const volatile void* address) {
    if (!self || !current()->fenced) return;
    __tsan_release(const_cast<void*>(address));
    current()->fenced = false;
}
void after_atomic(const volatile void* address) { __tsan_acquire(const_cast<void*>(address)); }
} // namespace emulator

// --- called by instrumented code ---
using namespace emulator;
extern "C" {
// At every jump and branch (-fsanitize-coverage=trace-pc): counts steps, and hands over now and then.
void __sanitizer_cov_trace_pc(void) {
    if (!self || --current()->budget) return;
    static const uint64_t limit = setting("CUDA_EMULATOR_STEPS", 1000000000);
    if ((worker->steps += current()->budget = next_budget(worker)) > limit) {
        print_message(self, source_place(__builtin_return_address(0)).text,
                      "the block took too many steps: an endless loop? (CUDA_EMULATOR_STEPS sets the limit)");
        _exit(1);
    }
    to_scheduler();
}
}
