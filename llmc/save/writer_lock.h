/*
writer_lock.h - a folder has one writer at a time: the run whose processes hold OUT/writer.lock.

Two runs in one folder would remove each other's half-written checkpoints, and ranks whose launcher was killed go on for some
seconds. So rank 0 takes the lock, which it can only if no process of another run has it; it writes into the file who it is, and
then shares the lock with all other ranks that write. The kernel drops it when a process ends, in any way (fcntl, F_OFD_SETLK;
flock gives it up before it takes the other kind), and on NFS the server keeps it for all machines. The last one that ends
without being killed removes the file.

Some file systems keep locks within one machine, or have none. There the text counts as well: a file that nobody has locked is
stale if it was written on this machine; of another machine only a person can know whether its run has ended.
*/
#ifndef LLMC_WRITER_LOCK_H
#define LLMC_WRITER_LOCK_H
#include "../base/folder.h"
#include <signal.h>

#define WRITER_LOCK "writer.lock"

typedef struct {
    char *path, *record; // owned; record: what the file says while this run has the folder. NULL: nothing is locked
    int fd;
    pid_t process;       // a forked child does not end its parent's lock
} WriterLock;
static WriterLock writer_lock; // of this process: exit() anywhere ends it

// ---- what the file says ----

typedef struct { long long pid; char host[256], boot[64]; } Writer; // boot: of the running kernel, which containers share

static inline Writer writer_here(void) {
    Writer w;
    memset(&w, 0, sizeof w);
    w.pid = getpid();
    gethostname(w.host, sizeof w.host - 1);
    FILE* f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f == NULL || fscanf(f, "%63s", w.boot) != 1) snprintf(w.boot, sizeof w.boot, "unknown");
    if (f) fclose(f);
    return w;
}
// Returns the whole text of a lock file; the caller frees it.
static inline char* writer_read(int fd) {
    char text[512];
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    return xstrdup(text);
}

// ---- the lock ----

typedef enum { LOCK_SET, LOCK_REFUSED, LOCK_MISSING } LockAnswer; // LOCK_MISSING: the file system has no locks
static inline LockAnswer writer_set(int fd, short type) {
    struct flock l;
    memset(&l, 0, sizeof l); // the whole file
    l.l_type = type;
    if (fcntl(fd, F_OFD_SETLK, &l) == 0) return LOCK_SET;
    return errno == ENOLCK || errno == ENOSYS || errno == EOPNOTSUPP || errno == EINVAL ? LOCK_MISSING : LOCK_REFUSED;
}
// Returns true if the path still names the open file, which its last holder may have removed.
static inline bool writer_is_named(int fd, const char* path) {
    struct stat ours, named;
    return fstat(fd, &ours) == 0 && stat(path, &named) == 0 && ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
}

// Ends the lock. Removes the file if no other rank of this run holds it.
static inline void writer_lock_release(void) {
    WriterLock l = writer_lock;
    if (l.record == NULL || l.process != getpid()) return;
    memset(&writer_lock, 0, sizeof writer_lock);
    writer_set(l.fd, F_UNLCK); // first of all: two ranks that share it would keep each other from having it alone
    bool alone = writer_set(l.fd, F_WRLCK) != LOCK_REFUSED;
    char* text = writer_read(l.fd); // another run may have taken it just now
    if (alone && strcmp(text, l.record) == 0 && writer_is_named(l.fd, l.path)) unlink(l.path);
    close(l.fd);
    free(text);
    free(l.path);
    free(l.record);
}

// die in place of exit (common.h) runs nothing that atexit knows.
static void (*writer_leave_next)(int status) = NULL;
static inline void writer_leave(int status) {
    writer_lock_release();
    writer_leave_next(status);
}

// From now on this process holds the lock. record is taken over.
static inline void writer_keep(int fd, const char* path, char* record) {
    static bool registered;
    if (!registered) registered = atexit(writer_lock_release) == 0;
    if (die_leave && die_leave != writer_leave) { writer_leave_next = die_leave; die_leave = writer_leave; }
    WriterLock l = { xstrdup(path), record, fd, getpid() };
    writer_lock = l;
}

// ---- rank 0 ----

