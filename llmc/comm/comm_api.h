/*
comm_api.h - communication between ranks: the collectives that programs use, documented once. Programs include comm.h.

Every operation is asynchronous: it is ordered after all layer calls issued so far, returns immediately, and returns a
CommOp. Until comm_wait(c, op), the operation owns its buffers: do not read an output or write an input. Waits may come
in any order, but every operation must be waited for exactly once. All ranks of a communicator issue the same
collectives in the same order, and every send has a receive. Buffers are device memory; n counts elements.

Sums       are computed in fp32 (COMM_F64: in double) and rounded to the type wherever the backend stores one. Ordered
           mode (--deterministic) computes each sum in rank order 0..N-1 and rounds once, in every collective.
Counted    per kind: calls, and the bytes that a rank sends: all-reduce 2n(N-1)/N as in a ring, reduce-scatter,
           all-gather and all-to-all (n per part) n(N-1), all-to-all-v its parts for other ranks, broadcast n(N-1)/N,
           send n. These are stored multiplied by N, which makes them whole numbers.
Alone      (N = 1) every operation runs immediately and sends nothing.
Strict     mode (SHARD_COMM_STRICT=1): an operation runs at its wait, and its output is NaN until then. Reading an
           output or writing an input before the wait, and missing waits, then give wrong numbers every time instead of
           rare races. Ranks must wait in the same order; an error reports ranks that run different operations, or
           expect another number of elements than they are sent (over NCCL only after the watchdog's timeout).
Emulated   link (--emulate-link, over MPI): an operation takes at least as long as its counted bytes need at that rate.
           This time begins when all ranks of a collective have reached it. The operations of a rank use the link one
           after another, and a message arrives at the end of its time. An all-to-all-v takes all ranks as long as the
           one that sends most. Results are the same bits.
           (--emulate-host-link of FSDP does the same for copies of shards between host and device, one queue per
           direction.)
Failures   are handled by the watchdog (control.h): it names the rank that died or hangs, and ends this process.

A Comm must stay where it is from comm_init or comm_split to comm_free; there is no global state.
*/
#ifndef LLMC_COMM_API_H
#define LLMC_COMM_API_H
#include "../base/callers.h"
#include "../base/common.h"
#include "../base/options.h"
#include "../base/precision.h"
#include "../device/device.h"
#include "control.h"
#include "../watch/flight_recorder.h"
#include "../base/rank_info.h"
#include <pthread.h>

// The first three have DType's values.
typedef enum { COMM_F32, COMM_BF16, COMM_F16, COMM_F64, COMM_BYTE } CommType;
#define COMM_FLOATX ((CommType)FLOATX_DTYPE)
#define COMM_FLOATNS ((CommType)FLOATNS_DTYPE)
static inline size_t comm_type_size(CommType t) {
    return t == COMM_F64 ? 8 : t == COMM_BYTE ? 1 : dtype_size((DType)t);
}
static inline const char* comm_type_name(CommType t) {
    return t == COMM_F64 ? "fp64" : t == COMM_BYTE ? "byte" : dtype_name((DType)t);
}

typedef enum {
    COMM_ALL_REDUCE, COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_ALL_TO_ALL, COMM_ALL_TO_ALL_V, COMM_BROADCAST,
    COMM_SEND, COMM_RECV, COMM_BARRIER, COMM_SPLIT, COMM_KINDS
} CommKind;
static const char* const comm_kind_names[COMM_KINDS] = {
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "all-to-all-v", "broadcast", "send", "receive",
    "barrier", "split"
};

// ---- options ----
enum { COMM_AUTO, COMM_NCCL, COMM_MPI };
enum { ALL_REDUCE_AUTO, ALL_REDUCE_LIBRARY, ALL_REDUCE_RING };
typedef struct {
    int backend;     // COMM_AUTO, ...
    int all_reduce;  // ALL_REDUCE_AUTO, ...
    int ordered;     // sums in rank order: Options.deterministic, set by the program after parsing
    double link;     // --emulate-link, Gbit/s; 0: off
    double timeout;  // seconds
    const char* out; // folder for the last operations of a failed run, "": stderr; Options.out, set by the program
} CommOptions;

