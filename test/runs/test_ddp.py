"""Data parallelism: runs on 1 to 4 ranks agree with PyTorch DDP's in every mode, with any buckets and accumulation, and in bf16
with those of PyTorch's DDP under AMP: autocast to bf16, with weights and AdamW's state in fp32. test/reference/README.md has the
reasons of the bounds. Ranks send as many bytes as the formula says, during the backward pass where they have buckets."""
import json, re
import numpy as np
import pytest
from shards import assert_pytorchs, operations, sizes
from suite import PYTORCH, REFERENCE, TINY, Stored, assert_as_predicted, assert_close, assert_same, once, rest, tensors, trained

RANKS = [rest(1), 2, 3, rest(4)]
SMALL_BUCKETS, TINIER_BUCKETS = "--bucket-mb 0.02", "--bucket-mb 0.01"
by_ranks = pytest.mark.parametrize("ranks", RANKS, ids="{}_ranks".format)


def ddp(ranks, *options, micro=1, **settings):
    return trained("ddp", PYTORCH, sizes(ranks, micro), *options, ranks=ranks, **settings)


@by_ranks
@pytest.mark.parametrize("options, strict", [
    (SMALL_BUCKETS, False), (SMALL_BUCKETS, True), ("--ddp naive", False), (f"{SMALL_BUCKETS} --allreduce ring", False),
    (f"{SMALL_BUCKETS} --deterministic", False)], ids=["bucketed", "bucketed-strict", "naive", "ring", "rank_order"])
def test_ddp_has_the_losses_norms_and_weights_of_pytorchs(ranks, options, strict):
    assert_pytorchs(ddp(ranks, options, strict=strict), f"ddp/ranks_{ranks}")


@by_ranks
def test_micro_batches_have_the_losses_norms_and_weights_of_pytorchs(ranks):
    assert_pytorchs(ddp(ranks, SMALL_BUCKETS, micro=2), f"ddp/ranks_{ranks}_accumulate_2")


@pytest.mark.parametrize("ranks", [rest(2), 3, rest(4)], ids="{}_ranks".format)
@pytest.mark.parametrize("options", [SMALL_BUCKETS, "", "--ddp naive"], ids=["again", "one_bucket", "naive"])
def test_sums_in_rank_order_have_the_same_bits_in_every_mode(ranks, options):
    assert_same(ddp(ranks, SMALL_BUCKETS, "--deterministic"), ddp(ranks, options, "--deterministic", again="once more"))


# ---- bf16 ----
# Within an eighth of bf16's roundoff (2^-8), all of it, and a sixteenth. PyTorch with either of two mistakes is outside of them.
AMP_BOUNDS = {"loss": 5e-4, "grad_norm": 4e-3, "param_norm": 2.5e-4}
of_amp = pytest.mark.parametrize("name, ranks, micro", [("ranks_2", 2, 1), ("ranks_4_accumulate_2", 4, 2)],
                                 ids=["2_ranks", "4_ranks-2_micro"])


def in_bf16(ranks, micro):
    return ddp(ranks, SMALL_BUCKETS, micro=micro, precision="bf16")


def apart(a, b):
    """How far b's tensors are from a's, as a share of how far those are from the initial weights: {name: share}."""
    initial = tensors(f"{REFERENCE}/initial/model.safetensors")
    return {name: np.linalg.norm(a[name] - b[name]) / np.linalg.norm(a[name] - initial[name]) for name in a}


def are_near(shares):
    """Key biases have no gradient but rounding noise."""
    return all(share <= (0.4 if name.endswith("qkv.bias") else 0.04) for name, share in shares.items())


@of_amp
def test_bf16_has_the_losses_and_norms_of_pytorchs_amp(name, ranks, micro):
    run = in_bf16(ranks, micro)
    for field, bound in AMP_BOUNDS.items():
        assert_close(Stored(f"ddp/{name}_amp"), run, rtol=bound, atol=0, only=field)
    with pytest.raises(AssertionError): # it does not really compute in fp32
        assert_close(Stored(f"ddp/{name}"), run, rtol=2e-5, atol=0, only="loss")


