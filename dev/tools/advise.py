#!/usr/bin/env python3
"""advise - says what a run's times mean and what to try first, from the metrics.jsonl under its --out.

    build/advise runs/x/metrics.jsonl

A run on several ranks that did more than one step ends with its diagnosis: where each step's time went, by cause, in ms. The same
numbers, as means of all ranks, are in the last line of metrics.jsonl. Here each cause is explained. If less than 60 % of a step is
computing, or of computing and communication, or of what one rank alone reaches (--single-throughput), the largest loss comes first.
Of communication the course's order is: is it overlapped? Is there enough to compute for each byte? Then send less.
"""
from tool import die, parse_json, parse_options, read_bytes

REMEDY = "give the metrics.jsonl under --out of a run on several ranks that did more than one step"
GOAL = 0.6
AXES = "tp", "pp", "dp", "cp", "all axes"
WHAT_CAUSES_ARE = {
    "computing": "the rest of a step, as far as the rank had a core; on a GPU, all of that rest",
    "rest": "another thread or program had the core, or the rank slept",
    "exposed": "waits for communication: of the rank that waited least in a step, which found the others there",
    "bubble": "of a pipeline: waits for messages of other stages, and for its last action",
    "waiting": "waits for slower ranks: what others waited longer; a rank that is late here and early there counts as neither",
    "data": "the loader's thread had not read the next micro-batch yet",
}


class Run:
    def __init__(self, path):
        lines = [parse_json(line) for line in read_bytes(path, REMEDY).splitlines() if line.strip()]
        self.about = next((line["run"] for line in reversed(lines) if "run" in line), None)  # a resumed run has one more
        found = [line["diagnosis"] for line in lines if isinstance(line.get("diagnosis"), dict)]
        is_run = isinstance(self.about, dict) and isinstance(self.about.get("options"), dict)
        if not is_run: die(f"{path}: is no metrics.jsonl; {REMEDY}")
        if not found: die(f"{path}: has no diagnosis, as of one rank or one step; {REMEDY}")
        self.found, self.options = found[-1], self.about["options"]
        self.mean, self.others = self.found["mean"], self.found["others"]
        self.step, self.computing = self.mean["total"], self.mean["computing"]
        self.along = {axis: sum(self.mean["exposed"].get(axis, {}).values()) for axis in AXES}
        self.exposed, self.communication = sum(self.along.values()), sum(self.mean["communication"].values())
        self.sent = f"{1e-6 * self.about['predicted_comm_bytes']:.1f} MB"
        one, ranks, tokens = self.found["single_tokens_per_second"], self.about["world_size"], self.found["tokens_per_step"]
        self.share = 1e3 * tokens / (one * ranks) if one else None  # ms that a perfect share of one rank's step would take


# ---- what is no communication ----
def losses(run):
    """(ms of a step, what to do about it) of each."""
    found, step, others, bubble = run.found, run.step, run.others, run.mean["bubble"]
    ranks, cores, of_step = found["local_ranks"], found["cores"], f"for {others['rest']:.1f} of {step:.1f} ms"
    rest = f"rest: a rank slept or had no core {of_step}; see what else runs on this machine"
    if 0 < cores < ranks: rest = (f"cores: {ranks} ranks share {cores}, and a rank had none {of_step}; start {cores} "
                                  f"rank{'s' * (cores > 1)} here")
    slow, usual = (sum(causes[name] for name in ("computing", "rest", "data")) for causes in (found["slowest"], others))
    waiting = (f"slowest rank: ranks wait for slower ones for {others['waiting']:.1f} of {step:.1f} ms, and rank "
               f"{found['slowest_rank']} least; a step keeps it busy for {slow:.1f} ms and the others for {usual:.1f}; see what "
               "else runs there")
    m, more = found["micro_batches"], 4
    stages = (f"bubble: stages wait for {bubble:.1f} of {step:.1f} ms, with {m} micro-batch{'' if m == 1 else 'es'} on "
              f"{found['stages']} stages; with {more * m} (--total-batch-size {more * found['tokens_per_step']}) it is as long, "
              f"and {100 * bubble / (more * (step - bubble) + bubble):.0f} % of a step instead of {100 * bubble / step:.0f}")
    data = f"data: steps wait for it for {run.mean['data']:.1f} of {step:.1f} ms; put --data on a faster disk"
    lost = [(others["rest"], rest), (others["waiting"], waiting), (bubble, stages), (run.mean["data"], data)]
    if not run.share: return lost
    return [*lost, (run.computing - run.share, f"computing: a rank computes for {run.computing:.1f} ms, and a perfect share of one "
                    f"rank's step is {run.share:.1f}; ranks share memory or cores, repeat work such as the update, or have "
                    "products too small to be fast")]


