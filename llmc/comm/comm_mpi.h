/*
comm_mpi.h - the operations of comm_api.h over MPI, on host memory.

MPI's non-blocking calls make little progress unless the program keeps calling MPI. So while the host computes, the
communication thread calls MPI again and again. While the host waits for an operation, it makes these calls itself,
because waking another thread takes longer than sending a small message. Only one thread at a time may make MPI calls
(MPI_THREAD_SERIALIZED): the one that set `driven`. Collectives of a communicator run one after another in the order of
their issue; messages from one rank to another are a queue of their own, and all queues of a process progress at the
same time.

An operation is cut into pieces of COMM_PIECE bytes at most: they stay in the cache, scratch memory is bounded, and
MPI's int counts are enough. A piece is a few steps; each posts messages, and the next begins when they are done:

    all-reduce      every rank sends slice r to rank r, which adds the slices in rank order and sends the sum to all; or
                    the steps of ring.h; or MPI_Iallreduce, which takes about twice as long
    reduce-scatter  every rank sends part r to rank r, which adds them in rank order, in every mode; this sends as much
                    as a ring. (Open MPI 4.1's MPI_Ireduce_scatter_block sums everything on rank 0 first.)
    all-gather      every rank sends its shard to all others
                    (For both: a shard in host memory is sent and added up in place.)
    all-to-all      every rank sends row r to rank r, or part r, whose pieces end when it ends
    broadcast, barrier: MPI's
*/
#ifndef LLMC_COMM_MPI_H
#define LLMC_COMM_MPI_H
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include "comm_operations.h"
#include "ring.h"
#include "sums.h"
#ifndef __CUDACC__
#include "staging_cpu.h"
#else
#include "staging_cuda.cuh"
#endif

#ifndef COMM_PIECE
#define COMM_PIECE (4 << 20) // bytes; 1 to 4 MiB are fastest for all-reduce by 4 ranks on 2 cores
#endif
enum { MPI_TAG_COLLECTIVE = 1, MPI_TAG_PAIR = 2 };
#define MPI_NAP 20e-6       // seconds that a thread sleeps between two looks at the operations
#define MPI_LONG_NAP 200e-6 // the same after many looks without progress, or soon after an issue,
                            // because the host may be waiting
#define MPI_AWAKE 2e-3      // seconds after an issue until the communication thread sleeps indefinitely;
                            // waking it takes 10 us
#define MPI_LARGE (1 << 20) // bytes above which an operation wakes it at once
#define MPI_SPIN 500e-6     // seconds without progress until a waiting host sleeps: several naps long, because
                            // otherwise two hosts that wait for each other would keep each other asleep
#define MPI_SLICE 1e-3      // seconds between two looks beyond which a waiting host may have lost its core to another
                            // thread
#define MPI_SHARES 20e-3    // seconds for which a host that has lost its core sleeps between looks

// Posts the next messages of an operation's piece. Returns false if the piece has no more steps.
struct MpiOp;
typedef bool MpiStep(struct MpiOp* o);

// An operation on its way: what the communication thread knows about a CommSlot.
typedef struct MpiOp {
    Comm* comm;
    CommSlot* slot;
    struct MpiOp* next;       // in the list of those on their way, in the order of issue
    int queue;                // 0: the collectives; 1 + 2 rank: sent to that rank; 2 + 2 rank: received from it
    StagingBuffer* staging;   // a view
    StagingEvent ready;       // the layer calls that must be done before it begins
    bool begun;
    size_t total;             // elements of its longest row
    size_t at, count;         // the piece: elements before it, and in it
    MpiStep* post;            // the steps of its kind
    int step;                 // of the piece; 0: it must be fetched
    MPI_Request* requests;    // the messages of the step, a view: the link's, or `one` of a single message
    MPI_Request one;
    int posted;
    unsigned long long sent;  // bytes
    double until;             // --emulate-link: when the link has sent it; 0: that has not begun
    double copied;            // --emulate-host-link: when its shard has come from the host, or is there;
                              // 0: not known yet
    long long same[10];       // see mpi_step_check_same
    Ring ring;
} MpiOp;

// A communicator's part.
typedef struct MpiLink {
    MPI_Comm mpi;             // a duplicate, so that its messages cannot match others'
    MPI_Request* requests;    // (2N) of the one collective that runs, owned
    const void** rows;        // (N) inputs of that collective's sum, owned
    long long* counts;        // (2,N) elements of an all-to-all-v to and from each rank, as both ends say; owned
    StagingBuffer staging;    // scratch for its sums
    MpiOp* ops;               // (COMM_IN_FLIGHT) one for each slot, owned
    long long* seen;          // (1+2N) the last look in which a queue had an unfinished operation, owned
    struct MpiLink* next;     // all of this process
} MpiLink;

