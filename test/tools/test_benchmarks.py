"""dev/bench/bench_gpu.py and dev/gpu_check.py where there is no GPU: on numbers that are known beforehand, and once from end to end with small
programs in place of large ones."""
import json, os, re, shutil, subprocess, sys, time
import pytest
from suite import ROOT, TINY, assert_refused, assert_says, command, environment, executable, succeeds, trained

PEERS = "ours llmc-ge0-r0 llmc-ge2-r0 torch-autocast torch-bf16"
# 8 x 1024 tokens of 124439808 parameters: 6 x 124439808 + 6 x 12 x 768 x 1024 = 803261952 FLOPs each, 6580 GFLOP a step.
PEAKS = [{"run": "peak", "round": i, "copy": 3000, "product": product, "sheet": 1000} for i, product in enumerate((400, 800, 900))]


def steps(program, *ms, **more):
    return [{"run": f"{program} 8", "round": 1, "ms": ms} | more]


KNOWN = PEAKS + steps("ours", 20, 10, 40, 20, counted=5.1e9, used=6.4e9) + steps("llmc-ge0-r0", 30) + steps("llmc-ge2-r0", 23) + \
    steps("torch-autocast", 30) + steps("torch-bf16", 24)


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
                r"^\| ours \| 409600 \| 20.00 \| 10.0 to 40.0 \| 32.9 % \| 41.1 % \| 5.1 \| 6.4 \|$",
                r"^\| llm.c -ge 0 -r 0 \| 273067 \| 30.00 \| 30.0 to 30.0 \| 21.9 % \| 27.4 % \| - \| - \|$",
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
                       'sm__throughput.avg.pct_of_peak_sustained_elapsed","%","10.5'):
            lines.append(f'"{k}","7","train","host","{name}","1","7","(256, 1, 1)","(96, 1, 1)","0","9.0","metrics","{metric}"')
    (tmp_path / "profile.csv").write_text("\n".join(lines) + "\n")
    said = succeeds("python3 dev/bench/kernel_profile.py", tmp_path / "profile.csv").out
    assert_says(said, r"^3 kernels, 7.00 ms$", no=["try_kernel"])
    assert said.index("| layernorm_backward_kernel | 2 | 6.000 | 85.7 % | 34 % | 10 % |") < \
        said.index("| encoder_forward_kernel | 1 | 1.000 | 14.3 % | 32 % | 10 % |")
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
    "bin/nvidia-smi": "echo 400; case $* in *lms*) echo 30000; echo 2000; : > $0.sampled; exec sleep 987 ;; esac"}


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
    assert_says(run.out, r"^\| B=2 \|", r"^\| B=4 \|", r"^\| ours \| [0-9]* \| .*\| 12.3 \| 31.5 \|$", r"^\| ours, --recompute block \|",
                r"^\| PyTorch, bf16, no master weights \| .* \| 20.2 \| 31.5 \|$", r"^\| PyTorch, fp32 weights, autocast \|",
                r"^\| llm.c -ge 2 -r 0 \| .* \| 8.0 \| 31.5 \|$", "^- ours.* over llm.c -ge", "^- ours.* over PyTorch, fp32 weights, ",
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
    assert_says(bench("--rounds 1 --batch 2", PYTHON="no-such-python").out, r"^\| ours \| [0-9]* \| .*\| 0.1 \| \S+ \|$")


@pytest.mark.skipif(command("python3 -c", ["import torch"]).status != 0, reason="there is no PyTorch")
def test_pytorchs_program_has_about_the_same_loss_in_each_precision():
    for way in "fp32", "autocast", "bf16":
        said = command("python3 dev/bench/pytorch_gpt2.py eager", way, "d1 2 16 cpu").out
        assert 10.5 < float(re.match(r"step 1 \| loss ([0-9.]*) \| grad norm [0-9.]* \| mem 0.000 GB", said)[1]) < 11.2, said


# ---- gpu_check.py ----
@pytest.fixture
def gpu_check(tmp_path):
    """A copy of the project with scripts in place of its programs; a function that runs parts there."""
    copy, bf16 = tmp_path / "copy", tmp_path / "copy/build/emulated-bf16"
    for name in "dev", "llmc": shutil.copytree(ROOT / name, copy / name)
    executable(bf16 / "bench_layers", f'{STAND_INS["build/bench_layers"]}; [ "$1" = --peaks ] || echo "asked for $*"')
    executable(bf16 / "train_gpt2_single", "for i in 1 2 3 4 5 6 7; do echo \"step $i | loss 10 | mem 1.5 GB | 9 tok/s\"; sleep 0.02; done")
    asked = "echo \"asked: $0 $*\""
    executable(tmp_path / "compare", asked)

    def run(parts, programs=(), **env):
        for build in "emulated", "emulated-bf16", "emulated-fp16", ".":
            for name in programs: executable(copy / "build" / build / name, asked)
        done = command(sys.executable, [copy / "dev/gpu_check.py"], parts, cwd=copy, env={
            "PYTHON": "no-such-python", "GPU_CHECK_OUT": tmp_path / "out", "GPU_CHECK_DEVICE": "emulated", "COMPARE": tmp_path / "compare"} | env)
        done.log = "".join(x.read_text().replace("\n", " ") + "\n" for x in sorted((tmp_path / "out").glob("*.log")))
        return done
    run.copy, run.bf16, run.out = copy, bf16, tmp_path / "out"
    return run


def test_the_page_has_the_output_of_every_part_in_the_order_asked_for(gpu_check):
    run = gpu_check("peers roofline")
    assert_says(run.out, r"^## \d+-\d+-\d+, no GPU \(emulated\)$", "^### d1 in bf16, T=8: whole steps; rounds: 1, steps a round: 1$",
                r"^\| ours \| [0-9]* \| .*\| 1.5 \| - \|$", "^### Operations of a step$", "^asked for --model d1 --vocab-size 100 1 8 1$")
    assert re.findall(r"^\| ([a-z]+)\S* \| ok ", run.out, re.M) == ["peers", "roofline"] and run.out == (gpu_check.out / "page.md").read_text()


def test_a_part_that_fails_or_takes_too_long_is_reported_and_stops_no_other(gpu_check):
    executable(gpu_check.bf16 / "bench_layers", 'echo "error: it is | broken"; exit 3')
    run = gpu_check("roofline peers speed")
    assert run.status == 1, run
    assert_says(run.out, r"^\| roofline-bf16 \| \*\*failed\*\*, status 3: error: it is / broken \| [0-9]* s \|$",
                r"^\| peers \| \*\*failed\*\*, status 1: error: /", r"^\| speed \| not run: it is a GPU's \|")
    executable(gpu_check.bf16 / "bench_layers", "exec sleep 100") # it takes all the time, and none is left for the next
    assert_says(gpu_check("roofline peers", GPU_CHECK_SECONDS=8).out, r"^\| roofline-bf16 \| \*\*ran past [1-8] s\*\* \|",
                r"^\| peers \| \*\*not run: no time left\*\* \|")


def test_an_unknown_part_is_refused_before_any_runs(gpu_check):
    assert_refused(gpu_check("roofline nonsense"), "there is no part 'nonsense'; there are build layers")
    assert not (gpu_check.out / "results.txt").exists()


ON_ONE_GPU = """tp-nccl-1 tp-mpi-4 tp-mpi-4-copies tp-mpi-4-sequence
    pp-nccl-1 pp-nccl-1-chunks pp-mpi-2 pp-mpi-4-copies pp-mpi-4-zb pp-mpi-4-strict
    3d-nccl-1 3d-nccl-1-zero 3d-mpi-4-dp-tp 3d-mpi-4-dp-tp-zero 3d-mpi-4-dp-pp 3d-mpi-4-dp-pp-zero 3d-mpi-4-tp-pp 3d-mpi-4-strict
    compress-mpi-4-int8 compress-mpi-4-int4 compress-mpi-4-top-k compress-mpi-4-sign compress-mpi-4-onebit-adam compress-mpi-4-powersgd
    compress-rates-bf16"""
BETWEEN_FOUR = {"tp": " -sequence -gathered-once -copies -bf16 -order", "pp": " -zb -windows -bf16 -schedules -chunks",
                "3d": "-dp-tp -dp-tp-zero -dp-pp -dp-pp-zero -tp-pp -bf16 -order",
                "compress": "-bits-bf16 -int8 -int4 -top-k -sign -onebit-adam -powersgd"}


def test_stages_are_checked_on_one_gpu_and_between_several(gpu_check):
    """Programs and comparisons say what they are asked for; a launcher starts one of them."""
    programs = *(f"train_gpt2_{stage}" for stage in ("tp", "pp", "3d", "compress", "ddp")), "bench_compress"
    launcher = executable(gpu_check.copy / "launcher", 'shift 2; exec "$@"')
    run = gpu_check("tp pp 3d compress gpus", programs, MPIRUN=launcher)
    assert {*ON_ONE_GPU.split()} <= {*re.findall(r"^\| (\S+) \| ok \|", run.out, re.M)}, run
    assert_says(run.out, r"^\| gpus \| not run: there are fewer than two GPUs \|")
    assert_says(run.log, "tensor-parallel 4 --batch-size 16 .*--sequence-parallel --recompute block",
                "metrics .*pytorch_fp32.jsonl .*tp-run/metrics.jsonl --rtol 1e-4",
                "pipeline-parallel 2 --batch-size 4 .*--schedule gpipe --recompute block",
                "emulated-bf16/.*metrics .*pytorch_fp64.jsonl .*--rtol 4e-3 --only grad_norm",
                "mesh dp=2,pp=2 --batch-size 4 .*--split 1,1 --zero-stage 1 --schedule zb-h1",
                "metrics .*pytorch_fp32.jsonl .*3d-run/metrics.jsonl --rtol 1e-4", "asked: build/train_gpt2_compress .*--compress int4",
                "metrics .*compress-cpu/metrics.jsonl .*compress-gpu/metrics.jsonl --rtol 1e-3 --only loss")
    run = gpu_check("gpus", programs, MPIRUN=launcher, CUDA_EMULATOR_DEVICES=4)
    expected = {f"{stage}-nccl-4{end}" for stage, ends in BETWEEN_FOUR.items() for end in ends.split(" ")}
    assert expected <= {*re.findall(r"^\| (\S+) \|", run.out, re.M)}, run


def test_the_profile_of_a_step_is_asked_of_a_gpu(gpu_check):
    """A script stands in for ncu."""
    executable(gpu_check.copy / "build/cuda-bf16/train_gpt2_single", 'case "$*" in *"--steps 2"*) ;; *) exit 1 ;; esac')
    executable(gpu_check.copy / "bin/ncu", """while [ "$1" != --log-file ]; do shift; done
        csv=$2; shift 2; "$@" || exit
        for m in gpu__time_duration.sum dram__throughput.x sm__throughput.x; do
            echo "\\"0\\",\\"1\\",\\"p\\",\\"h\\",\\"encoder_forward_kernel(int)\\",\\"1\\",\\"7\\",\\"b\\",\\"g\\",\\"0\\",\\"9.0\\",\\"s\\",\\"$m\\",\\"ns\\",\\"40\\""
        done > "$csv" """)
    run = gpu_check("profile", GPU_CHECK_DEVICE="cuda", PATH=f"{gpu_check.copy}/bin:{os.environ['PATH']}")
    assert_says(run.out, "^### Kernels of a step", r"^\| encoder_forward_kernel \| 1 \| 0.000 \| 100.0 % \| 40 % \| 40 % \|$", r"^\| profile \| ok \|")


def test_runs_are_compared_to_the_bit_or_within_a_share():
    """dev/bench/compare_runs.py, by which gpu_check.py compares."""
    one, other = trained("single", TINY), trained("single", TINY, "--lr 2.999e-3")
    for what, file in ("metrics", "metrics.jsonl"), ("weights", "step_00000020/model.safetensors"):
        def status(a, b, options):
            return command("dev/bench/compare_runs.py", what, [a.folder / file, b.folder / file], options).status
        assert (status(one, one, "--bits"), status(one, other, "--bits"), status(one, other, "--rtol 1e-7"), status(one, other, "--rtol 0.5 --atol 0.01")) == (0, 1, 1, 0)
