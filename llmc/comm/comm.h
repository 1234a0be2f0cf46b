/*
comm.h - the one header of this folder that programs include; comm_api.h lists the operations. It chooses the backend,
and makes and frees communicators.

USE_MPI=1   for programs of several ranks: make defines it and adds the flags of mpicc. Without it a program needs no
            MPI and runs on one rank, like train_gpt2_single.
USE_NCCL=1  for programs of several ranks on GPUs, unless make is called with USE_NCCL=0
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H
#include "comm_api.h"
#include "comm_operations.h"
#ifndef USE_MPI
#define USE_MPI 0
#endif
#ifndef USE_NCCL
#define USE_NCCL 0
#endif
#if USE_NCCL && !USE_MPI
#error "a program with NCCL also needs USE_MPI=1, because ranks may share a GPU"
#endif
#if USE_MPI
#include "comm_mpi.h"
#endif
#if USE_NCCL
#include "comm_nccl.cuh"
#endif

// ---- what ranks communicate by ----
#if USE_MPI

// Returns the backend that moves the data; NULL: none is needed. It is chosen only here, after all ranks have met.
static inline const CommBackend* comm_choose(Comm* c) {
    int asked = c->world->options.backend;
    if (c->size == 1 && asked != COMM_NCCL) return NULL;
#if USE_NCCL
    if (asked != COMM_MPI && c->world->options.link == 0 && nccl_is_possible(c)) return &comm_nccl;
#endif
    return &comm_mpi;
}

// All ranks find one another; from here on the watchdog watches them.
static inline void comm_meet(Comm* c, const RankInfo* ranks) {
    CommContext* w = c->world;
    char address[CONTROL_ADDRESS] = "";
    message_rank = c->rank;
    if (c->rank > 0) // only rank 0 prints
        require(freopen("/dev/null", "w", stdout) != NULL, "/dev/null cannot be opened for writing: %s",
                strerror(errno));
    if (c->rank == 0) control_listen(w->control, address);
    bool must_be_told = ranks->meeting[0] == '\0'; // then MPI tells the address
    if (must_be_told || !USE_NCCL || w->options.backend == COMM_MPI) mpi_meet(c, address);
    control_join(w->control, address);
}

#else // one rank: comm_require_possible sees to it
static inline const CommBackend* comm_choose(Comm* c) { (void)c; return NULL; }
static inline void comm_meet(Comm* c, const RankInfo* ranks) { (void)c; (void)ranks; }
#endif

// One rank, or ranks that communicate by MPI, need none of this and start faster without it.
static inline void comm_choose_environment(const CommOptions* o, int ranks) {
#if USE_NCCL
    if (ranks > 1 && o->backend != COMM_MPI) nccl_choose_environment();
#else
    (void)o; (void)ranks;
#endif
}

// ---- communicators ----

static inline size_t comm_split_bytes(const Comm* c, int N) {
    return c->world->backend ? c->world->backend->device_bytes(&c->world->options, N) : 0;
}
static inline size_t comm_world_bytes(const Comm* c) {
    return c->world->backend ? COMM_NUMBER_BYTES + comm_split_bytes(c, c->size) : 0;
}

static inline void comm_step(Comm* c, long long step) { flight_recorder_step(c->world->recorder, step); }

// Dies if no backend can follow these options, or connect these ranks.
static inline void comm_require_possible(const CommOptions* o, int size) {
    require(USE_MPI || size == 1, "there are %d ranks, and this program was built without MPI: start it alone", size);
    require(o->link == 0 || o->backend != COMM_NCCL,
            "--emulate-link: NCCL's operations cannot be made to last longer; use --comm mpi");
    require(USE_NCCL || o->backend != COMM_NCCL, "--comm nccl: this program was built without NCCL, which is for GPUs:"
            " use --comm mpi");
    require(!(o->ordered && o->all_reduce == ALL_REDUCE_RING),
            "--deterministic adds in rank order and --allreduce ring in the ring's order: leave one of them out");
}

// Makes a communicator without its link; rank and size are set later.
static inline void comm_open(Comm* c, CommContext* w, const char* name) {
    memset(c, 0, sizeof *c);
    c->world = w;
    c->backend = &comm_alone_backend; // until it has other ranks
    c->axis = AXIS_DP;
    op_name_set(c->name, sizeof c->name, name);
    c->slots = new_array(CommSlot, COMM_IN_FLIGHT);
    w->comms = grown_array(Comm*, w->comms, w->num_comms);
    w->comms[w->num_comms++] = c;
    flight_recorder_join(w->recorder, c->name);
}

static inline void comm_init(Comm* c, const CommOptions* o, RankInfo ranks, Control* control) {
    CommContext* w = new_array(CommContext, 1);
    w->options = *o;
    const char* strict = getenv("SHARD_COMM_STRICT");
    require(strict == NULL || strcmp(strict, "0") == 0 || strcmp(strict, "1") == 0,
            "SHARD_COMM_STRICT must be 0 or 1, not '%s'", strict);
    w->strict = strict && strict[0] == '1';
    comm_require_possible(o, ranks.size);
    w->control = control;
    control_init(control, ranks, o->timeout, o->out);
    w->recorder = &control->recorder;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    comm_open(c, w, "world");
    c->rank = ranks.rank;
    c->size = ranks.size;
    c->world_rank = new_array(int, ranks.size);
    for (int q = 0; q < ranks.size; q++) c->world_rank[q] = q;
    w->notes.capacity = COMM_WAITED_CAPACITY;
    w->notes.waited = new_array(CommWaited, w->notes.capacity);
    snprintf(w->description, sizeof w->description, "one rank, nothing to communicate");
    if (c->size > 1) comm_meet(c, &ranks);
    w->backend = comm_choose(c);
    if (w->backend) {
        w->number = (double*)device_alloc(COMM_NUMBER_BYTES, MEMORY_COMMUNICATION);
        w->backend->open(c);
        c->backend = w->backend;
    }
}

static inline void comm_alone(Comm* c, Comm* parent, const char* name) {
    comm_open(c, parent->world, name);
    c->size = 1;
    c->world_rank = new_array(int, 1);
    c->world_rank[0] = parent->world_rank[parent->rank];
}

static inline void comm_split(Comm* c, Comm* parent, const char* name, int color) {
    invariant(color >= 0, "comm_split '%s': color %d is negative", name, color);
    char full_name[64];
    snprintf(full_name, sizeof full_name, "%s.%d", name, color);
    CommContext* w = parent->world;
    for (int i = 0; i < w->num_comms; i++) {
        invariant(strcmp(w->comms[i]->name, full_name) != 0, "comm_split: there is a communicator '%s' already",
                  full_name);
        for (int k = 0; k < COMM_IN_FLIGHT; k++)
            invariant(!w->comms[i]->slots[k].live, "comm_split '%s': wait for the operations under way first", name);
    }
    if (comm_is_alone(parent)) { comm_alone(c, parent, full_name); return; }
    comm_open(c, w, full_name);
    w->backend->split(c, parent, color);
    // --comm nccl uses NCCL even for one rank, so one GPU is enough
    if (c->size > 1 || (w->nccl && c->link)) c->backend = w->backend;
}

static inline void comm_free(Comm* c) {
    CommContext* w = c->world;
    for (int i = 0; i < COMM_IN_FLIGHT; i++)
        invariant(!c->slots[i].live, "%s: %s, operation #%lld, was never waited for", c->name,
                  comm_kind_names[c->slots[i].kind], c->slots[i].number);
    bool is_world = w->comms[0] == c;
    invariant(!is_world || w->num_comms == 1, "comm_free of the world before '%s'", w->comms[w->num_comms - 1]->name);
    if (is_world) {
        comm_barrier(c); // the watchdog can watch this wait, but not the library's own at its end
        comm_collect_times(c);
        if (w->backend && w->backend->close) w->backend->close(c);
#if USE_MPI
        if (w->mpi) mpi_leave(w);
#endif
        control_stop(w->control);
    } else comm_collect_times(c); // before its stats are gone
    int at = 0;
    while (w->comms[at] != c) at++;
    w->num_comms--;
    memmove(w->comms + at, w->comms + at + 1, (size_t)(w->num_comms - at) * sizeof(Comm*));
    free(c->slots);
    free(c->world_rank);
    memset(c, 0, sizeof *c);
    if (!is_world) return;
    device_free(w->number);
    free(w->notes.waited);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    free(w->comms);
    free(w);
}
#endif
