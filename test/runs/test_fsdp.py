"""FSDP: in rank order losses, norms, weights and optimizer state are DDP's to the bit, for every way to shard, wrap, gather ahead,
offload and recompute. Each rank holds and sends as many bytes as the formulas say, which are written here a second time, in plain
numbers."""
import collections, re
import pytest
from shards import assert_near_losses, assert_same_samples, operations, sampled, shard, skipped_steps
from suite import PYTORCH, TINY, TOKENS, Stored, assert_close, assert_same, assert_same_metrics, assert_says, rest, trained

LONG = 6
# 5 blocks in groups of 2 or 3 leave a smaller last group.
SMALL = f"{TINY} --model d5 --total-batch-size 0 --steps 6 --warmup-steps 2 --eps 1e-5 --deterministic"


COLUMNS = "ranks wrap sharding prefetch forward rooms offload recompute mode micro group precision reduce"


class Setting(collections.namedtuple("Setting", COLUMNS, defaults=(1, 2, "fp32", "fp32"))):
    """A setting of fsdp: 4 sequences per rank and step, in `micro` micro-batches."""
    scale = property(lambda self: "--loss-scale 1048576 --max-bad-steps 20" if self.precision == "fp16" else "")
    gathered_bytes = property(lambda self: 4 if self.precision == "fp32" else 2) # of a parameter
    reduced_bytes = property(lambda self: 4 if self.reduce == "fp32" else 2) # of a gradient
    reshards = property(lambda self: self.sharding in ("full", "hybrid"))

    def sizes(self):
        return f"--batch-size {4 // self.micro} --total-batch-size {64 * self.ranks} {self.scale}"

    def ddp(self):
        return trained("ddp", SMALL, self.sizes(), ranks=self.ranks, precision=self.precision)

    def run(self):
        wrap = "--wrap-halves" if self.wrap == "halves" else f"--wrap-blocks {self.wrap}"
        options = [f"{wrap} --sharding {self.sharding} --prefetch {self.prefetch} --limit-all-gathers {self.rooms}",
                   f"--recompute {self.recompute}", *[f"--shard-group {self.group}"] * (self.sharding == "hybrid"),
                   *["--no-forward-prefetch"] * (self.forward == "no"), *[f"--cpu-offload {self.offload}"] * (self.offload != "no"),
                   *["--reduce-dtype model"] * (self.reduce == "model")]
        return trained("fsdp", SMALL, self.sizes(), *options, ranks=self.ranks, precision=self.precision,
                       strict=self.mode == "strict")


def settings(table, mark, **more):
    """Rows of a table for parametrize. A * before one: make test has it."""
    for line in table.strip().splitlines():
        quick, *columns = re.fullmatch(r"\s*(\*?)\s*" + r"(\S+)\s+" * 8 + r"(\S+)", line).groups()
        setting = Setting(*[int(x) if x.isdigit() else x for x in columns], **more)
        name = (f"{setting.ranks}_ranks-{setting.sharding}-wrap_{setting.wrap}-{setting.prefetch}-{setting.rooms}_rooms" +
                f"-offload_{setting.offload}" * (setting.offload != "no") + "-recompute" * (setting.recompute == "block") +
                f"-{setting.micro}_micro" * (setting.micro > 1)
                + f"-{setting.precision}-{setting.reduce}" * (setting.precision != "fp32"))
        yield pytest.param(setting, id=name) if quick else mark(setting, id=name)


# ranks wrap sharding prefetch forward-prefetch rooms offload recompute mode: every two values meet in a row, if they can.
WHOLE = [*settings("""
      1 0 full none no 4 no none strict
      1 1 grad-op backward-post no 4 optimizer block plain
      1 2 grad-op none no 2 all block plain
      1 3 full backward-pre yes 2 no none plain
    * 2 0 grad-op backward-post yes 4 no block strict
      2 2 grad-op backward-pre yes 4 no block plain
      2 3 full backward-post no 2 all block strict
      3 0 full backward-post no 4 optimizer none plain
      3 1 grad-op none yes 2 no block strict
      3 3 grad-op backward-post yes 4 no block strict
      4 0 grad-op backward-pre no 2 no none plain
      4 1 grad-op backward-pre yes 4 no block plain
      4 2 grad-op backward-post yes 4 no none strict
      2 1 full none no 1 no none plain
    * 3 2 full backward-pre yes 3 all block strict
      4 3 full none no 1 optimizer none strict
    * 4 2 full backward-post no 2 no none strict
    * 4 1 full backward-pre yes 2 no none strict
      3 3 full backward-pre no 2 no block plain
      2 0 full backward-post yes 4 all none plain
      2 2 grad-op backward-pre yes 2 optimizer none strict
    * 3 halves full backward-pre yes 2 no block strict
      4 halves full backward-post yes 3 all block strict
      2 halves full none no 2 optimizer none plain
      3 halves grad-op backward-pre no 4 no none strict
      1 halves full backward-post yes 2 no block plain""", sampled)]
