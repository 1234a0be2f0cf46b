/*
comm_bench - measures and checks the collectives of llmc/comm/comm.h on every backend, with the options and columns of nccl-tests.

    make build/comm_bench && mpirun -np 4 build/comm_bench --op all -b 8 -e 64M -f 2
    ... --allreduce ring       all-reduce with llmc/comm/ring.h; library: with MPI_Iallreduce; by default in rank order
    ... --json links.json      also writes the latency and the bandwidth that fit the sweep

All collectives share one loop. A row of the table `collectives` describes the buffers of a collective, from which its expected
results follow, and its bandwidth. dev/kernels/comm/README.md explains the columns and derives the factors of bus bandwidth.
This program is also the test of the collectives' results: test/tools/test_comm_bench.py runs it on CPUs, and
test/kernels/test_gpu_comm.py on GPUs.
*/
#if defined(CUDA_EMULATOR) || defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define COMM_PIECE (1 << 14) // these builds are slow, so a few numbers must already form several pieces
#define NCCL_PIECE (1 << 14)
#endif
#include "../../../llmc/comm/comm.h"
#include "../../../llmc/watch/fault.h"
#include "../../../llmc/comm/say_once.h"
#include "../others.h"
#include "link_fit.h"
#include <jansson.h>
#include <limits.h>

// ---- options ----
typedef struct {
    int op, type;                            // index of `collectives`, or ALL_COLLECTIVES; a CommType, or ALL_TYPES
    const char *min_text, *max_text, *step_text;
    size_t min_bytes, max_bytes, step_bytes; // the three texts, parsed
    double factor;
    long long iters, warmup, check, root, groups;
    int on_host;
    const char *json, *fault;
    CommOptions comm;
} BenchOptions;

static void options_bench(OptionTable* t, BenchOptions* o) {
    memset(o, 0, sizeof *o);
    o->min_text = "8"; o->max_text = "32M"; o->step_text = "";
    o->factor = 4;
    o->iters = 20; o->warmup = 5; o->check = o->groups = 1;
    o->json = o->fault = "";
    option_choice(t, "op", &o->op, "all-reduce|reduce-scatter|all-gather|all-to-all|all-to-all-v|broadcast|all",
                  "the collective");
    option_text(t, "minbytes", &o->min_text, "SIZE", "first size in bytes, of the larger buffer; K, M or G may follow it");
    option_text(t, "maxbytes", &o->max_text, "SIZE", "largest size in bytes");
    option_float(t, "stepfactor", &o->factor, 1.01, 1e6, "factor from one size to the next");
    option_text(t, "stepbytes", &o->step_text, "SIZE", "bytes from one size to the next; '': --stepfactor is used");
    // fewer than COMM_WAITED_CAPACITY, so that llmc/comm/ need not collect times between the timed operations
    option_int(t, "iters", &o->iters, 1, 1000, "timed operations per size");
    option_int(t, "warmup_iters", &o->warmup, 0, 1000, "operations before the timed ones, per size");
    option_int(t, "check", &o->check, 0, 1000, "operations after the timed ones, per size, with every number checked");
    option_choice(t, "datatype", &o->type, "fp32|bf16|fp16|fp64|byte|all", // as CommType
                  "the type of the elements; bytes are not added");
    option_int(t, "root", &o->root, -1, MAX_RANKS, "the rank that broadcasts; -1: one after another");
    for (int i = 0; i < t->count; i++) t->specs[i].letter = "obefinwcdr"[i]; // the letters of nccl-tests, and o
    option_int(t, "groups", &o->groups, 1, MAX_RANKS,
               "communicators that work at once: rank r is in number r % groups");
    option_flag(t, "offload", &o->on_host,
                "a rank's part is in host memory, which only reduce-scatter and all-gather can do");
    options_comm(t, &o->comm);
    option_flag(t, "deterministic", &o->comm.ordered, "sums in rank order");
    option_text(t, "json", &o->json, "FILE", "write latency and bandwidth of each collective here; '': nowhere");
    option_text(t, "fault", &o->fault, "RANK:LINE:FAULT", "for tests: what that rank does in that line of the table:"
                " kill, hang, skip (leave out an operation), bitflip (flip a bit of its input, when it is checked) or slow"
                " (be 50 ms late, in all later lines too)");
}

