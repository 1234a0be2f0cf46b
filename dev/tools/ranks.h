/*
ranks.h - finds where ranks parted, from the files of last operations that they wrote when their run failed (llmc/watch/flight_recorder.h).

Operations are compared sequence by sequence: the collectives of a communicator, and what one rank sends another. In each,
the k-th operation of one rank belongs to the k-th of the others; the first k at which they do not match is where to look.
A file holds only a rank's last 64 operations, but also how many operations each sequence had in all.
*/
#ifndef DEV_RANKS_H
#define DEV_RANKS_H
#include "../../llmc/base/folder.h"
#include "../../llmc/watch/flight_recorder.h"
#include "../../llmc/watch/ranks.h"

typedef struct {
    const char* path;                    // not owned
    char run[68];                        // a word that ranks of one run share
    int rank, size;
    long long step, operations;
    OpChannel channels[1024];            // (num_channels)
    OpRecord ops[FLIGHT_RECORDER_LENGTH]; // (num_ops), oldest first
    int num_channels, num_ops;
} RankFile;

// ---- reading ----

#define damaged(...) \
    die("%s:%d: this is not a file of last operations, or it is damaged: %s", f->path, line, format_string(__VA_ARGS__))

// "-" means no peer.
static inline bool rank_file_peer(const char* text, int size, int* peer) {
    char* end;
    *peer = -1;
    if (strcmp(text, "-") == 0) return true;
    long v = strtol(text, &end, 10);
    *peer = (int)v;
    return isdigit((unsigned char)text[0]) && *end == '\0' && v < size;
}

static inline OpChannel* rank_file_channel(RankFile* f, const char* communicator, OpWay way, int peer) {
    for (int i = 0; i < f->num_channels; i++) {
        OpChannel* c = &f->channels[i];
        if (c->way == (int)way && c->peer == peer && strcmp(c->communicator, communicator) == 0) return c;
    }
    return NULL;
}

// "run WORD rank RANK of SIZE step STEP operations COUNT"
static inline void rank_file_take_owner(RankFile* f, const char* text, int line) {
    int used = 0, got = sscanf(text, "run %64s rank %d of %d step %lld operations %lld%n", f->run, &f->rank, &f->size, &f->step,
                               &f->operations, &used);
    bool possible = got == 5 && text[used] == '\n' && f->size <= MAX_RANKS && f->rank >= 0 && f->rank < f->size;
    if (!possible) damaged("its run, rank or number of ranks cannot be read");
}

// "channel COMMUNICATOR collective|send|receive PEER ISSUED FINISHED"
static inline void rank_file_take_channel(RankFile* f, const char* text, int line) {
    OpChannel c;
    char way[16], peer[16];
    int used = 0;
    memset(&c, 0, sizeof c);
    int got = sscanf(text, "channel %23s %15s %15s %lld %lld%n", c.communicator, way, peer, &c.issued, &c.finished, &used);
    bool shaped = got == 5 && text[used] == '\n' && rank_file_peer(peer, f->size, &c.peer);
    if (!shaped) damaged("a channel was expected, not '%.*s'", (int)strcspn(text, "\n"), text);
    c.way = (int)op_way(way);
    bool of_two = c.way != WAY_COLLECTIVE;
    bool known = of_two ? c.peer >= 0 : c.peer < 0 && strcmp(way, "collective") == 0;
    bool possible = c.finished >= 0 && c.finished <= c.issued;
    if (!known) damaged("'%s' with peer '%s' is not a channel", way, peer);
    if (!possible) damaged("%lld issued and %lld finished is impossible", c.issued, c.finished);
    if (rank_file_channel(f, c.communicator, (OpWay)c.way, c.peer)) damaged("this channel is there twice");
    if (f->num_channels == (int)(sizeof f->channels / sizeof f->channels[0])) damaged("there are too many channels");
    f->channels[f->num_channels++] = c;
}

