"""Checkpoints of one device, DDP, ZeRO and FSDP, whole and sharded: every program on any number of ranks continues every other's. Whatever
goes wrong while ranks write or read their shards, the last good checkpoint stays, and all ranks end."""
import functools, os, re
import pytest
from shards import assert_near_losses, assert_same_files, in_folder, resumed, sampled
from suite import (TOKENS, assert_close, assert_refused_by_all, command, flip, half, program, rest, trained)

LONG = 6
# 48 sequences a step divide over 1, 2, 3, 4 and 8 ranks; 10 steps are more than one epoch. FSDP's groups have two blocks and one.
SMALL = (f"--eps 1e-5 --data {TOKENS} --val-data= --model d3 --heads 2 --channels 16 --seq-len 16 --total-batch-size 768 --lr 3e-3 "
         "--warmup-steps 5 --eval-every 0 --sample-every 0 --steps 10 --save-every 5 --deterministic")
PROGRAMS = { # the stage, on so many ranks unless a test says otherwise, its options
    "single": ("single", 1, ""), "ddp": ("ddp", 3, ""), "zero1": ("zero", 8, "--zero-stage 1"), "zero2": ("zero", 2, "--zero-stage 2"),
    "zero3": ("zero", 4, "--zero-stage 3"), "full": ("fsdp", 3, "--wrap-blocks 2"), "model": ("fsdp", 3, "--wrap-blocks 0"),
    "sharded": ("fsdp", 3, "--checkpoint sharded --wrap-blocks 2"), "whole": ("fsdp", 3, "--checkpoint sharded --wrap-blocks 0"),
    "offload": ("fsdp", 2, "--checkpoint sharded --cpu-offload --sharding grad-op"),
    "hybrid": ("fsdp", 4, "--checkpoint sharded --sharding hybrid --shard-group 2"),
    "sharded16": ("fsdp", 3, "--checkpoint sharded --reduce-dtype model")}


