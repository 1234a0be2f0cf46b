// test_checkpoint.c - a checkpoint is read back as it was saved, in one file or in shards, and any change to it is noticed; a crash
// or a full disk leaves the last good one. (test_param_ranges.c: it has the same bytes whichever ranks wrote it.) Whatever may
// leave a folder half-written runs in a child process.
#include "../../llmc/comm/comm.h"
#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>

// Every system call of checkpoint.h that changes or syncs a folder can be made the last one (see crash_before), and syncs and renames of
// folders can fail: see refused.
static void crash_point(void);
static int sync_or_fail(int fd);
static int rename_or_fail(const char* from, const char* to);
#define open(...) (crash_point(), open(__VA_ARGS__))
#define fsync(fd) sync_or_fail(fd)
#define mkdir(path, mode) (crash_point(), mkdir(path, mode))
#define rename(from, to) rename_or_fail(from, to)
#define unlinkat(folder, name, flags) (crash_point(), unlinkat(folder, name, flags))
#define rmdir(path) (crash_point(), rmdir(path))
#include "../../llmc/save/ranks_checkpoint.h"
#include "test_folder.h"
#include <sys/mman.h>

static char out[64], step_1[96], step_2[96]; // a run's --out, and two of its checkpoints
static const GPT2Config config = { 4, 10, 128, 2, 2, 4 };

static void remove_tree(const char* path) { nftw(path, test_folder_remove, 8, FTW_DEPTH | FTW_PHYS); }
void before_all(void) {
    snprintf(out, sizeof out, "%s/out", folder);
    snprintf(step_1, sizeof step_1, "%s/step_00000001", out);
    snprintf(step_2, sizeof step_2, "%s/step_00000002", out);
}
void after_each(void) { remove_tree(out); }

// ---- a run whose tensors are functions of the step ----
static TrainState state_at(long long step, DType dtype) {
    static char options[] = "{\"lr\":0.1,\"model\":\"d2\"}";
    static TrainState s; // without bytes between its fields that are not set
    s = (TrainState){ .config = config, .dtype = dtype, .has_optimizer = true, .step = step, .epoch = 3, .position = 17, .tokens = step * 96, .seed = 1337,
                      .adamw_t = step - 1, .loss_scale = 65536.5, .good_steps = step / 2, .seq_len = 3, .options = options,
                      .data_sum = step % 2 ? 0 : 0xfedc }; // older checkpoints have none
    return s;
}

// Element k of unit u: a number that every dtype holds exactly. 99 in the padding, which must never be saved.
static float value_at(CheckpointPart part, int u, size_t k, long long step, DType dtype) {
    if (part == CHECKPOINT_MASTER && dtype == DTYPE_F32) part = CHECKPOINT_MODEL; // the fp32 model is its own master
    bool is_padding = u == 0 && k >= unit_elements(config, 0) - (size_t)((config.Vp - config.V) * config.C);
    Philox r = philox((uint64_t)step, (uint64_t)part * 1000 + (uint64_t)u, k);
    return is_padding ? 99.0f : (float)(r.x[0] % 255) / 64;
}

static void write_range(CheckpointWriter* w, CheckpointPart part, int u, size_t begin, size_t end) {
    FREED float* values = (float*)xcalloc(end - begin, sizeof(float));
    FREED void* host = xcalloc(end - begin, sizeof(float));
    for (size_t k = begin; k < end; k++) values[k - begin] = value_at(part, u, k, w->state.step, w->state.dtype);
    convert_dtype(host, part == CHECKPOINT_MODEL ? w->state.dtype : DTYPE_F32, values, DTYPE_F32, end - begin);
    checkpoint_write_unit(w, part, u, begin, end, host);
}

// The ranges of shard `shard` of `shards`: a slice of each unit, which may end within a tensor. Of more than 20 some are empty.
enum { UNITS = 5 };
static void ranges_of(int shard, int shards, CheckpointRange ranges[UNITS]) {
    size_t slice = (size_t)shard, slices = size_min((size_t)shards, 20);
    for (int u = 0; u < UNITS; u++) {
        size_t n = unit_elements(config, u), stored = n - (u == 0 ? (size_t)((config.Vp - config.V) * config.C) : 0);
        ranges[u].unit = u;
        ranges[u].begin = stored * size_min(slice, slices) / slices;
        ranges[u].end = shard == shards - 1 ? n : stored * size_min(slice + 1, slices) / slices;
    }
}

static void write_ranges(CheckpointWriter* w, const CheckpointRange ranges[UNITS]) {
    for (int part = CHECKPOINT_PARTS - 1; part >= 0; part--)
        for (int k = 0; k < UNITS && checkpoint_has_part(&w->state, (CheckpointPart)part); k++) {
            CheckpointRange range = ranges[k];
            size_t middle = range.begin + (range.end - range.begin) / 3;
            write_range(w, (CheckpointPart)part, range.unit, middle, range.end);
            write_range(w, (CheckpointPart)part, range.unit, range.begin, middle);
        }
}

