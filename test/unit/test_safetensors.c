/*
test_safetensors.c - the reader checks everything that a file says about itself, and what is written is read back to the
bit. For every check of the reference implementation there is a file here that fails only that check.
*/
#include "../../llmc/save/safetensors.h"
#include "../../llmc/base/rng.h"
#include "test_folder.h"

static const char* path;

void before_all(void) {
    static char kept[sizeof folder + 32];
    path = strcpy(kept, in_folder("file.safetensors"));
}
void after_each(void) { unlink(path); }

static void write_test_file(const void* bytes, size_t n) {
    unlink(path);
    assert_true(file_write(path, bytes, n));
}

// header_size, the header's text and data_size bytes of zeros
static void write_parts(uint64_t header_size, const char* header, size_t header_bytes, size_t data_size) {
    char* bytes = (char*)xcalloc(8 + header_bytes + data_size, 1);
    memcpy(bytes, &header_size, 8);
    memcpy(bytes + 8, header, header_bytes);
    write_test_file(bytes, 8 + header_bytes + data_size);
    free(bytes);
}
static void write_header(const char* header, size_t data_size) { write_parts(strlen(header), header, strlen(header), data_size); }

static void open_file(void) {
    SafeTensors s;
    alarm(60); // nothing may wait for what nobody writes into a pipe
    safetensors_open(&s, path, "find another");
    safetensors_close(&s);
}

#define expect_refusal(...) expect_error(open_file(), path, "; find another", __VA_ARGS__)

#define TENSOR(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

// ---- files that are not what they should be ----

typedef struct { const char* header; size_t data_size; const char *says, *also; } BadHeader;
static void headers_are_refused(const BadHeader* bad, int count) {
    for (int i = 0; i < count; i++) {
        write_header(bad[i].header, bad[i].data_size);
        expect_refusal(bad[i].says, bad[i].also ? bad[i].also : "");
    }
}
#define REFUSED(...) do { \
        static const BadHeader bad_[] = { __VA_ARGS__ }; \
        headers_are_refused(bad_, (int)(sizeof bad_ / sizeof *bad_)); \
    } while (0)

TEST(a_good_file_opens) {
    write_header("{\"__metadata__\":{\"format\":\"pt\"}," TENSOR("b", "F32", "2,1", 4, 12) "," TENSOR("a", "BF16", "2", 0, 4) "}  ", 12);
    SafeTensors s;
    safetensors_open(&s, path, "find another");
    assert_int_equal(s.count, 2);
    assert_string_equal(s.tensors[0].name, "a"); // by place
    assert_string_equal(json_string_value(json_object_get(s.metadata, "format")), "pt");
    const SafeTensor* b = safetensors_find(&s, "b");
    assert_true(b && b->rank == 2 && b->elements == 2 && b->end == s.file_size);
    assert_null(safetensors_find(&s, "c"));
    safetensors_close(&s);
}

