/*
convert - four programs, which make checkpoints of others' files, others' files of checkpoints, and check them:

    hf_import HF_DIR OUT_DIR            of Hugging Face's GPT-2: config.json, model.safetensors
    llmc_import MODEL.bin OUT_DIR       of a model file of llm.c, version 3 (fp32) or 5 (bf16): 256 int32, then 16 tensors over all layers
    hf_export CHECKPOINT_DIR OUT_DIR    a folder that transformers loads; [--dtype same|fp32|bf16|fp16] is the weights' precision, and
                                        [--tokenizer same|bytes|FILE] adds the tokenizer's files; same: the run's own
    verify CHECKPOINT_DIR               reads all of a checkpoint, and compares it with its checksums

An import keeps the file's precision, fp32 if it has several. An error names what our GPT-2 does not support: another activation,
epsilon or inner width, untied embeddings, quantised weights, tensors that have no place in it.
*/
#include "../../llmc/save/errors_file.h"
#include "../../llmc/base/options.h"
#include "../../llmc/data/tokenizer.h"

#define HF_PREFIX "transformer." // begins the names in a model with a language-modelling head; a bare GPT2Model has no prefix
#define COPY_AGAIN "save it again with save_pretrained(), or download it again"
#define LLMC_MODEL_MAGIC 20240326

// Our tensors in the order of llm.c's files, and what Hugging Face calls them.
static const struct { int unit, tensor; const char* hf; } theirs[] = { // unit: the first that has such a tensor
    { 0, WTE, "wte.weight" }, { 0, WPE, "wpe.weight" }, { 1, LN1W, "ln_1.weight" }, { 1, LN1B, "ln_1.bias" },
    { 1, QKVW, "attn.c_attn.weight" }, { 1, QKVB, "attn.c_attn.bias" },
    { 1, PROJW, "attn.c_proj.weight" }, { 1, PROJB, "attn.c_proj.bias" },
    { 2, LN2W, "ln_2.weight" }, { 2, LN2B, "ln_2.bias" }, { 2, FCW, "mlp.c_fc.weight" }, { 2, FCB, "mlp.c_fc.bias" },
    { 2, FCPROJW, "mlp.c_proj.weight" }, { 2, FCPROJB, "mlp.c_proj.bias" },
    { 0, LNFW, "ln_f.weight" }, { 0, LNFB, "ln_f.bias" }
};

// Hugging Face keeps the Conv1D of OpenAI's code: matrices of blocks are (in, out), where ours and llm.c's are (out, in).
static bool hf_turns(int u, TensorInfo t) { return u > 0 && t.cols > 0; }

// Lists our tensors, in our order, as a file of theirs has them; the caller frees the list with checkpoint_free_wanted. In llm.c's
// they follow each other in its order, from byte *place on, which is moved to their end.
static SafeTensor* their_tensors(GPT2Config c, DType dtype, bool is_hf, size_t* place) {
    SafeTensor* list = (SafeTensor*)xcalloc(checkpoint_tensor_count(c), sizeof(SafeTensor));
    for (size_t k = 0; k < sizeof theirs / sizeof theirs[0]; k++)
        for (int i = theirs[k].tensor, u = theirs[k].unit; u < (theirs[k].unit ? gpt2_num_units(c) : 1); u += 2) {
            TensorInfo t = unit_tensor(c, u, i);
            bool turned = is_hf && hf_turns(u, t);
            char* name = !is_hf ? xstrdup(t.name) : u == 0 ? format_string(HF_PREFIX "%s", theirs[k].hf)
                       : format_string(HF_PREFIX "h.%d.%s", unit_block(u), theirs[k].hf);
            SafeTensor* its = &list[u == 0 ? i : ROOT_TENSORS + (u - 1) * MAX_TENSORS + i];
            *its = safetensor_wanted(name, dtype, turned ? t.cols : t.stored_rows, turned ? t.stored_rows : t.cols);
            its->begin = *place;
            *place += tensor_elements(t) * dtype_size(dtype);
        }
    return list;
}

