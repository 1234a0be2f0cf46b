"""The notes of the stage reader, test/stages.toml: which of them belong to a hunk."""
from collections import namedtuple
from functools import lru_cache

import stages

FILE = "test/stages.toml"


# Why a definition of stage `right` is another one than in `left`; `section` is a heading's anchor in the chapter.
Note = namedtuple("Note", "left right section text")


@lru_cache
def way(left, right):
    """The steps from stage to base that lead from one stage to the other, [(base, stage)]."""
    def up(stage):
        """All steps from the first stage to this one."""
        return {step for base in stages.bases().get(stage, []) for step in up(base) | {(base, stage)}}
    both = up(left) & up(right)
    return [step for step in stages.neighbours() if step in (up(left) | up(right)) - both]


@lru_cache
def of_definition(left, right, name):
    """The notes of the steps from one stage to the other. What a stage has from its other base has that one's."""
    def of(base, stage):
        noted = stages.notes(stage)
        if name in noted: return [Note(base, stage, *noted[name])]
        return [note for other in stages.bases().get(stage, []) if other != base and (base, stage) == (left, right)
                for step in way(base, other) for note in of(*step)]
    return [note for step in way(left, right) for note in of(*step)]


def of_pair(left, right):
    """The notes of every hunk of any two stages: those of a definition stand at its first hunk."""
    seen, result = set(), []
    for hunk in stages.hunks(left, right):
        result.append([] if hunk.name in seen else of_definition(left, right, hunk.name))
        seen.add(hunk.name)
    return result


def check():
    """What is wrong with the notes of all pairs, in words."""
    wrong = [f"{FILE}: {stage}: '{key}' has no note; write TEXT or [SECTION, TEXT]" for stage, table in stages.differences().items()
             for key, value in table.items() if key != "bases" and isinstance(value, list) and len(value) != 2]
    for left, right in stages.neighbours() if not wrong else []:
        named = {hunk.name for base in stages.bases()[right] for hunk in stages.hunks(base, right)}
        wrong += [f"{FILE}: {right}: there is no difference in '{name}'" for name in stages.notes(right) if name not in named]
        wrong += [f"{FILE}: {right}: no note for {name}, which differs from {left}" for name in
                  dict.fromkeys(hunk.name for hunk in stages.hunks(left, right)) if not of_definition(left, right, name)]
    return list(dict.fromkeys(wrong))


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems) if problems else f"{sum(len(stages.hunks(*p)) for p in stages.neighbours())} hunks, each definition with its note")
    raise SystemExit(bool(problems))
