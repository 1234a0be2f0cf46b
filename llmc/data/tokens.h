/*
tokens.h - files of tokens: llm.c's .bin format, so that its published datasets work unchanged.

    256 int32 of header: magic 20240520, version 1, number of tokens, zeros; then the tokens as uint16. llm.c
    ignores the zeros; our programs write the fingerprint of the tokenizer (tokenizer.h) into the first two of
    them. All numbers are little-endian, as in the memory of every machine that we support.

A reader never trusts a header: magic, version and count must agree with the size of the file. (token_writer.h writes
them.)
*/
#ifndef LLMC_TOKENS_H
#define LLMC_TOKENS_H
#include "../base/checksum.h"
#include "../base/common.h"
#include "../base/folder.h"

#define TOKENS_MAGIC 20240520
#define TOKENS_VERSION 1
#define TOKENS_MAGIC_LLAMA 20240801 // llm.c's files of 4-byte tokens
#define TOKENS_TOKENIZER 3 // index of the first of the two header integers that hold the tokenizer's fingerprint
#define TOKENS_HEADER_INTS 256
#define TOKENS_HEADER_BYTES (TOKENS_HEADER_INTS * sizeof(int32_t))
#define TOKENS_MAX_COUNT INT32_MAX // the largest count that fits into the header's int32

typedef struct {
    char* path;   // owned
    int fd;
    size_t count; // tokens
    uint64_t tokenizer; // fingerprint of the tokenizer that made them, 0 if unknown
} TokenFile;

static inline FileSource token_file_source(const char* path) {
    return file_source(path, "make it with dev/data/tokenize, or download it again");
}

// Opens a token file; dies unless header and size agree. token_file_close() ends it.
static inline TokenFile token_file_open(const char* path) {
    FileSource from = token_file_source(path);
    TokenFile f;
    size_t size;
    f.fd = file_open(from, O_RDONLY, &size);
    require_file(from, size >= TOKENS_HEADER_BYTES, "has %zu bytes, less than the %zu of a token file's header", size,
                 TOKENS_HEADER_BYTES);
    int32_t header[TOKENS_HEADER_INTS];
    bool complete = pread_all(f.fd, header, sizeof header, 0);
    require_file(from, complete, "cannot be read: %s", errno ? strerror(errno) : "it ends early");
    require(header[0] != TOKENS_MAGIC_LLAMA,
            "%s: has llm.c's tokens of Llama 3, of 4 bytes each, but only tokens of 2 bytes can be read: make it again "
            "with GPT-2's tokenizer, by build/tokenize or llm.c's script with --model_desc gpt-2",
            path);
    require_file(from, header[0] == TOKENS_MAGIC, "is not a token file: it starts with %d, a token file with %d",
                 header[0], TOKENS_MAGIC);
    require_file(from, header[1] == TOKENS_VERSION, "has version %d; this program reads version %d", header[1],
                 TOKENS_VERSION);
    size_t data = size - TOKENS_HEADER_BYTES;
    require_file(from, header[2] >= 0 && data == (size_t)header[2] * sizeof(uint16_t),
                 "is cut or damaged: its header says %d tokens, but its %zu bytes contain %zu", header[2], size,
                 data / sizeof(uint16_t));
    f.count = (size_t)header[2];
    memcpy(&f.tokenizer, &header[TOKENS_TOKENIZER], sizeof f.tokenizer);
    f.path = xstrdup(path);
    return f;
}

// Reads tokens first..first+n-1 into out (n). Any number of threads may read one file simultaneously.
static inline void token_file_read(const TokenFile* f, size_t first, size_t n, uint16_t* out) {
    invariant(first <= f->count && n <= f->count - first, "tokens %zu to %zu of %s were asked for, which has %zu",
              first, first + n, f->path, f->count);
    bool complete = pread_all(f->fd, out, n * sizeof *out, TOKENS_HEADER_BYTES + first * sizeof *out);
    require_file(token_file_source(f->path), complete, "tokens %zu to %zu cannot be read: %s", first, first + n,
                 errno ? strerror(errno) : "it was cut after it was opened");
}

// Adds to *sum the checksum of a sample of tokens (count): 64 spans of up to 64 tokens, spread evenly. It tells data
// sets apart. If tokens is NULL, they are read from the token file fd. place is the position of the sample's first
// element. Returns false if the tokens cannot be read.
#define TOKENS_SAMPLED (64 * 64)
static inline bool tokens_sample(int fd, const int* tokens, size_t count, uint64_t place, uint64_t* sum) {
    enum { SPAN = 64, SPANS = TOKENS_SAMPLED / SPAN };
    uint16_t stored[SPAN];
    int span[SPAN];
    size_t n = size_min(SPAN, count);
    for (size_t k = 0; k < SPANS; k++, place += SPAN) {
        size_t first = (count - n) * k / (SPANS - 1), at = TOKENS_HEADER_BYTES + first * sizeof *stored;
        if (tokens == NULL && !pread_all(fd, stored, n * sizeof *stored, at)) return false;
        for (size_t i = 0; i < n; i++) span[i] = tokens ? tokens[first + i] : stored[i];
        *sum += checksum_elements(span, sizeof(int), n, place);
    }
    return true;
}

static inline void token_file_close(TokenFile* f) {
    close(f->fd);
    free(f->path);
}
#endif
