"""What dev/kernels/cpu and dev/kernels/cuda have in several ways, and the roofline. Each variant gives the numbers that it should,
and the check reports one that is wrong. A GPU's kernels run under the emulator with the address sanitizer. The roofline
(dev/kernels/cuda/bench_layers.cu) counts as the formulas do, and its CUDA graph of a step leaves the step's bits. No time is
judged."""
import re
import pytest
from kernels.gpus import compiled, cpu_layers, flags, missing
from suite import ROOT, assert_refused, assert_says, command, executable, succeeds

pytestmark = pytest.mark.rest
LONG = 400
ON_GPU = missing("cublasLt", "cudnn")
CPU = sorted(path.stem for path in ROOT.glob("dev/kernels/cpu/*.c") if path.stem != "bench_layers")
CUDA = sorted(path.stem for path in ROOT.glob("dev/kernels/cuda/*.cu") if path.stem != "bench_layers")


def results(run):
    """{variant: result} of its table."""
    return dict(re.findall(r"^\| ([a-z_]+_\d_\w+) \|.*\| ((?:right|WRONG|not offered)[^|]*) \|", run.out, re.M))


def variants(source):
    """How many a source has."""
    return len(re.findall(r"^VARIANT\(", (ROOT / source).read_text(), re.M))


def assert_all_right(run, number):
    assert run.status == 0 and [*results(run).values()] == ["right"] * number != [], run


def assert_wrong(run, wrong, result, number):
    """This variant alone is wrong, and the others are right."""
    assert run.status == 1 and results(run).pop(wrong) == result and [*results(run).values()].count("right") == number - 1, run
    said, = re.findall("^# .*", run.out, re.M)  # one line, also if it is wrong at every block size
    assert re.match(rf"# {wrong}(, 32 threads a block)?: \S.*: element \d+ of \d+ is ", said), said


def changed(folder, source, *changes):
    """A copy of a source in which each (before, after) has been replaced."""
    text = (ROOT / source).read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    copy = folder / source.split("/")[-1]
    copy.write_text(text)
    return copy


# ---- the CPU's ----
def cpu(name, *options):
    return command([f"build/cpu_variants/{name}"], *options)


def changed_cpu(folder, name, *changes):
    """The program of a source of which changed() has made a copy."""
    source = changed(folder, f"dev/kernels/cpu/{name}.c", *changes)
    succeeds("gcc -std=c11 -O1 -march=native -ffp-contract=off -fopenmp -DPRECISION_FP32 -Idev/kernels/cpu", source, "-o",
             folder / name, "-ldnnl -lm")
    return [folder / name]


@pytest.mark.parametrize("options", [
    "", "--threads 1", "--rows 3 --cols 131 --depth 131", "--rows 101 --cols 321 --depth 131", "--rows 2 --cols 7"])
@pytest.mark.parametrize("name", CPU)
def test_every_variant_of_a_cpus_layer_is_right(name, options):
    if "matmul" not in name: options = options.replace("--depth 131", "")
    assert_all_right(cpu(name, "--check", options), variants(f"dev/kernels/cpu/{name}.c"))


@pytest.mark.parametrize("name, wrong, before, after", [
    ("attention", "3_online", "sum *= shrink;", ""), ("gelu", "2_sigmoid", "act[i] = x / (1", "act[i ? i : 1] = x / (1"),
    ("matmul_backward_weight", "1_naive", "dw[o * C + c] += sum", "dw[o * C + c] = sum"),
    ("matmul_backward_input", "4_blocks", "o < p->OC; o += TERMS", "o + TERMS <= p->OC; o += TERMS"),
    ("layernorm_backward", "4_copies", "add_up(p->db, db, threads, C)", "add_up(p->db, db, 1, C)"),
    ("gelu_backward", "4_quotient", "x == 0 ? 0.5f : quotient", "quotient")],
    ids=["sum_not_scaled_down", "element_not_written", "gradient_not_added", "terms_after_the_last_block", "one_threads_sums",
         "0_by_0"])
def test_a_variant_of_a_cpus_layer_that_is_wrong_is_reported(tmp_path, name, wrong, before, after):
    program = changed_cpu(tmp_path, name, (before, after))
    assert_wrong(command(program, "--check"), f"{name}_{wrong}", "WRONG", variants(f"dev/kernels/cpu/{name}.c"))


