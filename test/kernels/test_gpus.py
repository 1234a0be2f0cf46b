"""Training on several GPUs, over MPI between ranks that share one and over NCCL where each has its own: every program has the CPU's
losses, norms and weights and the bytes that were predicted, on emulated GPUs in whatever order the emulator's seed runs streams,
blocks and threads."""
import functools, json, re, shutil
from pathlib import Path
import pytest
from gpus import (IS_REAL, RTOL, SMALL, assert_has_numbers, assert_metrics, assert_predicted, gpus_of, missing, needs_emulator,
                  needs_gpus, on_gpus, program)
from runs.shards import PLAIN, resumed
from suite import (REFERENCE, ROOT, TOKENS, assert_different, assert_refused, assert_same, command, executable, half, make, session,
                   trained)

LONG = 5
pytestmark = [pytest.mark.rest, pytest.mark.gpu, missing("cublasLt", "cudnn", "nccl")]
# The model and batch of each program. In ZeRO and FSDP the third block reuses the bucket of the first block, and its gather buffer
# if there are only two.
OF_PROGRAM = {
    "ddp": "--model d2 --seq-len 16 --batch-size 2 --total-batch-size 128 --steps 2 --bucket-mb 0.01",
    "zero": "--model d3 --seq-len 16 --batch-size 2 --total-batch-size 64 --steps 3",
    "muon": "--model d3 --seq-len 16 --batch-size 2 --total-batch-size 64 --steps 3",
    "fsdp": "--model d3 --seq-len 8 --batch-size 1 --steps 2",
    "zeropp": "--model d3 --seq-len 8 --batch-size 1 --total-batch-size 64 --steps 2",
    "tp": "--model d2 --seq-len 16 --batch-size 2 --total-batch-size 64 --steps 2",
    "pp": "--model d2 --layers 4 --seq-len 16 --batch-size 2 --total-batch-size 128 --steps 2",
    "3d": "--model d2 --layers 4 --seq-len 16 --batch-size 2 --total-batch-size 128 --steps 2",
    "cp": "--model d2 --seq-len 16 --batch-size 2 --total-batch-size 64 --steps 2",
    "compress": "--model d2 --seq-len 16 --batch-size 2 --total-batch-size 64 --steps 3"}
ORDERED, SEQUENCE, AGAIN = "--deterministic", "--sequence-parallel", "--recompute block"
NAIVE, DELAYED, CHUNKS, GPIPE = "--ddp naive", "--schedule zb-h1", "--schedule interleaved", "--schedule gpipe"
FOUR, COPIES, STAGES = "--total-batch-size 128", "--total-batch-size 128 --tensor-parallel 2", "--pipeline-parallel 2"
GATHER, RING, BALANCED, GROUPS = "--cp allgather", "--cp ring", "--cp-balance zigzag", "--context-parallel 2"
# rows that are no whole pieces of 16 bytes: heads of 3 channels, one on each of 4 ranks
ODD = "--heads 4 --channels 12 --vocab-size 300"
NODES = "--node-ranks 2"
ALONE = "--comm nccl"
OF_3 = "--seq-len 12 --total-batch-size 48"
EVALUATES = f"--val-data {TOKENS} --eval-every 2 --eval-steps 2 --sample-every 2 --sample-tokens 5"


def gpu(name, *arguments, **settings):
    return on_gpus(name, *arguments[:2], OF_PROGRAM[name], *arguments[2:], **settings)


def cpu(name, ranks, *options, **settings):
    return trained(name, SMALL, OF_PROGRAM[name], *options, ranks=ranks, **settings)


def mesh(dp, tp, pp):
    return f"--mesh dp={dp},tp={tp},pp={pp}"


