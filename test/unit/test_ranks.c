// test_ranks.c - which rank a process is, from its launcher's variables; ranks in words; deliberate faults.
#include "../../llmc/watch/fault.h"
#include "../../llmc/base/rank_info.h"
#include "expect_death.h"
#include <sys/stat.h>

// ---- variables ----
// Which rank a process is that has these variables, "NAME=VALUE", and no others, not even those that this test was started with.
static RankInfo found_with(const char* const* variables) {
    assert_int_equal(clearenv(), 0);
    for (; *variables; variables++) assert_int_equal(putenv((char*)(uintptr_t)*variables), 0);
    return ranks_find();
}

#define environment(...) ((const char* const[]){ __VA_ARGS__, NULL })
#define OPENMPI(rank, size) \
    "OMPI_COMM_WORLD_RANK=" rank, "OMPI_COMM_WORLD_SIZE=" size, "OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_SIZE=2"
#define TORCHRUN(rank, size) \
    "RANK=" rank, "WORLD_SIZE=" size, "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=gpu01", "MASTER_PORT=29500"
#define SLURM(rank, size) \
    "SLURM_PROCID=" rank, "SLURM_NTASKS=" size, "SLURM_STEP_NUM_TASKS=" size, "SLURM_LOCALID=1", "SLURM_NODEID=2", \
    "SLURM_STEP_TASKS_PER_NODE=2(x3),1", "SLURM_JOB_ID=123456", "SLURM_STEP_NODELIST=gpu[07-12,20],login1"

TEST(each_launcher_is_understood_and_inside_another_it_is_the_one_that_counts) {
    const struct { const char* const* variables; int rank, size, local_rank, local_size; const char *found, *meeting; } cases[] = {
        { environment("HOME=/"), 0, 1, 0, 1, "started alone", "" },
        { environment(OPENMPI("5", "7")), 5, 7, 1, 2, "OpenMPI", "" }, // MPI itself tells where rank 0 is
        { environment(TORCHRUN("3", "4")), 3, 4, 1, 2, "torchrun", "29501 none gpu01" },
        { environment(TORCHRUN("3", "4"), "TORCHELASTIC_RUN_ID=run-8"), 3, 4, 1, 2, "torchrun", "29501 run-8 gpu01" },
        { environment(SLURM("5", "7")), 5, 7, 1, 2, "Slurm", "23456 123456 gpu07" },
        // A batch script itself is no task.
        { environment("SLURM_JOB_ID=1", "SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=0"), 0, 1, 0, 1, "started alone", "" },
        { environment(OPENMPI("5", "8"), SLURM("1", "7")), 5, 8, 1, 2, "OpenMPI", "" },
        // A torchrun on each of 7 nodes; launchers that agree.
        { environment(TORCHRUN("9", "14"), "GROUP_WORLD_SIZE=7", SLURM("4", "7")), 9, 14, 1, 2, "torchrun", "29501 none gpu01" },
        { environment(OPENMPI("1", "2"), TORCHRUN("1", "2")), 1, 2, 1, 2, "OpenMPI", "" },
        { environment(TORCHRUN("5", "7"), SLURM("5", "7")), 5, 7, 1, 2, "torchrun", "29501 none gpu01" },
        // Variables of PMI and PMIx that Open MPI and srun set as well, that a shell was left with, or that say there is one process.
        { environment(OPENMPI("5", "7"), "PMIX_RANK=5"), 5, 7, 1, 2, "OpenMPI", "" },
        { environment(SLURM("5", "7"), "PMIX_RANK=5", "PMI_RANK=5", "PMI_SIZE=7"), 5, 7, 1, 2, "Slurm", "23456 123456 gpu07" },
        { environment(OPENMPI("1", "2"), "PMI_RANK=3", "PMI_SIZE=4", "MPI_LOCALNRANKS=4"), 1, 2, 1, 2, "OpenMPI", "" },
        { environment(TORCHRUN("1", "2"), "PMI_RANK=3", "PMI_SIZE=4", "PMIX_RANK=3"), 1, 2, 1, 2, "torchrun", "29501 none gpu01" },
        { environment("PMI_RANK=0", "PMI_SIZE=1", "MPI_LOCALNRANKS=1", "PMIX_RANK=0"), 0, 1, 0, 1, "started alone", "" } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        RankInfo r = found_with(cases[i].variables);
        bool same = r.rank == cases[i].rank && r.size == cases[i].size;
        bool same_here = r.local_rank == cases[i].local_rank && r.local_size == cases[i].local_size;
        if (!same || !same_here) fail_msg("case %zu: rank %d of %d, here %d of %d", i, r.rank, r.size, r.local_rank, r.local_size);
        assert_string_equal(r.found, cases[i].found);
        assert_string_equal(r.meeting, cases[i].meeting);
    }
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
    for (size_t i = 0; i < COUNT(lists); i++) {
        char name[256];
        ranks_first_node(lists[i][0], name, sizeof name);
        assert_string_equal(name, lists[i][1]);
    }
}

