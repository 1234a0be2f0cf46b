"""The options of build/plan, the run that they describe (a Plan), and the training programs' own predictions for it
(llmc/run/predict.h). Every technique asks its program, built for the run's precision; fp16 takes bf16's sizes, except in
train_gpt2_compress and train_gpt2_muon."""
import functools, math, os, re
from collections import namedtuple
from types import SimpleNamespace
import schedule_play
from tool import SIZES, ask, choice, parse_options, real, require, started, switch, text, whole
from dev.plan.machines import ALL_REDUCE, GPUS, LINKS, MEASURED, NODES, Network, link_of, open_link, passes, this_machine
from dev.plan.shapes import SHAPES, Shape, is_gpt2

# program: of a technique; told: its options besides model and batch; shares: the axes whose ranks share a replica of the model and
# its micro-batches. t ranks share each micro-batch in tp, c ranks its tokens in cp, and in pp micro-batches pass through p ranks. A
# replica of 3d is p stages of t ranks; zero++ is fsdp on nodes. muon-z shards what zero-z does.
Technique = namedtuple("Technique", "program told shares", defaults=("", ""))
TECHNIQUES = {
    "ddp": Technique("ddp"), **{f"zero-{z}": Technique("zero", f"zero-stage={z}") for z in (1, 2, 3)},
    "fsdp": Technique("fsdp", "sharding shard-group reduce-dtype"), "zero++": Technique("zeropp", "sharding node-ranks"),
    **{f"muon-{z}": Technique("muon", f"zero-stage={z} owners") for z in (1, 2, 3)},
    "compress": Technique("compress", "compress bucket-mb rank"), "tp": Technique("tp", "tensor-parallel sequence-parallel", "t"),
    "pp": Technique("pp", "pipeline-parallel schedule chunks split", "p"),
    "cp": Technique("cp", "context-parallel cp cp-balance", "c"),
    "3d": Technique("3d", "mesh zero-stage sequence-parallel schedule chunks split", "tp")}
ALWAYS = "ddp", "zero-1", "zero-2", "zero-3", "fsdp" # are shown
MUONS = "muon-1", "muon-2", "muon-3"
OWN_FP16 = "compress", *MUONS # what they keep or send in fp16 differs from bf16
KINDS = ("parameters", "gradients", "optimizer state", "activations", "communication", "workspace", "errors")
METHODS = ("none", "bf16", "int8", "int4", "top-k", "sign", "powersgd")
SCHEDULES = schedule_play.SCHEDULES
MAX_BLOCKS, MAX_RANKS = 256, 1 << 20
MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES = 1 << 16, 4096 # limits of a step: with data parallelism, of a pipeline