// "op NUMBER COMMUNICATOR COLLECTIVE ELEMENTS TYPE PEER STEP STATE ISSUED STARTED FINISHED"
static inline void rank_file_take_op(RankFile* f, const char* text, int line) {
    OpRecord r;
    char peer[16], state[16];
    int used = 0;
    memset(&r, 0, sizeof r);
    int got = sscanf(text, "op %lld %23s %15s %llu %7s %15s %lld %15s %lf %lf %lf%n", &r.number, r.communicator, r.collective,
                     &r.elements, r.type, peer, &r.step, state, &r.issued, &r.started, &r.finished, &used);
    bool shaped = got == 11 && text[used] == '\n' && rank_file_peer(peer, f->size, &r.peer);
    if (!shaped) damaged("an operation was expected, not '%.*s'", (int)strcspn(text, "\n"), text);
    for (r.state = OP_FINISHED; r.state >= 0 && strcmp(state, op_state_names[r.state]) != 0;) r.state--;
    if (r.state < 0) damaged("'%s' is not a state of an operation", state);
    if (f->num_ops == FLIGHT_RECORDER_LENGTH) damaged("there are more than %d operations", FLIGHT_RECORDER_LENGTH);
    OpWay way = op_way(r.collective);
    OpChannel* c = rank_file_channel(f, r.communicator, way, way == WAY_COLLECTIVE ? -1 : r.peer);
    if (c == NULL || r.number < 0 || r.number >= c->issued) damaged("its channel does not have operation %lld", r.number);
    if (c->last.collective[0] && r.number != c->last.number + 1) damaged("%lld follows %lld", r.number, c->last.number);
    c->last = r;
    f->ops[f->num_ops++] = r;
}

// Reads a file; if it is not one or is incomplete, dies with its name and the line. The caller frees the result.
static inline RankFile* rank_file_read(const char* path) {
    RankFile* f = (RankFile*)xcalloc(1, sizeof(RankFile));
    FileSource from = { path, "give the files of last operations that ranks left in their --out" };
    FILE* in = fdopen(file_open(from, O_RDONLY, NULL), "r");
    char text[512];
    int line = 0;
    bool ended = false;
    f->path = path;
    require(in != NULL, "%s: cannot be read: %s", path, strerror(errno));
    while (fgets(text, sizeof text, in)) {
        line++;
        if (ended) damaged("something follows the end");
        if (line == 1 && strcmp(text, FLIGHT_RECORDER_MAGIC "\n") != 0) damaged("its first line is not '" FLIGHT_RECORDER_MAGIC "'");
        if (line == 2) rank_file_take_owner(f, text, line);
        if (line <= 2) continue;
        if (strcmp(text, "end\n") == 0) ended = true;
        else if (strncmp(text, "channel ", 8) == 0) rank_file_take_channel(f, text, line);
        else rank_file_take_op(f, text, line);
    }
    fclose(in);
    if (!ended) damaged("it is cut off");
    for (int i = 0; i < f->num_channels; i++) {
        const OpChannel* c = &f->channels[i];
        bool has_last = c->last.collective[0] == '\0' || c->last.number == c->issued - 1;
        if (!has_last) damaged("the last operations of %s are not there", c->communicator);
    }
    return f;
}

// ---- comparing ----

typedef enum {
    PARTED_NOWHERE,    // the files show no difference
    PARTED_DIFFERENT,  // ranks issued different operations under one number
    PARTED_MISSING,    // some rank never issued what others did
    PARTED_UNFINISHED, // all issued it, but on some rank it did not finish
    PARTED_UNKNOWN     // no number is in two files
} PartedBy;
typedef struct {
    PartedBy by;
    long long number;
    char text[4096];   // in words, without the last line break
} Parting;

// Operations that must be the same on all ranks concerned. from, to: ranks of a pair; -1: collectives
typedef struct { char communicator[24]; int from, to; } Sequence;
typedef struct { const RankFile* file; const OpChannel* channel; } Member; // channel NULL: it issued nothing there

static inline long long member_issued(const Member* m) { return m->channel ? m->channel->issued : 0; }

