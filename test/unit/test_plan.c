// test_plan.c - build/plan's predictions: the ZeRO paper's table and other published figures, sizes that can be counted by hand,
// steps whose timeline can be drawn by hand, and properties that every model and link must have.
#include "../../dev/tools/plan.h"
#include "test_folder.h"

static GPT2Config named(const char* name) {
    GPT2Config c;
    memset(&c, 0, sizeof c);
    assert_true(gpt2_named_config(name, &c));
    c.max_T = GPT2_CONTEXT;
    c.V = GPT2_VOCABULARY;
    c.Vp = gpt2_padded_vocabulary(c.V);
    return c;
}
static void plan_memory(const Plan* p, PlanStage stage, size_t bytes[MEMORY_KINDS]) {
    PlanBytes b = plan_bytes(p, stage);
    memcpy(bytes, b.memory, sizeof b.memory);
}
static size_t plan_kind(const Plan* p, PlanStage stage, MemoryKind kind) { return plan_bytes(p, stage).memory[kind]; }
// Bytes for gathered parameters and for gradients being sent. DDP has neither, only what the communicator takes.
static size_t plan_unit_buffers(const Plan* p, PlanStage stage) {
    return plan_kind(p, stage, MEMORY_COMMUNICATION) - plan_kind(p, PLAN_DDP, MEMORY_COMMUNICATION);
}
static Plan plan_of(const char* name, int N) {
    Plan p = { named(name), 4, 1024, 1, RECOMPUTE_NONE, 2, N, true, 2, 1 };
    return p;
}

// ---- states alone ----
static double gigabytes(double params, PlanStage stage, double N, StateBytes one) {
    return 1e-9 * params * state_bytes_sum(state_bytes_sharded(one, stage, N));
}
// As the paper rounds: at most half a unit of the last digit that it gives.
static void assert_rounds_to(double x, double given, double unit) {
    if (!(fabs(x - given) <= unit / 2 * (1 + 1e-9))) fail_msg("%.6g does not round to %g", x, given);
}

static void test_the_zero_papers_table(void** state) { // table 1 of arXiv 1910.02054
    (void)state;
    static const struct { int N; double given[3][3]; double unit[3][3]; } rows[] = { // by size, then by stage
        { 1, { { 120, 120, 120 }, { 2048, 2048, 2048 }, { 16000, 16000, 16000 } }, { { 1, 1, 1 }, { 1, 1, 1 }, { 1, 1, 1 } } },
        { 4, { { 52.5, 41.3, 30 }, { 896, 704, 512 }, { 7000, 5500, 4000 } }, { { .1, .1, 1 }, { 1, 1, 1 }, { 1, 1, 1 } } },
        { 16, { { 35.6, 21.6, 7.5 }, { 608, 368, 128 }, { 4750, 2875, 1000 } }, { { .1, .1, .1 }, { 1, 1, 1 }, { 1, 1, 1 } } },
        { 64, { { 31.4, 16.6, 1.88 }, { 536, 284, 32 }, { 4187, 2219, 250 } }, { { .1, .1, .01 }, { 1, 1, 1 }, { 1, 1, 1 } } },
        { 1024, { { 30.1, 15.1, 0.12 }, { 514, 258, 2 }, { 4012, 2014, 15.6 } }, { { .1, .1, .01 }, { 1, 1, 1 }, { 1, 1, .1 } } },
    };
    static const double params[3] = { 7.5e9, 128e9, 1e12 };
    StateBytes one = state_bytes(2, true);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (int m = 0; m < 3; m++) {
            assert_rounds_to(gigabytes(params[m], PLAN_DDP, rows[i].N, one), 16e-9 * params[m], 1e-6);
            for (int z = 0; z < 3; z++) {
                double gb = gigabytes(params[m], (PlanStage)(PLAN_ZERO1 + z), rows[i].N, one);
                assert_rounds_to(gb, rows[i].given[m][z], rows[i].unit[m][z]);
            }
        }
    }
}

