"""Errors of compressed gradients are a file per rank beside a checkpoint: a run continues with them to the bit, or says what is
lost."""
import os, re, shutil
import numpy as np
import pytest
from shards import continued, faulty, header, resume, saved, train_by
from suite import (ROOT, TOKENS, assert_close, assert_each_says, assert_refused, assert_same, command, flip, half, program, rest,
                   tensors, train)

LONG = 8


@pytest.mark.rest
def test_ranks_whose_folders_have_the_same_name_but_are_others_are_refused(tmp_path):
    for rank in "01": (tmp_path / rank / "out").mkdir(parents=True)

    def apart(stage, *options, **settings):
        there = ["bash", "-c", f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK; exec "$@"', "bash", ROOT / program(f"train_gpt2_{stage}")]
        return command(there, *options, **settings)

    run = train_by(apart, "int8+", 2, f"--data {ROOT / TOKENS} --out out")
    assert_refused(run, "^rank 0: error: rank 1 cannot write: .*--out must be a folder that every rank sees")


# ---- compression: resumed with its errors ----
def error_files(folder):
    return sorted(p.name for p in folder.glob("errors_*"))


@pytest.mark.parametrize("name, ranks, options", [
    ("powersgd+", 3, ""), *(rest(f"{m}+", 3, "") for m in ("bf16", "int8", "int4", "top-k", "sign")),
    *(rest(f"{m}-", 2, "") for m in ("sign", "powersgd")), rest("int8+", 1, ""),
    *(rest(f"{m}+", 4, "") for m in ("int4", "powersgd")),
    *(rest("powersgd+", 2, f"--compress-from {n}") for n in (5, 7)), rest("int4+", 3, "--bucket-mb 0.01")])
def test_a_compressed_run_continues_with_its_errors_to_the_bit(tmp_path, name, ranks, options):
    run = saved(name, ranks, options)
    again = continued(run, tmp_path, 5, name, ranks, options)
    assert_same(run, again)
    assert "begin at 0" not in again.said
    # sign- has nothing to save; powersgd- has its Q
    assert len(error_files(run.checkpoint(10))) == (0 if ranks == 1 or name == "sign-" else ranks)


# ---- continued without them ----
def without_errors(run, folder):
    """As if they had not been saved."""
    shutil.copytree(run.folder, folder / "bare")
    for path in (folder / "bare").glob("step_*/errors_*"): path.unlink()
    run.folder = folder / "bare"
    return run


NONE = "has no errors of int8 on 3 ranks: they begin at 0"
BUCKETS = r"with these buckets: they begin at 0; those of other buckets \(--bucket-mb, --rank, --error-feedback, precision\) are lost"


@pytest.mark.parametrize("name, ranks, by, by_ranks, options, pattern", [
    ("int8+", 2, "ddp", 2, "",
     "its errors of compressed gradients, of int8 on 2 ranks, are lost, because this run keeps none"),
    rest("int8+", 2, "int8-", 2, "", "of int8 on 2 ranks, are lost, because this run keeps none"),
    rest("int8+", 2, "none", 2, "", "of int8 on 2 ranks, are lost, because this run keeps none"),
    rest("int8+", 2, "int8+", 3, "", f"{NONE}; those of int8 on 2 ranks are lost"),
    rest("powersgd+", 3, "int8+", 3, "", f"{NONE}; those of powersgd on 3 ranks are lost"),
    rest("int8+", 2, "int8+", 2, "--bucket-mb 0.01", f"has no errors of int8 on 2 ranks {BUCKETS}"),
    rest("powersgd+", 3, "powersgd+", 3, "--rank 1", f"has no errors of powersgd on 3 ranks {BUCKETS}"),
    rest("powersgd+", 3, "powersgd-", 3, "", f"has no errors of powersgd on 3 ranks {BUCKETS}")])
def test_a_run_without_the_errors_says_what_is_lost_and_has_the_bits_of_one_that_has_none(tmp_path, name, ranks, by, by_ranks,
                                                                                          options, pattern):
    run = continued(saved(name, ranks), tmp_path / "lost", 5, by, by_ranks, options)
    assert re.search(pattern, run.said), run
    assert_same(continued(without_errors(saved(name, ranks), tmp_path), tmp_path / "bare_half", 5, by, by_ranks, options), run)


@pytest.mark.rest
@pytest.mark.parametrize("name, ranks", [("single", 1), ("zero3", 3), ("full", 4), ("tp2", 2), ("pp2", 2), ("1x2x2", 4)])
def test_every_stage_continues_a_compressed_run_and_is_continued_by_one(tmp_path, name, ranks):
    compressed, run = saved("int8+", 2), continued(saved("int8+", 2), tmp_path / "run", 5, name, ranks)
    assert "of int8 on 2 ranks, are lost" in run.said
    assert_close(continued(compressed, tmp_path / "ddp", 5, "ddp", 2), run)
    run = continued(saved(name, ranks), tmp_path / "int8", 5, "int8+", 3)
    assert re.search(f"{NONE}$", run.said, re.M), run
    assert_close(continued(saved("ddp", 3), tmp_path / "other", 5, "int8+", 3), run, rtol=1e-3, only="loss")


# ---- damaged errors ----
def edited(old, new):
    def edit(path, whole):
        data = path.read_bytes()
        assert re.search(old, data, re.S)
        path.write_bytes(re.sub(old, new, data, count=1, flags=re.S))
    return edit


def copied(step, rank):
    return lambda path, whole: shutil.copy(whole.checkpoint(step) / f"errors_int8_0000{rank}_of_00002.safetensors", path)


DAMAGED = "its values do not match their checksum: the file is damaged"


@pytest.mark.parametrize("rank, damage, pattern", [
    (1, lambda path, whole: flip(path, 0.6), DAMAGED), rest(0, copied(10, 0), "is of another run or step"),
    rest(0, copied(5, 1), DAMAGED),
    rest(1, lambda path, whole: os.truncate(path, path.stat().st_size - 1), ".*truncated"),
    rest(1, lambda path, whole: path.write_bytes(b""), "has 0 bytes"),
    rest(1, lambda path, whole: path.unlink(), "cannot be opened: No such file"),
    rest(1, edited(b'"loss_scale":"1"', b'"loss_scale":"2"'), DAMAGED),
    rest(0, edited(b"checksum", b"chocksum"), 'has no "checksum" of 16 hexadecimal digits'),
    rest(0, edited(b'"state":', b'"stane":'), 'has no tensor "state"'),
    rest(1, edited(b"loss_scale", b"lass_scale"), 'its metadata have no "loss_scale"')],
    ids=["flip", "step", "rank", "short", "empty", "missing", "loss_scale", "no_checksum", "no_state", "no_scale"])
def test_damaged_errors_are_refused_and_left_alone(tmp_path, rank, damage, pattern):
    whole = saved("int8+", 2)
    folder, name = half(whole, tmp_path / "half"), f"errors_int8_0000{rank}_of_00002.safetensors"
    damage(folder / "step_00000005" / name, whole)
    before = {p: p.read_bytes() for p in folder.glob("step_*/*")}
    assert_refused(resume(folder, "int8+", 2), f"^rank {rank}: error: .*{name}: {pattern}", "copy it again",
                   r"without its errors_\* files errors begin at 0", f"^rank {1 - rank}: error: ")
    assert before == {p: p.read_bytes() for p in folder.glob("step_*/*")}


# ---- steps that are not finite ----
def unscaled(path):
    """The errors divided by their loss scale, a power of two: the same bits before and after a step that changes only that."""
    return tensors(path)["state"].astype(float) / (float(header(path)["__metadata__"]["loss_scale"]) or 1)


# A loss scale that doubles after every second step overflows in a compressed step.
@pytest.mark.rest
@pytest.mark.parametrize("method", ["int8", "powersgd"])
def test_a_step_that_fp16_skips_keeps_the_errors(tmp_path, method):
    options = "--loss-scale 65536 --loss-scale-interval 2 --steps 12 --save-every 1 --keep 0"
    run = saved(f"{method}+", 2, options, precision="fp16")
    skipped = [line["step"] for line in run.metrics if line["skipped"] and 5 < line["step"] < 12][0]
    for rank in 0, 1:
        before, after = (unscaled(run.checkpoint(step) / f"errors_{method}_0000{rank}_of_00002.safetensors")
                         for step in (skipped - 1, skipped))
        assert np.array_equal(before, after) and np.count_nonzero(after) > 250
    again = resume(half(run, tmp_path / "half", skipped), f"{method}+", 2, options, precision="fp16")
    assert again.status == 0, again
    assert_same(run, again, 12)


# Weights that each step multiplies by -1e5 are NaN within a few steps.
@pytest.mark.parametrize("method", ["int4", rest("sign")])
def test_elsewhere_a_step_that_is_not_finite_clears_the_errors_and_says_so(method):
    run = train_by(train, f"{method}+", 2, "--lr 1000 --weight-decay 100 --lr-schedule constant --warmup-steps 0 --steps 100",
                   "--max-bad-steps 4 --save-every 1 --keep 0 --compress-from 1")
    assert_refused(run, "^rank 0: error: .*NaN or Inf")
    assert run.series("skipped").count(True) == 4 == run.out.count("compress   this step was not finite, so the errors restart "
                                                                   "at 0")
    name = f"errors_{method}_00001_of_00002.safetensors"
    assert not unscaled(run.checkpoint() / name).any() and np.count_nonzero(unscaled(run.checkpoint(2) / name)) > 250


# ---- ranks that fail in a compressed step ----
def test_after_a_rank_died_in_a_compressed_step_the_last_checkpoint_continues_with_its_errors(tmp_path):
    run = train_by(faulty, "powersgd+", 3, "--no-save-async --fault 1:7:kill")
    assert_each_says(run, 3, "rank 1 has died.* during step [67]", dead=1)
    assert_same(saved("powersgd+", 3), continued(run, tmp_path, 5, "powersgd+", 3))
