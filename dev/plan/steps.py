"""Seconds of a step of the programs without a pipeline (doc/plan.md).

Overlap   A timeline simulates a rank. Compute and each queue of messages do one thing at a time, in order of issue; when compute
          waits for a message, that time is exposed. A unit is the root, a block, or half of a block. The queue "shared" belongs to
          a second communicator: it carries the activations of tensor or context parallelism, or the sums of fsdp's shards over its
          replicas. Where context parallelism crosses nodes, both queues share one link and take turns.
Compress  Gradients are packed before a message, during the backward pass, and unpacked after it. The bytes that this reads and
          writes (llmc/device/compress_api.h) are divided by --memory-bandwidth.
Muon      When all gradients are there, pieces of matrices go to their owners. The step waits for the busiest rank's all-to-all and
          for its Newton-Schulz, at the rate of training. On a GPU it takes longer: its products are small.
"""
import math
from collections import namedtuple
from tool import ceil_div
from dev.plan.machines import ALL_GATHER, ALL_REDUCE, GPUS, REDUCE_SCATTER
from dev.plan.plans import MUONS, all_ranks, answer_of, copy_ranks, zero_of


# ---- compute ----
class UnitSeconds(namedtuple("UnitSeconds", "block_forward block_backward head")):
    """Seconds of a micro-batch in one block and in the root. block_backward includes what is recomputed, head both passes."""
    block_again = property(lambda self: self.block_backward - 2 * self.block_forward)

    def shared(self, ranks): return UnitSeconds(*(x / ranks for x in self))
    def model(self, L): return L * (self.block_forward + self.block_backward) + self.head


# FLOPs per token: a third of a block's are in the forward pass, two thirds in the backward pass. Recomputing repeats its forward
# pass without fcproj, whose output no backward pass needs (full: with it). Only flops_done counts this, MFU does not.
def attention_flops(plan): return plan.shape.attention_flops(plan.T, True)
def block_flops(plan): return 6.0 * plan.shape.block() + attention_flops(plan)
def attention_share(plan): return attention_flops(plan) / block_flops(plan)
def flops_done(plan): return plan.shape.flops_per_token(plan.T) + plan.shape.L * again_flops(plan)


def again_flops(plan):
    fcproj = 8.0 * plan.shape.C ** 2 if plan.recompute == "block" else 0
    return block_flops(plan) / 3 - fcproj if plan.again else 0


def unit_seconds(plan, micro_batch_seconds):
    block, per_flop = block_flops(plan), micro_batch_seconds / flops_done(plan)
    return UnitSeconds(per_flop * block / 3, per_flop * (2 * block / 3 + again_flops(plan)),
                       per_flop * (plan.shape.flops_per_token(plan.T) - plan.shape.L * block))


class Timeline:
    """now: when compute has finished everything so far; arrived: when all messages of a queue so far will have arrived."""
    def __init__(self, communication=0.0, one_link=False):
        self.one_link = one_link # messages of timelines that are followed take turns with this one's own queue
        self.now = self.exposed = self.packing = 0.0
        self.arrived, self.communication = {"own": 0.0, "shared": 0.0}, communication

    def send(self, seconds, queue="own", since=0):
        """Sends a message now, or at `since` if that is later; returns when it will have arrived."""
        self.arrived[queue] = max(self.arrived[queue], since, self.now) + seconds
        self.communication += seconds
        return self.arrived[queue]

    def pack(self, seconds):
        """Packs or unpacks a message."""
        self.now += seconds
        self.packing += seconds

    def wait(self, until):
        self.exposed += max(until - self.now, 0)
        self.now = max(until, self.now)

    def send_shared(self, seconds, since=0): return self.send(seconds, "shared", since)
    def wait_shared(self, *seconds): self.wait(max(map(self.send_shared, seconds)))
    def wait_all(self): self.wait(max(self.arrived.values()))

    def follow(self, part):
        """Repeats another timeline, which began at 0 and ended when all its messages had arrived."""
        if self.one_link and self.arrived["own"] > self.now: self.arrived["own"] += part.communication
        self.now, self.exposed = self.now + part.now, self.exposed + part.exposed
        self.communication += part.communication


