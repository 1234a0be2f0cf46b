/*
switch.c - the switch of a cluster on one machine (cluster.sh). It connects the nodes and gives each link its rate, delay and loss.
tc's netem does the same in Debian's kernels, but the kernels of many containers and small machines lack it.

  switch LINKS NODES

Node i's link is the interface "nodeI" of this network namespace; the node's address is 02:00:00:00:00:0I. Line i of the file LINKS
contains its rate in bit/s (0: unlimited), its delay in seconds from end to end, the share of frames that are lost, 1 if the link is down,
and the number of its part of the network; parts cannot reach each other. On SIGHUP the file is read again.

Frames occupy a link one after another, each for the time that its bits need, first on the sender's link and then on the receiver's. The
switch queues frames for up to 50 ms, and up to 140 of them (1.2 MB); it drops any more, and TCP then sends more slowly.
*/
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NODES = 64, FRAME = 9200, QUEUED = 140 };
#define QUEUED_SECONDS 0.05

typedef struct { double rate, delay, loss; int down, part; } Settings;
typedef struct Frame { struct Frame* next; double at; int from, to, bytes; char data[]; } Frame; // `at`: the time when it leaves its way
typedef struct { double free; int queued; Frame *first, **end; } Way; // free: when its last frame is through
typedef struct { int socket; Settings is; Way up, down; } Link;       // up: from the node to the switch

static Link links[MAX_NODES];
static int num_nodes;
static volatile sig_atomic_t changed;

static void fail(const char* what) { fprintf(stderr, "switch: %s: %s\n", what, strerror(errno)); exit(1); }
static void hear(int signal) { (void)signal; changed = 1; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void settings_read(const char* name) {
    FILE* file = fopen(name, "r");
    if (file == NULL) fail(name);
    for (int i = 0; i < num_nodes; i++) {
        Settings* s = &links[i].is;
        if (fscanf(file, "%lf %lf %lf %d %d", &s->rate, &s->delay, &s->loss, &s->down, &s->part) != 5) fail("a line of LINKS is wrong");
    }
    fclose(file);
}

static int link_open(int node) {
    char name[IF_NAMESIZE];
    snprintf(name, sizeof name, "node%d", node);
    struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)if_nametoindex(name) };
    int s = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL)), yes = 1, room = 8 << 20;
    if (s < 0 || address.sll_ifindex == 0 || bind(s, (struct sockaddr*)&address, sizeof address)) fail(name);
    // The vnet header says what the sender left to its network card, the checksum, and stays with the frame.
    if (setsockopt(s, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes) || setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes))
        fail("packet sockets");
    setsockopt(s, SOL_PACKET, PACKET_QDISC_BYPASS, &yes, sizeof yes);
    if (setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room)) setsockopt(s, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    return s;
}

// Returns the way whose first frame leaves next, or NULL if there is none.
static Way* next_way(void) {
    Way* next = NULL;
    for (int i = 0; i < 2 * num_nodes; i++) {
        Way* way = i % 2 ? &links[i / 2].up : &links[i / 2].down;
        if (way->first && (next == NULL || way->first->at < next->first->at)) next = way;
    }
    return next;
}

// Puts a frame on a way at a given time. Returns false if the frame is lost.
static bool way_enter(Way* way, const Settings* s, Frame* frame, double time) {
    double bytes = frame->bytes - 10 + 24; // less the vnet header, plus preamble, check sequence and gap
    if (s->down || drand48() < s->loss / 2) return false;
    if (way->queued >= QUEUED && way->free - time > QUEUED_SECONDS) return false;
    double begin = way->free > time ? way->free : time;
    way->free = begin + (s->rate > 0 ? 8 * bytes / s->rate : 0);
    way->queued++;
    frame->at = way->free + s->delay / 2;
    frame->next = NULL;
    if (way->first == NULL) way->end = &way->first;
    *way->end = frame;
    way->end = &frame->next;
    return true;
}

static void frames_read(int node) {
    static char data[FRAME];
    for (ssize_t bytes; (bytes = recv(links[node].socket, data, sizeof data, MSG_TRUNC)) > 0; ) {
        if (bytes < 10 + ETH_HLEN || bytes > FRAME) continue;
        const unsigned char* to = (unsigned char*)data + 10; // the destination address
        bool is_for_all = to[0] & 1;
        double time = now();
        for (int i = 0; i < num_nodes; i++) {
            if (i == node || (!is_for_all && to[5] != i) || links[i].is.part != links[node].is.part) continue;
            Frame* frame = (Frame*)malloc(sizeof *frame + (size_t)bytes);
            if (frame == NULL) fail("memory");
            frame->from = node; frame->to = i; frame->bytes = (int)bytes;
            memcpy(frame->data, data, (size_t)bytes);
            if (!way_enter(&links[node].up, &links[node].is, frame, time)) free(frame);
        }
    }
}

// The first frame reaches the end of a way: it begins the next one, or is delivered.
static void frame_arrive(Way* way) {
    Frame* frame = way->first;
    Link* to = &links[frame->to];
    way->first = frame->next;
    way->queued--;
    if (way != &to->down) {
        if (!way_enter(&to->down, &to->is, frame, frame->at)) free(frame);
        return;
    }
    if (send(to->socket, frame->data, (size_t)frame->bytes, MSG_DONTWAIT) < 0 && errno != ENOBUFS && errno != EAGAIN)
        fprintf(stderr, "switch: to node %d: %s\n", frame->to, strerror(errno));
    free(frame);
}

int main(int argc, char** argv) {
    if (argc != 3 || (num_nodes = atoi(argv[2])) < 1 || num_nodes > MAX_NODES) { fprintf(stderr, "switch LINKS NODES\n"); return 1; }
    struct sched_param soon = { .sched_priority = 1 };
    sched_setscheduler(0, SCHED_FIFO, &soon); // if permitted, because ranks occupy all cores and the switch must not wait for one
    prctl(PR_SET_TIMERSLACK, 1000); // ns
    prctl(PR_SET_NAME, "switch");
    struct sigaction act = { .sa_handler = hear };
    sigaction(SIGHUP, &act, NULL);
    struct pollfd waits[MAX_NODES];
    for (int i = 0; i < num_nodes; i++) waits[i] = (struct pollfd){ .fd = links[i].socket = link_open(i), .events = POLLIN };
    settings_read(argv[1]);
    for (;;) {
        Way* next = next_way();
        double left = next ? next->first->at - now() : 3600;
        if (left < 0) left = 0;
        struct timespec wait = { (time_t)left, (long)((left - (double)(time_t)left) * 1e9) };
        if (ppoll(waits, (nfds_t)num_nodes, &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        if (changed) { changed = 0; settings_read(argv[1]); }
        while ((next = next_way()) && next->first->at <= now()) frame_arrive(next);
        for (int i = 0; i < num_nodes; i++) if (waits[i].revents) frames_read(i);
    }
}