TEST(a_file_that_is_not_there_is_refused) {
    expect_refusal("cannot be opened", "No such file");
    assert_int_equal(mkdir(path, 0777), 0);
    expect_refusal("is a folder, not a file");
    rmdir(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_refusal("is a pipe, not a file");
    unlink(path);
}

TEST(a_header_length_is_not_believed) {
    static const struct { uint64_t length; const char* says; } cases[] = {
        { 100000001, "100000001 bytes where the format allows 100000000" },
        { UINT64_MAX, "18446744073709551615 bytes where the format allows" },
        { UINT64_MAX - 6, "where the format allows" }, // 8 + N would be 1
        { 100000000, "should have 100000000 bytes and the whole file has 10: truncated" },
        { 3, "truncated" }, { 0, "does not begin with '{'" }
    };
    write_test_file("", 0);
    expect_refusal("has 0 bytes, too few");
    write_test_file("1234567", 7);
    expect_refusal("has 7 bytes, too few");
    for (int i = 0; i < 6; i++) {
        write_parts(cases[i].length, "{}", 2, 0);
        expect_refusal(cases[i].says);
    }
}

TEST(a_header_must_be_utf8_json) {
    REFUSED({ "{\"\xff\":1}", 0, "not valid JSON", "0xff" }, { "{\"\xc0\x80\":1}", 0, "not valid JSON", "" }, // an overlong form
            { "[]", 0, "does not begin with '{'", "" }, { " {}", 0, "does not begin with '{'", "" },
            { "{\"a\":", 0, "not valid JSON", "" }, { "{} x", 0, "not valid JSON", "" });
    write_parts(3, "{}", 3, 0); // with a 0 at its end
    expect_refusal("not valid JSON");
}

TEST(a_header_must_have_the_right_shape) {
    static const char* const headers[][2] = {
        { "{\"a\":1}", "'a' is not an object" }, { "{\"__metadata__\":[]}", "'__metadata__' is not an object" },
        { "{\"__metadata__\":{\"k\":1}}", "metadata's 'k' is not a string" },
        { "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", "'a' has no dtype" },
        { "{\"a\":{\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]}}", "'a' has no dtype" },
        { "{" TENSOR("a", "F31", "1", 0, 4) "}", "unknown dtype 'F31'" },
        { "{" TENSOR("a", "f32", "1", 0, 4) "}", "unknown dtype 'f32'" },
        { "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", "'a' has no shape" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", "'a' has no shape" },
        { "{" TENSOR("a", "F32", "1.0", 0, 4) "}", "'a' has no shape" },
        { "{" TENSOR("a", "F32", "-1,-1", 0, 4) "}", "'a' has no shape" },
        { "{" TENSOR("a", "F32", "1,1,1,1,1,1,1,1,1", 0, 4) "}", "'a' has no shape of at most 8" },
        { "{" TENSOR("a", "F32", "9223372036854775808", 0, 4) "}", "not valid JSON: too big integer" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "'a' has no data_offsets" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", "'a' has no data_offsets" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", "'a' has no data_offsets" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]}}", "'a' has no data_offsets" },
        { "{" TENSOR("a", "F32", "1", -4, 0) "}", "'a' has no data_offsets" },
    };
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        write_header(headers[i][0], 4);
        expect_refusal(headers[i][1]);
    }
}

