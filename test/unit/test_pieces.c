// test_pieces.c - a model that is cut into pieces, between ranks or within tensors, has the same weights, and a checkpoint
// with the same bytes (llmc/save/pieces.h). Ranks that share a checkpoint take turns in one process.
#include "../../llmc/save/pieces.h"
#include "test_folder.h"

static Comm world; // of one rank
static Control control;

// max_T, V, Vp, L, NH, C
static const GPT2Config small = { 8, 50, 128, 2, 4, 16 };  // 4 parts of wte: all, some or none of their rows are stored
static const GPT2Config odd = { 3, 129, 256, 3, 1, 13 };
static const GPT2Config large = { 4, 33000, 33024, 1, 4, 64 }; // half of wte is still more than STAGED

void before_all(void) {
    CommOptions o = { .timeout = 1, .out = "" };
    device_init(0, 1);
    omp_set_num_threads(1); // a child of this process would wait for threads that it does not have
    comm_init(&world, &o, ranks_alone(), &control);
}
void after_all(void) {
    comm_free(&world);
    device_shutdown();
}

// ---- what a model holds, unit by unit ----

enum { MOST_UNITS = 4 };
// Values of all parts of a checkpoint. MODEL: the masters, rounded as floatX.
typedef struct { GPT2Config c; float* of[CHECKPOINT_PARTS][MOST_UNITS]; } Values; // (unit) owned

static void values_init(Values* v, GPT2Config c) {
    memset(v, 0, sizeof *v);
    v->c = c;
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        for (int u = 0; u <= c.L; u++) v->of[part][u] = (float*)xcalloc(unit_elements(c, u), sizeof(float));
}
static void values_free(Values* v) {
    for (int u = 0; u <= v->c.L; u++) for (int part = 0; part < CHECKPOINT_PARTS; part++) free(v->of[part][u]);
}
static void values_round(Values* v) {
    for (int u = 0; u <= v->c.L; u++)
        for (size_t k = 0; k < unit_elements(v->c, u); k++)
            v->of[CHECKPOINT_MODEL][u][k] = to_float(to_floatX(v->of[CHECKPOINT_MASTER][u][k]));
}
// Random numbers that 16 bits cannot hold, except in the padding of wte, which is 0.
static void values_make(Values* v, GPT2Config c, uint64_t seed) {
    size_t stored = unit_elements(c, 0) - (size_t)(c.Vp - c.V) * (size_t)c.C;
    values_init(v, c);
    for (int u = 0; u <= c.L; u++)
        for (int part = CHECKPOINT_MASTER; part < CHECKPOINT_PARTS; part++)
            for (size_t k = 0; k < (u == 0 ? stored : unit_elements(c, u)); k++)
                v->of[part][u][k] = random_normal(seed, (uint64_t)(10 * part + u), k);
    values_round(v);
}
static void values_initial(Values* v, GPT2Config c, uint64_t seed) {
    values_init(v, c);
    for (int u = 0; u <= c.L; u++) unit_init_weights(c, seed, u, 0, unit_elements(c, u), v->of[CHECKPOINT_MASTER][u]);
    values_round(v);
}

