/*
comm_nccl.cuh - the operations of comm_api.h over NCCL, for ranks with a GPU each.

Operations of a communicator run on a stream of their own, in the order of their issue. Two events order it with the
compute stream: the communication stream waits for what compute_stream had been given when the operation was issued
(else it would send what is not computed yet), and comm_wait makes compute_stream wait for the operation's end (else
layers would read what has not arrived). The host waits for neither: it continues, and waits for the GPU only in
device_to_host or device_synchronize. While it waits there, nccl_look sees how far operations have come, so that the
watchdog knows which one is stuck, and whether NCCL has failed. Calls into NCCL block; the watchdog is told of each
before, because it may wait for another rank.

    all-reduce      NCCL's; or the steps of ring.h; or, in ordered mode, what comm_mpi.h does: every rank sends slice r
                    to rank r, which adds them in rank order and sends the sum to all
    reduce-scatter  NCCL's; in ordered mode every rank sends part r to rank r, which adds them in rank order
    all-to-all      with parts of one size or not, a group of NCCL's sends and receives: its own call for this came
                    only with 2.28, and none is for parts of several sizes
    shards on the host are copied on two streams of the process, one each way, during other operations
    all-gather, broadcast: NCCL's. barrier: an all-reduce of one number, for which the host waits
    send, receive   NCCL's, each way between two ranks on a communicator and a stream of its own: NCCL runs the
                    operations of a communicator one after another, and two ranks that send to each other on one would
                    wait forever

Hosts wait for one another in first operations: nccl_first_sums and nccl_first_message do them at the start, when no
host can be late.

nccl_library.cuh loads NCCL, and nccl_windows.cuh registers memory.
*/
#ifndef LLMC_COMM_NCCL_CUH
#define LLMC_COMM_NCCL_CUH
#include "comm_operations.h"
#include "nccl_library.cuh"
#include "nccl_windows.cuh"
#include "ring.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef NCCL_PIECE
#define NCCL_PIECE (16 << 20) // bytes that our own sums are cut into: scratch memory is bounded
#endif

static inline ncclDataType_t nccl_type(CommType t) {
    return t == COMM_F32 ? ncclFloat32 : t == COMM_BF16 ? ncclBfloat16 : t == COMM_F16 ? ncclFloat16
         : t == COMM_F64 ? ncclFloat64 : ncclUint8;
}

// ---- sums of our own ----
__device__ inline float comm_widen(float x) { return x; }
__device__ inline float comm_widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float comm_widen(__half x) { return __half2float(x); }
__device__ inline double comm_widen(double x) { return x; }
__device__ inline void comm_narrow(float* to, float x) { *to = x; }
__device__ inline void comm_narrow(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ inline void comm_narrow(__half* to, float x) { *to = __float2half_rn(x); }
__device__ inline void comm_narrow(double* to, double x) { *to = x; }

// out (n) = the sum of N rows in their order, rounded once, as comm_add_rows. Row `rank` is own (n), perhaps out;
// else rows + q stride.
template <typename T>
__global__ void add_rows_kernel(T* out, const T* own, const T* rows, int N, int rank, size_t stride, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        auto sum = comm_widen(rank == 0 ? own[i] : rows[i]);
        for (int q = 1; q < N; q++) sum += comm_widen(q == rank ? own[i] : rows[(size_t)q * stride + i]);
        comm_narrow(&out[i], sum);
    }
}
static inline void nccl_add_rows(const NcclLink* l, void* out, const void* own, const void* rows, int N, int rank,
                                 size_t stride, size_t n, CommType t) {
    if (n == 0) return;
    unsigned blocks = (unsigned)size_min(ceil_div(n, 256), 4096);
#define ADD(T) \
    add_rows_kernel<T><<<blocks, 256, 0, l->stream>>>((T*)out, (const T*)own, (const T*)rows, N, rank, stride, n)
    if (t == COMM_F32) ADD(float);
    else if (t == COMM_BF16) ADD(__nv_bfloat16);
    else if (t == COMM_F16) ADD(__half);
    else ADD(double);
#undef ADD
    cuda_check(cudaGetLastError(), "a sum over ranks");
}

