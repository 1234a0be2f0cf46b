/*
watchdog.h - the thread on every rank that finds out which rank died, left or hangs.

Five times a second each rank tells rank 0 how far it is (flight_recorder.h). From that rank 0 finds out whether the run
must end, and why:
    a connection closed without a goodbye   that rank died
    a rank says that it leaves              it has reported an error of its own
    a wait is longer than the deadline      ranks that have not issued that operation are missing, or else silent ranks
                                            are
A stopped process and a machine that is gone close no connection: the deadline finds them. Time in which the watchdog's
own process was stopped does not count: all ranks may have been suspended together. If rank 0 itself is gone or silent,
each of the other ranks finds that out by itself. Then every rank prints the reason, writes its last operations, and
leaves with status 1. After an error of one rank's own the others may be about to report theirs: they have
control_leave_seconds for it, and the first to leave waits for them, because launchers kill the rest when a rank has
ended. It ends early when all have spoken, or when those that have not wait for operations that need those that have.

The watchdog of a rank that crashes still runs for a moment: it writes the last operations and tells the others.

No other thread runs a signal handler (base/thread.h): the main thread blocks SIGTERM before OpenMP starts its threads,
and the watchdog reads that signal from a file descriptor. Only a crash is handled on the thread where it happens.

In this thread only watchdog_exit and watchdog_check_sigterm may end the process, by _exit or a signal: exit() would run
code in which other threads may be stuck. (While NCCL is open, die ends it by watchdog_leave.) c->lock guards all of
Control; c->recorder has a lock of its own, taken after it.
*/
#ifndef LLMC_WATCHDOG_H
#define LLMC_WATCHDOG_H
#include "control_messages.h"
#include "../base/stop.h"

#define WATCHDOG_CRASHES 5
#define WATCHDOG_SILENCE 384 // bytes of what watchdog_silence writes
static const int watchdog_crash_signals[WATCHDOG_CRASHES] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT };
static struct {
    Control* control;                          // of this process, while its watchdog runs
    int wake_fd;                               // the crash handler writes to it to wake the watchdog
    int crash, crash_reported;                 // atomic: the signal of a crash; the others know of it
    // Signals besides SIGTERM that have a handler; the main thread's mask before ours
    sigset_t handled, unblocked;
    char stack[65536];                         // of the crash handler on the main thread
    struct sigaction before[WATCHDOG_CRASHES]; // the handlers of crashes before ours
    bool has_exit_hook;                        // watchdog_on_exit is registered with atexit
} watchdog_process;

// ---- why a run ends ----

// The run must end; format: why, in words. Only the first call counts. Rank 0 tells everyone.
PRINTF_LIKE(3, 4)
static inline void watchdog_end_run(Control* c, ControlReason reason, const char* format, ...) {
    if (c->reason != REASON_NONE) return;
    va_list args;
    va_start(args, format);
    vsnprintf(c->why, sizeof c->why, format, args);
    va_end(args);
    c->reason = reason;
    c->leave_at = now_seconds() + (reason >= REASON_LEFT ? c->grace : 0);
    for (int r = 1; c->ranks.rank == 0 && r < c->num_peers; r++) control_queue_end(c, &c->peers[r]);
}

// Sets *progress to that of a peer, or its last if it died. Returns true if it is exact; otherwise it may be a
// heartbeat old.
static inline bool watchdog_progress(const Control* c, const ControlPeer* p, RankProgress* progress) {
    if (progress_read(progress_of(&c->progress, control_rank_of(c, p)), progress)) return true;
    *progress = p->beat.progress;
    return false;
}

// " on node2 (dp 1, pp 0, tp 1)", what rank r is called besides its number; "" if that is nothing.
#define WATCHDOG_NAME (2 * RANK_NAME + 8)
static inline void watchdog_name(const Control* c, int r, char* out, size_t size) {
    size_t n = 0;
    out[0] = '\0';
    if (c->hosts) n = (size_t)snprintf(out, size, " on %.*s", RANK_NAME - 1, c->hosts[r]);
    if (c->names && n < size) snprintf(out + n, size - n, " (%.*s)", RANK_NAME - 1, c->names[r]);
}
// The ranks whose in[] is set: "rank 2 on node2 (dp 1, pp 0, tp 1)", "ranks 2-5 on node1, node2".
// Returns how many there are.
static inline int watchdog_who(const Control* c, const bool* in, char* out, size_t size) {
    int many = 0, last = -1;
    ranks_text(in, c->ranks.size, out, size);
    for (int r = 0; r < c->ranks.size; r++) if (in[r]) { many++; last = r; }
    size_t n = strlen(out);
    if (many == 1) watchdog_name(c, last, out + n, size - n);
    last = -1;
    for (int r = 0; many > 1 && c->hosts && r < c->ranks.size && n < size; r++) {
        if (!in[r] || (last >= 0 && strcmp(c->hosts[r], c->hosts[last]) == 0)) continue;
        n += (size_t)snprintf(out + n, size - n, "%s%.*s", last < 0 ? " on " : ", ", RANK_NAME - 1, c->hosts[r]);
        last = r;
    }
    return many;
}

