/*
test_comm.c - communication of ranks on CPUs: the claims of comm_claims.h, and claims that need access to the data while
an operation runs. test/runs/test_comm.py starts it on several ranks; on its own it tests one rank.

    test_comm [PATTERN...]   the claims whose names match one of the patterns, or all
    test_comm die NAME       makes one mistake, which must end with the error that test_comm.py expects
*/
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) // slow, so shorter buffers, in more and smaller pieces
#define COMM_PIECE (1 << 16)
#define MANY 100003
#else
#define MANY 1000003
#endif
#include "comm_claims.h"

// ---- the ways to do an all-reduce ----
enum { LIBRARY, RING, ORDERED, AUTO, MODES };
static const char* const mode_names[] = { "library", "ring", "rank order", "default" };
// Call it while no operation is in flight. Every claim begins and ends with the default, which is the last one.
static void set_mode(int mode) {
    CommOptions* o = &world.world->options;
    comm_barrier(&world);
    o->ordered = mode == ORDERED;
    o->all_reduce = mode == RING ? ALL_REDUCE_RING : mode == AUTO ? ALL_REDUCE_AUTO : ALL_REDUCE_LIBRARY;
}

// ---- several at a time; rounding ----
// A message and a part of a collective are in flight between two ranks, which issue them in different orders.
CLAIM(messages_are_not_taken_for_parts_of_collectives) {
    if (world.size == 1) return;
    float number = -1, sent = 100, shard = (float)world.rank, full[MOST_RANKS];
    CommOp message = 0;
    if (world.rank == 0) message = comm_recv(&world, &number, 1, COMM_F32, 1);
    comm_wait(&world, comm_all_gather(&world, full, &shard, 1, COMM_F32));
    if (world.rank == 1) message = comm_send(&world, &sent, 1, COMM_F32, 0);
    if (world.rank < 2) comm_wait(&world, message);
    require(number == (world.rank == 0 ? 100 : -1), "the message is %g", number);
    for (int q = 0; q < world.size; q++) require(full[q] == (float)q, "the shard of rank %d is %g", q, full[q]);
}

CLAIM(hundreds_of_operations_are_under_way_and_waited_for_in_another_order) {
    enum { OPS = 300 };
    Buffer x[OPS];
    CommOp ops[OPS];
    for (int k = 0; k < OPS; k++) {
        x[k] = buffer((size_t)(k * 37), whole, world.rank, (size_t)k);
        ops[k] = comm_all_reduce(&world, x[k].p, x[k].n, COMM_F32);
    }
    for (int turn = 0; turn < OPS; turn++) {
        int k = (turn * 77 + 13) % OPS; // coprime, so every operation gets its turn
        comm_wait(&world, ops[k]);
        release(x[k], whole_sum, world.size, (size_t)k, "one of many");
    }
}

// Numbers whose sum depends on the order, because their signs differ and most need all bits.
static double rough(int rank, size_t i) { return (whole(rank, i * 13) * 1001 - 7000) / (double)(3 + i % 1000); }
CLAIM(sums_in_any_order_are_the_same_twice_and_on_every_rank) {
    const size_t n = 100003, bytes = n * sizeof(float);
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        float *x = buffer(n, rough, world.rank, 0).p, *y = buffer(n, rough, world.rank, 0).p;
        comm_wait(&world, comm_all_reduce(&world, x, n, COMM_F32));
        comm_wait(&world, comm_all_reduce(&world, y, n, COMM_F32));
        require(memcmp(x, y, bytes) == 0, "%s: the same sum twice differs", mode_names[mode]);
        comm_wait(&world, comm_broadcast(&world, y, n, COMM_F32, 0));
        require(memcmp(x, y, bytes) == 0, "%s: ranks have different sums", mode_names[mode]);
        device_free(x);
        device_free(y);
    }
}

