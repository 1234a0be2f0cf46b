"""Runs of each program under the sanitizers for addresses and undefined behaviour, of some also for leaks: two micro-batches a
step, evaluation, samples, a checkpoint, and a second run that continues from it. Rows are chosen for the code that they reach."""
import re
import pytest
from shards import sampled
from suite import TINY, TOKENS, assert_refused, command, flip, program, rest, words

LONG = 9
SMALL = (f"{TINY} --val-data {TOKENS} --model d3 --batch-size 2 --warmup-steps 2 --eps 1e-5 --eval-every 2 --eval-steps 1 "
         "--sample-every 3 --sample-tokens 4 --save-every 2 --keep 1")
# Looking for leaks takes four times as long, because test/mpi_leaks.txt must see MPI in whole stacks.
LEAKS = {"ASAN_OPTIONS": "exitcode=99:detect_leaks=1:fast_unwind_on_malloc=0",
         "LSAN_OPTIONS": "suppressions=test/mpi_leaks.txt:print_suppressions=0"}


def clean(run):
    assert not re.search("Sanitizer|runtime error", run.said), run
    return run


# make test has the rows of `quick`, CI half of `rest` and a quarter of `sampled`. LEAKS: also for leaks. Ranks, program.precision,
# options;
# a step has two sequences in two micro-batches for each rank, or as many tokens as --total-batch-size says.
ROWS = """
    quick 3 ddp --bucket-mb 0.02 --check-every 1
    quick 2 ddp --ddp naive --allreduce ring --recompute block
    quick-strict 3 ddp --bucket-mb 0.02 --deterministic
    rest-LEAKS 1 single
    rest 1 single --recompute block
    rest 1 single.bf16 --recompute block
    rest 1 single.fp16 --loss-scale 1e12 --max-bad-steps 20
    rest-LEAKS 3 ddp --bucket-mb 0.02 --check-every 1 --trace TRACE
    rest 2 ddp.bf16 --bucket-mb 0.02
    sampled 2 zero --zero-stage 1 --recompute block
    sampled-strict 3 zero --zero-stage 2 --deterministic
    sampled-LEAKS 3 zero --zero-stage 3 --check-every 1
    rest 2 zero.bf16 --zero-stage 3
    sampled-LEAKS 3 muon --check-every 1
    sampled-strict 4 muon --zero-stage 3 --deterministic --recompute block
    sampled-strict 8 muon --model d1 --channels 4 --zero-stage 2 --owners all
    rest 3 muon.bf16 --check-every 1
    sampled-LEAKS 3 fsdp --check-every 1
    rest 4 fsdp --sharding hybrid --shard-group 2 --wrap-blocks 2 --checkpoint sharded --prefetch backward-post
    sampled-strict 2 fsdp --sharding grad-op --prefetch none --no-forward-prefetch --recompute block
    sampled 2 fsdp --cpu-offload all --limit-all-gathers 3
    rest 3 fsdp.bf16 --cpu-offload optimizer --reduce-dtype model --wrap-halves
    rest 4 zeropp --node-ranks 2 --check-every 1
    sampled-LEAKS 3 zeropp --sharding grad-op --wrap-blocks 2 --quantise-weights none --quantise-gradients none
    rest-strict 2 zeropp.bf16 --node-ranks 1 --quantise-gradients int8 --checkpoint sharded --recompute block
    sampled-LEAKS 2 tp --total-batch-size 64 --sequence-parallel --check-every 1
    rest 4 tp --tensor-parallel 2 --total-batch-size 128 --sequence-parallel --check-every 1
    sampled 4 tp --heads 4 --total-batch-size 64 --recompute block --no-overlap
    sampled-strict 2 tp --total-batch-size 64 --sequence-parallel --deterministic
    sampled-LEAKS 2 pp --check-every 1
    rest 4 pp --pipeline-parallel 2 --schedule zb-h1 --check-every 1
    sampled-strict 3 pp --schedule gpipe --split 1,2,0 --recompute block --deterministic
    sampled 2 pp --layers 4 --schedule interleaved
    sampled 1 pp --schedule gpipe
    sampled-LEAKS 4 3d --mesh dp=2,tp=2 --total-batch-size 128 --zero-stage 1 --check-every 1
    rest-strict 8 3d --mesh dp=2,tp=2,pp=2 --total-batch-size 128 --zero-stage 1 --sequence-parallel --schedule zb-h1 --check-every 1
    sampled 4 3d --mesh pp=2,dp=2 --layers 4 --schedule interleaved --recompute block
    sampled 4 3d --mesh tp=2,pp=2 --total-batch-size 128 --split 3,0 --sequence-parallel --no-overlap --deterministic
    sampled 1 3d --zero-stage 1
    sampled-LEAKS 2 cp --cp ulysses --check-every 1
    rest 4 cp --context-parallel 2 --cp ring --cp-balance zigzag --check-every 1
    sampled-strict 4 cp --cp ring --recompute block --deterministic
    sampled 2 cp --cp allgather --cp-balance zigzag
    sampled-LEAKS 3 compress --compress int8 --error-feedback --measure-error 2 --check-every 1
    sampled 2 compress --compress bf16 --error-feedback
    sampled-strict 2 compress --compress top-k --error-feedback
    rest 2 compress --compress powersgd --rank 2 --compress-from 1 --recompute block --error-feedback"""


