/*
run_fingerprint.h - the facts of a run that must be the same on all ranks when it starts: its options, program, model
and data.
*/
#ifndef LLMC_RUN_FINGERPRINT_H
#define LLMC_RUN_FINGERPRINT_H
#include "../base/checksum.h"
#include "../base/folder.h"
#include "../base/json.h"
#include "../base/options.h"
#include "../data/dataloader.h"
#include "../model/gpt2.h"
#include "../save/train_state.h"
#include "../watch/control.h"

// Returns the first of rank 0's facts that is another on this rank, in words, which the caller frees, or NULL.
static inline char* fingerprint_compare(json_t* mine, ControlBytes bytes, int rank) {
    json_t *theirs = json_loadb(bytes.data, bytes.bytes, 0, NULL), *value;
    char* difference = NULL;
    const char* key;
    json_object_foreach(mine, key, value) {
        json_t* other = json_object_get(theirs, key);
        if (difference || json_equal(value, other)) continue;
        char* here = json_dumps(value, JSON_ENCODE_ANY);
        char* there = other ? json_dumps(other, JSON_ENCODE_ANY) : xstrdup("nothing");
        difference = format_string("the ranks do not agree: %s is %s on rank 0 and %s on rank %d", key, here, there,
                                   rank);
        free(here);
        free(there);
    }
    json_decref(theirs);
    return difference;
}

// Dies on every rank if the facts (an object, taken over) are not the same on all of them.
static inline void require_same_fingerprint(Control* c, json_t* facts) {
    char *text = json_dumps(facts, JSON_COMPACT | JSON_SORT_KEYS), *difference = NULL;
    ControlBytes* given = control_gather(c, text, strlen(text));
    for (int q = 1; given && q < c->ranks.size && difference == NULL; q++)
        difference = fingerprint_compare(facts, given[q], q);
    control_gathered_free(c, given);
    control_die_together(c, difference, "; start all of them with one command, from one build and with one data set");
    free(text);
    json_decref(facts);
}

// Returns the checksum of this program's executable file, which differs between two builds.
static inline uint64_t program_checksum(void) {
    size_t n;
    char* bytes = file_read(file_source("/proc/self/exe", "it is this program"), SIZE_MAX, &n);
    uint64_t sum = checksum_elements(bytes, 1, n, 0);
    free(bytes);
    return sum;
}

// Returns the checksum of the shards' masks; 0: there is none.
static inline uint64_t data_mask_checksum(const DataLoader* d) {
    uint64_t sum = 0;
    for (int i = 0; i < d->num_shards && d->masked; i++)
        sum += checksum_element(d->shards[i].mask.checksum, (uint64_t)i);
    return sum;
}

static inline void fingerprint_add(json_t* facts, const char* key, uint64_t value) {
    json_object_set_new(facts, key, checkpoint_hex(value));
}

// Returns the options, program, model and data of this rank.
static inline json_t* run_fingerprint(const OptionTable* t, GPT2Config c, const DataLoader* data, uint64_t data_sum) {
    json_t* facts = json_object();
    for (int i = 0; i < t->count; i++) {
        char* key = format_string("--%s", t->specs[i].name);
        char value[512];
        option_format(&t->specs[i], value, sizeof value);
        json_object_set_new(facts, key, json_text(value));
        free(key);
    }
    fingerprint_add(facts, "the program (as a checksum)", program_checksum());
    fingerprint_add(facts, "the data of --data (as a checksum)", data_sum);
    fingerprint_add(facts, "the mask of --data (as a checksum)", data_mask_checksum(data));
    fingerprint_add(facts, "the model's shape (as a checksum)",
                    checksum_elements(&c, sizeof(int), sizeof c / sizeof(int), 0));
    return facts;
}
#endif