typedef struct {
    pthread_t thread;
    Comm* world;
    MpiOp *first, *last;      // operations issued and not yet finished, in order; guarded by the world's lock
    MpiLink* links;           // owned
    long long looks;          // at all operations, so far
    MPI_Op add[2];            // sums of bf16 and fp16
    double link_until;        // --emulate-link: when the link has sent all that it was given
    char* address;            // of rank 0's control, until `up`
    pthread_cond_t work;      // wakes the communication thread
    bool crowded;             // more ranks run on this machine than there are cores that any of them may use
    double moved_at, looked_at, shares_until; // in the host's wait: times of the last progress and look;
                                              // end of MPI_SHARES
    long preempted;           // mpi_preempted() when that wait began
    // All below is guarded by the world's lock.
    bool up, stopping;
    bool driven;              // a thread is making MPI calls
    bool host_waits;          // the host makes them until its operation is finished
    bool asleep;              // the communication thread sleeps until it is woken
    double issued_at;         // of the last operation
} MpiEngine;

static inline void mpi_check(int rc, const char* what) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    if (rc == MPI_SUCCESS) return;
    MPI_Error_string(rc, text, &n);
    die_here("MPI: %s failed: %s. Do all ranks issue the same operations? build/ranks compares their last ones", what,
             text);
}

// ---- a piece's memory ----

static inline MpiLink* mpi_link(const MpiOp* o) { return (MpiLink*)o->comm->link; }
static inline size_t mpi_element(const MpiOp* o) { return comm_type_size(o->slot->type); }
// Returns the elements that a rank owns of a piece. N such slices fit in the scratch and in staging memory;
// of an all-to-all 2N.
static inline bool mpi_is_all_to_all(CommKind k) { return k == COMM_ALL_TO_ALL || k == COMM_ALL_TO_ALL_V; }
static inline size_t mpi_slice(const MpiOp* o) {
    size_t rows = (size_t)o->comm->size * (mpi_is_all_to_all(o->slot->kind) ? 2 : 1);
    return ring_slice(COMM_PIECE / mpi_element(o) / rows);
}
static inline size_t mpi_piece(const MpiOp* o) {
    CommKind k = o->slot->kind;
    bool has_rows = k == COMM_REDUCE_SCATTER || k == COMM_ALL_GATHER || mpi_is_all_to_all(k);
    return (has_rows ? 1 : (size_t)o->comm->size) * mpi_slice(o);
}
// This piece of row `row` of a buffer (rows,n), or of its part if there are parts: its elements; where it is on the
// device, and as MPI sees it; in staging memory it is row `place`.
static inline size_t mpi_count(const MpiOp* o, const CommPart* parts, int row) {
    if (parts == NULL) return o->count;
    return parts[row].n > o->at ? size_min(parts[row].n - o->at, o->count) : 0;
}
static inline char* mpi_device(const MpiOp* o, const void* buf, const CommPart* parts, int row) {
    return (char*)buf + ((parts ? parts[row].at : (size_t)row * o->slot->n) + o->at) * mpi_element(o);
}
static inline char* mpi_view(const MpiOp* o, const void* buf, const CommPart* parts, int row, int place) {
    return staging_view(o->staging, mpi_device(o, buf, parts, row), (size_t)place * mpi_slice(o) * mpi_element(o));
}
// A shard that is in host memory needs no staging.
static inline char* mpi_of_shard(const MpiOp* o, const void* shard) {
    return o->slot->on_host ? mpi_device(o, shard, NULL, 0) : mpi_view(o, shard, NULL, 0, o->comm->rank);
}
// The one buffer of an operation without rows.
static inline char* mpi_buf(const MpiOp* o) {
    return mpi_view(o, o->slot->out ? o->slot->out : o->slot->in, NULL, 0, 0);
}
// Returns where what rank q sends is kept until it is added.
static inline char* mpi_scratch(const MpiOp* o, int q) {
    return mpi_link(o)->staging.scratch + (size_t)q * mpi_slice(o) * mpi_element(o);
}
// Of a reduce-scatter, an all-gather or an all-to-all: what goes to rank q, and where what comes from it lies.
static inline char* mpi_outgoing(const MpiOp* o, int q) {
    const CommSlot* s = o->slot;
    return s->kind == COMM_ALL_GATHER ? mpi_of_shard(o, s->in) : mpi_view(o, s->in, s->to, q, q);
}
static inline char* mpi_incoming(const MpiOp* o, int q) {
    const CommSlot* s = o->slot;
    if (s->kind == COMM_REDUCE_SCATTER) return mpi_scratch(o, q);
    return mpi_view(o, s->out, s->from, q, s->kind == COMM_ALL_GATHER ? q : o->comm->size + q);
}

// ---- messages ----

static inline MPI_Datatype mpi_type(CommType t) {
    return t == COMM_F32 ? MPI_FLOAT : t == COMM_F64 ? MPI_DOUBLE : t == COMM_BYTE ? MPI_BYTE : MPI_UINT16_T;
}
// Sums of types that MPI lacks.
static inline void mpi_add_bf16(void* in, void* inout, int* n, MPI_Datatype* t) {
    (void)t;
    comm_add(inout, in, (size_t)*n, COMM_BF16);
}
static inline void mpi_add_f16(void* in, void* inout, int* n, MPI_Datatype* t) {
    (void)t;
    comm_add(inout, in, (size_t)*n, COMM_F16);
}

