#!/usr/bin/env python3
"""make_lab.py PROGRAM [FOLDER]   makes a lab: the program without the bodies that labs/PROGRAM.toml lists, the headers of llmc/, and
                             TASKS.md. FOLDER is relative to the repository's root, and labs/PROGRAM by default. A student's work
                             in it is never overwritten.
make_lab.py PROGRAM FOLDER N   the same with the course's bodies in tasks 1 to N (a test tries how far each task gets)
make_lab.py --table          prints the table of all labs that labs/README.md contains

labs/PROGRAM.toml contains title, hours, difficulty (1 to 5), before (prerequisites), writes (the table's third column), the keys that
labs/check_lab.py reads, and a table for each task, in the order in which to write them. A task is named after its function, which is
in the program or in a header of llmc/; parentheses name the part that is meant. The chapter is that of the program.
  step                 a heading for this task and those that follow
  task, given, result  the text
  section              which heading of the chapter explains this task and those that follow
  when                 the blank ends the run only if this C expression holds, so that other ways to train work before it is
                       written; a part that begins with `if` has its condition already; in a function that returns something
                       also `otherwise`, a statement that returns if it does not
  from, to             of a part: its first line, and its last one if it has more, as they are in the function, without the blanks
                       around them and the comments behind them
  keep                 of a part: a line that stands in place of declarations that later lines of the function need"""
import hashlib, re, sys, textwrap, tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120        # columns of TASKS.md, and of the comments that are written into the blanks
MANIFEST = ".lab"  # in the lab's folder: a sum and a path for each file as it was made


def fail(message):
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def programs():
    return sorted(path.stem for path in (ROOT / "labs").glob("*.toml"))


def elsewhere(program, folder):
    return "" if str(folder) == f"labs/{program}" else f" LAB={folder}"


def unwrapped(value):
    """The value with texts on one line each."""
    if isinstance(value, dict): return {key: unwrapped(inner) for key, inner in value.items()}
    if isinstance(value, list): return [unwrapped(inner) for inner in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def file_with(program, name):
    """The file that defines a function: the program's, if no header does."""
    defined = re.compile(rf"^\w[^=;(\n]*?\b{name}\([^;]*?\{{", re.M)
    found = [path for path in (ROOT / "llmc").rglob("*.h") if defined.search(path.read_text())]
    return str(found[0].relative_to(ROOT)) if found else f"train_gpt2_{program}.cu"


def read_lab(program):
    """labs/PROGRAM.toml, checked. `tasks` is a list; each also has its title, number, function's name and `where` for messages."""
    path = f"labs/{program}.toml"
    if program not in programs(): fail(f"there is no lab '{program}'; there are: {' '.join(programs())}")
    try:
        lab = unwrapped(tomllib.loads((ROOT / path).read_text()))
    except tomllib.TOMLDecodeError as error:
        fail(f"{path}: {error}")
    chapter = next((ROOT / "doc").glob(f"[0-9][0-9]_{program}.md"))
    lab |= {"program": program, "chapter": f"doc/{chapter.name}"}
    step, section, tasks = "", "", []
    for number, (title, table) in enumerate(lab["tasks"].items(), 1):
        step, section = table.get("step", step), table.get("section", section)
        name, condition = title.split()[0], re.match(r"if \((.+?)\) \w", table.get("from", ""))
        task = {"step": step, "section": section, "chapter": lab["chapter"]} | ({"when": condition[1]} if condition else {}) | table
        task |= {"title": title, "number": number, "name": name, "file": file_with(program, name), "where": f"{path}: {title}"}
        tasks.append(task)
        if ("from" in task) != ("(" in title): fail(f"{path}: {title}: a part needs 'from', and a whole body has none")
        if not re.search(rf"^#+ +{re.escape(task['section'])} *$", (ROOT / task["chapter"]).read_text(), re.M):
            fail(f"{path}: {title}: {task['chapter']} has no heading '{task['section']}'")
    return lab | {"tasks": tasks}


# ---- blanks ----
def died(task):
    return f'die_here("{task["title"]} is not written yet'


def blank_lines(task, indent):
    """The comment and the statement that stand where a body was."""
    def comment(text, hanging="  "):
        return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}// ", subsequent_indent=f"{indent}// {hanging}",
                             break_long_words=False, break_on_hyphens=False)
    lines = [indent + task["keep"]] if "keep" in task else []
    lines += comment(f"TASK {task['number']}. {task['task']}", "")
    for text in f"Given: {task['given']}", f"Result: {task['result']}", f'Read: {task["chapter"]}, "{task["section"]}"':
        lines += comment(text)
    condition = f"if ({task['when']}) " if "when" in task else ""
    lines.append(f'{indent}{condition}{died(task)}: it is task {task["number"]} in TASKS.md");')
    return lines + ([indent + task["otherwise"]] if "otherwise" in task else [])


