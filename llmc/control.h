/*
control.h - how ranks look after one another: a star of TCP connections to rank 0, beside the path of the data.

Every rank has a thread, its watchdog, that tells rank 0 five times a second which operations were issued and finished
(oplog.h) and which one the host waits for. Rank 0 so knows who died (its connection closed), who left by an error of its
own, and, when a wait has lasted longer than the deadline, who never issued that operation. It tells everyone; everyone
prints one line, writes its last operations to a file, and leaves with status 1. There is no going on without a
rank: the last checkpoint is the recovery. If rank 0 is gone or silent itself, the others find that out by themselves.

The connections also carry small messages between hosts, for what is compared at the start (control_gather,
control_broadcast). On a rank that is alone every function returns at once. Messages are the structs of this program as
they are: all ranks run the same program on the same kind of machine, which is checked when they meet.

Only the watchdog reads and writes sockets; everybody else puts messages into its queues. c->lock guards all of Control.
Inside the watchdog nothing may die(): it leaves by _exit, for the rest of the process may be stuck in anything.

Global state: control_process, what an exit() anywhere and the handler of SIGTERM must find.
*/
#ifndef LLMC_CONTROL_H
#define LLMC_CONTROL_H
#include "common.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include "oplog.h"
#include "ranks.h"

#define CONTROL_ADDRESS 512              // bytes of an address as text, the final 0 included: "PORT WORD HOST HOST ..."
#define CONTROL_MAX_MESSAGE (1u << 20)   // bytes of the largest message
#define CONTROL_MAX_INBOX (64u << 20)    // bytes of messages that nobody has asked for yet
#define CONTROL_STRANGERS 16             // connections at a time that have not said yet who they are
#define CONTROL_BEAT 0.2                 // seconds between heartbeats
#define CONTROL_SETTLE 0.5               // seconds after which every rank's state is known to rank 0
#define CONTROL_PATIENCE 2.0             // seconds past the deadline in which rank 0 must have said who is late
#define CONTROL_SILENCE 1.0              // seconds without a heartbeat that are worth mentioning
#define CONTROL_GRACE 0.5                // seconds in which a rank may report an error of its own before it leaves for another's
#define CONTROL_FAREWELL 1.0             // seconds that rank 0 stays on for the others to have written everything

typedef struct { char* data; size_t bytes; } ControlBytes; // owned; followed by a 0 that is not counted

typedef enum { MESSAGE_HELLO = 1, MESSAGE_WELCOME, MESSAGE_BEAT, MESSAGE_BYTES, MESSAGE_VERDICT, MESSAGE_HEARD, MESSAGE_LEFT,
               MESSAGE_GOODBYE, MESSAGE_KINDS } ControlMessage;
typedef struct { uint32_t kind, bytes; } ControlHeader; // before every message

#define CONTROL_MAGIC "shard.c control"
typedef struct { // who connects
    char magic[16];
    char word[68];                   // of the address: tells this run's ranks from strangers
    int32_t rank, size, layout;      // layout: sizeof the structs that are sent
} ControlHello;

typedef struct { // a heartbeat; num_channels OpChannels follow
    double waited;    // seconds that the host has waited for `awaited`; -1: it does not wait
    OpRecord awaited;
    long long step;
    int num_channels;
} ControlBeat;

typedef enum { VERDICT_NONE, VERDICT_DIED, VERDICT_LATE, VERDICT_LEFT, VERDICT_TOLD } ControlVerdict;
// DIED: a connection closed; LATE: a deadline passed; LEFT: a rank exits and has said why; TOLD: one exits because of SIGTERM

typedef struct { char* data; size_t n, capacity; } ControlBuffer; // data owned

typedef struct {
    int fd;                       // -1: not connected
    bool joined, goodbye, heard_verdict;
    double heard;                 // when its last message came
    ControlBuffer in, out, inbox; // bytes read, to be written; messages for control_gather and control_broadcast, each after its length
    ControlBeat beat;             // its last; rank 0 keeps its own, too
    OpChannel* channels;          // (beat.num_channels), owned
} ControlPeer;

typedef struct {
    RankInfo ranks;
    OpLog log;
    double timeout;
    const char* out;           // not owned
    char word[68];
    int listener, wake[2];     // wake: a pipe that ends the watchdog's sleep
    ControlPeer* peers;        // rank 0: (size), everyone by rank; others: (1), rank 0
    int num_peers, joined;
    ControlPeer strangers[CONTROL_STRANGERS];
    struct pollfd* polled;     // (num_peers + CONTROL_STRANGERS + 2), owned
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool running, ended;       // the watchdog
    bool leaving, stopping;    // asked of it: an exit() elsewhere; the end of the run
    bool catches;              // SIGTERM, unless somebody else does
    pid_t process;
    double last_beat, told;    // told: when SIGTERM was noticed, 0: not
    ControlVerdict verdict;
    char why[1024];            // the verdict in words
    double leave_at;
} Control;

static struct {
    Control* control;                   // of this process, while its watchdog runs
    int told, wake_fd;                  // SIGTERM has come (atomic); where its handler wakes the watchdog
} control_process;

// ---- messages ----

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

static inline void control_wake(Control* c) { if (write(c->wake[1], "", 1) < 0) { } } // a full pipe wakes as well

// Writes what the socket takes without waiting. An error shows when it is read from.
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

// ---- verdicts ----

// The rank that `p` is the connection to.
static inline int control_rank_of(const Control* c, const ControlPeer* p) { return c->ranks.rank == 0 ? (int)(p - c->peers) : 0; }

