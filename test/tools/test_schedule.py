"""Pipeline schedules played in time: their bubbles and activations are those of the papers' formulas. build/schedule: what it draws
and prints of schedules whose times are known, and of a run's timeline. (test/unit/test_pipeline.c has the orders.)"""
import itertools, json, re
import xml.etree.ElementTree as xml
import pytest
from rows import rows_of
from suite import ROOT, TOKENS, assert_refused, assert_says, command, program, rest, succeeds, trained
from schedule_play import SCHEDULES, Pipeline, play

D8 = "--model d8 --heads 4 --channels 16 --seq-len 16 --batch-size 2"


def said(*options):
    return succeeds(program("schedule"), *options).out


# ---- in time ----
RATIOS = (1, 1, 1), (1, 1.2, 0.8), (1, 1.3, 1), (1, 0.9, 1.1), (20, 24, 16) # F, I, W of all chunks of a rank
P, M, V = 8, 32, 4 # at most


def played(schedule, p, m, v, times):
    """A step of a balanced pipeline, and its bubble in units of the mean action."""
    l = Pipeline(schedule, p, m, v)
    y = play((ROOT / program("schedule")).parent, l, times, [[t / v for t in times]] * (p * v))
    assert all(rank["busy"] == pytest.approx(m * sum(times)) for rank in y["ranks"])
    return y, y["step"] - m * sum(times)


def near(x, work): return pytest.approx(x, abs=1e-9 * work)


