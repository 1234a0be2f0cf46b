// test_control.c - ranks that watch one another: several processes, one of which dies, stops, hangs or fails.
// test/runs/test_faults.py kills ranks of whole runs. No test depends on the speed of a rank: a referee lets deadlines pass once
// no rank can go any further.
#include "../../llmc/device/checksum.h"
#include "../../llmc/run/consistency.h"
#include "test_folder.h"
#include <sys/mman.h>

// ---- a team of processes ----
#define MOST 8
#define LONG 1800.0 // seconds, longer than any wait
#define HUNG 100    // seconds after which a rank is killed, and its test fails
#define LAST_STEP 9 // a rank that reaches it stops working

typedef struct { // shared by the processes of a test
    volatile int ready;
    char address[CONTROL_ADDRESS];
    int count, told[MOST]; // a counter for tests; whether rank 0 knows that a rank will not go any further
    pid_t stopped;         // the process that stopped itself, or 0
} Meeting;
static Meeting* meeting;

typedef struct {
    int size;
    int harmed, status;           // the rank that ends in another way, and its status: of exit, 1000 + a signal, ANY; 0: no rank
    const char *own, *says[4];    // the errors of that rank and of the others, who end with status 1
    int every;                    // without such errors: all ranks end silently with this status
    bool late;                    // deadlines pass once all ranks wait or hang
    unsigned stops, absent;       // bits: ranks that are stopped, and ranks that are never started
    bool mesh, hosts;             // ranks are named; each machine runs two ranks
    double grace;                 // seconds in which the others may report an error; 0: the default
    const char* out;
    bool apart;                   // ranks do not meet before the test starts
} Team;
static Control control; // of a rank
static const Team* team;
#define ANY -1
#define KILLED (1000 + SIGKILL)
#define ERRS(rank) .harmed = rank, .status = 1, .own = "rank " #rank " is in trouble" // in err()
#define LEFT(rank) "rank " #rank " has left (its own message says why)"

#define with_lock(c, ...) do { pthread_mutex_lock(&(c)->lock); __VA_ARGS__; pthread_mutex_unlock(&(c)->lock); } while (0)
#define ensure(condition) invariant(condition, "this does not hold: %s", #condition) // within a rank
static pthread_t beside(void* (*thread)(void*), Control* c) {
    pthread_t other;
    ensure(pthread_create(&other, NULL, thread, c) == 0);
    return other;
}
static void count(void) { __atomic_add_fetch(&meeting->count, 1, __ATOMIC_ACQ_REL); }
static void await_ready(void) { while (!__atomic_load_n(&meeting->ready, __ATOMIC_ACQUIRE)) usleep(1000); }
static void await_count(int n) { while (__atomic_load_n(&meeting->count, __ATOMIC_ACQUIRE) < n) usleep(1000); }

static char launchers_place[64]; // where ranks meet, if the launcher decides that
static RankInfo rank_of(int rank, int size) {
    RankInfo r = { rank, size, rank, size, "a test", "" };
    snprintf(r.meeting, sizeof r.meeting, "%s", launchers_place);
    return r;
}

// Rank 0 publishes its address; the others wait for it, as they would in MPI_Bcast.
static void join(Control* c, int rank, int size) {
    control_init(c, rank_of(rank, size), LONG, team->out ? team->out : "");
    if (team->grace > 0) c->grace = team->grace;
    if (rank == 0) {
        control_listen(c, meeting->address);
        __atomic_store_n(&meeting->ready, 1, __ATOMIC_RELEASE);
    }
    await_ready();
    control_join(c, meeting->address);
    flight_recorder_join(&c->recorder, "world");
}

// Returns true if rank 0 knows that rank r will not go any further. If r is to stop, waits until it has been silent for long.
// The first three operations belong to the meeting.
static bool stays(const Control* c, int r, double now) {
    const ControlBeat* b = &c->peers[r].beat;
    if (team->stops >> r & 1 && meeting->told[r]) return now - c->peers[r].heard > CONTROL_SILENCE + 0.1;
    bool in_meeting = b->awaited.place <= 2, passes = r > 0 && strcmp(b->awaited.collective, "gather") == 0;
    return (b->waited >= 0 && !in_meeting && !passes) || b->progress.step == LAST_STEP;
}
// A thread of rank 0 that lets the deadline pass when nothing more will change. A stopped rank cannot report anything, so it is
// killed once the others know why they end.
static void* referee(void* control) {
    Control* c = (Control*)control;
    for (bool all = false, ends = false; !ends; usleep(1000)) {
        pthread_mutex_lock(&c->lock);
        all = true;
        for (int r = 0; r < team->size; r++) {
            bool stayed = stays(c, r, now_seconds());
            all = all && stayed && (meeting->told[r] || !(team->stops >> r & 1));
            if (stayed) __atomic_store_n(&meeting->told[r], 1, __ATOMIC_RELEASE);
        }
        if (all && team->late) c->timeout = -CONTROL_SETTLE;
        ends = c->reason != REASON_NONE;
        pthread_mutex_unlock(&c->lock);
    }
    if (meeting->stopped) kill(meeting->stopped, SIGKILL);
    return NULL;
}

