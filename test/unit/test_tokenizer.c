// test_tokenizer.c - every text is encoded as BPE defines it and decodes to itself, and no broken file is accepted.
#include "../../llmc/data/tokenizer.h"
#include "../../llmc/base/rng.h"
#include "test_folder.h"

static const char* write_text(const char* name, const char* text) { return write_file(name, text, strlen(text)); }

// ---- vocabularies made here ----
// Tokens by their bytes. The single bytes come first, in order, then the added tokens, so that ids are easy to name.
typedef struct {
    char bytes[600][64];
    size_t length[600];
    int count;
    char merges[65536]; // merges.txt
} Vocabulary;

static int vocabulary_add(Vocabulary* v, const char* bytes, size_t n) {
    memcpy(v->bytes[v->count], bytes, n);
    v->length[v->count] = n;
    return v->count++;
}

static Vocabulary vocabulary_of_bytes(void) {
    Vocabulary v;
    memset(&v, 0, sizeof v);
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        vocabulary_add(&v, &byte, 1);
    }
    strcpy(v.merges, "#version: 0.2\n");
    return v;
}

// The text form of bytes, as both files have it.
static void append_text(char* out, const char* bytes, size_t n) {
    out += strlen(out);
    for (size_t i = 0; i < n; i++) {
        int b = (unsigned char)bytes[i], c = b;
        if (!byte_is_printable(b)) {
            c = 256;
            for (int other = 0; other < b; other++) c += !byte_is_printable(other);
        }
        out += c < 0x80 ? sprintf(out, "%c", c) : sprintf(out, "%c%c", 0xC0 | c >> 6, 0x80 | (c & 0x3F));
    }
}

static int vocabulary_merge(Vocabulary* v, int left, int right) {
    const int parts[2] = { left, right };
    char both[128];
    size_t n = 0;
    for (int k = 0; k < 2; n += v->length[parts[k++]]) {
        append_text(v->merges, v->bytes[parts[k]], v->length[parts[k]]);
        strcat(v->merges, k == 0 ? " " : "\n");
        memcpy(both + n, v->bytes[parts[k]], v->length[parts[k]]);
    }
    return vocabulary_add(v, both, n);
}

// Writes vocab.json, and merges.txt beside it. Returns the path of the first.
static const char* vocabulary_write_json(const Vocabulary* v) {
    json_t* root = json_object();
    for (int id = v->count - 1; id >= 0; id--) { // order in the file means nothing
        char text[200] = "";
        append_text(text, v->bytes[id], v->length[id]);
        json_object_set_new(root, text, json_integer(id));
    }
    assert_int_equal(json_dump_file(root, in_folder("vocab.json"), JSON_COMPACT), 0);
    json_decref(root);
    write_text("merges.txt", v->merges);
    return in_folder("vocab.json");
}

static const char* vocabulary_write_bin(const Vocabulary* v, int eot) {
    static char file[65536];
    int32_t header[256] = { TOKENIZER_MAGIC, TOKENIZER_VERSION, v->count, eot };
    memcpy(file, header, sizeof header);
    size_t n = sizeof header;
    for (int id = 0; id < v->count; id++) {
        file[n++] = (char)v->length[id];
        memcpy(file + n, v->bytes[id], v->length[id]);
        n += v->length[id];
    }
    return write_file("tokenizer.bin", file, n);
}

enum { HE = 256, LL, HELL, SPACE_W, OR, HELLO, EOT }; // tokens of this small vocabulary
static Vocabulary small_vocabulary(void) {
    Vocabulary v = vocabulary_of_bytes();
    static const int merged[][2] = { { 'h', 'e' }, { 'l', 'l' }, { HE, LL }, { ' ', 'w' }, { 'o', 'r' }, { HELL, 'o' } };
    for (int i = 0; i < 6; i++) assert_int_equal(vocabulary_merge(&v, merged[i][0], merged[i][1]), HE + i);
    assert_int_equal(vocabulary_add(&v, END_OF_TEXT, strlen(END_OF_TEXT)), EOT);
    return v;
}

static const char* write_small(void) {
    Vocabulary v = small_vocabulary();
    return vocabulary_write_json(&v);
}

