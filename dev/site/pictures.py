"""Memory and time of every program, as build/plan predicts them: all combinations are asked of it once, and the page only looks
them up."""
import json, subprocess
from functools import lru_cache
from html import escape

from source import wide_table
from programs import ROOT

MODELS = ["gpt2", "gpt2-medium", "gpt2-xl"]
RANKS = [1, 2, 4, 8, 16, 32, 64]
PRECISIONS = ["fp32", "bf16"]
# What is shown, by plan's names. Of a technique that plan offers in several sizes, as "tp 2" and "tp 8", it is the largest.
WAYS = {"ddp": "DDP", "zero-1": "ZeRO 1", "zero-2": "ZeRO 2", "zero-3": "ZeRO 3", "fsdp": "FSDP", "tp": "tensor parallel",
        "pp": "pipeline parallel", "cp": "context parallel"}
KINDS = ["parameters", "gradients", "optimizer state", "activations", "communication"]
TOKENS = 262144  # of a step, whatever the number of ranks
OPTIONS = ["--gpu", "h100", "-b", "4", "-t", "1024", "--total-batch-size", str(TOKENS)]
DEFAULT = ("gpt2-medium", "bf16", 8)


def command(model, precision, ranks):
    return ["build/plan", "--json", "--model", model, "--precision", precision, "--ranks", str(ranks), *OPTIONS]


def ask(model, precision, ranks):
    said = subprocess.run(command(model, precision, ranks), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    plan, shown = json.loads(said), {}
    times = {f"{table['table']}/{row['name']}": row for table in plan["times"] for row in table["rows"]}
    for key in WAYS:
        found = [way for way in plan["ways"] if way["name"] == key or way["name"].startswith(key + " ") and way["ranks"] == ranks]
        if not found: continue
        way = found[-1]
        row = times.get(f"{key}/{ranks}") or times.get(f"{key} of {ranks}/{way['name'].removeprefix('tp ')}")
        shown[key] = {"name": way["name"], "bytes": [way["bytes"][kind] for kind in KINDS], "total": way["bytes"]["total"]}
        if row:
            shown[key]["time"] = [row[k] for k in ("seconds", "compute", "communication", "exposed", "bubble",
                                                   "tokens_per_s_per_rank")]
    return shown


@lru_cache
def data():
    return {f"{m}/{p}/{n}": ask(m, p, n) for m in MODELS for p in PRECISIONS for n in RANKS}


def page():
    def slider(name, values, chosen):
        return (f'<label>{name} <output></output><input type="range" name="{name}" min="0" max="{len(values) - 1}" '
                f'value="{values.index(chosen)}" data-values="{",".join(map(str, values))}"></label>')

    def select(name, values, chosen):
        options = "".join(f'<option{" selected" if v == chosen else ""}>{v}</option>' for v in values)
        return f'<label>{name} <select name="{name}">{options}</select></label>'

    model, precision, ranks = DEFAULT
    controls = (f'<form class="controls" hidden>{slider("ranks", RANKS, ranks)}{select("precision", PRECISIONS, precision)}'
                f'{select("model", MODELS, model)}{select("program", ["all", *WAYS], "all")}</form>')
    tables = ""
    for m in MODELS:
        for p in PRECISIONS:
            cases = [data()[f"{m}/{p}/{n}"] for n in RANKS]
            rows = [f"<th>{name}</th>" + "".join(f"<td>{format(case[key]['total'] / 1e9, '.2f') if key in case else ''}</td>"
                                                 for case in cases) for key, name in WAYS.items()]
            tables += (f'<details{" open" if (m, p) == (model, precision) else ""}><summary>{m}, {p}</summary>'
                       f'{wide_table("<th>ranks</th>" + "".join(f"<th>{n}</th>" for n in RANKS), rows)}</details>')
    shown = " ".join(command(model, precision, ranks))
    embedded = json.dumps({"ways": WAYS, "kinds": KINDS, "cases": data(), "tokens": f"{TOKENS:,}"},
                          separators=(",", ":")).replace("<", "\\u003c")
    return ('<h1>Memory and time by program</h1><p>Every number comes from <code>build/plan</code>, which uses the programs\' own '
            'formulas; <a href="doc/plan.html">its page</a> says what it assumes. Held equal between all bars: the model, the '
            'precision, the number of H100s, micro-batches of 4 sequences with 1024 tokens, and a global batch of '
            f'{TOKENS:,} tokens per step.</p>{controls}<div class="picture" id="memory"></div><div class="picture" id="time"></div>'
            '<h2>Memory per rank in GB</h2><p>Tensor, pipeline and context parallelism split a replica of the model over at most 8 '
            'ranks; the other ranks hold further replicas. A cell is empty where a technique does not fit that number of ranks.</p>'
            f'{tables}<p>These numbers and those of the other cases were printed by</p><pre><code>{escape(shown)}</code></pre>'
            f'<script type="application/json" id="plan-data">{embedded}</script>')
