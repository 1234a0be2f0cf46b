// test_pipeline.c - pipeline schedules: complete, in order, with slots that do not collide; played over channels that block and
// that do not. Splits of blocks, balanced by cost. (test/tools/test_schedule.py plays schedules in time: their bubble is that of the
// papers' formulas.)
#define main train_main
#include "../../train_gpt2_pp.cu" // its gpt2_init_schedule is tested
#undef main
#include "../../llmc/parallel/split.h"
#include "expect_death.h"

enum { MOST_P = 8, MOST_M = 32, MOST_V = 4, MOST_ACTIONS = 2 * MOST_M * MOST_V, MOST_CHUNKS = MOST_P * MOST_V };

// Calls a function for every schedule, p, m and v.
static void for_all(void (*function)(Pipeline)) {
    for (int s = SCHEDULE_GPIPE; s <= SCHEDULE_ZB_H1; s++) for (int p = 1; p <= MOST_P; p++) for (int m = 1; m <= MOST_M; m++)
        for (int v = 1; v <= (s == SCHEDULE_INTERLEAVED && p > 1 ? MOST_V : 1); v++) {
            Pipeline l = { (Schedule)s, p, m, v, 0, 0 };
            if (s != SCHEDULE_INTERLEAVED || m % p == 0) function(l);
        }
}
static const char* const schedule_names[] = { "gpipe", "1f1b", "interleaved", "zb-h1" };
#define fail_in(l, rank, ...) do { \
        print_error("%s p %d m %d v %d rank %d: ", schedule_names[(l).schedule], (l).p, (l).m, (l).v, rank); \
        print_error(__VA_ARGS__); \
        fail(); \
    } while (0)

// Return the actions of a rank, as the program lists them. The list of the last call for each rank is kept.
static const GPT2* listed(Pipeline l, int rank) {
    static struct { Comm pp; Pipeline l; GPT2 g; } known[MOST_P];
    GPT2* g = &known[rank].g;
    if (memcmp(&known[rank].l, &l, sizeof l) == 0) return g;
    free(g->actions);
    g->num_actions = 0;
    known[rank].l = g->pipeline = l;
    known[rank].pp.rank = rank;
    g->pp = &known[rank].pp;
    pipeline_run_ahead(&g->pipeline, rank);
    gpt2_init_schedule(g);
    return g;
}
static Pipeline of_rank(Pipeline l, int rank) { return listed(l, rank)->pipeline; }
static int num_actions(Pipeline l, int rank) { return listed(l, rank)->num_actions; }
static Action action(Pipeline l, int rank, int k) { return listed(l, rank)->actions[k]; }

