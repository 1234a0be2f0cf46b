// expect_death.h - lets tests check errors: code runs in a child process, and the test sees how it ended and what it printed.
// Do not assert anything inside a child: cmocka would continue with the next test there.
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
typedef struct { pid_t pid; FILE *out, *err; } RunningChild;

static inline char* child_output(FILE* f) {
    fseek(f, 0, SEEK_END); // parent and child share the file offset, and the child moved it
    long n = ftell(f);
    char* text = calloc((size_t)n + 1, 1);
    rewind(f);
    if (fread(text, 1, (size_t)n, f) != (size_t)n) fail_msg("cannot read back what a child wrote");
    fclose(f);
    return text;
}

// Ends a child without a sanitizer's leak check, because code that dies frees nothing.
static inline void child_leave(int status, __attribute__((unused)) void* unused) {
    fflush(NULL);
    _exit(status);
}

static inline RunningChild child_start(void) { // pid is 0 in the child
    RunningChild c = { 0, tmpfile(), tmpfile() };
    assert_non_null(c.out);
    assert_non_null(c.err);
    fflush(NULL);
    c.pid = fork();
    assert_true(c.pid >= 0);
    if (c.pid > 0) return c;
    const int caught[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGSYS }; // by cmocka, whose handlers belong to the parent
    for (size_t i = 0; i < COUNT(caught); i++) signal(caught[i], SIG_DFL);
    on_exit(child_leave, NULL);
    dup2(fileno(c.out), STDOUT_FILENO);
    dup2(fileno(c.err), STDERR_FILENO);
    return c;
}
static inline Child child_end(RunningChild c) {
    int status;
    assert_int_equal(waitpid(c.pid, &status, 0), c.pid);
    return (Child){ WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), child_output(c.out), child_output(c.err) };
}
// What a child does with this statement, which may use the test's variables. Getting to its end is exit(0).
#define child_does(...) ({ RunningChild c_ = child_start(); if (c_.pid == 0) { __VA_ARGS__; exit(0); } child_end(c_); })

static inline void child_free(Child* c) {
    free(c->out);
    free(c->err);
}

static inline void child_has_died(Child c, const char* const* phrases) {
    bool one_error = c.status == 1 && strncmp(c.err, "error: ", 7) == 0 && strchr(c.err, '\n') == c.err + strlen(c.err) - 1;
    while (*phrases && strstr(c.err, *phrases)) phrases++;
    if (!one_error || *phrases) fail_msg("status %d, stderr: %s\nexpected in it: %s", c.status, c.err, *phrases ? *phrases : "an error");
    child_free(&c);
}
// The statement must end a child with status 1 and one line of error that contains each of the phrases.
#define expect_error(statement, ...) do { \
        const char* const phrases_[] = { __VA_ARGS__, NULL }; \
        child_has_died(child_does(statement), phrases_); \
    } while (0)

// The statement must come to its end in a child.
static inline void child_has_lived(Child c) {
    if (c.status != 0) fail_msg("status %d: %s%s", c.status, c.out, c.err);
    child_free(&c);
}
#define expect_success(...) child_has_lived(child_does(__VA_ARGS__))

// The statement must come to its end in a child that prints this, and no error.
static inline void child_has_said(Child c, const char* text) {
    if (c.status != 0) fail_msg("status %d: %s", c.status, c.err);
    assert_string_equal(c.out, text);
    assert_string_equal(c.err, "");
    child_free(&c);
}
#define expect_output(text, ...) child_has_said(child_does(__VA_ARGS__), text)
#endif
