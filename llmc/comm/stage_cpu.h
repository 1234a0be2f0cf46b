/*
stage_cpu.h - how MPI reaches the memory of tensors on the CPU: it uses that memory directly. Included by mpi.h.

On a GPU an operation's data has to be copied to host memory, a piece at a time, and back (stage_cuda.cuh). mpi.h is written
as if that were always so; here a view is the memory itself, and there is nothing to copy or to wait for.
*/
#ifndef LLMC_COMM_STAGE_CPU_H
#define LLMC_COMM_STAGE_CPU_H
#include "../device/device.h"

typedef struct { char* scratch; } CommStage; // scratch: (bytes) for sums, owned
typedef struct { int unused; } CommMark;

#define STAGE_TEXT "" // for the log
static inline size_t stage_device_bytes(size_t bytes) { return bytes; } // of MEMORY_COMMUNICATION that stage_init takes
static inline void stage_init(CommStage* s, size_t bytes) { s->scratch = (char*)device_alloc(bytes, MEMORY_COMMUNICATION); }
static inline void stage_free(CommStage* s) { device_free(s->scratch); }

// What one queue of operations is staged in: queues run beside each other, so on a GPU each needs memory of its own.
static inline CommStage* stage_of_queue(CommStage* s, int queue) { (void)queue; return s; }

// ---- for the thread that issues operations ----
static inline void stage_mark(CommMark* m) { m->unused = 0; } // remembers the layer calls issued so far
static inline void stage_mark_free(CommMark* m) { (void)m; }

// ---- for the communication thread ----
static inline void stage_thread(void) { host_set_threads(1); } // is called first; layers need the other cores
static inline bool stage_passed(const CommMark* m) { (void)m; return true; } // the layer calls before the mark are done
static inline bool stage_idle(CommStage* s) { (void)s; return true; }        // the copies begun here are done
// Where MPI finds what is at `device`; at: its place in the piece's host memory.
static inline char* stage_view(CommStage* s, char* device, size_t at) { (void)s; (void)at; return device; }
static inline void stage_fetch(CommStage* s, char* view, const char* device, size_t bytes) {
    (void)s; (void)view; (void)device; (void)bytes;
}
static inline void stage_store(CommStage* s, char* device, const char* view, size_t bytes) {
    (void)s;
    if (device != view) memcpy(device, view, bytes); // an all-gather's own shard may come from elsewhere
}
#endif
