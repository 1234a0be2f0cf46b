"""The programs side by side: their definitions, rows of equal and changed lines, hunks, and which notes of dev/site/programs.toml
are theirs.

A definition is what make check-programs calls so: a top-level function, struct, macro or section heading with the comment above it.
A hunk lies within one definition: changed lines, and those equal lines that lie between two changes that are close to each other.
"""
import re, tomllib
from collections import namedtuple
from difflib import SequenceMatcher
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["single", "ddp", "zero", "fsdp", "tp", "pp", "compress", "3d", "cp", "zeropp", "muon"]
NUMBERS = {program: number for number, program in enumerate(PROGRAMS, 1)}  # of the chapters
CHAPTERS = {program: f"doc/{number:02}_{program}.md" for program, number in NUMBERS.items()} | {"zeropp": "doc/10_cluster.md"}
NOTES = "dev/site/programs.toml"
HEADINGS = {"includes": "section 1. libraries, in reading order", "plumbing": "section 9. plumbing"}  # what notes call them
JOIN = 3  # so many equal lines between two changes of a definition make no new hunk


def program_file(program):
    return program if "/" in program else f"train_gpt2_{program}.cu"  # a header of llmc/ has lines and definitions as well


def pairs():
    return list(combinations(PROGRAMS, 2))


@lru_cache
def differences():
    """dev/site/programs.toml: of each program its bases, and notes of what differs from them."""
    return tomllib.loads((ROOT / NOTES).read_text())


@lru_cache
def notes(program):
    """{definition: text}: why it is another one than in the program's bases."""
    return {HEADINGS.get(name, name): note for names, note in differences().get(program, {}).items() if names != "bases"
            for name in names.split()}


def bases():
    """Each program's bases: {"ddp": ["single"], ...}."""
    return {program: found["bases"] for program, found in differences().items()}


def neighbours():
    return [(base, program) for program in PROGRAMS for base in bases().get(program, [])]


@lru_cache
def lines(program):
    return tuple((ROOT / program_file(program)).read_text().splitlines())


DEFINITION = re.compile(r"^#define (\w+)|^typedef .*\b(\w+);|^(?:static |int )[^=;(]*?\b(\w+)\(")
SECTION = re.compile(r"^// (\d+\. [^:]*)")


@lru_cache
def definitions(program):
    """[(name, first line, line after the last)] of a program; together they are the whole file."""
    text, found, at = lines(program), [("head", 0)], 0
    while at < len(text):
        line, first = text[at], at
        section, definition = SECTION.match(line), DEFINITION.match(line)
        name = "section " + section[1] if section else definition and definition[definition.lastindex]
        if re.match(r"(static|int|typedef|enum)\b", line) and not re.search(r"[;}]\s*(//.*)?$", line):
            while not text[at].startswith("}"): at += 1
            closing = re.match(r"\} (\w+);", text[at])
            name = closing[1] if closing else name
        if name:
            while first > 0 and text[first - 1].startswith("//") and not SECTION.match(text[first - 1]): first -= 1
            found.append((name, first))
        at += 1
    ends = [first for _, first in found[1:]] + [len(text)]
    return tuple((*start, end) for start, end in zip(found, ends))


WORDS = re.compile(r"\w+|\s+|[^\w\s]")


@lru_cache(maxsize=None)
def words(line):
    return tuple(w for w in WORDS.findall(line) if not w.isspace())


@lru_cache(maxsize=None)
def likeness(a, b):
    """From 0 to 1: the share of two lines' letters that stand in equal words in the same order."""
    if not words(a) or not words(b): return 0.0
    same = sum(sum(map(len, words(a)[m.a:m.a + m.size])) for m in SequenceMatcher(None, words(a), words(b),
                                                                                  False).get_matching_blocks())
    return 2 * same / (sum(map(len, words(a))) + sum(map(len, words(b))))


def align(left, right, a, b):
    """Rows for lines a of `left` that were replaced by lines b of `right`: lines that are alike stand side by side."""
    best = {(i, j): (0.0, None) for i in range(len(a) + 1) for j in range(len(b) + 1) if not i or not j}
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            alike = likeness(left[a[i - 1]], right[b[j - 1]])
            best[i, j] = max((best[i - 1, j][0], "left"), (best[i, j - 1][0], "right"),
                             (best[i - 1, j - 1][0] + (alike if alike > 0.45 else -1), "both"))
    rows, i, j = [], len(a), len(b)
    while i or j:
        how = best[i, j][1] if i and j else "left" if i else "right"
        i, j = i - (how != "right"), j - (how != "left")
        rows.append((a[i] if how != "right" else None, b[j] if how != "left" else None))
    return rows[::-1]


