// test_plan_mesh.c - build/plan's model of any mesh: tables of models, GPUs and published rows, each checked against another figure of the
// same source or against a count; steps that can be counted by hand; properties; how near it comes to what others have published; and the
// search of a mesh with its reasons.
#include "../../dev/tools/plan_validate.h"
#include "../../dev/tools/plan_search.h"
#include "test_folder.h"

static bool near(double x, double y) { return fabs(x - y) <= 1e-9 * fabs(y); }
static const PlanShape* shape(const char* name) {
    const PlanShape* s = plan_shape(name);
    if (s == NULL) fail_msg("there is no shape %s", name);
    return s;
}
static void assert_within(double x, double given, double relative, const char* what) {
    if (!(fabs(x - given) <= relative * fabs(given))) fail_msg("%s: %.6g, not %.6g", what, x, given);
}

// ---- shapes ----
TEST(gpt2s_shapes_are_gpt2_hs) {
    static const char* const names[] = { "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl" };
    for (int i = 0; i < 4; i++) {
        GPT2Config c = { 0, GPT2_VOCABULARY, gpt2_padded_vocabulary(GPT2_VOCABULARY), 0, 0, 0 };
        const PlanShape* s = shape(names[i]);
        assert_true(gpt2_named_config(names[i], &c));
        assert_true(s->L == c.L && s->NH == c.NH && s->NKV == c.NH && s->C == c.C && s->F == 4 * c.C && s->T == c.max_T);
        assert_true(shape_parameters(s) == (double)gpt2_num_parameters(c));
        // gpt2_flops_per_token, like llm.c's, counts 6 for every parameter: also for vectors and positions
        double others = s->L * shape_block_vectors(s) + (s->T + 2.0) * s->C;
        assert_true(near(shape_flops(s, 1024, true), gpt2_flops_per_token(c, 1024) - 6 * others));
    }
}

TEST(parameters_that_can_be_counted) {
    // two embeddings of 128256 x 4096, 32 blocks of 2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336 + 2 x 4096, a norm of 4096
    assert_true(shape_parameters(shape("llama3-8b")) == 8030261248.0);
    assert_true(shape_parameters(shape("llama3-70b")) == 70553706496.0);
    assert_true(shape_parameters(shape("llama3-405b")) == 405853388800.0);
    // the widths of torchtitan's rule: 8/3 C, times 1.3 or 1.2, in multiples of 1024 or 4096
    static const struct { const char* name; double times; int multiple; } widths[] = {
        { "llama3-8b", 1.3, 1024 }, { "llama3-70b", 1.3, 4096 }, { "llama3-405b", 1.2, 4096 }
    };
    for (int i = 0; i < 3; i++) {
        const PlanShape* s = shape(widths[i].name);
        int width = (int)(widths[i].times * (int)(8.0 * s->C / 3));
        assert_int_equal(s->F, (width + widths[i].multiple - 1) / widths[i].multiple * widths[i].multiple);
    }
    // table 2.1 of the GPT-3 paper, whose figures are rounded to the model's name
    static const struct { const char* name; double given; } gpt3[] = {
        { "gpt3-125m", 125e6 }, { "gpt3-350m", 350e6 }, { "gpt3-760m", 760e6 }, { "gpt3-1.3b", 1.3e9 },
        { "gpt3-2.7b", 2.7e9 }, { "gpt3-6.7b", 6.7e9 }, { "gpt3-13b", 13e9 }, { "gpt3-175b", 175e9 }
    };
    for (int i = 0; i < 8; i++) assert_within(shape_parameters(shape(gpt3[i].name)), gpt3[i].given, 0.02, gpt3[i].name);
}

TEST(every_shape_divides) {
    for (int i = 0; i < PLAN_SHAPES; i++) {
        const PlanShape* s = &plan_shapes[i];
        assert_true(plan_shape(s->name) == s); // no name twice
        assert_true(s->C % s->NH == 0 && s->NH % s->NKV == 0 && (s->llama || s->F == 4 * s->C));
    }
    assert_true(plan_shape("gpt5") == NULL);
}