TEST(launchers_that_disagree_are_named_and_so_is_the_variable_of_a_bad_or_missing_number) {
    const struct { const char* says; const char* const* variables; } cases[] = {
        { "OpenMPI says that this is rank 1 of 2, torchrun that it is rank 0 of 2", environment(OPENMPI("1", "2"), TORCHRUN("0", "2")) },
        { "torchrun says that this is rank 1 of 4, Slurm that it is rank 1 of 7", environment(TORCHRUN("1", "4"), SLURM("1", "7")) },
        { "OMPI_COMM_WORLD_RANK is 2, but it must be from 0 to 1", environment(OPENMPI("2", "2")) },
        { "OMPI_COMM_WORLD_SIZE is 0", environment(OPENMPI("1", "0")) },
        { "OMPI_COMM_WORLD_LOCAL_SIZE is 2, but it must be from 1 to 1", environment(OPENMPI("0", "1")) },
        { "OpenMPI has not set OMPI_COMM_WORLD_SIZE", environment("OMPI_COMM_WORLD_RANK=1") },
        { "RANK is 'one', which is not a number", environment(TORCHRUN("one", "2")) },
        { "RANK is '-1', which is not a number", environment(TORCHRUN("-1", "2")) },
        { "WORLD_SIZE is '2 ', which is not a number", environment(TORCHRUN("1", "2 ")) },
        { "WORLD_SIZE is '99999999999999999999', which is not a number", environment(TORCHRUN("1", "99999999999999999999")) },
        { "LOCAL_RANK is 2, but it must be from 0 to 1", environment(TORCHRUN("1", "4"), "LOCAL_RANK=2") },
        { "MASTER_PORT is 65536", environment(TORCHRUN("1", "2"), "MASTER_PORT=65536") },
        { "torchrun has not set WORLD_SIZE", environment("RANK=1") },
        { "torchrun has not set RANK", environment("WORLD_SIZE=2") },
        { "torchrun has not set LOCAL_WORLD_SIZE", environment("RANK=1", "WORLD_SIZE=2") },
        { "MASTER_ADDR", environment("RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_PORT=1") },
        { "SLURM_PROCID is 7, but it must be from 0 to 6", environment(SLURM("7", "7")) },
        { "Slurm has not set SLURM_PROCID", environment("SLURM_STEP_NUM_TASKS=2") },
        { "SLURM_STEP_TASKS_PER_NODE is '2(x0)'", environment(SLURM("1", "7"), "SLURM_STEP_TASKS_PER_NODE=2(x0)") },
        { "does not tell how many tasks run on this node", environment(SLURM("1", "7"), "SLURM_STEP_TASKS_PER_NODE=2(x2)") },
        { "SLURM_STEP_TASKS_PER_NODE is 'many'", environment(SLURM("1", "7"), "SLURM_STEP_TASKS_PER_NODE=many") },
        { "PMI_SIZE=2: a launcher", environment("PMI_RANK=0", "PMI_SIZE=2", "MPI_LOCALRANKID=0", "MPI_LOCALNRANKS=2") },
        { "MPI_LOCALNRANKS=2: a launcher", environment("MPI_LOCALNRANKS=2") },
        { "PMIX_RANK=1: a launcher", environment("PMIX_RANK=1") },
        { "PMI_SIZE=8: a launcher", environment(SLURM("5", "7"), "PMI_SIZE=8") } }; // whose helpers srun started
    for (size_t i = 0; i < COUNT(cases); i++) expect_error(found_with(cases[i].variables), cases[i].says);
}

