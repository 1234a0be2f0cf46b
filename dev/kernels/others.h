/* others.h - what other programs used of the cores while something was measured. (dev/lib/machine.py tells scripts.) */
#ifndef DEV_OTHERS_H
#define DEV_OTHERS_H
#include <stdbool.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

// Seconds of all cores together, busy and in all, and those that this process used. Without /proc/stat they are 0.
typedef struct { double busy, all, own; } CoreSeconds;

static inline CoreSeconds core_seconds(void) {
    CoreSeconds s = { 0, 0, 0 };
    long long t[8] = { 0 }; // user, nice, system, idle, waiting for a disk, interrupts of two kinds, stolen
    const double hertz = (double)sysconf(_SC_CLK_TCK);
    struct rusage used;
    FILE* file = fopen("/proc/stat", "r");
    if (file == NULL) return s;
    int found = 0;
    if (fscanf(file, "cpu") == 0) while (found < 8 && fscanf(file, "%lld", &t[found]) == 1) found++;
    fclose(file);
    if (found < 5) return s;
    for (int i = 0; i < 8; i++) s.all += (double)t[i] / hertz;
    s.busy = s.all - (double)(t[3] + t[4]) / hertz;
    getrusage(RUSAGE_SELF, &used);
    s.own = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
    s.own += 1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    return s;
}
// The share of all cores that others used between two times.
static inline double share_of_others(CoreSeconds a, CoreSeconds b) {
    double others = b.busy - a.busy - (b.own - a.own);
    return others > 0 && b.all > a.all ? others / (b.all - a.all) : 0;
}
static inline void say_if_others_ran_between(CoreSeconds begin, CoreSeconds end) {
    double share = share_of_others(begin, end);
    if (share <= 0.05) return;
    printf("\nOther programs used %.0f %% of the cores meanwhile: do not trust these times.\n", 100 * share);
}
static inline void say_if_others_ran(CoreSeconds begin) { say_if_others_ran_between(begin, core_seconds()); }
// Shares of a peak that was another one at the end would contradict each other.
static inline bool say_if_peak_changed(double before, double after, const char* unit) {
    bool changed = before > 1.25 * after || after > 1.25 * before;
    if (changed)
        printf("\nDo not trust shares of the peak, which contradict each other: it was %.4g %s before and %.4g after these"
               " measurements. Other programs use this device, or its clock has changed.\n", before, unit, after);
    return changed;
}
#endif
