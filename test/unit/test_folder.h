// test_folder.h - a temporary folder for the files that a test program's tests write. It is made before main and removed at the
// end, with all that is in it; a program needs no hooks for it.
#ifndef TEST_TEST_FOLDER_H
#define TEST_TEST_FOLDER_H
#include "../../llmc/base/folder.h"
#include "expect_death.h"
#include <ftw.h>
#include <sys/resource.h>

static char folder[] = "/tmp/shard_test_XXXXXX";
static pid_t folder_owner; // a child that ends has not made it

static int test_folder_remove(const char* path, const struct stat* info, int kind, struct FTW* place) {
    (void)info; (void)kind; (void)place;
    return remove(path);
}
static void test_folder_end(void) { if (getpid() == folder_owner) nftw(folder, test_folder_remove, 8, FTW_DEPTH | FTW_PHYS); }
__attribute__((constructor)) static void test_folder_begin(void) {
    if (mkdtemp(folder) == NULL) abort();
    folder_owner = getpid();
    atexit(test_folder_end);
}

// Returns the path of what has this name in the folder; it stays valid for a few calls.
PRINTF_LIKE(1, 2)
static inline const char* in_folder(const char* format, ...) {
    static char paths[8][128];
    static int turn;
    turn = (turn + 1) % 8;
    int begin = snprintf(paths[turn], sizeof paths[turn], "%s/", folder);
    va_list args;
    va_start(args, format);
    vsnprintf(paths[turn] + begin, sizeof paths[turn] - (size_t)begin, format, args);
    va_end(args);
    return paths[turn];
}

// Writes a file with these n bytes in the folder; returns its path, as in_folder does.
static inline const char* write_file(const char* name, const void* data, size_t n) {
    const char* path = in_folder("%s", name);
    FILE* f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return path;
}

// From here on no file of this process may be longer, as if the disk were full.
static inline void limit_files(size_t bytes) {
    struct rlimit limit = { bytes, bytes };
    signal(SIGXFSZ, SIG_IGN); // otherwise the limit would kill the process; a full disk only gives an error
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) abort();
}
#endif
