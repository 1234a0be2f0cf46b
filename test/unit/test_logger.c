// test_logger.c - what metrics.jsonl contains after a run, a resumed run, and one that was killed; and the lines for people.
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

static const char* metrics_of(const char* run) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, run);
    return path;
}

static void open_log(Logger* g, const char* run, long long resumed_step) {
    char* out = format_string("%s/%s", folder, run);
    logger_open(g, &table, &options, out, resumed_step, NULL);
    free(out);
}

static StepLog step_log(long long step) {
    StepLog s;
    memset(&s, 0, sizeof s);
    s.step = step; s.loss = 4 + 1.0 / (double)step;
    s.grad_norm = 0.1; s.param_norm = 45.678; s.lr = 1e-3; s.loss_scale = 1; s.tokens = 2048 * step;
    s.tokens_per_s = 12345.6; s.step_ms = 165.9;
    s.mem_bytes = 100000000; s.mem_peak_bytes = 123456789;
    return s;
}

static EvalLoss eval_loss(double per_token, double per_byte) {
    EvalLoss loss = { per_token, per_byte };
    return loss;
}

static void log_steps(Logger* g, long long first, long long last) {
    for (long long step = first; step <= last; step++) {
        StepLog s = step_log(step);
        logger_step(g, &s);
    }
}

static void append_text(const char* path, const char* text) {
    FILE* f = fopen(path, "a");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

// Returns the lines of a metrics.jsonl, each of which must be one whole JSON object: an array that the caller owns.
static json_t* read_metrics(const char* run) {
    FILE* f = fopen(metrics_of(run), "r");
    assert_non_null(f);
    json_t* lines = json_array();
    char* line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, f) > 0) {
        assert_int_equal(line[strlen(line) - 1], '\n');
        json_t* object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        assert_true(json_is_object(object));
        json_array_append_new(lines, object);
    }
    free(line);
    fclose(f);
    return lines;
}

static json_t* line_value(json_t* lines, size_t i, const char* name) { return json_object_get(json_array_get(lines, i), name); }

// The first line is the run's record, and those after it are steps 1, 2, ... last.
static void assert_steps(const char* run, long long last) {
    json_t* lines = read_metrics(run);
    assert_int_equal(json_array_size(lines), 1 + last);
    assert_non_null(line_value(lines, 0, "run"));
    for (long long step = 1; step <= last; step++) {
        assert_int_equal(json_integer_value(line_value(lines, (size_t)step, "step")), step);
        assert_true(json_real_value(line_value(lines, (size_t)step, "loss")) == 4 + 1.0 / (double)step); // to the bit
    }
    json_decref(lines);
}

// ---- metrics.jsonl ----
static void write_a_run(void* run) {
    Logger g;
    open_log(&g, run, 0);
    log_steps(&g, 1, 10);
    logger_close(&g);
}

// Runs write in a child, so that their lines do not mix with the test's own.
static void in_child(void (*function)(void*), const char* run) {
    Child c = child_run(function, (void*)run);
    if (c.status != 0) print_error("%s\n", c.err);
    assert_int_equal(c.status, 0);
    child_free(&c);
}
TEST(a_step_has_every_field_and_numbers_come_back_to_the_bit) {
    in_child(write_a_run, "fields");
    assert_steps("fields", 10);
    json_t* lines = read_metrics("fields");
    StepLog s = step_log(3);
    json_t* line = json_array_get(lines, 3);
    assert_true(json_real_value(json_object_get(line, "grad_norm")) == s.grad_norm);
    assert_true(json_real_value(json_object_get(line, "param_norm")) == s.param_norm);
    assert_true(json_real_value(json_object_get(line, "lr")) == s.lr);
    assert_true(json_real_value(json_object_get(line, "loss_scale")) == 1);
    assert_true(json_real_value(json_object_get(line, "tokens_per_s")) == s.tokens_per_s);
    assert_true(json_real_value(json_object_get(line, "step_ms")) == s.step_ms);
    assert_int_equal(json_integer_value(json_object_get(line, "tokens")), s.tokens);
    assert_int_equal(json_integer_value(json_object_get(line, "mem_bytes")), s.mem_bytes);
    assert_int_equal(json_integer_value(json_object_get(line, "mem_peak_bytes")), s.mem_peak_bytes);
    assert_int_equal(json_integer_value(json_object_get(line, "comm_bytes")), 0);
    assert_true(json_is_real(json_object_get(line, "comm_exposed_ms")));
    assert_true(json_is_false(json_object_get(line, "skipped")));
    json_decref(lines);
}