// ---- orders that papers show ----
TEST(orders_are_those_of_the_papers) {
    static const struct { Pipeline l; int rank; const char* order; } rows[] = {
        { { SCHEDULE_GPIPE, 3, 3, 1, 0, 0 }, 1, "F0 F1 F2 B0 B1 B2" },
        { { SCHEDULE_1F1B, 4, 8, 1, 0, 0 }, 0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7" },
        { { SCHEDULE_1F1B, 4, 8, 1, 0, 0 }, 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7" },
        { { SCHEDULE_1F1B, 4, 3, 1, 0, 0 }, 3, "F0 B0 F1 B1 F2 B2" },
        { { SCHEDULE_1F1B, 8, 2, 1, 0, 0 }, 0, "F0 F1 B0 B1" },
        // A prime for each chunk after the first, as in figure 4 of arXiv 2104.04473.
        { { SCHEDULE_INTERLEAVED, 4, 4, 2, 0, 0 }, 0, "F0 F1 F2 F3 F0' F1' F2' F3' B0' B1' B2' B3' B0 B1 B2 B3" },
        { { SCHEDULE_INTERLEAVED, 4, 8, 2, 0, 0 }, 3, "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3"
                                                " F4' B4' F5' B5' F6' B6' F7' B7' B4 B5 B6 B7" },
        { { SCHEDULE_INTERLEAVED, 2, 2, 3, 0, 0 }, 1, "F0 F1 F0' F1' F0'' B0'' F1'' B1'' B0' B1' B0 B1" },
        { { SCHEDULE_ZB_H1, 3, 5, 1, 0, 0 }, 0, "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4" },
        { { SCHEDULE_ZB_H1, 3, 5, 1, 0, 0 }, 2, "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4" },
        { { SCHEDULE_ZB_H1, 4, 2, 1, 0, 0 }, 3, "F0 I0 F1 I1 W0 W1" } };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char said[1024] = "";
        for (int k = 0; k < num_actions(rows[i].l, rows[i].rank); k++) {
            Action a = action(rows[i].l, rows[i].rank, k);
            snprintf(said + strlen(said), sizeof said - strlen(said), "%s%c%d%.*s", k ? " " : "", "FBIW"[a.kind], a.micro, a.chunk, "''''");
        }
        assert_string_equal(said, rows[i].order);
    }
}

// ---- completeness ----
// On every rank and chunk, each of F, and B or I and W, is done once, in the micro-batches' order, and never before its input.
static void complete(Pipeline l) {
    for (int r = 0; r < l.p; r++) {
        int done[4][MOST_V] = { { 0 } }; // by kind and chunk: so many micro-batches
        for (int k = 0; k < num_actions(l, r); k++) {
            Action a = action(l, r, k);
            bool exists = a.chunk >= 0 && a.chunk < l.v && a.micro >= 0 && a.micro < l.m;
            if (!exists) fail_in(l, r, "action %d is of no chunk or micro-batch\n", k);
            if (a.micro != done[a.kind][a.chunk]++) fail_in(l, r, "action %d is not the chunk's next micro-batch\n", k);
            ActionKind before = a.kind == ACT_BACKWARD_WEIGHT ? ACT_BACKWARD_INPUT : ACT_FORWARD;
            bool has_input = a.kind == ACT_FORWARD || done[before][a.chunk] > a.micro;
            if (!has_input) fail_in(l, r, "action %d comes before its input\n", k);
        }
        bool cut = l.schedule == SCHEDULE_ZB_H1;
        for (int c = 0; c < l.v; c++) for (int kind = 0; kind < 4; kind++) {
            int expected = kind == ACT_FORWARD || (kind == ACT_BACKWARD) != cut ? l.m : 0;
            if (done[kind][c] != expected) fail_in(l, r, "%d actions %c in chunk %d\n", done[kind][c], "FBIW"[kind], c);
        }
    }
}
TEST(every_micro_batch_passes_every_chunk_once_and_in_order) { for_all(complete); }

// ---- slots ----
static int formula_slots(Pipeline l, int rank) {
    int all = l.m * l.v, n = l.m;
    if (l.schedule == SCHEDULE_1F1B) n = l.p - rank;
    if (l.schedule == SCHEDULE_INTERLEAVED) n = (l.v - 1) * l.p + 2 * (l.p - rank) - 1;
    if (l.schedule == SCHEDULE_ZB_H1) n = l.p;
    return n < all ? n : all;
}

static void slots_hold(Pipeline l) {
    for (int r = 0; r < l.p; r++) {
        Pipeline own = of_rank(l, r);
        int slots = pipeline_slots(own), alive = 0, peak = 0;
        bool used[MOST_ACTIONS] = { false };
        if (slots != formula_slots(l, r)) fail_in(l, r, "%d slots, and the formula says %d\n", slots, formula_slots(l, r));
        for (int k = 0; k < num_actions(l, r); k++) {
            Action a = action(l, r, k);
            int slot = pipeline_slot(own, a);
            if (slot < 0 || slot >= slots) fail_in(l, r, "action %d has slot %d of %d\n", k, slot, slots);
            if (used[slot] != (a.kind != ACT_FORWARD)) fail_in(l, r, "action %d collides in slot %d\n", k, slot);
            used[slot] = a.kind == ACT_FORWARD || a.kind == ACT_BACKWARD_INPUT;
            alive += a.kind == ACT_FORWARD ? 1 : used[slot] ? 0 : -1;
            if (alive > peak) peak = alive;
            if (l.v == 1 && slot != a.micro % slots) fail_in(l, r, "micro-batch %d has slot %d\n", a.micro, slot);
        }
        if (peak != slots) fail_in(l, r, "%d slots, of which %d are ever used at a time\n", slots, peak);
    }
}
TEST(slots_never_collide_and_are_as_many_as_the_formula_says) { for_all(slots_hold); }

// ---- channels ----
typedef enum { SEND_BLOCKS, SEND_BLOCKS_THE_NEXT, SEND_BUFFERED } Sending;
typedef struct { int owner, index; } Place; // an action: its rank, and which of its actions it is
typedef struct {
    Pipeline l;
    Sending channel;
    int ahead;                                            // receives of so many next actions are issued
    Place forward[MOST_CHUNKS][MOST_M], backward[MOST_CHUNKS][MOST_M];
    int next[MOST_P];                                     // the action that a rank is at
    bool computed[MOST_P];                                // and has computed, but not sent
    Place sent[MOST_P];                                   // what a rank's last send is for; itself: it has sent nothing to another
    int received[MOST_P][MOST_P];                         // by sender and receiver: a message can only be for this action or a later one
} Channels;

static void channels_init(Channels* c, Pipeline l, Sending channel, int ahead) {
    memset(c, 0, sizeof *c);
    c->l = l; c->channel = channel; c->ahead = ahead;
    for (int r = 0; r < l.p; r++) {
        c->sent[r].owner = r;
        for (int k = 0; k < num_actions(l, r); k++) {
            Action a = action(l, r, k);
            Place here = { r, k };
            if (a.kind == ACT_FORWARD) c->forward[a.chunk * l.p + r][a.micro] = here;
            else if (a.kind != ACT_BACKWARD_WEIGHT) c->backward[a.chunk * l.p + r][a.micro] = here;
        }
    }
}

// The action that takes an action's output (step 1), or that makes its input (-1).
static Place neighbour(const Channels* c, int rank, Action a, int step) {
    int g = a.chunk * c->l.p + rank;
    return a.kind == ACT_FORWARD ? c->forward[g + step][a.micro] : c->backward[g - step][a.micro];
}
static bool has_input(const Channels* c, int rank, Action a) {
    if (pipeline_from(c->l, rank, a) == NO_NEIGHBOUR) return true;
    Place from = neighbour(c, rank, a, -1);
    return from.index < c->next[from.owner] + c->computed[from.owner];
}
// Whether a rank's last send has ended: its receive has been issued, or the channel keeps it until then.
static bool is_delivered(const Channels* c, int rank) {
    Place to = c->sent[rank];
    return c->channel == SEND_BUFFERED || to.owner == rank || to.index <= c->next[to.owner] + c->ahead;
}
// What a rank sends to another is received there in the same order, whichever action it is of. So no message needs a tag.
static void send_output(Channels* c, int rank, Action a, int to) {
    Place there = neighbour(c, rank, a, 1);
    int k = c->next[rank], *least = &c->received[rank][to];
    if (there.owner != to || pipeline_from(c->l, to, action(c->l, to, there.index)) != rank)
        fail_in(c->l, rank, "action %d sends to %d\n", k, to);
    if (there.index < *least) fail_in(c->l, rank, "what action %d sends is received before what was sent earlier\n", k);
    *least = there.index + 1;
    c->sent[rank] = there;
}

// Does what a rank can do next; returns false if it has to wait, or is done.
static bool rank_moves(Channels* c, int rank) {
    if (c->next[rank] == num_actions(c->l, rank)) return false;
    Action a = action(c->l, rank, c->next[rank]);
    int to = pipeline_to(c->l, rank, a);
    bool sends = to != NO_NEIGHBOUR;
    if (!c->computed[rank]) {
        if (!has_input(c, rank, a)) return false;
        if (sends && !is_delivered(c, rank)) return false; // waits for its last send before it sends again
        if (sends) send_output(c, rank, a, to);
        c->computed[rank] = true;
    }
    if (c->channel == SEND_BLOCKS && !is_delivered(c, rank)) return false;
    c->computed[rank] = false;
    c->next[rank]++;
    return true;
}

// Returns whether every rank comes to the end of the step.
static bool comes_to_an_end(Pipeline l, Sending channel, int ahead) {
    static Channels c; // some 20 KB
    channels_init(&c, l, channel, ahead);
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < l.p; r++) while (rank_moves(&c, r)) moved = true;
    }
    for (int r = 0; r < l.p; r++) if (c.next[r] < num_actions(l, r) || !is_delivered(&c, r)) return false;
    return true;
}