// ---- messages: those between nccl_group and nccl_group_end move at the same time ----
static inline void nccl_group(void) { nccl_check(nccl.ncclGroupStart(), "ncclGroupStart"); }
static inline void nccl_group_end(Comm* c, const CommSlot* s) {
    nccl_call(c->world, &s->record);
    nccl_called(c->world, nccl.ncclGroupEnd(), "ncclGroupEnd");
}
static inline void nccl_send(Comm* c, const CommSlot* s, const void* data, size_t n, int to) {
    NcclLink* l = (NcclLink*)c->link;
    if (n == 0) return; // the receiver expects nothing
    c->stats[s->kind].posted += n * comm_type_size(s->type);
    nccl_check(nccl.ncclSend(data, n, nccl_type(s->type), to, l->nccl, l->stream), "ncclSend");
}
static inline void nccl_recv(Comm* c, const CommSlot* s, void* data, size_t n, int from) {
    NcclLink* l = (NcclLink*)c->link;
    if (n > 0) nccl_check(nccl.ncclRecv(data, n, nccl_type(s->type), from, l->nccl, l->stream), "ncclRecv");
}

// Returns the elements that a rank owns of a piece: N such slices fit in the scratch; row q is what rank q sent.
static inline size_t nccl_slice(const Comm* c, CommType t) {
    return ring_slice(NCCL_PIECE / comm_type_size(t) / (size_t)c->size);
}

// One piece (n) of an all-reduce. Rank q adds slice q: [ring_chunk(q), ring_chunk(q+1)).
static inline void nccl_all_reduce_ordered(Comm* c, const CommSlot* s, char* buf, size_t n) {
    NcclLink* l = (NcclLink*)c->link;
    int N = c->size, rank = c->rank;
    size_t element = comm_type_size(s->type), row = nccl_slice(c, s->type);
    size_t begin = ring_chunk(rank, N, n), mine = ring_chunk_size(rank, N, n);
    for (int gathers = 0; gathers < 2; gathers++) {
        nccl_group();
        for (int q = 0; q < N; q++) {
            size_t at = ring_chunk(q, N, n), count = ring_chunk_size(q, N, n);
            if (q == rank) continue;
            nccl_send(c, s, buf + (gathers ? begin : at) * element, gathers ? mine : count, q);
            nccl_recv(c, s, gathers ? buf + at * element : l->scratch + (size_t)q * row * element,
                      gathers ? count : mine, q);
        }
        nccl_group_end(c, s);
        if (gathers == 0)
            nccl_add_rows(l, buf + begin * element, buf + begin * element, l->scratch, N, rank, row, mine, s->type);
    }
}

// Elements [at, at+n) of row q of the input go to rank q, and row q of `to`, whose rows are to_row apart,
// comes from it.
static inline void nccl_exchange_rows(Comm* c, const CommSlot* s, size_t at, size_t n, char* to, size_t to_row) {
    size_t element = comm_type_size(s->type);
    nccl_group();
    for (int q = 0; q < c->size; q++) {
        if (q == c->rank) continue;
        nccl_send(c, s, (const char*)s->in + ((size_t)q * s->n + at) * element, n, q);
        nccl_recv(c, s, to + (size_t)q * to_row * element, n, q);
    }
    nccl_group_end(c, s);
}

// One piece of a reduce-scatter: elements [at, at+n) of every part.
static inline void nccl_reduce_scatter_ordered(Comm* c, const CommSlot* s, size_t at, size_t n) {
    NcclLink* l = (NcclLink*)c->link;
    size_t element = comm_type_size(s->type), row = nccl_slice(c, s->type);
    nccl_exchange_rows(c, s, at, n, l->scratch, row);
    const char* own = (const char*)s->in + ((size_t)c->rank * s->n + at) * element;
    nccl_add_rows(l, (char*)s->out + at * element, own, l->scratch, c->size, c->rank, row, n, s->type);
}

// ring.h's steps. The stream keeps them in order.
typedef struct { Comm* comm; const CommSlot* slot; } NcclRing;
static inline void nccl_ring_exchange(void* self, const void* send, size_t send_n, int to, void* recv, size_t recv_n,
                                      int from) {
    NcclRing* r = (NcclRing*)self;
    nccl_group();
    nccl_send(r->comm, r->slot, send, send_n, to);
    nccl_recv(r->comm, r->slot, recv, recv_n, from);
    nccl_group_end(r->comm, r->slot);
}
static inline void nccl_ring_add(void* self, void* into, const void* from, size_t n) {
    NcclRing* r = (NcclRing*)self;
    nccl_add_rows((NcclLink*)r->comm->link, into, into, from, 2, 0, 0, n, r->slot->type);
}
static const RingCarrier nccl_ring_carrier = { nccl_ring_exchange, nccl_ring_add };
static inline void nccl_all_reduce_ring(Comm* c, const CommSlot* s, char* buf, size_t n) {
    NcclRing self = { c, s };
    Ring r = { c->rank, c->size, 0, n, comm_type_size(s->type), buf, ((NcclLink*)c->link)->scratch, &nccl_ring_carrier,
               &self };
    while (ring_advance(&r)) {}
}

