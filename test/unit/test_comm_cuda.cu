/*
test_comm_cuda.cu - communication between GPUs, or ranks that share one: the claims of comm_claims.h, and what only
GPUs can get wrong.
test/kernels/test_gpu_comm.py starts it on several ranks.

    test_comm_cuda [--comm nccl|mpi] [--deterministic | --allreduce ring] [PATTERN...]
    --windows-are any|shared|local|none    what NCCL makes of memory that ranks register: the description must say so; default: any
    --journal FILE    what has begun, written there without a flush
*/
#define COMM_PIECE (1 << 14) // several pieces without much data
#define NCCL_PIECE (1 << 16)
#define COMM_IN_FLIGHT 64    // so that few operations are many
#define COMM_WAITED_CAPACITY 64
#define MANY 20011
#include "comm_claims.h"
#include <deque>
#include <vector>

enum { ANY, SHARED, LOCAL, NONE };
static int windows_are = ANY;

// A buffer of floats, which frees itself.
struct Tensor : Buffer {
    Tensor(size_t n, Numbers numbers, int rank) : Buffer(buffer(n, numbers, rank, 0)) {}
    Tensor(const Tensor&) = delete;
    ~Tensor() { device_free(p); }
};

// Compute, communicate, compute, without the host ever waiting for the GPU: each step's input is computed just before, its output
// is used just after, and its buffer is overwritten at once.
CLAIM(communication_waits_for_compute_and_compute_for_communication) {
    enum { STEPS = 12, n = 3001 };
    Tensor x(n, zero, 0);
    std::deque<Tensor> inputs, results;
    for (int k = 0; k < STEPS; k++) {
        inputs.emplace_back(n, whole, (world.rank + k) % world.size); // every step adds up the same in another order
        results.emplace_back(n, zero, 0);
    }
    for (int k = 0; k < STEPS; k++) {
        device_copy(x.p, inputs[k].p, n * sizeof(float));
        CommOp op = comm_all_reduce(&world, x.p, n, COMM_F32);
        device_zero(inputs[k].p, n * sizeof(float)); // it has been read
        comm_wait(&world, op);
        device_copy(results[k].p, x.p, n * sizeof(float));
        device_zero(x.p, n * sizeof(float));
    }
    for (const Tensor& result : results) check_numbers(result, whole_sum, world.size, 0, "a step");
}

// The same with shards on the host: data to reduce is computed just before and overwritten just after, several operations are in
// flight at once, and the host waits once before it reads them all; gathered data is used just after and overwritten at once.
CLAIM(so_it_does_where_shards_are_on_the_host) {
    enum { STEPS = 6, n = 3001 };
    size_t N = (size_t)world.size, bytes = n * sizeof(float);
    Tensor full(N * n, zero, 0);
    std::deque<Tensor> inputs, results;
    Buffer shards[STEPS];
    for (int k = 0; k < STEPS; k++) {
        inputs.emplace_back(N * n, whole, (world.rank + k) % world.size);
        results.emplace_back(N * n, zero, 0);
        shards[k] = { (float*)offload_alloc(bytes), n };
    }
    for (int k = 0; k < STEPS; k++) {
        device_copy(full.p, inputs[k].p, N * bytes);
        comm_wait(&world, comm_reduce_scatter(&world, shards[k].p, full.p, n, COMM_F32));
        device_zero(full.p, N * bytes);
    }
    device_synchronize();
    for (int k = 0; k < STEPS; k++) {
        check_numbers(shards[k], whole_sum, world.size, (size_t)world.rank * n, "a step to the host");
        buffer_set(shards[k], whole, world.rank, (size_t)k);
    }
    for (int k = 0; k < STEPS; k++) {
        comm_wait(&world, comm_all_gather(&world, full.p, shards[k].p, n, COMM_F32));
        device_copy(results[k].p, full.p, N * bytes);
        device_zero(full.p, N * bytes);
    }
    for (int k = 0; k < STEPS; k++) {
        for (int q = 0; q < world.size; q++) check_numbers(part_of(results[k], q * n, n), whole, q, (size_t)k, "a step on the host");
        offload_free(shards[k].p);
    }
}

