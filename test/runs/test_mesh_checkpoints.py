"""Checkpoints of parts of matrices, of stages and of meshes are the same files as every other stage's: each program continues each other's. And
errors of compressed gradients, which are a file per rank beside them: a run continues with them to the bit, or says what is lost."""
import json, re, shutil
import numpy as np
import pytest
from meshes import SMALL, assert_all_say, continued
from suite import (ROOT, TOKENS, assert_close, assert_close_tensors, assert_refused, assert_refused_by_all, assert_same, command, flip, half, program,
                   rest, tensors, train, trained)

LONG = 8


# 48 sequences a step divide over 1, 2, 3 and 4 copies of the model, and 10 steps are more than one epoch.
def command_of(name, ranks):
    """The stage and the options that a name stands for: single, ddp, zeroZ, fsdp, tpT, ppP; a mesh DxTxP, with z behind it also with ZeRO, with s
    with --sequence-parallel; a method of compression from the fourth step on, with + behind it if errors are fed back, else with -; or none."""
    stage, options, copies, micro = name, "", ranks, 1
    if m := re.fullmatch(r"zero(\d)", name):
        stage, options = "zero", f"--zero-stage {m[1]}"
    elif m := re.fullmatch(r"([tp]p)(\d)", name):
        stage, copies, micro = m[1], ranks // int(m[2]), 4 if m[1] == "pp" else 1
        options = f"--{'tensor' if stage == 'tp' else 'pipeline'}-parallel {m[2]}"
    elif m := re.fullmatch(r"(\d)x(\d)x(\d)(z?)(s?)", name):
        stage, copies, micro = "3d", int(m[1]), 4
        options = f"--mesh dp={m[1]},tp={m[2]},pp={m[3]}" + " --zero-stage 1" * bool(m[4]) + " --sequence-parallel" * bool(m[5])
    elif name[-1] in "+-":
        stage, micro, method = "compress", 2, name[:-1]
        options = f"--compress {method} --compress-from 3 {'--error-feedback' if name[-1] == '+' else '--no-error-feedback'}"
        options += " --rank 2" * (method == "powersgd")
    elif name == "none":
        stage = "compress"
    return stage, f"{SMALL} --eps 1e-5 --layers 4 --total-batch-size 768 --save-every 5 --batch-size {48 // copies // micro} {options}"


def trains(name, ranks, *options, **settings):
    stage, its = command_of(name, ranks)
    return trained(stage, its, *options, ranks=None if name == "single" else ranks, **settings)


def continues(run, folder, name, ranks, *options, precision="fp32"):
    """`name` continues a run from its step 5."""
    stage, its = command_of(name, ranks)
    return continued(run, folder, [program(f"train_gpt2_{stage}", precision)], its, *options, ranks=ranks)


def resume(name, ranks, folder, *options, precision="fp32"):
    stage, its = command_of(name, ranks)
    return command([program(f"train_gpt2_{stage}", precision)], its, *options, "--resume --out", [folder], ranks=ranks)


def header(path):
    """What a safetensors file says of its tensors and of itself."""
    data = path.read_bytes()
    return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])


def places(run):
    """The names, shapes and places of all tensors of its last checkpoint."""
    files = {path.name: header(path) for path in run.checkpoint().glob("*.safetensors")}
    return {name: {k: v for k, v in tensors.items() if k != "__metadata__"} for name, tensors in files.items()}


STAGES = {"tp2": 4, "tp4": 4, "pp2": 4, "pp3": 3, "3x1x1z": 3, "2x2x1": 4, "1x2x2": 4, "2x1x2z": 4, "2x2x2zs": 8}


@pytest.mark.parametrize("name", [name if name in ("tp2", "pp2") else rest(name) for name in STAGES])
def test_a_stages_checkpoints_are_one_devices_and_each_continues_the_others(tmp_path, name):
    run, single = trains(name, STAGES[name]), trains("single", 1)
    assert_close(single, run)
    assert places(single) == places(run) and {p.name for p in single.checkpoint().iterdir()} == {p.name for p in run.checkpoint().iterdir()}
    assert_same(run, continues(run, tmp_path / "own", name, STAGES[name]))
    assert_close(run, continues(run, tmp_path / "one", "single", 1))
    assert_close(single, continues(single, tmp_path / "ranks", name, STAGES[name]))


