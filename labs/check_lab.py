#!/usr/bin/env python3
"""check_lab.py PROGRAM [FOLDER] - builds a lab's program (make lab PROGRAM=...) and says which claims of labs/PROGRAM.toml hold.

What the student has not written yet is the course's own version in the program that is graded, so that each task can be graded
before the others are written. A claim about a task that is not written is not yet met. Results are compared with the course's own
programs, built with the same flags, on the same data. The status is 0 if all claims hold.

LAB_SECONDS=N  no run is begun when runs have taken so many seconds (50). The deadline of one run is 0.6 of it; ranks wait for one
               another for 8 seconds, or for a twentieth of it if that is more

labs/PROGRAM.toml has `options`, of every run beside OPTIONS; `runs`, where a program is lab, strict (the lab's in strict mode) or a
program, and course-NAME is the run NAME by the course's own program; and `claims`: [tasks, check, what it says, hint]. A run is
made when a claim asks for it first. The checks are methods of Grader."""
import contextlib, fcntl, itertools, json, os, re, shutil, signal, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path

from dev.lib import Metrics, fail, launcher, note as say, operations
from labs.make_lab import ROOT, died, elsewhere, find_function, find_part, read_lab, programs

# Of every lab's runs.
OPTIONS = ("--data test/reference/tokens.bin --val-data= --model d2 --channels 16 --seq-len 16 --lr 3e-3 --warmup-steps 2 "
           "--eval-every 0 --sample-every 0")
WORDS = {"loss": "loss", "grad_norm": "gradient norm", "param_norm": "parameter norm", "comm_bytes": "bytes sent",
         "mem_bytes": "bytes kept"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "BUILD")}
RUN_ENVIRONMENT = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "OMPI_MCA_pml": "ob1"}


def claims_of(lab):
    """[(name, tasks, check, what it says, hint)] of a lab's list; adds the runs by the course's own program that they name."""
    claims = [(name, about.split(", "), *claim) for name, (about, *claim) in lab["claims"].items()]
    for _, _, check, *_ in claims:
        for run in set(re.findall(r"course-(\S+)", check)) & lab["runs"].keys():
            lab["runs"][f"course-{run}"] = re.sub(r"^\w+", lab["program"], lab["runs"][run])
    return claims


# ---- the programs ----
def unwritten_at(task, folder):
    """Where the statement that ends a run is in the student's file: its line, counted from 1, or 0 if the task is written."""
    lines = (folder / task["file"]).read_text().split("\n")
    return next((number for number, line in enumerate(lines, 1) if died(task) in line), 0)


def completed(task, text, path):
    """The text of the student's file with the course's version of the task."""
    lines, own = text.split("\n"), Path(task["file"]).read_text().split("\n")
    begin, end = find_function(lines, task, path)
    own_begin, own_end = find_function(own, task, task["file"])
    if "from" in task:
        own_begin, own_end = find_part(own, task, own_begin, own_end)
        end = next(i for i in range(begin, end) if died(task) in lines[i])
        begin = next((i for i in range(begin, end) if re.match(rf"\s*// TASK {task['number']}\.", lines[i])), end)
        begin -= lines[begin - 1].strip() == task.get("keep")
        end += lines[end + 1].strip() == task.get("otherwise")
    lines[begin:end + 1] = own[own_begin:own_end + 1]
    return "\n".join(lines)


def complete(lab, folder, to):
    """Copies the lab, with the course's own version of what is not written. Only what has changed is built again."""
    files = {path.relative_to(folder): path.read_text() for path in folder.rglob("*")
             if path.suffix in (".h", ".cu") and folder / "build" not in path.parents}
    for task in lab["tasks"]:
        if unwritten_at(task, folder):
            path = Path(task["file"])
            files[path] = completed(task, files[path], folder / path)
    for path, text in files.items():
        if not (to / path).exists() or (to / path).read_text() != text:
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            (to / path).write_text(text)


