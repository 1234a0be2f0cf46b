/*
rank_info.h - which rank this process is among those that were started together.

mpirun (OpenMPI), torchrun and Slurm's srun each tell a process its rank by variables of their own. A process that none
of them started is rank 0 of 1.
*/
#ifndef LLMC_RANK_INFO_H
#define LLMC_RANK_INFO_H
#include "launcher.h"

#define MAX_RANKS 65536
typedef struct {
    int rank, size;             // this process, and how many there are
    int local_rank, local_size; // the same among those on this machine
    const char* found;          // "OpenMPI", "torchrun", "Slurm", "started alone"
    char meeting[400];          // where rank 0 listens (comm/control.h), if the launcher says so: "PORT WORD HOST";
                                // else ""
} RankInfo;

// The variables of a launcher. NULL: Slurm says this in another form.
typedef struct { const char *found, *rank, *size, *local_rank, *local_size; } RankVariables;
static const RankVariables ranks_openmpi = { "OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE" };
static const RankVariables ranks_torchrun = { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" };
// A batch script has SLURM_PROCID and SLURM_NTASKS although srun did not start it;
// only srun's tasks have the STEP's number.
static const RankVariables ranks_slurm = { "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL };

// Returns the whole number in an environment variable. Dies unless it is between least and most.
static inline int ranks_number(const char* launcher, const char* variable, long min, long max) {
    const char* text = getenv(variable);
    require(text != NULL, "%s has not set %s, although it has set other variables; start with mpirun, torchrun or srun,"
            " or unset them to run alone", launcher, variable);
    char* end;
    errno = 0;
    long v = strtol(text, &end, 10);
    bool is_number = isdigit((unsigned char)text[0]) && *end == '\0' && errno == 0;
    require(is_number, "%s is '%s', which is not a number; %s should have set it", variable, text, launcher);
    require(v >= min && v <= max, "%s is %ld, but it must be from %ld to %ld; %s should have set it",
            variable, v, min, max, launcher);
    return (int)v;
}

// Returns how many tasks Slurm runs on a node, from "2(x3),1": two each on the first three nodes, one on the fourth.
static inline int ranks_slurm_tasks_on(const char* text, int node, int size) {
    for (const char* p = text; p != NULL && *p;) {
        int tasks = 0, times = 1, used = 0;
        if (sscanf(p, "%d%n", &tasks, &used) != 1 || tasks < 1 || tasks > size) break;
        p += used;
        if (*p == '(' && (sscanf(p, "(x%d)%n", &times, &used) != 1 || times < 1 || used == 0)) break;
        if (*p == '(') p += used;
        if (node < times) return tasks;
        node -= times;
        if (*p == ',') p++;
    }
    die("SLURM_STEP_TASKS_PER_NODE is '%s', which does not tell how many tasks run on this node; srun should have set "
        "it",
        text ? text : "");
}

static inline RankInfo ranks_read(const RankVariables* v) {
    RankInfo r;
    memset(&r, 0, sizeof r);
    r.found = v->found;
    r.size = ranks_number(v->found, v->size, 1, MAX_RANKS);
    r.rank = ranks_number(v->found, v->rank, 0, r.size - 1);
    int node = v->local_size ? 0 : ranks_number(v->found, "SLURM_NODEID", 0, r.size - 1);
    r.local_size = v->local_size ? ranks_number(v->found, v->local_size, 1, r.size)
                                 : ranks_slurm_tasks_on(getenv("SLURM_STEP_TASKS_PER_NODE"), node, r.size);
    r.local_rank = ranks_number(v->found, v->local_rank, 0, r.local_size - 1);
    return r;
}

static inline bool ranks_has(const RankVariables* v) {
    return getenv(v->size) || (v != &ranks_slurm && getenv(v->rank));
}

// Two launchers, one inside the other, must say the same.
static inline void ranks_require_same(RankInfo a, RankInfo b) {
    require(a.rank == b.rank && a.size == b.size, "%s says that this is rank %d of %d, %s that it is rank %d of %d;"
            " start with one, or unset the other's variables", a.found, a.rank, a.size, b.found, b.rank, b.size);
}

// torchrun under srun: srun starts one torchrun a node, so Slurm counts those, and torchrun the processes.
static inline bool ranks_torchrun_under_slurm(void) {
    const char *groups = getenv("GROUP_WORLD_SIZE"), *tasks = getenv("SLURM_STEP_NUM_TASKS");
    return groups && tasks && strcmp(groups, tasks) == 0;
}

// The first of Slurm's nodes: "gpu[07-12,20],login" gives gpu07.
static inline void ranks_first_node(const char* list, char* out, size_t size) {
    size_t n = 0;
    for (const char* p = list; *p && *p != ',' && n + 1 < size;) {
        if (*p != '[') { out[n++] = *p++; continue; }
        for (p++; isdigit((unsigned char)*p) && n + 1 < size; p++) out[n++] = *p;
        p += strcspn(p, "]");
        if (*p) p++;
    }
    out[n] = '\0';
}

// Where rank 0 listens, if the launcher says so. torchrun itself uses MASTER_PORT, so our port is the next one.
static inline void ranks_meeting(RankInfo* r) {
    char host[256] = "";
    const char *run = NULL;
    int port = 0;
    if (strcmp(r->found, "torchrun") == 0) {
        port = 1 + ranks_number(r->found, "MASTER_PORT", 1, 65534);
        snprintf(host, sizeof host, "%s", getenv("MASTER_ADDR") ? getenv("MASTER_ADDR") : "");
        require(host[0], "torchrun has not set MASTER_ADDR, the address of rank 0");
        run = getenv("TORCHELASTIC_RUN_ID");
    } else if (strcmp(r->found, "Slurm") == 0 && getenv("SLURM_STEP_NODELIST") && getenv("SLURM_JOB_ID")) {
        ranks_first_node(getenv("SLURM_STEP_NODELIST"), host, sizeof host);
        run = getenv("SLURM_JOB_ID");
        port = 20000 + (int)(strtoul(run, NULL, 10) % 20000);
    }
    if (host[0]) snprintf(r->meeting, sizeof r->meeting, "%d %.64s %s", port, run && run[0] ? run : "none", host);
}

// Rank 0 of 1, whatever started it.
static inline RankInfo ranks_alone(void) { return (RankInfo){ 0, 1, 0, 1, "started alone", "" }; }

// Dies if two launchers disagree, if one of them says something impossible,
// or if another MPI's launcher started several processes.
static inline RankInfo ranks_find(void) {
    bool openmpi = ranks_has(&ranks_openmpi), torchrun = ranks_has(&ranks_torchrun), slurm = ranks_has(&ranks_slurm);
    RankInfo r = ranks_alone();
    if (openmpi) {
        // mpirun inside a Slurm job starts its helpers by srun.
        // Ranks inherit those numbers, which are about the helpers.
        r = ranks_read(&ranks_openmpi);
        if (torchrun) ranks_require_same(r, ranks_read(&ranks_torchrun));
    } else if (torchrun) {
        r = ranks_read(&ranks_torchrun);
        if (slurm && !ranks_torchrun_under_slurm()) ranks_require_same(r, ranks_read(&ranks_slurm));
    } else if (slurm) r = ranks_read(&ranks_slurm);
    // Open MPI and srun --mpi=pmi2 or pmix also set PMI's variables,
    // and a shell that one of them started may still have them.
    if (!openmpi && !torchrun)
        launcher_require_known(r.size,
                               "start it with Open MPI's mpirun (`mpirun --version` names the MPI), torchrun or srun");
    if (r.size > 1) ranks_meeting(&r);
    return r;
}

// "rank 2", "ranks 0-2, 5 and 7": the ranks whose in[] is set.
static inline void ranks_text(const bool* in, int size, char* out, size_t capacity) {
    int spans = 0, done = 0, ranks = 0;
    for (int i = 0; i < size; i++) {
        ranks += in[i];
        spans += in[i] && (i == 0 || !in[i - 1]);
    }
    size_t n = (size_t)snprintf(out, capacity, ranks == 1 ? "rank " : ranks ? "ranks " : "no rank");
    for (int first = 0, last; first < size && n < capacity; first = last + 1) {
        last = first;
        if (!in[first]) continue;
        while (last + 1 < size && in[last + 1]) last++;
        const char* gap = done == 0 ? "" : done == spans - 1 ? " and " : ", ";
        n += (size_t)snprintf(out + n, capacity - n, "%s%d", gap, first);
        if (last > first && n < capacity) n += (size_t)snprintf(out + n, capacity - n, "-%d", last);
        done++;
    }
}
#endif
