"""Seconds of a step of the programs that have no pipeline (doc/plan.md).

Overlap   is a timeline of two queues, compute and communication, each doing one thing at a time in order of issue. Time that compute
          waits is exposed. A unit is the root, a block or half of one. A third queue, "shared", has what a communicator of its own
          sends: activations of tensor or context parallelism, or the sums of shards over fsdp's replicas. Where context parallelism
          crosses nodes, both queues share a link, and what they send takes turns.
Compress  Packing comes before a message, beside backward, and unpacking after backward. The bytes that they read and write
          (llmc/device/compress_api.h) are divided by --memory-bandwidth.
"""
import math
from collections import namedtuple
from tool import ceil_div
from dev.plan.machines import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from dev.plan.plans import all_ranks, answer_of, copy_ranks


# ---- compute ----
class UnitSeconds(namedtuple("UnitSeconds", "block_forward block_backward head")):
    """In a micro-batch. block_backward has what is recomputed; head: the root's, both passes."""
    block_again = property(lambda self: self.block_backward - 2 * self.block_forward)

    def shared(self, ranks): return UnitSeconds(*(x / ranks for x in self))
    def model(self, L): return L * (self.block_forward + self.block_backward) + self.head


# FLOPs of a token: in a block, a third forward and two thirds backward; what a block recomputes, its forward pass without fcproj,
# whose output no backward pass needs (full: with it); all, including recomputed ones, which flops_per_token and so MFU leave out.
def block_flops(plan): return 6.0 * plan.shape.block() + 6.0 * plan.shape.C * plan.T
def attention_share(plan): return 6.0 * plan.shape.C * plan.T / block_flops(plan)
def flops_done(plan): return plan.shape.flops_per_token(plan.T) + plan.shape.L * again_flops(plan)


def again_flops(plan):
    fcproj = 8.0 * plan.shape.C ** 2 if plan.recompute == "block" else 0
    return block_flops(plan) / 3 - fcproj if plan.again else 0


def unit_seconds(plan, micro_batch_seconds):
    block, per_flop = block_flops(plan), micro_batch_seconds / flops_done(plan)
    return UnitSeconds(per_flop * block / 3, per_flop * (2 * block / 3 + again_flops(plan)),
                       per_flop * (plan.shape.flops_per_token(plan.T) - plan.shape.L * block))


class Timeline:
    """now: when compute has finished all it was given; arrived: when everything that a queue has sent so far will have arrived."""
    def __init__(self, communication=0.0, one_link=False):
        self.one_link = one_link # what is sent in parts that are followed takes turns with this timeline's own queue
        self.now = self.exposed = self.packing = 0.0
        self.arrived, self.communication = {"own": 0.0, "shared": 0.0}, communication

    def send(self, seconds, queue="own", since=0):
        """Returns when the message will have arrived, which leaves now, or at `since` if that is later."""
        self.arrived[queue] = max(self.arrived[queue], since, self.now) + seconds
        self.communication += seconds
        return self.arrived[queue]

    def pack(self, seconds): # or unpacks what travels
        self.now += seconds
        self.packing += seconds

    def wait(self, until):
        self.exposed += max(until - self.now, 0)
        self.now = max(until, self.now)

    def send_shared(self, seconds, since=0): return self.send(seconds, "shared", since)
    def wait_shared(self, *seconds): self.wait(max(map(self.send_shared, seconds)))
    def wait_all(self): self.wait(max(self.arrived.values()))

    def follow(self, part):
        """Does what another timeline has done from 0 on, at whose end all had arrived."""
        if self.one_link and self.arrived["own"] > self.now: self.arrived["own"] += part.communication
        self.now, self.exposed = self.now + part.now, self.exposed + part.exposed
        self.communication += part.communication


class StepTime(namedtuple("StepTime", "compute communication exposed seconds tokens compressing bubble formula tp",
                          defaults=(0, 0, float("nan"), 0))):
    """tokens: of all ranks; compressing: what it takes from compute; bubble: of a pipeline, without messages, so that exposed is
    what messages and sums add, and in cp how much more than the mean the busiest rank computes; formula: the bubble of equal
    stages, NaN if there is none; tp: of a mesh, what an average rank waits for inside its actions."""
    efficiency = property(lambda self: self.compute / self.seconds)
    tokens_per_s = property(lambda self: self.tokens / self.seconds)


