// test_logger.c - what metrics.jsonl contains after a run and a resumed run; and the lines for people.
#include "../../llmc/run/logger.h"
#include "test_folder.h"

static Options options;
static OptionTable table;
void before_each(void) {
    options = options_defaults();
    table = options_table("train_gpt2_test", "a test");
    options_common(&table, &options);
    options.steps = 300;
}

static const char* metrics_of(const char* run) { return in_folder("%s/metrics.jsonl", run); }
// A run's log, which is closed at the end of its block.
#define LOG(g, run, resumed_step) \
    FREED_BY(logger_close) Logger g; \
    logger_open(&g, &table, &options, in_folder("%s", run), resumed_step, NULL)

static StepLog step_log(long long step) {
    return (StepLog){ .step = step, .loss = 4 + 1.0 / (double)step, .grad_norm = 0.1, .param_norm = 45.678, .lr = 1e-3, .loss_scale = 1,
                      .tokens = 2048 * step, .tokens_per_s = 12345.6, .step_ms = 165.9, .mem_bytes = 100000000,
                      .mem_peak_bytes = 123456789 };
}

// The lines of a metrics.jsonl, each of which must be one whole JSON object: LINES lines = read_metrics("run").
#define LINES FREED_BY(json_decrefp) json_t*
static json_t* read_metrics(const char* run) {
    FILE* f = fopen(metrics_of(run), "r");
    assert_non_null(f);
    json_t* lines = json_array();
    FREED char* line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, f) > 0) {
        assert_int_equal(line[strlen(line) - 1], '\n');
        json_t* object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        assert_true(json_is_object(object));
        json_array_append_new(lines, object);
    }
    fclose(f);
    return lines;
}

static json_t* line_value(json_t* lines, size_t i, const char* name) { return json_object_get(json_array_get(lines, i), name); }
// A line's numbers come back to the bit; NAN stands for null.
static void assert_numbers(json_t* lines, size_t i, const char* const* names, const double* values, int n) {
    for (int k = 0; k < n; k++) {
        json_t* found = line_value(lines, i, names[k]);
        bool same = isnan(values[k]) ? json_is_null(found) : json_is_number(found) && json_number_value(found) == values[k];
        if (!same) fail_msg("%s of line %zu is not %.17g", names[k], i, values[k]);
    }
}

// The first line is the run's record, and those after it are steps first, ... last.
static void assert_steps(const char* run, long long first, long long last) {
    LINES lines = read_metrics(run);
    assert_int_equal(json_array_size(lines), 2 + last - first);
    assert_non_null(line_value(lines, 0, "run"));
    for (long long step = first; step <= last; step++) {
        assert_int_equal(json_integer_value(line_value(lines, (size_t)(1 + step - first), "step")), step);
        assert_true(json_real_value(line_value(lines, (size_t)(1 + step - first), "loss")) == 4 + 1.0 / (double)step); // to the bit
    }
}

// ---- metrics.jsonl ----
// A run of this name writes steps first to last, from a checkpoint of the step before or, from 1, anew.
static void write_steps(const char* run, long long first, long long last) {
    LOG(g, run, first - 1);
    for (long long step = first; step <= last; step++) {
        StepLog s = step_log(step);
        logger_step(&g, &s);
    }
}
static void write_run(const char* run, long long first, long long last) { expect_success(write_steps(run, first, last)); }

TEST(a_step_has_every_field_and_numbers_come_back_to_the_bit) {
    static const char* const names[] = { "grad_norm", "param_norm", "lr", "loss_scale", "tokens_per_s", "step_ms", "tokens", "mem_bytes",
                                         "mem_peak_bytes", "comm_bytes", "comm_exposed_ms" };
    static const double values[] = { 0.1, 45.678, 1e-3, 1, 12345.6, 165.9, 2048 * 3, 100000000, 123456789, 0, 0 };
    write_run("fields", 1, 10);
    assert_steps("fields", 1, 10);
    LINES lines = read_metrics("fields");
    assert_numbers(lines, 3, names, values, 11);
    assert_true(json_is_real(line_value(lines, 3, "comm_exposed_ms")) && json_is_false(line_value(lines, 3, "skipped")));
}

TEST(the_first_line_has_the_options_and_what_the_program_adds) {
    options.prompt = "caf\xE9"; // Latin-1
    expect_success(Logger g; logger_open(&g, &table, &options, in_folder("facts/deep/down"), 0, json_pack("{s:i}", "world_size", 4));
                   logger_close(&g));
    LINES lines = read_metrics("facts/deep/down");
    json_t* run = line_value(lines, 0, "run");
    assert_int_equal(json_integer_value(json_object_get(run, "world_size")), 4);
    assert_string_equal(json_string_value(json_object_get(run, "program")), "train_gpt2_test");
    json_t* given = json_object_get(run, "options");
    assert_int_equal(json_object_size(given), table.count);
    assert_true(json_real_value(json_object_get(given, "lr")) == options.lr);
    assert_int_equal(json_integer_value(json_object_get(given, "seq-len")), options.seq_len);
    assert_string_equal(json_string_value(json_object_get(given, "lr-schedule")), "cosine");
    assert_string_equal(json_string_value(json_object_get(given, "data")), options.data);
    assert_true(json_is_false(json_object_get(given, "resume")));
    assert_string_equal(json_string_value(json_object_get(given, "prompt")), "caf?");
}

