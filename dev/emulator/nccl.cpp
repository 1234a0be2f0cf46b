/*
nccl.cpp - a stand-in for the part of NCCL that llmc/comm/comm_nccl.cuh uses, between processes of one machine: communicators,
collectives, sends and receives in groups, as nccl.h describes them. It refuses what NCCL refuses or forbids: two ranks on one
GPU, a communicator that is destroyed or not ready yet, buffers that are not on the GPU, end too early or overlap.

A communicator is a folder, and a message is a file in it. An operation is a few works on its stream: one writes this rank's
data, and the next runs once all other ranks have written theirs, whatever their processes do meanwhile. Works run as late as
possible (streams.cpp), and those of a communicator one after another, as NCCL's kernels do. At exit() a work that was never
finished is waited for without end, as destructors of a driver and of libraries may wait for a kernel.

Connections are made when they are first needed: a message's first way from one rank to another, and a communicator's first tree or
ring. There hosts meet: a launch waits until the others have come to theirs, and what was issued before runs meanwhile. With a
blocking communicator the call waits, as groupLaunch() of NCCL does in the caller; with a non-blocking one a thread of NCCL's would,
so the call returns, and nothing is on the stream before ncclCommGetAsyncError answers that it is ready, which takes some
microseconds in any case. A caller that does not wait until then is refused. ncclCommSplit and ncclCommWindowRegister behave as in
NCCL 2.28: without blocking they return ncclSuccess at once, and their result is there when the communicator is ready again.
CUDA_EMULATOR_NCCL has other ways (README.md).
Sums go round a ring, beginning at another rank for each part, and are rounded at each rank: their bits differ from rank order's.
*/
#include "runtime.h"
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <memory>
#include <nccl.h>
#include <set>
#include <string>
#include <tuple>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace files = std::filesystem;
namespace {
// An operation, and where it ends on its stream.
struct Flight { const char* kind; emulator::Position end; };
// What must be the same on every rank, and what the rank contributes.
struct Header { char kind[16]; uint64_t count; int32_t type, op, root; uint64_t place = 0; };
struct Message { Header header; std::vector<char> bytes; };

struct Group;
} // namespace
struct ncclComm {
    std::string folder;
    int rank = 0, ranks = 0, device = 0;
    bool blocking = false, joined = false, destroyed = false;
    ncclResult_t state = ncclInProgress;
    double ready_at = 0;                 // seconds: until then ncclCommGetAsyncError answers ncclInProgress
    uint64_t issued = 0, finished = 0;   // operations of this rank; an empty group does not count
    uint64_t collectives = 0;            // of those, the same on all ranks
    uint64_t in_windows = 0;             // of these, with both buffers in windows that other ranks reach
    uint64_t unaligned = 0;              // bytes of the largest operation that unaligned_bytes() finds
    const char* unaligned_kind = "none"; // of it
    std::map<std::pair<int, int>, uint64_t> messages; // from, to -> how many
    uint64_t splits = 0, windows = 0;    // numbers of calls so far
    std::function<bool()> pending;       // continues the split, registration or launch under way, if there is one; true: it is done
    std::set<std::string> connected;     // ways that were gone before
    int ctas = 0;                        // blocks of a kernel, each of which takes a multiprocessor while it waits for other ranks
    Flight latest = {};                  // the operation that was launched last
};
struct ncclWindow_vidmem {}; // the handle of a local registration

