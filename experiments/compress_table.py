"""Every method of train_gpt2_compress on the same task: bytes, error, memory, loss after equal steps and equal
time.

A size is BLOCKSxCHANNELS, with :sgd, :momentum or :unclipped behind it in place of AdamW with clipping (sgd is AdamW with an eps of
1, beside which the root of v is small). A variant is a method of --compress, with -ef behind it --error-feedback, else
--no-error-feedback, with @STEP --compress-from STEP. powersgd has a tenth of its steps before that. There are two kinds of runs:
  losses  a run for each seed, size and variant, in turns. They do not depend on what else the machine does.
  times   --rounds short runs of each, in turns: the time for which rank 0 computes in a step, compression included. This is the
          diagnosis's computing, without waits and without time in which the rank had no core, as the mean of --time-steps steps;
          the table has the median of the rounds. Other programs still share caches: better on a quiet machine. With --computing-ms
          all methods are said to compute that long instead. Bytes and memory are from these runs as well.
The time of a step at a rate is SIMULATED: computing + bytes / rate, without latency and without overlap. The learning rate is
constant over most of a run (--lr-schedule wsd), so that a curve can be cut anywhere: the equal time is that in which the fastest
variant comes to the step from which the rate falls. The loss after equal steps is that at the end. What a simulated time is worth
shows a third kind of runs, at the rates of --links (none by default; part of the times): real ones, with --emulate-link RATE.

--only losses or times makes runs of one kind; the other's may stand in the file that --beside names. Results are stored after each
run, and --keep FILE takes the runs that are already there. --time-svg and --feedback-svg draw the last of the sizes."""
import re
from types import SimpleNamespace
import dev.lib as m
from dev.tools.svg import Panels

VARIANTS = "none bf16 int8 int4 int4-ef top-k top-k-ef sign sign-ef powersgd powersgd-ef".split()
OPTIMIZERS = {"": "", "sgd": "--eps 1 --weight-decay 0 --grad-clip 0 --beta1 0 --lr 1",
              "momentum": "--eps 1 --weight-decay 0 --grad-clip 0 --lr 0.3", "unclipped": "--grad-clip 0"}
SKIP = 6 # The first steps, and those after which compression begins, are not counted.
OPTIONS = dict(only="", ranks=2, sizes=["2x64"], seeds=[1, 2, 3], steps=300, time_steps=30, links=[], computing_ms=0,
               rates=["0.1", "1", "10", "100"], variants=VARIANTS, beside="", keep="", time_svg="", feedback_svg="")
ROUNDS, LEAST = 5, {"ranks": (2,), "steps": (10,), "computing_ms": (0,)}
PLACEHOLDERS = {"only": "losses|times", "links": '"0.1 1"'}


def check(o):
    if o.only not in ("", "losses", "times"): m.fail(f"--only wants losses or times, not '{o.only}'")
    for size in o.sizes:
        if not re.fullmatch(rf"[1-9]\d?x[1-9]\d*({'|'.join(f':{name}' for name in OPTIMIZERS if name)})?", size):
            m.fail(f"--sizes wants BLOCKSxCHANNELS such as 2x64 or 2x64:sgd, not '{size}'")
        if int(re.split("[x:]", size)[1]) % 16: m.fail(f"--sizes wants a multiple of 16 channels, not '{size}'")
    for rate in o.rates + o.links:
        if not re.fullmatch(r"([1-9]\d*|0)(\.\d+)?", rate) or not float(rate):
            m.fail(f"--rates and --links want Gb/s above 0, not '{rate}'")
    if "none" not in o.variants: m.fail("--variants has no none, which the others are compared with")
    for word in o.variants:
        if not re.fullmatch(r"[a-z0-9-]+(@[1-9]\d*)?", word):
            m.fail(f"--variants wants names such as sign-ef or powersgd@75, not '{word}'")
        if re.match("none@|none-ef$", word): m.fail(f"--variants: {word}; none has neither error feedback nor a step to begin at")
        if "@" in word and int(word.split("@")[1]) >= o.steps:
            m.fail(f"--variants: {word} begins after the last of {o.steps} steps")


