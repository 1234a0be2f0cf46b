/*
checkpoint_files.h - which elements of a checkpoint are in which of its tensor files.

The elements of a part (the model; AdamW's m; ...) are numbered in the order of gpt2.h, unit by unit, without the
padding of wte. An element's number is its *place*. A file holds pieces, safetensors of some consecutive places of one
tensor each:
    full     one file, model.safetensors; a piece is a whole tensor, under its name and in its shape
    sharded  a file per writer: model-00001-of-00004.safetensors, ..., the usual names for models in several files.
             Other programs put each tensor whole into one of them. Here tensors are cut wherever a rank's share of a
             unit begins or ends, so a piece is 1-D, and its name says which of its tensor's elements it has, the end
             excluded: "wte[1024:2048]", "m.h.0.qkv.weight[0:96]". model.safetensors.index.json says which piece is in
             which file.
A reader trusts no file: names, dtypes and shapes must be what state.json's model needs, every element must be there
exactly once, and the index must say what the files say. To check this, every rank reads all headers: some kilobytes a
file.
*/
#ifndef LLMC_CHECKPOINT_FILES_H
#define LLMC_CHECKPOINT_FILES_H
#include "safetensors.h"
#include "train_state.h"

#define CHECKPOINT_FORMAT "shard.c" // in the files' metadata: no other program can mistake them for its own,
#define CHECKPOINT_LAYOUT "out_in"  // nor their (out, in) weights for (in, out)
#define CHECKPOINT_MAX_INDEX (1u << 28) // bytes of the largest index that is read
#define HUGGINGFACE_LAYOUT "%s: this is a Hugging Face layout, use build/hf_import to make a checkpoint of it"

typedef enum { CHECKPOINT_FILE_MODEL, CHECKPOINT_FILE_OPTIMIZER, CHECKPOINT_FILES } CheckpointFile;
static const char* const checkpoint_file_names[CHECKPOINT_FILES] = { "model", "optimizer" };

// Returns the number of kinds of files in a checkpoint: the first ones.
static inline int checkpoint_kinds(const TrainState* s) {
    return s->has_optimizer ? CHECKPOINT_FILES : CHECKPOINT_FILE_OPTIMIZER;
}
static inline CheckpointFile checkpoint_part_file(CheckpointPart part) {
    return part == CHECKPOINT_MODEL ? CHECKPOINT_FILE_MODEL : CHECKPOINT_FILE_OPTIMIZER;
}
static inline DType checkpoint_part_dtype(const TrainState* s, CheckpointPart part) {
    return part == CHECKPOINT_MODEL ? s->dtype : DTYPE_F32;
}

// Paths, which the caller frees: of file `shard` (0 in a full checkpoint), of all of them as messages name them,
// of their index.
static inline char* checkpoint_file_path(const char* dir, const TrainState* s, CheckpointFile f, int shard) {
    return s->shards == 0
               ? format_string("%s/%s.safetensors", dir, checkpoint_file_names[f])
               : format_string("%s/%s-%05d-of-%05d.safetensors", dir, checkpoint_file_names[f], shard + 1, s->shards);
}
static inline char* checkpoint_all_files_path(const char* dir, const TrainState* s, CheckpointFile f) {
    return s->shards == 0 ? checkpoint_file_path(dir, s, f, 0)
                          : format_string("%s/%s-*-of-%05d.safetensors", dir, checkpoint_file_names[f], s->shards);
}
static inline char* checkpoint_index_path(const char* dir, CheckpointFile f) {
    return format_string("%s/%s.safetensors.index.json", dir, checkpoint_file_names[f]);
}

// ---- places ----

// Elements [begin, end) of a unit, laid out as in memory: what a writer of a shard says that it will write.
typedef struct { int unit; size_t begin, end; } CheckpointRange;

// ---- tensors ----

// A whole tensor of a part.
typedef struct {
    char name[48];         // "wte", "m.h.3.qkv.weight"
    CheckpointPart part;
    int unit;
    size_t offset;         // of its first element within the unit
    size_t begin, end;     // places
    size_t rows, cols;     // as stored; cols 0: 1-D
} CheckpointTensor;