class StepTime(namedtuple("StepTime", "compute communication exposed seconds tokens compressing bubble formula tp newton_schulz",
                          defaults=(0, 0, float("nan"), 0, 0))):
    """Seconds, and the tokens of all ranks. compressing: compute time that packing takes. bubble: a pipeline's, without messages,
    so exposed is what messages and sums add; in cp, how much longer the busiest rank computes than the mean. formula: the bubble of
    equal stages, NaN if there is no formula. tp: of a mesh, how long the average rank waits inside its actions. newton_schulz: of
    muon, not in compute."""
    efficiency = property(lambda self: self.compute / self.seconds)
    tokens_per_s = property(lambda self: self.tokens / self.seconds)


# ---- compressed gradients ----
QUANTISE_BLOCK = 256 # elements of int8 and int4 that share a scale
PACKED_ROW = 4 * QUANTISE_BLOCK # a rank's shard is a multiple of this


# The program refuses to round gradients of 16 bits to 16 bits.
def is_possible(plan): return plan.X == 4 or plan.method != "bf16"
def touched_seconds(plan, nbytes): return nbytes / plan.memory_bandwidth if plan.memory_bandwidth > 0 else 0


def touched(plan, n, row):
    """Bytes that packing and unpacking n elements read and write, where every pass counts each array once. int4 and powersgd also
    read and write an error of 4 bytes. row: bytes of all N parts, or of N rows."""
    N, X, fed = plan.N, plan.X, 4 * (plan.method == "int4")
    return {"bf16": (n * (X + 2), n * (2 + X)),
            # the sum of a part, in fp32, is written and read, and so is its error
            **dict.fromkeys(("int8", "int4"), (n * (X + 2 * fed) + row, 2 * row + row / N + 2 * n * (4 + fed) / N + n * X)),
            # finding the k largest takes four passes over the digits of |x|, one that counts and one that sends
            "top-k": (n * (X + 28) + row / N, row + n * (8 + X)),
            "sign": (n * (X + 12) + row / N, row + n * X), # a pass for the scale, one for the signs
            "powersgd": (n * (X + 16), n * (8 + X))}[plan.method] # two products read x, and so does the last kernel


def segments_of(plan, w):
    """For the root and for all blocks: seconds of messages, and bytes that packing and unpacking touch. An all-to-all takes as long
    as a reduce-scatter. An uncompressed segment with a buffer is copied into it and back."""
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


# ---- units: what a program gathers and reduces at a time ----
# blocks: their number; halves count by their FLOPs, the root counts 0. The rest are seconds of gathering and reducing the unit, of
# summing a shard over the replicas of the model or, in zero++, over nodes (0: there is one), of packing gradients and unpacking
# weights, and of exchanging updated shards between nodes.
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
    """A unit of zero++ (llmc/parallel/zeropp.h), whose messages are all packed, also within a node."""
    X, g, K, scale = plan.X, plan.node_ranks, plan.N // plan.node_ranks, 4 / QUANTISE_BLOCK
    shard, weight, gradient = float(PACKED_ROW * ceil_div(ceil_div(elements, plan.N), PACKED_ROW)), 1 + scale, 0.5 + scale
    node, across, part = w.neighbours(plan.N, g), w.apart(plan.N, g), K * shard # part: a rank's secondary shard
    # first the whole unit, then the sums of the node's ranks, then those of the nodes
    packing = g * part * (X + 2 * gradient) + part * (4 + 4 + 2 * gradient) + 4 * shard
    return Unit(blocks, w.seconds(ALL_GATHER, g * part * weight, node), w.seconds(REDUCE_SCATTER, g * part * gradient, node),
                w.seconds(REDUCE_SCATTER, part * gradient, across), touched_seconds(plan, packing),
                touched_seconds(plan, g * part * (weight + X)), w.seconds(ALL_GATHER, part * weight, across))


def units_of(plan, name, w):
    """The root's unit comes first."""
    c = plan.shape
    if name == "compress": # all blocks count as equal, although the first bucket is smaller
        (root, root_packing, _), (blocks, packing, _) = segments_of(plan, w)
        block = Unit(1, 0, blocks / c.L, packing=touched_seconds(plan, packing / c.L))
        return [Unit(0, 0, root, packing=touched_seconds(plan, root_packing)), *[block] * c.L]
    root, attention = unit_of(plan, name, w, 0, c.unit(0)), 1 - 6 * 8 * c.C**2 / c.block_flops(plan.T, True)
    cuts = [(attention, c.unit(1)), (1 - attention, c.unit(2))] if name.startswith("zero-") else [(1, c.block())]
    return [root, *[unit_of(plan, name, w, *cut) for cut in cuts] * c.L]