TEST(flops_are_equation_3) {
    for (int i = 0; i < PLAN_SHAPES; i++) {
        const PlanShape* s = &plan_shapes[i];
        double h = s->C, l = s->L, V = s->V, seq = 2048;
        if (s->llama) continue;
        double F = 96 * l * h * h * (1 + seq / (6 * h) + V / (16 * l * h)); // per token
        assert_true(near(shape_flops_recomputed(s, seq, false), F));
        assert_true(near(shape_flops(s, seq, false) - shape_flops(s, seq, true), 6 * l * h * seq)); // the masked half
    }
}

TEST(activations_of_a_block) {
    const PlanShape *gpt = shape("gpt2"), *llama = shape("llama3-8b");
    assert_true(near(shape_block_activations(gpt, 1, false), 16 * 768));
    assert_true(near(shape_block_activations(gpt, 4, false), (4 + 12 / 4.0) * 768)); // as train_gpt2_tp, doc/plan.md
    assert_true(near(shape_block_activations(gpt, 4, true), 16 / 4.0 * 768));
    // 2 norms in and out, q and the output of attention, k and v of 1024, and 3 of 14336
    assert_true(near(shape_block_activations(llama, 1, false), 6 * 4096 + 2 * 1024 + 3 * 14336));
    assert_true(near(shape_recomputed_activations(llama, 8, true), 4096 / 8.0));
}

// ---- GPUs ----
TEST(presets_of_gpus) {
    static const double printed[PLAN_GPUS] = { 40, 80, 80, 141, 180, 24, 192 }; // GB, by the data sheets
    for (int i = 0; i < PLAN_GPUS; i++) {
        const PlanGpu* g = &plan_gpus[i];
        assert_true(plan_gpu(g->name) == g);
        // a data sheet's GB is 1e9 or 2^30 bytes, and some are kept back for error correction
        assert_true(g->memory > 0.99 * printed[i] * 1e9 && g->memory <= printed[i] * 1073741824.0);
        assert_true(g->peak16 > g->peak32 && g->bandwidth > g->inside && g->inside > g->nic);
        // NCCL counts less than the wire
        assert_true(1e9 * g->nccl_inside < g->inside && (g->nccl_inside == 0 || 1e9 * g->nccl_inside > 0.75 * g->inside));
    }
    assert_true(plan_gpu("tpu") == NULL);
    assert_true(plan_gpu("h100")->memory == 81559 * 1048576.0);
}

// ---- by hand ----
static MeshPlan plan_of(const char* shape, const char* gpu, int dp, int tp, int pp, int zero, int batch, int micro) {
    MeshPlan p = { plan_shape(shape), plan_gpu(gpu), dp, tp, pp, 1, false, zero, batch, micro, 1024, MESH_ALL,
                   &mesh_programs[MESH_SHARD], 0 };
    return p;
}
static double sum_of_parts(const MeshTime* t) {
    double sum = 0;
    for (int k = 0; k < PARTS; k++) sum += search_part(t, k);
    return sum;
}

TEST(a_step_of_one_gpu) {
    MeshPlan p = plan_of("gpt2", "h100", 1, 1, 1, 0, 8, 4); // two micro-batches of 4096 tokens
    double C = 768, tokens = 4096, peak = 989e12 * 0.62, memory = 3350e9 * 0.9;
    // forward: 24 C^2 FLOPs and the unmasked half of attention's; 24 C numbers of 2 bytes, read or written
    double block = (24 * C * C + 2 * C * 1024) * tokens / peak + 2 * 24 * C * tokens / memory;
    double head = 2 * C * 50257 * tokens / peak + 2 * 2 * 50257 * tokens / memory;
    MeshTime t = mesh_step(&p);
    assert_true(near(t.compute, 2 * (12 * 3 * block + 3 * head)));
    assert_true(near(t.update, 28 * 124439808.0 / memory));
    assert_true(t.tensor == 0 && t.bubble == 0 && t.messages == 0 && t.data == 0);
    assert_true(near(t.tokens_per_s, 8 * 1024 / t.seconds));
    p.kept = MESH_INPUTS; // another forward pass
    assert_true(near(mesh_step(&p).compute, 2 * (12 * 4 * block + 3 * head)));
}

