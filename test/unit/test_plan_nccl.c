// test_plan_nccl.c - build/plan's --algorithm nccl: the seconds that NCCL 2.30.7 expects, counted by hand from src/graph/tuning.cc, the
// channels that its logs print, what was measured, and properties that hold for every group.
#include "../../dev/tools/plan_gpus.h"
#include "unit.h"

static bool near(double x, double y) { return fabs(x - y) <= 1e-9 * fabs(y); }
static NcclGroup group_of(const char* gpu, int ranks, int per_node) { return plan_gpu_group(plan_gpu(gpu), ranks, per_node, 8 / per_node); }
static double microseconds(const NcclGroup* g, NcclAlgorithm a, NcclProtocol p, bool all_reduce, double bytes) {
    return 1e6 * nccl_seconds_of(g, a, p, all_reduce, bytes);
}
static double busbw(const NcclGroup* g, bool all_reduce, double bytes) { // as nccl-tests define it, in GB/s
    double N = g->ranks;
    return 1e-9 * bytes * (all_reduce ? 2 : 1) * (N - 1) / N / nccl_choose(g, all_reduce, bytes).seconds;
}
static void assert_graph(NcclGraph graph, int channels, double inside, double between) {
    if (graph.channels != channels || graph.speed_inside != inside || graph.speed != between)
        fail_msg("%d x %g/%g, not %d x %g/%g", graph.channels, graph.speed_inside, graph.speed, channels, inside, between);
}

// "nChannels 12, bw 30.000000/30.000000"
TEST(channels_are_those_of_nccls_logs) {
    NcclGroup h = group_of("h100", 8, 8), a = group_of("a100-80", 8, 8), nodes = group_of("h100", 16, 8);
    assert_graph(nccl_ring_graph(&h), 12, 30, 30);     // pattern 4 of NVIDIA/nccl#1197; 370.8 GB/s hold 6 of 60, each doubled
    assert_graph(nccl_tree_graph(&h), 12, 30, 30);     // pattern 1
    assert_graph(nccl_nvls_graph(&h), 8, 40, 60);      // pattern 5; 9 of 40 are 360
    assert_graph(nccl_ring_graph(&a), 12, 20, 20);     // 240 GB/s hold 6 of 40
    assert_int_equal(nccl_nvls_graph(&a).channels, 0); // Ampere's switch does not add up
    assert_graph(nccl_ring_graph(&nodes), 8, 45, 45);  // 8 interfaces of 50 hold one of 48 each, NVLink only 7 of these
    NcclGroup apart = group_of("h100", 8, 1), pcie = group_of("rtx4090", 8, 8);
    assert_graph(nccl_ring_graph(&apart), 2, 24, 24);  // one interface holds one of 48, which is doubled
    assert_graph(nccl_ring_graph(&pcie), 2, 12, 12);
}

TEST(seconds_counted_by_hand) {
    double each = 2 * .85 * 40 * 7 / 8; // of a channel of NVLS: 0.85 of 7/8 of 40 GB/s, in both directions of an all-reduce
    const struct { int per_node, ranks; NcclAlgorithm a; NcclProtocol p; bool all_reduce; double bytes, us; } rows[] = {
        // in a node a ring of 8: 14 hops of an all-reduce, 7 of a gather; 360 GB/s of busbw
        { 8, 8, NCCL_RING, NCCL_SIMPLE, true, 36e6, 8.4 + 14 * 3.4 + 36e3 / (360 * 8 / 14.0) },
        { 8, 8, NCCL_RING, NCCL_SIMPLE, false, 36e6, 8.4 + 7 * 3.4 + 36e3 / (360 * 8 / 7.0) },
        { 8, 8, NCCL_RING, NCCL_LL128, false, 36e6, 14 + 7 * 1.9 + 36e3 / (.92 * 360 * 8 / 7) },
        { 8, 8, NCCL_RING, NCCL_LL, true, 36e6, 6.6 + 14 * .6 + 36e3 / (141 * 8 / 14.0) },
        // a chain of 8, twice; 36e6 / 64 is between 2^19 and 2^20, where Simple reaches 0.7
        { 8, 8, NCCL_TREE, NCCL_SIMPLE, true, 36e6, 8.4 + 2 * 7 * 4 + 36e3 / (.92 * 360 / 2 * .7) },
        { 8, 8, NCCL_NVLS, NCCL_SIMPLE, true, 36e6, 25 + 36e3 / (8 * each * 8 / 14) },
        { 8, 8, NCCL_NVLS, NCCL_SIMPLE, false, 36e6, 25 + 36e3 / (8 * each / 2 * 7 / 8) },
        // a ring of 512 in 64 nodes: 448 hops inside, 63 between; a channel of LL128 moves 36.7 GB/s at most
        { 8, 512, NCCL_RING, NCCL_LL128, false, 61.5e6, 14 + 448 * 1.9 + 63 * 4 + 61.5e3 / (8 * 36.7 * 512 / 511) },
        // Simple waits for a post to the network, 3 us, or for its own hop; a large all-reduce's ring has a plateau, 1.4
        { 8, 512, NCCL_RING, NCCL_SIMPLE, true, 61.5e6, 1.4 * (8.4 + 2 * (448 * 3.4 + 63 * 14)) + 61.5e3 / (360 * 512 / 1022.0) },
        // trees: 7 hops inside, log2(64) between; there a channel moves 29 GB/s
        { 8, 512, NCCL_TREE, NCCL_LL128, true, 61.5e6, 14 + 2 * (7 * 1.25 + 6 * 8.5) + 61.5e3 / (8 * 29 / 2.0 * .9) },
        { 8, 512, NCCL_NVLS_TREE, NCCL_SIMPLE, true, 61.5e6, 25 + 12 * 20.9 + 61.5e3 / (8 * 45.5 * 512 / 1022) },
        { 8, 8, NCCL_TREE, NCCL_SIMPLE, false, 1e6, INFINITY },      // trees only sum and tell
        { 8, 8, NCCL_NVLS_TREE, NCCL_SIMPLE, true, 1e6, INFINITY },
        { 8, 64, NCCL_NVLS, NCCL_SIMPLE, true, 1e6, INFINITY },      // would need the network to add up
        { 8, 8, NCCL_NVLS, NCCL_LL, true, 1e6, INFINITY },
        { 8, 64, NCCL_PAT, NCCL_SIMPLE, false, 1e6, INFINITY },      // one rank per node, and no all-reduce
        { 1, 64, NCCL_PAT, NCCL_SIMPLE, true, 1e6, INFINITY } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        NcclGroup g = group_of("h100", rows[i].ranks, rows[i].per_node);
        double us = microseconds(&g, rows[i].a, rows[i].p, rows[i].all_reduce, rows[i].bytes);
        if (us != rows[i].us && !near(us, rows[i].us)) fail_msg("row %zu: %.12g us, not %.12g", i, us, rows[i].us);
    }
    NcclGroup apart = group_of("h100", 64, 1), a100 = group_of("a100-80", 64, 8), pcie = group_of("rtx4090", 8, 8);
    assert_true(isfinite(microseconds(&apart, NCCL_PAT, NCCL_SIMPLE, false, 1e6)));
    // the processors of an A100's node are AMD's, whose posts take 2 us; PCIe does not keep 128 bytes together
    assert_true(near(microseconds(&a100, NCCL_RING, NCCL_LL, false, 1e3), 6.6 + 56 * 2 + 7 * 2.7 + 1 / (19 * 64 / 63.0)));
    assert_true(isinf(microseconds(&pcie, NCCL_RING, NCCL_LL128, true, 1e6)));
}

