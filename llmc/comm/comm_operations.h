/*
comm_operations.h - an operation from its call to the end of its wait: counting, strict mode, the wait, and its times.

An operation occupies a slot of its communicator from its issue to its wait. The backend begins it at the issue, or in
strict mode at the wait. If there is only one rank, there is no backend: operations are copies, which this file makes.
*/
#ifndef LLMC_COMM_OPERATIONS_H
#define LLMC_COMM_OPERATIONS_H
#include "comm_api.h"

// ---- what an operation sends, reads and writes ----

// Returns the elements that a rank sends by the formulas of comm_api.h, times N.
static inline unsigned long long comm_sent_times_N(CommKind k, size_t n, int N) {
    unsigned long long others = (unsigned long long)N - 1, all = (unsigned long long)N;
    switch (k) {
    case COMM_ALL_REDUCE: return 2 * n * others;
    case COMM_REDUCE_SCATTER: case COMM_ALL_GATHER: case COMM_ALL_TO_ALL: return n * others * all;
    case COMM_BROADCAST: return n * others;
    case COMM_SEND: return n * all;
    default: return 0;
    }
}

// This rank's part of the buffer (N,n) that a reduce-scatter reads or an all-gather writes.
static inline char* comm_own_part(const Comm* c, const CommSlot* s) {
    char* full = s->kind == COMM_REDUCE_SCATTER ? (char*)s->in : (char*)s->out;
    return full + (size_t)c->rank * s->n * comm_type_size(s->type);
}

// ---- strict mode ----

// Sets p (bytes) to NaN, in every type.
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
    size_t bytes = s->n * comm_type_size(s->type), output = bytes; // that it writes
    if (s->kind == COMM_ALL_GATHER || s->kind == COMM_ALL_TO_ALL) output *= (size_t)c->size;
    if (output == 0 || s->kind == COMM_SEND || s->kind == COMM_BARRIER || s->kind == COMM_SPLIT) return;
    if (s->kind == COMM_ALL_REDUCE || (s->kind == COMM_BROADCAST && s->peer == c->rank)) s->own = (char*)s->out;
    if (s->kind == COMM_REDUCE_SCATTER && s->out == comm_own_part(c, s)) s->own = (char*)s->out;
    if (s->kind == COMM_ALL_GATHER && s->in == comm_own_part(c, s)) s->own = (char*)s->in;
    if (s->own) {
        s->kept = (char*)xcalloc(bytes, 1);
        device_to_host(s->kept, s->own, bytes);
    }
    comm_set_nan(s->out, output, s->on_host && s->kind == COMM_REDUCE_SCATTER);
    // The shard, which layers may read meanwhile
    if (s->own && s->kind == COMM_ALL_GATHER) host_to_device(s->own, s->kept, bytes);
}

// ---- an emulated link between device and host ----

static inline void comm_emulate_host_link(Comm* c, double gbits) {
    require(gbits == 0 || strncmp(device_name(), "CPU", 3) == 0,
            "--emulate-host-link is for the CPU: a GPU has such a link; leave it out");
    c->world->host_link = gbits;
}
// A copy of so many bytes begins when those before it the same way are over. Returns when the link has carried it;
// 0: none is emulated.
static inline double comm_host_link_until(Comm* c, bool from_host, size_t bytes) {
    double *until = &c->world->host_until[from_host], rate = 1e9 / 8 * c->world->host_link;
    return rate == 0 ? 0 : (*until = fmax(now_seconds(), *until) + (double)bytes / rate);
}

// ---- issuing ----

// The backend of a communicator of one rank: one part is the whole, so an operation is a copy.
static inline void comm_alone_start(Comm* c, CommSlot* s) {
    size_t bytes = s->n * comm_type_size(s->type);
    flight_recorder_start(c->world->recorder, &s->record);
    s->event.started = now_seconds();
    if (s->on_host && s->kind == COMM_ALL_GATHER) host_to_device(s->out, s->in, bytes);
    else if (s->on_host) device_to_host(s->out, s->in, bytes);
    else if (s->in && s->out && s->in != s->out) device_copy(s->out, s->in, bytes);
    s->event.finished = now_seconds();
    if (s->on_host)
        s->event.finished = fmax(s->event.finished, comm_host_link_until(c, s->kind == COMM_ALL_GATHER, bytes));
    flight_recorder_finish(c->world->recorder, &s->record);
    s->finished = true;
}
static const CommBackend comm_alone_backend = { NULL, NULL, NULL, NULL, NULL, comm_alone_start, NULL, NULL, NULL };
static inline bool comm_is_alone(const Comm* c) { return c->backend == &comm_alone_backend; }

