/*
owners_run.h - the answer of --predict (predict.h) for Muon, whose ranks send and compute different amounts. Rank 0
keeps most: the vectors, which have a second moment, come first in every unit.
*/
#ifndef LLMC_OWNERS_RUN_H
#define LLMC_OWNERS_RUN_H
#include "../parallel/owners.h"
#include "ranks_run.h"

// flops: Newton-Schulz of the busiest rank. message: bytes that the busiest rank sends or receives in one of the
// all-to-alls. sent: bytes that ranks send in all of them, the mean and the most. Frees the tables.
static inline json_t* owners_busiest(const void* self) {
    Owners o = *(const Owners*)self;
    double flops = 0, all = 0, X = sizeof(floatNS);
    size_t message = 0, most = 0;
    for (int q = 0; q < o.N; q++) {
        size_t held = 0, owned = 0, both = 0; // elements of rank q's pieces, of its matrices, and of its pieces of them
        for (int i = 0; i < o.count; i++) {
            size_t n = owners_piece(&o, i, q).n;
            bool owns = o.all_own || o.m[i].owner == q;
            held += n;
            owned += owns ? matrix_elements(o.m[i]) : 0;
            both += owns ? n : 0;
        }
        size_t there = o.all_own ? held * (size_t)(o.N - 1) : held - both, here = owned - both;
        size_t sent = there + (o.all_own ? 0 : here);
        flops = fmax(flops, o.flops[q]);
        message = size_max(message, size_max(there, here));
        most = size_max(most, sent);
        all += (double)sent;
    }
    owners_free(&o);
    return json_pack("{s:f, s:f, s:f, s:f}", "flops", flops, "message", X * (double)message, "sent_mean", X * all / o.N,
                     "sent_most", X * (double)most);
}

// Call when the owners are chosen.
static inline void owners_predict(Owners* o, Run* run) {
    run->ranks->sharing.self = o;
    run->ranks->sharing.predict = owners_busiest;
}
#endif