OPTIONS = [ # "With --x": they need x
    "Model and batch",
    text("model", "d4", "NAME", "gpt2*, gpt3-*, megatron-*, dN (N layers, 64N channels, N heads); for --mesh all llama*", "m"),
    *SIZES,
    real("params", 0, 0, 1e15, "number of parameters, if no shape is known; 0: --model's"),
    choice("precision", "bf16", "fp32|bf16|fp16", "of parameters, gradients and activations"),
    whole("seq-len", 128, 1, 1 << 20, "tokens per sequence, T; default for a model given by name: its whole context", "t"),
    whole("batch-size", 16, 1, 1 << 20, "sequences per rank and micro-batch, B", "b"),
    whole("accumulation", 0, 0, MOST_MICRO_BATCHES, "micro-batches per step of a replica; 0: 1, or in a pipeline one per rank"),
    whole("total-batch-size", 0, 0, 1e15, "tokens per step of all ranks; 0: from --accumulation"),
    choice("recompute", "none", "none|block|full", "for times (bytes are shown for both); full: all of a block, as papers count"),
    "Ranks, and how they divide the work (bytes of the first five techniques are always printed)",
    whole("ranks", 8, 1, MAX_RANKS, "number of ranks, N"),
    whole("tensor-parallel", 0, 0, MAX_RANKS, "neighbouring ranks that share a replica and a micro-batch; 0: 1, 2, 4 and 8"),
    switch("sequence-parallel", "these ranks also cut the rows of layernorms and of the residual stream"),
    whole("pipeline-parallel", 0, 0, MAX_BLOCKS, "neighbouring ranks that each have some blocks of a replica; 0: 2, 4 and 8"),
    choice("schedule", "1f1b", "|".join(SCHEDULES), "a pipeline's schedule; omitted: all four are compared"),
    whole("chunks", 0, 0, MAX_BLOCKS, "parts of the model on each rank; 0: 2 if interleaved, else 1"),
    whole("context-parallel", 0, 0, MAX_RANKS, "neighbouring ranks that share each sequence and micro-batch; 0: 2, 4 and 8"),
    choice("cp", "ulysses", "ulysses|allgather|ring", "how attention exchanges keys and values; omitted: all ways are compared"),
    choice("cp-balance", "contiguous", "contiguous|zigzag", "how a sequence's tokens are assigned, with --cp allgather or ring"),
    text("mesh", "", "dp=N,tp=N,pp=N|all", "only this mesh of train_gpt2_3d; all: search for the best on --gpu"),
    choice("sharding", "full", "full|grad-op|hybrid", "fsdp: freed after each use, kept until backward, full in groups"),
    whole("shard-group", 0, 0, MAX_RANKS, "ranks that hold one replica of the model; with --sharding hybrid"),
    choice("reduce-dtype", "fp32", "fp32|model", "the precision in which fsdp's gradients are sent and added"),
    whole("node-ranks", 0, 0, MAX_RANKS, "also zero++: ranks of a node, as train_gpt2_zeropp's option of this name; 0: none"),
    choice("owners", "none", "none|one|all", "also muon: ranks that orthogonalise a matrix, as train_gpt2_muon's option"),
    choice("compress", "none", "|".join(METHODS) + "|all", "how ddp's gradients travel; all: only a table of the methods"),
    "With --params",
    choice("master", "on", "on|off", "off: no fp32 copy of 16-bit weights"),
    "With --pipeline-parallel or --mesh",
    text("split", "auto", "auto|N,N,...", "blocks of each part; auto: such that ranks take about equal times"),
    "With --mesh",
    whole("zero-stage", 0, 0, 1, "shards over dp: 0 nothing, 1 optimizer state"),
    "With --compress",
    whole("rank", 4, 1, 1024, "rank of powersgd's matrices"),
    real("bucket-mb", 25, 1e-6, 1e6, "MiB of gradients per bucket"),
    real("communication-ms", 0, 0, 1e9, "ms to sum all gradients uncompressed; methods scale by bytes. 0: from the links"),
    "Device",
    text("gpu", "", "|".join(GPUS), "its peak, memory, bandwidth, links and nodes are defaults; '': none"),
    switch("here", "this machine's CPU, as python3 -m dev.plan.here has measured it"),
    text("node", "", "NAME", f"machine: {', '.join(NODES)}; '': none"),
    choice("device", "gpu", "gpu|cpu", "which build: it decides how many logits exist at a time"),
    real("memory", 0, 0, 1e9, "GB of a rank's device; 0: --gpu's, or several in the tables"),
    real("reserve", 2, 0, 1e6, "GB of it that a rank cannot use: context, NCCL, fragmentation"),
    real("peak-flops", 0, 0, 1e18, "dense FLOP/s of a rank's device; 0: an H100's, 989e12, fp32 67e12"),
    real("mfu", 0.4, 1e-6, 1, "the share of --peak-flops that one rank alone reaches"),
    real("compute-ms", 0, 0, 1e9, "measured ms of a micro-batch on one rank; 0: from peak and MFU"),
    real("memory-bandwidth", 0, 0, 1e15, "bytes/s of its memory, for AdamW's 28 bytes a parameter; 0: it takes no time"),
    "With --here",
    switch("cluster", "the cluster on this machine (dev/cluster)"),
    text("measured", "", "FILE", f"results of dev.plan.here; '': {MEASURED[False]}, or {MEASURED[True]}"),
    "Links",
    text("link", "nvlink", "NAME|FILE", f"inside a node: {', '.join(LINKS)}; FILE: from comm_bench --json"),
    whole("ranks-per-node", 8, 0, MAX_RANKS, "ranks in each node; 0: all are in one node"),
    "With --ranks-per-node",
    text("inter-link", "infiniband", "NAME|FILE", "the same between nodes"),
    whole("nics", 0, 0, MAX_RANKS, "network interfaces of each node; 0: one for each rank"),
    "Cost of a run",
    real("tokens", 0, 0, 1e18, "tokens of the whole run, for hours and GPU-hours; 0: no cost"),
    "With --tokens",
    real("price", 0, 0, 1e6, "price of a GPU-hour, in any currency; 0: none"),
    "Other questions, and how answers are printed",
    switch("validate", "compare predictions with published results"),
    switch("json", "all tables as one JSON object, with all digits of bytes and seconds"),
]
DEFAULTS = {option.name: option.default for option in OPTIONS if not isinstance(option, str)}
FIELDS = { # options whose field has a shorter name
    "batch-size": "B", "seq-len": "T", "ranks": "N", "tensor-parallel": "t", "sequence-parallel": "rows", "pipeline-parallel": "p",
    "chunks": "v", "compress": "method", "rank": "low_rank", "context-parallel": "c", "cp": "how", "cp-balance": "balance"}


