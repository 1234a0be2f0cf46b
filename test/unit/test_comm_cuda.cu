/*
test_comm_cuda.cu - collectives between GPUs, or ranks that share one, against sums made on the host; test_comm.c says more
about each. test/kernels/test_emulated.py starts it on several ranks, and dev/gpu_check.sh on a GPU. Every rank checks its results; the
first check that fails ends them all.

    test_comm_cuda [--comm nccl|mpi] [--deterministic | --allreduce ring]    every claim below, as TAP from rank 0
    --nccl-windows --windows-are windows|local|none    what NCCL makes of them here; default: windows
    --journal FILE    what has passed, written there without a flush
*/
#define COMM_PIECE (1 << 14) // several pieces without much data
#define NCCL_PIECE (1 << 16)
#define COMM_IN_FLIGHT 64    // so that few operations are many
#define COMM_WAITED_ROOM 64
#include "../../llmc/comm/comm.h"
#include "../../llmc/comm/sums.h"

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
static const CommType types[] = { COMM_F32, COMM_BF16, COMM_F16, COMM_F64, COMM_BYTE };
enum { NUM_TYPES = sizeof types / sizeof types[0], NUM_SUMMED = 4 };

// ---- numbers: those of rank q, and their sums ----
static void element_set(char* p, size_t i, CommType t, double x) {
    float f = (float)x;
    if (t == COMM_F64) memcpy(p + 8 * i, &x, 8);
    else if (t == COMM_BYTE) p[i] = (char)(int)x;
    else convert_dtype(p + i * comm_type_size(t), (DType)t, &f, DTYPE_F32, 1);
}
static double whole(int q, size_t i) { return (double)((i * 7 + (size_t)q * 5 + i / 16) % 16); } // sums are exact in every type
static double whole_sum(int N, size_t i) {
    double sum = 0;
    for (int q = 0; q < N; q++) sum += whole(q, i);
    return sum;
}
// Numbers whose sum depends on the order: signs alternate, sizes differ by a factor of 1000, all bits are in use.
static double rough(int q, size_t i) {
    uint32_t h = (uint32_t)(i * 2654435761u) ^ (uint32_t)(q + 1) * 40503u * 65537u;
    h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
    double x = (double)h / 4294967296.0 + 0.01;
    return (h & 1 ? x : -x) * (h & 6 ? 1 : 1000);
}
typedef double (*Numbers)(int q, size_t i);

// ---- tensors: elements on the device, and the spare bytes after them ----
static char* host_numbers(size_t n, CommType t, Numbers numbers, int q) { // (n) and SPARE bytes; the caller frees it
    size_t bytes = n * comm_type_size(t);
    char* p = (char*)xcalloc(bytes + SPARE, 1);
    for (size_t i = 0; numbers && i < n; i++) element_set(p, i, t, numbers(q, i));
    memset(p + bytes, 0x5a, SPARE);
    return p;
}
static char* tensor(size_t n, CommType t, Numbers numbers, int q) { // NULL: zeros
    size_t bytes = n * comm_type_size(t) + SPARE;
    char *host = host_numbers(n, t, numbers, q), *p = (char*)device_alloc(bytes, MEMORY_ACTIVATIONS);
    host_to_device(p, host, bytes);
    device_synchronize(); // host is read
    free(host);
    return p;
}
template <typename... T> static void release(T*... tensors) { (device_free(tensors), ...); }
// The tensor p (n) and the bytes after it must equal `expected`, which is freed.
static void is(const char* p, char* expected, size_t n, CommType t, const char* what) {
    size_t bytes = n * comm_type_size(t) + SPARE;
    char* host = (char*)xcalloc(bytes, 1);
    device_to_host(host, p, bytes);
    for (size_t i = 0; i < bytes; i++)
        require(host[i] == expected[i], "%s, %zu %s: byte %zu is %d, not %d", what, n, comm_type_name(t), i, host[i], expected[i]);
    free(host);
    free(expected);
}
static char* copy_of(size_t n, CommType t, double (*value)(const Comm* c, size_t i, size_t n), const Comm* c) {
    char* p = host_numbers(n, t, NULL, 0);
    for (size_t i = 0; i < n; i++) element_set(p, i, t, value(c, i, n));
    return p;
}

