/*
stop.h - a signal that asks a run to save and stop: SIGUSR1, or SIGTERM, from a person or a scheduler.

The signals are blocked on all threads, and one thread waits for them (base/thread.h says why no handler may run on the
others). It only notes that a signal has come: at the next step the ranks add up how many have been told
(StepStats.stopping), so that all of them save after the same step, whichever ranks the signal has reached. A launcher
that has lost a rank also sends SIGTERM. Then that sum never arrives, and the watchdog ends the run without saving.
*/
#ifndef LLMC_STOP_H
#define LLMC_STOP_H
#include "common.h"
#include "thread.h"

#define EXIT_STOPPED 200 // saved on a signal. No signal's own status, and no error's; schedulers can tell it apart
#define STOP_REPEATS 1.0 // seconds: mpirun passes on a signal that the whole group of processes has had already

// (State of the process, like the signals.)
static struct {
    sigset_t signals; // that ask to save and stop
    bool listens;
    int came;         // the first of them; 0: none yet
} stop_process;

// The signal that has asked this rank to save and stop, or 0.
static inline int stop_signal(void) { return __atomic_load_n(&stop_process.came, __ATOMIC_ACQUIRE); }

// A second signal ends the process at once, as if nothing had been blocked.
static inline void* stop_thread(void* nothing) {
    for (double first = 0;;) {
        int s = 0;
        if (sigwait(&stop_process.signals, &s) != 0) continue;
        bool repeats = first > 0 && now_seconds() < first + STOP_REPEATS;
        if (repeats) continue;
        if (first > 0) {
            pthread_sigmask(SIG_UNBLOCK, &stop_process.signals, NULL);
            raise(s);
        }
        first = now_seconds();
        __atomic_store_n(&stop_process.came, s, __ATOMIC_RELEASE);
    }
    return nothing;
}

// Call it before any other thread exists. A signal that is ignored stays so.
static inline void stop_listen(void) {
    static const int asked[] = { SIGUSR1, SIGTERM };
    pthread_t thread;
    sigemptyset(&stop_process.signals);
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        struct sigaction now;
        if (sigaction(asked[i], NULL, &now) == 0 && now.sa_handler == SIG_DFL)
            sigaddset(&stop_process.signals, asked[i]);
    }
    pthread_sigmask(SIG_BLOCK, &stop_process.signals, NULL);
    require(thread_start(&thread, stop_thread, NULL) == 0, "cannot start a thread that waits for signals");
    pthread_detach(thread);
    stop_process.listens = true;
}
// Returns true if signal s asks to save and stop, so that nobody else handles it.
static inline bool stop_handles(int s) { return stop_process.listens && sigismember(&stop_process.signals, s) == 1; }
#endif
