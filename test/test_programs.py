"""Programs differ only where they must, and headers of llmc/ use only what is below them. `make check-programs` also prints how
much there is to read from one program to the next."""
import graphlib, os, re, subprocess, tokenize
from collections import defaultdict
from difflib import SequenceMatcher
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
import merge, programs

PLUMBING, COLUMNS = programs.HEADINGS["plumbing"], 120


# ---- programs ----
def definitions(program):
    """{name: text} of a program's functions, structs, macros and headings of sections, with the comments above them, in the file's
    order. "" is what belongs to none."""
    found, lines = {}, programs.lines(program)
    for name, first, end in programs.definitions(program):
        text = "\n".join(lines[first:end]).strip("\n")
        assert name not in found, f"{program} defines {name} twice"
        if name == "head" or name.startswith("section "):
            text, _, rest = re.split(re.escape(name[8:]) + r"(.*\n?)", text, maxsplit=1) if name != "head" else ("", "", text)
            found[""] = found.get("", "") + rest + "\n"
        if name != "head": found[name] = text
    return found


def without_plumbing(program):
    """A program's lines before section 9, which is the same text in every program for several ranks."""
    return next((programs.lines(program)[:first] for name, first, _ in programs.definitions(program) if name == PLUMBING),
                programs.lines(program))


def changed_lines(old, new):
    """How many lines a diff adds to old and removes from it."""
    same = sum(match.size for match in SequenceMatcher(None, old, new, False).get_matching_blocks())
    return len(new) - same, len(old) - same


def beyond_merge():
    """How many lines of code the merged program adds to git's merge that prefers one of its bases, and removes from it."""
    def lines_of_code(lines):
        after_head = lines[next(n for n, line in enumerate(lines) if programs.SECTION.match(line)):]
        return [text for line in after_head if (text := re.sub(r"\s*//.*", "", line))]
    return changed_lines(*map(lines_of_code, (merge.git_merge("--theirs"), merge.OWN)))


def sizes(program, own, bases):
    """The lines of make check-programs."""
    yield f"{programs.program_file(program)}: {len(programs.lines(program))} lines, {len(without_plumbing(program))} of them before section 9"
    for base, theirs in bases.items():
        same = sum(own.get(name) == text for name, text in theirs.items() if name)
        whole, before = (changed_lines(text(base), text(program)) for text in (programs.lines, without_plumbing))
        yield (f"{programs.program_file(base)} -> {programs.program_file(program)}: {same} definitions are the same, {len(theirs) - 1 - same} differ, "
               f"{len(own.keys() - theirs.keys())} are new; {before[0]} lines added, {before[1]} removed (with section 9: "
               f"{whole[0]}, {whole[1]})")
    if program == merge.PROGRAM and merge.has_git():
        added, removed = beyond_merge()
        yield (f"{' and '.join(map(programs.program_file, bases))} merged -> {programs.program_file(program)}: "
               f"{len(merge.regions()[0])} conflicts; {added} lines of code added to the merge that prefers {merge.THEIRS}, "
               f"{removed} removed (make merge-3d)")


def quoted_sizes(program):
    """Such lines in the chapters, which begin as one about this program does."""
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "doc").glob("*.md")))
    return re.findall(rf"^    (train_gpt2_.* -> {re.escape(programs.program_file(program))}: .*)$", pages, re.M)


@pytest.mark.parametrize("program", programs.PROGRAMS[1:])
def test_a_program_differs_from_its_bases_only_where_the_list_gives_a_reason(program):
    own, bases = definitions(program), {base: definitions(base) for base in programs.bases()[program]}
    allowed = programs.notes(program).keys()
    printed = list(sizes(program, own, bases))
    print("", *printed, sep="\n")
    shared = {name for theirs in bases.values() for name in theirs if name}
    differ = {name for name in shared if not any(theirs.get(name) == own.get(name, "") for theirs in bases.values())}
    assert differ - allowed == set(), "they differ without a note in dev/site/programs.toml"
    assert (allowed & shared) - differ - {*programs.HEADINGS.values()} == set(), "dev/site/programs.toml has a note, and they are the same"
    if not merge.has_git(): return
    assert quoted_sizes(program) == printed[1:], "a chapter quotes what make check-programs does not print"


@pytest.mark.parametrize("program", programs.PROGRAMS[1:])
def test_a_program_has_its_definitions_in_the_order_of_its_bases(program):
    own, earlier = definitions(program), set()
    for theirs in map(definitions, programs.bases()[program]):
        assert [name for name in own if name in theirs and name not in earlier] == [name for name in theirs if name in own
                                                                                    and name not in earlier]
        earlier |= theirs.keys()


@pytest.mark.parametrize("program", programs.PROGRAMS[2:])
def test_section_9_is_the_same_text_in_every_program_for_several_ranks(program):
    def section_9(program):
        found = {name: "\n".join(programs.lines(program)[first:end]).strip() for name, first, end in programs.definitions(program)}
        return {name: text for name, text in found.items() if [*found].index(name) >= [*found].index(PLUMBING)}
    ddp, own = section_9("ddp"), section_9(program)
    assert [*own] == [*ddp] == [PLUMBING, "gpt2_predict", "unit_checksum", "main"]
    assert own == ddp


