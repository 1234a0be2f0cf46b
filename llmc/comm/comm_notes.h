/*
comm_notes.h - what is noted of operations: how many, how many bytes, by whom, and when. It changes none of them, except
that --fault skip leaves one out.
*/
#ifndef LLMC_COMM_NOTES_H
#define LLMC_COMM_NOTES_H
#include "comm_api.h"

// Returns the elements that a rank sends by the formulas of comm_api.h, times N.
static inline unsigned long long comm_sent_times_N(CommKind k, size_t n, int N) {
    unsigned long long others = (unsigned long long)N - 1, all = (unsigned long long)N;
    switch (k) {
    case COMM_ALL_REDUCE: return 2 * n * others;
    case COMM_REDUCE_SCATTER: case COMM_ALL_GATHER: case COMM_ALL_TO_ALL: return n * others * all;
    case COMM_BROADCAST: return n * others;
    case COMM_ALL_TO_ALL_V: case COMM_SEND: return n * all;
    default: return 0;
    }
}

// ---- what the observer will see of an operation ----
// The next operation of this process sends or receives this data (bytes) in another form, from or to another buffer.
static inline void comm_trace_data(Comm* c, const void* data, size_t bytes) {
    c->world->notes.about = data;
    c->world->notes.about_bytes = bytes;
}

static inline void comm_event_begin(Comm* c, CommSlot* s) {
    CommNotes* notes = &c->world->notes;
    // The other buffer is of all ranks, or there is none
    bool sends = s->kind == COMM_ALL_GATHER || s->kind == COMM_ALL_TO_ALL_V || s->kind == COMM_SEND;
    const void* shard = sends ? s->in : s->out;
    CommEvent e = { c->name, s->kind, s->type, s->n, s->number, 0, 0, 0, 0, 0, c->size, { { NULL } },
                    notes->about ? notes->about : shard,
                    notes->about ? notes->about_bytes : s->n * comm_type_size(s->type) };
    if (notes->observer) callers_take(&e.callers);
    notes->about = NULL;
    s->event = e;
}

// Notes that s was issued: counts it, and writes it into the log of operations. Returns false if --fault skip
// leaves s out.
static inline bool comm_note_issue(Comm* c, CommSlot* s) {
    CommContext* w = c->world;
    CommStats* stats = &c->stats[s->kind];
    comm_event_begin(c, s);
    for (int k = 0; k < COMM_EVENTS; k++) s->events[k] = -1;
    s->events[EVENT_ISSUED] = device_event();
    stats->calls++;
    stats->bytes_times_N += comm_sent_times_N(s->kind, s->n, c->size) * comm_type_size(s->type);
    s->finished = w->notes.skips && c->size > 1;
    if (s->finished) w->notes.skips = false;
    else s->record = flight_recorder_issue(w->recorder, c->name, comm_kind_names[s->kind], s->n,
                                           comm_type_name(s->type), s->peer >= 0 ? c->world_rank[s->peer] : -1);
    return !s->finished;
}
static inline bool comm_was_noted(const CommSlot* s) { return s->record.communicator[0] != '\0'; }

// ---- times of operations that were waited for ----

// Returns how many of them the device has passed. Waits are passed in their order,
// and with a wait all marks of its operation.
static inline int comm_count_passed(const CommContext* w) {
    int passed = 0, end = w->notes.num_waited; // those before `passed` are, those from `end` on may not be
    while (passed < end) {
        int middle = passed + (end - passed) / 2;
        if (device_event_passed(w->notes.waited[middle].events[EVENT_WAIT_ENDED])) passed = middle + 1;
        else end = middle;
    }
    return passed;
}

