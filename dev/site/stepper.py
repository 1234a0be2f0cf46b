"""The steppers of the chapters: a micro-step of a run with --trace, event by event, and what each rank's buffers hold after each.

    python3 dev/site/stepper.py         makes dev/site/micro_steps.jsonl again, from runs of the programs (make programs)

That file has a line for each run: its command, and the second step's events in the order in which they were issued or began. What
a buffer holds follows from these events and from the rules below, which are those of the programs: which unit uses which buffer."""
import json, re, subprocess, tempfile
from collections import namedtuple
from copy import deepcopy
from functools import lru_cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "dev/site/micro_steps.jsonl"
SMALL = ("--channels 32 --heads 4 --seq-len 32 --batch-size 2 --steps 2 --save-every 0 --sample-every 0 --data data/train.bin "
         "--val-data=")
RUNS = {"ddp": (2, "--layers 3 --bucket-mb 0.04"), "zero": (2, "--layers 3 --zero-stage 3"), "fsdp": (2, "--layers 3"),
        "pp": (4, "--layers 4 --schedule 1f1b"), "cp": (4, "--layers 1 --context-parallel 4 --cp ring")}
HEADING = "One micro-step, event by event"
# name: of a slice of compute, or of an operation, which also has the moment at which it was issued, what it moves, and its caller.
Event = namedtuple("Event", "rank begin end name issued units caller ranks")
OPERATION = re.compile(r"([a-z-]+) #\d+(?: of [\w.]+)? \((\d+) (\w+)\)")
WIDTHS = {"fp64": 8, "fp32": 4}


# ---- traces ----
def options(program):
    ranks, own = RUNS[program]
    return ranks, f"{SMALL} {own}"


def read(trace):
    """The second step's events, of each rank in order; times in microseconds from the first."""
    found, flows = [], [None, *json.loads(Path(trace).read_text())["traceEvents"]]
    for event, after in zip(flows, [*flows[1:], None]):
        if not event or event["ph"] != "X" or event["args"]["step"] != 2 or "outside" in event["args"]: continue
        issued = after["ts"] if after and after["ph"] == "s" and event["tid"] else None
        found.append(Event(event["pid"], event["ts"], event["ts"] + event["dur"], event["name"], issued, event["args"].get("units"),
                           event["args"].get("caller"), event["args"].get("ranks")))
    zero = min(e.issued or e.begin for e in found)
    moved = [e._replace(begin=round(e.begin - zero), end=round(e.end - zero), issued=e.issued and round(e.issued - zero))
             for e in sorted(found, key=lambda e: (e.rank, e.issued or e.begin))]
    # A rank names the units of which it owns some elements: all ranks together name those that a collective moves.
    units = {}
    for e in [e for e in moved if e.units and " of " not in e.name]:
        first, last = units.get(e.name, e.units)
        units[e.name] = [min(first, e.units[0]), max(last, e.units[1])]
    return [e._replace(units=units.get(e.name, e.units)) for e in moved if not is_wait(e.name) or e.end - e.begin > 20]


def is_wait(name): return name.startswith("wait for ") and "#" in name


def order(events):
    """What a rank does in which order, whatever the time it takes: its operations, and its compute."""
    said = {}
    for e in events:
        mine = said.setdefault((e.rank, "compute" if e.issued is None else "operations"), [])
        if e.issued is not None: mine.append([e.name, e.units, e.caller])
        elif not is_wait(e.name) and mine[-1:] != [e.name]: mine.append(e.name)
    return said


@lru_cache
def stored():
    lines = [json.loads(line) for line in STORED.read_text().splitlines()]
    return {line["program"]: (line["command"], [Event(*e) for e in line["events"]]) for line in lines}


