/*
tokenize - turns text into token files (llm.c's .bin) for the training programs.

    build/tokenize --tokenizer bytes --out train.bin --val-out val.bin FILE...

With --prompt-field and --response-field it also writes masks (llmc/data/mask.h): only responses count in the loss, each with the
end-of-text token after it, without which a model would not learn where to stop.

The end-of-text token precedes each document. A document's bytes alone decide whether it is for validation, so a document
that comes twice, in another order or in a larger set stays on its side, and no validation text leaks into the training
text.
*/
#include "../../llmc/base/common.h"
#include "../../llmc/base/options.h"
#include "../../llmc/base/rng.h"
#include "../../llmc/data/token_writer.h"
#include "../../llmc/data/tokenizer.h"
#include "documents.h"

// One of the two sides: a token file, or numbered shards of one.
typedef struct {
    const char* path;
    size_t shard_tokens;  // 0: all in one file
    int shards;           // opened so far
    bool is_open;
    TokenWriter writer;   // if is_open
    bool masked;          // every file has a mask
    MaskWriter mask;      // of the open file
    size_t documents, bytes, tokens; // tokens include the end-of-text ones
    size_t counted;       // if masked, the tokens that count in the loss
} Output;

enum { TRAIN, VAL, SIDES };
static Output outputs[SIDES];
static uint64_t fingerprint; // of the tokenizer

// However the program ends, only finished files may stay.
static void remove_unfinished(void) {
    for (int i = 0; i < SIDES; i++)
        if (outputs[i].is_open) unlink(outputs[i].writer.temporary);
}

// Returns the name of a shard: 3 of "a/train.bin" is "a/train_000003.bin". The caller frees it.
static char* output_name(const Output* o, int shard) {
    if (o->shard_tokens == 0) return xstrdup(o->path);
    size_t stem = strlen(o->path);
    if (stem > 4 && strcmp(o->path + stem - 4, ".bin") == 0) stem -= 4;
    return format_string("%.*s_%06d.bin", (int)stem, o->path, shard);
}

static void output_open(Output* o) {
    char* name = output_name(o, o->shards++);
    o->writer = token_writer_open(name);
    o->writer.tokenizer = fingerprint;
    o->is_open = true;
    free(name);
}

// An existing mask belongs to the tokens that are now replaced.
static void output_close(Output* o) {
    char* mask = mask_path(o->writer.path);
    if (o->masked) mask_writer_close(&o->mask, &o->writer);
    token_writer_close(&o->writer);
    o->is_open = false;
    if (!o->masked && unlink(mask) == 0) printf("%s: removed, it was the mask of the tokens that were there before\n", mask);
    free(mask);
}

// Like llm.c's, a shard ends when it is full, even in the middle of a document.
static void output_tokens(Output* o, const int* tokens, size_t n, bool counts) {
    o->tokens += n;
    o->counted += counts ? n : 0;
    while (n > 0) {
        if (!o->is_open) output_open(o);
        size_t some = o->shard_tokens ? size_min(n, o->shard_tokens - o->writer.count) : n;
        token_writer_append(&o->writer, tokens, some);
        if (o->masked) mask_writer_append(&o->mask, counts, some);
        if (o->writer.count == o->shard_tokens) output_close(o);
        tokens += some;
        n -= some;
    }
}

static void output_text(Output* o, const Tokenizer* t, const char* text, size_t length, bool counts) {
    size_t count;
    int* tokens = tokenizer_encode(t, text, length, &count);
    output_tokens(o, tokens, count, counts);
    free(tokens);
}

// The first `prompt` bytes are a prompt. It is encoded alone, as when the model answers: no token spans its end.
static void output_document(Output* o, const Tokenizer* t, const char* text, size_t length, size_t prompt) {
    output_tokens(o, &t->eot, 1, o->documents > 0); // it ends the response before it
    if (prompt > 0) output_text(o, t, text, prompt, false);
    output_text(o, t, text + prompt, length - prompt, true);
    o->documents++;
    o->bytes += length;
}

static void output_finish(Output* o) {
    if (o->is_open) output_close(o);
    char *first = output_name(o, 0), *last = output_name(o, o->shards - 1), *next = output_name(o, o->shards);
    bool several = o->shards > 1;
    printf("%s%s%s: %zu document%s, %zu bytes, %zu tokens, %.3f bytes per token\n", first, several ? " to " : "",
           several ? last : "", o->documents, o->documents == 1 ? "" : "s", o->bytes, o->tokens,
           (double)o->bytes / (double)(o->tokens - o->documents));
    if (o->masked) printf("its mask%s: %zu tokens count in the loss\n", several ? "s" : "", o->counted);
    require(o->shard_tokens == 0 || !path_exists(next), "%s is from an earlier run, not part of this data; remove it and"
            " those after it, or a glob will find them too", next);
    free(first);
    free(last);
    free(next);
}

// val_fraction 0: all documents are for training.
static void tokenize(Documents* d, const Tokenizer* t, double val_fraction) {
    while (documents_next(d)) {
        float place = random_uniform(hash_bytes(d->text, d->length), 0, 0); // in [0,1), a function of the bytes
        output_document(&outputs[place < val_fraction ? VAL : TRAIN], t, d->text, d->length, d->prompt);
    }
    size_t all = outputs[TRAIN].documents + outputs[VAL].documents;
    require(all > 0, "there is no text in the %d file%s given", d->num_paths, d->num_paths == 1 ? "" : "s");
    for (int i = 0; i < (val_fraction > 0 ? SIDES : 1); i++)
        require(outputs[i].documents > 0, "no document is for %s, of %zu; give more, which --split may find, another"
                " --val-fraction, or no --val-out", outputs[i].path, all);
}

int main(int argc, char** argv) {
    const char* tokenizer = "bytes";
    double val_fraction = 0.1;
    long long shard_tokens = 0;
    OptionTable table = options_table("tokenize", "turn text files into token files; - is standard input");
    outputs[TRAIN].path = "train.bin";
    outputs[VAL].path = "";
    option_text(&table, "tokenizer", &tokenizer, "bytes|FILE",
                "bytes, vocab.json with merges.txt next to it, their folder, or llm.c's tokenizer .bin");
    option_text(&table, "out", &outputs[TRAIN].path, "FILE", "the token file to write");
    option_letter(&table, 'o');
    option_text(&table, "val-out", &outputs[VAL].path, "FILE", "the token file for validation; '': none");
    option_float(&table, "val-fraction", &val_fraction, 1e-6, 0.999999, "share of the documents that goes to --val-out");
    option_int(&table, "shard-tokens", &shard_tokens, 0, TOKENS_MAX_COUNT,
               "tokens per file: train.bin becomes train_000000.bin and so on; 0: one file");
    Documents d = documents_parse(&table, argc, argv);

    Tokenizer t;
    tokenizer_open(&t, tokenizer);
    fingerprint = t.fingerprint;
    require(t.vocab_size <= UINT16_MAX + 1, "%s has %d tokens; token files use 16 bits for each, so at most 65536", tokenizer,
            t.vocab_size);
    outputs[TRAIN].shard_tokens = outputs[VAL].shard_tokens = (size_t)shard_tokens;
    outputs[TRAIN].masked = outputs[VAL].masked = d.prompt_field[0] != '\0';
    atexit(remove_unfinished);
    bool has_val = *outputs[VAL].path != '\0';
    tokenize(&d, &t, has_val ? val_fraction : 0);
    output_finish(&outputs[TRAIN]);
    if (has_val) output_finish(&outputs[VAL]);
    documents_free(&d);
    tokenizer_free(&t);
    return EXIT_SUCCESS;
}