namespace {
// Registered memory of this rank: [begin, begin + bytes) on a communicator. shared: other ranks can access it.
struct Window { ncclComm* comm; const char* begin; size_t bytes; bool shared; };
struct Task {
    const char* kind;
    ncclComm* comm;
    const char* send;
    char* recv;
    uint64_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer; // or root
    cudaStream_t stream;
};
struct Group { int depth; std::vector<Task> tasks; };
thread_local Group group;
thread_local char last_error[256];
std::set<ncclComm*> comms; // all that were ever made; their memory stays, so that late uses are noticed
std::map<const char*, size_t> lent;   // bytes of each allocation of ncclMemAlloc
std::map<ncclWindow_t, Window> windows; // a handle of shared memory is an address on the GPU, any other is one on the host
int operations; // of this process, so far
// With CUDA_EMULATOR_NCCL_CALLS=FILE a line at exit says what the host called.
struct Calls {
    uint64_t operations = 0, groups = 0, questions = 0, threads = 0;
    ~Calls() {
        emulator::append_to("CUDA_EMULATOR_NCCL_CALLS", "NCCL was called for %zu operations, %zu times for groups, and %zu times to ask"
                            " one that was not done; it made %zu threads\n", operations, groups, questions, threads);
    }
} calls;
struct AtExit {
    ~AtExit() {
        for (const ncclComm* c : comms) while (!c->destroyed && c->finished < c->issued) pause();
    }
} at_exit; // it comes after comms, so it is destroyed before

__attribute__((format(printf, 3, 4))) ncclResult_t refuse(ncclResult_t result, const char* call, const char* format, ...) {
    FORMATTED(why, sizeof last_error, format);
    memcpy(last_error, why, sizeof why);
    emulator::explain(call, "%s", why);
    return result;
}
[[noreturn]] __attribute__((format(printf, 1, 2))) void fatal(const char* format, ...) {
    FORMATTED(what, 1024, format);
    emulator::explain("NCCL", "%s", what);
    _exit(1);
}

bool behaves(const char* way) { // a word of CUDA_EMULATOR_NCCL: early, local-windows, no-windows, failing-windows, no-memory, quiet
    const char* words = getenv("CUDA_EMULATOR_NCCL");
    return words && strstr(words, way);
}
double seconds_now(void) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// --- files ---
bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }
std::string name_of(const ncclComm* c, const char* what, uint64_t number, int rank) {
    return c->folder + "/" + what + std::to_string(number) + "." + std::to_string(rank);
}
bool all_there(const ncclComm* c, const char* what, uint64_t number) {
    for (int q = 0; q < c->ranks; q++) if (!exists(name_of(c, what, number, q))) return false;
    return true;
}
void write_message(const std::string& path, const Header& header, const void* bytes = nullptr, size_t n = 0) { // at once or not at all
    std::string half = path + ".half";
    FILE* f = fopen(half.c_str(), "wb");
    if (!f || fwrite(&header, sizeof header, 1, f) != 1 || (n && fwrite(bytes, 1, n, f) != n) || fclose(f) ||
        rename(half.c_str(), path.c_str())) fatal("%s cannot be written", path.c_str());
}
Message read_message(const std::string& path) {
    Message m;
    FILE* f = fopen(path.c_str(), "rb");
    if (!f || fread(&m.header, sizeof m.header, 1, f) != 1) fatal("%s cannot be read", path.c_str());
    m.bytes.resize(files::file_size(path) - sizeof m.header);
    if (m.bytes.size() && fread(m.bytes.data(), 1, m.bytes.size(), f) != m.bytes.size()) fatal("%s is short", path.c_str());
    fclose(f);
    return m;
}

// --- numbers ---
size_t size_of(ncclDataType_t t) {
    switch (t) {
        case ncclUint8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclFloat32: return 4;
        case ncclInt64: case ncclFloat64: return 8;
        default: return 0;
    }
}
template <class T> T rounded(double x) { return (T)x; }
template <> __nv_bfloat16 rounded(double x) { return __float2bfloat16((float)x); }
template <> __half rounded(double x) { return __float2half((float)x); }
template <class T> double wide(T x) { return (double)x; }
template <> double wide(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> double wide(__half x) { return __half2float(x); }
template <class T> void combine(std::vector<Message>& from, uint64_t n, ncclRedOp_t op) { // into the first; n elements of each
    size_t N = from.size();
    for (uint64_t i = 0; i < n; i++) {
        size_t first = (i * N / n + 1) % N; // the rank that begins this part of the ring
        T sum = ((T*)from[first].bytes.data())[i];
        for (size_t k = 1; k < N; k++) {
            T x = ((T*)from[(first + k) % N].bytes.data())[i];
            sum = op == ncclMax ? (wide(x) > wide(sum) ? x : sum) : rounded<T>(wide(sum) + wide(x)); // exact in double, or nearly
        }
        ((T*)from[0].bytes.data())[i] = sum;
    }
}
void combine_all(std::vector<Message>& from, uint64_t n, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
        case ncclFloat32: return combine<float>(from, n, op);
        case ncclFloat64: return combine<double>(from, n, op);
        case ncclFloat16: return combine<__half>(from, n, op);
        case ncclBfloat16: return combine<__nv_bfloat16>(from, n, op);
        case ncclInt32: return combine<int32_t>(from, n, op);
        default: fatal("sums of type %d are not known to the emulator", (int)type);
    }
}

