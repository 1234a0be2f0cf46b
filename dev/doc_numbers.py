#!/usr/bin/env python3
"""Where every number in the documents comes from: a stored result, a formula, or a source that is named.

A number counts if it has a decimal point or a unit (%, ms, MB, times ...) and is not the name of something (section 5.3, PyTorch
2.13, 1.5 billion parameters, `--lr 1e-3`). It must have one of these origins:

- It stands in a block or table that was made from stored results or by a command, or in what a command printed, in the same section.
  <!-- from FILE --> before a table or block, or several of them without words between, names a stored result, and <!-- from
  COMMAND --> a command that runs in less than a second: its lines must be in the new output, in this order, except for "...".
  (dev/doc_outputs.py compares what has a "$ " before it.)
- <!-- numbers: ... --> anywhere in the section says it, item by item, with ";" between them:
    1.19 = 100 / 84            a formula in Python. A number with a decimal point in it must itself stand in a block or table of
                               the document, or have an item
    1.19 to 1.23: experiments/recompute   these stand in that document or output, as they are quoted
    80 GB, 0.7: given          a setting that the text chose
    43 %: https://...          published there
- Its sentence names where a paper has it ("section 5.1", "table 2", "abstract") or links to where it was published.

A result that was stored while other programs ran says so, and its section must quote that. Without an option this prints the list of
all numbers with their origins, and fails if one has none or a wrong one. --write puts new outputs into the blocks. --measure makes the
stored results named, or all of doc/results, again, for which the machine must be idle."""
import argparse, ast, functools, json, math, os, re, shlex, subprocess, sys
from pathlib import Path
from doc_outputs import find_line

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", *sorted(str(f.relative_to(ROOT)) for f in (ROOT / "doc").glob("[01]*.md")),
             "doc/choosing.md", "doc/papers.md", "doc/self_check.md"]
NUMBER = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w]*\d)"
UNIT = (r"\s?(?:%|ms\b|[uµ]s\b|s\b|seconds?\b|minutes?\b|MB\b|GB\b|kB\b|TB\b|MiB\b|GiB\b|tokens/s|[TG]FLOP(?:/s|s)?\b|[GM]B/s|Gb/s|Gbit/s|"
        r"times\b|points\b)")
NAMES = (r"(?:sections?|tables?|figures?|chapters?|arXiv|version|PyTorch|NCCL|CUDA|cuDNN|MPI|oneDNN|nvcc|algorithms?|equations?)\s+[\d.]+"
         r"(?:(?:,| and| to)\s+[\d.]+)*")
SIZES = r"\d[\d.,]*(?:\s+(?:billion|million|trillion)|[MB])(?![\w/])"
PUBLISHED = r"\b(?:sections?|tables?|figures?|appendix)\s+\d|\bappendix [A-Z]\b|\babstract\b|\]\(https?:"


def value(text): return float(text.replace(",", ""))


def as_quoted(x, text):
    """Whether x is the number of the text when it is rounded as that is. Zeros at the end of a whole number may be rounding."""
    digits = len(text.split(".")[1].split("e")[0]) if "." in text else 0
    unit = 10 ** -digits if "." in text else 10 ** len(re.search(r"0*$", re.sub(r"[,]|e.*", "", text))[0])
    if "e" in text: unit *= 10 ** int(text.split("e")[1])
    return abs(x - value(text)) <= 0.5000001 * unit


