/*
dataloader.h - token sequences in an order that depends only on (seed, epoch, position).

Sequences are non-overlapping windows of T tokens within a shard; the token after a window is the target of its last
one.
An epoch visits them in a pseudo-random permutation; a step takes the next global_batch of them, whatever the number of
ranks: micro-batch m on rank r has in row b the sequence at position (m*ranks + r)*B + b within the step. So N ranks and
one rank with accumulation see the same global batches, every rank does the same number of steps, and no sequence is
seen twice in an epoch. Sequences at an epoch's end that do not fill a global batch are left out that time.

Tokens may be masked (mask.h): they are read as inputs, and as targets they are -1, which the classifier leaves out. How
many targets of a step count is a function of the same three numbers, so each rank knows it for all ranks before it
computes anything.

A background thread reads ahead, so that no step waits for a disk.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "../base/common.h"
#include "../device/device.h"
#include "../base/folder.h"
#include "../base/rng.h"
#include "../base/thread.h"
#include "mask.h"
#include "tokenizer.h"
#include "tokens.h"
#include <glob.h>

typedef struct {
    int B, T, V;            // sequences per micro-batch, tokens per sequence, vocabulary
    long long global_batch; // sequences per step over all ranks
    int rank, ranks;
    uint64_t seed;
    MaskUse mask;           // of all shards
} DataShape;

// DATA_TRAIN: shuffled, whole windows and whole global batches only. DATA_EVAL: in order, every token once; rows past
// the end, and tokens past the end of a shard's last window, have input 0 and target -1.
typedef enum { DATA_TRAIN, DATA_EVAL } DataUse;

typedef struct {
    char* path;               // owned
    TokenFile file;           // open where tokens is NULL
    int* tokens;              // (count) of a text file, owned; NULL: read from the file when needed
    size_t count;             // tokens
    TokenMask mask;           // which of them count, owned
    bool has_unused_mask;     // MASK_NONE leaves it out
    long long first_sequence; // number of this shard's first sequence among all shards'
} DataShard;

typedef struct { long long epoch, position; int micro; } DataCursor; // position: sequences of the epoch already used

typedef struct {
    // this micro-batch, on the host. Buffers stay as they are until the first dataloader_next of the next step, which
    // waits for the device: copies of them may be under way until then.
    int *inputs, *targets;          // (B,T) views
    int valid;                      // targets that count: not -1
    double bytes;                   // DATA_EVAL: of text that these targets stand for;
                                    // NaN: the tokenizer does not know them all
    DataCursor next;                // what is handed out next; between two steps a checkpoint keeps it for
                                    // dataloader_seek
    // about the data
    size_t num_tokens;
    bool masked;                    // not all tokens count in the loss:
    size_t num_counted;             // of the tokens that can be targets, so many do
    int masks_unused;               // shards whose masks MASK_NONE leaves out
    long long num_sequences;
    long long num_batches;          // global batches that cover the data once, the last one perhaps padded
    int accumulation;               // micro-batches per step and rank
    long long waits;                // how often dataloader_next found nothing read yet, except the first after a seek

    int* wait_events;               // (num_wait_events) of these waits in training, where each begins and ends; owned
    int num_wait_events;

    // internal
    const char* option;             // "--data", for messages
    DataShape shape;
    DataUse use;
    DataShard* shards;              // (num_shards) owned
    int num_shards;
    int slots;                      // micro-batches in memory: one step's, and the first of the next
    int *slot_inputs, *slot_targets;// (slots,B,T) host memory, owned
    int* slot_valid;                // (slots) owned
    const Tokenizer* tokenizer;     // not owned; NULL: no text file will come, and bytes are not counted
    uint16_t* scratch;              // (T+1) owned
    int* row;                       // (T+1) owned
    DataCursor reading;             // the micro-batch that the thread reads next, the thread's own while it runs
    pthread_t thread;
    pthread_mutex_t lock;           // guards what follows
    pthread_cond_t changed;
    long long produced, consumed;   // micro-batches read and handed out since the last seek
    long long held;                 // the first one whose slot must not be overwritten
    bool running, stopping;
    char* error;                    // why the thread gave up, owned; NULL: it did not
} DataLoader;

// ---- shards ----

static inline int* data_read_text(FileSource from, const Tokenizer* tokenizer, size_t* count) {
    size_t n;
    require_file(from, tokenizer != NULL, "is not a token file, and without a --tokenizer text has no tokens");
    char* text = file_read(from, SIZE_MAX, &n);
    size_t mark = text_mark(text, n);
    require_file(from, n > mark, "is empty");
    const char* nul = (const char*)memchr(text, 0, n);
    require_file(from, nul == NULL, "is neither a token file nor text: byte %zu is NUL",
                 nul ? (size_t)(nul - text) : 0);
    int* encoded = tokenizer_encode(tokenizer, text + mark, n - mark, count);
    free(text);
    int* tokens = new_array(int, *count + 1);
    tokens[0] = tokenizer->eot; // stands before each document, as in token files
    memcpy(tokens + 1, encoded, *count * sizeof(int));
    free(encoded);
    *count += 1;
    return tokens;
}

static inline DataShard data_shard_open(const char* path, const Tokenizer* tokenizer, MaskUse use) {
    DataShard s;
    memset(&s, 0, sizeof s);
    s.path = xstrdup(path);
    char* mask = mask_path(path);
    FileSource from = { path,
                        "--data and --val-data want token files, as dev/data/tokenize makes them, or UTF-8 text" };
    size_t n = strlen(path);
    bool is_bin = n >= 4 && strcmp(path + n - 4, ".bin") == 0; // token_file_open reports a foreign one
    const int32_t magic = TOKENS_MAGIC;
    if (is_bin || file_begins_with(from, &magic, sizeof magic)) {
        s.file = token_file_open(path);
        s.count = s.file.count;
        bool has_mask = path_exists(mask);
        if (has_mask && use != MASK_NONE) s.mask = mask_open(mask, &s.file);
        s.has_unused_mask = has_mask && use == MASK_NONE;
    } else {
        require_file(from, !file_begins_with(from, MASK_MAGIC, 8),
                     "is a mask: give the token file beside it, and the mask is found");
        s.tokens = data_read_text(from, tokenizer, &s.count);
    }
    require(use != MASK_REQUIRED || s.mask.bits,
            "--mask required: %s has no mask; make %s with dev/data/tokenize --prompt-field and --response-field", path,
            mask);
    free(mask);
    return s;
}

static inline void dataloader_open_shards(DataLoader* d, const char* pattern, const Tokenizer* tokenizer) {
    glob_t found;
    memset(&found, 0, sizeof found);
    bool literal = access(pattern, F_OK) == 0; // a name may have a bracket in it
    errno = 0;
    int rc = literal ? 0 : glob(pattern, 0, NULL, &found);
    require(rc == 0, "%s '%s': %s", d->option, pattern, too_many_files() ? open_error(errno)
            : "there is no such file; 'make' makes the default data, and any text file will do");
    d->num_shards = literal ? 1 : (int)found.gl_pathc;
    d->shards = new_array(DataShard, d->num_shards);
    files_allow((size_t)d->num_shards); // they stay open
    for (int i = 0; i < d->num_shards; i++) {
        DataShard* s = &d->shards[i];
        *s = data_shard_open(literal ? pattern : found.gl_pathv[i], tokenizer, d->shape.mask);
        bool is_other = tokenizer && s->file.tokenizer && s->file.tokenizer != tokenizer->fingerprint;
        require(!is_other,
                "%s %s: another tokenizer made its tokens; give that one as --tokenizer, or train without one: "
                "--tokenizer= --vocab-size V",
                d->option, s->path);
        s->first_sequence = d->num_sequences;
        size_t T = (size_t)d->shape.T, targets = s->count > 0 ? s->count - 1 : 0;
        // A last one may be shorter
        d->num_sequences += (long long)(d->use == DATA_TRAIN ? targets / T : ceil_div(targets, T));
        d->num_tokens += s->count;
        d->masked = d->masked || s->mask.bits != NULL;
        d->num_counted += s->mask.bits && s->count > 0 ? mask_count(&s->mask, 1, s->count - 1) : 0;
        d->masks_unused += s->has_unused_mask;
    }
    if (!literal) globfree(&found);
    for (int i = 0; i < d->num_shards && d->masked; i++)
        require(d->shards[i].mask.bits,
                "%s %s has no mask, but other shards have one: give each its mask, or --mask none, which counts all "
                "tokens",
                d->option, d->shards[i].path);
}

// Returns the checksum of a sample of each shard. (The loader's thread reads too.)
static inline uint64_t data_checksum(const DataLoader* d) {
    uint64_t sum = 0, place = 0;
    for (const DataShard* s = d->shards; s < d->shards + d->num_shards; s++, place += TOKENS_SAMPLED + 1) {
        bool complete = tokens_sample(s->file.fd, s->tokens, s->count, place, &sum);
        require_file(token_file_source(s->path), complete, "cannot be read: %s",
                     errno ? strerror(errno) : "it was cut after it was opened");
        sum += checksum_element(s->count, place + TOKENS_SAMPLED);
    }
    return sum;
}

// ---- one micro-batch ----

// Returns NULL if all ids are in the vocabulary, otherwise an error, which the caller frees.
static inline char* dataloader_check_ids(const DataLoader* d, const DataShard* s, size_t first, const int* ids,
                                         size_t n) {
    size_t i = 0;
    while (i < n && ids[i] < d->shape.V) i++;
    if (i == n) return NULL;
    return format_string("%s %s: token %zu is %d, beyond the vocabulary of %d; give the --tokenizer it was made with,"
                         " or a larger --vocab-size", d->option, s->path, first + i, ids[i], d->shape.V);
}

// The sequence at a position of an epoch: n inputs begin at token `first` of a shard, n targets one later.
// Past the end n is 0.
typedef struct { const DataShard* shard; size_t first, n; } DataWindow;
static inline DataWindow dataloader_window(const DataLoader* d, long long epoch, long long position) {
    DataWindow w = { NULL, 0, 0 };
    if (position >= d->num_sequences) return w;
    size_t T = (size_t)d->shape.T;
    uint64_t stream = STREAM_DATA + (uint64_t)epoch;
    long long sequence = d->use == DATA_EVAL ? position
        : (long long)random_permute(d->shape.seed, stream, (uint64_t)position, (uint64_t)d->num_sequences);
    int i = d->num_shards - 1;
    while (d->shards[i].first_sequence > sequence) i--;
    w.shard = &d->shards[i];
    w.first = (size_t)(sequence - w.shard->first_sequence) * T;
    w.n = size_min(T, w.shard->count - 1 - w.first);
    return w;
}

// Its targets that count.
static inline size_t data_window_targets(DataWindow w) {
    return w.n > 0 && w.shard->mask.bits ? mask_count(&w.shard->mask, w.first + 1, w.n) : w.n;
}

// Puts the sequence at a position of an epoch into inputs (T) and targets (T); *valid targets count.
// Returns NULL or an error.
static inline char* dataloader_fill_row(DataLoader* d, long long epoch, long long position, int* inputs, int* targets,
                                        int* valid) {
    size_t T = (size_t)d->shape.T;
    DataWindow w = dataloader_window(d, epoch, position);
    if (w.n > 0) {
        if (w.shard->tokens == NULL) token_file_read(&w.shard->file, w.first, w.n + 1, d->scratch);
        for (size_t i = 0; i <= w.n; i++) d->row[i] = w.shard->tokens ? w.shard->tokens[w.first + i] : d->scratch[i];
        char* error = dataloader_check_ids(d, w.shard, w.first, d->row, w.n + 1);
        if (error) return error;
        memcpy(inputs, d->row, w.n * sizeof(int));
        memcpy(targets, d->row + 1, w.n * sizeof(int));
        for (size_t t = 0; t < w.n && w.shard->mask.bits; t++)
            if (!mask_bit(&w.shard->mask, w.first + 1 + t)) targets[t] = -1;
    }
    for (size_t t = w.n; t < T; t++) { inputs[t] = 0; targets[t] = -1; }
    *valid = (int)data_window_targets(w);
    return NULL;
}

static inline char* dataloader_fill(DataLoader* d, DataCursor c, int slot) {
    size_t B = (size_t)d->shape.B, T = (size_t)d->shape.T;
    long long first = c.position + ((long long)c.micro * d->shape.ranks + d->shape.rank) * d->shape.B;
    d->slot_valid[slot] = 0;
    for (size_t b = 0; b < B; b++) {
        size_t offset = ((size_t)slot * B + b) * T;
        int valid = 0;
        char* error = dataloader_fill_row(d, c.epoch, first + (long long)b, d->slot_inputs + offset,
                                          d->slot_targets + offset, &valid);
        if (error) return error;
        d->slot_valid[slot] += valid;
    }
    return NULL;
}

// Returns the bytes of text behind the targets (n) that count. The end-of-text token counts as one byte: it separates
// two documents, and a model of bytes has the same loss per token and per byte.
static inline double dataloader_bytes(const Tokenizer* t, const int* targets, size_t n) {
    double bytes = 0;
    for (size_t i = 0; i < n; i++) {
        size_t length = 1;
        if (targets[i] < 0) continue;
        if (t == NULL || targets[i] >= t->vocab_size) return NAN;
        if (targets[i] != t->eot) tokenizer_decode(t, targets[i], &length);
        bytes += (double)length;
    }
    return bytes;
}

// Returns the micro-batch after c, for reading and for handing out.
static inline DataCursor dataloader_after(const DataLoader* d, DataCursor c) {
    if (++c.micro < d->accumulation) return c;
    c.micro = 0;
    c.position += d->shape.global_batch;
    long long needed = d->use == DATA_TRAIN ? d->shape.global_batch : 1;
    if (d->num_sequences - c.position < needed) {
        c.position = 0;
        c.epoch++;
    }
    return c;
}

// ---- the thread that reads ahead ----

static inline void* dataloader_thread(void* argument) {
    DataLoader* d = (DataLoader*)argument;
    pthread_mutex_lock(&d->lock);
    while (d->error == NULL) {
        while (!d->stopping && d->produced == d->held + d->slots) pthread_cond_wait(&d->changed, &d->lock);
        if (d->stopping) break;
        int slot = (int)(d->produced % d->slots);
        pthread_mutex_unlock(&d->lock); // no other thread uses the slot until produced counts it
        char* error = dataloader_fill(d, d->reading, slot);
        d->reading = dataloader_after(d, d->reading);
        pthread_mutex_lock(&d->lock);
        if (error == NULL) d->produced++;
        d->error = error;               // dataloader_next dies with it: only the main thread may call exit
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

static inline void dataloader_stop(DataLoader* d) {
    if (!d->running) return;
    pthread_mutex_lock(&d->lock);
    d->stopping = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->thread, NULL);
    d->running = d->stopping = false;
    free(d->error);
    d->error = NULL;
}

// ---- what a program calls ----

// Makes the next global batch the one that begins `position` sequences into an epoch: (0, 0) is the start. Both numbers
// come from a checkpoint, which may have been written with other data: a position beyond the end is an error. If too
// few sequences are left for a global batch (which may have been smaller then), the next epoch begins.
static inline void dataloader_seek(DataLoader* d, long long epoch, long long position) {
    require(epoch >= 0 && position >= 0 && position <= d->num_sequences,
            "%s: cannot continue at sequence %lld of epoch %lld: the data has %lld sequence%s; give the same data "
            "and --seq-len as before",
            d->option, position, epoch, d->num_sequences, d->num_sequences == 1 ? "" : "s");
    dataloader_stop(d);
    DataCursor before = { epoch, position - d->shape.global_batch, d->accumulation - 1 };
    d->next = d->reading = dataloader_after(d, before);
    d->produced = d->consumed = d->held = 0;
    int rc = thread_start(&d->thread, dataloader_thread, d);
    require(rc == 0, "%s: cannot start the thread that reads ahead: %s", d->option, strerror(rc));
    d->running = true;
}

// Targets that count in the loss among `sequences` that begin at a position of an epoch, those of all ranks.
static inline long long dataloader_targets_of(const DataLoader* d, long long epoch, long long position,
                                              long long sequences) {
    long long targets = 0;
    if (!d->masked && d->use == DATA_TRAIN) return sequences * d->shape.T;
    for (long long i = 0; i < sequences; i++)
        targets += (long long)data_window_targets(dataloader_window(d, epoch, position + i));
    return targets;
}
// Of the next global batch: of all ranks and micro-batches, before any of them is read. Nothing is communicated.
static inline long long dataloader_targets(const DataLoader* d) {
    return dataloader_targets_of(d, d->next.epoch, d->next.position, d->shape.global_batch);
}

// Returns the seconds that training waited for data since the last call. The device has passed these waits.
static inline double dataloader_waited(DataLoader* d) {
    double seconds = 0;
    for (int i = 0; i < d->num_wait_events; i += 2) {
        seconds += device_event_seconds(d->wait_events[i], d->wait_events[i + 1]);
        device_event_free(d->wait_events[i]);
        device_event_free(d->wait_events[i + 1]);
    }
    d->num_wait_events = 0;
    return seconds;
}

// Hands out the next micro-batch: inputs, targets, valid.
static inline void dataloader_next(DataLoader* d) {
    bool new_step = d->next.micro == 0;
    if (new_step) device_synchronize(); // else the thread would overwrite what is still being copied
    pthread_mutex_lock(&d->lock);
    if (new_step) d->held = d->consumed;
    pthread_cond_broadcast(&d->changed);
    if (d->produced == d->consumed && d->consumed > 0) d->waits++;
    int begun = d->produced == d->consumed && d->use == DATA_TRAIN ? device_event() : -1;
    while (d->produced == d->consumed && d->error == NULL) pthread_cond_wait(&d->changed, &d->lock);
    bool failed = d->produced == d->consumed;
    int slot = (int)(d->consumed % d->slots);
    d->consumed++;
    pthread_mutex_unlock(&d->lock);
    if (failed) {
        pthread_join(d->thread, NULL);
        die("%s", d->error);
    }
    if (begun >= 0) { // on a GPU the wait counts from where the GPU has run out of work
        d->wait_events = (int*)xrealloc(d->wait_events, (size_t)(d->num_wait_events + 2) * sizeof(int));
        d->wait_events[d->num_wait_events++] = begun;
        d->wait_events[d->num_wait_events++] = device_event();
    }
    size_t offset = (size_t)slot * (size_t)d->shape.B * (size_t)d->shape.T;
    d->inputs = d->slot_inputs + offset;
    d->targets = d->slot_targets + offset;
    d->valid = d->slot_valid[slot];
    if (d->use == DATA_EVAL)
        d->bytes = dataloader_bytes(d->tokenizer, d->targets, (size_t)d->shape.B * (size_t)d->shape.T);
    d->next = dataloader_after(d, d->next);
}

static inline void dataloader_check(const DataLoader* d, const char* pattern) {
    DataShape s = d->shape;
    require(!d->masked || d->num_counted > 0,
            "%s '%s': no token counts in the loss, by the mask; give data with responses, or --mask none, which counts "
            "all tokens",
            d->option, pattern);
    if (d->use == DATA_EVAL) {
        require(d->num_sequences > 0,
                "%s '%s': %zu token%s found, at least 2 are needed: one to read and one to predict", d->option,
                pattern, d->num_tokens, d->num_tokens == 1 ? " was" : "s were");
        return;
    }
    require(d->num_sequences >= s.global_batch,
            "%s '%s': %zu tokens (in %d shard%s) make %lld sequence%s of --seq-len %d and a last target, but a step on "
            "%d rank%s needs %lld; give more data,%s or a smaller --seq-len, --batch-size or --total-batch-size",
            d->option, pattern, d->num_tokens, d->num_shards, d->num_shards == 1 ? "" : "s", d->num_sequences,
            d->num_sequences == 1 ? "" : "s", s.T, s.ranks, s.ranks > 1 ? "s" : "", s.global_batch,
            s.ranks > 1 ? " fewer ranks," : "");
}

// Opens a .bin, a glob of .bin shards (in the order of their names) or a text file (tokenised in memory), and starts
// reading at the first sequence of epoch 0. option is what messages call it: "--data". It and the tokenizer stay the
// caller's; the tokenizer may be NULL if no text file will come and nothing reads `bytes`.
static inline void dataloader_init(DataLoader* d, const char* option, const char* pattern, const Tokenizer* tokenizer,
                                   DataShape s, DataUse use) {
    memset(d, 0, sizeof *d);
    d->option = option;
    d->shape = s;
    d->use = use;
    d->tokenizer = tokenizer;
    dataloader_open_shards(d, pattern, tokenizer);
    dataloader_check(d, pattern);
    d->accumulation = (int)(s.global_batch / ((long long)s.B * s.ranks));
    d->num_batches = (d->num_sequences + s.global_batch - 1) / s.global_batch;
    d->slots = d->accumulation + 1;
    size_t elements = (size_t)d->slots * (size_t)s.B * (size_t)s.T;
    d->slot_inputs = (int*)host_alloc(elements * sizeof(int));
    d->slot_targets = (int*)host_alloc(elements * sizeof(int));
    d->slot_valid = new_array(int, d->slots);
    d->scratch = new_array(uint16_t, s.T + 1);
    d->row = new_array(int, s.T + 1);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    dataloader_seek(d, 0, 0);
}

static inline void dataloader_free(DataLoader* d) {
    dataloader_stop(d);
    for (int i = 0; i < d->num_shards; i++) {
        if (d->shards[i].tokens == NULL) token_file_close(&d->shards[i].file);
        mask_close(&d->shards[i].mask);
        free(d->shards[i].tokens);
        free(d->shards[i].path);
    }
    free(d->shards);
    host_free(d->slot_inputs);
    host_free(d->slot_targets);
    free(d->slot_valid);
    free(d->scratch);
    free(d->row);
    for (int i = 0; i < d->num_wait_events; i++) device_event_free(d->wait_events[i]);
    free(d->wait_events);
    pthread_mutex_destroy(&d->lock);
    pthread_cond_destroy(&d->changed);
    memset(d, 0, sizeof *d);
}
#endif
