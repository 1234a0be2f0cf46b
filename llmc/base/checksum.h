/*
checksum.h - checksums of arrays that do not depend on how an array is cut.

A checksum is the sum over elements of a hash of (bits, place). The sums of an array's parts add up to the sum of the
whole, so ranks that hold a part each need only add their sums, and it does not matter which rank holds which part.
*/
#ifndef LLMC_CHECKSUM_H
#define LLMC_CHECKSUM_H
#include "common.h"

// A bijection of the bits for every place, so that a single changed element always changes the sum (the mixing steps
// are those of splitmix64, Steele et al. 2014, with other constants).
static inline uint64_t checksum_element(uint64_t bits, uint64_t place) {
    uint64_t x = ((place + 1) * 0x9E3779B97F4A7C15ull) ^ bits;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    return x ^ (x >> 32);
}

// Returns the checksum of n elements of `size` (1, 2 or 4) bytes, the first of which is number `place` of its array. It
// uses memcpy because they may be floats, and the compiler may assume that an integer pointer never points to one.
static inline uint64_t checksum_elements(const void* data, size_t size, size_t n, uint64_t place) {
    const unsigned char* p = (const unsigned char*)data;
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t four = 0;
        uint16_t two = 0;
        if (size == 4) memcpy(&four, p + 4 * i, 4);
        else if (size == 2) memcpy(&two, p + 2 * i, 2);
        sum += checksum_element(size == 4 ? four : size == 2 ? two : p[i], place + i);
    }
    return sum;
}
#endif