// Adds merges of random existing tokens, over only a few letters, so that words have many merges.
static Vocabulary random_vocabulary(uint64_t seed) {
    Vocabulary v = vocabulary_of_bytes();
    for (uint64_t i = 0; v.count < 330; i++) {
        Philox r = philox(seed, 7, i);
        int ids[2];
        for (int k = 0; k < 2; k++) {
            int pick = (int)(r.x[k] % (uint32_t)(3 + v.count - 256));
            ids[k] = pick < 3 ? 'a' + pick : 256 + pick - 3;
        }
        size_t length = v.length[ids[0]] + v.length[ids[1]];
        bool is_new = length <= 12;
        for (int id = 256; id < v.count && is_new; id++)
            is_new = v.length[id] != length || memcmp(v.bytes[id], v.bytes[ids[0]], v.length[ids[0]]) != 0
                     || memcmp(v.bytes[id] + v.length[ids[0]], v.bytes[ids[1]], v.length[ids[1]]) != 0;
        if (is_new) vocabulary_merge(&v, ids[0], ids[1]);
    }
    vocabulary_add(&v, END_OF_TEXT, strlen(END_OF_TEXT));
    return v;
}

// ---- what encoding must give ----
// A tokenizer that is freed at the end of its block: OPENED t = opened("bytes").
#define OPENED FREED_BY(tokenizer_free) Tokenizer
static Tokenizer opened(const char* spec) {
    Tokenizer t;
    tokenizer_open(&t, spec);
    return t;
}
static void expect_tokens(const Tokenizer* t, const char* text, const int* want, size_t num_want) {
    size_t count;
    FREED int* ids = tokenizer_encode(t, text, strlen(text), &count);
    assert_int_equal(count, num_want);
    assert_memory_equal(ids, want, num_want * sizeof(int));
}
#define expect_encoding(t, text, ...) do { \
        const int want_[] = { __VA_ARGS__ }; \
        expect_tokens(t, text, want_, COUNT(want_)); \
    } while (0)

static void expect_round_trip(const Tokenizer* t, const char* text, size_t n) {
    size_t count, at = 0;
    FREED int* ids = tokenizer_encode(t, text, n, &count);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char* bytes = tokenizer_decode(t, ids[i], &length);
        assert_int_not_equal(ids[i], t->eot);
        assert_true(at + length <= n);
        assert_memory_equal(text + at, bytes, length);
        at += length;
    }
    assert_int_equal(at, n);
}

// The definition: while any neighbours merge, merge the leftmost pair of the lowest rank.
static size_t encode_slowly(const Tokenizer* t, const char* word, size_t n, int* ids) {
    for (size_t i = 0; i < n; i++) ids[i] = t->byte_token[(unsigned char)word[i]];
    for (;;) {
        uint32_t best = NO_RANK;
        size_t where = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            uint32_t rank = pair_rank(t, ids[i], ids[i + 1]);
            if (rank < best) { best = rank; where = i; }
        }
        if (best == NO_RANK) return n;
        ids[where] = t->merged[best];
        memmove(ids + where + 1, ids + where + 2, (n - where - 2) * sizeof(int));
        n--;
    }
}

// ---- tests ----
static void expect_end_of_text(const Tokenizer* t) { // text that spells it is text, and the token is shown as it
    size_t length;
    expect_round_trip(t, END_OF_TEXT, 13);
    assert_memory_equal(tokenizer_decode(t, t->eot, &length), END_OF_TEXT, 13);
    assert_int_equal(length, 13);
}
TEST(bytes_are_their_own_tokens) {
    OPENED t = opened("bytes");
    assert_true(t.vocab_size == 257 && t.eot == 256);
    expect_encoding(&t, "a\xff\n", 'a', 255, '\n');
    expect_end_of_text(&t);
    char all[256];
    for (int b = 0; b < 256; b++) all[b] = (char)b;
    expect_round_trip(&t, all, sizeof all);
}

TEST(text_merges_by_rank_whether_from_a_folder_or_from_either_kind_of_file) {
    Vocabulary v = small_vocabulary();
    const char* specs[] = { vocabulary_write_json(&v), folder, vocabulary_write_bin(&v, EOT), NULL };
    OPENED bytes = opened("bytes"), first = opened(folder);
    uint64_t fingerprint = first.fingerprint;
    assert_true(bytes.fingerprint != 0 && fingerprint != 0 && bytes.fingerprint != fingerprint);
    for (int i = 0; i < 4; i++) {
        if (i == 3) { // merges need no version line and no last newline
            v.merges[strlen(v.merges) - 1] = '\0';
            specs[3] = vocabulary_write_json(&v);
            write_text("merges.txt", strchr(v.merges, '\n') + 1);
        }
        OPENED t = opened(specs[i]);
        size_t count = 1;
        assert_true(t.vocab_size == 263 && t.eot == EOT && t.fingerprint == fingerprint);
        expect_encoding(&t, "hello worlld", HELLO, SPACE_W, OR, LL, 'd');
        expect_encoding(&t, "lll", LL, 'l');
        expect_encoding(&t, "hell", HELL);
        expect_encoding(&t, "ell", 'e', LL);
        expect_encoding(&t, "h", 'h');
        free(tokenizer_encode(&t, "", 0, &count));
        assert_int_equal(count, 0);
        expect_end_of_text(&t);
    }
}

