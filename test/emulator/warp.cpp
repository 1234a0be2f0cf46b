// warp.cpp - what warp functions compute once their lanes have met: shuffles, votes, reductions, matrix products.
// combine_* run while all lanes wait; each lane's record lies on its own stack.
#include "engine.h"

namespace emulator {
struct ShuffleRecord { uint64_t value; int source; uint64_t result; };
static void combine_shuffle(Fiber* const* lanes) {
    for (int i = 0; i < WARP; i++) {
        if (!lanes[i]) continue;
        ShuffleRecord* own = (ShuffleRecord*)lanes[i]->record;
        const Fiber* source = lanes[own->source];
        if (!source) fail(lanes[i], lanes[i]->site, "%s reads lane %d, which takes no part (mask 0x%08x, or it has exited)",
                          lanes[i]->function, own->source, lanes[i]->mask);
        own->result = ((const ShuffleRecord*)source->record)->value;
    }
}
uint64_t shuffle(const char* name, unsigned mask, uint64_t value, int source_lane, Site site) {
    ShuffleRecord record = {value, source_lane, 0};
    meet_warp(name, mask, &record, combine_shuffle, site);
    return record.result;
}

void warp_barrier(unsigned mask, Site site) { meet_warp("__syncwarp", mask, nullptr, nullptr, site); }

static void combine_ballot(Fiber* const* lanes) {
    unsigned votes = 0;
    for (int i = 0; i < WARP; i++) if (lanes[i] && *(unsigned*)lanes[i]->record) votes |= 1u << i;
    for (int i = 0; i < WARP; i++) if (lanes[i]) *(unsigned*)lanes[i]->record = votes;
}
unsigned ballot(const char* name, unsigned mask, bool predicate, Site site) {
    unsigned record = predicate;
    meet_warp(name, mask, &record, combine_ballot, site);
    return record;
}

struct MatchRecord { uint64_t value; unsigned same; };
static void combine_match(Fiber* const* lanes) {
    for (int i = 0; i < WARP; i++)
        for (int j = 0; lanes[i] && j < WARP; j++)
            if (lanes[j] && ((MatchRecord*)lanes[i]->record)->value == ((MatchRecord*)lanes[j]->record)->value)
                ((MatchRecord*)lanes[i]->record)->same |= 1u << j;
}
unsigned match_any(unsigned mask, uint64_t value, Site site) {
    MatchRecord record = {value, 0};
    meet_warp("__match_any_sync", mask, &record, combine_match, site);
    return record.same;
}

struct ReduceRecord { Reduce how; unsigned value; };
static unsigned reduce_two(Reduce how, unsigned a, unsigned b) {
    switch (how) {
        case Reduce::ADD: return a + b;
        case Reduce::MIN_S32: return (int)a < (int)b ? a : b;
        case Reduce::MAX_S32: return (int)a > (int)b ? a : b;
        case Reduce::MIN_U32: return std::min(a, b);
        case Reduce::MAX_U32: return std::max(a, b);
        case Reduce::AND: return a & b;
        case Reduce::OR: return a | b;
        default: return a ^ b;
    }
}
static void combine_reduce(Fiber* const* lanes) {
    const ReduceRecord* first = nullptr;
    unsigned value = 0;
    for (int i = 0; i < WARP; i++) {
        if (!lanes[i]) continue;
        const ReduceRecord* r = (const ReduceRecord*)lanes[i]->record;
        value = first ? reduce_two(r->how, value, r->value) : r->value;
        if (!first) first = r;
    }
    for (int i = 0; i < WARP; i++) if (lanes[i]) ((ReduceRecord*)lanes[i]->record)->value = value;
}
unsigned reduce(const char* name, unsigned mask, Reduce how, unsigned value, Site site) {
    ReduceRecord record = {how, value};
    meet_warp(name, mask, &record, combine_reduce, site);
    return record.value;
}
} // namespace emulator
