"""Bytes and seconds of any model on any mesh of known GPUs: data, tensor, context and pipeline parallelism, and ZeRO over data and
context. The other modules predict this course's programs, to the byte. This one compares published figures of other models and
programs, and times the search of a mesh. Weights and activations have 16 bits, with an fp32 master copy.

Compute   A block's products take FLOPs / (peak x the share that large products reach); all else moves bytes as fast as copies.
Pipeline  The slowest stage sets the pace; p-1 times that, divided by the chunks of a rank, is the bubble. This course's stages take
          about equal times (split.h), so their bubble is a micro-batch's time in all stages but the slowest.
Data      The last backward pass hides dp's sums and reductions, and the next forward pass its gathers. If parameters are sharded,
          every pass hides its own traffic. The rest is exposed, and so is the wait for the first block and the root. Megatron's
          early versions hide nothing.
Context   cp ranks follow those of tp and share each sequence evenly, as in zigzag. Attention hides a ring's hops.
"""
import math
from collections import namedtuple
from tool import ceil_div
from dev.plan.machines import ALL_GATHER, ALL_REDUCE, network_of_gpu
from dev.plan.plans import Plan, split
from dev.plan.shapes import bytes_of_states

# Activations that a block keeps for its backward pass: all; all but attention's (T,T) matrices; half of the products' inputs; only
# the block's input. The others are computed again.
ALL, SELECTED, HALF, INPUTS = "all", "selected", "operations", "inputs"
# How a program computes. flash: attention never stores its (T,T) matrices; hides_sums: tensor parallelism's, behind dW; hides_data:
# dp's traffic, behind compute; passes: over memory outside products, 1 if kernels are fused and there is no dropout; bytes of each
# gradient, in memory and in messages; of each logit of a micro-batch, with the gradient and copies; gathers: blocks gathered at a
# time, if parameters are sharded; most_busbw: the program's own limit, in bytes/s, on dp's gathers and sums; ours: this course's,
# whose stages take about equal times and which does not recompute the MLP's last product; products: how much faster a block's are
# than in 16 bits; attention: the share of the 16-bit peak that it reaches, 0: that of large products; ring: cp's keys and values
# travel while attention computes, else all are gathered first.
Program = namedtuple("Program", "flash hides_sums hides_data passes gradient_bytes logit_bytes gathers most_busbw ours"
                     " products attention ring", defaults=(2, math.inf, False, 1, 0, True))
SHARD = Program(True, True, True, 1, 2, 2, ours=True)

# llm.c's runs on A100s and H100s set the rates of large products and copies. Table 4 of arXiv 2205.05198 and torchtitan's first row
# set the passes of Megatron and of eager programs. The other published rows are predictions.
OUTSIDE, INSIDE = 10, 14 # times C: numbers per token that a block's forward pass reads or writes outside and inside tp's parts
HOP = 10e-6 # seconds of a message's latency

# Bytes of the rank with most. Seconds of a step, the sum of the six before it; MFU by causal FLOPs, without recomputation.
MeshBytes = namedtuple("MeshBytes", "parameters gradients optimizer activations gathered total")
MeshTime = namedtuple("MeshTime", "compute tensor bubble messages data update seconds mfu tokens_per_s")


