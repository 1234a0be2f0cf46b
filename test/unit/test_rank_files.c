// test_rank_files.c - the log of operations and its file. (test/tools/test_ranks_tool.py reads such files.)
#include "../../llmc/watch/flight_recorder.h"
#include "expect_death.h"

// A new log, which is freed at the end of its block.
#define RECORDER(l) FREED_BY(flight_recorder_free) FlightRecorder l; flight_recorder_init(&l)

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
    RECORDER(l);
    char text[OP_TEXT];
    flight_recorder_step(&l, 7);
    for (int i = 0; i < (int)(COUNT(operations)); i++) {
        OpRecord r = flight_recorder_issue(&l, operations[i].communicator, operations[i].collective, operations[i].elements,
                                           operations[i].type, operations[i].peer);
        assert_int_equal(r.place, i);
        op_text(&r, text, sizeof text);
        assert_string_equal(text, operations[i].words);
    }
}

TEST(an_operation_that_has_left_the_ring_can_still_finish) {
    RECORDER(l);
    OpRecord old = flight_recorder_issue(&l, "world", "all-reduce", 1, "fp32", -1);
    for (int i = 0; i < FLIGHT_RECORDER_LENGTH; i++) flight_recorder_issue(&l, "world", "all-reduce", 2, "fp32", -1);
    flight_recorder_start(&l, &old);
    flight_recorder_finish(&l, &old);
    assert_int_equal(old.state, OP_FINISHED);
    assert_int_equal(l.channels[0].finished, 1);
    for (int i = 0; i < FLIGHT_RECORDER_LENGTH; i++) assert_int_equal(l.ring[i].state, OP_ISSUED);
}

TEST(names_that_a_file_could_not_hold_are_refused) {
    RECORDER(l);
    expect_error(flight_recorder_join(&l, "my group"), "'my group' cannot be a name");
    expect_error(flight_recorder_join(&l, "a-group-of-ranks-with-a-long-name"), "'a-group-of-ranks-with-a-long-name'", "1 to 23 characters");
}

TEST(a_file_has_the_last_operations_of_the_log) {
    static const char head[] = FLIGHT_RECORDER_MAGIC "\nrun run-5 rank 0 of 3 step 8 operations 66\n"
                               "channel world collective - 65 64\nchannel pair.3 send 2 1 0\nop 2 world all-reduce 100 fp32 - 1 finished ";
    static const char sent[] = "\nop 0 pair.3 send 12345678901 fp32 2 8 started ", last[] = "\nop 64 world broadcast 7 fp32 1 8 issued ";
    RECORDER(l);
    FREED char* text;
    size_t size;
    for (int i = 0; i < 64; i++) {
        flight_recorder_step(&l, 1 + i / 9);
        OpRecord op = flight_recorder_issue(&l, "world", "all-reduce", 100, "fp32", -1);
        flight_recorder_start(&l, &op);
        flight_recorder_finish(&l, &op);
    }
    OpRecord op = flight_recorder_issue(&l, "pair.3", "send", 12345678901ull, "fp32", 2);
    flight_recorder_start(&l, &op);
    flight_recorder_issue(&l, "world", "broadcast", 7, "fp32", 1);
    FILE* f = open_memstream(&text, &size);
    assert_non_null(f);
    flight_recorder_write(&l, f, "run-5", 0, 3);
    fclose(f);
    assert_memory_equal(text, head, sizeof head - 1);
    assert_non_null(strstr(text, sent));
    assert_non_null(strstr(text, last));
    assert_string_equal(text + strlen(text) - 5, "\nend\n");
    double issued = -1, started = -1, finished = -1;
    assert_int_equal(sscanf(text + sizeof head - 1, "%lf %lf %lf\n", &issued, &started, &finished), 3);
    assert_true(0 <= issued && issued <= started && started <= finished);
    assert_true(fabs(finished - l.ring[2].finished) < 1e-6);
}