// ---- each collective ----
static double of_sum(const Comm* c, size_t i, size_t n) { (void)n; return whole_sum(c->size, i); }
static double of_my_part(const Comm* c, size_t i, size_t n) { return whole_sum(c->size, (size_t)c->rank * n + i); }
static double of_everyone(const Comm* c, size_t i, size_t n) {
    size_t part = n / (size_t)c->size;
    return whole((int)(i / part), i % part);
}
static double of_last(const Comm* c, size_t i, size_t n) { (void)n; return whole(c->size - 1, i); }

static void all_reduce_on(Comm* c, size_t n, CommType t) {
    char* x = tensor(n, t, whole, c->rank);
    comm_wait(c, comm_all_reduce(c, x, n, t));
    is(x, copy_of(n, t, of_sum, c), n, t, "all-reduce");
    device_free(x);
}
static void reduce_scatter_on(Comm* c, size_t n, CommType t, bool in_place) {
    size_t N = (size_t)c->size, at = (size_t)c->rank * n * comm_type_size(t);
    char* full = tensor(N * n, t, whole, c->rank);
    char* shard = in_place ? full + at : tensor(n, t, NULL, 0);
    comm_wait(c, comm_reduce_scatter(c, shard, full, n, t));
    char* expected = copy_of(n, t, of_my_part, c);
    if (in_place) { // the rest of full is what it was
        char* all = host_numbers(N * n, t, whole, c->rank);
        memcpy(all + at, expected, n * comm_type_size(t));
        is(full, all, N * n, t, "reduce-scatter in place");
        free(expected);
    } else {
        is(shard, expected, n, t, "reduce-scatter");
        is(full, host_numbers(N * n, t, whole, c->rank), N * n, t, "reduce-scatter's input");
        device_free(shard);
    }
    device_free(full);
}
static void all_gather_on(Comm* c, size_t n, CommType t, bool in_place) {
    size_t N = (size_t)c->size, bytes = n * comm_type_size(t);
    char *full = tensor(N * n, t, NULL, 0), *own = tensor(n, t, whole, c->rank);
    char* shard = in_place ? full + (size_t)c->rank * bytes : own;
    if (in_place) device_copy(shard, own, bytes);
    comm_wait(c, comm_all_gather(c, full, shard, n, t));
    is(full, copy_of(N * n, t, of_everyone, c), N * n, t, "all-gather");
    release(own, full);
}
static double of_rows(const Comm* c, size_t i, size_t n) { // row q is the row of rank q that has this rank's number
    size_t part = n / (size_t)c->size;
    return whole((int)(i / part), (size_t)c->rank * part + i % part);
}
static void all_to_all_on(Comm* c, size_t n, CommType t) {
    size_t all = (size_t)c->size * n;
    unsigned long long posted = c->stats[COMM_ALL_TO_ALL].posted;
    char *in = tensor(all, t, whole, c->rank), *out = tensor(all, t, NULL, 0);
    comm_wait(c, comm_all_to_all(c, out, in, n, t));
    is(out, copy_of(all, t, of_rows, c), all, t, "all-to-all");
    is(in, host_numbers(all, t, whole, c->rank), all, t, "all-to-all's input");
    posted = c->stats[COMM_ALL_TO_ALL].posted - posted;
    require(posted == (all - n) * comm_type_size(t), "an all-to-all of %zu elements sent %llu bytes", n, posted);
    release(in, out);
}
// Shards in host memory: the host sees each rank's part of the sum and doubles it; then all ranks gather it.
static void host_shards_on(Comm* c, size_t n, CommType t) {
    size_t N = (size_t)c->size, at = (size_t)c->rank * n, bytes = n * comm_type_size(t);
    char *full = tensor(N * n, t, whole, c->rank), *shard = (char*)offload_alloc(bytes + SPARE);
    char *expected = copy_of(n, t, of_my_part, c), *everyone = host_numbers(N * n, t, NULL, 0);
    require(device_memory(MEMORY_OFFLOADED) == bytes + SPARE, "%zu bytes are offloaded", device_memory(MEMORY_OFFLOADED));
    memset(shard + bytes, 0x5a, SPARE);
    comm_wait(c, comm_reduce_scatter_to_host(c, shard, full, n, t));
    device_synchronize();
    require(memcmp(shard, expected, bytes + SPARE) == 0, "reduce-scatter to the host, %zu %s", n, comm_type_name(t));
    for (size_t i = 0; i < n; i++) element_set(shard, i, t, 2 * whole_sum(c->size, at + i));
    for (size_t i = 0; i < N * n; i++) element_set(everyone, i, t, 2 * whole_sum(c->size, i));
    comm_wait(c, comm_all_gather_from_host(c, full, shard, n, t));
    is(full, everyone, N * n, t, "all-gather from the host");
    offload_free(shard);
    device_free(full);
    free(expected);
}
static void broadcast_on(Comm* c, size_t n, CommType t) {
    char* x = tensor(n, t, whole, c->rank);
    comm_wait(c, comm_broadcast(c, x, n, t, c->size - 1));
    is(x, copy_of(n, t, of_last, c), n, t, "broadcast");
    device_free(x);
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
    char *x = tensor(20011, COMM_F32, whole, half.rank), *y = tensor(20011, COMM_F32, whole, world.rank);
    CommOp a = comm_all_reduce(&half, x, 20011, COMM_F32), b = comm_all_reduce(&world, y, 20011, COMM_F32);
    comm_wait(&world, b);
    comm_wait(&half, a);
    is(x, copy_of(20011, COMM_F32, of_sum, &half), 20011, COMM_F32, "half");
    is(y, copy_of(20011, COMM_F32, of_sum, &world), 20011, COMM_F32, "world");
    comm_split(&pair, &half, "pair", world.rank / 4); // of a part
    all_reduce_on(&pair, 1001, COMM_F32);
    for (int q = 0; q < pair.size; q++)
        require(pair.world_rank[q] == world.rank / 4 * 4 + 2 * q + odd, "rank %d of the pair is %d", q, pair.world_rank[q]);
    comm_free(&pair);
    comm_free(&half);
    release(x, y);
}