static void test_figures_that_courses_give(void** state) {
    (void)state;
    StateBytes master = state_bytes(2, true), no_master = state_bytes(2, false), fp32 = state_bytes(4, false);
    assert_rounds_to(gigabytes(7e9, PLAN_DDP, 1, no_master), 84, 1e-6);
    assert_rounds_to(gigabytes(13e9, PLAN_DDP, 1, no_master), 156, 1e-6);
    assert_rounds_to(gigabytes(13e9, PLAN_FSDP, 4, no_master), 39, 1e-6);
    assert_rounds_to(gigabytes(0.1e9, PLAN_DDP, 2, master), 1.6, 1e-6);
    assert_rounds_to(gigabytes(0.1e9, PLAN_ZERO2, 2, master), 0.9, 1e-6);
    assert_rounds_to(gigabytes(0.1e9, PLAN_FSDP, 2, master), 0.8, 1e-6);
    assert_rounds_to(gigabytes(10e9, PLAN_DDP, 8, master), 160, 1e-6);
    assert_rounds_to(gigabytes(10e9, PLAN_FSDP, 8, master), 20, 1e-6);
    assert_rounds_to(gigabytes(1e9, PLAN_DDP, 1, fp32), 16, 1e-6);      // 4 + 4 + 8, and
    assert_rounds_to(gigabytes(1e9, PLAN_ZERO1, 4, fp32), 10, 1e-6);    // K = 8 on a base of 8
}

// ---- our stages ----
static void test_a_small_model_counted_by_hand(void** state) {
    (void)state;
    // 2 blocks of 12 x 16^2 + 13 x 16 = 3280, a root of (384 + 16 + 2) 16 = 6432; each of 3 ranks has 1104 and 2144, in all 4352
    Plan p = { { 16, 257, 384, 2, 2, 16 }, 3, 16, 1, RECOMPUTE_NONE, 4, 3, false, 2, 1 };
    size_t P = 6432 + 2 * 3280, S = 2144 + 2 * 1104, activations, bytes[MEMORY_KINDS];
    plan_memory(&p, PLAN_DDP, bytes);
    assert_int_equal(bytes[MEMORY_PARAMETERS], 4 * P);
    assert_int_equal(bytes[MEMORY_GRADIENTS], 4 * P);
    assert_int_equal(bytes[MEMORY_OPTIMIZER], 8 * P);
    assert_int_equal(bytes[MEMORY_COMMUNICATION], 64 + (4 << 20));
    // per token, in fp32: a block has 16 C numbers and 4 + 2 statistics; outside are 9 C, 3 floats and 2 ints; all logits at once
    activations = 48 * (2 * (16 * 16 + 6) + 9 * 16 + 3 + 2) * 4 + 48 * 384 * 4 + 40; // and StepStats
    assert_int_equal(bytes[MEMORY_ACTIVATIONS], activations);
    for (PlanStage s = PLAN_ZERO1; s < PLAN_STAGES; s++) {
        plan_memory(&p, s, bytes);
        assert_int_equal(bytes[MEMORY_PARAMETERS], 4 * S * (s >= PLAN_ZERO3 ? 1 : 3));
        assert_int_equal(bytes[MEMORY_GRADIENTS], 4 * S * (s >= PLAN_ZERO2 ? 1 : 3));
        assert_int_equal(bytes[MEMORY_OPTIMIZER], 8 * S);
        assert_int_equal(bytes[MEMORY_ACTIVATIONS], activations);
        const size_t roots[PLAN_STAGES] = { 0, 0, 1, 2, 2 }, blocks[PLAN_STAGES] = { 0, 0, 2, 3, 4 };
        assert_int_equal(bytes[MEMORY_COMMUNICATION], 64 + (4 << 20) + 4 * 3 * (roots[s] * 2144 + blocks[s] * 1104));
        size_t sent = 3 * S * (s >= PLAN_ZERO3 ? 3 : 2) - (s == PLAN_FSDP ? 3 * 2144 : 0); // fsdp gathers the root once
        assert_true(plan_sent(&p, s) == (double)(2 * (4 * sent + 2 * 3 * 8)));
    }
    assert_true(plan_sent(&p, PLAN_DDP) == (double)(2 * 2 * (4 * P + 8)));
    p.recompute = RECOMPUTE_BLOCK; // one block fewer, except its input
    for (PlanStage s = PLAN_DDP; s < PLAN_STAGES; s++)
        assert_int_equal(plan_kind(&p, s, MEMORY_ACTIVATIONS), activations - 48 * (15 * 16 + 6) * 4);
    p.gpu = true;
    plan_memory(&p, PLAN_DDP, bytes);
    assert_int_equal(bytes[MEMORY_COMMUNICATION], 64 + 3 * 4);
    p.N = 1; // there is nothing to communicate
    plan_memory(&p, PLAN_DDP, bytes);
    assert_int_equal(bytes[MEMORY_COMMUNICATION], 0);
}