// A matrix's data (rows, cols) turned, in tiles that fit the cache. Takes the place of data.
static float* turn(float* data, size_t rows, size_t cols) {
    const size_t tile = 32;
    float* turned = (float*)xcalloc(rows * cols, sizeof(float));
    for (size_t r0 = 0; r0 < rows; r0 += tile)
        for (size_t c0 = 0; c0 < cols; c0 += tile)
            for (size_t r = r0; r < size_min(r0 + tile, rows); r++)
                for (size_t c = c0; c < size_min(c0 + tile, cols); c++) turned[c * rows + r] = data[r * cols + c];
    free(data);
    return turned;
}

// The values of a tensor of theirs. The caller frees them.
static float* tensor_values(const SafeTensors* s, const SafeTensor* t) {
    float* data = (float*)xcalloc(t->elements, sizeof(float));
    safetensors_read(s, t, 0, t->elements, data, DTYPE_F32);
    return data;
}

// ---- from Hugging Face ----
// A file of theirs, where our tensors are in it, in our order, and their precision, fp32 if they have several.
typedef struct { SafeTensors file; GPT2Config config; DType dtype; bool is_hf; const SafeTensor** found; } Source;

// Dies if our GPT-2 cannot compute what the config describes. What is not there has its default, which it can.
static void config_check_variant(const json_t* root, int channels, FileSource from) {
    json_t *values, *known = json_pack(
        "{s:[s], s:[s, s], s:[n, i], s:[b], s:[b], s:[b], s:[b]}", "model_type", "gpt2",
        "activation_function", "gelu_new", "gelu_pytorch_tanh", "n_inner", 4 * channels, "scale_attn_weights", 1,
        "scale_attn_by_inverse_layer_idx", 0, "add_cross_attention", 0, "tie_word_embeddings", 1);
    const char* key;
    json_object_foreach(known, key, values) {
        const json_t* value = json_object_get(root, key);
        bool agrees = value == NULL && strcmp(key, "model_type") != 0;
        for (size_t i = 0; value && i < json_array_size(values); i++) agrees |= json_equal(value, json_array_get(values, i));
        require_file(from, agrees, "\"%s\" is %s; only %s can be computed", key,
                     value ? json_dumps(value, JSON_ENCODE_ANY) : "not there", json_dumps(values, 0));
    }
    json_decref(known);
    const json_t *epsilon = json_object_get(root, "layer_norm_epsilon"), *quantization = json_object_get(root, "quantization_config");
    require_file(from, epsilon == NULL || (float)json_number_value(epsilon) == 1e-5f, // layers compute with it in fp32
                 "\"layer_norm_epsilon\" is %.9g; only 1e-05 can be computed", json_number_value(epsilon));
    require_file(from, quantization == NULL || json_is_null(quantization), "has a \"quantization_config\", and quantised"
                 " weights cannot be read: load the model in Python, dequantize() it and save it again");
}

static GPT2Config hf_read_config(const char* dir) {
    char* path = format_string("%s/config.json", dir);
    FileSource from = { path, "give the folder of a GPT-2 made by save_pretrained()" };
    size_t n;
    char* text = file_read(from, 1 << 20, &n);
    json_error_t error;
    json_t* root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    require_file(from, root != NULL, "line %d is not valid JSON: %s", error.line, error.text);
    GPT2Config c;
    int* const numbers[] = { &c.L, &c.NH, &c.C, &c.V, &c.max_T };
    static const char* const keys[] = { "n_layer", "n_head", "n_embd", "vocab_size", "n_positions" };
    for (int i = 0; i < 5; i++) *numbers[i] = (int)train_state_integer(root, keys[i], 1, 1 << 24, from);
    c.Vp = gpt2_padded_vocabulary(c.V);
    gpt2_check_config(c, path);
    config_check_variant(root, c.C, from);
    json_decref(root);
    free(text);
    free(path);
    return c;
}

// Finds the file's tensor by its name with or without the prefix. Its shape must be the config's.
static const SafeTensor* hf_find(const SafeTensors* s, const SafeTensor* wanted) {
    const char* name = wanted->name + strlen(HF_PREFIX);
    const SafeTensor *long_form = safetensors_find(s, wanted->name), *short_form = safetensors_find(s, name);
    require_file(s->source, long_form || short_form, "has no tensor '%s' with or without \"%s\"", name, HF_PREFIX);
    require_file(s->source, !long_form || !short_form, "has the tensor '%s' twice: with and without \"%s\"", name, HF_PREFIX);
    const SafeTensor* found = long_form ? long_form : short_form;
    bool fits = found->rank == wanted->rank && memcmp(found->shape, wanted->shape, (size_t)found->rank * sizeof(size_t)) == 0;
    require_file(s->source, fits, "tensor '%s' does not have the shape (%zu, %zu) that config.json asks for",
                 found->name, wanted->shape[0], wanted->shape[1]);
    require_file(s->source, found->readable, "tensor '%s' is stored as %s; only F32, BF16 and F16 can be read",
                 found->name, found->stored_as);
    return found;
}

