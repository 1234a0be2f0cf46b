"""Memory and traffic of each program, measured in a step of training and compared with the formulas.

--programs also takes fsdp, tp, pp, cp and 3d; ddp comes first. tp and pp share one replica of the model among all ranks, and cp (a
ring) each sequence; 3d has two copies, two parts of each matrix if there are four ranks or more, --zero-stage 1, and the rest of
the ranks as stages. Megabytes per rank by kind. state: parameters, gradients and optimizer state together, as a share of what DDP
keeps; beside it the same by the formulas of the ZeRO paper, which know of no padding, nor of what tp and pp do not divide.
communication: buckets, gathered units, scratch. other: activations and workspace. micro: micro-batches in a step. sent: numbers
that a rank sends in it, per parameter, and by formula if that does not depend on the tokens. Where ranks differ (pp, 3d), it is
rank 0. A run that measures another number of bytes than it predicted, for any kind, ends this script. --svg draws a bar for each
line."""
import dev.lib as m
from dev.tools.svg import Svg

PROGRAMS = "ddp zero-1 zero-2 zero-3 fsdp tp pp cp 3d".split()
STATE = "parameters", "gradients", "optimizer state"
OPTIONS = dict(ranks=[1, 2, 4, 8], programs=PROGRAMS[:4], svg="")
FOLDER = "."


def path(program):
    return f"{m.environ('BUILD', '.')}/train_gpt2_{'zero' if program.startswith('zero') else program}"


def layout(program, N):
    """Replicas of the model, each of which has micro-batches of its own, and options."""
    if program in ("tp", "pp", "cp"): return 1, "--cp ring" * (program == "cp")
    if program != "3d": return N, f"--zero-stage {program[-1]}" if program.startswith("zero") else ""
    copies, t = 1 if N % 2 else 2, 1 if N % 4 else 2
    return copies, f"--mesh dp={copies},tp={t},pp={N // copies // t} --zero-stage 1"


def measure(x):
    for program in x.o.programs: m.need(path(program))
    for N in x.o.ranks:
        for program in x.o.programs:
            copies, options = layout(program, N)
            def keep(run):
                micro = run.last("tokens") // (run.shape["B"] * run.shape["T"] * copies)
                return dict(program=program, copies=copies, micro=micro, kinds=run.kinds(), memory=run.last("mem_peak_bytes"),
                            sent=run.last("comm_bytes"), **run.shape)
            x.run(f"{N} {program}", N, path(program), options, "--steps 1 --save-every 0", keep=keep, launched=True, threads=None)


def formulas(r):
    """The share of DDP's state, and the numbers sent for each parameter in a micro-batch's worth of steps."""
    N, A, X, program = r["ranks"], r["micro"], r["width"], r["program"]
    K = 8 if X == 4 else 12 # of the optimizer's
    level = 0 if program in ("ddp", "cp") else int(program[-1]) if program.startswith("zero") else 3 if program == "fsdp" else 4
    state = X / (N if level > 2 else 1) + X / (N if level > 1 else 1) + K / (N if level > 0 else 1)
    if program == "3d": state = (2 * X + K / r["copies"]) * r["copies"] / N
    # FSDP sums gradients in fp32
    times = 2 if level < 2 else A + 1 if level == 2 else (2 + 4 / X) * A if program == "fsdp" else 3 * A
    return state / (2 * X + K), times * (N - 1) / N if level < 4 and program != "cp" else None


def groups(r):
    """Bytes as they are shown: three kinds of state, communication, and all other."""
    kept = [r["kinds"].get(kind, 0) for kind in STATE + ("communication",)]
    return kept + [r["kinds"]["activations"] + r["kinds"]["workspace"]]


def show(d, o):
    rows = d.records()
    print(rows[0]["model"], "fp32; MB per rank\n" if rows[0]["width"] == 4 else "16 bits; MB per rank\n", sep="\n")
    print("ranks program parameters gradients optimizer    state formula communication  other   total micro   sent formula")
    for i, r in enumerate(rows):
        kept = groups(r)
        if r["program"] == "ddp":
            ddp, parameters = sum(kept[:3]), kept[0]
            if i: print()
        state, sent = formulas(r)
        other = kept[3] / 1e6, kept[4] / 1e6, r["memory"] / 1e6, r["micro"], r["sent"] / parameters
        print("%5d %-7s %10.1f %9.1f %9.1f" % (r["ranks"], r["program"].replace("-", " "), *(x / 1e6 for x in kept[:3])),
              "%6.1f %% %5.1f %% %13.1f %6.1f %7.1f %5d %6.3f" % (100 * sum(kept[:3]) / ddp, 100 * state, *other),
              "%7.3f" % sent if sent is not None else "%7s" % "-")
    m.picture(o.svg, lambda: picture(rows))


def picture(rows):
    top, programs = max(r["memory"] for r in rows), max(sum(x["ranks"] == r["ranks"] for x in rows) for r in rows)
    bar, high, base, width = 47, 260, 330, max(700, 60 + len({r["ranks"] for r in rows}) * (47 * programs + 30))
    colours = "#3a86b7 #f4a259 #1d3557 #c1121f #d9d9d9".split()
    svg, x = Svg(width, 380), 60
    svg.text(60, 16, rows[0]["model"])
    for kind, colour in zip(STATE + ("communication", "activations and workspace"), colours):
        svg.rect(x, 26, 12, 12, colour)
        svg.text(x + 16, 36, kind)
        x += 28 + 6.8 * len(kind)
    tick = next(t for k in range(15) for t in (1e6 * 10 ** k, 2e6 * 10 ** k, 5e6 * 10 ** k) if top / t <= 8)
    for i in range(int(top / tick) + 1):
        y = base - high * i * tick / top
        svg.rect(54, y, width - 54, 0.5, "#cccccc")
        svg.text(50, y + 4, f"{i * tick / 1e6:g}{'' if i else ' MB'}", "end")
    x, N = 30, None
    for r in rows:
        if r["ranks"] != N:
            N, x = r["ranks"], x + 30
            svg.text(x + bar * programs / 2, base + 36, f"{N} rank{'s' * (N > 1)}", "middle")
        y = base
        for bytes_, colour in zip(groups(r), colours):
            y -= high * bytes_ / top
            svg.rect(x, y, bar - 4, high * bytes_ / top, colour)
        svg.text(x + bar / 2 - 2, y - 4, f"{r['memory'] / 1e6:.0f}", "middle")
        svg.text(x + bar / 2 - 2, base + 16, r["program"].replace("zero", "ZeRO"), "middle", font_size=11)
        x += bar
    return str(svg)


def check(o):
    if o.programs[0] != "ddp":
        m.fail(f"--programs begins with ddp, which the others are compared with, not '{' '.join(o.programs)}'")
    for program in o.programs:
        if program not in PROGRAMS: m.fail(f"--programs wants some of {', '.join(PROGRAMS[:-1])} and 3d, not '{program}'")
