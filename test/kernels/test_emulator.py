"""The CUDA emulator finds what it claims to find: each deliberate bug in dev/emulator's self-tests is reported with kernel and
line, or leaves a wrong number, by the build meant for it; the correct twins are clean in all builds under several seeds."""
import re, shutil
import pytest
from gpus import WITHOUT_ASLR, compiled, flags, missing
from suite import ROOT, command

LONG = 1
pytestmark = [pytest.mark.rest, missing()]
BUILDS = ["plain", "asan", "tsan"]
SOURCES = {"selftest": "dev/emulator/selftest.cu", "hopper": "dev/emulator/hopper_selftest.cu",
           "runtime": "dev/emulator/runtime_selftest.cu"}


def selftest(source, build, name, **env):
    cublaslt = flags("cublasLt") if source == "runtime" else None
    path = compiled(SOURCES[source], build, "-DWITH_CUBLASLT" if cublaslt else "", libraries="cublaslt" if cublaslt else "",
                    cpp=cublaslt or "")
    settings = {f"CUDA_EMULATOR_{key.upper()}": value for key, value in env.items()}
    return command(WITHOUT_ASLR, [path, name], env={"ASAN_OPTIONS": "detect_leaks=0"} | settings) # the status is the emulator's own


def marked(source, bug):
    """The lines that are marked as this bug's."""
    lines = (ROOT / SOURCES[source]).read_text().splitlines()
    return [k for k, line in enumerate(lines, 1) if re.search(rf"// BUG.* {bug}( |$)", line)]


def assert_reported(run, source, bug, pattern, messages=1, who=".*"):
    """Status 1, and one message with the line that is marked as the bug, and the pattern. Of the two accesses of a race the one
    that comes second is reported first, and the marked line may be either."""
    said = [line for line in run.said.splitlines() if line.startswith("cuda emulator: ")]
    line = "|".join(map(str, marked(source, bug)))
    assert run.status == 1 and (messages is None or len(said) == messages), run
    patterns = f"^cuda emulator: {who}{SOURCES[source]}:[0-9]+: ", f"{SOURCES[source]}:({line})[: ]", pattern
    assert any(all(re.search(p, x) for p in patterns) for x in said), run


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("source", SOURCES)
def test_correct_twins_are_clean_under_several_seeds(source, build):
    for env in {"seed": 1}, {"seed": 2}, {"seed": 3}, {"workers": 1}:
        run = selftest(source, build, "good", **env)
        assert run.status == 0, run


IN_ALL = {"past_array": "out of bounds", "misaligned": "isaligned address", "misaligned_hint": "isaligned address",
          "null_pointer": "Segmentation fault", "overflow": "Signed integer overflow",
          "divergent_barrier": "waits at another barrier",
          "barrier_after_exit": "can never open", "wrong_mask": "can never go on: it waits for lane",
          "absent_lane": "reads lane 16, which takes no part", "endless": "endless loop"}
RACES = ["missing_barrier", "missing_syncwarp", "shuffle_for_barrier", "reused_early", "plain_add", "stride_forgotten",
         "missing_fence"]


@pytest.mark.parametrize("build, kernel, pattern", [(b, k, p) for b in BUILDS for k, p in IN_ALL.items()]
                         + [("tsan", k, "data race") for k in RACES] + [
    ("asan", "guard", "heap-buffer-overflow"), ("asan", "past_static_shared", "use-after-poison"),
    ("asan", "past_dynamic_shared", "use-after-poison"),
    ("plain", "static_beside_dynamic", "128 bytes of static and 49152 of dynamic shared memory; a block may have 49152"),
    ("plain", "static_beside_all", "128 bytes of static and 166912 of dynamic shared memory; a block may have 166912")], ids=str)
def test_a_kernels_bug_is_reported_with_its_line(build, kernel, pattern):
    name = "static_beside" if "beside" in kernel else kernel
    assert_reported(selftest("selftest", build, kernel, steps=3000000), "selftest", kernel, pattern,
                    who=rf"{name}<bug>, block \(.*\), thread \(.*\), ")