// ---- counted bytes ----
// All ranks together really send N times the formula for one rank (comm_host_sum). Bytes that a library sends are not counted.
CLAIM(counts_are_the_formulas_and_what_is_really_sent) {
    const size_t n = 300007, N = (size_t)world.size, all = (N - 1) * N;
    const unsigned long long calls[COMM_KINDS] = { 2, 1, 1, 1, 1, 1, 0, 0, 0, 0 };
    const size_t bytes[COMM_KINDS] = {
        2 * (4 * n + 10) * (N - 1), 4 * n * all, 4 * n * all, 1998 * all, 100 * N * all, 1001 * (N - 1), 0, 0, 0, 0
    };
    CommPart from[MOST_RANKS], to[MOST_RANKS]; // 100 elements for the next rank, 200 for the one after it, ...
    for (int q = 0; q < world.size; q++) {
        CommPart arrives = { 100 * ((size_t)(world.rank - q - 1 + world.size) % N + 1), (size_t)q * n };
        CommPart sent = { 100 * ((size_t)(q - world.rank - 1 + world.size) % N + 1), 0 };
        from[q] = arrives;
        to[q] = sent;
    }
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
        comm_wait(&world, comm_all_to_all_v(&world, y, from, x, to, COMM_BF16));
        comm_wait(&world, comm_broadcast(&world, x, 1001, COMM_BYTE, world.size - 1));
        memcpy(after, world.stats, sizeof after);
        for (int k = 0; k < COMM_KINDS; k++) {
            CommStats *a = &before[k], *b = &after[k];
            require(b->calls - a->calls == calls[k], "%s: %llu calls", comm_kind_names[k], b->calls - a->calls);
            require(b->bytes_times_N - a->bytes_times_N == bytes[k], "%s: bytes", comm_kind_names[k]);
            require(b->exposed >= a->exposed && b->busy >= a->busy, "%s: time goes backwards", comm_kind_names[k]);
            double sent = comm_host_sum(&world, (double)(b->posted - a->posted));
            bool by_library = (k == COMM_ALL_REDUCE && mode == LIBRARY) || k == COMM_BROADCAST;
            require(by_library || sent == (double)bytes[k], "%s, %s: %.0f bytes", comm_kind_names[k], mode_names[mode], sent);
        }
    }
    free(x); free(y);
}

static double exposed_of_world(void) {
    return world.stats[COMM_ALL_REDUCE].exposed + world.stats[COMM_SEND].exposed + world.stats[COMM_RECV].exposed;
}
// Covers groups of two sizes, one of which sends more than the other, a communicator of one rank, and a message.
CLAIM(totals_are_what_this_rank_sends_also_within_groups) {
    const int N = world.size, first = N > 1 ? (N + 1) / 3 : 1; // 1+1, 1+2, 1+3, 3+5
    const int mine = world.rank < first ? first : N - first;
    const size_t n = 1003, split = comm_split_bytes(&world, mine), before_split = device_memory(MEMORY_COMMUNICATION);
    Comm group, alone;
    comm_split(&group, &world, "group", world.rank >= first);
    comm_alone(&alone, &world, "alone");
    size_t taken = device_memory(MEMORY_COMMUNICATION) - before_split;
    require(group.size == mine && taken == split, "a split of %d ranks takes %zu bytes, not %zu", group.size, taken, split);
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
    require(fabs(sent - expected) < 1e-6, "this rank sent %.9g bytes, not %.9g", sent, expected);
    double of_parts = alone.stats[COMM_ALL_REDUCE].exposed + group.stats[COMM_ALL_GATHER].exposed + group.stats[COMM_ALL_TO_ALL].exposed;
    exposed = comm_rank_exposed(&world) - exposed;
    of_world = exposed_of_world() - of_world;
    require(fabs(exposed - of_world - of_parts) < 1e-9, "%g s are exposed", exposed);
    require(group.stats[COMM_ALL_GATHER].exposed > 0, "a split exposes nothing");
    free(x); free(y);
    comm_free(&alone); comm_free(&group);
}

