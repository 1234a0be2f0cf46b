"""Masks: runs in which some tokens do not count agree with PyTorch's ignore_index, on any number of ranks and in every program,
though the ranks have very different numbers of tokens that count. test/reference/masked_reference.py made what they are compared
with."""
import functools, json, shutil
import pytest
from shards import PLAIN, resumed
from suite import (PYTORCH, REFERENCE, ROOT, TINY, TOKENS, Stored, assert_close, assert_refused, assert_same, command, half, once,
                   program,
                   rest, succeeds, train, trained)


@functools.cache
def data():
    """A folder with tokens.bin and its mask."""
    def copies(folder):
        shutil.copy(TOKENS, folder)
        shutil.copy(f"{REFERENCE}/masked/tokens.mask", folder)
    return once("masked data", copies)


def masked(program, ranks, *options, **settings):
    return trained(program, PYTORCH, ["--data", data() / "tokens.bin"], *options, ranks=None if program == "single" else ranks,
                   **settings)


@pytest.mark.parametrize("program, ranks, options", [
    ("single", 1, "--batch-size 16"), rest("single", 1, "--batch-size 1"), ("ddp", 4, "--batch-size 4 --bucket-mb 0.02"),
    ("ddp", 2, "--batch-size 4 --ddp naive"), rest("ddp", 4, "--batch-size 4 --ddp naive"),
    ("zero", 4, "--batch-size 4 --zero-stage 3"),
    rest("zero", 2, "--batch-size 2 --zero-stage 2"), rest("fsdp", 4, "--batch-size 4"),
    rest("zeropp", 4, f"--batch-size 4 --node-ranks 2 {PLAIN}"),
    rest("tp", 4, "--batch-size 8 --tensor-parallel 2"), rest("tp", 2, "--batch-size 16 --tensor-parallel 2 --sequence-parallel"),
    rest("pp", 4, "--batch-size 4 --pipeline-parallel 2"),
    rest("3d", 4, "--batch-size 8 --mesh dp=2,tp=2"), rest("3d", 4, "--batch-size 4 --mesh dp=2,pp=2"),
    rest("compress", 4, "--batch-size 4 --compress none"), ("cp", 4, "--batch-size 16 --cp ring --cp-balance zigzag"),
    rest("cp", 4, "--batch-size 8 --context-parallel 2 --cp allgather"), rest("cp", 2, "--batch-size 16 --cp ulysses --ddp naive")])
def test_masked_runs_have_the_losses_norms_and_weights_of_pytorchs_ignore_index(program, ranks, options):
    run = masked(program, ranks, options)
    for field in "loss", "grad_norm", "param_norm":
        assert_close(Stored("masked/pytorch_fp32"), run, only=field)
    assert_close(Stored("masked/pytorch_fp64"), run)


def test_a_step_in_which_no_token_counts_has_no_loss_and_no_gradient():
    run = masked("single", 1, "--batch-size 16")
    step = run.metrics[7]
    assert (step["step"], step["loss"], step["grad_norm"], step["counted"]) == (8, None, 0.0, 0)
    assert "\nmask       --data: " in run.out and " of 6733 tokens count in the loss\n" in run.out


def test_a_mean_of_the_ranks_means_is_another():
    with pytest.raises(AssertionError):
        assert_close(Stored("masked/mean_of_means"), masked("ddp", 4, "--batch-size 4 --bucket-mb 0.02"), rtol=0.1, atol=0,
                     only="grad_norm")


# ---- bits ----
IN_ORDER = "--batch-size 4 --deterministic --save-every 5 --keep 0"


@pytest.mark.parametrize("program, options", [("zero", "--zero-stage 3"), rest("zero", "--zero-stage 1"),
                                              rest("zero", "--zero-stage 2"),
                                            rest("fsdp", ""), rest("ddp", "--ddp naive")],
                                            ids=["zero3", "zero1", "zero2", "fsdp", "naive"])
def test_masked_runs_have_the_same_bits_in_rank_order(program, options):
    assert_same(masked("ddp", 4, IN_ORDER), masked(program, 4, "--batch-size 4 --deterministic", options))


@pytest.mark.parametrize("ranks, options", [rest(4, "--batch-size 4"), rest(2, "--batch-size 2 --zero-stage 3"),
                                            rest(4, "--batch-size 2 --zero-stage 2 --owners all")])
def test_masked_runs_with_muon_have_the_numbers_of_one_rank(ranks, options):
    """PyTorch has done none."""
    assert_close(masked("muon", 1, "--batch-size 16"), masked("muon", ranks, options))


def test_a_masked_run_is_continued_to_the_bit(tmp_path):
    run = masked("ddp", 4, IN_ORDER)
    again = resumed(half(run, tmp_path / "out"), "ddp", PYTORCH, ["--data", data() / "tokens.bin", "--init-from="], IN_ORDER,
                    ranks=4)
    assert_same(run, again)


def test_mask_none_counts_all_tokens_and_says_that_there_is_a_mask():
    run = trained("single", TINY, ["--data", data() / "tokens.bin"], "--mask none --steps 3")
    assert_same(trained("single", TINY, "--steps 3"), run)
    assert "counted" not in run.metrics[0]
    assert "\nmask       --data: its mask is ignored (--mask none): all 6733 tokens count in the loss\n" in run.out


@pytest.mark.parametrize("ranks, sizes", [(1, "--batch-size 1"), (3, "--batch-size 4 --total-batch-size 384")],
                         ids=["1_rank", "3_ranks"])
def test_the_validation_loss_is_pytorchs_mean_over_the_tokens_that_count(ranks, sizes):
    """Of the initial weights; on three ranks the last batch is padded."""
    run = trained("ddp", PYTORCH, "--steps 0 --eval-every 1 --eval-steps 1000", sizes, ["--data", data() / "tokens.bin"],
                  ["--val-data", data() / "tokens.bin"], ranks=ranks)
    assert_close(Stored("masked/evaluation"), run, atol=0, only="val_loss")


# ---- what is refused ----
def test_validation_data_of_which_no_token_counts_are_refused(tmp_path):
    """test/unit/test_tokens.c changes every field of a mask; test_dataloader.c lacks masks."""
    question = {"q": "a question that is long enough to fill some sequences, more than one of them", "a": "x"}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    succeeds([program("tokenize")], "--split jsonl --prompt-field q --response-field a --out", tmp_path / "a.bin",
             tmp_path / "q.jsonl")
    assert_refused(train("single", TINY, "--steps 1 --batch-size 1 --total-batch-size 16 --eval-every 1 --eval-steps 1",
                         ["--val-data", tmp_path / "a.bin"]),
                   "--val-data .*a.bin: by its mask no target of the first 1 sequence counts", "--eval-steps")


def test_ranks_with_different_masks_do_not_begin(tmp_path):
    """Both give the same names."""
    shutil.copytree(data(), tmp_path / "0")
    (tmp_path / "1").mkdir()
    shutil.copy(TOKENS, tmp_path / "1")
    run = command(["bash", "-c", f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK && exec "$@"', "-"], [ROOT / program("train_gpt2_ddp")],
                  ["--data", "tokens.bin", "--val-data="], "--model d2 --heads 2 --channels 16 --steps 1", ranks=2)
    assert_refused(run, r"the ranks do not agree: the mask of --data \(as a checksum\) is .* on rank 0 and .* on rank 1")
