"""Seconds of a step of the stages that have no pipeline (doc/plan.md).

Overlap   is a timeline of two queues, compute and communication, each doing one thing at a time in order of issue. Time that compute
          waits is exposed. Where fsdp gathers groups of blocks, "unit" means such a group. A third queue has what a communicator
          of its own sends: activations of tensor parallelism, or the sums of shards over fsdp's replicas.
Compute   is FLOPs / (peak x MFU), or measured. t ranks that share a replica take 1/t of it.
Compress  is by train_gpt2_compress's bytes. Packing comes before a message, beside backward, and unpacking after backward. The bytes that
          they read and write (llmc/device/compress_api.h) are divided by --memory-bandwidth.
"""
from collections import namedtuple
from typing import NamedTuple
from tool import ceil_div
from machines import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from questions import DDP, FSDP, TP, ZERO1, ZERO2, ZERO3, all_ranks, answer_of, groups_of, shard_of, shards_of


# ---- compute ----
class UnitSeconds(namedtuple("UnitSeconds", "block_forward block_backward head")):
    """In a micro-batch. block_backward has what is recomputed; head: the root's, both passes."""
    block_again = property(lambda self: self.block_backward - 2 * self.block_forward)


def block_flops(plan):
    """Of a token: a third forward and two thirds backward."""
    return 6.0 * plan.shape.unit(1) + 6.0 * plan.shape.C * plan.T


def again_flops(plan):
    """Of a token, what a block recomputes: its forward pass without fcproj, whose output no backward pass needs; full: with it."""
    return block_flops(plan) / 3 - (0 if plan.full else 8.0 * plan.shape.C * plan.shape.C) if plan.recompute else 0


def flops_done(plan):
    """Of a token, including recomputed ones, which flops_per_token and so MFU leave out."""
    return plan.shape.flops_per_token(plan.T) + plan.shape.L * again_flops(plan)


def unit_seconds(plan, micro_batch_seconds):
    block, per_flop = block_flops(plan), micro_batch_seconds / flops_done(plan)
    return UnitSeconds(per_flop * block / 3, per_flop * (2 * block / 3 + again_flops(plan)),
                       per_flop * (plan.shape.flops_per_token(plan.T) - plan.shape.L * block))


class Timeline:
    """All queues. now: when compute has finished all it was given; arrived: when everything sent so far will have arrived; shared:
    the same of the third queue."""
    def __init__(self, communication=0.0):
        self.now = self.arrived = self.shared = self.exposed = 0.0
        self.communication = communication

    def send(self, seconds):
        """Returns when the message will have arrived."""
        self.arrived = max(self.arrived, self.now) + seconds
        self.communication += seconds
        return self.arrived

    def send_shared(self, seconds, since=0):
        """The same, not before `since`."""
        self.shared = max(self.shared, since or self.now) + seconds
        self.communication += seconds
        return self.shared

    def wait(self, until):
        if until <= self.now: return
        self.exposed += until - self.now
        self.now = until

    def wait_shared(self, seconds):
        self.wait(self.send_shared(seconds))


class StepTime(NamedTuple):
    compute: float
    communication: float
    exposed: float
    seconds: float
    tokens: float            # of all ranks
    compressing: float = 0   # of this, what compressing takes from compute
    bubble: float = 0        # of a pipeline, without messages; exposed is then what messages and sums add
    formula: float = float("nan") # the bubble of equal stages; NaN: there is none
    tensor: float = 0        # of a mesh: what an average rank waits for inside its actions

    efficiency = property(lambda self: self.compute / self.seconds)
    tokens_per_s = property(lambda self: self.tokens / self.seconds)


# ---- compressed gradients ----
METHODS = ("none", "bf16", "fp16", "int8", "int4", "top-k", "sign", "onebit-adam", "powersgd")
FED_BY_DEFAULT = ("int4", "onebit-adam", "powersgd")
QUANTISE_BLOCK = 256 # elements of int8 and int4 that share a scale


def is_possible(plan):
    """Gradients of 16 bits cannot be rounded to 16 bits: the program refuses then."""
    return plan.X == 4 or plan.method not in ("bf16", "fp16")


class Segments:
    """sent: of each collective, how many operations, and the bytes of their largest buffers together. An all-to-all takes as
    long as a reduce-scatter. Then the bytes that packing and unpacking read and write."""
    def __init__(self):
        self.sent = {what: [0, 0.0] for what in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)}
        self.packing = self.unpacking = 0.0

    def add(self, what, nbytes, n=1):
        self.sent[what][0] += n
        self.sent[what][1] += nbytes

    def seconds(self, w, N):
        return sum(n * w.world_seconds(what, nbytes / n, N) for what, (n, nbytes) in self.sent.items() if n > 0)