// In ordered mode the bits are those that the CPU adds up.
TEST(sums_in_rank_order_have_the_bits_of_the_cpu) {
    const size_t n = 10007, N = (size_t)world.size;
    for (int k = 0; k < NUM_SUMMED && world.world->options.ordered; k++) {
        CommType t = types[k];
        size_t bytes = n * comm_type_size(t), at = (size_t)world.rank * bytes;
        char *x = tensor(N * n, t, rough, world.rank), *y = tensor(N * n, t, rough, world.rank);
        char* sum = host_numbers(N * n, t, rough, 0);
        const void** rows = (const void**)xcalloc(N, sizeof(void*));
        for (size_t q = 0; q < N; q++) rows[q] = host_numbers(N * n, t, rough, (int)q);
        comm_add_rows(sum, rows, world.size, N * n, t);
        char* scattered = host_numbers(N * n, t, rough, world.rank);
        memcpy(scattered + at, sum + at, bytes);
        comm_wait(&world, comm_all_reduce(&world, x, N * n, t));
        comm_wait(&world, comm_reduce_scatter(&world, y + at, y, n, t));
        is(x, sum, N * n, t, "all-reduce in rank order");
        is(y, scattered, N * n, t, "reduce-scatter in rank order");
        for (size_t q = 0; q < N; q++) free((void*)rows[q]);
        free(rows);
        release(x, y);
    }
}

// Compute, communicate, compute, without the host ever waiting for the GPU: each step's input is computed just before, its output
// is used just after, and its buffer is overwritten at once.
TEST(communication_waits_for_compute_and_compute_for_communication) {
    enum { STEPS = 12, n = 3001 };
    char* x = tensor(n, COMM_F32, NULL, 0);
    char *inputs[STEPS], *results[STEPS];
    for (int k = 0; k < STEPS; k++) {
        inputs[k] = tensor(n, COMM_F32, whole, (world.rank + k) % world.size); // every step adds up the same in another order
        results[k] = tensor(n, COMM_F32, NULL, 0);
    }
    for (int k = 0; k < STEPS; k++) {
        device_copy(x, inputs[k], n * sizeof(float));
        CommOp op = comm_all_reduce(&world, x, n, COMM_F32);
        device_zero(inputs[k], n * sizeof(float)); // it has been read
        comm_wait(&world, op);
        device_copy(results[k], x, n * sizeof(float));
        device_zero(x, n * sizeof(float));
    }
    for (int k = 0; k < STEPS; k++) {
        is(results[k], copy_of(n, COMM_F32, of_sum, &world), n, COMM_F32, "a step");
        release(results[k], inputs[k]);
    }
    device_free(x);
}

