// test_sampler.c - how often each token is drawn, and what is printed to a terminal.
#include "../../llmc/base/rng.h"
#include "../../llmc/data/tokenizer.h"
#include "../../llmc/model/sampler.h"
#include "expect_death.h"

#define TOP_ALL 0
#define LOG_2 0.69314718f
#define LOG_3 1.09861229f
#define LOG_5 1.60943791f

TEST(temperature_zero_takes_the_likeliest_token) {
    float logits[] = { -3, 2, 7, 6.999f, -INFINITY };
    for (int i = 0; i < 100; i++) assert_int_equal(sample_token(logits, 5, 0, TOP_ALL, (float)i / 100), 2);
    float equal[] = { 1, 1, 1 };
    assert_int_equal(sample_token(equal, 3, 0, TOP_ALL, 0.9f), 0); // of equal ones the first
}

// u goes evenly through [0,1), so a token's share of the draws is its probability, up to one draw in n and u's rounding.
static void assert_shares(const float* logits, int V, double temperature, long long top_k, const double* expected) {
    const int n = 100000;
    int counts[16] = { 0 };
    for (int i = 0; i < n; i++) counts[sample_token(logits, V, temperature, top_k, (float)((i + 0.5) / n))]++;
    for (int v = 0; v < V; v++) {
        double share = (double)counts[v] / n;
        if (!(fabs(share - expected[v]) <= 2.0 / n)) fail_msg("token %d: %g of the draws, not %g", v, share, expected[v]);
        if (expected[v] == 0) assert_int_equal(counts[v], 0);
    }
}
TEST(tokens_come_as_often_as_softmax_says) {
    const float logits[] = { 0, 1, -2, 0.5f, 3 };
    for (double temperature = 0.5; temperature <= 2; temperature *= 2) {
        double expected[5], sum = 0;
        for (int v = 0; v < 5; v++) sum += expected[v] = exp(logits[v] / temperature);
        for (int v = 0; v < 5; v++) expected[v] /= sum;
        assert_shares(logits, 5, temperature, TOP_ALL, expected);
        assert_shares(logits, 5, temperature, 5, expected);
        assert_shares(logits, 5, temperature, 1000, expected);
    }
}

TEST(top_k_draws_among_the_k_likeliest_only_and_extremes_are_no_trouble) {
    static const struct { float logits[6]; double temperature; int top_k; double expected[6]; } cases[] = {
        { { LOG_2, -1, LOG_5, LOG_3, -INFINITY, -7 }, 1, 1, { 0, 0, 1 } },
        { { LOG_2, -1, LOG_5, LOG_3, -INFINITY, -7 }, 1, 2, { 0, 0, 5.0/8, 3.0/8 } },
        { { LOG_2, -1, LOG_5, LOG_3, -INFINITY, -7 }, 1, 3, { 0.2, 0, 0.5, 0.3 } },
        { { -5, 0, -5, 0, 0, -5 }, 1, 2, { 0, 0.5, 0, 0.5 } }, // the first of those that are equal
        { { -5, 0, -5, 0, 0, -5 }, 1, 3, { 0, 1.0/3, 0, 1.0/3, 1.0/3 } },
        { { -3e38f, 3e38f, -INFINITY, 2.9e38f, -3e38f, 0 }, 1, TOP_ALL, { 0, 1 } },
        { { -3e38f, 3e38f, -INFINITY, 2.9e38f, -3e38f, 0 }, 1e-30, TOP_ALL, { 0, 1 } },
        { { 1000, -INFINITY, 1000, 999, 0, 1000 }, 1e-3, TOP_ALL, { 1.0/3, 0, 1.0/3, 0, 0, 1.0/3 } }, // whose exponentials overflow
        { { 1, 2, -INFINITY, 3, -INFINITY, -INFINITY }, 1e9, TOP_ALL, { 1.0/3, 1.0/3, 0, 1.0/3 } },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        assert_shares(cases[i].logits, 6, cases[i].temperature, cases[i].top_k, cases[i].expected);
    const float first_impossible[] = { -INFINITY, 0 }, one[] = { -2 };
    assert_int_equal(sample_token(first_impossible, 2, 1, TOP_ALL, 0), 1);
    assert_int_equal(sample_token(one, 1, 1, 1, 0.99999994f), 0);
}

static int compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return x < y ? 1 : x > y ? -1 : 0; // the largest first
}
TEST(the_kth_largest_is_what_sorting_finds) {
    enum { V = 1000 };
    float logits[V], sorted[V];
    for (int i = 0; i < V; i++) logits[i] = sorted[i] = floorf(200 * random_normal(1, 0, (uint64_t)i)) / 64; // with repetitions
    qsort(sorted, V, sizeof(float), compare_floats);
    for (int k = 1; k <= V; k++) assert_int_equal(kth_largest(logits, V, k), float_order(sorted[k - 1]));
}