// Returns operation k of a member, NULL if it issued none or its file does not go back so far.
static inline const OpRecord* member_op(const Member* m, long long k) {
    for (int i = 0; i < m->file->num_ops && m->channel; i++) {
        const OpRecord* r = &m->file->ops[i];
        OpWay way = op_way(r->collective);
        bool of_channel = (int)way == m->channel->way && strcmp(r->communicator, m->channel->communicator) == 0
                       && (way == WAY_COLLECTIVE || r->peer == m->channel->peer);
        if (of_channel && r->number == k) return r;
    }
    return NULL;
}

// Returns true if two records describe the same operation. A send and its receive differ in name and peer.
static inline bool same_op(const OpRecord* a, const OpRecord* b) {
    bool pair = op_way(a->collective) != WAY_COLLECTIVE;
    return a->elements == b->elements && a->step == b->step && strcmp(a->type, b->type) == 0
        && (pair || (a->peer == b->peer && strcmp(a->collective, b->collective) == 0));
}

// Returns true if both files hold operation k and it is the same.
static inline bool same_at(const Member* a, const Member* b, long long k) {
    const OpRecord *of_a = member_op(a, k), *of_b = member_op(b, k);
    return of_a && of_b && same_op(of_a, of_b);
}

// Writes the ranks of the members whose in[] is set into out, in words.
static inline void members_text(const Member* members, int n, const bool* in, char* out, size_t size) {
    bool* ranks = (bool*)xcalloc((size_t)members[0].file->size, sizeof(bool));
    for (int i = 0; i < n; i++) if (in[i]) ranks[members[i].file->rank] = true;
    ranks_text(ranks, members[0].file->size, out, size);
    free(ranks);
}

PRINTF_LIKE(2, 3)
static inline void parting_say(Parting* p, const char* format, ...) {
    size_t n = strlen(p->text);
    va_list args;
    va_start(args, format);
    vsnprintf(p->text + n, sizeof p->text - n, format, args);
    va_end(args);
}

// Returns true if from k on operation j of b is operation j + 1 of a: b has left one out.
static inline bool left_out(const Member* a, const Member* b, long long k) {
    int compared = 0;
    for (long long j = k; j < member_issued(b); j++) {
        const OpRecord *later = member_op(a, j + 1), *r = member_op(b, j);
        if (later == NULL || r == NULL) continue;
        if (!same_op(later, r)) return false;
        compared++;
    }
    return compared > 0;
}

// Operation k differs between members: says which ranks issued what, the largest party first, and whether a shift explains it.
static inline void parting_of_different(Parting* p, const Member* members, int n, long long k, bool* in, bool is_oldest) {
    char who[256], what[OP_TEXT];
    bool* told = (bool*)xcalloc((size_t)n, sizeof(bool));
    int largest = -1, most = 0;
    for (int i = 0; i < n; i++) {
        int alike = 0;
        for (int j = 0; j < n; j++) alike += same_at(&members[i], &members[j], k);
        if (alike > most) { most = alike; largest = i; }
    }
    for (int pass = 0; pass <= n; pass++) {
        int i = pass == 0 ? largest : pass - 1;
        const OpRecord* r = member_op(&members[i], k);
        if (r == NULL || told[i]) continue;
        for (int j = 0; j < n; j++) in[j] = same_at(&members[i], &members[j], k);
        for (int j = 0; j < n; j++) told[j] = told[j] || in[j];
        members_text(members, n, in, who, sizeof who);
        op_text(r, what, sizeof what);
        parting_say(p, "%s%s issued %s", pass == 0 ? "" : ", ", who, what);
    }
    for (int i = 0; i < n; i++) {
        const Member *odd = &members[i], *others = &members[largest];
        if (member_op(odd, k) == NULL || same_at(odd, others, k)) continue;
        const char* how = left_out(others, odd, k) ? "left one out" : left_out(odd, others, k) ? "issued one too many" : NULL;
        if (how) parting_say(p, "; from there on it looks as if rank %d had %s,", odd->file->rank, how);
        if (how) parting_say(p, " this or an equal one before it");
    }
    if (is_oldest && k > 0) parting_say(p, "; older operations are not in the files, so the ranks may have parted earlier");
    free(told);
}

