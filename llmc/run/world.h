/*
world.h - all that a stage on several ranks has besides its model: the ranks, their communicator and watchdog, what they must
agree on, faults on purpose, and what communication costs per step.
*/
#ifndef LLMC_WORLD_H
#define LLMC_WORLD_H
#include "../watch/agree.h"
#include "../comm/comm.h"
#include "../watch/fault.h"
#include "logger.h"
#include "report.h"
#include "trace.h"

typedef struct {
    CommOptions options;
    const char* fault_text;           // --fault
    long long check_every;            // --check-every
    Comm comm;                        // of all ranks
    Control control;                  // this rank's watchdog
    Fault fault;
    // of the step at hand, or the last one
    unsigned long long bytes_before;  // sent by all ranks before it, by the formulas of comm.h
    double exposed_before;            // seconds, of this rank
    unsigned long long bytes;         // sent by all ranks in it
    double exposed;
    // of all steps
    long long steps;
    unsigned long long least, most;   // bytes of a step
    double exposed_total, seconds_total;
} World;

static inline void options_world(OptionTable* t, World* w) {
    options_comm(t, &w->options);
    w->fault_text = "";
    option_int(t, "check-every", &w->check_every, 0, 1e9,
               "every N steps the ranks compare the state that must be equal on all of them; 0: never");
    option_text(t, "fault", &w->fault_text, "RANK:STEP:FAULT",
                "for tests: what that rank does at that step: kill, hang, skip (leave out an operation) or bitflip (flip a bit)");
}

// Joins the ranks, as OpenMPI, torchrun or Slurm started them. Call it after device_init.
static inline void world_start(World* w, const Options* o, RankInfo ranks) {
    w->options.ordered = o->deterministic;
    w->options.out = o->out;
    comm_init(&w->comm, &w->options, ranks, &w->control);
    w->fault = fault_parse(w->fault_text, ranks.size);
    fault_announce(&w->fault);
}

static inline void world_stop(World* w) { comm_free(&w->comm); }

// Puts an operation that has been waited for onto the timeline.
static inline void world_trace_operation(void* self, const CommEvent* e) {
    char name[64], group[32] = "";
    (void)self;
    if (strcmp(e->communicator, "world") != 0) snprintf(group, sizeof group, " of %s", e->communicator);
    snprintf(name, sizeof name, "%s #%lld%s (%zu %s)", comm_kind_names[e->kind], e->number, group, e->n, comm_type_name(e->type));
    trace_operation(name, e->issued, e->started, e->finished, e->wait_begun, e->wait_ended);
}
static inline void world_settle(void* self) { comm_settle(&((World*)self)->comm); }
// Begins a timeline of all ranks, if path is not "".
static inline void world_trace(World* w, const char* path) {
    comm_barrier(&w->comm); // time 0 for all
    trace_open(path, w->comm.rank);
    if (path[0] == '\0') return;
    comm_observe(&w->comm, world_trace_operation, NULL);
    trace.collect = world_settle;
    trace.collect_self = w;
}

// Returns true, on all ranks, if the predicted bytes fit on every device, shared ones included. A rank that alone recomputed what
// the others keep would make them wait. Collective.
typedef struct { DeviceId device; size_t needed, free; bool fits; } WorldRoom;
static inline bool world_memory_fits(World* w, const size_t predicted[MEMORY_KINDS]) {
    size_t N = (size_t)w->comm.size;
    WorldRoom mine, a, b;
    memset(&mine, 0, sizeof mine); // its padding is also sent
    mine.device = device_id();
    mine.needed = memory_missing(predicted);
    mine.free = device_memory_free();
    mine.fits = memory_fits(predicted);
    ControlBytes* rooms = (ControlBytes*)xcalloc(N, sizeof(ControlBytes)); // of rank 0
    control_gather(&w->control, &mine, sizeof mine, rooms);
    char all_fit = 1;
    for (size_t i = 0; i < N && w->comm.rank == 0; i++) {
        size_t needed = 0;
        memcpy(&a, rooms[i].data, sizeof a);
        for (size_t k = 0; k < N; k++) {
            memcpy(&b, rooms[k].data, sizeof b);
            if (memcmp(&a.device, &b.device, sizeof a.device) == 0) needed += b.needed;
        }
        if (!a.fits || needed > a.free) all_fit = 0;
    }
    ControlBytes told = control_broadcast(&w->control, &all_fit, sizeof all_fit);
    if (w->comm.rank > 0) all_fit = told.data[0];
    for (size_t i = 0; i < N; i++) free(rooms[i].data);
    free(rooms);
    free(told.data);
    return all_fit;
}

