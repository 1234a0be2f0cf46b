"""The options of build/plan: their table, what a device or node says of those that are not given, which do not go together, and the
run that they describe."""
import math, re
from tool import SIZES, choice, parse_options, real, require, switch, text, whole
from machines import ALL_REDUCE, GPUS, LINKS, MEASURED, NODES, Network, link_of, open_link, passes, this_machine
from shapes import SHAPES, Shape, is_gpt2
from questions import (CP, FSDP, MAX_BLOCKS, MESH, OPTIONS_OF_METHOD, PP, SCHEDULES, TP, ZEROPP, Plan, answer_of, bytes_of,
                       field_of)
from steps import METHODS

MOST_MICRO_BATCHES, PLAYED_MICRO_BATCHES = 1 << 16, 4096 # in a step of data parallelism; of a pipeline
OPTIONS = [
    "Model and batch",
    text("model", "d4", "NAME", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-*, or dN: N layers, 64N channels, N heads; with"
         " --mesh all also llama*", "m"),
    *SIZES,
    real("params", 0, 0, 1e15, "number of parameters, if no shape is known; 0: --model's"),
    choice("precision", "bf16", "fp32|bf16|fp16", "of parameters, gradients and activations"),
    choice("master", "on", "on|off", "off: no fp32 copy of 16-bit weights; only with --params"),
    whole("seq-len", 128, 1, 1 << 20, "tokens per sequence, T; default for a model given by name: its whole context", "t"),
    whole("batch-size", 16, 1, 1 << 20, "sequences per rank and micro-batch, B", "b"),
    whole("accumulation", 0, 0, MOST_MICRO_BATCHES,
          "micro-batches per step of a replica of the model; 0: 1, or in a pipeline one per rank of it"),
    whole("total-batch-size", 0, 0, 1e15,
          "tokens per step of all ranks, so that more ranks do less each; 0: --accumulation says it"),
    choice("recompute", "none", "none|block|full",
           "for the times; bytes are printed for both; full: all of a block, as papers count"),
    "Ranks, and how they divide the work (bytes of the first five strategies are always printed)",
    whole("ranks", 8, 1, 1 << 20, "number of ranks, N"),
    whole("tensor-parallel", 0, 0, 1 << 20,
          "neighbouring ranks that share a replica of the model and a micro-batch; 0: 1, 2, 4 and 8"),
    switch("sequence-parallel", "they also cut the rows of layernorms and of the residual stream"),
    whole("pipeline-parallel", 0, 0, MAX_BLOCKS, "neighbouring ranks that each have some blocks of a copy; 0: 2, 4 and 8"),
    choice("schedule", "1f1b", "|".join(SCHEDULES), "of one pipeline; not given: all four are compared"),
    whole("chunks", 0, 0, MAX_BLOCKS, "parts of the model on each rank; 0: 2 if interleaved, else 1"),
    text("split", "auto", "auto|N,N,...", "blocks of each part; auto: such that ranks take about equal times"),
    whole("context-parallel", 0, 0, 1 << 20, "neighbouring ranks that share each sequence and micro-batch; 0: 2, 4 and 8"),
    choice("cp", "ulysses", "ulysses|allgather|ring", "what their attention exchanges; not given: all ways are compared of one"
           " --context-parallel"),
    choice("cp-balance", "contiguous", "contiguous|zigzag", "which tokens of a sequence they have, with --cp allgather or ring"),
    text("mesh", "", "dp=N,tp=N,pp=N|all",
         "only this mesh of train_gpt2_3d: how many of --ranks are along each axis; all: search the best of"
         " --model on --ranks of --gpu, with every ZeRO stage, recomputation and micro-batch; '': none"),
    whole("zero-stage", 0, 0, 1, "of --mesh: what is sharded over dp, 0 nothing, 1 optimizer state"),
    "The column fsdp, as train_gpt2_fsdp's options of these names",
    choice("sharding", "full", "full|grad-op|hybrid",
          "full: freed after each use; grad-op: kept until the backward pass; hybrid: full in groups"),
    whole("shard-group", 0, 0, 1 << 20, "ranks that hold one replica of the model; with --sharding hybrid"),
    whole("wrap-blocks", 1, 0, MAX_BLOCKS, "blocks gathered at a time; 0: the whole model"),
    switch("wrap-halves", "a block's attention and its MLP are gathered apart"),
    whole("limit-all-gathers", 2, 1, 256, "such groups that may be gathered at a time, besides the root"),
    choice("reduce-dtype", "fp32", "fp32|model", "the precision in which gradients are sent and added"),
    whole("node-ranks", 0, 0, 1 << 20,
          "also the column zero++: ranks of a node, as train_gpt2_zeropp's option of this name; 0: none"),
    "Compressed gradients beside ddp, as train_gpt2_compress's options of these names",
    choice("compress", "none", "|".join(METHODS) + "|all",
           "how the gradients of matrices travel; all: only a table of the methods"),
    switch("error-feedback", "keep what was not sent; default: on for int4 and powersgd"),
    real("top-k-fraction", 0.01, 1e-6, 1, "share of a matrix's elements that top-k sends"),
    whole("rank", 4, 1, 1024, "rank of powersgd's matrices"),
    real("bucket-mb", 25, 1e-6, 1e6, "MiB of gradients per bucket"),
    real("communication-ms", 0, 0, 1e9,
         "ms in which ranks sum all gradients whole; all others take by their bytes. 0: from the links"),
    "Device",
    text("gpu", "", "|".join(GPUS), "peak, memory and its bandwidth, links and nodes, where not given; '': none"),
    switch("here", "this machine's CPU, of which python3 dev/plan/here.py has measured what --gpu says of others"),
    switch("cluster", "with --here: the cluster on this machine (dev/cluster), which here.py --cluster has measured"),
    text("measured", "", "FILE", f"what here.py wrote; '': {MEASURED[False]}, or {MEASURED[True]}"),
    text("node", "", "NAME", f"machine: {', '.join(NODES)}; '': none"),
    choice("device", "gpu", "gpu|cpu", "which program: NCCL or MPI, and how many logits it keeps"),
    real("memory", 0, 0, 1e9, "GB of a rank's device; 0: --gpu's, or several in the tables"),
    real("reserve", 2, 0, 1e6, "GB of it that a rank cannot use: context, NCCL, fragmentation"),
    real("peak-flops", 0, 0, 1e18, "dense FLOP/s of a rank's device; 0: an H100's, 989e12, fp32 67e12"),
    real("mfu", 0.4, 1e-6, 1, "the share of --peak-flops that one rank alone reaches"),
    real("compute-ms", 0, 0, 1e9, "measured ms of a micro-batch on one rank; 0: from peak and MFU"),
    real("memory-bandwidth", 0, 0, 1e15,
         "bytes/s of a device's memory, for AdamW's 28 bytes a parameter; 0: it takes no time"),
    "Links",
    text("link", "nvlink", "NAME|FILE", f"inside a node: {', '.join(LINKS)}; FILE: from comm_bench --json"),
    text("inter-link", "infiniband", "NAME|FILE", "the same between nodes"),
    whole("ranks-per-node", 8, 0, 1 << 20, "ranks in each node; 0: all are in one node"),
    whole("nics", 0, 0, 1 << 20, "network interfaces of each node; 0: one for each rank"),
    "Cost of a run",
    real("tokens", 0, 0, 1e18, "of the whole run, which gives hours and GPU-hours; 0: no cost"),
    real("price", 0, 0, 1e6, "of a GPU for an hour, in any currency; 0: none"),
    "Other questions, and how answers are printed",
    switch("validate", "compare predictions with what others have published"),
    switch("json", "all tables as one JSON object; bytes and seconds"),
    switch("exact", "print all digits of bytes"),
]


