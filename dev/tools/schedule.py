#!/usr/bin/env python3
"""schedule - draws a pipeline's schedule and says where its bubble comes from: of numbers that you give, or of a run.

    build/schedule --p 4 --m 8 --schedule interleaved --v 2 --times 20,24,16 --svg interleaved.svg
    build/schedule --p 8 --m 32 --compare
    build/schedule --trace run.json

The picture has a row per rank. F0 is the forward pass of micro-batch 0, B0 its backward pass, I0 and W0 the two halves of one:
the gradient of the input, and those of the weights. Each chunk after the first has a prime; dots are waiting. Below the picture
are each rank's times, its peak of activations, and the bubble with its parts (doc/reference/pipelines.md). schedule_play.py plays
schedules, in the order that train_gpt2_pp has, and timeline.py reads a run's actions. (build/plan has the bytes.)
"""
import math, sys
from argparse import Namespace
from collections import defaultdict, namedtuple
from itertools import groupby
from pathlib import Path
from statistics import median
from schedule_play import SCHEDULES, Pipeline, ask_player, play
from timeline import Trace
from tool import LEFT, WIDTH, TimePicture, choice, die, parse_number, parse_options, print_table, real, require, switch, text, whole

FOLDER = Path(sys.argv[0]).parent
RAMP = "ramp (start and end)"
MOST_CHUNKS, MOST_RANKS, MOST_MICRO = 1024, 256, 4096
OPTIONS = [
    choice("schedule", "1f1b", "|".join(SCHEDULES), "the order of a rank's actions"),
    whole("p", 4, 1, MOST_RANKS, "stages, each on a rank of its own"),
    whole("m", 8, 1, MOST_MICRO, "micro-batches in a step"),
    whole("v", 0, 0, 64, "chunks of blocks on each rank; 0: 2 if interleaved, else 1"),
    text("times", "1,1,1", "F,I,W",
         "ms that a micro-batch takes in 1/p of the model: forward, gradient of the input, gradients of the weights"),
    text("model", "", "NAME", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, 64N channels, N heads:"
         " chunks take as long as their blocks and their head; '': equal chunks"),
    text("split", "auto", "auto|even|9,3", "blocks of each chunk, in the model's order; auto: balanced by cost"),
    switch("compare", "print a line for each schedule, instead of one's picture"),
    text("trace", "", "FILE", "show the shortest step of a run of train_gpt2_pp, which wrote FILE with --trace"),
    text("svg", "", "FILE", "also draw the picture into FILE"),
    real("svg-ms", 0, 0, 1e9, "ms that the width of --svg's picture stands for; 0: the step"),
]
NEEDS = {"svg-ms": "svg", "split": "model"}
ONLY = {"trace": {"trace", "svg", "svg-ms"}, "compare": {"compare", "p", "m", "times", "model"}} # an option, and all that it takes


