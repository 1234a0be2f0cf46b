"""Pipeline parallelism: ranks that share a replica of the model, each with some of its blocks, and copies that are data parallel.
Runs are compared with PyTorch's within rounding, and to the bit with one device whose tied matrix has its two gradients apart
(test/split/tied.h), and with DDP likewise. Bytes are as by formulas in plain numbers."""
import json, re
import pytest
from meshes import AGAIN, EVALUATIONS, LARGE_SCALE, SMALL, assert_bytes, assert_same_skips, axes, batch, reference, split_program
from shards import assert_pytorchs, assert_same_samples, assert_timeline_has_what_is_counted, faulty, sampled
from suite import PYTORCH, assert_different, assert_refused, assert_same, command, rest, train, trained

LONG = 9
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "interleaved"]
EIGHT = "--layers 8"


def micro_batches(copies):
    return batch(24, copies, 12 // copies if copies < 3 else 24 // copies)


# 24 sequences a step: in 12 micro-batches, or of two copies in 6; of more copies each micro-batch has one sequence. One thread, as
# a
# reference has: on some CPUs a product with more has other bits.
def pp(mesh, *options, **settings):
    copies, p = axes(mesh)
    return trained("pp", SMALL, EIGHT, micro_batches(copies), "--pipeline-parallel", p, *options, ranks=copies * p,
                   **{"env": {"OMP_NUM_THREADS": 1}} | settings)


def tied(copies, *options, **settings):
    """One device, or DDP on a rank for each copy, whose tied matrix has its two gradients apart."""
    return reference(EIGHT, micro_batches(copies), *options, ranks=copies if copies > 1 else None, tied_apart=1, **settings)


def plain(precision="fp32"):
    return trained("single", SMALL, EIGHT, micro_batches(1), precision=precision, env={"OMP_NUM_THREADS": 1})


# PyTorch's model has two layers: --split auto would give the second stage nothing but the head.
@pytest.mark.parametrize("mesh, options, strict", [
    ("1x2", "", False), ("2x2", "", False), ("2x2", "--schedule zb-h1", True), rest("1x1", "--schedule gpipe", False),
    rest("1x2", "--schedule gpipe", True), rest("1x2", "--split 2,0 --schedule zb-h1", False), rest("2x2", AGAIN, True),
    rest("2x2", f"{AGAIN} --schedule gpipe", False), rest("4x2", "--schedule zb-h1", True)])
def test_pp_has_the_losses_norms_and_weights_of_pytorchs(mesh, options, strict):
    copies, p = axes(mesh)
    split = "--split 1,1" if p > 1 else ""
    assert_pytorchs(trained("pp", PYTORCH, f"--pipeline-parallel {p} {split} --batch-size {min(4, 8 // copies)}", options,
                            ranks=copies * p,
                            strict=strict))


@pytest.mark.parametrize("precision", ["fp32", sampled("bf16")])
@pytest.mark.parametrize("mesh", ["1x4", *map(sampled, ("1x2", "1x3", "2x2", "2x3", "3x2", "4x2"))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_bits_of_copies_whose_tied_gradients_are_apart(schedule, mesh, precision):
    # interleaved takes micro-batches in groups of as many as there are stages
    assert_same(tied(axes(mesh)[0], precision=precision), pp(mesh, "--check-every 4 --schedule", schedule, precision=precision))


# In bf16 one device rounds once where the reference rounds twice.
@pytest.mark.parametrize("precision", ["fp32", rest("bf16")])
def test_one_device_adds_the_tied_gradients_after_each_micro_batch(precision):
    assert_different(tied(1, precision=precision), plain(precision))
    if precision == "fp32": assert_same(plain(), tied(1, tied_early=1))


@pytest.mark.rest
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", SCHEDULES[:3]) # interleaved needs a second stage
def test_a_pipeline_of_one_rank_has_the_bits_of_one_device(schedule, precision):
    assert_same(plain(precision), pp("1x1", "--schedule", schedule, precision=precision))


@pytest.mark.rest
@pytest.mark.parametrize("mesh, options, strict", [
    ("1x4", AGAIN, True), ("1x3", f"{AGAIN} --schedule gpipe", True), ("1x2", f"{AGAIN} --schedule interleaved --chunks 4", True),
    ("1x4", "--schedule zb-h1", True), ("1x4", "--split 1,2,5,0", False),
    ("1x4", "--split 5,1,1,1", False), ("1x2", "--schedule interleaved --split 1,4,3,0", False), ("2x2", "--schedule zb-h1", True)])
def test_recomputation_splits_and_strict_mode_have_the_same_bits(mesh, options, strict):
    assert_same(tied(axes(mesh)[0]), pp(mesh, options, strict=strict))


@pytest.mark.rest
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_fewer_micro_batches_than_stages_have_the_same_bits(schedule):
    assert_same(tied(1, "--batch-size 12"), pp("1x4", "--batch-size 12 --schedule", schedule))


# A rank has 2 of 8 blocks; 2 steps have 12 micro-batches each.
@pytest.mark.rest
@pytest.mark.parametrize("schedule, recompute, passes", [("1f1b", "none", 48), ("1f1b", "block", 96), ("gpipe", "block", 96),
                                                         ("zb-h1", "none", 48)])
def test_each_block_is_recomputed_once_a_micro_batch(schedule, recompute, passes):
    counting = split_program("pp", headers="count")
    run = command([counting], SMALL, EIGHT, micro_batches(1), "--out= --steps 2 --split 2,2,2,2 --schedule", schedule,
                  "--recompute", recompute, ranks=4)
    assert run.status == 0 and re.findall(r"^forward passes of blocks: (\d+)$", run.err, re.M) == 4 * [str(passes)], run


@pytest.mark.rest
@pytest.mark.parametrize("mesh, schedule", [("1x3", "1f1b"), ("1x4", "zb-h1"), ("1x2", "interleaved"), ("2x2", "1f1b")])
def test_stages_skip_the_same_steps_in_fp16(mesh, schedule):
    run = pp(mesh, LARGE_SCALE, "--schedule", schedule, precision="fp16")
    assert_same_skips(tied(axes(mesh)[0], LARGE_SCALE, precision="fp16"), run)


@pytest.mark.parametrize("mesh, options", [
    ("1x3", ""), rest("1x2", "--schedule interleaved"), rest("1x4", "--split 3,3,2,0 --schedule zb-h1"), rest("2x2", "")])
def test_evaluations_and_samples_are_those_of_one_device(mesh, options):
    assert_same_samples(tied(axes(mesh)[0], EVALUATIONS), pp(mesh, EVALUATIONS, options))


# ---- traces and emulated times ----
@pytest.mark.parametrize("mesh, schedule", [("1x3", "1f1b"), rest("1x2", "interleaved"), rest("2x2", "1f1b")])
def test_a_timeline_has_the_bytes_that_are_counted(mesh, schedule, tmp_path):
    """The root is summed over two ranks, and norms, which have 8 bytes, over all stages."""
    copies, p = axes(mesh)
    run = pp(mesh, "--steps 1 --schedule", schedule, "--trace", tmp_path / "trace")
    assert_timeline_has_what_is_counted(run, tmp_path / "trace", lambda name, X: copies if " of dp" in name else p if X == 8 else 2)


@pytest.mark.rest
@pytest.mark.parametrize("schedule, names", [
    ("zb-h1", {"F3 forward, block 0", "I11 backward, block 7", "W0 weights, block 0", "W11 weights, block 7"}),
    ("interleaved", {"F11 forward, block 0", "F0 forward, block 7", "B11 backward, block 7", "B0 backward, block 0"})])
def test_a_trace_names_actions(tmp_path, schedule, names):
    pp("1x2", "--steps 2 --schedule", schedule, "--trace", tmp_path / "trace.json")
    assert names <= {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}


# The first stage has 7 blocks and forwards 2 micro-batches, the second one has 1 and the head, which costs 3. However busy the
# machine is,
# no action is shorter than it is to be.
@pytest.mark.rest
def test_no_step_is_shorter_than_its_emulated_actions():
    run = pp("1x2", "--split 7,1 --batch-size 12 --steps 1 --emulate-ms 20,0,0,3")
    assert re.search("OF A BLOCK .* AS LONG AS 3 BLOCKS", run.said), run
    assert run.series("step_ms")[0] >= 2 * 7 * 20 + 4 * 20


# ---- bytes: 8 layers, 4 heads, 128 channels, a vocabulary of 384 with its padding, 16 positions. The log has a rounded number for
# each rank.
# That of `fullest`, which has most, is exact: a --memory-limit of as many is enough, and with 8 less it stops ----
def shown(n):
    return f"{n / 1e3:.1f} kB" if n < 99950 else f"{n / 1e3:.0f} kB" if n < 999500 else f"{n / 1e6:.1f} MB"


@pytest.mark.parametrize("precision, copies, schedule, chunks, recompute, split, fullest", [
    ("fp32", 1, "1f1b", 1, 0, "1,5,1,1", 1), rest("fp32", 1, "gpipe", 1, 0, "1,1,5,1", 2),
    rest("fp32", 1, "1f1b", 1, 0, "1,1,1,5", 3),
    rest("fp32", 1, "1f1b", 1, 1, "5,1,1,1", 0), rest("fp32", 1, "zb-h1", 1, 0, "1,1,5,1", 2),
    rest("fp32", 1, "interleaved", 2, 0, "2,2,2,2", 0),
    rest("fp32", 1, "interleaved", 2, 1, "1,1,4,2", 0), rest("fp32", 1, "gpipe", 1, 1, "1,1,5,1", 2),
    rest("fp32", 2, "1f1b", 1, 0, "5,3", 0),
    rest("fp32", 2, "zb-h1", 1, 0, "2,6", 1), rest("bf16", 1, "gpipe", 1, 0, "3,3,2", 0), rest("bf16", 2, "gpipe", 1, 1, "4,4", 1)])
def test_a_rank_holds_and_sends_what_the_formulas_say(precision, copies, schedule, chunks, recompute, split, fullest):
    blocks_of = [int(n) for n in split.split(",")]
    D, v, p, m, X, C, BT = copies, chunks, len(blocks_of) // chunks, 12 // copies, 2 if precision == "bf16" else 4, 128, 32
    options = f"--channels 128 --schedule {schedule} --chunks {chunks} --split {split} --recompute {'block' if recompute else 'none'}"
    run = pp(f"{D}x{p}", options, "--steps 2", precision=precision)
    workspace = run.about["predicted_bytes"]["workspace"]
    all_bytes, held, sent = [], [], []
    for r in range(p):
        mine = blocks_of[r::p]
        blocks, most, head, root = sum(mine), max(mine), r == p - 1, r in (0, p - 1)
        slots = {"gpipe": m, "1f1b": p - r, "zb-h1": p, "interleaved": 2 * (p - r - 1) + (v - 1) * p + 1}[schedule]
        slots = min(slots, m * v)
        acts, kept, grads = slots * most, int(most > 0) if recompute else slots * most, 0
        if schedule == "zb-h1": # what a W needs that has been put off
            grads = kept
        P = blocks * (12*C*C + 13*C) + root * (384 + 16 + 2) * C
        activations = BT * (C*X * (acts + 15*kept + 9*grads + 2*head*slots + 10) + 32*kept + 8*head*slots + 8*slots + 4)
        activations += (BT if head else 1) * 384*X + 56 # logits, StepStats
        # staging for each communicator of several ranks: the world's, that of the two with the root, and of a mesh one each way
        communication = 64 + 4 * 2**20 * (1 + (p > 2 and root) + 2 * (D > 1))
        all_bytes.append(16*P + activations + communication + workspace)
        held.append(dict(parameters=X*P, gradients=X*P, optimizer_state=16*P - 2*X*P, activations=activations,
                         communication=communication))
        sent.append(BT*C*X*m * (2*v - (r == 0) - head) + root * (384 + 16 + 2) * C*X + 2 * (p - 1) * 40 // p
                    + 2 * (D - 1) * (X*P + 24) // D)
        assert re.search(f"^  rank {r} .*; {shown(all_bytes[r])}$", run.out, re.M), (r, all_bytes[r], run)
    assert_bytes(run, sent[0], **held[0])
    assert max(all_bytes) == all_bytes[fullest]
    pp(f"{D}x{p}", options, f"--steps 1 --memory-limit {max(all_bytes)}e-9", precision=precision)
    less = f"--steps 1 --memory-limit {max(all_bytes) - 8}e-9"
    refused = train("pp", SMALL, EIGHT, micro_batches(D), "--pipeline-parallel", p, options, less, ranks=D * p, precision=precision)
    assert refused.status == 1 and f"\nrank {fullest}: error: out of memory" in "\n" + refused.err, refused
    assert not [r for r in range(p) if r != fullest and f"rank {r}: error: out of memory" in refused.err], refused
    if schedule == "zb-h1": # whose W needs what recomputation would not keep
        assert train("pp", SMALL, EIGHT, micro_batches(D), "--pipeline-parallel", p, options, less, "--recompute auto", ranks=D * p,
                     precision=precision).status == 1
    if schedule == "1f1b" and not recompute: # where only one rank lacks memory, all recompute
        assert re.search("^memory  .*; blocks are recomputed$",
                         pp(f"{D}x{p}", options, less, "--recompute auto", precision=precision).out, re.M)


# ---- messages that are left out (test_faults.py: ranks that die, hang or differ) ----
FAULTY = f"{SMALL} {EIGHT} {micro_batches(1)} --fault"


# A small message is sent though nobody takes it: the ranks compare how many there were before the next step, or at the end.
@pytest.mark.rest
@pytest.mark.parametrize("check_every, pattern", [
    (1, "after step 3: 36 messages went from rank 0 to rank 1 of world, and 35 were received"),
    (0, "after step 10: 120 messages went from rank 0 to rank 1 of world, and 119 were received")], ids=["next_step", "end"])
def test_a_small_message_that_is_left_out_is_missed(check_every, pattern):
    assert_refused(faulty("pp", FAULTY, "1:3:skip --check-every", check_every, ranks=4), pattern)
