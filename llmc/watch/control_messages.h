/*
control_messages.h - the messages between ranks that are not data, the collectives made of them, and the state of a
rank's connections and watchdog.

Messages are this program's structs, byte for byte: all ranks run the same program on the same kind of machine, which is
checked when they meet. Only the watchdog reads and writes sockets; other threads put messages into its queues.
*/
#ifndef LLMC_CONTROL_MESSAGES_H
#define LLMC_CONTROL_MESSAGES_H
#include "../base/thread.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include "flight_recorder.h"
#include "../base/rank_info.h"

#define CONTROL_ADDRESS 512              // bytes of an address as text, the final 0 included: "PORT WORD HOST HOST ..."
#define CONTROL_MAX_MESSAGE (1u << 20)   // bytes of the largest message
#define CONTROL_MAX_INBOX (64u << 20)    // bytes of messages that no call has asked for yet
#define CONTROL_STRANGERS 16             // connections at a time that have not identified themselves yet
#define CONTROL_BEAT 0.2                 // seconds between heartbeats
#define CONTROL_SETTLE 0.5               // seconds after which every rank's state is known to rank 0
#define CONTROL_PATIENCE 2.0             // seconds past the deadline in which rank 0 must have named the late rank
#define CONTROL_SILENCE 1.0              // seconds without a heartbeat after which messages mention it
#define CONTROL_STOPPED 1.0              // a short wait that ends this many seconds late means that its process was
                                         // stopped
#define CONTROL_FAREWELL 1.0             // seconds that rank 0 waits at most for the others to have written everything

// Returns the seconds in which the others may report errors of their own, before that of a rank that leaves ends them:
// SHARD_LEAVE_SECONDS, 0.5 unless a test sets a longer time. It ends early once no other rank can report anything.
static inline double control_leave_seconds(void) {
    const char* text = getenv("SHARD_LEAVE_SECONDS");
    if (text == NULL) return 0.5;
    char* end;
    double seconds = strtod(text, &end);
    require(isdigit((unsigned char)text[0]) && *end == '\0' && seconds <= 3600,
            "SHARD_LEAVE_SECONDS must be seconds from 0 to 3600, not '%s'", text);
    return seconds;
}

#define RANK_NAME 40                     // bytes of a rank's name besides its number, and of its machine's name

typedef struct { char* data; size_t bytes; } ControlBytes; // data owned; followed by a 0 that is not counted

typedef enum { MESSAGE_HELLO = 1, MESSAGE_WELCOME, MESSAGE_BEAT, MESSAGE_BYTES, MESSAGE_END, MESSAGE_HEARD,
               MESSAGE_LEFT, MESSAGE_SPEAK, MESSAGE_GOODBYE, MESSAGE_KINDS } ControlMessage;
typedef struct { uint32_t kind, bytes; } ControlHeader; // before every message

#define CONTROL_MAGIC "shard.c control"
typedef struct { // the first message of a rank that connects
    char magic[16];
    char word[68];                   // of the address: tells this run's ranks from strangers
    int32_t rank, size, layout;      // layout: sizeof the structs that are sent
} ControlHello;

typedef struct { // a heartbeat; num_channels OpChannels follow
    double waited;    // seconds that the host has waited for `awaited`; -1: it does not wait
    OpRecord awaited;
    RankProgress progress;
    int num_channels;
} ControlBeat;

static inline int32_t control_layout(void) { return (int32_t)(sizeof(ControlBeat) * 65536 + sizeof(OpChannel)); }

// Why the run ends. MESSAGE_END holds it as one byte, and then in words.
typedef enum {
    REASON_NONE,    // it does not
    REASON_DIED,    // a connection closed, or a rank crashed
    REASON_LATE,    // a deadline passed
    REASON_REFUSED, // a rank cannot join
    REASON_LEFT,    // a rank exits, and has said why
    REASON_SIGTERM  // a rank exits because it got this signal
} ControlReason;

typedef struct { char* data; size_t n, capacity; } ControlBuffer; // data owned

typedef struct {
    int fd;                       // -1: not connected
    bool joined, goodbye;
    bool heard_end;               // it has said why the run ends
    double heard;                 // when its last message came
    ControlBuffer in, out;        // bytes read, bytes to be written
    ControlBuffer inbox;          // messages for control_gather and control_broadcast, each after its length
    ControlBeat beat;             // its last; rank 0 also keeps its own
    OpChannel* channels;          // (beat.num_channels), owned
} ControlPeer;

