"""make merge-3d: train_gpt2_3d.cu as a three-way merge. Data parallelism is the ancestor; tensor and pipeline parallelism are two changes to
it, and git merges them. Prints each conflict with its resolution in train_gpt2_3d.cu, then what that program changes besides."""
import re, shutil, subprocess
from collections import Counter, namedtuple
from difflib import SequenceMatcher, ndiff
from functools import lru_cache

import programs

MERGED = {"3d": ("tp", "ddp", "pp")}  # as git merge-file takes them: one change, the ancestor, the other change
# One line of the merge. `program` and `n`: where it comes from, counted from 0; the ancestor's if all three have it. `conflict`: its number,
# counted from 1, or 0: a conflict has the lines of one change, then those of the other.
Line = namedtuple("Line", "text program n conflict")


def has_git():
    return shutil.which("git") is not None


def git_merge(files, *options):
    """git merge-file's lines; it needs no repository."""
    labels = [word for program in files for word in ("-L", program)]
    made = subprocess.run(["git", "merge-file", "-p", *options, *labels, *map(programs.program_file, files)], cwd=programs.ROOT,
                          capture_output=True, text=True)
    if made.returncode not in range(128): raise RuntimeError(f"git merge-file: {made.stderr}")
    return made.stdout.splitlines()


def positions(text, program):
    """{a line of `text`: the same line in the program}, for lines that both have in the same order."""
    blocks = SequenceMatcher(None, text, programs.lines(program), False).get_matching_blocks()
    return {block.a + k: block.b + k for block in blocks for k in range(block.size)}


@lru_cache
def merge(program):
    """The merge that a program began as, [Line]."""
    ours, ancestor, theirs = MERGED[program]
    found, conflict, side = [], 0, None
    for line in git_merge(MERGED[program]):
        if line == f"<<<<<<< {ours}": conflict, side = conflict + 1, ours
        elif side and line == "=======": side = theirs
        elif side and line == f">>>>>>> {theirs}": side = None
        else: found.append((line, side, conflict if side else 0))
    places = {name: positions([line for line, *_ in found], name) for name in MERGED[program]}
    def of(k, side):
        """Where line k comes from: a side of a conflict, all three programs, or the one that has it."""
        if side: return side
        return next((name for name in (ancestor, ours, theirs) if k in places[name] and (name != ancestor or k in places[ours] and k in places[theirs])),
                    ours)
    lines, at = [], Counter()
    for k, (text, side, conflict) in enumerate(found):
        name = of(k, side)
        n = places[name].get(k, at[name])  # a line that difflib has paired otherwise follows the last one
        at[name] = n + 1
        lines.append(Line(text, name, n, conflict))
    return lines


@lru_cache
def rows(program):
    """[(changed, (line of the merge or None, line of the program or None))]."""
    text = [line.text for line in merge(program)]
    return programs.definition_rows(text, programs.lines(program), range(len(text)), range(len(programs.lines(program))))


@lru_cache
def parts(program):
    """The same in parts of one definition of the program each, as programs.compare makes them of two programs."""
    text, found = [line.text for line in merge(program)], []
    names = {n: name for name, first, end in programs.definitions(program) for n in range(first, end)}
    for row in rows(program):
        name = names[row[1][1]] if row[1][1] is not None else found[-1][0] if found else "head"
        if not found or found[-1][0] != name: found.append((name, []))
        found[-1][1].append(row)
    return [part for name, of_name in found for part in programs.join(name, of_name, text, programs.lines(program))]


def regions(program):
    """The rows of each conflict, [[row]], and all others: a line that the program has added next to a conflict resolves it."""
    lines, pairs = merge(program), [row for _, row in rows(program)]
    of, last = [0] * len(pairs), max((line.conflict for line in lines), default=0)
    for number in range(1, last + 1):
        inside = [i for i, (a, _) in enumerate(pairs) if a is not None and lines[a].conflict == number]
        first, end = inside[0], inside[-1] + 1
        while first > 0 and pairs[first - 1][0] is None: first -= 1
        while end < len(pairs) and pairs[end][0] is None: end += 1
        of[first:end] = [number] * (end - first)
    found = [[row for number, row in zip(of, pairs) if number == k] for k in range(last + 1)]
    return found[1:], found[0]


def names(program):
    """Which definition each line of a program belongs to."""
    return {n: name for name, first, end in programs.definitions(program) for n in range(first, end)}


def origin(program, line, sides):
    """The label of a line of the program in a conflict: which of the parents have it, too."""
    ours, _, theirs = MERGED[program]
    having = [name for name, side in zip((ours, theirs), sides) if line.strip() in map(str.strip, side)]
    return f"{program}={having[0]}" if len(having) == 1 and line.strip() else f"{program}=both" if having else program


def resolution(program, sides):
    """In words, whose lines were chosen."""
    label = {f"{program}={name}": f"of {name}" for name in (*MERGED[program][::2], "both")} | {program: "new"}
    counts = Counter(label[origin(program, line, sides)] for line in sides[2] if line.strip())
    words = [f"{counts[whose]} {whose}" for whose in label.values() if counts[whose]]
    return "lines: " + ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]