static inline MPI_Op mpi_sum(const MpiEngine* e, CommType t) {
    return t == COMM_BF16 ? e->add[0] : t == COMM_F16 ? e->add[1] : MPI_SUM;
}

static inline int mpi_tag(const MpiOp* o) { return o->queue == 0 ? MPI_TAG_COLLECTIVE : MPI_TAG_PAIR; }
static inline MPI_Request* mpi_request(MpiOp* o) { return &o->requests[o->posted++]; }
static inline void mpi_send(MpiOp* o, const void* data, size_t n, int to) {
    if (n == 0) return; // the receiver expects nothing
    o->sent += n * mpi_element(o);
    mpi_check(MPI_Isend(data, (int)n, mpi_type(o->slot->type), to, mpi_tag(o), mpi_link(o)->mpi, mpi_request(o)),
              "MPI_Isend");
}
static inline void mpi_recv(MpiOp* o, void* data, size_t n, int from) {
    if (n == 0) return;
    mpi_check(MPI_Irecv(data, (int)n, mpi_type(o->slot->type), from, mpi_tag(o), mpi_link(o)->mpi, mpi_request(o)),
              "MPI_Irecv");
}

// ring.h's steps as messages.
static inline void mpi_ring_exchange(void* self, const void* send, size_t send_n, int to,
                                     void* recv, size_t recv_n, int from) {
    MpiOp* o = (MpiOp*)self;
    mpi_recv(o, recv, recv_n, from);
    mpi_send(o, send, send_n, to);
}
static inline void mpi_ring_add(void* self, void* into, const void* from, size_t n) {
    comm_add(into, from, n, ((MpiOp*)self)->slot->type);
}
static const RingCarrier mpi_ring_carrier = { mpi_ring_exchange, mpi_ring_add };

// ---- the steps of each kind (MpiStep) ----

static inline bool mpi_step_all_reduce_library(MpiOp* o) {
    if (o->step > 1) return false;
    CommType t = o->slot->type;
    MPI_Op sum = mpi_sum((MpiEngine*)o->comm->world->mpi, t);
    int rc = MPI_Iallreduce(MPI_IN_PLACE, mpi_buf(o), (int)o->count, mpi_type(t), sum, mpi_link(o)->mpi,
                            mpi_request(o));
    mpi_check(rc, "MPI_Iallreduce");
    return true;
}

static inline bool mpi_step_all_reduce_ring(MpiOp* o) {
    if (o->step == 1) {
        Ring r = { o->comm->rank, o->comm->size, 0, o->count, mpi_element(o), mpi_buf(o), mpi_scratch(o, 0),
                   &mpi_ring_carrier, o };
        o->ring = r;
    }
    return ring_advance(&o->ring);
}

// mine (n) = the sum of rows (N,n) in rank order: this rank's row lies at `own`,
// the others have arrived in the scratch.
static inline void mpi_add_rows(MpiOp* o, char* mine, const char* own, size_t n) {
    const void** rows = mpi_link(o)->rows;
    for (int q = 0; q < o->comm->size; q++) rows[q] = q == o->comm->rank ? own : mpi_scratch(o, q);
    comm_add_rows(mine, rows, o->comm->size, n, o->slot->type);
}

// Rank q adds slice q of the piece: [ring_chunk(q), ring_chunk(q+1)).
static inline bool mpi_step_all_reduce_ordered(MpiOp* o) {
    int N = o->comm->size, rank = o->comm->rank;
    char* buf = mpi_buf(o);
    size_t mine = ring_chunk_size(rank, N, o->count);
    char* own = buf + ring_chunk(rank, N, o->count) * mpi_element(o);
    if (o->step == 2) mpi_add_rows(o, own, own, mine);
    if (o->step > 2) return false;
    for (int d = 1; d < N; d++) { // begins with the next rank, so that not all send to rank 0 first
        int to = (rank + d) % N, from = (rank + N - d) % N, other = o->step == 1 ? to : from;
        char* theirs = buf + ring_chunk(other, N, o->count) * mpi_element(o);
        if (o->step == 1) {
            mpi_recv(o, mpi_scratch(o, from), mine, from);
            mpi_send(o, theirs, ring_chunk_size(to, N, o->count), to);
        } else {
            mpi_recv(o, theirs, ring_chunk_size(from, N, o->count), from);
            mpi_send(o, own, mine, to);
        }
    }
    return true;
}

// A reduce-scatter, an all-gather or an all-to-all.
static inline bool mpi_step_exchange(MpiOp* o) {
    int N = o->comm->size, rank = o->comm->rank;
    if (o->step == 2 && o->slot->kind == COMM_REDUCE_SCATTER)
        mpi_add_rows(o, mpi_of_shard(o, o->slot->out), mpi_outgoing(o, rank), o->count);
    if (o->step > 1) return false;
    for (int d = 1; d < N; d++) {
        int to = (rank + d) % N, from = (rank + N - d) % N;
        mpi_recv(o, mpi_incoming(o, from), mpi_count(o, o->slot->from, from), from);
        mpi_send(o, mpi_outgoing(o, to), mpi_count(o, o->slot->to, to), to);
    }
    return true;
}

