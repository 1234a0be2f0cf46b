/* checksum.h - checksums (base/checksum.h) of arrays in device memory. */
#ifndef LLMC_DEVICE_CHECKSUM_H
#define LLMC_DEVICE_CHECKSUM_H
#include "../base/checksum.h"
#include "device.h"

// Returns the checksum of n elements of `size` bytes on the device, from number `place` of a larger sum on.
// host (bytes): scratch.
static inline uint64_t device_checksum_by(const void* device, size_t size, size_t n, uint64_t place, void* host,
                                          size_t bytes) {
    uint64_t sum = 0;
    for (size_t done = 0, count; done < n; done += count) {
        count = size_min(n - done, bytes / size);
        device_to_host(host, (const char*)device + done * size, count * size);
        sum += checksum_elements(host, size, count, place + done);
    }
    return sum;
}
// Returns the same of all there are.
static inline uint64_t device_checksum(const void* device, size_t size, size_t n) {
    const size_t staged = 1 << 22; // bytes
    void* host = xcalloc(staged, 1);
    uint64_t sum = device_checksum_by(device, size, n, 0, host, staged);
    free(host);
    return sum;
}
#endif
