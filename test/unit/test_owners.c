// test_owners.c - whole matrices in elementwise shards (llmc/parallel/owners.h): who orthogonalises which, and the traffic.
#include "../../llmc/parallel/owners.h"
#include "unit.h"

static GPT2Config model(int L, int C) { return (GPT2Config){ .max_T = 16, .V = 257, .Vp = 384, .L = L, .NH = 1, .C = C }; }

// Makes the table of one rank of N. Its communicator contains only a size and a rank.
static void owners_of(Owners* o, GPT2Config c, int N, int rank, bool all_own) {
    Comm dp = { .rank = rank, .size = N };
    memset(o, 0, sizeof *o);
    o->all_own = all_own;
    owners_init(o, c, &dp);
}

// These models have pieces that begin and end anywhere, ranks that hold only padding, and fewer matrices than ranks.
static const struct { int L, C; } models[] = { { 1, 1 }, { 1, 20 }, { 2, 12 }, { 3, 32 } };
enum { MOST_RANKS = 20 };
#define EACH_CASE(all_most) \
    for (size_t k = 0; k < COUNT(models); k++) for (int N = 1; N <= MOST_RANKS; N++) for (int all = 0; all <= (all_most); all++)

// ---- who orthogonalises what ----
TEST(longest_first_leaves_the_busiest_rank_the_known_share_of_the_mean) {
    static const int N[] = { 2, 3, 4, 5, 7, 8, 16 };
    static const struct { int L, C; double busiest[COUNT(N)]; } cases[] = {
        { 4, 256, { 1, 1.05, 1, 1, 1.05, 1, 1.2 } }, { 6, 384, { 1, 1, 1, 1, 1.05, 1.067, 1.067 } },
        { 12, 768, { 1, 1, 1, 1, 1.05, 1, 1.067 } } };
    for (size_t k = 0; k < COUNT(cases); k++) for (size_t j = 0; j < COUNT(N); j++) {
        FREED_BY(owners_free) Owners o;
        owners_of(&o, model(cases[k].L, cases[k].C), N[j], 0, false);
        double most = 0, sum = 0, C = cases[k].C;
        for (int q = 0; q < N[j]; q++) sum += o.flops[q], most = fmax(most, o.flops[q]);
        expect_near("FLOPs of all", sum, 300 * C*C*C * cases[k].L, 1); // 4 times 30 C^3, and 2 times 90 C^3 per block
        expect_near("busiest rank", most * N[j] / sum, cases[k].busiest[j], 5e-4);
    }
}

TEST(each_matrix_of_a_block_is_listed_once_and_q_k_and_v_are_three) {
    enum { C = 8, L = 3, U = 6*C }; // elements of 1-D tensors in front of the matrices of attention
    static const struct { int half, rows, cols; size_t begin; } block[] = {
        { 0, C, C, U }, { 0, C, C, U + C*C }, { 0, C, C, U + 2*C*C }, { 0, C, C, U + 3*C*C },
        { 1, 4*C, C, 7*C }, { 1, C, 4*C, 7*C + 4*C*C } };
    FREED_BY(owners_free) Owners o;
    owners_of(&o, model(L, C), 5, 2, false);
    assert_int_equal(o.count, 6 * L);
    for (int l = 0; l < L; l++) for (size_t k = 0; k < COUNT(block); k++) {
        int found = 0;
        for (int i = 0; i < o.count; i++)
            found += o.m[i].unit == 1 + 2*l + block[k].half && o.m[i].rows == block[k].rows && o.m[i].cols == block[k].cols
                  && o.m[i].begin == block[k].begin;
        assert_int_equal(found, 1);
    }
}

TEST(a_rank_orthogonalises_its_own_matrices_or_with_all_owners_every_one) {
    EACH_CASE(1) {
        int done = 0;
        for (int rank = 0; rank < N; rank++) {
            FREED_BY(owners_free) Owners o;
            owners_of(&o, model(models[k].L, models[k].C), N, rank, all);
            assert_true(o.first <= o.end);
            for (int i = o.first; i < o.end && !all; i++) assert_int_equal(o.m[i].owner, rank);
            done += o.end - o.first;
        }
        assert_int_equal(done, 6 * models[k].L * (all ? N : 1));
    }
}

// ---- pieces ----
TEST(the_pieces_of_all_ranks_tile_each_matrix_and_lie_in_their_shards) {
    EACH_CASE(0) {
        GPT2Config c = model(models[k].L, models[k].C);
        FREED_BY(owners_free) Owners o;
        owners_of(&o, c, N, 0, all);
        for (int i = 0; i < o.count; i++) {
            size_t next = 0, shard = shard_elements(c, o.m[i].unit, N);
            for (int q = 0; q < N; q++) { // shards are in the order of the ranks
                MatrixPiece p = owners_piece(&o, i, q);
                if (p.n == 0) continue;
                assert_int_equal(p.begin, next);
                assert_true(o.m[i].begin + p.begin >= (size_t)q * shard);
                assert_true(o.m[i].begin + p.begin + p.n <= (size_t)(q + 1) * shard);
                next += p.n;
            }
            assert_int_equal(next, (size_t)o.m[i].rows * (size_t)o.m[i].cols);
        }
    }
}

TEST(a_rank_sends_as_many_elements_as_the_other_one_expects_and_those_that_it_expects) {
    EACH_CASE(1) {
        Owners all_ranks[MOST_RANKS];
        GPT2Config c = model(models[k].L, models[k].C);
        for (int q = 0; q < N; q++) owners_of(&all_ranks[q], c, N, q, all);
        for (int r = 0; r < N; r++) {
            const Owners* to = &all_ranks[r];
            size_t at = 0;
            for (int q = 0; q < N; q++) { // messages lie in the order of the ranks that send them
                assert_int_equal(all_ranks[q].held[r].n, to->owned[q].n);
                assert_int_equal(to->owned[q].at, at);
                at += to->owned[q].n;
                // A piece is at the same place in the message on both ranks.
                for (int i = to->first; i < to->end; i++) {
                    MatrixPiece p = owners_piece(&all_ranks[q], i, q);
                    if (p.n > 0) assert_int_equal(p.at - all_ranks[q].held[r].at, owners_received(to, i, q) - to->owned[q].at);
                }
            }
            assert_true(at <= to->most_owned);
        }
        for (int q = 0; q < N; q++) owners_free(&all_ranks[q]);
    }
}

// Counts each element of each matrix: it is in the shard of one rank, and goes to its owner or to every rank.
TEST(what_is_sent_is_what_counting_finds) {
    EACH_CASE(1) {
        GPT2Config c = model(models[k].L, models[k].C);
        size_t sent[MOST_RANKS] = { 0 };
        FREED_BY(owners_free) Owners table;
        owners_of(&table, c, N, 0, all);
        for (int i = 0; i < table.count; i++) {
            Matrix m = table.m[i];
            for (size_t e = 0; e < matrix_elements(m); e++) {
                int holder = (int)((m.begin + e) / shard_elements(c, m.unit, N));
                if (all) sent[holder] += (size_t)N - 1;
                else if (holder != m.owner) sent[holder]++, sent[m.owner]++; // to the owner, and back
            }
        }
        for (int rank = 0; rank < N; rank++) {
            FREED_BY(owners_free) Owners o;
            owners_of(&o, c, N, rank, all);
            assert_int_equal(owners_sent(&o), sent[rank]);
        }
    }
}
