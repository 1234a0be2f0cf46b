/*
terminal.h - whether a person is watching the output, and the one line that is rewritten while they do.

The live line ends with the cursor at its beginning. The next text takes its place, even a message of another rank,
which knows nothing of the line.
*/
#ifndef LLMC_TERMINAL_H
#define LLMC_TERMINAL_H
#include "common.h"

#define LIVE_LINE 79 // characters at most: a longer line would wrap, and could not be rewritten

// Returns whether process `pid` is Open MPI's mpirun, or the daemon that starts ranks for it.
// *parent: who started it; 0: not known.
static inline bool terminal_is_launcher(long pid, long* parent) {
    static const char* const launchers[] = { "mpirun", "mpiexec", "orterun", "prterun", "orted", "prted" };
    char path[64], name[64] = "";
    *parent = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE* f = fopen(path, "r");
    if (f == NULL) return false;
    if (fscanf(f, "%*d (%63[^)]) %*c %ld", name, parent) != 2) name[0] = '\0'; // "PID (NAME) STATE PARENT ..."
    fclose(f);
    for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++)
        if (strcmp(name, launchers[i]) == 0) return true;
    return false;
}

// mpirun gives every rank a terminal of its own, wherever its own output goes: a file, say.
// The launcher's output decides.
static inline bool terminal_is_watched(void) {
    const char* kind = getenv("TERM");
    if (isatty(STDOUT_FILENO) != 1 || kind == NULL || strcmp(kind, "dumb") == 0) return false;
    if (getenv("OMPI_COMM_WORLD_RANK") == NULL) return true;
    for (long pid = getppid(), parent; pid > 1; pid = parent) {
        if (!terminal_is_launcher(pid, &parent)) continue;
        char path[64], output[256];
        snprintf(path, sizeof path, "/proc/%ld/fd/1", pid);
        ssize_t n = readlink(path, output, sizeof output - 1);
        output[n > 0 ? n : 0] = '\0';
        return strncmp(output, "/dev/pts/", 9) == 0 || strncmp(output, "/dev/tty", 8) == 0
               || strcmp(output, "/dev/console") == 0;
    }
    return false;
}

// Takes the live line away. Call it before anything else is printed to stdout.
static inline void live_line_clear(void) {
    if (live_line) fputs(ERASE_LINE, stdout);
    live_line = false;
}
static inline void live_line_show(const char* text) {
    printf("%.*s" ERASE_LINE "\r", LIVE_LINE, text);
    fflush(stdout);
    live_line = true;
}
#endif
