"""References of test/split: a program that is compiled with headers that form sums in parts has the bits of ranks that share the
work. Here are DDP and what a header leaves as it is; test_tp.py, test_pp.py and test_3d.py compare meshes, and see that other parts
have other bits."""
import pytest
from meshes import EVALUATIONS, SMALL, batch, reference, split_program
from shards import assert_same_samples
from suite import assert_different, assert_same, rest, trained


def plain(*options, precision="fp32"):
    return trained("single", SMALL, batch(32, 1), *options, precision=precision, env={"OMP_NUM_THREADS": 1})


def ddp(ranks, *options, sequences=32, micro=1, **settings):
    return trained("ddp", SMALL, batch(sequences, ranks, micro), *options, ranks=ranks, **settings)


def in_parts(parts, *options, sequences=32, micro=1, **settings):
    return reference(batch(sequences, 1, micro), *options, data_parts=parts, **settings)


@pytest.mark.parametrize("precision", ["fp32", rest("bf16")])
def test_one_part_has_the_bits_of_the_program_without_headers(precision):
    assert_same(plain(precision=precision), in_parts(1, precision=precision))


# ---- data parallelism ----
@pytest.mark.parametrize("precision, ranks, micro", [
    ("fp32", 2, 2), rest("fp32", 4, 1), rest("bf16", 2, 1), rest("bf16", 4, 2)])
def test_parts_of_the_data_have_the_bits_of_ddp(precision, ranks, micro):
    many = ddp(ranks, micro=micro, precision=precision)
    assert_same(in_parts(ranks, micro=micro, precision=precision), many)
    assert_different(many, plain(precision=precision))


@pytest.mark.rest
def test_evaluations_samples_and_recomputation_have_the_bits_of_ddp():
    one = in_parts(3, EVALUATIONS, "--recompute block", sequences=24, micro=2)
    assert_same_samples(one, ddp(3, EVALUATIONS, "--ddp naive", sequences=24, micro=2))


# chunks.h makes a rank with 160 rows compute the classifier for 64 at a time. In bf16 the chunks are added up in fp32, as in the
# reference.
@pytest.mark.rest
@pytest.mark.parametrize("precision, micro", [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_the_classifier_in_chunks_has_the_bits_of_ddp(precision, micro):
    rows = f"--seq-len {20 * micro} --total-batch-size {640 * micro}"
    one = in_parts(2, rows, micro=micro, precision=precision, headers="chunks data")
    assert_same(one, ddp(2, rows, micro=micro, binary=split_program("ddp", precision, "chunks"), precision=precision))
    if precision == "fp32": assert_different(one, in_parts(2, rows, micro=micro))