static size_t parse_bytes(const char* name, const char* text) {
    char* end;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    const char *units = "KMG", *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    size_t bytes = (size_t)n;
    bool fits = errno == 0;
    for (int i = 0; unit && i <= unit - units; i++) fits &= size_multiply(bytes, 1024, &bytes);
    require(isdigit((unsigned char)text[0]) && end[unit ? 1 : 0] == '\0',
            "--%s wants a size like 512, 64K, 8M or 1G, not '%s'", name, text);
    require(fits && bytes >= 1 && bytes <= (size_t)1 << 40, "--%s must be between 1 and 1024G, not %s", name, text);
    return bytes;
}

static void read_sizes(BenchOptions* o, OptionTable* t) {
    o->min_bytes = parse_bytes("minbytes", o->min_text);
    o->max_bytes = parse_bytes("maxbytes", o->max_text);
    o->step_bytes = o->step_text[0] ? parse_bytes("stepbytes", o->step_text) : 0;
    require(o->min_bytes <= o->max_bytes, "--minbytes %s is more than --maxbytes %s", o->min_text, o->max_text);
    require(o->step_bytes == 0 || !option_given(t, "stepfactor"), "--stepbytes excludes --stepfactor: leave one of them out");
}

static size_t next_size(const BenchOptions* o, size_t bytes) {
    if (o->step_bytes > 0) return bytes + o->step_bytes;
    return size_max(bytes + 1, (size_t)((double)bytes * o->factor));
}

// ---- numbers that can be checked ----

// One operation with `count` elements per part, as nccl-tests counts them.
typedef struct {
    size_t count;
    CommType type;
    int rank, N, root;
    bool in_rank_order; // sums are added in rank order
    uint64_t seed;
    const CommPart *from, *to; // views (N): the uneven parts that this rank receives and sends
} Shape;

static double rounded(CommType t, double x) {
    return t == COMM_F32    ? (double)(float)x
           : t == COMM_BF16 ? (double)float_from_bf16_bits(bf16_bits_from_float((float)x))
           : t == COMM_F16  ? (double)float_from_f16_bits(f16_bits_from_float((float)x)) : x;
}
// Returns element i of the input of rank q. If sums are in rank order, the sum of these numbers depends on the order: they have
// both signs, and sizes that differ by a factor of 1000. Otherwise at most 64 ranks contribute more than 0, and the sum is at
// most 255. Every partial sum is then an integer that each type represents, so results are exact in any order of addition.
static double number(const Shape* s, int q, size_t i) {
    size_t ranks = (size_t)s->N, every = ceil_div(ranks, 64), highest = 255 / size_min(ranks, 64);
    uint64_t h = (uint64_t)i * 0x9e3779b97f4a7c15u + (uint64_t)q * 0xd1b54a32d192ed03u + s->seed * 0x8cb92ba72f3d8dd7u;
    h = (h ^ h >> 32) * 0xff51afd7ed558ccdu;
    double size = ((double)(h >> 40) * 0x1p-24 + 0.01) * (h & 6 ? 1 : 1000);
    if (s->in_rank_order) return rounded(s->type, h & 1 ? size : -size);
    return (i + (size_t)q) % every == 0 ? (double)(1 + (h >> 40) % highest) : 0;
}
static void element_set(char* p, size_t i, CommType t, double x) {
    float f = (float)x;
    if (t == COMM_F64) memcpy(p + 8 * i, &x, 8);
    else if (t == COMM_BYTE) p[i] = (char)(uint8_t)x;
    else convert_slice(p + i * comm_type_size(t), (DType)t, &f, DTYPE_F32, 1);
}

// ---- the collectives ----

typedef struct {
    CommKind kind;
    bool sums, has_root;
    bool reads_parts, writes_parts;             // the input or the output consists of N parts, not one
    bool uneven;                                // the N parts have `count` elements only on average
    bool out_of_place, in_place;                // the forms that comm.h supports
    CommOp (*run)(Comm* c, void* out, const void* in, size_t count, CommType type); // in is NULL if one buffer is both
    int crossings; // times that N - 1 of N even parts cross the busiest link (README.md); 0: the whole buffer crosses once
} Collective;
static const Collective collectives[] = {       // in the order of --op
    { COMM_ALL_REDUCE, true, false, false, false, false, false, true, NULL, 2 },
    { COMM_REDUCE_SCATTER, true, false, true, false, false, true, true, comm_reduce_scatter, 1 },
    { COMM_ALL_GATHER, false, false, false, true, false, true, true, comm_all_gather, 1 },
    { COMM_ALL_TO_ALL, false, false, true, true, false, true, false, comm_all_to_all, 1 },
    { COMM_ALL_TO_ALL_V, false, false, true, true, true, true, false, NULL, 0 },
    { COMM_BROADCAST, false, true, false, false, false, false, true, NULL, 0 },
};
enum { ALL_COLLECTIVES = sizeof collectives / sizeof collectives[0], ALL_TYPES = COMM_BYTE + 1 };