static void test_groups_of_blocks_counted_by_hand(void** state) {
    (void)state;
    // the same root and 3 such blocks, in groups of 2: each of 3 ranks has 2144 of 6432, 2192 of 6560, 1104 of 3280; in all 5440
    Plan p = { { 16, 257, 384, 3, 2, 16 }, 3, 16, 1, RECOMPUTE_NONE, 2, 3, true, 2, 2 };
    size_t fsdp[MEMORY_KINDS];
    plan_memory(&p, PLAN_FSDP, fsdp);
    assert_int_equal(fsdp[MEMORY_PARAMETERS], 4 * 5440);
    assert_int_equal(fsdp[MEMORY_GRADIENTS], 4 * 5440);
    assert_int_equal(fsdp[MEMORY_OPTIMIZER], 8 * 5440);
    // buckets in 16 bits and, to be sent, in fp32; rooms in 16 bits. The root has one of each, the larger group two
    assert_int_equal(fsdp[MEMORY_COMMUNICATION], 64 + 3 * 4 + (2 + 4 + 2) * 3 * (2144 + 2 * 2192));
    assert_true(plan_sent(&p, PLAN_FSDP) == 2 * 3 * (2.0 * (2144 + 2 * (2192 + 1104)) + 4.0 * 5440) + 2 * 2 * 3 * 8);
    p.rooms = 1;
    assert_int_equal(fsdp[MEMORY_COMMUNICATION] - plan_kind(&p, PLAN_FSDP, MEMORY_COMMUNICATION), 2 * 3 * 2192);
    p.wrap_blocks = 0; // 16272 in one group: 5424 each, gathered once
    plan_memory(&p, PLAN_FSDP, fsdp);
    assert_int_equal(fsdp[MEMORY_PARAMETERS], 4 * 5424);
    assert_int_equal(fsdp[MEMORY_COMMUNICATION], 64 + 3 * 4 + (2 + 4 + 2) * 3 * 5424);
    assert_true(plan_sent(&p, PLAN_FSDP) == 2 * 3 * (2.0 + 4.0) * 5424 + 2 * 2 * 3 * 8);
    p.wrap_blocks = 1; // it is about fsdp alone
    size_t zero3 = plan_memory_total(&p, PLAN_ZERO3);
    p.wrap_blocks = 2;
    assert_int_equal(plan_memory_total(&p, PLAN_ZERO3), zero3);
}

static void test_what_depends_on_sizes(void** state) {
    (void)state;
    Plan p = plan_of("gpt2", 2);
    p.B = 8; // 8192 rows of logits, of which a GPU has 5312 at a time, a CPU 320
    size_t gpu[PLAN_STAGES], root = unit_elements(p.config, 0), block = unit_elements(p.config, 1); // 2 ranks need no padding
    for (PlanStage s = PLAN_DDP; s < PLAN_STAGES; s++) gpu[s] = plan_kind(&p, s, MEMORY_ACTIVATIONS);
    p.gpu = false;
    for (PlanStage s = PLAN_DDP; s < PLAN_STAGES; s++)
        assert_int_equal(gpu[s] - plan_kind(&p, s, MEMORY_ACTIVATIONS), (5312 - 320) * 50304 * 2);
    p.config.L = 1; // there are no two blocks to have buffers for
    assert_int_equal(plan_unit_buffers(&p, PLAN_ZERO2), 2 * (root + block));
    assert_int_equal(plan_unit_buffers(&p, PLAN_FSDP), (2 + 4 + 2) * (root + block)); // gradients are sent in fp32
    p.X = 4;
    assert_int_equal(plan_unit_buffers(&p, PLAN_FSDP), (4 + 4) * (root + block));
    p.N = 1; // nothing is elsewhere
    assert_int_equal(plan_unit_buffers(&p, PLAN_FSDP), 4 * (root + block));
}

