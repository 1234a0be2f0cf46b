"""The table of doc/formulas.md: memory, traffic and speed of each program, measured on this machine.

Two ranks with a thread each; the single program has the batch of both on one thread. Memory and bytes sent are measured, and a run
in which they differ from the program's prediction ends this script. Speeds are medians over all steps but each run's first, as
multiples of the first line's in the same round; the programs take turns in every round. The table shows the slowest and the fastest
round, because programs often differ by less than rounds do. Needs two cores that do nothing else: the last line says if they were
busy before. --table tp compares tensor parallelism and its options with DDP on the same global batch (chapter 5). --table pp makes
the table of chapter 6: pipelines with 1, 4 and 8 micro-batches, and other schedules. Both show the median of the rounds.
(mesh_table makes the table of chapter 8.)"""
import re
import dev.lib as m

# table: {title: (program, sequences of a micro-batch, options)}. Both ranks of tp and pp see the whole batch; @ is its tokens.
WHOLE, DDP = "--total-batch-size @", {"DDP": ("ddp", 4, "")}
PROGRAMS = {"single": ("single", 8, "")} | DDP | {f"ZeRO stage {z}": ("zero", 4, f"--zero-stage {z}") for z in (1, 2, 3)} | {
    "FSDP": ("fsdp", 4, ""), "tensor parallel": ("tp", 8, ""), "pipeline parallel": ("pp", 1, WHOLE),
    "DDP, gradients in int8": ("compress", 4, "--compress int8")}
TP = DDP | {"tensor parallel": ("tp", 8, "")} | {f"`{options}`": ("tp", 8, options) for options in (
    "--no-overlap", "--sequence-parallel")}
PP = DDP | {"pipeline, 1 micro-batch": ("pp", 8, WHOLE), "4 micro-batches": ("pp", 2, WHOLE)} | {
    "8 micro-batches": ("pp", 1, WHOLE)} | {
    f"8 micro-batches, `--schedule {s}`": ("pp", 1, f"{WHOLE} --schedule {s}") for s in ("gpipe", "interleaved", "zb-h1")}
TABLES = {"programs": PROGRAMS, "tp": TP, "pp": PP}
OPTIONS, ROUNDS, TRUST = dict(table="programs", steps=12), 3, "these speeds"
PLACEHOLDERS = {"table": "programs|tp|pp"}


def most_memory(run):
    """Of the rank that keeps most. Where ranks differ metrics.jsonl has rank 0's bytes, and the log "98.8 MB to 103 MB per
    rank"."""
    found = re.search(r"^memory .* to ([\d.]+) ([kMG]B) per rank", run.log, re.M)
    return float(found[1]) * m.UNITS[found[2]] if found else run.last("mem_peak_bytes")


def measure(x):
    tokens = 8 * int(m.option(x.o.more, "--seq-len", 64))
    for _ in x.in_turns():
        for title, (program, sequences, options) in TABLES[x.o.table].items():
            x.run(title, 1 if program == "single" else 2, program, f"--model d6 --seq-len 64 --lr 1e-3 --batch-size {sequences}",
                  options.replace("@", str(tokens)), f"--steps {x.o.steps}",
                  keep=lambda run: dict(memory=most_memory(run), sent=run.last("comm_bytes"), **run.shape, **run.speeds))


def row(d, title):
    memory = f"{d.first(title)['memory'] / 1e6:.0f} MB"
    if title == "single": return title, memory, "", "1", ""
    base = d.runs()[0]
    median, least, most = d.ratio(title, base, "tokens_per_s")
    speed = f"x {least:.2f} to {most:.2f}" if base == "single" else f"x {median:.2f}"
    return title, memory, f"{d.first(title)['sent'] / 1e6:.1f} MB", speed, f"{d.of_steps(title, 'waits'):.1f} %"


def check(o):
    if o.table not in TABLES: m.fail(f"--table wants programs, tp or pp, not '{o.table}'")


def show(d, o):
    print(d.records()[-1]["model"], end="\n\n")
    d.print_table(["", "memory per rank", "sent per rank and step", "tokens per second", "waiting for communication"],
                  *(row(d, title) for title in d.runs()))
