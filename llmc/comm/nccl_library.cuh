/*
nccl_library.cuh - libnccl.so, and what a communicator has of it. Included by nccl.cuh and nccl_windows.cuh.

The library is loaded when it is first needed: one GPU and --comm mpi do not need it. Communicators are non-blocking: a call
may return before it has finished, and nccl_await then waits for it where the watchdog sees that.
API: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
*/
#ifndef LLMC_COMM_NCCL_LIBRARY_CUH
#define LLMC_COMM_NCCL_LIBRARY_CUH
#include "comm_api.h"
#include "../device/cuda/check.cuh"
#include <dlfcn.h>
#include <nccl.h>
static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1), "llmc needs the headers of NCCL 2.18 or newer, or USE_NCCL=0");

// ---- its functions ----
// Every function of NCCL that is called. X is applied to each name.
#define NCCL_FUNCTIONS(X) \
    X(ncclGetVersion) X(ncclGetErrorString) X(ncclGetLastError) X(ncclGetUniqueId) X(ncclCommInitRankConfig) X(ncclCommSplit) \
    X(ncclCommGetAsyncError) X(ncclCommUserRank) X(ncclCommCount) X(ncclCommFinalize) X(ncclCommDestroy) \
    X(ncclAllReduce) X(ncclReduceScatter) X(ncclAllGather) X(ncclBroadcast) X(ncclSend) X(ncclRecv) \
    X(ncclGroupStart) X(ncclGroupEnd)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3) // only --nccl-windows needs these
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

static inline void nccl_load(bool windows) {
#ifdef CUDA_EMULATOR // its stand-in for NCCL is a part of the program
#define X(name) nccl.name = ::name;
#else
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    require(library != NULL, "libnccl.so.2 was not found: get it with sh dev/setup.sh, name its folder in LD_LIBRARY_PATH, or"
            " use --comm mpi");
#define X(name) \
    nccl.name = (decltype(nccl.name))dlsym(library, #name); \
    require(nccl.name != NULL, "libnccl.so.2 has no %s: install a newer NCCL, or use --comm mpi", #name);
#endif
    NCCL_FUNCTIONS(X)
    if (!windows) return;
#ifdef NCCL_WINDOW_FUNCTIONS
    NCCL_WINDOW_FUNCTIONS(X)
#else
    die("--nccl-windows needs NCCL 2.27, and this program was built with headers of %d.%d: build it with newer ones, or leave"
        " the option out", NCCL_MAJOR, NCCL_MINOR);
#endif
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
    cudaEvent_t passed_on;   // the data of the latest operation with a shard on the host may go to its second stream, owned
    char* scratch;           // (NCCL_PIECE) for our own sums, owned; NULL where NCCL adds
    int* numbers;            // (N) device memory, for a split and for barriers, owned
    struct NcclLink **to, **from; // (N) for messages to and from each rank; NULL before comm_connect
    NcclOp* ops;             // (COMM_IN_FLIGHT) operation k has k % COMM_IN_FLIGHT, owned
    long long issued, waited, done; // operations so far; those before `waited` compute waits for; those before `done` are over
    struct NcclLink* next;   // all of this process, the newest first
} NcclLink;

typedef struct NcclMemory NcclMemory; // of nccl_windows.cuh
typedef struct {
    CommContext* world;
    NcclMemory* memory;      // (num_memory) what nccl_windows.cuh has lent, owned
    int num_memory;
    NcclLink* links;         // owned
    cudaStream_t from_host, to_host; // for copies of shards that are on the host, owned
    NcclOp* awaited;         // what the watchdog has been told that we wait for, a view; NULL: nothing
} NcclEngine;

static inline void nccl_check(ncclResult_t r, const char* what) {
    require(r == ncclSuccess, "NCCL: %s failed: %s (%s); set NCCL_DEBUG=WARN in the environment to see more", what,
            nccl.ncclGetErrorString(r), nccl.ncclGetLastError(NULL));
}

// Seconds for which the host asks NCCL over and over before it naps. A launch takes less: some tens of microseconds, in a
// thread that NCCL makes for it. A nap of 20 microseconds lasts about 70, which each of a step's collectives would cost.
constexpr double NCCL_SPIN = 150e-6;

// Waits for the end of a call that may still be under way in NCCL. r: what it returned. op: what the watchdog is told.
static inline void nccl_await(CommContext* w, const OpRecord* op, ncclComm_t comm, ncclResult_t r, const char* what) {
    const struct timespec nap = { 0, 20000 };
    if (r == ncclInProgress) {
        double spins_until = now_seconds() + NCCL_SPIN;
        flight_recorder_wait_begin(w->recorder, op);
        while (r == ncclInProgress) {
            ncclResult_t asked = nccl.ncclCommGetAsyncError(comm, &r);
            nccl_check(asked, what);
            if (r == ncclInProgress && now_seconds() > spins_until) nanosleep(&nap, NULL);
        }
        flight_recorder_wait_end(w->recorder);
    }
    nccl_check(r, what);
}
// The same for ncclCommSplit and ncclCommWindowRegister, which return ncclSuccess while NCCL has only begun. Their result is
// NULL until the communicator that was asked is ready again: only then may it be used, or its absence mean anything.
static inline void nccl_await_result(CommContext* w, const OpRecord* op, ncclComm_t asked, ncclResult_t r, const char* what) {
    nccl_await(w, op, asked, r == ncclSuccess ? ncclInProgress : r, what);
}
#endif