// ---- strict mode ----
static bool all_nan(const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) if (!isnan(x[i])) return false;
    return true;
}
static void set_all(float* x, size_t n, float value) { for (size_t i = 0; i < n; i++) x[i] = value; }
// Waits for an operation whose output (n) must be NaN until then. First sets its input (m), which it reads only now.
static void wait_strictly(CommOp op, const float* out, size_t n, float* in, size_t m, float written) {
    require(all_nan(out, n), "an output can be read before its wait");
    set_all(in, m, written);
    comm_wait(&world, op);
}
CLAIM(in_strict_mode_outputs_are_nan_but_for_a_ranks_own_shard_and_inputs_are_read_at_the_wait) {
    if (!world.world->strict) return;
    enum { n = 5 };
    const size_t N = (size_t)world.size;
    const float ranks = (float)N;
    float x[n], full[MOST_RANKS * n], shard[n], all[MOST_RANKS * n], *own = full + (size_t)world.rank * n;
    set_all(x, n, 1);
    set_all(full, N * n, 1);
    CommOp reduce = comm_all_reduce(&world, x, n, COMM_F32), scatter = comm_reduce_scatter(&world, shard, full, n, COMM_F32);
    wait_strictly(comm_all_gather(&world, all, full, n, COMM_F32), all, N * n, full, N * n, 100);
    wait_strictly(reduce, x, n, x, 1, 7); // an early write is lost in place
    wait_strictly(scatter, shard, n, NULL, 0, 0); // still NaN after the other waits
    require(x[0] == ranks && x[4] == ranks, "in place: %g", x[0]);
    require(shard[0] == 100 * ranks && all[0] == 100, "an early write into an input had no effect: %g, %g", shard[0], all[0]);

    float* on_host = (float*)offload_alloc(n * sizeof(float));
    wait_strictly(comm_reduce_scatter(&world, on_host, full, n, COMM_F32), on_host, n, full, N * n, 50);
    require(on_host[0] == 50 * ranks, "an early write into an input had no effect: %g", on_host[0]);
    require(all_nan(own, n), "what a GPU uses as scratch can be read on a CPU");
    wait_strictly(comm_all_gather(&world, full, on_host, n, COMM_F32), full, N * n, on_host, n, 4);
    offload_free(on_host);
    require(full[0] == 4 && full[(N - 1) * n] == 4, "an early write into a shard on the host had no effect: %g", full[0]);

    set_all(full, N * n, 3);
    scatter = comm_reduce_scatter(&world, own, full, n, COMM_F32);
    require(N == 1 || !isnan(own[world.rank == 0 ? n : -1]), "another part than its output becomes NaN");
    wait_strictly(scatter, own, n, NULL, 0, 0);
    CommOp gather = comm_all_gather(&world, full, own, n, COMM_F32);
    for (size_t q = 0; q < N; q++) require(q == (size_t)world.rank || all_nan(full + q * n, n), "rank %zu's shard can be read before the wait", q);
    require(own[0] == 3 * ranks && own[n - 1] == 3 * ranks, "this rank's shard cannot be read before the wait: %g", own[0]);
    set_all(own, n, 8); // in place this is lost
    comm_wait(&world, gather);
    require(full[0] == 3 * ranks && full[N * n - 1] == 3 * ranks, "in place: %g", full[0]);
    wait_strictly(comm_all_to_all(&world, all, full, n, COMM_F32), all, N * n, full, N * n, 100 + (float)world.rank);
    for (size_t q = 0; q < N; q++) require(all[q * n] == 100 + (float)q, "an early write had no effect: %g", all[q * n]);

    CommPart from[MOST_RANKS], to[MOST_RANKS];
    for (int q = 0; q < world.size; q++) {
        CommPart arrives = { 2, (size_t)q * n + 1 }, sent = { 2, 1 };
        from[q] = arrives;
        to[q] = sent;
    }
    set_all(all, N * n, 6);
    CommOp parts = comm_all_to_all_v(&world, all, from, full, to, COMM_F32);
    for (size_t q = 0; q < N; q++) {
        const float* row = all + q * n;
        require(all_nan(row + 1, 2), "rank %zu's part can be read before the wait", q);
        require(row[0] == 6 && row[3] == 6 && row[4] == 6, "what is around the part of rank %zu becomes NaN", q);
    }
    set_all(full, N * n, 200 + (float)world.rank);
    comm_wait(&world, parts);
    for (size_t q = 0; q < N; q++) require(all[q * n + 2] == 200 + (float)q, "an early write had no effect: %g", all[q * n + 2]);
    wait_strictly(comm_broadcast(&world, x, n, COMM_F32, 0), x, n, NULL, 0, 0); // NaN even on the root
    require(x[2] == ranks, "broadcast: %g", x[2]);
}

