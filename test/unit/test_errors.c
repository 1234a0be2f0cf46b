// test_errors.c - what is printed when a process dies: with a place in the source or without, in one piece, once for several ranks.
#include "../../llmc/base/folder.h"
#include "../../llmc/comm/say_once.h"
#include "expect_death.h"
#include <sys/time.h>

// ---- one process ----
static void assert_prints(Child c, int status, const char* text) {
    assert_int_equal(c.status, status);
    assert_string_equal(c.err, text);
    child_free(&c);
}

TEST(an_error_that_the_user_can_mend_names_no_place) {
    assert_prints(child_does(die("there are %d", 7)), 1, "error: there are 7\n");
    assert_prints(child_does(require(1 > 2, "%s", "no")), 1, "error: no\n");
    assert_prints(child_does(require_file(file_source("a.bin", "copy it"), false, "is cut")), 1, "error: a.bin: is cut; copy it\n");
    assert_prints(child_does(message_rank = 2; die("no")), 1, "rank 2: error: no\n");
}

TEST(an_error_of_the_program_ends_with_its_place) {
    char text[128];
    snprintf(text, sizeof text, "error: there are 7  [test/unit/test_errors.c:%d]\n", __LINE__ + 1);
    assert_prints(child_does(die_here("there are %d", 7)), 1, text);
    snprintf(text, sizeof text, "rank 2: error: no  [test/unit/test_errors.c:%d]\n", __LINE__ + 1);
    assert_prints(child_does(message_rank = 2; invariant(1 > 2, "no")), 1, text);
    assert_prints(child_does(invariant(2 > 1, "no")), 0, "");
}

TEST(a_warning_names_its_rank_and_ends_nothing) {
    assert_prints(child_does(warn("only %d", 1); message_rank = 3; warn("no locks")), 0,
                  "warning: only 1\nrank 3: warning: no locks\n");
}

