// test_dataloader.c - which rank sees which tokens when, checked by the numbers in the batches themselves.
#include "../../llmc/data/dataloader.h"
#include "write_tokens.h"

#define VOCABULARY 65536
// A failed test leaves loaders' threads behind, on a stack that the next test would use.
void before_all(void) { setenv("CMOCKA_TEST_ABORT", "1", 1); }

static DataShape shape(int B, int T, long long global_batch, int rank, int ranks) {
    DataShape s = { B, T, VOCABULARY, global_batch, rank, ranks, 42, MASK_AUTO };
    return s;
}

// A loader, which is freed at the end of its block.
#define LOADER(d, option, path, tokenizer, shape, use) \
    FREED_BY(dataloader_free) DataLoader d; \
    dataloader_init(&d, option, path, tokenizer, shape, use)
#define TRAINING(d, path, shape) LOADER(d, "--data", path, NULL, shape, DATA_TRAIN)
#define EVALUATION(d, path, shape) LOADER(d, "--val-data", path, NULL, shape, DATA_EVAL)

// ---- training ----
static void nap(unsigned microseconds) { if (microseconds) usleep(microseconds); }
static bool naps; // now and then, so that now the loader's thread is ahead, now its reader

// One rank's part of the next step, which is at this place, and then at the one after it. A file's tokens are 0, 1, ..., random_permute
// orders its windows, and other targets than those that count (NULL: all) are masked. Returns how many count.
static long long expect_step(DataLoader* d, bool (*counts)(size_t), long long* epoch, long long* position) {
    DataShape s = d->shape;
    long long counted = 0;
    for (int m = 0; m < d->accumulation; m++) {
        int valid = 0;
        if (naps) nap(philox(s.seed, 1, (uint64_t)(*position * 100 + m)).x[0] % 4 * 50);
        dataloader_next(d);
        for (int i = 0; i < s.B * s.T; i++) {
            uint64_t place = (uint64_t)(*position + (m * s.ranks + s.rank) * s.B + i / s.T);
            int window = (int)random_permute(s.seed, STREAM_DATA + (uint64_t)*epoch, place, (uint64_t)d->num_sequences);
            int input = window * s.T + i % s.T, target = counts == NULL || counts((size_t)input + 1) ? input + 1 : -1;
            if (d->inputs[i] != input || d->targets[i] != target)
                fail_msg("place %d of epoch %d has %d and %d, not %d", (int)place, (int)*epoch, d->inputs[i], d->targets[i], input);
            valid += target != -1;
        }
        assert_int_equal(d->valid, valid);
        counted += valid;
    }
    bool ends = *position + 2 * s.global_batch > d->num_sequences; // what is left is less than a step
    *position = ends ? 0 : *position + s.global_batch;
    *epoch += ends;
    assert_true(d->next.epoch == *epoch && d->next.position == *position); // on every rank the same
    return counted;
}
static void expect_steps(DataLoader* d, long long epoch, long long position, int steps) {
    for (int step = 0; step < steps; step++) expect_step(d, NULL, &epoch, &position);
}
TEST(ranks_together_see_what_one_rank_sees_from_any_step_on) {
    enum { T = 5, G = 840 }; // a multiple of 1 to 8
    static const struct { int windows, more; long long epoch, step; } cases[] = {
        { 840, 0, 0, 0 }, { 841, 1, 0, 0 }, { 1679, 2, 0, 0 }, { 2003, 3, 0, 0 }, { 3 * 840 + 17, 0, 1, 2 } // the last step of an epoch
    };
    for (size_t k = 0; k < COUNT(cases); k++) {
        const char* path = write_tokens("ranks.bin", 0, (size_t)(cases[k].windows * T + 1 + cases[k].more));
        for (int ranks = 1; ranks <= 8; ranks++) for (int i = 0; i < 4; i++) for (int rank = 0; rank < ranks; rank++) {
            int B = (const int[]){ 1, 8, 15, G / ranks }[i];
            if (G % (ranks * B) != 0) continue;
            TRAINING(d, path, shape(B, T, G, rank, ranks));
            dataloader_seek(&d, cases[k].epoch, cases[k].step * G);
            expect_steps(&d, cases[k].epoch, cases[k].step * G, 5);
        }
    }
}
TEST(a_sought_position_continues_to_the_bit) {
    TRAINING(d, write_tokens("seek.bin", 0, 100 * 4 + 1), shape(3, 4, 12, 0, 1)); // 8 steps an epoch: into the fourth epoch
    expect_steps(&d, 0, 0, 33);
    for (int i = 0; i < 30; i++) {
        dataloader_seek(&d, i / 8, i % 8 * 12); // in a loader that has been elsewhere
        if (i % 2) dataloader_next(&d);         // and from the middle of a step
        if (i % 2) dataloader_seek(&d, i / 8, i % 8 * 12);
        expect_steps(&d, i / 8, i % 8 * 12, 3);
    }
}
TEST(another_batch_size_continues_where_the_first_stopped) {
    TRAINING(d, write_tokens("resize.bin", 0, 100 * 4 + 1), shape(1, 4, 12, 0, 1));
    dataloader_seek(&d, 1, 40); // after a step of 40
    expect_steps(&d, 1, 40, 6); // no repetition, no gap, and then the next epoch
}
TEST(reading_ahead_changes_nothing_whoever_is_faster) {
    const char* path = write_tokens("ahead.bin", 0, 50 * 4 + 1);
    naps = true;
    for (uint64_t seed = 0; seed < 60; seed++) {
        DataShape s = shape(2, 4, 6, 0, 1);
        s.seed = seed;
        TRAINING(d, path, s);
        expect_steps(&d, 0, 0, 16);
    }
    naps = false;
}

