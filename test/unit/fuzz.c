/*
fuzz.c - hostile input for the readers of files, with clang's libFuzzer and its sanitizers. FUZZ_TARGET=NAME
build/test/fuzz [OPTION...] [CORPUS...] gives it to the reader of that name (`targets`, at the end);
test/tools/test_fuzz.py runs them all.

A reader that dies with a message has done its work; this is no crash. die() ends in exit(), which the linker redirects
here (-Wl,--wrap=exit). Inside fuzz_reader(), exit() jumps back, frees the reader's memory and closes its files, so that
millions of deaths fit in one process. Anywhere else in a target, exit() is an error that the fuzzer reports.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define CACHE_SLOTS 64 // of the tokenizer
#include <fcntl.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// ---- memory: a list of all allocations ----
typedef struct FuzzPiece { struct FuzzPiece *previous, *next; } FuzzPiece; // directly before the memory itself
static FuzzPiece fuzz_pieces = { &fuzz_pieces, &fuzz_pieces };

static void* fuzz_realloc(void* old, size_t bytes) {
    FuzzPiece* p = old ? (FuzzPiece*)old - 1 : NULL;
    if (p) { p->previous->next = p->next; p->next->previous = p->previous; }
    if (bytes > SIZE_MAX - sizeof *p) abort();
    FuzzPiece* moved = realloc(p, sizeof *p + bytes);
    if (moved == NULL) abort();
    moved->previous = &fuzz_pieces; moved->next = fuzz_pieces.next;
    moved->previous->next = moved->next->previous = moved;
    return moved + 1;
}
static void* fuzz_malloc(size_t bytes) { return fuzz_realloc(NULL, bytes); }
static void* fuzz_calloc(size_t n, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) abort();
    return memset(fuzz_malloc(bytes), 0, bytes);
}
static void fuzz_free(void* memory) {
    if (memory == NULL) return;
    FuzzPiece* p = (FuzzPiece*)memory - 1;
    p->previous->next = p->next; p->next->previous = p->previous;
    free(p);
}
static int fuzz_vasprintf(char** out, const char* format, va_list args) {
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, again);
    va_end(again);
    *out = fuzz_malloc((size_t)n + 1);
    return vsnprintf(*out, (size_t)n + 1, format, args);
}
// From here on the code under test uses these.
#define malloc fuzz_malloc
#define calloc fuzz_calloc
#define realloc fuzz_realloc
#define free fuzz_free
#define vasprintf fuzz_vasprintf
#include "../../llmc/data/mask.h"
#include "../../llmc/data/tokenizer.h"
#include "../../llmc/data/tokens.h"
#include "../../llmc/save/checkpoint.h"

// Current allocations outlive any reader that dies.
static void fuzz_keep(void) { fuzz_pieces.next = fuzz_pieces.previous = &fuzz_pieces; }

// ---- death ----
__attribute__((noreturn)) void __real_exit(int status);
static jmp_buf fuzz_back;
static enum { FUZZ_OUTSIDE, FUZZ_READER, FUZZ_AFTER } fuzz_where;

__attribute__((noreturn)) void __wrap_exit(int status) {
    if (fuzz_where == FUZZ_READER) longjmp(fuzz_back, 1);
    if (fuzz_where == FUZZ_AFTER) abort(); // input that the reader accepted must not fail later
    __real_exit(status);
}

// Runs the reader on its argument. Returns false if it died; its memory and files are then released.
static bool fuzz_reader(void (*reader)(void*), void* argument) {
    json_set_alloc_funcs(fuzz_malloc, fuzz_free);
    int first_free = dup(0); // file descriptors from this one on are the reader's
    close(first_free);
    bool lived = setjmp(fuzz_back) == 0;
    fuzz_where = FUZZ_READER;
    if (lived) reader(argument);
    fuzz_where = FUZZ_AFTER;
    if (lived) return true;
    while (fuzz_pieces.next != &fuzz_pieces) fuzz_free(fuzz_pieces.next + 1);
    for (int fd = first_free; fd < first_free + 8; fd++) close(fd);
    return false;
}

// Call when the target has freed what it read: aborts if any memory is left.
static void fuzz_done(void) {
    if (fuzz_pieces.next != &fuzz_pieces) abort();
    fuzz_where = FUZZ_OUTSIDE;
}

// ---- input ----
// Takes up to `most` bytes of the input.
static const uint8_t* fuzz_take(const uint8_t** data, size_t* left, size_t most, size_t* n) {
    const uint8_t* here = *data;
    *n = most < *left ? most : *left;
    *data += *n;
    *left -= *n;
    return here;
}

// A file in memory and its path.
typedef struct { int fd; char path[32]; } FuzzFile;
static FuzzFile fuzz_file(void) {
    FuzzFile f;
    f.fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (f.fd < 0) abort();
    snprintf(f.path, sizeof f.path, "/proc/self/fd/%d", f.fd);
    return f;
}
static void fuzz_fill(int fd, const void* data, size_t n) {
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n) abort();
}
// Fills the file with a valid header of n bytes, into which `wrong` is XORed, and with the data after it.
static void fuzz_fill_behind(int fd, void* header, size_t n, const uint8_t* wrong, size_t num_wrong,
                             const uint8_t* data, size_t left) {
    for (size_t i = 0; i < num_wrong; i++) ((uint8_t*)header)[i] ^= wrong[i];
    fuzz_fill(fd, header, n);
    if (pwrite(fd, data, left, (off_t)n) != (ssize_t)left) abort();
}

// ---- token files: a byte that selects the form, then the whole file, or changes to a valid header and the data ----
static TokenFile token_file;
static void open_tokens(void* path) {
    FileSource from = { path, "" };
    file_begins_with(from, "magic", 4);
    token_file = token_file_open(path);
}

static void fill_tokens(int fd, const uint8_t* data, size_t left) {
    size_t n;
    bool is_whole = left > 0 && *fuzz_take(&data, &left, 1, &n) % 2 == 0;
    if (is_whole) { fuzz_fill(fd, data, left); return; }
    int32_t header[TOKENS_HEADER_INTS] = { TOKENS_MAGIC, TOKENS_VERSION };
    const uint8_t* wrong = fuzz_take(&data, &left, 12, &n);
    fuzz_fill_behind(fd, header, sizeof header, wrong, n, data, left);
}

static void fuzz_tokens(const uint8_t* data, size_t size) {
    static FuzzFile file;
    if (file.fd == 0) file = fuzz_file();
    fill_tokens(file.fd, data, size);
    if (fuzz_reader(open_tokens, file.path)) {
        uint16_t* tokens = xcalloc(token_file.count, sizeof *tokens);
        token_file_read(&token_file, 0, token_file.count, tokens);
        for (size_t i = 0; i < token_file.count; i++) {
            uint16_t one;
            token_file_read(&token_file, i, 1, &one);
            if (one != tokens[i]) abort();
        }
        free(tokens); token_file_close(&token_file);
    }
}

// ---- masks of a valid token file ----
// A byte gives the number of tokens, and the next one selects the form of the rest: the whole mask, or the bits after
// changes to a valid header, which are XORed into it. That header contains the checksum and the number of these bits.
static FuzzFile beside, mask_file;
static TokenMask mask;
static void open_mask(void* unused) {
    (void)unused;
    token_file = token_file_open(beside.path);
    file_begins_with(mask_source(mask_file.path), MASK_MAGIC, 8);
    mask = mask_open(mask_file.path, &token_file);
}

static void fill_beside(size_t count) {
    static uint8_t file[TOKENS_HEADER_BYTES + 255 * sizeof(uint16_t)];
    int32_t header[TOKENS_HEADER_INTS] = { TOKENS_MAGIC, TOKENS_VERSION, (int32_t)count };
    memcpy(file, header, sizeof header);
    for (size_t i = 0; i < count; i++) file[sizeof header + 2 * i] = (uint8_t)(37 * i);
    fuzz_fill(beside.fd, file, sizeof header + count * sizeof(uint16_t));
}
static void fill_mask(const uint8_t* data, size_t left, size_t count) {
    size_t n;
    bool is_whole = left > 0 && *fuzz_take(&data, &left, 1, &n) % 2 == 0;
    if (is_whole) { fuzz_fill(mask_file.fd, data, left); return; }
    const uint8_t* wrong = fuzz_take(&data, &left, MASK_HEADER_BYTES, &n);
    uint64_t header[MASK_HEADER_WORDS] = { 0, count, 0, checksum_elements(data, 1, left, 0) };
    memcpy(header, MASK_MAGIC, 8);
    for (size_t i = 0; i < left; i++) header[MASK_HEADER_COUNTED] += (uint64_t)__builtin_popcount(data[i]);
    if (!tokens_sample(beside.fd, NULL, count, 0, &header[MASK_HEADER_SAMPLE])) abort();
    fuzz_fill_behind(mask_file.fd, header, sizeof header, wrong, n, data, left);
}

static void fuzz_mask(const uint8_t* data, size_t size) {
    if (beside.fd == 0) { beside = fuzz_file(); mask_file = fuzz_file(); }
    size_t n, count = size > 0 ? *fuzz_take(&data, &size, 1, &n) : 0;
    fill_beside(count);
    fill_mask(data, size, count);
    if (fuzz_reader(open_mask, NULL)) {
        if (mask.count != count || mask_count(&mask, 0, count) != mask.counted) abort();
        size_t counted = 0; // one by one, and from every token to the end
        for (size_t i = count; i-- > 0;) {
            counted += mask_bit(&mask, i);
            if (mask_count(&mask, i, count - i) != counted) abort();
        }
        mask_close(&mask); token_file_close(&token_file);
    }
}

// ---- tokenizer files, and hostile text for the tokenizers that are accepted ----
// A byte selects the files, then come parts that end with the byte 0x1F: vocab.json, merges.txt or a .bin, and text. A
// small valid part replaces a missing one, so that mutations need not find 256 tokens first.
enum { VOCAB, MERGES, TEXT_ONLY, BIN, RAW, WAYS };
static char folder[] = "/dev/shm/fuzz_tokenizer_XXXXXX"; // in memory, because a disk is too slow
static Tokenizer tokenizer;
static void open_spec(void* spec) { tokenizer_open(&tokenizer, spec); }

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

// Writes a vocab.json with all single bytes, the tokens of the merges below, and the end of text. `more`: further members.
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

// Writes a .bin of all bytes, the end of text, and the tokens in `data`. The first byte says how many tokens it claims
// beyond 257; the next 16 bytes are XORed into the header.
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
    int* ids = tokenizer_encode(&tokenizer, text, n, &count);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char* bytes = tokenizer_decode(&tokenizer, ids[i], &length);
        if (ids[i] == tokenizer.eot || length > n - at || memcmp(bytes, text + at, length) != 0) abort();
        at += length;
    }
    if (at != n) abort();
    free(ids);
}

// Takes the part up to 0x1F, or the rest.
static const uint8_t* next_part(const uint8_t** data, size_t* left, size_t* n) {
    const uint8_t* end = *left ? memchr(*data, 0x1F, *left) : NULL;
    const uint8_t* part = fuzz_take(data, left, end ? (size_t)(end - *data) : *left, n);
    if (end) { ++*data; --*left; }
    return part;
}

static void fuzz_tokenizer(const uint8_t* data, size_t left) {
    static bool is_ready;
    if (!is_ready) {
        if (mkdtemp(folder) == NULL) abort();
        atexit(remove_folder);
        is_ready = true;
    }
    if (left == 0 || left > 1 << 16) return;
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
        tokenizer_free(&tokenizer);
    }
}

// ---- weights and their descriptions ----
// The first byte gives the kind of the rest:
//   s         the text of a state.json
//   h         the text of a safetensors header, a 0 and data; the header's length is prepended
//   p         the same, as the only shard of a checkpoint
//   i         the text of that shard's index
//   any other a whole safetensors file, all of whose tensors are read
// The fuzzer does not see the branches inside the JSON library, so mutations start from valid inputs and recognise numbers.

static SafeTensors weights; // these are filled by the readers
static json_t* json;
static TrainState run_state;
static CheckpointPieces pieces[CHECKPOINT_PARTS];

// The checkpoint that a shard belongs to, and the index of its only shard.
static TrainState sharded;
static CheckpointTensor* tensors;
static int num_tensors;
static json_t* made;

static void read_all_tensors(const char* path) {
    static float values[1 << 12];
    safetensors_open(&weights, path, "");
    for (int i = 0; i < weights.count; i++) {
        const SafeTensor* t = &weights.tensors[i];
        if (safetensors_find(&weights, t->name) != t) abort(); // two tensors of one name
        for (size_t done = 0, n; t->readable && done < t->elements; done += n) {
            n = size_min(t->elements - done, 1 << 12);
            safetensors_read(&weights, t, done, n, values, i % 2 ? DTYPE_F32 : DTYPE_F16);
        }
    }
}

static void read_state(const char* text, size_t n) {
    uint64_t checksum[CHECKPOINT_PARTS];
    FileSource from = { "state.json", "" };
    train_state_parse(text, n, &json, &run_state, checksum, from);
    if (run_state.config.C % run_state.config.NH != 0 || run_state.seq_len > run_state.config.max_T) abort();
}

// An accepted shard must contain every element.
static void read_shard(const char* path) {
    FileSource from = { path, "" };
    safetensors_open(&weights, path, "");
    checkpoint_add_pieces(pieces, &sharded, tensors, num_tensors, &weights, 0);
    checkpoint_sort_pieces(pieces);
    checkpoint_check_whole(pieces, tensors, num_tensors, from);
    for (const CheckpointTensor* t = tensors; t < tensors + num_tensors; t++)
        for (size_t place = t->begin; place < t->end; place++) {
            const CheckpointPiece* p = checkpoint_find_piece(&pieces[t->part], place);
            if (p == NULL || p->offset + (place - p->begin + 1) * sizeof(float) > weights.file_size) abort();
        }
}

static void read_index(const char* text, size_t n) {
    FileSource from = { "index", "" };
    checkpoint_check_index(text, n, &json, made, from);
    if (!json_equal(json, made)) abort();
}

// Writes the input's file into memory; returns its path.
static const char* make_file(const char* input, size_t size) {
    static FuzzFile made_file;
    if (made_file.fd == 0) made_file = fuzz_file();
    uint64_t header = strnlen(input + 1, size - 1);
    size_t data = 1 + size_min(header + 1, size - 1);
    bool has_header = input[0] == 'h' || input[0] == 'p', filled = true;
    if (has_header) fuzz_fill(made_file.fd, &header, 8);
    else fuzz_fill(made_file.fd, input + 1, size - 1);
    if (has_header) filled = pwrite_all(made_file.fd, input + 1, header, 8)
                          && pwrite_all(made_file.fd, input + data, size - data, 8 + header);
    if (!filled) abort();
    return made_file.path;
}

typedef struct { const char *bytes, *path; size_t size; } Input;
static void read_input(void* argument) {
    const Input* input = argument;
    char kind = input->bytes[0];
    if (kind == 's') read_state(input->bytes + 1, input->size - 1);
    else if (kind == 'i') read_index(input->bytes + 1, input->size - 1);
    else if (kind == 'p') read_shard(input->path);
    else read_all_tensors(input->path);
}

static bool accepts(const char* data, size_t size) {
    Input input = { data, make_file(data, size), size };
    bool lived = fuzz_reader(read_input, &input);
    if (lived) {
        safetensors_close(&weights);
        checkpoint_free_pieces(pieces);
        json_decref(json);
        free(run_state.options);
    }
    memset(&weights, 0, sizeof weights);
    memset(pieces, 0, sizeof pieces);
    json = NULL;
    run_state.options = NULL;
    return lived;
}
static void fuzz_safetensors(const uint8_t* data, size_t size) { if (size > 0) accepts((const char*)data, size); }

// ---- mutations ----
#define SUM "\"0123456789abcdef\""
static const char good_file[] = "h{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[8,16]},\"c\":{\"dtype\":\"I64\",\"shape\":[1],"
    "\"data_offsets\":[16,24]}}\0" "24 bytes of their values";
static const char good_state[] =
    "s{\"format\":\"shard.c checkpoint\",\"version\":1,\"model\":{\"layers\":2,\"heads\":2,\"channels\":4,\"vocab_size\":10,"
    "\"max_seq_len\":4},\"dtype\":\"fp32\",\"has_optimizer\":true,\"step\":7,\"data\":{\"seed\":1,\"seq_len\":3,\"epoch\":0,"
    "\"position\":5},\"adamw_t\":6,\"loss_scale\":1.0,\"good_steps\":2,\"options\":{},\"checksums\":{\"model\":" SUM ",\"m\":" SUM
    ",\"v\":" SUM ",\"momentum\":" SUM "},\"optimizer\":\"Muon\",\"checksum_of_this\":" SUM "}";

// Muon's state of a model of 29 parameters, 12 of them in matrices; one of these is in two pieces.
static const CheckpointRange good_ranges[] = { { 0, 0, 131 }, { 1, 0, 7 }, { 1, 7, 10 }, { 2, 0, 15 } };
enum { RANGES = sizeof good_ranges / sizeof good_ranges[0], SHARD_SIZE = 1 << 13 };
static char good_index[1 << 12];

// Writes a shard with these ranges into text (SHARD_SIZE), after a 'p'; returns its size. *weight_map: names and "a", owned.
static size_t make_shard(const CheckpointRange ranges[RANGES], char* text, json_t** weight_map) {
    SafeTensors shard;
    memset(&shard, 0, sizeof shard);
    shard.count = checkpoint_wanted(&sharded, CHECKPOINT_FILE_OPTIMIZER, ranges, RANGES, &shard.tensors);
    json_t *metadata = json_object(), *header = safetensors_make_header(&shard, metadata);
    char* json_text = json_dumps(header, JSON_COMPACT);
    memset(text, 0, SHARD_SIZE);
    size_t size = (size_t)snprintf(text, SHARD_SIZE, "p%s", json_text) + 1;
    if (shard.count > 0) size += shard.tensors[shard.count - 1].end;
    *weight_map = json_object();
    for (int i = 0; i < shard.count; i++) json_object_set_new(*weight_map, shard.tensors[i].name, json_string("a"));
    free(json_text);
    checkpoint_free_wanted(shard.tensors, shard.count);
    json_decref(header); json_decref(metadata);
    return size;
}

// Writes that shard, or moves one of its cuts, which leaves a hole or repeats elements.
static size_t make_any_shard(Philox random, char* text) {
    CheckpointRange ranges[RANGES];
    memcpy(ranges, good_ranges, sizeof ranges);
    CheckpointRange* r = &ranges[random.x[1] % RANGES];
    size_t* cut = random.x[2] % 2 ? &r->begin : &r->end;
    if (random.x[3] % 2) *cut = random.x[3] / 2 % 27;
    json_t* weight_map;
    size_t size = make_shard(ranges, text, &weight_map);
    json_decref(weight_map);
    return size;
}

static void prepare_safetensors(void) {
    static char shard[SHARD_SIZE];
    GPT2Config config = { 1, 1, 128, 1, 1, 1 };
    json_set_alloc_funcs(fuzz_malloc, fuzz_free);
    json_t* weight_map;
    sharded.config = config; sharded.shards = 1; sharded.has_optimizer = sharded.is_muon = true;
    num_tensors = checkpoint_tensors(&sharded, CHECKPOINT_FILE_OPTIMIZER, &tensors);
    size_t size = make_shard(good_ranges, shard, &weight_map);
    made = json_pack("{s:{s:i}, s:o}", "metadata", "total_size", 184, "weight_map", weight_map);
    char* text = json_dumps(made, JSON_COMPACT);
    snprintf(good_index, sizeof good_index, "i%s", text);
    free(text);
    fuzz_keep();
    require(accepts(shard, size) && accepts(good_index, strlen(good_index)), "what mutations start from is refused");
    fuzz_done();
}

// Replaces a number in the text by one that is probably at some limit; returns the new size.
static size_t change_number(char* text, size_t size, size_t limit, uint32_t chosen) {
    static const char* const numbers[] = { "0", "1", "2", "3", "4", "8", "12", "16", "24", "-1", "0.5", "4294967296",
                                           "2305843009213693952", "4611686018427387904", "9223372036854775807" };
    const char* number = numbers[chosen % (sizeof numbers / sizeof numbers[0])];
    size_t begin = chosen % size, end, n = strlen(number);
    while (begin < size && !isdigit((unsigned char)text[begin])) begin++;
    for (end = begin; end < size && isdigit((unsigned char)text[end]); end++) { }
    if (begin == end || size - (end - begin) + n > limit) return size;
    memmove(text + begin + n, text + end, size - end);
    memcpy(text + begin, number, n);
    return size - (end - begin) + n;
}

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t limit);
static size_t mutate_safetensors(uint8_t* data, size_t size, size_t limit, unsigned int seed) {
    Philox random = philox(seed, 0, 0);
    static char shard[SHARD_SIZE];
    const char* const goods[] = { good_file, good_state, good_index, shard };
    size_t sizes[] = { sizeof good_file - 1, sizeof good_state - 1, strlen(good_index), 0 };
    int chosen = (int)(random.x[0] % 4);
    bool starts = size < 8 || random.x[1] % 64 == 0;
    if (starts && chosen == 3) sizes[3] = make_any_shard(philox(seed, 1, 0), shard);
    if (starts && sizes[chosen] <= limit) memcpy(data, goods[chosen], size = sizes[chosen]);
    if (starts && chosen == 3) return size; // unchanged, because most changes break its JSON
    if (size > 0 && random.x[2] % 2) return change_number((char*)data, size, limit, random.x[3]);
    return LLVMFuzzerMutate(data, size, limit);
}

// ---- the program ----
static const struct {
    const char* name;
    void (*run)(const uint8_t* data, size_t size);
    void (*prepare)(void); // or NULL
    size_t (*mutate)(uint8_t* data, size_t size, size_t limit, unsigned int seed); // NULL: as the fuzzer does
} targets[] = {
    { "tokens", fuzz_tokens, NULL, NULL },
    { "mask", fuzz_mask, NULL, NULL },
    { "tokenizer", fuzz_tokenizer, NULL, NULL },
    { "safetensors", fuzz_safetensors, prepare_safetensors, mutate_safetensors },
};
enum { TARGETS = sizeof targets / sizeof *targets };
static int target; // its index

int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc; (void)argv;
    const char* name = getenv("FUZZ_TARGET");
    while (target < TARGETS && (name == NULL || strcmp(name, targets[target].name) != 0)) target++;
    require(target < TARGETS, "FUZZ_TARGET must name a reader, not be '%s'", name ? name : "");
    if (targets[target].prepare) targets[target].prepare();
    return 0;
}
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    targets[target].run(data, size);
    fuzz_done();
    return 0;
}
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned int seed) {
    if (targets[target].mutate) return targets[target].mutate(data, size, limit, seed);
    return LLVMFuzzerMutate(data, size, limit);
}
