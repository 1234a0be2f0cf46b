// test_rank_files.c - the log of operations and its file; and where ranks parted, from made-up logs.
#include "../../dev/tools/ranks.h"
#include "test_folder.h"

#define MOST 4
static FlightRecorder logs[MOST];
static char paths[MOST][64];

static void begin(int ranks) {
    for (int r = 0; r < ranks; r++) {
        flight_recorder_init(&logs[r]);
        flight_recorder_join(&logs[r], "world");
        snprintf(paths[r], sizeof paths[r], "%s/ops_rank_%04d.txt", folder, r);
    }
}

static void issue(int rank, const char* communicator, const char* collective, size_t elements, int peer, OpState state) {
    OpRecord op = flight_recorder_issue(&logs[rank], communicator, collective, elements, "fp32", peer);
    if (state >= OP_STARTED) flight_recorder_start(&logs[rank], &op);
    if (state >= OP_FINISHED) flight_recorder_finish(&logs[rank], &op);
}

// Issues four buckets a step, of 100, 200, 300 and 400 elements, on ranks first..last: operations `from` to `to` - 1.
static void train(int first, int last, int from, int to) {
    for (int r = first; r <= last; r++) {
        for (int i = from; i < to; i++) {
            flight_recorder_step(&logs[r], 1 + i / 4);
            issue(r, "world", "all-reduce", 100 * (size_t)(1 + i % 4), -1, OP_FINISHED);
        }
    }
}

static void write_log(int rank, const char* run, int ranks) {
    FILE* f = fopen(paths[rank], "w");
    assert_non_null(f);
    flight_recorder_write(&logs[rank], f, run, rank, ranks);
    assert_int_equal(fclose(f), 0);
}

// Writes the logs, reads the files and compares one sequence. Frees the logs.
static Parting compare(int ranks, Sequence s) {
    RankFile* files[MOST] = { NULL };
    Member members[MOST];
    for (int r = 0; r < ranks; r++) {
        write_log(r, "a", ranks);
        flight_recorder_free(&logs[r]);
        files[r] = rank_file_read(paths[r]);
        unlink(paths[r]);
    }
    int n = sequence_members(&s, files, ranks, members);
    assert_true(n >= 2);
    Parting p = members_compare(members, n);
    for (int r = 0; r < ranks; r++) free(files[r]);
    return p;
}
static const Sequence world = { "world", -1, -1 };

// How ranks must have parted: of the world's operations on so many ranks, or of another sequence.
static void expect_parting(Parting p, PartedBy by, long long number, const char* const* phrases) {
    bool good = p.by == by && p.number == number;
    while (good && *phrases && strstr(p.text, *phrases)) phrases++;
    if (!good || *phrases) fail_msg("parted by %d at %lld: %s; expected in it: %s", p.by, p.number, p.text, *phrases);
}
#define expect_of(parting, by, number, ...) expect_parting(parting, by, number, (const char* const[]){ __VA_ARGS__, NULL })
#define expect(ranks, ...) expect_of(compare(ranks, world), __VA_ARGS__)

// ---- the log ----

TEST(operations_are_numbered_on_their_channel_and_have_words) {
    static const struct { const char *communicator, *collective, *type; size_t elements; int peer; const char* words; } operations[] = {
        { "world", "all-reduce", "bf16", 1048576, -1, "all-reduce #0 of world (1048576 bf16, step 7)" },
        { "world", "send", "fp32", 5, 1, "send #0 to rank 1 of world (5 fp32, step 7)" },
        { "world", "send", "fp32", 5, 1, "send #1 to rank 1 of world (5 fp32, step 7)" },
        { "world", "send", "fp32", 5, 2, "send #0 to rank 2 of world (5 fp32, step 7)" },
        { "world", "receive", "fp32", 5, 1, "receive #0 from rank 1 of world (5 fp32, step 7)" },
        { "world", "broadcast", "fp32", 5, 3, "broadcast #1 of world (5 fp32, root 3, step 7)" }, // whatever was sent in between
        // The names of llmc/comm/comm_api.h, which the log does not know: what is not a send or a receive is of all ranks.
        { "world", "reduce-scatter", "fp32", 4, -1, "reduce-scatter #2 of world (4 fp32, step 7)" },
        { "world", "all-gather", "fp32", 4, -1, "all-gather #3 of world (4 fp32, step 7)" },
        { "world", "all-to-all", "fp32", 4, -1, "all-to-all #4 of world (4 fp32, step 7)" },
        { "world", "barrier", "byte", 0, -1, "barrier #5 of world (step 7)" },
        { "world", "split", "byte", 4, -1, "split #6 of world (4 byte, step 7)" },
        { "world", "gather", "fp32", 4, -1, "gather #7 of world (4 fp32, step 7)" },
        { "shard.1", "all-reduce", "fp32", 1, -1, "all-reduce #0 of shard.1 (1 fp32, step 7)" }
    };
    FlightRecorder l;
    char text[OP_TEXT];
    flight_recorder_init(&l);
    flight_recorder_step(&l, 7);
    for (int i = 0; i < (int)(sizeof operations / sizeof *operations); i++) {
        OpRecord r = flight_recorder_issue(&l, operations[i].communicator, operations[i].collective, operations[i].elements, operations[i].type,
                                 operations[i].peer);
        assert_int_equal(r.place, i);
        op_text(&r, text, sizeof text);
        assert_string_equal(text, operations[i].words);
    }
    flight_recorder_free(&l);
}