NAMES = [option.name for option in OPTIONS if not isinstance(option, str)]


def parse():
    o = parse_options("plan", "predict bytes per rank and seconds per step of a model on many ranks, by formula", OPTIONS)
    o.compares = o.pipeline_parallel > 0 and "schedule" not in o.given and o.split == "auto" # all schedules
    o.compares_cp = o.context_parallel > 0 and not {"cp", "cp-balance"} & o.given
    if "seq-len" not in o.given and o.model in SHAPES: o.seq_len = SHAPES[o.model].T
    if o.mesh == "all": # a step of a usual size
        o.total_batch_size = o.total_batch_size or max(524288, o.ranks * o.seq_len)
    check(o)
    take_device(o)
    return o


# ---- which options go together ----
OF_MODEL = "model layers heads channels vocab-size json"
OF_DEVICE = "ranks gpu node here cluster measured memory reserve json"
OF_PROGRAMS = ("context-parallel cp cp-balance sharding shard-group wrap-blocks wrap-halves limit-all-gathers reduce-dtype"
               " node-ranks compress tensor-parallel pipeline-parallel")
ONLY = { # a question, and all that it takes
    "mesh all": f"mesh {OF_MODEL} {OF_DEVICE} seq-len total-batch-size tokens price exact", "validate": "validate reserve json",
    "params": f"params master precision {OF_DEVICE}"}
