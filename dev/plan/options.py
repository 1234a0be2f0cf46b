"""The options of build/plan: their table, what a device or node says of those that are not given, which do not go together, and the
run that they describe."""
import math, re
from tool import SIZES, choice, parse_options, real, require, switch, text, whole
from machines import ALL_REDUCE, GPUS, LINKS, MEASURED, NODES, Network, link_of, open_link, passes, this_machine
from shapes import SHAPES, Shape, is_gpt2
from questions import CP, FSDP, MAX_BLOCKS, MESH, PP, SCHEDULES, TP, ZEROPP, Plan, answer_of, bytes_of, model_of
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
    whole("total-batch-size", 0, 0, 1e15, "tokens per step of all ranks, so that more ranks do less each; 0: --accumulation says it"),
    choice("recompute", "none", "none|block|full", "for the times; bytes are printed for both; full: all of a block, as papers count"),
    "Ranks, and how they divide the work (bytes of the first five strategies are always printed)",
    whole("ranks", 8, 1, 1 << 20, "number of ranks, N"),
    whole("tensor-parallel", 0, 0, 1 << 20, "neighbouring ranks that share a replica of the model and a micro-batch; 0: 1, 2, 4 and 8"),
    switch("sequence-parallel", "they also cut the rows of layernorms and of the residual stream"),
    whole("pipeline-parallel", 0, 0, MAX_BLOCKS, "neighbouring ranks that each have some blocks of a copy; 0: 2, 4 and 8"),
    choice("schedule", "1f1b", "|".join(SCHEDULES), "of one pipeline; not given: all four are compared"),
    whole("chunks", 0, 0, MAX_BLOCKS, "parts of the model on each rank; 0: 2 if interleaved, else 1"),
    text("split", "auto", "auto|N,N,...", "blocks of each part; auto: such that ranks take about equal times"),
    whole("context-parallel", 0, 0, 1 << 20, "neighbouring ranks that share each sequence and micro-batch; 0: 2, 4 and 8"),
    choice("cp", "ulysses", "ulysses|allgather|ring", "what their attention exchanges; not given: all ways are compared of one"
           " --context-parallel"),
    choice("cp-balance", "contiguous", "contiguous|zigzag", "which tokens of a sequence they have, with --cp allgather or ring"),
    text("mesh", "", "dp=N,tp=N,pp=N|all", "only this mesh of train_gpt2_3d: how many of --ranks are along each axis; all: search the best of"
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
    choice("cpu-offload", "none", "none|optimizer|all", "what is kept on the host, where AdamW then runs"),
    whole("node-ranks", 0, 0, 1 << 20, "also the column zero++: ranks of a node, as train_gpt2_zeropp's option of this name; 0: no such"
          " column"),
    real("host-link", 31.5e9, 1, 1e15, "bytes/s between a device and its host, with --cpu-offload; the default is PCIe 4.0 x16"),
    real("host-bandwidth", 51.2e9, 1, 1e15,
         "bytes/s of host memory for a rank's AdamW, with --cpu-offload; the default is an eighth of a DGX A100's"),
    "Compressed gradients beside ddp, as train_gpt2_compress's options of these names",
    choice("compress", "none", "|".join(METHODS) + "|all", "how the gradients of matrices travel; all: only a table of the methods"),
    switch("error-feedback", "keep what was not sent; default: on for int4 and powersgd"),
    real("top-k-fraction", 0.01, 1e-6, 1, "share of a matrix's elements that top-k sends"),
    whole("rank", 4, 1, 1024, "rank of powersgd's matrices"),
    real("bucket-mb", 25, 1e-6, 1e6, "MiB of gradients per bucket"),
    real("communication-ms", 0, 0, 1e9, "ms in which ranks sum all gradients whole; all others take by their bytes. 0: from the links"),
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
    real("efficiency", 1, 1e-3, 1, "the share of the links' bandwidth that collectives reach"),
    real("sm-share", 0, 0, 1, "the share of a device's processors that communication takes from compute"),
    "Cost of a run",
    real("tokens", 0, 0, 1e18, "of the whole run, which gives hours and GPU-hours; 0: no cost"),
    real("price", 0, 0, 1e6, "of a GPU for an hour, in any currency; 0: none"),
    real("watts", 0, 0, 1e6, "of a GPU, for kWh; 0: --gpu's at most"),
    "Other questions, and how answers are printed",
    switch("validate", "compare predictions with what others have published"),
    switch("json", "all tables as one JSON object; bytes and seconds"),
    switch("exact", "print all digits of bytes"),
]


