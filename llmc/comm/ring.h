/*
ring.h - all-reduce from scratch, made only of send and receive (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations").

N ranks stand in a ring and cut the buffer into N chunks. At every step each rank sends a chunk to the next rank and
receives one from the rank before. In the first N-1 steps the received chunk is added (a reduce-scatter): a chunk
collects terms as it travels, and after N-1 hops it is the sum over all ranks. In the other N-1 steps the received chunk
is kept (an all-gather): the finished chunks go round once. Each rank sends 2(N-1) chunks of n/N elements. No all-reduce
that consists of messages between ranks can send less; a switch that adds, as with NVLink's NVLS, needs less.

The first half alone is a reduce-scatter, the second alone an all-gather; ring_step's `adds` says which half a step is
in.
*/
#ifndef LLMC_COMM_RING_H
#define LLMC_COMM_RING_H
#include "../base/common.h"

// A rank's messages in one step, in elements of its buffer (n).
typedef struct {
    size_t send_at, send_n; // to the next rank
    size_t recv_at, recv_n; // from the one before
    bool adds;              // received elements are added to the buffer's; otherwise they replace them
} RingStep;

static inline int ring_steps(int N) { return 2 * (N - 1); }
// Chunk c of n elements is [ring_chunk(c), ring_chunk(c+1)). Every chunk begins at a multiple of 16 elements, because
// NCCL moves a message one element at a time unless it begins at a multiple of 16 bytes. Their sizes differ by at
// most 16, and may be 0.
#define RING_ALIGNMENT 16
static inline size_t ring_chunk(int c, int N, size_t n) {
    size_t pieces = ceil_div(n, RING_ALIGNMENT), ranks = (size_t)N, at = (size_t)c;
    return size_min(n, RING_ALIGNMENT * (pieces / ranks * at + pieces % ranks * at / ranks));
}
static inline size_t ring_chunk_size(int c, int N, size_t n) { return ring_chunk(c + 1, N, n) - ring_chunk(c, N, n); }
// Returns the largest chunk that fits into a buffer of `room` (at least 16) elements;
// of a piece of N such chunks each rank owns one.
static inline size_t ring_slice(size_t room) { return size_max(1, room / RING_ALIGNMENT) * RING_ALIGNMENT; }

// Rank's part in step 0 .. ring_steps(N)-1 of an all-reduce of n elements. At step s of a half, rank r sends the chunk
// that it completed at step s-1: r-s in the first half; the second begins with the chunk that is finished here, r+1.
static inline RingStep ring_step(int rank, int N, size_t n, int step) {
    bool adds = step < N - 1;
    int first = adds ? rank : rank + 1, s = adds ? step : step - (N - 1);
    int send = (first - s + N) % N, recv = (first - s - 1 + N) % N;
    RingStep r = { ring_chunk(send, N, n), ring_chunk_size(send, N, n), ring_chunk(recv, N, n),
                   ring_chunk_size(recv, N, n), adds };
    return r;
}

// Moves elements from rank to rank and adds them: with MPI's requests, or with NCCL's calls on a stream.
typedef struct {
    // begins to send and to receive; with 0 elements nothing is sent or received
    void (*exchange)(void* self, const void* send, size_t send_n, int to, void* recv, size_t recv_n, int from);
    void (*add)(void* self, void* into, const void* from, size_t n); // into (n) += from (n)
} RingCarrier;

typedef struct {
    int rank, N, step;
    size_t n, element;          // elements, and bytes of each
    char* buf;                  // (n) becomes the sum over ranks, a view
    char* scratch;              // (the largest chunk) a view
    const RingCarrier* carrier;
    void* self;                 // the carrier's own
} Ring;

// Finishes the step before and begins the next one; returns false when there is none. Call it from step 0 on, each time
// when the exchange begun before is done (at once, where a stream keeps the order).
static inline bool ring_advance(Ring* r) {
    if (r->step > 0) {
        RingStep past = ring_step(r->rank, r->N, r->n, r->step - 1);
        if (past.adds) r->carrier->add(r->self, r->buf + past.recv_at * r->element, r->scratch, past.recv_n);
    }
    if (r->step == ring_steps(r->N)) return false;
    RingStep now = ring_step(r->rank, r->N, r->n, r->step);
    char* to = now.adds ? r->scratch : r->buf + now.recv_at * r->element;
    r->carrier->exchange(r->self, r->buf + now.send_at * r->element, now.send_n, (r->rank + 1) % r->N,
                         to, now.recv_n, (r->rank + r->N - 1) % r->N);
    r->step++;
    return true;
}
#endif
