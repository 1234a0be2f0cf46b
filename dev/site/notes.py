"""The notes of the stage reader, notes.toml, and which hunk each note belongs to."""
from functools import lru_cache

import stages
from stages import CHAPTERS, NOTES

USUAL = "the-diff-in-the-files-order"


class Note:
    """`section` is a link to a chapter's section; None: the text is "as LEFT-RIGHT"."""
    def __init__(self, left, right, text, section=None):
        self.left, self.right, self.keys, self.text, self.section = left, right, [], text, section


@lru_cache
def read(left, right):
    notes, copies = [], {}
    for key, value in stages.noted()[f"{left}-{right}"].items():
        section, about = value if isinstance(value, list) and len(value) == 2 else (USUAL, value)
        places = [place.partition(": ")[::2] for place in key.split(" | ")]
        match about:
            case "as above" if notes: pass
            case str() if about.startswith("as ") and about.endswith(f"-{right}"): # a note beside the other base
                for place in places:
                    for n in [n for n in read(*about[3:].split("-")) if place[0] in (name for name, _ in n.keys)]:
                        if n not in copies: notes.append(copies.setdefault(n, Note(left, right, n.text, n.section)))
                        copies[n].keys.append(place)
                continue
            case str() if about.startswith("as ") and about[3:] in stages.noted(): notes.append(Note(left, right, about))
            case str() if not about.startswith("as "):
                notes.append(Note(left, right, " ".join(about.split()), f"{CHAPTERS[right]}#{section}"))
            case _: raise SystemExit(f"error: {NOTES}: '{key}' has no note: write TEXT, [SECTION, TEXT] or as LEFT-RIGHT")
        notes[-1].keys += places
    return notes


def has(left, right, hunk, key):
    return hunk.name == key[0] and any(key[1] in line for line in stages.changed_lines(left, right, hunk))


def of_hunks(left, right):
    """For each hunk of a stage and its base its notes, and what is wrong, in words."""
    hunks, wrong = stages.hunks(left, right), []
    found = [[] for _ in hunks]
    for note in read(left, right):
        for key in note.keys:
            of = [i for i, hunk in enumerate(hunks) if has(left, right, hunk, key)]
            if len(of) != 1:
                place = ": ".join(filter(None, key))
                wrong.append(f"{NOTES}: {left}-{right}: the key '{place}' belongs to {len(of)} hunks, not to one: renew it")
            meant = [note] if note.section else [n for n in read(*note.text[3:].split("-")) if key[0] in (name for name, _ in n.keys)]
            if not meant: wrong.append(f"{NOTES}: {left}-{right}: '{note.text}': it has no note of {key[0]}")
            for i in of[:1]: found[i] += [n for n in meant if n not in found[i]]
    for hunk, notes in zip(hunks, found):
        if not notes:
            changed = next(stages.changed_lines(left, right, hunk))
            wrong.append(f"{NOTES}: {left}-{right}: no note for the hunk of {hunk.name} that changes '{changed}'")
    return found, wrong


@lru_cache
def way(left, right):
    """The steps from stage to base that lead from one stage to the other, [(base, stage)]."""
    def up(stage):
        """All steps from the first stage to this one."""
        return {step for base in stages.bases().get(stage, []) for step in up(base) | {(base, stage)}}
    both = up(left) & up(right)
    return [step for step in stages.neighbours() if step in (up(left) | up(right)) - both]


def of_pair(left, right):
    """The notes of every hunk of any two stages. Where they are not neighbours, those of the steps between them that concern its lines,
    or else its definition."""
    if (left, right) in stages.neighbours(): return of_hunks(left, right)[0]
    result = []
    for hunk in stages.hunks(left, right):
        changed = list(stages.changed_lines(left, right, hunk))
        steps = [note for step in way(left, right) for note in read(*step) if note.section]
        named = [n for n in steps if any(name == hunk.name for name, _ in n.keys)]
        exact = [n for n in named if any(name == hunk.name and any(text in c for c in changed) for name, text in n.keys)]
        result.append(exact or named)
    return result


def check():
    """What is wrong with the notes of all pairs, in words."""
    wrong = [why for pair in stages.neighbours() for why in of_hunks(*pair)[1]]
    if not wrong:
        for left, right in stages.pairs():
            for hunk, notes in zip(stages.hunks(left, right), of_pair(left, right)):
                if not notes:
                    wrong.append(f"{left} beside {right}: no step between them has a note for {hunk.name}")
    return wrong


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems) if problems else f"{sum(len(stages.hunks(*p)) for p in stages.neighbours())} hunks, each with its note")
    raise SystemExit(bool(problems))
