// test_compress_rounds.c - what ranks make together of compressed gradients (train_gpt2_compress.cu): all have the same, and what a
// step leaves out comes later. The ranks are in one process, and a backend of this test moves their messages.
#define main train_main
#include "../../train_gpt2_compress.cu"
#undef main
#include "../../llmc/comm/sums.h"
#include "unit.h"
#include "world_alone.h"

enum { MOST_RANKS = 4, SEGMENTS = 2, MOST_OPS = 8 };
static const size_t rows[SEGMENTS] = { 37, 20 }, cols[SEGMENTS] = { 24, 50 }; // 4 blocks: of 3 ranks, one has no part
enum { ELEMENTS = 37 * 24 + 20 * 50 };

static Comm world;
static Control control;
static struct { CommSlot* slots[MOST_OPS][MOST_RANKS]; bool moved[MOST_OPS]; } messages; // of a step
static int num_ranks;

// ---- the backend ----
static void move_sum(CommSlot** s) {
    const void* inputs[MOST_RANKS];
    for (int r = 0; r < num_ranks; r++) inputs[r] = s[r]->in;
    comm_add_rows(s[0]->out, inputs, num_ranks, s[0]->n, s[0]->type);
    for (int r = 1; r < num_ranks; r++) memcpy(s[r]->out, s[0]->out, s[0]->n * comm_type_size(s[0]->type));
}
static void move(CommSlot** s) {
    size_t bytes = s[0]->n * comm_type_size(s[0]->type);
    if (s[0]->kind == COMM_ALL_REDUCE) { move_sum(s); return; }
    for (int to = 0; to < num_ranks; to++) for (int from = 0; from < num_ranks; from++) {
        const char* in = (const char*)s[from]->in + (s[0]->kind == COMM_ALL_TO_ALL ? (size_t)to * bytes : 0);
        memmove((char*)s[to]->out + (size_t)from * bytes, in, bytes);
    }
}
static void start(Comm* c, CommSlot* s) { messages.slots[s->number % MOST_OPS][c->rank] = s; }
static void finish(Comm* c, CommSlot* s) {
    int op = (int)(s->number % MOST_OPS);
    (void)c;
    if (!messages.moved[op]) move(messages.slots[op]); // all ranks have issued it, or this reads NULL
    messages.moved[op] = true;
    s->finished = true;
}
static const CommBackend backend = { NULL, NULL, NULL, NULL, NULL, start, finish, NULL, NULL };

// ---- ranks ----
typedef struct { Comm comm; Compress c; floatX grads[ELEMENTS]; } Rank;
static Rank ranks[MOST_RANKS];

