/*
staging_cpu.h - how MPI reaches the memory of tensors on the CPU: it uses that memory directly. Included by comm_mpi.h.

On a GPU an operation's data has to be copied to host memory, a piece at a time, and back (staging_cuda.cuh). comm_mpi.h
is written as if that were always so; here a view is the memory itself, and there is nothing to copy or to wait for.
*/
#ifndef LLMC_STAGING_CPU_H
#define LLMC_STAGING_CPU_H
#include "../device/device.h"

typedef struct { char* scratch; } StagingBuffer; // scratch: (bytes) for sums, owned
typedef struct { int unused; } StagingEvent;

#define STAGING_TEXT "" // for the log
// Returns the bytes of MEMORY_COMMUNICATION that staging_init takes.
static inline size_t staging_device_bytes(size_t bytes) { return bytes; }
static inline void staging_init(StagingBuffer* s, size_t bytes) {
    s->scratch = (char*)device_alloc(bytes, MEMORY_COMMUNICATION);
}
static inline void staging_free(StagingBuffer* s) { device_free(s->scratch); }

// Returns the staging memory of a queue of operations. Queues run at the same time, so on a GPU each needs its own.
static inline StagingBuffer* staging_of_queue(StagingBuffer* s, int queue) { (void)queue; return s; }

// ---- for the thread that issues operations ----
static inline void staging_record(StagingEvent* m) { m->unused = 0; } // remembers the layer calls issued so far
static inline void staging_event_free(StagingEvent* m) { (void)m; }

// ---- for the communication thread ----
static inline void staging_thread(void) { host_set_threads(1); } // is called first; layers need the other cores
// The layer calls before the mark are done
static inline bool staging_passed(const StagingEvent* m) { (void)m; return true; }
static inline bool staging_idle(StagingBuffer* s) { (void)s; return true; }  // the copies begun here are done
// Returns where MPI finds what is at `device`; at: its place in the piece's host memory.
static inline char* staging_view(StagingBuffer* s, char* device, size_t at) { (void)s; (void)at; return device; }
static inline void staging_fetch(StagingBuffer* s, char* view, const char* device, size_t bytes) {
    (void)s; (void)view; (void)device; (void)bytes;
}
static inline void staging_store(StagingBuffer* s, char* device, const char* view, size_t bytes) {
    (void)s;
    if (device != view) memcpy(device, view, bytes); // an all-gather's own shard may come from elsewhere
}
#endif
