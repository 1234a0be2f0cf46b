// fuzz_tokens.c - hostile token files. Input: a byte that says how, then the file itself, or a header's values and its data.
#include "fuzz.h"
#include "../../llmc/data/tokens.h"

static TokenFile opened;
static void open_file(void* path) {
    FileSource from = { path, "" };
    file_begins_with(from, "magic", 4);
    opened = token_file_open(path);
}

static void fill(int fd, const uint8_t* data, size_t left) {
    size_t n;
    bool is_whole = left > 0 && *fuzz_take(&data, &left, 1, &n) % 2 == 0;
    if (is_whole) { fuzz_fill(fd, data, left); return; }
    int32_t header[TOKENS_HEADER_INTS] = { TOKENS_MAGIC, TOKENS_VERSION };
    const uint8_t* wrong = fuzz_take(&data, &left, 12, &n);
    fuzz_fill_behind(fd, header, sizeof header, wrong, n, data, left);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static FuzzFile file;
    if (file.fd == 0) file = fuzz_file();
    fill(file.fd, data, size);
    if (fuzz_reader(open_file, file.path)) {
        uint16_t* tokens = xcalloc(opened.count, sizeof *tokens);
        token_file_read(&opened, 0, opened.count, tokens);
        for (size_t i = 0; i < opened.count; i++) {
            uint16_t one;
            token_file_read(&opened, i, 1, &one);
            if (one != tokens[i]) abort();
        }
        free(tokens); token_file_close(&opened);
    }
    fuzz_done();
    return 0;
}