// Row q goes to rank q. This rank's own row is a copy.
static inline void nccl_all_to_all(Comm* c, const CommSlot* s) {
    NcclLink* l = (NcclLink*)c->link;
    size_t bytes = s->n * comm_type_size(s->type), own = (size_t)c->rank * bytes;
    char* out = (char*)s->out;
    if (bytes > 0)
        cuda_check(cudaMemcpyAsync(out + own, (const char*)s->in + own, bytes, cudaMemcpyDeviceToDevice, l->stream),
                   "all-to-all");
    nccl_exchange_rows(c, s, 0, s->n, out, s->n);
}

// Part q goes to rank q.
static inline void nccl_all_to_all_v(Comm* c, const CommSlot* s) {
    NcclLink* l = (NcclLink*)c->link;
    const CommPart *from = s->from, *to = s->to, own = to[c->rank];
    if (own.n > 0)
        cuda_check(cudaMemcpyAsync(comm_part(s, s->out, from[c->rank]), comm_part(s, s->in, own),
                                   own.n * comm_type_size(s->type), cudaMemcpyDeviceToDevice, l->stream),
                   "all-to-all-v");
    nccl_group();
    for (int q = 0; q < c->size; q++) {
        if (q == c->rank) continue;
        nccl_send(c, s, comm_part(s, s->in, to[q]), to[q].n, q);
        nccl_recv(c, s, comm_part(s, s->out, from[q]), from[q].n, q);
    }
    nccl_group_end(c, s);
}

// ---- each kind of operation, onto the communicator's stream ----

static inline void nccl_sum_in_pieces(Comm* c, const CommSlot* s) {
    bool scatters = s->kind == COMM_REDUCE_SCATTER;
    size_t piece = nccl_slice(c, s->type) * (scatters ? 1 : (size_t)c->size);
    for (size_t at = 0; at < s->n; at += piece) {
        size_t n = size_min(piece, s->n - at);
        char* buf = (char*)s->out + at * comm_type_size(s->type);
        if (scatters) nccl_reduce_scatter_ordered(c, s, at, n);
        else if (c->world->options.ordered) nccl_all_reduce_ordered(c, s, buf, n);
        else nccl_all_reduce_ring(c, s, buf, n);
    }
}

static inline void nccl_run(Comm* c, const CommSlot* s, NcclLink* l) {
    const CommOptions* o = &c->world->options;
    ncclDataType_t t = nccl_type(s->type);
    ncclResult_t r = ncclSuccess;
    nccl_call(c->world, &s->record);
    switch (s->kind) {
    case COMM_ALL_REDUCE:
        if (o->ordered || o->all_reduce == ALL_REDUCE_RING) nccl_sum_in_pieces(c, s);
        else r = nccl.ncclAllReduce(s->in, s->out, s->n, t, ncclSum, l->nccl, l->stream);
        break;
    case COMM_REDUCE_SCATTER:
        if (o->ordered) nccl_sum_in_pieces(c, s);
        else r = nccl.ncclReduceScatter(s->in, s->out, s->n, t, ncclSum, l->nccl, l->stream);
        break;
    case COMM_ALL_GATHER: r = nccl.ncclAllGather(s->in, s->out, s->n, t, l->nccl, l->stream); break;
    case COMM_ALL_TO_ALL: nccl_all_to_all(c, s); break;
    case COMM_ALL_TO_ALL_V: nccl_all_to_all_v(c, s); break;
    case COMM_BROADCAST: r = nccl.ncclBroadcast(s->in, s->out, s->n, t, s->peer, l->nccl, l->stream); break;
    case COMM_BARRIER: r = nccl.ncclAllReduce(l->numbers, l->numbers, 1, ncclInt32, ncclMax, l->nccl, l->stream); break;
    case COMM_SEND: if (s->n > 0) r = nccl.ncclSend(s->in, s->n, t, 1, l->nccl, l->stream); break;
    case COMM_RECV: if (s->n > 0) r = nccl.ncclRecv(s->out, s->n, t, 0, l->nccl, l->stream); break;
    default: die_here("%s: NCCL has no %s", c->name, comm_kind_names[s->kind]);
    }
    nccl_called(c->world, r, comm_kind_names[s->kind]);
}

