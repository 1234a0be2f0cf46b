"""One table makes both the parser and --help, in the words and with the rules of llmc/base/options.h."""
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from common import die, require


@dataclass
class Option:
    name: str
    kind: str                # text, int, float, choice or flag
    value: object            # the default
    form: str                # what --help calls the value; of a choice its words
    help: str
    low: float = 0
    high: float = 0
    letter: str = ""
    heading: str = ""        # --help prints it above


class Table:
    def __init__(self, program, purpose):
        self.program, self.purpose, self.options, self.above = program, purpose, [], ""

    def heading(self, text):
        self.above = text

    def add(self, kind, name, value, form, help, low=0, high=0, letter=""):
        self.options.append(Option(name, kind, value, form, help, low, high, letter, self.above))
        self.above = ""

    def text(self, name, value, form, help, letter=""): self.add("text", name, value, form, help, letter=letter)
    def int(self, name, value, low, high, help, letter=""): self.add("int", name, value, "N", help, low, high, letter)
    def float(self, name, value, low, high, help): self.add("float", name, float(value), "X", help, low, high)
    def choice(self, name, value, words, help): self.add("choice", name, value, words, help)
    def flag(self, name, help): self.add("flag", name, False, "", help)

    def print_help(self, values):
        """values: as the words before --help have set them."""
        print(f"{self.program}: {self.purpose}\n\nusage: {self.program} [options]\n")
        for i, o in enumerate(self.options):
            if o.heading: print("\n" * (i > 0) + o.heading)
            left = (f"-{o.letter}, " if o.letter else "    ") + f"--{o.name} {o.form}"
            shown = {"text": "'%s'", "float": "%g"}.get(o.kind, "%s") % values[o.name]
            if o.kind == "flag": shown = "on" if values[o.name] else "off"
            print(f"  {left:<46}" + ("\n" + " " * 48) * (len(left) > 45) + f"{o.help}  [{shown}]")
        print("\n  -h, --help                                    print this and exit\n\n"
              "What is [on] or [off] is a switch: --NAME turns it on, --no-NAME off.")

    def find(self, word):
        """The option that a word names, and whether it is turned off."""
        for o in self.options:
            if word == f"--{o.name}" or (o.letter and word == f"-{o.letter}"): return o, False
            if o.kind == "flag" and word == f"--no-{o.name}": return o, True
        die(f"unknown option '{word}'; --help lists them all")

    def parse(self, arguments):
        """Values by name, with _ for -; .given: the options that the command line named."""
        values, given, words = {o.name: o.value for o in self.options}, set(), list(arguments)
        while words:
            word = words.pop(0)
            if word in ("--help", "-h"):
                self.print_help(values)
                sys.exit(0)
            name, has_value, text = word.partition("=")
            o, is_off = self.find(name)
            given.add(o.name)
            if o.kind == "flag":
                require(not has_value, f"--{o.name} is a switch and takes no value; --no-{o.name} turns it off")
                values[o.name] = not is_off
                continue
            require(has_value or words, f"--{o.name} needs a value: {o.form}")
            values[o.name] = value_of(o, text if has_value else words.pop(0))
        return SimpleNamespace(given=given, **{name.replace("-", "_"): x for name, x in values.items()})


def value_of(o, text):
    if o.kind == "int":
        require(re.fullmatch(r"[+-]?[0-9]+", text) and abs(int(text)) < 1 << 63, f"--{o.name} wants a whole number, not '{text}'")
        require(o.low <= int(text) <= o.high, f"--{o.name} must be between {o.low:.0f} and {o.high:.0f}, not {int(text)}")
        return int(text)
    if o.kind == "float":
        x = number_of(text)
        require(x is not None, f"--{o.name} wants a number, not '{text}'")
        require(o.low <= x <= o.high, "--%s must be between %g and %g, not %s" % (o.name, o.low, o.high, text))
        return x
    require(o.kind == "text" or text in o.form.split("|"), f"--{o.name} must be one of {o.form}, not '{text}'")
    return text


def number_of(text):
    """None: it is none."""
    if re.search(r"[\s_]", text): return None
    try: return float(text)
    except ValueError: return None
