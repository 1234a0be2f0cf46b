// test_axes.c - the axes of a mesh: what --mesh may say, and where each rank is (llmc/parallel/axes.h).
#include "../../llmc/parallel/axes.h"
#include "expect_death.h"

static void assert_sizes(const char* text, int N, int dp, int tp, int pp) {
    Axes a = axes_choose(text, N);
    assert_int_equal(a.size[MESH_DP], dp);
    assert_int_equal(a.size[MESH_TP], tp);
    assert_int_equal(a.size[MESH_PP], pp);
}
TEST(all_axes_may_be_named_in_any_order) {
    static const char* const texts[] = { "dp=2,tp=3,pp=4", "dp=2,pp=4,tp=3", "tp=3,dp=2,pp=4", "tp=3,pp=4,dp=2", "pp=4,dp=2,tp=3",
                                         "pp=4,tp=3,dp=2" };
    for (int i = 0; i < 6; i++) {
        assert_sizes(texts[i], 24, 2, 3, 4);
        assert_int_equal(axes_choose(texts[i], 24).pp_outside, i >= 3);
    }
}

TEST(an_axis_that_is_not_named_takes_what_is_left_or_has_one_rank) {
    assert_sizes("", 8, 8, 1, 1);
    assert_sizes("tp=2", 8, 4, 2, 1);
    assert_sizes("pp=8", 8, 1, 1, 8);
    assert_sizes("pp=2,tp=2", 8, 2, 2, 2);
    assert_sizes("dp=2,tp=2", 8, 2, 2, 2);
    assert_sizes("dp=2,pp=2", 8, 2, 2, 2);
    assert_sizes("dp=8", 8, 8, 1, 1);
    assert_sizes("dp=1,tp=1", 1, 1, 1, 1);
    assert_false(axes_choose("pp=2,tp=2", 8).pp_outside); // dp is
}

static void choose_of_8(void* text) { axes_choose((const char*)text, 8); }
static void refused(const char* text, const char* phrase) { expect_death(choose_of_8, (void*)text, phrase, "--mesh"); }
TEST(what_is_no_mesh_is_refused) {
    static const char* const texts[] = { "2", "dp", "dp=", "dp=0", "dp=-2", "dp=2;tp=2", "dp=2,", ",dp=2", "dp=2 ,tp=2", "DP=2", "cp=2",
                                         "dp=2x", "dp=99999999999999999999", "dpx=2", "tp==2" };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        refused(texts[i], "--mesh wants numbers of ranks for some of dp, tp and pp");
        refused(texts[i], texts[i]);
    }
    refused("dp=2,tp=2,dp=2", "names dp twice");
}

TEST(what_is_no_mesh_of_these_ranks_is_refused) {
    refused("dp=2,tp=2,pp=1", "is a mesh of 4 ranks, and 8 were started; start 4");
    refused("dp=2,tp=2,pp=4", "is a mesh of 16 ranks, and 8 were started");
    refused("tp=3", "3 does not divide 8 ranks");
    refused("tp=16", "16 does not divide 8 ranks");
    refused("tp=1048576,pp=1048576", "1099511627776 does not divide 8 ranks");
    refused("dp=4", "leaves 2 ranks, and names neither tp nor pp");
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
    char text[40];
    Axes a = axes_choose("dp=4,tp=2,pp=3", 24);
    axes_text(a, 0, text, sizeof text);
    assert_string_equal(text, "dp 0, pp 0, tp 0");
    axes_text(a, 1, text, sizeof text);
    assert_string_equal(text, "dp 0, pp 0, tp 1");
    axes_text(a, 2, text, sizeof text);
    assert_string_equal(text, "dp 0, pp 1, tp 0");
    axes_text(a, 6, text, sizeof text);
    assert_string_equal(text, "dp 1, pp 0, tp 0");
    a = axes_choose("tp=2,pp=3,dp=4", 24);
    axes_text(a, 2, text, sizeof text);
    assert_string_equal(text, "dp 1, pp 0, tp 0");
    axes_text(a, 8, text, sizeof text);
    assert_string_equal(text, "dp 0, pp 1, tp 0");
}
