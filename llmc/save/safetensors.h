/*
safetensors.h - tensors in a file, by name: read with suspicion, written in pieces by any number of ranks.

The format (github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes of JSON that give each
tensor's dtype, shape and place, then the data without holes. A reader trusts nothing in it: every number is checked
against the file's size before it is used, in the order of the reference implementation's checks, and names that occur
twice are refused as well (that implementation takes the last).
Reading dies with the file's name, what was found, what was expected, and the remedy that its opener gave.
Writing returns false with errno set: the caller knows what to clean up and what to advise.
*/
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H
#include "../base/folder.h"
#include "../base/precision.h"
#include <jansson.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian, and are read and written here without swapping bytes"
#endif

#define SAFETENSORS_MAX_RANK 8
#define SAFETENSORS_MAX_HEADER 100000000u

typedef struct {
    char* name;            // owned
    const char* stored_as; // dtype by its name in the file: "F32", "I64"
    DType dtype;           // the same as ours, where readable
    bool readable;         // false: a dtype that we do not read, such as the masks in some Hugging Face files
    int rank;
    size_t shape[SAFETENSORS_MAX_RANK];
    size_t elements;
    size_t begin, end;     // bytes, counted from the file's start
} SafeTensor;

typedef struct {
    FileSource source;     // strings owned
    int fd;
    size_t file_size;
    SafeTensor* tensors;   // (count) owned, sorted by place
    int count;
    json_t* header;        // owned: the whole JSON object
    json_t* metadata;      // a view of its __metadata__ (an object of strings), or NULL
} SafeTensors;

typedef struct { const char* name; size_t bits; bool readable; DType dtype; } SafeDType;

// Returns the format's dtypes by name, NULL for an unknown one.
static inline const SafeDType* safetensors_dtype(const char* name) {
    static const SafeDType known[] = {
        { "F32", 32, true, DTYPE_F32 }, { "BF16", 16, true, DTYPE_BF16 }, { "F16", 16, true, DTYPE_F16 },
        { "F64", 64, false, DTYPE_F32 }, { "I64", 64, false, DTYPE_F32 }, { "U64", 64, false, DTYPE_F32 },
        { "C64", 64, false, DTYPE_F32 }, { "I32", 32, false, DTYPE_F32 }, { "U32", 32, false, DTYPE_F32 },
        { "I16", 16, false, DTYPE_F32 }, { "U16", 16, false, DTYPE_F32 }, { "I8", 8, false, DTYPE_F32 },
        { "U8", 8, false, DTYPE_F32 }, { "BOOL", 8, false, DTYPE_F32 }, { "F8_E4M3", 8, false, DTYPE_F32 },
        { "F8_E5M2", 8, false, DTYPE_F32 }, { "F8_E8M0", 8, false, DTYPE_F32 }, { "F6_E2M3", 6, false, DTYPE_F32 },
        { "F6_E3M2", 6, false, DTYPE_F32 }, { "F4", 4, false, DTYPE_F32 }
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) if (strcmp(known[i].name, name) == 0) return &known[i];
    return NULL;
}
static inline const char* safetensors_dtype_name(DType d) {
    return d == DTYPE_F32 ? "F32" : d == DTYPE_BF16 ? "BF16" : "F16";
}

// ---- opening ----

// Reads and parses the header; on return s->header is an object and *data_begin <= s->file_size.
static inline void safetensors_read_header(SafeTensors* s, size_t* data_begin) {
    uint64_t n;
    require_file(s->source, s->file_size >= sizeof n, "has %zu bytes, too few for a safetensors header", s->file_size);
    require_file(s->source, pread_all(s->fd, &n, sizeof n, 0), "cannot be read: %s", strerror(errno));
    require_file(s->source, n <= SAFETENSORS_MAX_HEADER,
                 "its header would have %llu bytes where the format allows %u: not a safetensors file",
                 (unsigned long long)n, SAFETENSORS_MAX_HEADER);
    require_file(s->source, n <= s->file_size - sizeof n,
                 "its header should have %llu bytes and the whole file has %zu: truncated", (unsigned long long)n,
                 s->file_size);
    char* text = new_array(char, n);
    bool complete = pread_all(s->fd, text, n, sizeof n), is_object = n > 0 && text[0] == '{';
    json_error_t error;
    s->header = complete && is_object ? json_loadb(text, n, JSON_REJECT_DUPLICATES, &error) : NULL;
    free(text);
    require_file(s->source, complete, "its header cannot be read: %s", errno ? strerror(errno) : "the file shrank");
    require_file(s->source, is_object, "its header does not begin with '{': not a safetensors file");
    require_file(s->source, s->header != NULL, "its header is not valid JSON: %s at byte %d", error.text,
                 error.position);
    *data_begin = sizeof n + n;
}

