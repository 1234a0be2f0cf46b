// test_saving.c - a save while training goes on: the thread is held at its first write, so that a test decides what happens first.
#include "../../llmc/base/common.h"
#include <sys/syscall.h>

// Every write of the process waits while it is held, and fails if that is asked for; every removal waits while the disk keeps files.
static struct { int held, keeps, waits, fails; } disk;
ssize_t pwrite(int fd, const void* data, size_t n, off_t at);
static void disk_wait(const int* held) {
    __atomic_store_n(&disk.waits, __atomic_load_n(held, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
    while (__atomic_load_n(held, __ATOMIC_ACQUIRE)) usleep(1000);
}
ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
    disk_wait(&disk.held);
    if (disk.fails) { errno = ENOSPC; return -1; }
    return syscall(SYS_pwrite64, fd, data, n, at);
}
int unlinkat(int fd, const char* path, int flags);
int unlinkat(int fd, const char* path, int flags) {
    disk_wait(&disk.keeps);
    return (int)syscall(SYS_unlinkat, fd, path, flags);
}
#include "../../llmc/save/saving.h"
#include "../../llmc/device/device.h"
#include "expect_death.h"
#include "test_folder.h"

enum { UNITS = 3 };
static const GPT2Config config = { .max_T = 3, .V = 5, .Vp = 128, .L = 1, .NH = 1, .C = 4 };
static ParamRange ranges[UNITS];
static Saving saving;
static const char* out; // a folder for each test

static TrainState state_of(long long step) {
    return (TrainState){ .config = config, .dtype = DTYPE_F32, .has_optimizer = true, .step = step, .tokens = 7, .loss_scale = 1,
                         .seq_len = 3, .adamw_t = step, .options = xstrdup("{}") };
}
static float* filled(size_t n, float value) {
    float* x = new_array(float, n);
    for (size_t i = 0; i < n; i++) x[i] = value;
    return x;
}
static void fill(const ParamRange* p, float value) {
    for (size_t i = 0; i < p->n; i++) p->params[i] = p->m[i] = p->v[i] = value;
}

void before_each(void) {
    static int turn;
    out = in_folder("%d", turn++);
    memset(&saving, 0, sizeof saving);
    memset(&disk, 0, sizeof disk);
    assert_int_equal(gpt2_num_units(config), UNITS);
    for (int u = 0; u < UNITS; u++) {
        size_t n = unit_elements(config, u);
        ranges[u] = param_range(config, u, 0, n);
        ranges[u].params = filled(n, 1);
        ranges[u].m = filled(n, 2);
        ranges[u].v = filled(n, 3);
        saving.bytes += 3 * n * sizeof(float);
    }
    saving.memory = (char*)snapshot_alloc(saving.bytes);
}
void after_each(void) {
    for (int u = 0; u < UNITS; u++) { free(ranges[u].params); free(ranges[u].m); free(ranges[u].v); }
    saving_free(&saving);
}

static void begin(long long step) {
    TrainState s = state_of(step);
    __atomic_store_n(&disk.held, 0, __ATOMIC_RELEASE);
    saving_begin(&saving, out, &s, 0, ranges, UNITS);
}
// The same, and the thread waits at its first write.
static void begin_and_hold(long long step) {
    TrainState s = state_of(step);
    saving_init(&saving, out, &s, 0);
    checkpoint_begin(&saving.w, out, &s); // writes the headers
    saving.writes = true;
    __atomic_store_n(&disk.held, 1, __ATOMIC_RELEASE);
    saving_start(&saving, ranges, UNITS);
    while (!__atomic_load_n(&disk.waits, __ATOMIC_ACQUIRE)) usleep(1000);
}
static void let_go(void) { __atomic_store_n(&disk.held, 0, __ATOMIC_RELEASE); }

// Every element of the checkpoint is as it was.
static void assert_saved(long long step, float params, float m, float v) {
    const float expected[] = { params, m, v };
    const CheckpointPart parts[] = { CHECKPOINT_MODEL, CHECKPOINT_M, CHECKPOINT_V };
    FREED char* path = format_string("%s/step_%08lld", out, step);
    CheckpointReader r;
    checkpoint_open(&r, path);
    r.into = DTYPE_F32;
    for (int k = 0; k < 3; k++)
        for (int u = 0; u < UNITS; u++) {
            size_t n = unit_elements(config, u), padding = u == 0 ? (size_t)(config.Vp - config.V) * (size_t)config.C : 0;
            FREED float* host = new_array(float, n);
            size_t right = 0;
            checkpoint_read_unit(&r, parts[k], u, 0, n, host);
            for (size_t i = 0; i < n; i++) right += host[i] == expected[k];
            assert_int_equal(right, n - padding);
        }
    checkpoint_close(&r);
}

// These two come first, because their children would run functions that an earlier test has registered with atexit.
static bool is_empty(void) { // except for files that a dead process cannot have removed
    FREED char* temporary = format_string("%s/.tmp_step_00000001", out);
    FREED char* path = format_string("%s/step_00000001", out);
    return !path_exists(temporary) && !path_exists(path);
}

TEST(a_failure_of_the_thread_ends_the_run_at_the_end_of_the_save) {
    Child c = child_does({
        begin_and_hold(1);
        disk.fails = 1;
        let_go();
        while (saving_is_writing(&saving)) usleep(1000);
        fprintf(stderr, "error: "); // as the first of this line: the thread has said nothing
        printf("goes on\n");
        saving_end(&saving);
    });
    assert_int_equal(c.status, 1);
    assert_string_equal(c.out, "goes on\n");
    assert_non_null(strstr(c.err, "error: error: "));
    assert_non_null(strstr(c.err, "model.safetensors: cannot be written: No space left on device; free "));
    assert_true(is_empty());
    child_free(&c);
}

TEST(a_run_that_ends_with_an_error_stops_the_thread_before_the_folder_goes) {
    Child c = child_does({
        begin_and_hold(1);
        let_go();
        die("another error");
    });
    assert_int_equal(c.status, 1);
    assert_string_equal(c.err, "error: another error\n");
    assert_true(is_empty());
    child_free(&c);
}

// pytorch#144657: memory that was on the host was not copied, so what came later was saved.
TEST(what_is_overwritten_while_the_thread_writes_is_saved_as_it_was) {
    begin_and_hold(1);
    assert_true(saving_is_writing(&saving));
    for (int u = 0; u < UNITS; u++) fill(&ranges[u], NAN);
    let_go();
    saving_end(&saving);
    assert_false(saving_is_writing(&saving));
    assert_saved(1, 1, 2, 3);
}

TEST(a_checkpoint_has_no_name_before_its_end) {
    begin_and_hold(1);
    FREED char* path = format_string("%s/step_00000001", out);
    assert_false(path_exists(path));
    let_go();
    saving_join(&saving);
    assert_false(path_exists(path));
    saving_end(&saving);
    assert_true(path_exists(path));
}

TEST(two_checkpoints_in_turn_hold_what_was_there_at_each) {
    begin(1);
    for (int u = 0; u < UNITS; u++) fill(&ranges[u], 4);
    saving_end(&saving);
    begin(2);
    for (int u = 0; u < UNITS; u++) fill(&ranges[u], 5);
    saving_end(&saving);
    assert_saved(1, 1, 2, 3);
    assert_saved(2, 4, 4, 4);
}

TEST(an_older_checkpoint_is_removed_while_training_goes_on) {
    FREED char *old = format_string("%s/step_00000001", out), *condemned = format_string("%s/.tmp_step_00000001", out);
    begin(1);
    saving_end(&saving);
    begin(2);
    saving_join(&saving);
    saving.keep = 1;
    __atomic_store_n(&disk.keeps, 1, __ATOMIC_RELEASE);
    saving_end(&saving);
    while (!__atomic_load_n(&disk.waits, __ATOMIC_ACQUIRE)) usleep(1000);
    assert_false(path_exists(old)); // so that half of it is not taken for all of it
    assert_true(path_exists(condemned));
    __atomic_store_n(&disk.keeps, 0, __ATOMIC_RELEASE);
    saving_join(&saving);
    assert_false(path_exists(condemned));
    assert_saved(2, 1, 2, 3);
}

TEST(in_strict_mode_a_snapshot_is_NaN_wherever_nothing_is_copied) {
    float last;
    snapshot_free(saving.memory);
    saving.bytes += sizeof last;
    saving.memory = (char*)snapshot_alloc(saving.bytes);
    saving.strict = true;
    begin(1);
    memcpy(&last, saving.memory + saving.bytes - sizeof last, sizeof last);
    assert_true(isnan(last));
    saving_end(&saving);
    assert_saved(1, 1, 2, 3);
}

TEST(without_a_snapshot_the_same_is_saved_at_once) {
    snapshot_free(saving.memory);
    saving.memory = NULL;
    begin(1);
    for (int u = 0; u < UNITS; u++) fill(&ranges[u], 4);
    saving_end(&saving);
    assert_saved(1, 1, 2, 3);
}