def own_lines(program):
    """What the program changes outside of conflicts and its head: [(definition, removed lines, added lines)]. A header that git has
    matched with another function's is under its own name, and lines that a definition loses and gets back are left out."""
    lines, own, name_of, name, found = merge(program), programs.lines(program), names(program), "head", {}
    for a, b in regions(program)[1]:
        if b is not None: name = name_of[b]
        before, after = (None if a is None else lines[a].text), (None if b is None else own[b])
        if before == after or name == "head" or not any(x and x.strip() for x in (before, after)): continue
        header = before and programs.DEFINITION.match(before)
        for x, side, where in ((before, 0, header[header.lastindex] if header else name), (after, 1, name)):
            if x and x.strip(): found.setdefault(where, ([], []))[side].append(x)
    for where, sides in found.items():
        moved = Counter(sides[0]) & Counter(sides[1])
        found[where] = [[x for x in side if x not in moved] for side in sides]
    return [(where, *sides) for where, sides in found.items() if any(sides)]


ZERO = re.compile("ZeRO|zero_stage|shard|own_elements|gpt2_gather")  # marks a definition that ZeRO has changed
SHORT = 24  # a conflict with more lines than this is printed as a diff against the nearer parent


def print_own(program, title, changes):
    """Prints some of the own lines."""
    print(f"{title} (- the merge, + {program}):\n")
    for name, removed, added in changes: print("\n".join([name, *(f"  - {line}" for line in removed), *(f"  + {line}" for line in added)]))
    print()


def sizes(changes):
    return " and ".join(f"{sum(len(change[side]) for change in changes)} lines {word}" for side, word in ((2, "added"), (1, "removed")))


def print_lines(label, lines):
    print("\n".join(f"  {label:6}| {line}".rstrip() for line in lines))


def print_conflict(program, sides):
    """Prints the lines of both parents and the program's own, or for a long conflict the difference from the nearer parent."""
    ours, _, theirs = MERGED[program]
    if sum(map(len, sides)) <= SHORT:
        print_lines(ours, sides[0])
        print_lines(theirs, sides[1])
        for line in sides[2]: print_lines(origin(program, line, sides), [line])
        return
    likeness = [SequenceMatcher(None, "\n".join(side), "\n".join(sides[2]), False).ratio() for side in sides[:2]]
    near = 0 if likeness[0] > likeness[1] else 1
    name, other = (ours, theirs)[near], (ours, theirs)[1 - near]
    print(f"  Long, so of the parents only {name}'s lines are shown that {program} does not take, marked -{name}. {other} has "
          f"{len(sides[1 - near])} lines here.")
    for line in ndiff(sides[near], sides[2]):
        if line[0] == " ": print_lines(f"{program}={name}", [line[2:]])
        elif line[0] == "-": print_lines(f"-{name}", [line[2:]])
        elif line[0] == "+": print_lines(origin(program, line[2:], sides), [line[2:]])


def found_conflicts(program):
    """[(definition, [lines of one change, of the other, of the program])], predictions last, without the comment at the program's head."""
    ours, _, theirs = MERGED[program]
    lines, own, name_of, found = merge(program), programs.lines(program), names(program), []
    for pairs in regions(program)[0]:
        chosen = [b for _, b in pairs if b is not None]
        if name_of[chosen[0]] == "head": continue
        sides = [[lines[a].text for a, _ in pairs if a is not None and lines[a].program == side] for side in (ours, theirs)]
        inside = next(lines[a] for a, _ in pairs if a is not None and lines[a].program == ours)
        found.append((names(ours)[inside.n], [*sides, [own[b] for b in chosen]]))
    return sorted(found, key=lambda conflict: "predict" in conflict[0])


def report(program):
    ours, ancestor, theirs = MERGED[program]
    file, lines, own = programs.program_file(program), merge(program), programs.lines(program)
    where = Counter(line.program for line in lines if not line.conflict)
    conflicts = len(regions(program)[0])
    changes = {False: [], True: []}
    for change in own_lines(program): changes[any(map(ZERO.search, change[1] + change[2]))].append(change)
    head = "\n".join(own).split("/*\n")[1].split("*/")[0]
    print(f"""{file} is {programs.program_file(ancestor)} with two changes, those of {ours} and of {theirs}, as git merges them:
    git merge-file -p {' '.join(map(programs.program_file, MERGED[program]))}

1. git takes {where[ancestor]} lines that are the same in all three, {where[ours]} of {ours} and {where[theirs]} of {theirs}.
   They are not shown.
2. There are {conflicts} conflicts: {ours} and {theirs} change the same lines of {ancestor}. Conflict 1 is the head, which every program
   writes for itself. In the others, "{ours} |" and "{theirs} |" are what the two parents have. "{program}={ours} |" and
   "{program}={theirs} |" are what {program} takes from them, and "{program} |" is new.
3. Where git sees no conflict, {program} still changes the merge: {sizes(changes[False])}.
4. ZeRO-1 comes from train_gpt2_zero.cu: {sizes(changes[True])}. Skip it to read the merge.

The head of {file}:

{head}""")
    for number, (name, sides) in enumerate(found_conflicts(program), 2):
        print(f"conflict {number} of {conflicts}, in {name}: {program} has {resolution(program, sides)}")
        print_conflict(program, sides)
        print()
    print_own(program, f"What {program} changes without a conflict", changes[False])
    print_own(program, "For ZeRO-1, as in train_gpt2_zero.cu; skip this to read the merge", changes[True])


if __name__ == "__main__":
    if not has_git(): raise SystemExit("make merge-3d needs git merge-file: install git")
    report("3d")