// shards: the number of writers that each have a file; 0: a full checkpoint.
static void save(long long step, long long keep, DType dtype, int shards) {
    TrainState s = state_at(step, dtype);
    CheckpointRange ranges[UNITS];
    CheckpointWriter first, w;
    if (shards == 0) checkpoint_begin(&first, out, &s);
    else checkpoint_begin_sharded(out, &s);
    for (int shard = 0, writers = shards ? shards : 1; shard < writers; shard++) {
        CheckpointWriter* writer = shard == 0 ? &first : &w;
        ranges_of(shard, writers, ranges);
        if (shards > 0) checkpoint_attach_shard(writer, out, &s, shard, shards, ranges, UNITS);
        write_ranges(writer, ranges);
        if (shard == 0) continue;
        checkpoint_detach(&w);
        checkpoint_sums_add(&first.sums, &w.sums);
    }
    ranks_checkpoint_commit(&first, keep);
}
static void save_in_shards(long long step, long long keep, DType dtype, int shards) {
    expect_output("", save(step, keep, dtype, shards));
}
static void save_step(long long step, long long keep, DType dtype) { save_in_shards(step, keep, dtype, 0); }

// Paths under --out and in step 2, which stay valid for a few calls.
#define in_out_step(step) in_folder("out/step_%08lld", step)
#define in_out(name) in_folder("out/%s", name)
#define in_step_2(name) in_folder("out/step_00000002/%s", name)

// Returns how many elements of a checkpoint differ from those of its step. Reads all parts, in pieces.
static size_t count_wrong(CheckpointReader* r) {
    size_t wrong = 0;
    for (int p = 0; p < CHECKPOINT_PARTS; p++)
        for (int u = 0; u < UNITS; u++)
            for (size_t begin = 0, piece = 0, n = unit_elements(config, u); begin < n; begin += piece) {
                float host[100];
                CheckpointPart part = (CheckpointPart)p;
                piece = size_min(n - begin, 1 + philox(5, (uint64_t)p, begin).x[0] % 100);
                checkpoint_read_unit(r, part, u, begin, begin + piece, host);
                for (size_t k = begin; k < begin + piece; k++) {
                    float expected = value_at(part, u, k, r->state.step, r->state.dtype);
                    wrong += host[k - begin] != (expected == 99.0f ? 0.0f : expected);
                }
            }
    return wrong;
}

// Opens a checkpoint, reads all of it and closes it; exit status 2 if a value is wrong without being noticed.
static void load(const char* path) {
    CheckpointReader r;
    checkpoint_open(&r, path);
    size_t wrong = count_wrong(&r);
    checkpoint_close(&r); // compares checksums
    if (wrong > 0) exit(2);
}

static void assert_loads(const char* path) { expect_success(load(path)); }
#define expect_no_load(path, ...) expect_error(load(path), __VA_ARGS__)

// The bytes of a file of step 2; the caller frees them.
static char* read_step_2(const char* name, size_t* n) { return file_read((FileSource){ in_step_2(name), "" }, 1 << 20, n); }
static void replace_step_2(const char* name, const char* text, size_t n) {
    unlink(in_step_2(name));
    assert_true(file_write(in_step_2(name), text, n));
}

// ---- round trips ----
TEST(what_is_saved_comes_back_without_the_padding) {
    static const int shard_counts[] = { 7, 3, 2, 1, 0 };
    for (int k = 0; k < 5; k++) for (DType d = DTYPE_F32; d <= DTYPE_F16; d++) {
        save_in_shards(2, 0, d, shard_counts[k]);
        FREED_BY(checkpoint_close) CheckpointReader r;
        checkpoint_open(&r, step_2);
        assert_string_equal(r.state.options, "{\"lr\":0.10000000000000001,\"model\":\"d2\"}");
        TrainState expected = state_at(2, d);
        expected.shards = shard_counts[k];
        expected.options = r.state.options;
        assert_memory_equal(&r.state, &expected, sizeof expected);
        assert_int_equal(count_wrong(&r), 0);
        for (int part = 0; part < CHECKPOINT_PARTS; part++) assert_int_equal(r.sums.elements[part], gpt2_num_parameters(config));
    }
    FREED_BY(safetensors_close) SafeTensors s;
    safetensors_open(&s, in_step_2("model.safetensors"), "");
    const SafeTensor* wte = safetensors_find(&s, "wte");
    assert_true(wte->shape[0] == (size_t)config.V && wte->shape[1] == (size_t)config.C);
}