static void write_facts(void* run) {
    Logger g;
    char* out = format_string("%s/%s/deep/down", folder, (const char*)run);
    options.prompt = "caf\xE9"; // Latin-1
    logger_open(&g, &table, &options, out, 0, json_pack("{s:i}", "world_size", 4));
    logger_close(&g); free(out);
}
TEST(the_first_line_has_the_options_and_what_the_stage_adds) {
    in_child(write_facts, "facts");
    json_t* lines = read_metrics("facts/deep/down");
    json_t* run = line_value(lines, 0, "run");
    assert_int_equal(json_integer_value(json_object_get(run, "world_size")), 4);
    assert_string_equal(json_string_value(json_object_get(run, "stage")), "train_gpt2_test");
    json_t* given = json_object_get(run, "options");
    assert_int_equal(json_object_size(given), table.count);
    assert_true(json_real_value(json_object_get(given, "lr")) == options.lr);
    assert_int_equal(json_integer_value(json_object_get(given, "seq-len")), options.seq_len);
    assert_string_equal(json_string_value(json_object_get(given, "lr-schedule")), "cosine");
    assert_string_equal(json_string_value(json_object_get(given, "data")), options.data);
    assert_true(json_is_false(json_object_get(given, "resume")));
    assert_string_equal(json_string_value(json_object_get(given, "prompt")), "caf?");
    json_decref(lines);
}

TEST(norms_have_32_bits_so_that_the_order_of_a_sum_is_not_seen) {
    assert_true(logged_norm(0) == 0 && logged_norm(-2.5) == 2.5 && logged_norm(1 + ldexp(1, -31)) == 1 + ldexp(1, -31));
    assert_true(logged_norm(1 + ldexp(1, -33)) == 1 && logged_norm(1 + 3 * ldexp(1, -33)) == 1 + ldexp(1, -31));
    assert_true(isinf(logged_norm(INFINITY)) && isnan(logged_norm(-NAN)) && !signbit(logged_norm(-NAN)));
    double forward = 0, backward = 0;
    for (int i = 0; i < 100000; i++) forward += sin(i) * sin(i);
    for (int i = 100000; i-- > 0; ) backward += sin(i) * sin(i);
    assert_true(forward != backward && logged_norm(sqrt(forward)) == logged_norm(sqrt(backward)));
    for (double norm = 1e-6; norm < 8192; norm *= 1.7) assert_true(fabs(logged_norm(norm) - norm) < 1e-6);
}

static void write_odd_numbers(void* run) {
    Logger g;
    open_log(&g, run, 0);
    StepLog s = step_log(1);
    s.loss = NAN; s.grad_norm = INFINITY; s.skipped = true; s.lr = 0.1 + 0.2;
    logger_step(&g, &s);
    logger_eval(&g, 1, eval_loss(2.25, 0.75));
    logger_eval(&g, 1, eval_loss(-INFINITY, NAN));
    logger_close(&g);
}
TEST(nan_and_infinity_are_null) {
    in_child(write_odd_numbers, "odd");
    json_t* lines = read_metrics("odd");
    assert_true(json_is_null(line_value(lines, 1, "loss")));
    assert_true(json_is_null(line_value(lines, 1, "grad_norm")));
    assert_true(json_is_true(line_value(lines, 1, "skipped")));
    assert_true(json_real_value(line_value(lines, 1, "lr")) == 0.1 + 0.2);
    assert_int_equal(json_integer_value(line_value(lines, 2, "step")), 1);
    assert_true(json_real_value(line_value(lines, 2, "val_loss")) == 2.25);
    assert_true(json_real_value(line_value(lines, 2, "val_loss_per_byte")) == 0.75);
    assert_true(json_is_null(line_value(lines, 3, "val_loss")));
    assert_true(json_is_null(line_value(lines, 3, "val_loss_per_byte")));
    json_decref(lines);
}

// ---- resume ----
static void resume_at_6(void* run) {
    Logger g;
    open_log(&g, run, 6);
    log_steps(&g, 7, 12);
    logger_close(&g);
}
TEST(a_resumed_run_has_each_step_once) {
    in_child(write_a_run, "resumed");
    in_child(resume_at_6, "resumed"); // from the checkpoint of step 6, though 10 had been reached
    assert_steps("resumed", 12);
}

