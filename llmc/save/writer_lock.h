/*
writer_lock.h - a folder has one writer at a time: the run that holds OUT/writer.lock.

Two runs in one folder would remove each other's half-written checkpoints, and ranks whose launcher was killed go on for
some seconds. So every process that writes into checkpoints holds this lock for as long as it lives:
    rank 0               takes it exclusively, which it can only if no process of another run holds it; writes into the file
                         which process it is; from then on it shares the lock
    every other writer   shares it, and then looks whether the file still says what rank 0 wrote: if its own rank 0 has died
                         in between, another run may have the folder by now
The last one that ends without being killed removes the file. After a kill the file stays, unlocked, and the next run takes
it.

The lock   is an open file description lock (fcntl, F_OFD_SETLK): the kernel drops it when the process ends, in any way.
           flock(2) would not do: it gives up a lock before it takes the other kind, and an NFS server passes it between
           clients but does not hold it against its own processes. The older F_SETLK is lost when any part of the process
           closes the file. On NFS the server keeps our lock, so it holds between machines.
Machines   Some file systems keep locks within one machine, or have none. So the file names host, boot and process. A file
           that is not locked and was written on this machine is stale. If another machine wrote it, only a person can know
           whether that run has ended: the message says so, and which file to remove.
*/
#ifndef LLMC_WRITER_LOCK_H
#define LLMC_WRITER_LOCK_H
#include "../base/folder.h"
#include <signal.h>

#define WRITER_LOCK "writer.lock"

typedef struct {
    char *path, *record; // owned; record: what the file says while this run has the folder. NULL: nothing is locked
    int fd;
    bool locks;          // the file system has locks
    pid_t process;       // a forked child does not end its parent's lock
} WriterLock;
static WriterLock writer_lock; // of this process: exit() anywhere ends it

// ---- what the file says ----

typedef struct { long long pid; char host[256], boot[64]; } WriterRecord; // pid 0: nothing that can be read

static inline WriterRecord writer_of_this_process(void) {
    WriterRecord r;
    memset(&r, 0, sizeof r);
    r.pid = getpid();
    gethostname(r.host, sizeof r.host - 1);
    FILE* f = fopen("/proc/sys/kernel/random/boot_id", "r"); // of the running kernel: containers on one machine share it
    if (f == NULL || fscanf(f, "%63s", r.boot) != 1) snprintf(r.boot, sizeof r.boot, "unknown");
    if (f) fclose(f);
    return r;
}
// Its text, which no other run's is; the caller frees it.
static inline char* writer_record_text(WriterRecord r) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return format_string("process %lld on %s, boot %s, since %lld.%09ld\n", r.pid, r.host, r.boot, (long long)t.tv_sec,
                         t.tv_nsec);
}
// Returns the whole text of a lock file; the caller frees it.
static inline char* writer_read(int fd) {
    char text[512];
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    return xstrdup(text);
}
static inline WriterRecord writer_parse(const char* text) {
    WriterRecord r;
    memset(&r, 0, sizeof r);
    if (sscanf(text, "process %lld on %255[^,], boot %63[^,]", &r.pid, r.host, r.boot) != 3) r.pid = 0;
    return r;
}
static inline bool writer_is_here(WriterRecord r) {
    WriterRecord here = writer_of_this_process();
    return strcmp(r.host, here.host) == 0 || strcmp(r.boot, here.boot) == 0;
}

// ---- the lock ----

static inline bool writer_set(int fd, short type) {
    struct flock l;
    memset(&l, 0, sizeof l); // the whole file
    l.l_type = type;
    l.l_whence = SEEK_SET;
    return fcntl(fd, F_OFD_SETLK, &l) == 0;
}
// After writer_set has failed: returns true if the file system has no locks.
static inline bool writer_has_no_locks(void) {
    return errno == ENOLCK || errno == ENOSYS || errno == EOPNOTSUPP || errno == EINVAL;
}
// Returns true if the path still names the open file, which its last holder may have removed while we waited for it.
static inline bool writer_is_named(int fd, const char* path) {
    struct stat open_file, named;
    return fstat(fd, &open_file) == 0 && stat(path, &named) == 0 && open_file.st_ino == named.st_ino &&
           open_file.st_dev == named.st_dev;
}

// Ends the lock. Removes the file if no other rank of this run holds it.
static inline void writer_lock_release(void) {
    WriterLock* l = &writer_lock;
    if (l->record == NULL || l->process != getpid()) return;
    writer_set(l->fd, F_UNLCK); // first of all: two ranks that share it would keep each other from having it alone
    bool alone = !l->locks || writer_set(l->fd, F_WRLCK);
    char* text = writer_read(l->fd);
    bool ours = strcmp(text, l->record) == 0 || text[0] == '\0'; // or another run has taken it just now
    if (alone && ours && writer_is_named(l->fd, l->path)) unlink(l->path);
    close(l->fd);
    free(text);
    free(l->path);
    free(l->record);
    memset(l, 0, sizeof *l);
}

// die in place of exit (common.h) runs nothing that atexit knows.
static void (*writer_leave_next)(int status) = NULL;
static inline void writer_leave(int status) {
    writer_lock_release();
    writer_leave_next(status);
}

// From now on this process holds the lock. text is taken over.
static inline void writer_lock_keep(int fd, const char* path, char* text, bool locks) {
    static bool registered;
    if (!registered) registered = atexit(writer_lock_release) == 0;
    if (die_leave && die_leave != writer_leave) { writer_leave_next = die_leave; die_leave = writer_leave; }
    WriterLock l = { xstrdup(path), text, fd, locks, getpid() };
    writer_lock = l;
}

