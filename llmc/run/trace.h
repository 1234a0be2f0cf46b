/*
trace.h - the timeline of a run: --trace FILE writes it as Chrome's JSON, for https://ui.perfetto.dev or chrome://tracing.

Each rank is a process there, with two tracks: what it computes, and its communication. An arrow goes from the moment at
which an operation was issued to the operation. build/overlap reads the same file and says in a terminal how much of the
communication was hidden.

Compute is marked where it begins, by trace_compute in the stage files: a slice ends where the next one begins, and is cut where
compute stood still for communication. On a GPU marks are events on the stream: they say when the GPU reached the work, not when
the host issued it.

An operation also says which function issued it, how long compute waited for it, and which units' parameters or gradients it moves,
where the ranges of this rank tell that. The rank's part ends with what it has noted of its steps (run/diagnosis.h), so that
build/overlap finds the causes that the run itself prints.

The same marks are ranges for a profiler (NVTX), with or without --trace.

Global state: `trace`, so that the lines in the stage files stay short. Without --trace they only make those ranges.
*/
#ifndef LLMC_TRACE_H
#define LLMC_TRACE_H
#include "../base/common.h"
#include "../device/device.h"
#include "../base/folder.h"
#include "../comm/comm.h"
#include "../model/param_range.h"

#define TRACE_MOST 2000000 // slices of a rank; viewers cannot open a larger trace
enum { TRACK_COMPUTE, TRACK_COMMUNICATION };
typedef struct {
    char name[64];
    int track;
    double begin, end;    // seconds of now_seconds()
    double issued;        // of an operation; 0: none
    double waited;        // seconds that compute stood still for it
    const char* caller;   // NULL: not known
    int first, last;      // units; NO_UNITS: it moves no parameters or gradients that this rank knows
    int ranks;            // that take part
    bool outside;         // waited for before a step or after the last, as those of an evaluation
    long long step;       // set when it is over
} TraceSlice;
enum { NO_UNITS = -1 };
typedef struct { const char* begin; size_t bytes; int unit; } TraceMemory;
typedef struct { const char* what; int index, mark; char task[16]; } TraceMark; // mark: device_event()'s

static struct {
    char* path;           // of this rank's part, owned; NULL: there is no trace
    char task[16];        // "F3": what is computed belongs to it; "": to nothing in particular
    int rank;
    double zero;          // now_seconds() when the ranks met: the same moment for all
    TraceMark* marks;     // (num_marks) of the step at hand, owned
    int num_marks, marks_capacity;
    void (*collect)(void* self); // adds the communication of the step at hand; NULL: there is none
    void* collect_self;
    TraceSlice* slices;   // (count) owned
    long long step;       // that is over
    size_t count, capacity, step_begin; // step_begin: the first slice of the step at hand
    long long full;       // the step in which there was no more room; 0: there is
    TraceMemory* memory;  // (num_memory) where units' parameters and gradients lie, owned
    int num_memory;
    char* notes;          // lines for the end of this rank's part, owned; NULL: none
} trace;

// Returns the file of one rank's part, until trace_merge.
static inline char* trace_part(const char* path, int rank) { return format_string("%s.rank%d", path, rank); }

// Begins a trace, if path is not "". The ranks must have met just before.
static inline void trace_open(const char* path, int rank) {
    if (path[0] == '\0') return;
    trace.path = trace_part(path, rank);
    trace.rank = rank;
    trace.zero = now_seconds();
    FILE* f = fopen(trace.path, "w"); // better now than after the training
    require(f != NULL, "--trace %s: cannot be opened for writing: %s", path, strerror(errno));
    fclose(f);
}

static inline TraceSlice* trace_add(int track, double begin, double end) {
    if (trace.count == TRACE_MOST && trace.full == 0) trace.full = trace.step + 1;
    if (trace.count == TRACE_MOST) return NULL;
    if (trace.count == trace.capacity) {
        trace.capacity = trace.capacity ? 2 * trace.capacity : 4096;
        trace.slices = (TraceSlice*)xrealloc(trace.slices, trace.capacity * sizeof(TraceSlice));
    }
    TraceSlice* s = &trace.slices[trace.count++];
    memset(s, 0, sizeof *s);
    s->track = track;
    s->first = s->last = NO_UNITS;
    s->begin = begin;
    s->end = end;
    return s;
}

