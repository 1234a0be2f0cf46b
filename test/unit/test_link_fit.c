// test_link_fit.c - the latency and the bandwidth of a sweep.
#include "../../dev/kernels/comm/link_fit.h"
#include "expect_death.h"

TEST(a_line_through_the_times_is_found_within_one_percent) {
    Fit f = { 0 };
    double alpha = 0, beta = 0;
    for (double bytes = 64; bytes < 1e7; bytes *= 4) fit_add(&f, bytes, 5e-6 + 2e-10 * bytes);
    assert_true(fit_solve(&f, &alpha, &beta));
    assert_near(alpha, 5e-6, 5e-8);
    assert_near(beta, 2e-10, 2e-12); // the largest size has not quite this bandwidth, and the fit has no more
    fit_free(&f);
}

TEST(small_messages_that_were_held_up_count_no_more_than_a_larger_one) {
    const double bytes[] = { 65536, 262144, 1048576, 4194304, 16777216 };
    const double us[] = { 25000, 18, 12000, 140, 900 }; // two sizes met a pause of the scheduler
    Fit held_up = { 0 }, quiet = { 0 };
    double alpha[2] = { 0 }, beta[2] = { 0 };
    for (size_t k = 0; k < COUNT(us); k++) {
        fit_add(&held_up, bytes[k], 1e-6 * us[k]);
        fit_add(&quiet, bytes[k], k == 0 ? 18e-6 : k == 2 ? 140e-6 : 1e-6 * us[k]);
    }
    assert_true(fit_solve(&held_up, &alpha[0], &beta[0]));
    assert_true(fit_solve(&quiet, &alpha[1], &beta[1]));
    assert_near(alpha[0], alpha[1], 0);
    assert_near(beta[0], beta[1], 0);
    fit_free(&held_up);
    fit_free(&quiet);
}

TEST(the_fit_has_no_bandwidth_that_was_not_measured) {
    // flat, then a steep rise that ends: the best line with any slope would have 4 times the largest bandwidth
    const double bytes[] = { 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288 }, us[] = { 320, 330, 315, 340, 320, 325, 330, 345, 350 };
    Fit f = { 0 };
    double alpha = 0, beta = 0, fastest = 0;
    for (size_t k = 0; k < COUNT(us); k++) {
        fit_add(&f, bytes[k], 1e-6 * us[k]);
        fastest = fmax(fastest, bytes[k] / (1e-6 * us[k]));
    }
    assert_true(fit_solve(&f, &alpha, &beta));
    assert_near(1 / beta, fastest, 1e-9 * fastest);
    assert_in_range((long long)(1e9 * alpha), 200000, 330000);
    fit_free(&f);
}

TEST(latency_is_never_negative_and_then_bandwidth_is_no_more_than_measured_either) {
    Fit f = { 0 };
    double alpha = 0, beta = 0;
    fit_add(&f, 100, 1e-6);
    fit_add(&f, 1000, 20e-6);
    fit_add(&f, 10000, 300e-6);
    assert_true(fit_solve(&f, &alpha, &beta));
    assert_near(alpha, 0, 0);
    assert_true(1 / beta <= 1e8);
    fit_free(&f);
}

TEST(one_size_or_times_that_do_not_rise_have_no_line) {
    Fit f = { 0 };
    double alpha = 0, beta = 0;
    fit_add(&f, 64, 1e-6);
    assert_false(fit_solve(&f, &alpha, &beta));
    fit_add(&f, 64, 2e-6);
    assert_false(fit_solve(&f, &alpha, &beta));
    Fit falls = { 0 };
    fit_add(&falls, 64, 2e-6);
    fit_add(&falls, 128, 1e-6);
    assert_false(fit_solve(&falls, &alpha, &beta));
    fit_free(&f);
    fit_free(&falls);
}