// A SEQPACKET socket keeps the child's calls of write(2) apart.
TEST(a_message_is_one_write) {
    static char longest[3 * MESSAGE_BYTES_MAX], got[3 * MESSAGE_BYTES_MAX];
    memset(longest, 'x', sizeof longest - 1);
    static const int lengths[] = { 1, 5000, 3 * MESSAGE_BYTES_MAX - 1 };
    for (size_t i = 0; i < COUNT(lengths); i++) {
        int ends[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
        RunningChild child = child_start();
        if (child.pid == 0) {
            dup2(ends[1], STDERR_FILENO);
            message_rank = 12;
            warn("%.*s", lengths[i], longest);
            die("%.*s", lengths[i], longest);
        }
        close(ends[1]);
        for (int k = 0; k < 2; k++) {
            size_t before = strlen(k ? "rank 12: error: " : "rank 12: warning: "), n = (size_t)recv(ends[0], got, sizeof got, 0);
            assert_int_equal(n, before + size_min((size_t)lengths[i], MESSAGE_BYTES_MAX - 1) + 1); // too long a message is cut
            assert_memory_equal(got, k ? "rank 12: error: x" : "rank 12: warning: x", before + 1);
            assert_int_equal(got[n - 1], '\n');
        }
        assert_int_equal(recv(ends[0], got, sizeof got, 0), 0);
        close(ends[0]);
        assert_prints(child_end(child), 1, "");
    }
}

static void on_alarm(int number) { (void)number; }
TEST(a_write_that_a_signal_interrupts_is_continued) {
    static char text[1 << 20], got[1 << 20];
    for (size_t i = 0; i + 1 < sizeof text; i++) text[i] = (char)('a' + i % 23);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    RunningChild child = child_start();
    if (child.pid == 0) {
        struct sigaction action;
        memset(&action, 0, sizeof action); // without SA_RESTART
        action.sa_handler = on_alarm;
        struct itimerval often = { { 0, 300 }, { 0, 300 } };
        sigaction(SIGALRM, &action, NULL);
        dup2(ends[1], STDERR_FILENO);
        setitimer(ITIMER_REAL, &often, NULL);
        write_stderr(text);
        _exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t k; (k = read(ends[0], got + n, size_min(3000, sizeof got - n))) > 0; n += (size_t)k) usleep(100);
    close(ends[0]);
    assert_prints(child_end(child), 0, "");
    assert_int_equal(n, sizeof text - 1);
    assert_string_equal(got, text);
}

// ---- several ranks ----
#define RANKS 5
void before_each(void) { unsetenv("SHARD_LEAVE_SECONDS"); }
typedef struct { int ends[2]; RunningChild children[RANKS]; } Launch; // the ranks share ends[1] as stderr

static void set(const char* name, const char* format, int value) {
    char text[64];
    snprintf(text, sizeof text, format, value);
    setenv(name, text, 1);
}
// The variables of one of RANKS ranks, which Open MPI has started as launch number `launch` of this test.
static void become(int rank, int launch) {
    static const char* const others[] = { "SHARD_SAY_ONCE", "RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS" };
    for (size_t i = 0; i < COUNT(others); i++) unsetenv(others[i]);
    set("OMPI_COMM_WORLD_RANK", "%d", rank);
    set("OMPI_COMM_WORLD_LOCAL_RANK", "%d", rank);
    set("OMPI_COMM_WORLD_SIZE", "%d", 3 * RANKS); // on three machines
    set("OMPI_COMM_WORLD_LOCAL_SIZE", "%d", RANKS);
    set("PMIX_NAMESPACE", "a test %d", (int)getppid() * 100 + launch);
    setenv("SHARD_LEAVE_SECONDS", "30", 0);
    message_rank = rank;
}

static Launch launch_begin(void) {
    Launch l;
    memset(&l, 0, sizeof l);
    assert_int_equal(pipe(l.ends), 0);
    return l;
}
// Returns true in the new process.
static bool launch_rank(Launch* l, int rank) {
    l->children[rank] = child_start();
    if (l->children[rank].pid != 0) return false;
    dup2(l->ends[1], STDERR_FILENO);
    close(l->ends[1]);
    become(rank, 1);
    return true;
}
// Collects the ranks' output in out (4096) and returns its number of lines. All ranks must end with status 1.
static int launch_end(Launch* l, char* out) {
    close(l->ends[1]);
    size_t n = 0;
    for (ssize_t k; (k = read(l->ends[0], out + n, 4095 - n)) > 0; n += (size_t)k) { }
    out[n] = '\0';
    close(l->ends[0]);
    int lines = 0;
    for (size_t i = 0; i < n; i++) lines += out[i] == '\n';
    for (int r = 0; r < RANKS; r++) if (l->children[r].pid) assert_prints(child_end(l->children[r]), 1, "");
    return lines;
}
#define all_ranks_die(out, ...) ({ Launch l_ = launch_begin(); \
        for (int rank = 0; rank < RANKS; rank++) if (launch_rank(&l_, rank)) { __VA_ARGS__; } \
        launch_end(&l_, out); })

TEST(ranks_that_find_the_same_error_print_it_once_and_wait_for_one_another_no_longer_than_that_takes) {
    char out[4096];
    double start = now_seconds();
    assert_int_equal(all_ranks_die(out, say_once_begin(); die("there is no file")), 1);
    assert_non_null(strstr(out, ": error: there is no file\n"));
    assert_int_equal(all_ranks_die(out, message_rank = -1; say_once_begin(); usleep(100000U * (unsigned)rank); die("late")), 1);
    assert_string_equal(out, "error: late\n");
    assert_true(now_seconds() - start < 25);
}

static void claim_after(double seconds) {
    int fd;
    double start = now_seconds();
    say_once_begin();
    if (!say_once_claim("no", &fd) || now_seconds() - start < seconds) exit(2);
}
TEST(the_first_rank_of_a_machine_has_a_head_start) {
    expect_success(become(0, 1); claim_after(0));
    expect_success(become(1, 1); claim_after(SAY_ONCE_HEAD_START));
}

