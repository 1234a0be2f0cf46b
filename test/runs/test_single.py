"""One device: a run agrees with PyTorch's in three precisions, and accumulation, recomputation, a break between two steps and a
scale of the loss change nothing but time and memory."""
import json, shutil
import numpy as np
import pytest
from shards import in_folder, resumed, skipped_steps
from suite import (PYTORCH, TINY, TOKENS, Stored, assert_close, assert_different, assert_refused, assert_same, command, rest,
                   tensors,
                   train, trained)

by_precision = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
# A small eps turns the rounding noise in gradients that are 0 in theory (key biases) into whole steps (test/reference/README.md).
EPS = "--eps 1e-5"


def single(*options, **settings):
    return trained("single", TINY, *options, **settings)


def pytorchs(*options, **settings):
    return trained("single", PYTORCH, *options, **settings)


# ---- against PyTorch ----
@pytest.mark.parametrize("batch", [16, 4], ids="batches_of_{}".format)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_20_steps_have_the_losses_norms_and_weights_of_pytorchs(batch, precision):
    run = pytorchs("--batch-size", batch)
    assert_close(Stored(f"pytorch_{precision}"), run)
    assert_close(Stored("pytorch_fp32"), run, rtol=0, only="param_norm")


def test_one_minus_beta_has_digits_that_a_beta_in_fp32_has_lost():
    """After one step the moments are (1 - beta) g and (1 - beta) g^2, here 1e-7 of what they are with betas of 0."""
    near_1, zero = (pytorchs("--steps 1 --beta1", beta, "--beta2", beta).checkpoint() / "optimizer.safetensors"
                    for beta in (0.9999999, 0))
    ratios = [(tensors(near_1)[name] / x)[x != 0] for name, x in tensors(zero).items()]
    ratios = np.concatenate([r.ravel() for r in ratios])
    assert len(ratios) > 1000 and np.all(np.abs(ratios / 1e-7 - 1) < 1e-6)


# Over 20 steps, relative: a quarter of the format's roundoff (2^-8, 2^-11) for losses, all of it for gradient norms.
@pytest.mark.parametrize("precision, loss, grad_norm", [("bf16", 1e-3, 4e-3), ("fp16", 1.2e-4, 5e-4)])
def test_16_bits_have_the_losses_and_gradient_norms_of_pytorchs_within_their_roundoff(precision, loss, grad_norm):
    run = pytorchs(precision=precision)
    assert_close(Stored("pytorch_fp64"), run, rtol=loss, atol=0, only="loss")
    assert_close(Stored("pytorch_fp64"), run, rtol=grad_norm, atol=0, only="grad_norm")
    with pytest.raises(AssertionError): # it does not really compute in fp32
        assert_close(Stored("pytorch_fp64"), run, rtol=1e-5, atol=0, only="loss")


# ---- accumulation ----
@pytest.mark.parametrize("micro", [8, 1], ids="batches_of_{}".format)
def test_micro_batches_are_the_step_of_one_large_batch(micro):
    assert_close(single("--batch-size 32", EPS), single("--batch-size", micro, EPS))


@pytest.mark.parametrize("precision, bound", [("bf16", 4e-3), ("fp16", 5e-4)])
def test_micro_batches_round_once_more_in_16_bits(precision, bound):
    """One step, so that nothing else can differ."""
    whole, parts = (single("--steps 1 --batch-size", batch, precision=precision) for batch in (32, 8))
    for field in "loss", "grad_norm", "param_norm":
        assert_close(whole, parts, rtol=bound, atol=0, only=field)


# ---- recomputation ----
def peak(run):
    return run.series("mem_peak_bytes")[-1]


@by_precision
def test_recomputation_has_the_same_bits_in_less_memory(precision):
    kept, recomputed = (single("--layers 3 --recompute", how, precision=precision) for how in ("none", "block"))
    assert_same(kept, recomputed)
    assert peak(recomputed) < peak(kept)


