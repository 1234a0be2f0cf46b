/*
owners_run.h - the answer of --predict (predict.h) for Muon, whose ranks keep, send and compute different amounts.
*/
#ifndef LLMC_OWNERS_RUN_H
#define LLMC_OWNERS_RUN_H
#include "../parallel/owners.h"
#include "ranks_run.h"

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
// all-to-alls. sent: bytes that ranks send in all of them, the mean and the most.
static inline json_t* owners_predict_busiest(const void* self) {
    const Owners* o = (const Owners*)self;
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