static inline bool mpi_step_one_message(MpiOp* o) {
    CommSlot* s = o->slot;
    if (o->step > 1) return false;
    if (s->kind == COMM_SEND) mpi_send(o, mpi_buf(o), o->count, s->peer);
    if (s->kind == COMM_RECV) mpi_recv(o, mpi_buf(o), o->count, s->peer);
    if (s->kind == COMM_BARRIER) mpi_check(MPI_Ibarrier(mpi_link(o)->mpi, mpi_request(o)), "MPI_Ibarrier");
    if (s->kind == COMM_BROADCAST) {
        int rc = MPI_Ibcast(mpi_buf(o), (int)o->count, mpi_type(s->type), s->peer, mpi_link(o)->mpi, mpi_request(o));
        mpi_check(rc, "MPI_Ibcast");
    }
    return true;
}

// Ranks of one color become a communicator. Nothing else is under way (comm_split checked that). The barrier comes
// first because MPI's blocking calls take a whole core while they wait for the last rank; after it they end soon.
static inline bool mpi_step_split(MpiOp* o) {
    if (o->step == 0) {
        mpi_check(MPI_Ibarrier(mpi_link(o)->mpi, mpi_request(o)), "MPI_Ibarrier");
        o->step = 1;
        return true;
    }
    Comm *c = (Comm*)o->slot->out, *parent = o->comm;
    MpiLink* l = (MpiLink*)c->link;
    mpi_check(MPI_Comm_split(mpi_link(o)->mpi, o->slot->color, parent->rank, &l->mpi), "MPI_Comm_split");
    MPI_Comm_rank(l->mpi, &c->rank);
    MPI_Comm_size(l->mpi, &c->size);
    c->world_rank = new_array(int, c->size);
    mpi_check(MPI_Allgather(&parent->world_rank[parent->rank], 1, MPI_INT, c->world_rank, 1, MPI_INT, l->mpi),
              "MPI_Allgather");
    return false;
}

// Strict mode and emulated links, before a collective's first piece: all ranks must be about to run the same one. The
// maximum of a value and that of its negative are equal except for the sign only if all ranks have the same value. The
// parts of an all-to-all-v differ, and each rank tells the others what it sends them.
static inline bool mpi_step_check_same(MpiOp* o) {
    const CommSlot* s = o->slot;
    MpiLink* l = mpi_link(o);
    int N = o->comm->size;
    long long values[5] = { s->record.number, s->kind, (long long)s->n, s->type, s->peer };
    if (o->step == -1) {
        for (int i = 0; i < 5; i++) {
            o->same[i] = values[i];
            o->same[5 + i] = -values[i];
        }
        int rc = MPI_Iallreduce(MPI_IN_PLACE, o->same, 10, MPI_LONG_LONG, MPI_MAX, l->mpi, mpi_request(o));
        mpi_check(rc, "MPI_Iallreduce");
        return true;
    }
    for (int i = 0; i < 5 && o->step == -2; i++) {
        if (o->same[i] == -o->same[5 + i] || (i == 2 && s->to)) continue;
        char text[OP_TEXT];
        op_text(&s->record, text, sizeof text);
        die_here("rank %d has reached %s, and another rank a different operation: all ranks must issue, and in strict "
                 "mode wait for, the same collectives in the same order",
                 o->comm->world_rank[o->comm->rank], text);
    }
    for (int q = 0; s->to && q < N; q++) {
        if (o->step == -2) l->counts[q] = (long long)s->to[q].n;
        else invariant(l->counts[N + q] == (long long)s->from[q].n, "%s: rank %d sends %lld %s of an all-to-all-v to rank"
                       " %d, which expects %zu", o->comm->name, q, l->counts[N + q], comm_type_name(s->type),
                       o->comm->rank, s->from[q].n);
    }
    if (s->to == NULL || o->step == -3) return false;
    mpi_check(MPI_Ialltoall(l->counts, 1, MPI_LONG_LONG, l->counts + N, 1, MPI_LONG_LONG, l->mpi, mpi_request(o)),
              "MPI_Ialltoall");
    return true;
}

// Returns the steps of an operation of this kind.
static inline MpiStep* mpi_choose_step(const CommOptions* o, CommKind kind) {
    switch (kind) {
    case COMM_ALL_REDUCE:
        return o->ordered || o->all_reduce == ALL_REDUCE_AUTO ? mpi_step_all_reduce_ordered
             : o->all_reduce == ALL_REDUCE_RING ? mpi_step_all_reduce_ring : mpi_step_all_reduce_library;
    case COMM_REDUCE_SCATTER: case COMM_ALL_GATHER: case COMM_ALL_TO_ALL: case COMM_ALL_TO_ALL_V:
        return mpi_step_exchange;
    case COMM_SPLIT: return mpi_step_split;
    default: return mpi_step_one_message;
    }
}

// ---- an operation from piece to piece ----

