// host.c - functions of llmc/'s headers that need no program around them, as a shared library, build/host.so, for
// test/kernels/check_host.py: random numbers, rates, the model's tensors, layouts of shards, checkpoints, logs.
#include "../../dev/kernels/comm/link_fit.h"
#include "../../llmc/comm/sums.h"
#include "../../llmc/model/lr_schedule.h"
#include "../../llmc/model/sampler.h"
#include "../../llmc/parallel/layout.h"
#include <jansson.h>
#include <omp.h>

// Every system call of checkpoint.h that changes or syncs a folder or a file can be made the last one (of writes every eighth, which is
// then half done), and syncs and renames of folders can fail.
static int crash_before; // the call, counted from 1, before which the process is killed; 0: none
static struct { int reason, syncs, renames; } refused; // errno; how many syncs of folders and how many renames still succeed
void crash_at(int call) { crash_before = call; }
void refuse(int reason, int syncs, int renames) { refused.reason = reason; refused.syncs = syncs; refused.renames = renames; }
static void crash_point(void) { if (crash_before > 0 && --crash_before == 0) kill(getpid(), SIGKILL); }
static bool fails(bool wanted, int* left) {
    crash_point();
    bool failed = wanted && refused.reason && (*left)-- <= 0;
    if (failed) errno = refused.reason;
    return failed;
}
static bool is_folder(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
}
static ssize_t write_half(int fd, const void* data, size_t n, off_t at) {
    static int writes;
    if (++writes % 8 > 0) return pwrite(fd, data, n, at);
    if (crash_before == 1) (void)!pwrite(fd, data, n / 2, at);
    crash_point();
    return pwrite(fd, data, n, at);
}
#define open(...) (crash_point(), open(__VA_ARGS__))
#define mkdir(path, mode) (crash_point(), mkdir(path, mode))
#define unlinkat(folder, name, flags) (crash_point(), unlinkat(folder, name, flags))
#define rmdir(path) (crash_point(), rmdir(path))
#define posix_fallocate(fd, at, n) (crash_point(), posix_fallocate(fd, at, n))
#define pwrite write_half
#define fsync(fd) (fails(is_folder(fd), &refused.syncs) ? -1 : fsync(fd))
#define rename(from, to) (fails(true, &refused.renames) ? -1 : rename(from, to))
#include "../../llmc/save/ranks_checkpoint.h"
#include "../../llmc/run/logger.h"

int elements_are(void) { return (int)FLOATX_DTYPE; }
void set_threads(int n) { omp_set_num_threads(n); }

// ---- random numbers, rates, draws, a line through times ----
#define ALL(value) for (size_t i = 0; i < n; i++) y[i] = value;
void philox_words(unsigned* words, uint64_t key, uint64_t high, uint64_t low) { // (4)
    Philox r = philox(key, high, low);
    memcpy(words, r.x, sizeof r.x);
}
void uniforms(float* y, uint64_t seed, uint64_t stream, size_t n) { ALL(random_uniform(seed, stream, i)) }
void normals(float* y, uint64_t seed, uint64_t stream, uint64_t first, size_t n) { ALL(random_normal(seed, stream, first + i)) }
void places(uint64_t* y, uint64_t seed, uint64_t first, size_t n, uint64_t all) { ALL(random_permute(seed, STREAM_DATA, first + i, all)) }
void places_of_seeds(uint64_t* y, uint64_t element, size_t n, uint64_t all) { ALL(random_permute(i, STREAM_DATA, element, all)) }
void rates(double* y, int schedule, long steps, long warmup, double final, size_t n) { // of a peak of 0.5
    Options o = options_defaults();
    o.lr = 0.5; o.lr_schedule = schedule; o.steps = steps; o.warmup_steps = warmup; o.final_lr_fraction = final;
    ALL(learning_rate(&o, (long long)i))
}
void scales(double* y, int* bad, const unsigned char* finite, size_t n, double scale, long interval) { // after each step
    LossScaler s = { .scale = scale, .interval = interval };
    for (size_t i = 0; i < n; i++) {
        loss_scaler_update(&s, finite[i]);
        y[i] = s.scale; bad[i] = s.bad_in_a_row;
    }
}
void first_scale(double* scale_and_interval) { // by --loss-scale 4096 --loss-scale-interval 7
    Options o = options_defaults();
    o.loss_scale = 4096; o.loss_scale_interval = 7;
    LossScaler s = loss_scaler_init(&o);
    scale_and_interval[0] = s.scale; scale_and_interval[1] = (double)s.interval;
}
void draws(int* y, const float* logits, int V, double temperature, long top_k, size_t n) { // u goes evenly through [0,1)
    ALL(sample_token(logits, V, temperature, top_k, (float)(((double)i + 0.5) / (double)n)))
}
bool kth_is(const float* logits, int V, long k, float x) { return kth_largest(logits, V, k) == float_order(x); }
bool fitted(double* line, const double* bytes, const double* seconds, size_t n) { // (2) alpha and beta
    Fit f = { 0 };
    for (size_t i = 0; i < n; i++) fit_add(&f, bytes[i], seconds[i]);
    bool found = fit_solve(&f, &line[0], &line[1]);
    fit_free(&f);
    return found;
}

