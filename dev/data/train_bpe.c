/*
train_bpe - makes a byte-level BPE vocabulary from your own text: vocab.json and merges.txt in GPT-2's format.

    build/train_bpe --vocab-size 4096 --out my_tokenizer FILE...

The text is cut into words as GPT-2 cuts it, and each different word kept once with its number of occurrences. Then,
again and again, the most frequent pair of neighbours becomes a new token (Sennrich et al. 2016, section 3.2). Of equally
frequent pairs the one with the lower ids wins, so the same text gives the same files. Ids: 256 bytes in the order of
their text form, then the merges, then <|endoftext|>.

A merge touches only words that have the pair: each pair lists its words, and its count is kept up to date. The most
frequent pair comes from a heap whose entries may be outdated: an outdated entry gets its present count and goes back.
*/
#include "../../llmc/base/common.h"
#include "../../llmc/base/options.h"
#include "../../llmc/data/tokenizer.h"
#include "documents.h"

typedef struct {
    size_t start;   // index of its first symbol in Trainer.symbols; merges shrink the word in place
    size_t length;  // symbols
    uint64_t count; // occurrences in the text
} Word;

typedef struct {
    uint64_t key;      // pair_key()
    int64_t count;     // occurrences in the text
    uint32_t* words;   // (num_words) words that may contain it, with repeats, owned
    size_t num_words;
    bool has_gained;   // it is in Trainer.gained
} Pair;

typedef struct {
    int64_t count; // of the pair, when it was put here
    uint64_t key;  // pair_key()
} HeapEntry;

typedef struct {
    Tokenizer t;        // the tokens so far; its table of pairs leads to indices of `pairs`
    TokenMap map;       // tokens by their bytes
    size_t byte_capacity;
    char* text;         // (text_length) the bytes of the different words, one after another, owned
    size_t text_length, text_capacity;
    int* symbols;       // (text_length) their tokens, owned
    Word* words;        // (num_words), owned
    size_t num_words;
    int64_t* word_slots; // (num_slots, a power of two) hash table of words: index or -1, owned
    size_t num_slots;
    Pair* pairs;        // (t.pair_count), owned
    uint32_t* gained;   // (num_gained) pairs that have grown more frequent and are to be put on the heap, owned
    size_t num_gained;
    HeapEntry* heap;    // (heap_count), owned
    size_t heap_count;
    uint64_t* merges;   // (num_merges) pair_key() of each, owned
    int num_merges;
    int character_of[256]; // what stands for a byte in the files
} Trainer;

// ----------------------------------------------------------------------------
// words

static int64_t* word_slot(const Trainer* r, const char* s, size_t n) {
    for (size_t i = hash_bytes(s, n);; i++) {
        int64_t* slot = &r->word_slots[i & (r->num_slots - 1)];
        if (*slot < 0) return slot;
        const Word* w = &r->words[*slot];
        if (w->length == n && memcmp(r->text + w->start, s, n) == 0) return slot;
    }
}

static void word_slots_resize(Trainer* r) {
    r->num_slots = hash_slots(2 * r->num_words + 1);
    r->word_slots = (int64_t*)xrealloc(r->word_slots, r->num_slots * sizeof *r->word_slots);
    for (size_t i = 0; i < r->num_slots; i++) r->word_slots[i] = -1;
    for (size_t i = 0; i < r->num_words; i++)
        *word_slot(r, r->text + r->words[i].start, r->words[i].length) = (int64_t)i;
}

static void word_count(Trainer* r, const char* s, size_t n) {
    if (2 * r->num_words >= r->num_slots) word_slots_resize(r);
    int64_t* slot = word_slot(r, s, n);
    if (*slot < 0) {
        *slot = (int64_t)r->num_words;
        require(r->num_words < UINT32_MAX, "the text has more than 2^32-1 different words; use less of it");
        r->words = (Word*)with_room(r->words, r->num_words, sizeof *r->words);
        r->words[r->num_words++] = (Word){ r->text_length, n, 0 };
        r->text = (char*)grow(r->text, r->text_length + n, &r->text_capacity, 1);
        memcpy(r->text + r->text_length, s, n);
        r->text_length += n;
    }
    r->words[*slot].count++;
}