typedef struct {
    RankInfo ranks;
    FlightRecorder recorder;
    ProgressTable progress;
    char (*names)[RANK_NAME];  // (size) what ranks are called besides their numbers: "dp 1, pp 0, tp 1"; owned.
                               // NULL: nothing
    char (*hosts)[RANK_NAME];  // (size) their machines, "node2"; owned. NULL: all are on one
    double timeout, grace;     // grace: control_leave_seconds
    const char* out;           // not owned
    char word[68];
    int listener, wake[2];     // wake: a pipe that ends the watchdog's sleep
    ControlPeer* peers;        // rank 0: (size), all by rank; others: (1), rank 0
    int num_peers, joined;
    ControlPeer strangers[CONTROL_STRANGERS];
    struct pollfd* polled;     // (num_peers + CONTROL_STRANGERS + 3), owned
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ended;                // the watchdog has ended
    bool leaving, stopping;    // requests to it: an exit() elsewhere; the end of the run
    bool left;                 // it has told the others of that exit()
    int sigterm;               // a signalfd; -1: SIGTERM is ignored, or somebody else handles it
    bool told;                 // SIGTERM has arrived
    pid_t process;
    double looked, stopped;    // control_time: the last look at the clock, and seconds of being stopped so far
    double turn, last_beat;    // when the watchdog last looked at the clock, and last sent heartbeats
    double sigterm_at;         // when SIGTERM was noticed, 0: not
    ControlReason reason;      // why the run ends
    char why[1024];            // the same in words
    double leave_at;           // when this rank leaves because of it
} Control;

// Returns the rank that `p` is the connection to.
static inline int control_rank_of(const Control* c, const ControlPeer* p) {
    return c->ranks.rank == 0 ? (int)(p - c->peers) : 0;
}

// Returns for how many seconds this process was stopped (by scontrol suspend, say) since `turn`,
// besides its own wait of `wait`.
static inline double control_stopped(double turn, double wait) {
    double late = now_seconds() - turn - wait;
    return late < CONTROL_STOPPED ? 0 : late;
}
// The clock for the deadline of joining. It stands still while this process is stopped: whoever waits looks at it every
// beat, so a longer time between two looks was none of waiting, wherever the stop came. Only for the main thread.
static inline double control_time(Control* c) {
    double late = control_stopped(c->looked, CONTROL_BEAT);
    c->looked = now_seconds();
    c->stopped += late;
    return c->looked - c->stopped;
}

// Waits for `changed`, at most until `until` of now_seconds(); the caller holds the lock.
static inline void control_wait_changed(Control* c, double until) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    double left = fmax(0, until - now_seconds()) + 1e-9 * (double)t.tv_nsec;
    t.tv_sec += (time_t)left;
    t.tv_nsec = (long)(1e9 * (left - floor(left)));
    pthread_cond_timedwait(&c->changed, &c->lock, &t);
}

// ---- messages ----

// Returns a copy of n bytes, which the caller owns.
static inline ControlBytes control_bytes(const void* data, size_t n) {
    ControlBytes b = { new_array(char, n + 1), n };
    if (n) memcpy(b.data, data, n);
    return b;
}

static inline void control_buffer_add(ControlBuffer* b, const void* data, size_t n) {
    if (b->n + n > b->capacity) {
        b->capacity = 2 * (b->n + n);
        b->data = (char*)xrealloc(b->data, b->capacity);
    }
    if (n) memcpy(b->data + b->n, data, n);
    b->n += n;
}

static inline void control_buffer_drop(ControlBuffer* b, size_t n) {
    b->n -= n;
    if (b->n) memmove(b->data, b->data + n, b->n);
}

static inline void control_queue(ControlPeer* p, ControlMessage kind, const void* data, size_t bytes) {
    if (p->fd < 0) return;
    ControlHeader h = { (uint32_t)kind, (uint32_t)bytes };
    control_buffer_add(&p->out, &h, sizeof h);
    control_buffer_add(&p->out, data, bytes);
}

static inline void control_queue_all(Control* c, ControlMessage kind, const void* data, size_t bytes) {
    for (int i = 0; i < c->num_peers; i++) control_queue(&c->peers[i], kind, data, bytes);
}

// Tells a peer that the run ends, and why.
static inline void control_queue_end(const Control* c, ControlPeer* p) {
    char message[sizeof c->why + 1];
    int n = snprintf(message, sizeof message, "%c%s", (char)c->reason, c->why);
    control_queue(p, MESSAGE_END, message, (size_t)n);
}

static inline void control_wake(Control* c) { if (write(c->wake[1], "", 1) < 0) { } } // a full pipe also wakes

// Writes what the socket takes without waiting. An error shows up when the socket is read.
static inline void control_flush(ControlPeer* p) {
    while (p->fd >= 0 && p->out.n > 0) {
        ssize_t n = send(p->fd, p->out.data, p->out.n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0) return;
        control_buffer_drop(&p->out, (size_t)n);
    }
}

static inline void control_close(ControlPeer* p) {
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
}

static inline void control_peer_free(ControlPeer* p) {
    control_close(p);
    free(p->in.data);
    free(p->out.data);
    free(p->inbox.data);
    free(p->channels);
    memset(p, 0, sizeof *p);
    p->fd = -1;
}

// ---- collectives ----
// They block the host, and let ranks decide together. A single rank does not wait. To the watchdog they are operations
// of a communicator "control".

