// test_plan_tables.c - build/plan's tables: shapes of models, presets of GPUs, and what others have published. A row is checked against
// another figure of the same source, or against a count.
#include "../../dev/tools/plan_models.h"
#include "../../dev/tools/plan_gpus.h"
#include "../../dev/tools/plan_published.h"
#include "../../llmc/model/gpt2.h"
#include "test_folder.h"

static bool near(double x, double y) { return fabs(x - y) <= 1e-12 * fabs(y); }
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

TEST(groups_share_interfaces) {
    NcclGroup all = plan_gpu_group(plan_gpu("h100"), 64, 8, 1), apart = plan_gpu_group(plan_gpu("h100"), 8, 1, 8);
    NcclGroup poor = plan_gpu_group(plan_gpu("rtx4090"), 8, 1, 8);
    assert_true(all.nics == 8 && all.nic == 50 && apart.nics == 1 && apart.nic == 50);
    assert_true(poor.nics == 1 && near(poor.nic, 12.5 / 8)); // one interface for 8 groups
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

// States and the largest model that fits are in --validate's rows (test_plan_mesh.c).
TEST(parameters_are_printed_so_and_what_ran_fits) {
    static const double bytes[4][2] = { { 16, 0 }, { 4, 12 }, { 2, 14 }, { 0, 16 } }; // whole, divided by ranks
    for (size_t i = 0; i < rows; i++) {
        const Published* r = &published[i];
        double each = bytes[r->zero][0] + bytes[r->zero][1] / r->dp;
        if (r->kind == SAYS_PARAMETERS_B) assert_within(1e-9 * shape_parameters(shape(r->model)), r->value, 0.03, r->model);
        if (r->kind == SAYS_LARGEST_RAN_B) assert_true(r->value <= 32 * r->tp / each);
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
