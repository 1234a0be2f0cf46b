// test_control.c - ranks that watch one another: several processes, one of which is killed, stopped, hangs or fails.
#include "../../llmc/watch/agree.h"
#include "../../llmc/watch/fault.h"
#include "expect_death.h"
#include <sys/mman.h>

// ---- a team of processes ----

#define MOST 8
typedef struct { // shared by the processes of a test
    volatile int ready;
    char address[CONTROL_ADDRESS];
    volatile int count;
    int stepped; // ranks that have done two_steps
} Meeting;
static Meeting* meeting;

typedef struct {
    int size;
    double timeout;      // of waits
    const char* out;
    void (*work)(Control* c); // what a rank does once all have met
    unsigned absent;     // bits: ranks that are never started
} Team;
static const Team* team;

typedef struct { int status; double seconds; char* err; } Ended; // status as Child's; err owned

static RankInfo rank_of(int rank) {
    RankInfo r = { rank, team->size, rank, team->size, "a test", "" };
    return r;
}

// Rank 0 publishes its address; the others wait for it, as they would in MPI_Bcast.
static void join(Control* c, int rank) {
    control_init(c, rank_of(rank), team->timeout, team->out);
    if (rank == 0) {
        control_listen(c, meeting->address);
        meeting->ready = 1;
    }
    while (!__atomic_load_n(&meeting->ready, __ATOMIC_ACQUIRE)) usleep(1000);
    control_join(c, meeting->address);
    oplog_join(&c->log, "world");
}

static void be_rank(void* argument) {
    static Control c;
    join(&c, *(int*)argument);
    team->work(&c);
    control_stop(&c);
}

// Runs each rank of the team in a process until all have ended; those that still run after 20 s are killed, and fail.
static void team_run(const Team* t, void (*process)(void*), Ended* ended) {
    pid_t pids[MOST];
    FILE* err[MOST];
    double start = now_seconds();
    team = t;
    memset(meeting, 0, sizeof *meeting);
    fflush(NULL);
    for (int r = 0; r < t->size; r++) {
        err[r] = tmpfile();
        assert_non_null(err[r]);
        pids[r] = t->absent >> r & 1 ? 0 : fork();
        if (pids[r] != 0 || t->absent >> r & 1) continue;
        const int caught[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS };
        for (size_t i = 0; i < sizeof caught / sizeof caught[0]; i++) signal(caught[i], SIG_DFL);
        on_exit(child_leave, NULL);
        dup2(fileno(err[r]), STDERR_FILENO);
        process(&r);
        exit(0);
    }
    for (int left = t->size; left > 0; usleep(2000)) {
        double seconds = now_seconds() - start;
        left = 0;
        for (int r = 0; r < t->size; r++) {
            int status;
            if (pids[r] == 0) continue;
            if (seconds > 20) kill(pids[r], SIGKILL);
            if (waitpid(pids[r], &status, WNOHANG) != pids[r]) { left++; continue; }
            pids[r] = 0;
            ended[r].seconds = seconds;
            ended[r].status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
        }
        // A process that a test stopped must be killed by the test, once the others have ended.
        bool only_stopped = left == 1 && meeting->count < 0;
        for (int r = 0; r < t->size && only_stopped; r++) if (pids[r]) kill(pids[r], SIGKILL);
    }
    for (int r = 0; r < t->size; r++) {
        fseek(err[r], 0, SEEK_END);
        ended[r].err = child_output(err[r]);
    }
}

// A report of a sanitizer is a failure, however the process ended.
static bool is_clean(const char* err) { return !strstr(err, "Sanitizer") && !strstr(err, "runtime error:"); }

static void ended_free(const Team* t, Ended* e) { for (int r = 0; r < t->size; r++) free(e[r].err); }

static void show(const Team* t, const Ended* e) {
    for (int r = 0; r < t->size; r++)
        print_error("rank %d: status %d after %.2f s: %s\n", r, e[r].status, e[r].seconds, e[r].err);
}

// Every rank except the one that the test harms must end with status 1, in time, with one error that has all the phrases. Where the
// harmed one dies first, the time counts from there, because processes may be slow to begin.
static void expect_errors(const Team* t, int harmed, int harmed_status, double within, const char* const* phrases) {
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(t, be_rank, e);
    bool good = true;
    for (int r = 0; r < t->size; r++) {
        if (t->absent >> r & 1) continue;
        if (r == harmed && harmed_status == -1) continue;
        good = good && e[r].status == (r == harmed ? harmed_status : 1) && is_clean(e[r].err);
        bool dies_first = harmed >= 0 && e[harmed].seconds < e[r].seconds;
        good = good && (r == harmed || e[r].seconds - (dies_first ? e[harmed].seconds : 0) < within);
        char prefix[32];
        snprintf(prefix, sizeof prefix, "rank %d: error: ", r);
        const char* line = strstr(e[r].err, prefix);
        if (r == harmed && harmed_status != 1) continue;
        for (int i = 0; phrases[i]; i++) good = good && line && strstr(line, phrases[i]);
    }
    if (!good) show(t, e);
    ended_free(t, e);
    if (!good) fail_msg("not every rank said '%s' in time", phrases[0]);
}
#define expect_all(team, harmed, status, within, ...) do { \
        const char* const phrases_[] = { __VA_ARGS__, NULL }; \
        expect_errors(team, harmed, status, within, phrases_); \
    } while (0)

// Every rank must end with status 0 and print nothing.
static void expect_success(const Team* t, void (*process)(void*)) {
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(t, process, e);
    bool good = true;
    for (int r = 0; r < t->size; r++) good = good && e[r].status == 0 && e[r].err[0] == '\0';
    if (!good) show(t, e);
    ended_free(t, e);
    assert_true(good);
}

static Team team_of(int size, double timeout, void (*work)(Control*)) {
    Team t = { size, timeout, "", work, 0 };
    return t;
}

// How a crash ends a process. The address sanitizer reports it and exits instead, and its report is not a failure here.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CRASHED(signal) -1
#else
#define CRASHED(signal) (1000 + (signal))
#endif

