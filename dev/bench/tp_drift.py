"""tp_drift.py - how far a run with tensor parallelism may differ from one device although nothing is wrong.

Trains one model on one device and on t ranks that share it, in fp32 and in bf16, with the same data and the same global batch.
The table has the largest relative differences of the loss and of the gradient norm to the single program of the same precision,
over the steps up to each of --at. Its last line compares the single program in fp32 and in bf16. All other options are the
programs'. Those in bf16 are in BUILD/bf16."""
import measure as m


def measure(d, o):
    build = m.environ("BUILD", "build")
    programs = {(precision, program): m.need(f"{build}{'/bf16' * (precision == 'bf16')}/train_gpt2_{program}", f"PRECISION={precision} "
                                           f"train_gpt2_{program}")
                for precision in ("fp32", "bf16") for program in ("single", "tp")}

    def add(name, like, precision, ranks=None, *options):
        run = m.train(name, programs[precision, "tp" if ranks else "single"], f"--data {m.TOKENS} --model d4 --channels 128 "
                      "--seq-len 64 --batch-size 8 --deterministic --eval-every 0 "
                      f"{m.QUIET}", *options, o.more, f"--steps {max(o.at)}", ranks=ranks)
        d.add(name, like=like, at=o.at, losses=[step["loss"] for step in run.steps],
              norms=[step["grad_norm"] for step in run.steps])
        m.note(f"  {name}")
    for precision in "fp32", "bf16":
        add(precision, None, precision)
        for t in o.tp: add(f"{precision}, {t} ranks", precision, precision, t)


def row(d, title, run, like):
    a, b = d.first(run), d.first(like)

    def furthest(key, step):
        most = max(abs(x / y - 1) for x, y in zip(a[key][:step], b[key][:step]))
        return f"{most:.0e}" if most else "0"
    return [title, *(f"{furthest('losses', step)} / {furthest('norms', step)}" for step in a["at"])]


def show(d, o):
    d.print_table(["loss / gradient norm", *("step 1" if step == 1 else f"up to step {step}" for step in d.first("fp32")["at"])],
                  *(row(d, r["run"], r["run"], r["like"]) for r in d.records() if r["like"]),
                  row(d, "bf16 against fp32, one device", "bf16", "fp32"))


m.script(__doc__, measure, show, tp=[2, 4], at=[1, 10, 20, 40])
