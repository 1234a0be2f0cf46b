"""Tables of options and of what must be said of them, as text: what test_plan.py and test_schedule.py have many rows of."""
import re
import pytest


def short(options):
    """A name for pytest's -k."""
    return re.sub(r"[^\w.+-]+", "_", str(options).replace("--", "")).strip("_")[:60] or "plain"


def rows_of(text, **names):
    """Parametrizes a test with lines of "options => pattern ~ pattern"; deeper lines belong to the one above. names: of options."""
    lines = [line.split(" => ") for line in re.sub(r"\n    ", " ", text).strip().split("\n")]
    full = lambda options: " ".join(names.get(word, word) for word in options.split())
    return pytest.mark.parametrize("options, patterns", [pytest.param(full(o), p.split(" ~ "), id=short(o)) for o, p in lines])