static int compare_ints(const void* a, const void* b) { return *(const int*)a - *(const int*)b; }
TEST(shards_are_read_in_the_order_of_their_names_and_windows_stay_inside) {
    const int T = 10;
    write_tokens("shard_b.bin", 1000, 35);  // 3 windows
    write_tokens("shard_a.bin", 2000, 41);  // 4
    write_tokens("shard_c.bin", 3000, 10);  // 0: one short of a target
    write_tokens("shard_d.bin", 4000, 11);  // 1
    const char* pattern = in_folder("shard_*.bin");
    const int expected[] = { 1000, 1010, 1020, 2000, 2010, 2020, 2030, 4000 };
    int windows[8];
    TRAINING(shuffled, pattern, shape(1, T, 8, 0, 1));
    for (int i = 0; i < 8; i++) {
        dataloader_next(&shuffled);
        windows[i] = shuffled.inputs[0];
        for (int k = 0; k < T; k++) assert_int_equal(shuffled.targets[k], windows[i] + k + 1);
    }
    qsort(windows, 8, sizeof(int), compare_ints);
    assert_memory_equal(windows, expected, sizeof expected);

    EVALUATION(d, pattern, shape(1, T, 1, 0, 1)); // whose order is that of the names
    assert_int_equal(d.num_tokens, 97);
    const int in_order[] = { 2000, 2010, 2020, 2030, 1000, 1010, 1020, 1030, 3000, 4000 };
    const int valid[] = { 10, 10, 10, 10, 10, 10, 10, 4, 9, 10 };
    assert_int_equal(d.num_batches, 10);
    for (int i = 0; i < 10; i++) {
        dataloader_next(&d);
        assert_int_equal(d.inputs[0], in_order[i]);
        assert_int_equal(d.valid, valid[i]);
    }
}

