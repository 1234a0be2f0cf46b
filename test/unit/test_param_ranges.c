// test_param_ranges.c - a model that is cut into pieces, between ranks or within tensors, has the same weights, and a checkpoint
// with the same bytes (llmc/save/param_ranges.h). Ranks that share a checkpoint take turns in one process.
#include "../../llmc/save/ranks_checkpoint.h"
#include "test_folder.h"
#include "world_alone.h"

static Comm world; // of one rank
static Control control;

// max_T, V, Vp, L, NH, C
static const GPT2Config small = { 8, 50, 128, 2, 4, 16 };  // 4 parts of wte: all, some or none of their rows are stored
static const GPT2Config odd = { 3, 129, 256, 3, 1, 13 };
static const GPT2Config large = { 4, 33000, 33024, 1, 4, 64 }; // half of wte is still more than STAGED

void before_all(void) { world_alone(&world, &control); }
void after_all(void) { world_end(&world); }

// ---- what a model holds, unit by unit ----
enum { MOST_UNITS = 7, SEED = 5 }; // of the initial weights
// Values of all parts of a checkpoint. MODEL: the masters, rounded as floatX.
typedef struct { GPT2Config c; float* of[CHECKPOINT_PARTS][MOST_UNITS]; } Values; // (unit) owned

#define VALUES FREED_BY(values_free) Values
static void values_free(Values* v) {
    for (int u = 0; u < gpt2_num_units(v->c); u++) for (int part = 0; part < CHECKPOINT_PARTS; part++) free(v->of[part][u]);
}
// Initial weights, without moments; or random numbers that 16 bits cannot hold, except in the padding of wte, which is 0.
static Values values_make(GPT2Config c, uint64_t seed, bool initial) {
    Values v = { c, { { NULL } } };
    for (int u = 0; u < gpt2_num_units(c); u++) for (int part = CHECKPOINT_PARTS - 1; part >= 0; part--) {
        size_t n = unit_elements(c, u), stored = n - (u == 0 ? (size_t)(c.Vp - c.V) * (size_t)c.C : 0);
        float* values = v.of[part][u] = (float*)xcalloc(n, sizeof(float));
        if (initial && part == CHECKPOINT_MASTER) unit_init_weights(c, seed, u, 0, n, values);
        for (size_t k = 0; k < stored && part != CHECKPOINT_MODEL && !initial; k++)
            values[k] = random_normal(seed, (uint64_t)(10 * part + u), k);
        for (size_t k = 0; k < n && part == CHECKPOINT_MODEL; k++)
            values[k] = to_float(to_floatX(v.of[CHECKPOINT_MASTER][u][k]));
    }
    return v;
}

// Returns true if part `part` of `parts` has element e of a tensor. All of gpt2.h's runs of elements follow from this.
static bool has_element(TensorInfo t, size_t e, int part, int parts) {
    size_t cols = t.cols ? t.cols : 1, row = e / cols, p = (size_t)part, N = (size_t)parts;
    switch (t.cut) {
        case CUT_OUTPUTS: return row / (t.rows / N) == p;
        case CUT_HEADS: return row % (t.rows / 3) / (t.rows / 3 / N) == p;
        case CUT_INPUTS: return e % cols / (cols / N) == p;
        default: return true;
    }
}
// Elements of unit u that a part has, by place in the unit, into a new array. Returns how many.
static size_t part_places(GPT2Config c, int u, int part, int parts, size_t** places) {
    size_t n = 0;
    *places = (size_t*)xcalloc(unit_elements(c, u), sizeof(size_t));
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        for (size_t e = 0; e < tensor_elements(t); e++) if (has_element(t, e, part, parts)) (*places)[n++] = t.offset + e;
    }
    return n;
}

// ---- a rank's pieces ----
enum { MOST_PIECES = 48, GUARD = 64, FILL = 0x5a }; // bytes around each array, and in arrays that nothing has written
typedef enum { AS_PARAMS, AS_MASTER, AS_BOTH, STORED_AS } StoredAs; // which of params and master there is
// Owns its pieces' memory, and the places that its part has of each unit.
typedef struct { GPT2Config c; int count; ParamRange ranges[MOST_PIECES]; size_t* places[MOST_UNITS]; } Rank;

