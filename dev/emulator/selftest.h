// selftest.h - shared by the self-tests: mistakes by name, each with a twin that lacks it, and checks of numbers.
#ifndef CUDA_EMULATOR_SELFTEST_H
#define CUDA_EMULATOR_SELFTEST_H
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

static void expect(const char* what, double is, double should) {
    if (is == should) return; // NaN is not
    printf("selftest: %s: %g, and %g was expected\n", what, is, should);
    exit(1);
}
struct Mistake { const char* name; std::function<void()> twin, mistake; }; // twin empty: there is none
// PROGRAM good: all twins, and `good`. PROGRAM NAME: one mistake. Returns the status.
static int run_selftest(int argc, char** argv, const std::vector<Mistake>& mistakes, void (*good)(void)) {
    bool all = argc == 2 && !strcmp(argv[1], "good"), found = all;
    for (const Mistake& m : mistakes) {
        if (all && m.twin) m.twin();
        if (argc != 2 || strcmp(argv[1], m.name)) continue;
        found = true;
        m.mistake();
    }
    if (all) good();
    if (!found) fprintf(stderr, "usage: %s good|NAME, the name of a mistake\n", argv[0]);
    return found ? 0 : 2;
}
#endif
