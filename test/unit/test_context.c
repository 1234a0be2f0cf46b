// test_context.c - context parallelism: which tokens a rank has, how many pairs of query and key it computes, and what it sends
// (llmc/parallel/context.h). test/runs/test_cp.py trains.
#include "../../llmc/parallel/context.h"
#include "expect_death.h"

enum { MOST_C = 9, B = 2, CHUNK = 3, CHANNELS = 20, HEADS = MOST_C * 8 };

// Rank r of `ranks` started ones, c of which share sequences of T tokens.
static ContextParallel context_of(int how, int balance, int ranks, int r, int c, int NH, int T) {
    Comm world = { .rank = r, .size = ranks };
    ContextParallel cp = { .ranks = c, .how = how, .balance = balance };
    context_plan(&cp, &world, (GPT2Config){ .C = CHANNELS, .NH = NH }, T);
    context_begin(&cp, B, T / cp.c);
    return cp;
}
static ContextParallel context_rank(int how, int balance, int r, int c) { // with chunks of CHUNK tokens
    return context_of(how, balance, c, r, c, c * 8, c * (balance == CP_ZIGZAG ? 2 : 1) * CHUNK);
}
#define FOR_CONTEXTS(balance, c) for (int balance = CP_CONTIGUOUS; balance <= CP_ZIGZAG; balance++) for (int c = 1; c <= MOST_C; c++)

// ---- the partition ----
TEST(each_token_is_with_one_rank_and_its_owner_says_where) {
    FOR_CONTEXTS(balance, c) {
        int T = c * (balance + 1) * CHUNK, tokens[B * 2 * MOST_C * CHUNK], out[B * 2 * CHUNK], seen[COUNT(tokens)] = { 0 };
        for (int t = 0; t < B * T; t++) tokens[t] = t;
        for (int r = 0; r < c; r++) {
            ContextParallel cp = context_rank(CP_RING, balance, r, c);
            assert_int_equal(context_elements(&cp, 1), B * context_tokens(&cp, T));
            context_load(&cp, out, tokens);
            for (int row = 0, at; row < (int)context_elements(&cp, 1); row++) {
                int b = out[row] / T, t = out[row] % T, piece = row / (B * CHUNK);
                seen[out[row]]++;
                assert_int_equal(b, row / CHUNK % B); // (chunks,B,n)
                assert_int_equal(context_owner(&cp, t, &at), r);
                assert_int_equal(at, piece * CHUNK + row % CHUNK);
                assert_int_equal(context_position(&cp, piece, CHANNELS) + (size_t)(row % CHUNK * CHANNELS), t * CHANNELS);
            }
        }
        for (int t = 0; t < B * T; t++) assert_int_equal(seen[t], 1);
    }
}

TEST(in_zigzag_a_rank_has_an_early_and_a_late_chunk) {
    static const int chunks[4][2] = { { 0, 7 }, { 1, 6 }, { 2, 5 }, { 3, 4 } };
    for (int r = 0; r < 4; r++) {
        ContextParallel cp = context_rank(CP_RING, CP_ZIGZAG, r, 4);
        for (int i = 0; i < 2; i++) assert_int_equal(context_chunk(&cp, r, i), chunks[r][i]);
    }
}

TEST(neighbouring_ranks_share_sequences_and_a_ring_goes_round_within_a_group) {
    static const int rows[4][3] = { { 0, 1, 3 }, { 1, 2, 0 }, { 2, 3, 1 }, { 3, 0, 2 } };
    for (int r = 0; r < 8; r++) {
        ContextParallel cp = context_of(CP_RING, CP_CONTIGUOUS, 8, r, 4, 1, 8);
        assert_true(cp.rank == rows[r % 4][0] && cp.above == rows[r % 4][1] && cp.below == rows[r % 4][2]);
    }
    assert_int_equal(context_of(CP_RING, CP_CONTIGUOUS, 8, 5, 0, 1, 8).c, 8); // 0: all of them
}

// ---- work ----
TEST(pairs_are_those_of_a_triangle_and_each_rank_has_as_many_in_zigzag) {
    static const int contiguous[4] = { 10, 26, 42, 58 }; // of 16 tokens: 4 queries with their own keys, and with 0, 4, 8, 12 before them
    for (int r = 0; r < 4; r++) {
        ContextParallel cp = context_of(CP_RING, CP_CONTIGUOUS, 4, r, 4, 1, 16);
        assert_int_equal(context_pairs(&cp, r, 1, 16, 1), contiguous[r]);
        cp = context_of(CP_ALLGATHER, CP_ZIGZAG, 4, r, 4, 1, 16);
        assert_int_equal(context_pairs(&cp, r, 5, 16, 3), 5 * 3 * 34);
        cp = context_of(CP_ULYSSES, CP_CONTIGUOUS, 4, r, 4, 8, 16);
        assert_int_equal(context_pairs(&cp, r, 5, 16, 8), 5 * 2 * 136);
    }
    FOR_CONTEXTS(balance, c) for (int how = CP_ULYSSES; how <= CP_RING; how++) {
        if (how == CP_ULYSSES && balance == CP_ZIGZAG) continue;
        unsigned long long all = 0, first = 0;
        int T = c * (balance + 1) * CHUNK;
        for (int r = 0; r < c; r++) {
            ContextParallel cp = context_rank(how, balance, r, c);
            unsigned long long pairs = context_pairs(&cp, r, B, T, 8 * c);
            all += pairs;
            first = r == 0 ? pairs : first;
            if (balance == CP_ZIGZAG || how == CP_ULYSSES) assert_int_equal(pairs, first);
        }
        assert_int_equal(all, B * 8 * c * T * (T + 1) / 2);
    }
}

