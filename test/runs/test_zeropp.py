"""ZeRO++. Without rounding and in rank order it has the bits of fsdp (full on one node, hybrid on several), however groups are
wrapped and gathered. With rounding, weights have the bits of weights that were rounded before they travel, gradients lie within the
bounds of their blocks, and training ends near fsdp. Memory and traffic, within a node and between nodes, follow the formulas, which
are written here a second time, in plain numbers."""
import json, re
import numpy as np
import pytest
from shards import PLAIN, assert_same_samples, operations, resumed, sampled, skipped_steps
from suite import (PYTORCH, TINY, TOKENS, Stored, assert_as_predicted, assert_close, assert_different, assert_refused,
                   assert_same, assert_same_metrics, assert_says, command, half, make, program, rest, tensors, train, trained)

LONG = 4
# Of 24 channels blocks of 256 elements cross from one matrix into the next, and shards of 4 ranks end in padding.
SMALL = (f"{TINY} --model d5 --channels 24 --batch-size 4 --total-batch-size 0 --steps 6 --warmup-steps 2 --eps 1e-5 "
         "--deterministic")
EVALUATES = f"--val-data {TOKENS} --eval-every 2 --eval-steps 3 --sample-every 3 --sample-tokens 20 --check-every 2"
AHEAD = "--wrap-blocks 3 --prefetch backward-post --limit-all-gathers 3"
NOT_AHEAD = "--wrap-blocks 2 --prefetch none --no-forward-prefetch --limit-all-gathers 1"


def nodes(ranks, g, *options, **settings):
    """A run on nodes of g ranks."""
    return trained("zeropp", SMALL, f"--node-ranks {g}", *options, ranks=ranks, **settings)


def fsdp(ranks, g, *options, **settings):
    """fsdp whose gradients are summed in the same order: first over neighbours, if there are several on several nodes."""
    hybrid = f"--sharding hybrid --shard-group {g}" if 1 < g < ranks else ""
    return trained("fsdp", SMALL, hybrid, *options, ranks=ranks, **settings)


# ---- without rounding ----
@pytest.mark.parametrize("ranks, g, options, strict", [
    (4, 2, "", True), (4, 4, "--wrap-halves", False), (4, 1, AHEAD, False), sampled(4, 2, f"{AHEAD} --recompute block", True),
    sampled(4, 2, "--sharding grad-op", False), sampled(4, 2, NOT_AHEAD, False), sampled(4, 2, "--wrap-blocks 0", True),
    sampled(3, 1, "", True),
    sampled(3, 3, f"--sharding grad-op {AHEAD}", True), sampled(2, 1, "--wrap-halves --recompute block", True),
    sampled(1, 1, "", False),
    sampled(8, 4, "--wrap-halves", False), sampled(8, 2, "", True)])
def test_unrounded_it_has_the_bits_of_fsdp(ranks, g, options, strict):
    assert_same(fsdp(ranks, g), nodes(ranks, g, PLAIN, options, strict=strict))


@pytest.mark.rest
@pytest.mark.parametrize("precision, scale", [("bf16", ""), ("fp16", "--loss-scale 1048576 --max-bad-steps 20")])
def test_in_16_bits_too(precision, scale):
    run = nodes(4, 2, PLAIN, scale, precision=precision)
    assert_same(fsdp(4, 2, scale, precision=precision), run)
    if scale: skipped_steps(run)


@pytest.mark.parametrize("options", ["--node-ranks 2", rest("--node-ranks 4 --sharding grad-op"),
                                     rest("--node-ranks 1 --wrap-blocks 2")])
def test_summed_by_the_library_it_has_the_losses_norms_and_weights_of_pytorchs(options):
    assert_close(Stored("ddp/ranks_4_accumulate_2"), trained("zeropp", PYTORCH, "--batch-size 2", PLAIN, options, ranks=4))


MICRO_BATCHES = "--batch-size 1 --total-batch-size 256"


@pytest.mark.parametrize("g", [2, rest(1), rest(4)])
def test_4_micro_batches_are_near_fsdp(g):
    assert_close(fsdp(4, g, MICRO_BATCHES), nodes(4, g, PLAIN, MICRO_BATCHES))


@pytest.mark.parametrize("options", ["", sampled("--sharding grad-op"), sampled(AHEAD), sampled("--wrap-blocks 0")])
def test_evaluations_and_samples_gather_in_another_order_and_say_what_fsdp_says(options):
    assert_same_samples(fsdp(4, 2, EVALUATES), nodes(4, 2, PLAIN, EVALUATES, options, strict=True))


