"""Speed-up by more ranks: a training program on 1, 2 and 4 ranks.

strong   the batch of a step stays as it is (--batch-size sequences for each of the most ranks) and is divided among them
weak     every rank has --batch-size sequences a step, so that more ranks do more work

All other options are the program's: --model gpt2 --seq-len 1024, --ddp naive, ... Tokens per second and the share of a step in
which nothing was computed for want of gradients are rank 0's medians over the steps, without the first. Efficiency is the
speed-up over what the number of ranks would give at best. --out keeps each run's folder and log.

OMP_NUM_THREADS  threads of a rank (default 1, for one rank as for many, or there would be nothing to compare with)"""
import dev.lib as m

OPTIONS, PROGRAM, TRUST = dict(ranks=[1, 2, 4], batch_size=8, steps=12, out=""), "./train_gpt2_ddp", "these figures"
PLACEHOLDERS = {"out": "FOLDER"}


def measure(x):
    o, d, folder, threads = x.o, x.d, m.Path(x.o.out or m.work()), int(m.environ("OMP_NUM_THREADS", 1))
    for N in o.ranks:
        for kind, sequences in ("strong", o.batch_size * max(o.ranks) // N), ("weak", o.batch_size):
            if kind == "weak" and N == max(o.ranks): # the same, there
                d.add(**d.first(f"strong {N}") | {"run": f"weak {N}"})
                continue
            x.run(f"{kind} {N}", N, o.program, f"--batch-size {sequences} --steps {o.steps}", launched=True,
                  out=folder / f"{kind}_{N}",
                  keep=lambda run: dict(threads=threads, sequences=sequences, cpu=bool(run.said("^(device  *CPU)")), **run.speeds))


def print_speed_ups(d, kind):
    rows = [d.first(run) for run in d.runs(f"^{kind}")]
    print("ranks    tokens/s  speed-up  efficiency  exposed")
    for r in rows:
        speed, up = d.value(r["run"], "tokens_per_s"), d.share(r["run"], rows[0]["run"], "tokens_per_s")
        efficiency = up / (r["ranks"] / rows[0]["ranks"])
        print("%5d %11.0f %9.2f %9.0f %% %6.0f %%" % (r["ranks"], speed, up, 100 * efficiency, 100 * d.exposed(r["run"])))


def check(o):
    if sorted(set(o.ranks)) != o.ranks: m.fail(f"--ranks must grow: '{' '.join(map(str, o.ranks))}'")
    for N in o.ranks:
        if o.batch_size * max(o.ranks) % N:
            whole = f"{o.batch_size} x {max(o.ranks)} sequences"
            m.fail(f"a batch of {whole} does not divide over {N} ranks; give another --batch-size")


def show(d, o):
    most = d.first(d.runs("^strong")[-1])
    print(f"\nstrong: {most['sequences'] * most['ranks']} sequences a step, divided among the ranks")
    print_speed_ups(d, "strong")
    print(f"\nweak: {most['sequences']} sequences a step on every rank")
    print_speed_ups(d, "weak")
    if most["cpu"] and most["ranks"] * most["threads"] > d.header["cores"]:
        print(f"\nThis machine has {d.header['cores']} cores. Ranks x {most['threads']} thread(s) beyond that take turns: they "
              "cannot gain.")