static void resume_at_10(void* run) {
    Logger g;
    open_log(&g, run, 10);
    log_steps(&g, 11, 12);
    logger_close(&g);
}
TEST(what_is_not_a_whole_line_is_cut_off) {
    const char* const torn[] = { "", "{", "{\"step\":11,\"lo", "{\"step\":11}", "{\"step\":10}", "\n", "null\n", "[1]\n",
                                 "{\"step\":3,\"step\":4}\n" };
    for (size_t i = 0; i < sizeof torn / sizeof torn[0]; i++) {
        in_child(write_a_run, "torn");
        append_text(metrics_of("torn"), torn[i]);
        in_child(resume_at_6, "torn");
        assert_steps("torn", 12);
        in_child(write_a_run, "torn");
        append_text(metrics_of("torn"), torn[i]);
        in_child(resume_at_10, "torn"); // it follows directly on what stays
        assert_steps("torn", 12);
    }
}

TEST(a_resumed_run_without_metrics_begins_them) {
    in_child(write_a_run, "lost");
    assert_int_equal(truncate(metrics_of("lost"), 5), 0); // the first line itself is torn
    in_child(resume_at_6, "lost");
    json_t* lines = read_metrics("lost");
    assert_int_equal(json_array_size(lines), 7);
    assert_non_null(line_value(lines, 0, "run"));
    json_decref(lines);
    assert_int_equal(unlink(metrics_of("lost")), 0);
    in_child(resume_at_6, "lost");
    lines = read_metrics("lost");
    assert_int_equal(json_array_size(lines), 7);
    assert_int_equal(json_integer_value(line_value(lines, 1, "step")), 7);
    json_decref(lines);
}

TEST(a_new_run_replaces_the_metrics_of_an_older_one) {
    in_child(write_a_run, "again");
    in_child(resume_at_10, "again");
    in_child(write_a_run, "again");
    assert_steps("again", 10);
}

static void write_and_be_killed(void* run) {
    Logger g;
    open_log(&g, run, 0);
    log_steps(&g, 1, 10);
    kill(getpid(), SIGKILL);
}
TEST(a_killed_run_has_lost_nothing) {
    Child c = child_run(write_and_be_killed, "killed");
    assert_int_equal(c.status, 1000 + SIGKILL);
    child_free(&c);
    assert_steps("killed", 10);
}

// ---- errors ----
TEST(a_folder_that_cannot_be_written_is_an_error) {
    char* file = format_string("%s/file", folder);
    append_text(file, "a file\n");
    free(file);
    expect_death(write_a_run, "file", "--out", "file", "another");
    expect_death(write_a_run, "file/below", "--out", "file/below", "another");
    assert_true(folder_make(metrics_of("taken"))); // its name is taken by a folder
    expect_death(write_a_run, "taken", "metrics.jsonl", "cannot be opened", "--out");
}

static void write_to_a_full_disk(void* unused) {
    (void)unused;
    Logger g;
    open_log(&g, "full", 0);
    fclose(g.file);
    g.file = fopen("/dev/full", "w");
    log_steps(&g, 1, 1);
}
TEST(a_full_disk_is_an_error) { expect_death(write_to_a_full_disk, NULL, "metrics.jsonl", "No space left", "--resume"); }

// ---- the line for people ----
static void print_lines(void* unused) {
    (void)unused;
    Logger g;
    logger_open(&g, &table, &options, "", 0, NULL);
    StepLog s = step_log(12);
    logger_step(&g, &s);
    s.skipped = true; s.loss_scale = 32768;
    logger_step(&g, &s);
    g.ranks = 4;
    s = step_log(300);
    s.comm_exposed_ms = 1.25;
    logger_step(&g, &s);
    logger_eval(&g, 50, eval_loss(2.34567, 2.34567));
    logger_eval(&g, 50, eval_loss(4.5, 1.87654));
    logger_eval(&g, 50, eval_loss(4.5, NAN));
    logger_close(&g);
}
TEST(lines_say_what_matters_and_no_more) {
    Child c = child_run(print_lines, NULL);
    assert_int_equal(c.status, 0);
    char* line = strtok(c.out, "\n");
    assert_string_equal(line, "step  12/300 | loss 4.0833 | grad norm 0.1000 | param norm 45.68 | lr 1.00e-03 | mem 123 MB | 12346 tok/s");
    line = strtok(NULL, "\n");
    assert_non_null(strstr(line, "12346 tok/s | loss scale 32768 | skipped"));
    line = strtok(NULL, "\n");
    assert_non_null(strstr(line, "step 300/300 | "));
    assert_non_null(strstr(line, "| comm exposed 1.2 ms"));
    assert_null(strstr(line, "skipped"));
    assert_null(strstr(line, "left")); // nobody is watching
    assert_string_equal(strtok(NULL, "\n"), "step  50/300 | val loss 2.3457");
    assert_string_equal(strtok(NULL, "\n"), "step  50/300 | val loss 4.5000 per token, 1.8765 per byte");
    assert_string_equal(strtok(NULL, "\n"), "step  50/300 | val loss 4.5000"); // the tokenizer does not know all tokens
    assert_null(strtok(NULL, "\n"));
    child_free(&c);
}