// mpi_fetch begins to copy a piece's input to where MPI sees it, mpi_store its output back.
static inline void mpi_fetch(MpiOp* o) {
    const CommSlot* s = o->slot;
    size_t bytes = o->count * mpi_element(o);
    if (s->kind == COMM_REDUCE_SCATTER || mpi_is_all_to_all(s->kind)) {
        for (int q = 0; q < o->comm->size; q++)
            staging_fetch(o->staging, mpi_outgoing(o, q), mpi_device(o, s->in, s->to, q),
                          mpi_count(o, s->to, q) * mpi_element(o));
    } else if (s->kind == COMM_ALL_GATHER) {
        if (!s->on_host) staging_fetch(o->staging, mpi_outgoing(o, 0), mpi_device(o, s->in, NULL, 0), bytes);
    } else if (s->in) staging_fetch(o->staging, mpi_buf(o), mpi_device(o, s->in, NULL, 0), bytes);
}
static inline void mpi_store(MpiOp* o) {
    const CommSlot* s = o->slot;
    size_t bytes = o->count * mpi_element(o);
    if (s->kind == COMM_REDUCE_SCATTER) {
        if (!s->on_host) staging_store(o->staging, mpi_device(o, s->out, NULL, 0), mpi_of_shard(o, s->out), bytes);
    } else if (s->kind == COMM_ALL_GATHER || mpi_is_all_to_all(s->kind)) {
        for (int q = 0; q < o->comm->size; q++) {
            const char* view = q == o->comm->rank ? mpi_outgoing(o, q) : mpi_incoming(o, q);
            staging_store(o->staging, mpi_device(o, s->out, s->from, q), view,
                          mpi_count(o, s->from, q) * mpi_element(o));
        }
    } else if (s->out) staging_store(o->staging, mpi_device(o, s->out, NULL, 0), mpi_buf(o), bytes);
}

// ---- the communication thread ----

// --emulate-link: gives o the link when all ranks have reached it. Returns true while o must wait: a collective whose
// data have arrived, or the last piece of a message, which its receiver would see too early.
static inline bool mpi_is_held(MpiOp* o) {
    CommSlot* s = o->slot;
    CommContext* w = o->comm->world;
    MpiEngine* e = (MpiEngine*)w->mpi;
    if (w->options.link == 0 || o->step != 0) return false;
    size_t n = s->to ? (size_t)o->same[2] : s->n; // the most of any rank
    double bytes = (double)(comm_sent_times_N(s->kind, n, o->comm->size) * mpi_element(o)) / o->comm->size;
    if (bytes == 0) return false;
    if (o->until == 0) {
        pthread_mutex_lock(&w->lock);
        s->event.started = fmax(now_seconds(), e->link_until);
        o->until = e->link_until = s->event.started + bytes / (1e9 / 8 * w->options.link);
        pthread_mutex_unlock(&w->lock);
    }
    bool at_end = s->kind == COMM_SEND ? s->n - o->at <= mpi_piece(o) : o->at == o->total;
    return at_end && now_seconds() < o->until;
}

// --emulate-host-link: a sum is on its way to the host, and the operations after it go on.
static inline bool mpi_leaves(const MpiOp* o) { return o->slot->kind == COMM_REDUCE_SCATTER && o->copied > 0; }

// Returns true if an operation may go on: the layer calls before it are done, and so is everything that it has posted.
static inline bool mpi_is_ready(MpiOp* o) {
    CommContext* w = o->comm->world;
    int arrived = 1;
    if (!o->begun) {
        if (!staging_passed(&o->ready) || now_seconds() < o->copied) return false;
        o->begun = true;
        flight_recorder_start(w->recorder, &o->slot->record);
        pthread_mutex_lock(&w->lock);
        o->slot->event.started = now_seconds();
        pthread_mutex_unlock(&w->lock);
    }
    if (o->posted > 0)
        mpi_check(MPI_Testall(o->posted, o->requests, &arrived, MPI_STATUSES_IGNORE), comm_kind_names[o->slot->kind]);
    if (!arrived || !staging_idle(o->staging)) return false;
    o->posted = 0;
    if (mpi_is_held(o)) return false;
    if (o->slot->on_host && o->slot->kind == COMM_REDUCE_SCATTER && o->step == 0 && o->at == o->slot->n)
        o->copied = device_link_until(false, o->at * mpi_element(o));
    return !mpi_leaves(o);
}

// Takes an operation that is ready to its next step. Returns true if it has finished.
static inline bool mpi_advance(MpiOp* o) {
    CommKind k = o->slot->kind;
    if (o->step < 0) { // strict mode or an emulated link
        o->step = mpi_step_check_same(o) ? o->step - 1 : 0;
    } else if (k == COMM_SPLIT) { // it has no pieces
        return !o->post(o);
    } else if (o->step == 0) {
        if (o->at == o->total) return true;
        o->count = size_min(o->total - o->at, mpi_piece(o));
        mpi_fetch(o);
        o->step = 1;
    } else if (o->post(o)) {
        o->step++;
    } else {
        mpi_store(o);
        o->at += o->count;
        o->step = 0;
    }
    return false;
}