// A full checkpoint's tensors, part by part, are in the order of their places, without a gap: in a block the vectors of both halves,
// then the matrices of both. Other programs may rely on these files, so the order must never change.
static void assert_in_order(const char* file, const char* const* parts, int num_parts) {
    static const char* const of_the_root[] = { "ln_f.weight", "ln_f.bias", "wpe", "wte" };
    static const char* const of_a_block[] = { "ln_1.weight", "ln_1.bias", "qkv.bias", "proj.bias", "ln_2.weight", "ln_2.bias", "fc.bias",
                                              "fcproj.bias", "qkv.weight", "proj.weight", "fc.weight", "fcproj.weight" };
    FREED_BY(safetensors_close) SafeTensors s;
    safetensors_open(&s, in_step_2(file), "");
    size_t next = s.tensors[0].begin;
    int i = 0, tensors = (int)COUNT(of_the_root) + config.L * (int)COUNT(of_a_block);
    assert_int_equal(s.count, num_parts * tensors);
    for (int part = 0; part < num_parts; part++) for (int k = 0; k < tensors; k++, i++) {
        int l = (k - (int)COUNT(of_the_root)) / (int)COUNT(of_a_block), number = (k - (int)COUNT(of_the_root)) % (int)COUNT(of_a_block);
        FREED char* name = k < (int)COUNT(of_the_root) ? format_string("%s%s", parts[part], of_the_root[k])
                                                       : format_string("%sh.%d.%s", parts[part], l, of_a_block[number]);
        assert_string_equal(s.tensors[i].name, name);
        assert_int_equal(s.tensors[i].begin, next);
        next = s.tensors[i].end;
    }
}
TEST(a_full_checkpoints_tensors_are_in_the_order_of_their_places) {
    static const char* const parts[] = { "", "master.", "m.", "v." };
    save_step(2, 0, DTYPE_BF16);
    assert_in_order("model.safetensors", parts, 1);
    assert_in_order("optimizer.safetensors", parts + 1, 3);
    save_step(2, 0, DTYPE_F32); // the model is its own master
    assert_in_order("model.safetensors", parts, 1);
    assert_in_order("optimizer.safetensors", parts + 2, 2);
}

// `out` must have entries of these names, hidden ones included, in order.
static void assert_entries(const char* expected) {
    struct dirent** entries;
    char names[512] = "";
    int n = scandir(out, &entries, NULL, alphasort);
    assert_true(n >= 2);
    for (int i = 0; i < n; free(entries[i++])) if (i > 1) // . and .. come first
        sprintf(names + strlen(names), "%s%s", *names ? " " : "", entries[i]->d_name);
    free(entries);
    assert_string_equal(names, expected);
}

TEST(weights_at_a_path_of_their_own_remove_no_steps_and_resume_no_run) {
    TrainState weights = state_at(1, DTYPE_F32);
    CheckpointWriter w;
    weights.has_optimizer = false;
    save_step(3, 0, DTYPE_F32);
    expect_success(checkpoint_begin_at(&w, in_out("imported/"), &weights);
                   for (int u = 0; u < UNITS; u++) write_range(&w, CHECKPOINT_MODEL, u, 0, unit_elements(config, u));
                   checkpoint_commit(&w, 1));
    expect_no_load(in_out("imported"), "imported", "holds weights only", "--init-from");
    assert_entries("imported step_00000003");
}

// ---- names, and which checkpoints stay ----
static void assert_newest(const char* name) {
    FREED char* newest = checkpoint_newest(out);
    if (name == NULL) { assert_null(newest); return; }
    assert_non_null(newest);
    assert_string_equal(path_name(newest), name);
    assert_loads(newest);
}

TEST(only_the_newest_stay) {
    assert_newest(NULL);
    for (long long step = 2; step <= 12; step += 5) save_step(step, 2, DTYPE_F32);
    assert_entries("step_00000007 step_00000012");
    assert_newest("step_00000012");
    save_step(3, 2, DTYPE_F32); // never the one just written, though others are newer
    assert_entries("step_00000003 step_00000007 step_00000012");
    save_step(100000000, 0, DTYPE_F32); // 0 keeps all, and eight digits are no limit
    assert_entries("step_00000003 step_00000007 step_00000012 step_100000000");
    assert_newest("step_100000000");
}

TEST(folders_that_are_not_ours_stay) {
    static const char* const names[] = { ".tmp_mine", "metrics.jsonl", "step_000000001", "step_00000001x", "step_0000000a", "step_1",
                                         "xstep_00000001" };
    for (int i = 0; i < 7; i++) assert_true(folder_make(in_out(names[i])));
    save_step(2, 1, DTYPE_F32);
    save_step(3, 1, DTYPE_F32);
    assert_entries(".tmp_mine metrics.jsonl step_000000001 step_00000001x step_00000003 step_0000000a step_1 xstep_00000001");
    assert_newest("step_00000003");
}

