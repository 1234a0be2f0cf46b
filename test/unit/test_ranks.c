// test_ranks.c - which rank a process is, from its launcher's variables; ranks in words; deliberate faults.
#include "../../llmc/watch/fault.h"
#include "../../llmc/watch/ranks.h"
#include "expect_death.h"

// ---- variables ----

// Sets these "NAME=VALUE" and unsets all other variables of launchers, including those that this test was started with.
static void set_environment(const char* const* variables) {
    static const char* const known[] = {
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) unsetenv(known[i]);
    for (; *variables; variables++) {
        char name[64];
        size_t n = strcspn(*variables, "=");
        memcpy(name, *variables, n);
        name[n] = '\0';
        setenv(name, *variables + n + 1, 1);
    }
}

static RankInfo found_with(const char* const* variables) {
    set_environment(variables);
    return ranks_find();
}

#define expect_refused(says, ...) expect_error(found_with(environment(__VA_ARGS__)), says)
#define environment(...) ((const char* const[]){ __VA_ARGS__, NULL })
#define OPENMPI(rank, size) \
    "OMPI_COMM_WORLD_RANK=" rank, "OMPI_COMM_WORLD_SIZE=" size, "OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_SIZE=2"
#define TORCHRUN(rank, size) \
    "RANK=" rank, "WORLD_SIZE=" size, "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=gpu01", "MASTER_PORT=29500"
#define SLURM(rank, size) \
    "SLURM_PROCID=" rank, "SLURM_NTASKS=" size, "SLURM_STEP_NUM_TASKS=" size, "SLURM_LOCALID=1", "SLURM_NODEID=2", \
    "SLURM_STEP_TASKS_PER_NODE=2(x3),1", "SLURM_JOB_ID=123456", "SLURM_STEP_NODELIST=gpu[07-12,20],login1"

static void expect_ranks(RankInfo r, int rank, int size, int local_rank, int local_size, const char* found) {
    assert_true(r.rank == rank && r.size == size && r.local_rank == local_rank && r.local_size == local_size);
    assert_string_equal(r.found, found);
}

TEST(a_process_that_nobody_launched_is_alone) {
    RankInfo r = found_with(environment("HOME=/"));
    expect_ranks(r, 0, 1, 0, 1, "started alone");
    assert_string_equal(r.meeting, "");
}

TEST(each_launcher_is_understood) {
    RankInfo r = found_with(environment(OPENMPI("5", "7")));
    expect_ranks(r, 5, 7, 1, 2, "OpenMPI");
    assert_string_equal(r.meeting, ""); // MPI itself tells where rank 0 is
    r = found_with(environment(TORCHRUN("3", "4")));
    expect_ranks(r, 3, 4, 1, 2, "torchrun");
    assert_string_equal(r.meeting, "29501 none gpu01");
    r = found_with(environment(TORCHRUN("3", "4"), "TORCHELASTIC_RUN_ID=run-8"));
    assert_string_equal(r.meeting, "29501 run-8 gpu01");
    r = found_with(environment(SLURM("5", "7")));
    expect_ranks(r, 5, 7, 1, 2, "Slurm");
    assert_string_equal(r.meeting, "23456 123456 gpu07");
}

TEST(slurm_counts_tasks_by_node) {
    static const struct { const char* text; int node, tasks, expected; } cases[] = {
        { "4", 0, 4, 4 }, { "2(x3),1", 2, 7, 2 }, { "2(x3),1", 3, 7, 1 }, { "1,8(x2),3", 0, 20, 1 }, { "1,8(x2),3", 1, 20, 8 },
        { "1,8(x2),3", 3, 20, 3 }
    };
    for (int i = 0; i < 6; i++)
        assert_int_equal(ranks_slurm_tasks_on(cases[i].text, cases[i].node, cases[i].tasks), cases[i].expected);
}

TEST(the_first_of_slurms_nodes) {
    static const char* const lists[][2] = {
        { "gpu01", "gpu01" }, { "gpu01,gpu02", "gpu01" }, { "gpu[07-12,20],login", "gpu07" },
        { "rack[1-2]node[03,05]", "rack1node03" }, { "a[9].cluster,b", "a9.cluster" }, { "broken[12", "broken12" }, { "", "" }
    };
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        char name[256];
        ranks_first_node(lists[i][0], name, sizeof name);
        assert_string_equal(name, lists[i][1]);
    }
}

TEST(a_batch_script_itself_is_no_task) {
    RankInfo r = found_with(environment("SLURM_JOB_ID=1", "SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=0"));
    expect_ranks(r, 0, 1, 0, 1, "started alone");
}

