/*
test_comm_cuda.cu - collectives between GPUs, or ranks that share one, against sums made on the host; test_comm.c says more
about each. test/kernels/test_emulated.py starts it on several ranks, and dev/gpu_check.py on a GPU. Every rank checks its results; the
first check that fails ends them all.

    test_comm_cuda [--comm nccl|mpi] [--deterministic | --allreduce ring]    every claim below, as TAP from rank 0
    --nccl-windows --windows-are windows|local|none    what NCCL makes of them here; default: windows
    --journal FILE    what has passed, written there without a flush
*/
#define COMM_PIECE (1 << 14) // several pieces without much data
#define NCCL_PIECE (1 << 16)
#define COMM_IN_FLIGHT 64    // so that few operations are many
#define COMM_WAITED_CAPACITY 64
#include "comm_numbers.h"
#include "../../llmc/comm/sums.h"
#include <algorithm>
#include <deque>
#include <vector>

static Comm world;
static Control control;
enum { WINDOWS, LOCAL, NONE };
static int windows_are;
static FILE* journal; // or NULL
// TEST(a_claim) { ... } is run by main(), in the order of the file.
struct Test { const char* name; void (*run)(void); };
static Test tests[32];
static int num_tests;
#define TEST(name) \
    static void test_##name(void); \
    [[maybe_unused]] static const bool registered_##name = [] { tests[num_tests++] = { #name, test_##name }; return true; }(); \
    static void test_##name(void)
static const size_t sizes[] = { 0, 1, 7, 20011 };
enum { NUM_SIZES = sizeof sizes / sizeof sizes[0], SPARE = 16 }; // bytes after every tensor that no operation may touch

// ---- numbers of an index ----
static double zero(size_t i) { (void)i; return 0; }
static auto of_rank(int q) { return [q](size_t i) { return whole(q, i); }; }
static auto rough_of_rank(int q) { return [q](size_t i) { return rough(q, i); }; }
static auto mine(const Comm* c) { return of_rank(c->rank); }
static auto sum_of(const Comm* c, size_t first = 0) { // of all ranks' numbers, from this index on
    return [N = c->size, first](size_t i) { return whole_sum(N, first + i); };
}
static auto rows_of_ranks(size_t n) { return [n](size_t i) { return whole((int)(i / n), i % n); }; } // of n numbers

// ---- tensors: elements on the device, and the spare bytes after them ----
template <typename F> static std::vector<char> bytes_of(size_t n, CommType t, F number) {
    std::vector<char> bytes(n * comm_type_size(t));
    for (size_t i = 0; i < n; i++) element_set(bytes.data(), i, t, number(i));
    bytes.insert(bytes.end(), SPARE, 0x5a);
    return bytes;
}
struct Tensor {
    char* p;
    size_t n;
    CommType t;
    template <typename F> Tensor(size_t n, CommType t, F number) : n(n), t(t) {
        std::vector<char> bytes = bytes_of(n, t, number);
        p = (char*)device_alloc(bytes.size(), MEMORY_ACTIVATIONS);
        host_to_device(p, bytes.data(), bytes.size());
        device_synchronize(); // bytes are read
    }
    Tensor(const Tensor&) = delete;
    ~Tensor() { device_free(p); }
    char* at(size_t i) { return p + i * comm_type_size(t); }
    void equals(const char* what, const std::vector<char>& wanted) const {
        std::vector<char> got(wanted.size());
        device_to_host(got.data(), p, got.size());
        for (size_t i = 0; i < got.size(); i++)
            require(got[i] == wanted[i], "%s, %zu %s: byte %zu is %d, not %d", what, n, comm_type_name(t), i, got[i], wanted[i]);
    }
    template <typename F> void is(const char* what, F number) const { equals(what, bytes_of(n, t, number)); }
};