static void test_fsdps_shards_are_the_master_copy(void** state) {
    (void)state;
    Plan p = plan_of("gpt2", 8);
    size_t zero3[MEMORY_KINDS], fsdp[MEMORY_KINDS], S = shard_elements_total(p.config, p.N);
    plan_memory(&p, PLAN_ZERO3, zero3);
    plan_memory(&p, PLAN_FSDP, fsdp);
    assert_true(zero3[MEMORY_PARAMETERS] == 2 * S && zero3[MEMORY_GRADIENTS] == 2 * S && zero3[MEMORY_OPTIMIZER] == 12 * S);
    assert_true(fsdp[MEMORY_PARAMETERS] == 4 * S && fsdp[MEMORY_GRADIENTS] == 4 * S && fsdp[MEMORY_OPTIMIZER] == 8 * S);
}

static void test_our_stages_follow_the_papers_formulas_but_for_padding(void** state) {
    (void)state;
    for (int N = 1; N <= 1024; N = N * 3 + 1) {
        Plan p = plan_of("gpt2", N);
        size_t bytes[MEMORY_KINDS];
        double P = (double)unit_elements(p.config, 0) + 12.0 * (double)unit_elements(p.config, 1);
        for (PlanStage s = PLAN_DDP; s < PLAN_STAGES; s++) {
            plan_memory(&p, s, bytes);
            double kept = (double)(bytes[MEMORY_PARAMETERS] + bytes[MEMORY_GRADIENTS] + bytes[MEMORY_OPTIMIZER]);
            double formula = P * state_bytes_sum(state_bytes_sharded(state_bytes(2, true), s, N));
            assert_true(kept >= formula * (1 - 1e-12));
            assert_true(kept - formula <= 13 * 16 * (4.0 * N + 12)); // 13 units, each less than 16 elements longer per rank
        }
    }
}

static void test_accumulation_and_what_is_sent(void** state) {
    (void)state;
    Plan p = plan_of("gpt2", 8); // whose units divide
    double once = 7.0 * 2 * (double)gpt2_num_elements(p.config), root = 7.0 * 2 * (double)unit_elements(p.config, 0);
    for (p.accumulation = 1; p.accumulation <= 5; p.accumulation += 2) {
        int A = p.accumulation;
        // fsdp: 2 gathers, of the root 1 a step, and a reduction of numbers that are twice as wide
        const double formula[PLAN_STAGES] = { 2 * once, 2 * once, (A + 1) * once, 3 * A * once, A * (4 * once - 2 * root) + root };
        for (PlanStage s = PLAN_DDP; s < PLAN_STAGES; s++) {
            double sent = plan_sent(&p, s);
            assert_true(sent > formula[s] && sent < formula[s] * 1.0001); // and some doubles
        }
    }
}

static void test_gpt2_xl_on_24_gb_needs_sharding(void** state) {
    (void)state;
    Plan p = plan_of("gpt2-xl", 8);
    assert_true(plan_memory_total(&p, PLAN_FSDP) < 24e9 && plan_memory_total(&p, PLAN_ZERO3) < 24e9);
    p.B = 1;
    p.T = 1;
    p.recompute = RECOMPUTE_BLOCK;
    assert_true(plan_memory_total(&p, PLAN_DDP) > 24e9); // whatever the batch
}

static void test_the_largest_model_fits_and_the_next_does_not(void** state) {
    (void)state;
    Plan p = plan_of("gpt2", 16);
    for (PlanStage s = PLAN_DDP; s < PLAN_STAGES; s++) {
        int d = plan_largest_depth(p, s, 40e9);
        assert_true(d > 20 && d < MAX_UNITS - 1);
        for (int more = 0; more <= 1; more++) {
            Plan q = p;
            q.config.L = q.config.NH = d + more;
            q.config.C = 64 * (d + more);
            assert_int_equal(plan_memory_total(&q, s) <= 40000000000u, !more);
        }
    }
    assert_int_equal(plan_largest_depth(p, PLAN_DDP, 1e6), 0);
}