@pytest.mark.parametrize("name, peak, unit", [
    ("gelu", "(a copy|an update of an array in place)", "GB"), ("matmul", "a large product by oneDNN", "GFLOP")])
def test_times_are_shown_beside_a_copys_or_a_products(name, peak, unit):
    run = cpu(name, "--rows 16 --cols 64 --repetitions 1")
    assert_all_right(run, variants(f"dev/kernels/cpu/{name}.c"))
    assert_says(run.out, f"^the peak, in turns with each variant: {peak}$", rf" \| {unit}/s \| of the peak \| times llmc's \|$")
    ratios = r"\|" if "No ratios are shown" in run.out else r"\d+ % \| [\d.]+" # as the machine is busy or not
    assert len(re.findall(rf"\| right \| [\d.]+ \| [\d.]+ \| [\d.e-]+ \| {ratios} \|$", run.out, re.M)) == len(results(run)), run


def slow_gelu(folder, statement):
    """A program of GELU's variants, in which llmc's begins with a statement; its `calls` counts calls, and the first is not timed."""
    body = re.search(r"^VARIANT\(gelu_4_llmc, .*\{", (ROOT / "dev/kernels/cpu/gelu.c").read_text(), re.M)[0]
    program = changed_cpu(folder, "gelu", (body, f"{body}\n    static int calls;\n    calls++;\n    {statement};\n"))
    return [*program, "--rows", "16", "--cols", "64", "--repetitions", "3", "--variant"]


def test_ratios_that_contradict_each_other_are_not_shown(tmp_path):
    """Three calls beside each variant: those beside the second take twice as long."""
    assert_says(command(slow_gelu(tmp_path, "usleep(200000)"), "gelu_").out, r"\| \d+ % \| [\d.]+ \|$", no=["No ratios"])
    assert_says(command(slow_gelu(tmp_path, "usleep(calls > 3 && calls < 7 ? 400000 : 200000)"), "gelu_").out,
                r"^No ratios are shown, .*: llmc's variant took 2\d\d\.\d+ ms in turns with gelu_\w+, and 4\d\d\.\d+ ms with "
                r"gelu_2_sigmoid\.", r"^\| gelu_1_naive \| .* \| [\d.]+ \| [\d.e-]+ \| \| \|$", no=[r"\d+ % \| [\d.]+ \|$"])


def test_what_others_used_of_the_cores_is_said(tmp_path):
    """Of 20 seconds of all cores 10 were busy, of which this process had 4."""
    (tmp_path / "shares.c").write_text('''#include "others.h"
        int main(void) {
            CoreSeconds a = { 100, 300, 7 }, b = { 110, 320, 11 }, own = { 110, 320, 18 }, unknown = { 0, 0, 0 };
            printf("%.2f %.2f %.2f\\n", share_of_others(a, b), share_of_others(a, own), share_of_others(unknown, unknown));
            CoreSeconds now = core_seconds();
            printf("%d\\n", now.all > 0 && now.busy <= now.all);
            now.busy -= 1e6; now.all -= 2e6;
            say_if_others_ran(now);
        }''')
    succeeds("gcc -std=gnu11 -Wall -Werror -Idev/kernels", tmp_path / "shares.c", "-o", tmp_path / "shares")
    assert succeeds([tmp_path / "shares"]).out == "0.30 0.00 0.00\n1\n\nOther programs used 50 % of the cores meanwhile: do not trust these times.\n"


def test_times_are_not_to_be_trusted_where_llmcs_variant_takes_longer_than_itself(tmp_path):
    """Every second call of the variant sleeps, counted from the first call that is timed."""
    for sleeps, ratio in ("calls % 2", r"\d+\d\.\d\d"), ("calls % 2 == 0", r"0\.0\d"):
        run = command(slow_gelu(tmp_path, f"if (calls > 2 && {sleeps}) usleep(100000)"), "4_llmc")
        assert_says(run.out, rf"^Do not trust these times: llmc's variant took {ratio} times as long as itself\. ")
    for wanted in "4_llmc", "1_naive":  # without it: as the row says, if there is one
        out = cpu("gelu", "--repetitions 3 --rows 16 --cols 64 --variant", wanted).out
        ratio = float(re.search(r"\| ([\d.]+) \|$", out, re.M)[1]) if wanted == "4_llmc" else 1
        if abs(ratio - 0.9) > 0.006 and abs(ratio - 1.1) > 0.006: assert ("Do not trust" in out) == (not 0.9 < ratio < 1.1), out