// The first verdict counts. Rank 0 tells it to everyone.
PRINTF_LIKE(3, 4)
static inline void control_condemn(Control* c, ControlVerdict verdict, const char* format, ...) {
    if (c->verdict != VERDICT_NONE) return;
    va_list args;
    va_start(args, format);
    vsnprintf(c->why, sizeof c->why, format, args);
    va_end(args);
    c->verdict = verdict;
    c->leave_at = now_seconds() + (verdict >= VERDICT_LEFT ? CONTROL_GRACE : 0);
    char message[sizeof c->why + 1];
    message[0] = (char)verdict;
    snprintf(message + 1, sizeof message - 1, "%s", c->why);
    if (c->ranks.rank == 0) control_queue_all(c, MESSAGE_VERDICT, message, strlen(c->why) + 1);
}

// "during step 7"
static inline const char* control_when(long long step, char* out, size_t size) {
    if (step > 0) snprintf(out, size, "during step %lld", step);
    else snprintf(out, size, "before the first step");
    return out;
}

static inline void control_closed(Control* c, ControlPeer* p) {
    char when[64];
    bool expected = p->goodbye;
    control_close(p);
    long long step = oplog_step_now(&c->log); // its own, as far as we know it, may be a heartbeat old
    if (p->beat.step > step) step = p->beat.step;
    if (!expected) control_condemn(c, VERDICT_DIED, "rank %d has died (its connection closed) %s", control_rank_of(c, p), control_when(step, when, sizeof when));
}

// The channel on which rank r's operation belongs to `op` of rank `by`; NULL: it has none.
static inline OpChannel* control_counterpart(const Control* c, int r, const OpRecord* op, int by) {
    OpWay way = op_way(op->collective);
    if (way == WAY_SEND || way == WAY_RECEIVE) way = way == WAY_SEND ? WAY_RECEIVE : WAY_SEND;
    for (int i = 0; i < c->peers[r].beat.num_channels; i++) {
        OpChannel* k = &c->peers[r].channels[i];
        bool same = k->way == (int)way && strcmp(k->communicator, op->communicator) == 0;
        if (same && (way == WAY_COLLECTIVE || k->peer == by)) return k;
    }
    return NULL;
}

// Whether rank r should have issued its part of `op`, which rank `by` waits for, and has not.
static inline bool control_is_missing(const Control* c, int r, const OpRecord* op, int by) {
    const OpChannel* k = control_counterpart(c, r, op, by);
    if (op_way(op->collective) != WAY_COLLECTIVE) return r == op->peer && (k == NULL || k->issued <= op->number);
    return k != NULL && k->issued <= op->number;
}

// Rank r's last operation where it should have issued `op`, and since when it is silent, if it is.
static inline void control_last_words(const Control* c, int r, const OpRecord* op, int by, double now, char* out, size_t size) {
    const OpChannel* k = control_counterpart(c, r, op, by);
    char last[OP_TEXT] = "none";
    if (k && k->issued > 0) op_text(&k->last, last, sizeof last);
    size_t n = (size_t)snprintf(out, size, "; the last that rank %d issued there is %s", r, last);
    double silent = r == 0 ? 0 : now - c->peers[r].heard;
    if (silent > CONTROL_SILENCE && n < size)
        snprintf(out + n, size - n, ", and it has been silent for %.0f s (stopped, or its machine is gone)", silent);
}

// Everyone has issued `op`, and yet it does not end.
static inline void control_condemn_stuck(Control* c, const OpRecord* op, int by, double now) {
    char text[OP_TEXT], other[OP_TEXT];
    op_text(op, text, sizeof text);
    for (int r = 1; r < c->ranks.size; r++) {
        double silent = now - c->peers[r].heard;
        if (silent > CONTROL_SILENCE) control_condemn(c, VERDICT_LATE, "rank %d has been silent for %.0f s (stopped, or its machine is gone),"
                                                      " and rank %d waits for %s", r, silent, by, text);
    }
    for (int r = 0; r < c->ranks.size && op_way(op->collective) == WAY_COLLECTIVE; r++) {
        const OpChannel* k = control_counterpart(c, r, op, by);
        if (k == NULL || k->issued == 0 || k->last.number != op->number) continue;
        op_text(&k->last, other, sizeof other);
        if (strcmp(text, other) != 0) control_condemn(c, VERDICT_LATE, "rank %d issued %s where rank %d issued %s", by, text, r, other);
    }
    control_condemn(c, VERDICT_LATE, "every rank has reached %s, for which rank %d has waited %.0f s: what moves the data is stuck",
                    text, by, c->peers[by].beat.waited);
}

// On rank 0: names who is missing where somebody has waited longer than the deadline.
static inline void control_judge(Control* c, double now) {
    int by = -1, first = -1;
    for (int r = 0; r < c->num_peers; r++) {
        if (c->peers[r].beat.waited > c->timeout + CONTROL_SETTLE && (by < 0 || c->peers[r].beat.waited > c->peers[by].beat.waited)) by = r;
    }
    if (by < 0 || c->verdict != VERDICT_NONE) return;
    const OpRecord* op = &c->peers[by].beat.awaited;
    bool* missing = (bool*)xcalloc((size_t)c->ranks.size, sizeof(bool));
    for (int r = c->ranks.size - 1; r >= 0; r--) {
        missing[r] = control_is_missing(c, r, op, by);
        if (missing[r]) first = r;
    }
    char who[256], text[OP_TEXT], last[OP_TEXT + 128];
    ranks_text(missing, c->ranks.size, who, sizeof who);
    free(missing);
    if (first < 0) { control_condemn_stuck(c, op, by, now); return; }
    op_text(op, text, sizeof text);
    control_last_words(c, first, op, by, now, last, sizeof last);
    control_condemn(c, VERDICT_LATE, "%s %s not reached %s%s, for which rank %d has waited %.0f s%s", who, strncmp(who, "ranks", 5) ? "has" : "have",
                    op_way(op->collective) == WAY_COLLECTIVE ? "" : "its side of ", text, by, c->peers[by].beat.waited, last);
}