def train_by(verb, name, ranks, *more, **settings):
    stage, usual, options = PROGRAMS[name]
    ranks = ranks or usual
    return verb(stage, SMALL, "--batch-size", 48 // ranks, options, *more, ranks=ranks, **settings)


def saved(name, ranks=None, *more, **settings):
    """A run without a break, which has saved steps 5 and 10."""
    return train_by(trained, name, ranks, *more, **settings)


def continued(run, folder, step, name, ranks=None, **settings):
    """A copy of the run as it was after a step is continued."""
    again = train_by(functools.partial(resumed, half(run, folder, step)), name, ranks, **settings)
    assert f"step {step} of 10" in again.out, again
    return again


def assert_near(a, b):
    """A sharded checkpoint's weights are compared where it is continued."""
    __tracebackhide__ = True
    if all((run.checkpoint() / "model.safetensors").exists() for run in (a, b)): return assert_close(a, b)
    for field in "loss", "grad_norm", "param_norm":
        assert_close(a, b, only=field)


# ---- any loads any ----
OWN = ["zero3", "sharded", "offload", *map(sampled, ("single", "ddp", "zero1", "zero2", "full", "hybrid", "whole"))]


@pytest.mark.parametrize("name", OWN)
def test_every_program_trains_as_one_device_and_continues_its_own_to_the_bit(name, tmp_path):
    assert_near(saved("single"), saved(name))
    assert_same_files(saved(name), continued(saved(name), tmp_path, 5, name))


# Saved by one, continued by others on so many ranks. A * before one: make test has it.
MATRIX = """
    single: ddp.3 zero1.8 zero2.3 *zero3.4 sharded.3
    ddp: single.1 zero1.2 zero2.4 zero3.8 offload.2 full.4
    zero1: single.1 ddp.8 zero1.1 zero2.4 zero3.2 hybrid.4
    zero2: single.1 ddp.4 zero1.3 zero2.3 zero3.8 full.3
    zero3: *single.1 ddp.3 zero1.8 zero2.2 zero3.3 zero3.8 sharded.1 *model.2
    full: single.1 zero3.2 *hybrid.4 sharded.4 model.2
    sharded: *single.1 ddp.3 zero1.4 zero2.2 zero3.3 offload.1 *hybrid.2 full.4 model.3
    offload: ddp.1 zero3.4 sharded.3 *full.2
    hybrid: single.1 zero2.3 full.4 offload.3
    whole: *zero3.4 sharded.3 full.2 offload.4"""
PAIRS = [(sampled, pytest.param)["*" in to](name, by, int(ranks), id=f"{name}-by-{by}-{ranks}_ranks")
         for name, others in re.findall(r"(\w+): (.*)", MATRIX) for to, by, ranks in re.findall(r"(\*?)(\w+)\.(\d)", others)]


@pytest.mark.parametrize("name, by, ranks", PAIRS)
def test_any_program_continues_any(name, by, ranks, tmp_path):
    assert_near(saved(name), continued(saved(name), tmp_path, 5, by, ranks))


@pytest.mark.parametrize("name, by, ranks", [
    ("sharded", "ddp", 3), rest("zero3", "ddp", 4), rest("zero2", "zero3", 2), rest("zero3", "zero1", 4), rest("ddp", "zero2", 3),
    rest("ddp", "full", 3), rest("offload", "ddp", 2)])
def test_programs_that_take_turns_on_the_same_ranks_have_the_same_bits(name, by, ranks, tmp_path):
    """In rank order and without accumulation."""
    assert_same_files(saved(by, ranks), continued(saved(name, ranks), tmp_path, 5, by, ranks))


@pytest.mark.parametrize("name", ["zero1", rest("zero2"), rest("zero3"), rest("sharded")])
def test_shards_are_saved_the_same_in_strict_mode(name):
    """Right after an update, when parameters are being sent to the other ranks."""
    for step in 5, 10:
        assert_same_files(saved(name), saved(name, strict=True), step)


# ---- step 0 ----
@pytest.mark.parametrize("name, strict", [("sharded", True), *(rest(name, False) for name in PROGRAMS
                                                                if name not in ("single", "model", "sharded16"))])
def test_0_steps_save_what_training_would_begin_with(name, strict, tmp_path):
    assert_same_files(saved(name), continued(saved(name, None, "--steps 0"), tmp_path, 0, name, strict=strict))


@pytest.mark.parametrize("name, by, ranks", [("sharded", "single", 1), rest("zero3", "single", 1), rest("single", "zero3", 3)])
def test_step_0_is_continued_by_others(name, by, ranks, tmp_path):
    assert_near(saved(name), continued(saved(name, None, "--steps 0"), tmp_path, 0, by, ranks))


def test_hf_export_reads_shards(tmp_path):
    step_0 = saved("sharded", None, "--steps 0").checkpoint()
    assert (step_0 / "model-00003-of-00003.safetensors").exists()
    assert command(["build/hf_export", step_0, tmp_path / "hf"]).status == 0


# ---- 16 bits: master weights are also state, the model is rounded ----
@pytest.mark.rest
@pytest.mark.parametrize("name, by", [("zero3", "zero3"), ("zero3", "zero1"), ("zero3", "zero2"), ("zero3", "ddp"),
                                      ("sharded16", "sharded16")])
def test_bf16_is_continued_to_the_bit_in_rank_order(name, by, tmp_path):
    run = saved(name, 3, precision="bf16")
    assert_same_files(run, continued(run, tmp_path, 5, by, 3, precision="bf16"))


@pytest.mark.parametrize("name, by, ranks", [("zero3", "single", 1), rest("zero3", "zero2", 4), rest("sharded16", "zero3", 2),
                                             rest("sharded16", "single", 1)])
def test_bf16_is_continued_on_other_ranks_with_nearly_the_same_losses(name, by, ranks, tmp_path):
    run = saved(name, 3, precision="bf16")
    assert_near_losses(run, continued(run, tmp_path, 5, by, ranks, precision="bf16"))


# ---- damage is found by ranks that each read a part ----
CHANGED = "do not match their checksum"
FIRST, LAST = "optimizer-00001-of-00003.safetensors", "optimizer-00003-of-00003.safetensors"


def cut(path):
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize("name, ranks, file, damage, pattern, more", [
    ("zero3", 3, "optimizer.safetensors", 0.30, f'optimizer.safetensors: .*"m" {CHANGED}', ""),
    rest("zero3", 3, "optimizer.safetensors", 0.97, f'optimizer.safetensors: .*"v" {CHANGED}', ""),
    rest("zero3", 3, "model.safetensors", 0.50, f"model.safetensors: .*{CHANGED}", ""),
    rest("zero3", 3, "optimizer.safetensors", cut, "optimizer.safetensors", ""),
    ("sharded", 2, "optimizer-00002-of-00003.safetensors", os.remove, "optimizer-00002-of-00003.safetensors: .*No such file", ""),
    rest("sharded", 2, "model-00003-of-00003.safetensors", os.remove, "model-00003-of-00003.safetensors: .*No such file", ""),
    rest("sharded", 2, LAST, cut, LAST, ""),
    rest("sharded", 2, "model.safetensors.index.json", os.remove, "model.safetensors.index.json", ""),
    rest("sharded", 2, FIRST, 0.40, fr'optimizer-\*-of-00003.safetensors.*: .*"m" {CHANGED}', ""),
    # Every rank reads all of it where nothing, or no group of ranks, is sharded.
    *(rest("sharded", 2, "model-00002-of-00003.safetensors", 0.60, fr"model-\*-of-00003.safetensors.*: .*{CHANGED}", more)
      for more in ("", "--sharding none", "--sharding hybrid --shard-group 1"))],
    ids=["m", "v", "weights", "moments_end_early", "no_moments", "no_weights", "shard_ends_early", "no_index", "shards_m", "shards_weights",
         "not_sharded", "groups_of_1"])
def test_a_damaged_file_is_named_by_every_rank(name, ranks, file, damage, pattern, more, tmp_path):
    path = half(saved(name), tmp_path / "out") / "step_00000005" / file
    damage(path) if callable(damage) else flip(path, damage)
    run = train_by(functools.partial(in_folder, tmp_path / "out"), name, ranks, more, "--resume")
    assert_refused_by_all(run, ranks, f".*{pattern}")


# ---- ranks that cannot write, and ranks that die while they do ----
LARGE = (f"--eps 1e-5 --data {TOKENS} --val-data= --model d5 --heads 2 --seq-len 16 --batch-size 1 --warmup-steps 0 --lr-schedule constant "
         "--eval-every 0 --sample-every 0 --save-every 1 --keep 2")
SAVERS = {"zero": ("--channels 128 --zero-stage 3", "optimizer.safetensors"),
          "fsdp": ("--channels 160 --checkpoint sharded", "optimizer-00002-of-00002.safetensors")}
# A rank may write 5 MB to a file: enough for MPI's segments, too little for its shard of the moments. A larger write is an error, or,
# unless the signal is ignored, ends it.
LIMITED = 'ulimit -c 0; [ $0 != $OMPI_COMM_WORLD_RANK ] || { [ -n "$DIES" ] || trap "" XFSZ; ulimit -f 5000; }; exec "$@"'


@pytest.mark.parametrize("rank, dies", [(1, ""), rest(0, "yes"), rest(1, "yes")], ids=["has_no_space", "0_dies", "1_dies"])
@pytest.mark.parametrize("stage", [rest("zero"), "fsdp"])
def test_the_last_checkpoint_survives_a_rank_that_fails_in_a_save(stage, rank, dies, tmp_path):
    out, (how, file) = tmp_path / "out", SAVERS[stage]
    assert in_folder(out, stage, LARGE, how, "--steps 2", ranks=2).status == 0
    run = command(["bash", "-c", LIMITED, rank], [program(f"train_gpt2_{stage}")], LARGE, how, "--resume --steps 4",
                  ["--out", out], ranks=2, env={"DIES": dies})
    assert run.status not in (0, "no end"), run
    if not dies: assert re.search(f"^rank 1: error: .*{file}: cannot be written: File too large", run.err, re.M), run
    assert re.search("^rank {}: error: ".format(1 - rank), run.err, re.M), run # that the other has left or died, or that the folder is gone
    left = [x.name for x in out.iterdir() if x.name.startswith((".tmp_step", "step"))]
    assert sorted(left) == [*[".tmp_step_00000003"] * bool(dies), "step_00000001", "step_00000002"]
    for steps, ranks in (3, 3), (4, 1): # it loads, and then nothing half-written is left
        resumed(out, stage, LARGE, how, "--steps", steps, ranks=ranks)
    assert [*out.glob(".*")] == []