# ---- runs ----
def method(variant, steps):
    """The options of a variant in a run of so many steps."""
    name, _, start = variant.partition("@")
    if not start and name.startswith("powersgd"): start = max(steps // 10, 1)
    feedback = "" if name == "none" else "--error-feedback" if name.endswith("-ef") else "--no-error-feedback"
    return f"--compress {name.removesuffix('-ef')} {feedback} {f'--compress-from {start}' if start else ''}"


def of_losses(run):
    """What is stored of a run for its losses; fall: the last step at the highest rate of learning."""
    options, biases = run.about["options"], [line for line in run.lines if "compression_error" in line]
    about = "{batch-size} sequences of {seq-len} tokens each from {data}, learning rate {lr:g}".format_map(options)
    return dict(losses=run.losses, steps=options["steps"], start=options["compress-from"], parameters=run.about["parameters"],
                about=f"{run.about['world_size']} ranks with {about}",
                fall=max((step["lr"], step["step"]) for step in run.steps)[1],
                bias=[m.median(line[f"compression_{key}"] for line in biases)
                      for key in ("error", "norm_ratio", "cosine") if biases])


def of_times(run):
    steps = [step for step in run.steps if step["step"] > SKIP]
    return dict(sent=run.last("comm_bytes"), errors=run.about["predicted_bytes"].get("errors", 0),
                computing=run.diagnosis["rank_0"]["computing"], step_ms=m.median(step["step_ms"] for step in steps),
                waits=m.median(step["comm_exposed_ms"] / step["step_ms"] for step in steps))


def measure(x):
    o, d = x.o, x.d
    kept = m.Results.read(o.keep) if o.keep else d
    if kept.header["commit"] != d.header["commit"]: m.fail(f"{o.keep} has runs of commit {kept.header['commit']}")

    def each():
        """All variants of all sizes, with the options of the model. Heads have 32 channels, or 16 if these do not divide."""
        for size in o.sizes:
            shape, _, optimizer = size.partition(":")
            blocks, channels = map(int, shape.split("x"))
            heads = channels // 16 if channels % 32 else channels // 32
            for variant in o.variants:
                yield size, variant, f"--layers {blocks} --heads {heads} --channels {channels} {OPTIMIZERS[optimizer]}"

    def once(kind, size, variant, stored, *options):
        name, options = f"{kind}, {size}, {variant}", m.words(
            "--data data/train.bin --val-data data/val.bin --seq-len 64 --batch-size 8 --lr 2e-3 --lr-schedule wsd", *options)
        record = kept.rounds.get(name, {}).get(x.round)
        if record and record["options"] == " ".join(m.words(options, o.more)): d.add(**record)
        else: x.run(name, o.ranks, "compress", options, keep=stored)
        d.write(x.into)

    def timed(kind, size, variant, model, *options):
        start = "--compress-from 3" if variant.startswith("powersgd") else ""
        once(kind, size, variant, of_times, model, f"--steps {SKIP + o.time_steps}",
             method(variant, 0).split("--compress-from")[0], start, *options)

    for x.round in o.seeds if o.only != "times" else []:
        for size, variant, model in each():
            bias = "" if variant == "none" else f"--measure-error {max(o.steps // 10, 1)}"
            once("losses", size, variant, of_losses, model, f"--eval-every {max(o.steps // 25, 1)} --eval-steps 8",
                 f"{bias} --steps {o.steps}", method(variant, o.steps), f"--seed {x.round}")
    if o.only == "losses": return
    for _ in x.in_turns():
        for size, variant, model in each(): timed("times", size, variant, model)
    x.round = 1
    for rate in o.links:
        for size, variant, model in each(): timed(f"link of {rate} Gb/s", size, variant, model, f"--emulate-link {rate}")


# ---- figures ----
def summary(x):
    return SimpleNamespace(mean=sum(x) / len(x), least=min(x), most=max(x))


class Variant:
    """What was measured of a variant with a model's size; without times of its own its steps take no time."""

    def __init__(self, d, size, name, computing_ms):
        runs = d.each_round(f"losses, {size}, {name}")
        times = d.each_round(f"times, {size}, {name}") if f"times, {size}, {name}" in d.rounds else []
        self.name, self.size, self.first, self.times = name, size, runs[0], times
        self.losses = [dict(map(tuple, run["losses"])) for run in runs] # {step: loss} for each seed
        self.bias = [m.median(values) for values in zip(*(run["bias"] for run in runs))]
        self.ends = [loss[self.first["steps"]] for loss in self.losses]
        self.compute = computing_ms or (m.median(run["computing"] for run in times) if times else 0)
        self.sent, self.errors = (times[0][key] if times else 0 for key in ("sent", "errors"))
        self.links = {rate: d.first(run) for run in d.runs() for rate in re.findall(rf"^link of (.*) Gb/s, {size}, {name}$", run)}
        self.curve = [[step, summary([loss[step] for loss in self.losses]).mean] for step in self.losses[0]]

    def step_seconds(self, rate):
        return self.compute / 1e3 + self.sent * 8 / (float(rate) * 1e9)

    def seconds(self, none, rate, steps):
        """Seconds that so many steps take at a rate; without times of their own, steps before the first compressed one are as those
        of none."""
        whole = min(steps, self.first["start"])
        return whole * none.step_seconds(rate) + (steps - whole) * self.step_seconds(rate)

    def steps_in(self, none, rate, time):
        """How many steps, not rounded, it makes in that time."""
        start = self.first["start"]
        warm = start * none.step_seconds(rate)
        return time / none.step_seconds(rate) if time < warm else start + (time - warm) / self.step_seconds(rate)

    def losses_after(self, steps):
        """Of each seed after so many steps, between evaluations on the line between them."""
        at = [*self.losses[0]]
        i = next((i for i in range(1, len(at) - 1) if at[i] >= steps), len(at) - 1)
        a, b = at[i - 1], at[i]
        return [loss[a] + (loss[b] - loss[a]) * (steps - a) / (b - a) for loss in self.losses]


def at_rate(variants, none, rate):
    """The losses at the end of the time in which the fastest comes to the step from which the rate of learning falls."""
    budget, ends = min(v.seconds(none, rate, none.first["fall"]) for v in variants), []
    for v in variants:
        steps = v.steps_in(none, rate, budget)
        losses = v.losses_after(steps)
        points = [[v.seconds(none, rate, step), loss] for step, loss in v.curve if step < steps]
        ends.append(SimpleNamespace(variant=v.name, steps=int(round(steps, 1)), losses=losses, loss=summary(losses).mean,
                                    points=[*points, [budget, summary(losses).mean]]))
    best = min(ends, key=lambda end: end.loss)
    # the best is not better with every seed
    for end in ends: end.best = any(a <= b for a, b in zip(end.losses, best.losses))
    return SimpleNamespace(rate=float(rate), seconds=budget, share=1 - none.compute / 1e3 / none.step_seconds(rate), ends=ends)


# ---- tables ----
def title(v):
    name, _, start = v.name.partition("@")
    begins = f" from step {start or v.first['start']}" if start or v.first["start"] else ""
    return f"`{name.removesuffix('-ef')}`{', error feedback' * name.endswith('-ef')}{begins}"


def bytes_(n): return f"{n / 1e6:.2f} MB" if n >= 1e6 else f"{n / 1e3:.1f} kB" if n >= 1e3 else f"{n} bytes" if n else ""


def of_size(size):
    shape, _, optimizer = size.partition(":")
    return f"{shape.split('x')[1]} channels{f', {optimizer}' if optimizer else ''}"


def equal_steps(sizes, computing_ms):
    """A line for each variant: bytes, errors and time are those of the last size."""
    heads, last = ["`--compress`"], [*sizes.values()][-1]
    times = bool(last[0].times)
    if times: heads += ["sent a step", "ddp sends", "errors"] + ["computing"] * (not computing_ms)
    yield heads + ["relative error", "norm ratio", "cosine"] + [
        head for size in sizes for head in (f"loss, {of_size(size)}", "more than none")]
    for i, v in enumerate(last):
        row, none = [title(v)], last[0]
        if times: row += [bytes_(v.sent), f"{none.sent / v.sent:.1f} times", bytes_(v.errors)]
        if times and not computing_ms: row += [f"{v.compute / none.compute:.2f}"]
        row += [f"{x:.{digits}f}" for x, digits in zip(v.bias, (4, 3, 3))] or ["", "", ""]
        for variants in sizes.values():
            end, none = variants[i], variants[0]
            more = summary([a - b for a, b in zip(end.ends, none.ends)])
            loss = summary(end.ends)
            row += [f"{loss.mean:.3f} ({loss.least:.3f} to {loss.most:.3f})",
                    f"{more.mean:+.3f} ({more.least:+.3f} to {more.most:+.3f})" if end is not none else ""]
        yield row


def equal_time(variants, rates):
    yield ["`--compress`", *(f"{r.rate:g} Gb/s, `none` communicates {100 * r.share:.0f} %" for r in rates)]
    for i, v in enumerate(variants):
        ends = [r.ends[i] for r in rates]
        yield [title(v), *(f"{'**' * end.best}{end.loss:.3f}{'**' * end.best} ({end.steps})" for end in ends)]


def links(variants):
    """What a step really lasted on links that were emulated, beside the simulation, and the share of it that waits."""
    yield ["`--compress`", *(head for rate in variants[0].links for head in (f"{rate} Gb/s: simulated", "real", "over simulated"))]
    for v in variants:
        cells = [title(v)]
        for rate, link in v.links.items():
            simulated = 1e3 * v.step_seconds(rate)
            cells += [f"{simulated:.1f} ms", f"{link['step_ms']:.1f} ms ({100 * link['waits']:.0f} %)",
                      f"{link['step_ms'] / simulated:.2f}"]
        yield cells


def show(d, o):
    times = m.Results.read(o.beside) if o.beside else d
    d.rounds |= times.rounds
    runs = [run.split(", ") for run in d.runs("^losses")]
    if not runs: return print("Only the times are there: --from FILE --beside FILE makes the tables from losses and times.")
    sizes = {size: [] for _, size, _ in runs}
    for _, size, name in runs: sizes[size].append(Variant(d, size, name, o.computing_ms))
    for variants in sizes.values(): variants.sort(key=lambda v: v.name != "none")
    first = [*sizes.values()][0][0].first
    print(f"{first['about']}, constant up to step {first['fall']}. Validation losses after {first['steps']} steps: the mean of\n"
          "seeds, which differ in weights and order of data, from and to. Computing, compression included, is beside that of "
          "none.\n")
    d.print_table(*equal_steps(sizes, o.computing_ms))
    for size, variants in sizes.items():
        if not variants[0].times: continue
        rates = [at_rate(variants, variants[0], rate) for rate in o.rates]
        print(f"\n**{of_size(size)}**: loss after equal **simulated** time, and the steps made in it. Bold: the lowest, and all "
              "that it does not beat with every seed.\n")
        d.print_table(*equal_time(variants, rates))
        if variants[0].links:
            print(f"\n**{of_size(size)}**: a step simulated, and a real one with `--emulate-link` (the share of it that waits)\n")
            d.print_table(*links(variants))
    if variants[0].times:
        if not o.computing_ms and (warning := times.busy("the times, which are a little too long")): print(f"\n{warning}")
        m.picture(o.time_svg, lambda: time_picture(variants, rates, of_size(size)))
    m.picture(o.feedback_svg, lambda: feedback_picture(variants, of_size(size)))


# ---- pictures: the loss over simulated time, a panel for each rate; and over steps with and without error feedback, by method ----
COLOURS = {"none": "#000000", "bf16": "#8a8a8a", "int8": "#3a86b7", "int4": "#17a398", "top-k": "#f08c00",
           "sign": "#c1121f", "powersgd": "#5a9a2f"}


def base(variant): return variant.split("@")[0].removesuffix("-ef")


def curve(variant, points, end, note="", wins=False, dashed=False):
    return SimpleNamespace(points=points, end=end, wins=wins, dashed=dashed, colour=COLOURS.get(base(variant), "#555555"),
                           label=f"{variant.replace('-ef', ', feedback', 1)} {end:.2f}{note}")


def time_picture(variants, rates, name):
    """Each method with or without error feedback, as has the lower loss after equal steps."""
    unit, shown = variants[0].compute / 1000, {} # unit: seconds of computing
    for v in sorted(variants, key=lambda v: summary(v.ends).mean):
        shown.setdefault(base(v.name), v.name)
    bottom = min(end.loss for rate in rates for end in rate.ends) - 0.05
    picture = Panels(f"validation loss over simulated time, {name}: computing as measured + bytes / rate", len(rates), bottom,
                     bottom + 1.25)
    for rate in rates:
        curves = [curve(end.variant, [(x / unit, y) for x, y in end.points], end.loss, f" ({end.steps})", end.best)
                  for end in rate.ends if end.variant in shown.values()]
        picture.add(f"{rate.rate:g} Gb/s", "simulated time, in steps of pure computing", rate.seconds / unit, curves)
        picture.svg.text(picture.left + picture.WIDE + 10, picture.top - 12, "loss at the end (steps)")
    return str(picture.svg)


def feedback_picture(variants, name):
    names = [v.name for v in variants]
    methods = [base(v) for v in names if "-ef" in v and base(v) in names]
    curves = {v.name: curve(v.name, v.curve, v.curve[-1][1], dashed="-ef" in v.name) for v in variants}
    ends = [curve.end for curve in curves.values()]
    picture = Panels(f"validation loss over steps with (dashed) and without error feedback, {name}", len(methods),
                     min(ends) - 0.05, max(ends) + 0.3)
    for method in methods:
        picture.add(method, "steps", curves["none"].points[-1][0], [
            curves[v] for v in names if v == "none" or base(v) == method])
    return str(picture.svg)