// ---- words ----
TEST(ranks_in_words) {
    static const char* const cases[][2] = { { "....", "no rank" }, { "..x.", "rank 2" }, { "x..x", "ranks 0 and 3" },
        { "xx..", "ranks 0-1" }, { "xxxx", "ranks 0-3" }, { "xxx..x.x", "ranks 0-2, 5 and 7" }, { "x.x.xx", "ranks 0, 2 and 4-5" } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        bool in[32];
        char text[64];
        int n = (int)strlen(cases[i][0]);
        for (int k = 0; k < n; k++) in[k] = cases[i][0][k] == 'x';
        ranks_text(in, n, text, sizeof text);
        assert_string_equal(text, cases[i][1]);
    }
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
    static const struct { const char* text; Fault is; } cases[] = {
        { "", { FAULT_NONE, 0, 0, -1 } }, { "2:7:kill", { FAULT_KILL, 2, 7, -1 } }, { "0:1:hang", { FAULT_HANG, 0, 1, -1 } },
        { "3:123456789:skip", { FAULT_SKIP, 3, 123456789, -1 } }, { "1:5:bitflip", { FAULT_BITFLIP, 1, 5, -1 } },
        { "1:5/12:hang", { FAULT_HANG, 1, 5, 12 } } };
    for (int i = 0; i < 6; i++) {
        Fault f = fault_parse(cases[i].text, 4), is = cases[i].is;
        assert_true(f.kind == is.kind && f.rank == is.rank && f.step == is.step && f.micro == is.micro);
    }
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
    for (size_t i = 0; i < COUNT(cases); i++) expect_error(fault_parse(cases[i][0], 4), cases[i][0], cases[i][1]);
}

static void strike(const char* text, int rank, long long step) {
    Fault f = fault_parse(text, 4);
    fault_announce(&f);
    fault_strike(&f, rank, step);
    printf("%d%d\n", fault_now(&f, rank, step, FAULT_SKIP), fault_now(&f, rank, step, FAULT_BITFLIP));
}

TEST(faults_happen_at_their_rank_and_step_alone) {
    static const struct { const char* text; int rank; long long step; int status; const char *out, *err; } cases[] = {
        { "", 2, 7, 0, "00\n", "" }, { "2:7:kill", 2, 7, 1000 + SIGKILL, NULL, "FAULT ON PURPOSE: RANK 2, STEP 7: kill (--fault)\n" },
        { "2:7:kill", 1, 7, 0, "FAULT ON PURPOSE: RANK 2 IS KILLED AT STEP 7 (--fault)\n00\n", "" },
        { "2:7:kill", 2, 6, 0, "FAULT ON PURPOSE: RANK 2 IS KILLED AT STEP 7 (--fault)\n00\n", "" },
        { "2:7/1:kill", 2, 7, 0, "FAULT ON PURPOSE: RANK 2 IS KILLED AT STEP 7, MICRO-BATCH 1 (--fault)\n00\n", "" }, // not yet
        { "2:7:hang", 2, 7, 1000 + SIGTERM, NULL, "FAULT ON PURPOSE: RANK 2, STEP 7: hang (--fault)\n" },
        { "2:7:skip", 2, 7, 0, "FAULT ON PURPOSE: RANK 2 SKIPS AN OPERATION AT STEP 7 (--fault)\n10\n",
          "FAULT ON PURPOSE: RANK 2, STEP 7: skip (--fault)\n" },
        { "2:7:bitflip", 2, 7, 0, "FAULT ON PURPOSE: RANK 2 FLIPS A BIT AT STEP 7 (--fault)\n01\n",
          "FAULT ON PURPOSE: RANK 2, STEP 7: bitflip (--fault)\n" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        RunningChild running = child_start();
        if (running.pid == 0) { strike(cases[i].text, cases[i].rank, cases[i].step); exit(0); }
        if (cases[i].status == 1000 + SIGTERM) { // once it has said that it hangs, one that does not has the time to end
            struct stat said = { 0 };
            while (fstat(fileno(running.err), &said) == 0 && said.st_size == 0) usleep(1000);
            usleep(100000);
            kill(running.pid, SIGTERM);
        }
        FREED_BY(child_free) Child c = child_end(running);
        assert_int_equal(c.status, cases[i].status);
        if (cases[i].out) assert_string_equal(c.out, cases[i].out);
        assert_string_equal(c.err, cases[i].err);
    }
}