def find_function(lines, task, path):
    """The first line of a function's definition and its last one, which are the same if it has one line."""
    name, where = task["name"], f"{task['where']}: {path}"
    declared = [i for i, line in enumerate(lines) if re.match(rf"\w[^=;(]*?\b{name}\(", line)]
    found = [i for i in declared if not re.fullmatch(r"[^{]*;\s*", lines[i])]
    if len(found) != 1: fail(f"{where} defines {name} {len(found)} times" if found else f"{where} defines no function {name}")
    if re.search(r"\{.*\}\s*(//.*)?$", lines[found[0]]): return found[0], found[0]
    end = next((i for i in range(found[0], len(lines)) if lines[i].startswith("}")), None)
    return found[0], end or fail(f"{where}: the body of {name} has no end")


def without_comment(line):
    return re.sub(r"(?<=\S) *// .*", "", line.strip())


def find_part(lines, task, first, last):
    """The part of a function's lines first to last that the task leaves to write."""
    found = [i for i in range(first, last + 1) if without_comment(lines[i]) == task["from"]]
    if len(found) != 1: fail(f"{task['where']}: the line '{task['from']}' is in {len(found)} places of {task['name']}, not in one")
    to = task.get("to", task["from"])
    end = next((i for i in range(found[0], last + 1) if without_comment(lines[i]) == to), None)
    return found[0], end or fail(f"{task['where']}: {task['name']} has no line '{to}' from there on")


def take_out(lines, task):
    """Replaces the lines that the task leaves to write. Returns how many there were, without empty ones."""
    begin, end = find_function(lines, task, task["file"])
    if begin == end:  # a body on the line of its name is first given lines of its own
        head, body = re.match(r"([^{]*)\{ *(.*?) *\}", lines[begin]).groups()
        lines[begin:begin + 1] = [head + "{", "    " + body, "}"]
        end += 2
    opening = next(i for i in range(begin, end) if re.search(r"\{\s*(//.*)?$", lines[i]))
    first, last = find_part(lines, task, begin, end) if "from" in task else (opening + 1, end - 1)
    count = sum(line.strip() != "" for line in lines[first:last + 1])
    lines[first:last + 1] = blank_lines(task, re.match(r"\s*", lines[first])[0])
    return count


def lab_files(lab, written=0):
    """The lab's files, {path: text}, with its blanks but for those of the first `written` tasks. Notes in a task how many lines it
    has in the course's version."""
    paths = [f"train_gpt2_{lab['program']}.cu", *(str(path.relative_to(ROOT)) for path in (ROOT / "llmc").rglob("*.h"))]
    files = {path: (ROOT / path).read_text() for path in paths}
    for task in lab["tasks"][written:]:
        lines = files[task["file"]].split("\n")
        task["lines"] = take_out(lines, task)
        files[task["file"]] = "\n".join(lines)
    return files


