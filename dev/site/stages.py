"""The stage files side by side: their definitions, rows of equal and changed lines, hunks, and the notes of the hunks.

A definition is what make check-stages calls so: a top-level function, struct, macro or section heading with the comment above it.
A hunk lies within one definition: changed lines, and those equal lines that lie between two changes that are close to each other.
"""
import re, tomllib
from collections import namedtuple
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["single", "ddp", "zero", "fsdp", "tp", "pp", "compress", "3d"]
NUMBERS = {stage: number for number, stage in enumerate(STAGES, 1)}  # of the chapters
CHAPTERS = {stage: f"doc/{number:02}_{stage}.md" for stage, number in NUMBERS.items()}
USUAL = "the-diff-in-the-files-order"
INCLUDES = "section 1. libraries, in reading order"
JOIN = 3  # so many equal lines between two changes of a definition make no new hunk


def stage_file(stage):
    return stage if "/" in stage else f"train_gpt2_{stage}.cu"  # a header of llmc/ has lines and definitions as well


def pairs():
    return list(combinations(STAGES, 2))


@lru_cache
def differences():
    """test/stages.toml: of each stage its bases, and notes of what differs from them."""
    return tomllib.loads((ROOT / "test/stages.toml").read_text())


@lru_cache
def notes(stage):
    """{definition: [section, text]}: why it is another one than in the stage's bases."""
    return {INCLUDES if name == "includes" else name: [USUAL, note] if isinstance(note, str) else note
            for names, note in differences().get(stage, {}).items() if names != "bases" for name in names.split()}


def bases():
    """Each stage's bases: {"ddp": ["single"], ...}."""
    return {stage: found["bases"] for stage, found in differences().items()}


def neighbours():
    return [(base, stage) for stage in STAGES for base in bases().get(stage, [])]


@lru_cache
def lines(stage):
    return tuple((ROOT / stage_file(stage)).read_text().splitlines())


DEFINITION = re.compile(r"^#define (\w+)|^typedef .*\b(\w+);|^(?:static |int )[^=;(]*?\b(\w+)\(")
SECTION = re.compile(r"^// (\d+\. .*)")


@lru_cache
def definitions(stage):
    """[(name, first line, line after the last)] of a stage file; together they are the whole file."""
    text, found, at = lines(stage), [("head", 0)], 0
    while at < len(text):
        line, first = text[at], at
        section, definition = SECTION.match(line), DEFINITION.match(line)
        name = None
        if section:
            name = "section " + section[1]
        elif definition:
            name = next(filter(None, definition.groups()))
        if re.match(r"(static|int|typedef|enum)\b", line) and not re.search(r"[;}]\s*(//.*)?$", line):
            while not text[at].startswith("}"):
                at += 1
            closing = re.match(r"\} (\w+);", text[at])
            name = closing[1] if closing else name
        if name:
            while first > 0 and text[first - 1].startswith("//") and not SECTION.match(text[first - 1]):
                first -= 1
            found.append((name, first))
        at += 1
    ends = [first for _, first in found[1:]] + [len(text)]
    return tuple((name, first, end) for (name, first), end in zip(found, ends))


WORDS = re.compile(r"\w+|\s+|[^\w\s]")


@lru_cache(maxsize=None)
def words(line):
    return tuple(w for w in WORDS.findall(line) if not w.isspace())


@lru_cache(maxsize=None)
def likeness(a, b):
    """From 0 to 1: the share of two lines' letters that stand in equal words in the same order."""
    if not words(a) or not words(b):
        return 0.0
    same = sum(sum(map(len, words(a)[m.a:m.a + m.size])) for m in SequenceMatcher(None, words(a), words(b), False).get_matching_blocks())
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
        if kind == "equal":
            rows += [(False, (a[i], b[b0 + i - a0])) for i in range(a0, a1)]
        else:
            rows += [(True, row) for row in align(left, right, a[a0:a1], b[b0:b1])]
    return rows


def join(name, rows, left, right):
    """The parts of a definition: changes with at most JOIN equal lines between them are one hunk. An empty line alone is none."""
    def says(row):
        return any(n is not None and text[n].strip() for n, text in zip(row, (left, right)))
    at = [i for i, (changed, row) in enumerate(rows) if changed and says(row)]
    spans = []
    for i in at:
        if spans and i - spans[-1][1] <= JOIN + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    parts, done = [], 0
    for first, last in spans:
        parts += [Part(name, rows[done:first], False), Part(name, rows[first:last + 1], True)]
        done = last + 1
    parts.append(Part(name, rows[done:], False))
    return [p for p in parts if p.rows]


@lru_cache(maxsize=None)
def compare(a, b):
    """The parts of two stage files, in order."""
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
