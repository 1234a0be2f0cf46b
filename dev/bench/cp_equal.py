"""cp_equal.py - how far runs with context parallelism are from one device, and which have the same numbers.

The training run of test/reference, with the same sequences a step for every way and layout: a layout is the number of ranks, or GxC of
G groups of C ranks. The table has the largest relative differences of losses and gradient norms to PyTorch's. (3 ranks have sequences of
24 tokens, which they can share, and are compared with one device.) In a column, ways with the same letter have equal losses, gradient
norms and parameter norms in all steps, to the last bit."""
import json, re
import measure as m

WAYS = {"ulysses": "--cp ulysses", "allgather": "--cp allgather", "ring": "--cp ring",
        "allgather, zigzag": "--cp allgather --cp-balance zigzag", "ring, zigzag": "--cp ring --cp-balance zigzag"}


def numbers(steps): return [[step[key] for step in steps] for key in ("loss", "grad_norm", "param_norm") if key in steps[0]]


def measure(d, o):
    stored = [json.loads(line) for line in (m.ROOT / m.REFERENCE / "pytorch_fp32.jsonl").read_text().splitlines()]
    d.add("PyTorch", numbers=numbers([step for step in stored if "loss" in step]))
    short = "--seq-len 24 --total-batch-size 384"
    for options in "", short:
        run = m.train("one device", m.built("single"), m.PYTORCH, options, "--deterministic", o.more)
        d.add(f"single {options}".strip(), way="one device", layout="3" if options else "1", numbers=numbers(run.steps),
              like=f"single {short}" if options else "PyTorch")
    for layout in o.layouts:
        groups, c = map(int, re.fullmatch(r"(?:(\d+)x)?(\d+)", layout).groups(1))
        for way, options in WAYS.items():
            if way == "ulysses" and c == 3: continue
            run = m.train(f"{way} on {layout}", o.program, m.PYTORCH, options, f"--batch-size {16 // groups} --context-parallel {c}",
                          short if c == 3 else "", "--deterministic", o.more, ranks=groups * c)
            d.add(f"{way} on {layout}", way=way, layout=layout, like=f"single {short}" if c == 3 else "PyTorch", numbers=numbers(run.steps))
            m.note(f"  {way} on {layout}")


def name(found, own, letters):
    """A letter for numbers that an earlier one has as well, or the next."""
    return letters[[*dict.fromkeys(map(str, found))].index(str(own))]


def show(d, o):
    runs = [r for r in d.records() if "way" in r]
    layouts, ways = [x for x in o.layouts if any(r["layout"] == x for r in runs)], [*dict.fromkeys(r["way"] for r in runs)]

    def cell(way, layout):
        r = next((r for r in runs if (r["way"], r["layout"]) == (way, layout)), None)
        if not r: return ""
        far = [max(abs(a / b - 1) for a, b in zip(*both)) for both in zip(r["numbers"][:2], d.first(r["like"])["numbers"])]
        column = [x["numbers"] for x in runs if x["layout"] == layout]
        return f"{far[0]:.0e} / {far[1]:.0e} {name(column, r['numbers'], 'abcdef')}"
    d.print_table(["loss / norm", *layouts], *([way, *(cell(way, layout) for layout in layouts)] for way in ways))


m.script(__doc__, measure, show, layouts="1 2 3 4 2x2 4x2".split(), starts_ranks=False, program="cp")
