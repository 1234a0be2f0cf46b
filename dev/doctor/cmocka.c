// cmocka: a test group of one passing test. The library has no function for its version; the exit status is the answer.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

static void one_and_one_are_two(void** state) { (void)state; assert_int_equal(1 + 1, 2); }

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(one_and_one_are_two) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