# The files are the same whoever saves them; some pairs see it again.
@pytest.mark.sampled
@pytest.mark.parametrize("name, by, ranks, options", [
    ("ddp", "2x2x2zs", 8, ""), ("zero3", "pp2", 4, ""), ("fsdp", "tp2", 4, ""), ("tp2", "fsdp", 4, ""), ("pp3", "zero3", 3, ""), ("pp2", "tp4", 4, ""),
    ("2x2x2zs", "ddp", 3, ""), ("2x2x1", "2x1x2z", 4, ""), ("tp2", "tp2", 4, "--sequence-parallel"), ("tp2", "tp2", 2, "")])
def test_stages_continue_one_anothers_checkpoints(tmp_path, name, by, ranks, options):
    run = trains(name, ({"ddp": 3, "zero3": 3, "fsdp": 4} | STAGES)[name])
    assert_close(run, continues(run, tmp_path, by, ranks, options))


# What forms no other sums is the same to the bit.
@pytest.mark.sampled
@pytest.mark.parametrize("name, by, ranks, options", [
    ("pp2", "pp2", 4, "--schedule zb-h1"), ("pp2", "pp2", 4, "--schedule interleaved"), ("pp2", "pp2", 4, "--recompute block"), ("pp3", "pp4", 4, ""),
    ("pp3", "pp3", 3, "--split 2,2,0"), ("2x2x1", "2x2x1z", 4, ""), ("2x1x2z", "2x1x2", 4, "--mesh pp=2,dp=2"),
    ("1x2x2", "1x2x2", 4, "--schedule interleaved")], ids=["zb-h1", "interleaved", "recomputed", "more", "split", "zero", "outside", "chunks"])
def test_other_schedules_splits_and_shards_continue_to_the_bit(tmp_path, name, by, ranks, options):
    assert_same(trains(name, STAGES[name]), continues(trains(name, STAGES[name]), tmp_path, by, ranks, options))


@pytest.mark.rest
@pytest.mark.parametrize("name, by", [("tp4", "single"), ("single", "pp2"), ("2x2x2zs", "single"), ("single", "2x2x2zs")])
def test_step_0_is_continued_too(tmp_path, name, by):
    ranks = {"single": 1} | STAGES
    shutil.copytree(trains(name, ranks[name], "--steps 0").folder, tmp_path / "zero")
    assert resume(by, ranks[by], tmp_path / "zero").status == 0
    assert_close_tensors(trains(by, ranks[by]).weights(), tensors(tmp_path / "zero/step_00000010/model.safetensors"))


# Master weights are also state.
@pytest.mark.rest
@pytest.mark.parametrize("name, own_options, by, ranks, options", [
    ("tp2", "", "tp4", 4, "--sequence-parallel"), ("pp2", "--schedule zb-h1", "pp4", 4, ""), ("2x2x2zs", "--schedule zb-h1", "1x2x2", 4, "")], ids=["tp", "pp", "3d"])
def test_bf16_continues_to_the_bit_and_others_with_nearly_its_losses(tmp_path, name, own_options, by, ranks, options):
    run = trains(name, STAGES[name], precision="bf16")
    assert_same(run, continues(run, tmp_path / "own", name, STAGES[name], own_options, precision="bf16"))
    for folder, other, n, its in ("other", by, ranks, options), ("ddp", "ddp", 3, ""):
        assert_close(run, continues(run, tmp_path / folder, other, n, its, precision="bf16"), rtol=1e-4, only="loss")


# ---- damage ----
def truncate(path, less):
    path.write_bytes(path.read_bytes()[:-less])


@pytest.mark.parametrize("name, file, damage, pattern", [
    ("tp2", "model", lambda path: flip(path), ".*do not match their checksum"), rest("tp2", "model", lambda path: truncate(path, 1), ""),
    rest("pp2", "optimizer", lambda path: flip(path, 0.97), ".*do not match their checksum"),
    rest("2x1x2z", "optimizer", lambda path: truncate(path, 100), "")], ids=["tp", "tp-short", "pp-moments", "mesh-short_moments"])