def field_of(option): return FIELDS.get(option, option.replace("-", "_"))


class Plan(SimpleNamespace):
    """The options by their fields; given: the names of those on the command line; and what follows from them. rank: of a pipeline,
    -1: the one that keeps most. pp_outside: in a mesh, the ranks of dp are nearer to each other than those of pp. chip: the device,
    or None. gpu_memory: bytes, which decide how many logits exist at a time. A rank, or the ranks that share a replica, have
    micro-batches of B sequences of T tokens."""
    def __init__(self, **fields):
        own = {"shape": None, "given": set(), "rank": -1, "pp_outside": False, "chip": None, "gpu_memory": 80e9}
        super().__init__(**{field_of(name): x for name, x in DEFAULTS.items()} | own | fields)

    def but(self, **changes): return type(self)(**vars(self) | changes)

    X = property(lambda self: 4 if self.precision == "fp32" else 2) # bytes of a number
    tokens_of = property(lambda self: self.B * self.T)              # of a micro-batch
    activation = property(lambda self: float(self.tokens_of) * self.shape.C * self.X) # bytes of (B,T,C)
    again = property(lambda self: self.recompute != "none")
    once = property(lambda self: self.but(recompute="none"))
    # A pipeline of zb-h1 keeps all activations.
    recomputed = property(lambda self: self.once if self.schedule == "zb-h1" else self.but(recompute="block"))


# ---- which options go together ----
ONLY = { # a question, and all options that it takes
    "mesh all": "mesh model layers heads channels vocab-size json ranks gpu node reserve seq-len total-batch-size tokens price",
    "params": "params master precision json ranks gpu node here cluster measured memory reserve",
    "validate": "validate reserve json"}
NEVER = {"here": "gpu node", "compute-ms": "peak-flops mfu", "total-batch-size": "accumulation", "mesh":
         "context-parallel cp cp-balance sharding shard-group reduce-dtype node-ranks owners compress tensor-parallel"
         " pipeline-parallel"}


def check(o):
    def is_on(name): return getattr(o, field_of(name)) not in ("", "none", 0, False)
    heading = ""
    for option in OPTIONS:
        if isinstance(option, str): heading = option
        elif heading.startswith("With ") and option.name in o.given:
            require(any(is_on(name.strip()) for name in heading[len("With --"):].split(" or --")),
                    f"--{option.name} is for {heading[len('With '):]}; give it as well")
    for question in filter(lambda name: o.mesh == "all" if name == "mesh all" else is_on(name), (*NEVER, *ONLY)):
        for name in filter(o.given.__contains__, DEFAULTS):
            require(name in ONLY[question].split() if question in ONLY else name not in NEVER[question].split(),
                    f"--{name} cannot be used with --{question}; leave one of the two out")
    for is_right, message in (
            (o.precision != "fp32" or "master" not in o.given,
             "--master is for 16 bits: weights in fp32 are the master copy; leave it out"),
            (o.total_batch_size % o.T == 0,
             f"--total-batch-size {o.total_batch_size} is no multiple of --seq-len {o.T}; choose one that is"),
            (o.communication_ms == 0 or o.N > 1,
             f"--communication-ms {o.communication_ms:g}: one rank sends nothing; raise --ranks"),
            (not (o.p or o.mesh) or o.accumulation <= PLAYED_MICRO_BATCHES,
             f"--accumulation {o.accumulation}: a pipeline is played with {PLAYED_MICRO_BATCHES} micro-batches at most, and its"
             " bubble is short by then; lower it")): require(is_right, message)


