"""Effects of the chapters' deliberate mistakes on losses and gradient norms, and the lines in which a run reports them.

  python3 -m experiments exercises [RUN, RUN ...] makes runs and stores them --into FILE, where others are kept.

A RUN is PROGRAM [MISTAKE[+MISTAKE]] [OPTIONS], such as "ddp forget-1-over-N --grad-clip 0": the training run of
test/reference with the program's usual options and these, among which are --ranks N and --rounds N. Mistakes are those of
test/exercises/list.toml. They are made in a copy of the sources, where the program is built. Without a RUN the file is made
anew, from all runs that the chapters quote as "doc/results/exercises.jsonl RUN".

--from FILE shows the runs named, or all: a table of --steps, and the lines that say what is not as predicted."""
import itertools, os, re, shutil, sys
import dev.lib as m

USUAL = {"ddp": "--ranks 4 --batch-size 4 --bucket-mb 0.02", "zero": "--ranks 4 --batch-size 4", "fsdp": "--ranks 4 --batch-size 4",
         "muon": "--ranks 4 --batch-size 4",
         "tp": "--ranks 4 --batch-size 8 --tensor-parallel 2", "pp": "--ranks 2 --batch-size 4 --split 1,1",
         "cp": "--ranks 4 --batch-size 16 --cp ring --cp-balance zigzag",
         "3d": "--ranks 8 --batch-size 2 --mesh dp=2,tp=2,pp=2 --zero-stage 1",
         "compress": "--ranks 2 --model d2 --batch-size 8 --steps 20 --compress int8 --compress-from 10 --measure-error 20 "
                     f"--eval-every 0 {m.QUIET}"}
FIELDS = {"loss": "loss", "grad_norm": "grad norm", "compression_error": "relative error", "compression_norm_ratio": "norm ratio",
          "compression_cosine": "cosine"}
OPTIONS = dict(steps=[1, 5, 20], digits=4)
FOLDER, STARTS_RANKS, LEAST = "", False, {"steps": (1,)}


def runs_of(text):
    return [" ".join(run.split()) for run in re.split(r",\s", text) if run.strip()]


def quoted():
    """The runs that the chapters quote, without how they are shown."""
    text = "".join(file.read_text() for file in sorted(m.ROOT.glob("doc/[01]*.md")))
    found = re.findall(r"doc/results/exercises\.jsonl\s+([^;]+?)\s*(?:--steps|--digits|;|-->)", text)
    return [run for words in found for run in runs_of(words)]


def parts(run):
    """The program, the names of mistakes and the options."""
    program, names, options = re.fullmatch(r"(\S+)(?: (?!--)(\S+))?(.*)", run).groups()
    return program, names.split("+") if names else [], options


def trained(copy, run):
    """What is kept of a run in the copy."""
    import suite
    program, _, options = parts(run)
    options = USUAL[program] + options
    ranks, options = m.option(options.split(), "--ranks"), re.sub(r"--(ranks|rounds) \d+", "", options)
    shutil.rmtree(copy / "runs", ignore_errors=True)
    done = suite.command([copy / f"build/train_gpt2_{program}"], "" if program == "compress" else suite.PYTORCH, options,
                         "--out runs/a",
                         ranks=int(ranks) if ranks else None, cwd=copy)
    metrics = copy / "runs/a/metrics.jsonl"
    if not metrics.exists(): m.fail(f"{run}: {done}")
    steps = {}
    for line in m.Run(metrics.parent).lines:
        if "step" in line: steps.setdefault(line["step"], {}).update(line)
    kept = {field: [step.get(field) for _, step in sorted(steps.items())] for field in FIELDS}
    return {field: values for field, values in kept.items() if any(values)} | {
        "said": re.findall(r"^(?:.* than predicted|rank 0: error: .*)$", done.said, re.M)}


def measure(x):
    d, o = x.d, x.o
    os.environ["SHARD_TEST_SESSION"] = str(m.work()) # the tests' way of running and building things
    sys.path.append(str(m.ROOT / "test"))
    import suite
    from test_mistakes import copy_sources, mistakes_of
    known = {mistake.name: mistake for mistake in mistakes_of("test/exercises/list.toml")}
    named = runs_of(" ".join(o.more))
    if named and os.path.exists(o.into):
        old = m.Results.read(o.into)
        d.header, d.rounds = old.header, old.rounds
    runs = sorted({*(named or quoted())})
    for program, names, _ in map(parts, runs):
        if program not in USUAL: m.fail(f"there is no program '{program}'; there are {', '.join(USUAL)}")
        if missing := {*names} - {*known}: m.fail(f"test/exercises/list.toml has no '{missing.pop()}'")
    copy_sources(copy := m.work())
    shutil.copy(m.TOKENS, copy / "test/reference/masked")
    for (program, names), group in itertools.groupby(runs, lambda run: parts(run)[:2]):
        files = {name: copy / known[name].file for name in names}
        sound = {file: file.read_text() for file in files.values()}
        for name in names: known[name].make_in(copy)
        suite.make(["CFLAGS=-O1 -Wno-error"], "-s -C", copy, "DEVICE=cpu PRECISION=fp32 DEBUG= BUILD=build",
                   "data/train.bin" if program == "compress" else "", f"build/train_gpt2_{program}")
        for run in group:
            d.rounds.pop(run, None)
            for number in range(1, int(m.option(run.split(), "--rounds", 1)) + 1): d.add(run, number, **trained(copy, run))
            m.note(f"  {run}")
        for file, text in sound.items(): file.write_text(text)
    d.rounds = dict(sorted(d.rounds.items()))


def show(d, o):
    runs = runs_of(" ".join(o.more))
    records = [record for run in runs or d.rounds for record in d.each_round(run)]
    fields = [field for field in FIELDS if any(field in record for record in records)]
    one = len(o.steps) == 1
    heads = [FIELDS[field] if one else f"{FIELDS[field]} at step {step}" if step == o.steps[0] else step
             for field in fields for step in o.steps]

    def cells(record):
        values = [record[field][step - 1] if field in record else None for field in fields for step in o.steps]
        name = " ".join(parts(record["run"])[1]) or "no mistake"
        return [name if runs else record["run"], *("nan" if x is None else f"{x:.{o.digits}f}" for x in values)]
    d.print_table([f"step {o.steps[0]}" if one else "", *heads], *map(cells, records))
    print("", *dict.fromkeys(line for record in records for line in record["said"]), sep="\n")
