"""local_sgd.py - the solution of chapter 7's exercise (test/exercises/local_sgd.diff) beside ddp: validation losses.

A row for each way of training on a number of ranks, a column for each of --seeds: the loss after --steps of the course's own data.
The solution is built in a copy of the sources."""
import shutil
import measure as m

WAYS = {"one rank alone": ([1], ""), "ddp": ([2, 4], "")} | {
    f"{name}, H = {H}": (ranks, f"{options} --local-steps {H}") for name, options, H, ranks in (
        ("mean of weights", "--outer-lr 1 --outer-momentum 0", 1, [2]), ("mean of weights", "--outer-lr 1 --outer-momentum 0", 10, [2, 4]),
        ("mean of weights", "--outer-lr 1 --outer-momentum 0", 30, [2, 4]), ("DiLoCo 0.7, 0.9", "", 10, [2]),
        ("DiLoCo 0.7, 0.9", "", 30, [2, 4]), ("DiLoCo 0.7, 0.5", "--outer-momentum 0.5", 30, [2, 4]))}


def solution():
    folder = m.work() / "solution"
    folder.mkdir()
    for name in "Makefile", "train_gpt2_ddp.cu": shutil.copy(name, folder)
    for name in "llmc", "dev": (folder / name).symlink_to(m.ROOT / name)
    m.output("git -C", folder, "apply", m.ROOT / "test/exercises/local_sgd.diff")
    m.output("make -s -C", folder, "BUILD=build DEVICE=cpu PRECISION=fp32 DEBUG= build/train_gpt2_ddp")
    return folder / "build/train_gpt2_ddp"


def measure(d, o):
    program = solution()
    m.ranks_can_start(4)
    for seed in o.seeds:
        for way, (numbers, options) in WAYS.items():
            for ranks in numbers:
                run = m.train(way, program, "--layers 2 --heads 4 --channels 128 --seq-len 64 --batch-size 8 --lr 2e-3 --sample-every 0",
                              f"--steps {o.steps} --eval-every {o.steps} --seed {seed}", options, o.more, ranks=ranks)
                d.add(f"{way}, {ranks}", seed, way=way, ranks=ranks, loss=run.losses[-1][1])
                m.note(f"  seed {seed}, {way}, {ranks}: {run.losses[-1][1]:.3f}")


def show(d, o):
    d.print_table(["", "ranks", *(f"seed {record['round']}" for record in d.each_round("ddp, 2"))], *(
        [record["way"], record["ranks"], *(f"{x['loss']:.2f}" for x in d.each_round(record["run"]))] for record in d.records()))


m.script(__doc__, measure, show, folder="", steps=300, seeds=[42, 43, 44])
