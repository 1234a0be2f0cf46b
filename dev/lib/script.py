"""Scripts: errors, options, a folder of their own, and how they end."""
import argparse, atexit, functools, itertools, os, re, shutil, signal, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Interrupted(SystemExit):
    """Somebody has stopped this script."""


def fail(why):
    sys.exit(f"error: {why}")


def note(text):
    print(text, file=sys.stderr, flush=True)


def interrupt(*_):
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM: signal.signal(number, signal.SIG_IGN)
    raise Interrupted(1)


# ---- options ----
STORED = {"into": "", "from": ""} # where results go, and where they come from instead


def whole_number(option, text, least=1, why=""):
    if re.fullmatch(r"\d{1,9}", text) and int(text) >= least: return int(text)
    fail(f"{option} wants a whole number from {least} on, not '{text}'{': ' if why else ''}{why}")


def value_of(option, text, default, least):
    """The text as what the default is: a whole number, words, whole numbers, or text."""
    if isinstance(default, int): return whole_number(option, text, *least)
    if not isinstance(default, list): return text
    found = text.replace(",", " ").split() or fail(f"{option} is empty")
    return [whole_number(option, word, *least) if default and isinstance(default[0], int) else word for word in found]


def options(doc, flags=(), least={}, more=True, placeholders={}, **defaults):
    """Takes the script's own options out of the command line: numbers, lists or texts as their defaults are; flags have no value.
    `more` has all others, which are the programs', or is False if there may be none. least: {option: (the least number, why)}. Then
    the script continues in the repository's root, with a folder of its own for the time that it runs."""
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
        if signal.getsignal(number) != signal.SIG_IGN: signal.signal(number, interrupt) # nohup ignores one
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for flag in flags: parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true")
    for name, default in defaults.items():
        option, shown = f"--{name.replace('_', '-')}", " ".join(map(str, default)) if isinstance(default, list) else str(default)
        convert = functools.partial(value_of, option, default=default, least=least.get(name, (1,)))
        shown = placeholders.get(name) or (f'"{shown}"' if " " in shown else shown or "FILE")
        parser.add_argument(option, type=convert, default=default, metavar=shown)
    parser.error = fail
    o, o.more = parser.parse_known_args()
    if "--" in o.more: o.more.remove("--")
    if o.more and not more: fail(f"there is no option '{o.more[0]}'; --help lists them")
    os.chdir(ROOT)
    return o


def option(words, name, default=None):
    """The last value that a command line gives an option."""
    return next((b for a, b in reversed([*itertools.pairwise(words)]) if a == name), default)


def environ(name, default):
    return os.environ.get(name) or default


def whole_environ(name, default, least=1):
    return whole_number(name, environ(name, str(default)), least)


@functools.cache
def work():
    """A folder that is removed when the script ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def words(*arguments):
    """Texts are split at blanks, lists are words as they are."""
    return [str(word) for a in arguments for word in (a.split() if isinstance(a, str) else a if isinstance(a, list) else [a])]


def ask(*command, **settings):
    """What a command prints, or None if it fails or is not there."""
    try: run = subprocess.run(words(*command), stdout=subprocess.PIPE, text=True, **settings)
    except OSError: return None
    return None if run.returncode else run.stdout