// Strict mode: begins an operation that was issued before, with its input as it was then.
static inline void comm_begin(Comm* c, CommSlot* s) {
    if (s->kept) {
        host_to_device(s->own, s->kept, s->n * comm_type_size(s->type));
        device_synchronize();
        free(s->kept);
        s->kept = NULL;
    }
    s->begun = true;
    c->backend->start(c, s);
}

// ---- what the observer will see of an operation ----
// The next operation of this process sends or receives this data (bytes) in another form, from or to another buffer.
static inline void comm_trace_data(Comm* c, const void* data, size_t bytes) {
    c->world->about = data;
    c->world->about_bytes = bytes;
}

static inline void comm_event_begin(Comm* c, CommSlot* s) {
    CommContext* w = c->world;
    CommEvent* e = &s->event;
    // The other buffer is of all ranks, or there is none
    bool shard_in = s->kind == COMM_ALL_GATHER || s->kind == COMM_SEND;
    memset(e, 0, sizeof *e);
    e->communicator = c->name;
    e->kind = s->kind;
    e->type = s->type;
    e->n = s->n;
    e->number = s->number;
    e->ranks = c->size;
    if (w->observer) callers_take(&e->callers);
    e->data = w->about ? w->about : shard_in ? s->in : s->out;
    e->bytes = w->about ? w->about_bytes : s->n * comm_type_size(s->type);
    w->about = NULL;
}

// peer: the other end or the root, a rank of c; -1: there is none. color: of a split.
// on_host: the shard is in host memory.
static inline CommOp comm_issue(Comm* c, CommKind kind, void* out, const void* in, size_t n, CommType t, int peer,
                                int color, bool on_host) {
    CommSlot* s = &c->slots[c->issued % COMM_IN_FLIGHT];
    invariant(!s->live, "%s: %d operations are under way; %s, #%lld, was never waited for", c->name, COMM_IN_FLIGHT,
              comm_kind_names[s->kind], s->number);
    memset(s, 0, sizeof *s);
    s->kind = kind; s->type = t; s->n = n; s->peer = peer; s->color = color; s->out = out; s->in = in;
    s->on_host = on_host;
    s->number = c->issued++;
    s->live = true;
    comm_event_begin(c, s);
    for (int k = 0; k < COMM_EVENTS; k++) s->events[k] = -1;
    s->events[EVENT_ISSUED] = device_event();
    c->stats[kind].calls++;
    c->stats[kind].bytes_times_N += comm_sent_times_N(kind, n, c->size) * comm_type_size(t);
    int world_peer = peer >= 0 ? c->world_rank[peer] : -1;
    if (c->world->skips && c->size > 1) { // a fault on purpose
        s->begun = s->finished = true;
        c->world->skips = false;
        return s->number;
    }
    s->record = flight_recorder_issue(c->world->recorder, c->name, comm_kind_names[kind], n, comm_type_name(t),
                                      world_peer);
    if (c->world->strict) { comm_poison(c, s); return s->number; } // it begins at its wait
    s->begun = true;
    c->backend->start(c, s);
    return s->number;
}

// ---- the operations ----

