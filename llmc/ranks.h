/*
ranks.h - who this process is among those that were started together.

mpirun (OpenMPI), torchrun and Slurm's srun each tell a process its rank by variables of their own. A process that none of
them started is rank 0 of 1.
*/
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H
#include "common.h"

typedef struct {
    int rank, size;             // this process, and how many there are
    int local_rank, local_size; // the same among those on this machine
    const char* found;          // "OpenMPI", "torchrun", "Slurm", "started alone"
} RankInfo;

// Dies if two launchers say different things, or one of them something that cannot be.
static inline RankInfo ranks_find(void);
#endif
