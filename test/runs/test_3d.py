"""Data, tensor and pipeline parallelism on one mesh, and ZeRO on its data axis. Runs are compared with PyTorch's within rounding,
and to the bit with DDP on a rank for each replica of the model, whose layers form sums as on the mesh (test/split), or with
--sequence-parallel with one device. Bytes, in all and along each axis, are as by formulas in plain numbers."""
import json, re
import pytest
from meshes import AGAIN, EVALUATIONS, LARGE_SCALE, SEQUENCE, SMALL, assert_bytes, assert_same_skips, axes, batch, reference
from shards import assert_pytorchs, assert_same_samples, faulty, shard
from suite import PYTORCH, assert_different, assert_same, rest, trained

LONG = 10
EIGHT = "--layers 8"
ZERO, ZB, GPIPE, INTERLEAVED = "--zero-stage 1", "--schedule zb-h1", "--schedule gpipe", "--schedule interleaved"


def mesh_options(mesh):
    return "--mesh dp={},tp={},pp={}".format(*axes(mesh))


# 32 sequences a step, in 4 micro-batches
def ranks(mesh, *options, **settings):
    d, t, p = axes(mesh)
    return trained("3d", SMALL, EIGHT, batch(32, d, 4), mesh_options(mesh), *options, ranks=d * t * p, **settings)


def parts(mesh):
    d, t, p = axes(mesh)
    return {"tensor_parts": t, "tied_apart": p > 1}


def copies(mesh, *options, **settings):
    """DDP, with sums as on this mesh."""
    d = axes(mesh)[0]
    return reference(EIGHT, batch(32, d, 4), *options, ranks=d, **parts(mesh), **settings)


def device(mesh, *options, rows=False, **settings):
    """One device with such sums. rows: layernorms' too, as with --sequence-parallel."""
    d, t, p = axes(mesh)
    return reference(EIGHT, batch(32, 1, 4), *options, data_parts=d, sequence_parts=t if rows else 1, **parts(mesh), **settings)


# PyTorch's model has 2 layers.
ALL = f"{ZERO} {SEQUENCE} {AGAIN}"


@pytest.mark.parametrize("mesh, options, strict", [
    *(pytest.param(m, ALL, True, id=f"{m}-all") for m in ("2x2x1", "2x1x2", "1x2x2", "2x2x2")),
    *(rest(m, ALL, True, id=f"{m}-all") for m in ("1x1x2", "1x1x1", "1x4x2", "4x2x1")),
    *(rest(m, "", False, id=f"{m}-plain") for m in ("2x1x1", "1x2x1", "1x2x2")),
    *(rest(m, f"{ZERO} {SEQUENCE} {ZB}", False, id=f"{m}-zb-h1") for m in ("1x2x2", "2x2x2")),
    rest("2x2x2", f"--mesh pp=2,dp=2,tp=2 {GPIPE} --no-overlap", True, id="2x2x2-gpipe_outside")])