// ---- each collective ----
static void all_reduce_on(Comm* c, size_t n, CommType t) {
    Tensor x(n, t, mine(c));
    comm_wait(c, comm_all_reduce(c, x.p, n, t));
    x.is("all-reduce", sum_of(c));
}
static void reduce_scatter_on(Comm* c, size_t n, CommType t, bool in_place) {
    size_t first = (size_t)c->rank * n;
    Tensor full((size_t)c->size * n, t, mine(c)), shard(n, t, zero);
    comm_wait(c, comm_reduce_scatter(c, in_place ? full.at(first) : shard.p, full.p, n, t));
    if (!in_place) shard.is("reduce-scatter", sum_of(c, first));
    full.is("reduce-scatter's input", [=](size_t i) { // all but the shard is what it was
        return in_place && i >= first && i < first + n ? sum_of(c)(i) : whole(c->rank, i);
    });
}
static void all_gather_on(Comm* c, size_t n, CommType t, bool in_place) {
    Tensor full((size_t)c->size * n, t, zero), own(n, t, mine(c));
    char* shard = in_place ? full.at((size_t)c->rank * n) : own.p;
    if (in_place) device_copy(shard, own.p, n * comm_type_size(t));
    comm_wait(c, comm_all_gather(c, full.p, shard, n, t));
    full.is("all-gather", rows_of_ranks(n));
}
static void all_to_all_on(Comm* c, size_t n, CommType t) {
    size_t all = (size_t)c->size * n, own = (size_t)c->rank * n;
    unsigned long long posted = c->stats[COMM_ALL_TO_ALL].posted;
    Tensor in(all, t, mine(c)), out(all, t, zero);
    comm_wait(c, comm_all_to_all(c, out.p, in.p, n, t));
    out.is("all-to-all", [=](size_t i) { return whole((int)(i / n), own + i % n); }); // of each rank the row that has this rank's number
    in.is("all-to-all's input", mine(c));
    posted = c->stats[COMM_ALL_TO_ALL].posted - posted;
    require(posted == (all - n) * comm_type_size(t), "an all-to-all of %zu elements sent %llu bytes", n, posted);
}
// Shards in host memory: the host sees each rank's part of the sum and doubles it; then all ranks gather it.
static void host_shards_on(Comm* c, size_t n, CommType t) {
    size_t at = (size_t)c->rank * n, bytes = n * comm_type_size(t);
    Tensor full((size_t)c->size * n, t, mine(c));
    std::vector<char> expected = bytes_of(n, t, sum_of(c, at));
    char* shard = (char*)offload_alloc(bytes + SPARE);
    require(device_memory(MEMORY_OFFLOADED) == bytes + SPARE, "%zu bytes are offloaded", device_memory(MEMORY_OFFLOADED));
    memset(shard + bytes, 0x5a, SPARE);
    comm_wait(c, comm_reduce_scatter_to_host(c, shard, full.p, n, t));
    device_synchronize();
    require(memcmp(shard, expected.data(), bytes + SPARE) == 0, "reduce-scatter to the host, %zu %s", n, comm_type_name(t));
    for (size_t i = 0; i < n; i++) element_set(shard, i, t, 2 * sum_of(c)(at + i));
    comm_wait(c, comm_all_gather_from_host(c, full.p, shard, n, t));
    full.is("all-gather from the host", [=](size_t i) { return 2 * sum_of(c)(i); });
    offload_free(shard);
}
static void broadcast_on(Comm* c, size_t n, CommType t) {
    Tensor x(n, t, mine(c));
    comm_wait(c, comm_broadcast(c, x.p, n, t, c->size - 1));
    x.is("broadcast", of_rank(c->size - 1));
}
static void all_of(Comm* c) {
    for (int s = 0; s < NUM_SIZES; s++) {
        for (int k = 0; k < NUM_TYPES; k++) {
            if (k < NUM_SUMMED) all_reduce_on(c, sizes[s], types[k]);
            if (k < NUM_SUMMED) reduce_scatter_on(c, sizes[s], types[k], (s + k) % 2);
            all_gather_on(c, sizes[s], types[k], (s + k) % 2);
            if (k < NUM_SUMMED) host_shards_on(c, sizes[s], types[k]);
            all_to_all_on(c, sizes[s], types[k]);
            broadcast_on(c, sizes[s], types[k]);
        }
    }
}
TEST(collectives_of_every_type_and_size) { all_of(&world); }

