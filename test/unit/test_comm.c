/*
test_comm.c - collectives against sums made on the host. test/runs/test_comm.py starts this program on several ranks; every rank checks its
own results, and the first check that fails ends them all. Started alone it is a test of one rank.

    test_comm [PATTERN...]   the claims below whose names match one of the patterns, or all
    test_comm die NAME       one mistake, which must end with the error that test_comm.py expects
*/
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) // slow, so shorter buffers, in more and smaller pieces
#define COMM_PIECE (1 << 16)
#define MANY 100003
#else
#define MANY 1000003
#endif
#include "comm_numbers.h"
#include "../../llmc/comm/ring.h"
#include "../../llmc/comm/sums.h"
#define UNIT_OWN_MAIN
#include "unit.h"
#define CLAIM(name) TEST(name) // of all ranks together: pytest does not run it in a process of its own
#ifndef COMM_PIECE // without MPI nothing is cut into pieces
#define COMM_PIECE 4096
#endif

static Comm world;
static Control control;
static const size_t sizes[] = { 0, 1, 7, MANY };
enum { NUM_SIZES = sizeof sizes / sizeof sizes[0], SPARE = 3 }; // bytes after every buffer that no operation may touch
enum { MOST_RANKS = 8 };

#define check require

static double zero(int rank, size_t i) { return 0.0 * rank * (double)i; }

// ---- buffers: n elements, of which number i is numbers(rank, first + i), and SPARE bytes of 0x5a behind them ----

typedef double (*Numbers)(int rank, size_t i);
static void fill(void* p, size_t n, CommType t, Numbers numbers, int rank, size_t first) {
    for (size_t i = 0; i < n; i++) element_set(p, i, t, numbers(rank, first + i));
}
static void* buffer(size_t n, CommType t, Numbers numbers, int rank, size_t first) { // the caller frees it, or release does
    char* p = xcalloc(n * comm_type_size(t) + SPARE, 1);
    fill(p, n, t, numbers, rank, first);
    memset(p + n * comm_type_size(t), 0x5a, SPARE);
    return p;
}
static void check_spare(const void* p, size_t n, CommType t) {
    const char* spare = (const char*)p + n * comm_type_size(t);
    for (int k = 0; k < SPARE; k++) check(spare[k] == 0x5a, "byte %d behind %zu %s was written", k, n, comm_type_name(t));
}
static void check_numbers(const void* p, size_t n, CommType t, Numbers numbers, int rank, size_t first, const char* what) {
    for (size_t i = 0; i < n; i++) {
        double x = element_get(p, i, t), expected = numbers(rank, first + i);
        check(x == expected, "%s, %s: element %zu is %.9g, not %.9g", what, comm_type_name(t), i, x, expected);
    }
}
// Checks a whole buffer, and frees it.
static void release(void* p, size_t n, CommType t, Numbers numbers, int rank, size_t first, const char* what) {
    check_numbers(p, n, t, numbers, rank, first, what);
    check_spare(p, n, t);
    free(p);
}

// ---- how all-reduce is done: every mode in one run ----

enum { MODE_LIBRARY, MODE_RING, MODE_ORDERED, MODES };
static const char* const mode_names[] = { "library", "ring", "rank order" };
static void set_mode(int mode) { // nothing is under way when it is called
    comm_barrier(&world);
    world.world->options.ordered = mode == MODE_ORDERED;
    world.world->options.all_reduce = mode == MODE_RING ? ALL_REDUCE_RING : ALL_REDUCE_LIBRARY;
}

// ---- each collective. how: the mode, the root, or where a shard is ----

enum { APART, IN_PLACE, ON_HOST };
typedef void (*Collective)(Comm* c, size_t n, CommType t, int how);
static void every_size_and_type(Collective f, int num_types, int how) {
    for (int s = 0; s < NUM_SIZES; s++)
        for (int t = 0; t < num_types; t++) f(&world, sizes[s], types[t], how);
}

static void all_reduce_on(Comm* c, size_t n, CommType t, int mode) {
    void* x = buffer(n, t, whole, c->rank, 0);
    comm_wait(c, comm_all_reduce(c, x, n, t));
    release(x, n, t, whole_sum, c->size, 0, mode_names[mode]);
}
CLAIM(all_reduce_is_the_sum_over_ranks_in_every_type_size_and_way) {
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        every_size_and_type(all_reduce_on, NUM_SUMMED, mode);
        for (size_t n = COMM_PIECE / 4 - 1; n <= COMM_PIECE / 4 + 1; n++) all_reduce_on(&world, n, COMM_F32, mode);
    }
    set_mode(MODE_LIBRARY);
}

