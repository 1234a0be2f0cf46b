/*
test_writer_lock.c - a folder has one writer: what the lock does where processes begin and end in any order, where the file
system has no locks, and where a file is left. The runs themselves, also beside another machine's, are tested by test/runs.
*/
#include "../../llmc/base/common.h"
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

static bool without_locks; // of the file system
#define fcntl(fd, command, lock) (without_locks ? (errno = ENOLCK, -1) : fcntl(fd, command, lock))
#include "../../llmc/save/writer_lock.h"
#include "test_folder.h"

static const char* lock_path(void) { return in_folder(WRITER_LOCK); }
void after_each(void) {
    without_locks = false;
    writer_lock_release();
    unlink(lock_path());
}
static char* lock_text(void) {
    int fd = open(lock_path(), O_RDONLY | O_CLOEXEC);
    char* text = fd < 0 ? NULL : writer_read(fd);
    if (fd >= 0) close(fd);
    return text;
}
static void assert_taken(void) {
    char* error = writer_lock_take(folder, 0);
    if (error) fail_msg("%s", error);
}
static void assert_busy(const char* phrase) {
    FREED char* error = writer_lock_take(folder, 0);
    if (error == NULL || strstr(error, phrase) == NULL) fail_msg("%s\nexpected in it: %s", error, phrase);
}
static void assert_busy_by(pid_t pid) {
    FREED char* who = format_string("the run of process %d on ", (int)pid);
    assert_busy(who);
}

// ---- another process ----
// It does what each byte says that it gets through `talk`, and answers with a byte.
typedef struct { pid_t pid; int talk; } Other;

// 't': takes the lock. 'j': shares what the file says. 'J': shares what another run's file would say. 'r': ends its lock.
static char other_does(char what, const char* record) {
    if (what == 't') return writer_lock_take(folder, 0) == NULL ? 'y' : 'n';
    if (what == 'j') return writer_lock_join(folder, record) == NULL ? 'y' : 'n';
    if (what == 'J') return writer_lock_join(folder, "process 1 on gone, boot b, since 2\n") == NULL ? 'y' : 'n';
    writer_lock_release();
    return 'y';
}
static Other other_begin(void) {
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    Other o = { fork(), ends[0] };
    if (o.pid == 0) close(ends[0]);
    else close(ends[1]);
    char what;
    while (o.pid == 0 && read(ends[1], &what, 1) == 1) {
        char *record = lock_text(), answer = other_does(what, record ? record : "");
        if (write(ends[1], &answer, 1) != 1) break;
    }
    if (o.pid == 0) _exit(0);
    return o;
}
static bool other_can(Other o, char what) {
    char answer = 'n';
    assert_int_equal(write(o.talk, &what, 1), 1);
    assert_int_equal(read(o.talk, &answer, 1), 1);
    return answer == 'y';
}
static void other_is_killed(Other o) {
    kill(o.pid, SIGKILL);
    close(o.talk);
    waitpid(o.pid, NULL, 0);
}
static void assert_others_cannot_take(void) {
    Other other = other_begin();
    assert_false(other_can(other, 't'));
    other_is_killed(other);
}
// Two ranks of another run, which has the lock.
static void run_of_two(Other ranks[2]) {
    for (int i = 0; i < 2; i++) ranks[i] = other_begin();
    assert_true(other_can(ranks[0], 't'));
    assert_true(other_can(ranks[1], 'j'));
}

// ---- one run after another ----
// Before other tests: once this process has had the lock, a child that ends leaves without what atexit knows (child_leave).
static void leave_at_once(int status) { _exit(status); }
static void die_with_the_lock(void) {
    die_leave = leave_at_once; // what a program sets where exit may not return
    if (writer_lock_take(folder, 0) == NULL && path_exists(lock_path())) die("this run is over");
}
TEST(an_error_ends_the_lock) {
    expect_error(die_with_the_lock(), "this run is over");
    assert_false(path_exists(lock_path()));
}