def test_all_programs_run_and_the_wrong_variants_are_named_at_the_end(tmp_path):
    one, another = "gelu_5_mine: act: element 3 of 9 is 1, not 2", "adamw_9_mine, 64 threads a block: m: element 7 of 9 is nan, not 2"
    wrong = executable(tmp_path / "gelu", f"echo '# {one}'; echo '# gelu_5_mine: res: element 0 of 9 is 1, not 2'; exit 1")
    blocks = executable(tmp_path / "adamw", f"echo '# {another}'; exit 1")
    crash, right = executable(tmp_path / "crash", "kill -SEGV $$"), executable(tmp_path / "right", "echo all right")
    refuses = executable(tmp_path / "refuses", "echo error: no GPU is visible >&2; exit 1")
    run = command("sh dev/kernels/run_variants.sh", wrong, crash, blocks, refuses, right)
    assert run.status == 1 and run.out.endswith(f"all right\n\nwrong:\n  {one}\n  {crash} ended with status 139\n  {another}\n"
                                                f"  {refuses} ended with status 1\n"), run
    assert command("sh dev/kernels/run_variants.sh", right).status == 0


def test_the_bench_times_the_cpu_first_goes_on_after_what_is_wrong_and_lists_it_last(tmp_path):
    made = executable(tmp_path / "make",
                      """echo "made ${4:-$2}"; case "$*" in *run-cpu*|*bench-cpu) echo "  gelu_5_mine: wrong" >>"$WRONG"; exit 1; esac""")
    run = command("make -C dev bench DEVICE=emulated", f"MAKE={made}")
    assert run.status != 0 and re.search(r"First the CPU's layers, about \d+ minutes .*\nmade bench-cpu\nmade "
                                         r"bench-cuda\nwrong:\n  gelu_5_mine: wrong\n",
                                         run.out), run


def test_kernels_of_compressed_gradients_are_shown_beside_a_copy():
    """Every kernel has a row, whose rate is that of its bytes: 13 an element and 4 for each 256 of them in blocks of 8 bits with
    errors."""
    said = command("build/bench_compress --elements 5000 --repetitions 1").out
    assert_says(said, r"^\| quantise \| 8 bits \| 13.02 \| ")
    rows = re.findall(r"^\| [a-z_0-9]+ \| [^|]* \| [\d.]+ \| [\d.]+ \| [\d.]+ \| \d+ % \|$", said, re.M)
    assert len(rows) == len(re.findall(r"^    KERNEL\(", (ROOT / "dev/kernels/bench_compress.cu").read_text(), re.M))
    assert_refused(command("build/bench_compress --elements 4095"), "elements must be between 4096 and .*, not 4095")


OPTIONS = {"--variant nothing": "no variant has 'nothing' in its name", "--rows 0": "rows must be between 1 and .*, not 0",
           "--shape 3": "unknown option '--shape'", "--cols": "cols needs a value"}
OF_CPU = OPTIONS | {"--depth 3": "unknown option '--depth'", "--threads 99999": "threads must be between 1 and .*, not 99999"}


@pytest.mark.parametrize("program, check, one, refused", [
    (lambda: "build/cpu_variants/gelu", "--check", "gelu_2_sigmoid", OF_CPU),
    pytest.param(lambda: cuda("adamw"), "", "adamw_1_naive", OPTIONS, marks=ON_GPU)], ids=["cpu", "cuda"])
def test_options_choose_a_variant_and_those_that_mean_nothing_are_refused(program, check, one, refused):
    assert results(command([program()], check, "--variant", one.split("_", 1)[1])) == {one: "right"}
    assert_says(command([program()], "--help").out, "^ +--repetitions")
    for options, says in refused.items(): assert_refused(command([program()], check, options), says)


# ---- a GPU's, under the emulator ----
def cuda(name, precision=None, source=None):
    """The path of a program. Products and attention are for tensor cores; of others every second is in fp32."""
    precision = precision or ("fp32" if CUDA.index(name) % 2 and not re.match("matmul|attention", name) else "bf16")
    return of_libraries(source or f"dev/kernels/cuda/{name}.cu", "asan", f"-DPRECISION_{precision.upper()}",
                        [cpu_layers(precision)], "-ldnnl -fopenmp")