// Work given to `later` from here on waits for all work given to `earlier` so far.
static inline void nccl_follow(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event, const char* what) {
    cuda_check(cudaEventRecord(event, earlier), what);
    cuda_check(cudaStreamWaitEvent(later, event, 0), what);
}

// Returns the streams on which an operation begins and ends. A shard in host memory is copied on a stream of its own,
// so that NCCL's next operation need not wait for the copy; and one for each way, because a GPU copies both ways at
// once.
static inline cudaStream_t nccl_first_stream(const Comm* c, const CommSlot* s, const NcclLink* l) {
    return s->on_host && s->kind == COMM_ALL_GATHER ? ((NcclEngine*)c->world->nccl)->from_host : l->stream;
}
static inline cudaStream_t nccl_last_stream(const Comm* c, const CommSlot* s, const NcclLink* l) {
    return s->on_host && s->kind == COMM_REDUCE_SCATTER ? ((NcclEngine*)c->world->nccl)->to_host : l->stream;
}

// A shard in host memory is copied to or from this rank's part of the full buffer,
// in which the operation is done in place.
static inline void nccl_run_on_host(Comm* c, const CommSlot* s, NcclLink* l) {
    cudaStream_t first = nccl_first_stream(c, s, l), last = nccl_last_stream(c, s, l);
    size_t bytes = s->n * comm_type_size(s->type);
    char* own = comm_own_part(c, s);
    CommSlot in_place = *s;
    if (s->kind == COMM_ALL_GATHER) {
        in_place.in = own;
        cuda_check(cudaMemcpyAsync(own, s->in, bytes, cudaMemcpyHostToDevice, first), "a shard from the host");
        nccl_follow(l->stream, first, l->passed_on, "a shard from the host"); // else old numbers are gathered
        nccl_run(c, &in_place, l);
    } else {
        in_place.out = own;
        nccl_run(c, &in_place, l);
        nccl_follow(last, l->stream, l->passed_on, "a shard to the host"); // else unfinished sums are copied
        cuda_check(cudaMemcpyAsync(s->out, own, bytes, cudaMemcpyDeviceToHost, last), "a shard to the host");
    }
}

// ---- how far operations have come ----

static inline bool nccl_passed(int mark) {
    return cuda_is_done(cudaEventQuery(cuda_marks.events[mark]), "communication");
}

// Notes whether o has begun, and whether it is over, which it returns.
static inline bool nccl_is_over(CommContext* w, NcclOp* o) {
    if (o->over) return true;
    if (!o->begun && !nccl_passed(o->started)) return false;
    if (!o->begun) flight_recorder_start(w->recorder, &o->record);
    o->begun = true;
    if (!nccl_passed(o->finished)) return false;
    flight_recorder_finish(w->recorder, &o->record);
    return o->over = true;
}

// Notes what is over on l, up to the first operation that is not.
// Returns that one if it has begun and compute waits for it.
static inline NcclOp* nccl_look_at(CommContext* w, NcclLink* l) {
    for (; l->done < l->issued; l->done++) {
        NcclOp* o = &l->ops[l->done % COMM_IN_FLIGHT];
        if (!nccl_is_over(w, o)) return o->begun && l->done < l->waited ? o : NULL;
    }
    return NULL;
}

// The host calls this over and over while it waits for the GPU, and once when that is over.
static inline void nccl_look(void* self) {
    NcclEngine* e = (NcclEngine*)self;
    NcclOp* awaited = NULL;
    for (NcclLink* l = e->links; l; l = l->next) {
        ncclResult_t state = ncclSuccess;
        NcclOp* o = nccl_look_at(e->world, l);
        if (o) awaited = o;
        nccl_check(nccl.ncclCommGetAsyncError(l->nccl, &state), "ncclCommGetAsyncError");
        nccl_check(state, "communication");
    }
    if (awaited && awaited != e->awaited) flight_recorder_wait_begin(e->world->recorder, &awaited->record);
    if (!awaited && e->awaited) flight_recorder_wait_end(e->world->recorder);
    e->awaited = awaited;
    comm_collect_passed(e->world);
}