// --- the ends of a communicator ---
// When all have left, the last rank to notice removes the folder.
void leave(ncclComm* c) {
    if (!c->destroyed || c->finished < c->issued) return;
    write_message(name_of(c, "left", 0, c->rank), Header{});
    std::error_code nobody_cares; // two ranks may try at once
    if (all_there(c, "left", 0)) files::remove_all(c->folder, nobody_cares);
}
void join(ncclComm* c) {
    write_message(name_of(c, "join", 0, c->rank), {"join", (uint64_t)c->ranks, c->device, 0, c->rank});
}
// Call when all ranks have announced their colors: makes the child that this rank belongs to.
void begin_child(const ncclComm* c, ncclComm* child, uint64_t number) {
    std::vector<std::tuple<int, int>> members; // key, rank of the parent
    int color = read_message(name_of(c, "split", number, c->rank)).header.root;
    for (int q = 0; q < c->ranks; q++) {
        Header h = read_message(name_of(c, "split", number, q)).header;
        if (h.root == color) members.emplace_back(h.op, q);
    }
    std::sort(members.begin(), members.end());
    child->folder = c->folder + "/part" + std::to_string(number) + "." + std::to_string(color);
    mkdir(child->folder.c_str(), 0700); // unless another rank has
    child->ranks = (int)members.size();
    for (int q = 0; q < child->ranks; q++) if (std::get<1>(members[(size_t)q]) == c->rank) child->rank = q;
    join(child);
}
void progress(ncclComm* c);
// Continues a split: the result is there when all ranks of the child have joined it. child: NULL without a color.
bool split(const ncclComm* c, ncclComm* child, uint64_t number, ncclComm** result) {
    if (!all_there(c, "split", number)) return false;
    if (child && child->ranks == 0) begin_child(c, child, number);
    if (child) progress(child);
    if (child && child->state == ncclInProgress) return false;
    *result = child;
    return true;
}
// Continues a registration: all ranks must have announced the size of their part of the window.
bool share_window(Window w, uint64_t number, ncclWindow_t* result) {
    w.shared = !behaves("local-windows"); // for which no other rank takes part
    if (w.shared && !all_there(w.comm, "window", number)) return false;
    for (int q = 0; w.shared && q < w.comm->ranks; q++) {
        uint64_t bytes = read_message(name_of(w.comm, "window", number, q)).header.count;
        if (bytes == w.bytes) continue;
        w.comm->state = refuse(ncclInvalidUsage, "ncclCommWindowRegister", "%zu bytes here, %llu on rank %d", w.bytes,
                               (unsigned long long)bytes, q);
        return true;
    }
    *result = w.shared ? (ncclWindow_t)w.begin : new ncclWindow_vidmem;
    windows[*result] = w;
    return true;
}
// Returns 1 + p's offset in a window of c; 0: p is in none.
uint64_t place_in_window(const ncclComm* c, const void* p) {
    for (auto& [handle, w] : windows)
        if (w.shared && w.comm == c && p >= w.begin && p < w.begin + w.bytes) return 1 + (uint64_t)((const char*)p - w.begin);
    return 0;
}
bool is_window(const void* begin) { // or a local registration
    return std::any_of(windows.begin(), windows.end(), [=](auto& w) { return w.second.begin == begin; });
}
// Continues the communicator's pending operation; its state says whether that is finished.
void progress(ncclComm* c) {
    if (!c->joined) {
        if (c->ranks == 0 || !all_there(c, "join", 0)) return; // no ranks: its parent has not been asked
        std::set<int> devices;
        for (int q = 0; q < c->ranks; q++) devices.insert(read_message(name_of(c, "join", 0, q)).header.type);
        c->joined = true;
        c->state = (int)devices.size() == c->ranks ? ncclSuccess
            : refuse(ncclInvalidUsage, "ncclCommInitRankConfig", "Duplicate GPU detected: two ranks on one");
    }
    if (c->pending && !c->pending()) return;
    c->pending = nullptr;
    if (c->state == ncclInProgress && seconds_now() >= c->ready_at) c->state = ncclSuccess;
}
ncclResult_t check_comm(const char* call, ncclComm_t c, bool must_be_ready) {
    if (!c || !comms.count(c) || c->destroyed)
        return refuse(ncclInvalidArgument, call, "%p is not a communicator, or was destroyed", (void*)c);
    if (must_be_ready && c->state == ncclInProgress)
        return refuse(ncclInvalidArgument, call, "the communicator is not done with what was asked of it (ncclCommGetAsyncError)");
    return must_be_ready ? c->state : ncclSuccess;
}
ncclResult_t wait_if_blocking(ncclComm* c) {
    while (c->blocking && c->state == ncclInProgress) {
        progress(c);
        emulator::go_on();
        usleep(100);
    }
    return c->state;
}