def of_libraries(source, build, *options):
    """Without optimisation, because compiling takes longer than running."""
    return compiled(source, build, "-DUSE_CUDNN=1 -Idev/kernels/cuda -O0", *options, libraries="cublaslt cudnn",
                    cpp=flags("cublasLt", "cudnn"))


def emulated(program, *options, **env):
    return command([program], *options, env={"OMP_NUM_THREADS": 1, "ASAN_OPTIONS": "exitcode=99"} | env, timeout=900)


@ON_GPU
@pytest.mark.sampled("variants of {name}")
@pytest.mark.parametrize("name", CUDA)
def test_every_variant_of_a_kernel_is_right(name):
    """Of attention few tokens, because pairs of them take long."""
    run = emulated(cuda(name), "--rows 35 --cols 128" if "attention" in name else "")
    assert_all_right(run, variants(f"dev/kernels/cuda/{name}.cu"))


# Where a row is not a whole number of 16-byte pieces, some variants are not offered. Of attention there are also more tiles than
# fit in shared memory at a time, and heads of a size other than 64.
@ON_GPU
@pytest.mark.sampled("variants of {name}")
@pytest.mark.parametrize("name, options, least", [
    *((name, "--rows 3 --cols 131", 1) for name in CUDA),
    ("attention_forward", "--rows 131 --cols 64 --variant prefetch", 1),
    ("attention_forward", "--rows 300 --cols 64 --variant hopper", 1),
    ("attention_backward", "--rows 67 --cols 64 --variant tensor", 1),
    ("attention_backward", "--rows 67 --cols 64 --variant atomics", 1),
    ("attention_forward", "--rows 21 --cols 40", 4), ("attention_backward", "--rows 21 --cols 40", 4)])
def test_variants_of_a_kernel_are_right_at_odd_shapes_where_they_are_offered(name, options, least):
    run = emulated(cuda(name), options)
    found = [*results(run).values()]
    assert run.status == 0 and {*found} <= {"right", "not offered"} and found.count("right") >= least, run


@ON_GPU
@pytest.mark.parametrize("variant", ["tensor_cores", "hopper"])
@pytest.mark.parametrize("name", ["matmul_forward", "matmul_backward"])
def test_pipelined_products_are_right_over_several_tiles_and_more_steps_than_are_in_flight_at_once(name, variant):
    run = emulated(cuda(name), "--variant", variant, "--rows 264 --cols 136 --depth 328")
    assert [(variant in x, result) for x, result in results(run).items()] == [(True, "right")], run


@ON_GPU
def test_products_in_fp32_are_right_in_all_variants_but_those_with_tensor_cores():
    found = results(emulated(cuda("matmul_forward", "fp32")))
    assert {x for x in found if found[x] == "not offered"} == {"matmul_forward_6_tensor_cores", "matmul_forward_7_hopper"}
    assert [*found.values()].count("right") == 6


@ON_GPU
def test_variants_that_a_gpu_of_capability_7_5_cannot_run_are_not_offered_there():
    for variant, result in ("register", "right"), ("tensor_cores", "not offered"), ("hopper", "not offered"):
        run = emulated(cuda("matmul_forward", "fp16"), "--variant", variant, CUDA_EMULATOR_CAPABILITY=75)
        assert run.status == 0 and [*results(run).values()] == [result], run


@ON_GPU
def test_broken_pipelines_are_reported(tmp_path):
    """A wait for one tile fewer, and a buffer that is refilled without waiting."""
    changed(tmp_path, "dev/kernels/cuda/matmul_tensor_cores.cuh",
            ("pipeline_wait_prior(MMA_STAGES - 2)", "pipeline_wait_prior(MMA_STAGES - 1)"))
    changed(tmp_path, "dev/kernels/cuda/matmul_hopper.cuh", ("mbarrier_wait(&empty[stage], round % 2 ^ 1)",
                                                             "(void)empty, (void)round"))
    program = cuda("matmul_forward", source=changed(tmp_path, "dev/kernels/cuda/matmul_forward.cu"))
    assert results(emulated(program, "--variant tensor_cores")) == {"matmul_forward_6_tensor_cores": "WRONG at 256"}
    run = emulated(program, "--variant hopper")
    assert run.status != 0 and re.search(r"matmul_hopper.cuh:\d+: one arrival more than the 1 that make a phase", run.err), run


