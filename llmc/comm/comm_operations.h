/*
comm_operations.h - an operation from its call to the end of its wait, and strict mode.

An operation occupies a slot of its communicator from its issue to its wait. The backend begins it at the issue, or in
strict mode at the wait. A single rank needs no backend: its operations are copies, which this file makes. comm_notes.h
counts and times all operations.
*/
#ifndef LLMC_COMM_OPERATIONS_H
#define LLMC_COMM_OPERATIONS_H
#include "comm_notes.h"

// ---- buffers ----

// Returns this rank's part of the buffer (N,n) that a reduce-scatter reads or an all-gather writes.
static inline char* comm_own_part(const Comm* c, const CommSlot* s) {
    char* full = s->kind == COMM_REDUCE_SCATTER ? (char*)s->in : (char*)s->out;
    return full + (size_t)c->rank * s->n * comm_type_size(s->type);
}

// Returns where a part of a buffer begins.
static inline char* comm_part(const CommSlot* s, const void* buf, CommPart part) {
    return (char*)buf + part.at * comm_type_size(s->type);
}

// ---- strict mode ----

// Sets p (bytes) to NaN, in every type.
static inline void comm_set_nan(void* p, size_t bytes, bool on_host) {
    char* nan = on_host ? (char*)p : new_array(char, bytes);
    if (on_host) device_synchronize(); // an earlier operation may still write there
    memset(nan, 0xff, bytes);
    if (on_host) return;
    host_to_device(p, nan, bytes);
    device_synchronize(); // the copy reads nan
    free(nan);
}

// Strict mode, at the issue: saves the part of the input that the output overwrites, and makes the output NaN.
static inline void comm_poison(const Comm* c, CommSlot* s) {
    size_t size = comm_type_size(s->type), bytes = s->n * size, output = bytes; // bytes written
    for (int q = 0; s->from && q < c->size; q++)
        if (s->from[q].n > 0) comm_set_nan(comm_part(s, s->out, s->from[q]), s->from[q].n * size, false);
    if (s->from) return;
    if (s->kind == COMM_ALL_GATHER || s->kind == COMM_ALL_TO_ALL) output *= (size_t)c->size;
    if (output == 0 || s->kind == COMM_SEND || s->kind == COMM_BARRIER || s->kind == COMM_SPLIT) return;
    if (s->kind == COMM_ALL_REDUCE || (s->kind == COMM_BROADCAST && s->peer == c->rank)) s->own = (char*)s->out;
    if (s->kind == COMM_REDUCE_SCATTER && s->out == comm_own_part(c, s)) s->own = (char*)s->out;
    if (s->kind == COMM_ALL_GATHER && s->in == comm_own_part(c, s)) s->own = (char*)s->in;
    if (s->own) {
        s->kept = new_array(char, bytes);
        device_to_host(s->kept, s->own, bytes);
    }
    comm_set_nan(s->out, output, s->on_host && s->kind == COMM_REDUCE_SCATTER);
    // layers may still read the shard
    if (s->own && s->kind == COMM_ALL_GATHER) host_to_device(s->own, s->kept, bytes);
}

// ---- issuing ----