static inline void options_comm(OptionTable* t, CommOptions* o) {
    memset(o, 0, sizeof *o);
    o->timeout = 600;
    o->out = "";
    options_group(t, "ranks");
    option_choice(t, "comm", &o->backend, "auto|nccl|mpi",
                  "library that moves data between ranks; auto: NCCL if every rank has its own GPU, else MPI");
    option_choice(t, "allreduce", &o->all_reduce, "auto|library|ring",
                  "library: the all-reduce of NCCL or MPI; ring: our own in llmc/comm/ring.h, built from sends and"
                  " receives; auto: NCCL's, or over MPI our own in rank order, which is faster than MPI_Iallreduce");
    option_float(t, "comm-timeout", &o->timeout, 0.1, 1e6,
                 "seconds to wait for other ranks before the run ends with an error");
    option_float(t, "emulate-link", &o->link, 0, 1e6,
                 "Gbit/s of a slower network to emulate: whatever a rank sends takes at least as long as it would on"
                 " its own link at this rate (MPI only); 0: off");
    options_group(t, NULL);
}

static inline const char* comm_all_reduce_text(const CommOptions* o, bool over_mpi) {
    bool by_rank = o->ordered || (over_mpi && o->all_reduce == ALL_REDUCE_AUTO);
    return by_rank ? "in rank order" : o->all_reduce == ALL_REDUCE_RING ? "by our ring" : "by the library";
}

// ---- the communicator ----
typedef long long CommOp; // number of an operation on its communicator, from 0
typedef struct { size_t n, at; } CommPart; // n elements from element `at` of a buffer

typedef struct {
    unsigned long long calls, bytes_times_N; // sent per rank, by the formula
    unsigned long long posted; // bytes that this rank actually sent, counted where our code sends and not the library
    double exposed;            // seconds that compute waited in comm_wait; set by comm_collect_times, as is busy
    double busy;               // seconds from start to finish of all operations, if CommNotes.counts_busy
} CommStats;

// The times of an operation, by now_seconds(): when compute reached its issue and its wait, and when it continued after
// the wait; when its data began to move, and had arrived. On a GPU they are times of its streams, not of the host,
// except for the last two of MPI.
typedef struct {
    const char* communicator;
    CommKind kind;
    CommType type;
    size_t n;
    CommOp number;
    double issued, wait_begun, wait_ended, started, finished;
    int ranks;            // of the communicator
    Callers callers;      // the functions that called it
    const void* data;     // the parameters, gradients or activations that it sends, before packing; a view
    size_t bytes;         // of this rank's part of data
} CommEvent;
enum { EVENT_ISSUED, EVENT_WAIT_BEGUN, EVENT_WAIT_ENDED, EVENT_STARTED, EVENT_FINISHED, COMM_EVENTS };
typedef void (*CommObserver)(void* self, const CommEvent* e);

typedef struct {
    CommKind kind;
    CommType type;
    size_t n;             // all-to-all-v: of the parts for other ranks
    int peer;             // root, to, from: rank on this communicator; -1: none
    int color;            // of a split
    bool on_host;         // the shard is in host memory
    CommOp number;
    void* out;            // views
    const void* in;
    const CommPart *from, *to; // (N) parts of an all-to-all-v, views; NULL: another kind
    char *own, *kept;     // strict mode: the input that the output overwrites, a view; its bytes, owned
    bool live, begun;     // not yet waited for; handed to the backend
    bool finished;        // set by the backend under the world's lock, as are `event`'s started and finished
    OpRecord record;      // as in the log of operations
    CommEvent event;      // a backend that sets no marks sets started and finished; the rest comes from `marks`
    int events[COMM_EVENTS]; // marks of device.h, owned; -1: none
} CommSlot;

// An operation after its wait, whose times are not known yet.
typedef struct { CommEvent event; CommStats* stats; int events[COMM_EVENTS]; } CommWaited;
#ifndef COMM_WAITED_CAPACITY
#define COMM_WAITED_CAPACITY 1024 // initial capacity
#endif

// Notes on operations (comm_notes.h).
typedef struct {
    CommObserver observer;    // sees each one after its wait; NULL: there is none
    void* self;               // the observer's own
    bool counts_busy;         // CommStats.busy also counts without an observer, for one more time per operation
    bool skips;               // --fault skip: the next operation with other ranks is left out, and they wait for it
    const void* about;        // data of the operation that is issued next; NULL: its buffer
    size_t about_bytes;
    CommWaited* waited;       // (capacity) num_waited operations in the order of their waits, owned
    int num_waited, capacity;
} CommNotes;

