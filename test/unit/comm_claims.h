/*
comm_claims.h - claims about communication on CPUs (test_comm.c) and GPUs (test_comm_cuda.cu), in addition to the
results of collectives, which comm_bench checks: overlapping uneven parts, messages, the order of waits, communicators,
barriers. The programs run on one rank or several. Every rank checks its own results, and the first check that fails ends
all ranks.

    test_comm [PATTERN...]   the claims whose names match one of the patterns, or all, as TAP from rank 0

Before including it, define MANY (the elements of a long buffer), and COMM_PIECE unless the default will do.
*/
#ifndef TEST_COMM_CLAIMS_H
#define TEST_COMM_CLAIMS_H
#include "../../llmc/comm/comm.h"
#include "claims.h"

static Comm world;
static Control control;
enum { SPARE = 16, MOST_RANKS = 8 }; // bytes after every buffer that no operation may touch

// Return element i of a rank's numbers: zeros, or small integers, whose sum over 8 ranks is exact in any order.
static double zero(int rank, size_t i) { return 0.0 * rank * (double)i; }
static double whole(int rank, size_t i) { return (double)(int)((i * 7 + (size_t)rank * 5 + i / 16) % 16); }
static double whole_sum(int ranks, size_t i) {
    double sum = 0;
    for (int q = 0; q < ranks; q++) sum += whole(q, i);
    return sum;
}

// ---- buffers: n floats from offload_alloc, or on the device, where SPARE bytes of 0x5a follow them ----
typedef struct { float* p; size_t n; } Buffer;
typedef double (*Numbers)(int rank, size_t i); // element i of a rank, or of the sum over ranks

static Buffer part_of(Buffer b, size_t first, size_t n) {
    Buffer part = { b.p + first, n };
    return part;
}
static void buffer_write(Buffer b, const void* from, size_t bytes) {
    if (is_offloaded(b.p)) memcpy(b.p, from, bytes);
    else host_to_device(b.p, from, bytes);
    device_synchronize(); // the copy reads `from`
}
static char* buffer_bytes(Buffer b, size_t bytes) { // the caller frees them
    char* host = (char*)xcalloc(bytes, 1);
    if (is_offloaded(b.p)) memcpy(host, b.p, bytes);
    else device_to_host(host, b.p, bytes);
    return host;
}
// Sets element i to numbers(rank, first + i).
static void buffer_set(Buffer b, Numbers numbers, int rank, size_t first) {
    float* host = (float*)xcalloc(b.n, sizeof(float));
    for (size_t i = 0; i < b.n; i++) host[i] = (float)numbers(rank, first + i);
    buffer_write(b, host, b.n * sizeof(float));
    free(host);
}
static Buffer buffer(size_t n, Numbers numbers, int rank, size_t first) {
    Buffer b = { (float*)device_alloc(n * sizeof(float) + SPARE, MEMORY_ACTIVATIONS), n };
    char spare[SPARE];
    memset(spare, 0x5a, SPARE);
    buffer_set(b, numbers, rank, first);
    buffer_write(part_of(b, n, 0), spare, SPARE);
    return b;
}
static void check_numbers(Buffer b, Numbers numbers, int rank, size_t first, const char* what) {
    float* host = (float*)(void*)buffer_bytes(b, b.n * sizeof(float));
    for (size_t i = 0; i < b.n; i++) {
        double x = (double)host[i], want = numbers(rank, first + i);
        require(x == want, "%s: element %zu of %zu is %.9g, not %.9g", what, i, b.n, x, want);
    }
    free(host);
}
// Checks a whole buffer, and frees it.
static void release(Buffer b, Numbers numbers, int rank, size_t first, const char* what) {
    check_numbers(b, numbers, rank, first, what);
    char* spare = buffer_bytes(part_of(b, b.n, 0), SPARE);
    for (int k = 0; k < SPARE; k++)
        require(spare[k] == 0x5a, "%s: byte %d behind %zu floats was written", what, k, b.n);
    free(spare);
    device_free(b.p);
}

