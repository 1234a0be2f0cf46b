"""tp_memory.py - what a rank keeps with tensor parallelism, measured in a step of training beside the formulas.

Megabytes per rank. state: parameters, gradients and optimizer state; not cut: the part of it that every rank has. block: the
activations that a block keeps, in numbers for each token and channel, of fp32 or of 16 bits, by formula. other: communication and
workspace. sent: in a step, by a rank. A run that measures another number of bytes than it predicted ends this script."""
import measure as m

WAYS = {"": "", "sequence parallel": "--sequence-parallel"}


def measure(d, o):
    for way, options in WAYS.items():
        for t in o.tp:
            if t == 1 and way: continue
            run = m.train(f"{o.program} on {t} rank(s)", o.program, o.more, f"--tensor-parallel {t} --steps 1 --save-every 0", m.QUIET,
                          options, ranks=t, threads=None)
            d.add(f"{t} {way}", t=t, way=way, sent=run.last("comm_bytes"), kinds=run.kinds(), **run.shape)


def row(r):
    t, X, L, C, T, kinds = r["t"], r["width"], r["layers"], r["channels"], r["context"], r["kinds"]
    Vp, bytes_ = m.padded(r["vocabulary"]), 16 if X == 4 else 2 * X + 12 # of a parameter's state
    copies = (6 * C * L + (T + 2) * C) * bytes_
    block = {"": 4 + 12 / t, "sequence parallel": 16 / t}[r["way"]]
    kept = [kinds["parameters"], kinds["gradients"], kinds["optimizer state"]]
    state, formula = sum(kept), ((12 * C * C + 7 * C) / t * L + Vp / t * C) * bytes_ + copies
    if state != formula: m.fail(f"state {state}, by formula {formula:.0f}")
    other = kinds["communication"] + kinds["workspace"]
    print("%2d %-18s %10.1f %9.1f %9.1f %7.1f %8.2f %11.1f %6g %6.1f %6.1f %6.1f" % (
        t, r["way"], *(x / 1e6 for x in (*kept, state, copies, kinds["activations"])), block,
        *(x / 1e6 for x in (other, state + kinds["activations"] + other, r["sent"]))))


def show(d, o):
    print(" t                    parameters gradients optimizer   state  not cut activations  block  other  total   sent")
    for r in d.records(): row(r)


m.script(__doc__, measure, show, tp=[1, 2, 4], program="tp")