// ---- evaluation ----
// Every token except the first is a target once, in its place; padding has input 0 and target -1.
static void check_evaluation(const char* path, int n, int B, int T, int G, int ranks) {
    FREED char* counted = xcalloc((size_t)n, 1);
    int valid = 0;
    for (int rank = 0; rank < ranks; rank++) {
        EVALUATION(d, path, shape(B, T, G, rank, ranks));
        assert_int_equal(d.num_batches, (n - 1 + G * T - 1) / (G * T));
        for (int pass = 0; pass < 2; pass++) { // a second evaluation is the same as the first
            dataloader_seek(&d, 0, 0);
            for (long long i = 0; i < d.num_batches * d.accumulation; i++) {
                dataloader_next(&d);
                int here = 0;
                for (int k = 0; k < B * T; k++) {
                    if (d.targets[k] == -1) { assert_int_equal(d.inputs[k], 0); continue; }
                    assert_int_equal(d.targets[k], d.inputs[k] + 1);
                    assert_in_range(d.targets[k], 1, n - 1);
                    long long position = (i / d.accumulation) * G + ((i % d.accumulation) * ranks + rank) * B + k / T;
                    assert_int_equal(d.inputs[k], position * T + k % T);
                    counted[d.targets[k]]++;
                    here++;
                }
                assert_int_equal(d.valid, here);
                valid += here;
            }
        }
    }
    assert_int_equal(valid, 2 * (n - 1));
    for (int i = 1; i < n; i++) assert_int_equal(counted[i], 2);
}
TEST(evaluation_covers_every_token_once_however_few_there_are) {
    const int lengths[] = { 2, 3, 8, 9, 10, 17, 40, 65, 100 };
    for (size_t i = 0; i < COUNT(lengths); i++) {
        const char* path = write_tokens("val.bin", 0, (size_t)lengths[i]);
        for (int ranks = 1; ranks <= 8; ranks++) {
            check_evaluation(path, lengths[i], 1, 8, ranks, ranks);
            check_evaluation(path, lengths[i], 2, 4, 12 * ranks, ranks);
        }
    }
}

// ---- text ----
TEST(text_is_tokenised_after_an_end_of_text_token) {
    FREED_BY(tokenizer_free) Tokenizer tokenizer;
    tokenizer_open(&tokenizer, "bytes");
    DataShape s = shape(1, 5, 1, 0, 1);
    s.V = tokenizer.vocab_size;
    static const char* const texts[] = { "shard", "\xEF\xBB\xBFshard" }; // a byte order mark is no text
    for (size_t i = 0; i < COUNT(texts); i++) {
        LOADER(d, "--data", write_file("text.txt", texts[i], strlen(texts[i])), &tokenizer, s, DATA_TRAIN);
        dataloader_next(&d);
        const int inputs[] = { tokenizer.eot, 's', 'h', 'a', 'r' }, targets[] = { 's', 'h', 'a', 'r', 'd' };
        assert_memory_equal(d.inputs, inputs, sizeof inputs);
        assert_memory_equal(d.targets, targets, sizeof targets);
    }
}

TEST(data_have_one_checksum_as_text_and_as_tokens_and_another_if_a_token_differs) {
    FREED_BY(tokenizer_free) Tokenizer tokenizer;
    tokenizer_open(&tokenizer, "bytes");
    DataShape s = shape(1, 5, 1, 0, 1);
    s.V = tokenizer.vocab_size;
    const char text[] = "shard by shard";
    int tokens[sizeof text] = { tokenizer.eot };
    uint64_t sums[3];
    for (size_t i = 1; i < sizeof text; i++) tokens[i] = text[i - 1];
    for (int k = 0; k < 3; k++) {
        const char* path = k == 0 ? write_file("sum.txt", text, strlen(text)) : in_folder("sum.bin");
        tokens[sizeof text - 1] += k == 2;
        if (k > 0) {
            TokenWriter w = token_writer_open(path);
            token_writer_append(&w, tokens, sizeof text);
            token_writer_close(&w);
        }
        LOADER(d, "--data", path, &tokenizer, s, DATA_TRAIN);
        sums[k] = data_checksum(&d);
    }
    assert_true(sums[0] == sums[1] && sums[1] != sums[2]);
}

// ---- reading ahead ----
static void wait_until_all_is_read(DataLoader* d) {
    for (bool full = false; !full; nap(100)) {
        pthread_mutex_lock(&d->lock);
        full = d->produced == d->held + d->slots;
        pthread_mutex_unlock(&d->lock);
    }
}
TEST(what_has_been_read_is_not_waited_for_and_stays_until_the_next_step) {
    TRAINING(d, write_tokens("buffers.bin", 0, 1001), shape(2, 10, 8, 0, 1));
    for (int step = 0; step < 6; step++) {
        const int* views[4];
        int copies[4][2 * 10];
        for (int micro = 0; micro < 4; micro++) {
            wait_until_all_is_read(&d); // as the thread has done when a micro-batch takes longer to compute than to read
            dataloader_next(&d);
            views[micro] = d.inputs;
            memcpy(copies[micro], d.inputs, sizeof copies[micro]);
        }
        wait_until_all_is_read(&d); // nothing more will be written before the next step
        for (int micro = 0; micro < 4; micro++) assert_memory_equal(views[micro], copies[micro], sizeof copies[micro]);
    }
    assert_int_equal(d.waits, 0);
}

