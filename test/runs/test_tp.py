"""Tensor parallelism: ranks that share a replica of the model, and copies that are data parallel. Runs are compared with PyTorch's
of the whole model within rounding, and to the bit with one device that forms sums in the same parts (test/split). Bytes are as by
formulas in plain numbers."""
import pytest
from meshes import AGAIN, EVALUATIONS, LARGE_SCALE, SEQUENCE, SMALL, assert_bytes, assert_same_skips, axes, batch, reference
from shards import assert_pytorchs, assert_same_samples, assert_timeline_has_what_is_counted, faulty, sampled
from suite import PYTORCH, ROOT, assert_different, assert_each_says, assert_same, make, rest, trained

LONG = 8


def sizes(mesh, copies, micro):
    """3 divides 24 sequences and 6 heads."""
    return batch(24 if "3" in mesh else 32, copies, micro) + " --heads 6 --channels 24" * mesh.endswith("3")


def tp(mesh, *options, micro=1, **settings):
    copies, t = axes(mesh)
    return trained("tp", SMALL, sizes(mesh, copies, micro), "--tensor-parallel", t, *options, ranks=copies * t, **settings)


def in_parts(mesh, *options, micro=1, rows=False, **settings):
    """One device whose sums have a mesh's parts. rows: layernorms' too, as with --sequence-parallel."""
    copies, t = axes(mesh)
    return reference(sizes(mesh, 1, micro), *options, data_parts=copies, tensor_parts=t, sequence_parts=t if rows else 1,
                     **settings)


# PyTorch's model has 384 tokens with the padding: of 4 parts the last one has nothing but padding.
@pytest.mark.parametrize("mesh, options, strict", [
    ("1x2", "", False), ("2x2", "", False), ("1x2", SEQUENCE, True), ("2x2", SEQUENCE, True), ("2x2", f"{SEQUENCE} {AGAIN}", True),
    rest("1x1", SEQUENCE, True), rest("1x4", "", True), rest("1x4", f"{SEQUENCE} {AGAIN} --no-overlap", False),
    rest("2x2", f"{SEQUENCE} --batch-size 2", False), rest("4x2", f"{SEQUENCE} {AGAIN}", True), rest("2x4", SEQUENCE, True)])
def test_tp_has_the_losses_norms_and_weights_of_pytorchs(mesh, options, strict):
    copies, t = axes(mesh)
    assert_pytorchs(trained("tp", PYTORCH, "--tensor-parallel", t, "--batch-size", 16 // copies, options, ranks=copies * t,
                            strict=strict))


@pytest.mark.parametrize("precision", ["fp32", sampled("bf16")])
@pytest.mark.parametrize("mesh", ["2x2", *map(sampled, ("1x2", "1x4", "2x4", "4x2", "1x3", "3x1"))])
@pytest.mark.parametrize("options, rows, micro, strict", [
    ("--check-every 3", False, 1, True), sampled(f"{AGAIN} --no-overlap", False, 1, True),
    sampled(SEQUENCE, True, 1, False),
    sampled(f"{SEQUENCE} {AGAIN}", True, 1, True), (SEQUENCE, True, 4, False)])
def test_every_mesh_has_the_bits_of_its_parts(precision, mesh, options, rows, micro, strict):
    assert_same(in_parts(mesh, rows=rows, micro=micro, precision=precision),
                tp(mesh, options, micro=micro, precision=precision, strict=strict))


@pytest.mark.parametrize("stage", ["tp", rest("3d")])
def test_one_row_on_one_rank_trains_as_on_one_device(stage):
    one_row = f"{SMALL} --seq-len 1 --batch-size 1 --total-batch-size 0"
    assert_same(trained("single", one_row), trained(stage, one_row, SEQUENCE, ranks=1))


# The comparisons to the bit see where a sum was cut, and in which order its terms were added.
@pytest.mark.parametrize("precision", ["fp32", rest("bf16")])
def test_sums_in_other_parts_have_other_bits(precision):
    whole, rows = in_parts("2x2", precision=precision), in_parts("2x2", rows=True, precision=precision)
    assert_different(whole, rows)
    assert_different(whole, in_parts("2x1", precision=precision))
    assert_different(rows, in_parts("2x2", rows=True, sequence_sum=1, precision=precision))


@pytest.mark.rest
@pytest.mark.parametrize("rows", [False, True], ids=["plain", "sequence"])
def test_ranks_skip_the_same_steps_in_fp16(rows):
    assert_same_skips(in_parts("2x2", LARGE_SCALE, rows=rows, precision="fp16"),
                      tp("2x2", LARGE_SCALE, SEQUENCE * rows, precision="fp16"))


