"""pp_messages.py - what each rank of a pipeline sends in a step, counted in a timeline of one step, beside the formulas.

A line for each rank and kind of message: how many, the bytes of each, and what this rank sends for all of them. A message that is
issued in a forward pass is an activation, in a backward pass a gradient. Sums: the root, over the two ranks that have it, the loss
and two norms, and between replicas of the model their gradients. The script fails if a rank's bytes are not those of the formulas, or
if rank 0's are not those that the program has counted."""
import re
from collections import Counter
import measure as m

KINDS = ("activations, to the next stage", "gradients, to the stage before", "all-reduce of the root",
         "all-reduce of the loss and norms", "all-reduce over replicas")


def messages(operations, ranks, p):
    """(rank, what, bytes of one): how many are sent."""
    found = Counter()
    for rank, part, name in operations:
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
    message, root = m_ * B * T * C * X, (m.padded(r["vocabulary"]) + T + 2) * C * X if stage in (0, p - 1) else 0
    bytes_ = r["blocks"][stage] * (12 * C * C + 13 * C) * X + root
    return [message * (v - (stage == p - 1)) if p > 1 else 0, message * (v - (stage == 0)) if p > 1 else 0, root if p > 1 else 0,
            2 * (p - 1) / p * 24, 2 * (N - 1) / N * (bytes_ + 8)]


def measure(d, o):
    p = o.pipeline_parallel or o.ranks
    run, operations = m.traced(o, f"--pipeline-parallel {p}")
    d.add("messages", about=re.findall("^(?:model|step   |pipeline).*", run.log, re.M), counted=run.last("comm_bytes"),
          ranks=o.ranks, p=p, micro=int(run.said(r"^step +\d+ tokens in (\d+) micro")),
          blocks=[int(x) for x in re.findall(r"^  rank \d+ +(\d+) block", run.log, re.M)],
          messages=[[*key, count] for key, count in messages(operations, o.ranks, p).items()], **run.shape)


def show(d, o):
    r, wrong = d.first("messages"), []
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


m.script(__doc__, measure, show, placeholders={"pipeline_parallel": "p"}, ranks=4, pipeline_parallel=0, program="pp")
