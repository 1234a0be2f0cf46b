"""Checkpoints of all programs, whole and sharded: every program on any number of ranks and any mesh continues every other's.
Whatever goes wrong while ranks write or read their shards, the last good checkpoint stays, and all ranks end."""
import json, os, re, shutil
import pytest
from shards import PROGRAMS, assert_near_losses, assert_same_files, continued, header, in_folder, resume, resumed, sampled, saved
from suite import TINY, assert_close, assert_refused_by_all, assert_same, command, flip, half, program, rest

LONG = 6
def assert_near(a, b):
    """A sharded checkpoint's weights are compared where it is continued."""
    __tracebackhide__ = True
    if all((run.checkpoint() / "model.safetensors").exists() for run in (a, b)): return assert_close(a, b)
    for field in "loss", "grad_norm", "param_norm":
        assert_close(a, b, only=field)


# ---- any loads any ----
MESHES = "tp4", "pp3", "3x1x1z", "2x2x1", "1x2x2", "2x1x2z", "2x2x2zs"
OWN = ["zero3", "muon1", "sharded", "offload", "tp2", "pp2", "ring",
       *map(sampled, ("single", "ddp", "zero1", "zero2", "muon3", "full", "hybrid", "whole", "heads", "gather", "nodes", *MESHES))]


def places(run):
    """The names, shapes and places of all tensors of its last checkpoint."""
    return {path.name: header(path) | {"__metadata__": None} for path in run.checkpoint().glob("*.safetensors")}


@pytest.mark.parametrize("name", OWN)
def test_every_program_trains_as_one_device_and_continues_its_own_to_the_bit(name, tmp_path):
    alone = saved("muon1", 1) if name in ("muon1", "muon3") else saved("single")
    assert_near(alone, saved(name))
    if "sharded" not in PROGRAMS[name][2]: assert places(alone) == places(saved(name))
    assert_same_files(saved(name), continued(saved(name), tmp_path, 5, name))


# Saved by one, continued by others on so many ranks. make test runs those with a *.
MATRIX = """
    single: ddp.3 zero1.8 zero2.3 *zero3.4 sharded.3 *tp2.4 *pp2.4 tp4.4 pp3.3 3x1x1z.3 2x2x1.4 1x2x2.4 2x1x2z.4 2x2x2zs.8 *ring.4 heads.4 nodes.4
    ddp: single.1 zero1.2 zero2.4 zero3.8 offload.2 full.4 2x2x2zs.8 heads.4
    zero1: single.1 ddp.8 zero1.1 zero2.4 zero3.2 hybrid.4 gather.2
    zero2: single.1 ddp.4 zero1.3 zero2.3 zero3.8 full.3 ring.4
    zero3: *single.1 ddp.3 zero1.8 zero2.2 zero3.3 zero3.8 sharded.1 *model.2 pp2.4 ring.4
    full: single.1 zero3.2 *hybrid.4 sharded.4 model.2 tp2.4 heads.4
    sharded: *single.1 ddp.3 zero1.4 zero2.2 zero3.3 offload.1 *hybrid.2 full.4 model.3 gather.4
    offload: ddp.1 zero3.4 sharded.3 *full.2
    hybrid: single.1 zero2.3 full.4 offload.3
    whole: *zero3.4 sharded.3 full.2 offload.4
    tp2: *single.1 full.4 tp2.2 ring.4
    muon1: *muon3.2 muon1.1 muon3.8
    muon3: muon1.8 muon1.1 muon3.3
    tp4: single.1
    pp2: *single.1 tp4.4 ring.2
    pp3: single.1 zero3.3
    3x1x1z: single.1
    2x2x1: single.1 2x1x2z.4
    1x2x2: single.1
    2x1x2z: single.1
    2x2x2zs: single.1 ddp.3 heads.4
    none: ring.4
    nodes: *single.1 zero3.2 sharded.3
    heads: single.1 ring.4 zero1.2 2x2x2zs.8
    gather: ddp.3 full.2 pp2.4 none.2
    ring: *single.1 heads.4 gather.2 zero2.4 zero3.3 sharded.3 tp2.4"""
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