static void comes_to_its_end(Pipeline l) {
    static const char* const channels[] = { "that block", "where a send must end before the next one", "with buffers" };
    for (int channel = SEND_BLOCKS; channel <= SEND_BUFFERED; channel++) {
        int ahead = channel == SEND_BLOCKS && l.schedule == SCHEDULE_INTERLEAVED ? RECEIVES_AHEAD + 1 : RECEIVES_AHEAD;
        if (!comes_to_an_end(l, (Sending)channel, ahead)) fail_in(l, 0, "deadlock over channels %s\n", channels[channel]);
    }
    if (!comes_to_an_end(l, SEND_BUFFERED, 0)) fail_in(l, 0, "deadlock without receives ahead\n");
}
TEST(no_schedule_deadlocks_over_any_kind_of_channel) { for_all(comes_to_its_end); }

// The model can tell: these are known to deadlock.
TEST(blocking_sends_deadlock_without_receives_ahead) {
    for (int p = 2; p <= MOST_P; p++) for (int s = SCHEDULE_1F1B; s <= SCHEDULE_ZB_H1; s++) {
        bool ring = s == SCHEDULE_INTERLEAVED;
        assert_false(comes_to_an_end((Pipeline){ (Schedule)s, p, 2 * p, 1 + ring, 0, 0 }, SEND_BLOCKS, ring));
    }
}

