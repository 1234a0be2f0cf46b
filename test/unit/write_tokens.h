// write_tokens.h - files of tokens and masks for tests to read.
#ifndef TEST_WRITE_TOKENS_H
#define TEST_WRITE_TOKENS_H
#include "../../llmc/data/token_writer.h"
#include "test_folder.h"

// Writes n tokens first, first+1, ... in pieces, and unless `counts` is NULL a mask of the places that count. Returns the path.
static inline const char* write_masked(const char* name, int first, size_t n, bool (*counts)(size_t)) {
    const char* path = in_folder("%s", name);
    TokenWriter w = token_writer_open(path);
    MaskWriter m;
    memset(&m, 0, sizeof m);
    int piece[1000];
    for (size_t done = 0, size = 1; done < n; done += size, size = size * 7 % 1000 + 1) {
        size = size_min(size, n - done);
        for (size_t i = 0; i < size; i++) piece[i] = (int)(((size_t)first + done + i) % 65536);
        token_writer_append(&w, piece, size);
        for (size_t i = 0, run; i < size && counts; i += run) {
            for (run = 1; i + run < size && counts(done + i + run) == counts(done + i); run++) { }
            mask_writer_append(&m, counts(done + i), run);
        }
    }
    if (counts) mask_writer_close(&m, &w);
    token_writer_close(&w);
    return path;
}
static inline const char* write_tokens(const char* name, int first, size_t n) { return write_masked(name, first, n, NULL); }
#endif