// Cuts a buffer of N * count elements into uneven parts, in the order in which this function counts them: part k has about k + 1
// of N (N + 1) / 2 shares, and goes to rank (rank + k + 1) % N. So a rank sends least to the next one, and most to itself.
// Returns where part k begins.
static size_t uneven_begin(const Shape* s, size_t k) { return s->count * k * (k + 1) / ((size_t)s->N + 1); }
static CommPart uneven_part(const Shape* s, int k) {
    size_t begin = uneven_begin(s, (size_t)k);
    CommPart part = { uneven_begin(s, (size_t)k + 1) - begin, begin };
    return part;
}
// Element i of a part is at the same place in the input as in the output.
static int uneven_source(const Shape* s, size_t i) {
    int k = 0;
    while (uneven_begin(s, (size_t)k + 1) <= i) k++;
    return (s->rank + s->N - k - 1) % s->N;
}

// Returns element i of the result: the number of one rank, or the sum over all ranks in their order, in fp32 (fp64: in double).
// If the input consists of parts, the element is in this rank's part.
static double expected_number(const Collective* k, const Shape* s, size_t i) {
    if (k->uneven) return number(s, uneven_source(s, i), i);
    size_t at = (k->reads_parts ? (size_t)s->rank * s->count : 0) + (k->writes_parts ? i % s->count : i);
    if (!k->sums) return number(s, k->writes_parts ? (int)(i / s->count) : s->root, at);
    double sum = 0;
    for (int q = 0; q < s->N; q++) {
        sum += number(s, q, at);
        if (s->type != COMM_F64) sum = (double)(float)sum;
    }
    return sum;
}

static CommOp run(const Collective* k, Comm* c, void* out, const void* in, const Shape* s) {
    if (k->run) return k->run(c, out, in, s->count, s->type);
    if (k->uneven) return comm_all_to_all_v(c, out, s->from, in, s->to, s->type);
    return k->has_root ? comm_broadcast(c, out, s->count, s->type, s->root) : comm_all_reduce(c, out, s->count, s->type);
}
static double bus_factor(const Collective* k, int N) {
    if (k->uneven) return (double)(N - 1) / (N + 1);
    return k->crossings ? (double)k->crossings * (N - 1) / N : 1;
}

// ---- one measurement ----
enum { DEVICE_FIRST, DEVICE_SECOND, HOST, MEMORIES };
enum { SPARE = 16 }; // bytes behind the longest buffer, which must not change
typedef struct {
    BenchOptions o;
    Comm world, part;       // part: this rank's group, if there are several
    Comm* comm;             // the one that is measured
    Control control;
    Fault fault;
    char* memory[MEMORIES]; // (max_bytes + SPARE) owned; HOST only with --offload. In place, the first contains both
    char* host;             // (max_bytes + SPARE) owned
    CommPart from[MAX_RANKS], to[MAX_RANKS]; // of a Shape
    long long line;         // number of the table's line, from 1
    const char* unfit;      // a collective whose times gave no latency and bandwidth, or NULL
} Bench;
typedef struct {
    char *in, *out, *scratch; // views; scratch (count) may be overwritten
    size_t in_elements, out_elements;
} Buffers;

static bool works(const Bench* b, const Collective* k, bool in_place) {
    if (b->o.on_host && (in_place || k->reads_parts == k->writes_parts)) return false;
    return in_place ? k->in_place : k->out_of_place;
}
static Buffers buffers_of(const Bench* b, const Collective* k, const Shape* s, bool in_place) {
    size_t mine = (size_t)s->rank * s->count * comm_type_size(s->type), parts = (size_t)s->N;
    Buffers x = { b->memory[DEVICE_FIRST], b->memory[DEVICE_SECOND], NULL,
                  s->count * (k->reads_parts ? parts : 1), s->count * (k->writes_parts ? parts : 1) };
    if (in_place) { // one is the whole buffer, the other this rank's part of it
        x.out = x.in + (k->reads_parts ? mine : 0);
        x.in += k->writes_parts ? mine : 0;
    } else if (b->o.on_host && k->reads_parts) {
        x.scratch = x.in + mine;
        x.out = b->memory[HOST];
    } else if (b->o.on_host) x.in = b->memory[HOST];
    return x;
}
static size_t bytes_used(const Buffers* x, CommType t) {
    return size_max(x->in_elements, x->out_elements) * comm_type_size(t) + SPARE;
}

