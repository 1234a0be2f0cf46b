"""The solution of chapter 7's exercise (test/exercises/local_sgd.diff): local steps and DiLoCo's outer step, added to a copy of
train_gpt2_ddp.cu. What is compared here is equal to the bit, or exact except for rounding."""
import os, shutil
import pytest
from shards import resumed
from suite import (ROOT, TINY, assert_close, assert_close_tensors, assert_refused, assert_same, half, once, program, succeeds,
                   train, trained)

pytestmark = pytest.mark.rest
OPTIONS = f"{TINY} --batch-size 8 --total-batch-size 0 --eps 1e-5"
MEAN = "--outer-lr 1 --outer-momentum 0" # the outer step takes the mean of the weights
PARAMETERS = 12992


def solution():
    """The program that the exercise asks for."""
    def build(place):
        shutil.copy(ROOT / "Makefile", place)
        shutil.copy(ROOT / "train_gpt2_ddp.cu", place)
        for folder in "llmc", "dev": os.symlink(ROOT / folder, place / folder)
        succeeds("git", "apply", ROOT / "test/exercises/local_sgd.diff", cwd=place, env={"GIT_CEILING_DIRECTORIES": place.parent})
        succeeds("make -s --no-print-directory BUILD=build DEVICE=cpu PRECISION=fp32 DEBUG= CFLAGS=-O1 build/train_gpt2_ddp",
                 cwd=place)

    return once("local_sgd", build) / "build/train_gpt2_ddp"


def ddp(ranks, *options):
    return trained("ddp", OPTIONS, *options, ranks=ranks)


def local_sgd(ranks, *options, **settings):
    return trained("ddp", OPTIONS, *options, ranks=ranks, binary=str(solution()), **settings)


def test_without_local_steps_it_is_ddp_to_the_bit():
    assert_same(ddp(2), local_sgd(2, "--local-steps 0"))


def test_ranks_are_equal_after_an_outer_step_and_only_then():
    local_sgd(4, "--local-steps 5 --check-every 5")
    assert_refused(train("ddp", OPTIONS, "--steps 2 --local-steps 2 --check-every 1", ranks=2, binary=str(solution())),
                   "after step 1 the parameters")


def test_a_rank_sends_the_weights_in_every_fifth_step_and_keeps_two_more_numbers_of_each():
    run = local_sgd(4, "--local-steps 5 --check-every 5")
    loss, weights = 2 * 3 * 24 // 4, 2 * 3 * 4 * PARAMETERS // 4
    assert run.series("comm_bytes") == [loss + (step % 5 == 0) * weights for step in range(1, 21)]
    assert run.about["predicted_bytes"]["optimizer state"] == (8 + 8) * PARAMETERS


def test_one_rank_trains_as_ddp_does():
    assert_close(ddp(1), local_sgd(1, "--local-steps 1", MEAN))


# 20 sequences, all the same: what a rank does alone is then what every rank does.
def test_the_mean_of_the_weights_of_ranks_that_see_the_same_is_each_ones(tmp_path):
    (tmp_path / "period").write_text("what is period?")
    succeeds([program("tokenize")], "--out", tmp_path / "period.bin", 400 * [tmp_path / "period"])
    options = f"--data {tmp_path}/period.bin --local-steps 4 {MEAN}"
    one, two = local_sgd(1, options, env={"OMP_NUM_THREADS": 1}), local_sgd(2, options) # with as many threads as each of two has
    assert_close_tensors(one.weights(), two.weights(), rtol=0, atol=0)
    assert_close(one, two, rtol=1e-6, atol=0, only="grad_norm")


# The first outer step is lr (1 + momentum) (anchor - mean) with Nesterov's momentum; without his, lr (anchor - mean).
def test_half_the_learning_rate_with_a_momentum_of_1_is_the_whole_one_in_the_first_outer_step():
    plain, nesterov = local_sgd(2, "--local-steps 20", MEAN), local_sgd(2, "--local-steps 20 --outer-lr 0.5 --outer-momentum 1")
    assert_close_tensors(plain.weights(), nesterov.weights(), rtol=0, atol=0)


# The anchor is all that one rank keeps without momentum, and a resumed run takes the weights for it.
def test_the_anchor_is_that_of_the_last_outer_step(tmp_path):
    options = "--local-steps 5 --outer-lr 0.5 --outer-momentum 0"
    whole = local_sgd(1, options, "--save-every 5 --keep 0")
    assert_same(whole, resumed(half(whole, tmp_path / "half"), "ddp", OPTIONS, options, ranks=1, binary=str(solution())))