// The run must end because a peer has died; how: in words.
static inline void watchdog_declare_dead(Control* c, const ControlPeer* p, const char* how) {
    char when[64], task[OP_TASK + 32] = "", name[WATCHDOG_NAME];
    watchdog_name(c, control_rank_of(c, p), name, sizeof name);
    RankProgress progress;
    bool exact = watchdog_progress(c, p, &progress);
    long long step = flight_recorder_step_now(&c->recorder);
    if (exact || progress.step > step) step = progress.step;
    if (step > 0) snprintf(when, sizeof when, "during step %lld", step);
    else snprintf(when, sizeof when, "before the first step");
    if (progress.task[0])
        snprintf(task, sizeof task, "; it was %sin %.*s", exact ? "" : "last heard of ", OP_TASK - 1, progress.task);
    watchdog_end_run(c, REASON_DIED, "rank %d%s has died (%s) %s%s", control_rank_of(c, p), name, how, when, task);
}

// Returns the channel on which rank r's operation belongs to `op` of rank `by`; NULL: it has none.
static inline OpChannel* watchdog_counterpart(const Control* c, int r, const OpRecord* op, int by) {
    OpWay way = op_way(op->collective);
    if (way == WAY_SEND || way == WAY_RECEIVE) way = way == WAY_SEND ? WAY_RECEIVE : WAY_SEND;
    for (int i = 0; i < c->peers[r].beat.num_channels; i++) {
        OpChannel* k = &c->peers[r].channels[i];
        bool same = k->way == (int)way && strcmp(k->communicator, op->communicator) == 0;
        if (same && (way == WAY_COLLECTIVE || k->peer == by)) return k;
    }
    return NULL;
}

// Returns true if rank r should have issued its part of `op`, which rank `by` waits for, and has not.
static inline bool watchdog_is_missing(const Control* c, int r, const OpRecord* op, int by) {
    const OpChannel* k = watchdog_counterpart(c, r, op, by);
    if (op_way(op->collective) != WAY_COLLECTIVE) return r == op->peer && (k == NULL || k->issued <= op->number);
    return k != NULL && k->issued <= op->number;
}

// "rank 2 has been silent for 4 s (stopped, or its machine is gone)": all that are. Returns false if there are none.
static inline bool watchdog_silence(const Control* c, double now, char* out, size_t size) {
    bool* silent = new_array(bool, c->ranks.size);
    double longest = 0;
    char who[256];
    for (int r = 1; r < c->ranks.size; r++) {
        silent[r] = now - c->peers[r].heard > CONTROL_SILENCE;
        if (silent[r]) longest = fmax(longest, now - c->peers[r].heard);
    }
    int many = watchdog_who(c, silent, who, sizeof who);
    snprintf(out, size, "%s %s been silent for %.0f s (stopped, or %s gone)", who, many > 1 ? "have" : "has", longest,
             many > 1 ? "their machines are" : "its machine is");
    free(silent);
    return many > 0;
}

// Rank r's last operation on the channel on which it should have issued `op`, and the silent ranks, if any.
static inline void watchdog_describe_last(const Control* c, int r, const OpRecord* op, int by, double now, char* out,
                                          size_t size) {
    const OpChannel* k = watchdog_counterpart(c, r, op, by);
    char last[OP_TEXT] = "none";
    if (k && k->issued > 0) op_text(&k->last, last, sizeof last);
    size_t n = (size_t)snprintf(out, size, "; the last operation that rank %d issued there is %s", r, last);
    RankProgress progress;
    watchdog_progress(c, &c->peers[r], &progress);
    if (progress.task[0] && n < size)
        n += (size_t)snprintf(out + n, size - n, ", and it is in %.*s", OP_TASK - 1, progress.task);
    char silence[WATCHDOG_SILENCE];
    if (watchdog_silence(c, now, silence, sizeof silence) && n < size) snprintf(out + n, size - n, "; %s", silence);
}

// The run must end because every rank has issued `op`, for which rank `by` waits, but it does not finish.
static inline void watchdog_end_stuck_run(Control* c, const OpRecord* op, int by, double now) {
    char text[OP_TEXT], other[OP_TEXT], silence[WATCHDOG_SILENCE];
    op_text(op, text, sizeof text);
    if (watchdog_silence(c, now, silence, sizeof silence))
        watchdog_end_run(c, REASON_LATE, "%s, and rank %d waits for %s", silence, by, text);
    for (int r = 0; r < c->ranks.size && op_way(op->collective) == WAY_COLLECTIVE; r++) {
        const OpChannel* k = watchdog_counterpart(c, r, op, by);
        if (k == NULL || k->issued == 0 || k->last.number != op->number) continue;
        op_text(&k->last, other, sizeof other);
        if (strcmp(text, other) == 0) continue;
        watchdog_end_run(c, REASON_LATE, "rank %d issued %s where rank %d issued %s", by, text, r, other);
    }
    watchdog_end_run(c, REASON_LATE, "every rank has reached %s, for which rank %d has waited %.0f s:"
                     " the data is not moving", text, by, c->peers[by].beat.waited);
}