// What is computed from here on belongs to this, and its slices say so: "F3". "": to nothing in particular.
static inline void trace_task(const char* task) { snprintf(trace.task, sizeof trace.task, "%.15s", task); }

// What is computed from here on: "backward, block" 3. index -1: the name has no number. NULL: nothing is computed.
static inline void trace_compute(const char* what, int index) {
    device_range(what);
    if (trace.path == NULL) return;
    if (trace.num_marks == trace.marks_capacity) {
        trace.marks_capacity = trace.marks_capacity ? 2 * trace.marks_capacity : 256;
        trace.marks = (TraceMark*)xrealloc(trace.marks, (size_t)trace.marks_capacity * sizeof(TraceMark));
    }
    TraceMark m = { what, index, device_event(), "" };
    memcpy(m.task, trace.task, sizeof m.task);
    trace.marks[trace.num_marks++] = m;
}

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

// Gives `step` the operations that were waited for, and all slices that belong to no step yet.
static inline void trace_collect(long long step) {
    if (trace.collect) trace.collect(trace.collect_self);
    for (size_t i = trace.step_begin; i < trace.count; i++) trace.slices[i].step = step;
    trace.step_begin = trace.count;
    trace.step = step;
}
// What was waited for since the last step is not part of the one that begins, or there is none.
static inline void trace_leave_out(void) {
    for (size_t i = trace.step_begin; i < trace.count; i++) trace.slices[i].outside = true;
}

// After a step: waits until the device has done all of it, then turns its marks into slices.
static inline void trace_step(long long step) {
    trace_compute(NULL, -1);
    if (trace.path == NULL) return;
    device_synchronize();
    for (int i = 0; i + 1 < trace.num_marks; i++) {
        TraceMark* m = &trace.marks[i];
        if (m->what == NULL) continue;
        TraceSlice* s = trace_add(TRACK_COMPUTE, device_event_time(m->mark), device_event_time(m[1].mark));
        if (s == NULL) continue;
        int n = m->task[0] ? snprintf(s->name, sizeof s->name, "%s ", m->task) : 0;
        if (m->index < 0) snprintf(s->name + n, sizeof s->name - (size_t)n, "%s", m->what);
        else snprintf(s->name + n, sizeof s->name - (size_t)n, "%s %d", m->what, m->index);
    }
    for (int i = 0; i < trace.num_marks; i++) device_event_free(trace.marks[i].mark);
    trace.num_marks = 0;
    trace_collect(step);
}

// Remembers where these units' parameters and gradients lie. path: of --trace.
static inline void trace_ranges(const char* path, const ParamRange* ranges, int num_ranges) {
    if (path[0] == '\0' || num_ranges == 0) return;
    trace.memory = (TraceMemory*)xrealloc(trace.memory, (size_t)(trace.num_memory + 3 * num_ranges) * sizeof(TraceMemory));
    for (int i = 0; i < num_ranges; i++) {
        const ParamRange* p = &ranges[i];
        const void* const begins[] = { p->params, p->grads, p->master };
        const size_t sizes[] = { sizeof(floatX), sizeof(floatX), sizeof(float) };
        for (int k = 0; k < 3; k++) {
            TraceMemory m = { (const char*)begins[k], p->n * sizes[k], p->unit };
            if (m.begin) trace.memory[trace.num_memory++] = m;
        }
    }
}
// Sets the units that data (bytes) belongs to.
static inline void trace_units(TraceSlice* s, const void* data, size_t bytes) {
    for (int i = 0; i < trace.num_memory && data; i++) {
        const TraceMemory* m = &trace.memory[i];
        if (m->begin >= (const char*)data + bytes || m->begin + m->bytes <= (const char*)data) continue;
        if (s->first == NO_UNITS || m->unit < s->first) s->first = m->unit;
        if (m->unit > s->last) s->last = m->unit;
    }
}

// An operation that has been waited for, under this name.
static inline void trace_operation(const char* name, const CommEvent* e) {
    if (trace.path == NULL || e->finished <= trace.zero) return;
    trace_wait(name, e->wait_begun, e->wait_ended);
    TraceSlice* s = trace_add(TRACK_COMMUNICATION, fmax(e->started, trace.zero), e->finished);
    if (s == NULL) return;
    snprintf(s->name, sizeof s->name, "%s", name);
    s->issued = fmax(e->issued, trace.zero);
    s->waited = e->wait_ended - e->wait_begun;
    s->caller = e->caller;
    s->ranks = e->ranks;
    trace_units(s, e->data, e->bytes);
}

