"""compress_table.py - every method of train_gpt2_compress on the same task: bytes, error, memory, loss after equal steps and equal
time.

A size is BLOCKSxCHANNELS. A variant is a method of --compress, with -ef behind it --error-feedback, else --no-error-feedback, with
@STEP --compress-from STEP. onebit-adam has a sixth of its steps before that, powersgd a tenth. There are two kinds of runs:
  losses  a run for each seed, size and variant, in turns. They do not depend on what else the machine does.
  times   --rounds short runs of each, in turns: the time for which rank 0 computes in a step, compression included. This is the
          diagnosis's computing, without waits and without time in which the rank had no core, as the mean of --time-steps steps;
          the table has the median of the rounds. Other programs still share caches: better on a quiet machine. Bytes and memory
          are from these runs as well.
The time of a step at a rate is SIMULATED: computing + bytes / rate, without latency and without overlap. The learning rate is
constant over most of a run (--lr-schedule wsd), so that a curve can be cut anywhere: the equal time is that in which the fastest
variant comes to the step from which the rate falls. The loss after equal steps is that at the end. What a simulated time is worth
shows a third kind of runs, at the rates of --links (none by default; part of the times): real ones, with --emulate-link RATE.

DIR (default runs/compress_table) keeps each run's log and metrics, figures.json, table.md, and a picture of each kind and size.
--keep continues a table: runs that are already there with the same options are not run again. --only times measures times again
beside the losses that are there; --only table makes tables and pictures of what is there. --quick: a tiny model and few steps, to
try the script.

BUILD   folder of the program (default build; make builds it)    MPIRUN  how to start ranks (dev/on_ranks.sh)"""
import json, re, shutil, sys
from pathlib import Path
from types import SimpleNamespace
import measure as m
from svg import Panels

USUAL = dict(out="runs/compress_table", only="", ranks=2, sizes=["2x64", "2x128"], seeds=[1, 2, 3], steps=300, rounds=5,
             time_steps=30, links=[],
             rates=["0.1", "1", "10", "100"], variants="none bf16 fp16 int8 int4 int4-ef top-k top-k-ef sign sign-ef onebit-adam "
             "powersgd powersgd-ef".split())
TINY = dict(sizes=["1x16"], seeds=[1], steps=10, rounds=1, time_steps=2, rates=["0.1", "100"], variants="none int8 sign sign-ef "
            "onebit-adam".split())
SKIP = 6 # The first steps, and those after which compression begins, are not counted.


def check(o):
    if o.only not in ("", "losses", "times", "table"): m.fail(f"--only wants losses, times or table, not '{o.only}'")
    for size in o.sizes:
        if not re.fullmatch(r"[1-9]\d?x[1-9]\d*", size): m.fail(f"--sizes wants BLOCKSxCHANNELS such as 2x64, not '{size}'")
        if int(size.split("x")[1]) % 16: m.fail(f"--sizes wants a multiple of 16 channels, not '{size}'")
    for rate in o.rates + o.links:
        if not re.fullmatch(r"([1-9]\d*|0)(\.\d+)?", rate) or not float(rate):
            m.fail(f"--rates and --links want Gb/s above 0, not '{rate}'")
    if "none" not in o.variants: m.fail("--variants has no none, which the others are compared with")
    for word in o.variants:
        if not re.fullmatch(r"[a-z0-9-]+(@[1-9]\d*)?", word):
            m.fail(f"--variants wants names such as sign-ef or onebit-adam@75, not '{word}'")
        if re.match("none@|none-ef$", word): m.fail(f"--variants: {word}; none has neither error feedback nor a step to begin at")
        if "@" in word and int(word.split("@")[1]) >= o.steps:
            m.fail(f"--variants: {word} begins after the last of {o.steps} steps")
    if o.only == "table" and o.more: m.fail(f"--only table runs nothing; leave out {' '.join(o.more)}")