TEST(a_rank_with_another_error_prints_it) {
    char out[4096];
    int lines = all_ranks_die(out, setenv("SHARD_LEAVE_SECONDS", "2", 1); say_once_begin(); die(rank == 3 ? "mine" : "ours"));
    assert_int_equal(lines, 2);
    assert_non_null(strstr(out, "rank 3: error: mine\n"));
    assert_non_null(strstr(out, ": error: ours\n"));
}

TEST(ranks_without_a_launch_in_common_or_with_a_file_each_or_that_are_told_to_all_print_their_errors) {
    char out[4096];
    assert_int_equal(all_ranks_die(out, setenv("SHARD_SAY_ONCE", "0", 1); say_once_begin(); die("no")), RANKS);
    assert_int_equal(all_ranks_die(out, unsetenv("PMIX_NAMESPACE"); say_once_begin(); die("no")), RANKS);
    assert_int_equal(all_ranks_die(out, setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1", 1); say_once_begin(); die("no")), RANKS);
    setenv("SHARD_LEAVE_SECONDS", "0", 1);
    assert_int_equal(all_ranks_die(out, become(rank, 10 + rank); say_once_begin(); die("no")), RANKS);
    for (int i = 0; i < 2; i++)
        assert_prints(child_does(become(i, 1); say_once_begin(); die("no")), 1, i ? "rank 1: error: no\n" : "rank 0: error: no\n");
    assert_int_equal(all_ranks_die(out, become(rank, 1); setenv("SHARD_SAY_ONCE", "x", 1); say_once_begin()), RANKS);
    assert_non_null(strstr(out, "SHARD_SAY_ONCE must be 0 or 1, not 'x'"));
}

TEST(torchrun_and_slurm_give_a_launch_a_name_as_well) {
    static const char* const launches[][7] = {
        { "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT", NULL },
        { "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", NULL } };
    char out[4096];
    for (int i = 0; i < 2; i++) {
        int parent = (int)getpid();
        assert_int_equal(all_ranks_die(out, unsetenv("OMPI_COMM_WORLD_RANK"); unsetenv("OMPI_COMM_WORLD_SIZE");
            for (const char* const* v = launches[i]; *v; v++) set(*v, "%d", strstr(*v, "SIZE") || strstr(*v, "NUM") ? RANKS : parent);
            set(launches[i][0], "%d", rank); set(launches[i][2], "%d", rank); say_once_begin(); die("no")), 1);
        assert_string_equal(out + strlen("rank 0"), ": error: no\n");
    }
}

// The first rank binds the name of a message and stops, or is killed, before it prints.
TEST(a_message_is_not_lost_with_the_rank_that_was_about_to_print_it) {
    char out[4096];
    for (int killed = 0; killed < 2; killed++) {
        Launch l = launch_begin();
        int claimed[2], fd;
        char byte;
        assert_int_equal(pipe(claimed), 0);
        RunningChild first = child_start();
        if (first.pid == 0) {
            close(l.ends[1]);
            become(0, 1);
            say_once_begin();
            if (say_once_claim("no", &fd) && write(claimed[1], "", 1) == 1) for (;;) pause();
            exit(1);
        }
        assert_int_equal(read(claimed[0], &byte, 1), 1);
        if (launch_rank(&l, 1)) {
            setenv("SHARD_LEAVE_SECONDS", "0", 1);
            say_once_begin();
            die("no");
        }
        usleep(200000);
        if (killed) kill(first.pid, SIGKILL);
        assert_int_equal(launch_end(&l, out), 1);
        assert_string_equal(out, "rank 1: error: no\n");
        kill(first.pid, SIGKILL);
        assert_prints(child_end(first), 1000 + SIGKILL, "");
        close(claimed[0]);
        close(claimed[1]);
    }
}