TEST(a_loader_can_be_closed_at_any_time) {
    const char* path = write_tokens("close.bin", 0, 5001);
    for (unsigned i = 0; i < 50; i++) {
        TRAINING(d, path, shape(4, 10, 16, 0, 1));
        for (unsigned k = 0; k < i % 7; k++) dataloader_next(&d);
        nap(i % 3 * 30);
        if (i % 2) dataloader_seek(&d, i, 0);
    }
}

// ---- masks ----
static bool every_third(size_t i) { return i % 3 == 0; }
static bool late_ones(size_t i) { return i >= 300 && i < 420; }
static bool none(size_t i) { return i > 1000000; }

// Each rank's targets are masked where they should be, and each rank knows how many targets count on all of them.
static void check_masked_ranks(const char* path, bool (*counts)(size_t), int B, int T, int G, int ranks, MaskUse use) {
    long long found[9] = { 0 }, said[9], epoch, position;
    for (int rank = 0; rank < ranks; rank++) {
        DataShape s = shape(B, T, G, rank, ranks);
        s.mask = use;
        TRAINING(d, path, s);
        assert_int_equal(d.masked, use == MASK_AUTO);
        assert_int_equal(d.masks_unused, use == MASK_NONE);
        epoch = position = 0;
        for (int step = 0; step < 9; step++) { // into the next epoch
            long long targets = dataloader_targets(&d);
            assert_true(rank == 0 || said[step] == targets);
            said[step] = targets;
            found[step] += expect_step(&d, use == MASK_NONE ? NULL : counts, &epoch, &position);
        }
    }
    assert_memory_equal(found, said, sizeof found);
}
TEST(all_ranks_know_how_many_targets_of_a_step_count) {
    bool (*const masks[])(size_t) = { every_third, late_ones };
    for (int k = 0; k < 2; k++) {
        const char* path = write_masked("masked.bin", 0, 1003, masks[k]);
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            check_masked_ranks(path, masks[k], 2, 7, 16, ranks, MASK_AUTO);
            check_masked_ranks(path, masks[k], 1, 8, 24, ranks, MASK_AUTO);
            check_masked_ranks(path, masks[k], 2, 16, 8, ranks, MASK_NONE);
        }
    }
}

TEST(masks_of_shards_count_from_each_shards_first_token) {
    write_masked("maskedshard_0.bin", 0, 100, every_third);
    write_masked("maskedshard_1.bin", 1000, 50, late_ones); // none of its tokens
    EVALUATION(d, in_folder("maskedshard_*.bin"), shape(3, 8, 3, 0, 1));
    assert_int_equal(d.num_counted, 33);
    assert_int_equal(dataloader_targets_of(&d, 0, 0, d.num_batches * 3), 33);
    int valid = 0;
    for (long long i = 0; i < d.num_batches; i++) {
        dataloader_next(&d);
        valid += d.valid;
        for (int k = 0; k < 3 * 8; k++) assert_true(d.targets[k] == -1 || (d.targets[k] < 100 && d.targets[k] % 3 == 0));
    }
    assert_int_equal(valid, 33);
}

// ---- errors ----
typedef struct { const char *option, *name; DataShape shape; DataUse use; int micro_batches; long long epoch, position; } Attempt;

static void attempt(const Attempt* a) {
    FREED_BY(tokenizer_free) Tokenizer bytes;
    tokenizer_open(&bytes, "bytes");
    LOADER(d, a->option, in_folder("%s", a->name), &bytes, a->shape, a->use);
    if (a->epoch || a->position) dataloader_seek(&d, a->epoch, a->position);
    for (int i = 0; i < a->micro_batches; i++) dataloader_next(&d);
}

