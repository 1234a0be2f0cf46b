/* cpu/device.h - device_api.h for the CPU: its memory is the host's, and work is done when its call returns. */
#ifndef LLMC_CPU_DEVICE_H
#define LLMC_CPU_DEVICE_H
#include "../device_memory.h"
#include <omp.h>
#include <sys/mman.h>

static char cpu_device_name[64];

void* device_alloc(size_t bytes, MemoryKind kind) {
    device_check_limit(bytes, kind);
    // malloc would promise more than the machine has, and the kernel would kill the process when it touches that memory
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
    char limit[64];
    snprintf(limit, sizeof limit, "this machine's %.2f GB", (double)machine * 1e-9);
    size_t used = device_ledger.total + device_ledger.now[MEMORY_OFFLOADED] + device_ledger.now[MEMORY_SNAPSHOT];
    if (bytes > machine || used > machine - bytes) device_out_of_memory(bytes, kind, limit);
    const size_t huge_page = 2 << 20;
    size_t rounded = round_up(bytes ? bytes : 1, 64);
    size_t alignment = rounded >= huge_page ? huge_page : 64;
    void* p = NULL;
    if (posix_memalign(&p, alignment, round_up(rounded, alignment)) != 0)
        device_out_of_memory(bytes, kind, "what the system gives");
    // Fewer TLB misses; a hint, so no check
    if (alignment == huge_page) madvise(p, round_up(rounded, alignment), MADV_HUGEPAGE);
    device_zero(p, rounded);
    device_ledger_add(p, bytes, kind);
    return p;
}

void device_free(void* p) {
    if (p == NULL) return;
    device_ledger_remove(p);
    free(p);
}

// For a container's limit there is --memory-limit.
size_t device_memory_free(void) { return host_memory_free(); }
size_t device_memory_seen(void) { return proc_bytes("/proc/self/status", "VmHWM: %zu", 0); }
const char* device_memory_seen_with(void) {
    return "the process at its largest: also code, MPI, oneDNN, data, threads";
}
DeviceId device_id(void) { return host_id(); }

void device_init(int local_rank, int ranks_per_machine) {
    (void)local_rank;
    int threads = host_share_threads(ranks_per_machine);
    snprintf(cpu_device_name, sizeof cpu_device_name, "CPU, %d thread%s", threads, threads == 1 ? "" : "s");
}

void device_shutdown(void) { device_ledger_free(); }
const char* device_name(void) { return cpu_device_name; }
double device_peak_flops(void) { return 0; } // experiments/bench.py measures it; there is no honest table of CPUs
void device_synchronize(void) {}

// ---- marks ----
static struct { double* times; MarkPool pool; } cpu_marks; // times (pool.made) owned
int device_event(void) {
    bool is_new;
    int mark = mark_pool_take(&cpu_marks.pool, &is_new);
    if (is_new) cpu_marks.times = (double*)with_room(cpu_marks.times, (size_t)mark, sizeof(double));
    cpu_marks.times[mark] = now_seconds();
    return mark;
}
bool device_event_passed(int mark) { (void)mark; return true; }
double device_event_time(int mark) { return cpu_marks.times[mark]; }
double device_event_seconds(int from, int to) { return cpu_marks.times[to] - cpu_marks.times[from]; }
void device_range(const char* name) { (void)name; }
void device_event_free(int mark) { mark_pool_give(&cpu_marks.pool, mark); }

// In parallel, so that each page lies near the thread that will use it and all memory channels take part.
void device_zero(void* p, size_t bytes) {
    const size_t slice = 1 << 20;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < ceil_div(bytes, slice); i++)
        memset((char*)p + i * slice, 0, size_min(slice, bytes - i * slice));
}
void device_copy(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void device_copy_rows(void* dst, size_t dst_apart, const void* src, size_t src_apart, size_t bytes, size_t rows) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < rows; i++) memcpy((char*)dst + i * dst_apart, (const char*)src + i * src_apart, bytes);
}
void host_to_device(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void device_to_host(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void* host_alloc(size_t bytes) { return xcalloc(bytes, 1); }
void host_free(void* p) { free(p); }
// Here the device's memory is the host's
void* offload_alloc(size_t bytes) { return device_alloc(bytes, MEMORY_OFFLOADED); }
void offload_free(void* p) { device_free(p); }
void* snapshot_alloc(size_t bytes) { return device_alloc(bytes, MEMORY_SNAPSHOT); }
void snapshot_free(void* p) { device_free(p); }
void snapshot_copy(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }
bool snapshot_is_done(void) { return true; }
void snapshot_hold(void) {}
#endif
