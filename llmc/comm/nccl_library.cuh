/*
nccl_library.cuh - libnccl.so, and a communicator's part of it. Included by comm_nccl.cuh and nccl_windows.cuh.

The library is loaded when it is first needed: one GPU and --comm mpi do not need it. An older one may lack the
functions that register memory. Its calls block, with communicators as NCCL makes them by default: a launch is made by
the thread that asks for it, where otherwise NCCL makes a thread for each. A call that waits for other ranks is between
nccl_call and nccl_called, so that the watchdog sees it.
API: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
*/
#ifndef LLMC_COMM_NCCL_LIBRARY_CUH
#define LLMC_COMM_NCCL_LIBRARY_CUH
#include "comm_api.h"
#include "../device/cuda/check.cuh"
#include <dlfcn.h>
#include <nccl.h>
static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1),
              "llmc needs the headers of NCCL 2.18 or newer, or USE_NCCL=0");

// ---- its functions ----
// Every function of NCCL that is called. X is applied to each name.
#define NCCL_FUNCTIONS(X) \
    X(ncclGetVersion) X(ncclGetErrorString) X(ncclGetLastError) X(ncclGetUniqueId) \
    X(ncclCommInitRankConfig) X(ncclCommSplit) \
    X(ncclCommGetAsyncError) X(ncclCommUserRank) X(ncclCommCount) X(ncclCommDestroy) \
    X(ncclAllReduce) X(ncclReduceScatter) X(ncclAllGather) X(ncclBroadcast) X(ncclSend) X(ncclRecv) \
    X(ncclGroupStart) X(ncclGroupEnd)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3) // NULL where the library is older
#define NCCL_WINDOW_FUNCTIONS(X) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommWindowRegister) X(ncclCommWindowDeregister)
#endif
typedef struct {
#define X(name) decltype(&::name) name;
    NCCL_FUNCTIONS(X)
#ifdef NCCL_WINDOW_FUNCTIONS
    NCCL_WINDOW_FUNCTIONS(X)
#endif
#undef X
} NcclFunctions;
static NcclFunctions nccl; // NULL until nccl_load has found them

static inline void nccl_load(void) {
#ifdef CUDA_EMULATOR // its stand-in for NCCL is a part of the program
#define X(name) nccl.name = ::name;
#else
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    require(library != NULL, "libnccl.so.2 was not found: get it with sh dev/setup.sh, name its folder in "
                             "LD_LIBRARY_PATH, or use --comm mpi");
#define X(name) nccl.name = (decltype(nccl.name))dlsym(library, #name);
#endif
    NCCL_FUNCTIONS(X)
#ifdef NCCL_WINDOW_FUNCTIONS
    NCCL_WINDOW_FUNCTIONS(X)
#endif
#undef X
#define X(name) require(nccl.name != NULL, "libnccl.so.2 has no %s: install a newer NCCL, or use --comm mpi", #name);
    NCCL_FUNCTIONS(X)
#undef X
}

// ---- what belongs to a communicator ----

// An operation that the GPU may not have finished.
// started, finished: marks, which comm_operations.h owns; they may be freed once it is over.
typedef struct { OpRecord record; int started, finished; bool begun, over; } NcclOp;

typedef struct NcclLink {
    ncclComm_t nccl;         // owned
    cudaStream_t stream;     // owned
    cudaEvent_t ready;       // compute_stream has reached the issue of the latest operation, owned
    cudaEvent_t passed_on;   // the data of the latest operation with a shard on the host may go to its second stream,
                             // owned
    char* scratch;           // (NCCL_PIECE) for our own sums, owned; NULL where NCCL adds
    int* numbers;            // (N) device memory, for a split and for barriers, owned
    struct NcclLink **to, **from; // (N) for messages to and from each rank; NULL before comm_connect
    NcclOp* ops;             // (COMM_IN_FLIGHT) operation k has k % COMM_IN_FLIGHT, owned
    long long issued, waited, done; // operations so far; those before `waited` compute waits for;
                                    // those before `done` are over
    struct NcclLink* next;   // all of this process, the newest first
} NcclLink;

typedef struct NcclMemory NcclMemory; // of nccl_windows.cuh
typedef struct {
    CommContext* world;
    NcclMemory* memory;      // (num_memory) lent by nccl_windows.cuh, owned
    int num_memory;
    bool lends;              // memory for data that ranks exchange comes from ncclMemAlloc
    bool refused;            // ncclMemAlloc has failed
    size_t described;        // length of the description without what it says about registered memory
    NcclLink* links;         // owned
    cudaStream_t from_host, to_host; // for copies of shards that are on the host, owned
    NcclOp* awaited;         // the operation that the watchdog believes we wait for, a view; NULL: none
} NcclEngine;

static inline void nccl_check(ncclResult_t r, const char* what) {
    invariant(r == ncclSuccess, "NCCL: %s failed: %s (%s); set NCCL_DEBUG=WARN in the environment to see more", what,
              nccl.ncclGetErrorString(r), nccl.ncclGetLastError(NULL));
}

// Around a call in which NCCL may wait for other ranks. op: what the watchdog is told. r: what it returned.
static inline void nccl_call(CommContext* w, const OpRecord* op) { flight_recorder_wait_begin(w->recorder, op); }
static inline void nccl_called(CommContext* w, ncclResult_t r, const char* what) {
    flight_recorder_wait_end(w->recorder);
    nccl_check(r, what);
}
#endif
