/*
nccl_windows.cuh - memory that NCCL's kernels on other GPUs read and write in place.

An all-gather usually copies through buffers of NCCL's own: a kernel here fills one, a kernel there empties it. Where
all ranks have registered a buffer of the same size together, as a *window*, a kernel knows the address of the same
bytes on every other GPU (of one machine, by NVLink), and needs no buffer, fewer multiprocessors and less time. This
gains most for messages of some hundred kilobytes, the size of a block's shard. Such memory has to come from
ncclMemAlloc, which rounds sizes up to a page of the GPU (2 MB), as cudaMalloc does for large arrays. So device_alloc
asks here first, and nccl_register_memory registers what has been lent since, once a program has all its memory and
before its first step.

Registering is collective: a rank that does it waits for the others. So ranks decide together, over the control
connection: before any memory is lent, before it is registered, and afterwards. If one of them cannot, none does, and
the run goes on without windows. (A rank whose registration fails while those of the others wait for it cannot tell
them: the watchdog ends that run.)

An operation must give buffers at the same place of their windows on all ranks. Ours do, because all ranks make the same
allocations.
API: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html
*/
#ifndef LLMC_COMM_NCCL_WINDOWS_CUH
#define LLMC_COMM_NCCL_WINDOWS_CUH
#include "nccl_library.cuh"
#include <stdarg.h>

// Ends the description with a remark about memory.
__attribute__((format(printf, 2, 3))) static inline void nccl_describe_memory(NcclEngine* e, const char* format, ...) {
    CommContext* w = e->world;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->description + e->described, sizeof w->description - e->described, format, arguments);
    va_end(arguments);
}

#ifdef NCCL_WINDOW_FUNCTIONS
constexpr size_t NCCL_WINDOW_UNIT = 4096; // bytes: windows begin and end on multiples of it
// 2.27 was the first to make windows, and some runs hung with them
constexpr int NCCL_REGISTERS_FROM = NCCL_VERSION(2, 28, 0);
// Windows make NCCL copy large all-gathers between Blackwell GPUs by their copy engines. The first such copy between
// two GPUs may wait forever in versions from the first of these up to the second:
// https://github.com/NVIDIA/nccl/issues/2241
constexpr int NCCL_MAY_HANG = NCCL_VERSION(2, 29, 0), NCCL_HANGS_NO_MORE = NCCL_VERSION(2, 31, 2);

struct NcclMemory {
    void* p;             // owned
    size_t bytes;
    Comm* comm;          // on which it becomes a window, a view; NULL: on that of nccl_register_memory
    NcclLink* link;      // on whose communicator it is a window, a view; NULL: on none
    ncclWindow_t window;
};

// device_alloc calls this before cudaMalloc. NULL: the memory is not for exchange, too small for pages of its own,
// or used up.
static inline void* nccl_memory_alloc(void* self, size_t bytes, MemoryKind kind) {
    NcclEngine* e = (NcclEngine*)self;
    bool is_exchanged = kind == MEMORY_PARAMETERS || kind == MEMORY_GRADIENTS || kind == MEMORY_COMMUNICATION;
    NcclMemory m = { NULL, round_up(bytes, NCCL_WINDOW_UNIT), e->world->allocates, NULL, NULL };
    if (!(is_exchanged || m.comm) || bytes < NCCL_WINDOW_UNIT) return NULL;
    if (nccl.ncclMemAlloc(&m.p, m.bytes) != ncclSuccess) {
        e->refused = true;
        return NULL;
    }
    e->memory = grown_array(NcclMemory, e->memory, e->num_memory);
    e->memory[e->num_memory++] = m;
    return m.p;
}
static inline void nccl_deregister(NcclMemory* m) {
    if (m->link) nccl_check(nccl.ncclCommWindowDeregister(m->link->nccl, m->window), "ncclCommWindowDeregister");
    m->link = NULL;
}
// device_free calls this before cudaFree. Returns false if p is not from here.
static inline bool nccl_memory_free(void* self, void* p) {
    NcclEngine* e = (NcclEngine*)self;
    int i = 0;
    while (i < e->num_memory && e->memory[i].p != p) i++;
    if (i == e->num_memory) return false;
    device_synchronize(); // after this no operation uses it
    nccl_deregister(&e->memory[i]);
    nccl_check(nccl.ncclMemFree(p), "ncclMemFree");
    e->memory[i] = e->memory[--e->num_memory];
    return true;
}

// Lends memory from now on, if the library of every rank can register it, and NCCL's own variable NCCL_WIN_ENABLE does
// not forbid it. version: that of this rank's library. Collective.
static inline void nccl_offer_memory(Comm* world, int version) {
    CommContext* w = world->world;
    NcclEngine* e = (NcclEngine*)w->nccl;
    bool has_functions = nccl.ncclMemAlloc && nccl.ncclMemFree && nccl.ncclCommWindowRegister
                         && nccl.ncclCommWindowDeregister;
    const char* enable = getenv("NCCL_WIN_ENABLE");
    bool is_off = enable && strcmp(enable, "0") == 0, is_equal = true;
    int own = is_off ? 0 : version;
    e->described = strlen(w->description);
    if (world->size == 1) return;
    int* all = (int*)control_all_gather(w->control, &own, sizeof own);
    for (int q = 0; q < world->size; q++) is_equal = is_equal && all[q] == own;
    free(all);
    if (!is_equal)
        nccl_describe_memory(e, ", memory not registered: ranks differ in NCCL's version or in NCCL_WIN_ENABLE");
    else if (is_off) nccl_describe_memory(e, ", memory not registered: NCCL_WIN_ENABLE is 0");
    else if (!has_functions || version < NCCL_REGISTERS_FROM)
        nccl_describe_memory(e, ", memory not registered: this NCCL is older than 2.28");
    else if (version >= NCCL_MAY_HANG && version < NCCL_HANGS_NO_MORE)
        nccl_describe_memory(e, ", memory not registered: with it NCCL 2.29 to 2.31.1 may hang");
    else {
        e->lends = true;
        cuda_lender.alloc = nccl_memory_alloc;
        cuda_lender.free = nccl_memory_free;
        cuda_lender.self = e;
    }
}