static inline CheckpointTensor checkpoint_tensor(GPT2Config c, CheckpointPart part, int u, int i) {
    TensorInfo t = unit_tensor(c, u, i);
    CheckpointTensor whole;
    size_t root = unit_elements(c, 0) - (size_t)(c.Vp - c.V) * (size_t)c.C; // without wte's padding, at its end
    snprintf(whole.name, sizeof whole.name, part == CHECKPOINT_MODEL ? "%.0s%s" : "%s.%s", checkpoint_part_names[part],
             t.name);
    whole.part = part;
    whole.unit = u;
    whole.offset = t.offset;
    whole.begin = t.block_offset + (u == 0 ? 0 : root + (size_t)unit_block(u) * block_elements(c));
    whole.end = whole.begin + tensor_stored_elements(t);
    whole.rows = t.stored_rows;
    whole.cols = t.cols;
    return whole;
}

// Sets the places of a range's elements of a tensor: none if *begin == *end, as for padding.
static inline void checkpoint_range_places(const CheckpointTensor* t, CheckpointRange range, size_t* begin,
                                           size_t* end) {
    size_t n = range.unit == t->unit ? t->end - t->begin : 0;
    *begin = t->begin + size_min(n, range.begin - size_min(range.begin, t->offset));
    *end = t->begin + size_min(n, range.end - size_min(range.end, t->offset));
}

static inline size_t checkpoint_tensor_count(GPT2Config c) {
    return ROOT_TENSORS + (size_t)c.L * (ATTENTION_TENSORS + MLP_TENSORS);
}

static inline int checkpoint_compare_tensors(const void* a, const void* b) {
    const CheckpointTensor *x = (const CheckpointTensor*)a, *y = (const CheckpointTensor*)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}
// Puts all tensors of the parts that are in file(s) f, in the order of their places, into a new array.
// Returns how many.
static inline int checkpoint_tensors(const TrainState* s, CheckpointFile f, CheckpointTensor** tensors) {
    int count = 0;
    *tensors = new_array(CheckpointTensor, checkpoint_tensor_count(s->config) * CHECKPOINT_PARTS);
    for (int p = 0; p < CHECKPOINT_PARTS; p++) {
        CheckpointPart part = (CheckpointPart)p;
        if (checkpoint_part_file(part) != f) continue;
        for (int u = 0; u < gpt2_num_units(s->config); u++)
            for (int i = 0; i < unit_tensors(u); i++)
                if (checkpoint_has_tensor(s, part, u, i))
                    (*tensors)[count++] = checkpoint_tensor(s->config, part, u, i);
    }
    qsort(*tensors, (size_t)count, sizeof **tensors, checkpoint_compare_tensors);
    return count;
}

// Elements [begin, end) of a tensor as they are named in a shard; the caller frees it.
static inline char* checkpoint_piece_name(const CheckpointTensor* whole, size_t begin, size_t end) {
    return format_string("%s[%zu:%zu]", whole->name, begin, end);
}

// Returns the tensor that a name in a file means, or NULL, and which of its elements: all,
// or in a shard those in brackets.
static inline const CheckpointTensor* checkpoint_parse_name(const CheckpointTensor* tensors, int count, bool in_shard,
                                                            const char* name, size_t* begin, size_t* end) {
    size_t n = in_shard ? strcspn(name, "[") : strlen(name);
    const CheckpointTensor* whole = NULL;
    for (int i = 0; i < count && whole == NULL; i++)
        if (strncmp(tensors[i].name, name, n) == 0 && tensors[i].name[n] == '\0') whole = &tensors[i];
    *begin = 0;
    if (whole) *end = whole->end - whole->begin;
    if (whole == NULL || !in_shard) return whole;
    size_t size = *end;
    char* colon;
    *begin = strtoull(name + n + (name[n] == '['), &colon, 10);
    *end = strtoull(colon + (*colon == ':'), NULL, 10);
    char* again = checkpoint_piece_name(whole, *begin, *end); // no other spelling, such as "[+1: 2]"
    bool is_piece = strcmp(again, name) == 0 && *begin < *end && *end <= size;
    free(again);
    return is_piece ? whole : NULL;
}