# Program, comm, ranks, options of both runs, options of only the GPUs' run. S: strict mode, in which data is NaN until the wait. U:
# memory is not registered, because the emulated GPUs cannot reach the memory of other GPUs.
NUMBERS = [
    ("ddp", "mpi", 2, "", ""), ("ddp", "nccl", 2, "", ""), ("ddp", "nccl", 2, "", f"{NAIVE} U"), ("ddp", "mpi", 2, "", "S"),
    ("ddp", "nccl", 2, "", "S"),
    ("ddp", "mpi", 4, "", ORDERED), ("ddp", "nccl", 4, "", ORDERED),
    ("zero", "mpi", 2, "", "--zero-stage 3"), ("zero", "nccl", 2, "", "--zero-stage 2"),
    ("zero", "mpi", 2, FOUR, "--zero-stage 3 S"), ("zero", "nccl", 2, FOUR, "--zero-stage 2 S"),
    ("muon", "nccl", 2, "", ""), ("muon", "mpi", 2, "", "--zero-stage 2 S"), ("muon", "mpi", 3, "--total-batch-size 96", ""),
    ("muon", "nccl", 3, "--total-batch-size 192", "--zero-stage 3 S"),
    ("muon", "nccl", 3, "--total-batch-size 96 --owners all", "U"),
    ("fsdp", "nccl", 2, "--total-batch-size 32", "--wrap-halves"),
    ("fsdp", "mpi", 2, "--total-batch-size 32", "--wrap-blocks 2 --cpu-offload all --no-forward-prefetch"),
    ("fsdp", "nccl", 4, "--sharding hybrid --shard-group 2", "--prefetch backward-pre U"),
    ("fsdp", "mpi", 4, "--sharding hybrid --shard-group 2", "--prefetch backward-post --wrap-blocks 2 --no-forward-prefetch"),
    ("fsdp", "nccl", 4, "--sharding hybrid --shard-group 2", f"--prefetch none --wrap-blocks 0 {AGAIN}"),
    ("zeropp", "nccl", 4, f"{NODES} {PLAIN}", ""), ("zeropp", "mpi", 4, f"{NODES} {PLAIN}", f"--wrap-blocks 2 {AGAIN} S"),
    ("tp", "mpi", 2, "", ""), ("tp", "mpi", 2, "", f"{AGAIN} {SEQUENCE}"), ("tp", "nccl", 2, "", "--no-overlap"),
    ("tp", "nccl", 2, "", f"{SEQUENCE} --no-overlap"), ("tp", "nccl", 2, "", f"{SEQUENCE} S"),
    ("tp", "mpi", 2, "", f"{SEQUENCE} S"),
    ("tp", "mpi", 4, COPIES, ""), ("tp", "nccl", 4, COPIES, SEQUENCE), ("tp", "nccl", 4, COPIES, "U"),
    ("tp", "nccl", 2, "--tensor-parallel 1", ""), ("tp", "nccl", 4, ODD, SEQUENCE),
    ("pp", "mpi", 2, "", ""), ("pp", "mpi", 2, "", f"{CHUNKS} --split 1,1,2,0 {AGAIN}"),
    ("pp", "nccl", 2, "", f"--schedule gpipe {AGAIN}"),
    ("pp", "nccl", 2, "", f"{DELAYED} S"), ("pp", "nccl", 2, "", CHUNKS), ("pp", "mpi", 4, STAGES, ""),
    ("pp", "nccl", 4, STAGES, DELAYED), ("pp", "nccl", 4, "", "--split 1,2,1,0"), # the last stage is only the head
    ("pp", "nccl", 2, EVALUATES, ""), ("pp", "nccl", 2, EVALUATES, CHUNKS),
    ("cp", "nccl", 2, "", ""), ("cp", "mpi", 2, "", f"{AGAIN} S"), ("cp", "nccl", 4, GROUPS, f"{NAIVE} U"),
    ("cp", "nccl", 4, ODD, ""), ("cp", "nccl", 2, GATHER, ""), ("cp", "mpi", 4, f"{GATHER} {GROUPS} {BALANCED}", ""),
    ("cp", "nccl", 3, f"{GATHER} {ODD} {OF_3}", "S"), ("cp", "mpi", 3, f"{RING} {OF_3}", ""), ("cp", "nccl", 4, RING, "S"),
    ("cp", "nccl", 4, f"{RING} {BALANCED}", AGAIN), ("cp", "mpi", 4, f"{RING} {BALANCED} {GROUPS}", "S"),
    ("cp", "nccl", 3, f"{RING} {BALANCED} {OF_3} {EVALUATES}", ""),
    ("3d", "nccl", 4, mesh(2, 2, 1), f"--zero-stage 1 {SEQUENCE} {AGAIN}"),
    ("3d", "nccl", 4, mesh(2, 1, 2), f"--zero-stage 1 {DELAYED}"),
    ("3d", "mpi", 4, mesh(1, 2, 2), f"{DELAYED} {SEQUENCE} S"), ("3d", "mpi", 4, mesh(2, 2, 1), "--zero-stage 1 S"),
    ("3d", "nccl", 8, mesh(2, 2, 2), f"--zero-stage 1 {SEQUENCE}"), ("3d", "nccl", 4, f"{mesh(1, 2, 2)} {EVALUATES}", SEQUENCE),
    # one rank, with which NCCL can be tried on one GPU
    *((name, "nccl", 1, one, f"{ALONE} {only}") for name, one, only in [
        ("ddp", "", ""), ("fsdp", "", ""), ("zero", "", "--zero-stage 3"), ("muon", "", ""),
        ("tp", "--tensor-parallel 1", SEQUENCE),
        ("pp", "--pipeline-parallel 1", GPIPE),
        ("cp", "--context-parallel 1", RING), ("3d", mesh(1, 1, 1), "--zero-stage 1")])]


