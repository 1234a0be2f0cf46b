// test_writer_lock.c - a folder has one writer: what the lock does where processes begin and end in any order, and where the file
// system has no locks. The runs themselves are tested by test/runs.
#include "../../llmc/base/common.h"
#include <fcntl.h>
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

// ---- another process ----
// It does what each byte says that it gets through `talk`, and answers with a byte.
typedef struct { pid_t pid; int talk; } Other;
static const char* const of_another_run = "process 1 on gone, since 2\n";

// 't': takes the lock. 'f': does so on a full disk, which leaves no text. 'j': shares what the file says. 'J': shares what another run's file would say. 'r': ends its lock.
static char other_does(char what, const char* record) {
    if (what == 'f') limit_files(0);
    if (what == 'f' || what == 't') return writer_lock_take(folder, 0) == NULL && (what == 't' || !*writer_lock.record) ? 'y' : 'n';
    if (what == 'j') return writer_lock_join(folder, record) == NULL ? 'y' : 'n';
    if (what == 'J') return writer_lock_join(folder, of_another_run) == NULL ? 'y' : 'n';
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
// Two ranks of another run, which has the lock.
static void run_of_two(Other ranks[2]) {
    for (int i = 0; i < 2; i++) ranks[i] = other_begin();
    assert_true(other_can(ranks[0], 't'));
    assert_true(other_can(ranks[1], 'j'));
}

TEST(the_last_rank_that_ends_or_is_killed_frees_the_folder) {
    Other ranks[2];
    run_of_two(ranks);
    FREED char* who = format_string("the run of process %d on ", (int)ranks[0].pid);
    assert_busy(who);
    assert_busy(" is writing there; wait until it has ended, or give another --out");
    other_is_killed(ranks[0]);
    assert_busy(who);
    assert_true(other_can(ranks[1], 'r'));
    assert_taken(); // of a process that was killed, nothing is left but the file
    writer_lock_release();
    assert_false(path_exists(lock_path()));
    other_is_killed(ranks[1]);
}

TEST(a_rank_that_comes_too_late_is_refused) {
    Other rank_1 = other_begin();
    assert_taken();
    FREED char *text = lock_text();
    assert_false(other_can(rank_1, 'J')); // its rank 0 has died, and we have the folder
    FREED char* after = lock_text();
    assert_string_equal(text, after);
    writer_lock_release();
    FREED char* error = writer_lock_join(folder, of_another_run); // nobody has it
    assert_non_null(strstr(error, "writer.lock: is not the one that rank 0 wrote; --out must be a folder that every rank sees"));
    other_is_killed(rank_1);
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

TEST(without_locks_rank_0_warns) {
    without_locks = true;
    Other ranks[2];
    Child run = child_does(run_of_two(ranks));
    FREED char* warning = format_string("warning: %s: this file system has no locks; make sure that no other run writes there\n", lock_path());
    assert_int_equal(run.status, 0);
    assert_string_equal(run.err, warning);
    child_free(&run);
}

TEST(a_full_disk_takes_the_lock_without_a_text) {
    Other other = other_begin();
    assert_true(other_can(other, 'f'));
    assert_busy(": the run of another process is writing there; wait until it has ended");
    other_is_killed(other);
}
