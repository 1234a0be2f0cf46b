/*
folder.h - folders that appear whole or not at all, and small files read and written to the last byte.

A folder that must survive a crash is filled under a temporary name next to its final one, synced, and only then renamed
(rename(2) is atomic within a file system). Functions that write return false with errno set, so that the caller,
which knows what is being saved, can clean up and name the remedy.
*/
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H
#include "common.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/resource.h>

// Reads all n bytes at offset, however the kernel splits them.
// Returns false on failure, with errno 0 if the file ends early.
static inline bool pread_all(int fd, void* out, size_t n, size_t offset) {
    while (n > 0) {
        errno = 0;
        ssize_t got = pread(fd, out, size_min(n, (size_t)1 << 30), (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        out = (char*)out + got; offset += (size_t)got; n -= (size_t)got;
    }
    return true;
}
static inline bool pwrite_all(int fd, const void* data, size_t n, size_t offset) {
    while (n > 0) {
        ssize_t put = pwrite(fd, data, size_min(n, (size_t)1 << 30), (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        data = (const char*)data + put; offset += (size_t)put; n -= (size_t)put;
    }
    return true;
}

// A file that is about to be read, and what to do if it is damaged: "copy it again".
typedef struct { const char *path, *remedy; } FileSource;
static inline FileSource file_source(const char* path, const char* remedy) {
    FileSource from = { path, remedy };
    return from;
}

// Dies with "PATH: what is wrong; REMEDY".
__attribute__((noreturn)) PRINTF_LIKE(2, 3)
static inline void die_file(FileSource from, const char* format, ...) {
    char message[1024]; // names out of hostile files may be of any length
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    die("%s: %s; %s", from.path, message, from.remedy);
}
#define require_file(from, cond, ...) do { if (!(cond)) die_file(from, __VA_ARGS__); } while (0)

// Returns what is at a path where a file is wanted, in words.
static inline const char* file_kind(mode_t mode) {
    return S_ISDIR(mode) ? "folder" : S_ISFIFO(mode) ? "pipe" : S_ISSOCK(mode) ? "socket" : "device";
}

// Raises this process's soft limit of open files by `more`, at most to its hard limit.
static inline void files_allow(size_t more) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max - limit.rlim_cur < more ? limit.rlim_max : limit.rlim_cur + more;
    setrlimit(RLIMIT_NOFILE, &limit);
}
static inline bool too_many_files(void) { return errno == EMFILE || errno == ENFILE; }
// Returns why a file could not be opened, with the remedy if the file is not to blame. reason: errno.
static inline const char* open_error(int reason) {
    return reason == EMFILE
               ? "too many open files in this process: allow more with `ulimit -n`, or give fewer and larger files"
           : reason == ENFILE ? "too many open files in this system: allow more with `sysctl fs.file-max`"
                              : strerror(reason);
}

// Opens a file that is there, to read it (O_RDONLY) or to read and change it (O_RDWR), and reports its size in *size if
// that is not NULL. Dies if it is a folder, pipe, socket or device. Every reader opens its files here, because
// open(2) waits, perhaps forever, until something writes into a pipe (a FIFO), and because readers go back and forth in
// files, which pipes do not allow.
static inline int file_open(FileSource from, int access, size_t* size) {
    int fd = open(from.path, access | O_NONBLOCK | O_CLOEXEC);
    require(fd >= 0 || !too_many_files(), "%s: cannot be opened: %s", from.path, open_error(errno));
    require_file(from, fd >= 0, "cannot be opened: %s", strerror(errno));
    struct stat info;
    require_file(from, fstat(fd, &info) == 0, "cannot be examined: %s", strerror(errno));
    require_file(from, S_ISREG(info.st_mode), "is a %s, not a file", file_kind(info.st_mode));
    require_file(from, fcntl(fd, F_SETFL, access) == 0, "cannot be opened: %s", strerror(errno)); // without O_NONBLOCK
    if (size) *size = (size_t)info.st_size;
    return fd;
}

// Returns the whole of a small file (at most `limit` bytes), 0-terminated, its length in *n; the caller frees it.
static inline char* file_read(FileSource from, size_t limit, size_t* n) {
    int fd = file_open(from, O_RDONLY, n);
    require_file(from, *n <= limit, "has %zu bytes where at most %zu make sense", *n, limit);
    char* text = new_array(char, *n + 1);
    require_file(from, pread_all(fd, text, *n, 0), "cannot be read: %s", errno ? strerror(errno) : "it ends early");
    close(fd);
    return text;
}

// Returns true if the file begins with these n <= 16 bytes. Dies if it is no file or cannot be opened.
static inline bool file_begins_with(FileSource from, const void* magic, size_t n) {
    char begin[16];
    int fd = file_open(from, O_RDONLY, NULL);
    bool is_long_enough = pread_all(fd, begin, n, 0);
    close(fd);
    return is_long_enough && memcmp(begin, magic, n) == 0;
}

// Makes a new file of n bytes, which is on the disk when this returns true.
static inline bool file_write(const char* path, const void* data, size_t n) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return false;
    bool written = pwrite_all(fd, data, n, 0) && fsync(fd) == 0;
    int reason = errno;
    bool closed = close(fd) == 0;
    if (!written) errno = reason;
    return written && closed;
}

// "a/b" of "a/b/c", "." of "c"; the caller frees it. path_name gives "c". Neither wants a trailing slash.
static inline char* path_parent(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash == NULL   ? xstrdup(".")
           : slash == path ? xstrdup("/")
                           : format_string("%.*s", (int)(slash - path), path);
}
static inline const char* path_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}
// Returns a copy without trailing slashes.
static inline char* path_trim(const char* path) {
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    return format_string("%.*s", (int)n, path);
}
static inline bool path_exists(const char* path) { return access(path, F_OK) == 0; }

// Returns in words why something could not be made at a path: no_inodes if ENOSPC is not about bytes,
// otherwise open_error(reason).
static const char no_inodes[] = "No inodes left on the device (df -i)";
static inline const char* path_reason(const char* path, int reason) {
    struct statvfs s;
    char* parent = path_parent(path);
    bool is_known = reason == ENOSPC && (statvfs(path, &s) == 0 || statvfs(parent, &s) == 0);
    free(parent);
    bool has_space = is_known && (s.f_bavail * s.f_frsize) >> 20 > 0;
    return has_space && s.f_files > 0 && s.f_favail == 0 ? no_inodes : open_error(reason);
}

// Makes a folder and those above it; one that is there already is fine.
static inline bool folder_make(const char* path) {
    if (mkdir(path, 0777) == 0) return true;
    struct stat info;
    if (errno == EEXIST) {
        bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
        if (!is_folder) errno = ENOTDIR;
        return is_folder;
    }
    if (errno != ENOENT || *path == '\0') return false;
    char* parent = path_parent(path);
    bool made = strcmp(parent, path) != 0 && folder_make(parent) && mkdir(path, 0777) == 0;
    free(parent);
    return made;
}

// Returns true if the path itself is a symbolic link, even one that leads nowhere.
static inline bool path_is_link(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
}

// Removes a folder and the files in it. Fails if a folder is inside: nothing here makes one, so it is the user's. A
// link is only unlinked, because its target is the user's as well: an old checkpoint on another disk, for example.
static inline bool folder_remove(const char* path) {
    if (path_is_link(path)) return unlink(path) == 0;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR* folder = fd >= 0 ? fdopendir(fd) : NULL;
    if (folder == NULL) return errno == ENOENT;
    bool removed = true;
    for (struct dirent* e = readdir(folder); e != NULL && removed; e = readdir(folder)) {
        bool is_entry = strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
        if (is_entry) removed = unlinkat(dirfd(folder), e->d_name, 0) == 0;
    }
    int reason = errno;
    closedir(folder);
    errno = reason;
    return removed && rmdir(path) == 0;
}

// Makes renames and new names inside a folder survive a power cut.
static inline bool folder_sync(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return false;
    // Some network and FUSE file systems have nothing to sync in a folder.
    bool synced = fsync(fd) == 0 || errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS;
    int reason = errno;
    close(fd);
    errno = reason;
    return synced;
}

// ---- a folder in the making ----

// The one that this process is filling, removed when it exits (as die() does) before folder_publish.
static char* folder_unfinished;
static inline void folder_abandon(void) { if (folder_unfinished) folder_remove(folder_unfinished); }

// Returns the path under which a folder is filled: next to its final place, and hidden. The caller frees it.
static inline char* folder_temporary(const char* path) {
    char* parent = path_parent(path);
    char* temporary = format_string("%s/.tmp_%s", parent, path_name(path));
    free(parent);
    return temporary;
}

// Makes an empty folder_temporary(path) and the folders above it. Removes the remains of an earlier crash.
static inline bool folder_begin(const char* path) {
    static bool registered;
    if (!registered) registered = atexit(folder_abandon) == 0;
    char *temporary = folder_temporary(path), *parent = path_parent(path);
    bool made = folder_make(parent) && folder_remove(temporary) && mkdir(temporary, 0777) == 0;
    if (made) folder_unfinished = xstrdup(temporary);
    free(parent);
    free(temporary);
    return made;
}

// Gives the filled folder, whose files are synced, its final name, which must be free. If this fails, it can be
// repeated. From here on no exit removes the folder, because it is complete.
static inline bool folder_publish(const char* path) {
    char *temporary = folder_temporary(path), *parent = path_parent(path);
    free(folder_unfinished);
    folder_unfinished = NULL;
    bool published = folder_sync(temporary) && rename(temporary, path) == 0 && folder_sync(parent);
    free(parent);
    free(temporary);
    return published;
}

// Dies after folder_publish has failed, and says where the complete folder is.
__attribute__((noreturn))
static inline void folder_die_complete(const char* path) {
    const char* reason = strerror(errno);
    char* temporary = folder_temporary(path);
    require(path_exists(temporary), "%s: it is complete, but its name may not survive a power cut: %s; check the disk",
            path, reason);
    die("%s: cannot be given its name: %s; it is complete in %s: rename that folder before a later save removes it",
        path, reason, temporary);
}
#endif