TEST(an_operation_that_has_left_the_ring_can_still_finish) {
    FlightRecorder l;
    flight_recorder_init(&l);
    OpRecord old = flight_recorder_issue(&l, "world", "all-reduce", 1, "fp32", -1);
    for (int i = 0; i < FLIGHT_RECORDER_LENGTH; i++) flight_recorder_issue(&l, "world", "all-reduce", 2, "fp32", -1);
    flight_recorder_start(&l, &old);
    flight_recorder_finish(&l, &old);
    assert_int_equal(old.state, OP_FINISHED);
    assert_int_equal(l.channels[0].finished, 1);
    for (int i = 0; i < FLIGHT_RECORDER_LENGTH; i++) assert_int_equal(l.ring[i].state, OP_ISSUED);
    flight_recorder_free(&l);
}

TEST(names_that_a_file_could_not_hold_are_refused) {
    FlightRecorder l;
    flight_recorder_init(&l);
    expect_error(flight_recorder_join(&l, "my group"), "'my group' cannot be a name");
    expect_error(flight_recorder_join(&l, "a-group-of-ranks-with-a-long-name"), "'a-group-of-ranks-with-a-long-name'", "1 to 23 characters");
    flight_recorder_free(&l);
}

TEST(a_file_reads_back_as_the_log_was) {
    begin(1);
    train(0, 0, 0, 30);
    issue(0, "pair.3", "send", 12345678901ull, 2, OP_STARTED);
    issue(0, "world", "broadcast", 7, 1, OP_ISSUED);
    write_log(0, "run-5", 3);
    RankFile* f = rank_file_read(paths[0]);
    assert_string_equal(f->run, "run-5");
    assert_true(f->rank == 0 && f->size == 3 && f->step == 8 && f->operations == 32 && f->num_channels == 2 && f->num_ops == 32);
    for (int i = 0; i < 32; i++) {
        OpRecord a = f->ops[i], b = logs[0].ring[i];
        assert_true(a.number == b.number && a.step == b.step && a.elements == b.elements && a.peer == b.peer && a.state == b.state);
        assert_string_equal(a.communicator, b.communicator);
        assert_string_equal(a.collective, b.collective);
        assert_string_equal(a.type, b.type);
        assert_true(fabs(a.issued - b.issued) < 1e-6 && fabs(a.finished - b.finished) < 1e-6);
    }
    flight_recorder_free(&logs[0]); free(f);
}

// ---- where ranks parted ----

// Ranks first..last issue operations from..to-1 of the world; to 0: no more.
typedef struct { int first, last, from, to; } Trained;

