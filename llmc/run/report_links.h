/*
report_links.h - at the end of a run on several machines: whose link is slow.

In a collective all ranks wait for the slowest link, so the times of a step do not tell which it is. Here all ranks at
once send a message to a rank of the next machine and receive one from the machine before, as in a ring. Both messages
of a slow link take long, and of any other link one does not: so from three machines on the slow one is known. Over MPI
only: what NCCL needs for messages between any two ranks is too much to set up for this.
*/
#ifndef LLMC_REPORT_LINKS_H
#define LLMC_REPORT_LINKS_H
#include "diagnosis.h"
#include "ranks.h"

#define LINK_BYTES ((size_t)1 << 20)
#define LINK_ROUNDS 3
// Times as long as usual: on cores that ranks share with other work 3 of 65 runs had a link that took twice as long
#define LINK_SLOW 3

// Returns the seconds until a message from rank `from` is here,
// while one goes to rank `to`: the shortest of a few rounds. Collective.
static inline float link_seconds(Comm* c, int to, int from) {
    char *out = (char*)device_alloc(LINK_BYTES, MEMORY_COMMUNICATION),
         *in = (char*)device_alloc(LINK_BYTES, MEMORY_COMMUNICATION);
    double least = INFINITY;
    for (int i = 0; i < LINK_ROUNDS; i++) {
        comm_barrier(c);
        double begun = now_seconds();
        // Over MPI without comm_connect
        CommOp received = comm_issue(c, COMM_RECV, in, NULL, LINK_BYTES, COMM_BYTE, from, 0, false);
        CommOp sent = comm_issue(c, COMM_SEND, NULL, out, LINK_BYTES, COMM_BYTE, to, 0, false);
        comm_wait(c, received);
        device_synchronize();
        least = fmin(least, now_seconds() - begun);
        comm_wait(c, sent);
    }
    device_free(in);
    device_free(out);
    return (float)least;
}

// seconds (N): what link_seconds gave each rank, from the rank `apart` before it. Returns the rank whose link takes
// LINK_SLOW times as long as most, or longer; -1: there is none. *own, *usual: seconds of its link, and of most.
static inline int links_slowest(const float* seconds, int N, int apart, float* own, float* usual) {
    float* link = (float*)xcalloc(2 * (size_t)N, sizeof(float));
    int slowest = 0;
    // received, and sent
    for (int r = 0; r < N; r++) link[r] = link[N + r] = fminf(seconds[r], seconds[(r + apart) % N]);
    for (int r = 1; r < N; r++) if (link[r] > link[slowest]) slowest = r;
    *own = link[slowest];
    qsort(link + N, (size_t)N, sizeof(float), compare_floats);
    *usual = link[N + N / 2];
    free(link);
    return *own >= LINK_SLOW * *usual ? slowest : -1;
}

// Prints whose link is slow, if one is. Collective.
static inline void report_links(Ranks* w) {
    const Control* control = &w->control;
    int N = w->comm.size, apart = 1; // from a rank to one of the next machine
    if (control->hosts == NULL || w->comm.world->nccl) return;
    while (strcmp(control->hosts[apart], control->hosts[0]) == 0) apart++;
    bool has_room = device_memory_available() > 2 * LINK_BYTES;
    if (comm_host_sum(&w->comm, !has_room) > 0) return;
    float mine = link_seconds(&w->comm, (w->comm.rank + apart) % N, (w->comm.rank + N - apart) % N), own, usual;
    float* all = (float*)control_gather_array(&w->control, &mine, sizeof mine);
    int slowest = all ? links_slowest(all, N, apart, &own, &usual) : -1;
    if (slowest >= 0)
        printf("slow link  %s: %.1f MB/s to and from other machines, where most have %.1f\n",
               rank_label(control, slowest).text, 1e-6 * LINK_BYTES / own, 1e-6 * LINK_BYTES / usual);
    free(all);
}
#endif