// Returns the rank that has waited longest beyond the deadline; -1: none has.
static inline int watchdog_longest_waiting(const Control* c) {
    int by = -1;
    double longest = c->timeout + CONTROL_SETTLE;
    for (int r = 0; r < c->num_peers; r++) {
        if (c->peers[r].beat.waited <= longest) continue;
        longest = c->peers[r].beat.waited;
        by = r;
    }
    return by;
}

// Sets missing (ranks): those that have not issued what rank `by` waits for. Returns the first of them;
// -1: there is none.
static inline int watchdog_find_missing(const Control* c, int by, bool* missing) {
    int first = -1;
    for (int r = c->ranks.size - 1; r >= 0; r--) {
        missing[r] = watchdog_is_missing(c, r, &c->peers[by].beat.awaited, by);
        if (missing[r]) first = r;
    }
    return first;
}
// The missing rank may itself wait for another, as along a pipeline. Returns the rank whose wait is the last of this
// kind. If they wait for one another in a circle, a message was left out, and a rank that waits for one is returned.
static inline int watchdog_last_waiting(const Control* c, int by, bool* missing) {
    for (int hops = 0; hops < c->ranks.size; hops++) {
        int r = watchdog_find_missing(c, by, missing);
        if (r < 0 || c->peers[r].beat.waited < 0 || watchdog_find_missing(c, r, missing) < 0) return by;
        by = r;
    }
    for (int hops = 0; hops < c->ranks.size && op_way(c->peers[by].beat.awaited.collective) == WAY_COLLECTIVE; hops++)
        by = watchdog_find_missing(c, by, missing);
    return by;
}

// On rank 0: if a rank has waited longer than the deadline, the run must end because of the ranks that are missing.
static inline void watchdog_check_deadlines(Control* c, double now) {
    int by = watchdog_longest_waiting(c);
    if (by < 0 || c->reason != REASON_NONE) return;
    bool* missing = new_array(bool, c->ranks.size);
    by = watchdog_last_waiting(c, by, missing);
    int first = watchdog_find_missing(c, by, missing);
    const OpRecord* op = &c->peers[by].beat.awaited;
    char who[256], text[OP_TEXT], last[OP_TEXT + 64 + WATCHDOG_SILENCE];
    const char* has = watchdog_who(c, missing, who, sizeof who) > 1 ? "have" : "has";
    free(missing);
    if (first < 0) { watchdog_end_stuck_run(c, op, by, now); return; }
    op_text(op, text, sizeof text);
    watchdog_describe_last(c, first, op, by, now, last, sizeof last);
    const char* side = op_way(op->collective) == WAY_COLLECTIVE ? "" : "its side of ";
    watchdog_end_run(c, REASON_LATE, "%s %s not reached %s%s, for which rank %d has waited %.0f s%s", who, has, side,
                     text, by, c->peers[by].beat.waited, last);
}

// On the other ranks: if even rank 0, which should have named a late rank by now, is silent, the run must end.
static inline void watchdog_check_rank_0(Control* c, const ControlBeat* own, double now) {
    if (own->waited <= c->timeout + CONTROL_SETTLE + CONTROL_PATIENCE || c->reason != REASON_NONE) return;
    char text[OP_TEXT], name[WATCHDOG_NAME];
    op_text(&own->awaited, text, sizeof text);
    watchdog_name(c, 0, name, sizeof name);
    watchdog_end_run(c, REASON_LATE,
                     "rank 0%s has been silent for %.0f s (stopped, or its machine is gone), and rank %d has waited "
                     "%.0f s for %s",
                     name, now - c->peers[0].heard, c->ranks.rank, own->waited, text);
}

// ---- what arrives ----