static void write_every_tenth_line(void* run) {
    Logger g;
    options.log_every = 10;
    open_log(&g, run, 3);
    for (long long step = 4; step <= 300; step++) {
        StepLog s = step_log(step);
        s.skipped = step == 77;
        logger_step(&g, &s);
    }
    logger_close(&g);
}
TEST(log_every_leaves_out_lines_and_metrics_keep_every_step) {
    Child c = child_run(write_every_tenth_line, "tenth");
    assert_int_equal(c.status, 0);
    long long expected = 4; // the first of this run; then every tenth, and 77, which was skipped
    for (char* line = strtok(c.out, "\n"); line; line = strtok(NULL, "\n")) {
        long long step = 0;
        assert_int_equal(sscanf(line, "step %lld/300", &step), 1);
        assert_int_equal(step, expected);
        expected = step == 4 ? 10 : step == 70 ? 77 : step == 77 ? 80 : step + 10;
    }
    assert_int_equal(expected, 310);
    child_free(&c);
    json_t* lines = read_metrics("tenth");
    assert_int_equal(json_array_size(lines), 1 + 297);
    json_decref(lines);
}

static void show_live_lines(void* steps) {
    Logger g;
    logger_open(&g, &table, &options, "", 0, NULL);
    g.terminal = true; g.every = 1000;
    for (long long step = 148; step <= 150; step++) {
        StepLog s = step_log(step);
        g.last_time = now_seconds() - 0.5; // as if every step took half a second
        if (step != 149) g.last_shown = 0; // 149 comes too soon after 148
        logger_step(&g, &s);
    }
    if (steps) die("stopped");
    logger_say("sample\n");
    logger_close(&g);
}
TEST(a_terminal_gets_one_line_that_is_rewritten) {
    const char* expected = "step 148/300 [#########...........] loss 4.0068 | 12346 tok/s | 1m16s left" ERASE_LINE "\r"
                           "step 150/300 [##########..........] loss 4.0067 | 12346 tok/s | 1m15s left" ERASE_LINE "\r"
                           ERASE_LINE "sample\n";
    Child c = child_run(show_live_lines, NULL);
    for (int i = 0; i < 9 && strcmp(c.out, expected) != 0; i++) { // other programs may have held it up for milliseconds
        child_free(&c);
        c = child_run(show_live_lines, NULL);
    }
    assert_int_equal(c.status, 0);
    assert_string_equal(c.out, expected);
    child_free(&c);
    c = child_run(show_live_lines, &options);
    assert_int_equal(c.status, EXIT_FAILURE);
    assert_string_equal(c.out + strlen(c.out) - strlen("\r" ERASE_LINE), "\r" ERASE_LINE); // an error does not end in half a line
    assert_non_null(strstr(c.err, "error: stopped"));
    child_free(&c);
}

TEST(a_pipe_is_not_a_terminal) {
    long parent = 0;
    assert_false(terminal_is_launcher(getpid(), &parent));
    assert_int_equal(parent, getppid());
    assert_false(terminal_is_launcher(0x7fffffff, &parent));
    assert_int_equal(parent, 0);
    int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    assert_false(terminal_is_watched());
    dup2(out, STDOUT_FILENO);
    close(out);
    close(null);
}

TEST(bytes_are_given_in_readable_units) {
    char text[32];
    assert_string_equal(format_bytes(text, sizeof text, 0), "0 B");
    assert_string_equal(format_bytes(text, sizeof text, 999), "999 B");
    assert_string_equal(format_bytes(text, sizeof text, 1000), "1.0 kB");
    assert_string_equal(format_bytes(text, sizeof text, 99900), "99.9 kB");
    assert_string_equal(format_bytes(text, sizeof text, 99960), "100 kB");
    assert_string_equal(format_bytes(text, sizeof text, 999999), "1.0 MB");
    assert_string_equal(format_bytes(text, sizeof text, 16e12), "16.0 TB");
}
