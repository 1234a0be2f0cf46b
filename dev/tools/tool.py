"""What the tools in Python share: errors, options, files, numbers, programs that they ask, and pictures (SVG).

One table of options is both the parser and --help, in the same words as those of the programs in C (llmc/base/options.h): unknown
options, bad numbers and values out of range are errors that name the option and the allowed range.
"""
import json, math, os, re, signal, stat, subprocess, sys
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace


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
        is_whole = isinstance(self.default, int)
        try:
            value = int(text) if is_whole else float(text)
        except ValueError:
            value = None
        if value is None or not re.fullmatch(r"[!-^`-~]+", text) or (is_whole and not -2**63 <= value < 2**63):
            die(f"--{self.name} wants a {'whole number' if is_whole else 'number'}, not '{text}'")
        if not self.low <= value <= self.high:
            between = "%.0f and %.0f" if is_whole else "%g and %g"
            die(f"--{self.name} must be between {between % (self.low, self.high)}, not {value if is_whole else text}")
        return value

    def show(self, value):
        """A value, as --help shows it."""
        if isinstance(value, bool): return "on" if value else "off"
        if isinstance(value, str): return value if self.is_choice else f"'{value}'"
        return "%g" % value if isinstance(value, float) else str(value)


def text(name, default, form, help, letter=""): return Option(name, default, help, form, letter=letter)
def whole(name, default, low, high, help, letter=""): return Option(name, default, help, "N", low, high, letter)
def real(name, default, low, high, help): return Option(name, float(default), help, "X", low, high)
def choice(name, default, words, help): return Option(name, default, help, words, is_choice=True)
def switch(name, help): return Option(name, False, help)


def field_of(name): return name.replace("-", "_")


def print_help(program, purpose, table, operands, values):
    """values: as the words before --help have set them."""
    print(f"{program}: {purpose}\n\nusage: {program} [options]{' ' * bool(operands)}{operands}\n")
    for i, o in enumerate(table):
        if isinstance(o, str):
            print("\n" * (i > 0) + o)
            continue
        left = f"{f'-{o.letter}, ' if o.letter else '    '}--{o.name} {o.form}"
        line_break = f"\n{'':48}" if len(left) > 45 else ""
        print(f"  {left:<46}{line_break}{o.help}  [{o.show(getattr(values, field_of(o.name)))}]")
    if any(isinstance(o, str) for o in table): print()
    print(f"  {'-h, --help':<46}print this and exit\n\nWhat is [on] or [off] is a switch: --NAME turns it on, --no-NAME off.")


def find_option(options, argument):
    """The option that an argument names, and whether it is a switch named as --no-NAME."""
    for o in options:
        if argument == f"--{o.name}" or (o.letter and argument == f"-{o.letter}"): return o, False
        if isinstance(o.default, bool) and argument == f"--no-{o.name}": return o, True
    die(f"unknown option '{argument}'; --help lists them all")