needs_git = pytest.mark.skipif(not merge.has_git(), reason="git is not installed, so the merge cannot be made")


@needs_git
def test_a_merged_program_is_git_s_merge_of_its_bases_and_little_more():
    """The limits leave room for a few lines: a change that needs more should make the bases easier to merge."""
    assert {*programs.bases()[merge.PROGRAM]} == {merge.OURS, merge.THEIRS}
    assert len(merge.regions()[0]) <= 12
    assert beyond_merge()[0] <= 110


# Both bases change these, on lines that have nothing to do with one another.
TRIVIAL_MEETINGS = {"BlockActs", "gpt2_init_acts", "gpt2_free"}


@needs_git
def test_make_merge_3d_prints_every_line_of_a_conflict_and_explains_where_the_bases_meet():
    unchanged = {*programs.lines(merge.ANCESTOR)}
    for _, name, sides, chosen in merge.found_conflicts():
        shown = [line for line in chosen if not merge.ZERO.search(line)]
        printed = merge.marked(sides, shown)
        assert [line for whose, line in printed if not whose.startswith("-")] == shown, name
        gone = [(f"-{merge.ANCESTOR if line in unchanged else base}", line) for base, side in zip((merge.OURS, merge.THEIRS), sides)
                for line in side if line.strip() not in {x.strip() for x in chosen}]
        assert sorted((whose, line) for whose, line in printed if whose.startswith("-")) == sorted(gone), name
        assert "?" in merge.question(name), f"a conflict in {name}: dev/site/programs.toml has no question for it"
    wrong, needed, _ = merge.sorted_lines()
    assert all("?" in merge.question(name) for name, *_ in wrong), "a line that the merge has wrong has no question"
    assert [len(removed + added) for _, removed, added in needed] == [2], "what make merge-3d says of one declaration is not so"
    met = merge.met()
    asked = {name for name in met if "?" in merge.question(name)}
    assert met.keys() - asked == TRIVIAL_MEETINGS, "what both bases change needs a question in dev/site/programs.toml"
    for name in asked:
        labels = {whose for whose, _ in met[name]}
        assert {"", merge.OURS, merge.THEIRS} <= labels, f"in {name} only one of the bases has changed lines"


@pytest.mark.parametrize("program", programs.PROGRAMS)
def test_no_line_of_a_program_is_longer_than_a_screen(program):
    assert [n for n, line in enumerate(programs.lines(program), 1) if len(line) > COLUMNS] == []


def test_no_line_of_a_header_is_longer_than_a_screen():
    headers = [path for ending in ("h", "cuh") for path in (ROOT / "llmc").rglob(f"*.{ending}")]
    assert [f"{path.relative_to(ROOT)}:{n}" for path in headers for n, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > COLUMNS] == []


# ---- folders of llmc/ ----
FOLDERS = "base model device watch comm data save parallel run".split()  # each may use those before it
APART = {("model", "device"), ("device", "model"), ("data", "comm")}  # neither needs the other
HEADERS = sorted(path.relative_to(ROOT / "llmc") for path in (ROOT / "llmc").rglob("*") if path.suffix in (".h", ".cuh"))
DECLARATIONS = (r"^#define (\w+)", r"^(?:static |inline |__device__ |template ?<.*> ?)+[^=;(]*?\b(\w+)\(.*\{",
                r"^typedef .*\b(\w+);", r"^\} (\w+);",
                r"^struct (\w+) \{")
PROTOTYPE = r"^[a-z][^=;{}(]*?\b(\w+)\([^;{}]*\);"


@lru_cache
def code(path):
    """A header without comments and strings."""
    return re.sub(r"/\*.*?\*/|//[^\n]*|(?<!include )\"(?:\\.|[^\"\\\n])*\"", " ", (ROOT / "llmc" / path).read_text(), flags=re.S)


def includes(path):
    return {((ROOT / "llmc" / path).parent / name).resolve().relative_to(ROOT / "llmc")
            for name in re.findall(r'^#\s*include "(.*)"', code(path), re.M)}


def uses():
    """{header: {header: names}}: what a header includes, and what it uses of those that alone have a name. Where a function has a
    prototype, that is its home, so that a header which implements what another one documents makes no circle. `struct X` alone uses
    nothing of X."""
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


