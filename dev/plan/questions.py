"""Asks the programs what a run keeps and sends, by their own formulas (llmc/run/predict.h), and build/schedule_order what
ranks of a pipeline do when. A run is a Plan. It is asked of the program of its strategy, built for the precision; fp16 has bf16's
size, but for train_gpt2_compress."""
import functools, math, os
from collections import namedtuple
from typing import NamedTuple
import schedule_play
from shapes import Shape
from tool import ask, started

# Data parallel alone, where every rank has a micro-batch of its own: DDP to FSDP. In TP t ranks share one; in PP micro-batches pass
# through p ranks; 3D has copies of p stages of t ranks; in CP c ranks share the tokens of a micro-batch. ZERO++ is FSDP on nodes.
DDP, ZERO1, ZERO2, ZERO3, FSDP, TP, PP, MESH, CP, ZEROPP = range(10)
STRATEGY_NAMES = ("ddp", "zero-1", "zero-2", "zero-3", "fsdp", "tp", "pp", "3d", "cp", "zero++")
PROGRAMS = ("ddp", "zero", "zero", "zero", "fsdp", "tp", "pp", "3d", "cp", "zeropp")
STRATEGIES = range(5)
KINDS = ("parameters", "gradients", "optimizer state", "activations", "communication", "workspace", "errors")
SCHEDULES = schedule_play.SCHEDULES
MAX_BLOCKS = 256
FOLDER = os.environ.get("PLAN_PROGRAMS", "build/predict") # of the programs that are asked
PLAYER = os.path.join(FOLDER, "..") # of schedule_order


class Plan(NamedTuple):
    """Fields that only pass an option on have its name and default (options.py)."""
    shape: Shape
    B: int                   # a rank's micro-batch, or in tp and cp that of the ranks that share it
    T: int
    N: int                   # ranks
    precision: str = "bf16"
    accumulation: int = 1    # micro-batches per step; in pp those of a replica of the model
    recompute: bool = False  # blocks; full: all of their forward pass, as others' programs do
    full: bool = False
    gpu: bool = True         # the GPU's program (over NCCL), or the CPU's (over MPI)
    memory_bandwidth: float = 0 # of a rank's device, bytes per second; 0: the update takes no time
    buffers: int = 2         # fsdp: how many groups, besides the root, may be gathered at a time
    wrap_blocks: int = 1     # blocks of a group; 0: the whole model is one
    wrap_halves: bool = False # a block's attention and its MLP are groups
    sharding: str = "full"
    shard_group: int = 0
    reduce_dtype: str = "fp32"
    t: int = 1               # tp: ranks that share a replica of the model
    rows: bool = False       # --sequence-parallel
    p: int = 1               # pp: ranks that share one, each with v parts of it
    schedule: str = "1f1b"
    v: int = 1
    split: str = "auto"
    rank: int = -1           # of the p; -1: the one that keeps most
    pp_outside: bool = False # 3d: ranks of dp are nearer to each other than those of pp
    zero_stage: int = 0      # 3d: what is sharded over replicas of the model, 0 nothing, 1 the optimizer's state
    method: str = "none"     # --compress, from the step on in which it compresses
    feedback: bool = None    # None: as the method has it by default
    fraction: float = 0.01
    low_rank: int = 4        # of powersgd
    bucket_mb: float = 25
    c: int = 1               # cp: ranks that share each sequence; --cp, --cp-balance
    how: str = "ulysses"
    balance: str = "contiguous"
    node_ranks: int = 0      # zero++: ranks of a node
    gpu_memory: float = 80e9 # bytes, which decide how many logits exist at a time

    X = property(lambda self: 4 if self.precision == "fp32" else 2) # bytes of an element
    keeps_all = property(lambda self: self.schedule == "zb-h1") # for W, so nothing can be recomputed
    recomputed = property(lambda self: self._replace(recompute=not self.keeps_all)) # as far as it can be
    tokens = property(lambda self: self.B * self.T)                 # of a micro-batch


