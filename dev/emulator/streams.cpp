/*
streams.cpp - streams, events, launches and host functions. Work runs as late as CUDA allows: only when a host call waits, and
then only what that wait needs: earlier work on the stream and, if the stream waits for an event, earlier work on the event's
stream. CUDA_EMULATOR_SEED chooses among streams that could continue. So if a wait is missing, the other stream's work has not run
yet, or runs in another order under another seed.

While a stream captures, its work is kept in order and does not run: it becomes a graph, and each launch of the graph issues all
of it to a stream.

Read in this order: push, wait_for, run_one.
*/
#include "runtime.h"
#include "engine.h"
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace emulator {
// One cudaEventRecord: it is done when the stream gets to it.
struct Recording { Position at; bool done; double ms; };
struct Work {
    const char* name;
    std::function<void()> run;           // may be empty
    std::shared_ptr<Recording> waits_for; // the work cannot start before this is done; or NULL
    std::shared_ptr<Recording> records;   // done when the work is, or NULL
    bool on_host;                        // a host function
    std::function<bool()> ready = nullptr; // it cannot start before this is true; may be empty
};
} // namespace emulator
using namespace emulator;
struct CUgraph_st { std::vector<Work> works; }; // what a capture recorded
struct CUgraphExec_st {
    std::vector<Work> works;
    std::shared_ptr<Recording> latest; // the end of its latest launch, or NULL
};
struct CUstream_st {
    std::deque<Work> queue;
    uint64_t issued, finished; // works, since it was made
    bool blocking;             // it and the stream NULL wait for one another
    bool busy;                 // its host function runs now, in some thread
    bool destroyed;
    cudaGraph_t capture = nullptr; // its work since cudaStreamBeginCapture, owned; NULL: it does not capture
    bool spoilt = false;           // by a mistake; then there will be no graph
    std::thread::id capturing = {}; // the thread that began it
    int priority = 0;              // it changes nothing here
};
struct CUevent_st {
    std::shared_ptr<Recording> latest; // NULL until it is recorded
    bool timed;
};