TEST(bytes_of_states) {
    double P = 124439808;
    for (int zero = 0; zero <= 3; zero++) {
        static const double each[4] = { 16, 4 + 12 / 8.0, 2 + 14 / 8.0, 16 / 8.0 };
        MeshPlan p = plan_of("gpt2", "h100", 8, 1, 1, zero, 8, 1);
        MeshBytes b = mesh_bytes(&p);
        assert_true(near(b.parameters + b.gradients + b.optimizer, each[zero] * P));
        assert_true((b.gathered > 0) == (zero == 3));
        assert_true(near(b.activations, 1024 * (12 * 2 * 16 * 768.0 + 2 * 50257.0))); // and the logits
    }
    MeshPlan p = plan_of("gpt2", "h100", 1, 4, 1, 0, 1, 1), rows = p;
    rows.rows = true;
    double saved = mesh_bytes(&p).activations - mesh_bytes(&rows).activations;
    assert_true(near(saved, 1024 * 12 * 2 * 3 * 768.0)); // C of 4 C are left
}

TEST(a_pipeline) {
    MeshPlan p = plan_of("gpt2", "h100", 1, 1, 2, 0, 8, 1), one = plan_of("gpt2", "h100", 1, 1, 1, 0, 8, 1);
    p.program = one.program = &mesh_programs[MESH_LLMC]; // equal stages
    MeshCompute c = mesh_compute(&p);
    double stage = 6 * (c.forward + c.backward) + c.head + c.head_backward; // the last
    MeshTime t = mesh_step(&p);
    assert_true(near(2 * t.compute, mesh_step(&one).compute));
    assert_true(near(t.compute + t.bubble, (8 + 1) * stage)); // 8 micro-batches, and one bubble
    assert_true(near(t.messages, 2 * 9 * (2 * 1024 * 768 / 450e9 + 10e-6)));
    p.chunks = 2;
    assert_true(near(t.compute + mesh_step(&p).bubble, 8.5 * stage));
    // it keeps two micro-batches of six blocks, and with two chunks a half more of the difference
    p.chunks = 1;
    assert_true(near(mesh_bytes(&p).activations, 2 * 6 * 1024 * 2 * 16 * 768.0));
    p.chunks = 2;
    assert_true(near(mesh_bytes(&p).activations, 2.5 * 6 * 1024 * 2 * 16 * 768.0));
}

// 12 blocks and a head of 5.46 blocks are cut into 9 and 3.
TEST(stages_of_our_programs_are_balanced) {
    MeshPlan p = plan_of("gpt2", "h100", 1, 1, 2, 0, 8, 1);
    MeshCompute c = mesh_compute(&p);
    double block = c.forward + c.backward, head = c.head + c.head_backward, slowest = fmax(9 * block, 3 * block + head);
    MeshTime t = mesh_step(&p);
    assert_true(near(t.compute + t.bubble, 8 * slowest + (12 * block + head - slowest)));
}

// Two nodes of one GPU, whose hops take no time: ZeRO-1 reduces and gathers once a step, ZeRO-2 reduces in each of 4 micro-batches.
TEST(what_zero_sends) {
    PlanGpu gpu = *plan_gpu("mi300x"); // plain rings
    MeshPlan p = plan_of("gpt2", "mi300x", 2, 1, 1, 1, 8, 1);
    gpu.per_node = gpu.nics = 1; gpu.hop = 0;
    gpu.nic = 1e6; // nothing hides what takes so long
    p.gpu = &gpu;
    double half = 2 * shape_parameters(p.shape) / 2 / 1e6; // of all parameters, seconds
    MeshCompute c = mesh_compute(&p);
    double forward = 12 * c.forward, backward = 12 * c.backward;
    assert_true(near(mesh_step(&p).data, half - backward + half - forward));
    p.zero = 2;
    assert_true(near(mesh_step(&p).data, 3 * (half - backward - forward) + half - backward + half - forward));
    p.zero = 0;
    assert_true(near(mesh_step(&p).data, 2 * half - backward));
}

