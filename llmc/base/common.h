/*
common.h - checks, host memory, small arithmetic, files. Everything else in llmc/ builds on it.

Every error ends the process with a message that names the cause and the remedy. There are two kinds:

    die, require            a cause outside the program, which the user can fix: an option, a file, the disk, the
                            launcher, too little memory, a rank that died. Choose this kind when in doubt.
    die_here, invariant     the program itself is wrong, or a library call failed that should not: the message ends with
                            the place in the source, "[llmc/comm/comm.h:152]", because somebody will have to look there.
*/
#ifndef LLMC_COMMON_H
#define LLMC_COMMON_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // fsync on folders, strsignal, sched_getaffinity
#endif
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PRINTF_LIKE(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))

#define ALWAYS_INLINE __attribute__((always_inline)) static inline

#define ERASE_LINE "\033[K"   // of a terminal: from the cursor to the end of the line
// A line is being rewritten on the terminal (terminal.h); the cursor stands at its beginning
static bool live_line = false;
static void (*die_leave)(int status) = NULL; // die ends the process by it where exit() may not return; NULL: by exit
// Prints die's line, which contains the message, unless another rank has printed it (comm/say_once.h).
// NULL: write_stderr does.
static void (*die_say)(const char* line, const char* message) = NULL;
static int message_rank = -1; // set by comm_init if there are several ranks; messages then begin with it

// Copies a source file's path into out (size) without the detours of its includes: "llmc/run/../comm/comm.h" is
// llmc/comm/comm.h.
static inline void source_path(const char* file, char* out, size_t size) {
    snprintf(out, size, "%s", file);
    for (char* up = strstr(out, "/../"); up != NULL; up = strstr(out, "/../")) {
        char* folder = up;
        while (folder > out && folder[-1] != '/') folder--;
        memmove(folder, up + 4, strlen(up + 4) + 1);
    }
}

// Writes text to stderr in one write(2), however long it is: stdio may split a line,
// and then other ranks' lines come in between.
static inline void write_stderr(const char* text) {
    for (size_t n = strlen(text); n > 0; ) {
        ssize_t put = write(STDERR_FILENO, text, n);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return; // nowhere to complain to
        text += put;
        n -= (size_t)put;
    }
}

#define MESSAGE_BYTES_MAX 8192 // of a message; longer ones are cut
#define LINE_BYTES_MAX (MESSAGE_BYTES_MAX + 64)
// Makes "rank 2: error: message", with its end of line, in line (LINE_BYTES_MAX). kind: "error", "warning".
static inline void message_line(char* line, const char* kind, const char* message) {
    char rank[32] = "";
    if (message_rank >= 0) snprintf(rank, sizeof rank, "rank %d: ", message_rank);
    snprintf(line, LINE_BYTES_MAX, "%s%s: %.*s\n", rank, kind, MESSAGE_BYTES_MAX, message);
}

// Prints "error: message" to stderr, and "  [file:line]" after it if file is not NULL. Exits with status 1.
__attribute__((noreturn)) PRINTF_LIKE(3, 4)
static inline void die_at(const char* file, int line, const char* format, ...) {
    char message[MESSAGE_BYTES_MAX], text[LINE_BYTES_MAX], path[512];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    size_t n = strlen(message);
    if (file) source_path(file, path, sizeof path);
    if (file) snprintf(message + n, sizeof message - n, "  [%s:%d]", path, line);
    if (live_line) fputs(ERASE_LINE, stdout);
    fflush(stdout); // keep the order in which things happened when both go to one place
    message_line(text, "error", message);
    if (die_say) die_say(text, message);
    else write_stderr(text);
    if (die_leave) die_leave(EXIT_FAILURE);
    exit(EXIT_FAILURE);
}
#define die(...) die_at(NULL, 0, __VA_ARGS__)
#define require(cond, ...) do { if (!(cond)) die(__VA_ARGS__); } while (0)
#define die_here(...) die_at(__FILE__, __LINE__, __VA_ARGS__)
#define invariant(cond, ...) do { if (!(cond)) die_here(__VA_ARGS__); } while (0)