namespace emulator {
static std::vector<std::unique_ptr<CUstream_st>> streams; // never freed; the first is NULL, the legacy default stream
static std::set<cudaEvent_t> events;
static std::set<cudaGraph_t> graphs;
static std::set<cudaGraphExec_t> executables;
static std::condition_variable_any host_function_ended;

static std::vector<std::unique_ptr<CUstream_st>>& all_streams(void) {
    if (streams.empty()) streams.emplace_back(new CUstream_st{{}, 0, 0, true, false, false});
    return streams;
}
CUstream_st* find_stream(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return all_streams()[0].get();
    for (auto& s : streams) if (s.get() == handle && !s->destroyed) return handle;
    return nullptr;
}

static cudaError_t no_stream(Call& call, cudaStream_t handle) {
    return call.fail(cudaErrorInvalidResourceHandle, "%p is not a stream, or was destroyed", (void*)handle);
}

// --- captures: CUDA Programming Guide, Prohibited and Unhandled Operations ---
bool captures(const CUstream_st* s) { return s->capture; }
static cudaError_t spoil(Call& call, CUstream_st* s, cudaError_t error, const char* why) {
    s->spoilt = true;
    return call.fail(error, "the stream captures: %s", why);
}
// Captured work does not run, so it cannot be waited for; the thread's other waits or allocations would happen once, now, and not
// in the graph.
cudaError_t refuse_in_capture(Call& call, const CUstream_st* waited_for) {
    for (auto& s : streams)
        if (s->capture && (s.get() == waited_for || s->capturing == std::this_thread::get_id()))
            return spoil(call, s.get(), cudaErrorStreamCaptureUnsupported, "meanwhile nothing waits or allocates");
    return cudaSuccess;
}
CUstream_st* stream_for_work(Call& call, cudaStream_t handle) {
    if (call.error) return nullptr;
    CUstream_st* s = find_stream(handle);
    if (!s) call.error = no_stream(call, handle);
    else if (s->spoilt) call.error = call.fail(cudaErrorStreamCaptureInvalidated, "the stream's capture is spoilt: end it first");
    return call.error ? nullptr : s;
}

// --- issuing work ---
static Position append(CUstream_st* s, Work work) {
    if (s->capture) {
        s->capture->works.push_back(std::move(work));
        return {s, s->issued}; // nothing to wait for
    }
    s->queue.push_back(std::move(work));
    return {s, ++s->issued};
}
static std::shared_ptr<Recording> record(CUstream_st* s) {
    auto recording = std::make_shared<Recording>(Recording{{s, s->issued + 1}, false, 0});
    append(s, Work{"an event", nullptr, nullptr, recording, false});
    return recording;
}
static void wait_on_stream(CUstream_st* s, std::shared_ptr<Recording> recording) {
    append(s, Work{"waiting for an event", nullptr, std::move(recording), nullptr, false});
}
// The legacy default stream and the blocking ones: each work of either waits for all work issued before to the other.
static void wait_for_legacy(CUstream_st* s) {
    CUstream_st* legacy = all_streams()[0].get();
    if (s == legacy) {
        for (auto& other : streams)
            if (other.get() != legacy && other->blocking && !other->queue.empty()) wait_on_stream(legacy, record(other.get()));
    } else if (s->blocking && !legacy->queue.empty()) wait_on_stream(s, record(legacy));
}
Position push(CUstream_st* s, const char* name, std::function<void()> work, std::function<bool()> ready) {
    wait_for_legacy(s);
    return append(s, Work{name, std::move(work), nullptr, nullptr, false, std::move(ready)});
}
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> work) {
    return enqueue_when(stream, name, nullptr, std::move(work)); // at once, when its turn comes
}
bool has_met_others;
cudaError_t enqueue_when(cudaStream_t stream, const char* name, std::function<bool()> ready, std::function<void()> work) {
    Call call(name);
    CUstream_st* s = stream_for_work(call, stream);
    if (!s) return call.error;
    if (ready && s->capture) return spoil(call, s, cudaErrorStreamCaptureUnsupported, "collectives in a graph are not emulated");
    push(s, name, std::move(work), std::move(ready));
    return cudaSuccess;
}
// CUDA_EMULATOR_FAULT=TEXT: the first kernel that has it in its name or in its launch's file fails with an illegal address.
static bool plays_fault(const Configuration& c) {
    static const char* wanted = getenv("CUDA_EMULATOR_FAULT");
    return wanted && *wanted && (strstr(c.kernel, wanted) || strstr(c.site.file, wanted));
}
static void refuse_in_kernel(const Configuration& c) { // or it would wait for the launch that it is a part of
    if (self) fail(self, c.site, "a launch of %s from device code", c.kernel);
}
// The first launch of a kernel loads it, unless CUDA_MODULE_LOADING says EAGER, and that may wait until the GPU is idle (CUDA
// Programming Guide, Lazy Loading). Here it does where a collective is under way.
static void load(const void* kernel);
void enqueue_kernel(const Configuration& c, cudaStream_t stream, const void* kernel, std::function<void()> work) {
    refuse_in_kernel(c);
    check_configuration(c, kernel);
    load(kernel);
    if (plays_fault(c)) work = [] { sticky_error = cudaErrorIllegalAddress; };
    enqueue(stream, c.kernel, std::move(work)); // cudaGetLastError will return its result
}
void check_argument(const Configuration& c, int number, const void* p) {
    refuse_in_kernel(c);
    Call call(c.kernel);
    if (!p || call.error || find_block(p).where != Where::HOST) return;
    char what[160];
    describe(p, what, sizeof what);
    fail(nullptr, c.site, "launch of %s: argument %d, %p, is %s", c.kernel, number + 1, p, *what ? what : "ordinary host memory");
}

