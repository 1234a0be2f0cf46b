"""How long training waits for a save, and how long a step lasts while the checkpoint is written: --save-async and --no-save-async.

Without, training waits for the disk: bytes / (what the disk writes in a second). With it, training waits for a copy in memory, and the
thread that writes takes time of a core: with as many ranks as cores, steps last longer meanwhile. The last save of a run is not counted, because the end waits for it in either case; give steps as a multiple of every, or
it waits for the one before. The programs take turns in every round; numbers are medians over the rounds."""
import re
import dev.lib as m

OPTIONS, ROUNDS, TRUST = dict(model="gpt2", ranks=2, steps=15, every=5), 3, "these times"
WAYS = {"waits": "--no-save-async", "goes on": "--save-async", "goes on, sharded": "--save-async"}


def while_written(log):
    """Numbers of the steps that ended while a checkpoint was being written, the last one of the run apart."""
    writes, found = False, []
    for line in log.splitlines():
        if re.match("saving step", line): writes = True
        if step := re.match(r"step +(\d+)/", line):
            if writes: found.append(int(step[1]))
        if re.match("saved step", line): writes = False
    return found


def measured(run):
    slow = while_written(run.log)
    ms = {step["step"]: step["step_ms"] for step in run.steps[1:]}
    return dict(parameters=run.about["parameters"], held=run.about["predicted_bytes"]["snapshot for checkpoints"],
                wait_ms=float(run.said(r"waited ([\d.]+) ms for each of")), steps_while_written=len(slow),
                step_ms=m.median(value for step, value in ms.items() if step not in slow),
                slow_ms=m.median([value for step, value in ms.items() if step in slow] or [0]))


def measure(x):
    o = x.o
    for _ in x.in_turns():
        for way, option in WAYS.items():
            program = "fsdp --checkpoint sharded" if "sharded" in way else "zero"
            x.run(way, o.ranks, program.split()[0], program.split()[1:], f"--model {o.model} --batch-size 1 --seq-len 64",
                  f"--steps {o.steps} --save-every {o.every} --keep 1 --sample-every 0", option, keep=measured)


def show(d, o):
    def number(run, key): return d.value(run, key)
    d.print_table(["", "training waits for a save", "a step", "a step while it is written", "steps meanwhile", "host memory of rank 0"],
                  *([way, f"{number(way, 'wait_ms'):.0f} ms", f"{number(way, 'step_ms'):.0f} ms",
                     f"{number(way, 'slow_ms'):.0f} ms" if number(way, 'slow_ms') else "", f"{number(way, 'steps_while_written'):.0f}",
                     f"{number(way, 'held') / 1e6:.0f} MB"] for way in WAYS))