static char* guarded_alloc(bool on_host, size_t bytes) {
    char* p = on_host ? (char*)offload_alloc(bytes + 2 * GUARD) : (char*)device_alloc(bytes + 2 * GUARD, MEMORY_PARAMETERS);
    memset(p, FILL, bytes + 2 * GUARD); // the CPU's device memory is the host's
    return p + GUARD;
}
static void guarded_free(const ParamRange* p, void* memory, size_t element) {
    if (memory == NULL) return;
    const unsigned char* bytes = (unsigned char*)memory - GUARD;
    for (size_t i = 0; i < GUARD; i++) assert_true(bytes[i] == FILL && bytes[GUARD + p->n * element + i] == FILL); // written beside a piece
    if (p->on_host) offload_free((char*)memory - GUARD);
    else device_free((char*)memory - GUARD);
}

static int compare_places(const void* a, const void* b) {
    size_t x = *(const size_t*)a, y = *(const size_t*)b;
    return x < y ? -1 : x > y;
}
// How a rank's units are cut: it has a share, cut at random places, of a part of each, in so many pieces, some of them empty.
typedef struct { int part, parts, share, shares, pieces; uint64_t seed; StoredAs as; bool on_host; } Cut;
static const Cut whole = { 0, 1, 0, 1, 1, 0, AS_BOTH, false };

static void rank_make(Rank* r, GPT2Config c, Cut cut) {
    memset(r, 0, sizeof *r);
    r->c = c;
    for (int u = 0; u < gpt2_num_units(c); u++) {
        size_t n = part_places(c, u, cut.part, cut.parts, &r->places[u]), ends[MOST_PIECES] = { 0 };
        int count = cut.shares * cut.pieces;
        for (int i = 0; i < count; i++) ends[i] = i == 0 ? n : philox(cut.seed, (uint64_t)u, (uint64_t)i).x[0] % (n + 1);
        if (count > 2 && cut.seed % 3 == 0) ends[1] = 0; // the first piece is empty
        if (count > 2 && cut.seed % 3 == 1) ends[1] = n; // the last one is
        qsort(ends, (size_t)count, sizeof *ends, compare_places);
        for (int i = cut.share * cut.pieces; i < (cut.share + 1) * cut.pieces; i++) {
            size_t begin = i == 0 ? 0 : ends[i - 1];
            ParamRange p = param_range(c, u, begin, ends[i] - begin);
            p.part = cut.part;
            p.parts = cut.parts;
            p.on_host = cut.on_host;
            if (cut.as != AS_MASTER) p.params = (floatX*)guarded_alloc(p.on_host, p.n * sizeof(floatX));
            if (cut.as != AS_PARAMS || NEEDS_MASTER) p.master = (float*)guarded_alloc(p.on_host, p.n * sizeof(float));
            p.m = (float*)guarded_alloc(p.on_host, p.n * sizeof(float));
            p.v = (float*)guarded_alloc(p.on_host, p.n * sizeof(float));
            assert_true(r->count < MOST_PIECES);
            r->ranges[r->count++] = p;
        }
    }
}
typedef struct { int n; Rank* of; } Ranks; // (n) one rank for each share of each part, owned
#define RANKS FREED_BY(ranks_free) Ranks
static Ranks ranks_make(GPT2Config c, Cut cut) {
    int n = cut.parts * cut.shares;
    Ranks ranks = { n, (Rank*)xcalloc((size_t)n, sizeof(Rank)) };
    for (int q = 0; q < n; q++) {
        cut.part = q / cut.shares;
        cut.share = q % cut.shares;
        rank_make(&ranks.of[q], c, cut);
    }
    return ranks;
}
static void ranks_free(Ranks* ranks) {
    for (Rank* r = ranks->of; r < ranks->of + ranks->n; r++) {
        for (ParamRange* p = r->ranges; p < r->ranges + r->count; p++) {
            guarded_free(p, p->params, sizeof(floatX));
            guarded_free(p, p->master, sizeof(float));
            guarded_free(p, p->m, sizeof(float));
            guarded_free(p, p->v, sizeof(float));
        }
        for (int u = 0; u < gpt2_num_units(r->c); u++) free(r->places[u]);
    }
    free(ranks->of);
}