// ---- sums over ranks ----
void add_rows(void* out, const void* const* rows, int N, size_t n, CommType type) { comm_add_rows(out, rows, N, n, type); }

// ---- files of tensors ----
// Sets the rank, elements, begin and end of each (n, 4); returns how many tensors there are.
int open_tensors(const char* path, long* facts, const char* names) {
    SafeTensors s;
    safetensors_open(&s, path, "find another");
    char* copy = xstrdup(names);
    for (char* name = strtok(copy, " "); name; name = strtok(NULL, " "), facts += 4) {
        const SafeTensor* t = safetensors_find(&s, name);
        const long is[] = { t ? t->rank : -1, t ? (long)t->elements : 0, t ? (long)t->begin : 0, t ? (long)t->end : 0 };
        memcpy(facts, is, sizeof is);
    }
    int count = s.count;
    free(copy);
    safetensors_close(&s);
    return count;
}
int create_tensors(const char* path, long rows, long cols) { // one in each precision, the last of one dimension; returns 0 or errno
    char names[3][5] = { "fp32", "bf16", "fp16" };
    const SafeTensor wanted[3] = { safetensor_wanted(names[0], DTYPE_F32, (size_t)rows, (size_t)cols),
                                   safetensor_wanted(names[1], DTYPE_BF16, (size_t)rows, (size_t)cols),
                                   safetensor_wanted(names[2], DTYPE_F16, (size_t)(rows * cols), 0) };
    SafeTensors s;
    json_t* metadata = json_pack("{s:s}", "format", "test");
    bool made = safetensors_create(&s, path, wanted, 3, metadata);
    int reason = made ? 0 : errno;
    if (made) require(safetensors_sync(&s) && safetensors_close(&s), "%s: was not written", path);
    json_decref(metadata);
    return reason;
}
void write_tensor(const char* path, const char* name, size_t begin, size_t n, const void* data, DType from) {
    SafeTensors s;
    safetensors_open_with(&s, path, O_RDWR, "");
    bool written = safetensors_write(&s, safetensors_find(&s, name), begin, n, data, from);
    require(safetensors_close(&s) && written, "%s: was not written", path);
}
// The file loses so many bytes once it is open.
void read_tensor(void* out, const char* path, const char* name, size_t begin, size_t n, DType as, long lost) {
    SafeTensors s;
    safetensors_open(&s, path, "find another");
    require(lost == 0 || truncate(path, (off_t)s.file_size - lost) == 0, "%s: cannot be cut", path);
    safetensors_read(&s, safetensors_find(&s, name), begin, n, out, as);
    safetensors_close(&s);
}