// ---- what is sent ----
// In zigzag a rank below another one gets only what its late chunk sees, which is early; and it gets that from the rank above it.
TEST(a_ring_brings_every_rank_what_its_queries_see_and_nothing_that_has_not_come_so_far) {
    FOR_CONTEXTS(balance, c) for (int r = 0; r < c; r++) {
        ContextParallel cp = context_rank(CP_RING, balance, r, c);
        for (int s = 1; s < c; s++) {
            int u = (r + s) % c, pieces = (int)context_chunks_sent(&cp, r, u);
            for (int j = 0; j < cp.chunks; j++)
                for (int i = pieces; i < cp.chunks; i++) assert_true(context_chunk(&cp, u, i) > context_chunk(&cp, r, j));
            if (s > 1) assert_true(pieces <= (int)context_chunks_sent(&cp, cp.above, u));
        }
    }
}

// Of a rank with 7 rows of 20 channels: K and V have 280 elements. Ulysses sends q, k, v and the output, 560, but what it keeps of them.
TEST(ranks_send_what_is_written_here_by_hand) {
    static const struct { int how, balance, c, forward[4], gradients; } rows[] = {
        { CP_ULYSSES, CP_CONTIGUOUS, 2, { 280, 280 }, 0 }, { CP_ULYSSES, CP_CONTIGUOUS, 4, { 420, 420, 420, 420 }, 0 },
        { CP_ALLGATHER, CP_CONTIGUOUS, 2, { 280, 280 }, 280 }, { CP_ALLGATHER, CP_ZIGZAG, 4, { 840, 840, 840, 840 }, 840 },
        { CP_RING, CP_CONTIGUOUS, 2, { 280, 280 }, 280 }, { CP_RING, CP_CONTIGUOUS, 4, { 840, 840, 840, 840 }, 840 },
        { CP_RING, CP_ZIGZAG, 2, { 140, 280 }, 280 }, { CP_RING, CP_ZIGZAG, 4, { 420, 840, 700, 560 }, 840 },
        { CP_RING, CP_ZIGZAG, 3, { 280, 560, 420 }, 560 }, { CP_RING, CP_CONTIGUOUS, 1, { 0 }, 0 } };
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int r = 0; r < rows[i].c; r++) {
            ContextParallel cp = context_rank(rows[i].how, rows[i].balance, r, rows[i].c);
            double forward = rows[i].forward[r] * (double)sizeof(floatX);
            assert_true(context_sent_forward(&cp, 7) == forward);
            assert_true(context_sent_backward(&cp, 7) == forward + rows[i].gradients * 4);
        }
}

TEST(zigzag_sends_a_quarter_less_of_keys_and_values_than_other_rings) {
    for (int c = 2; c <= MOST_C; c++) {
        double sent[2] = { 0, 0 };
        for (int balance = 0; balance < 2; balance++)
            for (int r = 0; r < c; r++) {
                ContextParallel cp = context_rank(CP_RING, balance, r, c);
                sent[balance] += context_sent_forward(&cp, 8);
            }
        assert_true(sent[CP_ZIGZAG] == 0.75 * sent[CP_CONTIGUOUS]);
    }
}

// ---- what does not fit ----
TEST(sequences_that_do_not_divide_are_refused_with_the_nearest_that_do) {
    expect_error(context_of(CP_RING, CP_CONTIGUOUS, 4, 0, 4, 1, 18), "--seq-len 18 does not divide into 4 equal", "4; choose 20 or 16");
    expect_error(context_of(CP_RING, CP_ZIGZAG, 3, 0, 3, 1, 9), "--seq-len 9 does not divide into 6 equal", "3 in zigzag; choose 12 or 6");
    expect_error(context_of(CP_ALLGATHER, CP_CONTIGUOUS, 4, 0, 4, 1, 3), "--seq-len 3 does not divide", "; choose 4\n");
    expect_error(context_of(CP_ULYSSES, CP_CONTIGUOUS, 2, 1, 2, 2, 15), "--seq-len 15 does not divide into 2", "choose 16 or 14");
    expect_success(context_of(CP_RING, CP_ZIGZAG, 3, 0, 3, 1, 12), context_of(CP_ULYSSES, CP_CONTIGUOUS, 4, 0, 4, 4, 4));
}
TEST(ranks_and_heads_that_do_not_fit_are_refused) {
    expect_error(context_of(CP_RING, CP_CONTIGUOUS, 4, 0, 3, 1, 12), "--context-parallel 3 does not divide 4 ranks; start a multiple of 3");
    expect_error(context_of(CP_ULYSSES, CP_CONTIGUOUS, 4, 0, 4, 6, 8), "4 does not divide 6; choose --heads 8, or --cp ring");
    expect_error(context_of(CP_ULYSSES, CP_ZIGZAG, 2, 0, 2, 2, 8), "--cp ulysses has all tokens of a head", "leave out --cp-balance");
}
