"""kernel_profile.py - a table of the kernels of a run's last step, as Nsight Compute saw them: a row for each name, the slowest
first.

  python3 dev/bench/kernel_profile.py PROFILE.csv

The file is the output of ncu --csv --print-units base for gpu__time_duration.sum, launch__registers_per_thread and, as
avg.pct_of_peak_sustained_elapsed, dram__throughput and sm__throughput, one line per launch and metric. A step begins with
encoder_forward_kernel."""
import csv, re
import measure as m


def launches(lines):
    """(kernel, {gpu, dra, sm_, lau: number}) for each launch, in order."""
    found = {}
    for row in csv.reader(line for line in lines if re.match(r'"\d+",', line)):
        found.setdefault(int(row[0]), (row[4], {}))[1][row[12][:3]] = float(row[14].replace(",", ""))
    return [found[number] for number in sorted(found)]


def short(name):
    """Without arguments and template parameters, which make a library's kernel names very long."""
    return re.sub(r"[(<].*", "", name.removeprefix("void "))[:70]


def main():
    o = m.options(__doc__)
    if not o.more: m.fail("there is no file; --help says which it wants")
    steps = launches(open(o.more[0]))
    first = max((i for i, (name, _) in enumerate(steps) if "encoder_forward_kernel" in name), default=None)
    if first is None: m.fail("there is no encoder_forward_kernel in the profile")
    kernels = {}
    for name, metrics in steps[first:]: kernels.setdefault(short(name), []).append(metrics)
    ns = {name: sum(launch["gpu"] for launch in launched) for name, launched in kernels.items()}
    whole = sum(ns.values())
    print(f"{len(steps) - first} kernels, {1e-6 * whole:.2f} ms\n")

    def mean(name, metric): return f"{sum(x['gpu'] * x[metric] for x in kernels[name]) / ns[name]:.0f} %"
    print(m.table(["kernel", "launches", "ms", "share", "of the memory's rate", "of the multiprocessors'", "registers"], *(
        [name, len(kernels[name]), f"{1e-6 * ns[name]:.3f}", f"{100 * ns[name] / whole:.1f} %", mean(name, "dra"),
         mean(name, "sm_"), f"{max(x['lau'] for x in kernels[name]):.0f}"]
        for name in sorted(kernels, key=ns.get, reverse=True))), end="")


main()