// Returns why the folder is another run's, as the file that it has says, or the lock on it; the caller frees it. NULL: it is
// not.
static inline char* writer_other(const char* out, const char* path, int fd, LockAnswer answer) {
    char* text = writer_read(fd);
    Writer w = { 0, "", "" }, here = writer_here();
    bool readable = sscanf(text, "process %lld on %255[^,], boot %63[^,]", &w.pid, w.host, w.boot) == 3;
    free(text);
    bool is_here = strcmp(w.host, here.host) == 0 || strcmp(w.boot, here.boot) == 0;
    bool lives = answer == LOCK_MISSING && w.pid != here.pid && (kill((pid_t)w.pid, 0) == 0 || errno == EPERM);
    bool refused = answer == LOCK_REFUSED || !writer_is_named(fd, path);
    if (!refused && (!readable || (is_here && !lives))) return NULL;
    if (!refused && !is_here)
        return format_string("--out %s: " WRITER_LOCK " says that process %lld on %s is writing there; this machine cannot see"
                             " whether it still does: if that run has ended, remove %s, else give another --out",
                             out, w.pid, w.host, path);
    char* who = readable ? format_string("the run of process %lld on %s", w.pid, w.host) : xstrdup("another run");
    char* error = format_string("--out %s: %s is writing there; wait until it has ended, or give another --out", out, who);
    free(who);
    return error;
}

// Makes the file this process's. A disk that is full takes no text: then the lock has to do without.
static inline void writer_begin(int fd, const char* path, LockAnswer answer) {
    Writer w = writer_here();
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t); // so that no other run's text is the same
    char* text = format_string("process %lld on %s, boot %s, since %lld.%09ld\n", w.pid, w.host, w.boot, (long long)t.tv_sec,
                               t.tv_nsec);
    bool written = ftruncate(fd, 0) == 0 && pwrite_all(fd, text, strlen(text), 0) && fsync(fd) == 0;
    if (!written && ftruncate(fd, 0) == 0) text[0] = '\0';
    // The kind of lock changes at once, so no other run comes between. If it cannot, the other writers will report it.
    if (answer == LOCK_SET) writer_set(fd, F_RDLCK);
    else fprintf(stderr, "warning: %s: this file system has no locks; make sure that no other run writes there\n", path);
    writer_keep(fd, path, text);
}

// Tries once to take the lock. Returns an error, which the caller frees; NULL: it is taken, or nothing can be made in the folder.
// *busy: another run has it.
static inline char* writer_try(const char* out, const char* path, bool* busy) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666), reason = errno;
    struct stat info;
    *busy = false;
    if (fd < 0 && (reason == EACCES || reason == EPERM || reason == EROFS) && access(out, W_OK) != 0) return NULL;
    if (fd < 0) return format_string("%s: cannot be opened: %s; make it writable or give another --out", path, strerror(reason));
    bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    LockAnswer answer = is_file ? writer_set(fd, F_WRLCK) : LOCK_REFUSED;
    char* error = is_file ? writer_other(out, path, fd, answer)
                          : format_string("%s: is not a file; remove it or give another --out", path);
    *busy = is_file && error;
    if (error) close(fd);
    else writer_begin(fd, path, answer);
    return error;
}

// Takes the lock on the folder `out` for a new run, and waits up to `patience` seconds for it. Returns an error, which the caller
// frees. NULL: it is taken, or nothing can be made there and writer_lock.record is NULL.
static inline char* writer_lock_take(const char* out, double patience) {
    char *folder = path_trim(out), *path = format_string("%s/" WRITER_LOCK, folder), *error;
    double until = now_seconds() + patience;
    bool busy;
    for (bool said = false; (error = writer_try(folder, path, &busy)) != NULL && busy && now_seconds() < until; said = true) {
        if (!said) printf("waiting    up to %g s: %.*s\n", patience, (int)strcspn(error, ";"), error);
        fflush(stdout);
        free(error);
        usleep(50000);
    }
    free(folder);
    free(path);
    return error;
}

// ---- every other rank that writes ----

// Shares the lock that rank 0 has taken. record: what its file says; if another run has the folder by now, or this is another
// folder, it says something else. Returns an error, which the caller frees, or NULL.
static inline char* writer_lock_join(const char* out, const char* record) {
    char *folder = path_trim(out), *path = format_string("%s/" WRITER_LOCK, folder), *error = NULL;
    const char* remedy = "--out must be a folder that every rank sees, and that no other run uses";
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666); // O_CREAT: so that an NFS client asks the server
    if (fd < 0 || writer_set(fd, F_RDLCK) == LOCK_REFUSED) {
        error = format_string("%s: cannot be %s: %s; %s", path, fd < 0 ? "opened" : "locked", strerror(errno), remedy);
        if (fd >= 0) close(fd);
    } else {
        char* text = writer_read(fd);
        bool same = strcmp(text, record) == 0;
        if (!same) { error = format_string("%s: is not the one that rank 0 wrote; %s", path, remedy); text[0] = '\0'; }
        writer_keep(fd, path, text);
        if (!same) writer_lock_release(); // removes the file if it was not there
    }
    free(folder);
    free(path);
    return error;
}
#endif