// --- running work ---
static uint64_t next_random(void) { // splitmix64
    static uint64_t state = setting("CUDA_EMULATOR_SEED", 1) << 32;
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}
// The clock for timing events: each work takes some time, which the seed decides. A program that chooses by measured times makes
// the same choice again under the same seed, and perhaps another under another seed.
static double clock_ms;
static void run_host_function(Call& call, CUstream_st* s, Work& work) {
    close_memory();
    s->busy = true;
    call.lock.unlock();
    work.run();
    call.lock.lock();
    s->busy = false;
    host_function_ended.notify_all();
}
static void run_one(Call& call, CUstream_st* s) {
    Work work = std::move(s->queue.front());
    running = work.name;
    if (work.on_host) run_host_function(call, s, work);
    else if (work.run) { open_memory(); work.run(); }
    running = nullptr;
    s->queue.pop_front();
    s->finished++;
    clock_ms += (double)(1 + next_random() % 1000) * 1e-3;
    if (work.records) { work.records->done = true; work.records->ms = clock_ms; }
}

constexpr uint64_t ALL = UINT64_MAX;
typedef std::map<CUstream_st*, uint64_t> Needed; // for each stream, the works that must be finished
static void need(Needed& needed, Position until) {
    uint64_t& number = needed[until.stream];
    uint64_t from = std::max(number, until.stream->finished);
    number = std::max(number, until.number);
    for (uint64_t i = from; i < until.number; i++) {
        const Work& work = until.stream->queue[i - until.stream->finished];
        if (work.waits_for && !work.waits_for->done) need(needed, work.waits_for->at);
    }
}
static bool can_go_on(const CUstream_st* s) {
    const Work& next = s->queue.front();
    return !s->busy && !(next.waits_for && !next.waits_for->done) && !(next.ready && !next.ready());
}
// Call when all needed works are waiting for a host function in another thread, or for another process.
static void wait_for_others(Call& call) {
    close_memory();
    host_function_ended.wait_for(call.lock, std::chrono::microseconds(100));
}
// Runs at most `most` of the needed works, and waits for other threads or processes only if all must run. Streams take turns of
// random length, short and long ones alike.
static cudaError_t run_needed(Call& call, const Needed& needed, uint64_t most) {
    const bool waits = most == ALL;
    while (most && !sticky_error) {
        std::vector<CUstream_st*> ready;
        bool finished = true;
        for (auto& n : needed) {
            if (n.first->finished >= n.second) continue;
            finished = false;
            if (can_go_on(n.first)) ready.push_back(n.first);
        }
        if (finished) break;
        if (ready.empty() && !waits) break;
        if (ready.empty()) {
            wait_for_others(call);
            continue;
        }
        CUstream_st* s = ready[next_random() % ready.size()];
        uint64_t turn = std::min<uint64_t>(most, 1 + next_random() % ((uint64_t)1 << next_random() % 8));
        for (; turn && !sticky_error && s->finished < needed.at(s) && can_go_on(s); turn--, most--) run_one(call, s);
    }
    close_memory();
    return remember(sticky_error);
}
static bool loads_at_once(void) {
    static const char* loading = getenv("CUDA_MODULE_LOADING");
    return loading && !strcmp(loading, "EAGER");
}
// With CUDA_EMULATOR_WAITS=FILE a line at exit says how often the host waited until work was done, also by asking over and over;
// how often it asked for times between events while the GPU had nothing to do; and when kernels were loaded.
static struct Waits {
    uint64_t host = 0, idle = 0; // under Call's lock
    ~Waits() {
        append_to("CUDA_EMULATOR_WAITS", "the host waited %zu times, and asked %zu times what an idle GPU had taken; kernels were"
                  " loaded %s\n", host, idle, loads_at_once() ? "at once" : "when first launched");
    }
} waits;
cudaError_t wait_for(Call& call, Position until) {
    waits.host++;
    Needed needed;
    need(needed, until);
    return run_needed(call, needed, ALL);
}
static Needed everything_issued(void) {
    Needed needed;
    for (auto& s : all_streams()) need(needed, {s.get(), s->issued});
    return needed;
}
cudaError_t wait_for_all(Call& call) {
    waits.host++;
    return run_needed(call, everything_issued(), ALL);
}
void go_on(void) {
    Call call;
    run_needed(call, everything_issued(), 16);
}
Position end_of(cudaStream_t stream) {
    Call call;
    CUstream_st* s = find_stream(stream);
    return {s, s->issued};
}
std::map<CUstream_st*, uint64_t> finished_before(Position later) {
    Call call;
    Needed finished;
    for (auto& s : all_streams()) finished[s.get()] = s->finished;
    need(finished, later);
    return finished;
}
static void load(const void* kernel) {
    static std::set<const void*> loaded; // under Call's lock
    Call call;
    if (loads_at_once() || call.error || !loaded.insert(kernel).second) return;
    for (auto& s : all_streams())
        for (const Work& work : s->queue)
            if (work.ready) {
                run_needed(call, everything_issued(), ALL);
                return;
            }
}
// Returns true if it is done. Polling makes progress: each call runs a few works, at most half of them.
static cudaError_t query(Call& call, Position until) {
    Needed needed;
    need(needed, until);
    uint64_t left = 0;
    for (auto& n : needed) left += n.second - std::min(n.second, n.first->finished);
    if (cudaError_t error = run_needed(call, needed, std::min<uint64_t>(std::max<uint64_t>(left / 2, 1), 16))) return error;
    return until.stream->finished >= until.number ? cudaSuccess : remember(cudaErrorNotReady);
}
constexpr int HIGHEST_PRIORITY = -5; // the lowest is 0
static cudaError_t no_event(Call& call, cudaEvent_t event) {
    return call.fail(cudaErrorInvalidResourceHandle, "%p is not an event, or was destroyed", (void*)event);
}
template <class T> static cudaError_t destroy(Call&& call, std::set<T*>& made, T* handle, cudaError_t error) {
    if (call.error) return call.error;
    if (!made.erase(handle)) return call.fail(error, "%p was never made, or was destroyed before", (void*)handle);
    delete handle;
    return cudaSuccess;
}
} // namespace emulator