TEST(a_launcher_inside_another_is_the_one_that_counts) {
    expect_ranks(found_with(environment(OPENMPI("5", "8"), SLURM("1", "7"))), 5, 8, 1, 2, "OpenMPI");
    RankInfo r = found_with(environment(TORCHRUN("9", "14"), "GROUP_WORLD_SIZE=7", SLURM("4", "7"))); // a torchrun on each of 7 nodes
    expect_ranks(r, 9, 14, 1, 2, "torchrun");
    expect_ranks(found_with(environment(OPENMPI("1", "2"), TORCHRUN("1", "2"))), 1, 2, 1, 2, "OpenMPI"); // they agree
    expect_ranks(found_with(environment(TORCHRUN("5", "7"), SLURM("5", "7"))), 5, 7, 1, 2, "torchrun");
}

TEST(launchers_that_disagree_are_an_error_that_names_both) {
    expect_refused("OpenMPI says that this is rank 1 of 2, torchrun that it is rank 0 of 2", OPENMPI("1", "2"), TORCHRUN("0", "2"));
    expect_refused("torchrun says that this is rank 1 of 4, Slurm that it is rank 1 of 7", TORCHRUN("1", "4"), SLURM("1", "7"));
}

TEST(bad_numbers_name_their_variable) {
    expect_refused("OMPI_COMM_WORLD_RANK is 2, but it must be from 0 to 1", OPENMPI("2", "2"));
    expect_refused("OMPI_COMM_WORLD_SIZE is 0", OPENMPI("1", "0"));
    expect_refused("OMPI_COMM_WORLD_LOCAL_SIZE is 2, but it must be from 1 to 1", OPENMPI("0", "1"));
    expect_refused("RANK is 'one', which is not a number", TORCHRUN("one", "2"));
    expect_refused("RANK is '-1', which is not a number", TORCHRUN("-1", "2"));
    expect_refused("WORLD_SIZE is '2 ', which is not a number", TORCHRUN("1", "2 "));
    expect_refused("WORLD_SIZE is '99999999999999999999', which is not a number", TORCHRUN("1", "99999999999999999999"));
    expect_refused("LOCAL_RANK is 2, but it must be from 0 to 1", TORCHRUN("1", "4"), "LOCAL_RANK=2");
    expect_refused("SLURM_PROCID is 7, but it must be from 0 to 6", SLURM("7", "7"));
    expect_refused("SLURM_STEP_TASKS_PER_NODE is '2(x0)'", SLURM("1", "7"), "SLURM_STEP_TASKS_PER_NODE=2(x0)");
    expect_refused("does not tell how many tasks run on this node", SLURM("1", "7"), "SLURM_STEP_TASKS_PER_NODE=2(x2)");
    expect_refused("SLURM_STEP_TASKS_PER_NODE is 'many'", SLURM("1", "7"), "SLURM_STEP_TASKS_PER_NODE=many");
    expect_refused("MASTER_PORT is 65536", TORCHRUN("1", "2"), "MASTER_PORT=65536");
}

TEST(half_a_launcher_is_an_error) {
    expect_refused("torchrun has not set WORLD_SIZE", "RANK=1");
    expect_refused("torchrun has not set RANK", "WORLD_SIZE=2");
    expect_refused("torchrun has not set LOCAL_WORLD_SIZE", "RANK=1", "WORLD_SIZE=2");
    expect_refused("MASTER_ADDR", "RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_PORT=1");
    expect_refused("OpenMPI has not set OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK=1");
    expect_refused("Slurm has not set SLURM_PROCID", "SLURM_STEP_NUM_TASKS=2");
}

// ---- words ----

static void expect_words(const char* members, const char* expected) {
    bool in[32];
    char text[64];
    int n = (int)strlen(members);
    for (int i = 0; i < n; i++) in[i] = members[i] == 'x';
    ranks_text(in, n, text, sizeof text);
    assert_string_equal(text, expected);
}

TEST(ranks_in_words) {
    expect_words("....", "no rank");
    expect_words("..x.", "rank 2");
    expect_words("x..x", "ranks 0 and 3");
    expect_words("xx..", "ranks 0-1");
    expect_words("xxxx", "ranks 0-3");
    expect_words("xxx..x.x", "ranks 0-2, 5 and 7");
    expect_words("x.x.xx", "ranks 0, 2 and 4-5");
}

TEST(ranks_that_do_not_fit_are_cut_off) {
    bool in[200];
    char text[20];
    for (int i = 0; i < 200; i++) in[i] = i % 2 == 0;
    memset(text, '#', sizeof text);
    ranks_text(in, 200, text, 16);
    assert_string_equal(text, "ranks 0, 2, 4, ");
    assert_int_equal(text[16], '#');
}

// ---- deliberate faults ----

