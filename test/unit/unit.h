/*
unit.h - a program of cmocka tests that register themselves (claims.h). A test is named as the claim it makes:

    TEST(a_killed_rank_is_named_by_all_others_at_once) { assert_true(...); }

    build/test/test_control                all tests, in the order of the file
    build/test/test_control '*killed*'     those whose names match one of the patterns; pytest gives each its own process

A program may define before_all, after_all, before_each and after_each; they are not static.
*/
#ifndef TEST_UNIT_H
#define TEST_UNIT_H
#include "claims.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

void before_all(void) __attribute__((weak));
void after_all(void) __attribute__((weak));
void before_each(void) __attribute__((weak));
void after_each(void) __attribute__((weak));

static int unit_set_up(void** state) { (void)state; if (before_each) before_each(); return 0; }
static int unit_tear_down(void** state) { (void)state; if (after_each) after_each(); return 0; }
static void unit_run(void** claim) { ((const Claim*)*claim)->run(); }
#define TEST(name) CLAIM(name)

// What a variable has is freed at the end of its block: FREED char* text = ...; FREED_BY(tokenizer_free) Tokenizer t;
static inline void free_pointer(void* variable) { free(*(void**)variable); }
#define FREED_BY(function) __attribute__((cleanup(function)))
#define FREED FREED_BY(free_pointer)

// |got - want| <= tolerance; NaN fails
static inline void expect_near(const char* what, double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%s: got %.17g, want %.17g within %.3g", what, got, want, tolerance);
}
#define assert_near(x, want, tolerance) expect_near(#x, x, want, tolerance)

int main(int argc, char** argv) {
    struct CMUnitTest chosen[COUNT(claims)];
    size_t count = 0;
    for (int i = 0; i < num_claims; i++) {
        if (!claim_wanted(&claims[i], argc - 1, argv + 1)) continue;
        chosen[count++] = (struct CMUnitTest){ claims[i].name, unit_run, unit_set_up, unit_tear_down, &claims[i] };
    }
    if (count == 0) { fprintf(stderr, "error: no test of this program has such a name\n"); return 1; }
    if (before_all) before_all();
    int failed = _cmocka_run_group_tests("tests", chosen, count, NULL, NULL);
    if (after_all) after_all();
    return failed;
}
#endif
