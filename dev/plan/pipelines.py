"""Seconds of a step of train_gpt2_pp, and of train_gpt2_3d, which has copies of p stages of t ranks.

Actions   A stage's F, I and W take what its blocks take. The last stage's I has the head, its forward pass included, because the
          program computes logits only there. Embedding takes no time. On a mesh they are 1/t of that, and in each block are the
          sums of tensor parallelism: B hides what dW can hide; I of zb-h1 hides nothing, because its W comes later.
Schedule  It is played. All messages take as long as on the slowest link between neighbours.
After it  A stage sums a block's gradients over the replicas of the model once its last micro-batch has left the block, beside what
          it still has to compute. The root's are first summed over the two stages that have it. Then three numbers are summed over
          the stages: the loss and two norms. The next step's first forward passes hide the gathers of --zero-stage 1.
"""
import math
from typing import NamedTuple
from tool import require
from machines import ALL_REDUCE, Group
from questions import MESH, PP, blocks_of, play, split_of
from steps import (StepTime, Timeline, abreast, block_flops, block_sent, crosses, hop_seconds, layernorms_sum, tensor_backward,
                   tensor_forward, tensor_messages, unit_sent, update_seconds)


# ---- messages ----
def message_bytes(plan): return float(plan.tokens) * plan.shape.C * plan.X
def message_seconds(plan, w): return hop_seconds(plan, w, message_bytes(plan) / (plan.t if plan.rows else 1)) if plan.p > 1 else 0


def tied_group(plan, w):
    """The two ranks of a copy that have the root. If they are in different nodes, they use one of its interfaces."""
    apart = crosses(plan, w)
    return Group(2 if plan.p > 1 else 1, 1 if apart else 2, w.nics if apart else 1)


# ---- sums over replicas of the model, and gathers ----
def gather_delay(plan, y, block, root):
    """By how much the gathers of an update, of so many seconds, delay the next step: first blocks are computed as they arrive."""
    most = 0.0
    for r in range(plan.p if plan.zero_stage else 0):
        n, (*_, begin, end) = blocks_of(plan, r), y["ranks"][r]["boxes"][0]
        first = (root if r in (0, plan.p - 1) else 0) - begin
        for i in range(n): most = max(most, first + (i + 1) * block - i * (end - begin) * plan.v / n)
    return most


def sum_blocks(plan, y, rank, m, t):
    """Sums rank's blocks over the copies, each when it is complete, in t's queue; then t.now is when it has computed all."""
    blocks = split_of(plan)
    for kind, micro, part, begin, end in y["ranks"][rank]["boxes"]:
        if micro < plan.accumulation - 1 or kind not in "BW": continue
        n = blocks[part * plan.p + rank]
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
    each: tuple = (0, 0)     # of a block in B, in W; 0: all blocks take equal parts of an action, and as much comes before them


def end_of(plan, w, y, m):
    """When all ranks have what the update needs, and the communication of the rank that communicates longest."""
    ends, number = (0, plan.p - 1), w.seconds(ALL_REDUCE, 8.0, m.pp)
    root = w.seconds(ALL_REDUCE, float(plan.shape.unit(0, plan.t)) * plan.X, m.tied)
    end = communication = 0.0
    for r in range(plan.p):
        messages = plan.accumulation * (2 * plan.v - (r == 0) - (r == plan.p - 1)) if plan.p > 1 else 0
        t = Timeline(messages * m.message)
        sum_blocks(plan, y, r, m, t)
        if r in ends:
            t.wait(max(y["ranks"][k]["end"] for k in ends))
            t.wait_shared(root)
            t.send(m.root[0])
        t.wait_all()
        t.wait_shared(layernorms_sum(plan, w, blocks_of(plan, r)))
        end, communication = max(end, t.now), max(communication, t.communication + 3 * number)
    return end + 3 * number + gather_delay(plan, y, m.block[1], m.root[1]), communication


def played_step(plan, strategy, w, times, sums, compute=None):
    """Of plan.N ranks, by the times of actions. compute: of these, what an average rank computes; None: all."""
    y = play(plan, times, 0)
    busy = sum(rank["busy"] / plan.p for rank in y["ranks"])
    waits, compute = y["step"] - busy, busy if compute is None else compute
    seconds, communication = end_of(plan, w, play(plan, times, sums.message), sums)
    exposed = seconds - busy - waits
    if strategy == MESH: seconds += w.sm_share * max(0, communication - exposed) # compute, while something is sent beside it
    seconds += update_seconds(plan, strategy)
    formula = math.nan if y["bubble"] is None else y["bubble"]
    tokens = float(plan.N // (plan.t * plan.p)) * plan.accumulation * plan.tokens
    return StepTime(compute, communication, exposed, seconds, tokens, bubble=waits, formula=formula, tensor=busy - compute)


# ---- train_gpt2_pp ----
# Of W in a block: 2 FLOPs for each weight of its matrices and token.
def weight_seconds(plan, s): return s.block_forward * 24.0 * plan.shape.C * plan.shape.C / (block_flops(plan) / 3)


def action_times(plan, F, I, W, head):
    """(F, I, W) of each part of the model, by those of a block."""
    times = [[n * F, n * I, n * W] for n in split_of(plan)]
    times[-1][1] += head
    return times


def pipe_times(plan, s):
    W = weight_seconds(plan, s)
    return action_times(plan, s.block_forward, s.block_backward - W, W, s.head)


def pipeline_step(plan, w, s):
    """Of plan.N ranks. s: of a whole model on one rank."""
    plan = plan._replace(t=1, zero_stage=0)
    sums = Sums(w.neighbours(plan.N, plan.p), tied_group(plan, w), message_seconds(plan, w), block_sent(plan, w),
                unit_sent(plan, w, 0), each=(s.block_backward, weight_seconds(plan, s)))
    return played_step(plan, PP, w, pipe_times(plan, s), sums)


# ---- train_gpt2_3d ----
def block_times(plan, m, s):
    """F, I and W of a block of one rank. I + W is B, unless --schedule cuts it."""
    t, forward = Timeline(), s.block_forward / plan.t
    tensor_forward(m, forward, False, t)
    F = t.now
    if plan.recompute: tensor_forward(m, s.block_again / plan.t, True, t)
    again = t.now - F
    tensor_backward(m, forward, t)
    B, W = t.now - F, weight_seconds(plan, s) / plan.t
    if plan.schedule != "zb-h1": return F, B - W, W
    I = again + 2 * forward - W + 2 * (m.gather + m.sum)
    # The gather of a layernorm's output overlaps with the first of a half's two products: 1 and 4 of the 12 C^2 weights of W.
    return F, I, W + sum(max(0, m.gather - n / 12 * W) for n in (1, 4))


def mesh_step(plan, w, s):
    """The same."""
    m, node = tensor_messages(plan, w), 1 if crosses(plan, w) else None # ranks of a group in a node, if it has several nodes
    share = abreast(plan, w) if node else plan.t
    sums = Sums(Group(plan.p, node or plan.p, share), Group(2 if plan.p > 1 else 1, node or 2, share), message_seconds(plan, w),
                block_sent(plan, w), unit_sent(plan, w, 0))
    times = action_times(plan, *block_times(plan, m, s), s.head / plan.t + m.stats + m.sum)
    times[0][0] += m.sum    # of embeddings,
    times[0][1] += m.gather # and the rows of their gradients
    times[-1][0] += m.gather
    whole = plan.accumulation * (plan.shape.L * (s.block_forward + s.block_backward) + s.head)
    return played_step(plan, MESH, w, times, sums, whole / (plan.t * plan.p))