// ---- the model's tensors ----
bool named_model(const char* name, GPT2Config* c) { return gpt2_named_config(name, c); }
size_t parameters_of(GPT2Config c) { return gpt2_num_parameters(c); }
TensorInfo tensor_of(GPT2Config c, int u, int i) { return unit_tensor(c, u, i); }
TensorRuns runs_of(GPT2Config c, int u, int i, int part, int parts) { return tensor_part(c, u, i, part, parts); }
ParamRange range_of(GPT2Config c, int u, int part, int parts) { return param_range_part(c, u, part, parts); }
void initial_weights(float* y, GPT2Config c, uint64_t seed, int u, size_t begin, size_t end) {
    unit_init_weights(c, seed, u, begin, end, y);
}

// ---- pieces that ranks have of a model: those of all ranks, one rank after another, `counts` of each. Ranks take turns ----
void set_weights(const ParamRange* p, int n, GPT2Config c, uint64_t seed) {
    param_ranges_set_weights(p, n, c, seed, NULL, CHECKPOINT_MODEL);
}
static TrainState state_at(long step, GPT2Config c) {
    static char options[] = "{\"lr\":0.1}";
    return (TrainState){ .config = c, .dtype = FLOATX_DTYPE, .has_optimizer = true, .step = step, .epoch = 3, .position = 17,
                         .tokens = step * 96, .seed = 1337, .adamw_t = step - 1, .loss_scale = 65536.5, .good_steps = step / 2,
                         .seq_len = 3, .options = options, .data_sum = step % 2 ? 0 : 0xfedc }; // older checkpoints have none
}
// As ranks_saving_begin and ranks_saving_end. The optimizer is Muon if a piece has its momentum.
void save_pieces(const char* out, const ParamRange* p, const int* counts, int ranks, GPT2Config c, bool sharded, long step, long keep) {
    TrainState s = state_at(step, c);
    CheckpointWriter first, w;
    memset(&first, 0, sizeof first);
    for (int q = 0, k = 0; q < ranks; q++) for (int i = 0; i < counts[q]; i++, k++) if (p[k].momentum) s.is_muon = true;
    if (sharded) checkpoint_begin_sharded(out, &s);
    else checkpoint_begin(&first, out, &s);
    for (int q = 0; q < ranks; p += counts[q++]) {
        CheckpointWriter* writer = q == 0 ? &first : &w;
        SaveShare share = { .writer = q, .writers = ranks, .sharded = sharded };
        if (sharded) param_ranges_attach_shard(p, counts[q], writer, out, &s, share);
        else if (q > 0) checkpoint_attach(&w, out, &s);
        param_ranges_write(p, counts[q], writer);
        if (q == 0) continue;
        checkpoint_detach(&w);
        checkpoint_sums_add(&first.sums, &w.sums);
    }
    ranks_checkpoint_commit(&first);
    checkpoint_prune(out, step, keep);
}
// Returns how many elements of these weights were read: the masters and all else that a resumed run needs, or the model.
size_t load_pieces(const char* path, ParamRange* p, const int* counts, int ranks, bool resumes) {
    CheckpointReader first, r;
    for (int q = 0; q < ranks; p += counts[q++]) {
        CheckpointReader* reader = q == 0 ? &first : &r;
        checkpoint_open(reader, path);
        if (resumes) param_ranges_load(p, counts[q], reader);
        else param_ranges_set_weights(p, counts[q], reader->state.config, 0, reader, CHECKPOINT_MODEL);
        if (q == 0) continue;
        checkpoint_sums_add(&first.sums, &r.sums);
        checkpoint_close(&r);
    }
    size_t elements = first.sums.elements[resumes ? CHECKPOINT_MASTER : CHECKPOINT_MODEL];
    checkpoint_close(&first); // compares checksums
    return elements;
}