def parse():
    o = parse_options("plan", "predict bytes per rank and seconds per step of a model on many ranks, by formula", OPTIONS)
    o.compares = o.pipeline_parallel > 0 and "schedule" not in o.given and o.split == "auto" # all schedules
    o.compares_cp = o.context_parallel > 0 and not {"cp", "cp-balance"} & o.given
    if "seq-len" not in o.given and o.model in SHAPES: o.seq_len = SHAPES[o.model].T
    if o.mesh == "all": # a step of a usual size
        o.total_batch_size = o.total_batch_size or max(524288, o.ranks * o.seq_len)
    take_device(o)
    check(o)
    return o


# ---- the device: o.device_gpu, and what it says of everything that is not given ----
def gpu_of(o):
    """None: nothing is known of it."""
    require(o.node in ("", *NODES), f"--node {o.node} is not known; give one of {', '.join(NODES)}")
    if o.node:
        name, per_node, nics, nic = NODES[o.node]
        require(o.gpu in ("", name), f"--node {o.node} has {name}, not --gpu {o.gpu}; leave out one of the two")
        return GPUS[name]._replace(per_node=per_node, nics=nics, nic=nic)
    if o.here: return this_machine(o.measured)
    require(o.gpu in ("", *GPUS), f"--gpu {o.gpu} is not known; give one of {', '.join(GPUS)}")
    return GPUS.get(o.gpu)


def take_device(o):
    needs(o, "cluster measured", o.here, "is for --here; give it as well")
    require(not o.here or not {"gpu", "node"} & o.given, "--here has this machine's CPU; leave out --gpu and --node")
    o.measured = o.measured or MEASURED[o.cluster]
    gpu = o.device_gpu = gpu_of(o)
    o.direct = False
    if gpu: take_gpu(o, gpu)
    is_h100 = not gpu and o.device == "gpu" and o.compute_ms == 0 and "peak-flops" not in o.given # its peak is taken
    memory = 1e9 * o.memory or (gpu.memory if gpu else GPUS["h100"].memory if is_h100 else math.inf)
    o.gpu_memory = memory if memory < math.inf else Plan._field_defaults["gpu_memory"]
    o.room = memory - 1e9 * o.reserve # bytes that a rank can use; inf: not known
    o.shares_room = o.memory == 0 and gpu is not None and gpu.peak16 == 0 # all ranks together, because they are on this machine
    o.room_of = f"{o.memory:.4g} GB" if o.memory > 0 else gpu.name if gpu else "an h100"
    require(o.room > 0, f"--reserve {o.reserve:g} leaves nothing of {1e-9 * memory:.4g} GB; lower it")


def take_gpu(o, gpu):
    is_here, is_measured = gpu.peak16 == 0, gpu.peak16 == 0 and gpu.peak32 > 0
    require(not is_here or is_measured or (o.compute_ms > 0 and "link" in o.given),
            f"--here knows only the memory, because there is no {o.measured}: measure a micro-batch and the link, and give --compute-ms"
            f" and --link FILE, or let python3 dev/plan/here.py{' --cluster' * o.cluster} measure")

    def take(**values): vars(o).update({name: x for name, x in values.items() if name.replace("_", "-") not in o.given})
    if is_here: take(device="cpu")
    if is_measured: # between ranks of a node communication takes the time of a core that computes, between nodes it waits
        take(precision="fp32", mfu=gpu.mfu, sm_share=0.0 if gpu.per_node else 1.0)
        o.direct = gpu.per_node > 0
    if is_measured or not is_here: take(link=gpu.link, nics=gpu.nics)
    if gpu.per_node or not is_here: take(inter_link=gpu.nic)
    take(peak_flops=peak_at(gpu, o.precision), memory_bandwidth=gpu.update or gpu.bandwidth, ranks_per_node=gpu.per_node, watts=gpu.watts)
    require(not is_measured or o.precision == "fp32" or o.compute_ms > 0 or "peak-flops" in o.given,
            f"--here has measured fp32, not {o.precision}: give --compute-ms as well")


def room_of(o, N): return o.room / N if o.shares_room else o.room
def peak_at(gpu, precision): return gpu.peak32 if precision == "fp32" else gpu.peak16


# FLOP/s; NaN: not known. If nothing is said of the device it is an H100.
def peak_of(o): return o.peak_flops or (math.nan if o.compute_ms > 0 else peak_at(GPUS["h100"], o.precision))