// Over NCCL the copy of a shard holds up no operation, and no operation holds up a copy. Only the emulator can say so: it runs
// what a wait needs, and nothing else.
CLAIM(copies_of_host_shards_hold_up_no_operation) {
#ifdef CUDA_EMULATOR
    const size_t n = 3001, N = (size_t)world.size;
    if (world.world->nccl == NULL || world.world->strict) return;
    Tensor full(N * n, whole, world.rank), x(n, whole, world.rank);
    float *down = (float*)offload_alloc(n * sizeof(float)), *up = (float*)offload_alloc(n * sizeof(float));
    auto event = [](CommOp op, int mark) { return cuda_marks.events[world.slots[op % COMM_IN_FLIGHT].events[mark]]; };
    CommOp reduce = comm_reduce_scatter(&world, down, full.p, n, COMM_F32), next = comm_all_reduce(&world, x.p, n, COMM_F32);
    cuda_check(cudaEventSynchronize(event(next, EVENT_FINISHED)), "the all-reduce");
    require(isnan(down[0]), "an all-reduce waited until the shard before it was on the host");
    comm_wait(&world, reduce);
    comm_wait(&world, next);
    device_synchronize();
    require((double)down[n - 1] == whole_sum(world.size, (size_t)world.rank * n + n - 1), "the shard is wrong");
    for (size_t i = 0; i < n; i++) up[i] = (float)whole(world.rank, i);
    CommOp before = comm_all_reduce(&world, x.p, n, COMM_F32), gather = comm_all_gather(&world, full.p, up, n, COMM_F32);
    cuda_check(cudaEventSynchronize(((NcclLink*)world.link)->passed_on), "the copy");
    require(cudaEventQuery(event(before, EVENT_FINISHED)) == cudaErrorNotReady, "the copy of a shard waited for an all-reduce");
    comm_wait(&world, before);
    comm_wait(&world, gather);
    for (int q = 0; q < world.size; q++) check_numbers(part_of(full, q * n, n), whole, q, 0, "all-gather from the host");
    offload_free(down);
    offload_free(up);
#endif
}

static CommEvent seen;
static void see(void* self, const CommEvent* e) { (void)self; seen = *e; }
CLAIM(times_are_in_order) {
    Tensor x(20011, whole, world.rank);
    CommStats before = world.stats[COMM_ALL_REDUCE];
    comm_observe(&world, see, NULL);
    comm_wait(&world, comm_all_reduce(&world, x.p, 20011, COMM_F32));
    comm_observe(&world, NULL, NULL);
    const CommStats* after = &world.stats[COMM_ALL_REDUCE];
    require(seen.n == 20011 && seen.kind == COMM_ALL_REDUCE, "another operation was seen");
    require(seen.issued > 0 && seen.issued <= seen.wait_begun, "it was waited for before it was issued");
    require(seen.wait_begun <= seen.wait_ended, "waiting: times in another order");
    require(seen.started > 0 && seen.started <= seen.finished, "moving: times in another order");
    require(world.world->nccl == NULL || seen.issued <= seen.started, "it began before it was issued"); // of one clock
    require(after->exposed > before.exposed && after->busy >= before.busy, "no time went by");
}

// ---- what the times of operations cost: calls of CUDA's functions, which the emulator counts ----
#ifdef CUDA_EMULATOR
extern "C" unsigned long long emulator_calls(const char* name);
#else
static unsigned long long emulator_calls(const char* name) { (void)name; return 0; }
#endif
static unsigned long long waits_for_device(void) {
    unsigned long long waits = emulator_calls("cudaStreamSynchronize") + emulator_calls("cudaDeviceSynchronize");
    return world.world->nccl ? waits + emulator_calls("cudaStreamQuery") : waits; // over MPI another thread asks
}
// What is over in the middle of a step gives its marks back there, though the host never waits; and NCCL's side, which looks at
// the same marks, has seen that it is over. (Before the next test, after which there is more room.)
static void poll_for_device(void) {
    int mark = device_event();
    while (!device_event_passed(mark)) {}
    device_event_free(mark);
}
CLAIM(operations_that_are_over_give_their_marks_back_within_a_step) {
    enum { OPS = 3 * COMM_WAITED_CAPACITY, n = 8 };
    Tensor x(n, zero, 0);
    comm_collect_times(&world);
    for (int k = 0; k < OPS; k++) {
        comm_wait(&world, comm_all_reduce(&world, x.p, n, COMM_F32));
        if (k % 20 == 19) poll_for_device();
    }
    require(world.world->notes.num_waited <= COMM_WAITED_CAPACITY && world.world->notes.capacity == COMM_WAITED_CAPACITY,
            "%d operations that were over have kept their marks", world.world->notes.num_waited);
    poll_for_device();
    comm_collect_times(&world);
#if USE_NCCL
    const NcclLink* l = (NcclLink*)world.link;
    long long unseen = world.world->nccl ? l->issued - l->done : 0;
    require(unseen == 0, "the ends of %lld operations were not seen before their marks were given back", unseen);
    Tensor full((size_t)world.size * n, zero, 0);
    char* shard = (char*)offload_alloc(n * sizeof(float));
    CommOp to_host = comm_reduce_scatter(&world, shard, full.p, n, COMM_F32); // it may end after the next one
    comm_wait(&world, comm_all_reduce(&world, x.p, n, COMM_F32));
    poll_for_device();
    comm_collect_times(&world);
    require(world.world->nccl == NULL || l->ops[(l->issued - 1) % COMM_IN_FLIGHT].over, "nor that of one after a copy");
    comm_wait(&world, to_host);
    device_synchronize();
    offload_free(shard);
#endif
}