# In a part of 3 the last row of a sample is no multiple of it.
@pytest.mark.parametrize("mesh, options, rows", [("2x2", "", False), rest("1x3", "--seq-len 48 --total-batch-size 1152", True)],
                         ids=["2x2", "1x3"])
def test_evaluations_and_samples_are_those_of_one_device(mesh, options, rows):
    assert_same_samples(in_parts(mesh, EVALUATIONS, options, rows=rows), tp(mesh, EVALUATIONS, options, SEQUENCE * rows))


# ---- bytes: 2 layers, 4 heads, 16 channels, a vocabulary of 384 with its padding, 16 positions; a copy has 512 / copies tokens
# ----
@pytest.mark.parametrize("precision, mesh, sequence, again", [
    ("fp32", "1x2", 0, 0), rest("fp32", "1x4", 1, 0), rest("fp32", "4x2", 1, 1), rest("fp32", "1x4", 0, 1),
    rest("fp32", "2x1", 0, 0),
    rest("bf16", "2x2", 1, 0), rest("bf16", "2x2", 1, 1), rest("bf16", "1x4", 1, 0), rest("bf16", "1x4", 0, 1)])
def test_a_rank_holds_and_sends_what_the_formulas_say(precision, mesh, sequence, again):
    options = [SEQUENCE] * sequence + [AGAIN] * again
    communication = tp(mesh, *options, "--steps 1", precision=precision).about["predicted_bytes"]["communication"]
    run = tp(mesh, *options, "--steps 2", precision=precision)
    D, t = axes(mesh)
    X, C, L, BT = 2 if precision == "bf16" else 4, 16, 2, 512 // D
    rows, kept = BT // t if sequence else BT, 1 if again else L
    P = L * ((12*C*C + 7*C) // t + 6*C) + (384 // t + 16 + 2) * C
    activations = L * rows*C*X + kept * (rows * (3*C*X + 16) + BT * (12*C // t * X + 4 // t * 4))
    activations += rows * (2*C*X + 8) + BT * ((3 + sequence)*C*X + 4*C // t * X + 12) + BT * (384 // t * X + 3*t*4)
    halves = 2 * (4*L + 2) + again * (2 + sequence) * L + 2*L * sequence # a sum has two, a gather is one
    sent = D * (t - 1) * (halves*BT*C*X + t*BT*12 + 2 * (sequence * (2*L + 1) * 2*C*X + 32)) + t * 2 * (D - 1) * (X*P + 24)
    assert_bytes(run, sent // (D*t), parameters=X*P, gradients=X*P, optimizer_state=(12 if X == 2 else 8) * P,
                 activations=activations + 56, communication=communication) # 56: StepStats


@pytest.mark.parametrize("mesh, options", [("1x2", ""), ("2x2", SEQUENCE)])
def test_a_timeline_has_the_bytes_that_are_counted(mesh, options, tmp_path):
    copies, t = axes(mesh)
    run = tp(mesh, options, "--steps 1 --trace", tmp_path / "trace")
    assert_timeline_has_what_is_counted(run, tmp_path / "trace", lambda name,
                                        _: t if " of tp" in name else copies if " of dp" in name else copies * t)


@pytest.mark.rest
def test_tensor_parallel_0_is_all_ranks():
    assert_same(tp("1x2"), tp("1x2", "--tensor-parallel 0"))


# ---- ranks that differ (test_faults.py: that die, hang, or differ in what all have) ----
FAULTY = f"{SMALL} {batch(32, 2, 2)} --tensor-parallel 2 --fault"


# --fault flips a bit of the first parameter, which all ranks have. This program flips one of the last, of which each rank has its
# own.
@pytest.mark.rest
def test_a_bit_that_flips_in_a_part_is_found_by_the_other_copy():
    header = ROOT / "build/split/flips/flips.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text('#include "../../../llmc/run/ranks_run.h"\n#define ranks_step_begin(run, step) ((run)->ranks->state = '
                      'g.params + g.num_params - 1, ranks_step_begin(run, step))\n')
    program = make("DEVICE=cpu", "BUILD=build/split/flips", ["CFLAGS=-include build/split/flips/flips.h -O1"],
                   "build/split/flips/train_gpt2_tp")
    run = faulty("tp", FAULTY, "3:3:bitflip", ranks=4, binary=program)
    assert_each_says(run, 4, "after step 3 the parameters of unit 4 differ between rank 1 and rank 3")