// Copies values into a rank's pieces.
static void rank_fill(Rank* r, const Values* values) {
    for (ParamRange* p = r->ranges; p < r->ranges + r->count; p++) {
        for (size_t k = 0; k < p->n; k++) {
            size_t place = r->places[p->unit][p->begin + k];
            if (p->params) p->params[k] = to_floatX(values->of[CHECKPOINT_MASTER][p->unit][place]);
            if (p->master) p->master[k] = values->of[CHECKPOINT_MASTER][p->unit][place];
            p->m[k] = values->of[CHECKPOINT_M][p->unit][place];
            p->v[k] = values->of[CHECKPOINT_V][p->unit][place];
        }
    }
}
static bool is_untouched(const void* memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) if (((const unsigned char*)memory)[i] != FILL) return false;
    return true;
}
static void assert_bits(const ParamRange* p, const char* what, size_t k, const void* value, float expected) {
    if (memcmp(value, &expected, sizeof expected) != 0)
        fail_msg("unit %d, part %d of %d, from %zu on: %s %zu is wrong", p->unit, p->part, p->parts, p->begin, what, k);
}
// What pieces hold must be these values, to the bit: as masters those of `weights`, and moments, or else nothing in their place.
static void assert_rank(const Rank* r, const Values* values, CheckpointPart weights, bool has_moments) {
    for (const ParamRange* p = r->ranges; p < r->ranges + r->count; p++) {
        for (size_t k = 0; k < p->n; k++) {
            size_t place = r->places[p->unit][p->begin + k];
            float rounded = p->params ? to_float(p->params[k]) : 0;
            if (p->params) assert_bits(p, "parameter", k, &rounded, values->of[CHECKPOINT_MODEL][p->unit][place]);
            if (p->master) assert_bits(p, "master", k, &p->master[k], values->of[weights][p->unit][place]);
            if (has_moments) assert_bits(p, "m", k, &p->m[k], values->of[CHECKPOINT_M][p->unit][place]);
            if (has_moments) assert_bits(p, "v", k, &p->v[k], values->of[CHECKPOINT_V][p->unit][place]);
        }
        if (!has_moments) assert_true(is_untouched(p->m, p->n * sizeof(float)) && is_untouched(p->v, p->n * sizeof(float)));
    }
}

// ---- checkpoints ----
static TrainState state_of(GPT2Config c) {
    static char options[] = "{\"lr\":0.1}";
    return (TrainState){ .config = c, .dtype = FLOATX_DTYPE, .has_optimizer = true, .step = 7, .loss_scale = 1, .seq_len = c.max_T,
                         .options = options };
}
#define step_folder(out) in_folder("%s/step_00000007", out)

// Ranks that are cut so save these values: ranks_pieces_save of ranks that take turns.
static void save_cut(const char* out, const Values* v, Cut cut, bool sharded) {
    RANKS ranks = ranks_make(v->c, cut);
    TrainState s = state_of(v->c);
    CheckpointWriter first, w;
    const char* path = in_folder("%s", out);
    memset(&first, 0, sizeof first);
    if (sharded) checkpoint_begin_sharded(path, &s);
    else checkpoint_begin(&first, path, &s);
    for (int q = 0; q < ranks.n; q++) {
        Rank* rank = &ranks.of[q];
        CheckpointWriter* writer = q == 0 ? &first : &w;
        SaveShare share = { q, ranks.n, sharded, NULL, NULL };
        rank_fill(rank, v);
        if (sharded) param_ranges_attach_shard(rank->ranges, rank->count, writer, path, &s, share);
        else if (q > 0) checkpoint_attach(&w, path, &s);
        param_ranges_write(rank->ranges, rank->count, writer);
        if (q == 0) continue;
        checkpoint_detach(&w);
        checkpoint_sums_add(&first.sums, &w.sums);
    }
    ranks_checkpoint_commit(&first, 0);
    for (int q = 0; q < ranks.n; q++) assert_rank(&ranks.of[q], v, CHECKPOINT_MASTER, true); // saving changes nothing
}
// Ranks that are cut so load what has these values: run_load of ranks that take turns. weights: CHECKPOINT_MASTER for all that a
// resumed run needs, or CHECKPOINT_MODEL.
static void load_cut(const char* out, const Values* v, Cut cut, CheckpointPart weights) {
    RANKS ranks = ranks_make(v->c, cut);
    CheckpointReader first, r;
    for (int q = 0; q < ranks.n; q++) {
        const Rank* rank = &ranks.of[q];
        CheckpointReader* reader = q == 0 ? &first : &r;
        checkpoint_open(reader, step_folder(out));
        if (weights == CHECKPOINT_MASTER) param_ranges_load(rank->ranges, rank->count, reader);
        else param_ranges_set_weights(rank->ranges, rank->count, rank->c, 0, reader, weights);
        if (q == 0) continue;
        checkpoint_sums_add(&first.sums, &r.sums);
        checkpoint_close(&r);
    }
    assert_int_equal(first.sums.elements[weights], gpt2_num_parameters(first.state.config)); // or their checksum is not compared
    checkpoint_close(&first);
    for (int q = 0; q < ranks.n; q++) assert_rank(&ranks.of[q], v, weights, weights == CHECKPOINT_MASTER);
}
static char* file_of(const char* out, const char* name, size_t* n) {
    return file_read((FileSource){ in_folder("%s/step_00000007/%s", out, name), "" }, SIZE_MAX, n);
}
static void assert_same_files(const char* out, const char* other) {
    static const char* const names[] = { "model.safetensors", "optimizer.safetensors", "state.json" };
    for (int i = 0; i < 3; i++) {
        size_t n, m;
        FREED char *a = file_of(out, names[i], &n), *b = file_of(other, names[i], &m);
        if (n != m || memcmp(a, b, n) != 0) fail_msg("%s of %s and of %s differ", names[i], out, other);
    }
}