static inline void watchdog_accept(Control* c) {
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

// A stranger has said who it is: it becomes a peer, or is turned away.
static inline void watchdog_admit(Control* c, ControlPeer* stranger, const ControlHello* h) {
    bool of_this_run = memcmp(h->magic, CONTROL_MAGIC, sizeof h->magic) == 0
                    && memcmp(h->word, c->word, sizeof h->word) == 0;
    if (!of_this_run) { control_close(stranger); return; }
    int rank = h->rank;
    if (h->layout != control_layout())
        watchdog_end_run(c, REASON_REFUSED, "rank %d runs another version of this program than rank 0", rank);
    else if (h->size != c->ranks.size)
        watchdog_end_run(c, REASON_REFUSED, "rank %d was started as one of %d ranks, rank 0 as one of %d", rank,
                         h->size, c->ranks.size);
    else if (rank < 1 || rank >= h->size)
        watchdog_end_run(c, REASON_REFUSED, "rank %d of %d cannot join", rank, h->size);
    else if (c->peers[rank].joined)
        watchdog_end_run(c, REASON_REFUSED, "two processes say that they are rank %d", rank);
    if (c->reason != REASON_NONE) { // watchdog_end_run does not tell the newcomer
        control_queue_end(c, stranger);
        control_flush(stranger);
        control_close(stranger);
        return;
    }
    ControlPeer* p = &c->peers[rank];
    *p = *stranger;
    memset(stranger, 0, sizeof *stranger);
    stranger->fd = -1;
    p->joined = true;
    p->beat.waited = -1;
    c->joined++;
    control_queue(p, MESSAGE_WELCOME, NULL, 0);
}

static inline bool watchdog_take_beat(ControlPeer* p, const char* data, size_t n) {
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

// Takes one message of a peer. Returns false if the peer may not send it.
static inline bool watchdog_take_message(Control* c, ControlPeer* p, uint32_t kind, const char* data, size_t n) {
    char text[sizeof c->why];
    uint32_t length = (uint32_t)n;
    snprintf(text, sizeof text, "%.*s", n > 1 ? (int)(n - 1) : 0, n > 1 ? data + 1 : "");
    switch (kind) {
        case MESSAGE_BEAT: return watchdog_take_beat(p, data, n);
        case MESSAGE_BYTES:
            if (p->inbox.n + n > CONTROL_MAX_INBOX) return false;
            control_buffer_add(&p->inbox, &length, sizeof length);
            control_buffer_add(&p->inbox, data, n);
            return true;
        case MESSAGE_END:
            if (c->ranks.rank == 0 || n < 2 || data[0] <= REASON_NONE || data[0] > REASON_SIGTERM) return false;
            watchdog_end_run(c, (ControlReason)data[0], "%s", text);
            return true;
        case MESSAGE_HEARD: p->heard_end = true; return true;
        case MESSAGE_GOODBYE: p->goodbye = true; return true;
        case MESSAGE_LEFT: // the first reason counts: that its connection closes after this changes nothing
            if (n != 2) return false;
            if (data[0] == REASON_DIED) watchdog_declare_dead(c, p, strsignal(data[1]));
            else if (data[0] == REASON_SIGTERM)
                watchdog_end_run(c, REASON_SIGTERM, "rank %d has left (it was told to, by SIGTERM)",
                                 control_rank_of(c, p));
            else watchdog_end_run(c, REASON_LEFT, "rank %d has left (its own message says why)", control_rank_of(c, p));
            p->heard_end = data[0] != REASON_DIED;
            return true;
        case MESSAGE_SPEAK:
            c->leave_at = now_seconds();
            return c->reason != REASON_NONE;
        default: return false;
    }
}

// Takes the complete messages out of p->in. Returns false if they are not messages of this program.
static inline bool watchdog_take_messages(Control* c, ControlPeer* p) {
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
            watchdog_admit(c, p, &hello);
            return true;
        }
        if (!watchdog_take_message(c, p, h.kind, data, h.bytes)) return false;
    }
}

// Reads everything there is. A connection that has closed may still hold messages, which come first.
static inline void watchdog_read(Control* c, ControlPeer* p) {
    char chunk[65536];
    ssize_t n;
    if (p->fd < 0) return; // closed while we waited
    while ((n = recv(p->fd, chunk, sizeof chunk, MSG_DONTWAIT)) > 0) {
        control_buffer_add(&p->in, chunk, (size_t)n);
        p->heard = now_seconds();
        if (!p->joined) break; // a stranger: no more than one piece before it is looked at
    }
    bool closed = n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    bool stranger = !p->joined;
    bool ours = watchdog_take_messages(c, p);
    if (stranger) { if (!ours || closed) control_close(p); } // if it was admitted, p is an empty place now
    else if (!ours) {
        control_close(p);
        watchdog_end_run(c, REASON_DIED, "rank %d has sent something that is not a message of this program",
                         control_rank_of(c, p));
    } else if (closed) {
        control_close(p);
        if (c->ranks.rank > 0 && c->reason != REASON_NONE) c->leave_at = now_seconds(); // rank 0 will tell no more
        if (!p->goodbye) watchdog_declare_dead(c, p, "its connection closed");
    }
}

static inline void watchdog_poll_add(Control* c, int* n, int fd, bool writes) {
    struct pollfd* f = &c->polled[(*n)++];
    f->fd = fd; // -1: poll passes over it
    f->events = (short)(POLLIN | (writes ? POLLOUT : 0));
    f->revents = 0;
}

