#!/usr/bin/env python3
"""questions.py [OUT] - makes lines of JSON to fine-tune on: prompts that name a function of llmc/, and responses that say where it
is. They are made from this repository, so nothing is downloaded. The order is that of a hash, as if they came from people."""
import json, re, sys
from functools import reduce
from pathlib import Path

root = Path(__file__).resolve().parent.parent.parent
out = Path(sys.argv[1]) if sys.argv[1:] else root / "data/questions.jsonl"
where = {}
for file in sorted(map(str, [*root.glob("llmc/*/*.h"), *root.glob("llmc/*/*/*.h")])):
    for name in re.findall(r"^static inline [\w ]+\*? ?\b(\w+_\w+)\(", Path(file).read_text(), re.M):
        where.setdefault(name, str(Path(file).relative_to(root)))


def place(name):
    return reduce(lambda hash, letter: (hash * 31 + ord(letter)) % 65521, name, 0), name


out.parent.mkdir(parents=True, exist_ok=True)
lines = [{"prompt": f"Where is {name}? ", "response": f"In {where[name]}."} for name in sorted(where, key=place)]
out.write_text("".join(json.dumps(line) + "\n" for line in lines))
print(f"{out}: {len(where)} questions and their answers")
