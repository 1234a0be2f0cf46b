// test_safetensors.c - the reader checks everything that a file says about itself, and what is written is read back to the bit.
// For every check of the reference implementation there is a file here that fails only that check.
#include "../../llmc/save/safetensors.h"
#include "../../llmc/base/rng.h"
#include "test_folder.h"

#define NAME "file.safetensors"
static char path[sizeof folder + sizeof NAME];

void before_all(void) { snprintf(path, sizeof path, "%s/" NAME, folder); }
void after_each(void) { unlink(path); }

// header_size, the header's text and data_size bytes of zeros
static void write_parts(uint64_t header_size, const char* header, size_t header_bytes, size_t data_size) {
    FREED char* bytes = (char*)xcalloc(8 + header_bytes + data_size, 1);
    memcpy(bytes, &header_size, 8);
    memcpy(bytes + 8, header, header_bytes);
    write_file(NAME, bytes, 8 + header_bytes + data_size);
}
static void write_header(const char* header, size_t data_size) { write_parts(strlen(header), header, strlen(header), data_size); }

// The file, open until the end of the block: OPENED s = opened();
#define OPENED FREED_BY(safetensors_close) SafeTensors
static SafeTensors opened(void) {
    SafeTensors s;
    safetensors_open(&s, path, "find another");
    return s;
}
static void open_file(void) {
    OPENED s = opened();
    (void)s;
}

#define expect_refusal(...) expect_error(open_file(), path, "; find another", __VA_ARGS__)

#define TENSOR(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

// ---- files that are not what they should be ----
TEST(a_good_file_opens_also_with_tensors_that_have_no_elements) {
    write_header("{\"__metadata__\":{\"format\":\"pt\"}," TENSOR("b", "F32", "2,1", 4, 12) "," TENSOR("a", "BF16", "2", 0, 4) ","
                 TENSOR("none", "F32", "0,5", 12, 12) "," TENSOR("scalar", "F32", "", 12, 16) "}  ", 16);
    OPENED s = opened();
    assert_int_equal(s.count, 4);
    assert_string_equal(s.tensors[0].name, "a"); // by place
    assert_string_equal(json_string_value(json_object_get(s.metadata, "format")), "pt");
    const SafeTensor* b = safetensors_find(&s, "b");
    assert_true(b && b->rank == 2 && b->elements == 2 && b->end == s.file_size - 4);
    assert_int_equal(safetensors_find(&s, "none")->elements, 0);
    assert_int_equal(safetensors_find(&s, "scalar")->elements, 1);
    assert_null(safetensors_find(&s, "c"));
    write_header("{}", 0);
    open_file();
}

TEST(a_header_length_is_not_believed) {
    static const struct { uint64_t length; const char* says; } cases[] = {
        { 100000001, "100000001 bytes where the format allows 100000000" },
        { UINT64_MAX, "18446744073709551615 bytes where the format allows" },
        { UINT64_MAX - 6, "where the format allows" }, // 8 + N would be 1
        { 100000000, "should have 100000000 bytes and the whole file has 10: truncated" },
        { 3, "truncated" }, { 0, "does not begin with '{'" }
    };
    write_file(NAME, "", 0);
    expect_refusal("has 0 bytes, too few");
    write_file(NAME, "1234567", 7);
    expect_refusal("has 7 bytes, too few");
    for (int i = 0; i < 6; i++) {
        write_parts(cases[i].length, "{}", 2, 0);
        expect_refusal(cases[i].says);
    }
}

