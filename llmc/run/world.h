/*
world.h - all that a stage on several ranks has besides its model: the ranks, their communicator and watchdog, what they must
agree on, faults on purpose, and what communication costs per step.
*/
#ifndef LLMC_WORLD_H
#define LLMC_WORLD_H
#include "facts.h"
#include "../comm/comm.h"
#include "../watch/fault.h"
#include "logger.h"
#include "report.h"
#include "trace.h"

typedef struct {
    bool joins;                       // options_world was called: this program runs on several ranks
    CommOptions options;
    const char* fault_text;           // --fault
    long long check_every;            // --check-every
    Comm comm;                        // of all ranks
    Control control;                  // this rank's watchdog
    Fault fault;
    // of the step at hand, or the last one
    double bytes_before;              // sent by this rank before it, by the formulas of comm/contract.h
    double exposed_before;            // seconds
    double bytes, exposed;            // in it
    // of all steps
    long long steps;
    double least, most;               // bytes of a step
    double exposed_total, seconds_total;
} World;

// Call it in programs that run on several ranks. In others every process is rank 0 of 1.
static inline void options_world(OptionTable* t, World* w) {
    w->joins = true;
    options_comm(t, &w->options);
    w->fault_text = "";
    option_int(t, "check-every", &w->check_every, 0, 1e9,
               "every N steps the ranks compare the state that must be equal on all of them; 0: never");
    option_text(t, "fault", &w->fault_text, "RANK:STEP:FAULT",
                "for tests: what that rank does at that step: kill, hang, skip (leave out an operation)"
                " or bitflip (flip a bit)");
}

// Joins the ranks, as OpenMPI, torchrun or Slurm started them. Call it after device_init.
static inline void world_start(World* w, const Options* o, RankInfo ranks) {
    if (!w->joins) w->options.timeout = 1; // nobody is waited for
    w->options.ordered = o->deterministic;
    w->options.out = o->out;
    comm_init(&w->comm, &w->options, ranks, &w->control);
    w->fault = fault_parse(w->joins ? w->fault_text : "", ranks.size);
    fault_announce(&w->fault);
}

static inline void world_stop(World* w) { comm_free(&w->comm); }