TEST(where_ranks_parted_is_found_and_what_each_did_there) {
    static const struct { int ranks; Trained trained[6]; int others; PartedBy by; long long number; const char* says[4]; } cases[] = {
        { 4, { { 0, 3, 0, 100 } }, 0, PARTED_NOWHERE, 0, { "the same on all: 100 operations, of which #36 to #99 could be compared" } },
        { 2, { { 0 } }, 0, PARTED_NOWHERE, 0, { "the same on all: 0 operations" } },
        // One that stopped never issued the next.
        { 4, { { 0, 3, 0, 41 }, { 0, 1, 41, 43 }, { 3, 3, 41, 42 } }, 0, PARTED_MISSING, 41,
          { "rank 2 never issued all-reduce #41 of world (200 fp32, step 11)", "ranks 0-1 and 3 did, and came as far as #42",
            "rank 2's last: all-reduce #40 of world (100 fp32, step 11), finished" } },
        { 2, { { 0, 0, 0, 2 } }, 0, PARTED_MISSING, 0, { "rank 1 never issued all-reduce #0 of world", "rank 1's last: none" } },
        // The others have forgotten what one that is far behind should do next, and it may have forgotten what it did last.
        { 3, { { 0, 2, 0, 20 }, { 0, 1, 20, 200 } }, 0, PARTED_MISSING, 20,
          { "rank 2 never issued operation #20 (no file says any more what it was)", "ranks 0-1 did, and came as far as #199",
            "rank 2's last: all-reduce #19 of world (400 fp32, step 5), finished" } },
        { 2, { { 0, 1, 0, 20 }, { 0, 0, 20, 200 } }, 70, PARTED_MISSING, 20,
          { "rank 1 never issued operation #20 (no file says any more what it was)", "rank 0 did, and came as far as #199",
            "rank 1's last: no longer in its file" } },
        { 2, { { 0, 1, 0, 10 } }, 70, PARTED_UNKNOWN, 0, { "all issued 10 operations, but no two files hold the same one any more" } },
        // One that is left out is seen where the others differ.
        { 4, { { 0, 3, 0, 41 }, { 0, 1, 41, 60 }, { 3, 3, 41, 60 }, { 2, 2, 42, 59 } }, 0, PARTED_DIFFERENT, 41,
          { "ranks 0-1 and 3 issued all-reduce #41 of world (200 fp32, step 11), "
            "rank 2 issued all-reduce #41 of world (300 fp32, step 11)", "it looks as if rank 2 had left one out" } },
        { 2, { { 0, 1, 0, 5 }, { 0, 0, 5, 200 }, { 1, 1, 6, 201 } }, 0, PARTED_DIFFERENT, 136,
          { "left one out", "older operations are not in the files, so the ranks may have parted earlier" } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin(cases[i].ranks);
        for (const Trained* t = cases[i].trained; t->to > 0; t++) train(t->first, t->last, t->from, t->to);
        // Operations of another communicator push the world's out of rank 1's ring.
        for (int k = 0; k < cases[i].others; k++) issue(1, "pair", "all-reduce", 1, -1, OP_FINISHED);
        expect_parting(compare(cases[i].ranks, world), cases[i].by, cases[i].number, cases[i].says);
    }
}

TEST(one_left_out_among_equals_shows_in_the_step) {
    begin(3);
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < 24; i++) {
            flight_recorder_step(&logs[r], 1 + i / 8);
            if (r != 1 || i != 10) issue(r, "world", "all-reduce", 100, -1, OP_FINISHED);
        }
    }
    expect(3, PARTED_DIFFERENT, 15, "ranks 0 and 2 issued all-reduce #15 of world (100 fp32, step 2)",
           "rank 1 issued all-reduce #15 of world (100 fp32, step 3)",
           "it looks as if rank 1 had left one out, this or an equal one before it");
}

TEST(one_too_many_is_seen_as_well) {
    begin(2);
    train(0, 1, 0, 10);
    issue(1, "world", "all-reduce", 5, -1, OP_FINISHED);
    train(0, 1, 10, 20);
    Parting p = compare(2, world);
    expect_of(p, PARTED_DIFFERENT, 10, "rank 1 issued all-reduce #10 of world (5 fp32, step 3)");
    // which, two cannot tell
    assert_true(strstr(p.text, "as if rank 1 had issued one too many") || strstr(p.text, "as if rank 0 had left one out"));
}

TEST(every_property_of_an_operation_is_compared_and_that_it_finished) {
    static const struct { const char *collective, *type; size_t elements; int peer; long long step; } changed[] = {
        { "all-gather", "fp32", 100, 1, 5 }, { "broadcast", "bf16", 100, 1, 5 }, { "broadcast", "fp32", 101, 1, 5 },
        { "broadcast", "fp32", 100, 0, 5 }, { "broadcast", "fp32", 100, 1, 6 }, { "broadcast", "fp32", 100, 1, 5 }
    };
    const int kinds = sizeof changed / sizeof changed[0];
    for (int i = 0; i < kinds; i++) {
        begin(3);
        for (int r = 0; r < 3; r++) {
            int which = r == 0 ? i : kinds - 1;
            train(r, r, 0, 5);
            flight_recorder_step(&logs[r], changed[which].step);
            OpRecord op = flight_recorder_issue(&logs[r], "world", changed[which].collective, changed[which].elements, changed[which].type,
                                      changed[which].peer);
            flight_recorder_start(&logs[r], &op);
            if (r == 1) flight_recorder_finish(&logs[r], &op);
        }
        Parting p = compare(3, world);
        if (i == kinds - 1) expect_of(p, PARTED_UNFINISHED, 5, "everyone issued broadcast #5", "on ranks 0 and 2 it did not finish");
        else expect_of(p, PARTED_DIFFERENT, 5, "ranks 1-2 issued broadcast #5 of world (100 fp32, root 1, step 5), rank 0 issued");
        assert_null(strstr(p.text, "looks as if")); // nothing after it tells
    }
}