// ---- time ----
static CommEvent seen;
static int seen_count;
static void see(void* self, const CommEvent* e) {
    require(self == &seen, "the observer's own pointer");
    if (e->kind == COMM_ALL_REDUCE) seen = *e;
    seen_count++;
}

static bool is_finished(CommOp op) {
    pthread_mutex_lock(&world.world->lock);
    bool finished = world.slots[op % COMM_IN_FLIGHT].finished;
    pthread_mutex_unlock(&world.world->lock);
    return finished;
}
static bool is_called_by(const Callers* callers, const char* function) {
    CallerNames names = { NULL, NULL, 0 };
    Caller stack[4];
    caller_names_add(&names, callers);
    bool is = caller_names_read(&names) && callers_stack(&names, callers, stack, 4) > 0 && strcmp(stack[0].function, function) == 0;
    caller_names_free(&names);
    return is;
}
// An operation starts and finishes while this thread computes without calling llmc/comm/.
static void finishes_without_this_thread(float* x, size_t n, const char* mode) {
    int before = seen_count;
    for (size_t i = 0; i < n; i++) x[i] = 1;
    comm_observe(&world, see, &seen);
    CommOp op = comm_all_reduce(&world, x, n, COMM_F32);
    volatile double work = 1;
    for (double begun = now_seconds(); !is_finished(op) && now_seconds() - begun < 60;) // rather fail than hang
        for (int i = 0; i < 1000000; i++) work = work * 0.999999 + 1;
    require(is_finished(op), "%s: it was not finished when the wait began", mode);
    comm_wait(&world, op);
    comm_observe(&world, NULL, NULL);
    require(seen.number == op && seen.n == n && strcmp(seen.communicator, "world") == 0, "another operation was observed");
    require(is_called_by(&seen.callers, __func__) && seen.ranks == world.size, "its caller is another function");
    require(seen.data == x && seen.bytes == n * sizeof(float), "it is about other data");
    require(seen.issued <= seen.started && seen.started <= seen.finished && seen.finished <= seen.wait_begun &&
          seen.wait_begun <= seen.wait_ended, "its times are in another order");
    require(x[0] == (float)world.size && x[n - 1] == (float)world.size, "the sum is %g", x[0]);
    require(seen_count == before + 1, "%d operations were observed", seen_count - before);
}
CLAIM(communication_goes_on_while_this_thread_computes) {
    if (world.world->strict) return; // in strict mode it begins at its wait
    float* x = xcalloc(MANY, sizeof(float));
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        finishes_without_this_thread(x, MANY, mode_names[mode]);
    }
    free(x);
}