@pytest.mark.parametrize("bug, pattern", [("large_block", "at most 1024 threads"), ("empty_grid", r"grid \(0,1,1\)"),
                                          ("too_much_shared", "50000 bytes of dynamic shared memory"),
                                          ("more_than_set", "1004 bytes of dynamic shared memory; it may have 1000")])
def test_a_launch_is_refused_as_by_cuda(bug, pattern):
    assert_reported(selftest("selftest", "plain", bug), "selftest", bug, pattern, messages=None)


@pytest.mark.parametrize("flaw, pattern, mark, build", [(*row, "", "plain")[:4] if len(row) < 4 else row for row in [
    ("unmade_barrier", "there is no mbarrier here"), ("unfenced_barrier", "the copy engine does not know this mbarrier"),
    ("early_arrival", "one arrival more than the 1"), ("little_expected",
                                                       r"before this tile arrived|-[0-9]+ bytes|memory .* has changed"),
    ("much_expected", "can never go on: it still expects 0 of 1 arrivals and 8192 bytes"),
    ("wrong_parity", "one arrival more than the 1"),
    ("unwaited_tile", "one arrival more than the 1"), ("tile_for_nobody", "the block has ended before this tile arrived"),
    ("misplaced_tile", "begins within the pattern of 8 rows", "wgmma", "plain"),
    ("unfenced_sums", "without a wgmma_fence", "wgmma", "plain"),
    ("unwaited_sums", "ended without waiting for this wgmma", "wgmma", "plain"),
    ("touched_sums", "sums of a wgmma that was not waited for have been written"),
    ("refilled_early", "memory .* has changed", "wgmma", "plain"),
    ("part_of_warpgroup", "needs the whole warpgroup; thread 127 .* has exited", "wgmma", "plain"),
    ("other_operands", "other operands than thread .0,0,0. of the same", "wgmma", "plain"),
    ("beyond_shared", "reaches out of the block's shared memory", "wgmma", "plain"),
    ("bad_descriptor", "has bits set that must be 0", "wgmma", "plain"), ("unasked_refill", "data race", "", "tsan"),
    ("unwaited_read", "data race", "", "tsan"), ("unsettled_fragment", "a fragment without wgmma_settle"),
    ("unfenced_fragment", "without a wgmma_fence since wgmma_settle"), ("late_fragment", "has been written since wgmma_settle"),
    ("touched_fragment", "has been written before it was waited for"),
    ("other_rank", "a copy of rank 2 by a tensor map of rank 3")]],
    ids=lambda x: str(x) if "_" in str(x) and " " not in str(x) else "")
def test_a_flaw_in_a_kernel_of_capability_9_is_reported_with_its_line(flaw, pattern, mark, build):
    assert_reported(selftest("hopper", build, flaw), "hopper", mark or flaw, pattern, messages=None,
                    who=r"[a-z]+<flaw(, T, tb)?>, block \(0,0,0\), thread .*, ")


@pytest.mark.parametrize("source, bug", [("selftest", "unwaited_copy")] + [("hopper", x) for x in (
    "early_sums", "read_fragment", "swapped_fragment", "other_plane", "wrong_swizzle", "wrong_stride")] + [("runtime", x) for x in (
        "missing_wait", "event_too_early", "legacy_stream", "reused_early", "read_early", "not_written", "not_launched",
        "old_argument",
        "graph_not_waited_for")])
def test_what_cannot_be_reported_is_a_wrong_number(source, bug):
    for seed in (1, 2, 3) if source == "runtime" else (1,):
        run = selftest(source, "plain", bug, seed=seed)
        assert run.status != 0 and re.search("selftest: .* was expected", run.said), run


def test_the_order_of_streams_depends_on_the_seed():
    """A copy that overwrites is a wrong number under some seeds."""
    wrong = sum(selftest("runtime", "plain", "overwritten", seed=seed).status != 0 for seed in range(1, 41))
    assert 0 < wrong < 40


DEVICE_MEMORY = "host code touched device memory"