def rows():
    marks = {"quick": pytest.param, "rest": rest, "sampled": sampled}
    for line in ROWS.strip().splitlines():
        (mark, _, how), ranks, which, *options = line.split()[0].partition("-"), *line.split()[1:]
        name = re.sub(r"[^\w.+-]+", "_", "_".join([f"{ranks}_ranks", which, *[how] * bool(how), *options])).replace("_--", "-")
        yield marks[mark](int(ranks), *(which.split(".") + ["fp32"])[:2], how, options, id=name)


@pytest.mark.parametrize("ranks, which, precision, how, options", [*rows()])
def test_no_sanitizer_finds_anything_in_a_run_and_its_continuation(ranks, which, precision, how, options, tmp_path):
    options = [str(tmp_path / "trace.json") if x == "TRACE" else x for x in options]
    for steps, more in (3, ""), (5, "--resume"):
        run = clean(command([program(f"train_gpt2_{which}", precision, debug=True)], SMALL, "--total-batch-size", 64 * ranks,
                            "--steps", steps, more, options, ["--out", tmp_path / "out"],
                            ranks=None if which == "single" else ranks,
                            strict=how == "strict", env=LEAKS if how == "LEAKS" else {}))
        assert run.status == 0, run
    assert (tmp_path / "out/step_00000005").is_dir()
    assert re.search("^sample after step 5", run.out, re.M) and re.search("start .* step 3 of 5", run.out)


# ---- runs that end in an error ----
@pytest.mark.parametrize("which, ranks, options, pattern", [
    ("ddp", 2, "--memory-limit 0.0001", "out of memory"), rest("fsdp", 2, "--memory-limit 0.0001 --cpu-offload all",
                                                               "out of memory"),
    ("ddp", 2, "--init-from test/reference/nothing", "nothing"), rest("zero", 2, "--zero-stage 4", "--zero-stage"),
    rest("pp", 2, "--split 4,4", "--split"), rest("3d", 2, "--mesh dp=3", "--mesh"),
    rest("cp", 2, "--cp ring --seq-len 15", "--seq-len"),
    rest("ddp", 2, "--fault 1:2:bitflip --check-every 1", "differ")])
def test_no_sanitizer_finds_anything_in_a_run_that_is_refused(which, ranks, options, pattern):
    assert_refused(clean(command([program(f"train_gpt2_{which}", debug=True)], SMALL, "--steps 3 --out=", options, ranks=ranks)),
                   pattern)


@pytest.mark.rest
@pytest.mark.parametrize("which, options", [("zero", "--zero-stage 3"), ("fsdp", "--checkpoint sharded")], ids=["zero", "fsdp"])
def test_no_sanitizer_finds_anything_where_a_checkpoint_is_damaged(which, options, tmp_path):
    line = words([program(f"train_gpt2_{which}", debug=True)], SMALL, options, ["--out", tmp_path], "--total-batch-size 192")
    assert command(line, "--steps 2", ranks=3).status == 0
    flip(max(tmp_path.glob("step_*/optimizer*.safetensors")), 0.9)
    assert_refused(clean(command(line, "--steps 3 --resume", ranks=3)), "do not match their checksum")
