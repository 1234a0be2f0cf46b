/* cpu/device.h - device.h for the CPU. Included by it, never on its own. */
#include <omp.h>
#include <sys/mman.h>

// Every live allocation, so that its bytes can be given back to their kind. (The one global state of device.h.)
typedef struct { void* p; size_t bytes; MemoryKind kind; } DeviceBlock;
static struct {
    DeviceBlock* blocks;
    int count, capacity;
    size_t now[MEMORY_KINDS], total, peak, allocations;
    char name[64];
} cpu_device;

void* device_alloc(size_t bytes, MemoryKind kind) {
    // malloc would promise more than the machine has, and the kernel would kill the process when it is touched
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
    require(bytes <= machine && cpu_device.total <= machine - bytes,
            "out of memory: %.2f GB more for %s, with %.2f GB in use, are over this machine's %.2f GB;"
            " a smaller --batch-size, --seq-len or --model, or --recompute block, needs less",
            (double)bytes * 1e-9, memory_kind_names[kind], (double)cpu_device.total * 1e-9, (double)machine * 1e-9);
    const size_t huge_page = 2 << 20;
    size_t rounded = round_up(bytes ? bytes : 1, 64);
    size_t alignment = rounded >= huge_page ? huge_page : 64;
    void* p = NULL;
    require(posix_memalign(&p, alignment, round_up(rounded, alignment)) == 0, "out of memory: %zu bytes for %s", bytes, memory_kind_names[kind]);
    if (alignment == huge_page) madvise(p, round_up(rounded, alignment), MADV_HUGEPAGE); // fewer TLB misses; a wish, so no check
    device_zero(p, rounded);
    if (cpu_device.count == cpu_device.capacity) {
        cpu_device.capacity = cpu_device.capacity ? 2 * cpu_device.capacity : 64;
        cpu_device.blocks = (DeviceBlock*)xrealloc(cpu_device.blocks, (size_t)cpu_device.capacity * sizeof(DeviceBlock));
    }
    DeviceBlock block = { p, bytes, kind };
    cpu_device.blocks[cpu_device.count++] = block;
    cpu_device.now[kind] += bytes;
    cpu_device.total += bytes;
    cpu_device.peak = size_max(cpu_device.peak, cpu_device.total);
    cpu_device.allocations++;
    return p;
}

void device_free(void* p) {
    if (p == NULL) return;
    for (int i = cpu_device.count - 1; i >= 0; i--) {
        DeviceBlock b = cpu_device.blocks[i];
        if (b.p != p) continue;
        cpu_device.now[b.kind] -= b.bytes;
        cpu_device.total -= b.bytes;
        cpu_device.blocks[i] = cpu_device.blocks[--cpu_device.count];
        free(p);
        return;
    }
    die("device_free of memory that device_alloc did not give");
}

size_t device_memory(MemoryKind kind) { return cpu_device.now[kind]; }
size_t device_memory_total(void) { return cpu_device.total; }
size_t device_memory_peak(void) { return cpu_device.peak; }
size_t device_allocations(void) { return cpu_device.allocations; }

// The cores this process may use, shared fairly by the ranks on this machine, unless OMP_NUM_THREADS says otherwise.
void device_init(int local_rank, int ranks_per_machine) {
    (void)local_rank;
    int cores = omp_get_num_procs();
    if (getenv("OMP_NUM_THREADS") == NULL) omp_set_num_threads(cores / ranks_per_machine > 1 ? cores / ranks_per_machine : 1);
    int threads = omp_get_max_threads();
    snprintf(cpu_device.name, sizeof cpu_device.name, "CPU, %d thread%s", threads, threads == 1 ? "" : "s");
}

void device_shutdown(void) {
    free(cpu_device.blocks);
    cpu_device.blocks = NULL;
    cpu_device.count = cpu_device.capacity = 0;
}

const char* device_name(void) { return cpu_device.name; }
double device_peak_flops(void) { return 0; } // dev/bench measures it; there is no honest table of CPUs
void device_synchronize(void) {}

// In parallel, so that each page lies near the thread that will use it and all memory channels take part.
void device_zero(void* p, size_t bytes) {
    const size_t slice = 1 << 20;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < ceil_div(bytes, slice); i++) memset((char*)p + i * slice, 0, size_min(slice, bytes - i * slice));
}
void device_copy(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void host_to_device(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void device_to_host(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void* host_alloc(size_t bytes) { return xcalloc(bytes, 1); }
void host_free(void* p) { free(p); }