static size_t count_words(Trainer* r, Documents* d) {
    size_t bytes = 0, length;
    while (documents_next(d)) {
        WordCursor c = word_first(d->text, d->length);
        for (const char* word = word_next(&r->t, &c, &length); word != NULL; word = word_next(&r->t, &c, &length))
            word_count(r, word, length);
        bytes += d->length;
    }
    require(bytes > 0, "there is no text in the %d files given", d->num_paths);
    return bytes;
}

// ----------------------------------------------------------------------------
// pairs

// Higher counts come first, then lower ids.
static bool entry_before(HeapEntry a, HeapEntry b) { return a.count > b.count || (a.count == b.count && a.key < b.key); }

static void entry_push(Trainer* r, HeapEntry e) {
    r->heap = (HeapEntry*)with_room(r->heap, r->heap_count, sizeof *r->heap);
    size_t i = r->heap_count++;
    for (; i > 0 && entry_before(e, r->heap[(i - 1) / 2]); i = (i - 1) / 2) r->heap[i] = r->heap[(i - 1) / 2];
    r->heap[i] = e;
}

static HeapEntry entry_pop(Trainer* r) {
    HeapEntry top = r->heap[0], last = r->heap[--r->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < r->heap_count; child = 2 * i + 1) {
        if (child + 1 < r->heap_count && entry_before(r->heap[child + 1], r->heap[child])) child++;
        if (!entry_before(r->heap[child], last)) break;
        r->heap[i] = r->heap[child];
        i = child;
    }
    r->heap[i] = last;
    return top;
}

// Returns the pair of two neighbours; makes it if it is new. Valid until the next call.
static Pair* pair_at(Trainer* r, int left, int right) {
    uint32_t index = pair_rank(&r->t, left, right);
    if (index == NO_RANK) {
        index = (uint32_t)r->t.pair_count;
        r->pairs = (Pair*)with_room(r->pairs, index, sizeof *r->pairs);
        r->pairs[index] = (Pair){ .key = pair_key(left, right) };
        pair_add(&r->t, left, right, index);
    }
    return &r->pairs[index];
}

static void pair_gain(Trainer* r, int left, int right, uint32_t word) {
    Pair* p = pair_at(r, left, right);
    p->count += (int64_t)r->words[word].count;
    if (!p->has_gained) {
        r->gained = (uint32_t*)with_room(r->gained, r->num_gained, sizeof *r->gained);
        r->gained[r->num_gained++] = (uint32_t)(p - r->pairs);
        p->has_gained = true;
    }
    if (p->num_words > 0 && p->words[p->num_words - 1] == word) return;
    p->words = (uint32_t*)with_room(p->words, p->num_words, sizeof *p->words);
    p->words[p->num_words++] = word;
}

static void pair_lose(Trainer* r, int left, int right, uint32_t word) {
    pair_at(r, left, right)->count -= (int64_t)r->words[word].count;
}

// Puts the pairs that have grown more frequent on the heap, each once.
static void push_gained(Trainer* r) {
    while (r->num_gained > 0) {
        Pair* p = &r->pairs[r->gained[--r->num_gained]];
        entry_push(r, (HeapEntry){ p->count, p->key });
        p->has_gained = false;
    }
}

static void pairs_count(Trainer* r) {
    r->symbols = (int*)xcalloc(r->text_length, sizeof *r->symbols);
    for (size_t i = 0; i < r->text_length; i++) r->symbols[i] = r->t.byte_token[(unsigned char)r->text[i]];
    for (size_t i = 0; i < r->num_words; i++) {
        const int* s = r->symbols + r->words[i].start;
        for (size_t k = 0; k + 1 < r->words[i].length; k++) pair_gain(r, s[k], s[k + 1], (uint32_t)i);
    }
    push_gained(r);
}