// ---- splits ----
// The largest cost of a rank in the best of all splits of `left` blocks over ranks from `rank` on.
static double best_of_all(int* totals, int rank, int left, int p, int v, SplitCosts costs) {
    int least = rank == p - 1 ? v - 1 : v;
    if (rank == p - 1) {
        if (left < least) return INFINITY;
        double largest = 0;
        totals[rank] = left;
        for (int r = 0; r < p; r++) largest = fmax(largest, totals[r] + (r == 0 ? costs.embedding : 0) + (r == p - 1 ? costs.head : 0));
        return largest;
    }
    double best = INFINITY;
    for (totals[rank] = least; totals[rank] <= left; totals[rank]++)
        best = fmin(best, best_of_all(totals, rank + 1, left - totals[rank], p, v, costs));
    return best;
}
TEST(auto_is_the_best_of_all_splits) {
    const SplitCosts all_costs[] = { { 0, 0 }, { 0, 0.12 }, { 0, 5.46 }, { 0.3, 2.62 }, { 3, 0 }, { 2.5, 40 } };
    for (int i = 0; i < 6; i++) for (int p = 1; p <= 5; p++) for (int v = 1; v <= 4; v++) for (int L = p * v; L <= 24; L++) {
        SplitCosts costs = all_costs[i];
        int blocks[20], totals[5], sum = 0;
        double largest = 0, of_all = L + costs.embedding + costs.head;
        split_auto(blocks, L, p, v, costs);
        for (int g = 0; g < p * v; g++) { sum += blocks[g]; assert_true(blocks[g] >= (g < p * v - 1)); }
        assert_int_equal(sum, L);
        for (int r = 0; r < p; r++) largest = fmax(largest, rank_cost(blocks, r, p, v, costs));
        assert_near(largest, best_of_all(totals, 0, L, p, v, costs), 1e-9);
        assert_near(split_efficiency(blocks, p, v, costs), of_all / (p * largest), 1e-9);
    }
}