// A shard of the buffer (N,n) in which `own` is this rank's part.
static void* shard_begin(void* own, size_t n, CommType t, int where) {
    if (where != ON_HOST) return where == IN_PLACE ? own : buffer(n, t, zero, 0, 0);
    char* p = offload_alloc(n * comm_type_size(t) + SPARE);
    memset(p + n * comm_type_size(t), 0x5a, SPARE);
    return p;
}
static void shard_end(void* p, size_t n, CommType t, int where) {
    if (where != IN_PLACE) check_spare(p, n, t);
    if (where == ON_HOST) offload_free(p);
    if (where == APART) free(p);
}
static void reduce_scatter_on(Comm* c, size_t n, CommType t, int where) {
    size_t N = (size_t)c->size, at = (size_t)c->rank * n;
    char *full = buffer(N * n, t, whole, c->rank, 0), *own = full + at * comm_type_size(t), *shard = shard_begin(own, n, t, where);
    comm_wait(c, where == ON_HOST ? comm_reduce_scatter_to_host(c, shard, full, n, t) : comm_reduce_scatter(c, shard, full, n, t));
    device_synchronize();
    check_numbers(shard, n, t, whole_sum, c->size, at, "reduce-scatter");
    if (where != APART) fill(own, n, t, whole, c->rank, at); // from the host this part may be anything
    release(full, N * n, t, whole, c->rank, 0, "reduce-scatter's input");
    if (where != IN_PLACE) shard_end(shard, n, t, where);
}
CLAIM(reduce_scatter_leaves_each_rank_its_part_of_the_sum_in_place_or_not) {
    for (int where = APART; where <= IN_PLACE; where++) every_size_and_type(reduce_scatter_on, NUM_SUMMED, where);
}

static void all_gather_on(Comm* c, size_t n, CommType t, int where) {
    size_t N = (size_t)c->size, size = comm_type_size(t);
    char *full = buffer(N * n, t, zero, 0, 0), *shard = shard_begin(full + (size_t)c->rank * n * size, n, t, where);
    fill(shard, n, t, whole, c->rank, 0);
    comm_wait(c, where == ON_HOST ? comm_all_gather_from_host(c, full, shard, n, t) : comm_all_gather(c, full, shard, n, t));
    for (size_t q = 0; q < N; q++) check_numbers(full + q * n * size, n, t, whole, (int)q, 0, "all-gather");
    check_numbers(shard, n, t, whole, c->rank, 0, "all-gather's input");
    check_spare(full, N * n, t);
    shard_end(shard, n, t, where);
    free(full);
}
CLAIM(all_gather_brings_every_shard_to_everyone_in_place_or_not) {
    for (int where = APART; where <= IN_PLACE; where++) every_size_and_type(all_gather_on, NUM_TYPES, where);
}

CLAIM(shards_may_be_in_host_memory) {
    size_t communication = device_memory(MEMORY_COMMUNICATION), total = device_memory_total();
    every_size_and_type(reduce_scatter_on, NUM_SUMMED, ON_HOST);
    every_size_and_type(all_gather_on, NUM_TYPES, ON_HOST);
    check(device_memory(MEMORY_OFFLOADED) == 0, "%zu bytes are offloaded", device_memory(MEMORY_OFFLOADED));
    check(device_memory(MEMORY_COMMUNICATION) == communication && device_memory_total() == total, "device memory was taken");
}

static void all_to_all_on(Comm* c, size_t n, CommType t, __attribute__((unused)) int how) {
    size_t N = (size_t)c->size;
    char *in = buffer(N * n, t, whole, c->rank, 0), *out = buffer(N * n, t, zero, 0, 0);
    comm_wait(c, comm_all_to_all(c, out, in, n, t));
    for (size_t q = 0; q < N; q++) // the row of rank q that has this rank's number
        check_numbers(out + q * n * comm_type_size(t), n, t, whole, (int)q, (size_t)c->rank * n, "all-to-all");
    check_spare(out, N * n, t);
    free(out);
    release(in, N * n, t, whole, c->rank, 0, "all-to-all's input");
}
CLAIM(all_to_all_brings_row_q_to_rank_q) {
    every_size_and_type(all_to_all_on, NUM_TYPES, 0);
    size_t slice = COMM_PIECE / sizeof(float) / (size_t)world.size / 2; // of a piece, over MPI
    for (size_t n = slice - 1; n <= slice + 1; n++) all_to_all_on(&world, n, COMM_F32, 0);
    all_to_all_on(&world, 2 * slice + 1, COMM_F32, 0);
}

static void broadcast_on(Comm* c, size_t n, CommType t, int root) {
    void* x = buffer(n, t, whole, c->rank, 0);
    comm_wait(c, comm_broadcast(c, x, n, t, root));
    release(x, n, t, whole, root, 0, "broadcast");
}
CLAIM(broadcast_comes_from_every_root) {
    every_size_and_type(broadcast_on, NUM_TYPES, world.size - 1);
    for (int root = 0; root < world.size; root++) broadcast_on(&world, MANY, types[root % NUM_TYPES], root);
}

