"""Seconds of a step of train_gpt2_pp, and of train_gpt2_3d, which has copies of p stages of t ranks.

Actions   A stage's F, I and W take what its blocks take. Of a block's backward pass W is the four products that make
          gradients of matrices, and I the rest, with recomputation also another F. The last stage's I has the head, its
          forward pass included, because the program computes logits only there. Embedding takes no time. On a mesh they are 1/t of
          that, and in each block are the sums of tensor parallelism: B, a whole backward pass, hides what dW can hide; I of
          zb-h1 hides nothing, because its W comes later. With --emulate-ms they last as long as that says.
Schedule  It is played: each action begins when its rank is free and its input is there. So the bubble is that of these stages, also
          of unequal ones. A message takes alpha + n/bandwidth. All take as long as on the slowest link between neighbours: in 1f1b
          that link delays every micro-batch, and faster ones matter little. On a mesh messages are as long as a rank's rows: 1/t
          where rows are cut.
After it  A stage sums a block's gradients over the replicas of the model once its last micro-batch has left the block, beside
          what it still has to compute. The root's are first summed over the two stages that have it, when both are done.
          Then three numbers are summed over the stages: the loss and two norms. With --zero-stage 1 gradients are reduced and, when
          the update is over, gathered. The next step's first forward passes hide as much of that as they can wait for.
"""
import math
from typing import NamedTuple
from tool import require
from machines import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from network import Group
from schedules import blocks_of, pipeline_of, play, split_of
from questions import MESH, PP
from steps import StepTime, Timeline, block_flops, tensor_backward, tensor_forward, tensor_messages, update_seconds


# ---- messages ----
def messages_of(plan):
    """Of a replica of the model in a step: how many."""
    return 0 if plan.pipe.p == 1 else 2 * plan.accumulation * (plan.pipe.p * plan.pipe.v - 1)


def messages_of_rank(plan, rank):
    last = plan.pipe.p - 1
    return plan.accumulation * (2 * plan.pipe.v - (rank == 0) - (rank == last)) if last > 0 else 0


def message_bytes(plan): return float(plan.tokens) * plan.config.C * plan.X


def crosses(plan, w):
    """True if some of the ranks of a replica of the model, which are neighbours, are in different nodes."""
    return plan.pipe.p > 1 and w.crosses(plan.N, plan.pipe.p * plan.t)


def message_seconds(plan, w):
    nbytes = message_bytes(plan) / (plan.t if plan.rows else 1)
    return w.message(nbytes, crosses(plan, w)) if plan.pipe.p > 1 else 0


def tied_group(plan, w):
    """The two ranks of a copy that have the root. If they are in different nodes, they use one of its interfaces."""
    apart = crosses(plan, w)
    return Group(2 if plan.pipe.p > 1 else 1, 1 if apart else 2, w.nics if apart else 1)


# ---- sums over replicas of the model, and gathers ----
def unit_sent(plan, w, unit):
    """Seconds of what is sent of a unit over the copies before the update, and after it."""
    dp, nbytes = w.apart(plan.N, plan.t * plan.pipe.p), float(plan.config.unit(unit, plan.t)) * plan.X
    if plan.zero_stage == 0: return w.seconds(ALL_REDUCE, nbytes, dp), 0
    return w.seconds(REDUCE_SCATTER, nbytes, dp), w.seconds(ALL_GATHER, nbytes, dp)


def gather_delay(plan, y, block, root):
    """By how much the gathers of an update delay the next step: a rank computes its first blocks as they arrive. block, root:
    seconds of a gather."""
    most, p = 0.0, plan.pipe.p
    for r in range(p if plan.zero_stage else 0):
        n, (_, _, _, begin, end) = blocks_of(plan, r), y["ranks"][r]["boxes"][0]
        arrived, computes = root if r in (0, p - 1) else 0, end - begin
        for i in range(n):
            arrived += block
            most = max(most, arrived - begin - i * computes * plan.pipe.v / n)
    return most


# ---- train_gpt2_pp ----
def weight_seconds(plan, s):
    """Of W in a block: 2 FLOPs for each weight of its matrices and token."""
    return s.block_forward * 24.0 * plan.config.C * plan.config.C / (block_flops(plan) / 3)


def pipe_times(plan, s):
    """F, I and W of each part of the model."""
    W = weight_seconds(plan, s)
    times = [[n * s.block_forward, n * (s.block_backward - W), n * W] for n in split_of(plan)]
    times[-1][1] += s.head
    return tuple(map(tuple, times))


def sum_blocks(plan, y, rank, m, t):
    """Sums rank's blocks over the copies, each when it is complete, in t's queue; t.now becomes the time when the rank has computed
    all."""
    blocks = split_of(plan)
    for kind, micro, part, begin, end in y["ranks"][rank]["boxes"]:
        if micro < plan.accumulation - 1 or kind not in "BW": continue
        n = blocks[part * plan.pipe.p + rank]
        each = m.each["BW".index(kind)] or (end - begin) / (n + 1)
        for left in range(n - 1, -1, -1): # the head, if it is there, comes before the blocks
            t.now = end - left * each
            t.send(m.block[0])
    t.now = y["ranks"][rank]["end"]


class Sums(NamedTuple):
    """What follows the last micro-batches, in seconds."""
    pp: Group                # all stages; the two that have the root
    tied: Group
    message: float           # between two stages
    block: tuple             # of a block and of the root: its sum over the copies, and its gather after the update
    root: tuple
    layernorms: float = 0    # of one, among the t ranks that cut its rows
    each: tuple = (0, 0)     # of a block in B, in W; 0: all blocks take equal parts of an action, and as much comes before them