// On the others: rank 0 should have spoken by now.
static inline void control_judge_rank_0(Control* c, const ControlBeat* own, double now) {
    if (own->waited <= c->timeout + CONTROL_SETTLE + CONTROL_PATIENCE || c->verdict != VERDICT_NONE) return;
    char text[OP_TEXT];
    op_text(&own->awaited, text, sizeof text);
    control_condemn(c, VERDICT_LATE, "rank 0 has been silent for %.0f s (stopped, or its machine is gone), and rank %d has waited %.0f s for %s",
                    now - c->peers[0].heard, c->ranks.rank, own->waited, text);
}

// ---- leaving ----

// The file of this rank's last operations: false if there can be none.
static inline bool control_write_log(Control* c, char* path, size_t size) {
    if (c->out[0] == '\0') return false;
    snprintf(path, size, "%s/ops_rank_%04d.txt", c->out, c->ranks.rank);
    FILE* f = fopen(path, "w");
    if (f == NULL) return false;
    oplog_write(&c->log, f, c->word, c->ranks.rank, c->ranks.size);
    return fclose(f) == 0;
}

// Without a folder for the file: the last few operations, for the reader of the message.
static inline void control_print_log(Control* c) {
    pthread_mutex_lock(&c->log.lock);
    for (long long i = c->log.count > 4 ? c->log.count - 4 : 0; i < c->log.count; i++) {
        char text[OP_TEXT];
        const OpRecord* r = &c->log.ring[i % OPLOG_LENGTH];
        op_text(r, text, sizeof text);
        fprintf(stderr, "rank %d: %s, %s\n", c->ranks.rank, text, op_state_names[r->state]);
    }
    pthread_mutex_unlock(&c->log.lock);
}

// What a rank says when it leaves because of another. One line in one piece, for all ranks write to the same place.
static inline void control_report(Control* c) {
    char path[4096], line[8192];
    if (ftrylockfile(stdout) == 0) { // a thread that is stuck may hold it
        fflush(stdout);
        funlockfile(stdout);
    }
    bool in_training = oplog_step_now(&c->log) > 0, history = in_training || c->verdict < VERDICT_LEFT; // not of an error at the start
    bool written = history && control_write_log(c, path, sizeof path);
    if (history && !written) control_print_log(c);
    size_t n = (size_t)snprintf(line, sizeof line, "rank %d: error: %s", c->ranks.rank, c->why);
    const char* resume = c->out[0] ? "; continue from the last checkpoint with --resume" : "; without --out there is no checkpoint to continue from";
    if (in_training) n += (size_t)snprintf(line + n, sizeof line - n, "%s", resume);
    if (written) n += (size_t)snprintf(line + n, sizeof line - n, "; last operations: %s (build/ranks compares those of all ranks)", path);
    n = size_min(n, sizeof line - 2);
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, n) < 0) { } // nowhere to complain to
}

static inline void control_poll(Control* c, double seconds);

// Ends the process. Everyone has to have written before the first one ends, because a launcher then kills the rest.
static inline void control_leave(Control* c) {
    control_report(c);
    if (c->ranks.rank > 0) control_queue(&c->peers[0], MESSAGE_HEARD, NULL, 0);
    for (double until = now_seconds() + CONTROL_FAREWELL * (c->ranks.rank ? 1.5 : 1), now; (now = now_seconds()) < until;) {
        bool all = true;
        for (int i = 0; i < c->num_peers; i++) all = all && (c->peers[i].fd < 0 || c->peers[i].heard_verdict);
        if (all) break;
        control_poll(c, until - now);
    }
    _exit(EXIT_FAILURE);
}

// Says to all why this rank is going, for which there is half a second.
static inline void control_say_left(Control* c, ControlVerdict why) {
    char reason = (char)why;
    control_queue_all(c, MESSAGE_LEFT, &reason, 1);
    double until = now_seconds() + 0.5;
    for (bool pending = true; pending && now_seconds() < until; usleep(pending ? 1000 : 0)) {
        pending = false;
        for (int i = 0; i < c->num_peers; i++) {
            control_flush(&c->peers[i]);
            pending = pending || (c->peers[i].fd >= 0 && c->peers[i].out.n > 0);
        }
    }
}

// SIGTERM usually comes from a launcher that has seen a rank end, and then a verdict is on its way; else it means what it says.
static inline void control_obey(Control* c, double now) {
    if (!__atomic_load_n(&control_process.told, __ATOMIC_ACQUIRE)) return;
    if (c->told == 0) c->told = now;
    bool others_too = c->verdict == VERDICT_TOLD;
    if (!others_too && (c->verdict != VERDICT_NONE || now < c->told + CONTROL_GRACE)) return;
    char path[4096];
    control_write_log(c, path, sizeof path);
    control_say_left(c, VERDICT_TOLD);
    signal(SIGTERM, SIG_DFL);
    kill(getpid(), SIGTERM);
    for (;;) pause();
}

// ---- the watchdog ----