TEST(words_are_cut_as_gpt2_cuts_them) {
    static const struct { const char *text, *cut; } cases[] = { // cut: words with | between
        { "Hello, world!", "Hello|,| world|!" },
        { "I've he'll we'd it's I'm don't you're", "I|'ve| he|'ll| we|'d| it|'s| I|'m| don|'t| you|'re" },
        { "I'VE 'twas", "I|'|VE| '|twas" },
        { "a  b", "a| | b" },
        { "a   b\n\n  c  ", "a|  | b|\n\n | c|  " },
        { "x=12.5;", "x|=|12|.|5|;" },
        { "\t\tif(x)", "\t|\t|if|(|x|)" },
        { " \xc3\xa9t\xc3\xa9 \xe2\x82\xac" "5", " \xc3\xa9t\xc3\xa9| \xe2\x82\xac|5" },
        { "\xe4\xbd\xa0\xe5\xa5\xbd\xe3\x80\x82", "\xe4\xbd\xa0\xe5\xa5\xbd|\xe3\x80\x82" },
        { "a\xc2\xa0\xc2\xa0" "b", "a|\xc2\xa0|\xc2\xa0|b" },          // no-break spaces are white space
        { "a \xe1\xa0\x8e", "a| \xe1\xa0\x8e" },                       // U+180E no longer is
        { "1\xc2\xbd\xe2\x85\xa7", "1\xc2\xbd\xe2\x85\xa7" },          // a half and a Roman eight are numbers
        { "ok \xff\xfe ok", "ok| |\xff\xfe| ok" },                     // what is no UTF-8 is a word of its own
        { "ok\xe2\x82", "ok|\xe2\x82" },
    };
    OPENED t = opened(write_small());
    for (size_t i = 0; i < COUNT(cases); i++) {
        char cut[200] = "";
        WordCursor c = word_first(cases[i].text, strlen(cases[i].text));
        size_t length;
        for (const char* word = word_next(&t, &c, &length); word != NULL; word = word_next(&t, &c, &length))
            sprintf(cut + strlen(cut), "%s%.*s", *cut ? "|" : "", (int)length, word);
        assert_string_equal(cut, cases[i].cut);
    }
}