class MeshPlan(Plan):
    """d, t, p, c: ranks of each axis; zero: dp and cp shard 0: nothing, 1: the optimizer's state, 2: and gradients, 3: and
    parameters; batch: sequences of a step; v: parts of the model on a rank; rows: tp also cuts activations outside the products;
    unusable: bytes that a rank cannot use (context, NCCL, fragmentation)."""
    def __init__(self, **fields):
        own = {"d": 1, "t": 1, "p": 1, "c": 1, "v": 1, "zero": 0, "kept": ALL, "program": SHARD, "unusable": 0}
        super().__init__(**own | fields)
        self.copies = self.d * self.c                                # ranks with the same part of the model
        self.N = self.copies * self.t * self.p
        self.accumulation = self.batch // (self.d * self.B)          # micro-batches of a rank
        self.tokens_each = float(self.B) * self.T / self.c           # of a micro-batch, on a rank
        self.blocks = ceil_div(self.shape.L, self.p)                 # of a rank, as evenly as possible
        self.network = network_of_gpu(self.chip)

    def error(self):
        """None, or why there cannot be such a mesh."""
        even = self.v == 1 or self.p > 1 and self.accumulation % self.p == 0
        why = {"heads do not divide": self.shape.NH % self.t or self.shape.NKV % self.t,
               "the batch does not divide": self.batch % (self.d * self.B),
               "there are fewer blocks than stages": self.shape.L < self.p * self.v,
               "micro-batches do not divide over stages": not even,
               "sequences do not divide": self.c > 1 and self.T % (2 * self.c),
               "rows do not divide": self.rows and self.tokens_each % self.t}
        return next((text for text, holds in why.items() if holds), None)

    def collective(self, ranks, apart, all_reduce, nbytes):
        """Seconds of an all-reduce, or of a gather or reduce-scatter, between so many ranks, each so far from the next. tp's ranks
        are neighbours; then come those of cp, pp and dp. nbytes: of the largest buffer."""
        return self.network.seconds(ALL_REDUCE if all_reduce else ALL_GATHER, nbytes, self.network.apart(self.N, apart, ranks))

    def data_collective(self, all_reduce, nbytes):
        """The same between the ranks of dp and cp."""
        least = (2 if all_reduce else 1) * nbytes * (self.copies - 1) / self.copies / self.program.most_busbw
        return max(least, self.collective(self.copies, self.t * self.p, all_reduce, nbytes))

    # ---- bytes ----
    def block_parameters(self): return (self.shape.block_weights() + self.shape.block_vectors()) / self.t

    def parameters(self):
        """Of the rank with most: the first and last stage hold the root, or half of it if the head is not tied."""
        root = self.shape.root_parameters() / self.t
        return self.blocks * self.block_parameters() + (root / 2 if self.shape.llama and self.p > 1 else root)

    def numbers(self, kept):
        """16-bit numbers per token that a rank keeps of a block."""
        s, C = self.shape, self.shape.C / (self.t if self.rows else 1)
        if kept == INPUTS: return C
        if kept == HALF: return 2 * C + (3 * s.C + 2 * s.kv_channels + (2 if s.llama else 1) * s.F) / 2 / self.t
        scores = 2.5 * s.NH * self.T / self.t if kept == ALL and not self.program.flash else 0 # 5as of arXiv 2205.05198, in bytes
        return s.block_activations(self.t, self.rows) + scores

    def bytes(self):
        gradient, sharded = self.program.gradient_bytes, self.zero == 3 # then shards are the fp32 master copy
        parameters, gradients, optimizer = (self.parameters() * x for x in bytes_of_states(
            self.zero, self.copies, not sharded, gradient=4 if sharded else gradient))
        # the whole root and some blocks, and the gradients of the root and of one block
        root, gathers = self.shape.root_parameters() / self.t, self.program.gathers
        gathered = (2 + gradient) * root + (2 * gathers + gradient * min(gathers, 1)) * self.block_parameters() if sharded else 0
        again = self.numbers(ALL) if self.kept == INPUTS else 0 # of the block at work
        # micro-batches that the first stage keeps activations of: p in 1F1B, more with chunks
        more = (self.p - 1.0) / (self.p * self.v) if self.v > 1 else 0
        in_flight = min(self.accumulation, self.p * (1 + more))
        # a pipeline's last stage makes logits, but keeps few micro-batches
        logits = self.program.logit_bytes * self.tokens_each * self.shape.V / self.t if self.p == 1 else 0
        activations = 2 * self.tokens_each * (self.blocks * in_flight * self.numbers(self.kept) + again) + logits
        kept = parameters, gradients, optimizer, activations, gathered
        return MeshBytes(*kept, sum(kept) + self.unusable)

    # ---- seconds ----
    def moved(self, nbytes): return nbytes / (self.chip.bandwidth * 0.9)
    def multiplied(self, flops): return flops / self.chip.peak16 / self.chip.products

    def attended(self):
        """Forward attention of a block and micro-batch."""
        flops = self.shape.attention_flops(self.T, self.program.flash) / 3 * self.tokens_each / self.t
        return flops / self.chip.peak16 / self.program.attention if self.program.attention else self.multiplied(flops)

    def block_compute(self):
        """Forward, backward and recomputation of a block and micro-batch; forward of the head."""
        s, C, tokens, t = self.shape, self.shape.C, self.tokens_each, self.t
        outside, inside = float(OUTSIDE) * C / (t if self.rows else 1), float(INSIDE) * C / t
        scores = 0 if self.program.flash else 6.5 * s.NH * self.T / t # by softmax, dropout and their neighbours
        nbytes = 2 * tokens * ((outside + inside) * self.program.passes + scores)
        products, attention = self.multiplied(2 * s.block_weights() * tokens / t) / self.program.products, self.attended()
        forward, again = products + attention + self.moved(nbytes), 0
        if self.kept == INPUTS: again = forward - (self.multiplied(2 * C * s.F * tokens / t) if self.program.ours else 0)
        if self.kept == HALF: again = products / 2 + self.moved(nbytes)
        if self.kept == SELECTED and not self.program.flash: again = attention + self.moved(2 * tokens * scores)
        head = self.multiplied(2.0 * C * s.V * tokens / t) + self.moved(4 * tokens * s.V / t)
        return forward, 2 * forward, again, head

    def tensor_waits(self):
        """How long tp and cp wait in a block and micro-batch. One dW hides each of the backward pass's two sums."""
        s, C, tokens, hides = self.shape, float(self.shape.C), self.tokens_each, self.program.hides_sums
        total = self.collective(self.t, 1, not self.rows, 2 * tokens * C)
        gather = total if self.rows else 0
        qkv = self.multiplied(2 * tokens * C * (C + 2 * s.kv_channels) / self.t) if hides else 0
        fc = self.multiplied(2 * tokens * C * s.F * (2 if s.llama else 1) / self.t) if hides else 0
        backward = 2 * gather + max(0, total - qkv) + max(0, total - fc)
        again = 2 * gather + total if self.kept == INPUTS else 0 # the last sum need not be repeated
        return 2 * (total + gather) + backward + again + self.context_waits()

    def rate(self, apart, ranks):
        """Bytes per second between two ranks that are so far apart, in groups of so many ranks."""
        w, inside = self.network, self.network.inside.busbw[ALL_GATHER]
        if not 0 < w.per_node < apart * ranks: return inside
        return min(inside, w.between.busbw[ALL_GATHER] * min(1, w.interfaces() / min(apart, w.per_node)))

    def context_waits(self):
        """cp waits for keys and values in both passes, and for their gradients."""
        nbytes = 2 * self.tokens_each * 2 * self.shape.kv_channels / self.t
        forward = 2 if self.kept == INPUTS else 1
        if not self.program.ring: return (forward + 2) * self.collective(self.c, self.t, False, nbytes * self.c)
        hop, part = nbytes / self.rate(self.t, self.c) + HOP, self.attended() / self.c
        return (self.c - 1) * (forward + 2) * max(0, hop - part) # backward sends and computes twice as much

    def data_waits(self, busy, backward, forward):
        """How long a step waits for dp. Its messages overlap with all compute of a step (busy) or with a micro-batch's passes."""
        if self.copies == 1: return 0
        block, hides = self.block_parameters(), self.program.hides_data
        root = self.parameters() - self.blocks * block
        last, reduce = (self.data_collective(self.zero == 0, self.program.gradient_bytes * n) for n in (root, block))
        first, gather = (self.data_collective(False, 2.0 * n) if self.zero > 0 else 0 for n in (root, block))
        sums, gathers = self.blocks * reduce + last, self.blocks * gather + first # after the last block's, of the root
        if self.zero == 3:
            sent = self.accumulation * self.blocks * (2 * gather + reduce) + first + last
            return max(gather + first + last, sent - busy) if hides else sent
        # ZeRO-2 reduces in every micro-batch; the next one hides it
        before = self.accumulation - 1 if self.zero == 2 else 0
        if not hides: return (before + 1) * sums + gathers
        return before * max(0, sums - backward - forward) + max(last, sums - backward) + max(first, gathers - forward)

    def stages(self, block, head):
        """Seconds of a micro-batch in the slowest stage, and in all others together."""
        if not self.program.ours or self.p == 1:
            slowest = self.blocks * block + head
            return slowest, (self.p - 1) * slowest
        *blocks, last = split(self)["blocks"]
        blocks.append(last + head / block)
        slowest = max(block * sum(blocks[r::self.p]) for r in range(self.p))
        return slowest, self.shape.L * block + head - slowest

    def step(self):
        forward, backward, again, head = self.block_compute()
        m, waits, L, p = self.accumulation, self.tensor_waits(), self.shape.L, self.p
        block, head = forward + backward + again, 3 * head
        slowest, others = self.stages(block + waits, head)
        compute, tensor = m * (L * block + head) / p, m * L * waits / p
        bubble = m * slowest + others / self.v - compute - tensor if p > 1 else 0
        message = 2 * self.tokens_each * self.shape.C / self.t
        messages = 2 * self.v * (m + p - 1) * (message / self.rate(self.t * self.c, p) + HOP) if p > 1 else 0
        data = self.data_waits(compute + tensor, self.blocks * (backward + again), self.blocks * forward)
        update = self.moved(28 * self.parameters() / (self.copies if self.zero > 0 else 1))
        seconds = compute + tensor + bubble + messages + data + update
        tokens_per_s = float(self.batch) * self.T / seconds
        mfu = self.shape.flops(self.T, True) * tokens_per_s / (self.N * self.chip.peak16)
        return MeshTime(compute, tensor, bubble, messages, data, update, seconds, mfu, tokens_per_s)
