// test_report.c - the report of predicted and measured bytes: what agrees, what does not, and by how much.
#include "../../llmc/run/report.h"
#include "expect_death.h"

// Allocates what is predicted, and `more` bytes of activations; exits with 0 if the report finds that all agrees, else 2.
static void allocate_and_report(void* more) {
    size_t predicted[MEMORY_KINDS] = { 4000, 4000, 8000, 123456, 0, 640 };
    device_init(0, 1);
    for (int k = 0; k < MEMORY_KINDS; k++) if (predicted[k] > 0) device_alloc(predicted[k], (MemoryKind)k);
    if (*(size_t*)more > 0) device_alloc(*(size_t*)more, MEMORY_ACTIVATIONS);
    exit(report_memory(predicted) ? 0 : 2);
}

// Returns true if a report has this row, with any number of spaces between columns.
static bool has_row(const char* report, const char* row) {
    char* squeezed = xcalloc(strlen(report) + 1, 1);
    size_t n = 0;
    for (const char* c = report; *c; c++) if (*c != ' ' || c[1] != ' ') squeezed[n++] = *c;
    bool found = strstr(squeezed, row) != NULL;
    free(squeezed);
    return found;
}

static void test_equal_memory_is_as_predicted(void** state) {
    (void)state;
    size_t more = 0;
    Child c = child_run(allocate_and_report, &more);
    assert_int_equal(c.status, 0);
    assert_true(has_row(c.out, " activations 123 kB 123 kB as predicted\n"));
    assert_true(has_row(c.out, " total 140 kB 140 kB as predicted\n"));
    assert_true(has_row(c.out, " peak 140 kB 140 kB as predicted\n"));
    assert_null(strstr(c.out, "communication")); // neither predicted nor there
    assert_null(strstr(c.out, "than"));
    child_free(&c);
}

static void test_a_difference_of_one_byte_is_found_where_it_is(void** state) {
    (void)state;
    size_t more = 1;
    Child c = child_run(allocate_and_report, &more);
    assert_int_equal(c.status, 2);
    assert_true(has_row(c.out, " activations 123 kB 123 kB 1 bytes more than predicted\n"));
    assert_true(has_row(c.out, " total 140 kB 140 kB 1 bytes more than predicted\n"));
    assert_true(has_row(c.out, " gradients 4.0 kB 4.0 kB as predicted\n"));
    child_free(&c);
}

static void free_too_much(void* unused) {
    (void)unused;
    size_t predicted[MEMORY_KINDS] = { 4000 };
    device_init(0, 1);
    device_free(device_alloc(4000, MEMORY_PARAMETERS)); // at the peak all is as predicted, at the end it is not
    exit(report_memory(predicted) ? 0 : 2);
}

// Takes 4000 bytes on the device, 9000 on the host, and 1000 there for a while; `more`: bytes there that were not predicted.
static void offload_and_report(void* more) {
    size_t predicted[MEMORY_KINDS] = { 4000 };
    predicted[MEMORY_OFFLOADED] = 9000;
    device_init(0, 1);
    device_memory_limit(4000); // of the device's
    char* state = (char*)offload_alloc(9000 + *(size_t*)more);
    for (int i = 0; i < 9000; i++) require(state[i] == 0, "byte %d of offloaded memory is %d", i, state[i]);
    offload_free(offload_alloc(1000));
    offload_free(NULL);
    device_alloc(4000, MEMORY_PARAMETERS);
    exit(report_memory(predicted) ? 0 : 2);
}

static void test_offloaded_memory_is_beside_the_devices(void** state) {
    (void)state;
    size_t more = 0, some = 1;
    Child c = child_run(offload_and_report, &more);
    assert_int_equal(c.status, 0);
    assert_true(has_row(c.out, " total 4.0 kB 4.0 kB as predicted\n"));
    assert_true(has_row(c.out, " peak 4.0 kB 4.0 kB as predicted\n state on the host 9.0 kB 9.0 kB as predicted\n"));
    child_free(&c);
    c = child_run(offload_and_report, &some);
    assert_int_equal(c.status, 2);
    assert_true(has_row(c.out, " state on the host 9.0 kB 9.0 kB 1 bytes more than predicted\n"));
    child_free(&c);
}

static void test_memory_that_is_gone_is_a_difference_too(void** state) {
    (void)state;
    Child c = child_run(free_too_much, NULL);
    assert_int_equal(c.status, 2);
    assert_true(has_row(c.out, " parameters 4.0 kB 0 B 4000 bytes less than predicted\n"));
    assert_true(has_row(c.out, " peak 4.0 kB 4.0 kB as predicted\n"));
    child_free(&c);
}

static void test_the_record_of_a_run_says_what_it_is(void** state) {
    (void)state;
    GPT2Config gpt2 = { 1024, 50257, 50304, 12, 12, 768 };
    size_t predicted[MEMORY_KINDS] = { 1, 2, 3, 4, 5, 6, 7 };
    json_t* run = run_record(gpt2, predicted, 8);
    assert_int_equal(json_integer_value(json_object_get(run, "parameters")), 124439808);
    assert_int_equal(json_integer_value(json_object_get(run, "world_size")), 8);
    json_t* bytes = json_object_get(run, "predicted_bytes");
    assert_int_equal(json_object_size(bytes), MEMORY_KINDS);
    for (int k = 0; k < MEMORY_KINDS; k++) {
        assert_int_equal(json_integer_value(json_object_get(bytes, memory_kind_names[k])), predicted[k]);
    }
    json_decref(run);
}

// Takes 60 of 100 bytes, then as many as are asked for; frees and takes them again, because only bytes in use count.
static void allocate_within_limit(void* more) {
    device_init(0, 1);
    device_memory_limit(100);
    void* first = device_alloc(60, MEMORY_PARAMETERS);
    device_free(device_alloc(*(size_t*)more, MEMORY_ACTIVATIONS));
    device_free(device_alloc(*(size_t*)more, MEMORY_COMMUNICATION));
    device_free(first);
    device_memory_limit(0);
    device_free(device_alloc(1000, MEMORY_PARAMETERS));
}

static void test_memory_up_to_its_limit_can_be_had_and_not_a_byte_more(void** state) {
    (void)state;
    size_t fits = 40, too_many = 41, far_too_many = SIZE_MAX;
    Child c = child_run(allocate_within_limit, &fits);
    assert_int_equal(c.status, 0);
    child_free(&c);
    expect_death(allocate_within_limit, &too_many, "more for activations", "(0.000 GB parameters)", "over --memory-limit 1e-07 GB");
    expect_death(allocate_within_limit, &far_too_many, "more for activations", "over --memory-limit 1e-07 GB");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_memory_is_as_predicted),
        cmocka_unit_test(test_a_difference_of_one_byte_is_found_where_it_is),
        cmocka_unit_test(test_offloaded_memory_is_beside_the_devices),
        cmocka_unit_test(test_memory_that_is_gone_is_a_difference_too),
        cmocka_unit_test(test_the_record_of_a_run_says_what_it_is),
        cmocka_unit_test(test_memory_up_to_its_limit_can_be_had_and_not_a_byte_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
