/*
consistency.h - ranks compare state that must be the same on all of them; with --check-every also while training runs.
Messages name a rank that differs and the difference. At the start these are a run's options, program, model and data.
*/
#ifndef LLMC_CONSISTENCY_H
#define LLMC_CONSISTENCY_H
#include "../base/checksum.h"
#include "../base/folder.h"
#include "../base/json.h"
#include "../base/options.h"
#include "../comm/control.h"
#include "../data/dataloader.h"
#include "../model/gpt2.h"
#include "../save/train_state.h"

// ---- at the start ----
// Returns the checksum of this program's executable file, which differs between two builds.
static inline uint64_t program_checksum(void) {
    size_t n;
    char* bytes = file_read(file_source("/proc/self/exe", "it is this program"), SIZE_MAX, &n);
    uint64_t sum = checksum_elements(bytes, 1, n, 0);
    free(bytes);
    return sum;
}

// Returns the options, program, model and data of this rank, as an object. data_sum: data_checksum of the data.
static inline json_t* run_facts(const OptionTable* t, GPT2Config c, const DataLoader* data, uint64_t data_sum) {
    json_t* facts = json_object();
    uint64_t mask = 0; // 0: there is none
    for (int i = 0; i < t->count; i++) {
        char* key = format_string("--%s", t->specs[i].name);
        char value[512];
        option_format(&t->specs[i], value, sizeof value);
        json_object_set_new(facts, key, json_text(value));
        free(key);
    }
    for (int i = 0; i < data->num_shards && data->masked; i++)
        mask += checksum_element(data->shards[i].mask.checksum, (uint64_t)i);
    const struct { const char* name; uint64_t sum; } checksums[] = {
        { "the program (as a checksum)", program_checksum() }, { "the data of --data (as a checksum)", data_sum },
        { "the mask of --data (as a checksum)", mask },
        { "the model's shape (as a checksum)", checksum_elements(&c, sizeof(int), sizeof c / sizeof(int), 0) }
    };
    for (int i = 0; i < 4; i++) json_object_set_new(facts, checksums[i].name, checkpoint_hex(checksums[i].sum));
    return facts;
}

// Returns the first of rank 0's facts that is another on this rank, in words, which the caller frees, or NULL.
static inline char* facts_compare(json_t* mine, ControlBytes bytes, int rank) {
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

// Dies on every rank unless all have the same options, program, model and data. Collective.
static inline void require_same_run(Control* c, const OptionTable* t, GPT2Config config, const DataLoader* data,
                                    uint64_t data_sum) {
    json_t* facts = run_facts(t, config, data, data_sum);
    char *text = json_dumps(facts, JSON_COMPACT | JSON_SORT_KEYS), *difference = NULL;
    ControlBytes* given = control_gather(c, text, strlen(text));
    for (int q = 1; given && q < c->ranks.size && difference == NULL; q++)
        difference = facts_compare(facts, given[q], q);
    control_gathered_free(c, given);
    control_die_together(c, difference, "; start all of them with one command, from one build and with one data set");
    free(text);
    json_decref(facts);
}

// "rank 5 on node2 (dp 1, pp 0, tp 1)"; without a mesh and on one machine "rank 5"
typedef struct { char text[WATCHDOG_NAME + 20]; } RankLabel;
static inline RankLabel rank_label(const Control* c, int r) {
    RankLabel a;
    int n = snprintf(a.text, sizeof a.text, "rank %d", r);
    watchdog_name(c, r, a.text + n, sizeof a.text - (size_t)n);
    return a;
}

// ---- messages ----
// Returns how many messages rank `from` has sent to rank `to`, or the other way received from it, on a communicator.
static inline long long messages_counted(ControlBytes channels, OpWay way, const char* communicator, int other) {
    const OpChannel *all = (const OpChannel*)(void*)channels.data, *end = all + channels.bytes / sizeof *all;
    for (const OpChannel* k = all; k < end; k++)
        if (k->way == (int)way && k->peer == other && strcmp(k->communicator, communicator) == 0) return k->issued;
    return 0;
}
// Returns, on rank 0, the first pair of ranks whose counts differ, in words, which the caller frees; NULL: no pair.
// given: OpChannels.
static inline char* first_lost_message(const Control* c, const ControlBytes* given, long long step) {
    for (int q = 0; given && q < c->ranks.size; q++) {
        const OpChannel *all = (const OpChannel*)(void*)given[q].data, *end = all + given[q].bytes / sizeof *all;
        for (const OpChannel* k = all; k < end; k++) {
            if (k->way == WAY_COLLECTIVE) continue;
            bool sends = k->way == WAY_SEND;
            long long theirs = messages_counted(given[k->peer], sends ? WAY_RECEIVE : WAY_SEND, k->communicator, q);
            if (k->issued == theirs) continue;
            long long sent = sends ? k->issued : theirs, received = sends ? theirs : k->issued;
            RankLabel from = rank_label(c, sends ? q : k->peer), to = rank_label(c, sends ? k->peer : q);
            return format_string("after step %lld: %lld message%s went from %s to %s of %s, and %lld %s received",
                                 step, sent, sent == 1 ? "" : "s", from.text, to.text, k->communicator, received,
                                 received == 1 ? "was" : "were");
        }
    }
    return NULL;
}
// Dies on every rank unless each message that was sent was also received. Small messages wait in buffers: if a receive
// is left out, nobody waits, and every later one takes the message before its own. Collective; call it while no message
// is under way.
static inline void require_same_messages(Control* c, long long step) {
    pthread_mutex_lock(&c->recorder.lock);
    ControlBytes mine = control_bytes(c->recorder.channels, (size_t)c->recorder.num_channels * sizeof(OpChannel));
    pthread_mutex_unlock(&c->recorder.lock);
    ControlBytes* given = control_gather(c, mine.data, mine.bytes);
    free(mine.data);
    char* error = first_lost_message(c, given, step);
    control_gathered_free(c, given);
    control_die_together(c, error,
                         ": a receive was left out, and later ones took messages of other actions; the program is at "
                         "fault");
}

// ---- while training ----

#define UNIT_ELSEWHERE UINT64_MAX // instead of a sum

// Dies on every rank, naming ranks and unit, unless each rank's sums (n) are those of rank number rank % parts; sums[i]
// belongs to unit i. parts 1: unless they are the same everywhere. A rank that does not store a unit gives
// UNIT_ELSEWHERE.
static inline void require_same_units(Control* c, const char* what, const uint64_t* sums, int n, int parts,
                                      long long step) {
    uint64_t* all = (uint64_t*)control_gather_array(c, sums, (size_t)n * sizeof *sums); // (ranks,n)
    char* error = NULL;
    for (int q = parts; all && q < c->ranks.size; q++)
        for (int u = 0; u < n && error == NULL; u++) {
            int first = q % parts;
            while (first < q && all[first * n + u] == UNIT_ELSEWHERE) first += parts;
            if (all[q * n + u] == all[first * n + u] || all[q * n + u] == UNIT_ELSEWHERE) continue;
            RankLabel a = rank_label(c, first), b = rank_label(c, q);
            error = format_string("after step %lld the %s of unit %d differ between %s and %s", step, what, u, a.text,
                                  b.text);
        }
    free(all);
    control_die_together(c, error,
                         ": memory, the network or the program is at fault; continue from the last checkpoint with "
                         "--resume");
}
#endif