TEST(communicators_of_a_part_of_the_ranks) {
    Comm half, pair;
    size_t before = device_memory(MEMORY_COMMUNICATION);
    comm_split(&half, &world, "half", world.rank % 2);
    size_t taken = device_memory(MEMORY_COMMUNICATION) - before;
    require(taken == comm_split_bytes(&world, half.size), "a split takes %zu bytes", taken);
    int odd = world.rank % 2;
    require(half.rank == world.rank / 2 && half.size == (world.size + 1 - odd) / 2, "rank %d of %d", half.rank, half.size);
    for (int q = 0; q < half.size; q++) require(half.world_rank[q] == 2 * q + odd, "rank %d is %d", q, half.world_rank[q]);
    all_of(&half);
    Tensor x(20011, COMM_F32, mine(&half)), y(20011, COMM_F32, mine(&world));
    CommOp a = comm_all_reduce(&half, x.p, x.n, COMM_F32), b = comm_all_reduce(&world, y.p, y.n, COMM_F32);
    comm_wait(&world, b);
    comm_wait(&half, a);
    x.is("half", sum_of(&half));
    y.is("world", sum_of(&world));
    comm_split(&pair, &half, "pair", world.rank / 4); // of a part
    all_reduce_on(&pair, 1001, COMM_F32);
    for (int q = 0; q < pair.size; q++)
        require(pair.world_rank[q] == world.rank / 4 * 4 + 2 * q + odd, "rank %d of the pair is %d", q, pair.world_rank[q]);
    comm_free(&pair);
    comm_free(&half);
}

// In ordered mode the bits are those that the CPU adds up.
TEST(sums_in_rank_order_have_the_bits_of_the_cpu) {
    const size_t n = 10007, N = (size_t)world.size;
    for (int k = 0; k < NUM_SUMMED && world.world->options.ordered; k++) {
        CommType t = types[k];
        size_t at = (size_t)world.rank * n, size = comm_type_size(t);
        Tensor x(N * n, t, rough_of_rank(world.rank)), y(N * n, t, rough_of_rank(world.rank));
        std::vector<char> sum = bytes_of(N * n, t, zero), scattered = bytes_of(N * n, t, rough_of_rank(world.rank));
        std::vector<std::vector<char>> of_ranks;
        std::vector<const void*> rows;
        for (int q = 0; q < world.size; q++) of_ranks.push_back(bytes_of(N * n, t, rough_of_rank(q)));
        for (const std::vector<char>& bytes : of_ranks) rows.push_back(bytes.data());
        comm_add_rows(sum.data(), rows.data(), world.size, N * n, t);
        std::copy_n(sum.begin() + at * size, n * size, scattered.begin() + at * size);
        comm_wait(&world, comm_all_reduce(&world, x.p, N * n, t));
        comm_wait(&world, comm_reduce_scatter(&world, y.at(at), y.p, n, t));
        x.equals("all-reduce in rank order", sum);
        y.equals("reduce-scatter in rank order", scattered);
    }
}

// Compute, communicate, compute, without the host ever waiting for the GPU: each step's input is computed just before, its output
// is used just after, and its buffer is overwritten at once.
TEST(communication_waits_for_compute_and_compute_for_communication) {
    enum { STEPS = 12, n = 3001 };
    Tensor x(n, COMM_F32, zero);
    std::deque<Tensor> inputs, results;
    for (int k = 0; k < STEPS; k++) {
        inputs.emplace_back(n, COMM_F32, of_rank((world.rank + k) % world.size)); // every step adds up the same in another order
        results.emplace_back(n, COMM_F32, zero);
    }
    for (int k = 0; k < STEPS; k++) {
        device_copy(x.p, inputs[k].p, n * sizeof(float));
        CommOp op = comm_all_reduce(&world, x.p, n, COMM_F32);
        device_zero(inputs[k].p, n * sizeof(float)); // it has been read
        comm_wait(&world, op);
        device_copy(results[k].p, x.p, n * sizeof(float));
        device_zero(x.p, n * sizeof(float));
    }
    for (const Tensor& result : results) result.is("a step", sum_of(&world));
}