// The same with shards on the host: data to reduce is computed just before and overwritten just after, several operations are in
// flight at once, and the host waits once before it reads them all; gathered data is used just after and overwritten at once.
TEST(so_it_does_where_shards_are_on_the_host) {
    enum { STEPS = 6, n = 3001 };
    size_t N = (size_t)world.size, bytes = n * sizeof(float);
    char* full = tensor(N * n, COMM_F32, NULL, 0);
    char *inputs[STEPS], *shards[STEPS], *results[STEPS];
    for (int k = 0; k < STEPS; k++) {
        inputs[k] = tensor(N * n, COMM_F32, whole, (world.rank + k) % world.size);
        results[k] = tensor(N * n, COMM_F32, NULL, 0);
        shards[k] = (char*)offload_alloc(bytes);
    }
    for (int k = 0; k < STEPS; k++) {
        device_copy(full, inputs[k], N * bytes);
        comm_wait(&world, comm_reduce_scatter_to_host(&world, shards[k], full, n, COMM_F32));
        device_zero(full, N * bytes);
    }
    device_synchronize();
    for (int k = 0; k < STEPS; k++)
        for (size_t i = 0; i < n; i++) {
            float* x = (float*)shards[k] + i;
            double sum = whole_sum(world.size, (size_t)world.rank * n + i);
            require((double)*x == sum, "step %d: element %zu is %g, not %g", k, i, (double)*x, sum);
            *x = (float)whole(world.rank, i + (size_t)k);
        }
    for (int k = 0; k < STEPS; k++) {
        comm_wait(&world, comm_all_gather_from_host(&world, full, shards[k], n, COMM_F32));
        device_copy(results[k], full, N * bytes);
        device_zero(full, N * bytes);
    }
    for (int k = 0; k < STEPS; k++) {
        char* expected = host_numbers(N * n, COMM_F32, NULL, 0);
        for (size_t i = 0; i < N * n; i++) element_set(expected, i, COMM_F32, whole((int)(i / n), i % n + (size_t)k));
        is(results[k], expected, N * n, COMM_F32, "a step of shards on the host");
        release(results[k], inputs[k]);
        offload_free(shards[k]);
    }
    device_free(full);
}

// Over NCCL the copy of a shard holds up no operation, and no operation holds up a copy. Only the emulator can say so: it runs
// what a wait needs, and nothing else.
TEST(copies_of_host_shards_hold_up_no_operation) {
#ifdef CUDA_EMULATOR
    const size_t n = 3001, N = (size_t)world.size;
    if (world.world->nccl == NULL || world.world->strict) return;
    char *full = tensor(N * n, COMM_F32, whole, world.rank), *x = tensor(n, COMM_F32, whole, world.rank);
    float *down = (float*)offload_alloc(n * sizeof(float)), *up = (float*)offload_alloc(n * sizeof(float));
    auto event = [](CommOp op, int mark) { return cuda_marks.events[world.slots[op % COMM_IN_FLIGHT].marks[mark]]; };
    CommOp reduce = comm_reduce_scatter_to_host(&world, down, full, n, COMM_F32), next = comm_all_reduce(&world, x, n, COMM_F32);
    cuda_check(cudaEventSynchronize(event(next, MARK_FINISHED)), "the all-reduce");
    require(isnan(down[0]), "an all-reduce waited until the shard before it was on the host");
    comm_wait(&world, reduce);
    comm_wait(&world, next);
    device_synchronize();
    require((double)down[n - 1] == whole_sum(world.size, (size_t)world.rank * n + n - 1), "the shard is wrong");
    for (size_t i = 0; i < n; i++) up[i] = (float)whole(world.rank, i);
    CommOp before = comm_all_reduce(&world, x, n, COMM_F32), gather = comm_all_gather_from_host(&world, full, up, n, COMM_F32);
    cuda_check(cudaEventSynchronize(((NcclLink*)world.link)->passed_on), "the copy");
    require(cudaEventQuery(event(before, MARK_FINISHED)) == cudaErrorNotReady, "the copy of a shard waited for an all-reduce");
    comm_wait(&world, before);
    comm_wait(&world, gather);
    is(full, copy_of(N * n, COMM_F32, of_everyone, &world), N * n, COMM_F32, "all-gather from the host");
    release(full, x);
    offload_free(down);
    offload_free(up);
#endif
}