// ---- uneven parts ----
static char byte_of(int rank, size_t i) { return (char)(i % 251 + 31 * (size_t)rank); }
// Rank p sends rank q none, half or all of n elements; most pairs send each other different numbers.
static size_t part_size(int p, int q, size_t n) { return (size_t)((2 * p + q + 1) % 3) * n / 2; }
// The parts that a rank sends overlap. Those that it receives follow in the same memory, with gaps between them.
static void exchange_uneven_parts(size_t n, CommType t) {
    const size_t N = (size_t)world.size, row = n * comm_type_size(t), bytes = 2 * N * row;
    CommPart from[MOST_RANKS], to[MOST_RANKS];
    char *memory = (char*)device_alloc(bytes, MEMORY_ACTIVATIONS), *host = (char*)xcalloc(bytes, 1);
    for (int q = 0; q < world.size; q++) {
        CommPart sent = { part_size(world.rank, q, n), (size_t)q * (n / 2) };
        CommPart arrives = { part_size(q, world.rank, n), (N + (size_t)q) * n };
        to[q] = sent;
        from[q] = arrives;
    }
    for (size_t i = 0; i < bytes; i++) host[i] = byte_of(world.rank, i);
    host_to_device(memory, host, bytes);
    comm_wait(&world, comm_all_to_all_v(&world, memory, from, memory, to, t));
    device_to_host(host, memory, bytes);
    for (size_t i = 0; i < bytes; i++) {
        size_t q = i / row, at = i % row;
        bool arrived = q >= N && at < from[q - N].n * comm_type_size(t);
        char want = arrived ? byte_of((int)(q - N), (size_t)to[world.rank].at * comm_type_size(t) + at) : byte_of(world.rank, i);
        require(host[i] == want, "parts of %zu %s: byte %zu of row %zu is %d, not %d", n, comm_type_name(t), at, q, host[i], want);
    }
    free(host);
    device_free(memory);
}
CLAIM(uneven_parts_of_every_type_arrive_and_touch_nothing_else) {
    for (int t = 0; t <= COMM_BYTE; t++) {
        const size_t lengths[] = { 3 * MANY / 2 / comm_type_size((CommType)t), 3, 1, 0 };
        for (int k = 0; k < 4; k++) exchange_uneven_parts(lengths[k], (CommType)t);
    }
}

// ---- messages, and the order of waits ----
static bool every_pair(int a, int b, int N) { return a < N && b < N; }
// Every rank sends every other rank two messages at once. The messages of a pair must not overtake each other.
static void exchange_with_all(void) {
    const size_t lengths[] = { 2 * MANY, 7 };
    Buffer in[2][MOST_RANKS], out[2][MOST_RANKS];
    CommOp ops[4 * MOST_RANKS];
    int count = 0;
    for (int q = 0; q < world.size; q++) for (int m = 0; m < 2 && q != world.rank; m++) {
        out[m][q] = buffer(lengths[m], whole, world.rank, (size_t)(q * 100 + m));
        in[m][q] = buffer(lengths[m], zero, 0, 0);
        ops[count++] = comm_send(&world, out[m][q].p, lengths[m], COMM_F32, q);
        ops[count++] = comm_recv(&world, in[m][q].p, lengths[m], COMM_F32, q);
    }
    while (count > 0) comm_wait(&world, ops[--count]);
    for (int q = 0; q < world.size; q++) for (int m = 0; m < 2 && q != world.rank; m++) {
        release(in[m][q], whole, q, (size_t)(world.rank * 100 + m), "receive");
        device_free(out[m][q].p);
    }
}
CLAIM(all_ranks_send_to_all_others_at_once) { exchange_with_all(); }

// All ranks but the last issue a collective and continue. The last rank issues it once a message has passed all ranks.
CLAIM(nothing_waits_for_a_collective_but_its_own_wait) {
    const int r = world.rank, last = world.size - 1;
    Buffer sum = buffer(4, whole, r, 0), number = buffer(1, whole, r, 0);
    CommOp all = 0;
    if (r < last) all = comm_all_reduce(&world, sum.p, 4, COMM_F32);
    if (r > 0) comm_wait(&world, comm_recv(&world, number.p, 1, COMM_F32, r - 1));
    if (r < last) comm_wait(&world, comm_send(&world, number.p, 1, COMM_F32, r + 1));
    device_synchronize(); // on the last rank, the message has arrived
    if (r == last) all = comm_all_reduce(&world, sum.p, 4, COMM_F32);
    comm_wait(&world, all);
    release(sum, whole_sum, world.size, 0, "all-reduce");
    release(number, whole, 0, 0, "a message that was passed on");
}