def test_3d_has_the_losses_norms_and_weights_of_pytorchs(mesh, options, strict):
    d, t, p = axes(mesh)
    assert_pytorchs(trained("3d", PYTORCH, mesh_options(mesh), "--batch-size", min(4, 8 // d), options, ranks=d * t * p,
                            strict=strict))


# ---- to the bit ----
@pytest.mark.parametrize("options, strict", [("--check-every 3", True), (f"{ZB} {ZERO}", False),
                                             rest(f"{GPIPE} {ZERO} {AGAIN}", False)],
                         ids=["strict", "zb-h1", "recomputed"])
def test_2x2x2_ranks_have_the_bits_of_one_device_in_parts(options, strict):
    assert_same(device("2x2x2"), ranks("2x2x2", options, strict=strict))


MESHES = [("fp32", m) for m in ("1x1x4", "1x2x2", "2x2x1", "2x1x2", "2x2x2")] + [("bf16", m) for m in ("2x2x1", "1x2x2", "2x2x2")]


@pytest.mark.sampled
@pytest.mark.parametrize("precision, mesh", MESHES)
@pytest.mark.parametrize("options, strict", [
    (f"{ZERO} --check-every 3", True), (f"{GPIPE} {ZERO} --no-overlap", True), (ZB, True), (INTERLEAVED, False),
    (f"{GPIPE} {ZERO} {AGAIN}", False), (f"{ZB} {ZERO}", False)])
def test_every_mesh_has_the_bits_of_copies_in_parts(precision, mesh, options, strict):
    if mesh.endswith("x1"): options = options.replace(INTERLEAVED, "").replace(ZB, "") # one stage has nothing to schedule
    assert_same(copies(mesh, precision=precision), ranks(mesh, options, precision=precision, strict=strict))
    assert_same(copies(mesh, precision=precision), device(mesh, precision=precision))


@pytest.mark.sampled
@pytest.mark.parametrize("precision, mesh", [x for x in MESHES if axes(x[1])[1] > 1])
@pytest.mark.parametrize("options, strict", [(f"{ZERO} {AGAIN}", True), ("", False), (f"{ZERO} {ZB}", False)])
def test_sequence_parallel_ranks_have_the_bits_of_layernorms_in_parts(precision, mesh, options, strict):
    rows = device(mesh, rows=True, precision=precision)
    assert_same(rows, ranks(mesh, SEQUENCE, options, precision=precision, strict=strict))
    assert_different(rows, copies(mesh, precision=precision))


@pytest.mark.rest
def test_stages_may_be_farther_apart_than_copies():
    run = ranks("2x2x2", "--mesh pp=2,tp=2,dp=2", ZERO)
    assert_same(copies("2x2x2"), run)
    assert_same(run, ranks("2x2x2", "--mesh tp=2,pp=2")) # what is not named takes what is left
    assert re.search("^mesh  *pp 2 .* x dp 2 .* x tp 2 ", run.out, re.M), run


@pytest.mark.rest
@pytest.mark.parametrize("mesh, options", [("2x2x2", f"{ZERO} {ZB}"), ("2x2x1", ZERO)], ids=["2x2x2", "2x2x1"])
def test_ranks_skip_the_same_steps_in_fp16(mesh, options):
    assert_same_skips(copies(mesh, LARGE_SCALE, precision="fp16"), ranks(mesh, LARGE_SCALE, options, precision="fp16"))


@pytest.mark.parametrize("options, rows", [(ZERO, False), rest(SEQUENCE, True), rest(INTERLEAVED, False)],
                         ids=["zero", "sequence", "chunks"])
def test_evaluations_and_samples_are_those_of_one_device(options, rows):
    assert_same_samples(device("2x2x2", EVALUATIONS, rows=rows), ranks("2x2x2", EVALUATIONS, options))


@pytest.mark.rest
def test_a_trace_names_axes_and_actions(tmp_path):
    ranks("2x2x2", ZERO, "--steps 2 --trace", tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    for wanted in (r"all-reduce #\d+ of tp\.3", r"send #\d+ of pp\.0", r"reduce-scatter #\d+ of dp\.2", r"all-gather #\d+ of dp\.1",
                   "F3 forward, block 0", "B3 backward, block 7"):
        assert any(re.match(wanted, name) for name in names), wanted


# ---- what rank 0 holds and sends: 8 layers, 4 heads, 16 channels, a vocabulary of 384 with its padding, 16 positions. S: how many
# micro-batches'
# activations it holds. sets: with recomputation, how many blocks keep all of theirs; with zb-h1 also how many keep the gradients
# for W ----
@pytest.mark.parametrize("precision, mesh, zero, sequence, again, schedule, blocks, S, sets", [
    ("fp32", "2x2x2", 0, 0, 0, "1f1b", 5, 2, 1), rest("fp32", "2x2x2", 1, 1, 1, "1f1b", 5, 2, 1),
    rest("fp32", "1x2x2", 0, 1, 0, "gpipe", 5, 4, 1),
    rest("fp32", "2x2x1", 1, 0, 1, "1f1b", 8, 1, 1), rest("fp32", "2x1x2", 1, 0, 0, "zb-h1", 5, 2, 10),
    rest("fp32", "1x2x4", 0, 1, 0, "1f1b", 3, 4, 1), rest("fp32", "1x4x1", 0, 1, 0, "1f1b", 8, 1, 1),
    rest("bf16", "2x2x2", 1, 1, 0, "1f1b", 5, 2, 1), rest("bf16", "2x2x1", 1, 0, 1, "1f1b", 8, 1, 1)])
def test_rank_0_holds_and_sends_what_the_formulas_say(precision, mesh, zero, sequence, again, schedule, blocks, S, sets):
    options = [SEQUENCE] * sequence + [AGAIN] * again
    run = ranks(mesh, f"--zero-stage {zero} --schedule {schedule} --steps 2", *options, precision=precision)
    d, t, p = axes(mesh)
    X, C, micro, head = 2 if precision == "bf16" else 4, 16, 4, p == 1
    BT = 512 // d // micro
    rows, kept = BT // t if sequence else BT, sets if again else S * blocks
    attention, mlp, root = (4*C*C + 3*C) // t + 3*C, (8*C*C + 4*C) // t + 3*C, (384 // t + 16 + 2) * C
    whole = blocks * (attention + mlp) + root
    own = blocks * (shard(attention, d) + shard(mlp, d)) + shard(root, d) if zero else whole
    P = d * own if zero else whole
    activations = C*X*rows * (S*blocks + kept + 1 + 3 * (p > 1)) + kept * (rows * (2*C*X + 16) + BT * (12*C // t * X + 4 // t * 4))
    activations += (schedule == "zb-h1") * sets * BT * (2*C + 7*C // t) * X + head * S * (rows * (C*X + 8) + BT*C*X)
    activations += BT * ((2 + sequence) * C*X + 4*C // t * X + 4 + S*8)
    activations += (BT if head else t) * (384 // t * X + 12*t)
    tp = 2 * (4*blocks + head + again*blocks + 1) + sequence*again*blocks + 2*blocks * sequence
    tp = micro * (tp*X*BT*C // t * (t - 1) + head * (t - 1) * BT*12) + 2 * (t - 1) * (sequence * (2*blocks + 1) * 2*C*X + 32) // t
    pp = 0 if p == 1 else micro*rows*C*X + root*X + 2 * (p - 1) * 40 // p
    dp = 2 * (d - 1) * (P * X + 24 + 16*zero) // d
    # StepStats
    assert_bytes(run, tp + pp + dp, parameters=X*P, gradients=X*P, optimizer_state=(12 if X == 2 else 8) * own,
                 activations=activations + 56)
    along = run.about["predicted_comm_bytes_along"]
    assert [along.get(axis, 0) for axis in ("tp", "pp", "dp")] == [tp, pp, dp]


# ---- ranks that hang or leave out an operation (test_faults.py: that die) ----
FAULTY = f"{SMALL} {EIGHT} {batch(32, 2, 4)} --mesh dp=2,tp=2,pp=2 --fault"


# Rank 7 waits for rank 6 in a sum, and rank 4 with a message: whoever's patience ends first says so.
@pytest.mark.rest
@pytest.mark.parametrize("fault, pattern", [
    ("6:3:hang", r"rank 6 \(dp 1, pp 1, tp 0\) has not reached .* of (tp\.3 .*F0 on stage 1|pp\.2 .*rank 4 has waited)"),
    ("6:3:skip", r"rank 6 \(dp 1, pp 1, tp 0\) has not reached its side of send .* to rank 6 of pp\.2 ")], ids=["hang", "message"])
def test_a_rank_that_is_waited_for_is_named_with_its_axis(fault, pattern):
    run = faulty("3d", FAULTY, fault, ranks=8, timeout=15)
    assert run.status == 1 and re.search(f"error: {pattern}", run.err), run


# The next sum is taken for one that a rank has left out: the step does not end, whichever of the two ranks sees it first.
@pytest.mark.rest
def test_a_sum_that_is_left_out_ends_the_step():
    run = faulty("3d", FAULTY, "5:3:skip", ranks=8, timeout=15, env={"SHARD_LEAVE_SECONDS": 15}) # the others wait in vain
    assert not re.search("^step  *3/10", run.out, re.M), run
    assert re.search("^rank [45]: error: .*Do all ranks issue the same operations|error: rank [45] .*has ", run.err, re.M), run

