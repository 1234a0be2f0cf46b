"""What a run on several ranks says at its end about its time: the causes add up to the step, each program names its own, and
--single-throughput takes what can be compared. (test/unit/test_diagnosis.c has what cannot, and made-up times.)"""
import re
import pytest
from suite import TINY, assert_refused, assert_same_metrics, assert_says, command, program, rest, trained

SMALL = f"{TINY} --channels 32 --seq-len 32 --batch-size 4 --total-batch-size 0 --steps 8 --save-every 0"
STRICT = {"strict": True}


@pytest.mark.parametrize("ranks, program, options, settings, causes", [
    (2, "ddp", "", {}, ["dp: all-reduce"]), (2, "pp", "", {}, ["pp: all-reduce"]), rest(2, "tp", "", {}, ["tp: all-reduce"]),
    rest(2, "fsdp", "", {}, ["dp: all-gather", "dp: reduce-scatter"]),
    rest(2, "zero", "--zero-stage 2", {}, ["dp: reduce-scatter", "dp: all-gather"]),
    rest(2, "muon", "", {}, ["dp: reduce-scatter", "dp: all-gather", "dp: all-to-all-v"]),
    rest(2, "compress", "--compress int8", {}, ["dp: all-to-all", "dp: all-gather"]),
    rest(4, "ddp", "--ddp naive", STRICT, ["dp: all-reduce"]),
    rest(4, "fsdp", "--sharding hybrid --shard-group 2", {}, ["dp: all-reduce"]),
    rest(4, "3d", "--mesh tp=2,pp=2", {}, ["tp: all-reduce", "pp: all-reduce"]),
    rest(4, "tp", "--tensor-parallel 2 --sequence-parallel --heads 4", {}, ["tp: all-gather", "dp: all-reduce"]),
    rest(4, "3d", "--mesh dp=2,tp=2 --zero-stage 1", {}, ["tp: all-reduce", "dp: reduce-scatter"]),
    (2, "cp", "--cp ring", {}, ["cp: (send|receive)", "dp: all-reduce"]),
    rest(2, "cp", "", {}, ["cp: all-to-all", "dp: all-reduce"])])
def test_causes_add_up_to_the_step_and_are_those_of_the_log(ranks, program, options, settings, causes):
    run = trained(program, SMALL, options, ranks=ranks, **settings)
    assert_says(run.said, f"^diagnosis  in ms, means of steps 2 to 8  *rank 0   of {ranks} ranks",
                *(f"^  exposed, {cause}" for cause in causes),
                r"^compute / \(compute \+ communication\) = [\d.]* %; compute / \(compute \+ exposed\) = [\d.]* %")
    found = run.lines[-1]["diagnosis"]["rank_0"]
    waits = found["bubble"] + found["waiting"] + sum(ms for kinds in found["exposed"].values() for ms in kinds.values())
    assert found["computing"] > 0 and abs(found["computing"] + found["rest"] + found["data"] + waits - found["total"]) < 1e-6
    # The step and its waits in metrics.jsonl come from elsewhere.
    for field, mean in ("step_ms", found["total"]), ("comm_exposed_ms", waits):
        assert abs(sum(run.series(field)[1:]) / 7 - mean) < 0.01
    printed = [float(ms) for ms in re.findall(r"^  .* (-?[\d.]+) +[\d.]+ to [\d.]+$",
                                              run.said.split("\ndiagnosis ")[1].split("\ncompute ")[0], re.M)]
    assert len(printed) > 2 and min(printed) >= 0 and abs(sum(printed[:-1]) - printed[-1]) < 0.01 * len(printed)
    assert ("bubble" in "".join(run.said.split("\ndiagnosis ")[1])) == (program == "pp" or "pp=2" in options)


@pytest.mark.parametrize("program, options, settings, what", [
    ("ddp", "--fault 1:3:slow", {}, "A FAULT ON PURPOSE"), rest("pp", "--emulate-ms 2,2,2", {}, "EMULATED TIMES"),
    rest("ddp", "", STRICT, "STRICT MODE")])
def test_times_that_are_not_this_machines_are_named(program, options, settings, what):
    assert_says(trained(program, SMALL, options, ranks=2, **settings).said, f"NOT THE TIMES OF THIS MACHINE: {what}")


# A step may be longer than its bytes need on the link, but not shorter.
@pytest.mark.rest
def test_a_step_takes_as_long_as_its_bytes_need_on_an_emulated_link_and_trains_the_same():
    usual, ms = trained("ddp", SMALL, ranks=2), 100
    run = trained("ddp", SMALL, f"--emulate-link {8e-6 * usual.series('comm_bytes')[-1] / ms:.9f}", ranks=2)
    assert_same_metrics(usual, run)
    assert_says(run.said, r"^ranks .*, EMULATED LINK OF 0\.[0-9e-]* GBIT/S;",
                f"^EMULATED LINK OF .* A RANK'S MESSAGES TAKE AT LEAST {ms}.0 MS PER STEP",
                r"NOT THE TIMES OF THIS MACHINE: EMULATED LINK \(--emulate-link\);")
    assert min(run.series("step_ms")) >= 0.99999 * ms
    assert_refused(command([program("train_gpt2_ddp")], "--comm nccl --emulate-link 1"),
                   "--emulate-link: NCCL's operations cannot be made to last longer")


@pytest.mark.parametrize("ranks, options", [(1, ""), (2, "--steps 1")], ids=["rank", "step"])
def test_one_rank_or_one_step_has_no_diagnosis(ranks, options):
    run = trained("ddp", SMALL, options, ranks=ranks)
    assert "diagnosis" not in run.said and "scaling" not in run.said and "diagnosis" not in run.lines[-1]


# ---- scaling: weak, of a rank's tokens per step on one rank; strong, of all ranks' ----
def alone(*options):
    return trained("single", SMALL, *options, env={"OMP_NUM_THREADS": 1}).folder / "metrics.jsonl"


@pytest.mark.parametrize("kind, batch_size", [("weak", 4), ("strong", 8)])
def test_scaling_is_of_the_throughput_of_a_run_on_one_rank(kind, batch_size):
    run = trained("ddp", SMALL, "--single-throughput", alone("--batch-size", batch_size), ranks=2)
    assert_says(run.said, fr"^scaling    efficiency [\d.]* % \({kind}\): median of \d* tok/s on 2 ranks, \d* on one")
    found = run.lines[-1]["diagnosis"]
    assert found["scaling"] == kind
    assert abs(found["scaling_efficiency"] - found["tokens_per_second"] / (2 * found["single_tokens_per_second"])) < 1e-6


@pytest.mark.rest
def test_single_throughput_may_be_a_number():
    assert_says(trained("ddp", SMALL, "--single-throughput 1e7", ranks=2).said,
                "^scaling .* % .strong, if that run also had as many.*, 10000000 on one")
