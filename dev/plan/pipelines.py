"""Seconds of a step of train_gpt2_3d, whose replicas are p stages of t ranks, and of train_gpt2_pp, where t is 1.

Actions   A stage's F, I and W take as long as its blocks. The last stage's I includes the head's forward pass, because the program
          computes logits only there. Embedding takes no time. On a mesh, actions take 1/t of that plus the sums of tensor
          parallelism in each block: dW hides sums in B, but not in I of zb-h1, whose W comes later.
Schedule  It is played. All messages take as long as on the slowest link between neighbours.
After it  A stage sums a block's gradients over the replicas once the last micro-batch has left the block, while it computes what is
          left. The root's gradients are first summed over the two stages that hold it. Then the stages sum three numbers: the loss
          and two norms. The next step's first forward passes hide the gathers of --zero-stage 1.
"""
import math
from dev.plan.machines import ALL_REDUCE, Group
from dev.plan.plans import blocks_of, play, split
from dev.plan.steps import (StepTime, Timeline, abreast, block_flops, block_sent, crosses, hop_seconds, layernorms_sum, root_sent,
                            tensor_block, tensor_messages, update_seconds)


def message_seconds(plan, w):
    """Between two stages."""
    return hop_seconds(plan, w, plan.activation / (plan.t if plan.rows else 1)) if plan.p > 1 else 0


def tied_group(plan, w):
    """The two ranks of a replica that hold the root. In different nodes they use one interface, or share it."""
    apart = crosses(plan, w)
    return Group(2 if plan.p > 1 else 1, 1 if apart else 2, max(w.nics, abreast(plan, w)) if apart else 1)


# ---- the times of actions ----
# Of W in a block: 2 FLOPs for each weight of its matrices and token.
def weight_seconds(plan, s): return s.block_forward * 24.0 * plan.shape.C * plan.shape.C / (block_flops(plan) / 3)


def block_times(plan, m, s):
    """F, I and W of a block on one rank, which has its share of s. I + W is B, unless the schedule cuts it."""
    t = Timeline()
    forward, again, backward = tensor_block(m, s, t)
    forward()
    F = t.now
    if plan.again: again()
    backward()
    B, W = t.now - F, weight_seconds(plan, s)
    if plan.schedule != "zb-h1": return F, B - W, W
    # gathering a layernorm's output overlaps with the first product of each half: 1 and 4 of the 12 C^2 weights of W
    return F, 2 * s.block_forward - W + 2 * (m.gather + m.sum), W + sum(max(0, m.gather - n / 12 * W) for n in (1, 4))


def action_times(plan, m, s):
    """(F, I, W) of each part of the model."""
    times = [[n * x for x in block_times(plan, m, s)] for n in split(plan)["blocks"]]
    times[0][0] += m.sum    # of embeddings,
    times[0][1] += m.gather # and the rows of their gradients
    times[-1][0] += m.gather
    times[-1][1] += s.head + m.stats + m.sum
    return times


# ---- sums over replicas of the model, and gathers ----
def gather_delay(plan, y, block, root):
    """How long the gathers after an update, of so many seconds, delay the next step, which computes blocks as they arrive."""
    most = 0.0
    for r in range(plan.p if plan.zero_stage else 0):
        n, (*_, begin, end) = blocks_of(plan, r), y["ranks"][r]["boxes"][0]
        first = (root if r in (0, plan.p - 1) else 0) - begin
        for i in range(n): most = max(most, first + (i + 1) * block - i * (end - begin) * plan.v / n)
    return most


def sum_blocks(plan, y, rank, seconds, of_block, t):
    """Sums a rank's blocks over the replicas in t's queue, each when it is complete; at the end t.now is when the rank has computed
    everything. of_block: seconds of a block in B and in W; None: each block, and the work before them, takes an equal part."""
    blocks = split(plan)["blocks"]
    for kind, micro, part, begin, end in y["ranks"][rank]["boxes"]:
        if micro < plan.accumulation - 1 or kind not in "BW": continue
        n = blocks[part * plan.p + rank]
        each = of_block[kind] if of_block else (end - begin) / (n + 1)
        for left in range(n - 1, -1, -1): # a head comes before the blocks
            t.now = end - left * each
            t.send(seconds)
    t.now = y["ranks"][rank]["end"]


def end_of(plan, w, y, message, of_block):
    """When all ranks are ready for the update, and how long the busiest rank communicates."""
    ends, blocks, roots = (0, plan.p - 1), block_sent(plan, w), root_sent(plan, w)
    stages = Group(plan.p, 1 if crosses(plan, w) else plan.p, abreast(plan, w)) # if t ranks are a stage, or neighbours are copies
    over = w.neighbours(plan.N, plan.p) if plan.t == 1 and not plan.pp_outside else stages
    numbers = sum(w.seconds(ALL_REDUCE, 8.0 * n, over) for n in (3, 1, 1)) # the loss and two counts of ranks; two norms
    tied = w.seconds(ALL_REDUCE, float(plan.shape.unit(0, plan.t)) * plan.X, tied_group(plan, w))
    end = communication = 0.0
    for r in range(plan.p):
        messages = plan.accumulation * (2 * plan.v - (r == 0) - (r == plan.p - 1)) if plan.p > 1 else 0
        t = Timeline(messages * message)
        sum_blocks(plan, y, r, blocks[0], of_block, t)
        if r in ends:
            t.wait(max(y["ranks"][k]["end"] for k in ends))
            t.wait_shared(tied)
            t.send(roots[0])
        t.wait_all()
        t.wait_shared(layernorms_sum(plan, w, blocks_of(plan, r)))
        end, communication = max(end, t.now), max(communication, t.communication + numbers)
    return end + numbers + gather_delay(plan, y, blocks[1], roots[1]), communication


# ---- a step of N ranks ----
def pipeline_step(plan, name, w, s):
    """s: of a whole model on one rank."""
    if name == "pp": plan = plan.but(t=1, zero_stage=0)
    s = s.shared(plan.t)
    times, message = action_times(plan, tensor_messages(plan, w), s), message_seconds(plan, w)
    y = play(plan, times, 0)
    busy = sum(rank["busy"] / plan.p for rank in y["ranks"])
    waits, compute = y["step"] - busy, plan.accumulation * s.model(plan.shape.L) / plan.p
    of_block = {"B": s.block_backward, "W": weight_seconds(plan, s)} if name == "pp" else None
    seconds, communication = end_of(plan, w, play(plan, times, message), message, of_block)
    exposed = seconds - busy - waits
    slowed = w.sm_share * max(0, communication - exposed) # compute is slower while messages travel
    return StepTime(compute, communication, exposed, seconds + slowed + update_seconds(plan, name),
                    float(plan.N // (plan.t * plan.p)) * plan.accumulation * plan.tokens_of, bubble=waits,
                    formula=math.nan if y["bubble"] is None else y["bubble"], tp=max(0, busy - compute))