// One turn: sends, waits for up to `seconds`, receives. The lock is released while it waits.
static inline void watchdog_poll(Control* c, double seconds) {
    int n = 0;
    watchdog_poll_add(c, &n, c->wake[0], false);
    watchdog_poll_add(c, &n, c->listener, false);
    watchdog_poll_add(c, &n, c->sigterm, false);
    for (int i = 0; i < CONTROL_STRANGERS; i++) watchdog_poll_add(c, &n, c->strangers[i].fd, false);
    for (int i = 0; i < c->num_peers; i++) {
        control_flush(&c->peers[i]);
        watchdog_poll_add(c, &n, c->peers[i].fd, c->peers[i].out.n > 0);
    }
    pthread_mutex_unlock(&c->lock);
    int ready = poll(c->polled, (nfds_t)n, seconds > 0 ? 1 + (int)(1e3 * seconds) : 0);
    pthread_mutex_lock(&c->lock);
    if (ready <= 0) return;
    char drained[64];
    if (c->polled[0].revents) while (read(c->wake[0], drained, sizeof drained) == (ssize_t)sizeof drained) { }
    struct signalfd_siginfo sigterm;
    if (c->polled[2].revents && read(c->sigterm, &sigterm, sizeof sigterm) == (ssize_t)sizeof sigterm) c->told = true;
    const struct pollfd *strangers = c->polled + 3, *peers = strangers + CONTROL_STRANGERS;
    for (int i = 0; i < c->num_peers; i++) if (peers[i].revents) watchdog_read(c, &c->peers[i]);
    for (int i = 0; i < CONTROL_STRANGERS; i++) if (strangers[i].revents) watchdog_read(c, &c->strangers[i]);
    if (c->polled[1].revents) watchdog_accept(c);
    pthread_cond_broadcast(&c->changed);
}

// ---- how this rank ends ----

// Writes the file of this rank's last operations; returns false if it cannot.
static inline bool watchdog_write_log(Control* c, char* path, size_t size) {
    if (c->out[0] == '\0') return false;
    snprintf(path, size, "%s/ops_rank_%04d.txt", c->out, c->ranks.rank);
    FILE* f = fopen(path, "w");
    if (f == NULL) return false;
    flight_recorder_write(&c->recorder, f, c->word, c->ranks.rank, c->ranks.size);
    return fclose(f) == 0;
}

// Without a folder for the file: prints the last few operations.
static inline void watchdog_print_log(Control* c) {
    char lines[4 * (OP_TEXT + 64)] = "";
    size_t n = 0;
    pthread_mutex_lock(&c->recorder.lock);
    for (long long i = c->recorder.count > 4 ? c->recorder.count - 4 : 0; i < c->recorder.count; i++) {
        char text[OP_TEXT];
        const OpRecord* r = &c->recorder.ring[i % FLIGHT_RECORDER_LENGTH];
        op_text(r, text, sizeof text);
        n += (size_t)snprintf(lines + n, sizeof lines - n, "rank %d: %s, %s\n", c->ranks.rank, text,
                              op_state_names[r->state]);
    }
    pthread_mutex_unlock(&c->recorder.lock);
    write_stderr(lines);
}

// Prints a rank's reason for leaving because of another.
static inline void watchdog_report(Control* c) {
    char path[4096], line[8192];
    if (ftrylockfile(stdout) == 0) { // a thread that is stuck may hold it
        fflush(stdout);
        funlockfile(stdout);
    }
    bool in_training = flight_recorder_step_now(&c->recorder) > 0;
    bool history = in_training || c->reason < REASON_REFUSED; // an error at the start has none
    bool written = history && watchdog_write_log(c, path, sizeof path);
    if (history && !written) watchdog_print_log(c);
    const char* resume = !in_training ? "" : c->out[0] ? "; continue from the last checkpoint with --resume"
                                           : "; without --out there is no checkpoint to continue from";
    size_t n = (size_t)snprintf(line, sizeof line, "rank %d: error: %s%s", c->ranks.rank, c->why, resume);
    if (written)
        n += (size_t)snprintf(line + n, sizeof line - n, "; last operations: %s (build/ranks compares them)", path);
    n = size_min(n, sizeof line - 2);
    snprintf(line + n, sizeof line - n, "\n");
    if (!history && die_say) die_say(line, c->why); // the same on all ranks
    else write_stderr(line);
}

// Returns true if every other rank has said why the run ends, or is gone. Only rank 0 hears of that: for the others it
// is so when rank 0 has ended.
static inline bool watchdog_all_have_spoken(const Control* c) {
    bool all = true;
    for (int i = 0; i < c->num_peers; i++)
        all = all && (c->peers[i].fd < 0 || (c->ranks.rank == 0 && c->peers[i].heard_end));
    return all;
}
static inline double watchdog_farewell(const Control* c) { return CONTROL_FAREWELL * (c->ranks.rank ? 1.5 : 1); }