# ---- checks ----
OF_MODEL = "model layers heads channels vocab-size json"
OF_DEVICE = "ranks gpu node here cluster measured memory reserve json"
OF_MESHES = f"mesh {OF_MODEL} {OF_DEVICE} seq-len total-batch-size tokens price watts exact"
OF_PROGRAMS = ("context-parallel cp cp-balance sharding shard-group wrap-blocks wrap-halves limit-all-gathers reduce-dtype cpu-offload"
               " node-ranks compress")


def forbid(o, names, others, question, why):
    """Dies if one of names (or, with others, an option that is none of them) is given beside --question."""
    for name in (option.name for option in OPTIONS if not isinstance(option, str)):
        require(name not in o.given or (name in names.split()) == others,
                f"--{name} cannot be used with --{question}, which {why}; leave one of the two out")


def needs(o, names, holds, why):
    """Dies if one of names is given, though what it needs does not hold."""
    for name in names.split(): require(holds or name not in o.given, f"--{name} {why}")


def check(o):
    # what the tables of strategies need and other questions do not take
    if o.mesh == "all": forbid(o, OF_MESHES, True, "mesh all", "tries all of them")
    elif o.validate: forbid(o, "validate reserve json", True, "validate", "takes those of each published row")
    elif o.params > 0: forbid(o, f"params master precision {OF_DEVICE}", True, "params", "describes a model of unknown shape")
    # model and batch
    total = f"--total-batch-size {o.total_batch_size}"
    require(o.params == 0 or o.params >= 1, f"--params must be at least 1, not {o.params:g}")
    needs(o, "master", o.params > 0, "is for --params: our programs always keep an fp32 copy of 16-bit weights; leave it out")
    needs(o, "master", o.precision != "fp32", "cannot be used with --precision fp32, whose weights are the master copy")
    require(o.compute_ms == 0 or not {"peak-flops", "mfu"} & o.given,
            "--compute-ms replaces --peak-flops and --mfu: give either that or these")
    require(o.total_batch_size == 0 or "accumulation" not in o.given,
            f"{total} decides how many micro-batches a step has; leave out --accumulation")
    require(o.total_batch_size % o.seq_len == 0, f"{total} is no multiple of --seq-len {o.seq_len}; choose one that is")
    needs(o, "price watts", o.tokens > 0, "is for the cost of a run; give its --tokens as well")
    # ranks
    if o.mesh: forbid(o, OF_PROGRAMS, False, "mesh", "is train_gpt2_3d, without fsdp, cp and compression")
    needs(o, "host-link host-bandwidth", o.cpu_offload != "none", "is for --cpu-offload; give it as well")
    require(o.shard_group <= o.ranks, f"--shard-group {o.shard_group} is more than the {o.ranks} ranks; lower it, or raise --ranks")
    needs(o, "top-k-fraction", o.compress in ("all", "top-k"), "is for --compress top-k; give it as well")
    needs(o, "rank", o.compress in ("all", "powersgd"), "is for --compress powersgd; give it as well")
    require(o.compress != "none" or not {"error-feedback", "bucket-mb", "communication-ms"} & o.given,
            "--error-feedback, --bucket-mb and --communication-ms are for --compress; give it as well")
    require(o.communication_ms == 0 or o.ranks > 1,
            f"--communication-ms {o.communication_ms:g}: one rank sends nothing; raise --ranks")
    # links
    needs(o, "nics inter-link", o.ranks_per_node > 0,
          "is about nodes, and --ranks-per-node 0 says that there is one; give --ranks-per-node as well")
    # pipelines
    one = o.pipeline_parallel > 0 or o.mesh
    require(not o.mesh or not {"tensor-parallel", "pipeline-parallel"} & o.given,
            f"--mesh {o.mesh} has tensor and pipeline parallelism; leave out --tensor-parallel and --pipeline-parallel")
    require(o.mesh or "zero-stage" not in o.given, "--zero-stage is for --mesh; give it as well")
    require(one or o.split == "auto", f"--split {o.split} is for one number of ranks; give --pipeline-parallel as well")
    require(not one or o.accumulation <= PLAYED_MICRO_BATCHES, f"--accumulation {o.accumulation}: a pipeline is played with"
            f" {PLAYED_MICRO_BATCHES} micro-batches at most, and its bubble is short by then; lower it")
    require(one or "schedule" in o.given or o.chunks == 0, f"--chunks {o.chunks} is for --schedule interleaved; give it as well")


