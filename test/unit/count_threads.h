/* count_threads.h - how many threads this process has. OpenMP keeps those of a loop, so that a test can count them afterwards. */
#ifndef TEST_COUNT_THREADS_H
#define TEST_COUNT_THREADS_H
#include <dirent.h>
#include <omp.h>

static inline int count_threads(void) {
    DIR* tasks = opendir("/proc/self/task");
    int n = 0;
    while (tasks && readdir(tasks)) n++;
    if (tasks) closedir(tasks);
    return n - 2; // "." and ".."
}
#endif