// The same with shards on the host: data to reduce is computed just before and overwritten just after, several operations are in
// flight at once, and the host waits once before it reads them all; gathered data is used just after and overwritten at once.
TEST(so_it_does_where_shards_are_on_the_host) {
    enum { STEPS = 6, n = 3001 };
    size_t N = (size_t)world.size, bytes = n * sizeof(float);
    Tensor full(N * n, COMM_F32, zero);
    std::deque<Tensor> inputs, results;
    float* shards[STEPS];
    for (int k = 0; k < STEPS; k++) {
        inputs.emplace_back(N * n, COMM_F32, of_rank((world.rank + k) % world.size));
        results.emplace_back(N * n, COMM_F32, zero);
        shards[k] = (float*)offload_alloc(bytes);
    }
    for (int k = 0; k < STEPS; k++) {
        device_copy(full.p, inputs[k].p, N * bytes);
        comm_wait(&world, comm_reduce_scatter_to_host(&world, shards[k], full.p, n, COMM_F32));
        device_zero(full.p, N * bytes);
    }
    device_synchronize();
    for (int k = 0; k < STEPS; k++)
        for (size_t i = 0; i < n; i++) {
            double got = (double)shards[k][i], sum = sum_of(&world, (size_t)world.rank * n)(i);
            require(got == sum, "step %d: element %zu is %g, not %g", k, i, got, sum);
            shards[k][i] = (float)whole(world.rank, i + (size_t)k);
        }
    for (int k = 0; k < STEPS; k++) {
        comm_wait(&world, comm_all_gather_from_host(&world, full.p, shards[k], n, COMM_F32));
        device_copy(results[k].p, full.p, N * bytes);
        device_zero(full.p, N * bytes);
    }
    for (int k = 0; k < STEPS; k++) {
        results[k].is("a step of shards on the host", [k](size_t i) { return whole((int)(i / n), i % n + (size_t)k); });
        offload_free(shards[k]);
    }
}

// Over NCCL the copy of a shard holds up no operation, and no operation holds up a copy. Only the emulator can say so: it runs
// what a wait needs, and nothing else.
TEST(copies_of_host_shards_hold_up_no_operation) {
#ifdef CUDA_EMULATOR
    const size_t n = 3001, N = (size_t)world.size;
    if (world.world->nccl == NULL || world.world->strict) return;
    Tensor full(N * n, COMM_F32, mine(&world)), x(n, COMM_F32, mine(&world));
    float *down = (float*)offload_alloc(n * sizeof(float)), *up = (float*)offload_alloc(n * sizeof(float));
    auto event = [](CommOp op, int mark) { return cuda_marks.events[world.slots[op % COMM_IN_FLIGHT].events[mark]]; };
    CommOp reduce = comm_reduce_scatter_to_host(&world, down, full.p, n, COMM_F32), next = comm_all_reduce(&world, x.p, n, COMM_F32);
    cuda_check(cudaEventSynchronize(event(next, EVENT_FINISHED)), "the all-reduce");
    require(isnan(down[0]), "an all-reduce waited until the shard before it was on the host");
    comm_wait(&world, reduce);
    comm_wait(&world, next);
    device_synchronize();
    require((double)down[n - 1] == sum_of(&world)((size_t)world.rank * n + n - 1), "the shard is wrong");
    for (size_t i = 0; i < n; i++) up[i] = (float)whole(world.rank, i);
    CommOp before = comm_all_reduce(&world, x.p, n, COMM_F32), gather = comm_all_gather_from_host(&world, full.p, up, n, COMM_F32);
    cuda_check(cudaEventSynchronize(((NcclLink*)world.link)->passed_on), "the copy");
    require(cudaEventQuery(event(before, EVENT_FINISHED)) == cudaErrorNotReady, "the copy of a shard waited for an all-reduce");
    comm_wait(&world, before);
    comm_wait(&world, gather);
    full.is("all-gather from the host", rows_of_ranks(n));
    offload_free(down);
    offload_free(up);
#endif
}

// Every rank sends two messages to every other, all at once: the messages of a pair must not overtake each other.
TEST(messages_between_all_pairs_do_not_overtake_each_other) {
    std::vector<CommOp> ops;
    std::deque<Tensor> sent, received;
    for (size_t n : { 20011, 7 })
        for (int q = 0; q < world.size; q++) {
            if (q == world.rank) continue;
            ops.push_back(comm_send(&world, sent.emplace_back(n, COMM_F32, mine(&world)).p, n, COMM_F32, q));
            ops.push_back(comm_recv(&world, received.emplace_back(n, COMM_F32, zero).p, n, COMM_F32, q));
        }
    for (; !ops.empty(); ops.pop_back()) comm_wait(&world, ops.back());
    for (size_t k = 0; k < received.size(); k++) {
        int q = (int)k % (world.size - 1);
        received[k].is("receive", of_rank(q + (q >= world.rank)));
    }
}

