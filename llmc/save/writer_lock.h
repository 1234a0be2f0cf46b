/*
writer_lock.h - a folder has one writer at a time: the run whose processes hold a lock on OUT/writer.lock.

Two runs in one folder would remove each other's half-written checkpoints, and ranks whose launcher was killed go on for
some seconds. So rank 0 takes the lock, which it can only if no process of another run has it; it writes into the file
who it is, and then shares the lock with all other ranks that write. The kernel drops it when a process ends, in any way
(fcntl, F_OFD_SETLK; flock gives it up before it takes the other kind), and on NFS the server keeps it for all machines.
Rank 0 removes the file at the end, and as it exits with an error unless another rank still has it; a file that is left
is nobody's.
*/
#ifndef LLMC_WRITER_LOCK_H
#define LLMC_WRITER_LOCK_H
#include "../base/folder.h"

#define WRITER_LOCK "writer.lock"

typedef struct {
    char *path, *record; // owned; path: of rank 0, which removes the file. record: what it says;
                         // NULL: nothing is locked
    int fd;
    pid_t process;       // a forked child does not end its parent's lock
} WriterLock;
static WriterLock writer_lock; // of this process

// Locks fd; returns false if another process holds the lock. path: names the file in a warning if the file system lacks
// locks; NULL: no warning.
static inline bool writer_set(int fd, const char* path, short type) {
    struct flock l;
    memset(&l, 0, sizeof l); // the whole file
    l.l_type = type;
    if (fcntl(fd, F_OFD_SETLK, &l) == 0) return true;
    if (errno == EAGAIN || errno == EACCES) return false;
    if (path) warn("%s: this file system has no locks; make sure that no other run writes there", path);
    return true;
}

// Returns the whole text of a lock file; the caller frees it.
static inline char* writer_read(int fd) {
    char text[512];
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    return xstrdup(text);
}

// Ends this process's lock, if any. No rank writes any more.
static inline void writer_lock_release(void) {
    if (writer_lock.record == NULL) return;
    if (writer_lock.path) unlink(writer_lock.path);
    close(writer_lock.fd);
    free(writer_lock.path);
    free(writer_lock.record);
    memset(&writer_lock, 0, sizeof writer_lock);
}

// For exit(), on rank 0.
static inline void writer_lock_exit(void) {
    bool mine = writer_lock.record != NULL && writer_lock.process == getpid();
    if (mine && writer_set(writer_lock.fd, NULL, F_WRLCK)) unlink(writer_lock.path);
}

// Makes the open, locked file this process's, and shares it: the kind of lock changes at once, so no other run comes
// between. On a full disk the file stays empty.
static inline void writer_begin(int fd, const char* path) {
    char host[256] = "";
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t); // so that no other run's text is the same
    gethostname(host, sizeof host - 1);
    char* text = format_string("process %d on %s, since %lld.%09ld\n", getpid(), host, (long long)t.tv_sec, t.tv_nsec);
    if (ftruncate(fd, 0) == 0 && pwrite_all(fd, text, strlen(text), 0)) fsync(fd);
    free(text);
    writer_set(fd, NULL, F_RDLCK);
    WriterLock l = { xstrdup(path), writer_read(fd), fd, getpid() };
    writer_lock = l;
    static bool registered;
    if (!registered) registered = atexit(writer_lock_exit) == 0;
}

// Tries once. Returns an error, which the caller frees; NULL: the lock is taken, or none can be made. *busy: another
// run holds it.
static inline char* writer_try(const char* out, const char* path, bool* busy) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666), reason = errno;
    struct stat info;
    *busy = false;
    if (fd < 0 && (reason == EACCES || reason == EPERM || reason == EROFS) && access(out, W_OK) != 0) return NULL;
    if (fd < 0)
        return format_string("%s: cannot be opened: %s; %s or give another --out", path, path_reason(path, reason),
                             reason == ENOSPC ? "remove files" : "make it writable");
    if (writer_set(fd, path, F_WRLCK) && fstat(fd, &info) == 0 && info.st_nlink > 0) { // 0: its run has just removed it
        writer_begin(fd, path);
        return NULL;
    }
    *busy = true;
    char *who = writer_read(fd), *error;
    // The disk was full, or it has not written its name yet
    if (who[0] == '\0') { free(who); who = xstrdup("another process"); }
    error = format_string("--out %s: the run of %.*s is writing there; wait until it has ended, or give another --out",
                          out, (int)strcspn(who, ","), who);
    free(who);
    close(fd);
    return error;
}

// Takes the lock on the folder `out` for a new run, and waits up to `patience` seconds for it. Returns an error, which
// the caller frees. NULL: it is taken, or nothing can be made there and writer_lock.record is NULL.
static inline char* writer_lock_take(const char* out, double patience) {
    char *path = format_string("%s/" WRITER_LOCK, out), *error;
    double until = now_seconds() + patience;
    bool busy;
    for (bool said = false; (error = writer_try(out, path, &busy)) != NULL && busy && now_seconds() < until;
         said = true) {
        if (!said) printf("waiting    up to %g s: %.*s\n", patience, (int)strcspn(error, ";"), error);
        fflush(stdout);
        free(error);
        usleep(50000);
    }
    free(path);
    return error;
}

// Shares the lock that rank 0 has taken. record: what its file says; if another run has the folder by now, or this is
// another folder, it says something else. Returns an error, which the caller frees, or NULL.
static inline char* writer_lock_join(const char* out, const char* record) {
    char *path = format_string("%s/" WRITER_LOCK, out), *error = NULL;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666); // O_CREAT: so that an NFS client asks the server
    char* text = fd >= 0 && writer_set(fd, NULL, F_RDLCK) ? writer_read(fd) : NULL;
    WriterLock l = { NULL, text, fd, getpid() };
    if (text && strcmp(text, record) == 0) writer_lock = l;
    else {
        error = format_string("%s: %s; --out must be a folder that every rank sees, and that no other run uses", path,
                              text ? "is not the one that rank 0 wrote" : strerror(errno));
        free(text);
        if (fd >= 0) close(fd);
    }
    free(path);
    return error;
}
#endif
