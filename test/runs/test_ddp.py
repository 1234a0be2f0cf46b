"""Data parallelism: runs on 1 to 4 ranks agree with PyTorch DDP's in every mode, with any buckets and accumulation."""
import pytest
from suite import PYTORCH, Stored, assert_close, assert_same, rest, trained

RANKS = [1, 2, 3, rest(4)]
SMALL_BUCKETS = "--bucket-mb 0.02"


def sizes(ranks, micro=1):
    """16 sequences a step do not divide over 3 ranks, so there they are 12."""
    sequences = 12 if ranks == 3 else 16
    return f"--batch-size {sequences // ranks // micro} --total-batch-size {32 * sequences}"


def ddp(ranks, *options, micro=1, **settings):
    return trained("ddp", PYTORCH, sizes(ranks, micro), *options, ranks=ranks, **settings)


def assert_pytorchs(name, run):
    assert_close(Stored(f"ddp/{name}"), run)
    assert_close(Stored(f"ddp/{name}"), run, rtol=0, only="param_norm")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options, settings", [
    (SMALL_BUCKETS, {}), ("--ddp naive", {}), (SMALL_BUCKETS, {"strict": True}), (f"{SMALL_BUCKETS} --allreduce ring", {}),
    (f"{SMALL_BUCKETS} --deterministic", {})])
def test_ddp_has_the_losses_norms_and_weights_of_pytorchs(ranks, options, settings):
    assert_pytorchs(f"ranks_{ranks}", ddp(ranks, options, **settings))


@pytest.mark.parametrize("ranks", RANKS)
def test_micro_batches_have_the_losses_norms_and_weights_of_pytorchs(ranks):
    assert_pytorchs(f"ranks_{ranks}_accumulate_2", ddp(ranks, SMALL_BUCKETS, micro=2))


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("options", [SMALL_BUCKETS, "", "--ddp naive"], ids=["again", "one bucket", "naive"])
def test_sums_in_rank_order_have_the_same_bits_in_every_mode(ranks, options):
    assert_same(ddp(ranks, SMALL_BUCKETS, "--deterministic"), ddp(ranks, options, "--deterministic", again="once more"))
