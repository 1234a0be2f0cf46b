/*
runtime.h - the stand-in for the CUDA runtime, as its parts (memory.cpp, streams.cpp, runtime.cpp) and the stand-ins for
libraries (cublaslt.cpp, ...) see it.

Device memory is separate from the host's: only a stream's work can touch it. Work stays in its stream's queue until some host
call waits for it, and runs then, in the waiting thread. While a host function on a stream runs, the lock is free and device
memory is closed, because the function may wait for other threads.
*/
#ifndef CUDA_EMULATOR_RUNTIME_H
#define CUDA_EMULATOR_RUNTIME_H
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <functional>
#include <map>
#include <mutex>

// In a function that takes (..., format, ...): declares the text that they make, cut off at `size`.
#define FORMATTED(text, size, format) \
    char text[size]; \
    va_list arguments_; \
    va_start(arguments_, format); \
    vsnprintf(text, size, format, arguments_); \
    va_end(arguments_)

namespace emulator {
int capability(void);         // of the GPU, 90 or 75
size_t largest_shared(void);  // bytes of shared memory that a block may ask for
uint64_t setting(const char* name, uint64_t otherwise); // a CUDA_EMULATOR_* variable, which must be a number

// --- for the stand-ins of libraries ---
// Work for a stream: it may touch device memory, and must call neither this interface nor CUDA's. `name` must stay valid.
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> work);
// The same, for work that depends on other processes: it may not run before `ready` returns true. `ready` is called now and then;
// it has the same rights as work.
cudaError_t enqueue_when(cudaStream_t stream, const char* name, std::function<bool()> ready, std::function<void()> work);
void go_on(void);                            // a host call waits for another process: the GPU does a few works that it can do
extern bool has_met_others;                  // set by a stand-in: there have been collectives besides the first ones, which connect
bool is_profiled(void);                      // between cudaProfilerStart, or the beginning, and cudaProfilerStop
bool on_device(const void* p, size_t bytes); // whether these bytes lie in one live allocation of device memory
// Appends a line to the file that a CUDA_EMULATOR_* variable names, if it is set.
void append_to(const char* setting, const char* format, ...) __attribute__((format(printf, 2, 3)));
// "cuda emulator: CALL: what": the reason that goes with an error code.
void explain(const char* call, const char* format, ...) __attribute__((format(printf, 2, 3)));

// --- calls: each function of the runtime begins with one of these, and most by CALL or, with `s` for the stream, by CALL_ON ---
#define CALL \
    Call call; \
    if (call.error) return call.error
#define CALL_ON(stream) \
    Call call; \
    CUstream_st* s = stream_for_work(call, stream); \
    if (!s) return call.error
struct Call {
    const char* name;                  // the function's own
    std::unique_lock<std::mutex> lock; // over everything in these files
    cudaError_t error;                 // why the call cannot do anything: no driver, no device, an earlier fault; or cudaSuccess
    explicit Call(const char* name = __builtin_FUNCTION());
    cudaError_t fail(cudaError_t error, const char* format, ...) __attribute__((format(printf, 3, 4))); // also reports the reason
};
cudaError_t remember(cudaError_t error); // for cudaGetLastError; returns it
extern thread_local const char* running; // the work that this thread runs, or NULL
extern cudaError_t sticky_error;         // a kernel's fault, after which every call fails

// --- memory.cpp: allocations, and when they may be touched ---
enum class Where { HOST, PINNED, DEVICE };
struct Block { Where where; const char* begin; size_t bytes; }; // HOST: unknown to CUDA, no begin or bytes
Block find_block(const void* p);                                // one past its end still belongs to the block
void describe(const void* p, char* text, size_t size);          // "byte 8 of 64 bytes of device memory that were freed", or ""
void open_memory(void);                                         // for a stream's work
void close_memory(void);

// --- streams.cpp ---
struct Position { CUstream_st* stream; uint64_t number; };      // number: of a work, counted since its stream was made
Position end_of(cudaStream_t stream);                           // of what it has been given so far
std::map<CUstream_st*, uint64_t> finished_before(Position later); // how many works of each stream are over when it begins, on every GPU
CUstream_st* find_stream(cudaStream_t handle);                  // NULL if it was never made, or destroyed
CUstream_st* stream_for_work(Call& call, cudaStream_t handle);  // NULL, and call.error, if it takes no work
bool captures(const CUstream_st* stream);                       // its work becomes a graph and does not run
// For calls that wait for a stream or allocate. Refused while that stream captures, or this thread captures any stream, and the
// capture is spoilt.
cudaError_t refuse_in_capture(Call& call, const CUstream_st* waited_for = nullptr);
Position push(CUstream_st* stream, const char* name, std::function<void()> work,
              std::function<bool()> ready = nullptr); // where its queue ends now; ready: as in enqueue_when
cudaError_t wait_for(Call& call, Position until);
cudaError_t wait_for_all(Call& call);
} // namespace emulator
#endif