def end_of(plan, w, y, m):
    """When all ranks have what the update needs, and the communication of the rank that communicates longest."""
    last, number = plan.pipe.p - 1, w.seconds(ALL_REDUCE, 8.0, m.pp)
    root = w.seconds(ALL_REDUCE, float(plan.config.unit(0, plan.t)) * plan.X, m.tied)
    end = communication = 0.0
    for r in range(plan.pipe.p):
        t = Timeline(messages_of_rank(plan, r) * m.message)
        sum_blocks(plan, y, r, m, t)
        if r in (0, last):
            t.wait(max(y["ranks"][k]["end"] for k in (0, last)))
            t.wait_shared(root)
            t.send(m.root[0])
        t.wait(t.arrived)
        for _ in range(2 * blocks_of(plan, r) + 1): t.wait_shared(m.layernorms)
        end = max(end, t.now)
        communication = max(communication, t.communication + 3 * number)
    return end + 3 * number + gather_delay(plan, y, m.block[1], m.root[1]), communication


def played_step(plan, stage, w, times, sums, compute=None):
    """Of plan.N ranks, by the times of actions. compute: of these, what an average rank computes; None: all."""
    l, y = pipeline_of(plan), play(pipeline_of(plan), times, 0)
    busy = sum(rank["busy"] / l.p for rank in y["ranks"])
    waits, compute = y["step"] - busy, busy if compute is None else compute
    seconds, communication = end_of(plan, w, play(l, times, sums.message), sums)
    exposed = seconds - busy - waits
    if stage == MESH: seconds += w.sm_share * max(0, communication - exposed) # compute, while something is sent beside it
    seconds += update_seconds(plan, stage)
    formula = math.nan if y["bubble"] is None else y["bubble"]
    tokens = float(plan.N // (plan.t * l.p)) * l.m * plan.tokens
    return StepTime(compute, communication, exposed, seconds, tokens, bubble=waits, formula=formula, tensor=busy - compute)


def pipeline_step(plan, w, s):
    """Of plan.N ranks. s: of a whole model on one rank."""
    plan = plan._replace(t=1, zero_stage=0)
    sums = Sums(w.neighbours(plan.N, plan.pipe.p), tied_group(plan, w), message_seconds(plan, w), unit_sent(plan, w, 1),
                unit_sent(plan, w, 0), each=(s.block_backward, weight_seconds(plan, s)))
    return played_step(plan, PP, w, pipe_times(plan, s), sums)


# ---- train_gpt2_3d ----
class Emulation(NamedTuple):
    """Actions of --emulate-ms: F, I and W of a rank, or if there is a head of a block."""
    ms: tuple
    head: float


def parse_emulation(text):
    """None: ''. Dies if the text is none that a stage accepts."""
    if text == "": return None
    try: numbers = [float(x) for x in text.split(",")]
    except ValueError: numbers = []
    require(len(numbers) in (3, 4) and all(x >= 0 for x in numbers), "--emulate-ms wants three numbers of milliseconds, as in 20,24,16,"
            f" and perhaps how many blocks the head costs, not '{text}'")
    return Emulation(tuple(numbers[:3]), numbers[3] if len(numbers) > 3 else 0.0)


def emulated_times(plan, e):
    """As train_gpt2_pp and train_gpt2_3d sleep."""
    blocks = split_of(plan)
    costs = [*blocks[:-1], blocks[-1] + e.head] if e.head > 0 else [1 / plan.pipe.v] * len(blocks)
    parts = [1e-3 * cost for cost in costs]
    return tuple(tuple(ms * part for ms in e.ms) for part in parts)


def block_times(plan, m, s):
    """F, I and W of a block of one rank. I + W is B, unless --schedule cuts it."""
    t, forward = Timeline(), s.block_forward / plan.t
    tensor_forward(m, forward, False, t)
    F = t.now
    if plan.recompute: tensor_forward(m, forward, True, t)
    again = t.now - F
    tensor_backward(plan, m, forward, t)
    B, W = t.now - F, weight_seconds(plan, s) / plan.t
    if plan.pipe.schedule != "zb-h1": return F, B - W, W
    I = again + 2 * forward - W + 2 * (m.gather + m.sum)
    return F, I, W + (0 if plan.keep_gathered else 2 * max(0, m.gather - W / 2))


def mesh_times(plan, m, s):
    F, I, W = block_times(plan, m, s)
    times = [[n * F, n * I, n * W] for n in split_of(plan)]
    times[0][0] += m.sum    # of embeddings,
    times[0][1] += m.gather # and the rows of their gradients
    times[-1][0] += m.gather
    times[-1][1] += s.head / plan.t + m.stats + m.sum
    return tuple(map(tuple, times))


def mesh_sums(plan, w, m):
    p, node = plan.pipe.p, 1 if crosses(plan, w) else None # ranks of a group in a node, if it has several nodes
    return Sums(Group(p, node or p, plan.t), Group(2 if p > 1 else 1, node or 2, plan.t), message_seconds(plan, w),
                unit_sent(plan, w, 1), unit_sent(plan, w, 0), m.layernorms)


def mesh_step(plan, w, s, emulation):
    """The same. emulation: the times of actions instead, if there is one."""
    m = tensor_messages(plan, w)
    if emulation: return played_step(plan, MESH, w, emulated_times(plan, emulation), mesh_sums(plan, w, m))
    whole = plan.accumulation * (plan.config.L * (s.block_forward + s.block_backward) + s.head)
    return played_step(plan, MESH, w, mesh_times(plan, m, s), mesh_sums(plan, w, m), whole / (plan.t * plan.pipe.p))
