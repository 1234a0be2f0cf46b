/*
count.h - a program that is compiled with -include test/split/count.h says at its end, on stderr, how many forward passes of a block it
has done. Each has one attention.
*/
#include "../../llmc/comm/comm.h"
#include "../../llmc/device/layers.h"

static long count_of_blocks;
static void count_say(void) { fprintf(stderr, "forward passes of blocks: %ld\n", count_of_blocks); }
static inline void count_one(void) {
    if (count_of_blocks++ == 0) require(atexit(count_say) == 0, "cannot register a function with atexit");
}
#define attention_forward(...) (count_one(), attention_forward(__VA_ARGS__))