# ---- the folder ----
def tasks_md(lab, folder):
    paragraphs = [
        f"# Lab: {lab['title']}",
        f"About {lab['hours']} hours; difficulty {lab['difficulty']} of 5. Chapter: {lab['chapter']}. Before it: {lab['before']}.",
        "Write the tasks in this order. In its file, each task is marked by a comment that begins with TASK and repeats this "
        "list's text; replace the comment and the statement `die_here(...)` below it. Everything else is the course's own "
        "program. After each task,",
        f"    make check-lab PROGRAM={lab['program']}{elsewhere(lab['program'], folder)}",
        f"shows which claims hold, and which task to write next. The course's version is train_gpt2_{lab['program']}.cu and llmc/ in the "
        "repository's root: read it after your own version works."]
    step = ""
    for task in lab["tasks"]:
        paragraphs += [f"## {task['step']}"] * (task["step"] != step)
        step, lines = task["step"], f"{task['lines']} line{'s' * (task['lines'] != 1)}"
        paragraphs += [f"### Task {task['number']}. {task['title']}",
                       f"In {task['file']}; the course's version has {lines}.", task["task"],
                       f"Given: {task['given']}", f"Result: {task['result']}", f'Read: {task["chapter"]}, "{task["section"]}".']
    wrap = {"width": WIDTH, "break_long_words": False, "break_on_hyphens": False}
    return "\n\n".join(text if text[0] in "# " else textwrap.fill(text, **wrap) for text in paragraphs) + "\n"


def sum_of(text):
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def check_folder(program, folder, files):
    """Ends if anything in the folder would be overwritten that this script has not written."""
    manifest = Path(folder, MANIFEST)
    made = dict(reversed(line.split(" ", 1)) for line in manifest.read_text().splitlines()) if manifest.exists() else {}
    for path in sorted(files):
        there = Path(folder, path)
        if there.exists() and (path not in made or sum_of(there.read_text()) != made[path]):
            why = "has been changed since the lab was made" if path in made else "was not made by this script"
            fail(f"{there} {why}, so nothing is overwritten. Go on with make check-lab PROGRAM={program}; to begin again, first "
                 f"move the folder away: mv {folder} {folder}.old")


def make_lab(program, folder=None, written="0"):
    lab, folder = read_lab(program), (folder or f"labs/{program}").rstrip("/")
    tasks = lab["tasks"]
    if not written.isdigit() or int(written) > len(tasks):
        fail(f"{program} has {len(tasks)} tasks; N must be 0 to that, not '{written}'")
    lab_files(lab)  # counts their lines
    files = lab_files(lab, int(written)) | {"TASKS.md": tasks_md(lab, folder)}
    check_folder(program, folder, files)
    for path, text in (files | {MANIFEST: "".join(f"{sum_of(files[path])} {path}\n" for path in sorted(files))}).items():
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, path).write_text(text)
    print(f"{folder}: {len(tasks)} tasks, about {lab['hours']} hours; {folder}/TASKS.md lists them.")
    for first in tasks[int(written):][:1]:
        check = f"make check-lab PROGRAM={program}{elsewhere(program, folder)}"
        print(f"Begin with {first['title']} in {folder}/{first['file']}, then: {check}")


def print_table():
    print("| lab | hours | difficulty | you write | tasks | lines | chapter |")
    print("|---" * 7 + "|")
    for lab in sorted(map(read_lab, programs()), key=lambda lab: lab["chapter"]):
        lab_files(lab)
        number = int(re.match(r"doc/(\d+)_", lab["chapter"])[1])
        print(f"| {lab['program']} | {lab['hours']} | {lab['difficulty']} | {lab['writes']} | {len(lab['tasks'])} "
              f"| {sum(task['lines'] for task in lab['tasks'])} | [{number}](../{lab['chapter']}) |")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--table"]: print_table()
        case [program, *rest] if len(rest) <= 2 and not program.startswith("-"): make_lab(program, *rest)
        case _: sys.exit("usage: python3 labs/make_lab.py PROGRAM [FOLDER [N]] | --table; PROGRAM is one of: "
                         + " ".join(programs()))