// Reads a JSON array of at most `limit` whole numbers >= 0 into out. Returns how many, or -1 if it is anything else.
static inline int safetensors_numbers(const json_t* array, size_t* out, int limit) {
    if (!json_is_array(array) || json_array_size(array) > (size_t)limit) return -1;
    int n = (int)json_array_size(array);
    for (int i = 0; i < n; i++) {
        const json_t* number = json_array_get(array, (size_t)i);
        if (!json_is_integer(number) || json_integer_value(number) < 0) return -1;
        out[i] = (size_t)json_integer_value(number);
    }
    return n;
}

// Reads one tensor's entry of the header into t; begin and end still count from data_begin.
static inline void safetensors_parse_entry(const SafeTensors* s, const char* name, const json_t* entry, SafeTensor* t) {
    const char* dtype = json_string_value(json_object_get(entry, "dtype"));
    require_file(s->source, dtype != NULL, "tensor '%s' has no dtype", name);
    const SafeDType* d = safetensors_dtype(dtype);
    require_file(s->source, d != NULL, "tensor '%s' has the unknown dtype '%s'", name, dtype);
    t->stored_as = d->name; t->dtype = d->dtype; t->readable = d->readable;
    t->rank = safetensors_numbers(json_object_get(entry, "shape"), t->shape, SAFETENSORS_MAX_RANK);
    require_file(s->source, t->rank >= 0, "tensor '%s' has no shape of at most %d whole numbers", name,
                 SAFETENSORS_MAX_RANK);
    size_t offsets[2];
    bool has_both = safetensors_numbers(json_object_get(entry, "data_offsets"), offsets, 2) == 2;
    require_file(s->source, has_both, "tensor '%s' has no data_offsets of two whole numbers", name);
    t->begin = offsets[0]; t->end = offsets[1];
}

static inline void safetensors_parse_entries(SafeTensors* s) {
    s->tensors = new_array(SafeTensor, json_object_size(s->header));
    const char* key;
    json_t* entry;
    json_object_foreach(s->header, key, entry) {
        bool is_metadata = strcmp(key, "__metadata__") == 0;
        require_file(s->source, json_is_object(entry), "the header's '%s' is not an object", key);
        if (is_metadata) { s->metadata = entry; continue; }
        SafeTensor* t = &s->tensors[s->count++];
        t->name = xstrdup(key);
        safetensors_parse_entry(s, key, entry, t);
    }
    json_object_foreach(s->metadata, key, entry)
        require_file(s->source, json_is_string(entry), "the metadata's '%s' is not a string", key);
}

static inline int safetensors_compare_places(const void* a, const void* b) {
    const SafeTensor *x = (const SafeTensor*)a, *y = (const SafeTensor*)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : x->end < y->end ? -1 : x->end > y->end;
}