// Lists the contents of a file for safetensors_create: all tensors of its kind, or in a shard the pieces of them that
// lie in the ranges. Returns how many. The caller frees the array with checkpoint_free_wanted.
static inline int checkpoint_wanted(const TrainState* s, CheckpointFile f, const CheckpointRange* ranges,
                                    int num_ranges, SafeTensor** wanted) {
    CheckpointTensor* tensors;
    int num_tensors = checkpoint_tensors(s, f, &tensors), count = 0, per_tensor = s->shards == 0 ? 1 : num_ranges;
    *wanted = NULL;
    for (int i = 0; i < num_tensors; i++)
        for (int k = 0; k < per_tensor; k++) {
            const CheckpointTensor* t = &tensors[i];
            size_t low = t->begin, high = t->end;
            if (s->shards > 0) checkpoint_range_places(t, ranges[k], &low, &high);
            if (low >= high) continue;
            char* name = s->shards == 0 ? xstrdup(t->name) : checkpoint_piece_name(t, low - t->begin, high - t->begin);
            DType dtype = checkpoint_part_dtype(s, t->part);
            *wanted = grown_array(SafeTensor, *wanted, count);
            (*wanted)[count++] = s->shards == 0 ? safetensor_wanted(name, dtype, t->rows, t->cols)
                                                : safetensor_wanted(name, dtype, high - low, 0);
        }
    free(tensors);
    return count;
}
static inline void checkpoint_free_wanted(SafeTensor* wanted, int count) {
    for (int i = 0; i < count; i++) free(wanted[i].name);
    free(wanted);
}

// ---- pieces ----

typedef struct {
    size_t begin, end; // places
    int shard;         // the file that has them
    size_t offset;     // of the first, in bytes from that file's start
} CheckpointPiece;
typedef struct { CheckpointPiece* list; size_t count; } CheckpointPieces; // of a part; list owned, sorted by place

static inline int checkpoint_compare_pieces(const void* a, const void* b) {
    const CheckpointPiece *x = (const CheckpointPiece*)a, *y = (const CheckpointPiece*)b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}
static inline void checkpoint_sort_pieces(CheckpointPieces pieces[CHECKPOINT_PARTS]) {
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        if (pieces[part].count > 1)
            qsort(pieces[part].list, pieces[part].count, sizeof(CheckpointPiece), checkpoint_compare_pieces);
}
static inline void checkpoint_free_pieces(CheckpointPieces pieces[CHECKPOINT_PARTS]) {
    for (int part = 0; part < CHECKPOINT_PARTS; part++) free(pieces[part].list);
}

// Returns the piece that has this place, or NULL.
static inline const CheckpointPiece* checkpoint_find_piece(const CheckpointPieces* pieces, size_t place) {
    size_t low = 0, high = pieces->count; // if there is one, it is in [low, high)
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (pieces->list[middle].begin <= place) low = middle;
        else high = middle;
    }
    const CheckpointPiece* p = &pieces->list[low];
    return high > low && p->begin <= place && place < p->end ? p : NULL;
}

// Adds what an open file holds to the pieces of its parts, unsorted. Dies unless it agrees with its names and
// state.json.
static inline void checkpoint_add_pieces(CheckpointPieces pieces[CHECKPOINT_PARTS], const TrainState* s,
                                         const CheckpointTensor* tensors, int num_tensors, const SafeTensors* file,
                                         int shard) {
    bool in_shard = s->shards > 0;
    for (int i = 0; i < file->count; i++) {
        const SafeTensor* t = &file->tensors[i];
        size_t begin = 0, end = 0;
        const CheckpointTensor* whole = checkpoint_parse_name(tensors, num_tensors, in_shard, t->name, &begin, &end);
        require_file(file->source, whole != NULL, "tensor '%s' is not in state.json's model%s", t->name,
                     in_shard ? ", nor a piece of a tensor that is" : "");
        const char* dtype = safetensors_dtype_name(checkpoint_part_dtype(s, whole->part));
        require_file(file->source, strcmp(t->stored_as, dtype) == 0,
                     "tensor '%s' is stored as %s where state.json says %s", t->name, t->stored_as, dtype);
        size_t rows = in_shard ? end - begin : whole->rows, cols = in_shard ? 0 : whole->cols;
        bool same_shape = t->rank == (cols ? 2 : 1) && t->shape[0] == rows && (cols == 0 || t->shape[1] == cols);
        require_file(file->source, same_shape,
                     "tensor '%s' does not have the shape (%zu, %zu) that state.json's model needs", t->name, rows,
                     cols);
        CheckpointPieces* p = &pieces[whole->part];
        p->list = grown_array(CheckpointPiece, p->list, p->count);
        CheckpointPiece piece = { whole->begin + begin, whole->begin + end, shard, t->begin };
        p->list[p->count++] = piece;
    }
}