TEST(only_shortest_utf8_of_real_characters_is_valid) {
    static const char* const valid[] = { "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80",
        "\xf4\x8f\xbf\xbf" };
    static const char* const invalid[] = { "\x80", "\xc1\xbf", "\xc0\x80", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc2", "\xe2\x82", "\xf0\x9f\x98", "\xc2" "a", "\xe2\x82" "a" };
    for (size_t i = 0; i < COUNT(valid); i++) assert_int_equal(utf8_length(valid[i], strlen(valid[i])), strlen(valid[i]));
    for (size_t i = 0; i < COUNT(invalid); i++) assert_int_equal(utf8_length(invalid[i], strlen(invalid[i])), 0);
}

TEST(the_fast_merge_is_the_slow_one) {
    for (uint64_t seed = 0; seed < 20; seed++) {
        Vocabulary v = random_vocabulary(seed);
        OPENED t = opened(seed % 2 ? vocabulary_write_json(&v) : vocabulary_write_bin(&v, v.count - 1));
        for (uint64_t i = 0; i < 300; i++) {
            char word[400];
            int fast[400], slow[400];
            size_t n = 1 + philox(seed, 1, i).x[0] % (i % 10 ? 40 : 400);
            for (size_t k = 0; k < n; k++) word[k] = (char)('a' + philox(seed, i + 2, k).x[0] % 3);
            size_t count = encode_slowly(&t, word, n, slow);
            for (int again = 0; again < 2; again++) { // the second time from the cache
                assert_int_equal(encode_word(&t, word, n, fast), count);
                assert_memory_equal(fast, slow, count * sizeof(int));
            }
        }
    }
}

TEST(long_runs_take_no_quadratic_time) {
    const size_t n = 1 << 20; // n*n steps would take hours
    OPENED t = opened(write_small());
    FREED char* text = xcalloc(n, 1);
    static const char fills[] = { 'l', ' ', '!', '7', '\xff', '\0' };
    alarm(120);
    for (size_t i = 0; i < sizeof fills; i++) {
        memset(text, fills[i], n);
        expect_round_trip(&t, text, n);
    }
    for (size_t i = 0; i < n; i++) text[i] = i % 2 ? 'a' : '\xff'; // as many stretches as there can be
    expect_round_trip(&t, text, n);
    alarm(0);
}

// ---- files that are not what they should be ----
static void decode_beyond(int id) {
    OPENED t = opened("bytes");
    size_t length;
    tokenizer_decode(&t, id, &length);
}
static void expect_refusal(const char* path, const char* says) { expect_error(opened(path), path, says); }

TEST(what_is_no_tokenizer_is_named) {
    expect_error(opened(in_folder("nothing")), "nothing", "No such file", "vocab.json", "merges.txt");
    expect_refusal("bytes2", "No such file");
    expect_refusal(write_text("empty", ""), "starts neither with {");
    expect_refusal(write_text("words.txt", "hello"), "starts neither with {");
    assert_int_equal(mkdir(in_folder("sub"), 0700), 0);
    expect_error(opened(in_folder("sub")), "sub/vocab.json", "No such file");
    expect_error(decode_beyond(-1), "token -1", "257");
    expect_error(decode_beyond(257), "token 257", "257");
}

#define GOOD "\"hell\":258"
TEST(a_broken_vocabulary_is_refused) {
    static const char* const changes[][3] = { // what is replaced by what, and what is said
        { ":0}", ":0", "not valid JSON" }, { ":0}", ":0}}", "not valid JSON" }, { GOOD, GOOD "," GOOD, "duplicate object key" },
        { "\"a\":97", "\"aa\":97", "no token is the single byte 0x61" }, { "<|endoftext|>", "<|endoftexts|>", "no token <|endoftext|>" },
        { GOOD, "\"hell\":257", "have the same id 257" }, { GOOD, "\"hell\":-1", "has id -1" },
        { GOOD, "\"hell\":263", "has id 263; the 263 tokens must have ids 0 to 262" },
        { GOOD, "\"hell\":99999999999999999999", "not valid JSON" }, { GOOD, "\"hell\":258.0", "no whole number" },
        { GOOD, "\"hell\":\"258\"", "no whole number" }, { GOOD, "\"he ll\":258", "is not the byte-level text" },
        { GOOD, "\"\":258", "is not the byte-level text" }, { GOOD, "\"\xe4\xbd\xa0\":258", "is not the byte-level text" },
        { GOOD, "\"he\xc5\x84\":258", "is not the byte-level text" }, // U+0144, one past the last
        { GOOD, "\"h\\u0000\":258", "not valid JSON" }
    };
    size_t n;
    FREED char* good = file_read((FileSource){ write_small(), "" }, 1 << 16, &n); // with its merges beside it
    for (size_t i = 0; i < COUNT(changes); i++) {
        FREED char* text = replaced(good, changes[i][0], changes[i][1]);
        expect_refusal(write_text("vocab.json", text), changes[i][2]);
    }
    expect_refusal(write_text("vocab.json", "{}"), "is not a JSON object of tokens");
    expect_refusal(write_text("vocab.json", "{\"a\":0}"), "no token is the single byte 0x00");
    char deep[5000];
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    expect_refusal(write_file("vocab.json", deep, sizeof deep), "not valid JSON");
}

TEST(broken_merges_are_refused) {
    static const char* const merges[][2] = {
        { "h e\nhe\n", "line 2: \"he\" is not two tokens" }, { "#version: 0.2\n\nh e\n", "line 2: \"\" is not two tokens" },
        { "h e x\n", "line 1: \"e x\" is not in the vocabulary" }, { "he l\n", "line 1: the merge of \"he l\" is not in the vocabulary" },
        { "xyz l\n", "line 1: \"xyz\" is not in the vocabulary" }, { " l\n", "line 1: \"\" is not in the vocabulary" },
        { "h \n", "line 1: \"\" is not in the vocabulary" }, { "h e\r\n", "line 1 ends in CR LF" },
        { "#version: 0.2\r\nh e\r\n", "line 1 ends in CR LF" },
        { "h e\nl l\r", "line 2 ends in CR LF" }, { "h e\nl l\nh e\n", "line 3: \"h e\" was there before" },
        { "\xff e\n", "is not in the vocabulary" },
        { "h \xc4\n", "is not in the vocabulary" }, { "", "its 0 merges do not make 6 of" },
        { "h e\nl l\nhe ll\nhell o\no r\n", "make 1 of the vocabulary's tokens, the first of them token 259" } // without the fourth
    };
    write_small();
    for (size_t i = 0; i < COUNT(merges); i++) {
        write_text("merges.txt", merges[i][0]);
        expect_error(opened(folder), "merges.txt", merges[i][1]);
    }
    assert_int_equal(unlink(in_folder("merges.txt")), 0);
    expect_error(opened(folder), "merges.txt", "No such file");
}

// Tokens that no merge makes are fine where text never becomes them: those that trainers and people add to a vocabulary.
TEST(added_tokens_need_no_merge) {
    static const char* const added[] = { "<pad>", "[UNK]", "<|im_start|>", "madeupword0000", "<|endoftext|><|endoftext|>" };
    static const char* const text[] = { "pad", " pad", "\n\n", "<>", "12", "\xc3\xa9", "\xe2\x82" };
    for (size_t i = 0; i < COUNT(added); i++) {
        Vocabulary v = small_vocabulary();
        int id = vocabulary_add(&v, added[i], strlen(added[i]));
        OPENED t = opened(vocabulary_write_json(&v));
        assert_int_equal(t.vocab_size, id + 1);
        expect_encoding(&t, "hello", HELLO);
    }
    for (size_t i = 0; i < COUNT(text); i++) {
        Vocabulary v = small_vocabulary();
        vocabulary_add(&v, text[i], strlen(text[i]));
        vocabulary_write_json(&v);
        expect_error(opened(folder), "merges.txt", "make 1 of the vocabulary's tokens, the first of them token 263");
    }
}

// A token can be made by several merges, as in vocabularies of Hugging Face's trainers.
TEST(two_merges_may_make_one_token) {
    Vocabulary v = vocabulary_of_bytes();
    int ab = vocabulary_merge(&v, 'a', 'b'), bc = vocabulary_merge(&v, 'b', 'c'), abc = vocabulary_merge(&v, ab, 'c');
    strcat(v.merges, "a bc\n");
    vocabulary_add(&v, END_OF_TEXT, strlen(END_OF_TEXT));
    OPENED t = opened(vocabulary_write_json(&v));
    expect_encoding(&t, "abcbc", abc, bc);
}

TEST(text_cannot_be_made_into_the_end_of_text) {
    Vocabulary v = vocabulary_of_bytes();
    int stem = vocabulary_add(&v, "<|endoftext|", 12);
    vocabulary_merge(&v, stem, '>');
    vocabulary_write_json(&v);
    expect_error(opened(folder), "merges.txt", "line 2 merges text into <|endoftext|>");
}

TEST(a_broken_tokenizer_bin_is_refused) {
    Vocabulary v = small_vocabulary();
    static char file[65536];
    size_t n;
    FREED char* good = file_read((FileSource){ vocabulary_write_bin(&v, EOT), "" }, sizeof file, &n);
    const struct { size_t bytes; int at; int32_t value; const char *says, *more; } cases[] = { // a cut, or another value in the header
        { 1023, 1, 2, "has 1023 bytes", "" }, { n - 1, 1, 2, "ends within token 262 of 263", "" },
        { n + 1, 1, 2, "has 1 bytes after its last token", "" },
        { 1024, 1, 2, "says it has 263 tokens; its 1024 bytes allow 1 to 0", "" }, { n, 1, 1, "version 1", "reads version 2" },
        { n, 2, 0, "says it has", "bytes allow 1 to" }, { n, 2, -1, "says it has", "bytes allow 1 to" },
        { n, 2, INT32_MAX, "says it has", "bytes allow 1 to" }, { n, 2, INT32_MIN, "says it has", "bytes allow 1 to" },
        { n, 3, -1, "end-of-text token", "tokens 0 to 262" }, { n, 3, v.count, "end-of-text token", "tokens 0 to 262" },
        { n, 3, INT32_MIN, "end-of-text token", "tokens 0 to 262" }, { n, 3, 'a', "end-of-text token is 97, which is a single byte", "" },
        { n, 256, 0, "token 0 is empty", "" } // behind the header
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        memcpy(file, good, n);
        memcpy(file + 4 * cases[i].at, &cases[i].value, cases[i].at == 256 ? 1 : 4);
        expect_error(opened(write_file("t.bin", file, cases[i].bytes)), "t.bin", cases[i].says, cases[i].more);
    }
    memcpy(v.bytes[HE], "ll", 2);
    expect_refusal(vocabulary_write_bin(&v, EOT), "tokens 256 and 257 are the same bytes");
    v = small_vocabulary();
    strcpy(v.bytes['a'], "aa");
    v.length['a'] = 2;
    expect_refusal(vocabulary_write_bin(&v, EOT), "no token is the single byte 0x61");
}
