/*
ranks_trace.h - what several ranks add to the timeline (trace.h): their communication, and where compute stood still for
it.

An arrow goes from the moment at which an operation was issued to the operation. An operation also says which function
issued it, how long compute waited for it, and which units' parameters or gradients it moves, where the pieces of this
rank tell that. The rank's part ends with how long its steps took (run/diagnosis.h), so that build/overlap finds the
same figures that the run itself prints.

Global state: `trace_memories`, beside trace.h's.
*/
#ifndef LLMC_RANKS_TRACE_H
#define LLMC_RANKS_TRACE_H
#include "../comm/comm.h"
#include "../model/param_range.h"
#include "trace.h"
#include <limits.h>

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
    const char* caller = e->caller ? e->caller : "";
    s->more = format_string(",\"ranks\":%d,\"waited\":%.3f%s%s%s%s", e->ranks, 1e6 * (e->wait_ended - e->wait_begun),
                            e->caller ? ",\"caller\":\"" : "", caller, e->caller ? "\"" : "", units);
}
#endif