// Over NCCL the host gets further ahead of the GPU than there is room for, and must not wait until the GPU has caught up. Times
// are one question for each operation, and no wait once the host has waited for the last one.
CLAIM(times_cost_one_question_per_operation_and_no_wait_in_a_step) {
    enum { OPS = COMM_IN_FLIGHT + 50, n = 8 };
    Tensor x(n, zero, 0);
    comm_barrier(&world);
    comm_collect_times(&world);
    double before = comm_rank_exposed(&world);
    unsigned long long asked = emulator_calls("cudaEventElapsedTime"), waits = waits_for_device();
    for (int k = 0; k < OPS; k++) comm_wait(&world, comm_all_reduce(&world, x.p, n, COMM_F32));
    waits = waits_for_device() - waits;
    require(world.world->strict || waits == 0, "the host waited for the GPU %llu times in the middle of a step", waits);
    device_synchronize();
    waits = waits_for_device();
    comm_collect_times(&world);
    waits = waits_for_device() - waits;
    asked = emulator_calls("cudaEventElapsedTime") - asked;
    require(waits == 0, "the host waited for the GPU %llu times, and all was done", waits);
    unsigned long long expected = emulator_calls("cudaEventRecord") ? OPS : 0; // else nobody counts
    require(asked == expected, "CUDA was asked for %llu times of %d operations", asked, OPS);
    require(comm_rank_exposed(&world) > before, "nothing was exposed");
    int free_marks = cuda_marks.pool.num_free, all_marks = cuda_marks.pool.made;
    require(free_marks == all_marks, "%d of %d marks were not given back", all_marks - free_marks, all_marks);
    check_numbers(x, zero, 0, 0, "a sum of zeros");
}

static double twice_summed(int rank, size_t i) { return world.size * world.size * whole(rank, i); }
// wholes and shards are windows where NCCL makes any, and the exchanged data lies anywhere in them.
CLAIM(memory_that_ranks_exchange_is_registered) {
    const size_t n = 5000, N = (size_t)world.size, at = 48;
    size_t allocations = device_allocations(), before = device_memory(MEMORY_COMMUNICATION);
    float* wholes = (float*)device_alloc((at + N * n) * sizeof(float), MEMORY_COMMUNICATION);
    float* shards = (float*)device_alloc((at + n) * sizeof(float), MEMORY_GRADIENTS);
    require(device_allocations() == allocations + 2 && device_memory(MEMORY_COMMUNICATION) == before + (at + N * n) * sizeof(float),
            "memory that NCCL lends is not accounted for as it was asked for");
    comm_register_memory(&world);
    static const char* const of_kind[] = { "", ", memory registered (", ", memory registered by each rank alone: ", ", memory not registered: " };
    const char* said = strstr(comm_description(&world), of_kind[windows_are]);
    require(said != NULL, "it says '%s', and not '%s'", comm_description(&world), of_kind[windows_are]);
    int registered = 0, buffers = 0; // scratch of other communicators may also be registered
    require(windows_are != SHARED || (sscanf(said, ", memory registered (%d of %d buffers)", &registered, &buffers) == 2
                                      && registered >= 2 && registered == buffers), "it says '%s'", said);
    Buffer full = { wholes + at, N * n }, shard = { shards + at, n };
    buffer_set(shard, whole, world.rank, 0);
    comm_wait(&world, comm_all_gather(&world, full.p, shard.p, n, COMM_F32));
    comm_wait(&world, comm_all_reduce(&world, full.p, N * n, COMM_F32));
    comm_wait(&world, comm_reduce_scatter(&world, shard.p, full.p, n, COMM_F32));
    check_numbers(shard, twice_summed, world.rank, 0, "a shard that was gathered and summed twice");
    device_free(wholes);
    device_free(shards);
}