// ---- damage ----
// Flips one bit of a file of step 2, whose n bytes these are; doing it again undoes it.
static void flip_bit(const char* file, char* bytes, size_t n, size_t place, int bit) {
    bytes[place] = (char)(bytes[place] ^ (1 << bit));
    replace_step_2(file, bytes, n);
}
// Flips `flips` bits of each file of step 2, one at a time. In files from `first_tensors` on the last byte belongs to a value.
static void flipped_bits_are_noticed(const char* const* files, int count, int first_tensors, size_t flips, int shards) {
    save_in_shards(2, 0, DTYPE_F16, shards);
    save_step(1, 0, DTYPE_F16);
    for (int f = 0; f < count; f++) {
        size_t size;
        FREED char* bytes = read_step_2(files[f], &size);
        size_t stride = size / flips;
        for (size_t k = 0; k < size; k += k < 8 ? 1 : stride) { // all of the header's length, then here and there
            size_t place = k < 8 ? k : k + philox(3, (uint64_t)f, k).x[0] % size_min(stride, size - k);
            int bit = (int)(philox(4, (uint64_t)f, k).x[0] % 8);
            flip_bit(files[f], bytes, size, place, bit);
            FREED_BY(child_free) Child c = child_does(load(step_2));
            bool noticed = c.status == 1 && strstr(c.err, step_2) != NULL;
            if (!noticed) fail_msg("%s: bit %d of byte %zu: status %d: %s", files[f], bit, place, c.status, c.err);
            flip_bit(files[f], bytes, size, place, bit);
        }
        if (f < first_tensors) continue;
        flip_bit(files[f], bytes, size, size - 1, 0);
        char start[6]; // of the name, because a checksum is over all shards
        snprintf(start, sizeof start, "%s", files[f]);
        expect_no_load(step_2, in_step_2(shards ? start : files[f]), "do not match their checksum: the file is damaged", step_1);
        flip_bit(files[f], bytes, size, size - 1, 0);
    }
    assert_loads(step_2);
}
TEST(any_flipped_bit_is_noticed_also_of_a_shard) {
    static const char* const files[] = { "state.json", "model.safetensors", "optimizer.safetensors" };
    static const char* const shards[] = { "state.json", "model.safetensors.index.json", "optimizer.safetensors.index.json",
                                          "model-00001-of-00003.safetensors", "optimizer-00003-of-00003.safetensors" };
    flipped_bits_are_noticed(files, 3, 1, 100, 0);
    flipped_bits_are_noticed(shards, 5, 3, 60, 3);
}

// ---- sharded checkpoints ----
TEST(there_may_be_more_shards_than_open_files) {
    struct rlimit few = { 20, 20 };
    save_in_shards(2, 0, DTYPE_F32, 40); // some of which are empty
    expect_success(setrlimit(RLIMIT_NOFILE, &few); load(step_2));
}

// An edit of a file of step 2 must be noticed: old text, new text, and the phrases of the error. A header of tensors then has its length.
static void expect_edit_noticed(const char* file, const char* old, const char* new, const char* where, const char* says,
                                const char* remedy) {
    size_t n, begin = strstr(file, "-of-") ? 8 : 0;
    FREED char* good = read_step_2(file, &n);
    uint64_t length = n, edited_length;
    memcpy(&length, good, begin);
    FREED char *text = format_string("%.*s", (int)length, good + begin), *edited = replaced(text, old, new);
    edited_length = strlen(edited);
    size_t data = n - begin - length;
    FREED char* whole = xcalloc(begin + edited_length + data, 1);
    memcpy(whole, &edited_length, begin);
    memcpy(whole + begin, edited, edited_length);
    memcpy(whole + begin + edited_length, good + begin + length, data);
    replace_step_2(file, whole, begin + edited_length + data);
    expect_no_load(step_2, step_2, where, says, remedy);
    replace_step_2(file, good, n);
}
static void expect_edits_noticed(const char* name, const char* const edits[][3], size_t count) {
    for (size_t i = 0; i < count; i++) expect_edit_noticed(name, edits[i][0], edits[i][1], name, edits[i][2], "");
    assert_loads(step_2);
}