TEST(norms_have_32_bits) {
    assert_true(logged_norm(0) == 0 && logged_norm(-2.5) == 2.5 && logged_norm(1 + ldexp(1, -31)) == 1 + ldexp(1, -31));
    assert_true(logged_norm(1 + ldexp(1, -33)) == 1 && logged_norm(1 + 3 * ldexp(1, -33)) == 1 + ldexp(1, -31));
    assert_true(isinf(logged_norm(INFINITY)) && isnan(logged_norm(-NAN)) && !signbit(logged_norm(-NAN)));
    for (double norm = 1e-6; norm < 8192; norm *= 1.7) assert_true(fabs(logged_norm(norm) - norm) < 1e-6);
}

static void write_odd_numbers(const char* run) {
    LOG(g, run, 0);
    StepLog s = step_log(1);
    s.loss = NAN; s.grad_norm = INFINITY; s.skipped = true; s.lr = 0.1 + 0.2;
    logger_step(&g, &s);
    logger_eval(&g, 1, (EvalLoss){ 2.25, 0.75 });
    logger_eval(&g, 1, (EvalLoss){ -INFINITY, NAN });
}
TEST(nan_and_infinity_are_null) {
    static const char* const of_step[] = { "loss", "grad_norm", "lr" };
    static const char* const of_evaluation[] = { "step", "val_loss", "val_loss_per_byte" };
    expect_success(write_odd_numbers("odd"));
    LINES lines = read_metrics("odd");
    assert_numbers(lines, 1, of_step, (const double[]){ NAN, NAN, 0.1 + 0.2 }, 3);
    assert_numbers(lines, 2, of_evaluation, (const double[]){ 1, 2.25, 0.75 }, 3);
    assert_numbers(lines, 3, of_evaluation, (const double[]){ 1, NAN, NAN }, 3);
    assert_true(json_is_true(line_value(lines, 1, "skipped")));
}

// ---- resume ----
TEST(a_resumed_run_has_each_step_once_and_what_is_not_a_whole_line_is_cut_off) {
    const char* const torn[] = { "", "{", "{\"step\":11,\"lo", "{\"step\":11}", "{\"step\":10}" };
    for (size_t i = 0; i < COUNT(torn); i++) for (long long step = 6; step <= 10; step += 4) { // 10: where it was torn
        write_run("torn", 1, 10); // replaces an older run's
        assert_steps("torn", 1, 10);
        FILE* f = fopen(metrics_of("torn"), "a");
        assert_true(f && fputs(torn[i], f) >= 0 && fclose(f) == 0);
        write_run("torn", step + 1, 12);
        assert_steps("torn", 1, 12);
    }
}

// Returns the text of a run's metrics.jsonl; the caller frees it.
static char* metrics_text(const char* run) {
    size_t n;
    return file_read(file_source(metrics_of(run), ""), 1 << 20, &n);
}
static void put_metrics(const char* run, const char* text) {
    FILE* f = fopen(metrics_of(run), "w");
    assert_true(f && fputs(text, f) >= 0 && fclose(f) == 0);
}
TEST(whole_lines_stay_whatever_they_are_and_the_log_says_how_many_are_cut) {
    static const char* const odd[] = { "\n", " \n\n", "null\n", "[1]\n", "{\"note\":1}\n", "{\"step\":3,\"step\":4}\n", "{\"step\":1,\"lo\n" };
    for (size_t i = 0; i < COUNT(odd); i++) {
        write_run("odd", 1, 10);
        FREED char* text = metrics_text("odd");
        FREED char* step_4 = format_string("%s{\"step\":4,", odd[i]);
        FREED char* step_9 = format_string("%s{\"step\":9,", odd[i]);
        FREED char* more = replaced(text, "{\"step\":4,", step_4);
        size_t stays = (size_t)(strstr(more, "{\"step\":9,") - more);
        FREED char* most = replaced(more, "{\"step\":9,", step_9);
        FREED char* torn = format_string("%s%s{\"st", most, odd[i]);
        put_metrics("odd", torn);
        stays += strlen(odd[i]);
        FREED_BY(child_free) Child c = child_does(write_steps("odd", 9, 9));
        FREED char* after = metrics_text("odd");
        assert_int_equal(c.status, 0);
        assert_memory_equal(after, most, stays);
        assert_true(strncmp(after + stays, "{\"step\":9,", 10) == 0 && strchr(after + stays, '\n')[1] == '\0');
        FREED char* said = format_string("metrics    %d lines cut from the end of %s, the last one torn: steps after 8 are done again\n",
                                         i == 1 ? 5 : 4, metrics_of("odd"));
        if (strstr(c.out, said) != c.out) fail_msg("%s\ndoes not begin with %s", c.out, said);
    }
}

