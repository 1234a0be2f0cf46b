"""make merge-3d: train_gpt2_3d.cu as a three-way merge. Data parallelism is the ancestor; tensor and pipeline parallelism are two
changes to it, and git merges them. Prints each conflict with its resolution in train_gpt2_3d.cu, then what that program changes
besides."""
import re, shutil, subprocess, textwrap
from collections import Counter, namedtuple
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import groupby

import programs

MESH = "llmc/parallel/mesh.h"
PROGRAM, OURS, ANCESTOR, THEIRS = "3d", "tp", "ddp", "pp"
FILES = OURS, ANCESTOR, THEIRS  # as git merge-file takes them: one change, the ancestor, the other change
OWN = programs.lines(PROGRAM)
# One line of the merge. `program` and `n`: where it comes from, counted from 0; the ancestor's if all three have it. `whose`: that
# program, or "both" parents. `conflict`: its number, counted from 1, or 0: a conflict has the lines of one change, then those of
# the other.
Line = namedtuple("Line", "text program n whose conflict")


def has_git():
    return shutil.which("git") is not None


def git_merge(*options):
    """git merge-file's lines; it needs no repository."""
    labels = [word for program in FILES for word in ("-L", program)]
    made = subprocess.run(["git", "merge-file", "-p", *options, *labels, *map(programs.program_file, FILES)], cwd=programs.ROOT,
                          capture_output=True, text=True)
    if made.returncode not in range(128): raise RuntimeError(f"git merge-file: {made.stderr}")
    return made.stdout.splitlines()


def positions(text, program):
    """{a line of `text`: the same line in the program}, for lines that both have in the same order."""
    blocks = SequenceMatcher(None, text, programs.lines(program), False).get_matching_blocks()
    return {block.a + k: block.b + k for block in blocks for k in range(block.size)}


@lru_cache
def merge():
    """The merge that the program began as, [Line]."""
    found, conflict, side = [], 0, None
    for line in git_merge():
        if line == f"<<<<<<< {OURS}": conflict, side = conflict + 1, OURS
        elif side and line == "=======": side = THEIRS
        elif side and line == f">>>>>>> {THEIRS}": side = None
        else: found.append((line, side, conflict if side else 0))
    places = {name: positions([line for line, *_ in found], name) for name in FILES}
    lines, at = [], Counter()
    for k, (text, side, conflict) in enumerate(found):
        having = [name for name in (OURS, THEIRS) if k in places[name]]
        in_all = len(having) == 2 and k in places[ANCESTOR]
        name = side or (ANCESTOR if in_all else having[0] if having else OURS)
        n = places[name].get(k, at[name])  # a line that difflib has paired otherwise follows the last one
        at[name] = n + 1
        lines.append(Line(text, name, n, "both" if len(having) == 2 and not in_all else name, conflict))
    return lines


@lru_cache
def names(program):
    """Which definition each line of a program belongs to."""
    return {n: name for name, first, end in programs.definitions(program) for n in range(first, end)}


@lru_cache
def rows():
    """[(changed, (line of the merge or None, line of the program or None))]."""
    text = [line.text for line in merge()]
    return programs.definition_rows(text, OWN, range(len(text)), range(len(OWN)))


@lru_cache
def parts():
    """The same in parts of one definition of the program each, as programs.compare makes them of two programs."""
    found = []
    for row in rows():
        name = names(PROGRAM)[row[1][1]] if row[1][1] is not None else found[-1][0] if found else "head"
        if not found or found[-1][0] != name: found.append((name, []))
        found[-1][1].append(row)
    text = [line.text for line in merge()]
    return [part for name, of_name in found for part in programs.join(name, of_name, text, OWN)]


def regions():
    """The rows of each conflict, [[row]], and all others: a line that the program has added next to a conflict resolves it."""
    lines, pairs = merge(), [row for _, row in rows()]
    of, last = [0] * len(pairs), max((line.conflict for line in lines), default=0)
    for number in range(1, last + 1):
        inside = [i for i, (a, _) in enumerate(pairs) if a is not None and lines[a].conflict == number]
        first, end = inside[0], inside[-1] + 1
        while first > 0 and pairs[first - 1][0] is None: first -= 1
        while end < len(pairs) and pairs[end][0] is None: end += 1
        of[first:end] = [number] * (end - first)
    found = [[row for number, row in zip(of, pairs) if number == k] for k in range(last + 1)]
    return found[1:], found[0]


