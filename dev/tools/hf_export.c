/*
hf_export CHECKPOINT_DIR OUT_DIR [--tokenizer bytes|FILE] [--dtype same|fp32|bf16|fp16] - makes a Hugging Face GPT-2
folder that transformers loads: config.json, model.safetensors with the matrices turned to (in, out) and the tied
embedding once, and the tokenizer's files if --tokenizer is given.
*/
#include "convert.h"
#include "../../llmc/data/tokenizer.h"

// The folder that is being written.
typedef struct {
    const char* path;
    char* temporary; // owned
} Export;

// Dies if something could not be written; the unfinished folder is removed when the process exits.
static void require_written(const Export* e, bool written, const char* file) {
    require(written, "%s/%s: cannot be written: %s; free disk space or choose another folder", e->path, file, strerror(errno));
}

static void write_file(const Export* e, const char* file, const char* text, size_t n) {
    char* path = format_string("%s/%s", e->temporary, file);
    require_written(e, file_write(path, text, n), file);
    free(path);
}

static void write_json(const Export* e, const char* file, json_t* object, size_t flags) {
    char* text = json_dumps(object, flags);
    require(text != NULL, "out of host memory while writing %s", file);
    write_file(e, file, text, strlen(text));
    free(text);
    json_decref(object);
}

// ---- config.json ----

static void write_config(const Export* e, GPT2Config c, DType dtype, int eot) {
    const char* dtype_in_torch = dtype == DTYPE_F32 ? "float32" : dtype == DTYPE_BF16 ? "bfloat16" : "float16";
    json_t* root = json_pack("{s:[s], s:s, s:s, s:f, s:b}", "architectures", "GPT2LMHeadModel", "model_type", "gpt2",
                             "activation_function", "gelu_new", "layer_norm_epsilon", 1e-5, "tie_word_embeddings", 1);
    json_t* shape = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i}", "n_embd", c.C, "n_head", c.NH, "n_layer", c.L,
                              "n_positions", c.max_T, "n_ctx", c.max_T, "vocab_size", c.V);
    // transformers before 5 reads torch_dtype, later ones dtype
    json_t* rest = json_pack("{s:i, s:i, s:s, s:s}", "bos_token_id", eot, "eos_token_id", eot,
                             "torch_dtype", dtype_in_torch, "dtype", dtype_in_torch);
    json_object_update(root, shape);
    json_object_update(root, rest);
    json_decref(shape);
    json_decref(rest);
    write_json(e, "config.json", root, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
}

// ---- model.safetensors ----

static void create_weights(const Export* e, SafeTensors* s, GPT2Config c, DType dtype) {
    SafeTensor* wanted = (SafeTensor*)xcalloc(checkpoint_tensor_count(c), sizeof(SafeTensor));
    int count = 0;
    for (int u = 0; u <= c.L; u++)
        for (int i = 0; i < unit_tensors(u); i++) {
            char name[64];
            size_t rows, cols;
            hf_name(u, i, name);
            hf_shape(c, u, i, &rows, &cols);
            wanted[count++] = safetensor_wanted(format_string(HF_PREFIX "%s", name), dtype, rows, cols);
        }
    json_t* metadata = json_pack("{s:s}", "format", "pt");
    char* path = format_string("%s/model.safetensors", e->temporary);
    require_written(e, safetensors_create(s, path, wanted, count, metadata), "model.safetensors");
    free(path);
    json_decref(metadata);
    checkpoint_free_wanted(wanted, count);
}

// Writes tensor i of unit u to `to`.
static void copy_tensor(const Export* e, CheckpointReader* r, SafeTensors* s, const SafeTensor* to, int u, int i) {
    TensorInfo t = unit_tensor(r->state.config, u, i);
    float* data = (float*)xcalloc(to->elements, sizeof(float));
    checkpoint_read_unit(r, CHECKPOINT_MODEL, u, t.offset, t.offset + to->elements, data);
    data = hf_turn(data, u, i, t.rows, t.cols);
    require_written(e, safetensors_write(s, to, 0, to->elements, data, DTYPE_F32), "model.safetensors");
    free(data);
}

static void write_weights(const Export* e, CheckpointReader* r, DType dtype) {
    SafeTensors s;
    create_weights(e, &s, r->state.config, dtype);
    const SafeTensor* to = s.tensors;
    for (int u = 0; u <= r->state.config.L; u++)
        for (int i = 0; i < unit_tensors(u); i++) copy_tensor(e, r, &s, to++, u, i);
    bool synced = safetensors_sync(&s), closed = safetensors_close(&s);
    require_written(e, synced && closed, "model.safetensors");
}

