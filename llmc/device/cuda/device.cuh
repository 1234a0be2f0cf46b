/* cuda/device.cuh - device_api.h for an NVIDIA GPU. */
#ifndef LLMC_CUDA_DEVICE_CUH
#define LLMC_CUDA_DEVICE_CUH
#include "../device_memory.h"
#include "../../base/precision.h"
#include "../../base/thread.h"
#include "check.cuh"
#ifndef CUDA_EMULATOR
#include <nvtx3/nvToolsExt.h>
#endif

static cudaDeviceProp cuda_device; // of the GPU that device_init picked
static int cuda_device_number;
static int cuda_host_threads; // for loops on the host: AdamW (--cpu-offload), and sums over ranks that share a GPU

// ---- memory ----
// Another allocator, which device_alloc and device_free try first: comm/nccl_windows.cuh, for data that ranks exchange.
// alloc NULL: there is none.
static struct {
    void* (*alloc)(void* self, size_t bytes, MemoryKind kind);
    bool (*free)(void* self, void* p);
    void* self;
} cuda_lender;

void* device_alloc(size_t bytes, MemoryKind kind) {
    device_check_limit(bytes, kind);
    void* p = cuda_lender.alloc ? cuda_lender.alloc(cuda_lender.self, bytes, kind) : NULL;
    cudaError_t error = p ? cudaSuccess : cudaMalloc(&p, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        char limit[128];
        cudaMemGetInfo(&free_bytes, &total);
        snprintf(limit, sizeof limit, "the GPU's %.2f GB, of which %.2f GB are free", (double)total * 1e-9,
                 (double)free_bytes * 1e-9);
        device_out_of_memory(bytes, kind, limit);
    }
    cuda_check(error, "device_alloc");
    device_zero(p, bytes);
    device_ledger_add(p, bytes, kind);
    return p;
}

void device_free(void* p) {
    if (p == NULL) return;
    device_ledger_remove(p);
    if (cuda_lender.alloc && cuda_lender.free(cuda_lender.self, p)) return;
    cuda_check(cudaFree(p), "device_free");
}

// Leaves a twentieth to libraries, which allocate memory for their kernels and buffers when they are first used.
size_t device_memory_free(void) {
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total), "asking how much memory is free");
    return free_bytes / 20 * 19;
}

size_t device_memory_seen(void) {
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total), "asking how much memory is used");
    return total - free_bytes;
}
const char* device_memory_seen_with(void) {
    return "the GPU, all processes: also contexts, kernels, cuBLAS, cuDNN, NCCL";
}

void* host_alloc(size_t bytes) {
    void* p = NULL;
    cudaError_t error = cudaMallocHost(&p, bytes ? bytes : 1);
    require(error == cudaSuccess,
            "cannot allocate %zu bytes of pinned host memory: \"%s\"; see ulimit -l and the free memory", bytes,
            cudaGetErrorString(error));
    memset(p, 0, bytes);
    return p;
}
void host_free(void* p) { cuda_check(cudaFreeHost(p), "host_free"); }
void* offload_alloc(size_t bytes) {
    void* p = host_alloc(bytes);
    device_ledger_add(p, bytes, MEMORY_OFFLOADED);
    return p;
}
void offload_free(void* p) {
    if (p == NULL) return;
    device_ledger_remove(p);
    host_free(p);
}

// ---- snapshots: copies to the host on a stream of their own ----
static struct {
    cudaStream_t stream;      // owned
    cudaEvent_t issued, done; // copies wait for `issued`; `done` is the end of the last copy
} cuda_snapshot;

