#!/usr/bin/env python3
"""Checks that the documents still quote what the programs print: runs their commands in a fresh clone of HEAD, in the documents'
order, and compares each quoted line with the new output.

A command is an indented line that begins with "$ ", its continuations with "> "; the quoted output follows. An indented block
without a command belongs to the commands before it, if they printed at least one of its lines. Each quoted line must be in the
output, except that its numbers may differ; "..." in it stands for anything. Nothing here checks tables, pictures, numbers within
sentences, or blocks without a command that no command printed (these are listed). MPIRUN="mpirun ..." says how to start ranks. The
status is 0 if every quoted line is there, whatever its numbers. It takes some minutes."""
import argparse, re, shlex, subprocess, sys, tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUMBER = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|\b(?:inf|nan)\b)"


def pattern(quoted):
    """A quoted line as a pattern: any numbers and blanks match, "..." matches anything. It captures the text between the "..."."""
    def part(text):
        def of(token): return NUMBER if re.fullmatch(NUMBER, token) else r"\s+" if token.isspace() else re.escape(token)
        return "".join(map(of, re.split(rf"({NUMBER}|\s+)", text)))
    return ".*".join(f"({part(text)})" for text in quoted.split("..."))


def find_line(quoted, output):
    """The line of the output that a quoted line stands for, as the document would quote it, and its index: the same line or, among
    those that differ in numbers only, the one whose leading numbers agree most. A line of another step never matches. None if
    there is none."""
    best, most, shape, old = None, -1, re.compile(pattern(quoted)), re.findall(NUMBER, quoted)
    for i, printed in enumerate(output):
        match = shape.fullmatch(printed)
        if not match:
            continue
        line = "...".join(match.groups())
        new = re.findall(NUMBER, line)
        same = next((n for n, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        if line == quoted:
            return line, i
        if same > most and (same or not quoted.startswith("step ")):
            best, most = (line, i), same
    return best


class Block:
    """An indented block of a document, or the part of one that a command begins: its first line, the command or "", and the quoted
    [(line's index, text)]."""
    def __init__(self, first, command=""):
        self.first, self.command, self.quoted = first, command, []


def blocks_of(lines):
    blocks, inside = [], False
    for n, line in enumerate(lines):
        text = line[4:]
        if not line.startswith("    "):
            inside = False
            continue
        if text.startswith("$ "):
            blocks.append(Block(n, text[2:]))
        elif text.startswith("> ") and inside and not blocks[-1].quoted:
            blocks[-1].command += "\n" + text[2:]
        else:
            if not inside: blocks.append(Block(n))
            blocks[-1].quoted.append((n, text))
        inside = True
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
    script = PREAMBLE.format(clone=shlex.quote(f"{work}/clone"), here=shlex.quote(str(HERE)))
    for n, command in enumerate(commands):
        script += f"echo >&2 {shlex.quote('  $ ' + command.splitlines()[0])}\n{{ {command}\n}} > {work}/{n} 2>&1\n"
    (work / "script").write_text(script)
    files = [work / str(n) for n in range(len(commands))]
    if subprocess.run(["bash", work / "script"]).returncode == 1 and not (work / "0").exists():
        sys.exit("the programs cannot be built")
    outputs = [file.read_text(errors="replace").splitlines() for file in files]
    for file in files: file.unlink()
    return outputs


class Document:
    def __init__(self, path):
        self.path, self.lines = path, Path(path).read_text().splitlines()
        self.same = self.other = self.gone = 0
        self.not_compared = []

    def compare(self, work):
        blocks, printed = blocks_of(self.lines), []
        outputs = iter(run_commands([block.command for block in blocks if block.command], work))
        for block in blocks:
            output = next(outputs) if block.command else printed
            if block.command: printed += output
            if block.command or any(text != "..." and find_line(text, printed) for _, text in block.quoted):
                self.compare_block(block, output)
            else:
                self.not_compared.append(block.first + 1)

    def compare_block(self, block, output):
        sample, at = None, 0  # the next line of output that the model wrote itself, of any shape; where the next quoted one is sought
        for n, text in block.quoted:
            if re.match(r"\.\.\.$|saved step |step |memory (?:per|of) rank ", text): sample = None  # it ends with these
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
            self.lines[n] = f"    {new}"

    def report(self, write):
        print(f"  {self.same} quoted lines are the same, {self.other} have other numbers, {self.gone} are gone")
        if self.not_compared:
            print("  blocks not compared begin at the lines", *self.not_compared)
        if write and self.other:
            Path(self.path).write_text("".join(line + "\n" for line in self.lines))
            print(f"  {self.path} has the new lines now")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the new numbers into the documents")
    default = ["README.md", *sorted(map(str, Path("doc").glob("[01]*.md"))), *map(str, Path("doc").glob("choosing.md"))]
    parser.add_argument("documents", nargs="*", default=default, help="README.md, the chapters and choosing.md if none is named")
    options = parser.parse_args()
    gone = 0
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["git", "clone", "-q", ".", f"{work}/clone"], check=True)
        for document in map(Document, options.documents):
            print(document.path, flush=True)
            document.compare(Path(work))
            document.report(options.write)
            gone += document.gone
    sys.exit(gone > 0)


if __name__ == "__main__": main()