// Notes all that is over, while the host goes on: marks are freed next. An operation whose shard still goes to the host
// may be before others that are over. This is no wait, so the watchdog is told of none.
static inline void nccl_note(CommContext* w) {
    for (NcclLink* l = ((NcclEngine*)w->nccl)->links; l; l = l->next) {
        nccl_look_at(w, l);
        for (long long k = l->done; k < l->issued; k++) nccl_is_over(w, &l->ops[k % COMM_IN_FLIGHT]);
    }
}
// The host is COMM_IN_FLIGHT operations of l ahead of the GPU. Waits for the oldest, as compute does.
static inline void nccl_await_oldest(CommContext* w, NcclLink* l) {
    NcclEngine* e = (NcclEngine*)w->nccl;
    for (long long oldest = l->done; l->done == oldest; ) nccl_look(e);
    // Otherwise a later wait for the same operation would not be seen to begin
    if (e->awaited) flight_recorder_wait_end(w->recorder);
    e->awaited = NULL;
}

// ---- what comm.h calls ----

// Sets what CUDA reads from the environment at its first call, unless the user has. EAGER loads all kernels at the
// start, which takes a process some seconds: loading one at its first launch may wait until the GPU is idle, and that
// never happens while a receive waits for what this kernel is to compute. Streams that share a hardware queue begin
// their work in its order, so a sum would wait for layers: 8 queues would be fewer than the streams, of which each pair
// of ranks in a pipeline has two.
static inline void nccl_choose_environment(void) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

// Returns true if NCCL can serve these ranks; dies if --comm nccl was given and it cannot.
static inline bool nccl_is_possible(Comm* c) {
    DeviceId own = device_id(), *all = (DeviceId*)control_all_gather(c->world->control, &own, sizeof own);
    char who[256];
    bool *shares = new_array(bool, c->size), shared = false;
    for (int a = 0; a < c->size; a++)
        for (int b = 0; b < a; b++)
            if (memcmp(&all[a], &all[b], sizeof(DeviceId)) == 0) shared = shares[a] = shares[b] = true;
    ranks_text(shares, c->size, who, sizeof who);
    free(shares);
    free(all);
    require(!shared || c->world->options.backend != COMM_NCCL, "--comm nccl: %s share a GPU, which NCCL refuses: start"
            " one rank per GPU, or use --comm mpi", who);
    if (!shared) nccl_load();
    return !shared;
}

static inline bool nccl_adds_itself(const CommOptions* o) { return !o->ordered && o->all_reduce != ALL_REDUCE_RING; }
static inline size_t nccl_device_bytes(const CommOptions* o, int N) {
    return (nccl_adds_itself(o) ? 0 : NCCL_PIECE) + (size_t)N * sizeof(int);
}

static inline ncclConfig_t nccl_config(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    // Otherwise blocks wait for several neighbouring processors to be free, while layers hold them
    config.cgaClusterSize = 0;
    return config;
}

// Of the highest priority: when kernels of layers fill the GPU, those of NCCL get the next processors that are free.
// Otherwise they would begin when the layer ends, and other ranks would wait for them.
static inline cudaStream_t nccl_stream_new(void) {
    cudaStream_t stream;
    int lowest, highest;
    cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "the communication stream");
    cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "the communication stream");
    return stream;
}
static inline NcclLink* nccl_link_new(void) {
    NcclLink* l = new_array(NcclLink, 1);
    l->ops = new_array(NcclOp, COMM_IN_FLIGHT);
    l->stream = nccl_stream_new();
    cuda_check(cudaEventCreateWithFlags(&l->ready, cudaEventDisableTiming), "the communication stream");
    cuda_check(cudaEventCreateWithFlags(&l->passed_on, cudaEventDisableTiming), "the communication stream");
    return l;
}
static inline void nccl_link_add(NcclEngine* e, NcclLink* l) {
    l->next = e->links;
    e->links = l;
}
// The host waits until all that l was given is over. op: what the watchdog is told.
static inline void nccl_wait_for(CommContext* w, const OpRecord* op, NcclLink* l) {
    flight_recorder_wait_begin(w->recorder, op);
    nccl_follow(compute_stream, l->stream, l->ready, op->collective);
    device_synchronize();
    flight_recorder_wait_end(w->recorder);
}