// Messages between two ranks arrive while a collective waits for a third rank.
TEST(messages_do_not_queue_behind_collectives) {
    if (world.size < 3) return;
    Tensor sum(4, COMM_F32, mine(&world)), number(1, COMM_F32, rough_of_rank(world.rank));
    CommOp all = 0;
    if (world.rank != 2) all = comm_all_reduce(&world, sum.p, 4, COMM_F32);
    for (int q = 0; q < 2; q++) { // from rank 0 to 1, from there to 2
        if (world.rank == q) comm_wait(&world, comm_send(&world, number.p, 1, COMM_F32, q + 1));
        if (world.rank == q + 1) comm_wait(&world, comm_recv(&world, number.p, 1, COMM_F32, q));
    }
    device_synchronize(); // rank 2 has it, and only now issues the collective
    if (world.rank == 2) all = comm_all_reduce(&world, sum.p, 4, COMM_F32);
    comm_wait(&world, all);
    sum.is("all-reduce", sum_of(&world));
    number.is("a message that was passed on", rough_of_rank(world.rank > 2 ? world.rank : 0));
}

// Each rank in turn comes late.
TEST(a_barrier_lets_nobody_go_before_all_have_come) {
    double *all = (double*)device_alloc((size_t)world.size * sizeof(double), MEMORY_ACTIVATIONS), came;
    for (int late = 0; late < world.size; late++) {
        if (world.rank == late) usleep(50000);
        double before = now_seconds(); // one clock for all processes of a machine
        comm_barrier(&world);
        double after = now_seconds();
        host_to_device(all + world.rank, &before, sizeof before);
        comm_wait(&world, comm_all_gather(&world, all, all + world.rank, 1, COMM_F64));
        for (int q = 0; q < world.size; q++) {
            device_to_host(&came, all + q, sizeof came); // and so all are here before the next turn
            require(came <= after, "rank %d came %g s after rank %d left", q, came - after, world.rank);
        }
    }
    device_free(all);
}