ZERO = re.compile("ZeRO|zero.stage|shard|own_elements|gpt2_gather")  # lines that have to do with ZeRO
# Conflicts are printed in this order: a group's heading, and the definitions in it, of which the first that fits is taken.
GROUPS = {"the mesh, and who has what": re.compile("GPT2|init|configure|alloc"),
          "messages and sums": re.compile("^(?!.*(predict|options|report))"), "accounts and options": re.compile("")}


def question(name):
    """What one must decide where both parents change a definition, and the answer: its note in dev/site/programs.toml."""
    return " ".join(programs.notes(PROGRAM).get(name, "").split())


def without_comments(text):
    return [code for line in text if (code := re.sub(r"\s*//.*", "", line))]


def code_words(text):
    return {*re.findall(r"[A-Za-z_]\w*", re.sub(r'//.*|"[^"]*"', "", text))}


@lru_cache
def added_words():
    """Names in the parents' code that the ancestor does not have."""
    of = {parent: {word for line in programs.lines(parent) for word in code_words(line)} for parent in FILES}
    return frozenset((of[OURS] | of[THEIRS]) - of[ANCESTOR])


def label(line, sides):
    """Whose a line of the program is: of the parents of which `sides` has it; of both where it joins names of theirs; or new."""
    having = [name for name, side in zip((OURS, THEIRS), sides) if line.strip() in map(str.strip, side)]
    if having: return having[0] if len(having) == 1 else "both"
    words = {word for side in sides for line_of_side in side for word in code_words(line_of_side)}
    return f"{OURS}+{THEIRS}" if code_words(line) and code_words(line) <= words | added_words() else "new"


def marked(sides, chosen):
    """A conflict as [(label, line)]: the program's lines, each behind those of the parents that it replaces. Where it has taken
    less than two thirds of its lines from them, theirs are in one piece each."""
    unchanged = {*programs.lines(ANCESTOR)}
    own = [(label(line, sides), line) for line in chosen]
    stripped, replaced = {line.strip() for line in chosen}, [[] for _ in range(len(chosen) + 1)]
    is_new = 3 * sum(whose in ("both", OURS, THEIRS) for whose, _ in own) < 2 * len(own)
    for name, side in zip((OURS, THEIRS), sides):
        at = 0
        for _, (i, j) in programs.definition_rows(side, chosen, range(len(side)), range(len(chosen))):
            at = at if j is None else j
            if i is not None and side[i].strip() not in stripped:
                replaced[0 if is_new else at].append((f"-{ANCESTOR if side[i] in unchanged else name}", side[i]))
            if j is not None: at = j + 1
    found = []
    for before, line in zip(replaced, [*own, None]): found += before + ([] if line is None else [line])
    return [(whose if line.strip() else "", line) for whose, line in found]


def own_lines():
    """What the program changes outside of conflicts and its head: [(definition, removed lines, added lines)]. A header that git has
    matched with another function's is under its own name, and lines that a definition loses and gets back are left out."""
    name, found = "head", {}
    for a, b in regions()[1]:
        if b is not None: name = names(PROGRAM)[b]
        before, after = (None if a is None else merge()[a].text), (None if b is None else OWN[b])
        if before == after or name == "head" or not any(x and x.strip() for x in (before, after)): continue
        header = before and programs.DEFINITION.match(before)
        for x, side, where in ((before, 0, header[header.lastindex] if header else name), (after, 1, name)):
            if x and x.strip(): found.setdefault(where, ([], []))[side].append(x)
    for where, sides in found.items():
        moved = Counter(sides[0]) & Counter(sides[1])
        found[where] = [[x for x in side if x not in moved] for side in sides]
    return [(where, *sides) for where, sides in found.items() if any(sides)]