# ---- the device, which has defaults of other options ----
def chip_of(o):
    """The device that is asked for, or None."""
    require(o.node in ("", *NODES), f"--node {o.node} is not known; give one of {', '.join(NODES)}")
    require(o.gpu in ("", *GPUS), f"--gpu {o.gpu} is not known; give one of {', '.join(GPUS)}")
    if o.here: return this_machine(o.measured or MEASURED[o.cluster])
    if not o.node: return GPUS.get(o.gpu)
    name, per_node, nics, nic = NODES[o.node]
    require(o.gpu in ("", name), f"--node {o.node} has {name}, not --gpu {o.gpu}; leave out one of the two")
    return GPUS[name]._replace(per_node=per_node, nics=nics, nic=nic)


def take_device(o):
    chip = o.chip = chip_of(o)
    def take(**values): vars(o).update({name: x for name, x in values.items() if name.replace("_", "-") not in o.given})
    if o.here: take(device="cpu", precision="fp32", mfu=chip.mfu)
    if chip and chip.per_node: take(inter_link=chip.nic)
    if chip: take(link=chip.link, nics=chip.nics, peak_flops=chip.peak(o.precision), ranks_per_node=chip.per_node,
                  memory_bandwidth=chip.update or chip.bandwidth)
    require(not o.here or o.precision == "fp32" or o.compute_ms > 0 or "peak-flops" in o.given,
            f"--here has measured fp32, not {o.precision}: give --compute-ms as well")
    is_h100 = not chip and o.device == "gpu" and o.compute_ms == 0 and "peak-flops" not in o.given # the default
    memory = 1e9 * o.memory or (chip or GPUS["h100"]).memory if o.memory or chip or is_h100 else math.inf
    if memory < math.inf: o.gpu_memory = memory
    o.room = memory - 1e9 * o.reserve # bytes that a rank can use; inf: unknown
    o.shares_room = o.here and o.memory == 0 # all ranks are on this machine
    o.room_of = f"{o.memory:.4g} GB" if o.memory > 0 else chip.name if chip else "an h100"
    require(o.room > 0, f"--reserve {o.reserve:g} leaves nothing of {1e-9 * memory:.4g} GB; lower it")
    # FLOP/s; NaN: unknown
    o.peak_flops = o.peak_flops or (math.nan if o.compute_ms > 0 else GPUS["h100"].peak(o.precision))


def room_of(plan, N): return plan.room / N if plan.shares_room else plan.room


def network_of(plan):
    if plan.communication_ms > 0: # a link that takes so long to sum all gradients, whatever the messages
        nbytes = float(plan.shape.elements() * plan.X) * (plan.N - 1) / plan.N
        link = link_of(0.0, passes(ALL_REDUCE) * nbytes / (1e-3 * plan.communication_ms))
        return Network(link, link)
    # between ranks of one machine messages take time of the cores that compute; between nodes they do not
    direct, sm_share = plan.here and plan.chip.per_node > 0, float(plan.here and plan.chip.per_node == 0)
    return Network(open_link(plan.link, True), open_link(plan.inter_link), plan.ranks_per_node, plan.nics or plan.ranks_per_node,
                   direct, sm_share)


# ---- the run that they describe ----
def shape_of(o):
    """A published shape or a dN, with the numbers that are given in place of its own."""
    d = int(o.model[1:]) if re.fullmatch("d[0-9]{1,3}", o.model) else 0
    require(o.model in SHAPES or 1 <= d <= MAX_BLOCKS,
            f"--model {o.model} is not known: dN with N from 1 to {MAX_BLOCKS}, {', '.join(SHAPES)}")
    s = SHAPES.get(o.model) or Shape(o.model, d, 64 * d, d, 257, 0)
    require(o.mesh == "all" or not s.llama, f"--model {o.model} has grouped queries, a gated MLP and an untied head, which no "
            "program of this course has: only --mesh all plans it")
    require(not s.llama or not (o.layers or o.heads or o.channels or o.vocab_size),
            f"--model {o.model}: --layers, --heads, --channels and --vocab-size are for models with GPT-2's blocks")
    s = s._replace(L=o.layers or s.L, NH=o.heads or s.NH, C=o.channels or s.C, V=o.vocab_size or s.V)
    require(s.C % s.NH == 0,
            f"--model, --layers, --heads, --channels, --vocab-size: {s.C} channels do not divide over {s.NH} heads")
    if not (is_gpt2(s) if o.mesh == "all" else o.model.startswith("gpt2")): # the search treats a changed gpt2 as a dN
        s = s._replace(T=o.T)
    require(o.T <= s.T,
            f"--seq-len {o.T} is longer than the {s.T} positions of {o.model}; lower it or choose a model with more")
    return s


