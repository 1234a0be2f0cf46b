/*
agree.h - what must be the same on all ranks: at the start the program, its options and its data; with --check-every also
the state of training while it runs. Messages name a rank that differs and what differs.
*/
#ifndef LLMC_AGREE_H
#define LLMC_AGREE_H
#include "../save/checkpoint.h"
#include "control.h"
#include "../data/dataloader.h"
#include "../run/logger.h"

// Compares another rank's bytes with what this one has, in `self`. Returns the difference in words (the caller frees it) or NULL.
typedef char* AgreeCompare(void* self, ControlBytes theirs, int rank);

// Dies on every rank, with the first difference that rank 0 finds and what to do about it, unless the ranks' bytes agree.
static inline void require_same(Control* c, const void* data, size_t bytes, AgreeCompare* compare, void* self, const char* what_to_do) {
    ControlBytes* parts = (ControlBytes*)xcalloc((size_t)c->ranks.size, sizeof(ControlBytes));
    control_gather(c, data, bytes, c->ranks.rank == 0 ? parts : NULL);
    char* difference = NULL;
    for (int q = 1; c->ranks.rank == 0 && q < c->ranks.size && difference == NULL; q++) difference = compare(self, parts[q], q);
    const char* verdict = difference ? difference : "";
    ControlBytes told = control_broadcast(c, verdict, strlen(verdict));
    if (c->ranks.rank > 0) verdict = told.data;
    require(verdict[0] == '\0', "%s%s", verdict, what_to_do);
    for (int q = 0; q < c->ranks.size; q++) free(parts[q].data);
    free(told.data);
    free(parts);
    free(difference);
}

// ---- at the start ----

// self: rank 0's facts (json_t, an object).
static inline char* facts_compare(void* self, ControlBytes bytes, int rank) {
    json_t *mine = (json_t*)self, *theirs = json_loadb(bytes.data, bytes.bytes, 0, NULL), *value;
    char* difference = NULL;
    const char* key;
    json_object_foreach(mine, key, value) {
        json_t* other = json_object_get(theirs, key);
        if (difference || json_equal(value, other)) continue;
        char *here = json_dumps(value, JSON_ENCODE_ANY), *there = other ? json_dumps(other, JSON_ENCODE_ANY) : xstrdup("nothing");
        difference = format_string("the ranks do not agree: %s is %s on rank 0 and %s on rank %d", key, here, there, rank);
        free(here);
        free(there);
    }
    json_decref(theirs);
    return difference;
}

// Dies on every rank if the facts (an object, taken over) are not the same on all of them.
static inline void require_agreement(Control* c, json_t* facts) {
    char* text = json_dumps(facts, JSON_COMPACT | JSON_SORT_KEYS);
    require_same(c, text, strlen(text), facts_compare, facts,
                 "; start all of them with one command, from one build and with one data set");
    free(text);
    json_decref(facts);
}

// Checksum of this program's executable file, which differs between two builds.
static inline uint64_t program_checksum(void) {
    size_t n;
    FileSource from = { "/proc/self/exe", "it is this program" };
    char* bytes = file_read(from, SIZE_MAX, &n);
    uint64_t sum = checksum_elements(bytes, 1, n, 0);
    free(bytes);
    return sum;
}

// Checksum of a sample of the data: 64 spans of up to 64 tokens, spread over each shard. The loader's thread reads at the
// same time, so this has its own buffers.
static inline uint64_t data_checksum(const DataLoader* d) {
    enum { SPAN = 64, SPANS = 64 };
    uint16_t scratch[SPAN];
    int tokens[SPAN];
    uint64_t sum = 0, place = 0;
    for (int i = 0; i < d->num_shards; i++) {
        const DataShard* s = &d->shards[i];
        size_t n = size_min(SPAN, s->count);
        for (size_t k = 0; k < SPANS; k++, place += SPAN) {
            data_shard_read(s, (s->count - n) * k / (SPANS - 1), n, scratch, tokens);
            sum += checksum_elements(tokens, sizeof(int), n, place);
        }
        sum += checksum_element(s->count, place++);
    }
    return sum;
}

static inline void agree_add(json_t* facts, const char* key, uint64_t value) { json_object_set_new(facts, key, checkpoint_hex(value)); }

// The options, program, model and data of this rank.
static inline json_t* run_facts(const OptionTable* t, GPT2Config c, const DataLoader* data) {
    json_t* facts = json_object();
    for (int i = 0; i < t->count; i++) {
        char* key = format_string("--%s", t->specs[i].name);
        char value[512];
        option_format(&t->specs[i], value, sizeof value);
        json_object_set_new(facts, key, json_text(value));
        free(key);
    }
    agree_add(facts, "the program (as a checksum)", program_checksum());
    agree_add(facts, "the data of --data (as a checksum)", data_checksum(data));
    agree_add(facts, "the model's shape (as a checksum)", checksum_elements(&c, sizeof(int), sizeof c / sizeof(int), 0));
    return facts;
}

// ---- while training ----

// Checksum of n elements of `size` bytes in device memory; the first is number `place` of a larger sum. host (bytes): scratch.
static inline uint64_t device_checksum(const void* device, size_t size, size_t n, uint64_t place, void* host, size_t bytes) {
    uint64_t sum = 0;
    for (size_t done = 0, count; done < n; done += count) {
        count = size_min(n - done, bytes / size);
        device_to_host(host, (const char*)device + done * size, count * size);
        sum += checksum_elements(host, size, count, place + done);
    }
    return sum;
}

typedef struct { const char* what; const uint64_t* sums; int n; long long step; } UnitSums; // sums (n): one per unit

// self: rank 0's UnitSums.
static inline char* units_compare(void* self, ControlBytes bytes, int rank) {
    const UnitSums* mine = (const UnitSums*)self;
    for (int u = 0; u < mine->n; u++) {
        uint64_t theirs;
        memcpy(&theirs, bytes.data + (size_t)u * sizeof theirs, sizeof theirs);
        if (theirs != mine->sums[u]) return format_string("after step %lld the %s of unit %d differ between rank 0 and rank %d",
                                                          mine->step, mine->what, u, rank);
    }
    return NULL;
}

// Dies on every rank, naming rank and unit, unless sums (n) are the same everywhere; sums[i] belongs to unit i.
static inline void require_same_units(Control* c, const char* what, const uint64_t* sums, int n, long long step) {
    UnitSums mine = { what, sums, n, step };
    require_same(c, sums, (size_t)n * sizeof *sums, units_compare, &mine,
                 ": memory, the network or the program is at fault; continue from the last checkpoint with --resume");
}
#endif