@ON_GPU
def test_a_kernel_that_is_wrong_is_reported_with_its_block_sizes(tmp_path):
    """The lanes' sums, which the second kernel must add up, stay separate."""
    source = changed(tmp_path, "dev/kernels/cuda/layernorm_forward.cu",
                     ("launch_rows<WarpPerRow>(", "struct Lanes : WarpPerRow { static __device__ float sum(float x) "
                                                  "{ return x; } };\n    launch_rows<Lanes>("))
    run = emulated(cuda("layernorm_forward", "fp32", source))
    assert_wrong(run, "layernorm_forward_2_warp", "WRONG at 32 64 128 256 512 1024",
                 variants("dev/kernels/cuda/layernorm_forward.cu"))


# ---- the roofline ----
def roofline(*options, source="dev/kernels/cuda/bench_layers.cu", **env):
    return emulated(of_libraries(source, "plain", "-DPRECISION_BF16 -ljansson -lpcre2-8 -lpthread -lm"), *options, **env)


def rows(run):
    """Words of a table's rows, without its sum."""
    found = [[*map(str.strip, x.split("|"))] for x in re.findall(r"^\|(.*)\|$", run.out, re.M)]
    return [row for row in found if row[0] not in ("operation", "---", "sum")]


# B=2, T=512 of GPT-2: N=1024, C=768. qkv: 12 x 2 N C 3C = 43.5 GFLOP; of bytes 12 x 2 x (NC + 3CC + 3NC) = 0.118 GB: 369 FLOPs a
# byte, at 100 TFLOP/s and 1 TB/s bound by arithmetic, 0.435 ms; at 1000 TFLOP/s by memory, 0.118 ms. 25 layernorms of 4 N C bf16
# numbers and 2 N floats: 0.158 GB. AdamW: 28 bytes for each of 124475904 parameters. All products and attention are 6 N + 6 L C T
# FLOPs a token, where N counts only products' weights: 12 C C in each block and C Vp in the head: 6 (12 x 12 x 768 x 768 + 768 x
# 50304) + 6 x 12 x 768 x 512 = 769720320 a token. With recomputation most of a block's forward pass is counted twice.
@ON_GPU
@pytest.mark.parametrize("options, lines", [
    ("100 --gbs 1000", ["| qkv forward | 12 | 43.5 | 0.12 | 369 | compute | 0.435 |", "| sum | 227 | 788.2 | ",
                        "6 N + 6 L C T: 793.5 GFLOP a step",
                        "| residual + layernorm forward | 25 | 0.0 | 0.16 | - | memory | 0.157 |",
                        "| AdamW and parameter norm of all units | 1 | 0.0 | 3.49 | - | memory | 3.485 |"]),
    ("1000 --gbs 1000", ["| qkv dW + bias | 12 | 43.5 | 0.12 | 369 | memory | 0.118 |"]),
    ("100 --gbs 1000 --recompute", ["| qkv forward | 24 | 87.0 |", "| attention forward | 24 |",
                                    "| residual + layernorm forward | 49 |",
                                    "| fcproj forward | 12 |", "| fc dX | 12 |"]),
    ("989 --gbs 3350 --model gpt2-xl --batch-size 16 --seq-len 1024", ["gpt2-xl, bf16, B=16, T=1024\n",
                                          "| AdamW and parameter norm of all units | 1 | 0.0 | 43.62 |",
                                          "| qkv forward | 48 |"])])
def test_flops_and_bytes_are_counted_and_what_bounds_them_follows_from_the_rates(options, lines):
    run = roofline("--batch-size 2 --seq-len 512 --tflops", options)
    for line in lines: assert f"\n{line}" in f"\n{run.out}", run
    shares = [float(row[7].rstrip(" %")) for row in rows(run)]  # of the floors
    assert len(shares) == 25 and abs(sum(shares) - 100) < 0.5


@ON_GPU
def test_the_document_of_gpus_has_the_table_that_its_command_prints():
    table = re.sub("^6 N", "    6 N", roofline("--tflops 989 --gbs 3350 --batch-size 32").out.split("\n", 2)[2], flags=re.M)
    assert table.strip() and table in (ROOT / "doc/reference/roofline.md").read_text()