# 2 groups of 2 ranks, whose sums round differently from those of all 4 ranks.
HYBRID = [*settings("""
    * 4 1 hybrid backward-pre yes 3 no block strict
      4 2 hybrid backward-post no 2 no none strict
      4 halves hybrid backward-pre yes 4 no none plain
      4 0 hybrid none yes 2 no none plain
      4 3 hybrid none no 1 no block plain""", rest)]
# Groups of one rank or of all ranks: sums round as DDP's.
ONE_GROUP = [*settings("4 2 hybrid backward-pre no 2 no none strict", rest, group=1),
             *settings("4 2 hybrid backward-post no 2 no none strict", rest, group=4)]
# FSDP reduces every micro-batch and adds up, DDP reduces the sum once.
MICRO_BATCHES = [*settings("""
    * 3 2 full backward-post yes 2 optimizer block strict
      3 2 grad-op backward-pre yes 2 no none strict
      4 3 hybrid backward-post no 2 no none plain
      3 1 full backward-pre no 2 no none strict
      3 0 grad-op none no 2 no none plain
      3 halves full backward-pre yes 2 no none strict
      4 1 hybrid backward-pre no 2 no none strict""", sampled, micro=4)]
IN_16_BITS = """
    * 3 2 full backward-pre yes 2 no none strict
      4 halves full backward-pre yes 3 no block strict
      2 3 grad-op backward-post no 2 optimizer block plain
      4 0 grad-op none no 2 no none plain"""
REDUCED_IN_BF16 = [*settings(IN_16_BITS, rest, precision="bf16", reduce="model")]
REDUCED_IN_FP32 = [*settings(IN_16_BITS.replace("*", " "), rest, precision="bf16")]
# The first scales are too large for gradients in fp16, so both skip steps.
REDUCED_IN_FP16 = [*settings("3 2 full backward-pre no 2 all none strict\n1 1 full none no 2 no block plain", rest,
                             precision="fp16", reduce="model")]
by_setting = lambda *tables: pytest.mark.parametrize("setting", sum(tables, []))


# ---- numbers ----
@by_setting(WHOLE, ONE_GROUP)
def test_every_setting_has_ddps_bits(setting):
    assert_same(setting.ddp(), setting.run())


@by_setting(HYBRID)
def test_hybrid_is_near_ddp_and_every_hybrid_has_the_same_bits(setting):
    assert_close(setting.ddp(), setting.run())
    assert_same(HYBRID[0].values[0].run(), setting.run())


@by_setting(MICRO_BATCHES)
def test_4_micro_batches_are_near_ddp(setting):
    assert_close(setting.ddp(), setting.run())


@by_setting(REDUCED_IN_BF16, REDUCED_IN_FP16)
def test_16_bits_reduced_in_16_bits_have_ddps_bits(setting):
    """Except the norm of the parameters, which DDP takes from the rounded ones."""
    ddp, fsdp = setting.ddp(), setting.run()
    for field in "loss", "grad_norm":
        assert_same_metrics(ddp, fsdp, only=field)
    for file in "model.safetensors", "optimizer.safetensors":
        assert (ddp.checkpoint() / file).read_bytes() == (fsdp.checkpoint() / file).read_bytes()
    if setting.precision == "fp16": assert skipped_steps(ddp) == skipped_steps(fsdp)


@by_setting(REDUCED_IN_FP32)
def test_bf16_reduced_in_fp32_is_within_a_fortieth_of_its_roundoff(setting):
    """Not so fp16: it skips other steps, because sums that overflow in fp16 fit in fp32."""
    assert_near_losses(setting.ddp(), setting.run())


@pytest.mark.parametrize("ranks, options", [(4, ""), rest(4, "--sharding hybrid --shard-group 2"),
                                            rest(2, "--wrap-blocks 2 --sharding grad-op")], ids=["full", "hybrid", "grad-op"])
def test_fsdp_summed_by_the_library_has_the_losses_norms_and_weights_of_pytorchs(ranks, options):
    assert_close(Stored(f"ddp/ranks_{ranks}_accumulate_2"), trained("fsdp", PYTORCH, "--batch-size", 8 // ranks, options,
                                                                    ranks=ranks))


