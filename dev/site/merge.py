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


def resolution(ours, theirs, chosen, files):
    """In words, whose lines were chosen."""
    sides = [[line.strip() for line in side if line.strip()] for side in (ours, theirs, chosen)]
    if sides[2] in sides[:2]: return f"{files[sides.index(sides[2])]}'s lines"
    return "lines of both" if set(sides[2]) <= {*sides[0], *sides[1]} else "lines of its own"


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
    """Prints some of the own lines, and returns how many are added and removed."""
    print(f"{title} (- the merge, + {programs.program_file(program)}):\n")
    for name, removed, added in changes: print("\n".join([name, *(f"  - {line}" for line in removed), *(f"  + {line}" for line in added)]))
    print()
    return " and ".join(f"{sum(len(change[side]) for change in changes)} lines are {word}" for side, word in ((2, "added"), (1, "removed")))


def print_conflict(program, sides):
    """Prints the lines of both parents and the program's own, or for a long conflict the difference from the nearer parent."""
    ours, _, theirs = MERGED[program]
    if sum(map(len, sides)) <= SHORT:
        for side, its in zip((ours, theirs, program), sides): print("\n".join(f"  {side:2} | {line}".rstrip() for line in its))
        return
    likeness = [SequenceMatcher(None, "\n".join(side), "\n".join(sides[2]), False).ratio() for side in sides[:2]]
    near = 0 if likeness[0] > likeness[1] else 1
    print(f"  (- {(ours, theirs)[near]}, + {program}; {len(sides[1 - near])} lines of {(ours, theirs)[1 - near]} are not shown)")
    for line in ndiff(sides[near], sides[2]):
        if line[0] != "?": print(f"  {line}".rstrip())


def report(program):
    ours, ancestor, theirs = MERGED[program]
    file, lines, own, name_of = programs.program_file(program), merge(program), programs.lines(program), names(program)
    where = Counter(line.program for line in lines if not line.conflict)
    conflicts = regions(program)[0]
    head = "\n".join(own).split("/*\n")[1].split("*/")[0]
    print(f"The head of {file}:\n\n{head}")
    print(f"git merge-file -p {' '.join(map(programs.program_file, MERGED[program]))}\n{where[ancestor]} lines are the same in all three, "
          f"{where[ours]} come from {ours} and {where[theirs]} from {theirs}; there are {len(conflicts)} conflicts.\n")
    found = []
    for number, pairs in enumerate(conflicts, 1):
        chosen = [b for _, b in pairs if b is not None]
        if name_of[chosen[0]] == "head":
            print(f"conflict {number}: the comment at the head of the file, of which each program has its own\n")
            continue
        sides = [[lines[a].text for a, _ in pairs if a is not None and lines[a].program == side] for side in (ours, theirs)]
        inside = next(lines[a] for a, _ in pairs if a is not None and lines[a].program == ours)
        found.append((names(ours)[inside.n], number, [*sides, [own[b] for b in chosen]]))
    for name, number, sides in sorted(found, key=lambda conflict: "predict" in conflict[0]):  # predictions come last
        print(f"conflict {number}, in {name}: {program} takes {resolution(*sides, (ours, theirs))}")
        print_conflict(program, sides)
        print()
    changes = {zero: [change for change in own_lines(program) if zero == any(map(ZERO.search, change[1] + change[2]))] for zero in (False, True)}
    merged = print_own(program, f"What {file} changes besides, without ZeRO", changes[False])
    zero = print_own(program, "For ZeRO", changes[True])
    print(f"{file}: {len(conflicts)} conflicts. Outside of them and the head {merged} without ZeRO; for ZeRO {zero}.")


if __name__ == "__main__":
    if not has_git(): raise SystemExit("make merge-3d needs git merge-file: install git")
    report("3d")
