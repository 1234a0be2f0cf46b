"""Compressed gradients. Steps without compression have DDP's bits. Compressed steps send the bytes of their method's formula, keep
ranks equal, and wait for the data that they read. The last tests compare losses after training.
(test_compress_checkpoints.py: the errors of error feedback in checkpoints.)"""
import re
import numpy as np
import pytest
from suite import TINY, TOKENS, assert_as_predicted, assert_refused, assert_same, rest, train, trained

LONG = 4
METHODS = ["bf16", "int8", "int4", "top-k", "sign", "powersgd"]


# wte is 257 x 16 and wpe 16 x 16. For int8 and int4, the matrices of half a block form one segment, and so do wpe and wte.
def small(stage, ranks, *options, **settings):
    return trained(stage, TINY, "--total-batch-size 384 --steps 8 --warmup-steps 2 --bucket-mb 0.1 --deterministic --batch-size",
                   12 // ranks, *options, ranks=ranks, **settings)


def by(method, ranks, *options, **settings):
    """A small run that compresses from its fourth step on and compares its ranks after every step."""
    low_rank = "--rank 2" if method == "powersgd" else ""
    return small("compress", ranks, "--compress-from 3 --check-every 1 --compress", method, low_rank, *options, **settings)


@pytest.mark.parametrize("ranks, precision, options", [
    (2, "fp32", ""), rest(3, "fp32", ""), rest(3, "bf16", ""), rest(3, "fp16", ""),
    rest(1, "fp32", "--compress powersgd --compress-from 3")])
def test_what_is_not_compressed_has_the_bits_of_ddp(ranks, precision, options):
    assert_same(small("ddp", ranks, precision=precision), small("compress", ranks, options, precision=precision))


def formula(method, N):
    """The bytes that each of N ranks sends in a compressed step. Vectors are not compressed, and the padding of wte is not sent.
    With int8 and int4, a rank's part of a segment is a multiple of four blocks. Messages of top-k and sign are padded to a multiple
    of 16 bytes."""
    matrices = [(257, 16), (16, 16)] + 2 * [(48, 16), (16, 16), (64, 16), (16, 64)]
    vectors = 2*13*16 + 2*16

    def ring(n):
        return 2 * (N - 1) / N * n

    def blocks(n, bits):
        return 2 * (N - 1) * -(-n // (1024 * N)) * 4 * (4 + 32*bits)

    def padded(n):
        return -(-n // 16) * 16

    whole = ring(4*vectors + 24)
    if method.startswith("int"): return whole + sum(blocks(n, int(method[3:])) for n in (273*16, *2 * (4*256, 8*256)))
    return whole + sum({
        "bf16": ring(2*r*c), "top-k": (N - 1) * padded(8 * max(int(r*c * 0.01), 1)),
        "sign": (N - 1) * padded(4 + 4 * -(-r*c // 32)), "powersgd": ring(4 * 2*(r + c))}[method] for r, c in matrices)


@pytest.mark.parametrize("method, ranks, precision", [
    ("int8", 2, "fp32"), ("powersgd", 2, "fp32"), *(rest(m, n, "fp32") for m in METHODS for n in (2, 3, 4) if n > 2
                                                    or m not in ("int8", "powersgd")),
    *(rest(m, 3, precision) for m in ("int8", "sign", "powersgd") for precision in ("bf16", "fp16"))])
def test_a_method_sends_its_bytes_from_its_first_step_on(method, ranks, precision):
    run, plain = by(method, ranks, precision=precision), small("ddp", ranks, precision=precision)
    assert_as_predicted(run)
    assert precision != "fp32" or all(abs(sent - formula(method, ranks)) <= 1 for sent in run.series("comm_bytes")[3:])
    # The first three updates, and so the first four losses, are DDP's. In 16 bits, rounding may hide the fourth update for a step.
    assert run.series("loss")[:4] == plain.series("loss")[:4] and run.series("loss")[4:] != plain.series("loss")[4:]


# 2 ranks use each method's default for error feedback, 3 ranks the opposite.
@pytest.mark.parametrize("ranks", [2, rest(3)])
@pytest.mark.parametrize("method", [m if m == "int8" else rest(m) for m in METHODS])
def test_compressed_steps_have_the_same_bits_in_strict_mode(method, ranks):
    options = "" if ranks == 2 else "--no-error-feedback" if method in ("int4", "powersgd") else "--error-feedback"
    assert_same(by(method, ranks, options), by(method, ranks, options, strict=True))


@pytest.mark.rest
def test_measuring_the_error_changes_nothing():
    run, without = by("int4", 2, "--measure-error 4"), by("int4", 2)
    assert [x["step"] for x in run.metrics if "compression_error" in x] == [4, 8]
    assert "int4: 4 bits, blocks of 256; 95.91 % of the parameters, from step 4 on; errors are kept" in run.said
    assert re.search("sent per rank and step, ddp sends 52.0 kB \\(5.. times\\)", run.said), run
    assert_same(without, run)


@pytest.mark.rest
def test_a_run_that_ends_before_compress_from_says_that_nothing_is_compressed():
    assert "compress   nothing: the run has no more steps than --compress-from" in by("powersgd", 2, "--steps 3").said


@pytest.mark.parametrize("options, precision, pattern", [
    ("--compress int8 --rank 2", "fp32", "--rank does nothing with --compress int8, only with powersgd"),
    rest("--compress int8 --top-k-fraction 0.1", "fp32", "--top-k-fraction does nothing"),
    rest("--error-feedback", "fp32", "does nothing with --compress none"),
    rest("--no-error-feedback", "fp32", "does nothing with --compress none"),
    rest("--compress-from 5", "fp32", "does nothing with --compress none"),
    rest("--compress int8 --ddp naive", "fp32", "--compress sends segments of buckets: leave out --ddp naive"),
    rest("--compress bf16", "bf16", "--compress bf16 saves nothing"),
    rest("--compress bf16", "fp16", "--compress bf16 saves nothing")])
def test_options_that_do_nothing_are_refused(options, precision, pattern):
    assert_refused(train("compress", f"--data {TOKENS} --val-data=", options, ranks=2, precision=precision), pattern)


# ---- losses after 300 steps ----
# The stored text consists of random words with an entropy of 0.68 nats per byte, which no model can beat. Without compression the
# loss ends near 0.70. Models with 128 channels on this repository's text rank the methods in the same order. Smaller models and
# lower learning rates do not, because they are far from converged after 300 steps: there int4 ends up to 0.09 above no compression,
# and feedback hurts top-k little.
def losses(*options):
    """The mean loss of the last 50 steps, for each seed (nats per token)."""
    found = []
    for seed in 1, 2:
        run = trained("compress",
                      f"--data {TOKENS} --val-data= --model d2 --heads 2 --channels 64 --seq-len 32 --batch-size 8 --steps 300 "
                      "--lr 3e-3 "
                      f"--eval-every 0 --sample-every 0 --log-every 100 --seed {seed}", *options, ranks=2)
        last = run.series("loss")[-50:]
        assert len(last) == 50
        found.append(np.mean(last))
    return np.array(found)


@pytest.mark.rest
@pytest.mark.parametrize("method, above", [("int8", 0.05), ("int4", 0.05), ("powersgd", 0.15)])
def test_a_method_ends_near_none(method, above):
    assert np.mean(losses("--compress", method) - losses()) <= above


# Error feedback makes top-k and sign worse, because AdamW's v remembers the squares of the delayed errors. powersgd needs feedback.
@pytest.mark.rest
@pytest.mark.parametrize("better, worse, by_at_least", [
    ("", "--compress powersgd", 0.02), ("", "--compress top-k", 0.02), ("", "--compress sign", 0.02),
    ("--compress powersgd", "--compress powersgd --no-error-feedback", 0.02),
    ("--compress top-k", "--compress top-k --error-feedback", 0.3), ("--compress sign", "--compress sign --error-feedback", 0.3)])
def test_a_method_loses_on_every_seed(better, worse, by_at_least):
    assert (losses(worse) - losses(better)).min() >= by_at_least
