"""Plays a pipeline's schedule: when each action begins and ends, if every rank does its actions in order and each as early as its
input is there. schedule_order gives the order of train_gpt2_pp's schedules. Three more are here, which no stage file has:

    zb-h2     (Qi et al. 2023, arXiv 2401.10241, section 2.2) runs ahead twice as far as zb-h1: min(m, 2p-1) activations
    zb-v      (section 6 there) two chunks a rank, r and 2p-1-r, so that rank 0 has the first and the last; p activations
    dualpipe  (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) half of the micro-batches begin at each end, so a rank has the
              stages r and p-1-r: twice the parameters, p+1 activations. It is made for overlapping an F and a D of the other
              direction; here D follows F. The paper's bubble is longer, because there both end when the pair ends

The bubble of zb-h2 and zb-v is 0 only if a rank may begin its next step before the others have ended this one. A step that ends in
a sum over ranks, as that of the gradient norm, waits for the last stage, which cannot begin before (p-1) tF (zb-v: half of that).
"""
import json, subprocess, sys
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tool import die

OF_RUNS = "gpipe", "1f1b", "interleaved", "zb-h1"  # as Schedule of llmc/parallel/pipeline.h has them
SCHEDULES = *OF_RUNS, "zb-h2", "zb-v", "dualpipe"


@cache
def schedule_order():
    path = Path(sys.argv[0]).parent / "schedule_order"
    if not path.exists(): die(f"{path} is missing, which has the order of schedules; make tools builds it")
    return subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(**request):
    """That program's answer to a request; of an error it has told the reason."""
    print(json.dumps(request), file=schedule_order().stdin, flush=True)
    answer = schedule_order().stdout.readline()
    return json.loads(answer) if answer else sys.exit(1)


# ---- the order of a rank's actions: (letter, micro-batch, chunk). In a text, F1 is the F of the next micro-batch in chunk 1 ----
def zb_h2(p, m, rank):
    ahead, late = 2 * (p - 1 - rank), 2 * rank
    words = ["F0"] * ahead
    for b in range(m): words += ["F0", "B0"] + ["W0"] * (b >= late)
    return numbered(words + ["W0"] * late, m)


def zb_v(p, m, rank):
    """By the rule of PyTorch's ScheduleZBVZeroBubble, which is made for 2p-1 micro-batches at least."""
    n = max(m, 2 * p - 1)
    begin = "F0 " * (2 * (p - rank) - 1) + "F1 F0 " * rank + "F1 B1 W1 " * (p - rank)
    steady = "F0 B0 W0 F1 B1 W1 " * (n - 2 * p + 1 + rank) + "B0 W0 F1 B1 W1 " * (p - 1 - rank)
    end = "B0 B1 " * rank + "B0 W0 " * (p - rank) + "W1 " * rank + "W0 " * rank
    return numbered((begin + steady + end).split(), m)


def numbered(words, m):
    """Numbers micro-batches from 0 in each chunk, and leaves out those from m on."""
    done, order = Counter(), []
    for word in words:
        if done[word] < m: order.append((word[0], done[word], int(word[1])))
        done[word] += 1
    return order


