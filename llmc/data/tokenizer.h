/*
tokenizer.h - text to tokens and back: plain bytes, or GPT-2's byte-level BPE (Radford et al. 2019, section 2.2).

Byte-level BPE cuts text into words by a regular expression, writes each word as single-byte tokens, then merges
neighbours again and again, always the pair of the lowest rank, until no pair has a rank. Every text has tokens, and
tokens decode to the very bytes that they came from, whatever those were:
  - The expression needs valid UTF-8. Text is first split into the longest stretches that are valid and that are not;
    a valid one is cut by the expression as if it stood alone, an invalid one is one word. (Python's tokenizers see
    U+FFFD where bytes are invalid, and lose them.)
  - Text that spells <|endoftext|> is text. The end-of-text token never comes out of tokenizer_encode().

A tokenizer is opened from "bytes", from GPT-2's vocab.json with merges.txt next to it (or the folder of both), or from
llm.c's tokenizer .bin. Its files must have all 256 single bytes and <|endoftext|>: without the first some text would
have no tokens, without the second documents could not be told apart.

Needs PCRE2 and Jansson: -lpcre2-8 -ljansson.
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H
#include "../base/common.h"
#include "../base/folder.h"
#include <jansson.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define END_OF_TEXT "<|endoftext|>"
#define NO_RANK UINT32_MAX

// Returns the length of the byte order mark with which Windows begins files,
// and which is not text: 3, or 0 if there is none.
static inline size_t text_mark(const char* s, size_t n) { return n >= 3 && memcmp(s, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0; }

// Two neighbouring tokens that merge. Slots of an open-addressing hash table; key NO_PAIR: empty.
#define NO_PAIR UINT64_MAX
typedef struct {
    uint64_t key;  // left token << 32 | right token
    uint32_t rank; // lowest merges first
} PairSlot;

// The tokens of a word met before. Text repeats its words: most are found here. One cache line.
#ifndef CACHE_SLOTS // fewer where tokenizers are opened by the thousand
#define CACHE_SLOTS 65536
#endif
#define CACHED_BYTES 24
#define CACHED_TOKENS 9
typedef struct {
    char word[CACHED_BYTES]; // zero-padded
    uint8_t length, count;   // bytes and tokens; length 0: empty
    int ids[CACHED_TOKENS];
} CachedWord;

// Working memory of encoding. Grows to the longest word met and is kept.
typedef struct {
    CachedWord* cache;        // (CACHE_SLOTS), owned
    uint32_t* ranks;          // (capacity), owned
    size_t capacity;
    pcre2_match_data* match;  // owned
} TokenizerScratch;

typedef struct {
    int vocab_size;
    int eot;                    // the end-of-text token, which stands before each document
    uint64_t fingerprint;       // of all tokens' bytes and of eot, never 0; it identifies the tokenizer in token files
    // internal
    char* bytes;                // all tokens' bytes, one token after another, owned
    size_t* start;              // (vocab_size+1) where each token's bytes start, owned
    int byte_token[256];        // the token of each single byte
    PairSlot* pairs;            // (pair_slots, a power of two), owned
    size_t pair_slots, pair_count;
    int* merged;                // by rank: the token that a pair becomes, owned
    pcre2_code* word_pattern;   // NULL for "bytes", owned
    TokenizerScratch* scratch;  // NULL for "bytes", owned. Changed by encoding: one thread at a time per tokenizer
} Tokenizer;

// Returns the bytes of one token and their number. Not terminated.
// The end-of-text token reads "<|endoftext|>", for display.
static inline const char* tokenizer_decode(const Tokenizer* t, int id, size_t* length) {
    invariant(id >= 0 && id < t->vocab_size, "token %d is not one of the tokenizer's %d", id, t->vocab_size);
    *length = t->start[id + 1] - t->start[id];
    return t->bytes + t->start[id];
}

// ---- tokens by their bytes: an open-addressing table of ids, used while opening only ----

typedef struct {
    int* slots;   // (count, a power of two) token or -1, owned
    size_t count;
} TokenMap;

static inline uint64_t hash_bytes(const char* s, size_t n) { // FNV-1a, and a last mix since low bits pick the slot
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3ull;
    return h ^ (h >> 29);
}

// Returns the slot where these bytes are, or would be put.
static inline int* token_map_slot(const TokenMap* m, const Tokenizer* t, const char* s, size_t n) {
    for (size_t i = hash_bytes(s, n);; i++) {
        int* slot = &m->slots[i & (m->count - 1)];
        if (*slot < 0) return slot;
        size_t length;
        const char* bytes = tokenizer_decode(t, *slot, &length);
        if (length == n && memcmp(bytes, s, n) == 0) return slot;
    }
}

static inline size_t hash_slots(size_t entries) { // at most half full
    size_t slots = 16;
    while (slots < 2 * entries) slots *= 2;
    return slots;
}

// Maps all tokens, which must differ, with room for `most`; and fills byte_token, which must become complete.
static inline TokenMap token_map_make(Tokenizer* t, FileSource from, size_t most) {
    TokenMap m;
    m.count = hash_slots(most);
    m.slots = new_array(int, m.count);
    for (size_t i = 0; i < m.count; i++) m.slots[i] = -1;
    for (int b = 0; b < 256; b++) t->byte_token[b] = -1;
    for (int id = 0; id < t->vocab_size; id++) {
        size_t length;
        const char* bytes = tokenizer_decode(t, id, &length);
        int* slot = token_map_slot(&m, t, bytes, length);
        require_file(from, *slot < 0, "tokens %d and %d are the same bytes", *slot, id);
        *slot = id;
        if (length == 1) t->byte_token[(unsigned char)bytes[0]] = id;
    }
    for (int b = 0; b < 256; b++)
        require_file(from, t->byte_token[b] >= 0,
                     "no token is the single byte 0x%02x; a byte-level vocabulary has all 256", b);
    return m;
}

// ---- pairs that merge ----

static inline PairSlot* pair_slot(const Tokenizer* t, uint64_t key) {
    uint64_t h = key * 0x9E3779B97F4A7C15ull;
    for (size_t i = h >> 20;; i++) {
        PairSlot* slot = &t->pairs[i & (t->pair_slots - 1)];
        if (slot->key == key || slot->key == NO_PAIR) return slot;
    }
}

static inline uint64_t pair_key(int left, int right) { return (uint64_t)left << 32 | (uint32_t)right; }

static inline uint32_t pair_rank(const Tokenizer* t, int left, int right) {
    return pair_slot(t, pair_key(left, right))->rank;
}

static inline void pairs_resize(Tokenizer* t, size_t slots) {
    PairSlot* old = t->pairs;
    size_t old_slots = t->pair_slots;
    t->pairs = new_array(PairSlot, slots);
    t->pair_slots = slots;
    for (size_t i = 0; i < slots; i++) { t->pairs[i].key = NO_PAIR; t->pairs[i].rank = NO_RANK; }
    for (size_t i = 0; i < old_slots; i++)
        if (old[i].key != NO_PAIR) *pair_slot(t, old[i].key) = old[i];
    free(old);
}

// Returns false if the pair has a rank already.
static inline bool pair_add(Tokenizer* t, int left, int right, uint32_t rank) {
    if (hash_slots(t->pair_count + 1) > t->pair_slots) pairs_resize(t, hash_slots(t->pair_count + 1));
    PairSlot* slot = pair_slot(t, pair_key(left, right));
    if (slot->key != NO_PAIR) return false;
    slot->key = pair_key(left, right);
    slot->rank = rank;
    t->pair_count++;
    return true;
}

// ---- files ----

#define TOKENIZER_MAX_FILE ((size_t)1 << 30) // bytes; GPT-2's are about one million

static inline FileSource tokenizer_source(const char* path) {
    return file_source(path, "wanted: bytes, GPT-2's vocab.json with merges.txt next to it, or llm.c's tokenizer .bin");
}

// llm.c's tokenizer .bin: 256 int32 of header (magic, version 2, tokens, end-of-text token), then per token a length
// byte and that many bytes. Tokens come in the order of their merges, so a token's id is its rank.
#define TOKENIZER_MAGIC 20240328
#define TOKENIZER_VERSION 2
#define TOKENIZER_HEADER_BYTES (256 * sizeof(int32_t))

static inline void tokenizer_bin_tokens(Tokenizer* t, FileSource from, const char* file, size_t size) {
    size_t at = TOKENIZER_HEADER_BYTES;
    t->bytes = new_array(char, size - at);
    t->start = new_array(size_t, t->vocab_size + 1);
    for (int id = 0; id < t->vocab_size; id++) {
        size_t length = at < size ? (unsigned char)file[at] : 0;
        require_file(from, at < size && length <= size - at - 1, "ends within token %d of %d", id, t->vocab_size);
        require_file(from, length > 0, "token %d is empty", id);
        memcpy(t->bytes + t->start[id], file + at + 1, length);
        t->start[id + 1] = t->start[id] + length;
        at += 1 + length;
    }
    require_file(from, at == size, "has %zu bytes after its last token", size - at);
}

// Any two tokens whose bytes together are a token merge into it. The end-of-text token takes no part in merges.
static inline void tokenizer_bin_pairs(Tokenizer* t, const TokenMap* map) {
    t->merged = new_array(int, t->vocab_size);
    for (int id = 0; id < t->vocab_size; id++) {
        t->merged[id] = id;
        size_t length;
        const char* bytes = tokenizer_decode(t, id, &length);
        for (size_t i = 1; i < length && id != t->eot; i++) {
            int left = *token_map_slot(map, t, bytes, i), right = *token_map_slot(map, t, bytes + i, length - i);
            if (left >= 0 && right >= 0 && left != t->eot && right != t->eot) pair_add(t, left, right, (uint32_t)id);
        }
    }
}

static inline void tokenizer_open_bin(Tokenizer* t, FileSource from, const char* file, size_t size) {
    require_file(from, size >= TOKENIZER_HEADER_BYTES, "has %zu bytes, less than the %zu of its header", size,
                 TOKENIZER_HEADER_BYTES);
    int32_t header[4];
    memcpy(header, file, sizeof header);
    require_file(from, header[1] == TOKENIZER_VERSION, "has version %d; this program reads version %d", header[1],
                 TOKENIZER_VERSION);
    size_t most = (size - TOKENIZER_HEADER_BYTES) / 2; // a length and a byte each
    require_file(from, header[2] > 0 && (size_t)header[2] <= most,
                 "says it has %d tokens; its %zu bytes allow 1 to %zu", header[2], size, most);
    require_file(from, header[3] >= 0 && header[3] < header[2],
                 "says its end-of-text token is %d; it has tokens 0 to %d", header[3], header[2] - 1);
    t->vocab_size = header[2];
    t->eot = header[3];
    tokenizer_bin_tokens(t, from, file, size);
    size_t length;
    tokenizer_decode(t, t->eot, &length);
    require_file(from, length > 1, "says its end-of-text token is %d, which is a single byte of text", t->eot);
    TokenMap map = token_map_make(t, from, (size_t)t->vocab_size);
    tokenizer_bin_pairs(t, &map);
    free(map.slots);
}

// ---- words ----

// GPT-2's expression. Its \s is Unicode's White_Space, spelled out because PCRE2's has one character more (U+180E).
// ++ is + where giving characters back could not help: the matcher then remembers nothing, however long the run.
#define WHITE_SPACE \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define WORD_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}++| ?\\p{N}++| ?[^" WHITE_SPACE "\\p{L}\\p{N}]++" \
                     "|[" WHITE_SPACE "]+(?![^" WHITE_SPACE "])|[" WHITE_SPACE "]+"

// Makes the pattern, and what encoding needs.
static inline void tokenizer_prepare(Tokenizer* t) {
    int error;
    PCRE2_SIZE at;
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED; // anchored here, since JIT code cannot be anchored later
    t->word_pattern = pcre2_compile((PCRE2_SPTR)WORD_PATTERN, PCRE2_ZERO_TERMINATED, options, &error, &at, NULL);
    require(t->word_pattern != NULL,
            "PCRE2 refuses the word pattern at character %zu (its error %d); it must be built with Unicode", (size_t)at,
            error);
    pcre2_jit_compile(t->word_pattern, PCRE2_JIT_COMPLETE); // if that fails, matching is only slower
    t->scratch = new_array(TokenizerScratch, 1);
    t->scratch->match = pcre2_match_data_create(1, NULL);
    require(t->scratch->match != NULL, "out of host memory for PCRE2");
    t->scratch->cache = new_array(CachedWord, CACHE_SLOTS);
}

// ---- GPT-2's text form of bytes: each byte is one printable character, so vocab.json and merges.txt are text ----

static inline bool byte_is_printable(int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; }

// By character: the byte it stands for, or -1. Printable bytes of Latin-1 stand for themselves,
// the others come from 256 on.
#define BYTE_CHARACTERS 324
static inline void byte_characters(int byte_of[BYTE_CHARACTERS]) {
    for (int i = 0; i < BYTE_CHARACTERS; i++) byte_of[i] = -1;
    int next = 256;
    for (int b = 0; b < 256; b++) byte_of[byte_is_printable(b) ? b : next++] = b;
}

// Decodes the text form s (n) into out (at most n). Returns the number of bytes, or -1 if a character stands for none.
static inline long bytes_from_text(const int byte_of[BYTE_CHARACTERS], const char* s, size_t n, char* out) {
    long count = 0;
    for (size_t i = 0; i < n; i++) {
        int c = (unsigned char)s[i];
        if (c >= 0x80) { // all characters above ASCII that can stand for a byte have two bytes in UTF-8
            if (c < 0xC2 || c > 0xDF || i + 1 == n || ((unsigned char)s[i + 1] & 0xC0) != 0x80) return -1;
            c = (c & 0x1F) << 6 | ((unsigned char)s[++i] & 0x3F);
        }
        if (c >= BYTE_CHARACTERS || byte_of[c] < 0) return -1;
        out[count++] = (char)byte_of[c];
    }
    return count;
}

// Returns the keys of vocab.json, whose values must be 0..vocab_size-1, by id. Views into `root`;
// the caller frees the array.
static inline const char** vocab_by_id(FileSource from, json_t* root) {
    size_t n = json_object_size(root);
    const char** by_id = new_array(const char*, n);
    const char* key;
    json_t* value;
    json_object_foreach(root, key, value) {
        require_file(from, json_is_integer(value), "token \"%s\" has no whole number for an id", key);
        long long id = json_integer_value(value);
        require_file(from, id >= 0 && (unsigned long long)id < n,
                     "token \"%s\" has id %lld; the %zu tokens must have ids 0 to %zu", key, id, n, n - 1);
        require_file(from, by_id[id] == NULL, "tokens \"%s\" and \"%s\" have the same id %lld", by_id[id], key, id);
        by_id[id] = key;
    }
    return by_id;
}

static inline void tokenizer_read_vocab(Tokenizer* t, FileSource from, const char* file, size_t size,
                                        const int byte_of[BYTE_CHARACTERS]) {
    json_error_t error;
    json_t* root = json_loadb(file, size, JSON_REJECT_DUPLICATES, &error);
    require_file(from, root != NULL, "is not valid JSON: %s at line %d, column %d", error.text, error.line,
                 error.column);
    require_file(from, json_is_object(root) && json_object_size(root) > 0,
                 "is not a JSON object of tokens and their ids");
    const char** by_id = vocab_by_id(from, root);
    t->vocab_size = (int)json_object_size(root);
    t->bytes = new_array(char, size); // no token is longer decoded than it was in the file
    t->start = new_array(size_t, t->vocab_size + 1);
    for (int id = 0; id < t->vocab_size; id++) {
        long length = bytes_from_text(byte_of, by_id[id], strlen(by_id[id]), t->bytes + t->start[id]);
        require_file(from, length > 0, "token %d, \"%s\", is not the byte-level text that GPT-2's vocabulary has", id,
                     by_id[id]);
        t->start[id + 1] = t->start[id] + (size_t)length;
    }
    free(by_id);
    json_decref(root);
}

// Working data of reading merges.txt.
typedef struct {
    FileSource from;
    const TokenMap* map;
    const int* byte_of; // (BYTE_CHARACTERS)
    size_t line;        // of the merge being read, from 1
    char* bytes;        // the bytes that the line's two tokens stand for, as many as the line has characters
} MergeReader;

// Returns the token spelled by s (n) in text form. Its bytes go to `bytes`, their number to *length.
static inline int merge_token(const Tokenizer* t, const MergeReader* r, const char* s, size_t n, char* bytes,
                              size_t* length) {
    long decoded = bytes_from_text(r->byte_of, s, n, bytes);
    int id = decoded > 0 ? *token_map_slot(r->map, t, bytes, (size_t)decoded) : -1;
    require_file(r->from, id >= 0, "line %zu: \"%.*s\" is not in the vocabulary", r->line, (int)size_min(n, 60), s);
    *length = (size_t)decoded;
    return id;
}

// Reads one line "left right", of n characters, as the merge of the next rank.
static inline void tokenizer_read_merge(Tokenizer* t, const MergeReader* r, const char* text, size_t n) {
    int shown = (int)size_min(n, 60);
    const char* space = (const char*)memchr(text, ' ', n);
    require_file(r->from, space != NULL, "line %zu: \"%.*s\" is not two tokens with a space between them", r->line,
                 shown, text);
    size_t left_text = (size_t)(space - text), a, b;
    int left = merge_token(t, r, text, left_text, r->bytes, &a);
    int right = merge_token(t, r, space + 1, n - left_text - 1, r->bytes + a, &b);
    int id = *token_map_slot(r->map, t, r->bytes, a + b);
    require_file(r->from, id >= 0, "line %zu: the merge of \"%.*s\" is not in the vocabulary", r->line, shown, text);
    require_file(r->from, id != t->eot, "line %zu merges text into " END_OF_TEXT ", which text must not become",
                 r->line);
    t->merged[t->pair_count] = id;
    bool is_new = pair_add(t, left, right, (uint32_t)t->pair_count);
    require_file(r->from, is_new, "line %zu: \"%.*s\" is a duplicate", r->line, shown, text);
}

// merges.txt: a line "#version: ..." that may be missing, then one merge a line, the lowest rank first.
static inline void tokenizer_read_merges(Tokenizer* t, FileSource from, const TokenMap* map,
                                         const int byte_of[BYTE_CHARACTERS]) {
    size_t size, lines = 1;
    char* file = file_read(from, TOKENIZER_MAX_FILE, &size);
    for (size_t i = 0; i < size; i++) lines += file[i] == '\n';
    t->merged = new_array(int, lines);
    MergeReader r = { from, map, byte_of, 1, new_array(char, size) };
    for (size_t at = 0; at < size; r.line++) {
        const char* end = (const char*)memchr(file + at, '\n', size - at);
        size_t n = end ? (size_t)(end - file) - at : size - at;
        bool has_cr = n > 0 && file[at + n - 1] == '\r';
        require_file(from, !has_cr, "line %zu ends in CR LF, as lines on Windows do, and must end in LF alone"
                     " (sed -i 's/\\r$//' makes it so)", r.line);
        bool is_version = r.line == 1 && strncmp(file, "#version", 8) == 0;
        if (!is_version) tokenizer_read_merge(t, &r, file + at, n);
        at += n + 1;
    }
    free(r.bytes);
    free(file);
}

// Dies if a token of several bytes is text and no merge makes it: then merges.txt was cut, or is another vocabulary's.
// Tokens that were added are no text: either the word pattern cuts them, as it cuts <pad>, or they come before all
// bytes, as in trainers.
static inline void tokenizer_check_merges(const Tokenizer* t, FileSource from) {
    bool* made = new_array(bool, t->vocab_size);
    int missing = 0, first = -1, first_byte = t->vocab_size;
    for (size_t rank = 0; rank < t->pair_count; rank++) made[t->merged[rank]] = true;
    for (int b = 0; b < 256; b++) first_byte = t->byte_token[b] < first_byte ? t->byte_token[b] : first_byte;
    for (int id = first_byte + 1; id < t->vocab_size; id++) {
        size_t length;
        const char* bytes = tokenizer_decode(t, id, &length);
        if (length == 1 || made[id] || id == t->eot) continue;
        pcre2_match_data* match = t->scratch->match;
        // Fails where a character is cut
        int result = pcre2_match(t->word_pattern, (PCRE2_SPTR)bytes, length, 0, 0, match, NULL);
        bool is_cut = result > 0 && pcre2_get_ovector_pointer(match)[1] < length;
        if (!is_cut && missing++ == 0) first = id;
    }
    free(made);
    require_file(from, missing == 0,
                 "its %zu merges do not make %d of the vocabulary's tokens, the first of them token %d: it was cut, or "
                 "belongs to another vocab.json",
                 t->pair_count, missing, first);
}

static inline void tokenizer_open_json(Tokenizer* t, FileSource from, const char* file, size_t size) {
    int byte_of[BYTE_CHARACTERS];
    byte_characters(byte_of);
    tokenizer_read_vocab(t, from, file, size, byte_of);
    TokenMap map = token_map_make(t, from, (size_t)t->vocab_size);
    t->eot = *token_map_slot(&map, t, END_OF_TEXT, strlen(END_OF_TEXT));
    require_file(from, t->eot >= 0, "has no token " END_OF_TEXT ", which stands before each document");
    char* folder = path_parent(from.path);
    char* merges = format_string("%s/merges.txt", folder);
    tokenizer_read_merges(t, tokenizer_source(merges), &map, byte_of);
    tokenizer_check_merges(t, tokenizer_source(merges));
    free(merges);
    free(folder);
    free(map.slots);
}

// ---- opening ----

static inline void tokenizer_open_bytes(Tokenizer* t) {
    t->vocab_size = 257;
    t->eot = 256;
    t->bytes = new_array(char, 256 + sizeof END_OF_TEXT);
    t->start = new_array(size_t, 258);
    for (int b = 0; b < 256; b++) {
        t->byte_token[b] = b;
        t->bytes[b] = (char)b;
        t->start[b] = (size_t)b;
    }
    memcpy(t->bytes + 256, END_OF_TEXT, strlen(END_OF_TEXT));
    t->start[256] = 256;
    t->start[257] = 256 + strlen(END_OF_TEXT);
}

static inline void tokenizer_set_fingerprint(Tokenizer* t) {
    uint64_t h = (uint64_t)t->eot;
    for (int id = 0; id < t->vocab_size; id++) {
        size_t length;
        const char* bytes = tokenizer_decode(t, id, &length);
        h = h * 0x9E3779B97F4A7C15ull + (hash_bytes(bytes, length) ^ length);
    }
    t->fingerprint = h ? h : 1;
}

// spec: "bytes", vocab.json, the folder that has it, or llm.c's tokenizer .bin.
// Dies if files are not what they should be.
static inline void tokenizer_open(Tokenizer* t, const char* spec) {
    memset(t, 0, sizeof *t);
    if (strcmp(spec, "bytes") == 0) {
        tokenizer_open_bytes(t);
        tokenizer_set_fingerprint(t);
        return;
    }
    struct stat info;
    bool is_folder = stat(spec, &info) == 0 && S_ISDIR(info.st_mode);
    char* path = is_folder ? format_string("%s/vocab.json", spec) : xstrdup(spec);
    FileSource from = tokenizer_source(path);
    size_t size;
    char* file = file_read(from, TOKENIZER_MAX_FILE, &size);
    pairs_resize(t, hash_slots(0));
    int32_t magic = 0;
    memcpy(&magic, file, size_min(size, sizeof magic));
    bool is_json = file[strspn(file, " \t\r\n")] == '{';
    require_file(from, magic == TOKENIZER_MAGIC || is_json, "starts neither with { nor with %d", TOKENIZER_MAGIC);
    tokenizer_prepare(t);
    if (is_json) tokenizer_open_json(t, from, file, size);
    else tokenizer_open_bin(t, from, file, size);
    tokenizer_set_fingerprint(t);
    free(file);
    free(path);
}

static inline void tokenizer_free(Tokenizer* t) {
    free(t->bytes);
    free(t->start);
    free(t->pairs);
    free(t->merged);
    pcre2_code_free(t->word_pattern);
    if (t->scratch) {
        free(t->scratch->cache);
        free(t->scratch->ranks);
        pcre2_match_data_free(t->scratch->match);
        free(t->scratch);
    }
    memset(t, 0, sizeof *t);
}

// ---- encoding one word ----

// Returns the number of tokens of a word (n > 0), written to out (at most n). The pair of the lowest rank merges first,
// of equal ranks the leftmost. One pass merges all pairs of the lowest rank, unless that makes a pair of a lower one:
// so it takes n steps for each rank that the word has, and a long run of one character has few.
static inline size_t encode_by_merging(const Tokenizer* t, const char* word, size_t n, int* out) {
    TokenizerScratch* s = t->scratch;
    if (n > s->capacity) {
        s->capacity = 2 * n;
        s->ranks = (uint32_t*)xrealloc(s->ranks, s->capacity * sizeof *s->ranks);
    }
    uint32_t* rank = s->ranks; // of the pair that a token makes with the next one
    for (size_t i = 0; i < n; i++) out[i] = t->byte_token[(unsigned char)word[i]];
    for (size_t i = 0; i < n; i++) rank[i] = i + 1 < n ? pair_rank(t, out[i], out[i + 1]) : NO_RANK;
    for (;;) {
        uint32_t lowest = NO_RANK;
        for (size_t i = 0; i < n; i++) lowest = rank[i] < lowest ? rank[i] : lowest;
        if (lowest == NO_RANK) return n;
        size_t to = 0;
        bool merges = true;
        for (size_t from = 0; from < n; to++) {
            if (!merges || rank[from] != lowest) {
                out[to] = out[from];
                rank[to] = rank[from++];
                continue;
            }
            from += 2;
            out[to] = t->merged[lowest];
            rank[to] = from < n ? pair_rank(t, out[to], out[from]) : NO_RANK;
            if (to > 0) rank[to - 1] = pair_rank(t, out[to - 1], out[to]);
            merges = rank[to] >= lowest && (to == 0 || rank[to - 1] >= lowest);
        }
        n = to;
    }
}

// encode_by_merging for a word of at least one byte, through the cache.
static inline size_t encode_word(const Tokenizer* t, const char* word, size_t n, int* out) {
    if (n > CACHED_BYTES) return encode_by_merging(t, word, n, out);
    uint64_t key[CACHED_BYTES / 8] = { 0, 0, 0 };
    memcpy(key, word, n);
    uint64_t h = ((key[0] * 0x9E3779B97F4A7C15ull ^ key[1]) * 0xC2B2AE3D27D4EB4Full ^ key[2]) * 0x165667B19E3779F9ull;
    CachedWord* c = &t->scratch->cache[(h ^ h >> 32) % CACHE_SLOTS];
    if (c->length == n && memcmp(c->word, key, CACHED_BYTES) == 0) {
        memcpy(out, c->ids, c->count * sizeof *out);
        return c->count;
    }
    size_t count = encode_by_merging(t, word, n, out);
    if (count <= CACHED_TOKENS) {
        memcpy(c->word, key, CACHED_BYTES);
        c->length = (uint8_t)n;
        c->count = (uint8_t)count;
        memcpy(c->ids, out, count * sizeof *out);
    }
    return count;
}

// ---- encoding text ----

// Returns the length of the UTF-8 character at s (n > 0 bytes); 0: there is none, or not all of it.
static inline size_t utf8_length(const char* s, size_t n) {
    size_t length = utf8_prefix(s, n);
    return length <= n ? length : 0;
}

// Returns the length of the longest stretch from s that is valid UTF-8 throughout, or invalid throughout.
static inline size_t utf8_stretch(const char* s, size_t n, bool* valid) {
    *valid = utf8_length(s, n) > 0;
    size_t at = 0;
    while (at < n) {
        uint64_t eight = UINT64_MAX;
        if (*valid && n - at >= sizeof eight) memcpy(&eight, s + at, sizeof eight);
        if ((eight & 0x8080808080808080ull) == 0) { // all ASCII
            at += sizeof eight;
            continue;
        }
        size_t length = utf8_length(s + at, n - at);
        if ((length > 0) != *valid) break;
        at += size_max(1, length);
    }
    return at;
}

// Returns the length of the first word at `at` in valid UTF-8 text (n).
static inline size_t word_length(const Tokenizer* t, const char* text, size_t n, size_t at) {
    pcre2_match_data* match = t->scratch->match;
    int result = pcre2_match(t->word_pattern, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK, match, NULL);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) // the plain matcher uses the heap instead
        result = pcre2_match(t->word_pattern, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, NULL);
    invariant(result > 0, "PCRE2 finds no word at byte %zu of %zu (its error %d)", at, n, result);
    return pcre2_get_ovector_pointer(match)[1] - at;
}

// A walk over the words of a text.
typedef struct {
    const char* text;    // (n) any bytes, not owned
    size_t n;
    size_t stretch, end; // the stretch being cut is text[stretch..end)
    size_t at;           // where the next word starts
    bool valid;          // that stretch is UTF-8
} WordCursor;

static inline WordCursor word_first(const char* text, size_t n) {
    WordCursor c = { text, n, 0, 0, 0, false };
    return c;
}

// Returns the next word and its length; NULL after the last.
static inline const char* word_next(const Tokenizer* t, WordCursor* c, size_t* length) {
    if (c->at == c->n) return NULL;
    if (c->at == c->end) {
        c->stretch = c->at;
        c->end = c->at + utf8_stretch(c->text + c->at, c->n - c->at, &c->valid);
    }
    size_t size = c->end - c->stretch;
    *length = c->valid ? word_length(t, c->text + c->stretch, size, c->at - c->stretch) : size;
    c->at += *length;
    return c->text + c->at - *length;
}

// Returns the tokens of any bytes (n), without an end-of-text token. A new array of *count, which the caller frees.
static inline int* tokenizer_encode(const Tokenizer* t, const char* text, size_t n, size_t* count) {
    int* out = new_array(int, n); // a token is at least one byte
    *count = 0;
    if (t->word_pattern == NULL) {
        for (; *count < n; ++*count) out[*count] = (unsigned char)text[*count];
        return out;
    }
    WordCursor c = word_first(text, n);
    size_t length = 0;
    for (const char* word = word_next(t, &c, &length); word != NULL; word = word_next(t, &c, &length))
        *count += encode_word(t, word, length, out + *count);
    return (int*)xrealloc(out, *count * sizeof *out);
}
#endif