@contextlib.contextmanager
def locked(folder):
    """The folder is this process's alone: tests grade several labs at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def build(program, folder):
    """Builds the program in a folder. Returns whether it compiles, and what make said."""
    command = "make --no-print-directory DEVICE=cpu PRECISION=fp32 DEBUG= lab-program".split() + [f"PROGRAM={program}",
                                                                                                  f"LAB={folder}"]
    with locked(folder / "build"):
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    return run.returncode == 0, run.stdout


def own_folder(program):
    """A folder with a copy of the course's own program, whose headers are those of llmc/."""
    folder, source = Path("build/labs", program), f"train_gpt2_{program}.cu"
    with locked(folder):
        if not (folder / source).exists() or (folder / source).read_text() != Path(source).read_text(): shutil.copy(source, folder)
    return folder


def say_first_error(said):
    """The first error on top: those after it often follow from it."""
    if found := re.search(r"^.*(?:error:|: Error|undefined reference)(?:.*\n){1,4}", said, re.M): say(found[0].rstrip("\n"))


def build_all(lab, folder):
    """Builds the lab and what it is compared with. Returns the folder of the program that is graded."""
    program, written = lab["program"], [task for task in lab["tasks"] if not unwritten_at(task, folder)]
    graded = folder
    if len(written) < len(lab["tasks"]):
        graded = folder / "build/completed"
        complete(lab, folder, graded)
    references = sorted({run.split()[0] for run in lab["runs"].values()} - {"lab", "strict"})
    say(f"building {folder} and the course's own {' '.join(references)} ...")
    with ThreadPoolExecutor() as pool:
        student = pool.submit(build, program, folder)
        for name in references:
            compiles, said = build(name, own_folder(name))
            if not compiles:
                say(said)
                fail(f"the course's own train_gpt2_{name} cannot be built")
        compiles, said = student.result()
    if not compiles:
        say_first_error(said)
        say(f"--- all that the compiler said:\n{said}")
        fail(f"{folder}/train_gpt2_{program}.cu does not compile, see above: no claim can be checked")
    if graded != folder and written:
        compiles, said = build(program, graded)
        if not compiles:
            say_first_error(said)
            say("note: with the course's own version of what you have not written, the program does not compile, see above; "
                "did you change a\n      declaration? Now your program is graded as it is, and it ends at the first function that "
                "is not written.")
            return folder
    return graded


# ---- runs, their traces, and checks ----
class NotYet(Exception):
    """Why a claim does not hold."""


class Run:
    """A run of a lab's list. `failed` says what went wrong; `wrong`: it has trained, but not as it predicted itself."""
    def __init__(self, name, line):
        self.name, (self.program, ranks, *self.options) = name, line.split()
        self.ranks, self.done, self.failed, self.wrong, self.steps = int(ranks), False, None, False, []


def short(number):
    return "not a number" if number is None else f"{number:.6g}"


