/*
control.h - how ranks look after one another: a star of TCP connections to rank 0, beside the path of the data.

Every rank has a thread, its watchdog, that tells rank 0 five times a second which operations were issued and finished
(oplog.h) and which one the host waits for. Rank 0 so knows who died (its connection closed), who left by an error of its
own, and, when a wait has lasted longer than the deadline, who never issued that operation. It tells everyone; everyone
prints one line, writes its last operations to a file, and leaves with status 1. There is no going on without a
rank: the last checkpoint is the recovery. If rank 0 is gone or silent itself, the others find that out by themselves.

The connections also carry small messages between hosts, for what is compared at the start (control_gather,
control_broadcast). On a rank that is alone every function returns at once. Messages are the structs of this program as
they are: all ranks run the same program on the same kind of machine, which is checked when they meet.
*/
#ifndef LLMC_CONTROL_H
#define LLMC_CONTROL_H
#include "common.h"
#include "oplog.h"
#include "ranks.h"

#define CONTROL_ADDRESS 512              // bytes of an address as text, the final 0 included
#define CONTROL_MAX_MESSAGE (1u << 20)   // bytes of the largest message

typedef struct { char* data; size_t bytes; } ControlBytes; // owned; followed by a 0 that is not counted

typedef struct Control Control;
// Usage, on every rank:
//     control_init(&c, ranks, timeout, out);
//     char address[CONTROL_ADDRESS] = "";
//     if (ranks.rank == 0) control_listen(&c, address);
//     ... everyone gets rank 0's address, by MPI_Bcast(address, sizeof address, MPI_BYTE, 0, ...) ...
//     control_join(&c, address);
//     ... oplog_issue(&c.log, ...) and so on ...
//     control_stop(&c);
// timeout: seconds that a wait, and the meeting of all ranks, may last. out: folder for the last operations, or "".
static inline void control_init(Control* c, RankInfo ranks, double timeout, const char* out);
static inline void control_listen(Control* c, char* address);       // address (CONTROL_ADDRESS): where rank 0 is to be found
static inline void control_join(Control* c, const char* address);   // returns when all ranks have met; dies naming who is missing
static inline void control_stop(Control* c);                        // returns when all ranks are here; after it a rank may end

// Blocking and collective, in the same order on all ranks; for the watchdog they are operations of a communicator "control".
// Every rank gives a string of bytes; rank 0 gets all of them, by rank, in parts (N): the caller frees their data. Others: NULL.
static inline void control_gather(Control* c, const void* data, size_t bytes, ControlBytes* parts);
// Everyone else gets rank 0's bytes, and frees them; rank 0 gets an empty one.
static inline ControlBytes control_broadcast(Control* c, const void* data, size_t bytes);
#endif