void* snapshot_alloc(size_t bytes) {
    void* p = NULL;
    if (cudaMallocHost(&p, bytes ? bytes : 1) != cudaSuccess) { cudaGetLastError(); return NULL; }
    memset(p, 0, bytes);
    cuda_check(cudaStreamCreateWithFlags(&cuda_snapshot.stream, cudaStreamNonBlocking), "the stream for snapshots");
    cuda_check(cudaEventCreateWithFlags(&cuda_snapshot.issued, cudaEventDisableTiming), "a snapshot");
    cuda_check(cudaEventCreateWithFlags(&cuda_snapshot.done, cudaEventDisableTiming), "a snapshot");
    device_ledger_add(p, bytes, MEMORY_SNAPSHOT);
    return p;
}
void snapshot_free(void* p) {
    if (p == NULL) return;
    device_ledger_remove(p);
    cuda_check(cudaEventDestroy(cuda_snapshot.issued), "a snapshot");
    cuda_check(cudaEventDestroy(cuda_snapshot.done), "a snapshot");
    cuda_check(cudaStreamDestroy(cuda_snapshot.stream), "the stream for snapshots");
    memset(&cuda_snapshot, 0, sizeof cuda_snapshot);
    host_free(p);
}
void snapshot_copy(void* host, const void* device, size_t bytes) {
    cuda_check(cudaEventRecord(cuda_snapshot.issued, compute_stream), "a snapshot");
    cuda_check(cudaStreamWaitEvent(cuda_snapshot.stream, cuda_snapshot.issued, 0), "a snapshot");
    cuda_check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda_snapshot.stream), "a snapshot");
    cuda_check(cudaEventRecord(cuda_snapshot.done, cuda_snapshot.stream), "a snapshot");
}
// An error counts as not done; the main thread will find and report it.
bool snapshot_is_done(void) { return cudaEventQuery(cuda_snapshot.done) == cudaSuccess; }
void snapshot_hold(void) {
    if (cuda_snapshot.stream == NULL) return;
    cuda_check(cudaStreamWaitEvent(compute_stream, cuda_snapshot.done, 0), "a snapshot");
}

// ---- the GPU ----
// Returns the number of GPUs. Dies if there is none, or if no loaded driver supports the CUDA version of this program.
static int cuda_count_devices(void) {
    int driver = 0, toolkit = 0, count = 0;
    cudaDriverGetVersion(&driver); // 0: none
    cudaRuntimeGetVersion(&toolkit);
    require(driver > 0, "no NVIDIA driver is loaded, so no GPU can be used: install the driver (nvidia-smi must work),"
            " or build for this machine's CPU with make DEVICE=cpu");
    cudaError_t error = cudaGetDeviceCount(&count);
    require(error != cudaErrorInsufficientDriver,
            "the NVIDIA driver is for CUDA %d.%d and this program was built with CUDA %d.%d: update the driver, or "
            "build with a toolkit of %d.x",
            driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10, driver / 1000);
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    require(error != cudaErrorNoDevice && !(error == cudaSuccess && count == 0),
            "no GPU is visible%s%s%s: nvidia-smi -L lists what this machine has; make DEVICE=cpu builds for its CPU",
            visible ? " (CUDA_VISIBLE_DEVICES is '" : "", visible ? visible : "", visible ? "')" : "");
    cuda_check(error, "counting GPUs");
    return count;
}

// Assigns the GPUs of a machine to its ranks in turn. Dies if this rank's GPU does not work, or is too old.
void device_init(int local_rank, int ranks_per_machine) {
    cuda_host_threads = host_share_threads(ranks_per_machine);
    sigset_t signals = thread_block_signals(); // the driver starts threads of its own
    int device = local_rank % cuda_count_devices();
    char what[320];
    cuda_device_number = device;
    cuda_check(cudaGetDeviceProperties(&cuda_device, device), "asking what the GPU is");
    snprintf(what, sizeof what, "GPU %d, %s", device, cuda_device.name);
    bool has_bf16 = cuda_device.major >= 8, is_enough = has_bf16 || (cuda_device.major == 7 && cuda_device.minor == 5);
    require(is_enough,
            "%s, has compute capability %d.%d, but the minimum is 7.5 (T4, RTX 20), in bf16 8.0 (A100, RTX 30): "
            "CUDA_VISIBLE_DEVICES=N chooses another GPU, make DEVICE=cpu the CPU",
            what, cuda_device.major, cuda_device.minor);
    require(has_bf16 || FLOATX_DTYPE != DTYPE_BF16,
            "%s, has compute capability %d.%d, and bf16 needs 8.0 (A100, RTX 30): build with make PRECISION=fp16 or "
            "fp32",
            what, cuda_device.major, cuda_device.minor);
    cuda_check(cudaSetDevice(device), what);
    // The first call that fails if the GPU does not work
    cuda_check(cudaStreamCreateWithFlags(&compute_stream, cudaStreamNonBlocking), what);
    pthread_sigmask(SIG_SETMASK, &signals, NULL);
}

