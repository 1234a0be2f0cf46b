// test_folder.h - a temporary folder for the files that a test program's tests write. It is made before main and removed at the end, with
// all that is in it; a program needs no hooks for it.
#ifndef TEST_TEST_FOLDER_H
#define TEST_TEST_FOLDER_H
#include "../../llmc/base/folder.h"
#include "expect_death.h"
#include <ftw.h>

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

// Returns a path in the folder; it stays valid for a few calls.
static inline const char* in_folder(const char* name) {
    static char paths[8][128];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(paths[turn], sizeof paths[turn], "%s/%s", folder, name);
    return paths[turn];
}

// Writes a file with these n bytes in the folder; returns its path, as in_folder does.
static inline const char* write_file(const char* name, const void* data, size_t n) {
    const char* path = in_folder(name);
    FILE* f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return path;
}
#endif
