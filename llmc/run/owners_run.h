/*
owners_run.h - the answer of --predict (predict.h) for Muon, whose ranks keep, send and compute different amounts.
*/
#ifndef LLMC_OWNERS_RUN_H
#define LLMC_OWNERS_RUN_H
#include "../parallel/owners.h"
#include "ranks_run.h"

// What a rank has to do in a step.
typedef struct {
    size_t held, owned;     // elements of a rank's pieces, and of the matrices that it orthogonalises
    size_t there, here;     // elements that it sends to owners, and receives as one
    size_t adamw;           // elements of its shards that AdamW updates
} OwnerLoad;

static inline OwnerLoad owners_load(const Owners* o, int q) {
    OwnerLoad l = { 0, 0, 0, 0, 0 };
    size_t both = 0; // elements of its pieces that it owns
    for (int i = 0; i < o->count; i++) {
        size_t n = owners_piece(o, i, q).n;
        l.held += n;
        if (!o->all_own && o->m[i].owner != q) continue;
        l.owned += matrix_elements(o->m[i]);
        both += n;
    }
    l.there = o->all_own ? l.held * (size_t)(o->N - 1) : l.held - both;
    l.here = l.owned - both;
    for (int u = 0; u < gpt2_num_units(o->config); u++) {
        size_t shard = shard_elements(o->config, u, o->N), size = unit_elements(o->config, u);
        l.adamw += size_min(shard, size - size_min(size, (size_t)q * shard));
    }
    l.adamw -= l.held;
    return l;
}

// Frees the tables, because the program will be configured as the rank that is returned.
static inline int owners_fullest(void* self) {
    Owners* o = (Owners*)self;
    size_t most = 0;
    int fullest = 0;
    for (int q = 0; q < o->N; q++) {
        OwnerLoad l = owners_load(o, q);
        size_t bytes = (l.held + l.owned) * sizeof(floatNS) + l.adamw * sizeof(float); // all else is equal
        if (bytes > most) fullest = q;
        most = size_max(bytes, most);
    }
    owners_free(o);
    return fullest;
}

// FLOPs: Newton-Schulz of the busiest rank. message: bytes that the busiest rank sends or receives in one of the
// all-to-alls. sent: bytes that ranks send in all of them, the mean and the most. Frees the tables.
static inline json_t* owners_predict_busiest(const void* self) {
    Owners last = *(const Owners*)self, *o = &last;
    double flops = 0, all = 0;
    size_t message = 0, most = 0;
    for (int q = 0; q < o->N; q++) {
        OwnerLoad l = owners_load(o, q);
        size_t sent = l.there + (o->all_own ? 0 : l.here);
        flops = fmax(flops, o->flops[q]);
        message = size_max(message, size_max(l.there, l.here));
        most = size_max(most, sent);
        all += (double)sent;
    }
    owners_free(o);
    double X = sizeof(floatNS);
    return json_pack("{s:f, s:f, s:f, s:f}", "flops", flops, "message", X * (double)message,
                     "sent_mean", X * all / o->N, "sent_most", X * (double)most);
}

// Call when the owners are chosen. scratch: the bytes that Muon allocates.
static inline void owners_predict(Owners* o, Run* run, size_t scratch) {
    run->ranks->scratch = scratch;
    run->ranks->sharing.self = o;
    run->ranks->sharing.fullest = owners_fullest;
    run->ranks->sharing.predict = owners_predict_busiest;
}
#endif