struct CommBackend;
typedef struct Comm Comm;
typedef bool CommPairs(int a, int b, int N); // symmetric: whether ranks a and b of N send messages to each other
enum { AXIS_TP, AXIS_PP, AXIS_DP, AXIS_CP, AXIS_ALL, COMM_AXES }; // first three as in parallel/axes.h; ALL: several

// The state that all communicators of a process share.
typedef struct {
    CommOptions options;
    const struct CommBackend* backend; // NULL: this rank is alone
    void *mpi, *nccl;         // the backends' own; NULL: not in use
    char description[256];    // "MPI (Open MPI 4.1.4), ...", for the log
    bool strict;
    Control* control;         // not owned
    FlightRecorder* recorder; // a view of control's
    Comm** comms;             // (num_comms) all that exist; the array is owned, they are not
    int num_comms;
    pthread_mutex_t lock;     // guards what the backend's thread and the host both write
    pthread_cond_t changed;   // an operation was issued, or is finished
    CommNotes notes;
    double* number;           // device memory of comm_host_sum, owned
    Comm* allocates;          // the communicator whose memory comm_alloc is allocating; NULL: none
    Comm* registers;          // on which comm_register_memory registers memory; NULL: on the world
} CommContext;

#ifndef COMM_IN_FLIGHT
#define COMM_IN_FLIGHT 1024   // operations of a communicator that may be under way
#endif
struct Comm {
    int rank, size;           // this process, and the number of processes
    CommStats stats[COMM_KINDS];
    char name[24];            // "world"; "shard.1": group 1 of the split "shard"
    int axis;                 // AXIS_DP unless a mesh has set another
    CommContext* world;       // owned by the world's Comm
    const struct CommBackend* backend; // the world's; for a single rank, one that copies
    CommOp issued;            // operations so far
    CommPairs* pairs;         // the argument of comm_connect; NULL: not called
    CommSlot* slots;          // (COMM_IN_FLIGHT) operation k has slot k % COMM_IN_FLIGHT, owned
    int* world_rank;          // (size) each rank's number in the world, owned
    void* link;               // the backend's own
};

// The functions of a backend. The thread that issues operations calls all of them except `open` and `close`.
typedef struct CommBackend {
    void (*open)(Comm* world);                // sets the world's link and description; all ranks have met
    void (*close)(Comm* world);               // NULL: nothing to do
    void (*split)(Comm* c, Comm* parent, int color); // sets c's rank, size, world_rank and link
    void (*connect)(Comm* c);                 // prepares messages between two ranks; NULL: nothing to do
    void (*register_memory)(Comm* world);     // NULL: nothing to do
    void (*start)(Comm* c, CommSlot* s);      // begins s after all layer calls issued so far, without waiting
    void (*finish)(Comm* c, CommSlot* s);     // layer calls issued from now on see the result of s
    size_t (*device_bytes)(const CommOptions* o, int N); // of MEMORY_COMMUNICATION that a communicator of N ranks takes
    void (*look)(CommContext* w);             // notes finished operations, whose marks are freed next; or NULL
} CommBackend;

// ---- functions for programs ----
// Sets the environment variables for NCCL that the driver reads at its start, unless the user has set them. Call before
// device_init.
static inline void   comm_choose_environment(const CommOptions* o, int ranks);
// Opens the world, which contains all ranks. Also starts control, which the caller owns.
static inline void   comm_init(Comm* c, const CommOptions* o, RankInfo ranks, Control* control);
// Opens a communicator for the ranks of parent with the same color, in the same order. Collective, with no operation
// under way.
static inline void   comm_split(Comm* c, Comm* parent, const char* name, int color);
// Opens a communicator of this rank only, for groups of one rank. Costs nothing, and is not collective.
static inline void   comm_alone(Comm* c, Comm* parent, const char* name);
// Dies if an operation was never waited for. Free the world last, and device memory before it: NCCL may have registered
// it.
static inline void   comm_free(Comm* c);
static inline void   comm_step(Comm* c, long long step); // sets the step of the following operations, counted from 1

// Registers all memory for data that ranks exchange (parameters, gradients, communication) allocated since comm_init,
// so that NCCL's kernels on other GPUs read and write it in place. If that is impossible, operations run without it,
// and comm_description says why. Collective over the world; the ranks of a communicator must have allocated the same
// sizes in the same order.
static inline void   comm_register_memory(Comm* world);
// Makes comm_register_memory register on c, which exchanges most of the memory, instead of on the world.
static inline void   comm_register_on(Comm* c);
// Like device_alloc, for memory of any kind that will be registered on c.
static inline void*  comm_alloc(Comm* c, size_t bytes, MemoryKind kind);

