/*
streams.cpp - streams, events, launches and host functions. Work runs as late as CUDA allows: only when a host call waits, and
then only what that wait needs, which is what came before on the stream and, where the stream waits for an event, what came
before the event on the other. Among streams that could go on, CUDA_EMULATOR_SEED chooses. So where a wait is missing, the other
stream's work has not run yet, or runs in another order under another seed.

Read in this order: push, wait_for, run_one.
*/
#include "runtime.h"
#include "engine.h"
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace emulator {
// One cudaEventRecord: it is done when the stream comes to it.
struct Recording { Position at; bool done; double ms; };
struct Work {
    const char* name;
    std::function<void()> run;           // may be empty
    std::shared_ptr<Recording> waits_for; // it cannot start before, or NULL
    std::shared_ptr<Recording> records;   // done with it, or NULL
    bool on_host;                        // a host function
    std::function<bool()> ready = nullptr; // it cannot start before this is true; may be empty
};
} // namespace emulator
using namespace emulator;
struct CUstream_st {
    std::deque<Work> queue;
    uint64_t issued, finished; // works, since it was made
    bool blocking;             // it and the stream NULL wait for one another
    bool busy;                 // its host function runs now, in some thread
    bool destroyed;
};
struct CUevent_st {
    std::shared_ptr<Recording> latest; // NULL until it is recorded
    bool timed;
};

namespace emulator {
static std::vector<std::unique_ptr<CUstream_st>> streams; // never freed; the first is NULL, the legacy default stream
static std::set<cudaEvent_t> events;
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

// --- asking for work ---
static Position append(CUstream_st* s, Work work) {
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
// The legacy default stream and the blocking ones: each work of either waits for all that the other was asked before.
static void wait_for_legacy(CUstream_st* s) {
    CUstream_st* legacy = all_streams()[0].get();
    if (s == legacy) {
        for (auto& other : streams)
            if (other.get() != legacy && other->blocking && !other->queue.empty()) wait_on_stream(legacy, record(other.get()));
    } else if (s->blocking && !legacy->queue.empty()) wait_on_stream(s, record(legacy));
}
Position push(CUstream_st* s, const char* name, std::function<void()> work) {
    wait_for_legacy(s);
    return append(s, Work{name, std::move(work), nullptr, nullptr, false});
}
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> work) {
    Call call(name);
    if (call.error) return call.error;
    CUstream_st* s = find_stream(stream);
    if (!s) return call.fail(cudaErrorInvalidResourceHandle, "%p is no stream", (void*)stream);
    push(s, name, std::move(work));
    return cudaSuccess;
}
cudaError_t enqueue_when(cudaStream_t stream, const char* name, std::function<bool()> ready, std::function<void()> work) {
    cudaError_t error = enqueue(stream, name, std::move(work));
    Call call(name);
    if (!error) find_stream(stream)->queue.back().ready = std::move(ready);
    return error;
}
// CUDA_EMULATOR_FAULT=TEXT: the first kernel that has it in its name or in its launch's file fails with an illegal address.
static bool plays_fault(const Configuration& c) {
    static const char* wanted = getenv("CUDA_EMULATOR_FAULT");
    return wanted && *wanted && (strstr(c.kernel, wanted) || strstr(c.site.file, wanted));
}
void enqueue_kernel(const Configuration& c, cudaStream_t stream, const void* kernel, std::function<void()> work) {
    check_configuration(c, kernel);
    if (plays_fault(c)) work = [] { sticky_error = cudaErrorIllegalAddress; };
    enqueue(stream, c.kernel, std::move(work)); // what it returns, cudaGetLastError will say
}
void check_argument(const Configuration& c, int number, const void* p) {
    if (self) fail(self, c.site, "a launch of %s from device code", c.kernel);
    Call call(c.kernel);
    if (!p || call.error || find_block(p).where != Where::HOST) return;
    char what[160];
    describe(p, what, sizeof what);
    fail(nullptr, c.site, "launch of %s: argument %d, %p, is %s", c.kernel, number + 1, p, *what ? what : "ordinary host memory");
}

// --- doing it ---
static uint64_t next_random(void) { // splitmix64
    static uint64_t state = setting("CUDA_EMULATOR_SEED", 1) << 32;
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}
// What events are timed by: each work takes some time, which the seed decides. Whoever chooses by measured times chooses the
// same way again under the same seed, and perhaps another under another.
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
// All works that are needed wait: for a host function in another thread, or for another process.
static void wait_for_others(Call& call) {
    close_memory();
    host_function_ended.wait_for(call.lock, std::chrono::microseconds(100));
}
// Runs at most `most` works of those needed, and waits for others only if all must be run. Streams take turns of random length,
// short and long ones alike.
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
cudaError_t wait_for(Call& call, Position until) {
    Needed needed;
    need(needed, until);
    return run_needed(call, needed, ALL);
}
cudaError_t wait_for_all(Call& call) {
    Needed needed;
    for (auto& s : all_streams()) need(needed, {s.get(), s->issued});
    return run_needed(call, needed, ALL);
}
// Whether it is done. Whoever keeps asking gets there: each call runs a few works, at most half of them.
static cudaError_t query(Call& call, Position until) {
    Needed needed;
    need(needed, until);
    uint64_t left = 0;
    for (auto& n : needed) left += n.second - std::min(n.second, n.first->finished);
    if (cudaError_t error = run_needed(call, needed, std::min<uint64_t>(std::max<uint64_t>(left / 2, 1), 16))) return error;
    return until.stream->finished >= until.number ? cudaSuccess : remember(cudaErrorNotReady);
}
static cudaError_t make_stream(Call& call, cudaStream_t* stream, unsigned flags) {
    if (call.error) return call.error;
    if (!stream || flags > cudaStreamNonBlocking)
        return call.fail(cudaErrorInvalidValue, "no place for the result, or unknown flags");
    all_streams().emplace_back(new CUstream_st{{}, 0, 0, flags == cudaStreamDefault, false, false});
    *stream = streams.back().get();
    return cudaSuccess;
}
static cudaError_t make_event(Call& call, cudaEvent_t* event, unsigned flags) {
    if (call.error) return call.error;
    if (!event || flags & ~(cudaEventBlockingSync | cudaEventDisableTiming))
        return call.fail(cudaErrorInvalidValue, "no place for the result, or unknown flags");
    *event = *events.insert(new CUevent_st{nullptr, !(flags & cudaEventDisableTiming)}).first;
    return cudaSuccess;
}
static cudaError_t no_stream(Call& call, cudaStream_t stream) {
    return call.fail(cudaErrorInvalidResourceHandle, "%p is no stream, or was destroyed", (void*)stream);
}
static cudaError_t no_event(Call& call, cudaEvent_t event) {
    return call.fail(cudaErrorInvalidResourceHandle, "%p is no event, or was destroyed", (void*)event);
}
} // namespace emulator

