"""Strict mode, where what a program must not read is NaN: every program has the bits that it has without it, and those of a setting
that keeps its gradients elsewhere. Sequences have 16 tokens and the model 1024 positions, so most rows of the position embedding's
gradient are written by no layer: a buffer in which something else has been must be zero there."""
import re
import pytest
from shards import sampled
from suite import TINY, assert_same, trained

SHORT = f"{TINY} --model gpt2 --layers 3 --batch-size 1 --steps 3 --warmup-steps 1 --deterministic"
# Settings with the same first word have the same bits: those of a program that adds up micro-batches in another place have others.
# * before a
# row: make test has it. Ranks, program, options.
ROWS = """
    *pair 2 zero --zero-stage 3
    *pair 2 fsdp --sharding full --cpu-offload all --recompute block
    pair 2 fsdp --sharding grad-op --cpu-offload optimizer --wrap-blocks 0
    single 1 single --recompute block
    alone 1 fsdp --cpu-offload all
    *ddp 2 ddp --recompute block
    whole 2 zero --zero-stage 1
    shards 4 zero --zero-stage 2
    shards 4 zero --zero-stage 3 --recompute block
    shards 4 fsdp --sharding full --wrap-blocks 2
    shards 4 fsdp --wrap-halves --limit-all-gathers 3 --recompute block
    shards 4 fsdp --cpu-offload optimizer
    hybrid 4 fsdp --sharding hybrid --shard-group 2
    hybrid 4 fsdp --sharding hybrid --shard-group 2 --wrap-blocks 2
    *owners 3 muon
    owners 3 muon --owners all --recompute block
    pieces 4 muon --zero-stage 2 --owners all
    pieces 4 muon --zero-stage 3 --recompute block
    *nodes 4 zeropp --node-ranks 2
    nodes 4 zeropp --node-ranks 2 --prefetch backward-post --limit-all-gathers 3 --recompute block
    two 4 zeropp --node-ranks 2 --wrap-blocks 2
    two 4 zeropp --node-ranks 2 --wrap-blocks 2 --prefetch none --recompute block
    halves 3 zeropp --sharding grad-op --wrap-halves
    halves 3 zeropp --wrap-halves --recompute block
    parts 2 tp
    parts 2 tp --no-overlap
    rows 4 tp --tensor-parallel 2 --sequence-parallel
    rows 4 tp --tensor-parallel 2 --sequence-parallel --recompute block
    stages 2 pp
    stages 2 pp --schedule gpipe --recompute block
    copies 4 3d --mesh dp=2,pp=2 --zero-stage 1
    copies 4 pp --pipeline-parallel 2
    mesh 4 3d --mesh tp=2,pp=2
    mesh 4 3d --mesh tp=2,pp=2 --schedule gpipe --recompute block
    spread 4 3d --mesh dp=2,tp=2 --zero-stage 1 --sequence-parallel
    spread 4 3d --mesh dp=2,tp=2 --sequence-parallel --zero-stage 1 --recompute block
    *ring 4 cp --cp ring --cp-balance zigzag
    ring 4 cp --cp ring --cp-balance zigzag --ddp naive --recompute block
    gathered 4 cp --context-parallel 2 --cp allgather
    gathered 4 cp --context-parallel 2 --cp ring --bucket-mb 0.001 --recompute block
    heads 2 cp --cp ulysses
    heads 2 cp --cp ulysses --ddp naive --recompute block
    bits 3 compress --compress int8 --error-feedback
    signs 2 compress --compress sign --error-feedback
    signs 2 compress --compress sign --error-feedback --bucket-mb 0.001 --recompute block
    low 3 compress --compress powersgd --rank 2 --compress-from 1
    low 3 compress --compress powersgd --rank 2 --compress-from 1 --bucket-mb 0.001 --recompute block"""


def rows():
    first = {}
    for quick, bits, ranks, program, options in re.findall(r"^ +(\*?)(\w+) (\d) (\w+) ?(.*)", ROWS, re.M):
        setting = (int(ranks), program, options)
        name = re.sub(r"[^\w.+-]+", "_", f"{ranks}_ranks-{program}{options.replace('--', '-')}".replace(" -", "-"))
        yield (pytest.param if quick else sampled)(first.setdefault(bits, setting), setting, id=name)


def run(ranks, program, options, **settings):
    """Two micro-batches a step, or four where two ranks share a replica of the model."""
    return trained(program, SHORT, "--total-batch-size", 32 * ranks, options, ranks=None if program == "single" else ranks,
                   **settings)


@pytest.mark.parametrize("first, setting", [*rows()])
def test_strict_mode_has_the_same_bits_and_they_are_finite_and_those_of_like_settings(first, setting):
    strict = run(*setting, strict=True)
    assert len(strict.metrics) == 3 and all(isinstance(x, float) for x in strict.series("loss") + strict.series("grad_norm"))
    assert not any(strict.series("skipped"))
    assert_same(run(*setting), strict)
    assert_same(run(*first), strict)
