"""Labs. Blanks are made from the sources as they are now, and never over what a student has written. Each is proved: it compiles,
ends at its first task, and meets no claim; the course's own bodies meet all; and mistakes, most of them those of
test/exercises/list.toml, fail the claims that are meant for them and no others."""
import re, shutil
import pytest
from suite import ROOT, TINY, assert_refused, command
from test_mistakes import mistakes_of

from make_lab import read_lab

LONG = 2
PROGRAMS = sorted(path.stem for path in (ROOT / "labs").glob("*.toml"))
# program, ranks and options with which a blank itself ends at a task
RUNS = {"single": (None, ""), "ddp": (2, ""), "zero": (2, ""), "fsdp": (2, ""), "tp": (2, "--tensor-parallel 2"),
        "pp": (2, "--pipeline-parallel 2 --split 1,1 --total-batch-size 256"), "compress": (2, "--compress int8"),
        "3d": (4, "--mesh dp=2,tp=2 --total-batch-size 256"),
        "cp": (2, "--cp ring"), "muon": (2, "")}
# the claims that a mistake fails
MISTAKES = {
    "single": {"square-for-norm": "square factor decay whole",
               "mean-of-a-micro-batch": "micro-batches square factor every-range correction moments decay whole"},
    "ddp": {"loss-of-one-rank": "loss naive-bytes no-sync",
            "sync-every-micro-bucketed": "bucket-cut no-sync accumulated-gradients same-bits",
            "rank-1-stays": "waits bucket-cut bucket-gradients no-sync accumulated-gradients overlap ring-sum same-bits"},
    "zero": {"norm-of-one-shard": "no-sync norm parameter-norm stage-2-bytes stage-3-bytes",
             "accumulation-overwrites": "bucket accumulation"},
    "fsdp": {"root-resharded": "freed resharded ahead forward backward-pre backward-post", "post-is-pre": "backward-post"},
    "tp": {"bias-of-every-rank": "bias-once attention-output part-of-the-vocabulary loss-of-all-parts logits-gradient mlp-backward "
                                 "attention-backward norm gathered-again layernorms same-bits same-bits-in-rows",
                                 "norm-of-own-part": "sum-bytes norm"},
    "pp": {"gpipe-last-first": "receives gpipe gpipe-order", "warm-up-one-short": "ahead 1f1b-order",
           "weights-not-delayed": "zb-h1-order"},
    "compress": {"warm-start-that-is-not": "low-rank-right warm-start",
                 "divided-by-N-again": "summed-parts error-added blocks-keep same-bits"},
    "3d": {"norm-of-shards": "moments norm-of-shards", "axes-exchanged": "places hook"},
    "cp": {"a-hop-short": "ring-backward zigzag-right same-bits-in-a-ring", "half-too-many": "fewer-pieces",
           "positions-of-others-kept": "gradient-of-positions same-bits same-bits-in-a-ring"},
    "muon": {"qkv-as-one": "matrices choice pieces momentum updates waits scale", "shorter-side": "momentum updates waits scale",
             "own-rows": "pieces whole updates waits"}}


def make_lab(*arguments, cwd=ROOT):
    return command("python3 labs/make_lab.py", *arguments, cwd=cwd)


def assert_not_made(run, why):
    assert run.status != 0 and re.search(why, run.err), run


def made(program, folder, tasks=None):
    """A lab whose first tasks are the course's own: all of them with "all"."""
    run = make_lab(program, folder, *[len(blanks(program)) if tasks == "all" else tasks] * (tasks is not None))
    assert run.status == 0, run
    return folder


def blanks(program):
    """(number, function, file) of each task."""
    return [(task["number"], task["title"], task["file"]) for task in read_lab(program)["tasks"]]


def claims(program):
    """{claim: the functions that it is about}."""
    return {claim: about.split(", ") for claim, (about, *_) in read_lab(program)["claims"].items()}