@of_amp
def test_bf16_has_the_master_weights_of_pytorchs_amp_and_rounded_ones_are_farther_away(name, ranks, micro):
    run, pytorchs = in_bf16(ranks, micro), tensors(f"{REFERENCE}/ddp/{name}_amp.safetensors")
    state = tensors(run.checkpoint() / "optimizer.safetensors")
    assert are_near(apart(pytorchs, {name: state[f"master.{name}"] for name in pytorchs}))
    assert not are_near(apart(pytorchs, run.weights()))


@pytest.mark.rest
def test_fp16_skips_the_steps_that_pytorchs_gradscaler_skips_and_has_the_losses_and_norms_of_the_others():
    pytorchs = Stored("ddp/ranks_2_amp_fp16")
    run = ddp(2, SMALL_BUCKETS, f"--loss-scale {pytorchs.series('loss_scale')[0]:.0f} --loss-scale-interval 4", precision="fp16")
    assert sum(pytorchs.series("skipped")) > 3 and run.series("skipped") == pytorchs.series("skipped")
    assert run.series("loss_scale") == pytorchs.series("loss_scale")
    for field, bound in AMP_BOUNDS.items():
        pairs = zip(run.series("skipped"), pytorchs.series(field), run.series(field))
        assert all(abs(a - b) <= bound * a for skipped, a, b in pairs if not skipped or field != "grad_norm")


@of_amp
def test_bf16_needs_as_many_bytes_a_parameter_as_pytorchs_amp(name, ranks, micro):
    ours, kinds = in_bf16(ranks, micro).about["predicted_bytes"], ("parameters", "gradients", "optimizer state")
    theirs = next(x for x in map(json.loads, open(f"{REFERENCE}/ddp/memory.jsonl")) if x["run"] == f"{name}_amp")
    padding = (384 - 257) * 32
    # They are divided otherwise; PyTorch has 4 bytes more for each tensor's step.
    assert sum(ours[kind] for kind in kinds) - 16 * padding == sum(theirs[kind.replace(" ", "_")]
                                                                   for kind in kinds) - 4 * theirs["tensors"]
    assert ours["parameters"] == theirs["parameters"] // 2 + 2 * padding


@pytest.mark.parametrize("mistake, field", [("summed", "grad_norm"), *(("without_masters", field) for field in AMP_BOUNDS)])
def test_bounds_of_bf16_exclude_mistakes(mistake, field):
    with pytest.raises(AssertionError):
        assert_close(Stored("ddp/ranks_2_amp"), Stored(f"ddp/ranks_2_amp_{mistake}"), rtol=AMP_BOUNDS[field], atol=0, only=field)


# ---- what is sent ----
@pytest.mark.parametrize("ranks, micro, options", [
    (1, 1, ""), (2, 1, ""), (3, 1, "--total-batch-size 384"), (4, 1, ""), (4, 4, ""), (4, 4, "--ddp naive"), rest(1, 4, ""),
    rest(2, 4, "")])
def test_a_step_sends_2p_n_minus_1_over_n_elements_and_the_loss(ranks, micro, options):
    run = trained("ddp", TINY, TINIER_BUCKETS, options, "--steps 3 --batch-size", (24 if ranks == 3 else 32) // ranks // micro,
                  ranks=ranks)
    parameters = (384 + 16 + 2) * 16 + 2 * (12 * 16**2 + 13 * 16)
    assert run.series("comm_bytes") == [2 * (ranks - 1) * (4 * parameters + 24) // ranks] * 3 # 24: the loss and two counts
    assert_as_predicted(run)


@pytest.mark.parametrize("options, during", [(TINIER_BUCKETS, True), ("--ddp naive", False)], ids=["buckets", "naive"])
def test_buckets_are_issued_during_the_backward_pass_and_naive_sums_after_it(options, during):
    path = once(f"timeline of {options}", lambda place: None) / "trace.json"
    trained("ddp", TINY, "--batch-size 16 --steps 2", options, "--trace", path, ranks=2)
    for rank in 0, 1:
        parts = [part for q, part, _, step, _ in operations(path, "wait for .*#") if q == rank and step == 2]
        assert parts and any(re.match("backward", part) for part in parts) == during