static void put(const Bench* b, char* to, size_t bytes) {
    if (is_offloaded(to)) memcpy(to, b->host, bytes);
    else host_to_device(to, b->host, bytes);
    device_synchronize(); // the copy reads host
}
// Returns the filler of all bytes outside of the input: as a number it equals no input, and it differs by rank.
static int filler(const Bench* b) { return 0x5a + b->world.rank % 8; }
// Fills the input with its numbers, and everything else with the filler. `flips` gives the first number the wrong sign.
static void fill(const Bench* b, const Shape* s, const Buffers* x, bool flips) {
    size_t size = comm_type_size(s->type);
    memset(b->host, filler(b), bytes_used(x, s->type));
    for (int m = 0; m < MEMORIES; m++) if (b->memory[m]) put(b, b->memory[m], bytes_used(x, s->type));
    for (size_t i = 0; i < x->in_elements; i++) element_set(b->host, i, s->type, number(s, s->rank, i));
    if (flips && s->count > 0) b->host[size - 1] ^= (char)0x80; // numbers are little-endian
    put(b, x->in, x->in_elements * size);
}

// Returns the seconds of one operation, the mean over ranks. Operations follow one another without a wait between them.
static double time_operations(Bench* b, const Collective* k, const Shape* s, const Buffers* x) {
    for (long long i = 0; i < b->o.warmup; i++) comm_wait(b->comm, run(k, b->comm, x->out, x->in, s));
    comm_barrier(&b->world);
    comm_collect_times(&b->world);
    double begin = now_seconds();
    for (long long i = 0; i < b->o.iters; i++) comm_wait(b->comm, run(k, b->comm, x->out, x->in, s));
    device_synchronize();
    double seconds = (now_seconds() - begin) / (double)b->o.iters;
    return comm_host_sum(&b->world, seconds) / b->world.size;
}

// Returns the index of the address `there` in an array that begins at `begin`, or a number far beyond its end if the address is
// elsewhere.
static size_t element_of(const char* begin, const char* there, size_t size) {
    return ((uintptr_t)there - (uintptr_t)begin) / size;
}

// Returns the number of elements with wrong bits: of the output, of the input, which must be unchanged, and of the memory around
// and behind both.
static long long count_wrong(const Bench* b, const Collective* k, const Shape* s, const Buffers* x) {
    size_t size = comm_type_size(s->type), bytes = bytes_used(x, s->type);
    long long wrong = 0;
    device_synchronize(); // results in host memory are complete
    for (int m = 0; m < MEMORIES; m++) {
        if (b->memory[m] == NULL) continue;
        if (m == HOST) memcpy(b->host, b->memory[m], bytes);
        else device_to_host(b->host, b->memory[m], bytes);
        for (size_t at = 0; at < bytes; at += size) {
            char expected[8], *there = b->memory[m] + at;
            size_t out = element_of(x->out, there, size), in = element_of(x->in, there, size);
            if (element_of(x->scratch, there, size) < s->count) continue;
            if (out < x->out_elements) element_set(expected, 0, s->type, expected_number(k, s, out));
            else if (in < x->in_elements) element_set(expected, 0, s->type, number(s, s->rank, in));
            else memset(expected, filler(b), size);
            wrong += memcmp(b->host + at, expected, size) != 0;
        }
    }
    return wrong;
}

// Returns the number of wrong elements over all ranks. Each group uses its own numbers.
static long long check_operations(Bench* b, const Collective* k, Shape s, const Buffers* x) {
    long long wrong = 0;
    int rank = b->world.rank;
    for (long long round = 1; round <= b->o.check; round++) {
        s.seed = (uint64_t)(round * b->o.groups + rank % b->o.groups);
        fill(b, &s, x, fault_now(&b->fault, rank, b->line, FAULT_BITFLIP));
        if (fault_now(&b->fault, rank, b->line, FAULT_SKIP)) b->world.world->notes.skips = true;
        comm_wait(b->comm, run(k, b->comm, x->out, x->in, &s));
        wrong += count_wrong(b, k, &s, x);
    }
    return (long long)comm_host_sum(&b->world, (double)wrong);
}

