// test_lr_schedule.c - the learning rate where the schedule changes and in between; the loss scale after good and bad steps.
#include "../../llmc/model/lr_schedule.h"
#include "expect_death.h"

#define assert_rate(x, want) assert_near(x, want, 1e-12 * fabs((double)(want)))

static Options options(int schedule, long long steps, long long warmup, double final_fraction) {
    Options o = options_defaults();
    o.lr = 0.5; o.lr_schedule = schedule; o.steps = steps; o.warmup_steps = warmup; o.final_lr_fraction = final_fraction;
    return o;
}
TEST(warmup_rises_linearly_and_reaches_the_peak_in_its_last_step) {
    for (int schedule = SCHEDULE_COSINE; schedule <= SCHEDULE_WSD; schedule++) {
        Options o = options(schedule, 100, 10, 0.1);
        for (int step = 0; step < 10; step++) assert_rate(learning_rate(&o, step), 0.5 * (step + 1) / 10);
        assert_rate(learning_rate(&o, 10), 0.5); // and the descent starts from there
    }
}

TEST(each_schedule_falls_in_its_way_after_warmup) {
    Options cosine = options(SCHEDULE_COSINE, 111, 10, 0.1); // 100 steps from the peak to the end
    assert_rate(learning_rate(&cosine, 60), 0.5 * 0.55);     // half way in time is half way down
    assert_rate(learning_rate(&cosine, 35), 0.5 * (0.1 + 0.9 * 0.5 * (1 + sqrt(0.5))));
    assert_rate(learning_rate(&cosine, 110), 0.05);
    Options linear = options(SCHEDULE_LINEAR, 111, 10, 0.1), constant = options(SCHEDULE_CONSTANT, 100, 10, 0.1),
        wsd = options(SCHEDULE_WSD, 100, 10, 0.1);
    for (int step = 10; step <= 110; step++) assert_rate(learning_rate(&linear, step), 0.5 * (1 - 0.9 * (step - 10) / 100.0));
    for (int step = 10; step < 100; step++) {
        assert_rate(learning_rate(&constant, step), 0.5);
        assert_rate(learning_rate(&wsd, step), step < 80 ? 0.5 : 0.5 * (1 - 0.9 * (step - 79) / 20.0)); // over the last fifth
    }
}

TEST(the_last_step_has_the_final_learning_rate_and_later_ones_keep_it) {
    const int schedules[] = { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD };
    for (int k = 0; k < 3; k++) for (long long steps = 7; steps < 1000; steps = 3 * steps + 1) {
        Options o = options(schedules[k], steps, 1, 0.25);
        assert_rate(learning_rate(&o, steps - 1), 0.125);
        assert_rate(learning_rate(&o, steps + 1000), 0.125);
        o.final_lr_fraction = 0;
        assert_rate(learning_rate(&o, steps - 1), 0);
    }
}

TEST(every_length_of_run_and_warmup_gives_a_sensible_rate) {
    for (int schedule = SCHEDULE_COSINE; schedule <= SCHEDULE_WSD; schedule++) for (long long steps = 0; steps <= 12; steps++) {
        for (long long warmup = 0; warmup <= 14; warmup++) {
            Options o = options(schedule, steps, warmup, 0.1);
            for (long long step = 0; step < steps + 3; step++) {
                double lr = learning_rate(&o, step);
                assert_true(lr > 0 && lr <= 0.5); // fails on NaN
                if (step > warmup) assert_true(lr <= learning_rate(&o, step - 1));
            }
        }
    }
}

// ---- loss scale ----
TEST(the_scale_doubles_after_an_interval_of_good_steps_and_an_overflow_halves_it) {
    LossScaler s = { .scale = 1024, .interval = 3 };
    const bool finite[] = { true, true, true, true, true, true, true, true, false, true, true, true, false, false, true };
    const double expected[] = { 1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 2048, 2048, 2048, 4096, 2048, 1024, 1024 };
    const int bad[] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 0 };
    for (int i = 0; i < 15; i++) {
        loss_scaler_update(&s, finite[i]);
        assert_rate(s.scale, expected[i]);
        assert_int_equal(s.bad_in_a_row, bad[i]);
    }
}

TEST(the_scale_stays_a_finite_float_of_at_least_one) {
    LossScaler s = { .scale = 65536, .interval = 1 };
    for (int i = 0; i < 50; i++) loss_scaler_update(&s, false);
    assert_rate(s.scale, 1);
    assert_int_equal(s.bad_in_a_row, 50);
    for (int i = 0; i < 1000; i++) loss_scaler_update(&s, true);
    assert_true(s.scale > 1e9 && isfinite((float)s.scale));
}

TEST(without_an_interval_the_scale_is_fixed) {
    LossScaler s = { .scale = 1 };
    for (int i = 0; i < 5000; i++) loss_scaler_update(&s, i % 1000 != 0);
    loss_scaler_update(&s, false);
    assert_rate(s.scale, 1);
    assert_int_equal(s.bad_in_a_row, 1);
}

TEST(only_fp16_is_scaled) {
    Options o = options_defaults();
    o.loss_scale = 4096; o.loss_scale_interval = 7;
    LossScaler s = loss_scaler_init(&o);
    bool scaled = FLOATX_DTYPE == DTYPE_F16;
    assert_rate(s.scale, scaled ? 4096 : 1);
    assert_int_equal(s.interval, scaled ? 7 : 0);
}
