// disk.c - a library for LD_PRELOAD that stands between a program and the disk. It records what happens to checkpoints, and lets it be
// slow or fail. test/runs/test_saving.py compiles it.
//
//     DISK_LOG=FILE             a line for each "write PATH", "sync PATH", "rename FROM TO" and "remove PATH" under a folder step_* or
//                               .tmp_step_*, and "sync PATH" of the folder above; of all ranks
//     DISK_SLOW=MS              each sync takes so much longer
//     DISK_FAIL="RANK HOW PART" fails on that rank where PART is in the path: HOW is "sync", "rename", or "write", in a thread
//                               of its own, because a file has its header before
//     DISK_MEMINFO=FILE         is what /proc/meminfo is
//
// A write and a sync are recorded when they are done, a rename and a removal when they begin. Each line is one write(2) to the end of
// the file, so lines of several ranks are in the order in which things happened.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void record(const char* what, const char* path, const char* to) {
    const char* log = getenv("DISK_LOG");
    char line[3 * PATH_MAX];
    int fd = log ? open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd < 0) return;
    int n = snprintf(line, sizeof line, "%s %s%s%s\n", what, path, to ? " " : "", to ? to : "");
    if (write(fd, line, (size_t)n) != n) abort();
    close(fd);
}
static bool fails(const char* how, const char* path) {
    const char *fail = getenv("DISK_FAIL"), *me = getenv("OMPI_COMM_WORLD_RANK");
    char rank[16], what[16], part[256];
    if (fail == NULL || sscanf(fail, "%15s %15s %255s", rank, what, part) != 3) return false;
    return strcmp(rank, me ? me : "0") == 0 && strcmp(what, how) == 0 && strstr(path, part) != NULL;
}
static const char* path_of(int fd, char* path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = '\0';
    return path;
}
static bool is_checkpoint(const char* path) { return strstr(path, "step_") != NULL; }

ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
    char path[PATH_MAX];
    bool ours = is_checkpoint(path_of(fd, path));
    if (ours && gettid() != getpid() && fails("write", path)) { errno = ENOSPC; return -1; }
    ssize_t put = REAL(pwrite)(fd, data, n, at);
    if (ours) record("write", path, NULL);
    return put;
}
ssize_t pwrite64(int fd, const void* data, size_t n, off64_t at) { return pwrite(fd, data, n, at); }
int fsync(int fd) {
    char path[PATH_MAX];
    if (fails("sync", path_of(fd, path))) { errno = EIO; return -1; }
    if (is_checkpoint(path) && getenv("DISK_SLOW")) usleep(1000 * (useconds_t)atoi(getenv("DISK_SLOW")));
    int result = REAL(fsync)(fd);
    record("sync", path, NULL);
    return result;
}
int rename(const char* from, const char* to) {
    if (is_checkpoint(to) && fails("rename", to)) { errno = EACCES; return -1; }
    if (is_checkpoint(to)) record("rename", from, to);
    return REAL(rename)(from, to);
}
int rmdir(const char* path) {
    if (is_checkpoint(path)) record("remove", path, NULL);
    return REAL(rmdir)(path);
}
FILE* fopen(const char* path, const char* mode) {
    const char* instead = getenv("DISK_MEMINFO");
    return REAL(fopen)(instead && strcmp(path, "/proc/meminfo") == 0 ? instead : path, mode);
}