TEST(groups_of_a_mesh) {
    MeshPlan p = plan_of("gpt3-175b", "h100", 8, 4, 4, 0, 8, 1);
    NcclGroup tp = mesh_group(&p, 4, 1), dp = mesh_group(&p, 8, 16), pp = mesh_group(&p, 4, 4);
    assert_true(tp.per_node == 4 && nccl_nodes(&tp) == 1);
    assert_true(pp.per_node == 2 && nccl_nodes(&pp) == 2 && pp.nics == 2); // two stages in a node; 4 groups, 8 interfaces
    assert_true(dp.per_node == 1 && nccl_nodes(&dp) == 8 && dp.nics == 1 && dp.nic == 50);
    NcclGroup poor = plan_gpu_group(plan_gpu("rtx4090"), 8, 1, 8);
    assert_true(poor.nics == 1 && near(poor.nic, 12.5 / 8)); // one interface for 8 groups
    MeshPlan wide = plan_of("gpt3-175b", "h100", 1, 16, 1, 0, 8, 1);
    NcclGroup across = mesh_group(&wide, 16, 1);
    assert_true(nccl_nodes(&across) == 2);
    assert_true(mesh_collective(&wide, 16, 1, false, 1e8) > mesh_collective(&wide, 8, 1, false, 1e8));
}

TEST(what_cannot_be) {
    static const struct { const char* shape; int dp, tp, pp, zero, chunks, batch; const char* error; } cases[] = {
        { "gpt2", 1, 8, 1, 0, 1, 8, "heads do not divide" },
        { "llama3-8b", 1, 16, 1, 0, 1, 16, "heads do not divide" }, // 8 of keys and values
        { "gpt2", 3, 1, 1, 0, 1, 8, "the batch does not divide" }, { "gpt2", 1, 1, 13, 0, 1, 8, "there are fewer blocks than stages" },
        { "gpt2", 1, 1, 3, 0, 2, 8, "micro-batches do not divide over stages" } };
    for (int i = 0; i < 5; i++) {
        MeshPlan p = plan_of(cases[i].shape, "h100", cases[i].dp, cases[i].tp, cases[i].pp, cases[i].zero, cases[i].batch, 1);
        p.chunks = cases[i].chunks;
        assert_string_equal(mesh_error(&p), cases[i].error);
    }
    MeshPlan right = plan_of("gpt2", "h100", 2, 2, 2, 1, 8, 1);
    assert_null(mesh_error(&right));
}

// ---- properties ----
TEST(what_holds_for_every_mesh) {
    for (int g = 0; g < PLAN_GPUS; g++) for (int s = 0; s < PLAN_SHAPES; s++) for (int tp = 1; tp <= 8; tp *= 2) {
        for (int zero = 0; zero <= 3; zero++) {
            MeshPlan p = plan_of(plan_shapes[s].name, plan_gpus[g].name, 16, tp, zero > 1 ? 1 : 4, zero, 512, 1);
            if (mesh_error(&p) != NULL) continue;
            MeshTime t = mesh_step(&p);
            MeshPlan inputs = p, stage = p;
            inputs.kept = MESH_INPUTS;
            stage.zero = zero > 0 ? zero - 1 : 0;
            assert_true(near(sum_of_parts(&t), t.seconds) && t.mfu > 0 && t.mfu < mesh_products(p.gpu));
            for (int k = 0; k < PARTS; k++) assert_true(search_part(&t, k) >= 0);
            MeshBytes b = mesh_bytes(&p), before = mesh_bytes(&stage);
            // recomputation computes more and keeps less; a higher stage keeps less of the states
            assert_true(mesh_step(&inputs).compute > t.compute && mesh_step(&inputs).seconds > 0.9999 * t.seconds);
            assert_true(mesh_bytes(&inputs).activations < b.activations);
            double now = b.parameters + b.gradients + b.optimizer;
            assert_true(zero == 0 || now < before.parameters + before.gradients + before.optimizer);
        }
    }
}

// ---- what others have published ----
#define TABLE "dev/tools/plan_published.txt"
static Published* published; // (rows)
static size_t rows;
void before_all(void) { published = published_read(TABLE, &rows); }
void after_all(void) { free(published); }