#define ensure(condition) require(condition, "this does not hold: %s", #condition) // within a rank

// ---- operations that move nothing: the log entries that comm.h would make ----

// A collective of all ranks of the team, which exists only in the log.
static void issue_and_finish(Control* c, const char* collective, int peer) {
    OpRecord op = oplog_issue(&c->log, "world", collective, 1000, "fp32", peer);
    oplog_start(&c->log, &op);
    oplog_finish(&c->log, &op);
}

static void wait_forever(Control* c, const char* communicator, const char* collective, size_t n, int peer) {
    OpRecord op = oplog_issue(&c->log, communicator, collective, n, "fp32", peer);
    oplog_start(&c->log, &op);
    oplog_wait_begin(&c->log, &op);
    for (;;) pause();
}

// Two steps' worth of operations, so that there is something to name.
static void two_steps(Control* c) {
    for (long long step = 1; step <= 2; step++) {
        oplog_step(&c->log, step);
        issue_and_finish(c, "all-reduce", -1);
    }
    oplog_step(&c->log, 3);
    __atomic_add_fetch(&meeting->stepped, 1, __ATOMIC_ACQ_REL); // a rank that is slow to begin must not learn of a death before that
    for (int i = 0; i < 10000 && __atomic_load_n(&meeting->stepped, __ATOMIC_ACQUIRE) < team->size; i++) usleep(1000);
    usleep(500000); // two heartbeats, which tell rank 0
}

// ---- a good run ----

static void send_small_messages(Control* c) {
    int rank = c->ranks.rank, N = c->ranks.size;
    ControlBytes parts[MOST];
    for (int round = 0; round < 50; round++) {
        char text[64];
        int n = snprintf(text, sizeof text, "round %d of rank %d", round, rank);
        control_gather(c, text, round == 7 ? 0 : (size_t)n, parts);
        for (int r = 0; r < N && rank == 0; r++) {
            snprintf(text, sizeof text, "round %d of rank %d", round, r);
            ensure(strcmp(parts[r].data, round == 7 ? "" : text) == 0);
            free(parts[r].data);
        }
        if (round % 10 != 0) continue; // in between, ranks run ahead of rank 0
        ControlBytes b = control_broadcast(c, rank == 0 ? &round : NULL, rank == 0 ? sizeof round : 0);
        ensure(rank == 0 ? b.data == NULL : b.bytes == sizeof round && memcmp(b.data, &round, sizeof round) == 0);
        free(b.data);
    }
    size_t most = CONTROL_MAX_MESSAGE;
    char* large = (char*)xcalloc(most, 1);
    memset(large, 'a' + rank, most);
    control_gather(c, large, most, parts);
    for (int r = 0; r < N && rank == 0; r++) {
        ensure(parts[r].bytes == most && parts[r].data[0] == 'a' + r && parts[r].data[most - 1] == 'a' + r);
        free(parts[r].data);
    }
    free(large);
}

TEST(small_messages_arrive_whole_and_in_order) {
    const int sizes[] = { 1, 2, 4, 7 };
    for (int i = 0; i < 4; i++) {
        Team t = team_of(sizes[i], 15, send_small_messages);
        expect_success(&t, be_rank);
    }
}

// ---- decisions ----

// self: the rank that decides. The answer is what all gave, joined by commas.
static ControlBytes join_texts(void* self, const ControlBytes* given, int size) {
    char text[1024] = "";
    ensure(*(int*)self == 0 && size == team->size);
    for (int r = 0; r < size; r++) {
        ensure(given[r].data[given[r].bytes] == '\0');
        size_t n = strlen(text);
        snprintf(text + n, sizeof text - n, "%s%zu:%s", r ? "," : "", given[r].bytes, given[r].data);
    }
    return control_bytes(text, strlen(text));
}
static void decide_on_texts(Control* c) {
    int rank = c->ranks.rank;
    for (int round = 0; round < 20; round++) {
        char expected[1024] = "", own[32];
        memset(own, 'a' + rank, sizeof own);
        for (int r = 0; r < c->ranks.size; r++) { // a rank gives its letter several times, rank 0 not even once at first
            size_t n = strlen(expected), times = (size_t)((2 * r + round) % 20);
            snprintf(expected + n, sizeof expected - n, "%s%zu:", r ? "," : "", times);
            n = strlen(expected);
            memset(expected + n, 'a' + r, times);
        }
        ControlBytes answer = control_decide(c, own, (size_t)((2 * rank + round) % 20), join_texts, &rank);
        ensure(answer.bytes == strlen(expected) && strcmp(answer.data, expected) == 0);
        free(answer.data);
    }
}
TEST(all_ranks_get_the_answer_to_what_all_of_them_gave) {
    const int sizes[] = { 1, 2, 4, 7 };
    for (int i = 0; i < 4; i++) {
        Team t = team_of(sizes[i], 15, decide_on_texts);
        expect_success(&t, be_rank);
    }
}

// The answer has the length of the longest string; its bytes are the sums of the strings' bytes.
static ControlBytes add_bytes(void* unused, const ControlBytes* given, int size) {
    ControlBytes sum = { NULL, 0 };
    (void)unused;
    for (int r = 0; r < size; r++) sum.bytes = size_max(sum.bytes, given[r].bytes);
    sum.data = (char*)xcalloc(sum.bytes + 1, 1);
    for (int r = 0; r < size; r++) for (size_t i = 0; i < given[r].bytes; i++) sum.data[i] += given[r].data[i];
    return sum;
}
static void decide_on_much(Control* c) {
    int rank = c->ranks.rank, N = c->ranks.size;
    for (int round = 0; round < 4; round++) {
        size_t n = CONTROL_MAX_MESSAGE - (size_t)(rank * round); // all of the same length, then not
        char* own = (char*)xcalloc(n, 1);
        for (size_t i = 0; i < n; i++) own[i] = (char)((i % 7) * (size_t)(rank + 1));
        ControlBytes answer = control_decide(c, own, n, add_bytes, NULL);
        ensure(answer.bytes == CONTROL_MAX_MESSAGE);
        for (size_t i = 0; i < answer.bytes; i++) {
            int members = 0;
            for (int r = 0; r < N; r++) members += i < CONTROL_MAX_MESSAGE - (size_t)(r * round) ? r + 1 : 0;
            ensure(answer.data[i] == (char)((i % 7) * (size_t)members));
        }
        free(answer.data);
        free(own);
    }
}
TEST(even_if_it_is_as_long_as_messages_may_be) {
    const int sizes[] = { 1, 3 };
    for (int i = 0; i < 2; i++) {
        Team t = team_of(sizes[i], 15, decide_on_much);
        expect_success(&t, be_rank);
    }
}