# ---- compressed gradients ----
QUANTISE_BLOCK = 256 # elements of int8 and int4 that share a scale
PACKED_ROW = 4 * QUANTISE_BLOCK # a rank's shard is a multiple of it


# Gradients of 16 bits cannot be rounded to 16 bits: the program refuses then.
def is_possible(plan): return plan.X == 4 or plan.method != "bf16"
def touched_seconds(plan, nbytes): return nbytes / plan.memory_bandwidth if plan.memory_bandwidth > 0 else 0


def touched(plan, n, row):
    """Bytes that packing and unpacking n elements read and write, each array once a pass; of int4 and powersgd also an error, 4
    bytes, is read and written. row: all N parts, or N rows."""
    N, X, fed = plan.N, plan.X, 4 * (plan.method == "int4")
    return {"bf16": (n * (X + 2), n * (2 + X)),
            # fp32: a part's sum is written and read, and its error
            **dict.fromkeys(("int8", "int4"), (n * (X + 2 * fed) + row, 2 * row + row / N + 2 * n * (4 + fed) / N + n * X)),
            # the k largest take four passes for the digits of |x|, one that counts and one that sends
            "top-k": (n * (X + 28) + row / N, row + n * (8 + X)),
            "sign": (n * (X + 12) + row / N, row + n * X), # a pass for the scale, one for the signs
            "powersgd": (n * (X + 16), n * (8 + X))}[plan.method] # two products read x, and the last kernel as well


def segments_of(plan, w):
    """Of the root, and of all blocks: seconds of messages, and bytes that packing and unpacking read and write. An all-to-all takes
    as long as a reduce-scatter. A segment that is not compressed and has a buffer is copied into it and back."""
    found, method = [[0, 0, 0], [0, 0, 0]], plan.method
    for begin, n, sent, received, is_packed in answer_of(plan, "compress")["more"]: # bytes of its buffers
        if not is_packed: messages, touches = [(ALL_REDUCE, n * plan.X)], (2 * sent, 2 * sent)
        else:
            messages, touches = [(REDUCE_SCATTER, sent)] * (method in ("int8", "int4")), touched(plan, n, sent)
            if method == "powersgd": messages = [(ALL_REDUCE, (sent + received) / 2)] * 2
            else: messages.append((ALL_REDUCE, sent + received) if method == "bf16" else (ALL_GATHER, sent))
        more = sum(w.world_seconds(what, nbytes, plan.N) for what, nbytes in messages), *touches
        of = begin >= plan.shape.unit(0)
        found[of] = [x + y for x, y in zip(found[of], more)]
    return found


# ---- what a program gathers and reduces at a time ----
# How many blocks a unit has, halves of one by their FLOPs, and none in the root. Seconds of gathering, reducing, and summing a
# shard over the replicas of the model, or in zero++ over nodes (0: there is one); of compressing what is reduced; of unpacking
# weights that have been gathered; of exchanging updated shards.
Unit = namedtuple("Unit", "blocks gather reduce replicate packing unpacking exchange", defaults=(0, 0, 0, 0))


def unit_of(plan, name, w, blocks, elements):
    X, N, is_fsdp = plan.X, plan.N, name == "fsdp"
    if name == "ddp": return Unit(blocks, 0, w.world_seconds(ALL_REDUCE, float(elements) * X, N))
    if name == "zero++": return unit_of_nodes(plan, w, blocks, elements)
    shards = plan.shard_group if is_fsdp and plan.sharding == "hybrid" else N
    gradient = 4 if is_fsdp and plan.reduce_dtype == "fp32" else X
    shard, ranks = 16.0 * ceil_div(ceil_div(elements, shards), 16), w.neighbours(N, shards)
    return Unit(blocks, w.seconds(ALL_GATHER, shards * shard * X, ranks),
                w.seconds(REDUCE_SCATTER, shards * shard * gradient, ranks),
                w.seconds(ALL_REDUCE, shard * gradient, w.apart(N, shards)))


def unit_of_nodes(plan, w, blocks, elements):
    """Of zero++ (llmc/parallel/zeropp.h). All travels packed, also within a node."""
    X, g, K, scale = plan.X, plan.node_ranks, plan.N // plan.node_ranks, 4 / QUANTISE_BLOCK
    shard, weight, gradient = float(PACKED_ROW * ceil_div(ceil_div(elements, plan.N), PACKED_ROW)), 1 + scale, 0.5 + scale
    node, across, part = w.neighbours(plan.N, g), w.apart(plan.N, g), K * shard # of a unit, what a rank's secondary shard has
    # all, then what the node's ranks sum, then nodes
    packing = g * part * (X + 2 * gradient) + part * (4 + 4 + 2 * gradient) + 4 * shard
    return Unit(blocks, w.seconds(ALL_GATHER, g * part * weight, node), w.seconds(REDUCE_SCATTER, g * part * gradient, node),
                w.seconds(REDUCE_SCATTER, part * gradient, across), touched_seconds(plan, packing),
                touched_seconds(plan, g * part * (weight + X)), w.seconds(ALL_GATHER, part * weight, across))


