"""build/overlap: how it splits communication by kind, unit, communicator and caller adds up to what the run itself has measured;
numbers and pictures of made-up timelines are known; and files that are no timelines are refused."""
import json, re, xml.dom.minidom
from collections import Counter
import pytest
from pytest import approx
from overlap import WAYS, Split
from suite import ROOT, TOKENS, assert_refused, assert_says, command, once, program, rest, succeeds, trained
from timeline import OPERATION, Trace

SMALL = (f"--data {TOKENS} --val-data= --model d3 --heads 2 --channels 32 --seq-len 32 --batch-size 4 --steps 6 --eval-every 0 "
         "--sample-every 0 --save-every 0")
BLOCKS = {"root", "block 0", "block 1", "block 2", "no unit"}
FSDP = f"--total-batch-size 512 --val-data {TOKENS} --eval-every 2 --eval-steps 1"  # what an evaluation sends counts in no step
OUTSIDE = ["gpt2_reduce", "gpt2_clip", "gpt2_update"]
PARTS = ["tp_leave", "head_logits", "tp_enter_backward_begin", "add_squares"]
PIPE = ["gpt2_send", "gpt2_receive_begin", "gpt2_reduce_tied", "gpt2_reduce"]
SHARDS = ["group_gather", "grad_ready", *OUTSIDE]


def overlap(trace, *options, start=succeeds):
    return start([program("overlap"), trace], *options)


def traced(ranks, program, *options, **settings):
    """A run with a timeline, and its path."""
    trace = once(f"timeline {ranks} {program} {options} {settings}", lambda place: None) / "trace.json"
    return trained(program, SMALL, *options, "--trace", trace, ranks=ranks, **settings), trace


def tables(trace):
    """{way: {row: (total, exposed, waits for ranks)}} of its tables, in ms of a step, and both figures of efficiency."""
    split = Split(Trace(trace))
    return ({way: {row.name: (row.communication, *row.parts[1:3]) for row in split.table(way).children.values()} for way in WAYS},
            {f"efficiency_{what}": split.efficiency(what) for what in ("communication", "exposed")})


def functions(found):
    """Of callers, which are named as "part of a step > function"."""
    return {re.fullmatch(r"(?:forward|head|backward|weights|wait for gradients|update|other) > (\w+)", x)[1] for x in found["caller"]}


@pytest.mark.parametrize("ranks, program, options, callers, units, strict", [
    (2, "ddp", "--bucket-mb 0.04", ["grad_ready", "gpt2_reduce"],
     {"root", "root to block 0", "blocks 0 to 1", "blocks 1 to 2", "block 2", "no unit"}, False),
    (2, "fsdp", FSDP, SHARDS, BLOCKS, False),
    rest(2, "fsdp", "", SHARDS, BLOCKS, True),
    rest(2, "fsdp", "--wrap-blocks 0", SHARDS, {"root to block 2", "no unit"}, False),
    rest(2, "fsdp", "--cpu-offload all", SHARDS, BLOCKS, False),
    rest(4, "fsdp", "--sharding hybrid --shard-group 2", ["bucket_finish", *SHARDS], BLOCKS, False),
    rest(2, "ddp", "--ddp naive", ["gpt2_reduce", "gpt2_reduce_naive"], None, False),
    rest(2, "zero", "--zero-stage 2", ["grad_ready", "gpt2_gather", *OUTSIDE], None, False),
    rest(2, "zero", "--zero-stage 3 --total-batch-size 512", ["grad_ready", "unit_params", *OUTSIDE], BLOCKS, False),
    rest(2, "tp", "", [*PARTS, "gpt2_reduce"], None, False),
    rest(2, "pp", "--batch-size 2", [*PIPE, "add_squares"], {"root", "messages", "no unit"}, False),
    rest(2, "compress", "--compress int8", ["exchange_blocks", "segment_advance", "gpt2_reduce"], BLOCKS | {"root to block 2"},
         False),
    rest(4, "3d", "--mesh tp=2,pp=2 --batch-size 2", [*PARTS, *PIPE], None, False),
    rest(2, "cp", "--cp allgather", ["gather_attention", "grad_ready", "gpt2_reduce"], None, False),
    rest(4, "cp", "--cp ring", ["ring_begin", "ring_backward", "grad_ready", "gpt2_reduce"], None, False)],
    ids=["ddp", "fsdp", "strict", "one_group", "offload", "hybrid", "naive", "zero2", "zero3", "tp", "pp", "compress", "3d", "cp",
         "ring"])
