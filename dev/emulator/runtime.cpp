// runtime.cpp - errors, devices, copies. The device has the emulator's limits; CUDA_EMULATOR_DEVICES and CUDA_EMULATOR_DRIVER
// imitate other machines: no device, no driver, an older driver.
#include "engine.h"
#include "runtime.h"
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

namespace emulator {
static std::mutex everything;
static thread_local cudaError_t last_error;
static thread_local int current_device;
thread_local const char* running;
cudaError_t sticky_error;
static std::map<std::string, unsigned long long> calls; // of each function by its name
static bool profiled = true;
bool is_profiled(void) {
    Call call;
    return profiled;
}
static cudaError_t set_profiled(Call&& call, bool value) {
    if (!call.error) profiled = value;
    return call.error;
}

// --- errors ---
cudaError_t remember(cudaError_t error) {
    if (error) last_error = error;
    return error;
}
void explain(const char* call, const char* format, ...) {
    FORMATTED(what, 512, format);
    fprintf(stderr, "cuda emulator: %s: %s\n", call, what);
}
void append_to(const char* setting, const char* format, ...) {
    const char* path = getenv(setting);
    FILE* file = path && *path ? fopen(path, "a") : nullptr;
    if (!file) return;
    FORMATTED(line, 512, format);
    fputs(line, file);
    fclose(file);
}
cudaError_t Call::fail(cudaError_t code, const char* format, ...) {
    FORMATTED(what, 512, format);
    explain(name, "%s", what);
    return remember(code);
}
static int driver_version(void) {
    static const int version = (int)setting("CUDA_EMULATOR_DRIVER", CUDART_VERSION);
    return version;
}
static int devices(void) {
    static const int count = (int)setting("CUDA_EMULATOR_DEVICES", 1);
    return count;
}
// A driver supports the toolkits of its own major version and of all earlier ones.
static cudaError_t machine_error(void) {
    if (driver_version() / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
    return devices() == 0 ? cudaErrorNoDevice : cudaSuccess;
}
Call::Call(const char* name) : name(name), error(cudaSuccess) {
    if (self || running) { // the lock is held for it; or it is a host function, which must not call CUDA
        fprintf(stderr, "cuda emulator: %s is called by %s, which a stream runs\n", name, self ? self->kernel : running);
        _exit(1);
    }
    lock = std::unique_lock<std::mutex>(everything);
    calls[name]++;
    error = machine_error() ? machine_error() : sticky_error;
    remember(error);
}

// --- copies: of rows; the bytes from a side's first to its last, which may be more, must be its own ---
struct Shape { size_t bytes, rows; }; // rows of so many bytes, which need not be side by side
struct Side { const char* p; Block block; size_t apart, span; }; // from row to row; from the first byte to the end of the last
static Side side_of(const void* p, size_t apart, Shape shape) {
    return {(const char*)p, find_block(p), apart, (shape.rows - 1) * apart + shape.bytes};
}
static void copy_rows(char* to, size_t to_apart, const char* from, size_t from_apart, Shape shape) {
    for (size_t i = 0; i < shape.rows; i++) memcpy(to + i * to_apart, from + i * from_apart, shape.bytes);
}
// Returns true if CUDA may touch these bytes. It knows nothing about ordinary host memory.
static bool reaches(const Side& side) {
    return side.block.where == Where::HOST || (size_t)(side.block.begin + side.block.bytes - side.p) >= side.span;
}
static const char* place(const Side& side) { return side.block.where == Where::DEVICE ? "device" : "host"; }
static bool is_of_kind(const Side& dst, const Side& src, cudaMemcpyKind kind) {
    bool to_device = dst.block.where == Where::DEVICE, from_device = src.block.where == Where::DEVICE;
    switch (kind) {
        case cudaMemcpyHostToHost: return !to_device && !from_device;
        case cudaMemcpyHostToDevice: return to_device && !from_device;
        case cudaMemcpyDeviceToHost: return !to_device && from_device;
        case cudaMemcpyDeviceToDevice: return to_device && from_device;
        default: return kind == cudaMemcpyDefault;
    }
}
static cudaError_t check_copy(Call& call, const Side& dst, const Side& src, cudaMemcpyKind kind) {
    for (const Side* side : {&dst, &src}) {
        char what[160];
        describe(side->p, what, sizeof what);
        if (side->block.where == Where::HOST && *what) return call.fail(cudaErrorInvalidValue, "%p is %s", (void*)side->p, what);
        if (!side->p || !reaches(*side))
            return call.fail(cudaErrorInvalidValue, "%zu bytes %s %p, where there are %zu", side->span, side == &dst ? "to" : "from",
                             (void*)side->p, side->p ? (size_t)(side->block.begin + side->block.bytes - side->p) : 0);
    }
    if (!is_of_kind(dst, src, kind))
        return call.fail(cudaErrorInvalidValue, "from %s to %s memory is not kind %d", place(src), place(dst), (int)kind);
    if (dst.p < src.p + src.span && src.p < dst.p + dst.span) return call.fail(cudaErrorInvalidValue, "the two sides overlap");
    return cudaSuccess;
}
// CUDA_EMULATOR_COPY_MS: a copy from the device to pinned memory takes at least so long, and other streams go on meanwhile.
static std::function<bool()> copied_after(const Side& dst, const Side& src) {
    static const uint64_t ms = setting("CUDA_EMULATOR_COPY_MS", 0);
    if (!ms || dst.block.where != Where::PINNED || src.block.where != Where::DEVICE) return nullptr;
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    return [=] { return std::chrono::steady_clock::now() >= end; };
}
// Pinned memory is read or written when the stream gets there; until then a destination holds 0xff. An ordinary source is copied
// at once; for an ordinary destination the caller waits. `blocking`: cudaMemcpy, which also waits for pinned memory.
static cudaError_t copy(Call&& call, void* dst_p, size_t to_apart, const void* src_p, size_t from_apart, Shape shape,
                        cudaMemcpyKind kind, cudaStream_t stream, bool blocking) {
    CUstream_st* s = stream_for_work(call, stream);
    if (!s) return call.error;
    if (shape.bytes > to_apart || shape.bytes > from_apart)
        return call.fail(cudaErrorInvalidPitchValue, "rows of %zu bytes begin %zu and %zu bytes apart", shape.bytes,
                         to_apart, from_apart);
    if (!shape.bytes || !shape.rows) return cudaSuccess;
    char* to = (char*)dst_p;
    const char* from = (const char*)src_p;
    Side dst = side_of(to, to_apart, shape), src = side_of(from, from_apart, shape);
    if (cudaError_t error = check_copy(call, dst, src, kind)) return error;
    bool device_only = dst.block.where == Where::DEVICE && src.block.where == Where::DEVICE;
    bool ordinary = dst.block.where == Where::HOST || src.block.where == Where::HOST;
    bool at_once = dst.block.where == Where::DEVICE && src.block.where == Where::HOST;
    if (blocking || (ordinary && (captures(s) || !at_once)))
        if (cudaError_t error = refuse_in_capture(call, s)) return error;
    if (at_once) {
        std::vector<char> staged(from, from + src.span);
        push(s, call.name, [=] { copy_rows(to, to_apart, staged.data(), from_apart, shape); });
        return cudaSuccess;
    }
    if (dst.block.where == Where::PINNED && !captures(s))
        for (size_t i = 0; i < shape.rows; i++) memset(to + i * to_apart, 0xff, shape.bytes);
    Position done = push(s, call.name, [=] { copy_rows(to, to_apart, from, from_apart, shape); }, copied_after(dst, src));
    return ordinary || (blocking && !device_only) ? wait_for(call, done) : cudaSuccess;
}
static cudaError_t fill(Call&& call, void* p, int value, size_t bytes, cudaStream_t stream) {
    CUstream_st* s = stream_for_work(call, stream);
    if (!s) return call.error;
    if (!bytes) return cudaSuccess;
    Side dst = side_of(p, bytes, {bytes, 1});
    if (dst.block.where == Where::HOST || !reaches(dst))
        return call.fail(cudaErrorInvalidValue, "%zu bytes at %p, which is %s", bytes, p,
                         dst.block.where == Where::HOST ? "not device memory" : "less than that before its end");
    push(s, call.name, [=] { memset(p, value, bytes); });
    return cudaSuccess;
}

// --- the device ---
// CUDA_EMULATOR_CAPABILITY=75 is an older GPU, in what it says of itself and in its shared memory; the default is 90.
int capability(void) {
    static const int value = (int)setting("CUDA_EMULATOR_CAPABILITY", 90);
    return value;
}
static int attribute_of_device(cudaDeviceAttr attribute) { // -1: not known here
    switch (attribute) {
        // The instructions of 9.0 with only the shared memory of 8.0: a kernel that fits here fits on both.
        case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
        case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
        case cudaDevAttrMultiProcessorCount: return 4;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)largest_shared();
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return capability() == 75 ? 64 << 10 : 164 << 10;
        case cudaDevAttrMaxRegistersPerBlock: return 65536;
        case cudaDevAttrL2CacheSize: return 40 << 20;
        case cudaDevAttrClockRate: return 1410000;
        case cudaDevAttrMemoryClockRate: return 1215000;
        case cudaDevAttrGlobalMemoryBusWidth: return 5120;
        case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: return 1;
        default: return -1;
    }
}
static cudaError_t check_device(Call& call, int device) {
    if (call.error) return call.error;
    if (device >= 0 && device < devices()) return cudaSuccess;
    return call.fail(cudaErrorInvalidDevice, "device %d; there are %d", device, devices());
}
#define ERROR(code, text) {code, #code, text}
static const struct { cudaError_t code; const char *name, *text; } errors[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"),
};
} // namespace emulator

