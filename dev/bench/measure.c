/*
measure.c - measures from outside how long a training program's steps take and the most memory it held, so that one clock
times every program, whatever the program itself reports.

    measure [--log FILE] WARMUP STEPS COMMAND [ARGUMENT...]

A step ends when the program prints a line that begins with "step "; it must do so at once. After WARMUP of these lines
(at least 1: the first ends a step whose beginning nobody saw), STEPS more are timed; then the program is killed.
Prints "ms X" for each timed step and "rss BYTES". Other lines of the program are shown only if it ends too early; --log keeps
all of them.
*/
#include "../../llmc/base/common.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define KEPT 4096 // bytes of the program's last output

static int natural_argument(const char* text, const char* name) {
    char* end;
    long n = strtol(text, &end, 10);
    require(*text != '\0' && *end == '\0' && n >= 1 && n <= 1000000, "%s must be a whole number from 1, not '%s'", name, text);
    return (int)n;
}

// Starts the command; *out reads what it prints.
static pid_t start(char** command, FILE** out) {
    int ends[2];
    require(pipe(ends) == 0, "no pipe: %s", strerror(errno));
    pid_t pid = fork();
    require(pid >= 0, "%s cannot be started: %s", command[0], strerror(errno));
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); // otherwise it would run for ever if this program were killed
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execvp(command[0], command);
        die("%s cannot be started: %s", command[0], strerror(errno));
    }
    close(ends[1]);
    *out = fdopen(ends[0], "r");
    require(*out != NULL, "no stream: %s", strerror(errno));
    return pid;
}

// Adds a line to the last KEPT bytes (kept, a string).
static void keep_line(char* kept, const char* line) {
    size_t have = strlen(kept), more = size_min(strlen(line), KEPT - 1);
    size_t drop = have + more > KEPT - 1 ? have + more - (KEPT - 1) : 0;
    memmove(kept, kept + drop, have - drop);
    memcpy(kept + have - drop, line, more);
    kept[have - drop + more] = '\0';
}

// Writes the times of the lines that end steps into ends (count). Returns how many there were before the program ended. log may
// be NULL.
static int watch(FILE* out, double* ends, int count, char* kept, FILE* log) {
    char* line = NULL;
    size_t capacity = 0;
    int seen = 0;
    while (seen < count && getline(&line, &capacity, out) > 0) {
        if (strncmp(line, "step ", 5) == 0) ends[seen++] = now_seconds();
        keep_line(kept, line);
        if (log) fputs(line, log);
    }
    free(line);
    return seen;
}

int main(int argc, char** argv) {
    FILE* log = NULL;
    if (argc > 2 && strcmp(argv[1], "--log") == 0) {
        log = fopen(argv[2], "w");
        require(log != NULL, "%s cannot be made: %s", argv[2], strerror(errno));
        argc -= 2;
        argv += 2;
    }
    require(argc >= 4, "usage: measure [--log FILE] WARMUP STEPS COMMAND [ARGUMENT...]");
    int warmup = natural_argument(argv[1], "WARMUP"), steps = natural_argument(argv[2], "STEPS");
    char kept[KEPT] = "";
    double* ends = (double*)xcalloc((size_t)(warmup + steps), sizeof(double));
    FILE* out;
    pid_t pid = start(argv + 3, &out);
    int seen = watch(out, ends, warmup + steps, kept, log);
    struct rusage usage;
    int status;
    if (seen == warmup + steps) kill(pid, SIGKILL);
    fclose(out);
    if (log) fclose(log);
    require(wait4(pid, &status, 0, &usage) == pid, "%s was lost: %s", argv[3], strerror(errno));
    require(seen == warmup + steps, "%s ended after %d of %d steps; its last words:\n%s", argv[3], seen, warmup + steps, kept);
    for (int i = warmup; i < warmup + steps; i++) printf("ms %.3f\n", 1e3 * (ends[i] - ends[i - 1]));
    printf("rss %lld\n", (long long)usage.ru_maxrss * 1024);
    free(ends);
    return 0;
}
