/*
trace.h - the timeline of a run: --trace FILE writes it as Chrome's JSON, for https://ui.perfetto.dev or
chrome://tracing.

Each rank is a process there, with two tracks: compute, and communication, which ranks.h adds.
build/overlap reads the same file and says in a terminal how much of the communication was hidden.

Compute is marked where it begins, by trace_compute in the programs: a slice ends where the next one begins. On a GPU
marks are events on the stream: they say when the GPU reached the work, not when the host issued it.

The same marks are ranges for a profiler (NVTX), with or without --trace.

Global state: `trace`, so that the lines in the programs stay short. Without --trace they only make those ranges.
*/
#ifndef LLMC_TRACE_H
#define LLMC_TRACE_H
#include "../base/folder.h"
#include "../device/device.h"

#define TRACE_MOST 2000000 // slices of a rank; viewers cannot open a larger trace
enum { TRACK_COMPUTE, TRACK_COMMUNICATION };
typedef struct {
    char name[64];
    int track;
    double begin, end;    // seconds of now_seconds()
    double issued;        // of an operation; 0: it is none
    char* more;           // what else is known of it, as JSON after a comma, owned; NULL: nothing
    void* callers;        // of an operation, owned; named by trace.name_callers
    bool outside;         // waited for before a step or after the last, as those of an evaluation
    long long step;       // set when it is over
} TraceSlice;
typedef struct { const char* what; int index, mark; char task[16]; } TraceMark; // mark: device_event()'s

static struct {
    char* path;           // of this rank's part, owned; NULL: there is no trace
    char task[16];        // "F3": what is computed belongs to it; "": to nothing in particular
    int rank;
    double zero;          // now_seconds() when the ranks met: the same moment for all
    TraceMark* marks;     // (num_marks) of the step at hand, owned
    int num_marks;
    void (*collect)(void* self); // adds the communication of the step at hand; NULL: there is none
    void* collect_self;
    void (*name_callers)(void); // adds to `more` of all operations who called them; NULL: there are none
    TraceSlice* slices;   // (count) owned
    long long step;       // that is over
    size_t count, step_begin; // step_begin: the first slice of the step at hand
    long long full;       // the step in which there was no more room; 0: there is
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
    require(f != NULL, "--trace %s: cannot be opened for writing: %s", path, path_reason(path, errno));
    fclose(f);
}

static inline TraceSlice* trace_add(int track, double begin, double end) {
    if (trace.count == TRACE_MOST && trace.full == 0) trace.full = trace.step + 1;
    if (trace.count == TRACE_MOST) return NULL;
    trace.slices = grown_array(TraceSlice, trace.slices, trace.count);
    TraceSlice* s = &trace.slices[trace.count++];
    memset(s, 0, sizeof *s);
    s->track = track;
    s->begin = begin;
    s->end = end;
    return s;
}

// Names the task of the compute that follows, for its slices: "F3". "": none in particular.
static inline void trace_task(const char* task) { snprintf(trace.task, sizeof trace.task, "%.15s", task); }

// Names the compute that follows: "backward, block" 3. index -1: a name without a number. NULL: nothing is computed.
static inline void trace_compute(const char* what, int index) {
    device_range(what);
    if (trace.path == NULL) return;
    TraceMark m = { what, index, device_event(), "" };
    trace.marks = grown_array(TraceMark, trace.marks, trace.num_marks);
    memcpy(m.task, trace.task, sizeof m.task);
    trace.marks[trace.num_marks++] = m;
}

// Gives `step` the operations that were waited for, and all slices that belong to no step yet.
static inline void trace_collect(long long step) {
    if (trace.collect) trace.collect(trace.collect_self);
    for (size_t i = trace.step_begin; i < trace.count; i++) trace.slices[i].step = step;
    trace.step_begin = trace.count;
    trace.step = step;
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

// ---- the file ----
static inline void trace_write_slice(FILE* f, const TraceSlice* s, size_t id) {
    double ts = 1e6 * (s->begin - trace.zero), dur = 1e6 * (s->end - s->begin);
    fprintf(f, "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"step\":%lld",
            s->name, trace.rank, s->track, ts, dur, s->step);
    fprintf(f, "%s%s}},\n", s->more ? s->more : "", s->outside ? ",\"outside\":true" : "");
    if (s->issued == 0) return;
    const char* flow = "{\"name\":\"issued\",\"cat\":\"issued\",\"ph\":\"%s\",\"id\":\"%d.%zu\",\"pid\":%d,\"tid\":%d,"
                       "\"ts\":%.3f%s},\n";
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
    if (trace.name_callers) trace.name_callers();
    FILE* f = fopen(trace.path, "w");
    require(f != NULL, "%s: cannot be opened for writing: %s", trace.path, path_reason(trace.path, errno));
    fprintf(f, "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}},\n", trace.rank,
            trace.rank);
    for (int t = 0; t < 2; t++)
        fprintf(f, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                trace.rank, t, tracks[t]);
    for (size_t i = 0; i < trace.count; i++) trace_write_slice(f, &trace.slices[i], i);
    if (trace.notes) fputs(trace.notes, f);
    bool written = !ferror(f);
    written &= fclose(f) == 0;
    require(written, "%s: cannot be written: %s", trace.path, strerror(errno));
    if (trace.count == TRACE_MOST)
        printf("the trace is full: it contains only the first %d slices of each rank\n", TRACE_MOST);
    free(trace.path);
    free(trace.marks);
    for (size_t i = 0; i < trace.count; i++) {
        free(trace.slices[i].more);
        free(trace.slices[i].callers);
    }
    free(trace.slices);
    free(trace.notes);
    memset(&trace, 0, sizeof trace);
}

// Makes one file of all ranks' parts; rank 0 calls it when all have written theirs.
static inline void trace_merge(const char* path, int ranks) {
    if (path[0] == '\0') return;
    FILE* out = fopen(path, "w");
    require(out != NULL, "--trace %s: cannot be opened for writing: %s", path, path_reason(path, errno));
    fprintf(out, "{\"traceEvents\":[\n");
    for (int r = 0; r < ranks; r++) {
        char* part = trace_part(path, r);
        size_t n;
        const char* remedy = "every rank writes its part of --trace into a folder that rank 0 must also see";
        char* text = file_read(file_source(part, remedy), SIZE_MAX, &n);
        if (r == ranks - 1) n -= 2; // the last comma, which JSON does not allow
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