# Rows that follow one another within one definition: equal ones, or a hunk. A row is a pair of line numbers, from 0; None: no line.
Part = namedtuple("Part", "name rows changed")


def definition_rows(left, right, a, b):
    """[(changed, row)] of one definition, lines a of `left` and b of `right`."""
    rows = []
    matcher = SequenceMatcher(None, [left[i] for i in a], [right[j] for j in b], False)
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        pair = zip if kind == "equal" else partial(align, left, right)
        rows += [(kind != "equal", row) for row in pair(a[a0:a1], b[b0:b1])]
    return rows


def join(name, rows, left, right):
    """The parts of a definition: changes with at most JOIN equal lines between them are one hunk. An empty line alone is none."""
    def says(row):
        return any(n is not None and text[n].strip() for n, text in zip(row, (left, right)))
    spans = []
    for i in [i for i, (changed, row) in enumerate(rows) if changed and says(row)]:
        if spans and i - spans[-1][1] <= JOIN + 1: spans[-1][1] = i
        else: spans.append([i, i])
    parts, done = [], 0
    for first, last in spans:
        parts += [Part(name, rows[done:first], False), Part(name, rows[first:last + 1], True)]
        done = last + 1
    parts.append(Part(name, rows[done:], False))
    return [p for p in parts if p.rows]


@lru_cache(maxsize=None)
def compare(a, b):
    """The parts of two programs, in order."""
    left, right = lines(a), lines(b)
    defs_a, defs_b = definitions(a), definitions(b)
    parts = []
    matcher = SequenceMatcher(None, [d[0] for d in defs_a], [d[0] for d in defs_b], False)
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if kind == "equal":
            for (name, x0, x1), (_, y0, y1) in zip(defs_a[a0:a1], defs_b[b0:b1]):
                parts += join(name, definition_rows(left, right, range(x0, x1), range(y0, y1)), left, right)
        else:
            parts += [Part(name, [(True, (i, None)) for i in range(x0, x1)], True) for name, x0, x1 in defs_a[a0:a1]]
            parts += [Part(name, [(True, (None, j)) for j in range(y0, y1)], True) for name, y0, y1 in defs_b[b0:b1]]
    return parts


def hunks(a, b):
    return [part for part in compare(a, b) if part.changed]


# ---- the notes of hunks ----
Note = namedtuple("Note", "left right text")  # why a definition of program `right` is another one than in `left`


@lru_cache
def way(left, right):
    """The steps from program to base that lead from one program to the other, [(base, program)]."""
    def up(program):
        """All steps from the first program to this one."""
        return {step for base in bases().get(program, []) for step in up(base) | {(base, program)}}
    both = up(left) & up(right)
    return [step for step in neighbours() if step in (up(left) | up(right)) - both]


@lru_cache
def notes_of_definition(left, right, name):
    """The notes of the steps from one program to the other. What a program has from its other base has that one's."""
    def of(base, program):
        noted = notes(program)
        if name in noted: return [Note(base, program, noted[name])]
        return [note for other in bases().get(program, []) if other != base and (base, program) == (left, right)
                for step in way(base, other) for note in of(*step)]
    return [note for step in way(left, right) for note in of(*step)]


def notes_of_pair(left, right):
    """The notes of every hunk of any two programs: those of a definition stand at its first hunk."""
    seen, result = set(), []
    for hunk in hunks(left, right):
        result.append([] if hunk.name in seen else notes_of_definition(left, right, hunk.name))
        seen.add(hunk.name)
    return result


def wrong_notes():
    """What is wrong with the notes of all pairs, in words."""
    wrong = []
    for left, right in neighbours():
        named = {hunk.name for base in bases()[right] for hunk in hunks(base, right)}
        wrong += [f"{NOTES}: {right}: there is no difference in '{name}'" for name in notes(right) if name not in named]
        wrong += [f"{NOTES}: {right}: no note for {name}, which differs from {left}" for name in
                  dict.fromkeys(hunk.name for hunk in hunks(left, right)) if not notes_of_definition(left, right, name)]
    return list(dict.fromkeys(wrong))


if __name__ == "__main__":
    problems = wrong_notes()
    print("\n".join(problems) if problems else f"{sum(len(hunks(*p)) for p in neighbours())} hunks, each definition with its note")
    raise SystemExit(bool(problems))