static void decide_on_nothing(Control* c) {
    ControlBytes answer = control_decide(c, NULL, 0, add_bytes, NULL);
    ensure(answer.bytes == 0 && answer.data[0] == '\0');
    free(answer.data);
}
TEST(and_even_if_it_is_empty) {
    const int sizes[] = { 1, 3 };
    for (int i = 0; i < 2; i++) {
        Team t = team_of(sizes[i], 15, decide_on_nothing);
        expect_success(&t, be_rank);
    }
}

static ControlBytes say_too_much(void* unused, const ControlBytes* given, int size) {
    ControlBytes b = { (char*)xcalloc(CONTROL_MAX_MESSAGE + 2, 1), CONTROL_MAX_MESSAGE + 1 };
    (void)unused;
    (void)given;
    (void)size;
    return b;
}
static void decide_too_much(Control* c) { control_decide(c, "x", 1, say_too_much, NULL); }
TEST(an_answer_that_is_too_long_ends_every_rank) {
    Team t = team_of(3, 15, decide_too_much);
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, be_rank, e);
    for (int r = 0; r < 3; r++) {
        const char* says = r == 0 ? "a message between hosts holds 1048576 bytes, not 1048577" : "rank 0 has left";
        bool good = e[r].status == 1 && strstr(e[r].err, says) && e[r].seconds < 4;
        if (!good) show(&t, e);
        assert_true(good);
    }
    ended_free(&t, e);
}

// ---- what must be the same on all ranks ----

static void have_the_same_units(Control* c) {
    const uint64_t sums[3] = { 7, 0, UINT64_MAX };
    for (long long step = 1; step <= 3; step++) require_same_units(c, "parameters", sums, 3, 1, step);
}
TEST(ranks_with_the_same_units_continue) {
    const int sizes[] = { 1, 2, 5 };
    for (int i = 0; i < 3; i++) {
        Team t = team_of(sizes[i], 15, have_the_same_units);
        expect_success(&t, be_rank);
    }
}

static void differ_in_a_unit(Control* c) {
    uint64_t sums[3] = { 7, 0, UINT64_MAX };
    message_rank = c->ranks.rank;
    if (c->ranks.rank >= 1) sums[1] = 1; // of several ranks that differ the first is named
    if (c->ranks.rank == 3) sums[0] = 1;
    require_same_units(c, "parameters", sums, 3, 1, 7);
}
TEST(every_rank_names_the_rank_and_the_unit_that_differ) {
    Team t = team_of(4, 15, differ_in_a_unit);
    expect_all(&t, -1, 1, 4, "after step 7 the parameters of unit 1 differ between rank 0 and rank 1",
               "continue from the last checkpoint with --resume");
}

// Messages along a line of ranks, and collectives, which are not messages. Rank `lazy` leaves out a receive, or a send.
static int lazy;
static const char* lazy_in;
static void pass_messages(Control* c) {
    int rank = c->ranks.rank, last = c->ranks.size - 1;
    message_rank = rank;
    issue_and_finish(c, "all-reduce", -1);
    for (int i = 0; i < 3; i++) {
        bool skips = i == 1 && rank == lazy;
        if (rank > 0 && !(skips && strcmp(lazy_in, "receive") == 0)) issue_and_finish(c, "receive", rank - 1);
        if (rank < last && !(skips && strcmp(lazy_in, "send") == 0)) issue_and_finish(c, "send", rank + 1);
        if (rank < last) issue_and_finish(c, "receive", rank + 1);
        if (rank > 0) issue_and_finish(c, "send", rank - 1);
    }
    require_same_messages(c, 7);
}
TEST(a_message_that_was_not_received_is_found) {
    Team t = team_of(3, 15, pass_messages);
    lazy = -1;
    lazy_in = "receive";
    expect_success(&t, be_rank);
    lazy = 2;
    expect_all(&t, -1, 1, 4, "after step 7: 3 messages went from rank 1 to rank 2 of world, and 2 were received");
    lazy = 0;
    lazy_in = "send";
    expect_all(&t, -1, 1, 4, "after step 7: 2 messages went from rank 0 to rank 1 of world, and 3 were received");
}

// Ranks that are 2 apart hold the same part; rank 3's is not rank 1's.
static void have_two_parts(Control* c) {
    uint64_t sums[3] = { 7, 0, 10 + (uint64_t)c->ranks.rank % 2 };
    require_same_units(c, "parameters", sums, 3, 2, 7);
}
static void differ_in_a_part(Control* c) {
    uint64_t sums[3] = { 7, 0, (uint64_t)c->ranks.rank % 2 };
    message_rank = c->ranks.rank;
    if (c->ranks.rank == 3) sums[2] = 0;
    require_same_units(c, "parameters", sums, 3, 2, 7);
}
TEST(ranks_with_the_same_part_are_compared) {
    Team good = team_of(5, 15, have_two_parts), bad = team_of(4, 15, differ_in_a_part);
    expect_success(&good, be_rank);
    expect_all(&bad, -1, 1, 4, "after step 7 the parameters of unit 2 differ between rank 1 and rank 3",
               "continue from the last checkpoint with --resume");
}