@pytest.mark.parametrize("options", [
    "--limit-all-gathers 3", "--cpu-offload optimizer --prefetch backward-post --wrap-blocks 2",
    rest("--wrap-blocks 3 --prefetch none --no-forward-prefetch --limit-all-gathers 1"), rest("--sharding grad-op"),
    rest("--sharding grad-op --wrap-blocks 2"), rest("--wrap-blocks 0")])
def test_evaluations_and_samples_gather_in_another_order_and_say_what_ddp_says(options):
    deep = (SMALL, f"--val-data {TOKENS} --eval-every 2 --eval-steps 3 --sample-every 3 --sample-tokens 20 --check-every 2 "
                   "--batch-size 4")
    ddp, fsdp = trained("ddp", *deep, ranks=3), trained("fsdp", *deep, options, ranks=3, strict=True)
    assert_same_samples(ddp, fsdp)


# ---- what a rank holds and sends ----
# 16 channels, 5 blocks, a vocabulary of 384 with its padding, 16 positions
ROOT, BLOCK = (384 + 16 + 2) * 16, 12 * 16 * 16 + 13 * 16


ATTENTION = 4 * 16 * 16 + 6 * 16 # of a block, with its layernorm


def shards(s):
    """In how many parts a copy is cut, and the elements of a rank's shards: of each group, the root's first."""
    parts = s.group if s.sharding == "hybrid" else s.ranks
    if s.wrap == "halves": others = [ATTENTION, BLOCK - ATTENTION] * 5
    else: others = [min(s.wrap, 5 - first) * BLOCK for first in range(0, 5, s.wrap)] if s.wrap else []
    return parts, [shard(n, parts) for n in ([ROOT, *others] if s.wrap else [ROOT + 5 * BLOCK])]


def expected_bytes(s):
    """Of each kind. Workspace, MPI's scratch and activations are DDP's, minus what is recomputed."""
    X, R, (S, groups), ddp = s.gathered_bytes, s.reduced_bytes, shards(s), s.ddp().about["predicted_bytes"]
    replicas, kept, others = s.ranks // S, sum(groups), groups[1:]
    gathered = X * S * (groups[0] + min(s.rooms, len(others)) * max(others, default=0) if s.reshards else kept)
    buckets = S * sum(groups[:3]) * (X + 4 if R > X else X)
    communication = ddp["communication"] + gathered + buckets
    # Two more communicators, each with as much scratch as the world, but without the world's 64 bytes for numbers.
    if s.sharding == "hybrid": communication += ((S > 1) + (replicas > 1)) * (ddp["communication"] - 64)
    activations = ddp["activations"]
    if s.recompute == "block": activations -= 4 * 64 // s.micro * (15 * 16 * X + (4 + 2) * 4) # 4 of 5 blocks, their tokens
    state = {"parameters": 4 * kept, "gradients": R * kept, "optimizer state": 8 * kept}
    on_host = 0
    if s.offload != "no":
        on_host = sum(state.values()) + (R * kept if s.micro > 1 else 0) + (X * kept if X < 4 else 0)
        state = dict.fromkeys(state, 0) | {"parameters": X * kept * (s.offload == "optimizer")}
    return ddp | state | {"activations": activations, "communication": communication, "state on the host": on_host}


def expected_sent(s):
    """Of A micro-batches A(3P - 2root) + root elements, (S-1)/S of them, in grad-op (A+1)P, and what replicas sum, 2P/S (R-1)/R;
    and five sums of a double."""
    S, groups = shards(s)
    replicas, root, kept = s.ranks // S, groups[0], sum(groups)
    gathers = 2 * s.micro * (kept - root) + root if s.reshards else kept # of a shard: in both passes, or once a step
    state = s.ranks * (S - 1) * (gathers * s.gathered_bytes + s.micro * kept * s.reduced_bytes)
    state += 2 * S * (replicas - 1) * kept * s.reduced_bytes
    return (state + 2 * (s.ranks - 1) * 24 + 2 * 2 * replicas * (S - 1) * 8) // s.ranks


@by_setting(WHOLE, HYBRID, ONE_GROUP, MICRO_BATCHES, REDUCED_IN_BF16, REDUCED_IN_FP32, REDUCED_IN_FP16)
def test_each_rank_holds_and_sends_what_the_formula_says(setting):
    run, expected = setting.run(), expected_bytes(setting)
    assert run.about["predicted_bytes"] == expected
    on_device = sum(expected.values()) - expected["state on the host"]
    assert {*run.series("mem_bytes"), *run.series("mem_peak_bytes")} == {on_device} # as measured
    assert run.series("comm_bytes") == [expected_sent(setting)] * 6
    assert re.search("^  bytes .*  as predicted$", run.out, re.M) and "than predicted" not in run.out # on every rank