// ---- operations that move nothing: the log entries that comm.h would make ----
// A collective of all ranks, which exists only in the log.
static void issue_and_finish(Control* c, const char* collective, int peer) {
    OpRecord op = flight_recorder_issue(&c->recorder, "world", collective, 1000, "fp32", peer);
    flight_recorder_start(&c->recorder, &op);
    flight_recorder_finish(&c->recorder, &op);
}
static void begin_wait(Control* c, const char* communicator, const char* collective, size_t n, int peer) {
    OpRecord op = flight_recorder_issue(&c->recorder, communicator, collective, n, "fp32", peer);
    flight_recorder_start(&c->recorder, &op);
    flight_recorder_wait_begin(&c->recorder, &op);
}
static void wait_forever(Control* c, const char* communicator, const char* collective, size_t n, int peer) {
    begin_wait(c, communicator, collective, n, peer);
    for (;;) pause();
}
static void wait_for_all(Control* c) { wait_forever(c, "world", "all-reduce", 5000, -1); }
static void await_told(Control* c) { while (!__atomic_load_n(&meeting->told[c->ranks.rank], __ATOMIC_ACQUIRE)) usleep(1000); }
static void hang(Control* c) {
    flight_recorder_step(&c->recorder, LAST_STEP);
    for (;;) pause();
}

// Logs the operations of two steps, so that errors have operations to name. Returns when all ranks have finished.
static void two_steps(Control* c) {
    for (long long step = 1; step <= 2; step++) {
        flight_recorder_step(&c->recorder, step);
        issue_and_finish(c, "all-reduce", -1);
    }
    flight_recorder_step(&c->recorder, 3);
    count();
    await_count(team->size);
}

// ---- how teams begin and end ----
static void meet(Control* c, int rank) {
    join(c, rank, team->size);
    if (team->mesh) {
        char (*names)[RANK_NAME] = (char (*)[RANK_NAME])xcalloc((size_t)team->size, RANK_NAME);
        for (int r = 0; r < team->size; r++) snprintf(names[r], RANK_NAME, "dp %d, tp %d", r / 2, r % 2);
        control_name_ranks(c, names);
    }
    if (team->hosts) { // as control_share_hosts gives them
        c->hosts = (char (*)[RANK_NAME])xcalloc((size_t)team->size, RANK_NAME);
        for (int r = 0; r < team->size; r++) snprintf(c->hosts[r], RANK_NAME, "node%d", r / 2);
    }
    if (rank == 0 && team->says[0]) pthread_detach(beside(referee, c));
}

// Every rank reports exactly one error, with all phrases. A sanitizer's report is a failure.
static bool as_expected(const Team* t, int r, const Child* e) {
    bool harmed = t->status != 0 && r == t->harmed;
    if (harmed && t->status == ANY) return e->status != 0;
    if (e->status != (harmed ? t->status : t->says[0] ? 1 : t->every)) return false;
    if (strstr(e->err, "Sanitizer") || strstr(e->err, "runtime error:")) return false;
    if (t->says[0] == NULL) return e->err[0] == '\0';
    if (harmed && t->own == NULL) return true;
    char prefix[32];
    snprintf(prefix, sizeof prefix, "rank %d: error: ", r);
    const char* line = t->apart ? e->err : strstr(e->err, prefix);
    bool good = line && (t->apart || !strstr(line + 1, prefix));
    for (int i = 0; i < 4 && t->says[i] && !harmed; i++) good = good && strstr(line, t->says[i]);
    return good && (!harmed || strstr(line, t->own));
}

static RunningChild children[MOST];
// Returns the number of the rank in a process of each rank, and -1 in the test's.
static int team_start(const Team* t) {
    team = t;
    memset(meeting, 0, sizeof *meeting);
    for (int r = 0; r < t->size; r++) {
        if (t->absent >> r & 1 || (children[r] = child_start()).pid > 0) continue;
        message_rank = r;
        alarm(HUNG);
        return r;
    }
    return -1;
}
// Returns when all ranks have ended as they should.
static void team_end(const Team* t) {
    Child ended[MOST] = { { 0, NULL, NULL } };
    unsigned bad = 0;
    for (int turn = 0; turn < 2; turn++) // stopped ranks do not end by themselves: they are killed after the others
        for (int r = 0; r < t->size; r++) {
            if (t->absent >> r & 1 || (t->stops >> r & 1) != (unsigned)turn) continue;
            if (turn == 1) kill(children[r].pid, SIGKILL);
            ended[r] = child_end(children[r]);
            if (!as_expected(t, r, &ended[r])) bad |= 1u << r;
        }
    for (int r = 0; r < t->size; r++) {
        const char* as = bad >> r & 1 ? " (unexpected)" : "";
        if (bad && ended[r].err) print_error("rank %d%s: status %d: %s\n", r, as, ended[r].status, ended[r].err);
        child_free(&ended[r]);
    }
    if (bad) fail_msg("not every rank said '%s'", t->says[0] ? t->says[0] : "nothing");
}
// Runs a team: each process executes `statement` with its control c and its number `rank`. Other arguments say how the team ends.
#define team_runs(t, statement) do { \
        const Team team_ = t; \
        Control* c = &control; \
        int rank = team_start(&team_); \
        if (rank >= 0) { statement; exit(0); } \
        team_end(&team_); \
    } while (0)
