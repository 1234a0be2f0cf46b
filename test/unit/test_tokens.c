// test_tokens.c - token files and masks: what is written is read back, and a mask that is not its token file's is refused.
// (Damaged token files are given to whole programs by test/runs/test_bad_input.py.)
#include "write_tokens.h"
#include <glob.h>

#define OPENED FREED_BY(token_file_close) TokenFile
static size_t files_in_folder(void) {
    FREED_BY(globfree) glob_t found;
    return glob(in_folder("*"), 0, NULL, &found) == 0 ? found.gl_pathc : 0;
}

// ---- round trips ----
TEST(tokens_written_are_tokens_read) {
    const size_t sizes[] = { 0, 1, 1000, TOKEN_WRITER_BUFFER - 1, TOKEN_WRITER_BUFFER, 3 * TOKEN_WRITER_BUFFER + 5 };
    for (size_t k = 0; k < COUNT(sizes); k++) {
        OPENED f = token_file_open(write_tokens("trip.bin", 0, sizes[k]));
        assert_int_equal(f.count, sizes[k]);
        FREED uint16_t* tokens = xcalloc(f.count + 1, sizeof *tokens);
        size_t first = f.count / 3 * 2; // all of it, and any range
        token_file_read(&f, first, f.count - first, tokens + first);
        token_file_read(&f, 0, first, tokens);
        for (size_t i = 0; i < f.count; i++) assert_int_equal(tokens[i], i % 65536);
        token_file_read(&f, f.count, 0, tokens);
    }
}

TEST(a_file_says_which_tokenizer_made_it) {
    for (uint64_t fingerprint = 0; fingerprint < 2; fingerprint++) {
        TokenWriter w = token_writer_open(in_folder("whose.bin"));
        w.tokenizer = 0xfedcba9876543210 * fingerprint;
        token_writer_close(&w);
        OPENED f = token_file_open(in_folder("whose.bin"));
        assert_true(f.tokenizer == 0xfedcba9876543210 * fingerprint);
    }
}

TEST(reads_stay_inside_the_file) {
    uint16_t tokens[8];
    OPENED f = token_file_open(write_tokens("trip.bin", 0, 8));
    expect_error(token_file_read(&f, SIZE_MAX, 2, tokens), "trip.bin", "which has 8");
}

// ---- writing that fails ----
// One token, after so many.
static void write_one_token(const char* path, int token, size_t before) {
    TokenWriter w = token_writer_open(path);
    w.count = before;
    token_writer_append(&w, &token, 1);
}
TEST(a_write_that_fails_leaves_what_was_there) {
    const char* path = write_tokens("kept.bin", 0, 5);
    size_t files = files_in_folder();
    expect_error(write_one_token(path, 65536, 0), "kept.bin", "16 bits", "65536");
    expect_error(write_one_token(path, -1, 0), "kept.bin", "16 bits");
    expect_error(write_one_token(path, 0, TOKENS_MAX_COUNT), "kept.bin", "2147483647", "shards");
    expect_error(limit_files(100000); write_tokens("kept.bin", 0, 3 * TOKEN_WRITER_BUFFER), "cannot write", "kept.bin", "File too large");
    assert_int_equal(files_in_folder(), files);
    static int many[2 * TOKEN_WRITER_BUFFER];
    FREED_BY(child_free) Child c = child_does(TokenWriter w = token_writer_open(path); token_writer_append(&w, many, COUNT(many));
                                              raise(SIGKILL));
    assert_int_equal(c.status, 1000 + SIGKILL);
    assert_int_equal(files_in_folder(), files + 1); // and its temporary file, which it had no time to remove
    OPENED f = token_file_open(path);
    assert_int_equal(f.count, 5);
}

// ---- masks ----
static bool counts(size_t i) { return i * i % 7 < 3; }
TEST(masks_written_are_masks_read) {
    const size_t sizes[] = { 0, 1, 7, 8, 9, 1000, TOKEN_WRITER_BUFFER + 5 };
    for (size_t k = 0; k < COUNT(sizes); k++) {
        OPENED f = token_file_open(write_masked("masked.bin", 0, sizes[k], counts));
        FREED_BY(mask_close) TokenMask m = mask_open(in_folder("masked.mask"), &f);
        assert_int_equal(m.count, sizes[k]);
        size_t counted = 0;
        for (size_t i = 0; i < m.count; i++) {
            assert_int_equal(mask_bit(&m, i), counts(i));
            counted += counts(i);
        }
        assert_int_equal(m.counted, counted);
        for (size_t first = 0; first < m.count; first = first * 2 + 1) for (size_t n = 0; first + n <= m.count; n = n * 3 + 1) {
            size_t want = 0;
            for (size_t i = first; i < first + n; i++) want += counts(i);
            assert_int_equal(mask_count(&m, first, n), want);
        }
    }
}

TEST(a_mask_is_named_like_its_token_file) {
    const char* const names[][2] = { { "a/train.bin", "a/train.mask" }, { "train_000003.bin", "train_000003.mask" },
                                     { "tokens", "tokens.mask" }, { ".bin", ".bin.mask" }, { "a.bin/b", "a.bin/b.mask" } };
    for (size_t i = 0; i < COUNT(names); i++) {
        FREED char* path = mask_path(names[i][0]);
        assert_string_equal(path, names[i][1]);
    }
}

TEST(every_field_of_a_mask_is_checked) {
    static const struct { int byte, value, size; const char* says; } cases[] = { // a byte, or the size, is changed
        { -1, 0, 0, "0 bytes, less than the 64" }, { -1, 0, 63, "63 bytes, less than the 64" }, { -1, 0, 188, "188 bytes" },
        { -1, 0, 190, "190 bytes" },
        { -1, 0, 64, "cut or damaged: it has 64 bytes, and a mask of 1000 tokens has 189" }, { 0, 'T', -1, "is not a mask" },
        { 7, '2', -1, "is not a mask" },
        { 8, 1, -1, "but" }, { 15, 0x80, -1, "but" }, // tokens
        { 16, 1, -1, "not those that its header describes" }, // that count
        { 24, 0x5a, -1, "not those that its header describes" }, // checksum
        { 100, 0, -1, "not those that its header describes" }, { 188, 0, -1, "not those that its header describes" },
        { 32, 0x5a, -1, "is the mask of other tokens than those in" } // sample
    };
    OPENED f = token_file_open(write_masked("hostile.bin", 0, 1000, counts));
    size_t n;
    FREED char* good = file_read((FileSource){ in_folder("hostile.mask"), "" }, 1000, &n);
    for (size_t i = 0; i < COUNT(cases); i++) {
        char bad[200] = { 0 };
        memcpy(bad, good, n);
        if (cases[i].byte >= 0) bad[cases[i].byte] = (char)cases[i].value;
        const char* path = write_file("hostile.mask", bad, cases[i].size >= 0 ? (size_t)cases[i].size : n);
        expect_error(mask_open(path, &f), path, cases[i].says, "--mask none");
    }
}