// ---- links ----
static Network network_of(const char* inside, const char* between, int ranks_per_node) {
    Network w = { link_open(inside), link_open(between), ranks_per_node, ranks_per_node, PLAN_RING };
    return w;
}
static bool near(double x, double y) { return fabs(x - y) <= 1e-12 * fabs(y); }

static void test_collectives_take_what_a_ring_or_a_tree_takes(void** state) {
    (void)state;
    Network w = network_of("nvlink", "infiniband", 8);
    double a = 3.4e-6, b = 14e-6, S = 1e9;
    assert_true(network_seconds(&w, PLAN_ALL_REDUCE, S, 1) == 0);
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, S, 4), 3 * a + 0.75 * S / 450e9));
    assert_true(near(network_seconds(&w, PLAN_REDUCE_SCATTER, S, 4), 3 * a + 0.75 * S / 450e9));
    assert_true(near(network_seconds(&w, PLAN_ALL_REDUCE, S, 4), 2 * (3 * a + 0.75 * S / 450e9)));
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, S, 32), 28 * a + 3 * b + S * 31 / 32 / 400e9)); // 8 interfaces
    w.nics = 1;
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, S, 32), 28 * a + 3 * b + S * 31 / 32 / 50e9));
    w.nics = 16; // more than NVLink can feed
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, S, 32), 28 * a + 3 * b + S * 31 / 32 / 450e9));
    w.algorithm = PLAN_TREE;
    assert_true(near(network_seconds(&w, PLAN_ALL_REDUCE, S, 32), 2 * (7 * a + 2 * b + S * 31 / 32 / 450e9)));
    w = network_of("nvlink", "infiniband", 1); // no link inside a node at all
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, S, 4), 3 * b + 0.75 * S / 50e9));
    w = network_of("pcie", "infiniband", 0);
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, S, 32), 31 * 5.7e-6 + S * 31 / 32 / 31.5e9));
}

static const char* write_link(const char* text) { return write_file("link.json", text, strlen(text)); }
static void test_a_measured_link_gives_the_measured_times(void** state) {
    (void)state;
    const char* path = write_link("{\"ranks\": 4, \"backend\": \"b\", \"collectives\": {"
                                  "\"all-reduce\": {\"alpha\": 6e-5, \"busbw\": 2e9, \"beta\": 1},"
                                  "\"reduce-scatter\": {\"alpha\": 3e-5, \"busbw\": 3e9},"
                                  "\"all-gather\": {\"alpha\": 9e-5, \"busbw\": 4e9}}}");
    Network w = network_of(path, "infiniband", 0);
    assert_true(near(network_seconds(&w, PLAN_ALL_REDUCE, 1e6, 4), 6e-5 + 1.5 * 1e6 / 2e9));
    assert_true(near(network_seconds(&w, PLAN_REDUCE_SCATTER, 1e6, 4), 3e-5 + 0.75 * 1e6 / 3e9));
    assert_true(near(network_seconds(&w, PLAN_ALL_GATHER, 1e6, 4), 9e-5 + 0.75 * 1e6 / 4e9));
    assert_true(near(network_seconds(&w, PLAN_ALL_REDUCE, 1e6, 7), 2 * 6e-5 + 12.0 / 7 * 1e6 / 2e9)); // twice the hops
}

