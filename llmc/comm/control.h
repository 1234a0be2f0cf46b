/*
control.h - the connections over which ranks watch one another: a star of TCP connections to rank 0, separate from the
path of the data.

If a rank dies, hangs or leaves, all others name it within seconds of its death, or of the deadline of the wait for it,
and end with status 1 (watchdog.h). A run cannot continue without a rank: it restarts from the last checkpoint. The same
connections carry small messages, by which ranks compare their state and decide together (control_messages.h). With a
single rank, every function returns immediately.

Every rank calls control_init, control_join and control_stop; rank 0 first calls control_listen, and the others get its
address, for example by MPI_Bcast, unless the launcher names a place (ranks.meeting). The watchdog watches what is noted
in c.recorder.

Global state: watchdog_process (watchdog.h), which an exit() anywhere and signal handlers must find.
*/
#ifndef LLMC_CONTROL_H
#define LLMC_CONTROL_H
#include "../watch/watchdog.h"

// ---- the meeting ----

// v4 and v6 store the port at the same offset
typedef union { struct sockaddr any; struct sockaddr_in v4; struct sockaddr_in6 v6; } ControlAddress;

// timeout: seconds that a wait, and the meeting of all ranks, may last. out: folder for the last operations, or "".
static inline void control_init(Control* c, RankInfo ranks, double timeout, const char* out) {
    memset(c, 0, sizeof *c);
    c->ranks = ranks;
    c->timeout = timeout;
    c->looked = now_seconds();
    c->grace = control_leave_seconds();
    c->out = out;
    c->listener = c->wake[0] = c->wake[1] = c->sigterm = c->progress.fd = -1;
    flight_recorder_init(&c->recorder);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    for (int i = 0; i < CONTROL_STRANGERS; i++) c->strangers[i].fd = -1;
    c->num_peers = ranks.rank == 0 ? ranks.size : 1;
    c->peers = new_array(ControlPeer, c->num_peers);
    for (int i = 0; i < c->num_peers; i++) c->peers[i].fd = -1;
    c->peers[0].beat.waited = -1;
    c->polled = new_array(struct pollfd, c->num_peers + CONTROL_STRANGERS + 3);
}

// Returns a listening socket on every interface, or on the loopback interface only; -1 if the family is not available.
static inline int control_bind(int family, bool only_here, int port) {
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1, off = 0;
    if (fd < 0) return -1;
    ControlAddress at;
    memset(&at, 0, sizeof at);
    at.any.sa_family = (sa_family_t)family;
    at.v4.sin_port = htons((uint16_t)port);
    if (family == AF_INET) at.v4.sin_addr.s_addr = htonl(only_here ? INADDR_LOOPBACK : INADDR_ANY);
    else at.v6.sin6_addr = only_here ? in6addr_loopback : in6addr_any;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); // also accepts IPv4
    if (bind(fd, &at.any, family == AF_INET ? sizeof at.v4 : sizeof at.v6) == 0 && listen(fd, 1024) == 0) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

// Appends " HOST" for each address under which this machine can be reached from others.
static inline void control_add_hosts(char* address, size_t size) {
    struct ifaddrs *all = NULL, *i;
    if (getifaddrs(&all) != 0) return;
    for (i = all; i; i = i->ifa_next) {
        if (i->ifa_addr == NULL || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        char host[INET6_ADDRSTRLEN];
        size_t n = strlen(address);
        int family = i->ifa_addr->sa_family;
        const struct sockaddr_in* v4 = (const struct sockaddr_in*)(const void*)i->ifa_addr;
        const struct sockaddr_in6* v6 = (const struct sockaddr_in6*)(const void*)i->ifa_addr;
        if (family != AF_INET && (family != AF_INET6 || IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr))) continue;
        inet_ntop(family, family == AF_INET ? (const void*)&v4->sin_addr : (const void*)&v6->sin6_addr, host,
                  sizeof host);
        if (n + strlen(host) + 2 <= size) snprintf(address + n, size - n, " %s", host);
    }
    freeifaddrs(all);
}

// address (CONTROL_ADDRESS): where to find rank 0, at the launcher's port and host if it names them, otherwise at a
// free port.
static inline void control_listen(Control* c, char* address) {
    if (c->ranks.size == 1) return;
    bool only_here = c->ranks.local_size == c->ranks.size, named = c->ranks.meeting[0] != '\0';
    int port = named ? atoi(c->ranks.meeting) : 0;
    bool loopback = only_here && !named;
    c->listener = control_bind(loopback ? AF_INET : AF_INET6, loopback, port);
    if (c->listener < 0) c->listener = control_bind(loopback ? AF_INET6 : AF_INET, loopback, port);
    require(c->listener >= 0, "rank 0 cannot listen for the other ranks on port %d: %s%s", port, strerror(errno),
            errno != EADDRINUSE
                ? ""
                : "; another run may use it: wait until that ends, or give torchrun another --master-port");
    if (named) {
        snprintf(address, CONTROL_ADDRESS, "%s", c->ranks.meeting);
        return;
    }
    ControlAddress bound;
    socklen_t length = sizeof bound;
    unsigned char bytes[16];
    require(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "cannot get random bytes: %s", strerror(errno));
    getsockname(c->listener, &bound.any, &length);
    port = ntohs(bound.v4.sin_port);
    size_t n = (size_t)snprintf(address, CONTROL_ADDRESS, "%d ", port);
    for (size_t i = 0; i < sizeof bytes; i++) n += (size_t)snprintf(address + n, CONTROL_ADDRESS - n, "%02x", bytes[i]);
    if (!only_here) control_add_hosts(address, CONTROL_ADDRESS);
    const char* here = bound.any.sa_family == AF_INET6 ? "::1" : "127.0.0.1";
    if (address[n] == '\0') snprintf(address + n, CONTROL_ADDRESS - n, " %s", here);
}