// Says which members did not issue operation k, and what each of them issued last.
static inline void parting_of_missing(Parting* p, const Member* members, int n, long long k, bool* in) {
    char who[256], what[OP_TEXT] = "";
    long long furthest = 0;
    const OpRecord* r = NULL;
    for (int i = 0; i < n; i++) {
        in[i] = member_issued(&members[i]) <= k;
        furthest = member_issued(&members[i]) > furthest ? member_issued(&members[i]) : furthest;
        if (!r) r = member_op(&members[i], k);
    }
    members_text(members, n, in, who, sizeof who);
    if (r) op_text(r, what, sizeof what);
    else snprintf(what, sizeof what, "operation #%lld (no file says any more what it was)", k);
    parting_say(p, "%s never issued %s", who, what);
    for (int i = 0; i < n; i++) in[i] = member_issued(&members[i]) > k;
    members_text(members, n, in, who, sizeof who);
    parting_say(p, "; %s did, and came as far as #%lld", who, furthest - 1);
    for (int i = 0; i < n; i++) {
        if (member_issued(&members[i]) > k) continue;
        const OpRecord* last = member_op(&members[i], k - 1);
        if (last) op_text(last, what, sizeof what);
        else snprintf(what, sizeof what, "%s", k == 0 ? "none" : "no longer in its file");
        parting_say(p, "; rank %d's last: %s", members[i].file->rank, what);
        if (last) parting_say(p, ", %s", op_state_names[last->state]);
    }
}

// All members issued operation k. Returns true, and says where, if it did not finish on some.
static inline bool parting_of_unfinished(Parting* p, const Member* members, int n, long long k, bool* in) {
    char who[256], what[OP_TEXT];
    const OpRecord *any = NULL;
    int unfinished = 0, known = 0;
    for (int i = 0; i < n; i++) {
        const OpRecord* r = member_op(&members[i], k);
        in[i] = r && r->state != OP_FINISHED;
        unfinished += in[i];
        known += r != NULL;
        if (in[i]) any = r;
    }
    if (unfinished == 0) return false;
    p->by = PARTED_UNFINISHED;
    p->number = k;
    members_text(members, n, in, who, sizeof who);
    op_text(any, what, sizeof what);
    parting_say(p, "everyone issued %s, but on %s it did not finish", what, who);
    if (unfinished == known) parting_say(p, ", that is, nowhere");
    return true;
}

// Returns where the members of a sequence parted.
static inline Parting members_compare(const Member* members, int n) {
    Parting p;
    memset(&p, 0, sizeof p);
    bool* in = (bool*)xcalloc((size_t)n, sizeof(bool));
    long long oldest = -1, least = -1, most = 0, compared = -1; // compared: the first number that is in two files
    for (int i = 0; i < n; i++) {
        long long issued = member_issued(&members[i]), first = issued;
        while (first > 0 && member_op(&members[i], first - 1)) first--;
        if (first < issued && (oldest < 0 || first < oldest)) oldest = first;
        if (least < 0 || issued < least) least = issued;
        if (issued > most) most = issued;
    }
    long long begin = oldest < 0 || least < oldest ? least : oldest;
    for (long long k = begin; k < most && p.by == PARTED_NOWHERE; k++) {
        const OpRecord* first = NULL;
        bool differ = false, missing = false;
        for (int i = 0; i < n; i++) {
            const OpRecord* r = member_op(&members[i], k);
            missing = missing || member_issued(&members[i]) <= k;
            if (first && r && compared < 0) compared = k;
            differ = differ || (first && r && !same_op(first, r));
            if (!first) first = r;
        }
        if (!differ && !missing) continue;
        p.by = differ ? PARTED_DIFFERENT : PARTED_MISSING;
        p.number = k;
        if (differ) parting_of_different(&p, members, n, k, in, k == compared);
        else parting_of_missing(&p, members, n, k, in);
    }
    for (long long k = begin; k < most && p.by == PARTED_NOWHERE; k++) if (parting_of_unfinished(&p, members, n, k, in)) break;
    if (p.by == PARTED_NOWHERE && most > 0 && compared < 0) {
        p.by = PARTED_UNKNOWN;
        parting_say(&p, "all issued %lld operations, but no two files hold the same one any more: they cannot be compared", most);
    } else if (p.by == PARTED_NOWHERE) {
        parting_say(&p, "the same on all: %lld operations", most);
        if (most > 0) parting_say(&p, ", of which #%lld to #%lld could be compared", compared, most - 1);
    }
    free(in);
    return p;
}

