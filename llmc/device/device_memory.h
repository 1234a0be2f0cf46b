/*
device_memory.h - the part that all devices share: the account of every live allocation and its purpose, the marks in
use, and how ranks divide the host's cores. cpu/device.h and cuda/device.cuh allocate the memory.
*/
#ifndef LLMC_DEVICE_MEMORY_H
#define LLMC_DEVICE_MEMORY_H
#include "device_api.h"
#if defined(_OPENMP) && __has_include(<omp.h>) // clang may lack its OpenMP, but can compile what another one links
#include <omp.h>
#define HOST_HAS_THREADS
#endif

// ---- threads of the host ----
// OpenMP keeps one number for each thread that begins its loops: how many threads they
// take.
static inline void host_set_threads(int threads) {
#ifdef HOST_HAS_THREADS
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}
// Sets and returns the calling thread's number: its share of the cores among the ranks here,
// or what OMP_NUM_THREADS says.
static inline int host_share_threads(int ranks_per_machine) {
#ifdef HOST_HAS_THREADS
    int cores = omp_get_num_procs();
    if (getenv("OMP_NUM_THREADS") == NULL)
        host_set_threads(cores / ranks_per_machine > 1 ? cores / ranks_per_machine : 1);
    return omp_get_max_threads();
#else
    (void)ranks_per_machine;
    return 1;
#endif
}

// Returns a number of KiB from a file of /proc, in bytes; `bytes` if it is not there. format: "MemAvailable: %zu".
static size_t proc_bytes(const char* path, const char* format, size_t bytes) {
    char line[128];
    size_t kib;
    FILE* f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) if (sscanf(line, format, &kib) == 1) bytes = 1024 * kib;
    if (f) fclose(f);
    return bytes;
}
// Nineteen twentieths of what the kernel reports as available, or of all memory.
size_t host_memory_free(void) {
    size_t all = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
    return proc_bytes("/proc/meminfo", "MemAvailable: %zu", all) / 20 * 19;
}
DeviceId host_id(void) { // of the running kernel: the first characters of a random number's text
    DeviceId id = { { 0 } };
    FILE* f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f && fread(&id, sizeof id, 1, f) != 1) memset(&id, 0, sizeof id);
    if (f) fclose(f);
    return id;
}

// Every live allocation, so that freeing it subtracts its bytes from its kind. (The one global state of this file.)
typedef struct { void* p; size_t bytes; MemoryKind kind; } DeviceBlock;
static struct {
    DeviceBlock* blocks; // (count) live, owned
    int count;
    size_t now[MEMORY_KINDS], total, peak, allocations; // total, peak: of the device
    size_t limit; // device_memory_limit, 0: none
} device_ledger;

static void device_ledger_add(void* p, size_t bytes, MemoryKind kind) {
    DeviceBlock block = { p, bytes, kind };
    device_ledger.blocks = (DeviceBlock*)with_room(device_ledger.blocks, (size_t)device_ledger.count, sizeof block);
    device_ledger.blocks[device_ledger.count++] = block;
    device_ledger.now[kind] += bytes;
    if (!memory_is_on_host(kind)) device_ledger.total += bytes;
    device_ledger.peak = size_max(device_ledger.peak, device_ledger.total);
    device_ledger.allocations++;
}

static void device_ledger_remove(void* p) {
    for (int i = device_ledger.count - 1; i >= 0; i--) {
        DeviceBlock b = device_ledger.blocks[i];
        if (b.p != p) continue;
        device_ledger.now[b.kind] -= b.bytes;
        if (!memory_is_on_host(b.kind)) device_ledger.total -= b.bytes;
        device_ledger.blocks[i] = device_ledger.blocks[--device_ledger.count];
        return;
    }
    die_here("device_free or offload_free of memory that is not from device_alloc or offload_alloc");
}

static void device_ledger_free(void) {
    free(device_ledger.blocks);
    device_ledger.blocks = NULL;
    device_ledger.count = 0;
}