// Sorts the tensors and checks that they fill the rest of the file exactly; begin and end then count from its start.
static inline void safetensors_check_places(SafeTensors* s, size_t data_begin) {
    qsort(s->tensors, (size_t)s->count, sizeof(SafeTensor), safetensors_compare_places);
    size_t expected = 0, data_size = s->file_size - data_begin;
    for (int i = 0; i < s->count; i++) {
        SafeTensor* t = &s->tensors[i];
        require_file(s->source, t->begin == expected,
                     "tensor '%s' starts at byte %zu of the data where the one before ended at %zu (%s)",
                     t->name, t->begin, expected, t->begin > expected ? "a hole" : "an overlap");
        require_file(s->source, t->end >= t->begin, "tensor '%s' ends at byte %zu, before it starts at %zu",
                     t->name, t->end, t->begin);
        size_t bits = safetensors_dtype(t->stored_as)->bits;
        bool fits = true;
        t->elements = 1;
        for (int k = 0; k < t->rank; k++) fits = fits && size_multiply(t->elements, t->shape[k], &t->elements);
        fits = fits && size_multiply(t->elements, bits, &bits);
        require_file(s->source, fits, "the shape of tensor '%s' is larger than any memory", t->name);
        require_file(s->source, bits % 8 == 0 && bits / 8 == t->end - t->begin,
                     "tensor '%s' takes %zu bytes where its shape and dtype need %zu", t->name, t->end - t->begin,
                     bits / 8);
        require_file(s->source, t->end <= data_size,
                     "tensor '%s' ends at byte %zu of the data, of which there are %zu: truncated", t->name, t->end,
                     data_size);
        expected = t->end;
        t->begin += data_begin; t->end += data_begin;
    }
    require_file(s->source, expected == data_size, "its tensors have %zu bytes and the file %zu after the header",
                 expected, data_size);
}

// Opens for reading (access O_RDONLY), or for writing into a file that another rank has created (O_RDWR). `remedy` ends
// every message about what is wrong with it, now and when reading: "copy the file again".
static inline void safetensors_open_with(SafeTensors* s, const char* path, int access, const char* remedy) {
    memset(s, 0, sizeof *s);
    s->source.path = xstrdup(path);
    s->source.remedy = xstrdup(remedy);
    s->fd = file_open(s->source, access, &s->file_size);
    size_t data_begin;
    safetensors_read_header(s, &data_begin);
    safetensors_parse_entries(s);
    safetensors_check_places(s, data_begin);
}
static inline void safetensors_open(SafeTensors* s, const char* path, const char* remedy) {
    safetensors_open_with(s, path, O_RDONLY, remedy);
}

// Frees what s owns, whatever state an open or create left it in. Returns false if the last writes failed.
static inline bool safetensors_close(SafeTensors* s) {
    bool closed = s->source.path == NULL || s->fd < 0 || close(s->fd) == 0;
    for (int i = 0; i < s->count; i++) free(s->tensors[i].name);
    free(s->tensors);
    free((char*)s->source.path);
    free((char*)s->source.remedy);
    json_decref(s->header);
    memset(s, 0, sizeof *s);
    return closed;
}

// ---- reading ----

// Returns the tensor of that name, owned by s, or NULL.
static inline const SafeTensor* safetensors_find(const SafeTensors* s, const char* name) {
    for (int i = 0; i < s->count; i++) if (strcmp(s->tensors[i].name, name) == 0) return &s->tensors[i];
    return NULL;
}

// Reads elements [first, first+n) of t into out (n) of type `as`.
static inline void safetensors_read(const SafeTensors* s, const SafeTensor* t, size_t first, size_t n, void* out,
                                    DType as) {
    require_file(s->source, t->readable, "tensor '%s' is stored as %s; only F32, BF16 and F16 can be read", t->name,
                 t->stored_as);
    invariant(first <= t->elements && n <= t->elements - first,
              "%s: tensor '%s' has %zu elements; %zu from %zu were asked for", s->source.path, t->name, t->elements, n,
              first);
    uint32_t piece[1 << 14];
    size_t size = dtype_size(t->dtype);
    bool direct = as == t->dtype;
    for (size_t done = 0, count; done < n; done += count) {
        count = direct ? n : size_min(n - done, sizeof piece / size);
        char* to = (char*)out + done * dtype_size(as);
        bool complete = pread_all(s->fd, direct ? (void*)to : (void*)piece, count * size,
                                  t->begin + (first + done) * size);
        require_file(s->source, complete, "tensor '%s' cannot be read: %s", t->name,
                     errno ? strerror(errno) : "the file shrank");
        if (!direct) convert_dtype(to, as, piece, t->dtype, count);
    }
}

// ---- writing ----

