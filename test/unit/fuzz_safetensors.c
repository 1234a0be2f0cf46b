/*
fuzz_safetensors.c - tests the readers of weights and of what describes them with hostile files.

The first byte says what the rest is: 's' the text of a state.json; 'h' the text of a safetensors header, a 0 and data, to
which the header's length is prepended; 'p' the same as the only shard of a checkpoint; 'i' the text of that shard's index;
else a whole safetensors file, all of whose tensors are read. The fuzzer does not see the branches inside the JSON library,
so mutations start from good inputs and recognise numbers.
*/
#include "fuzz.h"
#include "../../llmc/save/checkpoint.h"

// What was read.
static SafeTensors file;
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
    safetensors_open(&file, path, "");
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        if (safetensors_find(&file, t->name) != t) abort(); // two tensors of one name
        for (size_t done = 0, n; t->readable && done < t->elements; done += n) {
            n = size_min(t->elements - done, 1 << 12);
            safetensors_read(&file, t, done, n, values, i % 2 ? DTYPE_F32 : DTYPE_F16);
        }
    }
}

static void read_state(const char* text, size_t n) {
    uint64_t checksum[CHECKPOINT_PARTS];
    FileSource from = { "state.json", "" };
    train_state_parse(text, n, &json, &run_state, checksum, from);
    if (run_state.config.C % run_state.config.NH != 0 || run_state.seq_len > run_state.config.max_T) abort();
}

// A shard that was accepted must have every element.
static void read_shard(const char* path) {
    FileSource from = { path, "" };
    safetensors_open(&file, path, "");
    checkpoint_add_pieces(pieces, &sharded, tensors, num_tensors, &file, 0);
    checkpoint_sort_pieces(pieces);
    checkpoint_check_whole(pieces, tensors, num_tensors, from);
    for (size_t place = 0; place < gpt2_num_parameters(sharded.config); place++) {
        const CheckpointPiece* p = checkpoint_find_piece(&pieces[CHECKPOINT_MODEL], place);
        if (p == NULL || p->offset + (place - p->begin + 1) * sizeof(float) > file.file_size) abort();
    }
}

static void read_index(const char* text, size_t n) {
    FileSource from = { "index", "" };
    checkpoint_check_index(text, n, &json, made, from);
    if (!json_equal(json, made)) abort();
}

// Writes the file that the input stands for, in memory; returns its path.
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

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    Input input = { (const char*)data, make_file((const char*)data, size), size };
    if (fuzz_reader(read_input, &input)) {
        safetensors_close(&file);
        checkpoint_free_pieces(pieces);
        json_decref(json);
        free(run_state.options);
    }
    memset(&file, 0, sizeof file);
    memset(pieces, 0, sizeof pieces);
    json = NULL;
    run_state.options = NULL;
    fuzz_done();
    return 0;
}

// ---- mutations ----
#define SUM "\"0123456789abcdef\""
static const char good_file[] = "h{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[8,16]},\"c\":{\"dtype\":\"I64\",\"shape\":[1],"
    "\"data_offsets\":[16,24]}}\0" "24 bytes of their values";
static const char good_state[] =
    "s{\"format\":\"shard.c checkpoint\",\"version\":1,\"model\":{\"layers\":2,\"heads\":2,\"channels\":4,\"vocab_size\":10,"
    "\"max_seq_len\":4},\"dtype\":\"fp32\",\"has_optimizer\":true,\"step\":7,\"data\":{\"seed\":1,\"seq_len\":3,\"epoch\":0,"
    "\"position\":5},\"adamw_t\":6,\"loss_scale\":1.0,\"good_steps\":2,\"options\":{},\"checksums\":{\"model\":" SUM ",\"m\":" SUM
    ",\"v\":" SUM "},\"checksum_of_this\":" SUM "}";

// A model of 29 parameters, with one tensor in two pieces.
static const CheckpointRange good_ranges[] = { { 0, 0, 2 }, { 0, 2, 131 }, { 1, 0, 10 }, { 1, 10, 25 } };
enum { RANGES = sizeof good_ranges / sizeof good_ranges[0], SHARD_SIZE = 1 << 13 };
static char good_index[1 << 12];

// Writes a shard with these ranges into text (SHARD_SIZE), after a 'p'; returns its size. *weight_map: names and "a", owned.
static size_t make_shard(const CheckpointRange ranges[RANGES], char* text, json_t** weight_map) {
    SafeTensors shard;
    memset(&shard, 0, sizeof shard);
    shard.count = checkpoint_wanted(&sharded, CHECKPOINT_FILE_MODEL, ranges, RANGES, &shard.tensors);
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

// Writes that shard, or one with a cut moved, which leaves a hole or has something twice.
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

int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc;
    (void)argv;
    static char shard[SHARD_SIZE];
    GPT2Config config = { 1, 1, 128, 1, 1, 1 };
    json_set_alloc_funcs(fuzz_malloc, fuzz_free);
    json_t* weight_map;
    sharded.config = config; sharded.shards = 1;
    num_tensors = checkpoint_tensors(&sharded, CHECKPOINT_FILE_MODEL, &tensors);
    make_shard(good_ranges, shard, &weight_map);
    made = json_pack("{s:{s:i}, s:o}", "metadata", "total_size", 116, "weight_map", weight_map);
    char* text = json_dumps(made, JSON_COMPACT);
    snprintf(good_index, sizeof good_index, "i%s", text);
    free(text);
    fuzz_keep();
    return 0;
}

// Replaces a number in the text by one that is likely to be at some limit; returns the new size.
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
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned int seed) {
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