static inline void comm_require_sum(const Comm* c, CommKind k, CommType t) {
    invariant(t != COMM_BYTE, "%s: %s of bytes: only numbers can be added", c->name, comm_kind_names[k]);
}
static inline void comm_require_peer(const Comm* c, CommKind k, int peer) {
    invariant(peer >= 0 && peer < c->size && (k == COMM_BROADCAST || peer != c->rank),
              "%s: %s of rank %d cannot name rank %d of %d", c->name, comm_kind_names[k], c->rank, peer, c->size);
}
static inline CommOp comm_all_reduce(Comm* c, void* buf, size_t n, CommType t) {
    comm_require_sum(c, COMM_ALL_REDUCE, t);
    return comm_issue(c, COMM_ALL_REDUCE, buf, buf, n, t, -1, 0, false);
}
static inline CommOp comm_reduce_scatter(Comm* c, void* shard, const void* full, size_t n, CommType t) {
    comm_require_sum(c, COMM_REDUCE_SCATTER, t);
    return comm_issue(c, COMM_REDUCE_SCATTER, shard, full, n, t, -1, 0, is_offloaded(shard));
}
static inline CommOp comm_all_gather(Comm* c, void* full, const void* shard, size_t n, CommType t) {
    return comm_issue(c, COMM_ALL_GATHER, full, shard, n, t, -1, 0, is_offloaded(shard));
}
static inline CommOp comm_all_to_all(Comm* c, void* out, const void* in, size_t n, CommType t) {
    uintptr_t a = (uintptr_t)out, b = (uintptr_t)in, bytes = (size_t)c->size * n * comm_type_size(t);
    invariant(a + bytes <= b || b + bytes <= a,
              "%s: the two buffers of an all-to-all of %d x %zu %s overlap: give it separate ones", c->name, c->size, n,
              comm_type_name(t));
    return comm_issue(c, COMM_ALL_TO_ALL, out, in, n, t, -1, 0, false);
}
static inline CommOp comm_broadcast(Comm* c, void* buf, size_t n, CommType t, int root) {
    comm_require_peer(c, COMM_BROADCAST, root);
    return comm_issue(c, COMM_BROADCAST, buf, buf, n, t, root, 0, false);
}
static inline void comm_connect(Comm* c, CommPairs* pairs) {
    invariant(c->pairs == NULL, "%s: comm_connect was called twice", c->name);
    c->pairs = pairs;
    if (c->backend->connect) c->backend->connect(c);
}
static inline void comm_require_pair(const Comm* c, CommKind k, int peer) {
    invariant(c->pairs, "%s: call comm_connect before the first %s", c->name, comm_kind_names[k]);
    comm_require_peer(c, k, peer);
    invariant(c->pairs(c->rank, peer, c->size),
              "%s: %s of rank %d cannot name rank %d: comm_connect was told that they exchange no messages", c->name,
              comm_kind_names[k], c->rank, peer);
}
static inline void comm_register_memory(Comm* world) {
    const CommBackend* b = world->world->backend;
    if (b && b->register_memory) b->register_memory(world);
}
static inline void comm_register_on(Comm* c) { c->world->registers = c; }
static inline void* comm_alloc(Comm* c, size_t bytes, MemoryKind kind) {
    c->world->allocates = c->size > 1 ? c : NULL;
    void* p = device_alloc(bytes, kind);
    c->world->allocates = NULL;
    return p;
}
static inline CommOp comm_send(Comm* c, const void* buf, size_t n, CommType t, int to) {
    comm_require_pair(c, COMM_SEND, to);
    return comm_issue(c, COMM_SEND, NULL, buf, n, t, to, 0, false);
}
static inline CommOp comm_recv(Comm* c, void* buf, size_t n, CommType t, int from) {
    comm_require_pair(c, COMM_RECV, from);
    return comm_issue(c, COMM_RECV, buf, NULL, n, t, from, 0, false);
}

// ---- waiting ----

// Strict mode: begins what must be under way before the host may wait for `awaited`. All sends: if they began only at
// their own waits, two ranks that exchange messages and wait for their receives first would wait forever. And the
// receives before it from the same rank, because messages do not overtake one another.
static inline void comm_begin_messages(Comm* awaited_on, const CommSlot* awaited) {
    CommContext* w = awaited_on->world;
    for (int i = 0; i < w->num_comms; i++) {
        Comm* c = w->comms[i];
        for (CommOp op = c->issued > COMM_IN_FLIGHT ? c->issued - COMM_IN_FLIGHT : 0; op < c->issued; op++) {
            CommSlot* s = &c->slots[op % COMM_IN_FLIGHT];
            bool same_queue = c == awaited_on && awaited->kind == COMM_RECV && s->kind == COMM_RECV
                              && s->peer == awaited->peer;
            bool goes_first = s->kind == COMM_SEND || (same_queue && op < awaited->number);
            if (s->live && !s->begun && goes_first) comm_begin(c, s);
        }
    }
}

// ---- times of operations that were waited for ----

// Returns how many of them the device has passed. Waits are passed in their order,
// and with a wait all marks of its operation.
static inline int comm_count_passed(const CommContext* w) {
    int passed = 0, end = w->num_waited; // those before `passed` are, those from `end` on may not be
    while (passed < end) {
        int middle = passed + (end - passed) / 2;
        if (device_event_passed(w->waited[middle].events[EVENT_WAIT_ENDED])) passed = middle + 1;
        else end = middle;
    }
    return passed;
}