@pytest.mark.parametrize("build, bug, pattern", [(build, bug, pattern) for build in BUILDS for bug, pattern in {
    "host_reads": f"{DEVICE_MEMORY} at .*byte 12 of an allocation of 4000 bytes", "host_copies": DEVICE_MEMORY,
    "host_pointer": "argument 2, .*, is ordinary host memory",
    "freed": "byte 0 of an allocation of 4000 bytes of device memory that was freed"}.items()] + [
        ("plain", "freed_in_structure", "fill_hidden, block .*Segmentation fault at .* that was freed"),
        ("asan", "freed_in_structure", "fill_hidden, block .*use-after-poison")], ids=str)
def test_a_bug_of_the_host_is_reported_with_its_line(build, bug, pattern):
    assert_reported(selftest("runtime", build, bug), "runtime", bug, pattern)


def test_a_call_of_cudas_from_a_host_function_is_refused():
    run = selftest("runtime", "plain", "call_from_callback")
    assert run.status != 0 and "cudaDeviceSynchronize is called by a host function" in run.err, run


def test_a_setting_that_is_no_number_is_refused():
    run = selftest("selftest", "plain", "good", seed="x")
    assert run.status != 0 and "CUDA_EMULATOR_SEED must be a number, not 'x'" in run.err, run


# ---- programs of others ----
def from_source(folder, source):
    """Compiles and runs a program."""
    (folder / "others.cu").write_text(source)
    done = command("sh dev/emulator/compile.sh", [folder / "others.cu", folder / "others"], "plain -w")
    return command([folder / "others"]) if done.status == 0 else done


MAIN = "int main() { k<<<1, 32>>>(); return cudaDeviceSynchronize(); }"


@pytest.mark.parametrize("pattern, source", [
    ("__shared__ variables must be declared inside", f"extern __shared__ float s[]; __global__ void k() {{ s[0] = 1; }} {MAIN}"),
    ("a launch of inner from device code", f"__global__ void inner() {{}} __global__ void k() {{ inner<<<1, 1>>>(); }} {MAIN}"),
    ("nvcuda::wmma has no stand-in", "#include <mma.h>\nint main() {}")], ids=["shared", "launch", "mma"])
def test_what_the_emulator_lacks_is_refused_by_name(pattern, source, tmp_path):
    run = from_source(tmp_path, source)
    assert run.status != 0 and re.search(f"others.cu:1: {pattern}|error: .*{pattern}", run.said), run


def test_the_compilers_messages_name_the_kernels_own_line(tmp_path):
    run = from_source(tmp_path, "__global__ void k() {\n    __shared__ int a[2];\n    a[0] = wrong;\n}\n")
    assert run.status != 0 and re.search("others.cu:3:.*wrong", run.err), run


@missing("cublasLt", "cudnn", "nccl")
def test_a_copy_of_the_folder_works_alone_and_finds_the_race_of_its_readmes_example(tmp_path):
    shutil.copytree(ROOT / "dev/emulator", tmp_path / "alone")
    example = re.search(r"^    #include <cstdio>.*?(?=^Threads run)", (ROOT / "dev/emulator/README.md").read_text(), re.M | re.S)[0]
    (tmp_path / "sums.cu").write_text("".join(x[4:] if x.startswith("    ") else x
                                              for x in example.splitlines(True) if x.startswith("    ") or x == "\n"))
    for out, build, libraries in ("sums", "tsan", ""), ("all", "plain", "cublaslt cudnn nccl"):
        done = command("sh alone/compile.sh sums.cu", out, build, "-w", cwd=tmp_path,
                       env={"EMULATOR_LIBRARIES": libraries, "CPPFLAGS": flags("cublasLt", "cudnn", "nccl") if libraries else ""})
        assert done.status == 0, done
    run = command(WITHOUT_ASLR, "./sums", cwd=tmp_path)
    assert run.status != 0 and re.search(r"^cuda emulator: block_sum, block \(.*\), thread \(.*\), sums.cu:13: data race", run.said,
                                         re.M), run