def record():
    with tempfile.TemporaryDirectory() as folder, STORED.open("w") as out:
        for program in RUNS:
            ranks, given = options(program)
            command = f"build/train_gpt2_{program} {given}"
            subprocess.run(f". dev/on_ranks.sh; on_ranks {ranks} {command} --trace {folder}/trace.json", shell=True, cwd=ROOT,
                           check=True, stdout=subprocess.DEVNULL)
            out.write(json.dumps({"program": program, "command": f"mpirun -np {ranks} {command} --trace FILE",
                                  "events": read(f"{folder}/trace.json")}, separators=(",", ":")) + "\n")


# ---- what buffers hold ----
def sent(e):
    """The bytes that a rank sends in an operation, by the formulas of llmc/comm/comm_api.h."""
    kind, elements, number = OPERATION.fullmatch(e.name).groups()
    bytes_, others = int(elements) * WIDTHS[number], e.ranks - 1
    return {"all-reduce": 2 * bytes_ * others / e.ranks, "receive": 0, "send": bytes_,
            "all-to-all-v": bytes_}.get(kind, bytes_ * others)


def unit_name(u): return "root" if u == 0 else f"{('attn', 'mlp')[(u - 1) % 2]} {(u - 1) // 2}"


class Rank:
    """What one rank does, and its buffers by name: each a list of [what it holds, its state]. States are own, flight, done, shard
    or empty; `words` is the legend, `note` what a reader must know."""

    def __init__(self, rank, events):
        self.rank, self.doing, self.last, self.sent, self.over, self.buffers = rank, "nothing yet", "", 0, False, {}
        self.ranks = 1 + max(e.rank for e in events)
        self.mine = [e for e in events if e.rank == rank]
        self.units = range(1 + max((e.units[1] for e in events if e.units), default=-1))
        self.start()

    def step(self, what, e):
        """Takes an event: compute, issue or end. Returns what is new, for the reader."""
        if what == "compute":
            self.doing = self.label(e.name)
            if is_wait(e.name): return None
            new, self.last, self.over = self.doing != self.last, self.doing, e.name == "update"
            block = re.search(r"block (\d+)", e.name)
            self.compute(e.name, block and int(block[1]), new)
            return self.doing if new else None
        kind, begins = e.name.split(" #")[0], what == "issue"
        if begins: self.sent += sent(e)
        self.operation(kind, begins, e)
        if kind == "send" or begins and kind == "receive": return None  # the receiver's end shows both
        return f"{re.sub(' of [a-z.0-9]+ ', ' ', e.name)} {'is issued' if begins else 'has ended'}"

    def label(self, name): return re.sub(r"( of \S+)? \(.*", "", name)


class Ddp(Rank):
    words = {"own": "this rank's own gradients", "flight": "being summed", "done": "summed over the ranks"}
    note = "Every rank keeps all parameters throughout. These are its gradients, by unit; a bucket may end within a unit."

    def start(self):
        self.grads = self.buffers["gradients"] = [[unit_name(u), "empty"] for u in self.units]
        self.missing = [sum(e.units[0] <= u <= e.units[1] for e in self.mine if e.units) for u in self.units]  # buckets

    def compute(self, name, block, new):
        for u in (0,) if name == "head" else (2 * block + 1, 2 * block + 2) if name.startswith("backward, block") else ():
            if self.grads[u][1] == "empty": self.grads[u][1] = "own"

    def operation(self, kind, begins, e):
        for u in range(e.units[0], e.units[1] + 1) if e.units else ():
            self.missing[u] -= not begins
            self.grads[u][1] = "flight" if self.missing[u] else "done"