def test_every_split_adds_up_to_what_the_run_has_measured(ranks, program, options, callers, units, strict):
    run, trace = traced(ranks, program, options, strict=strict)
    (found, figures), mean, of_kind = tables(trace), run.lines[-1]["diagnosis"]["mean"], Counter()
    for kinds in mean["exposed"].values(): of_kind.update(kinds)
    measured = sum(mean["communication"].values()), sum(of_kind.values()), mean["bubble"] + mean["waiting"]
    for rows in found.values(): assert all(abs(sum(x) - ms) < 0.003 for x, ms in zip(zip(*rows.values()), measured, strict=True))
    assert all(abs(exposed - of_kind[kind]) < 0.003 for kind, (_, exposed, _) in found["kind"].items())
    for figure, x in figures.items(): assert abs(x - run.lines[-1]["diagnosis"][figure]) < 0.0006
    assert functions(found) == set(callers) and (units is None or set(found["unit"]) == units)
    communicators = {"hybrid": {"shard", "replica", "world"}, "tp=2": {"tp", "pp"}}
    for word, names in communicators.items(): assert word not in options or set(found["communicator"]) == names


def operations(trace):
    return [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if "ranks" in e.get("args", {})]


def test_an_operation_has_the_whole_stack_of_its_callers_with_their_lines():
    _, trace = traced(2, "fsdp", FSDP)
    stacks = {tuple(re.sub(" .*", "", part) for part in a["stack"].split(" < ")) for a in operations(trace)}
    for first, last in ("grad_ready", "block_attention_backward"), ("grad_ready", "embedding_backward"), ("group_gather",
                                                                                                          "gpt2_forward"):
        assert any(s[0] == first and last in s and s[-2:] == ("train_step", "main") for s in stacks), (first, last, stacks)
    lines = (ROOT / "train_gpt2_fsdp.cu").read_text().splitlines()
    for a in operations(trace):  # each function calls the one before it in the line that the stack names
        *called, _ = [part.split(" ")[0] for part in a["stack"].split(" < ")]
        named = [re.fullmatch(r"\w+ ([\w.]+):(\d+)", part).groups() for part in a["stack"].split(" < ")]
        for function, (file, n) in zip(called, named[1:]):
            if file == "train_gpt2_fsdp.cu": assert function in lines[int(n) - 1], (function, a["stack"])


def test_a_timeline_without_addr2line_says_so_and_has_all_else(tmp_path):
    trace = tmp_path / "trace.json"
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    run = succeeds([program("train_gpt2_ddp")], SMALL, "--trace", trace, env={"PATH": nowhere})
    assert_says(run.out, "^trace      does not name the callers of operations, because addr2line .binutils. is missing$")
    assert operations(trace) and not any({"stack", "caller"} & a.keys() for a in operations(trace))


def test_the_log_overlap_and_advise_print_the_same_two_figures_of_efficiency_and_no_third():
    run, trace = traced(2, "fsdp", FSDP)
    printed = [run.out, overlap(trace).out, succeeds([program("advise"), run.folder / "metrics.jsonl"]).out]
    figures = [re.findall(r"^compute / \(compute \+ communication\) = ([\d.]+) %; compute / \(compute \+ exposed\) = ([\d.]+) % "
                          r"\(means of all ranks\)$", text, re.M) for text in printed]
    assert [len(found) for found in figures] == [1, 1, 1]
    for found in figures: assert all(abs(float(a) - float(b)) < 0.11 for a, b in zip(found[0], figures[0][0])), figures
    assert not any("efficiency" in text for text in printed)


