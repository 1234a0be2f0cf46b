"""experiments/exercises.py: a mistake is made, and what it does is shown as the chapters quote it."""
import pytest
from suite import Stored, assert_refused, assert_says, command, succeeds

SCRIPT = "python3 -m experiments exercises"
NORM = f"{Stored('ddp/ranks_1').series('grad_norm')[0]:.4f}"


@pytest.mark.rest
def test_mistakes_are_made_one_after_another_and_earlier_runs_are_kept(tmp_path):
    file = tmp_path / "exercises.jsonl"
    assert_says(succeeds(SCRIPT, ["--into", file, "pp norm-of-a-stage"]).out, r"^\| norm-of-a-stage \| 5\.7720 \|",
                "^ *bytes .* 16 bytes less than predicted$", no=[rf"\| {NORM} \|"])
    assert_says(succeeds(SCRIPT, ["--into", file], "pp, pp --rounds 2").out,
                rf"^(\| no mistake \| 5\.7720 \| .* \| {NORM} \| .*\n){{3}}", no=["than predicted"])
    assert_says(succeeds(SCRIPT, ["--from", file], "--digits 2 --steps 20 pp norm-of-a-stage, pp").out,
                r"^\| step 20 \| loss \| grad norm \|$", r"^\| norm-of-a-stage \| 3\.\d\d \| 1\.\d\d \|\n\| no mistake ")


def test_what_is_not_there_is_refused(tmp_path):
    assert_refused(command(SCRIPT, "ddp forget-it"), "list.toml has no 'forget-it'")
    assert_refused(command(SCRIPT, "ddq"), "there is no program 'ddq'; there are ddp, zero")
    assert_refused(command(SCRIPT, "--from doc/results/exercises.jsonl ddp forget-it"), "there is no run 'ddp forget-it'")
