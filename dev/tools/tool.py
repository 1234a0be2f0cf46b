"""What the tools in Python share: errors, options, files, numbers, programs that they ask, and pictures (SVG)."""
import argparse, json, math, os, re, signal, stat, subprocess, sys
from dataclasses import dataclass
from functools import cache


def die(message):
    sys.stdout.flush()  # keep the order in which things happened when both go to one place
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def require(condition, message):
    if not condition: die(message)


# ---- options ----
@dataclass
class Option:
    name: str
    default: object  # its type is the kind of value: bool (a switch), int, float or str
    help: str
    form: str = ""   # what --help calls the value; of a choice its words, separated by |
    low: float = 0   # allowed range of numbers
    high: float = 0
    letter: str = ""
    is_choice: bool = False

    def read(self, text):
        """The value that a text stands for."""
        if self.is_choice and text not in self.form.split("|"): die(f"--{self.name} must be one of {self.form}, not '{text}'")
        if isinstance(self.default, str): return text
        kind, what = (int, "whole number") if isinstance(self.default, int) else (float, "number")
        try:
            value = kind(text if re.fullmatch(r"[!-^`-~]+", text) else "none")
        except ValueError:
            die(f"--{self.name} wants a {what}, not '{text}'")
        if not self.low <= value <= self.high:
            die(f"--{self.name} must be between {self.low:.12g} and {self.high:.12g}, not {text}")
        return value


def text(name, default, form, help, letter=""): return Option(name, default, help, form, letter=letter)
def whole(name, default, low, high, help, letter=""): return Option(name, default, help, "N", low, high, letter)
def real(name, default, low, high, help): return Option(name, float(default), help, "X", low, high)
def choice(name, default, words, help): return Option(name, default, help, words, is_choice=True)
def switch(name, help): return Option(name, False, help)


class Parser(argparse.ArgumentParser):
    def error(self, message): die(f"{message}; --help lists all options")


def parse_options(program, purpose, table, operand=""):
    """Values by name ("svg-ms" is .svg_ms), .given: the names on the command line, and .operands, a list of one if the tool has it.
    A text in the table is a heading."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as of programs in C: "... | head" ends without a word
    sys.stdout.reconfigure(errors="surrogateescape")  # names of files may be any bytes
    parser = group = Parser(program, f"{program} [options] {operand}".rstrip(), f"{program}: {purpose}", allow_abbrev=False)
    for o in table:
        if isinstance(o, str):
            group = parser.add_argument_group(o)
            continue
        names = [f"-{o.letter}"] * bool(o.letter) + [f"--{o.name}"]
        how = {"action": argparse.BooleanOptionalAction} if o.default is False else {"type": o.read, "metavar": o.form}
        default = "off" if o.default is False else o.default if o.is_choice else repr(o.default)
        group.add_argument(*names, default=argparse.SUPPRESS, help=f"{o.help}  [{default}]".replace("%", "%%"), **how)
    if operand: parser.add_argument("operands", nargs=1, metavar=operand, help=argparse.SUPPRESS)
    found = parser.parse_args()
    options = {o.name.replace("-", "_"): o for o in table if isinstance(o, Option)}
    found.given = {o.name for name, o in options.items() if name in found}
    for name, o in options.items(): vars(found).setdefault(name, o.default)
    return found


# ---- files ----
def read_bytes(path, remedy):
    """A file's bytes; dies with a remedy if it cannot be read, or is a folder, pipe, socket or device."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
        kind = stat.S_IFMT(os.fstat(file).st_mode)
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        if kind != stat.S_IFREG: die(f"{path}: is a {kinds.get(kind, 'device')}, not a file; {remedy}")
        with open(file, "rb") as f: return f.read()
    except OSError as e:
        die(f"{path}: cannot be opened: {e.strerror}; {remedy}")


def refuse_constant(name): raise ValueError(f"{name} is no number of JSON")


def unique_keys(pairs):
    found = dict(pairs)
    if len(found) < len(pairs): raise ValueError("duplicate object key")
    return found


