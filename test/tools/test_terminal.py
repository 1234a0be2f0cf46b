"""What a run prints on a terminal, in a pipe and in a file, alone and under mpirun, which gives its ranks a terminal in any case;
and losses per byte."""
import re
import numpy as np
import pytest
from suite import TOKENS, Run, command, launcher, program, rest, trained, words
from terminal import on_terminal

MODEL = "--model d1 --heads 2 --channels 16 --seq-len 16 --batch-size 4"
OPTIONS = f"--data {TOKENS} --val-data= {MODEL} --steps 50 --sample-every 25 --sample-tokens 4"
ALONE_AND_ON_2_RANKS = pytest.mark.parametrize("ranks", [None, 2], ids=["alone", "2_ranks"])


def line(ranks, folder, *options):
    """A command of 50 steps, and the folder that it writes into."""
    start = [*launcher(), "-np", str(ranks), program("train_gpt2_ddp")] if ranks else [program("train_gpt2_single")]
    return [*start, *words(*(options or [OPTIONS])), "--out", str(folder)]


def steps(said):
    return len(re.findall(r"^step *\d+/50 \| loss", said, re.M))


def seen(run):
    """What a person sees in the end: of each line only what was written after the last return to its beginning."""
    return re.sub(r"^.*\x1b\[K(?=.)", "", run.out.replace("\r", ""), flags=re.M)


def assert_every_step_is_in_the_metrics(run, folder):
    assert run.status == 0, run
    assert [x["step"] for x in Run([], 0, "", "", folder).metrics if "loss" in x] == [*range(1, 51)]


@ALONE_AND_ON_2_RANKS
def test_on_a_terminal_one_line_is_rewritten_and_every_2nd_of_50_full_lines_stays(ranks, tmp_path):
    run = on_terminal(line(ranks, tmp_path / "out"), env={"TERM": "xterm"})
    assert_every_step_is_in_the_metrics(run, tmp_path / "out")
    assert re.search(r"step  1/50 \[\.*\] loss .* tok/s \| [0-9]*m..s left\x1b\[K", run.out), run
    assert steps(seen(run)) == 26  # and the first
    assert re.search("^sample after step 50:", seen(run), re.M) and re.search("^saved step 50", seen(run), re.M)


@ALONE_AND_ON_2_RANKS
@pytest.mark.parametrize("options, lines", [("", 50), rest("--log-every 20", 4)], ids=["", "log_every_20"])
def test_in_a_pipe_nothing_is_rewritten(ranks, options, lines, tmp_path):
    run = command(line(ranks, tmp_path / "out", OPTIONS, options), env={"TERM": "xterm"})
    assert steps(run.out) == lines and "\x1b" not in run.said and " left\n" not in run.said
    assert_every_step_is_in_the_metrics(run, tmp_path / "out")


@ALONE_AND_ON_2_RANKS
def test_in_a_file_nothing_is_rewritten_also_where_who_starts_it_is_on_a_terminal(ranks, tmp_path):
    run = on_terminal("sh -c", [f'"$@" > {tmp_path}/file 2>&1', "sh", *line(ranks, tmp_path / "out")], env={"TERM": "xterm"})
    said = (tmp_path / "file").read_text()
    assert_every_step_is_in_the_metrics(run, tmp_path / "out")
    assert steps(said) == 50 and "\x1b" not in said


def test_on_a_terminal_that_cannot_rewrite_lines_every_step_has_one(tmp_path):
    assert steps(on_terminal(line(None, tmp_path / "out"), env={"TERM": "dumb"}).out) == 50


def test_an_error_takes_the_live_lines_place(tmp_path):
    run = on_terminal(line(None, tmp_path / "out", OPTIONS, "--lr 1000 --grad-clip 0 --max-bad-steps 1 --loss-scale 1"),
                      env={"TERM": "xterm"})
    assert run.status == 1 and re.search("^error: ", seen(run), re.M), run


# ---- losses per byte ----
EVALUATE = f"{MODEL} --steps 1 --eval-every 1 --eval-steps 1000 --sample-every 0"


def losses(run):
    return np.array(run.series("val_loss")), np.array(run.series("val_loss_per_byte"), float)


def test_a_model_of_bytes_has_one_loss():
    run = trained("single", f"--data {TOKENS} --val-data README.md", EVALUATE)
    per_token, per_byte = losses(run)
    assert (per_token == per_byte).all() and len(per_token) == 2 and "per byte" not in run.out


@pytest.fixture
def longer_tokens(tmp_path):
    """A vocabulary, README in its tokens, and how many bytes and tokens these are."""
    assert command([program("train_bpe")], "--vocab-size 400 --out", tmp_path / "bpe", "doc/01_single.md").status == 0
    said = command([program("tokenize")], "--tokenizer", tmp_path / "bpe", "--out", tmp_path / "val.bin", "README.md").out
    return tmp_path, *map(int, re.search(r", (\d+) bytes, (\d+) tokens", said).groups())


def test_the_loss_per_byte_is_that_per_token_times_tokens_over_bytes(longer_tokens):
    folder, of_bytes, of_tokens = longer_tokens
    data = f"--data {folder}/val.bin --val-data {folder}/val.bin"
    run = trained("single", data, f"--tokenizer {folder}/bpe", EVALUATE)
    per_token, per_byte = losses(run)
    # Every token but the first is a target, and the first is the only end of text.
    assert len(per_token) == 2 and np.allclose(per_byte, per_token * (of_tokens - 1) / of_bytes, rtol=1e-6)
    assert len(re.findall(r"val loss [0-9.]* per token, [0-9.]* per byte$", run.out, re.M)) == 2
    _, of_3_ranks = losses(trained("ddp", data, f"--tokenizer {folder}/bpe", EVALUATE, ranks=3))
    assert np.isclose(of_3_ranks[0], per_byte[0], rtol=1e-5)  # before they train
    unknown = trained("single", data, "--tokenizer= --vocab-size 400", EVALUATE)
    assert losses(unknown)[1].dtype == float and np.isnan(losses(unknown)[1]).all() and re.search(r"val loss [0-9.]*$", unknown.out,
                                                                                                  re.M)
