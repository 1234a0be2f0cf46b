/*
say_once.h - ranks that fail for the same reason report it once per machine, and not each for itself.

The rank that is about to print an error binds a socket whose name is made of the launch and the message, prints the
error, and listens. A rank that can connect to this socket prints nothing, because its message has been printed. The
name is abstract (unix(7)): it belongs to no file, and the kernel frees it when a process ends in whatever way. If a
rank dies between binding and printing, the next one prints the message. If anything fails, the rank prints its message.

Only mpirun, torchrun and srun give a launch a name that all its ranks know. Ranks that were started in another way all
print their errors, and so do ranks whose stderr is a file of its own. SHARD_SAY_ONCE=0 makes every rank print.

Global state: say_once, because an error can happen anywhere.
*/
#ifndef LLMC_SAY_ONCE_H
#define LLMC_SAY_ONCE_H
#include "control.h"
#include <sys/un.h>

#define SAY_ONCE_HEAD_START 0.05 // seconds that a machine's other ranks give its first one,
                                 // whose number then precedes the message
#define SAY_ONCE_PATIENCE 1.0    // seconds to wait for a rank that bound the name but still has to print

static struct {
    uint64_t launch;        // a hash of the launch's name
    int rank, size;         // this rank's number on its machine, and how many ranks run there (Slurm: in all)
    double leave_seconds;   // control_leave_seconds
} say_once;

// FNV-1a of text and its final 0, continued from hash.
static inline uint64_t say_once_hash(uint64_t hash, const char* text) {
    do hash = (hash ^ (unsigned char)*text) * 1099511628211u; while (*text++);
    return hash;
}

// Returns the socket's name for a message, and its length.
static inline socklen_t say_once_name(const char* message, struct sockaddr_un* name) {
    struct stat out;
    uint64_t hash = say_once_hash(say_once.launch, message);
    char own_file[48] = "";
    if (fstat(STDERR_FILENO, &out) == 0 && S_ISREG(out.st_mode))
        snprintf(own_file, sizeof own_file, "%llu.%llu", (unsigned long long)out.st_dev,
                 (unsigned long long)out.st_ino);
    hash = say_once_hash(hash, own_file);
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    int n = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "shard.c error %u %016llx", (unsigned)getuid(),
                     (unsigned long long)hash);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

// Returns true if this rank must print the message; *fd is then the socket with its name, to listen on, or -1 if none
// can be made. Returns false if another rank has printed the message; *fd is the connection to that rank.
static inline bool say_once_claim(const char* message, int* fd) {
    struct sockaddr_un name;
    socklen_t length = say_once_name(message, &name);
    double start = now_seconds(), mine_from = start + (say_once.rank > 0 ? SAY_ONCE_HEAD_START : 0);
    for (;; usleep(1000)) {
        *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (*fd < 0) return true;
        if (connect(*fd, (const struct sockaddr*)&name, length) == 0) return false;
        bool may_bind = now_seconds() >= mine_from;
        if (may_bind && bind(*fd, (const struct sockaddr*)&name, length) == 0) return true;
        bool taken = !may_bind || errno == EADDRINUSE; // bound, but nobody listens: it is about to be printed
        close(*fd);
        *fd = -1;
        if (!taken || now_seconds() >= start + SAY_ONCE_PATIENCE) return true;
    }
}

// Launchers kill the other ranks when one has ended. Once the watchdog runs, it lets ranks wait for one another as they
// leave. Until then they wait here: the rank that printed the message for connections from all others, and each of
// those for that rank's end. No wait exceeds leave_seconds, in which a rank with another error can print it.
static inline void say_once_linger(int fd, bool printed) {
    double until = now_seconds() + say_once.leave_seconds;
    int others = printed ? say_once.size - 1 : 1;
    while (others-- > 0 && control_ready(fd, POLLIN, until)) if (printed && accept(fd, NULL, NULL) < 0) return;
}

// How die prints a message after say_once_begin has found several ranks. The sockets stay open until the process ends.
static inline void say_once_print(const char* line, const char* message) {
    int fd;
    bool prints = say_once_claim(message, &fd);
    if (prints) write_stderr(line);
    if (fd >= 0 && prints) listen(fd, 1024);
    if (fd >= 0 && watchdog_process.control == NULL) say_once_linger(fd, prints);
}

// Returns the launcher whose ranks these are and sets *launch to a hash of the launch's name; NULL: there is none.
static inline const RankVariables* say_once_launcher(uint64_t* launch) {
    static const struct { const RankVariables* launcher; const char* name[2]; } all[] = {
        { &ranks_openmpi, { "PMIX_NAMESPACE", "PMIX_NAMESPACE" } },
        { &ranks_torchrun, { "TORCHELASTIC_RUN_ID", "MASTER_PORT" } }, // the former alone is "none" for most
        { &ranks_slurm, { "SLURM_JOB_ID", "SLURM_STEP_ID" } } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!ranks_has(all[i].launcher)) continue;
        const char *a = getenv(all[i].name[0]), *b = getenv(all[i].name[1]);
        if (a == NULL || b == NULL) return NULL;
        *launch = say_once_hash(say_once_hash(14695981039346656037u, a), b);
        return all[i].launcher;
    }
    return NULL;
}

// Call it before anything can fail; ranks need not have met. It does not check the launcher's numbers: ranks_find does
// that later, and reports what is wrong with them.
static inline void say_once_begin(void) {
    const char* wanted = getenv("SHARD_SAY_ONCE");
    require(wanted == NULL || strcmp(wanted, "0") == 0 || strcmp(wanted, "1") == 0,
            "SHARD_SAY_ONCE must be 0 or 1, not '%s'", wanted);
    const RankVariables* v = say_once_launcher(&say_once.launch);
    if (v == NULL || (wanted && wanted[0] == '0')) return;
    const char *size = getenv(v->local_size ? v->local_size : v->size), *rank = getenv(v->local_rank);
    say_once.size = size ? atoi(size) : 1;
    say_once.rank = rank ? atoi(rank) : 0;
    say_once.leave_seconds = control_leave_seconds();
    if (say_once.size > 1) die_say = say_once_print;
}
#endif