// Reads all of a checkpoint, in pieces: with Muon, m and v of the first elements of a block's unit, and the momentum of the others.
void read_checkpoint(const char* path) {
    CheckpointReader r;
    checkpoint_open(&r, path);
    for (int part = 0; part < CHECKPOINT_PARTS; part++) for (int u = 0; u < gpt2_num_units(r.state.config); u++) {
        float host[100];
        size_t n = unit_elements(r.state.config, u), with_m = r.state.is_muon && u > 0 ? unit_no_decay(r.state.config, u) : n;
        size_t begin = part == CHECKPOINT_MOMENTUM ? with_m : 0;
        if (part == CHECKPOINT_M || part == CHECKPOINT_V) n = with_m;
        for (size_t piece; begin < n; begin += piece) {
            piece = size_min(n - begin, 1 + philox(5, (uint64_t)part, begin).x[0] % 100);
            checkpoint_read_unit(&r, (CheckpointPart)part, u, begin, begin + piece, host);
        }
    }
    checkpoint_close(&r);
}
void read_part(const char* path, int part, int u, size_t begin, size_t end) {
    CheckpointReader r;
    float host[100];
    checkpoint_open(&r, path);
    checkpoint_read_unit(&r, (CheckpointPart)part, u, begin, end, host);
    checkpoint_close(&r);
}
// A run with one of the optimizers resumes.
void resume_with(const char* path, bool is_muon) {
    CheckpointReader r;
    checkpoint_open(&r, path);
    checkpoint_require_optimizer(&r, is_muon);
    checkpoint_close(&r);
}
// Weights only, all units' one after another, in any precision at exactly this path; and as they are read.
void save_weights(const char* path, GPT2Config c, DType dtype, const float* values) {
    TrainState s = state_at(1, c);
    CheckpointWriter w;
    void* stored = xcalloc(gpt2_num_elements(c), sizeof(float));
    s.has_optimizer = false;
    s.dtype = dtype;
    checkpoint_begin_at(&w, path, &s);
    for (int u = 0; u < gpt2_num_units(c); values += unit_elements(c, u++)) {
        convert_dtype(stored, dtype, values, DTYPE_F32, unit_elements(c, u));
        checkpoint_write_unit(&w, CHECKPOINT_MODEL, u, 0, unit_elements(c, u), stored);
    }
    checkpoint_commit(&w);
    free(stored);
}
void read_weights(float* values, const char* path) {
    CheckpointReader r;
    checkpoint_open(&r, path);
    for (int u = 0; u < gpt2_num_units(r.state.config); values += unit_elements(r.state.config, u++))
        checkpoint_read_unit(&r, CHECKPOINT_MODEL, u, 0, unit_elements(r.state.config, u), values);
    checkpoint_close(&r);
}
// One writer of step 2 in fp32, which writes elements of a unit; or (end 0) it writes none, and says that it has written all. Its ranges
// are [0, ends) of the units, or of shard 1 from there on. shards 0: whole files.
void write_wrongly(const char* out, GPT2Config c, int shard, int shards, bool begins, const size_t* ends, int part, int u, size_t begin,
                   size_t end) {
    TrainState s = state_at(2, c);
    CheckpointRange ranges[MAX_UNITS];
    CheckpointWriter w;
    float zeros[100] = { 0 };
    for (int k = 0; k < gpt2_num_units(c); k++)
        ranges[k] = shard ? (CheckpointRange){ k, ends[k], unit_elements(c, k) } : (CheckpointRange){ k, 0, ends[k] };
    if (begins && shards == 0) checkpoint_begin(&w, out, &s);
    if (begins && shards > 0) checkpoint_begin_sharded(out, &s);
    if (shards > 0) checkpoint_attach_shard(&w, out, &s, shard, shards, ranges, gpt2_num_units(c));
    if (end > 0) { checkpoint_write_unit(&w, (CheckpointPart)part, u, begin, end, zeros); return; }
    for (int k = 0; k < CHECKPOINT_PARTS; k++) w.sums.elements[k] = checkpoint_part_elements(&s, (CheckpointPart)k);
    ranks_checkpoint_commit(&w);
}
const char* newest_checkpoint(const char* out) { return checkpoint_newest(out); }