# ---- what a program includes ----
@lru_cache
def closure(program):
    """{path: lines} of all that a program includes on the CPU, itself with it. A header of llmc/ is named by its path there."""
    flags = ["-MM", "-MG", "-x", "c", f"-DUSE_MPI={int(program != 'single')}"]
    made = subprocess.run(["cc", *flags, programs.program_file(program)], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout
    paths = {(ROOT / name).resolve() for name in made.split() if (ROOT / name).is_file()}
    return {os.path.relpath(path, ROOT).removeprefix("llmc/"): len(path.read_text().splitlines()) for path in paths}


def test_one_device_includes_nothing_of_ranks_and_has_at_most_8800_lines():
    assert not [path for path in closure("single") if path.startswith(("comm/", "watch/", "parallel/"))]
    assert sum(closure("single").values()) <= 8800


@pytest.mark.parametrize("program", programs.PROGRAMS[1:])
def test_only_programs_that_are_a_mesh_include_it(program):
    mesh = {f"parallel/{name}.h" for name in ("mesh", "axes", "stages", "pipeline")} | {"run/mesh_run.h"}
    seen = closure(program).keys()
    assert {"comm/comm.h", "comm/control.h", "run/ranks_run.h"} <= seen
    assert bool(mesh & seen) == (program in ("tp", "pp", "3d", "cp"))


@lru_cache
def all_includes(path):
    """A header, and all that it includes."""
    return {path}.union(*(all_includes(to) for to in includes(path)))


def names_used(program):
    """Functions that a program calls and types that it uses, section 9 apart."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\\\.|[^\"\\\\])*\"", " ", "\n".join(without_plumbing(program)), flags=re.S)
    return {*re.findall(r"(?<![.\w>])[a-z]\w*(?=\()|\b[A-Z]\w*[a-z]\w*", text)}


@pytest.mark.parametrize("program", programs.PROGRAMS[1:])
def test_a_header_s_list_names_what_the_program_uses_of_it_and_its_bases_do_not(program):
    """`unit_*` stands for all names that begin like this. A line that the name would make longer than a screen may leave it out."""
    lists = {Path(path): (line, names.split(":")[0].replace(",", " ").split()) for line, path, names in
             re.findall(r'^(#include "llmc/(.*?)" *// defines: (.*))$', "\n".join(programs.lines(program)), re.M)}
    homes = defaultdict(set)
    for path in HEADERS:
        for pattern in (*DECLARATIONS, PROTOTYPE):
            for name in re.findall(pattern, code(path), re.M): homes[name].add(path)
    new = names_used(program).intersection(homes) - set().union(*map(names_used,
                                                                     programs.bases()[program])) - definitions(program).keys()
    missing = []
    for name in sorted(new):
        near = sorted((path for path in lists if homes[name] & all_includes(path)), key=lambda path: len(all_includes(path)))
        if any(fnmatch(name, word) for path in near for word in lists[path][1]): continue
        if not near or len(f"{lists[near[0]][0]}, {name}") <= COLUMNS: missing.append(name)
    assert missing == [] and len(new) > 2


def reading_order():
    """{program: ({header: lines}, lines of all that it includes)} of llmc/README.md; rows without a program belong to the one
    above."""
    found = {}
    for row in (ROOT / "llmc/README.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 7 or not cells[4].replace(",", "").isdigit(): continue
        if name := re.search(r"train_gpt2_(\w+)\.cu\) (\d+)", cells[1]):
            rows = {programs.program_file(name[1]): int(name[2])}
            found[name[1]] = rows, int(cells[5].replace(",", ""))
        rows |= {header: int(n) for header, n in re.findall(r"`([\w/]+\.h)` (\d+)", cells[3])}
    return found


@pytest.mark.parametrize("program", programs.PROGRAMS)
def test_the_readme_has_what_a_program_includes_with_its_lines(program):
    """Lines are rounded: a header's may be off by 20, or by a fifth, and those of all by 2 %."""
    rows, above, ahead = reading_order(), {}, [program]
    while ahead:
        above |= rows[ahead[-1]][0]
        ahead += programs.bases().get(ahead.pop(), [])
    above = {path: n for path, n in above.items() if not path.startswith("train") or path == programs.program_file(program)}
    assert above.keys() == closure(program).keys()
    assert not {path: (above[path], n) for path, n in closure(program).items() if abs(above[path] - n) > max(20, n / 5)}
    whole = sum(closure(program).values())
    assert abs(rows[program][1] - whole) <= 0.02 * whole, whole


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-s", "-k", "differs"]))


# ---- Python ----
PYTHON_COLUMNS = 132


def code_longer_than_a_screen(path):
    """Numbers of lines that reach beyond the last column with more than a string, such as a pattern or a row of a table, and its comma."""
    lines = path.read_text().splitlines()
    long = {n for n, line in enumerate(lines, 1) if len(line) > PYTHON_COLUMNS}
    if not long: return []
    opened, strings = [], [] # since Python 3.12 an f-string is several tokens
    with tokenize.open(path) as file:
        for t in tokenize.generate_tokens(file.readline):
            if t.type == getattr(tokenize, "FSTRING_START", None): opened.append(t.start)
            elif t.type == getattr(tokenize, "FSTRING_END", None): strings.append((opened.pop(), t.end))
            elif t.type == tokenize.STRING: strings.append((t.start, t.end))
    in_string = {n for start, end in strings for n in range(start[0], end[0] + 1)
                 if n < end[0] or len(lines[n - 1]) - end[1] < 24 and (n > start[0] or start[1] < PYTHON_COLUMNS)}
    return sorted(long - in_string)


def test_no_line_of_python_code_is_longer_than_a_screen():
    found = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not found: pytest.skip("this is no clone")
    assert [f"{path}:{n}" for path in found for n in code_longer_than_a_screen(ROOT / path)] == []