# How many uses ahead a unit is gathered. ZeRO-1 and -2 gather all parameters at once, in the first micro-batch. ZeRO-3 gathers each
# unit when it is needed. FSDP gathers one unit ahead; it gathers the root, and with grad-op every unit, only once a step.
EARLY = {"zero-1": math.inf, "zero-2": math.inf, "zero-3": 0, "fsdp": 1, "zero++": 1}
REDUCE_EACH = "zero-2", "zero-3", "fsdp", "zero++" # reduce in every micro-batch; the others only in the last


def micro_batch(plan, name, units, s, micro, t):
    """Uses the units in the order root (embedding), first to last block, root (head, both passes), last to first block. A unit's
    gradients are sent when its backward pass ends, the root's last. In zero++ nodes exchange updated shards before a step's first
    gathers."""
    head, early = len(units), EARLY.get(name)
    order = [*range(head), 0, *range(head - 1, 0, -1)] # the unit of each use
    gathers = 0 if early is None else len(order) if early < math.inf else head if micro == 0 else 0
    last, arrives, gathered = micro == plan.accumulation - 1, {}, 0
    exchanged = [t.send_shared(unit.exchange) if micro == 0 else 0 for unit in units]
    def stays(use):
        """Whether it was gathered before and is still there."""
        return early == 1 and (use >= head or micro > 0) and (order[use] == 0 or plan.sharding == "grad-op")
    def send_gradients(unit):
        """Packs them first. Replicas sum the shard on a communicator of their own in the last micro-batch, nodes in every one."""
        t.pack(unit.packing)
        reduced = t.send(unit.reduce)
        if (last or unit.exchange > 0) and unit.replicate > 0: t.send_shared(unit.replicate, reduced)
    for use, k in enumerate(order):
        while gathered < gathers and gathered <= use + early:
            if not stays(gathered): arrives[gathered] = t.send(units[order[gathered]].gather, since=exchanged[order[gathered]])
            gathered += 1
        if use in arrives:
            t.wait(arrives[use])
            t.pack(units[k].unpacking)
        if use == head: t.now += s.head
        t.now += units[k].blocks * (s.block_forward if use < head else s.block_backward)
        if use > head and (last or name in REDUCE_EACH): send_gradients(units[k])
    if last or name in REDUCE_EACH: send_gradients(units[0])


# ---- tensor and context parallelism: ranks share a micro-batch ----
# Seconds of the messages between t ranks in a micro-batch: the sum of an activation (B,T,C), which is an all-reduce, or a
# reduce-scatter if rows are cut; the gather of its rows, if they are cut; the statistics of the losses. weights: the parts of a
# block's forward compute that equal the weight gradients of qkv and proj, and of fc and fcproj.
TensorMessages = namedtuple("TensorMessages", "sum gather stats weights")


