"""Stages differ only where they must, and headers of llmc/ use only what is below them. `make check-stages` also prints how much there is
to read from one stage to the next."""
import graphlib, os, re, subprocess, sys
from collections import defaultdict
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/site"))
import stages  # noqa: E402


# ---- stages ----
def definitions(stage):
    """{name: text} of a stage's functions, structs, macros and headings of sections, with the comments above them, in the file's order.
    "" is what belongs to none."""
    found, lines = {}, stages.lines(stage)
    for name, first, end in stages.definitions(stage):
        text = "\n".join(lines[first:end]).strip("\n")
        assert name not in found, f"{stage} defines {name} twice"
        if name == "head" or name.startswith("section "):
            text, _, rest = text.partition(name[8:] + "\n") if name != "head" else ("", "", text)
            found[""] = found.get("", "") + rest + "\n"
        if name != "head": found[name] = text
    return found


def added(old, new):
    """How many lines diff would add to old, without blank ones."""
    a, b = ([line for line in text.split("\n") if line] for text in (old, new))
    return len(b) - sum(match.size for match in SequenceMatcher(None, a, b, False).get_matching_blocks())


def print_sizes(stage, own, bases):
    print(f"{stages.stage_file(stage)}: {len(stages.lines(stage))} lines")
    for base, theirs in bases.items():
        same = sum(own.get(name) == text for name, text in theirs.items() if name)
        diff = subprocess.run(["diff", *map(stages.stage_file, (base, stage))], cwd=ROOT, capture_output=True, text=True).stdout
        print(f"{stages.stage_file(base)} -> {stages.stage_file(stage)}: {same} definitions are the same, {len(theirs) - 1 - same} differ, "
              f"{len(own.keys() - theirs.keys())} are new; {len(re.findall('^>', diff, re.M))} lines added, "
              f"{len(re.findall('^<', diff, re.M))} removed")
    if len(bases) > 1:
        lines = sum(min(added(theirs[name], text) for theirs in bases.values() if name in theirs)
                    if any(name in theirs for theirs in bases.values()) else added("", text) for name, text in own.items())
        print(" and ".join(map(stages.stage_file, bases)), f"-> {stages.stage_file(stage)}: {lines} lines added, definition by definition, "
              "to the nearer of the two")


@pytest.mark.parametrize("stage", stages.STAGES[1:])
def test_a_stage_differs_from_its_bases_only_where_the_list_gives_a_reason(stage):
    own, bases = definitions(stage), {base: definitions(base) for base in stages.bases()[stage]}
    allowed = stages.notes(stage).keys()
    print()
    print_sizes(stage, own, bases)
    shared = {name for theirs in bases.values() for name in theirs if name}
    differ = {name for name in shared if not any(theirs.get(name) == own.get(name, "") for theirs in bases.values())}
    assert differ - allowed == set(), "they differ without a note in test/stages.toml"
    assert (allowed & shared) - differ - {stages.INCLUDES} == set(), "test/stages.toml has a note, and they are the same"


@pytest.mark.parametrize("stage", stages.STAGES[1:])
def test_a_stage_has_its_definitions_in_the_order_of_its_bases(stage):
    own, earlier = definitions(stage), set()
    for theirs in map(definitions, stages.bases()[stage]):
        assert [name for name in own if name in theirs and name not in earlier] == [name for name in theirs if name in own and name not in earlier]
        earlier |= theirs.keys()


# ---- folders of llmc/ ----
FOLDERS = "base model device watch comm data save parallel run".split()  # each may use those before it
APART = {("model", "device"), ("device", "model"), ("data", "comm")}  # neither needs the other
HEADERS = sorted(path.relative_to(ROOT / "llmc") for path in (ROOT / "llmc").rglob("*") if path.suffix in (".h", ".cuh"))
DECLARATIONS = (r"^#define (\w+)", r"^(?:static |inline |__device__ |template ?<.*> ?)+[^=;(]*?\b(\w+)\(.*\{", r"^typedef .*\b(\w+);", r"^\} (\w+);",
                r"^struct (\w+) \{")
PROTOTYPE = r"^[a-z][^=;{}(]*?\b(\w+)\([^;{}]*\);"


def code(path):
    """A header without comments and strings."""
    return re.sub(r"/\*.*?\*/|//[^\n]*|(?<!include )\"(?:\\.|[^\"\\\n])*\"", " ", (ROOT / "llmc" / path).read_text(), flags=re.S)