// Adds a line of JSON to the end of this rank's part.
PRINTF_LIKE(1, 2)
static inline void trace_note(const char* format, ...) {
    char line[256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    size_t had = trace.notes ? strlen(trace.notes) : 0;
    trace.notes = (char*)xrealloc(trace.notes, had + strlen(line) + 1);
    strcpy(trace.notes + had, line);
}
// ---- the file ----
static inline void trace_write_slice(FILE* f, const TraceSlice* s, size_t id) {
    double ts = 1e6 * (s->begin - trace.zero), dur = 1e6 * (s->end - s->begin);
    fprintf(f, "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"step\":%lld",
            s->name, trace.rank, s->track, ts, dur, s->step);
    if (s->track == TRACK_COMMUNICATION) fprintf(f, ",\"ranks\":%d,\"waited\":%.3f", s->ranks, 1e6 * s->waited);
    if (s->caller) fprintf(f, ",\"caller\":\"%s\"", s->caller);
    if (s->first != NO_UNITS) fprintf(f, ",\"units\":[%d,%d]", s->first, s->last);
    fprintf(f, "%s}},\n", s->outside ? ",\"outside\":true" : "");
    if (s->issued == 0) return;
    const char* flow = "{\"name\":\"issued\",\"cat\":\"issued\",\"ph\":\"%s\",\"id\":\"%d.%zu\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f%s},\n";
    fprintf(f, flow, "s", trace.rank, id, trace.rank, TRACK_COMPUTE, 1e6 * (s->issued - trace.zero), "");
    fprintf(f, flow, "f", trace.rank, id, trace.rank, TRACK_COMMUNICATION, ts, ",\"bp\":\"e\"");
}

// Writes this rank's part: lines of JSON, each with a comma at its end.
static inline void trace_close(void) {
    static const char* const tracks[] = { "compute", "communication" };
    if (trace.path == NULL) return;
    size_t steps_end = trace.step_begin;
    if (steps_end > 0) trace_collect(trace.slices[steps_end - 1].step); // what the last step left under way
    for (size_t i = steps_end; i < trace.count; i++) trace.slices[i].outside = true;
    FILE* f = fopen(trace.path, "w");
    require(f != NULL, "%s: cannot be opened for writing: %s", trace.path, strerror(errno));
    fprintf(f, "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}},\n", trace.rank, trace.rank);
    for (int t = 0; t < 2; t++)
        fprintf(f, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n", trace.rank, t, tracks[t]);
    for (size_t i = 0; i < trace.count; i++) trace_write_slice(f, &trace.slices[i], i);
    if (trace.notes) fputs(trace.notes, f);
    bool written = !ferror(f);
    written &= fclose(f) == 0;
    require(written, "%s: cannot be written: %s", trace.path, strerror(errno));
    if (trace.count == TRACE_MOST) printf("the trace is full: only the first %d slices of a rank are in it\n", TRACE_MOST);
    free(trace.path);
    free(trace.marks);
    free(trace.slices);
    free(trace.memory);
    free(trace.notes);
    memset(&trace, 0, sizeof trace);
}

// Makes one file of all ranks' parts; rank 0 calls it when all have written theirs.
static inline void trace_merge(const char* path, int ranks) {
    if (path[0] == '\0') return;
    FILE* out = fopen(path, "w");
    require(out != NULL, "--trace %s: cannot be opened for writing: %s", path, strerror(errno));
    fprintf(out, "{\"traceEvents\":[\n");
    for (int r = 0; r < ranks; r++) {
        char* part = trace_part(path, r);
        size_t n;
        FileSource from = { part, "every rank writes its part of --trace into a folder that rank 0 must also see" };
        char* text = file_read(from, SIZE_MAX, &n);
        if (r == ranks - 1) n -= 2; // the last comma, which JSON does not have
        fwrite(text, 1, n, out);
        free(text);
        remove(part);
        free(part);
    }
    fprintf(out, "\n]}\n");
    bool written = !ferror(out);
    written &= fclose(out) == 0;
    require(written, "--trace %s: cannot be written: %s", path, strerror(errno));
    printf("trace      %s: open it in https://ui.perfetto.dev, or: build/overlap %s\n", path, path);
}
#endif