FIRST = [next(i for i, row in enumerate(NUMBERS) if row[:2] == (name, "nccl")) for name in OF_PROGRAM if name != "compress"]
SMOKE = [NUMBERS.index(row) for row in NUMBERS if row == ("ddp", "mpi", 2, "", "") or ALONE in row[4] and row[0] in ("ddp", "fsdp")]


@pytest.mark.parametrize("seed, row", [pytest.param(i, row, marks=[pytest.mark.sampled] * (i not in FIRST)
                                                    + [pytest.mark.smoke] * (i in SMOKE))
                                       for i, row in enumerate(NUMBERS)],
                         ids=["+".join(f"{x}" for x in row if x).replace("--", "").replace(" ", "_")
                              .replace(",", ".").replace("=", "")[:90] for row in NUMBERS])
def test_a_run_on_gpus_has_the_cpus_numbers_and_the_predicted_bytes(seed, row):
    name, comm, ranks, both, only = row
    unregistered = {"nccl": "no-windows"} if "U" in only else {}
    run = gpu(name, comm, ranks, both, re.sub("[SU]", "", only), strict="S" in only, seed=seed, stricter=unregistered)
    assert_has_numbers(cpu(name, ranks, both), run)
    assert ("val_loss" in json.dumps(run.metrics)) == (EVALUATES in both)


# ---- connections: hosts meet at the first messages, so a host that waits for its GPU before then may wait forever ----
ONE_MICRO, TWO_MICRO, SLOW = "--total-batch-size 32", "--total-batch-size 64", "--emulate-ms 1,1,1"


@pytest.mark.parametrize("name, ranks, both, only, debug", [
    ("pp", 2, ONE_MICRO, "", False), ("pp", 3, ONE_MICRO, DELAYED, False), ("pp", 2, "", f"{GPIPE} {SLOW}", False),
    ("pp", 2, "", GPIPE, True),
    ("pp", 4, f"{STAGES} {TWO_MICRO}", "", False), ("pp", 4, "--layers 8", CHUNKS, False),
    ("3d", 4, f"{mesh(1, 2, 2)} {ONE_MICRO}", SEQUENCE, False),
    ("3d", 4, f"{mesh(2, 1, 2)} {TWO_MICRO}", "--zero-stage 1", False), ("cp", 4, f"{RING} {GROUPS}", "", False),
    ("cp", 3, f"{RING} {BALANCED} {OF_3}", "", False)])
def test_ranks_are_connected_before_the_first_step(name, ranks, both, only, debug):
    """No evaluation comes first, and connecting while an operation is under way ends the run. With --emulate-ms and in a debug
    build the host waits for its GPU within a step. NCCL may hold 4 multiprocessors for each message, and 16 for each other
    operation. In pp a receive and two sends overlap with one sum, or two sums run (the tied matrix, and dp's of blocks); in 3d they
    overlap with two sums (tp and dp); in cp rings send and receive keys, values and gradients during one sum."""
    ctas = {"pp": max(3 * 4 + 16, 2 * 16), "3d": 3 * 4 + 2 * 16, "cp": 4 * 4 + 16}[name]
    assert_has_numbers(cpu(name, ranks, both), gpu(name, "nccl", ranks, both, only, debug=debug,
                                                   stricter={"nccl": "quiet", "nccl_ctas": ctas}))


def test_a_resumed_pipeline_is_connected_before_its_first_step(tmp_path):
    # it resumes with no evaluation
    options = f"--val-data {TOKENS} --eval-every 2 --eval-steps 1 {ONE_MICRO} {ORDERED} --steps 3 --save-every 1 --keep 0"
    whole = gpu("pp", "nccl", 2, options)
    assert_same(whole, resumed(half(whole, tmp_path / "run", step=1), "pp", SMALL, OF_PROGRAM["pp"], options, ranks=2,
                               binary=program("pp"),
                               env=gpus_of("nccl", 2, nccl="quiet")))


def test_a_kernel_that_is_loaded_while_a_receive_waits_is_named_by_the_deadline():
    """Programs ask for modules to be loaded at the start, unless the environment says something else."""
    needs_emulator("always wait then")
    run = command([program("pp")], SMALL, OF_PROGRAM["pp"], ONE_MICRO, "--comm-timeout 15", ranks=2,
                  env=gpus_of("nccl", 2) | {"CUDA_MODULE_LOADING": "LAZY"})
    assert_refused(run, "rank [01] has not reached its side of receive #0 from rank [01] of world .*, step 1, [BF]0 on stage [01]")


@pytest.mark.parametrize("name, comm, ranks, loaded", [
    ("single", "mpi", None, "when first launched"), ("ddp", "mpi", None, "when first launched"),
    ("ddp", "nccl", None, "when first launched"),
    ("ddp", "mpi", 2, "when first launched"), ("ddp", "nccl", 2, "at once")])