// ---- communicators ----
// Uses a communicator and the world at the same time.
static void all_reduce_on_both(Comm* part) {
    Buffer x = buffer(MANY, whole, part->rank, 0), y = buffer(MANY, whole, world.rank, 0);
    CommOp a = comm_all_reduce(part, x.p, MANY, COMM_F32), b = comm_all_reduce(&world, y.p, MANY, COMM_F32);
    comm_wait(&world, b);
    comm_wait(part, a);
    release(x, whole_sum, part->size, 0, part->name);
    release(y, whole_sum, world.size, 0, "world");
}
CLAIM(parts_of_the_world_are_communicators_of_their_own) {
    Comm half, pairs;
    int odd = world.rank % 2;
    size_t taken = device_memory(MEMORY_COMMUNICATION);
    comm_split(&half, &world, "half", odd);
    taken = device_memory(MEMORY_COMMUNICATION) - taken;
    require(taken == comm_split_bytes(&world, half.size), "a split takes %zu bytes", taken);
    require(half.size == (world.size + 1 - odd) / 2 && half.rank == world.rank / 2, "rank %d of %d", half.rank, half.size);
    for (int q = 0; q < half.size; q++) require(half.world_rank[q] == 2 * q + odd, "rank %d is %d", q, half.world_rank[q]);
    all_reduce_on_both(&half);
    comm_split(&pairs, &half, "pair", world.rank / 4); // splits a part: ranks 0 and 2, 1 and 3, 4 and 6, ...
    for (int q = 0; q < pairs.size; q++)
        require(pairs.world_rank[q] == world.rank / 4 * 4 + 2 * q + odd, "rank %d is %d", q, pairs.world_rank[q]);
    all_reduce_on_both(&pairs);
    comm_free(&pairs);
    comm_free(&half);
}

// Each rank in turn is late.
CLAIM(nobody_leaves_a_barrier_before_the_last_has_come) {
    double* all = (double*)device_alloc((size_t)world.size * sizeof(double), MEMORY_ACTIVATIONS);
    for (int late = 0; late < world.size; late++) {
        if (world.rank == late) usleep(50000);
        double before = now_seconds(), came[MOST_RANKS]; // all processes of a machine share this clock
        comm_barrier(&world);
        double after = now_seconds();
        host_to_device(all + world.rank, &before, sizeof before);
        comm_wait(&world, comm_all_gather(&world, all, all + world.rank, 1, COMM_F64));
        device_to_host(came, all, (size_t)world.size * sizeof(double)); // and so all are here before the next turn
        for (int q = 0; q < world.size; q++)
            require(came[q] <= after, "rank %d came %g s after rank %d left", q, came[q] - after, world.rank);
    }
    device_free(all);
}

CLAIM(memory_on_the_host_is_known_as_such_and_counted) {
    char *device = (char*)device_alloc(100, MEMORY_ACTIVATIONS), *host = (char*)offload_alloc(100);
    require(device_memory(MEMORY_OFFLOADED) == 100, "%zu bytes are offloaded", device_memory(MEMORY_OFFLOADED));
    require(is_offloaded(host) && is_offloaded(host + 99), "memory from offload_alloc is not known as such");
    require(!is_offloaded(host + 100) && !is_offloaded(device), "other memory is taken for memory from offload_alloc");
    device_free(device);
    offload_free(host);
    require(device_memory(MEMORY_OFFLOADED) == 0, "%zu bytes are still offloaded", device_memory(MEMORY_OFFLOADED));
}

// ---- the program ----
// Hooks that a program may define. They are not static.
void more_options(OptionTable* table) __attribute__((weak));       // in addition to those of communication
bool does_another_thing(OptionTable* table) __attribute__((weak)); // true: do not run claims
void before_claim(const char* name) __attribute__((weak));
int main(int argc, char** argv) {
    RankInfo ranks = ranks_find();
    CommOptions o;
    OptionTable table = options_table("test_comm", "communication besides the results of collectives");
    options_comm(&table, &o);
    option_flag(&table, "deterministic", &o.ordered, "sums in rank order");
    if (more_options) more_options(&table);
    table.operands_form = "[PATTERN...]";
    table.max_operands = 100;
    options_parse(&table, argc, argv);
    comm_choose_environment(&o, ranks.size);
    device_init(ranks.local_rank, ranks.local_size);
    comm_init(&world, &o, ranks, &control);
    size_t scratch = device_memory(MEMORY_COMMUNICATION);
    require(scratch == comm_world_bytes(&world), "the world takes %zu bytes", scratch);
    require(world.size <= MOST_RANKS, "the numbers are made for %d ranks at most", MOST_RANKS);
    comm_connect(&world, every_pair);
    if (does_another_thing && does_another_thing(&table)) return EXIT_SUCCESS;
    printf("# %s\n", comm_description(&world));
    int done = 0;
    for (int i = 0; i < num_claims; i++) {
        if (!claim_wanted(&claims[i], table.operand_count, (char**)table.operands)) continue;
        comm_step(&world, ++done);
        if (before_claim) before_claim(claims[i].name);
        claims[i].run();
        comm_barrier(&world); // a rank that gets here has passed
        printf("ok %d - %s\n", done, claims[i].name);
        fflush(stdout);
    }
    require(done > 0, "no claim has such a name");
    comm_free(&world);
    device_shutdown();
    printf("1..%d\n", done);
    free(table.operands);
    return EXIT_SUCCESS;
}
#endif