// Dies because `bytes` more for `kind` are not available. limit names the limit: "this machine's 16.00 GB".
__attribute__((noreturn)) static void device_out_of_memory(size_t bytes, MemoryKind kind, const char* limit) {
    char used[512] = "";
    for (int k = 0; k < MEMORY_KINDS; k++) {
        size_t end = strlen(used);
        if (device_ledger.now[k] == 0) continue;
        snprintf(used + end, sizeof used - end, "%s%.3f GB %s", end ? ", " : "", (double)device_ledger.now[k] * 1e-9,
                 memory_kind_names[k]);
    }
    bool of_model = kind == MEMORY_PARAMETERS || kind == MEMORY_GRADIENTS || kind == MEMORY_OPTIMIZER
                    || kind == MEMORY_OFFLOADED;
    die("out of memory: %.3f GB more for %s, with %.3f GB in use%s%s%s, are over %s; %s", (double)bytes * 1e-9,
        memory_kind_names[kind], (double)device_ledger.total * 1e-9, used[0] ? " (" : "", used, used[0] ? ")" : "",
        limit,
        of_model ? "use a smaller --model, or more ranks with ZeRO or FSDP"
                 : "use a smaller --batch-size, --seq-len or --model, or --recompute block");
}

// Dies if `bytes` more for `kind` exceed device_memory_limit. device_alloc calls this before it allocates anything.
static void device_check_limit(size_t bytes, MemoryKind kind) {
    size_t limit = device_ledger.limit;
    if (memory_is_on_host(kind) || limit == 0 || (bytes <= limit && device_ledger.total <= limit - bytes)) return;
    char text[64];
    snprintf(text, sizeof text, "--memory-limit %g GB", (double)limit * 1e-9);
    device_out_of_memory(bytes, kind, text);
}

// ---- marks: which are free ----
typedef struct { int* free; int num_free, made; } MarkPool; // free (made): the first num_free are, owned
// is_new: the caller makes it; it is the largest number so far
static inline int mark_pool_take(MarkPool* p, bool* is_new) {
    *is_new = p->num_free == 0;
    if (!*is_new) return p->free[--p->num_free];
    p->free = (int*)with_room(p->free, (size_t)p->made, sizeof(int));
    return p->made++;
}
static inline void mark_pool_give(MarkPool* p, int mark) { p->free[p->num_free++] = mark; }

void device_free_all(MemoryKind kind) {
    for (int i = device_ledger.count - 1; i >= 0; i--)
        if (device_ledger.blocks[i].kind == kind) device_free(device_ledger.blocks[i].p);
}
bool is_offloaded(const void* p) {
    for (int i = 0; i < device_ledger.count; i++) {
        DeviceBlock b = device_ledger.blocks[i];
        size_t at = (size_t)((uintptr_t)p - (uintptr_t)b.p); // wraps around before the block
        if (b.kind == MEMORY_OFFLOADED && at < b.bytes) return true;
    }
    return false;
}
static struct { double gbits, until[2]; } device_link; // until: the end of its queues, to and from the host
void device_emulate_link(double gbits) {
    require(gbits == 0 || strncmp(device_name(), "CPU", 3) == 0,
            "--emulate-host-link is for the CPU: a GPU has such a link; leave it out");
    device_link.gbits = gbits;
}
bool device_link_is_emulated(void) { return device_link.gbits > 0; }
double device_link_until(bool from_host, size_t bytes) {
    double *until = &device_link.until[from_host], rate = 1e9 / 8 * device_link.gbits;
    return rate == 0 ? 0 : (*until = fmax(now_seconds(), *until) + (double)bytes / rate);
}
size_t device_memory(MemoryKind kind) { return device_ledger.now[kind]; }
size_t device_memory_total(void) { return device_ledger.total; }
size_t device_memory_peak(void) { return device_ledger.peak; }
size_t device_allocations(void) { return device_ledger.allocations; }
void device_memory_limit(size_t bytes) { device_ledger.limit = bytes; }
size_t device_memory_available(void) {
    size_t limit = device_ledger.limit, left = limit - size_min(limit, device_ledger.total);
    return limit == 0 ? device_memory_free() : size_min(device_memory_free(), left);
}
#endif
