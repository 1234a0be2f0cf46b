// test_diagnosis.c - the arithmetic of the diagnosis at a run's end: causes from made-up times of ranks, which add up to the step;
// and what --single-throughput reads and refuses. (test/tools/test_advise.py has the advice that follows.)
#include "../../llmc/run/diagnosis.h"
#include "../../llmc/base/rng.h"
#include "test_folder.h"

// ---- ranks with made-up times, in seconds ----
static RankSteps ranks[4];
static const RankSteps* const pointers[4] = { &ranks[0], &ranks[1], &ranks[2], &ranks[3] };

static void start(int steps, float seconds) {
    memset(ranks, 0, sizeof ranks);
    for (int q = 0; q < 4; q++) {
        ranks[q].steps = steps; ranks[q].pipe = -1;
        for (int s = 0; s < steps; s++) { ranks[q].seconds[s] = seconds; ranks[q].running[s] = -1; }
    }
}
static void op(int rank, const char* comm, int axis, CommKind kind, int step, float exposed, float busy) {
    Channel* c = rank_channel(&ranks[rank], comm, axis, kind);
    assert_non_null(c);
    c->exposed[step] = exposed; c->busy[step] = busy;
}
static double sum_of(const TimeBreakdown* c) { return breakdown_sum(c, CAUSE_COMPUTING, CAUSE_STEP); }
#define is(x, want) assert_near(x, want, 1e-6)
// Numbers, each with what it is to be.
#define are(...) do { \
        const double pairs_[][2] = { __VA_ARGS__ }; \
        for (size_t i_ = 0; i_ < COUNT(pairs_); i_++) is(pairs_[i_][0], pairs_[i_][1]); \
    } while (0)
TEST(who_waits_least_waits_for_communication_the_others_for_it) {
    TimeBreakdown c[4];
    static const float exposed[3] = { 10, 4, 7 };
    start(1, 100);
    for (int q = 0; q < 3; q++) op(q, "world", AXIS_DP, COMM_ALL_REDUCE, 0, exposed[q], exposed[q] + 2);
    breakdown_of_ranks(c, pointers, 3);
    for (int q = 0; q < 3; q++)
        are({ c[q].of[exposed_at(AXIS_DP, COMM_ALL_REDUCE)], 4 }, { c[q].of[CAUSE_COMMUNICATION + AXIS_DP], 6 });
    are({ c[0].of[CAUSE_WAITING], 6 }, { c[1].of[CAUSE_WAITING], 0 }, { c[2].of[CAUSE_WAITING], 3 },
        { c[0].of[CAUSE_COMPUTING], 90 }, { c[1].of[CAUSE_COMPUTING], 96 });
}

TEST(communicators_kinds_and_steps_are_apart) {
    TimeBreakdown c[4];
    start(2, 100);
    for (int q = 0; q < 4; q++) op(q, q < 2 ? "tp.0" : "tp.1", AXIS_TP, COMM_ALL_REDUCE, 0, (float)(q + 1), 0);
    op(0, "tp.0", AXIS_TP, COMM_ALL_GATHER, 0, 0.5f, 0); // the other rank waited for none
    op(1, "tp.0", AXIS_TP, COMM_ALL_GATHER, 0, 0, 0);
    for (int q = 0; q < 2; q++) op(q, "dp.0", AXIS_DP, COMM_ALL_REDUCE, q, 8, 0); // each is late once
    breakdown_of_ranks(c, pointers, 4);
    for (int q = 0; q < 4; q++) // 1 of two steps; 3, whose group has none that waited less
        is(c[q].of[exposed_at(AXIS_TP, COMM_ALL_REDUCE)], q < 2 ? 0.5 : 1.5);
    are({ c[0].of[exposed_at(AXIS_TP, COMM_ALL_GATHER)], 0 }, { c[0].of[exposed_at(AXIS_DP, COMM_ALL_REDUCE)], 0 },
        { c[0].of[CAUSE_WAITING], 4.25 }, { c[1].of[CAUSE_WAITING], 4.5 }, { c[2].of[CAUSE_WAITING], 0 });
}