// Writes the ranks that take part in a sequence and have a file into members (n).
static inline int sequence_members(const Sequence* s, RankFile* const* files, int n, Member* members) {
    int found = 0;
    for (int i = 0; i < n; i++) {
        bool sends = files[i]->rank == s->from, receives = files[i]->rank == s->to;
        Member m = { files[i], NULL };
        if (s->from < 0) m.channel = rank_file_channel(files[i], s->communicator, WAY_COLLECTIVE, -1);
        else if (sends) m.channel = rank_file_channel(files[i], s->communicator, WAY_SEND, s->to);
        else if (receives) m.channel = rank_file_channel(files[i], s->communicator, WAY_RECEIVE, s->from);
        if (m.channel || (s->from >= 0 && (sends || receives))) members[found++] = m;
    }
    return found;
}

// Returns the sequences that occur in the files, each once. The caller frees them.
static inline Sequence* sequences_find(RankFile* const* files, int n, int* count) {
    Sequence* all = NULL;
    *count = 0;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < files[i]->num_channels; j++) {
            const OpChannel* c = &files[i]->channels[j];
            Sequence s = { "", -1, -1 }; // zeros to the end of the name, so that memcmp can compare
            snprintf(s.communicator, sizeof s.communicator, "%s", c->communicator);
            if (c->way == WAY_SEND) { s.from = files[i]->rank; s.to = c->peer; }
            if (c->way == WAY_RECEIVE) { s.from = c->peer; s.to = files[i]->rank; }
            int k = 0;
            while (k < *count && memcmp(&all[k], &s, sizeof s) != 0) k++;
            if (k < *count) continue; // known
            all = (Sequence*)xrealloc(all, (size_t)(*count + 1) * sizeof(Sequence));
            all[(*count)++] = s;
        }
    }
    return all;
}

// Dies unless the files are of one run and each of another rank; prints which ranks have none.
static inline void rank_files_check(RankFile* const* files, int n, FILE* out) {
    bool* absent = (bool*)xcalloc((size_t)files[0]->size, sizeof(bool));
    for (int r = 0; r < files[0]->size; r++) absent[r] = true;
    for (int i = 0; i < n; i++) {
        const RankFile *f = files[i], *first = files[0];
        bool one_run = f->size == first->size && strcmp(f->run, first->run) == 0;
        require(one_run, "%s and %s are of different runs; give the files of one", first->path, f->path);
        require(absent[f->rank], "%s is of rank %d, of which there is another file already", f->path, f->rank);
        absent[f->rank] = false;
    }
    char who[256];
    ranks_text(absent, files[0]->size, who, sizeof who);
    free(absent);
    if (n == files[0]->size) return;
    fprintf(out, "no file of %s of %d: killed before it could be written, or not given\n", who, files[0]->size);
}

// Compares the files and prints where the ranks parted. Returns true if they did not.
static inline bool rank_files_compare(RankFile* const* files, int n, FILE* out) {
    int count;
    bool together = true;
    rank_files_check(files, n, out);
    Sequence* all = sequences_find(files, n, &count);
    Member* members = (Member*)xcalloc((size_t)n, sizeof(Member));
    for (int i = 0; i < count; i++) {
        int m = sequence_members(&all[i], files, n, members);
        if (m < 2) continue; // nothing to compare
        Parting p = members_compare(members, m);
        if (all[i].from >= 0) fprintf(out, "%s, rank %d to rank %d: ", all[i].communicator, all[i].from, all[i].to);
        else fprintf(out, "%s: ", all[i].communicator);
        fprintf(out, "%s\n", p.text);
        together = together && p.by == PARTED_NOWHERE;
    }
    free(members);
    free(all);
    return together;
}
#endif