NEVER = {"mesh": OF_PROGRAMS, "here": "gpu node", "compute-ms": "peak-flops mfu", "total-batch-size": "accumulation"}
NEEDS = ( # options, and others of which one must be given, or have such a value
    ("master", "params"), ("cluster measured", "here"), ("price", "tokens"), ("zero-stage", "mesh"),
    ("split", "pipeline-parallel mesh"), ("nics inter-link", "ranks-per-node"),
    ("error-feedback bucket-mb communication-ms", "compress"),
    *((option, "compress", method, "all") for method, option in OPTIONS_OF_METHOD.items()))


def check(o):
    def value(name): return getattr(o, name.replace("-", "_"))
    asked = [name for name in (*NEVER, *ONLY) if (o.mesh == "all" if name == "mesh all" else value(name) not in ("", 0, False))]
    for question in asked:
        for name in sorted(o.given, key=NAMES.index):
            require(name in ONLY[question].split() if question in ONLY else name not in NEVER[question].split(),
                    f"--{name} cannot be used with --{question}; leave one of the two out")
    for names, others, *values in NEEDS:
        holds = any(value(other) in values if values else value(other) not in ("", "none", 0, False) for other in others.split())
        for name in names.split():
            require(holds or name not in o.given, f"--{name} is for --{' '.join([others.replace(' ', ' or --'), *values[:1]])};"
                    " give it as well")
    require(o.precision != "fp32" or "master" not in o.given,
            "--master is for 16 bits: weights in fp32 are the master copy; leave it out")
    require(o.total_batch_size % o.seq_len == 0,
            f"--total-batch-size {o.total_batch_size} is no multiple of --seq-len {o.seq_len}; choose one that is")
    require(o.communication_ms == 0 or o.ranks > 1,
            f"--communication-ms {o.communication_ms:g}: one rank sends nothing; raise --ranks")
    require(not (o.pipeline_parallel or o.mesh) or o.accumulation <= PLAYED_MICRO_BATCHES,
            f"--accumulation {o.accumulation}: a pipeline is played with {PLAYED_MICRO_BATCHES} micro-batches at most, and its "
            "bubble"
            " is short by then; lower it")


# ---- the device: o.device_gpu, and what it says of everything that is not given ----
def gpu_of(o):
    """None: nothing is known of it."""
    require(o.node in ("", *NODES), f"--node {o.node} is not known; give one of {', '.join(NODES)}")
    require(o.gpu in ("", *GPUS), f"--gpu {o.gpu} is not known; give one of {', '.join(GPUS)}")
    if o.here: return this_machine(o.measured or MEASURED[o.cluster])
    if not o.node: return GPUS.get(o.gpu)
    name, per_node, nics, nic = NODES[o.node]
    require(o.gpu in ("", name), f"--node {o.node} has {name}, not --gpu {o.gpu}; leave out one of the two")
    return GPUS[name]._replace(per_node=per_node, nics=nics, nic=nic)


def take_device(o):
    gpu = o.device_gpu = gpu_of(o)
    def take(**values): vars(o).update({name: x for name, x in values.items() if name.replace("_", "-") not in o.given})
    if o.here: take(device="cpu", precision="fp32", mfu=gpu.mfu)
    if gpu and gpu.per_node: take(inter_link=gpu.nic)
    if gpu: take(link=gpu.link, nics=gpu.nics, peak_flops=peak_at(gpu, o.precision), memory_bandwidth=gpu.update or gpu.bandwidth,
                 ranks_per_node=gpu.per_node)
    require(not o.here or o.precision == "fp32" or o.compute_ms > 0 or "peak-flops" in o.given,
            f"--here has measured fp32, not {o.precision}: give --compute-ms as well")
    # between ranks of a machine communication takes the time of a core that computes, between nodes it waits
    o.direct, o.sm_share = o.here and gpu.per_node > 0, float(o.here and gpu.per_node == 0)
    is_h100 = not gpu and o.device == "gpu" and o.compute_ms == 0 and "peak-flops" not in o.given # its peak is taken
    memory = 1e9 * o.memory or (gpu.memory if gpu else GPUS["h100"].memory if is_h100 else math.inf)
    o.gpu_memory = memory if memory < math.inf else Plan._field_defaults["gpu_memory"]
    o.room = memory - 1e9 * o.reserve # bytes that a rank can use; inf: not known
    o.shares_room = o.here and o.memory == 0 # all ranks together, because they are on this machine
    o.room_of = f"{o.memory:.4g} GB" if o.memory > 0 else gpu.name if gpu else "an h100"
    require(o.room > 0, f"--reserve {o.reserve:g} leaves nothing of {1e-9 * memory:.4g} GB; lower it")


def room_of(o, N): return o.room / N if o.shares_room else o.room
def peak_at(gpu, precision): return gpu.peak32 if precision == "fp32" else gpu.peak16