@pytest.mark.parametrize("times", RATIOS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubbles_are_those_of_the_papers(schedule, times):
    work = sum(times)
    is_interleaved = schedule == "interleaved"
    for p, m, v in itertools.product(range(1 + is_interleaved, P + 1), range(1, M + 1), range(2, V + 1) if is_interleaved else [1]):
        if is_interleaved and m % p: continue
        y, bubble = played(schedule, p, m, v, times)
        assert all(rank["peak"] == rank["slots"] for rank in y["ranks"])
        if schedule == "zb-h1" and m < p: continue # the paper has no formula
        assert bubble == near(y["bubble"], work * m), (p, m, v)
        # As a share of the step: (p-1)/(m+p-1), of interleaved (p-1)/(vm+p-1), of zb-h1 at equal times (p-1)/(3m+p-1).
        if schedule != "zb-h1" or times == (1, 1, 1):
            assert bubble / y["step"] == near((p - 1) / ((3 if schedule == "zb-h1" else v) * m + p - 1), 1e-3)


# ---- build/schedule ----
@rows_of(r"""
--p 2 --m 2 => ^rank 0   \|F0-F1-\.{6}B0----\.{3}B1----\|$ ~ ^rank 1   \|\.{3}F0-B0----F1-B1----\.{6}\|$ ~ ^step 9 ms: 6 ms of work ~
    ^bubble as played +3 ms +33.33 % of the step +50.00 % of the work$ ~ ^bubble by the formula +3 ms +33.33 % of the step +50.00 % ~
    ^rank 0 +6 +3 +66.7% +2 micro-batches +2$ ~ ^rank 1 +6 +3 +66.7% +1 micro-batch +1$
--p 2 --m 2 --schedule interleaved => \|F0--F1--F0 ~ ^bubble as played +1.5 ms ~ ^bubble by the formula +1.5 ms
--p 2 --m 2 --schedule zb-h1 => ^rank 0   \|F0-F1-\.{3}I0-W0-I1-W1-\|$ ~ ^bubble as played +1 ms ~ ^bubble by the formula +1 ms
--p 4 --m 8 --times 20,24,16 --schedule zb-h1 => ^bubble by the formula +84 ms ~ ^bubble as played +84 ms
--p 4 --m 2 --schedule zb-h1 => ^bubble by the formula +there is none for these numbers$
--p 2 --m 4 --schedule gpipe --model gpt2 --split 4,8 => ^  imbalance ~ ^  ramp \(start and end\) ~
    ^split 4,8: ranks compute for 64.9 % .* for [0-9.]+ % with it ~ ^even  6,6: ~ ^auto  9,3: ~ as much as 5.46 of them$
--model gpt2 --p 2 => ^split 9,3: ranks compute for 97.0 % ~ ^even  6,6: ranks compute for 76.2 %
--model gpt2 --p 2 --split 6,6 => ^split 6,6: ranks compute for 76.2 %
--compare --p 8 --m 32 => ^gpipe +21 .* 32 +1$ ~ ^1f1b +21 +17.95% +21.88% +21 +8 +1$ ~ ^interleaved v=2 +10.5 +9.86% .* 11.5 +2.14$ ~
    ^interleaved v=4 +5.25 .* 4.43$ ~ ^zb-h1 +7 +6.80% +7.29% +7 +8 +1$
--compare --p 4 --m 6 => ^interleaved v=2 +needs an --m that --p divides$
""")
def test_a_schedule_is_drawn_and_measured(options, patterns):
    assert_says(said(options), *patterns)


def test_a_picture_has_a_box_for_each_action_at_its_place(tmp_path):
    assert_says(said("--p 2 --m 2 --schedule zb-h1 --svg", tmp_path / "a.svg"), f"^picture: {tmp_path}/a.svg")
    boxes = [x.attrib for x in xml.parse(tmp_path / "a.svg").iter() if x.tag.endswith("rect") and x.get("height") == "22"]
    assert [sum(box["fill"] == colour for box in boxes) for colour in ("#3a86b7", "#f4a259", "#7fb069")] == [4, 4, 4]
    # 800 pixels are 7 ms, and the last rank begins after 1
    assert any(box | {"x": "174.29", "y": "60", "width": "114.29", "fill": "#3a86b7"} == box for box in boxes)


@rows_of(r"""
--schedule interleaved --p 1 => needs --p 2 or more
--schedule interleaved --m 6 => needs an --m that --p divides; --p 4, --m 6
--v 2 => needs --v 1: only interleaved has any number
--p 2 --model gpt2 --split 9,2 => adds up to 11 blocks
--p 16 --model gpt2 => needs more blocks than the model has
--split 9,3 => split is one of --model's; give both
--compare --v 2 => v cannot be used with --compare
--model gpt5 => model gpt5 is not known
--times 1,-1,2 => is not 3 numbers
--svg /no/such/folder/a.svg => cannot be written
""")
def test_errors(options, patterns):
    assert_refused(command(program("schedule"), options), *patterns)


# ---- a run's timeline ----
def step(begin, number):
    """1f1b on 2 ranks, 2 micro-batches, F 10 ms, B 20 ms. The first message comes 2 ms late; rank 0's B takes 16 and 24 ms."""
    slices = [(0, "F0 forward, block 0", 0, 10), (0, "F1 forward, block 0", 10, 10), (0, "wait for receive #3", 20, 22),
              (0, "B0 backward, block 0", 42, 16), (0, "B1 backward, block 0", 72, 24), (0, "update", 96, 50),
              (1, "F0 forward, block 1", 12, 3), (1, "F0 head", 15, 7), (1, "B0 head", 22, 20),
              (1, "F1 forward, block 1", 42, 10), (1, "B1 head", 52, 20)]
    return [{"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": (begin + at) * 1e3, "dur": ms * 1e3, "args": {"step": number}}
            for rank, name, at, ms in slices]


STEPS = [*step(0, 1), *step(1000, 2)]


def trace(path, slices):
    path.write_text(json.dumps({"traceEvents": slices + [{"ph": "M", "name": "process_name", "pid": 0}]}, indent=0))
    return f"--trace {path}"


def renamed(old, new):
    return [x | {"name": re.sub(old, new, x["name"])} for x in STEPS]


def test_a_step_of_a_run_is_drawn_as_it_was_and_its_bubble_has_parts(tmp_path):
    run = trace(tmp_path / "run.json", STEPS)
    assert_says(said(run, "--svg", tmp_path / "b.svg"), "^1f1b, 2 stages, 2 micro-batches, 1 chunk each; step 2 of ",
                r"^rank 0   \|F0-F1-\.{7}B0---\.{4}B1-----\|$",
                r"^rank 1   \|\.{4}F0-B0----F1-B1----\.{7}\|$",
                "^step 96 ms, from its first action to its last: 60 ms of work", "^bubble as measured  *36 ms",
                "^  imbalance  *0 ms",
                r"^  ramp \(start and end\) +30 ms", "^  jitter +4 ms", "^  late messages +2 ms", "^largest part: the ramp;",
                "^bubble by the formula +30 ms", "^rank 0 +60 +36 +62.5% +2 micro-batches +2$",
                "^rank 1 +60 +36 +62.5% +1 micro-batch +1$",
                f"^picture: {tmp_path}/b.svg")
    assert (tmp_path / "b.svg").read_text().count('height="22" fill="#3a86b7"') == 4
    assert_says(said(trace(tmp_path / "short.json", STEPS + step(2000, 3)[:3])), "step 2 of ") # one that is cut off is not shown


@pytest.mark.parametrize("slices, options, pattern", [
    (STEPS, "--times 1,2,3", "times cannot be used with --trace"), (STEPS, "--p 2 --v 1", "p, --v cannot be used with --trace"),
    (renamed("^[FB][01] ", ""), "", "no slices whose names begin with an action"),
    ([x for x in STEPS if x["name"] != "B1 head"], "", "step 2 is no whole step .*: with 2 stages, 1 chunk each and 2 micro-batches"),
    (renamed("F0 forward, block 1", "F1 forward, block 1"), "", "1f1b has other actions")],
    ids=["times", "given", "program", "torn", "order"])
def test_errors_of_a_trace(slices, options, pattern, tmp_path):
    assert_refused(command(program("schedule"), trace(tmp_path / "run.json", slices), options), pattern)


# ---- real runs ----
RUN = f"--data {TOKENS} --val-data= --eval-every 0 --sample-every 0 {D8}"


@pytest.mark.parametrize("ranks, options, name", [
    *[(2, f"--total-batch-size 128 --schedule {name} --emulate-ms 2,2,2", name)
      for name in ("gpipe", "1f1b", "zb-h1", "interleaved")],
    rest(4, "--total-batch-size 256 --pipeline-parallel 2 --schedule gpipe", "gpipe")],
    ids=["gpipe", "1f1b", "zb-h1", "interleaved", "copies"])
def test_a_runs_schedule_is_found_and_the_parts_are_the_bubble(ranks, options, name, tmp_path):
    trained("pp", RUN, options, f"--steps 4 --trace {tmp_path}/run.json", ranks=ranks)
    text = said(f"--trace {tmp_path}/run.json")
    assert_says(text, f"^{name}, 2 stages, 4 micro-batches")
    parts = [float(re.search(rf"^ *{re.escape(part)} +([-0-9.e+]+) ms ", text, re.M)[1])
             # with six digits each
             for part in ("bubble as measured", "ramp (start and end)", "imbalance", "jitter", "late messages")]
    assert parts[0] > 0 and sum(parts[1:]) == pytest.approx(parts[0], rel=1e-4)


def test_a_trace_of_one_stage_has_no_schedule(tmp_path):
    trained("pp", RUN, f"--total-batch-size 128 --pipeline-parallel 1 --steps 4 --trace {tmp_path}/run.json", ranks=2)
    assert_refused(command(program("schedule"), f"--trace {tmp_path}/run.json"), "is of one stage")