// Dies unless the pieces, sorted, hold every element of these tensors exactly once. `from` names all files.
static inline void checkpoint_check_whole(const CheckpointPieces pieces[CHECKPOINT_PARTS],
                                          const CheckpointTensor* tensors, int num_tensors, FileSource from) {
    size_t next[CHECKPOINT_PARTS] = { 0 }; // the part's first piece that has not been looked at
    for (int i = 0; i < num_tensors; i++) {
        const CheckpointTensor* t = &tensors[i];
        const CheckpointPiece *p = pieces[t->part].list + next[t->part],
                              *end = pieces[t->part].list + pieces[t->part].count;
        for (size_t place = t->begin; place < t->end; place = p++->end) {
            require_file(from, p < end && p->begin == place, "element %zu of tensor '%s' is missing", place - t->begin,
                         t->name);
            bool is_twice = p + 1 < end && p[1].begin < p->end;
            require_file(from, !is_twice, "element %zu of tensor '%s' is there twice", p[1].begin - t->begin, t->name);
        }
        next[t->part] = (size_t)(p - pieces[t->part].list);
    }
}

static inline void checkpoint_check_metadata(const SafeTensors* file, const char* key, const char* expected) {
    const char* value = json_string_value(json_object_get(file->metadata, key));
    require_file(file->source, value && strcmp(value, expected) == 0,
                 "its metadata say \"%s\": \"%s\" where a checkpoint has \"%s\"", key, value ? value : "", expected);
}

// ---- all files of a checkpoint ----

// Opens each file f of the checkpoint in dir, checks all of it except the values, and adds its pieces to the parts'.
// Returns the index of these files; the caller frees it. No file stays open, because there may be more of them than a
// process may open.
static inline json_t* checkpoint_scan_files(CheckpointPieces pieces[CHECKPOINT_PARTS], const char* dir,
                                            const TrainState* s, CheckpointFile f, const char* remedy) {
    CheckpointTensor* tensors;
    int num_tensors = checkpoint_tensors(s, f, &tensors);
    json_t* weight_map = json_object();
    size_t bytes = 0;
    for (int shard = 0; shard == 0 || shard < s->shards; shard++) {
        char* path = checkpoint_file_path(dir, s, f, shard);
        SafeTensors file;
        safetensors_open(&file, path, remedy);
        bool is_huggingface = safetensors_find(&file, "transformer.wte.weight")
                              || safetensors_find(&file, "wte.weight");
        require(!is_huggingface, HUGGINGFACE_LAYOUT, path);
        checkpoint_check_metadata(&file, "format", CHECKPOINT_FORMAT);
        checkpoint_check_metadata(&file, "layout", CHECKPOINT_LAYOUT);
        checkpoint_add_pieces(pieces, s, tensors, num_tensors, &file, shard);
        for (int i = 0; i < file.count; i++) {
            json_object_set_new(weight_map, file.tensors[i].name, json_string(path_name(path)));
            bytes += file.tensors[i].end - file.tensors[i].begin;
        }
        safetensors_close(&file);
        free(path);
    }
    char* all = checkpoint_all_files_path(dir, s, f);
    checkpoint_sort_pieces(pieces);
    checkpoint_check_whole(pieces, tensors, num_tensors, file_source(all, remedy));
    free(all);
    free(tensors);
    return json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)bytes, "weight_map", weight_map);
}

// Dies unless the text of an index says what `made` (by checkpoint_scan_files) says.
// The caller frees *json, the parsed text.
static inline void checkpoint_check_index(const char* text, size_t n, json_t** json, json_t* made, FileSource from) {
    json_error_t error;
    json_t *index = *json = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error), *file;
    require_file(from, index != NULL, "line %d is not valid JSON: %s", error.line, error.text);
    const json_t* weight_map = json_object_get(index, "weight_map");
    const char* name;
    json_object_foreach(json_object_get(made, "weight_map"), name, file) {
        const char* said = json_string_value(json_object_get(weight_map, name));
        require_file(from, said && strcmp(said, json_string_value(file)) == 0, "says that '%s' is in %s; it is in %s",
                     name, said ? said : "no file", json_string_value(file));
    }
    require_file(from, json_equal(index, made),
                 "has a total_size that is not the files', or lists more than they hold");
}
#endif
