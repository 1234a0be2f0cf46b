/* others.h - what other programs used of the cores while something was measured. (dev/lib/machine.py says the same of scripts.) */
#ifndef DEV_OTHERS_H
#define DEV_OTHERS_H
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

// Seconds of all cores together: busy, in all; and those that this process used. All are 0 where there is no /proc/stat.
typedef struct { double busy, all, own; } CoreSeconds;

static inline CoreSeconds core_seconds(void) {
    CoreSeconds s = { 0, 0, 0 };
    long long t[8] = { 0 }; // user, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen by other machines
    struct rusage used;
    FILE* file = fopen("/proc/stat", "r");
    if (file == NULL) return s;
    int found = fscanf(file, "cpu %lld %lld %lld %lld %lld %lld %lld %lld", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
    fclose(file);
    if (found < 5) return s;
    for (int i = 0; i < 8; i++) s.all += (double)t[i] / (double)sysconf(_SC_CLK_TCK);
    s.busy = s.all - (double)(t[3] + t[4]) / (double)sysconf(_SC_CLK_TCK);
    getrusage(RUSAGE_SELF, &used);
    s.own = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    return s;
}
// The share of all cores that others used between two times.
static inline double share_of_others(CoreSeconds a, CoreSeconds b) {
    double others = b.busy - a.busy - (b.own - a.own);
    return others > 0 && b.all > a.all ? others / (b.all - a.all) : 0;
}
static inline void say_if_others_ran(CoreSeconds begin) {
    double share = share_of_others(begin, core_seconds());
    if (share > 0.05) printf("\nOther programs used %.0f %% of the cores meanwhile: do not trust these times.\n", 100 * share);
}
#endif
