/*
report.h - prints what a run is at its start, and at its end the memory that was predicted next to the memory measured.
A difference between the two is a bug in a formula or in the program.
*/
#ifndef LLMC_REPORT_H
#define LLMC_REPORT_H
#include "../base/json.h"
#include "../base/precision.h"
#include "../data/dataloader.h"
#include "../device/device.h"
#include "../device/layers.h"
#include "../model/gpt2.h"
#include "../model/training_options.h"

// Returns the sum over the device's memory, without what is on the host.
static inline size_t memory_sum(const size_t bytes[MEMORY_KINDS]) {
    size_t total = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) if (!memory_is_on_host(k)) total += bytes[k];
    return total;
}

// The bytes of it that are still to be allocated; true if there is room for them.
static inline size_t memory_missing(const size_t predicted[MEMORY_KINDS]) {
    return memory_sum(predicted) - device_memory_total();
}
static inline bool memory_fits(const size_t predicted[MEMORY_KINDS]) {
    return memory_missing(predicted) <= device_memory_available();
}
static inline bool computes_on_cpu(void) { return strncmp(device_name(), "CPU", 3) == 0; }
// The host's bytes that are still to be allocated.
static inline size_t host_memory_missing(const size_t predicted[MEMORY_KINDS]) {
    size_t on_host = predicted[MEMORY_OFFLOADED] + predicted[MEMORY_SNAPSHOT];
    return on_host + (computes_on_cpu() ? memory_missing(predicted) : 0);
}

// Prints the model, the device, and the bytes that a rank will take there (as text) and on the host.
static inline void report_run(GPT2Config c, const char* memory, size_t on_host, long long tokens_per_step,
                              int accumulation, int recompute) {
    char offloaded[32];
    printf("model      %d layer%s, %d head%s, %d channels, vocabulary %d, context %d: %zu parameters\n",
           c.L, c.L == 1 ? "" : "s", c.NH, c.NH == 1 ? "" : "s", c.C, c.V, c.max_T, gpt2_num_parameters(c));
    printf("device     %s; " FLOATX_NAME "; %s\n", device_name(), layers_description());
    printf("step       %lld tokens in %d micro-batch%s per rank\n", tokens_per_step, accumulation,
           accumulation == 1 ? "" : "es");
    printf("memory     %s per rank", memory);
    if (on_host > 0) printf(", and %s on the host", format_bytes(offloaded, sizeof offloaded, (double)on_host));
    printf("%s\n", recompute == RECOMPUTE_BLOCK ? "; blocks are recomputed" : "");
    fflush(stdout);
}

// Prints how many tokens of the data count in the loss, if there is a mask.
static inline void report_mask(const DataLoader* d) {
    size_t targets = d->num_tokens - (size_t)d->num_shards; // a shard's first token is none
    if (d->masked) printf("mask       %s: %zu of %zu tokens count in the loss\n", d->option, d->num_counted, targets);
    if (d->masks_unused)
        printf("mask       %s: its mask is ignored (--mask none): all %zu tokens count in the loss\n", d->option,
               targets);
    fflush(stdout);
}

// The same for metrics.jsonl's first line; the caller owns the object.
static inline json_t* run_record(GPT2Config c, const size_t predicted[MEMORY_KINDS], int world_size) {
    json_t* memory = json_object();
    for (int k = 0; k < MEMORY_KINDS; k++)
        json_object_set_new(memory, memory_kind_names[k], json_integer((json_int_t)predicted[k]));
    return json_pack("{si, so, ss, si, si, si, si, si, sI, so}", "world_size", world_size, "device",
                     json_text(device_name()), "precision", FLOATX_NAME, "layers", c.L, "heads", c.NH, "channels", c.C,
                     "vocabulary", c.V, "context", c.max_T, "parameters", (json_int_t)gpt2_num_parameters(c),
                     "predicted_bytes", memory);
}

// One row: bytes predicted, bytes measured. Returns true if they are the same.
static inline bool report_row(const char* name, size_t predicted, size_t measured) {
    char p[32], m[32];
    format_bytes(p, sizeof p, (double)predicted);
    format_bytes(m, sizeof m, (double)measured);
    printf("  %-24s %12s %12s   ", name, p, m);
    if (predicted == measured) printf("as predicted\n");
    else printf("%zu bytes %s than predicted\n", measured > predicted ? measured - predicted : predicted - measured,
                measured > predicted ? "more" : "less");
    return predicted == measured;
}

static inline void report_header(const char* what) { printf("%-26s %12s %12s\n", what, "predicted", "measured"); }

// Device memory of a rank: by kind as it is now, and its peak, which is their sum if everything is allocated once.
typedef struct {
    int rank;
    bool named;                     // other ranks have more or less, or only this one is not as predicted
    size_t predicted[MEMORY_KINDS], measured[MEMORY_KINDS], total, peak, seen;
} RankMemory;
static inline RankMemory rank_memory(int rank, const size_t predicted[MEMORY_KINDS]) {
    RankMemory m;
    memset(&m, 0, sizeof m); // its padding is also sent
    m.rank = rank;
    memcpy(m.predicted, predicted, sizeof m.predicted);
    for (int k = 0; k < MEMORY_KINDS; k++) m.measured[k] = device_memory((MemoryKind)k);
    m.total = device_memory_total();
    m.peak = device_memory_peak();
    m.seen = device_memory_seen();
    return m;
}
static inline bool memory_as_predicted(const RankMemory* m) {
    size_t sum = memory_sum(m->predicted);
    return memcmp(m->predicted, m->measured, sizeof m->predicted) == 0 && m->total == sum && m->peak == sum;
}

// The row of a kind, if there is any of it.
static inline void report_kind(const RankMemory* m, MemoryKind k) {
    if (m->predicted[k] > 0 || m->measured[k] > 0) report_row(memory_kind_names[k], m->predicted[k], m->measured[k]);
}
// Prints the memory of a rank; at the end what is on the host, and the memory that the system counts.
// Returns true if all is as predicted.
static inline bool report_rank_memory(const RankMemory* m) {
    char what[48] = "memory per rank";
    bool good = memory_as_predicted(m);
    if (m->named) snprintf(what, sizeof what, "memory of rank %d%s", m->rank, good ? ", most" : "");
    report_header(what);
    for (int k = 0; k < MEMORY_KINDS; k++) if (!memory_is_on_host(k)) report_kind(m, (MemoryKind)k);
    report_row("total", memory_sum(m->predicted), m->total);
    report_row("peak", memory_sum(m->predicted), m->peak);
    for (int k = 0; k < MEMORY_KINDS; k++) if (memory_is_on_host(k)) report_kind(m, (MemoryKind)k);
    char seen[32];
    format_bytes(seen, sizeof seen, (double)m->seen);
    if (m->seen > 0) printf("  %-24s %12s %12s   %s\n", "as the system sees it", "", seen, device_memory_seen_with());
    return good;
}
#endif
