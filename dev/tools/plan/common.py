"""Errors, bytes and JSON in the words and digits of the C programs."""
import json
import math
import os
import sys


def die(message, up=1):
    """Ends the program with status 1. The place in the code is the caller's."""
    frame = sys._getframe(up)
    sys.stdout.flush()
    place = f"dev/tools/plan/{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    print(f"error: {message}  [{place}]", file=sys.stderr)
    sys.exit(1)


def require(condition, message):
    """message: a text, or a function that makes it, where it does not exist if the condition holds."""
    if not condition: die(message() if callable(message) else message, 2)


def read_text(path, remedy):
    """The text of a file; dies as llmc/base/folder.h does."""
    if os.path.isdir(path): die(f"{path}: is a folder, not a file; {remedy}", 2)
    try:
        with open(path, encoding="utf-8", errors="replace") as file: return file.read()
    except OSError as error: die(f"{path}: cannot be opened: {error.strerror}; {remedy}", 2)


def format_bytes(n):
    """As llmc/run/logger.h: "12.3 MB"."""
    unit = 0
    while n >= 999.5 and unit < 4: n, unit = n / 1000, unit + 1
    return ("%.1f" if unit > 0 and n < 99.95 else "%.0f") % n + (" B", " kB", " MB", " GB", " TB")[unit]


def ceil_div(a, b):
    return -(-a // b)


def dump_number(x):
    """As Jansson prints a real number with nine digits; null where it is not finite."""
    if not math.isfinite(x): return "null"
    text = "%.9g" % x
    if "e" not in text: return text if "." in text else text + ".0"
    digits, exponent = text.split("e")
    return f"{digits}e{int(exponent)}"


def dump_json(x, indent=1):
    """JSON with an indent of one, and numbers as above."""
    if isinstance(x, float): return dump_number(x)
    if not isinstance(x, (dict, list)) or not x: return json.dumps(x, ensure_ascii=False)
    lines = [f"{json.dumps(key, ensure_ascii=False)}: {dump_json(value, indent + 1)}" for key, value in x.items()] \
        if isinstance(x, dict) else [dump_json(value, indent + 1) for value in x]
    begin, end = "{}" if isinstance(x, dict) else "[]"
    space = "\n" + " " * indent
    return begin + space + ("," + space).join(lines) + space[:-1] + end
