/*
agree.h - ranks compare what must be the same on all of them, with --check-every also the state of training while it runs.
Messages name a rank that differs and what differs. (run/facts.h compares options, program, model and data at the start.)
*/
#ifndef LLMC_AGREE_H
#define LLMC_AGREE_H
#include "../base/checksum.h"
#include "../device/device.h"
#include "control.h"

// Compares another rank's bytes with what this one has, in `self`. Returns the difference in words, which the caller frees,
// or NULL if there is none.
typedef char* AgreeCompare(void* self, ControlBytes theirs, int rank);
typedef struct { AgreeCompare* compare; void* self; } Agreement;

// self: Agreement. The answer is the first difference in words, or empty.
static inline ControlBytes agree_decide(void* self, const ControlBytes* given, int size) {
    const Agreement* a = (const Agreement*)self;
    char* difference = NULL;
    for (int q = 1; q < size && difference == NULL; q++) difference = a->compare(a->self, given[q], q);
    ControlBytes answer = control_bytes(difference, difference ? strlen(difference) : 0);
    free(difference);
    return answer;
}

// Dies on every rank, with the first difference that rank 0 finds and what to do about it, unless the ranks' bytes agree.
static inline void require_same(Control* c, const void* data, size_t bytes, AgreeCompare* compare, void* self,
                                const char* what_to_do) {
    Agreement a = { compare, self };
    ControlBytes difference = control_decide(c, data, bytes, agree_decide, &a);
    require(difference.bytes == 0, "%s%s", difference.data, what_to_do);
    free(difference.data);
}

// ---- while training ----

// Checksum of n elements of `size` bytes in device memory; the first is number `place` of a larger sum. host (bytes): scratch.
static inline uint64_t device_checksum_by(const void* device, size_t size, size_t n, uint64_t place, void* host, size_t bytes) {
    uint64_t sum = 0;
    for (size_t done = 0, count; done < n; done += count) {
        count = size_min(n - done, bytes / size);
        device_to_host(host, (const char*)device + done * size, count * size);
        sum += checksum_elements(host, size, count, place + done);
    }
    return sum;
}
// The same of all there are.
static inline uint64_t device_checksum(const void* device, size_t size, size_t n) {
    const size_t staged = 1 << 22; // bytes
    void* host = xcalloc(staged, 1);
    uint64_t sum = device_checksum_by(device, size, n, 0, host, staged);
    free(host);
    return sum;
}

typedef struct { const char* what; int n, parts; long long step; } UnitSums;

// self: UnitSums; given: sums (n). The answer is the first difference in words, or empty.
static inline ControlBytes units_decide(void* self, const ControlBytes* given, int size) {
    const UnitSums* s = (const UnitSums*)self;
    for (int q = s->parts; q < size; q++) {
        int first = q % s->parts, u = 0;
        const size_t one = sizeof(uint64_t);
        while (u < s->n && memcmp(given[q].data + (size_t)u * one, given[first].data + (size_t)u * one, one) == 0) u++;
        if (u == s->n) continue;
        char* difference = format_string("after step %lld the %s of unit %d differ between rank %d and rank %d",
                                         s->step, s->what, u, first, q);
        ControlBytes answer = control_bytes(difference, strlen(difference));
        free(difference);
        return answer;
    }
    return control_bytes(NULL, 0);
}

// Dies on every rank, naming ranks and unit, unless each rank's sums (n) are those of rank number rank % parts; sums[i] belongs
// to unit i. parts 1: unless they are the same everywhere.
static inline void require_same_units(Control* c, const char* what, const uint64_t* sums, int n, int parts, long long step) {
    UnitSums mine = { what, n, parts, step };
    ControlBytes difference = control_decide(c, sums, (size_t)n * sizeof *sums, units_decide, &mine);
    require(difference.bytes == 0, "%s: memory, the network or the program is at fault; continue from the last checkpoint"
            " with --resume", difference.data);
    free(difference.data);
}
#endif
