/*
staging_cuda.cuh - how MPI reaches the memory of tensors, for a GPU: through pinned host memory. Included by comm_mpi.h;
the same functions of staging_cpu.h do nothing.

An operation waits for an event on compute_stream, which stands for the layer calls before it. Then, a piece at a time,
its input is copied to the host and its output back, on a stream of their own, by the thread that calls MPI. That thread
looks whether a copy is done before it goes on, and an operation counts as finished only when its last copy is. So layer
calls that are issued after comm_wait come after it, with no event between.
*/
#ifndef LLMC_STAGING_CUDA_CUH
#define LLMC_STAGING_CUDA_CUH
#include "../device/device.h"
#include "../device/cuda/check.cuh"

typedef struct StagingBuffer {
    size_t bytes;           // of a piece
    char* scratch;          // (bytes) host memory for sums, owned; NULL for messages
    char* view;             // (bytes) pinned host memory, what MPI sends from and receives into, owned
    cudaStream_t stream;    // for copies, owned
    int queue;
    struct StagingBuffer* next; // of the communicator's other queues, owned
} StagingBuffer;
typedef struct { cudaEvent_t event; } StagingEvent; // owned; NULL until it is first set

#define STAGING_TEXT " through host memory"
static inline size_t staging_device_bytes(size_t bytes) { (void)bytes; return 0; } // all of it is the host's

static inline void staging_open(StagingBuffer* s, int queue, size_t bytes) {
    s->bytes = bytes;
    s->queue = queue;
    s->view = (char*)host_alloc(bytes);
    cuda_check(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "a stream for copies to the host");
}
static inline void staging_init(StagingBuffer* s, size_t bytes) {
    staging_open(s, 0, bytes);
    s->scratch = new_array(char, bytes);
}
static inline void staging_free(StagingBuffer* s) {
    if (s->view == NULL) return;
    cuda_check(cudaStreamDestroy(s->stream), "a stream for copies to the host");
    host_free(s->view);
    free(s->scratch);
    if (s->next) staging_free(s->next);
    free(s->next);
}

// Returns the staging memory of a queue of operations. Queues run at the same time, so each needs its own; that of a
// pair of ranks is made with their first message.
static inline StagingBuffer* staging_of_queue(StagingBuffer* s, int queue) {
    while (s->queue != queue && s->next) s = s->next;
    if (s->queue == queue) return s;
    s->next = new_array(StagingBuffer, 1);
    staging_open(s->next, queue, s->bytes);
    return s->next;
}

// ---- for the thread that issues operations ----
static inline void staging_record(StagingEvent* m) {
    if (m->event == NULL)
        cuda_check(cudaEventCreateWithFlags(&m->event, cudaEventDisableTiming), "an operation's event");
    cuda_check(cudaEventRecord(m->event, compute_stream), "an operation's event");
}
static inline void staging_event_free(StagingEvent* m) {
    if (m->event) cuda_check(cudaEventDestroy(m->event), "an operation's event");
}

// ---- for the communication thread ----
static inline void staging_thread(void) {
    cuda_check(cudaSetDevice(cuda_device_number), "the communication thread");
    host_set_threads(cuda_host_threads); // the cores are free for its sums: layers run on the GPU
}
static inline bool staging_passed(const StagingEvent* m) {
    return cuda_is_done(cudaEventQuery(m->event), "communication");
}
static inline bool staging_idle(StagingBuffer* s) { return cuda_is_done(cudaStreamQuery(s->stream), "communication"); }
static inline char* staging_view(StagingBuffer* s, char* device, size_t at) { (void)device; return s->view + at; }
static inline void staging_fetch(StagingBuffer* s, char* view, const char* device, size_t bytes) {
    cuda_check(cudaMemcpyAsync(view, device, bytes, cudaMemcpyDeviceToHost, s->stream), "a copy for MPI");
}
static inline void staging_store(StagingBuffer* s, char* device, const char* view, size_t bytes) {
    cuda_check(cudaMemcpyAsync(device, view, bytes, cudaMemcpyHostToDevice, s->stream), "a copy from MPI");
}
#endif
