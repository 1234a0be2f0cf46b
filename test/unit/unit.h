/*
unit.h - a program of cmocka tests that register themselves. A test is named as the claim it makes:

    TEST(a_killed_rank_is_named_by_all_others_at_once) { assert_true(...); }

    build/test/test_control                all tests, in the order of the file
    build/test/test_control '*killed*'     those whose names match one of the patterns; pytest gives each its own process

A program may define before_all, after_all, before_each and after_each; they are not static. One with UNIT_OWN_MAIN runs what is
registered by itself.
*/
#ifndef TEST_UNIT_H
#define TEST_UNIT_H
#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

void before_all(void) __attribute__((weak));
void after_all(void) __attribute__((weak));
void before_each(void) __attribute__((weak));
void after_each(void) __attribute__((weak));

static struct { struct CMUnitTest tests[128]; int lines[128]; size_t count; } registered;

static int unit_set_up(void** state) { (void)state; if (before_each) before_each(); return 0; }
static int unit_tear_down(void** state) { (void)state; if (after_each) after_each(); return 0; }

// Keeps the tests in the order of their lines; a compiler may call constructors in any order.
static void unit_register(const char* name, CMUnitTestFunction function, int line) {
    size_t i = registered.count++;
    if (i == sizeof registered.lines / sizeof *registered.lines) abort();
    for (; i > 0 && registered.lines[i - 1] > line; i--) {
        registered.tests[i] = registered.tests[i - 1];
        registered.lines[i] = registered.lines[i - 1];
    }
    registered.tests[i] = (struct CMUnitTest){ name, function, unit_set_up, unit_tear_down, NULL };
    registered.lines[i] = line;
}

#define TEST(name) \
    static void test_##name(void** state); \
    __attribute__((constructor)) static void register_##name(void) { unit_register(#name, test_##name, __LINE__); } \
    static void test_##name(__attribute__((unused)) void** state)

#ifndef UNIT_OWN_MAIN
int main(int argc, char** argv) {
    struct CMUnitTest chosen[128];
    size_t count = 0;
    for (size_t i = 0; i < registered.count; i++) {
        int wanted = argc == 1;
        for (int k = 1; k < argc; k++) wanted |= fnmatch(argv[k], registered.tests[i].name, 0) == 0;
        if (wanted) chosen[count++] = registered.tests[i];
    }
    if (count == 0) { fprintf(stderr, "error: no test of this program has such a name\n"); return 1; }
    if (before_all) before_all();
    int failed = _cmocka_run_group_tests("tests", chosen, count, NULL, NULL);
    if (after_all) after_all();
    return failed;
}
#endif
#endif
