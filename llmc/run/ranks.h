/*
ranks.h - everything that a program of several ranks needs besides its model: the ranks, their communicator and
watchdog, checks that they agree, faults on purpose, and the cost of communication per step, also on the timeline.

The timeline (trace.h) gets an arrow from the moment at which an operation was issued to the operation. An operation
also says which functions issued it (base/callers.h), how long compute waited for it, and which units' parameters or
gradients it moves, where the pieces of this rank tell that. The rank's part ends with how long its steps took
(diagnosis.h), so that build/overlap finds the same figures that the run itself prints.

Global state: `trace_memories`, in addition to trace.h's.
*/
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H
#include "../comm/comm.h"
#include "../model/param_range.h"
#include "../watch/fault.h"
#include "consistency.h"
#include "logger.h"
#include "report.h"
#include "trace.h"
#include <limits.h>

// ---- the timeline ----
typedef struct { const char* begin; size_t bytes; int unit; } TraceMemory;
typedef struct { TraceMemory* list; int n; } TraceMemories; // where units' parameters and gradients lie; list (n) owned
static TraceMemories trace_memories;

// Compute stood still from begin to end: cuts this time out of the step's compute.
static inline void trace_wait(const char* name, double begin, double end) {
    size_t before = trace.count;
    for (size_t i = trace.step_begin; i < before; i++) {
        TraceSlice cut = trace.slices[i]; // adding slices may move the others
        double from = begin > cut.begin ? begin : cut.begin, to = end < cut.end ? end : cut.end;
        if (cut.track != TRACK_COMPUTE || from >= to) continue;
        TraceSlice* wait = trace_add(TRACK_COMPUTE, from, to);
        if (wait == NULL) return;
        snprintf(wait->name, sizeof wait->name, "wait for %.38s", name);
        trace.slices[i].end = from;
        TraceSlice* rest = trace_add(TRACK_COMPUTE, to, cut.end);
        if (rest != NULL) memcpy(rest->name, cut.name, sizeof cut.name);
    }
}

// Remembers where these units' parameters and gradients lie. path: of --trace.
static inline void trace_ranges(const char* path, const ParamRange* ranges, int num_ranges) {
    if (path[0] == '\0' || num_ranges == 0) return;
    TraceMemories* t = &trace_memories;
    t->list = (TraceMemory*)xrealloc(t->list, (size_t)(t->n + 3 * num_ranges) * sizeof(TraceMemory));
    for (int i = 0; i < num_ranges; i++) {
        const ParamRange* p = &ranges[i];
        const void* const begins[] = { p->params, p->grads, p->master };
        const size_t sizes[] = { sizeof(floatX), sizeof(floatX), sizeof(float) };
        for (int k = 0; k < 3; k++) {
            TraceMemory m = { (const char*)begins[k], p->n * sizes[k], p->unit };
            if (m.begin) t->list[t->n++] = m;
        }
    }
}
// The first and the last unit that data (bytes) belongs to, as JSON after a comma, in out (size);
// "": none that this rank knows.
static inline void trace_units(const void* data, size_t bytes, char* out, size_t size) {
    int first = INT_MAX, last = -1;
    for (int i = 0; i < trace_memories.n && data; i++) {
        const TraceMemory* m = &trace_memories.list[i];
        if (m->begin >= (const char*)data + bytes || m->begin + m->bytes <= (const char*)data) continue;
        if (m->unit < first) first = m->unit;
        if (m->unit > last) last = m->unit;
    }
    out[0] = '\0';
    if (last >= 0) snprintf(out, size, ",\"units\":[%d,%d]", first, last);
}

// An operation that has been waited for, under this name.
static inline void trace_operation(const char* name, const CommEvent* e) {
    if (trace.path == NULL || e->finished <= trace.zero) return;
    trace_wait(name, e->wait_begun, e->wait_ended);
    TraceSlice* s = trace_add(TRACK_COMMUNICATION, fmax(e->started, trace.zero), e->finished);
    if (s == NULL) return;
    char units[48];
    trace_units(e->data, e->bytes, units, sizeof units);
    snprintf(s->name, sizeof s->name, "%s", name);
    s->issued = fmax(e->issued, trace.zero);
    s->more = format_string(",\"ranks\":%d,\"waited\":%.3f%s", e->ranks, 1e6 * (e->wait_ended - e->wait_begun), units);
    s->callers = memcpy(xcalloc(1, sizeof e->callers), &e->callers, sizeof e->callers);
}