#define team(size_, statement, ...) \
    team_runs(((Team){ .size = size_, __VA_ARGS__ }), meet(c, rank); statement; control_stop(c))
#define team_apart(size_, statement, ...) team_runs(((Team){ .size = size_, .apart = true, __VA_ARGS__ }), statement)

// How a crash ends a process. The address sanitizer exits with a report instead, which these tests do not count as a failure.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CRASHED(signal) ANY
#else
#define CRASHED(signal) (1000 + (signal))
#endif

void before_all(void) {
    meeting = (Meeting*)mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(meeting != MAP_FAILED, "cannot make what the ranks share: %s", strerror(errno));
    setenv("SHARD_LEAVE_SECONDS", "600", 1); // longer than a team may take, so that only the ranks' actions decide
}

// Returns the text of a rank's file of last operations, and removes the file. The caller frees it.
static char* last_operations(int rank) {
    char name[32];
    snprintf(name, sizeof name, "ops_rank_%04d.txt", rank);
    FILE* f = fopen(in_folder("%s", name), "r");
    assert_non_null(f);
    unlink(in_folder("%s", name));
    return child_output(f);
}

// ---- small messages and decisions ----
// Contributions of rank r, by turn: nothing; a few bytes, except from rank 0; the largest size, the same on all ranks; different
// sizes; a few bytes without an answer, so that ranks run ahead of rank 0.
enum { ANSWERED = 23, ROUNDS = ANSWERED + 50 };
static size_t given_bytes(int round, int r) {
    if (round >= ANSWERED) return 4;
    return round == 0 ? 0 : round < 20 ? (size_t)((2 * r + round - 1) % 20) : CONTROL_MAX_MESSAGE - (size_t)(r * (round - 20));
}
static char given_byte(int round, int r, size_t i) { return (char)((i % 7 + (size_t)round) * (size_t)(r + 1)); }
static bool is_given(ControlBytes b, int round, int r) {
    bool same = b.bytes == given_bytes(round, r);
    for (size_t i = 0; same && i < b.bytes; i++) same = b.data[i] == given_byte(round, r, i);
    return same;
}
static void give(Control* c) { // rank 0 answers with the last rank's contribution
    int rank = c->ranks.rank, last = c->ranks.size - 1;
    char* bytes = (char*)xcalloc(CONTROL_MAX_MESSAGE, 1);
    for (int round = 0; round < ROUNDS; round++) {
        size_t n = given_bytes(round, rank), of_answer = rank == 0 ? given_bytes(round, last) : 0;
        for (size_t i = 0; i < n; i++) bytes[i] = given_byte(round, rank, i);
        ControlBytes* given = control_gather(c, n ? bytes : NULL, n);
        ensure((given != NULL) == (rank == 0));
        for (int r = 0; given && r <= last; r++) ensure(is_given(given[r], round, r));
        control_gathered_free(c, given);
        if (round >= ANSWERED) continue;
        for (size_t i = 0; i < of_answer; i++) bytes[i] = given_byte(round, last, i);
        ControlBytes answer = control_broadcast(c, bytes, of_answer);
        ensure(is_given(answer, round, last) && answer.data[answer.bytes] == '\0');
        free(answer.data);
    }
    free(bytes);
}
TEST(messages_arrive_in_order_and_all_ranks_get_the_answer_to_what_all_of_them_gave_however_long) {
    for (int size = 1; size <= 7; size += 3) team(size, give(c));
}

TEST(an_answer_that_is_too_long_ends_every_rank) {
    const size_t n = CONTROL_MAX_MESSAGE + 1;
    team(3, control_broadcast(c, xcalloc(n, 1), rank == 0 ? n : 0), .harmed = 0, .status = 1,
         .own = "a message between hosts holds 1048576 bytes, not 1048577", .says = { "rank 0 has left" });
}

// ---- what must be the same on all ranks ----
// Compares three units, of which the last may be in parts: then every second rank holds the same part. From rank `differs` on,
// one unit differs.
static void compare_units(Control* c, int parts, int differs) {
    int rank = c->ranks.rank;
    bool is_other = rank == 3 && rank > differs;
    uint64_t sums[3] = { is_other ? 1 : 7, parts == 1 && rank >= differs, UINT64_MAX - (uint64_t)(rank % parts) };
    if (parts == 2 && rank == differs) sums[2] = 0;
    for (long long step = 5; step <= 7; step++) require_same_units(c, "parameters", sums, 3, parts, step);
}
TEST(ranks_with_the_same_units_or_parts_continue) {
    for (int size = 1; size <= 5; size++)
        for (int parts = 1; parts <= 2; parts++) team(size, compare_units(c, parts, MOST));
}
TEST(every_rank_names_the_ranks_and_the_unit_that_differ) {
    team(4, compare_units(c, 1, 1), // of several differing ranks, the first is named
         .says = { "after step 5 the parameters of unit 1 differ between rank 0 and rank 1",
                   "continue from the last checkpoint with --resume" });
    team(4, compare_units(c, 2, 3), .says = { "after step 5 the parameters of unit 2 differ between rank 1 and rank 3" });
    team(4, compare_units(c, 2, 3), .mesh = true, .says = { "unit 2 differ between rank 1 (dp 0, tp 1) and rank 3 (dp 1, tp 1)" });
}