#define FIRST "model-00001-of-00002.safetensors"
#define SECOND "model-00002-of-00002.safetensors"
TEST(every_piece_of_a_shard_is_checked) {
    static const char remedy[] = "copy it again from where it came (there is no older checkpoint beside it)";
    static const char* const edits[][5] = { // file, old text, new text, and the phrases of the error
        { FIRST, "\"wte[0:8]\"", "\"wte[1:9]\"", "model-*-of-00002.safetensors", "element 0 of tensor 'wte' is missing" },
        { SECOND, "\"wte[8:40]\"", "\"wte[7:39]\"", "model-*-of-00002.safetensors", "element 7 of tensor 'wte' is there twice" },
        { SECOND, "\"h.1.fc.weight[50:64]\"", "\"h.0.fc.weight[49:63]\"", "*", "49 of tensor 'h.0.fc.weight' is there twice" },
        { FIRST, "\"h.0.ln_1.bias[0:4]\"", "\"h.0.fc.bias[0:4]\"", "*", "element 0 of tensor 'h.0.ln_1.bias' is missing" },
        { SECOND, "wte[8:40]", "wte[9:41]", SECOND, "'wte[9:41]' is not in state.json's model, nor a piece of a tensor" },
        { FIRST, "\"wte[0:8]\"", "\"wte[0:9]\"", FIRST, "'wte[0:9]' does not have the shape (9, 0)" },
        { FIRST, "\"shape\":[8]", "\"shape\":[8,1]", FIRST, "'wte[0:8]' does not have the shape (8, 0)" },
        { FIRST, "\"shape\":[8]", "\"shape\":[9]", FIRST, "'wte[0:8]' takes 32 bytes where its shape and dtype need 36" },
        { FIRST, "\"F32\"", "\"I32\"", FIRST, "is stored as I32 where state.json says F32" },
        { FIRST, "\"ln_f.bias[0:4]\"", "\"ln_f.weight[0:4]\"", FIRST, "duplicate object key" },
        { FIRST, "\"shard.c\"", "\"pt\"", FIRST, "\"format\": \"pt\" where a checkpoint has \"shard.c\"" },
        { FIRST, "\"out_in\"", "\"in_out\"", FIRST, "\"layout\": \"in_out\" where a checkpoint has \"out_in\"" },
        { "optimizer-00002-of-00002.safetensors", "m.wte[8:40]", "v.wte[7:39]", "optimizer-*-of-00002", "8 of tensor 'm.wte' is missing" },
    };
    static const char* const no_pieces[] = { "wtf[0:8]", "wt[0:8]", "wte[0:8", "wte[0:8] ", "wte[+0:8]", "wte[00:8]", "wte[8:0]",
                                             "wte[-8:0]", "wte[32:18446744073709551616]", "wte[", "wte", "m.wte[0:8]" };
    save_in_shards(2, 0, DTYPE_F32, 2);
    for (size_t i = 0; i < COUNT(edits); i++)
        expect_edit_noticed(edits[i][0], edits[i][1], edits[i][2], edits[i][3], edits[i][4], remedy);
    for (size_t i = 0; i < COUNT(no_pieces); i++) {
        char says[64];
        snprintf(says, sizeof says, "'%s' is not in", no_pieces[i]);
        expect_edit_noticed(FIRST, "wte[0:8]", no_pieces[i], FIRST, says, remedy);
    }
}

TEST(an_index_that_differs_from_its_files_is_noticed) {
    static const char* const edits[][3] = {
        { FIRST, SECOND, "' is in " SECOND "; it is in " FIRST }, { FIRST, "../x", "' is in ../x; it is in " FIRST },
        { "\"wte[0:8]\": \"" FIRST "\"", "\"wte[0:8]\": 1", "says that 'wte[0:8]' is in no file; it is in " FIRST },
        { "\"wte[0:8]\"", "\"wte[0:7]\"", "says that 'wte[0:8]' is in no file; it is in " FIRST },
        { "\"wte[0:8]\"", "\"wte[40:40]\": \"" FIRST "\", \"wte[0:8]\"", "or lists more than they hold" },
        { "\"total_size\": 2208", "\"total_size\": 2209", "has a total_size that is not the files'" },
        { "\"weight_map\"", "\"weight_map\": {}, \"weight_map\"", "is not valid JSON: duplicate object key" },
        { "\"weight_map\"", "\"map\"", "is in no file" }, { "{", "[", "is not valid JSON" },
    };
    save_in_shards(2, 0, DTYPE_F32, 2);
    expect_edits_noticed("model.safetensors.index.json", edits, COUNT(edits));
    size_t n;
    FREED char* good = read_step_2("model.safetensors.index.json", &n);
    for (size_t cut = 0; cut < n; cut += n / 7) {
        replace_step_2("model.safetensors.index.json", good, cut);
        expect_no_load(step_2, step_2, "model.safetensors.index.json: line ", "is not valid JSON");
    }
}

TEST(a_missing_or_truncated_shard_is_named) {
    static const char* const names[] = { "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors",
                                         "optimizer-00002-of-00003.safetensors", "model.safetensors.index.json",
                                         "optimizer.safetensors.index.json" };
    save_step(1, 0, DTYPE_F32);
    for (int f = 0; f < 5; f++) {
        save_in_shards(2, 0, DTYPE_F32, 3);
        const char* path = in_step_2(names[f]);
        size_t n;
        FREED char* bytes = read_step_2(names[f], &n);
        replace_step_2(names[f], bytes, n - 3);
        expect_no_load(step_2, path, f < 3 ? "truncated" : "is not valid JSON", "fall back to", step_1);
        assert_int_equal(unlink(path), 0);
        expect_no_load(step_2, path, "cannot be opened: No such file", "fall back to", step_1);
    }
}