def parse():
    """The plan that the command line describes."""
    o = parse_options("plan", "predict bytes per rank and seconds per step of a model on many ranks, by formula", OPTIONS)
    o = Plan(**{field_of(name.replace("_", "-")): x for name, x in vars(o).items()})
    if "seq-len" not in o.given and o.model in SHAPES: o.T = SHAPES[o.model].T
    if o.mesh == "all": o.total_batch_size = o.total_batch_size or max(524288, o.N * o.T) # a step of a usual size
    o.compares = o.p > 0 and "schedule" not in o.given and o.split == "auto" # all schedules
    o.compares_cp = o.c > 0 and not {"cp", "cp-balance"} & o.given           # all ways to exchange keys and values
    check(o)
    take_device(o)
    return o


def with_pipe(o, plan, p, schedule):
    """A pipeline of p ranks."""
    v = o.v if o.v > 0 and (schedule == "interleaved" or not o.compares) else 2 if schedule == "interleaved" else 1
    return plan.but(p=p, schedule=schedule, v=v, split=o.split, accumulation=o.accumulation or p, t=1)


def with_context(plan, c, how, balance): return plan.but(c=c, how=how, balance=balance, t=1)


def with_mesh(o, plan):
    """The mesh of --mesh: train_gpt2_3d says how many ranks each axis has."""
    found = answer_of(plan, "3d", f"--mesh {o.mesh}")
    axes = found["axes"]
    outside = len(found["ranks"]) > 1 and found["ranks"][1]["rank"] > axes["tp"]
    return with_pipe(o, plan, axes["pp"], o.schedule).but(t=axes["tp"], pp_outside=outside)


def plan_of(o):
    """The run with one rank on each axis; others are changes of it. Every technique that is asked for is asked of its program here,
    so that its errors, in the program's words, come before any table."""
    plan = o.but(shape=shape_of(o), accumulation=o.accumulation or 1, t=o.t or 1, p=1, schedule="1f1b", v=1, c=1, how="ulysses",
                 balance="contiguous")
    if o.mesh: bytes_of(with_mesh(o, plan), "3d")
    else:
        for name in ("fsdp", "tp", *["zero++"] * (o.node_ranks > 0)): bytes_of(plan.once, name)
        if o.c: bytes_of(with_context(plan.once, o.c, "ring" if o.compares_cp else o.how, o.balance), "cp")
        if o.p: bytes_of(with_pipe(o, plan, o.p, o.schedule), "pp")
    return plan


# ---- questions to the programs ----
FOLDER = os.environ.get("PLAN_PROGRAMS", "build/predict") # of the programs
PLAYER = os.path.join(FOLDER, "..")                       # of schedule_order


def mesh_name(plan):
    dp, pp = f"dp={plan.N // (plan.t * plan.p)}", f"pp={plan.p}"
    return f"{pp},{dp},tp={plan.t}" if plan.pp_outside else f"{dp},tp={plan.t},{pp}"


def copy_ranks(plan, name):
    """Ranks that share a replica of the model."""
    return math.prod(getattr(plan, axis) for axis in TECHNIQUES[name].shares)


def told(plan, name):
    for option in TECHNIQUES[name].told.split():
        option, _, x = option.partition("=")
        x = x or (mesh_name(plan) if option == "mesh" else getattr(plan, field_of(option)))
        if option != "rank" or plan.method == "powersgd" or option in plan.given: # the program refuses it
            yield f"--{'' if x else 'no-'}{option}" if isinstance(x, bool) else f"--{option} {x}"


@functools.cache
def ask_program(name, precision, line):
    """A program's answer. An error of the program ends this one, in the program's words."""
    path = os.path.join(FOLDER, f"train_gpt2_{name}.{precision}")
    return ask(started(path, f"there is no {path}, whose formulas are asked; make build/plan", "--predict", "-"), line)