// Takes o, which is finished, out of the list; it comes after `before` (NULL: it is the first).
static inline void mpi_retire(MpiEngine* e, MpiOp* o, MpiOp* before) {
    CommContext* w = e->world->world;
    flight_recorder_finish(w->recorder, &o->slot->record);
    double now = now_seconds();
    pthread_mutex_lock(&w->lock);
    if (before) before->next = o->next;
    else e->first = o->next;
    if (e->last == o) e->last = before;
    o->slot->event.finished = now;
    o->slot->finished = true;
    o->comm->stats[o->slot->kind].posted += o->sent;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

// Looks once at every operation up to `last`; returns true if there was progress. Only the driving thread takes
// operations out, and others only append them, so the list up to `last` may be walked without the lock.
static inline bool mpi_look(MpiEngine* e, MpiOp* first, const MpiOp* last) {
    bool moved = false, at_end = false;
    MpiOp* before = NULL;
    e->looks++;
    for (MpiOp *o = first, *next; !at_end; o = next) {
        at_end = o == last;
        next = at_end ? NULL : o->next;
        long long* seen = &mpi_link(o)->seen[o->queue]; // only the first operation of its queue may go on
        bool leaves = mpi_leaves(o), ready = leaves ? now_seconds() >= o->copied : *seen != e->looks && mpi_is_ready(o);
        if (!leaves) *seen = e->looks;
        moved |= ready;
        if (ready && mpi_advance(o)) mpi_retire(e, o, before);
        else before = o;
    }
    return moved;
}

// Settings of Open MPI that the environment may overrule. Without the last two it prints lines about this machine that
// users cannot act on: "Read -1, expected 198272, errno = 38" for every large message, and "Unable to find reachable
// pairing between interfaces".
static inline void mpi_settings(const Control* c) {
    // Where ranks outnumber cores, Open MPI yields in every call: see mpi_thread
    setenv("OMPI_MCA_mpi_yield_when_idle", "0", 0);
    // Otherwise a large message between machines is one piece that its receiver asks for.
    // Two that cross then take turns on the link.
    setenv("OMPI_MCA_btl_tcp_flags", "send,inplace", 0);
    // Ranks of one machine read each other's memory by process_vm_readv(2), which some containers and emulators do not
    // offer, not even for one's own memory. Messages then go through shared memory.
    char byte = 1, copy = 0;
    struct iovec from = { &byte, 1 }, to = { &copy, 1 };
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1) {
        setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0); // Open MPI 4
        setenv("OMPI_MCA_smsc", "^cma", 0);                            // Open MPI 5
    }
    // Ranks that are all on this machine need no network, which may be down or without routes.
    bool local = c->ranks.local_size == c->ranks.size;
    if (local && getenv("OMPI_MCA_btl_tcp_if_exclude") == NULL) setenv("OMPI_MCA_btl_tcp_if_include", "lo", 0);
}

// Returns true if more ranks run on this machine than there are cores that at least one of them may use. (A rank that
// is bound to one core sees only that core.) Collective.
static inline bool mpi_is_crowded(MPI_Comm all) {
    MPI_Comm here;
    cpu_set_t cores;
    int ranks;
    mpi_check(MPI_Comm_split_type(all, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here), "MPI_Comm_split_type");
    MPI_Comm_size(here, &ranks);
    CPU_ZERO(&cores);
    sched_getaffinity(0, sizeof cores, &cores);
    mpi_check(MPI_Allreduce(MPI_IN_PLACE, &cores, sizeof cores, MPI_BYTE, MPI_BOR, here), "MPI_Allreduce");
    MPI_Comm_free(&here);
    return ranks > CPU_COUNT(&cores);
}

static inline void mpi_thread_begin(MpiEngine* e) {
    Comm* c = e->world;
    MpiLink* l = (MpiLink*)c->link;
    int provided, rank, size;
    staging_thread();
    mpi_settings(c->world->control);
    mpi_check(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    require(provided >= MPI_THREAD_SERIALIZED,
            "this MPI does not support programs with threads: install one that does");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); // mpi_check reports more than MPI would
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    require(rank == c->rank && size == c->size, "this process was started as rank %d of %d, but MPI says rank %d of %d:"
            " start it with the mpirun of the MPI it was built with, or srun --mpi=pmix", c->rank, c->size, rank, size);
    mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &l->mpi), "MPI_Comm_dup");
    e->crowded = mpi_is_crowded(l->mpi);
    mpi_check(MPI_Op_create(mpi_add_bf16, 1, &e->add[0]), "MPI_Op_create");
    mpi_check(MPI_Op_create(mpi_add_f16, 1, &e->add[1]), "MPI_Op_create");
    mpi_check(MPI_Bcast(e->address, CONTROL_ADDRESS, MPI_CHAR, 0, l->mpi), "MPI_Bcast");
}

// Looks once at all operations. The caller holds the lock, which is released meanwhile,
// and knows that no thread is driving.
static inline bool mpi_drive(MpiEngine* e) {
    CommContext* w = e->world->world;
    MpiOp *first = e->first, *last = e->last;
    e->driven = true;
    pthread_mutex_unlock(&w->lock);
    bool moved = mpi_look(e, first, last);
    pthread_mutex_lock(&w->lock);
    e->driven = false;
    return moved;
}

