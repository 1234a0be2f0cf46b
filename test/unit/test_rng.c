// test_rng.c - the generator against published vectors, and the distributions made from its numbers.
#include "../../llmc/base/rng.h"
#include "expect_death.h"

// The known answers of philox4x32-10 that come with Random123 (Salmon et al.).
TEST(philox_gives_the_known_answers) {
    const uint64_t ones = ~0ull;
    const struct { uint64_t key, high, low; uint32_t answer[4]; } known[] = {
        { 0, 0, 0, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { ones, ones, ones, { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { 0x299f31d0a4093822ull, 0x0370734413198a2eull, 0x85a308d3243f6a88ull, // digits of pi
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (int i = 0; i < 3; i++) {
        Philox r = philox(known[i].key, known[i].high, known[i].low);
        assert_memory_equal(r.x, known[i].answer, sizeof known[i].answer);
    }
}

TEST(uniform_numbers_fill_the_unit_interval_evenly) {
    enum { N = 1000000, BUCKETS = 64 };
    int counts[BUCKETS] = { 0 };
    double sum = 0;
    for (int i = 0; i < N; i++) {
        float u = random_uniform(7, STREAM_SAMPLER, (uint64_t)i);
        assert_true(u >= 0 && u < 1);
        counts[(int)(u * BUCKETS)]++;
        sum += u;
    }
    assert_near(sum / N, 0.5, 5 * 0.2887e-3); // five standard errors, here and below
    double chi_square = 0, expected = (double)N / BUCKETS;
    for (int b = 0; b < BUCKETS; b++) chi_square += (counts[b] - expected) * (counts[b] - expected) / expected;
    assert_near(chi_square, BUCKETS - 1, 5 * sqrt(2.0 * (BUCKETS - 1)));
}

TEST(normal_numbers_have_the_moments_of_a_normal_distribution) {
    const int n = 1000000;
    const double expected[] = { 1, 0, 1, 0, 3 }, variances[] = { 0, 1, 2, 15, 96 };
    double sums[5] = { 0 }, with_next = 0, before = 0;
    for (int i = 0; i < n; i++) {
        double x = random_normal(7, STREAM_WEIGHTS + 3, (uint64_t)i), power = 1;
        for (int k = 1; k <= 4; k++) sums[k] += power *= x;
        with_next += x * before;
        before = x;
    }
    for (int k = 1; k <= 4; k++) assert_near(sums[k] / n, expected[k], 5 * sqrt(variances[k] / n));
    assert_near(with_next / n, 0, 5 * sqrt(1.0 / n));
}

TEST(seeds_and_streams_have_nothing_in_common) {
    const int n = 100000;
    double seeds = 0, streams = 0;
    for (int i = 0; i < n; i++) {
        double x = random_normal(1, 0, (uint64_t)i);
        seeds += x * random_normal(2, 0, (uint64_t)i);
        streams += x * random_normal(1, 1, (uint64_t)i);
    }
    assert_near(seeds / n, 0, 5 * sqrt(1.0 / n));
    assert_near(streams / n, 0, 5 * sqrt(1.0 / n));
}

static void assert_permutation(uint64_t seed, uint64_t n) {
    FREED unsigned char* hit = xcalloc(n, 1);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t k = random_permute(seed, STREAM_DATA, i, n);
        if (k >= n || hit[k]) fail_msg("n = %zu: %zu goes to %zu, a second time or beyond", (size_t)n, (size_t)i, (size_t)k);
        hit[k] = 1;
    }
}
TEST(permute_is_a_permutation_of_any_size) {
    for (uint64_t n = 1; n <= 2000; n++) assert_permutation(n % 5, n);
    assert_permutation(1, 1 << 16);
    assert_permutation(2, (1 << 16) + 1);
    assert_permutation(3, 300007);
    const uint64_t large[] = { 1ull << 33, (1ull << 40) + 1, 1ull << 62, ~0ull };
    for (int k = 0; k < 4; k++)
        for (uint64_t i = 0; i < 1000; i++) assert_true(random_permute(9, STREAM_DATA, large[k] - 1 - i, large[k]) < large[k]);
}

// Over many seeds every element goes to every place equally often, also in small sets.
TEST(permute_has_no_favourite_places) {
    const int seeds = 10000, sizes[] = { 2, 3, 4, 5, 6, 7, 8, 12, 17, 40 };
    for (int k = 0; k < 10; k++) {
        int n = sizes[k];
        for (int element = 0; element < n; element++) {
            int counts[40] = { 0 };
            for (int seed = 0; seed < seeds; seed++) counts[random_permute((uint64_t)seed, STREAM_DATA, (uint64_t)element, (uint64_t)n)]++;
            double p = 1.0 / n;
            for (int place = 0; place < n; place++) assert_near((double)counts[place] / seeds, p, 5 * sqrt(p * (1 - p) / seeds));
        }
    }
}