def parse_options(program, purpose, table, operands="", count=0):
    """Values by name ("svg-ms" is .svg_ms), .given: the names on the command line, and .operands, of which there must be `count`.
    Options may stand before, between and after operands; "--" ends them, "-" is an operand. A text in the table is a heading."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as of programs in C: "... | head" ends without a word
    sys.stdout.reconfigure(errors="surrogateescape")  # names of files may be any bytes
    options = [o for o in table if isinstance(o, Option)]
    found = SimpleNamespace(given=set(), operands=[], **{field_of(o.name): o.default for o in options})
    arguments = sys.argv[1:]
    while arguments:
        a = arguments.pop(0)
        if a in ("--help", "-h"):
            print_help(program, purpose, table, operands, found)
            sys.exit(0)
        if operands and a == "--":
            found.operands += arguments
            break
        if operands and (a == "-" or not a.startswith("-")):
            found.operands.append(a)
            continue
        name, has_value, value = a.partition("=")
        o, is_off = find_option(options, name)
        if isinstance(o.default, bool):
            if has_value: die(f"--{o.name} is a switch and takes no value; --no-{o.name} turns it off")
            value = not is_off
        else:
            if not has_value and not arguments: die(f"--{o.name} needs a value: {o.form}")
            value = o.read(value if has_value else arguments.pop(0))
        found.given.add(o.name)
        setattr(found, field_of(o.name), value)
    if len(found.operands) != count: die(f"usage: {program} [options] {operands}; --help says more")
    return found


# ---- files ----
def read_bytes(path, remedy):
    """A file's bytes; dies with a remedy if it cannot be read, or is a folder, pipe, socket or device."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
        mode = os.fstat(file).st_mode
        kinds = (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (lambda _: True, "device")
        if not stat.S_ISREG(mode): die(f"{path}: is a {next(kind for is_it, kind in kinds if is_it(mode))}, not a file; {remedy}")
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
    except json.JSONDecodeError as e:
        die(f"{path}: is not JSON: line {e.lineno}, {e.msg}; {remedy}")
    except (ValueError, RecursionError) as e:
        die(f"{path}: is not JSON: line 1, {e}; {remedy}")


def read_events(path, remedy):
    """The events of a timeline."""
    root = read_json(path, remedy)
    events = root.get("traceEvents") if isinstance(root, dict) else None
    return events if isinstance(events, list) else None


def has(event, **types):
    """True if an event has these fields, of these types; bool is no number."""
    kinds = {float: (int, float), int: (int,), str: (str,), dict: (dict,)}
    return isinstance(event, dict) and all(isinstance(event.get(name), kinds[t]) and not isinstance(event[name], bool)
                                           for name, t in types.items())


# ---- numbers ----
def ceil_div(a, b): return -(-a // b)


def format_bytes(n):
    """As llmc/run/logger.h: "12.3 MB"."""
    unit = 0
    while n >= 999.5 and unit < 4: n, unit = n / 1000, unit + 1
    return ("%.1f" if unit > 0 and n < 99.95 else "%.0f") % n + (" B", " kB", " MB", " GB", " TB")[unit]


def dump_number(x):
    """As Jansson prints a real number with nine digits; null where it is not finite."""
    if not math.isfinite(x): return "null"
    digits, e, exponent = ("%.9g" % x).partition("e")
    return f"{digits}e{int(exponent)}" if e else digits if "." in digits else digits + ".0"


def dump_json(x, indent=1):
    """JSON with an indent of one, and numbers as above."""
    if isinstance(x, float): return dump_number(x)
    if not isinstance(x, (dict, list)) or not x: return json.dumps(x, ensure_ascii=False)
    lines = [dump_json(value, indent + 1) for value in (x.values() if isinstance(x, dict) else x)]
    if isinstance(x, dict): lines = [f"{json.dumps(key, ensure_ascii=False)}: {line}" for key, line in zip(x, lines)]
    begin, end = "{}" if isinstance(x, dict) else "[]"
    space = "\n" + " " * indent
    return begin + space + ("," + space).join(lines) + space[:-1] + end


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


def ask_player(folder, **request):
    """What schedule_play in this folder says; dev/tools/schedule_play.c lists the requests."""
    path = os.path.join(folder, "schedule_play")
    return ask(started(path, f"{path} is missing, which plays schedules; make tools builds it"), json.dumps(request))


# ---- pictures; numbers are pixels ----
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

    def axis(self, left, width, bottom, ms):
        """Milliseconds below what is drawn."""
        tick = 10 ** math.floor(math.log10(ms))
        if ms / tick < 2: tick /= 5
        elif ms / tick < 5: tick /= 2
        i = 0
        while i * tick <= ms * (1 + 1e-9):
            self.add(f'<text x="{left + i * tick / ms * width:.2f}" y="{bottom}" '
                     f'text-anchor="middle">{i * tick:g}{"" if i else " ms"}</text>')
            i += 1

    def write(self, option, path):
        try:
            file = open(path, "w")
        except OSError as e:
            die(f"{option} {path}: cannot be opened for writing: {e.strerror}")
        try:
            with file: file.write("\n".join([*self.lines, "</svg>\n"]))
        except OSError as e:
            die(f"{option} {path}: cannot be written: {e.strerror}")
