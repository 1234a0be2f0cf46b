"""pp_memory.py - what each rank of a pipeline keeps with each schedule, measured in a step of training beside the formulas.

Megabytes per rank. at a time: micro-batches (in one chunk, if a rank has several) whose activations are alive. kept: the memory of
these, by formula. state: parameters, gradients and optimizer state. total: with all else, as the program predicts it; a rank that
measures another number of bytes ends this script, and so do activations of rank 0 that are not those of the formulas."""
import re
import measure as m


def measure(d, o):
    for schedule in o.schedules:
        run = m.train(f"{o.program} with --schedule {schedule}", o.program, o.more, f"--recompute none --schedule {schedule} "
                      "--steps 1 --save-every 0", m.QUIET, ranks=o.ranks, threads=None)
        # "  rank 1    2 blocks; activations of 3 micro-batches; 83.6 MB", the first also with ", embedding", the last with ", head"
        ranks = re.findall(r"^  rank \d+ +(\d+) block[^;]*; activations of (\d+) [^;]*; (.*)$", run.log, re.M)
        d.add(schedule, micro=run.said(r"^step +\d+ tokens (in \d+ micro-batch(?:es)?) "), activations=run.kinds()["activations"],
              ranks=[[int(blocks), int(slots), total] for blocks, slots, total in ranks], **run.shape)


def rows(r):
    C, X, v, p, tokens, delayed = r["channels"], r["width"], r["chunks"], len(r["ranks"]), r["B"] * r["T"], r["run"] == "zb-h1"
    Vp = m.padded(r["vocabulary"])
    for rank, (blocks, slots, total) in enumerate(r["ranks"]):
        largest = (blocks + v - 1) // v # of its chunks
        state = (blocks * (12 * C * C + 13 * C) + ((Vp + r["context"] + 2) * C if rank in (0, p - 1) else 0)) * 16
        head = 2 * C * X + 8 if rank == p - 1 else 0
        kept = tokens * slots * (largest * (16 * C * X + (4 + r["heads"]) * 4 + delayed * 9 * C * X) + head + 8)
        # scratch, messages, losses; a row of logits for samples, and the sums of a step
        other = tokens * (10 * C * X + 4) + Vp * X + 40
        if rank == 0 and v == 1 and kept + other != r["activations"]:
            m.fail(f"rank 0 has activations of {r['activations']} bytes, by formula {kept + other}")
        total = total.removesuffix(" MB")
        print("%-12s %4d %7d %10d %9.1f %9.1f %9s" % (r["run"], rank, blocks, slots, kept / 1e6, state / 1e6, total))


def show(d, o):
    first = d.records()[0]
    print(f"{first['model']}; a step {first['micro']}\n\nschedule     rank  blocks  at a time      kept     state     total")
    for r in d.records(): rows(r)


m.script(__doc__, measure, show, least={"ranks": (2,)}, ranks=4, schedules="gpipe 1f1b interleaved zb-h1".split(), program="pp")