// ---- rank 0 ----

typedef enum { WRITER_TAKEN, WRITER_BUSY, WRITER_READ_ONLY, WRITER_FAILED } WriterAnswer;

// Who has a file that could not be locked, or that could but says that another machine has it.
static inline char* writer_who(const char* path, WriterRecord r, bool locked) {
    char *out = path_parent(path), *who = NULL;
    const char* wait = "wait until it has ended, or give another --out";
    if (r.pid == 0) who = format_string("--out %s: another run is writing there; %s", out, wait);
    else if (!locked || writer_is_here(r))
        who = format_string("--out %s: the run of process %lld on %s is writing there; %s", out, r.pid, r.host, wait);
    else
        who = format_string("--out %s: " WRITER_LOCK " says that process %lld on %s is writing there; this machine cannot"
                            " see whether it still does: if that run has ended, remove %s, else give another --out",
                            out, r.pid, r.host, path);
    free(out);
    return who;
}

// The file is open; no_locks: it cannot be locked. Returns true if the run that it names may still be there.
static inline bool writer_may_live(WriterRecord r, bool no_locks) {
    if (r.pid == 0) return false;
    if (!writer_is_here(r)) return true;
    return no_locks && r.pid != getpid() && (kill((pid_t)r.pid, 0) == 0 || errno == EPERM); // else nobody holds the lock
}

// Makes the file this process's. A disk that is full takes no text: then the lock has to do without.
static inline void writer_begin(int fd, const char* path, bool locks) {
    char* text = writer_record_text(writer_of_this_process());
    bool written = ftruncate(fd, 0) == 0 && pwrite_all(fd, text, strlen(text), 0) && fsync(fd) == 0;
    if (!written && ftruncate(fd, 0) == 0) text[0] = '\0';
    // The kind of lock changes at once, so no other run comes between. If it cannot, the other writers will report it.
    if (locks) writer_set(fd, F_RDLCK);
    else fprintf(stderr, "warning: %s: this file system has no locks; make sure that no other run writes there\n", path);
    writer_lock_keep(fd, path, text, locks);
}

// Tries to take the lock for a new run. Unless it is taken, *why says why not; the caller frees it.
static inline WriterAnswer writer_try(const char* out, const char* path, char** why) {
    *why = NULL;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666), reason = errno;
    struct stat info;
    if (fd < 0) {
        bool read_only = (reason == EACCES || reason == EPERM || reason == EROFS) && access(out, W_OK) != 0;
        *why = format_string("%s: cannot be opened: %s; make it writable or give another --out", path, strerror(reason));
        return read_only ? WRITER_READ_ONLY : WRITER_FAILED;
    }
    bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode), locked = is_file && writer_set(fd, F_WRLCK);
    bool no_locks = is_file && !locked && writer_has_no_locks();
    char* text = writer_read(fd);
    WriterRecord r = writer_parse(text);
    bool taken = is_file && (locked || no_locks) && writer_is_named(fd, path) && !writer_may_live(r, no_locks);
    free(text);
    if (taken) writer_begin(fd, path, locked);
    else close(fd);
    if (!is_file) *why = format_string("%s: is not a file; remove it or give another --out", path);
    else if (!taken) *why = writer_who(path, r, locked);
    return taken ? WRITER_TAKEN : is_file ? WRITER_BUSY : WRITER_FAILED;
}

// Takes the lock on the folder `out` for a new run, and waits up to `patience` seconds for it. Returns WRITER_TAKEN;
// WRITER_READ_ONLY, with nothing locked, if nothing can be made there; or WRITER_FAILED, and in *why the error, which the
// caller frees.
static inline WriterAnswer writer_lock_take(const char* out, double patience, char** why) {
    char *folder = path_trim(out), *path = format_string("%s/" WRITER_LOCK, folder);
    double until = now_seconds() + patience;
    WriterAnswer answer;
    for (bool said = false; (answer = writer_try(folder, path, why)) == WRITER_BUSY && now_seconds() < until; said = true) {
        if (!said) printf("waiting    up to %g s: %.*s\n", patience, (int)strcspn(*why, ";"), *why);
        fflush(stdout);
        free(*why);
        usleep(50000);
    }
    if (answer == WRITER_READ_ONLY) { free(*why); *why = NULL; }
    free(folder);
    free(path);
    return answer == WRITER_BUSY ? WRITER_FAILED : answer;
}

// ---- every other rank that writes ----

// Shares the lock that rank 0 has taken. record: what its file says. Returns an error, which the caller frees, or NULL.
static inline char* writer_lock_join(const char* out, const char* record) {
    char *folder = path_trim(out), *path = format_string("%s/" WRITER_LOCK, folder), *error = NULL;
    const char* remedy = "--out must be a folder that every rank sees, and that no other run uses";
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666); // O_CREAT: so that an NFS client asks the server
    bool locked = fd >= 0 && writer_set(fd, F_RDLCK), no_locks = fd >= 0 && !locked && writer_has_no_locks();
    if (locked || no_locks) {
        char* text = writer_read(fd);
        bool same = strcmp(text, record) == 0;
        writer_lock_keep(fd, path, xstrdup(same ? record : ""), locked);
        if (!same) writer_lock_release(); // removes the file if it was not there
        if (!same) error = format_string("%s: is not the one that rank 0 wrote; %s", path, remedy);
        free(text);
    } else {
        error = format_string("%s: cannot be %s: %s; %s", path, fd < 0 ? "opened" : "locked", strerror(errno), remedy);
        if (fd >= 0) close(fd);
    }
    free(folder);
    free(path);
    return error;
}
#endif