def tensor_messages(plan, w):
    tp, C, tokens, on_gpu = w.neighbours(plan.N, plan.t), plan.shape.C, plan.tokens_of, plan.device == "gpu"
    # classifier_elements (llmc/device/layers_api.h): logits that exist at a time; classifier_rows rounds them to rows
    logits = 1 << (24 if not on_gpu else 30 if plan.gpu_memory >= 1 << 36 else 29 if plan.gpu_memory >= 1 << 35 else 28)
    chunks = ceil_div(tokens, max(logits // (plan.shape.Vp // plan.t) // 64 * 64, 64))
    forward = block_flops(plan) / 6 # in multiply-adds per token, as are the weights of a matrix
    return TensorMessages(w.seconds(REDUCE_SCATTER if plan.rows else ALL_REDUCE, plan.activation, tp),
                          w.seconds(ALL_GATHER, plan.activation, tp) if plan.rows else 0,
                          chunks * w.seconds(ALL_GATHER, tokens / chunks * plan.t * 3 * 4, tp),
                          [(n * C * C / forward, m * C * C / forward) for n, m in ((3.0, 1.0), (4.0, 4.0))])


def layernorms_sum(plan, w, blocks):
    """Seconds of summing the layernorms' gradients over t ranks, once a step, if rows are cut."""
    return w.seconds(ALL_REDUCE, (2 * blocks + 1) * 2.0 * plan.shape.C * plan.X, w.neighbours(plan.N, plan.t)) if plan.rows else 0


def tensor_block(m, s, t):
    """Functions that do a block's forward pass, what is recomputed, and its backward pass."""
    def forward(seconds, recomputed):
        """Each half gathers rows, computes, and sums. Recomputing omits the last product and sum."""
        for half in (0, 1):
            t.wait_shared(m.gather)
            t.now += seconds / 2
            if half == 0 or not recomputed: t.wait_shared(m.sum)
    def backward():
        """The sum of dX overlaps with both products that make dW. If rows are cut, layernorm's output is gathered again for the
        second product, which overlaps with the first."""
        for half in (1, 0):
            column, row = (share * s.block_forward for share in m.weights[half]) # dX takes as long as dW
            t.wait_shared(m.gather)
            t.now += (1 - sum(map(sum, m.weights))) * s.block_forward + column + row # everything but the weights' gradients
            summed, again = t.send_shared(m.sum), t.send_shared(m.gather) if m.gather > 0 else 0
            t.now += row
            t.wait(again)
            t.now += column
            t.wait(summed)
    return lambda: forward(s.block_forward, False), lambda: forward(s.block_again, True), backward


def shared_micro_batch(plan, m, block, s, gradients, t):
    """s: seconds of a rank's share. gradients: seconds of sending the root's and a block's, on a queue of their own as in ddp, in
    the last micro-batch; else 0."""
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
    """Seconds of the messages about so many elements between the ranks that hold the same part of the model, before the update and
    after it."""
    shared = plan.t * plan.p
    dp, nbytes = w.apart(plan.N, plan.t if plan.pp_outside else shared, plan.N // shared), float(elements) * plan.X
    if plan.zero_stage == 0: return w.seconds(ALL_REDUCE, nbytes, dp), 0
    return w.seconds(REDUCE_SCATTER, nbytes, dp), w.seconds(ALL_GATHER, nbytes, dp)


# A block is sent as if its gradients had a bucket of their own.
def root_sent(plan, w): return elements_sent(plan, w, plan.shape.unit(0, plan.t))
def block_sent(plan, w): return elements_sent(plan, w, plan.shape.block(plan.t))


def crosses(plan, w):
    """Whether some of the ranks that share a replica of the model, which are neighbours, are in different nodes."""
    return plan.p * plan.c > 1 and 0 < w.per_node < plan.N and (plan.pp_outside or w.per_node % (plan.p * plan.t * plan.c) != 0)


def abreast(plan, w):
    """How many ranks of a node send such a message to another node at the same time."""
    return min(plan.N // plan.p, w.per_node) if plan.pp_outside else plan.t


def hop_seconds(plan, w, nbytes):
    """Seconds of a message between two such neighbours. They share a node's interfaces with those that send at the same time."""
    link, share = (w.between, max(1, abreast(plan, w) / w.interfaces())) if crosses(plan, w) else (w.inside, 1)
    return link.alpha[ALL_GATHER] + share * nbytes / link.busbw[ALL_GATHER]


def attend_across(plan, w, seconds, backward):
    """A block's attention, which takes one rank so many seconds, on the busiest of c ranks of train_gpt2_cp. A part is one chunk's
    queries with another's keys. Late queries see all keys of an earlier chunk but only half of their own, so such a part takes
    twice as long. A ring's gradients travel one hop behind their keys and values."""
    t, ranks, c, twice = Timeline(), w.neighbours(plan.N, plan.c), plan.c, 1 if plan.balance == "zigzag" else 2
    each, part = 2.0 * plan.tokens_of / c * plan.shape.C, seconds / c**2 # numbers in a rank's keys and values
    if plan.how == "ulysses":
        for n, took in ((3, seconds / c), (1, 0)): # an all-to-all takes as long as a reduce-scatter
            t.wait_shared(w.seconds(REDUCE_SCATTER, n * each / 2 * plan.X, ranks))
            t.now += took
    if plan.how == "allgather":
        t.wait_shared(w.seconds(ALL_GATHER, c * each * plan.X, ranks))
        t.now += part * (1 + (c - 1) * twice)
        if backward: t.wait_shared(w.seconds(REDUCE_SCATTER, c * each * 4, ranks))
    if plan.how == "ring":
        moved = added = 0
        for s in range(c):
            if s < c - 1: moved = t.send_shared(hop_seconds(plan, w, each * plan.X))
            t.now += part * (twice if s > 0 else 1)
            t.wait(moved) # everything sent before has arrived as well
            if s > 0 and backward: added = t.send_shared(hop_seconds(plan, w, each * 4))
        t.wait(added)
    return t


def context_block(plan, w, s, t):
    attention, rest = attention_share(plan) * s.block_forward, (1 - attention_share(plan)) * s.block_forward
    forward, backward = (attend_across(plan, w, n * plan.c * attention, n == 2) for n in (1, 2))
    def do(seconds, part):
        t.now += seconds
        t.follow(part)
    return lambda: do(rest, forward), lambda: do(s.block_again - attention, forward), lambda: do(2 * rest, backward)


# ---- muon: matrices whole at their owners ----
def orthogonalise(plan, name, w, s, t):
    """Returns the busiest rank's seconds of Newton-Schulz, in fp16 computed in fp32. With --owners all no update travels back."""
    more, chip = answer_of(plan, name)["more"], plan.chip or GPUS["h100"]
    buffer = more["message"] * plan.N / max(plan.N - 1, 1) # a reduce-scatter of it sends such a message
    seconds = more["flops"] * s.model(plan.shape.L) / (flops_done(plan) * plan.tokens_of)
    if plan.precision == "fp16": seconds *= chip.peak("fp16") / chip.peak("fp32")
    t.wait(t.send(w.world_seconds(REDUCE_SCATTER, buffer, plan.N)))
    t.now += seconds
    if plan.owners == "one": t.wait(t.send(w.world_seconds(REDUCE_SCATTER, buffer, plan.N)))
    return seconds


# ---- a step of N ranks ----
def update_seconds(plan, name):
    """Seconds of AdamW on the rank with most to update. It touches 28 bytes per parameter: in fp32 a gradient once, and a weight
    and two moments twice; in 16 bits a gradient and a weight once, and a master copy and two moments twice. Muon, with the momentum
    on its way to the owner and back, touches about as many."""
    name = zero_of(name)
    kept = 8 if plan.X == 4 or name == "fsdp" else 12 # bytes of a parameter's state
    seconds = touched_seconds(plan, 28)
    return seconds and seconds * max(b.memory.get("optimizer state", 0) / kept for b in all_ranks(plan, name))


def step(plan, name, w, s):
    """s: seconds of a whole model on one rank."""
    t, shared = Timeline(one_link=crosses(plan, w)), copy_ranks(plan, name)
    s = s.shared(shared)
    if name in ("tp", "cp"):
        m = tensor_messages(plan, w) # cp sends none of these, because t is 1
        block = tensor_block(m, s, t) if name == "tp" else context_block(plan, w, s, t)
        gradients = root_sent(plan, w)[0], block_sent(plan, w)[0]
        for left in range(plan.accumulation - 1, -1, -1): shared_micro_batch(plan, m, block, s, (0, 0) if left else gradients, t)
        t.wait_all()
        t.send_shared(layernorms_sum(plan, w, plan.shape.L))
    else:
        units = units_of(plan, zero_of(name), w)
        for micro in range(plan.accumulation): micro_batch(plan, zero_of(name), units, s, micro, t)
    t.wait_all() # the update needs all gradients
    newton_schulz = orthogonalise(plan, name, w, s, t) if name in MUONS else 0
    if name == "compress": t.pack(touched_seconds(plan, sum(after for _, _, after in segments_of(plan, w))))
    compute = plan.accumulation * s.model(plan.shape.L)
    uneven = max(0, t.now - t.exposed - compute) if name == "cp" else 0
    slowed = w.sm_share * (t.communication - t.exposed) # compute is slower while messages travel
    tokens = float(plan.N // shared) * plan.tokens_of * plan.accumulation
    seconds = compute + t.packing + uneven + t.exposed + slowed + update_seconds(plan, name) + newton_schulz
    return StepTime(compute, t.communication, t.exposed, seconds, tokens, t.packing, uneven, newton_schulz=newton_schulz)