// Ranks with this cut begin with the initial weights, and save the files of one that has it all, or their own; others load both.
static void check_cut(const Values* initial, const Values* v, Cut cut, Cut other) {
    RANKS ranks = ranks_make(v->c, cut);
    for (Rank* r = ranks.of; r < ranks.of + ranks.n; r++) {
        param_ranges_set_weights(r->ranges, r->count, v->c, SEED, NULL, CHECKPOINT_MODEL);
        assert_rank(r, initial, CHECKPOINT_MASTER, false);
    }
    save_cut("cut", v, cut, false);
    assert_same_files("whole", "cut");
    for (int sharded = 0; sharded < 2; sharded++) {
        if (sharded) save_cut("cut", v, cut, true);
        load_cut("cut", v, cut, CHECKPOINT_MASTER);
        load_cut("cut", v, other, CHECKPOINT_MASTER);
        load_cut("cut", v, other, CHECKPOINT_MODEL);
    }
}
TEST(initial_weights_and_a_checkpoints_bytes_are_the_same_from_any_ranks_and_it_loads_into_any_others) {
    const GPT2Config shapes[] = { small, odd, large };
    for (int s = 0; s < 3; s++) {
        VALUES initial = values_make(shapes[s], SEED, true);
        VALUES v = values_make(shapes[s], 12, false);
        save_cut("whole", &v, whole, false);
        for (uint64_t seed = 0; seed < 10 && s < 2; seed++) {
            Cut cut = { 0, 1, 0, 1 + (int)seed % 4, 1 + (int)seed % 5, seed, (StoredAs)(seed % STORED_AS), seed % 2 == 0 };
            check_cut(&initial, &v, cut, (Cut){ 0, 1, 0, 1 + (int)seed % 5, 1, 3, AS_BOTH, true });
        }
        for (int k = 0; k < 6 && s == 0; k++) { // matrices in 2 or 4 parts, each with 1 to 3 ranks
            Cut cut = { 0, k % 2 ? 4 : 2, 0, 1 + k / 2, 1 + k % 4, (uint64_t)k, (StoredAs)(k % STORED_AS), k == 2 };
            check_cut(&initial, &v, cut, k < 2 ? whole : (Cut){ 0, 6 - cut.parts, 0, cut.shares, 2, 1, AS_BOTH, false });
        }
        for (int parts = 1; parts <= 2 && s == 2; parts++) // larger than what is staged
            check_cut(&initial, &v, (Cut){ 0, parts, 0, 1, 1, 0, parts == 1 ? AS_BOTH : AS_MASTER, parts == 1 }, whole);
    }
}

// ---- what is not as it should be ----
// Saves all pieces of a model but one, or one of them twice. change: the number of pieces more or less.
static void save_alone(const Values* v, int change) {
    RANKS ranks = ranks_make(small, whole);
    Rank* r = ranks.of;
    TrainState s = state_of(small);
    rank_fill(r, v);
    r->ranges[r->count] = r->ranges[r->count - 1];
    SaveShare share = { 0, 1, false, NULL, NULL };
    ranks_pieces_save(&world, in_folder("alone"), &s, 0, share, r->ranges, r->count + change);
}
TEST(pieces_that_are_not_the_model_are_no_checkpoint) {
    VALUES v = values_make(small, 18, false);
    expect_error(save_alone(&v, -1), "the ranks' shares do not add up to the model");
    expect_error(save_alone(&v, 1), "the ranks' shares do not add up to the model");
    assert_null(checkpoint_newest(in_folder("alone")));
    save_alone(&v, 0);
    load_cut("alone", &v, whole, CHECKPOINT_MASTER);
}