# ---- Muon has another state than AdamW ----
def test_each_matrix_of_a_block_has_a_momentum_and_every_other_tensor_m_and_v():
    names = {*header(saved("muon1").checkpoint() / "optimizer.safetensors")} - {"__metadata__"}
    matrices = {name for name, x in saved("muon1").weights().items() if name.startswith("h.") and x.ndim == 2}
    others = {*saved("muon1").weights()} - matrices
    assert len(matrices) == 20 and names == {f"momentum.{name}" for name in matrices} | {
        f"{moment}.{name}" for name in others for moment in "mv"}


@pytest.mark.parametrize("name, by, optimizers", [
    ("muon1", "zero3", ("Muon", "AdamW")), ("zero3", "muon1", ("AdamW", "Muon")), rest("muon3", "zero2", ("Muon", "AdamW")),
    rest("single", "muon3", ("AdamW", "Muon"))])
def test_muon_and_adamw_do_not_continue_each_other_and_say_what_does(name, by, optimizers, tmp_path):
    said = "has the state of {}, and this program trains with {}; --init-from loads the weights alone".format(*optimizers)
    assert_refused_by_all(resume(half(saved(name), tmp_path), by), PROGRAMS[by][1], f"--resume: .*step_00000005 {said}")
    weights = saved(by, None, ["--init-from", saved(name).checkpoint(5)], "--steps 0").checkpoint()
    assert (weights / "model.safetensors").read_bytes() == (saved(name).checkpoint(5) / "model.safetensors").read_bytes()


# Runs that form the same sums are the same to the bit.
@pytest.mark.sampled
@pytest.mark.parametrize("name, by, options", [
    ("pp2", "pp2", "--schedule zb-h1"), ("pp2", "pp2", "--schedule interleaved"), ("pp2", "pp2", "--recompute block"),
    ("pp3", "pp4", ""),
    ("pp3", "pp3", "--split 3,2,0"), ("2x2x1", "2x2x1", "--zero-stage 1"), ("2x1x2z", "2x1x2", "--mesh pp=2,dp=2"),
    ("1x2x2", "1x2x2", "--schedule interleaved")], ids=["zb-h1", "interleaved", "recomputed", "more", "split", "zero", "outside",
                                                        "chunks"])
def test_other_schedules_splits_and_shards_continue_to_the_bit(name, by, options, tmp_path):
    assert_same(saved(name), continued(saved(name), tmp_path, 5, by, None, options))


@pytest.mark.parametrize("name", ["zero1", rest("zero2"), rest("zero3"), rest("muon1"), rest("sharded")])
def test_shards_are_saved_the_same_in_strict_mode(name):
    """Right after an update, when parameters are being sent to the other ranks."""
    for step in 5, 10:
        assert_same_files(saved(name), saved(name, strict=True), step)


# ---- step 0 ----
@pytest.mark.parametrize("name, strict", [("sharded", True), *(rest(name, False) for name in (
    "ddp", "zero1", "zero2", "zero3", "muon1", "muon3", "full", "whole", "offload", "hybrid", "tp4", "pp2", "2x2x2zs", "ring"))])
def test_0_steps_save_what_training_would_begin_with(name, strict, tmp_path):
    assert_same_files(saved(name), continued(saved(name, None, "--steps 0"), tmp_path, 0, name, strict=strict))


def test_hf_export_reads_shards(tmp_path):
    step_0 = saved("sharded", None, "--steps 0").checkpoint()
    assert (step_0 / "model-00003-of-00003.safetensors").exists()
    assert command(["build/hf_export", step_0, tmp_path / "hf"]).status == 0


# ---- 16 bits: master weights are also state, the model is rounded ----
@pytest.mark.rest
@pytest.mark.parametrize("name, by, ranks", [
    *(("zero3", by, 4) for by in ("zero3", "zero1", "zero2", "ddp")), ("muon1", "muon3", 3),
    ("sharded16", "sharded16", 3), ("tp2", "tp2", 4),
    ("pp2", "pp2", 4),
    ("ring", "ring", 4), ("2x2x2zs", "2x2x2zs", 8)])
def test_bf16_is_continued_to_the_bit_in_rank_order(name, by, ranks, tmp_path):
    run = saved(name, precision="bf16")
    assert_same_files(run, continued(run, tmp_path, 5, by, ranks, precision="bf16"))