// Dies if the checkpoint would lose a tensor of the file. Causal masks, which older files contain, are no weights, and a classifier's
// matrix may be there if it equals the token embedding, element by element.
static void hf_check_other(const SafeTensors* s, int layers, const SafeTensor* t, const SafeTensor* wte) {
    const char* name = t->name + (strncmp(t->name, HF_PREFIX, strlen(HF_PREFIX)) == 0 ? strlen(HF_PREFIX) : 0);
    int layer = -1, end = 0;
    sscanf(name, "h.%d.attn.%n", &layer, &end);
    bool is_attention = end > 0 && layer >= 0 && layer < layers;
    if (is_attention && (strcmp(name + end, "bias") == 0 || strcmp(name + end, "masked_bias") == 0)) return;
    require_file(s->source, strcmp(name, "lm_head.weight") == 0, "tensor '%s' has no place in this GPT-2", t->name);
    float *values = tensor_values(s, t), *tied = tensor_values(s, wte);
    bool is_tied = t->elements == wte->elements && memcmp(values, tied, t->elements * sizeof(float)) == 0;
    free(values);
    free(tied);
    require_file(s->source, is_tied, "'%s' differs from the token embedding: this GPT-2 ties them", t->name);
}

// All of our tensors must be there, and no others.
static Source hf_open(const char* dir) {
    Source s = { .config = hf_read_config(dir), .is_hf = true };
    char *path = format_string("%s/model.safetensors", dir), *index = format_string("%s/model.safetensors.index.json", dir);
    require(path_exists(path) || !path_exists(index), "%s: the weights are in several files; "
            "load the model in Python and save it with save_pretrained(..., max_shard_size=\"100GB\")", dir);
    require(path_exists(path), "%s: has no model.safetensors; load the model in Python and %s", dir, COPY_AGAIN);
    safetensors_open(&s.file, path, COPY_AGAIN);
    size_t count = checkpoint_tensor_count(s.config), place = 0;
    SafeTensor* wanted = their_tensors(s.config, DTYPE_F32, true, &place);
    bool* used = (bool*)xcalloc((size_t)s.file.count, sizeof(bool));
    s.found = (const SafeTensor**)xcalloc(count, sizeof *s.found);
    for (size_t k = 0; k < count; k++) used[(s.found[k] = hf_find(&s.file, &wanted[k])) - s.file.tensors] = true;
    s.dtype = s.found[WTE]->dtype;
    for (size_t k = 0; k < count; k++) if (s.found[k]->dtype != s.dtype) s.dtype = DTYPE_F32;
    for (int k = 0; k < s.file.count; k++) if (!used[k]) hf_check_other(&s.file, s.config.L, &s.file.tensors[k], s.found[WTE]);
    checkpoint_free_wanted(wanted, (int)count);
    free(used);
    free(path);
    free(index);
    return s;
}

// ---- from llm.c ----
static Source llmc_open(const char* path) {
    int32_t header[256];
    FileSource from = { xstrdup(path), xstrdup("give llm.c's model .bin, or copy it again") };
    Source s = { .file = { .source = from } };
    size_t size, place = sizeof header;
    s.file.fd = file_open(from, O_RDONLY, &size);
    require_file(from, size >= sizeof header, "has %zu bytes, less than the %zu of a header", size, sizeof header);
    require_file(from, pread_all(s.file.fd, header, sizeof header, 0), "cannot be read: %s", errno ? strerror(errno) : "it shrank");
    require(header[0] == LLMC_MODEL_MAGIC,
            "%s: starts with %d where a model of llm.c has %d; give its model .bin, not its tokens", path, header[0], LLMC_MODEL_MAGIC);
    require(header[1] == 3 || header[1] == 5,
            "%s: has version %d; versions 3 (fp32) and 5 (bf16) can be read; write it again with a newer llm.c", path, header[1]);
    s.dtype = header[1] == 3 ? DTYPE_F32 : DTYPE_BF16;
    GPT2Config c = { header[2], header[3], header[7], header[4], header[5], header[6] }; // padded as in the file
    gpt2_check_config(c, path);
    require(c.Vp >= c.V && c.Vp <= 1 << 24, "%s: its vocabulary of %d is padded to %d", path, c.V, c.Vp);
    s.file.count = (int)checkpoint_tensor_count(c);
    s.file.tensors = their_tensors(c, s.dtype, false, &place);
    require_file(from, size == place, "has %zu bytes where its header's model needs %zu", size, place);
    s.found = (const SafeTensor**)xcalloc((size_t)s.file.count, sizeof *s.found);
    for (int k = 0; k < s.file.count; k++) s.found[k] = &s.file.tensors[k];
    s.config = c;
    s.config.Vp = gpt2_padded_vocabulary(c.V);
    return s;
}

