"""Meshes as in chapter 8: memory, traffic along each axis and speed, measured on this machine.

A mesh is written as replicas of the model x parts of each matrix x pipeline stages, as 2x4x1; with z behind it --zero-stage
1, with s --sequence-parallel. All have the same 16 sequences a step: where there are stages in micro-batches of 2 each,
elsewhere in one micro-batch, whose activations take more. (Chapter 8 compares memory at one size of micro-batch, with
--predict.) Memory is that of the rank that keeps most, bytes are those of rank 0; a run in which a rank keeps or sends
anything but what it predicted, in all or along an axis, ends this script. Times are medians over all steps but each run's
first; the meshes take turns in every round, with a thread for each rank. efficiency: the time of one device with the whole
batch on one thread, over the time of the mesh and the number of cores. waits: the share of a step in which rank 0 waits for
others. computes: how much of a step ranks compute if each of F, I and W of the whole model lasts 160 ms (--emulate-ms), by
the formula and measured: what shared cores cannot show."""
import re
import dev.lib as m

SEQUENCES = 16
MESHES = "4x1x1 4x1x1z 1x4x1 1x4x1s 1x1x4 2x2x1 2x2x1z 2x1x2 1x2x2".split()
KINDS = "parameters", "gradients", "optimizer state", "activations", "communication", "total"
OPTIONS, ROUNDS, TRUST = dict(meshes=MESHES, steps=5), 3, "these times"
PLACEHOLDERS = {"meshes": "4x1x1 1x2x2z ..."}


class Mesh:
    def __init__(self, name):
        if not re.fullmatch(r"([1-9]\d*x){2}[1-9]\d*[zs]*", name):
            m.fail(f"--meshes wants meshes such as 2x2x1 or 4x1x1z, not '{name}'")
        self.d, self.t, self.p = map(int, re.findall(r"\d+", name))
        if SEQUENCES % self.d:
            m.fail(f"mesh {name} has {self.d} replicas of the model, and {SEQUENCES} sequences cannot be divided among them")
        self.ranks, self.micro = self.d * self.t * self.p, 2 if self.p > 1 else SEQUENCES // self.d
        switches = " --zero-stage 1" * ("z" in name) + " --sequence-parallel" * ("s" in name)
        self.options = f"--mesh dp={self.d},tp={self.t},pp={self.p}{switches}"


def kept(log):
    """MB of the rank that keeps most, by kind, from "memory of rank 0, most  predicted measured" and a line for each kind below
    it."""
    lines = re.search(r"^memory (?:of|per) rank.*measured\n((?: .*\n)*)", log, re.M)[1]
    found = re.findall(r"^ +(\D+?) +[\d.]+ \w+ +([\d.]+) (\w+)", lines, re.M)
    return {kind: float(x) * m.UNITS[unit] / 1e6 for kind, x, unit in found}


def measure(x):
    steps, tokens = f"--steps {x.o.steps}", SEQUENCES * int(m.option(x.o.more, "--seq-len", 128))
    common = f"--layers 8 --channels 256 --heads 4 --seq-len 128 --lr 1e-3 {steps}"
    for _ in x.in_turns():
        x.run("single", 1, "single", common, f"--batch-size {SEQUENCES}", keep=lambda run: run.shape | run.speeds)
        for name, mesh in x.o.found.items():
            x.run(name, mesh.ranks, "3d", common, mesh.options, f"--batch-size {mesh.micro} --total-batch-size {tokens}",
                  keep=lambda run: dict(kept=kept(run.log), along=run.about["predicted_comm_bytes_along"], **run.speeds))
    # With one round more, of actions that last as long as they would on so many devices. A copy's sums last no time then.
    for name, mesh in x.o.found.items():
        if mesh.p == 1: continue
        ms = f"{160 / mesh.t / mesh.p:g}"
        run = x.train(f"{name} with --emulate-ms", mesh.ranks, "3d", mesh.options,
                      "--layers 8 --channels 64 --heads 4 --seq-len 32 "
                      f"--batch-size 2 --total-batch-size {SEQUENCES * 32} --steps 3 --emulate-ms {ms},{ms},{ms}")
        x.d.first(name)["computes"] = [run.said(r"^  the formula says ([\d.]+ %)"), run.said(r"^bubble .*computed for ([\d.]+ %)")]


def title(name):
    return re.sub("s$", ", `--sequence-parallel`", name.replace("x", " x ").replace("z", ", ZeRO"))


def memory(d, name):
    kinds = d.first(name)["kept"]
    for kind in KINDS:
        mb = kinds.get(kind, 0) + (kinds.get("workspace", 0) if kind == "activations" else 0)
        yield f"{mb:.1f} MB" if mb < 99.95 else f"{mb:.0f} MB" # the log has three digits


def speed(d, name):
    mesh, r = Mesh(name), d.first(name)
    yield SEQUENCES // mesh.d // mesh.micro
    for axis in "tp", "pp", "dp":
        sent = r["along"].get(axis, 0)
        yield f"{sent / 1e6:.1f} MB" if sent >= 1000 else ""
    ms, one = d.of_steps(name, "step_ms"), d.of_steps("single", "step_ms")
    yield from (f"{ms:.0f} ms", f"{100 * one / ms / min(mesh.ranks, d.header['cores']):.0f} %",
                f"{d.of_steps(name, 'waits'):.0f} %")
    yield ", ".join(r.get("computes", ""))


def check(o):
    o.found = {name: Mesh(name) for name in o.meshes}
    o.ranks = max(mesh.ranks for mesh in o.found.values())


def show(d, o):
    names = d.runs()[1:]
    print(d.first("single")["model"], end="\n\n")
    d.print_table(["dp x tp x pp", "parameters", "gradients", "optimizer", "activations", "communication", "all"],
                  *([title(name), *memory(d, name)] for name in names))
    print()
    d.print_table(["dp x tp x pp", "micro-batches", "along tp", "along pp", "along dp", "step",
                   f"efficiency of {d.header['cores']} cores", "waits", "computes: formula, measured"],
                  *([title(name), *speed(d, name)] for name in names))