// ---- the tokenizer's files ----

// Writes byte tokens as a byte-level BPE without merges: token b is the character that stands for byte b in GPT-2's vocabulary.
static void write_byte_tokenizer(const Export* e) {
    int byte_of[BYTE_CHARACTERS], character_of[256];
    byte_characters(byte_of);
    for (int c = 0; c < BYTE_CHARACTERS; c++) if (byte_of[c] >= 0) character_of[byte_of[c]] = c;
    json_t* vocab = json_object();
    for (int b = 0; b < 256; b++) {
        int c = character_of[b];
        char text[3] = { (char)c, 0, 0 };
        if (c >= 0x80) { text[0] = (char)(0xC0 | c >> 6); text[1] = (char)(0x80 | (c & 0x3F)); }
        json_object_set_new(vocab, text, json_integer(b));
    }
    json_object_set_new(vocab, END_OF_TEXT, json_integer(256));
    write_json(e, "vocab.json", vocab, JSON_COMPACT);
    write_file(e, "merges.txt", "#version: 0.2\n", 14);
}

static void copy_file(const Export* e, const char* folder, const char* file) {
    char* path = format_string("%s/%s", folder, file);
    FileSource from = { path, "give a vocab.json with its merges.txt beside it" };
    size_t n;
    char* text = file_read(from, 1 << 28, &n);
    write_file(e, file, text, n);
    free(text);
    free(path);
}

// Writes vocab.json, merges.txt and tokenizer_config.json; returns the end-of-text token.
static int write_tokenizer(const Export* e, const char* spec, GPT2Config c) {
    Tokenizer t;
    tokenizer_open(&t, spec);
    require(t.vocab_size <= c.V, "--tokenizer %s has %d tokens, the model %d; give the one that it was trained with",
            spec, t.vocab_size, c.V);
    struct stat info;
    bool is_bytes = strcmp(spec, "bytes") == 0, is_folder = !is_bytes && stat(spec, &info) == 0 && S_ISDIR(info.st_mode);
    size_t n = strlen(spec);
    require(is_bytes || is_folder || (n >= 4 && strcmp(spec + n - 4, ".bin") != 0), "--tokenizer %s has no merges to export; "
            "give the vocab.json with its merges.txt beside it", spec);
    char* folder = is_folder ? xstrdup(spec) : path_parent(spec);
    if (is_bytes) write_byte_tokenizer(e);
    else { copy_file(e, folder, "vocab.json"); copy_file(e, folder, "merges.txt"); }
    write_json(e, "tokenizer_config.json",
               json_pack("{s:s, s:i, s:b, s:s, s:s, s:s}", "tokenizer_class", "GPT2Tokenizer", "model_max_length", c.max_T,
                         "add_prefix_space", 0, "bos_token", END_OF_TEXT, "eos_token", END_OF_TEXT, "unk_token", END_OF_TEXT),
               JSON_INDENT(2));
    int eot = t.eot;
    free(folder);
    tokenizer_free(&t);
    return eot;
}

int main(int argc, char** argv) {
    const char* tokenizer = "";
    int dtype_choice = 0;
    OptionTable table = options_table("hf_export", "make a Hugging Face GPT-2 folder from a checkpoint");
    option_text(&table, "tokenizer", &tokenizer, "bytes|FILE", "tokenizer whose files to add to the folder; '': none");
    option_choice(&table, "dtype", &dtype_choice, "same|fp32|bf16|fp16", "precision of the weights; same: as in the checkpoint");
    InOut io = parse_in_out(&table, "CHECKPOINT_DIR OUT_DIR", argc, argv);

    CheckpointReader r;
    checkpoint_open(&r, io.in);
    GPT2Config c = r.state.config;
    DType dtype = dtype_choice == 0 ? r.state.dtype : (DType)(DTYPE_F32 + dtype_choice - 1);
    char* out = path_trim(io.out);
    Export e = { out, folder_temporary(out) };
    require_written(&e, folder_begin(out), "");
    write_weights(&e, &r, dtype);
    checkpoint_close(&r); // verifies what was read, before the folder gets its name
    int eot = tokenizer[0] ? write_tokenizer(&e, tokenizer, c) : c.V - 1;
    write_config(&e, c, dtype, eot);
    require_written(&e, folder_publish(out), "");
    printf("%s: AutoModelForCausalLM.from_pretrained(\"%s\") loads it, in %s\n", out, out, dtype_name(dtype));
    free(e.temporary);
    free(out);
    return 0;
}
