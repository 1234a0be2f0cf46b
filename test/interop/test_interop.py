"""Our files and tokens read by Hugging Face's libraries, and theirs by us: models.py and tokens.py, run by a Python that has these
libraries, in a virtual environment of its own (build/venv). It needs PyPI once."""
import json, re
from pathlib import Path
import pytest
from suite import once, succeeds, virtual_environment

pytestmark = pytest.mark.sampled("interop")
LONG = 400
HERE = Path(__file__).parent
WANTED = HERE / "requirements.txt"
VENV = Path("build/venv")
CLAIM = re.compile(r"^def (test_\w+)\(", re.M)
CLAIMS = [(script, claim) for script in ("models", "tokens") for claim in CLAIM.findall((HERE / f"{script}.py").read_text())]
# Calls each claim of a script, and writes the error of each.
RUNNER = """
import json, runpy, sys, traceback
raised = {}
for name, claim in runpy.run_path(sys.argv[1]).items():
    if not name.startswith("test_"): continue
    try: raised[name] = claim()
    except Exception: raised[name] = traceback.format_exc()
json.dump(raised, open(sys.argv[2], "w"))
"""


def raised(script):
    def run(place):
        succeeds([VENV / "bin/python", "-c", RUNNER, HERE / f"{script}.py", place / "raised.json"], timeout=3600)

    virtual_environment(VENV, WANTED)
    return json.loads((once(f"interop {script}", run) / "raised.json").read_text())


@pytest.mark.parametrize("script, claim", CLAIMS, ids=[claim.removeprefix("test_") for _, claim in CLAIMS])
def test_with_hugging_faces_libraries(script, claim):
    said = raised(script)[claim]
    assert not said, said