// ---- MPI's own calls ----

// Ranks that wait inside MPI keep their cores busy, so with more ranks than cores these times would mostly measure the scheduler.
static bool compares_with_mpi(const Bench* b, const Shape* s) {
#if USE_MPI
    MpiEngine* e = (MpiEngine*)b->world.world->mpi;
    bool on_cpus = strncmp(device_name(), "CPU", 3) == 0 && !b->o.on_host;
    return e && b->comm->backend == &comm_mpi && on_cpus && !e->crowded && s->count * (size_t)s->N < INT_MAX;
#else
    (void)b; (void)s;
    return false;
#endif
}
#if USE_MPI
static int mpi_sent[MAX_RANKS], mpi_sent_at[MAX_RANKS], mpi_received[MAX_RANKS], mpi_received_at[MAX_RANKS];
// Converts uneven parts to what MPI_Alltoallv takes.
static void mpi_uneven_parts(const Shape* s) {
    for (int q = 0; q < s->N; q++) {
        mpi_sent[q] = (int)s->to[q].n;
        mpi_sent_at[q] = (int)s->to[q].at;
        mpi_received[q] = (int)s->from[q].n;
        mpi_received_at[q] = (int)s->from[q].at;
    }
}
// Calls MPI's own function for the collective, in place if MPI supports that.
static void run_mpi(const Collective* k, Comm* c, const Buffers* x, const Shape* s) {
    MPI_Comm mpi = ((MpiLink*)c->link)->mpi;
    MPI_Datatype t = mpi_type(s->type);
    MPI_Op sum = mpi_sum((MpiEngine*)c->world->mpi, s->type);
    int n = (int)s->count;
    int rc = k->kind == COMM_ALL_REDUCE ? MPI_Allreduce(MPI_IN_PLACE, x->out, n, t, sum, mpi)
           : k->kind == COMM_REDUCE_SCATTER ? MPI_Reduce_scatter_block(MPI_IN_PLACE, x->in, n, t, sum, mpi)
           : k->kind == COMM_ALL_GATHER ? MPI_Allgather(MPI_IN_PLACE, 0, t, x->out, n, t, mpi)
           : k->kind == COMM_ALL_TO_ALL ? MPI_Alltoall(x->in, n, t, x->out, n, t, mpi)
           : k->kind == COMM_ALL_TO_ALL_V ? MPI_Alltoallv(x->in, mpi_sent, mpi_sent_at, t,
                                                          x->out, mpi_received, mpi_received_at, t, mpi)
           : MPI_Bcast(x->out, n, t, s->root, mpi);
    mpi_check(rc, "MPI's own call");
}
// Like time_operations, but with none of our code between the calls. The communication thread makes no MPI calls meanwhile.
static double time_mpi(Bench* b, const Collective* k, const Shape* s, const Buffers* x) {
    Comm* c = b->comm;
    mpi_uneven_parts(s);
    comm_barrier(&b->world);
    OpRecord op = flight_recorder_issue(c->world->recorder, "MPI", comm_kind_names[k->kind], s->count, comm_type_name(s->type), -1);
    flight_recorder_wait_begin(c->world->recorder, &op); // the watchdog ends the run if a rank never arrives
    mpi_borrow(c->world);
    for (long long i = 0; i < b->o.warmup; i++) run_mpi(k, c, x, s);
    double begin = now_seconds();
    for (long long i = 0; i < b->o.iters; i++) run_mpi(k, c, x, s);
    double seconds = (now_seconds() - begin) / (double)b->o.iters;
    mpi_return(c->world);
    flight_recorder_wait_end(c->world->recorder);
    flight_recorder_finish(c->world->recorder, &op);
    return comm_host_sum(&b->world, seconds) / b->world.size;
}
#else
static double time_mpi(Bench* b, const Collective* k, const Shape* s, const Buffers* x) { (void)b; (void)k; (void)s; (void)x; return 0; }
#endif

// ---- the table ----
typedef struct { double bus_sum; long long measured, wrong; Fit fit; } Totals;