#define WITH(members) "{\"a\":{" members "}}"
TEST(everything_that_a_header_says_is_checked) {
    static const struct { size_t data_size; const char *header, *says; } cases[] = {
        // UTF-8, JSON, an object
        { 0, "{\"\xff\":1}", "not valid JSON" }, { 0, "{\"\xc0\x80\":1}", "not valid JSON" }, // an overlong form
        { 0, "[]", "does not begin with '{'" }, { 0, " {}", "does not begin with '{'" }, { 0, "{\"a\":", "not valid JSON" },
        { 0, "{} x", "not valid JSON" }, { 0, "{\"a\":1}", "'a' is not an object" },
        { 0, "{\"__metadata__\":[]}", "'__metadata__' is not an object" },
        { 0, "{\"__metadata__\":{\"k\":1}}", "metadata's 'k' is not a string" },
        // each member
        { 4, WITH("\"shape\":[1],\"data_offsets\":[0,4]"), "'a' has no dtype" },
        { 4, WITH("\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]"), "'a' has no dtype" },
        { 4, "{" TENSOR("a", "F31", "1", 0, 4) "}", "unknown dtype 'F31'" },
        { 4, "{" TENSOR("a", "f32", "1", 0, 4) "}", "unknown dtype 'f32'" },
        { 4, WITH("\"dtype\":\"F32\",\"data_offsets\":[0,4]"), "'a' has no shape" },
        { 4, WITH("\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]"), "'a' has no shape" },
        { 4, "{" TENSOR("a", "F32", "1.0", 0, 4) "}", "'a' has no shape" },
        { 4, "{" TENSOR("a", "F32", "-1,-1", 0, 4) "}", "'a' has no shape" },
        { 4, "{" TENSOR("a", "F32", "1,1,1,1,1,1,1,1,1", 0, 4) "}", "'a' has no shape of at most 8" },
        { 4, "{" TENSOR("a", "F32", "9223372036854775808", 0, 4) "}", "not valid JSON: too big integer" },
        { 4, WITH("\"dtype\":\"F32\",\"shape\":[1]"), "'a' has no data_offsets" },
        { 4, WITH("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]"), "'a' has no data_offsets" },
        { 4, WITH("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]"), "'a' has no data_offsets" },
        { 4, WITH("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]"), "'a' has no data_offsets" },
        { 4, "{" TENSOR("a", "F32", "1", -4, 0) "}", "'a' has no data_offsets" },
        // names that occur twice, also as an escape
        { 8, "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("a", "F32", "1", 4, 8) "}", "duplicate object key" },
        { 8, "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("\\u0061", "F32", "1", 4, 8) "}", "duplicate object key" },
        { 4, WITH("\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), "duplicate object key" },
        // holes and overlaps
        { 8, "{" TENSOR("a", "F32", "1", 4, 8) "}", "'a' starts at byte 4 of the data where the one before ended at 0 (a hole)" },
        { 12, "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 8, 12) "}", "where the one before ended at 4 (a hole)" },
        { 8, "{" TENSOR("a", "F32", "2", 0, 8) "," TENSOR("b", "F32", "1", 4, 8) "}", "where the one before ended at 8 (an overlap)" },
        { 4, "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 0, 4) "}", "(an overlap)" },
        { 4, "{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 4, 0) "}", "'b' ends at byte 0, before it starts at 4" },
        // a shape must fill its place, and tensors the file
        { 4, "{" TENSOR("a", "F32", "2", 0, 4) "}", "'a' takes 4 bytes where its shape and dtype need 8" },
        { 4, "{" TENSOR("a", "F32", "0", 0, 4) "}", "'a' takes 4 bytes where its shape and dtype need 0" },
        { 4, "{" TENSOR("a", "F32", "4294967296,4294967296", 0, 4) "}", "'a' is larger than any memory" }, // 2^64: 0 if it wraps
        { 0, "{" TENSOR("a", "F64", "4611686018427387904", 0, 0) "}", "'a' is larger than any memory" }, // 2^62 of 64 bits
        { 8, "{" TENSOR("a", "U8", "9223372036854775807", 0, 9223372036854775807) "}", "'a' is larger than any memory" },
        { 1, "{" TENSOR("a", "F4", "3", 0, 1) "}", "'a' takes 1 bytes" }, // a byte and a half
        { 7, "{" TENSOR("a", "F32", "2", 0, 8) "}", "'a' ends at byte 8 of the data, of which there are 7: truncated" },
        { 9, "{" TENSOR("a", "F32", "2", 0, 8) "}", "its tensors have 8 bytes and the file 9 after the header" },
        { 1, "{}", "its tensors have 0 bytes and the file 1 after the header" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        write_header(cases[i].header, cases[i].data_size);
        expect_refusal(cases[i].says);
    }
    write_parts(3, "{}", 3, 0); // with a 0 at its end
    expect_refusal("not valid JSON");
}

// Opens the file, which then loses so many bytes, and reads n elements of a tensor.
static void read_some(const char* name, size_t begin, size_t n, int lost) {
    SafeTensors s = opened();
    float out[8];
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

TEST(what_is_written_in_pieces_comes_back_in_other_pieces_and_types) {
    char f32[] = "f32", bf16[] = "bf16", f16[] = "f16";
    const SafeTensor wanted[3] = { safetensor_wanted(f32, DTYPE_F32, ROWS, COLS), safetensor_wanted(bf16, DTYPE_BF16, ROWS, COLS),
                                   safetensor_wanted(f16, DTYPE_F16, ROWS * COLS, 0) };
    static float data[ROWS * COLS], back[ROWS * COLS], stored[ROWS * COLS];
    const size_t n = ROWS * COLS;
    for (size_t i = 0; i < n; i++) data[i] = (float)((int)(i * 7 % 255) - 127) / 8; // exact in each of our dtypes
    SafeTensors s, other;
    FREED_BY(json_decrefp) json_t* metadata = json_pack("{s:s}", "format", "test");
    assert_true(safetensors_create(&s, path, wanted, 3, metadata));
    safetensors_open_with(&other, path, O_RDWR, ""); // another rank's view of the same file
    for (int t = 0; t < 3; t++) for (size_t begin = 0, piece = 0; begin < n; begin += piece) {
        piece = size_min(n - begin, 1 + philox(1, (uint64_t)t, begin).x[0] % 30000);
        SafeTensors* writer = piece % 2 ? &s : &other;
        DType from = piece % 3 == 0 ? DTYPE_F32 : wanted[t].dtype;
        convert_dtype(stored, from, data + begin, DTYPE_F32, piece);
        assert_true(safetensors_write(writer, &writer->tensors[t], begin, piece, stored, from));
    }
    assert_true(safetensors_sync(&s));
    assert_true(safetensors_close(&s));
    assert_true(safetensors_close(&other));
    s = opened();
    assert_int_equal(s.tensors[0].begin % 8, 0);
    for (int t = 0; t < 3; t++) {
        const SafeTensor* from = safetensors_find(&s, wanted[t].name);
        for (size_t begin = 0, piece = 0; begin < n; begin += piece) {
            piece = size_min(n - begin, 1 + philox(2, (uint64_t)t, begin).x[0] % 40000);
            safetensors_read(&s, from, begin, piece, back + begin, DTYPE_F32);
        }
        assert_memory_equal(back, data, n * sizeof(float));
        safetensors_read(&s, from, 0, n, stored, DTYPE_F16); // from bf16 too: through fp32
        convert_dtype(back, DTYPE_F32, stored, DTYPE_F16, n);
        assert_memory_equal(back, data, n * sizeof(float));
    }
    safetensors_close(&s);
}

TEST(nothing_is_written_over) {
    write_file(NAME, "mine", 4);
    char name[] = "a";
    SafeTensor wanted = safetensor_wanted(name, DTYPE_F32, 4, 0);
    OPENED s;
    FREED_BY(json_decrefp) json_t* metadata = json_object();
    assert_false(safetensors_create(&s, path, &wanted, 1, metadata));
    assert_int_equal(errno, EEXIST);
    struct stat info;
    assert_true(stat(path, &info) == 0 && info.st_size == 4);
}

// A sparse file of 6 GiB: offsets that do not fit in 32 bits.
TEST(tensors_beyond_4_gib_are_found) {
    const size_t n = (size_t)3 << 30;
    write_header("{\"a\":{\"dtype\":\"BF16\",\"shape\":[3,1073741824],\"data_offsets\":[0,6442450944]}}", 0);
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    if (truncate(path, info.st_size + (off_t)(2 * n)) != 0) skip_test("this file system has no large sparse files");
    OPENED s;
    safetensors_open_with(&s, path, O_RDWR, "");
    const float data[3] = { 1, 2, 3 };
    float back[3];
    assert_true(safetensors_write(&s, s.tensors, n - 3, 3, data, DTYPE_F32));
    safetensors_read(&s, s.tensors, n - 3, 3, back, DTYPE_F32);
    assert_memory_equal(back, data, sizeof data);
    safetensors_read(&s, s.tensors, (n - 3) % ((size_t)1 << 31), 3, back, DTYPE_F32);
    assert_true(back[0] == 0 && back[1] == 0 && back[2] == 0);
}