// ---- to a checkpoint ----
// Dies if a weight is NaN or infinite, because then every loss is.
static void write_checkpoint(Source s, const char* out) {
    GPT2Config c = s.config;
    TrainState state = { .config = c, .dtype = s.dtype, .seq_len = c.max_T, .loss_scale = 1 };
    CheckpointWriter w;
    checkpoint_begin_at(&w, out, &state);
    const SafeTensor** from = s.found;
    for (int u = 0; u < gpt2_num_units(c); u++)
        for (int i = 0; i < unit_tensors(u); i++, from++) {
            TensorInfo t = unit_tensor(c, u, i);
            size_t n = (*from)->elements;
            float* data = tensor_values(&s.file, *from);
            if (s.is_hf && hf_turns(u, t)) data = turn(data, (*from)->shape[0], (*from)->shape[1]);
            for (size_t k = 0; k < n; k++)
                require_file(s.file.source, isfinite(data[k]), "tensor '%s' has a value that is %f: nothing can be trained from it",
                             (*from)->name, (double)data[k]);
            void* stored = xcalloc(n, dtype_size(s.dtype));
            convert_dtype(stored, s.dtype, data, DTYPE_F32, n);
            checkpoint_write_unit(&w, CHECKPOINT_MODEL, u, t.offset, t.offset + n, stored);
            free(stored);
            free(data);
        }
    free(s.found);
    safetensors_close(&s.file);
    checkpoint_commit(&w);
    printf("%s: %d layers, %d heads, %d channels, %d tokens of vocabulary, sequences of up to %d tokens, in %s\n",
           out, c.L, c.NH, c.C, c.V, c.max_T, dtype_name(s.dtype));
    // The smallest tokenizer, bytes, has 257 tokens. A smaller vocabulary can still have files of tokens.
    printf("to train from it: --init-from %s%s\n", out, c.V < 257 ? " --tokenizer= --data TOKENS.bin --val-data=" : "");
}

// ---- to Hugging Face ----
static char* hf_out; // the folder, whose files are in folder_unfinished until it is whole; owned

// Dies if a file of the folder could not be written; the unfinished folder is removed when the process exits.
static void require_written(bool written, const char* file) {
    const char* why = path_reason(hf_out, errno);
    require(written, "%s/%s: cannot be written: %s; %s or choose another folder", hf_out, file, why,
            why == no_inodes ? "remove files" : "free disk space");
}