// Returns true if part `part` of `parts` has element e of a tensor. All of gpt2.h's runs of elements follow from this.
static bool has_element(TensorInfo t, size_t e, int part, int parts) {
    size_t cols = t.cols ? t.cols : 1, row = e / cols, p = (size_t)part, N = (size_t)parts;
    switch (t.cut) {
        case CUT_ROWS: return row / (t.rows / N) == p;
        case CUT_HEADS: return row % (t.rows / 3) / (t.rows / 3 / N) == p;
        case CUT_COLUMNS: return e % cols / (cols / N) == p;
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

enum { MOST_PIECES = 32, GUARD = 64, FILL = 0x5a }; // bytes around each array, and in arrays that nothing has written
typedef enum { AS_PARAMS, AS_MASTER, AS_BOTH, STORED_AS } StoredAs; // which of params and master there is
typedef struct { GPT2Config c; int count; Piece pieces[MOST_PIECES]; } Rank; // owns the pieces' memory

static char* guarded_alloc(bool on_host, size_t bytes) {
    char* p = on_host ? (char*)offload_alloc(bytes + 2 * GUARD) : (char*)device_alloc(bytes + 2 * GUARD, MEMORY_PARAMETERS);
    memset(p, FILL, bytes + 2 * GUARD); // the CPU's device memory is the host's
    return p + GUARD;
}
static void guarded_free(const Piece* p, void* memory, size_t element) {
    if (memory == NULL) return;
    const unsigned char* bytes = (unsigned char*)memory - GUARD;
    for (size_t i = 0; i < GUARD; i++) assert_true(bytes[i] == FILL && bytes[GUARD + p->n * element + i] == FILL); // written beside a piece
    if (p->on_host) offload_free((char*)memory - GUARD);
    else device_free((char*)memory - GUARD);
}

static void rank_add(Rank* r, Piece p, StoredAs as) {
    size_t bytes = p.n * sizeof(float);
    if (as != AS_MASTER) p.params = (floatX*)guarded_alloc(p.on_host, p.n * sizeof(floatX));
    if (as != AS_PARAMS || NEEDS_MASTER) p.master = (float*)guarded_alloc(p.on_host, bytes);
    p.m = (float*)guarded_alloc(p.on_host, bytes);
    p.v = (float*)guarded_alloc(p.on_host, bytes);
    assert_true(r->count < MOST_PIECES);
    r->pieces[r->count++] = p;
}
static void rank_free(Rank* r) {
    for (Piece* p = r->pieces; p < r->pieces + r->count; p++) {
        guarded_free(p, p->params, sizeof(floatX));
        guarded_free(p, p->master, sizeof(float));
        guarded_free(p, p->m, sizeof(float));
        guarded_free(p, p->v, sizeof(float));
    }
}

static int compare_places(const void* a, const void* b) {
    size_t x = *(const size_t*)a, y = *(const size_t*)b;
    return x < y ? -1 : x > y;
}
// How a rank's units are cut: part `part` of `parts` of each; of this the rank has share `share` of `shares`, at random
// places, and that in `pieces` pieces, some of them empty.
typedef struct { int part, parts, share, shares, pieces; uint64_t seed; StoredAs as; bool on_host; } Cut;
static const Cut whole = { 0, 1, 0, 1, 1, 0, AS_BOTH, false };

static void rank_make(Rank* r, GPT2Config c, Cut cut) {
    memset(r, 0, sizeof *r);
    r->c = c;
    for (int u = 0; u <= c.L; u++) {
        size_t* places, n = part_places(c, u, cut.part, cut.parts, &places), ends[MOST_PIECES] = { 0 };
        int count = cut.shares * cut.pieces;
        free(places);
        for (int i = 0; i < count; i++) ends[i] = i == 0 ? n : philox(cut.seed, (uint64_t)u, (uint64_t)i).x[0] % (n + 1);
        if (count > 2 && cut.seed % 3 == 0) ends[1] = 0; // the first piece is empty
        if (count > 2 && cut.seed % 3 == 1) ends[1] = n; // the last one is
        qsort(ends, (size_t)count, sizeof *ends, compare_places);
        for (int i = cut.share * cut.pieces; i < (cut.share + 1) * cut.pieces; i++) {
            size_t begin = i == 0 ? 0 : ends[i - 1];
            Piece p = piece_range(c, u, begin, ends[i] - begin);
            p.part = cut.part;
            p.parts = cut.parts;
            p.on_host = cut.on_host;
            rank_add(r, p, cut.as);
        }
    }
}
static Rank* ranks_make(GPT2Config c, Cut cut) { // (parts * shares) one rank for each share of each part
    int n = cut.parts * cut.shares;
    Rank* ranks = (Rank*)xcalloc((size_t)n, sizeof(Rank));
    for (int q = 0; q < n; q++) {
        cut.part = q / cut.shares;
        cut.share = q % cut.shares;
        rank_make(&ranks[q], c, cut);
    }
    return ranks;
}
static void ranks_free(Rank* ranks, int n) {
    for (int q = 0; q < n; q++) rank_free(&ranks[q]);
    free(ranks);
}

// Copies values into a rank's pieces.
static void rank_fill(Rank* r, const Values* values) {
    for (Piece* p = r->pieces; p < r->pieces + r->count; p++) {
        size_t* places;
        part_places(r->c, p->unit, p->part, p->parts, &places);
        for (size_t k = 0; k < p->n; k++) {
            size_t place = places[p->begin + k];
            if (p->params) p->params[k] = to_floatX(values->of[CHECKPOINT_MASTER][p->unit][place]);
            if (p->master) p->master[k] = values->of[CHECKPOINT_MASTER][p->unit][place];
            p->m[k] = values->of[CHECKPOINT_M][p->unit][place];
            p->v[k] = values->of[CHECKPOINT_V][p->unit][place];
        }
        free(places);
    }
}
static bool is_untouched(const void* memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) if (((const unsigned char*)memory)[i] != FILL) return false;
    return true;
}
static void assert_bits(const Piece* p, const char* what, size_t k, const void* value, float expected) {
    if (memcmp(value, &expected, sizeof expected) != 0)
        fail_msg("unit %d, part %d of %d, from %zu on: %s %zu is wrong", p->unit, p->part, p->parts, p->begin, what, k);
}
// What pieces hold must be these values, to the bit. weights: which part of them the masters are. has_moments: m and v are
// set, and not still as rank_make left them.
static void assert_rank(const Rank* r, const Values* values, CheckpointPart weights, bool has_moments) {
    for (const Piece* p = r->pieces; p < r->pieces + r->count; p++) {
        size_t* places;
        part_places(r->c, p->unit, p->part, p->parts, &places);
        for (size_t k = 0; k < p->n; k++) {
            size_t place = places[p->begin + k];
            float rounded = p->params ? to_float(p->params[k]) : 0;
            if (p->params) assert_bits(p, "parameter", k, &rounded, values->of[CHECKPOINT_MODEL][p->unit][place]);
            if (p->master) assert_bits(p, "master", k, &p->master[k], values->of[weights][p->unit][place]);
            if (has_moments) assert_bits(p, "m", k, &p->m[k], values->of[CHECKPOINT_M][p->unit][place]);
            if (has_moments) assert_bits(p, "v", k, &p->v[k], values->of[CHECKPOINT_V][p->unit][place]);
        }
        if (!has_moments) assert_true(is_untouched(p->m, p->n * sizeof(float)) && is_untouched(p->v, p->n * sizeof(float)));
        free(places);
    }
}

// ---- initial weights ----

// Sets the weights of such ranks, and checks them.
static void check_initial(const Values* v, Cut cut, uint64_t seed) {
    int n = cut.parts * cut.shares;
    Rank* ranks = ranks_make(v->c, cut);
    for (int q = 0; q < n; q++) {
        pieces_set_weights(ranks[q].pieces, ranks[q].count, v->c, seed, NULL, CHECKPOINT_MODEL);
        assert_rank(&ranks[q], v, CHECKPOINT_MASTER, false);
    }
    ranks_free(ranks, n);
}
TEST(initial_weights_are_the_units_however_they_are_cut) {
    const GPT2Config shapes[] = { small, odd };
    for (int s = 0; s < 2; s++) {
        Values v;
        values_initial(&v, shapes[s], 5);
        for (int pieces = 1; pieces <= 5; pieces++) for (uint64_t seed = 0; seed < 6; seed++)
            check_initial(&v, (Cut){ 0, 1, 0, 1, pieces, seed, (StoredAs)(seed % STORED_AS), seed % 2 == 1 }, 5);
        values_free(&v);
    }
}

TEST(pieces_may_be_larger_than_what_is_staged) {
    const size_t borders[] = { 0, 1, STAGED, STAGED + 1, 2 * STAGED + 1, unit_elements(large, 0) };
    Values v;
    Rank r;
    values_initial(&v, large, 6);
    assert_true(borders[4] < borders[5]);
    for (int step = 1; step <= 5; step += 4) { // in five pieces, and in one
        memset(&r, 0, sizeof r);
        r.c = large;
        for (int i = 0; i < 5; i += step) rank_add(&r, piece_range(large, 0, borders[i], borders[i + step] - borders[i]), AS_BOTH);
        pieces_set_weights(r.pieces, r.count, large, 6, NULL, CHECKPOINT_MODEL);
        assert_rank(&r, &v, CHECKPOINT_MASTER, false);
        rank_free(&r);
    }
    check_initial(&v, (Cut){ 0, 2, 0, 1, 1, 0, AS_BOTH, true }, 6);
    values_free(&v);
}

TEST(the_parts_of_a_unit_together_have_its_weights) {
    Values v;
    values_initial(&v, small, 7);
    for (int parts = 1; parts <= 4; parts *= 2) {
        size_t* places;
        size_t counted = 0, copied = 0;
        for (int part = 0; part < parts; part++) counted += part_places(small, 1, part, parts, &places), free(places);
        for (int i = 0; i < BLOCK_TENSORS; i++) {
            TensorInfo t = unit_tensor(small, 1, i);
            if (t.cut == CUT_NONE) copied += tensor_elements(t);
        }
        assert_int_equal(copied, 6 * 16); // four of layernorms, two biases that are added once
        assert_int_equal(counted, unit_elements(small, 1) + (size_t)(parts - 1) * copied);
        for (uint64_t seed = 0; seed < 4; seed++)
            check_initial(&v, (Cut){ 0, parts, 0, 1 + (int)seed % 3, 1 + (int)seed, seed, (StoredAs)(seed % STORED_AS), seed % 2 == 0 }, 7);
    }
    values_free(&v);
}

// ---- checkpoints ----

static TrainState state_of(GPT2Config c) {
    static char options[] = "{\"lr\":0.1}";
    return (TrainState){ .config = c, .dtype = FLOATX_DTYPE, .has_optimizer = true, .step = 7, .loss_scale = 1, .seq_len = c.max_T,
                         .options = options };
}
static const char* step_folder(const char* out) {
    char name[64];
    snprintf(name, sizeof name, "%s/step_00000007", out);
    return in_folder(name);
}

// The sums of all ranks, as checkpoint_add_up makes them: n of them, one after another, become the same.
static void sums_add_up(CheckpointSums* sums, int n) {
    ControlBytes* shares = (ControlBytes*)xcalloc((size_t)n, sizeof(ControlBytes));
    for (int q = 0; q < n; q++) shares[q] = control_bytes(&sums[q], sizeof sums[q]);
    ControlBytes all = checkpoint_sum(NULL, shares, n);
    assert_int_equal(all.bytes, sizeof *sums);
    for (int q = 0; q < n; q++) {
        memcpy(&sums[q], all.data, sizeof sums[q]);
        free(shares[q].data);
    }
    free(all.data); free(shares);
}
static CheckpointSums sums_of(const uint64_t checksum[CHECKPOINT_PARTS], const uint64_t elements[CHECKPOINT_PARTS]) {
    CheckpointSums s;
    memcpy(s.checksum, checksum, sizeof s.checksum);
    memcpy(s.elements, elements, sizeof s.elements);
    return s;
}

// pieces_save of n ranks, which take turns.
static void save_in_turn(const char* out, TrainState s, Rank* ranks, int n, bool sharded) {
    CheckpointWriter first, w;
    CheckpointSums* sums = (CheckpointSums*)xcalloc((size_t)n, sizeof(CheckpointSums));
    memset(&first, 0, sizeof first);
    if (sharded) checkpoint_begin_sharded(in_folder(out), &s);
    else checkpoint_begin(&first, in_folder(out), &s);
    for (int q = 0; q < n; q++) {
        CheckpointWriter* writer = q == 0 ? &first : &w;
        SaveShare share = { q, n, sharded, NULL, NULL };
        memset(&w, 0, sizeof w);
        if (sharded) pieces_attach_shard(ranks[q].pieces, ranks[q].count, writer, in_folder(out), &s, share);
        else if (q > 0) checkpoint_attach(&w, in_folder(out), &s);
        pieces_write(ranks[q].pieces, ranks[q].count, writer);
        if (q > 0) checkpoint_detach(&w);
        sums[q] = sums_of(writer->checksum, writer->elements);
    }
    sums_add_up(sums, n);
    memcpy(first.checksum, sums[0].checksum, sizeof first.checksum);
    memcpy(first.elements, sums[0].elements, sizeof first.elements);
    free(sums);
    checkpoint_commit(&first, 0);
}
// run_load of n ranks, which take turns. weights: CHECKPOINT_MASTER for all that a resumed run needs, or CHECKPOINT_MODEL.
// Dies if the checkpoint is damaged.
static void load_in_turn(const char* out, Rank* ranks, int n, CheckpointPart weights) {
    CheckpointReader* readers = (CheckpointReader*)xcalloc((size_t)n, sizeof(CheckpointReader));
    CheckpointSums* sums = (CheckpointSums*)xcalloc((size_t)n, sizeof(CheckpointSums));
    for (int q = 0; q < n; q++) {
        checkpoint_open(&readers[q], step_folder(out));
        if (weights == CHECKPOINT_MASTER) pieces_load(ranks[q].pieces, ranks[q].count, &readers[q]);
        else pieces_set_weights(ranks[q].pieces, ranks[q].count, ranks[q].c, 0, &readers[q], weights);
        sums[q] = sums_of(readers[q].checksum, readers[q].elements);
    }
    sums_add_up(sums, n);
    for (int q = 0; q < n; q++) {
        memcpy(readers[q].checksum, sums[q].checksum, sizeof sums[q].checksum);
        memcpy(readers[q].elements, sums[q].elements, sizeof sums[q].elements);
        require(sums[q].elements[weights] == gpt2_num_parameters(readers[q].state.config),
                "%zu elements were counted", (size_t)sums[q].elements[weights]); // or their checksum is not compared
        checkpoint_close(&readers[q]);
    }
    free(sums); free(readers);
}

// Saves such ranks with these values.
static void save_cut(const char* out, TrainState s, const Values* v, Cut cut, bool sharded) {
    int n = cut.parts * cut.shares;
    Rank* ranks = ranks_make(v->c, cut);
    for (int q = 0; q < n; q++) rank_fill(&ranks[q], v);
    save_in_turn(out, s, ranks, n, sharded);
    ranks_free(ranks, n);
}
// Loads such ranks, and checks what they have.
static void load_cut(const char* out, const Values* v, Cut cut, CheckpointPart weights) {
    int n = cut.parts * cut.shares;
    Rank* ranks = ranks_make(v->c, cut);
    load_in_turn(out, ranks, n, weights);
    for (int q = 0; q < n; q++) assert_rank(&ranks[q], v, weights, weights == CHECKPOINT_MASTER);
    ranks_free(ranks, n);
}
static char* file_of(const char* out, const char* name, size_t* n) {
    char* path = format_string("%s/%s", step_folder(out), name);
    FileSource from = { path, "" };
    char* bytes = file_read(from, SIZE_MAX, n);
    free(path);
    return bytes;
}
static void assert_same_files(const char* out, const char* other) {
    static const char* const names[] = { "model.safetensors", "optimizer.safetensors", "state.json" };
    for (int i = 0; i < 3; i++) {
        size_t n, m;
        char *a = file_of(out, names[i], &n), *b = file_of(other, names[i], &m);
        if (n != m || memcmp(a, b, n) != 0) fail_msg("%s of %s and of %s differ", names[i], out, other);
        free(a); free(b);
    }
}

TEST(a_rank_alone_saves_and_loads) {
    const GPT2Config shapes[] = { small, odd };
    for (int s = 0; s < 2; s++) {
        for (int sharded = 0; sharded < 2; sharded++) {
            Cut cut = { 0, 1, 0, 1, 4, 2, (StoredAs)(1 + s), s == 1 }, other = { 0, 1, 0, 1, 3, 1, AS_BOTH, true };
            TrainState saved = state_of(shapes[s]);
            SaveShare share = { 0, 1, sharded, NULL, NULL };
            Values v;
            Rank* ranks = ranks_make(shapes[s], cut);
            values_make(&v, shapes[s], 11);
            rank_fill(ranks, &v);
            pieces_save(&world, in_folder("alone"), &saved, 0, share, ranks[0].pieces, ranks[0].count);
            assert_rank(ranks, &v, CHECKPOINT_MASTER, true); // saving changes nothing
            load_cut("alone", &v, cut, CHECKPOINT_MASTER);
            load_cut("alone", &v, other, CHECKPOINT_MASTER);
            load_cut("alone", &v, other, CHECKPOINT_MODEL);
            values_free(&v); ranks_free(ranks, 1);
        }
    }
}

TEST(a_checkpoint_has_the_same_bytes_from_any_ranks_and_any_pieces) {
    const GPT2Config shapes[] = { small, odd };
    for (int s = 0; s < 2; s++) {
        Values v;
        values_make(&v, shapes[s], 12);
        save_cut("whole", state_of(shapes[s]), &v, whole, false);
        for (uint64_t seed = 0; seed < 6; seed++) {
            Cut cut = { 0, 1, 0, 1 + (int)seed % 4, 1 + (int)seed % 3, seed, (StoredAs)(seed % STORED_AS), seed % 2 == 0 };
            save_cut("cut", state_of(shapes[s]), &v, cut, false);
            assert_same_files("whole", "cut");
            load_cut("cut", &v, cut, CHECKPOINT_MASTER);
        }
        values_free(&v);
    }
    Cut halves = { 0, 2, 0, 1, 1, 0, AS_MASTER, false }; // pieces larger than what is staged
    Values v;
    values_make(&v, large, 15);
    save_cut("whole", state_of(large), &v, whole, false);
    save_cut("cut", state_of(large), &v, halves, false);
    assert_same_files("whole", "cut");
    load_cut("cut", &v, whole, CHECKPOINT_MASTER);
    load_cut("whole", &v, halves, CHECKPOINT_MASTER);
    values_free(&v);
}

TEST(parts_save_the_files_of_whole_units_and_load_into_any_parts) {
    Values v;
    values_make(&v, small, 14);
    save_cut("whole", state_of(small), &v, whole, false);
    for (int parts = 2; parts <= 4; parts *= 2) {
        for (int shares = 1; shares <= 3; shares++) {
            Cut cut = { 0, parts, 0, shares, 2, (uint64_t)shares, (StoredAs)(shares % STORED_AS), shares == 2 };
            Cut other = cut;
            other.parts = 6 - parts;
            other.as = AS_BOTH;
            save_cut("parts", state_of(small), &v, cut, false);
            assert_same_files("whole", "parts");
            load_cut("parts", &v, whole, CHECKPOINT_MASTER);
            load_cut("parts", &v, other, CHECKPOINT_MASTER);
            load_cut("parts", &v, other, CHECKPOINT_MODEL);
            save_cut("sharded", state_of(small), &v, cut, true);
            load_cut("sharded", &v, other, CHECKPOINT_MASTER);
            load_cut("sharded", &v, other, CHECKPOINT_MODEL);
        }
    }
    for (int writers = 1; writers <= 5; writers++) { // of whole units, with files of their own
        Cut cut = { 0, 1, 0, writers, 2, (uint64_t)writers, AS_MASTER, false }, other = { 0, 1, 0, 6 - writers, 1, 3, AS_BOTH, true };
        save_cut("sharded", state_of(small), &v, cut, true);
        load_cut("sharded", &v, cut, CHECKPOINT_MASTER);
        load_cut("sharded", &v, other, CHECKPOINT_MASTER);
        load_cut("sharded", &v, other, CHECKPOINT_MODEL);
    }
    values_free(&v);
}

// ---- what is not as it should be ----

// Loads the checkpoint "damaged" on ranks of this Cut, the last of which has no pieces: it takes part in the check.
static void load_damaged(Cut c) {
    int n = c.parts * c.shares;
    Rank* ranks = (Rank*)xrealloc(ranks_make(small, c), (size_t)(n + 1) * sizeof(Rank));
    memset(&ranks[n], 0, sizeof ranks[n]);
    ranks[n].c = small;
    load_in_turn("damaged", ranks, n + 1, CHECKPOINT_MASTER);
}
TEST(damage_is_found_by_any_ranks) {
    static Cut cuts[] = {
        { 0, 1, 0, 1, 1, 0, AS_BOTH, false }, { 0, 1, 0, 3, 2, 2, AS_BOTH, true }, { 0, 4, 0, 2, 1, 2, AS_MASTER, false }
    };
    static const char* const names[] = { "model.safetensors", "optimizer.safetensors" };
    for (int damage = -1; damage < 2; damage++) {
        Values v;
        values_make(&v, small, 17);
        save_cut("damaged", state_of(small), &v, whole, false);
        if (damage >= 0) {
            size_t n;
            char *bytes = file_of("damaged", names[damage], &n), *path = format_string("damaged/step_00000007/%s", names[damage]);
            bytes[n - 5] ^= 1; // of a value
            write_file(path, bytes, n);
            free(path); free(bytes);
        }
        for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
            bool is_read = damage == 1 || !NEEDS_MASTER; // a resumed run in 16 bits makes its model from the masters
            if (damage >= 0 && is_read) expect_error(load_damaged(cuts[i]), names[damage], "do not match their checksum");
            else expect_success(load_damaged(cuts[i]));
        }
        values_free(&v);
    }
}