class Case(Namespace):
    """The options, with .config, what schedule_order says of the model; None: there is none."""
    pipeline = property(lambda self: Pipeline(self.schedule, self.p, self.m, self.v))
    parts = property(lambda self: self.p * self.v)
    work = property(lambda self: self.m * sum(self.times))

    def but(self, **changes): return Case(**vars(self) | changes)

    def play(self, of_chunk=None, of_action=None):
        """of_chunk: times of each chunk, else those that the model gives."""
        if not of_action: of_chunk = of_chunk or self.times_of_chunks()
        return play(FOLDER, self.pipeline, self.times, of_chunk, of_action)

    def plan(self):
        """Of each rank the actions in their order, in no time."""
        return self.play([(0, 0, 0)] * self.parts)["ranks"]

    def blocks(self):
        """Of each chunk."""
        return ask_player(FOLDER, split=self.split, p=self.p, v=self.v, **{name: self.config[name] for name in ("L", "Vp", "C")})["blocks"]

    def costs(self):
        """Of each chunk, in blocks; the head is the last one's."""
        *blocks, last = self.blocks()
        return [*blocks, last + self.config["head"]]

    def times_of_chunks(self):
        """By the model's blocks, or all the same. The head's forward pass is part of I, because its logits are not kept."""
        F, I, W = self.times
        if not self.config: return [[F / self.v, I / self.v, W / self.v]] * self.parts
        head = self.config["head"]
        one = self.p / (self.config["L"] + head) # a block's share of a stage
        times = [[one * n * F, one * n * I, one * n * W] for n in self.blocks()]
        times[-1][1] += one * head * (F + I + W)
        return times

    def why_unplayable(self):
        """None: it can be played."""
        is_interleaved = self.schedule == "interleaved"
        if not is_interleaved and self.v != 1: return "needs --v 1: only interleaved has any number of chunks"
        if is_interleaved and self.v == 1: return "needs --v 2 or more: with one chunk a rank it interleaves nothing"
        if is_interleaved and self.p == 1: return "needs --p 2 or more: with one stage it interleaves nothing"
        if is_interleaved and self.m % self.p: return "needs an --m that --p divides"
        if self.parts > MOST_CHUNKS: return f"has more than {MOST_CHUNKS} chunks"
        return "needs more blocks than the model has" if self.config and self.parts > self.config["L"] else None


def read_times(text):
    try: found = [parse_number(float, x) for x in text.split(",")]
    except ValueError: found = []
    require(len(found) == 3 and all(0 <= x < math.inf for x in found) and any(found),
            f"--times {text} is not 3 numbers from 0 on, one of them above it, with commas between")
    return found


def read_options():
    o = parse_options("schedule", "draw a pipeline's schedule, and say where its bubble comes from", OPTIONS)
    for name, takes in ONLY.items():
        more = sorted(o.given - takes) if name in o.given else []
        require(not more, f"--{', --'.join(more)} cannot be used with --{name}; leave it out")
    for name, of in NEEDS.items(): require(name not in o.given or getattr(o, of), f"--{name} is one of --{of}'s; give both")
    o.times, o.config = read_times(o.times), ask_player(FOLDER, model=o.model) if o.model else None
    case = Case(**vars(o) | ({} if o.v else {"v": 2 if o.schedule == "interleaved" else 1}))
    if not o.trace and not o.compare and case.why_unplayable():
        die(f"--schedule {o.schedule} {case.why_unplayable()}; --p {o.p}, --m {o.m} and --v {case.v} are given")
    return case


# ---- a step, played or a run's: of each rank its boxes [letter, micro-batch, chunk, begin, end] and numbers ----
def count(n, what): return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def show_step(case, title, ranks, step):
    shortest = min((end - begin for rank in ranks for *_, begin, end in rank["boxes"] if end > begin), default=math.inf)
    columns = int(min(150, math.ceil(((3 if case.m > 10 else 2) + case.v) * step / shortest)))
    print(f"{title}\n")
    for r, rank in enumerate(ranks):
        row = ["."] * columns
        for letter, micro, chunk, begin, end in rank["boxes"]:
            name, first, last = f"{letter}{micro}{chr(39) * min(chunk, 8)}", *(int(x / step * columns + 0.5) for x in (begin, end))
            for c in range(first, min(last, columns)): row[c] = name[c - first] if c - first < len(name) else "-"
        print(f"rank {r:<3} |{''.join(row)}|")
    print()
    print_table(["", "computes, ms", "waits, ms", "share", "activations at most", "by the formula"], *(
        [f"rank {r}", f"{rank['busy']:.6g}", f"{step - rank['busy']:.6g}", f"{100 * rank['busy'] / step:.1f}%",
         f"{count(rank['peak'], 'micro-batch')}{', a chunk each' * (case.v > 1)}", rank["slots"]] for r, rank in enumerate(ranks)))


PLACES = {"F": 0, "B": 1, "I": 1, "W": 2}  # of an action's time in (F, I, W)
LOOKS = {"F": ("#3a86b7", "forward"), "B": ("#f4a259", "backward"), "I": ("#f4a259", "backward, input"),
         "W": ("#7fb069", "backward, weights")}