static void write_file(const char* file, const char* text, size_t n) {
    char* path = format_string("%s/%s", folder_unfinished, file);
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

static void write_weights(CheckpointReader* r, DType dtype) {
    SafeTensors s;
    GPT2Config c = r->state.config;
    size_t place = 0;
    int count = (int)checkpoint_tensor_count(c);
    SafeTensor* wanted = their_tensors(c, dtype, true, &place);
    json_t* metadata = json_pack("{s:s}", "format", "pt");
    char* path = format_string("%s/model.safetensors", folder_unfinished);
    bool written = safetensors_create(&s, path, wanted, count, metadata);
    const SafeTensor* to = s.tensors;
    for (int u = 0; u < gpt2_num_units(c); u++)
        for (int i = 0; i < unit_tensors(u) && written; i++, to++) {
            TensorInfo t = unit_tensor(c, u, i);
            float* data = (float*)xcalloc(to->elements, sizeof(float));
            checkpoint_read_unit(r, CHECKPOINT_MODEL, u, t.offset, t.offset + to->elements, data);
            if (hf_turns(u, t)) data = turn(data, t.rows, t.cols);
            written = safetensors_write(&s, to, 0, to->elements, data, DTYPE_F32);
            free(data);
        }
    require_written(written && safetensors_sync(&s) && safetensors_close(&s), "model.safetensors");
    free(path);
    json_decref(metadata);
    checkpoint_free_wanted(wanted, count);
}

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

static bool is_folder(const char* path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

// Returns why this tokenizer does not fit a model of V tokens, or NULL if it does; the caller frees it. Reports its end-of-text
// token in *eot. The run's tokenizer must have exactly V tokens, because it may be a default that did not make the run's token
// files. Dies if another one does not fit.
static char* tokenizer_misfit(const char* spec, int V, bool is_of_run, int* eot) {
    Tokenizer t;
    tokenizer_open(&t, spec);
    int tokens = t.vocab_size;
    *eot = t.eot;
    tokenizer_free(&t);
    const int32_t magic = TOKENIZER_MAGIC;
    bool has_file = strcmp(spec, "bytes") != 0 && !is_folder(spec);
    char* why = NULL;
    if (tokens > V || (is_of_run && tokens < V)) why = format_string("has %d tokens, the model %d", tokens, V);
    else if (has_file && file_begins_with(file_source(spec, ""), &magic, sizeof magic)) why = xstrdup("has no merges to export");
    require(is_of_run || why == NULL, "--tokenizer %s %s; give the %s", spec, why,
            tokens > V ? "one that it was trained with" : "vocab.json with its merges.txt beside it");
    return why;
}

// Writes vocab.json, merges.txt and tokenizer_config.json. Texts begin with the end-of-text token in training and when our
// programs sample; transformers' tokenizer adds it only if it is told to.
static void write_tokenizer(const char* spec, int max_T) {
    char* folder = is_folder(spec) ? xstrdup(spec) : path_parent(spec);
    if (strcmp(spec, "bytes") == 0) write_byte_tokenizer();
    else { copy_file(folder, "vocab.json"); copy_file(folder, "merges.txt"); }
    write_json("tokenizer_config.json",
               json_pack("{s:s, s:i, s:b, s:b, s:s, s:s, s:s}", "tokenizer_class", "GPT2Tokenizer", "model_max_length", max_T,
                         "add_prefix_space", 0, "add_bos_token", 1, "bos_token", END_OF_TEXT, "eos_token", END_OF_TEXT,
                         "unk_token", END_OF_TEXT), JSON_INDENT(2));
    free(folder);
}

// Returns the --tokenizer of the run that saved the checkpoint; the caller frees it. "": it had none, or its options do not say.
static char* tokenizer_of_run(const CheckpointReader* r) {
    json_t* options = json_loads(r->state.options, 0, NULL);
    const char* spec = json_string_value(json_object_get(options, "tokenizer"));
    char* copy = xstrdup(spec ? spec : "");
    json_decref(options);
    require(strcmp(copy, "bytes") == 0 || path_exists(copy[0] ? copy : "."), "%s: the run's tokenizer was %s, by its state.json,"
            " but is no longer there: give its files as --tokenizer, or --tokenizer= to export none", r->path, copy);
    return copy;
}

static void write_hf(const char* checkpoint, const char* out, int dtype_choice, const char* tokenizer) {
    CheckpointReader r;
    checkpoint_open(&r, checkpoint);
    bool is_of_run = strcmp(tokenizer, "same") == 0;
    char* spec = is_of_run ? tokenizer_of_run(&r) : xstrdup(tokenizer);
    GPT2Config c = r.state.config;
    int eot = 0;
    char* misfit = spec[0] ? tokenizer_misfit(spec, c.V, is_of_run, &eot) : NULL; // before the weights are written
    bool with = spec[0] && misfit == NULL;
    DType dtype = dtype_choice == 0 ? r.state.dtype : (DType)(DTYPE_F32 + dtype_choice - 1);
    r.into = dtype;
    hf_out = path_trim(out);
    require_written(folder_begin(hf_out), "");
    write_weights(&r, dtype);
    checkpoint_close(&r); // verifies what was read, before the folder gets its name
    write_config(c, dtype, with ? eot : c.V - 1);
    if (with) write_tokenizer(spec, c.max_T);
    if (!folder_publish(hf_out)) folder_die_complete(hf_out);
    printf("%s: AutoModelForCausalLM.from_pretrained(\"%s\") loads it, in %s\n", hf_out, hf_out, dtype_name(dtype));
    if (with) printf("with the tokenizer%s, %s: a text begins with " END_OF_TEXT ", as in training\n",
                     is_of_run ? " of the run" : "", spec);
    else if (misfit) printf("with no tokenizer: that of the run, %s, %s; --tokenizer adds one\n", spec, misfit);
    else printf("with no tokenizer%s\n", is_of_run ? ": state.json names none; --tokenizer adds one" : "");
    free(misfit);
    free(spec);
    free(hf_out);
}

// ---- verify ----
// Reads the errors of compressed gradients, and dies if a file is damaged or missing. Returns how many there are.
static size_t verify_errors(const char* dir) {
    CheckpointErrors e = checkpoint_errors(dir);
    size_t errors = 0;
    for (int rank = 0; rank < e.ranks; rank++) {
        SafeTensors file;
        errors_open(&file, dir, e, rank);
        errors_read(&file, errors_read_facts(&file), rank, e.ranks, NULL);
        errors += errors_tensor(&file)->elements;
        safetensors_close(&file);
    }
    return errors;
}
// Dies if anything in the checkpoint is damaged.
static void verify(const char* dir) {
    CheckpointReader r;
    const size_t slice = 1 << 20; // elements
    float* data = (float*)xcalloc(slice, sizeof(float));
    checkpoint_open(&r, dir);
    r.into = DTYPE_F32;
    TrainState s = r.state;
    size_t elements = 0;
    for (int p = 0; p < CHECKPOINT_PARTS; p++)
        for (int u = 0; u < gpt2_num_units(s.config) && checkpoint_has_part(&s, (CheckpointPart)p); u++)
            for (int i = 0; i < unit_tensors(u); i++) {
                if (!checkpoint_has_tensor(&s, (CheckpointPart)p, u, i)) continue;
                TensorInfo t = unit_tensor(s.config, u, i);
                for (size_t n, at = t.offset, end = at + tensor_stored_elements(t); at < end; at += n) {
                    n = size_min(slice, end - at);
                    checkpoint_read_unit(&r, (CheckpointPart)p, u, at, at + n, data);
                    elements += n;
                }
            }
    free(data);
    checkpoint_close(&r);
    elements += verify_errors(dir);
    printf("%s: step %lld, %zu numbers, which match their checksums\n", dir, s.step, elements);
}

int main(int argc, char** argv) {
    static const char* const programs[][3] = {
        { "hf_import", "make a checkpoint from a Hugging Face GPT-2 folder", "HF_DIR OUT_DIR" },
        { "llmc_import", "make a checkpoint from a model file of llm.c", "MODEL.bin OUT_DIR" },
        { "hf_export", "make a Hugging Face GPT-2 folder from a checkpoint", "CHECKPOINT_DIR OUT_DIR" },
        { "verify", "read all of a checkpoint, and compare it with its checksums", "CHECKPOINT_DIR" }
    };
    int p = 0, dtype = 0;
    while (p < 4 && strcmp(path_name(argv[0]), programs[p][0]) != 0) p++;
    require(p < 4, "%s: call this program hf_import, llmc_import, hf_export or verify, as make tools does", argv[0]);
    const char* tokenizer = "same";
    OptionTable t = options_table(programs[p][0], programs[p][1]);
    if (p == 2) {
        option_text(&t, "tokenizer", &tokenizer, "same|bytes|FILE", "tokenizer whose files to add to the folder; same: the run's own; '': none");
        option_choice(&t, "dtype", &dtype, "same|fp32|bf16|fp16", "precision of the weights; same: as in the checkpoint");
    }
    options_operands(&t, programs[p][2], p == 3 ? 1 : 2, p == 3 ? 1 : 2);
    options_parse(&t, argc, argv);
    const char *in = t.operands[0], *out = p == 3 ? NULL : t.operands[1];
    require(out == NULL || rmdir(out) == 0 || errno == ENOENT, // an empty folder makes room
            "%s is there already and is not an empty folder; remove it or choose another", out);
    if (p == 3) verify(in);
    else if (p == 2) write_hf(in, out, dtype, tokenizer);
    else write_checkpoint(p == 0 ? hf_open(in) : llmc_open(in), out);
    free(t.operands);
    return 0;
}
