"""The pages of the program reader: two programs side by side, or a program beside the merge of its two parents."""
import re
from difflib import SequenceMatcher
from functools import lru_cache
from html import escape

import merge
import source
import programs
from source import anchor, link, markup, pair_url, url_of, wide_table
from programs import CHAPTERS, NUMBERS, PROGRAMS, WORDS, program_file

# What programs leave to llmc/ and their chapters explain: functions by their file and how their names begin.
EXPLAINED = {"llmc/parallel/pipeline.h": "pipeline_", "llmc/parallel/layout.h": "layout_", "llmc/comm/ring.h": "ring_"}
CALL = re.compile(r"\b(\w+)\(")
CONTEXT = 3  # so many equal lines are shown beside a hunk; the rest is folded


@lru_cache
def explained():
    """{a function: (file, lines)} of it and of all that it calls there."""
    found = {}
    for path, beginning in EXPLAINED.items():
        closed = [k for k, line in enumerate(programs.lines(path)) if line.endswith("}")]  # what follows belongs to no function
        places = {name: range(first, 1 + max(k for k in [first, *closed] if k < end)) for name, first,
                  end in programs.definitions(path)}
        for name in [x for x in places if x.startswith(beginning)]:
            inner = [name]
            for x in inner:
                calls = CALL.findall("\n".join(programs.lines(path)[k] for k in places[x]))
                inner += dict.fromkeys(y for y in calls if y in places and y not in inner)
            found[name] = path, [k for x in inner for k in places[x]]
    return found | {"comm_all_reduce": found["ring_advance"]}  # with --allreduce ring


def word_marks(a, b):
    """Which columns differ in two lines: ([(begin, end)], [(begin, end)]), by whole words."""
    left, right = WORDS.findall(a), WORDS.findall(b)
    marks = [], []
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, left, right, False).get_opcodes():
        if kind == "equal": continue
        for words, first, last, mark in ((left, a0, a1, marks[0]), (right, b0, b1, marks[1])):
            begin = sum(map(len, words[:first]))
            end = begin + sum(map(len, words[first:last]))
            if (a if mark is marks[0] else b)[begin:end].strip(): mark.append((begin, end))
    return marks


class Page:
    def __init__(self, left, right, url=None):
        self.left, self.right, self.url = left, right, url or pair_url(left, right)
        self.text = programs.lines(left), programs.lines(right)
        self.files, self.ids, self.told = (program_file(left), program_file(right)), "LR", set()  # ids of lines begin so

    def line(self, file, n, marks=(), name=""):
        """A line's number, which leads to it in its file, and the line."""
        code = source.html(source.pieces(file)[n], self.url, marks)
        return f'<a class="ln"{name} href="{link(self.url, url_of(file))}#L{n + 1}">{n + 1}</a><code>{code}</code>'

    def row(self, pair):
        text = [None if n is None else lines[n] for lines, n in zip(self.text, pair)]
        kind, marks = "e", ((), ())
        if text[0] != text[1]:
            kind = "c" if None not in text else "d" if text[1] is None else "i"
            if not any(t and t.strip() for t in text): kind = "b"
            if kind == "c": marks = word_marks(*text)
        cells = ""
        for side, n in enumerate(pair):
            cells += (self.line(*self.place(side, n), marks[side], f' id="{self.ids[side]}{n + 1}"') if n is not None else
                      '<i></i><code class="none"></code>')
        return f'<div class="r {kind}">{cells}</div>\n'

    def place(self, side, n):
        """Which file a line of that side is in, and where."""
        return self.files[side], n

    def rows(self, rows): return "".join(self.row(pair) + self.explain(pair) for _, pair in rows)

    def explain(self, pair):
        """The functions of llmc/ that this row is the page's first to call, folded."""
        calls = [x for lines, n in zip(self.text, pair) if n is not None for x in CALL.findall(lines[n])]
        out = ""
        for name in dict.fromkeys(x for x in calls if x in explained() and x not in self.told):
            self.told.add(name)
            path, numbers = explained()[name]
            code = "".join(self.line(path, k) + "\n" for k in numbers)
            out += f'<details><summary>{name} <span>{path}</span></summary><div class="source">{code}</div></details>'
        return out

    def note(self, note):
        step = "" if (note.left, note.right) == (self.left, self.right) else f"<b>{note.left} → {note.right}:</b> "
        more = anchor(self.url, url_of(CHAPTERS[note.right]), f"More in chapter {NUMBERS[note.right]}")
        return f'<p>{step}{markup(" ".join(note.text.split()))} {more}</p>'

    def hunk(self, number, part, its_notes):
        title = f'<a class="at" href="#hunk-{number}">{number}</a> <code>{escape(part.name)}</code>'
        return (f'<section class="hunk" id="hunk-{number}"><div class="note"><h3>{title}</h3>'
                f'{"".join(map(self.note, its_notes))}</div>{self.rows(part.rows)}</section>')

    def fold(self, equal, of=""):
        """Equal rows, of one or more definitions: [(name, row)]."""
        names = list(dict.fromkeys(name for name, _ in equal))
        what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        count = f"{len(equal)} {'' if of else 'equal '}line{'s' * (len(equal) > 1)}{of and f' of {of}'}"
        return f'<details><summary>{count} <span>{escape(what)}</span></summary>{self.rows(equal)}</details>'

    def parts(self): return programs.compare(self.left, self.right)

    def notes(self, hunks): return programs.notes_of_pair(self.left, self.right)

    def body(self):
        parts = self.parts()
        its_notes = iter(self.notes([part for part in parts if part.changed]))
        out, equal, number, listed = [], [], 0, []

        def flush(after):
            before, end = CONTEXT if number else 0, len(equal) - after
            if end - before <= 1: out.append(self.rows(equal))
            else: out.extend((self.rows(equal[:before]), self.fold(equal[before:end]), self.rows(equal[end:])))
            equal.clear()

        for part in parts:
            if not part.changed:
                equal += [(part.name, row) for _, row in part.rows]
                continue
            flush(CONTEXT)
            number += 1
            out.append(self.hunk(number, part, next(its_notes)))
            if not listed or listed[-1][0] != part.name: listed.append((part.name, number))
        flush(0)
        contents = " ".join(f'<a href="#hunk-{n}">{escape(name)}</a>' for name, n in listed)
        return (f'{self.head(number)}<details class="contents"><summary>What differs</summary><p>{contents}</p></details>'
                f'<div class="reader highlight">{self.names()}{"".join(out)}</div>')

    def names(self):
        cells = "".join(f"<div>{anchor(self.url, url_of(f), f)}</div>" for f in self.files)
        return f'<div class="names">{cells}</div>'

    def head(self, count):
        choosers = ""
        for label, own, other in (("Left", self.left, self.right), ("Right", self.right, self.left)):
            items = "".join(f"<b>{s}</b>" if s == own else f'<span>{s}</span>' if s == other else
                            anchor(self.url, pair_url(s, other), s) for s in PROGRAMS)
            choosers += f'<div class="choose"><span class="label">{label}</span>{items}</div>'
        steps = programs.way(self.left, self.right)
        way = "" if len(steps) == 1 else "<p>These two are no neighbours: notes are those of the steps between them, " + ", ".join(
            anchor(self.url, pair_url(*s), " → ".join(s)) for s in steps) + ".</p>"
        if self.left in parents(self.right): way = f"<p>{anchor(self.url, f'reader/{self.right}.html', 'Both parents')}</p>"
        return (f'<h1>{self.left} beside {self.right}</h1>{choosers}<p>{count} hunks; each definition has a note at its first one. '
                'Equal lines are folded: open them to read them. Calls of <code>llmc/</code> lead to their contracts, numbers of '
                f'lines to the whole file. {anchor(self.url, url_of(CHAPTERS[self.right]), f"Chapter {NUMBERS[self.right]}")} '
                f'explains {self.right}. <span class="keys">Keys: <kbd>j</kbd> and <kbd>k</kbd> go from hunk to hunk, <kbd>o</kbd> '
                f'opens or folds all.</span></p>{way}')


