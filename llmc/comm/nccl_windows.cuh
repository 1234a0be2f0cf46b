/*
nccl_windows.cuh - memory that NCCL's kernels on other GPUs read and write in place.

An all-gather usually copies through buffers of NCCL's own: a kernel here fills one, a kernel there empties it. Where all ranks
have registered a buffer of the same size together, as a *window*, a kernel knows the address of the same bytes on every other
GPU (of one machine, by NVLink), and needs no buffer, fewer multiprocessors and less time. This gains most for messages of some
hundred kilobytes, the size of a block's shard. Such memory has to come from ncclMemAlloc. So with --nccl-windows device_alloc
asks here first; and comm_share_memory registers what has been lent since, once a stage has all its memory.

An operation must give buffers at the same place of their windows on all ranks. Ours do, because all ranks allocate alike.
API: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html
*/
#ifndef LLMC_COMM_NCCL_WINDOWS_CUH
#define LLMC_COMM_NCCL_WINDOWS_CUH
#include "nccl_library.cuh"
#ifdef NCCL_WINDOW_FUNCTIONS
constexpr size_t NCCL_WINDOW_UNIT = 4096; // bytes: windows begin and end on multiples of it

struct NcclMemory {
    void* p;             // owned
    size_t bytes;
    Comm* comm;          // on which it becomes a window, a view; NULL: on that of comm_share_memory
    NcclLink* link;      // on whose communicator it is a window, a view; NULL: on none
    ncclWindow_t window;
};

// device_alloc calls this before cudaMalloc. NULL: the memory is not for exchange, too small for pages of its own, or used up.
static inline void* nccl_memory_alloc(void* self, size_t bytes, MemoryKind kind) {
    NcclEngine* e = (NcclEngine*)self;
    bool is_exchanged = kind == MEMORY_PARAMETERS || kind == MEMORY_GRADIENTS || kind == MEMORY_COMMUNICATION;
    NcclMemory m = { NULL, round_up(bytes, NCCL_WINDOW_UNIT), e->world->allocates, NULL, NULL };
    if (!(is_exchanged || m.comm) || bytes < NCCL_WINDOW_UNIT || nccl.ncclMemAlloc(&m.p, m.bytes) != ncclSuccess) return NULL;
    e->memory = (NcclMemory*)xrealloc(e->memory, (size_t)(e->num_memory + 1) * sizeof(NcclMemory));
    e->memory[e->num_memory++] = m;
    return m.p;
}
// device_free calls this before cudaFree. Returns false if p is not from here.
static inline bool nccl_memory_free(void* self, void* p) {
    NcclEngine* e = (NcclEngine*)self;
    int i = 0;
    while (i < e->num_memory && e->memory[i].p != p) i++;
    if (i == e->num_memory) return false;
    NcclMemory m = e->memory[i];
    device_synchronize(); // after this no operation uses it
    if (m.link) nccl_check(nccl.ncclCommWindowDeregister(m.link->nccl, m.window), "ncclCommWindowDeregister");
    nccl_check(nccl.ncclMemFree(p), "ncclMemFree");
    e->memory[i] = e->memory[--e->num_memory];
    return true;
}
static inline void nccl_lend_memory(NcclEngine* e) {
    cuda_lender.alloc = nccl_memory_alloc;
    cuda_lender.free = nccl_memory_free;
    cuda_lender.self = e;
}

// Returns true if kernels of other GPUs can use the window: then its handle is an address on the GPU. Where GPUs cannot reach
// one another's memory, NCCL 2.28 only notes the buffer on this rank, and the handle is an address on the host. (In 2.27 every
// handle is. From 2.29 on there is no window then.)
static inline bool nccl_is_shared(ncclWindow_t window) {
    cudaPointerAttributes of_handle;
    cuda_check(cudaPointerGetAttributes(&of_handle, (const void*)window), "ncclCommWindowRegister");
    return of_handle.type == cudaMemoryTypeDevice;
}

// Where the GPUs of these ranks cannot reach one another's memory, operations run without windows. The log says "windows" where
// all of the memory is shared, "registered buffers" where NCCL knows it, but perhaps for this rank alone, and else "no windows".
static inline void nccl_share_memory(Comm* c) {
    CommContext* w = c->world;
    NcclEngine* e = (NcclEngine*)w->nccl;
    size_t end = strlen(w->description);
    int made = 0, shared = 0;
    OpRecord op = flight_recorder_issue(w->recorder, c->name, "share-memory", 0, "bytes", -1);
    for (NcclMemory* m = e->memory; m < e->memory + e->num_memory; m++) {
        NcclLink* l = (NcclLink*)(m->comm ? m->comm : c)->link;
        if (m->link || l == NULL) continue;
        nccl_call(w, &op);
        ncclResult_t r = nccl.ncclCommWindowRegister(l->nccl, m->p, m->bytes, &m->window, NCCL_WIN_COLL_SYMMETRIC);
        nccl_called(w, r, "ncclCommWindowRegister");
        if (m->window == NULL) continue;
        m->link = l;
        made++;
        shared += nccl_is_shared(m->window);
    }
    flight_recorder_finish(w->recorder, &op);
    const char* what = shared == made ? "window" : "registered buffer";
    if (made == 0) snprintf(w->description + end, sizeof w->description - end, ", no windows between these GPUs");
    else snprintf(w->description + end, sizeof w->description - end, ", %d %s%s", made, what, made == 1 ? "" : "s");
}
#else // never called: nccl_load dies first
static inline void nccl_lend_memory(NcclEngine* e) { (void)e; }
static inline void nccl_share_memory(Comm* c) { (void)c; }
#endif
#endif
