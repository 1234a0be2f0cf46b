// MPI: the ranks add up their numbers; rank 0 prints the library's version.
#include <mpi.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char** argv) {
    int rank, size, sum = 0, length;
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Get_library_version(version, &length);
    if (rank == 0) printf("%.*s, %d ranks reach each other\n", (int)strcspn(version, ",\n"), version, size);
    MPI_Finalize();
    return !(size == 2 && sum == 1);
}