// Returns a tensor for safetensors_create to make room for: cols 0 for a 1-D tensor.
// `name` is copied by safetensors_create.
static inline SafeTensor safetensor_wanted(char* name, DType dtype, size_t rows, size_t cols) {
    SafeTensor t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.dtype = dtype; t.stored_as = safetensors_dtype_name(dtype); t.readable = true;
    t.rank = cols ? 2 : 1;
    t.shape[0] = rows; t.shape[1] = cols;
    t.elements = rows * (cols ? cols : 1);
    return t;
}

// Makes the header of s->tensors, whose data follow each other. Sets begin and end, counted from the data's start.
static inline json_t* safetensors_make_header(SafeTensors* s, json_t* metadata) {
    json_t* header = json_object();
    json_object_set(header, "__metadata__", metadata);
    size_t place = 0;
    for (int i = 0; i < s->count; i++) {
        SafeTensor* t = &s->tensors[i];
        t->begin = place;
        t->end = place += t->elements * dtype_size(t->dtype);
        json_t* shape = json_array();
        for (int k = 0; k < t->rank; k++) json_array_append_new(shape, json_integer((json_int_t)t->shape[k]));
        json_object_set_new(header, t->name, json_pack("{s:s, s:o, s:[I, I]}", "dtype", t->stored_as, "shape", shape,
                                                       "data_offsets", (json_int_t)t->begin, (json_int_t)t->end));
    }
    return header;
}

// Makes a new file with room for `count` tensors in this order. It reserves the disk space, so that a full disk is
// known now. `metadata` is an object of strings and stays the caller's. The path must not exist: a file that others
// may have mapped is never written over.
static inline bool safetensors_create(SafeTensors* s, const char* path, const SafeTensor* wanted, int count,
                                      json_t* metadata) {
    memset(s, 0, sizeof *s);
    s->fd = -1;
    s->source.path = xstrdup(path);
    s->source.remedy = xstrdup("it was made by this program");
    s->count = count;
    s->tensors = new_array(SafeTensor, count);
    for (int i = 0; i < count; i++) { s->tensors[i] = wanted[i]; s->tensors[i].name = xstrdup(wanted[i].name); }
    s->header = safetensors_make_header(s, metadata);
    s->metadata = json_object_get(s->header, "__metadata__");
    char* json = json_dumps(s->header, JSON_COMPACT);
    require(json != NULL, "%s: out of host memory, or a tensor's name is not UTF-8", path);
    uint64_t n = round_up(strlen(json), 8); // padded with spaces, so that the data are aligned
    char* text = format_string("%-*s", (int)n, json);
    free(json);
    for (int i = 0; i < count; i++) { s->tensors[i].begin += 8 + n; s->tensors[i].end += 8 + n; }
    s->file_size = count > 0 ? s->tensors[count - 1].end : 8 + n;
    s->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    bool created = s->fd >= 0 && pwrite_all(s->fd, &n, sizeof n, 0) && pwrite_all(s->fd, text, n, sizeof n);
    free(text);
    if (!created) return false;
    int reason = posix_fallocate(s->fd, 0, (off_t)s->file_size);
    if (reason == EOPNOTSUPP || reason == EINVAL) return ftruncate(s->fd, (off_t)s->file_size) == 0;
    errno = reason;
    return reason == 0;
}

// Writes elements [first, first+n) of t from data (n) of type `from`.
static inline bool safetensors_write(SafeTensors* s, const SafeTensor* t, size_t first, size_t n, const void* data,
                                     DType from) {
    invariant(first <= t->elements && n <= t->elements - first,
              "%s: tensor '%s' has %zu elements; writing %zu from %zu was asked for",
              s->source.path, t->name, t->elements, n, first);
    uint32_t piece[1 << 14];
    size_t size = dtype_size(t->dtype);
    for (size_t done = 0, count; done < n; done += count) {
        count = from == t->dtype ? n : size_min(n - done, sizeof piece / size);
        const char* source = (const char*)data + done * dtype_size(from);
        if (from != t->dtype) convert_dtype(piece, t->dtype, source, from, count);
        if (!pwrite_all(s->fd, from == t->dtype ? (const void*)source : (const void*)piece, count * size,
                        t->begin + (first + done) * size)) return false;
    }
    return true;
}

// On the disk when this returns true.
static inline bool safetensors_sync(SafeTensors* s) { return fsync(s->fd) == 0; }
#endif
