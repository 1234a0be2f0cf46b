"""build/advise: what it says of made-up diagnoses, each loss with its advice, and of what is none; and of a run's own
metrics.jsonl. (test/unit/test_diagnosis.c has the arithmetic of the causes.)"""
import copy, json
import pytest
from suite import TOKENS, assert_refused, assert_says, command, program, succeeds, trained

NOTHING = {"total": 100, "computing": 0, "rest": 0, "exposed": {}, "bubble": 0, "waiting": 0, "data": 0, "communication": {},
           "per_token": 0}


def advise(path, start=succeeds):
    return start([program("advise"), path])


def metrics(folder, mean={}, others={}, slowest={}, options={}, **found):
    """A metrics.jsonl whose diagnosis has these ms of a step of 100, of which 50 are computing. found: also program, precision and
    sent."""
    about = {"world_size": 4, "program": found.pop("program", "train_gpt2_x"), "precision": found.pop("precision", "fp32"),
             "predicted_comm_bytes": found.pop("sent", 3.2e6), "options": {"batch-size": 16, **options}}
    diagnosis = {"from": 2, "to": 4, "artificial": "", "local_ranks": 4, "cores": 4, "micro_batches": 2, "stages": 4,
                 "tokens_per_step": 1000,
                 "single_tokens_per_second": None, "scaling_efficiency": None, "slowest_rank": 3,
                 "mean": NOTHING | {"computing": 50} | mean,
                 "others": NOTHING | {"computing": 50} | others, "slowest": NOTHING | {"computing": 50} | slowest, **found}
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"run": about}, {"step": 1, "loss": 5}, {"diagnosis": diagnosis})))
    return path


def advice(*arguments, **found):
    lines = advise(metrics(*arguments, **found)).out.splitlines()
    return [line.split(": ", 1)[1] for line in lines if line.startswith(("below 60 %, try first: ", "  then: "))]


def assert_advice(said, *parts):
    assert len(said) == len(parts) and all(part in line for part, line in zip(parts, said)), said


@pytest.mark.parametrize("mean, found, pieces", [
    ({"computing": 61, "bubble": 39}, {}, 0), ({"computing": 61, "bubble": 39}, {"scaling_efficiency": 0.6}, 0),
    ({"computing": 59, "bubble": 39}, {"scaling_efficiency": 0.6}, 1),
    ({"computing": 61, "bubble": 39}, {"scaling_efficiency": 0.59}, 1),
    ({"computing": 61, "bubble": 9, "data": 9}, {"scaling_efficiency": 0.59, "others": {"rest": 9}}, 3)]) # none stands out
def test_there_is_no_advice_where_enough_is_computed(mean, found, pieces, tmp_path):
    assert len(advice(tmp_path, mean, **found)) == pieces
    assert ("\nall figures reach 60 %" in advise(metrics(tmp_path, mean, **found)).out) == (pieces == 0)


# 4 x 60 ms and still 40 are 280
@pytest.mark.parametrize("mean, others, found, says", [
    # the slowest rank's also counts in the mean
    ({"rest": 45, "data": 20}, {"rest": 40}, {}, "rest: a rank slept or had no core for 40.0 of 100.0 ms"),
    ({"rest": 45}, {"rest": 40}, {"cores": 2},
     "cores: 4 ranks share 2, and a rank had none for 40.0 of 100.0 ms; start 2 ranks here"),
    ({"rest": 45}, {"rest": 40}, {"cores": 0}, "rest: a rank slept or had no core for 40.0 of 100.0 ms"), # GPUs
    ({"waiting": 30}, {"waiting": 40}, {"slowest": {"computing": 80, "data": 10}},
     "slowest rank: ranks wait for slower ones for 40.0 of 100.0 ms, and rank 3"
     " least; a step keeps it busy for 90.0 ms and the others for 50.0"),
    ({"bubble": 40}, {}, {},
     "bubble: stages wait for 40.0 of 100.0 ms, with 2 micro-batches on 4 stages; with 8 (--total-batch-size 4000) it is as long,"
     " and 14 % of a step instead of 40"),
    ({"data": 40}, {}, {}, "data: steps wait for it for 40.0 of 100.0 ms; put --data on a faster disk"),
    ({}, {"waiting": 37}, {"single_tokens_per_second": 1e6 / 48},
     "computing: a rank computes for 50.0 ms, and a perfect share of one rank's step is 12.0")])
def test_the_largest_loss_comes_first(mean, others, found, says, tmp_path):
    assert_advice(advice(tmp_path, mean, others, **found), says)