static inline void control_accept(Control* c) {
    int fd = accept4(c->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    ControlPeer* slot = &c->strangers[0]; // all taken: the one that has been silent for longest makes room
    for (int i = CONTROL_STRANGERS - 1; i >= 0; i--) {
        ControlPeer* s = &c->strangers[i];
        if (s->fd < 0 || (slot->fd >= 0 && s->heard < slot->heard)) slot = s;
    }
    control_peer_free(slot);
    slot->fd = fd;
    slot->heard = now_seconds();
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static inline int32_t control_layout(void) { return (int32_t)(sizeof(ControlBeat) * 65536 + sizeof(OpChannel)); }

// A stranger has said who it is: it becomes a peer, or is turned away.
static inline void control_admit(Control* c, ControlPeer* stranger, const ControlHello* h) {
    bool of_this_run = memcmp(h->magic, CONTROL_MAGIC, sizeof h->magic) == 0 && memcmp(h->word, c->word, sizeof h->word) == 0;
    if (!of_this_run) { control_close(stranger); return; }
    if (h->layout != control_layout()) control_condemn(c, VERDICT_LEFT, "rank %d runs another version of this program than rank 0", h->rank);
    else if (h->size != c->ranks.size) control_condemn(c, VERDICT_LEFT, "rank %d was told of %d ranks, rank 0 of %d", h->rank, h->size, c->ranks.size);
    else if (h->rank < 1 || h->rank >= h->size) control_condemn(c, VERDICT_LEFT, "rank %d of %d is no rank that can join", h->rank, h->size);
    else if (c->peers[h->rank].joined) control_condemn(c, VERDICT_LEFT, "two processes say that they are rank %d", h->rank);
    if (c->verdict != VERDICT_NONE) { // the newcomer is not among those whom control_condemn tells
        char message[sizeof c->why + 1];
        message[0] = (char)c->verdict;
        snprintf(message + 1, sizeof message - 1, "%s", c->why);
        control_queue(stranger, MESSAGE_VERDICT, message, strlen(c->why) + 1);
        control_flush(stranger);
        control_close(stranger);
        return;
    }
    ControlPeer* p = &c->peers[h->rank];
    *p = *stranger;
    memset(stranger, 0, sizeof *stranger);
    stranger->fd = -1;
    p->joined = true;
    p->beat.waited = -1;
    c->joined++;
    control_queue(p, MESSAGE_WELCOME, NULL, 0);
}

static inline bool control_take_beat(ControlPeer* p, const char* data, size_t n) {
    ControlBeat b;
    if (n < sizeof b) return false;
    memcpy(&b, data, sizeof b);
    n -= sizeof b;
    if (b.num_channels < 0 || n != (size_t)b.num_channels * sizeof(OpChannel)) return false;
    if (b.num_channels > p->beat.num_channels) p->channels = (OpChannel*)xrealloc(p->channels, n);
    if (n) memcpy(p->channels, data + sizeof b, n);
    p->beat = b;
    return true;
}

// One message of a peer. False: it is none that it may send.
static inline bool control_take(Control* c, ControlPeer* p, uint32_t kind, const char* data, size_t n) {
    char text[sizeof c->why];
    uint32_t length = (uint32_t)n;
    snprintf(text, sizeof text, "%.*s", n > 1 ? (int)(n - 1) : 0, n > 1 ? data + 1 : "");
    switch (kind) {
        case MESSAGE_BEAT: return control_take_beat(p, data, n);
        case MESSAGE_BYTES:
            if (p->inbox.n + n > CONTROL_MAX_INBOX) return false;
            control_buffer_add(&p->inbox, &length, sizeof length);
            control_buffer_add(&p->inbox, data, n);
            return true;
        case MESSAGE_VERDICT:
            if (c->ranks.rank == 0 || n < 2 || data[0] <= VERDICT_NONE || data[0] > VERDICT_TOLD) return false;
            control_condemn(c, (ControlVerdict)data[0], "%s", text);
            return true;
        case MESSAGE_HEARD: p->heard_verdict = true; return true;
        case MESSAGE_GOODBYE: p->goodbye = true; return true;
        case MESSAGE_LEFT:
            p->goodbye = true; // that its connection closes is no news after this
            if (n == 1 && data[0] == VERDICT_TOLD)
                control_condemn(c, VERDICT_TOLD, "rank %d has left (it was told to, by SIGTERM)", control_rank_of(c, p));
            else control_condemn(c, VERDICT_LEFT, "rank %d has left (its own message says why)", control_rank_of(c, p));
            return true;
        default: return false;
    }
}

// Takes the whole messages out of p->in. False: these are not messages of ours.
static inline bool control_parse(Control* c, ControlPeer* p) {
    for (size_t done = 0;;) {
        ControlHeader h;
        size_t have = p->in.n - done;
        if (have >= sizeof h) memcpy(&h, p->in.data + done, sizeof h);
        if (have >= sizeof h && h.bytes > (p->joined ? CONTROL_MAX_MESSAGE : sizeof(ControlHello))) return false;
        if (have < sizeof h || have < sizeof h + h.bytes) {
            control_buffer_drop(&p->in, done);
            return true;
        }
        const char* data = p->in.data + done + sizeof h;
        done += sizeof h + h.bytes;
        if (!p->joined) {
            ControlHello hello;
            if (h.kind != MESSAGE_HELLO || h.bytes != sizeof hello) return false;
            memcpy(&hello, data, sizeof hello);
            control_buffer_drop(&p->in, done);
            control_admit(c, p, &hello);
            return true;
        }
        if (!control_take(c, p, h.kind, data, h.bytes)) return false;
    }
}

// Reads everything there is. A connection that has closed may still hold messages, which come first.
static inline void control_read(Control* c, ControlPeer* p) {
    char chunk[65536];
    ssize_t n;
    while ((n = recv(p->fd, chunk, sizeof chunk, MSG_DONTWAIT)) > 0) {
        control_buffer_add(&p->in, chunk, (size_t)n);
        p->heard = now_seconds();
        if (!p->joined) break; // a stranger: no more than one piece before it is looked at
    }
    bool closed = n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    bool stranger = !p->joined;
    bool ours = control_parse(c, p);
    if (stranger) { if (!ours || closed) control_close(p); } // if it was admitted, p is an empty place now
    else if (!ours) {
        control_close(p);
        control_condemn(c, VERDICT_DIED, "rank %d has sent what is no message of this program", control_rank_of(c, p));
    } else if (closed) control_closed(c, p);
}

static inline void control_poll_add(Control* c, int* n, int fd, bool writes) {
    struct pollfd* f = &c->polled[(*n)++];
    f->fd = fd; // -1: poll passes over it
    f->events = (short)(POLLIN | (writes ? POLLOUT : 0));
    f->revents = 0;
}

// One turn: sends, waits for up to `seconds`, receives. The lock is let go of while it waits.
static inline void control_poll(Control* c, double seconds) {
    int n = 0;
    control_poll_add(c, &n, c->wake[0], false);
    control_poll_add(c, &n, c->listener, false);
    for (int i = 0; i < CONTROL_STRANGERS; i++) control_poll_add(c, &n, c->strangers[i].fd, false);
    for (int i = 0; i < c->num_peers; i++) {
        control_flush(&c->peers[i]);
        control_poll_add(c, &n, c->peers[i].fd, c->peers[i].out.n > 0);
    }
    pthread_mutex_unlock(&c->lock);
    int ready = poll(c->polled, (nfds_t)n, seconds > 0 ? 1 + (int)(1e3 * seconds) : 0);
    pthread_mutex_lock(&c->lock);
    if (ready <= 0) return;
    char drained[64];
    if (c->polled[0].revents) while (read(c->wake[0], drained, sizeof drained) == (ssize_t)sizeof drained) { }
    for (int i = 0; i < c->num_peers; i++) if (c->polled[2 + CONTROL_STRANGERS + i].revents && c->peers[i].fd >= 0) control_read(c, &c->peers[i]);
    for (int i = 0; i < CONTROL_STRANGERS; i++) if (c->polled[2 + i].revents && c->strangers[i].fd >= 0) control_read(c, &c->strangers[i]);
    if (c->polled[1].revents) control_accept(c);
    pthread_cond_broadcast(&c->changed);
}

// Notes this rank's state and sends it. Who has not taken the one before gets none: a stopped rank must not fill our memory.
static inline void control_beat(Control* c, double now) {
    ControlBuffer b = { NULL, 0, 0 };
    ControlBeat own;
    memset(&own, 0, sizeof own);
    pthread_mutex_lock(&c->log.lock);
    own.waited = c->log.waiting ? now - c->log.since : -1;
    if (c->log.waiting) own.awaited = c->log.awaited;
    own.step = c->log.step;
    own.num_channels = c->log.num_channels;
    control_buffer_add(&b, &own, sizeof own);
    control_buffer_add(&b, c->log.channels, (size_t)own.num_channels * sizeof(OpChannel));
    pthread_mutex_unlock(&c->log.lock);
    if (c->ranks.rank == 0) {
        control_take_beat(&c->peers[0], b.data, b.n);
        own.num_channels = 0; // the others need not know more than that rank 0 lives
        memcpy(b.data, &own, sizeof own);
        b.n = sizeof own;
    }
    for (int i = 0; i < c->num_peers; i++) if (c->peers[i].out.n == 0) control_queue(&c->peers[i], MESSAGE_BEAT, b.data, b.n);
    free(b.data);
    if (c->ranks.rank == 0) control_judge(c, now);
    else control_judge_rank_0(c, &own, now);
}

static inline void* control_watch(void* argument) {
    Control* c = (Control*)argument;
    pthread_mutex_lock(&c->lock);
    while (!c->ended) {
        double now = now_seconds();
        if (now >= c->last_beat + CONTROL_BEAT) {
            c->last_beat = now;
            control_beat(c, now);
        }
        if (c->leaving) {
            control_say_left(c, VERDICT_LEFT);
            c->ended = true;
        }
        control_obey(c, now);
        if (c->verdict != VERDICT_NONE && now >= c->leave_at) control_leave(c);
        bool flushed = true;
        for (int i = 0; i < c->num_peers; i++) flushed = flushed && (c->peers[i].fd < 0 || c->peers[i].out.n == 0);
        if (c->stopping && flushed) c->ended = true;
        if (!c->ended) control_poll(c, c->stopping ? 0.01 : c->last_beat + CONTROL_BEAT - now);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

// ---- the meeting ----

// timeout: seconds that a wait, and the meeting of all ranks, may last. out: folder for the last operations, or "".
static inline void control_init(Control* c, RankInfo ranks, double timeout, const char* out) {
    memset(c, 0, sizeof *c);
    c->ranks = ranks;
    c->timeout = timeout;
    c->out = out;
    c->listener = c->wake[0] = c->wake[1] = -1;
    oplog_init(&c->log);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    for (int i = 0; i < CONTROL_STRANGERS; i++) c->strangers[i].fd = -1;
    c->num_peers = ranks.rank == 0 ? ranks.size : 1;
    c->peers = (ControlPeer*)xcalloc((size_t)c->num_peers, sizeof(ControlPeer));
    for (int i = 0; i < c->num_peers; i++) c->peers[i].fd = -1;
    c->peers[0].beat.waited = -1;
    c->polled = (struct pollfd*)xcalloc((size_t)c->num_peers + CONTROL_STRANGERS + 2, sizeof(struct pollfd));
}

// A listening socket on every interface, or on this machine's own; -1 if the family is not to be had.
static inline int control_bind(int family, bool only_here, int port) {
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1, off = 0;
    if (fd < 0) return -1;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    memset(&v4, 0, sizeof v4);
    memset(&v6, 0, sizeof v6);
    v4.sin_family = AF_INET;
    v4.sin_port = htons((uint16_t)port);
    v4.sin_addr.s_addr = htonl(only_here ? INADDR_LOOPBACK : INADDR_ANY);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons((uint16_t)port);
    v6.sin6_addr = only_here ? in6addr_loopback : in6addr_any;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); // IPv4 comes in as well
    int failed = family == AF_INET ? bind(fd, (struct sockaddr*)&v4, sizeof v4) : bind(fd, (struct sockaddr*)&v6, sizeof v6);
    if (!failed && listen(fd, 1024) == 0) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

// Appends " HOST" for each address under which this machine can be reached from others.
static inline void control_add_hosts(char* address, size_t size) {
    struct ifaddrs *all = NULL, *i;
    if (getifaddrs(&all) != 0) return;
    for (i = all; i; i = i->ifa_next) {
        if (i->ifa_addr == NULL || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        char host[INET6_ADDRSTRLEN];
        size_t n = strlen(address);
        const struct sockaddr_in6* v6 = (const struct sockaddr_in6*)(const void*)i->ifa_addr;
        const struct sockaddr_in* v4 = (const struct sockaddr_in*)(const void*)i->ifa_addr;
        if (i->ifa_addr->sa_family == AF_INET) inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        else if (i->ifa_addr->sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        else continue;
        if (n + strlen(host) + 2 <= size) snprintf(address + n, size - n, " %s", host);
    }
    freeifaddrs(all);
}

// address (CONTROL_ADDRESS): where rank 0 is to be found. Port and place are the launcher's if it names one, else any.
static inline void control_listen(Control* c, char* address) {
    if (c->ranks.size == 1) return;
    bool only_here = c->ranks.local_size == c->ranks.size, named = c->ranks.meeting[0] != '\0';
    int port = named ? atoi(c->ranks.meeting) : 0;
    if (only_here && !named) {
        c->listener = control_bind(AF_INET, true, port);
        if (c->listener < 0) c->listener = control_bind(AF_INET6, true, port);
    } else {
        c->listener = control_bind(AF_INET6, false, port);
        if (c->listener < 0) c->listener = control_bind(AF_INET, false, port);
    }
    require(c->listener >= 0, "rank 0 cannot listen for the other ranks on port %d: %s%s", port, strerror(errno),
            errno == EADDRINUSE ? "; another run on this machine may have it: give torchrun another --master-port, or wait for that run" : "");
    if (named) {
        snprintf(address, CONTROL_ADDRESS, "%s", c->ranks.meeting);
        return;
    }
    union { struct sockaddr any; struct sockaddr_in v4; struct sockaddr_in6 v6; } bound;
    socklen_t length = sizeof bound;
    unsigned char bytes[16];
    FILE* f = fopen("/dev/urandom", "rb");
    require(f && fread(bytes, 1, sizeof bytes, f) == sizeof bytes, "cannot read /dev/urandom: %s", strerror(errno));
    fclose(f);
    getsockname(c->listener, &bound.any, &length);
    port = ntohs(bound.any.sa_family == AF_INET ? bound.v4.sin_port : bound.v6.sin6_port);
    size_t n = (size_t)snprintf(address, CONTROL_ADDRESS, "%d ", port);
    for (size_t i = 0; i < sizeof bytes; i++) n += (size_t)snprintf(address + n, CONTROL_ADDRESS - n, "%02x", bytes[i]);
    if (!only_here) control_add_hosts(address, CONTROL_ADDRESS);
    if (strchr(address + n, ' ') == NULL) snprintf(address + n, CONTROL_ADDRESS - n, " %s", bound.any.sa_family == AF_INET6 ? "::1" : "127.0.0.1");
}

// Whether fd can be read from (or written to) before `until`.
static inline bool control_ready(int fd, short events, double until) {
    struct pollfd p = { fd, events, 0 };
    int n;
    do n = poll(&p, 1, (int)(1e3 * fmax(0, until - now_seconds()))); while (n < 0 && errno == EINTR);
    return n > 0;
}

// Exactly n bytes from a socket, false if they do not come before `until`.
static inline bool control_receive(int fd, void* data, size_t n, double until) {
    for (size_t done = 0; done < n;) {
        ssize_t k = control_ready(fd, POLLIN, until) ? recv(fd, (char*)data + done, n - done, 0) : -1;
        if (k <= 0) return false;
        done += (size_t)k;
    }
    return true;
}

// Says who we are and waits to be let in. False: whoever is there is not our rank 0.
static inline bool control_introduce(Control* c, int fd, double until) {
    struct { ControlHeader header; ControlHello hello; } m;
    ControlHeader answer;
    char verdict[sizeof c->why + 1];
    memset(&m, 0, sizeof m);
    m.header.kind = MESSAGE_HELLO;
    m.header.bytes = sizeof m.hello;
    snprintf(m.hello.magic, sizeof m.hello.magic, "%s", CONTROL_MAGIC);
    memcpy(m.hello.word, c->word, sizeof m.hello.word);
    m.hello.rank = c->ranks.rank;
    m.hello.size = c->ranks.size;
    m.hello.layout = control_layout();
    if (send(fd, &m, sizeof m, MSG_NOSIGNAL) != (ssize_t)sizeof m || !control_receive(fd, &answer, sizeof answer, until)) return false;
    if (answer.kind == MESSAGE_WELCOME && answer.bytes == 0) return true;
    if (answer.kind != MESSAGE_VERDICT || answer.bytes < 2 || answer.bytes > sizeof verdict - 1) return false;
    memset(verdict, 0, sizeof verdict);
    if (control_receive(fd, verdict, answer.bytes, until)) die("rank 0 does not let rank %d join: %s", c->ranks.rank, verdict + 1);
    return false;
}

// One attempt at one host. -1 if our rank 0 is not there (yet).
static inline int control_try(Control* c, const char* host, const char* port, double until) {
    struct addrinfo hints, *all = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, port, &hints, &all) != 0) return -1; // names can need time, too
    int found = -1;
    for (struct addrinfo* a = all; a && found < 0; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0, on = 1;
        socklen_t length = sizeof error;
        if (fd < 0) continue;
        bool connected = connect(fd, a->ai_addr, a->ai_addrlen) == 0;
        if (!connected && errno == EINPROGRESS && control_ready(fd, POLLOUT, fmin(until, now_seconds() + 3)))
            connected = getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if (connected && control_introduce(c, fd, fmin(until, now_seconds() + 30))) found = fd;
        else close(fd);
    }
    freeaddrinfo(all);
    return found;
}

// Every rank but 0: tries rank 0's hosts in turn until the deadline.
static inline void control_connect(Control* c, const char* port, const char* hosts) {
    double until = now_seconds() + c->timeout;
    while (c->peers[0].fd < 0) {
        char host[256];
        int used;
        for (const char* p = hosts; c->peers[0].fd < 0 && sscanf(p, " %255s%n", host, &used) == 1; p += used)
            c->peers[0].fd = control_try(c, host, port, until);
        if (c->peers[0].fd >= 0) break;
        require(now_seconds() < until, "rank %d could not reach rank 0 at%s, port %s, within %g s (--comm-timeout): has rank 0 started,"
                " and does a firewall stand between?", c->ranks.rank, hosts, port, c->timeout);
        usleep(100000);
    }
    c->peers[0].joined = true;
    c->peers[0].heard = now_seconds();
    c->joined = 1;
}

static inline void control_exiting(void);
static inline void control_on_sigterm(int signal_number) {
    (void)signal_number;
    int saved = errno;
    __atomic_store_n(&control_process.told, 1, __ATOMIC_RELEASE);
    if (write(control_process.wake_fd, "", 1) < 0) { }
    errno = saved;
}

static inline void control_start_watchdog(Control* c) {
    static bool registered = false;
    require(pipe2(c->wake, O_CLOEXEC | O_NONBLOCK) == 0, "no pipe for the watchdog: %s", strerror(errno));
    control_process.wake_fd = c->wake[1];
    control_process.control = c;
    c->process = getpid();
    c->running = true;
    require(pthread_create(&c->thread, NULL, control_watch, c) == 0, "no thread for the watchdog can be started");
    if (!registered) require(atexit(control_exiting) == 0, "no function can be registered with atexit");
    registered = true;
    struct sigaction now, ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = control_on_sigterm;
    ours.sa_flags = SA_RESTART;
    if (sigaction(SIGTERM, NULL, &now) == 0 && now.sa_handler == SIG_DFL) c->catches = sigaction(SIGTERM, &ours, NULL) == 0;
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

// Rank 0: waits until everyone has joined.
static inline void control_await_all(Control* c) {
    double until = now_seconds() + c->timeout;
    pthread_mutex_lock(&c->lock);
    while (c->joined < c->ranks.size - 1 && now_seconds() < until) control_wait_changed(c, until);
    bool* missing = (bool*)xcalloc((size_t)c->ranks.size, sizeof(bool));
    for (int r = 1; r < c->ranks.size; r++) missing[r] = !c->peers[r].joined;
    bool all = c->joined == c->ranks.size - 1;
    pthread_mutex_unlock(&c->lock);
    char who[256];
    ranks_text(missing, c->ranks.size, who, sizeof who);
    free(missing);
    require(all, "%s of %d did not come within %g s (--comm-timeout): see whether they were started and what they printed,"
            " and whether a firewall stands between", who, c->ranks.size, c->timeout);
}

static inline void control_gather(Control* c, const void* data, size_t bytes, ControlBytes* parts);
static inline ControlBytes control_broadcast(Control* c, const void* data, size_t bytes);

// Returns when all ranks have met; dies naming who is missing. address: what control_listen said on rank 0, or what the
// launcher names if that is empty.
static inline void control_join(Control* c, const char* address) {
    if (c->ranks.size == 1) return;
    if (address[0] == '\0') address = c->ranks.meeting;
    char port[8], hosts[CONTROL_ADDRESS];
    require(sscanf(address, "%7s %64s%511[^\n]", port, c->word, hosts) == 3, "'%s' does not tell where rank 0 is to be found", address);
    if (c->ranks.rank > 0) control_connect(c, port, hosts);
    oplog_join(&c->log, "control");
    control_start_watchdog(c);
    if (c->ranks.rank == 0) control_await_all(c);
    ControlBytes nothing = control_broadcast(c, "", 0); // nobody goes on before everyone is here
    free(nothing.data);
    if (c->ranks.rank != 0) return;
    pthread_mutex_lock(&c->lock);
    close(c->listener);
    c->listener = -1;
    for (int i = 0; i < CONTROL_STRANGERS; i++) control_peer_free(&c->strangers[i]);
    pthread_mutex_unlock(&c->lock);
}

// ---- small messages ----

// Takes the oldest message of a peer, waiting for it. The caller holds the lock. There is no deadline here: the watchdog has it.
static inline ControlBytes control_pop(Control* c, ControlPeer* p) {
    uint32_t n;
    while (p->inbox.n < sizeof n) pthread_cond_wait(&c->changed, &c->lock);
    memcpy(&n, p->inbox.data, sizeof n);
    ControlBytes b = { (char*)xcalloc((size_t)n + 1, 1), n };
    memcpy(b.data, p->inbox.data + sizeof n, n);
    control_buffer_drop(&p->inbox, sizeof n + n);
    return b;
}

// Blocking and collective, in the same order on all ranks; for the watchdog they are operations of a communicator "control".
// Every rank gives a string of bytes; rank 0 gets all of them, by rank, in parts (N): the caller frees their data. Others: NULL.
static inline void control_gather(Control* c, const void* data, size_t bytes, ControlBytes* parts) {
    require(bytes < CONTROL_MAX_MESSAGE, "%zu bytes are too many for one message between hosts; at most %u", bytes, CONTROL_MAX_MESSAGE - 1);
    OpRecord op = oplog_issue(&c->log, "control", "gather", 0, "bytes", 0);
    oplog_wait_begin(&c->log, &op);
    pthread_mutex_lock(&c->lock);
    if (c->ranks.rank > 0) {
        control_queue(&c->peers[0], MESSAGE_BYTES, data, bytes);
        control_wake(c);
    } else {
        ControlBytes own = { (char*)xcalloc(bytes + 1, 1), bytes };
        if (bytes) memcpy(own.data, data, bytes);
        parts[0] = own;
        for (int r = 1; r < c->ranks.size; r++) parts[r] = control_pop(c, &c->peers[r]);
    }
    pthread_mutex_unlock(&c->lock);
    oplog_wait_end(&c->log);
    oplog_finish(&c->log, &op);
}

// Everyone else gets rank 0's bytes, and frees them; rank 0 gets an empty string.
static inline ControlBytes control_broadcast(Control* c, const void* data, size_t bytes) {
    require(bytes < CONTROL_MAX_MESSAGE, "%zu bytes are too many for one message between hosts; at most %u", bytes, CONTROL_MAX_MESSAGE - 1);
    ControlBytes received = { NULL, 0 };
    OpRecord op = oplog_issue(&c->log, "control", "broadcast", 0, "bytes", 0);
    oplog_wait_begin(&c->log, &op);
    pthread_mutex_lock(&c->lock);
    if (c->ranks.rank > 0) received = control_pop(c, &c->peers[0]);
    else if (c->ranks.size > 1) {
        control_queue_all(c, MESSAGE_BYTES, data, bytes);
        control_wake(c);
    }
    pthread_mutex_unlock(&c->lock);
    oplog_wait_end(&c->log);
    oplog_finish(&c->log, &op);
    return received;
}

// ---- the end ----

// Registered with atexit: while the watchdog runs, an exit() is an early one, and the others should hear that it was no crash.
static inline void control_exiting(void) {
    Control* c = control_process.control;
    if (c == NULL || c->process != getpid() || pthread_equal(c->thread, pthread_self())) return;
    struct timespec soon;
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_sec += 2;
    if (pthread_mutex_timedlock(&c->lock, &soon) != 0) return; // whoever died may have held it
    c->leaving = true;
    control_wake(c);
    for (double until = now_seconds() + 2; !c->ended && now_seconds() < until;) control_wait_changed(c, until);
    bool ended = c->ended;
    pthread_mutex_unlock(&c->lock);
    if (ended) pthread_join(c->thread, NULL);
}

static inline bool control_all_said_goodbye(const Control* c) {
    for (int r = c->ranks.rank == 0; r < c->num_peers; r++) if (!c->peers[r].goodbye) return false;
    return true;
}

// Returns when all ranks are here; after it a rank may end.
static inline void control_stop(Control* c) {
    OpRecord op = oplog_issue(&c->log, "control", "goodbye", 0, "bytes", -1);
    oplog_wait_begin(&c->log, &op);
    if (c->ranks.size > 1) {
        pthread_mutex_lock(&c->lock);
        if (c->ranks.rank > 0) control_queue(&c->peers[0], MESSAGE_GOODBYE, NULL, 0);
        control_wake(c);
        while (!control_all_said_goodbye(c)) pthread_cond_wait(&c->changed, &c->lock);
        if (c->ranks.rank == 0) control_queue_all(c, MESSAGE_GOODBYE, NULL, 0);
        c->stopping = true;
        control_wake(c);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->thread, NULL);
        control_process.control = NULL;
        if (c->catches) signal(SIGTERM, SIG_DFL);
        if (__atomic_load_n(&control_process.told, __ATOMIC_ACQUIRE)) raise(SIGTERM); // it came too late for the watchdog
        close(c->wake[0]);
        close(c->wake[1]);
    }
    for (int i = 0; i < c->num_peers; i++) control_peer_free(&c->peers[i]);
    free(c->peers);
    free(c->polled);
    oplog_free(&c->log);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    memset(c, 0, sizeof *c);
}
#endif
