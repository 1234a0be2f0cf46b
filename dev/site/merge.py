"""make merge-3d: train_gpt2_3d.cu as a three-way merge. Data parallelism is the ancestor; tensor and pipeline parallelism are two
changes to it, and git merges them. Prints each conflict with its resolution in train_gpt2_3d.cu, then what that program changes
besides."""
import re, shutil, subprocess, textwrap
from collections import Counter, namedtuple
from difflib import SequenceMatcher
from functools import lru_cache

import programs

MESH = "llmc/parallel/mesh.h"
MERGED = {"3d": ("tp", "ddp", "pp")}  # as git merge-file takes them: one change, the ancestor, the other change
# One line of the merge. `program` and `n`: where it comes from, counted from 0; the ancestor's if all three have it. `conflict`:
# its number,
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
        return next((name for name in (ancestor, ours, theirs) if k in places[name]
                     and (name != ancestor or k in places[ours] and k in places[theirs])),
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


ZERO = re.compile("ZeRO|zero.stage|shard|own_elements|gpt2_gather")  # lines that have to do with ZeRO
# Conflicts are printed in this order: a group's heading, and the definitions in it, of which the first that fits is taken.
GROUPS = {"accounts and options": re.compile("predict|options|report"),
          "the mesh, and who has what": re.compile("GPT2|init|configure|alloc"), "messages and sums": re.compile("")}
ORDER = ["the mesh, and who has what", "messages and sums", "accounts and options"]
# Functions that both parents change and git merges: what one must check there, because git does not.
CHECKS = {
    "gpt2_init_units":
        "Is a size cut by both? pp skips the units of other stages, and tp counts 1/t of the rest.",
    "gpt2_reduce":
        "Is the order of the sums right? The root is summed over `tied` before the buckets that contain it start over dp. dp's "
        "sums are"
        " in place, so layernorms are summed over tp only after dp's waits. The loss is summed over dp and pp, but not over tp, "
        "whose"
        " ranks all compute it.",
    "gpt2_init_ranges":
        "Does is_replicated still mean equal elements, now that tp cuts the root? Yes: the first and the last stage both take part"
        " tp->rank of tp->size.",
}


# The same of conflicts.
CONFLICT_CHECKS = {
    "block_mlp_backward":
        "Who uses which buffer while tp sums dln2? W (block_mlp_backward_weight) reads dout and dfch and must not write dln2. "
        "zb-h1's I"
        " copies dout for a later W instead: all rows of it, because tp_leave_backward has gathered them.",
}


def code_words(text):
    return {*re.findall(r"[A-Za-z_]\w*", re.sub(r'//.*|"[^"]*"', "", text))}


@lru_cache
def added_words(program):
    """Names in the parents' code that the ancestor does not have."""
    of = {parent: {word for line in programs.lines(parent) for word in code_words(line)} for parent in MERGED[program]}
    ours, ancestor, theirs = MERGED[program]
    return frozenset((of[ours] | of[theirs]) - of[ancestor])


def label(program, line, sides):
    """Whose a line of the program is: of the parents of which `sides` has it; of both where it joins names of theirs; or new."""
    ours, _, theirs = MERGED[program]
    having = [name for name, side in zip((ours, theirs), sides) if line.strip() in map(str.strip, side)]
    if having: return having[0] if len(having) == 1 else "both"
    words = {word for side in sides for line_of_side in side for word in code_words(line_of_side)}
    return f"{ours}+{theirs}" if code_words(line) and code_words(line) <= words | added_words(program) else "new"


def marked(program, sides, chosen):
    """A conflict as [(label, line)]: the program's lines, each behind those of the parents that it replaces. Where it has taken
    less than two thirds of its lines from them, theirs are in one piece each."""
    ours, _, theirs = MERGED[program]
    own = [(label(program, line, sides), line) for line in chosen]
    stripped, replaced = {line.strip() for line in chosen}, [[] for _ in range(len(chosen) + 1)]
    is_new = 3 * sum(whose in ("both", ours, theirs) for whose, _ in own) < 2 * len(own)
    for name, side in zip((ours, theirs), sides):
        at = 0
        for _, (i, j) in programs.definition_rows(side, chosen, range(len(side)), range(len(chosen))):
            at = at if j is None else j
            if i is not None and side[i].strip() not in stripped: replaced[0 if is_new else at].append((f"-{name}", side[i]))
            if j is not None: at = j + 1
    found = []
    for before, line in zip(replaced, [*own, None]): found += before + ([] if line is None else [line])
    return [(whose if line.strip() else "", line) for whose, line in found]


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


def found_conflicts(program):
    """[(group, definition, sides of both parents, the program's lines)] in ORDER, without the comment at the program's head."""
    ours, _, theirs = MERGED[program]
    lines, own, name_of, found = merge(program), programs.lines(program), names(program), []
    for pairs in regions(program)[0]:
        chosen = [b for _, b in pairs if b is not None]
        if name_of[chosen[0]] == "head": continue
        sides = [[lines[a].text for a, _ in pairs if a is not None and lines[a].program == side] for side in (ours, theirs)]
        name = Counter(name_of[b] for b in chosen).most_common(1)[0][0]
        found.append((next(group for group, fits in GROUPS.items() if fits.search(name)), name, sides, [own[b] for b in chosen]))
    return sorted(found, key=lambda conflict: ORDER.index(conflict[0]))


def met(program):
    """{definition: [(label, line of the merge)]} that both parents change differently, and git merges without a conflict."""
    ours, ancestor, theirs = MERGED[program]
    lines, texts = merge(program), {}
    for parent in MERGED[program]:
        texts[parent] = {name: "\n".join(programs.lines(parent)[k:end]).strip() for name, k, end in programs.definitions(parent)}
    merged, found = [line.text for line in lines], {}
    places = {parent: positions(merged, parent) for parent in (ours, theirs)}
    in_conflict = {name for _, name, *_ in found_conflicts(program)}
    name_of, name = names(program), "head"
    for a, b in (row for _, row in rows(program)):
        if b is not None: name = name_of[b]
        three = {texts[parent].get(name) for parent in MERGED[program]}
        if None in three or len(three) < 3 or name in in_conflict or re.match("head|section", name) or a is None: continue
        whose = "" if lines[a].program == ancestor else "both" if all(a in place for place in places.values()) else lines[a].program
        found.setdefault(name, []).append((whose, lines[a].text))
    return {name: found[name] for name in texts[ours] if name in found}


def print_lines(marked_lines):
    for whose, line in marked_lines: print(f"  {whose:6}| {line}".rstrip())


def print_text(text):
    print("\n".join(textwrap.wrap(text, 118)))


def print_own(program, changes, whose=None):
    """Prints some of the own lines. whose: their label; None: their origin, after the definition's note in dev/site/programs.toml.
    A definition that no parent has is printed as a whole, and of others no lone brace."""
    known = {name for parent in MERGED[program] for name, *_ in programs.definitions(parent)}
    own = {name: programs.lines(program)[first:end] for name, first, end in programs.definitions(program)}
    for name, removed, added in changes:
        added = [line for line in (added if name in known else own[name]) if line.strip() and (name not in known or line != "}")]
        if not removed and not added: continue
        note = "" if whose else " ".join(programs.notes(program)[name][1].split())
        print_text(f"{name}: {note}" if note else name)
        print_lines(("-merge", line) for line in removed)
        print_lines((whose or label(program, line, (removed, ())), line) for line in added)


def print_mesh():
    """How the mesh is built, in llmc/parallel/mesh.h."""
    first, end = next((first, end) for name, first, end in programs.definitions(MESH) if name == "mesh_plan_axes")
    text = programs.lines(MESH)[first:end]
    made = [n for n, line in enumerate(text) if "mesh_group(" in line]
    print_text(f"All three programs make the mesh in one call, ranks_are_mesh, which splits the world in these lines of {MESH}. A "
               "group has"
               " a name, its number of ranks, this rank's number in it, and a color: ranks of one color are one group. tp, pp and "
               "replica are"
               " this rank's places along the three axes. root: its stage is the first or the last.")
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


def print_met(program):
    """Prints where the parents meet without a conflict: the functions with a check in full, the others by name."""
    found = met(program)
    for name in filter(found.get, CHECKS):
        print_text(f"{name}: {CHECKS[name]}")
        print_lines(shortened(found[name]))
        print()
    others = ", ".join(name for name in found if name not in CHECKS)
    print_text(f"Changed by both on lines that have nothing to do with one another: {others}.")
    print()


def print_conflicts(program, conflicts, group, heading):
    print(f"---- {heading} ----\n")
    for number, (of_group, name, sides, chosen) in enumerate(conflicts, 2):
        if of_group != group: continue
        print(f"conflict {number} of {len(conflicts) + 1}, in {name}")
        if name in CONFLICT_CHECKS: print_text(CONFLICT_CHECKS[name])
        print_lines(marked(program, sides, [line for line in chosen if not ZERO.search(line)]))
        print()


def report(program):
    ours, ancestor, theirs = MERGED[program]
    file, lines, own = programs.program_file(program), merge(program), programs.lines(program)
    where = Counter(line.program for line in lines if not line.conflict)
    conflicts = found_conflicts(program)
    zero, rest = {}, []
    for name, removed, added in own_lines(program):
        if any(map(ZERO.search, removed + added)): zero[name] = (removed, added)
        else: rest.append((name, removed, added))
    for _, name, _, chosen in conflicts:
        of_zero = list(filter(ZERO.search, chosen))
        if of_zero: zero[name] = (zero.get(name, ([], []))[0], of_zero + zero.get(name, ([], []))[1])
    zero = [(name, *zero[name]) for name in dict.fromkeys([*names(program).values()]) if name in zero]
    head = "\n".join(own).split("/*\n")[1].split("*/")[0]
    print(f"""{file} is {programs.program_file(ancestor)} with two changes, those of {ours} and of {theirs}, as git merges them:
    git merge-file -p {' '.join(map(programs.program_file, MERGED[program]))}

1. git takes {where[ancestor]} lines that are the same in all three, {where[ours]} of {ours} and {where[theirs]} of {theirs}.
   They are not shown.
2. {len(conflicts) + 1} conflicts: {ours} and {theirs} change the same lines of {ancestor}.
   Conflict 1 is the head, which every program writes for itself. Predictions and options follow in 5.
3. Merged without a conflict, but worth a thought: functions that both change.
4. Lines that {program} changes where there was no conflict.
5. The conflicts in predictions and options.
6. ZeRO-1, which neither parent has. Skip it to read the merge: its lines are left out of 2 to 5.

Marks   {ours}, {theirs}, both  a line of this parent, or of both
        -{ours}, -{theirs}      a line of this parent that {program} does not take
        {ours}+{theirs}         a line that joins the two: each name in it is a parent's
        new           any other line of {program}

The head of {file}:

{head}""")
    print_mesh()
    for group in ORDER[:-1]: print_conflicts(program, conflicts, group, f"2. conflicts: {group}")
    print("---- 3. merged without a conflict, but worth a thought ----\n")
    print_met(program)
    print("---- 4. changed where there was no conflict (-merge: what git has made) ----\n")
    print_own(program, rest)
    print()
    print_conflicts(program, conflicts, ORDER[-1], f"5. conflicts: {ORDER[-1]}")
    print("---- 6. ZeRO-1 over dp; you may stop here ----\n")
    print_text("Names are those of train_gpt2_zero.cu, and mean the same for this rank's part of a unit. Written anew are "
               "gpt2_init_shards"
               " and shard_begin, because with --zero-stage 0 a unit has one shard.")
    print()
    print_own(program, zero, "ZeRO")


if __name__ == "__main__":
    if not has_git(): raise SystemExit("make merge-3d needs git merge-file: install git")
    report("3d")