def found_conflicts():
    """[(title, definition, sides of both parents, the program's lines)], without the comment at the program's head. The title has
    all definitions, and those of a parent that has its lines in others."""
    lines, name_of, found = merge(), names(PROGRAM), []
    for pairs in regions()[0]:
        chosen = [b for _, b in pairs if b is not None]
        if name_of[chosen[0]] == "head": continue
        of = {side: [lines[a] for a, _ in pairs if a is not None and lines[a].program == side] for side in (OURS, THEIRS)}
        inside = [*dict.fromkeys(name_of[b] for b in chosen)]
        title = " and ".join(inside)
        for side in of:
            theirs_inside = [*dict.fromkeys(names(side)[line.n] for line in of[side])]
            if theirs_inside != inside: title += f"; {side} has these lines in {' and '.join(theirs_inside)}"
        name = Counter(name_of[b] for b in chosen).most_common(1)[0][0]
        found.append((title, name, [[line.text for line in side] for side in of.values()], [OWN[b] for b in chosen]))
    return sorted(found, key=lambda conflict: [*GROUPS].index(group_of(conflict[1])))


def sorted_lines():
    """own_lines in three lists: those without which the merge is wrong, those that lines of a conflict need, and those of ZeRO,
    in conflicts too. Changes of comments are left out."""
    conflicts, wrong, needed, zero = found_conflicts(), [], [], {}
    for name, removed, added in own_lines():
        if any(map(ZERO.search, removed + added)): zero[name] = (removed, added)
        elif without_comments(removed) != without_comments(added):
            (needed if any(name == other for _, other, *_ in conflicts) else wrong).append((name, removed, added))
    for _, name, _, chosen in conflicts:
        removed, added = zero.get(name, ([], []))
        if any(map(ZERO.search, chosen)): zero[name] = (removed, [*filter(ZERO.search, chosen), *added])
    return wrong, needed, [(name, *zero[name]) for name in dict.fromkeys(names(PROGRAM).values()) if name in zero]


def group_of(name):
    return next(group for group, fits in GROUPS.items() if fits.search(name))


def met():
    """{definition: [(label, line of the merge)]} that both parents change differently, and git merges without a conflict."""
    texts, found = {}, {}
    for parent in FILES:
        texts[parent] = {name: "\n".join(programs.lines(parent)[k:end]).strip() for name, k, end in programs.definitions(parent)}
    in_conflict, name = {name for _, name, *_ in found_conflicts()}, "head"
    for a, b in (row for _, row in rows()):
        if b is not None: name = names(PROGRAM)[b]
        three = {texts[parent].get(name) for parent in FILES}
        if None in three or len(three) < 3 or name in in_conflict or re.match("head|section", name) or a is None: continue
        line = merge()[a]
        found.setdefault(name, []).append(("" if line.whose == ANCESTOR else line.whose, line.text))
    return {name: found[name] for name in texts[OURS] if name in found}


def print_lines(marked_lines):
    for whose, line in marked_lines: print(f"  {whose:6}| {line}".rstrip())


def print_text(text):
    print("\n".join(textwrap.wrap(text, 118)))


def print_own(changes, whose=None):
    """Prints some of the own lines. whose: their label, or None: their origin, after the definition's question. A definition that
    no parent has is printed as a whole, and of others no lone brace."""
    known = {name for parent in FILES for name, *_ in programs.definitions(parent)}
    own = {name: OWN[first:end] for name, first, end in programs.definitions(PROGRAM)}
    for name, removed, added in changes:
        added = [line for line in (added if name in known else own[name]) if line.strip() and (name not in known or line != "}")]
        if not removed and not added: continue
        print_text(name if whose else f"{name}: {question(name)}")
        print_lines(("-merge", line) for line in removed)
        print_lines((whose or label(line, (removed, ())), line) for line in added)


def print_mesh():
    """How the mesh is built, in llmc/parallel/mesh.h."""
    first, end = next((first, end) for name, first, end in programs.definitions(MESH) if name == "mesh_plan_axes")
    text = programs.lines(MESH)[first:end]
    made = [n for n, line in enumerate(text) if "mesh_group(" in line]
    print_text("All three programs make the mesh in one call, ranks_are_mesh, which splits the world in these lines of "
               f"{MESH}. A group has a name, its number of ranks, this rank's number in it, and a color: ranks of one color are "
               "one group. tp, pp and replica are this rank's places along the axes. root: its stage is the first or the last.")
    print_lines([("", line) for line in text[made[0]:made[-1] + 1]])
    print()