static CommEvent seen;
static void see(void* self, const CommEvent* e) { (void)self; seen = *e; }
TEST(times_are_in_order) {
    Tensor x(20011, COMM_F32, mine(&world));
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
TEST(operations_that_are_over_give_their_marks_back_within_a_step) {
    enum { MANY = 3 * COMM_WAITED_CAPACITY, n = 8 };
    Tensor x(n, COMM_F32, zero);
    comm_collect_times(&world);
    for (int k = 0; k < MANY; k++) {
        comm_wait(&world, comm_all_reduce(&world, x.p, n, COMM_F32));
        if (k % 20 == 19) poll_for_device();
    }
    require(world.world->num_waited <= COMM_WAITED_CAPACITY && world.world->waited_capacity == COMM_WAITED_CAPACITY,
            "%d operations that were over have kept their marks", world.world->num_waited);
    poll_for_device();
    comm_collect_times(&world);
#if USE_NCCL
    const NcclLink* l = (NcclLink*)world.link;
    long long unseen = world.world->nccl ? l->issued - l->done : 0;
    require(unseen == 0, "the ends of %lld operations were not seen before their marks were given back", unseen);
    Tensor full((size_t)world.size * n, COMM_F32, zero);
    char* shard = (char*)offload_alloc(n * sizeof(float));
    CommOp to_host = comm_reduce_scatter_to_host(&world, shard, full.p, n, COMM_F32); // it may end after the next one
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
TEST(times_cost_one_question_per_operation_and_no_wait_in_a_step) {
    enum { MANY = COMM_IN_FLIGHT + 50, n = 8 };
    Tensor x(n, COMM_F32, zero);
    comm_barrier(&world);
    comm_collect_times(&world);
    double before = comm_rank_exposed(&world);
    unsigned long long asked = emulator_calls("cudaEventElapsedTime"), waits = waits_for_device();
    for (int k = 0; k < MANY; k++) comm_wait(&world, comm_all_reduce(&world, x.p, n, COMM_F32));
    waits = waits_for_device() - waits;
    require(world.world->strict || waits == 0, "the host waited for the GPU %llu times in the middle of a step", waits);
    device_synchronize();
    waits = waits_for_device();
    comm_collect_times(&world);
    waits = waits_for_device() - waits;
    asked = emulator_calls("cudaEventElapsedTime") - asked;
    require(waits == 0, "the host waited for the GPU %llu times, and all was done", waits);
    unsigned long long expected = emulator_calls("cudaEventRecord") ? MANY : 0; // else nobody counts
    require(asked == expected, "CUDA was asked for %llu times of %d operations", asked, MANY);
    require(comm_rank_exposed(&world) > before, "nothing was exposed");
    int free_marks = cuda_marks.pool.num_free, all_marks = cuda_marks.pool.capacity;
    require(free_marks == all_marks, "%d of %d marks were not given back", all_marks - free_marks, all_marks);
    x.is("a sum of zeros", zero);
}

// With --nccl-windows whole and shard are windows, and the exchanged data lies anywhere in them.
TEST(memory_that_ranks_share_may_be_windows) {
    const size_t n = 5000, N = (size_t)world.size, at = 48;
    size_t allocations = device_allocations(), before = device_memory(MEMORY_COMMUNICATION);
    float *full = (float*)device_alloc((at + N * n) * sizeof(float), MEMORY_COMMUNICATION);
    float *shard = (float*)device_alloc((at + n) * sizeof(float), MEMORY_GRADIENTS);
    std::vector<char> own = bytes_of(n, COMM_F32, mine(&world));
    require(device_allocations() == allocations + 2 && device_memory(MEMORY_COMMUNICATION) == before + (at + N * n) * sizeof(float),
            "memory that NCCL lends is not accounted for as it was asked for");
    comm_share_memory(&world);
    const char* said = strrchr(comm_description(&world), ','); // scratch of other communicators may also be windows
    static const char* const of_kind[] = { " windows", " registered buffers", ", 0 windows" };
    bool enough = strstr(said, of_kind[windows_are]) && (windows_are == NONE || atoi(said + 1) >= 2);
    require(!world.world->options.windows || enough, "it says '%s', and not two of '%s'", said, of_kind[windows_are]);
    host_to_device(shard + at, own.data(), n * sizeof(float));
    comm_wait(&world, comm_all_gather(&world, full + at, shard + at, n, COMM_F32));
    comm_wait(&world, comm_all_reduce(&world, full + at, N * n, COMM_F32));
    comm_wait(&world, comm_reduce_scatter(&world, shard + at, full + at, n, COMM_F32));
    std::vector<float> result(n);
    device_to_host(result.data(), shard + at, n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        require((double)result[i] == (double)(N * N) * whole(world.rank, i), "element %zu is %g", i, (double)result[i]);
    device_free(full);
    device_free(shard);
}

#if USE_NCCL
// Where kernels of layers fill the GPU, a collective's gets the next processors that are free: other ranks wait for it.
TEST(the_streams_of_nccl_have_the_highest_priority) {
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

int main(int argc, char** argv) {
    RankInfo ranks = ranks_find();
    CommOptions o;
    OptionTable table = options_table("test_comm_cuda", "collectives between GPUs against sums made on the host");
    options_comm(&table, &o);
    option_flag(&table, "deterministic", &o.ordered, "sums in rank order");
    const char* path = "";
    windows_are = WINDOWS;
    option_choice(&table, "windows-are", &windows_are, "windows|local|none", "what NCCL makes of windows here");
    option_text(&table, "journal", &path, "FILE", "writes there what has passed");
    options_parse(&table, argc, argv);
    if (path[0]) require((journal = fopen(path, "w")) != NULL, "%s cannot be written", path);
    device_init(ranks.local_rank, ranks.local_size);
    comm_init(&world, &o, ranks, &control);
    size_t taken = device_memory(MEMORY_COMMUNICATION);
    require(taken == comm_world_bytes(&world), "the world takes %zu bytes", taken);
    printf("# %s\n", comm_description(&world));
    comm_connect(&world);
    for (int k = 0; k < num_tests; k++) {
        comm_step(&world, k + 1);
        if (journal) fprintf(journal, "%s\n", tests[k].name);
        tests[k].run();
        comm_barrier(&world); // a rank that gets here has passed
        printf("ok %d - %s, %d ranks\n", k + 1, tests[k].name, world.size);
        fflush(stdout);
    }
    printf("1..%d\n", num_tests);
    comm_free(&world);
    device_shutdown();
    if (journal) fclose(journal);
    return 0;
}
