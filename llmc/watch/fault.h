/*
fault.h - faults on purpose: --fault RANK:STEP:kill|hang|skip|bitflip|slow, for tests and exercises. STEP is 3, or in a
pipeline 3/5: at micro-batch 5, counted from 0, of step 3.

    kill     the process is killed, as by the kernel when memory runs out
    hang     it stops computing, but its watchdog still runs
    skip     it leaves out an operation that the others issue
    bitflip  one bit of its memory is wrong from here on
    slow     it loses 50 ms in this step and in all later ones

kill and hang are done here, by fault_strike(), slow by fault_delay(). The caller does skip and bitflip when fault_now()
returns true.
*/
#ifndef LLMC_FAULT_H
#define LLMC_FAULT_H
#include "../base/common.h"
#include <signal.h>

typedef enum { FAULT_NONE, FAULT_KILL, FAULT_HANG, FAULT_SKIP, FAULT_BITFLIP, FAULT_SLOW, FAULT_KINDS } FaultKind;
static const char* const fault_names[FAULT_KINDS] = { "none", "kill", "hang", "skip", "bitflip", "slow" };

typedef struct {
    FaultKind kind; // FAULT_NONE: the option was not given
    int rank;
    long long step; // as the log counts them, from 1
    int micro;      // -1: as the step begins
} Fault;

// Reads the value of --fault; "": no fault.
static inline Fault fault_parse(const char* text, int ranks) {
    Fault f = { FAULT_NONE, 0, 0, -1 };
    if (text[0] == '\0') return f;
    int used = 0;
    char rank[12], step[20], micro[10] = "-1";
    bool shaped = sscanf(text, "%11[0-9]:%19[0-9]:%n", rank, step, &used) == 2 && used > 0;
    if (!shaped) shaped = sscanf(text, "%11[0-9]:%19[0-9]/%9[0-9]:%n", rank, step, micro, &used) == 3 && used > 0;
    require(shaped, "--fault wants RANK:STEP:kill|hang|skip|bitflip|slow, as in 2:7:kill, not '%s'", text);
    for (int k = FAULT_KILL; k < FAULT_KINDS; k++) if (strcmp(text + used, fault_names[k]) == 0) f.kind = (FaultKind)k;
    require(f.kind != FAULT_NONE, "--fault %s: the fault must be kill, hang, skip, bitflip or slow, not '%s'", text,
            text + used);
    long long r = strtoll(rank, NULL, 10);
    require(r < ranks, "--fault %s: there is no rank %lld, the last one is %d", text, r, ranks - 1);
    f.rank = (int)r;
    bool at_step = strcmp(micro, "-1") == 0;
    require(at_step || f.kind == FAULT_KILL || f.kind == FAULT_HANG, "--fault %s: only kill and hang can wait for a"
            " micro-batch; leave out /%s", text, micro);
    f.step = strtoll(step, NULL, 10);
    f.micro = (int)strtol(micro, NULL, 10);
    require(f.step >= 1, "--fault %s: steps count from 1", text);
    return f;
}

// Dies if the fault waits for a micro-batch that never comes. micros: those of a pipeline's step;
// 0: this program knows only steps.
static inline void fault_check_micro(const Fault* f, int micros) {
    if (f->kind == FAULT_NONE || f->micro < 0) return;
    require(micros > 0,
            "--fault %d:%lld/%d: only a pipeline, as in train_gpt2_pp, has a fault at a micro-batch; leave out /%d",
            f->rank, f->step, f->micro, f->micro);
    require(f->micro < micros, "--fault %d:%lld/%d: there is no micro-batch %d; a step has %d, counted from 0", f->rank,
            f->step, f->micro, f->micro, micros);
}

// Says at the start what will happen, so that nobody takes the run for a good one.
static inline void fault_announce(const Fault* f) {
    static const char* const what[FAULT_KINDS] = { "",       "IS KILLED", "HANGS", "SKIPS AN OPERATION", "FLIPS A BIT",
                                                   "IS SLOW" };
    if (f->kind == FAULT_NONE) return;
    char micro[32] = "";
    if (f->micro >= 0) snprintf(micro, sizeof micro, ", MICRO-BATCH %d", f->micro);
    printf("FAULT ON PURPOSE: RANK %d %s AT STEP %lld%s (--fault)\n", f->rank, what[f->kind], f->step, micro);
}

// Returns true if this rank must commit this fault now, and prints that it does.
static inline bool fault_now(const Fault* f, int rank, long long step, FaultKind kind) {
    if (f->kind != kind || f->rank != rank || f->step != step || kind == FAULT_NONE) return false;
    char line[128];
    snprintf(line, sizeof line, "FAULT ON PURPOSE: RANK %d, STEP %lld: %s (--fault)\n", rank, step, fault_names[kind]);
    write_stderr(line);
    return true;
}

// The two faults that need no help, as a step begins or, if micro is not -1, a micro-batch. A fault does not return.
static inline void fault_strike_at(const Fault* f, int rank, long long step, int micro) {
    if (micro != f->micro) return;
    if (fault_now(f, rank, step, FAULT_KILL)) raise(SIGKILL);
    if (fault_now(f, rank, step, FAULT_HANG)) for (;;) pause();
}
static inline void fault_strike(const Fault* f, int rank, long long step) { fault_strike_at(f, rank, step, -1); }

// Sleeps if this rank is slow in this step. Call it inside the time of a step.
static inline void fault_delay(const Fault* f, int rank, long long step) {
    struct timespec t = { 0, 50 * 1000 * 1000 };
    if (f->kind == FAULT_SLOW && f->rank == rank && step >= f->step) nanosleep(&t, NULL);
}
#endif