// Every rank sends two messages to every other, all at once: the messages of a pair must not overtake each other.
static void exchange_with_all(void) {
    const size_t lengths[] = { 2 * MANY, 7 };
    void *in[2][MOST_RANKS], *out[2][MOST_RANKS];
    CommOp ops[4 * MOST_RANKS];
    int count = 0;
    for (int q = 0; q < world.size; q++) for (int m = 0; m < 2 && q != world.rank; m++) {
        out[m][q] = buffer(lengths[m], COMM_F32, whole, world.rank, (size_t)(q * 100 + m));
        in[m][q] = buffer(lengths[m], COMM_F32, zero, 0, 0);
        ops[count++] = comm_send(&world, out[m][q], lengths[m], COMM_F32, q);
        ops[count++] = comm_recv(&world, in[m][q], lengths[m], COMM_F32, q);
    }
    while (count > 0) comm_wait(&world, ops[--count]);
    for (int q = 0; q < world.size; q++) for (int m = 0; m < 2 && q != world.rank; m++) {
        release(in[m][q], lengths[m], COMM_F32, whole, q, (size_t)(world.rank * 100 + m), "receive");
        free(out[m][q]);
    }
}
CLAIM(all_ranks_send_to_all_others_at_once) { exchange_with_all(); }

// All but the last rank issue a collective, and go on; the last one issues it when a message has come from rank to rank.
CLAIM(nothing_waits_for_a_collective_but_its_own_wait) {
    const int r = world.rank, last = world.size - 1;
    float sum[4] = { 1, 1, 1, 1 }, number = (float)r;
    CommOp all = 0;
    if (r < last) all = comm_all_reduce(&world, sum, 4, COMM_F32);
    if (r > 0) comm_wait(&world, comm_recv(&world, &number, 1, COMM_F32, r - 1));
    if (r < last) comm_wait(&world, comm_send(&world, &number, 1, COMM_F32, r + 1));
    if (r == last) all = comm_all_reduce(&world, sum, 4, COMM_F32);
    comm_wait(&world, all);
    check(sum[3] == (float)world.size && number == 0, "sum %g, number %g", sum[3], number);
}

// Between two ranks a message and a part of a collective are in flight at once, and each rank issues them in another order.
CLAIM(messages_are_not_taken_for_parts_of_collectives) {
    if (world.size == 1) return;
    float number = -1, sent = 100, shard = (float)world.rank, full[MOST_RANKS];
    CommOp message = 0;
    if (world.rank == 0) message = comm_recv(&world, &number, 1, COMM_F32, 1);
    comm_wait(&world, comm_all_gather(&world, full, &shard, 1, COMM_F32));
    if (world.rank == 1) message = comm_send(&world, &sent, 1, COMM_F32, 0);
    if (world.rank < 2) comm_wait(&world, message);
    check(number == (world.rank == 0 ? 100 : -1), "the message is %g", number);
    for (int q = 0; q < world.size; q++) check(full[q] == (float)q, "the shard of rank %d is %g", q, full[q]);
}

// ---- several at a time ----

CLAIM(hundreds_of_operations_are_under_way_and_waited_for_in_another_order) {
    enum { OPS = 300 };
    void* x[OPS];
    CommOp ops[OPS];
    for (int k = 0; k < OPS; k++) {
        x[k] = buffer((size_t)(k * 37), types[k % 4], whole, world.rank, (size_t)k);
        ops[k] = comm_all_reduce(&world, x[k], (size_t)(k * 37), types[k % 4]);
    }
    for (int turn = 0; turn < OPS; turn++) {
        int k = (turn * 77 + 13) % OPS; // 77 and 300 have no common factor
        comm_wait(&world, ops[k]);
        release(x[k], (size_t)(k * 37), types[k % 4], whole_sum, world.size, (size_t)k, "one of many");
    }
}

// A communicator and the world at once.
static void all_reduce_on_both(Comm* part) {
    void *x = buffer(MANY, COMM_F32, whole, part->rank, 0), *y = buffer(MANY, COMM_F32, whole, world.rank, 0);
    CommOp a = comm_all_reduce(part, x, MANY, COMM_F32), b = comm_all_reduce(&world, y, MANY, COMM_F32);
    comm_wait(&world, b);
    comm_wait(part, a);
    release(x, MANY, COMM_F32, whole_sum, part->size, 0, part->name);
    release(y, MANY, COMM_F32, whole_sum, world.size, 0, "world");
}
CLAIM(parts_of_the_world_are_communicators_of_their_own) {
    Comm half, pairs;
    int odd = world.rank % 2;
    comm_split(&half, &world, "half", odd);
    check(half.size == (world.size + 1 - odd) / 2 && half.rank == world.rank / 2, "rank %d of %d", half.rank, half.size);
    for (int q = 0; q < half.size; q++) check(half.world_rank[q] == 2 * q + odd, "rank %d is %d", q, half.world_rank[q]);
    reduce_scatter_on(&half, MANY, COMM_BF16, IN_PLACE);
    all_gather_on(&half, 70001, COMM_F64, APART);
    all_to_all_on(&half, 70001, COMM_BF16, 0);
    for (int root = 0; root < half.size; root++) broadcast_on(&half, 1001, COMM_F16, root);
    all_reduce_on_both(&half);
    comm_split(&pairs, &half, "pair", world.rank / 4); // of a part; ranks 0 and 2, 1 and 3, 4 and 6, ...
    for (int q = 0; q < pairs.size; q++)
        check(pairs.world_rank[q] == world.rank / 4 * 4 + 2 * q + odd, "rank %d is %d", q, pairs.world_rank[q]);
    all_reduce_on(&pairs, 1001, COMM_F32, MODE_LIBRARY);
    comm_free(&pairs); comm_free(&half);
    all_reduce_on(&world, 1001, COMM_F32, MODE_LIBRARY);
}