PEAKS = r"^peaks: copy \d+ GB/s, product [\d.]+ TFLOP/s, data sheet [\d.]+ TFLOP/s$"
SMALL = "--model d1 --vocab-size 100 --batch-size 1 --seq-len 8 --repetitions 1"


@ON_GPU
def test_every_operation_is_run_the_host_never_waits_and_a_cuda_graph_leaves_the_steps_bits():
    run = roofline(SMALL)
    assert_says(run.out, PEAKS, "^measured: ",
                r"^The step takes the GPU [\d.]+ ms, as a graph [\d.]+ ms: a CUDA graph [a-z]+ [\d.]+ %\.$",
                r"^The graph is the same step: .* the same bits\.$")
    assert len(rows(run)) == 25 and all(float(row[7]) > 0 for row in rows(run))
    assert len(re.findall("^- .*, and the host does not wait for the GPU meanwhile$", run.out, re.M)) == 3
    only_peaks, = roofline("--peaks").out.splitlines()
    assert_says(only_peaks, PEAKS)


SAYS = r"^Other programs used \d+ % of the cores meanwhile: do not trust these times\.$"
CONTRADICT = r"^Do not trust shares of the peak, which contradict each other: it was .* {unit}/s before and .* after"
BUSY = "CoreSeconds begin = core_seconds();", "CoreSeconds begin = core_seconds(); begin.busy -= 1e6; begin.all -= 2e6;"


@ON_GPU
def test_a_gpus_tables_say_that_others_used_the_cores_and_that_the_peak_is_another_one_at_the_end(tmp_path):
    """By sources that say so: of the roofline, and of variants that are timed under the emulator, beside a copy of less memory."""
    source = changed(tmp_path, "dev/kernels/cuda/bench_layers.cu", BUSY, ("1e-9 * copy_rate(", "2e-9 * copy_rate("),
                     ("1e-12 * product_rate(", "4e-12 * product_rate("))
    source.write_text(source.read_text().replace("byte_rate = copy_rate(", "byte_rate = 0.1 * copy_rate("))
    assert_says(roofline(SMALL, source=source).out, SAYS, CONTRADICT.format(unit="GB"))
    changed(tmp_path, "dev/kernels/cuda/variants.cuh", BUSY, ("variants_are_timed = false", "variants_are_timed = true"),
            ("(size_t)1 << 30", "(size_t)1 << 20"), ("peak = M::peak(t);", "peak = 10 * M::peak(t);"))
    run = emulated(cuda("adamw", "fp32", changed(tmp_path, "dev/kernels/cuda/adamw.cu")), "--variant naive --repetitions 1")
    assert_says(run.out, SAYS, CONTRADICT.format(unit="GB"), r"^\| adamw_1_naive \| .* \| right \| .* \| \d+ % \|")


@ON_GPU
def test_a_step_that_waits_is_reported_and_one_that_changes_each_time_is_an_error(tmp_path):
    """So is an argument that a graph would keep."""
    backward = "        gpt2_backward(&g, 1.0f / (float)n);\n"
    source = changed(tmp_path, "dev/kernels/cuda/bench_layers.cu", (backward, """
        static float weight = 1;
        if (getenv("WAITS")) device_synchronize(); else weight *= 0.5f;
        gpt2_backward(&g, weight);
"""), ("HELD_SECONDS 5.0", "HELD_SECONDS 0.5"))
    run = roofline(SMALL, source=source, WAITS=1)
    assert_says(run.out, "^- all of its kernels: the host WAITS for the GPU meanwhile$", "^- its batch: issued in .* does not wait",
                r"^It takes the GPU [\d.]+ ms; what waits cannot be a CUDA graph\.$")
    assert_refused(roofline(SMALL, source=source),
                   r"is not the step, .*loss ([\d.]+) and \1, .*gradients different, moments different")


@ON_GPU
@pytest.mark.parametrize("options, says", [
    ("--tflops 989 --gbs x", "--gbs wants a number, not 'x'"), ("--tflops 989", "two rates, --tflops and --gbs"),
    ("--what", "unknown option '--what'"), ("--model gpt5", "there is no model 'gpt5'"), ("4", "'4'"),
    ("--batch-size 0", "must be between 1 and .*, not 0"), ("--seq-len 1025", "must be between 1 and 1024, not 1025")])
def test_odd_options_of_the_roofline_are_refused(options, says):
    assert_refused(roofline(options), says)