def test_every_rank_refuses_a_damaged_file(tmp_path, name, file, damage, pattern):
    folder = half(trains(name, STAGES[name]), tmp_path / "half")
    damage(folder / f"step_00000005/{file}.safetensors")
    assert_refused_by_all(resume(name, STAGES[name], folder), STAGES[name], f".*{file}.safetensors: {pattern}")


# ---- ranks that cannot write, or each to a folder of its own: rank 1 may write 5 MB to a file, enough for MPI's segments, too little for its part ----
LIMITED = '[ $OMPI_COMM_WORLD_RANK != 1 ] || { trap "" XFSZ; ulimit -f 5000; }; exec "$@"'


@pytest.mark.rest
def test_a_rank_without_space_for_its_errors_says_so_and_the_last_checkpoint_stays(tmp_path):
    binary, large = program("train_gpt2_compress"), (
        f"--data {TOKENS} --val-data= --model d5 --heads 6 --channels 120 --seq-len 16 --batch-size 1 --eval-every 0 --sample-every 0 --save-every 1 "
        f"--lr-schedule constant --keep 2 --compress int8 --error-feedback --out {tmp_path}")
    assert command([binary], large, "--steps 2", ranks=2).status == 0
    full = command(["bash", "-c", LIMITED, "bash", binary], large, "--resume --steps 4", ranks=2)
    assert_all_say(full, [1], ".*errors_int8_00001_of_00002.safetensors: cannot be written: File too large")
    assert_all_say(full, [0], "") # that rank 1 has left, or that the folder is gone
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]
    assert command([binary], large, "--resume --steps 3", ranks=2).status == 0
    assert not [*tmp_path.rglob(".tmp*")]


@pytest.mark.rest
def test_ranks_whose_folders_have_the_same_name_but_are_others_are_refused(tmp_path):
    for rank in "01": (tmp_path / rank / "out").mkdir(parents=True)
    stage, its = command_of("int8+", 2)
    apart = f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK; exec "$@"'
    run = command(["bash", "-c", apart, "bash", ROOT / program(f"train_gpt2_{stage}")], its, f"--data {ROOT / TOKENS} --out out", ranks=2)
    assert_refused(run, "^rank 0: error: rank 1 cannot write: .*--out must be a folder that every rank sees")


# ---- compression: resumed with its errors ----
def error_files(folder):
    return sorted(p.name for p in folder.glob("errors_*"))


@pytest.mark.parametrize("name, ranks, options", [
    ("powersgd+", 3, ""), *(rest(f"{m}+", 3, "") for m in ("bf16", "fp16", "int8", "int4", "top-k", "sign", "onebit-adam")),
    *(rest(f"{m}-", 2, "") for m in ("sign", "powersgd", "onebit-adam")), rest("int8+", 1, ""), *(rest(f"{m}+", 4, "") for m in ("int4", "powersgd")),
    *(rest(f"{m}+", 2, f"--compress-from {n}") for m in ("onebit-adam", "powersgd") for n in (5, 7)), rest("int4+", 3, "--bucket-mb 0.01")],
    ids=lambda x: str(x).replace("--", "").replace(" ", "_"))
def test_a_compressed_run_continues_with_its_errors_to_the_bit(tmp_path, name, ranks, options):
    run = trains(name, ranks, options)
    again = continues(run, tmp_path, name, ranks, options)
    assert_same(run, again)
    assert "begin at 0" not in again.said
    # sign- has nothing to save; powersgd- has its Q, and onebit-adam- when v was frozen
    assert len(error_files(run.checkpoint(10))) == (0 if ranks == 1 or name == "sign-" else ranks)


# ---- continued without them ----
def without_errors(run, folder):
    """As if they had not been saved."""
    shutil.copytree(run.folder, folder / "bare")
    for path in (folder / "bare").glob("step_*/errors_*"): path.unlink()
    run.folder = folder / "bare"
    return run


NONE = "has no errors of int8 on 3 ranks: they begin at 0"
PACKETS = r"with these packets: they begin at 0; those of other packets \(--bucket-mb, --rank, --error-feedback, precision\) are lost"