// ---- layouts of fully sharded parameters ----
static Layout layout; // of the last call
static Sharding sharding;
static GPT2Config model;
// Sets (units of the model, 6) numbers of each group, returns how many groups there are.
int layout_make(size_t* groups, GPT2Config c, long wrap, int halves, int kind, long limit, int S, size_t alignment) {
    model = c;
    sharding = (Sharding){ .wrap_blocks = wrap, .wrap_halves = halves, .sharding = kind, .shards = S, .limit_all_gathers = limit };
    memset(&layout, 0xab, sizeof layout); // whatever was there before
    layout_group(&layout, &sharding, c);
    for (int k = 0; k < layout.num_groups; k++) { // as train_gpt2_fsdp.cu cuts them
        Group* g = &layout.groups[k];
        g->shard = (Shard){ round_up(ceil_div(g->elements, (size_t)S), alignment), layout.own_elements };
        layout.own_elements += g->shard.n;
        const size_t is[] = { (size_t)g->first_unit, (size_t)g->num_units, g->elements, (size_t)g->tensors, g->shard.n, g->shard.offset };
        memcpy(groups + 6 * k, is, sizeof is);
        require(g->buffer == NO_BUFFER, "group %d has buffer %d", k, g->buffer);
    }
    return layout.num_groups;
}
void layout_units(size_t* units) { // (units of the model, 3)
    for (int u = 0; u < layout.num_units; u++) {
        units[3 * u] = layout.units[u].offset; units[3 * u + 1] = layout.units[u].size; units[3 * u + 2] = (size_t)layout.group_of[u];
    }
}
void layout_pieces(size_t* pieces, int rank) { // (units of the model, 4) a rank's elements of each unit, and their place
    layout.shard_number = rank;
    for (int u = 0; u < layout.num_units; u++) {
        ParamRange p = { 0 };
        size_t at = 0;
        require(!layout_range(&layout, model, u, &p, &at) || (p.unit == u && p.parts == 1 && p.n > 0), "unit %d is another", u);
        const size_t is[] = { p.begin, p.n, p.no_decay, at };
        memcpy(pieces + 4 * u, is, sizeof is);
    }
}
size_t own_elements(void) { return layout.own_elements; }
int gather_buffers(void) { return layout_gather_buffers(&layout, &sharding); }
size_t gather_buffer(int r) { return gather_buffer_shard(&layout, &sharding, r); }

// ---- the log of a run of 300 steps ----
static Options log_options;
static OptionTable log_table;
static Logger run_log;
int log_open(const char* out, long resumed_step, json_int_t world_size) { // returns how many options there are
    log_options = options_defaults();
    log_table = options_table("train_gpt2_test", "a test");
    options_common(&log_table, &log_options);
    log_options.steps = 300; log_options.log_every = 10; log_options.prompt = "caf\xE9"; // Latin-1
    logger_open(&run_log, &log_table, &log_options, out, resumed_step, json_pack("{s:I}", "world_size", world_size));
    return log_table.count;
}
void log_step(StepLog s) { logger_step(&run_log, &s); }
void log_eval(long step, double per_token, double per_byte) { logger_eval(&run_log, step, (EvalLoss){ per_token, per_byte }); }
void log_say(const char* text) { logger_say("%s", text); }
void log_ranks(int ranks) { run_log.ranks = ranks; }
void log_to(const char* path) { run_log.file = fopen(path, "w"); }
void log_on_terminal(bool is_shown) { // as if every step took 100 s; is_shown: the live line was just rewritten
    run_log.terminal = true; run_log.every = 1000;
    run_log.last_time = now_seconds() - 100;
    run_log.last_shown = is_shown ? now_seconds() + 1000 : 0;
}
void log_close(void) { logger_close(&run_log); }
double norm_logged(double norm) { return logged_norm(norm); }