def test_only_several_ranks_that_may_use_nccl_load_all_kernels_at_once(name, comm, ranks, loaded, tmp_path):
    """Loading takes each process seconds: cuBLASLt 13 alone has 140 MB of kernels."""
    options = "--model d1 --seq-len 8 --batch-size 1 --steps 1" + (f" --comm {comm}" if name != "single" else "")
    on_gpus(name, comm, ranks, options, waits=tmp_path / "said")
    assert re.findall("; kernels were loaded (.*)", (tmp_path / "said").read_text()) == [loaded] * (ranks or 1)


# ---- bits ----
FSDP_BITS = ["--sharding full --prefetch backward-pre",
             "--sharding full --prefetch backward-pre --wrap-blocks 2 --limit-all-gathers 3 --no-forward-prefetch",
             "--sharding full --prefetch backward-post --wrap-blocks 2 --cpu-offload all",
             f"--sharding full --prefetch none --no-forward-prefetch --limit-all-gathers 1 {AGAIN}",
             f"--sharding grad-op --prefetch backward-pre --cpu-offload optimizer {AGAIN}",
             "--sharding grad-op --prefetch backward-post --wrap-blocks 2",
             "--sharding full --prefetch backward-pre --wrap-blocks 2 --cpu-offload optimizer",
             "--sharding grad-op --prefetch backward-post --wrap-blocks 0"]


@pytest.mark.sampled
@pytest.mark.parametrize("comm, setting, strict", [("nccl", k, False) for k in (0, 1, 2, 3, 5, 6)]
                         + [("mpi", k, False) for k in (0, 2, 4, 7)]
                         + [("nccl", 0, True), ("mpi", 0, True)])
def test_fsdp_has_the_bits_of_ddp(comm, setting, strict):
    """With offload AdamW runs on the host, where it rounds differently: such runs agree with one another to the bit."""
    options = FSDP_BITS[setting]
    offload = "--cpu-offload" in options
    reference = gpu("fsdp", comm, 2, ORDERED, "--cpu-offload all") if offload else on_gpus("ddp", comm, 2, OF_PROGRAM["fsdp"],
                                                                                           ORDERED)
    run = gpu("fsdp", comm, 2, ORDERED, options, strict=strict, seed=100 + setting)
    assert_predicted(run)
    assert_same(reference, run)


@pytest.mark.parametrize("comm, ranks, options", [("nccl", 2, "--zero-stage 1"), ("nccl", 2, "--zero-stage 2"),
                                                  ("mpi", 2, "--zero-stage 3"),
                                                  ("nccl", 3, "--zero-stage 3 --total-batch-size 96")])  # 3: shards have padding
def test_zero_has_the_bits_of_ddp(comm, ranks, options):
    batch = "--total-batch-size 96" if ranks == 3 else ""
    assert_same(on_gpus("ddp", comm, ranks, OF_PROGRAM["zero"], ORDERED, batch), gpu("zero", comm, ranks, ORDERED, options, seed=5))


@pytest.mark.sampled
@pytest.mark.parametrize("name, ranks, options, other", [
    ("ddp", 2, "", ""), ("ddp", 2, "", NAIVE), ("ddp", 4, "", ""), ("fsdp", 2, "", ""), ("zeropp", 4, NODES, ""), ("tp", 2, "", ""),
    ("muon", 3, "--total-batch-size 96", ""),
    ("pp", 2, "", CHUNKS),
    ("cp", 4, f"{RING} {BALANCED}", ""), ("cp", 4, f"{GATHER} {GROUPS}", ""), ("cp", 2, "", NAIVE),
    ("3d", 4, mesh(2, 2, 1), "--zero-stage 1"), ("compress", 3, "--compress int4 --compress-from 1 --total-batch-size 96", "")])
def test_in_rank_order_nccl_has_the_bits_of_mpi(name, ranks, options, other):
    needs_gpus(ranks)
    mpi, nccl = (gpu(name, comm, ranks, options, ORDERED, more) for comm, more in (("mpi", ""), ("nccl", other)))
    assert_predicted(nccl)
    assert_same(mpi, nccl)