TEST(choices) {
    static const struct { const char* gpu; int ranks; bool all_reduce; double bytes; NcclAlgorithm a; NcclProtocol p; } rows[] = {
        { "h100", 8, true, 1e3, NCCL_RING, NCCL_LL }, { "h100", 8, true, 1e8, NCCL_NVLS, NCCL_SIMPLE },
        { "h100", 8, false, 1e8, NCCL_RING, NCCL_SIMPLE }, { "a100-80", 8, true, 4e6, NCCL_RING, NCCL_LL128 },
        { "h100", 512, true, 1e3, NCCL_TREE, NCCL_LL }, { "h100", 512, true, 61.5e6, NCCL_NVLS_TREE, NCCL_SIMPLE }, // a block of gpt2-xl
        { "h100", 512, false, 61.5e6, NCCL_RING, NCCL_LL128 } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        NcclGroup g = group_of(rows[i].gpu, rows[i].ranks, 8);
        NcclChoice c = nccl_choose(&g, rows[i].all_reduce, rows[i].bytes);
        if (c.algorithm != rows[i].a || c.protocol != rows[i].p)
            fail_msg("row %zu: %s %s", i, nccl_algorithm_names[c.algorithm], nccl_protocol_names[c.protocol]);
    }
}

// NVIDIA/nccl-tests#212 and #290: in a node of H100s 480 GB/s with NVLS and 370 in rings; between nodes 46 to 48 per interface.
TEST(measured_bandwidths) {
    NcclGroup node = group_of("h100", 8, 8), nodes = group_of("h100", 64, 8);
    double sum = busbw(&node, true, 8e9), gather = busbw(&node, false, 8e9), far = busbw(&nodes, true, 8e9) / 8;
    if (fabs(sum / 480 - 1) > 0.02) fail_msg("%g GB/s, not 480", sum);
    if (fabs(gather / 370 - 1) > 0.03) fail_msg("%g GB/s, not 370", gather);
    if (fabs(far / 47 - 1) > 0.04) fail_msg("%g GB/s per interface, not 46 to 48", far);
}

TEST(what_holds_for_every_group) {
    static const int per_node[] = { 1, 2, 4, 8 };
    for (int i = 0; i < PLAN_GPUS; i++) {
        if (plan_gpus[i].nccl_inside == 0) continue;
        for (int n = 0; n < 4; n++) for (int nodes = 1; nodes <= 256; nodes *= 2) {
            NcclGroup g = plan_gpu_group(&plan_gpus[i], nodes * per_node[n], per_node[n], 8 / per_node[n]);
            if (g.ranks == 1) continue;
            for (double bytes = 1; bytes < 1e11; bytes *= 10) {
                double sum = nccl_choose(&g, true, bytes).seconds, gather = nccl_choose(&g, false, bytes).seconds;
                assert_true(isfinite(sum) && isfinite(gather) && sum > 0 && gather > 0);
                // no faster than the links
                double link = nodes > 1 ? 1e9 * g.nic * g.nics : 1e9 * g.inside;
                assert_true(gather > bytes * (g.ranks - 1) / g.ranks / link);
                assert_true(nccl_choose(&g, true, 10 * bytes).seconds > sum);
            }
        }
    }
    NcclGroup slow = group_of("h100", 64, 8);
    slow.nic = 0.01; // less than any channel that NCCL tries
    assert_true(near(microseconds(&slow, NCCL_RING, NCCL_SIMPLE, false, 1e9), 8.4 + 56 * 3.4 + 7 * 14 + 1e6 / (0.08 * 64 / 63)));
    NcclGroup alone = group_of("h100", 1, 1);
    assert_true(nccl_choose(&alone, true, 1e9).seconds == 0);
}
