"""Plays a pipeline's schedule: when each action begins and ends, if every rank does its actions in order and each as early as its
input is there. Orders and formulas are train_gpt2_pp's own (schedule_order.c)."""
import json, os
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple
from tool import ask, require, started

SCHEDULES = "gpipe", "1f1b", "interleaved", "zb-h1"  # in the order of pipeline.h
ALIVE = {"F": 1, "B": -1, "I": 0, "W": -1}  # by how much an action changes the number of activations that a rank keeps


class Pipeline(NamedTuple):
    schedule: str
    p: int   # stages (ranks),
    m: int   # micro-batches in a step,
    v: int   # and chunks a rank

    is_cut = property(lambda self: self.schedule == "zb-h1")
    parts = property(lambda self: self.p * self.v)

    def chunks(self, rank):
        """Their numbers in the model."""
        return range(rank, self.parts, self.p)

    def messages(self):
        """Of all ranks in a step: a micro-batch crosses each boundary between chunks twice."""
        return 2 * self.m * (self.parts - 1)


@cache
def ask_player(folder, **request):
    """What schedule_order in this folder says; schedule_order.c lists the requests."""
    path = os.path.join(folder, "schedule_order")
    return ask(started(path, f"{path} is missing, which knows schedules; make tools builds it"), json.dumps(request))


@lru_cache(16)
def schedule_of(folder, l, F, I, W):
    """Of each rank its actions in order, [[letter, micro-batch, chunk], ..], and by formula the most (micro-batch, chunk) that it
    keeps activations of; by formula also the bubble of a balanced pipeline, in the unit of F, I, W, which are the times of all
    chunks of a rank. None: there is none."""
    found = ask_player(folder, **l._asdict() | {"schedule": SCHEDULES.index(l.schedule)}, times=(F, I, W))
    return found["orders"], found["slots"], found["bubble"] if not l.is_cut or l.m >= l.p else None


# ---- time ----
def rules_of(l, rank, of_chunk):
    """By letter and chunk of a rank's actions: (what it needs, whether that is a message, what it makes, which rank that goes to if
    it is another, time). What is made is F or W of a chunk, or "B", for B and I."""
    rules, last = {}, l.parts - 1
    for c, g in enumerate(l.chunks(rank)):
        F, I, W = of_chunk[g]
        forward, backward = ("F", g - 1) if g > 0 else None, ("B", g + 1) if g < last else ("F", g)
        after, before = ((g + 1) % l.p if g < last else None), ((g - 1) % l.p if g > 0 else None)
        for letter, needs, made, to, time in (("F", forward, "F", after, F), ("B", backward, "B", before, I + W),
                                              ("I", backward, "B", before, I), ("W", ("B", g), "W", None, W)):
            is_message = needs is not None and needs[1] != g
            rules[letter, c] = needs, is_message, (made, g), to, time
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
    return {"step": max(rank["end"] for rank in ranks), "bubble": bubble, "ranks": ranks}