// Settles the oldest n, which the device has passed.
static inline void comm_collect_oldest(CommContext* w, int n) {
    if (n > 0 && w->backend && w->backend->look) w->backend->look(w);
    for (int i = 0; i < n; i++) {
        CommWaited* x = &w->waited[i];
        x->stats->exposed += device_event_seconds(x->events[EVENT_WAIT_BEGUN], x->events[EVENT_WAIT_ENDED]);
        CommEvent* e = &x->event;
        const int* m = x->events;
        if (w->observer || w->counts_busy) x->stats->busy += m[EVENT_STARTED] < 0 ? e->finished - e->started
                                                           : device_event_seconds(m[EVENT_STARTED], m[EVENT_FINISHED]);
        double* times[COMM_EVENTS] = { &e->issued, &e->wait_begun, &e->wait_ended, &e->started, &e->finished };
        for (int k = 0; w->observer && k < COMM_EVENTS; k++) if (m[k] >= 0) *times[k] = device_event_time(m[k]);
        if (w->observer) w->observer(w->observer_self, e);
        for (int k = 0; k < COMM_EVENTS; k++) if (m[k] >= 0) device_event_free(m[k]);
    }
    w->num_waited -= n;
    memmove(w->waited, w->waited + n, (size_t)w->num_waited * sizeof(CommWaited));
}

// While the host waits for the device anyway: settles what the device has passed, so that at the end of a step, when
// the device has nothing to do, few operations are left for comm_collect_times. An observer sees all of them there
// (comm_make_room).
static inline void comm_collect_passed(CommContext* w) {
    bool any = w->num_waited > 0 && device_event_passed(w->waited[0].events[EVENT_WAIT_ENDED]);
    if (any && w->observer == NULL) comm_collect_oldest(w, comm_count_passed(w));
}

static inline void comm_collect_times(Comm* c) {
    CommContext* w = c->world;
    if (w->num_waited > 0 && !device_event_passed(w->waited[w->num_waited - 1].events[EVENT_WAIT_ENDED]))
        device_synchronize();
    comm_collect_oldest(w, w->num_waited);
}

// Makes room for one more in the middle of a step, where the device must not run dry: what it has not passed yet stays.
// An observer sees all at comm_collect_times, because run/trace.h first needs the compute into which the waits cut.
static inline void comm_make_room(CommContext* w) {
    if (w->num_waited < w->waited_capacity) return;
    if (w->observer == NULL) comm_collect_oldest(w, comm_count_passed(w));
    if (w->num_waited <= w->waited_capacity / 2) return;
    w->waited_capacity *= 2;
    w->waited = (CommWaited*)xrealloc(w->waited, (size_t)w->waited_capacity * sizeof(CommWaited));
}

static inline void comm_wait(Comm* c, CommOp op) {
    invariant(op >= 0 && op < c->issued, "%s: comm_wait for operation #%lld, but only %lld were issued", c->name, op,
              c->issued);
    CommSlot* s = &c->slots[op % COMM_IN_FLIGHT];
    invariant(s->number == op && s->live, "%s: operation #%lld is waited for a second time", c->name, op);
    s->events[EVENT_WAIT_BEGUN] = device_event();
    if (c->world->strict) comm_begin_messages(c, s);
    if (!s->begun) comm_begin(c, s);
    if (comm_is_alone(c)) sleep_until(s->event.finished); // of a copy over an emulated link
    else if (s->record.communicator[0]) { // else it was skipped
        flight_recorder_wait_begin(c->world->recorder, &s->record);
        c->backend->finish(c, s);
        flight_recorder_wait_end(c->world->recorder);
    }
    // This part is scratch, though only NCCL uses it
    if (c->world->strict && s->on_host && s->kind == COMM_REDUCE_SCATTER)
        comm_set_nan(comm_own_part(c, s), s->n * comm_type_size(s->type), false);
    s->events[EVENT_WAIT_ENDED] = device_event();
    s->live = false;
    CommContext* w = c->world;
    comm_make_room(w);
    CommWaited* x = &w->waited[w->num_waited++];
    x->event = s->event;
    x->stats = &c->stats[s->kind];
    memcpy(x->events, s->events, sizeof x->events);
}

static inline void comm_barrier(Comm* c) {
    device_synchronize(); // a rank is "here" when its earlier work is done
    comm_wait(c, comm_issue(c, COMM_BARRIER, NULL, NULL, 0, COMM_BYTE, -1, 0, false));
}

static inline double comm_host_sum(Comm* c, double x) {
    double* number = c->world->number;
    if (number == NULL) return x; // this rank is alone
    host_to_device(number, &x, sizeof x);
    comm_wait(c, comm_all_reduce(c, number, 1, COMM_F64));
    device_to_host(&x, number, sizeof x);
    return x;
}

static inline void comm_observe(Comm* c, CommObserver observer, void* self) {
    comm_collect_times(c);
    c->world->observer = observer;
    c->world->observer_self = self;
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
