/*
hf_export CHECKPOINT_DIR OUT_DIR [--tokenizer bytes|FILE] [--dtype same|fp32|bf16|fp16] - makes a Hugging Face GPT-2
folder that transformers loads: config.json, model.safetensors with the matrices turned to (in, out) and the tied
embedding once, and the tokenizer's files if --tokenizer is given.
*/
#include "convert.h"
#include "../../llmc/data/tokenizer.h"

static char *out, *unfinished; // the folder, and where its files are until it is whole; owned

// Dies if a file of the folder could not be written; the unfinished folder is removed when the process exits.
static void require_written(bool written, const char* file) {
    require(written, "%s/%s: cannot be written: %s; free disk space or choose another folder", out, file, strerror(errno));
}

static void write_file(const char* file, const char* text, size_t n) {
    char* path = format_string("%s/%s", unfinished, file);
    require_written(file_write(path, text, n), file);
    free(path);
}

static void write_json(const char* file, json_t* object, size_t flags) {
    char* text = json_dumps(object, flags);
    require(text != NULL, "out of host memory while writing %s", file);
    write_file(file, text, strlen(text));
    free(text);
    json_decref(object);
}

static void write_config(GPT2Config c, DType dtype, int eot) {
    const char* in_torch = dtype == DTYPE_F32 ? "float32" : dtype == DTYPE_BF16 ? "bfloat16" : "float16";
    write_json("config.json", json_pack( // transformers before 5 reads torch_dtype, later ones dtype
        "{s:[s], s:s, s:s, s:f, s:b, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:s}", "architectures", "GPT2LMHeadModel",
        "model_type", "gpt2", "activation_function", "gelu_new", "layer_norm_epsilon", 1e-5, "tie_word_embeddings", 1,
        "n_embd", c.C, "n_head", c.NH, "n_layer", c.L, "n_positions", c.max_T, "n_ctx", c.max_T, "vocab_size", c.V,
        "bos_token_id", eot, "eos_token_id", eot, "torch_dtype", in_torch, "dtype", in_torch),
        JSON_INDENT(2) | JSON_REAL_PRECISION(6));
}

// ---- model.safetensors ----

static void write_weights(CheckpointReader* r, DType dtype) {
    SafeTensors s;
    int count = (int)checkpoint_tensor_count(r->state.config);
    SafeTensor* wanted = hf_tensors(r->state.config, dtype);
    json_t* metadata = json_pack("{s:s}", "format", "pt");
    char* path = format_string("%s/model.safetensors", unfinished);
    bool written = safetensors_create(&s, path, wanted, count, metadata);
    const SafeTensor* to = s.tensors;
    for (int u = 0; u <= r->state.config.L; u++)
        for (int i = 0; i < unit_tensors(u) && written; i++, to++) {
            TensorInfo t = unit_tensor(r->state.config, u, i);
            float* data = (float*)xcalloc(to->elements, sizeof(float));
            checkpoint_read_unit(r, CHECKPOINT_MODEL, u, t.offset, t.offset + to->elements, data);
            data = hf_turn(data, u, i, t.rows, t.cols);
            written = safetensors_write(&s, to, 0, to->elements, data, DTYPE_F32);
            free(data);
        }
    written = written && safetensors_sync(&s) && safetensors_close(&s);
    require_written(written, "model.safetensors");
    free(path);
    json_decref(metadata);
    checkpoint_free_wanted(wanted, count);
}

// ---- the tokenizer's files ----

// Writes byte tokens as a byte-level BPE without merges: token b is the character that stands for byte b in GPT-2's vocabulary.
static void write_byte_tokenizer(void) {
    json_t* vocab = json_object();
    for (int b = 0, next = 256; b < 256; b++) {
        int c = byte_is_printable(b) ? b : next++;
        char text[3] = { (char)c, 0, 0 };
        if (c >= 0x80) { text[0] = (char)(0xC0 | c >> 6); text[1] = (char)(0x80 | (c & 0x3F)); }
        json_object_set_new(vocab, text, json_integer(b));
    }
    json_object_set_new(vocab, END_OF_TEXT, json_integer(256));
    write_json("vocab.json", vocab, JSON_COMPACT);
    write_file("merges.txt", "#version: 0.2\n", 14);
}

static void copy_file(const char* folder, const char* file) {
    char* path = format_string("%s/%s", folder, file);
    FileSource from = { path, "give a vocab.json with its merges.txt beside it" };
    size_t n;
    char* text = file_read(from, 1 << 28, &n);
    write_file(file, text, n);
    free(text);
    free(path);
}

// Writes vocab.json, merges.txt and tokenizer_config.json; returns the end-of-text token.
static int write_tokenizer(const char* spec, GPT2Config c) {
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
    if (is_bytes) write_byte_tokenizer();
    else { copy_file(folder, "vocab.json"); copy_file(folder, "merges.txt"); }
    write_json("tokenizer_config.json",
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
    const char *in, *to;
    parse_in_out(&table, "CHECKPOINT_DIR OUT_DIR", argc, argv, &in, &to);

    CheckpointReader r;
    checkpoint_open(&r, in);
    GPT2Config c = r.state.config;
    DType dtype = dtype_choice == 0 ? r.state.dtype : (DType)(DTYPE_F32 + dtype_choice - 1);
    out = path_trim(to);
    unfinished = folder_temporary(out);
    require_written(folder_begin(out), "");
    write_weights(&r, dtype);
    checkpoint_close(&r); // verifies what was read, before the folder gets its name
    write_config(c, dtype, tokenizer[0] ? write_tokenizer(tokenizer, c) : c.V - 1);
    require_written(folder_publish(out), "");
    printf("%s: AutoModelForCausalLM.from_pretrained(\"%s\") loads it, in %s\n", out, out, dtype_name(dtype));
    free(unfinished);
    free(out);
    return 0;
}
