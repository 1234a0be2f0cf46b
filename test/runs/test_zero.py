"""ZeRO-1, 2 and 3: with sums in rank order, losses, norms, weights and optimizer state equal DDP's to the bit, and they agree with
PyTorch's. Each rank holds and sends the bytes of the formulas, which are written here a second time, in plain numbers."""
import pytest
from shards import assert_near_losses, assert_same_samples, sampled, shard, sizes, skipped_steps
from suite import (PYTORCH, TINY, TOKENS, Stored, assert_as_predicted, assert_close, assert_refused, assert_same, rest, train,
                   trained)

LONG = 6
by_stage = pytest.mark.parametrize("stage", [1, 2, 3], ids="stage_{}".format)
by_micro = pytest.mark.parametrize("micro", [1, 2], ids="{}_micro".format)
# 8 ranks train on the batches of one rank, so they share the stored run of PyTorch on one rank.
by_ranks = pytest.mark.parametrize("ranks", [sampled(1), sampled(3), 4, sampled(8)], ids="{}_ranks".format)


def pytorchs(ranks, more=""):
    return Stored(f"ddp/ranks_{1 if ranks == 8 else ranks}{more}")


def ddp(ranks, micro=1):
    return trained("ddp", PYTORCH, sizes(ranks, micro), "--deterministic", ranks=ranks)


def zero(stage, ranks, micro=1, order="--deterministic", **settings):
    return trained("zero", PYTORCH, sizes(ranks, micro), "--zero-stage", stage, order, ranks=ranks, **settings)


# ---- bits ----
@by_ranks
@by_stage
def test_every_stage_has_ddps_bits_in_rank_order(ranks, stage):
    assert_close(pytorchs(ranks), ddp(ranks))
    assert_same(ddp(ranks), zero(stage, ranks))


@by_ranks
@by_stage
def test_stage_1_has_ddps_bits_of_micro_batches_and_others_nearly(ranks, stage):
    (assert_same if stage == 1 else assert_close)(ddp(ranks, micro=2), zero(stage, ranks, micro=2))
    assert_same(zero(stage, ranks, micro=2), zero(stage, ranks, micro=2, strict=True))


@by_ranks
@by_stage
def test_every_stage_summed_by_the_library_has_the_losses_norms_and_weights_of_pytorchs(ranks, stage):
    assert_close(pytorchs(ranks, "_accumulate_2"), zero(stage, ranks, micro=2, order=""))


# ---- the bytes that a rank holds and sends ----
# The model of the reference run, in fp32: 32 channels, 2 blocks, a padded vocabulary of 384, 32 positions.
ROOT, ATTENTION, MLP = (384 + 32 + 2) * 32, 4 * 32 * 32 + 6 * 32, 8 * 32 * 32 + 7 * 32


def kept(ranks):
    """The number of elements in a rank's shards of all units."""
    return shard(ROOT, ranks) + 2 * (shard(ATTENTION, ranks) + shard(MLP, ranks))


