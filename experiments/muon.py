"""AdamW (train_gpt2_zero) and Muon (train_gpt2_muon) at equal steps, and at equal seconds.

A step has 2048 tokens, as in the demo, here all on one rank: validation losses do not depend on the number of ranks. With the
first seed each optimizer tries three learning rates, and further ones while the best is the lowest or the highest. The other seeds
take the best, and Muon repeats it with half of the steps. break-even: how many times as long a step of Muon may last until
AdamW reaches the same loss in the same time, which is AdamW's steps over those in which Muon reaches AdamW's last loss; the mean of
the seeds, from and to. Muon's learning rate has not fallen yet at that step, so this is a low estimate. A step of Muon: how many
times as long as one of AdamW it lasts, from results of muon_time that --beside names; break-even over this is what Muon gains per
second."""
from itertools import pairwise
from statistics import mean
import dev.lib as m

BPE = "--data data/bpe/train.bin --val-data data/bpe/val.bin --tokenizer data/bpe" # data of make demo
BYTES = "--data data/train.bin --val-data data/val.bin --warmup-steps 10"
SETTINGS = { # steps, options
    "demo": (400, f"--layers 4 --heads 4 --channels 128 {BPE}"),
    "d4": (80, f"--model d4 {BYTES}"), "d6": (40, f"--model d6 {BYTES}")}
OPTIMIZERS = {"AdamW": ("zero", (1e-3, 2e-3, 4e-3)), "Muon": ("muon", (4e-3, 8e-3, 16e-3))}
OPTIONS = dict(settings=[*SETTINGS], seeds=[1, 2, 3], beside="")


def check(o):
    for name in o.settings:
        if name not in SETTINGS: m.fail(f"--settings wants {', '.join(SETTINGS)}, not '{name}'")


def last(run): return run["losses"][-1][1]


def tried(d, setting, optimizer):
    """The runs with all steps, by their loss with the first seed."""
    return sorted(d.runs(f"^{setting}, {optimizer}, [^,]*$"), key=lambda run: last(d.first(run)))


def train(x, setting, optimizer, rate, seeds, half=False):
    steps, model = SETTINGS[setting]
    steps //= 1 + half
    for x.round in seeds:
        x.run(f"{setting}, {optimizer}, {rate:g}{', half' * half}", 1, OPTIMIZERS[optimizer][0], model,
              f"--batch-size 32 --seq-len 64 --lr {rate:g} --eval-steps 4",
              f"--steps {steps} --eval-every {max(steps // 10, 1)} --seed {x.round}",
              keep=lambda run: dict(lr=rate, losses=run.losses))
        x.d.write(x.into)


def measure(x):
    for setting in x.o.settings:
        for optimizer, (_, more) in OPTIMIZERS.items():
            known = []
            while more:
                for rate in more: train(x, setting, optimizer, rate, x.o.seeds[:1])
                known = sorted([*known, *more])
                best = x.d.first(tried(x.d, setting, optimizer)[0])["lr"]
                more = [best / 2] * (best == known[0]) + [best * 2] * (best == known[-1])
            train(x, setting, optimizer, best, x.o.seeds[1:])
            if optimizer == "Muon": train(x, setting, optimizer, best, x.o.seeds, half=True)


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
        adamw, muon = (d.each_round(tried(d, setting, optimizer)[0]) for optimizer in OPTIMIZERS)
        gains = [break_even(*pair) for pair in zip(adamw, muon)]
        half = d.each_round(f"{setting}, Muon, {muon[0]['lr']:g}, half")
        row += [setting, adamw[0]["losses"][-1][0], *(spread([*map(last, runs)]) for runs in (adamw, muon, half)), spread(gains, 2)]
        if times:
            ratio = times.ratio(*(f"{setting}, 1 rank, 2048 tokens, {program}" for program in ("muon", "zero")), "step_ms")[0]
            row += [f"x {ratio:.2f}", f"x {mean(gains) / ratio:.2f}"]
    heads = ["", "steps", "AdamW", "Muon", "Muon, half the steps", "break-even"]
    d.print_table(heads + ["a step of Muon", "gain per second"] * bool(times), *settings.values())
    print()
    def rates(setting, optimizer):
        return ", ".join(f"{run['lr']:g}: {last(run):.3f}" for run in map(d.first, tried(d, setting, optimizer)))
    d.print_table(["", "optimizer", "learning rate: loss with the first seed, best first"],
                  *([setting, optimizer, rates(setting, optimizer)] for setting in settings for optimizer in OPTIMIZERS))
