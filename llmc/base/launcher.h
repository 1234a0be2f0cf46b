/*
launcher.h - refuses to start as one of several processes that do not know of each other: each would train the whole
model.
*/
#ifndef LLMC_LAUNCHER_H
#define LLMC_LAUNCHER_H
#include "common.h"

// Dies if a launcher's variable implies more than `size` processes.
// first: 0 if it counts them, 1 if it numbers them from 0.
static inline void launcher_require(const char* variable, int first, int size, const char* remedy) {
    const char* text = getenv(variable);
    require(text == NULL || atoi(text) + first <= size,
            "%s=%s: a launcher has started this program as one of several processes, and each would train by itself; "
            "%s, or unset %s",
            variable, text ? text : "", remedy, variable);
}
// The shell that `srun -n 8 --pty` starts as task 0 inherits Slurm's counts, but starts programs as single processes.
static inline bool launcher_is_slurm_shell(void) {
    return getenv("SLURM_PTY_PORT") && getenv("SLURM_PROCID") && atoi(getenv("SLURM_PROCID")) == 0;
}
// launcher_require() for launchers whose ranks our programs cannot join: mpiexec of MPICH and of Intel MPI,
// and prterun without Open MPI.
static inline void launcher_require_known(int size, const char* remedy) {
    if (!launcher_is_slurm_shell()) launcher_require("PMI_SIZE", 0, size, remedy);
    launcher_require("PMI_RANK", 1, size, remedy);
    launcher_require("MPI_LOCALNRANKS", 0, size, remedy);
    launcher_require("PMIX_RANK", 1, size, remedy);
}
#endif