DEEP = f"{TINY} --model d3 --batch-size 4 --total-batch-size 0 --steps 2"


@pytest.mark.parametrize("program, options", [("single", ""), ("ddp", ""), rest("zero", ""), rest("muon", ""), rest("fsdp", ""),
                                              rest("zeropp", "--node-ranks 1"), rest("tp", ""), rest("pp", ""),
                                            rest("3d", ""), rest("compress", "--compress int8"), rest("cp", ""),
                                            rest("cp", "--cp ring")])
def test_auto_recomputes_only_if_not_all_activations_fit(program, options):
    def chosen(*more):
        run = trained(program, DEEP, options, *more, ranks=None if program == "single" else 2)
        assert "than predicted" not in run.out and run.about["options"]["recompute"] in ("none", "block")
        assert ("; blocks are recomputed\n" in run.out) == (run.about["options"]["recompute"] == "block")
        return run

    kept = chosen("--recompute none")
    assert peak(chosen()) == peak(chosen("--memory-limit", f"{peak(kept)}e-9")) == peak(kept)
    less = chosen("--memory-limit", f"{peak(kept) - 8}e-9")
    assert less.about["options"]["recompute"] == "block"
    assert_same(kept, less) if program == "single" else assert_close(kept, less, only="loss")


def test_a_memory_limit_that_is_too_small_is_an_error():
    limit = peak(trained("single", DEEP, "--recompute none")) - 8
    assert_refused(train("single", DEEP, f"--memory-limit {limit}e-9 --recompute none"), "out of memory", "or --recompute block")


# ---- a run that is continued ----
# An epoch has 13 steps: step 10 is in the first, 15 in the second.
BREAKS = (TINY, f"--save-every 5 --keep 0 --loss-scale-interval 4 --val-data {TOKENS} --eval-every 4 --eval-steps 2 "
          "--sample-every 10 --sample-tokens 8")


def whole(precision="fp32"):
    return trained("single", *BREAKS, precision=precision)


def crashed(run, folder, step):
    """A copy of a run as after a crash: with metrics of steps whose weights are lost, and half a line."""
    shutil.copytree(run.folder, folder, dirs_exist_ok=True)
    for saved in folder.glob("step_*"):
        if int(saved.name[5:]) > step: shutil.rmtree(saved)
    with open(folder / "metrics.jsonl", "a") as f: f.write('{"step":21,"loss":4.')
    return folder


@by_precision
@pytest.mark.parametrize("step", [10, 15], ids="step_{}".format)
def test_a_continued_run_has_the_bits_of_one_without_a_break(precision, step, tmp_path):
    run = whole(precision)
    assert_same(run, resumed(crashed(run, tmp_path, step), "single", *BREAKS, precision=precision))


@by_precision
def test_0_steps_save_what_training_would_begin_with(precision, tmp_path):
    begun = in_folder(tmp_path / "out", "single", *BREAKS, "--steps 0", precision=precision)
    assert begun.status == 0 and sorted(x.name for x in begun.folder.iterdir()) == ["metrics.jsonl", "step_00000000"], begun
    saved = begun.checkpoint()
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] == state["adamw_t"] == 0 and '"position": 0' in (saved / "state.json").read_text()
    before = saved.stat()
    resumed(begun.folder, "single", *BREAKS, "--steps 0", precision=precision)
    assert (saved.stat().st_ino, saved.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns) # it is not saved again
    assert command(["build/hf_export", saved, tmp_path / "hf"]).status == 0
    assert_same(whole(precision), resumed(begun.folder, "single", *BREAKS, precision=precision))


def test_0_steps_copy_the_weights_to_start_from():
    copy = trained("single", *BREAKS, "--init-from", whole().checkpoint(10), "--steps 0")
    assert (whole().checkpoint(10) / "model.safetensors").read_bytes() == (copy.checkpoint(0) / "model.safetensors").read_bytes()
    assert not whole().checkpoint(0).exists() # a run with steps does not save step 0