// A block that is left goes to an earlier stage: 1f1b waits longer for a late one.
TEST(chunks_of_a_rank_differ_by_a_block_at_most_and_earlier_ones_have_it) {
    static const int gpt2[] = { 2, 2, 2, 2, 2, 1, 1, 0 }, equal[] = { 4, 3, 3 };
    SplitCosts none = { 0, 0 };
    int blocks[8];
    split_auto(blocks, 12, 8, 1, split_costs(50304, 768));
    assert_memory_equal(blocks, gpt2, sizeof gpt2);
    split_auto(blocks, 10, 3, 1, none);
    assert_memory_equal(blocks, equal, sizeof equal);
    for (int p = 1; p <= 4; p++) for (int v = 1; v <= 4; v++) for (int L = p * v; L <= 48; L++) {
        int by_cost[16], even[16];
        split_auto(by_cost, L, p, v, none);
        split_even(even, L, p, v);
        for (int g = 0; g < p * v; g++) {
            assert_in_range(by_cost[g], L / (p * v), L / (p * v) + 1);
            assert_in_range(even[g], L / (p * v), L / (p * v) + 1);
        }
    }
}

// ---- errors ----
TEST(schedules_that_cannot_be_played_are_errors) {
    expect_error(pipeline_check((Pipeline){ SCHEDULE_1F1B, 4, 8, 2, 0, 0 }), "--chunks 2", "--schedule interleaved");
    expect_error(pipeline_check((Pipeline){ SCHEDULE_INTERLEAVED, 4, 8, 1, 0, 0 }), "--chunks 1", "--schedule 1f1b");
    expect_error(pipeline_check((Pipeline){ SCHEDULE_INTERLEAVED, 4, 6, 2, 0, 0 }), "groups of 4", "has 6", "--total-batch-size");
    expect_error(pipeline_check((Pipeline){ SCHEDULE_INTERLEAVED, 1, 6, 2, 0, 0 }), "1 stage", "--schedule 1f1b");
    expect_error(pipeline_check((Pipeline){ SCHEDULE_GPIPE, 2, 0, 1, 0, 0 }), "0 micro-batches");
}

TEST(numbers_of_blocks_can_be_given_and_must_add_up) {
    const char* const bad[] = { "3,3,3", "3,3,3,3,0", "3,3,3,x", "", "3,,3,6", "0,3,3,6", "-1,4,4,5", "13,1,1,1", "3,3,3,3 ", "even",
                                "99999999999999999999,1,1,1" };
    SplitCosts costs = split_costs(50304, 768);
    int blocks[64];
    split_blocks(blocks, "5,1,6,0", 12, 2, 2, costs);
    assert_true(blocks[0] == 5 && blocks[1] == 1 && blocks[2] == 6 && blocks[3] == 0);
    assert_int_equal(rank_cost(blocks, 0, 2, 2, costs), 11);
    split_blocks(blocks, "auto", 12, 2, 1, costs);
    assert_int_equal(blocks[0], 9);
    for (size_t i = 0; i < COUNT(bad); i++)
        expect_error(split_blocks(blocks, bad[i], 12, 2, 2, costs), "--split", "4 numbers");
    expect_error(split_blocks(blocks, "3,3,3,4", 12, 2, 2, costs), "--split 3,3,3,4 adds up to 13", "the model has 12");
    expect_error(split_auto(blocks, 12, 4, 4, costs), "--pipeline-parallel 4 with --chunks 4 makes 16 parts", "12 blocks");
}