@pytest.mark.parametrize("wrap, groups, largest", [
    rest("--wrap-blocks 1", 5, BLOCK), ("--wrap-blocks 2", 3, 2 * BLOCK),
    ("--wrap-halves --sharding hybrid --shard-group 2", 10, BLOCK - ATTENTION)],
    ids=["wrap_1", "wrap_2", "halves"])
def test_the_peak_grows_by_one_groups_parameters_with_each_room(wrap, groups, largest):
    def peak(rooms, *options):
        return trained("fsdp", SMALL, f"--batch-size 4 --steps 1 {wrap} --limit-all-gathers {rooms}", *options,
                       ranks=2).series("mem_peak_bytes")[-1]

    first = peak(2, "--prefetch none --no-forward-prefetch")
    for rooms in 2, 3, groups, groups + 1: # one more than there are groups besides the root's adds nothing
        assert peak(rooms) == first + (min(rooms, groups) - 2) * 4 * 2 * shard(largest, 2)


# The copies of a step take turns on the link: reduced gradients go to the host, and shards to gather, or later the new weights,
# come from it.
@pytest.mark.parametrize("ranks, offload", [rest(1, "all"), (2, "all"), rest(2, "optimizer")])
def test_a_step_takes_as_long_as_copies_need_on_an_emulated_link_to_the_host_and_trains_the_same(ranks, offload):
    options, ms, root = (SMALL, f"--batch-size 4 --cpu-offload {offload} --steps 3"), 60, shard(ROOT, ranks)
    copies = 2 * (root + 5 * shard(BLOCK, ranks)) - root * (offload == "all") # of an element of a shard
    rate = 8e-6 * 4 * copies / ms
    usual, run = trained("fsdp", *options, ranks=ranks), trained("fsdp", *options, f"--emulate-host-link {rate:.9f}", ranks=ranks)
    assert_same_metrics(usual, run)
    assert min(run.series("step_ms")[1:]) >= 0.9 * ms # the next root's copy may go on in the next step
    assert_says(run.said, "^EMULATED LINK OF .* TO THE HOST")


# ---- when gathers are issued ----
# Operations are numbered in the order of issue. G: a gather, R: a reduction of the backward pass. The groups are blocks 0 and 1, 2
# and 3, block 4, and the root, which the update of each step gathers for the next one. So an order lists the last update and the
# forward pass, the backward pass, and the update.
@pytest.mark.parametrize("options, order, gathers", [
    # A group is gathered before any gradient of the previous group is reduced, in the backward pass of that group's last block,
    ("", "GGGG GGRGRRR G", {"backward": [0, 0, 0, 1, 1], "forward": [1, 0, 1, None, 0]}),
    # once all gradients are there, before they are reduced: during the backward pass of the same group's first block,
    ("--prefetch backward-post", "GGGG GGRGRRR G", {"backward": [0, 0, 1, 0, 2]}),
    # after all reductions, during its own pass,
    ("--prefetch none --no-forward-prefetch", "GGGG GRGRGRR G", {"backward": [None, 1, 0, 1, 1], "forward": [1, 0, 1, None, 1]}),
    # or two groups ahead.
    ("--limit-all-gathers 3", "GGGG GGGRRRR G", {"forward": [1, None, 0, None, 0]}),
    ("--model d3 --wrap-blocks 1", "GGGG GGRGRRR G", {"backward": [0, 1, 1], "forward": [1, 1, 0]}),
    # A block's attention is gathered while its MLP is differentiated, and so on.
    ("--model d2 --wrap-blocks 1 --wrap-halves", "GGGGG GGRGRGRRR G", {"backward": [1, 2], "forward": [2, 1]})],
    ids=["backward-pre", "backward-post", "no_prefetch", "3_rooms", "single_blocks", "halves"])
def test_gathers_are_issued_where_prefetch_says(options, order, gathers, tmp_path):
    trace = tmp_path / "trace.json"
    trained("fsdp", SMALL, "--batch-size 4 --wrap-blocks 2 --steps 2", options, ["--trace", trace], ranks=2)
    issued = sorted(((rank, part, name.split()[0], when) for rank, part, name, step, when in operations(trace) if step == 2),
                    key=lambda operation: operation[3])
    for rank in 0, 1:
        mine = [(part, kind) for q, part, kind, _ in issued if q == rank]
        kinds = {"all-gather": "G", "reduce-scatter": "R"}
        assert "".join(kinds.get(kind, "") for _, kind in mine) == order.replace(" ", ""), issued
        for part, numbers in gathers.items():
            for block, number in enumerate(numbers):
                found = mine.count((f"{part}, block {block}", "all-gather"))
                assert number in (None, found), f"rank {rank} issues {found} gathers in {part}, block {block}"