// Ends the process. All ranks must have written before the first one ends, because a launcher then kills the rest.
static inline void watchdog_exit(Control* c) {
    watchdog_report(c);
    if (c->ranks.rank > 0) control_queue(&c->peers[0], MESSAGE_HEARD, NULL, 0);
    for (double until = now_seconds() + watchdog_farewell(c), now;
         (now = now_seconds()) < until && !watchdog_all_have_spoken(c);)
        watchdog_poll(c, until - now);
    _exit(EXIT_FAILURE);
}

// Returns true if rank r's wait cannot end without rank q.
// Other operations may: what is sent may be on its way already.
static inline bool watchdog_needs(const Control* c, int r, int q) {
    const OpRecord* op = &c->peers[r].beat.awaited;
    bool broadcast = strcmp(op->collective, "broadcast") == 0,
         rooted = op_way(op->collective) == WAY_COLLECTIVE && op->peer >= 0;
    if (c->peers[r].beat.waited < 0 || !watchdog_is_missing(c, q, op, r)) return false;
    bool certain = rooted ? op->peer == (broadcast ? q : r) : op_way(op->collective) != WAY_SEND;
    return certain || c->peers[r].beat.waited > CONTROL_PATIENCE;
}

// On rank 0: ranks that have not spoken need no more time if all wait for ranks that have,
// or for one another because of those.
static inline void watchdog_check_silence(Control* c, double now) {
    if (c->reason < REASON_LEFT || now >= c->leave_at) return;
    int N = c->ranks.size, silent = 0;
    bool *over = new_array(bool, N), more = true; // they will say no more
    for (int r = 0; r < N; r++) over[r] = r == 0 ? c->left : c->peers[r].fd < 0 || c->peers[r].heard_end;
    while (more) {
        more = false;
        for (int r = 0; r < N; r++)
            for (int q = 0; q < N && !over[r]; q++) if (over[q] && watchdog_needs(c, r, q)) over[r] = more = true;
    }
    for (int r = 0; r < N; r++) silent += !over[r];
    free(over);
    if (silent > 0) return;
    control_queue_all(c, MESSAGE_SPEAK, NULL, 0);
    c->leave_at = now;
}

// Tells all why this rank leaves. Takes up to half a second.
static inline void watchdog_announce_exit(Control* c, ControlReason why) {
    char reason[2] = { (char)why, (char)__atomic_load_n(&watchdog_process.crash, __ATOMIC_ACQUIRE) };
    control_queue_all(c, MESSAGE_LEFT, reason, sizeof reason);
    double until = now_seconds() + 0.5;
    for (bool pending = true; pending && now_seconds() < until; usleep(pending ? 1000 : 0)) {
        pending = false;
        for (int i = 0; i < c->num_peers; i++) {
            control_flush(&c->peers[i]);
            pending = pending || (c->peers[i].fd >= 0 && c->peers[i].out.n > 0);
        }
    }
}

static inline void watchdog_unblock_sigterm(void) {
    sigset_t sigterm;
    sigemptyset(&sigterm);
    sigaddset(&sigterm, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &sigterm, NULL);
}

// Does nothing unless another thread has crashed; then the signal's handler waits for this.
static inline void watchdog_check_crash(Control* c) {
    if (!__atomic_load_n(&watchdog_process.crash, __ATOMIC_ACQUIRE)) return;
    char path[4096];
    watchdog_write_log(c, path, sizeof path);
    watchdog_announce_exit(c, REASON_DIED);
    __atomic_store_n(&watchdog_process.crash_reported, 1, __ATOMIC_RELEASE);
    for (;;) pause();
}

// SIGTERM usually comes from a launcher that has seen a rank end. Rank 0's reason is on its way;
// if none comes, this rank ends.
static inline void watchdog_check_sigterm(Control* c, double now) {
    if (!c->told) return;
    if (c->sigterm_at == 0) c->sigterm_at = now;
    bool others_too = c->reason == REASON_SIGTERM;
    if (!others_too && (c->reason != REASON_NONE || now < c->sigterm_at + c->grace)) return;
    char path[4096];
    watchdog_write_log(c, path, sizeof path);
    watchdog_announce_exit(c, REASON_SIGTERM);
    watchdog_unblock_sigterm();
    raise(SIGTERM);
    for (;;) pause();
}

// ---- the thread ----