// Returns true if kernels of other GPUs can use the window: then its handle is an address on the GPU. Where GPUs cannot
// reach one another's memory, NCCL 2.28 only notes the buffer on this rank, and the handle is an address on the host.
// (From 2.29 on there is no window then.)
static inline bool nccl_is_shared(ncclWindow_t window) {
    cudaPointerAttributes of_handle;
    cuda_check(cudaPointerGetAttributes(&of_handle, (const void*)window), "ncclCommWindowRegister");
    return of_handle.type == cudaMemoryTypeDevice;
}

// Of a rank: its buffers for exchange with others, how many of them are registered,
// and of these how many other GPUs reach.
typedef struct { int buffers, registered, shared; ncclResult_t result; } NcclRegistered;

// Registers what is not registered yet, up to the first failure.
static inline NcclRegistered nccl_register_own(CommContext* w, Comm* c) {
    NcclEngine* e = (NcclEngine*)w->nccl;
    NcclRegistered own = { 0, 0, 0, ncclSuccess };
    OpRecord op = flight_recorder_issue(w->recorder, c->name, "register-memory", 0, "bytes", -1);
    for (NcclMemory* m = e->memory; m < e->memory + e->num_memory; m++) {
        const Comm* on = m->comm ? m->comm : c;
        NcclLink* l = (NcclLink*)on->link;
        if (l == NULL || on->size == 1) continue;
        own.buffers++;
        if (m->link == NULL && own.result == ncclSuccess) {
            flight_recorder_wait_begin(w->recorder, &op);
            own.result = nccl.ncclCommWindowRegister(l->nccl, m->p, m->bytes, &m->window, NCCL_WIN_COLL_SYMMETRIC);
            flight_recorder_wait_end(w->recorder);
            if (own.result == ncclSuccess && m->window) m->link = l;
        }
        own.registered += m->link != NULL;
        own.shared += m->link && nccl_is_shared(m->window);
    }
    flight_recorder_finish(w->recorder, &op);
    return own;
}

// Describes the ranks' memory (N) when no registration has failed: by the worst case of any rank with such buffers.
static inline void nccl_describe_registered(NcclEngine* e, const NcclRegistered* all, int N) {
    bool some = false, none = false, alone = false;
    int most = 0;
    for (int q = 0; q < N; q++) {
        if (all[q].buffers > all[most].buffers) most = q;
        some = some || all[q].buffers > 0;
        none = none || (all[q].buffers > 0 && all[q].registered == 0);
        alone = alone || all[q].shared < all[q].registered;
    }
    if (!some) nccl_describe_memory(e, ", no memory to register");
    else if (none) nccl_describe_memory(e, ", memory not registered: these GPUs cannot reach one another's");
    else if (alone)
        nccl_describe_memory(e, ", memory registered by each rank alone: these GPUs cannot reach one another's");
    else nccl_describe_memory(e, ", memory registered (%d of %d buffers)", all[most].registered, all[most].buffers);
}

static inline void nccl_register_memory(Comm* world) {
    CommContext* w = world->world;
    NcclEngine* e = (NcclEngine*)w->nccl;
    int N = world->size, failed = -1;
    if (!e->lends) return; // nccl_offer_memory has said why
    bool* refused = (bool*)control_all_gather(w->control, &e->refused, sizeof e->refused);
    for (int q = N - 1; q >= 0; q--) if (refused[q]) failed = q;
    free(refused);
    if (failed >= 0) {
        nccl_describe_memory(e, ", memory not registered: ncclMemAlloc failed on rank %d", failed);
        return;
    }
    NcclRegistered own = nccl_register_own(w, w->registers ? w->registers : world);
    NcclRegistered* all = (NcclRegistered*)control_all_gather(w->control, &own, sizeof own);
    for (int q = N - 1; q >= 0; q--) if (all[q].result != ncclSuccess) failed = q;
    if (failed < 0) nccl_describe_registered(e, all, N);
    else {
        for (NcclMemory* m = e->memory; m < e->memory + e->num_memory; m++) nccl_deregister(m);
        nccl_describe_memory(e, ", memory not registered: ncclCommWindowRegister failed on rank %d (%s)", failed,
                             nccl.ncclGetErrorString(all[failed].result));
    }
    free(all);
}
#else // this program was built with the headers of an older NCCL
static inline void nccl_offer_memory(Comm* world, int version) {
    NcclEngine* e = (NcclEngine*)world->world->nccl;
    (void)version;
    e->described = strlen(world->world->description);
    if (world->size > 1) nccl_describe_memory(e, ", memory not registered: that takes a program built with NCCL 2.28");
}
static inline void nccl_register_memory(Comm* world) { (void)world; }
#endif
#endif