TEST(faults_are_parsed) {
    static const struct { const char* text; FaultKind kind; int rank; long long step; int micro; } cases[] = {
        { "", FAULT_NONE, 0, 0, -1 }, { "2:7:kill", FAULT_KILL, 2, 7, -1 }, { "0:1:hang", FAULT_HANG, 0, 1, -1 },
        { "3:123456789:skip", FAULT_SKIP, 3, 123456789, -1 }, { "1:5:bitflip", FAULT_BITFLIP, 1, 5, -1 }, { "1:5/12:hang", FAULT_HANG, 1, 5, 12 }
    };
    for (int i = 0; i < 6; i++) {
        Fault f = fault_parse(cases[i].text, 4);
        assert_true(f.kind == cases[i].kind && f.rank == cases[i].rank && f.step == cases[i].step);
        assert_true(f.kind == FAULT_NONE || f.micro == cases[i].micro);
    }
}

static void check_fault(const char* text, int micro_batches) {
    Fault f = fault_parse(text, 4);
    fault_check_micro(&f, micro_batches);
}
TEST(a_fault_at_a_micro_batch_that_never_comes_is_refused) {
    expect_error(check_fault("1:5/3:kill", 0), "--fault 1:5/3: only a pipeline, as in train_gpt2_pp, has a fault at a micro-batch; leave");
    expect_error(check_fault("1:5/3:kill", 3), "--fault 1:5/3: there is no micro-batch 3; a step has 3, counted from 0");
    check_fault("1:5/3:kill", 4);
    check_fault("1:5:kill", 0);
    check_fault("", 0);
}

TEST(bad_faults_are_refused) {
    static const char wants[] = "--fault wants RANK:STEP:kill|hang|skip|bitflip|slow";
    static const char* const cases[][2] = {
        { "4:7:kill", "there is no rank 4, the last one is 3" }, { "99999999999:7:kill", "there is no rank 99999999999" },
        { "2:0:kill", "steps count from 1" }, { "2:7:burn", "the fault must be kill, hang, skip, bitflip or slow, not 'burn'" },
        { "2:7:none", "not 'none'" }, { "2:7:", "not ''" }, { "2:7:killed", "not 'killed'" }, { "2:7", wants }, { "kill", wants },
        { "-1:7:kill", wants }, { "2: 7:kill", wants }, { "2:7.5:kill", wants }, { "2:7/-5:kill", wants },
        { "2:7/5:skip", "only kill and hang can wait for a micro-batch; leave out /5" }, { "2:77777777777777777777:kill", wants },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) expect_error(fault_parse(cases[i][0], 4), cases[i][0], cases[i][1]);
}

static void strike(const char* text, int rank, long long step) {
    Fault f = fault_parse(text, 4);
    fault_announce(&f);
    alarm(1);
    fault_strike(&f, rank, step);
    printf("%d%d\n", fault_now(&f, rank, step, FAULT_SKIP), fault_now(&f, rank, step, FAULT_BITFLIP));
}

TEST(faults_happen_at_their_rank_and_step_alone) {
    static const struct { const char* text; int rank; long long step; int status; const char *out, *err; } cases[] = {
        { "", 2, 7, 0, "00\n", "" }, { "2:7:kill", 2, 7, 1000 + SIGKILL, NULL, "FAULT ON PURPOSE: RANK 2, STEP 7: kill (--fault)\n" },
        { "2:7:kill", 1, 7, 0, "FAULT ON PURPOSE: RANK 2 IS KILLED AT STEP 7 (--fault)\n00\n", "" },
        { "2:7:kill", 2, 6, 0, "FAULT ON PURPOSE: RANK 2 IS KILLED AT STEP 7 (--fault)\n00\n", "" },
        { "2:7/1:kill", 2, 7, 0, "FAULT ON PURPOSE: RANK 2 IS KILLED AT STEP 7, MICRO-BATCH 1 (--fault)\n00\n", "" }, // not yet
        { "2:7:hang", 2, 7, 1000 + SIGALRM, NULL, "FAULT ON PURPOSE: RANK 2, STEP 7: hang (--fault)\n" },
        { "2:7:skip", 2, 7, 0, "FAULT ON PURPOSE: RANK 2 SKIPS AN OPERATION AT STEP 7 (--fault)\n10\n",
          "FAULT ON PURPOSE: RANK 2, STEP 7: skip (--fault)\n" },
        { "2:7:bitflip", 2, 7, 0, "FAULT ON PURPOSE: RANK 2 FLIPS A BIT AT STEP 7 (--fault)\n01\n",
          "FAULT ON PURPOSE: RANK 2, STEP 7: bitflip (--fault)\n" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Child c = child_does(strike(cases[i].text, cases[i].rank, cases[i].step));
        assert_int_equal(c.status, cases[i].status);
        if (cases[i].out) assert_string_equal(c.out, cases[i].out);
        assert_string_equal(c.err, cases[i].err);
        child_free(&c);
    }
}
