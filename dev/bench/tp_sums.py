"""tp_sums.py - what a rank sends in each part of a step with tensor parallelism, counted in a timeline of one step.

A line for each part of a step, operation and length: how many, how many bytes of values each is about, and the bytes that this
rank sends for one of them and for all. An operation belongs to the part in which it was issued. The sum of all is compared with
the bytes that the program has counted, and the script fails if they differ. Operations between replicas are marked."""
import re
from collections import Counter
import measure as m


def sums(operations, ranks, t):
    """(part, kind, bytes of values, bytes sent for one): how many, of rank 0."""
    found = Counter()
    for rank, part, name in operations:
        N = t if " of tp" in name else ranks // t if " of dp" in name else ranks
        kind, n, X = m.operation(name)
        if rank or N == 1 or kind == "barrier": continue
        sent, values = (2 * (N - 1) / N * n * X, n * X) if kind == "all-reduce" else ((N - 1) * n * X, N * n * X)
        found[re.sub(r" \d+$", "s", part), kind + ", copies" * (" of dp" in name), values, sent] += 1
    return found


def measure(d, o):
    t = o.tensor_parallel or o.ranks
    run, operations = m.traced(o, f"--tensor-parallel {t}")
    d.add("sums", about=re.findall("^(?:model|step   |mesh).*", run.log, re.M), counted=run.last("comm_bytes"),
          sums=[[*key, count] for key, count in sums(operations, o.ranks, t).items()])


def show(d, o):
    r, total = d.first("sums"), 0
    print(*r["about"], sep="\n")
    print("%-22s %-22s %6s %13s %13s %13s" % ("part of a step", "operation", "number", "bytes of each", "sent for one", "sent"))
    for part, kind, values, sent, count in r["sums"]:
        print("%-22s %-22s %6d %13d %13d %13d" % (part, kind, count, values, sent, count * sent))
        total += count * sent
    print("%-22s %-22s %6s %13s %13s %13d" % ("all", "", "", "", "", total))
    if abs(total - r["counted"]) > 1: m.fail(f"the program has counted {r['counted']} bytes")


m.script(__doc__, measure, show, placeholders={"tensor_parallel": "T"}, ranks=2, tensor_parallel=0, program="tp")