// buf (n) = sum over ranks, in place
static inline CommOp comm_all_reduce(Comm* c, void* buf, size_t n, CommType t);
// shard (n) = this rank's part of the sum over ranks of full (N,n); shard may be full + rank*n
static inline CommOp comm_reduce_scatter(Comm* c, void* shard, const void* full, size_t n, CommType t);
// full (N,n) = every rank's shard (n), by rank; shard may be full + rank*n. Until comm_wait, layers may read the shard.
static inline CommOp comm_all_gather(Comm* c, void* full, const void* shard, size_t n, CommType t);
// For both, the shard may be in host memory from offload_alloc. On a GPU the copy is then part of the operation and
// overlaps with compute; it uses this rank's part of full as scratch, so that reduce-scatter overwrites it. The host
// may write a gathered shard, or read a reduced one, only after comm_wait and then device_synchronize.
// in (N,n), out (N,n): row q of in goes to rank q, row q of out comes from rank q. They must not overlap.
static inline CommOp comm_all_to_all(Comm* c, void* out, const void* in, size_t n, CommType t);
// The same with uneven parts: part to[q] of in goes to rank q, and part from[q] of out comes from it, where from[q].n is
// that rank's to[rank].n, perhaps 0. Parts of in may overlap one another, as when several ranks get the same elements;
// a part of out may overlap no other part. The rest of out stays as it is. from (N) and to (N) must not change until
// comm_wait.
static inline CommOp comm_all_to_all_v(Comm* c, void* out, const CommPart* from, const void* in, const CommPart* to,
                                       CommType t);
// buf (n) = buf of the root
static inline CommOp comm_broadcast(Comm* c, void* buf, size_t n, CommType t, int root);
// Sends buf (n) to rank `to`. It may be overwritten after the wait, even if it has not arrived yet.
// Call comm_connect before the first send or receive: it prepares messages between these pairs of c, and is collective.
static inline void   comm_connect(Comm* c, CommPairs* pairs);
static inline CommOp comm_send(Comm* c, const void* buf, size_t n, CommType t, int to);
static inline CommOp comm_recv(Comm* c, void* buf, size_t n, CommType t, int from);
// Layer calls issued later see the result. The host continues immediately if the backend allows it.
static inline void   comm_wait(Comm* c, CommOp op);
static inline void   comm_barrier(Comm* c);               // returns after every rank has called it
static inline double comm_host_sum(Comm* c, double x);    // sums a number on the host over all ranks; blocks

// Adds up the times of all operations since the last call, and passes each to the observer. Waits for the device only
// if it has not passed all their waits. After a step it has, because the program has read the loss, so the log can
// print the exposed time of this step without another wait. Without an observer it reads one time per operation.
static inline void   comm_collect_times(Comm* c);

// Returns the bytes that each of N ranks sends in an all-reduce of `bytes` bytes.
static inline double ring_bytes(double bytes, int N) { return 2.0 * (N - 1) / N * bytes; }
// Returns the bytes that a rank of c has sent so far, by the formulas above.
static inline double comm_bytes_sent(const Comm* c, CommKind k) { return (double)c->stats[k].bytes_times_N / c->size; }
// Return the same for this rank on all existing communicators, and the seconds of its waits.
static inline double comm_rank_bytes(const Comm* world);
static inline double comm_rank_exposed(const Comm* world);
// From now on calls observer for each operation after its wait; NULL: no observer.
static inline void   comm_observe(Comm* c, CommObserver observer, void* self);

// Returns true if operations of c are kernels, which take a part of the GPU from concurrent layers.
static inline bool comm_has_kernels(const Comm* c) { return c->world->nccl != NULL && c->size > 1; }

static inline const char* comm_description(const Comm* c) { return c->world->description; }
// Return the bytes of MEMORY_COMMUNICATION for the world, and for each communicator of N ranks, until comm_free of the
// world.
static inline size_t comm_world_bytes(const Comm* c);
static inline size_t comm_split_bytes(const Comm* c, int N);
#define COMM_NUMBER_BYTES 64 // of the world, for comm_host_sum; 0 without a backend
#endif