@pytest.mark.parametrize("name, by, ranks", [
    ("zero3", "single", 1), *(rest(*row) for row in (
        ("zero3", "zero2", 3), ("muon3", "muon1", 2), ("sharded16", "zero3", 2), ("sharded16", "single", 1),
        ("tp2", "tp4", 4), ("tp2", "ddp", 3),
        ("pp2", "pp4", 4), ("2x2x2zs", "1x2x2", 4), ("2x2x2zs", "ddp", 3)))])
def test_bf16_is_continued_on_other_ranks_with_nearly_the_same_losses(name, by, ranks, tmp_path):
    run = saved(name, precision="bf16")
    assert_near_losses(run, continued(run, tmp_path, 5, by, ranks, precision="bf16"))


# ---- a checkpoint that was moved to another disk, and linked back ----
@pytest.mark.parametrize("name, ranks", [("single", None), rest("fsdp", 2)])
def test_pruning_unlinks_a_link_and_leaves_what_it_leads_to(name, ranks, tmp_path):
    """test/kernels/check_host.py has links in every place."""
    out, archive, run = tmp_path / "out", tmp_path / "archive", [name, TINY, "--batch-size 8 --save-every 1 --keep 2"]
    assert in_folder(out, *run, "--steps 2", ranks=ranks).status == 0
    (out / "step_00000001").rename(archive)
    (out / "step_00000001").symlink_to(archive)
    before = {path.name: path.read_bytes() for path in archive.iterdir()}
    for steps in 3, 4: resumed(out, *run, "--steps", steps, ranks=ranks)
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == before
    assert sorted(path.name for path in out.iterdir()) == ["metrics.jsonl", "step_00000003", "step_00000004"]


# ---- what a run counts and keeps ----
@pytest.mark.parametrize("name", ["ddp", rest("zero"), rest("fsdp")])
def test_tokens_are_counted_by_what_each_step_had(name, tmp_path):
    """Even if the checkpoint is older than this count: then all earlier steps are assumed to have been as large."""
    run = [name, TINY, "--seq-len 16 --batch-size 4 --total-batch-size 0"]
    assert in_folder(tmp_path, *run, "--steps 3", ranks=2).status == 0
    shutil.copytree(tmp_path, tmp_path / "old")
    again = resumed(tmp_path, *run, "--steps 4", ranks=4)
    assert again.series("tokens") == [128, 256, 384, 640]
    assert json.loads((again.checkpoint() / "state.json").read_text())["tokens"] == 640
    forget(tmp_path / "old/step_00000003/state.json", "tokens")
    assert resumed(tmp_path / "old", *run, "--steps 5", ranks=4).series("tokens") == [128, 256, 384, 1024, 1280]


def forget(path, member):
    """Leaves a member out of a state.json, and updates its checksum (llmc/base/checksum.h)."""
    floats, mask, total = [], (1 << 64) - 1, 0 # numbers as C prints them
    fields = json.loads(path.read_text(), parse_float=lambda text: floats.append(text) or f"@{len(floats) - 1}@")
    fields = {key: value for key, value in fields.items() if key not in (member, "checksum_of_this")}

    def text():
        return re.sub(r'"@(\d+)@"', lambda at: floats[int(at[1])], json.dumps(fields, sort_keys=True, separators=(",", ":")))
    for place, byte in enumerate(text().encode()):
        x = (place + 1) * 0x9E3779B97F4A7C15 & mask ^ byte
        for _ in range(2): x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & mask
        total += x ^ x >> 32
    fields["checksum_of_this"] = f"{total & mask:016x}"
    path.write_text(text())


# ---- damage is found by ranks that each read a part ----
CHANGED = "do not match their checksum"