// Saves all pieces of a model but one, or one of them twice. change: the number of pieces more or less.
static void save_badly(int change) {
    Cut cut = { 0, 1, 0, 1, 3, 2, AS_BOTH, false };
    Values v;
    Rank r;
    TrainState s = state_of(small);
    values_make(&v, small, 18);
    rank_make(&r, small, cut);
    rank_fill(&r, &v);
    r.pieces[r.count] = r.pieces[r.count - 1];
    r.count += change;
    SaveShare share = { 0, 1, false, NULL, NULL };
    pieces_save(&world, in_folder("bad"), &s, 0, share, r.pieces, r.count);
}
TEST(pieces_that_are_not_the_model_are_no_checkpoint) {
    expect_error(save_badly(-1), "the ranks' shares do not add up to the model");
    expect_error(save_badly(1), "the ranks' shares do not add up to the model");
    assert_null(checkpoint_newest(in_folder("bad")));
    expect_success(save_badly(0));
    char* newest = checkpoint_newest(in_folder("bad"));
    assert_non_null(newest);
    free(newest);
}

// A file of a rank's own, of *self floats.
static void put_beside(void* self, CheckpointWriter* w) {
    CheckpointErrors errors = { "top-k", 12 };
    char name[] = "state", *path = checkpoint_errors_path(w->temporary, errors, 3);
    SafeTensor wanted = safetensor_wanted(name, DTYPE_F32, *(size_t*)self, 0);
    json_t* metadata = json_object();
    bool made = safetensors_create(&w->files[0], path, &wanted, 1, metadata);
    checkpoint_require_written(w, made && safetensors_sync(&w->files[0]), &w->files[0]);
    json_decref(metadata);
    free(path);
}
static void save_beside(size_t floats) {
    Cut cut = { 0, 1, 0, 1, 3, 2, AS_BOTH, false };
    TrainState s = state_of(small);
    Rank* ranks = ranks_make(small, cut);
    SaveShare share = { 0, 1, false, put_beside, &floats };
    pieces_save(&world, in_folder("beside"), &s, 0, share, ranks[0].pieces, ranks[0].count);
    ranks_free(ranks, 1);
}
TEST(a_file_beside_belongs_to_the_checkpoint) {
    expect_error(save_beside((size_t)1 << 50), "errors_top-k_00003_of_00012.safetensors: cannot be written: ");
    assert_null(checkpoint_newest(in_folder("beside")));
    assert_true(folder_is_free(in_folder("beside"))); // also of a half
    save_beside(5);
    char* newest = checkpoint_newest(in_folder("beside"));
    CheckpointErrors errors = checkpoint_errors(newest);
    assert_string_equal(errors.method, "top-k");
    assert_int_equal(errors.ranks, 12);
    checkpoint_prune(in_folder("beside"), -1, 1); // keeps the newest
    assert_int_equal(checkpoint_errors(newest).ranks, 12);
    checkpoint_remove(in_folder("beside"), "", checkpoint_name_step(path_name(newest), ""));
    assert_true(folder_is_free(in_folder("beside")));
    assert_int_equal(checkpoint_errors(newest).ranks, 0);
    free(newest);
}

TEST(weights_alone_start_a_run_and_cannot_be_resumed) {
    Cut cut = { 0, 1, 0, 2, 3, 1, AS_BOTH, false }, parts = { 0, 2, 0, 1, 1, 0, AS_MASTER, true };
    TrainState s = state_of(small);
    Values v;
    values_make(&v, small, 16);
    s.has_optimizer = false;
    save_cut("weights", s, &v, parts, false);
    load_cut("weights", &v, cut, CHECKPOINT_MODEL);
    load_cut("weights", &v, parts, CHECKPOINT_MODEL);
    values_free(&v);
    expect_error(load_in_turn("weights", ranks_make(small, whole), 1, CHECKPOINT_MASTER), "holds weights only");
}