@pytest.mark.parametrize("name, ranks, by, by_ranks, options, pattern", [
    ("int8+", 2, "ddp", 2, "", "the errors of compressed gradients that it has are lost, those of int8 on 2 ranks: this run keeps none"),
    rest("int8+", 2, "int8-", 2, "", "those of int8 on 2 ranks: this run keeps none"),
    rest("int8+", 2, "none", 2, "", "those of int8 on 2 ranks: this run keeps none"),
    rest("int8+", 2, "int8+", 3, "", f"{NONE}; those of int8 on 2 ranks are lost"),
    rest("powersgd+", 3, "int8+", 3, "", f"{NONE}; those of powersgd on 3 ranks are lost"),
    rest("int8+", 2, "int8+", 2, "--bucket-mb 0.01", f"has no errors of int8 on 2 ranks {PACKETS}"),
    rest("powersgd+", 3, "powersgd+", 3, "--rank 1", f"has no errors of powersgd on 3 ranks {PACKETS}"),
    rest("powersgd+", 3, "powersgd-", 3, "", f"has no errors of powersgd on 3 ranks {PACKETS}")],
    ids=["ddp", "no_feedback", "none", "ranks", "method", "packets", "rank", "powersgd-"])
def test_a_run_without_the_errors_says_what_is_lost_and_has_the_bits_of_one_that_has_none(tmp_path, name, ranks, by, by_ranks, options, pattern):
    run = continues(trains(name, ranks), tmp_path / "lost", by, by_ranks, options)
    assert re.search(pattern, run.said), run
    assert_same(continues(without_errors(trains(name, ranks), tmp_path), tmp_path / "bare_half", by, by_ranks, options), run)


@pytest.mark.rest
@pytest.mark.parametrize("name, ranks", [("single", 1), ("zero3", 3), ("fsdp", 4), ("tp2", 2), ("pp2", 2), ("1x2x2", 4)])
def test_every_stage_continues_a_compressed_run_and_is_continued_by_one(tmp_path, name, ranks):
    compressed, run = trains("int8+", 2), continues(trains("int8+", 2), tmp_path / "run", name, ranks)
    assert "those of int8 on 2 ranks" in run.said
    assert_close(continues(compressed, tmp_path / "ddp", "ddp", 2), run)
    run = continues(trains(name, ranks), tmp_path / "int8", "int8+", 3)
    assert re.search(f"{NONE}$", run.said, re.M), run
    assert_close(continues(trains("ddp", 3), tmp_path / "other", "int8+", 3), run, rtol=1e-3, only="loss")


@pytest.mark.rest
@pytest.mark.parametrize("ranks, options, at, begins", [
    (2, "", 3, True), (3, "--no-error-feedback", 3, True), (3, "--compress-from 7", 7, False)], ids=["other_ranks", "other_packets", "thawed"])
def test_onebit_adam_keeps_when_v_was_frozen_unless_it_is_free_again(tmp_path, ranks, options, at, begins):
    run = continues(trains("onebit-adam+", 3), tmp_path, "onebit-adam+", ranks, options)
    assert ("begin at 0" in run.said) == begins
    assert header(run.checkpoint(10) / f"errors_onebit-adam_00001_of_0000{ranks}.safetensors")["__metadata__"]["frozen"] == str(at)


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
    (1, lambda path, whole: flip(path, 0.6), DAMAGED), rest(0, copied(10, 0), "is of another run or step"), rest(0, copied(5, 1), DAMAGED),
    rest(1, lambda path, whole: truncate(path, 1), ".*truncated"), rest(1, lambda path, whole: path.write_bytes(b""), "has 0 bytes"),
    rest(1, lambda path, whole: path.unlink(), "cannot be opened: No such file"),
    rest(1, edited(b'"loss_scale":"1"', b'"loss_scale":"2"'), DAMAGED), rest(1, edited(b'"frozen":"0"', b'"frozen":"1"'), DAMAGED),
    rest(0, edited(b"checksum", b"chocksum"), 'has no "checksum" of 16 hexadecimal digits'),
    rest(0, edited(b'"state":', b'"stane":'), 'has no tensor "state"'),
    rest(1, edited(b"loss_scale", b"lass_scale"), 'its metadata have no "frozen" or no "loss_scale"')],
    ids=["flip", "step", "rank", "short", "empty", "missing", "loss_scale", "frozen", "no_checksum", "no_state", "no_scale"])