// Adds to an operation's slice the program's function that called it, and the whole stack.
static inline void trace_name_slice(TraceSlice* s, const CallerNames* names) {
    enum { MOST = 24 };
    Caller stack[MOST];
    int n = callers_stack(names, (const Callers*)s->callers, stack, MOST), first = 0;
    if (n == 0) return;
    while (first + 1 < n && stack[first].in_header) first++; // functions of llmc/ that the program's function calls
    char* more;
    size_t length;
    FILE* text = open_memstream(&more, &length);
    fprintf(text, "%s,\"caller\":\"%s\",\"stack\":\"", s->more, stack[first].function);
    for (int i = 0; i < n; i++)
        fprintf(text, "%s%s %s:%d", i ? " < " : "", stack[i].function, stack[i].file, stack[i].line);
    fprintf(text, "\"");
    fclose(text);
    free(s->more);
    s->more = more;
}
// The same for all operations of the timeline.
static inline void trace_name_callers(void) {
    CallerNames names = { NULL, NULL, 0 };
    for (size_t i = 0; i < trace.count; i++)
        if (trace.slices[i].callers) caller_names_add(&names, (const Callers*)trace.slices[i].callers);
    if (!caller_names_read(&names))
        printf("trace      does not name the callers of operations, because addr2line (binutils) is missing\n");
    for (size_t i = 0; i < trace.count; i++)
        if (trace.slices[i].callers) trace_name_slice(&trace.slices[i], &names);
    caller_names_free(&names);
}

// Bytes that this rank was predicted to send per step, and those of the steps that sent least and most.
typedef struct { double predicted, min, max; } SentBytes;
// The same by some of its communicators: those along an axis of a mesh, or between nodes.
typedef struct {
    const char* name;                 // of the axis
    const Comm* comms[2];             // views; NULL: there is no second
    double before;                    // sent before the step at hand
    SentBytes sent;
} SentAlong;
#define MAX_SENT_ALONG 3

typedef struct {
    CommOptions options;
    const char* fault_text;           // --fault
    long long check_every;            // --check-every
    Comm comm;                        // of all ranks
    Control control;                  // this rank's watchdog
    Fault fault;
    // of the step at hand, or the last one
    double bytes_before;              // sent by this rank before it, by the formulas of comm/comm_api.h
    double exposed_before;            // seconds
    double bytes, exposed;            // in it
    // of all steps
    long long steps;
    double otherwise;                 // bytes that the step at hand should send beyond what was predicted for all;
                                      // set by the program
    SentBytes sent;                   // in a step, less these
    SentAlong along[MAX_SENT_ALONG];  // parts of the traffic that a mesh or ZeRO++ counts separately
    int num_along;
    double exposed_total, seconds_total;
    bool has_last_work;               // the program has said when this rank's part of the step at hand is over:
    int last_work;                    // a mark, passed then
    const char* single_text;          // --single-throughput
    char artificial[160];             // what makes the times others than those of this machine; "": nothing
    bool sleeps;                      // instead of computing
} Ranks;

// Says at the end that the times are not those of this machine, and why.
static inline void ranks_are_artificial(Ranks* w, const char* why) {
    size_t n = strlen(w->artificial);
    snprintf(w->artificial + n, sizeof w->artificial - n, " %s;", why);
}

static inline void options_all_ranks(OptionTable* t, Ranks* w) {
    options_comm(t, &w->options);
    w->fault_text = w->single_text = "";
    options_group(t, "ranks");
    option_int(t, "check-every", &w->check_every, 0, 1e9,
               "steps between comparisons of the state that must be equal on all ranks; 0: never");
    option_text(t, "fault", &w->fault_text, "RANK:STEP:FAULT",
                "for tests, what that rank does at that step: kill, hang, skip (leave out an operation), bitflip (flip "
                "a bit) or slow (lose 50 ms in this and every later step); in a pipeline, RANK:STEP/MICRO:kill or hang "
                "names a micro-batch");
    option_text(t, "single-throughput", &w->single_text, "X|FILE",
                "speed of this model on one rank, in tokens per second or"
                " as the metrics.jsonl of that run; a run on N ranks then reports at its end how well it scales");
    options_group(t, NULL);
}