TEST(names_that_occur_twice_are_refused) {
    REFUSED({ "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("a", "F32", "1", 4, 8) "}", 8, "duplicate object key", "" },
            { "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("\\u0061", "F32", "1", 4, 8) "}", 8, "duplicate object key", "" }, // the same
            { "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "duplicate object key", "" });
}

TEST(holes_and_overlaps_are_refused) {
    REFUSED({ "{" TENSOR("a", "F32", "1", 4, 8) "}", 8, "'a' starts at byte 4", "ended at 0 (a hole)" },
            { "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 8, 12) "}", 12, "'b' starts at byte 8", "ended at 4 (a hole)" },
            { "{" TENSOR("a", "F32", "2", 0, 8) "," TENSOR("b", "F32", "1", 4, 8) "}", 8, "'b' starts at byte 4", "at 8 (an overlap)" },
            { "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 0, 4) "}", 4, "an overlap", "" },
            { "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 4, 0) "}", 4, "'b' ends at byte 0", "before it starts at 4" });
}

TEST(a_shape_must_fill_its_place_and_tensors_the_file) {
    REFUSED({ "{" TENSOR("a", "F32", "2", 0, 4) "}", 4, "'a' takes 4 bytes where its shape and dtype need 8", "" },
            { "{" TENSOR("a", "F32", "0", 0, 4) "}", 4, "'a' takes 4 bytes where its shape and dtype need 0", "" },
            { "{" TENSOR("a", "F32", "4294967296,4294967296", 0, 4) "}", 4, "'a' is larger than any memory", "" }, // 2^64: 0 if it wraps
            { "{" TENSOR("a", "F64", "4611686018427387904", 0, 0) "}", 0, "'a' is larger than any memory", "" }, // 2^62 of 64 bits
            { "{" TENSOR("a", "F4", "3", 0, 1) "}", 1, "'a' takes 1 bytes", "" }, // a byte and a half
            { "{" TENSOR("a", "F32", "2", 0, 8) "}", 7, "'a' ends at byte 8 of the data, of which there are 7: truncated", "" },
            { "{" TENSOR("a", "F32", "2", 0, 8) "}", 9, "its tensors have 8 bytes and the file 9 after the header", "" },
            { "{}", 1, "its tensors have 0 bytes and the file 1 after the header", "" },
            { "{" TENSOR("a", "U8", "9223372036854775807", 0, 9223372036854775807) "}", 8, "'a' is larger than any memory", "" });
}

TEST(a_file_cut_anywhere_is_refused) {
    const char* header = "{" TENSOR("a", "F32", "2", 0, 8) "}";
    char bytes[256];
    uint64_t n = strlen(header);
    memcpy(bytes, &n, 8);
    memcpy(bytes + 8, header, n);
    memset(bytes + 8 + n, 0, 8);
    for (size_t cut = 0; cut < n + 16; cut++) {
        write_test_file(bytes, cut);
        expect_refusal("file.safetensors");
    }
    write_test_file(bytes, n + 16);
    open_file();
}

TEST(tensors_without_elements_are_fine) {
    write_header("{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("none", "F32", "0,5", 0, 0) "," TENSOR("scalar", "F32", "", 4, 8) "}", 8);
    SafeTensors s;
    safetensors_open(&s, path, "");
    assert_int_equal(safetensors_find(&s, "none")->elements, 0);
    assert_int_equal(safetensors_find(&s, "scalar")->elements, 1);
    safetensors_close(&s);
    write_header("{}", 0);
    open_file();
}

// Opens the file, which then loses so many bytes, and reads n elements of a tensor.
static void read_some(const char* name, size_t begin, size_t n, int lost) {
    SafeTensors s;
    float out[8];
    safetensors_open(&s, path, "find another");
    if (truncate(path, (off_t)s.file_size - lost) != 0) return;
    safetensors_read(&s, safetensors_find(&s, name), begin, n, out, DTYPE_F32);
}
TEST(what_cannot_be_read_is_refused_when_it_is_read) {
    write_header("{" TENSOR("a", "F32", "2", 0, 8) "," TENSOR("mask", "BOOL", "2,4", 8, 16) "}", 16);
    open_file(); // a mask may be there
    expect_error(read_some("mask", 0, 8, 0), path, "'mask' is stored as BOOL", "find another");
    expect_error(read_some("a", 2, 1, 0), path, "'a' has 2 elements; 1 from 2 were asked for");
    expect_error(read_some("a", 0, 2, 10), path, "'a' cannot be read: the file shrank", "find another");
}

// ---- what is written ----

enum { ROWS = 301, COLS = 173 }; // more than a piece of the reader's

static void create_file(SafeTensors* s, int count, const SafeTensor* wanted) {
    json_t* metadata = json_pack("{s:s}", "format", "test");
    assert_true(safetensors_create(s, path, wanted, count, metadata));
    json_decref(metadata);
}

// A number that each of our dtypes holds exactly.
static float small_number(size_t i) { return (float)((int)(i * 7 % 255) - 127) / 8; }

TEST(what_is_written_in_pieces_comes_back_in_other_pieces) {
    char f32[] = "f32", bf16[] = "bf16", f16[] = "f16";
    const SafeTensor wanted[3] = { safetensor_wanted(f32, DTYPE_F32, ROWS, COLS), safetensor_wanted(bf16, DTYPE_BF16, ROWS, COLS),
                                   safetensor_wanted(f16, DTYPE_F16, ROWS * COLS, 0) };
    const size_t n = ROWS * COLS;
    float *data = (float*)xcalloc(n, sizeof(float)), *back = (float*)xcalloc(n, sizeof(float));
    uint16_t *halves = (uint16_t*)xcalloc(n, 2), *halves_back = (uint16_t*)xcalloc(n, 2);
    for (size_t i = 0; i < n; i++) data[i] = small_number(i);
    SafeTensors s, other;
    create_file(&s, 3, wanted);
    safetensors_attach(&other, path, ""); // another rank's view of the same file
    for (int t = 0; t < 3; t++) {
        convert_dtype(halves, wanted[t].dtype == DTYPE_F16 ? DTYPE_F16 : DTYPE_BF16, data, DTYPE_F32, n);
        for (size_t begin = 0, piece = 0; begin < n; begin += piece) {
            piece = size_min(n - begin, 1 + philox(1, (uint64_t)t, begin).x[0] % 30000);
            SafeTensors* writer = piece % 2 ? &s : &other;
            bool converts = t == 0 || piece % 3 == 0;
            const void* source = converts ? (const void*)(data + begin) : (const void*)(halves + begin);
            DType from = converts ? DTYPE_F32 : wanted[t].dtype;
            assert_true(safetensors_write(writer, &writer->tensors[t], begin, piece, source, from));
        }
    }
    assert_true(safetensors_sync(&s));
    assert_true(safetensors_close(&s));
    assert_true(safetensors_close(&other));
    safetensors_open(&s, path, "");
    assert_int_equal(s.tensors[0].begin % 8, 0);
    for (int t = 0; t < 3; t++) {
        const SafeTensor* from = safetensors_find(&s, wanted[t].name);
        for (size_t begin = 0, piece = 0; begin < n; begin += piece) {
            piece = size_min(n - begin, 1 + philox(2, (uint64_t)t, begin).x[0] % 40000);
            safetensors_read(&s, from, begin, piece, back + begin, DTYPE_F32);
        }
        assert_memory_equal(back, data, n * sizeof(float));
        safetensors_read(&s, from, 0, n, halves_back, DTYPE_F16); // from bf16 too: through fp32
        convert_dtype(halves, DTYPE_F16, data, DTYPE_F32, n);
        assert_memory_equal(halves_back, halves, n * 2);
    }
    safetensors_close(&s);
    free(data); free(back); free(halves); free(halves_back);
}

TEST(nothing_is_written_over) {
    write_test_file("mine", 4);
    char name[] = "a";
    SafeTensor wanted = safetensor_wanted(name, DTYPE_F32, 4, 0);
    SafeTensors s;
    json_t* metadata = json_object();
    assert_false(safetensors_create(&s, path, &wanted, 1, metadata));
    assert_int_equal(errno, EEXIST);
    json_decref(metadata);
    safetensors_close(&s);
    size_t n;
    FileSource from = { path, "" };
    char* text = file_read(from, 100, &n);
    assert_string_equal(text, "mine");
    free(text);
}

// A sparse file of 6 GiB: offsets that do not fit in 32 bits.
TEST(tensors_beyond_4_gib_are_found) {
    const size_t n = (size_t)3 << 30;
    write_header("{\"a\":{\"dtype\":\"BF16\",\"shape\":[3,1073741824],\"data_offsets\":[0,6442450944]}}", 0);
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    if (truncate(path, info.st_size + (off_t)(2 * n)) != 0) skip_test("this file system has no large sparse files");
    SafeTensors s;
    safetensors_attach(&s, path, "");
    const float data[3] = { 1, 2, 3 };
    float back[3];
    assert_true(safetensors_write(&s, s.tensors, n - 3, 3, data, DTYPE_F32));
    safetensors_read(&s, s.tensors, n - 3, 3, back, DTYPE_F32);
    assert_memory_equal(back, data, sizeof data);
    safetensors_read(&s, s.tensors, (n - 3) % ((size_t)1 << 31), 3, back, DTYPE_F32);
    assert_true(back[0] == 0 && back[1] == 0 && back[2] == 0);
    safetensors_close(&s);
}
