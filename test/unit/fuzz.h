/*
fuzz.h - what the libFuzzer targets share: if a reader dies with a message, it has done its work, and that is not a crash.

die() ends in exit(), which the linker redirects here (-Wl,--wrap=exit). Inside fuzz_reader() it jumps back, frees the
reader's memory and closes its files, so that millions of deaths fit in one process. Anywhere else in a target exit() is
an error that the fuzzer reports. Include this before anything of llmc/.
*/
#ifndef TEST_FUZZ_H
#define TEST_FUZZ_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// ---- memory: a list has every piece that is allocated ----
typedef struct FuzzPiece { struct FuzzPiece *previous, *next; } FuzzPiece; // lies directly before the memory itself
static FuzzPiece fuzz_pieces = { &fuzz_pieces, &fuzz_pieces };

static inline void* fuzz_realloc(void* old, size_t bytes) {
    FuzzPiece* p = old ? (FuzzPiece*)old - 1 : NULL;
    if (p) { p->previous->next = p->next; p->next->previous = p->previous; }
    if (bytes > SIZE_MAX - sizeof *p) abort();
    FuzzPiece* moved = realloc(p, sizeof *p + bytes);
    if (moved == NULL) abort();
    moved->previous = &fuzz_pieces; moved->next = fuzz_pieces.next;
    moved->previous->next = moved->next->previous = moved;
    return moved + 1;
}
static inline void* fuzz_malloc(size_t bytes) { return fuzz_realloc(NULL, bytes); }
static inline void* fuzz_calloc(size_t n, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) abort();
    return memset(fuzz_malloc(bytes), 0, bytes);
}
static inline void fuzz_free(void* memory) {
    if (memory == NULL) return;
    FuzzPiece* p = (FuzzPiece*)memory - 1;
    p->previous->next = p->next; p->next->previous = p->previous;
    free(p);
}
static inline int fuzz_vasprintf(char** out, const char* format, va_list args) {
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, again);
    va_end(again);
    *out = fuzz_malloc((size_t)n + 1);
    return vsnprintf(*out, (size_t)n + 1, format, args);
}
// From here on the code under test uses these.
#define malloc fuzz_malloc
#define calloc fuzz_calloc
#define realloc fuzz_realloc
#define free fuzz_free
#define vasprintf fuzz_vasprintf

// What is allocated now stays, whichever reader dies.
static inline void fuzz_keep(void) { fuzz_pieces.next = fuzz_pieces.previous = &fuzz_pieces; }

// ---- death ----
__attribute__((noreturn)) void __real_exit(int status);
static jmp_buf fuzz_back;
static enum { FUZZ_OUTSIDE, FUZZ_READER, FUZZ_AFTER } fuzz_where;

__attribute__((noreturn)) void __wrap_exit(int status) {
    if (fuzz_where == FUZZ_READER) longjmp(fuzz_back, 1);
    if (fuzz_where == FUZZ_AFTER) abort(); // input that the reader accepted must not fail later
    __real_exit(status);
}

// Runs the reader on its argument. Returns false if it died; its memory and files are then released.
static inline bool fuzz_reader(void (*reader)(void*), void* argument) {
    json_set_alloc_funcs(fuzz_malloc, fuzz_free);
    int first_free = dup(0); // file descriptors from this one on are the reader's
    close(first_free);
    bool lived = setjmp(fuzz_back) == 0;
    fuzz_where = FUZZ_READER;
    if (lived) reader(argument);
    fuzz_where = FUZZ_AFTER;
    if (lived) return true;
    while (fuzz_pieces.next != &fuzz_pieces) fuzz_free(fuzz_pieces.next + 1);
    for (int fd = first_free; fd < first_free + 8; fd++) close(fd);
    return false;
}

// Call when the target has freed what it read: aborts if any memory is left.
static inline void fuzz_done(void) {
    if (fuzz_pieces.next != &fuzz_pieces) abort();
    fuzz_where = FUZZ_OUTSIDE;
}

// ---- input ----
// Takes up to `most` bytes of the input.
static inline const uint8_t* fuzz_take(const uint8_t** data, size_t* left, size_t most, size_t* n) {
    const uint8_t* here = *data;
    *n = most < *left ? most : *left;
    *data += *n;
    *left -= *n;
    return here;
}

// A file in memory and its path.
typedef struct { int fd; char path[32]; } FuzzFile;
static inline FuzzFile fuzz_file(void) {
    FuzzFile f;
    f.fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (f.fd < 0) abort();
    snprintf(f.path, sizeof f.path, "/proc/self/fd/%d", f.fd);
    return f;
}
static inline void fuzz_fill(int fd, const void* data, size_t n) {
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n) abort();
}
// Fills it with a sound header of n bytes, which `wrong` changes by exclusive or (zeros leave it), and data behind it.
static inline void fuzz_fill_behind(int fd, void* header, size_t n, const uint8_t* wrong, size_t num_wrong, const uint8_t* data,
                                    size_t left) {
    for (size_t i = 0; i < num_wrong; i++) ((uint8_t*)header)[i] ^= wrong[i];
    fuzz_fill(fd, header, n);
    if (pwrite(fd, data, left, (off_t)n) != (ssize_t)left) abort();
}
#endif