def answer_of(plan, name, words=None):
    """words: instead of the batch and the technique's options."""
    c, tokens = plan.shape, plan.tokens_of * plan.accumulation * max(1, plan.N // copy_ranks(plan, name))
    device = f"gpu --predict-gpu-memory {1e-9 * plan.gpu_memory:.9g}" if plan.device == "gpu" else "cpu"
    model = f"d{c.L}" if c.T == plan.T else f"gpt2 --layers {c.L}" # gpt2 brings its positions with it
    recompute = "block" if plan.again else "none"
    words = words or f"--total-batch-size {tokens} --recompute {recompute} {' '.join(told(plan, name))}"
    return ask_program(TECHNIQUES[name].program, "bf16" if plan.precision == "fp16" and name not in OWN_FP16 else plan.precision,
                       f"--predict {plan.N} --predict-device {device} --model {model} --channels {c.C} --heads {c.NH}"
                       f" --vocab-size {c.V} --seq-len {plan.T} --batch-size {plan.B} {words}")


# ---- their answers ----
# memory: bytes of a rank by kind, without kinds of 0 bytes; of the layers' workspace only wte's fp32 sums count. total: their sum.
# sent: bytes that the rank sends in a step, in muon the rank that sends most; mean: of all ranks; along: in 3d, by axis.
Bytes = namedtuple("Bytes", "memory total sent mean along")


def all_ranks(plan, name):
    """Bytes of a rank of each pipeline stage; in muon of rank 0, which keeps most."""
    def sent(rank):
        if name not in MUONS: return rank["sent"], rank["sent"]
        more, shards = answer_of(plan, name)["more"], bytes_of(plan, zero_of(name)).sent
        return shards + more["sent_most"], shards + more["sent_mean"]
    return [Bytes(rank["bytes"], sum(rank["bytes"].values()), *sent(rank), rank.get("sent_along", {}))
            for rank in answer_of(plan, name)["ranks"]]


def extreme_rank(plan, name, most=True):
    """The first rank of a pipeline that keeps most, or least."""
    totals = [b.total for b in all_ranks(plan, name)]
    return totals.index((max if most else min)(totals))


def own_rank(plan, name="pp"): return extreme_rank(plan, name) if plan.rank < 0 else plan.rank
def bytes_of(plan, name): return all_ranks(plan, name)[own_rank(plan, name)]
def total_of(plan, name): return bytes_of(plan, name).total
# Bytes that N ranks together send per step: a whole number, although one rank's share need not be.
def sent_of_all(plan, name): return math.floor(bytes_of(plan, name).mean * plan.N + 0.5)


def zero_of(name): return name.replace("muon", "zero") # what shards like it


def divides(plan, name):
    """Whether ranks can share a replica of the model this way; otherwise the program refuses and says why."""
    s, t, p, c = plan.shape, plan.t, plan.p, plan.c
    if name == "tp": return all(n % t == 0 for n in (plan.N, s.NH, s.Vp, plan.tokens_of if plan.rows else 0))
    if name == "pp":
        fits = plan.schedule != "interleaved" or plan.accumulation % p == 0
        return plan.N % p == 0 and p * plan.v <= s.L and fits and not (plan.again and plan.schedule == "zb-h1")
    chunks = c * (2 if plan.balance == "zigzag" else 1)
    return plan.N % c == 0 and plan.T % chunks == 0 and (plan.how != "ulysses" or s.NH % c == 0)


# ---- build/schedule_order's answers about pipelines ----
def split(plan, text=None):
    """"blocks" of each part of the model, and "efficiency": the share of the time in which ranks compute if there is no bubble."""
    s = plan.shape
    return schedule_play.ask_player(PLAYER, split=text or plan.split, p=plan.p, v=plan.v, L=s.L, Vp=s.Vp, C=s.C)


def blocks_of(plan, rank): return sum(split(plan)["blocks"][rank::plan.p])


def play(plan, times, message):
    """The step of "ranks", with their actions in "boxes": [kind, micro-batch, part, begin, end], and the formula's "bubble" of a
    balanced pipeline. times: (F, I, W) of each part of the model; message: seconds between two ranks."""
    pipeline = schedule_play.Pipeline(plan.schedule, plan.p, plan.accumulation, plan.v)
    return schedule_play.play(PLAYER, pipeline, [sum(part[k] / plan.p for part in times) for k in range(3)], times, message=message)


# The most activations of a (micro-batch, part) that are alive at a time.
def slots(plan, rank): return play(plan, ((0, 0, 0),) * (plan.p * plan.v), 0)["ranks"][rank]["slots"]