// Begins such an operation, for which this rank waits from here on.
static inline OpRecord control_op_begin(Control* c, const char* name, int root, size_t bytes) {
    invariant(bytes <= CONTROL_MAX_MESSAGE, "a message between hosts holds %u bytes, not %zu", CONTROL_MAX_MESSAGE,
              bytes);
    OpRecord op = flight_recorder_issue(&c->recorder, "control", name, 0, "bytes", root);
    flight_recorder_wait_begin(&c->recorder, &op);
    return op;
}
static inline void control_op_end(Control* c, OpRecord op) {
    flight_recorder_wait_end(&c->recorder);
    flight_recorder_finish(&c->recorder, &op);
}

// Waits for the oldest message of a peer. The caller holds the lock, and owns the message.
// The watchdog checks the deadline.
static inline ControlBytes control_pop(Control* c, ControlPeer* p) {
    uint32_t n;
    while (p->inbox.n < sizeof n) pthread_cond_wait(&c->changed, &c->lock);
    memcpy(&n, p->inbox.data, sizeof n);
    ControlBytes b = control_bytes(p->inbox.data + sizeof n, n);
    control_buffer_drop(&p->inbox, sizeof n + n);
    return b;
}

// Every rank gives a string of bytes, whose number may differ between ranks. Rank 0 gets all of them, by rank (N), and
// frees them with control_gathered_free; the others get NULL. Dies if one is longer than CONTROL_MAX_MESSAGE.
static inline ControlBytes* control_gather(Control* c, const void* data, size_t bytes) {
    ControlBytes* given = NULL;
    OpRecord op = control_op_begin(c, "gather", 0, bytes);
    pthread_mutex_lock(&c->lock);
    if (c->ranks.rank > 0) {
        control_queue(&c->peers[0], MESSAGE_BYTES, data, bytes);
        control_wake(c);
    } else {
        given = new_array(ControlBytes, c->ranks.size);
        given[0] = control_bytes(data, bytes);
        for (int r = 1; r < c->ranks.size; r++) given[r] = control_pop(c, &c->peers[r]);
    }
    pthread_mutex_unlock(&c->lock);
    control_op_end(c, op);
    return given;
}
static inline void control_gathered_free(const Control* c, ControlBytes* given) {
    for (int r = 0; given && r < c->ranks.size; r++) free(given[r].data);
    free(given);
}

// Every rank gives an error or NULL. Returns the first of them on rank 0, which frees it, and NULL on the others.
static inline char* control_first_error(Control* c, const char* error) {
    ControlBytes* given = control_gather(c, error, error ? strlen(error) : 0);
    char* first = NULL;
    for (int q = 0; given && q < c->ranks.size && first == NULL; q++)
        if (given[q].bytes > 0) first = format_string("rank %d cannot write: %s", q, given[q].data);
    control_gathered_free(c, given);
    return first;
}

// Every rank gets rank 0's bytes, and frees them.
static inline ControlBytes control_broadcast(Control* c, const void* data, size_t bytes) {
    OpRecord op = control_op_begin(c, "broadcast", 0, bytes);
    pthread_mutex_lock(&c->lock);
    ControlBytes received = c->ranks.rank > 0 ? control_pop(c, &c->peers[0]) : control_bytes(data, bytes);
    if (c->ranks.rank == 0) {
        control_queue_all(c, MESSAGE_BYTES, data, bytes);
        control_wake(c);
    }
    pthread_mutex_unlock(&c->lock);
    control_op_end(c, op);
    return received;
}

// Every rank gives the same number of bytes. Rank 0 gets those of all, by rank: a new array (N), which it frees;
// the others get NULL.
static inline void* control_gather_array(Control* c, const void* mine, size_t bytes) {
    ControlBytes* given = control_gather(c, mine, bytes);
    char* all = given ? (char*)xcalloc((size_t)c->ranks.size, bytes) : NULL;
    for (int r = 0; given && r < c->ranks.size; r++)
        memcpy(all + (size_t)r * bytes, given[r].data, size_min(bytes, given[r].bytes));
    control_gathered_free(c, given);
    return all;
}

// Copies rank 0's x (bytes) to all ranks: its answer to the values that it gathered.
static inline void control_share(Control* c, void* x, size_t bytes) {
    ControlBytes answer = control_broadcast(c, x, bytes);
    memcpy(x, answer.data, size_min(bytes, answer.bytes));
    free(answer.data);
}

// As control_gather_array, and every rank gets the array. Rank 0 sends N times N of them, so it is for a few bytes.
static inline void* control_all_gather(Control* c, const void* mine, size_t bytes) {
    char* all = (char*)control_gather_array(c, mine, bytes);
    ControlBytes answer = control_broadcast(c, all, (size_t)c->ranks.size * bytes);
    free(all);
    return answer.data;
}

// Dies on every rank with the error that rank 0 has found, which is taken over, and what to do about it.
// NULL: it has found none.
static inline void control_die_together(Control* c, char* error, const char* what_to_do) {
    ControlBytes said = control_broadcast(c, error, error ? strlen(error) : 0);
    require(said.bytes == 0, "%s%s", said.data, what_to_do);
    free(said.data);
    free(error);
}
#endif
