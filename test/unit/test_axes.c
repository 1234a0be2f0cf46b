// test_axes.c - the axes of a mesh: what --mesh may say, where each rank is (llmc/parallel/axes.h), and models that do not divide.
#include "../../llmc/model/gpt2.h"
#include "../../llmc/parallel/axes.h"
#include "expect_death.h"

TEST(axes_may_be_named_in_any_order_and_one_that_is_not_takes_what_is_left_or_has_one_rank) {
    static const struct { const char* text; int N, dp, tp, pp; bool pp_outside; } rows[] = { // of dp, also where dp is not named
        { "dp=2,tp=3,pp=4", 24, 2, 3, 4, false }, { "dp=2,pp=4,tp=3", 24, 2, 3, 4, false }, { "tp=3,dp=2,pp=4", 24, 2, 3, 4, false },
        { "tp=3,pp=4,dp=2", 24, 2, 3, 4, true }, { "pp=4,dp=2,tp=3", 24, 2, 3, 4, true }, { "pp=4,tp=3,dp=2", 24, 2, 3, 4, true },
        { "", 8, 8, 1, 1, false }, { "tp=2", 8, 4, 2, 1, false }, { "pp=8", 8, 1, 1, 8, false }, { "pp=2,tp=2", 8, 2, 2, 2, false },
        { "dp=2,tp=2", 8, 2, 2, 2, false }, { "dp=2,pp=2", 8, 2, 2, 2, false }, { "dp=8", 8, 8, 1, 1, false },
        { "dp=1,tp=1", 1, 1, 1, 1, false } };
    for (size_t i = 0; i < COUNT(rows); i++) {
        Axes a = axes_choose(rows[i].text, rows[i].N);
        bool same = a.size[MESH_DP] == rows[i].dp && a.size[MESH_TP] == rows[i].tp && a.size[MESH_PP] == rows[i].pp;
        if (!same || a.pp_outside != rows[i].pp_outside) fail_msg("%s of %d ranks is another mesh", rows[i].text, rows[i].N);
    }
}

TEST(what_is_no_mesh_or_none_of_these_ranks_is_refused) {
    static const char* const texts[] = { "2", "dp", "dp=", "dp=0", "dp=-2", "dp=2;tp=2", "dp=2,", ",dp=2", "dp=2 ,tp=2", "DP=2", "cp=2",
                                         "dp=2x", "dp=99999999999999999999", "dpx=2", "tp==2" };
    for (size_t i = 0; i < COUNT(texts); i++)
        expect_error(axes_choose(texts[i], 8), "--mesh wants numbers of ranks for some of dp, tp and pp", texts[i]);
    static const char* const rows[][2] = {
        { "dp=2,tp=2,dp=2", "names dp twice" },
        { "dp=2,tp=2,pp=1", "is a mesh of 4 ranks, and 8 were started; start 4" },
        { "dp=2,tp=2,pp=4", "is a mesh of 16 ranks, and 8 were started" },
        { "tp=3", "3 does not divide 8 ranks" }, { "tp=16", "16 does not divide 8 ranks" },
        { "tp=1048576,pp=1048576", "1099511627776 does not divide 8 ranks" }, { "dp=4", "leaves 2 ranks, and names neither tp nor pp" } };
    for (size_t i = 0; i < COUNT(rows); i++) expect_error(axes_choose(rows[i][0], 8), "--mesh", rows[i][1]);
    expect_error(axes_choose("dp=2,tp=1,pp=1", 1), "--mesh", "is a mesh of 2 ranks, and 1 was started; start 2");
    expect_error(axes_choose("tp=2", 1), "--mesh", "2 does not divide 1 rank; start a multiple of 2");
}

// Every rank has a place of its own, and the place the rank.
TEST(a_rank_and_its_place_are_one_to_one) {
    for (int order = 0; order < 2; order++) {
        Axes a = axes_of(2, 3, 4, order == 1);
        bool seen[24] = { false };
        for (int rank = 0; rank < 24; rank++) {
            AxesPlace p = axes_place(a, rank);
            for (int k = 0; k < MESH_AXES; k++) assert_true(p.at[k] >= 0 && p.at[k] < a.size[k]);
            int number = (p.at[MESH_DP] * 3 + p.at[MESH_PP]) * 2 + p.at[MESH_TP];
            assert_false(seen[number]);
            seen[number] = true;
            assert_int_equal(axes_rank(a, p), rank);
        }
    }
}

TEST(ranks_of_tp_are_neighbours_and_the_axis_named_first_is_outside) {
    static const struct { const char* mesh; int rank; const char* place; } rows[] = {
        { "dp=4,tp=2,pp=3", 0, "dp 0, pp 0, tp 0" }, { "dp=4,tp=2,pp=3", 1, "dp 0, pp 0, tp 1" },
        { "dp=4,tp=2,pp=3", 2, "dp 0, pp 1, tp 0" },
        { "dp=4,tp=2,pp=3", 6, "dp 1, pp 0, tp 0" }, { "tp=2,pp=3,dp=4", 2, "dp 1, pp 0, tp 0" },
        { "tp=2,pp=3,dp=4", 8, "dp 0, pp 1, tp 0" } };
    for (int i = 0; i < 6; i++) {
        char text[40];
        axes_text(axes_choose(rows[i].mesh, 24), rows[i].rank, text, sizeof text);
        assert_string_equal(text, rows[i].place);
    }
}

TEST(parts_that_do_not_divide_are_refused) {
    static const struct { int part, parts; const char *says, *more; } cases[] = {
        { 0, 4, "6 heads do not divide over 4 parts; choose --heads as a multiple of 4", "" },
        { 0, 3, "a vocabulary of 256 tokens (--vocab-size", "does not divide over 3 parts" }, { 0, 0, "cannot be cut into 0 parts", "" },
        { 2, 2, "there is no part 2 of 2", "" }, { -1, 2, "there is no part -1 of 2", "" } };
    GPT2Config c = { 24, 130, 256, 3, 6, 12 };
    for (int i = 0; i < 5; i++) expect_error(tensor_part(c, attention_unit(0), LN1W, cases[i].part, cases[i].parts), cases[i].says, cases[i].more);
}
