"""What the tests of training runs share."""
import functools, json, math, re
from pathlib import Path
import pytest
from dev.lib import operation, operations
from suite import TINY, Stored, assert_close, assert_same, assert_same_metrics, command, half, program, train, trained


def sampled(*values, **options):
    """A row of a long table, of which CI runs a quarter."""
    return pytest.param(*values, marks=pytest.mark.sampled, **options)


def sizes(ranks, micro=1):
    """Of the runs that PyTorch has done, too: 16 sequences a step do not divide over 3 ranks, so there they are 12."""
    sequences = 12 if ranks == 3 else 16
    return f"--batch-size {sequences // ranks // micro} --total-batch-size {32 * sequences}"


def shard(elements, ranks):
    """1/ranks of them, up to a multiple of 16."""
    return -(-elements // (16 * ranks)) * 16


def skipped_steps(run):
    """The steps of which fp16 skipped some, but not all."""
    skipped = run.series("skipped")
    assert set(skipped) == {False, True}
    return skipped


def in_folder(folder, name, *options, ranks=None, precision="fp32", binary=None, **settings):
    """A run in a folder of the test's own."""
    run = command([binary or program(f"train_gpt2_{name}", precision)], *options, ["--out", folder], ranks=ranks, **settings)
    run.folder = Path(folder)
    return run


def newest(folder):
    """The last step of which it has a checkpoint."""
    return max((int(path.name[5:]) for path in folder.glob("step_*")), default=-1)


def resumed(*arguments, **settings):
    """Continues the run that is in_folder()'s."""
    run = in_folder(*arguments, "--resume", **settings)
    assert run.status == 0, run
    return run


def assert_pytorchs(run, name="pytorch_fp32"):
    __tracebackhide__ = True
    assert_close(Stored(name), run)
    assert_close(Stored(name), run, rtol=0, only="param_norm")


def assert_timeline_has_what_is_counted(run, trace, ranks_of):
    """In a timeline of one step the names of rank 0's operations say how many bytes it sends: as many as it has counted. ranks_of:
    how many take part, by the operation's name and the bytes of a number."""
    sent = 0
    for rank, _, name, step, _ in operations(trace):
        (kind, n, X) = operation(name)
        if rank == 0 and step in (None, 1) and kind not in ("receive", "barrier"):
            N = ranks_of(name, X)
            times = 1 if kind in ("send", "all-to-all-v") else 2 * (N - 1) / N if kind == "all-reduce" else N - 1
            sent += times * n * X
    assert sent and [round(sent)] == run.series("comm_bytes")


def assert_near_losses(a, b, rtol=1e-4):
    __tracebackhide__ = True
    assert_close(a, b, rtol=rtol, atol=0, only="loss")


def assert_same_files(a, b, step=None):
    """Both runs have the same metrics, and the same files in a checkpoint except state.json, which names the folder."""
    __tracebackhide__ = True
    assert_same_metrics(a, b)
    files, others = ({f.name: f.read_bytes() for f in run.checkpoint(step).iterdir() if f.name != "state.json"} for run in (a, b))
    assert files.keys() == others.keys()
    assert [name for name in files if files[name] != others[name]] == []


def assert_same_samples(a, b):
    """Also the same metrics, evaluations, weights and optimizer state."""
    __tracebackhide__ = True
    assert_same(a, b)
    texts = [re.findall(r"^sample after step \d+:\n(.*?)\n(?=step |saving |saved )", run.out, re.M | re.S) for run in (a, b)]
    assert texts[0] == texts[1] and len(texts[0]) == 2 and all(texts[0]) and len(b.series("val_loss")) > 2, b


def faulty(name, *options, ranks, timeout=60, **settings):
    """A run with a --fault that does not end well. Where a rank has to wait for another one in vain, it need not be so long."""
    run = train(name, "--check-every 1 --comm-timeout", timeout, *options, ranks=ranks, **settings)
    assert run.status not in (0, "no end"), run
    return run


# ---- runs that save steps 5 and 10 ----
# 48 sequences a step divide over 1, 2, 3, 4 and 8 replicas of the model; 10 steps are more than one epoch. FSDP's last group has
# one block.
SAVES = f"{TINY} --model d5 --heads 4 --total-batch-size 768 --steps 10 --eps 1e-5 --save-every 5 --deterministic"
PLAIN = "--quantise-weights none --quantise-gradients none" # zeropp rounds nothing on the way
MICRO_BATCHES = {"pp": 4, "3d": 4, "compress": 2}
PROGRAMS = { # the program, on so many ranks unless a test says otherwise, its options
    "single": ("single", 1, ""), "ddp": ("ddp", 3, ""), "zero1": ("zero", 8, "--zero-stage 1"),
    "zero2": ("zero", 2, "--zero-stage 2"),
    "zero3": ("zero", 4, "--zero-stage 3"), "muon1": ("muon", 3, ""), "muon3": ("muon", 4, "--zero-stage 3"),
    "full": ("fsdp", 3, "--wrap-blocks 2"), "model": ("fsdp", 3, "--wrap-blocks 0"),
    "sharded": ("fsdp", 3, "--checkpoint sharded --wrap-halves"), "whole": ("fsdp", 3, "--checkpoint sharded --wrap-blocks 0"),
    "offload": ("fsdp", 2, "--checkpoint sharded --cpu-offload all --sharding grad-op"),
    "hybrid": ("fsdp", 4, "--checkpoint sharded --sharding hybrid --shard-group 2"),
    "sharded16": ("fsdp", 3, "--checkpoint sharded --reduce-dtype model"),
    "tp2": ("tp", 4, "--tensor-parallel 2"), "tp4": ("tp", 4, "--tensor-parallel 4"), "pp2": ("pp", 4, "--pipeline-parallel 2"),
    "pp3": ("pp", 3, "--pipeline-parallel 3"), "pp4": ("pp", 4, "--pipeline-parallel 4"),
    "3x1x1z": ("3d", 3, "--mesh dp=3 --zero-stage 1"),
    "2x2x1": ("3d", 4, "--mesh dp=2,tp=2"), "1x2x2": ("3d", 4, "--mesh tp=2,pp=2"), "2x1x2": ("3d", 4, "--mesh dp=2,pp=2"),
    "2x1x2z": ("3d", 4, "--mesh dp=2,pp=2 --zero-stage 1"), "none": ("compress", 2, ""),
    "nodes": ("zeropp", 4, f"--node-ranks 2 {PLAIN}"), "heads": ("cp", 4, "--context-parallel 4"),
    "ring": ("cp", 4, "--context-parallel 2 --cp ring --cp-balance zigzag"),
    "gather": ("cp", 2, "--context-parallel 2 --cp allgather"),
    "2x2x2zs": ("3d", 8, "--mesh dp=2,tp=2,pp=2 --zero-stage 1 --sequence-parallel")}
# A method of compression from the fourth step on: with + behind it errors are fed back, with - they are not.
PROGRAMS |= {f"{method}{sign}": ("compress", 2, f"--compress {method} --compress-from 3 --{'no-' * (sign == '-')}error-feedback" +
                                 " --rank 2" * (method == "powersgd"))
             for method in ("bf16", "int8", "int4", "top-k", "sign", "powersgd") for sign in "+-"}


def train_by(verb, name, ranks, *more, **settings):
    which, usual, options = PROGRAMS[name]
    ranks = ranks or usual
    copies = ranks // math.prod(map(int, re.findall(r"(?:parallel |tp=|pp=)(\d)", options)))
    return verb(which, SAVES, "--batch-size", 48 // copies // MICRO_BATCHES.get(which, 1), options, *more, ranks=ranks, **settings)


def saved(name, ranks=None, *more, **settings):
    """A run without a break."""
    return train_by(trained, name, ranks, *more, **settings)


def resume(folder, name, ranks=None, *more, **settings):
    return train_by(functools.partial(in_folder, folder), name, ranks, *more, "--resume", **settings)


def continued(run, folder, step, name, ranks=None, *more, **settings):
    """A copy of the run as it was after a step is continued."""
    again = resume(half(run, folder, step), name, ranks, *more, **settings)
    assert again.status == 0 and f"step {step} of 10" in again.out, again
    return again


def header(path):
    """What a safetensors file says of its tensors and of itself."""
    data = path.read_bytes()
    return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