static void print_header(const Bench* b, const Collective* k) {
    const BenchOptions* o = &b->o;
    printf("#\n# %s, %lld warm-up and %lld timed operations a size, %lld checked\n#\n", comm_kind_names[k->kind],
           o->warmup, o->iters, o->check);
    printf("# %51s %25s %34s %31s\n", "", "out-of-place", "in-place", "MPI's own call");
    printf("# %10s %13s %8s %8s %8s", "size", "count", "type", "redop", "root");
    for (int i = 0; i < 2; i++) printf("  %9s %8s %8s %6s", "time", "algbw", "busbw", "#wrong");
    printf("  %9s %8s\n# %10s %13s %8s %8s %8s", "time", "ratio", "(B)", "(elements)", "", "", "");
    printf("  %9s %8s %8s %6s  %9s %8s %8s %6s  %9s %8s\n", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)",
           "ours/MPI");
}

// Prints GB/s with three significant digits.
static void print_bandwidth(double bytes_per_second) {
    double x = 1e-9 * bytes_per_second;
    printf(x < 99.95 ? "%#8.3g " : "%8.0f ", x);
}

// Prints the time of MPI's own call, and ours (seconds) as a multiple of it.
static void bench_mpi(Bench* b, const Collective* k, const Shape* s, double ours) {
    Buffers x = buffers_of(b, k, s, k->in_place);
    if (!compares_with_mpi(b, s)) { printf("  %9s %8s", "N/A", "N/A"); return; }
    fill(b, s, &x, false);
    double mpi = time_mpi(b, k, s, &x);
    printf("  %9.2f %8.2f", 1e6 * mpi, ours / mpi);
}

// Measures one half of a line of the table, if the collective supports it. Returns the seconds of one operation, or 0.
static double bench_half(Bench* b, const Collective* k, const Shape* s, bool in_place, double bytes, Totals* t) {
    if (!works(b, k, in_place)) {
        printf("  %9s %8s %8s %6s", "N/A", "N/A", "N/A", "N/A");
        return 0;
    }
    Buffers x = buffers_of(b, k, s, in_place);
    char wrong_text[24] = "N/A";
    fill(b, s, &x, false);
    double seconds = time_operations(b, k, s, &x), algorithm = bytes / seconds, bus = algorithm * bus_factor(k, s->N);
    long long wrong = check_operations(b, k, *s, &x);
    if (b->o.check > 0) snprintf(wrong_text, sizeof wrong_text, "%lld", wrong);
    printf("  %9.2f ", 1e6 * seconds);
    print_bandwidth(algorithm);
    print_bandwidth(bus);
    printf("%6s", wrong_text);
    t->bus_sum += bus;
    t->measured++;
    t->wrong += wrong;
    return seconds;
}

// Ranks are added in their order in ordered mode, and by default over MPI.
static bool is_in_rank_order(const Bench* b) {
#if USE_MPI
    bool over_mpi = b->world.backend == &comm_mpi;
#else
    bool over_mpi = false;
#endif
    return strcmp(comm_all_reduce_text(&b->world.world->options, over_mpi), "in rank order") == 0;
}

// A size that is divided among the ranks is rounded down to whole elements per rank; as in nccl-tests it may become 0.
static void bench_size(Bench* b, const Collective* k, CommType type, int root, size_t bytes, Totals* t) {
    const Comm* c = b->comm;
    int rank = b->world.rank;
    size_t size = comm_type_size(type), parts = k->reads_parts || k->writes_parts ? (size_t)c->size : 1;
    Shape s = { bytes / size / parts, type, c->rank, c->size, root, k->sums && is_in_rank_order(b), 0, b->from, b->to };
    for (int i = 0; i < s.N; i++)
        b->to[(s.rank + i + 1) % s.N] = b->from[(s.rank + s.N - i - 1) % s.N] = uneven_part(&s, i);
    double real_bytes = (double)(s.count * parts * size);
    comm_step(&b->world, ++b->line);
    fault_strike(&b->fault, rank, b->line);
    fault_delay(&b->fault, rank, b->line);
    printf("  %10.0f %13zu %8s %8s %8d", real_bytes, s.count, comm_type_name(s.type), k->sums ? "sum" : "none",
           k->has_root ? s.root : -1);
    double out_of_place = bench_half(b, k, &s, false, real_bytes, t);
    double in_place = bench_half(b, k, &s, true, real_bytes, t);
    bench_mpi(b, k, &s, k->in_place ? in_place : out_of_place);
    printf("\n");
    fflush(stdout);
    if (s.count > 0) fit_add(&t->fit, real_bytes, in_place > 0 ? in_place : out_of_place);
}