TEST(sends_are_held_against_receives) {
    const Sequence pair = { "world", 0, 2 };
    begin(3);
    for (int i = 0; i < 5; i++) {
        issue(0, "world", "send", 7, 1, OP_FINISHED);
        issue(0, "world", "send", 10 * (size_t)(i + 1), 2, OP_FINISHED);
        issue(2, "world", "receive", 10 * (size_t)(i + 1), 0, OP_FINISHED);
    }
    expect_of(compare(3, pair), PARTED_NOWHERE, 0, "5 operations");
    begin(3);
    issue(0, "world", "send", 10, 2, OP_STARTED);
    expect_of(compare(3, pair), PARTED_MISSING, 0, "rank 2 never issued send #0 to rank 2 of world (10 fp32");
    begin(3);
    issue(0, "world", "send", 10, 2, OP_FINISHED);
    issue(2, "world", "receive", 11, 0, OP_FINISHED);
    expect_of(compare(3, pair), PARTED_DIFFERENT, 0, "rank 0 issued send #0 to rank 2 of world (10 fp32",
           "rank 2 issued receive #0 from rank 0 of world (11 fp32");
}

// ---- files ----

static void read_file(const char* path) {
    alarm(60); // nothing may wait for what nobody writes into a pipe
    free(rank_file_read(path));
    alarm(0);
}

#define HEAD FLIGHT_RECORDER_MAGIC "\nrun a rank 1 of 4 step 3 operations 2\n"
#define CHANNEL "channel world collective - 2 1\n"
#define OPS "op 0 world all-reduce 10 fp32 - 3 finished 1 2 3\nop 1 world all-reduce 10 fp32 - 3 started 1 2 0\n"

TEST(damaged_files_are_refused_with_the_line) {
    static const struct { const char *text, *says; } cases[] = {
        { "", ":0: this is not a file of last operations, or it is damaged: it is cut off" }, { "step,loss\n", ":1: this is not a file" },
        { FLIGHT_RECORDER_MAGIC "\nrun a rank 4 of 4 step 3 operations 2\nend\n", ":2: " },
        { FLIGHT_RECORDER_MAGIC "\nrun a rank 1 of 99999999 step 3 operations 2\nend\n", ":2: " }, { FLIGHT_RECORDER_MAGIC "\nrank 1\nend\n", ":2: " },
        { HEAD CHANNEL OPS, "it is cut off" },
        { HEAD CHANNEL "op 0 world all-reduce 10", ":4: this is not a file of last operations, or it is damaged: an operation was" },
        { HEAD CHANNEL OPS "end\nmore\n", "something follows the end" },
        { HEAD OPS "end\n", ":3: this is not a file of last operations, or it is damaged: its channel does not have operation 0" },
        { HEAD CHANNEL CHANNEL OPS "end\n", "twice" },
        { HEAD "channel world collective - 1 2\n" "end\n", "1 issued and 2 finished is impossible" },
        { HEAD "channel world collective - -1 -2\n" "end\n", "is impossible" },
        { HEAD "channel world gather - 2 1\n" OPS "end\n", "is not a channel" },
        { HEAD "channel world send - 2 1\n" "end\n", "is not a channel" },
        { HEAD "channel world send 4 2 1\n" "end\n", "a channel was expected" },
        { HEAD "channel world send x 2 1\n" "end\n", "a channel was expected" },
        { HEAD CHANNEL "end\n", NULL }, // its operations have left the ring
        { HEAD CHANNEL "op 0 world all-reduce 10 fp32 - 3 finished 1 2 3\n" "end\n", "the last operations of world are not there" },
        { HEAD "channel world collective - 3 1\n" "op 0 world all-reduce 10 fp32 - 3 finished 1 2 3\n"
          "op 2 world all-reduce 10 fp32 - 3 started 1 2 0\nend\n", "2 follows 0" },
        { HEAD CHANNEL "op 5 world all-reduce 10 fp32 - 3 finished 1 2 3\nend\n", "does not have operation 5" },
        { HEAD CHANNEL "op 1 world all-reduce 10 fp32 - 3 sleeping 1 2 3\nend\n", "'sleeping' is not a state" },
        { HEAD CHANNEL "op 1 world all-reduce 10 fp32 9 3 finished 1 2 3\nend\n", "an operation was expected" },
        { HEAD CHANNEL "op 1 world all-reduce 10 a-type-with-a-long-name - 3 finished 1 2 3\nend\n", "an operation was expected" },
        { HEAD CHANNEL OPS "end\n", NULL },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char* path = write_file("damaged", cases[i].text, strlen(cases[i].text));
        if (cases[i].says) expect_error(read_file(path), path, cases[i].says);
        else read_file(path);
    }
    const char* pipe = in_folder("pipe");
    expect_error(read_file(pipe), pipe, "cannot be opened: No such file");
    assert_int_equal(mkfifo(pipe, 0600), 0);
    expect_error(read_file(pipe), pipe, "is a pipe, not a file");
}