// Prints "warning: message" to stderr.
PRINTF_LIKE(1, 2)
static inline void warn(const char* format, ...) {
    char message[MESSAGE_BYTES_MAX], text[LINE_BYTES_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    message_line(text, "warning", message);
    write_stderr(text);
}

// Returns zeroed host memory; dies with a clear message if there is not enough.
// A negative int that became an n is refused too, which also shows gcc that calloc never gets one.
static inline void* xcalloc(size_t n, size_t size) {
    void* p = n <= PTRDIFF_MAX ? calloc(n ? n : 1, size ? size : 1) : NULL;
    require(p != NULL, "out of host memory: %zu x %zu bytes were asked for", n, size);
    return p;
}
static inline void* xrealloc(void* old, size_t bytes) {
    void* p = realloc(old, bytes ? bytes : 1);
    require(p != NULL, "out of host memory: %zu bytes were asked for", bytes);
    return p;
}
// Returns a new array of n elements of type T, all of whose bits are 0.
#define new_array(T, n) ((T*)xcalloc((size_t)(n), sizeof(T)))
// Returns the array of n elements of type T with room for one more.
// It grows where n is 0, 1, 2, 4, 8, ..., so no capacity is kept.
#define grown_array(T, array, n) ((T*)with_room(array, (size_t)(n), sizeof(T)))
static inline void* with_room(void* array, size_t n, size_t size) {
    return (n & (n - 1)) == 0 ? xrealloc(array, (n ? 2 * n : 1) * size) : array;
}
static inline char* xstrdup(const char* s) {
    size_t n = strlen(s) + 1;
    return (char*)memcpy(new_array(char, n), s, n);
}
// A new string made as printf would; the caller frees it.
PRINTF_LIKE(1, 2)
static inline char* format_string(const char* format, ...) {
    va_list args;
    va_start(args, format);
    char* s = NULL;
    int n = vasprintf(&s, format, args);
    va_end(args);
    require(n >= 0, "out of host memory while formatting a message");
    return s;
}

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t a, size_t multiple) { return ceil_div(a, multiple) * multiple; }
// *out = a*b, false if that does not fit in a size_t: for sizes that come out of files.
static inline bool size_multiply(size_t a, size_t b, size_t* out) { return !__builtin_mul_overflow(a, b, out); }

// Returns the bytes as people read them, in powers of 1000: "512 B", "12.3 MB". The text lives in out (size).
static inline const char* format_bytes(char* out, size_t size, double bytes) {
    static const char* const units[] = { "B", "kB", "MB", "GB", "TB" };
    int u = 0;
    while (bytes >= 999.5 && u < 4) { bytes /= 1000; u++; }
    snprintf(out, size, u > 0 && bytes < 99.95 ? "%.1f %s" : "%.0f %s", bytes, units[u]);
    return out;
}

// Returns the length of the UTF-8 character that begins with text (n > 0 bytes), which may be a part of it; 0: none
// does, by table 3-7 of the Unicode Standard.
static inline size_t utf8_prefix(const char* text, size_t n) {
    const unsigned char* s = (const unsigned char*)text;
    if (s[0] < 0x80) return 1;
    size_t length = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0xC2 || s[0] > 0xF4) return 0;
    unsigned char low = s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : 0x80; // no overlong forms
    unsigned char high = s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : 0xBF; // no surrogates, nothing above U+10FFFF
    if (n > 1 && (s[1] < low || s[1] > high)) return 0;
    for (size_t i = 2; i < length && i < n; i++) if ((s[i] & 0xC0) != 0x80) return 0;
    return length;
}

// Returns the seconds on a clock that never jumps.
static inline double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
// Returns when that clock has reached `until`.
static inline void sleep_until(double until) {
    double rest = until - now_seconds();
    if (rest <= 0) return;
    struct timespec nap = { (time_t)rest, (long)(1e9 * (rest - floor(rest))) };
    nanosleep(&nap, NULL);
}
#endif