TEST(nan_and_infinity_are_errors_wherever_they_stand) {
    for (int at = 0; at < 3; at++) {
        float logits[] = { 1, 2, 3 };
        logits[at] = NAN;
        expect_error(sample_token(logits, 3, 1, TOP_ALL, 0.5f), "NaN or Inf", "diverged");
        logits[at] = INFINITY;
        expect_error(sample_token(logits, 3, 1, TOP_ALL, 0.5f), "NaN or Inf");
    }
    float none[] = { -INFINITY, -INFINITY, -INFINITY };
    expect_error(sample_token(none, 3, 1, TOP_ALL, 0.5f), "NaN or Inf");
}

// ---- printing ----
static void show_token(int id) {
    FREED_BY(tokenizer_free) Tokenizer bytes;
    size_t length;
    tokenizer_open(&bytes, "bytes");
    const char* text = tokenizer_decode(&bytes, id, &length);
    fwrite(text, 1, length, stdout);
}
TEST(a_token_has_its_bytes_and_none_lies_beyond_the_vocabulary) {
    expect_output("a", show_token('a'));
    expect_output("\xff", show_token(255));
    expect_output("<|endoftext|>", show_token(256));
    expect_error(show_token(-1), "token -1", "257");
    expect_error(show_token(257), "token 257", "257");
}

static void print_in_pieces(const char* const* pieces) {
    TokenPrinter p = { 0 };
    for (; *pieces; pieces++) print_token(&p, *pieces, strlen(*pieces));
    print_token_end(&p);
}
#define BAD "\xEF\xBF\xBD"

TEST(text_is_printed_as_it_is_however_it_is_cut_without_control_characters_and_what_is_not_utf8) {
    static const char* const cases[][7] = { // what is printed, and the pieces
        { "plain text\n\tand more", "plain text\n", "\tand more" }, { "é€😀", "\xC3", "\xA9\xE2", "\x82\xAC\xF0\x9F", "\x98", "\x80" },
        { "\xC2\xA0 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF \xF0\x90\x80\x80 \xF4\x8F\xBF\xBF", // edges
          "\xC2\xA0 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF \xF0\x90\x80\x80 \xF4\x8F\xBF\xBF" },
        // escape sequences, and what else moves a cursor; U+009B begins one in a single character
        { BAD "[31mred" BAD "]0;title" BAD, "\x1B[31mred", "\x1B]0;title\x07" }, { "a" BAD "b" BAD "c" BAD, "a\rb\x7F" "c\b" },
        { BAD BAD "[2J", "\xC2\x9B[2J" },
        // not UTF-8: a continuation of nothing, broken off, at the end; one begins inside another; overlong; a surrogate; beyond U+10FFFF
        { BAD "a", "\x80" "a" }, { BAD "a", "\xE2\x82", "a" }, { "x" BAD, "x\xF0\x9F" }, { BAD "é", "\xE2\xC3", "\xA9" },
        { BAD BAD, "\xC0\x80" }, { BAD BAD, "\xC1\xBF" }, { BAD BAD BAD, "\xE0\x9F\xBF" }, { BAD BAD BAD, "\xED\xA0\x80" },
        { BAD BAD BAD BAD, "\xF0\x8F\xBF\xBF" }, { BAD BAD BAD BAD, "\xF4\x90\x80\x80" }, { BAD BAD BAD BAD, "\xF5\x80\x80\x80" },
        { BAD BAD, "\xFE\xFF" }
    };
    for (size_t i = 0; i < COUNT(cases); i++) expect_output(cases[i][0], print_in_pieces(cases[i] + 1));
    for (int c = 1; c < 0x20; c++) {
        const char text[2] = { (char)c, 0 }, *const pieces[2] = { text, NULL };
        expect_output(c == '\n' || c == '\t' ? text : BAD, print_in_pieces(pieces));
    }
}