// If a turn lasted much longer than a beat, this process was stopped.
// That time counts neither as waiting nor as silence.
static inline void watchdog_skip_stop(Control* c, double now) {
    double stopped = control_stopped(c->turn, CONTROL_BEAT);
    c->turn = now;
    if (stopped <= 0) return;
    pthread_mutex_lock(&c->recorder.lock);
    c->recorder.since = fmin(now, c->recorder.since + stopped); // a wait may have begun since
    pthread_mutex_unlock(&c->recorder.lock);
    for (int i = 0; i < c->num_peers; i++) c->peers[i].heard = fmin(now, c->peers[i].heard + stopped);
    c->leave_at += stopped;
    if (c->sigterm_at > 0) c->sigterm_at += stopped;
}

// Notes this rank's state, sends it, and checks the deadlines.
// A peer that has not taken the last gets none, lest memory fills.
static inline void watchdog_beat(Control* c, double now) {
    ControlBuffer b = { NULL, 0, 0 };
    ControlBeat own;
    memset(&own, 0, sizeof own);
    pthread_mutex_lock(&c->recorder.lock);
    own.waited = c->recorder.waiting ? now - c->recorder.since : -1;
    if (c->recorder.waiting) own.awaited = c->recorder.awaited;
    own.progress = c->recorder.progress;
    own.num_channels = (int)size_min((size_t)c->recorder.num_channels,
                                     (CONTROL_MAX_MESSAGE - sizeof own) / sizeof(OpChannel));
    control_buffer_add(&b, &own, sizeof own);
    control_buffer_add(&b, c->recorder.channels, (size_t)own.num_channels * sizeof(OpChannel));
    pthread_mutex_unlock(&c->recorder.lock);
    if (c->ranks.rank == 0) {
        watchdog_take_beat(&c->peers[0], b.data, b.n);
        own.num_channels = 0; // the others only need to know that rank 0 is alive
        memcpy(b.data, &own, sizeof own);
        b.n = sizeof own;
    }
    for (int i = 0; i < c->num_peers; i++)
        if (c->peers[i].out.n == 0 || c->leaving) control_queue(&c->peers[i], MESSAGE_BEAT, b.data, b.n);
    free(b.data);
    if (c->ranks.rank == 0) watchdog_check_deadlines(c, now);
    if (c->ranks.rank == 0) watchdog_check_silence(c, now);
    else watchdog_check_rank_0(c, &own, now);
}

// This rank has reported an error of its own: the others get time for theirs. Tells rank 0 for the last time what it
// has issued.
static inline void watchdog_part(Control* c, double now) {
    char path[4096];
    if (flight_recorder_step_now(&c->recorder) > 0) watchdog_write_log(c, path, sizeof path);
    watchdog_beat(c, now);
    watchdog_end_run(c, REASON_LEFT, "rank %d has left (its own message says why)", c->ranks.rank);
    if (c->ranks.rank > 0) watchdog_announce_exit(c, REASON_LEFT);
    c->left = true;
}