static void write_a_shard(int shard, size_t end, bool begins) {
    TrainState s = state_at(2, DTYPE_F32);
    CheckpointWriter w;
    if (begins) checkpoint_begin_sharded(out, &s);
    CheckpointRange ranges[UNITS];
    ranges_of(shard, 2, ranges);
    checkpoint_attach_shard(&w, out, &s, shard, 2, ranges, UNITS);
    write_range(&w, CHECKPOINT_M, 2, 60, end);
}
// One writer's ranges, which are not the whole model although the writer claims to have written it.
static void save_too_little(size_t end, int shards) {
    TrainState s = state_at(2, DTYPE_F32);
    CheckpointRange ranges[] = { { 0, 0, 536 }, { 1, 0, 88 }, { 2, 0, 156 }, { 3, 0, 88 }, { 4, 0, end } };
    CheckpointWriter w;
    checkpoint_begin_sharded(out, &s);
    checkpoint_attach_shard(&w, out, &s, 0, shards, ranges, UNITS);
    for (int part = 0; part < CHECKPOINT_PARTS; part++) w.sums.elements[part] = gpt2_num_parameters(config);
    ranks_checkpoint_commit(&w, 0);
}
TEST(what_is_written_must_be_the_whole) {
    TrainState s = state_at(1, DTYPE_F32);
    CheckpointWriter w;
    expect_error(checkpoint_begin(&w, out, &s); write_range(&w, CHECKPOINT_MASTER, 0, 0, 1),
                 "a checkpoint in fp32 with optimizer state has no part \"master\"");
    expect_error(write_a_shard(0, 79, true), "step_00000002: element 50 of tensor 'm.h.0.fc.weight' is in none of the ranges that");
    expect_error(write_a_shard(1, 79, false), ".tmp_step_00000002/model-00002-of-00002.safetensors: cannot be written: No such file",
                 "make it a folder that every rank sees or choose another --out");
    expect_error(save_too_little(156, 2), SECOND ": cannot be opened", "--out must be a folder that every rank sees");
    expect_error(save_too_little(155, 1), "model-*-of-00001", "element 63 of tensor 'h.1.fcproj.weight' is missing");
    expect_error(write_a_shard(2, 79, false), "shard 2 of 2: a checkpoint has 1 to 65536 shards, counted from 0");
    assert_entries("");
}

// ---- state.json ----
TEST(every_field_of_the_state_is_checked) {
    static const char* const edits[][3] = {
        { "\"format\"", "\"kind\"", "is not the state of a shard.c checkpoint" },
        { "\"version\": 1", "\"version\": 2", "has version 2 where this program knows version 1; use the program that wrote it" },
        { "\"version\"", "\"revision\"", "no whole number \"version\"" }, { "\"model\"", "\"none\"", "no whole number \"layers\"" },
        { "\"layers\": 2", "\"layers\": 0", "\"layers\" must be between 1 and 256, not 0" },
        { "\"layers\": 2", "\"layers\": 4294967298", "\"layers\" must be between 1 and 256, not 4294967298" },
        { "\"heads\": 2", "\"heads\": 3", "4 channels do not divide over 3 heads" },
        { "\"channels\": 4", "\"channels\": 65537", "\"channels\" must be between" },
        { "\"vocab_size\": 10", "\"vocab_size\": -1", "\"vocab_size\" must be between" },
        { "\"max_seq_len\": 4", "\"max_seq_len\": 1.5", "no whole number \"max_seq_len\"" },
        { "\"fp32\"", "\"fp8\"", "must be fp32, bf16 or fp16, not fp8" }, { "\"fp32\"", "1", "must be fp32, bf16 or fp16, not missing" },
        { "true", "1", "\"has_optimizer\" must be true or false" }, { "\"step\": 2", "\"step\": -1", "\"step\" must be between" },
        { "\"seed\": 1337", "\"seed\": -1", "\"seed\" must be between" },
        { "\"seq_len\": 3", "\"seq_len\": 5", "\"seq_len\" must be between 1 and 4, not 5" },
        { "\"epoch\": 3", "\"epoch\": -1", "\"epoch\" must be between" },
        { "\"position\": 17", "\"position\": \"3\"", "no whole number \"position\"" },
        { "000000000000fedc", "fedc", "no \"checksum\" of 16 hexadecimal digits" },
        { "\"adamw_t\": 1", "\"adamw_t\": 3", "\"adamw_t\" must be between 0 and 2, not 3" },
        { "\"good_steps\": 1", "\"good_steps\": 3", "\"good_steps\" must be between 0 and 2, not 3" },
        { "65536.5", "0", "\"loss_scale\" must be a number above 0" },
        { "\"loss_scale\"", "\"scale\"", "\"loss_scale\" must be a number above 0" },
        { "\"options\"", "\"options\": 1, \"others\"", "no object \"options\"" },
        { "{", "{\"shards\": 0,", "\"shards\" must be between 1 and 65536, not 0" },
        { "{", "{\"shards\": true,", "no whole number \"shards\"" }, { "{", "{\"shards\": 3,", "does not match its own checksum" },
        { "\"m\": \"", "\"m\": \"0", "no \"m\" of 16 hexadecimal digits" },
        { "\"checksum_of_this\"", "\"checksum\"", "no \"checksum_of_this\" of 16 hexadecimal digits" },
        { "\"position\": 17", "\"position\": 18", "does not match its own checksum: it was damaged or edited" },
    };
    save_step(2, 0, DTYPE_F32);
    expect_edits_noticed("state.json", edits, COUNT(edits));
}

// ---- folders that are something else ----
// Puts a file with one tensor in the place of step 2's model.
static void replace_model(const char* tensor) {
    const char* path = in_step_2("model.safetensors");
    SafeTensor wanted = safetensor_wanted((char*)(uintptr_t)tensor, DTYPE_F32, 10, 4);
    FREED_BY(json_decrefp) json_t* metadata = json_pack("{s:s}", "format", "pt");
    FREED_BY(safetensors_close) SafeTensors s;
    unlink(path);
    assert_true(safetensors_create(&s, path, &wanted, 1, metadata));
}