// ---- the cost of a step ----
// Before step `step`, counted from 1, and after it. state: device memory whose first bit --fault bitflip flips.
static inline void world_step_begin(World* w, long long step, void* state) {
    comm_step(&w->comm, step);
    fault_strike(&w->fault, w->comm.rank, step);
    if (fault_now(&w->fault, w->comm.rank, step, FAULT_SKIP)) w->comm.skips = true;
    if (fault_now(&w->fault, w->comm.rank, step, FAULT_BITFLIP)) {
        unsigned char byte;
        device_to_host(&byte, state, 1);
        byte ^= 1;
        host_to_device(state, &byte, 1);
        device_synchronize(); // the copy reads byte
    }
    comm_settle(&w->comm); // earlier operations are not a cost of this step
    w->bytes_before = comm_total_bytes(&w->comm);
    w->exposed_before = comm_total_exposed(&w->comm);
}
static inline void world_step_end(World* w, double seconds) {
    comm_settle(&w->comm);
    w->bytes = comm_total_bytes(&w->comm) - w->bytes_before;
    w->exposed = comm_total_exposed(&w->comm) - w->exposed_before;
    if (w->steps == 0 || w->bytes < w->least) w->least = w->bytes;
    if (w->steps == 0 || w->bytes > w->most) w->most = w->bytes;
    w->steps++;
    w->exposed_total += w->exposed;
    w->seconds_total += seconds;
}

// ---- reports ----
// Prints how many ranks there are, how they communicate, and what each will send per step. bytes: of all ranks together.
static inline void report_ranks(const World* w, unsigned long long bytes) {
    char sent[32];
    const RankInfo* r = &w->control.ranks;
    if (r->size == 1) printf("ranks      1, %s%s\n", r->found,
                             w->options.windows ? "; --nccl-windows does nothing: there is no other GPU to share memory with" : "");
    else printf("ranks      %d, %d on this machine, found by %s; %s%s; %s sent per rank and step\n", r->size, r->local_size, r->found,
                comm_description(&w->comm), w->comm.world->strict ? " (STRICT MODE)" : "",
                format_bytes(sent, sizeof sent, (double)bytes / r->size));
    fflush(stdout);
}

// The same for metrics.jsonl's first line: run_record's object with more in it.
static inline json_t* world_record(json_t* run, const World* w, unsigned long long bytes) {
    json_object_set_new(run, "ranks_found_by", json_text(w->control.ranks.found));
    json_object_set_new(run, "communication", json_text(comm_description(&w->comm)));
    json_object_set_new(run, "predicted_comm_bytes", json_real((double)bytes / w->comm.size));
    return run;
}

// Prints what was sent per step beside what was predicted (both of all ranks together), and how long the steps waited for it.
// Returns true if every step sent as predicted.
static inline bool report_sent(const World* w, unsigned long long predicted) {
    int N = w->comm.size;
    if (w->steps == 0) return true;
    report_header("sent per rank and step");
    unsigned long long sent = w->most != predicted ? w->most : w->least; // in a step that was not as predicted, if there was one
    bool agree = report_row("bytes", (size_t)(predicted / (unsigned)N), (size_t)(sent / (unsigned)N));
    if (N > 1) printf("communication exposed: %.1f ms of %.1f ms a step; compute / (compute + exposed) = %.1f %%\n",
                      1e3 * w->exposed_total / (double)w->steps, 1e3 * w->seconds_total / (double)w->steps,
                      100 * (1 - w->exposed_total / w->seconds_total));
    return agree && w->least == predicted && w->most == predicted;
}
#endif
