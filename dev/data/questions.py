#!/usr/bin/env python3
"""questions.py [OUT] - makes lines of JSON to fine-tune on: prompts that name a function of llmc/, and responses that say where it
is. They are made from course.tar.gz, the sources as they were when the default data was made, so nothing is downloaded, and they
stay the same. The order is that of a hash, as if they came from people."""
import json, re, sys, tarfile
from functools import reduce
from pathlib import Path

here = Path(__file__).resolve().parent
out = Path(sys.argv[1]) if sys.argv[1:] else here.parent.parent / "data/questions.jsonl"
where = {}
with tarfile.open(here / "course.tar.gz") as sources:
    for file in sorted(name for name in sources.getnames() if re.fullmatch(r"\w+/llmc/.*\.h", name)):
        text = sources.extractfile(file).read().decode()
        for name in re.findall(r"^static inline [\w ]+\*? ?\b(\w+_\w+)\(", text, re.M):
            where.setdefault(name, file.split("/", 1)[1])


def place(name):
    return reduce(lambda hash, letter: (hash * 31 + ord(letter)) % 65521, name, 0), name


out.parent.mkdir(parents=True, exist_ok=True)
lines = [{"prompt": f"Where is {name}? ", "response": f"In {where[name]}."} for name in sorted(where, key=place)]
out.write_text("".join(json.dumps(line) + "\n" for line in lines))
print(f"{out}: {len(where)} questions and their answers")