using namespace emulator;
extern "C" {
unsigned long long emulator_calls(const char* name) {
    std::unique_lock<std::mutex> lock(everything);
    auto found = calls.find(name);
    return found == calls.end() ? 0 : found->second;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = sticky_error;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    for (auto& e : errors) if (e.code == error) return e.name;
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    for (auto& e : errors) if (e.code == error) return e.text;
    return "unrecognized error code";
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
    return copy(Call(), dst, bytes, src, bytes, {bytes, 1}, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(Call(), dst, bytes, src, bytes, {bytes, 1}, kind, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_apart, const void* src, size_t src_apart, size_t bytes, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(Call(), dst, dst_apart, src, src_apart, {bytes, rows}, kind, stream, false);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return fill(Call(), p, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    return fill(Call(), p, value, bytes, stream);
}

cudaError_t cudaProfilerStart(void) { return set_profiled(Call(), true); }
cudaError_t cudaProfilerStop(void) { return set_profiled(Call(), false); }

cudaError_t cudaDriverGetVersion(int* version) { // 0: there is no driver
    *version = driver_version();
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    Call call;
    *count = call.error ? 0 : devices();
    return call.error;
}
cudaError_t cudaSetDevice(int device) {
    Call call;
    if (cudaError_t error = check_device(call, device)) return error;
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    Call call;
    *device = current_device;
    return call.error;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    Call call;
    if (cudaError_t error = check_device(call, device)) return error;
    *value = attribute_of_device(attribute);
    return *value >= 0 ? cudaSuccess : call.fail(cudaErrorInvalidValue, "attribute %d is not emulated", (int)attribute);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    size_t available, total;
    if (cudaError_t error = cudaMemGetInfo(&available, &total)) return error;
    Call call;
    if (cudaError_t error = check_device(call, device)) return error;
    *properties = cudaDeviceProp{};
    snprintf(properties->name, sizeof properties->name, "CUDA emulator");
    properties->totalGlobalMem = total;
#define PROPERTY(field, name) properties->field = (decltype(properties->field))attribute_of_device(cudaDevAttr##name);
    PROPERTY(major, ComputeCapabilityMajor) PROPERTY(minor, ComputeCapabilityMinor)
    PROPERTY(multiProcessorCount, MultiProcessorCount) PROPERTY(warpSize, WarpSize)
    PROPERTY(maxThreadsPerBlock, MaxThreadsPerBlock) PROPERTY(maxThreadsPerMultiProcessor, MaxThreadsPerMultiProcessor)
    PROPERTY(sharedMemPerBlock, MaxSharedMemoryPerBlock) PROPERTY(sharedMemPerBlockOptin, MaxSharedMemoryPerBlockOptin)
    PROPERTY(sharedMemPerMultiprocessor, MaxSharedMemoryPerMultiprocessor) PROPERTY(regsPerBlock, MaxRegistersPerBlock)
    PROPERTY(l2CacheSize, L2CacheSize) PROPERTY(memoryBusWidth, GlobalMemoryBusWidth)
    PROPERTY(unifiedAddressing, UnifiedAddressing) PROPERTY(concurrentKernels, ConcurrentKernels)
    properties->uuid.bytes[0] = (char)(1 + device); // all processes see the same GPUs
    return cudaSuccess;
}
}