# ---- questions to the programs ----
FIELDS = { # options whose field has a shorter name
    "batch-size": "B", "seq-len": "T", "ranks": "N", "limit-all-gathers": "buffers", "tensor-parallel": "t",
    "sequence-parallel": "rows", "pipeline-parallel": "p", "chunks": "v", "compress": "method", "error-feedback": "feedback",
    "top-k-fraction": "fraction", "rank": "low_rank", "context-parallel": "c", "cp": "how", "cp-balance": "balance"}
OPTIONS_OF = { # what the strategy's program is told besides the model and the batch
    FSDP: "wrap-blocks wrap-halves sharding shard-group reduce-dtype limit-all-gathers",
    ZEROPP: "wrap-blocks wrap-halves sharding limit-all-gathers node-ranks", TP: "tensor-parallel sequence-parallel",
    PP: "pipeline-parallel schedule chunks split", CP: "context-parallel cp cp-balance",
    MESH: "zero-stage sequence-parallel schedule chunks split"}
OPTIONS_OF_METHOD = {"top-k": "top-k-fraction", "powersgd": "rank"}


def field_of(option): return FIELDS.get(option, option.replace("-", "_"))
def is_compressed(plan, strategy): return strategy == DDP and plan.method != "none"


def options_of(plan, strategy):
    names = OPTIONS_OF.get(strategy, "")
    if is_compressed(plan, strategy): names = f"compress bucket-mb error-feedback {OPTIONS_OF_METHOD.get(plan.method, '')}"
    values = [(name, getattr(plan, field_of(name))) for name in names.split()]
    words = [f"--{'' if x else 'no-'}{name}" if isinstance(x, bool) else f"--{name} {x}" for name, x in values if x is not None]
    if ZERO1 <= strategy <= ZERO3: words = [f"--zero-stage {strategy - ZERO1 + 1}"]
    if strategy == MESH: words.append(f"--mesh {mesh_name(plan)}")
    if strategy in (FSDP, ZEROPP) and plan.buffers == 1: words.append("--prefetch none --no-forward-prefetch") # else both have room
    return " ".join(words)


def mesh_name(plan):
    dp, pp = f"dp={plan.N // (plan.t * plan.p)}", f"pp={plan.p}"
    return f"{pp},{dp},tp={plan.t}" if plan.pp_outside else f"{dp},tp={plan.t},{pp}"


def copy_ranks(plan, strategy):
    """Ranks that share micro-batches."""
    return (plan.t if strategy in (TP, MESH) else 1) * (plan.p if strategy in (PP, MESH) else 1) * (plan.c if strategy == CP else 1)


@functools.cache
def ask_program(name, precision, line):
    """A program's answer. What it refuses ends this program in its words."""
    path = os.path.join(FOLDER, f"train_gpt2_{name}.{precision}")
    return ask(started(path, f"there is no {path}, whose formulas are asked; make build/plan", "--predict", "-"), line)


