"""Muon on ZeRO's shards: its losses, norms and weights are those of PyTorch's Muon on any number of ranks, and to the bit the same
whether the owner of a matrix orthogonalises it or every rank does. Each rank holds and sends as many bytes as the formulas say,
which are written here a second time, in plain numbers. (test_checkpoints.py continues its runs.)"""
import json, re
import numpy as np
import pytest
from shards import assert_same_samples, sampled, shard, sizes, skipped_steps
from suite import (PYTORCH, REFERENCE, TINY, TOKENS, Stored, assert_as_predicted, assert_close, assert_close_tensors,
                   assert_refused, assert_same, rest, tensors, train, trained)

LONG = 4
by_stage = pytest.mark.parametrize("stage", [1, sampled(2), sampled(3)], ids="stage_{}".format)
by_ranks = pytest.mark.parametrize("ranks", [sampled(1), sampled(2), 3, sampled(4)], ids="{}_ranks".format)


def pytorchs(ranks, stage=1, micro=1, *options, **settings):
    return trained("muon", PYTORCH, sizes(ranks, micro), "--zero-stage", stage, *options, ranks=ranks, **settings)


# ---- PyTorch's Muon ----
@pytest.mark.parametrize("ranks, stage, micro", [(1, 1, 1), (4, 3, 2), *(sampled(*row) for row in (
    (2, 1, 1), (2, 2, 2), (4, 1, 1), (4, 2, 1)))])
def test_20_steps_have_the_losses_norms_and_weights_of_pytorchs_muon(ranks, stage, micro):
    run = pytorchs(ranks, stage, micro)
    assert_close(Stored("muon/pytorch_fp64"), run)
    for field in "loss", "grad_norm", "param_norm": assert_close(Stored("muon/pytorch_fp32"), run, only=field)


# The bounds of test_single.py.
@pytest.mark.parametrize("precision, loss, grad_norm", [rest("bf16", 1e-3, 4e-3), rest("fp16", 1.2e-4, 5e-4)])
def test_16_bits_have_the_losses_and_gradient_norms_of_pytorchs_within_their_roundoff(precision, loss, grad_norm):
    run = pytorchs(2, precision=precision)
    assert_close(Stored("muon/pytorch_fp64"), run, rtol=loss, atol=0, only="loss")
    assert_close(Stored("muon/pytorch_fp64"), run, rtol=grad_norm, atol=0, only="grad_norm")


# ---- owners: who computes an update does not change it ----
# Two blocks on 3 ranks are 6, 7 and 7 times the work of a small matrix, one block on 4 ranks is 2, 2, 3 and 3; on 8 ranks two own
# nothing.
SMALL = f"{TINY} --total-batch-size 768 --eps 1e-5 --steps 8" # 48 sequences
DEEP = f"--model d5 --val-data {TOKENS} --eval-every 4 --eval-steps 3 --sample-every 4 --sample-tokens 20"


