/*
hf_import HF_DIR OUT_DIR - makes a checkpoint from a Hugging Face GPT-2 folder (config.json, model.safetensors).

An error names what our GPT-2 does not support: another activation, epsilon or inner width, untied embeddings, quantised
weights, tensors that have no place in it. The checkpoint keeps the file's precision, fp32 if it has several.
*/
#include "convert.h"

#define COPY_AGAIN "save it again with save_pretrained(), or download it again"

// ---- config.json ----
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

static GPT2Config read_config(const char* dir) {
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
    for (int i = 0; i < 5; i++) {
        const json_t* value = json_object_get(root, keys[i]);
        long long number = (long long)json_integer_value(value);
        require_file(from, json_is_integer(value), "has no whole number \"%s\"", keys[i]);
        require_file(from, number >= 1 && number <= 1 << 24, "\"%s\" is %lld", keys[i], number);
        *numbers[i] = (int)number;
    }
    c.Vp = gpt2_padded_vocabulary(c.V);
    gpt2_check_config(c, path);
    config_check_variant(root, c.C, from);
    json_decref(root);
    free(text);
    free(path);
    return c;
}

// ---- model.safetensors ----
static void open_weights(SafeTensors* s, const char* dir) {
    char *path = format_string("%s/model.safetensors", dir), *index = format_string("%s/model.safetensors.index.json", dir);
    require(path_exists(path) || !path_exists(index), "%s: the weights are in several files; "
            "load the model in Python and save it with save_pretrained(..., max_shard_size=\"100GB\")", dir);
    require(path_exists(path), "%s: has no model.safetensors; load the model in Python and %s", dir, COPY_AGAIN);
    safetensors_open(s, path, COPY_AGAIN);
    free(path);
    free(index);
}

// Finds the file's tensor by its name with or without the prefix. Its shape must be the config's.
static const SafeTensor* find_tensor(const SafeTensors* s, const SafeTensor* wanted) {
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

// A file may also contain the classifier's matrix: it must equal the token embedding, element by element.
static void check_tied(const SafeTensors* s, const SafeTensor* head, const SafeTensor* wte) {
    float a[4096], b[4096];
    bool is_tied = head->elements == wte->elements && head->readable;
    for (size_t done = 0, n; is_tied && done < wte->elements; done += n) {
        n = size_min(wte->elements - done, 4096);
        safetensors_read(s, head, done, n, a, DTYPE_F32);
        safetensors_read(s, wte, done, n, b, DTYPE_F32);
        is_tied = memcmp(a, b, n * sizeof(float)) == 0;
    }
    require_file(s->source, is_tied, "'%s' differs from the token embedding: this GPT-2 ties them", head->name);
}

// Dies if the checkpoint would lose a tensor of the file. Causal masks, which older files contain, are no weights.
static void check_other(const SafeTensors* s, int layers, const SafeTensor* t, const SafeTensor* wte) {
    const char* name = t->name + (strncmp(t->name, HF_PREFIX, strlen(HF_PREFIX)) == 0 ? strlen(HF_PREFIX) : 0);
    int layer = -1, end = 0;
    sscanf(name, "h.%d.attn.%n", &layer, &end);
    bool is_attention = end > 0 && layer >= 0 && layer < layers;
    if (is_attention && (strcmp(name + end, "bias") == 0 || strcmp(name + end, "masked_bias") == 0)) return;
    require_file(s->source, strcmp(name, "lm_head.weight") == 0, "tensor '%s' has no place in this GPT-2", t->name);
    check_tied(s, t, wte);
}

// Finds the file's tensors in our order, found (checkpoint_tensor_count); dies unless all are there, and no others. Returns the
// precision that all have in common, else fp32, which holds each exactly.
static DType find_tensors(const SafeTensors* s, GPT2Config c, const SafeTensor** found) {
    int count = (int)checkpoint_tensor_count(c);
    SafeTensor* wanted = hf_tensors(c, DTYPE_F32);
    bool* used = (bool*)xcalloc((size_t)s->count, sizeof(bool));
    for (int k = 0; k < count; k++) used[(found[k] = find_tensor(s, &wanted[k])) - s->tensors] = true;
    DType dtype = found[WTE]->dtype;
    for (int k = 0; k < count; k++) if (found[k]->dtype != dtype) dtype = DTYPE_F32;
    for (int k = 0; k < s->count; k++) if (!used[k]) check_other(s, c.L, &s->tensors[k], found[WTE]);
    checkpoint_free_wanted(wanted, count);
    free(used);
    return dtype;
}

int main(int argc, char** argv) {
    OptionTable table = options_table("hf_import", "make a checkpoint from a Hugging Face GPT-2 folder");
    const char *in, *out;
    parse_in_out(&table, "HF_DIR OUT_DIR", argc, argv, &in, &out);
    GPT2Config c = read_config(in);
    SafeTensors s;
    open_weights(&s, in);
    const SafeTensor **found = (const SafeTensor**)xcalloc(checkpoint_tensor_count(c), sizeof *found), **from = found;
    CheckpointWriter w;
    import_begin(&w, out, c, find_tensors(&s, c, found));
    for (int u = 0; u <= c.L; u++)
        for (int i = 0; i < unit_tensors(u); i++, from++) {
            float* data = (float*)xcalloc((*from)->elements, sizeof(float));
            safetensors_read(&s, *from, 0, (*from)->elements, data, DTYPE_F32);
            data = hf_turn(data, u, i, (*from)->shape[0], (*from)->shape[1]);
            import_tensor(&w, u, i, data, s.source, (*from)->name);
        }
    free(found);
    safetensors_close(&s);
    import_finish(&w, out);
    return 0;
}
