/*
rank_progress.h - where each rank is: its step, and its task in that step. A rank that is killed can no longer report
it, so every rank writes it down as each task begins.

The ranks on rank 0's machine write into memory that they share. That takes 0.1 us, and the last words of a killed
process stay readable; a message to rank 0 took 16 us and woke its watchdog. For ranks on other machines only the last
heartbeat is known.

The memory is a file without a name, which rank 0 makes and the others open by its number (/proc/PID/fd/N): no killed
run leaves anything behind. If this is not possible, all ranks are treated like those on other machines.
*/
#ifndef LLMC_RANK_PROGRESS_H
#define LLMC_RANK_PROGRESS_H
#include "../base/common.h"
#include <fcntl.h>
#include <sys/mman.h>

#define OP_TASK 40
typedef struct {
    long long step;     // as the log counts them, from 1; 0: before the first
    char task[OP_TASK]; // "F3 on stage 1"; "": no more is known
} RankProgress;

// Its rank writes the half that is not the last one, and then makes it the last: a killed rank leaves one that is
// whole.
typedef struct { int last; RankProgress half[2]; } SharedProgress;

typedef struct {
    int fd;             // of rank 0; -1: none
    char* memory;       // (bytes) the mark of this run, then (size) SharedProgress; NULL: nothing is shared. Owned
    size_t bytes;
} ProgressTable;

// Plain data, sent to the other ranks; fd -1: there is none
typedef struct { double mark; int pid, fd; } ProgressTableAddress;
#define PROGRESS_TABLE_MARK 64 // bytes before the first place

static inline size_t progress_table_bytes(int size) {
    return PROGRESS_TABLE_MARK + (size_t)size * sizeof(SharedProgress);
}
static inline void progress_table_map(ProgressTable* p, int fd, int size) {
    p->bytes = progress_table_bytes(size);
    void* memory = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    p->memory = memory == MAP_FAILED ? NULL : (char*)memory;
}

static inline void progress_table_close(ProgressTable* p) {
    if (p->memory) munmap(p->memory, p->bytes);
    if (p->fd >= 0) close(p->fd);
    p->memory = NULL;
    p->fd = -1;
}

// On rank 0, for `size` ranks. Returns what the others need for progress_table_open.
static inline ProgressTableAddress progress_table_create(ProgressTable* p, int size) {
    ProgressTableAddress a;
    memset(&a, 0, sizeof a); // its padding is also sent
    a.mark = now_seconds();
    a.pid = getpid();
    p->fd = memfd_create("shard.c places", MFD_CLOEXEC);
    // zeros
    if (p->fd >= 0 && ftruncate(p->fd, (off_t)progress_table_bytes(size)) == 0) progress_table_map(p, p->fd, size);
    if (p->memory) memcpy(p->memory, &a.mark, sizeof a.mark);
    else progress_table_close(p);
    a.fd = p->fd;
    return a;
}

// On another rank. On another machine, or under another /proc, the file does not exist or carries another mark.
static inline void progress_table_open(ProgressTable* p, ProgressTableAddress a, int size) {
    char path[64];
    struct stat file;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", a.pid, a.fd);
    bool looks_right = a.fd >= 0 && stat(path, &file) == 0 && S_ISREG(file.st_mode)
                    && file.st_size == (off_t)progress_table_bytes(size);
    int fd = looks_right ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    progress_table_map(p, fd, size);
    close(fd);
    if (p->memory && memcmp(p->memory, &a.mark, sizeof a.mark) != 0) progress_table_close(p);
}

// Returns the place of rank r; NULL: nothing is shared.
static inline SharedProgress* progress_of(const ProgressTable* p, int r) {
    return p->memory ? (SharedProgress*)(void*)(p->memory + PROGRESS_TABLE_MARK) + r : NULL;
}

// Records that this rank is at this step and task. s NULL: no other rank can see it.
static inline void progress_write(SharedProgress* s, const RankProgress* progress) {
    if (s == NULL) return;
    int next = 1 - s->last;
    s->half[next] = *progress;
    __atomic_store_n(&s->last, next, __ATOMIC_RELEASE);
}
// Sets *progress to the last record of a rank. Returns false if there is none, as for a rank on another machine.
static inline bool progress_read(const SharedProgress* s, RankProgress* progress) {
    if (s == NULL) return false;
    int last = __atomic_load_n(&s->last, __ATOMIC_ACQUIRE);
    *progress = s->half[last == 1];
    progress->task[OP_TASK - 1] = '\0';
    return progress->step > 0;
}
#endif
