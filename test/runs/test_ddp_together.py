"""What the ranks of DDP send: as many bytes as the formula says, during the backward pass where they have buckets."""
import json, re
import pytest
from suite import TOKENS, assert_as_predicted, once, rest, trained

SMALL = (f"--data {TOKENS} --val-data= --model d2 --heads 2 --channels 16 --seq-len 16 --total-batch-size 512 --lr 3e-3 "
         "--warmup-steps 5 --eval-every 0 --sample-every 0")
BUCKETS = "--bucket-mb 0.01"
THREE = "--total-batch-size 384" # 24 sequences a step divide over 3 ranks


@pytest.mark.parametrize("ranks, micro, options", [
    (1, 1, ""), (2, 1, ""), (3, 1, THREE), (4, 1, ""), (4, 4, ""), (4, 4, "--ddp naive"), rest(1, 4, ""), rest(2, 4, "")],
    ids=["1_rank", "2_ranks", "3_ranks", "4_ranks", "4_ranks-4_micro", "4_ranks-4_micro-naive", "1_rank-4_micro", "2_ranks-4_micro"])
def test_a_step_sends_2p_n_minus_1_over_n_elements_and_the_loss(ranks, micro, options):
    run = trained("ddp", SMALL, BUCKETS, options, "--steps 3 --batch-size", (24 if ranks == 3 else 32) // ranks // micro, ranks=ranks)
    parameters = (384 + 16 + 2) * 16 + 2 * (12 * 16**2 + 13 * 16)
    assert run.series("comm_bytes") == [2 * (ranks - 1) * (4 * parameters + 8) // ranks] * 3 # the loss is a double
    assert_as_predicted(run)


@pytest.mark.parametrize("options, caller, during", [(BUCKETS, "grad_ready", True), ("--ddp naive", "gpt2_reduce_naive", False)],
                         ids=["buckets", "naive"])
def test_buckets_are_issued_during_the_backward_pass_and_naive_sums_after_it(options, caller, during):
    path = once(f"timeline of {options}", lambda place: None) / "trace.json"
    trained("ddp", SMALL, "--batch-size 16 --steps 2", options, "--trace", path, ranks=2)
    events = json.loads(path.read_text())["traceEvents"]
    for rank in 0, 1:
        of_rank = [e for e in events if e.get("pid") == rank]
        sums = [i for i, e in enumerate(of_rank) if e.get("args", {}).get("caller") == caller and e["args"]["step"] == 2]
        issues = [of_rank[i + 1]["ts"] for i in sums] # the event of its issue follows an operation's
        assert sums and all(of_rank[i + 1]["name"] == "issued" for i in sums)
        end = max(e["ts"] + e["dur"] for e in of_rank if re.match("backward", e["name"]) and e["args"]["step"] == 2)
        assert (min(issues) < end) == during