// The same ranks on a mesh: messages say where they are.
static void (*on_a_mesh)(Control* c);
static void be_on_a_mesh(Control* c) {
    char (*names)[RANK_NAME] = (char (*)[RANK_NAME])xcalloc((size_t)c->ranks.size, RANK_NAME);
    for (int r = 0; r < c->ranks.size; r++) snprintf(names[r], RANK_NAME, "dp %d, tp %d", r / 2, r % 2);
    control_name_ranks(c, names);
    on_a_mesh(c);
}
TEST(ranks_of_a_mesh_are_named_with_their_places) {
    Team t = team_of(4, 15, be_on_a_mesh);
    on_a_mesh = differ_in_a_part;
    expect_all(&t, -1, 1, 4, "after step 7 the parameters of unit 2 differ between rank 1 (dp 0, tp 1) and rank 3 (dp 1, tp 1)");
    on_a_mesh = pass_messages;
    lazy = 2;
    lazy_in = "receive";
    expect_all(&t, -1, 1, 4, "after step 7: 3 messages went from rank 1 (dp 0, tp 1) to rank 2 (dp 1, tp 0) of world, and 2 were");
}

TEST(the_checksum_of_device_memory_does_not_depend_on_the_scratch) {
    enum { N = 100 };
    float values[N], scratch[N];
    for (int i = 0; i < N; i++) values[i] = (float)i / 3;
    uint64_t sum = checksum_elements(values, sizeof(float), N, 5);
    for (size_t room = 1; room <= N; room += 11)
        assert_true(device_checksum_by(values, sizeof(float), N, 5, scratch, room * sizeof(float)) == sum);
    assert_true(checksum_elements(values, sizeof(float), N, 6) != sum);
    values[N - 1] = nextafterf(values[N - 1], 1e9f);
    assert_true(device_checksum_by(values, sizeof(float), N, 5, scratch, sizeof scratch) != sum);
}

// ---- further good runs ----

static void be_slow(Control* c) { usleep(c->ranks.rank * 300000); }

TEST(the_end_waits_for_the_slowest) {
    Team t = team_of(4, 15, be_slow);
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, be_rank, e);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(e[r].status, 0);
        assert_true(e[r].seconds >= 0.9);
    }
    ended_free(&t, e);
}

static Control* shared_control;
static void* issue_many(void* unused) {
    (void)unused;
    for (int i = 0; i < 20000; i++) {
        OpRecord op = oplog_issue(&shared_control->log, "world", "all-reduce", 1, "fp32", -1);
        oplog_start(&shared_control->log, &op);
        oplog_finish(&shared_control->log, &op);
        if (i % 1000 == 0) usleep(10000);
    }
    return NULL;
}
static void issue_in_two_threads(Control* c) {
    pthread_t other;
    shared_control = c;
    ensure(pthread_create(&other, NULL, issue_many, NULL) == 0);
    issue_many(NULL);
    pthread_join(other, NULL);
    ensure(c->log.channels[1].issued == 40000 && c->log.channels[1].finished == 40000);
}
TEST(any_thread_may_note_operations_while_the_watchdog_reads) {
    Team t = team_of(3, 15, issue_in_two_threads);
    expect_success(&t, be_rank);
}

// ---- death ----