// The operations that the emulated link carried: when each began, and the least seconds that its bytes need.
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
    require(num_carried < 4096, "too many operations");
    require(e->issued <= e->started + 1e-9 && e->finished - e->started > x.needs - 1e-9, "%s of %zu was over after %.6f s, not %.6f s",
          comm_kind_names[e->kind], e->n, e->finished - e->started, x.needs);
    carried[num_carried++] = x;
}
static int compare_carried(const void* a, const void* b) {
    double x = ((const Carried*)a)->from, y = ((const Carried*)b)->from;
    return (x > y) - (x < y);
}
// Runs every kind of operation on communicators that share the link. comm_bench --emulate-link checks the results.
static void send_all_kinds(void) {
    Comm half;
    const size_t n = MANY / 4, own = n * (size_t)world.rank;
    float *x = xcalloc(MANY * (size_t)world.size, sizeof(float)), *y = xcalloc(n * (size_t)world.size, sizeof(float));
    float* on_host = (float*)offload_alloc(n * sizeof(float));
    for (int mode = 0; mode < MODES; mode++) {
        set_mode(mode);
        comm_wait(&world, comm_all_reduce(&world, x, MANY, COMM_F32));
    }
    comm_wait(&world, comm_reduce_scatter(&world, y, x, n, COMM_F32));
    comm_wait(&world, comm_reduce_scatter(&world, x + own, x, n, COMM_F32));
    comm_wait(&world, comm_reduce_scatter(&world, on_host, x, n, COMM_F32));
    comm_wait(&world, comm_all_gather(&world, x, y, n, COMM_F32));
    comm_wait(&world, comm_all_gather(&world, x, x + own, n, COMM_F32));
    comm_wait(&world, comm_all_gather(&world, x, on_host, n, COMM_F32));
    comm_wait(&world, comm_all_to_all(&world, y, x, n, COMM_F32));
    for (int root = 0; root < world.size; root++) comm_wait(&world, comm_broadcast(&world, x, n, COMM_F32, root));
    free(x); free(y);
    offload_free(on_host);
    exchange_uneven_parts(n, COMM_F32);
    exchange_with_all();
    comm_split(&half, &world, "half", world.rank % 2);
    all_reduce_on_both(&half);
    comm_collect_times(&half);
    comm_free(&half);
}
// A rank's parts arrive only when the link has had time for all of them, even on ranks that send nothing.
static void send_from_one_rank_to_all(void) {
    const size_t n = MANY / 4, others = (size_t)world.size - 1;
    CommPart from[MOST_RANKS], to[MOST_RANKS];
    float *x = xcalloc(n, sizeof(float)), *y = xcalloc(n, sizeof(float));
    memset(from, 0, sizeof from);
    memset(to, 0, sizeof to);
    for (int q = 1; q < world.size && world.rank == 0; q++) to[q].n = n;
    from[0].n = world.rank > 0 ? n : 0;
    comm_barrier(&world);
    world.world->options.link /= 10; // far slower than the messages are
    double begun = now_seconds(), needs = (double)(others * n * 4) / (world.world->options.link * 1e9 / 8);
    comm_wait(&world, comm_all_to_all_v(&world, y, from, x, to, COMM_F32));
    double took = now_seconds() - begun;
    require(took >= needs, "rank 0's parts were here after %.6f s, not %.6f s", took, needs);
    free(x); free(y);
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
    send_from_one_rank_to_all();
    comm_barrier(&world);
    world.world->options.link = kept;
    qsort(carried, (size_t)num_carried, sizeof *carried, compare_carried);
    require(num_carried >= 10, "only %d operations were seen", num_carried);
    for (int i = 1; i < num_carried; i++) // times differ by rounding only
        require(carried[i].from > carried[i - 1].from + carried[i - 1].needs - 1e-6, "operation %d took the link %g s early", i,
              carried[i - 1].from + carried[i - 1].needs - carried[i].from);
}