TEST(the_last_one_removes_the_file) {
    Other ranks[2];
    run_of_two(ranks);
    assert_true(other_can(ranks[0], 'r'));
    assert_true(path_exists(lock_path()));
    assert_busy("is writing there; wait until it has ended, or give another --out");
    assert_true(other_can(ranks[1], 'r'));
    assert_false(path_exists(lock_path()));
    assert_taken();
    for (int i = 0; i < 2; i++) other_is_killed(ranks[i]);
}

TEST(a_rank_that_lives_on_keeps_the_lock) {
    Other ranks[2];
    run_of_two(ranks);
    other_is_killed(ranks[0]);
    assert_busy_by(ranks[0].pid);
    other_is_killed(ranks[1]);
    assert_taken(); // of two processes that were killed, nothing is left but the file
}

TEST(a_rank_that_comes_too_late_is_refused) {
    Other rank_1 = other_begin();
    assert_taken();
    FREED char *text = lock_text();
    assert_false(other_can(rank_1, 'J')); // its rank 0 has died, and we have the folder
    FREED char* after = lock_text();
    assert_string_equal(text, after);
    writer_lock_release();
    assert_false(other_can(rank_1, 'J')); // nobody has it
    assert_false(path_exists(lock_path()));
    FREED char* error = writer_lock_join(folder, "process 1 on gone, boot b, since 2\n");
    assert_non_null(strstr(error, "writer.lock: is not the one that rank 0 wrote"));
    assert_non_null(strstr(error, "--out must be a folder that every rank sees"));
    other_is_killed(rank_1);
}

TEST(a_child_does_not_end_its_parents_lock) {
    assert_taken();
    expect_success(writer_lock_release());
    assert_true(path_exists(lock_path()));
    assert_others_cannot_take();
}

// Processes take and end the lock as fast as they can, until each has had it 50 times: each time the file says that it is theirs.
static void take_often(void) {
    for (int times = 0; times < 50;) {
        FREED char* error = writer_lock_take(folder, 0);
        if (error) continue;
        times++;
        FREED char* text = lock_text(); // by its name: NULL if another process has removed the file
        if (text == NULL || strcmp(text, writer_lock.record) != 0) _exit(1);
        writer_lock_release();
    }
    _exit(0);
}
TEST(nobody_removes_the_lock_of_another) {
    RunningChild children[4];
    for (int i = 0; i < 4; i++) if ((children[i] = child_start()).pid == 0) take_often();
    for (int i = 0; i < 4; i++) child_has_lived(child_end(children[i]));
    assert_false(path_exists(lock_path()));
}

// ---- what is left ----
TEST(a_file_of_this_machine_or_a_torn_one_is_stale) {
    Writer here = writer_here();
    const char* const hosts[] = { here.host, here.host, "a-container" };
    const char* const boots[] = { here.boot, "an-earlier-one", here.boot };
    const char* const torn[] = { "", "process", "process 12 on some", "process x on some, boot y\n", "\xff\xff" };
    for (size_t i = 0; i < 8; i++) {
        FREED char* text = i < 3 ? format_string("process 12 on %s, boot %s, since 1.5\n", hosts[i], boots[i]) : xstrdup(torn[i - 3]);
        write_file(WRITER_LOCK, text, strlen(text));
        assert_taken();
        writer_lock_release();
    }
}

TEST(without_locks_the_process_must_be_gone) {
    without_locks = true;
    Other ranks[2];
    run_of_two(ranks);
    assert_busy_by(ranks[0].pid);
    other_is_killed(ranks[0]);
    assert_taken();
    other_is_killed(ranks[1]);
}

TEST(a_full_disk_takes_the_lock_without_a_text) {
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before, none;
    getrlimit(RLIMIT_FSIZE, &before);
    none = before;
    none.rlim_cur = 10;
    setrlimit(RLIMIT_FSIZE, &none);
    assert_taken();
    setrlimit(RLIMIT_FSIZE, &before);
    FREED char* text = lock_text();
    assert_string_equal(text, "");
    assert_string_equal(writer_lock.record, "");
    assert_others_cannot_take();
    writer_lock_release();
    assert_false(path_exists(lock_path()));
}