class Grader:
    """Makes runs, once each, and compares them. A check returns the number that says that a claim holds, or raises NotYet with the
    one that says that it does not."""
    def __init__(self, lab, graded, work):
        self.program, self.options, self.graded, self.work = lab["program"], f"{OPTIONS} {lab['options']}".split(), graded, work
        self.runs = {name: Run(name, line) for name, line in lab["runs"].items()}
        self.limit, self.begun, self.made = float(os.environ.get("LAB_SECONDS", 50)), time.monotonic(), 0

    def command(self, run, seconds):
        program, folder = run.program, Path("build/labs", run.program)
        if program in ("lab", "strict"): program, folder = self.program, self.graded
        out, wait = self.work / run.name, 8 if self.limit < 160 else self.limit / 20
        command = [folder / f"build/train_gpt2_{program}", *self.options, *run.options, "--out", out, "--trace", f"{out}.trace"]
        if program != "single": command = [*launcher(run.ranks), *command, "--comm-timeout", f"{wait:g}"]
        return ["timeout", "-k", "2", f"{seconds:.0f}", *command]

    def make(self, run):
        """Makes a run, and reads what it has written."""
        spent = time.monotonic() - self.begun
        if spent > self.limit:
            run.failed = f"not run, because {self.limit:g} seconds of runs are over; LAB_SECONDS sets another number"
            return
        seconds = min(self.limit + 5 - spent, 0.6 * self.limit)
        environment = RUN_ENVIRONMENT | ({"SHARD_COMM_STRICT": "1"} if run.program == "strict" else {})
        self.made += 1
        ended = subprocess.run(self.command(run, seconds), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               errors="replace", env=environment)
        run.log = ended.stdout
        self.judge(run, ended, seconds)
        if run.failed and not run.wrong: return
        metrics = Metrics(self.work / run.name)
        if (metrics.folder / "metrics.jsonl").exists(): run.steps, run.of = metrics.steps, metrics.about
        else: run.failed, run.wrong = "it wrote no metrics", False

    def judge(self, run, ended, seconds):
        """Says in `failed` what went wrong, if anything did."""
        said, status = ended.stderr.splitlines(), ended.returncode
        errors = [match[1] for line in said if (match := re.search(r"(?:^|rank \d+: )error: (.*)", line))]
        unlike = re.search(r"^ *(\S.*than predicted.*)$", run.log, re.M)
        if status in (124, 137):
            words = [line for line in said if re.search("rank|wait", line)]
            run.failed = f"no end after {seconds:.0f} seconds" + "".join(f": {line}" for line in words[:1])
        elif errors and (status or unlike):  # most ranks say only that one rank has left
            run.failed = next((error for error in errors if "has left" not in error), errors[0])
        elif unlike: run.failed, run.wrong = f"not as predicted: {unlike[1]}", True
        elif status: run.failed = f"status {status}" + "".join(f": {line}" for line in said[:1])
        run.failed = run.failed and " ".join(run.failed.split())

    def get(self, *names, as_predicted=False):
        """The runs of these names. One that did not train ends the check, or if asked for one that was not as it predicted."""
        for run in map(self.runs.__getitem__, names):
            if not run.done:
                run.done = True
                self.make(run)
            if run.failed and (as_predicted or not run.wrong): raise NotYet(f"{run.name}: {run.failed}")
            if not run.steps: raise NotYet(f"{run.name}: no step was made")
        return [self.runs[name] for name in names]

    def slices(self, name, rank):
        """What a rank computed, in order, without where it stood still. Of a pipeline's action, "F0 start" is the first."""
        events = json.loads((self.work / f"{name}.trace").read_text())["traceEvents"]
        mine = sorted((e["ts"], e["name"]) for e in events if e["pid"] == int(rank) and e["ph"] == "X" and e["tid"] == 0)
        return [what for _, what in mine if not what.startswith("wait")]

    def operations(self, name, rank, kind):
        """The operations of a kind that a rank issued, in order: (what, during what, step)."""
        found = [(when, re.sub(r" #\d+", "", what), during, step)
                 for q, during, what, step, when in operations(self.work / f"{name}.trace", "wait for .*#")
                 if q == int(rank) and step > 0 and during != "before"]  # before the first step it may or may not be in its part
        return [operation for _, *operation in sorted(found, key=lambda x: x[0]) if re.match(kind, operation[0])]

    def compare(self, equal, a, b, fields):
        x, y = (run.steps for run in self.get(a, b))
        if len(x) != len(y): raise NotYet(f"{len(x)} steps in {a}, {len(y)} in {b}")
        fields = [field.partition("@")[::2] for field in fields or ("loss", "grad_norm", "param_norm")]
        for number, (left, right) in enumerate(zip(x, y), 1):
            for field, only in fields:
                p, q = left.get(field), right.get(field)
                if only in ("", str(number)) and (p is None or q is None or not equal(p, q)):
                    p, q = (p, q) if short(p) == short(q) else (short(p), short(q))
                    raise NotYet(f"step {number}: {WORDS[field]} {p} in {a}, {q} in {b}")
        last = [f"{WORDS[field]} {short(x[int(only or 0) - 1][field])}" + (only and f" in step {only}") for field, only in fields]
        return f"{', '.join(last)}, in {a} as in {b}" + ("" if fields[0][1] else f", the last of {len(x)} steps")

    def near(self, a, b, rtol, *fields):
        """The steps of two runs agree within rounding. Fields are those of metrics.jsonl; FIELD@1 compares step 1 alone."""
        return self.compare(lambda p, q: abs(p - q) <= 1e-6 + float(rtol) * abs(q), a, b, fields)

    def same(self, a, b, *fields):
        """They are the same to the bit."""
        return self.compare(lambda p, q: p == q, a, b, fields)

    def weights(self, a, b):
        """What they have saved at the end, weights and moments, is the same to the bit."""
        self.get(a, b)
        elements = 0
        for file in "model.safetensors", "optimizer.safetensors":
            x, y = (sorted((self.work / name).glob(f"step_*/{file}"))[-1:] for name in (a, b))
            if not x: raise NotYet(f"{a} has saved no {file}")
            x, y = x[0].read_bytes(), y[0].read_bytes() if y else b""
            elements += len(x) / 4
            if x != y:
                at = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), min(len(x), len(y)))
                raise NotYet(f"{file} of {a} and {b} differ from byte {at:,} of {len(x):,} on")
        return f"about {elements:,.0f} numbers are equal in {a} and {b}"

    def by_formula(self, field, word, name, *formula):
        """So many bytes are sent per rank in each step, or kept on the device. The formula may use N, C, T, L, P, root, block,
        shard(n, N), which is 1/N up to a multiple of 16, halves(N), the shards of both halves of a block, and kept('RUN')."""
        run, = self.get(name)
        C, T, L, Vp = run.of["channels"], run.of["context"], run.of["layers"], (run.of["vocabulary"] + 127) // 128 * 128
        root, block = (Vp + T + 2) * C, 12 * C * C + 13 * C
        def shard(n, N): return (n + 16 * N - 1) // (16 * N) * 16
        names = {"N": run.ranks, "C": C, "T": T, "L": L, "root": root, "block": block, "P": root + L * block,
                 "shard": shard, "halves": lambda N: shard(4 * C * C + 6 * C, N) + shard(8 * C * C + 7 * C, N),
                 "kept": lambda other: self.get(other)[0].steps[0]["mem_bytes"]}
        expected = eval(" ".join(formula), {"__builtins__": {}}, names)
        for number, step in enumerate(run.steps, 1):
            got = step.get(field)
            if got is None or abs(got - expected) >= 1:
                raise NotYet(f"{word} {got or 0:,.0f} bytes in step {number}, formula {expected:,.0f} ({name})")
        return f"{word} {expected:,.0f} bytes per rank{' and step' * (word == 'sent')}, as by formula ({name})"

    sent, kept = partialmethod(by_formula, "comm_bytes", "sent"), partialmethod(by_formula, "mem_bytes", "kept")

    def all_equal(self, x, y, differ, equal):
        """The two lists are equal, and not empty; differ(i, p, q) says how items number i differ."""
        for i, (p, q) in enumerate(itertools.zip_longest(x, y)):
            if p != q: raise NotYet(differ(i, p or "nothing", q or "nothing"))
        if not x: raise NotYet(equal)
        return equal

    def steps(self, a, b, rank):
        """A rank of a pipeline computes the same actions in the same order."""
        self.get(a, b)
        x, y = ([what[:-6] for what in self.slices(name, rank) if re.fullmatch(r"\S+ start", what)] for name in (a, b))
        def differ(i, p, q):
            return f"action {i + 1} of rank {rank}: {p} in {a}, {q} in {b}, after {' '.join(x[max(i - 6, 0):i])}"
        first = " ".join(x[:10])
        return self.all_equal(x, y, differ, f"{len(x)} actions of rank {rank} in the same order in {a} and {b}: {first} ...")

    def places(self, a, b):
        """Each rank computes the same slices, in the same order."""
        count = 0
        for rank in range(self.get(a, b)[0].ranks):
            x, y = ([f"'{what}'" for what in self.slices(name, rank)] for name in (a, b))
            self.all_equal(x, y, lambda i, p, q: f"rank {rank} computes {p} in {a}, {q} in {b}", f"rank {rank} computes nothing")
            count += len(x)
        return f"{count} parts of steps are computed by the same ranks in {a} and {b}"

    def lines(self, a, b, pattern):
        """The lines of the logs that have the pattern are the same."""
        logs = [run.log.splitlines() for run in self.get(a, b)]
        x, y = ([f"'{' '.join(line.split())}'" for line in log if re.search(pattern, line)] for log in logs)
        return self.all_equal(x, y, lambda i, p, q: f"{p} in {a}, {q} in {b}",
                              f"{len(x)} lines of the log with '{pattern}' are the same in {a} and {b}")

    def ends(self, name):
        """It trains to its end, with memory and bytes as it predicted itself."""
        run, = self.get(name, as_predicted=True)
        return f"{name} ended after {len(run.steps)} steps, memory and bytes as predicted"

    def issued(self, name, kind, during, count):
        """In each step at least so many operations of the kind are issued while such a part is computed."""
        run, = self.get(name)
        operations = self.operations(name, 0, kind)
        inside = [step for _, what, step in operations if re.match(during, what)]
        fewest = min(inside.count(step) for step in range(1, len(run.steps) + 1))
        text = (f"{fewest} {kind} issued during {during} in a step, of {len(operations) / len(run.steps):.0f}; "
                f"{'one' if count == '1' else count} or more are to be")
        if fewest < int(count): raise NotYet(text)
        return text

    def order(self, a, b, rank, kind):
        """Operations of the kind are issued at the same places of the timeline, in the same order."""
        self.get(a, b)
        issued = [self.operations(name, rank, kind) for name in (a, b)]
        x, y = ([f"{what} during '{during}' of step {step}" for what, during, step in operations] for operations in issued)
        return self.all_equal(x, y, lambda i, p, q: f"operation {i + 1}: {p} in {a}, {q} in {b}",
                              f"{len(x)} operations of rank {rank} at the same places in {a} and {b}")