class Zero(Rank):
    """Three gather buffers and three buckets: for the root, an attention and an MLP."""
    words = {"flight": "in flight", "done": "whole parameters", "own": "this rank's own gradients", "shard": "a shard, summed"}
    note = """A rank keeps its shard of every unit's parameters throughout. To use a unit, it gathers the whole unit into a buffer,
        which keeps it until another takes its place."""

    def start(self):
        self.gather, self.bucket = ([["", "empty"] for _ in range(3)] for _ in range(2))
        self.buffers = {"gather buffers": self.gather, "gradient buckets": self.bucket, "gradient shards": [
            [name, "empty"] for name in dict.fromkeys(map(self.name, self.units))]}
        self.reduced = {}

    def name(self, u): return unit_name(u)

    def slot(self, name): return ["root", "attn", "mlp"].index(name.split(" ")[0])

    gather_slot = slot

    def backward(self, block): return f"mlp {block}", f"attn {block}"

    def compute(self, name, block, new):
        if name == "head": self.bucket[0][:] = "root", "own"
        if not name.startswith("backward, block"): return
        unit = next((x for x in self.backward(block) if x not in self.reduced), None)
        if unit and self.bucket[self.slot(unit)][1] != "flight": self.bucket[self.slot(unit)][:] = unit, "own"

    def operation(self, kind, begins, e):
        if not e.units: return
        name = self.name(e.units[0])
        if kind == "all-gather":
            self.gather[self.gather_slot(name)][:] = name, "flight" if begins else "done"
            return
        self.reduced[name] = "flight" if begins else "shard"
        self.bucket[self.slot(name)][:] = (name, "flight") if begins else ("", "empty")
        for shard in self.buffers["gradient shards"]: shard[1] = self.reduced.get(shard[0], "empty")


class Fsdp(Zero):
    """A block is a group. Groups take two buckets in turn, and of two gather buffers the one that is not computed with."""
    note = """A rank keeps its shard of every block's parameters throughout. While it computes with one block, it gathers the next
        into the other buffer."""

    def name(self, u): return "root" if u == 0 else f"block {(u - 1) // 2}"

    def slot(self, name): return 0 if name == "root" else 1 + int(name.split(" ")[1]) % 2

    def gather_slot(self, name):
        if name == "root": return 0
        held = [text for text, state in self.gather if state == "flight"]
        return next(r for r in (1, 2) if (self.gather[r] == [name, "flight"] if name in held else not self.last.endswith(
            self.gather[r][0] or "-")))

    def backward(self, block): return [f"block {block}"]


class Pp(Rank):
    """The k-th message that a rank receives or sends is that of its k-th action that needs or makes one."""
    words = {"own": "activations", "flight": "a message in flight", "done": "a message that has arrived"}
    note = """F0 is the forward pass of micro-batch 0, and B0 its backward pass. The activations of a micro-batch stay from one to
        the end of the other. An inbox or outbox names the action that a message is for or from."""

    def start(self):
        self.of = {}
        actions = dict.fromkeys(self.label(e.name) for e in self.mine if re.match(r"[FB]\d", e.name))
        for kind, end in ("receive", {"F": 0, "B": self.ranks - 1}), ("send", {"F": self.ranks - 1, "B": 0}):
            self.of |= zip([e.name for e in self.mine if e.name.startswith(kind)], [a for a in actions if end[a[0]] != self.rank])
        self.buffers = {"activations": [], "inbox": [], "outbox": []}

    def label(self, name): return name.split()[0] if re.match(r"[FB]\d", name) else super().label(name)

    def compute(self, name, block, new):
        if not new: return
        action, held = self.last, self.buffers["activations"]
        self.buffers["inbox"] = [[a, state] for a, state in self.buffers["inbox"] if a != action]
        held[:] = [x for x in held if x[0] != self.leaving]
        self.leaving = action[1:] if action[0] == "B" else None
        if re.match(r"F\d", action): held.append([action[1:], "own"])

    leaving = None  # the micro-batch whose backward pass is computed

    def operation(self, kind, begins, e):
        if kind not in ("send", "receive"): return
        box, action = self.buffers["outbox" if kind == "send" else "inbox"], self.of[e.name]
        box[:] = [x for x in box if x[0] != action]
        if begins or kind == "receive": box.append([action, "flight" if begins else "done"])


