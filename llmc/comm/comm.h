/*
comm.h - what ranks do together: the collectives a stage may use, documented once.

Every operation is asynchronous: it is ordered after all layer calls issued so far, returns at once, and hands back a CommOp.
Until comm_wait(c, op) its buffers belong to it: an output must not be read, an input must not be written. Waits may come in
any order, and every operation is waited for exactly once. All ranks of a communicator issue the same collectives in the same
order, and for every send there is a receive. Buffers are device memory; n counts elements.

Sums       are formed in fp32 (COMM_F64: in double) and rounded to the type wherever the backend stores one. Ordered mode
           (--deterministic) forms each in rank order 0..N-1 and rounds once, whatever the collective and whichever rank owns it.
Counted    per kind: calls, and what a ring sends per rank: all-reduce 2n(N-1)/N, reduce-scatter and all-gather (of n per shard)
           n(N-1), broadcast n(N-1)/N, send n. Multiplied by N these are whole numbers, and they are stored that way.
Alone      (N = 1) every operation is done at once and sends nothing.
Strict     mode (SHARD_COMM_STRICT=1): an operation runs at its wait, and until then its output is NaN. An output that is read
           before its wait, an input that is written before it, and a missing wait then give wrong numbers every time instead
           of rare races. Ranks must wait in the same order; if they run different operations, an error says so (over NCCL
           only after the watchdog's timeout).
Failures   are handled by the watchdog (control.h): it names the rank that died or hangs, and ends this process.

A Comm must stay where it is from comm_init or comm_split to comm_free; there is no global state.
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H
#include "../base/common.h"
#include "../watch/control.h"
#include "../device/device.h"
#include "../base/options.h"
#include "../base/precision.h"
#include "../watch/ranks.h"

// The first three have DType's values.
typedef enum { COMM_F32, COMM_BF16, COMM_F16, COMM_F64, COMM_BYTE } CommType;
#define COMM_FLOATX ((CommType)FLOATX_DTYPE)
static inline size_t comm_type_size(CommType t) { return t == COMM_F64 ? 8 : t == COMM_BYTE ? 1 : dtype_size((DType)t); }
static inline const char* comm_type_name(CommType t) {
    return t == COMM_F64 ? "fp64" : t == COMM_BYTE ? "byte" : dtype_name((DType)t);
}

typedef enum {
    COMM_ALL_REDUCE, COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_BROADCAST, COMM_SEND, COMM_RECV, COMM_BARRIER, COMM_SPLIT,
    COMM_KINDS
} CommKind;
static const char* const comm_kind_names[COMM_KINDS] = {
    "all-reduce", "reduce-scatter", "all-gather", "broadcast", "send", "receive", "barrier", "split"
};

// ---- options ----
enum { COMM_AUTO, COMM_NCCL, COMM_MPI };
enum { ALL_REDUCE_LIBRARY, ALL_REDUCE_RING };
typedef struct {
    int backend;     // COMM_AUTO, ...
    int all_reduce;  // ALL_REDUCE_LIBRARY, ...
    int ordered;     // sums in rank order: Options.deterministic, set by the stage after parsing
    int windows;     // --nccl-windows: 0 or 1
    double timeout;  // seconds
    const char* out; // folder for the last operations of a run that fails, "": stderr; Options.out, set by the stage
} CommOptions;

static inline void options_comm(OptionTable* t, CommOptions* o) {
    memset(o, 0, sizeof *o);
    o->timeout = 600;
    o->out = "";
    option_choice(t, "comm", &o->backend, "auto|nccl|mpi",
                  "what moves data between ranks; auto: NCCL where every rank has a GPU of its own, else MPI");
    option_choice(t, "allreduce", &o->all_reduce, "library|ring",
                  "library: the all-reduce of NCCL or MPI; ring: that of llmc/comm/ring.h, made of sends and receives");
    option_flag(t, "nccl-windows", &o->windows,
                "NCCL's kernels access other ranks' memory directly, without copies (NCCL 2.27 or newer, within one machine)");
    option_float(t, "comm-timeout", &o->timeout, 0.1, 1e6,
                 "seconds that a wait for other ranks may last before the run ends with an error");
}

static inline const char* comm_all_reduce_text(const CommOptions* o) {
    return o->ordered ? "in rank order" : o->all_reduce == ALL_REDUCE_RING ? "by our ring" : "by the library";
}

// ---- the communicator ----
typedef long long CommOp; // number of an operation on its communicator, from 0

typedef struct {
    unsigned long long calls, elements_times_N, bytes_times_N; // sent per rank, by the formula
    unsigned long long posted; // bytes that this rank actually sent, counted where our code sends and not the library
    double exposed;            // seconds that compute stood still in comm_wait; comm_settle updates this and the next
    double busy;               // seconds from start to finish of each operation, added up
} CommStats;

// The times of an operation, by now_seconds(): when compute reached its issue and its wait, and when it continued after the wait;
// when its data began to move, and had arrived. On a GPU they are times of its streams, not of the host, except MPI's last two.
typedef struct {
    const char* communicator;
    CommKind kind;
    CommType type;
    size_t n;
    CommOp number;
    double issued, wait_begun, wait_ended, started, finished;
} CommEvent;
enum { MARK_ISSUED, MARK_WAIT_BEGUN, MARK_WAIT_ENDED, MARK_STARTED, MARK_FINISHED, COMM_MARKS };
typedef void (*CommObserver)(void* self, const CommEvent* e);

typedef struct {
    CommKind kind;
    CommType type;
    size_t n;
    int peer;             // root, to, from: rank on this communicator; -1: none
    int color;            // of a split
    bool on_host;         // the shard is in host memory
    CommOp number;
    void* out;            // views
    const void* in;
    char *own, *kept;     // strict mode: the part of the input that the output overwrites, a view; its bytes as issued, owned
    bool live, begun;     // not yet waited for; handed to the backend
    bool finished;        // set by the backend under the world's lock, as are `event`'s started and finished
    OpRecord record;      // as the log of operations has it
    CommEvent event;      // a backend that sets no marks sets started and finished; the rest comes from `marks`
    int marks[COMM_MARKS]; // marks of device.h, owned; -1: none
} CommSlot;

// An operation that was waited for, and whose times are not known yet.
typedef struct { CommEvent event; CommStats* stats; int marks[COMM_MARKS]; } CommWaited;
#define COMM_MOST_WAITED 1024

struct CommBackend;
typedef struct Comm Comm;

// What all communicators of a process share.
typedef struct {
    CommOptions options;
    const struct CommBackend* backend; // NULL: this rank is alone
    void *mpi, *nccl;         // the backends' own; NULL: not in use
    char description[160];    // "MPI (Open MPI 4.1.4), ...", for the log
    bool strict;
    Control* control;         // not owned
    OpLog* log;               // a view of control's
    Comm** comms;             // (num_comms) all that exist; the array is owned, they are not
    int num_comms;
    pthread_mutex_t lock;     // guards what the backend's thread and the host both write
    pthread_cond_t changed;   // an operation was issued, or is finished
    CommObserver observer;
    void* observer_self;
    CommWaited* waited;       // (COMM_MOST_WAITED) num_waited operations, those waited for since comm_settle, owned
    int num_waited;
    double* number;           // device memory of comm_host_sum, owned
} CommWorld;

#define COMM_IN_FLIGHT 1024   // operations of a communicator that may be under way
struct Comm {
    int rank, size;           // this process, and how many there are
    CommStats stats[COMM_KINDS];
    char name[24];            // "world"; "shard.1": group 1 of the split "shard"
    CommWorld* world;         // owned by the world's Comm
    CommOp issued;            // operations so far
    bool connected;           // comm_connect was called
    bool skips;               // --fault skip: the next operation is left out, and the other ranks wait for it
    CommSlot* slots;          // (COMM_IN_FLIGHT) operation k has slot k % COMM_IN_FLIGHT, owned
    int* world_rank;          // (size) each rank's number in the world, owned
    void* link;               // the backend's own
};

// What a backend does. All but `open` and `close` are called by the thread that issues operations.
typedef struct CommBackend {
    void (*open)(Comm* world);                // sets the world's link and description; all ranks have met
    void (*close)(Comm* world);
    void (*split)(Comm* c, Comm* parent, int color); // sets c's rank, size, world_rank and link
    void (*connect)(Comm* c);                 // prepares messages between two ranks; NULL: nothing to do
    void (*share_memory)(Comm* c);            // makes windows; NULL: it has none
    void (*start)(Comm* c, CommSlot* s);      // begins s after all layer calls issued so far; returns at once
    void (*finish)(Comm* c, CommSlot* s);     // layer calls issued from now on see the result of s
    size_t (*device_bytes)(const CommOptions* o, int N); // of MEMORY_COMMUNICATION that a communicator of N ranks takes
} CommBackend;

// ---- what a stage calls ----
// The world: all ranks. Also starts control, which the caller owns.
static inline void   comm_init(Comm* c, const CommOptions* o, RankInfo ranks, Control* control);
// The ranks of parent that give the same color, in their order there. Collective, with no operation under way.
static inline void   comm_split(Comm* c, Comm* parent, const char* name, int color);
// A communicator of this rank alone, for stages whose groups may have one rank. It costs nothing, and is not collective.
static inline void   comm_alone(Comm* c, Comm* parent, const char* name);
static inline void   comm_free(Comm* c);                 // dies if an operation was never waited for; free the world last
static inline void   comm_step(Comm* c, long long step); // from now on operations belong to this step of the run, from 1

// With --nccl-windows all memory for data that ranks exchange (parameters, gradients, communication) allocated since comm_init
// becomes windows on c. Collective; all ranks must have allocated the same sizes, in the same order.
static inline void   comm_share_memory(Comm* c);

// buf (n) = sum over ranks, in place
static inline CommOp comm_all_reduce(Comm* c, void* buf, size_t n, CommType t);
// shard (n) = this rank's part of the sum over ranks of full (N,n); shard may be full + rank*n
static inline CommOp comm_reduce_scatter(Comm* c, void* shard, const void* full, size_t n, CommType t);
// full (N,n) = every rank's shard (n), by rank; shard may be full + rank*n
static inline CommOp comm_all_gather(Comm* c, void* full, const void* shard, size_t n, CommType t);
// The same with the shard in host memory, from offload_alloc. On a GPU the copy is part of the operation, and overlaps with
// compute like the rest of it; this rank's part of full is its scratch, and reduce-scatter destroys what was there. The host may
// write a shard that is gathered, or read one that was reduced, only after comm_wait and then device_synchronize.
static inline CommOp comm_reduce_scatter_to_host(Comm* c, void* shard, void* full, size_t n, CommType t);
static inline CommOp comm_all_gather_from_host(Comm* c, void* full, const void* shard, size_t n, CommType t);
// buf (n) = the root's
static inline CommOp comm_broadcast(Comm* c, void* buf, size_t n, CommType t, int root);
// buf (n) goes to rank `to`. After the wait it may be written again, which does not mean that it has arrived.
// Call comm_connect before the first send or receive: it prepares messages between all pairs of c, and is collective.
static inline void   comm_connect(Comm* c);
static inline CommOp comm_send(Comm* c, const void* buf, size_t n, CommType t, int to);
static inline CommOp comm_recv(Comm* c, void* buf, size_t n, CommType t, int from);
// Layer calls issued later see the result; the host continues at once where the backend allows it.
static inline void   comm_wait(Comm* c, CommOp op);
static inline void   comm_barrier(Comm* c);               // returns when every rank is here
static inline double comm_host_sum(Comm* c, double x);    // the sum over ranks of a number on the host, on every rank; blocks

// Adds up the times of the operations waited for since the last call, and shows each to comm_observe's function. Waits for the
// device: call it between steps.
static inline void   comm_settle(Comm* c);

static inline double comm_elements_sent(const Comm* c, CommKind k) { return (double)c->stats[k].elements_times_N / c->size; }
static inline double comm_bytes_sent(const Comm* c, CommKind k) { return (double)c->stats[k].bytes_times_N / c->size; }
// What all ranks together have sent so far, and how long this one stood still, on the world and all existing communicators split
// off it. Of a split each rank knows only its own group: all groups must be of one size, and are assumed to send the same.
static inline unsigned long long comm_total_bytes(const Comm* world);
static inline double comm_total_exposed(const Comm* world);
// observer sees each operation that is waited for from now on; NULL: no observer.
static inline void comm_observe(Comm* c, CommObserver observer, void* self) {
    comm_settle(c);
    c->world->observer = observer;
    c->world->observer_self = self;
}
static inline const char* comm_description(const Comm* c) { return c->world->description; }
// Bytes of MEMORY_COMMUNICATION that the world takes, and each communicator of N ranks split off it, until the world's comm_free.
static inline size_t comm_world_bytes(const Comm* c);
static inline size_t comm_split_bytes(const Comm* c, int N);
#define COMM_NUMBER_BYTES 64 // of the world, for comm_host_sum

// ---- sums: a backend that moves data through host memory also adds with these ----

// out (n) = rows[0] + rows[1] + ... + rows[N-1], each (n), in this order, rounded once. out may be one of the rows.
__attribute__((unused))
static void comm_add_rows(void* out, const void* const* rows, int N, size_t n, CommType t) {
    if (t == COMM_F64) {
        for (size_t i = 0; i < n; i++) {
            double sum = ((const double*)rows[0])[i];
            for (int q = 1; q < N; q++) sum += ((const double*)rows[q])[i];
            ((double*)out)[i] = sum;
        }
        return;
    }
    enum { BLOCK = 512 }; // stays in the cache
    float sum[BLOCK], term[BLOCK];
    const size_t size = comm_type_size(t);
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t m = size_min(n - i, BLOCK);
        convert_dtype(sum, DTYPE_F32, (const char*)rows[0] + i * size, (DType)t, m);
        for (int q = 1; q < N; q++) {
            convert_dtype(term, DTYPE_F32, (const char*)rows[q] + i * size, (DType)t, m);
            for (size_t k = 0; k < m; k++) sum[k] += term[k];
        }
        convert_dtype((char*)out + i * size, (DType)t, sum, DTYPE_F32, m);
    }
}
// into (n) += from (n)
static inline void comm_add(void* into, const void* from, size_t n, CommType t) {
    const void* rows[2] = { into, from };
    comm_add_rows(into, rows, 2, n, t);
}

// ---- issuing ----

static inline unsigned long long comm_sent_times_N(CommKind k, size_t n, int N) {
    unsigned long long others = (unsigned long long)N - 1, all = (unsigned long long)N;
    switch (k) {
    case COMM_ALL_REDUCE: return 2 * n * others;
    case COMM_REDUCE_SCATTER: case COMM_ALL_GATHER: return n * others * all;
    case COMM_BROADCAST: return n * others;
    case COMM_SEND: return n * all;
    default: return 0;
    }
}

// --comm nccl uses NCCL even for a single rank, so one GPU is enough to try it.
static inline bool comm_is_alone(const Comm* c) { return c->size == 1 && (c->world->nccl == NULL || c->link == NULL); }

// Bytes that an operation writes.
static inline size_t comm_output_bytes(const Comm* c, const CommSlot* s) {
    size_t bytes = s->n * comm_type_size(s->type);
    if (s->kind == COMM_SEND || s->kind == COMM_BARRIER || s->kind == COMM_SPLIT) return 0;
    return s->kind == COMM_ALL_GATHER ? bytes * (size_t)c->size : bytes;
}

// This rank's part of the buffer (N,n) that a reduce-scatter reads or an all-gather writes.
static inline char* comm_own_part(const Comm* c, const CommSlot* s) {
    char* full = s->kind == COMM_REDUCE_SCATTER ? (char*)s->in : (char*)s->out;
    return full + (size_t)c->rank * s->n * comm_type_size(s->type);
}

// NaN in every type.
static inline void comm_set_nan(void* p, size_t bytes, bool on_host) {
    char* nan = on_host ? (char*)p : (char*)xcalloc(bytes, 1);
    if (on_host) device_synchronize(); // an earlier operation may still write there
    memset(nan, 0xff, bytes);
    if (on_host) return;
    host_to_device(p, nan, bytes);
    device_synchronize(); // the copy reads nan
    free(nan);
}

// Strict mode, at the issue: saves the part of the input that the output overwrites, and makes the output NaN.
static inline void comm_poison(const Comm* c, CommSlot* s) {
    size_t bytes = s->n * comm_type_size(s->type), output = comm_output_bytes(c, s);
    if (output == 0) return;
    if (s->kind == COMM_ALL_REDUCE || (s->kind == COMM_BROADCAST && s->peer == c->rank)) s->own = (char*)s->out;
    if (s->kind == COMM_REDUCE_SCATTER && s->out == comm_own_part(c, s)) s->own = (char*)s->out;
    if (s->kind == COMM_ALL_GATHER && s->in == comm_own_part(c, s)) s->own = (char*)s->in;
    if (s->own) {
        s->kept = (char*)xcalloc(bytes, 1);
        device_to_host(s->kept, s->own, bytes);
    }
    comm_set_nan(s->out, output, s->on_host && s->kind == COMM_REDUCE_SCATTER);
}

// Alone: the shard is the whole.
static inline void comm_copy_alone(CommSlot* s) {
    size_t bytes = s->n * comm_type_size(s->type);
    if (s->on_host && s->kind == COMM_ALL_GATHER) host_to_device(s->out, s->in, bytes);
    else if (s->on_host) device_to_host(s->out, s->in, bytes);
    else if (s->in && s->out && s->in != s->out) device_copy(s->out, s->in, bytes);
}

static inline void comm_begin(Comm* c, CommSlot* s) {
    if (s->kept) { // strict mode: the input as it was issued
        host_to_device(s->own, s->kept, s->n * comm_type_size(s->type));
        device_synchronize();
        free(s->kept);
        s->kept = NULL;
    }
    s->begun = true;
    if (!comm_is_alone(c)) { c->world->backend->start(c, s); return; }
    oplog_start(c->world->log, &s->record);
    s->event.started = now_seconds();
    comm_copy_alone(s);
    s->event.finished = now_seconds();
    oplog_finish(c->world->log, &s->record);
    s->finished = true;
}

// peer: the other end or the root, a rank of c; -1: there is none. color: of a split. on_host: the shard is in host memory.
static inline CommOp comm_issue_at(Comm* c, CommKind kind, void* out, const void* in, size_t n, CommType t, int peer, int color,
                                   bool on_host) {
    CommSlot* s = &c->slots[c->issued % COMM_IN_FLIGHT];
    require(!s->live, "%s: %d operations are under way; %s, #%lld, was never waited for", c->name, COMM_IN_FLIGHT,
            comm_kind_names[s->kind], s->number);
    memset(s, 0, sizeof *s);
    s->kind = kind; s->type = t; s->n = n; s->peer = peer; s->color = color; s->out = out; s->in = in;
    s->on_host = on_host;
    s->number = c->issued++;
    s->live = true;
    CommEvent e = { c->name, kind, t, n, s->number, 0, 0, 0, 0, 0 };
    s->event = e;
    for (int k = 0; k < COMM_MARKS; k++) s->marks[k] = -1;
    s->marks[MARK_ISSUED] = device_mark();
    c->stats[kind].calls++;
    unsigned long long sent = comm_sent_times_N(kind, n, c->size);
    c->stats[kind].elements_times_N += sent;
    c->stats[kind].bytes_times_N += sent * comm_type_size(t);
    int world_peer = peer >= 0 ? c->world_rank[peer] : -1;
    if (c->skips) { // a fault on purpose
        s->begun = s->finished = true;
        c->skips = false;
        return s->number;
    }
    s->record = oplog_issue(c->world->log, c->name, comm_kind_names[kind], n, comm_type_name(t), world_peer);
    if (c->world->strict) comm_poison(c, s);
    else comm_begin(c, s);
    return s->number;
}

static inline CommOp comm_issue(Comm* c, CommKind kind, void* out, const void* in, size_t n, CommType t, int peer, int color) {
    return comm_issue_at(c, kind, out, in, n, t, peer, color, false);
}

static inline void comm_require_sum(const Comm* c, CommKind k, CommType t) {
    require(t != COMM_BYTE, "%s: %s of bytes: only numbers can be added", c->name, comm_kind_names[k]);
}
static inline void comm_require_peer(const Comm* c, CommKind k, int peer) {
    require(peer >= 0 && peer < c->size && (k == COMM_BROADCAST || peer != c->rank),
            "%s: %s of rank %d cannot name rank %d of %d", c->name, comm_kind_names[k], c->rank, peer, c->size);
}
static inline CommOp comm_all_reduce(Comm* c, void* buf, size_t n, CommType t) {
    comm_require_sum(c, COMM_ALL_REDUCE, t);
    return comm_issue(c, COMM_ALL_REDUCE, buf, buf, n, t, -1, 0);
}
static inline CommOp comm_reduce_scatter(Comm* c, void* shard, const void* full, size_t n, CommType t) {
    comm_require_sum(c, COMM_REDUCE_SCATTER, t);
    return comm_issue(c, COMM_REDUCE_SCATTER, shard, full, n, t, -1, 0);
}
static inline CommOp comm_all_gather(Comm* c, void* full, const void* shard, size_t n, CommType t) {
    return comm_issue(c, COMM_ALL_GATHER, full, shard, n, t, -1, 0);
}
static inline CommOp comm_reduce_scatter_to_host(Comm* c, void* shard, void* full, size_t n, CommType t) {
    comm_require_sum(c, COMM_REDUCE_SCATTER, t);
    return comm_issue_at(c, COMM_REDUCE_SCATTER, shard, full, n, t, -1, 0, true);
}
static inline CommOp comm_all_gather_from_host(Comm* c, void* full, const void* shard, size_t n, CommType t) {
    return comm_issue_at(c, COMM_ALL_GATHER, full, shard, n, t, -1, 0, true);
}
static inline CommOp comm_broadcast(Comm* c, void* buf, size_t n, CommType t, int root) {
    comm_require_peer(c, COMM_BROADCAST, root);
    return comm_issue(c, COMM_BROADCAST, buf, buf, n, t, root, 0);
}
static inline void comm_connect(Comm* c) {
    require(!c->connected, "%s: comm_connect was called twice", c->name);
    if (!comm_is_alone(c) && c->world->backend->connect) c->world->backend->connect(c);
    c->connected = true;
}
static inline void comm_share_memory(Comm* c) {
    if (c->world->options.windows && !comm_is_alone(c)) c->world->backend->share_memory(c);
}
static inline CommOp comm_send(Comm* c, const void* buf, size_t n, CommType t, int to) {
    require(c->connected, "%s: call comm_connect before the first send", c->name);
    comm_require_peer(c, COMM_SEND, to);
    return comm_issue(c, COMM_SEND, NULL, buf, n, t, to, 0);
}
static inline CommOp comm_recv(Comm* c, void* buf, size_t n, CommType t, int from) {
    require(c->connected, "%s: call comm_connect before the first receive", c->name);
    comm_require_peer(c, COMM_RECV, from);
    return comm_issue(c, COMM_RECV, buf, NULL, n, t, from, 0);
}

// ---- waiting ----

// Strict mode: begins what must be under way before the host may wait for `awaited`. All sends: if they began only at their own
// waits, two ranks that exchange messages and wait for their receives first would wait forever. And the receives before it from
// the same rank, because messages do not overtake one another.
static inline void comm_begin_messages(Comm* awaited_on, const CommSlot* awaited) {
    CommWorld* w = awaited_on->world;
    for (int i = 0; i < w->num_comms; i++) {
        Comm* c = w->comms[i];
        for (CommOp op = c->issued > COMM_IN_FLIGHT ? c->issued - COMM_IN_FLIGHT : 0; op < c->issued; op++) {
            CommSlot* s = &c->slots[op % COMM_IN_FLIGHT];
            bool same_queue = c == awaited_on && awaited->kind == COMM_RECV && s->kind == COMM_RECV && s->peer == awaited->peer;
            bool goes_first = s->kind == COMM_SEND || (same_queue && op < awaited->number);
            if (s->live && !s->begun && goes_first) comm_begin(c, s);
        }
    }
}

static inline void comm_wait(Comm* c, CommOp op) {
    require(op >= 0 && op < c->issued, "%s: comm_wait for operation #%lld, but only %lld were issued", c->name, op, c->issued);
    CommSlot* s = &c->slots[op % COMM_IN_FLIGHT];
    require(s->number == op && s->live, "%s: operation #%lld is waited for a second time", c->name, op);
    s->marks[MARK_WAIT_BEGUN] = device_mark();
    if (c->world->strict) comm_begin_messages(c, s);
    if (!s->begun) comm_begin(c, s);
    if (!comm_is_alone(c) && s->record.communicator[0]) { // else it was skipped
        oplog_wait_begin(c->world->log, &s->record);
        c->world->backend->finish(c, s);
        oplog_wait_end(c->world->log);
    }
    if (c->world->strict && s->on_host && s->kind == COMM_REDUCE_SCATTER) // this part is scratch, though only NCCL uses it
        comm_set_nan(comm_own_part(c, s), s->n * comm_type_size(s->type), false);
    s->marks[MARK_WAIT_ENDED] = device_mark();
    s->live = false;
    CommWorld* w = c->world;
    if (w->num_waited == COMM_MOST_WAITED) comm_settle(c);
    CommWaited* x = &w->waited[w->num_waited++];
    x->event = s->event;
    x->stats = &c->stats[s->kind];
    memcpy(x->marks, s->marks, sizeof x->marks);
}

static inline void comm_settle(Comm* c) {
    CommWorld* w = c->world;
    if (w->num_waited > 0) device_synchronize(); // then it has passed all marks
    for (int i = 0; i < w->num_waited; i++) {
        CommWaited* x = &w->waited[i];
        CommEvent* e = &x->event;
        double* times[COMM_MARKS] = { &e->issued, &e->wait_begun, &e->wait_ended, &e->started, &e->finished };
        const int* m = x->marks;
        for (int k = 0; k < COMM_MARKS; k++) if (m[k] >= 0) *times[k] = device_mark_time(m[k]);
        x->stats->exposed += device_mark_seconds(m[MARK_WAIT_BEGUN], m[MARK_WAIT_ENDED]);
        x->stats->busy += m[MARK_STARTED] < 0 ? e->finished - e->started : device_mark_seconds(m[MARK_STARTED], m[MARK_FINISHED]);
        for (int k = 0; k < COMM_MARKS; k++) if (m[k] >= 0) device_mark_free(m[k]);
        if (w->observer) w->observer(w->observer_self, e);
    }
    w->num_waited = 0;
}

static inline void comm_barrier(Comm* c) {
    device_synchronize(); // a rank is "here" when its earlier work is done
    comm_wait(c, comm_issue(c, COMM_BARRIER, NULL, NULL, 0, COMM_BYTE, -1, 0));
}

static inline double comm_host_sum(Comm* c, double x) {
    double* number = c->world->number;
    host_to_device(number, &x, sizeof x);
    comm_wait(c, comm_all_reduce(c, number, 1, COMM_F64));
    device_to_host(&x, number, sizeof x);
    return x;
}

static inline unsigned long long comm_total_bytes(const Comm* world) {
    const CommWorld* w = world->world;
    unsigned long long bytes = 0;
    for (int i = 0; i < w->num_comms; i++) {
        const Comm* c = w->comms[i];
        require(world->size % c->size == 0, "%s has %d of %d ranks: what the other groups send cannot be known", c->name, c->size,
                world->size);
        for (int k = 0; k < COMM_KINDS; k++) bytes += c->stats[k].bytes_times_N * (unsigned long long)(world->size / c->size);
    }
    return bytes;
}
static inline double comm_total_exposed(const Comm* world) {
    const CommWorld* w = world->world;
    double seconds = 0;
    for (int i = 0; i < w->num_comms; i++)
        for (int k = 0; k < COMM_KINDS; k++) seconds += w->comms[i]->stats[k].exposed;
    return seconds;
}

// ---- communicators ----
#include "comm_mpi.h"
#ifndef USE_NCCL
#define USE_NCCL 0 // make sets 1 for a GPU's program, unless it is called with USE_NCCL=0
#endif
#if USE_NCCL
#include "comm_nccl.cuh"
#endif

static inline size_t comm_split_bytes(const Comm* c, int N) {
    return c->world->backend ? c->world->backend->device_bytes(&c->world->options, N) : 0;
}
static inline size_t comm_world_bytes(const Comm* c) { return COMM_NUMBER_BYTES + comm_split_bytes(c, c->size); }

static inline void comm_step(Comm* c, long long step) { oplog_step(c->world->log, step); }

// The backend that moves the data; NULL: none is needed. This is the only place where it is chosen, after all ranks have met.
static inline const CommBackend* comm_choose(Comm* c) {
    int asked = c->world->options.backend;
    if (c->size == 1 && asked != COMM_NCCL) return NULL;
#if USE_NCCL
    if (asked != COMM_MPI && nccl_is_possible(c)) return &comm_nccl;
#endif
    require(!c->world->options.windows, "--nccl-windows: these ranks communicate by MPI, which has no windows; leave it out");
    return &comm_mpi;
}

// Options that no backend can follow.
static inline void comm_require_possible(const CommOptions* o) {
    require(USE_NCCL || o->backend != COMM_NCCL, "--comm nccl: this program was built without NCCL, which is for GPUs:"
            " use --comm mpi");
    require(!(o->ordered && o->all_reduce == ALL_REDUCE_RING),
            "--deterministic adds in rank order and --allreduce ring in the ring's order: leave one of them out");
}

// All ranks find one another; from here on the watchdog watches them.
static inline void comm_meet(Comm* c, const RankInfo* ranks) {
    CommWorld* w = c->world;
    char address[CONTROL_ADDRESS] = "";
    message_rank = c->rank;
    if (c->rank > 0) // only rank 0 prints
        require(freopen("/dev/null", "w", stdout) != NULL, "/dev/null cannot be opened for writing: %s", strerror(errno));
    if (c->rank == 0) control_listen(w->control, address);
    bool must_be_told = ranks->meeting[0] == '\0'; // then MPI tells the address
    if (must_be_told || !USE_NCCL || w->options.backend == COMM_MPI) mpi_meet(c, address);
    control_join(w->control, address);
}

// A communicator without its link; rank and size are set later.
static inline void comm_open(Comm* c, CommWorld* w, const char* name) {
    memset(c, 0, sizeof *c);
    c->world = w;
    op_name_set(c->name, sizeof c->name, name);
    c->slots = (CommSlot*)xcalloc(COMM_IN_FLIGHT, sizeof(CommSlot));
    w->comms = (Comm**)xrealloc(w->comms, (size_t)(w->num_comms + 1) * sizeof(Comm*));
    w->comms[w->num_comms++] = c;
    oplog_join(w->log, c->name);
}

static inline void comm_init(Comm* c, const CommOptions* o, RankInfo ranks, Control* control) {
    CommWorld* w = (CommWorld*)xcalloc(1, sizeof(CommWorld));
    w->options = *o;
    const char* strict = getenv("SHARD_COMM_STRICT");
    require(strict == NULL || strcmp(strict, "0") == 0 || strcmp(strict, "1") == 0,
            "SHARD_COMM_STRICT must be 0 or 1, not '%s'", strict);
    w->strict = strict && strict[0] == '1';
    comm_require_possible(o);
    w->control = control;
    control_init(control, ranks, o->timeout, o->out);
    w->log = &control->log;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    comm_open(c, w, "world");
    c->rank = ranks.rank;
    c->size = ranks.size;
    c->world_rank = (int*)xcalloc((size_t)ranks.size, sizeof(int));
    for (int q = 0; q < ranks.size; q++) c->world_rank[q] = q;
    w->number = (double*)device_alloc(COMM_NUMBER_BYTES, MEMORY_COMMUNICATION);
    w->waited = (CommWaited*)xcalloc(COMM_MOST_WAITED, sizeof(CommWaited));
    snprintf(w->description, sizeof w->description, "one rank, nothing to communicate");
    if (c->size > 1) comm_meet(c, &ranks);
    w->backend = comm_choose(c);
    if (w->backend) w->backend->open(c);
}

static inline void comm_alone(Comm* c, Comm* parent, const char* name) {
    comm_open(c, parent->world, name);
    c->size = 1;
    c->world_rank = (int*)xcalloc(1, sizeof(int));
    c->world_rank[0] = parent->world_rank[parent->rank];
}

static inline void comm_split(Comm* c, Comm* parent, const char* name, int color) {
    require(color >= 0, "comm_split '%s': color %d is negative", name, color);
    char full_name[64];
    snprintf(full_name, sizeof full_name, "%s.%d", name, color);
    CommWorld* w = parent->world;
    for (int i = 0; i < w->num_comms; i++) {
        require(strcmp(w->comms[i]->name, full_name) != 0, "comm_split: there is a communicator '%s' already", full_name);
        for (int k = 0; k < COMM_IN_FLIGHT; k++)
            require(!w->comms[i]->slots[k].live, "comm_split '%s': wait for the operations under way first", name);
    }
    if (comm_is_alone(parent)) { comm_alone(c, parent, full_name); return; }
    comm_open(c, w, full_name);
    w->backend->split(c, parent, color);
}

static inline void comm_free(Comm* c) {
    CommWorld* w = c->world;
    for (int i = 0; i < COMM_IN_FLIGHT; i++)
        require(!c->slots[i].live, "%s: %s, operation #%lld, was never waited for", c->name,
                comm_kind_names[c->slots[i].kind], c->slots[i].number);
    bool is_world = w->comms[0] == c;
    require(!is_world || w->num_comms == 1, "comm_free of the world before '%s'", w->comms[w->num_comms - 1]->name);
    if (is_world) {
        comm_barrier(c); // the watchdog can watch this wait, but not the library's own at its end
        comm_settle(c);
        if (w->backend) w->backend->close(c);
        if (w->mpi) mpi_leave(w);
        control_stop(w->control);
    } else comm_settle(c); // before its stats are gone
    int at = 0;
    while (w->comms[at] != c) at++;
    w->num_comms--;
    memmove(w->comms + at, w->comms + at + 1, (size_t)(w->num_comms - at) * sizeof(Comm*));
    free(c->slots);
    free(c->world_rank);
    memset(c, 0, sizeof *c);
    if (!is_world) return;
    device_free(w->number);
    free(w->waited);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    free(w->comms);
    free(w);
}
#endif