// NCCL connects ranks when an operation first goes from one to another. Their hosts meet there, and memory is
// allocated, which may wait for kernels. In a step a host might come there only after it has waited for the others, or
// never. So the first sums are here: a small and a large one, for which NCCL may choose a tree and a ring.
constexpr size_t NCCL_LARGE = 4 << 20; // bytes
static inline void nccl_first_sums(Comm* c, const OpRecord* op) {
    NcclLink* l = (NcclLink*)c->link;
    const size_t lengths[] = { (size_t)c->size, NCCL_LARGE / sizeof(float) };
    CommStats before = c->stats[COMM_ALL_REDUCE];
    void* zeros; // not accounted for: it is gone before a program allocates anything
    cuda_check(cudaMalloc(&zeros, NCCL_LARGE), "the first sums");
    cuda_check(cudaMemsetAsync(zeros, 0, NCCL_LARGE, l->stream), "the first sums");
    for (int k = 0; k < (nccl_adds_itself(&c->world->options) ? 2 : 1); k++) {
        CommSlot s = {};
        s.kind = COMM_ALL_REDUCE; s.type = COMM_F32; s.n = lengths[k]; s.in = s.out = zeros; s.record = *op;
        nccl_run(c, &s, l);
    }
    nccl_wait_for(c->world, op, l);
    cuda_check(cudaFree(zeros), "the first sums");
    c->stats[COMM_ALL_REDUCE] = before;
}
// The same for messages from one rank of a pair to the other.
static inline void nccl_first_message(CommContext* w, const OpRecord* op, NcclLink* pair, void* byte, bool sends) {
    nccl_call(w, op);
    ncclResult_t r = sends ? nccl.ncclSend(byte, 1, ncclUint8, 1, pair->nccl, pair->stream)
                           : nccl.ncclRecv(byte, 1, ncclUint8, 0, pair->nccl, pair->stream);
    nccl_called(w, r, "the first message");
    nccl_wait_for(w, op, pair);
}

// Called when NCCL has made the communicator: gives c its link, and the link its memory and connections.
static inline void nccl_link_begin(Comm* c, NcclLink* l, const OpRecord* op) {
    nccl_link_add((NcclEngine*)c->world->nccl, l);
    c->link = l;
    l->numbers = (int*)device_alloc((size_t)c->size * sizeof(int), MEMORY_COMMUNICATION);
    if (!nccl_adds_itself(&c->world->options)) l->scratch = (char*)device_alloc(NCCL_PIECE, MEMORY_COMMUNICATION);
    if (c->size > 1) nccl_first_sums(c, op);
}

