// test_sharding.c - fully sharded parameters (llmc/parallel/layout.h): communicators, options that do not go together, the report.
// (test/kernels/check_host.py has layouts.)
#include "../../llmc/parallel/layout.h"
#include "expect_death.h"
#include "world_alone.h"

// ---- communicators ----
static void alone_in_every_way(void) {
    static Comm world;
    static Control control;
    world_alone(&world, &control);
    for (int kind = SHARD_FULL; kind <= SHARD_HYBRID; kind++) {
        static Layout y;
        Sharding options = { .sharding = kind, .shards = 1 };
        layout_split(&y, &options, &world);
        require(y.shard_ranks->size == 1 && y.replicas->size == 1, "%d shards, %d replicas", y.shard_ranks->size, y.replicas->size);
        require(y.shard_ranks != y.replicas, "shards and replicas are one communicator");
        layout_free(&y);
    }
    world_end(&world);
}
TEST(one_rank_alone_has_both_communicators_in_every_sharding) { expect_success(alone_in_every_way()); }

// ---- options ----
TEST(options_that_do_not_go_together_and_the_number_of_shards) {
    static const struct { Sharding options; const char *says, *also; int shards; } cases[] = { // on 6 ranks
        { { .sharding = SHARD_FULL, .limit_all_gathers = 2, .shard_group = 3 }, "--shard-group and --sharding hybrid go together", "", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "--shard-group and --sharding hybrid go together", "", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2, .shard_group = 4 }, "--shard-group must divide", "4 does not divide 6", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2, .shard_group = 12 }, "12 does not divide 6", "", 0 },
        { { .sharding = SHARD_HYBRID, .limit_all_gathers = 2, .shard_group = 3, .offload = OFFLOAD_ALL },
          "--cpu-offload keeps shards on the host", "use --sharding full or grad-op", 0 },
        { { .limit_all_gathers = 2, .host_link = 1 }, "--emulate-host-link needs --cpu-offload optimizer or all", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = BACKWARD_PRE }, "--limit-all-gathers 1 leaves no buffer", "--prefetch none", 0 },
        { { .limit_all_gathers = 1, .prefetch = BACKWARD_POST }, "--limit-all-gathers 1 leaves no buffer", "", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE, .forward_prefetch = 1 }, "--limit-all-gathers 1 leaves no buffer", "", 0 },
        { { .limit_all_gathers = 2, .wrap_halves = 1, .wrap_blocks = 2 }, "--wrap-halves cuts each block", "leave out --wrap-blocks 2", 0 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE, .wrap_halves = 1, .wrap_blocks = 1 }, "--wrap-halves needs --limit-all-gathers 2",
          "both halves at once", 0 },
        { { .limit_all_gathers = 1, .sharding = SHARD_GRAD_OP, .wrap_halves = 1, .wrap_blocks = 1 }, NULL, NULL, 6 },
        { { .limit_all_gathers = 1, .prefetch = PREFETCH_NONE }, NULL, NULL, 6 }, // gathers nothing ahead
        { { .limit_all_gathers = 1, .sharding = SHARD_GRAD_OP }, NULL, NULL, 6 }, // frees nothing, so every unit has a room
        { { .limit_all_gathers = 2, .sharding = SHARD_HYBRID, .shard_group = 3 }, NULL, NULL, 3 },
        { { .limit_all_gathers = 2, .sharding = SHARD_GRAD_OP, .offload = OFFLOAD_ALL }, NULL, NULL, 6 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Sharding options = cases[i].options;
        if (cases[i].says) expect_error(sharding_check(&options, 6, 1), cases[i].says, cases[i].also);
        else sharding_check(&options, 6, 1);
        assert_int_equal(options.shards, cases[i].shards);
    }
}

TEST(a_report_says_how_large_groups_are) {
    const GPT2Config c = { 32, 384, 384, 5, 4, 32 };
    static const struct { Sharding options; const char* says; } cases[] = { // on 4 ranks
        { { .wrap_blocks = 1, .shards = 4, .limit_all_gathers = 2 }, "sharding full by block: each rank keeps 1/4 of everything, 0.21 % of it" },
        { { .wrap_blocks = 1, .shards = 4, .limit_all_gathers = 2 }, "buffers: 1 for the root, 2 for others\n" },
        { { .wrap_blocks = 1, .shards = 4, .limit_all_gathers = 7 }, "buffers: 1 for the root, 5 for others\n" },
        { { .wrap_blocks = 1, .shards = 4, .offload = OFFLOAD_OPTIMIZER }, "1/4 of everything, all but parameters on the host" },
        { { .wrap_blocks = 2, .shards = 4, .limit_all_gathers = 2 }, "sharding full by 2 blocks:" },
        { { .wrap_blocks = 1, .wrap_halves = 1, .shards = 4, .limit_all_gathers = 2 }, "sharding full by half a block:" },
        { { .shards = 2, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "sharding hybrid by model: each rank keeps 1/2" },
        { { .shards = 2, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "buffers: 1 for the root, 0 for others\nreplicas   2, of 2 ranks each\n" },
        { { .shards = 1, .sharding = SHARD_HYBRID, .limit_all_gathers = 2 }, "replicas   4, of 1 rank each\n" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Sharding options = cases[i].options;
        static Layout y;
        memset(&y, 0, sizeof y);
        layout_group(&y, &options, c);
        for (int k = 0; k < y.num_groups; k++) y.own_elements += shard_of(y.groups[k].elements, options.shards);
        FREED_BY(child_free) Child said = child_does(report_sharding(&y, &options, 4));
        if (said.status != 0 || !strstr(said.out, cases[i].says)) fail_msg("'%s' is not in %s%s", cases[i].says, said.out, said.err);
    }
}