# ---- runs ----
def method(variant, steps):
    """The options of a variant in a run of so many steps."""
    name, _, start = variant.partition("@")
    if not start and name.startswith(("onebit-adam", "powersgd")): start = max(steps // (6 if name.startswith("onebit") else 10), 1)
    fed_back = name.endswith("-ef") or name == "onebit-adam"
    feedback = "" if name == "none" else "--error-feedback" if fed_back else "--no-error-feedback"
    return f"--compress {name.removesuffix('-ef')} {feedback} {f'--compress-from {start}' if start else ''}"


class Runs:
    def __init__(self, o):
        self.o, self.out = o, Path(o.out)
        self.program, self.made_by = f"{m.environ('BUILD', 'build')}/train_gpt2_compress", m.commit()
        batch = "--seq-len 16 --batch-size 2" if o.quick else "--seq-len 64 --batch-size 8"
        self.task = f"--data data/train.bin --val-data data/val.bin {batch} --lr 2e-3 --lr-schedule wsd"

    def each(self):
        """All variants of all sizes, with the options of the model. Heads have 32 channels, or 16 if these do not divide."""
        for size in self.o.sizes:
            blocks, channels = map(int, size.split("x"))
            heads = channels // 16 if channels % 32 else channels // 32
            for variant in self.o.variants: yield size, variant, f"--layers {blocks} --heads {heads} --channels {channels}"

    def once(self, kind, name, *options):
        """A run whose files are then in DIR/KIND/NAME, all of them or none."""
        folder, now, options = self.out / kind / name, self.out / "now", " ".join(m.words(*options, self.o.more))
        if folder.is_dir():
            made = json.loads((folder / "made.json").read_text())
            if made["options"] != options: m.fail(f"{folder} was made with other options ({made['options']}); choose another --out")
            return
        run = m.train(name, self.program, options, ranks=self.o.ranks, out=now)
        (now / "made.json").write_text(json.dumps({"options": options, "commit": self.made_by}))
        folder.parent.mkdir(exist_ok=True)
        now.rename(folder)
        m.note(f"  {name}: {run.losses[-1][1] if run.losses else ''}")

    def losses(self):
        o = self.o
        for seed in o.seeds:
            for size, variant, model in self.each():
                bias = "" if variant == "none" else f"--measure-error {o.steps // 10}"
                self.once("runs", f"{size}.{variant}.{seed}", model, self.task, f"--eval-every {max(o.steps // 25, 1)} "
                          f"--eval-steps 8 --sample-every 0 {bias} --steps {o.steps} {method(variant, o.steps)} --seed {seed}")

    def time(self, kind, name, variant, *options):
        start = " --compress-from 3" if variant.startswith(("onebit-adam", "powersgd")) else ""
        self.once(kind, name, self.task, f"--eval-every 0 --sample-every 0 --steps {SKIP + self.o.time_steps}",
                  method(variant, 0).split("--compress-from")[0] + start, *options)

    def times(self):
        o = self.o
        for kind in "times", "links": shutil.rmtree(self.out / kind, ignore_errors=True)
        (self.out / "times.json").write_text(json.dumps({"busy": m.busy_percent(), "rounds": o.rounds, "links": o.links}))
        for number in range(1, o.rounds + 1):
            for size, variant, model in self.each(): self.time("times", f"{size}.{variant}.{number}", variant, model)
        for rate in o.links:
            for size, variant, model in self.each():
                self.time("links", f"{size}.{variant}.{rate}", variant, model, f"--emulate-link {rate}")

    def read(self, kind, size, variant, number):
        folder = self.out / kind / f"{size}.{variant}.{number}"
        if not folder.is_dir():
            remedy = "run it with --keep and without --only" if kind == "runs" else "--only times measures all times again"
            m.fail(f"{self.out} has no {kind}/{folder.name}; {remedy}")
        return m.Run(folder)

    def commits(self, kind):
        return " ".join(sorted({json.loads(file.read_text())["commit"] for file in (self.out / kind).glob("*/made.json")}))


# ---- figures ----
def summary(x):
    return [round(sum(x) / len(x), 6), min(x), max(x)]


class Variant:
    """What was measured of a variant with a model's size."""

    def __init__(self, runs, name, size, times):
        o = runs.o
        seeds = [runs.read("runs", size, name, seed) for seed in o.seeds]
        self.name, about = name, seeds[0].about
        self.start, self.parameters, self.steps = about["options"]["compress-from"], about["parameters"], about["options"]["steps"]
        self.about = f"{about['world_size']} ranks with " + (
            "{batch-size} sequences of {seq-len} tokens each from {data}, learning rate {lr:g}".format_map(about["options"]))
        self.losses = [dict(run.losses) for run in seeds] # {step: loss} for each seed
        biases = [line for run in seeds for line in run.lines if "compression_error" in line]
        self.bias = [m.median(line[key] for line in biases) if biases else None
                     for key in ("compression_error", "compression_norm_ratio", "compression_cosine")]
        rates = [(step["lr"], step["step"]) for step in seeds[0].steps]
        self.fall = max(rates)[1] # the last step at the highest rate of learning
        self.compute = self.sent = self.errors = 0
        if times:
            measured = [runs.read("times", size, name, number) for number in range(1, times["rounds"] + 1)]
            self.sent, self.errors = measured[0].last("comm_bytes"), measured[0].about["predicted_bytes"].get("errors", 0)
            self.compute = m.median(run.diagnosis["rank_0"]["computing"] for run in measured)
        self.links = {rate: [step for step in runs.read("links", size, name, rate).steps if step["step"] > SKIP]
                      for rate in (times or {}).get("links", [])}

    def step_seconds(self, rate):
        return self.compute / 1e3 + self.sent * 8 / (float(rate) * 1e9)

    def seconds(self, none, rate, steps):
        """Seconds that so many steps take at a rate; without times of their own, steps before the first compressed one are as those
        of none."""
        whole = min(steps, self.start)
        return whole * none.step_seconds(rate) + (steps - whole) * self.step_seconds(rate)

    def steps_in(self, none, rate, time):
        """How many steps, not rounded, it makes in that time."""
        warm = self.start * none.step_seconds(rate)
        return time / none.step_seconds(rate) if time < warm else self.start + (time - warm) / self.step_seconds(rate)

    def losses_after(self, steps):
        """Of each seed after so many steps, between evaluations on the line between them."""
        at = [*self.losses[0]]
        i = next((i for i in range(1, len(at) - 1) if at[i] >= steps), len(at) - 1)
        a, b = at[i - 1], at[i]
        return [loss[a] + (loss[b] - loss[a]) * (steps - a) / (b - a) for loss in self.losses]

    def curve(self):
        return [[step, sum(loss[step] for loss in self.losses) / len(self.losses)] for step in self.losses[0]]

    def row(self, none):
        end = [loss[self.steps] for loss in self.losses]
        more = [a - loss[none.steps] for a, loss in zip(end, none.losses)]
        return dict(variant=self.name, sent=self.sent, whole=none.sent, errors=self.errors, start=self.start, bias=self.bias,
                    compute=self.compute, loss=summary(end), more=summary(more), curve=self.curve())


def at_rate(variants, none, rate):
    """The losses at the end of the time in which the fastest comes to the step from which the rate of learning falls."""
    budget = min(v.seconds(none, rate, none.fall) for v in variants)
    ends = []
    for v in variants:
        steps = v.steps_in(none, rate, budget)
        losses = v.losses_after(steps)
        points = [[v.seconds(none, rate, step), loss] for step, loss in v.curve() if step < steps]
        ends.append(dict(variant=v.name, steps=int(round(steps, 1)), losses=losses, loss=summary(losses),
                         points=[*points, [budget, summary(losses)[0]]]))
    best = min(ends, key=lambda end: end["loss"][0])
    # the best is not better with every seed
    for end in ends: end["best"] = any(a <= b for a, b in zip(end["losses"], best["losses"]))
    one = none.step_seconds(rate)
    return dict(rate=float(rate), seconds=budget, share=1 - none.compute / 1e3 / one, ends=ends)


def figures_of(runs, size, times):
    variants = [Variant(runs, name, size, times) for name in runs.o.variants]
    none = next(v for v in variants if v.name == "none")

    def link(v, rate):
        waits = m.median(step["comm_exposed_ms"] / step["step_ms"] for step in v.links[rate])
        return [1e3 * v.step_seconds(rate), m.median(step["step_ms"] for step in v.links[rate]), waits]
    return dict(size=size, about=none.about, parameters=none.parameters, steps=none.steps, fall=none.fall,
                rows=[v.row(none) for v in variants],
                rates=[at_rate(variants, none, rate) for rate in runs.o.rates] if times else [],
                links=[dict(rate=float(rate), rows=[link(v, rate) for v in variants]) for rate in (times or {}).get("links", [])])


# ---- tables ----
def title(variant):
    name, _, start = variant.partition("@")
    return f"`{name.removesuffix('-ef')}`{', error feedback' * name.endswith('-ef')}{f' from step {start}' if start else ''}"


def bytes_(n): return f"{n / 1e6:.2f} MB" if n >= 1e6 else f"{n / 1e3:.1f} kB" if n >= 1e3 else f"{n} bytes" if n else ""
def blocks_of(size): return "{} blocks of {} channels".format(*size.split("x"))


def cells(r):
    """A variant after equal steps."""
    timed = [bytes_(r["sent"]), f"{r['whole'] / r['sent']:.1f} times", bytes_(r["errors"])] if r["compute"] else [""] * 3
    bias = ["" if x is None else f"{x:.{digits}f}" for x, digits in zip(r["bias"], (4, 3, 3))]
    return [title(r["variant"]) + (f" from step {r['start']}" if r["start"] and "@" not in r["variant"] else ""), *timed, *bias,
            f"{r['compute']:.1f} ms" if r["compute"] else "", "{:.3f} ({:.3f} to {:.3f})".format(*r["loss"]),
            "" if r["variant"] == "none" else "{:+.3f} ({:+.3f} to {:+.3f})".format(*r["more"])]


def tables_of(f):
    name, names = blocks_of(f["size"]), [title(r["variant"]) for r in f["rows"]]
    yield f"**{name}, {f['parameters']} parameters**, after {f['steps']} steps\n"
    yield m.table(["`--compress`", "sent per rank and step", "ddp sends", "`errors` in memory", "relative error", "norm ratio",
                   "cosine", "computing in a step", "validation loss (seeds)", "more than `none` (seeds)"], *map(cells, f["rows"]))
    if f["rates"]:
        yield f"**{name}**: loss after equal **simulated** time (steps made in it)\n"
        heads = [f"{r['rate']:g} Gb/s: {r['seconds']:.3g} s; `none` communicates {100 * r['share']:.0f} %" for r in f["rates"]]
        ends = [[f"{'**' * end['best']}{end['loss'][0]:.3f}{'**' * end['best']} ({end['steps']})" for end in r["ends"]]
                for r in f["rates"]]
        yield m.table(["`--compress`", *heads], *([name, *row] for name, *row in zip(names, *ends)))
    if f["links"]: # what a step really lasted on links that were emulated
        yield f"**{name}**: a step simulated, and a real one with `--emulate-link` (the share of it that waits for communication)\n"
        heads = [head for link in f["links"] for head in (f"{link['rate']:g} Gb/s: simulated", "real")]
        lasts = [[("{:.1f} ms".format(simulated), "{:.1f} ms ({:.0f} %)".format(real, 100 * waits))
                  for simulated, real, waits in link["rows"]] for link in f["links"]]
        yield m.table(["`--compress`", *heads], *([name, *sum(row, ())] for name, *row in zip(names, *lasts)))


def table_of_hook():
    """Bytes that a rank sends for each parameter, beside PyTorch's quantization_pertensor_hook: it gathers everyone's whole int8
    tensors."""
    rows = []
    for n in 2, 4, 8, 16, 32, 64:
        ring = 8 * (n - 1) / n
        rows.append([n, f"{ring:.2f}", f"{ring / 2:.2f}", f"{ring / 4 * (1 + 4 / 256):.2f}", n - 1, f"{(n - 1) / ring:.3g} times"])
    return "Arithmetic, not measured: bytes that a rank sends for each parameter\n\n" + m.table(
        ["ranks", "fp32 ring", "bf16 ring", "`int8`", "PyTorch's `quantization_pertensor_hook`", "beside the fp32 ring"], *rows)


def page(runs, figures, times):
    yield f"{figures[0]['about']}, constant up to step {figures[0]['fall']}. Seeds differ in weights and\norder of data.\n"
    for f in figures: yield from tables_of(f)
    if times:
        yield ("Simulated: the time of a step is its measured computing, compression included, + bytes / rate, without latency and "
               "overlap. Bold: the\n"
               "lowest loss, and all that it does not beat with every seed.\n")
    yield table_of_hook()
    yield f"Losses: commit {runs.commits('runs')}." + (f" Times: commit {runs.commits('times')}." if times else "")
    if times and times["busy"] > 5:
        yield f"Other programs used {times['busy']} % of this machine when the times were measured: they are a little too long."
    if runs.o.ranks > m.cores(): yield "There are more ranks than cores: a step's time is that of shared cores."


# ---- pictures: the loss over simulated time, a panel for each rate; and over steps with and without error feedback, by method ----
COLOURS = {"none": "#000000", "bf16": "#8a8a8a", "fp16": "#bbbbbb", "int8": "#3a86b7", "int4": "#17a398", "top-k": "#f08c00",
           "sign": "#c1121f", "onebit-adam": "#7b2cbf", "powersgd": "#5a9a2f"}


def base(variant): return variant.split("@")[0].removesuffix("-ef")


def curve(variant, points, end, note="", wins=False, dashed=False):
    return SimpleNamespace(points=points, end=end, wins=wins, dashed=dashed, colour=COLOURS.get(base(variant), "#555555"),
                           label=f"{variant.replace('-ef', ', feedback', 1)} {end:.2f}{note}")


def time_picture(f, name):
    """Each method with or without error feedback, as has the lower loss after equal steps; not fp16 beside bf16."""
    # unit: seconds of computing
    unit, shown, has_bf16 = f["rows"][0]["compute"] / 1000, {}, any(r["variant"] == "bf16" for r in f["rows"])
    for r in f["rows"]:
        if base(r["variant"]) == "fp16" and has_bf16: continue
        if base(r["variant"]) not in shown or r["loss"][0] < shown[base(r["variant"])]["loss"][0]: shown[base(r["variant"])] = r
    names = [r["variant"] for r in shown.values()]
    bottom = min(end["loss"][0] for rate in f["rates"] for end in rate["ends"]) - 0.05
    picture = Panels(f"validation loss over simulated time, {name}: computing as measured + bytes / rate", len(f["rates"]), bottom,
                     bottom + 1.25)
    for rate in f["rates"]:
        curves = [curve(end["variant"], [(x / unit, y) for x, y in end["points"]], end["loss"][0], f" ({end['steps']})", end["best"])
                  for end in rate["ends"] if end["variant"] in names]
        picture.add(f"{rate['rate']:g} Gb/s", "simulated time, in steps of pure computing", rate["seconds"] / unit, curves)
        picture.svg.text(picture.left + picture.WIDE + 10, picture.top - 12, "loss at the end (steps)")
    return str(picture.svg)


def feedback_picture(f, name):
    names = [r["variant"] for r in f["rows"]]
    methods = [base(v) for v in names if "-ef" in v and base(v) in names]
    curves = {r["variant"]: curve(r["variant"], r["curve"], r["curve"][-1][1], dashed="-ef" in r["variant"]) for r in f["rows"]}
    ends = [curve.end for curve in curves.values()]
    picture = Panels(f"validation loss over steps with (dashed) and without error feedback, {name}", len(methods),
                     min(ends) - 0.05, max(ends) + 0.3)
    for method in methods:
        picture.add(method, "steps", curves["none"].points[-1][0], [
            curves[v] for v in names if v == "none" or base(v) == method or method == "sign" and v == "onebit-adam"])
    return str(picture.svg)


def main():
    defaults = USUAL | (TINY if "--quick" in sys.argv else {})
    o = m.options(__doc__, flags=("keep", "quick"), least={"ranks": (2,), "steps": (10,)},
                  placeholders={"only": "losses|times|table", "links": '"0.1 1"'}, **defaults)
    check(o)
    runs = Runs(o)
    if o.only != "table":
        m.need(runs.program)
        m.ranks_can_start(o.ranks)
        if (runs.out / "runs").is_dir() and not o.keep and o.only != "times":
            m.fail(f"{runs.out} has runs of another table; --keep continues it")
    runs.out.mkdir(parents=True, exist_ok=True)
    if o.only in ("", "losses"): runs.losses()
    for seed in o.seeds:
        for size, variant, _ in runs.each(): runs.read("runs", size, variant, seed)
    if o.only in ("", "times"): runs.times()
    times = json.loads((runs.out / "times.json").read_text()) if (runs.out / "times").is_dir() else None
    figures = [figures_of(runs, size, times) for size in o.sizes]
    (runs.out / "figures.json").write_text(json.dumps(figures) + "\n")
    (runs.out / "table.md").write_text("\n".join(page(runs, figures, times)) + "\n")
    print((runs.out / "table.md").read_text())
    for f in figures:
        for kind, picture in ("time", time_picture), ("feedback", feedback_picture):
            if times if kind == "time" else any(variant.endswith("-ef") for variant in o.variants):
                (runs.out / f"{kind}_{f['size']}.svg").write_text(picture(f, blocks_of(f["size"])))
                print(f"picture: {runs.out}/{kind}_{f['size']}.svg")
    if not times: print("Only the losses are there: --only times measures the times, and adds what follows from them.")


main()