def includes(path):
    return {((ROOT / "llmc" / path).parent / name).resolve().relative_to(ROOT / "llmc") for name in re.findall(r'^#\s*include "(.*)"', code(path), re.M)}


def uses():
    """{header: {header: names}}: what a header includes, and what it uses of those that alone have a name. Where a function has a
    prototype, that is its home, so that a header which implements what another one documents makes no circle. `struct X` alone uses nothing of X."""
    homes, announced = defaultdict(set), defaultdict(set)
    for path in HEADERS:
        for name in {name for pattern in DECLARATIONS for name in re.findall(pattern, code(path), re.M)}: homes[name].add(path)
        for name in re.findall(PROTOTYPE, code(path), re.M): announced[name].add(path)
    homes |= announced
    found = {path: defaultdict(set, {to: {"include"} for to in includes(path)}) for path in HEADERS}
    for path in HEADERS:
        for name in set(re.findall(r"(?<![.\w>])\w+\b(?=\s*\()|(?<!struct )\b[A-Z]\w+\b", code(path))):
            if len(homes.get(name, ())) == 1 and path not in homes[name]: found[path][min(homes[name])].add(name)
    return found


def test_headers_use_only_folders_below_their_own():
    upward = [f"{path} -> {to}: {', '.join(sorted(names))}" for path, others in uses().items() for to, names in others.items()
              if (a := path.parts[0]) != (b := to.parts[0]) and (FOLDERS.index(b) > FOLDERS.index(a) or (a, b) in APART)]
    assert not upward


def test_headers_neither_include_nor_use_one_another_in_circles():
    [*graphlib.TopologicalSorter(uses()).static_order()]
    assert all((ROOT / "llmc" / to).exists() for path in HEADERS for to in includes(path))


# ---- what a stage includes ----
@lru_cache
def closure(stage):
    """{path: lines} of all that a stage includes on the CPU, itself with it. A header of llmc/ is named by its path there."""
    flags = ["-MM", "-MG", "-x", "c", f"-DUSE_MPI={int(stage != 'single')}"]
    made = subprocess.run(["cc", *flags, stages.stage_file(stage)], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {(ROOT / name).resolve() for name in made.split() if (ROOT / name).is_file()}
    return {os.path.relpath(path, ROOT).removeprefix("llmc/"): len(path.read_text().splitlines()) for path in paths}


def test_one_device_includes_nothing_of_ranks_and_has_at_most_7800_lines():
    assert not [path for path in closure("single") if path.startswith(("comm/", "watch/", "parallel/"))]
    assert sum(closure("single").values()) <= 7800


@pytest.mark.parametrize("stage", stages.STAGES[1:])
def test_only_stages_that_are_a_mesh_include_it(stage):
    mesh = {f"parallel/{name}.h" for name in ("mesh", "axes", "stages", "pipeline")} | {"run/mesh_run.h"}
    seen = closure(stage).keys()
    assert {"comm/comm.h", "watch/control.h", "run/ranks_run.h"} <= seen
    assert bool(mesh & seen) == (stage in ("tp", "pp", "3d", "cp"))


def reading_order():
    """{stage: ({header: lines}, lines of all that it includes)} of llmc/README.md; rows without a stage belong to the one above."""
    found = {}
    for row in (ROOT / "llmc/README.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 7 or not cells[4].replace(",", "").isdigit(): continue
        if name := re.search(r"train_gpt2_(\w+)\.cu\) (\d+)", cells[1]):
            rows = {stages.stage_file(name[1]): int(name[2])}
            found[name[1]] = rows, int(cells[5].replace(",", ""))
        rows |= {header: int(n) for header, n in re.findall(r"`([\w/]+\.h)` (\d+)", cells[3])}
    return found


@pytest.mark.parametrize("stage", stages.STAGES)
def test_the_readme_has_what_a_stage_includes_with_its_lines(stage):
    """Lines are rounded: a header's may be off by 20, or by a fifth, and those of all by 2 %."""
    rows, above, ahead = reading_order(), {}, [stage]
    while ahead:
        above |= rows[ahead[-1]][0]
        ahead += stages.bases().get(ahead.pop(), [])
    above = {path: n for path, n in above.items() if not path.startswith("train") or path == stages.stage_file(stage)}
    assert above.keys() == closure(stage).keys()
    assert not {path: (above[path], n) for path, n in closure(stage).items() if abs(above[path] - n) > max(20, n / 5)}
    whole = sum(closure(stage).values())
    assert abs(rows[stage][1] - whole) <= 0.02 * whole, whole


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-s", "-k", "differs"]))