@pytest.mark.parametrize("name, ranks, file, damage, pattern, more", [
    ("zero3", 3, "optimizer.safetensors", 0.30, f'optimizer.safetensors: .*"m" {CHANGED}', ""),
    rest("muon1", 3, "optimizer.safetensors", 0.80, f'optimizer.safetensors: .*"momentum" {CHANGED}', ""),
    rest("zero3", 3, "model.safetensors", 0.50, f"model.safetensors: .*{CHANGED}", ""),
    ("sharded", 2, "optimizer-00002-of-00003.safetensors", os.remove, "optimizer-00002-of-00003.safetensors: .*No such file", ""),
    rest("sharded", 2, "optimizer-00001-of-00003.safetensors", 0.40, fr'optimizer-\*-of-00003.safetensors.*: .*"m" {CHANGED}', ""),
    # If nothing is sharded, or in groups of one rank, every rank reads the whole file.
    *(rest("sharded", 2, "model-00002-of-00003.safetensors", 0.60, fr"model-\*-of-00003.safetensors.*: .*{CHANGED}", more)
      for more in ("", "--sharding hybrid --shard-group 1")),
    ("tp2", 4, "model.safetensors", 0.5, f"model.safetensors: .*{CHANGED}", ""),
    rest("pp2", 4, "optimizer.safetensors", 0.97, f"optimizer.safetensors: .*{CHANGED}", ""),
    rest("2x1x2z", 4, "optimizer.safetensors", 0.5, f"optimizer.safetensors: .*{CHANGED}", "")])
def test_a_damaged_file_is_named_by_every_rank(name, ranks, file, damage, pattern, more, tmp_path):
    """test/kernels/check_host.py damages files in every way and place."""
    path = half(saved(name), tmp_path / "out") / "step_00000005" / file
    damage(path) if callable(damage) else flip(path, damage)
    assert_refused_by_all(resume(tmp_path / "out", name, ranks, more), ranks, f".*{pattern}")


# ---- ranks that cannot write, and ranks that die while they do ----
LARGE = (f"{TINY} --model d5 --batch-size 1 --total-batch-size 0 --eps 1e-5 --warmup-steps 0 --lr-schedule constant "
         "--save-every 1 --keep 2")
SAVERS = {"zero": ("--channels 128 --zero-stage 3", "optimizer.safetensors"),
          "compress": ("--channels 120 --compress int8 --error-feedback", "errors_int8_00001_of_00002.safetensors"),
          "fsdp": ("--channels 160 --checkpoint sharded", "optimizer-00002-of-00002.safetensors")}
# A rank may write 5 MB to a file: enough for MPI's segments, which Open MPI 5 otherwise makes larger, too little for its shard of
# the
# moments or its errors. A larger write is an error, or, unless the signal is ignored, ends it.
LIMITED = 'ulimit -c 0; [ $0 != $OMPI_COMM_WORLD_RANK ] || { [ -n "$DIES" ] || trap "" XFSZ; ulimit -f 5000; }; exec "$@"'


@pytest.mark.parametrize("rank, dies", [(1, ""), rest(0, "yes"), rest(1, "yes")], ids=["has_no_space", "0_dies", "1_dies"])
@pytest.mark.parametrize("name", [rest("zero"), rest("compress"), "fsdp"])
def test_the_last_checkpoint_survives_a_rank_that_fails_in_a_save(name, rank, dies, tmp_path):
    out, (how, file) = tmp_path / "out", SAVERS[name]
    assert in_folder(out, name, LARGE, how, "--steps 2", ranks=2).status == 0
    run = command(["bash", "-c", LIMITED, rank], [program(f"train_gpt2_{name}")], LARGE, how, "--resume --steps 4",
                  ["--out", out], ranks=2, env={"DIES": dies, "OMPI_MCA_btl_sm_segment_size": 4 << 20})
    assert run.status not in (0, "no end"), run
    if not dies: assert re.search(f"^rank 1: error: .*{file}: cannot be written: File too large", run.err, re.M), run
    # the other rank has left or died, or the folder is gone
    assert re.search("^rank {}: error: ".format(1 - rank), run.err, re.M), run
    left = [x.name for x in out.iterdir() if x.name.startswith((".tmp_step", "step"))]
    assert sorted(left) == [*[".tmp_step_00000003"] * bool(dies), "step_00000001", "step_00000002"]
    for steps, ranks in (3, 3), (4, 1): # it loads, and then nothing half-written is left
        resumed(out, name, LARGE, how, "--steps", steps, ranks=ranks)
    assert [*out.glob(".*")] == []
