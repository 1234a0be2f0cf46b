"""here.py - measures this machine for build/plan --gpu cpu-here: what each of N ranks can compute and copy, and the link between
them.

The ranks are processes with one thread each, as those that train. GFLOP/s of fp32 products and GB/s of copies (read and written)
are measured while all of them measure, because they share caches, memory, and if they outnumber the cores also these; of their
results the least counts, because a step waits for the slowest rank. The link is what build/comm_bench fits to a sweep from 64 KB to
16 MB.

MPIRUN  how to start ranks (dev/on_ranks.sh)    CC  the compiler of dev/bench/peak.c"""
import json, os
import measure as m


def link(ranks, bench, sweep="-b 64K -e 16M"):
    """What build/comm_bench says of the link between so many ranks, from these sizes on."""
    file, log = m.work() / "link.json", m.work() / "log"
    if m.execute(m.words([*m.launcher(ranks), bench], "--op all -f 4", sweep, "--json", file), log): m.failed(bench, log)
    return json.loads(file.read_text())


def least(ranks, peak, what):
    """The rate of the slowest rank."""
    log = m.work() / "log"
    status = m.execute([*m.launcher(ranks), str(peak), what], log)
    rates = [float(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(f"{what} ")]
    if status or not rates or min(rates) <= 0: m.failed(f"peak {what}", log)
    return min(rates)


def main():
    o = m.options(__doc__, more=False, least={"ranks": (2, "a link needs two")}, ranks=2, out="build/here.json")
    bench, peak = m.need("build/comm_bench", "build/comm_bench"), m.work() / "peak"
    m.ranks_can_start(o.ranks, quiet=True)
    busy = m.busy_percent()
    if busy > 20: m.note(f"other programs keep this machine busy for {busy} % of the time: these figures will be too low")
    if not m.compiled("dev/bench/peak.c", peak, "-std=c11 -O3 -march=native -fopenmp"): m.fail("dev/bench/peak.c does not compile")
    found = {"gflops": least(o.ranks, peak, "sgemm"), "copy": least(o.ranks, peak, "copy")} | link(o.ranks, bench)
    os.makedirs(os.path.dirname(o.out) or ".", exist_ok=True)
    m.Path(o.out).write_text(json.dumps(found, indent=1) + "\n")
    rates = "".join(f" {1e-9 * x['busbw']:.2f}" for x in found["collectives"].values())
    print(f"{o.ranks} ranks of one thread: {found['gflops']:g} GFLOP/s and {found['copy']:g} GB/s each; link:{rates} GB/s "
          f"(all-reduce, reduce-scatter, all-gather, ...); written to {o.out}")


if __name__ == "__main__": main()
