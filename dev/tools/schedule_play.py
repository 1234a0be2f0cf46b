"""Plays a pipeline's schedule: when each action begins and ends, if every rank does its actions in order and each as early as its
input is there. Orders and formulas of train_gpt2_pp's schedules are its own (schedule_order.c). Three more are in no stage file:

    zb-h2     (Qi et al. 2023, arXiv 2401.10241, section 2.2) runs ahead twice as far as zb-h1: min(m, 2p-1) activations
    zb-v      (section 6 there) two chunks a rank, r and 2p-1-r, so that rank 0 has the first and the last; p activations
    dualpipe  (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) half of the micro-batches begin at each end, so a rank has the
              stages r and p-1-r: twice the parameters, p+1 activations. It is made for overlapping an F and a B of the other
              direction; here B follows F. The paper's bubble is longer, because there both end when the pair ends

The bubble of zb-h2 and zb-v is 0 only if a rank may begin its next step before the others have ended this one. A step that
ends in a sum over ranks, as that of the gradient norm, waits for the last stage, which cannot begin before (p-1) tF (zb-v:
half of that).
"""
import json, os
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple
from tool import ask, require, started

SCHEDULES = "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"  # the first four in the order of pipeline.h
ALIVE = {"F": 1, "B": -1, "I": 0, "W": -1}  # by how much an action changes the number of activations that a rank keeps


class Pipeline(NamedTuple):
    schedule: str
    p: int   # stages (ranks),
    m: int   # micro-batches in a step,
    v: int   # and chunks a rank

    is_cut = property(lambda self: SCHEDULES.index(self.schedule) >= 3)
    is_dual = property(lambda self: self.schedule == "dualpipe")

    def chunks(self, rank):
        """Their numbers in the model. Those of dualpipe's second direction are p to 2p-1."""
        turns_back = self.schedule in ("zb-v", "dualpipe")
        return [rank, 2 * self.p - 1 - rank] if turns_back else list(range(rank, self.p * self.v, self.p))

    # A micro-batch begins and ends in these chunks.
    def is_first(self, g): return g == 0 or (self.is_dual and g == self.p)
    def is_last(self, g): return g == self.p * self.v - 1 or (self.is_dual and g == self.p - 1)

    def messages(self):
        """Of all ranks in a step: a micro-batch crosses each boundary between chunks of two ranks twice. Chunks p-1 and p of zb-v
        are on one rank."""
        boundaries = self.p - 1 if self.is_dual else self.p * self.v - 1 - (self.schedule == "zb-v")
        return 2 * self.m * boundaries if self.p > 1 else 0


def ask_player(folder, **request):
    """What schedule_order in this folder says; schedule_order.c lists the requests."""
    path = os.path.join(folder, "schedule_order")
    return ask(started(path, f"{path} is missing, which knows schedules; make tools builds it"), json.dumps(request))


# ---- the orders of the last three, as words: "F0" is F of the next micro-batch in chunk 0 ----
def zb_h2_words(l, rank):
    ahead = min(l.m, 2 * (l.p - 1 - rank))
    words = ["F0"] * ahead
    for b in range(l.m): words += ["F0"] * (ahead + b < l.m) + ["I0"] + ["W0"] * (b >= 2 * rank)
    return words + ["W0"] * min(l.m, 2 * rank)