CLAIM(nobody_leaves_a_barrier_before_the_last_has_come) {
    usleep((useconds_t)(50000 * ((world.rank + 1) % world.size))); // a barrier that does not wait would end too early
    double before = now_seconds(), all[MOST_RANKS]; // one clock for all processes of a machine
    comm_barrier(&world);
    double after = now_seconds();
    comm_wait(&world, comm_all_gather(&world, all, &before, 1, COMM_F64));
    for (int q = 0; q < world.size; q++)
        check(all[q] <= after, "rank %d came %g s after rank %d left", q, all[q] - after, world.rank);
}

// ---- rounding ----

CLAIM(rough_sums_are_right_within_rounding_the_same_twice_and_on_every_rank) {
    const size_t n = 100003;
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        float *x = buffer(n, COMM_F32, rough, world.rank, 0), *y = buffer(n, COMM_F32, rough, world.rank, 0);
        comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
        comm_wait(&world, comm_all_reduce(&world, y, n, COMM_F32));
        for (size_t i = 0; i < n; i++) {
            double size = 0, sum = 0;
            for (int q = 0; q < world.size; q++) {
                size += fabs(rough(q, i));
                sum += (double)(float)rough(q, i);
            }
            check(fabs(x[i] - sum) <= size * world.size * 6e-8, "%s: element %zu is %.9g, not %.9g", mode_names[mode], i, x[i], sum);
        }
        check(memcmp(x, y, n * 4) == 0, "%s: the same sum twice differs", mode_names[mode]);
        comm_wait(&world, comm_broadcast(&world, y, n, COMM_F32, 0));
        check(memcmp(x, y, n * 4) == 0, "%s: ranks have different sums", mode_names[mode]);
        free(x); free(y);
    }
    set_mode(MODE_LIBRARY);
}

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
CLAIM(in_ordered_mode_sums_are_in_rank_order_to_the_bit) {
    set_mode(MODE_ORDERED);
    const size_t n = 150001, N = (size_t)world.size;
    for (int k = 0; k < NUM_SUMMED; k++) {
        CommType t = types[k];
        size_t size = comm_type_size(t), at = (size_t)world.rank * n * size;
        char* expected = buffer(N * n, t, zero, 0, 0);
        char *x = buffer(N * n, t, rough, world.rank, 0), *y = buffer(N * n, t, rough, world.rank, 0);
        for (size_t i = 0; i < N * n; i++) sum_in_rank_order(expected, i, t);
        comm_wait(&world, comm_all_reduce(&world, x, N * n, t));
        check(memcmp(x, expected, N * n * size) == 0, "all-reduce of %s is not in rank order", comm_type_name(t));
        comm_wait(&world, comm_reduce_scatter(&world, y + at, y, n, t));
        check(memcmp(y + at, expected + at, n * size) == 0, "reduce-scatter of %s is not in rank order", comm_type_name(t));
        free(expected); free(x); free(y);
    }
    set_mode(MODE_LIBRARY);
}

// ---- what is counted ----