# ---- with rounding ----
@pytest.mark.parametrize("ranks, g, options", [
    (4, 2, ""), sampled(4, 4, "--wrap-halves"), sampled(3, 1, AHEAD), sampled(4, 2, f"{EVALUATES} --sharding grad-op")])
def test_int8_weights_have_the_bits_of_weights_that_were_rounded_before_they_travel(ranks, g, options):
    folder = "build/split/rounded"
    binary = make("DEVICE=cpu", "PRECISION=fp32", f"BUILD={folder}", ["CFLAGS=-include test/split/rounded.h -O1"],
                  f"{folder}/train_gpt2_zeropp")
    run = nodes(ranks, g, "--quantise-gradients none", options)
    assert_same(nodes(ranks, g, PLAIN, options, binary=binary), run)
    assert_different(nodes(ranks, g, PLAIN, options), run)


BLOCK = ("ln_1.weight", "ln_1.bias", "qkv.bias", "proj.bias", "qkv.weight", "proj.weight",
         "ln_2.weight", "ln_2.bias", "fc.bias", "fcproj.bias", "fc.weight", "fcproj.weight")
GROUPS = ("ln_f.weight", "ln_f.bias", "wpe", "wte"), *([f"h.{l}.{name}" for name in BLOCK] for l in range(5))


def blocks(x):
    """A group in blocks of 256, as shards have it: (blocks, 256)."""
    for group in GROUPS:
        flat = np.concatenate([x[name].ravel() for name in group])
        yield np.pad(flat, (0, -len(flat) % 256)).reshape(-1, 256)


def gradients(run):
    """Those of the first step, from AdamW's m, which is a tenth of them. The padding of wte, which is last, has none."""
    state = tensors(run.checkpoint() / "optimizer.safetensors")
    return {name.removeprefix("m."): 10 * x for name, x in state.items() if name.startswith("m.")}


@pytest.mark.parametrize("ranks, g, way, limit", [(4, 2, "int4", 7), *(sampled(*row) for row in (
    (4, 2, "int8", 127), (4, 4, "int4", 7), (4, 1, "int4", 7), (1, 1, "int4", 7), (2, 2, "int8", 127)))])
def test_a_gradient_is_rounded_once_for_each_hop(ranks, g, way, limit, tmp_path):
    """All sequences are the same, so all ranks have the same gradients. A rank rounds its share by up to half a scale, and a scale
    is the largest element of the block divided by the limit. Together, N such roundings are as large as one rounding of the sum.
    The second hop adds as much again."""
    (tmp_path / "same.txt").write_text("abcdefgh" * 400)
    data = ["--data", tmp_path / "same.txt", "--tokenizer", "bytes"], "--steps 1 --grad-clip 0 --seq-len 8 --quantise-weights none"
    exact, run = (gradients(nodes(ranks, g, *data, "--quantise-gradients", how)) for how in ("none", way))
    hops = 2 if 1 < ranks // g else 1
    for a, b in zip(blocks(exact), blocks(run)):
        error, half_scale = np.abs(a - b).max(1), np.abs(a).max(1) / limit / 2
        assert (error <= hops * 1.1 * half_scale + 1e-9).all() and np.median(error / half_scale) > 0.5


@pytest.mark.rest
@pytest.mark.parametrize("g, options", [(2, ""), (1, "--quantise-gradients int8"), (4, "--quantise-weights none")])
def test_300_steps_end_near_fsdps(g, options):
    """After 40 steps, where the loss falls steeply, another seed changes it by 0.1 and rounding by 0.06."""
    long = "--steps 300 --channels 64 --log-every 100"
    plain, run = fsdp(4, 2, long), nodes(4, g, options, long)
    assert abs(np.mean(plain.series("loss")[-50:]) - np.mean(run.series("loss")[-50:])) <= 0.02
    assert_different(plain, run)


@pytest.mark.rest
def test_a_gradient_that_is_not_finite_makes_all_ranks_skip_the_same_steps():
    scale = "--loss-scale 1048576 --max-bad-steps 20"
    run = nodes(4, 2, scale, "--check-every 1", precision="fp16")
    assert skipped_steps(run) == skipped_steps(fsdp(4, 2, scale, precision="fp16"))


@pytest.mark.parametrize("ranks, g, options", [(4, 2, MICRO_BATCHES), sampled(3, 1, "--checkpoint sharded"),
                                               sampled(2, 2, "--recompute block")])