def zb_v_words(l, rank):
    """By the rule of PyTorch's ScheduleZBVZeroBubble."""
    n, after = max(l.m, 2 * l.p - 1), l.p - rank  # it is made for 2p-1 micro-batches at least
    words = ["F0"] * (2 * after - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * after
    for i in range(n - l.p): words += ["F0"] * (2 * after - 1 + rank + i < n) + ["I0", "W0", "F1", "I1", "W1"]
    return words + ["I0", "I1"] * rank + ["I0", "W0"] * after + ["W1"] * rank + ["W0"] * rank


def dualpipe_words(l, rank):
    """The eight steps of github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py. "W" is the oldest W of both chunks."""
    own = int(rank >= l.p // 2)  # the direction that reaches the rank first
    outer = l.p - 1 - rank if own else rank
    inner, all = l.p // 2 - 1 - outer, outer + 1
    F, B, I = ((f"{letter}{own}", f"{letter}{1 - own}") for letter in "FBI")
    words = [F[0]] * 2 * inner + [*F] * all + [I[1], "W", F[1]] * inner + [F[0], B[1], F[1], B[0]] * (l.m // 2 - l.p + all)
    words += [B[1], F[1], B[0]] * inner
    for i in range(all): words += [(I if i >= all / 2 else B)[1], (I if i >= all // 2 else B)[0]]
    return words + ["W", I[0]] * inner + ["W"] * all


def actions_of(l, words):
    """[[letter, micro-batch, chunk], ..]"""
    second = l.m // 2 if l.is_dual else 0
    forward, backward, owed, actions = [0, second], [0, second], [], []
    for word in words:
        if word[0] == "W":
            micro, chunk = owed.pop(next(i for i, (_, chunk) in enumerate(owed) if word in ("W", f"W{chunk}")))
        else:
            chunk, count = int(word[1]), forward if word[0] == "F" else backward
            micro = count[chunk]
            count[chunk] += 1
            if word[0] == "I": owed.append((micro, chunk))
        actions.append([word[0], micro, chunk])
    return [action for action in actions if action[1] < l.m]


@lru_cache(16)
def schedule_of(folder, l, F, I, W):
    """Of each rank its actions in order, and by formula the most (micro-batch, chunk) that it keeps activations of; by formula also
    the bubble of a balanced pipeline, in the unit of F, I, W, which are the times of all chunks of a rank. None: there is none."""
    if l.schedule in SCHEDULES[:4]:
        found = ask_player(folder, **l._asdict() | {"schedule": SCHEDULES.index(l.schedule)}, times=(F, I, W))
        return found["orders"], found["slots"], found["bubble"] if l.schedule != "zb-h1" or l.m >= l.p else None
    words = {"zb-h2": zb_h2_words, "zb-v": zb_v_words, "dualpipe": dualpipe_words}[l.schedule]
    is_long = l.m >= 2 * l.p - 1
    slots = {"zb-h2": min(l.m, 2 * l.p - 1), "zb-v": 2 * l.p if is_long else None, "dualpipe": l.p + 1}[l.schedule]
    bubble = {"zb-h2": (l.p - 1) * F if is_long else None, "zb-v": (l.p - 1) * F / 2 if is_long and F == I == W else None,
              "dualpipe": (l.p / 2 - 1) * max(F + I - W, F)}[l.schedule]
    return [actions_of(l, words(l, r)) for r in range(l.p)], [slots] * l.p, bubble


# ---- time ----
def rules_of(l, rank, of_chunk):
    """By letter and chunk of a rank's actions: (what it needs, whether that is a message, what it makes, which rank that goes to if it is
    another, time). What is made is F or W of a chunk, or "B", for B and I."""
    own, rules = l.chunks(rank), {}
    rank_of = {g: r for r in range(l.p) for g in l.chunks(r)}
    for c, g in enumerate(own):
        F, I, W = of_chunk[g]
        forward, backward = None if l.is_first(g) else ("F", g - 1), ("F", g) if l.is_last(g) else ("B", g + 1)
        after, before = None if l.is_last(g) else rank_of[g + 1], None if l.is_first(g) else rank_of[g - 1]
        for letter, needs, made, to, time in (("F", forward, "F", after, F), ("B", backward, "B", before, I + W),
                                              ("I", backward, "B", before, I), ("W", ("B", g), "W", None, W)):
            rules[letter, c] = needs, needs is not None and needs[1] not in own, (made, g), None if to == rank else to, time
    return rules


def play(folder, l, times, of_chunk=None, of_action=None, message=0):
    """A step of "ranks". times: (F, I, W) of all chunks of a rank, for the formulas. of_chunk: the same of each chunk in the model;
    or of_action: how long each action of each rank takes. message: between two ranks; those that a rank sends take turns."""
    orders, slots, bubble = schedule_of(folder, l, *times)
    rules = [rules_of(l, r, of_chunk or [(0, 0, 0)] * (l.p * l.v)) for r in range(l.p)]
    ended = {None: [0] * l.m} | {(made, g): [None] * l.m for made in "FBW" for g in range(l.p * l.v)}  # of each micro-batch
    arrived, free = {needs: [None] * l.m for needs in ended}, {}  # at another rank; when a rank's link is free again
    played, able, waiting = [[] for _ in range(l.p)], list(range(l.p)), {}
    while able:
        rank = able.pop()
        order, rule, boxes = orders[rank], rules[rank], played[rank]
        now = boxes[-1][4] if boxes else 0
        for k in range(len(boxes), len(order)):
            letter, micro, chunk = order[k]
            needs, is_message, makes, to, time = rule[letter, chunk]
            ready = (arrived if is_message else ended)[needs][micro]
            if ready is None:
                waiting[needs, micro] = rank
                break
            begin = max(ready, now)
            ended[makes][micro] = now = begin + (of_action[rank][k] if of_action else time)
            if to is not None: arrived[makes][micro] = free[rank] = max(now, free.get(rank, 0)) + message
            boxes.append([letter, micro, chunk, begin, now])
            if (makes, micro) in waiting: able.append(waiting.pop((makes, micro)))
    require(not waiting, f"{l.schedule} deadlocks: {len(waiting)} ranks wait for others")
    ranks = [{"busy": sum(end - begin for *_, begin, end in boxes), "end": boxes[-1][4], "chunks": l.chunks(r), "boxes": boxes,
              "peak": max(accumulate(ALIVE[letter] for letter, *_ in boxes)), "slots": most,  # activations, and by formula
              "sends": sum(rule[letter, chunk][1] for letter, _, chunk, *_ in boxes)}  # as many messages as it receives
             for r, (boxes, rule, most) in enumerate(zip(played, rules, slots))]
    unclipped = max(rank["end"] - rank["boxes"][0][3] for rank in ranks)  # a step, if each rank begins the next one at its own end
    return {"step": max(rank["end"] for rank in ranks), "unclipped": unclipped, "bubble": bubble, "ranks": ranks}