// Returns true if fd can be read from (or written to) before `until`.
static inline bool control_ready(int fd, short events, double until) {
    struct pollfd p = { fd, events, 0 };
    int n;
    do n = poll(&p, 1, (int)(1e3 * fmax(0, until - now_seconds()))); while (n < 0 && errno == EINTR);
    return n > 0;
}

// The same while ranks meet: `until` and all deadlines below are times of control_time.
static inline bool control_wait(Control* c, int fd, short events, double until) {
    for (;;) {
        double wait = fmax(0, fmin(CONTROL_BEAT, until - control_time(c)));
        bool ready = control_ready(fd, events, now_seconds() + wait);
        if (ready || wait <= 0) return ready;
    }
}

// Receives exactly n bytes from a socket; returns false if they do not come before `until`.
static inline bool control_receive(Control* c, int fd, void* data, size_t n, double until) {
    for (size_t done = 0; done < n;) {
        ssize_t k = control_wait(c, fd, POLLIN, until) ? recv(fd, (char*)data + done, n - done, 0) : -1;
        if (k <= 0) return false;
        done += (size_t)k;
    }
    return true;
}

// Introduces this rank and waits to be admitted. Returns false if the other end is not our rank 0.
static inline bool control_introduce(Control* c, int fd, double until) {
    struct { ControlHeader header; ControlHello hello; } m;
    ControlHeader answer;
    char refusal[sizeof c->why + 1];
    memset(&m, 0, sizeof m);
    m.header.kind = MESSAGE_HELLO;
    m.header.bytes = sizeof m.hello;
    snprintf(m.hello.magic, sizeof m.hello.magic, "%s", CONTROL_MAGIC);
    memcpy(m.hello.word, c->word, sizeof m.hello.word);
    m.hello.rank = c->ranks.rank;
    m.hello.size = c->ranks.size;
    m.hello.layout = control_layout();
    if (send(fd, &m, sizeof m, MSG_NOSIGNAL) != (ssize_t)sizeof m) return false;
    if (!control_receive(c, fd, &answer, sizeof answer, until)) return false;
    if (answer.kind == MESSAGE_WELCOME && answer.bytes == 0) return true;
    if (answer.kind != MESSAGE_END || answer.bytes < 2 || answer.bytes > sizeof refusal - 1) return false;
    memset(refusal, 0, sizeof refusal);
    if (!control_receive(c, fd, refusal, answer.bytes, until)) return false;
    die("rank 0 does not let rank %d join: %s", c->ranks.rank, refusal + 1);
}

// Tries one host once. Returns -1 if our rank 0 is not there (yet).
static inline int control_try(Control* c, const char* host, const char* port, double until) {
    struct addrinfo hints, *all = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    int failed = getaddrinfo(host, port, &hints, &all);
    c->looked = now_seconds(); // the time of a slow name server counts as waiting
    if (failed) return -1;     // a name may not be known yet
    int found = -1;
    for (struct addrinfo* a = all; a && found < 0; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0, on = 1;
        socklen_t length = sizeof error;
        if (fd < 0) continue;
        bool connected = connect(fd, a->ai_addr, a->ai_addrlen) == 0;
        if (!connected && errno == EINPROGRESS && control_wait(c, fd, POLLOUT, fmin(until, control_time(c) + 3)))
            connected = getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if (connected && control_introduce(c, fd, fmin(until, control_time(c) + 30))) found = fd;
        else close(fd);
    }
    freeaddrinfo(all);
    return found;
}

// Every rank but 0: tries rank 0's hosts in turn until the deadline.
static inline void control_connect(Control* c, const char* port, const char* hosts) {
    double until = control_time(c) + c->timeout;
    while (c->peers[0].fd < 0) {
        char host[256];
        int used;
        for (const char* p = hosts; c->peers[0].fd < 0 && sscanf(p, " %255s%n", host, &used) == 1; p += used)
            c->peers[0].fd = control_try(c, host, port, until);
        if (c->peers[0].fd >= 0) break;
        usleep(100000);
        require(control_time(c) < until, "rank %d could not reach rank 0 at%s, port %s, within %g s (--comm-timeout):"
                " check that rank 0 has started, and that no firewall is in the way",
                c->ranks.rank, hosts, port, c->timeout);
    }
    c->peers[0].joined = true;
    c->peers[0].heard = now_seconds();
    c->joined = 1;
}

