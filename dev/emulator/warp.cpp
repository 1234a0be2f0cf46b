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

// --- matrices: fragments as the PTX ISA lays them out (9.7.14, "Matrix fragments for mma.m16n8k16" and "ldmatrix") ---
constexpr unsigned ALL = ~0u;
static void require_whole_warp(Fiber* const* lanes, const Fiber* one) {
    for (int i = 0; i < WARP; i++)
        if (!lanes[i]) fail(one, one->site, "%s needs the whole warp; lane %d has exited or does not exist", one->function, i);
}
struct MmaRecord { Element type; float* d; const uint32_t *a, *b; };
static float half_of(Element type, uint32_t pair, int upper) { return value_of(type, (uint16_t)(pair >> (16 * upper))); }
static void combine_mma(Fiber* const* lanes) {
    for (int i = 0; i < WARP; i++) if (lanes[i]) { require_whole_warp(lanes, lanes[i]); break; }
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const MmaRecord* r = (const MmaRecord*)lanes[lane]->record;
        int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 8; i++) a[group + (i / 2 % 2) * 8][pair + i % 2 + i / 4 * 8] = half_of(r->type, r->a[i / 2], i % 2);
        for (int i = 0; i < 4; i++) b[pair + i % 2 + i / 2 * 8][group] = half_of(r->type, r->b[i / 2], i % 2);
    }
    for (int lane = 0; lane < WARP; lane++) {
        float* d = ((const MmaRecord*)lanes[lane]->record)->d;
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            double sum = d[i]; // the order and rounding of the GPU's sum are not documented; this sum is exact and rounded once
            for (int k = 0; k < 16; k++) sum += (double)a[row][k] * b[k][column];
            d[i] = (float)sum;
        }
    }
}
void mma_m16n8k16(Element type, float* d, const uint32_t* a, const uint32_t* b, Site site) {
    MmaRecord record = {type, d, a, b};
    meet_warp("mma_m16n8k16", ALL, &record, combine_mma, site);
}

// Lane 8m + r brings row r of matrix m: 8 elements of 16 bits.
struct MatrixRecord { int count; bool transposed; uint16_t row[8]; uint32_t* fragments; };
static void combine_load_matrices(Fiber* const* lanes) {
    for (int i = 0; i < WARP; i++) if (lanes[i]) { require_whole_warp(lanes, lanes[i]); break; }
    auto record = [&](int lane) { return (const MatrixRecord*)lanes[lane]->record; };
    for (int lane = 0; lane < WARP; lane++)
        for (int m = 0; m < record(lane)->count; m++) {
            int major = lane / 4, minor = lane % 4 * 2;
            uint32_t low = record(lane)->transposed ? record(8 * m + minor)->row[major] : record(8 * m + major)->row[minor];
            uint32_t high = record(lane)->transposed ? record(8 * m + minor + 1)->row[major] : record(8 * m + major)->row[minor + 1];
            record(lane)->fragments[m] = low | high << 16;
        }
}
void load_matrices(const char* name, int count, bool transposed, const void* row, uint32_t* fragments, Site site) {
    MatrixRecord record = {count, transposed, {}, fragments};
    memcpy(record.row, row, sizeof record.row);
    meet_warp(name, ALL, &record, combine_load_matrices, site);
}
} // namespace emulator