// Puts the communication thread to sleep, with the lock released, for so many seconds or until it is woken.
static inline void mpi_sleep(MpiEngine* e, double seconds) {
    double at = now_seconds() + seconds;
    struct timespec until = { (time_t)at, (long)(1e9 * (at - floor(at))) };
    pthread_cond_timedwait(&e->work, &e->world->world->lock, &until);
}

// Between two looks the communication thread sleeps, because the layers need the cores, and a thread that slept may
// continue as soon as it wakes. (With sched_yield, which gives the core away for a whole time slice, an all-reduce next
// to ranks that compute took several times as long.)
static inline void* mpi_thread(void* argument) {
    MpiEngine* e = (MpiEngine*)argument;
    CommContext* w = e->world->world;
    int idle = 0;
    mpi_thread_begin(e);
    pthread_mutex_lock(&w->lock);
    e->up = true;
    pthread_cond_broadcast(&w->changed);
    while (e->first || !e->stopping) {
        bool drives = e->first && !e->host_waits && !e->driven;
        if (drives) {
            idle = mpi_drive(e) ? 0 : idle + 1;
            if (e->host_waits) pthread_cond_broadcast(&w->changed);
        }
        if (drives && idle == 0) continue;
        if (drives && idle < 1000) mpi_sleep(e, MPI_NAP);
        else if (drives || now_seconds() < e->issued_at + MPI_AWAKE) mpi_sleep(e, MPI_LONG_NAP);
        else {
            e->asleep = true;
            pthread_cond_wait(&e->work, &w->lock);
            e->asleep = false;
        }
    }
    pthread_mutex_unlock(&w->lock);
    for (MpiLink* l = e->links; l; l = l->next) MPI_Comm_free(&l->mpi);
    for (int k = 0; k < 2; k++) MPI_Op_free(&e->add[k]);
    MPI_Finalize();
    return NULL;
}

// Returns how often another thread has taken this thread's core.
static inline long mpi_preempted(void) {
    struct rusage used;
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_nivcsw;
}
// Called by a waiting host between two looks. For MPI_SPIN after the last progress it returns at once, because the
// other ranks will probably answer soon. After that it sleeps. It also sleeps if ranks need each other's cores: when
// ranks outnumber the cores, or when the host has lost its own core to another thread.
static inline void mpi_rest(MpiEngine* e, bool moved) {
    double now = now_seconds();
    if (moved) e->moved_at = now;
    else if (now - e->looked_at > MPI_SLICE && mpi_preempted() > e->preempted) e->shares_until = now + MPI_SHARES;
    if (!moved && (e->crowded || now < e->shares_until || now - e->moved_at > MPI_SPIN)) {
        // Delays a long wait by no more than an eighth
        sleep_until(now + fmin(MPI_LONG_NAP, fmax(MPI_NAP, (now - e->moved_at) / 8)));
        now = now_seconds();
    }
    e->looked_at = now;
}

// ---- what comm.h calls ----

// Makes a communicator's part; the communication thread sets its MPI_Comm. size: the most ranks that it may have.
static inline MpiLink* mpi_link_new(MpiEngine* e, int size) {
    MpiLink* l = new_array(MpiLink, 1);
    l->requests = new_array(MPI_Request, 2 * size);
    l->rows = new_array(const void*, size);
    l->counts = new_array(long long, 2 * size);
    l->ops = new_array(MpiOp, COMM_IN_FLIGHT);
    l->seen = new_array(long long, 1 + 2 * size);
    l->next = e->links;
    e->links = l;
    return l;
}

// Starts the communication thread, and tells all ranks rank 0's address (CONTROL_ADDRESS).
static inline void mpi_meet(Comm* c, char* address) {
    CommContext* w = c->world;
    MpiEngine* e = new_array(MpiEngine, 1);
    w->mpi = e;
    e->world = c;
    e->address = address;
    c->link = mpi_link_new(e, c->size);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); // that of now_seconds
    pthread_cond_init(&e->work, &clock);
    pthread_condattr_destroy(&clock);
    int rc = thread_start(&e->thread, mpi_thread, e);
    require(rc == 0, "the communication thread cannot be started: %s", strerror(rc));
    pthread_mutex_lock(&w->lock);
    while (!e->up) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static inline void mpi_open(Comm* c) {
    CommContext* w = c->world;
    char met[CONTROL_ADDRESS] = "", version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int n = 0;
    if (w->mpi == NULL) mpi_meet(c, met);
    staging_init(&((MpiLink*)c->link)->staging, COMM_PIECE);
    MPI_Get_library_version(version, &n); // may be called at any time and from any thread
    version[strcspn(version, ",")] = '\0';
    if (strncmp(version, "Open MPI v", 10) == 0) memmove(version + 9, version + 10, strlen(version + 9));
    int used = snprintf(w->description, sizeof w->description, "MPI (%.80s)" STAGING_TEXT ", all-reduce %s", version,
                        comm_all_reduce_text(&w->options, true));
    if (w->options.link > 0)
        snprintf(w->description + used, sizeof w->description - (size_t)used, ", EMULATED LINK OF %g GBIT/S",
                 w->options.link);
}

