"""pp_messages.py - what each rank of a pipeline sends in a step, counted in a timeline of one step, beside the formulas.

  python3 dev/bench/pp_messages.py [--ranks 4] [--pipeline-parallel P] [--into FILE | --from FILE] [OPTION OF THE PROGRAM...]

A line for each rank and kind of message: how many, the bytes of each, and what this rank sends for all of them. A message that is
issued in a forward pass is an activation, in a backward pass a gradient. Sums: the root, over the two ranks that have it, the loss
and two norms, and between replicas of the model their gradients. The script fails if a rank's bytes are not those of the formulas, or
if rank 0's are not those that the program has counted.

PROGRAM   default build/train_gpt2_pp    MPIRUN  how to start ranks (dev/on_ranks.sh)"""
import re
from collections import Counter
import measure as m

KINDS = ("activations, to the next stage", "gradients, to the stage before", "all-reduce of the root",
         "all-reduce of the loss and norms",
         "all-reduce over copies")


def messages(trace, ranks, p):
    """(rank, what, bytes of one): how many are sent in step 1."""
    found = Counter()
    for rank, part, name in m.operations(trace, step=1):
        kind, n, X = m.operation(name)
        N = ranks // p if " of dp" in name else p if X == 8 else 2
        if kind in ("receive", "barrier") or kind == "all-reduce" and N == 1: continue
        what = KINDS[part[0] != "F"] if kind == "send" else KINDS[4] if " of dp" in name else KINDS[3] if X == 8 else KINDS[2]
        found[rank, what, n * X if kind == "send" else 2 * (N - 1) / N * n * X] += 1
    return found


def formulas(r, rank):
    """What a rank sends of each kind."""
    p, m_, v, C, X, B, T = (r[key] for key in ("p", "micro", "chunks", "channels", "width", "B", "T"))
    stage, N = rank % p, r["ranks"] // p
    message, root = m_ * B * T * C * X, ((r["vocabulary"] + 127) // 128 * 128 + T + 2) * C * X if stage in (0, p - 1) else 0
    bytes_ = r["blocks"][stage] * (12 * C * C + 13 * C) * X + root
    return [message * (v - (stage == p - 1)) if p > 1 else 0, message * (v - (stage == 0)) if p > 1 else 0, root if p > 1 else 0,
            2 * (p - 1) / p * 24, 2 * (N - 1) / N * (bytes_ + 8)]


def measure(d, o):
    program, trace = m.need(m.environ("PROGRAM", "build/train_gpt2_pp"), "build/train_gpt2_pp"), m.work() / "trace.json"
    p = int(o.pipeline_parallel or o.ranks)
    m.ranks_can_start(o.ranks, quiet=True)
    run = m.train(program, program, m.QUIET, "--eval-every 0", o.more, f"--pipeline-parallel {p} --steps 1 --save-every 0 --trace "
                  f"{trace}", ranks=o.ranks, threads=m.environ("OMP_NUM_THREADS", 1))
    settings = run.about["options"]
    d.add("messages", about=re.findall("^(?:model|step   |pipeline).*", run.log, re.M), counted=run.last("comm_bytes"),
          ranks=o.ranks, p=p, width=run.width,
          micro=int(run.said(r"^step +\d+ tokens in (\d+) micro")),
          blocks=[int(x) for x in re.findall(r"^  rank \d+ +(\d+) block", run.log, re.M)],
          channels=run.about["channels"], vocabulary=run.about["vocabulary"], chunks=settings.get("chunks", 1),
          B=settings["batch-size"],
          T=settings["seq-len"], messages=[[*key, count] for key, count in messages(trace, o.ranks, p).items()])


def main():
    o = m.options(__doc__, ranks=4, pipeline_parallel="")
    if o.pipeline_parallel: m.whole_number("--pipeline-parallel", o.pipeline_parallel)
    r, wrong = m.results(o, lambda d: measure(d, o)).first("messages"), []
    print(*r["about"], "%4s  %-34s %7s %14s %14s" % ("rank", "message", "number", "bytes of each", "sent"), sep="\n")
    for rank in range(r["ranks"]):
        mine = [(what, size, count) for q, what, size, count in r["messages"] if q == rank]
        for kind, formula in zip(KINDS, formulas(r, rank)):
            for what, size, count in mine:
                if what == kind: print("%4d  %-34s %7d %14d %14d" % (rank, what, count, size, count * size))
            sent = sum(size * count for what, size, count in mine if what == kind)
            if abs(sent - formula) > 1: wrong.append(f"rank {rank} has sent {sent:.0f} bytes of {kind}, by formula {formula:.0f}")
        total = sum(size * count for _, size, count in mine)
        print("%4d  %-34s %7s %14s %14d" % (rank, "all", "", "", total))
        if rank == 0 and abs(total - r["counted"]) > 1: wrong.append(f"the program has counted {r['counted']} bytes on rank 0")
    if wrong: m.fail("\n".join(wrong))


main()
