"""Context parallelism: ranks that share each sequence, in groups that are data parallel. Runs match PyTorch's within rounding. They
match to the bit a run on one device that attends to the same parts in the same order and forms the same sums (test/split). Bytes
and pairs of query and key match formulas in plain numbers. (test/unit/test_context.c: the tokens and messages of each rank.)"""
import re
import pytest
from meshes import AGAIN, EVALUATIONS, LARGE_SCALE, SMALL, assert_bytes, assert_same_skips, axes, batch, reference
from shards import assert_pytorchs, assert_same_samples, sampled
from suite import (PYTORCH, TINY, assert_as_predicted, assert_close, assert_different, assert_same, command, program,
                   rest, train, trained)

LONG = 7
ZIGZAG = " --cp-balance zigzag"
LARGE_EPS = "--eps 1e-5" # biases of keys have no gradient except rounding errors, which a smaller eps of AdamW would amplify
WAYS = "ulysses", "allgather", "ring", "allgather" + ZIGZAG, "ring" + ZIGZAG


def sizes(mesh, copies, micro):
    """Options for the sizes of a run. 3 ranks divide 24 sequences, 6 heads and 18 tokens, which zigzag cuts into 6 chunks."""
    of_3 = " --heads 6 --channels 24 --seq-len 18 --total-batch-size 432"
    return batch(24 if "3" in mesh else 32, copies, micro) + of_3 * mesh.endswith("3")


def cp(mesh, way, *options, micro=1, **settings):
    copies, c = axes(mesh)
    return trained("cp", SMALL, sizes(mesh, copies, micro), "--context-parallel", c, "--cp", way, *options, ranks=copies * c,
                   **settings)


def in_parts(mesh, way, *options, micro=1, **settings):
    """A run on one device that computes attention and sums in the same parts as a mesh."""
    (copies, c), how = axes(mesh), ["ulysses", "allgather", "ring"].index(way.split()[0])
    return reference(sizes(mesh, 1, micro), *options, data_parts=copies * c, context_parts=c, context_pieces=1 + (ZIGZAG in way),
                     context_way=how, **settings)


# The model of PyTorch's run has two heads, so Ulysses can use only two ranks.
@pytest.mark.parametrize("mesh, way, options, strict", [
    ("1x2", "ulysses", "", False), ("1x4", "ring" + ZIGZAG, AGAIN, True), ("2x2", "allgather" + ZIGZAG, "--ddp naive", True),
    *(rest(mesh, way, "", True) for mesh in ("1x1", "2x2", "4x2") for way in WAYS), rest("2x1", "ring", "", False),
    *(rest("1x4", way, "--bucket-mb 0.02", False) for way in WAYS[1:]), rest("1x2", "ring", "--batch-size 2", False)])
def test_cp_has_the_losses_norms_and_weights_of_pytorchs(mesh, way, options, strict):
    copies, c = axes(mesh)
    options = f"--context-parallel {c} --cp {way} --batch-size {16 // copies} {options}"
    assert_pytorchs(trained("cp", PYTORCH, options, ranks=copies * c, strict=strict))


@pytest.mark.parametrize("precision", ["fp32", sampled("bf16")])
@pytest.mark.parametrize("mesh, options, micro, strict", [
    ("1x4", "", 2, False), sampled("2x2", f"--ddp naive {AGAIN} --check-every 3", 1, True),
    *(sampled(mesh, "", 1, True) for mesh in ("1x2", "4x2", "2x4")), sampled("1x3", "", 2, True), sampled("3x1", AGAIN, 1, False)])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_bits_of_its_parts(precision, mesh, options, micro, strict, way):
    one = in_parts(mesh, way, micro=micro, precision=precision)
    assert_same(one, cp(mesh, way, options, micro=micro, precision=precision, strict=strict))


# A ring and an all-gather attend to the same parts in the same order, so their first losses are equal.
@pytest.mark.parametrize("balance", ["", ZIGZAG], ids=["contiguous", "zigzag"])
def test_a_ring_has_the_forward_pass_of_all_gather_and_adds_gradients_in_another_order(balance):
    gathered, ring = (cp("1x4", way + balance, LARGE_EPS, micro=2) for way in ("allgather", "ring"))
    assert gathered.series("loss")[0] == ring.series("loss")[0]
    assert_close(gathered, ring)
    assert_different(gathered, ring)


