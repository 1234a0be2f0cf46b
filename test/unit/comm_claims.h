/*
comm_claims.h - each collective against sums made on the host: what test_comm.c claims of CPUs and test_comm_cuda.cu of GPUs. They are
started on several ranks, or alone. Every rank checks its own results, and the first check that fails ends them all.

    test_comm [PATTERN...]   the claims whose names match one of the patterns, or all, as TAP from rank 0

Before it is included, these are defined: MANY and SOME, how long buffers are; COMM_PIECE if it is not the usual one; ONE_WAY, whether a
run has only the way to all-reduce that its options say.
*/
#ifndef TEST_COMM_CLAIMS_H
#define TEST_COMM_CLAIMS_H
#include "comm_numbers.h"
#ifndef COMM_PIECE // without MPI nothing is cut into pieces
#define COMM_PIECE 4096
#endif

static Comm world;
static Control control;
static const size_t sizes[] = { 0, 1, 7, MANY };
enum { SPARE = 16, MOST_RANKS = 8 }; // bytes after every buffer that no operation may touch

static double zero(int rank, size_t i) { return 0.0 * rank * (double)i; }

// ---- buffers: n elements on the device, and SPARE bytes of 0x5a behind them ----
typedef struct { char* p; size_t n; CommType t; bool on_host; } Buffer;
typedef double (*Numbers)(int rank, size_t i); // element i of a rank, or of so many ranks

static Buffer part_of(Buffer b, size_t first, size_t n) {
    Buffer part = { b.p + first * comm_type_size(b.t), n, b.t, b.on_host };
    return part;
}
static void buffer_write(Buffer b, const void* from, size_t bytes) {
    if (b.on_host) memcpy(b.p, from, bytes);
    else host_to_device(b.p, from, bytes);
    device_synchronize(); // it has been read
}
static char* buffer_bytes(Buffer b, size_t bytes) { // the caller frees them
    char* host = (char*)xcalloc(bytes, 1);
    if (b.on_host) memcpy(host, b.p, bytes);
    else device_to_host(host, b.p, bytes);
    return host;
}
// Sets element i to numbers(rank, first + i).
static void buffer_set(Buffer b, Numbers numbers, int rank, size_t first) {
    size_t size = comm_type_size(b.t);
    char* host = (char*)xcalloc(b.n, size);
    for (size_t i = 0; i < b.n; i++) element_set(host, i, b.t, numbers(rank, first + i));
    buffer_write(b, host, b.n * size);
    free(host);
}
static void set_spare(Buffer b) {
    char spare[SPARE];
    memset(spare, 0x5a, SPARE);
    buffer_write(part_of(b, b.n, 0), spare, SPARE);
}
static Buffer buffer(size_t n, CommType t, Numbers numbers, int rank, size_t first) {
    Buffer b = { (char*)device_alloc(n * comm_type_size(t) + SPARE, MEMORY_ACTIVATIONS), n, t, false };
    buffer_set(b, numbers, rank, first);
    set_spare(b);
    return b;
}
static void check_spare(Buffer b) {
    char* spare = buffer_bytes(part_of(b, b.n, 0), SPARE);
    for (int k = 0; k < SPARE; k++) require(spare[k] == 0x5a, "byte %d behind %zu %s was written", k, b.n, comm_type_name(b.t));
    free(spare);
}
static void check_numbers(Buffer b, Numbers numbers, int rank, size_t first, const char* what) {
    char* host = buffer_bytes(b, b.n * comm_type_size(b.t));
    for (size_t i = 0; i < b.n; i++) {
        double x = element_get(host, i, b.t), want = numbers(rank, first + i);
        require(x == want, "%s, %s: element %zu of %zu is %.9g, not %.9g", what, comm_type_name(b.t), i, b.n, x, want);
    }
    free(host);
}
static void check_bits(Buffer b, const char* want, const char* what) {
    char* host = buffer_bytes(b, b.n * comm_type_size(b.t));
    require(memcmp(host, want, b.n * comm_type_size(b.t)) == 0, "%s of %s is not in rank order", what, comm_type_name(b.t));
    free(host);
}
// Checks a whole buffer, and frees it.
static void release(Buffer b, Numbers numbers, int rank, size_t first, const char* what) {
    check_numbers(b, numbers, rank, first, what);
    check_spare(b);
    device_free(b.p);
}

