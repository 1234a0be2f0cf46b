"""What the tests of tensor, pipeline, 3D and context parallelism share: small runs, and references of test/split that have a mesh's
bits."""
import functools
from shards import skipped_steps
from suite import TINY, TOKENS, assert_same, make, trained

SMALL = f"{TINY} --heads 4 --steps 10 --deterministic"
EVALUATIONS = f"--val-data {TOKENS} --eval-every 5 --eval-steps 2 --sample-every 5 --sample-tokens 9 --vocab-size 300"
LARGE_SCALE = "--loss-scale 8388608 --max-bad-steps 20 --steps 20" # too large for the first gradients of fp16
SEQUENCE, AGAIN = "--sequence-parallel", "--recompute block"
# What test/split's headers read from the environment when a reference runs: see test/split/README.md.
PARTS = {"DATA_PARTS": 1, "TENSOR_PARTS": 1, "SEQUENCE_PARTS": 1, "SEQUENCE_SUM": 0, "TIED_APART": 0, "TIED_EARLY": 0,
         "CONTEXT_PARTS": 1,
         "CONTEXT_PIECES": 1, "CONTEXT_WAY": 0}


@functools.lru_cache
def split_program(name, precision="fp32", headers="tensor tied data sequence context"):
    """A program that is compiled with headers of test/split. One program serves all meshes. With little optimisation, because
    compiling takes longer than running: the bits are the same."""
    folder = f"build/split/{headers.replace(' ', '-')}/{precision}"
    flags = [f"-include test/split/{name}.h" for name in headers.split()] + [f"'-D{name}=atoi(getenv(\"{name}\"))'"
                                                                             for name in PARTS]
    return make("DEVICE=cpu", f"PRECISION={precision}", f"BUILD={folder}", [f"CFLAGS={' '.join(flags)} -O1"],
                f"{folder}/train_gpt2_{name}")


def reference(*options, ranks=None, precision="fp32", headers=None, **parts):
    """A run of one device, or of DDP on so many ranks, whose layers form sums in these parts: data_parts=2, tied_apart=1. It has
    one thread, as a rank has: a product with more may have other bits."""
    headers = headers or ("tensor tied" if ranks else "tensor tied data sequence context")
    env = {"OMP_NUM_THREADS": 1} | PARTS | {name.upper(): int(value) for name, value in parts.items()}
    name = "ddp" if ranks else "single"
    return trained(name, SMALL, *options, ranks=ranks, env=env, binary=split_program(name, precision, headers))


def axes(mesh):
    """"2x4": of a tensor or pipeline parallel run, 2 replicas of the model on 4 ranks each. "2x4x1": as --mesh dp=2,tp=4,pp=1."""
    return [int(n) for n in mesh.split("x")]


def batch(sequences, copies, micro=1):
    """The options of a step of so many sequences: of one device's, or of each copy's, in so many micro-batches."""
    assert sequences % (copies * micro) == 0
    return f"--total-batch-size {16 * sequences} --batch-size {sequences // copies // micro}"


def assert_same_skips(one, many):
    assert_same(one, many)
    assert skipped_steps(many)


def assert_bytes(run, sent, **held):
    """Rank 0 has held and sent these bytes, and every rank what it has predicted: parameters=..., optimizer_state=..."""
    predicted = run.about["predicted_bytes"]
    assert {name: predicted[name.replace("_", " ")] for name in held} == held
    assert set(run.series("comm_bytes")) == {sent}
    assert "than predicted" not in run.out and "allocations while training: 0;" in run.out, run