def parents(program):
    return [base for base, other in programs.neighbours() if other == program and len(programs.bases()[program]) > 1]


class Merged(Page):
    """A program beside git's merge of its parents: a line of the left side leads to the file that it comes from."""

    def __init__(self):
        super().__init__(programs.bases()[merge.PROGRAM][0], merge.PROGRAM, f"reader/{merge.PROGRAM}.html")
        self.text = tuple(line.text for line in merge.merge()), merge.OWN

    def place(self, side, n):
        line = merge.merge()[n] if side == 0 else None
        return (program_file(line.program), line.n) if line else super().place(side, n)

    def parts(self): return merge.parts()

    def notes(self, hunks):
        first = {part.name: i for i, part in reversed([*enumerate(hunks)])}
        return [programs.notes_of_definition(self.left, self.right, part.name) if first[part.name] == i else [] for i,
                part in enumerate(hunks)]

    def names(self):
        ours, ancestor, theirs = (anchor(self.url, url_of(program_file(s)), s) for s in merge.FILES)
        return (f'<div class="names"><div>{ours} and {theirs}, merged over {ancestor}</div>'
                f'<div>{anchor(self.url, url_of(self.files[1]), self.files[1])}</div></div>')

    def head(self, count):
        ours, ancestor, theirs = merge.FILES
        conflicts = len(merge.regions()[0])
        return (f'<h1>{ours} + {theirs} → {self.right}</h1><p>On the left is what <code>git merge-file</code> makes of {ours} and '
                f'{theirs}, two changes to {ancestor}. It has {conflicts} conflicts, which show the lines of {ours} and then those '
                f'of {theirs}. On the right is {self.files[1]}. Equal lines are folded, so the {count} hunks are the conflicts '
                f'with their resolutions, and what {self.right} adds. Numbers of lines lead to the file that a line comes from. '
                '<code>make merge-3d</code> prints the same in a terminal.</p>')


def step_to(program):
    """The diff that makes a program of its base, or of both: its name, and the page that shows it as MkDocs knows it."""
    before = programs.bases().get(program, [])
    if len(before) > 1: return f"{' + '.join(before)} → {program}", f"reader/{program}.md"
    return before and (f"{before[0]} → {program}", pair_url(before[0], program).replace(".html", ".md"))


def overview(url):
    """The table of all pairs."""
    def cell(left, right):
        if (left, right) not in programs.pairs(): return "<td></td>"
        near = ' class="near"' if (left, right) in programs.neighbours() else ""
        return f"<td{near}>{anchor(url, pair_url(left, right), len(programs.hunks(left, right)))}</td>"
    head = "<th></th>" + "".join(f"<th>{s}</th>" for s in PROGRAMS[1:])
    rows = [f"<th>{left}</th>" + "".join(cell(left, right) for right in PROGRAMS[1:]) for left in PROGRAMS[:-1]]
    return ('<h1>Programs side by side</h1><p>Each program is a diff of the one before. A page shows two of them with the equal '
            'parts folded, the differences marked to the word, and a note at each definition. The numbers are numbers of hunks. '
            f'Neighbours are in bold; the {anchor(url, "index.html#the-programs", "front page")} lists them in the order of the '
            f'course.</p>{wide_table(head, rows, " class=pairs")}')
