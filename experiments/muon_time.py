"""How long a step of train_gpt2_muon lasts beside one of train_gpt2_zero: Newton-Schulz's share of it, and what owners save.

The programs take turns in every round. Shares and ratios are formed within a round and are medians over the rounds. A share is
what a step of Muon on one rank lasts longer. Newton-Schulz has 300 C^3 FLOPs in a block, forward and backward pass 72 C^2 for
each of T tokens: 4.2 C/T as many, so formula says 4.2 C/T / (1 + 4.2 C/T). On several ranks with 512 tokens each, a matrix is
orthogonalised by its owner (--owners one) or by all, and the formula says (1 + 4.2 C/T / N) / (1 + 4.2 C/T)."""
import dev.lib as m
from experiments.muon import SETTINGS, check

OPTIONS, ROUNDS, TRUST = dict(settings=[*SETTINGS], tokens=[512, 1024, 2048, 4096], ranks=[2, 4], steps=5), 3, "these times"
PROGRAMS = {"zero": "zero", "muon": "muon", "muon, all": "muon --owners all"}


def measure(x):
    for _ in x.in_turns():
        for setting in x.o.settings:
            for ranks, tokens in [(1, tokens) for tokens in x.o.tokens] + [(ranks, 512) for ranks in x.o.ranks]:
                for name in [*PROGRAMS][:2 + (ranks > 1)]:
                    program, *options = PROGRAMS[name].split()
                    x.run(f"{setting}, {ranks} rank{'s' * (ranks > 1)}, {tokens} tokens, {name}", ranks, program,
                          SETTINGS[setting][1], f"--seq-len 64 --batch-size {tokens // 64} --steps {x.o.steps}", options,
                          keep=lambda run: dict(channels=run.about["channels"], step_ms=run.values("step_ms")))


def show(d, o):
    def cases(many):
        for run in d.runs(rf" rank{many}, .*, zero$"):
            setting, ranks, tokens, _ = run.split(", ")
            work = 300 / 72 * d.first(run)["channels"] / int(tokens.split()[0])
            yield setting, int(ranks.split()[0]), tokens.split()[0], work, run, run.replace("zero", "muon")
    def ms(run): return f"{d.value(run, 'step_ms'):.0f} ms"
    def ratio(run, base): return d.ratio(run, base, "step_ms")[0]
    d.print_table(["", "tokens per rank", "AdamW", "Muon", "Newton-Schulz", "formula"],
                  *([setting, tokens, ms(zero), ms(muon), f"{100 - 100 / ratio(muon, zero):.0f} %",
                     f"{100 - 100 / (1 + work):.0f} %"] for setting, _, tokens, work, zero, muon in cases("")))
    print()
    d.print_table(["", "ranks", "AdamW", "Muon", "Muon / AdamW", "`--owners all`", "one / all", "formula"],
                  *([setting, ranks, ms(zero), ms(muon), f"x {ratio(muon, zero):.2f}", ms(f"{muon}, all"),
                     f"{ratio(muon, f'{muon}, all'):.2f}", f"{(1 + work / ranks) / (1 + work):.2f}"]
                    for setting, ranks, _, work, zero, muon in cases("s")))