void device_shutdown(void) {
    device_ledger_free();
    cuda_check(cudaStreamDestroy(compute_stream), "device_shutdown");
    compute_stream = NULL;
}

DeviceId device_id(void) {
    DeviceId id;
    static_assert(sizeof id == sizeof cuda_device.uuid, "both have 16 bytes");
    memcpy(&id, &cuda_device.uuid, sizeof id);
    return id;
}
const char* device_name(void) { return cuda_device.name; }

// Dense TFLOP/s of matrix products with fp32 sums, from NVIDIA's data sheets: 16-bit numbers on tensor cores, fp32 on
// ordinary cores. The first entry counts that occurs in the GPU's name without a letter or digit after it.
typedef struct { const char* name; double tflops_16, tflops_32; } GpuPeak;
static const GpuPeak gpu_peaks[] = {
    { "GB200", 2500, 80 }, { "B200", 2250, 75 }, { "B300", 2250, 75 },
    { "GH200", 989, 67 }, { "H200 NVL", 835, 60 }, { "H200", 989, 67 },
    { "H100 PCIe", 756, 51 }, { "H100 NVL", 835, 60 }, { "H100", 989, 67 }, { "H800", 989, 67 }, { "H20", 148, 44 },
    { "A100", 312, 19.5 }, { "A800", 312, 19.5 }, { "A30", 165, 10.3 }, { "A40", 149.7, 37.4 }, { "A10G", 70, 31.5 },
    { "A10", 125, 31.2 }, { "L40S", 362, 91.6 }, { "L40", 181, 90.5 }, { "L4", 121, 30.3 },
    { "RTX A6000", 154.8, 38.7 }, { "RTX 3090", 71, 35.6 }, { "RTX 4080", 97.5, 48.7 }, { "RTX 4090", 165.2, 82.6 },
    { "RTX 5090", 209.5, 104.8 }, { "T4", 65, 8.1 },
};
double device_peak_flops(void) {
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof gpu_peaks[0]; i++) {
        const char* found = strstr(cuda_device.name, gpu_peaks[i].name);
        // An A4000 is not an A40
        if (found == NULL || isalnum((unsigned char)found[strlen(gpu_peaks[i].name)])) continue;
        return 1e12 * (FLOATX_DTYPE == DTYPE_F32 ? gpu_peaks[i].tflops_32 : gpu_peaks[i].tflops_16);
    }
    return 0;
}

// ---- marks: events on a stream ----
static struct {
    cudaEvent_t* events; // (pool.made) owned
    MarkPool pool;
    cudaEvent_t anchor;  // passed at `zero`: ties the GPU's clock to the host's
    double zero;         // in now_seconds()
    cudaEvent_t next;    // the next anchor, if next_recorded
    bool next_recorded;
} cuda_marks;
// CUDA reports the milliseconds between two events as a float, whose 24 bits would not tell after an hour which of two
// kernels came first. So the anchor moves: times are counted from an event that is seldom older than this number of
// seconds, or than a step if that is longer.
#define CUDA_ANCHOR_SECONDS 1

