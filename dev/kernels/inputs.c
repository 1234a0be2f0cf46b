/*
inputs.c - makes up what the measured programs read, so that nothing need be downloaded to compare speed.

    inputs tokens FILE      random tokens in GPT-2's range (llmc/data/tokens.h)
    inputs llmc FILE [MODEL fp32|bf16]
                            random weights in the format of llm.c's programs, the same ones that train_gpt2_single starts
                            from: 16 tensors, each over all layers. MODEL is gpt2, gpt2-xl, ... (gpt2 in fp32);
                            train_gpt2.c reads fp32, train_gpt2.cu the precision that it was built for
*/
#include "../../llmc/base/common.h"
#include "../../llmc/model/gpt2.h"
#include "../../llmc/base/precision.h"
#include "../../llmc/base/rng.h"
#include "../../llmc/data/token_writer.h"

#define TOKENS (1 << 20)
#define SEED 1337

static void write_tokens(const char* path) {
    static int tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = (int)(random_uniform(SEED, STREAM_DATA, (uint64_t)i) * GPT2_VOCABULARY);
    TokenWriter w = token_writer_open(path);
    token_writer_append(&w, tokens, TOKENS);
    token_writer_close(&w);
}

// Writes tensor i of unit u to the file.
static void write_tensor(FILE* file, const char* path, GPT2Config c, DType dtype, int u, int i) {
    TensorInfo t = unit_tensor(c, u, i);
    size_t n = tensor_elements(t);
    float* weights = (float*)xcalloc(n, sizeof(float));
    const size_t slice = 1 << 16;
    #pragma omp parallel for schedule(dynamic)
    for (size_t k = 0; k < n; k += slice)
        unit_init_weights(c, SEED, u, t.offset + k, t.offset + size_min(n, k + slice), weights + k);
    void* stored = xcalloc(n, dtype_size(dtype));
    convert_dtype(stored, dtype, weights, DTYPE_F32, n);
    require(fwrite(stored, dtype_size(dtype), n, file) == n, "%s cannot be written: %s", path, strerror(errno));
    free(stored);
    free(weights);
}

static void write_llmc_model(const char* path, const char* model, const char* precision) {
    static const int of_attention[] = { LN1W, LN1B, QKVW, QKVB, PROJW, PROJB }, of_mlp[] = { LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB };
    GPT2Config c;
    DType dtype = strcmp(precision, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32;
    require(gpt2_named_config(model, &c), "there is no model '%s'; there are gpt2, gpt2-medium, gpt2-large, gpt2-xl and dN",
            model);
    require(dtype == DTYPE_BF16 || strcmp(precision, "fp32") == 0, "the precision must be fp32 or bf16, not '%s'", precision);
    c.max_T = GPT2_CONTEXT;
    c.V = GPT2_VOCABULARY;
    c.Vp = gpt2_padded_vocabulary(c.V);
    const int32_t header[256] = { 20240326, dtype == DTYPE_BF16 ? 5 : 3, c.max_T, c.V, c.L, c.NH, c.C, c.Vp };
    FILE* file = fopen(path, "wb");
    require(file != NULL, "%s cannot be made: %s", path, strerror(errno));
    require(fwrite(header, sizeof header, 1, file) == 1, "%s cannot be written: %s", path, strerror(errno));
    write_tensor(file, path, c, dtype, 0, WTE);
    write_tensor(file, path, c, dtype, 0, WPE);
    for (int i = 0; i < ATTENTION_TENSORS; i++)
        for (int l = 0; l < c.L; l++) write_tensor(file, path, c, dtype, attention_unit(l), of_attention[i]);
    for (int i = 0; i < MLP_TENSORS; i++)
        for (int l = 0; l < c.L; l++) write_tensor(file, path, c, dtype, mlp_unit(l), of_mlp[i]);
    write_tensor(file, path, c, dtype, 0, LNFW);
    write_tensor(file, path, c, dtype, 0, LNFB);
    require(fclose(file) == 0, "%s cannot be written: %s", path, strerror(errno));
}

int main(int argc, char** argv) {
    require(argc == 3 || (argc == 5 && strcmp(argv[1], "llmc") == 0), "usage: inputs tokens FILE | llmc FILE [MODEL fp32|bf16]");
    if (strcmp(argv[1], "tokens") == 0) write_tokens(argv[2]);
    else if (strcmp(argv[1], "llmc") == 0) write_llmc_model(argv[2], argc == 5 ? argv[3] : "gpt2", argc == 5 ? argv[4] : "fp32");
    else die("the first argument must be tokens or llmc, not '%s'", argv[1]);
    return 0;
}