// Settles the oldest n, which the device has passed.
static inline void comm_collect_oldest(CommContext* w, int n) {
    if (n > 0 && w->backend && w->backend->look) w->backend->look(w);
    for (int i = 0; i < n; i++) {
        CommWaited* x = &w->notes.waited[i];
        x->stats->exposed += device_event_seconds(x->events[EVENT_WAIT_BEGUN], x->events[EVENT_WAIT_ENDED]);
        CommEvent* e = &x->event;
        const int* m = x->events;
        if (w->notes.observer || w->notes.counts_busy)
            x->stats->busy += m[EVENT_STARTED] < 0 ? e->finished - e->started
                                                   : device_event_seconds(m[EVENT_STARTED], m[EVENT_FINISHED]);
        double* times[COMM_EVENTS] = { &e->issued, &e->wait_begun, &e->wait_ended, &e->started, &e->finished };
        for (int k = 0; w->notes.observer && k < COMM_EVENTS; k++) if (m[k] >= 0) *times[k] = device_event_time(m[k]);
        if (w->notes.observer) w->notes.observer(w->notes.self, e);
        for (int k = 0; k < COMM_EVENTS; k++) if (m[k] >= 0) device_event_free(m[k]);
    }
    w->notes.num_waited -= n;
    memmove(w->notes.waited, w->notes.waited + n, (size_t)w->notes.num_waited * sizeof(CommWaited));
}

// While the host waits for the device anyway: settles what the device has passed, so that at the end of a step, when
// the device has nothing to do, few operations are left for comm_collect_times. An observer sees all of them there
// (comm_make_room).
static inline void comm_collect_passed(CommContext* w) {
    bool any = w->notes.num_waited > 0 && device_event_passed(w->notes.waited[0].events[EVENT_WAIT_ENDED]);
    if (any && w->notes.observer == NULL) comm_collect_oldest(w, comm_count_passed(w));
}

static inline void comm_collect_times(Comm* c) {
    CommNotes* notes = &c->world->notes;
    int n = notes->num_waited;
    if (n > 0 && !device_event_passed(notes->waited[n - 1].events[EVENT_WAIT_ENDED])) device_synchronize();
    comm_collect_oldest(c->world, n);
}

// Makes room for one more in the middle of a step, where the device must not run dry: what it has not passed yet stays.
// An observer sees all at comm_collect_times, because run/trace.h first needs the compute into which the waits cut.
static inline void comm_make_room(CommContext* w) {
    if (w->notes.num_waited < w->notes.capacity) return;
    if (w->notes.observer == NULL) comm_collect_oldest(w, comm_count_passed(w));
    if (w->notes.num_waited <= w->notes.capacity / 2) return;
    w->notes.capacity *= 2;
    w->notes.waited = (CommWaited*)xrealloc(w->notes.waited, (size_t)w->notes.capacity * sizeof(CommWaited));
}

// Notes that the wait for s has ended.
static inline void comm_note_wait(Comm* c, CommSlot* s) {
    CommContext* w = c->world;
    s->events[EVENT_WAIT_ENDED] = device_event();
    comm_make_room(w);
    CommWaited* x = &w->notes.waited[w->notes.num_waited++];
    x->event = s->event;
    x->stats = &c->stats[s->kind];
    memcpy(x->events, s->events, sizeof x->events);
}

static inline void comm_observe(Comm* c, CommObserver observer, void* self) {
    comm_collect_times(c);
    c->world->notes.observer = observer;
    c->world->notes.self = self;
}

// ---- totals ----

static inline double comm_rank_bytes(const Comm* world) {
    const CommContext* w = world->world;
    double bytes = 0;
    for (int i = 0; i < w->num_comms; i++) {
        const Comm* c = w->comms[i];
        unsigned long long times_N = 0;
        for (int k = 0; k < COMM_KINDS; k++) times_N += c->stats[k].bytes_times_N;
        bytes += (double)times_N / c->size; // one division, so that a whole number of bytes is exact
    }
    return bytes;
}
static inline double comm_rank_exposed(const Comm* world) {
    const CommContext* w = world->world;
    double seconds = 0;
    for (int i = 0; i < w->num_comms; i++)
        for (int k = 0; k < COMM_KINDS; k++) seconds += w->comms[i]->stats[k].exposed;
    return seconds;
}
#endif