# FLOP/s; NaN: not known. If nothing is said of the device it is an H100.
def peak_of(o): return o.peak_flops or (math.nan if o.compute_ms > 0 else peak_at(GPUS["h100"], o.precision))


# ---- the run that they describe ----
def shape_of(o):
    """A published shape or a dN, with the numbers that are given in place of its own."""
    d = int(o.model[1:]) if re.fullmatch("d[0-9]{1,3}", o.model) else 0
    require(o.model in SHAPES or 1 <= d <= MAX_BLOCKS,
            f"--model {o.model} is not known: dN with N from 1 to {MAX_BLOCKS}, {', '.join(SHAPES)}")
    s = SHAPES.get(o.model) or Shape(o.model, d, 64 * d, d, 257, 0)
    require(o.mesh == "all" or not s.llama,
            f"--model {o.model} has grouped queries, a gated MLP and an untied head, which no program of this"
            " course has: only --mesh all plans it")
    require(not s.llama or not (o.layers or o.heads or o.channels or o.vocab_size),
            f"--model {o.model}: --layers, --heads, --channels and --vocab-size are for models with GPT-2's blocks")
    s = s._replace(L=o.layers or s.L, NH=o.heads or s.NH, C=o.channels or s.C, V=o.vocab_size or s.V)
    require(s.C % s.NH == 0,
            f"--model, --layers, --heads, --channels, --vocab-size: {s.C} channels do not divide over {s.NH} heads")
    if not (is_gpt2(s) if o.mesh == "all" else o.model.startswith("gpt2")): # the search takes a changed gpt2 as a dN
        s = s._replace(T=o.seq_len)
    require(o.seq_len <= s.T,
            f"--seq-len {o.seq_len} is longer than the {s.T} positions of {o.model}; lower it or choose a model with"
            " more")
    return s


def with_pipe(o, plan, p, schedule):
    """How p ranks are planned with a schedule."""
    v = o.chunks if o.chunks > 0 and (schedule == "interleaved" or not o.compares) else 2 if schedule == "interleaved" else 1
    return plan._replace(p=p, schedule=schedule, v=v, split=o.split, accumulation=o.accumulation or p, t=1)


def with_context(plan, c, how, balance): return plan._replace(c=c, how=how, balance=balance, t=1)


def with_mesh(o, plan):
    """The mesh that --mesh asks for: train_gpt2_3d says how many ranks are along each axis."""
    found = answer_of(plan, MESH, f"--mesh {o.mesh}")
    axes = found["axes"]
    outside = len(found["ranks"]) > 1 and found["ranks"][1]["rank"] > axes["tp"]
    return with_pipe(o, plan, axes["pp"], o.schedule)._replace(t=axes["tp"], zero_stage=o.zero_stage, pp_outside=outside)


def plan_of(o):
    """Dies, in the programs' words, if they cannot be run so. These errors come before any table."""
    given = {field_of(name): getattr(o, name.replace("-", "_")) for name in (*NAMES, "gpu-memory")}
    own = dict(accumulation=o.accumulation or 1, recompute=False, gpu=o.device == "gpu", t=o.tensor_parallel or 1, method="none",
               feedback=o.error_feedback if "error-feedback" in o.given else None)
    later = ("p", "schedule", "v", "split", "zero_stage", "c", "how", "balance") # of some strategies
    plan = Plan(shape_of(o), **{name: x for name, x in (given | own).items() if name in Plan._fields and name not in later})
    recompute = o.recompute != "none"
    if o.mesh: bytes_of(with_mesh(o, plan)._replace(recompute=recompute), MESH)
    else:
        for strategy in (FSDP, TP, *[ZEROPP] * (o.node_ranks > 0)): bytes_of(plan, strategy)
        if o.context_parallel: bytes_of(with_context(plan, o.context_parallel, "ring" if o.compares_cp else o.cp, o.cp_balance), CP)
        if o.pipeline_parallel: bytes_of(with_pipe(o, plan, o.pipeline_parallel, o.schedule)._replace(recompute=recompute), PP)
    return plan._replace(recompute=recompute, full=o.recompute == "full")


def network_of(o, plan):
    if o.communication_ms > 0: # one link that is so fast that `plan` takes so long to sum all gradients, whatever the messages
        nbytes = float(plan.shape.elements() * plan.X) * (plan.N - 1) / plan.N
        link = link_of(0.0, passes(ALL_REDUCE) * nbytes / (1e-3 * o.communication_ms))
        return Network(link, link)
    return Network(open_link(o.link, True), open_link(o.inter_link), o.ranks_per_node, o.nics or o.ranks_per_node, o.direct,
                   o.sm_share)