// All ranks together really send N times what the formulas say for one, and comm_host_sum adds up what each has sent; what a
// library sends is not counted.
CLAIM(counts_are_the_formulas_and_what_is_really_sent) {
    const size_t n = 300007, N = (size_t)world.size, all = (N - 1) * N;
    const unsigned long long calls[COMM_KINDS] = { 2, 1, 1, 1, 1, 0, 0, 0, 0 };
    const size_t elements[COMM_KINDS] = { 2 * (n + 5) * (N - 1), n * all, n * all, 999 * all, 1001 * (N - 1), 0, 0, 0, 0 };
    const size_t bytes[COMM_KINDS] = { 2 * (4 * n + 10) * (N - 1), 4 * n * all, 4 * n * all, 1998 * all, 1001 * (N - 1), 0, 0, 0, 0 };
    float *x = xcalloc(n * N, sizeof(float)), *own = x + n * (size_t)world.rank, *y = xcalloc(n * N, sizeof(float));
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        CommStats before[COMM_KINDS], after[COMM_KINDS];
        memcpy(before, world.stats, sizeof before);
        comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
        comm_wait(&world, comm_all_reduce(&world, x, 5, COMM_BF16));
        comm_wait(&world, comm_reduce_scatter(&world, own, x, n, COMM_F32));
        comm_wait(&world, comm_all_gather(&world, x, own, n, COMM_F32));
        comm_wait(&world, comm_all_to_all(&world, y, x, 999, COMM_F16));
        comm_wait(&world, comm_broadcast(&world, x, 1001, COMM_BYTE, world.size - 1));
        memcpy(after, world.stats, sizeof after);
        for (int k = 0; k < COMM_KINDS; k++) {
            CommStats *a = &before[k], *b = &after[k];
            check(b->calls - a->calls == calls[k], "%s: %llu calls", comm_kind_names[k], b->calls - a->calls);
            check(b->elements_times_N - a->elements_times_N == elements[k], "%s: elements", comm_kind_names[k]);
            check(b->bytes_times_N - a->bytes_times_N == bytes[k], "%s: bytes", comm_kind_names[k]);
            check(b->exposed >= a->exposed && b->busy >= a->busy, "%s: time goes backwards", comm_kind_names[k]);
            double sent = comm_host_sum(&world, (double)(b->posted - a->posted));
            bool by_library = (k == COMM_ALL_REDUCE && mode == MODE_LIBRARY) || k == COMM_BROADCAST;
            check(by_library || sent == (double)bytes[k], "%s, %s: %.0f bytes", comm_kind_names[k], mode_names[mode], sent);
        }
    }
    set_mode(MODE_LIBRARY);
    free(x); free(y);
}

static double exposed_of_world(void) {
    return world.stats[COMM_ALL_REDUCE].exposed + world.stats[COMM_SEND].exposed + world.stats[COMM_RECV].exposed;
}
// Groups of two sizes, one of which sends more than the other, a rank alone, and a message from one rank.
CLAIM(totals_are_what_this_rank_sends_also_within_groups) {
    const int N = world.size, first = N > 1 ? (N + 1) / 3 : 1; // 1+1, 1+2, 1+3, 3+5
    const int mine = world.rank < first ? first : N - first;
    const size_t n = 1003, split = comm_split_bytes(&world, mine), before_split = device_memory(MEMORY_COMMUNICATION);
    Comm group, alone;
    comm_split(&group, &world, "group", world.rank >= first);
    comm_alone(&alone, &world, "alone");
    size_t taken = device_memory(MEMORY_COMMUNICATION) - before_split;
    check(group.size == mine && taken == split, "a split of %d ranks takes %zu bytes, not %zu", group.size, taken, split);
    float *x = xcalloc(n * (size_t)N, sizeof(float)), *y = xcalloc(n * (size_t)N, sizeof(float));
    comm_collect_times(&world);
    double sent = comm_rank_bytes(&world), exposed = comm_rank_exposed(&world), of_world = exposed_of_world();
    comm_wait(&group, comm_all_gather(&group, x, x + n * (size_t)group.rank, n, COMM_F32));
    comm_wait(&group, comm_all_to_all(&group, y, x, n, COMM_BF16));
    comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
    comm_wait(&alone, comm_all_reduce(&alone, x, n, COMM_F32));
    if (N > 1 && world.rank == 0) comm_wait(&world, comm_send(&world, x, 501, COMM_F64, N - 1));
    if (N > 1 && world.rank == N - 1) comm_wait(&world, comm_recv(&world, x, 501, COMM_F64, 0));
    comm_collect_times(&world);
    sent = comm_rank_bytes(&world) - sent;
    double expected = 6.0 * (double)n * (mine - 1) + 8.0 * (double)n * (N - 1) / N + (N > 1 && world.rank == 0 ? 8 * 501 : 0);
    check(fabs(sent - expected) < 1e-6, "this rank sent %.9g bytes, not %.9g", sent, expected);
    double of_parts = alone.stats[COMM_ALL_REDUCE].exposed + group.stats[COMM_ALL_GATHER].exposed + group.stats[COMM_ALL_TO_ALL].exposed;
    exposed = comm_rank_exposed(&world) - exposed;
    of_world = exposed_of_world() - of_world;
    check(fabs(exposed - of_world - of_parts) < 1e-9, "%g s are exposed", exposed);
    check(group.stats[COMM_ALL_GATHER].exposed > 0, "a split exposes nothing");
    free(x); free(y);
    comm_free(&alone); comm_free(&group);
}

// A whole number of bytes is exact, though each of N kinds of operation sent one Nth of a byte.
CLAIM(totals_are_exact_where_they_are_whole_numbers) {
    CommStats kept[COMM_KINDS];
    const unsigned long long N = (unsigned long long)world.size, many = 1ull << 50;
    memcpy(kept, world.stats, sizeof kept);
    for (unsigned long long k = 0; k < COMM_KINDS; k++) world.stats[k].bytes_times_N = k < N ? 1 : 0;
    world.stats[0].bytes_times_N += many * N;
    double sent = comm_rank_bytes(&world);
    memcpy(world.stats, kept, sizeof kept);
    check(sent == (double)(many + 1), "%.17g bytes, not %.17g", sent, (double)(many + 1));
}