def muon(ranks, *options, micro=1, **settings):
    return trained("muon", SMALL, "--batch-size", 48 // ranks // micro, *options, ranks=ranks, **settings)


@pytest.mark.parametrize("blocks, ranks, stage, precision", [(2, 3, 1, "fp32"), (1, 4, 3, "fp32"), *(sampled(*row) for row in (
    (1, 4, 1, "fp32"), (1, 8, 2, "fp32"), (2, 2, 1, "fp32"), (2, 3, 1, "bf16"), (1, 4, 2, "bf16"), (1, 8, 3, "bf16"),
    (2, 3, 3, "fp16"), (1, 8, 1, "fp16")))])
def test_owners_have_the_bits_of_ranks_that_orthogonalise_everything(blocks, ranks, stage, precision):
    one, every = (muon(ranks, "--model", f"d{blocks}", "--check-every 1 --deterministic --zero-stage", stage, "--owners", who,
                       precision=precision) for who in ("one", "all"))
    assert_same(one, every)
    for run in one, every: assert_as_predicted(run)


@pytest.mark.rest
@by_stage
def test_5_blocks_have_the_same_bits_and_samples_with_owners_and_recomputation(stage):
    runs = [muon(3, DEEP, "--deterministic --zero-stage", stage, more, strict=strict) for more, strict in (
        ("", False), ("--owners all", False), ("--recompute block", False), ("", True))]
    for run in runs[1:]: assert_same_samples(runs[0], run)


@pytest.mark.parametrize("ranks, micro, stage", [(3, 4, 1), (4, 1, 3), (2, 4, 2), *(sampled(*row) for row in (
    (1, 4, 1), (2, 1, 1), (3, 1, 2), (3, 4, 3), (4, 4, 1), (8, 2, 2)))])
def test_ranks_and_micro_batches_change_nothing_but_the_last_digits(ranks, micro, stage):
    assert_close(muon(1), muon(ranks, "--zero-stage", stage, micro=micro))


# ---- what a rank holds and sends ----
C, ONES = 32, {"attention": 6, "mlp": 7} # of the model of PyTorch's run; of each unit, 1-D elements in front of the matrices, in C
ROOT = (384 + 32 + 2) * C
SQUARES = {"attention": [1] * 4, "mlp": [4] * 2} # of each unit, the elements of its matrices, in C^2
COST = {1: 1, 4: 3} # Newton-Schulz: 30 C^3 of the small ones, 90 of the large ones


class Spread:
    """How blocks are spread over the ranks. own: elements of a rank's shards. Lists of each rank's elements: adamw, which AdamW
    updates; held, owned, of matrices; sent, to owners and back. matrices, load: those it owns, in number and in 30 C^3."""

    def __init__(self, ranks, blocks, C=C, root=ROOT):
        def inside(q, size, begin, n):
            own = shard(size, ranks)
            return max(0, min(begin + n, (q + 1) * own) - max(begin, q * own))

        self.own, each = shard(root, ranks), range(ranks)
        self.adamw, (self.held, self.owned, self.sent, self.matrices, self.load) = \
            [inside(q, root, 0, root) for q in each], ([0] * ranks for _ in range(5))
        whole = []
        for unit in ["attention", "mlp"] * blocks:
            size, begin = ONES[unit] * C + sum(SQUARES[unit]) * C * C, ONES[unit] * C
            self.own += shard(size, ranks)
            for q in each: self.adamw[q] += inside(q, size, 0, begin)
            for squares in SQUARES[unit]:
                whole.append((squares, [inside(q, size, begin, squares * C * C) for q in each]))
                begin += squares * C * C
        for squares, parts in sorted(whole, key=lambda matrix: -matrix[0]):
            owner = self.load.index(min(self.load))
            self.load[owner] += COST[squares]
            self.matrices[owner] += 1
            self.owned[owner] += sum(parts)
            for q in each:
                self.held[q] += parts[q]
                for end in q, owner: self.sent[end] += parts[q] * (q != owner)


def expected_bytes(zeros, spread, q, X=4, every=False):
    """ZeRO's, but for each element of a matrix only one moment. And room for the most pieces that a rank holds and owns, for one
    matrix, and for two more with two squares."""
    most = max(spread.held) + (sum(spread.held) if every else max(spread.owned))
    return zeros | {"optimizer state": (4 if X == 4 else 8) * spread.own + 4 * spread.adamw[q],
                    "communication": zeros["communication"] + X * (most + 4 * C**2 + 2 * 5 * C**2 + 8)}


def shown(n):
    return f"{n / 1e3:.1f} kB" if n < 99950 else f"{n / 1e3:.0f} kB" if n < 999500 else f"{n / 1e6:.1f} MB"


@by_ranks
@by_stage
@pytest.mark.parametrize("micro, precision", [(1, "fp32"), sampled(2, "fp32"), sampled(1, "bf16")])
def test_each_rank_holds_and_sends_what_the_formula_says(ranks, stage, micro, precision):
    """The log tells the range of all ranks, the metrics tell those of the first."""
    settings, X, spread = {"ranks": ranks, "precision": precision}, {"fp32": 4, "bf16": 2}[precision], Spread(ranks, 2)
    run = pytorchs(ranks, stage, micro, "--deterministic", precision=precision)
    zero = trained("zero", PYTORCH, sizes(ranks, micro), "--zero-stage", stage, "--deterministic", **settings)
    all_bytes = [expected_bytes(zero.about["predicted_bytes"], spread, q, X) for q in range(ranks)]
    assert run.about["predicted_bytes"] == all_bytes[0]
    assert sum(zero.about["predicted_bytes"]["optimizer state"] - x["optimizer state"] for x in all_bytes) == 4 * (
        2 * 12 * C * C + ranks * spread.own - ROOT - 2 * (12 * C * C + 13 * C)) # of each matrix, and padding
    assert {*run.series("mem_bytes"), *run.series("mem_peak_bytes")} == {sum(all_bytes[0].values())}
    assert run.series("comm_bytes") == [bytes + X * spread.sent[0] for bytes in zero.series("comm_bytes")]
    sent = [shown(zero.about["predicted_comm_bytes"] + X * n) for n in (min(spread.sent), max(spread.sent))]
    if ranks > 1: assert f"; {' to '.join(dict.fromkeys(sent))} sent per rank and step\n" in run.out, run
    assert_as_predicted(run)


@pytest.mark.parametrize("ranks, every", [(3, False), rest(4, False), rest(3, True)], ids=["3_ranks", "4_ranks", "owners_all"])
def test_the_fullest_rank_takes_as_much_as_the_formula_says(ranks, every):
    """And with --owners all, each rank sends all that it holds to all others."""
    zero, spread = trained("zero", PYTORCH, sizes(ranks), "--zero-stage 1 --deterministic", ranks=ranks), Spread(ranks, 2)
    totals = [sum(expected_bytes(zero.about["predicted_bytes"], spread, q, every=every).values()) for q in range(ranks)]
    options = (PYTORCH, sizes(ranks), "--owners all" if every else "", "--steps 1 --recompute none --memory-limit")
    run = trained("muon", *options, f"{max(totals)}e-9", ranks=ranks)
    if every: assert run.series("comm_bytes") == [zero.series("comm_bytes")[0] + 4 * (ranks - 1) * spread.held[0]]
    refused = train("muon", *options, f"{max(totals) - 4}e-9", ranks=ranks)
    assert_refused(refused, "out of memory")
    without = {int(rank) for rank in re.findall(r"^rank (\d): error: out of memory", refused.err, re.M)}
    assert without == {rank for rank in range(ranks) if totals[rank] == max(totals)}, refused


@pytest.mark.parametrize("blocks, ranks, who", [(2, 3, "one"), *(rest(*row) for row in (
    (2, 3, "all"), (1, 4, "one"), (1, 8, "one"), (1, 8, "all")))])
def test_the_log_has_the_matrices_of_each_rank_and_the_load_of_the_busiest(blocks, ranks, who):
    spread = Spread(ranks, blocks)
    matrices, load = ([6 * blocks] * ranks, [10 * blocks] * ranks) if who == "all" else (spread.matrices, spread.load)
    listed = ", ".join(f"rank {q}: {matrices[q]} ({load[q] * 30 * 16**3 / 1e9:.3g})" for q in range(ranks))
    out = muon(ranks, "--model", f"d{blocks}", "--check-every 1 --deterministic --zero-stage 1 --owners", who).out
    assert (f"\nowners     matrices (GFLOPs of Newton-Schulz per step) {listed}; the busiest has "
            f"{max(load) * ranks / sum(load):.3f} of the mean\n") in out, out


# ---- Newton-Schulz ignores the size of a gradient ----
def moved(run):
    """How far the matrices of the blocks are from where they began."""
    before = tensors(f"{REFERENCE}/initial/model.safetensors")
    return {name: x - before[name] for name, x in run.weights().items() if name.startswith("h.") and x.ndim == 2}


@pytest.mark.parametrize("clip", ["1", rest("1e-3"), rest("1e-6"), "1e-9"])
def test_clipped_and_tiny_gradients_give_the_same_updates(clip):
    """In the first step, whose gradients have a norm of 2.2; later ones add up momenta that were clipped by other factors."""
    first = "--steps 1 --warmup-steps 0 --lr-schedule constant --grad-clip"
    whole, clipped = (moved(pytorchs(2, 1, 1, first, size)) for size in ("0", clip))
    assert_close_tensors(whole, clipped, rtol=0, atol=2e-7)
    assert all(4.5e-4 < np.sqrt(np.mean(x**2)) < 6e-4 for x in whole.values()) # a little less than 0.2 of the learning rate


# ---- fp16 ----
@pytest.mark.parametrize("ranks, stage, who", [rest(3, 1, "one"), rest(1, 1, "one"), rest(2, 3, "one"), rest(3, 2, "all")])
def test_a_skipped_step_leaves_weights_momentum_and_the_count_of_updates_as_they_are(ranks, stage, who):
    run = muon(ranks, "--zero-stage", stage, "--owners", who, "--steps 14 --loss-scale 1048576 --loss-scale-interval 4",
               "--save-every 1 --keep 0", precision="fp16")
    skipped = skipped_steps(run)
    assert any(skipped[k] and not skipped[k - 1] for k in range(1, 14)) # in the middle, when there is a momentum
    for step in range(2, 15):
        files = [run.checkpoint(k) for k in (step - 1, step)]
        same = [(files[0] / name).read_bytes() == (files[1] / name).read_bytes()
                for name in ("model.safetensors", "optimizer.safetensors")]
        counts = [json.loads((file / "state.json").read_text())["adamw_t"] for file in files]
        assert same == [skipped[step - 1]] * 2 and counts[1] - counts[0] == (not skipped[step - 1]), step
    momenta = tensors(run.checkpoint() / "optimizer.safetensors")
    assert all(np.isfinite(x).all() and x.any() for name, x in momenta.items() if name.startswith("momentum."))
