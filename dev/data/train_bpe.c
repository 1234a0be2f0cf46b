/*
train_bpe - makes a byte-level BPE vocabulary from your own text: vocab.json and merges.txt in GPT-2's format.

    build/train_bpe --vocab-size 4096 --out my_tokenizer FILE...

The text is cut into words as GPT-2 cuts it, and each different word kept once with its number of occurrences. Then,
again and again, the most frequent pair of neighbours becomes a new token (Sennrich et al. 2016, section 3.2). Of equally
frequent pairs the one with the lower ids wins, so the same text gives the same files. Ids: 256 bytes in the order of
their text form, then the merges, then <|endoftext|>.

A merge touches only words that have the pair: each pair lists its words, and its count is kept up to date.
*/
#include "../../llmc/base/common.h"
#include "../../llmc/base/options.h"
#include "../../llmc/data/tokenizer.h"
#include "documents.h"

#define MIN_COUNT 2 // occurrences that a pair needs to be merged

// Different strings, each of which has a number. They are a Tokenizer's tokens, which have a table by their bytes.
typedef struct {
    Tokenizer t;
    TokenMap map;
    size_t byte_capacity, start_capacity;
} Strings;

typedef struct {
    size_t length;  // symbols; merges shrink the word in place
    int64_t count;  // occurrences in the text
} Word;

typedef struct {
    uint64_t key;      // pair_key()
    uint32_t* words;   // (num_words) words that may contain it, with repeats, owned
    size_t num_words;
} Pair;

// Its memory lives as long as the program.
typedef struct {
    Strings tokens;     // so far; its table of pairs leads to indices of `pairs`
    Strings spelled;    // the different words
    Word* words;        // (spelled.t.vocab_size), owned
    int* symbols;       // the words' tokens, where the words' bytes are in `spelled`, owned
    Pair* pairs;        // (tokens.t.pair_count), owned
    int64_t* counts;    // (tokens.t.pair_count) occurrences of each in the text, owned
    uint64_t* merges;   // (num_merges) pair_key() of each, owned
    size_t num_merges;
    int character_of[256]; // what stands for a byte in the files
} Trainer;

// Returns the number of these bytes, which get the next one if they are new.
static int string_number(Strings* s, const char* bytes, size_t n) {
    Tokenizer* t = &s->t;
    size_t count = (size_t)t->vocab_size, slots = hash_slots(count + 1);
    if (slots > s->map.count) {
        s->map.slots = (int*)xrealloc(s->map.slots, slots * sizeof *s->map.slots);
        s->map.count = slots;
        for (size_t i = 0; i < slots; i++) s->map.slots[i] = -1;
        for (int id = 0; id < t->vocab_size; id++)
            *token_map_slot(&s->map, t, t->bytes + t->start[id], t->start[id + 1] - t->start[id]) = id;
    }
    int* slot = token_map_slot(&s->map, t, bytes, n);
    if (*slot >= 0) return *slot;
    require(t->vocab_size < INT_MAX, "the text has more than 2^31-1 different words; use less of it");
    t->start = (size_t*)grow(t->start, count + 2, &s->start_capacity, sizeof *t->start);
    if (count == 0) t->start[0] = 0;
    t->start[count + 1] = t->start[count] + n;
    t->bytes = (char*)grow(t->bytes, t->start[count + 1], &s->byte_capacity, 1);
    memcpy(t->bytes + t->start[count], bytes, n);
    return *slot = t->vocab_size++;
}

// Counts the words of all documents. Returns how many bytes these have.
static size_t count_words(Trainer* r, Documents* d) {
    size_t bytes = 0, length;
    while (documents_next(d)) {
        WordCursor c = word_first(d->text, d->length);
        for (const char* word; (word = word_next(&r->tokens.t, &c, &length)) != NULL; ) {
            int known = r->spelled.t.vocab_size, number = string_number(&r->spelled, word, length);
            if (number == known) {
                r->words = (Word*)with_room(r->words, (size_t)number, sizeof *r->words);
                r->words[number] = (Word){ length, 0 };
            }
            r->words[number].count++;
        }
        bytes += d->length;
    }
    require(bytes > 0, "there is no text in the %d file%s given", d->num_paths, d->num_paths == 1 ? "" : "s");
    return bytes;
}

// ----------------------------------------------------------------------------
// pairs