def grade(program, folder, seconds=600):
    """The Run, and the names of claims that passed and that did not."""
    run = command("python3 -m labs.check_lab", program, folder, env={"LAB_SECONDS": seconds}, timeout=1200)
    return run, *(re.findall(rf"^{verdict} +([^:]*):", run.out, re.M) for verdict in ("passed", "not yet"))


# ---- blanks ----
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_blank_dies_with_its_name_and_tasks_md_has_it(program, tmp_path):
    made(program, tmp_path)
    for number, name, file in blanks(program):
        assert f'die_here("{name} is not written yet: it is task {number} in TASKS.md")' in (tmp_path / file).read_text()
        assert f"\n### Task {number}. {name}\n" in (tmp_path / "TASKS.md").read_text()
    sources = [path.read_text() for pattern in ("*.cu", "llmc/**/*.h") for path in tmp_path.glob(pattern)]
    assert sum(text.count("is not written yet: it is task") for text in sources) == len(blanks(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_all_tasks_written_it_is_the_program(program, tmp_path):
    made(program, tmp_path, "all")
    for path in tmp_path.rglob("*.[ch]*"):
        if path.suffix in (".cu", ".h"): assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_task_has_a_claim_about_nothing_else(program):
    assert {name for _, name, _ in blanks(program)} == {about[0] for about in claims(program).values() if len(about) == 1}


def test_the_readme_has_the_table_of_labs():
    section = re.search(r"^## All labs\n(.*?)^## How", (ROOT / "labs/README.md").read_text(), re.M | re.S)[1]
    assert make_lab("--table").out.splitlines() == [line for line in section.splitlines() if line[:1] == "|"]


def test_a_lab_can_be_made_again_until_something_is_written_in_it(tmp_path):
    lab, other = tmp_path / "lab", tmp_path / "other"
    (made("ddp", lab) / "notes").write_text("mine")
    for file in "train_gpt2_ddp.cu", "llmc/comm/ring.h":
        made("ddp", lab)
        text = (lab / file).read_text()
        (lab / file).write_text(text + "// mine\n")
        assert_not_made(make_lab("ddp", lab), rf"lab/{file} has been changed since the lab was made(.|\n)*mv ")
        assert (lab / file).read_text() == text + "// mine\n"
        (lab / file).write_text(text)
    other.mkdir()
    (other / "TASKS.md").write_text("mine")
    assert_not_made(make_lab("ddp", other), "other/TASKS.md was not made by this script")
    assert [path.name for path in other.iterdir()] == ["TASKS.md"] and (other / "TASKS.md").read_text() == "mine"


@pytest.mark.parametrize("file, old, new, why", [
    ("train_gpt2_ddp.cu", r"\bgrad_ready\(", "gradient_ready(", "defines no function grad_ready"),
    ("train_gpt2_ddp.cu", r"static void gpt2_reduce_naive\(", "static int gpt2_reduce(", "defines gpt2_reduce 2 times"),
    ("train_gpt2_ddp.cu", r"= micro == g->accumulation - 1;", "= true;", "is in 0 places of gpt2_begin_micro"),
    ("doc/02_ddp.md", r"## The idea.*", "## An idea", "has no heading .The idea, and what it costs")],
    ids=["gone", "twice", "part", "section"])
def test_a_lab_whose_sources_have_changed_is_an_error(file, old, new, why, tmp_path):
    for name in "labs", "llmc", "doc": shutil.copytree(ROOT / name, tmp_path / name)
    for path in ROOT.glob("*.cu"): shutil.copy(path, tmp_path)
    text, count = re.subn(old, new, (tmp_path / file).read_text())
    assert count
    (tmp_path / file).write_text(text)
    assert_not_made(make_lab("ddp", tmp_path / "lab", cwd=tmp_path), why)


def test_make_lab_without_a_program_lists_the_programs():
    for arguments in "lab", "check-lab PROGRAM=nothing":
        assert re.search("PROGRAM must be one of: .*ddp.*; not", command("make", arguments).said)


# ---- labs ----
@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_blank_ends_at_a_task_and_meets_no_claim(program, tmp_path):
    run, passed, not_yet = grade(program, made(program, tmp_path))
    assert run.status != 0 and passed == [] and set(not_yet) == claims(program).keys(), run
    for pattern in rf"^0 of {len(not_yet)} claims hold; 0 runs", f"^write next: {re.escape(blanks(program)[0][1])}, {tmp_path}/":
        assert re.search(pattern, run.out, re.M), run
    for claim, about in claims(program).items():  # each says what is not written
        assert re.search(rf"^not yet  {re.escape(claim)}: .*\n.*{re.escape(about[0])}.*not written yet$", run.out, re.M), run
    ranks, options = RUNS[program]
    ends = command(tmp_path / f"build/train_gpt2_{program}", TINY, "--batch-size 4 --steps 1", options, "--out", tmp_path / "out",
                   ranks=ranks)
    assert_refused(ends, r"error: [a-z0-9_]*.* is not written yet: it is task \d+ in TASKS.md")


@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_courses_own_bodies_meet_all_claims(program, tmp_path):
    run, passed, not_yet = grade(program, made(program, tmp_path, "all"))
    assert run.status == 0 and not_yet == [] and set(passed) == claims(program).keys() and "All is written and holds" in run.out, run


@pytest.mark.sampled
@pytest.mark.parametrize("program, name", [(program, name) for program in PROGRAMS for name in MISTAKES[program]])
def test_a_mistake_fails_the_claims_meant_for_it_and_no_others(program, name, tmp_path):
    mistake, = {m.name: m for m in mistakes_of("test/labs_mistakes.toml") + mistakes_of("test/exercises/list.toml")
                if m.name == name}.values()
    mistake.make_in(made(program, tmp_path, "all"))
    run, _, not_yet = grade(program, tmp_path, seconds=160 if name == "rank-1-stays" else 600)
    assert run.status != 0 and sorted(not_yet) == sorted(MISTAKES[program][name].split()), run
    # Where a rank hangs, the watchdog ends the runs, and claims say its words.
    if name == "rank-1-stays": assert re.search("^not yet  overlap:.*\n.*buckets: .*rank 1", run.out, re.M), run


# ---- what a student meets on the way ----
@pytest.mark.sampled
def test_the_first_two_tasks_of_ddp_make_four_claims_pass(tmp_path):
    run, passed, _ = grade("ddp", made("ddp", tmp_path, 2))
    assert passed == "loss naive-gradients naive-bytes waits".split() and "\nwrite next: gpt2_init_buckets, " in run.out, run


@pytest.mark.sampled
def test_a_later_task_alone_is_graded_too(tmp_path):
    own = re.search(r"^static void grad_ready\(.*?^}\n", (ROOT / "train_gpt2_ddp.cu").read_text(), re.M | re.S)[0]
    source = made("ddp", tmp_path) / "train_gpt2_ddp.cu"
    source.write_text(re.sub(r"^static void grad_ready\(.*?^}\n", lambda _: own, source.read_text(), flags=re.M | re.S))
    run, passed, _ = grade("ddp", tmp_path)
    assert passed == ["overlap"], run


@pytest.mark.rest
def test_a_lab_that_does_not_compile_or_is_not_there_is_an_error(tmp_path):
    source = made("ddp", tmp_path) / "train_gpt2_ddp.cu"
    source.write_text(re.sub(r"^(static void gpt2_reduce\(.*)", r"\1\n    no_such_name++;", source.read_text(), flags=re.M))
    run, *_ = grade("ddp", tmp_path)
    assert run.status != 0 and "does not compile" in run.err and re.match(r"(.*\n){0,2}.*train_gpt2_ddp.cu:.*error: .*no_such_name",
                                                                          run.err), run
    assert_refused(grade("dpp", tmp_path)[0], "error: the lab must be one of: 3d .*zero .*'dpp'")
    assert_refused(grade("ddp", tmp_path / "none")[0],
                   "error: there is no .*/none/train_gpt2_ddp.cu: make lab PROGRAM=ddp LAB=.*/none makes it")
