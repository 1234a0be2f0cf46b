// test_diagnosis.c - the arithmetic of the diagnosis at a run's end: causes from made-up times of ranks, which add up to the step; the
// advice for each of them; and what --single-throughput reads and refuses.
#include "../../llmc/run/diagnosis.h"
#include "../../llmc/run/single_run.h"
#include "../../llmc/base/rng.h"
#include "test_folder.h"
#include <math.h>

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
static double sum_of(const Causes* c) { return c->compute + c->rest + causes_exposed(c) + c->bubble + c->waiting + c->data; }
#define is(x, expected) do { \
        double x_ = (x), expected_ = (expected); \
        if (!(fabs(x_ - expected_) < 1e-6)) fail_msg(#x " is %g, and is to be %g", x_, expected_); \
    } while (0)
// Numbers, each with what it is to be.
#define are(...) do { \
        const double pairs_[][2] = { __VA_ARGS__ }; \
        for (size_t i_ = 0; i_ < sizeof pairs_ / sizeof pairs_[0]; i_++) is(pairs_[i_][0], pairs_[i_][1]); \
    } while (0)
TEST(who_waits_least_waits_for_communication_the_others_for_it) {
    Causes c[4];
    static const float exposed[3] = { 10, 4, 7 };
    start(1, 100);
    for (int q = 0; q < 3; q++) op(q, "world", MESH_DP, COMM_ALL_REDUCE, 0, exposed[q], exposed[q] + 2);
    causes_of_ranks(c, pointers, 3);
    for (int q = 0; q < 3; q++) are({ c[q].exposed[MESH_DP][COMM_ALL_REDUCE], 4 }, { c[q].communication[MESH_DP], 6 });
    are({ c[0].waiting, 6 }, { c[1].waiting, 0 }, { c[2].waiting, 3 }, { c[0].compute, 90 }, { c[1].compute, 96 });
}

TEST(communicators_kinds_and_steps_are_apart) {
    Causes c[4];
    start(2, 100);
    for (int q = 0; q < 4; q++) op(q, q < 2 ? "tp.0" : "tp.1", MESH_TP, COMM_ALL_REDUCE, 0, (float)(q + 1), 0);
    op(0, "tp.0", MESH_TP, COMM_ALL_GATHER, 0, 0.5f, 0); // the other rank waited for none
    op(1, "tp.0", MESH_TP, COMM_ALL_GATHER, 0, 0, 0);
    for (int q = 0; q < 2; q++) op(q, "dp.0", MESH_DP, COMM_ALL_REDUCE, q, 8, 0); // each is late once
    causes_of_ranks(c, pointers, 4);
    for (int q = 0; q < 4; q++) // 1 of two steps; 3, whose group has none that waited less
        is(c[q].exposed[MESH_TP][COMM_ALL_REDUCE], q < 2 ? 0.5 : 1.5);
    are({ c[0].exposed[MESH_TP][COMM_ALL_GATHER], 0 }, { c[0].exposed[MESH_DP][COMM_ALL_REDUCE], 0 },
        { c[0].waiting, 4.25 }, { c[1].waiting, 4.5 }, { c[2].waiting, 0 });
}

TEST(a_pipeline_waits_for_messages_and_after_its_last_action) {
    Causes c[4];
    start(1, 100);
    static const float until[4] = { 90, 60, 80, 80 };
    for (int q = 0; q < 4; q++) { ranks[q].pipe = q / 2; ranks[q].until[0] = until[q]; } // two pipelines
    op(0, "pp.0", MESH_PP, COMM_RECV, 0, 20, 25);
    op(1, "pp.0", MESH_PP, COMM_SEND, 0, 2, 5);
    op(0, "pp.0", MESH_PP, COMM_ALL_REDUCE, 0, 1, 1);
    op(1, "pp.0", MESH_PP, COMM_ALL_REDUCE, 0, 36, 36); // 30 of them until rank 0's last action, 5 because that is late afterwards
    op(2, "pp.1", MESH_PP, COMM_ALL_REDUCE, 0, 1, 1);
    op(3, "pp.1", MESH_PP, COMM_ALL_REDUCE, 0, 4, 4);   // the other pipeline's last action is no reason
    causes_of_ranks(c, pointers, 4);
    are({ c[0].bubble, 20 }, { c[0].communication[MESH_PP], 1 }, // what is received is another's message
        { c[1].exposed[MESH_PP][COMM_SEND], 2 }, { c[1].communication[MESH_PP], 6 }, { c[1].per_token, 5 },
        { c[1].bubble, 30 }, { c[1].waiting, 5 }, { c[3].bubble, 0 }, { c[3].waiting, 3 });
}