static void kill_2(Control* c) {
    Fault f = fault_parse("2:3:kill", c->ranks.size);
    two_steps(c);
    fault_strike(&f, c->ranks.rank, 3);
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(a_killed_rank_is_named_by_all_others_at_once) {
    Team t = team_of(4, 60, kill_2);
    expect_all(&t, 2, 1000 + SIGKILL, 4, "rank 2 has died (its connection closed) during step 3",
               "without --out there is no checkpoint");
}

__attribute__((no_sanitize("undefined")))
static void crash_2(Control* c) {
    volatile int* volatile nowhere = NULL;
    two_steps(c);
    if (c->ranks.rank == 2) *nowhere = 7;
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
static void abort_0(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 0) abort();
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
static void raise_1(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 1) raise(SIGFPE);
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
static char folder[] = "/tmp/test_control_XXXXXX";
TEST(a_rank_that_crashes_says_how_and_writes_its_last_operations) {
    static const struct { void (*work)(Control*); int rank, signal; const char* says; } cases[] = {
        { crash_2, 2, SIGSEGV, "rank 2 has died (Segmentation fault) during step 3" },
        { abort_0, 0, SIGABRT, "rank 0 has died (Aborted) during step 3" },
        { raise_1, 1, SIGFPE, "rank 1 has died (Floating point exception) during step 3" }
    };
    for (int i = 0; i < 3; i++) {
        Team t = team_of(3, 60, cases[i].work);
        char path[128];
        t.out = folder;
        expect_all(&t, cases[i].rank, CRASHED(cases[i].signal), 4, cases[i].says);
        for (int r = 0; r < 3; r++) {
            snprintf(path, sizeof path, "%s/ops_rank_%04d.txt", folder, r);
            assert_int_equal(unlink(path), 0);
        }
    }
}

static void kill_2_ahead(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 2) {
        oplog_step(&c->log, 5);
        usleep(500000);
        raise(SIGKILL);
    }
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(the_step_named_is_that_of_whoever_was_further) {
    Team t = team_of(3, 60, kill_2_ahead);
    expect_all(&t, 2, 1000 + SIGKILL, 4, "rank 2 has died (its connection closed) during step 5");
}

static void kill_0(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 0) raise(SIGKILL);
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(so_is_rank_0_when_it_is_killed) {
    Team t = team_of(4, 60, kill_0);
    expect_all(&t, 0, 1000 + SIGKILL, 4, "rank 0 has died (its connection closed) during step 3");
}

// A rank does tasks as fast as it can, and dies in the last one: no heartbeat has told of that.
static int victim;
static void kill_in_a_task(Control* c) {
    char task[OP_TASK];
    two_steps(c);
    for (int i = 0; i <= 37 && c->ranks.rank == victim; i++) {
        snprintf(task, sizeof task, "F%d on stage %d", i, victim);
        oplog_task(&c->log, task);
    }
    if (c->ranks.rank == victim) raise(SIGKILL);
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(a_killed_rank_is_named_with_the_task_that_it_was_in) {
    for (int i = 0; i < 6; i++) {
        char said[128];
        victim = i % 3;
        Team t = team_of(3, 60, kill_in_a_task);
        snprintf(said, sizeof said, "rank %d has died (its connection closed) during step 3; it was in F37 on stage %d",
                 victim, victim);
        expect_all(&t, victim, 1000 + SIGKILL, 4, said);
    }
}

// A rank on another machine shares no memory: its last heartbeat is what is known.
static void kill_in_a_task_elsewhere(Control* c) {
    if (c->ranks.rank == 2) c->log.shared = NULL;
    two_steps(c);
    oplog_task(&c->log, "D5 on stage 2");
    if (c->ranks.rank == 2) usleep(500000);
    if (c->ranks.rank == 2) raise(SIGKILL);
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(on_another_machine_with_what_it_was_last_heard_of_in) {
    Team t = team_of(3, 60, kill_in_a_task_elsewhere);
    expect_all(&t, 2, 1000 + SIGKILL, 4, "rank 2 has died (its connection closed) during step 3; it was last heard of in D5"
               " on stage 2");
}

// What a rank was writing when it was killed is not read; an address of another run or machine is refused.
TEST(places_are_whole_and_of_this_run) {
    Places p = { -1, NULL, 0 }, q = p;
    Place a = { 3, "F1 on stage 0" }, b = { 3, "F2 on stage 0" }, found;
    PlacesAddress address = places_create(&p, 2), wrong = address;
    assert_non_null(p.memory);
    wrong.mark += 1;
    places_open(&q, wrong, 2);
    assert_null(q.memory);
    places_open(&q, address, 3);
    assert_null(q.memory);
    places_open(&q, address, 2);
    assert_non_null(q.memory);
    assert_false(place_read(places_of(&q, 1), &found));
    place_write(places_of(&p, 1), &a);
    place_write(places_of(&p, 1), &b);
    assert_true(place_read(places_of(&q, 1), &found) && strcmp(found.task, b.task) == 0 && found.step == 3);
    SharedPlace* s = places_of(&p, 1);
    memset(&s->half[1 - s->last], 'x', sizeof(Place) / 2);
    assert_true(place_read(places_of(&q, 1), &found) && strcmp(found.task, b.task) == 0 && found.step == 3);
    assert_false(place_read(places_of(&q, 0), &found));
    places_close(&q);
    places_close(&p);
    assert_false(place_read(places_of(&p, 1), &found));
}

static void err_on_2(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 2) die("rank 2: error: my own trouble, said once; rank 2 has left (its own message says why)");
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(a_rank_that_exits_by_an_error_has_left_not_died) {
    Team t = team_of(4, 60, err_on_2);
    t.out = folder;
    expect_all(&t, 2, 1, 4, "rank 2 has left (its own message says why)");
    for (int r = 0; r < 4; r++) { // all write their last operations, the one that leaves as well
        char path[128];
        snprintf(path, sizeof path, "%s/ops_rank_%04d.txt", folder, r);
        assert_int_equal(unlink(path), 0);
    }
}

static void err_on_0(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 0) die("rank 0: error: rank 0 has left (its own message says why)");
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(so_has_rank_0) {
    Team t = team_of(4, 60, err_on_0);
    expect_all(&t, 0, 1, 4, "rank 0 has left (its own message says why)");
}

static void* err_in_a_thread(void* unused) {
    (void)unused;
    die("rank 1: error: rank 1 has left (its own message says why)");
}
static void err_elsewhere_on_1(Control* c) {
    pthread_t other;
    two_steps(c);
    if (c->ranks.rank == 1) pthread_create(&other, NULL, err_in_a_thread, NULL);
    wait_forever(c, "world", "all-reduce", 1000, -1);
}
TEST(an_error_in_another_thread_is_told_as_well) {
    Team t = team_of(3, 60, err_elsewhere_on_1);
    expect_all(&t, 1, 1, 4, "rank 1 has left (its own message says why)");
}

static void err_everywhere(Control* c) {
    usleep(c->ranks.rank * 50000);
    die("rank %d has a message of its own", c->ranks.rank);
}
TEST(ranks_that_all_err_all_get_to_say_so) {
    Team t = team_of(4, 60, err_everywhere);
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, be_rank, e);
    for (int r = 0; r < 4; r++) {
        char own[64];
        snprintf(own, sizeof own, "rank %d has a message of its own", r);
        if (e[r].status != 1 || !strstr(e[r].err, own) || strstr(e[r].err, "died")) show(&t, e);
        assert_int_equal(e[r].status, 1);
        assert_non_null(strstr(e[r].err, own));
        assert_null(strstr(e[r].err, "died"));
    }
    ended_free(&t, e);
}

// ---- hanging ----

static void hang_2(Control* c) {
    Fault f = fault_parse("2:3:hang", c->ranks.size);
    two_steps(c);
    fault_strike(&f, c->ranks.rank, 3);
    wait_forever(c, "world", "all-reduce", 5000, -1);
}
TEST(a_rank_that_hangs_is_named_with_the_operation_it_has_not_reached) {
    Team t = team_of(4, 0.7, hang_2);
    expect_all(&t, 2, 1, 8, "rank 2 has not reached all-reduce #2 of world (5000 fp32, step 3)", "has waited",
               "the last operation that rank 2 issued there is all-reduce #1 of world (1000 fp32, step 2)");
}

static void hang_0_and_3(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 0 || c->ranks.rank == 3) for (;;) pause();
    wait_forever(c, "world", "all-reduce", 5000, -1);
}
TEST(several_that_hang_are_named_together) {
    Team t = team_of(4, 0.7, hang_0_and_3);
    expect_all(&t, -1, 1, 8, "ranks 0 and 3 have not reached all-reduce #2 of world");
}

static void hang_before_the_first(Control* c) {
    if (c->ranks.rank == 1) for (;;) pause();
    wait_forever(c, "world", "broadcast", 5000, 0);
}
TEST(a_rank_that_never_issued_anything_is_missed) {
    Team t = team_of(3, 0.7, hang_before_the_first);
    expect_all(&t, -1, 1, 8, "rank 1 has not reached broadcast #0 of world (5000 fp32, root 0, step 0)", "issued there is none");
}

static void stop_2(Control* c) {
    two_steps(c);
    meeting->count = -1;
    if (c->ranks.rank == 2) raise(SIGSTOP);
    wait_forever(c, "world", "all-reduce", 5000, -1);
}
TEST(a_stopped_rank_is_named_and_said_to_be_silent) {
    Team t = team_of(4, 1.5, stop_2);
    expect_all(&t, 2, 1000 + SIGKILL, 10, "rank 2 has not reached all-reduce #2 of world", "it has been silent for",
               "stopped, or its machine is gone");
}

static void stop_0(Control* c) {
    two_steps(c);
    meeting->count = -1;
    if (c->ranks.rank == 0) raise(SIGSTOP);
    wait_forever(c, "world", "all-reduce", 5000, -1);
}
TEST(a_stopped_rank_0_is_found_out_by_the_others) {
    Team t = team_of(4, 1, stop_0);
    expect_all(&t, 0, 1000 + SIGKILL, 12, "rank 0 has been silent for", "stopped, or its machine is gone",
               "for all-reduce #2 of world");
}

static void stop_2_later(Control* c) {
    two_steps(c);
    meeting->count = -1;
    OpRecord op = oplog_issue(&c->log, "world", "all-reduce", 5000, "fp32", -1);
    oplog_wait_begin(&c->log, &op);
    usleep(500000);
    if (c->ranks.rank == 2) raise(SIGSTOP);
    for (;;) pause();
}
TEST(a_rank_that_is_stopped_after_it_issued_is_named_too) {
    Team t = team_of(4, 2.5, stop_2_later);
    expect_all(&t, 2, 1000 + SIGKILL, 12, "rank 2 has been silent for", "waits for all-reduce #2 of world");
}

static void stick(Control* c) { wait_forever(c, "world", "all-gather", 5000, -1); }
TEST(a_wait_that_all_have_reached_is_the_fault_of_none) {
    Team t = team_of(3, 0.7, stick);
    expect_all(&t, -1, 1, 8, "every rank has reached all-gather #0 of world (5000 fp32, step 0)", "the data is not moving");
}

static void disagree(Control* c) { wait_forever(c, "world", c->ranks.rank == 1 ? "all-gather" : "all-reduce", 5000, -1); }
TEST(ranks_that_wait_for_different_operations_are_told_so) {
    Team t = team_of(2, 0.7, disagree);
    expect_all(&t, -1, 1, 8, " issued all-reduce #0 of world (5000 fp32, step 0)",
               " issued all-gather #0 of world (5000 fp32, step 0)");
}

static void hang_as_sender(Control* c) {
    int rank = c->ranks.rank;
    for (int i = 0; i < 5 && rank < 2; i++) issue_and_finish(c, rank == 0 ? "send" : "receive", 1 - rank); // these have met
    for (int i = 0; i < 9 && rank == 0; i++) issue_and_finish(c, "send", 2);                               // and these are others
    if (rank == 1) wait_forever(c, "world", "receive", 5000, 0);
    for (;;) pause();
}
TEST(a_receive_waits_for_its_sender_alone) {
    Team t = team_of(4, 0.7, hang_as_sender);
    expect_all(&t, -1, 1, 8,
               "rank 0 has not reached its side of receive #5 from rank 0 of world (5000 fp32, step 0), for which rank 1",
               "the last operation that rank 0 issued there is send #4 to rank 1");
}

// Rank 3 waits longest, for rank 2, which itself waits for rank 1.
static void hang_in_a_pipeline(Control* c) {
    int rank = c->ranks.rank;
    for (int i = 0; i < 2 && rank > 0; i++) {
        if (rank > 1) issue_and_finish(c, "receive", rank - 1);
        if (rank < 3) issue_and_finish(c, "send", rank + 1);
    }
    oplog_task(&c->log, rank == 1 ? "F2 on stage 1" : "F0 on stage 2");
    if (rank == 2) usleep(400000);
    if (rank > 1) wait_forever(c, "world", "receive", 5000, rank - 1);
    for (;;) pause();
}
TEST(a_wait_along_a_pipeline_is_the_fault_of_where_it_begins) {
    Team t = team_of(4, 1, hang_in_a_pipeline);
    expect_all(&t, -1, 1, 8, "rank 1 has not reached its side of receive #2 from rank 1 of world (5000 fp32, step 0,"
               " F0 on stage 2), for which rank 2", "and it is in F2 on stage 1");
}

// Rank 1 has left out a receive and waits for what comes later, rank 0 for the receive. `patient` has waited longer.
static int patient;
static void leave_out_a_receive(Control* c) {
    int rank = c->ranks.rank;
    if (rank != patient) usleep(300000);
    if (rank == 0) wait_forever(c, "world", "send", 5000, 1);
    wait_forever(c, "world", "all-reduce", 5000, -1);
}
TEST(a_message_that_was_left_out_is_named_and_not_what_others_wait_for) {
    for (int size = 2; size <= 3; size++)
        for (patient = 0; patient < 2; patient++) {
            Team t = team_of(size, 0.7, leave_out_a_receive);
            expect_all(&t, -1, 1, 8, "rank 1 has not reached its side of send #0 to rank 1 of world (5000 fp32, step 0), for"
                       " which rank 0");
        }
}

static void hang_as_receiver(Control* c) {
    int rank = c->ranks.rank;
    for (int i = 0; i < 5 && rank < 2; i++) issue_and_finish(c, rank == 1 ? "send" : "receive", 1 - rank);
    for (int i = 0; i < 9 && rank < 2; i++) issue_and_finish(c, rank == 0 ? "send" : "receive", 1 - rank); // the other way
    if (rank == 1) wait_forever(c, "world", "send", 5000, 0);
    for (;;) pause();
}
TEST(and_a_send_for_its_receiver) {
    Team t = team_of(3, 0.7, hang_as_receiver);
    expect_all(&t, -1, 1, 8, "rank 0 has not reached its side of send #5 to rank 0 of world (5000 fp32, step 0)",
               "the last operation that rank 0 issued there is receive #4 from rank 1");
}

static void hang_in_a_group(Control* c) {
    int rank = c->ranks.rank;
    char name[24];
    snprintf(name, sizeof name, "shard.%d", rank % 2);
    oplog_join(&c->log, name);
    if (rank == 1) wait_forever(c, name, "all-gather", 100, -1);
    for (;;) pause();
}
TEST(only_members_of_a_communicator_are_missed_there) {
    Team t = team_of(4, 0.7, hang_in_a_group);
    expect_all(&t, -1, 1, 8,
               "error: rank 3 has not reached all-gather #0 of shard.1 (100 fp32, step 0), for which rank 1 has waited");
}

static void hang_in_a_comparison(Control* c) {
    if (c->ranks.rank == 1) for (;;) pause();
    ControlBytes parts[MOST];
    control_gather(c, "x", 1, parts);
    control_broadcast(c, "y", 1);
}
TEST(messages_between_hosts_have_the_same_deadline) {
    Team t = team_of(3, 0.7, hang_in_a_comparison);
    expect_all(&t, -1, 1, 8, "rank 1 has not reached gather #1 of control (root 0, step 0)");
}

static ControlBytes think_forever(void* unused, const ControlBytes* given, int size) {
    (void)unused;
    while (size > 0) pause();
    return given[0];
}
static void hang_in_a_decision(Control* c) { control_decide(c, "x", 1, think_forever, NULL); }
TEST(and_so_have_decisions) {
    Team t = team_of(3, 0.7, hang_in_a_decision);
    expect_all(&t, -1, 1, 8, "rank 0 has not reached broadcast #2 of control (root 0, step 0)",
               "the last operation that rank 0 issued there is gather #1 of control");
}

static void hang_at_the_end(Control* c) { if (c->ranks.rank == 1) for (;;) pause(); }
TEST(so_has_the_end) {
    Team t = team_of(3, 0.7, hang_at_the_end);
    expect_all(&t, -1, 1, 8, "rank 1 has not reached goodbye #1 of control (step 0)");
}

// ---- SIGTERM, which launchers send to the rest when one rank has ended ----

static void be_told(Control* c) {
    two_steps(c);
    raise(SIGTERM);
    for (;;) pause();
}
TEST(ranks_that_are_all_told_to_end_do_so_without_a_word) {
    Team t = team_of(4, 60, be_told);
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, be_rank, e);
    for (int r = 0; r < 4; r++) {
        if (e[r].status != 1000 + SIGTERM || e[r].err[0]) show(&t, e);
        assert_int_equal(e[r].status, 1000 + SIGTERM);
        assert_string_equal(e[r].err, "");
        assert_true(e[r].seconds < 6);
    }
    ended_free(&t, e);
}

static void tell_2(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 2) raise(SIGTERM);
    for (;;) pause();
}
TEST(one_that_alone_is_told_to_end_has_left) {
    Team t = team_of(4, 60, tell_2);
    expect_all(&t, 2, 1000 + SIGTERM, 6, "rank 2 has left (it was told to, by SIGTERM)");
}