def test_the_balance_changes_nothing_but_roundings():
    contiguous, zigzag = (cp("1x4", way, LARGE_EPS, micro=2) for way in ("ring", "ring" + ZIGZAG))
    assert_close(contiguous, zigzag)
    assert_different(contiguous, zigzag)


@pytest.mark.rest
def test_two_ranks_add_two_terms_so_a_ring_has_the_bits_of_all_gather():
    assert_same(cp("1x2", "allgather"), cp("1x2", "ring"))
    assert_same(cp("1x2", "ring"), cp("1x2", "ring", "--context-parallel 0 --ddp naive", again="once more"))


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS[:3])
def test_a_group_of_one_rank_has_the_bits_of_ddp(way):
    """Without zigzag, which cuts the sequence of even a single rank into two chunks and merges three parts."""
    ddp = trained("ddp", SMALL, batch(32, 2, 2), ranks=2)
    assert_same(ddp, cp("2x1", way, micro=2))


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS)
def test_ranks_skip_the_same_steps_in_fp16(way):
    assert_same_skips(in_parts("2x2", way, LARGE_SCALE, precision="fp16"), cp("2x2", way, LARGE_SCALE, precision="fp16"))


@pytest.mark.parametrize("mesh, way", [
    ("1x4", "ring" + ZIGZAG), rest("2x2", "allgather"), rest("1x4", "ulysses"), rest("1x3", "ring"), rest("2x2", "ring")])
def test_evaluations_and_samples_are_those_of_one_device(mesh, way):
    """Samples reach lengths that no number of ranks divides. The learning rate is high, because tokens of an untrained model
    depend little on each other."""
    options = f"{EVALUATIONS} --sample-tokens 30 --lr 0.03"
    assert_same_samples(in_parts(mesh, way, options), cp(mesh, way, options))


# The smallest sizes: one head, or one on each rank; one sequence; one token per chunk. In the last two rows chunks are not whole
# blocks of attention.
@pytest.mark.parametrize("way, c, options", [
    ("ring" + ZIGZAG, 4, "--seq-len 8 --heads 1 --channels 1"), rest("ring", 4, "--seq-len 4 --heads 1 --channels 1"),
    rest("allgather", 3, "--seq-len 3 --heads 1 --channels 1"), rest("allgather" + ZIGZAG, 2, "--seq-len 4 --heads 1 --channels 2"),
    rest("ulysses", 4, "--seq-len 4 --heads 4 --channels 4"), rest("ring", 1, "--seq-len 1 --heads 1 --channels 1"),
    rest("ring", 2, "--seq-len 144 --heads 1 --channels 4"),
    rest("allgather" + ZIGZAG, 2, "--seq-len 320 --heads 3 --channels 24")])
def test_the_least_and_blocks_of_attention_that_are_not_whole_train_as_one_device(way, c, options):
    # The biases of keys have no gradient except rounding errors, which AdamW divides by eps.
    options = f"{SMALL} --vocab-size 257 --batch-size 1 --total-batch-size 0 --steps 5 --eps 1e-4 {options}"
    assert_close(trained("single", options), trained("cp", options, "--cp", way, ranks=c))


# ---- bytes and pairs: 2 layers, 4 heads, 16 channels, a padded vocabulary of 384, 16 positions, 512 / d tokens per group ----
# Chunks that rank 0 sends to the last rank in a zigzag ring, by the number of ranks. A chunk is half of a rank's keys and values;
# the last rank needs only early ones.
HALVES = {1: 0, 2: 1, 4: 3}