// Puts an operation that has been waited for onto the timeline.
static inline void world_trace_operation(void* self, const CommEvent* e) {
    char name[64], group[32] = "";
    (void)self;
    if (strcmp(e->communicator, "world") != 0) snprintf(group, sizeof group, " of %s", e->communicator);
    snprintf(name, sizeof name, "%s #%lld%s (%zu %s)", comm_kind_names[e->kind], e->number, group, e->n,
             comm_type_name(e->type));
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

typedef struct { DeviceId device; size_t needed, free; bool fits; } WorldRoom;
// given: WorldRooms. The answer is one byte: 1 if all of them fit, else 0.
static inline ControlBytes world_rooms_fit(void* self, const ControlBytes* given, int size) {
    (void)self;
    WorldRoom a, b;
    char all_fit = 1;
    for (int i = 0; i < size; i++) {
        size_t needed = 0;
        memcpy(&a, given[i].data, sizeof a);
        for (int k = 0; k < size; k++) {
            memcpy(&b, given[k].data, sizeof b);
            if (memcmp(&a.device, &b.device, sizeof a.device) == 0) needed += b.needed;
        }
        if (!a.fits || needed > a.free) all_fit = 0;
    }
    return control_bytes(&all_fit, sizeof all_fit);
}
// Returns true, on all ranks, if the predicted bytes fit on every device, shared ones included. A rank that alone
// recomputed what the others keep would make them wait. Collective.
static inline bool world_memory_fits(World* w, const size_t predicted[MEMORY_KINDS]) {
    WorldRoom mine;
    memset(&mine, 0, sizeof mine); // its padding is also sent
    mine.device = device_id();
    mine.needed = memory_missing(predicted);
    mine.free = device_memory_free();
    mine.fits = memory_fits(predicted);
    ControlBytes answer = control_decide(&w->control, &mine, sizeof mine, world_rooms_fit, NULL);
    bool all_fit = answer.data[0];
    free(answer.data);
    return all_fit;
}

// ---- the cost of a step ----
// Before step `step`, counted from 1, and after it. state: device memory in whose first byte --fault bitflip flips a bit.
static inline void world_step_begin(World* w, long long step, void* state) {
    comm_step(&w->comm, step);
    fault_strike(&w->fault, w->comm.rank, step);
    if (fault_now(&w->fault, w->comm.rank, step, FAULT_SKIP)) w->comm.skips = true;
    if (fault_now(&w->fault, w->comm.rank, step, FAULT_BITFLIP)) {
        unsigned char byte;
        device_to_host(&byte, state, 1);
        byte ^= 16; // not the last bit of a number, which an update may round away
        host_to_device(state, &byte, 1);
        device_synchronize(); // the copy reads byte
    }
    comm_settle(&w->comm); // earlier operations are not a cost of this step
    w->bytes_before = comm_rank_bytes(&w->comm);
    w->exposed_before = comm_rank_exposed(&w->comm);
}
static inline void world_step_end(World* w, double seconds) {
    comm_settle(&w->comm);
    w->bytes = comm_rank_bytes(&w->comm) - w->bytes_before;
    w->exposed = comm_rank_exposed(&w->comm) - w->exposed_before;
    if (w->steps == 0 || w->bytes < w->least) w->least = w->bytes;
    if (w->steps == 0 || w->bytes > w->most) w->most = w->bytes;
    w->steps++;
    w->exposed_total += w->exposed;
    w->seconds_total += seconds;
}

// ---- checks between ranks ----
typedef uint64_t UnitChecksum(void* self, int u); // of unit u's parameters, gathered

// Every parts-th rank computes with the same parameters, so they must be equal to the bit. Dies on every rank, naming ranks and
// unit, if they are not. Collective.
static inline void world_check_parts(World* w, long long step, int parts, int num_units, UnitChecksum* unit_checksum,
                                     void* self) {
    uint64_t sums[MAX_UNITS];
    for (int u = 0; u < num_units; u++) sums[u] = unit_checksum(self, u);
    require_same_units(&w->control, "parameters", sums, num_units, parts, step);
}
// The same where all ranks have them.
static inline void world_check_units(World* w, long long step, int num_units, UnitChecksum* unit_checksum, void* self) {
    world_check_parts(w, step, 1, num_units, unit_checksum, self);
}

// ---- reports ----
// Prints how many ranks there are, how they communicate, and what each will send per step: bytes.
static inline void report_ranks(const World* w, double bytes) {
    char sent[32];
    const RankInfo* r = &w->control.ranks;
    const char* no_windows = "; --nccl-windows does nothing: there is no other GPU to share memory with";
    if (r->size == 1) printf("ranks      1, %s%s\n", r->found, w->options.windows ? no_windows : "");
    else printf("ranks      %d, %d on this machine, found by %s; %s%s; %s sent per rank and step\n", r->size, r->local_size,
                r->found, comm_description(&w->comm), w->comm.world->strict ? " (STRICT MODE)" : "",
                format_bytes(sent, sizeof sent, bytes));
    fflush(stdout);
}

// The same for metrics.jsonl's first line: run_record's object with more in it.
static inline json_t* world_record(json_t* run, const World* w, double bytes) {
    json_object_set_new(run, "ranks_found_by", json_text(w->control.ranks.found));
    json_object_set_new(run, "communication", json_text(comm_description(&w->comm)));
    json_object_set_new(run, "predicted_comm_bytes", json_real(bytes));
    return run;
}

// What one rank was predicted to send per step, and what it sent in the step that sent least and most.
typedef struct { double predicted, least, most; } SentBytes;
static inline bool sent_as_predicted(SentBytes s) {
    return fabs(s.least - s.predicted) < 0.5 && fabs(s.most - s.predicted) < 0.5; // an all-reduce may end in thirds
}
// Finds a rank that did not send as predicted; if there is none, the one that sent most.
static inline ControlBytes sent_choose(void* self, const ControlBytes* ranks, int size) {
    SentBytes chosen, s;
    (void)self;
    memcpy(&chosen, ranks[0].data, sizeof chosen);
    for (int q = 1; q < size; q++) {
        memcpy(&s, ranks[q].data, sizeof s);
        if (!sent_as_predicted(chosen)) break;
        if (!sent_as_predicted(s) || s.most > chosen.most) chosen = s;
    }
    return control_bytes(&chosen, sizeof chosen);
}

// Prints what was sent per step beside what was predicted, and how long the steps waited for it. Ranks may send different
// amounts: it shows one that is not as predicted, or the one that sends most. Returns true if every rank sent as predicted
// in every step. Collective.
static inline bool report_sent(World* w, double predicted) {
    if (w->steps == 0) return true;
    SentBytes s = { predicted, w->least, w->most };
    ControlBytes chosen = control_decide(&w->control, &s, sizeof s, sent_choose, NULL);
    memcpy(&s, chosen.data, sizeof s);
    free(chosen.data);
    report_header("sent per rank and step");
    double sent = fabs(s.most - s.predicted) < 0.5 ? s.least : s.most; // in a step that was not as predicted, if any
    report_row("bytes", (size_t)s.predicted, (size_t)sent);
    if (w->comm.size > 1)
        printf("communication exposed: %.1f ms of %.1f ms a step; compute / (compute + exposed) = %.1f %%\n",
               1e3 * w->exposed_total / (double)w->steps, 1e3 * w->seconds_total / (double)w->steps,
               100 * (1 - w->exposed_total / w->seconds_total));
    return sent_as_predicted(s);
}
#endif