TEST(a_resumed_run_without_metrics_begins_them) {
    write_run("lost", 1, 10);
    for (int gone = 0; gone < 2; gone++) { // the first line itself is torn, or there is no file
        assert_int_equal(gone ? unlink(metrics_of("lost")) : truncate(metrics_of("lost"), 5), 0);
        write_run("lost", 7, 12);
        assert_steps("lost", 7, 12);
    }
}

// ---- errors ----
TEST(a_full_disk_is_an_error) {
    StepLog s = step_log(1);
    LOG(g, "full", 0);
    expect_error(g.file = fopen("/dev/full", "w"); logger_step(&g, &s), "metrics.jsonl", "No space left", "--resume");
}

// ---- the line for people ----
static void write_lines(void) {
    static const EvalLoss losses[] = { { 2.34567, 2.34567 }, { 4.5, 1.87654 }, { 4.5, NAN } };
    options.log_every = 10;
    LOG(g, "lines", 11);
    for (long long step = 12; step <= 300; step++) {
        StepLog s = step_log(step);
        s.skipped = step == 17;
        s.loss_scale = step == 17 ? 32768 : 1;
        if (step == 300) g.ranks = 4;
        s.comm_exposed_ms = 1.25;
        if (step < 30 || step == 300) logger_step(&g, &s);
    }
    for (int i = 0; i < 3; i++) logger_eval(&g, 50, losses[i]);
}
TEST(lines_say_what_matters_and_log_every_leaves_out_some_that_metrics_have) {
#define LINE(step, loss) "step " step "/300 | loss " loss " | grad norm 0.1000 | param norm 45.68 | lr 1.00e-03 | mem 123 MB | 12346 tok/s"
    expect_output(LINE(" 12", "4.0833") "\n" // the first of this run
                  LINE(" 17", "4.0588") " | loss scale 32768 | skipped: gradients not finite\n"
                  LINE(" 20", "4.0500") "\n"
                  LINE("300", "4.0033") " | comm exposed 1.2 ms\n"
                  "step  50/300 | val loss 2.3457\n"
                  "step  50/300 | val loss 4.5000 per token, 1.8765 per byte\n"
                  "step  50/300 | val loss 4.5000\n", write_lines()); // the tokenizer does not know all tokens
    LINES lines = read_metrics("lines");
    assert_int_equal(json_array_size(lines), 1 + 18 + 1 + 3);
}

static void show_live_lines(void) {
    FREED_BY(logger_close) Logger g;
    logger_open(&g, &table, &options, "", 0, NULL);
    g.terminal = true; g.every = 1000;
    for (long long step = 148; step <= 150; step++) {
        StepLog s = step_log(step);
        g.last_time = now_seconds() - 100; // as if every step took 100 s, so that 150 take 4h10m
        g.last_shown = step == 149 ? now_seconds() + 1000 : 0; // 149 comes too soon after 148
        logger_step(&g, &s);
    }
    logger_say("sample\n");
}
TEST(a_terminal_gets_one_line_that_is_rewritten) {
    FREED_BY(child_free) Child c = child_does(show_live_lines());
    assert_int_equal(c.status, 0);
    static const char* const pieces[] = { "step 148/300 [#########...........] loss 4.0068 | 12346 tok/s | 4h", " left" ERASE_LINE "\r",
                                          "step 150/300 [##########..........] loss 4.0067 | 12346 tok/s | 4h", " left" ERASE_LINE "\r",
                                          ERASE_LINE "sample\n" };
    const char* at = c.out;
    for (int i = 0; i < 5; at += strlen(pieces[i++])) {
        if (i % 2) at += strlen("13m");
        assert_int_equal(strncmp(at, pieces[i], strlen(pieces[i])), 0);
    }
    assert_string_equal(at, "");
}

TEST(bytes_are_given_in_readable_units) {
    static const struct { double bytes; const char* text; } rows[] = {
        { 0, "0 B" }, { 999, "999 B" }, { 1000, "1.0 kB" }, { 99900, "99.9 kB" }, { 99960, "100 kB" }, { 999999, "1.0 MB" },
        { 16e12, "16.0 TB" } };
    char text[32];
    for (int i = 0; i < 7; i++) assert_string_equal(format_bytes(text, sizeof text, rows[i].bytes), rows[i].text);
}