TEST(a_pipeline_waits_for_messages_and_after_its_last_action) {
    TimeBreakdown c[4];
    start(1, 100);
    static const float until[4] = { 90, 60, 80, 80 };
    for (int q = 0; q < 4; q++) { ranks[q].pipe = q / 2; ranks[q].until[0] = until[q]; } // two pipelines
    op(0, "pp.0", AXIS_PP, COMM_RECV, 0, 20, 25);
    op(1, "pp.0", AXIS_PP, COMM_SEND, 0, 2, 5);
    op(0, "pp.0", AXIS_PP, COMM_ALL_REDUCE, 0, 1, 1);
    op(1, "pp.0", AXIS_PP, COMM_ALL_REDUCE, 0, 36, 36); // 30 of them until rank 0's last action, 5 because that is late afterwards
    op(2, "pp.1", AXIS_PP, COMM_ALL_REDUCE, 0, 1, 1);
    op(3, "pp.1", AXIS_PP, COMM_ALL_REDUCE, 0, 4, 4);   // the other pipeline's last action is no reason
    breakdown_of_ranks(c, pointers, 4);
    are({ c[0].of[CAUSE_BUBBLE], 20 }, { c[0].of[CAUSE_COMMUNICATION + AXIS_PP], 1 }, // what is received is another's message
        { c[1].of[exposed_at(AXIS_PP, COMM_SEND)], 2 }, { c[1].of[CAUSE_COMMUNICATION + AXIS_PP], 6 },
        { c[1].of[CAUSE_PER_TOKEN], 5 }, { c[1].of[CAUSE_BUBBLE], 30 }, { c[1].of[CAUSE_WAITING], 5 }, { c[3].of[CAUSE_BUBBLE], 0 },
        { c[3].of[CAUSE_WAITING], 3 });
}

TEST(what_is_neither_computing_nor_waiting_is_rest) {
    TimeBreakdown c[4];
    start(1, 100);
    for (int q = 0; q < 3; q++) {
        op(q, "world", AXIS_DP, COMM_ALL_REDUCE, 0, 20, 20);
        ranks[q].data[0] = 10;
    }
    ranks[0].running[0] = 50;
    ranks[1].running[0] = 90; // it was busy while it waited
    breakdown_of_ranks(c, pointers, 3);
    are({ c[0].of[CAUSE_DATA], 10 }, { c[0].of[CAUSE_COMPUTING], 50 }, { c[0].of[CAUSE_REST], 20 },
        { c[1].of[CAUSE_COMPUTING], 70 }, { c[1].of[CAUSE_REST], 0 }, { c[2].of[CAUSE_COMPUTING], 70 }, { c[2].of[CAUSE_REST], 0 }); // not known
}

static double uniform(void) {
    static uint64_t count;
    return random_uniform(1, 2, count++);
}
TEST(causes_add_up_whatever_ranks_did) {
    TimeBreakdown c[4];
    for (int round = 0; round < 50; round++) {
        start(7, 0);
        for (int q = 0; q < 4; q++) for (int s = 0; s < 7; s++) {
            ranks[q].pipe = round % 2 ? q / 2 : -1;
            ranks[q].until[s] = (float)uniform();
            ranks[q].data[s] = (float)uniform();
            ranks[q].running[s] = round % 3 ? (float)(3 * uniform()) : -1;
            ranks[q].seconds[s] = 30;
            for (int k = 0; k < COMM_BARRIER; k++) {
                op(q, q < 2 ? "tp.0" : "tp.1", AXIS_TP, (CommKind)k, s, (float)uniform(), (float)uniform());
                op(q, q % 2 ? "pp.1" : "pp.0", AXIS_PP, (CommKind)k, s, (float)uniform(), (float)uniform());
            }
        }
        breakdown_of_ranks(c, pointers, 4);
        for (int q = 0; q < 4; q++) {
            assert_true(fabs(sum_of(&c[q]) - 30) < 1e-5);
            for (int i = 0; i < CAUSES; i++) assert_true(c[q].of[i] >= 0);
            assert_true(breakdown_exposed(&c[q]) <= breakdown_communication(&c[q]) + 1e-6);
        }
        Diagnosis d = diagnose(pointers, 4);
        assert_true(fabs(sum_of(&d.mean) - d.mean.of[CAUSE_STEP]) < 1e-5);
    }
}

