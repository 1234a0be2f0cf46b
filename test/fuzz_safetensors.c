/*
fuzz_safetensors.c - libFuzzer's target for files of weights: whatever the bytes, a reader returns or dies with a message.

The first byte chooses: 's' the text of a state.json; 'h' the text of a safetensors header, a 0 and data, for which the
header's length is put in front; else a whole safetensors file, all of whose tensors are read. The JSON parser is a
library that tells the fuzzer nothing of its branches, so mutations start from good inputs and know a number when they
see one. die() calls exit(), which is wrapped (-Wl,--wrap=exit) to come back here; libFuzzer's own exits pass.
*/
#include "../llmc/checkpoint.h"
#include <setjmp.h>
#include <sys/mman.h>

static jmp_buf back;
static bool is_reading;

void __real_exit(int status) __attribute__((noreturn));
void __wrap_exit(int status) __attribute__((noreturn));
void __wrap_exit(int status) {
    if (is_reading) longjmp(back, 1);
    __real_exit(status);
}

// Outlive the jump, so that what a reader leaves when it dies is freed.
static SafeTensors file;
static json_t* json;
static TrainState run_state;

static void read_all_tensors(const char* path) {
    static float values[1 << 12];
    safetensors_open(&file, path, "");
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        if (safetensors_find(&file, t->name) != t) abort(); // two of a name
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

// The file that the input stands for, in memory; its path.
static const char* make_file(const char* input, size_t size) {
    static int fd = -1;
    static char path[64];
    if (fd < 0) fd = memfd_create("fuzz", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    uint64_t header = strnlen(input + 1, size - 1);
    size_t data = 1 + size_min(header + 1, size - 1);
    bool is_text = input[0] == 'h', made = ftruncate(fd, 0) == 0;
    if (!is_text) made = made && pwrite_all(fd, input + 1, size - 1, 0);
    else made = made && pwrite_all(fd, &header, 8, 0) && pwrite_all(fd, input + 1, header, 8)
                     && pwrite_all(fd, input + data, size - data, 8 + header);
    if (!made) abort();
    return path;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const char* path = make_file((const char*)data, size);
    is_reading = true;
    if (setjmp(back) == 0) {
        if (data[0] == 's') read_state((const char*)data + 1, size - 1);
        else read_all_tensors(path);
    }
    is_reading = false;
    safetensors_close(&file);
    json_decref(json);
    free(run_state.options);
    json = NULL;
    run_state.options = NULL;
    return 0;
}

// ---- mutations ----

#define SUM "\"0123456789abcdef\""
static const char good_file[] =
    "h{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[8,16]},\"c\":{\"dtype\":\"I64\",\"shape\":[1],"
    "\"data_offsets\":[16,24]}}\0" "24 bytes of their values";
static const char good_state[] =
    "s{\"format\":\"shard.c checkpoint\",\"version\":1,\"model\":{\"layers\":2,\"heads\":2,\"channels\":4,\"vocab_size\":10,"
    "\"max_seq_len\":4},\"dtype\":\"fp32\",\"has_optimizer\":true,\"step\":7,\"data\":{\"seed\":1,\"seq_len\":3,\"epoch\":0,"
    "\"position\":5},\"adamw_t\":6,\"loss_scale\":1.0,\"good_steps\":2,\"options\":{},\"checksums\":{\"model\":" SUM ",\"m\":" SUM
    ",\"v\":" SUM "},\"checksum_of_this\":" SUM "}";

// Replaces a number in the text by one that is likely to be at somebody's limit; the new size.
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
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned int seed);
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned int seed) {
    Philox random = philox(seed, 0, 0);
    bool is_state = random.x[0] % 2;
    const char* good = is_state ? good_state : good_file;
    size_t good_size = (is_state ? sizeof good_state : sizeof good_file) - 1;
    if ((size < 8 || random.x[1] % 64 == 0) && good_size <= limit) memcpy(data, good, size = good_size);
    if (size > 0 && random.x[2] % 2) return change_number((char*)data, size, limit, random.x[3]);
    return LLVMFuzzerMutate(data, size, limit);
}