// Announces this rank's part of a split or registration, which `pending` continues.
ncclResult_t begin(ncclComm* c, uint64_t number, const Header& own, std::function<bool()> pending) {
    write_message(name_of(c, own.kind, number, c->rank), own);
    c->pending = std::move(pending);
    c->state = ncclInProgress;
    return c->blocking ? wait_if_blocking(c) : behaves("early") ? ncclInProgress : ncclSuccess;
}

// --- operations ---
bool is_message(const Task& t) { return !strcmp(t.kind, "ncclSend") || !strcmp(t.kind, "ncclRecv"); }
ncclResult_t check_buffer(const Task& t, const char* what, const void* p, uint64_t elements) {
    if (!size_of(t.type)) return refuse(ncclInvalidArgument, t.kind, "type %d is not known to the emulator", (int)t.type);
    if (elements && !emulator::on_device(p, elements * size_of(t.type)))
        return refuse(ncclInvalidArgument, t.kind, "%s: %p has not %llu bytes of device memory", what, p,
                      (unsigned long long)(elements * size_of(t.type)));
    return ncclSuccess;
}
void check_alike(const Task& t, const Header& own, const Header& other, int q) {
    if (own.place != other.place)
        fatal("%s: what other ranks reach is byte %llu of a window on rank %d, and %llu on rank %d (counted from 1; 0: of none)", own.kind,
              (unsigned long long)own.place, t.comm->rank, (unsigned long long)other.place, q);
    if (!strcmp(own.kind, other.kind) && own.count == other.count && own.type == other.type && own.op == other.op &&
        own.root == other.root) return;
    unsigned long long here = own.count, there = other.count;
    fatal("rank %d is at %s of %llu (type %d, root %d), rank %d at %s of %llu (type %d, root %d)", t.comm->rank, own.kind, here,
          own.type, own.root, q, other.kind, there, other.type, other.root);
}
Header header_of(const Task& t) {
    // what others write to, and what they read: a gather's whole, a reduction's inputs
    bool gathers = !strcmp(t.kind, "ncclAllGather") || !strcmp(t.kind, "ncclBroadcast");
    Header h = {"", t.count, t.type, t.op, t.peer, place_in_window(t.comm, gathers ? t.recv : t.send)};
    snprintf(h.kind, sizeof h.kind, "%s", t.kind + strlen("nccl"));
    return h;
}
void complete_collective(const Task& t, const Header& header, uint64_t number) {
    ncclComm* c = t.comm;
    std::vector<Message> all;
    for (int q = 0; q < c->ranks; q++) {
        all.push_back(read_message(name_of(c, "op", number, q)));
        check_alike(t, header, all.back().header, q);
    }
    size_t bytes = t.count * size_of(t.type), N = (size_t)c->ranks;
    bool scatters = !strcmp(t.kind, "ncclReduceScatter");
    if (!strcmp(t.kind, "ncclBroadcast")) memcpy(t.recv, all[(size_t)t.peer].bytes.data(), bytes);
    else if (!strcmp(t.kind, "ncclAllGather")) {
        for (size_t q = 0; q < N; q++) memcpy(t.recv + q * bytes, all[q].bytes.data(), bytes);
    } else {
        combine_all(all, t.count * (scatters ? N : 1), t.type, t.op);
        memcpy(t.recv, all[0].bytes.data() + (scatters ? (size_t)c->rank * bytes : 0), bytes);
    }
    // a rank that gets here has read everything before
    if (number > 0) unlink(name_of(c, "op", number - 1, c->rank).c_str());
    c->finished++;
    leave(c);
}
// Returns the bytes, of one rank where ranks have parts, if a buffer or a part does not begin at a multiple of 16 bytes; otherwise 0.
// NCCL copies element by element then (reduceCopy in its common_kernel.h), and all else 16 bytes at a time.
uint64_t unaligned_bytes(const Task& t) {
    uint64_t bytes = t.count * size_of(t.type), begins = (uintptr_t)t.send | (uintptr_t)t.recv;
    if (!strcmp(t.kind, "ncclAllGather") || !strcmp(t.kind, "ncclReduceScatter")) begins |= bytes;
    return begins % 16 ? bytes : 0;
}
void count_unaligned(const Task& t) {
    uint64_t bytes = unaligned_bytes(t);
    if (bytes > t.comm->unaligned) t.comm->unaligned_kind = t.kind;
    t.comm->unaligned = std::max(t.comm->unaligned, bytes);
}
// CUDA_EMULATOR_NCCL_FAULT=N: this rank's operation N, counted from 1, never ends, and its communicator reports an error, as if
// the network had failed while the kernel waits for another rank.
bool spins(ncclComm* c, cudaStream_t stream) {
    static const uint64_t fault = emulator::setting("CUDA_EMULATOR_NCCL_FAULT", 0);
    if ((uint64_t)++operations != fault) return false;
    emulator::enqueue_when(stream, "ncclKernel", [=] {
        if (c->state != ncclRemoteError)
            c->state = refuse(ncclRemoteError, "ncclKernel", "it fails on purpose (CUDA_EMULATOR_NCCL_FAULT)");
        return false;
    }, [] {});
    return true;
}
void launch_collective(const Task& t) {
    ncclComm* c = t.comm;
    uint64_t turn = c->issued++, number = c->collectives++, elements = t.count;
    if (spins(c, t.stream)) return;
    Header header = header_of(t); // windows as they are now
    c->in_windows += place_in_window(c, t.send) && place_in_window(c, t.recv);
    if (!strcmp(t.kind, "ncclReduceScatter")) elements *= (uint64_t)c->ranks;
    if (!strcmp(t.kind, "ncclBroadcast") && t.peer != c->rank) elements = 0;
    auto post = [=] { write_message(name_of(c, "op", number, c->rank), header, t.send, elements * size_of(t.type)); };
    emulator::enqueue_when(t.stream, t.kind, [=] { return c->finished == turn; }, post);
    emulator::enqueue_when(t.stream, t.kind, [=] { return all_there(c, "op", number); }, [=] { complete_collective(t, header, number); });
}
std::string message_name(const Task& t, uint64_t number) {
    bool sends = t.send;
    std::string pair = std::to_string(sends ? t.comm->rank : t.peer) + "-" + std::to_string(sends ? t.peer : t.comm->rank) + "-";
    return name_of(t.comm, ("message" + pair).c_str(), number, 0);
}
// Sends and receives of a group run concurrently; the group is finished when all have arrived, including those that it sent.
void launch_messages(ncclComm* c, const std::vector<Task>& tasks) {
    uint64_t number = c->issued++;
    if (spins(c, tasks[0].stream)) return;
    typedef std::vector<std::pair<Task, std::string>> Messages; // and their files
    auto sends = std::make_shared<Messages>(), receives = std::make_shared<Messages>();
    for (const Task& t : tasks) {
        auto pair = t.send ? std::make_pair(c->rank, t.peer) : std::make_pair(-1 - t.peer, c->rank); // each end counts for itself
        (t.send ? sends : receives)->emplace_back(t, message_name(t, c->messages[pair]++));
    }
    cudaStream_t stream = tasks[0].stream;
    emulator::enqueue_when(stream, "ncclSend", [=] { return c->finished == number; }, [=] {
        for (auto& m : *sends) {
            const Task& t = m.first;
            write_message(m.second, Header{"Message", t.count, t.type, 0, 0}, t.send, t.count * size_of(t.type));
        }
    });
    emulator::enqueue_when(stream, "ncclRecv", [=] {
        return std::all_of(receives->begin(), receives->end(), [](auto& m) { return exists(m.second); });
    }, [=] {
        for (auto& m : *receives) {
            Message got = read_message(m.second);
            check_alike(m.first, Header{"Message", m.first.count, m.first.type, 0, 0}, got.header, m.first.peer);
            memcpy(m.first.recv, got.bytes.data(), got.bytes.size());
            unlink(m.second.c_str());
        }
    });
    emulator::enqueue_when(stream, "ncclSend", [=] {
        return std::none_of(sends->begin(), sends->end(), [](auto& m) { return exists(m.second); });
    }, [=] { c->finished++; leave(c); });
}
// NCCL's kernels hold multiprocessors while they wait. Ends a run whose operations may together take more than so many: those of
// other communicators that need not be over when the next one of c begins on its stream. Those of one follow one another.
void count_ctas(const Task& t) {
    static const int most = (int)emulator::setting("CUDA_EMULATOR_NCCL_CTAS", 54);
    auto finished = emulator::finished_before(emulator::end_of(t.stream));
    int ctas = t.comm->ctas;
    std::string which = t.kind + (" " + std::to_string(ctas));
    for (const ncclComm* c : comms) {
        const Flight& f = c->latest;
        if (c == t.comm || c->finished == c->issued || finished[f.end.stream] >= f.end.number) continue;
        ctas += c->ctas;
        which += std::string(", ") + f.kind + " " + std::to_string(c->ctas);
    }
    if (ctas > most) fatal("operations that may be under way together take %d CTAs, more than %d: %s", ctas, most, which.c_str());
}
void launch(const std::vector<Task>& tasks) {
    std::map<ncclComm*, std::vector<Task>> messages;
    auto one = [](const Task& t, auto enqueue) {
        count_ctas(t);
        enqueue();
        t.comm->latest = {t.kind, emulator::end_of(t.stream)};
    };
    for (const Task& t : tasks) {
        count_unaligned(t);
        if (is_message(t)) messages[t.comm].push_back(t);
        else if (t.count) one(t, [&] { launch_collective(t); });
    }
    for (auto& m : messages) one(m.second[0], [&] { launch_messages(m.first, m.second); });
}
// The way that a task goes: the file by which this rank says that it has come, and those of the others that must come.
// Large sums go round a ring, as all else does, and small ones along a tree.
struct Way { std::string own; std::vector<std::string> others; };
Way way_of(const Task& t) {
    const ncclComm* c = t.comm;
    if (is_message(t)) {
        std::string pair = std::to_string(t.send ? c->rank : t.peer) + "-" + std::to_string(t.send ? t.peer : c->rank);
        std::string sends = c->folder + "/sends" + pair, receives = c->folder + "/receives" + pair;
        return {t.send ? sends : receives, {t.send ? receives : sends}};
    }
    const char* shape = !strcmp(t.kind, "ncclAllReduce") && t.count * size_of(t.type) <= 1 << 16 ? "tree" : "ring";
    Way way = {name_of(c, shape, 0, c->rank), {}};
    for (int q = 0; q < c->ranks; q++) way.others.push_back(name_of(c, shape, 0, q));
    return way;
}
bool others_are_under_way(const ncclComm* self) {
    return std::any_of(comms.begin(), comms.end(), [=](const ncclComm* c) { return c != self && c->finished < c->issued; });
}
// Says that this rank has come to the new ones of a group's ways. Returns the files of others that must be there. NCCL allocates
// then, which may have to wait for kernels: with the word "quiet" none of another communicator may be under way.
std::vector<std::string> connect(const std::vector<Task>& tasks) {
    std::vector<std::string> others;
    for (const Task& t : tasks) {
        Way way = way_of(t);
        if (t.comm->ranks == 1 || (is_message(t) ? t.peer == t.comm->rank : t.count == 0)) continue;
        if (!t.comm->connected.insert(way.own).second) continue;
        if (behaves("quiet") && others_are_under_way(t.comm))
            fatal("%s connects ranks (%s) while an operation of another communicator is under way", t.kind, way.own.c_str());
        write_message(way.own, Header{});
        others.insert(others.end(), way.others.begin(), way.others.end());
    }
    return others;
}
// A group is launched when the others have come, and all of its communicators are in progress until then.
ncclResult_t launch_group(void) {
    std::vector<Task> tasks = std::move(group.tasks);
    group.tasks.clear();
    if (tasks.empty()) return ncclSuccess;
    static int turn;
    double lasts = tasks[0].comm->blocking ? 0 : turn++ % 3 * 30e-6; // what it takes NCCL to make a thread that launches
    auto others = std::make_shared<std::vector<std::string>>(connect(tasks));
    emulator::has_met_others |= others->empty();
    calls.threads += !tasks[0].comm->blocking;
    auto launched = std::make_shared<bool>(false);
    auto go = [=] {
        if (*launched) return true;
        bool here = std::all_of(others->begin(), others->end(), exists);
        if (!here) emulator::go_on();
        if (!here || seconds_now() < tasks[0].comm->ready_at) return false;
        launch(tasks);
        return *launched = true;
    };
    for (const Task& t : tasks) {
        t.comm->ready_at = seconds_now() + lasts;
        t.comm->state = ncclInProgress;
        t.comm->pending = go;
    }
    for (const Task& t : tasks) {
        progress(t.comm);
        wait_if_blocking(t.comm);
    }
    return tasks[0].comm->state;
}
ncclResult_t add(const Task& t) {
    calls.operations++;
    if (ncclResult_t error = check_comm(t.kind, t.comm, group.depth == 0 || group.tasks.empty())) return error;
    group.tasks.push_back(t);
    return group.depth ? ncclSuccess : launch_group();
}
#define PASS(call) do { ncclResult_t result_ = call; if (result_) return result_; } while (0)
ncclResult_t check_config(const char* call, const ncclConfig_t* config) {
    if (config && (config->magic != 0xcafebeef || config->size != sizeof *config))
        return refuse(ncclInvalidArgument, call, "the configuration was not begun with NCCL_CONFIG_INITIALIZER");
    auto wrong = [](int ctas) { return ctas <= 0 && ctas != NCCL_CONFIG_UNDEF_INT; };
    if (config && (wrong(config->minCTAs) || wrong(config->maxCTAs) || (config->maxCTAs > 0 && config->minCTAs > config->maxCTAs)))
        return refuse(ncclInvalidArgument, call, "from %d to %d CTAs", config->minCTAs, config->maxCTAs);
    return ncclSuccess;
}
constexpr int USUAL_CTAS = 16; // of a message of a megabyte or a large sum over NVLink
ncclComm* new_comm(const ncclConfig_t* config) {
    ncclComm* c = new ncclComm();
    c->blocking = !config || config->blocking != 0;
    c->ctas = config && config->maxCTAs > 0 ? std::min(USUAL_CTAS, config->maxCTAs) : USUAL_CTAS;
    if (config) c->ctas = std::max(c->ctas, config->minCTAs); // not set: the least int
    cudaGetDevice(&c->device);
    comms.insert(c);
    return c;
}
} // namespace

