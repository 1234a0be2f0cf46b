/*
thread.h - threads on which no signal handler runs.

A handler that interrupts a matrix product of oneDNN may damage memory, because the generated code points the stack
pointer at its data (doc/reference/faults.md). So our threads, and those that MPI starts from them, block all signals
except their own faults.
*/
#ifndef LLMC_THREAD_H
#define LLMC_THREAD_H
#include "common.h"
#include <pthread.h>
#include <signal.h>

// Returns true for the signals of a thread's own faults, which end the process.
// The kernel sends them only to that thread.
static inline bool signal_is_fault(int s) {
    return s == SIGSEGV || s == SIGBUS || s == SIGFPE || s == SIGILL || s == SIGABRT || s == SIGTRAP || s == SIGSYS;
}

// Blocks all signals but faults on this thread and those that it starts.
// Returns the mask before, for pthread_sigmask(SIG_SETMASK).
static inline sigset_t thread_block_signals(void) {
    sigset_t all, before;
    sigfillset(&all);
    for (int s = 1; s < NSIG; s++) if (signal_is_fault(s)) sigdelset(&all, s);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    return before;
}

// Like pthread_create, but the new thread blocks these signals. Returns 0 or the error.
static inline int thread_start(pthread_t* thread, void* (*function)(void*), void* argument) {
    sigset_t before = thread_block_signals();
    int rc = pthread_create(thread, NULL, function, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}
#endif