static inline void* watchdog_thread(void* argument) {
    Control* c = (Control*)argument;
    pthread_sigmask(SIG_UNBLOCK, &watchdog_process.handled, NULL);
    pthread_mutex_lock(&c->lock);
    c->turn = now_seconds();
    while (!c->ended) {
        double now = now_seconds();
        watchdog_skip_stop(c, now);
        if (now >= c->last_beat + CONTROL_BEAT) {
            c->last_beat = now;
            watchdog_beat(c, now);
        }
        if (c->leaving && !c->left) watchdog_part(c, now);
        watchdog_check_crash(c);
        watchdog_check_sigterm(c, now);
        if (c->left) c->ended = watchdog_all_have_spoken(c) || now >= c->leave_at + watchdog_farewell(c);
        else if (c->reason != REASON_NONE && now >= c->leave_at) watchdog_exit(c);
        bool flushed = true;
        for (int i = 0; i < c->num_peers; i++) flushed = flushed && (c->peers[i].fd < 0 || c->peers[i].out.n == 0);
        if (c->stopping && flushed) c->ended = true;
        if (!c->ended) watchdog_poll(c, c->stopping ? 0.01 : c->last_beat + CONTROL_BEAT - now);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

// ---- signals ----

// Blocks SIGTERM, and every other signal that a library handles, on the main thread and on those that it will start.
// The watchdog reads SIGTERM and runs the handlers of the others. If SIGTERM is ignored or already has a handler, that
// remains so.
static inline void watchdog_block_signals(Control* c) {
    sigset_t blocked, sigterm;
    sigemptyset(&watchdog_process.handled);
    sigemptyset(&sigterm);
    sigaddset(&sigterm, SIGTERM);
    for (int s = 1; s < NSIG; s++) {
        struct sigaction now;
        if (signal_is_fault(s) || sigaction(s, NULL, &now) != 0 || now.sa_handler == SIG_IGN) continue;
        if (now.sa_handler != SIG_DFL) sigaddset(&watchdog_process.handled, s);
        else if (s == SIGTERM && !stop_handles(s)) c->sigterm = signalfd(-1, &sigterm, SFD_CLOEXEC | SFD_NONBLOCK);
    }
    blocked = watchdog_process.handled;
    if (c->sigterm >= 0) sigaddset(&blocked, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &blocked, &watchdog_process.unblocked);
}

// Gives the watchdog up to a second, and then passes the crash to the handler that was there before.
static inline void watchdog_on_crash(int signal_number, siginfo_t* info, void* context) {
    const struct timespec moment = { 0, 10000000 };
    const Control* c = watchdog_process.control;
    bool can_tell = c && c->process == getpid() && !pthread_equal(c->thread, pthread_self());
    (void)context;
    __atomic_store_n(&watchdog_process.crash, signal_number, __ATOMIC_RELEASE);
    if (can_tell && write(watchdog_process.wake_fd, "", 1) < 0) { }
    for (int i = 0; can_tell && i < 100; i++) {
        if (__atomic_load_n(&watchdog_process.crash_reported, __ATOMIC_ACQUIRE)) break;
        nanosleep(&moment, NULL);
    }
    for (int i = 0; i < WATCHDOG_CRASHES; i++) sigaction(watchdog_crash_signals[i], &watchdog_process.before[i], NULL);
    if (info->si_code <= 0) raise(signal_number); // sent by a process; a real fault happens again when this returns
}

// Handles crashes, and passes them on afterwards. On the main thread the handler has a stack of its own (a sanitizer's,
// if there is one). OpenMP's threads have none: there it runs on the current stack and may damage memory, but the
// process ends anyway.
static inline void watchdog_catch_crashes(void) {
    struct sigaction ours;
    stack_t stack;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = watchdog_on_crash;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (sigaltstack(NULL, &stack) == 0 && stack.ss_flags & SS_DISABLE) {
        memset(&stack, 0, sizeof stack);
        stack.ss_sp = watchdog_process.stack;
        stack.ss_size = sizeof watchdog_process.stack;
        sigaltstack(&stack, NULL);
    }
    for (int i = 0; i < WATCHDOG_CRASHES; i++) sigaction(watchdog_crash_signals[i], &ours, &watchdog_process.before[i]);
}

// From here on SIGTERM ends the process at once, including one that came too late for the watchdog.
static inline void watchdog_release_signals(Control* c) {
    for (int i = 0; i < WATCHDOG_CRASHES; i++) sigaction(watchdog_crash_signals[i], &watchdog_process.before[i], NULL);
    if (c->sigterm >= 0) close(c->sigterm);
    pthread_sigmask(SIG_SETMASK, &watchdog_process.unblocked, NULL);
    if (c->told) raise(SIGTERM);
}

// ---- beginning and end ----

// Registered with atexit. An exit() while the watchdog runs is an early one: this tells the others that it is no crash.
static inline void watchdog_on_exit(void) {
    Control* c = watchdog_process.control;
    if (c == NULL || c->process != getpid() || pthread_equal(c->thread, pthread_self())) return;
    struct timespec soon;
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_sec += 2;
    // The thread that exits may hold it
    if (pthread_mutex_timedlock(&c->lock, &soon) != 0) { watchdog_unblock_sigterm(); return; }
    c->leaving = true;
    control_wake(c);
    for (double until = now_seconds() + c->grace + 2; !c->ended && now_seconds() < until;)
        control_wait_changed(c, until);
    bool ended = c->ended;
    pthread_mutex_unlock(&c->lock);
    if (ended) pthread_join(c->thread, NULL);
    watchdog_unblock_sigterm(); // nobody reads it any more, and destructors may hang
}

// die calls it in place of exit() while a GPU may run kernels that wait for other ranks (comm/comm_nccl.cuh sets
// die_leave), because destructors of the driver and of libraries might never return. It still lets the watchdog tell
// the others, and flushes files.
static inline void watchdog_leave(int status) {
    watchdog_on_exit();
    fflush(NULL);
    _exit(status);
}

static inline void watchdog_start(Control* c) {
    require(pipe2(c->wake, O_CLOEXEC | O_NONBLOCK) == 0, "cannot make a pipe for the watchdog: %s", strerror(errno));
    watchdog_process.wake_fd = c->wake[1];
    watchdog_process.control = c;
    c->process = getpid();
    watchdog_block_signals(c);
    require(thread_start(&c->thread, watchdog_thread, c) == 0, "cannot start a thread for the watchdog");
    if (!watchdog_process.has_exit_hook)
        invariant(atexit(watchdog_on_exit) == 0, "cannot register a function with atexit");
    watchdog_process.has_exit_hook = true;
    watchdog_catch_crashes();
}

// Ends the thread, once it has sent what is queued.
static inline void watchdog_stop(Control* c) {
    pthread_mutex_lock(&c->lock);
    c->stopping = true;
    control_wake(c);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    watchdog_release_signals(c);
    watchdog_process.control = NULL;
    close(c->wake[0]);
    close(c->wake[1]);
}
#endif
