"""What the tools in Python share: errors, options, files, numbers, programs that they ask, and pictures (SVG)."""
import argparse, json, math, os, re, signal, stat, subprocess, sys
from collections import namedtuple
from functools import cache
from svg import Svg, tick_of


def die(message):
    sys.stdout.flush()  # keep the order in which things happened when both go to one place
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def require(condition, message):
    if not condition: die(message)


# ---- options ----
# default: its type is the kind of value, bool being a switch; form: what --help calls the value; read: makes it of a text.
Option = namedtuple("Option", "name default help form read letter", defaults=("", str, ""))


def number(name, kind, low, high):
    def read(text):
        try: value = parse_number(kind, text)
        except ValueError: die(f"--{name} wants a {'whole ' * (kind is int)}number, not '{text}'")
        require(low <= value <= high, f"--{name} must be between {low:.12g} and {high:.12g}, not {text}")
        return value
    return read


def word(name, words):
    def read(text): return text if text in words.split("|") else die(f"--{name} must be one of {words}, not '{text}'")
    return read


def text(name, default, form, help, letter=""): return Option(name, default, help, form, letter=letter)
def whole(name, default, low, high, help, letter=""): return Option(name, default, help, "N", number(name, int, low, high), letter)
def real(name, default, low, high, help): return Option(name, float(default), help, "X", number(name, float, low, high))
def choice(name, default, words, help): return Option(name, default, help, words, word(name, words))
def switch(name, help): return Option(name, False, help)


SIZES = [  # of a model
    whole("layers", 0, 0, 256, "number of layers; 0: the model's"), whole("heads", 0, 0, 65536, "number of heads; 0: the model's"),
    whole("channels", 0, 0, 65536, "number of channels, C; 0: the model's"),
    whole("vocab-size", 0, 0, 1 << 24, "number of tokens, V; 0: 257 (bytes) for dN, 50257 for gpt2*")]


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
        default = "off" if o.default is False else str(o.default) or "''"
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
def parse_number(kind, text): return kind(text if re.fullmatch(r"[!-^`-~]+", text) else "none")  # int(" 1_0 ") would be 10
def ceil_div(a, b): return -(-a // b)


def format_bytes(n):
    """As llmc/run/logger.h: "12.3 MB"."""
    unit = 0
    while n >= 999.5 and unit < 4: n, unit = n / 1000, unit + 1
    return ("%.1f" if unit > 0 and n < 99.95 else "%.0f") % n + (" B", " kB", " MB", " GB", " TB")[unit]


def rounded(x):
    """Real numbers with fifteen digits, which keep fractions of a byte; None where they are not finite."""
    if isinstance(x, dict): return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)): return [rounded(value) for value in x]
    return x if not isinstance(x, float) else float(f"{x:.15g}") if math.isfinite(x) else None


def dump_json(x): return json.dumps(rounded(x), indent=1, ensure_ascii=False)


# ---- tables to read ----
def print_table(head, *rows):
    """Numbers stand on the right, real ones with five digits. A row that is not as long as the headings ends with a remark."""
    def word(x): return x if isinstance(x, str) else str(x) if isinstance(x, int) else "-" if math.isnan(x) else f"{x:.5g}"
    split = [(row, []) if len(row) == len(head) else (row[:-1], row[-1:]) for row in ([*map(word, row)] for row in rows)]
    forms = []
    for i, name in enumerate(head):
        column = [words[i] for words, _ in split if i < len(words)]
        has_numbers = any(re.fullmatch(r" *[-+]?\d[\d.e+-]*( ?%| [kMGT]?B)?", x) for x in column)
        forms.append(f"{{:{'>' if has_numbers else '<'}{max(map(len, [name, *column]))}}}")
    for words, remark in [(head, []), *split]:
        print("  ".join([*(form.format(x) for form, x in zip(forms, words)), *remark]).rstrip())


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
class Picture(Svg):
    digits = 2

    def legend(self, x, y, colours):
        """Colours with their names, from left to right."""
        for colour, name in colours:
            self.rect(x, y, 12, 12, colour)
            self.text(x + 16, y + 10, name)
            x += 34 + 7 * len(name)

    def write(self, option, path):
        try:
            with open(path, "w") as file: file.write(str(self))
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
        tick = tick_of(ms, 5)
        for i in range(int(ms / tick * (1 + 1e-9)) + 1):
            self.text(LEFT + i * tick / ms * WIDTH, height - 6, f"{i * tick:g}{'' if i else ' ms'}", "middle")
        for r in range(ranks): self.text(8, TOP + r * self.rank + rows * row // 2 + 4, f"rank {r}")

    def slice(self, rank, row, begin, end, colour, name="", **more):
        """What is between 0 and ms of it, with its name if there is room."""
        begin, end, y = max(begin, 0), min(end, self.ms), TOP + rank * self.rank + row * self.row
        if begin >= end: return
        x, width = LEFT + begin / self.ms * WIDTH, (end - begin) / self.ms * WIDTH
        self.rect(x, y, width, self.row, colour, **more)
        if name and width >= 7 * len(name) + 3: self.text(x + width / 2, y + 15, name, "middle")