def touched(plan, n, row):
    """Bytes that packing and unpacking a segment of n elements read and write, each array once a pass. row: all N parts, or N
    rows."""
    method, N, X, F = plan.method, plan.N, plan.X, 4
    feedback = method in FED_BY_DEFAULT if plan.feedback is None else plan.feedback
    fed, part = 2 * F if feedback else 0, (n + (2 * n if feedback else 0) + n) * F / N # fp32: a sum is written and read, its error too
    if method in ("bf16", "fp16"): return n * (X + 2 + fed), n * (2 + X)
    if method in ("int8", "int4"): return n * (X + fed) + row, row + part + row / N + row + n * X
    if method == "top-k": # the k largest take four passes for the digits of |x|, one that counts and one that sends
        return n * (X + F + fed / 2) + 6 * n * F + fed / 2 * n + row / N, row + n * (F + F + X)
    if method == "sign": # one pass for the scale, one for the signs
        return n * (X + F + fed / 2) + 2 * n * F + fed / 2 * n + row / N, row + n * X
    if method == "onebit-adam": return n * (F + X + F + fed / 2) + 2 * n * F + fed / 2 * n + row, row + part + row / N + row + n * F
    return n * (X + F + fed / 2) + 2 * n * F, n * (F + X + fed / 2) # powersgd: two products read x, and the last kernel as well


def segments_of(plan):
    """Of the root, and of all blocks. What has no buffers is sent whole, by onebit-adam in fp32."""
    root, blocks, method = Segments(), Segments(), plan.method
    exchanged = method in ("int8", "int4", "onebit-adam")
    for begin, n, sent, received in answer_of(plan, DDP)["more"]: # bytes of its buffers
        u, (packing, unpacking) = root if begin < plan.shape.unit(0) else blocks, touched(plan, float(n), float(sent)) if sent else (0, 0)
        u.packing += packing
        u.unpacking += unpacking
        if exchanged and sent: u.add(REDUCE_SCATTER, sent)
        if sent == 0: u.add(ALL_REDUCE, float(n * (4 if method == "onebit-adam" else plan.X)))
        elif exchanged or method in ("top-k", "sign"): u.add(ALL_GATHER, sent)
        else: u.add(ALL_REDUCE, sent + received, 2 if method == "powersgd" else 1)
    return root, blocks


def touched_seconds(plan, nbytes): return nbytes / plan.memory_bandwidth if plan.memory_bandwidth > 0 else 0


def compressed_messages(plan, w, groups):
    """Seconds of each group's reduction, of its packing, and of unpacking. All blocks are alike, though the first bucket is
    smaller."""
    root, blocks = segments_of(plan)
    each, L = blocks.seconds(w, plan.N), plan.shape.L
    reduce = [root.seconds(w, plan.N)] + [each / L] * (groups - 1)
    packing = [touched_seconds(plan, root.packing)] + [touched_seconds(plan, blocks.packing / L)] * (groups - 1)
    return reduce, packing, touched_seconds(plan, root.unpacking + blocks.unpacking)


# ---- what a stage gathers and reduces at a time: units, or fsdp's groups of units ----
class Messages(NamedTuple):
    """A number of each group. The root's, the first, has no blocks unless it is the whole model."""
    blocks: list
    gather: list             # seconds
    reduce: list
    replicate: list          # of summing a shard over the replicas of the model; 0: there is one
    packing: list            # of compressing what is reduced, and of setting all gradients
    unpacking: float = 0
    stays: bool = False      # what is gathered stays until the step's end
    late: bool = False       # nothing is reduced before backward is over


def group_messages(plan, stage, w, elements):
    """The seconds in which a group is gathered and reduced, and summed over replicas, by its shard's size. Shards that fsdp offloads
    pass the link to the host last, and before gathers if the device has no copy; of their replicas' sums both ways."""
    X, S = plan.X, shards_of(plan, stage)
    if stage == DDP: return 0, w.world_seconds(ALL_REDUCE, float(elements) * X, plan.N), 0
    shard, ranks = float(shard_of(elements, S)), w.neighbours(plan.N, S)
    gradient, offloaded = 4 if stage == FSDP and plan.reduce_dtype == "fp32" else X, stage == FSDP and plan.offload != "none"
    host = shard / plan.host_link if offloaded and plan.host_link > 0 else 0 # for each byte of an element
    home = S == 1 and X == 4 and not offloaded
    gather = 0 if home else w.seconds(ALL_GATHER, S * shard * X, ranks) + X * host * (plan.offload == "all")
    reduce = w.seconds(REDUCE_SCATTER, S * shard * gradient, ranks) + gradient * host
    replicate = w.seconds(ALL_REDUCE, shard * gradient, w.apart(plan.N, S))
    return gather, reduce, replicate + 2 * gradient * host if replicate > 0 else 0