// --- CUDA's functions ---
extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    CALL;
    if (!stream || flags > cudaStreamNonBlocking)
        return call.fail(cudaErrorInvalidValue, "no place for the result, or unknown flags");
    all_streams().emplace_back(new CUstream_st{{}, 0, 0, flags == cudaStreamDefault, false, false});
    *stream = streams.back().get();
    (*stream)->priority = std::min(0, std::max(HIGHEST_PRIORITY, priority));
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    Call call;
    CUstream_st* s = stream_for_work(call, stream);
    if (s) *priority = s->priority;
    return call.error;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
    Call call;
    *lowest = 0;
    *highest = HIGHEST_PRIORITY;
    return call.error;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { // its work still runs
    CALL;
    if (!stream || !find_stream(stream)) return no_stream(call, stream);
    if (stream->capture) return spoil(call, stream, cudaErrorStreamCaptureUnsupported, "end that before it is destroyed");
    stream->destroyed = true;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CALL_ON(stream);
    if (cudaError_t error = refuse_in_capture(call, s)) return error;
    return wait_for(call, {s, s->issued});
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CALL_ON(stream);
    if (cudaError_t error = refuse_in_capture(call, s)) return error;
    cudaError_t answer = query(call, {s, s->issued});
    waits.host += answer == cudaSuccess;
    return answer;
}
cudaError_t cudaDeviceSynchronize(void) {
    CALL;
    for (auto& s : all_streams())
        if (cudaError_t error = refuse_in_capture(call, s.get())) return error;
    return wait_for_all(call);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CALL_ON(stream);
    if (!events.count(event)) return no_event(call, event);
    if (s->capture) return spoil(call, s, cudaErrorStreamCaptureIsolation, "the event's work is not part of the graph");
    if (event->latest) wait_on_stream(s, event->latest); // an event that was never recorded needs no wait
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    CALL_ON(stream);
    wait_for_legacy(s);
    append(s, Work{"a host function", [=] { function(data); }, nullptr, nullptr, true});
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    CALL;
    if (!event || flags & ~(cudaEventBlockingSync | cudaEventDisableTiming))
        return call.fail(cudaErrorInvalidValue, "no place for the result, or unknown flags");
    *event = *events.insert(new CUevent_st{nullptr, !(flags & cudaEventDisableTiming)}).first;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { // streams that wait for it still do
    return destroy(Call(), events, event, cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALL_ON(stream);
    if (!events.count(event)) return no_event(call, event);
    if (s->capture) return spoil(call, s, cudaErrorStreamCaptureUnsupported, "events in a graph are not emulated");
    wait_for_legacy(s);
    event->latest = record(s);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    CALL;
    if (!events.count(event)) return no_event(call, event);
    if (cudaError_t error = refuse_in_capture(call)) return error;
    return event->latest ? wait_for(call, event->latest->at) : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    CALL;
    if (!events.count(event)) return no_event(call, event);
    if (cudaError_t error = refuse_in_capture(call)) return error;
    return event->latest ? query(call, event->latest->at) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    CALL;
    for (cudaEvent_t event : {start, end}) {
        if (!events.count(event)) return no_event(call, event);
        if (!event->latest || !event->timed)
            return call.fail(cudaErrorInvalidResourceHandle, event->timed ? "it was never recorded" : "it keeps no time");
    }
    if (!start->latest->done || !end->latest->done) return remember(cudaErrorNotReady);
    *ms = (float)(end->latest->ms - start->latest->ms);
    waits.idle += std::all_of(all_streams().begin(), all_streams().end(), [](auto& s) { return s->queue.empty(); });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    CALL_ON(stream);
    if (s->capture) return call.fail(cudaErrorIllegalState, "the stream captures already");
    if (s->blocking) return call.fail(cudaErrorStreamCaptureUnsupported, "it is the stream NULL, or waits for it");
    if (mode != cudaStreamCaptureModeThreadLocal) return call.fail(cudaErrorInvalidValue, "mode %d is not emulated", (int)mode);
    s->capture = new CUgraph_st;
    s->capturing = std::this_thread::get_id();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    CALL;
    CUstream_st* s = find_stream(stream);
    if (!s) return no_stream(call, stream);
    if (!s->capture) return call.fail(cudaErrorIllegalState, "the stream does not capture");
    if (s->capturing != std::this_thread::get_id())
        return call.fail(cudaErrorStreamCaptureWrongThread, "another thread began it");
    *graph = s->spoilt ? nullptr : *graphs.insert(s->capture).first;
    if (s->spoilt) delete s->capture;
    s->capture = nullptr;
    s->spoilt = false;
    return *graph ? cudaSuccess : call.fail(cudaErrorStreamCaptureInvalidated, "there is no graph");
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    CALL;
    if (!executable || !graphs.count(graph) || flags)
        return call.fail(cudaErrorInvalidValue, "no place for the result, no graph, or flags, which are not emulated");
    *executable = *executables.insert(new CUgraphExec_st{graph->works, nullptr}).first;
    return cudaSuccess;
}
// A graph does not run twice at the same time: a launch on another stream waits for the one before.
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    CALL_ON(stream);
    if (!executables.count(executable))
        return call.fail(cudaErrorInvalidValue, "%p is not a graph, or was destroyed", (void*)executable);
    if (s->capture) return spoil(call, s, cudaErrorStreamCaptureUnsupported, "a graph in a graph is not emulated");
    wait_for_legacy(s);
    if (executable->latest) wait_on_stream(s, executable->latest);
    for (const Work& work : executable->works) append(s, work);
    executable->latest = record(s);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { // executable graphs made from it stay
    return destroy(Call(), graphs, graph, cudaErrorInvalidValue);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { // its launches still run
    return destroy(Call(), executables, executable, cudaErrorInvalidValue);
}
}