// Every rank sends two messages to every other, all at once: the messages of a pair must not overtake each other.
TEST(messages_between_all_pairs_do_not_overtake_each_other) {
    int N = world.size, count = 0;
    const size_t lengths[] = { 20011, 7 };
    CommOp* ops = (CommOp*)xcalloc((size_t)(4 * N), sizeof(CommOp));
    char** x = (char**)xcalloc((size_t)(4 * N), sizeof(char*));
    for (int k = 0; k < 2 * N; k++) {
        if (k % N == world.rank) continue;
        size_t n = lengths[k / N];
        x[2 * k] = tensor(n, COMM_F32, whole, world.rank);
        x[2 * k + 1] = tensor(n, COMM_F32, NULL, 0);
        ops[count++] = comm_send(&world, x[2 * k], n, COMM_F32, k % N);
        ops[count++] = comm_recv(&world, x[2 * k + 1], n, COMM_F32, k % N);
    }
    while (count > 0) comm_wait(&world, ops[--count]);
    for (int k = 0; k < 2 * N; k++) {
        if (k % N == world.rank) continue;
        is(x[2 * k + 1], host_numbers(lengths[k / N], COMM_F32, whole, k % N), lengths[k / N], COMM_F32, "receive");
        release(x[2 * k], x[2 * k + 1]);
    }
    free(ops);
    free(x);
}

// Messages between two ranks arrive while a collective waits for a third rank.
TEST(messages_do_not_queue_behind_collectives) {
    if (world.size < 3) return;
    char *sum = tensor(4, COMM_F32, whole, world.rank), *number = tensor(1, COMM_F32, rough, world.rank);
    CommOp all = 0;
    if (world.rank != 2) all = comm_all_reduce(&world, sum, 4, COMM_F32);
    if (world.rank == 0) comm_wait(&world, comm_send(&world, number, 1, COMM_F32, 1));
    if (world.rank == 1) comm_wait(&world, comm_recv(&world, number, 1, COMM_F32, 0));
    if (world.rank == 1) comm_wait(&world, comm_send(&world, number, 1, COMM_F32, 2));
    if (world.rank == 2) comm_wait(&world, comm_recv(&world, number, 1, COMM_F32, 1));
    device_synchronize(); // rank 2 has it, and only now issues the collective
    if (world.rank == 2) all = comm_all_reduce(&world, sum, 4, COMM_F32);
    comm_wait(&world, all);
    is(sum, copy_of(4, COMM_F32, of_sum, &world), 4, COMM_F32, "all-reduce");
    is(number, host_numbers(1, COMM_F32, rough, world.rank > 2 ? world.rank : 0), 1, COMM_F32, "a message that was passed on");
    release(sum, number);
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
    char* x = tensor(20011, COMM_F32, whole, world.rank);
    CommStats before = world.stats[COMM_ALL_REDUCE];
    comm_observe(&world, see, NULL);
    comm_wait(&world, comm_all_reduce(&world, x, 20011, COMM_F32));
    comm_observe(&world, NULL, NULL);
    const CommStats* after = &world.stats[COMM_ALL_REDUCE];
    require(seen.n == 20011 && seen.kind == COMM_ALL_REDUCE, "another operation was seen");
    require(seen.issued > 0 && seen.issued <= seen.wait_begun, "it was waited for before it was issued");
    require(seen.wait_begun <= seen.wait_ended, "waiting: times in another order");
    require(seen.started > 0 && seen.started <= seen.finished, "moving: times in another order");
    require(world.world->nccl == NULL || seen.issued <= seen.started, "it began before it was issued"); // of one clock
    require(after->exposed > before.exposed && after->busy >= before.busy, "no time went by");
    device_free(x);
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
    int mark = device_mark();
    while (!device_mark_passed(mark)) {}
    device_mark_free(mark);
}
TEST(operations_that_are_over_give_their_marks_back_within_a_step) {
    enum { MANY = 3 * COMM_WAITED_ROOM, n = 8 };
    char* x = tensor(n, COMM_F32, NULL, 0);
    comm_settle(&world);
    for (int k = 0; k < MANY; k++) {
        comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
        if (k % 20 == 19) poll_for_device();
    }
    require(world.world->num_waited <= COMM_WAITED_ROOM && world.world->waited_room == COMM_WAITED_ROOM,
            "%d operations that were over have kept their marks", world.world->num_waited);
    poll_for_device();
    comm_settle(&world);
#if USE_NCCL
    const NcclLink* l = (NcclLink*)world.link;
    long long unseen = world.world->nccl ? l->issued - l->done : 0;
    require(unseen == 0, "the ends of %lld operations were not seen before their marks were given back", unseen);
    char *full = tensor((size_t)world.size * n, COMM_F32, NULL, 0), *shard = (char*)offload_alloc(n * sizeof(float));
    CommOp to_host = comm_reduce_scatter_to_host(&world, shard, full, n, COMM_F32); // it may end after the next one
    comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
    poll_for_device();
    comm_settle(&world);
    require(world.world->nccl == NULL || l->ops[(l->issued - 1) % COMM_IN_FLIGHT].over, "nor that of one after a copy");
    comm_wait(&world, to_host);
    device_synchronize();
    device_free(full);
    offload_free(shard);
#endif
    device_free(x);
}

