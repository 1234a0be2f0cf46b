/*
expect_death.h - lets tests check errors: code runs in a child process, and the test sees how it ended and what it printed.
Do not assert anything inside a child: cmocka would continue with the next test there.
*/
#ifndef TEST_EXPECT_DEATH_H
#define TEST_EXPECT_DEATH_H
#include "unit.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
    int status;            // of exit; 1000 + the signal that killed it
    char *out, *err;       // what it wrote, 0-terminated, owned
} Child;

static inline char* child_output(FILE* f) {
    long n = ftell(f);
    char* text = calloc((size_t)n + 1, 1);
    rewind(f);
    if (fread(text, 1, (size_t)n, f) != (size_t)n) fail_msg("cannot read back what a child wrote");
    fclose(f);
    return text;
}

// Ends a child without a sanitizer's leak check, because code that dies frees nothing.
static inline void child_leave(int status, void* unused) {
    (void)unused;
    fflush(NULL);
    _exit(status);
}

// Runs function(argument) in a child; returning from it is exit(0).
static inline Child child_run(void (*function)(void*), void* argument) {
    FILE *out = tmpfile(), *err = tmpfile();
    assert_non_null(out);
    assert_non_null(err);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const int caught[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS }; // by cmocka, whose handlers belong to the parent
        for (size_t i = 0; i < sizeof caught / sizeof caught[0]; i++) signal(caught[i], SIG_DFL);
        on_exit(child_leave, NULL);
        dup2(fileno(out), STDOUT_FILENO);
        dup2(fileno(err), STDERR_FILENO);
        function(argument);
        exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    fseek(out, 0, SEEK_END); // parent and child share the file offset, and the child moved it
    fseek(err, 0, SEEK_END);
    Child c = { WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), child_output(out), child_output(err) };
    return c;
}

static inline void child_free(Child* c) {
    free(c->out);
    free(c->err);
}

static inline void expect_death_with(void (*function)(void*), void* argument, const char* const* phrases) {
    Child c = child_run(function, argument);
    bool as_expected = c.status == 1 && strncmp(c.err, "error: ", 7) == 0 && strchr(c.err, '\n') == c.err + strlen(c.err) - 1;
    while (as_expected && *phrases && strstr(c.err, *phrases)) phrases++;
    as_expected = as_expected && *phrases == NULL;
    if (!as_expected) print_error("status %d, stderr: %s\n", c.status, c.err);
    if (!as_expected && *phrases) print_error("expected in it: %s\n", *phrases);
    child_free(&c);
    assert_true(as_expected);
}
// function(argument) must end the process with status 1 and one line of error that contains each of the phrases.
#define expect_death(function, argument, ...) do { \
        const char* const phrases_[] = { __VA_ARGS__, NULL }; \
        expect_death_with(function, argument, phrases_); \
    } while (0)
// Ends a test that cannot run on this machine. (cmocka's own skip() prints "not ok ... # SKIP", which prove takes for a failure.)
#define skip_test(reason) do { print_message("# skipped: %s\n", reason); return; } while (0)
#endif