def write_svg(case, ranks, step):
    letters = "FIW" if case.pipeline.is_cut else "FB"
    waiting = ("#eeeeee", f"waiting{'; paler: later chunks' * (case.v > 1)}")
    picture = TimePicture([*map(LOOKS.get, letters), waiting], case.p, 1, 22, 4, case.svg_ms or step)
    split = f", split {','.join(map(str, case.blocks()))}" if case.config else ""
    title = f"{case.schedule}{split}: {step:.4g} ms, of which the bubble is {100 * (1 - case.work / step):.1f} %"
    picture.text(LEFT + WIDTH, 20, title, "end", font_weight="bold")
    for r, rank in enumerate(ranks):
        picture.slice(r, 0, 0, step, waiting[0])
        for letter, micro, chunk, begin, end in rank["boxes"]:
            if end - begin < 1e-4 * picture.ms: continue  # it would be all stroke
            picture.slice(r, 0, begin, end, LOOKS[letter][0], str(micro), fill_opacity=1 - 0.6 * chunk / case.v, stroke="white")
    picture.write("--svg", case.svg)
    print(f"\npicture: {case.svg}")


def print_bubble(title, how, step, work, parts, formula):
    def part(name, ms, step=step):
        print(f"{name:<26} {ms:10.6g} ms   {100 * ms / step:6.2f} % of the step   {100 * ms / work:6.2f} % of the work")
    print(f"\nstep {step:.6g} ms{title}: {work:.6g} ms of work, which is the mean of the ranks, and the bubble")
    part(f"bubble as {how}", step - work)
    for name, ms in parts.items(): part(f"  {name}", ms)
    if formula is None: print("bubble by the formula      there is none for these numbers")
    else: part("bubble by the formula", formula, work + formula)


# ---- a played step ----
def print_played_bubble(case, played):
    """The bubble as it was played = the ramp, when some ranks have nothing to do yet or any more + imbalance, by which the slowest
    rank's work exceeds the mean."""
    work, step, slowest = case.work, played["step"], max(rank["busy"] for rank in played["ranks"])
    parts = {RAMP: step - slowest, "imbalance": slowest - work} if slowest > work * (1 + 1e-9) else {}
    print_bubble("", "played", step, work, parts, played["bubble"])


def print_blocks(name, case):
    step, costs = case.play()["step"], case.costs()
    of_ranks = [sum(costs[r::case.p]) for r in range(case.p)]
    print(f"{name} {','.join(map(str, case.blocks()))}: ranks compute for {100 * (sum(costs) / (case.p * max(of_ranks))):.1f} "
          f"% of the time without a bubble, for {100 * case.work / step:.1f} % with it; step {step:.6g} ms")


def show(case):
    played, (F, I, W) = case.play(), case.times
    show_step(case, f"{case.schedule}, {count(case.p, 'stage')}, {count(case.m, 'micro-batch')}, {count(case.v, 'chunk')} each; "
              f"F, I, W of 1/{case.p} of the model {F:g}, {I:g}, {W:g} ms", played["ranks"], played["step"])
    print_played_bubble(case, played)
    if case.config:
        print(f"\n{case.model}: {case.config['L']} blocks; the head costs as much as {case.config['head']:.2f} of them")
        print_blocks("split", case)
        for name in "even", "auto":
            if case.split != name: print_blocks(f"{name} ", case.but(split=name))
    if case.svg: write_svg(case, played["ranks"], played["step"])


# ---- a run's step ----
# On the ranks of the first replica of the model. ranks: of each its actions, [(action, [(begin, end), ..]), ..]; times are ms.
Step = namedtuple("Step", "number ranks count begin end bubble")