// A file that is cut or changed at any byte is either read or refused; nothing else may happen.
TEST(a_file_damaged_anywhere_is_read_or_refused) {
    const char* whole = HEAD CHANNEL "channel world send 2 1 1\n" OPS "op 0 world send 9 bf16 2 3 finished 1 2 3\nend\n";
    size_t n = strlen(whole);
    for (size_t at = 0; at < 2 * n; at++) {
        char text[1024];
        memcpy(text, whole, n);
        if (at >= n) text[at - n] = (char)(text[at - n] ^ (1 + (int)(at * 2654435761u >> 7) % 127));
        const char* path = write_file("damaged", text, at < n ? at : n);
        Child c = child_does(read_file(path));
        bool good = at >= n ? c.status == 0 || c.status == 1 : c.status == 1;
        good = good && !strstr(c.err, "Sanitizer") && !strstr(c.err, "runtime error");
        if (!good) fail_msg("byte %zu: status %d: %s", at, c.status, c.err);
        child_free(&c);
    }
}

static RankFile* made(int rank, const char* run, int ranks) {
    write_log(rank, run, ranks);
    return rank_file_read(paths[rank]);
}

TEST(files_of_different_runs_or_of_one_rank_are_not_mixed) {
    begin(2);
    RankFile *first = made(0, "a", 2), *runs[] = { first, made(1, "b", 2) }, *sizes[] = { first, made(1, "a", 3) };
    RankFile* twice[] = { first, made(0, "a", 2) };
    expect_error(rank_files_compare(runs, 2, stdout), "ops_rank_0000.txt and ", "ops_rank_0001.txt are of different runs");
    expect_error(rank_files_compare(sizes, 2, stdout), "are of different runs");
    expect_error(rank_files_compare(twice, 2, stdout), "is of rank 0, of which there is another file already");
    RankFile* all[] = { first, runs[1], sizes[1], twice[1] };
    for (int i = 0; i < 4; i++) free(all[i]);
    for (int i = 0; i < 2; i++) flight_recorder_free(&logs[i]);
}

TEST(communicators_and_pairs_are_compared_each_by_itself_and_a_rank_without_a_file_is_told) {
    begin(4);
    for (int r = 0; r < 4; r++) {
        char group[24];
        snprintf(group, sizeof group, "shard.%d", r % 2);
        for (int i = 0; i < 10; i++) {
            if (r >= 2) issue(r, "world", "all-reduce", 50, -1, OP_FINISHED); // in another order with the group's
            issue(r, group, "all-gather", 10 + 1000 * (size_t)(r % 2), -1, OP_FINISHED);
        }
        for (int i = 0; i < 10 && r < 2; i++) issue(r, "world", "all-reduce", 50, -1, OP_FINISHED);
    }
    issue(3, "shard.1", "all-gather", 77, -1, OP_FINISHED);
    for (int i = 0; i < 4; i++) issue(i % 2, "world", i < 2 ? "send" : "receive", 10, 1 - i % 2, OP_FINISHED);
    RankFile* files[] = { made(0, "a", 4), made(1, "a", 4), made(3, "a", 4) };
    Child c = child_does(rank_files_compare(files, 3, stdout));
    assert_int_equal(c.status, 0);
    assert_string_equal(c.out, "no file of rank 2 of 4: killed before it could be written, or not given\n"
                        "world: the same on all: 10 operations, of which #0 to #9 could be compared\n"
                        "world, rank 0 to rank 1: the same on all: 1 operations, of which #0 to #0 could be compared\n"
                        "world, rank 1 to rank 0: the same on all: 1 operations, of which #0 to #0 could be compared\n"
                        "shard.1: rank 1 never issued all-gather #10 of shard.1 (77 fp32, step 0); rank 3 did, and came as far as #10; "
                        "rank 1's last: all-gather #9 of shard.1 (1010 fp32, step 0), finished\n");
    child_free(&c);
    for (int i = 0; i < 3; i++) free(files[i]);
    for (int r = 0; r < 4; r++) flight_recorder_free(&logs[r]);
}