// Returns the index of the pair of two neighbours; makes it if it is new.
static uint32_t pair_index(Trainer* r, int left, int right) {
    Tokenizer* t = &r->tokens.t;
    uint32_t index = pair_rank(t, left, right);
    if (index != NO_RANK) return index;
    index = (uint32_t)t->pair_count;
    r->pairs = (Pair*)with_room(r->pairs, index, sizeof *r->pairs);
    r->counts = (int64_t*)with_room(r->counts, index, sizeof *r->counts);
    r->pairs[index] = (Pair){ .key = pair_key(left, right) };
    r->counts[index] = 0;
    pair_add(t, left, right, index);
    return index;
}

static void pair_gain(Trainer* r, int left, int right, uint32_t word) {
    uint32_t index = pair_index(r, left, right);
    Pair* p = &r->pairs[index];
    r->counts[index] += r->words[word].count;
    if (p->num_words > 0 && p->words[p->num_words - 1] == word) return;
    p->words = (uint32_t*)with_room(p->words, p->num_words, sizeof *p->words);
    p->words[p->num_words++] = word;
}

static void pair_lose(Trainer* r, int left, int right, uint32_t word) {
    r->counts[pair_index(r, left, right)] -= r->words[word].count;
}

static void pairs_count(Trainer* r) {
    const Tokenizer* spelled = &r->spelled.t;
    size_t length = spelled->start[spelled->vocab_size];
    r->symbols = (int*)xcalloc(length, sizeof *r->symbols);
    for (size_t i = 0; i < length; i++) r->symbols[i] = r->tokens.t.byte_token[(unsigned char)spelled->bytes[i]];
    for (uint32_t i = 0; i < (uint32_t)spelled->vocab_size; i++) {
        const int* s = r->symbols + spelled->start[i];
        for (size_t k = 0; k + 1 < r->words[i].length; k++) pair_gain(r, s[k], s[k + 1], i);
    }
}

// ----------------------------------------------------------------------------
// merging

// Returns the token for the bytes of two tokens; makes it if it is new. Two different pairs may spell the same bytes.
static int token_of(Trainer* r, int left, int right) {
    size_t a, b;
    const char *first = tokenizer_decode(&r->tokens.t, left, &a), *second = tokenizer_decode(&r->tokens.t, right, &b);
    char* both = format_string("%*s", (int)(a + b), "");
    memcpy(both, first, a);
    memcpy(both + a, second, b);
    int token = string_number(&r->tokens, both, a + b);
    free(both);
    return token;
}

// Replaces the pair (left, right) by `merged` throughout a word and updates the counts of the neighbouring pairs.
static void merge_in_word(Trainer* r, uint32_t index, int left, int right, int merged) {
    Word* w = &r->words[index];
    int* s = r->symbols + r->spelled.t.start[index];
    size_t to = 0;
    for (size_t from = 0; from < w->length; to++) {
        bool is_pair = from + 1 < w->length && s[from] == left && s[from + 1] == right;
        if (is_pair && to > 0) {
            pair_lose(r, s[to - 1], left, index);
            pair_gain(r, s[to - 1], merged, index);
        }
        if (is_pair && from + 2 < w->length) {
            pair_lose(r, right, s[from + 2], index);
            pair_gain(r, merged, s[from + 2], index);
        }
        s[to] = is_pair ? merged : s[from];
        from += is_pair ? 2 : 1;
    }
    w->length = to;
}

static void merge_pair(Trainer* r, size_t index) {
    Pair p = r->pairs[index]; // a copy, because merging adds pairs, which may move the array
    int left = (int)(p.key >> 32), right = (int)(uint32_t)p.key, merged = token_of(r, left, right);
    r->merges = (uint64_t*)with_room(r->merges, r->num_merges, sizeof *r->merges);
    r->merges[r->num_merges++] = p.key;
    for (size_t i = 0; i < p.num_words; i++) merge_in_word(r, p.words[i], left, right, merged);
    r->pairs[index] = (Pair){ .key = p.key };
    r->counts[index] = 0;
    free(p.words);
}

// Merges the most frequent pair, of equally frequent ones that with the lower ids, until there are `wanted` tokens, or
// none occurs often enough.
static void merge_all(Trainer* r, int wanted) {
    while (r->tokens.t.vocab_size < wanted) {
        size_t best = 0;
        for (size_t i = 1; i < r->tokens.t.pair_count; i++) {
            int64_t more = r->counts[i] - r->counts[best];
            if (more > 0 || (more == 0 && r->pairs[i].key < r->pairs[best].key)) best = i;
        }
        if (r->tokens.t.pair_count == 0 || r->counts[best] < MIN_COUNT) return;
        merge_pair(r, best);
    }
}