def messages_of(plan, stage, w):
    groups = groups_of(plan, stage)
    known = {n: group_messages(plan, stage, w, n) for n in {n for _, n in groups}}
    gather, reduce, replicate = (list(x) for x in zip(*(known[n] for _, n in groups)))
    m = Messages([blocks for blocks, _ in groups], gather, reduce, replicate, [0.0] * len(groups),
                 stays=stage == FSDP and plan.sharding in ("grad-op", "none"))
    if stage != DDP or plan.method == "none": return m
    reduce, packing, unpacking = compressed_messages(plan, w, len(groups))
    late = plan.method == "onebit-adam" # ranks clip their gradients before momentum is made of them
    return m._replace(reduce=reduce, packing=packing, unpacking=unpacking, late=late)


def send_gradients(m, k, last, t):
    """Reduces a group's gradients; compressing them comes first. Where there are replicas, they sum the shard on a communicator of
    their own, in the step's last micro-batch."""
    t.now += m.packing[k]
    reduced = t.send(m.reduce[k])
    if last and m.replicate[k] > 0: t.send_shared(m.replicate[k], reduced)


def micro_batch(plan, stage, m, s, micro, t):
    """Units are used in the order root (embedding), blocks 1..L, root (head, both passes), blocks L..1. A stage that gathers does
    so `ahead` uses early: ZeRO-1 and -2 gather all parameters at once after the update, so only in the first micro-batch; ZeRO-3
    gathers a unit when it is needed; FSDP gathers as early as it has memory, and the root only once a step, while the blocks are
    updated. How long the update takes is not known here, so none of the root's gather is counted as hidden. What stays after its
    forward pass (grad-op, none) is gathered once a step. Gradients are sent when a unit's backward pass ends, the root's at the
    end."""
    head = len(m.blocks)
    order = [*range(head), 0, *range(head - 1, 0, -1)] # the group of each use
    uses = len(order)
    ahead = 0 if stage == ZERO3 else plan.buffers - 1 if stage == FSDP else uses
    gathers = uses if stage in (ZERO3, FSDP) else head if stage in (ZERO1, ZERO2) and micro == 0 else 0
    last = micro == plan.accumulation - 1
    reduces = last or stage in (ZERO2, ZERO3, FSDP)
    arrives, gathered = [0.0] * uses, 0
    for use, k in enumerate(order):
        while gathered < gathers and gathered <= use + ahead:
            again = gathered >= head or micro > 0
            is_here = stage == FSDP and again and (order[gathered] == 0 or m.stays)
            if not is_here: arrives[gathered] = t.send(m.gather[order[gathered]])
            gathered += 1
        t.wait(arrives[use])
        if use == head: t.now += s.head
        t.now += m.blocks[k] * (s.block_forward if use < head else s.block_backward)
        if reduces and use > head and not m.late: send_gradients(m, k, last, t)
    for k in range(head - 1 if m.late else 0, -1, -1) if reduces else ():
        send_gradients(m, k, last, t)


# ---- tensor parallelism ----
class TensorMessages(NamedTuple):
    """Seconds of what t ranks send to each other in a micro-batch, and N/t ranks at its end."""
    sum: float               # of an activation (B,T,C): an all-reduce, or a reduce-scatter where rows are cut
    gather: float            # of its rows, where they are cut; else 0
    stats: float             # what the losses of a micro-batch need
    layernorms: float        # gradients of a layernorm, once a step, where rows are cut; else 0
    hides: tuple             # the share of a block's forward compute that makes the weight gradient of qkv, of fc


