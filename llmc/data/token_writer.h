/*
token_writer.h - writes token files (tokens.h) and their masks (mask.h). Only the tools that make data need it.

A writer works on a temporary file next to the final one and renames it when all of it is on the disk, so that a crash
or a full disk leaves the old file intact.
*/
#ifndef LLMC_TOKEN_WRITER_H
#define LLMC_TOKEN_WRITER_H
#include "mask.h"

// ---- tokens ----

#define TOKEN_WRITER_BUFFER 65536 // tokens

typedef struct {
    char* path;       // final name, owned
    char* temporary;  // name until then, owned
    int fd;
    size_t count;     // tokens appended so far
    uint64_t tokenizer; // the fingerprint of the tokenizer that made them, set by the caller; 0: not known
    uint16_t* buffer; // (TOKEN_WRITER_BUFFER) the last ones, not yet written, owned
    size_t buffered;
} TokenWriter;

// Removes the half-written file and dies unless `done`, with the reason in errno.
static inline void token_writer_check(const TokenWriter* w, bool done, const char* action) {
    if (done) return;
    const char* reason = path_reason(w->path, errno);
    unlink(w->temporary);
    die("cannot %s %s: %s; any older file of that name is unchanged", action, w->path, reason);
}

// Starts a token file, which appears under `path`, replacing what was there, when token_writer_close() is done with it.
static inline TokenWriter token_writer_open(const char* path) {
    TokenWriter w;
    w.path = xstrdup(path);
    w.temporary = format_string("%s.tmp%d", path, (int)getpid());
    w.fd = open(w.temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); // mask.h reads a sample of it
    require(w.fd >= 0, "cannot create %s: %s", w.temporary, path_reason(path, errno));
    w.count = w.buffered = 0;
    w.tokenizer = 0;
    w.buffer = new_array(uint16_t, TOKEN_WRITER_BUFFER);
    return w;
}

static inline void token_writer_flush(TokenWriter* w) {
    size_t offset = TOKENS_HEADER_BYTES + (w->count - w->buffered) * sizeof *w->buffer;
    token_writer_check(w, pwrite_all(w->fd, w->buffer, w->buffered * sizeof *w->buffer, offset), "write");
    w->buffered = 0;
}

// Adds tokens (n). Dies if one does not fit in 16 bits, or the file would hold more than its header can state.
static inline void token_writer_append(TokenWriter* w, const int* tokens, size_t n) {
    errno = EOVERFLOW;
    token_writer_check(w, n <= (size_t)TOKENS_MAX_COUNT - w->count,
                       "put more than 2147483647 tokens (make shards instead) in");
    for (size_t i = 0; i < n; i++) {
        bool fits = tokens[i] >= 0 && tokens[i] <= UINT16_MAX;
        errno = ERANGE;
        token_writer_check(w, fits, "put a token that does not fit in 16 bits (65536 is the largest vocabulary) in");
        w->buffer[w->buffered++] = (uint16_t)tokens[i];
        w->count++;
        if (w->buffered == TOKEN_WRITER_BUFFER) token_writer_flush(w);
    }
}

// Writes what is buffered and the header, syncs, and gives the file its name.
static inline void token_writer_close(TokenWriter* w) {
    token_writer_flush(w);
    int32_t header[TOKENS_HEADER_INTS] = { TOKENS_MAGIC, TOKENS_VERSION, (int32_t)w->count };
    memcpy(&header[TOKENS_TOKENIZER], &w->tokenizer, sizeof w->tokenizer);
    token_writer_check(w, pwrite_all(w->fd, header, sizeof header, 0), "write");
    token_writer_check(w, fsync(w->fd) == 0, "sync");
    token_writer_check(w, close(w->fd) == 0, "close");
    token_writer_check(w, rename(w->temporary, w->path) == 0, "rename the finished file to");
    char* folder = path_parent(w->path);
    require(folder_sync(folder), "cannot sync folder %s: %s", folder, strerror(errno));
    free(folder);
    free(w->path);
    free(w->temporary);
    free(w->buffer);
    memset(w, 0, sizeof *w);
    w->fd = -1;
}

// ---- masks ----

typedef struct {
    TokenMask mask;  // so far; its bits are owned
    size_t capacity; // of tokens
} MaskWriter;

// Adds n tokens, which count or do not.
static inline void mask_writer_append(MaskWriter* w, bool counts, size_t n) {
    TokenMask* m = &w->mask;
    if (m->count + n > w->capacity) {
        size_t bytes = ceil_div(w->capacity, 8);
        w->capacity = round_up(size_max(m->count + n, 2 * w->capacity), 8);
        m->bits = (unsigned char*)xrealloc(m->bits, w->capacity / 8);
        memset(m->bits + bytes, 0, w->capacity / 8 - bytes);
    }
    for (size_t i = m->count; counts && i < m->count + n; i++) m->bits[i / 8] |= (unsigned char)(1 << i % 8);
    m->count += n;
    m->counted += counts ? n : 0;
}

// Writes the mask of the tokens in `tokens`, all of which have been appended to both, and frees it. Call it before
// token_writer_close, so that a token file never appears under its name without its mask.
static inline void mask_writer_close(MaskWriter* w, TokenWriter* tokens) {
    TokenMask* m = &w->mask;
    invariant(m->count == tokens->count, "a mask of %zu tokens for %zu tokens", m->count, tokens->count);
    size_t bytes = ceil_div(m->count, 8);
    char *path = mask_path(tokens->path), *temporary = format_string("%s.tmp%d", path, (int)getpid());
    char* file = new_array(char, MASK_HEADER_BYTES + bytes);
    uint64_t h[MASK_HEADER_WORDS] = { 0, m->count, m->counted, checksum_elements(m->bits, 1, bytes, 0) };
    memcpy(h, MASK_MAGIC, 8);
    token_writer_flush(tokens);
    token_writer_check(tokens, tokens_sample(tokens->fd, NULL, tokens->count, 0, &h[MASK_HEADER_SAMPLE]), "read back");
    memcpy(file, h, sizeof h);
    if (bytes > 0) memcpy(file + MASK_HEADER_BYTES, m->bits, bytes);
    unlink(temporary); // of a process with the same number that was killed
    bool done = file_write(temporary, file, MASK_HEADER_BYTES + bytes) && rename(temporary, path) == 0;
    int reason = errno;
    if (!done) unlink(temporary);
    errno = reason;
    token_writer_check(tokens, done, "write the mask of");
    free(file);
    free(temporary);
    free(path);
    free(m->bits);
    memset(w, 0, sizeof *w);
}
#endif