// The ranks find one another, by --comm's options and these of all programs. Collective.
static inline void ranks_meet(Ranks* w, const Options* o, RankInfo ranks) {
    w->options.ordered = o->deterministic;
    w->options.out = o->out;
    comm_init(&w->comm, &w->options, ranks, &w->control);
    w->comm.world->notes.counts_busy = ranks.size > 1; // for the diagnosis at the end
    if (w->options.link > 0) ranks_are_artificial(w, "EMULATED LINK (--emulate-link)");
}

// Puts an operation that has been waited for onto the timeline.
static inline void ranks_trace_operation(void* self, const CommEvent* e) {
    char name[64], group[32] = "";
    (void)self;
    if (strcmp(e->communicator, "world") != 0) snprintf(group, sizeof group, " of %s", e->communicator);
    snprintf(name, sizeof name, "%s #%lld%s (%zu %s)", comm_kind_names[e->kind], e->number, group, e->n,
             comm_type_name(e->type));
    trace_operation(name, e);
}
static inline void ranks_settle(void* self) { comm_collect_times(&((Ranks*)self)->comm); }
// Begins a timeline of all ranks, if path is not "".
static inline void ranks_trace(Ranks* w, const char* path) {
    comm_barrier(&w->comm); // time 0 for all
    trace_open(path, w->comm.rank);
    if (path[0] == '\0') return;
    comm_observe(&w->comm, ranks_trace_operation, NULL);
    trace.collect = ranks_settle;
    trace.collect_self = w;
    trace.name_callers = trace_name_callers;
}

typedef struct { DeviceId place; size_t needed, free; bool fits; } MemoryLeft; // place: a device or a machine
// Returns true, on all ranks, if what they need fits, also in places that they share. Collective.
static inline bool ranks_all_fit(Ranks* w, const MemoryLeft* mine) {
    bool all_fit = true;
    MemoryLeft* all = (MemoryLeft*)control_all_gather(&w->control, mine, sizeof *mine);
    for (int i = 0; i < w->comm.size; i++) {
        size_t needed = 0;
        for (int k = 0; k < w->comm.size; k++)
            if (memcmp(&all[i].place, &all[k].place, sizeof all[i].place) == 0) needed += all[k].needed;
        all_fit = all_fit && all[i].fits && needed <= all[i].free;
    }
    free(all);
    return all_fit;
}
// Returns true, on all ranks, if the predicted bytes fit on every device, shared ones included. A rank that alone
// recomputed what the others keep would make them wait. Collective.
static inline bool ranks_memory_fits(Ranks* w, const size_t predicted[MEMORY_KINDS]) {
    MemoryLeft mine;
    memset(&mine, 0, sizeof mine); // its padding is also sent
    mine.place = device_id();
    mine.needed = memory_missing(predicted);
    mine.free = device_memory_free();
    mine.fits = memory_fits(predicted);
    return ranks_all_fit(w, &mine);
}
// The same for the hosts.
static inline bool ranks_host_memory_fits(Ranks* w, const size_t predicted[MEMORY_KINDS]) {
    MemoryLeft mine;
    memset(&mine, 0, sizeof mine);
    mine.place = host_id();
    mine.needed = host_memory_missing(predicted);
    mine.free = host_memory_free();
    mine.fits = true;
    return ranks_all_fit(w, &mine);
}