static void ranks_open(int N, int method, long long rank) {
    num_ranks = N;
    memset(ranks, 0, sizeof ranks);
    for (int r = 0; r < N; r++) {
        Rank* k = &ranks[r];
        char name[16];
        snprintf(name, sizeof name, "rank%d", r);
        comm_open(&k->comm, world.world, name);
        k->comm.rank = r;
        k->comm.size = N;
        k->comm.backend = &backend;
        k->comm.world_rank = (int*)xcalloc((size_t)N, sizeof(int));
        Compress* c = &k->c;
        c->o = (CompressOptions){ .method = method, .feedback = 1, .fraction = 0.05, .low_rank = rank };
        c->comm = &k->comm;
        c->num_elements = ELEMENTS;
        c->num_segments = SEGMENTS;
        c->segments = (Segment*)xcalloc(SEGMENTS, sizeof(Segment));
        for (int i = 0; i < SEGMENTS; i++) {
            size_t n = rows[i] * cols[i], at = c->compressed;
            c->segments[i] = (Segment){ .method = method, .messages = compress_methods[method].messages, .bucket = i,
                                        .at = at, .n = n, .rows = rows[i], .cols = cols[i] };
            c->compressed += n;
        }
        compress_init(c, k->grads);
    }
}
static void ranks_close(void) {
    for (int r = 0; r < num_ranks; r++) {
        compress_free(&ranks[r].c);
        comm_free(&ranks[r].comm);
    }
}
// Does to all ranks, in turn, what segment_send and segments_finish do to one.
static void take_step(long long step) {
    for (int r = 0; r < num_ranks; r++) compress_step_begin(&ranks[r].c, step, 1);
    memset(&messages, 0, sizeof messages);
    for (int i = 0; i < SEGMENTS; i++)
        for (int r = 0; r < num_ranks; r++) segment_send(&ranks[r].c, &ranks[r].c.segments[i]);
    for (int i = 0; i < SEGMENTS; i++) {
        bool last_needs_two = i == SEGMENTS - 1 && ranks[0].c.segments[i].messages == 2;
        for (int r = 0; r < num_ranks && last_needs_two; r++) segment_advance(&ranks[r].c, &ranks[r].c.segments[i]);
        for (int r = 0; r < num_ranks; r++) segment_advance(&ranks[r].c, &ranks[r].c.segments[i]);
    }
    for (int r = 0; r < num_ranks; r++) ranks[r].c.previous = NULL;
}
static void end_step(bool skipped) { for (int r = 0; r < num_ranks; r++) compress_keep_errors(&ranks[r].c, skipped); }
static float applied(const Rank* k, size_t i) { return to_float(k->grads[i]); }
static void require_equal_ranks(void) {
    for (int r = 1; r < num_ranks; r++)
        for (size_t i = 0; i < ELEMENTS; i++) assert_true(applied(&ranks[r], i) == applied(&ranks[0], i));
}
// What ranks have kept of element i, together: each of its own gradient, and the owner of its part of the sum.
static double kept(size_t i) {
    double sum = 0;
    for (int r = 0; r < num_ranks; r++) {
        Compress* c = &ranks[r].c;
        const Segment* s = &c->segments[i >= c->segments[1].at];
        SegmentCost cost = segment_cost(c, s);
        size_t k = i - s->at;
        const float* errors = c->state + s->state_at;
        sum += errors[k];
        if (cost.part > 0 && k / cost.part == (size_t)r) sum += errors[cost.x + k % cost.part];
    }
    return sum;
}

// ---- tests ----
// Relative, of a floatX: in 16 bits the sum of a step is rounded once more before it is applied, and nobody keeps what that loses.
static const double roundoff = FLOATX_DTYPE == DTYPE_BF16 ? 0x1p-8 : FLOATX_DTYPE == DTYPE_F16 ? 0x1p-11 : 0;

static void require_telescope(int N, int method) {
    static double truth[ELEMENTS], sum[ELEMENTS], rounded[ELEMENTS];
    memset(truth, 0, sizeof truth);
    memset(sum, 0, sizeof sum);
    memset(rounded, 0, sizeof rounded);
    ranks_open(N, method, 3);
    for (int step = 0; step < 50; step++) {
        for (int r = 0; r < N; r++) for (size_t i = 0; i < ELEMENTS; i++) {
            ranks[r].grads[i] = to_floatX(random_normal(7 + (uint64_t)r, (uint64_t)step, i) * (i % 5 == 0 ? 10 : 1));
            truth[i] += (double)to_float(ranks[r].grads[i]);
        }
        take_step(step);
        require_equal_ranks();
        for (size_t i = 0; i < ELEMENTS; i++) sum[i] += (double)applied(&ranks[0], i);
        for (size_t i = 0; i < ELEMENTS; i++) rounded[i] += roundoff * fabs((double)applied(&ranks[0], i));
        end_step(false);
    }
    for (size_t i = 0; i < ELEMENTS; i++) {
        double error = fabs(sum[i] + kept(i) - truth[i]);
        if (!(error <= 2e-3 + rounded[i])) fail_msg("%s, %d ranks, element %zu: off by %g", compress_methods[method].name, N, i, error);
    }
    ranks_close();
}
TEST(what_was_sent_and_what_is_kept_are_the_sum_of_all_gradients) {
    const int methods[] = { COMPRESS_INT8, COMPRESS_INT4, COMPRESS_TOP_K, COMPRESS_SIGN, COMPRESS_POWERSGD };
    for (int N = 1; N <= MOST_RANKS; N++) for (int k = 0; k < 5; k++) require_telescope(N, methods[k]);
}

