// test_plan_axes.c - build/plan's step of a mesh: where one axis is alone it is that of pipelines, of tensor parallelism or of DDP; steps
// that can be counted by hand; and what holds for every mesh.
#include "../../dev/tools/plan_axes.h"
#include "expect_death.h"

static const Emulation none = { { 0, 0, 0 }, 0, false };
static bool near(double x, double y, double share) { return fabs(x - y) <= share * fabs(y); }

static Plan plan_of(int dp, int tp, int pp) {
    Plan p = { .B = 4, .T = 1024, .accumulation = 8, .X = 2, .N = dp * tp * pp, .gpu = true, .rooms = 2, .wrap_blocks = 1, .t = tp,
               .pipe = { pp, SCHEDULE_1F1B, 1, PLAN_MOST, "auto" } };
    assert_true(gpt2_named_config("gpt2", &p.config));
    p.config.V = GPT2_VOCABULARY;
    p.config.Vp = gpt2_padded_vocabulary(p.config.V);
    return p;
}
static Network network(int per_node) {
    return (Network){ .inside = link_open("nvlink"), .between = link_open("infiniband"), .ranks_per_node = per_node, .nics = per_node,
        .efficiency = 1 };
}
static AxesTime step_of(const Plan* p, const Network* w) { return axes_step(p, w, plan_unit_seconds(p, 0.1), &none); }

// ---- one axis ----
TEST(stages_alone) {
    Network w = network(8);
    for (int pp = 1; pp <= 8; pp *= 2) for (int schedule = SCHEDULE_GPIPE; schedule <= SCHEDULE_ZB_H1; schedule++) {
        Plan p = plan_of(1, 1, pp);
        p.pipe.schedule = schedule;
        if (schedule == SCHEDULE_INTERLEAVED && pp == 8) continue; // 12 blocks have no 16 parts
        p.pipe.v = schedule == SCHEDULE_INTERLEAVED ? 2 : 1;
        AxesTime mesh = step_of(&p, &w);
        PipelineTime pipe = pipeline_step(&p, &w, plan_unit_seconds(&p, 0.1));
        bool same = near(mesh.seconds, pipe.seconds, 1e-9) && near(mesh.compute, pipe.compute, 1e-9);
        if (!same) fail_msg("%d stages, schedule %d: %g and %g s", pp, schedule, mesh.seconds, pipe.seconds);
        assert_true(fabs(mesh.tensor) < 1e-12 && fabs(mesh.bubble - pipe.bubble) < 1e-12);
    }
}

TEST(parts_alone) {
    Network w = network(8);
    for (int rows = 0; rows < 2; rows++) for (int again = 0; again < 2; again++) {
        Plan p = plan_of(1, 4, 1);
        p.sequence_parallel = rows;
        p.recompute = again ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
        AxesTime mesh = step_of(&p, &w);
        StepTime alone = plan_step(&p, PLAN_TP, &w, plan_unit_seconds(&p, 0.1));
        if (!near(mesh.seconds, alone.seconds, 1e-9)) fail_msg("%g and %g s", mesh.seconds, alone.seconds);
        assert_true(mesh.tensor > 0);
    }
}

TEST(copies_alone) {
    Network w = network(8);
    Plan p = plan_of(16, 1, 1); // two nodes
    double ddp = plan_step(&p, PLAN_DDP, &w, plan_unit_seconds(&p, 0.1)).seconds;
    AxesTime mesh = step_of(&p, &w);
    // gradients of a block become final at other times
    if (!near(mesh.seconds, ddp, 1e-3)) fail_msg("%g and %g s", mesh.seconds, ddp);
    p.zero_stage = 1;
    assert_true(step_of(&p, &w).seconds > mesh.compute); // an update takes no time here, so that a gather only adds
}

// ---- by hand ----
// Two stages of two blocks whose actions last 1, 2 and 3 s, two micro-batches, nothing to send: (2 + 1) x 6.
TEST(emulated_actions) {
    Network w = network(8);
    Plan p = plan_of(1, 1, 2);
    Emulation e = emulation_parse("1000,2000,3000");
    p.accumulation = 2;
    p.pipe.split = "6,6";
    AxesTime t = axes_step(&p, &w, plan_unit_seconds(&p, 0.1), &e);
    assert_true(near(t.seconds, 18, 1e-3) && near(t.compute, 12, 1e-9) && near(t.bubble, 6, 1e-9));
    e = emulation_parse("1000,2000,3000,6"); // of a block: 6 and 12 blocks, the slower of which paces
    t = axes_step(&p, &w, plan_unit_seconds(&p, 0.1), &e);
    assert_true(near(t.compute, 2 * 9 * 6, 1e-9));
    assert_true(near(t.seconds, 6 * (2 * 12 + 6), 1e-3));
}
TEST(emulation_that_is_none) {
    assert_false(emulation_parse("").is_on);
    expect_error(emulation_parse("1,2"), "wants three numbers of milliseconds");
    expect_error(emulation_parse("1,2,3,4,5"), "not '1,2,3,4,5'");
    expect_error(emulation_parse("1,2,-3"), "not '1,2,-3'");
}

// A gather that takes longer than the blocks before it are computed delays a step by the difference.
TEST(gathers_after_an_update) {
    Network w = network(1);
    w.between = link_of(0, 1e9);
    Plan p = plan_of(2, 1, 1);
    p.zero_stage = 1;
    UnitSent block = axes_unit_sent(&p, &w, 1), root = axes_unit_sent(&p, &w, 0);
    double bytes = 2 * (double)unit_elements(p.config, 1);
    assert_true(near(block.gather, bytes / 2 / 1e9, 1e-9) && near(block.reduce, bytes / 2 / 1e9, 1e-9));
    Times times = { 12, 1, 1 }; // a second for each block
    Pipeline l = plan_pipeline(&p);
    PlayTimes play_times = { &times, NULL, 0 };
    Play y;
    play(&y, l, play_times);
    assert_true(near(axes_gather_delay(&p, &y, block, root), root.gather + block.gather, 1e-9)); // later ones are there in time
    block.gather = 2;
    assert_true(near(axes_gather_delay(&p, &y, block, root), root.gather + 12 * 2 - 11, 1e-9));
    play_free(&y);
}

// ---- every mesh ----
TEST(what_holds_for_every_mesh) {
    Network near_nodes = network(8), far_nodes = network(2);
    for (int tp = 1; tp <= 4; tp *= 2) for (int pp = 1; pp <= 4; pp *= 2) for (int zero = 0; zero < 2; zero++) {
        Plan p = plan_of(16 / tp / pp, tp, pp);
        p.zero_stage = zero;
        AxesTime a = step_of(&p, &near_nodes), b = step_of(&p, &far_nodes);
        double whole = 8 * 0.1 / tp / pp; // eight micro-batches of a copy of the model
        assert_true(near(a.compute, whole, 1e-9));
        assert_true(near(a.compute + a.tensor + a.bubble + a.exposed, a.seconds, 1e-9));
        assert_true(a.tensor > -1e-12 && a.bubble > -1e-12 && a.exposed > -1e-12);
        if (b.seconds < a.seconds - 1e-12) fail_msg("tp %d, pp %d: %g and %g s", tp, pp, a.seconds, b.seconds);
        p.accumulation = 16;
        assert_true(step_of(&p, &near_nodes).efficiency > a.efficiency);
    }
}