#define TRAIN(file, ...) { .option = "--data", .name = file, .shape = __VA_ARGS__ }
#define EVALUATE(file, ...) { .option = "--val-data", .use = DATA_EVAL, .name = file, .shape = __VA_ARGS__ }
TEST(data_that_cannot_be_used_are_an_error_that_says_what_helps) {
    write_tokens("short.bin", 0, 32); // 3 windows of 8 and a target
    write_tokens("one.bin", 0, 1);
    write_tokens("zero.bin", 0, 0);
    write_tokens("some.bin", 0, 101);
    write_file("some.txt", "text that is long enough for a sequence or two of 8 tokens", 58);
    write_masked("nothing_counts.bin", 0, 100, none);
    write_masked("masked_0.bin", 0, 100, every_third);
    write_tokens("masked_1.bin", 0, 100);
    DataShape one = shape(1, 8, 1, 0, 1), required = one, V_48 = one, V_100 = one;
    required.mask = MASK_REQUIRED;
    V_48.V = 48; V_100.V = 100;
    const struct { Attempt a; const char* says[8]; } cases[] = {
        { TRAIN("short.bin", shape(2, 8, 4, 0, 1)),
          { "--data", "short.bin", "32 tokens (in 1 shard) make 3 sequences of --seq-len 8", "needs 4", "smaller" } },
        { TRAIN("short.bin", shape(2, 16, 2, 0, 1)), { "make 1 sequence of --seq-len 16" } },
        { TRAIN("short.bin", shape(2, 32, 2, 0, 1)), { "32 tokens", "0 sequences", "--seq-len 32" } },
        { TRAIN("short.bin", shape(1, 8, 4, 3, 4)), { "make 3 sequences", "on 4 ranks needs 4", "more data, fewer ranks" } },
        { EVALUATE("one.bin", one), { "--val-data", "one.bin", "1 token was found", "at least 2" } },
        { EVALUATE("zero.bin", one), { "zero.bin", "0 tokens were found", "at least 2" } },
        // masks that are missing or count nothing
        { TRAIN("nothing_counts.bin", one), { "--data", "nothing_counts.bin", "no token counts", "--mask none" } },
        { TRAIN("some.bin", required), { "--mask required", "some.bin", "some.mask", "--prompt-field" } },
        { TRAIN("some.txt", required), { "--mask required", "some.txt has no mask" } },
        { TRAIN("masked_*.bin", one), { "--data", "masked_1.bin has no mask", "other shards", "--mask none" } },
        { TRAIN("masked_0.mask", one), { "masked_0.mask", "is a mask", "token file beside it" } },
        // A token beyond the vocabulary is found when its step comes: in order, the sixth row of 8 has targets up to 48.
        { EVALUATE("some.bin", V_48, .micro_batches = 5), { NULL } },
        { EVALUATE("some.bin", V_48, .micro_batches = 6),
          { "--val-data", "some.bin", "token 48 is 48", "vocabulary of 48", "--tokenizer" } },
        { TRAIN("some.txt", V_100, .micro_batches = 1), { "--data", "some.txt", "vocabulary of 100" } },
        // positions beyond the data
        { TRAIN("some.bin", one, .position = 13), { "--data", "sequence 13 of epoch 0", "12 sequences", "same data" } },
        { TRAIN("some.bin", one, .position = -1), { "sequence -1" } },
        { TRAIN("some.bin", one, .epoch = -1), { "epoch -1" } },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Child c = child_does(attempt(&cases[i].a));
        if (cases[i].says[0] == NULL) child_has_lived(c);
        else child_has_died(c, cases[i].says);
    }
}

TEST(a_file_that_is_cut_while_in_use_is_an_error) {
    const char* path = write_tokens("shrinks.bin", 0, 8001);
    expect_error(TRAINING(d, path, shape(1, 8, 1, 0, 1)); if (truncate(path, 2000) == 0) for (int i = 0; i < 1000; i++) dataloader_next(&d),
                 "shrinks.bin", "cut after it was opened");
}