def test_damaged_errors_are_refused_and_left_alone(tmp_path, rank, damage, pattern):
    whole = trains("int8+", 2)
    folder, name = half(whole, tmp_path / "half"), f"errors_int8_0000{rank}_of_00002.safetensors"
    damage(folder / "step_00000005" / name, whole)
    before = {p: p.read_bytes() for p in folder.glob("step_*/*")}
    assert_refused(resume("int8+", 2, folder), f"^rank {rank}: error: .*{name}: {pattern}", "copy it again",
                   r"without its errors_\* files errors begin at 0", f"^rank {1 - rank}: error: ")
    assert before == {p: p.read_bytes() for p in folder.glob("step_*/*")}


# ---- steps that are not finite ----
def unscaled(path):
    """The errors divided by their loss scale, a power of two: the same bits before and after a step that changes only that."""
    return tensors(path)["state"].astype(float) / (float(header(path)["__metadata__"]["loss_scale"]) or 1)


# A loss scale that doubles after every second step overflows in a compressed step.
@pytest.mark.rest
@pytest.mark.parametrize("method", ["int8", "onebit-adam", "powersgd"])
def test_a_step_that_fp16_skips_keeps_the_errors(tmp_path, method):
    options = "--loss-scale 65536 --loss-scale-interval 2 --steps 12 --save-every 1 --keep 0"
    run = trains(f"{method}+", 2, options, precision="fp16")
    skipped = [line["step"] for line in run.metrics if line["skipped"] and 5 < line["step"] < 12][0]
    for rank in 0, 1:
        before, after = (unscaled(run.checkpoint(step) / f"errors_{method}_0000{rank}_of_00002.safetensors") for step in (skipped - 1, skipped))
        assert np.array_equal(before, after) and np.count_nonzero(after) > 250
    again = resume(f"{method}+", 2, half(run, tmp_path / "half", skipped), options, precision="fp16")
    assert again.status == 0, again
    again.folder = tmp_path / "half"
    assert_same(run, again, 12)


# Weights that each step multiplies by -1e5 are NaN within a few steps.
@pytest.mark.parametrize("method", ["int4", rest("onebit-adam")])
def test_elsewhere_a_step_that_is_not_finite_clears_the_errors_and_says_so(method):
    stage, its = command_of(f"{method}+", 2)
    run = train(stage, its, "--lr 1000 --weight-decay 100 --lr-schedule constant --warmup-steps 0 --steps 100 --max-bad-steps 4 --save-every 1 --keep 0 "
                "--compress-from 1", ranks=2)
    assert_refused(run, "^rank 0: error: .*NaN or Inf")
    assert run.series("skipped").count(True) == 4 == run.out.count("compress   this step was not finite: the errors begin at 0 again")
    name = f"errors_{method}_00001_of_00002.safetensors"
    assert not unscaled(run.checkpoint() / name).any() and np.count_nonzero(unscaled(run.checkpoint(2) / name)) > 250


# ---- ranks that fail in a compressed step ----
def faulty(name, fault, *options):
    stage, its = command_of(name, 3)
    run = train(stage, its, "--fault", fault, *options, ranks=3)
    assert run.status not in (0, "no end"), run
    return run


@pytest.mark.rest
@pytest.mark.parametrize("name, fault, options, pattern", [
    ("powersgd+", "1:7:hang", "--comm-timeout 15", "rank 1 has not reached .*step 7"),
    ("int8+", "1:7:bitflip", "--check-every 4", "after step 8 the parameters of unit 0 differ between rank 0 and rank 1")], ids=["hang", "bitflip"])
def test_a_rank_that_fails_in_a_compressed_step_is_named(name, fault, options, pattern):
    assert_all_say(faulty(name, fault, options), [0, 2], f".*{pattern}")


def test_after_a_rank_died_in_a_compressed_step_the_last_checkpoint_continues_with_its_errors(tmp_path):
    run = faulty("powersgd+", "1:7:kill")
    assert_all_say(run, [0, 2], ".*rank 1 has died.* during step [67]")
    assert_same(trains("powersgd+", 3), continues(run, tmp_path, "powersgd+", 3))


@pytest.mark.rest
def test_build_ranks_says_which_rank_left_out_a_compressed_operation():
    run = faulty("int8+", "1:7:skip", "--comm-timeout 15")
    assert "rank 1" in command([program("ranks")], *sorted(run.folder.glob("ops_rank_*.txt"))).said
