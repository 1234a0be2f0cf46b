"""The value of a pipeline's balance and schedule: its throughput compared with that of as many single devices.

Ranks play pipelines whose stages are as unequal as those of --model: --times are the milliseconds of F, I and W of one of its
blocks, and its head takes as long as it does beside a block (train_gpt2_pp's --emulate-ms; in fact a small model is trained). Each
line is one split: equal numbers of blocks, or --split auto. Its balance is the mean cost of the stages over the largest. The share
is the throughput of p stages over p times that of one device which has all blocks and the same batch of --micro micro-batches;
build/schedule predicts it. No more ranks than blocks, and actions of 20 ms or more, because a few cores play all ranks."""
import re
import dev.lib as m

OPTIONS = dict(stages=[2, 4, 8], schedules=["1f1b", "zb-h1"], model="gpt2", micro=8, times="20,24,16")
TRUST, MORE = "the measured shares", False


def measure(x):
    o, schedule = x.o, m.need(f"{m.environ('BUILD', 'build')}/schedule", "build/schedule")
    said = m.ask(schedule, f"--model {o.model} --p 1") or ""
    # "gpt2: 12 blocks; the head costs as much as 5.46 of them"
    about = re.search(r"^\S+: (\d+) blocks; .*as much as ([\d.]+) of.*", said, re.M)
    if not about: m.fail(f"build/schedule does not know the model '{o.model}'")

    def play(name, p, schedule_, split, **fields):
        x.run(name, p, "pp", m.DATA, f"--layers {about[1]} --channels 16 --heads 1 --seq-len 16 --batch-size 2 --total-batch-size "
              f"{32 * o.micro} --steps 2 --schedule {schedule_} --split {split} --emulate-ms {o.times},{about[2]}", launched=True,
              keep=lambda run: dict(p=p, schedule=schedule_, split=split, ms=run.last("step_ms"), **fields))
    play("one", 1, "1f1b", about[1], about=f"{about[0]}; {o.micro} micro-batches")
    for p, name in ((p, name) for p in o.stages for name in o.schedules):
        predicted = m.output(schedule, f"--model {o.model} --p {p} --m {o.micro} --schedule {name} --times {o.times}")
        for which in "even", "split":
            # "split 9,3: ranks compute for 97.0 % of the time without a bubble, for 87.4 % with it; step ...", and a line with
            # "even "
            split, balance, share = re.search(rf"^{which} +(\S+): ranks compute for (\S+) % of [^,]*, for (\S+) % with", predicted,
                                              re.M).groups()
            play(f"{which} {p} {name}", p, name, split, balance=balance, share=share)


def show(d, o):
    one, *rows = d.records()
    print(one["about"], end="\n\n")
    d.print_table(["stages", "schedule", "blocks of each", "balance", "share, predicted", "measured"], *(
        [r["p"], r["schedule"], r["split"], f"{r['balance']} %", f"{r['share']} %", f"{100 * one['ms'] / r['ms'] / r['p']:.1f} %"]
        for r in rows))
