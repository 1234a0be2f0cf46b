// claims.h - tests that register themselves. A test is named as the claim it makes: CLAIM(the_sum_is_that_of_all_ranks) { ... }.
// unit.h runs claims under cmocka; programs that cannot have it, on GPUs or of several ranks, run them by themselves.
#ifndef TEST_CLAIMS_H
#define TEST_CLAIMS_H
#include <fnmatch.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct { const char* name; void (*run)(void); int number; } Claim;
static Claim claims[128];
static int num_claims;

#define COUNT(array) (sizeof(array) / sizeof *(array))

// Keeps claims in the order of the text; a compiler may call constructors in any order.
static inline void claim_add(const char* name, void (*run)(void), int number) {
    int i = num_claims++;
    if (i == (int)COUNT(claims)) abort();
    for (; i > 0 && claims[i - 1].number > number; i--) claims[i] = claims[i - 1];
    claims[i] = (Claim){ name, run, number };
}
#define CLAIM(name) \
    static void claim_##name(void); \
    __attribute__((constructor)) static void register_##name(void) { claim_add(#name, claim_##name, __COUNTER__); } \
    static void claim_##name(void)

// Whether a claim's name matches one of the patterns; without patterns every one is wanted.
static inline bool claim_wanted(const Claim* c, int count, char** patterns) {
    bool wanted = count == 0;
    for (int k = 0; k < count; k++) wanted |= fnmatch(patterns[k], c->name, 0) == 0;
    return wanted;
}
#endif