TEST(what_is_neither_computing_nor_waiting_is_rest) {
    Causes c[4];
    start(1, 100);
    for (int q = 0; q < 3; q++) {
        op(q, "world", MESH_DP, COMM_ALL_REDUCE, 0, 20, 20);
        ranks[q].data[0] = 10;
    }
    ranks[0].running[0] = 50;
    ranks[1].running[0] = 90; // it was busy while it waited
    causes_of_ranks(c, pointers, 3);
    are({ c[0].data, 10 }, { c[0].compute, 50 }, { c[0].rest, 20 }, { c[1].compute, 70 }, { c[1].rest, 0 },
        { c[2].compute, 70 }, { c[2].rest, 0 }); // not known
}

static double uniform(void) {
    static uint64_t count;
    return random_uniform(1, 2, count++);
}
TEST(causes_add_up_whatever_ranks_did) {
    Causes c[4];
    for (int round = 0; round < 50; round++) {
        start(7, 0);
        for (int q = 0; q < 4; q++) for (int s = 0; s < 7; s++) {
            ranks[q].pipe = round % 2 ? q / 2 : -1;
            ranks[q].until[s] = (float)uniform();
            ranks[q].data[s] = (float)uniform();
            ranks[q].running[s] = round % 3 ? (float)(3 * uniform()) : -1;
            ranks[q].seconds[s] = 30;
            for (int k = 0; k < COMM_BARRIER; k++) {
                op(q, q < 2 ? "tp.0" : "tp.1", MESH_TP, (CommKind)k, s, (float)uniform(), (float)uniform());
                op(q, q % 2 ? "pp.1" : "pp.0", MESH_PP, (CommKind)k, s, (float)uniform(), (float)uniform());
            }
        }
        causes_of_ranks(c, pointers, 4);
        for (int q = 0; q < 4; q++) {
            assert_true(fabs(sum_of(&c[q]) - 30) < 1e-5);
            for (size_t i = 0; i < NUM_CAUSES; i++) assert_true((&c[q].step)[i] >= 0);
            assert_true(causes_exposed(&c[q]) <= causes_communication(&c[q]) + 1e-6);
        }
        Diagnosis d = diagnose(pointers, 4);
        assert_true(fabs(sum_of(&d.mean) - d.mean.step) < 1e-5);
    }
}

TEST(ranges_means_median_and_the_slowest_rank) {
    start(4, 10);
    ranks[0].seconds[2] = 50; // a hiccup
    for (int s = 0; s < 4; s++) for (int q = 0; q < 3; q++) op(q, "world", MESH_DP, COMM_ALL_REDUCE, s, q == 1 ? 1 : 4, 4);
    Diagnosis d = diagnose(pointers, 3);
    assert_int_equal(d.slowest, 1);
    are({ d.seconds, 10 }, { d.first.step, 20 }, { d.least.step, 10 }, { d.most.step, 20 }, { d.mean.step, 40 / 3.0 },
        { d.least.waiting, 0 }, { d.most.waiting, 3 }, { d.slowest_busy, 9 }, { d.others_busy, (16 + 6) / 2.0 }, { d.others_waiting, 3 });
    for (int s = 0; s < 4; s++) for (int q = 0; q < 3; q++) ranks[q].running[s] = q == 1 ? 2 : 5;
    is(diagnose(pointers, 3).others_rest, (11 + 1) / 2.0); // not the slowest rank's, 7
    ranks[2].pipe = 0;
    for (int s = 0; s < 2; s++) op(1, "pp.0", MESH_PP, COMM_RECV, s, 9, 9);
    Diagnosis piped = diagnose(pointers, 3);
    assert_int_equal(piped.slowest, 0); // the bubble is waiting, too
    is(piped.others_waiting, 1.5);
    is(efficiency_communication(&d.mean), 31 / 3.0 / (31 / 3.0 + 4)); // (16 + 9 + 6) / 3 of computing
    is(efficiency_exposed(&d.mean), 31 / 3.0 / (31 / 3.0 + 1));
}

