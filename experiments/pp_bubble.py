"""The bubble of pipelined runs with the times of --emulate-ms, compared with the formula.

A line for each schedule, number of stages and of micro-batches: the bubble by the formula for --times (ms of F, I and W) and as
measured, the median over the steps but the first; which share of the time a rank computes, by both; and how long a step was. Each
rank is a process that mostly sleeps, so more ranks than cores show the same bubble, if actions last 20 ms or more and nothing else
runs. --traces FOLDER keeps the runs' timelines there, as SCHEDULE_P_M.json, for build/schedule --trace."""
import os, re, shutil
import dev.lib as m

OPTIONS = dict(stages=[2, 4], micro=[1, 4, 8], schedules=["1f1b"], times="20,20,20", steps=12, traces="")
PROGRAM, TRUST, MORE, PLACEHOLDERS = "build/train_gpt2_pp", "these times", False, {"traces": "FOLDER"}


def measure(x):
    o = x.o
    schedule, trace = m.need(m.environ("SCHEDULE", "build/schedule"), "build/schedule"), m.work() / "trace.json"
    if o.traces: os.makedirs(o.traces, exist_ok=True)
    for name, p, micro in ((name, p, micro) for name in o.schedules for p in o.stages for micro in o.micro):
        formula = m.output(schedule, f"--p {p} --m {micro} --schedule {name} --times {o.times}")
        # 16 channels and 32 tokens a micro-batch compute next to nothing
        x.train(f"{name} {p} {micro}", p, o.program, m.DATA, "--model d8 --heads 4 --channels 16 --seq-len 16 --batch-size 2 "
                f"--total-batch-size {32 * micro} --steps {o.steps} --save-every 0 --schedule {name} --emulate-ms {o.times} "
                f"--trace {trace}")
        said = m.output(schedule, f"--trace {trace}")
        if o.traces: shutil.copy(trace, f"{o.traces}/{name}_{p}_{micro}.json")
        found = re.search(r"^bubble of .* median ([\d.]+)", said, re.M) or re.search(r"^bubble as measured +([\d.]+)", said, re.M)
        known = re.search(r"^bubble by the formula +([\d.]+)", formula, re.M) # zb-h1 with few micro-batches has none
        x.d.add(f"{name} {p} {micro}", schedule=name, p=p, m=micro, times=o.times, steps=o.steps, load=os.getloadavg()[0],
                measured=float(found[1]), formula=float(known[1]) if known else None)


def check(o):
    if max(o.stages) > 8: m.fail(f"--stages {max(o.stages)}: the model of this script has 8 blocks; give at most 8")


def show(d, o):
    first = d.first(d.runs()[0])
    print(f"F, I and W last {first['times']} ms; {first['steps']} steps each; load average {first['load']:.2f}\n"
          "schedule      p   m   formula ms  measured ms   ratio   computes by: formula, measured   step ms")
    for r in d.records():
        work, formula, measured = r["m"] * sum(map(float, r["times"].split(","))), r["formula"], r["measured"]
        by_formula = (f"{formula:.1f}", f"{measured / formula:.3f}", f"{100 * work / (work + formula):.1f}%") if formula else "---"
        step = work + measured
        print("%-12s %2d %3d %12s %12.1f %7s %13s %9.1f%% %10.1f" % (
            r["schedule"], r["p"], r["m"], by_formula[0], measured, *by_formula[1:], 100 * work / step, step))