def test_a_run_is_continued_to_the_bit(ranks, g, options, tmp_path):
    saves = f"{options} --save-every 3 --keep 0"
    whole = nodes(ranks, g, saves)
    again = resumed(half(whole, tmp_path / "run", step=3), "zeropp", SMALL, f"--node-ranks {g}", saves, ranks=ranks)
    (assert_same_metrics if "sharded" in options else assert_same)(whole, again)


# ---- memory and traffic ----
ROOT, ATTENTION, MLP = (384 + 16 + 2) * 24, (4 * 24 + 6) * 24, (8 * 24 + 7) * 24 # elements


def shard(elements, ranks):
    return -(-elements // (1024 * ranks)) * 1024


def groups(ranks, options):
    """The elements of a rank's shards of each group, the root's first."""
    wrap = int((re.search(r"wrap-blocks (\d)", options) or [0, "1"])[1])
    if "halves" in options: others = [ATTENTION, MLP] * 5
    else: others = [min(wrap, 5 - first) * (ATTENTION + MLP) for first in range(0, 5, wrap)] if wrap else []
    return [shard(n, ranks) for n in ([ROOT, *others] if wrap else [ROOT + 5 * (ATTENTION + MLP)])]


def travels(n, how, plain):
    """Bytes of n elements."""
    return n * plain if how == "none" else n // 256 * {"int8": 260, "int4": 132}[how]


@pytest.mark.parametrize("ranks, g, options, weights, gradients, precision", [
    (4, 2, "", "int8", "int4", "fp32"), (4, 1, f"{MICRO_BATCHES} --wrap-halves", "int8", "int8", "fp32"),
    *(sampled(*row) for row in (
        (4, 4, "--sharding grad-op", "int8", "int4", "fp32"), (4, 2, "--wrap-blocks 2 --sharding grad-op", "none", "int4", "fp32"),
        (3, 1, "", "int8", "none", "fp32"), (1, 1, "", "int8", "int4", "fp32"),
        (4, 2, f"{MICRO_BATCHES} --wrap-blocks 0", "int8", "int4", "fp32"),
        (8, 4, AHEAD, "int8", "int4", "fp32"), (4, 2, MICRO_BATCHES, "none", "none", "bf16"), (4, 2, "", "int8", "int4", "bf16")))])
def test_each_rank_holds_and_sends_what_the_formula_says(ranks, g, options, weights, gradients, precision):
    run = nodes(ranks, g, options, f"--quantise-weights {weights} --quantise-gradients {gradients}", precision=precision)
    ddp = trained("ddp", SMALL, *[MICRO_BATCHES] * (MICRO_BATCHES in options), ranks=ranks,
                  precision=precision).about["predicted_bytes"]
    assert_as_predicted(run)
    K, X, A = ranks // g, 4 if precision == "fp32" else 2, 4 if MICRO_BATCHES in options else 1
    all_groups = groups(ranks, options)
    kept, root, others = sum(all_groups), all_groups[0], all_groups[1:]
    def w(n): return travels(n, weights, X)
    def q(n): return travels(n, gradients, 4)
    # memory
    rooms = int((re.search(r"limit-all-gathers (\d)", options) or [0, "2"])[1])
    gathered = ranks * (kept if "grad-op" in options else root + min(rooms, len(others)) * max(others, default=0))
    buckets, largest = ranks * sum(all_groups[:3]), max(all_groups)
    # two communicators, with scratch as large as the world's, less a number
    splits = ((g > 1) + (K > 1)) * (ddp["communication"] - 64)
    held = {"parameters": 4 * kept + K * w(kept), "gradients": 4 * kept, "optimizer state": 8 * kept,
            "communication": ddp["communication"] + splits + X * (buckets + gathered) + 2 * q(buckets) + w(gathered)
            + 4 * K * largest}
    predicted = run.about["predicted_bytes"]
    assert {kind: predicted[kind] for kind in held} == held
    # traffic within a node, and between nodes
    gathers = kept if "grad-op" in options else root + 2 * A * (kept - root)
    within = (g - 1) * K * (w(gathers) + A * q(kept))
    between = (K - 1) * (w(kept) + A * q(kept))
    doubles = 5 * 2 * (ranks - 1) / ranks * 8
    assert all(abs(sent - (within + between + doubles)) < 1 for sent in run.series("comm_bytes"))
    assert (f"nodes      {K} of {g} ranks; between them, per rank and step: weights" in run.out)
    if between: assert_says(run.out, f"^  bytes along nodes .* {spelled(between)} +{spelled(between)} +as predicted$")


def spelled(n):
    return re.escape(f"{n / 1e3:.{int(n < 99950)}f} kB" if n >= 1e3 else f"{n:.0f} B")


def test_predict_says_what_a_run_holds_and_sends():
    run = nodes(4, 2)
    said = json.loads(command([program("train_gpt2_zeropp")], SMALL, "--predict 4 --node-ranks 2 --vocab-size 257").out)["ranks"][0]
    held = {kind: n for kind, n in run.about["predicted_bytes"].items() if n > 0 and kind != "workspace"}
    assert said["bytes"] == held and {said["sent"]} == set(run.series("comm_bytes"))


# ---- when operations are issued ----
# w: a group's new shards go to other nodes. G: a group is gathered within a node. 1, 2: the two hops of its gradients. The groups
# are the root and two blocks. An order begins with the part of the last update that nobody has waited for yet. The forward pass
# follows, then the backward passes of the last block, the first block and the root, then the last hop and the update.
@pytest.mark.parametrize("options, order", [
    ("--model d2 --heads 2", "wwG GG GG1 21 21 2 wwwG"),
    rest("--model d2 --heads 2 --prefetch none --no-forward-prefetch", "wwG GG G1 G21 21 2 wwwG"),
    rest("--model d2 --heads 2 --prefetch backward-post", "wwG GG GG1 21 21 2 wwwG")])
def test_hops_and_weights_are_issued_in_their_order(options, order, tmp_path):
    trace = tmp_path / "trace.json"
    nodes(4, 2, "--channels 24 --steps 2", options, ["--trace", trace])
    issued = sorted(((when, name) for rank, part, name, step, when in operations(trace) if rank == 0 and step == 2))
    def letter(name):
        kind, where = name.split()[0], (re.search(r"of (\w+)\.", name) or [0, "world"])[1]
        return {("all-gather", "across"): "w", ("all-gather", "node"): "G", ("all-to-all", "node"): "1",
                ("all-to-all", "across"): "2"}.get((kind, where), "")
    assert "".join(letter(name) for _, name in issued) == order.replace(" ", ""), issued


# ---- refusals ----
@pytest.mark.parametrize("options, pattern", [
    ("--sharding hybrid", "--sharding must be one of full\\|grad-op, not 'hybrid'"),
    rest("--quantise-gradients int2", "int4\\|int8\\|none"),
    rest("--cpu-offload all", "unknown option '--cpu-offload'"), rest("--reduce-dtype model", "unknown option '--reduce-dtype'"),
    rest("--limit-all-gathers 1", "--limit-all-gathers 1 leaves no buffer")])
def test_options_that_do_not_go_are_refused(options, pattern):
    assert_refused(train("zeropp", SMALL, options, ranks=2), pattern)


def on_machines(local, *options):
    """A run whose ranks believe to be where `local` says: (number, how many) on their machine, for each."""
    line = " ".join(f"[ $OMPI_COMM_WORLD_RANK = {rank} ] && export OMPI_COMM_WORLD_LOCAL_RANK={number} "
                    f"OMPI_COMM_WORLD_LOCAL_SIZE={size};"
                    for rank, (number, size) in enumerate(local))
    return command(["sh", "-c", line + ' exec "$0" "$@"', program("train_gpt2_zeropp")], SMALL, "--steps 1", *options,
                   ranks=len(local))


def test_the_ranks_of_a_machine_are_a_node():
    assert_says(on_machines([(0, 2), (1, 2), (0, 2), (1, 2)]).out, "^nodes      2 of 2 ranks; ")
    assert_says(nodes(2, 0, "--steps 1").out, "^nodes      1 of 2 ranks; ")


@pytest.mark.parametrize("local, pattern", [
    ([(0, 2), (0, 2), (1, 2), (1, 2)], "--node-ranks: rank [12] is number [01] of 2 on its machine, .*give --node-ranks"),
    rest([(0, 3), (1, 3), (2, 3), (0, 1)], "--node-ranks: rank 3 is number 0 of 1 on its machine, and rank 0's has 3|has died")])
def test_ranks_of_machines_that_are_no_neighbours_or_not_as_many_are_refused(local, pattern):
    run = on_machines(local)
    assert_refused(run, pattern)
    assert_says(on_machines(local, "--node-ranks 2").out, "^nodes      2 of 2 ranks; ")