def test_communication_is_hidden_then_outweighed_then_compressed(tmp_path):
    mean = {"computing": 10, "exposed": {"dp": {"all-reduce": 12}}, "communication": {"dp": 15}, "per_token": 5}
    waiting = {"waiting": 11} # less than what is exposed
    # 10 / 25 = 40 %; 40 / (40 + 10 + 4 x 5); 10 / (10 + 7.5)
    exposed = "overlap: 12.0 of 15.0 ms of communication are exposed, most along dp; 10.0 ms of computing could hide some: "
    size = ("size: a rank computes for 10.0 ms and sends 3.2 MB; with 4 times the tokens (--batch-size 64) gradients are as many, "
            "and compute /"
            " (compute + communication) would be up to 57 %")
    compress = "compress: make PRECISION=bf16 sends half of the 3.2 MB, and with as much computing that figure would be 57 %"
    assert_advice(advice(tmp_path, mean, waiting), exposed + "no option would hide more", size, compress)
    hybrid = {"ddp": "naive", "overlap": False, "compress": "signsgd"} # nothing of tp's, and no method that sends less
    assert_advice(advice(tmp_path, mean, waiting, options=hybrid), exposed + "take --ddp bucketed", size)
    mean["exposed"] = {"dp": {"all-reduce": 3}}
    assert_advice(advice(tmp_path, mean, options={"compress": "powersgd"}), "overlap: it is good, only 3.0 of 15.0 ms", size,
                  "compress: half of --rank sends about half of the 3.2 MB")
    # what grows with the tokens does not become less by more of them: 40 / (40 + 4 x 4 + 2 x 11)
    mean |= {"exposed": {"dp": {"all-reduce": 3}, "tp": {"all-reduce": 9}}, "communication": {"tp": 11, "dp": 4}, "per_token": 11}
    assert_advice(advice(tmp_path, mean, options={"overlap": False}), exposed.replace("dp", "tp") + "leave out --no-overlap",
                  "activations take longest, but twice the channels compute 4 times as much and send twice, and compute / "
                  "(compute + communication)"
                  " would be up to 51 %", compress)
    # a larger loss comes before
    assert_advice(advice(tmp_path, mean, {"waiting": 60}), "slowest rank", "overlap", "size", "compress")


@pytest.mark.parametrize("found, hides, halves", [
    ({"options": {"ddp": "bucketed"}}, "a smaller --bucket-mb begins earlier", "make PRECISION=bf16 sends"),
    ({"program": "train_gpt2_ddp", "precision": "bf16"}, "no option would hide more",
     "16 bits already; train_gpt2_compress --compress int8 sends"),
    ({"program": "train_gpt2_zero", "precision": "fp16"}, "train_gpt2_fsdp gathers a block ahead",
     "numbers have 16 bits already; 8 would be"),
    ({"options": {"prefetch": "none", "compress": "none"}}, "take --prefetch backward-pre", "--compress bf16 sends"),
    ({"options": {"prefetch": "backward-pre", "compress": "none"}, "precision": "bf16"}, "no option would hide more",
     "--compress int8 sends"),
    ({"options": {"compress": "int8"}}, "no option would hide more", "--compress int4 sends"),
    ({"options": {"compress": "top-k"}}, "no option would hide more", "half of --top-k-fraction sends")])
def test_options_that_help_are_those_that_the_run_has_not_taken(found, hides, halves, tmp_path):
    mean = {"computing": 10, "exposed": {"dp": {"all-reduce": 12}}, "communication": {"dp": 15}}
    assert_advice(advice(tmp_path, mean, **found), hides, "size", halves)


def test_a_run_names_the_command_that_gives_its_advice():
    run = trained("ddp", f"--data {TOKENS} --val-data= --model d2 --heads 2 --channels 32 --seq-len 32 --batch-size 4 --steps 8 "
                         "--eval-every 0 "
                  "--sample-every 0 --save-every 0", ranks=2)
    path = run.folder / "metrics.jsonl"
    assert_says(run.said, f"^advice     python3 dev/tools/advise.py {path} says what to try first$")
    said, found = advise(path).out, run.lines[-1]["diagnosis"]
    assert_says(said, f"^ms of a step, means of 2 ranks and steps 2 to 8; a step takes {found['mean']['total']:.2f}$",
                rf"^  computing +{found['mean']['computing']:.2f} .* the rest of a step", "^(all figures reach|below) 60 %")


def test_blank_lines_change_nothing(tmp_path):
    path = metrics(tmp_path)
    said = advise(path).out
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert advise(path).out == said


DAMAGED = {"empty": ("", "is no metrics.jsonl"), "text": ("x\n", "a line is no JSON object"),
           "list": ("[]\n", "a line is no JSON object"),
           "other": ('{"loss": 1}\n', "is no metrics.jsonl"),
           "one rank": ('{"run": {"options": {}}}\n', "has no diagnosis, as of one rank or one step"),
           "old": ('{"run": {"options": {}}}\n{"diagnosis": {}}\n', "a number of its diagnosis is missing"),
           "no object": ('{"run": {"options": []}}\n', "is no metrics.jsonl")}


@pytest.mark.parametrize("text, says", DAMAGED.values(), ids=DAMAGED)
def test_what_has_no_diagnosis_is_refused(text, says, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert_refused(advise(tmp_path / "metrics.jsonl", start=command), says)
    assert_refused(advise(tmp_path / "nowhere", start=command), "cannot be opened")


def test_a_diagnosis_that_lacks_a_number_is_refused(tmp_path):
    lines = [json.loads(line) for line in metrics(tmp_path, {"rest": 45}, {"rest": 40}).read_text().splitlines()]
    for name in lines[2]["diagnosis"]:
        damaged = copy.deepcopy(lines)
        del damaged[2]["diagnosis"][name]
        (tmp_path / "damaged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in damaged))
        assert "Traceback" not in advise(tmp_path / "damaged.jsonl", start=command).err
