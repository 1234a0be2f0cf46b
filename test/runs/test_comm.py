"""Collectives on 1 to 8 ranks, in normal and strict mode: test/unit/test_comm.c checks the results on every rank. Then their
misuse."""
import os, re, subprocess
import pytest
from suite import assert_refused, command, make, program, rest

LONG = 8


def assert_every_claim_holds(run):
    assert run.status == 0 and re.search(r"^1\.\.\d+$", run.out, re.M) and not re.search("runtime error:|ERROR: ", run.said), run


@pytest.mark.parametrize("strict", [False, True], ids=["normal", "strict"])
@pytest.mark.parametrize("ranks, debug", [(4, False), *(rest(n, False) for n in (1, 2, 3, 8)), rest(1, True), rest(3, True)])
def test_every_claim_holds(ranks, debug, strict):
    assert_every_claim_holds(command(program("test/test_comm", debug=debug), ranks=ranks, strict=strict))


@pytest.mark.rest
def test_the_threads_of_two_ranks_have_no_race():
    tsan, options = make("build/tsan/test/test_comm"), "suppressions=test/mpi_races.txt:print_suppressions=0"
    # some layouts fail
    fixed = "setarch -R " if subprocess.run("setarch -R true", shell=True, capture_output=True).returncode == 0 else ""
    assert_every_claim_holds(command(fixed + tsan, ranks=2, env={"TSAN_OPTIONS": options}))


@pytest.mark.rest
def test_a_program_without_mpi_is_a_rank_alone(tmp_path):
    alone = tmp_path / "without_mpi"  # without the flags of mpicc
    done = command(os.environ.get("CC", "cc"), "-O1 -g1 -fopenmp -Wall -Wextra test/unit/test_comm.c -o", alone, "-lpthread -lm")
    assert done.status == 0 and "libmpi" not in command("ldd", alone).out, done
    for strict in False, True: assert_every_claim_holds(command(alone, strict=strict))
    assert_refused(command(alone, ranks=2), "there are 2 ranks, and this program was built without MPI: start it alone")


@pytest.mark.parametrize("name, ranks, pattern", [
    ("wait-unknown", 1, "operation #0, but only 0 were issued"),
    ("never-waited", 1, "all-reduce, operation #0, was never waited for"),
    ("too-many", 1, "1024 operations are under way"), ("send-to-itself", 1, "send of rank 0 cannot name rank 0 of 1"),
    ("send-unconnected", 1, "part.0: call comm_connect before"), ("connect-twice", 1, "world: comm_connect was called twice"),
    ("send-to-no-pair", 2,
     r"part.0: send of rank [01] cannot name rank [01]: comm_connect was told that they exchange no messages"),
    ("no-such-root", 1, "broadcast of rank 0 cannot name rank 1 of 1"), ("sum-of-bytes", 1, "reduce-scatter of bytes"),
    ("split-in-flight", 1, "wait for the operations under way first"),
    ("split-twice", 1, "there is a communicator 'part.0' already"),
    ("world-first", 1, "comm_free of the world before 'part.0'"), ("overlap-before", 3, "all-to-all of 3 x 1 fp32 overlap"),
    ("overlap", 3, "all-to-all of 3 x 1 fp32 overlap"),
    ("parts-overlap", 2, r"part from rank 1 \(2 fp32\) overlaps the part from rank 0: give it a place of its own"),
    ("parts-overwritten", 2, r"part from rank 1 \(1 fp32\) overlaps the part to rank 0: give it"),
    ("own-part-differs", 1, "rank 0 expects 2 fp32 of an all-to-all-v from itself and sends itself 3"),
    ("parts-differ", 2, "all-to-all-v failed"), ("message-too-long", 2, "receive failed"),
    ("wait-twice", 2, "^rank [01]: error: world: operation #0 is waited for a second time"),
    ("orders-differ", 3, r"has reached all-reduce #[01] of world \(2 fp32"),
    ("sizes-differ", 2, r"has reached all-reduce #0 of world \([23] fp32")])
def test_a_mistake_is_an_error_that_names_it(name, ranks, pattern):
    strict = name in ("orders-differ", "sizes-differ")  # only strict mode sees these
    assert_refused(command(program("test/test_comm"), "die", name, ranks=ranks if ranks > 1 else None, strict=strict), pattern)


@pytest.mark.parametrize("strict, options", [(True, ""), (False, "--emulate-link 10")], ids=["strict", "link"])
def test_strict_mode_and_an_emulated_link_name_the_parts_that_differ(strict, options):
    run = command(program("test/test_comm"), options, "die parts-differ", ranks=2, strict=strict)
    assert_refused(run, "world: rank 1 sends 3 fp32 of an all-to-all-v to rank 0, which expects 2")


@pytest.mark.parametrize("options, env, pattern", [
    ("--deterministic --allreduce ring", {}, "leave one of them out"), ("--comm nccl", {}, "built without NCCL.*use --comm mpi"),
    ("", {"SHARD_COMM_STRICT": "yes"}, "must be 0 or 1, not 'yes'"),
    ("", {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", 0), ("SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 2))},
     "rank 0 of 2, but MPI says rank 0 of 1")], ids=["two ways", "nccl", "strict", "not MPI's"])
def test_options_that_cannot_be_are_refused(options, env, pattern):
    assert_refused(command(program("test/test_comm"), options, env=env), pattern)