@pytest.mark.parametrize("precision, mesh, way, again, micro", [
    ("fp32", "1x4", "ulysses", 0, 2), ("fp32", "1x4", "ring" + ZIGZAG, 0, 2),
    *(rest("fp32", "1x4", way, 0, 2) for way in WAYS[1:4]),
    *(rest("fp32", "2x2", way, 1, 1) for way in WAYS),
    *(rest("bf16", "1x4", way, 1, 2) for way in WAYS), rest("bf16", "2x2", "ring" + ZIGZAG, 0, 1),
    rest("fp32", "2x1", "ring", 1, 1)])
def test_a_rank_holds_and_sends_what_the_formulas_say(precision, mesh, way, again, micro):
    run, other = (cp(mesh, x, "--steps 2", AGAIN * again, micro=micro, precision=precision) for x in (way, "ulysses"))
    d, c = axes(mesh)
    how, zigzag = way.split()[0], ZIGZAG in way
    X, C, L, rows = 2 if precision == "bf16" else 4, 16, 2, 512 // d // c // micro
    kv, P = rows * 2*C, 384*C + 16*C + 2*C + L * (12*C*C + 13*C)
    kept, blocks = 16 if how == "ulysses" else 15, 1 if again else L
    activations = rows * (L*C*X + blocks * (kept*C*X + 4*(4 + 4)) + 9*C*X + 3*4 + 2*4 + 384*X) + 56 # 56: StepStats
    exchanged = {"ulysses": 3*kv*X, "allgather": c*kv*X + (c*kv + kv + kv//2) * 4, "ring": 2*kv*X + (4*kv + kv//2) * 4}
    forward = {"ulysses": 2*kv * (c - 1) // c, "allgather": kv * (c - 1),
               "ring": kv * HALVES[c] // 2 if zigzag else kv * (c - 1)}[how] * X
    gradients = 0 if how == "ulysses" else kv * (c - 1) * 4
    sent = micro * L * ((2 + again) * forward + gradients) + 2 * (d*c - 1) * (X*P + 24) // (d*c)
    communication = other.about["predicted_bytes"]["communication"] - exchanged["ulysses"] + exchanged[how]
    assert_bytes(run, sent, parameters=X*P, gradients=X*P, optimizer_state=(12 if X == 2 else 8) * P, activations=activations,
                 communication=communication)
    balanced = zigzag or how == "ulysses" # a head of a sequence has 136 pairs
    pairs = 32 // d * L * 4 * (136 // c if balanced else {1: 136, 2: 8*8 + 36, 4: 4*12 + 10}[c])
    assert re.search(rf"^  pairs, busiest rank +{pairs} +{pairs} +as predicted$", run.out, re.M), run


@pytest.mark.parametrize("way, stays", [
    ("ring" + ZIGZAG, ("activations", "communication", "workspace")), rest("ulysses", ("activations", "communication")),
    rest("allgather", ("activations", "workspace"))])
def test_longer_sequences_on_more_ranks_take_no_more_memory_of_each(way, stays):
    """Parameters grow only by the position embedding. The buffers of an all-gather grow too, because they contain the keys and
    values of all ranks, and so does the workspace of Ulysses, which computes whole heads."""
    sizes = "--steps 2 --heads 4 --batch-size 2 --total-batch-size 0"
    two, four = (trained("cp", TINY, sizes, "--cp", way, "--seq-len", 16 * c, ranks=c) for c in (2, 4))
    for run in two, four: assert_as_predicted(run)
    before, after = (run.about["predicted_bytes"] for run in (two, four))
    assert [what for what in ("activations", "communication", "workspace") if before[what] == after[what]] == [*stays]
    assert after["parameters"] - before["parameters"] == 4 * 16 * 32


# ---- ranks that leave out an operation (test_faults.py: ranks that die, hang or differ) ----
FAULTY = f"{SMALL} {batch(32, 2, 2)} --context-parallel 2 --fault"


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_leaves_out_an_operation_is_found(way):
    """In a ring, a neighbour finds that its message has no partner, or receives data of another kind."""
    run = train("cp", FAULTY, "2:4:skip --comm-timeout 5 --cp", way, ranks=4)
    assert run.status not in (0, "no end"), run
    found = command([program("ranks")], sorted(map(str, run.folder.glob("ops_rank_*.txt"))))
    assert found.status == 2 and "rank 2" in found.out, found
