// test_report.c - the reports of predicted and measured bytes, in memory and between ranks: what differs, and by how much.
#include "../../llmc/run/report.h"
#include "../../llmc/run/report_pipeline.h"
#include "../../llmc/run/ranks.h"
#include "expect_death.h"
#include "world_alone.h"

// A child must end with this status, after a report that has these rows (most, or until NULL), however wide its columns are.
static void expect_report(Child c, int status, const char* const* rows, int most) {
    size_t n = 0;
    for (const char* p = c.out; *p; p++) if (*p != ' ' || p[1] != ' ') c.out[n++] = *p;
    c.out[n] = '\0';
    if (c.status != status) fail_msg("status %d: %s%s", c.status, c.out, c.err);
    for (int k = 0; k < most && rows[k]; k++) if (!strstr(c.out, rows[k])) fail_msg("there is no '%s' in %s", rows[k], c.out);
    child_free(&c);
}

// ---- memory of a run of one rank ----
typedef struct { size_t predicted[MEMORY_KINDS], taken[MEMORY_KINDS], briefly; int status; const char* rows[3]; } MemoryCase;

// Takes bytes of parameters briefly, then what is to be taken. Exits with 0 if the report finds all as predicted, else with 2.
static void take_and_report(const MemoryCase* t) {
    static Ranks w;
    device_init(0, 1);
    device_memory_limit(memory_sum(t->taken) + t->briefly); // the device's, without what is offloaded
    void* first = device_alloc(t->briefly, MEMORY_PARAMETERS);
    for (int k = 0; k < MEMORY_KINDS; k++) if (k != MEMORY_OFFLOADED && t->taken[k] > 0) device_alloc(t->taken[k], (MemoryKind)k);
    device_free(first);
    char* state = offload_alloc(t->taken[MEMORY_OFFLOADED]);
    for (size_t i = 0; i < t->taken[MEMORY_OFFLOADED]; i++) require(state[i] == 0, "byte %zu of offloaded memory is %d", i, state[i]);
    offload_free(offload_alloc(1000));
    offload_free(NULL);
    control_init(&w.control, ranks_alone(), 1, "");
    exit(report_memory(&w, t->predicted) ? 0 : 2);
}
TEST(memory_that_is_not_as_predicted_is_found_where_it_is) {
    static const MemoryCase cases[] = {
        { { 4000, 4000, 8000, 123456, 0, 640 }, { 4000, 4000, 8000, 123457, 0, 640 }, 0, 2,
          { " activations 123 kB 123 kB 1 bytes more than predicted\n", " total 140 kB 140 kB 1 bytes more than predicted\n",
            " gradients 4.0 kB 4.0 kB as predicted\n" } },
        // at the end all is as predicted, at the peak it is not; and the other way round
        { { 4000 }, { 4000 }, 1, 2, { " total 4.0 kB 4.0 kB as predicted\n", " peak 4.0 kB 4.0 kB 1 bytes more than predicted\n" } },
        { { 4000 }, { 0 }, 4000, 2,
          { " parameters 4.0 kB 0 B 4000 bytes less than predicted\n", " peak 4.0 kB 4.0 kB as predicted\n" } },
        // offloaded memory is beside the device's
        { { 4000, [MEMORY_OFFLOADED] = 9000 }, { 4000, [MEMORY_OFFLOADED] = 9000 }, 0, 0, { " total 4.0 kB 4.0 kB as predicted\n",
            " peak 4.0 kB 4.0 kB as predicted\n state on the host 9.0 kB 9.0 kB as predicted\n" } },
        { { 4000, [MEMORY_OFFLOADED] = 9000 }, { 4000, [MEMORY_OFFLOADED] = 9001 }, 0, 2,
          { " state on the host 9.0 kB 9.0 kB 1 bytes more than predicted\n" } },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        expect_report(child_does(take_and_report(&cases[i])), cases[i].status, cases[i].rows, 3);
}

// Takes 60 of 100 bytes, then as many as are asked for; frees and takes them again, because only bytes in use count.
static void allocate_within_limit(size_t more) {
    device_init(0, 1);
    device_memory_limit(100);
    void* first = device_alloc(60, MEMORY_PARAMETERS);
    device_free(device_alloc(more, MEMORY_ACTIVATIONS));
    device_free(device_alloc(more, MEMORY_COMMUNICATION));
    device_free(first);
    device_memory_limit(0);
    device_free(device_alloc(1000, MEMORY_PARAMETERS));
}
TEST(memory_up_to_its_limit_can_be_had_and_not_a_byte_more) {
    const size_t too_many[] = { 41, SIZE_MAX };
    expect_success(allocate_within_limit(40));
    for (int i = 0; i < 2; i++)
        expect_error(allocate_within_limit(too_many[i]), "more for activations", "(0.000 GB parameters)", "over --memory-limit 1e-07 GB");
}

// ---- memory of several ranks ----
// Of ranks that predict and hold so many bytes, of which rank `wrong` holds one less, -1: none, this rank's memory is shown.
static void assert_memory_of(const size_t* bytes, int N, int wrong, int rank, bool named) {
    RankMemory given[4];
    memset(given, 0, sizeof given);
    for (int q = 0; q < N; q++) {
        given[q].rank = q;
        given[q].predicted[MEMORY_GRADIENTS] = given[q].measured[MEMORY_GRADIENTS] = given[q].total = given[q].peak = bytes[q];
        given[q].measured[MEMORY_GRADIENTS] -= q == wrong;
    }
    RankMemory m = memory_choose(given, N);
    assert_true(m.rank == rank && m.named == named && memory_as_predicted(&m) == (wrong < 0));
}
TEST(the_memory_of_a_rank_that_is_not_as_predicted_is_shown_else_of_the_one_that_has_most) {
    const size_t alike[] = { 5000000, 5000001, 4999999 }, differ[] = { 5000000, 9000000, 7000000 };
    assert_memory_of(alike, 3, -1, 0, false); // nobody can tell them apart
    assert_memory_of(differ, 3, -1, 1, true);
    for (int wrong = 0; wrong < 3; wrong++) {
        assert_memory_of(differ, 3, wrong, wrong, true);
        assert_memory_of(alike, 3, wrong, wrong, true);
    }
    assert_memory_of(differ, 1, 0, 0, false);
}
TEST(a_range_of_bytes_is_one_number_where_its_ends_look_alike) {
    char text[80];
    assert_string_equal(format_bytes_range(text, sizeof text, 8900000, 8901000), "8.9 MB");
    assert_string_equal(format_bytes_range(text, sizeof text, 8900000, 16800000), "8.9 MB to 16.8 MB");
}

// ---- steps, in a world of this rank alone ----
TEST(a_step_counts_what_is_sent_in_it) {
    static Ranks w;
    world_alone(&w.comm, &w.control);
    assert_true(report_sent(&w, 5)); // nothing was sent in a run of no steps
    w.comm.stats[COMM_ALL_GATHER].bytes_times_N = 99; // by what comes before the steps
    static const unsigned long long sent[] = { 40, 60, 20, 50 }, least[] = { 41, 41, 21, 21 }, most[] = { 41, 61, 61, 61 };
    for (int i = 0; i < 4; i++) {
        static float state[1];
        ranks_count_begin(&w, 1 + i, state);
        w.comm.stats[COMM_ALL_GATHER].bytes_times_N += sent[i];
        w.comm.stats[COMM_SEND].bytes_times_N += 1;
        ranks_count_end(&w, 0.25);
        w.comm.stats[COMM_ALL_GATHER].bytes_times_N += 7; // between steps, by an evaluation
        assert_true(w.bytes == 1.0 + (double)sent[i] && w.sent.min == (double)least[i] && w.sent.max == (double)most[i]);
        assert_int_equal(w.steps, 1 + i);
    }
    assert_true(w.seconds_total == 1);
    world_end(&w.comm);
}

#define is(x, want) assert_near(x, want, 1e-12)
// Two steps of 2 stages and 4 micro-batches. Rank 0: F 10 ms, D 30; rank 1: F 14, D 42.
TEST(a_bubble_is_what_ranks_wait_for_beside_its_formula) {
    const ActionSums ranks[] = { { { .080, .240, 0, 0 }, .600, { 8, 8, 0, 0 }, 2 },
                                 { { .112, .336, 0, 0 }, .500, { 8, 8, 0, 0 }, 2 } };
    Pipeline l = { SCHEDULE_1F1B, 2, 4, 1, 0, 0 }, interleaved = { SCHEDULE_INTERLEAVED, 3, 3, 2, 0, 0 }, zb_h1 = { SCHEDULE_ZB_H1, 3, 4, 1, 0, 0 };
    Bubble b = bubble_of(l, ranks, 2);
    is(b.busy, .192); is(b.min, .160); is(b.max, .224);
    is(b.until, .300);
    is(b.formula, .048); // (p-1)(F + D), on average
    // 3 stages, 3 micro-batches in 2 chunks, each F 4 ms and D 8: (p-1) 2(F + D)/2
    const ActionSums chunks = { { .024, .048, 0, 0 }, .1, { 6, 6, 0, 0 }, 1 };
    is(bubble_of(interleaved, &chunks, 1).formula, .024);
    // F 10, B 12, W 8: (p-1)(F + B - W)
    const ActionSums cut = { { .04, 0, .048, .032 }, .2, { 4, 0, 4, 4 }, 1 };
    is(bubble_of(zb_h1, &cut, 1).formula, .028);
}

static void sleep_ms(double ms) {
    struct timespec t = { 0, (long)(1e6 * ms) };
    nanosleep(&t, NULL);
}
// Three steps of two actions; the first one does not count. Between the actions, 30 ms are a wait for a message.
TEST(times_of_actions_leave_out_the_first_step_and_waits) {
    static Ranks w;
    ActionTimes t = { 0 };
    Messages m = { .received = NO_OP, .forward.sent = NO_OP, .back.sent = NO_OP };
    Stages y = { 0, 1, 1, 1, { 2 }, { 0, 2 }, 2, { .emulate = "" } };
    world_alone(&w.comm, &w.control);
    action_times_init(&t, &w, &y, &m);
    for (int step = 0; step < 3; step++) {
        flight_recorder_step(w.comm.world->recorder, step + 1);
        for (int i = 0; i < 2; i++) { // as long as the loop lasts, 50 ms
            Action a = { i == 0 ? ACT_FORWARD : ACT_BACKWARD, 0, 0 };
            action_begin(&t, a);
            sleep_ms(10);
            action_end(&t, a);
            sleep_ms(i == 0 ? 30 : 0);
        }
        messages_finish(&m);
    }
    action_times_settle(&t);
    double forward = t.sums.seconds[ACT_FORWARD] / 2, backward = t.sums.seconds[ACT_BACKWARD] / 2, until = t.sums.until / 2;
    assert_true(t.sums.steps == 2 && t.sums.done[ACT_FORWARD] == 2 && t.sums.done[ACT_BACKWARD] == 2);
    assert_true(forward >= .01 && backward >= .01 && until >= .05 - 1e-9);
    assert_true(forward + backward <= until - .03 + 1e-9); // the wait is in neither
    free(t.actions);
    world_end(&w.comm);
}

// ---- bytes sent, which each rank predicts and counts for itself ----
// N ranks predict and send so much, and in a second step `more`. The first that differs is shown, else the one that sent most.
typedef struct { int N; double predicted[3], sent[3], more[3]; int status; const char* row; } RanksSent;
static bool report_of(const RanksSent* t) {
    SentBytes all[3];
    for (int q = 0; q < t->N; q++)
        all[q] = (SentBytes){ t->predicted[q], t->sent[q] + fmin(0, t->more[q]), t->sent[q] + fmax(0, t->more[q]) };
    return report_sent_by(all, t->N);
}
TEST(every_rank_must_send_as_it_predicted_in_every_step) {
    static const RanksSent cases[] = {
        { 3, { 5000, 5000, 5000 }, { 5000, 5000, 5000 }, { 0 }, 0,
          "sent per rank and step predicted measured\n bytes 5.0 kB 5.0 kB as predicted\n" },
        { 3, { 32 / 3.0, 32 / 3.0, 32 / 3.0 }, { 10.6666, 10.6667, 32 / 3.0 }, { 0 }, 0, " bytes 11 B 11 B as predicted\n" },
        // as in a pipeline; then one or two that are not as predicted, though another sends more
        { 3, { 5000, 9000, 0 }, { 5000, 9000, 0 }, { 0 }, 0,
          "sent a step by rank 1, most predicted measured\n bytes 9.0 kB 9.0 kB as predicted\n" },
        { 3, { 5000, 9000, 0 }, { 5004, 9000, 0 }, { 0 }, 2, " bytes 5.0 kB 5.0 kB 4 bytes more than predicted\n" },
        { 3, { 5000, 9000, 0 }, { 5000, 9004, 0 }, { 0 }, 2, " bytes 9.0 kB 9.0 kB 4 bytes more than predicted\n" },
        { 3, { 5000, 9000, 0 }, { 5000, 9000, 4 }, { 0 }, 2, " bytes 0 B 4 B 4 bytes more than predicted\n" },
        { 3, { 5000, 9000, 0 }, { 5001, 9000, 9999 }, { 0 }, 2, "sent a step by rank 0 predicted" },
        { 3, { 5000, 9000, 0 }, { 5000, 9001, 9999 }, { 0 }, 2, "sent a step by rank 1 predicted" },
        // in one of its steps; and as many in all
        { 3, { 5000, 9000, 0 }, { 5000, 9000, 0 }, { -8 }, 2, " bytes 5.0 kB 5.0 kB 8 bytes less than predicted\n" },
        { 3, { 5000, 9000, 0 }, { 5000, 9000, 0 }, { 8 }, 2, " bytes 5.0 kB 5.0 kB 8 bytes more than predicted\n" },
        { 2, { 5000, 9000 }, { 9000, 5000 }, { 0 }, 2, " bytes 5.0 kB 9.0 kB 4000 bytes more than predicted\n" }
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        expect_report(child_does(exit(report_of(&cases[i]) ? 0 : 2)), cases[i].status, &cases[i].row, 1);
}
