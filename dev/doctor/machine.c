// Cores this process may use, threads that OpenMP will run, and whether they all take part in a sum.
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

int main(void) {
    cpu_set_t allowed;
    int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    int threads = omp_get_max_threads(), sum = 0;
    #pragma omp parallel num_threads(threads) reduction(+ : sum)
    sum += 1;
    printf("%d core%s, a run uses %d thread%s\n", cores, cores == 1 ? "" : "s", sum, sum == 1 ? "" : "s");
    return sum != threads;
}