@by_ranks
@by_stage
@by_micro
def test_each_rank_holds_and_sends_what_the_formula_says(ranks, stage, micro):
    """A rank sends P (N-1)/N elements (its shards of all units to each other rank) several times, and all-reduces five doubles."""
    run, others = zero(stage, ranks, micro), ddp(ranks, micro).about["predicted_bytes"]
    # a bucket for each kind of unit: of gradients from ZeRO-2 on, and of gathered parameters in ZeRO-3
    once = ranks * (shard(ROOT, ranks) + shard(ATTENTION, ranks) + shard(MLP, ranks))
    expected = others | {"parameters": 4 * kept(ranks) * (ranks if stage < 3 else 1),
                         "gradients": 4 * kept(ranks) * (ranks if stage < 2 else 1), "optimizer state": 8 * kept(ranks),
                         "communication": others["communication"] + 4 * once * (stage - 1)}
    assert run.about["predicted_bytes"] == expected
    assert {*run.series("mem_bytes"), *run.series("mem_peak_bytes")} == {sum(expected.values())} # as measured
    times = {1: 2, 2: micro + 1, 3: 3 * micro}[stage]
    assert run.series("comm_bytes") == [(ranks - 1) * (4 * times * ranks * kept(ranks) + 5 * 2 * 8) // ranks] * 20
    assert_as_predicted(run)


@pytest.mark.parametrize("stage, options", [("zero", "--zero-stage 3"), ("fsdp", "")], ids=["zero", "fsdp"])
def test_a_model_that_is_too_large_for_ddp_trains_with_the_same_limit(stage, options):
    """DDP needs 16 bytes for each of 2 million parameters, more than 25 MB. Sharded over 4 ranks they take 4 bytes each, which fits
    even with the buffers for gathered parameters."""
    big = (SMALL, "--model d10 --channels 128 --batch-size 1 --seq-len 8 --total-batch-size 0 --steps 1 --memory-limit 0.025",
           "--recompute none")
    assert_refused(train("ddp", *big, ranks=4), "out of memory: .* are over --memory-limit 0.025 GB",
                   "more ranks with ZeRO or FSDP")
    trained(stage, *big, options, ranks=4)


# ---- other shapes: blocks share a bucket for their attention and one for their MLP, so each bucket is reused within a step ----
SMALL = f"{TINY} --batch-size 4 --total-batch-size 192 --steps 6 --warmup-steps 2 --eps 1e-5 --deterministic"
DEEP = (SMALL, f"--model d5 --val-data {TOKENS} --eval-every 2 --eval-steps 3 --sample-every 3 --sample-tokens 20")


@by_stage
@pytest.mark.parametrize("options, strict", [("", False), ("", True), rest("--recompute block", False)],
                         ids=["plain", "strict", "recompute"])
def test_5_blocks_have_ddps_bits_and_samples(stage, options, strict):
    ddp, zero = trained("ddp", *DEEP, ranks=3), trained("zero", *DEEP, "--zero-stage", stage, options, ranks=3, strict=strict)
    assert_same_samples(ddp, zero)
    assert_as_predicted(zero)


@by_stage
def test_5_blocks_with_4_micro_batches_are_near_ddp(stage):
    assert_close(trained("ddp", *DEEP, ranks=3), trained("zero", *DEEP, "--batch-size 1 --zero-stage", stage, ranks=3))


@pytest.mark.parametrize("stage", [1, rest(2), rest(3)], ids="stage_{}".format)
@pytest.mark.parametrize("blocks", [rest(1), 5], ids="{}_blocks".format)
def test_ranks_that_compare_their_parameters_find_them_equal(stage, blocks):
    run = trained("zero", SMALL, "--model", f"d{blocks}", "--check-every 1 --zero-stage", stage, ranks=3)
    if blocks == 1: assert_same(trained("ddp", SMALL, "--model d1", ranks=3), run)


# ---- 16 bits: each rank also stores its shard of the fp32 master weights ----
# fp16 begins with a loss scale that is too large, so that steps are skipped. 24 sequences per step divide over all these ranks.
HALF = (SMALL, "--model d3 --total-batch-size 384 --warmup-steps 5 --steps 20")
SCALES = {"bf16": "", "fp16": "--loss-scale 8388608 --max-bad-steps 20"}
in_16_bits = pytest.mark.parametrize("precision, ranks", [("bf16", 3), rest("bf16", 2), rest("bf16", 8), rest("fp16", 1),
                                                          rest("fp16", 3)],
                                     ids=lambda x: x if isinstance(x, str) else f"{x}_ranks")


def half(stage, precision, ranks, micro=1, options=""):
    return trained(stage, *HALF, "--batch-size", 24 // ranks // micro, SCALES[precision], options, ranks=ranks, precision=precision)


@in_16_bits
@by_stage
def test_16_bits_have_ddps_bits_also_of_master_weights_and_skip_its_steps(precision, ranks, stage):
    """A parameter takes 2 bytes, its gradient 2, and its optimizer state 12."""
    ddp, zero = half("ddp", precision, ranks), half("zero", precision, ranks, options=f"--zero-stage {stage}")
    assert_same(ddp, zero)
    if precision == "fp16": assert skipped_steps(ddp) == skipped_steps(zero)
    kept = shard((384 + 16 + 2) * 16, ranks) + 3 * (shard(4 * 16 * 16 + 6 * 16, ranks) + shard(8 * 16 * 16 + 7 * 16, ranks))
    expected = {"parameters": 2 * kept * (ranks if stage < 3 else 1), "gradients": 2 * kept * (ranks if stage < 2 else 1),
                "optimizer state": 12 * kept}
    assert expected.items() <= zero.about["predicted_bytes"].items()
    assert_as_predicted(zero)


@pytest.mark.rest
@by_stage
@pytest.mark.parametrize("precision, bound", [("bf16", 1e-4), ("fp16", 1e-5)]) # about a fortieth of the format's roundoff
def test_micro_batches_in_16_bits_round_in_other_places_from_stage_2_on(precision, bound, stage):
    ddp, zero = half("ddp", precision, 3, micro=2), half("zero", precision, 3, micro=2, options=f"--zero-stage {stage}")
    if stage == 1: assert_same(ddp, zero)
    else: assert_near_losses(ddp, zero, bound)
    if precision == "fp16": assert skipped_steps(ddp) == skipped_steps(zero)
