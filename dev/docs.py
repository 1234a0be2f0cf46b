#!/usr/bin/env python3
"""Whether what the documents quote is so: numbers, or with --outputs what their commands print.

Every number comes from a stored result, a formula, or a source that is named. A number counts if it has a decimal point or a unit
(%, ms, MB, times ...) and is not the name of something (section 5.3, PyTorch 2.13, 1.5 billion parameters, `--lr 1e-3`). It must
have one of these origins:

- It stands in a block or table that was made from stored results or by a command, or in what a command printed, in the same
section.
  <!-- from FILE --> before a table or block, or several of them without words between, names a stored result, and <!-- from
  COMMAND --> a command that runs in less than a second: its lines must be in the new output, in this order, except for "...".
  (--outputs compares what has a "$ " before it.)
- <!-- numbers: ... --> anywhere in the section says it, item by item, with ";" between them:
    1.19 = 100 / 84            a formula in Python. A number with a decimal point in it must itself stand in a block or table of
                               the document, or have an item
    1.19 to 1.23: experiments/recompute   these stand in that document or output, as they are quoted
    80 GB, 0.7: given          a setting that the text chose
    43 %: https://...          published there
- Its sentence names where a paper has it ("section 5.1", "table 2", "abstract") or links to where it was published.

A result that was stored while other programs ran says so, and its section must quote that. This prints the list of all numbers with
their origins, and fails if one has none or a wrong one.

--outputs runs the documents' commands in a fresh clone of HEAD, in their order, and compares each quoted line with the new
output. A command is an indented line that begins with "$ ", its continuations with "> "; the quoted output follows. An indented
block without a command belongs to the commands before it, if they printed at least one of its lines. Each quoted line must be in
the output, except that its numbers may differ; "..." in it stands for anything. Blocks without a command that no command printed
are listed. MPIRUN="mpirun ..." says how to start ranks. It takes some minutes."""
import argparse, ast, functools, json, math, re, shlex, subprocess, sys, tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", *sorted(str(f.relative_to(ROOT)) for f in (ROOT / "doc").glob("[01]*.md")),
             *sorted(str(f.relative_to(ROOT)) for f in (ROOT / "doc/reference").glob("*.md")
                     if f.stem not in ("roofline", "plan_validation")),  # tests compare these with what makes them
             "doc/choosing.md", "doc/formulas.md", "doc/papers.md", "doc/self_check.md"]
NUMBER = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w]*\d)"
UNIT = (r"\s?(?:%|ms\b|[uµ]s\b|s\b|seconds?\b|minutes?\b|MB\b|GB\b|kB\b|TB\b|MiB\b|GiB\b|tokens/s|[TG]FLOP(?:/s|s)?\b|[GM]B/s|Gb/s|Gbit/s|"
        r"times\b|points\b)")
NAMES = (r"(?:sections?|tables?|figures?|chapters?|arXiv|version|PyTorch|NCCL|CUDA|cuDNN|MPI|oneDNN|nvcc|algorithms?|equations?)\s+[\d.]+"
         r"(?:(?:,| and| to)\s+[\d.]+)*")
SIZES = r"\d[\d.,]*(?:\s+(?:billion|million|trillion)|[MB])(?![\w/])"
PUBLISHED = r"\b(?:sections?|tables?|figures?|appendix)\s+\d|\bappendix [A-Z]\b|\babstract\b|\]\(https?:"


def as_quoted(x, text):
    """Whether x is the number of the text when it is rounded as that is. Zeros at the end of a whole number may be rounding."""
    digits, _, power = text.replace(",", "").partition("e")
    whole, _, fraction = digits.partition(".")
    unit = 10 ** (-len(fraction) if fraction else len(re.search("0*$", whole)[0])) * 10 ** int(power or 0)
    return abs(x - float(text.replace(",", ""))) <= 0.5000001 * unit


