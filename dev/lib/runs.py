"""What a training program writes: metrics, logs, checkpoints and timelines."""
import functools, json, re
from pathlib import Path


class Metrics:
    """What a run has written into its folder: the lines of metrics.jsonl, and checkpoints."""

    def __init__(self, folder): self.folder = folder and Path(folder)

    @functools.cached_property
    def lines(self):
        text = (self.folder / "metrics.jsonl").read_text()
        # a run that was ended has a torn last line
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines() if line.strip()]

    about = property(lambda self: next((line["run"] for line in self.lines if "run" in line), {}),
                     doc="the first line: options, ranks, predicted bytes")
    metrics = property(lambda self: [line for line in self.lines if "step" in line], doc="the lines about steps")
    steps = property(lambda self: [line for line in self.metrics if "loss" in line], doc="those about training")
    losses = property(lambda self: [(line["step"], line["val_loss"]) for line in self.lines if "val_loss" in line],
                      doc="of validations")
    diagnosis = property(lambda self: next((line["diagnosis"] for line in self.lines if "diagnosis" in line), {}))

    def series(self, field):
        """A field of each step that has it."""
        return [line[field] for line in self.metrics if field in line]

    def checkpoint(self, step=None):
        """The folder of a step's checkpoint, or of the last one's."""
        return self.folder / f"step_{step:08}" if step is not None else max(self.folder.glob("step_*"))

    def weights(self, step=None):
        return tensors(self.checkpoint(step) / "model.safetensors")


class Run(Metrics):
    """A run that is measured: also what the program said."""

    def __init__(self, out, log=None):
        super().__init__(out)
        self.log = Path(log).read_text(errors="replace") if log else ""

    def values(self, key):
        """A field of the steps, without the first: it also touches memory for the first time."""
        return [step[key] for step in self.steps[1:]]

    def last(self, key):
        return self.steps[-1][key]

    def said(self, pattern):
        """What the groups of a pattern found in the log."""
        found = re.search(pattern, self.log, re.M)
        return found[1] if found else ""

    def kinds(self):
        """The bytes that a rank predicted, by what they are for; they are those that it kept, or it would have failed."""
        on_host = "state on the host", "snapshot for checkpoints"
        return {kind: n for kind, n in self.about["predicted_bytes"].items() if kind not in on_host}

    @property
    def shape(self):
        """What the formulas of a table need of the model and of a micro-batch, and the model in words. width: bytes of a number."""
        settings = self.about["options"]
        return {key: self.about[key] for key in ("layers", "heads", "channels", "vocabulary", "context")} | dict(
            model=self.said(r"^model +(.*)"), width=4 if self.about["precision"] == "fp32" else 2, B=settings["batch-size"],
            T=settings["seq-len"], chunks=settings.get("chunks", 1))

    @property
    def speeds(self):
        """Of the steps but the first; waits: the percentage of a step in which nothing is computed for want of communication."""
        found = {key: self.values(key) for key in ("tokens_per_s", "step_ms", "comm_exposed_ms")}
        return found | {"waits": [100 * wait / ms for wait, ms in zip(found["comm_exposed_ms"], found["step_ms"])]}


def operations(trace, waits="wait"):
    """(rank, part of a step, operation, step or None, microsecond of its issue) for each communication of a timeline, in order.
    It belongs to the part in which it was issued, or to "before"; what matches waits is no part. In the file its slice comes
    right before the moment of its issue (dev/tools/overlap.py reads the same)."""
    parts, issued, last = {}, [], None
    for event in json.loads(Path(trace).read_text())["traceEvents"]:
        name, rank = event["name"], event["pid"]
        if event["ph"] == "X" and event["tid"] == 0 and not re.match(waits, name):
            parts.setdefault(rank, []).append((event["ts"], name))
        if event["ph"] == "X" and event["tid"] == 1: last = event
        if event["ph"] == "s": issued.append((rank, last["name"], last["args"].get("step"), event["ts"]))
    for rank, name, step, when in issued:
        begun = [part for part in parts.get(rank, []) if part[0] <= when]
        yield rank, max(begun, key=lambda part: part[0])[1] if begun else "before", name, step, when


def operation(name):
    """What an operation's name says: its kind, its elements, and the bytes of each."""
    elements, kind = re.search(r"\((\d+) (\w+)\)", name), name.split(" ")[0]
    return (kind, int(elements[1]), {"fp64": 8, "fp32": 4, "byte": 1}.get(elements[2], 2)) if elements else (kind, 0, 2)


# ---- weights ----
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "I64": "<i8", "U8": "<u1", "I32": "<i4", "U16": "<u2"}


def tensors(path):
    """The tensors of a safetensors file, in fp32 where they have 16 bits: {name: array}."""
    import numpy as np # which measuring alone does not need
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, t in json.loads(data[8:8 + length]).items():
        if name == "__metadata__": continue
        begin, end = (8 + length + x for x in t["data_offsets"])
        x = np.frombuffer(data[begin:end], DTYPES[t["dtype"]]).reshape(t["shape"])
        if t["dtype"] == "BF16": x = (x.astype("<u4") << 16).view("<f4")
        found[name] = x.astype("<f4") if t["dtype"] == "F16" else x
    return found