def test_evaluations_and_samples_leave_the_weights_as_they_are():
    assert (whole().checkpoint() / "model.safetensors").read_bytes() == (single().checkpoint() / "model.safetensors").read_bytes()
    assert_different(whole(), trained("single", *BREAKS, "--seed 1"))


def test_a_complete_run_is_left_as_it_is(tmp_path):
    shutil.copytree(whole().folder, tmp_path / "out")
    resumed(tmp_path / "out", "single", *BREAKS)
    assert command("diff -r", [whole().folder, tmp_path / "out"]).status == 0


@pytest.mark.parametrize("options, patterns", [
    ("--steps 15", ("resume", "step 20", "steps 15")), ("--init-from test/reference/initial", ("--resume", "--init-from")),
    ("--steps 30 --seq-len 8", ("--seq-len", "16", "8")), ("--steps 30 --seed 7", ("--seed", "1337", "7")),
    ("--steps 30 --layers 3", ("step_00000020", "layers", "2", "3"))],
    ids=["fewer_steps", "init-from", "seq-len", "seed", "layers"])
def test_resume_refuses_what_is_another_run_and_changes_nothing(options, patterns, tmp_path):
    shutil.copytree(whole().folder, tmp_path / "out")
    assert_refused(in_folder(tmp_path / "out", "single", *BREAKS, "--resume", options), *patterns)
    assert command("diff -r", [whole().folder, tmp_path / "out"]).status == 0


def test_resume_needs_a_checkpoint(tmp_path):
    assert_refused(in_folder("", "single", *BREAKS, "--resume"), "--resume", "--out")
    assert_refused(in_folder(tmp_path / "nothing", "single", *BREAKS, "--resume"), f"{tmp_path}/nothing", "no checkpoint")
    assert not (tmp_path / "nothing").exists()


# ---- the scale of the loss ----
def test_fp16_halves_the_scale_at_each_step_that_overflows_and_skips_it():
    run = single("--loss-scale 1099511627776 --max-bad-steps 100 --steps 40 --save-every 1 --keep 0", precision="fp16")
    skipped, scales, losses = skipped_steps(run), run.series("loss_scale"), run.series("loss")
    last = skipped.index(False) # the last step that is skipped, counted from 1
    assert last >= 3 and not any(skipped[last:])
    assert scales == [2.0 ** (40 - min(i, last)) for i in range(40)]

    def state(step):
        return [(run.checkpoint(step) / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]

    assert state(1) == state(last) != state(last + 1)
    # AdamW's bias correction counts updates.
    assert json.loads((run.checkpoint(40) / "state.json").read_text())["adamw_t"] == 40 - last
    assert losses[-1] < losses[0] - 0.25


def test_fp16_doubles_the_scale_after_an_interval_without_overflow():
    run = single("--loss-scale 16 --loss-scale-interval 4", precision="fp16")
    assert run.series("loss_scale") == [16.0 * 2 ** (i // 4) for i in range(20)]


def test_fp16_ends_after_max_bad_steps_that_overflow():
    run = train("single", TINY, "--loss-scale 1e30 --max-bad-steps 3", precision="fp16")
    assert_refused(run, "3 steps in a row", "step 3")
    assert run.series("skipped") == [True] * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_diverges_to_nan_is_stopped(precision):
    """Weight decay multiplies every matrix by -1e5 each step: Inf - Inf is NaN within a few steps."""
    run = train("single", TINY,
                "--lr 1000 --weight-decay 100 --lr-schedule constant --warmup-steps 0 --steps 100 --max-bad-steps 4",
                precision=precision)
    assert_refused(run, "NaN or Inf", "4 steps in a row", "step [0-9]")
    assert run.series("skipped").count(True) == 4 and set(run.series("loss_scale")) == {1.0}