// Over NCCL the host gets further ahead of the GPU than there is room for, and must not wait until the GPU has caught up. Times
// are one question for each operation, and no wait once the host has waited for the last one.
TEST(times_cost_one_question_per_operation_and_no_wait_in_a_step) {
    enum { MANY = COMM_IN_FLIGHT + 50, n = 8 };
    char* x = tensor(n, COMM_F32, NULL, 0);
    comm_barrier(&world);
    comm_settle(&world);
    double before = comm_rank_exposed(&world);
    unsigned long long asked = emulator_calls("cudaEventElapsedTime"), waits = waits_for_device();
    for (int k = 0; k < MANY; k++) comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
    waits = waits_for_device() - waits;
    require(world.world->strict || waits == 0, "the host waited for the GPU %llu times in the middle of a step", waits);
    device_synchronize();
    waits = waits_for_device();
    comm_settle(&world);
    waits = waits_for_device() - waits;
    asked = emulator_calls("cudaEventElapsedTime") - asked;
    require(waits == 0, "the host waited for the GPU %llu times, and all was done", waits);
    unsigned long long expected = emulator_calls("cudaEventRecord") ? MANY : 0; // else nobody counts
    require(asked == expected, "CUDA was asked for %llu times of %d operations", asked, MANY);
    require(comm_rank_exposed(&world) > before, "nothing was exposed");
    int free_marks = cuda_marks.pool.num_free, all_marks = cuda_marks.pool.capacity;
    require(free_marks == all_marks, "%d of %d marks were not given back", all_marks - free_marks, all_marks);
    is(x, host_numbers(n, COMM_F32, NULL, 0), n, COMM_F32, "a sum of zeros");
    device_free(x);
}

// With --nccl-windows whole and shard are windows, and the exchanged data lies anywhere in them.
TEST(memory_that_ranks_share_may_be_windows) {
    const size_t n = 5000, N = (size_t)world.size, at = 48;
    size_t allocations = device_allocations(), before = device_memory(MEMORY_COMMUNICATION);
    float *full = (float*)device_alloc((at + N * n) * sizeof(float), MEMORY_COMMUNICATION);
    float *shard = (float*)device_alloc((at + n) * sizeof(float), MEMORY_GRADIENTS);
    char* own = host_numbers(n, COMM_F32, whole, world.rank);
    require(device_allocations() == allocations + 2 && device_memory(MEMORY_COMMUNICATION) == before + (at + N * n) * sizeof(float),
            "memory that NCCL lends is not accounted for as it was asked for");
    comm_share_memory(&world);
    const char* said = strrchr(comm_description(&world), ','); // scratch of other communicators may also be windows
    static const char* const of_kind[] = { " windows", " registered buffers", ", 0 windows" };
    bool enough = strstr(said, of_kind[windows_are]) && (windows_are == NONE || atoi(said + 1) >= 2);
    require(!world.world->options.windows || enough, "it says '%s', and not two of '%s'", said, of_kind[windows_are]);
    host_to_device(shard + at, own, n * sizeof(float));
    comm_wait(&world, comm_all_gather(&world, full + at, shard + at, n, COMM_F32));
    comm_wait(&world, comm_all_reduce(&world, full + at, N * n, COMM_F32));
    comm_wait(&world, comm_reduce_scatter(&world, shard + at, full + at, n, COMM_F32));
    float* result = (float*)xcalloc(n, sizeof(float));
    device_to_host(result, shard + at, n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        require((double)result[i] == (double)(N * N) * whole(world.rank, i), "element %zu is %g", i, (double)result[i]);
    free(own);
    free(result);
    release(full, shard);
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