def numbers(text):
    """(number, as it is quoted) of what counts in a text."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|https?:\S+", " ", text)
    text = re.sub(NAMES + "|" + SIZES, " ", text)
    for m in re.finditer(NUMBER, text):
        # "71.8 and 85.2 %": a unit may come after the last of several
        rest = re.match(rf"(?:\s*(?:,|and|to|or|beside|x)\s+{NUMBER})*({UNIT})?", text[m.end():])
        unit = rest and rest[1]
        if "." in m[0] or unit: yield m[0], m[0] + (unit or "")


class Section:
    """prose: (line's index, paragraph or row); stored: text of blocks with a source; items: (line's index, item of "numbers:");
    busy: (line's index, what a stored result says of other programs)."""
    def __init__(self): self.prose, self.stored, self.items, self.busy = [], "", [], []


def header_of(file): return json.loads((ROOT / file).read_text().split("\n", 1)[0])


@functools.cache
def output_of(source):
    """The lines that a stored result or a command gives."""
    file, *options = source.split()
    if file.endswith(".jsonl"):
        source = shlex.join(["python3", "-m", "experiments", header_of(file)["table"], "--from", file, *options])
    run = subprocess.run(source, shell=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return run.stdout.splitlines()


def texts_of(source):
    """What an item's source says: a document's tables and blocks, or the lines that a result or command gives."""
    path = ROOT / source
    if path.is_dir(): path /= "README.md"
    return path.read_text() if path.suffix in (".md", ".toml") and path.exists() else "\n".join(output_of(source))


def stands_in(text, number): return re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", text) is not None


class Document:
    def __init__(self, name):
        self.name, self.path = name, ROOT / name
        self.lines, self.wrong, self.found, self.changed = self.path.read_text().splitlines(), [], [], False

    def error(self, line, text): self.wrong.append(f"{self.name}:{line + 1}: {text}")

    def read(self):
        """Cuts the document into sections of prose, blocks and items; compares blocks that have a source."""
        self.sections, source, n = [Section()], None, 0
        while n < len(self.lines):
            line, section = self.lines[n], self.sections[-1]
            end = n + 1
            if line.startswith("#"):
                source = None
                self.sections.append(Section())
            elif line.startswith("<!--"):
                while "-->" not in self.lines[end - 1]: end += 1
                comment = " ".join(self.lines[n:end])[4:].split("-->")[0].strip()
                if comment.startswith("from "): source = comment[5:]
                elif comment.startswith("numbers:"): section.items += [(n, item.strip()) for item in comment[8:].split(";") if item.strip()]
            elif line.startswith("|") or line.startswith("    "):
                kind = line[0]
                while end < len(self.lines) and (self.lines[end][:1] == kind if kind == "|" else self.lines[end].startswith("    ") or
                                                 not self.lines[end] and self.lines[end + 1:end + 2] and self.lines[end + 1].startswith("    ")):
                    end += 1
                if source: self.compare(n, end, source, section)
                if source or kind == " ": section.stored += "\n".join(self.lines[n:end]) + "\n"
                else: section.prose += [(k, self.lines[k]) for k in range(n, end)]
            elif line:
                source = None
                while end < len(self.lines) and self.lines[end] and not re.match(r"[#|]|<!--|    ", self.lines[end]): end += 1
                section.prose.append((n, "\n".join(self.lines[n:end])))
            n = end

    def compare(self, begin, end, source, section):
        output = [" ".join(x.split()) for x in output_of(source)]
        busy = [line for line in output if line.startswith("Other programs used")]
        section.busy += [(begin, line) for line in busy]
        section.stored += "".join(f"{line}\n" for line in busy)
        at = 0 # lines are quoted in their order, of which tables of one shape have several alike
        for n in range(begin, end):
            line = self.lines[n].strip()
            if not line or line == "..." or line.startswith(("$ ", "> ")) or set(line) <= set("|-: "): continue
            new = find_line(" ".join(line.split()), output[at:])
            if new: at += new[1] + 1
            if not new: self.error(n, f"{source} does not give this line, or above those before it: {line}")
            elif new[0] != " ".join(line.split()):
                raw = next(x for x in output_of(source) if " ".join(x.split()) == new[0]) if "..." not in line else new[0]
                self.lines[n], self.changed = ("" if line.startswith("|") else "    ") + raw, True
                self.error(n, f"{source} gives other numbers: {line}\n    + {raw}")

    def origin(self, section, text, number):
        for _, item in section.items:
            quoted, sign, origin = re.match(r"([^=:]*)([=:]?)(.*)$", item).groups()
            if number in re.findall(NUMBER, quoted): return sign + origin
        if stands_in(section.stored, number): return "in this section's blocks"
        sentence = next(x for x in re.split(r"(?<=[.:;])\s(?=[A-Z(*`[\d])", text) if stands_in(x, number))
        if re.search(PUBLISHED, sentence): return "published: " + ", ".join(re.findall(
            r"https?://[^)\s]+|(?:sections?|tables?|figures?) [\d.]+|appendix \w+|abstract", sentence))

    def check_items(self):
        """Every item is right, and some number needs it."""
        stored, named = "".join(s.stored for s in self.sections), {
            x for s in self.sections for _, item in s.items for x in re.findall(NUMBER, re.split("[=:]", item)[0])}
        for section in self.sections:
            text = "\n".join(text for _, text in section.prose)
            for n, line in section.busy:
                if line not in " ".join(text.split()): self.error(n, f"the section does not say: {line}")
            for n, item in section.items:
                match = re.match(r"([^=:]+?)\s*([=:])\s*(.+)$", item)
                if not match:
                    self.error(n, f"this item has no = and no colon: {item}")
                    continue
                quoted, sign, origin = match.groups()
                wanted = re.findall(NUMBER, quoted)
                for number in wanted:
                    if not stands_in(text, number): self.error(n, f"{number} is not in this section: {item}")
                if sign == "=": self.check_formula(n, item, wanted, origin, stored, named)
                elif not re.match("given|https?:", origin):
                    said = texts_of(origin)
                    for number in wanted:
                        if not stands_in(said, number): self.error(n, f"{origin} does not say {number}")

    def check_formula(self, n, item, wanted, formula, stored, named):
        try:
            for node in ast.walk(ast.parse(formula, mode="eval")):
                if isinstance(node, ast.Constant) and isinstance(node.value, float):
                    literal = ast.get_source_segment(formula, node)
                    if "." in literal and not stands_in(stored, literal) and literal not in named:
                        self.error(n, f"{literal} stands in no block of this document, and no item has it: {item}")
            x = eval(formula, {"__builtins__": {}}, vars(math) | {"min": min, "max": max, "abs": abs, "sum": sum, "round": round})
        except Exception as error: return self.error(n, f"{item}: {error}")
        for number in wanted:
            if not as_quoted(x, number): self.error(n, f"{number} is quoted, but {formula} is {x:.6g}")

    def check(self):
        self.read()
        self.check_items()
        for section in self.sections:
            for n, text in section.prose:
                for number, quoted in numbers(text):
                    origin = self.origin(section, text, number)
                    line = n + text[:text.find(number)].count("\n")
                    if origin: self.found.append(f"{self.name}:{line + 1}: {quoted}  <- {origin}")
                    else: self.error(line, f"{quoted} has no origin: {' '.join(text.split())[:110]}")


def measure_again(files):
    for file in files:
        header = header_of(file)
        print(f"{file}: {header['table']}.py {header['arguments']}", flush=True)
        subprocess.run(["python3", "-m", "experiments", header["table"], *shlex.split(header["arguments"])], cwd=ROOT, check=True,
                       env=os.environ | header.get("environ", {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put new outputs of stored results into the documents")
    parser.add_argument("--missing", action="store_true", help="print only what is wrong")
    parser.add_argument("--measure", action="store_true", help="make stored results again, all or those named")
    parser.add_argument("--list", action="store_true", help="print the names of the documents")
    parser.add_argument("documents", nargs="*", default=DOCUMENTS, help="README, the chapters, choosing, papers and self_check if none is named")
    o = parser.parse_args()
    if o.list: return print("\n".join(DOCUMENTS))
    if o.measure: return measure_again(o.documents if o.documents != DOCUMENTS else sorted(map(str, ROOT.glob("doc/results/*.jsonl"))))
    wrong = 0
    for document in map(Document, o.documents):
        document.check()
        if o.write and document.changed: document.path.write_text("\n".join(document.lines) + "\n")
        print("\n".join((document.wrong if o.missing else document.found + document.wrong)))
        print(f"{document.name}: {len(document.found)} numbers have an origin, {len(document.wrong)} are wrong or have none")
        wrong += len(document.wrong)
    sys.exit(wrong > 0)


main()