// ---- the cost of a step ----
// From now on counts what this rank sends by a, and by b if it is not NULL, under this name.
static inline void ranks_count_along(Ranks* w, const char* name, const Comm* a, const Comm* b, double predicted) {
    SentAlong s = { name, { a, b }, 0, { predicted, 0, 0 } };
    w->along[w->num_along++] = s;
}
// Returns the bytes that this rank has sent so far. (If one axis has all ranks, the other axes have one rank each.)
static inline double sent_along(const SentAlong* s) {
    double sent = 0;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < COMM_KINDS && s->comms[i] && s->comms[i]->size > 1; k++)
            sent += comm_bytes_sent(s->comms[i], (CommKind)k);
    return sent;
}
// Before step `step`, counted from 1, and after it. state: device memory in whose first byte --fault bitflip flips a
// bit.
static inline void ranks_count_begin(Ranks* w, long long step, void* state) {
    comm_step(&w->comm, step);
    fault_strike(&w->fault, w->comm.rank, step);
    if (fault_now(&w->fault, w->comm.rank, step, FAULT_SKIP)) w->comm.world->notes.skips = true;
    if (fault_now(&w->fault, w->comm.rank, step, FAULT_BITFLIP)) {
        unsigned char byte;
        device_to_host(&byte, state, 1);
        byte ^= 16; // not the last bit of a number, which an update may round away
        host_to_device(state, &byte, 1);
        device_synchronize(); // the copy reads byte
    }
    comm_collect_times(&w->comm); // earlier operations are not a cost of this step
    w->bytes_before = comm_rank_bytes(&w->comm);
    w->exposed_before = comm_rank_exposed(&w->comm);
    for (int i = 0; i < w->num_along; i++) w->along[i].before = sent_along(&w->along[i]);
}
// The last of `steps` steps sent this.
static inline void sent_note(SentBytes* s, double sent, long long steps) {
    if (steps == 1 || sent < s->min) s->min = sent;
    if (steps == 1 || sent > s->max) s->max = sent;
}
static inline void ranks_count_end(Ranks* w, double seconds) {
    comm_collect_times(&w->comm);
    w->bytes = comm_rank_bytes(&w->comm) - w->bytes_before;
    w->exposed = comm_rank_exposed(&w->comm) - w->exposed_before;
    w->steps++;
    sent_note(&w->sent, w->bytes - w->otherwise, w->steps);
    for (SentAlong* s = w->along; s < w->along + w->num_along; s++)
        sent_note(&s->sent, sent_along(s) - s->before, w->steps);
    w->exposed_total += w->exposed;
    w->seconds_total += seconds;
}

// ---- checks between ranks ----
// Dies on every rank if a message was sent and not received. Nothing is asked where ranks exchange none. Collective.
static inline void ranks_check_messages(Ranks* w, long long step) {
    bool exchanged = false;
    for (int i = 0; i < w->comm.world->num_comms; i++) exchanged = exchanged || w->comm.world->comms[i]->pairs;
    if (exchanged && w->comm.size > 1) require_same_messages(&w->control, step);
}

// ---- reports ----
// Two amounts of bytes as text: "8.9 MB", or "8.9 MB to 16.8 MB" if the texts differ. The text lives in out (size).
static inline const char* format_bytes_range(char* out, size_t size, double min, double max) {
    char a[32], b[32];
    format_bytes(a, sizeof a, min);
    format_bytes(b, sizeof b, max);
    bool differ = strcmp(a, b) != 0;
    snprintf(out, size, "%s%s%s", a, differ ? " to " : "", differ ? b : "");
    return out;
}

typedef struct { double min, max; } RankRange;            // bytes of the rank with the fewest,
                                                          // and of the rank with the most
typedef struct { RankRange memory, sent; } RankCosts;     // on the device; per step

// Returns the bytes that ranks will take and send, from the predictions of all of them. Collective.
static inline RankCosts ranks_costs(Ranks* w, const size_t predicted[MEMORY_KINDS], double sent) {
    double mine[2] = { (double)memory_sum(predicted), sent };
    double* all = (double*)control_all_gather(&w->control, mine, sizeof mine);
    RankCosts costs = { { all[0], all[0] }, { all[1], all[1] } };
    for (int q = 1; q < w->comm.size; q++) {
        costs.memory.min = fmin(costs.memory.min, all[2 * q]);
        costs.memory.max = fmax(costs.memory.max, all[2 * q]);
        costs.sent.min = fmin(costs.sent.min, all[2 * q + 1]);
        costs.sent.max = fmax(costs.sent.max, all[2 * q + 1]);
    }
    free(all);
    return costs;
}

// Prints how many ranks there are, how they communicate, and how many bytes each will send per step.
static inline void report_ranks(const Ranks* w, RankRange bytes) {
    char sent[80];
    const RankInfo* r = &w->control.ranks;
    if (r->size == 1) printf("ranks      1, %s\n", r->found);
    else
        printf("ranks      %d, %d on this machine, found by %s; %s%s; %s sent per rank and step\n", r->size,
               r->local_size, r->found, comm_description(&w->comm), w->comm.world->strict ? " (STRICT MODE)" : "",
               format_bytes_range(sent, sizeof sent, bytes.min, bytes.max));
    if (r->size > 1 && w->options.link > 0)
        printf("EMULATED LINK OF %g GBIT/S (--emulate-link): A RANK'S MESSAGES TAKE AT LEAST %.1f MS PER STEP\n",
               w->options.link, 8e-6 * bytes.max / w->options.link);
    fflush(stdout);
}