TEST(other_things_are_called_by_their_name) {
    save_step(2, 0, DTYPE_F32);
    expect_no_load(out, "is a folder of checkpoints", step_2);
    expect_no_load(step_1, "there is no such checkpoint");
    assert_true(file_write(in_out("config.json"), "{}", 2));
    expect_no_load(out, "this is a Hugging Face layout, use build/hf_import");
    replace_model("transformer.wte.weight"); // Hugging Face's weights under our state
    expect_no_load(step_2, in_step_2("model.safetensors"), "this is a Hugging Face layout");
    replace_model("wte"); // tensors that only look like ours
    expect_no_load(step_2, in_step_2("model.safetensors"), "\"format\": \"pt\" where a checkpoint has \"shard.c\"");
}

// ---- full disks and errors of the file system ----
// Allows more and more bytes of a checkpoint, up to all of it: the first file that does not fit is named.
static void any_file_may_fail(int shards, const char* const* files, int count) {
    bool failed[3] = { false, false, false }, is_saved = false;
    remove_tree(out);
    save_step(1, 1, DTYPE_F32);
    for (size_t room = 500; !is_saved; room += 250) {
        FREED_BY(child_free) Child c = child_does(limit_files(room); save(2, 1, DTYPE_F32, shards));
        is_saved = c.status == 0;
        if (!is_saved) {
            assert_entries("step_00000001");
            const char* said = strstr(c.err, "cannot be written: File too large; free 1 MB or choose another --out; the last good "
                                             "checkpoint is ");
            assert_true(said && strstr(said, step_1));
        }
        for (int f = 0; f < count; f++) failed[f] = failed[f] || strstr(c.err, files[f]) != NULL;
    }
    for (int f = 0; f < count; f++) if (!failed[f]) fail_msg("%s always fitted", files[f]);
    assert_newest("step_00000002");
}
TEST(a_save_that_has_no_room_leaves_the_last_good_checkpoint) {
    any_file_may_fail(0, (const char* const[]){ "model.safetensors", "optimizer.safetensors" }, 2);
    any_file_may_fail(7, (const char* const[]){ "model-0000", "optimizer-0000", "safetensors.index.json" }, 3);
}
// Allows more and more open files: the first one that does not open is explained, and where possible with the last checkpoint.
TEST(a_save_that_may_open_no_more_files_says_how_to_allow_more) {
    bool is_saved = false, is_named = false;
    save_step(1, 1, DTYPE_F32);
    for (struct rlimit few = { 3, 3 }; !is_saved; few.rlim_cur = ++few.rlim_max) {
        FREED_BY(child_free) Child c = child_does(setrlimit(RLIMIT_NOFILE, &few); save(2, 1, DTYPE_F32, 0));
        is_saved = c.status == 0;
        is_named = is_named || strstr(c.err, step_1);
        bool is_explained = strstr(c.err, "too many open files in this process") && !strstr(c.err, "make it writable");
        if (!is_saved && !is_explained) fail_msg("with %d open files: %s", (int)few.rlim_cur, c.err);
    }
    assert_true(is_named);
}

// ---- links ----
// Moves step 1 out of the way, as to another disk, and puts a link to it at this name.
static void link_step_1(const char* name) {
    assert_int_equal(mkdir(in_folder("archive"), 0777), 0);
    assert_int_equal((rename)(step_1, in_folder("archive/old")), 0);
    assert_int_equal(symlink(in_folder("archive/old"), in_out(name)), 0);
}
// What the link led to is whole; and then it is gone.
static void assert_archive_is_whole(void) {
    assert_loads(in_folder("archive/old"));
    remove_tree(in_folder("archive"));
}
TEST(a_link_in_the_place_of_a_checkpoint_is_unlinked_and_never_followed) {
    static const char* const names[] = { "step_00000001", ".tmp_step_00000001", ".tmp_step_00000003", ".replaced_step_00000001" };
    for (size_t i = 0; i < COUNT(names); i++) for (int shards = 0; shards <= 2; shards += 2) {
        save_step(1, 0, DTYPE_F32);
        link_step_1(names[i]);
        save_in_shards(2, 2, DTYPE_F32, shards);
        save_in_shards(3, 2, DTYPE_F32, shards);
        assert_entries("step_00000002 step_00000003");
        assert_archive_is_whole();
        remove_tree(out);
    }
}
TEST(a_link_that_has_the_name_of_a_new_checkpoint_steps_aside) {
    for (int dangles = 0; dangles < 2; dangles++) {
        save_step(1, 0, DTYPE_F32);
        link_step_1("step_00000002");
        if (dangles) assert_int_equal((rename)(in_folder("archive"), in_folder("unmounted")), 0);
        save_step(2, 1, DTYPE_F32);
        if (dangles) assert_int_equal((rename)(in_folder("unmounted"), in_folder("archive")), 0);
        assert_entries("step_00000002");
        assert_newest("step_00000002");
        assert_archive_is_whole();
        remove_tree(out);
    }
}