// ---- strict mode, and its absence ----

static bool all_nan(const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) if (!isnan(x[i])) return false;
    return true;
}
static void set_all(float* x, size_t n, float value) { for (size_t i = 0; i < n; i++) x[i] = value; }
// Waits for an operation whose output (n) must be NaN until then. What is written into its input (m) before the wait is what it
// reads.
static void wait_strictly(CommOp op, const float* out, size_t n, float* in, size_t m, float written) {
    check(all_nan(out, n), "an output can be read before its wait");
    set_all(in, m, written);
    comm_wait(&world, op);
}
CLAIM(in_strict_mode_outputs_are_nan_and_inputs_are_read_at_the_wait) {
    if (!world.world->strict) return;
    enum { n = 5 };
    const size_t N = (size_t)world.size;
    const float ranks = (float)N;
    float x[n], full[MOST_RANKS * n], shard[n], all[MOST_RANKS * n], *own = full + (size_t)world.rank * n;
    set_all(x, n, 1);
    set_all(full, N * n, 1);
    CommOp reduce = comm_all_reduce(&world, x, n, COMM_F32), scatter = comm_reduce_scatter(&world, shard, full, n, COMM_F32);
    wait_strictly(comm_all_gather(&world, all, full, n, COMM_F32), all, N * n, full, N * n, 100);
    wait_strictly(reduce, x, n, x, 1, 7); // in place what is written is lost
    wait_strictly(scatter, shard, n, NULL, 0, 0); // still NaN after the other waits
    check(x[0] == ranks && x[4] == ranks, "in place: %g", x[0]);
    check(shard[0] == 100 * ranks && all[0] == 100, "an early write into an input had no effect: %g, %g", shard[0], all[0]);

    wait_strictly(comm_reduce_scatter_to_host(&world, shard, full, n, COMM_F32), shard, n, full, N * n, 50);
    check(shard[0] == 50 * ranks, "an early write into an input had no effect: %g", shard[0]);
    check(all_nan(own, n), "what a GPU uses as scratch can be read on a CPU");
    wait_strictly(comm_all_gather_from_host(&world, full, shard, n, COMM_F32), full, N * n, shard, n, 4);
    check(full[0] == 4 && full[(N - 1) * n] == 4, "an early write into a shard on the host had no effect: %g", full[0]);

    set_all(full, N * n, 3);
    scatter = comm_reduce_scatter(&world, own, full, n, COMM_F32);
    check(N == 1 || !isnan(own[world.rank == 0 ? n : -1]), "another part than its output becomes NaN");
    wait_strictly(scatter, own, n, NULL, 0, 0);
    wait_strictly(comm_all_gather(&world, full, own, n, COMM_F32), full, N * n, NULL, 0, 0);
    check(full[0] == 3 * ranks && full[N * n - 1] == 3 * ranks, "in place: %g", full[0]);
    wait_strictly(comm_all_to_all(&world, all, full, n, COMM_F32), all, N * n, full, N * n, 100 + (float)world.rank);
    for (size_t q = 0; q < N; q++) check(all[q * n] == 100 + (float)q, "an early write had no effect: %g", all[q * n]);
    wait_strictly(comm_broadcast(&world, x, n, COMM_F32, 0), x, n, NULL, 0, 0); // the root's is NaN, too
    check(x[2] == ranks, "broadcast: %g", x[2]);
}

// ---- time ----

static CommEvent seen;
static int seen_count;
static void see(void* self, const CommEvent* e) {
    check(self == &seen, "the observer's own pointer");
    if (e->kind == COMM_ALL_REDUCE) seen = *e;
    seen_count++;
}

static bool is_finished(CommOp op) {
    pthread_mutex_lock(&world.world->lock);
    bool finished = world.slots[op % COMM_IN_FLIGHT].finished;
    pthread_mutex_unlock(&world.world->lock);
    return finished;
}
// An operation goes from start to finish while this thread computes and calls nothing.
static void finishes_without_this_thread(float* x, size_t n, const char* mode) {
    int before = seen_count;
    for (size_t i = 0; i < n; i++) x[i] = 1;
    comm_observe(&world, see, &seen);
    CommOp op = comm_all_reduce(&world, x, n, COMM_F32);
    volatile double work = 1;
    for (double begun = now_seconds(); !is_finished(op) && now_seconds() - begun < 60;) // a deadline, in place of a hang
        for (int i = 0; i < 1000000; i++) work = work * 0.999999 + 1;
    check(is_finished(op), "%s: it was not finished when the wait began", mode);
    comm_wait(&world, op);
    comm_observe(&world, NULL, NULL);
    check(seen.number == op && seen.n == n && strcmp(seen.communicator, "world") == 0, "another operation was observed");
    check(seen.caller && strcmp(seen.caller, __func__) == 0 && seen.ranks == world.size, "its caller is another function");
    check(seen.data == x && seen.bytes == n * sizeof(float), "it is about other data");
    check(seen.issued <= seen.started && seen.started <= seen.finished && seen.finished <= seen.wait_begun &&
          seen.wait_begun <= seen.wait_ended, "its times are in another order");
    check(x[0] == (float)world.size && x[n - 1] == (float)world.size, "the sum is %g", x[0]);
    check(seen_count == before + 1, "%d operations were observed", seen_count - before);
}
CLAIM(communication_goes_on_while_this_thread_computes) {
    if (world.world->strict) return; // in strict mode it begins at its wait
    float* x = buffer(MANY, COMM_F32, zero, 0, 0);
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        finishes_without_this_thread(x, MANY, mode_names[mode]);
    }
    set_mode(MODE_LIBRARY);
    free(x);
}

