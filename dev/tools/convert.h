/*
convert.h - what hf_export, hf_import and llmc_import share: Hugging Face's names for GPT-2's tensors, and making a
checkpoint that holds weights only.

Hugging Face's GPT-2 keeps the Conv1D of OpenAI's code: it stores the matrices of a block as (in, out), we as (out, in).
*/
#ifndef DEV_CONVERT_H
#define DEV_CONVERT_H
#include "../../llmc/save/checkpoint.h"
#include "../../llmc/base/options.h"

#define HF_PREFIX "transformer." // begins the names in a model with a language-modelling head; a bare GPT2Model has no prefix

static inline bool hf_is_transposed(int u, int i) { return u > 0 && i >= QKVW; }

// Our tensors in our order as a file of theirs has them, (checkpoint_tensor_count); the caller frees them with
// checkpoint_free_wanted.
static inline SafeTensor* hf_tensors(GPT2Config c, DType dtype) {
    static const char* const root[ROOT_TENSORS] = { "ln_f.weight", "ln_f.bias", "wpe.weight", "wte.weight" };
    static const char* const block[BLOCK_TENSORS] = {
        "ln_1.weight", "ln_1.bias", "attn.c_attn.bias", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
        "mlp.c_fc.bias", "mlp.c_proj.bias", "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"
    };
    SafeTensor *list = (SafeTensor*)xcalloc(checkpoint_tensor_count(c), sizeof(SafeTensor)), *next = list;
    for (int u = 0; u <= c.L; u++)
        for (int i = 0; i < unit_tensors(u); i++) {
            TensorInfo t = unit_tensor(c, u, i);
            bool turned = hf_is_transposed(u, i);
            char* name = u == 0 ? format_string(HF_PREFIX "%s", root[i]) : format_string(HF_PREFIX "h.%d.%s", u - 1, block[i]);
            *next++ = safetensor_wanted(name, dtype, turned ? t.cols : t.stored_rows, turned ? t.stored_rows : t.cols);
        }
    return list;
}

// A tensor's data (rows, cols) as the other side stores it, in its place: matrices of blocks are turned, in tiles that fit the
// cache.
static inline float* hf_turn(float* data, int u, int i, size_t rows, size_t cols) {
    const size_t tile = 32;
    if (!hf_is_transposed(u, i)) return data;
    float* turned = (float*)xcalloc(rows * cols, sizeof(float));
    for (size_t r0 = 0; r0 < rows; r0 += tile)
        for (size_t c0 = 0; c0 < cols; c0 += tile)
            for (size_t r = r0; r < size_min(r0 + tile, rows); r++)
                for (size_t c = c0; c < size_min(c0 + tile, cols); c++) turned[c * rows + r] = data[r * cols + c];
    free(data);
    return turned;
}

// Reads the command line, whose operands are what to read, and a folder that must not exist or be empty.
static inline void parse_in_out(OptionTable* t, const char* form, int argc, char** argv, const char** in, const char** out) {
    options_operands(t, form, 2, 2);
    options_parse(t, argc, argv);
    *in = t->operands[0];
    *out = t->operands[1];
    free(t->operands);
    require(folder_is_free(*out), "%s is there already and is not an empty folder; remove it or choose another", *out);
}

// Begins a checkpoint of weights at exactly `out`.
static inline void import_begin(CheckpointWriter* w, const char* out, GPT2Config c, DType dtype) {
    TrainState s = { .config = c, .dtype = dtype, .seq_len = c.max_T, .loss_scale = 1 };
    checkpoint_begin_at(w, out, &s);
}

// Tensor i of unit u; data holds its stored rows, and is freed. from, name: where they come from. Dies if one is NaN or infinite,
// because then every loss is.
static inline void import_tensor(CheckpointWriter* w, int u, int i, float* data, FileSource from, const char* name) {
    TensorInfo t = unit_tensor(w->state.config, u, i);
    size_t n = tensor_stored_elements(t);
    for (size_t k = 0; k < n; k++)
        require_file(from, isfinite(data[k]), "tensor '%s' has a value that is %f: nothing can be trained from it",
                     name, (double)data[k]);
    void* stored = xcalloc(n, dtype_size(w->state.dtype));
    convert_dtype(stored, w->state.dtype, data, DTYPE_F32, n);
    checkpoint_write_unit(w, CHECKPOINT_MODEL, u, t.offset, t.offset + n, stored);
    free(stored);
    free(data);
}

static inline void import_finish(CheckpointWriter* w, const char* out) {
    GPT2Config c = w->state.config;
    const char* dtype = dtype_name(w->state.dtype);
    checkpoint_commit(w, 0);
    printf("%s: %d layers, %d heads, %d channels, %d tokens of vocabulary, sequences of up to %d tokens, in %s\n",
           out, c.L, c.NH, c.C, c.V, c.max_T, dtype);
    // The smallest tokenizer, bytes, has 257 tokens. A smaller vocabulary can still have files of tokens.
    printf("to train from it: --init-from %s%s\n", out, c.V < 257 ? " --tokenizer= --data TOKENS.bin --val-data=" : "");
}
#endif