// ---- how all-reduce is done ----
enum { LIBRARY, RING, ORDERED, AUTO, MODES };
static const char* const mode_names[] = { "library", "ring", "rank order", "default" };
// Nothing is under way when it is called. Returns false if this run has no such mode. A claim begins with the default.
static bool set_mode(int mode) {
    CommOptions* o = &world.world->options;
    if (ONE_WAY) return mode == (o->ordered ? ORDERED : o->all_reduce == ALL_REDUCE_RING ? RING : AUTO);
    comm_barrier(&world);
    o->ordered = mode == ORDERED;
    o->all_reduce = mode == RING ? ALL_REDUCE_RING : mode == AUTO ? ALL_REDUCE_AUTO : ALL_REDUCE_LIBRARY;
    return true;
}

// ---- each collective. how: the mode, the root, or where a shard is ----
enum { APART, IN_PLACE, ON_HOST };
typedef void (*Collective)(Comm* c, size_t n, CommType t, int how);
static void every_size_and_type(Collective f, int num_types, int how) {
    for (size_t s = 0; s < COUNT(sizes); s++)
        for (int t = 0; t < num_types; t++) f(&world, sizes[s], types[t], how);
}

static void all_reduce_on(Comm* c, size_t n, CommType t, int mode) {
    Buffer x = buffer(n, t, whole, c->rank, 0);
    comm_wait(c, comm_all_reduce(c, x.p, n, t));
    release(x, whole_sum, c->size, 0, mode_names[mode]);
}
CLAIM(all_reduce_is_the_sum_over_ranks_in_every_type_size_and_way) {
    for (int mode = 0; mode < MODES; mode++) {
        if (!set_mode(mode)) continue;
        every_size_and_type(all_reduce_on, NUM_SUMMED, mode);
        for (size_t n = COMM_PIECE / 4 - 1; n <= COMM_PIECE / 4 + 1; n++) all_reduce_on(&world, n, COMM_F32, mode);
    }
}

// A shard in memory of its own, or `own`, its place in a buffer of all shards.
static Buffer shard_begin(Buffer own, int where) {
    if (where == APART) return buffer(own.n, own.t, zero, 0, 0);
    if (where == IN_PLACE) return own;
    size_t bytes = own.n * comm_type_size(own.t) + SPARE;
    Buffer shard = { (char*)offload_alloc(bytes), own.n, own.t, true };
    require(device_memory(MEMORY_OFFLOADED) == bytes, "%zu bytes are offloaded", device_memory(MEMORY_OFFLOADED));
    require(is_offloaded(shard.p) && is_offloaded(shard.p + bytes - 1), "memory from offload_alloc is not known as such");
    require(!is_offloaded(shard.p + bytes) && !is_offloaded(own.p), "other memory is taken for memory from offload_alloc");
    set_spare(shard);
    return shard;
}
static void shard_end(Buffer shard, int where) {
    if (where != IN_PLACE) check_spare(shard);
    if (where == ON_HOST) offload_free(shard.p);
    if (where == APART) device_free(shard.p);
}
static void reduce_scatter_on(Comm* c, size_t n, CommType t, int where) {
    size_t first = (size_t)c->rank * n;
    Buffer full = buffer((size_t)c->size * n, t, whole, c->rank, 0), own = part_of(full, first, n), shard = shard_begin(own, where);
    comm_wait(c, comm_reduce_scatter(c, shard.p, full.p, n, t));
    device_synchronize();
    check_numbers(shard, whole_sum, c->size, first, "reduce-scatter");
    if (where != APART) buffer_set(own, whole, c->rank, first); // from the host this part may be anything
    release(full, whole, c->rank, 0, "reduce-scatter's input");
    if (where != IN_PLACE) shard_end(shard, where);
}
CLAIM(reduce_scatter_leaves_each_rank_its_part_of_the_sum_in_place_or_not) {
    for (int where = APART; where <= IN_PLACE; where++) every_size_and_type(reduce_scatter_on, NUM_SUMMED, where);
}

