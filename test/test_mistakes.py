"""Mistakes made on purpose: each is made in a copy of the sources, and the tests that are meant for it must fail there.

test/exercises/list.txt has those of the chapters' exercises, test/mutations/list.txt small bugs in kernels, around them and in compressed
gradients; their heads say how to write one. `pytest test/test_mistakes.py --tier all -k forget-1-over-N -s` makes one, and shows what failed.
In the copy a program is built when a test asks for it, with little optimisation, because compiling takes longer than running."""
import contextlib, fcntl, functools, os, re, shutil, sys
from pathlib import Path
import pytest
import suite

LONG = 3
LISTS = "test/exercises/list.txt", "test/mutations/list.txt"
PASSED, FAILED, NOT_BUILT = 0, 1, 9  # what pytest ends with in the copy


class Mistake:
    """A record of a list: name, file, what, tests (list of "MODULE:EXPRESSION", with a ! before those that must pass), survives (why, or ""),
    old and new (lines without the blanks around them)."""

    def __init__(self, record):
        lines = record.splitlines()
        self.name, self.survives = lines[0].strip(), ""
        self.old, self.new = ([line[2:].strip() for line in lines if line[:2] == sign] for sign in ("- ", "+ "))
        for line in lines[1:]:
            if line[:2] in ("- ", "+ ") or not line.strip() or line[0] == "#": continue
            field, _, value = line.partition(" ")
            assert field in ("file", "what", "tests", "survives") and value, f"{self.name}: {line!r} is no line of a mistake"
            setattr(self, field, value.strip())
        self.tests = [entry.strip() for entry in self.tests.split(";")]
        assert self.what and self.old != self.new, f"{self.name} changes nothing"

    def make_in(self, folder):
        """Replaces the old lines, which follow one another in exactly one place of the file."""
        path = folder / self.file
        lines = path.read_text().split("\n")
        places = [i for i in range(len(lines)) if [line.strip() for line in lines[i:i + len(self.old)]] == self.old]
        assert len(places) == 1, f"{self.name}: its old lines are in {len(places)} places of {self.file}, not in one"
        indent = re.match(r"\s*", lines[places[0]])[0]
        lines[places[0]:places[0] + len(self.old)] = [indent + line for line in self.new]
        path.write_text("\n".join(lines))


def mistakes_of(path):
    found = [Mistake(record) for record in re.split(r"^== ", (suite.ROOT / path).read_text(), flags=re.M)[1:]]
    assert len({mistake.name for mistake in found}) == len(found), f"{path} has two mistakes of one name"
    return found


def copy_sources(folder):
    for name in "llmc", "dev", "test", "build/emulator":
        if (suite.ROOT / name).exists(): shutil.copytree(suite.ROOT / name, folder / name, symlinks=True)
    for path in *suite.ROOT.glob("train_gpt2_*.cu"), suite.ROOT / "Makefile", suite.ROOT / "pytest.ini": shutil.copy2(path, folder)
    for name in "nvidia", "data":  # the headers of CUDA's libraries and what programs read
        if (suite.ROOT / name).exists(): (folder / name).symlink_to(suite.ROOT / name)


@contextlib.contextmanager
def sound():
    """A copy of the sources without a mistake, for one at a time."""
    place = suite.once("a copy for mistakes", copy_sources)
    with open(f"{place}.use", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def run_tests(folder, entry):
    """Runs the tests of an entry in a copy: PASSED or FAILED, and what failed first. A deadlock is a failure, too."""
    module, _, which = entry.partition(":")
    files = [path for kind in ("py", "c") for path in folder.glob(f"test/*/{module}.{kind}")]
    assert len(files) == 1, f"there is no module {module}, or more than one"
    run = suite.command(sys.executable, [folder / "test/test_mistakes.py"], files, "-x -q --tier=all -p no:cacheprovider -p no:xdist", ["-k", which],
                        cwd=folder, timeout=1200)
    assert run.status in (PASSED, FAILED), run
    return run.status, next(iter(re.findall(r"^(?:FAILED|ERROR) \S*?::(.*)", run.out, re.M)), "")


def pass_without_a_mistake(entry):
    """Otherwise a failure would mean nothing. Once in a session for each entry."""
    def run(_):
        with sound() as folder: status, first = run_tests(folder, entry)
        assert status == PASSED, f"{entry} fails without a mistake: {first}"
    suite.once(f"without a mistake: {entry}", run)


@pytest.mark.parametrize("path", LISTS)
def test_every_mistake_can_be_made(path, tmp_path):
    for mistake in mistakes_of(path):
        copy = tmp_path / mistake.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(suite.ROOT / mistake.file, copy)
        mistake.make_in(tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", [mistake for path in LISTS for mistake in mistakes_of(path)], ids=lambda mistake: mistake.name)
def test_a_mistake_fails_the_tests_meant_for_it(mistake, tmp_path):
    for entry in mistake.tests: pass_without_a_mistake(entry.lstrip("!"))
    copy = tmp_path / "copy"
    with sound() as folder: shutil.copytree(folder, copy, symlinks=True)
    mistake.make_in(copy)
    print(f"\n{mistake.name}: {mistake.what}")
    as_expected = True
    for entry in mistake.tests:
        status, first = run_tests(copy, entry.lstrip("!"))
        expected = PASSED if entry[0] == "!" or mistake.survives else FAILED
        as_expected &= status == expected
        print(f"  {entry}: {'passes' if status == PASSED else 'fails: ' + first}{'' if status == expected else ' (NOT EXPECTED)'}")
    shutil.rmtree(copy)
    assert as_expected, f"{mistake.name} {'survives, says its list, and does not' if mistake.survives else 'is not noticed as it should be'}"


def main():
    """pytest in a copy."""
    command, make = suite.command, suite.make

    def make_in_copy(*arguments, **settings):
        try: return make(["CFLAGS=-O1 -Wno-unused"], *arguments, **settings)
        except AssertionError as error: pytest.exit(f"it cannot be built: {error}", NOT_BUILT)

    @functools.cache
    def program(name, precision="fp32", device="cpu", debug=False):
        path = "/".join(["build", *["-".join([*[device] * (device != "cpu"), *[precision] * (precision != "fp32"), *["debug"] * debug])], name])
        return make_in_copy(f"DEVICE={device} PRECISION={precision} DEBUG={'1' * debug}", path.replace("//", "/"))

    suite.make, suite.program = make_in_copy, program
    suite.command = lambda *arguments, timeout=300, **settings: command(*arguments, timeout=min(timeout, 150), **settings)
    return pytest.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