BY_DDP = "ddp" # DDP's run with the same model and batch
SAME = [ # program, ranks, options of all runs, options of each, precision
    ("ddp", 4, "", ["", NAIVE, "--bucket-mb 0.02"], "fp32"), ("tp", 2, "", [BY_DDP, "--tensor-parallel 1"], "fp32"),
    ("tp", 4, f"{SEQUENCE} --heads 4", ["", "--no-overlap"], "bf16"), ("cp", 2, "", [BY_DDP, "--context-parallel 1"], "fp32"),
    ("cp", 4, f"{RING} {BALANCED}", ["", AGAIN], "bf16"), ("pp", 2, "", [BY_DDP, "--pipeline-parallel 1"], "fp32"),
    ("pp", 2, "", ["", GPIPE, DELAYED, CHUNKS, AGAIN], "bf16"),
    ("3d", 2, "", [BY_DDP, mesh(2, 1, 1), f"{mesh(2, 1, 1)} --zero-stage 1"], "fp32"),
    ("3d", 4, mesh(2, 1, 2), ["", "--zero-stage 1", f"{DELAYED} --zero-stage 1", f"{GPIPE} {AGAIN} --no-overlap", CHUNKS], "bf16"),
    ("zero", 2, "", [BY_DDP, "--zero-stage 1", "--zero-stage 2", "--zero-stage 3"], "bf16"),
    ("muon", 3, "--total-batch-size 96", ["", "--owners all", "--zero-stage 3"], "bf16"),
    ("compress", 2, "", [BY_DDP, "--compress none"], "bf16"),
    ("compress", 3, "--total-batch-size 96 --compress powersgd --compress-from 1", ["", ""], "fp16")] # again, with another seed


@pytest.mark.sampled
@pytest.mark.parametrize("comm", ["mpi", "nccl"])
@pytest.mark.parametrize("name, ranks, common, runs, precision", SAME)
def test_these_runs_have_the_same_bits(comm, name, ranks, common, runs, precision):
    """A replica of the model on each rank has DDP's; schedules, what travels beside what, and who keeps which shard change
    nothing."""
    if comm == "nccl": needs_gpus(ranks)
    first, *others = (on_gpus("ddp" if own == BY_DDP else name, comm, ranks, OF_PROGRAM[name], ORDERED, common,
                              own * (own != BY_DDP), precision=precision,
                              seed=seed, again=str(seed)) for seed, own in enumerate(runs))
    for run in others: assert_same(first, run)


