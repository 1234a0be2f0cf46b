"""AdamW (train_gpt2_zero) and Muon (train_gpt2_muon) at equal steps, and at equal seconds.

A step has 2048 tokens, as in the demo, but all on one rank, because validation losses do not depend on the number of ranks. With
the first seed, each optimizer tries three learning rates, and more as long as the best is the lowest or the highest. AdamW also
tries a long warm-up: with a short one its best loss in demo is 0.24 higher, and a comparison with such a badly tuned AdamW would
flatter Muon. Bad luck with one seed can exceed the difference between rates, so the best two run with all
seeds, and the lower mean counts. Muon repeats its best run with half of the steps.

break-even          the ratio of step times at which both optimizers reach the same loss in the same time: AdamW's steps, divided by
                    the steps in which Muon reaches AdamW's final loss (mean and range of the seeds). It is a low estimate, because
                    Muon's learning rate has not fallen yet at that step.
Muon / AdamW        the measured ratio of step times, from the results of muon_time that --beside names
gain per second     break-even divided by this ratio"""
from itertools import pairwise
from statistics import mean
import dev.lib as m

BPE = "--data data/bpe/train.bin --val-data data/bpe/val.bin --tokenizer data/bpe" # data of make demo
BYTES = "--data data/train.bin --val-data data/val.bin"
SETTINGS = { # steps, options, short and long warm-up
    "demo": (400, f"--layers 4 --heads 4 --channels 128 {BPE}", 20, 80),
    "d4": (80, f"--model d4 {BYTES}", 10, 30), "d6": (40, f"--model d6 {BYTES}", 10, 20)}
OPTIMIZERS = {"AdamW": ("zero", (1e-3, 2e-3, 4e-3), 2), "Muon": ("muon", (4e-3, 8e-3, 16e-3), 1)} # rates, how many of the warm-ups
OPTIONS = dict(settings=[*SETTINGS], seeds=[1, 2, 3], beside="")


def check(o):
    for name in o.settings:
        if name not in SETTINGS: m.fail(f"--settings wants {', '.join(SETTINGS)}, not '{name}'")


def last(run): return run["losses"][-1][1]


def tried(d, setting, optimizer, warmup=r"\d+"):
    """The runs with all steps, by their loss with the first seed."""
    return sorted(d.runs(f"^{setting}, {optimizer}, [^,]*, warm-up {warmup}$"), key=lambda run: last(d.first(run)))


def best(d, setting, optimizer):
    """The better of the two that ran with all seeds."""
    return min(tried(d, setting, optimizer)[:2], key=lambda run: mean(map(last, d.each_round(run))))


def train(x, setting, optimizer, rate, warmup, seeds, half=False):
    steps, model, *_ = SETTINGS[setting]
    steps //= 1 + half
    for x.round in seeds:
        x.run(f"{setting}, {optimizer}, {rate:g}, warm-up {warmup}{', half' * half}", 1, OPTIMIZERS[optimizer][0], model,
              f"--batch-size 32 --seq-len 64 --lr {rate:g} --warmup-steps {warmup} --eval-steps 4",
              f"--steps {steps} --eval-every {max(steps // 10, 1)} --seed {x.round}",
              keep=lambda run: dict(lr=rate, warmup=warmup, losses=run.losses))
        x.d.write(x.into)


def measure(x):
    def again(run, seeds, **half): train(x, setting, optimizer, *(x.d.first(run)[key] for key in ("lr", "warmup")), seeds, **half)
    for setting in x.o.settings:
        for optimizer, (_, rates, warmups) in OPTIMIZERS.items():
            for warmup in SETTINGS[setting][2:2 + warmups]:
                known, more = [], rates
                while more:
                    for rate in more: train(x, setting, optimizer, rate, warmup, x.o.seeds[:1])
                    known = sorted([*known, *more])
                    lowest = x.d.first(tried(x.d, setting, optimizer, warmup)[0])["lr"]
                    more = [lowest / 2] * (lowest == known[0]) + [lowest * 2] * (lowest == known[-1])
            for run in tried(x.d, setting, optimizer)[:2]: again(run, x.o.seeds[1:])
            if optimizer == "Muon": again(best(x.d, setting, optimizer), x.o.seeds, half=True)


def reach(losses, loss):
    """The step at which a curve falls to a loss, on the line between two evaluations; None if it stays above."""
    return next((a + (b - a) * (x - loss) / (x - y) for (a, x), (b, y) in pairwise(losses) if y <= loss), None)


def break_even(adamw, muon):
    steps, faster = adamw["losses"][-1][0], reach(muon["losses"], last(adamw))
    return steps / faster if faster else reach(adamw["losses"], last(muon)) / steps


def spread(values, digits=3):
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def show(d, o):
    settings = {run.split(", ")[0]: [] for run in d.runs()}
    times = o.beside and m.Results.read(o.beside)
    for setting, row in settings.items():
        adamw, muon = (d.each_round(best(d, setting, optimizer)) for optimizer in OPTIMIZERS)
        gains = [break_even(*pair) for pair in zip(adamw, muon)]
        half = d.each_round(f"{best(d, setting, 'Muon')}, half")
        row += [setting, adamw[0]["losses"][-1][0], *(spread([*map(last, runs)]) for runs in (adamw, muon, half)), spread(gains, 2)]
        if times:
            ratio = times.ratio(*(f"{setting}, 1 rank, 2048 tokens, {program}" for program in ("muon", "zero")), "step_ms")[0]
            row += [f"x {ratio:.2f}", f"x {mean(gains) / ratio:.2f}"]
    heads = ["", "steps", "AdamW", "Muon", "Muon, half the steps", "break-even"]
    d.print_table(heads + ["Muon / AdamW", "gain per second"] * bool(times), *settings.values())
    print()
    def rates(setting, optimizer):
        return ", ".join(f"{d.first(run)['lr']:g} ({d.first(run)['warmup']}): {' '.join(f'{last(r):.3f}' for r in d.each_round(run))}"
                         for run in tried(d, setting, optimizer))
    d.print_table(["", "optimizer", "learning rate (warm-up): losses of the seeds that ran, the first seed's best first"],
                  *([setting, optimizer, rates(setting, optimizer)] for setting in settings for optimizer in OPTIMIZERS))