// Returns one of these memories (N) that is not as predicted. If all are as predicted: the memory of rank 0,
// or if ranks differ, of the rank that takes most.
static inline RankMemory memory_choose(const RankMemory* all, int N) {
    RankMemory chosen = all[0];
    char first[32], other[32];
    bool differ = false;
    format_bytes(first, sizeof first, (double)memory_sum(chosen.predicted));
    for (int q = 1; q < N; q++)
        differ = differ || strcmp(first, format_bytes(other, sizeof other, (double)memory_sum(all[q].predicted))) != 0;
    for (int q = 1; q < N && memory_as_predicted(&chosen); q++) {
        bool more = differ && memory_sum(all[q].predicted) > memory_sum(chosen.predicted);
        if (!memory_as_predicted(&all[q]) || more) chosen = all[q];
    }
    chosen.named = differ || (N > 1 && !memory_as_predicted(&chosen));
    return chosen;
}
// Prints the memory of a rank next to the prediction.
// Returns true if every rank's memory is as that rank predicted. Collective.
static inline bool report_memory(Ranks* w, const size_t predicted[MEMORY_KINDS]) {
    RankMemory m = rank_memory(w->control.ranks.rank, predicted);
    RankMemory* all = (RankMemory*)control_gather_array(&w->control, &m, sizeof m);
    if (all) m = memory_choose(all, w->comm.size);
    free(all);
    control_share(&w->control, &m, sizeof m);
    return report_rank_memory(&m);
}

static inline bool sent_as_predicted(SentBytes s) {
    return fabs(s.min - s.predicted) < 0.5 && fabs(s.max - s.predicted) < 0.5; // an all-reduce may end in thirds
}
static inline void report_sent_row(const char* name, SentBytes s) {
    double sent = fabs(s.max - s.predicted) < 0.5 ? s.min : s.max; // in a step that was not as predicted, if any
    report_row(name, (size_t)llround(s.predicted), (size_t)llround(sent));
}

// Prints the bytes that N ranks sent per step next to the prediction. Ranks may send different amounts: it shows a rank
// that did not send as predicted, or the rank that sends most. Returns true if every rank sent as predicted in every
// step.
static inline bool report_sent_by(const SentBytes* all, int N) {
    char what[48] = "sent per rank and step", first[32], other[32];
    int chosen = 0;
    bool differ = false;
    format_bytes(first, sizeof first, all[0].predicted);
    for (int q = 1; q < N; q++) {
        differ = differ || strcmp(first, format_bytes(other, sizeof other, all[q].predicted)) != 0;
        bool more = all[q].max > all[chosen].max;
        if (sent_as_predicted(all[chosen]) && (!sent_as_predicted(all[q]) || more)) chosen = q;
    }
    SentBytes s = all[chosen];
    if (differ || (N > 1 && !sent_as_predicted(s)))
        snprintf(what, sizeof what, "sent a step by rank %d%s", chosen, sent_as_predicted(s) ? ", most" : "");
    report_header(what);
    report_sent_row("bytes", s);
    return sent_as_predicted(s);
}
// Collective.
static inline bool report_sent(Ranks* w, double predicted) {
    if (w->steps == 0) return true;
    SentBytes s = { predicted, w->sent.min, w->sent.max };
    SentBytes* all = (SentBytes*)control_all_gather(&w->control, &s, sizeof s);
    bool as_predicted = report_sent_by(all, w->comm.size);
    free(all);
    return as_predicted;
}

// The rows of the axes of a mesh, of this rank. Returns true if every step was as predicted.
static inline bool report_sent_along(const Ranks* w) {
    bool as_predicted = true;
    for (int i = 0; i < w->num_along && w->steps > 0; i++) {
        const SentAlong* a = &w->along[i];
        char name[32];
        snprintf(name, sizeof name, "bytes along %s", a->name);
        if (a->sent.predicted > 0 || a->sent.max > 0) report_sent_row(name, a->sent);
        as_predicted &= sent_as_predicted(a->sent);
    }
    return as_predicted;
}
#endif