// The backend of a communicator with one rank, where every operation is a copy.
static inline void comm_alone_start(Comm* c, CommSlot* s) {
    size_t size = comm_type_size(s->type), bytes = s->n * size;
    flight_recorder_start(c->world->recorder, &s->record);
    s->event.started = now_seconds();
    if (s->to) device_copy(comm_part(s, s->out, *s->from), comm_part(s, s->in, *s->to), s->to->n * size);
    else if (s->on_host && s->kind == COMM_ALL_GATHER) host_to_device(s->out, s->in, bytes);
    else if (s->on_host) device_to_host(s->out, s->in, bytes);
    else if (s->in && s->out && s->in != s->out) device_copy(s->out, s->in, bytes);
    s->event.finished = now_seconds();
    if (s->on_host)
        s->event.finished = fmax(s->event.finished, device_link_until(s->kind == COMM_ALL_GATHER, bytes));
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

// Returns a slot for the next operation. peer is the other end or the root, a rank of c, or -1 if there is none. color
// belongs to a split. on_host: the shard is in host memory.
static inline CommSlot* comm_slot_take(Comm* c, CommKind kind, void* out, const void* in, size_t n, CommType t,
                                       int peer, int color, bool on_host) {
    CommSlot* s = &c->slots[c->issued % COMM_IN_FLIGHT];
    invariant(!s->live, "%s: %d operations are under way; %s, #%lld, was never waited for", c->name, COMM_IN_FLIGHT,
              comm_kind_names[s->kind], s->number);
    memset(s, 0, sizeof *s);
    s->kind = kind; s->type = t; s->n = n; s->peer = peer; s->color = color; s->out = out; s->in = in;
    s->on_host = on_host;
    return s;
}
static inline CommOp comm_slot_issue(Comm* c, CommSlot* s) {
    s->number = c->issued++;
    s->live = true;
    if (!comm_note_issue(c, s)) s->begun = true; // left out
    else if (c->world->strict) comm_poison(c, s); // it begins at its wait
    else comm_begin(c, s);
    return s->number;
}
static inline CommOp comm_issue(Comm* c, CommKind kind, void* out, const void* in, size_t n, CommType t, int peer,
                                int color, bool on_host) {
    return comm_slot_issue(c, comm_slot_take(c, kind, out, in, n, t, peer, color, on_host));
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
// Dies if this part of out overlaps a part of in, or the part of out of a rank before q.
static inline void comm_require_apart(const Comm* c, const CommSlot* s, int q) {
    const CommPart mine = s->from[q];
    uintptr_t size = comm_type_size(s->type), a = (uintptr_t)comm_part(s, s->out, mine), end = a + mine.n * size;
    for (int i = 0; i < c->size; i++)
        for (int reads = i >= q; reads < 2; reads++) {
            CommPart other = reads ? s->to[i] : s->from[i];
            uintptr_t b = (uintptr_t)comm_part(s, reads ? s->in : s->out, other);
            bool apart = mine.n == 0 || other.n == 0 || end <= b || b + other.n * size <= a;
            invariant(apart, "%s: in an all-to-all-v the part from rank %d (%zu %s) overlaps the part %s rank %d: give"
                      " it a place of its own", c->name, q, mine.n, comm_type_name(s->type), reads ? "to" : "from", i);
        }
}
static inline CommOp comm_all_to_all_v(Comm* c, void* out, const CommPart* from, const void* in, const CommPart* to,
                                       CommType t) {
    CommSlot* s = comm_slot_take(c, COMM_ALL_TO_ALL_V, out, in, 0, t, -1, 0, false);
    s->from = from;
    s->to = to;
    invariant(from[c->rank].n == to[c->rank].n, "%s: rank %d expects %zu %s of an all-to-all-v from itself and sends"
              " itself %zu", c->name, c->rank, from[c->rank].n, comm_type_name(t), to[c->rank].n);
    for (int q = 0; q < c->size; q++) {
        comm_require_apart(c, s, q);
        if (q != c->rank) s->n += to[q].n;
    }
    return comm_slot_issue(c, s);
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

// Strict mode: begins the operations that must run before the host may wait for `awaited`. These are all sends, because
// two ranks that exchange messages and wait for their receives first would otherwise wait forever, and earlier receives
// from the same rank, because messages do not overtake one another.
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

static inline void comm_wait(Comm* c, CommOp op) {
    invariant(op >= 0 && op < c->issued, "%s: comm_wait for operation #%lld, but only %lld were issued", c->name, op,
              c->issued);
    CommSlot* s = &c->slots[op % COMM_IN_FLIGHT];
    invariant(s->number == op && s->live, "%s: operation #%lld is waited for a second time", c->name, op);
    s->events[EVENT_WAIT_BEGUN] = device_event();
    if (c->world->strict) comm_begin_messages(c, s);
    if (!s->begun) comm_begin(c, s);
    if (comm_is_alone(c)) sleep_until(s->event.finished); // until a copy over an emulated link ends
    else if (comm_was_noted(s)) { // otherwise it was skipped
        flight_recorder_wait_begin(c->world->recorder, &s->record);
        c->backend->finish(c, s);
        flight_recorder_wait_end(c->world->recorder);
    }
    // this part is scratch, although only NCCL uses it
    if (c->world->strict && s->on_host && s->kind == COMM_REDUCE_SCATTER)
        comm_set_nan(comm_own_part(c, s), s->n * comm_type_size(s->type), false);
    comm_note_wait(c, s);
    s->live = false;
}

static inline void comm_barrier(Comm* c) {
    device_synchronize(); // a rank arrives when its earlier work is done
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

#endif