def answer_of(plan, strategy, words=None):
    """words: instead of the batch and the strategy's options."""
    c, is_packed = plan.shape, is_compressed(plan, strategy)
    device = f"gpu --predict-gpu-memory {1e-9 * plan.gpu_memory:.9g}" if plan.gpu else "cpu"
    model = f"d{c.L}" if c.T == plan.T else f"gpt2 --layers {c.L}" # gpt2 brings its positions with it
    tokens = plan.tokens * plan.accumulation * max(1, plan.N // copy_ranks(plan, strategy))
    recompute = "block" if plan.recompute else "none"
    words = words or f"--total-batch-size {tokens} --recompute {recompute} {options_of(plan, strategy)}"
    return ask_program("compress" if is_packed else PROGRAMS[strategy],
                       "bf16" if plan.precision == "fp16" and not is_packed else plan.precision,
                       f"--predict {plan.N} --predict-device {device} --model {model} --channels {c.C} --heads {c.NH}"
                       f" --vocab-size {c.V} --seq-len {plan.T} --batch-size {plan.B} {words}")


# ---- answers ----
# Per rank: by kind, without those that are 0, and of the layers' workspace only wte's fp32 sums; all of these; what is sent in a
# step, and in 3d the parts of it by axis.
Bytes = namedtuple("Bytes", "memory total sent along")


def all_ranks(plan, strategy):
    """Of a rank of each stage of the pipeline."""
    return [Bytes(rank["bytes"], sum(rank["bytes"].values()), rank["sent"], rank.get("sent_along", {}))
            for rank in answer_of(plan, strategy)["ranks"]]


def extreme_rank(plan, strategy, most=True):
    """The rank of a pipeline that keeps most, or that keeps least; of equal ones the first."""
    totals = [b.total for b in all_ranks(plan, strategy)]
    return totals.index((max if most else min)(totals))


def own_rank(plan, strategy=PP): return extreme_rank(plan, strategy) if plan.rank < 0 else plan.rank
def bytes_of(plan, strategy): return all_ranks(plan, strategy)[own_rank(plan, strategy)]
def total_of(plan, strategy): return bytes_of(plan, strategy).total
# Bytes that N ranks together send per step. This is a whole number, which one rank's share of it need not be.
def sent_of_all(plan, strategy): return math.floor(bytes_of(plan, strategy).sent * plan.N + 0.5)


def bytes_of_states(strategy, N, halves=True, master=True):
    """Of a parameter's weight, gradient and optimizer state, on one of N ranks. In 16 bits 2 + 2 + 12, with an fp32 master copy and
    two moments (Rajbhandari et al. 2020, section 3.1); in fp32 4 + 4 + 8. Stage 1 shards the optimizer's state, stage 2 also
    gradients, stage 3 and FSDP everything."""
    X = 2 if halves else 4
    whole = (X, ZERO3), (X, ZERO2), (8 + (4 if halves and master else 0), ZERO1)
    return [x / N if strategy >= since else x for x, since in whole]


def divides(plan, strategy):
    """Whether ranks can share a replica of the model so; if not, the program refuses, and says why."""
    s, t, p, c = plan.shape, plan.t, plan.p, plan.c
    if strategy == TP: return all(n % t == 0 for n in (plan.N, s.NH, s.Vp, plan.tokens if plan.rows else 0))
    if strategy == PP:
        fits = plan.schedule != "interleaved" or plan.accumulation % p == 0
        return plan.N % p == 0 and p * plan.v <= s.L and fits and not (plan.recompute and plan.keeps_all)
    chunks = c * (2 if plan.balance == "zigzag" else 1)
    return plan.N % c == 0 and plan.T % chunks == 0 and (plan.how != "ulysses" or s.NH % c == 0)


# ---- questions to build/schedule_order, which has pipelines as llmc/parallel has them (split.h, pipeline.h) ----
# A step has m micro-batches; a rank has v parts of the model, part number c of rank r being number c*p + r of all. An action is
# one micro-batch in one part: F forward, I the gradient of the input, W the gradients of the weights, B both. Each begins when
# its rank is free and its input is there.
@functools.cache
def split(text, p, v, L, Vp, C):
    """"blocks" of each part of the model, and "efficiency": without a bubble, the share of the time in which ranks compute."""
    return schedule_play.ask_player(PLAYER, split=text, p=p, v=v, L=L, Vp=Vp, C=C)


def plan_split(plan, text=None): return split(text or plan.split, plan.p, plan.v, plan.shape.L, plan.shape.Vp, plan.shape.C)
def split_of(plan): return plan_split(plan)["blocks"]
def blocks_of(plan, rank): return sum(split_of(plan)[rank::plan.p])


def play(plan, times, message):
    """The step of "ranks", with their actions in "boxes": [kind, micro-batch, part, begin, end]. "bubble": by formula, if it were
    balanced. times: (F, I, W) of each part of the model; message: seconds between two ranks."""
    return play_pipeline(schedule_play.Pipeline(plan.schedule, plan.p, plan.accumulation, plan.v), tuple(map(tuple, times)),
                         message)


@functools.lru_cache(16)
def play_pipeline(l, times, message):
    mean = [sum(part[k] / l.p for part in times) for k in range(3)]
    return schedule_play.play(PLAYER, l, mean, times, message=message)


# The most (micro-batch, part) whose activations are alive at a time.
def slots(plan, rank): return play(plan, ((0, 0, 0),) * (plan.p * plan.v), 0)["ranks"][rank]["slots"]
