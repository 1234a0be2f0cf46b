/*
fault.h - faults on purpose: --fault RANK:STEP:kill|hang|skip|bitflip, for tests and exercises.

    kill     the process is killed, as by the kernel when memory runs out
    hang     it stops computing, but its watchdog still runs
    skip     it leaves out an operation that the others issue
    bitflip  one bit of its memory is wrong from here on

kill and hang are done here, by fault_strike(). The caller does skip and bitflip, when fault_now() says so.
*/
#ifndef LLMC_FAULT_H
#define LLMC_FAULT_H
#include "../base/common.h"
#include <signal.h>

typedef enum { FAULT_NONE, FAULT_KILL, FAULT_HANG, FAULT_SKIP, FAULT_BITFLIP, FAULT_KINDS } FaultKind;
static const char* const fault_names[FAULT_KINDS] = { "none", "kill", "hang", "skip", "bitflip" };

typedef struct {
    FaultKind kind; // FAULT_NONE: the option was not given
    int rank;
    long long step; // as the log counts them, from 1
} Fault;

// Reads the value of --fault; "": no fault.
static inline Fault fault_parse(const char* text, int ranks) {
    Fault f = { FAULT_NONE, 0, 0 };
    if (text[0] == '\0') return f;
    int used = 0;
    char rank[12], step[20];
    bool shaped = sscanf(text, "%11[0-9]:%19[0-9]:%n", rank, step, &used) == 2 && used > 0;
    require(shaped, "--fault wants RANK:STEP:kill|hang|skip|bitflip, as in 2:7:kill, not '%s'", text);
    for (int k = FAULT_KILL; k < FAULT_KINDS; k++) if (strcmp(text + used, fault_names[k]) == 0) f.kind = (FaultKind)k;
    require(f.kind != FAULT_NONE, "--fault %s: the fault must be kill, hang, skip or bitflip, not '%s'", text, text + used);
    long long r = strtoll(rank, NULL, 10);
    require(r < ranks, "--fault %s: there is no rank %lld, the last one is %d", text, r, ranks - 1);
    f.rank = (int)r;
    f.step = strtoll(step, NULL, 10);
    require(f.step >= 1, "--fault %s: steps count from 1", text);
    return f;
}

// Says at the start what will happen, so that nobody takes the run for a good one.
static inline void fault_announce(const Fault* f) {
    static const char* const what[FAULT_KINDS] = { "", "IS KILLED", "HANGS", "SKIPS AN OPERATION", "FLIPS A BIT" };
    if (f->kind == FAULT_NONE) return;
    printf("FAULT ON PURPOSE: RANK %d %s AT STEP %lld (--fault)\n", f->rank, what[f->kind], f->step);
}

// Returns true if this rank must commit this fault now, and prints that it does.
static inline bool fault_now(const Fault* f, int rank, long long step, FaultKind kind) {
    if (f->kind != kind || f->rank != rank || f->step != step || kind == FAULT_NONE) return false;
    fprintf(stderr, "FAULT ON PURPOSE: RANK %d, STEP %lld: %s (--fault)\n", rank, step, fault_names[kind]);
    return true;
}

// The two faults that need no help. Does not return if it is time for one of them.
static inline void fault_strike(const Fault* f, int rank, long long step) {
    if (fault_now(f, rank, step, FAULT_KILL)) raise(SIGKILL);
    if (fault_now(f, rank, step, FAULT_HANG)) for (;;) pause();
}
#endif
