// test_sampler.c - logits that no token can be drawn from, and what is printed to a terminal. (test/kernels/check_layers.py draws.)
#include "../../llmc/data/tokenizer.h"
#include "../../llmc/model/sampler.h"
#include "expect_death.h"

#define TOP_ALL 0

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