static void read_link(void* path) { link_read(path); }
static void test_bad_measurements_are_refused(void** state) {
    (void)state;
    static const struct { const char *text, *finding; } bad[] = {
        { "{\"ranks\": 2", "is not JSON" },
        { "[]", "\"ranks\" must be" },
        { "{\"ranks\": 1}", "\"ranks\" must be" },
        { "{\"ranks\": 2, \"ranks\": 3}", "is not JSON" },
        { "{\"ranks\": 2}", "has no numbers \"alpha\" and \"busbw\" of \"all-reduce\"" },
        { "{\"ranks\": 2, \"collectives\": {\"all-reduce\": {\"alpha\": \"1\", \"busbw\": 1}}}", "of \"all-reduce\"" },
        { "{\"ranks\": 2, \"collectives\": {\"all-reduce\": {\"alpha\": 0, \"busbw\": 1}}}", "of \"reduce-scatter\"" },
        { "{\"ranks\": 2, \"collectives\": {\"all-reduce\": {\"alpha\": -1, \"busbw\": 1}}}", "\"alpha\" below 0" },
        { "{\"ranks\": 2, \"collectives\": {\"all-reduce\": {\"alpha\": 0, \"busbw\": 0}}}", "\"busbw\" not above 0" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const char* path = write_link(bad[i].text);
        expect_death(read_link, (void*)path, path, bad[i].finding, "comm_bench --json");
    }
    expect_death(read_link, (void*)"ethernet", "ethernet: cannot be opened", "nvlink, pcie, infiniband or a file");
}

// ---- a step ----
// Two blocks on two ranks: forward 1 s, backward 2 s, the head 3 s; every reduce-scatter and all-gather takes 1 s, an
// all-reduce 2.
static StepTime drawn_step_of(PlanStage stage, int accumulation, int blocks, int wrap_blocks) {
    Plan p = { named("gpt2"), 1, 8, accumulation, RECOMPUTE_NONE, 2, 2, true, 2, wrap_blocks };
    p.config.L = blocks;
    Link second;
    for (int c = 0; c < PLAN_COLLECTIVES; c++) {
        second.alpha[c] = 1;
        second.busbw[c] = INFINITY;
    }
    Network w = { second, second, 0, 1, PLAN_RING };
    UnitSeconds s = { 1, 2, 3 };
    return plan_step(&p, stage, &w, s);
}
static StepTime drawn_step(PlanStage stage, int accumulation) { return drawn_step_of(stage, accumulation, 2, 1); }
static void assert_step(StepTime t, double compute, double communication, double seconds) {
    if (t.compute != compute || t.communication != communication || t.seconds != seconds || t.exposed != seconds - compute)
        fail_msg("%g s of compute, %g of communication, %g in all, not %g, %g, %g",
                 t.compute, t.communication, t.seconds, compute, communication, seconds);
    assert_true(t.efficiency == compute / seconds);
}
static void test_steps_that_can_be_drawn_by_hand(void** state) {
    (void)state;
    // compute 0-9. Block 2 is done at 7 and sent until 9, block 1 9-11, the root 11-13
    assert_step(drawn_step(PLAN_DDP, 1), 9, 6, 13);
    assert_step(drawn_step(PLAN_DDP, 2), 18, 6, 22); // only in the second micro-batch
    // root 0-1, block 1 1-2, block 2 2-3: forward begins at 2, backward ends at 11; the last two reductions follow
    assert_step(drawn_step(PLAN_ZERO1, 1), 9, 6, 13);
    assert_step(drawn_step(PLAN_ZERO1, 2), 18, 6, 22);
    assert_step(drawn_step(PLAN_ZERO2, 1), 9, 6, 13);
    assert_step(drawn_step(PLAN_ZERO2, 2), 18, 9, 22); // the first micro-batch's are hidden behind the second
    // nothing is sent ahead, and gathers queue behind reductions: nothing is hidden
    assert_step(drawn_step(PLAN_ZERO3, 1), 9, 9, 18);
    assert_step(drawn_step(PLAN_ZERO3, 2), 18, 18, 36);
    // root 0-1, kept for the whole step, block 1 1-2, compute from 2 on; then each unit has been gathered when it is needed
    assert_step(drawn_step(PLAN_FSDP, 1), 9, 8, 13);
    // then only blocks are gathered, after the first micro-batch's reductions: block 1 13-14, compute 14-23
    assert_step(drawn_step(PLAN_FSDP, 2), 18, 15, 25);
}

static void test_steps_of_groups_that_can_be_drawn_by_hand(void** state) {
    (void)state;
    // blocks 1 and 2 are a group, block 3 another. Root 0-1, group 1 1-2 and group 2 2-3 are gathered, so forward is 2-5 and
    // the head 5-8. Meanwhile group 2 is gathered 5-6, then group 1 8-9, so backward is 8-14; the last two reductions follow
    assert_step(drawn_step_of(PLAN_FSDP, 1, 3, 2), 12, 8, 16);
    // one group, gathered 0-1; all of compute, then one reduction
    assert_step(drawn_step_of(PLAN_FSDP, 1, 3, 0), 12, 2, 14);
    assert_step(drawn_step_of(PLAN_FSDP, 2, 3, 0), 24, 3, 26); // the first reduction is behind the second micro-batch
    // more than there are blocks: one group beside the root
    assert_step(drawn_step_of(PLAN_FSDP, 1, 2, 7), 9, 5, 13);
    assert_step(drawn_step_of(PLAN_ZERO3, 1, 2, 7), 9, 9, 18); // which has no groups
}

static void test_the_last_group_is_the_first_to_go_backward(void** state) {
    (void)state;
    Plan p = { named("gpt2"), 1, 8, 1, RECOMPUTE_NONE, 2, 2, true, 2, 2 };
    p.config.L = 3;
    Link link;
    double block = (double)unit_elements(p.config, 1), root = (double)unit_elements(p.config, 0) / block;
    for (int c = 0; c < PLAN_COLLECTIVES; c++) {
        link.alpha[c] = 0;
        link.busbw[c] = block; // a block is gathered in a second, its gradients are reduced in two
    }
    Network w = { link, link, 0, 1, PLAN_RING };
    UnitSeconds s = { 10, 20, 30 };
    // compute waits for the root and the first two blocks; their reductions, 2 root and 4 s, follow it
    assert_true(near(plan_step(&p, PLAN_FSDP, &w, s).seconds, root + 2 + 120 + 4 + 2 * root));
}

// On a link without latency, where a byte takes a second, the timeline's seconds of communication are the bytes of a formula.
static void test_what_a_step_sends_is_what_the_stages_say(void** state) {
    (void)state;
    Link bytes;
    for (int c = 0; c < PLAN_COLLECTIVES; c++) {
        bytes.alpha[c] = 0;
        bytes.busbw[c] = 1;
    }
    Network w = { bytes, bytes, 0, 1, PLAN_RING };
    UnitSeconds s = { 1, 2, 3 };
    for (int i = 0; i < 4 * 2 * 3; i++) {
        Plan p = plan_of("gpt2", i % 2 ? 8 : 3);
        p.X = i / 2 % 2 ? 4 : 2;
        p.accumulation = 1 + i / 4 % 2;
        p.wrap_blocks = i / 8 == 0 ? 1 : i / 8 == 1 ? 5 : 0; // 5 do not divide 12
        for (PlanStage stage = PLAN_DDP; stage < PLAN_STAGES; stage++) {
            double doubles = (stage == PLAN_DDP ? 1 : 3) * 2 * sizeof(double) * (p.N - 1.0) / p.N;
            assert_true(fabs(plan_step(&p, stage, &w, s).communication + doubles - plan_sent(&p, stage) / p.N) < 1e-3);
        }
    }
}

static void test_compute_is_divided_by_flops(void** state) {
    (void)state;
    Plan p = plan_of("gpt2", 1);
    for (p.recompute = RECOMPUTE_NONE; p.recompute <= RECOMPUTE_BLOCK; p.recompute++) {
        UnitSeconds s = plan_unit_seconds(&p, 10);
        assert_true(fabs(12 * (s.block_forward + s.block_backward) + s.head - 10) < 1e-9);
        assert_true(near(s.block_backward, s.block_forward * (p.recompute ? 3 : 2)));
        // 6 FLOPs for each of wte, wpe and the final layernorm; a block's forward pass has a third of its 6, and of attention's
        assert_true(near(s.head / s.block_forward, (50257 + 1024 + 2) * 768.0 * 3 / (7087872 + 768.0 * 1024)));
    }
}

static void test_what_holds_for_every_model_and_link(void** state) {
    (void)state;
    const char* const links[] = { "nvlink", "pcie", "infiniband" };
    double tokens[3];
    for (int i = 0; i < 3 * PLAN_STAGES * 2 * 2 * 2; i++) {
        PlanStage stage = (PlanStage)(i / 3 % PLAN_STAGES);
        int bits = i / 3 / PLAN_STAGES;
        Plan p = plan_of(bits & 1 ? "gpt2" : "gpt2-xl", 1);
        p.accumulation = bits & 2 ? 4 : 1;
        Network w = network_of(links[i % 3], "infiniband", 8);
        w.algorithm = bits & 4 ? PLAN_TREE : PLAN_RING;
        double efficiency = 1;
        for (p.N = 1; p.N <= 4096; p.N *= 2) {
            StepTime t = plan_step(&p, stage, &w, plan_unit_seconds(&p, 0.1));
            assert_true(t.exposed >= 0 && t.exposed <= t.communication * (1 + 1e-9) && t.seconds >= t.compute);
            assert_true(p.N > 1 || (t.efficiency == 1 && t.communication == 0));
            assert_true(t.efficiency <= efficiency && t.efficiency > 0); // never rises with N
            efficiency = t.efficiency;
            tokens[i % 3] = t.tokens_per_s;
        }
        if (i % 3 == 2) assert_true(tokens[0] >= tokens[2]); // a slower link never helps
    }
}

static void test_fsdp_hides_what_zero_3_cannot(void** state) {
    (void)state;
    Plan p = plan_of("gpt2-xl", 8);
    p.X = 4; // so that both send the same type
    Network w = network_of("nvlink", "infiniband", 8);
    UnitSeconds s = plan_unit_seconds(&p, 0.2);
    StepTime ddp = plan_step(&p, PLAN_DDP, &w, s);
    StepTime zero3 = plan_step(&p, PLAN_ZERO3, &w, s), fsdp = plan_step(&p, PLAN_FSDP, &w, s);
    double root = network_seconds(&w, PLAN_ALL_GATHER, 4.0 * (double)unit_elements(p.config, 0), 8);
    assert_true(fabs(fsdp.communication + root - zero3.communication) < 1e-12);
    assert_true(fabs(zero3.communication / ddp.communication - 1.5) < 1e-4); // except padding
    assert_true(zero3.exposed > 0.99 * zero3.communication && fsdp.exposed < 0.1 * fsdp.communication);
    p.rooms = 1; // no room to gather ahead
    StepTime one = plan_step(&p, PLAN_FSDP, &w, s);
    assert_true(one.exposed > 0.99 * one.communication);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_zero_papers_table),
        cmocka_unit_test(test_figures_that_courses_give),
        cmocka_unit_test(test_a_small_model_counted_by_hand),
        cmocka_unit_test(test_groups_of_blocks_counted_by_hand),
        cmocka_unit_test(test_what_depends_on_sizes),
        cmocka_unit_test(test_fsdps_shards_are_the_master_copy),
        cmocka_unit_test(test_our_stages_follow_the_papers_formulas_but_for_padding),
        cmocka_unit_test(test_accumulation_and_what_is_sent),
        cmocka_unit_test(test_gpt2_xl_on_24_gb_needs_sharding),
        cmocka_unit_test(test_the_largest_model_fits_and_the_next_does_not),
        cmocka_unit_test(test_collectives_take_what_a_ring_or_a_tree_takes),
        cmocka_unit_test(test_a_measured_link_gives_the_measured_times),
        cmocka_unit_test(test_bad_measurements_are_refused),
        cmocka_unit_test(test_steps_that_can_be_drawn_by_hand),
        cmocka_unit_test(test_steps_of_groups_that_can_be_drawn_by_hand),
        cmocka_unit_test(test_the_last_group_is_the_first_to_go_backward),
        cmocka_unit_test(test_what_a_step_sends_is_what_the_stages_say),
        cmocka_unit_test(test_compute_is_divided_by_flops),
        cmocka_unit_test(test_what_holds_for_every_model_and_link),
        cmocka_unit_test(test_fsdp_hides_what_zero_3_cannot),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