// ----------------------------------------------------------------------------
// merging

// Returns the token for the bytes of two tokens; makes it if it is new. Two different pairs may spell the same bytes.
static int token_of(Trainer* r, int left, int right) {
    Tokenizer* t = &r->t;
    size_t a, b, end = t->start[t->vocab_size];
    tokenizer_decode(t, left, &a);
    tokenizer_decode(t, right, &b);
    t->bytes = (char*)grow(t->bytes, end + a + b, &r->byte_capacity, 1);
    memcpy(t->bytes + end, t->bytes + t->start[left], a);
    memcpy(t->bytes + end + a, t->bytes + t->start[right], b);
    int* slot = token_map_slot(&r->map, t, t->bytes + end, a + b);
    if (*slot < 0) {
        *slot = t->vocab_size++;
        t->start[t->vocab_size] = end + a + b;
    }
    return *slot;
}

// Replaces the pair (left, right) by `merged` throughout a word and updates the counts of the neighbouring pairs.
static void merge_in_word(Trainer* r, uint32_t index, int left, int right, int merged) {
    Word* w = &r->words[index];
    int* s = r->symbols + w->start;
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

static void merge_pair(Trainer* r, uint32_t index) {
    Pair p = r->pairs[index]; // a copy, because merging adds pairs, which may move the array
    int left = (int)(p.key >> 32), right = (int)(uint32_t)p.key, merged = token_of(r, left, right);
    r->merges[r->num_merges++] = p.key;
    for (size_t i = 0; i < p.num_words; i++) merge_in_word(r, p.words[i], left, right, merged);
    r->pairs[index] = (Pair){ .key = p.key };
    push_gained(r);
    free(p.words);
}

// Merges until there are `wanted` tokens, or no pair is left that occurs at least min_count times.
static void merge_all(Trainer* r, int wanted, long long min_count) {
    while (r->t.vocab_size < wanted && r->heap_count > 0) {
        HeapEntry e = entry_pop(r);
        uint32_t index = pair_slot(&r->t, e.key)->rank;
        int64_t count = r->pairs[index].count;
        if (count < min_count) continue;
        r->merges = (uint64_t*)with_room(r->merges, (size_t)r->num_merges, sizeof *r->merges);
        if (count == e.count) merge_pair(r, index);
        else entry_push(r, (HeapEntry){ count, e.key });
    }
}

// ----------------------------------------------------------------------------
// start, files, end

// r: zeros. Bytes are the first tokens, in the order of the characters that stand for them.
static void trainer_init(Trainer* r, int vocab_size) {
    Tokenizer* t = &r->t;
    t->start = (size_t*)xcalloc((size_t)vocab_size + 1, sizeof *t->start);
    t->bytes = (char*)xcalloc(256, 1);
    r->byte_capacity = 256;
    int byte_of[BYTE_CHARACTERS];
    byte_characters(byte_of);
    for (int c = 0; c < BYTE_CHARACTERS; c++) {
        if (byte_of[c] < 0) continue;
        r->character_of[byte_of[c]] = c;
        t->bytes[t->vocab_size++] = (char)byte_of[c];
        t->start[t->vocab_size] = (size_t)t->vocab_size;
    }
    r->map = token_map_make(t, tokenizer_source("the single bytes"), (size_t)vocab_size);
    pairs_resize(t, hash_slots(0));
    tokenizer_prepare(t);
}

static void trainer_free(Trainer* r) {
    for (size_t i = 0; i < r->t.pair_count; i++) free(r->pairs[i].words);
    tokenizer_free(&r->t);
    free(r->map.slots);
    free(r->text);
    free(r->symbols);
    free(r->words);
    free(r->word_slots);
    free(r->pairs);
    free(r->gained);
    free(r->heap);
    free(r->merges);
}

// Prints a token's text form; for JSON, with backslashes before the characters that need them.
static void print_token(FILE* out, const Trainer* r, int id, const char* escaped) {
    size_t length;
    const char* bytes = tokenizer_decode(&r->t, id, &length);
    for (size_t i = 0; i < length; i++) {
        int c = r->character_of[(unsigned char)bytes[i]];
        if (c >= 0x80) fprintf(out, "%c%c", 0xC0 | c >> 6, 0x80 | (c & 0x3F));
        else fprintf(out, "%s%c", strchr(escaped, c) ? "\\" : "", c);
    }
}

static void print_vocab(FILE* out, const Trainer* r) {
    for (int id = 0; id < r->t.vocab_size; id++) {
        fprintf(out, "%s\"", id == 0 ? "{" : ", ");
        print_token(out, r, id, "\"\\");
        fprintf(out, "\": %d", id);
    }
    fprintf(out, ", \"" END_OF_TEXT "\": %d}\n", r->t.vocab_size);
}

static void print_merges(FILE* out, const Trainer* r) {
    fprintf(out, "#version: 0.2\n");
    for (int i = 0; i < r->num_merges; i++) {
        print_token(out, r, (int)(r->merges[i] >> 32), "");
        fputc(' ', out);
        print_token(out, r, (int)(uint32_t)r->merges[i], "");
        fputc('\n', out);
    }
}

// Writes folder/name with `print`. After an error the folder still has the file that was there before.
static void save(const Trainer* r, const char* folder, const char* name, void (*print)(FILE*, const Trainer*)) {
    char* path = format_string("%s/%s", folder, name);
    char* temporary = format_string("%s.tmp%d", path, (int)getpid());
    FILE* out = fopen(temporary, "wb");
    require(out != NULL, "cannot create %s: %s", temporary, path_reason(path, errno));
    print(out, r);
    bool written = fflush(out) == 0 && !ferror(out) && fsync(fileno(out)) == 0;
    written = fclose(out) == 0 && written;
    if (!written || rename(temporary, path) != 0 || !folder_sync(folder)) {
        int reason = errno;
        unlink(temporary);
        die("cannot write %s: %s", path, strerror(reason));
    }
    free(temporary);
    free(path);
}

int main(int argc, char** argv) {
    long long vocab_size = 4096, min_count = 2;
    const char* out = ".";
    OptionTable table = options_table("train_bpe", "make a GPT-2 style vocabulary from text files; - is standard input");
    option_int(&table, "vocab-size", &vocab_size, 257, UINT16_MAX + 1,
               "tokens in the vocabulary: 256 bytes, merges, and <|endoftext|>");
    option_int(&table, "min-count", &min_count, 1, 1e15, "occurrences that a pair needs to be merged");
    option_text(&table, "out", &out, "DIR", "folder for vocab.json and merges.txt; created if missing");
    option_letter(&table, 'o');
    Documents d = documents_parse(&table, argc, argv);
    require(folder_make(out), "cannot make folder %s: %s", out, path_reason(out, errno));

    static Trainer r;
    trainer_init(&r, (int)vocab_size);
    size_t bytes = count_words(&r, &d);
    pairs_count(&r);
    merge_all(&r, (int)vocab_size - 1, min_count);
    save(&r, out, "vocab.json", print_vocab);
    save(&r, out, "merges.txt", print_merges);
    printf("%s: %d tokens and %d merges from %zu bytes of text, %zu different words\n", out, r.t.vocab_size + 1, r.num_merges,
           bytes, r.num_words);
    if (r.t.vocab_size + 1 < vocab_size)
        printf("that is less than --vocab-size %lld: no other pair occurs %lld times\n", vocab_size, min_count);
    documents_free(&d);
    trainer_free(&r);
    return EXIT_SUCCESS;
}