// A step has more operations than the list of waits holds. An observer sees none during the step, and all in order after it.
static CommOp next_seen;
static void see_in_order(void* self, const CommEvent* e) {
    (void)self;
    require(e->number == next_seen, "operation #%lld was seen before #%lld", e->number, next_seen);
    next_seen++;
}
CLAIM(an_observer_sees_a_long_step_when_it_is_over) {
    enum { LONG = 2 * COMM_WAITED_CAPACITY + 100 };
    float x = 0;
    comm_observe(&world, see_in_order, NULL);
    CommOp first = next_seen = world.issued;
    for (int k = 0; k < LONG; k++) comm_wait(&world, comm_broadcast(&world, &x, 1, COMM_F32, 0));
    require(next_seen == first, "%lld operations were seen within the step", next_seen - first);
    comm_collect_times(&world);
    require(next_seen == first + LONG, "%lld of %d operations were seen", next_seen - first, LONG);
    comm_observe(&world, NULL, NULL);
}

// ---- mistakes ----
static bool no_pair(int a, int b, int N) { return a + b > N * N; }
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
    MISTAKE("connect-twice", comm_connect(&world, every_pair))
    MISTAKE("send-to-no-pair", comm_split(&c, &world, "part", 0); comm_connect(&c, no_pair); comm_send(&c, x, 1, COMM_F32, !c.rank))
    MISTAKE("no-such-root", comm_broadcast(&world, x, 1, COMM_F32, world.size))
    MISTAKE("sum-of-bytes", comm_reduce_scatter(&world, x, x, 1, COMM_BYTE))
    MISTAKE("overlap", comm_all_to_all(&world, x, x + last, 1, COMM_F32))
    MISTAKE("overlap-before", comm_all_to_all(&world, x + last, x, 1, COMM_F32))
    MISTAKE("parts-overlap", CommPart from[] = { { 2, 0 }, { 2, 1 } }, to[] = { { 2, 0 }, { 2, 2 } };
            comm_all_to_all_v(&world, x, from, x + 4, to, COMM_F32))
    MISTAKE("parts-overwritten", CommPart from[] = { { 1, 0 }, { 1, 1 } }, to[] = { { 1, 1 }, { 1, 2 } };
            comm_all_to_all_v(&world, x, from, x, to, COMM_F32))
    MISTAKE("own-part-differs", CommPart from[] = { { 2, 0 } }, to[] = { { 3, 0 } };
            comm_all_to_all_v(&world, x, from, x + 4, to, COMM_F32))
    MISTAKE("split-in-flight", comm_all_reduce(&world, x, 1, COMM_F32); comm_split(&c, &world, "part", 0))
    MISTAKE("split-twice", comm_split(&c, &world, "part", 0); comm_split(&d, &world, "part", 0))
    MISTAKE("world-first", comm_split(&c, &world, "part", 0); comm_free(&world))
    MISTAKE("orders-differ", // found in strict mode, like the next one
            CommOp ops[] = { comm_all_reduce(&world, x, 2, COMM_F32), comm_all_reduce(&world, x + 2, 2, COMM_F32) };
            comm_wait(&world, ops[world.rank % 2]))
    MISTAKE("sizes-differ", comm_wait(&world, comm_all_reduce(&world, x, 2 + (size_t)world.rank, COMM_F32)))
    MISTAKE("parts-differ", // rank 1 sends one element more than rank 0 expects
            CommPart from[] = { { 2, 0 }, { 2, 2 } }, to[] = { { 2 + (size_t)world.rank, 4 }, { 2, 4 } };
            comm_wait(&world, comm_all_to_all_v(&world, x, from, x, to, COMM_F32)))
    MISTAKE("message-too-long",
            comm_wait(&world, world.rank ? comm_recv(&world, x, 2, COMM_F32, 0) : comm_send(&world, x, 3, COMM_F32, 1)))
    die("there is no mistake '%s'", name);
}

// ---- the program ----
bool does_another_thing(OptionTable* table) {
    bool dies = table->operand_count == 2 && strcmp(table->operands[0], "die") == 0;
    if (dies) die_by(table->operands[1]);
    return dies;
}
