/* sample.h - text from the model: what --sample-every prints. */
#ifndef LLMC_SAMPLE_H
#define LLMC_SAMPLE_H
#include "../base/precision.h"
#include "../base/rng.h"
#include "../data/tokenizer.h"
#include "../model/sampler.h"
#include "../model/training_options.h"
#include "logger.h"

// Computes logits (V), on the host, of the token that follows tokens (T).
typedef void NextLogits(void* self, const int* tokens, int T, floatX* logits);

// Returns the next token, drawn from the model's distribution. tokens (n): what it follows; random (0..1) decides.
static inline int sample_next(const Options* o, const Tokenizer* t, int V, const int* tokens, size_t n, float random,
                              NextLogits* next_logits, void* self) {
    floatX* row = (floatX*)xcalloc((size_t)V, sizeof(floatX));
    float* logits = (float*)xcalloc((size_t)V, sizeof(float));
    size_t T = size_min(n, (size_t)o->seq_len);
    next_logits(self, tokens + n - T, (int)T, row);
    convert_dtype(logits, DTYPE_F32, row, FLOATX_DTYPE, (size_t)V);
    int token = sample_token(logits, t->vocab_size, o->temperature, o->top_k, random);
    free(row);
    free(logits);
    return token;
}

// Prints --sample-tokens tokens that follow --prompt.
static inline void print_sample(const Options* o, const Tokenizer* t, int V, long long step, NextLogits* next_logits,
                                void* self) {
    size_t prompt_tokens;
    int* prompt = tokenizer_encode(t, o->prompt, strlen(o->prompt), &prompt_tokens);
    size_t n = 1 + prompt_tokens, total = n + (size_t)o->sample_tokens;
    int* tokens = (int*)xcalloc(total, sizeof(int));
    tokens[0] = t->eot;
    memcpy(tokens + 1, prompt, prompt_tokens * sizeof(int));
    TokenPrinter printer;
    memset(&printer, 0, sizeof printer);
    logger_say("sample after step %lld:\n%s", step, o->prompt);
    for (; n < total; n++) {
        float random = random_uniform((uint64_t)o->seed, STREAM_SAMPLER + (uint64_t)step, n);
        tokens[n] = sample_next(o, t, V, tokens, n, random, next_logits, self);
        size_t length;
        const char* bytes = tokenizer_decode(t, tokens[n], &length);
        print_token(&printer, bytes, length);
    }
    print_token_end(&printer);
    printf("\n");
    free(tokens);
    free(prompt);
}
#endif