// Ends what mpi_meet began, and with it all communicators.
static inline void mpi_leave(CommContext* w) {
    MpiEngine* e = (MpiEngine*)w->mpi;
    pthread_mutex_lock(&w->lock);
    e->stopping = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&w->lock);
    pthread_join(e->thread, NULL);
    pthread_cond_destroy(&e->work);
    for (MpiLink* l = e->links; l; ) {
        MpiLink* next = l->next;
        staging_free(&l->staging);
        for (int k = 0; k < COMM_IN_FLIGHT; k++) staging_event_free(&l->ops[k].ready);
        free(l->requests);
        free(l->rows);
        free(l->counts);
        free(l->ops);
        free(l->seen);
        free(l);
        l = next;
    }
    free(e);
}

static inline void mpi_split(Comm* c, Comm* parent, int color) {
    MpiLink* l = mpi_link_new((MpiEngine*)c->world->mpi, parent->size);
    c->link = l;
    comm_wait(parent, comm_issue(parent, COMM_SPLIT, c, NULL, 0, COMM_BYTE, -1, color, false));
    if (c->size > 1) staging_init(&l->staging, COMM_PIECE);
}

static inline void mpi_start(Comm* c, CommSlot* s) {
    CommContext* w = c->world;
    MpiEngine* e = (MpiEngine*)w->mpi;
    MpiLink* l = (MpiLink*)c->link;
    MpiOp* o = &l->ops[s->number % COMM_IN_FLIGHT];
    StagingEvent ready = o->ready; // it stays for the slot's next operation
    memset(o, 0, sizeof *o);
    o->ready = ready;
    o->comm = c;
    o->slot = s;
    o->queue = s->kind == COMM_SEND ? 1 + 2 * s->peer : s->kind == COMM_RECV ? 2 + 2 * s->peer : 0;
    o->total = s->kind == COMM_BARRIER ? 1 : s->n;
    if (s->to) o->total = 0;
    for (int q = 0; s->to && q < c->size; q++) o->total = size_max(o->total, size_max(s->to[q].n, s->from[q].n));
    o->post = mpi_choose_step(&w->options, s->kind);
    o->staging = staging_of_queue(&l->staging, o->queue);
    o->requests = o->queue == 0 ? l->requests : &o->one;
    o->step = (w->strict || w->options.link > 0) && o->queue == 0 ? -1 : 0;
    if (s->on_host && s->kind == COMM_ALL_GATHER) o->copied = device_link_until(true, s->n * mpi_element(o));
    staging_record(&o->ready);
    pthread_mutex_lock(&w->lock);
    // A split blocks, before this host is recorded as waiting
    bool alone = e->first == NULL && !e->driven && s->kind != COMM_SPLIT;
    if (e->last) e->last->next = o;
    else e->first = o;
    e->last = o;
    for (int k = 0; alone && k < 2 && e->first; k++) mpi_drive(e); // fetches the first piece and posts its messages
    e->issued_at = now_seconds();
    if (e->first && (e->asleep || s->n * mpi_element(o) > MPI_LARGE)) pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&w->lock);
}

static inline void mpi_finish(Comm* c, CommSlot* s) {
    CommContext* w = c->world;
    MpiEngine* e = (MpiEngine*)w->mpi;
    pthread_mutex_lock(&w->lock);
    e->host_waits = true; // the communication thread stops after its current look
    while (!s->finished && e->driven) pthread_cond_wait(&w->changed, &w->lock);
    if (!s->finished) {
        e->moved_at = e->looked_at = now_seconds();
        e->preempted = mpi_preempted();
    }
    while (!s->finished) {
        bool moved = mpi_drive(e);
        if (s->finished) break;
        pthread_mutex_unlock(&w->lock);
        mpi_rest(e, moved);
        pthread_mutex_lock(&w->lock);
    }
    e->host_waits = false;
    if (e->first && e->asleep) pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&w->lock);
}

// Between mpi_borrow and mpi_return the host may make MPI calls of its own, for a benchmark.
// No operation may be under way.
static inline void mpi_borrow(CommContext* w) {
    MpiEngine* e = (MpiEngine*)w->mpi;
    pthread_mutex_lock(&w->lock);
    invariant(e->first == NULL, "mpi_borrow: wait for the operations under way first");
    e->host_waits = true;
    while (e->driven) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}
static inline void mpi_return(CommContext* w) {
    pthread_mutex_lock(&w->lock);
    ((MpiEngine*)w->mpi)->host_waits = false;
    pthread_mutex_unlock(&w->lock);
}

static inline size_t mpi_device_bytes(const CommOptions* o, int N) {
    (void)o;
    return N > 1 ? staging_device_bytes(COMM_PIECE) : 0;
}

static const CommBackend comm_mpi = {
    mpi_open, NULL, mpi_split, NULL, NULL, mpi_start, mpi_finish, mpi_device_bytes, NULL
};
#endif