TEST(room_for_channels_ends) {
    RankSteps* r = &ranks[0];
    start(1, 1);
    for (int i = 0; i < DIAGNOSIS_CHANNELS; i++) {
        char name[24];
        snprintf(name, sizeof name, "tp.%d", i);
        assert_non_null(rank_channel(r, name, MESH_TP, COMM_SEND));
    }
    assert_ptr_equal(rank_channel(r, "tp.1", MESH_TP, COMM_SEND), &r->channels[1]);
    assert_null(rank_channel(r, "tp.1", MESH_TP, COMM_RECV));
    assert_int_equal(rank_steps_bytes(r), sizeof *r);
}

// ---- advice ----
static Diagnosis half_computing(void) { return (Diagnosis){ .ranks = 4, .steps = 3, .mean = { .step = 0.1, .compute = 0.05 } }; }
static Setting plain(void) {
    return (Setting){ .local_size = 4, .cores = 4, .micro_batches = 2, .stages = 4, .batch_size = 16, .tokens_per_step = 1000,
                      .sent = 3.2e6, .halves = "make PRECISION=bf16 sends" };
}
static void advice_is(const Diagnosis* d, const Setting* s, int n, const char* const* parts) {
    Advice a = diagnosis_advice(d, s);
    if (a.n != n) fail_msg("%d pieces of advice instead of %d; the first: %s", a.n, n, a.lines[0]);
    for (int i = 0; i < n; i++) if (strstr(a.lines[i], parts[i]) == NULL) fail_msg("piece %d lacks \"%s\": %s", i, parts[i], a.lines[i]);
}
TEST(no_advice_where_enough_is_computed) {
    Diagnosis d = half_computing();
    Setting s = plain();
    d.mean.compute = 0.061; d.mean.bubble = 0.039;
    advice_is(&d, &s, 0, NULL);
    s.scaling = 0.6;
    advice_is(&d, &s, 0, NULL);
    d.mean.compute = 0.059;
    assert_int_equal(diagnosis_advice(&d, &s).n, 1);
    d.mean.compute = 0.061; s.scaling = 0.59;
    assert_int_equal(diagnosis_advice(&d, &s).n, 1);
    d.mean.bubble = d.mean.data = d.others_rest = 0.009; // none stands out
    assert_int_equal(diagnosis_advice(&d, &s).n, 3);
}