// --- CUDA's functions ---
extern "C" {
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    Call call;
    return make_stream(call, stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    Call call;
    return make_stream(call, stream, flags);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    Call call;
    return make_stream(call, stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { // what it was asked is still done
    Call call;
    if (call.error) return call.error;
    if (!stream || !find_stream(stream)) return no_stream(call, stream);
    stream->destroyed = true;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Call call;
    if (call.error) return call.error;
    CUstream_st* s = find_stream(stream);
    return s ? wait_for(call, {s, s->issued}) : no_stream(call, stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Call call;
    if (call.error) return call.error;
    CUstream_st* s = find_stream(stream);
    return s ? query(call, {s, s->issued}) : no_stream(call, stream);
}
cudaError_t cudaDeviceSynchronize(void) {
    Call call;
    return call.error ? call.error : wait_for_all(call);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Call call;
    if (call.error) return call.error;
    CUstream_st* s = find_stream(stream);
    if (!s) return no_stream(call, stream);
    if (!events.count(event)) return no_event(call, event);
    if (event->latest) wait_on_stream(s, event->latest); // an event that was never recorded is no obstacle
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    Call call;
    if (call.error) return call.error;
    CUstream_st* s = find_stream(stream);
    if (!s) return no_stream(call, stream);
    wait_for_legacy(s);
    append(s, Work{"a host function", [=] { function(data); }, nullptr, nullptr, true});
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    Call call;
    return make_event(call, event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    Call call;
    return make_event(call, event, flags);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { // streams that wait for it still do
    Call call;
    if (call.error) return call.error;
    if (!events.erase(event)) return no_event(call, event);
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Call call;
    if (call.error) return call.error;
    CUstream_st* s = find_stream(stream);
    if (!s) return no_stream(call, stream);
    if (!events.count(event)) return no_event(call, event);
    wait_for_legacy(s);
    event->latest = record(s);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Call call;
    if (call.error) return call.error;
    if (!events.count(event)) return no_event(call, event);
    return event->latest ? wait_for(call, event->latest->at) : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    Call call;
    if (call.error) return call.error;
    if (!events.count(event)) return no_event(call, event);
    return event->latest ? query(call, event->latest->at) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    Call call;
    if (call.error) return call.error;
    for (cudaEvent_t event : {start, end}) {
        if (!events.count(event)) return no_event(call, event);
        if (!event->latest || !event->timed)
            return call.fail(cudaErrorInvalidResourceHandle, event->timed ? "it was never recorded" : "it keeps no time");
    }
    if (!start->latest->done || !end->latest->done) return remember(cudaErrorNotReady);
    *ms = (float)(end->latest->ms - start->latest->ms);
    return cudaSuccess;
}
}