def tensor_messages(plan, w):
    tp = w.neighbours(plan.N, plan.t)
    C, X, rows = plan.shape.C, plan.X, (1 << (28 if plan.gpu else 24)) // (plan.shape.Vp // plan.t)
    rows = min(max(rows // 64 * 64, 64), plan.tokens) # of logits that a rank computes at a time (llmc/device/layers_api.h)
    activation, chunks = float(plan.tokens) * C * X, ceil_div(plan.tokens, rows)
    forward = block_flops(plan) / 6 # in multiply-adds per token, as are the weights of a matrix
    return TensorMessages(
        w.seconds(REDUCE_SCATTER if plan.rows else ALL_REDUCE, activation, tp), w.seconds(ALL_GATHER, activation, tp) if plan.rows else 0,
        chunks * w.seconds(ALL_GATHER, plan.tokens / chunks * plan.t * 3 * 4, tp),
        w.seconds(ALL_REDUCE, 2.0 * C * X, tp) if plan.rows else 0,
        (3.0 * C * C / forward, 4.0 * C * C / forward))


def tensor_forward(m, seconds, recomputed, t):
    """Both halves of a block's forward pass: rows are gathered, computed with, and summed. Recomputing omits the last product and sum."""
    for half in (0, 1):
        t.wait_shared(m.gather)
        t.now += seconds / 2
        if half == 0 or not recomputed: t.wait_shared(m.sum)


def tensor_backward(plan, m, forward, t):
    """Both halves of its backward pass, which takes 2 x `forward` seconds. The sum of dX travels beside dW; layernorm's output, if
    it is gathered again, beside dX."""
    for half in (1, 0):
        product = m.hides[half] * forward # as long for dX as for dW
        t.wait_shared(m.gather)
        t.now += (1 - m.hides[0] - m.hides[1]) * forward # all that is not one of these four products
        again = 0 if plan.keep_gathered else t.send_shared(m.gather)
        t.now += product
        summed = t.send_shared(m.sum)
        t.wait(again)
        t.now += product
        t.wait(summed)


def unit_sent(plan, w, unit):
    """Seconds of what is sent of a unit over the copies before the update, and after it."""
    dp, nbytes = w.apart(plan.N, plan.t * plan.p), float(plan.shape.unit(unit, plan.t)) * plan.X
    if plan.zero_stage == 0: return w.seconds(ALL_REDUCE, nbytes, dp), 0
    return w.seconds(REDUCE_SCATTER, nbytes, dp), w.seconds(ALL_GATHER, nbytes, dp)


def tensor_micro_batch(plan, m, s, units, t):
    """s: of a rank that has 1/t of the compute. units: seconds of the root's and a block's gradients, which in the last micro-batch are
    sent as ddp's are, on a queue of their own; else none."""
    t.wait_shared(m.sum) # of embeddings
    for _ in range(plan.shape.L): tensor_forward(m, s.block_forward, False, t)
    t.wait_shared(m.gather)
    t.wait_shared(m.stats)
    t.now += s.head
    t.wait_shared(m.sum)
    for _ in range(plan.shape.L):
        if plan.recompute: tensor_forward(m, s.block_again, True, t)
        tensor_backward(plan, m, s.block_forward, t)
        if units: t.send(units[1])
    t.wait_shared(m.gather)
    if units: t.send(units[0])


# ---- a step of N ranks ----
def update_seconds(plan, stage):
    """Seconds of AdamW, on the rank that has most to update. It reads and writes 28 bytes for each parameter: in fp32 a gradient,
    and a weight and two moments twice; in 16 bits a gradient and a weight of 2 bytes, and a master copy and two moments twice. Weights
    that the host has updated are copied at the same time."""
    kept = 8 if plan.X == 4 or stage == FSDP else 12 # bytes of its state
    bandwidth, copied = plan.memory_bandwidth, 0
    if stage == FSDP and plan.offload != "none": # the state is as large on the device
        copied = plan.X / plan.host_link if plan.offload == "optimizer" and plan.host_link > 0 else 0
        plan, bandwidth = plan._replace(offload="none"), plan.host_bandwidth
    seconds = max(28 / bandwidth if bandwidth > 0 else 0, copied) # of an element
    return seconds and seconds * max(b.memory.get("optimizer state", 0) / kept for b in all_ranks(plan, stage))


def step(plan, stage, w, s):
    t, m, shared = Timeline(), None, plan.t if stage == TP else 1
    s = UnitSeconds(*(x / shared for x in s))
    if stage == TP:
        sums = tensor_messages(plan, w)
        for _ in range(plan.accumulation - 1): tensor_micro_batch(plan, sums, s, None, t)
        tensor_micro_batch(plan, sums, s, [unit_sent(plan, w, unit)[0] for unit in (0, 1)], t)
        t.wait(t.arrived)
        for _ in range(2 * plan.shape.L + 1): t.send_shared(sums.layernorms)
    else:
        m = messages_of(plan, stage, w)
        for micro in range(plan.accumulation): micro_batch(plan, stage, m, s, micro, t)
    t.wait(max(t.arrived, t.shared)) # the update needs all gradients
    compute = plan.accumulation * (plan.shape.L * (s.block_forward + s.block_backward) + s.head)
    slowed = w.sm_share * (t.communication - t.exposed) # compute, while something is sent beside it
    compressing = m.unpacking + sum(m.packing) if m else 0
    seconds = compute + compressing + t.exposed + slowed + update_seconds(plan, stage)
    tokens = float(plan.N // shared) * plan.tokens * plan.accumulation # batches at the same time
    return StepTime(compute, t.communication, t.exposed, seconds, tokens, compressing)