// ---- joining ----

// Rank 0: waits until all ranks have joined.
static inline void control_await_all(Control* c) {
    double until = control_time(c) + c->timeout;
    pthread_mutex_lock(&c->lock);
    for (double left; c->joined < c->ranks.size - 1 && (left = until - control_time(c)) > 0;)
        control_wait_changed(c, now_seconds() + fmin(CONTROL_BEAT, left));
    bool* missing = new_array(bool, c->ranks.size);
    for (int r = 1; r < c->ranks.size; r++) missing[r] = !c->peers[r].joined;
    bool all = c->joined == c->ranks.size - 1;
    pthread_mutex_unlock(&c->lock);
    char who[256];
    ranks_text(missing, c->ranks.size, who, sizeof who);
    free(missing);
    require(all, "%s of %d did not join within %g s (--comm-timeout): check that they were started, what they printed,"
            " and that no firewall is in the way", who, c->ranks.size, c->timeout);
}

// Messages name ranks in this way, too: names (size), owned by the Control from here on.
static inline void control_name_ranks(Control* c, char (*names)[RANK_NAME]) {
    pthread_mutex_lock(&c->lock);
    c->names = names;
    pthread_mutex_unlock(&c->lock);
}

// ---- all together ----

// Shares memory in which ranks write their progress. The watchdog may read it from here on.
static inline void control_share_progress(Control* c) {
    ProgressTable progress = { -1, NULL, 0 };
    ProgressTableAddress address;
    memset(&address, 0, sizeof address);
    if (c->ranks.rank == 0) address = progress_table_create(&progress, c->ranks.size);
    control_share(c, &address, sizeof address);
    if (c->ranks.rank > 0) progress_table_open(&progress, address, c->ranks.size);
    pthread_mutex_lock(&c->lock);
    c->progress = progress;
    pthread_mutex_unlock(&c->lock);
    pthread_mutex_lock(&c->recorder.lock);
    c->recorder.shared = progress_of(&progress, c->ranks.rank);
    pthread_mutex_unlock(&c->recorder.lock);
}

// Messages name the ranks' machines from here on, if there are several.
static inline void control_share_hosts(Control* c) {
    char mine[RANK_NAME] = "";
    gethostname(mine, sizeof mine - 1);
    char (*hosts)[RANK_NAME] = (char (*)[RANK_NAME])control_all_gather(c, mine, sizeof mine);
    bool several = false;
    for (int r = 1; r < c->ranks.size; r++) several = several || strcmp(hosts[r], hosts[0]) != 0;
    pthread_mutex_lock(&c->lock);
    c->hosts = several ? hosts : NULL;
    pthread_mutex_unlock(&c->lock);
    if (!several) free(hosts);
}

// Returns when all ranks have met; dies naming the missing. address: that of control_listen on rank 0; "": the
// launcher's.
static inline void control_join(Control* c, const char* address) {
    if (c->ranks.size == 1) return;
    if (address[0] == '\0') address = c->ranks.meeting;
    char port[8], hosts[CONTROL_ADDRESS];
    bool shaped = sscanf(address, "%7s %64s%511[^\n]", port, c->word, hosts) == 3;
    require(shaped, "'%s' is not an address of rank 0 (PORT WORD HOST); start with mpirun, torchrun or srun", address);
    if (c->ranks.rank > 0) control_connect(c, port, hosts);
    flight_recorder_join(&c->recorder, "control");
    watchdog_start(c);
    if (c->ranks.rank == 0) control_await_all(c);
    control_share_progress(c); // no rank continues before all have arrived
    control_share_hosts(c);
    if (c->ranks.rank != 0) return;
    pthread_mutex_lock(&c->lock);
    close(c->listener);
    c->listener = -1;
    for (int i = 0; i < CONTROL_STRANGERS; i++) control_peer_free(&c->strangers[i]);
    pthread_mutex_unlock(&c->lock);
}

// ---- the end ----

// Returns when all ranks have arrived. Afterwards a rank may end.
static inline void control_stop(Control* c) {
    control_op_begin(c, "goodbye", -1, 0);
    if (c->ranks.size > 1) {
        pthread_mutex_lock(&c->lock);
        if (c->ranks.rank > 0) control_queue(&c->peers[0], MESSAGE_GOODBYE, NULL, 0);
        control_wake(c);
        for (int r = c->ranks.rank == 0; r < c->num_peers; r++)
            while (!c->peers[r].goodbye) pthread_cond_wait(&c->changed, &c->lock);
        if (c->ranks.rank == 0) control_queue_all(c, MESSAGE_GOODBYE, NULL, 0);
        pthread_mutex_unlock(&c->lock);
        watchdog_stop(c);
    }
    for (int i = 0; i < c->num_peers; i++) control_peer_free(&c->peers[i]);
    progress_table_close(&c->progress);
    free(c->names);
    free(c->hosts);
    free(c->peers);
    free(c->polled);
    flight_recorder_free(&c->recorder);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    memset(c, 0, sizeof *c);
}
#endif