// Latency and bandwidth are fitted only to a single sweep over sizes.
static bool is_one_sweep(const BenchOptions* o) { return o->type != ALL_TYPES && o->root >= 0; }

// Measures all roots and sizes.
static void bench_type(Bench* b, const Collective* k, CommType type, Totals* t) {
    const BenchOptions* o = &b->o;
    bool every_root = k->has_root && o->root < 0;
    int first = every_root ? 0 : (int)o->root, end = every_root ? b->world.size / (int)o->groups : first + 1;
    for (int root = first; root < end; root++)
        for (size_t bytes = o->min_bytes; bytes <= o->max_bytes; bytes = next_size(o, bytes))
            bench_size(b, k, type, root, bytes, t);
}

// Measures all types and sizes of a collective. Adds its latency and bandwidth to `links`; returns the number of wrong
// elements.
static long long bench_collective(Bench* b, const Collective* k, json_t* links) {
    Totals t;
    double alpha, beta, factor = bus_factor(k, b->comm->size);
    const char* name = comm_kind_names[k->kind];
    memset(&t, 0, sizeof t);
    print_header(b, k);
    for (int type = 0; type < ALL_TYPES; type++) {
        bool one_of_all = b->o.type == ALL_TYPES && (type != COMM_BYTE || !k->sums);
        if (type == b->o.type || one_of_all) bench_type(b, k, (CommType)type, &t);
    }
    if (b->o.check > 0) printf("# Out of bounds values : %lld %s\n", t.wrong, t.wrong ? "FAILED" : "OK");
    else printf("# Out of bounds values : not checked\n");
    printf("# Avg bus bandwidth    : %.3f\n", 1e-9 * t.bus_sum / (double)t.measured);
    bool fits = b->comm->size > 1 && is_one_sweep(&b->o) && fit_solve(&t.fit, &alpha, &beta);
    if (fits) printf("# Fit to times %s place: latency %.2f us, bus bandwidth %.3f GB/s\n",
                     works(b, k, true) ? "in" : "out of",
                     1e6 * alpha, 1e-9 * factor / beta);
    else b->unfit = name;
    fflush(stdout); // because with wrong results the first rank that ends also ends the others
    fit_free(&t.fit);
    if (fits && links)
        json_object_set_new(links, name, json_pack("{s:f, s:f, s:f}", "alpha", alpha, "beta", beta, "busbw", factor / beta));
    return t.wrong;
}

// ---- the run ----

// Prints a line for each rank that takes part.
static void print_ranks(Bench* b) {
    enum { LINE = 192 };
    Comm* c = &b->world;
    char host[64] = "", line[LINE] = "";
    gethostname(host, sizeof host - 1);
    snprintf(line, sizeof line, "#  Rank %3d Pid %7d on %.63s, %.80s", c->rank, (int)getpid(), host, device_name());
    char* all = (char*)device_alloc((size_t)c->size * LINE, MEMORY_COMMUNICATION);
    char* lines = (char*)xcalloc((size_t)c->size, LINE);
    host_to_device(all + c->rank * LINE, line, LINE);
    comm_wait(c, comm_all_gather(c, all, all + c->rank * LINE, LINE, COMM_BYTE));
    device_to_host(lines, all, (size_t)c->size * LINE);
    printf("# comm_bench on %d rank%s: %s%s\n", c->size, c->size == 1 ? "" : "s", comm_description(c),
           c->world->strict ? " (STRICT MODE)" : "");
    if (b->comm == &b->part) printf("# %lld communicators at once, and what follows is the first one\n", b->o.groups);
    for (int q = 0; q < c->size; q++) printf("%s\n", lines + q * LINE);
    device_free(all);
    free(lines);
}