def test_the_frames_of_a_step_are_as_wide_as_those_in_them(tmp_path):
    said = overlap(traced(2, "fsdp", FSDP)[1], "--flame --flame-svg", tmp_path / "flame.svg").out
    rows = [(len(indent) // 2, name, float(ms)) for indent, name, ms in
            re.findall(r"^( *)(\S.*?) +([\d.]+) +[\d.]+ %", said[said.index("\nstep > "):], re.M)]
    assert {"backward", "group_gather", "block 2"} <= {name for _, name, _ in rows} and len(rows) > 20
    for i, (depth, name, ms) in enumerate(rows):
        end = next((j for j in range(i + 1, len(rows)) if rows[j][0] <= depth), len(rows))
        inner = [row[2] for row in rows[i + 1:end] if row[0] == depth + 1]
        assert not inner or abs(sum(inner) - ms) < 0.0006 * (len(inner) + 1), name
    xml.dom.minidom.parse(str(tmp_path / "flame.svg"))
    for way in "grad_ready &gt; reduce-scatter &gt; ", "group_gather &gt; all-gather &gt; ":
        assert f"<title>step &gt; backward &gt; {way}block 1: " in (tmp_path / "flame.svg").read_text()


def test_the_legend_names_newton_schulz_where_it_is_drawn():
    for program_name, said in ("muon", True), ("zero", False):
        drawn = overlap(traced(2, program_name)[1]).out
        assert ("n Newton-Schulz; #" in drawn) == said == bool(re.search(r"^rank 0 +\|.*n", drawn, re.M)), drawn


def test_one_rank_computes_only(tmp_path):
    trained("single", SMALL, "--trace", tmp_path / "one.json")
    said = overlap(tmp_path / "one.json", "--flame").out
    assert "\nno communication between ranks in the steps that count" in said and "\n    computing " in said


# ZeRO's stage 3 waits for gathers in the middle of the forward and the backward pass: each wait splits the slice around it.
def test_a_wait_is_cut_out_of_the_slice_around_it():
    events = json.loads(traced(2, "zero", "--zero-stage 3 --total-batch-size 512")[1].read_text())["traceEvents"]
    for rank in 0, 1:
        slices = sorted((e["ts"], e["dur"], e["name"]) for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 0)
        waits = [i for i, s in enumerate(slices) if "wait for all-gather" in s[2]]
        assert len(waits) >= 6 * 6 # blocks' gathers, 3 forward and 3 backward in each step; the root's waits may be between slices
        assert all(a[0] + a[1] <= b[0] + 0.01 for a, b in zip(slices, slices[1:]))
        computing = [(i, s[2]) for i, s in enumerate(slices) if i not in waits]
        for (i, before), (j, after) in zip(computing, computing[1:]):
            assert j == i + 1 or before == after, f"{after} follows a wait within {before}"


# ---- made-up timelines: times in milliseconds ----
def timeline(path, events):
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name", "pid": 0}]}))
    return path


def slice_of(rank, name, begin, duration, step, track=0, **more):
    return {"ph": "X", "name": name, "pid": rank, "tid": track, "ts": begin * 1e3, "dur": duration * 1e3,
            "args": {"step": step, **more}}


# Step 2, 100 ms. Rank 0 computes for 60 and waits for 40: for the gather 30, of which rank 1 waited 10, and for the reduce-scatter
# 10 as rank 1 did. The gather takes 20 ms on rank 1 and 45 on rank 0. The loss was waited for before the step.
def made_up():
    events = []
    for r in 0, 1:
        events += [slice_of(r, "forward, block 0", 1000, 40, 2), slice_of(r, "backward, block 0", 1040, 60, 2)]
        units = {} if r else {"units": [0, 1]} # half of block 0. Rank 1 does not know what it reduces, but rank 0 does
        for name, begin, duration, at, more in [
                ("all-gather #1 (8 fp32)", 1000 + 25*r, 45 - 25*r, 1000,
                 {"waited": (30 - 20*r) * 1e3, "caller": "unit_params", "units": [1, 2]}),
                ("reduce-scatter #2 (8 fp32)", 1080, 16, 1075, {"waited": 10e3, "caller": "grad_ready", **units}),
                ("all-reduce #0 (1 fp64)", 900, 50, 900, {"waited": 50e3, "caller": "evaluate", "outside": True})]:
            events += [slice_of(r, name, begin, duration, 2, 1, ranks=2, **more),
                       {"ph": "s", "name": "issued", "pid": r, "tid": 0, "ts": at * 1e3}]
        events.append({"ph": "M", "name": "step", "pid": r, "args": {"step": 2, "seconds": 0.1, "data": 0,
                                                                     "running": 0.06 + 0.02*r}})
    return events


def test_numbers_that_are_known(tmp_path):
    trace = timeline(tmp_path / "made.json", made_up())
    (found, figures), said = tables(trace), overlap(trace, "--callers --flame").out
    # gather: 10 of 20 ms exposed, 30 - 10 on rank 0 are waits, half of them on average. reduce-scatter: 10 of 16
    assert found["kind"] == {"all-gather": approx((20, 10, 10)), "reduce-scatter": approx((16, 10, 0))}
    assert functions(found) == {"unit_params", "grad_ready"} and set(found["unit"]) == {"block 0", "root to block 0"}
    assert figures == {"efficiency_communication": approx(70 / (70 + 36)), "efficiency_exposed": approx(70 / (70 + 20))}
    assert_says(said, r"^  all  *36.000 *36.00 % *20.000 *20.00 % *10.000$", r"^step  *146.000  100.0 % *20.000 *16.000 *10.000 ",
                "^    grad_ready  *16.000 ")


def test_every_kind_of_operation_is_known():
    names = re.search(r"comm_kind_names\[COMM_KINDS\] = {(.*?)};", (ROOT / "llmc/comm/comm_api.h").read_text(), re.S)[1]
    kinds = re.findall(r'"(.*?)"', names)
    assert "all-to-all-v" in kinds and [OPERATION.match(f"{kind} #1 (8 fp32)")[1] for kind in kinds] == kinds


@pytest.mark.parametrize("change, pattern", [
    (lambda e: e[2].update(name="cudaMemcpy 1 (8 fp32)"), "no training program wrote its event 2, .*'cudaMemcpy 1 .8 fp32.'"),
    (lambda e: e[2].update(name="all-gathers #1 (8 fp32)"), "its event 2"),
    (lambda e: e[2]["args"].update(units=[1, 999]), "its event 2"),
    (lambda e: e[2]["args"].update(caller="<b>"), "its event 2"), (lambda e: e[2]["args"].pop("waited"), "its event 2"),
    (lambda e: e[0].update(dur=-40000.0), "its event 0"), (lambda e: e[0].update(tid=2), "its event 0"),
    (lambda e: e[0].update(pid=-1), "its event 0"),
    (lambda e: e.pop(), "has no step that all ranks have"), (lambda e: e[-1]["args"].update(step=3),
                                                             "has no step that all ranks have")],
    ids=["operation", "kind", "units", "caller", "wait", "duration", "track", "no_rank", "rank", "steps"])
def test_what_is_no_timeline_is_refused(tmp_path, change, pattern):
    events = made_up()
    change(events)
    assert_refused(overlap(timeline(tmp_path / "broken.json", events), start=command), pattern)


# Two ranks; steps 1 (not counted), 2 and 3. In step 2 rank 0 sends for 30 ms, 10 of them hidden; in step 3 for 20 ms, all hidden.
@pytest.fixture
def two_steps(tmp_path):
    events = [slice_of(0, "forward", 0, 500, 1)]
    for r in 0, 1:
        events += [slice_of(r, *s) for s in [
            ("forward, block 0", 1000, 40, 2), ("backward, block 0", 1040, 50, 2), ("wait for gradients", 1090, 20, 2),
            ("update", 1110, 10, 2),
            ("forward, block 0", 2000, 40, 3), ("backward, block 0", 2040, 50, 3), ("update", 2090, 10, 3)]]
        events += [slice_of(r, "all-reduce #1", 1080, 30, 2, 1, ranks=2, waited=20e3),
                   slice_of(r, "all-reduce #2", 2060, 20, 3, 1, ranks=2, waited=0)]
    return timeline(tmp_path / "trace.json", events)


def test_mean_times_leave_out_the_first_step_and_a_step_is_drawn(two_steps):
    # (100 + 100) / 2 ms of compute, 25 of communication, 10 exposed, 20 ms before the end of the backward pass on average
    assert_says(overlap(two_steps).out, r"^rank 0 *100.00 *25.00 *10.00 *20.00\nrank 1 *100.00 *25.00 *10.00", "^step 3, 100.00 ms",
                "^Without notes of its steps")
    assert_says(overlap(two_steps, "--step 2 --columns 12").out, "^step 2, 120.00 ms", r"\|ffffbbbbb\.\.u\|", r"\|        ### \|")


# 800 pixels are 120 ms: communication begins after 80 of them and takes 30, of which the first 10 are hidden.
def test_a_picture_has_a_box_for_each_slice_at_its_place(two_steps, tmp_path):
    overlap(two_steps, "--step 2 --svg", tmp_path / "a.svg")
    xml.dom.minidom.parse(str(tmp_path / "a.svg"))
    picture = (tmp_path / "a.svg").read_text()
    for colour in "#c1121f", "#7fb069", "#eeeeee", "#8d99ae": assert picture.count(f'height="18" fill="{colour}"') == 2
    assert '<rect x="593.33" y="52" width="200.00" height="18" fill="#c1121f"' in picture
    assert '<rect x="593.33" y="52" width="66.67" height="18" fill="#7fb069"' in picture # what hides it
    overlap(two_steps, "--step 2 --svg", tmp_path / "half.svg", "--svg-ms 240")
    assert '<rect x="326.67" y="52" width="100.00" height="18" fill="#c1121f"' in (tmp_path / "half.svg").read_text()


@pytest.mark.parametrize("options, pattern", [
    ("--step 9", "the trace has no such step"), ("--svg /no/such/folder/a.svg", "cannot be written"),
    ("--flame-svg /no/such/folder/a.svg", "flame-svg /no/such/folder/a.svg: cannot be written")], ids=["step", "svg", "flame_svg"])
def test_a_missing_step_or_folder_is_refused(two_steps, options, pattern):
    assert_refused(overlap(two_steps, options, start=command), pattern)


def test_half_a_file_is_refused(tmp_path):
    (tmp_path / "torn.json").write_text(json.dumps({"traceEvents": made_up()})[:700])
    assert_refused(overlap(tmp_path / "torn.json", start=command), "torn.json.*is not JSON")
