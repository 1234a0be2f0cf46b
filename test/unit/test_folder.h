// test_folder.h - a temporary folder for the files that a test program's tests write: make_folder and remove_folder are for
// cmocka_run_group_tests.
#ifndef TEST_TEST_FOLDER_H
#define TEST_TEST_FOLDER_H
#include "../../llmc/base/folder.h"
#include "expect_death.h"

static char folder[] = "/tmp/shard_test_XXXXXX";

static inline int make_folder(void** state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}
static inline int remove_folder(void** state) {
    (void)state;
    return folder_remove(folder) ? 0 : -1;
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