// What the emulated link was seen to carry: when each operation took it, and the seconds that its bytes need there. These are lower
// bounds, which hold on a machine of any speed.
typedef struct { double from, needs; } Carried;
static Carried carried[4096];
static int num_carried;
static void see_carried(__attribute__((unused)) void* self, const CommEvent* e) {
    const Comm* c = NULL;
    for (int i = 0; i < world.world->num_comms; i++)
        if (strcmp(world.world->comms[i]->name, e->communicator) == 0) c = world.world->comms[i];
    double bytes = (double)(comm_sent_times_N(e->kind, e->n, c->size) * comm_type_size(e->type)) / c->size;
    Carried x = { e->started, bytes / (world.world->options.link * 1e9 / 8) };
    if (bytes == 0) return;
    check(num_carried < 4096, "too many operations");
    check(e->issued <= e->started + 1e-9 && e->finished - e->started > x.needs - 1e-9, "%s of %zu was over after %.6f s, not %.6f s",
          comm_kind_names[e->kind], e->n, e->finished - e->started, x.needs);
    carried[num_carried++] = x;
}
static int compare_carried(const void* a, const void* b) {
    double x = ((const Carried*)a)->from, y = ((const Carried*)b)->from;
    return (x > y) - (x < y);
}
// Every kind of operation, on communicators that share the link. Results are checked as elsewhere.
static void send_all_kinds(void) {
    Comm half;
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        all_reduce_on(&world, MANY, COMM_F32, mode);
    }
    set_mode(MODE_LIBRARY);
    for (int where = APART; where <= ON_HOST; where++) {
        reduce_scatter_on(&world, MANY / 4, COMM_F32, where);
        all_gather_on(&world, MANY / 4, COMM_BF16, where);
    }
    all_to_all_on(&world, MANY / 4, COMM_BYTE, 0);
    broadcast_on(&world, MANY, COMM_F32, world.size - 1);
    exchange_with_all();
    comm_split(&half, &world, "half", world.rank % 2);
    all_reduce_on_both(&half);
    comm_collect_times(&half);
    comm_free(&half);
}
CLAIM(an_emulated_link_is_as_slow_as_its_rate_and_operations_take_turns) {
    if (world.size == 1) return;
    const double kept = world.world->options.link;
    comm_barrier(&world);
    world.world->options.link = 8e-9 * 4 * MANY / 0.005; // MANY floats in 5 ms
    comm_observe(&world, see_carried, NULL);
    num_carried = 0;
    send_all_kinds();
    comm_observe(&world, NULL, NULL);
    comm_barrier(&world);
    world.world->options.link = kept;
    qsort(carried, (size_t)num_carried, sizeof *carried, compare_carried);
    check(num_carried >= 10, "only %d operations were seen", num_carried);
    for (int i = 1; i < num_carried; i++) // times differ by rounding only
        check(carried[i].from > carried[i - 1].from + carried[i - 1].needs - 1e-6, "operation %d took the link %g s early", i,
              carried[i - 1].from + carried[i - 1].needs - carried[i].from);
}

// A step of more operations than there is room for: an observer sees none of them within the step, and then all, in their order.
static CommOp next_seen;
static void see_in_order(void* self, const CommEvent* e) {
    (void)self;
    check(e->number == next_seen, "operation #%lld was seen before #%lld", e->number, next_seen);
    next_seen++;
}
CLAIM(an_observer_sees_a_long_step_when_it_is_over) {
    enum { LONG = 2 * COMM_WAITED_CAPACITY + 100 };
    float x = 0;
    comm_observe(&world, see_in_order, NULL);
    CommOp first = next_seen = world.issued;
    for (int k = 0; k < LONG; k++) comm_wait(&world, comm_broadcast(&world, &x, 1, COMM_F32, 0));
    check(next_seen == first, "%lld operations were seen within the step", next_seen - first);
    comm_collect_times(&world);
    check(next_seen == first + LONG, "%lld of %d operations were seen", next_seen - first, LONG);
    comm_observe(&world, NULL, NULL);
}

// ---- the ring's chunks ----