// ----------------------------------------------------------------------------
// start, files

// Bytes are the first tokens, in the order of the characters that stand for them.
static void trainer_init(Trainer* r) {
    Tokenizer* t = &r->tokens.t;
    int byte_of[BYTE_CHARACTERS];
    byte_characters(byte_of);
    for (int c = 0; c < BYTE_CHARACTERS; c++) {
        if (byte_of[c] < 0) continue;
        char byte = (char)byte_of[c];
        r->character_of[byte_of[c]] = c;
        t->byte_token[byte_of[c]] = string_number(&r->tokens, &byte, 1);
    }
    pairs_resize(t, hash_slots(0));
    tokenizer_prepare(t);
}

// Prints a token's text form; for JSON, with backslashes before the characters that need them.
static void print_token(FILE* out, const Trainer* r, int id, const char* escaped) {
    size_t length;
    const char* bytes = tokenizer_decode(&r->tokens.t, id, &length);
    for (size_t i = 0; i < length; i++) {
        int c = r->character_of[(unsigned char)bytes[i]];
        if (c >= 0x80) fprintf(out, "%c%c", 0xC0 | c >> 6, 0x80 | (c & 0x3F));
        else fprintf(out, "%s%c", strchr(escaped, c) ? "\\" : "", c);
    }
}

static void print_vocab(FILE* out, const Trainer* r) {
    for (int id = 0; id < r->tokens.t.vocab_size; id++) {
        fprintf(out, "%s\"", id == 0 ? "{" : ", ");
        print_token(out, r, id, "\"\\");
        fprintf(out, "\": %d", id);
    }
    fprintf(out, ", \"" END_OF_TEXT "\": %d}\n", r->tokens.t.vocab_size);
}

static void print_merges(FILE* out, const Trainer* r) {
    fprintf(out, "#version: 0.2\n");
    for (size_t i = 0; i < r->num_merges; i++) {
        print_token(out, r, (int)(r->merges[i] >> 32), "");
        fputc(' ', out);
        print_token(out, r, (int)(uint32_t)r->merges[i], "");
        fputc('\n', out);
    }
}

// Writes folder/name with `print`. After an error the folder still has the file that was there before.
static void save(const Trainer* r, const char* folder, const char* name, void (*print)(FILE*, const Trainer*)) {
    char *path = format_string("%s/%s", folder, name), *temporary = format_string("%s.tmp%d", path, (int)getpid());
    char* text;
    size_t n;
    FILE* out = open_memstream(&text, &n);
    print(out, r);
    require(fclose(out) == 0, "out of host memory while making %s", path);
    if (!file_write(temporary, text, n) || rename(temporary, path) != 0 || !folder_sync(folder)) {
        int reason = errno;
        unlink(temporary);
        die("cannot write %s: %s", path, path_reason(path, reason));
    }
    free(text);
    free(temporary);
    free(path);
}

int main(int argc, char** argv) {
    long long vocab_size = 4096;
    const char* out = ".";
    OptionTable table = options_table("train_bpe", "make a GPT-2 style vocabulary from text files; - is standard input");
    option_int(&table, "vocab-size", &vocab_size, 257, UINT16_MAX + 1,
               "tokens in the vocabulary: 256 bytes, merges, and <|endoftext|>");
    option_text(&table, "out", &out, "DIR", "folder for vocab.json and merges.txt; created if missing");
    option_letter(&table, 'o');
    Documents d = documents_parse(&table, argc, argv);
    require(folder_make(out), "cannot make folder %s: %s", out, path_reason(out, errno));

    static Trainer r;
    trainer_init(&r);
    size_t bytes = count_words(&r, &d);
    pairs_count(&r);
    merge_all(&r, (int)vocab_size - 1);
    save(&r, out, "vocab.json", print_vocab);
    save(&r, out, "merges.txt", print_merges);
    int tokens = r.tokens.t.vocab_size + 1;
    printf("%s: %d tokens and %zu merges from %zu bytes of text, %d different words\n", out, tokens, r.num_merges,
           bytes, r.spelled.t.vocab_size);
    if (tokens < vocab_size)
        printf("that is less than --vocab-size %lld: no other pair occurs %d times\n", vocab_size, MIN_COUNT);
    documents_free(&d);
    return EXIT_SUCCESS;
}