static void kill_2_as_mpirun_would(Control* c) {
    two_steps(c);
    raise(c->ranks.rank == 2 ? SIGKILL : SIGTERM);
    for (;;) pause();
}
TEST(being_told_to_end_because_another_died_leaves_time_to_say_so) {
    Team t = team_of(4, 60, kill_2_as_mpirun_would);
    expect_all(&t, 2, 1000 + SIGKILL, 6, "rank 2 has died (its connection closed) during step 3");
}

// ---- the file of last operations ----

static char* read_text(const char* path) {
    FILE* f = fopen(path, "r");
    if (f == NULL) return NULL;
    fseek(f, 0, SEEK_END);
    return child_output(f);
}

static void write_many(Control* c) {
    for (int i = 0; i < 100; i++) issue_and_finish(c, "all-reduce", -1);
    two_steps(c);
    if (c->ranks.rank == 1) {
        usleep(500000); // the others are waiting by now
        raise(SIGKILL);
    }
    wait_forever(c, "world", "reduce-scatter", 77, -1);
}
TEST(every_survivor_writes_its_last_operations) {
    Team t = team_of(3, 60, write_many);
    t.out = folder;
    expect_all(&t, 1, 1000 + SIGKILL, 4, "rank 1 has died", "continue from the last checkpoint with --resume",
               "last operations: /tmp/test_control_", "(build/ranks compares them)");
    for (int r = 0; r < 3; r++) {
        char path[128], who[64];
        snprintf(path, sizeof path, "%s/ops_rank_%04d.txt", folder, r);
        snprintf(who, sizeof who, " rank %d of 3 step 3 operations ", r);
        char* text = read_text(path);
        if (r == 1) { assert_null(text); continue; } // it could not write anything
        assert_non_null(text);
        assert_non_null(strstr(text, who));
        assert_non_null(strstr(text, "channel world collective - 103 102\n"));
        assert_non_null(strstr(text, "\nop 102 world reduce-scatter 77 fp32 - 3 started "));
        assert_non_null(strstr(text, "\nop 39 world all-reduce ")); // the first of 64
        assert_null(strstr(text, "\nop 38 world "));
        assert_non_null(strstr(text, "\nend\n"));
        free(text);
        unlink(path);
    }
}