def units_of(plan, name, w):
    """The root's is the first."""
    c = plan.shape
    if name == "compress": # all blocks are alike, though the first bucket is smaller
        (root, root_packing, _), (blocks, packing, _) = segments_of(plan, w)
        block = Unit(1, 0, blocks / c.L, packing=touched_seconds(plan, packing / c.L))
        return [Unit(0, 0, root, packing=touched_seconds(plan, root_packing)), *[block] * c.L]
    root, attention = unit_of(plan, name, w, 0, c.unit(0)), 1 - 6 * 8 * c.C**2 / c.block_flops(plan.T, True)
    cuts = [(attention, c.unit(1)), (1 - attention, c.unit(2))] if name.startswith("zero-") else [(1, c.block())]
    return [root, *[unit_of(plan, name, w, *cut) for cut in cuts] * c.L]


# How many uses early a unit is gathered. ZeRO-1 and -2 gather all parameters at once, in the first micro-batch; ZeRO-3 gathers a
# unit when it is needed; FSDP gathers one ahead, and only once a step the root and what stays after its forward pass (grad-op).
EARLY = {"zero-1": math.inf, "zero-2": math.inf, "zero-3": 0, "fsdp": 1, "zero++": 1}
REDUCE_EACH = "zero-2", "zero-3", "fsdp", "zero++" # micro-batch; others only reduce in the last


def micro_batch(plan, name, units, s, micro, t):
    """Units are used in the order root (embedding), first to last of the others, root (head, both passes), last to first. Gradients
    are sent when a unit's backward pass ends, the root's last. In zero++ nodes exchange what has been updated before a step's first
    gathers."""
    head, early = len(units), EARLY.get(name)
    order = [*range(head), 0, *range(head - 1, 0, -1)] # the unit of each use
    gathers = 0 if early is None else len(order) if early < math.inf else head if micro == 0 else 0
    last, arrives, gathered = micro == plan.accumulation - 1, {}, 0
    here = [t.send_shared(unit.exchange) if micro == 0 else 0 for unit in units]
    def stays(use): # since it was gathered before
        return early == 1 and (use >= head or micro > 0) and (order[use] == 0 or plan.sharding == "grad-op")
    def send_gradients(unit):
        """Compressing comes first. Where there are replicas, they sum the shard on a communicator of their own, in the step's last
        micro-batch; nodes do in every one."""
        t.pack(unit.packing)
        reduced = t.send(unit.reduce)
        if (last or unit.exchange > 0) and unit.replicate > 0: t.send_shared(unit.replicate, reduced)
    for use, k in enumerate(order):
        while gathered < gathers and gathered <= use + early:
            if not stays(gathered): arrives[gathered] = t.send(units[order[gathered]].gather, since=here[order[gathered]])
            gathered += 1
        if use in arrives:
            t.wait(arrives[use])
            t.pack(units[k].unpacking)
        if use == head: t.now += s.head
        t.now += units[k].blocks * (s.block_forward if use < head else s.block_backward)
        if use > head and (last or name in REDUCE_EACH): send_gradients(units[k])
    if last or name in REDUCE_EACH: send_gradients(units[0])


# ---- tensor and context parallelism: ranks share a micro-batch ----
# Seconds of what t ranks send to each other in a micro-batch: the sum of an activation (B,T,C), an all-reduce, or a reduce-scatter
# where rows are cut; the gather of its rows, where they are cut; what the losses need. weights: shares of a block's forward compute
# that make the weight gradients of qkv and proj, and of fc and fcproj.
TensorMessages = namedtuple("TensorMessages", "sum gather stats weights")