static void bench_start(Bench* b, int argc, char** argv) {
    BenchOptions* o = &b->o;
    OptionTable table = options_table("comm_bench", "how fast collectives are, as nccl-tests counts, and whether they are right");
    options_bench(&table, o);
    say_once_begin();
    options_parse(&table, argc, argv);
    read_sizes(o, &table);
    RankInfo ranks = ranks_find();
    require(o->groups <= ranks.size, "--groups %lld: there are only %d ranks", o->groups, ranks.size);
    int smallest = ranks.size / (int)o->groups;
    require(o->root < smallest, "--root %lld: there is no such rank, the last one is %d", o->root, smallest - 1);
    require(o->json[0] == '\0' || smallest > 1,
            "--json %s: a single rank has no link to measure: start more, as in mpirun -np 2", o->json);
    require(o->json[0] == '\0' || is_one_sweep(o), "--json wants one --datatype and one --root");
    b->fault = fault_parse(o->fault, ranks.size);
    fault_check_micro(&b->fault, 0);
    comm_choose_environment(&o->comm, ranks.size);
    device_init(ranks.local_rank, ranks.local_size);
    comm_init(&b->world, &o->comm, ranks, &b->control);
    b->comm = o->groups > 1 ? &b->part : &b->world;
    if (o->groups > 1) comm_split(&b->part, &b->world, "part", ranks.rank % (int)o->groups);
    fault_announce(&b->fault);
    size_t bytes = o->max_bytes + SPARE;
    for (int m = 0; m <= DEVICE_SECOND; m++) b->memory[m] = (char*)device_alloc(bytes, MEMORY_COMMUNICATION);
    if (o->on_host) b->memory[HOST] = (char*)offload_alloc(bytes);
    comm_register_memory(&b->world);
    b->host = (char*)xcalloc(bytes, 1);
}

// Writes the file that dev/kernels/comm/README.md describes.
static void write_links(const Bench* b, FILE* file, json_t* links) {
    require(b->unfit == NULL, "--json %s: these sizes do not tell %s's latency from its bandwidth: try a larger --maxbytes",
            b->o.json, b->unfit);
    json_t* root = json_pack("{s:i, s:s, s:O}", "ranks", b->comm->size, "backend", comm_description(&b->world),
                             "collectives", links);
    bool written = json_dumpf(root, file, JSON_INDENT(1) | JSON_REAL_PRECISION(6)) == 0 && fputc('\n', file) == '\n';
    written &= fclose(file) == 0;
    require(written, "--json %s: cannot be written: %s", b->o.json, strerror(errno));
    json_decref(root);
}

// Returns a number that identifies the machine, even if containers have the same name, or 0 if it is unknown.
static double machine_number(void) {
    unsigned number = 0;
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file == NULL) return 0;
    if (fscanf(file, "%8x", &number) != 1) number = 0;
    fclose(file);
    return number;
}
// On rank 0, returns the core seconds of its machine. Time used by any rank there was not used by other programs.
static CoreSeconds seconds_of_ranks(Bench* b) {
    CoreSeconds s = core_seconds();
    double here = machine_number(), first = comm_host_sum(&b->world, b->world.rank == 0 ? here : 0);
    s.own = comm_host_sum(&b->world, here == first ? s.own : 0);
    return s;
}

int main(int argc, char** argv) {
    static Bench b;
    long long wrong = 0;
    bench_start(&b, argc, argv);
    bool wants_json = b.o.json[0] != '\0';
    // early, so that a typo shows before the measurement
    FILE* file = wants_json && b.world.rank == 0 ? fopen(b.o.json, "w") : NULL;
    require(file || !wants_json || b.world.rank > 0, "--json %s: cannot be opened for writing: %s", b.o.json,
            strerror(errno));
    json_t* links = wants_json ? json_object() : NULL;
    print_ranks(&b);
    CoreSeconds begin = seconds_of_ranks(&b);
    size_t taken = device_memory_total();
    for (int i = 0; i < ALL_COLLECTIVES; i++) {
        const Collective* k = &collectives[i];
        bool can = (works(&b, k, false) || works(&b, k, true)) && !(k->sums && b.o.type == COMM_BYTE);
        require(can || b.o.op != i, "--op %s: %s", comm_kind_names[k->kind],
                k->sums && b.o.type == COMM_BYTE ? "bytes are not added"
                                                 : "its parts cannot be in host memory: leave out --offload");
        if (can && (b.o.op == ALL_COLLECTIVES || b.o.op == i)) wrong += bench_collective(&b, k, links);
    }
    say_if_others_ran_between(begin, seconds_of_ranks(&b));
    require(device_memory_total() == taken, "operations took %zu bytes of device memory",
            device_memory_total() - taken);
    if (file) write_links(&b, file, links);
    json_decref(links);
    for (int m = 0; m <= DEVICE_SECOND; m++) device_free(b.memory[m]); // first, because NCCL may have registered them
    if (b.memory[HOST]) offload_free(b.memory[HOST]);
    if (b.comm == &b.part) comm_free(&b.part);
    comm_free(&b.world);
    free(b.host);
    device_shutdown();
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