#if USE_NCCL
// We do not use communicators that do not block, but this is how they are: a launch that has to wait for another rank returns, and
// so does a split, whose result comes later.
static ncclResult_t until_done(ncclComm_t c) {
    ncclResult_t r = ncclInProgress;
    while (r == ncclInProgress) nccl_check(nccl.ncclCommGetAsyncError(c, &r), "a question");
    return r;
}
CLAIM(a_communicator_that_does_not_block_is_in_progress_until_the_others_have_come) {
    if (world.world->nccl == NULL || world.size == 1) return;
    NcclLink* l = (NcclLink*)world.link;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t made = NULL, part = NULL;
    config.blocking = 0;
    nccl_check(nccl.ncclCommSplit(l->nccl, 0, world.rank, &made, &config), "ncclCommSplit");
    nccl_check(until_done(made), "ncclCommSplit");
    Tensor x(5, whole, world.rank);
    if (world.rank == 0) usleep(50000);
    ncclResult_t r = nccl.ncclAllReduce(x.p, x.p, 5, ncclFloat32, ncclSum, made, l->stream);
    require(world.rank == 0 || r == ncclInProgress, "rank %d did not wait for rank 0: %s", world.rank, nccl.ncclGetErrorString(r));
    nccl_check(until_done(made), "ncclAllReduce");
    cuda_check(cudaStreamSynchronize(l->stream), "ncclAllReduce");
    check_numbers(x, whole_sum, world.size, 0, "a sum without blocking");
    r = nccl.ncclCommSplit(made, 0, world.rank, &part, &config);
    require(r == ncclSuccess || r == ncclInProgress, "ncclCommSplit: %s", nccl.ncclGetErrorString(r));
    nccl_check(until_done(made), "ncclCommSplit");
    nccl_check(until_done(part), "ncclCommSplit");
    nccl_check(nccl.ncclCommDestroy(part), "ncclCommDestroy");
    nccl_check(nccl.ncclCommDestroy(made), "ncclCommDestroy");
}

// Rows of 3 floats, which begin 7 apart, come to lie 5 apart; what was issued before and after is ordered with them.
CLAIM(rows_are_copied_and_what_is_between_them_stays) {
    const size_t rows = 301, size = sizeof(float);
    Tensor made(7 * rows, whole, world.rank), from(7 * rows, zero, 0), to(5 * rows, zero, 0);
    std::vector<float> got(5 * rows);
    device_copy(from.p, made.p, 7 * rows * size);
    device_copy_rows(to.p + 1, 5 * size, from.p + 2, 7 * size, 3 * size, rows);
    device_zero(from.p, 7 * rows * size);
    device_to_host(got.data(), to.p, 5 * rows * size);
    for (size_t i = 0; i < got.size(); i++) {
        double want = i % 5 % 4 == 0 ? zero(0, i) : whole(world.rank, i / 5 * 7 + 1 + i % 5);
        require((double)got[i] == want, "float %zu is %g, not %g", i, (double)got[i], want);
    }
}

// A ring: each rank has two neighbours, or one if there are two ranks, and two communicators for each.
static bool are_neighbours(int a, int b, int N) { return (a + 1) % N == b || (b + 1) % N == a; }
static int count_links(void) {
    int links = 0;
    for (const NcclLink* l = ((NcclEngine*)world.world->nccl)->links; l; l = l->next) links++;
    return links;
}
CLAIM(only_ranks_that_exchange_messages_get_communicators_for_them) {
    const int N = world.size, next = (world.rank + 1) % N, before = (world.rank + N - 1) % N;
    if (world.world->nccl == NULL || N == 1) return;
    Comm ring;
    Tensor sent(1, whole, world.rank), got(1, zero, 0);
    comm_split(&ring, &world, "ring", 0);
    int links = count_links();
    comm_connect(&ring, are_neighbours);
    require(count_links() - links == (N == 2 ? 2 : 4), "%d communicators for the neighbours in a ring of %d", count_links() - links, N);
    CommOp send = comm_send(&ring, sent.p, 1, COMM_F32, next);
    comm_wait(&ring, comm_recv(&ring, got.p, 1, COMM_F32, before));
    comm_wait(&ring, send);
    check_numbers(got, whole, before, 0, "a message of a neighbour");
    comm_free(&ring);
}

// Where kernels of layers fill the GPU, a collective's gets the next processors that are free: other ranks wait for it.
CLAIM(the_streams_of_nccl_have_the_highest_priority) {
    if (world.world->nccl == NULL) return;
    int lowest, highest, found, streams = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities");
    cuda_check(cudaStreamGetPriority(compute_stream, &found), "priorities");
    require(found == lowest, "the compute stream has priority %d, the lowest is %d", found, lowest);
    for (const NcclLink* l = ((NcclEngine*)world.world->nccl)->links; l; l = l->next) {
        cuda_check(cudaStreamGetPriority(l->stream, &found), "priorities");
        require(found == highest, "stream %d of NCCL has priority %d, the highest is %d", streams, found, highest);
        streams++;
    }
    require(streams >= 1 + 2 * (world.size - 1), "%d streams", streams);
}
#endif

// ---- the program ----
static const char* journal = "";
void more_options(OptionTable* table) {
    option_choice(table, "windows-are", &windows_are, "any|shared|local|none", "what NCCL makes of memory that ranks register");
    option_text(table, "journal", &journal, "FILE", "writes there what has begun");
}
void before_claim(const char* name) {
    static FILE* file;
    if (journal[0] && file == NULL) require((file = fopen(journal, "w")) != NULL, "%s cannot be written", journal);
    if (file) fprintf(file, "%s\n", name);
}