TEST(the_largest_loss_comes_first) {
    // 4 x 60 ms and still 40 are 280
    static const char bubble[] = "bubble: stages wait for 40.0 of 100.0 ms, with 2 micro-batches on 4 stages; with 8 (--total-batch-size"
                                 " 4000) it is as long, and 14 % of a step instead of 40";
    static const char waiting[] = "ranks wait for slower ones for 40.0 of 100.0 ms, and rank 3 least; a step keeps it busy for 90.0 ms"
                                  " and the others for 50.0";
    static const char asleep[] = "rest: a rank slept or had no core for 40.0 of 100.0 ms";
    const struct { Causes mean; double rest, waiting, busy; int cores; double share; const char* says; } cases[] = {
        { { .rest = 0.045, .data = 0.02 }, 0.04, 0, 0, 4, 0, asleep }, // the slowest rank's also counts in the mean
        { { .rest = 0.045 }, 0.04, 0, 0, 2, 0, "cores: 4 ranks share 2, and a rank had none for 40.0 of 100.0 ms; start 2 ranks here" },
        { { .rest = 0.045 }, 0.04, 0, 0, 0, 0, asleep }, // GPUs
        { { .waiting = 0.03 }, 0, 0.04, 0.09, 0, 0, waiting },
        { { .bubble = 0.04 }, 0, 0, 0, 0, 0, bubble },
        { { .data = 0.04 }, 0, 0, 0, 0, 0, "data: steps wait for it for 40.0 of 100.0 ms" },
        { { .data = 0 }, 0, 0.037, 0, 0, 0.012, "computing: a rank computes for 50.0 ms, and a perfect share of one rank's step is 12.0" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Diagnosis d = { .ranks = 4, .steps = 3, .mean = cases[i].mean, .others_rest = cases[i].rest, .others_waiting = cases[i].waiting,
                        .slowest = 3, .slowest_busy = cases[i].busy, .others_busy = 0.05 };
        Setting s = plain();
        d.mean.step = 0.1;
        d.mean.compute = 0.05;
        s.cores = cases[i].cores;
        s.share = cases[i].share;
        advice_is(&d, &s, 1, &cases[i].says);
    }
}

TEST(communication_is_hidden_then_outweighed_then_compressed) {
    Setting s = plain();
    Diagnosis d = half_computing();
    d.mean.compute = 0.01; d.mean.exposed[MESH_DP][COMM_ALL_REDUCE] = 0.012;
    d.mean.communication[MESH_DP] = 0.015; d.mean.per_token = 0.005;
    d.others_waiting = 0.011; // less than what is exposed
    // 10 / 25 = 40 %; 40 / (40 + 10 + 4 x 5); 10 / (10 + 7.5)
    const char* parts[] = { "12.0 of 15.0 ms of communication are exposed, most along dp; 10.0 ms of computing could hide some: no option"
                            " would hide more",
                            "a rank computes for 10.0 ms and sends 3.2 MB; with 4 times the tokens (--batch-size 64) gradients are as"
                            " many, and compute / (compute + communication) would be up to 57 %",
                            "make PRECISION=bf16 sends half of the 3.2 MB, and with as much computing that figure would be 57 %" };
    advice_is(&d, &s, 3, parts);
    s.to_hide[MESH_DP] = "take --ddp bucketed";
    s.to_hide[MESH_TP] = "nothing of this";
    s.halves = NULL;
    parts[0] = "could hide some: take --ddp bucketed";
    advice_is(&d, &s, 2, parts);
    s.halves = "half of --rank sends about";
    parts[2] = "compress: half of --rank sends about half of the 3.2 MB";
    d.mean.exposed[MESH_DP][COMM_ALL_REDUCE] = 0.003; d.others_waiting = 0;
    parts[0] = "overlap: it is good, only 3.0 of 15.0 ms";
    advice_is(&d, &s, 3, parts);
    // what grows with the tokens does not become less by more of them: 40 / (40 + 4 x 4 + 2 x 11)
    d.mean.exposed[MESH_TP][COMM_ALL_REDUCE] = 0.009;
    d.mean.communication[MESH_TP] = d.mean.per_token = 0.011; d.mean.communication[MESH_DP] = 0.004;
    parts[0] = "12.0 of 15.0 ms of communication are exposed, most along tp; 10.0 ms of computing could hide some: nothing of this";
    parts[1] = "activations take longest, but twice the channels compute 4 times as much and send twice, and compute / (compute +"
               " communication) would be up to 51 %";
    advice_is(&d, &s, 3, parts);
    // a larger loss comes before
    const char* four[] = { "slowest rank", "overlap", "size", "compress" };
    d.others_waiting = 0.06;
    advice_is(&d, &s, 4, four);
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
        { { "\"stage\":\"x\"", two }, "its first line is not that of a metrics.jsonl" },
        { { "\"precision\":\"fp32\"", two }, "its first line is not that of a metrics.jsonl" },
        { { "\"world_size\":2,\"precision\":\"fp32\"", two }, "that run had 2 ranks; give a run on one rank" },
        { { "\"world_size\":1,\"precision\":\"int4\"", two }, "that run was in int4, this one is in " FLOATX_NAME },
        { { "\"world_size\":1,\"precision\":\"" FLOATX_NAME "\",\"layers\":3", two }, "that model has layers 3, this one 2" },
        { { GOOD ",\"options\":{\"seq-len\":64}", two }, "that run had --seq-len 64, this one has 128" },
        { { GOOD T128, STEP(1, 2048, 1) }, "that run had 1 step; the first does not count" },
        { { GOOD T128, STEP(1, 4096, 1) STEP(2, 8192, 1) }, "a step of that run had 4096 tokens; give one with --total-batch-size 8192"
          " (strong scaling) or 8192 / 4 ranks (weak scaling)" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char* path = path_of(&cases[i].f);
        expect_error(single_run_read(path, &shape), cases[i].says);
    }
}