extern "C" {
ncclResult_t ncclGetVersion(int* version) {
    const char* of_library = getenv("CUDA_EMULATOR_NCCL_VERSION");
    *version = of_library ? atoi(of_library) : NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclInProgress: return "NCCL operation in progress";
        case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        default: return "unknown result code";
    }
}
const char* ncclGetLastError(ncclComm_t) { return last_error; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    const char* temporary = getenv("TMPDIR");
    snprintf(id->internal, sizeof id->internal, "%s/emulated-nccl-XXXXXX", temporary ? temporary : "/tmp");
    return mkdtemp(id->internal) ? ncclSuccess : refuse(ncclSystemError, "ncclGetUniqueId", "%s: no folder", id->internal);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    PASS(check_config("ncclCommInitRankConfig", config));
    if (!comm || rank < 0 || rank >= ranks || !exists(id.internal))
        return refuse(ncclInvalidArgument, "ncclCommInitRankConfig", "rank %d of %d, id '%s'", rank, ranks, id.internal);
    ncclComm* c = *comm = new_comm(config);
    c->folder = id.internal;
    c->rank = rank;
    c->ranks = ranks;
    join(c);
    return wait_if_blocking(c);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
    PASS(check_comm("ncclCommSplit", comm, true));
    PASS(check_config("ncclCommSplit", config));
    if (!newcomm || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
        return refuse(ncclInvalidArgument, "ncclCommSplit", "color %d", color);
    ncclComm* child = color < 0 ? nullptr : new_comm(config);
    uint64_t number = comm->splits++;
    *newcomm = behaves("early") ? child : nullptr;
    return begin(comm, number, {"split", 0, 0, key, color}, [=] { return split(comm, child, number, newcomm); });
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    PASS(check_comm("ncclCommGetAsyncError", comm, false));
    calls.questions += comm->state == ncclInProgress;
    if (comm->state == ncclInProgress) progress(comm);
    *state = comm->state;
    return ncclSuccess;
}
#define ASKS(call, member) ncclResult_t call(const ncclComm_t comm, int* answer) { \
        PASS(check_comm(#call, comm, true)); *answer = comm->member; return ncclSuccess; }
ASKS(ncclCommUserRank, rank)
ASKS(ncclCommCount, ranks)
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    PASS(check_comm("ncclCommFinalize", comm, true));
    if (comm->blocking) return ncclSuccess;
    comm->ready_at = seconds_now() + 100e-6;
    return comm->state = ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    PASS(check_comm("ncclCommDestroy", comm, true));
    for (auto& [handle, w] : windows)
        if (w.comm == comm) return refuse(ncclInvalidUsage, "ncclCommDestroy", "%p is still a window on it", (const void*)w.begin);
    comm->destroyed = true;
    emulator::append_to("CUDA_EMULATOR_NCCL_COUNTS", "rank %d of %d: collectives %zu, in windows %zu\nlargest not at multiples of 16 bytes:"
                        " %zu bytes, %s\n", comm->rank, comm->ranks, comm->collectives, comm->in_windows, comm->unaligned,
                        comm->unaligned_kind);
    leave(comm);
    return ncclSuccess;
}

// --- memory and windows ---
ncclResult_t ncclMemAlloc(void** p, size_t bytes) {
    if (behaves("no-memory")) return ncclUnhandledCudaError;
    if (cudaMalloc(p, (bytes + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT * NCCL_WIN_REQUIRED_ALIGNMENT) != cudaSuccess)
        return ncclUnhandledCudaError;
    lent[(const char*)*p] = bytes;
    return ncclSuccess;
}
ncclResult_t ncclMemFree(void* p) {
    if (is_window(p)) return refuse(ncclInvalidUsage, "ncclMemFree", "%p is still a window", p);
    if (!lent.erase((const char*)p)) return refuse(ncclInvalidArgument, "ncclMemFree", "%p is not from ncclMemAlloc", p);
    return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t bytes, ncclWindow_t* window, int flags) {
    PASS(check_comm("ncclCommWindowRegister", comm, true));
    auto memory = lent.find((const char*)buffer);
    if (memory == lent.end() || bytes == 0 || bytes > memory->second || flags != NCCL_WIN_COLL_SYMMETRIC || !window)
        return refuse(ncclInvalidArgument, "ncclCommWindowRegister", "%zu bytes at %p of ncclMemAlloc's, flags %d", bytes, buffer, flags);
    if (is_window(buffer)) return refuse(ncclInvalidUsage, "ncclCommWindowRegister", "%p is a window already", buffer);
    if (behaves("no-windows")) { *window = nullptr; return ncclSuccess; }
    if (behaves("failing-windows") && comm->windows > 0) return ncclSystemError;
    if (behaves("early")) *window = (ncclWindow_t)buffer;
    Window w = {comm, (const char*)buffer, bytes, true};
    uint64_t number = comm->windows++;
    return begin(comm, number, {"window", bytes, 0, 0, 0}, [=] { return share_window(w, number, window); });
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    PASS(check_comm("ncclCommWindowDeregister", comm, true));
    auto w = windows.find(window);
    if (w == windows.end() || w->second.comm != comm)
        return refuse(ncclInvalidArgument, "ncclCommWindowDeregister", "%p is not a window on this communicator", (void*)window);
    if (!w->second.shared) delete window;
    windows.erase(w);
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    calls.groups++;
    group.depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    calls.groups++;
    if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd", "there is no ncclGroupStart before it");
    return --group.depth ? ncclSuccess : launch_group();
}
// One side may be the whole, of as many parts as there are ranks; then the other, one part, must be separate or at its place there.
static ncclResult_t collective(const Task& t, bool sends_all, bool receives_all) {
    PASS(check_comm(t.kind, t.comm, false));
    uint64_t parts = sends_all || receives_all ? (uint64_t)t.comm->ranks : 1, bytes = t.count * size_of(t.type);
    PASS(check_buffer(t, "what is sent", t.send, t.count * (sends_all ? parts : 1)));
    PASS(check_buffer(t, "what is received", t.recv, t.count * (receives_all ? parts : 1)));
    const char *whole = receives_all ? t.recv : t.send, *part = receives_all ? t.send : t.recv;
    bool in_place = part == whole + (parts > 1 ? (uint64_t)t.comm->rank * bytes : 0);
    if (!in_place && part + bytes > whole && part < whole + parts * bytes)
        return refuse(ncclInvalidArgument, t.kind, "its buffers overlap, and not in place");
    return add(t);
}
ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({"ncclAllReduce", comm, (const char*)send, (char*)recv, count, type, op, 0, stream}, false, false);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    return collective({"ncclReduceScatter", comm, (const char*)send, (char*)recv, count, type, op, 0, stream}, true, false);
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({"ncclAllGather", comm, (const char*)send, (char*)recv, count, type, ncclSum, 0, stream}, false, true);
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    Task t = {"ncclBroadcast", comm, (const char*)send, (char*)recv, count, type, ncclSum, root, stream};
    PASS(check_comm(t.kind, comm, false));
    if (root < 0 || root >= comm->ranks) return refuse(ncclInvalidArgument, t.kind, "root %d of %d ranks", root, comm->ranks);
    if (root == comm->rank) PASS(check_buffer(t, "what is sent", send, count));
    PASS(check_buffer(t, "what is received", recv, count));
    return add(t);
}
static ncclResult_t message(const Task& t) {
    PASS(check_comm(t.kind, t.comm, false));
    if (t.peer < 0 || t.peer >= t.comm->ranks) return refuse(ncclInvalidArgument, t.kind, "rank %d of %d", t.peer, t.comm->ranks);
    PASS(check_buffer(t, "the message", t.send ? t.send : t.recv, t.count));
    return add(t);
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return message({"ncclSend", comm, (const char*)send, nullptr, count, type, ncclSum, peer, stream});
}
ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return message({"ncclRecv", comm, nullptr, (char*)recv, count, type, ncclSum, peer, stream});
}
}
