// world_alone.h - a world of one rank, which is all that a test of one process needs.
#ifndef TEST_WORLD_ALONE_H
#define TEST_WORLD_ALONE_H
#include "../../llmc/comm/comm.h"
#include <omp.h>

static inline void world_alone(Comm* world, Control* control) {
    const CommOptions o = { .timeout = 60, .out = "" };
    device_init(0, 1);
    omp_set_num_threads(1); // a child of this process would wait for threads that it does not have
    comm_init(world, &o, ranks_alone(), control);
}
// Dies if a communicator is left.
static inline void world_end(Comm* world) {
    comm_free(world);
    device_shutdown();
}
#endif