# ---- the table ----
def verdict(claim, missing, grader):
    """Whether a claim holds, and why."""
    _, about, test, _, hint = claim
    without = [title for title in about if title in missing]
    if without: return False, f"{' and '.join(without)} {'is' if len(without) == 1 else 'are'} not written yet"
    check, *arguments = test.split()
    try:
        return True, getattr(grader, check)(*arguments)
    except NotYet as why:
        return False, f"{why}\n         hint: {hint}"


def grade(lab, claims, folder, grader, begun):
    """Prints which claims hold. Returns whether all do."""
    program, missing = lab["program"], {task["title"]: task for task in lab["tasks"] if unwritten_at(task, folder)}
    print(f"lab {program} in {folder}: {len(lab['tasks']) - len(missing)} of {len(lab['tasks'])} tasks are written\n")
    failed = []
    for claim in claims:
        holds, why = verdict(claim, missing, grader)
        print(f"{'passed ' if holds else 'not yet'}  {claim[0]}: {claim[3]}\n         {why}")
        failed += [claim] * (not holds)
    print(f"\n{len(claims) - len(failed)} of {len(claims)} claims hold; {grader.made} runs, {time.time() - begun:.0f} seconds")
    for name, about, *_ in [claim for claim in failed if not set(claim[1]) & missing.keys()][:1]:
        print(f"look first at: {name}, which is about {' and '.join(about)}")
    for task in list(missing.values())[:1]:
        where = f"{folder}/{task['file']}:{unwritten_at(task, folder)}"
        print(f"write next: {task['title']}, {where} (task {task['number']} in {folder}/TASKS.md)")
    if not missing and not failed:
        source = f"train_gpt2_{program}.cu"
        print(f"All is written and holds. Now compare yours with the course's: diff {folder}/{source} {source}")
    return not failed


def main(program="", folder=None):
    begun = time.time()
    os.chdir(ROOT)
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda *_: sys.exit(1))  # the folder of the runs is removed
    if program not in programs():
        fail(f"the lab must be one of: {' '.join(programs())} - not '{program}'. For example: make check-lab PROGRAM=ddp")
    folder = Path(folder or f"labs/{program}")
    source = folder / f"train_gpt2_{program}.cu"
    if not source.exists(): fail(f"there is no {source}: make lab PROGRAM={program}{elsewhere(program, folder)} makes it")
    lab = read_lab(program)
    claims, graded = claims_of(lab), build_all(lab, folder)
    with tempfile.TemporaryDirectory() as work: sys.exit(not grade(lab, claims, folder, Grader(lab, graded, Path(work)), begun))


if __name__ == "__main__": main(*sys.argv[1:3])