static double seconds_of(const Published* r) { // of its step
    double tokens = (double)r->batch * r->T;
    return r->kind == SAYS_SECONDS ? r->value : tokens / (r->value * r->gpus);
}
static const Published* find(const char* source, const char* model, PublishedKind kind, int gpus) {
    for (size_t i = 0; i < rows; i++) {
        const Published* r = &published[i];
        if (strcmp(r->source, source) != 0 || r->kind != (int)kind || r->gpus != gpus) continue;
        if (strcmp(r->model, model) == 0) return r;
    }
    fail_msg("no row of %s says %s of %s on %d", source, published_kinds[kind], model, gpus);
    return NULL;
}
TEST(rows_are_possible) {
    assert_int_equal(rows, 200);
    for (size_t i = 0; i < rows; i++) {
        const Published* r = &published[i];
        assert_int_equal(r->gpus, r->dp * r->tp * r->pp * r->cp);
        assert_true(r->value > 0 || r->kind == SAYS_FITS);
        assert_true(plan_gpu(r->gpu) || strcmp(r->gpu, "v100-32") == 0 || strcmp(r->gpu, "h100-96") == 0);
        if (strncmp(r->source, "ZERO", 4) == 0) continue;
        const PlanShape* s = shape(r->model);
        int rounds = r->micro > 0 ? r->micro * r->dp : r->dp;
        bool divides = s->NH % r->tp == 0 && r->batch % rounds == 0;
        if (!divides) fail_msg(TABLE ":%d: heads or batch do not divide", r->line);
        // 126 blocks on 8 ranks do not: embedding and head count as one block each
        int blocks = s->L + (s->L == 126 ? 2 : 0), parts = r->pp * (r->chunks > 0 ? r->chunks : 1);
        if (blocks % parts != 0) fail_msg(TABLE ":%d: %d blocks do not divide over %d", r->line, blocks, parts);
    }
}

TEST(utilizations_agree_with_seconds) {
    static const struct { const char* model; int gpus; } korthikanti[] = {
        { "megatron-22b", 8 }, { "megatron-175b", 64 }, { "megatron-530b", 280 }, { "megatron-1t", 512 },
        { "megatron-530b", 2240 }
    };
    for (int i = 0; i < 5; i++) { // of the later of two rows with seconds: rows cut, attention recomputed
        const Published* mfu = find("KOR5", korthikanti[i].model, SAYS_MFU, korthikanti[i].gpus);
        const Published* t = mfu - 1;
        const PlanShape* s = shape(mfu->model);
        assert_true(t->kind == SAYS_SECONDS && t->gpus == mfu->gpus && t->kept == KEPT_SELECTED);
        double per_flop = (double)t->batch * t->T / (t->value * t->gpus * 312e12);
        assert_within(100 * per_flop * shape_flops(s, t->T, false), mfu->value, 0.006, mfu->model);
        if (mfu[1].kind != SAYS_HFU) continue;
        double ratio = 1 + t->T / (6.0 * s->C); // section 6.3: HFU by MFU, "approximately"
        assert_within(mfu[1].value / mfu->value, ratio, 0.01, mfu->model);
    }
    // llm.c's own count, and an H100's 989 TFLOP/s
    const Published *s = find("LLMC", "gpt2-xl", SAYS_SECONDS, 8), *tokens = find("LLMC", "gpt2-xl", SAYS_TOKENS, 8);
    assert_within(seconds_of(tokens), seconds_of(s), 1e-4, "llm.c's tokens/s");
    GPT2Config c = { 0, GPT2_VOCABULARY, gpt2_padded_vocabulary(GPT2_VOCABULARY), 0, 0, 0 };
    gpt2_named_config("gpt2-xl", &c);
    double mfu = 100 * gpt2_flops_per_token(c, 1024) * 1048576 / (s->value * 8 * 989e12);
    assert_within(mfu, find("LLMC", "gpt2-xl", SAYS_MFU, 8)->value, 0.002, "llm.c's MFU");
    // torchtitan: "33% to 39% MFU" of its first two rows
    const Published* first = find("TITAN", "llama3-8b", SAYS_TOKENS, 8);
    const PlanShape* llama = shape("llama3-8b");
    double percent = 100 * shape_flops(llama, first->T, false) / 989e12;
    assert_within(first->value * percent, 33.5, 0.03, "torchtitan's MFU");
    assert_within(first[2].value * percent, 39, 0.03, "torchtitan's MFU, compiled");
}