// ---- folders that cannot be synced or renamed ----
static struct { int reason, syncs, renames; } refused; // errno; how many syncs of folders and how many renames still succeed
static int sync_or_fail(int fd) {
    struct stat info;
    crash_point();
    bool fails = refused.reason && fstat(fd, &info) == 0 && S_ISDIR(info.st_mode) && refused.syncs-- <= 0;
    if (fails) errno = refused.reason;
    return fails ? -1 : (fsync)(fd);
}
static int rename_or_fail(const char* from, const char* to) {
    crash_point();
    bool fails = refused.reason && refused.renames-- <= 0;
    if (fails) errno = refused.reason;
    return fails ? -1 : (rename)(from, to);
}
static void save_refused(int reason, int syncs, int renames, long long step) {
    refused.reason = reason; refused.syncs = syncs; refused.renames = renames;
    save(step, 1, DTYPE_F32, 0);
}
TEST(a_file_system_that_syncs_no_folders_has_checkpoints) {
    static const int reasons[] = { EINVAL, EOPNOTSUPP, ENOSYS };
    for (size_t i = 0; i < COUNT(reasons); i++) expect_success(save_refused(reasons[i], 0, 9, (long long)i + 1));
    assert_entries("step_00000003");
    assert_newest("step_00000003");
}
TEST(a_complete_checkpoint_that_cannot_have_its_name_stays_and_the_error_says_where) {
    static const char where[] = "it is complete in ", left[] = ".tmp_step_00000002 step_00000001";
    save_step(1, 0, DTYPE_F32);
    expect_error(save_refused(EIO, 0, 9, 2), step_2, "cannot be given its name: Input/output error", where, in_out(".tmp_step_00000002"));
    assert_entries(left);
    expect_error(save_refused(EPERM, 9, 0, 2), "cannot be given its name: Operation not permitted", where, in_out(".tmp_step_00000002"));
    assert_entries(left);
    assert_loads(in_out(".tmp_step_00000002"));
    save_step(3, 0, DTYPE_F32); // by another run, which has continued from step 1
    assert_entries("step_00000001 step_00000003");
    remove_tree(out);
    save_step(1, 0, DTYPE_F32);
    expect_error(save_refused(EIO, 1, 9, 2), step_2, "it is complete, but its name may not survive a power cut: Input/output error");
    assert_entries("step_00000001 step_00000002");
    assert_newest("step_00000002");
    expect_error(save_refused(EIO, 9, 0, 2), "cannot be given its name", where, in_out(".tmp_step_00000002")); // the old one stays
    assert_entries(".tmp_step_00000002 step_00000001 step_00000002");
    assert_loads(in_out(".tmp_step_00000002"));
    save_step(3, 1, DTYPE_F32);
    assert_entries("step_00000003"); // without a warning that step 2 could not be removed
}

// ---- crashes ----
static int crash_before; // the system call, counted from 1, before which the process is killed; 0: none
static void crash_point(void) { if (crash_before > 0 && --crash_before == 0) kill(getpid(), SIGKILL); }

static volatile long long* safe; // the last step that was reported safe: children write it, too
static void save_and_report(int shards) {
    save(2, 1, DTYPE_BF16, shards);
    *safe = 2;
}
// No step that was reported safe is lost, and every folder with a checkpoint's name is complete.
static void assert_nothing_is_lost(void) {
    FREED char* newest = checkpoint_newest(out);
    assert_non_null(newest);
    const char* name = path_name(newest);
    long long found = checkpoint_name_step(name, name[0] == '.' ? CHECKPOINT_REPLACED : "");
    assert_true(found == *safe || found == *safe + 1);
    assert_loads(newest);
    FREED long long* steps;
    int count = checkpoint_list(out, "", &steps);
    for (int i = 0; i < count; i++) assert_loads(in_out_step(steps[i]));
}

static void crashes_lose_nothing(int shards, int least_calls) {
    int call = 0;
    safe = (volatile long long*)mmap(NULL, sizeof *safe, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (bool was_killed = true; was_killed;) {
        save_step(1, 0, DTYPE_F32);
        *safe = 1;
        call++; // here, because a child has variables of its own
        FREED_BY(child_free) Child c = child_does(crash_before = call; save_and_report(shards); save_and_report(shards));
        was_killed = c.status == 1000 + SIGKILL;
        if (!was_killed) assert_int_equal(c.status, 0);
        assert_nothing_is_lost();
        for (long long step = 2; step <= 3; step++) save_in_shards(step, 1, DTYPE_F32, shards); // the same step again, and the next
        assert_entries("step_00000003"); // they have cleaned up
        remove_tree(out);
    }
    assert_true(call > least_calls);
}
TEST(a_crash_before_any_system_call_loses_nothing) {
    crashes_lose_nothing(0, 30);
    crashes_lose_nothing(2, 60);
}
