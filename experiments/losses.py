"""Validation losses of methods that send less, compared with methods that send everything: a column for each seed.

--rows has local SGD and DiLoCo, the exercise of chapter 7, whose program is built from the stored solution
(test/exercises/local_sgd.diff): H, or H:LR:MOMENTUM with an outer optimizer, beside "ddp", which is --local-steps 0, and "alone",
the same on one rank. Or ZeRO++ on two nodes (chapter 10): "fsdp", and zero++ with what is quantised: "zero++", "zero++:weights",
"zero++:gradients", "zero++:gradients-int8", "zero++:none"."""
import os, shutil, subprocess
import dev.lib as m

OPTIONS = dict(ranks=4, seeds=[1, 2, 3], steps=300, rows="alone ddp 1 10 30 10:0.7:0.9 30:0.7:0.9 30:0.7:0.5".split())


def build():
    """The solution, in a copy of ddp's files."""
    place = m.work() / "solution"
    place.mkdir()
    for name in "Makefile", "train_gpt2_ddp.cu": shutil.copy(name, place)
    for name in "llmc", "dev": os.symlink(m.ROOT / name, place / name)
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(m.work())}
    for command in (["git", "apply", m.ROOT / "test/exercises/local_sgd.diff"],
                    ["make", "-s", "BUILD=build", "DEVICE=cpu", "PRECISION=fp32", "build/train_gpt2_ddp"]):
        if subprocess.run(command, cwd=place, env=env).returncode: m.fail("the solution cannot be built")
    return place / "build/train_gpt2_ddp"


WHOLE_WEIGHTS, WHOLE_GRADIENTS = "--quantise-weights none", "--quantise-gradients none"
NODES = { # options, and what the table says
    "fsdp": ("", "fsdp"), "zero++": ("", "zero++: both, int8 and int4"),
    "zero++:weights": (WHOLE_GRADIENTS, "zero++, only weights, int8"),
    "zero++:gradients": (WHOLE_WEIGHTS, "zero++, only gradients, int4"),
    "zero++:gradients-int8": (f"{WHOLE_WEIGHTS} --quantise-gradients int8", "zero++, only gradients, int8"),
    "zero++:none": (f"{WHOLE_WEIGHTS} {WHOLE_GRADIENTS}", "zero++, nothing quantised")}


def measure(x):
    solution = None
    for x.round in x.o.seeds:
        for row in x.o.rows:
            if row in NODES:
                program, options = "fsdp" if row == "fsdp" else "zeropp", NODES[row][0] + " --node-ranks 2" * (row != "fsdp")
            else:
                H, lr, momentum = "0:1:0".split(":") if row in ("alone", "ddp") else (row + ":1:0").split(":")[:3]
                solution = solution or build()
                program, options = solution, f"--local-steps {H} --outer-lr {lr} --outer-momentum {momentum}"
            x.run(row, 1 if row == "alone" else x.o.ranks, program,
                  "--data data/train.bin --val-data data/val.bin --layers 2 --heads 2 "
                  f"--channels 64 --seq-len 64 --batch-size 8 --lr 2e-3 --eval-every {x.o.steps} --eval-steps 8", options,
                  f"--steps {x.o.steps} --seed {x.round}", launched=True,
                  keep=lambda run: dict(loss=run.losses[-1][1], model=run.shape["model"]))


def title(row):
    if row in NODES: return NODES[row][1]
    H, *outer = row.split(":")
    return {"alone": "one rank alone", "ddp": "ddp"}.get(row) or (
        f"{'DiLoCo {}, {}'.format(*outer) if outer else 'mean of weights'}, H = {H}")


def show(d, o):
    print(d.records()[0]["model"], end="\n\n")
    digits = 3 if {*d.runs()} & {*NODES} else 2
    seeds = [r["round"] for r in d.each_round(d.runs()[0])]
    d.print_table(["", "ranks", *(f"seed {seed}" for seed in seeds)],
                  *([title(row), d.first(row)["ranks"], *(f"{r['loss']:.{digits}f}" for r in d.each_round(row))]
                    for row in d.runs()))
