/*
control_messages.h - the messages between ranks that are not data, and the state of a rank's connections and watchdog.

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

#define RANK_NAME 40                     // bytes of what a rank is called besides its number, and of its machine's name

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
    double stopped;            // seconds for which this process was stopped before it had joined
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
// The clock for the deadline of joining. It stands still while this process is stopped. Only for the main thread.
static inline double control_time(const Control* c) { return now_seconds() - c->stopped; }

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

static inline void control_wake(Control* c) { if (write(c->wake[1], "", 1) < 0) { } } // a full pipe wakes as well

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
#endif