// Sum over ranks of gradients that are one matrix b (cols,r) times matrices of their own.
static void set_low_rank(size_t r, double* truth) {
    memset(truth, 0, ELEMENTS * sizeof *truth);
    for (int q = 0; q < num_ranks; q++) for (int k = 0; k < SEGMENTS; k++) {
        size_t at = ranks[q].c.segments[k].at;
        for (size_t i = 0; i < rows[k] * cols[k]; i++) {
            float sum = 0;
            for (size_t j = 0; j < r; j++)
                sum += random_normal(3 + (uint64_t)q, 0, i / cols[k] * r + j) * random_normal(2, 0, i % cols[k] * r + j);
            ranks[q].grads[at + i] = to_floatX(sum);
            truth[at + i] += (double)to_float(ranks[q].grads[at + i]);
        }
    }
}
// The relative error of what PowerSGD with `rank` columns makes of such a sum in the last of some steps without feedback.
static double error_after(int steps, int N, long long rank, size_t rank_of_sum) {
    static double truth[ELEMENTS];
    double error = 0, norm = 0;
    ranks_open(N, COMPRESS_POWERSGD, rank);
    for (int r = 0; r < N; r++) ranks[r].c.o.feedback = 0;
    for (int step = 0; step < steps; step++) {
        set_low_rank(rank_of_sum, truth);
        take_step(step);
        require_equal_ranks();
        end_step(false);
    }
    for (size_t i = 0; i < ELEMENTS; i++) {
        error += pow((double)applied(&ranks[0], i) - truth[i], 2);
        norm += truth[i] * truth[i];
    }
    ranks_close();
    return sqrt(error / norm);
}
TEST(powersgd_gives_a_sum_of_its_rank_back_also_of_full_rank) {
    for (int N = 1; N <= MOST_RANKS; N++) {
        double few = error_after(1, N, 4, 4), full = error_after(1, N, 20, 20); // 20 rows; 24 columns have rank 20 by its gradients
        // The gradients, once rounded, have a little of every rank, which the sum leaves out.
        if (!(few <= 1e-6 + 2 * roundoff && full <= 1e-5 + roundoff)) fail_msg("%d ranks: relative errors %g and %g", N, few, full);
    }
}
// Steps with the same gradients are a power iteration, if Q is last step's.
TEST(powersgd_begins_where_the_last_step_ended) {
    double first = error_after(1, 2, 3, 8), tenth = error_after(10, 2, 3, 8);
    if (!(tenth < 0.97 * first)) fail_msg("error %g after a step and %g after ten", first, tenth);
}

TEST(a_step_that_was_skipped_leaves_no_error) {
    ranks_open(2, COMPRESS_INT4, 1);
    for (int r = 0; r < 2; r++) for (size_t i = 0; i < ELEMENTS; i++) ranks[r].grads[i] = to_floatX(i == 5 ? NAN : 1.0f / (float)(i + 1));
    take_step(0);
    assert_false(isfinite(applied(&ranks[0], 5)) || isfinite(applied(&ranks[1], 5)));
    end_step(true);
    for (size_t i = 0; i < ELEMENTS; i++) assert_true(kept(i) == 0);
    ranks_close();
}
TEST(errors_follow_the_loss_scale) {
    ranks_open(2, COMPRESS_SIGN, 1);
    for (int r = 0; r < 2; r++) for (size_t i = 0; i < ELEMENTS; i++) ranks[r].grads[i] = to_floatX((float)i);
    take_step(0);
    compress_keep_errors(&ranks[0].c, false);
    float before = ranks[0].c.state[17];
    assert_true(before != 0);
    compress_step_begin(&ranks[0].c, 1, 0.5);
    assert_true(ranks[0].c.state[17] == 0.5f * before);
    ranks_close();
}

void before_all(void) {
    world_alone(&world, &control);
    layers_init(layer_shapes(1, 16, 64, 1, 128, 1));
}
void after_all(void) {
    layers_free();
    world_end(&world);
}