def numbers(text):
    """(number, as it is quoted) of what counts in a text."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|https?:\S+", " ", text)
    text = re.sub(NAMES + "|" + SIZES, " ", text)
    for m in re.finditer(NUMBER, text):
        # "71.8 and 85.2 %": a unit may come after the last of several
        rest = re.match(rf"(?:\s*(?:,|and|to|or|beside|x)\s+{NUMBER})*({UNIT})?", text[m.end():])
        unit = rest and rest[1]
        if "." in m[0] or unit: yield m[0], m[0] + (unit or "")


# ---- lines that a program prints ----
PRINTED = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|\b(?:inf|nan)\b)"  # a number


def pattern(quoted):
    """A quoted line as a pattern: any numbers and blanks match, "..." matches anything. It captures the text between the "..."."""
    def part(text):
        def of(token): return PRINTED if re.fullmatch(PRINTED, token) else r"\s+" if token.isspace() else re.escape(token)
        return "".join(map(of, re.split(rf"({PRINTED}|\s+)", text)))
    return ".*".join(f"({part(text)})" for text in quoted.split("..."))


def find_line(quoted, output):
    """The line of the output that a quoted line stands for, as the document would quote it, and its index: the same line or, among
    those that differ in numbers only, the one whose leading numbers agree most. A line of another step never matches. None if
    there is none."""
    best, most, shape, old = None, -1, re.compile(pattern(quoted)), re.findall(PRINTED, quoted)
    for i, printed in enumerate(output):
        match = shape.fullmatch(printed)
        if not match: continue
        line = "...".join(match.groups())
        new = re.findall(PRINTED, line)
        same = next((n for n, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        if line == quoted: return line, i
        if same > most and (same or not quoted.startswith("step ")): best, most = (line, i), same
    return best


class Document:
    def __init__(self, name):
        self.name, self.path = name, Path(name) if Path(name).exists() else ROOT / name
        self.lines, self.changed = self.path.read_text().splitlines(), False

    def quote(self, n, line): self.lines[n], self.changed = line, True

    def save(self):
        if self.changed: self.path.write_text("".join(f"{line}\n" for line in self.lines))


# ---- numbers, and blocks that have a source ----
class Section:
    """prose: (line's index, paragraph or row); stored: text of blocks with a source; items: (line's index, item of "numbers:");
    busy: (line's index, what a stored result says of other programs)."""
    def __init__(self): self.prose, self.stored, self.items, self.busy = [], "", [], []


@functools.cache
def output_of(source):
    """The lines that a stored result or a command gives."""
    file, *options = source.split()
    if file.endswith(".jsonl"):
        table = json.loads((ROOT / file).read_text().split("\n", 1)[0])["table"]
        source = shlex.join(["python3", "-m", "experiments", table, "--from", file, *options])
    run = subprocess.run(source, shell=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return run.stdout.splitlines()


def texts_of(source):
    """What an item's source says: a document's tables and blocks, or the lines that a result or command gives."""
    path = ROOT / source
    if path.is_dir(): path /= "README.md"
    return path.read_text() if path.suffix in (".md", ".toml") and path.exists() else "\n".join(output_of(source))


def stands_in(text, number): return re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", text) is not None


class Numbers(Document):
    def __init__(self, name):
        super().__init__(name)
        self.wrong, self.found = [], []

    def error(self, line, text): self.wrong.append(f"{self.name}:{line + 1}: {text}")

    def block_end(self, n):
        """The line after the table or indented block that begins here; in a block lines may be empty."""
        begin = "|" if self.lines[n].startswith("|") else "    "
        texts = [*self.lines[n:], ""]
        return n + next(k for k, line in enumerate(texts) if not line.startswith(begin)
                        and (begin == "|" or line or not "".join(texts[k + 1:k + 2]).startswith(begin)))

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
                elif comment.startswith("numbers:"):
                    section.items += [(n, item.strip()) for item in comment[8:].split(";") if item.strip()]
            elif line.startswith("|") or line.startswith("    "):
                end = self.block_end(n)
                if source: self.compare(n, end, source, section)
                if source or line[0] == " ": section.stored += "\n".join(self.lines[n:end]) + "\n"
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
                self.quote(n, ("" if line.startswith("|") else "    ") + raw)
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

    def check(self, o, _):
        self.read()
        self.check_items()
        for section in self.sections:
            for n, text in section.prose:
                for number, quoted in numbers(text):
                    origin = self.origin(section, text, number)
                    line = n + text[:text.find(number)].count("\n")
                    if origin: self.found.append(f"{self.name}:{line + 1}: {quoted}  <- {origin}")
                    else: self.error(line, f"{quoted} has no origin: {' '.join(text.split())[:110]}")
        print("\n".join((self.wrong if o.missing else self.found + self.wrong)))
        print(f"{self.name}: {len(self.found)} numbers have an origin, {len(self.wrong)} are wrong or have none")
        return len(self.wrong)


# ---- what commands print ----
def blocks_of(lines):
    """Indented blocks, or the parts of them that commands begin: the command or "", the first line, and [(line's index, text)]."""
    blocks, inside = [], False
    for n, line in enumerate(lines):
        if line.startswith("    "):
            is_command = line.startswith("    $ ")
            if is_command or not inside: blocks.append(SimpleNamespace(command=line[6:] * is_command, first=n, quoted=[]))
            if inside and line.startswith("    > ") and not blocks[-1].quoted: blocks[-1].command += "\n" + line[6:]
            elif not is_command: blocks[-1].quoted.append((n, line[4:]))
        inside = line.startswith("    ")
    return blocks


PREAMBLE = """cd {clone}
export DEVICE=cpu OMP_WAIT_POLICY=passive COLUMNS=130
ls() {{ command ls -C "$@"; }}
. {here}/on_ranks.sh
ranks_launcher 4
mpirun() {{ command $launcher "$@"; }}
rm -rf runs
make -s DEBUG= PRECISION=fp32 all tools || exit 1
"""


def run_commands(commands, work):
    """Runs a document's commands one after another in the clone. Returns a list of lines for each."""
    script = PREAMBLE.format(clone=shlex.quote(f"{work}/clone"), here=shlex.quote(str(ROOT / "dev")))
    for n, command in enumerate(commands):
        script += f"echo >&2 {shlex.quote('  $ ' + command.splitlines()[0])}\n{{ {command}\n}} > {work}/{n} 2>&1\n"
    (work / "script").write_text(script)
    files = [work / str(n) for n in range(len(commands))]
    if subprocess.run(["bash", work / "script"]).returncode == 1 and not (work / "0").exists():
        sys.exit("the programs cannot be built")
    outputs = [file.read_text(errors="replace").splitlines() for file in files]
    for file in files: file.unlink()
    return outputs


class Outputs(Document):
    def __init__(self, name):
        super().__init__(name)
        self.same = self.other = self.gone = 0
        self.not_compared = []

    def check(self, _, work):
        blocks, printed = blocks_of(self.lines), []
        commands = [block.command for block in blocks if block.command]
        if not commands: return 0
        print(self.name, flush=True)
        outputs = iter(run_commands(commands, work))
        for block in blocks:
            output = next(outputs) if block.command else printed
            if block.command: printed += output
            if block.command or any(text != "..." and find_line(text, printed) for _, text in block.quoted):
                self.compare_block(block, output)
            else:
                self.not_compared.append(block.first + 1)
        print(f"  {self.same} quoted lines are the same, {self.other} have other numbers, {self.gone} are gone")
        if self.not_compared: print("  blocks not compared begin at the lines", *self.not_compared)
        return self.gone

    def compare_block(self, block, output):
        # the next line of output that the model wrote itself, of any shape; where the next quoted one is sought
        sample, at = None, 0
        for n, text in block.quoted:
            if re.match(r"\.\.\.$|sav(?:ing|ed) step |step |memory (?:per|of) rank ", text): sample = None  # it ends with these
            if text == "...": continue
            if sample is None: # after the lines above, of which several may be alike; or else anywhere
                found = find_line(text, [""] * at + output[at:]) or find_line(text, output)
                if found: at = found[1] + 1
            else: found = (output[sample], sample) if sample < len(output) else None
            if found and (sample is not None or text.startswith("sample after step")): sample = found[1] + 1
            self.note(n, text, found and found[0], output)

    def note(self, n, text, new, output):
        if new == text:
            self.same += 1
        elif new is None:
            self.gone += 1
            print(f"  line {n + 1} is no longer printed:\n    - {text}")
            for line in output:
                if line[:10] == text[:10]: print(f"    ? {line}")
        else:
            self.other += 1
            print(f"  line {n + 1} has other numbers:\n    - {text}\n    + {new}")
            self.quote(n, f"    {new}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", action="store_true", help="compare what commands print; fails only if a line is gone")
    parser.add_argument("--write", action="store_true", help="put new numbers into the documents")
    parser.add_argument("--missing", action="store_true", help="print only what is wrong")
    parser.add_argument("documents", nargs="*", help="all that are checked if none is named")
    o = parser.parse_args()
    for path in map(Path.resolve, map(Path, [] if o.outputs else o.documents)):
        if path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) not in DOCUMENTS:
            sys.exit(f"error: {path.relative_to(ROOT)} is not one of the documents whose numbers are checked: {', '.join(DOCUMENTS)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as work:
        if o.outputs: subprocess.run(["git", "clone", "-q", ".", f"{work}/clone"], check=True)
        for name in o.documents or DOCUMENTS:
            document = Outputs(name) if o.outputs else Numbers(name)
            wrong += document.check(o, Path(work))
            if o.write: document.save()
    sys.exit(wrong > 0)


if __name__ == "__main__": main()