def dualpipe(p, m, rank):
    """The eight steps of github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py. Here F0 is of the direction that reaches the rank
    first, and F1 of the other one; W is that of the oldest B. Micro-batches of the second direction are those from m/2 on."""
    own = int(rank >= p // 2)
    outer = p - 1 - rank if own else rank
    inner = p // 2 - 1 - outer
    words = ("F0 " * (2 * inner) + "F0 F1 " * (outer + 1) + "B1 W F1 " * inner + "F0 D1 F1 D0 " * (m // 2 - p + outer + 1)
             + "D1 F1 D0 " * inner).split()
    words += [("D" if i <= outer else "B") + "10"[i % 2] for i in range(2 * (outer + 1))]
    words += ("W B0 " * inner + "W " * (outer + 1)).split()
    done, cut, order = Counter(), deque(), []
    for letter, *direction in words:
        if direction:
            chunk, way = own ^ int(direction[0]), letter == "F"
            action = chunk * (m // 2) + done[chunk, way], chunk
            done[chunk, way] += 1
            if letter == "B": cut.append(action)
        order.append((letter, *(action if direction else cut.popleft())))
    return order


@dataclass
class Pipeline:
    schedule: str
    p: int             # stages, each on a rank,
    m: int             # micro-batches
    v: int             # and chunks a rank

    is_dual = property(lambda self: self.schedule == "dualpipe")
    turns = property(lambda self: self.schedule in ("zb-v", "dualpipe"))  # chunk 1 of rank p-1 follows its chunk 0
    is_cut = property(lambda self: self.schedule.startswith("zb") or self.is_dual)  # D into B and W
    parts = property(lambda self: self.p if self.is_dual else self.p * self.v)  # of the model; with dualpipe two ranks have each

    def number(self, rank, chunk):
        """In the model, of a rank's chunk. Those of dualpipe's second direction are p..2p-1."""
        return 2 * self.p - 1 - rank if self.turns and chunk == 1 else chunk * self.p + rank

    def rank(self, g): return 2 * self.p - 1 - g if self.turns and g >= self.p else g % self.p
    def is_first(self, g): return g % self.parts == 0
    def is_last(self, g): return (g + 1) % self.parts == 0

    def input_of(self, letter, g):
        """The forward or backward pass, F or D, and the chunk that an action in chunk g waits for; None: for none."""
        if letter == "W": return "D", g
        if letter == "F": return None if self.is_first(g) else ("F", g - 1)
        return ("F", g) if self.is_last(g) else ("D", g + 1)

    def sends(self, order, rank):
        """How many messages a rank sends in a step: outputs of F to the next chunk's rank, and of B and D to the one before."""
        def is_sent(letter, chunk):
            g = self.number(rank, chunk)
            if letter == "F": return not self.is_last(g) and self.rank(g + 1) != rank
            return letter != "W" and not self.is_first(g) and self.rank(g - 1) != rank
        return sum(n for (letter, chunk), n in Counter((a[0], a[2]) for a in order).items() if is_sent(letter, chunk))

    # ---- formulas, of balanced stages ----
    def facts(self, times):
        """Orders of the ranks, and by the formula the bubble (None: there is none) and each rank's peak of activations, which are
        of a micro-batch in a chunk (-1: there is none)."""
        if self.schedule in OF_RUNS:
            said = ask(schedule=OF_RUNS.index(self.schedule), p=self.p, m=self.m, v=self.v, times=times)
            bubble = None if self.schedule == "zb-h1" and self.m < self.p else said["bubble"]
            return said["orders"], bubble, said["peaks"]
        order_of = {"zb-h2": zb_h2, "zb-v": zb_v, "dualpipe": dualpipe}[self.schedule]
        (F, B, W), p, is_long = times, self.p, self.m >= 2 * self.p - 1
        bubble, peak = {"zb-h2": ((p - 1) * F if is_long else None, min(self.m, 2 * p - 1)),
                        "zb-v": ((p - 1) * F / 2 if is_long and F == B == W else None, 2 * p if is_long else -1),
                        "dualpipe": ((p // 2 - 1) * max(F + B - W, F), p + 1)}[self.schedule]
        return [order_of(p, self.m, r) for r in range(p)], bubble, [peak] * p

    def messages(self):
        """Of all ranks in a step: a micro-batch crosses each boundary between chunks of two ranks twice."""
        return 0 if self.p == 1 else 2 * self.m * (self.parts - 1 - (self.schedule == "zb-v"))


def peak_of(order):
    """The most (micro-batch, chunk) that a rank keeps activations of."""
    alive = peak = 0
    for letter, *_ in order:
        alive += {"F": 1, "B": 0}.get(letter, -1)
        peak = max(peak, alive)
    return peak


def play(l, times, time_of, message):
    """A step. times: F, B, W of 1/p of the model, of the formulas; time_of(rank, k, letter, chunk's number): how long a rank's
    action number k takes; message: how long one between two ranks takes. Of all ranks the boxes are (letter, micro-batch, chunk,
    begin, end)."""
    orders, bubble, peaks = l.facts(times)
    ended, boxes, moved = {}, [[] for _ in orders], True
    while moved:
        moved = False
        for rank, (order, done) in enumerate(zip(orders, boxes)):
            for k in range(len(done), len(order)):
                letter, micro, chunk = order[k]
                g = l.number(rank, chunk)
                ready = ready_at(l, ended, rank, letter, micro, g, message)
                if ready is None: break
                begin = max(ready, done[-1][4]) if done else ready
                end = begin + time_of(rank, k, letter, g)
                done.append((letter, micro, chunk, begin, end))
                ended["D" if letter == "B" else letter, g, micro] = end
                moved = True
    if any(len(done) < len(order) for done, order in zip(boxes, orders)): die(f"{l.schedule} deadlocks")
    ranks = [{"busy": sum(end - begin for *_, begin, end in done), "begin": done[0][3], "end": done[-1][4], "peak": peak_of(order),
              "formula": peak, "sends": l.sends(order, rank), "chunks": [l.number(rank, c) for c in range(l.v)], "boxes": done}
             for rank, (done, order, peak) in enumerate(zip(boxes, orders, peaks))]
    return {"step": max(rank["end"] for rank in ranks), "bubble": bubble, "ranks": ranks}


def ready_at(l, ended, rank, letter, micro, g, message):
    """When an action's input is there; None: not yet."""
    source = l.input_of(letter, g)
    if source is None: return 0
    then = ended.get((*source, micro))
    if then is None or letter in "DB" and ("F", g, micro) not in ended: return None
    return then + (message if l.rank(source[1]) != rank else 0)
