"""What the tests of one device, DDP, ZeRO and FSDP share."""
import re
from pathlib import Path
import pytest
from suite import assert_close, assert_same_metrics, command, program, train


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


def samples(run):
    """The text that a run has sampled, twice."""
    found = re.findall(r"^sample after step \d+:\n(.*?)\n(?=step |saved )", run.out, re.M | re.S)
    assert len(found) == 2 and all(found), run
    return found


def skipped_steps(run):
    """The steps of which fp16 skipped some, but not all."""
    skipped = run.series("skipped")
    assert set(skipped) == {False, True}
    return skipped


def in_folder(folder, stage, *options, ranks=None, precision="fp32", **settings):
    """A run in a folder of the test's own."""
    run = command([program(f"train_gpt2_{stage}", precision)], *options, ["--out", folder], ranks=ranks, **settings)
    run.folder = Path(folder)
    return run


def resumed(*arguments, **settings):
    """Continues the run that is in_folder()'s."""
    run = in_folder(*arguments, "--resume", **settings)
    assert run.status == 0, run
    return run


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


def assert_lost(stage, pattern, *options, ranks=4):
    """The run with a --fault ends in error, and the ranks 0 and 3 name it."""
    run = train(stage, *options, ranks=ranks, timeout=120)
    assert run.status not in (0, "no end"), run
    for rank in 0, 3:
        assert re.search(f"^rank {rank}: error: .*{pattern}", run.err, re.M), f"rank {rank} does not say {pattern!r}: {run}"
