/*
llmc_import MODEL.bin OUT_DIR - makes a checkpoint from a model file of llm.c.

The file: 256 int32 (magic, version, max_T, V, L, NH, C, padded V), then 16 tensors, each over all layers, (out, in) as
ours are. Version 3 holds fp32, version 5 bf16; the checkpoint keeps that precision.
*/
#include "convert.h"

#define LLMC_MODEL_MAGIC 20240326
#define LLMC_HEADER_BYTES (256 * sizeof(int32_t))

typedef struct {
    FileSource from;
    int fd;
    GPT2Config config; // Vp: rows of the file's token embedding, even if we would pad differently
    DType dtype;
    size_t place;      // byte offset of the next tensor
} LlmcModel;

static void open_model(LlmcModel* m, const char* path) {
    int32_t header[256];
    const FileSource from = m->from = (FileSource){ path, "give llm.c's model .bin, or copy it again" };
    size_t size;
    m->fd = file_open(from, O_RDONLY, &size);
    require_file(from, size >= sizeof header, "has %zu bytes, less than the %zu of a header", size, sizeof header);
    bool complete = pread_all(m->fd, header, sizeof header, 0);
    require_file(from, complete, "cannot be read: %s", errno ? strerror(errno) : "it shrank");
    require(header[0] == LLMC_MODEL_MAGIC,
            "%s: starts with %d where a model of llm.c has %d; give its model .bin, not its tokens", path, header[0], LLMC_MODEL_MAGIC);
    require(header[1] == 3 || header[1] == 5,
            "%s: has version %d; versions 3 (fp32) and 5 (bf16) can be read; write it again with a newer llm.c", path, header[1]);
    m->dtype = header[1] == 3 ? DTYPE_F32 : DTYPE_BF16;
    GPT2Config c = { header[2], header[3], header[7], header[4], header[5], header[6] };
    gpt2_check_config(c, path);
    require(c.Vp >= c.V && c.Vp <= 1 << 24, "%s: its vocabulary of %d is padded to %d", path, c.V, c.Vp);
    m->config = c;
    m->place = LLMC_HEADER_BYTES;
    size_t elements = 0;
    for (int u = 0; u <= c.L; u++) elements += unit_elements(c, u);
    size_t expected = LLMC_HEADER_BYTES + elements * dtype_size(m->dtype);
    require_file(from, size == expected, "has %zu bytes where its header's model needs %zu", size, expected);
}

// Reads the file's next tensor, which is tensor i of unit u.
static void copy_tensor(LlmcModel* m, CheckpointWriter* w, int u, int i) {
    TensorInfo t = unit_tensor(m->config, u, i);
    size_t n = tensor_elements(t), bytes = n * dtype_size(m->dtype);
    void* raw = xcalloc(bytes, 1);
    float* data = (float*)xcalloc(n, sizeof(float));
    require_file(m->from, pread_all(m->fd, raw, bytes, m->place), "cannot be read: %s", errno ? strerror(errno) : "it shrank");
    convert_dtype(data, DTYPE_F32, raw, m->dtype, n);
    free(raw);
    import_tensor(w, u, i, data, m->from, t.name);
    m->place += bytes;
}

int main(int argc, char** argv) {
    OptionTable table = options_table("llmc_import", "make a checkpoint from a model file of llm.c");
    const char *in, *out;
    parse_in_out(&table, "MODEL.bin OUT_DIR", argc, argv, &in, &out);
    LlmcModel m;
    open_model(&m, in);
    GPT2Config c = m.config;
    c.Vp = gpt2_padded_vocabulary(c.V);
    CheckpointWriter w;
    import_begin(&w, out, c, m.dtype);
    static const int block_order[BLOCK_TENSORS] = {
        LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB
    };
    copy_tensor(&m, &w, 0, WTE);
    copy_tensor(&m, &w, 0, WPE);
    for (int k = 0; k < BLOCK_TENSORS; k++)
        for (int u = 1; u <= c.L; u++) copy_tensor(&m, &w, u, block_order[k]);
    copy_tensor(&m, &w, 0, LNFW);
    copy_tensor(&m, &w, 0, LNFB);
    close(m.fd);
    import_finish(&w, out);
    return 0;
}