static void cuda_mark_make(int mark) {
    cuda_marks.events = (cudaEvent_t*)with_room(cuda_marks.events, (size_t)mark, sizeof(cudaEvent_t));
    cuda_check(cudaEventCreate(&cuda_marks.events[mark]), "a mark");
    if (mark > 0) return;
    cuda_check(cudaEventCreate(&cuda_marks.anchor), "a mark");
    cuda_check(cudaEventCreate(&cuda_marks.next), "a mark");
    cuda_check(cudaStreamSynchronize(compute_stream), "a mark"); // so that the GPU passes the event immediately
    cuda_check(cudaEventRecord(cuda_marks.anchor, compute_stream), "a mark");
    cuda_check(cudaEventSynchronize(cuda_marks.anchor), "a mark");
    cuda_marks.zero = now_seconds();
}
static int cuda_mark(cudaStream_t stream) {
    bool is_new;
    int mark = mark_pool_take(&cuda_marks.pool, &is_new);
    if (is_new) cuda_mark_make(mark);
    cuda_check(cudaEventRecord(cuda_marks.events[mark], stream), "a mark");
    return mark;
}
// NVTX ranges, which Nsight Systems shows alongside the kernels; without a profiler they cost next to nothing.
void device_range(const char* name) {
#ifdef CUDA_EMULATOR
    (void)name;
#else
    static bool inside;
    if (inside) nvtxRangePop();
    if (name != NULL) nvtxRangePushA(name);
    inside = name != NULL;
#endif
}
int device_event(void) { return cuda_mark(compute_stream); }
static double cuda_seconds(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, from, to), "a mark");
    return 1e-3 * ms;
}
bool device_event_passed(int mark) { return cuda_is_done(cudaEventQuery(cuda_marks.events[mark]), "a mark"); }
// Moves the anchor, in two calls: the first, `since` seconds after the anchor, records an event; a later one, when the
// GPU has passed that event, makes it the anchor. zero is a double, so each move adds only the rounding error of one
// short time.
static void cuda_anchor_move(double since) {
    if (since < CUDA_ANCHOR_SECONDS) return;
    if (!cuda_marks.next_recorded) cuda_check(cudaEventRecord(cuda_marks.next, compute_stream), "a mark");
    else if (!cuda_is_done(cudaEventQuery(cuda_marks.next), "a mark")) return;
    else {
        cudaEvent_t old = cuda_marks.anchor;
        cuda_marks.zero += cuda_seconds(old, cuda_marks.next);
        cuda_marks.anchor = cuda_marks.next;
        cuda_marks.next = old;
    }
    cuda_marks.next_recorded = !cuda_marks.next_recorded;
}
double device_event_time(int mark) {
    double since = cuda_seconds(cuda_marks.anchor, cuda_marks.events[mark]), time = cuda_marks.zero + since;
    cuda_anchor_move(since);
    return time;
}
double device_event_seconds(int from, int to) { return cuda_seconds(cuda_marks.events[from], cuda_marks.events[to]); }
void device_event_free(int mark) { mark_pool_give(&cuda_marks.pool, mark); }

// ---- work on the stream ----
// The host calls `look` while it waits for the GPU: comm/comm_nccl.cuh checks its operations in it. NULL: none.
static struct { void (*look)(void* self); void* self; } cuda_waiting;
static void cuda_wait(const char* what) {
    if (cuda_waiting.look == NULL) { cuda_check(cudaStreamSynchronize(compute_stream), what); return; }
    while (!cuda_is_done(cudaStreamQuery(compute_stream), what)) cuda_waiting.look(cuda_waiting.self);
    cuda_waiting.look(cuda_waiting.self); // so that it sees the end of the last operations
}
void device_synchronize(void) { cuda_wait("waiting for the GPU"); }
void device_zero(void* p, size_t bytes) { cuda_check(cudaMemsetAsync(p, 0, bytes, compute_stream), "device_zero"); }
void device_copy(void* dst, const void* src, size_t bytes) {
    cuda_check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, compute_stream), "device_copy");
}
void device_copy_rows(void* dst, size_t dst_apart, const void* src, size_t src_apart, size_t bytes, size_t rows) {
    cuda_check(cudaMemcpy2DAsync(dst, dst_apart, src, src_apart, bytes, rows, cudaMemcpyDefault, compute_stream),
               "device_copy_rows");
}
void host_to_device(void* dst, const void* src, size_t bytes) {
    cuda_check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, compute_stream), "host_to_device");
}
void device_to_host(void* dst, const void* src, size_t bytes) {
    if (cuda_waiting.look) cuda_wait("device_to_host"); // a copy to unpinned memory would block without `look`
    cuda_check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, compute_stream), "device_to_host");
    cuda_check(cudaStreamSynchronize(compute_stream), "device_to_host"); // dst is read when this returns
}
#endif