# ---- the run that they describe ----
def shape_of(o):
    """A published shape or a dN, with the numbers that are given in place of its own."""
    d = int(o.model[1:]) if re.fullmatch("d[0-9]{1,3}", o.model) else 0
    require(o.model in SHAPES or 1 <= d <= MAX_BLOCKS,
            f"--model {o.model} is not known: dN with N from 1 to {MAX_BLOCKS}, {', '.join(SHAPES)}")
    s = SHAPES.get(o.model) or Shape(o.model, d, 64 * d, d, 257, 0)
    require(o.mesh == "all" or not s.llama, f"--model {o.model} has grouped queries, a gated MLP and an untied head, which no program of this"
            " course has: only --mesh all plans it")
    require(not s.llama or not (o.layers or o.heads or o.channels or o.vocab_size),
            f"--model {o.model}: --layers, --heads, --channels and --vocab-size are for models with GPT-2's blocks")
    s = s._replace(L=o.layers or s.L, NH=o.heads or s.NH, C=o.channels or s.C, V=o.vocab_size or s.V)
    require(s.C % s.NH == 0, f"--model, --layers, --heads, --channels, --vocab-size: {s.C} channels do not divide over {s.NH} heads")
    if not (is_gpt2(s) if o.mesh == "all" else o.model.startswith("gpt2")): # the search takes a changed gpt2 as a dN
        s = s._replace(T=o.seq_len)
    require(o.seq_len <= s.T, f"--seq-len {o.seq_len} is longer than the {s.T} positions of {o.model}; lower it or choose a model with"
            " more")
    return s


def with_pipe(o, plan, p, schedule):
    """How p ranks are planned with a schedule."""
    v = o.chunks if o.chunks > 0 and (schedule == "interleaved" or not o.compares) else 2 if schedule == "interleaved" else 1
    return plan._replace(p=p, schedule=schedule, v=v, split=o.split, accumulation=o.accumulation or p, t=1)


def with_context(plan, c, how, balance): return plan._replace(c=c, how=how, balance=balance, t=1)


def with_mesh(o, plan):
    """The mesh that --mesh asks for: train_gpt2_3d says how many ranks are along each axis."""
    found = answer_of(plan, MESH, f"{model_of(plan)} --mesh {o.mesh}")
    axes = found["axes"]
    outside = len(found["ranks"]) > 1 and found["ranks"][1]["rank"] > axes["tp"]
    return with_pipe(o, plan, axes["pp"], o.schedule)._replace(t=axes["tp"], zero_stage=o.zero_stage, pp_outside=outside)


def with_compression(o, plan, method):
    feedback = o.error_feedback if "error-feedback" in o.given else None
    return plan._replace(method=method, feedback=feedback, fraction=o.top_k_fraction, low_rank=o.rank, bucket_mb=o.bucket_mb)


def plan_of(o):
    """Dies, in the programs' words, if they cannot be run so. These errors come before any table."""
    plan = Plan(shape_of(o), o.batch_size, o.seq_len, o.ranks, o.precision, o.accumulation or 1, False, False, o.device == "gpu",
                o.memory_bandwidth, o.limit_all_gathers, o.wrap_blocks, o.sharding, o.shard_group, o.reduce_dtype, o.cpu_offload,
                o.host_link, o.host_bandwidth, o.tensor_parallel or 1, o.sequence_parallel,
                wrap_halves=o.wrap_halves, node_ranks=o.node_ranks, gpu_memory=o.gpu_memory)
    if o.mesh: bytes_of(with_mesh(o, plan), MESH)
    else:
        bytes_of(plan, FSDP)
        bytes_of(plan, TP)
        if o.node_ranks: bytes_of(plan, ZEROPP)
        if o.context_parallel: bytes_of(with_context(plan, o.context_parallel, "ring" if o.compares_cp else o.cp, o.cp_balance), CP)
        if o.pipeline_parallel: bytes_of(with_pipe(o, plan, o.pipeline_parallel, o.schedule), PP)
    return plan._replace(recompute=o.recompute != "none", full=o.recompute == "full")


def network_of(o, plan):
    if o.communication_ms > 0: # one link that is so fast that `plan` takes so long to sum all gradients, whatever the messages
        nbytes = float(plan.shape.elements() * plan.X) * (plan.N - 1) / plan.N
        link = link_of(0.0, passes(ALL_REDUCE) * nbytes / (1e-3 * o.communication_ms))
        return Network(link, link, sm_share=o.sm_share)
    return Network(open_link(o.link, True), open_link(o.inter_link), o.ranks_per_node, o.nics or o.ranks_per_node, o.direct, o.efficiency,
                   o.sm_share)