CLAIM(the_rings_chunks_cover_every_buffer_once) {
    for (int N = 1; N <= 9; N++)
        for (size_t n = 0; n < 50; n++)
            for (size_t c = 0; c < (size_t)N; c++) {
                size_t from = ring_chunk(c, N, n), to = ring_chunk(c + 1, N, n);
                check(from <= to && to - from <= ring_largest_chunk(N, n), "chunk %zu of %d of %zu", c, N, n);
                check((c > 0 || from == 0) && (c < (size_t)N - 1 || to == n), "chunks do not cover %zu by %d", n, N);
            }
    size_t big = SIZE_MAX / 4 * 3;
    check(ring_chunk(8, 8, big) == big && ring_chunk(7, 8, big) < big, "chunks of very large buffers overflow");
}

// ---- mistakes ----

#define MISTAKE(text, ...) if (strcmp(name, text) == 0) { __VA_ARGS__; return; }
static void die_by(const char* name) {
    static float x[8];
    static Comm c, d;
    const size_t last = (size_t)world.size - 1;
    MISTAKE("wait-twice", CommOp op = comm_all_reduce(&world, x, 2, COMM_F32); comm_wait(&world, op); comm_wait(&world, op))
    MISTAKE("wait-unknown", comm_wait(&world, world.issued))
    MISTAKE("never-waited", comm_all_reduce(&world, x, 2, COMM_F32); comm_free(&world))
    MISTAKE("too-many", for (;;) comm_all_reduce(&world, x, 2, COMM_F32))
    MISTAKE("send-to-itself", comm_send(&world, x, 1, COMM_F32, world.rank))
    MISTAKE("send-unconnected", comm_split(&c, &world, "part", 0); comm_send(&c, x, 1, COMM_F32, 0))
    MISTAKE("connect-twice", comm_connect(&world))
    MISTAKE("no-such-root", comm_broadcast(&world, x, 1, COMM_F32, world.size))
    MISTAKE("sum-of-bytes", comm_reduce_scatter(&world, x, x, 1, COMM_BYTE))
    MISTAKE("overlap", comm_all_to_all(&world, x, x + last, 1, COMM_F32))
    MISTAKE("overlap-before", comm_all_to_all(&world, x + last, x, 1, COMM_F32))
    MISTAKE("split-in-flight", comm_all_reduce(&world, x, 1, COMM_F32); comm_split(&c, &world, "part", 0))
    MISTAKE("split-twice", comm_split(&c, &world, "part", 0); comm_split(&d, &world, "part", 0))
    MISTAKE("world-first", comm_split(&c, &world, "part", 0); comm_free(&world))
    MISTAKE("orders-differ", // seen in strict mode, as is the next
            CommOp ops[] = { comm_all_reduce(&world, x, 2, COMM_F32), comm_all_reduce(&world, x + 2, 2, COMM_F32) };
            comm_wait(&world, ops[world.rank % 2]))
    MISTAKE("sizes-differ", comm_wait(&world, comm_all_reduce(&world, x, 2 + (size_t)world.rank, COMM_F32)))
    MISTAKE("message-too-long",
            comm_wait(&world, world.rank ? comm_recv(&world, x, 2, COMM_F32, 0) : comm_send(&world, x, 3, COMM_F32, 1)))
    die("there is no mistake '%s'", name);
}

int main(int argc, char** argv) {
    RankInfo ranks = ranks_find();
    CommOptions o;
    OptionTable table = options_table("test_comm", "collectives against sums made on the host");
    options_comm(&table, &o);
    int deterministic = 0;
    option_flag(&table, "deterministic", &deterministic, "sums in rank order");
    table.operands_form = "[PATTERN...] | die NAME";
    table.max_operands = 100;
    options_parse(&table, argc, argv);
    o.ordered = deterministic;
    device_init(ranks.local_rank, ranks.local_size);
    comm_init(&world, &o, ranks, &control);
    comm_connect(&world);
    size_t scratch = device_memory(MEMORY_COMMUNICATION);
    check(scratch == comm_world_bytes(&world), "the world takes %zu bytes", scratch);
    check(world.size <= MOST_RANKS, "the numbers are made for %d ranks at most", MOST_RANKS);
    if (table.operand_count == 2 && strcmp(table.operands[0], "die") == 0) {
        die_by(table.operands[1]);
        return EXIT_SUCCESS;
    }
    printf("# %s\n", comm_description(&world));
    int claims = 0;
    for (size_t i = 0; i < registered.count; i++) {
        bool wanted = table.operand_count == 0;
        for (int k = 0; k < table.operand_count; k++) wanted |= fnmatch(table.operands[k], registered.tests[i].name, 0) == 0;
        if (!wanted) continue;
        comm_step(&world, ++claims);
        registered.tests[i].test_func(NULL);
        comm_barrier(&world); // a rank that gets here has passed
        printf("ok %d - %s\n", claims, registered.tests[i].name);
        fflush(stdout);
    }
    check(claims > 0, "no claim has such a name");
    comm_free(&world);
    device_shutdown();
    printf("1..%d\n", claims);
    free(table.operands);
    return EXIT_SUCCESS;
}
