/*
device_api.h - memory for tensors, and the purpose of every byte of it. Implemented by cpu/device.h and
cuda/device.cuh; programs include device.h, which picks one.

CPU: ordinary memory. CUDA: device memory, and one compute stream on which every copy and layer call is ordered.
All amounts are bytes. Nothing is allocated once training has begun: device_allocations() lets a run prove it.
*/
#ifndef LLMC_DEVICE_API_H
#define LLMC_DEVICE_API_H
#include "../base/common.h"

// The purpose of memory: the rows of the table "predicted against measured" at the end of every run.
typedef enum {
    MEMORY_PARAMETERS,    // floatX parameters
    MEMORY_GRADIENTS,     // floatX gradients
    MEMORY_OPTIMIZER,     // fp32 AdamW moments, and master weights if floatX is 16 bits wide
    MEMORY_ACTIVATIONS,   // what forward keeps for backward, and the scratch of both
    MEMORY_COMMUNICATION, // buckets, gathered units
    MEMORY_WORKSPACE,     // what layers need for themselves (layers_init)
    MEMORY_ERRORS,        // the errors of compressed gradients, and the memory to find them
    MEMORY_OFFLOADED,     // host memory (offload_alloc). This and the next do not count in total, peak and limit
    MEMORY_SNAPSHOT,        // host memory (snapshot_alloc): copies of the state, from which checkpoints are written
    MEMORY_KINDS
} MemoryKind;
static const char* const memory_kind_names[MEMORY_KINDS] = {
    "parameters", "gradients", "optimizer state", "activations", "communication", "workspace", "errors",
    "state on the host", "snapshot for checkpoints"
};
static inline bool memory_is_on_host(int kind) { return kind == MEMORY_OFFLOADED || kind == MEMORY_SNAPSHOT; }

// Zeroed memory, aligned to 64 bytes at least; dies naming kind and size if there is not enough.
void*  device_alloc(size_t bytes, MemoryKind kind);
void   device_free(void* p);                                    // NULL is fine
void   device_free_all(MemoryKind kind);                        // all of a kind that is on the device
size_t device_memory(MemoryKind kind);                          // allocated now
size_t device_memory_total(void);                               // allocated now, all kinds but those on the host
size_t device_memory_peak(void);                                // the largest device_memory_total() so far
size_t device_allocations(void);                                // calls of device_, offload_ and snapshot_alloc so far
void   device_memory_limit(size_t bytes);                       // device_alloc dies beyond it; 0: none (--memory-limit)
size_t device_memory_free(void);                                // left for all ranks of the device, less a reserve
size_t device_memory_available(void);                           // that, but at most what this rank's limit leaves
size_t device_memory_seen(void);                                // as the system counts it; 0: it does not
const char* device_memory_seen_with(void);                      // in words: whose memory, and what else is in it

void device_init(int local_rank, int ranks_per_machine);        // picks GPU and cores; call first
void device_shutdown(void);
typedef struct { unsigned char bytes[16]; } DeviceId;
DeviceId device_id(void);                                       // the same for ranks that share a device's memory
DeviceId host_id(void);                                         // the same for ranks on one machine
const char* device_name(void);                                  // "NVIDIA H100 80GB HBM3", "CPU, 2 threads"
double device_peak_flops(void);                                 // dense FLOP/s of floatX products, 0: not known
void device_synchronize(void);                                  // returns when everything issued so far is done

// Moments, for timelines: a mark is passed when all that was issued before it is done.
int    device_event(void);                                      // the caller's until device_event_free
bool   device_event_passed(int mark);                           // true if it was; does not wait
double device_event_time(int mark);                             // when it was passed, as it was, in now_seconds()
double device_event_seconds(int from, int to);                  // between two, more precise than their times; the same
void   device_event_free(int mark);
void   device_range(const char* name);                          // names for a profiler what follows; NULL: ends it

// Ordered after everything issued before. The host side of a copy must not be touched before the copy is done:
// host_to_device from host_alloc memory returns at once; device_to_host waits, and is the one synchronisation of a
// step.
void device_zero(void* p, size_t bytes);
void device_copy(void* dst, const void* src, size_t bytes);
// `rows` pieces of `bytes` each, which begin so many bytes apart. src may also be memory of host_alloc.
void device_copy_rows(void* dst, size_t dst_apart, const void* src, size_t src_apart, size_t bytes, size_t rows);
void host_to_device(void* dst, const void* src, size_t bytes);
void device_to_host(void* dst, const void* src, size_t bytes);
void* host_alloc(size_t bytes);                                 // zeroed host memory that copies fast (pinned on CUDA)
void  host_free(void* p);
void* offload_alloc(size_t bytes);                              // host_alloc aligned to 64; counts as MEMORY_OFFLOADED
bool is_offloaded(const void* p);                               // whether p is in memory from offload_alloc
void  offload_free(void* p);                                    // NULL is fine

// Copies of the state that are made while training goes on. On a GPU they use a stream of their own, and wait for all
// that was issued before; on the CPU, and for state that is on the host, they are done when snapshot_copy returns.
void* snapshot_alloc(size_t bytes);                              // touched; pinned on CUDA. NULL: it cannot be had
void  snapshot_free(void* p);                                    // NULL is fine
void  snapshot_copy(void* host, const void* device, size_t bytes); // host: in memory from snapshot_alloc
bool  snapshot_is_done(void);                                    // any thread may ask
void  snapshot_hold(void);                                       // all that is issued from now on waits for the copies
size_t host_memory_free(void);                                  // of the machine, for all its processes, less a reserve

// For tests, on the CPU: copies of offloaded memory pass a link of so many Gbit/s, one after another each way; 0: none.
void  device_emulate_link(double gbits);
bool  device_link_is_emulated(void);
double device_link_until(bool from_host, size_t bytes);         // a copy begins: when the link has carried it; 0: none
#endif