def parse_json(data, **how):
    """JSON as the standard has it: no NaN, no Inf, and no number beyond a double. how: more arguments of json.loads."""
    def number(digits):
        x = float(digits)
        return x if math.isfinite(x) else refuse_constant(digits)
    return json.loads(data.decode("utf-8"), parse_constant=refuse_constant, parse_float=number, **how)


def read_json(path, remedy, **how):
    try:
        return parse_json(read_bytes(path, remedy), **how)
    except (ValueError, RecursionError) as e:
        die(f"{path}: is not JSON: {e}; {remedy}")


# ---- numbers ----
def ceil_div(a, b): return -(-a // b)


def format_bytes(n):
    """As llmc/run/logger.h: "12.3 MB"."""
    unit = 0
    while n >= 999.5 and unit < 4: n, unit = n / 1000, unit + 1
    return ("%.1f" if unit > 0 and n < 99.95 else "%.0f") % n + (" B", " kB", " MB", " GB", " TB")[unit]


def rounded(x):
    """Real numbers with nine digits; None where they are not finite."""
    if isinstance(x, dict): return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)): return [rounded(value) for value in x]
    return x if not isinstance(x, float) else float(f"{x:.9g}") if math.isfinite(x) else None


def dump_json(x): return json.dumps(rounded(x), indent=1, ensure_ascii=False)


# ---- programs that answer a line with a line of JSON ----
@cache
def started(path, missing, *arguments):
    require(os.access(path, os.X_OK), missing)
    return subprocess.Popen([path, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(program, line):
    """The answer of a started program; of an error it has told the reason."""
    sys.stdout.flush()
    print(line, file=program.stdin, flush=True)
    answer = program.stdout.readline()
    return json.loads(answer) if answer else sys.exit(1)


# ---- pictures; numbers are pixels, but times ----
class Picture:
    def __init__(self, width, height):
        self.lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
                      'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']

    def add(self, line): self.lines.append(line)

    def box(self, x, y, width, height, colour, more=""):
        self.add(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}"{more}/>')

    def legend(self, x, y, colours):
        """Colours with their names, from left to right."""
        for colour, name in colours:
            self.add(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
            self.add(f'<text x="{x + 16}" y="{y + 10}">{name}</text>')
            x += 34 + 7 * len(name)

    def write(self, option, path):
        try:
            with open(path, "w") as file: file.write("\n".join([*self.lines, "</svg>\n"]))
        except OSError as e:
            die(f"{option} {path}: cannot be written: {e.strerror}")


LEFT, WIDTH, TOP = 60, 800, 34


class TimePicture(Picture):
    """Of each rank `rows` rows, `row` high, of what it did in `ms` milliseconds; below them the milliseconds."""

    def __init__(self, legend, ranks, rows, row, gap, ms):
        height = TOP + ranks * (rows * row + gap) + 22
        super().__init__(LEFT + WIDTH + 30, height)
        self.row, self.rank, self.ms = row, rows * row + gap, ms
        self.legend(LEFT, 10, legend)
        tick = 10 ** math.floor(math.log10(ms))
        if ms / tick < 2: tick /= 5
        elif ms / tick < 5: tick /= 2
        for i in range(int(ms / tick * (1 + 1e-9)) + 1):
            self.add(f'<text x="{LEFT + i * tick / ms * WIDTH:.2f}" y="{height - 6}" '
                     f'text-anchor="middle">{i * tick:g}{"" if i else " ms"}</text>')
        for r in range(ranks): self.add(f'<text x="8" y="{TOP + r * self.rank + rows * row // 2 + 4}">rank {r}</text>')

    def slice(self, rank, row, begin, end, colour, more="", name=""):
        """What is between 0 and ms of it, with its name if there is room."""
        begin, end, y = max(begin, 0), min(end, self.ms), TOP + rank * self.rank + row * self.row
        if begin >= end: return
        x, width = LEFT + begin / self.ms * WIDTH, (end - begin) / self.ms * WIDTH
        self.box(x, y, width, self.row, colour, more)
        if name and width >= 7 * len(name) + 3: self.add(f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{name}</text>')