def shortened(marked_lines):
    """The lines of a definition that a parent has changed, each with its neighbours; comments above it are left out."""
    start = next(k for k, (_, line) in enumerate(marked_lines) if not line.startswith("//") and line.strip())
    kept = {j for k, (whose, _) in enumerate(marked_lines) if whose and k >= start for j in (k - 1, k, k + 1)} | {start}
    found = []
    for k in sorted(kept & {*range(start, len(marked_lines))}):
        if k - 1 not in kept and k > start: found.append(("", "    ..."))
        found.append(marked_lines[k])
    return [line for line in found if line[1].strip()]


def print_met():
    """Prints where the parents meet without a conflict: the functions with a question."""
    for name, found in met().items():
        if "?" not in question(name): continue
        print_text(f"{name}: {question(name)}")
        print_lines(shortened(found))
        print()


def print_conflicts(group, heading):
    """Prints a group's conflicts, each with its question. Of predictions the parents' lines are left out."""
    conflicts = found_conflicts()
    print(f"---- {heading} ----\n")
    for name, of_name in groupby(enumerate(conflicts, 2), key=lambda conflict: conflict[1][1]):
        if group_of(name) != group: continue
        numbers, found = zip(*of_name)
        print(f"conflict{'s' * (len(found) > 1)} {' and '.join(map(str, numbers))} of {len(conflicts) + 1}, in {found[0][0]}")
        print_text(question(name))
        own = [[line for line in chosen if not ZERO.search(line)] for *_, chosen in found]
        for (_, _, sides, _), chosen in zip(found, own):
            print_lines(line for line in marked(sides, chosen) if "predict" not in name or line[0][:1] != "-")
        print()


def report():
    where = Counter(line.whose for line in merge() if not line.conflict)
    conflicts = found_conflicts()
    wrong, needed, zero = sorted_lines()
    head = "\n".join(OWN).split("/*\n")[1].split("*/")[0]
    taken = f"{where[ANCESTOR]} lines that are the same in all three, {where[OURS]} of {OURS}, {where[THEIRS]} of {THEIRS}, "\
            f"{where['both']} of both"
    print(f"""{programs.program_file(PROGRAM)} is {programs.program_file(ANCESTOR)} with two changes, those of {OURS} and of {THEIRS}, as git merges them:
    git merge-file -p {' '.join(map(programs.program_file, FILES))}

1. Not shown: git takes {taken}.
2. {len(conflicts) + 1} conflicts: {OURS} and {THEIRS} change the same lines of {ANCESTOR}.
   Conflict 1 is the head, which every program writes for itself. Predictions and options follow in 5.
3. Merged without a conflict, and right: functions that both change.
4. Merged without a conflict, and wrong. Changes of comments are left out.
5. The conflicts in predictions and options; of predictions only the lines of {PROGRAM}.
6. ZeRO-1, which neither parent has. Skip it to read the merge: its lines are left out of 2 to 5.

Marks   {OURS}, {THEIRS}, both  a line of this parent, or of both
        -{OURS}, -{THEIRS}      a line of this parent that {PROGRAM} does not take; -{ANCESTOR}: this parent has not changed it
        {OURS}+{THEIRS}         a line that joins the two: each name in it is a parent's
        new           any other line of {PROGRAM}
        -merge, ZeRO  in 4 and 6: a line as git has merged it; a line of ZeRO

Conflict 1, in the head. Which ranks hold the same rows of wte, and in which order are their gradients summed?

{head}""")
    print_mesh()
    *first, last = GROUPS
    for group in first: print_conflicts(group, f"2. conflicts: {group}")
    print("---- 3. merged without a conflict, and right ----\n")
    print_met()
    print("---- 4. merged without a conflict, and wrong (-merge: what git has made) ----\n")
    print_own(wrong)
    print("\nWithout this declaration the lines of a conflict would not compile:")
    print_own(needed, f"{OURS}+{THEIRS}")
    print()
    print_conflicts(last, f"5. conflicts: {last}")
    print("---- 6. ZeRO-1 over dp; you may stop here ----\n")
    print_text("Names are those of train_gpt2_zero.cu, and mean the same for this rank's part of a unit. Written anew are "
               "gpt2_init_shards and shard_begin, because with --zero-stage 0 a unit has one shard.")
    print()
    print_own(zero, "ZeRO")


if __name__ == "__main__":
    if not has_git(): raise SystemExit("make merge-3d needs git merge-file: install git")
    report()