// ---- meeting ----

static void nothing(Control* c) { (void)c; }

TEST(a_rank_that_never_comes_is_named) {
    Team t = team_of(5, 1, nothing);
    t.absent = 1 << 1 | 1 << 3;
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, be_rank, e);
    for (int r = 0; r < 5; r += 2) {
        const char* says = r == 0 ? "ranks 1 and 3 of 5 did not join within 1 s" : "rank 0 has left";
        bool good = e[r].status == 1 && strstr(e[r].err, says);
        if (!good) show(&t, e);
        assert_true(good);
    }
    ended_free(&t, e);
}

static void reach_nobody(void* port) {
    static Control c;
    char address[64];
    RankInfo r = { 1, 2, 1, 2, "a test", "" };
    snprintf(address, sizeof address, "%d word 127.0.0.1", *(int*)port);
    control_init(&c, r, 0.5, "");
    control_join(&c, address);
}
TEST(a_rank_that_cannot_reach_rank_0_says_where_it_tried) {
    int port = 1; // nobody listens there
    expect_death(reach_nobody, &port, "rank 1 could not reach rank 0 at 127.0.0.1, port 1, within 0.5 s", "firewall");
}

static int knock(const char* bytes, size_t n) {
    int port = atoi(meeting->address), fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ensure(fd >= 0 && connect(fd, (struct sockaddr*)&a, sizeof a) == 0);
    ensure(n == 0 || send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n);
    return fd;
}