// Messages along a line of ranks, and collectives, which are not messages. Rank `lazy` leaves out a receive, or a send.
static void pass_messages(Control* c, int lazy, const char* lazy_in) {
    int rank = c->ranks.rank, last = c->ranks.size - 1;
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
TEST(a_message_that_was_not_received_or_not_sent_is_found) {
    team(3, pass_messages(c, -1, ""));
    team(3, pass_messages(c, 2, "receive"),
         .says = { "after step 7: 3 messages went from rank 1 to rank 2 of world, and 2 were received" });
    team(3, pass_messages(c, 2, "receive"), .mesh = true,
         .says = { "went from rank 1 (dp 0, tp 1) to rank 2 (dp 1, tp 0) of world, and 2 were" });
    team(3, pass_messages(c, 0, "send"),
         .says = { "after step 7: 2 messages went from rank 0 to rank 1 of world, and 3 were received" });
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
TEST(the_end_waits_for_the_slowest) {
    team_apart(4, join(c, rank, 4); usleep((unsigned)rank * 100000); count(); control_stop(c); ensure(meeting->count == 4));
}

static void* issue_many(void* control) {
    for (int i = 0; i < 20000; i++) {
        issue_and_finish((Control*)control, "all-reduce", -1);
        if (i % 1000 == 0) usleep(10000); // heartbeats in between
    }
    return NULL;
}
TEST(any_thread_may_note_operations_while_the_watchdog_reads) {
    team(3, pthread_t other = beside(issue_many, c); issue_many(c); pthread_join(other, NULL);
         ensure(c->recorder.channels[1].issued == 40000 && c->recorder.channels[1].finished == 40000));
}

// ---- death ----
__attribute__((no_sanitize("undefined")))
static void crash(Control* c) {
    volatile int* volatile nowhere = NULL;
    if (c->ranks.rank == 0) abort();
    if (c->ranks.rank == 1) raise(SIGFPE);
    *nowhere = 7;
}
TEST(a_rank_that_crashes_says_how_and_writes_its_last_operations) {
    static const int signals[] = { SIGABRT, SIGFPE, SIGSEGV };
    for (int r = 0; r < 3; r++) {
        char said[128];
        snprintf(said, sizeof said, "rank %d has died (%s) during step 3", r, strsignal(signals[r]));
        team(3, two_steps(c); if (rank == r) crash(c); wait_for_all(c),
             .harmed = r, .status = CRASHED(signals[r]), .says = { said }, .out = folder);
        for (int k = 0; k < 3; k++) free(last_operations(k));
    }
}

// A rank on another machine shares no memory, so rank 0 only knows its last heartbeat.
static void be_killed_elsewhere(Control* c) {
    if (c->ranks.rank == 2) c->recorder.shared = NULL;
    two_steps(c);
    if (c->ranks.rank < 2) wait_for_all(c);
    flight_recorder_task(&c->recorder, "D5 on stage 2");
    flight_recorder_step(&c->recorder, LAST_STEP);
    await_told(c);
    raise(SIGKILL);
}
TEST(on_another_machine_with_what_it_was_last_heard_of_in) {
    team(3, be_killed_elsewhere(c), .harmed = 2, .status = KILLED,
         .says = { "rank 2 has died (its connection closed) during step 9; it was last heard of in D5 on stage 2" });
}

// A torn write of a killed rank is not read, and an address of another run or machine is refused.
TEST(places_are_whole_and_of_this_run) {
    ProgressTable p = { -1, NULL, 0 }, q = p;
    RankProgress a = { 3, "F1 on stage 0" }, b = { 3, "F2 on stage 0" }, found;
    ProgressTableAddress address = progress_table_create(&p, 2), wrong = address;
    assert_non_null(p.memory);
    wrong.mark += 1;
    progress_table_open(&q, wrong, 2);
    assert_null(q.memory);
    progress_table_open(&q, address, 3);
    assert_null(q.memory);
    progress_table_open(&q, address, 2);
    assert_non_null(q.memory);
    assert_false(progress_read(progress_of(&q, 1), &found));
    progress_write(progress_of(&p, 1), &a);
    progress_write(progress_of(&p, 1), &b);
    SharedProgress* s = progress_of(&p, 1);
    for (int damaged = 0; damaged < 2; damaged++) {
        if (damaged) memset(&s->half[1 - s->last], 'x', sizeof(RankProgress) / 2);
        assert_true(progress_read(progress_of(&q, 1), &found) && strcmp(found.task, b.task) == 0 && found.step == 3);
    }
    assert_false(progress_read(progress_of(&q, 0), &found));
    progress_table_close(&q);
    progress_table_close(&p);
    assert_false(progress_read(progress_of(&p, 1), &found));
}

// ---- ranks that leave, by an error of their own ----
static void err(Control* c) { die("rank %d is in trouble", c->ranks.rank); }
static void* err_in_thread(void* control) {
    err((Control*)control);
    return NULL;
}
TEST(a_rank_that_exits_by_an_error_has_left_not_died) {
    team(4, two_steps(c); if (rank == 2) err(c); wait_for_all(c), ERRS(2), .says = { LEFT(2) }, .out = folder);
    for (int r = 0; r < 4; r++) free(last_operations(r)); // the leaving rank wrote its file, too, like all others
    team(4, two_steps(c); if (rank == 0) err(c); wait_for_all(c), ERRS(0), .says = { LEFT(0) });
    team(3, two_steps(c); if (rank == 1) { beside(err_in_thread, c); for (;;) pause(); } wait_for_all(c),
         ERRS(1), .says = { LEFT(1) });
}

// A rank that left stays alive while others may still report errors of their own. The default time would be too short.
static void err_in_turn(Control* c, bool rank_0_first) { // rank 0 after all others, or the others after rank 0
    bool first = (c->ranks.rank == 0) == rank_0_first, now = first, here = true;
    for (; !now; usleep(1000))
        with_lock(c, now = c->reason != REASON_NONE; for (int r = 1; r < c->num_peers; r++) now = now && c->peers[r].heard_end);
    if (!first) usleep(700000 + (unsigned)c->ranks.rank * 100000);
    with_lock(c, for (int i = c->ranks.rank == 0; i < c->num_peers; i++) here = here && c->peers[i].fd >= 0);
    ensure(here);
    err(c);
}
TEST(ranks_that_all_err_all_get_to_say_so) {
    team(4, err_in_turn(c, false), .says = { "is in trouble" });
    team(4, err_in_turn(c, true), .says = { "is in trouble" });
}

// Rank 3 waits for rank 2, which waits for rank 1, which left. Rank 0 sends, which may not need the receiver, so it notices later.
TEST(ranks_that_wait_for_one_that_left_are_not_given_the_time_to_err) {
    team(4, if (rank == 1) err(c); wait_forever(c, "world", rank == 0 ? "send" : "receive", 5000, rank == 0 ? 1 : rank - 1),
         ERRS(1), .says = { LEFT(1) });
    team(4, if (rank == 1) err(c); for (;;) pause(), ERRS(1), .says = { LEFT(1) }, .grace = 0.3); // no longer than this
}

TEST(the_time_to_err_is_a_number_of_seconds) {
    static const char* const wrong[] = { "", "x", "1x", "-1", "nan", "1e9" };
    expect_success(setenv("SHARD_LEAVE_SECONDS", "0.25", 1); ensure(control_leave_seconds() == 0.25));
    for (size_t i = 0; i < COUNT(wrong); i++)
        expect_error(setenv("SHARD_LEAVE_SECONDS", wrong[i], 1); control_leave_seconds(), "must be seconds from 0 to 3600, not '");
}

// ---- hanging ----
TEST(ranks_that_hang_are_named_with_the_operation_they_have_not_reached) {
    team(4, two_steps(c); if (rank == 2) hang(c); wait_for_all(c), .late = true,
         .says = { "rank 2 has not reached all-reduce #2 of world (5000 fp32, step 3)", "has waited",
                   "the last operation that rank 2 issued there is all-reduce #1 of world (1000 fp32, step 2)",
                   "; without --out there is no checkpoint" });
    team(4, if (rank % 3 == 0) hang(c); wait_forever(c, "world", "broadcast", 5000, 0), .late = true,
         .says = { "ranks 0 and 3 have not reached broadcast #0 of world (5000 fp32, root 0, step 0)", "issued there is none" });
}

static void stop(Control* c, bool waiting) {
    if (waiting) begin_wait(c, "world", "all-reduce", 5000, -1);
    else flight_recorder_step(&c->recorder, LAST_STEP);
    await_told(c);
    meeting->stopped = getpid();
    raise(SIGSTOP);
}
TEST(a_stopped_rank_is_named_and_said_to_be_silent) {
    team(4, two_steps(c); if (rank == 2) stop(c, false); wait_for_all(c),
         .late = true, .harmed = 2, .status = KILLED, .stops = 1 << 2,
         .says = { "rank 2 on node1 has not reached all-reduce #2 of world", "rank 2 on node1 has been silent for",
                   "stopped, or its machine is gone" }, .hosts = true);
    team(4, two_steps(c); if (rank == 2) stop(c, true); wait_for_all(c),
         .late = true, .harmed = 2, .status = KILLED, .stops = 1 << 2,
         .says = { "rank 2 has been silent for", "waits for all-reduce #2 of world" });
    // without rank 0, every other rank applies its own deadline
    team(4, two_steps(c); if (rank == 0) raise(SIGSTOP); with_lock(c, c->timeout = -CONTROL_SETTLE - CONTROL_PATIENCE);
         wait_for_all(c),
         .harmed = 0, .status = KILLED, .stops = 1 << 0,
         .says = { "rank 0 has been silent for", "stopped, or its machine is gone", "for all-reduce #2 of world" });
}

TEST(a_wait_that_all_have_reached_is_the_fault_of_none_or_of_different_operations) {
    team(3, wait_for_all(c), .late = true,
         .says = { "every rank has reached all-reduce #0 of world (5000 fp32, step 0)", "the data is not moving" });
    team(2, wait_forever(c, "world", rank == 1 ? "all-gather" : "all-reduce", 5000, -1), .late = true,
         .says = { " issued all-reduce #0 of world (5000 fp32, step 0)", " issued all-gather #0 of world (5000 fp32, step 0)" });
}

// sends: rank 1 sends five times to rank 0 and receives nine times from it, or the other way round.
static void hang_in_a_message(Control* c, bool sends) {
    int rank = c->ranks.rank;
    bool one_is_send = (rank == 1) == sends;
    const char *one = one_is_send ? "send" : "receive", *other = one_is_send ? "receive" : "send";
    for (int i = 0; i < 5 && rank < 2; i++) issue_and_finish(c, one, 1 - rank);
    for (int i = 0; i < 9 && rank < 2; i++) issue_and_finish(c, other, 1 - rank);
    for (int i = 0; i < 9 && rank == 0; i++) issue_and_finish(c, one, 2); // with another rank
    if (rank == 1) wait_forever(c, "world", one, 5000, 0);
    hang(c);
}
TEST(a_message_waits_for_its_other_end_alone) {
    team(4, hang_in_a_message(c, false), .late = true,
         .says = { "rank 0 has not reached its side of receive #5 from rank 0 of world (5000 fp32, step 0), for which rank 1",
                   "the last operation that rank 0 issued there is send #4 to rank 1" });
    team(4, hang_in_a_message(c, true), .late = true,
         .says = { "rank 0 has not reached its side of send #5 to rank 0 of world (5000 fp32, step 0)",
                   "the last operation that rank 0 issued there is receive #4 from rank 1" });
}

// Rank 3 waits longest, for rank 2, which itself waits for rank 1.
static void hang_in_a_pipeline(Control* c) {
    int rank = c->ranks.rank;
    for (int i = 0; i < 2 && rank > 0; i++) {
        if (rank > 1) issue_and_finish(c, "receive", rank - 1);
        if (rank < 3) issue_and_finish(c, "send", rank + 1);
    }
    flight_recorder_task(&c->recorder, rank == 1 ? "F2 on stage 1" : "F0 on stage 2");
    if (rank == 2) await_count(1), usleep(400000);
    if (rank > 1) begin_wait(c, "world", "receive", 5000, rank - 1);
    if (rank == 3) count();
    while (rank > 1) pause();
    hang(c);
}
TEST(a_wait_along_a_pipeline_is_the_fault_of_where_it_begins) {
    team(4, hang_in_a_pipeline(c), .late = true,
         .says = { "rank 1 has not reached its side of receive #2 from rank 1 of world (5000 fp32, step 0, F0 on stage 2), for which"
                   " rank 2", "and it is in F2 on stage 1" });
}

// Rank 1 skipped a receive and waits in the operation after it; rank 0 waits for the receive. Rank `patient` waits longer.
static void leave_out_a_receive(Control* c, int patient) {
    int rank = c->ranks.rank;
    if (rank != patient) await_count(1), usleep(300000);
    begin_wait(c, "world", rank == 0 ? "send" : "all-reduce", 5000, rank == 0 ? 1 : -1);
    if (rank == patient) count();
    for (;;) pause();
}
TEST(a_message_that_was_left_out_is_named_and_not_what_others_wait_for) {
    for (int size = 2; size <= 3; size++)
        for (int patient = 0; patient < 2; patient++)
            team(size, leave_out_a_receive(c, patient), .late = true,
                 .says = { "rank 1 has not reached its side of send #0 to rank 1 of world (5000 fp32, step 0), for which rank 0" });
}

TEST(only_members_of_a_communicator_are_missed_there) {
    team(4, const char* name = rank % 2 ? "shard.1" : "shard.0"; flight_recorder_join(&c->recorder, name);
         if (rank == 1) wait_forever(c, name, "all-gather", 100, -1); hang(c), .late = true,
         .says = { "error: rank 3 has not reached all-gather #0 of shard.1 (100 fp32, step 0), for which rank 1 has waited" });
}

TEST(small_messages_decisions_and_the_end_have_the_same_deadline) {
    team(3, if (rank == 1) hang(c); control_all_gather(c, "x", 1), .late = true,
         .says = { "rank 1 has not reached gather #3 of control (root 0, step 0)" });
    team(3, control_gather(c, "x", 1); if (rank == 0) hang(c); control_broadcast(c, "y", 1), .late = true,
         .says = { "rank 0 has not reached broadcast #4 of control (root 0, step 0)",
                   "the last operation that rank 0 issued there is gather #3 of control" });
    team(3, if (rank == 1) hang(c), .late = true, .says = { "rank 1 has not reached goodbye #3 of control (step 0)" });
}

// ---- SIGTERM, which launchers send to the other ranks when one rank ends ----
// No watchdog acts before all ranks received their signals.
static void be_told(Control* c) {
    bool dies = team->status == KILLED && c->ranks.rank == team->harmed;
    two_steps(c);
    pthread_mutex_lock(&c->lock);
    count();
    await_count(2 * c->ranks.size); // all ranks wait at this point, so no watchdog sees a death early
    kill(getpid(), dies ? SIGKILL : SIGTERM); // not raise(), because this thread blocks SIGTERM
    count();
    await_count(3 * c->ranks.size - (team->status == KILLED));
    pthread_mutex_unlock(&c->lock);
    for (;;) pause();
}
TEST(ranks_that_are_told_to_end_do_so_without_a_word_and_have_left_for_those_that_are_not) {
    team(4, be_told(c), .every = 1000 + SIGTERM, .grace = 0.01);
    team(4, two_steps(c); if (rank == 2) { kill(getpid(), SIGTERM); for (;;) pause(); } wait_for_all(c),
         .harmed = 2, .status = 1000 + SIGTERM, .grace = 0.01, .says = { "rank 2 has left (it was told to, by SIGTERM)" });
}
TEST(being_told_to_end_because_another_died_leaves_time_to_say_so) {
    team(4, be_told(c), .harmed = 2, .status = KILLED, .says = { "rank 2 has died (its connection closed)" });
}

// ---- the file of last operations ----
static void die_while_others_wait(Control* c) {
    two_steps(c);
    if (c->ranks.rank == 1) {
        await_count(team->size + 2);
        raise(SIGKILL);
    }
    begin_wait(c, "world", "reduce-scatter", 77, -1);
    count();
    for (;;) pause();
}
TEST(every_survivor_writes_its_last_operations) {
    team(3, die_while_others_wait(c), .harmed = 1, .status = KILLED, .out = folder,
         .says = { "rank 1 has died", "continue from the last checkpoint with --resume", "last operations: /tmp/shard_test_",
                   "(build/ranks compares them)" });
    for (int r = 0; r < 3; r += 2) { // rank 1 could not write anything
        FREED char* text = last_operations(r);
        char who[64];
        snprintf(who, sizeof who, " rank %d of 3 step 3 operations ", r);
        assert_non_null(strstr(text, who));
        assert_non_null(strstr(text, "\nop 2 world reduce-scatter 77 fp32 - 3 started "));
    }
}

// ---- meeting ----
// The time for joining ends once all existing ranks joined.
static void await_absent(Control* c, int rank) {
    if (rank > 0) join(c, rank, team->size);
    char port[8];
    control_init(c, rank_of(rank, team->size), LONG, "");
    control_listen(c, meeting->address);
    ensure(sscanf(meeting->address, "%7s %64s", port, c->word) == 2);
    flight_recorder_join(&c->recorder, "control");
    watchdog_start(c);
    __atomic_store_n(&meeting->ready, 1, __ATOMIC_RELEASE);
    for (int joined = 0; joined < 2; usleep(1000)) with_lock(c, joined = c->joined);
    c->timeout = 0;
    control_await_all(c);
}
TEST(ranks_that_never_come_are_named) {
    team_apart(5, await_absent(c, rank), .absent = 1 << 1 | 1 << 3, .harmed = 0, .status = 1,
         .own = "ranks 1 and 3 of 5 did not join within 0 s", .says = { "rank 0 has left" });
}

// A port that nobody else uses while this socket is open. It does not listen, so another with SO_REUSEADDR may.
static int port_of_its_own(int* port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in a = { .sin_family = AF_INET };
    socklen_t length = sizeof a;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    assert_true(bind(fd, (struct sockaddr*)&a, length) == 0 && getsockname(fd, (struct sockaddr*)&a, &length) == 0);
    *port = ntohs(a.sin_port);
    return fd;
}
TEST(a_rank_that_cannot_reach_rank_0_says_where_it_tried) {
    int port, fd = port_of_its_own(&port);
    char address[64], said[128];
    snprintf(address, sizeof address, "%d word 127.0.0.1", port);
    snprintf(said, sizeof said, "rank 1 could not reach rank 0 at 127.0.0.1, port %d, within 0.5 s", port);
    expect_error(control_init(&control, rank_of(1, 2), 0.5, ""); control_join(&control, address), said, "firewall");
    close(fd);
}

// Pretends that the program did not look at the clock for a while, as if it had been stopped.
TEST(time_in_which_nobody_looked_at_the_clock_of_joining_counts_as_stopped) {
    control_init(&control, rank_of(0, 2), LONG, "");
    double before = control_time(&control);
    control.looked -= 0.5 * CONTROL_STOPPED;
    double after = control_time(&control);
    assert_true(after >= before);
    control.looked -= 100;
    assert_true(after - control_time(&control) > 99);
}

static RunningChild one_of_two(int rank, const char* place) {
    RunningChild child = child_start();
    if (child.pid > 0) return child;
    RankInfo r = rank_of(rank, 2);
    char address[CONTROL_ADDRESS];
    snprintf(r.meeting, sizeof r.meeting, "%s", place);
    control_init(&control, r, 5, "");
    if (rank == 0) control_listen(&control, address);
    control_join(&control, "");
    control_stop(&control);
    exit(0);
}
// The first rank to come, 0 or 1, is stopped for longer than the deadline, like a suspended job. The other rank comes later.
TEST(time_in_which_a_rank_was_stopped_before_all_have_met_counts_as_no_wait) {
    char places[2][64];
    int fds[2];
    RunningChild first[2];
    for (int r = 0, port; r < 2; r++) {
        fds[r] = port_of_its_own(&port);
        snprintf(places[r], sizeof places[r], "%d word 127.0.0.1", port);
        first[r] = one_of_two(r, places[r]);
    }
    usleep(500000);
    for (int r = 0; r < 2; r++) kill(first[r].pid, SIGSTOP);
    usleep(5500000);
    for (int r = 0; r < 2; r++) kill(first[r].pid, SIGCONT);
    usleep(300000);
    RunningChild other[2];
    for (int r = 0; r < 2; r++) other[r] = one_of_two(1 - r, places[r]);
    for (int r = 0; r < 2; r++) {
        FREED_BY(child_free) Child one = child_end(first[r]), two = child_end(other[r]);
        if (one.status != 0 || two.status != 0) fail_msg("rank %d was stopped: %s%s", r, one.err, two.err);
        close(fds[r]);
    }
}

static int knock(const void* bytes, size_t n) {
    int port = atoi(meeting->address), fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    ensure(fd >= 0 && connect(fd, (struct sockaddr*)&a, sizeof a) == 0);
    ensure(n == 0 || send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n);
    return fd;
}

// Before rank 1 joins, strangers connect: silent ones, a web browser, a huge message, a wrong word.
static void join_among_strangers(Control* c, int rank) {
    if (rank == 1) {
        struct { ControlHeader h; ControlHello hello; } m;
        char hosts[CONTROL_ADDRESS], port[8], answer[8];
        await_ready();
        for (int i = 0; i < 20; i++) knock("", 0);
        const char* page = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything there is, and more of it than fits\r\n\r\n";
        int browser = knock(page, strlen(page));
        memset(&m, 0xff, sizeof m);
        knock(&m, sizeof m);
        memset(&m, 0, sizeof m); // a rank's greeting, with a wrong word
        m.h = (ControlHeader){ MESSAGE_HELLO, sizeof m.hello };
        memcpy(m.hello.magic, CONTROL_MAGIC, sizeof CONTROL_MAGIC);
        ensure(sscanf(meeting->address, "%7s %64s%511[^\n]", port, m.hello.word, hosts) == 3);
        m.hello.rank = 1;
        m.hello.size = 3;
        m.hello.layout = control_layout();
        m.hello.word[0] ^= 1;
        int wrong_word = knock(&m, sizeof m);
        ensure(recv(browser, answer, sizeof answer, 0) <= 0 && recv(wrong_word, answer, sizeof answer, 0) <= 0); // turned away
        m.hello.word[0] ^= 1;
        close(knock(&m, 20)); // breaks off
    }
    join(c, rank, 3);
    control_stop(c);
}
TEST(strangers_are_turned_away) { team_apart(3, join_among_strangers(c, rank)); }

TEST(two_processes_of_one_rank_and_ranks_of_different_sizes_are_found) {
    team_apart(3, join(c, rank == 2 ? 1 : rank, 3); control_stop(c), .says = { "two processes say that they are rank 1" });
    team_apart(2, join(c, rank, 2 + rank); control_stop(c), .says = { "rank 1 was started as one of 3 ranks, rank 0 as one of 2" });
}

TEST(ranks_meet_where_their_launcher_says_unless_that_port_is_in_use) {
    int port, fd = port_of_its_own(&port);
    snprintf(launchers_place, sizeof launchers_place, "%d run-7 localhost", port);
    static Control c[2];
    char address[CONTROL_ADDRESS] = ""; // not sent to the other ranks
    team_apart(3, control_init(c, rank_of(rank, 3), LONG, ""); if (rank == 0) control_listen(c, address);
               control_join(c, address); control_stop(c));
    expect_error(for (int i = 0; i < 2; i++) { control_init(&c[i], rank_of(0, 2), 1, ""); control_listen(&c[i], address); },
                 "cannot listen", "--master-port");
    launchers_place[0] = '\0';
    close(fd);
}

TEST(ranks_on_several_machines_are_given_every_address) {
    RankInfo r = { 0, 2, 0, 1, "a test", "" };
    char address[CONTROL_ADDRESS], word[65], hosts[CONTROL_ADDRESS];
    int port;
    expect_success(control_init(&control, r, 1, ""); control_listen(&control, address);
                   ensure(sscanf(address, "%d %64s %511[^\n]", &port, word, hosts) == 3);
                   ensure(strlen(word) == 32 && port > 0 && port < 65536));
}