TEST(a_ring_waits_for_its_messages_and_for_slower_ranks) {
    TimeBreakdown c[3];
    start(1, 10);
    for (int q = 0; q < 3; q++) {
        op(q, "cp.0", AXIS_CP, COMM_RECV, 0, q == 1 ? 1 : 3, 4); // rank 1 found its message almost there
        op(q, "cp.0", AXIS_CP, COMM_SEND, 0, 0, 2);
    }
    breakdown_of_ranks(c, pointers, 3);
    are({ c[0].of[exposed_at(AXIS_CP, COMM_RECV)], 1 }, { c[0].of[CAUSE_WAITING], 2 }, { c[1].of[CAUSE_WAITING], 0 },
        { c[0].of[CAUSE_BUBBLE], 0 }, { c[0].of[CAUSE_COMMUNICATION + AXIS_CP], 3 }, { c[0].of[CAUSE_PER_TOKEN], 3 });
}

TEST(ranges_means_median_and_the_slowest_rank) {
    start(4, 10);
    ranks[0].seconds[2] = 50; // a hiccup
    for (int s = 0; s < 4; s++) for (int q = 0; q < 3; q++) op(q, "world", AXIS_DP, COMM_ALL_REDUCE, s, q == 1 ? 1 : 4, 4);
    Diagnosis d = diagnose(pointers, 3);
    assert_int_equal(d.slowest, 1);
    are({ d.seconds, 10 }, { d.first.of[CAUSE_STEP], 20 }, { d.least.of[CAUSE_STEP], 10 }, { d.most.of[CAUSE_STEP], 20 },
        { d.mean.of[CAUSE_STEP], 40 / 3.0 }, { d.least.of[CAUSE_WAITING], 0 }, { d.most.of[CAUSE_WAITING], 3 },
        { breakdown_sum(&d.slow, CAUSE_COMPUTING, CAUSE_EXPOSED), 9 },
        { breakdown_sum(&d.others, CAUSE_COMPUTING, CAUSE_EXPOSED), (16 + 6) / 2.0 }, { d.others.of[CAUSE_WAITING], 3 });
    for (int s = 0; s < 4; s++) for (int q = 0; q < 3; q++) ranks[q].running[s] = q == 1 ? 2 : 5;
    is(diagnose(pointers, 3).others.of[CAUSE_REST], (11 + 1) / 2.0); // not the slowest rank's, 7
    ranks[2].pipe = 0;
    for (int s = 0; s < 2; s++) op(1, "pp.0", AXIS_PP, COMM_RECV, s, 9, 9);
    Diagnosis piped = diagnose(pointers, 3);
    assert_int_equal(piped.slowest, 0); // the bubble is waiting, too
    is(piped.others.of[CAUSE_WAITING], 1.5);
    is(efficiency_communication(&d.mean), 31 / 3.0 / (31 / 3.0 + 4)); // (16 + 9 + 6) / 3 of computing
    is(efficiency_exposed(&d.mean), 31 / 3.0 / (31 / 3.0 + 1));
}

TEST(room_for_channels_ends) {
    RankSteps* r = &ranks[0];
    start(1, 1);
    for (int i = 0; i < DIAGNOSIS_CHANNELS; i++) {
        char name[24];
        snprintf(name, sizeof name, "tp.%d", i);
        assert_non_null(rank_channel(r, name, AXIS_TP, COMM_SEND));
    }
    assert_ptr_equal(rank_channel(r, "tp.1", AXIS_TP, COMM_SEND), &r->channels[1]);
    assert_null(rank_channel(r, "tp.1", AXIS_TP, COMM_RECV));
    assert_int_equal(rank_steps_bytes(r), sizeof *r);
}