static void all_gather_on(Comm* c, size_t n, CommType t, int where) {
    Buffer full = buffer((size_t)c->size * n, t, zero, 0, 0), shard = shard_begin(part_of(full, (size_t)c->rank * n, n), where);
    buffer_set(shard, whole, c->rank, 0);
    comm_wait(c, comm_all_gather(c, full.p, shard.p, n, t));
    for (int q = 0; q < c->size; q++) check_numbers(part_of(full, (size_t)q * n, n), whole, q, 0, "all-gather");
    check_numbers(shard, whole, c->rank, 0, "all-gather's input");
    check_spare(full);
    shard_end(shard, where);
    device_free(full.p);
}
CLAIM(all_gather_brings_every_shard_to_everyone_in_place_or_not) {
    for (int where = APART; where <= IN_PLACE; where++) every_size_and_type(all_gather_on, NUM_TYPES, where);
}

CLAIM(shards_may_be_in_host_memory) {
    size_t communication = device_memory(MEMORY_COMMUNICATION), total = device_memory_total();
    every_size_and_type(reduce_scatter_on, NUM_SUMMED, ON_HOST);
    every_size_and_type(all_gather_on, NUM_TYPES, ON_HOST);
    require(device_memory(MEMORY_OFFLOADED) == 0, "%zu bytes are offloaded", device_memory(MEMORY_OFFLOADED));
    require(device_memory(MEMORY_COMMUNICATION) == communication && device_memory_total() == total, "device memory was taken");
}

static void all_to_all_on(Comm* c, size_t n, CommType t, __attribute__((unused)) int how) {
    size_t N = (size_t)c->size, own = (size_t)c->rank * n;
    unsigned long long posted = c->stats[COMM_ALL_TO_ALL].posted;
    Buffer in = buffer(N * n, t, whole, c->rank, 0), out = buffer(N * n, t, zero, 0, 0);
    comm_wait(c, comm_all_to_all(c, out.p, in.p, n, t));
    for (size_t q = 0; q < N; q++) // the row of rank q that has this rank's number
        check_numbers(part_of(out, q * n, n), whole, (int)q, own, "all-to-all");
    check_spare(out);
    device_free(out.p);
    release(in, whole, c->rank, 0, "all-to-all's input");
    posted = c->stats[COMM_ALL_TO_ALL].posted - posted;
    require(posted == (N - 1) * n * comm_type_size(t), "an all-to-all of rows of %zu sent %llu bytes", n, posted);
}
CLAIM(all_to_all_brings_row_q_to_rank_q) {
    every_size_and_type(all_to_all_on, NUM_TYPES, 0);
    size_t slice = COMM_PIECE / sizeof(float) / (size_t)world.size / 2; // of a piece, over MPI
    for (size_t n = slice - 1; n <= slice + 1; n++) all_to_all_on(&world, n, COMM_F32, 0);
    all_to_all_on(&world, 2 * slice + 1, COMM_F32, 0);
}

static void broadcast_on(Comm* c, size_t n, CommType t, int root) {
    Buffer x = buffer(n, t, whole, c->rank, 0);
    comm_wait(c, comm_broadcast(c, x.p, n, t, root));
    release(x, whole, root, 0, "broadcast");
}
CLAIM(broadcast_comes_from_every_root) {
    every_size_and_type(broadcast_on, NUM_TYPES, world.size - 1);
    for (int root = 0; root < world.size; root++) broadcast_on(&world, MANY, types[root % NUM_TYPES], root);
}