// NCCL's id of this run goes from rank 0 to all by the watchdog's connections: ranks that torchrun or srun started need
// no MPI.
static inline void nccl_open(Comm* c) {
    CommContext* w = c->world;
    NcclEngine* e = new_array(NcclEngine, 1);
    w->nccl = e;
    e->world = w;
    cuda_check(cudaStreamCreateWithFlags(&e->from_host, cudaStreamNonBlocking), "the stream for copies from the host");
    cuda_check(cudaStreamCreateWithFlags(&e->to_host, cudaStreamNonBlocking), "the stream for copies to the host");
    ncclUniqueId id;
    if (c->rank == 0) nccl_check(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
    control_share(w->control, &id, sizeof id);
    NcclLink* l = nccl_link_new();
    ncclConfig_t config = nccl_config();
    OpRecord op = flight_recorder_issue(w->recorder, "control", "connect", 0, "bytes", -1);
    // ncclCommAbort would end kernels that wait for a rank which has failed. But it waits itself, for threads of NCCL
    // and for the GPU, and only a process that goes on needs it: the driver ends the kernels of one that is over.
    die_leave = watchdog_leave;
    nccl_call(w, &op);
    nccl_called(w, nccl.ncclCommInitRankConfig(&l->nccl, c->size, id, c->rank, &config), "joining the other ranks");
    nccl_link_begin(c, l, &op);
    flight_recorder_finish(w->recorder, &op);
    cuda_waiting.look = nccl_look;
    cuda_waiting.self = e;
    int v = 0;
    nccl_check(nccl.ncclGetVersion(&v), "ncclGetVersion");
    const char* queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    bool one_queue = queues && strcmp(queues, "1") == 0; // some recipes for other programs set it
    snprintf(w->description, sizeof w->description, "NCCL %d.%d.%d, all-reduce %s%s", v / 10000, v / 100 % 100, v % 100,
             comm_all_reduce_text(&w->options, false),
             one_queue ? ", CUDA_DEVICE_MAX_CONNECTIONS=1: streams wait for one another" : "");
    nccl_offer_memory(c, v);
}

static inline void nccl_close(Comm* c) {
    NcclEngine* e = (NcclEngine*)c->world->nccl;
    OpRecord op = flight_recorder_issue(c->world->recorder, "control", "disconnect", 0, "bytes", -1);
    cuda_waiting.look = NULL;
    for (NcclLink* l = e->links; l; l = l->next) { // before the communicator, because they may be windows on it
        device_free(l->scratch);
        device_free(l->numbers);
    }
    cuda_lender.alloc = NULL;
    for (NcclLink* l = e->links; l; ) { // communicators that were split off go before their parent
        NcclLink* next = l->next;
        nccl_call(c->world, &op);
        nccl_called(c->world, nccl.ncclCommDestroy(l->nccl), "ncclCommDestroy");
        cuda_check(cudaStreamDestroy(l->stream), "the communication stream");
        cuda_check(cudaEventDestroy(l->ready), "the communication stream");
        cuda_check(cudaEventDestroy(l->passed_on), "the communication stream");
        free(l->ops);
        free(l->to);
        free(l->from);
        free(l);
        l = next;
    }
    die_leave = NULL;
    flight_recorder_finish(c->world->recorder, &op);
    cuda_check(cudaStreamDestroy(e->from_host), "the stream for copies from the host");
    cuda_check(cudaStreamDestroy(e->to_host), "the stream for copies to the host");
    free(e->memory);
    free(e);
}

// Splits NCCL's communicator: ranks of the same color get a new one, in the order of their keys. NULL: without a color.
static inline ncclComm_t nccl_split_off(CommContext* w, const OpRecord* op, ncclComm_t parent, int color, int key,
                                        ncclConfig_t config) {
    ncclComm_t made = NULL;
    nccl_call(w, op);
    nccl_called(w, nccl.ncclCommSplit(parent, color, key, &made, &config), "ncclCommSplit");
    return made;
}

// c's part of a split: NCCL makes the communicator, on which the ranks then exchange their numbers in the world.
static inline void nccl_run_split(Comm* parent, const CommSlot* s) {
    Comm* c = (Comm*)s->out;
    CommContext* w = c->world;
    NcclLink* l = nccl_link_new();
    ncclConfig_t config = nccl_config();
    l->nccl = nccl_split_off(w, &s->record, ((NcclLink*)parent->link)->nccl, s->color, parent->rank, config);
    nccl_check(nccl.ncclCommUserRank(l->nccl, &c->rank), "ncclCommUserRank");
    nccl_check(nccl.ncclCommCount(l->nccl, &c->size), "ncclCommCount");
    nccl_link_begin(c, l, &s->record);
    c->world_rank = new_array(int, c->size);
    host_to_device(l->numbers + c->rank, &parent->world_rank[parent->rank], sizeof(int));
    nccl_follow(l->stream, compute_stream, l->ready, "comm_split"); // else the number is not there yet
    nccl_call(w, &s->record);
    nccl_called(w, nccl.ncclAllGather(l->numbers + c->rank, l->numbers, 1, ncclInt32, l->nccl, l->stream),
                "ncclAllGather");
    nccl_wait_for(w, &s->record, l);
    device_to_host(c->world_rank, l->numbers, (size_t)c->size * sizeof(int));
}
static inline void nccl_split(Comm* c, Comm* parent, int color) {
    comm_wait(parent, comm_issue(parent, COMM_SPLIT, c, NULL, 0, COMM_BYTE, -1, color, false));
}

// Pairs of ranks that exchange messages meet in rounds, each in the first one in which both are free. Sets with[k] (2N)
// to this rank's partner in round k, -1: none. Returns the number of rounds, the same on all ranks.
static inline int nccl_rounds(const Comm* c, int* with) {
    int N = c->size, rounds = 0;
    bool* busy = new_array(bool, 2 * N * N); // (N,2N) rank, round
    for (int k = 0; k < 2 * N; k++) with[k] = -1;
    for (int a = 0; a < N; a++)
        for (int b = a + 1; b < N; b++) {
            int k = 0;
            if (!c->pairs(a, b, N)) continue;
            while (busy[2 * N * a + k] || busy[2 * N * b + k]) k++;
            busy[2 * N * a + k] = busy[2 * N * b + k] = true;
            if (a == c->rank || b == c->rank) with[k] = a + b - c->rank;
            if (k >= rounds) rounds = k + 1;
        }
    free(busy);
    return rounds;
}

// A receive holds multiprocessors from its issue until the message is there, usually as long as an action computes.
// NCCL would take 16 for a megabyte, and four carry it faster than it is made.
static inline ncclConfig_t nccl_pair_config(void) {
    ncclConfig_t config = nccl_config();
    config.minCTAs = 1;
    config.maxCTAs = 4;
    return config;
}

// Two communicators for each of these pairs, one each way: the sender is rank 0 there, the receiver rank 1.
static inline void nccl_connect(Comm* c) {
    CommContext* w = c->world;
    NcclLink* l = (NcclLink*)c->link;
    OpRecord op = flight_recorder_issue(w->recorder, c->name, "connect", 0, "bytes", -1);
    l->to = new_array(NcclLink*, c->size);
    l->from = new_array(NcclLink*, c->size);
    int* with = new_array(int, 2 * c->size);
    int rounds = nccl_rounds(c, with);
    for (int k = 0; k < 2 * rounds; k++) {
        int partner = with[k / 2], lower = partner < c->rank ? partner : c->rank;
        bool sends = (k % 2 == 0) == (c->rank == lower);
        ncclComm_t made = nccl_split_off(w, &op, l->nccl, partner < 0 ? NCCL_SPLIT_NOCOLOR : lower, !sends,
                                         nccl_pair_config());
        if (made == NULL) continue;
        NcclLink* pair = nccl_link_new();
        pair->nccl = made;
        nccl_link_add((NcclEngine*)w->nccl, pair);
        (sends ? l->to : l->from)[partner] = pair;
        nccl_first_message(w, &op, pair, l->numbers, sends);
    }
    free(with);
    flight_recorder_finish(w->recorder, &op);
}

static inline NcclLink* nccl_link_of(const Comm* c, const CommSlot* s) {
    NcclLink* l = (NcclLink*)c->link;
    return s->kind == COMM_SEND ? l->to[s->peer] : s->kind == COMM_RECV ? l->from[s->peer] : l;
}

static inline void nccl_start(Comm* c, CommSlot* s) {
    NcclLink* l = nccl_link_of(c, s);
    if (s->kind == COMM_SPLIT) { // the host does it; nothing else is under way
        flight_recorder_start(c->world->recorder, &s->record);
        s->event.started = now_seconds();
        nccl_run_split(c, s);
        s->event.finished = now_seconds();
        flight_recorder_finish(c->world->recorder, &s->record);
        return;
    }
    if (l->issued - l->done == COMM_IN_FLIGHT) nccl_await_oldest(c->world, l);
    cudaStream_t first = nccl_first_stream(c, s, l);
    // Otherwise it sends or overwrites data that do not exist yet
    nccl_follow(first, compute_stream, l->ready, comm_kind_names[s->kind]);
    s->events[EVENT_STARTED] = cuda_mark(first);
    if (s->on_host) nccl_run_on_host(c, s, l);
    else nccl_run(c, s, l);
    s->events[EVENT_FINISHED] = cuda_mark(nccl_last_stream(c, s, l));
    NcclOp o = { s->record, s->events[EVENT_STARTED], s->events[EVENT_FINISHED], false, false };
    l->ops[l->issued++ % COMM_IN_FLIGHT] = o;
}

static inline void nccl_finish(Comm* c, CommSlot* s) {
    NcclLink* l = nccl_link_of(c, s);
    if (s->kind == COMM_SPLIT) return;
    cudaEvent_t finished = cuda_marks.events[s->events[EVENT_FINISHED]];
    // Otherwise layers read too early
    cuda_check(cudaStreamWaitEvent(compute_stream, finished, 0), comm_kind_names[s->kind]);
    for (long long k = l->waited; k < l->issued; k++)
        if (l->ops[k % COMM_IN_FLIGHT].finished == s->events[EVENT_FINISHED]) l->waited = k + 1;
    if (s->kind == COMM_BARRIER) device_synchronize();
}

static const CommBackend comm_nccl = {
    nccl_open, nccl_close, nccl_split, nccl_connect, nccl_register_memory, nccl_start, nccl_finish, nccl_device_bytes,
    nccl_note
};
#endif