def tensor_messages(plan, w):
    tp, C, tokens, on_gpu = w.neighbours(plan.N, plan.t), plan.shape.C, plan.tokens_of, plan.device == "gpu"
    # classifier_elements (llmc/device/layers_api.h): logits that exist at a time
    logits = 1 << (24 if not on_gpu else 30 if plan.gpu_memory >= 1 << 36 else 29 if plan.gpu_memory >= 1 << 35 else 28)
    rows = logits // (plan.shape.Vp // plan.t)
    activation, chunks = float(tokens) * C * plan.X, ceil_div(tokens, max(rows // 64 * 64, 64)) # as classifier_rows has them
    forward = block_flops(plan) / 6 # in multiply-adds per token, as are the weights of a matrix
    return TensorMessages(w.seconds(REDUCE_SCATTER if plan.rows else ALL_REDUCE, activation, tp),
                          w.seconds(ALL_GATHER, activation, tp) if plan.rows else 0,
                          chunks * w.seconds(ALL_GATHER, tokens / chunks * plan.t * 3 * 4, tp),
                          [(n * C * C / forward, m * C * C / forward) for n, m in ((3.0, 1.0), (4.0, 4.0))])


def layernorms_sum(plan, w, blocks):
    """Seconds of the sum of their gradients over t ranks, once a step, where rows are cut; else 0."""
    return w.seconds(ALL_REDUCE, (2 * blocks + 1) * 2.0 * plan.shape.C * plan.X, w.neighbours(plan.N, plan.t)) if plan.rows else 0


def tensor_block(m, s, t):
    """What does a block's forward pass, what is recomputed, and its backward pass."""
    def forward(seconds, recomputed):
        """Of both halves rows are gathered, computed with, and summed. Recomputing omits the last product and sum."""
        for half in (0, 1):
            t.wait_shared(m.gather)
            t.now += seconds / 2
            if half == 0 or not recomputed: t.wait_shared(m.sum)
    def backward():
        """The sum of dX overlaps with both products that make dW. Where rows are cut, layernorm's output is gathered again for the
        second one, which overlaps with the first."""
        for half in (1, 0):
            column, row = (share * s.block_forward for share in m.weights[half]) # as long for dX as for dW
            t.wait_shared(m.gather)
            t.now += (1 - sum(map(sum, m.weights))) * s.block_forward + column + row # all that makes no weight's gradient
            summed, again = t.send_shared(m.sum), t.send_shared(m.gather) if m.gather > 0 else 0
            t.now += row
            t.wait(again)
            t.now += column
            t.wait(summed)
    return lambda: forward(s.block_forward, False), lambda: forward(s.block_again, True), backward


def shared_micro_batch(plan, m, block, s, gradients, t):
    """s: of a rank that has its share of the compute. gradients: seconds of the root's and a block's, which in the last micro-batch
    are sent as ddp's are, on a queue of their own; else 0."""
    forward, again, backward = block
    t.wait_shared(m.sum) # of embeddings
    for _ in range(plan.shape.L): forward()
    t.wait_shared(m.gather, m.stats)
    t.now += s.head
    t.wait_shared(m.sum)
    for _ in range(plan.shape.L):
        if plan.again: again()
        backward()
        t.send(gradients[1])
    t.wait_shared(m.gather)
    t.send(gradients[0])


def elements_sent(plan, w, elements):
    """Seconds of what is sent of so many elements over the ranks that have the same part of the model, before the update and after
    it."""
    shared = plan.t * plan.p
    dp, nbytes = w.apart(plan.N, plan.t if plan.pp_outside else shared, plan.N // shared), float(elements) * plan.X
    if plan.zero_stage == 0: return w.seconds(ALL_REDUCE, nbytes, dp), 0
    return w.seconds(REDUCE_SCATTER, nbytes, dp), w.seconds(ALL_GATHER, nbytes, dp)


# Of the root, and of a block as if its gradients had a bucket of their own.
def root_sent(plan, w): return elements_sent(plan, w, plan.shape.unit(0, plan.t))
def block_sent(plan, w): return elements_sent(plan, w, plan.shape.block(plan.t))


def crosses(plan, w):
    """Whether some of the ranks of a replica of the model, which are neighbours, are in different nodes."""
    return plan.p * plan.c > 1 and 0 < w.per_node < plan.N and (plan.pp_outside or w.per_node % (plan.p * plan.t * plan.c) != 0)


def abreast(plan, w):
    """Ranks of a node that send such a message to another node at the same time."""
    return min(plan.N // plan.p, w.per_node) if plan.pp_outside else plan.t


def hop_seconds(plan, w, nbytes):
    """Of a message between two such neighbours. They share a node's interfaces with those that send at the same time."""
    link, share = (w.between, max(1, abreast(plan, w) / w.interfaces())) if crosses(plan, w) else (w.inside, 1)
    return link.alpha[ALL_GATHER] + share * nbytes / link.busbw[ALL_GATHER]


def attend_across(plan, w, seconds, backward):
    """A block's attention, which takes so many seconds on one rank, on the busiest of c ranks, as train_gpt2_cp does it. It
    computes some parts, a c-th of a c-th, twice with keys of another rank: late queries see all keys of an early chunk, but half of
    their own. A ring's gradients travel a step behind the keys and values that they belong to."""
    t, ranks, c, twice = Timeline(), w.neighbours(plan.N, plan.c), plan.c, 1 if plan.balance == "zigzag" else 2
    numbers, part = 2.0 * plan.tokens_of / c * plan.shape.C, seconds / c**2 # keys and values of a rank
    if plan.how == "ulysses":
        for n, took in ((3, seconds / c), (1, 0)): # an all-to-all takes as long as a reduce-scatter
            t.wait_shared(w.seconds(REDUCE_SCATTER, n * numbers / 2 * plan.X, ranks))
            t.now += took
    if plan.how == "allgather":
        t.wait_shared(w.seconds(ALL_GATHER, c * numbers * plan.X, ranks))
        t.now += part * (1 + (c - 1) * twice)
        if backward: t.wait_shared(w.seconds(REDUCE_SCATTER, c * numbers * 4, ranks))
    if plan.how == "ring":
        moved = added = 0
        for s in range(c):
            if s < c - 1: moved = t.send_shared(hop_seconds(plan, w, numbers * plan.X))
            t.now += part * (twice if s > 0 else 1)
            t.wait(moved) # so what was sent before it has arrived as well
            if s > 0 and backward: added = t.send_shared(hop_seconds(plan, w, numbers * 4))
        t.wait(added)
    return t


def context_block(plan, w, s, t):
    attention, rest = attention_share(plan) * s.block_forward, (1 - attention_share(plan)) * s.block_forward
    forward, backward = (attend_across(plan, w, n * plan.c * attention, n == 2) for n in (1, 2))
    def do(seconds, part):
        t.now += seconds
        t.follow(part)
    return lambda: do(rest, forward), lambda: do(s.block_again - attention, forward), lambda: do(2 * rest, backward)


# ---- a step of N ranks ----
def update_seconds(plan, name):
    """Seconds of AdamW, on the rank that has most to update. It reads and writes 28 bytes for each parameter: in fp32 a gradient,
    and a weight and two moments twice; in 16 bits a gradient and a weight of 2 bytes, and a master copy and two moments twice."""
    kept = 8 if plan.X == 4 or name == "fsdp" else 12 # bytes of its state
    seconds = touched_seconds(plan, 28) # of an element
    return seconds and seconds * max(b.memory.get("optimizer state", 0) / kept for b in all_ranks(plan, name))


def step(plan, name, w, s):
    """s: of a whole model on one rank."""
    t, shared = Timeline(one_link=crosses(plan, w)), copy_ranks(plan, name)
    s = s.shared(shared)
    if name in ("tp", "cp"):
        m = tensor_messages(plan, w) # of cp nothing, because t is 1
        block = tensor_block(m, s, t) if name == "tp" else context_block(plan, w, s, t)
        gradients = root_sent(plan, w)[0], block_sent(plan, w)[0]
        for left in range(plan.accumulation - 1, -1, -1): shared_micro_batch(plan, m, block, s, (0, 0) if left else gradients, t)
        t.wait_all()
        t.send_shared(layernorms_sum(plan, w, plan.shape.L))
    else:
        units = units_of(plan, name, w)
        for micro in range(plan.accumulation): micro_batch(plan, name, units, s, micro, t)
    t.wait_all() # the update needs all gradients
    if name == "compress": t.pack(touched_seconds(plan, sum(after for _, _, after in segments_of(plan, w))))
    compute = plan.accumulation * s.model(plan.shape.L)
    uneven = max(0, t.now - t.exposed - compute) if name == "cp" else 0
    slowed = w.sm_share * (t.communication - t.exposed) # compute, while something is sent beside it
    tokens = float(plan.N // shared) * plan.tokens_of * plan.accumulation # batches at the same time
    seconds = compute + t.packing + uneven + t.exposed + slowed + update_seconds(plan, name)
    return StepTime(compute, t.communication, t.exposed, seconds, tokens, t.packing, uneven)