# ---- masks and memory ----
@pytest.mark.parametrize("comm", ["mpi", "nccl"])
def test_masked_tokens_do_not_count(comm, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "masked"
    folder.mkdir(exist_ok=True)
    for file in "tokens.bin", "masked/tokens.mask": shutil.copy(f"{REFERENCE}/{file}", folder)
    data = f"--data {folder}/tokens.bin" # another number of tokens counts on each rank
    run = gpu("ddp", comm, 2, data)
    assert_has_numbers(cpu("ddp", 2, data), run)
    assert_different(cpu("ddp", 2), run)


@pytest.mark.parametrize("comm, recompute", [("nccl", "none"), ("mpi", "block")])
def test_recompute_auto_counts_the_ranks_that_share_a_gpu(comm, recompute):
    """Each of two ranks needs 34 MB: both have room on GPUs of 60 MB only if each has its own."""
    assert gpu("ddp", comm, 2, "--total-batch-size 64", memory=60).about["options"]["recompute"] == recompute


# ---- compressed gradients ----
def assert_has_nearly_the_numbers(cpu, gpu, step=None):
    """GPU and CPU differ by roundings. Where a number lies between two that can be sent, they may send different ones, so one
    weight of a thousand may be anywhere."""
    assert_metrics(cpu, gpu, 10 * RTOL)
    assert_predicted(gpu)
    ours, theirs = cpu.weights(step), gpu.weights(step)
    outside = sum((abs(ours[k] - theirs[k]) > 1e-6 + 1e-4 * abs(ours[k])).sum() for k in ours)
    assert outside * 1000 <= sum(x.size for x in ours.values())


@pytest.mark.sampled
@pytest.mark.parametrize("comm, method", [
    ("nccl", "bf16 --error-feedback --bucket-mb 0.01"), ("mpi", "int8 --error-feedback"), ("nccl", "int4 --bucket-mb 0.01"),
    ("mpi", "top-k --top-k-fraction 0.05"), ("nccl", "sign --error-feedback"),
    ("mpi", "powersgd --compress-from 0 --rank 2"), ("nccl", "powersgd --compress-from 0 --rank 2")])
def test_compressed_gradients_have_the_cpus_numbers(comm, method):
    options = f"--compress {method}"
    assert_has_nearly_the_numbers(cpu("compress", 2, options), gpu("compress", comm, 2, options, strict=comm == "nccl", seed=3))


@pytest.mark.sampled
@pytest.mark.parametrize("comm, ranks, options", [
    ("nccl", 4, NODES), ("mpi", 4, f"{NODES} --quantise-gradients int8 --wrap-halves"), ("nccl", 2, ""),
    ("nccl", 2, "--node-ranks 1")])
def test_what_crosses_between_nodes_in_few_bits_has_the_cpus_numbers(comm, ranks, options):
    """Weights are compared after one step: in the second a weight that rounds to another int8 changes every gradient a little, and
    so what many of them round to."""
    options += " --save-every 1 --keep 0"
    run = gpu("zeropp", comm, ranks, options, strict=comm == "mpi", seed=3)
    assert_has_nearly_the_numbers(cpu("zeropp", ranks, options), run, step=1)


@pytest.mark.parametrize("method", ["int8", "powersgd"])
def test_the_compression_error_is_the_cpus(method):
    options = f"--compress {method} --compress-from 0 --total-batch-size 128 --measure-error 1"
    run = gpu("compress", "nccl", 4, options, seed=4)
    assert len(run.series("compression_error")) == 3
    assert_has_nearly_the_numbers(cpu("compress", 4, options), run)


@pytest.mark.parametrize("method", ["int4", "powersgd --rank 2"])
def test_a_run_continues_with_the_errors_and_q_it_had(method, tmp_path):
    options = f"{ORDERED} --compress {method} --compress-from 1 --total-batch-size 96 --save-every 2 --keep 0"
    whole = gpu("compress", "nccl", 3, options)
    assert_same(whole, resumed(half(whole, tmp_path / "run", step=2), "compress", SMALL, OF_PROGRAM["compress"], options, ranks=3,
                               binary=program("compress"), env=gpus_of("nccl", 3)))


# ---- 16 bits: CPU and GPU round in different places ----
@pytest.mark.sampled
@pytest.mark.parametrize("name, comm, ranks, both, only", [
    ("3d", "nccl", 4, mesh(2, 2, 1), "--attention own --zero-stage 1"), ("3d", "nccl", 4, mesh(2, 2, 1), "--attention cudnn"),
    ("3d", "mpi", 4, mesh(2, 2, 1), "--attention cudnn --zero-stage 1 " + SEQUENCE),
    ("3d", "nccl", 4, mesh(1, 2, 2), f"{SEQUENCE} {DELAYED} S"),
    ("3d", "nccl", 4, mesh(1, 2, 2), CHUNKS), ("3d", "mpi", 4, mesh(2, 2, 1), f"{SEQUENCE} S"),
    ("cp", "nccl", 4, f"{RING} {BALANCED}", ""), ("cp", "mpi", 2, GATHER, "S"), ("cp", "nccl", 2, "", "--attention own"),
    ("3d", "nccl", 4, f"{mesh(1, 4, 1)} {ODD}", ""), ("zeropp", "nccl", 4, NODES, ""),
    ("muon", "nccl", 3, "--total-batch-size 96", ""),
    ("compress", "nccl", 2, "--compress int8 --error-feedback", ""),
    ("compress", "nccl", 2, "--compress powersgd --compress-from 1 --rank 2", "")])
def test_in_bf16_losses_and_norms_are_near_the_cpus(name, comm, ranks, both, only):
    cudnn = "cudnn" in only # then an own kernel for attention would fail
    run = gpu(name, comm, ranks, both, only.replace("S", ""), strict="S" in only, precision="bf16",
              **{"fault": "cuda/attention"} if cudnn else {})
    assert not cudnn or re.search("^device .*cuDNN .*attention", run.out, re.M), run
    assert_predicted(run)
    assert_metrics(cpu(name, ranks, both, precision="bf16"), run, 2e-3)


# ---- a GPU with more memory computes more logits at a time ----
FEW_LOGITS = ("-DCLASSIFIER_ELEMENTS_CPU=16384 -DCLASSIFIER_ELEMENTS_CUDA=32768 -DCLASSIFIER_ELEMENTS_MOST=131072 "
              "-DCLASSIFIER_BYTES=2048") # twice 2^15 from 134 MB on, four times from 268 MB on
SEVERAL_CHUNKS = "--seq-len 64 --batch-size 8 --total-batch-size 1024 --model d2 --steps 2"


@functools.cache
def few_logits(name):
    needs_emulator("can be told how much memory they have")
    folder = "build/emulated-few-logits"
    return make("DEVICE=emulated PRECISION=bf16", f"BUILD={folder}", [f"CFLAGS={FEW_LOGITS}"], f"{folder}/train_gpt2_{name}")


def activations_of(run): return run.about["predicted_bytes"]["activations"]


@pytest.mark.parametrize("MB, rows", [(100, 64), (200, 128), (400, 256)])
def test_a_gpu_with_more_memory_computes_more_logits_at_a_time(MB, rows):
    """Of 512 rows of 384 logits; --predict is told the memory, and says to the byte what the run measures."""
    def on(MB, *options):
        return trained("ddp", SMALL, SEVERAL_CHUNKS, *options, binary=few_logits("ddp"), env={"CUDA_EMULATOR_MEMORY": MB})
    run = on(MB)
    assert_predicted(run)
    assert_metrics(trained("ddp", SMALL, SEVERAL_CHUNKS, precision="bf16"), run, 2e-3)
    assert activations_of(run) - activations_of(on(100)) == (rows - 64) * 384 * 2
    asked = command([few_logits("ddp")], SMALL, SEVERAL_CHUNKS, "--predict 1", f"--predict-gpu-memory {MB * 1048576e-9}")
    assert json.loads(asked.out)["ranks"][0]["bytes"]["activations"] == activations_of(run)
    assert_same(on(100, ORDERED), on(MB, ORDERED)) # sums over chunks depend on their number


def test_ranks_whose_gpus_differ_in_memory_compute_as_many_logits_at_a_time(tmp_path):
    """Ranks that share the vocabulary exchange numbers about each chunk of rows."""
    ranks = executable(tmp_path / "ranks",
                       f'CUDA_EMULATOR_MEMORY=$((100 + 300 * OMPI_COMM_WORLD_RANK)) exec {ROOT}/{few_logits("tp")} "$@"\n')
    run = trained("tp", SMALL, SEVERAL_CHUNKS, ranks=2, binary=str(ranks), env=gpus_of("nccl", 2))
    assert_predicted(run)
    assert_metrics(trained("tp", SMALL, SEVERAL_CHUNKS, ranks=2, precision="bf16"), run, 2e-3)


# ---- what the host does: products, waits ----
# on numbers, while nothing else runs, and outside a profile of training
AS_IN_TRAINING = "of zeros 0, profiled 0, after a collective 0$"
TRIED = f"untried shapes 0, .* repeated [1-9][0-9]*, {AS_IN_TRAINING}"
BESIDE = TRIED.replace(".*", ".* for fewer processors [1-9].*") # a gradient that is computed during a sum leaves processors to it
NONE_TRIED = f"with a bias gradient 0, for fewer processors 0, failed 0, repeated 0, {AS_IN_TRAINING}"


@pytest.mark.sampled
@pytest.mark.parametrize("name, ranks, options, counts, more", [
    ("fsdp", 2, f"--limit-all-gathers 3 --wrap-blocks 2 {AGAIN} --total-batch-size 32", TRIED, {}),
    ("fsdp", 2, "", "failed [1-9].*, after a collective 0$", {"cublaslt_fails": 4}), ("fsdp", 2, ORDERED, NONE_TRIED, {}),
    ("tp", 2, f"{SEQUENCE} {AGAIN} --total-batch-size 64", BESIDE, {}), ("tp", 4, COPIES, BESIDE, {}),
    ("tp", 2, ORDERED, NONE_TRIED, {}),
    ("cp", 2, "", TRIED, {}), ("cp", 4, f"{RING} {BALANCED}", TRIED, {}),
    ("pp", 2, DELAYED, TRIED, {}), ("pp", 2, f"{CHUNKS} {AGAIN}", TRIED, {}),
    ("3d", 4, f"{mesh(2, 2, 1)} --zero-stage 1 {AGAIN}", BESIDE, {}),
    ("3d", 4, f"{mesh(2, 2, 1)} --zero-stage 1", BESIDE, {"precision": "bf16"}),
    ("3d", 4, f"{mesh(1, 2, 2)} {DELAYED} {SEQUENCE}", TRIED, {}),
    ("compress", 2, "--compress powersgd --compress-from 0", TRIED, {})])
def test_every_product_of_a_step_is_tried_before_ranks_exchange_anything(name, ranks, options, counts, more, tmp_path):
    """A deterministic run tries none, because what is timed may choose another order of sums."""
    run = gpu(name, "nccl", ranks, options, cublaslt_counts=tmp_path / "counts", **more)
    assert_predicted(run)
    said = (tmp_path / "counts").read_text()
    assert len(re.findall(counts, said, re.M)) == ranks, said


@pytest.mark.sampled
@pytest.mark.parametrize("options, in_windows", [("", 4 * (4 * 2 + 1)), (SEQUENCE, 4 * (10 * 2 + 4) + 2)])
def test_what_blocks_exchange_is_in_windows_of_the_ranks_that_share_the_model(options, in_windows, tmp_path):
    """Of two blocks and the head, in four micro-batches, and the sum of layernorms' gradients, in two steps; what the losses
    exchange, once a micro-batch, is not. The embedding's sum is only where rows are cut: then it is formed in a buffer for gathered
    rows."""
    run = gpu("tp", "nccl", 2, "--seq-len 32 --batch-size 4 --total-batch-size 256", options, nccl_counts=tmp_path / "counts")
    said = (tmp_path / "counts").read_text()
    assert_predicted(run)
    assert len(re.findall(rf"^rank \d of 2: collectives \d+, in windows {in_windows}$", said, re.M)) == 2, said


# Without padding, no method would send rows of a multiple of 16 bytes to 3 or 4 ranks.
LARGER = "--model d2 --channels 60 --heads 3 --vocab-size 300 --seq-len 12 --batch-size 1 --steps 2"
INT4, TOP_K = "--compress int4 --compress-from 0", "--compress top-k --top-k-fraction 0.0501"


@pytest.mark.sampled
@pytest.mark.parametrize("name, ranks, options", [
    *(("compress", ranks, method) for method in ("--compress int8", INT4, "--compress sign", TOP_K) for ranks in (3, 4)),
    ("zeropp", 3, "--node-ranks 1"), ("zeropp", 4, NODES), ("zeropp", 4, f"--node-ranks 1 --quantise-gradients int8 {ORDERED}"),
    ("ddp", 3, ""), ("ddp", 4, f"--bucket-mb 0.1 {ORDERED}"), ("ddp", 4, "--bucket-mb 0.1 --allreduce ring"),
    ("ddp", 3, "--bucket-mb 0.01"),
    ("zero", 3, "--zero-stage 2"), ("zero", 3, f"--zero-stage 3 {ORDERED}"), ("muon", 3, ""), ("fsdp", 3, ""),
    ("fsdp", 4, f"--sharding hybrid --shard-group 2 {ORDERED}"),
    ("tp", 3, ""), ("tp", 3, f"{SEQUENCE} {ORDERED}"), ("pp", 3, "--layers 3"), ("pp", 4, f"{STAGES} {ORDERED}"),
    ("cp", 3, ""), ("cp", 3, f"{GATHER} {ORDERED}"), ("cp", 3, f"{RING} {BALANCED}"),
    ("3d", 4, f"{mesh(2, 2, 1)} --zero-stage 1 {SEQUENCE} --channels 64 --heads 4"),
    ("3d", 4, f"{mesh(2, 1, 2)} --zero-stage 1 {ORDERED}")])
def test_large_messages_and_the_parts_of_ranks_begin_at_multiples_of_16_bytes(name, ranks, options, tmp_path):
    """NCCL copies any other one element by element, and packed rows are bytes. Operations below 64 bytes are a few numbers, such as
    losses, norms and the ranks of a new communicator, for which that does not matter."""
    on_gpus(name, "nccl", ranks, LARGER, options, nccl_counts=tmp_path / "counts")
    found = re.findall(r"^largest not at multiples of 16 bytes: (\d+) bytes, (\w+)$", (tmp_path / "counts").read_text(), re.M)
    assert len(found) >= ranks
    assert [row for row in found if int(row[0]) >= 64] == []


def waits(name, options=""):
    """How often the hosts of two ranks wait in four steps."""
    counted = []
    for steps in 2, 6:
        file = session() / "-".join(["waits", name, *options.split(), str(steps)])
        on_gpus(name, "nccl", 2, "--model d2 --layers 4 --seq-len 16 --batch-size 2", options, f"--steps {steps}", waits=file,
                nccl_calls=f"{file}.nccl")
        counts = [int(line.split()[3]) for line in file.read_text().splitlines()]
        assert len(counts) == 2
        assert len(re.findall("0 times to ask one that was not done; it made 0 threads$", Path(f"{file}.nccl").read_text(),
                              re.M)) == 2
        counted.append(sum(counts))
    return counted[1] - counted[0]


@pytest.mark.sampled
@pytest.mark.parametrize("name, options", [
    ("zeropp", "--node-ranks 1"), ("muon", ""), ("tp", ""), ("tp", f"{SEQUENCE} {AGAIN} --total-batch-size 96"),
    ("pp", f"{DELAYED} --total-batch-size 256"), ("pp", f"{CHUNKS} {AGAIN}"),
    ("3d", "--mesh dp=2 --zero-stage 1"), ("3d", "--mesh tp=2 --no-overlap"), ("3d", f"--mesh pp=2 {DELAYED}"),
    ("cp", ""), ("cp", GATHER), ("cp", f"{RING} {BALANCED}"),
    ("compress", "--compress int8"), ("compress", "--compress powersgd --compress-from 0")])
def test_the_host_waits_as_often_in_a_step_as_in_ddps(name, options):
    assert waits(name, options) == waits("ddp") >= 8


def test_what_operations_took_is_asked_while_the_gpu_still_computes(tmp_path):
    """At the end of a step the GPU has nothing to do until the host issues the next one. Here a step has 29 operations, each with
    two times."""
    asked = []
    for steps in 2, 6:
        gpu("fsdp", "nccl", 2, "--layers 8", f"--steps {steps}", waits=tmp_path / f"{steps}")
        asked.append(sum(map(int, re.findall("asked ([0-9]+) times what an idle GPU", (tmp_path / f"{steps}").read_text()))))
    assert 0 <= asked[1] - asked[0] <= 4 * 2 * 4, asked # in four steps of two ranks