def steps_of(actions, p):
    """Of all steps what the first p ranks did in them. In a trace of train_gpt2_pp the names of slices begin with their action: "F3
    forward, block 2" is part of the forward pass of micro-batch 3. Waits for messages are cut out of them; the sums and the update,
    which follow, have other names and are no part of the pipeline."""
    found = defaultdict(lambda: [[] for _ in range(p)])
    for r, slices in enumerate(actions[:p]):
        for (step, action), part in groupby(slices, lambda x: (x.step, x.action)):
            found[step][r].append((action, [(1e-3 * x.begin, 1e-3 * x.end) for x in part]))
    for number, ranks in sorted(found.items()):
        spans = [span for rank in ranks for _, spans in rank for span in spans]
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        yield Step(number, ranks, sum(map(len, ranks)), begin, end, end - begin - sum((b - a) / p for a, b in spans))


def fits(case, step):
    """Whether a step's actions are those of a schedule."""
    return not case.why_unplayable() and all([action for action, _ in actions] == [tuple(box[:2]) for box in rank["boxes"]]
                                             for actions, rank in zip(step.ranks, case.plan()))


def read_trace(o):
    """The numbers of stages and micro-batches are those of the run, its schedule the one whose actions are those of the trace, and
    chunks follow from the number of actions. The shortest step is shown: other programs disturbed it least."""
    trace = Trace(o.trace)
    actions, ranks = [[x for x in rank.compute if x.action] for rank in trace.ranks], len(trace.ranks)
    trace.require(any(actions), "has no slices whose names begin with an action, such as F0")
    m = 1 + max(x.action[1] for slices in actions for x in slices)
    copies = sum(any(" head" in x.name for x in slices) for slices in actions)
    trace.require(ranks <= MOST_RANKS and m <= MOST_MICRO, f"is of {ranks} ranks and {m} micro-batches")
    p = ranks // copies if copies and ranks % copies == 0 else ranks # copies: of the model; 0: no slice says so
    require(p > 1, f"--trace {o.trace} is of one stage, which has no bubble; give the trace of a run with more")
    steps = [*steps_of(actions, p)]
    most = max(x.count for x in steps)
    later = steps[1:] if len(steps) > 1 and steps[1].count == most else steps  # the first one touches memory for the first time
    complete = [x for x in later if x.count == most]
    step = min(complete, key=lambda x: x.end - x.begin)
    letters = [action[0] for action, _ in step.ranks[0]]
    v = max(1, len(letters) // ((3 if "W" in letters else 2) * m))
    names = ["zb-h1"] if "W" in letters else ["interleaved"] if v > 1 else ["1f1b", "gpipe"]
    case = next((case for case in (o.but(schedule=name, p=p, m=m, v=v) for name in names) if fits(case, step)), None)
    require(case, f"--trace {o.trace}: step {step.number} is no whole step of train_gpt2_pp: with {p} stages, {count(v, 'chunk')} each"
            f" and {m} micro-batches {names[0]} has other actions")
    return case, complete, step


def boxes_of(actions, planned, zero):
    """Of a rank's actions, (action, spans); a span that goes on where the one before it ended belongs to it."""
    boxes = []
    for (_, spans), (letter, micro, chunk, *_) in zip(actions, planned):
        for begin, end in ((begin - zero, end - zero) for begin, end in spans):
            if boxes and boxes[-1][:3] == [letter, micro, chunk] and begin - boxes[-1][4] < 1e-3: boxes[-1][4] = end
            else: boxes.append([letter, micro, chunk, begin, end])
    return boxes


def print_measured_bubble(case, busy, step, of_chunk, of_action):
    """Takes a run's bubble apart, and says what makes its largest part smaller. Imbalance is by how much the slowest rank's work
    exceeds the mean. The ramp is what is left if the step is played with each chunk's mean times and messages that take no time:
    ranks wait until work has reached them, and after the last has left them. Jitter is what the actual time of each action adds to
    that, below 0 where actions were short when others waited for them. The rest of the step passed while messages were on their
    way, or were sent late; it is below 0 where a rank sends before its action ends."""
    work, slowest = case.work, max(busy)
    mean, each = case.play(of_chunk), case.play(of_action=of_action)
    parts = {RAMP: mean["step"] - slowest, "imbalance": slowest - work, "jitter": each["step"] - mean["step"],
             "late messages": step - each["step"]}
    print_bubble(", from its first action to its last", "measured", step, work, parts, mean["bubble"])
    words = {
        RAMP: "the ramp; more micro-batches, or a schedule with a smaller bubble, make it a smaller share (--compare)",
        "imbalance": f"imbalance; rank {busy.index(slowest)} computes {slowest / work:.2f} times the mean, and the others wait for "
                     "it: choose another --split",
        "jitter": "jitter; the same action takes now more, now less time: does anything else run on these devices?",
        "late messages": "late messages; they are large for these links, or their sender delays them: try fewer sequences in a "
                         "micro-batch, or fewer chunks"}
    print(f"largest part: {words[max(parts, key=parts.get)]}")


def show_trace(o):
    case, steps, seen = read_trace(o)
    plan, step = case.plan(), seen.end - seen.begin
    of_action = [[sum(end - begin for begin, end in spans) for _, spans in rank] for rank in seen.ranks]
    of_chunk = [[0, 0, 0] for _ in range(case.parts)]  # means over the micro-batches; of B the whole is I
    for actions, rank in zip(of_action, plan):
        for ms, (letter, _, chunk, *_) in zip(actions, rank["boxes"]):
            of_chunk[rank["chunks"][chunk]][PLACES[letter]] += ms / case.m
    case.times = F, I, W = [sum(t[i] / case.p for t in of_chunk) for i in range(3)]
    busy = [sum(rank) for rank in of_action]
    ranks = [{"busy": ms, "peak": rank["slots"], "slots": rank["slots"], "boxes": boxes_of(actions, rank["boxes"], seen.begin)}
             for ms, rank, actions in zip(busy, plan, seen.ranks)]
    times = f"I {I:.4g} ms, W {W:.4g} ms" if case.pipeline.is_cut else f"B {I:.4g} ms"
    show_step(case, f"{case.schedule}, {case.p} stages, {case.m} micro-batches, {count(case.v, 'chunk')} each; step "
              f"{seen.number} of {o.trace}, mean of stages: F {F:.4g} ms, {times}", ranks, step)
    print_measured_bubble(case, busy, step, of_chunk, of_action)
    bubbles = [x.bubble for x in steps]
    if len(bubbles) > 1:
        print(f"bubble of {len(bubbles)} steps, without the first: median {median(bubbles):.6g} ms, from {min(bubbles):.6g} to "
              f"{max(bubbles):.6g}")
    if case.svg: write_svg(case, ranks, step)


# ---- all schedules ----
def compared(case):
    """Words of a line; messages are relative to 1f1b's."""
    name, why = f"{case.schedule} v={case.v}" if case.schedule == "interleaved" else case.schedule, case.why_unplayable()
    if why: return [name, why]
    played, work = case.play(), case.work
    bubble, formula = played["step"] - work, "-" if played["bubble"] is None else f"{played['bubble']:.6g}"
    peak = max(rank["peak"] for rank in played["ranks"]) / case.v
    sent = 1 if case.p == 1 else case.pipeline.messages() / (2 * case.m * (case.p - 1))
    return [name, f"{bubble:.6g}", f"{100 * bubble / (work + bubble):.2f}%", f"{100 * bubble / work:.2f}%", formula, f"{peak:.3g}",
            f"{sent:.3g}"]


def compare(case):
    F, I, W = case.times
    print(f"{count(case.p, 'stage')}, {count(case.m, 'micro-batch')}; F, I, W of 1/{case.p} of the model {F:g}, {I:g}, {W:g} ms\n")
    ways = ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)
    print_table(["", "bubble, ms", "of the step", "of the work", "formula, ms", "peak", "messages"],
                *(compared(case.but(schedule=schedule, v=v)) for schedule, v in ways))
    print("\npeak: activations on the rank with the most, in micro-batches of a stage; messages: relative to 1f1b's")


def main():
    case = read_options()
    (show_trace if case.trace else compare if case.compare else show)(case)


if __name__ == "__main__": main()
