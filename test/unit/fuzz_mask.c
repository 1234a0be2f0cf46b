// fuzz_mask.c - tests the reader of masks with hostile files beside a sound token file. Input: a byte that is the number of
// tokens, a byte that says how, then the mask: either all of it, or what is wrong with a sound header (bytes that are added to
// its own by exclusive or) and the bits, whose checksum and number the header then has.
#include "fuzz.h"
#include "../../llmc/data/mask.h"

static FuzzFile token_file, mask_file;
static TokenFile tokens;
static TokenMask mask;
static void open_files(void* unused) {
    (void)unused;
    tokens = token_file_open(token_file.path);
    file_begins_with(mask_source(mask_file.path), MASK_MAGIC, 8);
    mask = mask_open(mask_file.path, &tokens);
}

static void fill_tokens(size_t count) {
    static uint8_t file[TOKENS_HEADER_BYTES + 255 * sizeof(uint16_t)];
    int32_t header[TOKENS_HEADER_INTS] = { TOKENS_MAGIC, TOKENS_VERSION, (int32_t)count };
    memcpy(file, header, sizeof header);
    for (size_t i = 0; i < count; i++) file[sizeof header + 2 * i] = (uint8_t)(37 * i);
    fuzz_fill(token_file.fd, file, sizeof header + count * sizeof(uint16_t));
}
static void fill_mask(const uint8_t* data, size_t left, size_t count) {
    size_t n;
    bool is_whole = left > 0 && *fuzz_take(&data, &left, 1, &n) % 2 == 0;
    if (is_whole) { fuzz_fill(mask_file.fd, data, left); return; }
    const uint8_t* wrong = fuzz_take(&data, &left, MASK_HEADER_BYTES, &n);
    uint64_t header[MASK_HEADER_WORDS] = { 0, count, 0, checksum_elements(data, 1, left, 0) };
    memcpy(header, MASK_MAGIC, 8);
    for (size_t i = 0; i < left; i++) header[MASK_HEADER_COUNTED] += (uint64_t)__builtin_popcount(data[i]);
    if (!mask_sample(token_file.fd, count, &header[MASK_HEADER_SAMPLE])) abort();
    fuzz_fill_behind(mask_file.fd, header, sizeof header, wrong, n, data, left);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (token_file.fd == 0) { token_file = fuzz_file(); mask_file = fuzz_file(); }
    size_t n, count = size > 0 ? *fuzz_take(&data, &size, 1, &n) : 0;
    fill_tokens(count);
    fill_mask(data, size, count);
    if (fuzz_reader(open_files, NULL)) {
        if (mask.count != count || mask_count(&mask, 0, count) != mask.counted) abort();
        size_t counted = 0; // one by one, and from every token to the end
        for (size_t i = count; i-- > 0;) {
            counted += mask_bit(&mask, i);
            if (mask_count(&mask, i, count - i) != counted) abort();
        }
        mask_close(&mask); token_file_close(&tokens);
    }
    fuzz_done();
    return 0;
}