# ---- communication ----
def what_hides_more(run, axis):
    """What may hide more of the communication along an axis, as these options are."""
    if axis == "tp" and run.options.get("overlap") is False: return "leave out --no-overlap"
    if axis == "cp": return {"ring": "longer sequences"}.get(run.options.get("cp"), "take --cp ring")
    if axis == "dp" and run.options.get("prefetch") not in (None, "backward-pre"): return "take --prefetch backward-pre"
    if axis == "dp" and run.about["program"] == "train_gpt2_zero": return "train_gpt2_fsdp gathers a block ahead"
    ways = {"naive": "take --ddp bucketed", "bucketed": "a smaller --bucket-mb begins earlier"} if axis == "dp" else {}
    return ways.get(run.options.get("ddp"), "no option would hide more")


def what_halves_bytes(run):
    """What would halve the bytes that are sent; None: no option would."""
    method, is_fp32 = run.options.get("compress"), run.about["precision"] == "fp32"
    methods = {"none": "--compress bf16 sends" if is_fp32 else "--compress int8 sends", "bf16": "--compress int8 sends",
               "int8": "--compress int4 sends", "top-k": "half of --top-k-fraction sends", "powersgd": "half of --rank sends about"}
    if method: return methods.get(method)  # the others send few bits of each element
    if is_fp32: return "make PRECISION=bf16 sends"
    if run.about["program"] == "train_gpt2_ddp": return "numbers have 16 bits already; train_gpt2_compress --compress int8 sends"
    return "numbers have 16 bits already; 8 would be"


def advise_on_overlap(run):
    of_all = f"{run.exposed:.1f} of {run.communication:.1f} ms of communication are exposed"
    if run.exposed < 0.25 * run.communication: return f"overlap: it is good, only {of_all}"
    axis = max(AXES, key=run.along.get)
    more = what_hides_more(run, axis)
    return f"overlap: {of_all}, most along {axis}; {run.computing:.1f} ms of computing could hide some: {more}"


def advise_on_size(run):
    """ "Up to", because the update does not take longer with more tokens, though it counts as computing here."""
    K, per_token = run.computing, run.mean["per_token"]
    fixed = run.communication - per_token
    if fixed >= per_token:
        what = f"with 4 times the tokens (--batch-size {4 * run.options.get('batch-size')}) gradients are as many"
        figure = 4 * K / (4 * K + fixed + 4 * per_token)
    else:
        what = "activations take longest, but twice the channels compute 4 times as much and send twice"
        figure = 4 * K / (4 * K + 4 * fixed + 2 * per_token)
    return (f"size: a rank computes for {K:.1f} ms and sends {run.sent}; {what}, and compute / (compute + communication) would be "
            f"up to {100 * figure:.0f} %")


def advise_on_communication(run):
    advice, halves = [advise_on_overlap(run), advise_on_size(run)], what_halves_bytes(run)
    if halves is None: return advice
    figure = 100 * run.computing / (run.computing + run.communication / 2)
    return advice + [f"compress: {halves} half of the {run.sent}, and with as much computing that figure would be {figure:.0f} %"]


def advice_for(run):
    """Lines, the first of which says what to try first; none if all figures reach the goal."""
    sends_too_much = run.computing < GOAL * (run.computing + run.communication)
    scaling = run.found["scaling_efficiency"]
    scales = scaling is None or scaling >= GOAL
    if not sends_too_much and scales and run.computing >= GOAL * run.step: return []
    loss, advice = max(losses(run), key=lambda x: x[0])
    is_largest = loss > max(run.exposed, 0.1 * run.step)  # of what is no communication
    return [advice] * is_largest + advise_on_communication(run) * (sends_too_much or not is_largest)


def explain(run):
    print(f"ms of a step, means of {run.about['world_size']} ranks and steps {run.found['from']} to {run.found['to']}; a step "
          f"takes {run.step:.2f}")
    if run.found["artificial"]: print(f"  NOT THE TIMES OF THIS MACHINE:{run.found['artificial']}")
    for name, meaning in WHAT_CAUSES_ARE.items():
        ms = run.exposed if name == "exposed" else run.mean[name]
        if ms >= 0.005: print(f"  {name:<10} {ms:9.2f} {100 * ms / run.step:6.1f} %   {meaning}")
    if run.computing:
        all, exposed = (100 * run.computing / (run.computing + ms) for ms in (run.communication, run.exposed))
        print(f"compute / (compute + communication) = {all:.1f} %; compute / (compute + exposed) = {exposed:.1f} % (means of all "
              "ranks)")
    advice = advice_for(run)
    for i, line in enumerate(advice): print(f"{'  then:' if i else 'below 60 %, try first:'} {line}")
    if not advice: print("all figures reach 60 %: there is nothing to try first")


def main():
    o = parse_options("advise", "what a run's times mean and what to try first, from its metrics.jsonl", [], "METRICS")
    try:
        explain(Run(o.operands[0]))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        die(f"{o.operands[0]}: is damaged: a line is no JSON object, or a number of its diagnosis is missing ({e}); {REMEDY}")


if __name__ == "__main__": main()