// A greeting as a rank would send it, except what the test changes.
static void greet(ControlHeader* h, ControlHello* hello, int rank, int size) {
    char hosts[CONTROL_ADDRESS], port[8];
    memset(hello, 0, sizeof *hello);
    h->kind = MESSAGE_HELLO;
    h->bytes = sizeof *hello;
    memcpy(hello->magic, CONTROL_MAGIC, sizeof CONTROL_MAGIC);
    ensure(sscanf(meeting->address, "%7s %64s%511[^\n]", port, hello->word, hosts) == 3);
    hello->rank = rank;
    hello->size = size;
    hello->layout = control_layout();
}

static void join_among_strangers(void* argument) {
    int rank = *(int*)argument;
    static Control c;
    if (rank == 1) { // before it joins, strangers come: silent ones, a web browser, a huge message, a wrong word
        struct { ControlHeader h; ControlHello hello; } m;
        while (!__atomic_load_n(&meeting->ready, __ATOMIC_ACQUIRE)) usleep(1000);
        for (int i = 0; i < 20; i++) knock("", 0);
        const char* page = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything there is, and more of it than fits\r\n\r\n";
        int browser = knock(page, strlen(page));
        memset(&m, 0xff, sizeof m);
        knock((char*)&m, sizeof m);
        greet(&m.h, &m.hello, 1, 3);
        m.hello.word[0] ^= 1;
        int wrong_word = knock((char*)&m, sizeof m);
        char answer[8];
        ensure(recv(browser, answer, sizeof answer, 0) <= 0 && recv(wrong_word, answer, sizeof answer, 0) <= 0); // turned away
        greet(&m.h, &m.hello, 1, 3);
        close(knock((char*)&m, 20)); // breaks off
    }
    join(&c, rank);
    control_stop(&c);
}
TEST(strangers_are_turned_away) {
    Team t = team_of(3, 15, NULL);
    expect_success(&t, join_among_strangers);
}

static void join_with_a_double(void* argument) {
    int rank = *(int*)argument;
    static Control c;
    join(&c, rank == 2 ? 1 : rank);
    control_stop(&c);
}
TEST(two_processes_of_one_rank_are_found) {
    Team t = team_of(3, 15, NULL);
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, join_with_a_double, e);
    for (int r = 0; r < 3; r++) {
        if (e[r].status != 1 || !strstr(e[r].err, "two processes say that they are rank 1")) show(&t, e);
        assert_int_equal(e[r].status, 1);
        assert_non_null(strstr(e[r].err, "two processes say that they are rank 1"));
    }
    ended_free(&t, e);
}

static void join_another_size(void* argument) {
    int rank = *(int*)argument;
    static Control c;
    static Team larger;
    if (rank == 1) {
        larger = *team;
        larger.size = 3;
        team = &larger;
    }
    join(&c, rank);
    control_stop(&c);
}
TEST(ranks_that_were_told_of_different_sizes_are_found) {
    Team t = team_of(2, 15, NULL);
    Ended e[MOST];
    memset(e, 0, sizeof e);
    team_run(&t, join_another_size, e);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(e[r].status, 1);
        assert_non_null(strstr(e[r].err, "rank 1 was started as one of 3 ranks, rank 0 as one of 2"));
    }
    ended_free(&t, e);
}

static void join_where_the_launcher_says(void* argument) {
    int rank = *(int*)argument;
    static Control c;
    RankInfo r = rank_of(rank);
    snprintf(r.meeting, sizeof r.meeting, "%d run-7 localhost", 20000 + (int)getppid() % 20000);
    control_init(&c, r, 15, "");
    char address[CONTROL_ADDRESS] = "";
    if (rank == 0) control_listen(&c, address);
    control_join(&c, rank == 0 ? address : ""); // nobody tells the others
    control_stop(&c);
}
TEST(ranks_meet_where_their_launcher_says) {
    Team t = team_of(3, 15, NULL);
    expect_success(&t, join_where_the_launcher_says);
}

static void take_a_port_twice(void* unused) {
    (void)unused;
    static Control a, b;
    RankInfo r = { 0, 2, 0, 1, "a test", "" };
    char address[CONTROL_ADDRESS];
    snprintf(r.meeting, sizeof r.meeting, "%d run-7 localhost", 20000 + (int)getpid() % 20000);
    control_init(&a, r, 1, "");
    control_init(&b, r, 1, "");
    control_listen(&a, address);
    control_listen(&b, address);
}
TEST(a_port_in_use_is_an_error_with_a_remedy) {
    expect_death(take_a_port_twice, NULL, "cannot listen", "--master-port");
}

TEST(ranks_on_several_machines_are_given_every_address) {
    Control c;
    RankInfo r = { 0, 2, 0, 1, "a test", "" };
    char address[CONTROL_ADDRESS], word[65], hosts[CONTROL_ADDRESS];
    int port;
    control_init(&c, r, 1, "");
    control_listen(&c, address);
    assert_int_equal(sscanf(address, "%d %64s %511[^\n]", &port, word, hosts), 3);
    assert_int_equal(strlen(word), 32);
    assert_true(port > 0 && port < 65536);
    close(c.listener);
    free(c.peers);
    free(c.polled);
    oplog_free(&c.log);
}

// MANUAL: []
//     meeting = (Meeting*)mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
//     if (meeting == MAP_FAILED || mkdtemp(folder) == NULL) return 1;
//     int failures = cmocka_run_group_tests(tests, NULL, NULL);
//     rmdir(folder);
//     return failures;