TEST(what_llmcs_log_says_of_weights_is_exact) {
    // 2 bytes a parameter, and of three kinds of 4 bytes an eighth; llm.c pads the vocabulary
    double elements = shape_parameters(shape("gpt2-xl")) + (50304 - 50257) * 1600.0;
    assert_true(floor(2 * elements / PLAN_MIB) == find("LLMC", "gpt2-xl", SAYS_WEIGHTS_MIB, 8)->value);
    assert_true(floor(2 * elements / PLAN_MIB) == find("LLMC", "gpt2-xl", SAYS_GRADIENTS_MIB, 8)->value);
    assert_true(3 * floor(4 * elements / 8 / PLAN_MIB) == find("LLMC", "gpt2-xl", SAYS_OPTIMIZER_MIB, 8)->value);
}

TEST(lines_that_are_no_rows_are_refused) {
    static const struct { const char *text, *finding; } bad[] = {
        { "# only a comment\n", "has no rows" },
        { "MEG1 gpt2 h100 8 8 1 1 1 1 no 0 8 1 1024 all 16 seconds\n", "line 1 is no row" },      // no value
        { "#\nMEG1 gpt2 h100 8 8 1 1 1 1 no 0 8 1 1024 all 16 years 3\n", "line 2 is no row" },   // no kind
        { "MEG1 gpt2 h100 8 eight 1 1 1 1 no 0 8 1 1024 all 16 seconds 3\n", "line 1 is no row" }, // no number
        { "MEG1 gpt2 h100 8 8 1 1 1 1 no 0 8 1 1024 all 32 seconds 3\n", "line 1 is no row" },     // no bits
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const char* path = write_file("rows.txt", bad[i].text, strlen(bad[i].text));
        expect_error(published_read(path, &rows), path, bad[i].finding, "a row is: source model gpu");
    }
}

// Rows of a source, of bytes or of times (sharded: ZeRO-3's): how many are predicted, and how far the furthest may be off.
TEST(published_bytes_and_times) {
    static const struct { const char* source; bool times, sharded; int n; double most; } sources[] = {
        { "ZERO1", false, false, 54, 0.025 }, { "ZERO2", false, false, 20, 0.025 }, { "LLMC", false, false, 4, 0.012 },
        { "TITAN", false, false, 4, 0.14 }, { "MEG1", false, false, 10, 0.03 }, { "MEG1", true, false, 10, 0.13 },
        { "MEG2", true, false, 6, 0.10 }, { "KOR4", true, false, 10, 0.05 }, { "KOR5", true, false, 14, 0.12 },
        { "LLMC", true, false, 6, 0.06 }, { "FSDP", true, true, 3, 0.22 }, { "TITAN", true, true, 4, 0.25 },
        { "TITANTP", true, true, 4, 0.37 }, { "MEG2", true, true, 6, 0.28 } };
    for (size_t k = 0; k < sizeof sources / sizeof sources[0]; k++) {
        double off = 0;
        int n = 0;
        for (size_t i = 0; i < rows; i++) {
            const Published* r = &published[i];
            double x = validate_row(r, 2e9);
            bool times = validate_is_time(r->kind), sharded = times && r->zero == 3;
            if (strcmp(r->source, sources[k].source) != 0 || times != sources[k].times || sharded != sources[k].sharded) continue;
            if (r->kind == SAYS_LARGEST_RAN_B) assert_true(r->value <= 32 * r->tp / validate_state_bytes(r));
            if (isnan(x) || r->kind == SAYS_FITS) continue;
            off = fmax(off, validate_off(x / r->value));
            n++;
        }
        if (n != sources[k].n || off > sources[k].most) fail_msg("%s: %d rows, up to %.3f off", sources[k].source, n, off);
    }
    Validation v = validate_all(published, rows, 2e9, NULL);
    if (!(v.bytes_off < 0.05 && v.times_off < 0.10)) fail_msg("the medians are %.3f and %.3f off", v.bytes_off, v.times_off);
}