// ---- --single-throughput ----
static const RunShape shape = { { 128, 257, 384, 2, 4, 64 }, 128, 8192, 4 };
typedef struct { const char *run, *steps; } File;
#define GOOD "\"world_size\":1,\"precision\":\"" FLOATX_NAME "\",\"layers\":2,\"heads\":4,\"channels\":64,\"vocabulary\":257"
#define T128 ",\"options\":{\"seq-len\":128}"
static const char* path_of(const File* f) {
    char text[2048] = "";
    if (f->run) snprintf(text, sizeof text, "{\"run\":{%s}}\n%s", f->run, f->steps);
    return write_file("metrics.jsonl", text, strlen(text));
}
#define STEP(n, tokens, rate) "{\"step\":" #n ",\"loss\":5,\"tokens\":" #tokens ",\"tokens_per_s\":" #rate "}\n"

TEST(a_file_of_one_rank_is_read) {
    File f = { "\"device\":\"CPU, 1 thread\"," GOOD T128,
               STEP(1, 2048, 900) "{\"step\":1,\"val_loss\":5}\n" STEP(2, 4096, 100) STEP(3, 6144, 500) STEP(4, 8192, 120) };
    SingleRun s = single_run_read(path_of(&f), &shape);
    is(s.tokens_per_second, 120); // the median without the first
    assert_string_equal(s.scaling, "weak");
    assert_string_equal(s.device, "CPU, 1 thread");
    f.steps = STEP(1, 8192, 1) STEP(2, 16384, 100) STEP(3, 24576, 200);
    s = single_run_read(path_of(&f), &shape);
    is(s.tokens_per_second, 150);
    assert_string_equal(s.scaling, "strong");
    f.steps = STEP(1, 2048, 1) STEP(2, 4096, 100) STEP(3, 12288, 200); // continued with larger steps
    assert_string_equal(single_run_read(path_of(&f), &shape).scaling, "strong");
    s = single_run_read("1234.5", &shape);
    is(s.tokens_per_second, 1234.5);
    assert_null(s.scaling);
    is(single_run_read("", &shape).tokens_per_second, 0);
}

TEST(what_cannot_be_compared_is_refused) {
    const char* two = STEP(1, 2048, 1) STEP(2, 4096, 100);
    static const char* const texts[] = { "0", "-5", "inf", "nan", "1e999", "/nowhere/metrics.jsonl", "12x" };
    for (int i = 0; i < 7; i++)
        expect_error(single_run_read(texts[i], &shape), texts[i],
                     i < 5 ? "must be a number above 0" : "neither a number of tokens per second above 0 nor a file");
    const struct { File f; const char* says; } cases[] = {
        { { NULL, "" }, "the file is empty" },
        { { "\"program\":\"x\"", two }, "its first line is not that of a metrics.jsonl" },
        { { "\"precision\":\"fp32\"", two }, "its first line is not that of a metrics.jsonl" },
        { { "\"world_size\":2,\"precision\":\"fp32\"", two }, "that run had 2 ranks; give a run on one rank" },
        { { "\"world_size\":1,\"precision\":\"int4\"", two }, "that run was in int4, this one is in " FLOATX_NAME },
        { { "\"world_size\":1,\"precision\":\"" FLOATX_NAME "\",\"layers\":3", two }, "that model has layers 3, this one 2" },
        { { GOOD ",\"options\":{\"seq-len\":64}", two }, "that run had --seq-len 64, this one has 128" },
        { { GOOD T128, STEP(1, 2048, 1) }, "that run had 1 step; the first does not count" },
        { { GOOD T128, STEP(1, 4096, 1) STEP(2, 8192, 1) }, "a step of that run had 4096 tokens; give one with --total-batch-size 8192"
          " (strong scaling) or 8192 / 4 ranks (weak scaling)" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char* path = path_of(&cases[i].f);
        expect_error(single_run_read(path, &shape), cases[i].says);
    }
}