static bool every_pair(int a, int b, int N) { return a < N && b < N; }
// Every rank sends two messages to every other, all at once: the messages of a pair must not overtake each other.
static void exchange_with_all(void) {
    const size_t lengths[] = { 2 * MANY, 7 };
    Buffer in[2][MOST_RANKS], out[2][MOST_RANKS];
    CommOp ops[4 * MOST_RANKS];
    int count = 0;
    for (int q = 0; q < world.size; q++) for (int m = 0; m < 2 && q != world.rank; m++) {
        out[m][q] = buffer(lengths[m], COMM_F32, whole, world.rank, (size_t)(q * 100 + m));
        in[m][q] = buffer(lengths[m], COMM_F32, zero, 0, 0);
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

// All but the last rank issue a collective, and go on; the last one issues it when a message has come from rank to rank.
CLAIM(nothing_waits_for_a_collective_but_its_own_wait) {
    const int r = world.rank, last = world.size - 1;
    Buffer sum = buffer(4, COMM_F32, whole, r, 0), number = buffer(1, COMM_F32, whole, r, 0);
    CommOp all = 0;
    if (r < last) all = comm_all_reduce(&world, sum.p, 4, COMM_F32);
    if (r > 0) comm_wait(&world, comm_recv(&world, number.p, 1, COMM_F32, r - 1));
    if (r < last) comm_wait(&world, comm_send(&world, number.p, 1, COMM_F32, r + 1));
    device_synchronize(); // the last rank has it, and only now issues the collective
    if (r == last) all = comm_all_reduce(&world, sum.p, 4, COMM_F32);
    comm_wait(&world, all);
    release(sum, whole_sum, world.size, 0, "all-reduce");
    release(number, whole, 0, 0, "a message that was passed on");
}

// ---- several at a time ----
// A communicator and the world at once.
static void all_reduce_on_both(Comm* part) {
    Buffer x = buffer(MANY, COMM_F32, whole, part->rank, 0), y = buffer(MANY, COMM_F32, whole, world.rank, 0);
    CommOp a = comm_all_reduce(part, x.p, MANY, COMM_F32), b = comm_all_reduce(&world, y.p, MANY, COMM_F32);
    comm_wait(&world, b);
    comm_wait(part, a);
    release(x, whole_sum, part->size, 0, part->name);
    release(y, whole_sum, world.size, 0, "world");
}
static void every_collective_on(Comm* c, size_t n, CommType t) {
    for (int where = APART; where <= ON_HOST; where++) {
        if (t != COMM_BYTE) reduce_scatter_on(c, n, t, where);
        all_gather_on(c, n, t, where);
    }
    if (t != COMM_BYTE) all_reduce_on(c, n, t, LIBRARY);
    all_to_all_on(c, n, t, 0);
    for (int root = 0; root < c->size; root++) broadcast_on(c, n, t, root);
}
CLAIM(parts_of_the_world_are_communicators_of_their_own) {
    static const size_t lengths[] = { 0, 1, 7, 20011 };
    Comm half, pairs;
    int odd = world.rank % 2;
    size_t taken = device_memory(MEMORY_COMMUNICATION);
    comm_split(&half, &world, "half", odd);
    taken = device_memory(MEMORY_COMMUNICATION) - taken;
    require(taken == comm_split_bytes(&world, half.size), "a split takes %zu bytes", taken);
    require(half.size == (world.size + 1 - odd) / 2 && half.rank == world.rank / 2, "rank %d of %d", half.rank, half.size);
    for (int q = 0; q < half.size; q++) require(half.world_rank[q] == 2 * q + odd, "rank %d is %d", q, half.world_rank[q]);
    for (int k = 0; k < NUM_TYPES; k++) for (size_t s = 0; s < COUNT(lengths); s++) every_collective_on(&half, lengths[s], types[k]);
    all_reduce_on_both(&half);
    comm_split(&pairs, &half, "pair", world.rank / 4); // of a part; ranks 0 and 2, 1 and 3, 4 and 6, ...
    for (int q = 0; q < pairs.size; q++)
        require(pairs.world_rank[q] == world.rank / 4 * 4 + 2 * q + odd, "rank %d is %d", q, pairs.world_rank[q]);
    all_reduce_on(&pairs, 1001, COMM_F32, LIBRARY);
    comm_free(&pairs);
    comm_free(&half);
    all_reduce_on(&world, 1001, COMM_F32, LIBRARY);
}

// Each rank in turn comes late.
CLAIM(nobody_leaves_a_barrier_before_the_last_has_come) {
    Buffer all = buffer((size_t)world.size, COMM_F64, zero, 0, 0), own = part_of(all, (size_t)world.rank, 1);
    for (int late = 0; late < world.size; late++) {
        if (world.rank == late) usleep(50000);
        double before = now_seconds(); // one clock for all processes of a machine
        comm_barrier(&world);
        double after = now_seconds();
        buffer_write(own, &before, sizeof before);
        comm_wait(&world, comm_all_gather(&world, all.p, own.p, 1, COMM_F64));
        double* came = (double*)(void*)buffer_bytes(all, all.n * sizeof(double)); // and so all are here before the next turn
        for (int q = 0; q < world.size; q++)
            require(came[q] <= after, "rank %d came %g s after rank %d left", q, came[q] - after, world.rank);
        free(came);
    }
    device_free(all.p);
}

// ---- rounding ----
// The sum in rank order, in fp32 (fp64: in double), rounded once.
static void sum_in_rank_order(void* out, size_t i, CommType t) {
    char one[8];
    double sum = 0;
    for (int q = 0; q < world.size; q++) {
        element_set(one, 0, t, rough(q, i));
        sum += element_get(one, 0, t);
        if (t != COMM_F64) sum = (float)sum; // as if both were added in fp32
    }
    element_set(out, i, t, sum);
}
static void sums_are_in_rank_order(int mode) {
    const size_t n = SOME, N = (size_t)world.size;
    for (int k = 0; set_mode(mode) && k < NUM_SUMMED; k++) {
        CommType t = types[k];
        size_t at = (size_t)world.rank * n;
        char* want = (char*)xcalloc(N * n, comm_type_size(t));
        Buffer x = buffer(N * n, t, rough, world.rank, 0), y = buffer(N * n, t, rough, world.rank, 0), own = part_of(y, at, n);
        for (size_t i = 0; i < N * n; i++) sum_in_rank_order(want, i, t);
        comm_wait(&world, comm_all_reduce(&world, x.p, N * n, t));
        check_bits(x, want, "all-reduce");
        comm_wait(&world, comm_reduce_scatter(&world, own.p, y.p, n, t));
        check_bits(own, want + at * comm_type_size(t), "reduce-scatter");
        free(want);
        device_free(x.p);
        device_free(y.p);
    }
}
CLAIM(in_ordered_mode_and_by_default_over_mpi_sums_are_in_rank_order_to_the_bit) {
    sums_are_in_rank_order(ORDERED);
    if (!ONE_WAY) sums_are_in_rank_order(AUTO);
}

// ---- the program ----
// A program may define these; they are not static.
void more_options(OptionTable* table) __attribute__((weak));       // besides those of communication
bool does_another_thing(OptionTable* table) __attribute__((weak)); // than to run claims
void before_claim(const char* name) __attribute__((weak));
int main(int argc, char** argv) {
    RankInfo ranks = ranks_find();
    CommOptions o;
    OptionTable table = options_table("test_comm", "collectives against sums made on the host");
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
        set_mode(AUTO);
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