class Cp(Rank):
    """Keys and values of hop s are in kv[s % 2]. Their gradients travel one hop behind, and the last sum is the owner's."""
    words = {"own": "of this rank's tokens", "flight": "in flight", "done": "received from above"}
    note = """Each rank has the queries of its tokens throughout. Keys and values go around the ring; in the backward pass their
        gradients follow one hop behind, and every rank adds its part."""

    def start(self):
        self.hops = {"ring_begin": 0, "ring_backward": 0}
        self.buffers = {"keys, values": [["", "empty"]] * 2, "their gradients": [["", "empty"]], "sent on": [["", "empty"]],
                        "received": [["", "empty"]]}

    def owner(self, s): return f"rank {(self.rank + s) % self.ranks}'s"

    def compute(self, name, block, new):
        if block is None or not new: return
        self.hops = dict.fromkeys(self.hops, 0)
        self.buffers["keys, values"] = [[self.owner(0), "own"], ["", "empty"]]
        if name.startswith("backward"): self.buffers["their gradients"] = [[self.owner(0), "own"]]

    def operation(self, kind, begins, e):
        if e.caller not in self.hops: return
        self.hops[e.caller] += begins and kind == "receive"
        s, state = self.hops[e.caller], "flight" if begins else "done"
        if e.caller == "ring_begin" and kind == "receive": self.buffers["keys, values"][s % 2] = [self.owner(s), state]
        if e.caller == "ring_backward" and kind == "receive": self.buffers["received"] = [[self.owner(s + 1), state]]
        if e.caller == "ring_backward" and kind == "send":
            self.buffers["sent on"] = [[self.owner(s), state] if begins else ["", "empty"]]


KINDS = {"ddp": Ddp, "zero": Zero, "fsdp": Fsdp, "pp": Pp, "cp": Cp}


def frames(program, events):
    """[(microseconds, rank, what is new, [(what a rank does, its buffers, bytes sent)])]."""
    moments = [moment for e in events for moment in ([(e.begin, "compute", e)] if e.issued is None else
                                                     [(e.issued, "issue", e), (e.end, "end", e)])]
    ranks, made = [KINDS[program](r, events) for r in range(RUNS[program][0])], []
    for time, what, e in sorted(moments, key=lambda m: m[0]):
        said = None if ranks[e.rank].over else ranks[e.rank].step(what, e)
        if said: made.append((time, e.rank, said, [(r.doing, deepcopy(r.buffers), r.sent) for r in ranks]))
    return made


# ---- the page ----
def chips(buffer): return "".join(f"<i class={state}>{escape(text)}</i> " for text, state in buffer or [("", "empty")])


def html(program):
    (command, events), kind, rows = stored()[program], KINDS[program], ""
    for number, (time, rank, said, ranks) in enumerate(frames(program, events), 1):
        rows += f"<tr><td>{number}. At {time} µs, rank {rank}: {escape(said)}</td>"
        for r, (doing, buffers, bytes_) in enumerate(ranks):
            held = "".join(f"<p><small>{name}</small>{chips(buffer)}</p>" for name, buffer in buffers.items())
            rows += (f'<td{" class=at" if r == rank else ""}><b>rank {r}</b> {escape(doing)}{held}'
                     f'<p><small>bytes sent so far</small>{bytes_:,.0f}</p></td>')
        rows += "</tr>\n"
    legend = "".join(f'<span>{chips([("", state)])}{escape(text)}</span>' for state, text in kind.words.items())
    return (f'<p>{escape(" ".join(kind.note.split()))}</p><div class="stepper" tabindex="0"><p class="legend">{legend}</p>'
            f'<details><summary>All {number} events</summary><div class="wide"><table><tbody>{rows}</tbody></table></div></details>'
            f'<p><small>The second step of a run, up to the update, recorded by <code>{escape(command)}</code></small></p></div>')


if __name__ == "__main__": record()
