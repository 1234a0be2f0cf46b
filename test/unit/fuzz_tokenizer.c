// fuzz_tokenizer.c - tests the readers of tokenizer files with hostile files, and the tokenizers they accept with hostile text.
// Input: a byte that says which, then parts that end with the byte 0x1F: vocab.json, merges.txt or a .bin, and text. A small
// valid part replaces one that is not given, so that mutation need not first find 256 tokens.
#include "fuzz.h"
#define CACHE_SLOTS 64
#include "../../llmc/data/tokenizer.h"

enum { VOCAB, MERGES, TEXT_ONLY, BIN, RAW, WAYS };
static char folder[] = "/dev/shm/fuzz_tokenizer_XXXXXX"; // in memory, because a disk would be too slow
static Tokenizer opened;
static void open_spec(void* spec) { tokenizer_open(&opened, spec); }

static void remove_folder(void) {
    if (chdir(folder) != 0) return;
    unlink("vocab.json");
    unlink("merges.txt");
    unlink("t.bin");
    rmdir(folder);
}

static void write_file(const char* name, const void* data, size_t n) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    if (fd < 0) abort();
    fuzz_fill(fd, data, n);
    close(fd);
}

// Writes a vocab.json: all single bytes, tokens of the merges below, and the end of text; `more`: further members of the object.
static void write_vocab(const uint8_t* more, size_t n) {
    static char text[1 << 17];
    char* out = text;
    int next = 256, id = 0;
    for (int b = 0; b < 256; b++) {
        int c = byte_is_printable(b) ? b : next++;
        out += sprintf(out, "%s\"", b ? "," : "{");
        if (c >= 0x80) out += sprintf(out, "%c%c", 0xC0 | c >> 6, 0x80 | (c & 0x3F));
        else out += sprintf(out, "%s%c", c == '"' || c == '\\' ? "\\" : "", c);
        out += sprintf(out, "\":%d", id++);
    }
    static const char* const merged[] = { "aa", "ab", "aab", "aaaa", "\xc3\xa9\xc3\xa9", "<|endoftext|>" };
    for (size_t i = 0; i < sizeof merged / sizeof *merged; i++) out += sprintf(out, ",\"%s\":%d", merged[i], id++);
    memcpy(out, more, n);
    out += n;
    *out++ = '}';
    write_file("vocab.json", text, (size_t)(out - text));
}

// Writes bytes and end of text as a .bin of 257 tokens. The first 16 bytes change header values; tokens are inserted between.
static void write_bin(const uint8_t* data, size_t left) {
    static uint8_t file[1 << 17];
    size_t n;
    int32_t header[256] = { TOKENIZER_MAGIC, TOKENIZER_VERSION, 257, 256 };
    const uint8_t* given = fuzz_take(&data, &left, 1, &n);
    header[2] += n ? *given : 0;
    given = fuzz_take(&data, &left, 16, &n);
    for (size_t i = 0; i < n; i++) ((uint8_t*)header)[i] ^= given[i];
    memcpy(file, header, sizeof header);
    uint8_t* out = file + sizeof header;
    for (int b = 0; b < 256; b++) {
        *out++ = 1;
        *out++ = (uint8_t)b;
    }
    *out++ = 13;
    out = (uint8_t*)stpcpy((char*)out, "<|endoftext|>");
    memcpy(out, data, left);
    write_file("t.bin", file, (size_t)(out + left - file));
}

static void encode_and_decode(const uint8_t* data, size_t n) {
    const char* text = (const char*)data;
    size_t count, at = 0;
    int* ids = tokenizer_encode(&opened, text, n, &count);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char* bytes = tokenizer_decode(&opened, ids[i], &length);
        if (ids[i] == opened.eot || length > n - at || memcmp(bytes, text + at, length) != 0) abort();
        at += length;
    }
    if (at != n) abort();
    free(ids);
}

// Takes the part up to 0x1F, or all that is left.
static const uint8_t* next_part(const uint8_t** data, size_t* left, size_t* n) {
    const uint8_t* end = *left ? memchr(*data, 0x1F, *left) : NULL;
    const uint8_t* part = fuzz_take(data, left, end ? (size_t)(end - *data) : *left, n);
    if (end) { ++*data; --*left; }
    return part;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t left) {
    static bool is_ready;
    if (!is_ready) {
        if (mkdtemp(folder) == NULL) abort();
        atexit(remove_folder);
        is_ready = true;
    }
    if (left == 0 || left > 1 << 16) return 0;
    int way = *data % WAYS;
    data++;
    left--;
    size_t n;
    const uint8_t* part = way == TEXT_ONLY ? data : next_part(&data, &left, &n);
    static const char merges[] = "#version: 0.2\na a\na b\na ab\naa b\naa aa\n\xc3\xa9 \xc3\xa9\n";
    if (way == VOCAB) write_vocab(part, n);
    else write_vocab((const uint8_t*)"", 0);
    if (way == MERGES) write_file("merges.txt", part, n);
    else write_file("merges.txt", merges, sizeof merges - 1);
    if (way == BIN) write_bin(part, n);
    if (way == RAW) write_file("t.bin", part, n);
    char spec[64];
    snprintf(spec, sizeof spec, "%s%s", folder, way == BIN || way == RAW ? "/t.bin" : "");
    bool lived = fuzz_reader(open_spec, spec);
    if (!lived && way == TEXT_ONLY) abort(); // the built-in files are valid
    if (lived) {
        encode_and_decode(data, left);
        tokenizer_free(&opened);
    }
    fuzz_done();
    return 0;
}
