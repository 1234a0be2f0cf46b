"""The gain of compressed gradients on a slow network: real runs over an emulated link.

First a run of train_gpt2_ddp measures how long a rank computes in a step of this model on this machine. The link's rate is chosen so
that ddp's messages take --ratio of that time: 0.8 is the example of 10 ms of computing and 8 ms of communication.
Then ddp and each method of train_gpt2_compress run with --emulate-link at that rate. A line for each: the bytes sent, as a share of
ddp's; computing, communication and what of it was exposed, if ddp's computing is 10; both efficiencies as the run's last lines
have them, and as build/plan predicts them; computing and exposed together as a share of ddp's. Compressing counts as computing
here, not in the plan. All steps that count are compressed; the first does not count. Nothing else should run on the machine."""
import re
import dev.lib as m

METHODS = "none bf16 int8 int4 top-k sign powersgd".split()
HEAD = """                   sent                              compute / (compute +   the plan                      step
              of ddp's  computing   communi-   exposed  commun.)  exposed)  commun.)  exposed)   of ddp's"""
OPTIONS = dict(ranks=2, ratio="0.8", methods=METHODS, steps=12, model="d4", seq_len=128, batch_size=16, bucket_mb="2")
TRUST = "these times"
MORE, PLACEHOLDERS = False, {"methods": "none bf16 int8"}
LEAST = {"ranks": (2, "one rank sends nothing; give 2 or more"), "steps": (3, "the first step does not count")}


def measure(x):
    o, plan = x.o, m.need(f"{m.environ('BUILD', 'build')}/plan", "build/plan")
    shape = f"--model {o.model} --seq-len {o.seq_len} --batch-size {o.batch_size} --bucket-mb {o.bucket_mb}"

    def train(name, program, *options):
        def keep(run):
            mean = run.diagnosis["mean"]
            return dict(sent=run.last("comm_bytes"), computing=mean["computing"], communication=sum(mean["communication"].values()),
                        by_communication=run.diagnosis["efficiency_communication"],
                        by_exposed=run.diagnosis["efficiency_exposed"],
                        planned=said.get("none" if name == "ddp" else name, ["", ""]))
        return x.run(name, o.ranks, program, *options, shape, m.DATA, f"--save-every 0 --steps {o.steps}", keep=keep)
    said = {}
    alone = train("alone", "ddp")
    rate = f"{8e-6 * alone.last('comm_bytes') / (alone.diagnosis['mean']['computing'] * float(o.ratio)):.6g}"
    text = m.output(plan, "--compress all", shape.replace("--bucket", f"--vocab-size {alone.about['vocabulary']} --bucket"),
                    f"--ranks {o.ranks} --precision fp32 --device cpu --compute-ms 10 --communication-ms {10 * float(o.ratio):g}")
    said |= {words[0]: words[-2:] for words in map(str.split, text.splitlines()) if len(words) > 2 and words[0] in METHODS}
    x.d.first("alone").update(title=f"{o.model}, {o.ranks} ranks, {o.batch_size} x {o.seq_len} tokens each: EMULATED LINK on which "
                            f"ddp's communication takes {o.ratio} of its computing")
    train("ddp", "ddp", f"--emulate-link {rate}")
    for method in o.methods:
        start = "" if method == "none" else "--compress-from 0"
        train(method, "compress", f"--compress {method} {start} --emulate-link {rate}")


def line(r, ddp, whole):
    def lasts(x): return x["computing"] / x["by_exposed"] # with what is exposed
    unit = 10 / ddp["computing"]
    print("%-12s %8.1f%% %10.1f %10.1f %9.1f %9.1f%% %9.1f%% %9s %9s %9.2f" % (
        r["run"], 100 * r["sent"] / whole, unit * r["computing"], unit * r["communication"], unit * (lasts(r) - r["computing"]),
        100 * r["by_communication"], 100 * r["by_exposed"], *r["planned"], lasts(r) / lasts(ddp)))


def check(o):
    if not re.fullmatch(r"\d{1,3}(\.\d*)?|\.\d+", o.ratio) or float(o.ratio) <= 0:
        m.fail(f"--ratio wants a number above 0, not '{o.ratio}'")


def show(d, o):
    alone, ddp, *methods = d.records()
    print(alone["title"], HEAD, sep="\n")
    for r in ddp, *methods: line(r, ddp, alone["sent"])
