/*
mask.h - which tokens of a token file count in the loss. A model that is fine-tuned on prompts and responses learns to
write responses: it reads the prompts, but nobody wants it to predict them.

A mask is a file next to its token file, train.mask next to train.bin, which stays as it is:

    64 bytes of header: "tokmask1", then as uint64 the number of tokens, how many of them count, a checksum of the bits,
    a checksum of a sample of the tokens, and zeros; then a bit per token, 1: it counts as a target. Token i is bit
    i % 8 of byte i / 8, counted from the lowest; bits after the last token are 0. All little-endian.

A reader never trusts a header: size, counts and both checksums must agree with the mask and with the token file. A mask
next to another token file would otherwise train on the wrong tokens, and no number would show it.
*/
#ifndef LLMC_MASK_H
#define LLMC_MASK_H
#include "tokens.h"

#define MASK_MAGIC "tokmask1"
#define MASK_HEADER_BYTES ((size_t)64)
enum {
    MASK_HEADER_MAGIC, MASK_HEADER_TOKENS, MASK_HEADER_COUNTED, MASK_HEADER_BITS, MASK_HEADER_SAMPLE,
    MASK_HEADER_WORDS = 8
};

// MASK_AUTO: either all shards have a mask or none of them. MASK_REQUIRED: every shard must have one.
// MASK_NONE: all tokens count.
typedef enum { MASK_AUTO, MASK_REQUIRED, MASK_NONE } MaskUse;

typedef struct {
    unsigned char* bits; // (ceil(count / 8)) owned; NULL: there is no mask, and all tokens count
    size_t count;        // tokens
    size_t counted;      // of these, tokens that count in the loss
    uint64_t checksum;   // of the bits
} TokenMask;

static inline FileSource mask_source(const char* path) {
    return file_source(path, "make both files again with dev/data/tokenize, or train with --mask none, which counts "
                             "all tokens");
}

// Returns the name of a token file's mask: "a/train.mask" of "a/train.bin". The caller frees it.
static inline char* mask_path(const char* token_path) {
    size_t stem = strlen(token_path);
    if (stem > 4 && strcmp(token_path + stem - 4, ".bin") == 0) stem -= 4;
    return format_string("%.*s.mask", (int)stem, token_path);
}

static inline bool mask_bit(const TokenMask* m, size_t i) { return (m->bits[i / 8] >> (i % 8) & 1) != 0; }

// Returns how many of the tokens first..first+n-1 count.
static inline size_t mask_count(const TokenMask* m, size_t first, size_t n) {
    size_t counted = 0, i = first, end = first + n;
    for (; i < end && i % 8 != 0; i++) counted += mask_bit(m, i);
    for (; i + 8 <= end; i += 8) counted += (size_t)__builtin_popcount(m->bits[i / 8]);
    for (; i < end; i++) counted += mask_bit(m, i);
    return counted;
}

// Opens the mask of a token file; dies unless it is whole and belongs to that file. mask_close() ends it.
static inline TokenMask mask_open(const char* path, const TokenFile* tokens) {
    FileSource from = mask_source(path);
    TokenMask m;
    size_t size;
    char* file = file_read(from, MASK_HEADER_BYTES + (size_t)TOKENS_MAX_COUNT / 8 + 1, &size);
    require_file(from, size >= MASK_HEADER_BYTES, "has %zu bytes, less than the %zu of a mask's header", size,
                 MASK_HEADER_BYTES);
    uint64_t h[MASK_HEADER_WORDS], sample = 0;
    memcpy(h, file, sizeof h);
    require_file(from, memcmp(file, MASK_MAGIC, 8) == 0, "is not a mask: it does not start with " MASK_MAGIC);
    require_file(from, h[MASK_HEADER_TOKENS] == tokens->count, "marks %llu tokens, but %s contains %zu",
                 (unsigned long long)h[MASK_HEADER_TOKENS], tokens->path, tokens->count);
    m.count = tokens->count;
    size_t bytes = ceil_div(m.count, 8);
    require_file(from, size == MASK_HEADER_BYTES + bytes,
                 "is cut or damaged: it has %zu bytes, and a mask of %zu tokens has %zu", size, m.count,
                 MASK_HEADER_BYTES + bytes);
    m.bits = new_array(unsigned char, size_max(bytes, 1));
    memcpy(m.bits, file + MASK_HEADER_BYTES, bytes);
    free(file);
    m.checksum = checksum_elements(m.bits, 1, bytes, 0);
    m.counted = mask_count(&m, 0, m.count);
    size_t set = m.counted;
    for (size_t i = m.count; i < 8 * bytes; i++) set += mask_bit(&m, i);
    require_file(from, m.checksum == h[MASK_HEADER_BITS] && set == m.counted && m.counted == h[MASK_HEADER_COUNTED],
                 "is damaged: its bits are not those that its header describes (%llu tokens that count, checksum "
                 "%016llx)",
                 (unsigned long long)h[MASK_HEADER_COUNTED], (unsigned long long)h[MASK_HEADER_BITS]);
    bool complete = tokens_sample(tokens->fd, NULL, tokens->count, 0, &sample);
    require_file(token_file_source(tokens->path), complete, "cannot be read: %s",
                 errno ? strerror(errno) : "it ends early");
    require_file(from, sample == h[MASK_HEADER_SAMPLE], "is the mask of other tokens than those in %s", tokens->path);
    return m;
}

static inline void mask_close(TokenMask* m) {
    free(m->bits);
    memset(m, 0, sizeof *m);
}
#endif