// DeepSpeed's of 2021: 5.1e9 parameters in 16 bits in 410 ms on 8 ranks, whatever the links have; and nothing hides them.
TEST(gathers_that_are_slower_than_links) {
    MeshPlan p = plan_of("gpt3-13b", "a100-80", 8, 1, 1, 3, 8, 1);
    double quick = mesh_data_collective(&p, false, 10.2e9);
    p.program = &mesh_programs[MESH_DEEPSPEED];
    assert_true(near(mesh_data_collective(&p, false, 10.2e9), 0.410));
    assert_true(near(mesh_data_collective(&p, true, 10.2e9), 0.820));
    assert_true(quick < 0.1);
    double all = 3 * 2 * shape_parameters(p.shape) / 10.2e9 * 0.410, root = 2 * shape_root_parameters(p.shape) / 10.2e9 * 0.410;
    assert_true(near(mesh_step(&p).data, all - root)); // twice gathered and once reduced, but the root is gathered once
}

// ---- search ----
static Search search_of(const char* shape, const char* gpu, int ranks, int batch, int T) {
    return search(&(SearchFor){ plan_shape(shape), plan_gpu(gpu), ranks, batch, T, 2e9 });
}
static void assert_says(const char* text, const char* part) {
    if (strstr(text, part) == NULL) fail_msg("'%s' does not say '%s'", text, part);
}
TEST(results_are_in_order) {
    static const struct { const char *shape, *gpu; int ranks, batch, T; } runs[] = {
        { "gpt2", "h100", 8, 512, 1024 }, { "gpt2-xl", "rtx4090", 8, 64, 1024 }, { "gpt3-175b", "h100", 512, 1536, 2048 },
        { "llama3-8b", "h200", 64, 512, 8192 }, { "llama3-405b", "b200", 1024, 2048, 8192 },
        { "gpt3-13b", "mi300x", 16, 256, 2048 }
    };
    for (size_t k = 0; k < sizeof runs / sizeof runs[0]; k++) {
        char text[600];
        Search s = search_of(runs[k].shape, runs[k].gpu, runs[k].ranks, runs[k].batch, runs[k].T);
        assert_true(s.fits > 0 && s.n < SEARCH_MOST);
        for (int i = 0; i < s.n; i++) {
            const SearchResult* r = &s.results[i];
            assert_int_equal(mesh_ranks(&r->plan), runs[k].ranks);
            assert_true((r->error == NULL) == (i < s.fits));
            if (i >= s.fits) assert_true(r->time.seconds == 0); // nothing is timed that does not fit
            else assert_true(r->bytes.total <= r->plan.gpu->memory && r->time.seconds > 0.995 * s.results[0].time.seconds);
            text[0] = '\0';
            if (i > 0) search_why(r, &s.results[0], text, sizeof text);
            assert_true(i == 0 || strlen(text) > 10);
        }
        for (int i = 0; i < s.fits; i++) { // none that takes as long as the fastest has less machinery than the first
            const SearchResult *r = &s.results[i], *fastest = &s.results[0];
            for (int j = 0; j < s.fits; j++) if (search_faster(&s.results[j], fastest)) fastest = &s.results[j];
            assert_true(i == 0 || !search_as_long(r, fastest) || !search_simpler(r, &s.results[0]));
            assert_true(i > 0 || search_as_long(r, fastest));
        }
        search_why_first(&s, text, sizeof text);
        assert_says(text, "It fits with");
        assert_true(strlen(text) < sizeof text - 1);
        search_free(&s);
    }
}

TEST(what_is_found) {
    char text[600];
    Search small = search_of("gpt2", "h100", 8, 512, 1024);
    const MeshPlan* p = &small.results[0].plan;
    assert_true(p->dp == 8 && p->zero <= 1 && p->kept == MESH_ALL); // it fits on one: data parallelism
    search_free(&small);
    Search large = search_of("gpt3-175b", "h100", 512, 1536, 2048);
    p = &large.results[0].plan;
    assert_true(p->tp > 1 && p->tp <= 8 && p->pp > 1); // in a node, and between nodes
    const SearchResult* wide = large.results;
    while (wide->plan.tp != 16 || wide->plan.pp != 1) assert_true(++wide < large.results + large.n);
    search_why(wide, &large.results[0], text, sizeof text);
    assert_says(text, "t = 16 crosses nodes");
    search_free(&large);
}
